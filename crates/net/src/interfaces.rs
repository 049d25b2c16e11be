//! This machine's own addresses, those of them that other machines use, and changes of either.

pub mod changes;

use std::collections::HashSet;
use std::net::IpAddr;
use std::sync::Arc;
use std::time::Duration;

use parking_lot::Mutex;
use tokio::time::Instant;

use crate::os::networks::{dummies, interfaces};
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

/// An address in a message of the kernel.
pub(crate) struct InterfaceAddress {
    pub(crate) ip: IpAddr,
    pub(crate) index: u32,
    /// Whether the kernel still checks that no other machine has it, or has found one. It is not in use then.
    #[cfg_attr(target_os = "macos", expect(dead_code, reason = "macOS does not list addresses"))]
    pub(crate) is_tentative: bool,
}

fn sort(given: &[IpAddr], found: &[InterfaceAddress], dummies: &HashSet<u32>) -> InterfaceSnapshot {
    let is_used = |at: &&InterfaceAddress| !is_link_local(at.ip) && !dummies.contains(&at.index);
    let with = |found: &mut dyn Iterator<Item = &InterfaceAddress>| {
        given.iter().copied().chain(found.map(|at| at.ip)).collect()
    };
    InterfaceSnapshot { all: with(&mut found.iter()), own: with(&mut found.iter().filter(is_used)) }
}

pub(crate) fn is_link_local(ip: IpAddr) -> bool {
    match canonical_ip(ip) {
        IpAddr::V4(ip) => ip.is_link_local(),
        IpAddr::V6(ip) => ip.is_unicast_link_local(),
    }
}

/// How long the list of interfaces is cached.
const INTERFACES_CACHE_TTL: Duration = Duration::from_secs(10);

#[cfg(test)]
mod tests {
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

    #[test]
    fn local_addresses_are_read_from_the_kernel() {
        dummies().unwrap();
        let now = LocalAddresses::of_interfaces(ips(&["192.0.2.7"])).now();
        assert!(now.own.contains(&"127.0.0.1".parse().unwrap()), "{now:?}");
        assert!(now.own.iter().all(|ip| now.all.contains(ip)), "{now:?}");
    }
}
