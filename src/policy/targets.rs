//! What an edge may dial, and what a pod dials for edges.

use std::fmt;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use std::str::FromStr;

use ipnet::{IpNet, Ipv4Net, Ipv6Net};

use super::{PolicyError, is_off_limits, network, plain};

/// The addresses and ports that may be dialled; by default loopback and the edge's own addresses, any port.
///
/// A given list stands alone: what it does not hold is forbidden, loopback and own addresses included.
#[derive(Clone, PartialEq, Eq)]
pub struct Targets(Vec<TargetEntry>);

/// One entry of the list: `127.0.0.0/8:*`, `10.1.2.3:443`, `[fd00::/8]:22`, or `own:22` for the edge's own addresses.
#[derive(Clone, PartialEq, Eq)]
pub struct TargetEntry {
    place: AllowedNet,
    /// `None`: any port.
    port: Option<u16>,
}

#[derive(Clone, PartialEq, Eq)]
enum AllowedNet {
    Own,
    Net(IpNet),
}

/// Where this process itself listens. These are never targets, even if a list has them, as connections from there count
/// as this machine's.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Listening(Vec<SocketAddr>);

impl Listening {
    /// Would dialling this address reach this process? `own` are the addresses of this machine, as of now.
    pub fn holds(&self, at: SocketAddr, own: &[IpAddr]) -> bool {
        let ip = plain(at.ip());
        let here = |at: IpAddr| at.is_loopback() || own.iter().any(|o| plain(*o) == at);
        self.0.iter().filter(|listener| listener.port() == at.port()).any(|listener| {
            let listener = plain(listener.ip());
            // To dial the unspecified address is to dial loopback.
            listener == ip || ip.is_unspecified() || listener.is_unspecified() && here(ip)
        })
    }
}

impl FromIterator<SocketAddr> for Listening {
    fn from_iter<I: IntoIterator<Item = SocketAddr>>(listeners: I) -> Self {
        Self(listeners.into_iter().collect())
    }
}

impl Targets {
    /// All addresses, any port.
    pub fn everything() -> Self {
        let nets = [IpNet::V4(Ipv4Net::default()), IpNet::V6(Ipv6Net::default())];
        nets.map(|net| TargetEntry { place: AllowedNet::Net(net), port: None }).into_iter().collect()
    }

    /// Whether any address may be dialled at this port.
    pub fn name_port(&self, port: u16) -> bool {
        self.0.iter().any(|entry| entry.port.is_none_or(|own| own == port))
    }

    /// Does an entry hold this address, and nothing else than what is off limits? So no wide network opens that.
    pub fn name_off_limits(&self, at: SocketAddr) -> bool {
        let ip = plain(at.ip());
        self.0.iter().any(|entry| {
            entry.port.is_none_or(|port| port == at.port())
                && matches!(&entry.place, AllowedNet::Net(net) if net.contains(&ip) && is_all_off_limits(net))
        })
    }

    /// May this address be dialled? `own` are the addresses of this machine, as of now.
    ///
    /// Compares unwrapped addresses: dial [`plain`]`(at.ip())`, not the dressed one.
    pub fn allows(&self, at: SocketAddr, own: &[IpAddr]) -> bool {
        let ip = plain(at.ip());
        self.0.iter().any(|entry| {
            entry.port.is_none_or(|port| port == at.port())
                && match &entry.place {
                    AllowedNet::Own => own.iter().any(|o| plain(*o) == ip),
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
            None if place.eq_ignore_ascii_case(OWN) => AllowedNet::Own,
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
            AllowedNet::Own => f.write_str(OWN)?,
            AllowedNet::Net(net @ IpNet::V4(_)) => write!(f, "{net}")?,
            AllowedNet::Net(net @ IpNet::V6(_)) => write!(f, "[{net}]")?,
        }
        match self.port {
            None => f.write_str(":*"),
            Some(port) => write!(f, ":{port}"),
        }
    }
}

impl fmt::Debug for TargetEntry {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

impl fmt::Debug for Targets {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_list().entries(&self.0).finish()
    }
}

/// Is every address of this network off limits? Only said of IPv4 networks within a block of 8 bits, and of single IPv6
/// addresses.
fn is_all_off_limits(net: &IpNet) -> bool {
    let least = if matches!(net, IpNet::V4(_)) { 8 } else { 128 };
    net.prefix_len() >= least && is_off_limits(net.network()) && is_off_limits(net.broadcast())
}

/// The word for the edge's own addresses: no name a resolver would be asked for, and they change with its networks.
const OWN: &str = "own";

/// All of 127.0.0.0/8 stays on the machine (RFC 1122), so services listen on more than its first address.
const LOOPBACK4: Ipv4Net = Ipv4Net::new_assert(Ipv4Addr::new(127, 0, 0, 0), 8);

/// IPv6 has one loopback address only.
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
    fn by_default_an_edge_dials_itself_and_nobody_else() {
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
    fn a_given_list_stands_alone() {
        let own = ["192.0.2.7".parse().unwrap()];
        let targets = targets(&["10.1.2.3:443", "[fd00::/8]:22", "own:9100", "172.16.0.0/12:*"]);
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
    fn what_reaches_this_process_is_told_in_every_dress() {
        let own = ["192.0.2.7".parse().unwrap(), "2001:db8::7".parse().unwrap()];
        let listening = |at: &str| Listening::from_iter([at.parse().unwrap()]);
        let holds = |listener: &str, at: &str| listening(listener).holds(at.parse().unwrap(), &own);
        for at in ["127.0.0.1:7", "[::ffff:127.0.0.1]:7", "[::127.0.0.1]:7", "0.0.0.0:7", "[::]:7"] {
            assert!(holds("127.0.0.1:7", at), "{at}");
        }
        for listener in ["0.0.0.0:7", "[::]:7"] {
            for at in ["127.9.9.9:7", "[::1]:7", "192.0.2.7:7", "[::ffff:192.0.2.7]:7", "[2001:db8::7]:7"] {
                assert!(holds(listener, at), "{listener} {at}");
            }
            for at in ["192.0.2.8:7", "192.0.2.7:8", "127.0.0.1:8"] {
                assert!(!holds(listener, at), "{listener} {at}");
            }
        }
        assert!(!holds("127.0.0.1:7", "192.0.2.7:7") && !holds("192.0.2.7:7", "127.0.0.1:7"));
    }

    #[test]
    fn what_is_off_limits_is_named_by_entries_that_are_about_it_alone() {
        let at = |at: &str| at.parse().unwrap();
        let narrow = targets(&["127.0.0.0/8:80", "169.254.169.254:*", "[::1]:80", "10.0.0.0/8:*"]);
        for named in ["127.0.0.1:80", "[::ffff:127.9.9.9]:80", "169.254.169.254:1", "[::1]:80"] {
            assert!(narrow.name_off_limits(at(named)), "{named}");
        }
        for other in ["127.0.0.1:81", "169.254.169.253:1", "168.63.129.16:80", "10.0.0.1:80"] {
            assert!(!narrow.name_off_limits(at(other)), "{other}");
        }
        let wide = targets(&["0.0.0.0/0:*", "0.0.0.0/1:*", "169.0.0.0/8:*", "[::/0]:*", "[64:ff9b::/96]:*"]);
        for at in ["127.0.0.1:80", "169.254.169.254:80", "[::1]:80", "[64:ff9b::7f00:1]:80", "0.0.0.0:80"] {
            assert!(!wide.name_off_limits(at.parse().unwrap()), "{at}");
        }
    }

    #[test]
    fn an_entry_that_cannot_be_meant_is_refused() {
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
        fn an_entry_survives_its_text(bits: u128, length in 0_u8..=128, port: Option<u16>) {
            let net = Ipv6Net::new(bits.into(), length).unwrap().trunc();
            let entry = TargetEntry { place: AllowedNet::Net(IpNet::V6(net)), port: port.filter(|p| *p > 0) };
            prop_assume!(length == 0 || plain(IpAddr::V6(net.addr())) == IpAddr::V6(net.addr()));
            prop_assert_eq!(entry.to_string().parse::<TargetEntry>(), Ok(entry));
        }

        #[test]
        fn dress_never_gets_an_address_past_the_list(bits: u32, port: u16) {
            let ip = Ipv4Addr::from(bits);
            let targets = targets(&["127.0.0.0/8:*", "10.1.2.3:443"]);
            let naked = targets.allows((ip, port).into(), &[]);
            prop_assert_eq!(targets.allows((ip.to_ipv6_mapped(), port).into(), &[]), naked);
            prop_assert_eq!(naked, ip.is_loopback() || (ip == Ipv4Addr::new(10, 1, 2, 3) && port == 443));
        }
    }
}
