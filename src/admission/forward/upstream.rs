//! The session that carries a client's requests, one after another, and its adapter for hyper.

use std::error::Error;
use std::future::poll_fn;
use std::io;
use std::sync::Arc;
use std::task::{Context, Poll, ready};

use bytes::Bytes;
use http::{Request, Response, StatusCode};
use hyper::body::Incoming;
use hyper::client::conn::http1::{Builder, Connection, SendRequest};
use hyper_util::rt::TokioIo;
use parking_lot::Mutex;
use tracing::Span;

use crate::admission::ListenerContext;
use crate::admission::denial::Denial;
use crate::admission::forward::PIECE_BYTES;
use crate::admission::forward::idle_timer::IdleTimer;
use crate::admission::forward::message::{BodyNotRequested, RequestBody};
use crate::admission::heads::{LONG_HEAD_BYTES, LONG_HEAD_FIELDS};
use crate::admission::requests::RequestRoute;
use crate::session_io::copy::close::close_gracefully;
use crate::session_io::copy::{ByteCounter, CopyEnd, EndKind, Side};
use crate::session_io::judged::JudgedSession;
use crate::session_io::{LocalParty, OpenSession};
use tunnel_net::ChunkStream;
use tunnel_net::byte_stream_io::ChunkStreamIo;
use tunnel_proto::frame::{ErrorCode, SessionError};

/// The current session of a client, if any. The task that serves the client polls it together with hyper's server.
#[derive(Debug)]
pub(crate) struct UpstreamSession {
    inner: Mutex<Inner>,
    pub(super) context: Arc<ListenerContext>,
    clock: Arc<IdleTimer>,
}

/// The locked state of an [`UpstreamSession`].
#[derive(Debug, Default)]
struct Inner {
    /// hyper's connection over the session, until hyper stops.
    connection: Option<Box<Connection<HttpIo, RequestBody>>>,
    /// The session, once hyper has stopped.
    over: Option<Box<ReleasedSession>>,
    /// The sender of requests, unless a request has no response yet.
    sender: Option<SendRequest<RequestBody>>,
    /// The route of requests that may use the session next, if any may.
    route: Option<RequestRoute>,
    /// The last session, as it is judged. A client without a session is judged by it, too.
    judged: Option<JudgedSession>,
    /// Whether a request waits for its response, or for the session after a switch to another protocol. Its caller then
    /// handles the end of the session.
    in_flight: bool,
    /// Whether the session has returned a response.
    answered: bool,
}

/// A session that hyper has given back. It may still be open, and is then ended, or handed over after a switch to
/// another protocol.
#[derive(Debug)]
struct ReleasedSession {
    opened: OpenSession,
    /// How the target's end ended, if it did.
    ended: Option<CopyEnd>,
    /// Why hyper stopped, if it failed.
    error: Option<hyper::Error>,
}

impl UpstreamSession {
    pub(crate) fn new(context: Arc<ListenerContext>, clock: Arc<IdleTimer>) -> Self {
        Self { inner: Mutex::default(), context, clock }
    }

    /// Drives the session with hyper, and ends one that is over. Completes once the last session is revoked.
    pub(crate) fn poll(&self, cx: &mut Context<'_>) -> Poll<()> {
        let is_over = {
            let mut inner = self.inner.lock();
            inner.poll(cx).is_ready() && !inner.in_flight
        };
        if is_over {
            self.close();
        }
        self.inner.lock().judged.as_ref().map_or(Poll::Pending, |judged| judged.poll_revoked(cx))
    }

    /// Returns the sender of the current session if that is kept for this route and still open. Otherwise closes it.
    pub(crate) async fn reuse(&self, route: &RequestRoute) -> Option<SendRequest<RequestBody>> {
        let sender = {
            let mut inner = self.inner.lock();
            let kept = inner.route.take();
            inner.sender.take_if(|_| kept.as_ref() == Some(route))
        };
        if let Some(mut sender) = sender
            && sender.ready().await.is_ok()
        {
            return Some(sender);
        }
        self.close();
        self.inner.lock().judged = None;
        None
    }

    /// Starts HTTP over a new session.
    pub(crate) async fn start(&self, opened: OpenSession) -> hyper::Result<SendRequest<RequestBody>> {
        self.inner.lock().judged = Some(opened.judged.clone());
        let context = Arc::clone(&self.context);
        let session = HttpSession { opened, context, clock: Arc::clone(&self.clock), ended: None };
        let (sender, connection) = Builder::new()
            .preserve_header_case(true)
            .max_headers(LONG_HEAD_FIELDS)
            .max_header_size(LONG_HEAD_BYTES)
            .max_buf_size(LONG_HEAD_BYTES)
            .handshake(TokioIo::new(ChunkStreamIo::new(session)))
            .await?;
        let mut inner = self.inner.lock();
        inner.connection = Some(Box::new(connection));
        inner.answered = false;
        Ok(sender)
    }

    /// Sends a request and waits for the response's head. Not cancel safe: dropping the future ends the session.
    ///
    /// # Errors
    ///
    /// Returns the reason for the client, and the request if the session had ended before a byte of it was written.
    pub(crate) async fn send(
        &self,
        mut sender: SendRequest<RequestBody>,
        request: Request<RequestBody>,
    ) -> Result<Response<Incoming>, (Denial, Option<Request<RequestBody>>)> {
        self.clock.target.begin();
        self.inner.lock().in_flight = true;
        let answer = sender.try_send_request(request).await;
        // With a response, the session is this task's again, unless it has switched to another protocol.
        let mut failed = match answer {
            Ok(answer) => {
                let mut inner = self.inner.lock();
                inner.in_flight = answer.status() == StatusCode::SWITCHING_PROTOCOLS;
                inner.answered = true;
                inner.sender = Some(sender);
                return Ok(answer);
            }
            Err(failed) => failed,
        };
        // Without one, the session cannot be used again. hyper returns a request of which it has written nothing.
        let unsent = failed.take_message();
        let error = failed.into_error();
        let is_invalid_body = error.is_user();
        let seen = describe(&error);
        // The access line has the status that the client gets, unless it has the one of an earlier response.
        let answered = self.inner.lock().answered;
        let why = self.take().and_then(|(mut over, is_cut)| {
            over.error = Some(error);
            if !answered {
                let status = if is_invalid_body { StatusCode::BAD_REQUEST } else { StatusCode::BAD_GATEWAY };
                over.opened.access.status = Some(status.as_u16());
            }
            self.end_session(over, is_cut)
        });
        // What this process refused to read comes first, then the client's error, then what the remote end reports.
        let denial = match (self.clock.target.refusal(), why) {
            (Some(refusal), _) => refusal,
            _ if is_invalid_body => Denial::Request("the body ends early, or its chunked coding is invalid"),
            (None, Some(why)) if why.code == ErrorCode::TargetTimeout => Denial::UpstreamTimeout(why.reason),
            (None, why) => Denial::UpstreamFailed(why.map_or(seen, |why| why.reason)),
        };
        Err((denial, unsent))
    }

    /// Keeps the session for the next request with this route, once its response is complete.
    pub(crate) fn keep(&self, route: RequestRoute) {
        self.inner.lock().route = Some(route);
    }

    /// Returns the session itself, once the target has switched to another protocol.
    pub(crate) async fn switch(&self) -> Option<OpenSession> {
        poll_fn(|cx| self.inner.lock().poll(cx)).await;
        self.take().map(|(over, _)| over.opened)
    }

    /// Ends the session, if there is one, gracefully if no request is in flight. Logs the reason if the remote end has
    /// ended it.
    pub(crate) fn close(&self) {
        if let Some((over, is_cut)) = self.take() {
            self.end_session(over, is_cut);
        }
    }

    /// Takes the current session, from hyper if that has not stopped, and whether its last request is not complete.
    fn take(&self) -> Option<(ReleasedSession, bool)> {
        let mut inner = self.inner.lock();
        let is_waiting = std::mem::take(&mut inner.in_flight);
        inner.route = None;
        let is_ready = inner.sender.take().is_some_and(|sender| sender.is_ready());
        let is_cut = is_waiting || inner.over.is_none() && !is_ready;
        let over = match inner.over.take() {
            Some(over) => *over,
            None => inner.release(None)?,
        };
        Some((over, is_cut))
    }

    /// Ends a session. Returns the reason why its request got no response, if the remote end gave one.
    fn end_session(&self, over: ReleasedSession, is_cut: bool) -> Option<SessionError> {
        let ReleasedSession { opened, ended, error } = over;
        let reset = opened.session.ended();
        let ended = match (ended, error) {
            (Some(ended), _) => ended,
            (None, Some(error)) if !error.is_user() => {
                let why = describe(&error);
                let invalid = format_args!("invalid response from the target: {why}");
                opened.break_off("upstream_invalid", SessionError::new(ErrorCode::Cancelled, invalid));
                return Some(SessionError::new(ErrorCode::ProtocolError, why));
            }
            (None, Some(error)) if error.source().is_some_and(|cause| cause.is::<BodyNotRequested>()) => {
                FINISHED
            }
            (None, _) if is_cut => ABORTED,
            (None, _) => FINISHED,
        };
        if let Some(mut session) = opened.end(ended, LocalParty::Client) {
            self.context.drain.spawn(Span::current(), async move { close_gracefully(&mut session).await });
        }
        if reset.is_none() && ended.how == EndKind::Finished {
            return Some(SessionError::new(ErrorCode::NoError, "it closed the connection"));
        }
        reset
    }
}

impl Inner {
    /// Drives hyper's connection. Completes once that has stopped, or if there is none.
    fn poll(&mut self, cx: &mut Context<'_>) -> Poll<()> {
        if let Some(connection) = &mut self.connection {
            let ended = ready!(connection.poll_without_shutdown(cx));
            self.over = self.release(ended.err()).map(Box::new);
        }
        Poll::Ready(())
    }

    /// Takes the session from hyper, which drops the body of its request.
    fn release(&mut self, error: Option<hyper::Error>) -> Option<ReleasedSession> {
        let parts = self.connection.take()?.into_parts();
        let (session, unread) = parts.io.into_inner().into_parts();
        let HttpSession { mut opened, ended, .. } = session;
        opened.buffered = [parts.read_buf, unread, opened.buffered].concat().into();
        Some(ReleasedSession { opened, ended, error })
    }
}

/// The connection that hyper reads and writes.
type HttpIo = TokioIo<ChunkStreamIo<HttpSession>>;

/// An open session that carries HTTP.
///
/// Discards bytes that the target no longer accepts: it may have responded already, and the next read returns the
/// error.
#[derive(Debug)]
struct HttpSession {
    opened: OpenSession,
    context: Arc<ListenerContext>,
    clock: Arc<IdleTimer>,
    /// How the target's end ended, if it did.
    ended: Option<CopyEnd>,
}

impl HttpSession {
    fn note(&mut self, how: EndKind) {
        self.ended.get_or_insert(CopyEnd { by: Side::B, how });
    }
}

impl ChunkStream for HttpSession {
    fn poll_read_chunk(&mut self, cx: &mut Context<'_>) -> Poll<io::Result<Bytes>> {
        self.clock.target.admit()?;
        let Self { opened: OpenSession { session, buffered, access, .. }, .. } = self;
        if buffered.is_empty() {
            let read = session.poll_read_chunk(cx);
            if read.is_pending()
                && let Poll::Ready(cause) = session.poll_lost(cx)
            {
                self.note(EndKind::WriteFailed(cause.kind()));
                return Poll::Ready(Err(cause));
            }
            match ready!(read) {
                Ok(bytes) if bytes.is_empty() => self.note(EndKind::Finished),
                Ok(bytes) => {
                    ByteCounter { one: &mut access.down, all: &self.context.metrics.bytes_to_client }
                        .add(bytes.len());
                    *buffered = bytes;
                }
                Err(cause) => {
                    self.note(EndKind::ReadFailed(cause.kind()));
                    return Poll::Ready(Err(cause));
                }
            }
        }
        let fits = self.opened.buffered.len().min(PIECE_BYTES);
        self.clock.target.add(fits);
        Poll::Ready(Ok(self.opened.buffered.split_to(fits)))
    }

    fn poll_write_chunk(&mut self, cx: &mut Context<'_>, bytes: &mut Bytes) -> Poll<io::Result<()>> {
        let before = bytes.len();
        let written = ready!(self.opened.session.poll_write_chunk(cx, bytes));
        let all = &self.context.metrics.bytes_to_target;
        ByteCounter { one: &mut self.opened.access.up, all }.add(before - bytes.len());
        if let Err(cause) = written {
            self.note(EndKind::WriteFailed(cause.kind()));
            bytes.clear();
        }
        Poll::Ready(Ok(()))
    }

    fn poll_flush(&mut self, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        if let Err(cause) = ready!(self.opened.session.poll_flush(cx)) {
            self.note(EndKind::WriteFailed(cause.kind()));
        }
        self.clock.target.on_flushed();
        Poll::Ready(Ok(()))
    }

    fn poll_finish(&mut self, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        self.opened.session.poll_finish(cx)
    }
}

/// Describes why a response is invalid.
fn describe(error: &hyper::Error) -> String {
    if error.is_parse_too_large() {
        let most = LONG_HEAD_BYTES / 1024;
        return format!(
            "its head is too long: at most {most} KiB and {LONG_HEAD_FIELDS} header fields are accepted, and a body \
             below 2^64 bytes"
        );
    }
    error.source().map_or_else(|| error.to_string(), ToString::to_string)
}

/// End of a session without further requests.
const FINISHED: CopyEnd = CopyEnd { by: Side::A, how: EndKind::Finished };

/// End of a session with a request in flight, because the client disconnected.
const ABORTED: CopyEnd = CopyEnd { by: Side::A, how: EndKind::ReadFailed(io::ErrorKind::ConnectionAborted) };
