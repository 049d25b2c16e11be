//! Listening sockets, and the options of the sockets that carry our traffic.

mod private;
mod unix;

use std::fmt;
use std::io;
use std::net::SocketAddr;
use std::os::fd::AsFd;
use std::time::Duration;

use socket2::{Domain, SockRef, Socket, TcpKeepalive, Type};
use tokio::net::{TcpListener, TcpSocket, TcpStream};
use tracing::{error, info, warn};

use private::Announcement;
pub use private::is_private;
pub use unix::{LocalBindError, LocalListener};

use super::socket::Connection;

/// A listening socket of any kind, whose accepting never ends.
pub trait Accept: Send + Sync {
    /// The stream that it accepts.
    type Stream: Connection + AsFd + 'static;

    /// The address, for messages.
    fn at(&self) -> impl fmt::Display;

    /// Waits for the next connection and its address. A socket without addresses (unix) reports loopback. Cancel safe.
    fn accept(&self) -> impl Future<Output = (Self::Stream, SocketAddr)> + Send;
}

/// A listening TCP socket whose accepting goes on whatever the system lacks for a while.
#[derive(Debug)]
pub struct Listener {
    socket: TcpListener,
    at: SocketAddr,
    /// Tells edges of this machine not to dial it.
    announced: Option<Announcement>,
}

/// Why an address cannot be listened on: the address, the cause, and the remedy.
#[derive(Debug, thiserror::Error)]
#[error("cannot listen on {at}: {cause}{}", Remedy(.cause.kind(), .at.port()))]
pub struct BindError {
    /// The address asked for.
    pub at: SocketAddr,
    /// The system's error.
    #[source]
    pub cause: io::Error,
}

impl Listener {
    /// Listens on an address; port 0 takes a free one. `[::]` takes IPv4 too.
    ///
    /// Accepted sockets inherit the listener's options (Linux copies them), so they cost nothing for each connection.
    pub fn bind(at: SocketAddr) -> Result<Self, BindError> {
        Self::bind_announced(at, |_| None)
    }

    /// As [`Self::bind`], for a port of operators, which no edge of this machine dials for its clients.
    pub fn bind_private(at: SocketAddr) -> Result<Self, BindError> {
        let warn = |at: SocketAddr, cause: &io::Error| {
            warn!(%at, %cause, "edges of this machine are not told that this port is for operators: clients of theirs may reach it");
        };
        Self::bind_announced(at, |at| Announcement::new(at).inspect_err(|cause| warn(at, cause)).ok())
    }

    fn bind_announced(
        at: SocketAddr,
        announce: impl FnOnce(SocketAddr) -> Option<Announcement>,
    ) -> Result<Self, BindError> {
        let bound = || {
            let socket = if at.is_ipv4() { TcpSocket::new_v4() } else { TcpSocket::new_v6() }?;
            socket.set_reuseaddr(true)?;
            tune(&SockRef::from(&socket))?;
            socket.bind(at)?;
            let at = socket.local_addr()?;
            let announced = announce(at);
            Ok(Self { socket: socket.listen(BACKLOG)?, at, announced })
        };
        bound().map_err(|cause| BindError { at, cause })
    }

    /// What was bound, but a default port (`implicit`) that cannot be had is only a warning.
    pub fn optional(bound: Result<Self, BindError>, implicit: bool) -> Result<Option<Self>, BindError> {
        match bound {
            Err(error) if implicit => {
                error!(%error, "going on without this port, which is only a default: set it to have another");
                Ok(None)
            }
            bound => bound.map(Some),
        }
    }

    /// Its address, with the real port.
    pub fn at(&self) -> SocketAddr {
        self.at
    }

    /// Waits for the next connection. It has no delay for small writes, and keep-alive probes.
    ///
    /// Never fails: what concerns one connection is skipped, and when the system lacks something (files, memory) the
    /// next try comes after a pause; the first such failure and the end of the trouble are logged. Cancel safe.
    pub async fn accept(&self) -> (TcpStream, SocketAddr) {
        let accepted = accept_next(self.at, || self.socket.accept());
        match &self.announced {
            None => accepted.await,
            Some(announced) => tokio::select! {
                accepted = accepted => accepted,
                never = announced.answer() => match never {},
            },
        }
    }
}

/// Accepts until it succeeds: what concerns one connection is skipped, and what the system lacks is tried again.
async fn accept_next<T, F>(at: impl fmt::Display, accept: impl Fn() -> F) -> T
where
    F: Future<Output = io::Result<T>>,
{
    let mut failing = false;
    loop {
        match accept().await {
            Ok(accepted) => {
                if failing {
                    info!(%at, "accepting connections again");
                }
                return accepted;
            }
            Err(cause) if is_of_one_connection(&cause) => {}
            Err(cause) => {
                if !failing {
                    warn!(%at, %cause, "cannot accept connections, trying on; too few open files? \
                           (ulimit -n, LimitNOFILE)");
                }
                failing = true;
                tokio::time::sleep(PAUSE).await;
            }
        }
    }
}

impl Accept for Listener {
    type Stream = TcpStream;

    fn at(&self) -> impl fmt::Display {
        self.at
    }

    async fn accept(&self) -> (TcpStream, SocketAddr) {
        self.accept().await
    }
}

/// Sets the options of the sockets of clients and targets: no delay for small writes, keep-alive probes, and a short
/// queue in the kernel, which would else take 4 MiB for a peer that never reads, and look like a fast reader.
pub fn tune(socket: &SockRef<'_>) -> io::Result<()> {
    socket.set_tcp_nodelay(true)?;
    socket.set_tcp_notsent_lowat(UNSENT)?;
    let probes =
        TcpKeepalive::new().with_time(PROBE_AFTER).with_interval(PROBE_EVERY).with_retries(PROBE_TIMES);
    socket.set_tcp_keepalive(&probes)
}

/// Sets the further options of a link's socket: it dies when sent bytes stay unacknowledged, its queue in the kernel is
/// that of a line, and the kernel sends by `congestion`, if one is named. Not for clients and targets: the timeout also
/// ends a connection whose reader has only paused.
pub fn tune_link(socket: &TcpStream, congestion: Option<&str>) -> io::Result<()> {
    let socket = SockRef::from(socket);
    tune(&socket)?;
    if let Some(congestion) = congestion {
        socket.set_tcp_congestion(congestion.as_bytes())?;
    }
    socket.set_tcp_user_timeout(Some(UNACKNOWLEDGED))?;
    socket.set_tcp_notsent_lowat(UNSENT_ON_LINK)
}

/// Has the kernel send an interactive link by cubic, or by reno where this process may not have that, whatever
/// else is configured: BBR stands still once in ten seconds.
pub fn tune_interactive(socket: &TcpStream) {
    let socket = SockRef::from(socket);
    // A socket that is gone shows that to its link.
    if socket.set_tcp_congestion(b"cubic").is_err() {
        drop(socket.set_tcp_congestion(b"reno"));
    }
}

/// Tries whether this process may have links sent by a congestion control.
///
/// # Errors
///
/// A sentence with the remedy: the kernel has not got it, or keeps it for others.
pub fn try_congestion(name: &str) -> Result<(), String> {
    let socket = Socket::new(Domain::IPV4, Type::STREAM, None).map_err(|cause| cause.to_string())?;
    let Err(cause) = socket.set_tcp_congestion(name.as_bytes()) else { return Ok(()) };
    let listed = |which: &str| {
        let path = format!("/proc/sys/net/ipv4/tcp_{which}_congestion_control");
        std::fs::read_to_string(path).map_or("unknown".to_owned(), |names| names.trim().to_owned())
    };
    Err(match cause.kind() {
        io::ErrorKind::NotFound => format!(
            "this kernel has no congestion control {name:?}, it has: {}; load one (modprobe tcp_{name}), name one of \
             these, or leave the key out",
            listed("available")
        ),
        io::ErrorKind::PermissionDenied => format!(
            "this process may not use the congestion control {name:?}, but: {}; add it to the sysctl \
             net.ipv4.tcp_allowed_congestion_control, name one of these, or leave the key out",
            listed("allowed")
        ),
        _ => format!("cannot use the congestion control {name:?}: {cause}; leave the key out"),
    })
}

fn is_of_one_connection(cause: &io::Error) -> bool {
    use io::ErrorKind as Kind;
    matches!(cause.kind(), Kind::ConnectionAborted | Kind::ConnectionReset | Kind::ConnectionRefused)
}

/// The remedy at the end of a [`BindError`]'s sentence.
struct Remedy(io::ErrorKind, u16);

impl fmt::Display for Remedy {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self(kind, port) = self;
        match kind {
            io::ErrorKind::AddrInUse => {
                write!(
                    f,
                    "; another program has the port (`ss -ltnp 'sport = :{port}'` shows it): stop it, or choose another"
                )
            }
            io::ErrorKind::PermissionDenied if *port < FIRST_FREE_PORT => {
                write!(
                    f,
                    "; ports below {FIRST_FREE_PORT} need a privilege: allow CAP_NET_BIND_SERVICE, or choose another"
                )
            }
            io::ErrorKind::AddrNotAvailable => {
                f.write_str("; this machine has no such address: use one of its own, or 0.0.0.0 for all")
            }
            _ => Ok(()),
        }
    }
}

/// Connections that wait to be accepted: enough for thousands of edges that come back at once (the kernel lowers it to
/// its `somaxconn`).
const BACKLOG: u32 = 4096;

/// Pause after the system lacked something: long enough not to spin, short enough that nobody's dial times out.
const PAUSE: Duration = Duration::from_millis(100);

/// A peer that vanished is noticed after 30 s and three probes, a minute in all; NATs forget no earlier.
const PROBE_AFTER: Duration = Duration::from_secs(30);
const PROBE_EVERY: Duration = Duration::from_secs(10);
const PROBE_TIMES: u32 = 3;

/// As long as the links' own patience with silence.
const UNACKNOWLEDGED: Duration = Duration::from_secs(15);

/// Unsent bytes that a client's or target's socket leaves to the kernel: a read buffer's. Whoever reads fast leaves none.
const UNSENT: u32 = 64 * 1024;

/// Unsent bytes that a link leaves to the kernel: more adds latency that the schedule cannot remove, with less the
/// CPU waits at 1 Gbit/s.
const UNSENT_ON_LINK: u32 = 128 * 1024;

/// Ports below it are privileged.
const FIRST_FREE_PORT: u16 = 1024;

#[cfg(test)]
mod tests {
    use super::*;

    fn any_port(ip: &str) -> SocketAddr {
        SocketAddr::new(ip.parse().unwrap(), 0)
    }

    #[tokio::test]
    async fn accepted_sockets_have_the_options_of_their_listener() {
        let listener = Listener::bind(any_port("127.0.0.1")).unwrap();
        let (_far, (near, _)) = tokio::join!(TcpStream::connect(listener.at()), listener.accept());
        let socket = SockRef::from(&near);
        assert!(socket.tcp_nodelay().unwrap() && socket.keepalive().unwrap());
        assert_eq!(socket.tcp_keepalive_time().unwrap(), PROBE_AFTER);
        assert_eq!(socket.tcp_keepalive_interval().unwrap(), PROBE_EVERY);
        assert_eq!(socket.tcp_keepalive_retries().unwrap(), PROBE_TIMES);
        assert_eq!(socket.tcp_user_timeout().unwrap(), None);
        assert_eq!(socket.tcp_notsent_lowat().unwrap(), UNSENT);
        tune_link(&near, Some("reno")).unwrap();
        assert!(socket.tcp_congestion().unwrap().starts_with(b"reno"));
        assert_eq!(socket.tcp_user_timeout().unwrap(), Some(UNACKNOWLEDGED));
        assert_eq!(socket.tcp_notsent_lowat().unwrap(), UNSENT_ON_LINK);
    }

    #[test]
    fn a_congestion_control_that_is_not_there_is_told_with_the_remedy() {
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
    async fn a_taken_port_is_told_with_the_remedy() {
        let first = Listener::bind(any_port("127.0.0.1")).unwrap();
        let failed = Listener::bind(first.at()).unwrap_err().to_string();
        assert!(
            failed.contains(&first.at().to_string()) && failed.contains("another program has"),
            "{failed}"
        );
    }

    #[tokio::test]
    async fn an_address_of_another_machine_is_told_with_the_remedy() {
        let failed = Listener::bind(any_port("192.0.2.1")).unwrap_err().to_string();
        assert!(failed.contains("no such address"), "{failed}");
    }

    #[test]
    fn a_privileged_port_is_told_with_the_remedy() {
        let cause = io::ErrorKind::PermissionDenied.into();
        let failed = BindError { at: "0.0.0.0:443".parse().unwrap(), cause }.to_string();
        assert!(failed.contains("CAP_NET_BIND_SERVICE"), "{failed}");
    }
}
