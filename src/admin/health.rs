//! Health alone, for a process that has nothing else to show.

use std::net::SocketAddr;
use std::sync::Arc;

use bytes::Bytes;
use http::{Request, Response, StatusCode};
use http_body_util::Full;
use hyper::body::Incoming;
use tracing::{Span, info_span};

use super::answers::{NOT_FOUND, ready};
use super::response::plain_text;
use super::{CONNECTIONS, Readiness, Reply, connection};
use crate::drain::Drain;
use crate::net::door::{Door, Limits};
use crate::net::entrance::{Accepted, ConnectionHandler, Entrance};
use crate::net::listen::Listener;
use crate::policy::Networks;
use crate::telemetry::Metrics;

/// Answers `/livez` and `/readyz`, and nothing else, until draining begins.
pub async fn health(listener: Listener, readiness: Readiness, drain: Drain) {
    let Metrics { connections_refused, refusals, .. } = Metrics::edge();
    let door = Door::new(Limits::slots(CONNECTIONS));
    let entrance =
        Entrance { listener, door, proxies: Networks::default(), refused: connections_refused, refusals };
    entrance.run(Arc::new(Health { readiness, drain: drain.clone() }), drain).await;
}

#[derive(Debug)]
struct Health {
    readiness: Readiness,
    drain: Drain,
}

impl ConnectionHandler for Health {
    fn span(&self, from: SocketAddr) -> Span {
        info_span!("health", peer = %from)
    }

    async fn serve(self: Arc<Self>, accepted: Accepted) {
        let answer = async |request: Request<Incoming>| self.answer(&request).map(Reply::Left);
        connection(accepted.socket, answer, &self.drain, &accepted.slot).await;
    }
}

impl Health {
    fn answer(&self, request: &Request<Incoming>) -> Response<Full<Bytes>> {
        match request.uri().path() {
            "/livez" => plain_text(StatusCode::OK, "ok\n"),
            "/readyz" => ready(&self.readiness),
            _ => plain_text(StatusCode::NOT_FOUND, NOT_FOUND),
        }
    }
}
