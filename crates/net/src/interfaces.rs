//! This machine's own addresses, those of them that other machines use, and changes of either.
//!
//! Changes of addresses and of the default route come from the kernel over netlink.

use std::collections::HashSet;
use std::fmt;
use std::io::{self, Read as _};
use std::net::IpAddr;
use std::os::fd::OwnedFd;
use std::os::unix::net;
use std::sync::Arc;
use std::time::Duration;

use parking_lot::Mutex;
use rustix::net::bind;
use rustix::net::netlink::SocketAddrNetlink;
use tokio::net::UnixDatagram;
use tokio::time::Instant;

use crate::tcp_info::{self, find};
use tunnel_base::policy::plain;

/// This machine's current addresses. They change with its networks.
#[derive(Clone)]
pub struct LocalAddresses(Arc<dyn Fn() -> Addresses + Send + Sync>);

/// A snapshot of the IP addresses of this machine's network interfaces.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Addresses {
    /// All addresses.
    pub all: Vec<IpAddr>,
    /// Loopback, and the addresses that other machines use. Link-local addresses and those of dummy interfaces are
    /// excluded: programs listen there for their own machine only, and kube-proxy's IPVS mode puts every Service there.
    pub own: Vec<IpAddr>,
}

impl LocalAddresses {
    /// Calls `addresses` each time they are needed. It must be fast.
    pub fn new(addresses: impl Fn() -> Addresses + Send + Sync + 'static) -> Self {
        Self(Arc::new(addresses))
    }

    /// Returns the current addresses.
    pub fn now(&self) -> Addresses {
        (self.0)()
    }

    /// Reads the addresses of this machine's interfaces again after `INTERFACES_KNOWN`, and adds the `given`
    /// addresses.
    ///
    /// The given addresses are treated as used by other machines, whatever interface they are on.
    pub fn of_interfaces(given: Vec<IpAddr>) -> Self {
        let known: Mutex<Option<(Instant, Addresses)>> = Mutex::new(None);
        Self::new(move || {
            let mut known = known.lock();
            if let Some((at, addresses)) = &*known
                && at.elapsed() < INTERFACES_KNOWN
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

impl fmt::Debug for LocalAddresses {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_list().entries(self.now().all).finish()
    }
}

/// Each address with the index of its interface.
type Interfaces = Vec<(IpAddr, Option<u32>)>;

fn interfaces() -> io::Result<Interfaces> {
    Ok(if_addrs::get_if_addrs()?.into_iter().map(|one| (one.ip(), one.index)).collect())
}

fn sort(given: &[IpAddr], found: &[(IpAddr, Option<u32>)], dummies: &HashSet<u32>) -> Addresses {
    let is_used = |(ip, index): &&(IpAddr, Option<u32>)| {
        let is_link_local = match plain(*ip) {
            IpAddr::V4(ip) => ip.is_link_local(),
            IpAddr::V6(ip) => ip.is_unicast_link_local(),
        };
        !is_link_local && index.is_some_and(|index| !dummies.contains(&index))
    };
    let with = |found: &mut dyn Iterator<Item = &(IpAddr, Option<u32>)>| {
        given.iter().copied().chain(found.map(|(ip, _)| *ip)).collect()
    };
    Addresses { all: with(&mut found.iter()), own: with(&mut found.iter().filter(is_used)) }
}

/// Returns the indices of all dummy interfaces.
///
/// # Errors
///
/// The kernel does not list interfaces.
fn dummies() -> io::Result<HashSet<u32>> {
    let mut kernel = tcp_info::netlink(NETLINK_ROUTE)?;
    kernel.send(&question())?;
    let (mut room, mut found) = (vec![0; ROOM], HashSet::new());
    loop {
        // A dump is ready when `send` returns, and each `read` makes the kernel write the next part of it.
        let len = kernel.read(&mut room)?;
        let mut rest = room.get(..len).unwrap_or_default();
        while let Some((len, kind)) = tcp_info::head(rest) {
            match kind {
                NLMSG_DONE => return Ok(found),
                NLMSG_ERROR => return Err(tcp_info::error(rest)),
                _ => found.extend(rest.get(..len).and_then(dummy)),
            }
            rest = rest.get(len.next_multiple_of(4)..).unwrap_or_default();
        }
    }
}

/// Returns the index of the interface that a message describes if it is a dummy.
fn dummy(message: &[u8]) -> Option<u32> {
    let index = u32::from_ne_bytes(message.get(INDEX..INDEX + 4)?.try_into().ok()?);
    let info = find(message.get(ATTRIBUTES..)?, IFLA_LINKINFO)?;
    let kind = find(info, IFLA_INFO_KIND)?;
    (kind.strip_suffix(&[0]).unwrap_or(kind) == DUMMY).then_some(index)
}

/// Returns the request for all interfaces: `struct nlmsghdr`, then `struct ifinfomsg`.
fn question() -> Vec<u8> {
    let mut question = u32::try_from(ATTRIBUTES).unwrap_or_default().to_ne_bytes().to_vec();
    question.extend(RTM_GETLINK.to_ne_bytes());
    question.extend((NLM_F_REQUEST | NLM_F_DUMP).to_ne_bytes());
    question.resize(ATTRIBUTES, 0);
    question
}

/// How long the list of interfaces is cached.
const INTERFACES_KNOWN: Duration = Duration::from_secs(10);

/// The kind of an interface that is connected to no network, created by `ip link add … type dummy`.
const DUMMY: &[u8] = b"dummy";
const NETLINK_ROUTE: i32 = 0;
const RTM_GETLINK: u16 = 18;
const NLMSG_ERROR: u16 = 2;
const NLMSG_DONE: u16 = 3;
const NLM_F_REQUEST: u16 = 1;
const NLM_F_DUMP: u16 = 0x300;
const IFLA_LINKINFO: u16 = 18;
const IFLA_INFO_KIND: u16 = 1;
/// Offset of `ifi_index`: after the header, the family and the type.
const INDEX: usize = 16 + 4;
/// Offset of the attributes: after the header and `struct ifinfomsg`.
const ATTRIBUTES: usize = 16 + 16;
/// Larger than what the kernel writes at once.
const ROOM: usize = 64 * 1024;

// Changes of addresses and routes.

/// A netlink subscription to changes of addresses and routes. Needs no privilege.
#[derive(Debug)]
pub struct NetworkChanges {
    /// A netlink socket, wrapped in this type to receive from it asynchronously.
    kernel: UnixDatagram,
    room: Vec<u8>,
}

impl NetworkChanges {
    /// Subscribes to changes. Must be called in a runtime.
    ///
    /// # Errors
    ///
    /// The system does not report changes, or there are too many open files.
    pub fn watch() -> io::Result<Self> {
        let kernel = tcp_info::netlink(NETLINK_ROUTE)?;
        bind(&kernel, &SocketAddrNetlink::new(0, GROUPS))?;
        let kernel = UnixDatagram::from_std(net::UnixDatagram::from(OwnedFd::from(kernel)))?;
        Ok(Self { kernel, room: vec![0; REPORT_ROOM] })
    }

    /// Waits for the next change. All changes since the last call are reported as one. Cancel safe.
    ///
    /// # Errors
    ///
    /// The kernel reports no more changes.
    pub async fn next(&mut self) -> io::Result<()> {
        let mut changed = false;
        loop {
            let read = if changed {
                self.kernel.try_recv(&mut self.room)
            } else {
                self.kernel.recv(&mut self.room).await
            };
            changed |= match read {
                Ok(len) => is_change(self.room.get(..len).unwrap_or_default()),
                Err(cause) if cause.kind() == io::ErrorKind::WouldBlock => return Ok(()),
                // There were so many changes at once that the kernel dropped some reports.
                Err(cause) if cause.raw_os_error() == Some(ENOBUFS) => true,
                Err(cause) => return Err(cause),
            };
        }
    }
}

/// Returns true if some of the messages report an address or a default route.
fn is_change(mut messages: &[u8]) -> bool {
    while let Some((len, kind)) = tcp_info::head(messages) {
        let change = match kind {
            RTM_NEWADDR | RTM_DELADDR => true,
            // `rtm_dst_len`, the prefix length of the destination: 0 for a default route.
            RTM_NEWROUTE | RTM_DELROUTE => messages.get(DESTINATION_BITS) == Some(&0),
            _ => false,
        };
        if change {
            return true;
        }
        messages = messages.get(len.next_multiple_of(4)..).unwrap_or_default();
    }
    false
}

/// Addresses and routes of IPv4 and IPv6.
const GROUPS: u32 = 0x10 | 0x40 | 0x100 | 0x400;
const RTM_NEWADDR: u16 = 20;
const RTM_DELADDR: u16 = 21;
const RTM_NEWROUTE: u16 = 24;
const RTM_DELROUTE: u16 = 25;
/// Offset of `rtm_dst_len`: after the header and the family.
const DESTINATION_BITS: usize = 16 + 1;
const ENOBUFS: i32 = 105;
/// Larger than any message about one address or route.
const REPORT_ROOM: usize = 8 * 1024;

#[cfg(test)]
mod tests {
    use super::*;

    fn ips(texts: &[&str]) -> Vec<IpAddr> {
        texts.iter().map(|text| text.parse().unwrap()).collect()
    }

    #[test]
    fn link_local_addresses_and_those_of_dummy_interfaces_are_not_own_unless_they_are_given() {
        let found: Vec<_> = [
            ("127.0.0.1", Some(1)),
            ("10.0.0.5", Some(2)),
            ("169.254.2.1", Some(2)),
            ("fe80::1", Some(2)),
            ("::ffff:169.254.2.2", Some(2)),
            ("fd00::5", Some(2)),
            ("10.96.0.1", Some(3)),
            ("fd00::96", Some(3)),
            ("10.1.1.1", None),
        ]
        .into_iter()
        .map(|(ip, index)| (ip.parse().unwrap(), index))
        .collect();
        let given = ips(&["192.0.2.7", "169.254.7.7"]);
        let Addresses { all, own } = sort(&given, &found, &HashSet::from([3]));
        assert_eq!(own, ips(&["192.0.2.7", "169.254.7.7", "127.0.0.1", "10.0.0.5", "fd00::5"]));
        assert_eq!((all.len(), &all[..2]), (11, &given[..]));
    }

    fn attribute(kind: u16, value: &[u8]) -> Vec<u8> {
        let len = u16::try_from(4 + value.len()).unwrap();
        let mut attribute = [&len.to_ne_bytes()[..], &kind.to_ne_bytes(), value].concat();
        attribute.resize(attribute.len().next_multiple_of(4), 0);
        attribute
    }

    fn message(index: u32, attributes: &[u8]) -> Vec<u8> {
        let mut message = question();
        message[INDEX..INDEX + 4].copy_from_slice(&index.to_ne_bytes());
        message.extend(attributes);
        message
    }

    #[test]
    fn a_dummy_is_known_by_the_kind_that_the_kernel_reports() {
        let kind = |kind: &[u8]| attribute(IFLA_LINKINFO, &attribute(IFLA_INFO_KIND, kind));
        let name = attribute(3, b"dummy\0");
        let of = |attributes: &[&[u8]]| dummy(&message(7, &attributes.concat()));
        assert_eq!(of(&[&attribute(3, b"kube-ipvs0\0"), &kind(b"dummy\0")]), Some(7));
        assert_eq!(of(&[&kind(b"dummy")]), Some(7));
        assert_eq!(of(&[&name, &kind(b"veth\0")]), None, "a name is not a kind");
        assert_eq!((of(&[&name]), of(&[]), of(&[&attribute(IFLA_LINKINFO, b"")])), (None, None, None));
    }

    #[test]
    fn a_report_of_any_shape_is_no_panic() {
        for byte in [0, 1, 3, 18, 255] {
            for len in 0..100 {
                assert_eq!(dummy(&vec![byte; len]), None);
            }
        }
    }

    #[test]
    fn the_kernel_lists_this_machines_interfaces() {
        dummies().unwrap();
        let now = LocalAddresses::of_interfaces(ips(&["192.0.2.7"])).now();
        assert!(now.own.contains(&"127.0.0.1".parse().unwrap()), "{now:?}");
        assert!(now.own.iter().all(|ip| now.all.contains(ip)), "{now:?}");
    }
}

#[cfg(test)]
mod change_tests {
    use super::*;

    fn message(kind: u16, bits: u8) -> Vec<u8> {
        let mut message = 30_u32.to_ne_bytes().to_vec();
        message.extend(kind.to_ne_bytes());
        message.extend([0; 10]);
        message.extend([2, bits]);
        message.resize(32, 0);
        message
    }

    #[test]
    fn addresses_and_default_routes_count_and_no_other_routes_or_links() {
        assert!(is_change(&message(RTM_NEWADDR, 24)) && is_change(&message(RTM_DELADDR, 0)));
        assert!(is_change(&message(RTM_DELROUTE, 0)) && is_change(&message(RTM_NEWROUTE, 0)));
        assert!(!is_change(&message(RTM_NEWROUTE, 24)) && !is_change(&message(16, 0)));
        let several = [message(16, 0), message(RTM_NEWROUTE, 32), message(RTM_NEWROUTE, 0)].concat();
        assert!(is_change(&several));
    }

    #[test]
    fn a_report_of_any_shape_is_no_panic() {
        for byte in [0, 1, 3, 20, 24, 255] {
            for len in 0..100 {
                is_change(&vec![byte; len]);
            }
        }
        assert!(!is_change(&[0; 64]), "a length of 0 ends it");
    }

    #[tokio::test]
    async fn nothing_is_told_while_nothing_changes() {
        let mut changes = NetworkChanges::watch().unwrap();
        let _ = tokio::time::timeout(std::time::Duration::from_millis(1), changes.next()).await;
    }
}
