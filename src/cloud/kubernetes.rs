//! Starts the task that follows the ready pods of a Service in Kubernetes.

use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;

use tokio::sync::watch;

use crate::admin::Readiness;
use crate::config::cloud::{AddressSettings, ClusterSettings};
use crate::drain::Drain;
use crate::registry::AddressBook;
#[cfg(feature = "kubernetes")]
use crate::registry::{self, AddressWatch, EndpointWatch, KnownEndpoints};

/// The pods as Kubernetes reports them; all absent if it is not asked.
#[derive(Debug, Default)]
pub(super) struct Pods {
    /// All pods.
    #[cfg(feature = "kubernetes")]
    pub(super) endpoints: Option<watch::Receiver<KnownEndpoints>>,
    /// The gRPC addresses of the others.
    pub(super) siblings: Option<watch::Receiver<Vec<SocketAddr>>>,
}

/// Follows the pods, if the settings name a Service. `port` is the gRPC port of all of them.
#[cfg(feature = "kubernetes")]
pub(super) fn follow(
    cluster: Option<&ClusterSettings>,
    pod: Option<IpAddr>,
    port: u16,
    drain: &Drain,
) -> Pods {
    // That there is an address was checked with the settings.
    let (Some(cluster), Some(pod)) = (cluster, pod) else { return Pods::default() };
    let Some(service) = cluster.service.clone() else { return Pods::default() };
    let followed = EndpointWatch::new(reached(cluster), service, SocketAddr::new(pod, port));
    let pods = Pods { endpoints: Some(followed.endpoints()), siblings: Some(followed.siblings()) };
    drain.spawn(tracing::info_span!("pods"), followed.follow(drain.clone()));
    pods
}

/// Does nothing: a build without Kubernetes has no cluster in its settings.
#[cfg(not(feature = "kubernetes"))]
pub(super) fn follow(_: Option<&ClusterSettings>, _: Option<IpAddr>, _: u16, _: &Drain) -> Pods {
    Pods::default()
}

/// The address book, kept up to date with the cluster if one is set; what the cluster does not list is a note in
/// `readiness`.
#[cfg_attr(not(feature = "kubernetes"), expect(unused_variables, reason = "there is no cluster then"))]
pub(super) fn follow_addresses(
    settings: &AddressSettings,
    readiness: &Readiness,
    drain: &Drain,
) -> Arc<AddressBook> {
    let book = Arc::new(AddressBook::new(settings.fixed.clone()));
    #[cfg(feature = "kubernetes")]
    if let Some(cluster) = &settings.cluster {
        let readiness = readiness.clone();
        let report = move |what, state| readiness.note(what, state);
        let followed = AddressWatch::new(reached(cluster), book.clone(), report);
        drain.spawn(tracing::info_span!("addresses"), followed.follow(drain.clone()));
    }
    book
}

/// How to reach the cluster.
#[cfg(feature = "kubernetes")]
pub(super) fn reached(cluster: &ClusterSettings) -> registry::Cluster {
    let ClusterSettings { kubeconfig, namespace, .. } = cluster.clone();
    registry::Cluster { kubeconfig, namespace }
}
