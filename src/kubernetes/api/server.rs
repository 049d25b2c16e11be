//! What a server follows, keeps up to date and requests in the cluster. Problems with it appear in the readiness.

pub(crate) mod csr;

use std::collections::BTreeSet;
use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;

use futures_util::future::BoxFuture;
use tokio::sync::watch;
use tracing::info_span;

use crate::admin::readiness::Readiness;
use crate::config::cluster::{ClusterSettings, ObjectName};
use crate::config::kubernetes::ServiceAccountConfig;
use crate::config::kubernetes::node_names::NodeNameSettings;
use crate::config::kubernetes::ports::NodePortsConfig;
use crate::kubernetes::{EdgeWatches, ServerPods};
use tunnel_base::addresses::AddressBook;
use tunnel_base::addresses::cluster_state::{KnownNodes, PodTokenReviewer};
use tunnel_base::drain::Drain;
use tunnel_base::policy::ports::ConfigMapPorts;
use tunnel_base::stores::{RecordStore, TextStore};
use tunnel_kube::address_watch::AddressBookUpdater;
use tunnel_kube::cluster::{Cluster, StateReport};
use tunnel_kube::configmap::{ConfigMapParams, ConfigMapRecords};
use tunnel_kube::endpoint_watch::EndpointWatch;
use tunnel_kube::node_watch::follow_node_labels;
use tunnel_kube::pod_tokens::last_known::LastKnown;
use tunnel_kube::pod_tokens::{PodTokenSettings, PodTokens};
use tunnel_kube::reconcile::node_names::{NamesReconcilerParams, NodeNamesReconciler};
use tunnel_kube::reconcile::ports::{PortWatch, PortWatchParams};
use tunnel_kube::secret::SecretEntry;

/// Keeps the address book up to date with the cluster.
pub(crate) fn follow_addresses(
    cluster: &ClusterSettings,
    book: &Arc<AddressBook>,
    readiness: &Readiness,
    drain: &Drain,
) {
    let readiness = readiness.clone();
    let report = Box::new(move |what, state| readiness.set_degraded(what, state));
    let watch = AddressBookUpdater::new(access(cluster), book.clone(), report);
    drain.spawn(info_span!("addresses"), watch.follow(drain.clone()));
}

/// Watches the pods of the servers. `service` is the Service that lists them, `own` this server's address with the
/// gRPC port of all servers.
pub(crate) fn follow_pods(
    cluster: &ClusterSettings,
    service: String,
    own: SocketAddr,
    drain: &Drain,
) -> ServerPods {
    let watch = EndpointWatch::new(access(cluster), service, own);
    let pods = ServerPods {
        endpoints: watch.endpoints.subscribe(),
        peers: watch.peers.subscribe(),
        unwatched: watch.unwatched.subscribe(),
    };
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

/// Returns the key of a Secret as a store.
pub(crate) fn shared_text(cluster: &ClusterSettings, name: String, key: &'static str) -> Box<dyn TextStore> {
    Box::new(SecretEntry::new(access(cluster), name, key))
}

/// Watches the Nodes of a cluster, and the pods of edges if the config has their ServiceAccount. `edges` is the label of
/// edges from the config, with its value, and `before` is what this process knew of the Nodes before.
pub(crate) fn follow_nodes(
    cluster: &ClusterSettings,
    edges: Option<(String, String)>,
    account: Option<&ServiceAccountConfig>,
    before: KnownNodes,
    readiness: &Readiness,
    drain: &Drain,
) -> EdgeWatches {
    let mut known = LastKnown::recall(account.and_then(|account| account.file.as_deref()));
    let nodes = watch::Sender::new(before.or(known.nodes.take()));
    let report = report(readiness, "labels of Nodes");
    let following = follow_node_labels(access(cluster), edges, nodes.clone(), report, drain.clone());
    drain.spawn(info_span!("nodes"), following);
    let pods = account.map(|account| follow_edge_pods(account, known, nodes.clone(), readiness, drain));
    (nodes.subscribe(), pods)
}

/// Follows the pods of a ServiceAccount, and returns who judges their tokens. `known` is what an earlier process knew.
fn follow_edge_pods(
    config: &ServiceAccountConfig,
    known: LastKnown,
    nodes: watch::Sender<KnownNodes>,
    readiness: &Readiness,
    drain: &Drain,
) -> Arc<dyn PodTokenReviewer> {
    let ServiceAccountConfig { name, audience, outage, cluster, file } = config.clone();
    let account = name.unwrap_or_default();
    let settings = PodTokenSettings { cluster: access(&cluster), account, audience, outage, file };
    let tokens = PodTokens::new(settings, known, nodes, report(readiness, "pods of edges"));
    drain.spawn(info_span!("edge_pods"), tokens.clone().follow(drain.clone()));
    tokens
}

/// Keeps the ports of nodes that are redirected here up to date with a ConfigMap, and a Service with them. `own` are the
/// ports at which this server listens.
pub(crate) fn keep_ports(
    ports: &NodePortsConfig,
    own: BTreeSet<u16>,
    redirected: watch::Sender<ConfigMapPorts>,
    readiness: &Readiness,
    drain: &Drain,
) {
    let NodePortsConfig { cluster, namespace, configmap, service, http, https, .. } = ports.clone();
    let cluster = access(&cluster);
    let ObjectName(namespace) = namespace;
    let ObjectName(configmap) = configmap;
    let params = PortWatchParams { cluster, namespace, configmap, service, own, http, https };
    let watch = PortWatch::new(params, redirected, report(readiness, "node_ports"));
    drain.spawn(info_span!("ports"), watch.follow(drain.clone()));
}

/// Maintains the names of nodes for DNS. `service` gets the addresses in these records that do not belong to any server,
/// and `pod_name` identifies this server to the others.
pub(crate) fn keep_node_names(
    names: &NodeNameSettings,
    pod_name: &str,
    service: watch::Sender<BTreeSet<IpAddr>>,
    readiness: &Readiness,
    drain: &Drain,
) {
    let params = NamesReconcilerParams {
        cluster: access(&names.cluster),
        namespace: names.namespace.0.clone(),
        configmap: names.configmap.0.clone(),
        key: names.key.0.clone(),
        lease: names.lease.0.clone(),
        identity: format!("{}_{:016x}", pod_name, rand::random::<u64>()),
        edges: names.edges.clone(),
        names: names.names.clone(),
        service: names.service.0.clone(),
        holders: names.holders.clone(),
    };
    let kept = NodeNamesReconciler::new(params, service, report(readiness, "node_names"));
    drain.spawn(info_span!("node names"), kept.run(drain.clone()));
}

fn report(readiness: &Readiness, what: &'static str) -> StateReport {
    let readiness = readiness.clone();
    Box::new(move |state| readiness.set_degraded(what, state))
}

/// Returns the names of all Nodes with this label (`name=value`), or of all Nodes.
///
/// # Errors
///
/// Returns why they cannot be listed.
pub(crate) async fn nodes(cluster: ClusterSettings, label: Option<&str>) -> Result<BTreeSet<String>, String> {
    access(&cluster).nodes(label).await.map_err(|cause| cause.to_string())
}

/// Converts the config of a cluster.
fn access(cluster: &ClusterSettings) -> Cluster {
    let ClusterSettings { kubeconfig, namespace } = cluster.clone();
    Cluster { kubeconfig, namespace }
}
