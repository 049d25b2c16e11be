//! Which nodes have a name in DNS: the one rule for publishing a node, and for asking DNS for it.

use std::collections::BTreeSet;
use std::fmt;
use std::net::IpAddr;

use crate::names::NodeName;
use crate::policy::Glob;

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
pub enum DnsNameError {
    /// A label that is too long, too long in all, or an address.
    #[error("DNS cannot carry it as a name: want labels of 1 to 63 letters, 253 in all, and no address")]
    Invalid,
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
    pub fn name(&self, node: &NodeName) -> Result<String, DnsNameError> {
        let mut name = node.as_str().to_ascii_lowercase();
        if !self.is_open() {
            name = format!("{name}.{}", self.suffix);
        }
        let sound = name.len() <= 253 && name.split('.').all(|label| (1..=63).contains(&label.len()));
        // A node that calls itself by an address would be a line of its own meaning in a hosts file.
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

impl fmt::Debug for Zone {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Zone({:?}, {:?})", self.suffix, self.patterns)
    }
}

/// Names that resolvers, browsers and the programs of a cluster look up by themselves, for every user.
/// `name` is lower case, without a dot at its end.
pub fn is_reserved(name: &str) -> bool {
    let of_services = name.split('.').skip(1).any(|label| label.starts_with("svc"));
    let of_cluster =
        name.strip_suffix(CLUSTER_DOMAIN).is_some_and(|before| before.is_empty() || before.ends_with('.'));
    of_services || of_cluster || name.split('.').any(|label| matches!(label, "localhost" | "wpad"))
}

/// The domain of nearly every cluster, which its programs append to the names that they look up.
pub const CLUSTER_DOMAIN: &str = "cluster.local";

// The lines of pods in the text of a hosts file: `<address>    <name>`. Every other byte of it is somebody else's.

/// The text with these as the only lines of a pod. They stand at the top, so that nothing of others need be touched,
/// not even an end without a line break; where nothing is to be changed, nothing is.
pub fn merged(text: &[u8], server: IpAddr, records: &BTreeSet<String>) -> Vec<u8> {
    let wanted: BTreeSet<String> = records.iter().map(|name| format!("{server}    {name}\n")).collect();
    let (mut foreign, mut ours) = (Vec::with_capacity(text.len()), Vec::new());
    for (line, of) in lines(text) {
        match of {
            Some(of) if of == server => ours.push(line),
            _ => foreign.extend_from_slice(line),
        }
    }
    // Each of them once: what somebody has doubled is written anew.
    let stand: BTreeSet<&[u8]> = ours.iter().copied().collect();
    if ours.len() == wanted.len() && wanted.iter().all(|line| stand.contains(line.as_bytes())) {
        return text.to_vec();
    }
    let mut new: Vec<u8> = wanted.into_iter().collect::<String>().into_bytes();
    new.extend(foreign);
    new
}

/// The addresses that have lines as pods write them.
pub fn servers(text: &[u8]) -> BTreeSet<IpAddr> {
    lines(text).filter_map(|(_, of)| of).collect()
}

/// The text without the lines of these pods.
pub fn without(text: &[u8], gone: &BTreeSet<IpAddr>) -> Vec<u8> {
    let kept = lines(text).filter(|(_, of)| of.is_none_or(|of| !gone.contains(&of)));
    kept.flat_map(|(line, _)| line).copied().collect()
}

/// Each line with its end, and whose it is if a pod has written it.
fn lines(text: &[u8]) -> impl Iterator<Item = (&[u8], Option<IpAddr>)> {
    let mut fenced = false;
    text.split_inclusive(|b| *b == b'\n').map(move |line| {
        let bare = line.trim_ascii();
        fenced = (fenced || bare == USER_SECTION_BEGIN) && bare != FENCE_END;
        (line, if fenced { None } else { server(line) })
    })
}

/// Whose line this is: one address in the form we write it, four spaces, one word. A line with more is somebody else's.
fn server(line: &[u8]) -> Option<IpAddr> {
    let (address, name) = str::from_utf8(line).ok()?.strip_suffix('\n')?.split_once(GAP)?;
    let one_word = !name.is_empty()
        && name.bytes().all(|b| b.is_ascii_alphanumeric() || matches!(b, b'-' | b'_' | b'.'));
    let server: IpAddr = address.parse().ok()?;
    (one_word && server.to_string() == address).then_some(server)
}

/// Between address and name, as SuperEdge writes it.
const GAP: &str = "    ";

/// Where people's own lines begin, as SuperEdge marks them.
const USER_SECTION_BEGIN: &[u8] = b"#CustomStart";

/// Where they end.
const FENCE_END: &[u8] = b"#CustomEnd";

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn zone(suffix: &str, patterns: &[&str]) -> Zone {
        let patterns = patterns.iter().map(|glob| glob.parse().unwrap()).collect();
        Zone::new(suffix.to_owned(), patterns, |node| *node == "known.example.org".parse().unwrap())
    }

    fn name(zone: &Zone, node: &str) -> Result<String, DnsNameError> {
        zone.name(&node.parse().unwrap())
    }

    #[test]
    fn a_zone_of_our_own_has_every_node_that_dns_can_carry() {
        let zone = zone("nodes.test", &[]);
        for node in ["Node-A", "a.b.c", "localhost", "kubernetes.default.svc"] {
            assert_eq!(name(&zone, node), Ok(format!("{}.nodes.test", node.to_ascii_lowercase())));
        }
        for node in ["x".repeat(64), vec!["x".repeat(60); 4].join(".")] {
            assert_eq!(name(&zone, &node), Err(DnsNameError::Invalid), "{node}");
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
            assert_eq!(name(&zone, node), Err(DnsNameError::Foreign), "{node}");
        }
        assert_eq!(name(&zone, "10.1.2.3"), Err(DnsNameError::Invalid));
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
            assert_eq!(name(&all, node), Err(DnsNameError::Reserved), "{node}");
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

#[cfg(test)]
mod lines_tests {
    use proptest::prelude::*;

    use super::*;

    fn ip(last: u8) -> IpAddr {
        IpAddr::from([10, 0, 0, last])
    }

    fn names(names: &[&str]) -> BTreeSet<String> {
        names.iter().map(|name| (*name).to_owned()).collect()
    }

    #[test]
    fn foreign_lines_comments_and_the_custom_block_stay_byte_for_byte() {
        let foreign = "127.0.0.1 localhost\r\n# ours?\n10.0.0.2    other-pod\n10.0.0.1    two names\n\
                       #CustomStart\n10.0.0.1    mine\n#CustomEnd\n10.0.0.11    near\nno end";
        let one = merged(foreign.as_bytes(), ip(1), &names(&["b", "a"]));
        assert_eq!(String::from_utf8_lossy(&one), format!("10.0.0.1    a\n10.0.0.1    b\n{foreign}"));
        let other = merged(&one, ip(1), &names(&["c"]));
        assert_eq!(String::from_utf8_lossy(&other), format!("10.0.0.1    c\n{foreign}"));
        assert_eq!(merged(&other, ip(1), &names(&[])), foreign.as_bytes());
    }

    #[test]
    fn lines_of_ours_stay_where_another_server_has_put_them() {
        let text = b"10.0.0.2    b\n10.0.0.1    a\n";
        assert_eq!(merged(text, ip(1), &names(&["a"])), text);
    }

    #[test]
    fn a_line_that_somebody_has_doubled_does_not_stand_for_another() {
        let text = b"10.0.0.1    a\n10.0.0.1    a\n";
        assert_eq!(merged(text, ip(1), &names(&["a", "b"])), b"10.0.0.1    a\n10.0.0.1    b\n");
    }

    #[test]
    fn lines_of_dead_servers_go_and_no_others() {
        let text = b"10.0.0.1    a\n10.0.0.2    b\n10.0.0.3 c\nfd00::1    d\n#CustomStart\n10.0.0.2    e\n#CustomEnd\n\
                     10.0.0.2    f\n10.0.0.2    g h\nFD00::1    i\n10.0.0.2    no end";
        assert_eq!(servers(text), BTreeSet::from([ip(1), ip(2), "fd00::1".parse().unwrap()]));
        let left = b"10.0.0.1    a\n10.0.0.3 c\nfd00::1    d\n#CustomStart\n10.0.0.2    e\n#CustomEnd\n\
                     10.0.0.2    g h\nFD00::1    i\n10.0.0.2    no end";
        assert_eq!(without(text, &BTreeSet::from([ip(2), ip(3)])), left);
    }

    fn line() -> impl Strategy<Value = String> {
        prop_oneof![
            "10\\.0\\.0\\.[12]    [a-c]{1,2}",
            "10\\.0\\.0\\.[12] [a-c]",
            Just("#CustomStart".to_owned()),
            Just("#CustomEnd".to_owned()),
            "\\PC{0,12}",
        ]
    }

    proptest! {
        #[test]
        fn only_own_lines_ever_change(
            lines in prop::collection::vec(line(), 0..12),
            ends in any::<bool>(),
            wanted in prop::collection::btree_set("[a-c]{1,2}", 0..4),
        ) {
            let mut text = lines.join("\n");
            if ends { text.push('\n'); }
            let text = text.as_bytes();
            let without = |text: &[u8], server| {
                let bare = merged(text, ip(server), &names(&["never-there"]));
                bare.strip_prefix(format!("10.0.0.{server}    never-there\n").as_bytes()).unwrap().to_vec()
            };
            let new = merged(text, ip(1), &wanted);
            prop_assert_eq!(without(&new, 1), without(text, 1), "the rest is the same");
            prop_assert_eq!(&merged(&new, ip(1), &wanted), &new, "once is enough");
            for name in &wanted {
                let line = format!("10.0.0.1    {name}");
                prop_assert!(String::from_utf8_lossy(&new).lines().any(|l| l == line));
            }
            let back = merged(&merged(&new, ip(2), &wanted), ip(2), &BTreeSet::new());
            prop_assert_eq!(without(&back, 2), without(&new, 2), "two pods do not touch each other");
        }
    }
}
