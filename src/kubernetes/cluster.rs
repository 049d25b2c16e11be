//! The pods of the servers, the Nodes, and records in a ConfigMap.

use std::collections::BTreeSet;
use std::net::{IpAddr, SocketAddr};

use futures_util::future::BoxFuture;
use tokio::sync::watch;
use tokio::time::Instant;
use tracing::info_span;

use crate::config::cluster::ClusterSettings;
use crate::kubernetes::ClusterNodes;
use crate::publish::{PublishError, RecordStore};
use tunnel_base::drain::Drain;
use tunnel_kube::cluster::Cluster;
use tunnel_kube::configmap::{ConfigMap, ConfigMapParams, GATHERING, LivenessProbe};
use tunnel_kube::members::{EndpointWatch, KnownEndpoints, NodeWatch};

/// Converts the config of a cluster.
pub(crate) fn access(cluster: &ClusterSettings) -> Cluster {
    let ClusterSettings { kubeconfig, namespace, .. } = cluster.clone();
    Cluster { kubeconfig, namespace }
}

/// The pods of the servers as reported by Kubernetes; all absent if that is not used.
#[derive(Debug, Default)]
pub(crate) struct ServerPods {
    /// All pods.
    endpoints: Option<watch::Receiver<KnownEndpoints>>,
    /// The gRPC addresses of the peers.
    peers: Option<watch::Receiver<Vec<SocketAddr>>>,
    /// The reason why the pods are not known.
    unlisted: Option<watch::Receiver<Option<String>>>,
}

impl ServerPods {
    /// Watches the pods of the servers, if the config names a Service. `pod` is this server's address, `port` their
    /// common gRPC port.
    pub(crate) fn follow(
        cluster: Option<&ClusterSettings>,
        pod: Option<IpAddr>,
        port: u16,
        drain: &Drain,
    ) -> Self {
        // The config check ensures that there is an address.
        let (Some(cluster), Some(pod)) = (cluster, pod) else { return Self::default() };
        let Some(service) = cluster.service.clone() else { return Self::default() };
        let watch = EndpointWatch::new(access(cluster), service, SocketAddr::new(pod, port));
        let (endpoints, peers) = (Some(watch.endpoints()), Some(watch.peers()));
        let pods = Self { endpoints, peers, unlisted: Some(watch.unlisted()) };
        drain.spawn(info_span!("server_pods"), watch.follow(drain.clone()));
        pods
    }

    /// Returns the gRPC addresses of the peers.
    pub(crate) fn peers(&self) -> Option<watch::Receiver<Vec<SocketAddr>>> {
        self.peers.clone()
    }

    /// Returns the reason why the pods are not known; `None` while they are.
    pub(crate) fn unlisted(&self) -> Option<watch::Receiver<Option<String>>> {
        self.unlisted.clone()
    }

    /// Returns a store for the records of the server at an address, in the ConfigMap of a name. `lives` checks which
    /// servers with records are alive.
    pub(crate) fn records(
        &self,
        cluster: &ClusterSettings,
        name: String,
        server: IpAddr,
        lives: impl Fn(IpAddr) -> BoxFuture<'static, bool> + Send + Sync + 'static,
    ) -> Option<Box<dyn RecordStore>> {
        let (cluster, endpoints) = (access(cluster), self.endpoints.clone());
        let lives = LivenessProbe::new(lives);
        Some(Box::new(ConfigMap::new(ConfigMapParams { cluster, name, server, endpoints, lives })))
    }
}

impl RecordStore for ConfigMap {
    fn write<'a>(&'a mut self, records: &'a BTreeSet<String>) -> BoxFuture<'a, Result<(), PublishError>> {
        Box::pin(async { Ok(Self::write(self, records).await?) })
    }

    fn withdraw(&mut self) -> BoxFuture<'_, Result<(), PublishError>> {
        Box::pin(async { Ok(Self::withdraw(self).await?) })
    }

    fn servers(&self) -> BoxFuture<'_, BTreeSet<IpAddr>> {
        Box::pin(std::future::ready(Self::servers(self)))
    }

    fn due(&self) -> Instant {
        Self::due(self)
    }

    fn gathering(&self) -> std::time::Duration {
        GATHERING
    }
}

/// Watches the Nodes of a cluster. `edges` is the label of edges from the config, with its value.
pub(crate) fn follow_nodes(
    cluster: &ClusterSettings,
    edges: Option<(String, String)>,
    drain: &Drain,
) -> Option<ClusterNodes> {
    let watch = NodeWatch::new(access(cluster), edges);
    let nodes = watch.known();
    drain.spawn(info_span!("nodes"), watch.follow(drain.clone()));
    Some(nodes)
}

/// Returns the names of all Nodes with this label (`name=value`), or of all Nodes.
///
/// # Errors
///
/// Returns why they cannot be listed.
pub(crate) async fn nodes(cluster: ClusterSettings, label: Option<&str>) -> Result<BTreeSet<String>, String> {
    access(&cluster).nodes(label).await.map_err(|cause| cause.to_string())
}
