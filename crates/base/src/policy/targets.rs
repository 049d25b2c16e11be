//! Targets that an edge may dial, and that a server may dial for edges.

use std::fmt;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use std::str::FromStr;

use ipnet::{IpNet, Ipv4Net, Ipv6Net};

use crate::names::debug_as_display;
use crate::policy::{PolicyError, canonical_ip, network, network_text};

/// The addresses and ports that may be dialled; by default loopback and the edge's own addresses, any port.
///
/// A configured list replaces the default: everything else is forbidden, including loopback and the edge's own
/// addresses.
#[derive(Clone, PartialEq, Eq)]
pub struct Targets(Vec<TargetEntry>);

/// An entry of the list: `127.0.0.0/8:*`, `10.1.2.3:443`, `[fd00::/8]:22`, or `self:22` for the edge's own addresses.
#[derive(Clone, PartialEq, Eq)]
pub struct TargetEntry {
    place: AllowedNet,
    /// `None` allows any port.
    port: Option<u16>,
}

/// The addresses that a [`TargetEntry`] allows.
#[derive(Clone, PartialEq, Eq)]
enum AllowedNet {
    /// The current addresses of the edge's machine.
    Own,
    Net(IpNet),
}

impl Targets {
    /// Returns a list of all addresses with any port.
    pub fn everything() -> Self {
        let nets = [IpNet::V4(Ipv4Net::default()), IpNet::V6(Ipv6Net::default())];
        nets.map(|net| TargetEntry { place: AllowedNet::Net(net), port: None }).into_iter().collect()
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
                && matches!(&entry.place, AllowedNet::Net(net) if net.contains(&ip) && is_all_off_limits(net))
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
                    AllowedNet::Own => own.iter().any(|o| canonical_ip(*o) == ip),
                    AllowedNet::Net(net) => net.contains(&ip),
                }
        })
    }
}

impl Default for Targets {
    fn default() -> Self {
        let places =
            [AllowedNet::Net(IpNet::V4(LOOPBACK4)), AllowedNet::Net(IpNet::V6(LOOPBACK6)), AllowedNet::Own];
        places.into_iter().map(|place| TargetEntry { place, port: None }).collect()
    }
}

impl FromIterator<TargetEntry> for Targets {
    fn from_iter<I: IntoIterator<Item = TargetEntry>>(entries: I) -> Self {
        Self(entries.into_iter().collect())
    }
}

impl FromStr for TargetEntry {
    type Err = PolicyError;

    fn from_str(text: &str) -> Result<Self, PolicyError> {
        let (place, port) = text.rsplit_once(':').ok_or(PolicyError::Port)?;
        let port = match port {
            "*" => None,
            digits if digits.bytes().all(|b| b.is_ascii_digit()) => match digits.parse() {
                Ok(port) if port > 0 => Some(port),
                _ => return Err(PolicyError::Port),
            },
            _ => return Err(PolicyError::Port),
        };
        let bare = place.strip_prefix('[').and_then(|p| p.strip_suffix(']'));
        let place = match bare {
            None if place.eq_ignore_ascii_case(SELF) => AllowedNet::Own,
            None if place.contains(':') => return Err(PolicyError::Port),
            None => AllowedNet::Net(network(place)?),
            Some(bare) => match network(bare)? {
                net @ IpNet::V6(_) => AllowedNet::Net(net),
                IpNet::V4(_) => return Err(PolicyError::Port),
            },
        };
        Ok(Self { place, port })
    }
}

impl fmt::Display for TargetEntry {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.place {
            AllowedNet::Own => f.write_str(SELF)?,
            AllowedNet::Net(net @ IpNet::V4(_)) => f.write_str(&network_text(net))?,
            AllowedNet::Net(net @ IpNet::V6(_)) => write!(f, "[{}]", network_text(net))?,
        }
        match self.port {
            None => f.write_str(":*"),
            Some(port) => write!(f, ":{port}"),
        }
    }
}

debug_as_display!(TargetEntry);

impl fmt::Debug for Targets {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_list().entries(&self.0).finish()
    }
}

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

// Addresses that no server dials for a client, in any config: itself, its own links, and metadata services of cloud
// providers.

/// Returns true if this address is forbidden: loopback, link-local, unspecified, multicast, reserved, or a cloud
/// provider's metadata. Also true if such an IPv4 address is inside an IPv6 address that a gateway translates.
pub fn is_off_limits(ip: IpAddr) -> bool {
    match canonical_ip(ip) {
        IpAddr::V4(ip) => is_off_limits_v4(ip),
        IpAddr::V6(ip) => {
            ip.is_loopback()
                || ip.is_unspecified()
                || ip.is_multicast()
                || ip.is_unicast_link_local()
                || METADATA6.contains(&ip)
                || embeds_off_limits(ip)
        }
    }
}

/// Returns true if some programs would parse this name as an address: `2130706433`, `0x7f.1`, `0177.0.0.1`.
pub fn is_number(name: &str) -> bool {
    let last = name.rsplit('.').next().unwrap_or_default();
    let hex = last.strip_prefix("0x").or(last.strip_prefix("0X"));
    hex.is_some_and(|digits| digits.bytes().all(|b| b.is_ascii_hexdigit()))
        || !last.is_empty() && last.bytes().all(|b| b.is_ascii_digit())
}

fn is_off_limits_v4(ip: Ipv4Addr) -> bool {
    let first = ip.octets()[0];
    // The first block is "this network", the last ones are reserved and broadcast.
    first == 0
        || first >= 240
        || ip.is_loopback()
        || ip.is_link_local()
        || ip.is_multicast()
        || METADATA4.contains(&ip)
}

/// Returns true if a gateway translates this address to a forbidden IPv4 address. Covers NAT64 (RFC 6052, RFC 8215),
/// 6to4 (RFC 3056), Teredo (RFC 4380), ISATAP (RFC 5214) and SIIT (RFC 2765).
fn embeds_off_limits(ip: Ipv6Addr) -> bool {
    let [.., o2, o3, o4, o5, o6, o7, _, o9, o10, o11, o12, o13, o14, o15] = ip.octets();
    let is = |octets: [u8; 4]| is_off_limits_v4(octets.into());
    let last = [o12, o13, o14, o15];
    let [a, b, c, d, e, f, ..] = ip.segments();
    match [a, b, c, d, e, f] {
        [0x64, 0xff9b, 0, 0, 0, 0] | [0, 0, 0, 0, 0xffff, 0] | [.., 0 | 0x200, 0x5efe] => is(last),
        // The layout that the network uses is not known here. Read by a wrong layout, an address mostly begins with a
        // zero, and no gateway forwards addresses that really do.
        [0x64, 0xff9b, 1, ..] => {
            let layouts = [[o6, o7, o9, o10], [o7, o9, o10, o11], [o9, o10, o11, o12], last];
            let mut real = layouts.into_iter().filter(|octets| octets[0] != 0).peekable();
            real.peek().is_none() || real.any(is)
        }
        [0x2002, ..] => is([o2, o3, o4, o5]),
        // The server, and the obfuscated client.
        [0x2001, 0, ..] => is([o4, o5, o6, o7]) || is(last.map(|octet| !octet)),
        _ => false,
    }
}

/// Metadata of Azure and of Alibaba Cloud; most other providers use link-local addresses.
const METADATA4: [Ipv4Addr; 2] = [Ipv4Addr::new(168, 63, 129, 16), Ipv4Addr::new(100, 100, 100, 200)];

/// Metadata of AWS, of Google Cloud and of Oracle Cloud.
const METADATA6: [Ipv6Addr; 3] = [
    Ipv6Addr::new(0xfd00, 0xec2, 0, 0, 0, 0, 0, 0x254),
    Ipv6Addr::new(0xfd20, 0xce, 0, 0, 0, 0, 0, 0x254),
    Ipv6Addr::new(0xfd00, 0xc1, 0, 0, 0, 0, 0xa9fe, 0xa9fe),
];

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
            let entry = TargetEntry { place: AllowedNet::Net(IpNet::V6(net)), port: port.filter(|p| *p > 0) };
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

#[cfg(test)]
mod off_limits_tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn off_limits_addresses_are_off_limits_in_every_ipv6_form() {
        for ip in [
            "127.0.0.1",
            "127.9.9.9",
            "0.0.0.0",
            "0.1.2.3",
            "169.254.169.254",
            "169.254.0.1",
            "168.63.129.16",
            "100.100.100.200",
            "224.0.0.1",
            "239.255.255.255",
            "255.255.255.255",
            "240.0.0.1",
            "::1",
            "::",
            "fe80::1",
            "ff02::1",
            "fd00:ec2::254",
            "fd20:ce::254",
            "fd00:c1::a9fe:a9fe",
            "::ffff:127.0.0.1",
            "::ffff:169.254.169.254",
            "::127.0.0.1",
            "64:ff9b::a9fe:a9fe",
            "64:ff9b:1::7f00:1",
            "2002:7f00:1::1",
            "2002:a9fe:a9fe::",
            "::ffff:0:127.0.0.1",
            "2001:db8::5efe:127.0.0.1",
            "2001:db8::200:5efe:169.254.169.254",
            "2001:0:a9fe:a9fe::",
            "64:ff9b:1::",
        ] {
            assert!(is_off_limits(ip.parse().unwrap()), "{ip}");
        }
        for ip in [
            "10.0.0.1",
            "192.168.1.1",
            "172.16.0.1",
            "100.100.100.201",
            "168.63.129.17",
            "8.8.8.8",
            "::ffff:10.0.0.1",
            "fd00:ec2::253",
            "fd00::1",
            "2001:db8::1",
            "64:ff9b::a00:1",
            "2002:a00:1::1",
            "64:ff9b:1::a00:1",
            "64:ff9b:1:a00:0:100::",
            "2001:db8::5efe:10.0.0.1",
            "2001:0:a00:1:8000:63bf:f5ff:fffe",
        ] {
            assert!(!is_off_limits(ip.parse().unwrap()), "{ip}");
        }
    }

    #[test]
    fn numeric_hosts_are_recognised_as_numbers() {
        for number in ["2130706433", "0x7f000001", "0X7F.1", "0177.0.0.1", "127.1", "127.0.0.0x1", "0x"] {
            assert!(is_number(number), "{number}");
        }
        for name in ["edge1", "1.example", "0x7g", "a.0b1", "10-0-0-1", ""] {
            assert!(!is_number(name), "{name}");
        }
    }

    proptest! {
        #[test]
        fn an_embedded_ipv4_address_is_off_limits_like_the_address(bits: u32) {
            let ip = Ipv4Addr::from(bits);
            let naked = is_off_limits(ip.into());
            prop_assert_eq!(is_off_limits(ip.to_ipv6_mapped().into()), naked);
            let [high, low] = [(bits >> 16) as u16, bits as u16];
            for dress in [
                [0x64, 0xff9b, 0, 0, 0, 0, high, low],
                [0x2002, high, low, 0, 0, 0, 0, 1],
                [0x2001, 0, 0xa00, 1, 0x8000, 0xffff, !high, !low],
                [0x2001, 0xdb8, 0, 0, 0x200, 0x5efe, high, low],
            ] {
                prop_assert_eq!(is_off_limits(Ipv6Addr::from(dress).into()), naked);
            }
        }

        /// RFC 6052 2.2: the octet after the first 64 bits and everything after the address are ignored.
        #[test]
        fn every_layout_of_local_nat64_keeps_an_address_off_limits(
            last in prop_oneof![Just([127, 0, 0, 1]), Just([169, 254, 169, 254]), Just([168, 63, 129, 16])],
            layout in 0..4_usize,
            noise: [u8; 16],
        ) {
            let at = [[6, 7, 9, 10], [7, 9, 10, 11], [9, 10, 11, 12], [12, 13, 14, 15]][layout];
            let mut octets = noise;
            octets[..6].copy_from_slice(&[0, 0x64, 0xff, 0x9b, 0, 1]);
            for (at, octet) in at.into_iter().zip(last) {
                octets[at] = octet;
            }
            prop_assert!(is_off_limits(Ipv6Addr::from(octets).into()));
        }

        #[test]
        fn every_layout_of_local_nat64_allows_a_private_address(low: [u8; 3], layout in 0..4_usize) {
            let at = [[6, 7, 9, 10], [7, 9, 10, 11], [9, 10, 11, 12], [12, 13, 14, 15]][layout];
            let mut octets = [0, 0x64, 0xff, 0x9b, 0, 1, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0];
            let [b, c, d] = low.map(|octet| octet % 100);
            for (at, octet) in at.into_iter().zip([10, b, c, d]) {
                octets[at] = octet;
            }
            prop_assert!(!is_off_limits(Ipv6Addr::from(octets).into()));
        }
    }
}
