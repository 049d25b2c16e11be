//! Health alone, for a process that has nothing else to show.

use std::net::SocketAddr;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use bytes::Bytes;
use http::{Request, Response, StatusCode};
use http_body_util::Full;
use hyper::body::Incoming;
use tokio::time::Instant;
use tracing::{Span, info_span};

use crate::admin::readiness::Readiness;
use crate::admin::{CONNECTIONS, NOT_FOUND, Reply, connection, plain_text, ready};
use tunnel_base::drain::Drain;
use tunnel_base::metrics::Metrics;
use tunnel_base::policy::Networks;
use tunnel_net::accept_loop::{AcceptLoop, Accepted, ConnectionHandler};
use tunnel_net::limiter::{FairLimiter, Limits};
use tunnel_net::listen::TcpAccept;

/// Whether work that never ends goes on: it says so by itself. Cheap to clone; clones share it.
#[derive(Debug, Clone)]
pub struct Watchdog(Arc<Mutex<Instant>>);

impl Watchdog {
    /// As if there had been a beat now.
    pub fn new() -> Self {
        Self(Arc::new(Mutex::new(Instant::now())))
    }

    /// The work goes on.
    pub fn kick(&self) {
        *self.0.lock().unwrap_or_else(PoisonError::into_inner) = Instant::now();
    }

    /// Whether there was a beat within five minutes.
    fn is_alive(&self) -> bool {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).elapsed() < STILL
    }
}

impl Default for Watchdog {
    fn default() -> Self {
        Self::new()
    }
}

/// Answers `/livez`, which is well for as long as `pulse` is felt, and `/readyz`, and nothing else, until draining begins.
pub async fn health(listener: TcpAccept, readiness: Readiness, pulse: Watchdog, drain: Drain) {
    let Metrics { connections_refused, refusals, .. } = Metrics::edge();
    let door = FairLimiter::new(Limits::slots(CONNECTIONS));
    let entrance =
        AcceptLoop { listener, door, proxies: Networks::default(), refused: connections_refused, refusals };
    entrance.run(Arc::new(Health { readiness, pulse, drain: drain.clone() }), drain).await;
}

#[derive(Debug)]
struct Health {
    readiness: Readiness,
    pulse: Watchdog,
    drain: Drain,
}

impl ConnectionHandler for Health {
    fn span(&self, from: SocketAddr) -> Span {
        info_span!("health", peer = %from)
    }

    async fn serve(self: Arc<Self>, accepted: Accepted) {
        let answer = async |request: Request<Incoming>| self.answer(request.uri().path()).map(Reply::Left);
        connection(accepted.socket, answer, &self.drain, &accepted.slot).await;
    }
}

impl Health {
    fn answer(&self, path: &str) -> Response<Full<Bytes>> {
        match path {
            "/livez" if self.pulse.is_alive() => plain_text(StatusCode::OK, "ok\n"),
            "/livez" => plain_text(StatusCode::SERVICE_UNAVAILABLE, "its work stands still: start it anew\n"),
            "/readyz" => ready(&self.readiness),
            _ => plain_text(StatusCode::NOT_FOUND, NOT_FOUND),
        }
    }
}

/// Without a beat for so long the work has ended, or hangs.
const STILL: Duration = Duration::from_secs(5 * 60);

#[cfg(test)]
mod tests {
    use super::*;

    fn asked(health: &Health, path: &str) -> StatusCode {
        health.answer(path).status()
    }

    #[tokio::test(start_paused = true)]
    async fn it_lives_for_as_long_as_its_work_goes_on() {
        let (pulse, readiness) = (Watchdog::new(), Readiness::waiting_for(&["requests"]));
        let health = Health { readiness, pulse: pulse.clone(), drain: Drain::new() };
        tokio::time::advance(STILL - Duration::from_secs(1)).await;
        assert_eq!(asked(&health, "/livez"), StatusCode::OK);
        assert_eq!(asked(&health, "/readyz"), StatusCode::SERVICE_UNAVAILABLE);
        tokio::time::advance(Duration::from_secs(1)).await;
        assert_eq!(asked(&health, "/livez"), StatusCode::SERVICE_UNAVAILABLE);
        pulse.kick();
        assert_eq!(asked(&health, "/livez"), StatusCode::OK, "it was slow, and goes on");
        assert_eq!(asked(&health, "/metrics"), StatusCode::NOT_FOUND);
    }
}
