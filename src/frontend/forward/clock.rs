//! How long a client may do nothing: between two requests, and within a head.

use std::io;
use std::pin::Pin;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::{Context, Poll};
use std::time::Duration;

use tokio::io::{AsyncRead, ReadBuf};
use tokio::time::Instant;

use crate::frontend::HEAD_TIME;
use crate::net::hooked::ReadHook;

/// What a client's connection is doing, and since when.
#[derive(Debug)]
pub(super) struct Clock(Mutex<Inner>);

#[derive(Debug)]
struct Inner {
    phase: Phase,
    /// Whether an answer was completed since the last look.
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

/// Sets the clock by what comes over a client's connection.
#[derive(Debug)]
pub(super) struct OnRead(pub(super) Arc<Clock>);

impl Clock {
    /// The clock of a client that has just come, and is expected to send a request.
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

    fn on_read(&self) {
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

impl ReadHook for OnRead {
    fn poll_read<T: AsyncRead + Unpin>(
        &mut self,
        io: Pin<&mut T>,
        cx: &mut Context<'_>,
        out: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        let before = out.filled().len();
        let read = io.poll_read(cx, out);
        if out.filled().len() > before {
            self.0.on_read();
        }
        read
    }
}

/// How long a client may keep a connection without asking for anything: as long as Go's clients keep theirs.
const IDLE_TIME: Duration = Duration::from_secs(90);
