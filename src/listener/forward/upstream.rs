//! The session that carries a client's requests, one after another, and its adapter for hyper.

use std::error::Error;
use std::future::poll_fn;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};
use std::task::{Context, Poll};

use bytes::Bytes;
use http::{Method, Request, Response, StatusCode};
use hyper::body::Incoming;
use hyper::client::conn::http1::{Builder, Connection, SendRequest};
use hyper_util::rt::TokioIo;
use parking_lot::Mutex;
use tokio_util::sync::CancellationToken;
use tracing::Span;

use crate::listener::admission::ListenerContext;
use crate::listener::admission::heads::{HEAD_BYTES, HEAD_FIELDS, LONG_HEAD_BYTES, LONG_HEAD_FIELDS};
use crate::listener::denial::Denial;
use crate::listener::forward::TOO_MANY_LONG_HEADS;
use crate::listener::forward::idle_timer::IdleTimer;
use crate::listener::forward::message::{BodyNotRequested, RequestBody};
use crate::listener::forward::session_connection::{HttpIo, HttpSession, concat};
use crate::listener::requests::RequestRoute;
use crate::session_io::copy::close::close_gracefully;
use crate::session_io::copy::{CopyEnd, EndKind, Side};
use crate::session_io::grants::Grant;
use crate::session_io::{LocalParty, OpenSession};
use tunnel_base::drain::Drain;
use tunnel_base::metrics::Metrics;
use tunnel_net::byte_stream_io::ChunkStreamIo;
use tunnel_net::limiter::{FairLimiter, Permit, Source};
use tunnel_proto::frame::{ErrorCode, SessionError};

/// The current session of a client, if any. The task that serves the client polls it together with hyper's server.
#[derive(Debug)]
pub(crate) struct UpstreamSession {
    inner: Mutex<Inner>,
    metrics: Metrics,
    drain: Drain,
    /// Limiter of responses with a long head, and the client's source for it.
    long_heads: (FairLimiter, Source),
}

/// The locked state of an [`UpstreamSession`].
#[derive(Debug, Default)]
struct Inner {
    /// hyper's connection over the session, until hyper releases the session.
    connection: Option<Box<Connection<HttpIo, RequestBody>>>,
    /// The session once hyper has released it, until it is ended or handed over.
    released: Option<Box<ReleasedSession>>,
    /// The grant of the last session. A client without a session is judged by it, too.
    grant: Option<Grant>,
    /// The sender of requests, unless a request is in flight.
    idle: Option<IdleSender>,
    /// Whether a request is in flight. Its caller then handles the end of the session.
    in_flight: bool,
    /// Whether the session has returned a response.
    answered: bool,
    /// The permit of a response with a long head. Its session is not reused.
    long_head: Option<Permit>,
}

/// The sender of an open session that has no request in flight, for the client's next request.
#[derive(Debug)]
struct IdleSender {
    /// The route of requests that may reuse the session, if any may.
    route: Option<RequestRoute>,
    sender: SendRequest<RequestBody>,
}

/// A session that hyper has given back; it may still be open.
///
/// It is then ended and recorded or, after a protocol switch, handed over with the bytes that hyper had read.
#[derive(Debug)]
struct ReleasedSession {
    pipe: HttpSession,
    /// Bytes that were read and not parsed.
    unused: Bytes,
    /// Why hyper stopped, if it failed.
    error: Option<hyper::Error>,
}

/// The reason why a request got no response.
pub(crate) enum UpstreamError {
    /// The session had ended before anything was sent. The request may be sent over another session.
    Unsent(Box<Request<RequestBody>>),
    /// The session ended without a byte of a response. The target may have received the request.
    Silence(String),
    /// Any other reason: the request is not sent again.
    Other(Denial),
}

impl From<UpstreamError> for Denial {
    fn from(error: UpstreamError) -> Self {
        match error {
            UpstreamError::Unsent(_) => Self::UpstreamFailed("it closed the connection".to_owned()),
            UpstreamError::Silence(why) => Self::UpstreamFailed(why),
            UpstreamError::Other(denial) => denial,
        }
    }
}

/// Counts the informational responses (1xx) to one request, which hyper reads endlessly.
#[derive(Debug, Default)]
pub(crate) struct InformationalLimit {
    count: AtomicUsize,
    /// Cancelled once there are too many.
    reached: CancellationToken,
}

impl InformationalLimit {
    /// Waits for a response. Returns `None` if there are too many informational ones before.
    async fn within<T>(&self, answer: impl Future<Output = T>) -> Option<T> {
        tokio::select! {
            biased;
            () = self.reached.cancelled() => None,
            answer = answer => Some(answer),
        }
    }

    pub(crate) fn count(&self) {
        if self.count.fetch_add(1, Relaxed) == MAX_INFORMATIONAL {
            self.reached.cancel();
        }
    }
}

/// Maximum number of informational responses to one request. A target may send one now and then to report progress.
const MAX_INFORMATIONAL: usize = 100;

impl UpstreamSession {
    pub(crate) fn new(context: &ListenerContext, source: Source) -> Self {
        let metrics = context.metrics.clone();
        let drain = context.drain.clone();
        Self {
            inner: Mutex::default(),
            metrics,
            drain,
            long_heads: (context.pending.long_heads.clone(), source),
        }
    }

    /// Drives the session with hyper, and releases a session that has ended.
    pub(crate) fn poll(&self, cx: &mut Context<'_>) {
        let over = {
            let mut inner = self.inner.lock();
            inner.poll(cx);
            if inner.in_flight { None } else { inner.released.take() }
        };
        if let Some(over) = over {
            self.end_session(*over, false);
        }
    }

    /// Completes once the grant of the last session is revoked.
    pub(crate) fn poll_revoked(&self, cx: &Context<'_>) -> Poll<()> {
        self.inner.lock().grant.as_ref().map_or(Poll::Pending, |grant| grant.poll_revoked(cx))
    }

    /// Returns the sender of the current session if that has this route and is usable. Otherwise closes the session.
    pub(crate) async fn reuse(&self, route: &RequestRoute) -> Option<SendRequest<RequestBody>> {
        let idle = self.inner.lock().idle.take_if(|idle| idle.route.as_ref() == Some(route));
        if let Some(IdleSender { mut sender, .. }) = idle
            && sender.ready().await.is_ok()
        {
            return Some(sender);
        }
        self.close();
        self.inner.lock().grant = None;
        None
    }

    /// Starts HTTP over a new session. `url_end` is the end of the first request's URL, which
    /// does not pass through hyper.
    pub(crate) async fn start(
        &self,
        opened: OpenSession,
        url_end: Option<Bytes>,
    ) -> Result<SendRequest<RequestBody>, hyper::Error> {
        self.inner.lock().grant = Some(opened.grant.clone());
        let session = HttpSession { url_end, ..HttpSession::new(opened, &self.metrics) };
        let (sender, connection) = client().handshake(TokioIo::new(ChunkStreamIo::new(session))).await?;
        let mut inner = self.inner.lock();
        (inner.connection, inner.answered) = (Some(Box::new(connection)), false);
        inner.long_head = None;
        Ok(sender)
    }

    /// Parses the response's head again, with more memory. hyper expects a request first, so it gets `stand_in`, which
    /// has the same method and is not sent.
    async fn parse_long(
        &self,
        permit: Permit,
        over: ReleasedSession,
        sender: &mut SendRequest<RequestBody>,
        stand_in: Request<RequestBody>,
    ) -> hyper::Result<Response<Incoming>> {
        let opened = over.pipe.into_opened(over.unused);
        let session = HttpSession { muted: Some(false), ..HttpSession::new(opened, &self.metrics) };
        let (new, connection) = long_client().handshake(TokioIo::new(ChunkStreamIo::new(session))).await?;
        *sender = new;
        {
            let mut inner = self.inner.lock();
            (inner.connection, inner.in_flight) = (Some(Box::new(connection)), true);
            inner.long_head = Some(permit);
        }
        let answer = sender.send_request(stand_in).await;
        let mut inner = self.inner.lock();
        inner.in_flight = false;
        inner.answered |= answer.is_ok();
        answer
    }

    /// Sends a request and waits for the response's head. Not cancel safe: dropping the future ends the session.
    pub(crate) async fn send(
        &self,
        sender: &mut SendRequest<RequestBody>,
        request: Request<RequestBody>,
        informational: &Arc<InformationalLimit>,
    ) -> Result<Response<Incoming>, UpstreamError> {
        self.inner.lock().in_flight = true;
        let method = request.method().clone();
        let clock = Arc::clone(request.body().clock());
        let answer = informational.within(sender.try_send_request(request)).await;
        let answered = {
            let mut inner = self.inner.lock();
            inner.in_flight = false;
            let before = inner.answered;
            inner.answered |= answer.as_ref().is_some_and(Result::is_ok);
            before
        };
        let Some(answer) = answer else { return Err(self.too_many_informational(answered)) };
        let mut failed = match answer {
            Ok(answer) => return Ok(answer),
            Err(failed) => failed,
        };
        let unsent = failed.take_message();
        let mut error = failed.into_error();
        let (mut over, cut) = self.take();
        let mut is_busy = false;
        if error.is_parse_too_large()
            && let Some(long) = over.take()
        {
            let (limiter, source) = &self.long_heads;
            match limiter.try_acquire(source) {
                Err(_) => (is_busy, over) = (true, Some(long)),
                Ok(permit) => {
                    let stand_in = stand_in(method, clock, informational);
                    let again = self.parse_long(permit, long, sender, stand_in);
                    match informational.within(again).await {
                        None => return Err(self.too_many_informational(answered)),
                        Some(Ok(answer)) => return Ok(answer),
                        Some(Err(again)) => (error, over) = (again, self.take().0),
                    }
                }
            }
        }
        let body = error.is_user();
        let seen = describe(&error);
        if let Some(over) = over.as_mut().filter(|_| !answered) {
            over.pipe.set_status(if body { StatusCode::BAD_REQUEST } else { StatusCode::BAD_GATEWAY });
        }
        let silence = !error.is_parse() && over.as_ref().is_none_or(|over| over.unused.is_empty());
        let why = over.and_then(|over| self.end_session(ReleasedSession { error: Some(error), ..over }, cut));
        let late = why.as_ref().is_some_and(|why| why.code == ErrorCode::TargetTimeout);
        let why = why.map_or(seen, |why| why.reason);
        Err(UpstreamError::Other(match unsent {
            Some(request) => return Err(UpstreamError::Unsent(Box::new(request))),
            None if is_busy => Denial::Busy(TOO_MANY_LONG_HEADS),
            None if body => Denial::Request("the body ends early, or its chunked coding is invalid"),
            None if late => Denial::UpstreamTimeout(why),
            None if silence => return Err(UpstreamError::Silence(why)),
            None => Denial::UpstreamFailed(why),
        }))
    }

    /// Ends the session of a request with too many informational responses.
    fn too_many_informational(&self, answered: bool) -> UpstreamError {
        let why = format!("more than {MAX_INFORMATIONAL} informational responses");
        if let (Some(mut over), _) = self.take() {
            if !answered {
                over.pipe.set_status(StatusCode::BAD_GATEWAY);
            }
            over.pipe.into_opened(over.unused).break_off("upstream_invalid", invalid(&why));
        }
        UpstreamError::Other(Denial::UpstreamFailed(why))
    }

    /// Keeps the session for requests with this route, once its response is complete. With `None` it is not reused.
    pub(crate) fn keep(&self, route: Option<RequestRoute>, sender: SendRequest<RequestBody>) {
        let mut inner = self.inner.lock();
        let route = route.filter(|_| inner.long_head.is_none());
        inner.idle = Some(IdleSender { route, sender });
    }

    /// Returns the session itself, once the target has switched to another protocol.
    pub(crate) async fn switch(&self) -> Option<OpenSession> {
        let over = poll_fn(|cx| {
            let mut inner = self.inner.lock();
            inner.poll(cx);
            match inner.released.take() {
                None if inner.connection.is_some() => Poll::Pending,
                over => Poll::Ready(over),
            }
        });
        let ReleasedSession { pipe, unused, .. } = *over.await?;
        Some(pipe.into_opened(unused))
    }

    /// Ends the session, if there is one, gracefully if no request is in flight. Logs the reason if the remote end has
    /// ended it.
    pub(crate) fn close(&self) {
        if let (Some(over), cut) = self.take() {
            self.end_session(over, cut);
        }
    }

    /// Takes the session, and returns whether a request was in flight.
    fn take(&self) -> (Option<ReleasedSession>, bool) {
        let mut inner = self.inner.lock();
        let cut = inner.idle.take().is_none_or(|idle| !idle.sender.is_ready());
        (inner.released.take().map(|over| *over).or_else(|| inner.stop()), cut)
    }

    /// Ends a session. Returns the reason why its request got no response, if the remote end gave one.
    fn end_session(&self, over: ReleasedSession, cut: bool) -> Option<SessionError> {
        let ReleasedSession { pipe, error, unused } = over;
        let ended = pipe.ended;
        let opened = pipe.into_opened(unused);
        let reset = opened.session.ended();
        let ended = match (ended, error) {
            (Some(ended), _) => ended,
            (None, Some(error)) if !error.is_user() => {
                let why = describe(&error);
                opened.break_off("upstream_invalid", invalid(&why));
                return Some(SessionError::new(ErrorCode::ProtocolError, why));
            }
            (None, Some(error)) if error.source().is_some_and(|cause| cause.is::<BodyNotRequested>()) => {
                FINISHED
            }
            (None, _) if cut => ABORTED,
            (None, _) => FINISHED,
        };
        if let Some(mut session) = opened.end(ended, LocalParty::Client) {
            self.drain.spawn(Span::current(), async move { close_gracefully(&mut session).await });
        }
        if reset.is_none() && ended.how == EndKind::Finished {
            return Some(SessionError::new(ErrorCode::NoError, "it closed the connection"));
        }
        reset
    }
}

impl Inner {
    fn poll(&mut self, cx: &mut Context<'_>) {
        if let Some(connection) = &mut self.connection
            && let Poll::Ready(ended) = connection.poll_without_shutdown(cx)
            && let Some(over) = self.stop()
        {
            self.released = Some(Box::new(ReleasedSession { error: ended.err(), ..over }));
        }
    }

    /// Takes the session from hyper.
    fn stop(&mut self) -> Option<ReleasedSession> {
        let parts = self.connection.take()?.into_parts();
        let (pipe, unread) = parts.io.into_inner().into_parts();
        Some(ReleasedSession { pipe, unused: concat(parts.read_buf, unread), error: None })
    }
}

/// Returns the request for [`UpstreamSession::parse_long`]. Its informational responses are counted, and not passed on.
fn stand_in(
    method: Method,
    clock: Arc<IdleTimer>,
    informational: &Arc<InformationalLimit>,
) -> Request<RequestBody> {
    let mut request = Request::new(RequestBody::empty(clock));
    *request.method_mut() = method;
    let counted = Arc::clone(informational);
    hyper::ext::on_informational(&mut request, move |_| counted.count());
    request
}

pub(super) fn client() -> Builder {
    let mut client = Builder::new();
    client
        .preserve_header_case(true)
        .max_headers(HEAD_FIELDS)
        .max_header_size(HEAD_BYTES)
        .max_buf_size(2 * HEAD_BYTES);
    client
}

/// Returns the configuration for a response with a long head.
fn long_client() -> Builder {
    let mut client = client();
    client.max_headers(LONG_HEAD_FIELDS).max_header_size(LONG_HEAD_BYTES).max_buf_size(LONG_HEAD_BYTES);
    client
}

/// Returns the error that ends the session of an invalid response.
fn invalid(why: &str) -> SessionError {
    SessionError::new(ErrorCode::Cancelled, format_args!("invalid response from the target: {why}"))
}

/// Describes why a response is invalid.
fn describe(error: &hyper::Error) -> String {
    if !error.is_parse_too_large() {
        return error.to_string();
    }
    let most = LONG_HEAD_BYTES / 1024;
    format!("its head is too long: at most {most} KiB and {LONG_HEAD_FIELDS} header fields are accepted")
}

/// End of a session without further requests.
const FINISHED: CopyEnd = CopyEnd { by: Side::A, how: EndKind::Finished };

/// End of a session with a request in flight, because the client disconnected.
const ABORTED: CopyEnd =
    CopyEnd { by: Side::A, how: EndKind::ReadFailed(std::io::ErrorKind::ConnectionAborted) };
