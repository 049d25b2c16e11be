//! A client's connection as hyper requires it, which detects the client's disconnection while a response is
//! pending.

use std::io;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, ready};

use bytes::Bytes;
use futures_util::FutureExt as _;
use http::StatusCode;
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};

use crate::admission::denial::automatic_response;
use crate::admission::forward::PIECE_BYTES;
use crate::admission::forward::idle_timer::IdleTimer;
use tunnel_net::keepalive::DisconnectDetector;
use tunnel_net::socket::{AnyConnection, Connection as _};

/// A client's connection, which updates the idle timer.
///
/// While a response is pending, hyper reads nothing but flushes each time it is polled, so the flush reads ahead.
pub(crate) struct ClientIo {
    io: AnyConnection,
    clock: Arc<IdleTimer>,
    /// Bytes read ahead. Until hyper has consumed them, nothing more is read.
    ahead: Bytes,
    /// Whether the client may still be reading, once it has closed its write half.
    ended: Option<bool>,
    loss: DisconnectDetector,
    /// The status of hyper's own response to a head that it cannot parse. It is withheld, because it has no text.
    pub(super) rejected: Option<StatusCode>,
    /// Whether a part of the last write is still to be written, so that nothing may come between.
    is_within_write: bool,
    /// The rest of an interim response that was written in part.
    interim: Vec<u8>,
}

impl ClientIo {
    pub(crate) fn new(io: AnyConnection, clock: Arc<IdleTimer>) -> Self {
        let ahead = Bytes::new();
        let interim = Vec::new();
        let loss = DisconnectDetector::default();
        Self { io, clock, ahead, ended: None, loss, rejected: None, is_within_write: false, interim }
    }

    /// Returns true for hyper's own response to a bad head, and records its status.
    fn suppress_automatic_response(&mut self, bytes: &[u8]) -> bool {
        let status = if self.clock.is_in_head() { automatic_response(bytes) } else { None };
        self.rejected = self.rejected.or(status);
        status.is_some()
    }

    /// Returns the connection, and the bytes read from it: `buffered`, followed by those read ahead.
    pub(crate) fn into_parts(self, buffered: Bytes) -> (AnyConnection, Bytes) {
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

    /// Checks whether the client is lost. hyper flushes or writes each time it is polled, and may read nothing for
    /// long.
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

impl AsyncRead for ClientIo {
    fn poll_read(self: Pin<&mut Self>, cx: &mut Context<'_>, out: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        let this = self.get_mut();
        let before = out.filled().len();
        if this.ahead.is_empty() {
            this.clock.client.admit()?;
            let fits = PIECE_BYTES.min(out.remaining());
            let mut piece = ReadBuf::new(out.initialize_unfilled_to(fits));
            ready!(this.poll_read_io(cx, &mut piece))?;
            let count = piece.filled().len();
            out.advance(count);
        } else {
            let fits = this.ahead.len().min(out.remaining());
            out.put_slice(&this.ahead.split_to(fits));
        }
        match out.filled().len() - before {
            0 => {}
            count => this.clock.on_received(count),
        }
        Poll::Ready(Ok(()))
    }
}

impl AsyncWrite for ClientIo {
    fn poll_write(self: Pin<&mut Self>, cx: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        self.poll_write_vectored(cx, &[io::IoSlice::new(bytes)])
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
        ready!(Pin::new(&mut self.io).poll_flush(cx))?;
        self.clock.client.on_flushed();
        Poll::Ready(Ok(()))
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.io).poll_shutdown(cx)
    }
}

/// Maximum number of bytes to read ahead. Usually there are none.
const READ_AHEAD_BYTES: usize = 1024;
