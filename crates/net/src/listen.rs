//! Listening sockets, and the options of sockets that carry traffic of clients, targets and links.

use std::net::{Ipv4Addr, SocketAddr};
use std::os::fd::AsFd;
use std::time::Duration;
use std::{fmt, io};

use rustix::io::Errno;
use socket2::{Domain, SockRef, Socket, Type};
use tokio::net::{TcpListener, TcpSocket, TcpStream};
use tracing::{info, warn};

use crate::keepalive::Keepalive;
use crate::os::announcement::PortAnnouncement;
use crate::os::{limit_silence, limit_unsent, set_congestion};
use crate::socket::Connection;

/// A listening socket of any kind. Accepting never fails.
pub trait Accept: Send + Sync {
    /// The type of accepted streams.
    type AnyStream: Connection + AsFd + 'static;

    /// Returns the address, for messages.
    fn at(&self) -> impl fmt::Display;

    /// Waits for the next connection and its address. A Unix socket has no addresses and returns loopback. Cancel safe.
    fn accept(&self) -> impl Future<Output = (Self::AnyStream, SocketAddr)> + Send;
}

/// A listening TCP socket that keeps accepting when the system temporarily lacks resources.
#[derive(Debug)]
pub struct TcpListenSocket {
    socket: TcpListener,
    at: SocketAddr,
    /// Announces the port to the tunnel processes on this machine, so that none dials it for a client.
    _announced: Option<PortAnnouncement>,
}

/// The error of an address that cannot be listened on, with a hint.
#[derive(Debug, thiserror::Error)]
#[error("cannot listen on {at}: {cause}{}", remedy(.cause.kind(), .at.port()))]
pub struct BindError {
    /// The requested address.
    pub at: SocketAddr,
    /// The system's error.
    #[source]
    pub cause: io::Error,
}

impl TcpListenSocket {
    /// Listens on an address; port 0 selects a free one. `[::]` includes IPv4. No tunnel process on this machine dials
    /// the port for its clients.
    ///
    /// Accepted sockets inherit the listener's options (Linux copies them), so no connection needs system calls for
    /// them.
    pub fn bind(at: SocketAddr) -> Result<Self, BindError> {
        Self::bind_announced(at, true)
    }

    /// Like [`Self::bind`], but for a port that may be a target: it gives a client of this machine no more than others.
    pub fn bind_public(at: SocketAddr) -> Result<Self, BindError> {
        Self::bind_announced(at, false)
    }

    fn bind_announced(at: SocketAddr, is_announced: bool) -> Result<Self, BindError> {
        let announce = |at| {
            PortAnnouncement::new(at).inspect_err(|cause| {
                warn!(
                    local_addr = %at,
                    error = %cause,
                    hint = "clients of edges on this machine may reach this port with the rights of this machine",
                    "cannot announce port to local edges"
                );
            })
        };
        let bound = || {
            let (socket, at) = open_socket(at, TcpSocket::new_v6)?;
            socket.set_reuseaddr(true)?;
            tune(&SockRef::from(&socket))?;
            socket.bind(at)?;
            let at = socket.local_addr()?;
            // Before it listens, so that no process on this machine dials the port for a client in between.
            let announced = is_announced.then(|| announce(at).ok()).flatten();
            Ok(Self { socket: socket.listen(BACKLOG)?, at, _announced: announced })
        };
        bound().map_err(|cause| BindError { at, cause })
    }

    /// Returns what was bound. If a default port (`implicit`) is not available, logs a warning and returns `None`.
    pub fn optional(bound: Result<Self, BindError>, implicit: bool) -> Result<Option<Self>, BindError> {
        match bound {
            Err(error) if implicit => {
                warn!(%error, "default port not available, continuing without it");
                Ok(None)
            }
            bound => bound.map(Some),
        }
    }

    /// Returns the address with the actual port.
    pub fn at(&self) -> SocketAddr {
        self.at
    }

    /// Waits for the next connection. Its small writes are not delayed, and keep-alive probes are on.
    ///
    /// Never fails. Errors of a single connection are skipped, and a lack of resources (files, memory) is retried after
    /// a pause. The first such failure and the recovery are logged. Cancel safe.
    pub async fn accept(&self) -> (TcpStream, SocketAddr) {
        accept_next(self.at, || self.socket.accept()).await
    }
}

/// Opens a socket for an address to listen on. The unspecified address of IPv6 includes IPv4 whatever the system's
/// default is, and is that of IPv4 on a machine without IPv6.
fn open_socket(
    at: SocketAddr,
    new_v6: impl FnOnce() -> io::Result<TcpSocket>,
) -> io::Result<(TcpSocket, SocketAddr)> {
    if at.is_ipv4() {
        return Ok((TcpSocket::new_v4()?, at));
    }
    let everywhere = at.ip().is_unspecified();
    match new_v6() {
        Ok(socket) => {
            if everywhere {
                SockRef::from(&socket).set_only_v6(false)?;
            }
            Ok((socket, at))
        }
        Err(cause) if everywhere && cause.raw_os_error() == Some(Errno::AFNOSUPPORT.raw_os_error()) => {
            Ok((TcpSocket::new_v4()?, (Ipv4Addr::UNSPECIFIED, at.port()).into()))
        }
        Err(cause) => Err(cause),
    }
}

/// Accepts until it succeeds: skips errors of a single connection, and retries when the system lacks resources.
pub(crate) async fn accept_next<T, F: Future<Output = io::Result<T>>>(
    at: impl fmt::Display,
    accept: impl Fn() -> F,
) -> T {
    let mut failing = false;
    loop {
        match accept().await {
            Ok(accepted) => {
                if failing {
                    info!(local_addr = %at, "accepting connections again");
                }
                return accepted;
            }
            Err(cause) if is_of_one_connection(&cause) => {}
            Err(cause) => {
                if !failing {
                    warn!(
                        local_addr = %at,
                        error = %cause,
                        hint = "check the limit of open files (ulimit -n, LimitNOFILE)",
                        "cannot accept connections, retrying"
                    );
                }
                failing = true;
                tokio::time::sleep(PAUSE).await;
            }
        }
    }
}

/// Returns true if two sockets cannot listen on these addresses at once. The unspecified address of IPv6 includes IPv4.
pub fn share_port(one: SocketAddr, other: SocketAddr) -> bool {
    let is_any = one.ip().is_unspecified() || other.ip().is_unspecified();
    one.port() != 0 && one.port() == other.port() && (one.ip() == other.ip() || is_any)
}

impl Accept for TcpListenSocket {
    type AnyStream = TcpStream;

    fn at(&self) -> impl fmt::Display {
        self.at
    }

    async fn accept(&self) -> (TcpStream, SocketAddr) {
        self.accept().await
    }
}

/// Sets the options of sockets of clients and targets: no delay for small writes, keep-alive probes, and a short queue
/// in the kernel.
///
/// With the default queue, the kernel would take 4 MiB for a remote that never reads, which would look like a fast
/// reader.
pub fn tune(socket: &SockRef<'_>) -> io::Result<()> {
    socket.set_tcp_nodelay(true)?;
    limit_unsent(socket, NOTSENT_LOWAT)?;
    Keepalive::PROBED.set(socket)
}

/// Sets the additional options of a link's socket.
///
/// The connection fails when sent bytes stay unacknowledged, the kernel's queue fits a shared link, and `congestion`
/// selects the kernel's congestion control. Not for clients and targets: the timeout also ends a connection of a reader
/// that only paused.
pub fn tune_link(socket: &TcpStream, congestion: Option<&str>) -> io::Result<()> {
    let socket = SockRef::from(socket);
    tune(&socket)?;
    if let Some(congestion) = congestion {
        set_congestion(&socket, congestion)?;
    }
    limit_silence(&socket, TCP_USER_TIMEOUT)?;
    limit_unsent(&socket, LINK_NOTSENT_LOWAT)
}

/// Selects cubic for an interactive link, or reno if this process may not use cubic, regardless of the configuration.
///
/// BBR would nearly stop sending every ten seconds, to measure the RTT.
pub fn tune_interactive(socket: &TcpStream) {
    let socket = SockRef::from(socket);
    // The link itself notices a closed socket.
    if set_congestion(&socket, "cubic").is_err() {
        drop(set_congestion(&socket, "reno"));
    }
}

/// Checks whether this process may use a congestion control for links.
///
/// # Errors
///
/// The kernel lacks it, or does not allow this process to use it. The text contains a hint.
pub fn try_congestion(name: &str) -> Result<(), String> {
    let socket = Socket::new(Domain::IPV4, Type::STREAM, None).map_err(|cause| cause.to_string())?;
    let Err(cause) = set_congestion(&SockRef::from(&socket), name) else { return Ok(()) };
    let listed = |which: &str| {
        let path = format!("/proc/sys/net/ipv4/tcp_{which}_congestion_control");
        std::fs::read_to_string(path).map_or("unknown".to_owned(), |names| names.trim().to_owned())
    };
    Err(match cause.kind() {
        io::ErrorKind::NotFound => format!(
            "congestion control {name:?} is not available in this kernel, which has {}; load it (modprobe tcp_{name}), \
             name one of these, or leave the key out",
            listed("available")
        ),
        io::ErrorKind::PermissionDenied => format!(
            "congestion control {name:?} is not allowed for this process, only {}; add it to the sysctl \
             net.ipv4.tcp_allowed_congestion_control, name one of these, or leave the key out",
            listed("allowed")
        ),
        _ => format!("cannot use congestion control {name:?}: {cause}; leave the key out"),
    })
}

fn is_of_one_connection(cause: &io::Error) -> bool {
    use io::ErrorKind as Kind;
    matches!(cause.kind(), Kind::ConnectionAborted | Kind::ConnectionReset | Kind::ConnectionRefused)
}

/// Returns the hint at the end of a [`BindError`]'s text.
fn remedy(kind: io::ErrorKind, port: u16) -> String {
    match kind {
        io::ErrorKind::AddrInUse => format!(
            "; stop the program that uses the port (`ss -ltnp 'sport = :{port}'` shows it) or choose another"
        ),
        io::ErrorKind::PermissionDenied if port < FIRST_FREE_PORT => format!(
            "; allow CAP_NET_BIND_SERVICE, which ports below {FIRST_FREE_PORT} require, or choose another port"
        ),
        io::ErrorKind::AddrNotAvailable => "; use an address of this machine, or 0.0.0.0 for all".to_owned(),
        _ => String::new(),
    }
}

/// Maximum number of connections that wait to be accepted (limited by the kernel's `somaxconn`).
///
/// Enough for thousands of edges that reconnect at once.
pub(crate) const BACKLOG: u32 = 4096;

/// Pause after the system lacked resources: long enough not to spin, short enough that no dial times out.
const PAUSE: Duration = Duration::from_millis(100);

/// Same as the timeout of links for unanswered pings.
const TCP_USER_TIMEOUT: Duration = Duration::from_secs(15);

/// Maximum number of unsent bytes in the kernel for a client's or target's socket: one read buffer. Fast readers leave
/// none.
const NOTSENT_LOWAT: u32 = 64 * 1024;

/// Maximum number of unsent bytes in the kernel for a link. More adds latency that scheduling cannot remove; with less,
/// the CPU has to wait at 1 Gbit/s.
const LINK_NOTSENT_LOWAT: u32 = 128 * 1024;

/// Ports below this one are privileged.
const FIRST_FREE_PORT: u16 = 1024;

#[cfg(test)]
mod tests {
    use super::*;

    fn any_port(ip: &str) -> SocketAddr {
        SocketAddr::new(ip.parse().unwrap(), 0)
    }

    // Only Linux reports all of them.
    #[cfg(target_os = "linux")]
    #[tokio::test]
    async fn accepted_sockets_have_their_options_set() {
        let listener = TcpListenSocket::bind(any_port("127.0.0.1")).unwrap();
        let (_far, (near, _)) = tokio::join!(TcpStream::connect(listener.at()), listener.accept());
        let socket = SockRef::from(&near);
        assert!(socket.tcp_nodelay().unwrap() && socket.keepalive().unwrap());
        assert_eq!(Keepalive::of(&socket).unwrap(), Keepalive::PROBED);
        assert_eq!(socket.tcp_user_timeout().unwrap(), None);
        assert_eq!(socket.tcp_notsent_lowat().unwrap(), NOTSENT_LOWAT);
        tune_link(&near, Some("reno")).unwrap();
        assert!(socket.tcp_congestion().unwrap().starts_with(b"reno"));
        assert_eq!(socket.tcp_user_timeout().unwrap(), Some(TCP_USER_TIMEOUT));
        assert_eq!(socket.tcp_notsent_lowat().unwrap(), LINK_NOTSENT_LOWAT);
    }

    #[tokio::test]
    async fn the_unspecified_ipv6_address_accepts_ipv4_even_without_ipv6() {
        let listener = TcpListenSocket::bind(any_port("::")).unwrap();
        let port = listener.at().port();
        for ip in ["127.0.0.1", "::1"] {
            let at = SocketAddr::new(ip.parse().unwrap(), port);
            let (client, _) = tokio::join!(TcpStream::connect(at), listener.accept());
            assert!(client.is_ok(), "{ip}");
        }
        let none = || Err(io::Error::from_raw_os_error(Errno::AFNOSUPPORT.raw_os_error()));
        assert_eq!(open_socket(any_port("::"), none).unwrap().1, any_port("0.0.0.0"));
        assert!(open_socket(any_port("::1"), none).is_err());
    }

    #[test]
    fn an_unavailable_congestion_control_is_an_error_with_a_remedy() {
        assert_eq!(try_congestion("reno"), Ok(()));
        for name in ["slowpoke", "", "a name that is longer than any"] {
            let failed = try_congestion(name).unwrap_err();
            assert!(
                failed.contains(&format!("{name:?}")) && failed.contains("leave the key out"),
                "{failed}"
            );
        }
    }

    #[tokio::test]
    async fn a_port_in_use_is_an_error_with_a_remedy() {
        let first = TcpListenSocket::bind(any_port("127.0.0.1")).unwrap();
        let failed = TcpListenSocket::bind(first.at()).unwrap_err().to_string();
        assert!(failed.contains(&first.at().to_string()) && failed.contains("stop the program"), "{failed}");
    }

    #[tokio::test]
    async fn an_address_of_another_machine_is_an_error_with_a_remedy() {
        let failed = TcpListenSocket::bind(any_port("192.0.2.1")).unwrap_err().to_string();
        assert!(failed.contains("use an address of this machine"), "{failed}");
    }

    #[test]
    fn a_privileged_port_is_an_error_with_a_remedy() {
        let cause = io::ErrorKind::PermissionDenied.into();
        let failed = BindError { at: "0.0.0.0:443".parse().unwrap(), cause }.to_string();
        assert!(failed.contains("CAP_NET_BIND_SERVICE"), "{failed}");
    }
}
