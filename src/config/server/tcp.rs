//! The table `server.tcp`: TCP ports, each for one target at one node. Its keys are addresses, as in SuperEdge.

use std::net::{Ipv4Addr, SocketAddr};

use crate::config::listen::{AccessConfig, AuthMethods};
use crate::config::table::ConfigTable;
use crate::config::{Diagnostics, value};
use tunnel_base::names::{NameError, NodeName, Target};

/// One entry of `[server.tcp]`: a TCP port of a server that stands for one target.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TcpListenerConfig {
    /// Address where clients connect.
    pub at: SocketAddr,
    /// The full key of the entry.
    pub key: String,
    /// The target.
    pub to: Forward,
    /// Whether the target receives a PROXY header (v2) with the client's address.
    pub send_proxy: bool,
    /// Access rules.
    pub access: AccessConfig,
}

/// A target at a node, written as `node1/127.0.0.1:6443`, or as `127.0.0.1:6443` without a node.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Forward {
    /// The node that dials; `None` means the node that has been connected for longest.
    pub node: Option<NodeName>,
    /// The target that it dials.
    pub target: Target,
}

/// Reads the table. Absent access rules of an entry are inherited from `ssh`.
pub(crate) fn read(
    cloud: &mut ConfigTable<'_>,
    ssh: &AccessConfig,
    report: &mut Diagnostics,
) -> Vec<TcpListenerConfig> {
    let mut table = cloud.table("tcp", report);
    let entries = table.named(TARGET, report);
    entries.into_iter().filter_map(|(name, entry)| port(&name, entry, ssh, report)).collect()
}

/// Reads one port. Returns `None` if the entry is unusable, which is recorded.
fn port(
    name: &str,
    mut table: ConfigTable<'_>,
    ssh: &AccessConfig,
    report: &mut Diagnostics,
) -> Option<TcpListenerConfig> {
    let at = listen(name);
    if at.is_none() {
        let wanted =
            "expected an address to listen on as the key: \"ip:port\", for example \"127.0.0.1:6443\"";
        table.name_error(name, wanted, report);
    }
    let to = table.read(
        TARGET,
        |value| forward(&value::text(value)?).map_err(|why| value::wrong(value, why)),
        report,
    );
    if to.is_none() && !table.has(TARGET) {
        table.error(TARGET, None, "set the target, as in target = \"node1/127.0.0.1:6443\"", report);
    }
    let send_proxy = table.read("send_proxy", value::flag, report).unwrap_or_default();
    let access = AccessConfig::read(&mut table, PROOFS, ssh, report);
    let port = at.zip(to).map(|(at, to)| TcpListenerConfig {
        at,
        key: table.path().to_owned(),
        to,
        send_proxy,
        access,
    });
    if let Some(TcpListenerConfig { at, key, to, access, .. }) = &port {
        access.warn_if_open(key.clone(), *at, PROOFS, &to.to_string(), report);
    }
    table.finish(report);
    port
}

/// Parses an address to listen on. As in Go, SuperEdge's language, the IP may be absent, which means all addresses.
fn listen(name: &str) -> Option<SocketAddr> {
    match name.strip_prefix(':') {
        Some(port) => Some((Ipv4Addr::UNSPECIFIED, port.parse().ok()?).into()),
        None => name.parse().ok(),
    }
}

fn forward(text: &str) -> Result<Forward, String> {
    let (node, target) = match text.split_once('/') {
        Some((node, target)) => (Some(node.parse().map_err(|e| format!("{e}; a node is optional"))?), target),
        None => (None, text),
    };
    let target = target
        .parse()
        .map_err(|e: NameError| format!("{e}; put the node before the target, as in node1/127.0.0.1:22"))?;
    Ok(Forward { node, target })
}

impl std::fmt::Display for Forward {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match &self.node {
            Some(node) => write!(f, "{} at node {node}", self.target),
            None => write!(f, "{} at the node that has been connected for longest", self.target),
        }
    }
}

/// The protocol of a TCP port is the target's, so clients cannot be asked for a password or a certificate.
const PROOFS: AuthMethods = AuthMethods { password: false, certificate: None };

/// The key that a plain text value stands for.
const TARGET: &str = "target";
