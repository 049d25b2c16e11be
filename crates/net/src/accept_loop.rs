//! The accept loop of every listener: accepts, reads a balancer's header, acquires a permit, and passes the connection
//! on or rejects it.
//!
//! A listener implements [`ConnectionHandler`] and calls [`run`]. The loop deals with permits, sources,
//! balancers and the lack of file descriptors. A connection holds a permit until [`Accepted::permit`] is dropped, which
//! the handler does once the client is authenticated.

use std::net::SocketAddr;
use std::os::fd::AsFd;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use socket2::SockRef;
use tokio::io::{AsyncRead, AsyncReadExt};
use tokio::net::TcpStream;
use tokio::task::yield_now;
use tokio::time::timeout;
use tracing::{Instrument, Span, debug, info_span, warn};

use crate::fd_limit;
use crate::limiter::{FairLimiter, Permit, PermitLimits, Source};
use crate::listen::Accept;
use crate::proxy_protocol::{ProxyProtocolError, read};
use crate::socket::Connection;
use tunnel_base::drain::Drain;
use tunnel_base::limited;
use tunnel_base::metrics::{Door, Metrics};
use tunnel_base::policy::{Networks, canonical_ip};

/// The limits of a listener, and what counts and logs the connections that it rejects.
#[derive(Debug)]
pub struct AcceptSettings {
    /// Limiter of connections that are not authenticated yet. Ports may share it.
    pub limiter: FairLimiter,
    /// Networks of balancers. TCP connections from there begin with a PROXY header.
    pub proxies: Networks,
    /// The metrics that count rejected connections and limit the lines about them.
    pub metrics: Metrics,
    /// Where these count them.
    pub door: Door,
    /// Whether this is a port for operators and probes, which may use some of the reserved file descriptors.
    pub for_operators: bool,
}

impl AcceptSettings {
    fn count(&self, reason: &'static str) {
        self.metrics.count_refusal(self.door, reason);
    }
}

/// An accepted connection with its permit, as [`run`] passes it to the handler.
#[derive(Debug)]
pub struct Accepted<S = TcpStream> {
    /// The stream.
    pub socket: S,
    /// The client's address, from the balancer's header if there is one, otherwise the socket's. Never IPv4-mapped.
    pub from: SocketAddr,
    /// The permit. If it is revoked, the handler's future is polled once more, and then dropped. A client whose bytes it
    /// has read should get an answer in that poll.
    pub permit: Permit,
}

/// The reason for rejecting a connection before it is served.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ConnectionRejection {
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
    fn admits(&self, _from: SocketAddr) -> Result<(), ConnectionRejection> {
        Ok(())
    }

    /// Returns a few bytes in the listener's protocol to send before a rejected connection is closed; none by default.
    ///
    /// Called once per rejected connection, so it may count and log.
    fn rejection_bytes(&self, _from: SocketAddr, _why: ConnectionRejection) -> Bytes {
        Bytes::new()
    }

    /// Serves a connection until it ends.
    fn handle(self: Arc<Self>, connection: Accepted<S>) -> impl Future<Output = ()> + Send;
}

impl ConnectionRejection {
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
pub async fn run<L, H>(listener: L, limits: AcceptSettings, handler: H, drain: Drain)
where
    L: Accept,
    H: ConnectionHandler<L::AnyStream>,
{
    let max_files = fd_limit::limit();
    let acceptor = Arc::new(AcceptLoopState {
        handler: Arc::new(handler),
        closing: FairLimiter::new(PermitLimits::permits(fd_limit::at_most(MAX_CLOSING, 16))),
        limits,
        max_files,
        drain,
    });
    while let Some((socket, peer)) = acceptor.drain.run_until(listener.accept()).await {
        // A socket for both families has mapped addresses for IPv4 clients, which rules for IPv4 would not match.
        let from = SocketAddr::new(canonical_ip(peer.ip()), peer.port());
        // The reserve is checked first, before a connection costs a permit or a task: its files are for operators and
        // for the process itself.
        if !acceptor.limits.for_operators && fd_limit::is_in_reserve(&socket, max_files) {
            limited!(
                acceptor.limits.metrics.refusals.may_log_once("file_limit", listener.at()) => warn,
                local_addr = %listener.at(),
                limit = max_files,
                hint = "raise the limit of open files (ulimit -Hn, LimitNOFILE)",
                "refusing connections, nearly all files are in use"
            );
            acceptor.reject(socket, from, ConnectionRejection::OpenFiles);
        } else if acceptor.limits.proxies.contains(from.ip()) {
            Arc::clone(&acceptor).read_proxy_header(socket, from);
        } else {
            acceptor.admit(socket, from);
        }
        // Accepting is faster than serving, and a task that has lost its permit holds memory until it runs.
        if acceptor.limits.limiter.has_revoked() || acceptor.closing.has_revoked() {
            yield_now().await;
        }
    }
}

/// The state that the loop of a listener shares with the tasks of its connections.
#[derive(Debug)]
struct AcceptLoopState<H> {
    handler: Arc<H>,
    limits: AcceptSettings,
    /// Permits for rejected connections that were sent bytes and are not closed yet.
    closing: FairLimiter,
    /// Maximum number of open files of this process.
    max_files: u64,
    drain: Drain,
}

impl<H> AcceptLoopState<H> {
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
        let Ok(permit) = self.limits.limiter.try_acquire_below(&Source::of(from.ip()), most) else {
            return self.reject(socket, from, ConnectionRejection::Full);
        };
        let lost = permit.revoked();
        // Boxed, so that the future is not stored a second time in the task.
        let serving = Box::pin(Arc::clone(&self.handler).handle(Accepted { socket, from, permit }));
        let metrics = self.limits.metrics.clone();
        let door = self.limits.door;
        self.drain.spawn(self.handler.span(from), async move {
            tokio::select! {
                biased;
                () = serving => {}
                () = lost.cancelled() => {
                    metrics.count_refusal(door, "evicted");
                    debug!("permit revoked for another connection");
                }
            }
        });
    }

    /// Returns how many permits may be held. While files are scarce, that is a quarter of all files: newcomers then
    /// take permits of the sources with most. Operators may have some in the reserve.
    fn max_permits(&self, newcomer: &impl AsFd) -> usize {
        if self.limits.for_operators && fd_limit::is_in_reserve(newcomer, self.max_files) {
            return fd_limit::operator_connections(self.max_files);
        }
        if !fd_limit::are_scarce(newcomer, self.max_files) {
            return usize::MAX;
        }
        usize::try_from(self.max_files / 4).unwrap_or(usize::MAX).max(1)
    }

    /// Reads a balancer's header, then admits the client that it names. Until then the balancer holds the permit.
    fn read_proxy_header<S>(self: Arc<Self>, mut socket: S, balancer: SocketAddr)
    where
        H: ConnectionHandler<S>,
        S: Connection + AsFd + 'static,
    {
        let most = self.max_permits(&socket);
        let Ok(permit) = self.limits.limiter.try_acquire_below(&Source::of(balancer.ip()), most) else {
            return self.reject(socket, balancer, ConnectionRejection::Full);
        };
        let span = info_span!("proxy_protocol", %balancer);
        self.drain.clone().spawn(Span::none(), async move {
            let lost = permit.revoked();
            let read = timeout(HEADER_TIMEOUT, proxied_client(&mut socket)).instrument(span.clone());
            let Some(read) = lost.run_until_cancelled(read).await else {
                return self.limits.count("evicted");
            };
            // Given back first: the client that the header names needs a permit of its own, and one connection must not
            // take two.
            drop(permit);
            let why = match read {
                Ok(Ok(from)) => return self.admit(socket, from.unwrap_or(balancer)),
                Ok(Err(ProxyProtocolError::Closed)) => return self.limits.count("gone"),
                Ok(Err(error)) => error.to_string(),
                Err(_) => format!("no PROXY header within {HEADER_TIMEOUT:?}"),
            };
            let AcceptSettings { metrics, door, .. } = &self.limits;
            if metrics.refuse(*door, "proxy_header", balancer.ip()) {
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
    fn reject<S>(&self, mut socket: S, from: SocketAddr, why: ConnectionRejection)
    where
        H: ConnectionHandler<S>,
        S: Connection + AsFd + 'static,
    {
        self.limits.count(why.name());
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
            lost.run_until_cancelled(timeout(CLOSE_TIMEOUT, discard(&mut socket))).await;
            drop(permit);
        });
    }
}

/// Returns the client in a balancer's header, or `None` if the header names none or the stream is not TCP.
async fn proxied_client(socket: &mut impl Connection) -> Result<Option<SocketAddr>, ProxyProtocolError> {
    if socket.tcp().is_some() { read(socket).await } else { Ok(None) }
}

/// Reads and discards until the remote end finishes or has sent [`MAX_DISCARDED`] bytes.
async fn discard<S: AsyncRead + Unpin>(socket: &mut S) {
    let mut discarded = 0;
    let mut space = [0; 1024];
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

#[cfg(test)]
mod tests {
    use std::fmt;
    use std::fs::File;
    use std::future::pending;
    use std::sync::atomic::{AtomicUsize, Ordering};

    use tokio::net::UnixStream;
    use tunnel_base::metrics::Metrics;

    use super::*;

    /// A listener with [`CROWD`] connections at once. Then it starts draining.
    #[derive(Default)]
    struct Crowd {
        accepted: AtomicUsize,
        most_tasks: Arc<AtomicUsize>,
        drain: Drain,
    }

    impl Accept for Crowd {
        type AnyStream = UnixStream;

        fn at(&self) -> impl fmt::Display {
            "crowd"
        }

        async fn accept(&self) -> (UnixStream, SocketAddr) {
            self.most_tasks.fetch_max(self.drain.tasks(), Ordering::Relaxed);
            if self.accepted.fetch_add(1, Ordering::Relaxed) == CROWD {
                self.drain.start();
                pending::<()>().await;
            }
            (UnixStream::pair().unwrap().0, ([192, 0, 2, 1], 1).into())
        }
    }

    /// A handler that serves a connection until it loses its permit.
    struct Silent;

    impl ConnectionHandler<UnixStream> for Silent {
        fn span(&self, _: SocketAddr) -> Span {
            Span::none()
        }

        async fn handle(self: Arc<Self>, accepted: Accepted<UnixStream>) {
            pending::<()>().await;
            drop(accepted);
        }
    }

    #[tokio::test]
    async fn a_connection_that_lost_its_permit_ends_before_more_are_accepted() {
        let crowd = Crowd::default();
        let drain = crowd.drain.clone();
        let most_tasks = Arc::clone(&crowd.most_tasks);
        let limits = AcceptSettings {
            limiter: FairLimiter::new(PermitLimits::permits(PERMITS)),
            proxies: Networks::default(),
            metrics: Metrics::edge(),
            door: Door::Connections,
            for_operators: false,
        };
        run(crowd, limits, Silent, drain).await;
        let most_tasks = most_tasks.load(Ordering::Relaxed);
        assert!(most_tasks <= PERMITS + 1, "{most_tasks} tasks for {PERMITS} permits");
    }

    const CROWD: usize = 300;
    const PERMITS: usize = 8;

    #[tokio::test]
    async fn connections_are_limited_to_a_quarter_of_the_files_once_files_are_scarce() {
        let (socket, metrics) = (File::open("/dev/null").unwrap(), Metrics::edge());
        let number = u64::try_from(std::os::fd::AsRawFd::as_raw_fd(&socket)).unwrap();
        let waiting = |max_files, count| {
            let limiter = FairLimiter::new(PermitLimits::permits(1000));
            let acceptor = AcceptLoopState {
                handler: Arc::new(()),
                closing: limiter.clone(),
                limits: AcceptSettings {
                    limiter,
                    proxies: Networks::default(),
                    metrics: metrics.clone(),
                    door: Door::Links,
                    for_operators: false,
                },
                max_files,
                drain: Drain::new(),
            };
            let who = Source::of("192.0.2.1".parse().unwrap());
            let most = acceptor.max_permits(&socket);
            let enter = |_| acceptor.limits.limiter.try_acquire_below(&who, most).unwrap();
            let permits: Vec<Permit> = (0..count).map(enter).collect();
            permits.iter().filter(|permit| !permit.revoked().is_cancelled()).count()
        };
        assert_eq!(waiting(100 * (number + 1), 50), 50);
        assert_eq!(waiting(4 * number, 50), 50, "at most a quarter of all files");
        let most = usize::try_from(number / 4).unwrap().max(1);
        assert_eq!(waiting(number, most + 50), most);
    }
}
