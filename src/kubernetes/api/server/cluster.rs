//! The pods of the servers, the Nodes, and records in a ConfigMap.

use std::collections::BTreeSet;
use std::net::{IpAddr, SocketAddr};

use futures_util::future::BoxFuture;
use tracing::info_span;

use crate::admin::readiness::Readiness;
use crate::config::cluster::ClusterSettings;
use crate::config::kubernetes::ServiceAccountConfig;
use crate::kubernetes::api::server::{access, pod_tokens};
use crate::kubernetes::{EdgeWatches, ServerPods};
use tunnel_base::drain::Drain;
use tunnel_base::record_store::RecordStore;
use tunnel_kube::configmap::{ConfigMapParams, ConfigMapRecords};
use tunnel_kube::endpoint_watch::EndpointWatch;
use tunnel_kube::node_watch::NodeWatch;
use tunnel_kube::pod_tokens::last_known::LastKnown;

/// Watches the pods of the servers. `service` is the Service that lists them, `own` this server's address with the
/// gRPC port of all servers.
pub(crate) fn follow_pods(
    cluster: &ClusterSettings,
    service: String,
    own: SocketAddr,
    drain: &Drain,
) -> ServerPods {
    let watch = EndpointWatch::new(access(cluster), service, own);
    let pods =
        ServerPods { endpoints: watch.endpoints(), peers: watch.peers(), unwatched: watch.unwatched() };
    drain.spawn(info_span!("server_pods"), watch.follow(drain.clone()));
    pods
}

/// Returns a store for the records of the server at an address, in the ConfigMap of a name. `lives` checks which
/// servers with records are alive. Without `pods`, records of dead servers remain.
pub(crate) fn records(
    cluster: &ClusterSettings,
    name: String,
    server: IpAddr,
    pods: Option<&ServerPods>,
    lives: impl Fn(IpAddr) -> BoxFuture<'static, bool> + Send + Sync + 'static,
) -> Box<dyn RecordStore> {
    let cluster = access(cluster);
    let endpoints = pods.map(|pods| pods.endpoints.clone());
    let liveness = Box::new(lives);
    Box::new(ConfigMapRecords::new(ConfigMapParams { cluster, name, server, endpoints, liveness }))
}

/// Watches the Nodes of a cluster, and the pods of edges if the config has their ServiceAccount. `edges` is the label of
/// edges from the config, with its value. Problems with the cluster appear in `readiness`.
pub(crate) fn follow_nodes(
    cluster: &ClusterSettings,
    edges: Option<(String, String)>,
    account: Option<&ServiceAccountConfig>,
    readiness: &Readiness,
    drain: &Drain,
) -> EdgeWatches {
    let mut known = LastKnown::recall(account.and_then(|account| account.file.as_deref()));
    let of_nodes = readiness.clone();
    let report = move |state| of_nodes.set_degraded("labels of Nodes", state);
    let watch = NodeWatch::new(access(cluster), edges, known.nodes.take(), report);
    let nodes = watch.known();
    drain.spawn(info_span!("nodes"), watch.follow(drain.clone()));
    let pods = account.map(|account| pod_tokens::follow(account, known, nodes.clone(), readiness, drain));
    (nodes, pods)
}

/// Returns the names of all Nodes with this label (`name=value`), or of all Nodes.
///
/// # Errors
///
/// Returns why they cannot be listed.
pub(crate) async fn nodes(cluster: ClusterSettings, label: Option<&str>) -> Result<BTreeSet<String>, String> {
    access(&cluster).nodes(label).await.map_err(|cause| cause.to_string())
}
