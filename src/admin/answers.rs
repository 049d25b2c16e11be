//! What each path of the admin ports answers.

use std::time::Duration;

use bytes::Bytes;
use http::header::ACCEPT;
use http::{Method, Request, Response, StatusCode};
use http_body_util::{BodyExt, Full, Limited};
use hyper::body::Incoming;
use tracing::info;

use super::page::live_page;
use super::response::{json, only, plain_text, text};
use super::{Admin, Asker, Port, Program, Readiness, Reply, enrol};
use crate::drain::Drain;
use crate::names::NodeName;
use crate::telemetry::{AUDIT, Form, log_trouble};

impl Admin {
    /// Answers one request.
    pub(super) async fn answer(
        &self,
        request: Request<Incoming>,
        port: Port,
        asker: Asker,
        drain: &Drain,
    ) -> Response<Reply> {
        let path = request.uri().path();
        let private = PRIVATE.contains(&path) && READS.contains(request.method());
        if port != Port::Metrics
            && !PUBLIC.contains(&path)
            && let Some(refused) = self.turned_away(asker, request.headers(), private).await
        {
            return refused.map(Reply::Left);
        }
        if port != Port::Metrics && private {
            return match path {
                "/events" => self.events(asker, drain),
                "/status" => json(&self.status()).map(Reply::Left),
                _ => live_page().map(Reply::Left),
            };
        }
        self.answer_at_once(request, port, asker).await.map(Reply::Left)
    }

    async fn answer_at_once(
        &self,
        request: Request<Incoming>,
        port: Port,
        asker: Asker,
    ) -> Response<Full<Bytes>> {
        if port == Port::Metrics && !PUBLIC.contains(&request.uri().path()) {
            return plain_text(StatusCode::NOT_FOUND, NOT_FOUND);
        }
        let read = READS.contains(request.method());
        let get = *request.method() == Method::GET;
        match (request.uri().path(), &self.side) {
            ("/metrics" | "/livez" | "/readyz" | "/status" | "/events" | "/", _) if !read => {
                only("GET, HEAD", READ_ONLY)
            }
            ("/metrics", _) => {
                let accept = request.headers().get(ACCEPT).and_then(|accept| accept.to_str().ok());
                let form = Form::wanted(accept.unwrap_or_default());
                text(StatusCode::OK, self.metrics.encode(form), form.content_type())
            }
            ("/livez", _) => plain_text(StatusCode::OK, "ok\n"),
            ("/readyz", _) => ready(&self.readiness),
            ("/cloud/healthz", Program::Cloud(_)) | ("/edge/healthz", Program::Edge(_)) if !get => {
                only("GET", READ_ONLY)
            }
            ("/cloud/healthz", Program::Cloud(pod)) => {
                plain_text(StatusCode::OK, go_list(&pod.registry.nodes()))
            }
            ("/edge/healthz", Program::Edge(edge)) => {
                let linked = edge.uplinks.is_linked();
                let status = if linked { StatusCode::OK } else { StatusCode::INTERNAL_SERVER_ERROR };
                plain_text(status, "")
            }
            ("/invitations" | "/revocations", Program::Cloud(_)) if port != Port::Local => {
                plain_text(StatusCode::NOT_FOUND, NOT_FOUND)
            }
            ("/invitations" | "/revocations", Program::Cloud(_)) if *request.method() != Method::POST => {
                only("POST", "only supports POST method\n")
            }
            ("/invitations", Program::Cloud(pod)) => {
                enrol::invite(pod.enrolment.as_ref(), pod.port, request, asker).await
            }
            ("/revocations", Program::Cloud(pod)) => {
                enrol::revoke(pod.enrolment.as_ref(), request, asker).await
            }
            ("/debug/flags/v", _) => self.set_level(request, asker).await,
            _ => plain_text(StatusCode::NOT_FOUND, NOT_FOUND),
        }
    }

    /// Sets the log level in SuperEdge's way, with its texts and statuses, 406 too.
    async fn set_level(&self, request: Request<Incoming>, asker: Asker) -> Response<Full<Bytes>> {
        if *request.method() != Method::PUT {
            return plain_text(StatusCode::NOT_ACCEPTABLE, "unsupported http method\n");
        }
        if !self.level_from_anywhere && !asker.is_local() {
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
                info!(target: AUDIT, who = %asker, verbosity = v, "the log level was set");
                plain_text(StatusCode::OK, format!("successfully set klog.logging.verbosity to {value}\n"))
            }
            Err(why) => {
                let why = format!("failed set klog.logging.verbosity {value}: {why}\n{LEVEL_BODY}");
                plain_text(StatusCode::BAD_REQUEST, why)
            }
        }
    }
}

/// Whether a process is ready, and why not.
pub(super) fn ready(readiness: &Readiness) -> Response<Full<Bytes>> {
    match readiness.check() {
        Ok(troubles) => plain_text(StatusCode::OK, format!("ok\n{troubles}{}", log_trouble())),
        Err(reasons) => plain_text(StatusCode::SERVICE_UNAVAILABLE, format!("{reasons}{}", log_trouble())),
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

/// What is shown on this machine only.
const PRIVATE: [&str; 3] = ["/", "/events", "/status"];

const READS: [Method; 2] = [Method::GET, Method::HEAD];

/// What the port for metrics has, and what may be asked for by any name: it names no node and changes nothing.
const PUBLIC: [&str; 3] = ["/metrics", "/livez", "/readyz"];

pub(super) const NOT_FOUND: &str = "not found\n";

/// What a level is set with.
pub(super) const LEVEL_BODY: &str = "next: send the level alone as the body, as curl -X PUT --data 2 does: 0 what operators \
                                     need, 2 debug, 4 libraries too, 6 everything\n";

/// SuperEdge's words for any other method.
const READ_ONLY: &str = "only supports GET method\n";

/// Time for the few bytes of a level.
const BODY_TIME: Duration = Duration::from_secs(5);

/// Longest body in bytes: any 32-bit number, with room for a slip.
const BODY_BYTES: usize = 64;
