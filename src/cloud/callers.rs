//! What comes in on the gRPC port, until it has made its call.

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use tokio::sync::mpsc;
use tokio::time::{Instant, timeout, timeout_at};
use tokio_rustls::TlsAcceptor;
use tokio_rustls::rustls::ServerConfig;
use tracing::{Span, debug, info_span};

use crate::cloud::context::PodContext;
use crate::net::door::{Door, Limits, Source};
use crate::net::entrance::{Accepted, ConnectionHandler};
use crate::net::listen::tune_link;
use crate::net::reload::Reload;
use crate::net::socket::Buffered;
use crate::protocol::grpc::{Call, Waiting, serve};

/// What comes in on the gRPC port: each does its TLS handshake and is handed to the gRPC layer.
#[derive(Debug)]
pub(super) struct Callers {
    pub(super) tls: Reload<ServerConfig>,
    pub(super) calls: mpsc::Sender<Call>,
    /// Who does a handshake, or is let in. Thousands of edges that come back at once have spoken and wait here for their
    /// turn: sent away, they would only dial again, later.
    pub(super) handshakes: Door,
    pub(super) shared: PodContext,
}

impl ConnectionHandler for Callers {
    fn span(&self, from: SocketAddr) -> Span {
        info_span!("link", %from)
    }

    async fn serve(self: Arc<Self>, accepted: Accepted) {
        let Accepted { socket, from, slot } = accepted;
        let refused = &self.shared.ground.metrics.calls_refused;
        if let Err(e) = tune_link(&socket) {
            return debug!(error = %e, "connection was gone at once");
        }
        // Looked at, not read: whether it can be read may be said too early.
        if timeout(FIRST_BYTE, socket.peek(&mut [0])).await.is_err() {
            refused.count("silent");
            return debug!("nothing came within {FIRST_BYTE:?}");
        }
        slot.busy();
        let Ok(turn) = self.handshakes.enter(&Source::of(from.ip())).await else {
            return refused.count("too_many");
        };
        let until = Instant::now() + LET_IN;
        let tls = TlsAcceptor::from(self.tls.load());
        // Boxed, so that a link does not keep the handshake's room.
        // An edge that is only slow to be served, as thousands come back at once, is not silent.
        let socket = Buffered::new(turn.attend(socket), self.shared.pool.clone());
        let handshake = Box::pin(tls.accept(socket));
        let lost = turn.lost();
        let shaken = tokio::select! {
            biased;
            () = lost.cancelled() => {
                refused.count("gave_way");
                return debug!("gave way in its TLS handshake");
            }
            shaken = timeout_at(until, handshake) => shaken,
        };
        let io = match shaken {
            Ok(Ok(io)) => io,
            Ok(Err(e)) => {
                refused.count("tls");
                return debug!(error = %e, "TLS handshake failed");
            }
            Err(_) => {
                refused.count("tls_too_slow");
                return debug!("TLS handshake took too long");
            }
        };
        // Only a pod's passes the check, so whoever has shown one is a pod, if it says so.
        let certified = io.get_ref().1.peer_certificates().is_some();
        let waiting = Waiting { certified, until, slots: (slot, turn) };
        let (calls, ground) = (self.calls.clone(), self.shared.ground.clone());
        drop(self);
        serve(io, from, calls, ground, waiting).await;
    }
}

/// Connections that were not let in yet. Most of them cost little: they have not spoken, or wait for their turn.
pub(super) const CONNECTIONS: usize = 8192;
/// Connections that do their handshake or make their call, and calls that wait to be looked at.
pub(super) const HANDSHAKES: usize = 1000;
/// Who has its turn may be slow for as long as a far line makes it, if nobody else waits.
pub(super) const TURNS: Limits = Limits {
    slots: HANDSHAKES,
    for_one: usize::MAX,
    waiting: CONNECTIONS,
    patience: Some(Duration::from_secs(3)),
};
/// From a connection to the first byte of its handshake.
const FIRST_BYTE: Duration = Duration::from_secs(3);
/// From its turn to an accepted call.
const LET_IN: Duration = Duration::from_secs(10);
