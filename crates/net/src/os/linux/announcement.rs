//! All ports but those for metrics are announced to the tunnel processes on this machine, which refuse them as
//! targets. Otherwise a client of an edge would reach a server's port from this machine's addresses, without its
//! own name and rules, and an edge and a server could pass a connection to each other endlessly.
//!
//! An announcement is an abstract Unix socket named after the port's address. Such names belong to a network
//! namespace, like loopback. So they work across users and containers, need no privileges or directory, and end
//! with their process. No process connects to one: the kernel lists them, and their owners.

use std::collections::BTreeSet;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use std::{fs, io};

use parking_lot::Mutex;
use socket2::{Domain, SockAddr, Socket, Type};

use super::sockets::{listening_at, unix_sockets};

/// The announcement of a port, until dropped.
#[derive(Debug)]
pub(crate) struct PortAnnouncement {
    _socket: Socket,
    /// Announces it to older programs, unless another socket has the name. They connect to it, and also trust a full
    /// queue.
    _plain: Option<Socket>,
}

impl PortAnnouncement {
    /// Announces the port at this address. Call it before the port accepts connections, because an edge also checks
    /// after connecting.
    pub(crate) fn new(at: SocketAddr) -> io::Result<Self> {
        let mut random = [0; 8];
        aws_lc_rs::rand::fill(&mut random).map_err(io::Error::other)?;
        // No other user can take this name first.
        let socket = named_socket(at, &format!("/{:x}", u64::from_ne_bytes(random)))?;
        let plain = named_socket(at, "").and_then(|socket| socket.listen(0).map(|()| socket)).ok();
        Ok(Self { _socket: socket, _plain: plain })
    }
}

/// Returns true if a process of this program listens at a target's address. `own` are this machine's addresses.
///
/// Any user can announce a port, so an announcement is only trusted from the user who also listens on it.
pub fn is_announced(at: SocketAddr, own: &[IpAddr]) -> bool {
    let at = destination(at);
    let is_here = at.ip().is_loopback() || own.iter().any(|own| own.to_canonical() == at.ip());
    is_here && is_announced_here(at)
}

/// Returns where a connection to an address goes: for the unspecified address that is loopback.
fn destination(at: SocketAddr) -> SocketAddr {
    let ip = match at.ip().to_canonical() {
        IpAddr::V4(Ipv4Addr::UNSPECIFIED) => Ipv4Addr::LOCALHOST.into(),
        IpAddr::V6(Ipv6Addr::UNSPECIFIED) => Ipv6Addr::LOCALHOST.into(),
        ip => ip,
    };
    SocketAddr::new(ip, at.port())
}

fn is_announced_here(at: SocketAddr) -> bool {
    match listening_at(at) {
        Ok(None) => false,
        Ok(Some(listener)) => {
            if UNANNOUNCED.lock().contains(&listener.cookie) {
                return false;
            }
            let is_its = |(of, owner): &(_, Option<u32>)| {
                *of == listener.at && owner.is_none_or(|owner| owner == listener.user)
            };
            let Ok(announcements) = announcements() else { return false };
            let is_announced = announcements.iter().any(is_its);
            if !is_announced {
                let mut known = UNANNOUNCED.lock();
                if known.len() == MAX_UNANNOUNCED {
                    known.clear();
                }
                known.insert(listener.cookie);
            }
            is_announced
        }
        // If the kernel does not name the listener, only the users who can listen anywhere are trusted.
        Err(_) => {
            let trusted = [None, Some(0), Some(rustix::process::geteuid().as_raw())];
            let leads = |of: SocketAddr| {
                let is_everywhere = of.ip().is_unspecified() && (of.is_ipv6() || at.is_ipv4());
                of.port() == at.port() && (is_everywhere || of.ip().to_canonical() == at.ip())
            };
            let announcements = announcements().unwrap_or_default();
            announcements.iter().any(|(of, owner)| leads(*of) && trusted.contains(owner))
        }
    }
}

/// Returns the announced ports, each with the owner of the announcement if the kernel tells it.
///
/// # Errors
///
/// The system does not list them, or there are too many open files.
fn announcements() -> io::Result<Vec<(SocketAddr, Option<u32>)>> {
    let mut found = Vec::new();
    let listed = unix_sockets(|name, owner| {
        found.extend(name.strip_prefix(b"\0").and_then(address).map(|at| (at, owner)));
    });
    if listed.is_err() {
        // A kernel without this query has a list without owners, where @ stands for the first byte.
        let list = fs::read("/proc/self/net/unix")?;
        let names = list.split(|byte| b" \n".contains(byte)).filter_map(|word| word.strip_prefix(b"@"));
        found = names.filter_map(address).map(|at| (at, None)).collect();
    }
    Ok(found)
}

/// Returns the address in the name of an announcement, which older programs make without a suffix.
fn address(name: &[u8]) -> Option<SocketAddr> {
    str::from_utf8(name).ok()?.strip_prefix(PREFIX)?.split('/').next()?.parse().ok()
}

/// Opens a socket with the name of an announcement. The first byte makes it abstract.
///
/// The name contains no IPv6 scope, because the two sides may know the same scope by different numbers.
fn named_socket(at: SocketAddr, suffix: &str) -> io::Result<Socket> {
    let socket = Socket::new(Domain::UNIX, Type::STREAM.nonblocking(), None)?;
    socket.bind(&SockAddr::unix(format!("\0{PREFIX}{}{suffix}", SocketAddr::new(at.ip(), at.port())))?)?;
    Ok(socket)
}

/// Start of an announcement's name, after its first byte.
const PREFIX: &str = "tunnel/private/";

/// The listening sockets that are known to have no announcement. As a port is announced before it listens, they never
/// get one. So a session costs no list of all Unix sockets of the machine.
static UNANNOUNCED: Mutex<BTreeSet<u64>> = Mutex::new(BTreeSet::new());

/// Most listening sockets that are known at a time. There are as many as this machine has targets.
const MAX_UNANNOUNCED: usize = 1024;

#[cfg(test)]
mod tests {
    use std::os::unix::fs::fchown;

    use tokio::net::TcpListener;

    use crate::listen::TcpListenSocket;

    use super::*;

    fn is_announced(at: SocketAddr) -> bool {
        super::is_announced(at, &[at.ip()])
    }

    #[tokio::test]
    async fn an_announced_port_is_recognised_by_each_of_its_addresses() {
        for (at, known, unknown) in [
            ("127.0.0.1:0", &["127.0.0.1"][..], &["127.0.0.2", "192.0.2.7", "::1"][..]),
            ("0.0.0.0:0", &["0.0.0.0", "127.0.0.1", "127.9.9.9", "192.0.2.7"], &["::1"]),
            ("[::]:0", &["::1", "127.0.0.1", "192.0.2.7", "2001:db8::7"], &[]),
            ("[::1]:0", &["::1"], &["127.0.0.1"]),
            ("[::ffff:127.0.0.1]:0", &["127.0.0.1"], &["::1"]),
        ] {
            let listener = TcpListenSocket::bind(at.parse().unwrap()).unwrap();
            let port = listener.at().port();
            let leads = |ip: &str| is_announced(SocketAddr::new(ip.parse().unwrap(), port));
            assert!(known.iter().all(|ip| leads(ip)) && !unknown.iter().any(|ip| leads(ip)), "{at}");
            drop(listener);
            assert!(!leads(known[0]), "{at}: the announcement ends with its port");
        }
    }

    #[tokio::test]
    async fn several_announcements_without_a_listener_are_not_trusted() {
        let port = TcpListener::bind("127.0.0.1:0").await.unwrap().local_addr().unwrap().port();
        let names = [Ipv4Addr::LOCALHOST.into(), Ipv6Addr::UNSPECIFIED.into(), Ipv4Addr::UNSPECIFIED.into()];
        let names = names.map(|ip: IpAddr| SocketAddr::new(ip, port));
        let _announced = names.map(|name| PortAnnouncement::new(name).unwrap());
        assert!(!is_announced(names[0]));
    }

    #[tokio::test]
    async fn an_announcement_without_a_listener_is_not_trusted() {
        let free = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let at = free.local_addr().unwrap();
        assert!(!is_announced(at));
        assert_eq!(listening_at(at).unwrap().unwrap().user, rustix::process::getuid().as_raw());
        // No process listens there, so no announcement is trusted.
        let everywhere = SocketAddr::new(Ipv4Addr::UNSPECIFIED.into(), at.port());
        let _announced = PortAnnouncement::new(everywhere).unwrap();
        assert!(listening_at(everywhere).unwrap().is_none());
        assert!(!is_announced(at));
    }

    #[tokio::test]
    async fn announcements_of_older_programs_are_trusted() {
        let free = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let at = free.local_addr().unwrap();
        let _older = named_socket(at, "").unwrap();
        assert!(is_announced(at));
    }

    /// Any user can take a name, and fill the queue of a socket that has it. Only root can give a socket away.
    #[tokio::test]
    async fn names_taken_by_another_user_close_no_port_and_prevent_no_announcement() {
        let free = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let at = free.local_addr().unwrap();
        let squatters = ["", "/1"].map(|suffix| named_socket(at, suffix).unwrap());
        for squatter in &squatters {
            if fchown(squatter, Some(65534), None).is_err() {
                return;
            }
            squatter.listen(0).unwrap();
        }
        assert!(!is_announced(at), "closed by another user");
        drop(free);
        let _announced = TcpListenSocket::bind(at).unwrap();
        assert!(is_announced(at));
    }
}
