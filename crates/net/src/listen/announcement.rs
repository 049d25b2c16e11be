//! All ports but those for metrics are announced to the tunnel processes on this machine, which refuse them as
//! targets. Otherwise a client of an edge would reach a server's port from this machine's addresses, without its
//! own name and rules, and an edge and a server could pass a connection to each other endlessly.
//!
//! An announcement is an abstract Unix socket named after the port's address. Such names belong to a network
//! namespace, like loopback. So they work across users and containers, need no privileges or directory, and end
//! with their process.

use std::convert::Infallible;
use std::fs::File;
use std::io::{self, BufRead as _, BufReader};
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};

use socket2::{Domain, SockAddr, Socket, Type};
use tokio::net::{TcpStream, UnixListener};

use crate::listen::{BACKLOG, accept_next};

/// The announcement of a port, until dropped.
#[derive(Debug)]
pub(crate) struct PortAnnouncement(UnixListener);

impl PortAnnouncement {
    /// Announces the port at this address. Call it before the port accepts connections, because an edge checks after
    /// connecting.
    pub(crate) fn new(at: SocketAddr) -> io::Result<Self> {
        let socket = socket()?;
        socket.bind(&name(at)?)?;
        socket.listen(i32::try_from(BACKLOG).unwrap_or(i32::MAX))?;
        Ok(Self(UnixListener::from_std(socket.into())?))
    }

    /// Accepts the connections of processes that only check which user listens. Cancel safe.
    pub(crate) async fn answer(&self) -> Infallible {
        loop {
            accept_next("an announcement", || self.0.accept()).await;
        }
    }
}

/// Returns true if this connection leads to an announced port of a process of this program. `own` are this machine's
/// addresses.
///
/// Any user can take the name of an announcement, so it is only trusted from the user who also listens on the port.
pub fn is_announced(socket: &TcpStream, own: &[IpAddr]) -> bool {
    let (Ok(at), Ok(from)) = (socket.peer_addr(), socket.local_addr()) else { return false };
    let ip = at.ip().to_canonical();
    // A connection to an address of this machine comes from that address, even if it was added a moment ago.
    let is_here = ip.is_loopback() || from.ip() == at.ip() || own.iter().any(|own| own.to_canonical() == ip);
    is_here && is_announced_here(SocketAddr::new(ip, at.port()))
}

fn is_announced_here(at: SocketAddr) -> bool {
    // An IPv6 socket may also accept IPv4 connections, and then has the mapped address.
    let of_ipv4: &[IpAddr] = match at.ip() {
        IpAddr::V4(ip) => &[Ipv4Addr::UNSPECIFIED.into(), ip.to_ipv6_mapped().into()],
        IpAddr::V6(_) => &[],
    };
    let mut listening = [at.ip(), Ipv6Addr::UNSPECIFIED.into()].into_iter().chain(of_ipv4.iter().copied());
    // A socket whose connection was refused can connect again, which costs less than a new one for each name.
    let Ok(mut free) = socket() else { return true };
    listening.any(|ip| {
        let at = SocketAddr::new(ip, at.port());
        match announcer(&free, at) {
            Ok(None) => false,
            Ok(Some(user)) => {
                let Ok(next) = socket() else { return true };
                free = next;
                // If the kernel's list cannot be read, every announcement is trusted.
                !listener(at).is_ok_and(|listener| listener != Some(user))
            }
            // The queue of the announcement is full: many clients request the port at the same time.
            Err(_) => true,
        }
    })
}

/// Returns the user who announced a port, or `None` if no process did. Fails if the announcement does not respond.
fn announcer(socket: &Socket, at: SocketAddr) -> io::Result<Option<u32>> {
    match socket.connect(&name(at)?) {
        Ok(()) => Ok(Some(rustix::net::sockopt::socket_peercred(socket)?.uid.as_raw())),
        Err(cause) if cause.kind() == io::ErrorKind::ConnectionRefused => Ok(None),
        Err(cause) => Err(cause),
    }
}

/// Returns the user who listens on a port, from the kernel's list.
pub(super) fn listener(at: SocketAddr) -> io::Result<Option<u32>> {
    let hex = |octets: &[u8]| -> String {
        // The kernel prints words in native byte order.
        let words = octets.chunks_exact(4).filter_map(|word| word.try_into().ok());
        words.map(|word| format!("{:08X}", u32::from_ne_bytes(word))).collect()
    };
    let (list, ip) = match at.ip() {
        IpAddr::V4(ip) => ("/proc/self/net/tcp", hex(&ip.octets())),
        IpAddr::V6(ip) => ("/proc/self/net/tcp6", hex(&ip.octets())),
    };
    let local_address = format!("{ip}:{:04X}", at.port());
    for line in BufReader::new(File::open(list)?).lines().skip(1) {
        let line = line?;
        let fields: Vec<_> = line.split_ascii_whitespace().collect();
        match fields.as_slice() {
            [_, local, _, LISTENS, _, _, _, user, ..] if *local == local_address => {
                return Ok(user.parse().ok());
            }
            [_, _, _, LISTENS, ..] => {}
            // The kernel lists listening sockets first, and there may be thousands of others.
            _ => break,
        }
    }
    Ok(None)
}

pub(super) fn socket() -> io::Result<Socket> {
    Socket::new(Domain::UNIX, Type::STREAM.nonblocking(), None)
}

/// Returns the name of the announcement. The first byte makes it abstract.
///
/// It contains no IPv6 scope, because the two sides may know the same scope by different numbers.
pub(super) fn name(at: SocketAddr) -> io::Result<SockAddr> {
    SockAddr::unix(format!("\0tunnel/private/{}", SocketAddr::new(at.ip(), at.port())))
}

/// The state of a listening socket in the kernel's list.
const LISTENS: &str = "0A";

#[cfg(test)]
mod tests {
    use tokio::net::TcpListener;

    use crate::listen::TcpListenSocket;

    use super::*;

    #[tokio::test]
    async fn an_announced_port_is_recognised_by_each_of_its_addresses() {
        for (at, known, unknown) in [
            ("127.0.0.1:0", &["127.0.0.1"][..], &["127.0.0.2", "192.0.2.7", "::1"][..]),
            ("0.0.0.0:0", &["127.0.0.1", "127.9.9.9", "192.0.2.7"], &["::1"]),
            ("[::]:0", &["::1", "127.0.0.1", "192.0.2.7", "2001:db8::7"], &[]),
            ("[::1]:0", &["::1"], &["127.0.0.1"]),
            ("[::ffff:127.0.0.1]:0", &["127.0.0.1"], &["::1"]),
        ] {
            let listener = TcpListenSocket::bind(at.parse().unwrap()).unwrap();
            let port = listener.at().port();
            let leads = |ip: &str| is_announced_here(SocketAddr::new(ip.parse().unwrap(), port));
            assert!(known.iter().all(|ip| leads(ip)) && !unknown.iter().any(|ip| leads(ip)), "{at}");
            drop(listener);
            assert!(!leads(known[0]), "{at}: the announcement ends with its port");
        }
    }

    #[tokio::test]
    async fn a_connection_to_an_announced_port_is_recognised_unlike_one_to_a_public_port() {
        let announced = TcpListenSocket::bind("127.0.0.1:0".parse().unwrap()).unwrap();
        let public = TcpListenSocket::bind_public("127.0.0.1:0".parse().unwrap()).unwrap();
        let connect = async |at: SocketAddr| TcpStream::connect(at).await.unwrap();
        assert!(is_announced(&connect(announced.at()).await, &[]));
        assert!(!is_announced(&connect(public.at()).await, &[]));
    }

    #[tokio::test]
    async fn several_announcements_without_a_listener_are_not_trusted() {
        let port = TcpListener::bind("127.0.0.1:0").await.unwrap().local_addr().unwrap().port();
        let names = [Ipv4Addr::LOCALHOST.into(), Ipv6Addr::UNSPECIFIED.into(), Ipv4Addr::UNSPECIFIED.into()];
        let names = names.map(|ip: IpAddr| SocketAddr::new(ip, port));
        let _announced = names.map(|name| PortAnnouncement::new(name).unwrap());
        assert!(!is_announced_here(names[0]));
    }

    #[tokio::test]
    async fn an_announcement_without_a_listener_is_not_trusted() {
        let free = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let at = free.local_addr().unwrap();
        assert!(!is_announced_here(at));
        assert_eq!(listener(at).unwrap(), Some(rustix::process::getuid().as_raw()));
        // No process listens there, so no announcement is trusted.
        let everywhere = SocketAddr::new(Ipv4Addr::UNSPECIFIED.into(), at.port());
        let _announced = PortAnnouncement::new(everywhere).unwrap();
        assert_eq!(
            announcer(&socket().unwrap(), everywhere).unwrap(),
            Some(rustix::process::getuid().as_raw())
        );
        assert_eq!(listener(everywhere).unwrap(), None);
        assert!(!is_announced_here(at));
    }

    /// Otherwise a crowd of clients would pass while the process is busy.
    #[tokio::test]
    async fn an_unresponsive_announcement_is_trusted() {
        let free = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let at = free.local_addr().unwrap();
        let busy = socket().unwrap();
        busy.bind(&name(at).unwrap()).unwrap();
        busy.listen(0).unwrap();
        let waits = socket().unwrap();
        waits.connect(&name(at).unwrap()).unwrap();
        assert!(announcer(&socket().unwrap(), at).is_err() && is_announced_here(at));
    }

    #[tokio::test]
    async fn an_announced_port_keeps_accepting_during_many_lookups() {
        let port = TcpListenSocket::bind("127.0.0.1:0".parse().unwrap()).unwrap();
        let looks = async {
            for _ in 0..2 * BACKLOG {
                assert_eq!(
                    announcer(&socket().unwrap(), port.at()).unwrap(),
                    Some(rustix::process::getuid().as_raw())
                );
                tokio::task::yield_now().await;
            }
            let _client = tokio::net::TcpStream::connect(port.at()).await.unwrap();
            std::future::pending::<()>().await;
        };
        tokio::select! {
            _ = port.accept() => {}
            () = looks => {}
        }
    }
}
