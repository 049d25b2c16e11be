//! The accept loop, the same for every front end: it accepts, reads a balancer's header, finds a slot, and hands the
//! connection on or rejects it.
//!
//! A front end implements [`ConnectionHandler`] and calls [`Entrance::run`]; slots, sources, balancers and the lack of
//! files are not its concern. A connection holds a slot until [`Accepted::slot`] is dropped, which the handler does
//! once the client has proved who it is.

use std::net::SocketAddr;
use std::os::fd::AsFd;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use socket2::SockRef;
use tokio::io::{AsyncRead, AsyncReadExt};
use tokio::net::TcpStream;
use tokio::time::{Instant, timeout};
use tracing::{Instrument, Span, debug, info_span, warn};

use super::door::{Door, NoSlot, Slot, Source};
use super::files;
use super::listen::{Accept, Listener};
use super::proxied::{self, ProxiedError};
use super::socket::Connection;
use crate::drain::Drain;
use crate::policy::{Networks, plain};
use crate::telemetry::{Causes, Refusals};

/// A listening socket with its limits and counters.
#[derive(Debug)]
pub struct Entrance<L = Listener> {
    /// The listening socket.
    pub listener: L,
    /// Slots for connections that have not proved anything yet.
    pub door: Door,
    /// Networks of balancers: TCP connections from there begin with a PROXY header.
    pub proxies: Networks,
    /// Counts rejected connections, by cause.
    pub refused: Causes,
    /// Limits the log lines about them.
    pub refusals: Refusals,
}

/// An accepted connection.
#[derive(Debug)]
pub struct Accepted<S = TcpStream> {
    /// Its stream.
    pub socket: S,
    /// The client's address: from the balancer's header if there is one, else the socket's. IPv4 is never in IPv6 form.
    pub from: SocketAddr,
    /// Its slot. When that is lost, the handler's future is dropped where it stands.
    pub slot: Slot,
}

/// Why a connection is rejected before it is served.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Rejection {
    /// [`ConnectionHandler::admits`] returned false.
    Forbidden,
    /// All slots are taken, and no holder has to give way.
    Full,
    /// So few file descriptors are left that they are kept for running connections.
    Files,
}

/// Serves the connections that an [`Entrance`] accepts.
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
            Self::Files => "open_files",
        }
    }
}

impl<L: Accept> Entrance<L> {
    /// Accepts connections until draining begins. Each is served in a task of its own, for which the drain waits.
    pub async fn run<H: ConnectionHandler<L::Stream>>(self, handler: Arc<H>, drain: Drain) {
        let Self { listener, door, proxies, refused, refusals } = self;
        let leaving = Door::new(super::door::Limits::slots(files::at_most(LEAVING, 16)));
        let limit = files::limit();
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
            if files::is_of_the_last(&socket, limit) {
                if warned.is_none_or(|at| at.elapsed() >= WARN_EVERY) {
                    warned = Some(Instant::now());
                    warn!(at = %listener.at(), limit, "new connections are refused, nearly all files are in use: raise the \
                           limit of open files (ulimit -Hn, LimitNOFILE)");
                }
                dispatcher.reject(socket, from, Rejection::Files);
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
    door: Door,
    refused: Causes,
    refusals: Refusals,
    /// Slots for rejected connections that have been sent bytes and are not closed yet.
    leaving: Door,
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
        let lost = slot.lost();
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
    fn enter(&self, socket: &impl AsFd, from: SocketAddr) -> Result<Slot, NoSlot> {
        let scarce = files::are_scarce(socket, self.limit);
        let most =
            if scarce { usize::try_from(self.limit / 4).unwrap_or(usize::MAX).max(1) } else { usize::MAX };
        self.door.try_enter_within(&Source::of(from.ip()), most)
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
            let lost = slot.lost();
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
        let Ok(slot) = self.leaving.try_enter(&Source::of(from.ip())) else { return };
        let lost = slot.lost();
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
async fn proxied_client(socket: Option<&TcpStream>) -> Result<Option<SocketAddr>, ProxiedError> {
    match socket {
        Some(socket) => proxied::read(socket).await,
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
const WARN_EVERY: Duration = Duration::from_secs(10);

#[cfg(test)]
mod tests {
    use std::fs::File;

    use super::*;
    use crate::net::door::Limits;
    use crate::telemetry::Metrics;

    #[tokio::test]
    async fn a_crowd_may_wait_while_files_are_plenty_and_gives_way_once_they_are_scarce() {
        let (socket, metrics) = (File::open("/dev/null").unwrap(), Metrics::edge());
        let number = u64::try_from(std::os::fd::AsRawFd::as_raw_fd(&socket)).unwrap();
        let waiting = |limit, count| {
            let door = Door::new(Limits::slots(1000));
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
            let slots: Vec<Slot> = (0..count).map(|_| dispatcher.enter(&socket, from).unwrap()).collect();
            slots.iter().filter(|slot| !slot.lost().is_cancelled()).count()
        };
        assert_eq!(waiting(100 * (number + 1), 50), 50);
        assert_eq!(waiting(4 * number, 50), 50, "a quarter of all files and no more");
        let most = usize::try_from(number / 4).unwrap().max(1);
        assert_eq!(waiting(number, most + 50), most);
    }
}
