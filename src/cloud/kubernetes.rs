//! From the settings of Kubernetes to the task that follows which pods there are.

use std::net::{IpAddr, SocketAddr};

use tokio::sync::watch;

use crate::config::cloud::cluster::Cluster;
use crate::drain::Drain;
#[cfg(feature = "kubernetes")]
use crate::registry::{cluster, endpoints};

/// The pods as Kubernetes knows them. All absent if it is not asked.
#[derive(Debug, Default)]
pub(super) struct Pods {
    /// All of them.
    #[cfg(feature = "kubernetes")]
    pub(super) endpoints: Option<watch::Receiver<endpoints::Known>>,
    /// Where the others take links.
    pub(super) siblings: Option<watch::Receiver<Vec<SocketAddr>>>,
}

/// Follows the pods, if a Service tells of them. `port` is where all of them take links.
#[cfg(feature = "kubernetes")]
pub(super) fn follow(cluster: Option<&Cluster>, pod: Option<IpAddr>, port: u16, drain: &Drain) -> Pods {
    // That there is an address was checked with the settings.
    let (Some(cluster), Some(pod)) = (cluster, pod) else { return Pods::default() };
    let Some(service) = cluster.service.clone() else { return Pods::default() };
    let followed = endpoints::EndpointWatch::new(reached(cluster), service, SocketAddr::new(pod, port));
    let pods = Pods { endpoints: Some(followed.endpoints()), siblings: Some(followed.siblings()) };
    drain.spawn(tracing::info_span!("pods"), followed.follow(drain.clone()));
    pods
}

/// There is nobody to follow: the settings have no cluster then.
#[cfg(not(feature = "kubernetes"))]
pub(super) fn follow(_: Option<&Cluster>, _: Option<IpAddr>, _: u16, _: &Drain) -> Pods {
    Pods::default()
}

/// How to reach it.
#[cfg(feature = "kubernetes")]
pub(super) fn reached(cluster: &Cluster) -> cluster::Cluster {
    let Cluster { kubeconfig, namespace, .. } = cluster.clone();
    cluster::Cluster { kubeconfig, namespace }
}
