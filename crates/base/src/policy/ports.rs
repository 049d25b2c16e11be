//! Ports of nodes that clients may name: ports with HTTP, ports with TLS, and ports on a node's loopback.

use std::collections::{BTreeMap, BTreeSet};
use std::str::FromStr;

use tunnel_proto::names::{NameError, Target};

/// The target of a server's port, at each node.
#[derive(derive_more::Display, Debug, Clone, PartialEq, Eq)]
pub enum PortTarget {
    /// A fixed target.
    Target(Target),
    /// The port in each request's Host header, at the node itself.
    #[display("every port")]
    Host,
}

/// Ports of nodes other than the kubelet's, as listed in a ConfigMap.
#[derive(Debug, Clone, PartialEq, Eq, educe::Educe)]
#[educe(Default)]
pub struct ConfigMapPorts {
    /// HTTP ports.
    pub http: BTreeSet<u16>,
    /// HTTPS ports; disjoint from [`Self::http`].
    pub https: BTreeSet<u16>,
    /// Ports of services that listen only on a node's loopback. The default is that of a ConfigMap without this key.
    #[educe(Default = [10266, 10267].into())]
    pub loopback: BTreeSet<u16>,
}

/// An ignored part of the ConfigMap. The rest of it applies.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{key}: {found:?}: {hint}")]
pub struct PortError {
    /// Key in the ConfigMap.
    pub key: String,
    /// Ignored text, shortened.
    pub found: String,
    /// Hint: what to write instead.
    pub hint: &'static str,
}

impl ConfigMapPorts {
    /// Parses the ConfigMap's data. `own` are the ports on which this server listens, which cannot also stand for ports
    /// of nodes. Invalid parts are left out and returned as errors, the first 20 of them.
    pub fn parse(data: &BTreeMap<String, String>, own: &BTreeSet<u16>) -> (Self, Vec<PortError>) {
        let mut reader = NodePortReader { own, ports: Self::default(), errors: Vec::new() };
        for (key, text) in data {
            match key.as_str() {
                HTTP | HTTPS | PAIRS => {}
                LOOPBACK => {
                    // The key replaces the default, even with an empty list.
                    reader.ports.loopback.clear();
                    for item in items(text) {
                        let Some(port) = reader.port(key, item) else { continue };
                        let loopback = &mut reader.ports.loopback;
                        if loopback.len() < MAX_PORTS || loopback.contains(&port) {
                            loopback.insert(port);
                        } else {
                            reader.add_error(key, item, TOO_MANY);
                        }
                    }
                }
                _ => reader.add_error(key, text, NOT_A_KEY),
            }
        }
        let text = |key| data.get(key).map_or("", String::as_str);
        // HTTP before HTTPS, and pairs last: a port of two lists keeps its first meaning, and the later list gets the
        // error.
        for (key, secure) in [(HTTP, false), (HTTPS, true)] {
            for item in items(text(key)) {
                let port = reader.port(key, item);
                reader.add_port(key, item, port, secure);
            }
        }
        for item in items(text(PAIRS)) {
            let secure = match item.split_once('=').map(|(_, to)| to.trim()) {
                Some(FRONT) => false,
                Some(SECURE_FRONT) => true,
                _ => {
                    reader.add_error(PAIRS, item, NOT_A_PAIR);
                    continue;
                }
            };
            let port = item.split_once('=').map_or(item, |(port, _)| port.trim());
            let port = reader.port(PAIRS, port);
            reader.add_port(PAIRS, item, port, secure);
        }
        (reader.ports, reader.errors)
    }

    /// Returns true if a node's port is dialled at its loopback instead of its address.
    pub fn is_on_loopback(&self, port: u16) -> bool {
        KUBELET.contains(&port) || self.loopback.contains(&port)
    }
}

/// A reader of a ConfigMap with node ports: collects the valid ports and the errors.
struct NodePortReader<'a> {
    /// Ports on which this server listens; they cannot stand for ports of nodes.
    own: &'a BTreeSet<u16>,
    ports: ConfigMapPorts,
    /// Errors found so far.
    errors: Vec<PortError>,
}

impl NodePortReader<'_> {
    fn port(&mut self, key: &str, item: &str) -> Option<u16> {
        let digits = item.bytes().all(|b| b.is_ascii_digit());
        let port = item.parse().ok().filter(|port| digits && *port > 0);
        if port.is_none() {
            self.add_error(key, item, NOT_A_PORT);
        }
        port
    }

    fn add_port(&mut self, key: &str, item: &str, port: Option<u16>, secure: bool) {
        // The kubelet's ports are always redirected to servers.
        let Some(port) = port.filter(|port| !KUBELET.contains(port)) else { return };
        let count = self.ports.http.len() + self.ports.https.len();
        let (to, other) = match secure {
            true => (&mut self.ports.https, &self.ports.http),
            false => (&mut self.ports.http, &self.ports.https),
        };
        if self.own.contains(&port) {
            self.add_error(key, item, OWN);
        } else if other.contains(&port) {
            self.add_error(key, item, BOTH);
        } else if count >= MAX_PORTS && !to.contains(&port) {
            self.add_error(key, item, TOO_MANY);
        } else {
            to.insert(port);
        }
    }

    fn add_error(&mut self, key: &str, found: &str, hint: &'static str) {
        if self.errors.len() < MAX_ERRORS {
            let short = |text: &str| text.chars().take(EXCERPT).collect();
            self.errors.push(PortError { key: short(key), found: short(found), hint });
        }
    }
}

/// Returns the items of a comma-separated list.
fn items(text: &str) -> impl Iterator<Item = &str> {
    text.split(',').map(str::trim).filter(|item| !item.is_empty())
}

impl FromStr for PortTarget {
    type Err = NameError;

    fn from_str(text: &str) -> Result<Self, NameError> {
        if text == HOST { Ok(Self::Host) } else { text.parse().map(Self::Target) }
    }
}

/// Config value for [`PortTarget::Host`].
pub(crate) const HOST: &str = "host";

/// Ports of a kubelet: with TLS, and without.
pub const KUBELET: [u16; 2] = [10250, 10255];

const HTTP: &str = "http-proxy-ports";
const HTTPS: &str = "https-proxy-ports";
const LOOPBACK: &str = "localhost-proxy-ports";
const PAIRS: &str = "dnat-ports-pair";

/// Values after the `=` in `dnat-ports-pair`, for HTTP and for TLS.
const FRONT: &str = "10264";
const SECURE_FRONT: &str = "10263";

/// Maximum number of loopback ports, and of other ports: each of the latter is an entry of a Service.
const MAX_PORTS: usize = 250;

/// Maximum number of reported errors, and of characters that each quotes.
const MAX_ERRORS: usize = 20;
const EXCERPT: usize = 40;

const NOT_A_KEY: &str =
    "unknown key; expected http-proxy-ports, https-proxy-ports, localhost-proxy-ports or dnat-ports-pair";
const NOT_A_PORT: &str = "expected ports from 1 to 65535, separated by commas";
const NOT_A_PAIR: &str = "expected port=10264 for HTTP or port=10263 for TLS, separated by commas";
const OWN: &str = "the servers listen on that port; remove it, or change the servers' port in their config";
const BOTH: &str = "listed for both HTTP and TLS; remove it from one of the two";
const TOO_MANY: &str = "limit of 250 ports reached; remove some";

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn parse(data: &[(&str, &str)]) -> (ConfigMapPorts, Vec<String>) {
        let data = data.iter().map(|(key, text)| ((*key).to_owned(), (*text).to_owned())).collect();
        let (ports, errors) = ConfigMapPorts::parse(&data, &[9000, 10263].into());
        (ports, errors.iter().map(ToString::to_string).collect())
    }

    fn set(ports: &[u16]) -> BTreeSet<u16> {
        ports.iter().copied().collect()
    }

    #[test]
    fn ports_are_read_from_lists_and_from_dnat_pairs() {
        let (ports, errors) = parse(&[
            (HTTP, " 9051, 9052,"),
            (HTTPS, "9443"),
            (LOOPBACK, "10266"),
            (PAIRS, "9053=10264, 9444 = 10263,9051=10264"),
        ]);
        assert_eq!(errors, [""; 0]);
        assert_eq!(ports.http, set(&[9051, 9052, 9053]));
        assert_eq!(ports.https, set(&[9443, 9444]));
        let on_loopback = |port| ports.is_on_loopback(port);
        assert_eq!([10250, 10255, 10266, 10267, 9051].map(on_loopback), [true, true, true, false, false]);
    }

    #[test]
    fn loopback_ports_default_to_two_and_an_empty_key_means_none() {
        assert_eq!(parse(&[]).0, ConfigMapPorts::default());
        assert_eq!(parse(&[]).0.loopback, set(&[10266, 10267]));
        assert_eq!(parse(&[(LOOPBACK, "")]).0.loopback, set(&[]));
    }

    #[test]
    fn each_invalid_part_is_reported_with_key_value_and_remedy_and_the_rest_applies() {
        let (ports, errors) = parse(&[
            (HTTP, "9051,x,0,65536,+7,9000,10250"),
            (HTTPS, "9051,9443"),
            (PAIRS, "9052,9053=80,9054=10264"),
            ("http-proxy-port", "9055"),
        ]);
        assert_eq!((ports.http, ports.https), (set(&[9051, 9054]), set(&[9443])));
        let expected = [
            ("http-proxy-port: \"9055\": ", NOT_A_KEY),
            ("http-proxy-ports: \"x\": ", NOT_A_PORT),
            ("http-proxy-ports: \"0\": ", NOT_A_PORT),
            ("http-proxy-ports: \"65536\": ", NOT_A_PORT),
            ("http-proxy-ports: \"+7\": ", NOT_A_PORT),
            ("http-proxy-ports: \"9000\": ", OWN),
            ("https-proxy-ports: \"9051\": ", BOTH),
            ("dnat-ports-pair: \"9052\": ", NOT_A_PAIR),
            ("dnat-ports-pair: \"9053=80\": ", NOT_A_PAIR),
        ];
        assert_eq!(errors, expected.map(|(what, hint)| format!("{what}{hint}")));
    }

    #[test]
    fn the_numbers_of_ports_and_errors_are_bounded() {
        let many = (1..=400).map(|port: u16| port.to_string()).collect::<Vec<_>>().join(",");
        let (ports, errors) = parse(&[(HTTP, &many), (HTTPS, &"x,".repeat(1000))]);
        assert_eq!((ports.http.len(), errors.len()), (MAX_PORTS, MAX_ERRORS));
        let (ports, errors) = parse(&[(LOOPBACK, &many)]);
        assert_eq!((ports.loopback.len(), errors.len()), (MAX_PORTS, MAX_ERRORS));
        assert!(errors[0].contains("localhost-proxy-ports: \"251\": limit of 250 ports"), "{errors:?}");
        assert!(parse(&[(HTTP, &"y".repeat(10_000))]).1[0].len() < 200);
    }

    #[test]
    fn a_port_target_is_an_address_or_the_word_host() {
        assert_eq!("host".parse(), Ok(PortTarget::Host));
        assert_eq!("127.0.0.1:1".parse(), Ok(PortTarget::Target("127.0.0.1:1".parse().unwrap())));
        assert!("hosts".parse::<PortTarget>().is_err());
    }

    proptest! {
        #[test]
        fn own_ports_are_ignored_and_no_port_is_both_http_and_https(
            lists in proptest::collection::vec("[0-9, =x]{0,60}", 4),
            own in proptest::collection::btree_set(1_u16..100, 0..20),
        ) {
            let keys = [HTTP, HTTPS, LOOPBACK, PAIRS].into_iter().map(str::to_owned);
            let (ports, _) = ConfigMapPorts::parse(&keys.zip(lists).collect(), &own);
            prop_assert!(ports.http.is_disjoint(&ports.https));
            let all: BTreeSet<_> = ports.http.union(&ports.https).copied().collect();
            prop_assert!(all.is_disjoint(&own) && all.is_disjoint(&set(&KUBELET)) && !all.contains(&0));
        }

        #[test]
        fn listed_ports_are_read_back_unchanged(
            http in proptest::collection::btree_set(20_000_u16..30_000, 0..50),
            https in proptest::collection::btree_set(30_000_u16..40_000, 0..50),
            loopback in proptest::collection::btree_set(1_u16..65_535, 0..50),
        ) {
            let list = |ports: &BTreeSet<u16>| ports.iter().map(u16::to_string).collect::<Vec<_>>().join(",");
            let data = [(HTTP, &http), (HTTPS, &https), (LOOPBACK, &loopback)];
            let data = data.map(|(key, ports)| (key.to_owned(), list(ports)));
            let (read, errors) = ConfigMapPorts::parse(&data.into_iter().collect(), &BTreeSet::new());
            prop_assert_eq!(errors, vec![]);
            prop_assert_eq!(read, ConfigMapPorts { http, https, loopback });
        }
    }
}
