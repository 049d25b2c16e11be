//! Access policies: networks of clients, rules about nodes and ports, targets that an edge may dial.
//!
//! Everything here checks addresses, never names. A name is resolved first, then each of its addresses is checked, and
//! exactly the address that passed is dialled. IPv4 addresses inside IPv6 addresses are unwrapped on both sides, see
//! [`canonical_ip`].
//!
//! A text that cannot be parsed, or that can never match, is an error: a typo must neither grant nor block access.

pub mod grants;
pub mod hosts_lines;
pub mod off_limits;
pub mod ports;
pub mod targets;
pub mod tokens;
pub mod zone;

use std::net::{IpAddr, Ipv6Addr};
use std::str::FromStr;

use ipnet::IpNet;
use serde::de::{Deserializer, Error};
use serde::{Deserialize, Serialize, Serializer};

use crate::serde_forms::{ConfigPort, non_empty};
use tunnel_proto::debug_as_display;
use tunnel_proto::names::NodeName;

/// A set of networks: `10.0.0.0/8`, `fd00::/8`, or single addresses.
///
/// `0.0.0.0/0` contains all of IPv4 and no IPv6 address; `::/0` all of IPv6 and no IPv4 address.
#[derive(derive_more::Debug, Clone, PartialEq, Eq, Default)]
#[debug("{_0:?}")]
pub struct Networks(Vec<IpNet>);

/// A pattern for node names, in which `*` matches any run of characters. Case is ignored.
#[derive(derive_more::Display, Clone, PartialEq, Eq)]
pub struct NodeGlob(String);

/// A pattern for names in a client's certificate, in which `*` matches any run of characters. Case is ignored.
#[derive(derive_more::Display, Clone, PartialEq, Eq)]
pub struct CertificateGlob(String);

/// A rule that allows requests matching all of its parts; an absent part matches everything.
#[derive(Debug, Clone, PartialEq, Eq, Default, Deserialize, Serialize)]
#[serde(default)]
pub struct Rule {
    /// Authenticated users. Unauthenticated clients match only if this is absent.
    #[serde(deserialize_with = "non_empty::<_, String, _>")]
    pub users: Option<Vec<String>>,
    /// Networks of clients.
    #[serde(deserialize_with = "non_empty::<_, Network, _>")]
    pub from: Option<Networks>,
    /// Nodes that may be requested.
    #[serde(deserialize_with = "non_empty::<_, NodeGlob, _>")]
    pub nodes: Option<Vec<NodeGlob>>,
    /// Ports of the target.
    #[serde(deserialize_with = "non_empty::<_, ConfigPort<1>, _>")]
    pub ports: Option<Vec<ConfigPort<1>>>,
}

/// Rules about which clients may request which node and port. A request is allowed if any rule allows it, or if there
/// are no rules.
#[derive(Debug, Clone, PartialEq, Eq, Default, Deserialize, Serialize)]
pub struct Rules(pub Vec<Rule>);

/// Returns the IPv4 address inside an IPv6 address: `::ffff:10.0.0.1` (mapped) or `::10.0.0.1` (compatible); other
/// addresses unchanged. Dial the result, as it is what was checked.
pub fn canonical_ip(ip: IpAddr) -> IpAddr {
    match ip {
        IpAddr::V6(v6) if v6 != Ipv6Addr::LOCALHOST && !v6.is_unspecified() => {
            v6.to_ipv4().map_or(ip, IpAddr::V4)
        }
        _ => ip,
    }
}

/// Returns the source of an address: an IPv4 address, or the first address of an IPv6 address's /64. An IPv4 address in
/// an IPv6 address is treated as IPv4.
pub fn source_of(from: IpAddr) -> IpAddr {
    match canonical_ip(from) {
        IpAddr::V6(ip) => Ipv6Addr::from_bits(ip.to_bits() >> 64 << 64).into(),
        ip @ IpAddr::V4(_) => ip,
    }
}

impl Networks {
    /// Returns true if one of the networks contains the address.
    pub fn contains(&self, ip: IpAddr) -> bool {
        let ip = canonical_ip(ip);
        self.0.iter().any(|net| net.contains(&ip))
    }

    /// Iterates over the networks.
    pub fn iter(&self) -> impl Iterator<Item = &IpNet> {
        self.0.iter()
    }

    /// Returns true if there are no networks, so that no client matches.
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// Returns true if a network contains a whole address family, so that it excludes no client of that family.
    pub fn contains_all_addresses(&self) -> bool {
        self.0.iter().any(|net| net.prefix_len() == 0)
    }
}

impl NodeGlob {
    /// Returns true if the node matches.
    pub fn matches(&self, node: &NodeName) -> bool {
        matches(self.0.as_bytes(), node.as_str().as_bytes())
    }
}

impl CertificateGlob {
    /// Returns true if the name matches.
    pub fn matches(&self, name: &str) -> bool {
        matches(self.0.as_bytes(), name.as_bytes())
    }

    /// Returns true if it matches every name, and so does not distinguish clients.
    pub fn matches_everything(&self) -> bool {
        self.0.bytes().all(|byte| byte == b'*')
    }
}

impl Rules {
    /// Returns rules that allow nothing.
    pub fn none() -> Self {
        Self(vec![Rule { users: Some(Vec::new()), from: None, nodes: None, ports: None }])
    }

    /// Returns true if a client at `from` (with its authenticated `user`, if any) may reach this port of this node. Without
    /// an address that is from some address, and without a port some port.
    pub fn allow(
        &self,
        user: Option<&str>,
        from: Option<IpAddr>,
        node: &NodeName,
        port: impl Into<Option<u16>>,
    ) -> bool {
        let port = port.into();
        let applies = |rule: &Rule| {
            rule.is_for(user, from)
                && rule.nodes.as_ref().is_none_or(|globs| globs.iter().any(|glob| glob.matches(node)))
                && port.zip(rule.ports.as_ref()).is_none_or(|(port, all)| all.contains(&ConfigPort(port)))
        };
        self.is_empty() || self.0.iter().any(applies)
    }

    /// Returns true if a user may reach this port, or with `None` all ports, of every node that matches. With an address
    /// only from there, otherwise from some address.
    fn cover(&self, user: &str, from: Option<IpAddr>, nodes: &NodeGlob, port: Option<ConfigPort<1>>) -> bool {
        // One pattern covers another if it matches its text, in which only '*' can stand for '*'.
        let covers = |glob: &NodeGlob| matches(glob.0.as_bytes(), nodes.0.as_bytes());
        self.0.is_empty()
            || self.0.iter().any(|rule| {
                rule.is_for(Some(user), from)
                    && rule.nodes.as_ref().is_none_or(|globs| globs.iter().any(covers))
                    && rule.ports.as_ref().is_none_or(|all| port.is_some_and(|port| all.contains(&port)))
            })
    }

    /// Returns the rules that let such a client reach something.
    pub fn of(&self, user: &str, from: IpAddr) -> impl Iterator<Item = &Rule> {
        self.0.iter().filter(move |rule| rule.is_for(Some(user), Some(from)))
    }

    /// Returns true if a rule names users.
    pub fn has_users(&self) -> bool {
        self.0.iter().any(|rule| rule.users.is_some())
    }

    /// Returns the users that rules name, each with the index of its rule, and its index there.
    pub fn users(&self) -> impl Iterator<Item = (usize, usize, &str)> {
        self.0.iter().enumerate().flat_map(|(i, rule)| {
            rule.users.iter().flatten().enumerate().map(move |(j, user)| (i, j, user.as_str()))
        })
    }

    /// Returns true if there are no rules: everything is allowed.
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }
}

impl Rule {
    /// Returns true if the rule is about such a client; without an address, if it is from some address.
    fn is_for(&self, user: Option<&str>, from: Option<IpAddr>) -> bool {
        let named = |users: &Vec<String>| user.is_some_and(|user| users.iter().any(|u| u == user));
        let contains = |nets: &Networks| from.is_none_or(|from| nets.contains(from));
        self.users.as_ref().is_none_or(named) && self.from.as_ref().is_none_or(contains)
    }
}

/// One of [`Networks`]: a network, or a single address.
#[derive(Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Network(pub IpNet);

impl<'de> Deserialize<'de> for Network {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        network(&String::deserialize(deserializer)?).map(Self).map_err(D::Error::custom)
    }
}

impl<'de> Deserialize<'de> for Networks {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        Vec::<Network>::deserialize(deserializer).map(Self::from_iter)
    }
}

impl FromIterator<Network> for Networks {
    fn from_iter<I: IntoIterator<Item = Network>>(networks: I) -> Self {
        networks.into_iter().map(|Network(network)| network).collect()
    }
}

impl Serialize for Networks {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_seq(self.iter().map(network_text))
    }
}

impl FromIterator<IpNet> for Networks {
    fn from_iter<I: IntoIterator<Item = IpNet>>(nets: I) -> Self {
        Self(nets.into_iter().collect())
    }
}

impl FromStr for NodeGlob {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let known = |b: u8| b.is_ascii_alphanumeric() || matches!(b, b'-' | b'_' | b'.' | b'*');
        if matches!(text.len(), 1..=253) && text.bytes().all(known) {
            Ok(Self(text.to_ascii_lowercase()))
        } else {
            Err("not a node name; expected letters, digits, '-', '_', '.', and '*' for any run of them"
                .to_owned())
        }
    }
}

impl FromStr for CertificateGlob {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        if matches!(text.len(), 1..=253) && !text.contains(char::is_control) {
            Ok(Self(text.to_ascii_lowercase()))
        } else {
            Err("not a certificate name; expected text without control characters, and '*' for any run of characters"
                .to_owned())
        }
    }
}

debug_as_display!(NodeGlob, CertificateGlob);

const NOT_A_NETWORK: &str =
    "not a network; expected an address or a network, for example 10.0.0.0/8, 10.1.2.3 or fd00::/8";

/// Parses one network.
///
/// # Errors
///
/// Fails for anything but exactly one network of one family.
pub fn network(text: &str) -> Result<IpNet, String> {
    let net = match text.parse::<IpAddr>() {
        Ok(ip) => IpNet::from(ip),
        Err(_) => text.parse::<IpNet>().map_err(|_| NOT_A_NETWORK)?,
    };
    if net.addr() != net.network() {
        return Err(format!(
            "address has bits set after the prefix; for the whole network write {}, for one address remove the '/' and \
             the length",
            net.trunc()
        ));
    }
    if net.prefix_len() > 0 && canonical_ip(net.addr()) != net.addr() {
        // Clients are compared unwrapped, so it would never match.
        return Err("an IPv4 network written as IPv6; write it as IPv4".to_owned());
    }
    Ok(net)
}

/// Returns the text of a network, which is an address if it contains only one.
pub(crate) fn network_text(net: &IpNet) -> String {
    let single = net.prefix_len() == net.max_prefix_len();
    if single { net.addr().to_string() } else { net.to_string() }
}

/// Matches a lower-case `glob`. Backtracks to the last star only, so it is linear for one star and never exponential.
fn matches(glob: &[u8], name: &[u8]) -> bool {
    let mut g = 0;
    let mut n = 0;
    let mut star: Option<(usize, usize)> = None;
    while let Some(byte) = name.get(n) {
        match glob.get(g) {
            Some(b'*') => {
                star = Some((g + 1, n));
                g += 1;
            }
            Some(want) if *want == byte.to_ascii_lowercase() => {
                g += 1;
                n += 1;
            }
            _ => match star {
                Some((behind, from)) => {
                    star = Some((behind, from + 1));
                    g = behind;
                    n = from + 1;
                }
                None => return false,
            },
        }
    }
    glob.iter().skip(g).all(|b| *b == b'*')
}

#[cfg(test)]
mod tests {
    use crate::policy::targets::TargetEntry;
    use std::net::Ipv4Addr;

    use proptest::prelude::*;

    use super::*;

    fn networks(texts: &[&str]) -> Networks {
        texts.iter().map(|text| network(text).unwrap()).collect()
    }

    fn node(name: &str) -> NodeName {
        name.parse().unwrap()
    }

    #[test]
    fn an_invalid_network_is_refused_with_a_remedy() {
        for (text, cure) in [
            ("10.0.0.1/8", "write 10.0.0.0/8"),
            ("10.0.0.0/33", "expected an address or a network"),
            ("010.0.0.1", "expected an address or a network"),
            ("edge1", "expected an address or a network"),
            ("", "expected an address or a network"),
            ("::ffff:10.0.0.0/104", "write it as IPv4"),
            ("::10.0.0.1", "write it as IPv4"),
        ] {
            let error = network(text).unwrap_err().to_string();
            assert!(error.contains(cure), "{text}: {error}");
        }
    }

    #[test]
    fn a_client_with_an_ipv4_address_in_ipv6_form_matches_as_ipv4() {
        let nets = networks(&["10.0.0.0/8"]);
        for inside in ["10.1.2.3", "::ffff:10.1.2.3", "::10.1.2.3"] {
            assert!(nets.contains(inside.parse().unwrap()), "{inside}");
        }
        for outside in ["11.0.0.1", "::ffff:11.0.0.1", "::1", "::", "fd00::1"] {
            assert!(!nets.contains(outside.parse().unwrap()), "{outside}");
        }
        assert!(networks(&["::1"]).contains("::1".parse().unwrap()));
        assert!(!networks(&["::/0"]).contains("::ffff:10.0.0.1".parse().unwrap()));
    }

    #[test]
    fn a_rule_allows_only_what_matches_all_of_its_parts() {
        let rule = Rule {
            users: Some(vec!["ops".to_owned()]),
            from: Some(networks(&["10.0.0.0/8"])),
            nodes: Some(vec!["edge-*".parse().unwrap()]),
            ports: Some(vec![ConfigPort(22)]),
        };
        let rules = Rules(vec![rule]);
        let from: IpAddr = "::ffff:10.9.9.9".parse().unwrap();
        assert!(rules.allow(Some("ops"), Some(from), &node("Edge-7"), 22));
        assert!(!rules.allow(Some("Ops"), Some(from), &node("edge-7"), 22), "users are case-sensitive");
        assert!(!rules.allow(None, Some(from), &node("edge-7"), 22));
        assert!(!rules.allow(Some("ops"), "192.0.2.1".parse().ok(), &node("edge-7"), 22));
        assert!(!rules.allow(Some("ops"), Some(from), &node("node-7"), 22));
        assert!(!rules.allow(Some("ops"), Some(from), &node("edge-7"), 23));
    }

    #[test]
    fn no_rules_and_an_empty_rule_allow_everything() {
        let from = IpAddr::V4(Ipv4Addr::new(192, 0, 2, 1));
        assert!(Rules::default().allow(None, Some(from), &node("n"), 1));
        assert!(Rules(vec![Rule::default()]).allow(None, Some(from), &node("n"), 1));
    }

    /// The expected result of [`matches`], computed recursively.
    fn model(glob: &[u8], name: &[u8]) -> bool {
        match (glob.split_first(), name.split_first()) {
            (None, None) => true,
            (Some((b'*', rest)), _) => (0..=name.len()).any(|n| model(rest, &name[n..])),
            (Some((g, glob)), Some((n, name))) => g.eq_ignore_ascii_case(n) && model(glob, name),
            _ => false,
        }
    }

    proptest! {
        #[test]
        fn globs_match_like_a_recursive_model(glob in "[ab*]{1,8}", name in "[abAB]{1,10}") {
            let parsed: NodeGlob = glob.parse().unwrap();
            prop_assert_eq!(parsed.matches(&node(&name)), model(glob.as_bytes(), name.as_bytes()));
        }

        #[test]
        fn a_glob_with_many_stars_matches_fast(stars in 1_usize..120) {
            let glob: NodeGlob = format!("{}b", "*a".repeat(stars)).parse().unwrap();
            prop_assert!(!glob.matches(&node(&"a".repeat(250))));
        }

        #[test]
        fn networks_contain_an_ipv4_address_also_in_mapped_form(bits: u32, net: u32, length in 0_u8..=32) {
            let net = ipnet::Ipv4Net::new(net.into(), length).unwrap().trunc();
            let nets = Networks::from_iter([IpNet::V4(net)]);
            let ip = Ipv4Addr::from(bits);
            prop_assert_eq!(nets.contains(IpAddr::V6(ip.to_ipv6_mapped())), net.contains(&ip));
            prop_assert_eq!(nets.contains(IpAddr::V4(ip)), net.contains(&ip));
        }

        #[test]
        fn adding_a_rule_never_revokes_access(ports in proptest::collection::vec(1_u16..9, 1..4), more in 1_u16..9, port in 1_u16..9) {
            let rule = |port| Rule { ports: Some(vec![ConfigPort(port)]), ..Rule::default() };
            let some = Rules(ports.iter().map(|p| rule(*p)).collect());
            let all = Rules(ports.iter().chain([&more]).map(|p| rule(*p)).collect());
            let allows = |rules: &Rules| rules.allow(None, Some(Ipv4Addr::LOCALHOST.into()), &node("n"), port);
            prop_assert!(!allows(&some) || allows(&all));
            prop_assert_eq!(allows(&all), ports.contains(&port) || more == port);
        }

        #[test]
        fn no_text_makes_a_policy_panic(text in ".{0,80}") {
            let _ = (network(&text), text.parse::<NodeGlob>(), text.parse::<TargetEntry>());
        }
    }
}
