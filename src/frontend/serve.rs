//! What all front ends share: access checks, shares of slots, the time for a head, opening a session,
//! carrying it, and what is counted and logged of it.
//!
//! A front end itself ([`FrontEnd`]) is a parser from a client's first bytes to an [`OpenRequest`], and an answer.

mod destination;
mod own_node;
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
use super::{ClientKey, Denial, trace};
use crate::carry::{LocalPeer, Opened, carry};
use crate::dialer::DirectDialer;
use crate::drain::Drain;
use crate::net::door::{Door, Limits, NoSlot, Slot};
use crate::net::entrance::{Accepted, ConnectionHandler, Entrance, Rejection};
use crate::net::files;
use crate::net::listen::Accept;
use crate::net::pool::Pool;
use crate::net::socket::{Connection, Socket};
use crate::net::splice::linger;
use crate::policy::Networks;
use crate::protocol::Category;
use crate::registry::AddressBook;
use crate::route::Route;
use crate::telemetry::{Access, Metrics, third_of_memory};

pub use own_node::OwnNode;
pub use visit::{Denied, OpenRequest, Permitted, Proof, Visit};

/// A front end: it reads what a client asks for from the stream `S` that was accepted, and answers.
pub trait FrontEnd<S>: Send + Sync + 'static {
    /// Its name in metrics and the access log.
    const NAME: &'static str;

    /// The category that the Open frame carries.
    const CATEGORY: Category;

    /// The stream that carries the session's bytes: what was accepted, or what a handshake (TLS) made of it.
    type Connection: Connection;

    /// What is logged about a client stands in this span; its fields `trace` and `session` are filled in once there are
    /// some.
    fn span(&self, from: SocketAddr) -> Span;

    /// A few bytes that are sent to a client that is rejected before its head is read; empty for none, the default.
    fn rejection_bytes(&self, _denial: &Denial, _trace: &str) -> Bytes {
        Bytes::new()
    }

    /// Reads the head, passes the request to [`Visit::open`], and answers the client. A front end that serves many
    /// requests over one connection passes each to [`Visit::judge`] instead.
    ///
    /// The future is dropped where it waits if it has called neither within [`HEAD_TIME`], if the client's slot is
    /// given to another source, or at the end of draining.
    fn handshake(
        &self,
        socket: S,
        visit: &mut Visit<'_>,
    ) -> impl Future<Output = Handshake<Self::Connection>> + Send;
}

/// What a front end serves with. All but the gate is shared by those of a process. Cheap to clone.
#[derive(Debug, Clone)]
pub struct FrontContext {
    /// The access checks. They follow the config: clients that connect later are checked by the new one.
    pub gate: Arc<ArcSwap<Gate>>,
    /// The door to the sessions of all front ends of this process.
    pub sessions: Door<ClientKey>,
    /// Read buffers.
    pub pool: Pool,
    /// Opens the sessions.
    pub route: Route,
    /// Finds the node at which an address, a pod or a Service is.
    pub addresses: Arc<AddressBook>,
    /// Dials what is at no node; `None`: nothing is dialled from here.
    pub direct: Option<DirectDialer>,
    /// The node at which all of this stands, and whose cloud dials what is at no node; `None`: at a pod.
    pub own_node: Option<OwnNode>,
    /// Counts connections, sessions and bytes.
    pub metrics: Metrics,
    /// Once it begins no client is let in; it waits for those that are.
    pub drain: Drain,
}

impl FrontContext {
    /// What dials a target at this port without a node; `None`: it may dial none at all. `all`: for a client who may
    /// have all that is not off limits.
    fn direct_dialer(&self, port: u16, all: bool) -> Option<&DirectDialer> {
        self.direct.as_ref().filter(|direct| direct.may_dial(port, all))
    }

    /// It is stopping.
    fn stops(&self) -> Denial {
        Denial::Busy(if self.own_node.is_some() { "this edge is stopping" } else { "this pod is stopping" })
    }

    /// There is no slot for another session.
    fn full(&self, why: NoSlot) -> Denial {
        Denial::Busy(match (why, &self.own_node) {
            (NoSlot::ForOne, None) => {
                "you have as many sessions as one client may: [mode.cloud.session] max_for_client of the pod"
            }
            (NoSlot::ForAll, None) => "this pod is full: [mode.cloud.session] max of the pod is reached",
            (NoSlot::ForOne, Some(_)) => "you have as many sessions as one client of this edge may",
            (NoSlot::ForAll, Some(_)) => "this edge is full: it has as many sessions as it may",
        })
    }
}

/// A session that was opened for a client.
pub type Granted = Opened<Slot<ClientKey>>;

/// How a client's handshake ended; `C` is its connection.
#[derive(Debug)]
pub enum Handshake<C, T = Granted> {
    /// The client has its answer; from now on its connection carries the session's bytes.
    Opened {
        /// What was opened for it.
        session: T,
        /// The connection, without any wrapper of the handshake.
        socket: C,
        /// Bytes that came behind the head before the answer was sent.
        early: Bytes,
    },
    /// The front end has served the client by itself, and no session is left to carry. The connection must be closed
    /// with care, if it is still there.
    Served(Option<C>),
    /// The client has been sent the denial. The connection must be closed with care, as it may still be sending.
    Denied(C),
    /// No head came, or the answer could not be sent.
    Failed {
        /// A fixed label for metrics.
        cause: &'static str,
        /// The connection, if it is still there; it is closed with care, as an error may be on its way to the client.
        socket: Option<C>,
    },
}

impl<C, T> Handshake<C, T> {
    /// The same of another connection, made of this one.
    pub(super) fn map<D>(self, change: impl FnOnce(C) -> D) -> Handshake<D, T> {
        match self {
            Self::Opened { session, socket, early } => {
                Handshake::Opened { session, socket: change(socket), early }
            }
            Self::Served(socket) => Handshake::Served(socket.map(change)),
            Self::Denied(socket) => Handshake::Denied(change(socket)),
            Self::Failed { cause, socket } => Handshake::Failed { cause, socket: socket.map(change) },
        }
    }
}

/// Serves clients until draining begins; the drain then waits for those that are connected. A connection from a network
/// of `proxies` must begin with a PROXY header.
pub async fn serve<L, F>(front_end: F, listener: L, proxies: Networks, context: FrontContext)
where
    L: Accept,
    F: FrontEnd<L::Stream>,
{
    let (refused, refusals) = (context.metrics.connections_refused.clone(), context.metrics.refusals.clone());
    let door = Door::new(Limits::slots(slots(context.own_node.is_some())));
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
            Rejection::Full => Denial::Busy("too many connections wait at once without a request"),
            Rejection::Files => {
                Denial::Busy("no files are left to open here: raise their limit (ulimit -Hn, LimitNOFILE)")
            }
        };
        let metrics = &self.context.metrics;
        metrics.sessions.refused(F::NAME, denial.name());
        let mut access = Access::begin(F::NAME, from.to_string());
        access.trace = trace::new();
        access.status = Some(denial.status().as_u16());
        let told = self.front_end.rejection_bytes(&denial, &access.trace);
        access.refuse(denial.name(), &denial.to_string(), from.ip(), &metrics.refusals);
        told
    }

    async fn serve(self: Arc<Self>, accepted: Accepted<S>) {
        let Accepted { socket, from, slot } = accepted;
        let (head_done, head_is_done) = oneshot::channel();
        let mut visit = Visit::new::<S, F>(&self.context, from, slot, head_done);
        let head = {
            // Boxed, so that a session does not keep the memory of the handshake.
            let handshake = Box::pin(self.front_end.handshake(socket, &mut visit));
            tokio::select! {
                biased;
                head = handshake => head,
                () = too_slow(head_is_done) => Handshake::Failed { cause: "slow_head", socket: None },
            }
        };
        let socket = match head {
            Handshake::Opened { session, socket, early } => {
                // The session has a slot of its own: strangers who fill the door must not end it.
                drop(visit);
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
            // Closed with care, so that the answer arrives; until then the client keeps its slot.
            visit.waits();
            linger(&mut Socket::new(socket, self.context.pool.clone())).await;
        }
    }
}

/// Completes [`HEAD_TIME`] after the start, unless `head_done` is dropped first.
async fn too_slow(head_done: oneshot::Receiver<()>) {
    if timeout(HEAD_TIME, head_done).await.is_ok() {
        std::future::pending().await
    }
}

/// How long a client may take to send its head.
pub const HEAD_TIME: Duration = Duration::from_secs(10);

/// Longest head in bytes, of a request and of an answer; also how much of a body waits on its way.
pub(super) const HEAD_BYTES: usize = 64 * 1024;

/// How many connections to one front end may not have sent a head or not passed the checks: as many as have room for a
/// head of the largest size in a quarter of what sessions may keep. An edge is a small machine.
fn slots(at_edge: bool) -> usize {
    let memory = third_of_memory(if at_edge { EDGE_MEMORY } else { POD_MEMORY }) / 4;
    files::at_most(WAITING.min(memory / HEAD_BYTES), 8)
}

/// Connections to one front end at most that have not sent a head or not passed the checks, on any machine.
pub(super) const WAITING: usize = 4096;
const POD_MEMORY: usize = 256 << 20;
const EDGE_MEMORY: usize = 32 << 20;

#[cfg(test)]
pub(super) mod tests;
