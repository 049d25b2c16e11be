//! The ports for operators and machines: health, readiness, metrics, the log level, and what the process does now.

mod answers;
mod asker;
mod channelz;
mod enrol;
mod events;
mod expiry;
mod health;
mod page;
mod readiness;
mod response;
mod status;
mod view;

use std::convert::Infallible;
use std::fmt;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use http::{Request, Response};
use http_body_util::{Either, Full};
use hyper::body::Incoming;
use hyper::server::conn::http1;
use hyper::service::service_fn;
use hyper_util::rt::{TokioIo, TokioTimer};
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::UnixStream;
use tracing::{Span, debug, info_span};

use crate::drain::Drain;
use crate::net::door::{Door, Limits, Slot};
use crate::net::entrance::{Accepted, ConnectionHandler, Entrance};
use crate::net::files;
use crate::net::listen::{Accept, Listener, LocalListener};
use crate::policy::Networks;
use crate::telemetry::{LogLevel, Metrics};

use events::Events;

pub use asker::Asker;
pub use enrol::Invited;
pub use health::{Pulse, health};
pub use page::{Streams, Viewers};
pub use readiness::Readiness;
pub use status::{ErrorStatus, GoneStatus, LinkStatus, PublisherStatus, SessionStatus, Status, Totals};
pub use view::{Clock, EdgeView, PodView};

/// Everything the admin ports show. Cheap to clone.
#[derive(Clone)]
pub struct Admin {
    /// Which program this is.
    pub side: Program,
    /// Shown as `/metrics`.
    pub metrics: Metrics,
    /// Shown as `/readyz`.
    pub readiness: Readiness,
    /// Set by `PUT /debug/flags/v`, if there is a level to set.
    pub level: Option<LogLevel>,
    /// Whether the level may be set from other machines, as SuperEdge allows; else from loopback only.
    pub level_from_anywhere: bool,
    /// The time, set at the start.
    pub clock: Clock,
    /// Who may look from other machines.
    pub viewers: Viewers,
    /// The live pages that are open.
    pub streams: Streams,
}

/// The body of an answer: a text, or events.
type Reply = Either<Full<Bytes>, Events>;

/// Which program this is, and what it is looked at by.
#[derive(Debug, Clone)]
pub enum Program {
    /// A pod, with `/cloud/healthz`.
    Cloud(PodView),
    /// An edge, with `/edge/healthz`.
    Edge(EdgeView),
}

/// Which of the ports is served.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Port {
    /// Everything; what is private only to this machine.
    Log,
    /// `/metrics`, `/livez` and `/readyz` only.
    Metrics,
    /// Everything, to who may open the socket's file.
    Local,
}

/// The listeners that there are.
#[derive(Debug, Default)]
pub struct Listeners {
    /// Everything.
    pub log: Option<Listener>,
    /// Metrics and health alone.
    pub metrics: Option<Listener>,
    /// Commands of this machine.
    pub local: Option<LocalListener>,
    /// gRPC's debugging clients.
    pub channelz: Option<Listener>,
    /// Where edges link, of a pod; not served here.
    pub grpc: Option<SocketAddr>,
}

/// Answers on an admin port until `drain` begins.
///
/// Give it a drain of its own, begun last: then `/readyz` and `/metrics` still answer while sessions are drained.
pub async fn serve<L>(listener: L, admin: Admin, port: Port, drain: Drain)
where
    L: Accept,
    Served: ConnectionHandler<L::Stream>,
{
    let door = Door::new(Limits::slots(files::at_most(CONNECTIONS, 16)));
    let (refused, refusals) = (admin.metrics.connections_refused.clone(), admin.metrics.refusals.clone());
    let entrance = Entrance { listener, door, proxies: Networks::default(), refused, refusals };
    entrance.run(Arc::new(Served { admin, port, drain: drain.clone() }), drain).await;
}

/// Serves the connections of one port.
#[derive(Debug)]
pub struct Served {
    admin: Admin,
    port: Port,
    drain: Drain,
}

impl ConnectionHandler for Served {
    fn span(&self, from: SocketAddr) -> Span {
        info_span!("admin", peer = %from)
    }

    async fn serve(self: Arc<Self>, accepted: Accepted) {
        let asker = Asker::Address(accepted.from.ip());
        let answer = |request| self.admin.answer(request, self.port, asker, &self.drain);
        connection(accepted.socket, answer, &self.drain, &accepted.slot).await;
    }
}

impl ConnectionHandler<UnixStream> for Served {
    fn span(&self, _from: SocketAddr) -> Span {
        info_span!("admin", socket = true)
    }

    async fn serve(self: Arc<Self>, accepted: Accepted<UnixStream>) {
        // A peer that the system cannot name has gone.
        let Ok(user) = accepted.socket.peer_cred() else { return };
        let asker = Asker::User(user.uid());
        let answer = |request| self.admin.answer(request, self.port, asker, &self.drain);
        connection(accepted.socket, answer, &self.drain, &accepted.slot).await;
    }
}

impl Admin {
    /// Serves the admin ports that there are, until `drain` begins; see [`serve`].
    pub fn spawn(&self, listeners: Listeners, drain: &Drain) {
        for (listener, port) in [(listeners.log, Port::Log), (listeners.metrics, Port::Metrics)] {
            if let Some(listener) = listener {
                drain.spawn(info_span!("admin"), serve(listener, self.clone(), port, drain.clone()));
            }
        }
        if let Some(listener) = listeners.channelz {
            let serving = channelz::serve(listener, self.clone(), listeners.grpc, drain.clone());
            drain.spawn(info_span!("channelz"), serving);
        }
        if let Some(listener) = listeners.local {
            drain.spawn(info_span!("admin"), serve(listener, self.clone(), Port::Local, drain.clone()));
        }
    }
}

impl fmt::Debug for Admin {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Admin")
            .field("side", &self.side)
            .field("readiness", &self.readiness)
            .finish_non_exhaustive()
    }
}

async fn connection<S, A>(
    socket: S,
    answer: impl Fn(Request<Incoming>) -> A + Send + Sync,
    drain: &Drain,
    slot: &Slot,
) where
    S: AsyncRead + AsyncWrite + Unpin + Send,
    A: Future<Output = Response<Reply>> + Send,
{
    let answer = |request| async {
        slot.busy();
        let answer = answer(request).await;
        slot.waits();
        Ok::<_, Infallible>(answer)
    };
    let mut server = http1::Builder::new();
    server.timer(TokioTimer::new()).header_read_timeout(HEAD_TIME).max_buf_size(HEAD_BYTES).half_close(true);
    let mut connection = std::pin::pin!(server.serve_connection(TokioIo::new(socket), service_fn(answer)));
    let ended = tokio::select! {
        ended = connection.as_mut() => ended,
        () = drain.draining() => {
            connection.as_mut().graceful_shutdown();
            connection.await
        }
    };
    if let Err(error) = ended {
        debug!(%error, "admin connection ended");
    }
}

/// Connections at once on one port: a few scrapers and probes. One more takes the place of the one that is idle
/// longest.
const CONNECTIONS: usize = 64;

/// Time for a request's head, and for the next one on the same connection, so that idle ones do not fill the room.
const HEAD_TIME: Duration = Duration::from_secs(10);

/// Longest head in bytes, as on the front ends.
const HEAD_BYTES: usize = 16 * 1024;

#[cfg(test)]
mod tests;
