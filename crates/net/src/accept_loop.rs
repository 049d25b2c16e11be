//! The accept loop of every listener: accepts, reads a balancer's header, acquires a permit, and passes the connection
//! on or rejects it.
//!
//! A listener implements [`ConnectionHandler`] and calls [`run`]. The loop deals with permits, sources,
//! balancers and the lack of file descriptors. A connection holds a permit until [`Accepted::permit`] is dropped, which
//! the handler does once the client is authenticated.

use std::io;
use std::net::{IpAddr, SocketAddr};
use std::os::fd::AsFd;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use ppp::{HeaderResult, v1, v2};
use socket2::SockRef;
use tokio::io::{AsyncRead, AsyncReadExt};
use tokio::net::TcpStream;
use tokio::time::{Instant, timeout};
use tracing::{Instrument, Span, debug, info_span, warn};

use crate::fd_limit;
use crate::limiter::{FairLimiter, Limits, Permit, Source};
use crate::listen::Accept;
use crate::socket::Connection;
use tunnel_base::access_log::RefusalLog;
use tunnel_base::drain::Drain;
use tunnel_base::metrics::ReasonCounter;
use tunnel_base::policy::{Networks, canonical_ip};

/// The limits of a listener, and what counts and logs the connections that it rejects.
#[derive(Debug)]
pub struct AcceptLimits {
    /// Maximum number of connections that are not authenticated yet.
    pub permits: usize,
    /// Networks of balancers. TCP connections from there begin with a PROXY header.
    pub proxies: Networks,
    /// Counter of rejected connections by reason.
    pub refused: ReasonCounter,
    /// Rate limit of the log lines about rejected connections.
    pub refusals: RefusalLog,
    /// Whether this is a port for operators and probes, which may use some of the reserved file descriptors.
    pub for_operators: bool,
}

/// An accepted connection with its permit, as [`run`] passes it to the handler.
#[derive(Debug)]
pub struct Accepted<S = TcpStream> {
    /// The stream.
    pub socket: S,
    /// The client's address, from the balancer's header if there is one, otherwise the socket's. Never IPv4-mapped.
    pub from: SocketAddr,
    /// The permit. If it is revoked, the handler's future is dropped at its current await point.
    pub permit: Permit,
}

/// The reason for rejecting a connection before it is served.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Rejection {
    /// The access policy does not allow the source.
    Forbidden,
    /// The process is stopping.
    Stopping,
    /// All permits are taken, and none can be revoked.
    Full,
    /// Nearly all file descriptors are in use; the rest are reserved for running connections.
    OpenFiles,
}

/// Serves the connections that [`run`] accepts.
pub trait ConnectionHandler<S = TcpStream>: Send + Sync + 'static {
    /// Returns the span of the connection's log lines.
    fn span(&self, from: SocketAddr) -> Span;

    /// Checks whether a connection from this address is accepted. Called before it gets a permit.
    fn admits(&self, _from: SocketAddr) -> Result<(), Rejection> {
        Ok(())
    }

    /// Returns a few bytes in the listener's protocol to send before a rejected connection is closed; none by default.
    ///
    /// Called once per rejected connection, so it may count and log.
    fn rejection_bytes(&self, _from: SocketAddr, _why: Rejection) -> Bytes {
        Bytes::new()
    }

    /// Serves a connection until it ends.
    fn handle(self: Arc<Self>, connection: Accepted<S>) -> impl Future<Output = ()> + Send;
}

impl Rejection {
    /// Returns a fixed label for metrics.
    pub fn name(self) -> &'static str {
        match self {
            Self::Forbidden => "forbidden",
            Self::Stopping => "stopping",
            Self::Full => "limit_reached",
            Self::OpenFiles => "file_limit",
        }
    }
}

/// Accepts connections until draining begins. Each is served in its own task, which the drain waits for.
pub async fn run<L, H>(listener: L, limits: AcceptLimits, handler: H, drain: Drain)
where
    L: Accept,
    H: ConnectionHandler<L::AnyStream>,
{
    let AcceptLimits { permits, proxies, refused, refusals, for_operators } = limits;
    let (limiter, max_files) = (FairLimiter::new(Limits::permits(permits)), fd_limit::limit());
    let closing = FairLimiter::new(Limits::permits(fd_limit::at_most(MAX_CLOSING, 16)));
    let handler = Arc::new(handler);
    let acceptor = Acceptor { handler, limiter, refused, refusals, closing, max_files, for_operators, drain };
    let acceptor = Arc::new(acceptor);
    let mut warned: Option<Instant> = None;
    loop {
        let (socket, peer) = tokio::select! {
            biased;
            () = acceptor.drain.draining() => return,
            accepted = listener.accept() => accepted,
        };
        let from = SocketAddr::new(canonical_ip(peer.ip()), peer.port());
        if !for_operators && fd_limit::is_in_reserve(&socket, max_files) {
            if warned.is_none_or(|at| at.elapsed() >= WARN_INTERVAL) {
                warned = Some(Instant::now());
                warn!(
                    local_addr = %listener.at(),
                    limit = max_files,
                    hint = "raise the limit of open files (ulimit -Hn, LimitNOFILE)",
                    "refusing connections, nearly all files are in use"
                );
            }
            acceptor.reject(socket, from, Rejection::OpenFiles);
        } else if proxies.contains(from.ip()) {
            Arc::clone(&acceptor).read_proxy_header(socket, from);
        } else {
            acceptor.admit(socket, from);
        }
    }
}

/// The state that the loop of a listener shares with the tasks of its connections.
#[derive(Debug)]
struct Acceptor<H> {
    handler: Arc<H>,
    limiter: FairLimiter,
    refused: ReasonCounter,
    refusals: RefusalLog,
    /// Permits for rejected connections that were sent bytes and are not closed yet.
    closing: FairLimiter,
    /// Maximum number of open files of this process.
    max_files: u64,
    for_operators: bool,
    drain: Drain,
}

impl<H> Acceptor<H> {
    /// Spawns the task that serves a connection, or rejects the connection.
    fn admit<S>(&self, socket: S, from: SocketAddr)
    where
        H: ConnectionHandler<S>,
        S: Connection + AsFd + 'static,
    {
        if let Err(why) = self.handler.admits(from) {
            return self.reject(socket, from, why);
        }
        let most = self.max_permits(&socket);
        let Ok(permit) = self.limiter.try_acquire_below(&Source::of(from.ip()), most) else {
            return self.reject(socket, from, Rejection::Full);
        };
        let lost = permit.revoked();
        // Boxed, so that the future is not stored a second time in the task.
        let serving = Box::pin(Arc::clone(&self.handler).handle(Accepted { socket, from, permit }));
        let refused = self.refused.clone();
        self.drain.spawn(self.handler.span(from), async move {
            tokio::select! {
                biased;
                () = lost.cancelled() => {
                    refused.count("evicted");
                    debug!("permit revoked for another source");
                }
                () = serving => {}
            }
        });
    }

    /// Returns how many permits may be held. While files are scarce, that is a quarter of all files: newcomers then
    /// take permits of the sources with most. Operators may have some in the reserve.
    fn max_permits(&self, newcomer: &impl AsFd) -> usize {
        if self.for_operators && fd_limit::is_in_reserve(newcomer, self.max_files) {
            return fd_limit::operator_connections(self.max_files);
        }
        if !fd_limit::are_scarce(newcomer, self.max_files) {
            return usize::MAX;
        }
        usize::try_from(self.max_files / 4).unwrap_or(usize::MAX).max(1)
    }

    /// Reads a balancer's header, then admits the client that it names. Until then the balancer holds the permit.
    fn read_proxy_header<S>(self: Arc<Self>, socket: S, balancer: SocketAddr)
    where
        H: ConnectionHandler<S>,
        S: Connection + AsFd + 'static,
    {
        let most = self.max_permits(&socket);
        let Ok(permit) = self.limiter.try_acquire_below(&Source::of(balancer.ip()), most) else {
            return self.reject(socket, balancer, Rejection::Full);
        };
        let span = info_span!("proxy_protocol", %balancer);
        self.drain.clone().spawn(Span::none(), async move {
            let lost = permit.revoked();
            let read = timeout(HEADER_TIMEOUT, proxied_client(socket.tcp())).instrument(span.clone());
            let read = tokio::select! {
                biased;
                () = lost.cancelled() => return self.refused.count("evicted"),
                read = read => read,
            };
            drop(permit);
            let why = match read {
                Ok(Ok(from)) => return self.admit(socket, from.unwrap_or(balancer)),
                Ok(Err(error)) => error.to_string(),
                Err(_) => format!("no PROXY header within {HEADER_TIMEOUT:?}"),
            };
            self.refused.count("proxy_header");
            if self.refusals.may_log("proxy_header", balancer.ip()) {
                span.in_scope(|| {
                    warn!(
                        error = %why,
                        hint = "connections from networks in proxy_protocol must begin with a PROXY header",
                        "no valid PROXY header, connection closed"
                    )
                });
            }
        });
    }

    /// Sends the rejection without waiting, and closes the connection so that its bytes arrive.
    fn reject<S>(&self, mut socket: S, from: SocketAddr, why: Rejection)
    where
        H: ConnectionHandler<S>,
        S: Connection + AsFd + 'static,
    {
        self.refused.count(why.name());
        let reply = self.handler.rejection_bytes(from, why);
        // Sent by a system call, because the runtime does not know yet that a new socket is writable.
        let raw = SockRef::from(&socket);
        if reply.is_empty() || !matches!(raw.send(&reply), Ok(n) if n == reply.len()) {
            return;
        }
        let _ = raw.shutdown(std::net::Shutdown::Write);
        // Closing a socket with unread bytes resets the connection, and the client might then not read the rejection.
        let Ok(permit) = self.closing.try_acquire(&Source::of(from.ip())) else { return };
        let lost = permit.revoked();
        self.drain.spawn(Span::none(), async move {
            tokio::select! {
                () = lost.cancelled() => {}
                _ = timeout(CLOSE_TIMEOUT, discard(&mut socket)) => {}
            }
            drop(permit);
        });
    }
}

/// Returns the client in a balancer's header, or `None` if the header names none or the stream is not TCP.
async fn proxied_client(socket: Option<&TcpStream>) -> Result<Option<SocketAddr>, ProxyProtocolError> {
    match socket {
        Some(socket) => read(socket).await,
        None => Ok(None),
    }
}

/// Reads and discards until the remote end finishes or has sent [`MAX_DISCARDED`] bytes.
async fn discard<S: AsyncRead + Unpin>(socket: &mut S) {
    let (mut discarded, mut space) = (0, [0; 1024]);
    while discarded < MAX_DISCARDED {
        match socket.read(&mut space).await {
            Ok(n) if n > 0 => discarded += n,
            _ => return,
        }
    }
}

/// Timeout for a balancer's header, which is the first thing that a balancer sends.
const HEADER_TIMEOUT: Duration = Duration::from_secs(3);

/// Maximum number of concurrent rejected connections that wait for their close.
const MAX_CLOSING: usize = 256;

/// Timeout for a rejected client to close.
const CLOSE_TIMEOUT: Duration = Duration::from_secs(1);

/// Maximum number of bytes discarded from a rejected client.
const MAX_DISCARDED: usize = 64 * 1024;

/// Minimum time between two warnings about the lack of files.
const WARN_INTERVAL: Duration = Duration::from_secs(10);

// The PROXY protocol, v1 and v2: transmits the client's address on connections from a balancer.

/// The reason for closing a balancer's connection.
#[derive(Debug, thiserror::Error)]
pub enum ProxyProtocolError {
    /// The connection ended or failed before its header was complete.
    #[error("connection ended before its PROXY header: {0}")]
    Io(#[from] io::Error),
    /// The first bytes are not a header.
    #[error("invalid PROXY header (v1 or v2): {0}")]
    Header(String),
}

/// Reads a connection's header, and not a byte more.
///
/// Returns the client that it names, or `None` if the balancer connects on its own behalf, for example for a health
/// check.
///
/// # Errors
///
/// Fails if the header is missing or malformed. Not cancel safe.
pub async fn read(socket: &TcpStream) -> Result<Option<SocketAddr>, ProxyProtocolError> {
    let mut header = vec![0; v2::PROTOCOL_PREFIX.len()];
    fill(socket, &mut header).await?;
    if header == v2::PROTOCOL_PREFIX {
        binary(socket, &mut header).await?;
    } else if header.starts_with(v1::PROTOCOL_PREFIX.as_bytes()) {
        text(socket, &mut header).await?;
    }
    source(&header)
}

/// Returns the v2 header of a forwarded connection: the client's address, and the local address it connected to.
pub fn header(from: SocketAddr, to: SocketAddr) -> Bytes {
    let mapped = |at: SocketAddr| match at.ip() {
        IpAddr::V4(ip) => SocketAddr::new(ip.to_ipv6_mapped().into(), at.port()),
        IpAddr::V6(_) => at,
    };
    // Both addresses are written in one family. They differ if a balancer uses another family here than with its
    // client.
    let pair = if from.is_ipv4() == to.is_ipv4() { (from, to) } else { (mapped(from), mapped(to)) };
    let header =
        v2::Builder::with_addresses(v2::Version::Two | v2::Command::Proxy, v2::Protocol::Stream, pair);
    // Building fails only if the header does not fit into the length field.
    header.build().unwrap_or_default().into()
}

/// Reads the rest of a v2 header. Its first part contains the length.
async fn binary(socket: &TcpStream, header: &mut Vec<u8>) -> Result<(), ProxyProtocolError> {
    let mut rest = [0; 4];
    fill(socket, &mut rest).await?;
    header.extend_from_slice(&rest);
    let length = usize::from(u16::from_be_bytes([rest[2], rest[3]]));
    if length > MAX_HEADER {
        return Err(ProxyProtocolError::Header(format!("{length} bytes long, the limit is {MAX_HEADER}")));
    }
    let read = header.len();
    header.resize(read + length, 0);
    fill(socket, &mut header[read..]).await?;
    Ok(())
}

/// Reads the rest of a v1 header, which is one line. The bytes after it belong to the client, so it peeks first.
async fn text(socket: &TcpStream, header: &mut Vec<u8>) -> Result<(), ProxyProtocolError> {
    let mut ahead = [0; MAX_LINE];
    while !header.ends_with(b"\r\n") {
        let room = MAX_LINE.saturating_sub(header.len());
        if room == 0 {
            return Err(ProxyProtocolError::Header("line too long".into()));
        }
        let seen = socket.peek(&mut ahead[..room]).await?;
        if seen == 0 {
            return Err(io::Error::from(io::ErrorKind::UnexpectedEof).into());
        }
        let line = ahead[..seen].iter().position(|byte| *byte == b'\n').map_or(seen, |end| end + 1);
        let read = header.len();
        header.resize(read + line, 0);
        fill(socket, &mut header[read..]).await?;
    }
    Ok(())
}

/// Reads until `space` is full.
async fn fill(socket: &TcpStream, mut space: &mut [u8]) -> io::Result<()> {
    while !space.is_empty() {
        socket.readable().await?;
        match socket.try_read(space) {
            Ok(0) => return Err(io::ErrorKind::UnexpectedEof.into()),
            Ok(n) => space = &mut space[n..],
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
            Err(error) => return Err(error),
        }
    }
    Ok(())
}

fn source(header: &[u8]) -> Result<Option<SocketAddr>, ProxyProtocolError> {
    let source = match HeaderResult::parse(header) {
        HeaderResult::V1(Ok(header)) => match header.addresses {
            v1::Addresses::Unknown => None,
            v1::Addresses::Tcp4(a) => Some((a.source_address, a.source_port).into()),
            v1::Addresses::Tcp6(a) => Some((a.source_address, a.source_port).into()),
        },
        HeaderResult::V2(Ok(header)) => match (header.command, header.addresses) {
            (v2::Command::Local, _) | (_, v2::Addresses::Unspecified) => None,
            (_, v2::Addresses::IPv4(a)) => Some((a.source_address, a.source_port).into()),
            (_, v2::Addresses::IPv6(a)) => Some((a.source_address, a.source_port).into()),
            (_, v2::Addresses::Unix(_)) => {
                return Err(ProxyProtocolError::Header("contains a Unix socket; expected TCP".into()));
            }
        },
        HeaderResult::V1(Err(error)) => return Err(ProxyProtocolError::Header(error.to_string())),
        HeaderResult::V2(Err(error)) => return Err(ProxyProtocolError::Header(error.to_string())),
    };
    Ok(source.map(|at: SocketAddr| SocketAddr::new(canonical_ip(at.ip()), at.port())))
}

/// Maximum length of a v2 header after its first part, in bytes: addresses, and TLS data that balancers add.
const MAX_HEADER: usize = 4096;

/// Maximum length of a v1 header in bytes, as the protocol defines it.
const MAX_LINE: usize = 107;

#[cfg(test)]
mod tests {
    use std::fs::File;

    use tunnel_base::metrics::Metrics;

    use super::*;

    #[tokio::test]
    async fn connections_are_limited_to_a_quarter_of_the_files_once_files_are_scarce() {
        let (socket, metrics) = (File::open("/dev/null").unwrap(), Metrics::edge());
        let number = u64::try_from(std::os::fd::AsRawFd::as_raw_fd(&socket)).unwrap();
        let waiting = |max_files, count| {
            let limiter = FairLimiter::new(Limits::permits(1000));
            let acceptor = Acceptor {
                handler: Arc::new(()),
                closing: limiter.clone(),
                limiter,
                refused: metrics.links_rejected.clone(),
                refusals: metrics.refusals.clone(),
                max_files,
                for_operators: false,
                drain: Drain::new(),
            };
            let who = Source::of("192.0.2.1".parse().unwrap());
            let enter = |_| acceptor.limiter.try_acquire_below(&who, acceptor.max_permits(&socket)).unwrap();
            let permits: Vec<Permit> = (0..count).map(enter).collect();
            permits.iter().filter(|permit| !permit.revoked().is_cancelled()).count()
        };
        assert_eq!(waiting(100 * (number + 1), 50), 50);
        assert_eq!(waiting(4 * number, 50), 50, "at most a quarter of all files");
        let most = usize::try_from(number / 4).unwrap().max(1);
        assert_eq!(waiting(number, most + 50), most);
    }
}

#[cfg(test)]
mod proxy_protocol_tests {
    use proptest::prelude::*;
    use tokio::io::{AsyncReadExt, AsyncWriteExt};
    use tokio::net::TcpListener;

    use super::*;

    #[tokio::test]
    async fn a_written_proxy_header_is_read_back_with_its_source() {
        for (from, to) in [
            ("192.0.2.7:1234", "10.0.0.1:443"),
            ("[2001:db8::7]:1234", "[2001:db8::1]:443"),
            ("192.0.2.7:1234", "[2001:db8::1]:443"),
            ("[2001:db8::7]:1234", "10.0.0.1:443"),
        ] {
            let from: SocketAddr = from.parse().unwrap();
            let written = header(from, to.parse().unwrap());
            let (read, left) = reads(&[&written, &b"rest"[..]].concat(), 1000).await;
            assert_eq!((read.unwrap(), left), (Some(from), b"rest".to_vec()), "{to}");
        }
    }

    /// Returns the result of reading these bytes, sent in pieces, and the bytes left after it.
    async fn reads(bytes: &[u8], piece: usize) -> (Result<Option<SocketAddr>, ProxyProtocolError>, Vec<u8>) {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let mut far = TcpStream::connect(listener.local_addr().unwrap()).await.unwrap();
        far.set_nodelay(true).unwrap();
        let (mut near, _) = listener.accept().await.unwrap();
        let send = async {
            for piece in bytes.chunks(piece) {
                far.write_all(piece).await.unwrap();
                tokio::task::yield_now().await;
            }
            far.shutdown().await.unwrap();
        };
        let read = async {
            let read = read(&near).await;
            let mut rest = Vec::new();
            near.read_to_end(&mut rest).await.unwrap();
            (read, rest)
        };
        tokio::join!(send, read).1
    }

    fn v2_header(command: v2::Command, addresses: v2::Addresses) -> Vec<u8> {
        v2::Builder::with_addresses(v2::Version::Two | command, v2::Protocol::Stream, addresses)
            .build()
            .unwrap()
    }

    #[tokio::test]
    async fn the_source_is_read_and_no_byte_after_the_header() {
        let four = v2::Addresses::IPv4(v2::IPv4::new([203, 0, 113, 7], [10, 0, 0, 1], 4000, 22));
        let mapped = "::ffff:203.0.113.7".parse::<std::net::Ipv6Addr>().unwrap();
        let six = v2::Addresses::IPv6(v2::IPv6::new(mapped, mapped, 4000, 22));
        let from = Some("203.0.113.7:4000".parse().unwrap());
        for (header, from) in [
            (b"PROXY TCP4 203.0.113.7 10.0.0.1 4000 22\r\n".to_vec(), from),
            (b"PROXY TCP6 ::ffff:203.0.113.7 fd00::1 4000 22\r\n".to_vec(), from),
            (b"PROXY UNKNOWN\r\n".to_vec(), None),
            (b"PROXY UNKNOWN ffff:f...f:ffff 1\r\n".to_vec(), None),
            (v2_header(v2::Command::Proxy, four), from),
            (v2_header(v2::Command::Proxy, six), from),
            (v2_header(v2::Command::Local, four), None),
            (v2_header(v2::Command::Proxy, v2::Addresses::Unspecified), None),
        ] {
            for piece in [1, 5, 1000] {
                let (read, rest) = reads(&[header.as_slice(), b"\r\nCONNECT"].concat(), piece).await;
                assert_eq!((read.unwrap(), rest.as_slice()), (from, &b"\r\nCONNECT"[..]), "{header:?}");
            }
        }
    }

    #[tokio::test]
    async fn an_invalid_proxy_header_is_refused() {
        let mut long = v2_header(v2::Command::Local, v2::Addresses::Unspecified);
        long[14..16].copy_from_slice(&u16::MAX.to_be_bytes());
        long.resize(70_000, 0);
        for bad in [
            &b"CONNECT node1:22 HTTP/1.1\r\n\r\n"[..],
            b"PROXY TCP4 203.0.113.7 10.0.0.1 4000\r\n",
            b"PROXY TCP4 edge1 10.0.0.1 4000 22\r\n",
            b"PROXY TCP4 203.0.113.7 10.0.0.1 4000 22",
            b"",
            b"PROXY ",
            b"\r\n\r\n\0\r\nQUIT\n\x31\x11\0\0",
            &[b"PROXY ".as_slice(), &[b'x'; 1000]].concat(),
            &long,
        ] {
            assert!(reads(bad, 1 << 20).await.0.is_err(), "{bad:?}");
        }
    }

    proptest! {
        #[test]
        fn parsing_never_panics(bytes in proptest::collection::vec(any::<u8>(), 0..200), v2: bool) {
            let prefix = if v2 { v2::PROTOCOL_PREFIX } else { b"PROXY " };
            let _ = (source(&bytes), source(&[prefix, &bytes].concat()));
        }
    }
}
