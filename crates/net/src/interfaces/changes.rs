//! Changes of addresses and routes.

use std::collections::BTreeSet;
use std::io;
use std::net::IpAddr;
use std::os::fd::OwnedFd;
use std::os::unix::net;
use std::time::Duration;

use rustix::io::Errno;
use rustix::net::bind;
use rustix::net::netlink::SocketAddrNetlink;
use rustix::time::{ClockId, clock_gettime};
use tokio::net::UnixDatagram;
use tokio::time::sleep;

use crate::interfaces::{INDEX, NETLINK_ROUTE, dummies, interfaces, is_link_local, list};
use crate::netlink::{self, AF_INET, AF_INET6, find, split};

/// A netlink subscription to changes of addresses and routes. Needs no privilege.
#[derive(Debug)]
pub struct NetworkChanges {
    /// A netlink socket, wrapped in this type to receive from it asynchronously.
    kernel: UnixDatagram,
    room: Vec<u8>,
    known: NetworkSnapshot,
    /// Seconds for which this machine has been suspended since it was started.
    suspended: i64,
}

impl NetworkChanges {
    /// Subscribes to changes. Must be called in a runtime.
    ///
    /// # Errors
    ///
    /// The system does not report changes, or there are too many open files.
    pub fn watch() -> io::Result<Self> {
        let kernel = netlink::open(NETLINK_ROUTE)?;
        bind(&kernel, &SocketAddrNetlink::new(0, GROUPS))?;
        let kernel = UnixDatagram::from_std(net::UnixDatagram::from(OwnedFd::from(kernel)))?;
        Ok(Self {
            kernel,
            room: vec![0; REPORT_ROOM],
            known: NetworkSnapshot::read()?,
            suspended: suspended(),
        })
    }

    /// Waits for the next change, or until the machine wakes after it was suspended. All changes since the last call are
    /// reported as one. Cancel safe.
    ///
    /// Router advertisements and DHCP renewals announce the same addresses and routes again, which is no change.
    ///
    /// # Errors
    ///
    /// The kernel reports no more changes.
    pub async fn next(&mut self) -> io::Result<()> {
        loop {
            let is_changed = tokio::select! {
                ready = self.kernel.readable() => ready.and_then(|()| self.take_reports())?,
                () = sleep(WAKE_CHECK) => {
                    let before = std::mem::replace(&mut self.suspended, suspended());
                    self.suspended > before + 1
                }
            };
            if is_changed {
                return Ok(());
            }
        }
    }

    /// Reads all pending reports. Returns true if the network has changed.
    fn take_reports(&mut self) -> io::Result<bool> {
        let mut reported = false;
        loop {
            reported |= match self.kernel.try_recv(&mut self.room) {
                Ok(len) => is_report(self.room.get(..len).unwrap_or_default()),
                Err(cause) if cause.kind() == io::ErrorKind::WouldBlock => break,
                // There were so many reports at once that the kernel dropped some.
                Err(cause) if Errno::from_io_error(&cause) == Some(Errno::NOBUFS) => true,
                Err(cause) => return Err(cause),
            };
        }
        if !reported {
            return Ok(false);
        }
        // Without the kernel's answer, for lack of files, the report may be a change.
        let Ok(now) = NetworkSnapshot::read() else { return Ok(true) };
        let changed = now != self.known;
        self.known = now;
        Ok(changed)
    }
}

/// The addresses that other machines use, and the default routes.
#[derive(Debug, PartialEq, Eq)]
struct NetworkSnapshot {
    addresses: BTreeSet<IpAddr>,
    /// The attributes of each default route that decide where packets go.
    default_routes: BTreeSet<Vec<u8>>,
}

impl NetworkSnapshot {
    fn read() -> io::Result<Self> {
        let dummies = dummies()?;
        let addresses = interfaces()?
            .into_iter()
            .filter(|at| !at.is_tentative && !is_link_local(at.ip) && !dummies.contains(&at.index))
            .map(|at| at.ip)
            .collect();
        let mut default_routes = BTreeSet::new();
        list(RTM_GETROUTE, |message| default_routes.extend(default_route(message)))?;
        Ok(Self { addresses, default_routes })
    }
}

/// An address in a message of the kernel.
pub(super) struct InterfaceAddress {
    pub(super) ip: IpAddr,
    pub(super) index: u32,
    /// Whether the kernel still checks that no other machine has it, or has found one. It is not in use then.
    pub(super) is_tentative: bool,
}

/// Parses `struct ifaddrmsg` and its attributes, after the header.
pub(super) fn address(message: &[u8]) -> Option<InterfaceAddress> {
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
    let mut route = vec![family];
    for (kind, _, whole) in split(message.get(ROUTE_ATTRIBUTES..)?) {
        if ROUTE_DECIDED_BY.contains(&kind) {
            route.extend(whole);
        }
    }
    Some(route)
}

/// Returns true if some of the messages report a default route, or an address that may be reachable from other
/// networks.
fn is_report(messages: &[u8]) -> bool {
    netlink::messages(messages).any(|(kind, message)| match kind {
        // Each veth of a Kubernetes node has a link-local address.
        RTM_NEWADDR | RTM_DELADDR => address(message).is_some_and(|at| !is_link_local(at.ip)),
        RTM_NEWROUTE | RTM_DELROUTE => default_route(message).is_some(),
        _ => false,
    })
}

/// Addresses and routes of IPv4 and IPv6.
const GROUPS: u32 = 0x10 | 0x40 | 0x100 | 0x400;
const RTM_NEWADDR: u16 = 20;
const RTM_DELADDR: u16 = 21;
pub(super) const RTM_GETADDR: u16 = 22;
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
/// Offset of the attributes of a route: after the header and `struct rtmsg`.
const ROUTE_ATTRIBUTES: usize = 16 + 12;
/// Larger than any message about one address or route.
const REPORT_ROOM: usize = 8 * 1024;

/// Returns the seconds for which this machine has been suspended since it was started: one clock stops meanwhile.
fn suspended() -> i64 {
    clock_gettime(ClockId::Boottime).tv_sec - clock_gettime(ClockId::Monotonic).tv_sec
}

/// Interval of checks whether the machine was suspended.
const WAKE_CHECK: Duration = Duration::from_secs(2);

#[cfg(test)]
mod tests {
    use std::process::Command;

    use tokio::time::timeout;

    use crate::netlink::attribute;

    use super::*;

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
            message(16, 0, 0, 16, &[]),
            of_address(RTM_NEWADDR, "fe80::1"),
            of_address(RTM_NEWADDR, "169.254.7.7"),
        ];
        assert!(!is_report(&others.concat()));
        assert!(is_report(&[&others.concat()[..], &of_route(RTM_NEWROUTE, 0)].concat()));
    }

    #[test]
    fn the_age_of_a_default_route_is_ignored() {
        let route = |gateway: u8, age: u8| {
            let (gateway, age) = (attribute(5, &[10, 0, 0, gateway]), attribute(12, &[age; 32]));
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

    #[tokio::test(start_paused = true)]
    async fn the_end_of_a_suspension_is_a_change() {
        let mut changes = NetworkChanges::watch().unwrap();
        changes.suspended -= 3600;
        let within = 2 * WAKE_CHECK;
        assert!(timeout(within, changes.next()).await.unwrap().is_ok());
        assert!(timeout(within, changes.next()).await.is_err(), "once");
    }

    /// Runs the next test in a network namespace of its own.
    #[test]
    fn a_repeated_kernel_announcement_is_no_change() {
        let has_ip = Command::new("ip").arg("-V").output().is_ok();
        if !rustix::process::geteuid().is_root() || !has_ip {
            return;
        }
        let test = "interfaces::changes::tests::in_own_namespace";
        let program = std::env::current_exe().unwrap();
        let mut unshare = Command::new("unshare");
        let output = unshare.arg("--net").arg(program).args(["--exact", test, "--ignored"]).output().unwrap();
        let text = String::from_utf8_lossy(&output.stdout);
        assert!(output.status.success() && text.contains("1 passed"), "{text}");
    }

    #[tokio::test]
    #[ignore = "changes the network of this machine, unless it is in a namespace"]
    async fn in_own_namespace() {
        let ip = |text: &str| {
            let output = Command::new("ip").args(text.split(' ')).output().unwrap();
            assert!(output.status.success(), "ip {text}: {output:?}");
        };
        ip("link add name one type veth peer name two");
        ip("link set one up");
        ip("link set two up");
        let mut changes = NetworkChanges::watch().unwrap();
        for text in [
            "addr add 10.0.0.5/24 dev one",
            "addr add 2001:db8::5/64 dev one nodad",
            "route add default via 10.0.0.1",
        ] {
            ip(text);
            changes.next().await.unwrap();
        }
        // As by router advertisements, DHCP renewals and containers.
        for text in [
            "addr change 10.0.0.5/24 dev one valid_lft 1000 preferred_lft 1000",
            "addr change 2001:db8::5/64 dev one valid_lft 1000 preferred_lft 1000",
            "route replace default via 10.0.0.1",
            "addr add 10.0.0.5/32 dev two",
            "addr add fe80::7/64 dev two nodad",
        ] {
            ip(text);
            changes.kernel.readable().await.unwrap();
            assert!(!changes.take_reports().unwrap(), "{text}");
        }
        for text in
            ["route replace default via 10.0.0.2", "addr del 2001:db8::5/64 dev one", "route del default"]
        {
            ip(text);
            changes.next().await.unwrap();
        }
    }
}
