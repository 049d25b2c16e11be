//! The acceptor's end of a session: authorizes and dials the target, then transfers the session's bytes.

pub mod target_dialer;
pub mod target_tls;

use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::sync::Arc;

use bytes::Bytes;
use tokio::time::Instant;
use tracing::info_span;

use crate::acceptor::target_dialer::{DialRight, DialledTarget, TargetDialer};
use crate::acceptor::target_tls::TargetTls;
use crate::session_io::judged::{JudgedSessions, UNTIL_CHANGED};
use crate::session_io::rights::RightsChange;
use crate::session_io::{LocalParty, OpenSession, run_session};
use tunnel_base::access_log::AccessLogEntry;
use tunnel_base::drain::Drain;
use tunnel_base::metrics::Metrics;
use tunnel_link::table::handles::IncomingSession;
use tunnel_net::pool::BufferPool;
use tunnel_net::socket::{AnyConnection, Socket};
use tunnel_proto::frame::{ErrorCode, SessionCategory, SessionError};

/// Accepts sessions and dials their targets: at an edge for servers, at a server for edges. Cheap to clone.
#[derive(Debug, Clone)]
pub struct SessionAcceptor {
    /// The dialer of its targets.
    pub(crate) dialer: Arc<TargetDialer>,
    /// `None` if this acceptor has no TLS for targets.
    tls: Option<TargetTls>,
    pool: BufferPool,
    judged: JudgedSessions,
    metrics: Metrics,
    drain: Drain,
}

impl SessionAcceptor {
    /// Creates an acceptor that dials with `dialer`, and with `tls` the targets of HTTPS listeners. `drain` waits for
    /// its sessions.
    pub fn new(
        dialer: TargetDialer,
        tls: Option<TargetTls>,
        pool: BufferPool,
        judged: JudgedSessions,
        metrics: Metrics,
        drain: Drain,
    ) -> Self {
        Self { dialer: Arc::new(dialer), tls, pool, judged, metrics, drain }
    }

    /// Answers an offer and serves its session in its own task. Returns at once, for use on a read loop.
    pub fn serve_incoming(&self, offer: IncomingSession) {
        let span = info_span!("session", session = %offer.key().id, target = %offer.target);
        let this = self.clone();
        self.drain.spawn(span, async move { this.serve(offer).await });
    }

    async fn serve(&self, offer: IncomingSession) {
        let mut access = AccessLogEntry::start(LISTENER, offer.client.clone());
        access.id = Some(offer.key().id);
        access.node = self.dialer.node().cloned();
        access.target = Some(offer.target.clone());
        let started = Instant::now();
        let dialled = tokio::select! {
            biased;
            dialled = self.dial(&offer) => dialled,
            () = offer.withdrawn() => Err(SessionError::new(ErrorCode::Cancelled, "the opener gave up before the target answered")),
        };
        self.metrics.open_duration.observe(started.elapsed().as_secs_f64());
        // The dial may have taken seconds. The rights of this moment decide, before the opener learns that the target
        // answers.
        let granted = dialled.and_then(|(connection, right)| {
            let judge = move |change: &RightsChange| {
                right.judge(change).map(|()| UNTIL_CHANGED).map_err(|why| why.reason)
            };
            let judged = self
                .judged
                .add((&access).into(), judge)
                .map_err(|why| SessionError::new(ErrorCode::NotAllowed, why))?;
            Ok((connection, judged))
        });
        let (target, judged) = match granted {
            Ok(granted) => granted,
            Err(refusal) => {
                let from = address(&offer.client);
                access.refuse(refusal.code.name(), &refusal.reason, from, &self.metrics);
                return offer.refuse(refusal);
            }
        };
        let session = offer.accept().into();
        let alive = self.metrics.sessions.start(LISTENER);
        let opened = OpenSession { session, buffered: Bytes::new(), access, judged, alive, permit: None };
        run_session(opened, LocalParty::Target, Socket::new(target, self.pool.clone()), &self.metrics).await;
    }

    async fn dial(&self, offer: &IncomingSession) -> Result<(AnyConnection, DialRight), SessionError> {
        let target = &offer.target;
        let until = Instant::now() + offer.dial_timeout;
        let tls = match (&self.tls, offer.key().category) {
            (_, category) if category != SessionCategory::Https => None,
            (Some(tls), _) => Some(tls),
            (None, _) => {
                let reason = "this end does not support TLS to targets";
                return Err(SessionError::new(ErrorCode::NotAllowed, reason));
            }
        };
        let DialledTarget { socket, right } = self.dialer.dial(target, offer.dial_timeout).await?;
        let Some(tls) = tls else { return Ok((Box::new(socket), right)) };
        let stream = tls.connect(socket, target, until, &self.pool).await?;
        Ok((Box::new(stream), right))
    }
}

/// Returns the client's IP address from the text that a server sent: `10.0.0.1:5`, or `user@10.0.0.1:5`.
fn address(client: &str) -> IpAddr {
    let at = client.rsplit('@').next().unwrap_or_default();
    at.parse::<SocketAddr>().map_or(Ipv4Addr::UNSPECIFIED.into(), |at| at.ip())
}

/// The acceptor's label in metrics and the access log.
pub(crate) const LISTENER: &str = "acceptor";

#[cfg(test)]
mod tests;
