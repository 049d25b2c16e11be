//! Notices changes of this machine's addresses or default route, reported by the kernel over netlink.

use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::net;

use rustix::net::bind;
use rustix::net::netlink::SocketAddrNetlink;
use tokio::net::UnixDatagram;

use crate::tcp_info;

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
        Ok(Self { kernel, room: vec![0; ROOM] })
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

const NETLINK_ROUTE: i32 = 0;
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
const ROOM: usize = 8 * 1024;

#[cfg(test)]
mod tests {
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
