//! One direction of a splice.

use std::io;
use std::ops::ControlFlow;
use std::task::{Context, Poll, ready};

use bytes::Bytes;

use crate::net::ByteStream;
use crate::net::splice::outcome::{Ended, How, Log, Side};

/// One direction.
pub(super) struct Flow {
    from: Side,
    /// Bytes that were read and not yet written.
    chunk: Bytes,
    /// Bytes that the destination has taken.
    pub(super) given: u64,
    /// Whether bytes were written since the last flush.
    unflushed: bool,
    state: State,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum State {
    Copying,
    /// The source has finished; the destination's sending direction is being finished.
    Finishing,
    /// Writing has failed; the source is still read, so that it does not get stuck.
    Discarding,
    Done,
}

/// Why the copying pauses or ends.
pub(super) enum Stop {
    /// The turn is used up.
    Turn,
    Over,
}

impl Flow {
    /// One that has moved nothing yet.
    pub(super) fn new(from: Side) -> Self {
        Self { from, chunk: Bytes::new(), given: 0, unflushed: false, state: State::Copying }
    }

    /// Whether nothing is left to deliver in either direction.
    pub(super) fn over(one: &Self, other: &Self) -> bool {
        let idle = |flow: &Self| matches!(flow.state, State::Done | State::Discarding);
        idle(one) && idle(other)
    }

    /// Moves bytes until the direction has to wait (`Continue`), `room` is used up, or the source cannot be read.
    pub(super) fn run<F: ByteStream, T: ByteStream>(
        &mut self,
        cx: &mut Context<'_>,
        from: &mut F,
        to: &mut T,
        room: &mut usize,
        log: &mut Log,
    ) -> ControlFlow<Stop> {
        loop {
            let step = match self.state {
                State::Copying => self.copy(cx, from, to, room, log),
                State::Finishing => self.finish(cx, to, log),
                State::Discarding => self.discard(cx, from, room, log),
                State::Done => self.wait(cx, from, log),
            };
            match step {
                Poll::Pending => return ControlFlow::Continue(()),
                Poll::Ready(ControlFlow::Break(stop)) => return ControlFlow::Break(stop),
                Poll::Ready(ControlFlow::Continue(())) => {}
            }
        }
    }

    fn copy<F: ByteStream, T: ByteStream>(
        &mut self,
        cx: &mut Context<'_>,
        from: &mut F,
        to: &mut T,
        room: &mut usize,
        log: &mut Log,
    ) -> Poll<ControlFlow<Stop>> {
        if self.chunk.is_empty() {
            if *room == 0 {
                return Poll::Ready(ControlFlow::Break(Stop::Turn));
            }
            match from.poll_read_chunk(cx) {
                Poll::Ready(Ok(chunk)) if chunk.is_empty() => return self.source_finished(log),
                Poll::Ready(Ok(chunk)) => self.chunk = chunk,
                Poll::Ready(Err(cause)) => return self.source_failed(&cause, log),
                Poll::Pending => return self.flush(cx, to, log),
            }
        }
        let before = self.chunk.len();
        match ready!(to.poll_write_chunk(cx, &mut self.chunk)) {
            Ok(()) => {
                let given = before - self.chunk.len();
                self.given += given as u64;
                self.unflushed = true;
                *room = room.saturating_sub(given);
            }
            Err(cause) => self.destination_failed(&cause, log),
        }
        Poll::Ready(ControlFlow::Continue(()))
    }

    /// Nothing is left to write for now: flushes what the destination buffers.
    fn flush<T: ByteStream>(
        &mut self,
        cx: &mut Context<'_>,
        to: &mut T,
        log: &mut Log,
    ) -> Poll<ControlFlow<Stop>> {
        if self.unflushed {
            match ready!(to.poll_flush(cx)) {
                Ok(()) => self.unflushed = false,
                Err(cause) => {
                    self.destination_failed(&cause, log);
                    return Poll::Ready(ControlFlow::Continue(()));
                }
            }
        }
        Poll::Pending
    }

    fn finish<T: ByteStream>(
        &mut self,
        cx: &mut Context<'_>,
        to: &mut T,
        log: &mut Log,
    ) -> Poll<ControlFlow<Stop>> {
        if let Err(cause) = ready!(to.poll_finish(cx)) {
            log.failed(self.from.other(), How::WriteFailed(cause.kind()));
        }
        self.state = State::Done;
        Poll::Ready(ControlFlow::Continue(()))
    }

    fn discard<F: ByteStream>(
        &mut self,
        cx: &mut Context<'_>,
        from: &mut F,
        room: &mut usize,
        log: &mut Log,
    ) -> Poll<ControlFlow<Stop>> {
        if *room == 0 {
            return Poll::Ready(ControlFlow::Break(Stop::Turn));
        }
        match ready!(from.poll_read_chunk(cx)) {
            Ok(chunk) if chunk.is_empty() => self.state = State::Done,
            Ok(chunk) => *room = room.saturating_sub(chunk.len()),
            Err(cause) => return self.source_failed(&cause, log),
        }
        Poll::Ready(ControlFlow::Continue(()))
    }

    /// All is given. The other side may never send the source anything, so no write may ever show that the source is gone.
    fn wait<F: ByteStream>(&self, cx: &mut Context<'_>, from: &F, log: &mut Log) -> Poll<ControlFlow<Stop>> {
        ready!(from.poll_lost(cx));
        log.failed(self.from, How::WriteFailed(io::ErrorKind::BrokenPipe));
        Poll::Ready(ControlFlow::Break(Stop::Over))
    }

    fn source_finished(&mut self, log: &mut Log) -> Poll<ControlFlow<Stop>> {
        // The system reports a reset once, and it reported it to the writer: this read is not an end of stream.
        let reset = Ended { by: self.from, how: How::WriteFailed(io::ErrorKind::ConnectionReset) };
        if log.failed == Some(reset) {
            return Poll::Ready(ControlFlow::Break(Stop::Over));
        }
        log.finished.get_or_insert(self.from);
        self.state = State::Finishing;
        Poll::Ready(ControlFlow::Continue(()))
    }

    fn source_failed(&self, cause: &io::Error, log: &mut Log) -> Poll<ControlFlow<Stop>> {
        log.failed(self.from, How::ReadFailed(cause.kind()));
        Poll::Ready(ControlFlow::Break(Stop::Over))
    }

    fn destination_failed(&mut self, cause: &io::Error, log: &mut Log) {
        log.failed(self.from.other(), How::WriteFailed(cause.kind()));
        self.chunk = Bytes::new();
        self.state = State::Discarding;
    }
}
