//! The keys of `[mode.cloud.registry]` about other pods: where they are, and how to find a node there.

use std::net::SocketAddr;

use crate::config::Diagnostics;
use crate::config::table::ConfigTable;
use crate::config::value::{self, ValueError};
use tunnel_base::names::{Host, NodeName, Target};

/// Where other pods are, and how a node at one of them is found.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct PeerConfig {
    /// Whether any setting is for several pods. If not, neither DNS nor siblings are asked.
    pub several: bool,
    /// What names other pods, if anything does.
    pub named: Option<PeerKey>,
    /// DNS servers that know which pod a node is linked to; none: the system's.
    pub dns: Vec<SocketAddr>,
    /// Other pods' gRPC ports. Our own may be among them.
    pub list: Vec<SocketAddr>,
    /// A name whose addresses are the pods', and their gRPC port.
    pub service: Option<Target>,
    /// The DNS name that pods' certificates carry; none: the first of our own.
    pub name: Option<String>,
}

/// A key that names other pods.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PeerKey {
    /// The whole of it.
    pub key: &'static str,
    /// Whether there must be links to them. SuperEdge's tables are of a program that has none, and may be as they were.
    pub must_link: bool,
}

pub(crate) fn read(table: &mut ConfigTable<'_>, report: &mut Diagnostics) -> PeerConfig {
    let dns = table.list("dns", at, report).unwrap_or_default();
    let list = table.list("siblings", at, report).unwrap_or_default();
    let service = table.read("siblings_service", service, report);
    let name = table.read("name", name, report);
    let key = match (list.is_empty(), &service) {
        (false, _) => Some("mode.cloud.registry.siblings"),
        (true, Some(_)) => Some("mode.cloud.registry.siblings_service"),
        (true, None) => None,
    };
    let named = key.map(|key| PeerKey { key, must_link: true });
    PeerConfig { several: table.has("dns") || named.is_some(), named, dns, list, service, name }
}

/// The address of a port elsewhere.
fn at(value: &toml::de::DeValue<'_>) -> Result<SocketAddr, ValueError> {
    let wanted = "want ip:port, for example 10.96.0.10:53 or [fd00::1]:9000";
    match value::text(value)?.parse::<SocketAddr>() {
        Ok(at) if at.port() > 0 && !at.ip().is_unspecified() => Ok(at),
        _ => Err(value::wrong(value, wanted)),
    }
}

fn service(value: &toml::de::DeValue<'_>) -> Result<Target, ValueError> {
    let target: Target = value::parsed(value)?;
    match target.host {
        Host::Name(_) => Ok(target),
        Host::Ip(_) => Err(value::wrong(value, "want name:port; addresses stand in siblings")),
    }
}

fn name(value: &toml::de::DeValue<'_>) -> Result<String, ValueError> {
    let text = value::nonempty(value)?;
    match text.parse::<Host>() {
        Ok(Host::Name(name)) if text.parse::<NodeName>().is_ok() => Ok(name.to_string()),
        _ => Err(value::wrong(value, "want a DNS name that the certificates of all pods carry")),
    }
}
