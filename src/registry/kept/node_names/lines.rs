//! The text from which DNS answers: a line for each name and address.

use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;

use super::node::Seen;

/// The text for these Nodes: `<address>\t<name>` a line, in order. An edge's name leads to its pods, or else to the
/// Service; each other one to the node itself, if it has an address.
pub(super) fn text(
    nodes: &BTreeMap<String, Seen>,
    service: &BTreeSet<IpAddr>,
    holders: &BTreeMap<String, BTreeSet<IpAddr>>,
) -> String {
    let lines = nodes.iter().flat_map(|(name, node)| {
        let at = match node.is_edge {
            true => holders.get(name).unwrap_or(service),
            false => &node.ips,
        };
        at.iter().map(move |ip| format!("{ip}\t{name}\n"))
    });
    lines.collect::<BTreeSet<_>>().into_iter().collect()
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
        let said = text(&nodes, &both, &BTreeMap::new());
        assert_eq!(said, "10.0.0.2\tedge-a1\n10.96.0.20\ta1\nfd00:96::20\ta1\nfd00::2\tedge-a1\n");
    }

    #[test]
    fn edges_lead_to_their_pods_where_those_are_known() {
        let nodes =
            nodes(&[("a1", true, &["10.0.0.1"]), ("a2", true, &["10.0.0.2"]), ("c", false, &["10.0.0.3"])]);
        let known = holders(
            "# by hand\n10.1.0.1    a1\n10.1.0.2 a1\nnone a2\n10.1.0.1 a2 more\n10.1.0.1 c\n\n10.1.0.3 edge-a2\n",
        );
        let said = text(&nodes, &ips(&["10.96.0.20"]), &known);
        assert_eq!(said, "10.0.0.3\tc\n10.1.0.1\ta1\n10.1.0.2\ta1\n10.96.0.20\ta2\n");
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
            let said = text(&nodes, &[service].into(), &BTreeMap::new());
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
