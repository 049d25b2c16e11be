//! A session as hyper's connection: counts the bytes, and notes how the target's end ended.

use std::io;
use std::sync::Arc;
use std::task::{Context, Poll, ready};

use bytes::Bytes;
use hyper_util::rt::TokioIo;
use prometheus_client::metrics::counter::Counter;

use crate::listener::forward::PIECE_BYTES;
use crate::listener::forward::head_meter::HeadMeter;
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
    opened: OpenSession,
    up: Counter,
    down: Counter,
    /// The meter of the target's heads.
    head: Arc<HeadMeter>,
    /// How the target's end ended, if it did.
    pub(super) ended: Option<CopyEnd>,
}

impl HttpSession {
    pub(crate) fn new(opened: OpenSession, metrics: &Metrics, head: Arc<HeadMeter>) -> Self {
        let up = metrics.bytes_to_target.clone();
        let down = metrics.bytes_to_client.clone();
        Self { opened, up, down, head, ended: None }
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
        self.head.admit()?;
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
                    ByteCounter { one: &mut access.down, all: &self.down }.add(bytes.len());
                    *buffered = bytes;
                }
                Err(cause) => {
                    self.note(EndKind::ReadFailed(cause.kind()));
                    return Poll::Ready(Err(cause));
                }
            }
        }
        let fits = self.opened.buffered.len().min(PIECE_BYTES);
        self.head.add(fits);
        Poll::Ready(Ok(self.opened.buffered.split_to(fits)))
    }

    fn poll_write_chunk(&mut self, cx: &mut Context<'_>, bytes: &mut Bytes) -> Poll<io::Result<()>> {
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
