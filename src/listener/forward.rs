//! HTTP/1.1 on a client's connection: each request is judged, and forwarded over a session to where it goes.
//!
//! A session belongs to one client connection, so that accounts, rules and identity stay exact. It is kept for the next
//! request that goes the same way. Bodies are passed on as they come; an upgrade leaves two bare streams.

pub mod message;
pub mod upstream;

use std::convert::Infallible;
use std::future::poll_fn;
use std::io;
use std::pin::{Pin, pin};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::{Context, Poll, ready};
use std::time::Duration;

use bytes::Bytes;
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
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::time::{Instant, sleep_until};
use tracing::debug;

use crate::listener::admission::{
    DeniedRequest, GrantedSession, HEAD_BYTES, HEAD_TIME, HandshakeOutcome, ListenerContext,
};
use crate::listener::forward::message::{ContinueGate, RequestBody, ResponseBody, ResponseSource};
use crate::listener::forward::upstream::{Upstream, UpstreamError};
use crate::listener::{Denial, no_head, reject_http2};
use crate::session_io::copy::wait_acknowledged;
use tunnel_base::drain::Drain;
use tunnel_base::metrics::{InFlightGuard, InFlightRequests, Metrics};
use tunnel_net::socket::{Connection, Socket};

/// Judges the requests of one client, and opens sessions for them.
pub trait Router: Send {
    /// Where requests go, and as whose: those with an equal one may go over one session.
    type Way: PartialEq + Send + Sync;

    /// Returns where a request goes, if it may go there. Its URI is as the client has sent it, its Host is the one that
    /// it is for. Only clients that may come in get to know that a head is wrong.
    ///
    /// # Errors
    ///
    /// The denial for the client.
    fn route(
        &mut self,
        head: Result<&Parts, Denial>,
    ) -> impl Future<Output = Result<Self::Way, DeniedRequest>> + Send;

    /// Opens a session. Cancel safe: a dropped call leaves nothing behind.
    ///
    /// # Errors
    ///
    /// The denial for the client.
    fn open(&mut self, way: &Self::Way)
    -> impl Future<Output = Result<GrantedSession, DeniedRequest>> + Send;

    /// The denial for the client of the last request that was judged, whose session gave no answer.
    fn failed(&self, denial: Denial) -> DeniedRequest;

    /// The client has its answer, and is the one from whom something is expected now.
    fn answered(&self);
}

/// Serves a client's requests until it goes, or has nothing more to ask for a while, or draining begins, or it and the
/// target have agreed on another protocol: then the session is given back. Not cancel safe: a dropped call breaks off
/// what is under way.
pub async fn forward<C, R>(socket: C, router: R, context: &ListenerContext) -> HandshakeOutcome<C>
where
    C: Connection,
    R: Router,
{
    socket.breaks_off(true);
    let clock = Arc::new(IdleTimer::new());
    let exchange = Exchange::new(router, Arc::clone(&clock), &context.metrics, &context.drain);
    let io = TokioIo::new(ClientIo::new(socket, Arc::clone(&clock)));
    let answer = |request| -> Answering<'_> { Box::pin(exchange.answer(request)) };
    let mut connection = server().serve_connection(io, service_fn(answer));
    let mut draining = pin!(context.drain.draining());
    let mut silence = pin!(sleep_until(Instant::now()));
    let mut leaving = false;
    let ended = poll_fn(|cx| {
        if !leaving && draining.as_mut().poll(cx).is_ready() {
            leaving = true;
            Pin::new(&mut connection).graceful_shutdown();
        }
        let served = connection.poll_without_shutdown(cx);
        exchange.poll(cx);
        if let Poll::Ready(ended) = served {
            return Poll::Ready(ServeEnd::Hyper(ended));
        }
        let Some(deadline) = clock.deadline(leaving) else { return Poll::Pending };
        if silence.deadline() != deadline.at() {
            silence.as_mut().reset(deadline.at());
        }
        match (silence.as_mut().poll(cx), deadline) {
            (Poll::Ready(()), Deadline::Head(_)) => return Poll::Ready(ServeEnd::TooSlow),
            (Poll::Ready(()), Deadline::Answer(_)) => return Poll::Ready(ServeEnd::Gone),
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
    let (socket, buffered) = parts.io.into_inner().into_parts(parts.read_buf);
    finish(ended, socket, buffered, exchange.end(), context).await
}

type Answering<'a> = Pin<Box<dyn Future<Output = Result<Response<ResponseBody>, Infallible>> + Send + 'a>>;

/// Returns what is left of a client's connection.
async fn finish<C: Connection>(
    ended: ServeEnd,
    mut socket: C,
    buffered: Bytes,
    switched: Option<GrantedSession>,
    context: &ListenerContext,
) -> HandshakeOutcome<C> {
    let error = match (ended, switched) {
        (ServeEnd::Hyper(Ok(())), Some(session)) => {
            return HandshakeOutcome::Opened { session, socket, buffered };
        }
        (ended, switched) => {
            if let Some(opened) = switched {
                opened.break_off("client_failed", "the client's connection failed: it took no answer");
            }
            match ended {
                ServeEnd::Hyper(ended) => ended.err(),
                ServeEnd::TooSlow => {
                    socket.breaks_off(false);
                    return HandshakeOutcome::Failed { cause: "slow_head", socket: Some(socket) };
                }
                ServeEnd::Gone => return HandshakeOutcome::Failed { cause: "reset", socket: None },
            }
        }
    };
    if error.as_ref().is_some_and(hyper::Error::is_user) {
        // An answer was cut short, and must not look complete.
        wait_acknowledged(&mut Socket::new(socket, context.pool.clone())).await;
        return HandshakeOutcome::Served(None);
    }
    reject_http2(&mut socket, &buffered).await;
    socket.breaks_off(false);
    match error {
        Some(error) => HandshakeOutcome::Failed { cause: no_head(&error), socket: Some(socket) },
        None => HandshakeOutcome::Served(Some(socket)),
    }
}

/// How the serving of a client ended.
enum ServeEnd {
    /// hyper's result.
    Hyper(hyper::Result<()>),
    /// The rest of a head did not come.
    TooSlow,
    /// The client is gone, or as good as gone: it took no more of its answer.
    Gone,
}

fn server() -> http1::Builder {
    let mut server = http1::Builder::new();
    server
        .preserve_header_case(true)
        .max_header_size(HEAD_BYTES)
        .max_buf_size(HEAD_BYTES)
        .auto_date_header(false)
        .half_close(true);
    server
}

// A client's requests, one after another, each on its way to the target and back.

/// A client's requests, one at a time.
pub(crate) struct Exchange<R: Router> {
    router: tokio::sync::Mutex<R>,
    upstream: Upstream<R::Way>,
    /// What is left of HTTP once another protocol was agreed on.
    switched: Mutex<Option<GrantedSession>>,
    clock: Arc<IdleTimer>,
    requests: InFlightRequests,
}

impl<R: Router> Exchange<R> {
    pub(crate) fn new(router: R, clock: Arc<IdleTimer>, metrics: &Metrics, drain: &Drain) -> Self {
        let upstream = Upstream::new(metrics, drain);
        let (router, requests) = (tokio::sync::Mutex::new(router), metrics.requests.clone());
        Self { router, upstream, switched: Mutex::new(None), clock, requests }
    }

    /// Drives the session, and calls the router once an answer is complete. To be called after each poll of hyper's
    /// server.
    pub(crate) fn poll(&self, cx: &mut Context<'_>) {
        self.upstream.poll(cx);
        if self.clock.take_asked() {
            // hyper's server is polled again, to watch for the client's end.
            cx.waker().wake_by_ref();
        }
        if self.clock.take_answered()
            && let Ok(router) = self.router.try_lock()
        {
            router.answered();
        }
    }

    /// Ends the session, if there is one; one that is not HTTP any more is given back.
    pub(crate) fn end(self) -> Option<GrantedSession> {
        self.upstream.close();
        self.switched.into_inner().unwrap_or_else(PoisonError::into_inner)
    }

    pub(crate) async fn answer(
        &self,
        request: Request<Incoming>,
    ) -> Result<Response<ResponseBody>, Infallible> {
        let (head, body) = request.into_parts();
        // Else hyper would have to read it to its end before the next request.
        let has_body = !body.is_end_stream();
        self.clock.on_head(has_body);
        let request = self.requests.start(head.method.as_str(), head.uri.path());
        let answer = match self.forward(head, body, request).await {
            Ok(answer) => answer,
            Err(DeniedRequest { denial, trusted, trace }) => {
                let mut answer = denial.answer(trusted, &trace);
                if !has_body {
                    answer.headers_mut().remove(CONNECTION);
                }
                answer
                    .map(|body| ResponseBody::new(ResponseSource::Own(body.into()), Arc::clone(&self.clock)))
            }
        };
        self.clock.passed();
        debug!(status = answer.status().as_u16(), "answered");
        Ok(answer)
    }

    async fn forward(
        &self,
        mut head: Parts,
        body: Incoming,
        under_way: InFlightGuard,
    ) -> Result<Response<ResponseBody>, DeniedRequest> {
        let mut router = self.router.lock().await;
        let way = match message::check(&mut head) {
            Ok(()) => router.route(Ok(&head)).await?,
            Err(denial) => router.route(Err(denial)).await?,
        };
        let (method, version) = (head.method.clone(), head.version);
        let upgrades = message::pass_request(&mut head, &body);
        let waits = version == Version::HTTP_11 && message::expects_continue(&head.headers);
        let wanted = (waits && !body.is_end_stream()).then(Arc::<ContinueGate>::default);
        let mut request =
            Request::from_parts(head, RequestBody::new(body, Arc::clone(&self.clock), wanted.clone()));
        if let Some(wanted) = wanted.clone() {
            hyper::ext::on_informational(&mut request, move |informational| {
                if informational.status() == StatusCode::CONTINUE {
                    wanted.go_on();
                }
            });
        }
        let (sender, answer) = self.send(&mut router, &way, request).await?;
        if answer.status() == StatusCode::SWITCHING_PROTOCOLS {
            let switched = self.switch(answer, upgrades, under_way).await;
            return switched.map_err(|denial| router.failed(denial));
        }
        let (mut head, body) = answer.into_parts();
        // After an answer in HTTP/1.0, hyper would not know how to send the next request's body.
        let reusable = head.version == Version::HTTP_11;
        let last = wanted.as_ref().is_some_and(|wanted| wanted.answered(head.status.is_success()));
        self.upstream.keep((reusable && !last).then_some(way), sender);
        if let Err(why) = message::pass_answer(&mut head, &body, &method) {
            self.upstream.close();
            return Err(router.failed(Denial::UpstreamFailed(why.to_owned())));
        }
        if last {
            head.headers.insert(CONNECTION, HeaderValue::from_static("close"));
        }
        let body = ResponseBody::of_target(body, Arc::clone(&self.clock), wanted, under_way);
        Ok(Response::from_parts(head, body))
    }

    /// Sends a request over the session that there is, or over a new one. The target may end one that was kept just as
    /// it is asked: then the request is sent again, unless that may do something twice.
    async fn send(
        &self,
        router: &mut R,
        way: &R::Way,
        mut request: Request<RequestBody>,
    ) -> Result<(SendRequest<RequestBody>, Response<Incoming>), DeniedRequest> {
        let mut kept = self.upstream.reuse(way).await;
        loop {
            let again = kept.as_ref().and_then(|_| self.repeatable(&request));
            let fresh = kept.is_none();
            let mut sender = match kept.take() {
                Some(sender) => sender,
                None => {
                    let opened = router.open(way).await?;
                    let started = self.upstream.start(opened).await;
                    started.map_err(|error| router.failed(Denial::UpstreamFailed(error.to_string())))?
                }
            };
            let denial = match self.upstream.send(&mut sender, request).await {
                Ok(answer) => return Ok((sender, answer)),
                Err(UpstreamError::Unsent(unsent)) if !fresh => {
                    request = *unsent;
                    continue;
                }
                Err(UpstreamError::Unsent(_)) => {
                    Denial::UpstreamFailed("it has ended the connection".to_owned())
                }
                Err(UpstreamError::Silence(why)) => match again {
                    Some(again) => {
                        request = again;
                        continue;
                    }
                    None => Denial::UpstreamFailed(why),
                },
                Err(UpstreamError::Body) => {
                    Denial::Request("its body ends early, or is not chunked as it should be")
                }
                Err(UpstreamError::Target(why)) => Denial::UpstreamFailed(why),
            };
            return Err(router.failed(denial));
        }
    }

    /// Takes the session from hyper: what passes from now on is not HTTP.
    async fn switch(
        &self,
        answer: Response<Incoming>,
        requested: bool,
        request: InFlightGuard,
    ) -> Result<Response<ResponseBody>, Denial> {
        let (mut head, body) = answer.into_parts();
        let opened = self.upstream.switch().await;
        let Some(mut opened) = opened else {
            return Err(Denial::UpstreamFailed("the session is over".to_owned()));
        };
        if !requested {
            let why = "it changes to another protocol, which nobody asked for";
            opened.break_off("bad_answer", why);
            return Err(Denial::UpstreamFailed(why.to_owned()));
        }
        message::pass_answer(&mut head, &body, &Method::GET)
            .map_err(|why| Denial::UpstreamFailed(why.to_owned()))?;
        opened.alive.carries(request);
        *self.switched.lock().unwrap_or_else(PoisonError::into_inner) = Some(opened);
        let body = ResponseBody::new(ResponseSource::Own(Full::default()), Arc::clone(&self.clock));
        Ok(Response::from_parts(head, body))
    }

    /// A copy of a request that its target may get twice, RFC 9110 9.2.2. What is asked of another protocol its method
    /// does not tell: `kubectl exec` asks with GET.
    fn repeatable(&self, request: &Request<RequestBody>) -> Option<Request<RequestBody>> {
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

// A client's connection as hyper wants it, watched for the client's end while its request is answered.

/// A client's connection, which sets the clock. hyper, which reads nothing while it answers, flushes it then each time
/// that it is polled: so that is when it is read ahead.
#[derive(Debug)]
pub(crate) struct ClientIo<C> {
    io: C,
    clock: Arc<IdleTimer>,
    /// Read ahead. While hyper has not taken it, nothing more is read.
    ahead: Bytes,
    /// Whether the client may still read, if it has ended its direction.
    ended: Option<bool>,
}

impl<C: Connection> ClientIo<C> {
    pub(crate) fn new(io: C, clock: Arc<IdleTimer>) -> Self {
        Self { io, clock, ahead: Bytes::new(), ended: None }
    }

    /// The connection, and what was read of it behind the bytes `buffered`.
    pub(crate) fn into_parts(self, buffered: Bytes) -> (C, Bytes) {
        let buffered = if self.ahead.is_empty() { buffered } else { [buffered, self.ahead].concat().into() };
        (self.io, buffered)
    }

    /// A client for which bytes wait is slow, and not gone: then its system would have refused them.
    fn note(&self, written: Poll<io::Result<usize>>) -> Poll<io::Result<usize>> {
        if written.is_pending() {
            self.clock.passed();
        }
        written
    }

    fn watch(&mut self, cx: &mut Context<'_>) {
        let mut space = [0; AHEAD];
        let mut room = ReadBuf::new(&mut space);
        if self.ended.is_none()
            && let Poll::Ready(read) = Pin::new(&mut self.io).poll_read(cx, &mut room)
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
            ready!(Pin::new(&mut self.io).poll_read(cx, out))?;
        } else {
            let fits = self.ahead.len().min(out.remaining());
            out.put_slice(&self.ahead.split_to(fits));
        }
        if out.filled().len() > before {
            self.clock.arrived();
        }
        Poll::Ready(Ok(()))
    }
}

impl<C: Connection> AsyncWrite for ClientIo<C> {
    fn poll_write(mut self: Pin<&mut Self>, cx: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        let written = Pin::new(&mut self.io).poll_write(cx, bytes);
        self.note(written)
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        pieces: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        let written = Pin::new(&mut self.io).poll_write_vectored(cx, pieces);
        self.note(written)
    }

    fn is_write_vectored(&self) -> bool {
        self.io.is_write_vectored()
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        if self.clock.is_answering() && self.ahead.is_empty() {
            self.watch(cx);
        }
        Pin::new(&mut self.io).poll_flush(cx)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.io).poll_shutdown(cx)
    }
}

/// Bytes that are read ahead at most: usually there is nothing to read.
const AHEAD: usize = 1024;

// How long a client may do nothing: between two requests, within a head, and once it has finished its direction.

/// What a client's connection is doing, and since when.
#[derive(Debug)]
pub(crate) struct IdleTimer(Mutex<Inner>);

#[derive(Debug)]
struct Inner {
    phase: ClientPhase,
    /// Whether a request's body has ended since the last look.
    asked: bool,
    /// Whether an answer was completed since the last look.
    answered: bool,
}

#[derive(Debug, Clone, Copy)]
enum ClientPhase {
    /// It has begun a head.
    Head(Instant),
    /// The body of its request is on its way.
    ReadingBody,
    /// Its request is there, and is being answered; by the time, if there is one, it must get some of that.
    Responding(Option<Instant>),
    /// It has its answer.
    Idle(Instant),
}

/// When a client has done nothing for too long, and what it should have done.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Deadline {
    /// Another request was to come.
    Request(Instant),
    /// The rest of a head was to come.
    Head(Instant),
    /// It was to take its answer, or it is gone.
    Answer(Instant),
}

impl IdleTimer {
    /// The clock of a client that has just come, and is expected to send a request.
    pub(crate) fn new() -> Self {
        Self(Mutex::new(Inner { phase: ClientPhase::Head(Instant::now()), asked: false, answered: false }))
    }

    /// A head is there, and a body may follow.
    pub(crate) fn on_head(&self, has_body: bool) {
        self.lock().phase = if has_body { ClientPhase::ReadingBody } else { ClientPhase::Responding(None) };
    }

    /// Nothing more is read of the request's body.
    pub(crate) fn on_body_end(&self) {
        let mut inner = self.lock();
        if let ClientPhase::ReadingBody = inner.phase {
            inner.phase = ClientPhase::Responding(None);
            inner.asked = true;
        }
    }

    /// Whether nothing more is read of a request, and its answer is not complete.
    pub(crate) fn is_answering(&self) -> bool {
        matches!(self.lock().phase, ClientPhase::Responding(_))
    }

    /// Whether a request's body has ended since this was last asked.
    pub(crate) fn take_asked(&self) -> bool {
        std::mem::take(&mut self.lock().asked)
    }

    /// An answer is complete.
    pub(crate) fn idle(&self) {
        *self.lock() = Inner { phase: ClientPhase::Idle(Instant::now()), asked: false, answered: true };
    }

    /// Whether an answer was completed since this was last asked.
    pub(crate) fn take_answered(&self) -> bool {
        std::mem::take(&mut self.lock().answered)
    }

    /// By when the client has to do something, if anything is expected of it. One that is `leaving` is asked for no
    /// further request.
    pub(crate) fn deadline(&self, leaving: bool) -> Option<Deadline> {
        match self.lock().phase {
            ClientPhase::Head(since) => Some(Deadline::Head(since + HEAD_TIME)),
            ClientPhase::ReadingBody => None,
            ClientPhase::Responding(until) => until.map(Deadline::Answer),
            ClientPhase::Idle(since) if leaving => Some(Deadline::Answer(since + TAKE_TIME)),
            ClientPhase::Idle(since) => Some(Deadline::Request(since + IDLE_TIME)),
        }
    }

    /// Something has come from the client.
    pub(crate) fn arrived(&self) {
        let mut inner = self.lock();
        if let ClientPhase::Idle(_) = inner.phase {
            inner.phase = ClientPhase::Head(Instant::now());
        }
    }

    /// The client has finished its direction. While its request is answered it is there if it `reads`: whoever has gone
    /// looks the same.
    pub(crate) fn finished(&self, reads: bool) {
        if let ClientPhase::Responding(until @ None) = &mut self.lock().phase {
            let patience = if reads { FINISHED_TIME } else { Duration::ZERO };
            *until = Some(Instant::now() + patience);
        }
    }

    /// A part of the answer was passed on.
    pub(crate) fn passed(&self) {
        if let ClientPhase::Responding(Some(until)) = &mut self.lock().phase {
            *until = Instant::now() + FINISHED_TIME;
        }
    }

    fn lock(&self) -> MutexGuard<'_, Inner> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Deadline {
    /// The time itself.
    pub(crate) fn at(self) -> Instant {
        match self {
            Self::Request(at) | Self::Head(at) | Self::Answer(at) => at,
        }
    }
}

/// How long a client may keep a connection without asking for anything: as long as Go's clients keep theirs.
const IDLE_TIME: Duration = Duration::from_secs(90);

/// How long a client that has finished its direction may get nothing of its answer.
const FINISHED_TIME: Duration = Duration::from_secs(30);

/// How long a client may take for the last bytes of an answer, those for which the system has no room: people pause
/// their terminals.
const TAKE_TIME: Duration = Duration::from_secs(600);

#[cfg(test)]
mod tests;
