//! `[edge.csr]`: a certificate that identifies this edge, issued by its cluster's signer.

use std::net::IpAddr;
use std::path::PathBuf;
use std::time::Duration;

use crate::config::server::csr::issuing;
use crate::config::server::kubernetes::ClusterSettings;
use crate::config::table::ConfigTable;
use crate::config::{Diagnostics, Environment, value};

/// How the certificate is requested, and where it is stored.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct EdgeCsrConfig {
    /// The cluster to send the request to, as this node.
    pub cluster: ClusterSettings,
    /// The file of certificate and key.
    pub file: PathBuf,
    /// The requested validity; `None` leaves it to the signer.
    pub lifetime: Option<Duration>,
    /// `NODE_IP`, which the certificate contains.
    pub node_ip: Option<IpAddr>,
}

/// Reads the table. Returns `None` if the token alone identifies this edge.
pub(crate) fn read(
    edge: &mut ConfigTable<'_>,
    node_ip: Option<IpAddr>,
    env: &Environment,
    report: &mut Diagnostics,
) -> Option<EdgeCsrConfig> {
    let mut table = edge.table("csr", report);
    let asked = table.read("enabled", value::flag, report).unwrap_or(false);
    let file = table.read("file", value::file_path, report).unwrap_or_else(|| FILE.into());
    let lifetime = issuing::lifetime(&mut table, report);
    let cluster = issuing::cluster(&mut table, "enabled", asked, env, report);
    table.finish(report);
    Some(EdgeCsrConfig { cluster: cluster?, file, lifetime, node_ip })
}

const FILE: &str = "/var/lib/tunnel/pki/agent.pem";
