//! Copying between two byte streams, both ways, until both are done.

mod linger;

use std::future::poll_fn;
use std::io;
use std::ops::ControlFlow;
use std::task::{Context, Poll, ready};

use bytes::Bytes;

pub use linger::{DELIVERY, LINGER_MAX_BYTES, LINGER_SILENCE, LINGER_TIMEOUT, deliver, linger};

use super::ByteStream;

/// The result of a splice, for the access log.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Outcome {
    /// Bytes written to `a`.
    pub to_a: u64,
    /// Bytes written to `b`.
    pub to_b: u64,
    /// Which side ended it, and how.
    pub ended: Ended,
}

/// Which side ended a splice, and how: the first failure if there was one, else the side that finished first.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Ended {
    /// The side.
    pub by: Side,
    /// How it ended.
    pub how: How,
}

/// One of the two streams, by its position among the arguments.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Side {
    /// The first argument.
    A,
    /// The second argument.
    B,
}

/// How a side ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum How {
    /// It finished its direction in good order.
    Finished,
    /// Reading from it failed: it was reset, or went silent.
    ReadFailed(io::ErrorKind),
    /// Writing to it failed while the other side still sent bytes.
    WriteFailed(io::ErrorKind),
}

/// Copies both ways until both sides have finished, without copying a byte in memory.
///
/// - A side that finishes ends one direction only: the other side is finished, and its own direction goes on.
/// - A side that cannot be written to may still have an answer under way (a server that refuses an upload): it is read
///   to its end, and what the other side goes on sending is taken and thrown away so that it does not get stuck.
/// - A side that cannot be read ends the splice. All that came from it has been given to the other side, which is
///   **not** finished: [`linger`] on it delivers the tail with a clean end, dropping it shows that something broke.
///
/// Yields to other tasks every [`BYTES_PER_TURN`] bytes. Dropping the future leaves both streams usable, but bytes that
/// were read from one and not yet written to the other are lost.
pub async fn splice<A: ByteStream, B: ByteStream>(a: &mut A, b: &mut B) -> Outcome {
    let mut to_b = Flow::new(Side::A);
    let mut to_a = Flow::new(Side::B);
    let mut log = Log::default();
    let mut b_first = false;
    loop {
        let mut room = BYTES_PER_TURN;
        let turn = poll_fn(|cx| {
            // The direction that used up the last turn comes second now, so that neither starves the other.
            for b_now in [b_first, !b_first] {
                let run = if b_now {
                    to_a.run(cx, b, a, &mut room, &mut log)
                } else {
                    to_b.run(cx, a, b, &mut room, &mut log)
                };
                if let ControlFlow::Break(stop) = run {
                    return Poll::Ready(stop);
                }
            }
            if Flow::over(&to_a, &to_b) { Poll::Ready(Stop::Over) } else { Poll::Pending }
        })
        .await;
        match turn {
            Stop::Turn => {
                b_first = !b_first;
                tokio::task::yield_now().await;
            }
            Stop::Over => break,
        }
    }
    Outcome { to_a: to_a.given, to_b: to_b.given, ended: log.ended() }
}

/// One direction.
struct Flow {
    from: Side,
    /// Bytes that were read and not yet written.
    chunk: Bytes,
    given: u64,
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
enum Stop {
    /// The turn is used up.
    Turn,
    Over,
}

#[derive(Default)]
struct Log {
    finished: Option<Side>,
    failed: Option<Ended>,
}

impl Flow {
    fn new(from: Side) -> Self {
        Self { from, chunk: Bytes::new(), given: 0, unflushed: false, state: State::Copying }
    }

    /// Whether nothing is left to deliver in either direction.
    fn over(one: &Self, other: &Self) -> bool {
        let idle = |flow: &Self| matches!(flow.state, State::Done | State::Discarding);
        idle(one) && idle(other)
    }

    /// Moves bytes until the direction has to wait (`Continue`), `room` is used up, or the source cannot be read.
    fn run<F: ByteStream, T: ByteStream>(
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
                State::Done => Poll::Pending,
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

impl Side {
    /// The other side.
    pub fn other(self) -> Self {
        match self {
            Self::A => Self::B,
            Self::B => Self::A,
        }
    }
}

impl Log {
    fn failed(&mut self, by: Side, how: How) {
        self.failed.get_or_insert(Ended { by, how });
    }

    fn ended(&self) -> Ended {
        let finished = Ended { by: self.finished.unwrap_or(Side::A), how: How::Finished };
        self.failed.unwrap_or(finished)
    }
}

/// Bytes moved before other tasks get their turn. tokio alone lets one task go on for 128 operations, 8 MiB with our
/// buffers, and a keystroke beside four downloads then waits 8 ms instead of 1.2.
pub const BYTES_PER_TURN: usize = 256 * 1024;

#[cfg(test)]
mod tests;
