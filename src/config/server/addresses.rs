//! `[server.addresses]`: assignment of addresses to nodes.

use std::collections::BTreeMap;

use ipnet::IpNet;
use serde::{Deserialize, Deserializer, Serialize, Serializer};

use crate::config::cluster::{self, ClusterSettings};
use crate::config::table::ConfigTableReader;
use tunnel_base::policy::Network;
use tunnel_proto::names::NodeName;

/// `[server.addresses]`: nodes by address, so that clients may request a node, a host next to it, a Kubernetes pod or a
/// Service by its address.
#[derive(Debug, Clone, PartialEq, Eq, Default, Deserialize, Serialize)]
#[serde(default)]
pub struct AddressSettings {
    /// Whether to watch nodes, pods, Services and their endpoints in Kubernetes. Then a node's InternalIP, a pod's IP,
    /// a Service's ClusterIP and its names (web.shop, web.shop.svc, web.shop.svc.cluster.local) resolve to a node. If
    /// there are several ready endpoints, they resolve to any of them. Requires Kubernetes, as kubernetes_service of
    /// `[server.peers]` does. Requires a role that may list and watch nodes, pods, services and endpointslices
    /// (discovery.k8s.io) in the whole cluster, and configmaps in POD_NAMESPACE. Of SuperEdge's ConfigMap tunnel-cache,
    /// the key user_services is read: lines "service.namespace edge" or "... cloud", which is at no node. While
    /// kube-apiserver does not answer, the last known state applies. Default: true if this file has egress, http_proxy,
    /// https or intercept and there is a Kubernetes, otherwise false.
    ///
    /// Example: `true`
    pub kubernetes: bool,
    /// Networks and addresses, and the node for each. The narrowest network that contains an address applies, before
    /// Kubernetes. An address that two objects of Kubernetes have resolves to neither, with a warning. The node's edge
    /// dials the address unchanged, so `[edge.allow]` there must contain it. Default: none.
    ///
    /// Example: `{ "10.0.0.7" = "node1", "10.244.1.0/24" = "node1" }`
    #[serde(deserialize_with = "networks", serialize_with = "by_network")]
    pub nodes: Vec<(IpNet, NodeName)>,
    /// The cluster that is watched; `None` if Kubernetes is not.
    #[serde(skip)]
    pub cluster: Option<ClusterSettings>,
}

/// Reads `[server.addresses]`. `by_address` is true if a listener's clients name targets by address.
pub(crate) fn read(cloud: &mut ConfigTableReader<'_>, by_address: bool) -> AddressSettings {
    let mut table = cloud.table("addresses");
    let mut addresses: AddressSettings = table.fields();
    let is_set = table.has("kubernetes");
    if addresses.kubernetes || by_address && !is_set {
        match cluster::reached(cloud.env) {
            Ok(cluster) => addresses.cluster = Some(cluster),
            Err(why) if is_set => table.error("kubernetes", Some("true".to_owned()), why),
            // A default that finds no cluster is no error.
            Err(_) => {}
        }
    }
    addresses.kubernetes = addresses.cluster.is_some();
    table.close(&addresses);
    addresses
}

/// Reads networks, each with the name of its node.
fn networks<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Vec<(IpNet, NodeName)>, D::Error> {
    let nodes = BTreeMap::<Network, NodeName>::deserialize(deserializer)?;
    Ok(nodes.into_iter().map(|(Network(net), node)| (net, node)).collect())
}

fn by_network<S: Serializer>(nodes: &[(IpNet, NodeName)], serializer: S) -> Result<S::Ok, S::Error> {
    serializer.collect_map(nodes.iter().map(|(net, node)| (net.to_string(), node)))
}
