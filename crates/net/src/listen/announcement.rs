//! All ports but those for metrics are announced to the tunnel processes on this machine, which refuse them as
//! targets. Otherwise a client of an edge would reach a server's port from this machine's addresses, without its
//! own name and rules, and an edge and a server could pass a connection to each other endlessly.
//!
//! An announcement is an abstract Unix socket named after the port's address. Such names belong to a network
//! namespace, like loopback. So they work across users and containers, need no privileges or directory, and end
//! with their process. No process connects to one: the kernel lists them, and their owners.

use std::fs::{self, File};
use std::io::{self, BufRead as _, BufReader};
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};

use socket2::{Domain, SockAddr, Socket, Type};

use crate::sock_diag;

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

/// Returns those of a target's addresses at which a process of this program listens. `own` are this machine's
/// addresses.
///
/// Any user can announce a port, so an announcement is only trusted from the user who also listens on it.
pub fn announced(addresses: &[SocketAddr], own: &[IpAddr]) -> Vec<SocketAddr> {
    let is_here = |ip: IpAddr| ip.is_loopback() || own.iter().any(|own| own.to_canonical() == ip);
    let mut here = addresses.to_vec();
    here.retain(|at| is_here(destination(*at).ip()));
    if !here.is_empty() {
        let announcements = announcements();
        here.retain(|at| is_announced(destination(*at), &announcements));
    }
    here
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

fn is_announced(at: SocketAddr, announcements: &[(SocketAddr, Option<u32>)]) -> bool {
    // An IPv6 socket may also accept IPv4 connections, and then has the mapped address.
    let of_ipv4: &[IpAddr] = match at.ip() {
        IpAddr::V4(ip) => &[Ipv4Addr::UNSPECIFIED.into(), ip.to_ipv6_mapped().into()],
        IpAddr::V6(_) => &[],
    };
    let mut listening = [at.ip(), Ipv6Addr::UNSPECIFIED.into()].into_iter().chain(of_ipv4.iter().copied());
    listening.any(|ip| {
        let at = SocketAddr::new(ip, at.port());
        let owners: Vec<_> =
            announcements.iter().filter(|(of, _)| *of == at).map(|(_, owner)| *owner).collect();
        !owners.is_empty()
            && match listener(at) {
                Ok(listener) => {
                    listener.is_some() && owners.iter().any(|owner| owner.is_none() || *owner == listener)
                }
                // If the kernel's list cannot be read, only the users who can listen anywhere are trusted.
                Err(_) => {
                    let trusted = [None, Some(0), Some(rustix::process::geteuid().as_raw())];
                    owners.iter().any(|owner| trusted.contains(owner))
                }
            }
    })
}

/// Returns the announced ports, each with the owner of the announcement if the kernel tells it.
fn announcements() -> Vec<(SocketAddr, Option<u32>)> {
    let mut found = Vec::new();
    let listed = sock_diag::unix_sockets(|name, owner| {
        found.extend(name.strip_prefix(b"\0").and_then(address).map(|at| (at, owner)));
    });
    if listed.is_err() {
        // A kernel without this query has a list without owners, where @ stands for the first byte.
        let list = fs::read("/proc/self/net/unix").unwrap_or_default();
        let names = list.split(|byte| b" \n".contains(byte)).filter_map(|word| word.strip_prefix(b"@"));
        found = names.filter_map(address).map(|at| (at, None)).collect();
    }
    found
}

/// Returns the address in the name of an announcement, which older programs make without a suffix.
fn address(name: &[u8]) -> Option<SocketAddr> {
    str::from_utf8(name).ok()?.strip_prefix(PREFIX)?.split('/').next()?.parse().ok()
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

/// The state of a listening socket in the kernel's list.
const LISTENS: &str = "0A";

#[cfg(test)]
mod tests {
    use std::os::unix::fs::fchown;

    use tokio::net::TcpListener;

    use crate::listen::TcpListenSocket;

    use super::*;

    fn is_announced(at: SocketAddr) -> bool {
        !announced(&[at], &[at.ip()]).is_empty()
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
        assert_eq!(listener(at).unwrap(), Some(rustix::process::getuid().as_raw()));
        // No process listens there, so no announcement is trusted.
        let everywhere = SocketAddr::new(Ipv4Addr::UNSPECIFIED.into(), at.port());
        let _announced = PortAnnouncement::new(everywhere).unwrap();
        assert_eq!(listener(everywhere).unwrap(), None);
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
        let _announced = PortAnnouncement::new(at).unwrap();
        assert!(is_announced(at));
    }
}
