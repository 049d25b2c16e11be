//! Forwarded heads and bodies of requests and responses. A request's body may have to wait for the target's 100.

use std::error::Error;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, Waker, ready};
use std::time::Duration;

use bytes::Bytes;
use http::header::{
    CONNECTION, CONTENT_LENGTH, EXPECT, Entry, HOST, HeaderMap, HeaderName, HeaderValue, PROXY_AUTHORIZATION,
    TE, TRANSFER_ENCODING, UPGRADE,
};
use http::uri::{Authority, PathAndQuery, Scheme};
use http::{Method, StatusCode, Uri, Version, request, response};
use http_body::{Body, Frame, SizeHint};
use http_body_util::Full;
use hyper::body::Incoming;
use parking_lot::Mutex;
use tokio::time::{Sleep, sleep};

use crate::listener::denial::Denial;
use crate::listener::forward::idle_timer::IdleTimer;
use tunnel_base::metrics::InFlightGuard;

/// A request's body that is forwarded to the target.
///
/// hyper sends 100 (Continue) to the client when the body is first polled. If the client waits for that, the body is
/// not polled until the target has sent a 100, or nothing for [`CONTINUE_TIME`].
pub(crate) struct RequestBody {
    /// The client's body. `None` means empty.
    body: Option<Incoming>,
    awaited: Option<ContinueWait>,
    clock: Arc<IdleTimer>,
}

/// State of waiting for the target's 100 before the body is polled.
struct ContinueWait {
    /// Decision that is waited for.
    continue_gate: Arc<ContinueGate>,
    /// Timeout that ends [`CONTINUE_TIME`] after hyper has first polled the body.
    silence: Option<Pin<Box<Sleep>>>,
}

/// The target's decision about the body of a request with `Expect: 100-continue`.
#[derive(Debug, Default)]
pub(crate) struct ContinueGate(Mutex<(ContinueState, Option<Waker>)>);

/// What is known of the target's wish for the body of a request with `Expect: 100-continue`.
#[derive(Debug, Default, Clone, Copy, PartialEq, Eq)]
enum ContinueState {
    /// The target has not responded yet.
    #[default]
    Unknown,
    /// The body is sent: the target sent a 100 or a final success, or nothing for [`CONTINUE_TIME`].
    Yes,
    /// The target responded without reading the body, and the response is being forwarded.
    Held,
    /// The body is dropped: the response that did not want it has ended.
    No,
}

/// The error of a request body that is dropped: the client waited for 100 (Continue), and the target responded
/// without sending one.
#[derive(Debug, thiserror::Error)]
#[error("the target did not request the body")]
pub(crate) struct BodyNotWanted;

/// A response's body that is sent to the client: the target's, or one of this process.
pub(crate) struct ResponseBody {
    body: ResponseSource,
    clock: Arc<IdleTimer>,
    /// Gate of the request's body, closed when this body is dropped; `None` without one.
    continue_gate: Option<Arc<ContinueGate>>,
    /// The guard of the request, which ends with the response.
    _request: Option<InFlightGuard>,
}

/// The origin of a [`ResponseBody`].
pub(crate) enum ResponseSource {
    /// The target's body, read from its session.
    Target(Incoming),
    /// A body of this process, such as an error text.
    Own(Full<Bytes>),
}

impl RequestBody {
    /// Creates the body of a request. `continue_gate` decides when the body may be polled, if the client waits for a 100.
    pub(crate) fn new(
        body: Incoming,
        clock: Arc<IdleTimer>,
        continue_gate: Option<Arc<ContinueGate>>,
    ) -> Self {
        Self {
            body: Some(body),
            awaited: continue_gate.map(|continue_gate| ContinueWait { continue_gate, silence: None }),
            clock,
        }
    }

    /// Returns the timer of the client.
    pub(crate) fn clock(&self) -> &Arc<IdleTimer> {
        &self.clock
    }

    /// Creates the body of a request without one.
    pub(crate) fn empty(clock: Arc<IdleTimer>) -> Self {
        Self { body: None, awaited: None, clock }
    }

    fn poll_continue(&mut self, cx: &mut Context<'_>) -> Poll<Result<(), BodyNotWanted>> {
        let Some(ContinueWait { continue_gate, silence }) = &mut self.awaited else {
            return Poll::Ready(Ok(()));
        };
        let verdict = continue_gate.poll(cx);
        if verdict == ContinueState::Unknown {
            let silence = silence.get_or_insert_with(|| Box::pin(sleep(CONTINUE_TIME)));
            ready!(silence.as_mut().poll(cx));
            continue_gate.decide(ContinueState::Yes);
        }
        match verdict {
            ContinueState::Held => return Poll::Pending,
            ContinueState::No => return Poll::Ready(Err(BodyNotWanted)),
            ContinueState::Unknown | ContinueState::Yes => self.awaited = None,
        }
        Poll::Ready(Ok(()))
    }
}

impl Body for RequestBody {
    type Data = Bytes;
    type Error = Box<dyn Error + Send + Sync>;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, Self::Error>>> {
        if let Err(refused) = ready!(self.poll_continue(cx)) {
            return Poll::Ready(Some(Err(refused.into())));
        }
        match &mut self.body {
            Some(body) => {
                let frame = Pin::new(body).poll_frame(cx);
                self.clock.on_body_polled(frame.is_pending());
                let passed = |mut frame: Frame<Bytes>| {
                    if let Some(trailers) = frame.trailers_mut() {
                        PreservedHeaders { upgrade: false, trailers: false }.leave(trailers);
                        remove_tunnel_headers(trailers);
                    }
                    frame
                };
                frame.map_ok(passed).map_err(Into::into)
            }
            None => Poll::Ready(None),
        }
    }

    fn is_end_stream(&self) -> bool {
        self.body.as_ref().is_none_or(Body::is_end_stream)
    }

    fn size_hint(&self) -> SizeHint {
        self.body.as_ref().map_or_else(|| SizeHint::with_exact(0), Body::size_hint)
    }
}

impl Drop for RequestBody {
    fn drop(&mut self) {
        self.clock.on_body_end();
    }
}

impl ContinueGate {
    /// Records that the target has sent a 100.
    pub(crate) fn on_continue(&self) {
        self.decide(ContinueState::Yes);
    }

    /// Records the target's response. Returns true if the body is not forwarded, because the target had not requested
    /// it before; the response is then the last one on its connection.
    pub(crate) fn answered(&self, success: bool) -> bool {
        self.decide(if success { ContinueState::Yes } else { ContinueState::Held });
        self.0.lock().0 == ContinueState::Held
    }

    fn poll(&self, cx: &Context<'_>) -> ContinueState {
        let mut inner = self.0.lock();
        inner.1 = Some(cx.waker().clone());
        inner.0
    }

    /// Sets the decision once. Later only `Held` can change, to `No`.
    fn decide(&self, verdict: ContinueState) {
        let waker = {
            let mut inner = self.0.lock();
            let given_up = (inner.0, verdict) == (ContinueState::Held, ContinueState::No);
            if inner.0 != ContinueState::Unknown && !given_up {
                return;
            }
            inner.0 = verdict;
            inner.1.take()
        };
        if let Some(waker) = waker {
            waker.wake();
        }
    }
}

impl ResponseBody {
    /// Creates the body of a response. When it is dropped, the client's idle time starts, and a body that the target
    /// has not requested is discarded.
    pub(crate) fn new(body: ResponseSource, clock: Arc<IdleTimer>) -> Self {
        Self { body, clock, continue_gate: None, _request: None }
    }

    /// Creates the body of a target's response. `continue_gate` is the gate of the request's body; `request` is in flight
    /// until the response is dropped.
    pub(crate) fn of_target(
        body: Incoming,
        clock: Arc<IdleTimer>,
        continue_gate: Option<Arc<ContinueGate>>,
        request: InFlightGuard,
    ) -> Self {
        Self { body: ResponseSource::Target(body), clock, continue_gate, _request: Some(request) }
    }
}

impl Body for ResponseBody {
    type Data = Bytes;
    type Error = hyper::Error;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, hyper::Error>>> {
        match &mut self.body {
            ResponseSource::Target(body) => {
                let frame = ready!(Pin::new(body).poll_frame(cx));
                self.clock.on_response_part();
                Poll::Ready(frame)
            }
            ResponseSource::Own(body) => Pin::new(body).poll_frame(cx).map_err(|never| match never {}),
        }
    }

    fn is_end_stream(&self) -> bool {
        match &self.body {
            ResponseSource::Target(body) => body.is_end_stream(),
            ResponseSource::Own(body) => body.is_end_stream(),
        }
    }

    fn size_hint(&self) -> SizeHint {
        match &self.body {
            ResponseSource::Target(body) => body.size_hint(),
            ResponseSource::Own(body) => body.size_hint(),
        }
    }
}

impl Drop for ResponseBody {
    fn drop(&mut self) {
        self.clock.idle();
        if let Some(continue_gate) = &self.continue_gate {
            continue_gate.decide(ContinueState::No);
        }
    }
}

/// Time to wait for the target's 100 before the body is sent anyway: many targets never send one.
const CONTINUE_TIME: Duration = Duration::from_secs(1);

// Headers that belong to one connection only (RFC 9110, section 7.6.1) are not forwarded, nor are a request's headers
// for routing by this process.

/// Checks that a request is unambiguous, and sets its Host header to the host of an absolute URI.
///
/// # Errors
///
/// Returns [`Denial::Request`] with the reason.
pub(crate) fn check(head: &mut request::Parts) -> Result<(), Denial> {
    if head.method == Method::CONNECT {
        return Err(Denial::Request("this port does not serve CONNECT"));
    }
    if head.uri.scheme().is_some_and(|scheme| *scheme != Scheme::HTTP && *scheme != Scheme::HTTPS) {
        return Err(Denial::Request("only http:// and https:// URLs are accepted"));
    }
    check_codings(&head.headers).map_err(Denial::Request)?;
    let mut hosts = head.headers.get_all(HOST).iter();
    let host = match (hosts.next(), hosts.next()) {
        (Some(_), Some(_)) => return Err(Denial::Request("more than one Host header")),
        (Some(host), None) => Some(check_authority(host)?),
        (None, _) => None,
    };
    match (head.uri.scheme(), head.uri.authority(), host) {
        (Some(_), Some(of_uri), _) => {
            let bare = of_uri.as_str().rsplit('@').next().unwrap_or_default();
            let bare = HeaderValue::try_from(bare).map_err(|_| Denial::Request(BAD_HOST))?;
            head.headers.insert(HOST, bare);
        }
        (None, Some(_), _) => return Err(Denial::Request("its target is neither a path nor a full URL")),
        (_, None, None) if head.version == Version::HTTP_11 => {
            return Err(Denial::Request("no Host header"));
        }
        _ => {}
    }
    Ok(())
}

/// Converts a checked head for the target. Returns true if it requests a switch to another protocol.
pub(crate) fn prepare_request(head: &mut request::Parts, body: &impl Body) -> bool {
    let path = head.uri.path_and_query().cloned().unwrap_or_else(|| PathAndQuery::from_static("/"));
    head.uri = Uri::from(path);
    let upgrades = head.version == Version::HTTP_11
        && head.headers.contains_key(UPGRADE)
        && tokens(&head.headers, &CONNECTION).any(|token| token.eq_ignore_ascii_case("upgrade"))
        // With a body, the other protocol would start only after the body's end. A server may ignore the upgrade, so
        // such an upgrade is not forwarded.
        && body.is_end_stream();
    let trailers = tokens(&head.headers, &TE).any(|token| token.eq_ignore_ascii_case("trailers"));
    let host = head.headers.get(HOST).cloned().unwrap_or_else(|| HeaderValue::from_static(""));
    head.version = Version::HTTP_11;
    let kept = PreservedHeaders { upgrade: upgrades, trailers };
    kept.leave(&mut head.headers);
    remove_tunnel_headers(&mut head.headers);
    if let Entry::Vacant(vacant) = head.headers.entry(HOST) {
        vacant.insert(host);
    }
    match body.size_hint().exact() {
        Some(0) => {}
        Some(length) => drop(head.headers.insert(CONTENT_LENGTH, length.into())),
        None => {
            head.headers.remove(CONTENT_LENGTH);
            head.headers.insert(TRANSFER_ENCODING, HeaderValue::from_static("chunked"));
        }
    }
    upgrades
}

/// Removes the headers that are for this process.
fn remove_tunnel_headers(headers: &mut HeaderMap) {
    for name in [PROXY_AUTHORIZATION, TUNNEL_HOST, TUNNEL_DEST] {
        headers.remove(name);
    }
}

/// Converts the head of a target's response for the client; `method` is that of its request.
///
/// # Errors
///
/// Returns the reason why the response cannot be forwarded.
pub(crate) fn prepare_response(
    head: &mut response::Parts,
    body: &impl Body,
    method: &Method,
) -> Result<(), &'static str> {
    check_codings(&head.headers)?;
    let chunked = head.headers.contains_key(TRANSFER_ENCODING);
    let other_protocol =
        matches!(head.status, StatusCode::SWITCHING_PROTOCOLS | StatusCode::UPGRADE_REQUIRED);
    head.version = Version::HTTP_11;
    let kept = PreservedHeaders { upgrade: other_protocol, trailers: false };
    kept.leave(&mut head.headers);
    match body.size_hint().exact() {
        _ if chunked => drop(head.headers.remove(CONTENT_LENGTH)),
        // The length is that of the body in a response to GET.
        _ if method == Method::HEAD => {}
        Some(length) if head.headers.contains_key(CONTENT_LENGTH) => {
            head.headers.insert(CONTENT_LENGTH, length.into());
        }
        _ => {}
    }
    Ok(())
}

/// Returns an interim response (1xx) of a target, as sent to the client.
pub(crate) fn add_interim(status: StatusCode, headers: &HeaderMap) -> Vec<u8> {
    let mut headers = headers.clone();
    PreservedHeaders { upgrade: false, trailers: false }.leave(&mut headers);
    let phrase = status.canonical_reason().unwrap_or_default();
    let mut text = format!("HTTP/1.1 {} {phrase}\r\n", status.as_str()).into_bytes();
    for (name, value) in &headers {
        text.extend_from_slice(&[name.as_str().as_bytes(), b": ", value.as_bytes(), b"\r\n"].concat());
    }
    text.extend_from_slice(b"\r\n");
    text
}

/// Returns true if a client waits for a 100 before it sends its body.
pub(crate) fn expects_continue(headers: &HeaderMap) -> bool {
    headers.get(EXPECT).is_some_and(|what| what.as_bytes().eq_ignore_ascii_case(b"100-continue"))
}

/// The connection-specific headers that are forwarded nevertheless.
struct PreservedHeaders {
    upgrade: bool,
    trailers: bool,
}

impl PreservedHeaders {
    fn leave(&self, headers: &mut HeaderMap) {
        let named: Vec<_> = tokens(headers, &CONNECTION)
            .filter_map(|token| HeaderName::from_bytes(token.as_bytes()).ok())
            .filter(|name| name != UPGRADE && !is_framing(name))
            .collect();
        let own = [CONNECTION, KEEP_ALIVE, PROXY_CONNECTION, TE, TRANSFER_ENCODING];
        for name in own.iter().chain(&named) {
            headers.remove(name);
        }
        if self.upgrade {
            headers.append(CONNECTION, HeaderValue::from_static("Upgrade"));
        } else {
            headers.remove(UPGRADE);
        }
        if self.trailers {
            headers.append(CONNECTION, HeaderValue::from_static("TE"));
            headers.insert(TE, HeaderValue::from_static("trailers"));
        }
    }
}

/// Returns true if a header determines a message's end or host. `Connection` cannot remove such headers.
fn is_framing(name: &HeaderName) -> bool {
    matches!(*name, CONTENT_LENGTH | HOST)
}

/// Checks that a body has no transfer coding except `chunked`, because other codings would be lost here.
fn check_codings(headers: &HeaderMap) -> Result<(), &'static str> {
    let mut codings = headers.get_all(TRANSFER_ENCODING).iter();
    match (codings.next(), codings.next()) {
        (None, _) => Ok(()),
        (Some(coding), None) if coding.as_bytes().eq_ignore_ascii_case(b"chunked") => Ok(()),
        _ => Err("unsupported Transfer-Encoding, expected only `chunked`"),
    }
}

fn check_authority(host: &HeaderValue) -> Result<(), Denial> {
    // Clients send an empty Host header if their URL has no host.
    if host.is_empty() {
        return Ok(());
    }
    match Authority::try_from(host.as_bytes()) {
        Ok(authority) if !authority.as_str().contains('@') => Ok(()),
        _ => Err(Denial::Request(BAD_HOST)),
    }
}

/// Returns the elements of a list header.
fn tokens<'a>(headers: &'a HeaderMap, name: &HeaderName) -> impl Iterator<Item = &'a str> {
    let lines = headers.get_all(name).iter().filter_map(|line| line.to_str().ok());
    lines.flat_map(|line| line.split(',')).map(str::trim).filter(|token| !token.is_empty())
}

/// Header that names a request's node and takes precedence over Host.
pub(crate) const TUNNEL_HOST: HeaderName = HeaderName::from_static("x-tunnel-proxy-host");

/// Header that names the target at the node and replaces Host.
pub(crate) const TUNNEL_DEST: HeaderName = HeaderName::from_static("x-tunnel-proxy-dest");

const BAD_HOST: &str = "Host is not a valid host and port";

const KEEP_ALIVE: HeaderName = HeaderName::from_static("keep-alive");

const PROXY_CONNECTION: HeaderName = HeaderName::from_static("proxy-connection");
