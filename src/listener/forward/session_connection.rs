//! A session as hyper's connection: counts the bytes, and notes how the target's end ended.

use std::io;
use std::task::{Context, Poll, ready};

use bytes::Bytes;
use http::StatusCode;
use hyper_util::rt::TokioIo;
use prometheus_client::metrics::counter::Counter;

use crate::listener::forward::long_url::extended;
use crate::session_io::OpenSession;
use crate::session_io::copy::{ByteCounter, CopyEnd, EndKind, Side};
use tunnel_base::metrics::Metrics;
use tunnel_net::ChunkStream;
use tunnel_net::byte_stream_io::ChunkStreamIo;

/// The connection that hyper reads and writes.
pub(super) type HttpIo = TokioIo<ChunkStreamIo<HttpSession>>;

/// An open session that carries HTTP.
///
/// Discards bytes that the target no longer accepts: it may have responded already, and the next read returns the
/// error.
#[derive(Debug)]
pub(crate) struct HttpSession {
    pub(super) opened: OpenSession,
    pub(super) up: Counter,
    pub(super) down: Counter,
    /// Set if hyper's writes are dropped, because the request was sent before. Whether hyper has written it again;
    /// hyper takes nothing as a response before.
    pub(super) muted: Option<bool>,
    /// The end of the first request's URL, which hyper does not write.
    pub(super) url_end: Option<Bytes>,
    /// How the target's end ended, if it did.
    pub(super) ended: Option<CopyEnd>,
}

impl HttpSession {
    pub(crate) fn new(opened: OpenSession, metrics: &Metrics) -> Self {
        Self {
            opened,
            up: metrics.bytes_to_target.clone(),
            down: metrics.bytes_to_client.clone(),
            muted: None,
            url_end: None,
            ended: None,
        }
    }

    /// Records the status of the response that the client gets instead of the session's.
    pub(crate) fn set_status(&mut self, status: StatusCode) {
        self.opened.access.status = Some(status.as_u16());
    }

    /// Returns the session; `unused` are the bytes that hyper has read but not consumed.
    pub(crate) fn into_opened(self, unused: Bytes) -> OpenSession {
        let mut opened = self.opened;
        opened.buffered = concat(unused, opened.buffered);
        opened
    }

    fn note(&mut self, how: EndKind) {
        self.ended.get_or_insert(CopyEnd { by: Side::B, how });
    }
}

impl ChunkStream for HttpSession {
    fn poll_read_chunk(&mut self, cx: &mut Context<'_>) -> Poll<io::Result<Bytes>> {
        if self.muted == Some(false) {
            // hyper writes within the same poll.
            cx.waker().wake_by_ref();
            return Poll::Pending;
        }
        if !self.opened.buffered.is_empty() {
            return Poll::Ready(Ok(std::mem::take(&mut self.opened.buffered)));
        }
        let read = self.opened.session.poll_read_chunk(cx);
        if read.is_pending()
            && let Poll::Ready(cause) = self.opened.session.poll_lost(cx)
        {
            self.note(EndKind::WriteFailed(cause.kind()));
            return Poll::Ready(Err(cause));
        }
        let read = ready!(read);
        match &read {
            Ok(bytes) if bytes.is_empty() => self.note(EndKind::Finished),
            Ok(bytes) => {
                ByteCounter { one: &mut self.opened.access.down, all: &self.down }.add(bytes.len());
            }
            Err(cause) => self.note(EndKind::ReadFailed(cause.kind())),
        }
        Poll::Ready(read)
    }

    fn poll_write_chunk(&mut self, cx: &mut Context<'_>, bytes: &mut Bytes) -> Poll<io::Result<()>> {
        if let Some(was_polled) = &mut self.muted {
            *was_polled = true;
            bytes.clear();
            return Poll::Ready(Ok(()));
        }
        if let Some(url_end) = self.url_end.take() {
            *bytes = extended(bytes, &url_end);
        }
        let before = bytes.len();
        let written = ready!(self.opened.session.poll_write_chunk(cx, bytes));
        ByteCounter { one: &mut self.opened.access.up, all: &self.up }.add(before - bytes.len());
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
        Poll::Ready(Ok(()))
    }

    fn poll_finish(&mut self, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        self.opened.session.poll_finish(cx)
    }
}

/// Returns bytes, followed by those read after them.
pub(super) fn concat(first: Bytes, rest: Bytes) -> Bytes {
    if first.is_empty() {
        rest
    } else if rest.is_empty() {
        first
    } else {
        [first, rest].concat().into()
    }
}
