//! Objects that servers keep up to date: the ports of a Service, and the names of nodes for DNS.

use std::collections::BTreeSet;
use std::net::IpAddr;

use tokio::sync::watch;
use tracing::info_span;

use crate::admin::readiness::Readiness;
use crate::config::kubernetes::node_names::NodeNameSettings;
use crate::config::kubernetes::ports::NodePortsConfig;
use crate::kubernetes::api::server::access;
use tunnel_base::drain::Drain;
use tunnel_base::policy::ports::ConfigMapPorts;
use tunnel_kube::reconcile::node_names::{NamesReconcilerParams, NodeNamesReconciler};
use tunnel_kube::reconcile::ports::{PortWatch, PortWatchParams};

/// Returns the ports of nodes that are redirected here, kept up to date with a ConfigMap. Its errors appear in
/// `readiness`. `own` are the ports at which this server listens.
pub(crate) fn ports(
    ports: &NodePortsConfig,
    own: BTreeSet<u16>,
    readiness: &Readiness,
    drain: &Drain,
) -> watch::Receiver<ConfigMapPorts> {
    let params = PortWatchParams {
        cluster: access(&ports.cluster),
        namespace: ports.namespace.clone(),
        configmap: ports.configmap.clone(),
        service: ports.service.clone(),
        own,
        http: ports.http,
        https: ports.https,
    };
    let readiness = readiness.clone();
    let watch = PortWatch::new(params, move |state| readiness.set_degraded("node_ports", state));
    let known = watch.ports();
    drain.spawn(info_span!("ports"), watch.follow(drain.clone()));
    known
}

/// Maintains the names of nodes for DNS; errors appear in `readiness`. Returns the addresses in these records that do
/// not belong to any server. `pod_name` identifies this server to the others.
pub(crate) fn node_names(
    names: &NodeNameSettings,
    pod_name: &str,
    readiness: &Readiness,
    drain: &Drain,
) -> watch::Receiver<BTreeSet<IpAddr>> {
    let params = NamesReconcilerParams {
        cluster: access(&names.cluster),
        namespace: names.namespace.clone(),
        configmap: names.configmap.clone(),
        key: names.key.clone(),
        lease: names.lease.clone(),
        identity: format!("{}_{:016x}", pod_name, rand::random::<u64>()),
        edges: names.edges.clone(),
        names: names.names.clone(),
        service: names.service.clone(),
        holders: names.holders.clone(),
    };
    let readiness = readiness.clone();
    let kept = NodeNamesReconciler::new(params, move |state| readiness.set_degraded("node_names", state));
    let service = kept.service();
    drain.spawn(info_span!("node names"), kept.run(drain.clone()));
    service
}
