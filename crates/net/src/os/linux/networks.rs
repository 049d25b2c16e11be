//! Addresses, default routes and their changes, from the kernel over netlink.

use std::collections::{BTreeSet, HashSet};
use std::io;
use std::net::IpAddr;
use std::os::fd::OwnedFd;

use rustix::net::bind;
use rustix::net::netlink::SocketAddrNetlink;

use super::netlink::{self, AF_INET, AF_INET6, find, split, u32_at};
use crate::interfaces::{InterfaceAddress, is_link_local};

/// Subscribes to reports about addresses and routes. Needs no privilege.
///
/// # Errors
///
/// The system does not report changes, or there are too many open files.
pub(crate) fn reports() -> io::Result<OwnedFd> {
    let kernel = netlink::open(NETLINK_ROUTE)?;
    bind(&kernel, &SocketAddrNetlink::new(0, GROUPS))?;
    Ok(kernel.into())
}

/// The addresses that other machines use, and the default routes.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct NetworkSnapshot {
    addresses: BTreeSet<IpAddr>,
    /// The attributes of each default route that decide where packets go.
    default_routes: BTreeSet<Vec<u8>>,
}

impl NetworkSnapshot {
    /// Queries the kernel.
    pub(crate) fn read() -> io::Result<Self> {
        let dummies = dummies()?;
        let addresses = interfaces()?
            .into_iter()
            .filter(|at| !at.is_tentative && !is_link_local(at.ip) && !dummies.contains(&at.index))
            .map(|at| at.ip)
            .collect();
        Ok(Self { addresses, default_routes: list(RTM_GETROUTE, default_route)? })
    }
}

/// Returns the addresses of all interfaces.
///
/// # Errors
///
/// The kernel does not list addresses.
pub(crate) fn interfaces() -> io::Result<Vec<InterfaceAddress>> {
    list(RTM_GETADDR, address)
}

/// Returns the indices of all dummy interfaces.
///
/// # Errors
///
/// The kernel does not list interfaces.
pub(crate) fn dummies() -> io::Result<HashSet<u32>> {
    list(RTM_GETLINK, dummy)
}

/// Returns what `parse` finds in the messages of a list of the kernel: of interfaces, addresses or routes.
///
/// # Errors
///
/// The kernel does not list them.
fn list<T, L: Default + Extend<T>>(of: u16, parse: fn(&[u8]) -> Option<T>) -> io::Result<L> {
    let kernel = netlink::open(NETLINK_ROUTE)?;
    kernel.send(&question(of))?;
    let mut room = vec![0; netlink::DUMP_ROOM];
    let mut found = L::default();
    while netlink::read_dump(&kernel, &mut room, |message| found.extend(parse(message)))? {}
    Ok(found)
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

/// Parses `struct ifaddrmsg` and its attributes, after the header.
fn address(message: &[u8]) -> Option<InterfaceAddress> {
    let index = u32::from_ne_bytes(message.get(INDEX..INDEX + 4)?.try_into().ok()?);
    let attributes = message.get(INDEX + 4..)?;
    // On a point-to-point interface, IFA_ADDRESS is the remote end.
    let ip = find(attributes, IFA_LOCAL).or_else(|| find(attributes, IFA_ADDRESS))?;
    let ip = match *message.get(FAMILY)? {
        AF_INET => IpAddr::from(<[u8; 4]>::try_from(ip).ok()?),
        AF_INET6 => IpAddr::from(<[u8; 16]>::try_from(ip).ok()?),
        _ => return None,
    };
    let is_tentative = message.get(ADDRESS_FLAGS)? & (IFA_F_TENTATIVE | IFA_F_DADFAILED) != 0;
    Some(InterfaceAddress { ip, index, is_tentative })
}

/// Returns the attributes of a default route that decide where packets go, without its age. Parses `struct rtmsg` after
/// the header.
fn default_route(message: &[u8]) -> Option<Vec<u8>> {
    let family = *message.get(FAMILY)?;
    // `rtm_dst_len`, the prefix length of the destination, is 0 for a default route.
    if !matches!(family, AF_INET | AF_INET6) || *message.get(PREFIX)? != 0 {
        return None;
    }
    // Whether its interface has a line.
    let mut route = vec![family, u8::from(u32_at(message, ROUTE_FLAGS)? & RTNH_F_LINKDOWN != 0)];
    for (kind, _, whole) in split(message.get(ROUTE_ATTRIBUTES..)?) {
        if ROUTE_DECIDED_BY.contains(&kind) {
            route.extend(whole);
        }
    }
    Some(route)
}

/// Returns true if some of the messages report a default route, an address that may be reachable from other networks, or
/// an interface: the kernel removes the routes of one that is down without a report.
pub(crate) fn is_report(messages: &[u8]) -> bool {
    netlink::messages(messages).any(|(kind, message)| match kind {
        // Each veth of a Kubernetes node has a link-local address.
        RTM_NEWADDR | RTM_DELADDR => address(message).is_some_and(|at| !is_link_local(at.ip)),
        RTM_NEWROUTE | RTM_DELROUTE => default_route(message).is_some(),
        RTM_NEWLINK => true,
        _ => false,
    })
}

/// Interfaces, and addresses and routes of IPv4 and IPv6.
const GROUPS: u32 = 0x1 | 0x10 | 0x40 | 0x100 | 0x400;
const RTM_NEWLINK: u16 = 16;
const RTM_NEWADDR: u16 = 20;
const RTM_DELADDR: u16 = 21;
const RTM_GETADDR: u16 = 22;
const RTM_NEWROUTE: u16 = 24;
const RTM_DELROUTE: u16 = 25;
const RTM_GETROUTE: u16 = 26;
const IFA_ADDRESS: u16 = 1;
const IFA_LOCAL: u16 = 2;
const IFA_F_DADFAILED: u8 = 0x08;
const IFA_F_TENTATIVE: u8 = 0x40;
/// `RTA_OIF`, `RTA_GATEWAY`, `RTA_PRIORITY`, `RTA_PREFSRC`, `RTA_MULTIPATH`, `RTA_TABLE` and `RTA_VIA`.
const ROUTE_DECIDED_BY: [u16; 7] = [4, 5, 6, 7, 9, 15, 18];
/// Offset of the family: after the header.
const FAMILY: usize = 16;
/// Offset of the prefix length of an address, or of a route's destination.
const PREFIX: usize = 16 + 1;
/// Offset of `ifa_flags`.
const ADDRESS_FLAGS: usize = 16 + 2;
/// Offset of the flags of a route, and the one of a route whose interface has no line.
const ROUTE_FLAGS: usize = 16 + 8;
const RTNH_F_LINKDOWN: u32 = 16;
/// Offset of the attributes of a route: after the header and `struct rtmsg`.
const ROUTE_ATTRIBUTES: usize = 16 + 12;
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
    use super::netlink::attribute;
    use super::*;

    fn link(index: u32, attributes: &[u8]) -> Vec<u8> {
        let mut message = question(RTM_GETLINK);
        message[INDEX..INDEX + 4].copy_from_slice(&index.to_ne_bytes());
        message.extend(attributes);
        message
    }

    #[test]
    fn a_dummy_interface_is_recognised_by_its_kind_and_not_its_name() {
        let kind = |kind: &[u8]| attribute(IFLA_LINKINFO, &attribute(IFLA_INFO_KIND, kind));
        let name = attribute(3, b"dummy\0");
        let of = |attributes: &[&[u8]]| dummy(&link(7, &attributes.concat()));
        assert_eq!(of(&[&attribute(3, b"kube-ipvs0\0"), &kind(b"dummy\0")]), Some(7));
        assert_eq!(of(&[&kind(b"dummy")]), Some(7));
        assert_eq!(of(&[&name, &kind(b"veth\0")]), None, "a name is not a kind");
        assert_eq!((of(&[&name]), of(&[]), of(&[&attribute(IFLA_LINKINFO, b"")])), (None, None, None));
    }

    #[test]
    fn parsing_a_list_never_panics() {
        for byte in [0, 1, 3, 18, 255] {
            for len in 0..100 {
                assert_eq!(dummy(&vec![byte; len]), None);
            }
        }
    }

    /// Returns a message with a struct of `len` bytes that begins with these two, and with attributes.
    fn message(kind: u16, family: u8, prefix: u8, len: usize, attributes: &[&[u8]]) -> Vec<u8> {
        let mut body = vec![family, prefix];
        body.resize(len, 0);
        body.extend(attributes.concat());
        netlink::request(kind, 0, 0, &body)
    }

    fn of_address(kind: u16, ip: &str) -> Vec<u8> {
        match ip.parse().unwrap() {
            IpAddr::V4(ip) => message(kind, 2, 24, 8, &[&attribute(IFA_LOCAL, &ip.octets())]),
            IpAddr::V6(ip) => message(kind, 10, 64, 8, &[&attribute(IFA_ADDRESS, &ip.octets())]),
        }
    }

    fn of_route(kind: u16, prefix: u8) -> Vec<u8> {
        message(kind, 2, prefix, 12, &[&attribute(5, &[10, 0, 0, 1])])
    }

    #[test]
    fn only_global_addresses_and_default_routes_are_changes() {
        assert!(is_report(&of_address(RTM_NEWADDR, "10.0.0.5")));
        assert!(is_report(&of_address(RTM_DELADDR, "2001:db8::5")));
        assert!(is_report(&of_route(RTM_DELROUTE, 0)) && is_report(&of_route(RTM_NEWROUTE, 0)));
        let others = [
            of_route(RTM_NEWROUTE, 24),
            of_address(RTM_NEWADDR, "fe80::1"),
            of_address(RTM_NEWADDR, "169.254.7.7"),
        ];
        assert!(!is_report(&others.concat()));
        assert!(is_report(&message(RTM_NEWLINK, 0, 0, 16, &[])));
        assert!(is_report(&[&others.concat()[..], &of_route(RTM_NEWROUTE, 0)].concat()));
    }

    #[test]
    fn the_age_of_a_default_route_is_ignored() {
        let route = |gateway: u8, age: u8| {
            let gateway = attribute(5, &[10, 0, 0, gateway]);
            let age = attribute(12, &[age; 32]);
            default_route(&message(RTM_NEWROUTE, 2, 0, 12, &[&gateway, &age]))
        };
        assert!(route(1, 1).is_some());
        assert_eq!(route(1, 1), route(1, 2));
        assert_ne!(route(1, 1), route(2, 1));
    }

    #[test]
    fn parsing_a_netlink_report_never_panics() {
        for byte in [0, 1, 2, 3, 10, 20, 24, 255] {
            for len in 0..100 {
                let report = vec![byte; len];
                is_report(&report);
                let _ = (address(&report), default_route(&report));
            }
        }
        assert!(!is_report(&[0; 64]), "a length of 0 ends it");
    }
}
