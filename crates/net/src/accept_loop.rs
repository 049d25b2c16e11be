//! The accept loop, the same for every front end: it accepts, reads a balancer's header, finds a slot, and hands the
//! connection on or rejects it.
//!
//! A front end implements [`ConnectionHandler`] and calls [`AcceptLoop::run`]; slots, sources, balancers and the lack of
//! files are not its concern. A connection holds a slot until [`Accepted::slot`] is dropped, which the handler does
//! once the client has proved who it is.

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
use crate::limiter::{AcquireError, FairLimiter, Limits, Permit, Source};
use crate::listen::{Accept, TcpAccept};
use crate::socket::Connection;
use tunnel_base::access_log::RefusalLogLimiter;
use tunnel_base::drain::Drain;
use tunnel_base::metrics::CauseCounter;
use tunnel_base::policy::{Networks, plain};

/// A listening socket with its limits and counters.
#[derive(Debug)]
pub struct AcceptLoop<L = TcpAccept> {
    /// The listening socket.
    pub listener: L,
    /// Slots for connections that have not proved anything yet.
    pub door: FairLimiter,
    /// Networks of balancers: TCP connections from there begin with a PROXY header.
    pub proxies: Networks,
    /// Counts rejected connections, by cause.
    pub refused: CauseCounter,
    /// Limits the log lines about them.
    pub refusals: RefusalLogLimiter,
}

/// An accepted connection.
#[derive(Debug)]
pub struct Accepted<S = TcpStream> {
    /// Its stream.
    pub socket: S,
    /// The client's address: from the balancer's header if there is one, else the socket's. IPv4 is never in IPv6 form.
    pub from: SocketAddr,
    /// Its slot. When that is lost, the handler's future is dropped where it stands.
    pub slot: Permit,
}

/// Why a connection is rejected before it is served.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Rejection {
    /// [`ConnectionHandler::admits`] returned false.
    Forbidden,
    /// All slots are taken, and no holder has to give way.
    Full,
    /// So few file descriptors are left that they are kept for running connections.
    OpenFiles,
}

/// Serves the connections that an [`AcceptLoop`] accepts.
pub trait ConnectionHandler<S = TcpStream>: Send + Sync + 'static {
    /// The span of the connection's log lines.
    fn span(&self, from: SocketAddr) -> Span;

    /// Whether a connection from this address is accepted. Called before it gets a slot.
    fn admits(&self, _from: SocketAddr) -> bool {
        true
    }

    /// A few bytes in the front end's protocol that are sent before a rejected connection is closed; by default none.
    /// Called once for each, so it may count and log.
    fn rejection_bytes(&self, _from: SocketAddr, _why: Rejection) -> Bytes {
        Bytes::new()
    }

    /// Serves a connection until it ends.
    fn serve(self: Arc<Self>, connection: Accepted<S>) -> impl Future<Output = ()> + Send;
}

impl Rejection {
    /// A fixed label for metrics.
    pub fn name(self) -> &'static str {
        match self {
            Self::Forbidden => "forbidden",
            Self::Full => "too_many",
            Self::OpenFiles => "open_files",
        }
    }
}

impl<L: Accept> AcceptLoop<L> {
    /// Accepts connections until draining begins. Each is served in a task of its own, for which the drain waits.
    pub async fn run<H: ConnectionHandler<L::AnyStream>>(self, handler: Arc<H>, drain: Drain) {
        let Self { listener, door, proxies, refused, refusals } = self;
        let leaving = FairLimiter::new(Limits::slots(fd_limit::at_most(LEAVING, 16)));
        let limit = fd_limit::limit();
        let dispatcher =
            Dispatcher { handler, door, refused, refusals, leaving, limit, drain: drain.clone() };
        let mut warned: Option<Instant> = None;
        loop {
            let (socket, peer) = tokio::select! {
                biased;
                () = drain.draining() => return,
                accepted = listener.accept() => accepted,
            };
            let from = SocketAddr::new(plain(peer.ip()), peer.port());
            if fd_limit::is_in_reserve(&socket, limit) {
                if warned.is_none_or(|at| at.elapsed() >= WARN_INTERVAL) {
                    warned = Some(Instant::now());
                    warn!(at = %listener.at(), limit, "new connections are refused, nearly all files are in use: raise the \
                           limit of open files (ulimit -Hn, LimitNOFILE)");
                }
                dispatcher.reject(socket, from, Rejection::OpenFiles);
            } else if proxies.contains(from.ip()) {
                dispatcher.read_proxy_header(socket, from);
            } else {
                dispatcher.dispatch(socket, from);
            }
        }
    }
}

/// What the tasks of an entrance share.
#[derive(Debug)]
struct Dispatcher<H> {
    handler: Arc<H>,
    door: FairLimiter,
    refused: CauseCounter,
    refusals: RefusalLogLimiter,
    /// Slots for rejected connections that have been sent bytes and are not closed yet.
    leaving: FairLimiter,
    /// Files that this process may have open.
    limit: u64,
    drain: Drain,
}

impl<H> Dispatcher<H> {
    fn dispatch<S>(&self, socket: S, from: SocketAddr)
    where
        H: ConnectionHandler<S>,
        S: Connection + AsFd + 'static,
    {
        if !self.handler.admits(from) {
            return self.reject(socket, from, Rejection::Forbidden);
        }
        let Ok(slot) = self.enter(&socket, from) else {
            return self.reject(socket, from, Rejection::Full);
        };
        let lost = slot.revoked();
        // Boxed, so that the future is held once.
        let serving = Box::pin(Arc::clone(&self.handler).serve(Accepted { socket, from, slot }));
        let refused = self.refused.clone();
        self.drain.spawn(self.handler.span(from), async move {
            tokio::select! {
                biased;
                () = lost.cancelled() => {
                    refused.count("gave_way");
                    debug!("gave its slot to another source");
                }
                () = serving => {}
            }
        });
    }

    /// While files are plenty, connections may wait in as many slots as there are; once they are scarce, newcomers take the
    /// slots of those who hold more than a quarter of all files.
    fn enter(&self, socket: &impl AsFd, from: SocketAddr) -> Result<Permit, AcquireError> {
        let scarce = fd_limit::are_scarce(socket, self.limit);
        let most =
            if scarce { usize::try_from(self.limit / 4).unwrap_or(usize::MAX).max(1) } else { usize::MAX };
        self.door.try_acquire_below(&Source::of(from.ip()), most)
    }

    /// Reads a balancer's header, then dispatches the client that it names. Until then the balancer holds the slot.
    fn read_proxy_header<S>(&self, socket: S, balancer: SocketAddr)
    where
        H: ConnectionHandler<S>,
        S: Connection + AsFd + 'static,
    {
        let Ok(slot) = self.enter(&socket, balancer) else {
            return self.reject(socket, balancer, Rejection::Full);
        };
        let (dispatcher, span) = (self.clone(), info_span!("proxied", %balancer));
        let inner = span.clone();
        self.drain.spawn(Span::none(), async move {
            let lost = slot.revoked();
            let read = timeout(HEADER_TIME, proxied_client(socket.tcp())).instrument(inner.clone());
            let read = tokio::select! {
                biased;
                () = lost.cancelled() => return dispatcher.refused.count("gave_way"),
                read = read => read,
            };
            drop(slot);
            let why = match read {
                Ok(Ok(from)) => return dispatcher.dispatch(socket, from.unwrap_or(balancer)),
                Ok(Err(error)) => error.to_string(),
                Err(_) => format!("no PROXY header within {HEADER_TIME:?}"),
            };
            dispatcher.refused.count("proxy_header");
            if dispatcher.refusals.may_log("proxy_header", balancer.ip()) {
                inner.in_scope(|| {
                    warn!("closed: {why}; connections from a network in proxy_protocol must begin with one")
                });
            }
        });
    }

    /// Sends the rejection without waiting, and closes so that its bytes arrive.
    fn reject<S>(&self, mut socket: S, from: SocketAddr, why: Rejection)
    where
        H: ConnectionHandler<S>,
        S: Connection + AsFd + 'static,
    {
        self.refused.count(why.name());
        let told = self.handler.rejection_bytes(from, why);
        // Sent by a system call, as the runtime would first have to learn that a new socket is writable.
        let raw = SockRef::from(&socket);
        if told.is_empty() || !matches!(raw.send(&told), Ok(n) if n == told.len()) {
            return;
        }
        let _ = raw.shutdown(std::net::Shutdown::Write);
        // If the socket were closed with bytes unread, the system would reset the connection, and the far end might not
        // read the rejection.
        let Ok(slot) = self.leaving.try_acquire(&Source::of(from.ip())) else { return };
        let lost = slot.revoked();
        self.drain.spawn(Span::none(), async move {
            tokio::select! {
                () = lost.cancelled() => {}
                _ = timeout(LEAVE_TIME, discard(&mut socket)) => {}
            }
            drop(slot);
        });
    }
}

impl<H> Clone for Dispatcher<H> {
    fn clone(&self) -> Self {
        Self {
            handler: Arc::clone(&self.handler),
            door: self.door.clone(),
            refused: self.refused.clone(),
            refusals: self.refusals.clone(),
            leaving: self.leaving.clone(),
            limit: self.limit,
            drain: self.drain.clone(),
        }
    }
}

/// The client in a balancer's header; `None` if the header names none, or the stream is not TCP.
async fn proxied_client(socket: Option<&TcpStream>) -> Result<Option<SocketAddr>, ProxyProtocolError> {
    match socket {
        Some(socket) => read(socket).await,
        None => Ok(None),
    }
}

/// Reads and discards until the far end finishes or has sent more than a request.
async fn discard<S: AsyncRead + Unpin>(socket: &mut S) {
    let (mut discarded, mut space) = (0, [0; 1024]);
    while discarded < MAX_DISCARDED {
        match socket.read(&mut space).await {
            Ok(n) if n > 0 => discarded += n,
            _ => return,
        }
    }
}

/// Time for a balancer's header, which comes first and at once.
const HEADER_TIME: Duration = Duration::from_secs(3);

/// Rejected connections at once that wait for their close.
const LEAVING: usize = 256;

/// Time for a rejected client to close.
const LEAVE_TIME: Duration = Duration::from_secs(1);

/// Bytes at most that are discarded from a rejected client.
const MAX_DISCARDED: usize = 64 * 1024;

/// Between two warnings that files run out.
const WARN_INTERVAL: Duration = Duration::from_secs(10);

// The PROXY protocol, v1 and v2: the client's address on a connection that a balancer passed on.

/// Why a balancer's connection is closed.
#[derive(Debug, thiserror::Error)]
pub enum ProxyProtocolError {
    /// The connection ended or broke before its header was complete.
    #[error("the connection ended before its PROXY header: {0}")]
    Io(#[from] io::Error),
    /// The first bytes are not a header.
    #[error("no PROXY header, v1 or v2: {0}")]
    Header(String),
}

/// Reads a connection's header, and not a byte more. Returns the client that it names, or `None` if the balancer
/// connects on its own behalf, as for a health check.
///
/// # Errors
///
/// The header is missing or malformed. Not cancel safe.
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

/// The header (v2) of a connection that we pass on: from whom it comes, and at which of our addresses it came in.
pub fn header(from: SocketAddr, to: SocketAddr) -> Bytes {
    let mapped = |at: SocketAddr| match at.ip() {
        IpAddr::V4(ip) => SocketAddr::new(ip.to_ipv6_mapped().into(), at.port()),
        IpAddr::V6(_) => at,
    };
    // Both are written in one family. They differ if a balancer uses another one with us than with its client.
    let pair = if from.is_ipv4() == to.is_ipv4() { (from, to) } else { (mapped(from), mapped(to)) };
    let header =
        v2::Builder::with_addresses(v2::Version::Two | v2::Command::Proxy, v2::Protocol::Stream, pair);
    // Only what is too long for the length's field fails.
    header.build().unwrap_or_default().into()
}

/// Reads the rest of a v2 header, whose length stands in its first part.
async fn binary(socket: &TcpStream, header: &mut Vec<u8>) -> Result<(), ProxyProtocolError> {
    let mut rest = [0; 4];
    fill(socket, &mut rest).await?;
    header.extend_from_slice(&rest);
    let length = usize::from(u16::from_be_bytes([rest[2], rest[3]]));
    if length > LONGEST {
        return Err(ProxyProtocolError::Header(format!("it is {length} bytes long, {LONGEST} are read")));
    }
    let read = header.len();
    header.resize(read + length, 0);
    fill(socket, &mut header[read..]).await?;
    Ok(())
}

/// Reads the rest of a v1 header, which is a line. The bytes behind it are the client's, so it peeks before it reads.
async fn text(socket: &TcpStream, header: &mut Vec<u8>) -> Result<(), ProxyProtocolError> {
    let mut ahead = [0; MAX_LINE];
    while !header.ends_with(b"\r\n") {
        let room = MAX_LINE.saturating_sub(header.len());
        if room == 0 {
            return Err(ProxyProtocolError::Header("its line does not end".into()));
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
                return Err(ProxyProtocolError::Header("it names a Unix socket, want TCP".into()));
            }
        },
        HeaderResult::V1(Err(error)) => return Err(ProxyProtocolError::Header(error.to_string())),
        HeaderResult::V2(Err(error)) => return Err(ProxyProtocolError::Header(error.to_string())),
    };
    Ok(source.map(|at: SocketAddr| SocketAddr::new(plain(at.ip()), at.port())))
}

/// Longest v2 header behind its first part, in bytes: addresses, and room for what balancers add about TLS.
const LONGEST: usize = 4096;

/// Longest v1 header in bytes, as the protocol has it.
const MAX_LINE: usize = 107;

#[cfg(test)]
mod tests {
    use std::fs::File;

    use crate::limiter::Limits;
    use tunnel_base::metrics::Metrics;

    use super::*;

    #[tokio::test]
    async fn a_crowd_may_wait_while_files_are_plenty_and_gives_way_once_they_are_scarce() {
        let (socket, metrics) = (File::open("/dev/null").unwrap(), Metrics::edge());
        let number = u64::try_from(std::os::fd::AsRawFd::as_raw_fd(&socket)).unwrap();
        let waiting = |limit, count| {
            let door = FairLimiter::new(Limits::slots(1000));
            let dispatcher = Dispatcher {
                handler: Arc::new(()),
                leaving: door.clone(),
                door,
                refused: metrics.calls_refused.clone(),
                refusals: metrics.refusals.clone(),
                limit,
                drain: Drain::new(),
            };
            let from = "192.0.2.1:1".parse().unwrap();
            let slots: Vec<Permit> = (0..count).map(|_| dispatcher.enter(&socket, from).unwrap()).collect();
            slots.iter().filter(|slot| !slot.revoked().is_cancelled()).count()
        };
        assert_eq!(waiting(100 * (number + 1), 50), 50);
        assert_eq!(waiting(4 * number, 50), 50, "a quarter of all files and no more");
        let most = usize::try_from(number / 4).unwrap().max(1);
        assert_eq!(waiting(number, most + 50), most);
    }
}

#[cfg(test)]
mod proxied_tests {
    use proptest::prelude::*;
    use tokio::io::{AsyncReadExt, AsyncWriteExt};
    use tokio::net::TcpListener;

    use super::*;

    #[tokio::test]
    async fn a_header_that_we_write_tells_whose_connection_it_is() {
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

    /// What is read of these bytes, sent in pieces, and what is left of them.
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
    async fn the_source_is_read_and_nothing_behind_the_header() {
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
    async fn what_is_no_header_is_refused() {
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
        fn no_bytes_make_it_panic(bytes in proptest::collection::vec(any::<u8>(), 0..200), v2: bool) {
            let prefix = if v2 { v2::PROTOCOL_PREFIX } else { b"PROXY " };
            let _ = (source(&bytes), source(&[prefix, &bytes].concat()));
        }
    }
}
