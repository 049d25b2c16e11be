//! How long a client may do nothing: between two requests, within a head, and once it has finished its direction.

use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use tokio::time::Instant;

use crate::frontend::HEAD_TIME;

/// What a client's connection is doing, and since when.
#[derive(Debug)]
pub(super) struct Clock(Mutex<Inner>);

#[derive(Debug)]
struct Inner {
    phase: Phase,
    /// Whether a request's body has ended since the last look.
    asked: bool,
    /// Whether an answer was completed since the last look.
    answered: bool,
}

#[derive(Debug, Clone, Copy)]
enum Phase {
    /// It has begun a head.
    Head(Instant),
    /// The body of its request is on its way.
    Asking,
    /// Its request is there, and is being answered; by the time, if there is one, it must get some of that.
    Answering(Option<Instant>),
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
    /// It was to take its answer, or it is gone.
    Answer(Instant),
}

impl Clock {
    /// The clock of a client that has just come, and is expected to send a request.
    pub(super) fn new() -> Self {
        Self(Mutex::new(Inner { phase: Phase::Head(Instant::now()), asked: false, answered: false }))
    }

    /// A head is there, and a body may follow.
    pub(super) fn asks(&self, has_body: bool) {
        self.lock().phase = if has_body { Phase::Asking } else { Phase::Answering(None) };
    }

    /// Nothing more is read of the request's body.
    pub(super) fn has_asked(&self) {
        let mut inner = self.lock();
        if let Phase::Asking = inner.phase {
            inner.phase = Phase::Answering(None);
            inner.asked = true;
        }
    }

    /// Whether nothing more is read of a request, and its answer is not complete.
    pub(super) fn is_answering(&self) -> bool {
        matches!(self.lock().phase, Phase::Answering(_))
    }

    /// Whether a request's body has ended since this was last asked.
    pub(super) fn take_asked(&self) -> bool {
        std::mem::take(&mut self.lock().asked)
    }

    /// An answer is complete.
    pub(super) fn idle(&self) {
        *self.lock() = Inner { phase: Phase::Idle(Instant::now()), asked: false, answered: true };
    }

    /// Whether an answer was completed since this was last asked.
    pub(super) fn take_answered(&self) -> bool {
        std::mem::take(&mut self.lock().answered)
    }

    /// By when the client has to do something, if anything is expected of it. One that is `leaving` is asked for no
    /// further request.
    pub(super) fn deadline(&self, leaving: bool) -> Option<Deadline> {
        match self.lock().phase {
            Phase::Head(since) => Some(Deadline::Head(since + HEAD_TIME)),
            Phase::Asking => None,
            Phase::Answering(until) => until.map(Deadline::Answer),
            Phase::Idle(since) if leaving => Some(Deadline::Answer(since + TAKE_TIME)),
            Phase::Idle(since) => Some(Deadline::Request(since + IDLE_TIME)),
        }
    }

    /// Something has come from the client.
    pub(super) fn arrived(&self) {
        let mut inner = self.lock();
        if let Phase::Idle(_) = inner.phase {
            inner.phase = Phase::Head(Instant::now());
        }
    }

    /// The client has finished its direction. While its request is answered it is there if it `reads`: whoever has gone
    /// looks the same.
    pub(super) fn finished(&self, reads: bool) {
        if let Phase::Answering(until @ None) = &mut self.lock().phase {
            let patience = if reads { FINISHED_TIME } else { Duration::ZERO };
            *until = Some(Instant::now() + patience);
        }
    }

    /// A part of the answer was passed on.
    pub(super) fn passed(&self) {
        if let Phase::Answering(Some(until)) = &mut self.lock().phase {
            *until = Instant::now() + FINISHED_TIME;
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
