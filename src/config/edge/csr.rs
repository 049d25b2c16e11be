//! The table of an edge's certificate from its cluster.

use std::net::IpAddr;
use std::time::Duration;

use educe::Educe;
use serde::{Deserialize, Serialize};

use crate::config::cluster::ClusterSettings;
use crate::config::required_cluster::{MAX_LIFETIME, MIN_LIFETIME, required_cluster};
use crate::config::table::ConfigTableReader;
use crate::config::value::forms::{FilePath, Millis};

/// `[edge.csr]`: certificate that identifies this edge, with or without a token, issued by a signer of its cluster
/// (CertificateSigningRequests). The edge requests it as its node with the kubeconfig of --kubeconfig=FILE,
/// usually the kubelet's. Only root may read that file and its key, so the edge runs as root. The command
/// `tunnel approve` approves the request. The servers must accept such certificates first (edge_ca of `[server.csr]`).
/// The token is used until a certificate is issued, and for every second attempt with a server that closes connections
/// made with it. Without a token the edge waits for its certificate. Requires a program built with Kubernetes.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize, Serialize, Educe)]
#[educe(Default)]
#[serde(default)]
pub struct EdgeCsrConfig {
    /// Whether to request the certificate.
    pub enabled: bool,
    /// File of certificate and key, written and renewed by the edge. Only its user may read it.
    #[educe(Default = "/var/lib/tunnel/pki/agent.pem".into())]
    pub file: FilePath,
    /// Requested validity. Default: the signer decides, usually a year.
    ///
    /// Example: `"720h"`
    #[serde(with = "Millis::<MIN_LIFETIME, MAX_LIFETIME>")]
    pub lifetime: Option<Duration>,
    /// The cluster to send the request to, as this node.
    #[serde(skip)]
    pub cluster: ClusterSettings,
    /// `NODE_IP`, which the certificate contains.
    #[serde(skip)]
    pub node_ip: Option<IpAddr>,
}

/// Reads `[edge.csr]`. Returns `None` if the token alone identifies this edge.
pub(crate) fn csr(edge: &mut ConfigTableReader<'_>, node_ip: Option<IpAddr>) -> Option<EdgeCsrConfig> {
    let mut table = edge.table("csr");
    let csr: EdgeCsrConfig = table.fields();
    let cluster = required_cluster(&table, "enabled", csr.enabled);
    table.close(&csr);
    Some(EdgeCsrConfig { cluster: cluster?, node_ip, ..csr })
}
