//! The session of one client that its requests go over, one after another, and hyper's end of it.

use std::error::Error;
use std::future::poll_fn;
use std::io::{self, IoSlice};
use std::pin::Pin;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::task::{Context, Poll, ready};

use bytes::{Bytes, BytesMut};
use http::{Request, Response, StatusCode};
use hyper::body::Incoming;
use hyper::client::conn::http1::{Builder, Connection, SendRequest};
use hyper::rt::{Read, ReadBufCursor, Write};
use prometheus_client::metrics::counter::Counter;
use tracing::Span;

use crate::listener::admission::{GrantedSession, HEAD_BYTES};
use crate::listener::forward::message::{BodyNotWanted, RequestBody};
use crate::session_io::copy::close_gracefully;
use crate::session_io::copy::{ByteCounter, CopyEnd, Counted, EndKind, Side};
use crate::session_io::{LocalPeer, TargetStream};
use tunnel_base::drain::Drain;
use tunnel_base::metrics::Metrics;
use tunnel_net::ByteStream;

/// One client's session, if it has one. It is polled by the task that serves the client, beside hyper's server.
#[derive(Debug)]
pub(crate) struct Upstream<W> {
    inner: Mutex<Inner<W>>,
    metrics: Metrics,
    drain: Drain,
}

#[derive(Debug)]
struct Inner<W> {
    state: State,
    /// Sends requests, unless one is being sent or waits for its answer.
    idle: Option<Idle<W>>,
    /// A request waits for its answer; its caller looks after a session that ends meanwhile.
    in_flight: bool,
    /// The session has given an answer.
    answered: bool,
}

#[derive(Debug)]
struct Idle<W> {
    /// For which requests it may be used again, if for any.
    way: Option<W>,
    sender: SendRequest<RequestBody>,
}

#[derive(Debug)]
enum State {
    None,
    Running(Box<Connection<HyperSession, RequestBody>>),
    Ended(Box<FinishedSession>),
}

/// A session that hyper does not use any more.
#[derive(Debug)]
struct FinishedSession {
    pipe: HyperSession,
    unused: Bytes,
    error: Option<hyper::Error>,
}

/// Why a request got no answer.
pub(crate) enum UpstreamError {
    /// The session had ended before anything was sent: the request may be sent over another one.
    Unsent(Box<Request<RequestBody>>),
    /// The client's own body did not come, or not as it should.
    Body,
    /// The session has ended without a byte of an answer; the target may have seen the request.
    Silence(String),
    /// The target has said something that is no answer.
    Target(String),
}

impl<W: PartialEq> Upstream<W> {
    pub(crate) fn new(metrics: &Metrics, drain: &Drain) -> Self {
        let inner = Inner { state: State::None, idle: None, in_flight: false, answered: false };
        Self { inner: Mutex::new(inner), metrics: metrics.clone(), drain: drain.clone() }
    }

    /// Lets hyper work at the session, and lets go of one that has ended.
    pub(crate) fn poll(&self, cx: &mut Context<'_>) {
        let over = {
            let mut inner = self.lock();
            inner.poll(cx);
            if inner.in_flight { None } else { inner.take_over() }
        };
        if let Some(over) = over {
            self.leave(over, false);
        }
    }

    /// What sends a request that goes this way, if the session that there is will do. One that goes another way is
    /// closed.
    pub(crate) async fn reuse(&self, way: &W) -> Option<SendRequest<RequestBody>> {
        let idle = self.lock().idle.take_if(|idle| idle.way.as_ref() == Some(way));
        if let Some(Idle { mut sender, .. }) = idle
            && sender.ready().await.is_ok()
        {
            return Some(sender);
        }
        self.close();
        None
    }

    /// Begins HTTP over a session that was just opened.
    pub(crate) async fn start(
        &self,
        opened: GrantedSession,
    ) -> Result<SendRequest<RequestBody>, hyper::Error> {
        let pipe = HyperSession::new(opened, &self.metrics);
        let (sender, connection) = client().handshake(pipe).await?;
        let mut inner = self.lock();
        (inner.state, inner.answered) = (State::Running(Box::new(connection)), false);
        Ok(sender)
    }

    /// Sends a request, and waits for the answer's head. Not cancel safe: a dropped call ends the session.
    pub(crate) async fn send(
        &self,
        sender: &mut SendRequest<RequestBody>,
        request: Request<RequestBody>,
    ) -> Result<Response<Incoming>, UpstreamError> {
        self.lock().in_flight = true;
        let answer = sender.try_send_request(request).await;
        let answered = {
            let mut inner = self.lock();
            inner.in_flight = false;
            let before = inner.answered;
            inner.answered |= answer.is_ok();
            before
        };
        let mut failed = match answer {
            Ok(answer) => return Ok(answer),
            Err(failed) => failed,
        };
        let unsent = failed.take_message();
        let error = failed.into_error();
        let (body, seen) = (error.is_user(), error.to_string());
        let (mut over, cut) = self.take();
        if let Some(over) = over.as_mut().filter(|_| !answered) {
            over.pipe.answers(if body { StatusCode::BAD_REQUEST } else { StatusCode::BAD_GATEWAY });
        }
        let silence = !error.is_parse() && over.as_ref().is_none_or(|over| over.unused.is_empty());
        let why = over.and_then(|over| self.leave(FinishedSession { error: Some(error), ..over }, cut));
        let why = why.unwrap_or(seen);
        Err(match unsent {
            Some(request) => UpstreamError::Unsent(Box::new(request)),
            None if body => UpstreamError::Body,
            None if silence => UpstreamError::Silence(why),
            None => UpstreamError::Target(why),
        })
    }

    /// Keeps the session for what goes this way, once its answer is complete; `None` keeps it for no further request.
    pub(crate) fn keep(&self, way: Option<W>, sender: SendRequest<RequestBody>) {
        self.lock().idle = Some(Idle { way, sender });
    }

    /// The session itself, once the target has agreed to another protocol.
    pub(crate) async fn switch(&self) -> Option<GrantedSession> {
        let over = poll_fn(|cx| {
            let mut inner = self.lock();
            inner.poll(cx);
            match (inner.take_over(), &inner.state) {
                (None, State::Running(_)) => Poll::Pending,
                (over, _) => Poll::Ready(over),
            }
        });
        let FinishedSession { pipe, unused, .. } = over.await?;
        Some(pipe.into_opened(unused))
    }

    /// Ends the session, if there is one: in good order if no request is being answered. Logs why the far end has ended
    /// it, if it has.
    pub(crate) fn close(&self) {
        if let (Some(over), cut) = self.take() {
            self.leave(over, cut);
        }
    }

    /// Takes the session, and whether a request is being answered.
    fn take(&self) -> (Option<FinishedSession>, bool) {
        let mut inner = self.lock();
        let cut = inner.idle.take().is_none_or(|idle| !idle.sender.is_ready());
        (inner.take_over().or_else(|| inner.stop()), cut)
    }

    /// Ends a session. Returns why its request has no answer, if the target's end gave a reason.
    fn leave(&self, over: FinishedSession, cut: bool) -> Option<String> {
        let FinishedSession { pipe, error, unused } = over;
        let ended = pipe.ended();
        let opened = pipe.into_opened(unused);
        let reset = opened.session.ended().map(|refusal| refusal.reason);
        let ended = match (ended, error) {
            (Some(ended), _) => ended,
            (None, Some(error)) if !error.is_user() => {
                opened.break_off("bad_answer", &format!("the target gave no proper answer: {error}"));
                return Some(error.to_string());
            }
            (None, Some(error)) if error.source().is_some_and(|cause| cause.is::<BodyNotWanted>()) => {
                FINISHED
            }
            (None, _) if cut => ABORTED,
            (None, _) => FINISHED,
        };
        if let Some(mut session) = opened.end(ended, LocalPeer::Client) {
            self.drain.spawn(Span::current(), async move { close_gracefully(&mut session).await });
        }
        let finished = (ended.how == EndKind::Finished).then(|| "it has ended the connection".to_owned());
        reset.or(finished)
    }

    fn lock(&self) -> MutexGuard<'_, Inner<W>> {
        self.inner.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl<W> Inner<W> {
    fn poll(&mut self, cx: &mut Context<'_>) {
        if let State::Running(connection) = &mut self.state
            && let Poll::Ready(ended) = connection.poll_without_shutdown(cx)
            && let Some(over) = self.stop()
        {
            self.state = State::Ended(Box::new(FinishedSession { error: ended.err(), ..over }));
        }
    }

    /// Takes the session from hyper.
    fn stop(&mut self) -> Option<FinishedSession> {
        match std::mem::replace(&mut self.state, State::None) {
            State::Running(connection) => {
                let parts = connection.into_parts();
                Some(FinishedSession { pipe: parts.io, unused: parts.read_buf, error: None })
            }
            state => {
                self.state = state;
                None
            }
        }
    }

    fn take_over(&mut self) -> Option<FinishedSession> {
        match std::mem::replace(&mut self.state, State::None) {
            State::Ended(over) => Some(*over),
            state => {
                self.state = state;
                None
            }
        }
    }
}

fn client() -> Builder {
    let mut client = Builder::new();
    client.preserve_header_case(true).max_header_size(HEAD_BYTES).max_buf_size(HEAD_BYTES);
    client
}

/// Nothing more is to be asked.
const FINISHED: CopyEnd = CopyEnd { by: Side::A, how: EndKind::Finished };

/// The client is gone, and with it who wanted the answer.
const ABORTED: CopyEnd =
    CopyEnd { by: Side::A, how: EndKind::ReadFailed(std::io::ErrorKind::ConnectionAborted) };

// A session as hyper wants a connection to be.

/// An open session that hyper reads and writes; what passes is counted.
#[derive(Debug)]
pub(crate) struct HyperSession {
    opened: GrantedSession,
    up: Counter,
    down: Counter,
    /// Taken from hyper, and not yet by the session, which has no room.
    unsent: Bytes,
    ended: Option<CopyEnd>,
}

impl HyperSession {
    pub(crate) fn new(opened: GrantedSession, metrics: &Metrics) -> Self {
        Self {
            opened,
            up: metrics.bytes_up.clone(),
            down: metrics.bytes_down.clone(),
            unsent: Bytes::new(),
            ended: None,
        }
    }

    /// What the target's end did first, if it did anything.
    pub(crate) fn ended(&self) -> Option<CopyEnd> {
        self.ended
    }

    /// What the client is answered, as its session has given it nothing.
    pub(crate) fn answers(&mut self, status: StatusCode) {
        self.opened.access.status = Some(status.as_u16());
    }

    /// The session again; `unused` is what hyper has read and made no use of.
    pub(crate) fn into_opened(self, unused: Bytes) -> GrantedSession {
        let mut opened = self.opened;
        if opened.buffered.is_empty() {
            opened.buffered = unused;
        } else if !unused.is_empty() {
            opened.buffered = [unused, opened.buffered].concat().into();
        }
        opened
    }

    fn counted(&mut self) -> Counted<'_, TargetStream> {
        let GrantedSession { session, access, .. } = &mut self.opened;
        let (given, taken) = (
            ByteCounter { one: &mut access.up, all: &self.up },
            ByteCounter { one: &mut access.down, all: &self.down },
        );
        Counted { stream: session, buffered: Bytes::new(), taken, given }
    }

    /// Gives the session what waits for it to have room.
    fn poll_push(&mut self, cx: &mut Context<'_>) -> Poll<()> {
        let mut unsent = std::mem::take(&mut self.unsent);
        while !unsent.is_empty() {
            match self.counted().poll_write_chunk(cx, &mut unsent) {
                Poll::Ready(Ok(())) => {}
                Poll::Ready(Err(cause)) => {
                    self.note(EndKind::WriteFailed(cause.kind()));
                    break;
                }
                Poll::Pending => {
                    self.unsent = unsent;
                    return Poll::Pending;
                }
            }
        }
        Poll::Ready(())
    }

    fn note(&mut self, how: EndKind) {
        self.ended.get_or_insert(CopyEnd { by: Side::B, how });
    }
}

impl Read for HyperSession {
    fn poll_read(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        mut buf: ReadBufCursor<'_>,
    ) -> Poll<io::Result<()>> {
        if self.opened.buffered.is_empty() {
            match ready!(self.counted().poll_read_chunk(cx)) {
                Ok(bytes) if bytes.is_empty() => self.note(EndKind::Finished),
                Ok(bytes) => self.opened.buffered = bytes,
                Err(cause) => {
                    self.note(EndKind::ReadFailed(cause.kind()));
                    return Poll::Ready(Err(cause));
                }
            }
        }
        let fits = self.opened.buffered.len().min(buf.remaining());
        buf.put_slice(&self.opened.buffered.split_to(fits));
        Poll::Ready(Ok(()))
    }
}

/// Bytes that the target takes no more are thrown away: it may have answered before, and a read shows what happened.
impl Write for HyperSession {
    fn poll_write(self: Pin<&mut Self>, cx: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        self.poll_write_vectored(cx, &[IoSlice::new(bytes)])
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        pieces: &[IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        ready!(self.poll_push(cx));
        let all: usize = pieces.iter().map(|piece| piece.len()).sum();
        let mut bytes = BytesMut::with_capacity(all.min(CHUNK));
        for piece in pieces {
            let left = CHUNK - bytes.len();
            bytes.extend_from_slice(piece.get(..left).unwrap_or(piece));
        }
        let length = bytes.len();
        self.unsent = bytes.freeze();
        // Else it goes with the flush.
        let _ = self.poll_push(cx);
        Poll::Ready(Ok(length))
    }

    fn is_write_vectored(&self) -> bool {
        true
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        self.poll_push(cx).map(Ok)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        ready!(self.poll_push(cx));
        self.counted().poll_finish(cx)
    }
}

/// Bytes that are copied and given to the session at once, at most.
const CHUNK: usize = 64 * 1024;
