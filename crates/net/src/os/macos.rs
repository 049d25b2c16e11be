//! What this program needs of macOS: a user's commands. `linux.rs` beside it has the same names. What safe code cannot
//! ask this system is unknown here, and its callers then do without it.

use std::sync::LazyLock;
use std::time::{Duration, Instant};
use std::{future, io};

use rustix::time::{ClockId, clock_gettime};
use socket2::SockRef;
use tokio::net::UnixStream;

/// Ports are not announced: that is for edges, and none runs here.
pub mod announcement {
    use std::io;
    use std::net::{IpAddr, SocketAddr};

    /// No announcement.
    #[derive(Debug)]
    pub(crate) struct PortAnnouncement;

    impl PortAnnouncement {
        /// Announces nothing.
        pub(crate) fn new(_at: SocketAddr) -> io::Result<Self> {
            Ok(Self)
        }
    }

    /// Returns false.
    pub fn is_announced(_at: SocketAddr, _own: &[IpAddr]) -> bool {
        false
    }
}

/// What the kernel knows of sockets: nothing that safe code can ask for.
pub mod sockets {
    use std::io;
    use std::net::SocketAddr;

    use tokio::net::TcpStream;

    use crate::keepalive::TcpSilence;
    use crate::tcp_info::{LossInfo, TcpInfo};

    /// Is not known.
    ///
    /// # Errors
    ///
    /// Always.
    pub fn unacknowledged(_socket: &TcpStream) -> io::Result<u32> {
        Err(io::ErrorKind::Unsupported.into())
    }

    /// Is not known.
    pub(crate) fn silence(_socket: &TcpStream) -> io::Result<Option<TcpSilence>> {
        Err(io::ErrorKind::Unsupported.into())
    }

    /// Is not known.
    ///
    /// # Errors
    ///
    /// Always.
    pub fn remote_user(_socket: &TcpStream) -> io::Result<u32> {
        Err(io::ErrorKind::Unsupported.into())
    }

    /// Is not known.
    pub(crate) fn tcp_info(_from: SocketAddr, _to: SocketAddr) -> Option<TcpInfo> {
        None
    }

    /// Is not known.
    pub(crate) fn losses(_from: SocketAddr, _to: SocketAddr) -> Option<LossInfo> {
        None
    }
}

/// Changes of addresses and routes, from a routing socket (route(4)).
pub(crate) mod networks {
    use std::collections::HashSet;
    use std::io;
    use std::net::{IpAddr, UdpSocket};
    use std::os::fd::OwnedFd;

    use socket2::{Domain, Socket, Type};

    use crate::interfaces::InterfaceAddress;

    /// Subscribes to reports about addresses and routes.
    pub(crate) fn reports() -> io::Result<OwnedFd> {
        let kernel = Socket::new(Domain::from(PF_ROUTE), Type::RAW, None)?;
        kernel.set_nonblocking(true)?;
        Ok(kernel.into())
    }

    /// Returns true if a message reports an interface, an address, or a route to a network. Others are of single hosts,
    /// also of failed searches for one.
    pub(crate) fn is_report(message: &[u8]) -> bool {
        let flags = message.get(FLAGS..FLAGS + 4).and_then(|flags| flags.try_into().ok());
        let is_of_host = flags.is_none_or(|flags| u32::from_ne_bytes(flags) & RTF_HOST != 0);
        match message.get(TYPE) {
            Some(&(RTM_NEWADDR | RTM_DELADDR | RTM_IFINFO)) => true,
            Some(&(RTM_ADD | RTM_DELETE | RTM_CHANGE)) => !is_of_host,
            _ => false,
        }
    }

    /// This machine's addresses on the default routes of IPv4 and IPv6.
    #[derive(Debug, PartialEq, Eq)]
    pub(crate) struct NetworkSnapshot([Option<IpAddr>; 2]);

    impl NetworkSnapshot {
        /// Asks the kernel for its choice of an address, by sockets that send nothing.
        pub(crate) fn read() -> io::Result<Self> {
            let towards = |own: &str, far: &str| {
                let socket = UdpSocket::bind(own)?;
                socket.connect(far)?;
                socket.local_addr().map(|at| at.ip())
            };
            Ok(Self([towards("0.0.0.0:0", "192.0.2.1:9").ok(), towards("[::]:0", "[2001:db8::1]:9").ok()]))
        }
    }

    /// Are not known. Only an edge and a server ask.
    pub(crate) fn interfaces() -> io::Result<Vec<InterfaceAddress>> {
        Err(io::ErrorKind::Unsupported.into())
    }

    /// Are not known.
    pub(crate) fn dummies() -> io::Result<HashSet<u32>> {
        Err(io::ErrorKind::Unsupported.into())
    }

    const PF_ROUTE: i32 = 17;
    /// Offsets of `rtm_type` and `rtm_flags`.
    const TYPE: usize = 3;
    const FLAGS: usize = 8;
    const RTM_ADD: u8 = 1;
    const RTM_DELETE: u8 = 2;
    const RTM_CHANGE: u8 = 3;
    const RTM_NEWADDR: u8 = 12;
    const RTM_DELADDR: u8 = 13;
    const RTM_IFINFO: u8 = 14;
    const RTF_HOST: u32 = 4;
}

/// Fails: macOS has no marks.
pub(crate) fn set_mark(_socket: &SockRef<'_>, _mark: u32) -> io::Result<()> {
    Err(io::ErrorKind::Unsupported.into())
}

/// Leaves it to the system.
pub(crate) fn limit_unsent(_socket: &SockRef<'_>, _bytes: u32) -> io::Result<()> {
    Ok(())
}

/// Leaves it to the system. A link notices silence by its own pings.
pub(crate) fn limit_silence(_socket: &SockRef<'_>, _time: Duration) -> io::Result<()> {
    Ok(())
}

/// Fails: macOS has no choice of one.
pub(crate) fn set_congestion(_socket: &SockRef<'_>, _name: &str) -> io::Result<()> {
    Err(io::ErrorKind::Unsupported.into())
}

/// Never completes: this system wakes no one for it.
pub(crate) async fn closed(_socket: &UnixStream) {
    future::pending().await
}

/// Returns the seconds for which this machine has been suspended since the first call. One clock stops meanwhile, that of
/// [`Instant`].
pub fn suspended() -> i64 {
    static FIRST: LazyLock<(i64, Instant)> = LazyLock::new(|| (clock(), Instant::now()));
    let (first, awake) = &*FIRST;
    clock() - first - i64::try_from(awake.elapsed().as_secs()).unwrap_or_default()
}

/// Returns the seconds of the clock that counts while asleep.
fn clock() -> i64 {
    clock_gettime(ClockId::Monotonic).tv_sec
}

/// Does nothing: only the demo needs it.
pub fn end_with_parent() {}

/// No ID of a boot can be asked for without another program. So a device that was restarted leaves its sessions to time.
pub static BOOT: LazyLock<Option<u128>> = LazyLock::new(|| None);

/// Returns the memory in bytes that this process may use: `limit`, or that of the smallest Mac with Apple's processor.
pub fn memory(limit: Option<usize>) -> usize {
    limit.unwrap_or(usize::MAX).min(8 << 30)
}

/// Does nothing: its pages are small.
pub fn use_small_pages() {}

/// Whether [`sockets::remote_user`] finds the user.
pub const KNOWS_REMOTE_USERS: bool = false;

/// The maximum limit of open files where the hard one is no number: `OPEN_MAX`.
pub(crate) const MAX_FILES: Option<u64> = Some(10_240);

#[cfg(test)]
mod tests {
    use super::networks::{NetworkSnapshot, is_report};
    use super::*;

    #[test]
    fn reports_about_networks_are_changes_and_those_about_hosts_are_not() {
        let message = |kind: u8, flags: u8| {
            let mut message = vec![92, 0, 5, kind, 0, 0, 0, 0, flags];
            message.resize(92, 0);
            is_report(&message)
        };
        // An address, a default route; a host's route, a search without a result.
        assert!(message(12, 0) && message(1, 3) && message(2, 3));
        assert!(!message(1, 7) && !message(7, 3) && !is_report(&[]) && !is_report(&[92, 0, 5, 1]));
    }

    #[test]
    fn this_machine_has_a_snapshot_and_is_awake() {
        assert_eq!(NetworkSnapshot::read().unwrap(), NetworkSnapshot::read().unwrap());
        assert_eq!(suspended(), 0);
    }
}
