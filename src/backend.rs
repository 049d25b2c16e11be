//! The end of a session at its target: is that allowed, can it be dialled, then the session's bytes.

mod dial;

use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::sync::Arc;

use bytes::Bytes;
use tokio::net::TcpStream;
use tokio::time::Instant;
use tracing::info_span;

use crate::carry::{LocalPeer, Opened, carry};
use crate::drain::Drain;
use crate::net::pool::Pool;
use crate::net::socket::Socket;
use crate::protocol::{Category, Code, Offer, Refusal};
use crate::telemetry::{Access, Metrics};

pub use dial::{LocalAddresses, TargetDialer};

/// Serves what the far end asks this edge, or an edge this pod, to dial. Cheap to clone.
#[derive(Debug, Clone)]
pub struct Backend {
    dialer: Arc<TargetDialer>,
    pool: Pool,
    metrics: Metrics,
    drain: Drain,
}

impl Backend {
    /// A back end that dials with `dialer`; `drain` waits for its sessions.
    pub fn new(dialer: TargetDialer, pool: Pool, metrics: Metrics, drain: Drain) -> Self {
        Self { dialer: Arc::new(dialer), pool, metrics, drain }
    }

    /// Answers an offer and serves its session, in a task of its own: returns at once, for use on a read loop.
    pub fn take(&self, offer: Offer) {
        let span = info_span!("session", session = %offer.id(), target = %offer.target());
        let this = self.clone();
        self.drain.spawn(span, async move { this.serve(offer).await });
    }

    async fn serve(&self, offer: Offer) {
        let mut access = Access::begin(FRONT, offer.client().to_owned());
        access.id = Some(offer.id());
        access.node.clone_from(&self.dialer.node);
        access.target = Some(offer.target().clone());
        let begun = Instant::now();
        let dialled = tokio::select! {
            biased;
            dialled = self.dial(&offer) => dialled,
            () = offer.withdrawn() => Err(Refusal::new(Code::GivenUp, "the opener gave up before the target answered")),
        };
        self.metrics.opening.observe(begun.elapsed());
        match dialled {
            Ok(socket) => {
                let alive = self.metrics.sessions.begin(FRONT);
                let opened = Opened { session: offer.accept(), early: Bytes::new(), access, alive, slot: () };
                carry(opened, LocalPeer::Target, Socket::new(socket, self.pool.clone()), &self.metrics).await;
            }
            Err(refusal) => {
                self.metrics.sessions.refused(FRONT, refusal.code.name());
                let from = address(offer.client());
                access.refuse(refusal.code.name(), &refusal.reason, from, &self.metrics.refusals);
                offer.refuse(refusal);
            }
        }
    }

    async fn dial(&self, offer: &Offer) -> Result<TcpStream, Refusal> {
        if offer.category() == Category::Https {
            let reason = "this edge does not speak TLS to targets yet";
            return Err(Refusal::new(Code::NotAllowed, reason));
        }
        self.dialer.dial(offer.target(), offer.patience()).await
    }
}

/// Whose address a pod said a client has: `10.0.0.1:5`, or `user@10.0.0.1:5`.
fn address(client: &str) -> IpAddr {
    let at = client.rsplit('@').next().unwrap_or_default();
    at.parse::<SocketAddr>().map_or(Ipv4Addr::UNSPECIFIED.into(), |at| at.ip())
}

/// This end's name in metrics and the access log.
const FRONT: &str = "backend";

#[cfg(test)]
mod tests;
