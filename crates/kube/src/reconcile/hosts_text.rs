//! The text from which DNS answers: one line per name and address.

use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;

use crate::partial::{PartialNode, has_label};
use tunnel_base::policy::NodeGlob;
use tunnel_base::policy::zone::is_reserved;
use tunnel_proto::names::NodeName;

/// The hosts file to write into the ConfigMap, and the nodes that it leaves out.
#[derive(Debug, Default, PartialEq, Eq)]
pub(crate) struct RenderedHosts {
    /// Lines `<address>\t<name>`, sorted.
    pub(crate) lines: String,
    /// Nodes without a line, and why.
    pub(crate) left_out: BTreeMap<String, &'static str>,
}

/// Renders the text for these Nodes, with at most `most` bytes. An edge's name resolves to its servers, or to the
/// Service if there are none; any other name to the node's own addresses.
///
/// Nodes with dots in their names are included only if a pattern of `dotted` matches. If the text would be too long,
/// the Nodes with the most bytes are left out.
pub(crate) fn text(
    nodes: &BTreeMap<String, KubeNodeState>,
    dotted: &[NodeGlob],
    service: &BTreeSet<IpAddr>,
    holders: &BTreeMap<String, BTreeSet<IpAddr>>,
    most: usize,
) -> RenderedHosts {
    let mut text = RenderedHosts::default();
    let mut all = Vec::new();
    for (name, node) in nodes {
        if is_reserved(name) {
            text.left_out.insert(name.clone(), "reserved name; rename the node");
            continue;
        }
        // Anyone who can add a Node chooses its name, which may be that of any host on the Internet.
        let is_given = |node: &NodeName| dotted.iter().any(|pattern| pattern.matches(node));
        if name.contains('.') && !name.parse().is_ok_and(|node| is_given(&node)) {
            text.left_out.insert(
                name.clone(),
                "name with dots; add it to server.node_names.names, or rename the node",
            );
            continue;
        }
        let at = match node.is_edge {
            true => holders.get(name).unwrap_or(service),
            false => &node.ips,
        };
        let lines: Vec<_> = at.iter().map(|ip| format!("{ip}\t{name}\n")).collect();
        all.push((lines.iter().map(String::len).sum::<usize>(), name, lines));
    }
    // The shortest first: a kubelet reports its own Node's addresses, and many must not displace other Nodes.
    all.sort_unstable();
    // Sorted, because the ConfigMap is written only if the text differs.
    let mut lines = BTreeSet::new();
    let mut bytes = 0_usize;
    for (needed, name, own) in all {
        if bytes.saturating_add(needed) > most {
            text.left_out.insert(name.clone(), "the ConfigMap is full (limit 1 MiB)");
            continue;
        }
        bytes += needed;
        lines.extend(own);
    }
    text.lines = lines.into_iter().collect();
    text
}

/// Parses lines `<address> <name>` as servers write them. Returns the servers of each node.
pub(crate) fn holders(text: &str) -> BTreeMap<String, BTreeSet<IpAddr>> {
    let mut holders = BTreeMap::<_, BTreeSet<_>>::new();
    for line in text.lines() {
        let mut words = line.split_whitespace();
        if let (Some(Ok(ip)), Some(name), None) = (words.next().map(str::parse), words.next(), words.next()) {
            holders.entry(name.to_owned()).or_default().insert(ip);
        }
    }
    holders
}

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
    use proptest::prelude::*;

    use super::*;

    fn ips(all: &[&str]) -> BTreeSet<IpAddr> {
        all.iter().map(|ip| ip.parse().unwrap()).collect()
    }

    fn nodes(all: &[(&str, bool, &[&str])]) -> BTreeMap<String, KubeNodeState> {
        let seen = |(name, is_edge, at): &(&str, bool, &[&str])| {
            ((*name).to_owned(), KubeNodeState { is_edge: *is_edge, ips: ips(at) })
        };
        all.iter().map(seen).collect()
    }

    #[test]
    fn edges_resolve_to_the_service_and_other_nodes_to_themselves() {
        let nodes = nodes(&[
            ("a1", true, &["10.0.0.1"]),
            ("edge-a1", false, &["10.0.0.2", "fd00::2"]),
            ("new", false, &[]),
        ]);
        let both = ips(&["10.96.0.20", "fd00:96::20"]);
        let rendered = text(&nodes, &[], &both, &BTreeMap::new(), usize::MAX).lines;
        assert_eq!(rendered, "10.0.0.2\tedge-a1\n10.96.0.20\ta1\nfd00:96::20\ta1\nfd00::2\tedge-a1\n");
    }

    #[test]
    fn edges_resolve_to_their_servers_if_these_are_known() {
        let nodes =
            nodes(&[("a1", true, &["10.0.0.1"]), ("a2", true, &["10.0.0.2"]), ("c", false, &["10.0.0.3"])]);
        let known = holders(
            "# by hand\n10.1.0.1    a1\n10.1.0.2 a1\nnone a2\n10.1.0.1 a2 more\n10.1.0.1 c\n\n10.1.0.3 edge-a2\n",
        );
        let rendered = text(&nodes, &[], &ips(&["10.96.0.20"]), &known, usize::MAX).lines;
        assert_eq!(rendered, "10.0.0.3\tc\n10.1.0.1\ta1\n10.1.0.2\ta1\n10.96.0.20\ta2\n");
    }

    #[test]
    fn a_node_beyond_the_size_limit_is_left_out_and_the_others_remain() {
        let many: Vec<_> = (1..=8).map(|n| format!("10.0.0.{n}")).collect();
        let many: Vec<_> = many.iter().map(String::as_str).collect();
        let nodes = nodes(&[("big", false, &many), ("c", false, &["10.0.1.1"]), ("d", false, &["10.0.1.2"])]);
        let of = |most| text(&nodes, &[], &BTreeSet::new(), &BTreeMap::new(), most);
        let full = "the ConfigMap is full (limit 1 MiB)";
        let rendered = of(30);
        assert_eq!(rendered.lines, "10.0.1.1\tc\n10.0.1.2\td\n");
        assert_eq!(rendered.left_out, BTreeMap::from([("big".to_owned(), full)]));
        assert_eq!(of(21).left_out.len(), 2);
        assert!(of(22 + 8 * 13).left_out.is_empty());
    }

    #[test]
    fn nodes_with_reserved_names_are_left_out() {
        let reserved = [
            "kubernetes.default.svc.cluster.local",
            "a.svc",
            "a.svc.other",
            "localhost",
            "a.localhost",
            "a.cluster.local",
        ];
        let all: Vec<_> = reserved.iter().map(|name| (*name, false, &["10.0.0.1"][..])).collect();
        let rendered = text(&nodes(&all), &[], &BTreeSet::new(), &BTreeMap::new(), usize::MAX);
        assert_eq!((rendered.lines.as_str(), rendered.left_out.len()), ("", reserved.len()));
    }

    #[test]
    fn a_name_with_dots_is_written_only_if_the_config_allows_it() {
        let nodes =
            nodes(&[("registry.example.com", false, &["10.0.0.1"]), ("n.example.org", true, &["10.0.0.2"])]);
        let of =
            |dotted: &[NodeGlob]| text(&nodes, dotted, &ips(&["10.96.0.20"]), &BTreeMap::new(), usize::MAX);
        assert_eq!((of(&[]).lines.as_str(), of(&[]).left_out.len()), ("", 2));
        let rendered = of(&["*.example.org".parse().unwrap()]);
        assert_eq!(rendered.lines, "10.96.0.20\tn.example.org\n");
        assert!(rendered.left_out["registry.example.com"].contains("node_names.names"));
    }

    proptest! {
        #[test]
        fn each_line_has_the_nodes_own_address_or_the_services(
            all in proptest::collection::btree_map("[a-c]{1,3}", (any::<bool>(), any::<[u8; 4]>()), 0..20),
        ) {
            let nodes: BTreeMap<_, _> = all.iter().map(|(name, (is_edge, ip))| {
                (name.clone(), KubeNodeState { is_edge: *is_edge, ips: [IpAddr::from(*ip)].into() })
            }).collect();
            let service: IpAddr = "10.96.0.20".parse().unwrap();
            let rendered = text(&nodes, &[], &[service].into(), &BTreeMap::new(), usize::MAX).lines;
            prop_assert_eq!(rendered.lines().count(), nodes.len());
            for line in rendered.lines() {
                let (ip, name) = line.split_once('\t').unwrap();
                let (is_edge, own) = all[name];
                prop_assert_eq!(ip.parse(), Ok(if is_edge { service } else { own.into() }));
            }
            let mut sorted: Vec<_> = rendered.lines().collect();
            sorted.sort_unstable();
            prop_assert_eq!(rendered.lines().collect::<Vec<_>>(), sorted);
        }
    }
}

#[cfg(test)]
mod kube_node_state_tests {
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
