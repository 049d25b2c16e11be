//! Nodes, as far as their names in DNS go: the rest of their text is skipped.

use std::borrow::Cow;
use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;

use k8s_openapi::api::core::v1 as whole;
use kube::api::ObjectMeta;
use kube::runtime::watcher::Event;
use kube::{Resource, ResourceExt as _};
use serde::Deserialize;

use crate::registry::follow::{NodeStatus, part_of};

/// The Nodes, and those that a list under way has named so far.
#[derive(Debug, Default)]
pub(super) struct Nodes {
    known: BTreeMap<String, Seen>,
    listing: Option<BTreeMap<String, Seen>>,
    listed: bool,
}

/// What is known of a Node.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Seen {
    /// Whether only the tunnel reaches it.
    pub(super) is_edge: bool,
    /// Its InternalIPs; its ExternalIPs if it has none; the first 8.
    pub(super) ips: BTreeSet<IpAddr>,
}

#[derive(Debug, Clone, Deserialize)]
pub(super) struct NamedNode {
    metadata: ObjectMeta,
    #[serde(default)]
    status: NodeStatus,
}

part_of!(NamedNode, whole::Node);

impl NamedNode {
    /// `edges`: label and value of edges.
    pub(super) fn seen(&self, (label, value): &(String, String)) -> Seen {
        let labels = self.metadata.labels.as_ref();
        let is_edge = labels.and_then(|all| all.get(label)).is_some_and(|found| found == value);
        let internal: BTreeSet<IpAddr> = self.status.ips("InternalIP");
        Seen { is_edge, ips: if internal.is_empty() { self.status.ips("ExternalIP") } else { internal } }
    }
}

impl Nodes {
    /// All of them; `None` until they are listed.
    pub(super) fn whole(&self) -> Option<BTreeMap<String, Seen>> {
        self.listed.then(|| self.known.clone())
    }

    /// Whether all are known, and none are listed anew, which may fail yet.
    pub(super) fn are_followed(&self) -> bool {
        self.listed && self.listing.is_none()
    }

    /// True if all are known, and something of them is news.
    pub(super) fn take(&mut self, event: Event<NamedNode>, edges: &(String, String)) -> bool {
        match event {
            Event::Init => {
                self.listing = Some(BTreeMap::new());
                false
            }
            Event::InitApply(node) => {
                let (name, seen) = (node.name_any(), node.seen(edges));
                self.listing.get_or_insert_default().insert(name, seen);
                false
            }
            Event::InitDone => {
                self.known = self.listing.take().unwrap_or_default();
                self.listed = true;
                true
            }
            Event::Apply(node) => {
                let (name, seen) = (node.name_any(), node.seen(edges));
                // Its heartbeat changes a Node every few seconds.
                self.known.insert(name, seen.clone()) != Some(seen)
            }
            Event::Delete(node) => self.known.remove(&node.name_any()).is_some(),
        }
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn an_edge_has_the_label_and_a_nodes_external_address_counts_where_it_has_no_other() {
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
    fn a_list_that_has_only_begun_may_fail_yet() {
        let (mut nodes, edges) = (Nodes::default(), (String::new(), String::new()));
        let events =
            [(Event::Init, false), (Event::InitDone, true), (Event::Init, false), (Event::InitDone, true)];
        for (event, followed) in events {
            nodes.take(event, &edges);
            assert_eq!(nodes.are_followed(), followed);
        }
    }

    #[test]
    fn of_a_nodes_addresses_the_first_eight_count() {
        let address = |n| json!({"type": "InternalIP", "address": format!("10.0.0.{n}")});
        let addresses: Vec<_> = (1..=200).map(address).collect();
        let node = json!({"metadata": {"name": "n"}, "status": {"addresses": addresses}});
        let node = serde_json::from_value::<NamedNode>(node).unwrap();
        let first: Vec<_> = (1..=8).map(|n| IpAddr::from([10, 0, 0, n])).collect();
        assert_eq!(Vec::from_iter(node.seen(&(String::new(), String::new())).ips), first);
    }
}
