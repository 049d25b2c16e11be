//! The facts about Nodes that their names in DNS depend on.

use std::collections::BTreeSet;
use std::net::IpAddr;

use crate::partial::{PartialNode, has_label};

/// The facts about a Node that decide on its line in the hosts file.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct KubeNodeState {
    /// Whether the node is only reachable through the tunnel.
    pub(crate) is_edge: bool,
    /// InternalIPs of the Node, or its ExternalIPs if it has none; at most 8.
    pub(crate) ips: BTreeSet<IpAddr>,
}

impl KubeNodeState {
    /// Returns the state of a Node. `label` and `value` are those of edges.
    pub(crate) fn of(node: &PartialNode, (label, value): &(String, String)) -> Self {
        let internal: BTreeSet<IpAddr> = node.status.ips("InternalIP");
        let ips = if internal.is_empty() { node.status.ips("ExternalIP") } else { internal };
        Self { is_edge: has_label(node, label, value), ips }
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
            let seen = KubeNodeState::of(&serde_json::from_value(node).unwrap(), &edges);
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
        let state =
            KubeNodeState::of(&serde_json::from_value(node).unwrap(), &(String::new(), String::new()));
        let first: Vec<_> = (1..=8).map(|n| IpAddr::from([10, 0, 0, n])).collect();
        assert_eq!(Vec::from_iter(state.ips), first);
    }
}
