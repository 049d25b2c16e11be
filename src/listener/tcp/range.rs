//! The ports that an entry of `[server.tcp]` listens on: one, or a range.

use std::net::{Ipv6Addr, SocketAddr};

use tunnel_net::listen::share_port;
use tunnel_proto::names::Target;

/// Consecutive ports of one address.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ListenPortRange {
    first: SocketAddr,
    /// The last port, not less than the first.
    last: u16,
}

impl ListenPortRange {
    /// Parses `ip:port` or `ip:first-last`. As in Go, SuperEdge's language, the IP may be absent, which means all
    /// addresses.
    ///
    /// # Errors
    ///
    /// Returns what is expected.
    pub(super) fn parse(text: &str) -> Result<Self, &'static str> {
        let (first, last) = match text.rsplit_once('-') {
            Some((first, last)) => (address(first), Some(port(last))),
            None => (address(text), None),
        };
        let first = first.ok_or(LISTEN)?;
        match last {
            None => Ok(Self { first, last: first.port() }),
            Some(None) => Err(LISTEN),
            Some(Some(_)) if first.port() == 0 => Err("a range begins with port 1 or a higher one"),
            Some(Some(last)) if last < first.port() => {
                Err("the last port of a range is not less than the first: \"ip:first-last\"")
            }
            Some(Some(last)) => Ok(Self { first, last }),
        }
    }

    /// Returns the first address.
    pub fn first(self) -> SocketAddr {
        self.first
    }

    /// Returns the number of ports, at least 1.
    pub fn count(self) -> usize {
        usize::from(self.last - self.first.port()) + 1
    }

    /// Returns each address with its target: that of the n-th port is the n-th port from `target` on. Ends early if
    /// there is no such port.
    pub fn with_targets(self, target: &Target) -> impl Iterator<Item = (SocketAddr, Target)> {
        let targets = (target.port..=u16::MAX).map(move |port| Target { host: target.host.clone(), port });
        self.addresses().zip(targets)
    }

    /// Returns the port that the last one leads to; `None` if it exceeds 65535.
    pub(super) fn last_target(self, target: &Target) -> Option<u16> {
        target.port.checked_add(self.last - self.first.port())
    }

    /// Returns true if both contain a port that two sockets cannot have at once.
    pub(super) fn overlaps(self, other: Self) -> bool {
        let from = self.first.port().max(other.first.port());
        let at = |address: SocketAddr| SocketAddr::new(address.ip(), from);
        from <= self.last.min(other.last) && share_port(at(self.first), at(other.first))
    }

    fn addresses(self) -> impl Iterator<Item = SocketAddr> {
        (self.first.port()..=self.last).map(move |port| {
            let mut address = self.first;
            address.set_port(port);
            address
        })
    }
}

fn address(text: &str) -> Option<SocketAddr> {
    match text.strip_prefix(':') {
        Some(text) => Some((Ipv6Addr::UNSPECIFIED, port(text)?).into()),
        None => text.parse().ok(),
    }
}

/// Parses digits only; the parser of numbers accepts a sign.
fn port(text: &str) -> Option<u16> {
    text.bytes().all(|byte| byte.is_ascii_digit()).then(|| text.parse().ok())?
}

const LISTEN: &str = "expected an address to listen on as the key: \"ip:port\", for example \"127.0.0.1:6443\", or \
                      \"ip:first-last\" for a range of ports";

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn parse(text: &str) -> Result<ListenPortRange, &'static str> {
        ListenPortRange::parse(text)
    }

    #[test]
    fn a_key_is_an_address_with_a_port_or_a_range() {
        for (text, first, count) in [
            ("127.0.0.1:7000", "127.0.0.1:7000", 1),
            ("127.0.0.1:0", "127.0.0.1:0", 1),
            (":7000-7001", "[::]:7000", 2),
            ("[::1]:7000-7000", "[::1]:7000", 1),
            ("0.0.0.0:1-65535", "0.0.0.0:1", 65_535),
        ] {
            let ports = parse(text).unwrap();
            assert_eq!((ports.first().to_string().as_str(), ports.count()), (first, count), "{text}");
        }
    }

    #[test]
    fn a_wrong_range_is_refused_with_what_is_expected() {
        for (text, expected) in [
            ("7000-7099", "expected an address"),
            ("0.0.0.0:7000-", "expected an address"),
            ("0.0.0.0:-7000", "expected an address"),
            ("0.0.0.0:7000-65536", "expected an address"),
            ("0.0.0.0:7000-+7001", "expected an address"),
            ("0.0.0.0:7000-7001-7002", "expected an address"),
            ("0.0.0.0:0-7", "port 1 or a higher one"),
            ("0.0.0.0:7001-7000", "not less than the first"),
        ] {
            assert!(parse(text).unwrap_err().contains(expected), "{text}");
        }
    }

    fn any_ports() -> impl Strategy<Value = ListenPortRange> {
        let ip =
            prop_oneof![Just("127.0.0.1"), Just("127.0.0.2"), Just("0.0.0.0"), Just("[::]"), Just("[::1]")];
        // Close together, so that many overlap.
        (ip, 1_u16..40, 0_u16..20)
            .prop_map(|(ip, first, more)| parse(&format!("{ip}:{first}-{}", first + more)).unwrap())
    }

    proptest! {
        #[test]
        fn parsing_never_panics(text in "[-0-9.:\\[\\]+]{0,24}") {
            if let Ok(ports) = parse(&text) {
                prop_assert!(ports.count() >= 1);
            }
        }

        #[test]
        fn each_port_leads_to_the_target_at_the_same_distance(ports in any_ports(), base in 1_u16..) {
            let target = Target { port: base, ..Target::from(SocketAddr::from(([127, 0, 0, 1], 1))) };
            let pairs: Vec<_> = ports.with_targets(&target).collect();
            for (at, to) in &pairs {
                prop_assert_eq!(to.port - base, at.port() - ports.first().port());
                prop_assert_eq!((at.ip(), &to.host), (ports.first().ip(), &target.host));
            }
            prop_assert_eq!(ports.last_target(&target).is_some(), pairs.len() == ports.count());
            prop_assert_eq!(ports.last_target(&target).filter(|last| *last != pairs.last().unwrap().1.port), None);
        }

        #[test]
        fn ranges_overlap_if_two_of_their_ports_do(one in any_ports(), other in any_ports()) {
            let naive = one.addresses().any(|at| other.addresses().any(|of| share_port(at, of)));
            prop_assert_eq!((one.overlaps(other), other.overlaps(one)), (naive, naive));
        }
    }
}
