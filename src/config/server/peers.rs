//! The keys of `[server.dns]` about peers: where they are, and how to find a node there.

use std::net::SocketAddr;

use crate::config::Diagnostics;
use crate::config::table::ConfigTable;
use crate::config::value::{self, ValueError};
use tunnel_base::names::{Host, NodeName, Target};

/// Where peers are, and how to find their nodes.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct PeerConfig {
    /// Whether any key implies several servers. If not, neither DNS nor peers are queried.
    pub several: bool,
    /// The key that names peers, if any does.
    pub named: Option<PeerKey>,
    /// DNS servers that know each node's server; empty means the system's.
    pub dns: Vec<SocketAddr>,
    /// gRPC addresses of peers. Our own may be among them.
    pub list: Vec<SocketAddr>,
    /// A name that resolves to the servers' addresses, with their gRPC port.
    pub service: Option<Target>,
    /// The DNS name in servers' certificates; `None` means the first name in our own.
    pub name: Option<String>,
}

/// The config key that says where a server's peers are, for error texts.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PeerKey {
    /// The full key.
    pub key: &'static str,
    /// Whether links to the peers are required. SuperEdge has no such links, so its tables, used unchanged, do not
    /// require them.
    pub must_link: bool,
}

/// Reads `[server.peers]`, and the resolvers of `[server.dns]`.
pub(crate) fn read(
    table: &mut ConfigTable<'_>,
    dns: &mut ConfigTable<'_>,
    report: &mut Diagnostics,
) -> PeerConfig {
    let resolvers = dns.list("resolvers", at, report).unwrap_or_default();
    let list = table.list("addresses", at, report).unwrap_or_default();
    let service = table.read("dns_name", service, report);
    let name = table.read("certificate_name", name, report);
    let key = match (list.is_empty(), &service) {
        (false, _) => Some("server.peers.addresses"),
        (true, Some(_)) => Some("server.peers.dns_name"),
        (true, None) => None,
    };
    let named = key.map(|key| PeerKey { key, must_link: true });
    PeerConfig {
        several: dns.has("resolvers") || named.is_some(),
        named,
        dns: resolvers,
        list,
        service,
        name,
    }
}

/// Reads the address of a remote port.
fn at(value: &toml::de::DeValue<'_>) -> Result<SocketAddr, ValueError> {
    let wanted = "expected ip:port, for example 10.96.0.10:53 or [fd00::1]:9000";
    match value::text(value)?.parse::<SocketAddr>() {
        Ok(at) if at.port() > 0 && !at.ip().is_unspecified() => Ok(at),
        _ => Err(value::wrong(value, wanted)),
    }
}

fn service(value: &toml::de::DeValue<'_>) -> Result<Target, ValueError> {
    let target: Target = value::parsed(value)?;
    match target.host {
        Host::Name(_) => Ok(target),
        Host::Ip(_) => {
            Err(value::wrong(value, "expected name:port; list addresses under server.peers.addresses"))
        }
    }
}

fn name(value: &toml::de::DeValue<'_>) -> Result<String, ValueError> {
    let text = value::nonempty(value)?;
    match text.parse::<Host>() {
        Ok(Host::Name(name)) if text.parse::<NodeName>().is_ok() => Ok(name.to_string()),
        _ => Err(value::wrong(value, "expected a DNS name in the certificates of all servers")),
    }
}
