//! The parts of Nodes that their names in DNS depend on; other fields are skipped.

use std::borrow::Cow;
use std::collections::BTreeSet;
use std::net::IpAddr;

use k8s_openapi::api::core::v1 as whole;
use kube::Resource;
use kube::api::ObjectMeta;
use serde::Deserialize;

use crate::partial::{PartialNodeStatus, part_of};

/// The facts about a Node that decide on its line in the hosts file.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct KubeNodeState {
    /// Whether the node is only reachable through the tunnel.
    pub(crate) is_edge: bool,
    /// InternalIPs of the Node, or its ExternalIPs if it has none; at most 8.
    pub(crate) ips: BTreeSet<IpAddr>,
}

/// The fields of a Node that the hosts file needs; read instead of the whole object.
#[derive(Debug, Clone, Deserialize)]
pub(crate) struct NamedNode {
    metadata: ObjectMeta,
    #[serde(default)]
    status: PartialNodeStatus,
}

part_of!(NamedNode, whole::Node);

impl NamedNode {
    /// Returns the state of this Node. The argument is label and value of edges.
    pub(crate) fn seen(&self, (label, value): &(String, String)) -> KubeNodeState {
        let labels = self.metadata.labels.as_ref();
        let is_edge = labels.and_then(|all| all.get(label)).is_some_and(|found| found == value);
        let internal: BTreeSet<IpAddr> = self.status.ips("InternalIP");
        KubeNodeState {
            is_edge,
            ips: if internal.is_empty() { self.status.ips("ExternalIP") } else { internal },
        }
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn an_edge_has_the_label_and_external_addresses_are_used_only_without_internal() {
        let edges = ("openyurt.io/is-edge-worker".to_owned(), "true".to_owned());
        let seen = |labels: serde_json::Value, addresses: &[(&str, &str)]| {
            let addresses: Vec<_> =
                addresses.iter().map(|(kind, address)| json!({"type": kind, "address": address})).collect();
            let node =
                json!({"metadata": {"name": "n", "labels": labels}, "status": {"addresses": addresses}});
            let seen = serde_json::from_value::<NamedNode>(node).unwrap().seen(&edges);
            (seen.is_edge, seen.ips.iter().map(ToString::to_string).collect::<Vec<_>>())
        };
        let all = [
            ("Hostname", "n"),
            ("ExternalIP", "192.0.2.1"),
            ("InternalIP", "10.0.0.1"),
            ("InternalIP", "fd00::1"),
        ];
        let edge = json!({"openyurt.io/is-edge-worker": "true"});
        assert_eq!(seen(edge, &all), (true, vec!["10.0.0.1".to_owned(), "fd00::1".to_owned()]));
        let cloud = json!({"openyurt.io/is-edge-worker": "false"});
        assert_eq!(seen(cloud, &all[..2]), (false, vec!["192.0.2.1".to_owned()]));
        assert_eq!(seen(json!({}), &[]), (false, vec![]));
    }

    #[test]
    fn only_the_first_eight_addresses_of_a_node_are_used() {
        let address = |n| json!({"type": "InternalIP", "address": format!("10.0.0.{n}")});
        let addresses: Vec<_> = (1..=200).map(address).collect();
        let node = json!({"metadata": {"name": "n"}, "status": {"addresses": addresses}});
        let node = serde_json::from_value::<NamedNode>(node).unwrap();
        let first: Vec<_> = (1..=8).map(|n| IpAddr::from([10, 0, 0, n])).collect();
        assert_eq!(Vec::from_iter(node.seen(&(String::new(), String::new())).ips), first);
    }
}
