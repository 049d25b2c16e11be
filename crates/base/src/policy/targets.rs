//! Targets that an edge may dial, and that a server may dial for edges.

use std::fmt;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use std::str::FromStr;

use ipnet::{IpNet, Ipv4Net, Ipv6Net};
use serde::{Deserialize, Serialize};

use crate::policy::off_limits::is_off_limits;
use crate::policy::{canonical_ip, network, network_text};
use tunnel_proto::debug_as_display;

/// The addresses and ports that may be dialled; by default loopback and the edge's own addresses, any port.
///
/// A configured list replaces the default: everything else is forbidden, including loopback and the edge's own
/// addresses.
#[derive(derive_more::Debug, Clone, PartialEq, Eq, Deserialize, Serialize)]
#[debug("{_0:?}")]
pub struct Targets(Vec<TargetEntry>);

/// An entry of the list: `127.0.0.0/8:*`, `10.1.2.3:443`, `[fd00::/8]:22`, or `self:22` for the edge's own addresses.
#[derive(Clone, PartialEq, Eq)]
pub struct TargetEntry {
    place: AllowedTargetNet,
    /// `None` allows any port.
    port: Option<u16>,
}

/// The addresses that a [`TargetEntry`] allows.
#[derive(Clone, PartialEq, Eq)]
enum AllowedTargetNet {
    /// The current addresses of the edge's machine.
    Own,
    Net(IpNet),
}

impl Targets {
    /// Returns a list of all addresses with any port.
    pub fn everything() -> Self {
        let nets = [IpNet::V4(Ipv4Net::default()), IpNet::V6(Ipv6Net::default())];
        nets.map(|net| TargetEntry { place: AllowedTargetNet::Net(net), port: None }).into_iter().collect()
    }

    /// Returns an empty list: no address may be dialled.
    pub fn none() -> Self {
        Self(Vec::new())
    }

    /// Returns true if no address may be dialled.
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// Iterates over the entries.
    pub fn iter(&self) -> impl Iterator<Item = &TargetEntry> {
        self.0.iter()
    }

    /// Returns true if any address may be dialled at this port.
    pub fn allows_port(&self, port: u16) -> bool {
        self.0.iter().any(|entry| entry.port.is_none_or(|own| own == port))
    }

    /// Returns true if an entry contains this address and only forbidden addresses. A wide network does not allow
    /// forbidden addresses.
    pub fn allows_off_limits(&self, at: SocketAddr) -> bool {
        let ip = canonical_ip(at.ip());
        self.0.iter().any(|entry| {
            entry.port.is_none_or(|port| port == at.port())
                && matches!(&entry.place, AllowedTargetNet::Net(net) if net.contains(&ip) && is_all_off_limits(net))
        })
    }

    /// Returns true if this address may be dialled. `own` are the current addresses of this machine.
    ///
    /// Compares unwrapped addresses: dial [`canonical_ip`]`(at.ip())`, not the original one.
    pub fn allows(&self, at: SocketAddr, own: &[IpAddr]) -> bool {
        let ip = canonical_ip(at.ip());
        self.0.iter().any(|entry| {
            entry.port.is_none_or(|port| port == at.port())
                && match &entry.place {
                    AllowedTargetNet::Own => own.iter().any(|o| canonical_ip(*o) == ip),
                    AllowedTargetNet::Net(net) => net.contains(&ip),
                }
        })
    }
}

impl Default for Targets {
    fn default() -> Self {
        let places = [
            AllowedTargetNet::Net(IpNet::V4(LOOPBACK4)),
            AllowedTargetNet::Net(IpNet::V6(LOOPBACK6)),
            AllowedTargetNet::Own,
        ];
        places.into_iter().map(|place| TargetEntry { place, port: None }).collect()
    }
}

impl FromIterator<TargetEntry> for Targets {
    fn from_iter<I: IntoIterator<Item = TargetEntry>>(entries: I) -> Self {
        Self(entries.into_iter().collect())
    }
}

/// The error of an allowed target without a port, or with an invalid one.
const NO_PORT: &str =
    "expected network:port or network:*, for example 127.0.0.0/8:*, 10.1.2.3:443, [fd00::/8]:22 or self:22";

impl FromStr for TargetEntry {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let (place, port) = text.rsplit_once(':').ok_or(NO_PORT)?;
        let port = match port {
            "*" => None,
            digits if digits.bytes().all(|b| b.is_ascii_digit()) => match digits.parse() {
                Ok(port) if port > 0 => Some(port),
                _ => return Err(NO_PORT.to_owned()),
            },
            _ => return Err(NO_PORT.to_owned()),
        };
        let bare = place.strip_prefix('[').and_then(|p| p.strip_suffix(']'));
        let place = match bare {
            None if place.eq_ignore_ascii_case(SELF) => AllowedTargetNet::Own,
            // An IPv6 address needs brackets, or its last group would be read as the port.
            None if place.contains(':') => return Err(NO_PORT.to_owned()),
            None => AllowedTargetNet::Net(network(place)?),
            Some(bare) => match network(bare)? {
                net @ IpNet::V6(_) => AllowedTargetNet::Net(net),
                IpNet::V4(_) => return Err(NO_PORT.to_owned()),
            },
        };
        Ok(Self { place, port })
    }
}

impl fmt::Display for TargetEntry {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.place {
            AllowedTargetNet::Own => f.write_str(SELF)?,
            AllowedTargetNet::Net(net @ IpNet::V4(_)) => f.write_str(&network_text(net))?,
            AllowedTargetNet::Net(net @ IpNet::V6(_)) => write!(f, "[{}]", network_text(net))?,
        }
        match self.port {
            None => f.write_str(":*"),
            Some(port) => write!(f, ":{port}"),
        }
    }
}

debug_as_display!(TargetEntry);

/// Returns true if all addresses of this network are forbidden. True only for IPv4 networks of length /8 or longer, and
/// for single IPv6 addresses.
fn is_all_off_limits(net: &IpNet) -> bool {
    let least = if matches!(net, IpNet::V4(_)) { 8 } else { 128 };
    net.prefix_len() >= least && is_off_limits(net.network()) && is_off_limits(net.broadcast())
}

/// Config value for the edge's own addresses, which change with its networks. No resolver is asked for this name.
const SELF: &str = "self";

/// All of 127.0.0.0/8 is loopback (RFC 1122), so services listen on more than its first address.
const LOOPBACK4: Ipv4Net = Ipv4Net::new_assert(Ipv4Addr::new(127, 0, 0, 0), 8);

/// IPv6 has a single loopback address.
const LOOPBACK6: Ipv6Net = Ipv6Net::new_assert(Ipv6Addr::LOCALHOST, 128);

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn targets(texts: &[&str]) -> Targets {
        texts.iter().map(|text| text.parse::<TargetEntry>().unwrap()).collect()
    }

    fn allows(targets: &Targets, at: &str, own: &[IpAddr]) -> bool {
        targets.allows(at.parse().unwrap(), own)
    }

    #[test]
    fn by_default_an_edge_dials_only_itself() {
        let own = ["192.0.2.7".parse().unwrap(), "2001:db8::7".parse().unwrap()];
        let targets = Targets::default();
        for at in ["127.0.0.1:22", "127.9.9.9:1", "[::1]:22", "[::ffff:127.0.0.1]:22", "192.0.2.7:80"] {
            assert!(allows(&targets, at, &own), "{at}");
        }
        assert!(allows(&targets, "[::ffff:192.0.2.7]:80", &own));
        assert!(allows(&targets, "[2001:db8::7]:80", &own));
        for at in ["192.0.2.8:80", "[::]:22", "0.0.0.0:22", "[::2]:22", "169.254.169.254:80"] {
            assert!(!allows(&targets, at, &own), "{at}");
        }
    }

    #[test]
    fn a_configured_list_replaces_the_default() {
        let own = ["192.0.2.7".parse().unwrap()];
        let targets = targets(&["10.1.2.3:443", "[fd00::/8]:22", "self:9100", "172.16.0.0/12:*"]);
        for at in ["10.1.2.3:443", "[fd12::1]:22", "192.0.2.7:9100", "172.31.0.1:5", "[::ffff:10.1.2.3]:443"]
        {
            assert!(allows(&targets, at, &own), "{at}");
        }
        for at in ["10.1.2.3:444", "10.1.2.4:443", "[fd12::1]:23", "192.0.2.7:22", "127.0.0.1:22"] {
            assert!(!allows(&targets, at, &own), "{at}");
        }
        assert!(!allows(&[].into_iter().collect(), "127.0.0.1:22", &own), "an empty list forbids all");
    }

    #[test]
    fn off_limits_addresses_are_allowed_only_by_entries_entirely_off_limits() {
        let at = |at: &str| at.parse().unwrap();
        let narrow = targets(&["127.0.0.0/8:80", "169.254.169.254:*", "[::1]:80", "10.0.0.0/8:*"]);
        for named in ["127.0.0.1:80", "[::ffff:127.9.9.9]:80", "169.254.169.254:1", "[::1]:80"] {
            assert!(narrow.allows_off_limits(at(named)), "{named}");
        }
        for other in ["127.0.0.1:81", "169.254.169.253:1", "168.63.129.16:80", "10.0.0.1:80"] {
            assert!(!narrow.allows_off_limits(at(other)), "{other}");
        }
        let wide = targets(&["0.0.0.0/0:*", "0.0.0.0/1:*", "169.0.0.0/8:*", "[::/0]:*", "[64:ff9b::/96]:*"]);
        for at in ["127.0.0.1:80", "169.254.169.254:80", "[::1]:80", "[64:ff9b::7f00:1]:80", "0.0.0.0:80"] {
            assert!(!wide.allows_off_limits(at.parse().unwrap()), "{at}");
        }
    }

    #[test]
    fn an_invalid_entry_is_refused() {
        for text in [
            "",
            "10.0.0.1",
            "10.0.0.1:",
            "10.0.0.1:0",
            "10.0.0.1:+1",
            "10.0.0.1:65536",
            "10.0.0.1/8:*",
            "edge1:22",
            "fd00::/8:22",
            "[10.0.0.0/8]:22",
            "[own]:22",
            "[::ffff:0:0/96]:22",
        ] {
            assert!(text.parse::<TargetEntry>().is_err(), "{text}");
        }
    }

    proptest! {
        #[test]
        fn an_entry_round_trips_through_its_text(bits: u128, length in 0_u8..=128, port: Option<u16>) {
            let net = Ipv6Net::new(bits.into(), length).unwrap().trunc();
            let entry = TargetEntry { place: AllowedTargetNet::Net(IpNet::V6(net)), port: port.filter(|p| *p > 0) };
            prop_assume!(length == 0 || canonical_ip(IpAddr::V6(net.addr())) == IpAddr::V6(net.addr()));
            prop_assert_eq!(entry.to_string().parse::<TargetEntry>(), Ok(entry));
        }

        #[test]
        fn the_ipv4_mapped_form_of_an_address_is_allowed_like_the_address(bits: u32, port: u16) {
            let ip = Ipv4Addr::from(bits);
            let targets = targets(&["127.0.0.0/8:*", "10.1.2.3:443"]);
            let naked = targets.allows((ip, port).into(), &[]);
            prop_assert_eq!(targets.allows((ip.to_ipv6_mapped(), port).into(), &[]), naked);
            prop_assert_eq!(naked, ip.is_loopback() || (ip == Ipv4Addr::new(10, 1, 2, 3) && port == 443));
        }
    }
}
