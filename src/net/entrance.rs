//! The way in through a listening socket, the same for every front end: who comes, whether there is room for it, and
//! what it is told if not.
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

use super::door::{Door, Slot, Source};
use super::files;
use super::listen::{Accept, Listener};
use super::proxied::{self, ProxiedError};
use super::socket::Connection;
use crate::drain::Drain;
use crate::policy::{Networks, plain};
use crate::telemetry::{Causes, Refusals};

/// A listening socket, and who shares what lies behind it.
#[derive(Debug)]
pub struct Entrance<L = Listener> {
    /// Where they come in.
    pub listener: L,
    /// Slots of those who have come in and not yet proved anything.
    pub door: Door,
    /// Networks of balancers: what comes from there over TCP begins with a PROXY header.
    pub proxies: Networks,
    /// Counts those who were sent away.
    pub refused: Causes,
    /// Which of them have a line in the log.
    pub refusals: Refusals,
}

/// One who came in.
#[derive(Debug)]
pub struct Accepted<S = TcpStream> {
    /// Its connection.
    pub socket: S,
    /// Who it is: what a balancer says, or else where the connection comes from; IPv4 as such.
    pub from: SocketAddr,
    /// Its slot. If that is lost, the connection is dropped where it stands.
    pub slot: Slot,
}

/// Why somebody is sent away before it was served.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Rejection {
    /// [`ConnectionHandler::admits`] returned false.
    Forbidden,
    /// All slots are taken, and nobody has to give way.
    Full,
    /// So few files are left that those who are being served need them.
    Files,
}

/// A front end: what lies behind an entrance.
pub trait ConnectionHandler<S = TcpStream>: Send + Sync + 'static {
    /// What is logged about a connection stands in this span.
    fn span(&self, from: SocketAddr) -> Span;

    /// Whether a connection from there is let in at all. Called before it gets a slot.
    fn admits(&self, _from: SocketAddr) -> bool {
        true
    }

    /// What to tell one who is sent away, in its protocol and in a few bytes; nothing by default. Called for each, so
    /// it may count and log.
    fn rejection_bytes(&self, _from: SocketAddr, _why: Rejection) -> Bytes {
        Bytes::new()
    }

    /// Serves a connection until it goes.
    fn serve(self: Arc<Self>, connection: Accepted<S>) -> impl Future<Output = ()> + Send;
}

impl Rejection {
    /// A fixed word for metrics.
    pub fn name(self) -> &'static str {
        match self {
            Self::Forbidden => "forbidden",
            Self::Full => "too_many",
            Self::Files => "open_files",
        }
    }
}

impl<L: Accept> Entrance<L> {
    /// Lets connections in until draining begins; each is served in a task of its own, which is the drain's to wait for.
    pub async fn run<H: ConnectionHandler<L::Stream>>(self, handler: Arc<H>, drain: Drain) {
        let Self { listener, door, proxies, refused, refusals } = self;
        let leaving = Door::new(super::door::Limits::slots(files::at_most(LEAVING, 16)));
        let dispatcher = Dispatcher { handler, door, refused, refusals, leaving, drain: drain.clone() };
        let limit = files::limit();
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
                    warn!(at = %listener.at(), limit, "newcomers are refused, nearly all files are in use: raise the \
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

/// What is done with each who comes.
#[derive(Debug)]
struct Dispatcher<H> {
    handler: Arc<H>,
    door: Door,
    refused: Causes,
    refusals: Refusals,
    /// Slots of those who were told why they are sent away, and have not gone.
    leaving: Door,
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
        let Ok(slot) = self.door.try_enter(&Source::of(from.ip())) else {
            return self.reject(socket, from, Rejection::Full);
        };
        let lost = slot.lost();
        // Boxed, so that it is held once.
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

    /// Learns from a balancer for whom it speaks. Until then the slot is the balancer's.
    fn read_proxy_header<S>(&self, socket: S, balancer: SocketAddr)
    where
        H: ConnectionHandler<S>,
        S: Connection + AsFd + 'static,
    {
        let Ok(slot) = self.door.try_enter(&Source::of(balancer.ip())) else {
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
            if dispatcher.refusals.may_tell("proxy_header", balancer.ip()) {
                inner.in_scope(|| {
                    warn!("closed: {why}; who comes from a network in proxy_protocol must send one")
                });
            }
        });
    }

    /// Says why without waiting, and closes such that it is heard.
    fn reject<S>(&self, mut socket: S, from: SocketAddr, why: Rejection)
    where
        H: ConnectionHandler<S>,
        S: Connection + AsFd + 'static,
    {
        self.refused.count(why.name());
        let told = self.handler.rejection_bytes(from, why);
        // Not by the runtime, which would have to find out first whether a new socket can be written to.
        let raw = SockRef::from(&socket);
        if told.is_empty() || !matches!(raw.send(&told), Ok(n) if n == told.len()) {
            return;
        }
        let _ = raw.shutdown(std::net::Shutdown::Write);
        // Closed with bytes unread, or before they come, the system would break the connection off and the far end
        // might never see what it was told.
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
            drain: self.drain.clone(),
        }
    }
}

/// For whom a balancer speaks; for nobody else if no header can stand there.
async fn proxied_client(socket: Option<&TcpStream>) -> Result<Option<SocketAddr>, ProxiedError> {
    match socket {
        Some(socket) => proxied::read(socket).await,
        None => Ok(None),
    }
}

/// Passes over what comes, until the far end ends or has sent more than a request.
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

/// Who was sent away and told why, at once; the one who was told first goes first.
const LEAVING: usize = 256;

/// Time to take notice of that.
const LEAVE_TIME: Duration = Duration::from_secs(1);

/// Bytes of a request that are discarded.
const MAX_DISCARDED: usize = 64 * 1024;

/// Between two warnings that files run out.
const WARN_EVERY: Duration = Duration::from_secs(10);
