//! `tunnel approve`: approves or denies certificate requests of the tunnel's servers and edges.

use std::net::SocketAddr;
use std::path::PathBuf;
use std::time::Duration;

use bytes::Bytes;
use clap::ValueEnum;
use http::Method;
use tokio::net::TcpStream;
use tracing::{info, info_span};

use crate::admin::health::{ProgressWatchdog, health};
use crate::admin::readiness::Readiness;
use crate::command::admin_sockets::exchange;
use crate::command::{CommandError, CommandResult};
use crate::config::Environment;
use crate::config::cluster::ClusterSettings;
use crate::parts::{self, with_kubernetes};
use tunnel_base::drain::Drain;
use tunnel_net::listen::TcpListenSocket;

/// Arguments of `tunnel approve`.
#[derive(Debug, Clone, clap::Args)]
pub struct ApproveArgs {
    /// Service account of the tunnel's servers. Only it may have certificates of the profiles server and proxy-client.
    #[arg(long, value_name = "NAMESPACE:NAME", default_value = "edge-system:tunnel-cloud", value_parser = account)]
    pub service_account: String,
    /// Services of that namespace that route to the servers' ports, as in services of their [server.csr]. A
    /// server's certificate may contain only their names and addresses.
    #[arg(long = "service", value_name = "NAME,...", default_value = "tunnel-cloud", value_delimiter = ',')]
    pub services: Vec<String>,
    /// Additional names and addresses that it may contain, as in names there.
    #[arg(long = "san", value_name = "HOST,...", value_delimiter = ',')]
    pub names: Vec<String>,
    /// Loopback address that serves /livez and /readyz.
    #[arg(long, value_name = "ADDRESS", default_value = "127.0.0.1:9012", value_parser = loopback)]
    pub health_listen: SocketAddr,
    /// Approve nothing, but query the approver at --health-listen: whether it is alive, or ready too. For container
    /// probes, because only this machine can reach that address.
    #[arg(long, value_name = "PROBE")]
    pub probe: Option<HealthProbe>,
    /// Kubeconfig file, outside the cluster. [default: the service account of its own pod]
    #[arg(long, value_name = "FILE")]
    pub kubeconfig: Option<PathBuf>,
}

/// The state of an approver to query.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum HealthProbe {
    /// Its work progresses.
    Live,
    /// It sees requests.
    Ready,
}

/// Approves and denies until `stop` completes, or queries a running approver.
///
/// # Errors
///
/// Returns an error if there is no cluster, or the port is unavailable; with `--probe`, if the approver does not answer
/// or is not healthy.
pub async fn approve(args: &ApproveArgs, env: &Environment, stop: impl Future<Output = ()>) -> CommandResult {
    if let Some(what) = args.probe {
        return check(args.health_listen, what).await;
    }
    parts::KUBERNETES.map_err(CommandError::usage)?;
    let inside = env.kubernetes_service_host.is_some();
    if args.kubeconfig.is_none() && !inside {
        let text = "this process runs outside a cluster; set its kubeconfig with --kubeconfig";
        return Err(CommandError::usage(text));
    }
    let listener = TcpListenSocket::bind(args.health_listen)
        .map_err(|error| CommandError::unavailable(error.to_string()))?;
    let pods = format!("system:serviceaccount:{}", args.service_account);
    let namespace = args.service_account.split_once(':').map(|(namespace, _)| namespace.to_owned());
    let cluster = ClusterSettings { kubeconfig: args.kubeconfig.clone(), namespace };
    let services = args.services.clone();
    let names = args.names.iter().map(|name| name.to_ascii_lowercase());
    let readiness = Readiness::waiting_for(&[REQUESTS]);
    let pulse = ProgressWatchdog::new();
    let drain = Drain::new();
    let shown = readiness.clone();
    let felt = pulse.clone();
    let report = move |state| {
        // Any report proves that the loop runs, that of an error too.
        felt.kick();
        shown.set(REQUESTS, state);
    };
    info!(account = %pods, health = %listener.at(), "approver started");
    with_kubernetes!(api::server::csr::approve(&cluster, pods, services, names.collect(), report, &drain), else ());
    drain.spawn(info_span!("health"), health(listener, readiness, pulse, drain.clone()));
    stop.await;
    drain.start();
    drain.finish(CLOSE_TIMEOUT, std::future::pending()).await;
    Ok(String::new())
}

/// Queries the approver at an address.
async fn check(at: SocketAddr, what: HealthProbe) -> CommandResult {
    let failed =
        |cause: String| CommandError::unavailable(format!("the approver at {at} does not answer: {cause}"));
    let stream = TcpStream::connect(at).await.map_err(|cause| failed(cause.to_string()))?;
    let path = match what {
        HealthProbe::Live => "/livez",
        HealthProbe::Ready => "/readyz",
    };
    let (status, body) = exchange(stream, Method::GET, path, Bytes::new()).await.map_err(failed)?;
    let answer = body.trim_end().to_owned();
    if status == 200 {
        Ok(answer)
    } else {
        Err(CommandError::unavailable(format!("the approver at {at}: {answer}")))
    }
}

fn account(text: &str) -> Result<String, &'static str> {
    match text.split_once(':') {
        Some((namespace, name)) if !namespace.is_empty() && !name.is_empty() && !name.contains(':') => {
            Ok(text.to_owned())
        }
        _ => Err("expected namespace and name of a service account, as in edge-system:tunnel-cloud"),
    }
}

fn loopback(text: &str) -> Result<SocketAddr, &'static str> {
    let at = text.parse::<SocketAddr>().ok().filter(|at| at.ip().is_loopback());
    at.ok_or(
        "expected a loopback address with a port, such as 127.0.0.1:9012; remote clients are not answered",
    )
}

/// The condition in `/readyz`.
const REQUESTS: &str = "requests";

/// For requests in progress at the end.
const CLOSE_TIMEOUT: Duration = Duration::from_secs(3);

#[cfg(test)]
mod tests {
    use tokio::sync::oneshot;

    use super::*;

    fn args(health_listen: SocketAddr, probe: Option<HealthProbe>) -> ApproveArgs {
        let (service_account, names, kubeconfig) = ("a:b".to_owned(), Vec::new(), Some("/none".into()));
        ApproveArgs { service_account, services: Vec::new(), names, health_listen, probe, kubeconfig }
    }

    /// The kubeconfig does not exist, so the approver sees no requests, and reports that.
    #[tokio::test]
    async fn a_health_check_queries_the_running_approver_and_fails_without_one() {
        let port = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
        let at = port.local_addr().unwrap();
        drop(port);
        let (env, (stop, stopped)) = (Environment::default(), oneshot::channel::<()>());
        let unanswered =
            approve(&args(at, Some(HealthProbe::Live)), &env, std::future::pending()).await.unwrap_err();
        assert!(unanswered.code == 69 && unanswered.text.contains("does not answer"), "{unanswered}");
        let running = args(at, None);
        let runs = approve(&running, &env, async { drop(stopped.await) });
        let client = async {
            while approve(&args(at, Some(HealthProbe::Live)), &env, std::future::pending()).await.is_err() {
                tokio::task::yield_now().await;
            }
            let unready =
                approve(&args(at, Some(HealthProbe::Ready)), &env, std::future::pending()).await.unwrap_err();
            assert!(unready.text.contains("requests: "), "{unready}");
            stop.send(()).unwrap();
        };
        let (done, ()) = tokio::join!(runs, client);
        done.unwrap();
    }

    #[test]
    fn an_account_needs_namespace_and_name_and_health_listens_on_loopback_only() {
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
