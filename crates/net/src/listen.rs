//! Listening sockets, and the options of sockets that carry traffic of clients, targets and links.

use std::convert::Infallible;
use std::fmt;
use std::fs::{self, File};
use std::io::{self, BufRead as _, BufReader};
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::fs::{FileTypeExt, MetadataExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::time::Duration;

use rustix::io::Errno;
use socket2::{Domain, SockAddr, SockRef, Socket, Type};
use tokio::net::{TcpListener, TcpSocket, TcpStream, UnixListener, UnixStream};
use tracing::{info, warn};

use crate::keepalive::Keepalive;
use crate::socket::Connection;
use tunnel_base::files::{FileLock, with_suffix};

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
pub struct TcpAccept {
    socket: TcpListener,
    at: SocketAddr,
    /// Announces the port to the tunnel processes on this machine, so that none dials it for a client.
    announced: Option<Announcement>,
}

/// The error of an address that cannot be listened on, with a hint.
#[derive(Debug, thiserror::Error)]
#[error("cannot listen on {at}: {cause}{}", Remedy(.cause.kind(), .at.port()))]
pub struct BindError {
    /// The requested address.
    pub at: SocketAddr,
    /// The system's error.
    #[source]
    pub cause: io::Error,
}

impl TcpAccept {
    /// Listens on an address; port 0 selects a free one. `[::]` includes IPv4. No tunnel process on this machine dials
    /// the port for its clients.
    ///
    /// Accepted sockets inherit the listener's options (Linux copies them), so no connection needs system calls for
    /// them.
    pub fn bind(at: SocketAddr) -> Result<Self, BindError> {
        let warn = |at: SocketAddr, cause: &io::Error| {
            warn!(
                local_addr = %at,
                error = %cause,
                hint = "clients of edges on this machine may reach this port with the rights of this machine",
                "cannot announce port to local edges"
            );
        };
        Self::bind_announced(at, |at| Announcement::new(at).inspect_err(|cause| warn(at, cause)).ok())
    }

    /// Like [`Self::bind`], but for a port that may be a target: it gives a client of this machine no more than others.
    pub fn bind_public(at: SocketAddr) -> Result<Self, BindError> {
        Self::bind_announced(at, |_| None)
    }

    fn bind_announced(
        at: SocketAddr,
        announce: impl FnOnce(SocketAddr) -> Option<Announcement>,
    ) -> Result<Self, BindError> {
        let bound = || {
            let (socket, at) = open_socket(at, TcpSocket::new_v6)?;
            socket.set_reuseaddr(true)?;
            tune(&SockRef::from(&socket))?;
            socket.bind(at)?;
            let at = socket.local_addr()?;
            let announced = announce(at);
            Ok(Self { socket: socket.listen(BACKLOG)?, at, announced })
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
async fn accept_next<T, F>(at: impl fmt::Display, accept: impl Fn() -> F) -> T
where
    F: Future<Output = io::Result<T>>,
{
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

impl Accept for TcpAccept {
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
    socket.set_tcp_notsent_lowat(NOTSENT_LOWAT)?;
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
        socket.set_tcp_congestion(congestion.as_bytes())?;
    }
    socket.set_tcp_user_timeout(Some(TCP_USER_TIMEOUT))?;
    socket.set_tcp_notsent_lowat(LINK_NOTSENT_LOWAT)
}

/// Selects cubic for an interactive link, or reno if this process may not use cubic, regardless of the configuration.
///
/// BBR would nearly stop sending every ten seconds, to measure the RTT.
pub fn tune_interactive(socket: &TcpStream) {
    let socket = SockRef::from(socket);
    // The link itself notices a closed socket.
    if socket.set_tcp_congestion(b"cubic").is_err() {
        drop(socket.set_tcp_congestion(b"reno"));
    }
}

/// Checks whether this process may use a congestion control for links.
///
/// # Errors
///
/// The kernel lacks it, or does not allow this process to use it. The text contains a hint.
pub fn try_congestion(name: &str) -> Result<(), String> {
    let socket = Socket::new(Domain::IPV4, Type::STREAM, None).map_err(|cause| cause.to_string())?;
    let Err(cause) = socket.set_tcp_congestion(name.as_bytes()) else { return Ok(()) };
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

/// The hint at the end of a [`BindError`]'s text.
struct Remedy(io::ErrorKind, u16);

impl fmt::Display for Remedy {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self(kind, port) = self;
        match kind {
            io::ErrorKind::AddrInUse => {
                write!(
                    f,
                    "; stop the program that uses the port (`ss -ltnp 'sport = :{port}'` shows it) or choose another"
                )
            }
            io::ErrorKind::PermissionDenied if *port < FIRST_FREE_PORT => {
                write!(
                    f,
                    "; allow CAP_NET_BIND_SERVICE, which ports below {FIRST_FREE_PORT} require, or choose another port"
                )
            }
            io::ErrorKind::AddrNotAvailable => {
                f.write_str("; use an address of this machine, or 0.0.0.0 for all")
            }
            _ => Ok(()),
        }
    }
}

/// Maximum number of connections that wait to be accepted (limited by the kernel's `somaxconn`).
///
/// Enough for thousands of edges that reconnect at once.
const BACKLOG: u32 = 4096;

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

// Listening on a Unix socket: a file that only its owner may open.

/// A listening Unix socket. Its file is removed on drop.
#[derive(Debug)]
pub struct UnixAccept {
    socket: UnixListener,
    path: PathBuf,
    /// Device and inode of the file, to recognise it.
    file: (u64, u64),
}

/// The error of a path that cannot be listened on, with a hint.
#[derive(Debug, thiserror::Error)]
pub enum LocalBindError {
    /// Another process listens there.
    #[error("another program listens on {0}; stop it or choose another path")]
    Taken(PathBuf),
    /// The path is not a socket.
    #[error("{0} exists and is not a socket; remove it or choose another path")]
    NoSocket(PathBuf),
    /// The system refused.
    #[error("cannot listen on {path}: {cause}; check that the directory exists and is writable")]
    System {
        /// The requested path.
        path: PathBuf,
        /// The system's error.
        cause: io::Error,
    },
}

impl UnixAccept {
    /// Listens on a path with a file that only its owner may open. Replaces the file of a terminated process.
    ///
    /// Waits briefly while another program starts listening there. Only for startup, as it blocks.
    ///
    /// # Errors
    ///
    /// Another process listens there, another kind of file has the path, or the system refuses.
    pub fn bind(path: &Path) -> Result<Self, LocalBindError> {
        let failed = |cause| LocalBindError::System { path: path.into(), cause };
        // Otherwise, if two start at once, the second could remove the socket that the first has just put in place of
        // an old one.
        let _alone = FileLock::acquire(&with_suffix(path, ".lock"), LOCK_TIMEOUT).map_err(failed)?;
        match fs::symlink_metadata(path) {
            Ok(found) if !found.file_type().is_socket() => return Err(LocalBindError::NoSocket(path.into())),
            Ok(_) if is_listening(path).map_err(failed)? => return Err(LocalBindError::Taken(path.into())),
            Ok(_) => fs::remove_file(path).map_err(failed)?,
            Err(cause) if cause.kind() == io::ErrorKind::NotFound => {}
            Err(cause) => return Err(failed(cause)),
        }
        Self::bind_new(path).map_err(failed)
    }

    fn bind_new(path: &Path) -> io::Result<Self> {
        let socket = private_socket()?;
        socket.bind(&SockAddr::unix(path)?)?;
        let backlog = i32::try_from(BACKLOG).unwrap_or(i32::MAX);
        socket.listen(backlog)?;
        let socket = UnixListener::from_std(socket.into())?;
        Ok(Self { socket, path: path.into(), file: identity(path)? })
    }
}

impl Accept for UnixAccept {
    type AnyStream = UnixStream;

    fn at(&self) -> impl fmt::Display {
        self.path.display()
    }

    async fn accept(&self) -> (UnixStream, SocketAddr) {
        let (stream, _) = accept_next(self.path.display(), || self.socket.accept()).await;
        (stream, (Ipv4Addr::LOCALHOST, 0).into())
    }
}

impl Drop for UnixAccept {
    fn drop(&mut self) {
        // A newer process may have replaced it.
        if identity(&self.path).is_ok_and(|file| file == self.file) {
            let _ = fs::remove_file(&self.path);
        }
    }
}

/// Creates a socket with a file that only its owner can open, because the system gives the file the mode of its socket.
///
/// Changing the file's own mode later could change another file that has the path by then.
fn private_socket() -> io::Result<Socket> {
    let socket = Socket::new(Domain::UNIX, Type::STREAM, None)?;
    socket.set_nonblocking(true)?;
    let file = File::from(OwnedFd::from(socket));
    file.set_permissions(fs::Permissions::from_mode(0o600))?;
    Ok(OwnedFd::from(file).into())
}

/// Returns true if a process listens on a socket's file.
fn is_listening(path: &Path) -> io::Result<bool> {
    let socket = Socket::new(Domain::UNIX, Type::STREAM, None)?;
    // Must not block on a full queue.
    socket.set_nonblocking(true)?;
    match socket.connect(&SockAddr::unix(path)?) {
        Err(cause) if cause.kind() == io::ErrorKind::ConnectionRefused => Ok(false),
        Ok(()) => Ok(true),
        Err(cause) if cause.kind() == io::ErrorKind::WouldBlock => Ok(true),
        Err(cause) => Err(cause),
    }
}

fn identity(path: &Path) -> io::Result<(u64, u64)> {
    fs::symlink_metadata(path).map(|file| (file.dev(), file.ino()))
}

/// Timeout for the lock. Starting to listen takes much less.
const LOCK_TIMEOUT: Duration = Duration::from_secs(2);

// All ports but those for metrics are announced to the tunnel processes on this machine, which refuse them as targets.
// Otherwise a client of an edge would reach a server's port from this machine's addresses, without its own name and
// rules, and an edge and a server could pass a connection to each other endlessly.
//
// An announcement is an abstract Unix socket named after the port's address. Such names belong to a network namespace,
// like loopback. So they work across users and containers, need no privileges or directory, and end with their process.

/// The announcement of a port, until dropped.
#[derive(Debug)]
pub(crate) struct Announcement(UnixListener);

impl Announcement {
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
fn listener(at: SocketAddr) -> io::Result<Option<u32>> {
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

fn socket() -> io::Result<Socket> {
    Socket::new(Domain::UNIX, Type::STREAM.nonblocking(), None)
}

/// Returns the name of the announcement. The first byte makes it abstract.
///
/// It contains no IPv6 scope, because the two sides may know the same scope by different numbers.
fn name(at: SocketAddr) -> io::Result<SockAddr> {
    SockAddr::unix(format!("\0tunnel/private/{}", SocketAddr::new(at.ip(), at.port())))
}

/// The state of a listening socket in the kernel's list.
const LISTENS: &str = "0A";

#[cfg(test)]
mod tests {
    use super::*;

    fn any_port(ip: &str) -> SocketAddr {
        SocketAddr::new(ip.parse().unwrap(), 0)
    }

    #[tokio::test]
    async fn accepted_sockets_have_their_options_set() {
        let listener = TcpAccept::bind(any_port("127.0.0.1")).unwrap();
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
        let listener = TcpAccept::bind(any_port("::")).unwrap();
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
        let first = TcpAccept::bind(any_port("127.0.0.1")).unwrap();
        let failed = TcpAccept::bind(first.at()).unwrap_err().to_string();
        assert!(failed.contains(&first.at().to_string()) && failed.contains("stop the program"), "{failed}");
    }

    #[tokio::test]
    async fn an_address_of_another_machine_is_an_error_with_a_remedy() {
        let failed = TcpAccept::bind(any_port("192.0.2.1")).unwrap_err().to_string();
        assert!(failed.contains("use an address of this machine"), "{failed}");
    }

    #[test]
    fn a_privileged_port_is_an_error_with_a_remedy() {
        let cause = io::ErrorKind::PermissionDenied.into();
        let failed = BindError { at: "0.0.0.0:443".parse().unwrap(), cause }.to_string();
        assert!(failed.contains("CAP_NET_BIND_SERVICE"), "{failed}");
    }
}

#[cfg(test)]
mod unix_tests {
    use std::thread;

    use super::*;

    #[tokio::test]
    async fn a_unix_socket_is_private_and_its_file_is_removed_on_drop() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("egress.sock");
        let listener = UnixAccept::bind(&path).unwrap();
        assert_eq!(fs::metadata(&path).unwrap().mode() & 0o777, 0o600);
        let (_client, (_, from)) =
            tokio::join!(async { UnixStream::connect(&path).await.unwrap() }, listener.accept());
        assert!(from.ip().is_loopback());
        drop(listener);
        assert!(!path.exists());
    }

    #[tokio::test]
    async fn a_stale_socket_file_is_replaced_and_a_live_one_is_not() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("egress.sock");
        drop(std::os::unix::net::UnixListener::bind(&path).unwrap());
        assert!(path.exists(), "the file remains");
        let first = UnixAccept::bind(&path).unwrap();
        let taken = UnixAccept::bind(&path).unwrap_err().to_string();
        assert!(taken.contains("another program listens on") && taken.contains("egress.sock"), "{taken}");
        // The file at this path now belongs to the second listener, so the first must not remove it.
        fs::remove_file(&path).unwrap();
        let _second = UnixAccept::bind(&path).unwrap();
        drop(first);
        assert!(path.exists());
    }

    #[tokio::test]
    async fn a_foreign_lock_on_the_directory_is_ignored() {
        let dir = tempfile::tempdir().unwrap();
        let held = File::open(dir.path()).unwrap();
        held.lock().unwrap();
        let _listener = UnixAccept::bind(&dir.path().join("egress.sock")).unwrap();
        assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 1, "no lock is left");
    }

    #[test]
    fn a_socket_file_is_private_as_soon_as_it_exists() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("egress.sock");
        private_socket().unwrap().bind(&SockAddr::unix(&path).unwrap()).unwrap();
        assert_eq!(fs::metadata(&path).unwrap().mode() & 0o777, 0o600);
    }

    #[tokio::test]
    async fn of_two_concurrent_binds_one_listens_and_the_other_fails() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("egress.sock");
        for _ in 0..100 {
            drop(std::os::unix::net::UnixListener::bind(&path).unwrap());
            let (start, runtime) = (std::sync::Barrier::new(2), tokio::runtime::Handle::current());
            let bind = || {
                let _inside = runtime.enter();
                start.wait();
                UnixAccept::bind(&path)
            };
            let both = thread::scope(|scope| {
                let both = [scope.spawn(bind), scope.spawn(bind)];
                both.map(|one| one.join().unwrap())
            });
            let (bound, failed): (Vec<_>, Vec<_>) = both.into_iter().partition(Result::is_ok);
            assert_eq!((bound.len(), failed.len()), (1, 1));
            assert!(matches!(failed[0], Err(LocalBindError::Taken(_))), "{failed:?}");
            UnixStream::connect(&path).await.unwrap();
        }
    }

    #[tokio::test]
    async fn the_destination_of_a_symlink_is_not_touched() {
        let dir = tempfile::tempdir().unwrap();
        let (link, file) = (dir.path().join("egress.sock"), dir.path().join("file"));
        fs::write(&file, "precious").unwrap();
        for at in [&file, &dir.path().join("nothing")] {
            std::os::unix::fs::symlink(at, &link).unwrap();
            let refused = UnixAccept::bind(&link).unwrap_err().to_string();
            assert!(refused.contains("is not a socket"), "{refused}");
            fs::remove_file(&link).unwrap();
        }
        assert_eq!(fs::read(&file).unwrap(), b"precious");
    }

    #[tokio::test]
    async fn an_unusable_socket_path_is_an_error_with_a_remedy() {
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join("file");
        fs::write(&file, "precious").unwrap();
        let refused = UnixAccept::bind(&file).unwrap_err().to_string();
        assert!(refused.contains("is not a socket") && file.exists(), "{refused}");
        let nowhere = UnixAccept::bind(&dir.path().join("a/b")).unwrap_err().to_string();
        assert!(nowhere.contains("check that the directory"), "{nowhere}");
        let long = UnixAccept::bind(&dir.path().join("x".repeat(120))).unwrap_err().to_string();
        assert!(long.contains("cannot listen on"), "{long}");
    }
}

#[cfg(test)]
mod announcement_tests {
    use tokio::net::TcpListener;

    use crate::listen::TcpAccept;

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
            let listener = TcpAccept::bind(at.parse().unwrap()).unwrap();
            let port = listener.at().port();
            let leads = |ip: &str| is_announced_here(SocketAddr::new(ip.parse().unwrap(), port));
            assert!(known.iter().all(|ip| leads(ip)) && !unknown.iter().any(|ip| leads(ip)), "{at}");
            drop(listener);
            assert!(!leads(known[0]), "{at}: the announcement ends with its port");
        }
    }

    #[tokio::test]
    async fn a_connection_to_an_announced_port_is_recognised_unlike_one_to_a_public_port() {
        let announced = TcpAccept::bind("127.0.0.1:0".parse().unwrap()).unwrap();
        let public = TcpAccept::bind_public("127.0.0.1:0".parse().unwrap()).unwrap();
        let connect = async |at: SocketAddr| TcpStream::connect(at).await.unwrap();
        assert!(is_announced(&connect(announced.at()).await, &[]));
        assert!(!is_announced(&connect(public.at()).await, &[]));
    }

    #[tokio::test]
    async fn several_announcements_without_a_listener_are_not_trusted() {
        let port = TcpListener::bind("127.0.0.1:0").await.unwrap().local_addr().unwrap().port();
        let names = [Ipv4Addr::LOCALHOST.into(), Ipv6Addr::UNSPECIFIED.into(), Ipv4Addr::UNSPECIFIED.into()];
        let names = names.map(|ip: IpAddr| SocketAddr::new(ip, port));
        let _announced = names.map(|name| Announcement::new(name).unwrap());
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
        let _announced = Announcement::new(everywhere).unwrap();
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
        let port = TcpAccept::bind("127.0.0.1:0".parse().unwrap()).unwrap();
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
