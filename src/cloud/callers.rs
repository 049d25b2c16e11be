//! Connections to the gRPC port: first byte, TLS handshake, then the gRPC layer, each with its own time limit.

use std::net::SocketAddr;
use std::sync::Arc;

use tokio::sync::mpsc;
use tracing::{Instrument as _, Span, debug, debug_span, info_span};

use crate::cloud::context::PodContext;
use crate::cloud::unshaken::Unshaken;
use crate::net::entrance::{Accepted, ConnectionHandler};
use crate::net::listen::tune_link;
use crate::net::tls::{Acceptor, Shaken};
use crate::protocol::grpc::{Arrival, Certificate, Unaccepted, serve};

/// The handler of connections to the gRPC port.
#[derive(Debug)]
pub(super) struct Callers {
    pub(super) arrivals: mpsc::Sender<Arrival>,
    /// Limits how many do their handshake or make their call at once. When thousands of edges come back at once they
    /// queue here: a rejected edge would only dial again later.
    pub(super) handshakes: Acceptor,
    pub(super) unshaken: Unshaken,
    pub(super) shared: PodContext,
}

impl ConnectionHandler for Callers {
    /// Only for debugging: a span costs memory and time as long as the link lives, which may do nothing for days.
    fn span(&self, from: SocketAddr) -> Span {
        debug_span!("link", %from)
    }

    async fn serve(self: Arc<Self>, accepted: Accepted) {
        let Accepted { socket, from, slot } = accepted;
        let refused = &self.shared.ground.metrics.calls_refused;
        if let Err(e) = tune_link(&socket, self.shared.ground.congestion.as_deref()) {
            return debug!(error = %e, "connection was gone at once");
        }
        let shaking = self.handshakes.accept(socket, from, &slot);
        let shaken = match shaking.instrument(info_span!("handshake", %from)).await {
            Ok(shaken) => shaken,
            Err(unshaken) => {
                refused.count(unshaken.cause);
                if let Some(fault) = &unshaken.fault {
                    self.unshaken.tell(from.ip(), fault);
                }
                return debug!("{unshaken}");
            }
        };
        let Shaken { stream: io, turn, until } = shaken;
        let shown = io.get_ref().1.peer_certificates().and_then(|shown| shown.first());
        // Beside edges only pods have certificates that pass the check, so any other caller with one may claim to be a pod.
        let certificate = match shown.map(|leaf| self.shared.proven.edge(leaf)) {
            None => Certificate::None,
            Some(None) => Certificate::Pod,
            Some(Some(node)) => Certificate::Edge(node),
        };
        let waiting = Unaccepted { certificate, until, slots: (slot, turn) };
        let (arrivals, ground) = (self.arrivals.clone(), self.shared.ground.clone());
        drop(self);
        serve(io, from, arrivals, ground, waiting).await;
    }
}

/// Connections at once that have no accepted call yet. Most cost little, as they wait for a byte or for their turn. Whoever
/// is sent away comes again, and what was done for it is done twice: so a crowd of edges has to fit in here.
pub(super) const CONNECTIONS: usize = 20_000;
