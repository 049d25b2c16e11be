//! Health checks for a process that has no other admin data.

use std::future;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use futures_util::FutureExt as _;
use http::{Request, StatusCode};
use hyper::body::Incoming;
use parking_lot::Mutex;
use tokio::time::Instant;
use tracing::{Span, info_span};

use crate::admin::readiness::Readiness;
use crate::admin::responses::{AdminResponse, not_found, plain_text};
use crate::admin::{AdminBody, CONNECTIONS, accept_limits, ready, serve_connection};
use tunnel_base::drain::Drain;
use tunnel_base::metrics::Metrics;
use tunnel_net::accept_loop::{self, Accepted, ConnectionHandler};
use tunnel_net::listen::TcpListenSocket;

/// A watchdog that detects whether endless work still makes progress. Cheap to clone; clones share their state.
#[derive(Debug, Clone)]
pub struct ProgressWatchdog(Arc<Mutex<Instant>>);

impl ProgressWatchdog {
    /// Creates a watchdog as if [`kick`](Self::kick) had just been called.
    pub(crate) fn new() -> Self {
        Self(Arc::new(Mutex::new(Instant::now())))
    }

    /// Records progress of the work.
    pub fn kick(&self) {
        *self.0.lock() = Instant::now();
    }

    /// Returns true if there was progress within the last five minutes.
    fn is_alive(&self) -> bool {
        self.0.lock().elapsed() < PROGRESS_TIMEOUT
    }
}

/// Serves `/livez` and `/readyz` until draining starts. `/livez` succeeds while `pulse` is kicked.
pub async fn health(listener: TcpListenSocket, readiness: Readiness, pulse: ProgressWatchdog, drain: Drain) {
    let limits = accept_limits(CONNECTIONS, &Metrics::edge());
    let handler = HealthHandler { readiness, pulse, drain: drain.clone() };
    accept_loop::run(listener, limits, handler, drain).await;
}

/// The handler of connections to the port of [`health`]: answers `/livez` and `/readyz`.
#[derive(Debug)]
struct HealthHandler {
    readiness: Readiness,
    /// Watchdog of the process's work: `/livez` fails when it detects no progress.
    pulse: ProgressWatchdog,
    drain: Drain,
}

impl ConnectionHandler for HealthHandler {
    fn span(&self, from: SocketAddr) -> Span {
        info_span!("health", remote_addr = %from)
    }

    async fn handle(self: Arc<Self>, mut accepted: Accepted) {
        let answer = |request: Request<Incoming>| {
            future::ready(self.answer(request.uri().path()).map(AdminBody::Left)).boxed()
        };
        serve_connection(&mut accepted.socket, &answer, &self.drain, &accepted.permit).await;
    }
}

impl HealthHandler {
    fn answer(&self, path: &str) -> AdminResponse {
        match path {
            "/livez" if self.pulse.is_alive() => plain_text(StatusCode::OK, "ok\n"),
            "/livez" => plain_text(StatusCode::SERVICE_UNAVAILABLE, "work stalled; restart the process\n"),
            "/readyz" => ready(&self.readiness),
            _ => not_found(),
        }
    }
}

/// Time without progress after which the work has ended or hangs.
const PROGRESS_TIMEOUT: Duration = Duration::from_secs(5 * 60);

#[cfg(test)]
mod tests {
    use super::*;

    fn status_of(health: &HealthHandler, path: &str) -> StatusCode {
        health.answer(path).status()
    }

    #[tokio::test(start_paused = true)]
    async fn the_process_is_alive_while_its_watchdog_is_kicked() {
        let (pulse, readiness) = (ProgressWatchdog::new(), Readiness::waiting_for(&["requests"]));
        let health = HealthHandler { readiness, pulse: pulse.clone(), drain: Drain::new() };
        tokio::time::advance(PROGRESS_TIMEOUT - Duration::from_secs(1)).await;
        assert_eq!(status_of(&health, "/livez"), StatusCode::OK);
        assert_eq!(status_of(&health, "/readyz"), StatusCode::SERVICE_UNAVAILABLE);
        tokio::time::advance(Duration::from_secs(1)).await;
        assert_eq!(status_of(&health, "/livez"), StatusCode::SERVICE_UNAVAILABLE);
        pulse.kick();
        assert_eq!(status_of(&health, "/livez"), StatusCode::OK, "slow work that continues is alive");
        assert_eq!(status_of(&health, "/metrics"), StatusCode::NOT_FOUND);
    }
}
