//! Connections to the gRPC port: first byte, TLS handshake, then the gRPC layer, each with its own time limit.

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

/// The handler of connections to the gRPC port.
#[derive(Debug)]
pub(super) struct Callers {
    pub(super) tls: Reload<ServerConfig>,
    pub(super) calls: mpsc::Sender<Call>,
    /// Limits how many do their handshake or make their call at once. When thousands of edges come back at once they
    /// queue here: a rejected edge would only dial again later.
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
        // A peek, because the socket may be reported readable before a byte is there.
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
        // The slot counts as silent only while this side waits for the edge: an edge that waits for this pod keeps it.
        // The handshake is boxed, so that a link does not keep its memory.
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
        // Only pods have certificates that pass the check, so a caller with one may claim to be a pod.
        let certified = io.get_ref().1.peer_certificates().is_some();
        let waiting = Waiting { certified, until, slots: (slot, turn) };
        let (calls, ground) = (self.calls.clone(), self.shared.ground.clone());
        drop(self);
        serve(io, from, calls, ground, waiting).await;
    }
}

/// Connections at once that have no accepted call yet. Most cost little, as they wait for a byte or for their turn.
pub(super) const CONNECTIONS: usize = 8192;
/// Connections at once that do their handshake or make their call, and calls that wait to be checked.
pub(super) const HANDSHAKES: usize = 1000;
/// A connection that has its turn loses it to a waiting one only after 3 s of silence.
pub(super) const TURNS: Limits = Limits {
    slots: HANDSHAKES,
    for_one: usize::MAX,
    waiting: CONNECTIONS,
    patience: Some(Duration::from_secs(3)),
};
/// Time from the connection to the first byte of its handshake.
const FIRST_BYTE: Duration = Duration::from_secs(3);
/// Time from its turn to an accepted call.
const LET_IN: Duration = Duration::from_secs(10);
