//! The port for operators and machines: health, readiness, metrics and the log level.

mod readiness;

use std::convert::Infallible;
use std::fmt;
use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use http::header::{ALLOW, CONTENT_TYPE, HeaderValue};
use http::{Method, Request, Response, StatusCode};
use http_body_util::{BodyExt, Full, Limited};
use hyper::body::Incoming;
use hyper::server::conn::http1;
use hyper::service::service_fn;
use hyper_util::rt::{TokioIo, TokioTimer};
use tokio::net::TcpStream;
use tracing::{Span, debug, info, info_span};

use crate::drain::Drain;
use crate::names::NodeName;
use crate::net::door::{Door, Limits, Slot};
use crate::net::entrance::{Accepted, ConnectionHandler, Entrance};
use crate::net::files;
use crate::net::listen::Listener;
use crate::policy::{Networks, plain};
use crate::telemetry::{LogLevel, Metrics, log_trouble};

pub use readiness::Readiness;

/// Everything the admin ports show. Cheap to clone.
#[derive(Clone)]
pub struct Admin {
    /// Which program this is.
    pub side: Program,
    /// Shown as `/metrics`.
    pub metrics: Metrics,
    /// Shown as `/readyz`.
    pub readiness: Readiness,
    /// Set by `PUT /debug/flags/v`, if there is a level to set.
    pub level: Option<LogLevel>,
    /// Whether the level may be set from other machines, as SuperEdge allows; else from loopback only.
    pub level_from_anywhere: bool,
}

/// Which program this is, and the health that SuperEdge's watchers ask of it.
#[derive(Clone)]
pub enum Program {
    /// `/cloud/healthz` lists the nodes that this gives.
    Cloud(Arc<dyn Fn() -> Vec<NodeName> + Send + Sync>),
    /// `/edge/healthz` answers 200 while this returns that a link is up.
    Edge(Arc<dyn Fn() -> bool + Send + Sync>),
}

/// Which of the two ports is served.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Port {
    /// Everything.
    Log,
    /// `/metrics`, `/livez` and `/readyz` only.
    Metrics,
}

/// Answers on an admin port until `drain` begins.
///
/// Give it a drain of its own, begun last: then `/readyz` and `/metrics` still answer while sessions are drained.
pub async fn serve(listener: Listener, admin: Admin, port: Port, drain: Drain) {
    let door = Door::new(Limits::slots(files::at_most(CONNECTIONS, 16)));
    let (refused, refusals) = (admin.metrics.connections_refused.clone(), admin.metrics.refusals.clone());
    let entrance = Entrance { listener, door, proxies: Networks::default(), refused, refusals };
    entrance.run(Arc::new(Served { admin, port, drain: drain.clone() }), drain).await;
}

#[derive(Debug)]
struct Served {
    admin: Admin,
    port: Port,
    drain: Drain,
}

impl ConnectionHandler for Served {
    fn span(&self, from: SocketAddr) -> Span {
        info_span!("admin", peer = %from)
    }

    async fn serve(self: Arc<Self>, accepted: Accepted) {
        connection(accepted.socket, accepted.from.ip(), &self, &accepted.slot).await;
    }
}

impl Admin {
    /// Serves the admin ports that there are, until `drain` begins; see [`serve`].
    pub fn spawn(&self, log: Option<Listener>, metrics: Option<Listener>, drain: &Drain) {
        for (listener, port) in [(log, Port::Log), (metrics, Port::Metrics)] {
            if let Some(listener) = listener {
                drain.spawn(info_span!("admin"), serve(listener, self.clone(), port, drain.clone()));
            }
        }
    }

    /// Answers one request from `peer`.
    async fn answer(&self, request: Request<Incoming>, port: Port, peer: IpAddr) -> Response<Full<Bytes>> {
        let read = matches!(*request.method(), Method::GET | Method::HEAD);
        let get = *request.method() == Method::GET;
        match (request.uri().path(), port, &self.side) {
            ("/metrics" | "/livez" | "/readyz", _, _) if !read => only("GET, HEAD", READ_ONLY),
            ("/metrics", _, _) => text(StatusCode::OK, self.metrics.encode(), Metrics::CONTENT_TYPE),
            ("/livez", _, _) => plain_text(StatusCode::OK, "ok\n"),
            ("/readyz", _, _) => match self.readiness.check() {
                Ok(troubles) => plain_text(StatusCode::OK, format!("ok\n{troubles}{}", log_trouble())),
                Err(reasons) => {
                    plain_text(StatusCode::SERVICE_UNAVAILABLE, format!("{reasons}{}", log_trouble()))
                }
            },
            ("/cloud/healthz", Port::Log, Program::Cloud(_)) if !get => only("GET", READ_ONLY),
            ("/cloud/healthz", Port::Log, Program::Cloud(nodes)) => {
                plain_text(StatusCode::OK, go_list(&nodes()))
            }
            ("/edge/healthz", Port::Log, Program::Edge(_)) if !get => only("GET", READ_ONLY),
            ("/edge/healthz", Port::Log, Program::Edge(linked)) => {
                let status = if linked() { StatusCode::OK } else { StatusCode::INTERNAL_SERVER_ERROR };
                plain_text(status, "")
            }
            ("/debug/flags/v", Port::Log, _) => self.set_level(request, peer).await,
            _ => plain_text(StatusCode::NOT_FOUND, "not found\n"),
        }
    }

    /// Sets the log level in SuperEdge's way, with its texts and statuses, 406 too.
    async fn set_level(&self, request: Request<Incoming>, peer: IpAddr) -> Response<Full<Bytes>> {
        if *request.method() != Method::PUT {
            return plain_text(StatusCode::NOT_ACCEPTABLE, "unsupported http method\n");
        }
        if !self.level_from_anywhere && !plain(peer).is_loopback() {
            return plain_text(StatusCode::FORBIDDEN, "the level is set from this machine only\n");
        }
        let body = tokio::time::timeout(BODY_TIME, Limited::new(request.into_body(), BODY_BYTES).collect());
        let Ok(Ok(body)) = body.await else {
            return plain_text(StatusCode::BAD_REQUEST, "failed set klog.logging.verbosity: no short body\n");
        };
        let body = body.to_bytes();
        let value = String::from_utf8_lossy(&body);
        let value = value.trim();
        let set = go_parse_int(value).and_then(|v| match &self.level {
            Some(level) => level.set(v).map(|()| v).map_err(|e| e.to_string()),
            None => Err("logs have no level here".to_owned()),
        });
        match set {
            Ok(v) => {
                info!(%peer, verbosity = v, "log level set");
                plain_text(StatusCode::OK, format!("successfully set klog.logging.verbosity to {value}\n"))
            }
            Err(why) => {
                let why = format!("failed set klog.logging.verbosity {value}: {why}\n{LEVEL_BODY}");
                plain_text(StatusCode::BAD_REQUEST, why)
            }
        }
    }
}

impl fmt::Debug for Program {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Cloud(_) => "Cloud",
            Self::Edge(_) => "Edge",
        })
    }
}

impl fmt::Debug for Admin {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Admin")
            .field("side", &self.side)
            .field("readiness", &self.readiness)
            .finish_non_exhaustive()
    }
}

async fn connection(socket: TcpStream, peer: IpAddr, served: &Served, slot: &Slot) {
    let answer = |request| async move {
        slot.busy();
        let answer = served.admin.answer(request, served.port, peer).await;
        slot.waits();
        Ok::<_, Infallible>(answer)
    };
    let mut server = http1::Builder::new();
    server.timer(TokioTimer::new()).header_read_timeout(HEAD_TIME).max_buf_size(HEAD_BYTES).half_close(true);
    let mut connection = std::pin::pin!(server.serve_connection(TokioIo::new(socket), service_fn(answer)));
    let ended = tokio::select! {
        ended = connection.as_mut() => ended,
        () = served.drain.draining() => {
            connection.as_mut().graceful_shutdown();
            connection.await
        }
    };
    if let Err(error) = ended {
        debug!(%error, "admin connection ended");
    }
}

/// A slice as Go prints it, which SuperEdge's watchers read.
fn go_list(nodes: &[NodeName]) -> String {
    let names: Vec<_> = nodes.iter().map(NodeName::as_str).collect();
    format!("[{}]\n", names.join(" "))
}

/// An integer as Go's `strconv.ParseInt(text, 10, 32)` takes it, with its error's words.
fn go_parse_int(text: &str) -> Result<i32, String> {
    let digits = text.strip_prefix(['+', '-']).unwrap_or(text);
    let number = !digits.is_empty() && digits.bytes().all(|b| b.is_ascii_digit());
    let why = if number { "value out of range" } else { "invalid syntax" };
    text.parse().map_err(|_| format!("strconv.ParseInt: parsing {text:?}: {why}"))
}

fn only(methods: &'static str, why: &'static str) -> Response<Full<Bytes>> {
    let mut answer = plain_text(StatusCode::METHOD_NOT_ALLOWED, why);
    answer.headers_mut().insert(ALLOW, HeaderValue::from_static(methods));
    answer
}

fn plain_text(status: StatusCode, body: impl Into<Bytes>) -> Response<Full<Bytes>> {
    text(status, body, "text/plain; charset=utf-8")
}

fn text(status: StatusCode, body: impl Into<Bytes>, kind: &'static str) -> Response<Full<Bytes>> {
    let mut answer = Response::new(Full::new(body.into()));
    *answer.status_mut() = status;
    answer.headers_mut().insert(CONTENT_TYPE, HeaderValue::from_static(kind));
    answer
}

/// What a level is set with.
const LEVEL_BODY: &str = "next: send the level alone as the body, as curl -X PUT --data 2 does: 0 what operators need, \
                          2 debug, 4 libraries too, 6 everything\n";

/// SuperEdge's words for any other method.
const READ_ONLY: &str = "only supports GET method\n";

/// Connections at once on one port: a few scrapers and probes. One more takes the place of the one that is idle
/// longest.
const CONNECTIONS: usize = 64;

/// Time for a request's head, and for the next one on the same connection, so that idle ones do not fill the room.
const HEAD_TIME: Duration = Duration::from_secs(10);

/// Longest head in bytes, as on the front ends.
const HEAD_BYTES: usize = 16 * 1024;

/// Time for the few bytes of a level.
const BODY_TIME: Duration = Duration::from_secs(5);

/// Longest body in bytes: any 32-bit number, with room for a slip.
const BODY_BYTES: usize = 64;

#[cfg(test)]
mod tests;
