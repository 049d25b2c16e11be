//! Which nodes have a name in DNS: the one rule for publishing a node, and for asking DNS for it.

use std::fmt;
use std::net::IpAddr;

use super::Glob;
use crate::names::NodeName;

/// Under which name a node stands in DNS, if it may stand there at all.
///
/// In a zone of our own every node may. Without one, names are those of the whole network that asks this DNS: then a
/// node has a name of one label, or a longer one that somebody vouches for or that a pattern holds, and never one that
/// machines look up by themselves.
pub struct Zone {
    /// Appended to node names, lower case, without dots at its ends; may be empty.
    suffix: String,
    patterns: Vec<Glob>,
    vouched: Box<dyn Fn(&NodeName) -> bool + Send + Sync>,
}

/// Why a node has no name in DNS. Goes on where a sentence on the node has ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum Nameless {
    /// A label that is too long, too long in all, or an address.
    #[error("DNS cannot carry it as a name: want labels of 1 to 63 letters, 253 in all, and no address")]
    Unsound,
    /// A name that machines look up by themselves.
    #[error("programs trust that name: set mode.cloud.registry.zone, or rename the node")]
    Reserved,
    /// It has several labels, and nobody vouches for it.
    #[error(
        "it has dots: give it a line of its own in the token file, add it to mode.cloud.registry.publish_names, or set \
         mode.cloud.registry.zone"
    )]
    Foreign,
}

impl Zone {
    /// `suffix` is lower case, without dots at its ends, and may be empty; then `vouched` is true of names of several
    /// labels that are known to be nodes', beside those that `patterns` hold. It must be quick.
    pub fn new(
        suffix: String,
        patterns: Vec<Glob>,
        vouched: impl Fn(&NodeName) -> bool + Send + Sync + 'static,
    ) -> Self {
        Self { suffix, patterns, vouched: Box::new(vouched) }
    }

    /// Whether names are those of the whole network, so that a node's may be somebody else's as well.
    pub fn is_open(&self) -> bool {
        self.suffix.is_empty()
    }

    /// The node that a client means by a name: the one whose name in this zone it is, else the one of that very name.
    pub fn node(&self, name: NodeName) -> NodeName {
        let text = name.as_str();
        let bare = text.len().checked_sub(self.suffix.len() + 1).filter(|_| !self.is_open());
        let bare = bare.and_then(|end| Some((text.get(..end)?, text.get(end..)?.strip_prefix('.')?)));
        let bare = bare.filter(|(_, suffix)| suffix.eq_ignore_ascii_case(&self.suffix));
        bare.and_then(|(bare, _)| bare.parse().ok()).unwrap_or(name)
    }

    /// The node's name in DNS: lower case, without a dot at its end.
    ///
    /// # Errors
    ///
    /// It must have none; why.
    pub fn name(&self, node: &NodeName) -> Result<String, Nameless> {
        let mut name = node.as_str().to_ascii_lowercase();
        if !self.is_open() {
            name = format!("{name}.{}", self.suffix);
        }
        let sound = name.len() <= 253 && name.split('.').all(|label| (1..=63).contains(&label.len()));
        // A node that calls itself by an address would be a line of its own meaning in a hosts file.
        if !sound || name.parse::<IpAddr>().is_ok() {
            return Err(Nameless::Unsound);
        }
        if !self.is_open() {
            return Ok(name);
        }
        if is_reserved(&name) {
            return Err(Nameless::Reserved);
        }
        let of_one_label = !name.contains('.');
        if of_one_label || self.patterns.iter().any(|glob| glob.matches(node)) || (self.vouched)(node) {
            Ok(name)
        } else {
            Err(Nameless::Foreign)
        }
    }
}

impl fmt::Debug for Zone {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Zone({:?}, {:?})", self.suffix, self.patterns)
    }
}

/// Names that resolvers, browsers and the programs of a cluster look up by themselves, for every user.
/// `name` is lower case, without a dot at its end.
pub(crate) fn is_reserved(name: &str) -> bool {
    let of_services = name.split('.').skip(1).any(|label| label.starts_with("svc"));
    let of_cluster =
        name.strip_suffix(CLUSTER_DOMAIN).is_some_and(|before| before.is_empty() || before.ends_with('.'));
    of_services || of_cluster || name.split('.').any(|label| matches!(label, "localhost" | "wpad"))
}

/// The domain of nearly every cluster, which its programs append to the names that they look up.
pub(crate) const CLUSTER_DOMAIN: &str = "cluster.local";

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn zone(suffix: &str, patterns: &[&str]) -> Zone {
        let patterns = patterns.iter().map(|glob| glob.parse().unwrap()).collect();
        Zone::new(suffix.to_owned(), patterns, |node| *node == "known.example.org".parse().unwrap())
    }

    fn name(zone: &Zone, node: &str) -> Result<String, Nameless> {
        zone.name(&node.parse().unwrap())
    }

    #[test]
    fn a_zone_of_our_own_has_every_node_that_dns_can_carry() {
        let zone = zone("nodes.test", &[]);
        for node in ["Node-A", "a.b.c", "localhost", "kubernetes.default.svc"] {
            assert_eq!(name(&zone, node), Ok(format!("{}.nodes.test", node.to_ascii_lowercase())));
        }
        for node in ["x".repeat(64), vec!["x".repeat(60); 4].join(".")] {
            assert_eq!(name(&zone, &node), Err(Nameless::Unsound), "{node}");
        }
    }

    #[test]
    fn a_node_is_meant_by_its_name_and_by_its_name_in_the_zone() {
        let node = |zone: &Zone, name: &str| zone.node(name.parse().unwrap()).to_string();
        let own = zone("nodes.test", &[]);
        for (name, meant) in [
            ("node1.nodes.test", "node1"),
            ("node1.Nodes.Test", "node1"),
            ("a.b.nodes.test", "a.b"),
            ("node1", "node1"),
            ("nodes.test", "nodes.test"),
            ("xnodes.test", "xnodes.test"),
            ("node1.nodes.test.org", "node1.nodes.test.org"),
        ] {
            assert_eq!(node(&own, name), meant);
        }
        assert_eq!(node(&zone("", &[]), "node1.nodes.test"), "node1.nodes.test");
    }

    #[test]
    fn without_a_zone_a_name_has_one_label_or_somebody_who_vouches_for_it() {
        let zone = zone("", &["*.edge.example.org"]);
        for node in ["node-1", "kubernetes", "known.example.org", "KNOWN.Example.org", "a.edge.example.org"] {
            assert_eq!(name(&zone, node), Ok(node.to_ascii_lowercase()));
        }
        for node in ["bank.example.org", "a.b", "edge.example.org"] {
            assert_eq!(name(&zone, node), Err(Nameless::Foreign), "{node}");
        }
        assert_eq!(name(&zone, "10.1.2.3"), Err(Nameless::Unsound));
    }

    #[test]
    fn without_a_zone_nobody_has_a_name_that_programs_look_up_by_themselves() {
        let all = Zone::new(String::new(), vec!["*".parse().unwrap()], |_| true);
        for node in [
            "localhost",
            "LocalHost",
            "a.localhost",
            "localhost.localdomain",
            "wpad",
            "wpad.example.org",
            "kubernetes.default.svc.cluster.local",
            "kubernetes.default.svc",
            "api.SVC",
            "cluster.local",
            "node1.cluster.local",
        ] {
            assert_eq!(name(&all, node), Err(Nameless::Reserved), "{node}");
        }
        assert!(name(&all, "mycluster.local").is_ok());
        assert!(name(&all, "svc").is_ok() && name(&all, "localhost1").is_ok());
    }

    proptest! {
        #[test]
        fn a_name_in_dns_is_the_nodes_own_and_lies_in_the_zone(node in "[a-zA-Z0-9._-]{1,30}", suffix in "|nodes|n\\.test") {
            let zone = Zone::new(suffix.clone(), Vec::new(), |_| false);
            if let Ok(Ok(name)) = node.parse().map(|node| zone.name(&node)) {
                let dot = if suffix.is_empty() { "" } else { "." };
                prop_assert_eq!(name, format!("{}{dot}{suffix}", node.to_ascii_lowercase()));
            }
        }
    }
}
