//! Serves the clients of a listener: permits, the time for a head, and the end of each connection.

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use tokio::sync::Notify;
use tokio::time::timeout;
use tracing::{Span, debug, field, info_span};

use crate::admission::basis::ClientIdentity;
use crate::admission::denial::Denial;
use crate::admission::trace_id::new_trace;
use crate::admission::{
    Admission, AdmissionOutcome, DeniedRequest, ListenerContext, ListenerProtocol, NO_PENDING,
};
use crate::session_io::copy::close::close_gracefully;
use crate::session_io::{LocalParty, run_session};
use tunnel_base::access_log::AccessLogEntry;
use tunnel_base::metrics::Door;
use tunnel_base::metrics::label_values::DENIALS;
use tunnel_base::policy::Networks;
use tunnel_net::accept_loop::{self, AcceptSettings, Accepted, ConnectionHandler, ConnectionRejection};
use tunnel_net::fd_limit;
use tunnel_net::listen::Accept;
use tunnel_net::socket::{Connection, Socket};

/// Serves clients until draining starts; the drain then waits for the connected ones. A connection from a network in
/// `proxies` must start with a PROXY header.
pub async fn run<L, F>(protocol: F, listener: L, proxies: Networks, context: ListenerContext)
where
    L: Accept,
    F: ListenerProtocol<L::AnyStream>,
{
    context.metrics.sessions.expose(context.listener, &DENIALS);
    let limiter = context.pending.heads.clone();
    let metrics = context.metrics.clone();
    let limits = AcceptSettings { limiter, proxies, metrics, door: Door::Connections, for_operators: false };
    let drain = context.drain.clone();
    let context = Arc::new(context);
    accept_loop::run(listener, limits, ClientHandler { protocol, context }, drain).await;
}

/// Serves accepted connections with a listener's protocol: checks the source, runs the handshake, then the session.
pub(super) struct ClientHandler<F> {
    pub(super) protocol: F,
    pub(super) context: Arc<ListenerContext>,
}

impl<S, F> ConnectionHandler<S> for ClientHandler<F>
where
    S: Connection + 'static,
    F: ListenerProtocol<S>,
{
    /// `trace_id` and `session` are recorded once known. The span around it has the listener.
    fn span(&self, from: SocketAddr) -> Span {
        info_span!("client", client = %from, trace_id = field::Empty, session = field::Empty)
    }

    fn admits(&self, from: SocketAddr) -> Result<(), ConnectionRejection> {
        self.context.policy.load().check_source(from.ip()).map_err(|_| ConnectionRejection::Forbidden)
    }

    fn rejection_bytes(&self, from: SocketAddr, why: ConnectionRejection) -> Bytes {
        let denial = match why {
            ConnectionRejection::Forbidden | ConnectionRejection::Stopping => {
                match self.context.policy.load().check_source(from.ip()) {
                    Err(denial) => denial,
                    Ok(()) => return Bytes::new(),
                }
            }
            ConnectionRejection::Full => Denial::Busy(NO_PENDING),
            ConnectionRejection::OpenFiles => Denial::Busy(fd_limit::REACHED),
        };
        let mut access = AccessLogEntry::start(self.context.listener, from.to_string());
        access.trace = new_trace();
        let denied = DeniedRequest::new(denial, access, &self.context, from);
        self.protocol.rejection_bytes(&denied.denial, &denied.trace)
    }

    async fn handle(self: Arc<Self>, accepted: Accepted<S>) {
        let Accepted { socket, from, permit } = accepted;
        let mut admission = Admission::new(Arc::clone(&self.context), from, permit);
        if let Some(uid) = socket.peer_uid() {
            admission.client.proof = ClientIdentity::User(format!("uid={uid}"));
        }
        let head_is_read = admission.head_is_read.clone();
        let head = {
            // Boxed, so that a session does not retain the memory of the handshake.
            let handshake = Box::pin(self.protocol.handshake(socket, &mut admission));
            tokio::select! {
                biased;
                head = handshake => head,
                () = head_timeout(&head_is_read) => AdmissionOutcome::Failed { reason: "header_timeout", socket: None },
            }
        };
        let socket = match head {
            AdmissionOutcome::Opened { session, socket, buffered } => {
                // The session has its own permit. Clients that exhaust the connection limiter must not end it.
                drop(admission);
                let client = Socket::with_early(socket, self.context.pool.clone(), buffered);
                return run_session(session, LocalParty::Client, client, &self.context.metrics).await;
            }
            AdmissionOutcome::Closed(socket) => socket,
            AdmissionOutcome::Failed { reason, socket } => {
                debug!(reason, "handshake failed, no session");
                self.context.metrics.connections_rejected.count(reason);
                socket
            }
        };
        if let Some(socket) = socket {
            // Close gracefully, so that the response arrives. The client keeps its permit until then.
            admission.mark_idle();
            close_gracefully(&mut Socket::new(socket, self.context.pool.clone())).await;
        }
    }
}

/// Completes after [`HEAD_TIME`], unless the head is read before.
async fn head_timeout(head_is_read: &Notify) {
    if timeout(HEAD_TIME, head_is_read.notified()).await.is_ok() {
        std::future::pending().await
    }
}

/// Timeout for receiving a client's head.
pub const HEAD_TIME: Duration = Duration::from_secs(10);
