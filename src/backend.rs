//! The end of a session at its target: is that allowed, can it be dialled, then the session's bytes.

mod tls;

use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::sync::Arc;

use bytes::Bytes;
use tokio::net::TcpStream;
use tokio::time::Instant;
use tracing::info_span;

use crate::carry::{LocalPeer, Opened, carry};
use crate::dialer::TargetDialer;
use crate::drain::Drain;
use crate::net::pool::Pool;
use crate::net::socket::{Connection, Socket};
use crate::protocol::{Category, Code, Offer, Refusal};
use crate::telemetry::{Access, Metrics};

pub use tls::TargetTls;
use tls::TlsTarget;

/// Serves what the far end asks this edge, or an edge this pod, to dial. Cheap to clone.
#[derive(Debug, Clone)]
pub struct Backend {
    dialer: Arc<TargetDialer>,
    /// `None`: this back end has no TLS for targets.
    tls: Option<TargetTls>,
    pool: Pool,
    metrics: Metrics,
    drain: Drain,
}

impl Backend {
    /// A back end that dials with `dialer`; `drain` waits for its sessions.
    pub fn new(dialer: TargetDialer, pool: Pool, metrics: Metrics, drain: Drain) -> Self {
        Self { dialer: Arc::new(dialer), tls: None, pool, metrics, drain }
    }

    /// Uses TLS to the targets of HTTPS front ends.
    #[must_use]
    pub fn with_tls(self, tls: TargetTls) -> Self {
        Self { tls: Some(tls), ..self }
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
        access.node = self.dialer.node().cloned();
        access.target = Some(offer.target().clone());
        let begun = Instant::now();
        let dialled = tokio::select! {
            biased;
            dialled = self.dial(&offer) => dialled,
            () = offer.withdrawn() => Err(Refusal::new(Code::GivenUp, "the opener gave up before the target answered")),
        };
        self.metrics.opening.observe(begun.elapsed());
        match dialled {
            Ok(Dialled::Tcp(socket)) => self.carry(offer, access, socket).await,
            Ok(Dialled::Tls(stream)) => self.carry(offer, access, *stream).await,
            Err(refusal) => {
                self.metrics.sessions.refused(FRONT, refusal.code.name());
                let from = address(offer.client());
                access.refuse(refusal.code.name(), &refusal.reason, from, &self.metrics.refusals);
                offer.refuse(refusal);
            }
        }
    }

    async fn carry<C: Connection>(&self, offer: Offer, access: Access, target: C) {
        let alive = self.metrics.sessions.begin(FRONT);
        let opened = Opened { session: offer.accept().into(), early: Bytes::new(), access, alive, slot: () };
        carry(opened, LocalPeer::Target, Socket::new(target, self.pool.clone()), &self.metrics).await;
    }

    async fn dial(&self, offer: &Offer) -> Result<Dialled, Refusal> {
        let (target, until) = (offer.target(), Instant::now() + offer.patience());
        let tls = match (&self.tls, offer.category()) {
            (_, category) if category != Category::Https => None,
            (Some(tls), _) => Some(tls),
            (None, _) => {
                let reason = "this end speaks no TLS to targets";
                return Err(Refusal::new(Code::NotAllowed, reason));
            }
        };
        let socket = self.dialer.dial(target, offer.patience()).await?;
        let Some(tls) = tls else { return Ok(Dialled::Tcp(socket)) };
        let left = until.saturating_duration_since(Instant::now());
        let stream = tls.connect(socket, target, left, &self.pool).await?;
        Ok(Dialled::Tls(Box::new(stream)))
    }
}

/// A target that was dialled.
enum Dialled {
    Tcp(TcpStream),
    Tls(Box<TlsTarget>),
}

/// The client's address as a pod has sent it: `10.0.0.1:5`, or `user@10.0.0.1:5`.
fn address(client: &str) -> IpAddr {
    let at = client.rsplit('@').next().unwrap_or_default();
    at.parse::<SocketAddr>().map_or(Ipv4Addr::UNSPECIFIED.into(), |at| at.ip())
}

/// This end's name in metrics and the access log.
const FRONT: &str = "backend";

#[cfg(test)]
mod tests;
