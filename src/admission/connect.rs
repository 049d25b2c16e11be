//! The protocol CONNECT: `CONNECT <node>:<port>`, followed by the session's bytes.

use std::convert::Infallible;
use std::future::{Pending, pending, poll_fn};
use std::task::Poll;

use bytes::Bytes;
use http::header::{CONTENT_LENGTH, HeaderValue, TRANSFER_ENCODING};
use http::request::Parts;
use http::{HeaderMap, Method, Request, Response, StatusCode, Version};
use http_body_util::Empty;
use hyper::body::Incoming;
use hyper::service::service_fn;
use hyper_util::rt::TokioIo;
use parking_lot::Mutex;
use tokio::io::AsyncWriteExt;
use tokio_util::io::InspectReader;

use crate::admission::denial::{
    Denial, NO_SSH, SSH, automatic_response, bad_head, header_failure, reject_http2, reject_ssh, written,
};
use crate::admission::heads::{HEAD_BYTES, HEAD_FIELDS, http_server};
use crate::admission::trace_id::{new_trace, trace_of};
use crate::admission::{Admission, AdmissionOutcome, ListenerProtocol, OpenRequest};
use tunnel_base::limited;
use tunnel_net::socket::{AnyConnection, Connection};
use tunnel_proto::names::{NameError, Target};

/// The protocol of the CONNECT listeners.
#[derive(Debug)]
pub struct ConnectProtocol;

impl<C: Connection + 'static> ListenerProtocol<C> for ConnectProtocol {
    fn rejection_bytes(&self, denial: &Denial, trace: &str) -> Bytes {
        denial.text(trace)
    }

    async fn handshake(&self, socket: C, admission: &mut Admission) -> AdmissionOutcome {
        serve_connect(Box::new(socket), admission).await
    }
}

/// Serves one CONNECT request: reads its head, opens the session and responds.
///
/// The response is a single write, which over TLS is a single record: kube-apiserver treats a byte that it reads
/// together with the 200 as an error. It fits into any socket's empty buffer, so it needs no timeout. A client that
/// closes its write half early, as `nc` does, is still served. The opening is dropped when
/// [`Connection::remote_reset`] reports that the client disconnected. Not cancel safe.
pub(crate) async fn serve_connect(mut socket: AnyConnection, admission: &mut Admission) -> AdmissionOutcome {
    let ConnectHead { version, trace, request, buffered } = match read_head(&mut *socket, admission).await {
        Ok(head) => head,
        Err(BadHead { reason, rejected }) => {
            let refusals = &admission.context.metrics.refusals;
            limited!(
                reason == SSH && refusals.may_log(SSH, admission.client.from.ip()) => warn,
                hint = NO_SSH, "ssh client connected without a proxy command"
            );
            // A bad head passes the checks like a request: it is counted, and a forbidden client learns no more
            // than that.
            if let Some(denial) = rejected
                && let Err(denied) = admission.authorize(Err(denial), new_trace()).await
            {
                let answer = written(Version::HTTP_11, &denied.answer());
                // A client that has disconnected gets no reason.
                let _ = socket.write_all(&answer).await.and(socket.flush().await);
            }
            return AdmissionOutcome::Failed { reason, socket: Some(socket) };
        }
    };
    let Some(opened) = admission.open(socket.remote_reset(), request, trace).await else {
        return AdmissionOutcome::Failed { reason: "reset_while_opening", socket: Some(socket) };
    };
    let answer = match &opened {
        Ok(_) => established(version),
        Err(denied) => written(version, &denied.answer()),
    };
    if socket.write_all(&answer).await.is_err() || socket.flush().await.is_err() {
        return AdmissionOutcome::Failed { reason: "reset", socket: Some(socket) };
    }
    match opened {
        Ok(session) => AdmissionOutcome::Opened { session, socket, buffered },
        Err(_) => AdmissionOutcome::Closed(Some(socket)),
    }
}

/// A request head.
struct ConnectHead {
    version: Version,
    trace: String,
    request: Result<OpenRequest, Denial>,
    /// Bytes read after the head.
    buffered: Bytes,
}

/// A connection without a valid head.
struct BadHead {
    /// A fixed label for metrics.
    reason: &'static str,
    /// What the client is told, if it gets a response.
    rejected: Option<Denial>,
}

/// Reads a head with hyper, then takes the stream back before hyper does anything else. hyper's own response to a
/// malformed head is withheld, because it has no reason. A client that loses its place within its head gets a response.
async fn read_head(socket: &mut dyn Connection, admission: &Admission) -> Result<ConnectHead, BadHead> {
    let taken = Mutex::new(None);
    // The service keeps the request and never answers, so hyper writes nothing before the stream is taken back.
    let take = |request: Request<Incoming>| -> Pending<Result<Response<Empty<Bytes>>, Infallible>> {
        *taken.lock() = Some(request);
        pending()
    };
    // hyper keeps nothing of a head with a malformed target.
    let mut read = Vec::new();
    let captured = InspectReader::new(&mut *socket, |bytes: &[u8]| {
        if read.is_empty() {
            admission.mark_active();
        }
        read.extend(bytes.iter().take(MAX_CAPTURED.saturating_sub(read.len())));
    });
    let io = tokio::io::join(captured, Vec::new());
    let mut connection =
        http_server(HEAD_BYTES, HEAD_FIELDS).serve_connection(TokioIo::new(io), service_fn(take));
    let (ended, request) = poll_fn(|cx| {
        let polled = connection.poll_without_shutdown(cx);
        let request = taken.lock().take();
        match (polled, request) {
            (_, Some(request)) => Poll::Ready((Ok(()), Some(request))),
            (Poll::Ready(ended), None) => Poll::Ready((ended, None)),
            // The connection is dropped after this poll, so the client is answered within it.
            (Poll::Pending, None) if admission.is_evicted() => Poll::Ready((Ok(()), None)),
            (Poll::Pending, None) => Poll::Pending,
        }
    })
    .await;
    let parts = connection.into_parts();
    let response = parts.io.into_inner().into_inner().1;
    let buffered = parts.read_buf;
    // A client that has sent nothing expects no answer, perhaps not even HTTP.
    let evicted = admission.is_evicted() && !read.is_empty();
    let status = automatic_response(&response).or(evicted.then_some(StatusCode::SERVICE_UNAVAILABLE));
    let rejected = status.map(|status| bad_head(status, &buffered, HEAD_BYTES, HEAD_FIELDS, INVALID));
    match (ended, request) {
        (_, Some(request)) => {
            let head = request.into_parts().0;
            let version = head.version;
            let trace = trace_of(&head.headers);
            Ok(ConnectHead { version, trace, request: parse(head), buffered })
        }
        (Ok(()), None) => Err(BadHead { reason: "header_missing", rejected }),
        (Err(_), None) if reject_ssh(socket, &read).await => Err(BadHead { reason: SSH, rejected: None }),
        (Err(error), None) => {
            // hyper has rejected the target, but not said why. This program names the error, and in the version that
            // the client uses.
            if let Some((version, wrong)) = malformed_target(&read) {
                let trace = new_trace();
                let request = Err(wrong.into());
                return Ok(ConnectHead { version, trace, request, buffered: Bytes::new() });
            }
            reject_http2(socket, &read).await;
            Err(BadHead { reason: header_failure(&error), rejected })
        }
    }
}

/// Returns the error of a CONNECT request whose target hyper rejects as an invalid URI.
fn malformed_target(head: &[u8]) -> Option<(Version, NameError)> {
    let line = str::from_utf8(head.split(|byte| *byte == b'\n').next()?).ok()?;
    let target = line.strip_prefix("CONNECT ")?.trim_end_matches('\r');
    let (target, version) = match target.strip_suffix(" HTTP/1.1") {
        Some(target) => (target, Version::HTTP_11),
        None => (target.strip_suffix(" HTTP/1.0")?, Version::HTTP_10),
    };
    if target.contains(' ') {
        return None;
    }
    Some((version, target.parse::<Target>().err()?))
}

/// Returns the 200 response exactly as SuperEdge writes it. It is short because some clients read only a line or two.
fn established(version: Version) -> Bytes {
    format!("{version:?} 200 Connection established\r\n\r\n").into()
}

/// Returns the open request that a head contains.
///
/// # Errors
///
/// Returns a denial if the head is not a CONNECT request to a target.
pub(crate) fn parse(head: Parts) -> Result<OpenRequest, Denial> {
    if head.method != Method::CONNECT {
        return Err(Denial::Method);
    }
    if has_body(&head.headers) {
        return Err(Denial::Body);
    }
    Ok(OpenRequest { node: None, target: target(&head)?, credentials: head.headers })
}

/// Returns the target of the request line. The Host header is ignored: it may be absent, wrong, or name the proxy.
fn target(head: &Parts) -> Result<Target, NameError> {
    let requested = head.uri.to_string();
    let plain = head.uri.scheme().is_none() && head.uri.path_and_query().is_none();
    match head.uri.authority() {
        Some(authority) if plain => authority.as_str().parse(),
        // An absolute URL is not a target: its text has no port at its end.
        _ => Err(NameError::Port(requested.chars().take(MAX_EXCERPT).collect())),
    }
}

/// Returns true if a head announces a body. This is refused, because bytes after CONNECT belong to the session.
fn has_body(head: &HeaderMap) -> bool {
    let long = |length: &HeaderValue| length.as_bytes() != b"0";
    head.contains_key(TRANSFER_ENCODING) || head.get_all(CONTENT_LENGTH).iter().any(long)
}

/// Maximum number of bytes of a head that are kept a second time: a request line with the longest target fits.
const MAX_CAPTURED: usize = 1024;

/// Maximum number of characters of a bad target that the error contains.
const MAX_EXCERPT: usize = 64;

/// Said of a head that is no HTTP.
const INVALID: &str =
    "no valid HTTP request; SOCKS and TLS have other ports, and an IPv6 address needs brackets: [fd00::1]:22";

#[cfg(test)]
mod tests;

#[cfg(test)]
mod head_tests;
