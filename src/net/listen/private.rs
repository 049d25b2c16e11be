//! Ports of operators are announced to the edges of this machine, which refuse them as targets: what an edge dials comes
//! from loopback, and such a port trusts loopback.
//!
//! An announcement is an abstract unix socket named after the port's address. Such names belong to a network namespace, as
//! loopback does. So they reach across users and containers, need no rights and no directory, and end with their process.

use std::convert::Infallible;
use std::fs::File;
use std::io::{self, BufRead as _, BufReader};
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};

use socket2::{Domain, SockAddr, Socket, Type};
use tokio::net::UnixListener;

use super::accept_next;

/// Announces a port for as long as it lives.
#[derive(Debug)]
pub(super) struct Announcement(UnixListener);

impl Announcement {
    /// Announces the port at this address. Call it before the port takes connections: an edge looks once it has one.
    pub(super) fn new(at: SocketAddr) -> io::Result<Self> {
        let socket = socket()?;
        socket.bind(&name(at)?)?;
        socket.listen(WAITING)?;
        Ok(Self(UnixListener::from_std(socket.into())?))
    }

    /// Takes the connections of edges, which only look who listens. Cancel safe.
    pub(super) async fn answer(&self) -> Infallible {
        loop {
            accept_next("an announcement", || self.0.accept()).await;
        }
    }
}

/// Returns true if a process of this program serves operators at that address, which has to be loopback or among this
/// machine's `own`.
///
/// Any user can take the name of an announcement, so it is believed only from the user who also listens on the port.
pub fn is_private(at: SocketAddr, own: &[IpAddr]) -> bool {
    let ip = at.ip().to_canonical();
    let is_here = ip.is_loopback() || own.iter().any(|own| own.to_canonical() == ip);
    is_here && is_announced(SocketAddr::new(ip, at.port()))
}

fn is_announced(at: SocketAddr) -> bool {
    // A socket of IPv6 may take connections of IPv4 too, and then has its addresses in this form.
    let of_ipv4: &[IpAddr] = match at.ip() {
        IpAddr::V4(ip) => &[Ipv4Addr::UNSPECIFIED.into(), ip.to_ipv6_mapped().into()],
        IpAddr::V6(_) => &[],
    };
    let mut listening = [at.ip(), Ipv6Addr::UNSPECIFIED.into()].into_iter().chain(of_ipv4.iter().copied());
    listening.any(|ip| {
        let at = SocketAddr::new(ip, at.port());
        // Where the kernel's list cannot be read, each announcement is believed.
        announcer(at).is_some_and(|user| !listener(at).is_ok_and(|listener| listener != Some(user)))
    })
}

/// The user who has announced a port.
fn announcer(at: SocketAddr) -> Option<u32> {
    let socket = socket().ok()?;
    socket.connect(&name(at).ok()?).ok()?;
    rustix::net::sockopt::socket_peercred(&socket).ok().map(|user| user.uid.as_raw())
}

/// The user who listens on a port, as the kernel lists it.
fn listener(at: SocketAddr) -> io::Result<Option<u32>> {
    let hex = |octets: &[u8]| -> String {
        // Words as this processor reads them.
        let words = octets.chunks_exact(4).filter_map(|word| word.try_into().ok());
        words.map(|word| format!("{:08X}", u32::from_ne_bytes(word))).collect()
    };
    let (list, ip) = match at.ip() {
        IpAddr::V4(ip) => ("/proc/self/net/tcp", hex(&ip.octets())),
        IpAddr::V6(ip) => ("/proc/self/net/tcp6", hex(&ip.octets())),
    };
    let wanted = format!("{ip}:{:04X}", at.port());
    for line in BufReader::new(File::open(list)?).lines().skip(1) {
        let line = line?;
        let fields: Vec<_> = line.split_ascii_whitespace().collect();
        match fields.as_slice() {
            [_, local, _, LISTENS, _, _, _, user, ..] if *local == wanted => return Ok(user.parse().ok()),
            [_, _, _, LISTENS, ..] => {}
            // The kernel lists those that listen first, and there may be thousands of others.
            _ => break,
        }
    }
    Ok(None)
}

fn socket() -> io::Result<Socket> {
    let socket = Socket::new(Domain::UNIX, Type::STREAM, None)?;
    socket.set_nonblocking(true)?;
    Ok(socket)
}

/// The name of the announcement: the first byte makes it abstract. It has no scope of IPv6, which both sides know by
/// different numbers.
fn name(at: SocketAddr) -> io::Result<SockAddr> {
    SockAddr::unix(format!("\0tunnel/private/{}", SocketAddr::new(at.ip(), at.port())))
}

/// Edges that may look at once.
const WAITING: i32 = 128;
/// The state of a listening socket in the kernel's list.
const LISTENS: &str = "0A";

#[cfg(test)]
mod tests {
    use super::*;
    use crate::net::listen::Listener;
    use tokio::net::TcpListener;

    #[tokio::test]
    async fn a_port_of_operators_is_known_by_each_address_that_leads_to_it() {
        for (at, known, unknown) in [
            ("127.0.0.1:0", &["127.0.0.1"][..], &["127.0.0.2", "192.0.2.7", "::1"][..]),
            ("0.0.0.0:0", &["127.0.0.1", "127.9.9.9", "192.0.2.7"], &["::1"]),
            ("[::]:0", &["::1", "127.0.0.1", "192.0.2.7", "2001:db8::7"], &[]),
            ("[::1]:0", &["::1"], &["127.0.0.1"]),
            ("[::ffff:127.0.0.1]:0", &["127.0.0.1"], &["::1"]),
        ] {
            let listener = Listener::bind_private(at.parse().unwrap()).unwrap();
            let (port, own) =
                (listener.at().port(), ["192.0.2.7", "2001:db8::7"].map(|ip| ip.parse().unwrap()));
            let leads = |ip: &str| is_private(SocketAddr::new(ip.parse().unwrap(), port), &own);
            assert!(known.iter().all(|ip| leads(ip)) && !unknown.iter().any(|ip| leads(ip)), "{at}");
            assert!(!leads("192.0.2.8"), "{at}: that is another machine's");
            drop(listener);
            assert!(!leads(known[0]), "{at}: it ends with its port");
        }
    }

    #[tokio::test]
    async fn other_ports_are_not_private_whatever_others_announce() {
        let free = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let at = free.local_addr().unwrap();
        assert!(!is_private(at, &[]));
        assert_eq!(listener(at).unwrap(), Some(rustix::process::getuid().as_raw()));
        // Nobody listens there, so nobody's word is believed.
        let everywhere = SocketAddr::new(Ipv4Addr::UNSPECIFIED.into(), at.port());
        let _announced = Announcement::new(everywhere).unwrap();
        assert_eq!(announcer(everywhere), Some(rustix::process::getuid().as_raw()));
        assert_eq!(listener(everywhere).unwrap(), None);
        assert!(!is_private(at, &[]));
    }

    #[tokio::test]
    async fn one_that_is_announced_goes_on_accepting_and_can_be_looked_for_without_end() {
        let port = Listener::bind_private("127.0.0.1:0".parse().unwrap()).unwrap();
        let looks = async {
            for _ in 0..4 * WAITING {
                assert!(is_private(port.at(), &[]));
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
