//! This machine's own addresses, those of them that other machines use, and changes of either.
//!
//! Changes of addresses and of the default route come from the kernel over netlink.

pub mod changes;

use std::collections::HashSet;
use std::io;
use std::net::IpAddr;
use std::sync::Arc;
use std::time::Duration;

use parking_lot::Mutex;
use tokio::time::Instant;

use crate::interfaces::changes::{InterfaceAddress, RTM_GETADDR, address};
use crate::netlink::{self, find};
use tunnel_base::policy::canonical_ip;

/// This machine's current addresses. They change with its networks.
#[derive(derive_more::Debug, Clone)]
#[debug("{:?}", self.now().all)]
pub struct LocalAddresses(Arc<dyn Fn() -> InterfaceSnapshot + Send + Sync>);

/// A snapshot of the IP addresses of this machine's network interfaces.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct InterfaceSnapshot {
    /// All addresses.
    pub all: Vec<IpAddr>,
    /// Loopback, and the addresses that other machines use. Link-local addresses and those of dummy interfaces are
    /// excluded: programs listen there for their own machine only, and kube-proxy's IPVS mode puts every Service there.
    pub own: Vec<IpAddr>,
}

impl LocalAddresses {
    /// Calls `addresses` each time they are needed. It must be fast.
    pub fn new(addresses: impl Fn() -> InterfaceSnapshot + Send + Sync + 'static) -> Self {
        Self(Arc::new(addresses))
    }

    /// Returns the current addresses.
    pub fn now(&self) -> InterfaceSnapshot {
        (self.0)()
    }

    /// Reads the addresses of this machine's interfaces again after `INTERFACES_CACHE_TTL`, and adds the `given`
    /// addresses.
    ///
    /// The given addresses are treated as used by other machines, whatever interface they are on.
    pub fn of_interfaces(given: Vec<IpAddr>) -> Self {
        let known: Mutex<Option<(Instant, InterfaceSnapshot)>> = Mutex::new(None);
        Self::new(move || {
            let mut known = known.lock();
            if let Some((at, addresses)) = &*known
                && at.elapsed() < INTERFACES_CACHE_TTL
            {
                return addresses.clone();
            }
            // Without the kernel's answer, no address is known to be used by other machines.
            let found = interfaces().and_then(|found| Ok((found, dummies()?))).unwrap_or_default();
            let addresses = sort(&given, &found.0, &found.1);
            *known = Some((Instant::now(), addresses.clone()));
            addresses
        })
    }
}

/// Returns the addresses of all interfaces.
///
/// # Errors
///
/// The kernel does not list addresses.
fn interfaces() -> io::Result<Vec<InterfaceAddress>> {
    let mut found = Vec::new();
    list(RTM_GETADDR, |message| found.extend(address(message)))?;
    Ok(found)
}

fn sort(given: &[IpAddr], found: &[InterfaceAddress], dummies: &HashSet<u32>) -> InterfaceSnapshot {
    let is_used = |at: &&InterfaceAddress| !is_link_local(at.ip) && !dummies.contains(&at.index);
    let with = |found: &mut dyn Iterator<Item = &InterfaceAddress>| {
        given.iter().copied().chain(found.map(|at| at.ip)).collect()
    };
    InterfaceSnapshot { all: with(&mut found.iter()), own: with(&mut found.iter().filter(is_used)) }
}

fn is_link_local(ip: IpAddr) -> bool {
    match canonical_ip(ip) {
        IpAddr::V4(ip) => ip.is_link_local(),
        IpAddr::V6(ip) => ip.is_unicast_link_local(),
    }
}

/// Returns the indices of all dummy interfaces.
///
/// # Errors
///
/// The kernel does not list interfaces.
fn dummies() -> io::Result<HashSet<u32>> {
    let mut found = HashSet::new();
    list(RTM_GETLINK, |message| found.extend(dummy(message)))?;
    Ok(found)
}

/// Calls `each` with each message of the kernel's list: of interfaces, addresses or routes.
///
/// # Errors
///
/// The kernel does not list them.
fn list(of: u16, mut each: impl FnMut(&[u8])) -> io::Result<()> {
    let kernel = netlink::open(NETLINK_ROUTE)?;
    kernel.send(&question(of))?;
    let mut room = vec![0; netlink::DUMP_ROOM];
    while netlink::read_dump(&kernel, &mut room, &mut each)? {}
    Ok(())
}

/// Returns the index of the interface that a message describes if it is a dummy.
fn dummy(message: &[u8]) -> Option<u32> {
    let index = u32::from_ne_bytes(message.get(INDEX..INDEX + 4)?.try_into().ok()?);
    let info = find(message.get(ATTRIBUTES..)?, IFLA_LINKINFO)?;
    let kind = find(info, IFLA_INFO_KIND)?;
    (kind.strip_suffix(&[0]).unwrap_or(kind) == DUMMY).then_some(index)
}

/// Returns the request for a list. Its body is zeros for the longest of the structs that are allowed there.
fn question(of: u16) -> Vec<u8> {
    netlink::request(of, netlink::NLM_F_DUMP, 0, &[0; ATTRIBUTES - netlink::HEADER_LEN])
}

/// How long the list of interfaces is cached.
const INTERFACES_CACHE_TTL: Duration = Duration::from_secs(10);

/// The kind of an interface that is connected to no network, created by `ip link add … type dummy`.
const DUMMY: &[u8] = b"dummy";
const NETLINK_ROUTE: i32 = 0;
const RTM_GETLINK: u16 = 18;
const IFLA_LINKINFO: u16 = 18;
const IFLA_INFO_KIND: u16 = 1;
/// Offset of `ifi_index`: after the header, the family and the type.
const INDEX: usize = 16 + 4;
/// Offset of the attributes: after the header and `struct ifinfomsg`.
const ATTRIBUTES: usize = 16 + 16;

#[cfg(test)]
mod tests {
    use crate::netlink::attribute;

    use super::*;

    fn ips(texts: &[&str]) -> Vec<IpAddr> {
        texts.iter().map(|text| text.parse().unwrap()).collect()
    }

    #[test]
    fn link_local_and_dummy_addresses_are_own_only_if_configured() {
        let found: Vec<_> = [
            ("127.0.0.1", 1),
            ("10.0.0.5", 2),
            ("169.254.2.1", 2),
            ("fe80::1", 2),
            ("::ffff:169.254.2.2", 2),
            ("fd00::5", 2),
            ("10.96.0.1", 3),
            ("fd00::96", 3),
        ]
        .into_iter()
        .map(|(ip, index)| InterfaceAddress { ip: ip.parse().unwrap(), index, is_tentative: false })
        .collect();
        let given = ips(&["192.0.2.7", "169.254.7.7"]);
        let InterfaceSnapshot { all, own } = sort(&given, &found, &HashSet::from([3]));
        assert_eq!(own, ips(&["192.0.2.7", "169.254.7.7", "127.0.0.1", "10.0.0.5", "fd00::5"]));
        assert_eq!((all.len(), &all[..2]), (10, &given[..]));
    }

    fn message(index: u32, attributes: &[u8]) -> Vec<u8> {
        let mut message = question(RTM_GETLINK);
        message[INDEX..INDEX + 4].copy_from_slice(&index.to_ne_bytes());
        message.extend(attributes);
        message
    }

    #[test]
    fn a_dummy_interface_is_recognised_by_its_kind_and_not_its_name() {
        let kind = |kind: &[u8]| attribute(IFLA_LINKINFO, &attribute(IFLA_INFO_KIND, kind));
        let name = attribute(3, b"dummy\0");
        let of = |attributes: &[&[u8]]| dummy(&message(7, &attributes.concat()));
        assert_eq!(of(&[&attribute(3, b"kube-ipvs0\0"), &kind(b"dummy\0")]), Some(7));
        assert_eq!(of(&[&kind(b"dummy")]), Some(7));
        assert_eq!(of(&[&name, &kind(b"veth\0")]), None, "a name is not a kind");
        assert_eq!((of(&[&name]), of(&[]), of(&[&attribute(IFLA_LINKINFO, b"")])), (None, None, None));
    }

    #[test]
    fn parsing_a_netlink_report_never_panics() {
        for byte in [0, 1, 3, 18, 255] {
            for len in 0..100 {
                assert_eq!(dummy(&vec![byte; len]), None);
            }
        }
    }

    #[test]
    fn local_addresses_are_read_from_the_kernel() {
        dummies().unwrap();
        let now = LocalAddresses::of_interfaces(ips(&["192.0.2.7"])).now();
        assert!(now.own.contains(&"127.0.0.1".parse().unwrap()), "{now:?}");
        assert!(now.own.iter().all(|ip| now.all.contains(ip)), "{now:?}");
    }
}
