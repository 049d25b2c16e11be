//! `tunnel approve`: issues, or denies, what the tunnel's pods and edges ask a cluster's signers for.

use std::future::Future;
use std::net::SocketAddr;
use std::path::PathBuf;
use std::time::Duration;

use bytes::Bytes;
use clap::ValueEnum;
use http::Method;
use tokio::net::TcpStream;
use tracing::{info, info_span};

use crate::admin::health::{Watchdog, health};
use crate::admin::readiness::Readiness;
use crate::command::CommandError;
use crate::command::status::exchange;
use crate::config::Environment;
use crate::kubernetes::cluster::Cluster;
use crate::kubernetes::csr::approver::Approver;
use crate::kubernetes::csr::names::NameLookup;
use tunnel_base::drain::Drain;
use tunnel_net::listen::TcpAccept;

/// Whose requests are approved, and for what.
#[derive(Debug, Clone, clap::Args)]
pub struct ApproveArgs {
    /// Service account of the tunnel's pods, which alone may have the certificates of profiles server and proxy-client.
    #[arg(long, value_name = "NAMESPACE:NAME", default_value = "edge-system:tunnel-cloud", value_parser = account)]
    pub account: String,
    /// Services of that namespace by which the pods' ports are reached, as in services of their [mode.cloud.csr]: of their names
    /// and addresses alone a server may have a certificate.
    #[arg(long = "service", value_name = "NAME,...", default_value = "tunnel-cloud", value_delimiter = ',')]
    pub services: Vec<String>,
    /// Names and addresses that it may have beside, as in names there.
    #[arg(long = "name", value_name = "HOST,...", value_delimiter = ',')]
    pub names: Vec<String>,
    /// Where this process answers /livez and /readyz: an address on loopback.
    #[arg(long, value_name = "ADDRESS", default_value = "127.0.0.1:51012", value_parser = loopback)]
    pub health: SocketAddr,
    /// Approve nothing, but ask the approver at --health how it is: whether it lives, or is ready as well. A probe of a container
    /// runs this, as nobody else reaches that address.
    #[arg(long, value_name = "WHAT")]
    pub check: Option<HealthCheck>,
    /// kubeconfig file, outside of the cluster. [default: the service account of its own pod]
    #[arg(long = "k", value_name = "FILE")]
    pub kubeconfig: Option<PathBuf>,
}

/// What is asked of an approver.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum HealthCheck {
    /// Whether its work goes on.
    Live,
    /// Whether it sees requests.
    Ready,
}

/// Approves and denies until `stop` completes, or says how the approver is that does.
///
/// # Errors
///
/// There is no cluster to reach, or the port cannot be had; the approver that is asked does not answer, or is not well.
pub async fn approve(
    asked: &ApproveArgs,
    env: &Environment,
    stop: impl Future<Output = ()>,
) -> Result<String, CommandError> {
    if let Some(what) = asked.check {
        return check(asked.health, what).await;
    }
    let inside = env.kubernetes_service_host.is_some();
    if asked.kubeconfig.is_none() && !inside {
        let text = "this process runs outside a cluster: name its kubeconfig with --k";
        return Err(CommandError::usage(text));
    }
    let listener =
        TcpAccept::bind(asked.health).map_err(|error| CommandError::unavailable(error.to_string()))?;
    let pods = format!("system:serviceaccount:{}", asked.account);
    let namespace = asked.account.split_once(':').map(|(namespace, _)| namespace.to_owned());
    let cluster = Cluster { kubeconfig: asked.kubeconfig.clone(), namespace };
    let names = asked.names.iter().map(|name| name.to_ascii_lowercase()).collect();
    let approver =
        Approver::new(cluster, pods.clone(), NameLookup { services: asked.services.clone(), names });
    let (readiness, pulse, drain) = (Readiness::waiting_for(&[REQUESTS]), Watchdog::new(), Drain::new());
    let (shown, felt) = (readiness.clone(), pulse.clone());
    let report = move |state| {
        felt.kick();
        shown.set(REQUESTS, state);
    };
    info!(%pods, health = %listener.at(), "requests of the tunnel's pods and edges are approved, all others are not touched");
    drain.spawn(info_span!("approver"), approver.run(report, drain.clone()));
    drain.spawn(info_span!("health"), health(listener, readiness, pulse, drain.clone()));
    stop.await;
    drain.start();
    drain.finish(CLOSE_TIMEOUT, std::future::pending()).await;
    Ok(String::new())
}

/// Asks the approver that answers there.
async fn check(at: SocketAddr, what: HealthCheck) -> Result<String, CommandError> {
    let failed =
        |cause: String| CommandError::unavailable(format!("the approver at {at} does not answer: {cause}"));
    let stream = TcpStream::connect(at).await.map_err(|cause| failed(cause.to_string()))?;
    let path = match what {
        HealthCheck::Live => "/livez",
        HealthCheck::Ready => "/readyz",
    };
    let (status, body) = exchange(stream, Method::GET, path, Bytes::new()).await.map_err(failed)?;
    let said = String::from_utf8_lossy(&body).trim_end().to_owned();
    if status == 200 {
        Ok(said)
    } else {
        Err(CommandError::unavailable(format!("the approver at {at}: {said}")))
    }
}

fn account(text: &str) -> Result<String, &'static str> {
    match text.split_once(':') {
        Some((namespace, name)) if !namespace.is_empty() && !name.is_empty() && !name.contains(':') => {
            Ok(text.to_owned())
        }
        _ => Err("want the namespace and the name of a service account, as in edge-system:tunnel-cloud"),
    }
}

fn loopback(text: &str) -> Result<SocketAddr, &'static str> {
    let at = text.parse::<SocketAddr>().ok().filter(|at| at.ip().is_loopback());
    at.ok_or("want an address on loopback with a port, as 127.0.0.1:51012: nobody else is answered")
}

/// Its condition in `/readyz`.
const REQUESTS: &str = "requests";

/// For what is under way at the end.
const CLOSE_TIMEOUT: Duration = Duration::from_secs(3);

#[cfg(test)]
mod tests {
    use tokio::sync::oneshot;

    use super::*;

    fn asked(health: SocketAddr, check: Option<HealthCheck>) -> ApproveArgs {
        let (account, names, kubeconfig) = ("a:b".to_owned(), Vec::new(), Some("/none".into()));
        ApproveArgs { account, services: Vec::new(), names, health, check, kubeconfig }
    }

    /// Its kubeconfig is not there, so it sees no request, and says so.
    #[tokio::test]
    async fn a_probe_asks_the_approver_that_runs_and_fails_where_there_is_none() {
        let port = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
        let at = port.local_addr().unwrap();
        drop(port);
        let (env, (stop, stopped)) = (Environment::default(), oneshot::channel::<()>());
        let gone =
            approve(&asked(at, Some(HealthCheck::Live)), &env, std::future::pending()).await.unwrap_err();
        assert!(gone.code == 69 && gone.text.contains("does not answer"), "{gone}");
        let running = asked(at, None);
        let runs = approve(&running, &env, async { drop(stopped.await) });
        let asks = async {
            while approve(&asked(at, Some(HealthCheck::Live)), &env, std::future::pending()).await.is_err() {
                tokio::task::yield_now().await;
            }
            let unready = approve(&asked(at, Some(HealthCheck::Ready)), &env, std::future::pending())
                .await
                .unwrap_err();
            assert!(unready.text.contains("requests: "), "{unready}");
            stop.send(()).unwrap();
        };
        let (done, ()) = tokio::join!(runs, asks);
        done.unwrap();
    }

    #[test]
    fn an_account_has_a_namespace_and_a_name_and_health_is_for_this_machine() {
        assert_eq!(account("a:b").unwrap(), "a:b");
        for wrong in ["", "a", ":b", "a:", "a:b:c"] {
            assert!(account(wrong).is_err(), "{wrong}");
        }
        assert!(loopback("[::1]:0").is_ok());
        for wrong in ["", "0.0.0.0:1", "10.0.0.1:1", "127.0.0.1"] {
            assert!(loopback(wrong).is_err(), "{wrong}");
        }
    }
}
