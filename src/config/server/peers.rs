//! `[server.peers]`: where the other servers are.

use crate::config::value::forms;
use std::net::SocketAddr;

use educe::Educe;
use serde::de::{Deserializer, Error};
use serde::{Deserialize, Serialize};
use tokio_rustls::rustls::pki_types::DnsName;

use crate::config::cluster::{self, ClusterSettings};
use crate::config::required_cluster::required_cluster;
use crate::config::server::registry::{self, DnsConfig, PublishTo};
use crate::config::table::ConfigTableReader;
use tunnel_proto::names::{Host, Target};

/// `[server.peers]`: where the peers are, the other servers of this cloud. They are queried for a node if DNS has no
/// answer. Requires peer_ca of `[server.links]`, as servers present their cert to each other.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize, Serialize, Educe)]
#[educe(Default)]
#[serde(default)]
pub struct PeerConfig {
    /// gRPC addresses (ip:port) of peers; our own may be among them.
    ///
    /// Example: `["10.0.0.7:9000", "10.0.0.8:9000"]`
    #[serde(deserialize_with = "forms::remote_addresses")]
    pub addresses: Vec<SocketAddr>,
    /// Name of which all addresses are servers (a headless Service), with their gRPC port. Resolved every 5s.
    ///
    /// Example: `"tunnel-cloud-pods.edge-system.svc:9000"`
    #[serde(deserialize_with = "dns_name")]
    pub dns_name: Option<Target>,
    /// Service of Kubernetes of which all endpoints are servers, ready or not: they are peers, on our own gRPC port.
    /// The lines of a server in the ConfigMap of publish = "configmap" are removed after 20s in which it was no
    /// endpoint, or was neither ready nor answered on a link. Requires a program built with Kubernetes (cargo's feature
    /// "kubernetes"), and either a pod in a cluster or --kubeconfig=FILE. The namespace is POD_NAMESPACE of the
    /// environment, otherwise that of the service account. The role must be able to list and watch endpointslices.
    ///
    /// Example: `"tunnel-cloud-pods"`
    #[serde(deserialize_with = "cluster::optional_name")]
    pub kubernetes_service: Option<String>,
    /// DNS name in the certificates of all servers. Default: the first DNS name in cert of `[server.links]`.
    ///
    /// Example: `"tunnel.example.org"`
    #[serde(deserialize_with = "certificate_name")]
    pub certificate_name: Option<String>,
    /// Whether a server with more than 1.3 times the mean number of nodes of its peers moves edges to the peer with the
    /// fewest, 1 % of its nodes a second. Edges that have been linked for about a day move too. No session is aborted by
    /// that.
    #[educe(Default = true)]
    pub rebalance: bool,
    /// Whether any key implies several servers. If not, neither DNS nor peers are queried.
    #[serde(skip)]
    pub several: bool,
    /// The key that names peers, if any does.
    #[serde(skip)]
    pub named: Option<PeerConfigKey>,
    /// The Kubernetes cluster, if it is used. Always set if records are published in a ConfigMap.
    #[serde(skip)]
    pub cluster: Option<ClusterSettings>,
}

/// The config key that says where a server's peers are, for error texts.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PeerConfigKey {
    /// The full key.
    pub key: &'static str,
    /// Whether links to the peers are required. SuperEdge has no such links, so its tables, used unchanged, do not
    /// require them.
    pub must_link: bool,
}

/// Reads `[server.dns]` and `[server.peers]`.
pub(crate) fn read(cloud: &mut ConfigTableReader<'_>) -> (DnsConfig, PeerConfig) {
    let mut dns_table = cloud.table("dns");
    let mut table = cloud.table("peers");
    let dns = registry::read(&mut dns_table);
    let mut peers: PeerConfig = table.fields();
    let publishes = dns.publish != PublishTo::None;
    let by_dns = required_cluster(&dns_table, "publish", dns.publish == PublishTo::ConfigMap);
    let by_service = required_cluster(&table, "kubernetes_service", peers.kubernetes_service.is_some());
    peers.cluster = by_dns.or(by_service);
    if (publishes || peers.cluster.is_some()) && cloud.env.pod_ip.as_ref().is_none_or(String::is_empty) {
        let expected = "set it to the address for publishing and for peers; in Kubernetes from status.podIP";
        cloud.report().error("POD_IP", None, expected);
    }
    peers.named = peers.key(cloud);
    // Publishing and a zone imply several servers.
    peers.several = dns_table.has("resolvers")
        || peers.named.is_some()
        || publishes
        || !dns.zone.is_empty()
        || peers.cluster.is_some();
    dns_table.close(&dns);
    table.close(&peers);
    (dns, peers)
}

impl PeerConfig {
    /// Returns the servers that this table names, which edges and users may also reach. A Service of Kubernetes has none
    /// that lasts.
    pub(crate) fn named_servers(&self) -> Vec<Target> {
        let addresses = self.addresses.iter().copied().map(Target::from);
        addresses.chain(self.dns_name.clone()).take(MAX_NAMED).collect()
    }

    /// Returns the key that names peers, if any does.
    fn key(&self, table: &ConfigTableReader<'_>) -> Option<PeerConfigKey> {
        let key = match self {
            Self { addresses, .. } if !addresses.is_empty() => "server.peers.addresses",
            Self { dns_name: Some(_), .. } => "server.peers.dns_name",
            Self { cluster: Some(_), kubernetes_service: Some(_), .. } => "server.peers.kubernetes_service",
            _ => return None,
        };
        Some(PeerConfigKey { key, must_link: !table.report().implied.contains(key) })
    }
}

/// Maximum number of servers that a machine hears of when it joins.
const MAX_NAMED: usize = 8;

fn dns_name<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Option<Target>, D::Error> {
    match Target::deserialize(deserializer)? {
        target @ Target { host: Host::Name(_), .. } => Ok(Some(target)),
        _ => Err(D::Error::custom("expected name:port; list addresses under server.peers.addresses")),
    }
}

fn certificate_name<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Option<String>, D::Error> {
    let text: String = forms::filled_text(deserializer)?;
    match text.parse::<Host>() {
        Ok(Host::Name(name)) if DnsName::try_from(&*name).is_ok() => Ok(Some(name.to_string())),
        _ => Err(D::Error::custom("expected a DNS name in the certificates of all servers")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_certificate_name_is_any_dns_name() {
        let read = |text: &str| certificate_name(serde_json::json!(text)).ok().flatten();
        // No node has the first two names.
        for name in ["localhost", "default", "tunnel.example.org"] {
            assert_eq!(read(name).as_deref(), Some(name));
        }
        for wrong in ["", "192.0.2.1", "a b", "a..b", "tunnel.example.org:9000"] {
            assert_eq!(read(wrong), None, "{wrong:?}");
        }
    }
}
