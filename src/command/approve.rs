//! `tunnel approve`: issues, or denies, what the tunnel's pods and edges ask a cluster's signers for.

use std::future::Future;
use std::net::SocketAddr;
use std::path::PathBuf;
use std::time::Duration;

use tracing::{info, info_span};

use super::Failure;
use crate::admin::{Readiness, health};
use crate::config::Environment;
use crate::csr::Approver;
use crate::drain::Drain;
use crate::net::listen::Listener;
use crate::registry::Cluster;

/// Whose requests are approved.
#[derive(Debug, Clone, clap::Args)]
pub struct Approve {
    /// Service account of the tunnel's pods, which alone may have the certificates of profiles server and proxy-client.
    #[arg(long, value_name = "NAMESPACE:NAME", default_value = "edge-system:tunnel-cloud", value_parser = account)]
    pub account: String,
    /// Where this process answers /livez and /readyz: an address on loopback.
    #[arg(long, value_name = "ADDRESS", default_value = "127.0.0.1:51012", value_parser = loopback)]
    pub health: SocketAddr,
    /// kubeconfig file, outside of the cluster. [default: the service account of its own pod]
    #[arg(long = "k", value_name = "FILE")]
    pub kubeconfig: Option<PathBuf>,
}

/// Approves and denies until `stop` completes.
///
/// # Errors
///
/// There is no cluster to reach, or the port cannot be had.
pub async fn approve(
    asked: &Approve,
    env: &Environment,
    stop: impl Future<Output = ()>,
) -> Result<String, Failure> {
    let inside = env.kubernetes_service_host.is_some();
    if asked.kubeconfig.is_none() && !inside {
        let text = "this process runs outside a cluster: name its kubeconfig with --k";
        return Err(Failure::usage(text));
    }
    let listener = Listener::bind(asked.health).map_err(|error| Failure::unavailable(error.to_string()))?;
    let pods = format!("system:serviceaccount:{}", asked.account);
    let cluster = Cluster { kubeconfig: asked.kubeconfig.clone(), namespace: None };
    let approver = Approver::new(cluster, pods.clone(), env.kubernetes_service_host.clone());
    let (readiness, drain) = (Readiness::waiting_for(&[REQUESTS]), Drain::new());
    let shown = readiness.clone();
    let report = move |state| shown.set(REQUESTS, state);
    info!(%pods, health = %listener.at(), "requests of the tunnel's pods and edges are approved, all others are not touched");
    drain.spawn(info_span!("approver"), approver.run(report, drain.clone()));
    drain.spawn(info_span!("health"), health(listener, readiness, drain.clone()));
    stop.await;
    drain.begin();
    drain.finish(CLOSE_TIMEOUT, std::future::pending()).await;
    Ok(String::new())
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
    use super::*;

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
