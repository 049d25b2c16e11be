//! The text from which DNS answers: a line for each name and address.

use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;

use super::node::Seen;
use crate::names::NodeName;
use crate::policy::{Glob, is_reserved};

/// What is to be written.
#[derive(Debug, Default, PartialEq, Eq)]
pub(super) struct Text {
    /// `<address>\t<name>` a line, in order.
    pub(super) lines: String,
    /// Nodes that do not stand in it, and why.
    pub(super) left_out: BTreeMap<String, &'static str>,
}

/// The text for these Nodes, of `most` bytes at most. A Node whose name has dots stands in it if a pattern of `dotted` matches
/// that. An edge's name leads to its pods, or else to the Service; each other one to the node itself, if it has an address.
/// Where not all have room, those are left out that want the most of it.
pub(super) fn text(
    nodes: &BTreeMap<String, Seen>,
    dotted: &[Glob],
    service: &BTreeSet<IpAddr>,
    holders: &BTreeMap<String, BTreeSet<IpAddr>>,
    most: usize,
) -> Text {
    let (mut text, mut all) = (Text::default(), Vec::new());
    for (name, node) in nodes {
        if is_reserved(name) {
            text.left_out.insert(name.clone(), "programs trust that name: rename the node");
            continue;
        }
        // Whoever can add a Node chooses its name, and it may be any host's of the Internet.
        let is_given = |node: &NodeName| dotted.iter().any(|pattern| pattern.matches(node));
        if name.contains('.') && !name.parse().is_ok_and(|node| is_given(&node)) {
            text.left_out
                .insert(name.clone(), "it has dots: add it to mode.cloud.node_names.names, or rename it");
            continue;
        }
        let at = match node.is_edge {
            true => holders.get(name).unwrap_or(service),
            false => &node.ips,
        };
        let lines: Vec<_> = at.iter().map(|ip| format!("{ip}\t{name}\n")).collect();
        all.push((lines.iter().map(String::len).sum::<usize>(), name, lines));
    }
    all.sort_unstable();
    let (mut lines, mut bytes) = (BTreeSet::new(), 0_usize);
    for (wanted, name, own) in all {
        if bytes.saturating_add(wanted) > most {
            text.left_out.insert(name.clone(), "the ConfigMap is full: a ConfigMap holds 1 MiB");
            continue;
        }
        bytes += wanted;
        lines.extend(own);
    }
    text.lines = lines.into_iter().collect();
    text
}

/// The pods that have nodes, of lines `<address> <name>` as pods write them.
pub(super) fn holders(text: &str) -> BTreeMap<String, BTreeSet<IpAddr>> {
    let mut holders = BTreeMap::<_, BTreeSet<_>>::new();
    for line in text.lines() {
        let mut words = line.split_whitespace();
        if let (Some(Ok(ip)), Some(name), None) = (words.next().map(str::parse), words.next(), words.next()) {
            holders.entry(name.to_owned()).or_default().insert(ip);
        }
    }
    holders
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn ips(all: &[&str]) -> BTreeSet<IpAddr> {
        all.iter().map(|ip| ip.parse().unwrap()).collect()
    }

    fn nodes(all: &[(&str, bool, &[&str])]) -> BTreeMap<String, Seen> {
        let seen = |(name, is_edge, at): &(&str, bool, &[&str])| {
            ((*name).to_owned(), Seen { is_edge: *is_edge, ips: ips(at) })
        };
        all.iter().map(seen).collect()
    }

    #[test]
    fn edges_lead_to_the_service_and_all_others_to_themselves() {
        let nodes = nodes(&[
            ("a1", true, &["10.0.0.1"]),
            ("edge-a1", false, &["10.0.0.2", "fd00::2"]),
            ("new", false, &[]),
        ]);
        let both = ips(&["10.96.0.20", "fd00:96::20"]);
        let said = text(&nodes, &[], &both, &BTreeMap::new(), usize::MAX).lines;
        assert_eq!(said, "10.0.0.2\tedge-a1\n10.96.0.20\ta1\nfd00:96::20\ta1\nfd00::2\tedge-a1\n");
    }

    #[test]
    fn edges_lead_to_their_pods_where_those_are_known() {
        let nodes =
            nodes(&[("a1", true, &["10.0.0.1"]), ("a2", true, &["10.0.0.2"]), ("c", false, &["10.0.0.3"])]);
        let known = holders(
            "# by hand\n10.1.0.1    a1\n10.1.0.2 a1\nnone a2\n10.1.0.1 a2 more\n10.1.0.1 c\n\n10.1.0.3 edge-a2\n",
        );
        let said = text(&nodes, &[], &ips(&["10.96.0.20"]), &known, usize::MAX).lines;
        assert_eq!(said, "10.0.0.3\tc\n10.1.0.1\ta1\n10.1.0.2\ta1\n10.96.0.20\ta2\n");
    }

    #[test]
    fn a_node_that_wants_too_much_room_is_left_out_and_all_others_stand() {
        let many: Vec<_> = (1..=8).map(|n| format!("10.0.0.{n}")).collect();
        let many: Vec<_> = many.iter().map(String::as_str).collect();
        let nodes = nodes(&[("big", false, &many), ("c", false, &["10.0.1.1"]), ("d", false, &["10.0.1.2"])]);
        let of = |most| text(&nodes, &[], &BTreeSet::new(), &BTreeMap::new(), most);
        let full = "the ConfigMap is full: a ConfigMap holds 1 MiB";
        let said = of(30);
        assert_eq!(said.lines, "10.0.1.1\tc\n10.0.1.2\td\n");
        assert_eq!(said.left_out, BTreeMap::from([("big".to_owned(), full)]));
        assert_eq!(of(21).left_out.len(), 2);
        assert!(of(22 + 8 * 13).left_out.is_empty());
    }

    #[test]
    fn no_node_has_a_name_that_programs_of_the_cluster_look_up() {
        let reserved = [
            "kubernetes.default.svc.cluster.local",
            "a.svc",
            "a.svc.other",
            "localhost",
            "a.localhost",
            "a.cluster.local",
        ];
        let all: Vec<_> = reserved.iter().map(|name| (*name, false, &["10.0.0.1"][..])).collect();
        let said = text(&nodes(&all), &[], &BTreeSet::new(), &BTreeMap::new(), usize::MAX);
        assert_eq!((said.lines.as_str(), said.left_out.len()), ("", reserved.len()));
    }

    #[test]
    fn a_name_with_dots_is_given_only_where_the_settings_say_so() {
        let nodes =
            nodes(&[("registry.example.com", false, &["10.0.0.1"]), ("n.example.org", true, &["10.0.0.2"])]);
        let of = |dotted: &[Glob]| text(&nodes, dotted, &ips(&["10.96.0.20"]), &BTreeMap::new(), usize::MAX);
        assert_eq!((of(&[]).lines.as_str(), of(&[]).left_out.len()), ("", 2));
        let said = of(&["*.example.org".parse().unwrap()]);
        assert_eq!(said.lines, "10.96.0.20\tn.example.org\n");
        assert!(said.left_out["registry.example.com"].contains("node_names.names"));
    }

    proptest! {
        #[test]
        fn each_name_stands_with_its_own_addresses_alone(
            all in proptest::collection::btree_map("[a-c]{1,3}", (any::<bool>(), any::<[u8; 4]>()), 0..20),
        ) {
            let nodes: BTreeMap<_, _> = all.iter().map(|(name, (is_edge, ip))| {
                (name.clone(), Seen { is_edge: *is_edge, ips: [IpAddr::from(*ip)].into() })
            }).collect();
            let service: IpAddr = "10.96.0.20".parse().unwrap();
            let said = text(&nodes, &[], &[service].into(), &BTreeMap::new(), usize::MAX).lines;
            prop_assert_eq!(said.lines().count(), nodes.len());
            for line in said.lines() {
                let (ip, name) = line.split_once('\t').unwrap();
                let (is_edge, own) = all[name];
                prop_assert_eq!(ip.parse(), Ok(if is_edge { service } else { own.into() }));
            }
            let mut sorted: Vec<_> = said.lines().collect();
            sorted.sort_unstable();
            prop_assert_eq!(said.lines().collect::<Vec<_>>(), sorted);
        }
    }
}
