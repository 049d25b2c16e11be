//! Which nodes have a name in DNS: one rule for publishing nodes and for looking them up.

use std::net::IpAddr;

use crate::policy::NodeGlob;
use tunnel_proto::names::NodeName;

/// The rule for nodes' DNS names: which node may have one, and which.
///
/// In a configured zone every node may have a name. Without a zone, names belong to the whole network that uses this
/// DNS server. Then a node may have a name of one label, or a longer name that is known to be a node's or matches a
/// pattern. It never has a name that programs look up on their own.
#[derive(derive_more::Debug)]
#[debug("NodeZone({suffix:?}, {patterns:?})")]
pub struct NodeZone {
    /// Suffix for node names: lower case, without leading or trailing dots; may be empty.
    suffix: String,
    patterns: Vec<NodeGlob>,
    vouched: Box<dyn Fn(&NodeName) -> bool + Send + Sync>,
}

/// Why a node has no name in DNS. Displayed after a phrase about the node.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum DnsNameError {
    /// A label is too long, the name is too long, or it is an address.
    #[error("not a valid DNS name; expected labels of 1 to 63 letters, 253 in total, and no address")]
    Invalid,
    /// A name that programs look up on their own.
    #[error("programs trust that name; set server.dns.zone, or rename the node")]
    Reserved,
    /// The name has several labels, and it is not known to be a node's.
    #[error(
        "name with dots; give it its own line in the token file, add it to server.dns.publish_names, or set \
         server.dns.zone"
    )]
    Foreign,
}

impl Default for NodeZone {
    /// No zone: nodes have only their own names.
    fn default() -> Self {
        Self::new(String::new(), Vec::new(), |_| false)
    }
}

impl NodeZone {
    /// Creates a zone. `suffix` is lower case, without leading or trailing dots, and may be empty. Then `vouched`
    /// returns true for names of several labels that are known to be nodes', in addition to names that match
    /// `patterns`. It must be fast.
    pub fn new(
        suffix: String,
        patterns: Vec<NodeGlob>,
        vouched: impl Fn(&NodeName) -> bool + Send + Sync + 'static,
    ) -> Self {
        Self { suffix, patterns, vouched: Box::new(vouched) }
    }

    /// Returns true if there is no zone: a node's name may then also belong to another host of the network.
    pub fn is_open(&self) -> bool {
        self.suffix.is_empty()
    }

    /// Returns the node that a client's name means: the node with this name in the zone, otherwise the node of this
    /// name.
    pub fn node(&self, name: NodeName) -> NodeName {
        let text = name.as_str();
        let bare = text.len().checked_sub(self.suffix.len() + 1).filter(|_| !self.is_open());
        let bare = bare.and_then(|end| Some((text.get(..end)?, text.get(end..)?.strip_prefix('.')?)));
        let bare = bare.filter(|(_, suffix)| suffix.eq_ignore_ascii_case(&self.suffix));
        bare.and_then(|(bare, _)| bare.parse().ok()).unwrap_or(name)
    }

    /// Returns the node's name in DNS: lower case, without a trailing dot.
    ///
    /// # Errors
    ///
    /// Returns the reason if the node must not have a name.
    pub fn name(&self, node: &NodeName) -> Result<String, DnsNameError> {
        let mut name = node.as_str().to_ascii_lowercase();
        if !self.is_open() {
            name = format!("{name}.{}", self.suffix);
        }
        let sound = name.len() <= 253 && name.split('.').all(|label| (1..=63).contains(&label.len()));
        // An address as a node name would form an unrelated line in a hosts file.
        if !sound || name.parse::<IpAddr>().is_ok() {
            return Err(DnsNameError::Invalid);
        }
        if !self.is_open() {
            return Ok(name);
        }
        if is_reserved(&name) {
            return Err(DnsNameError::Reserved);
        }
        let of_one_label = !name.contains('.');
        if of_one_label || self.patterns.iter().any(|glob| glob.matches(node)) || (self.vouched)(node) {
            Ok(name)
        } else {
            Err(DnsNameError::Foreign)
        }
    }
}

/// Returns true for names that resolvers, browsers and a cluster's programs look up on their own. `name` is lower case,
/// without a trailing dot.
pub fn is_reserved(name: &str) -> bool {
    let of_services = name.split('.').skip(1).any(|label| label.starts_with("svc"));
    let of_cluster =
        name.strip_suffix(CLUSTER_DOMAIN).is_some_and(|before| before.is_empty() || before.ends_with('.'));
    of_services || of_cluster || name.split('.').any(|label| matches!(label, "localhost" | "wpad"))
}

/// The default cluster domain, which a cluster's programs append to the names that they look up.
pub const CLUSTER_DOMAIN: &str = "cluster.local";

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn zone(suffix: &str, patterns: &[&str]) -> NodeZone {
        let patterns = patterns.iter().map(|glob| glob.parse().unwrap()).collect();
        NodeZone::new(suffix.to_owned(), patterns, |node| *node == "known.example.org".parse().unwrap())
    }

    fn name(zone: &NodeZone, node: &str) -> Result<String, DnsNameError> {
        zone.name(&node.parse().unwrap())
    }

    #[test]
    fn a_zone_has_a_name_for_every_node_with_a_valid_dns_name() {
        let zone = zone("nodes.test", &[]);
        for node in ["Node-A", "a.b.c", "a.localhost", "kubernetes.default.svc"] {
            assert_eq!(name(&zone, node), Ok(format!("{}.nodes.test", node.to_ascii_lowercase())));
        }
        for node in ["x".repeat(64), vec!["x".repeat(60); 4].join(".")] {
            assert_eq!(name(&zone, &node), Err(DnsNameError::Invalid), "{node}");
        }
    }

    #[test]
    fn a_node_is_found_by_its_name_with_or_without_the_zone() {
        let node = |zone: &NodeZone, name: &str| zone.node(name.parse().unwrap()).to_string();
        let own = zone("nodes.test", &[]);
        for (name, expected) in [
            ("node1.nodes.test", "node1"),
            ("node1.Nodes.Test", "node1"),
            ("a.b.nodes.test", "a.b"),
            ("node1", "node1"),
            ("nodes.test", "nodes.test"),
            ("xnodes.test", "xnodes.test"),
            ("node1.nodes.test.org", "node1.nodes.test.org"),
        ] {
            assert_eq!(node(&own, name), expected);
        }
        assert_eq!(node(&zone("", &[]), "node1.nodes.test"), "node1.nodes.test");
    }

    #[test]
    fn without_a_zone_a_dotted_name_must_be_known_or_match_a_pattern() {
        let zone = zone("", &["*.edge.example.org"]);
        for node in ["node-1", "kubernetes", "known.example.org", "KNOWN.Example.org", "a.edge.example.org"] {
            assert_eq!(name(&zone, node), Ok(node.to_ascii_lowercase()));
        }
        for node in ["bank.example.org", "a.b", "edge.example.org"] {
            assert_eq!(name(&zone, node), Err(DnsNameError::Foreign), "{node}");
        }
        assert_eq!(name(&zone, "10.1.2.3"), Err(DnsNameError::Invalid));
    }

    #[test]
    fn without_a_zone_reserved_names_are_refused() {
        let all = NodeZone::new(String::new(), vec!["*".parse().unwrap()], |_| true);
        for node in [
            "a.localhost",
            "wpad",
            "wpad.example.org",
            "kubernetes.default.svc.cluster.local",
            "kubernetes.default.svc",
            "api.SVC",
            "cluster.local",
            "node1.cluster.local",
        ] {
            assert_eq!(name(&all, node), Err(DnsNameError::Reserved), "{node}");
        }
        assert!(name(&all, "mycluster.local").is_ok());
        assert!(name(&all, "svc").is_ok() && name(&all, "localhost1").is_ok());
    }

    proptest! {
        #[test]
        fn a_dns_name_is_the_nodes_name_within_the_zone(node in "[a-zA-Z0-9._-]{1,30}", suffix in "|nodes|n\\.test") {
            let zone = NodeZone::new(suffix.clone(), Vec::new(), |_| false);
            if let Ok(Ok(name)) = node.parse().map(|node| zone.name(&node)) {
                let dot = if suffix.is_empty() { "" } else { "." };
                prop_assert_eq!(name, format!("{}{dot}{suffix}", node.to_ascii_lowercase()));
            }
        }
    }
}
