//! HTTP/1.1 on a client's connection: authorizes each request and forwards it over a session to its destination.
//!
//! A session belongs to one client connection, so that access logs, rules and identities remain exact. It is reused for
//! following requests with the same route. Bodies are streamed; after an upgrade both streams carry raw bytes.

pub mod idle_timer;
pub mod long_url;
pub mod message;
pub mod upstream;

use std::convert::Infallible;
use std::future::poll_fn;
use std::io;
use std::pin::{Pin, pin};
use std::sync::Arc;
use std::task::{Context, Poll, ready};

use bytes::Bytes;
use futures_util::FutureExt as _;
use http::header::{CONNECTION, UPGRADE};
use http::request::Parts;
use http::{HeaderValue, Method, Request, Response, StatusCode, Version};
use http_body::Body as _;
use http_body_util::Full;
use hyper::body::Incoming;
use hyper::client::conn::http1::SendRequest;
use hyper::server::conn::http1;
use hyper::service::service_fn;
use hyper_util::rt::TokioIo;
use parking_lot::Mutex;
use tokio::io::{AsyncRead, AsyncWrite, AsyncWriteExt as _, ReadBuf};
use tokio::time::{Instant, sleep_until, timeout, timeout_at};
use tokio_rustls::rustls::ClientConfig;
use tracing::debug;

use crate::listener::admission::heads::{HEAD_BYTES, HEAD_FIELDS, LONG_HEAD_BYTES, LONG_HEAD_FIELDS};
use crate::listener::admission::{
    Admission, AuthorizedRequest, DeniedRequest, GrantedSession, HEAD_TIME, HandshakeOutcome, ListenerContext,
};
use crate::listener::denial::{Denial, automatic_response, bad_head, header_failure, reject_http2, written};
use crate::listener::forward::idle_timer::{Deadline, IdleTimer};
use crate::listener::forward::long_url::shorten;
use crate::listener::forward::message::{ContinueGate, RequestBody, ResponseBody, ResponseSource};
use crate::listener::forward::upstream::{InformationalLimit, Upstream, UpstreamError};
use crate::listener::requests::{ParseRequest, RequestRoute, RequestRouter};
use crate::session_io::copy::wait_acknowledged;
use tunnel_base::drain::Drain;
use tunnel_base::metrics::{InFlightGuard, InFlightRequests};
use tunnel_net::keepalive::LossDetector;
use tunnel_net::limiter::Source;
use tunnel_net::reload::Reload;
use tunnel_net::socket::{Connection, Socket};
use tunnel_proto::frame::{ErrorCode, SessionError};

/// Serves a client's requests until the client disconnects or is idle for too long, draining starts, or client and
/// target switch to another protocol.
///
/// After a switch, the session is returned. `tls` and `parse` are as in [`RequestRouter::new`]. Not cancel safe:
/// dropping the future aborts the request in flight.
pub(crate) async fn forward<C: Connection>(
    socket: C,
    admission: &mut Admission,
    tls: Option<Reload<ClientConfig>>,
    parse: &ParseRequest<'_>,
) -> HandshakeOutcome<C> {
    socket.set_reset_on_drop(true);
    let (context, source) = (Arc::clone(admission.context()), Source::of(admission.from().ip()));
    let clock = Arc::new(IdleTimer::new());
    let router = RequestRouter::new(admission, tls, parse);
    let exchange = Exchange::new(router, Arc::clone(&clock), &context, source);
    let io = ClientIo::new(socket, Arc::clone(&clock));
    let mut served = serve(io, server(), &exchange, &context.drain).await;
    if served.rejected == Some(StatusCode::REQUEST_HEADER_FIELDS_TOO_LARGE) {
        // Most heads are short, so the connection of a long one is parsed again, with more memory, and not reused.
        match context.long_heads.try_acquire(&source) {
            Ok(_permit) => {
                let FinishedClient { mut socket, buffered, .. } = served;
                let until = clock.deadline(false).map_or_else(Instant::now, Deadline::at);
                let Ok(Ok((ahead, url_end))) = timeout_at(until, shorten(&mut socket, buffered)).await else {
                    return HandshakeOutcome::Failed { reason: "header_timeout", socket: Some(socket) };
                };
                *exchange.url_end.lock() = url_end;
                let io = ClientIo { ahead, ..ClientIo::new(socket, clock) };
                served = serve(io, long_server(), &exchange, &context.drain).await;
                let limits = (LONG_HEAD_BYTES, LONG_HEAD_FIELDS);
                return finish(served, exchange, limits, &context).await;
            }
            Err(_) => return refuse(served, exchange, Denial::Busy(TOO_MANY_LONG_HEADS)).await,
        }
    }
    finish(served, exchange, (HEAD_BYTES, HEAD_FIELDS), &context).await
}

/// A client's connection that is no longer served, with the unread bytes.
struct FinishedClient<C> {
    ended: ServeEnd,
    socket: C,
    buffered: Bytes,
    /// The status of hyper's own response to the last head, which was withheld.
    rejected: Option<StatusCode>,
}

/// Serves requests with one configuration of hyper's server.
async fn serve<C: Connection>(
    io: ClientIo<C>,
    server: http1::Builder,
    exchange: &Exchange<'_>,
    drain: &Drain,
) -> FinishedClient<C> {
    let clock = Arc::clone(&io.clock);
    let answer = |request| -> ResponseFuture<'_> { Box::pin(exchange.answer(request)) };
    let mut connection = server.serve_connection(TokioIo::new(io), service_fn(answer));
    let mut draining = pin!(drain.draining());
    let mut silence = pin!(sleep_until(Instant::now()));
    let mut leaving = false;
    let ended = poll_fn(|cx| {
        if !leaving && draining.as_mut().poll(cx).is_ready() {
            leaving = true;
            Pin::new(&mut connection).graceful_shutdown();
        }
        let served = connection.poll_without_shutdown(cx);
        if exchange.poll(cx).is_ready() {
            return Poll::Ready(ServeEnd::Gone);
        }
        if let Poll::Ready(ended) = served {
            return Poll::Ready(ServeEnd::Hyper(ended));
        }
        if clock.is_lost() {
            return Poll::Ready(ServeEnd::Gone);
        }
        let Some(deadline) = clock.deadline(leaving) else { return Poll::Pending };
        if silence.deadline() != deadline.at() {
            silence.as_mut().reset(deadline.at());
        }
        match (silence.as_mut().poll(cx), deadline) {
            (Poll::Ready(()), Deadline::Head(_)) => return Poll::Ready(ServeEnd::TooSlow),
            (Poll::Ready(()), Deadline::Answer(_) | Deadline::Body(_)) => return Poll::Ready(ServeEnd::Gone),
            (Poll::Ready(()), Deadline::Request(_)) => {
                leaving = true;
                Pin::new(&mut connection).graceful_shutdown();
                cx.waker().wake_by_ref();
            }
            (Poll::Pending, _) => {}
        }
        Poll::Pending
    })
    .await;
    let parts = connection.into_parts();
    let io = parts.io.into_inner();
    let rejected = io.rejected;
    let (socket, buffered) = io.into_parts(parts.read_buf);
    FinishedClient { ended, socket, buffered, rejected }
}

type ResponseFuture<'a> =
    Pin<Box<dyn Future<Output = Result<Response<ResponseBody>, Infallible>> + Send + 'a>>;

/// Returns the outcome of serving a client, with its connection if that is still open. `limits` are those of a head:
/// bytes, and fields.
async fn finish<C: Connection>(
    served: FinishedClient<C>,
    exchange: Exchange<'_>,
    limits: (usize, usize),
    context: &ListenerContext,
) -> HandshakeOutcome<C> {
    if let Some(status) = served.rejected {
        return refuse(served, exchange, bad_head(status, limits.0, limits.1)).await;
    }
    let FinishedClient { ended, mut socket, buffered, .. } = served;
    let error = match (ended, exchange.end()) {
        (ServeEnd::Hyper(Ok(())), Some(session)) => {
            return HandshakeOutcome::Opened { session, socket, buffered };
        }
        (ended, switched) => {
            if let Some(opened) = switched {
                let why = "the client's connection failed: it did not read the response";
                opened.break_off("client_io_error", SessionError::new(ErrorCode::ConnectionFailed, why));
            }
            match ended {
                ServeEnd::Hyper(ended) => ended.err(),
                ServeEnd::TooSlow => {
                    socket.set_reset_on_drop(false);
                    return HandshakeOutcome::Failed { reason: "header_timeout", socket: Some(socket) };
                }
                ServeEnd::Gone => return HandshakeOutcome::Failed { reason: "reset", socket: None },
            }
        }
    };
    if error.as_ref().is_some_and(hyper::Error::is_user) {
        // A truncated response must not look complete.
        wait_acknowledged(&mut Socket::new(socket, context.pool.clone())).await;
        return HandshakeOutcome::Closed(None);
    }
    reject_http2(&mut socket, &buffered).await;
    socket.set_reset_on_drop(false);
    match error {
        Some(error) => HandshakeOutcome::Failed { reason: header_failure(&error), socket: Some(socket) },
        None => HandshakeOutcome::Closed(Some(socket)),
    }
}

/// Responds to a head that cannot be parsed.
async fn refuse<C: Connection>(
    served: FinishedClient<C>,
    exchange: Exchange<'_>,
    denial: Denial,
) -> HandshakeOutcome<C> {
    let FinishedClient { ended, mut socket, .. } = served;
    let reason = match &ended {
        ServeEnd::Hyper(Err(error)) => header_failure(error),
        _ => "reset",
    };
    let denied = exchange.router.lock().await.deny(denial).await;
    exchange.end();
    let answer = written(Version::HTTP_11, &denied.answer());
    socket.set_reset_on_drop(false);
    let sent = async { socket.write_all(&answer).await.is_ok() && socket.flush().await.is_ok() };
    let socket = if timeout(HEAD_TIME, sent).await == Ok(true) { Some(socket) } else { None };
    HandshakeOutcome::Failed { reason, socket }
}

/// The reason why serving a client ended.
enum ServeEnd {
    /// hyper returned this result.
    Hyper(hyper::Result<()>),
    /// The rest of a head was not received in time.
    TooSlow,
    /// The client disconnected, stopped sending its request or reading its response, or may no longer be served.
    Gone,
}

fn server() -> http1::Builder {
    let mut server = http1::Builder::new();
    server
        .preserve_header_case(true)
        .max_headers(HEAD_FIELDS)
        .max_header_size(HEAD_BYTES)
        .max_buf_size(HEAD_BYTES)
        .auto_date_header(false)
        .half_close(true);
    server
}

/// Returns the configuration for one request with a long head.
fn long_server() -> http1::Builder {
    let mut server = server();
    server
        .max_headers(LONG_HEAD_FIELDS)
        .max_header_size(LONG_HEAD_BYTES)
        .max_buf_size(LONG_HEAD_BYTES)
        .keep_alive(false);
    server
}

const TOO_MANY_LONG_HEADS: &str = "too many requests and responses with long heads at once";

// A client's requests: each is forwarded to the target, and its response back, before the next.

/// The forwarding of a client's requests, one at a time.
pub(crate) struct Exchange<'a> {
    router: tokio::sync::Mutex<RequestRouter<'a>>,
    upstream: Upstream,
    /// The session after a switch to another protocol.
    switched: Mutex<Option<GrantedSession>>,
    clock: Arc<IdleTimer>,
    requests: InFlightRequests,
    /// The end of the next request's URL, if hyper cannot represent all of it.
    url_end: Mutex<Option<Bytes>>,
}

impl<'a> Exchange<'a> {
    pub(crate) fn new(
        router: RequestRouter<'a>,
        clock: Arc<IdleTimer>,
        context: &ListenerContext,
        source: Source,
    ) -> Self {
        let upstream = Upstream::new(context, source);
        let (router, requests) = (tokio::sync::Mutex::new(router), context.metrics.requests.clone());
        let (switched, url_end) = (Mutex::new(None), Mutex::new(None));
        Self { router, upstream, switched, clock, requests, url_end }
    }

    /// Drives the session, and notifies the router once a response is complete. Must be called after each poll of
    /// hyper's server. Completes once the client may no longer be served.
    pub(crate) fn poll(&self, cx: &mut Context<'_>) -> Poll<()> {
        self.upstream.poll(cx);
        if self.clock.take_requested() {
            // Have hyper's server polled again, so that it detects the end of the client's stream.
            cx.waker().wake_by_ref();
        }
        if self.clock.take_answered()
            && let Ok(router) = self.router.try_lock()
        {
            router.answered();
        }
        self.upstream.poll_revoked(cx)
    }

    /// Ends the session, if there is one. A session that switched to another protocol is returned instead.
    pub(crate) fn end(self) -> Option<GrantedSession> {
        self.upstream.close();
        self.switched.into_inner()
    }

    pub(crate) async fn answer(
        &self,
        request: Request<Incoming>,
    ) -> Result<Response<ResponseBody>, Infallible> {
        let (head, body) = request.into_parts();
        // A denied request with a body keeps `Connection: close`; otherwise hyper would have to read the whole body.
        let has_body = !body.is_end_stream();
        self.clock.on_head(has_body);
        let request = self.requests.start(head.method.as_str(), head.uri.path());
        let answer = match self.forward(head, body, request).await {
            Ok(answer) => answer,
            Err(denied) => {
                let mut answer = denied.answer();
                if !has_body {
                    answer.headers_mut().remove(CONNECTION);
                }
                answer
                    .map(|body| ResponseBody::new(ResponseSource::Own(body.into()), Arc::clone(&self.clock)))
            }
        };
        self.clock.on_response_part();
        debug!(status = answer.status().as_u16(), "response sent");
        Ok(answer)
    }

    async fn forward(
        &self,
        mut head: Parts,
        body: Incoming,
        under_way: InFlightGuard,
    ) -> Result<Response<ResponseBody>, DeniedRequest> {
        let mut router = self.router.lock().await;
        let authorized = match message::check(&mut head) {
            Ok(()) => router.route(Ok(&head)).await?,
            Err(denial) => router.route(Err(denial)).await?,
        };
        let route = RequestRoute::of(&authorized);
        let (method, version) = (head.method.clone(), head.version);
        let upgrades = message::prepare_request(&mut head, &body);
        let waits = version == Version::HTTP_11 && message::expects_continue(&head.headers);
        let continue_gate = (waits && !body.is_end_stream()).then(Arc::<ContinueGate>::default);
        let mut request =
            Request::from_parts(head, RequestBody::new(body, Arc::clone(&self.clock), continue_gate.clone()));
        let informational = Arc::new(InformationalLimit::default());
        let (counted, gate) = (Arc::clone(&informational), continue_gate.clone());
        let clock = (version == Version::HTTP_11).then(|| Arc::clone(&self.clock));
        hyper::ext::on_informational(&mut request, move |answer| {
            counted.count();
            match answer.status() {
                StatusCode::CONTINUE => gate.iter().for_each(|continue_gate| continue_gate.on_continue()),
                status => {
                    clock
                        .iter()
                        .for_each(|clock| clock.add_interim(&message::add_interim(status, answer.headers())));
                }
            }
        });
        let (sender, answer) = self.send(&router, &route, authorized, request, &informational).await?;
        if answer.status() == StatusCode::SWITCHING_PROTOCOLS {
            let switched = self.switch(answer, upgrades, under_way).await;
            return switched.map_err(|denial| router.failed(denial));
        }
        let (mut head, body) = answer.into_parts();
        // After a response in HTTP/1.0, hyper would not know how to send the next request's body.
        let reusable = head.version == Version::HTTP_11;
        let last = continue_gate
            .as_ref()
            .is_some_and(|continue_gate| continue_gate.answered(head.status.is_success()));
        self.upstream.keep((reusable && !last).then_some(route), sender);
        if let Err(why) = message::prepare_response(&mut head, &body, &method) {
            self.upstream.close();
            return Err(router.failed(Denial::UpstreamFailed(why.to_owned())));
        }
        if last {
            head.headers.insert(CONNECTION, HeaderValue::from_static("close"));
        }
        let body = ResponseBody::of_target(body, Arc::clone(&self.clock), continue_gate, under_way);
        Ok(Response::from_parts(head, body))
    }

    /// Sends a request over the current session or a new one.
    ///
    /// The target may close a reused session at the same time. Then the request is sent again if it is idempotent or
    /// was not sent.
    async fn send(
        &self,
        router: &RequestRouter<'a>,
        route: &RequestRoute,
        authorized: AuthorizedRequest,
        mut request: Request<RequestBody>,
        informational: &Arc<InformationalLimit>,
    ) -> Result<(SendRequest<RequestBody>, Response<Incoming>), DeniedRequest> {
        let url_end = self.url_end.lock().take();
        let mut kept = self.upstream.reuse(route).await;
        if url_end.is_some() {
            kept = None;
            self.upstream.close();
        }
        if let Some(mut sender) = kept {
            let again = self.retry_copy(&request);
            request = match (self.upstream.send(&mut sender, request, informational).await, again) {
                (Ok(answer), _) => return Ok((sender, answer)),
                (Err(UpstreamError::Unsent(unsent)), _) => *unsent,
                (Err(UpstreamError::Silence(_)), Some(again)) => again,
                (Err(error), _) => return Err(router.failed(error.into())),
            };
        }
        let opened = router.open(authorized).await?;
        let started = self.upstream.start(opened, url_end).await;
        let mut sender = started.map_err(|error| router.failed(Denial::UpstreamFailed(error.to_string())))?;
        match self.upstream.send(&mut sender, request, informational).await {
            Ok(answer) => Ok((sender, answer)),
            Err(error) => Err(router.failed(error.into())),
        }
    }

    /// Takes the session from hyper, because the following bytes are not HTTP.
    async fn switch(
        &self,
        answer: Response<Incoming>,
        requested: bool,
        request: InFlightGuard,
    ) -> Result<Response<ResponseBody>, Denial> {
        let (mut head, body) = answer.into_parts();
        let opened = self.upstream.switch().await;
        let Some(mut opened) = opened else {
            return Err(Denial::UpstreamFailed("the session has ended".to_owned()));
        };
        if !requested {
            let why = "it switched to another protocol without a request";
            opened.break_off("upstream_invalid", SessionError::new(ErrorCode::Cancelled, why));
            return Err(Denial::UpstreamFailed(why.to_owned()));
        }
        message::prepare_response(&mut head, &body, &Method::GET)
            .map_err(|why| Denial::UpstreamFailed(why.to_owned()))?;
        opened.alive.hold_request(request);
        *self.switched.lock() = Some(opened);
        let body = ResponseBody::new(ResponseSource::Own(Full::default()), Arc::clone(&self.clock));
        Ok(Response::from_parts(head, body))
    }

    /// Returns a copy of a request that the target may receive twice, or `None` (RFC 9110, section 9.2.2).
    ///
    /// An upgrade request is never repeated, because its method does not show its effect: `kubectl exec` uses GET.
    fn retry_copy(&self, request: &Request<RequestBody>) -> Option<Request<RequestBody>> {
        let upgrades = request.headers().contains_key(UPGRADE);
        if upgrades || !request.method().is_idempotent() || !request.body().is_end_stream() {
            return None;
        }
        let mut copy = Request::new(RequestBody::empty(Arc::clone(&self.clock)));
        *copy.method_mut() = request.method().clone();
        *copy.uri_mut() = request.uri().clone();
        *copy.headers_mut() = request.headers().clone();
        *copy.extensions_mut() = request.extensions().clone();
        Some(copy)
    }
}

// A client's connection as hyper requires it, which detects the client's disconnection while a response is pending.

/// A client's connection, which updates the idle timer.
///
/// While a response is pending, hyper reads nothing but flushes each time it is polled, so the flush reads ahead.
#[derive(Debug)]
pub(crate) struct ClientIo<C> {
    io: C,
    clock: Arc<IdleTimer>,
    /// Bytes read ahead. Until hyper has consumed them, nothing more is read.
    ahead: Bytes,
    /// Whether the client may still be reading, once it has closed its write half.
    ended: Option<bool>,
    loss: LossDetector,
    /// The status of hyper's own response to a head that it cannot parse. It is withheld, because it has no text.
    rejected: Option<StatusCode>,
    /// Whether a part of the last write is still to be written, so that nothing may come between.
    is_within_write: bool,
    /// The rest of an interim response that was written in part.
    interim: Vec<u8>,
}

impl<C: Connection> ClientIo<C> {
    pub(crate) fn new(io: C, clock: Arc<IdleTimer>) -> Self {
        let (ahead, interim, loss) = (Bytes::new(), Vec::new(), LossDetector::default());
        Self { io, clock, ahead, ended: None, loss, rejected: None, is_within_write: false, interim }
    }

    /// Returns true for hyper's own response to a bad head, and records its status.
    fn suppress_automatic_response(&mut self, bytes: &[u8]) -> bool {
        let status = if self.clock.is_in_head() { automatic_response(bytes) } else { None };
        self.rejected = self.rejected.or(status);
        status.is_some()
    }

    /// Returns the connection, and the bytes read from it: `buffered`, followed by those read ahead.
    pub(crate) fn into_parts(self, buffered: Bytes) -> (C, Bytes) {
        let buffered = if self.ahead.is_empty() { buffered } else { [buffered, self.ahead].concat().into() };
        (self.io, buffered)
    }

    /// Records the outcome of a write of `length` bytes. A pending write is progress: the client is slow, but it is
    /// connected unless it is noticed as lost.
    fn note(
        &mut self,
        written: Poll<io::Result<usize>>,
        length: usize,
        cx: &mut Context<'_>,
    ) -> Poll<io::Result<usize>> {
        self.loss.on_write();
        if written.is_pending() {
            self.clock.on_response_part();
            self.check(cx);
        }
        self.is_within_write = !matches!(&written, Poll::Ready(Ok(count)) if *count == length);
        written
    }

    /// Checks whether the client is lost. hyper flushes or writes each time it is polled, and may read nothing for long.
    fn check(&mut self, cx: &mut Context<'_>) {
        let Self { io, loss, .. } = self;
        if loss.poll(cx, io.tcp(), || io.remote_reset().now_or_never().is_some()).is_ready() {
            self.clock.lost();
        }
    }

    fn poll_read_io(&mut self, cx: &mut Context<'_>, out: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        let read = Pin::new(&mut self.io).poll_read(cx, out);
        self.loss.on_read(&read);
        read
    }

    /// Writes the target's interim responses, unless hyper is in the middle of a write.
    fn poll_interim(&mut self, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        if self.interim.is_empty() && !self.is_within_write {
            self.interim = self.clock.take_interim();
        }
        while !self.interim.is_empty() {
            let written = Pin::new(&mut self.io).poll_write(cx, &self.interim);
            match ready!(self.note(written, self.interim.len(), cx))? {
                0 => return Poll::Ready(Err(io::ErrorKind::WriteZero.into())),
                count => drop(self.interim.drain(..count)),
            }
        }
        Poll::Ready(Ok(()))
    }

    fn watch(&mut self, cx: &mut Context<'_>) {
        let mut space = [0; READ_AHEAD_BYTES];
        let mut room = ReadBuf::new(&mut space);
        if self.ended.is_none()
            && let Poll::Ready(read) = self.poll_read_io(cx, &mut room)
        {
            self.ahead = Bytes::copy_from_slice(room.filled());
            self.ended = self.ahead.is_empty().then(|| read.is_ok() && self.io.may_half_close());
        }
        if let Some(reads) = self.ended {
            self.clock.finished(reads);
        }
    }
}

impl<C: Connection> AsyncRead for ClientIo<C> {
    fn poll_read(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        out: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        let before = out.filled().len();
        if self.ahead.is_empty() {
            ready!(self.poll_read_io(cx, out))?;
        } else {
            let fits = self.ahead.len().min(out.remaining());
            out.put_slice(&self.ahead.split_to(fits));
        }
        if out.filled().len() > before {
            self.clock.on_received();
        }
        Poll::Ready(Ok(()))
    }
}

impl<C: Connection> AsyncWrite for ClientIo<C> {
    fn poll_write(mut self: Pin<&mut Self>, cx: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        if self.suppress_automatic_response(bytes) {
            return Poll::Ready(Ok(bytes.len()));
        }
        ready!(self.poll_interim(cx))?;
        let written = Pin::new(&mut self.io).poll_write(cx, bytes);
        self.note(written, bytes.len(), cx)
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        pieces: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        if let [only] = pieces
            && self.suppress_automatic_response(only)
        {
            return Poll::Ready(Ok(only.len()));
        }
        ready!(self.poll_interim(cx))?;
        let written = Pin::new(&mut self.io).poll_write_vectored(cx, pieces);
        self.note(written, pieces.iter().map(|piece| piece.len()).sum(), cx)
    }

    fn is_write_vectored(&self) -> bool {
        self.io.is_write_vectored()
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        if self.clock.is_answering() && self.ahead.is_empty() {
            self.watch(cx);
        }
        self.check(cx);
        ready!(self.poll_interim(cx))?;
        Pin::new(&mut self.io).poll_flush(cx)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.io).poll_shutdown(cx)
    }
}

/// Maximum number of bytes to read ahead. Usually there are none.
const READ_AHEAD_BYTES: usize = 1024;

#[cfg(test)]
mod tests;
