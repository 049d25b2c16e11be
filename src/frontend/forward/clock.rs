//! How long a client may do nothing: between two requests, and within a head.

use std::io::{self, IoSlice};
use std::pin::Pin;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::{Context, Poll};
use std::time::Duration;

use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::time::Instant;

use crate::frontend::HEAD_TIME;

/// What a client is at, and since when.
#[derive(Debug)]
pub(super) struct Clock(Mutex<Inner>);

#[derive(Debug)]
struct Inner {
    phase: Phase,
    /// Since that was last asked.
    answered: bool,
}

#[derive(Debug, Clone, Copy)]
enum Phase {
    /// It has begun a head.
    Head(Instant),
    /// Its request is being answered.
    Busy,
    /// It has its answer.
    Idle(Instant),
}

/// When a client has done nothing for too long, and what it should have done.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Deadline {
    /// Another request was to come.
    Request(Instant),
    /// The rest of a head was to come.
    Head(Instant),
}

/// A client's connection; what comes over it sets the clock.
#[derive(Debug)]
pub(super) struct Timed<C> {
    pub(super) io: C,
    pub(super) clock: Arc<Clock>,
}

impl Clock {
    /// Of a client that has just come, and is expected to ask for something.
    pub(super) fn new() -> Self {
        Self(Mutex::new(Inner { phase: Phase::Head(Instant::now()), answered: false }))
    }

    /// A head is there.
    pub(super) fn busy(&self) {
        self.lock().phase = Phase::Busy;
    }

    /// An answer is complete.
    pub(super) fn idle(&self) {
        *self.lock() = Inner { phase: Phase::Idle(Instant::now()), answered: true };
    }

    /// Whether an answer was completed since this was last asked.
    pub(super) fn take_answered(&self) -> bool {
        std::mem::take(&mut self.lock().answered)
    }

    /// By when the client has to do something, if anything is expected of it.
    pub(super) fn deadline(&self) -> Option<Deadline> {
        match self.lock().phase {
            Phase::Head(since) => Some(Deadline::Head(since + HEAD_TIME)),
            Phase::Busy => None,
            Phase::Idle(since) => Some(Deadline::Request(since + IDLE_TIME)),
        }
    }

    fn heard(&self) {
        let mut inner = self.lock();
        if let Phase::Idle(_) = inner.phase {
            inner.phase = Phase::Head(Instant::now());
        }
    }

    fn lock(&self) -> MutexGuard<'_, Inner> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Deadline {
    /// The time itself.
    pub(super) fn at(self) -> Instant {
        match self {
            Self::Request(at) | Self::Head(at) => at,
        }
    }
}

impl<C: AsyncRead + Unpin> AsyncRead for Timed<C> {
    fn poll_read(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buf: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        let before = buf.filled().len();
        let read = Pin::new(&mut self.io).poll_read(cx, buf);
        if buf.filled().len() > before {
            self.clock.heard();
        }
        read
    }
}

impl<C: AsyncWrite + Unpin> AsyncWrite for Timed<C> {
    fn poll_write(mut self: Pin<&mut Self>, cx: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.io).poll_write(cx, bytes)
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bytes: &[IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.io).poll_write_vectored(cx, bytes)
    }

    fn is_write_vectored(&self) -> bool {
        self.io.is_write_vectored()
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.io).poll_flush(cx)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.io).poll_shutdown(cx)
    }
}

/// How long a client may keep a connection without asking for anything: as long as Go's clients keep theirs.
const IDLE_TIME: Duration = Duration::from_secs(90);
