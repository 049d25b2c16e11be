//! A client's connection as hyper wants it, watched for the client's end while its request is answered.

use std::io;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, ready};

use bytes::Bytes;
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};

use super::clock::Clock;
use crate::net::socket::Connection;

/// A client's connection, which sets the clock. hyper, which reads nothing while it answers, flushes it then each time
/// that it is polled: so that is when it is read ahead.
#[derive(Debug)]
pub(super) struct Watched<C> {
    io: C,
    clock: Arc<Clock>,
    /// Read ahead. While hyper has not taken it, nothing more is read.
    ahead: Bytes,
    /// Whether the client may still read, if it has ended its direction.
    ended: Option<bool>,
}

impl<C: Connection> Watched<C> {
    pub(super) fn new(io: C, clock: Arc<Clock>) -> Self {
        Self { io, clock, ahead: Bytes::new(), ended: None }
    }

    /// The connection, and what was read of it behind the bytes `early`.
    pub(super) fn into_parts(self, early: Bytes) -> (C, Bytes) {
        let early = if self.ahead.is_empty() { early } else { [early, self.ahead].concat().into() };
        (self.io, early)
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

impl<C: Connection> AsyncRead for Watched<C> {
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

impl<C: Connection> AsyncWrite for Watched<C> {
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
