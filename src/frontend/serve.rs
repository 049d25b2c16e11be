//! What all front ends share: who may come in, shares of places, the time for a head, the checks, opening a session,
//! carrying it, and what is counted and logged of it.
//!
//! A front end itself ([`FrontEnd`]) is a parser from a client's first bytes to an [`OpenRequest`], and an answer.

mod visit;

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use arc_swap::ArcSwap;
use bytes::Bytes;
use tokio::sync::oneshot;
use tokio::time::timeout;
use tracing::{Span, debug};

use super::auth::Gate;
use super::{ClientKey, Denial};
use crate::carry::{LocalPeer, Opened, carry};
use crate::drain::Drain;
use crate::net::door::{Door, Limits, Slot};
use crate::net::entrance::{Accepted, ConnectionHandler, Entrance, Rejection};
use crate::net::files;
use crate::net::listen::Accept;
use crate::net::pool::Pool;
use crate::net::socket::{Connection, Socket};
use crate::net::splice::linger;
use crate::policy::Networks;
use crate::protocol::Category;
use crate::route::Route;
use crate::telemetry::{Access, Metrics};

pub use visit::{Denied, OpenRequest, Permitted, Proof, Visit};

/// A front end: it reads what a client asks for from the stream `S` that was accepted, and answers.
pub trait FrontEnd<S>: Send + Sync + 'static {
    /// Its name in metrics and the access log.
    const NAME: &'static str;

    /// What the far end is told of who asks.
    const CATEGORY: Category;

    /// What a session's bytes come over once it is open: what was accepted, or what became of it (TLS).
    type Connection: Connection;

    /// What is logged about a client stands in this span; its fields `trace` and `session` are filled in once there are
    /// some.
    fn span(&self, from: SocketAddr) -> Span;

    /// What to tell one who is sent away before it has asked, in a few bytes.
    fn rejection_bytes(&self, denial: &Denial, trace: &str) -> Bytes;

    /// Reads a head, has [`Visit::open`] judge it and open what it asks for, and says what came of that; or serves all that
    /// a client asks for over this connection, by [`Visit::judge`].
    ///
    /// The future is dropped where it waits if it has called neither within [`HEAD_TIME`], if the client's slot is given to
    /// another source, or at the end of draining.
    fn handshake(
        &self,
        socket: S,
        visit: &mut Visit<'_>,
    ) -> impl Future<Output = Handshake<Self::Connection>> + Send;
}

/// What a front end serves with. All but the gate is shared by those of a process. Cheap to clone.
#[derive(Debug, Clone)]
pub struct FrontContext {
    /// Who may come in, and what for; swap it when the config changes, for whoever comes next.
    pub gate: Arc<ArcSwap<Gate>>,
    /// Sessions at once, of all front ends of this process together.
    pub sessions: Door<ClientKey>,
    /// Buffers to read clients with.
    pub pool: Pool,
    /// The way to the nodes.
    pub route: Route,
    /// The numbers.
    pub metrics: Metrics,
    /// Once it begins nobody is let in; it waits for those who are.
    pub drain: Drain,
}

/// A session that was opened for a client.
pub type Granted = Opened<Slot<ClientKey>>;

/// What came of a client's head; `C` is its connection.
#[derive(Debug)]
pub enum Handshake<C, T = Granted> {
    /// The client was told so, and what it sends and gets from now on is the session's.
    Opened {
        /// What was opened for it.
        session: T,
        /// Its connection; nothing wraps it any more.
        socket: C,
        /// What it sent behind its head without waiting for the answer.
        early: Bytes,
    },
    /// The client was served by the front end itself, and nothing is left to carry; the connection is to be closed with
    /// care, if it is still there.
    Served(Option<C>),
    /// The client was told why not. The connection is to be closed with care: it may still be sending.
    Denied(C),
    /// There was no head to answer, or nobody to take the answer.
    Failed {
        /// A fixed word for metrics.
        cause: &'static str,
        /// To be closed with care as well: the client may have been told something.
        socket: Option<C>,
    },
}

/// Serves clients until draining begins; those that are connected by then are the drain's to wait for. What comes from
/// a network of `proxies` begins with a PROXY header.
pub async fn serve<L, F>(front_end: F, (listener, proxies): (L, Networks), context: FrontContext)
where
    L: Accept,
    F: FrontEnd<L::Stream>,
{
    let (refused, refusals) = (context.metrics.connections_refused.clone(), context.metrics.refusals.clone());
    let door = Door::new(Limits::slots(files::at_most(HEADS, 8)));
    let entrance = Entrance { listener, door, proxies, refused, refusals };
    let (drain, context) = (context.drain.clone(), Arc::new(context));
    entrance.run(Arc::new(Front { front_end, context }), drain).await;
}

struct Front<F> {
    front_end: F,
    context: Arc<FrontContext>,
}

impl<S, F> ConnectionHandler<S> for Front<F>
where
    S: Connection + 'static,
    F: FrontEnd<S>,
{
    fn span(&self, from: SocketAddr) -> Span {
        self.front_end.span(from)
    }

    fn admits(&self, from: SocketAddr) -> bool {
        self.context.gate.load().admit(from.ip()).is_ok()
    }

    fn rejection_bytes(&self, from: SocketAddr, why: Rejection) -> Bytes {
        let denial = match why {
            Rejection::Forbidden => match self.context.gate.load().admit(from.ip()) {
                Err(denial) => denial,
                Ok(()) => return Bytes::new(),
            },
            Rejection::Full => Denial::Busy("too many connections at once that have not asked for anything"),
            Rejection::Files => {
                Denial::Busy("this pod has no more files to open: raise its limit (ulimit -Hn, LimitNOFILE)")
            }
        };
        let metrics = &self.context.metrics;
        metrics.sessions.refused(F::NAME, denial.name());
        let mut access = Access::begin(F::NAME, from.to_string());
        access.trace = new_trace();
        access.status = Some(denial.status().as_u16());
        let told = self.front_end.rejection_bytes(&denial, &access.trace);
        access.refuse(denial.name(), &denial.to_string(), from.ip(), &metrics.refusals);
        told
    }

    async fn serve(self: Arc<Self>, accepted: Accepted<S>) {
        let Accepted { socket, from, slot } = accepted;
        let (asked, is_asked) = oneshot::channel();
        let mut visit = Visit::new::<S, F>(&self.context, from, slot, asked);
        let head = {
            // Boxed, so that a session does not keep the head's room.
            let handshake = Box::pin(self.front_end.handshake(socket, &mut visit));
            tokio::select! {
                biased;
                head = handshake => head,
                () = too_slow(is_asked) => Handshake::Failed { cause: "slow_head", socket: None },
            }
        };
        let socket = match head {
            Handshake::Opened { session, socket, early } => {
                let client = Socket::with_early(socket, self.context.pool.clone(), early);
                return carry(session, LocalPeer::Client, client, &self.context.metrics).await;
            }
            Handshake::Served(socket) => socket,
            Handshake::Denied(socket) => Some(socket),
            Handshake::Failed { cause, socket } => {
                debug!(cause, "no session");
                self.context.metrics.connections_refused.count(cause);
                socket
            }
        };
        if let Some(socket) = socket {
            // Closed with care, so that what it was told arrives; until then it keeps its slot.
            linger(&mut Socket::new(socket, self.context.pool.clone())).await;
        }
    }
}

/// A trace for a client that has none of its own.
pub fn new_trace() -> String {
    format!("{:08x}", rand::random::<u32>())
}

/// Completes if the head is not there in time.
async fn too_slow(asked: oneshot::Receiver<()>) {
    if timeout(HEAD_TIME, asked).await.is_ok() {
        std::future::pending().await
    }
}

/// How long a client may take to send its head: time enough for the worst line, too short to hold sockets with nothing.
pub const HEAD_TIME: Duration = Duration::from_secs(10);

/// Connections to one front end that have not yet asked for anything they may have, at most.
const HEADS: usize = 4096;

#[cfg(test)]
mod tests;
