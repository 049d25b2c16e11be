//! A session as hyper wants a connection to be.

use std::io::{self, IoSlice};
use std::pin::Pin;
use std::task::{Context, Poll, ready};

use bytes::{Bytes, BytesMut};
use http::StatusCode;
use hyper::rt::{Read, ReadBufCursor, Write};
use prometheus_client::metrics::counter::Counter;

use crate::carry::FarEnd;
use crate::frontend::Granted;
use crate::net::ByteStream;
use crate::net::counted::{Counted, Tally};
use crate::net::splice::{Ended, How, Side};
use crate::telemetry::Metrics;

/// An open session that hyper reads and writes; what passes is counted.
#[derive(Debug)]
pub(super) struct Pipe {
    opened: Granted,
    up: Counter,
    down: Counter,
    /// Taken from hyper, and not yet by the session, which has no room.
    unsent: Bytes,
    ended: Option<Ended>,
}

impl Pipe {
    pub(super) fn new(opened: Granted, metrics: &Metrics) -> Self {
        Self {
            opened,
            up: metrics.bytes_up.clone(),
            down: metrics.bytes_down.clone(),
            unsent: Bytes::new(),
            ended: None,
        }
    }

    /// What the target's end did first, if it did anything.
    pub(super) fn ended(&self) -> Option<Ended> {
        self.ended
    }

    /// What the client is answered, as its session has given it nothing.
    pub(super) fn answers(&mut self, status: StatusCode) {
        self.opened.access.status = Some(status.as_u16());
    }

    /// The session again; `unused` is what hyper has read and made no use of.
    pub(super) fn into_opened(self, unused: Bytes) -> Granted {
        let mut opened = self.opened;
        if opened.early.is_empty() {
            opened.early = unused;
        } else if !unused.is_empty() {
            opened.early = [unused, opened.early].concat().into();
        }
        opened
    }

    fn counted(&mut self) -> Counted<'_, FarEnd> {
        let Granted { session, access, .. } = &mut self.opened;
        let (given, taken) =
            (Tally { one: &mut access.up, all: &self.up }, Tally { one: &mut access.down, all: &self.down });
        Counted { stream: session, early: Bytes::new(), taken, given }
    }

    /// Gives the session what waits for it to have room.
    fn poll_push(&mut self, cx: &mut Context<'_>) -> Poll<()> {
        let mut unsent = std::mem::take(&mut self.unsent);
        while !unsent.is_empty() {
            match self.counted().poll_write_chunk(cx, &mut unsent) {
                Poll::Ready(Ok(())) => {}
                Poll::Ready(Err(cause)) => {
                    self.note(How::WriteFailed(cause.kind()));
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

    fn note(&mut self, how: How) {
        self.ended.get_or_insert(Ended { by: Side::B, how });
    }
}

impl Read for Pipe {
    fn poll_read(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        mut buf: ReadBufCursor<'_>,
    ) -> Poll<io::Result<()>> {
        if self.opened.early.is_empty() {
            match ready!(self.counted().poll_read_chunk(cx)) {
                Ok(bytes) if bytes.is_empty() => self.note(How::Finished),
                Ok(bytes) => self.opened.early = bytes,
                Err(cause) => {
                    self.note(How::ReadFailed(cause.kind()));
                    return Poll::Ready(Err(cause));
                }
            }
        }
        let fits = self.opened.early.len().min(buf.remaining());
        buf.put_slice(&self.opened.early.split_to(fits));
        Poll::Ready(Ok(()))
    }
}

/// Bytes that the target takes no more are thrown away: it may have answered before, and a read shows what happened.
impl Write for Pipe {
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
