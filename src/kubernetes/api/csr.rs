//! The certificate that the cluster's signers issue for an edge.

use tracing::info_span;

use crate::config::edge::csr::EdgeCsrConfig;
use tunnel_base::drain::Drain;
use tunnel_kube::cluster::Cluster;
use tunnel_kube::csr::profile::Profile;
use tunnel_kube::csr::renewer::{CertificateNameSource, CertificateRenewer};
use tunnel_proto::names::NodeName;

/// Starts the task that has the edge's certificate issued and renewed, until draining starts. `report` receives the
/// readiness condition and its state.
pub(crate) fn keep_edge(
    csr: EdgeCsrConfig,
    node: &NodeName,
    drain: &Drain,
    report: impl Fn(&'static str, Result<(), String>) + Send + Sync + 'static,
) {
    let EdgeCsrConfig { cluster, file, lifetime, node_ip, .. } = csr;
    let names = CertificateNameSource::Fixed(
        node_ip.iter().map(ToString::to_string).chain([node.to_string()]).collect(),
    );
    let cluster = Cluster { kubeconfig: cluster.kubeconfig, namespace: None };
    let renewer = CertificateRenewer::new(cluster, Profile::Edge, file.0, names, lifetime);
    let report = move |state| report(Profile::Edge.condition(), state);
    drain.spawn(info_span!("csr"), renewer.keep(report, drain.clone()));
}
