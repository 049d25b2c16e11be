//! Copies between two byte streams in both directions until both are done.

pub mod close;

use std::future::poll_fn;
use std::io;
use std::ops::ControlFlow;
use std::pin::pin;
use std::task::{Context, Poll, ready};
use std::time::Duration;

use bytes::Bytes;
use prometheus_client::metrics::counter::Counter;
use tokio::net::TcpStream;
use tokio::time::{Instant, timeout_at};

use crate::session_io::copy::close::{DELIVERY_TIMEOUT, READER_PAUSE};
use tunnel_net::ChunkStream;
use tunnel_net::socket::in_error;

/// Copies in both directions until both sides have finished, without copying bytes in memory.
///
/// - A side that finishes ends only one direction: the other side is finished, and its own direction continues.
/// - A side that cannot be written to, or is [lost](ChunkStream::poll_lost), may have sent bytes that are not delivered
///   yet, such as the response of a server that rejects an upload. It is read to its end. Meanwhile the bytes that the
///   other side sends are discarded, so that it does not block. This ends once the other side has accepted no byte for
///   [`DELIVERY_TIMEOUT`], or for [`READER_PAUSE`] if the bytes are known to end cleanly.
/// - A lost side of which nothing is left ends the copying, because the other side may stay idle forever.
/// - A side that cannot be read ends the copying. All its bytes were given to the other side, which is **not**
///   finished: `close_gracefully` on it delivers the rest with a clean end, dropping it signals a failure.
///
/// Yields to other tasks every [`BYTES_PER_TURN`] bytes. Dropping the future leaves both streams usable, but bytes that
/// were read from one stream and not yet written to the other are lost.
pub async fn copy_bidirectional(a: &mut dyn ChunkStream, b: &mut dyn ChunkStream) -> CopyEnd {
    copy(a, b, &mut CopyDirection::new(Side::A), &mut CopyDirection::new(Side::B)).await
}

/// Like [`copy_bidirectional`], with a direction from `a` and one from `b`.
pub(crate) async fn copy(
    a: &mut dyn ChunkStream,
    b: &mut dyn ChunkStream,
    to_b: &mut CopyDirection<'_>,
    to_a: &mut CopyDirection<'_>,
) -> CopyEnd {
    let mut log = CopyEndRecord::default();
    let mut deadline = FlushDeadline { given: None, until: Instant::now() };
    let mut b_first = false;
    loop {
        let healthy = log.failed.is_none();
        if !healthy && !deadline.should_continue(log.flush_timeout(), to_a.given + to_b.given) {
            break;
        }
        let mut left = BYTES_PER_TURN;
        let step = poll_fn(|cx| {
            let mut turn = CopyTurn { cx, left: &mut left, log: &mut log };
            Poll::Ready(turn.run((a, to_b), (b, to_a), b_first))
        });
        match step.await {
            CopyStep::Over => break,
            CopyStep::Turn => {
                b_first = !b_first;
                tokio::task::yield_now().await;
            }
            // After the first failure the time to wait is limited.
            CopyStep::Wait if healthy && log.failed.is_some() => {}
            CopyStep::Wait => {
                let event =
                    woken(a.tcp().filter(|_| to_b.is_unwatched()), b.tcp().filter(|_| to_a.is_unwatched()));
                match healthy {
                    true => event.await,
                    false => drop(timeout_at(deadline.until, event).await),
                }
            }
        }
    }
    log.ended()
}

/// Waits until the task is woken by what the turn before has polled, or a socket that no read watches has failed.
///
/// Its first poll belongs to the same poll of the task as that turn, so the second one follows a waker of the turn. It is
/// not a `select!`, which may skip that first poll.
async fn woken(a: Option<&TcpStream>, b: Option<&TcpStream>) {
    let mut a_failed = pin!(in_error(a));
    let mut b_failed = pin!(in_error(b));
    let mut polls = 0;
    poll_fn(|cx| {
        polls += 1;
        let failed = a_failed.as_mut().poll(cx).is_ready() || b_failed.as_mut().poll(cx).is_ready();
        if polls > 1 || failed { Poll::Ready(()) } else { Poll::Pending }
    })
    .await;
}

/// The deadline after the first failure. It is extended as long as some bytes are accepted within a time.
struct FlushDeadline {
    /// Bytes that both sides had accepted when `until` was set; `None` before the failure.
    given: Option<u64>,
    until: Instant,
}

impl FlushDeadline {
    /// Returns true if copying should continue, now that both sides have accepted `given` bytes.
    fn should_continue(&mut self, timeout: Duration, given: u64) -> bool {
        let now = Instant::now();
        if self.given != Some(given) {
            *self = Self { given: Some(given), until: now + timeout };
        }
        now < self.until
    }
}

/// Bytes copied before other tasks may run.
///
/// tokio alone lets one task continue for 128 operations, which is 8 MiB with these buffers. A keystroke next to four
/// downloads then waits 8 ms instead of 1.2 ms.
pub const BYTES_PER_TURN: usize = 256 * 1024;

/// One direction of a copy between two streams: what was read from one and not yet written to the other.
pub(crate) struct CopyDirection<'a> {
    /// The stream that is read.
    from: Side,
    /// Bytes that were read and not yet written.
    chunk: Bytes,
    /// Whether the destination has no room. The source is not read then.
    full: bool,
    /// Counts the bytes as they pass [`Side::B`], the session; so an aborted session is counted up to that point.
    counter: Option<ByteCounter<'a>>,
    /// Bytes that the destination has accepted.
    pub(crate) given: u64,
    /// Whether bytes were written since the last flush.
    unflushed: bool,
    /// Whether the source is lost.
    lost: bool,
    state: State,
}

/// The progress of a [`CopyDirection`].
#[derive(Clone, Copy, PartialEq, Eq)]
enum State {
    /// Bytes are read and written.
    Copying,
    /// The source has finished; the destination's sending direction is being finished.
    Finishing,
    /// Writing failed. The source is still read, so that it does not block.
    Discarding,
    /// The source has ended, and nothing more is written.
    Done,
}

/// One turn of a copy, after which other tasks may run.
pub(crate) struct CopyTurn<'a, 'c> {
    cx: &'a mut Context<'c>,
    /// Bytes that may still be copied in it.
    left: &'a mut usize,
    log: &'a mut CopyEndRecord,
}

/// The result of a step of a direction: it waits, continues, or stops the turn.
type CopyPoll = Poll<ControlFlow<CopyStep>>;

/// The reason why the copying pauses or ends.
pub(crate) enum CopyStep {
    /// The turn is used up.
    Turn,
    /// Both directions wait.
    Wait,
    /// Nothing more can be copied.
    Over,
}

impl CopyTurn<'_, '_> {
    /// Copies bytes in both directions, each given as its source and itself. A direction that used up the last turn
    /// comes second, so that neither starves.
    fn run(
        &mut self,
        (a, to_b): (&mut dyn ChunkStream, &mut CopyDirection<'_>),
        (b, to_a): (&mut dyn ChunkStream, &mut CopyDirection<'_>),
        b_first: bool,
    ) -> CopyStep {
        for b_now in [b_first, !b_first] {
            let run = if b_now { to_a.run(self, b, a) } else { to_b.run(self, a, b) };
            // Checked even if the turn is used up: otherwise a source that always has more bytes would never let the
            // copy end.
            if CopyDirection::over(to_a, to_b) {
                return CopyStep::Over;
            }
            if let ControlFlow::Break(stop) = run {
                return stop;
            }
        }
        // Before the check: the last bytes of a side may arrive with its error, after they were read for.
        let is_exhausted = to_a.is_exhausted() || to_b.is_exhausted();
        let lost = to_b.check_source(self, a, to_a) | to_a.check_source(self, b, to_b);
        if CopyDirection::over(to_a, to_b) || is_exhausted {
            return CopyStep::Over;
        }
        if lost { CopyStep::Turn } else { CopyStep::Wait }
    }
}

/// The counters of bytes copied in one direction: of the session, and of the process.
#[derive(Debug)]
pub struct ByteCounter<'a> {
    /// The session's counter.
    pub one: &'a mut u64,
    /// The counter of all sessions in the process.
    pub all: &'a Counter,
}

impl ByteCounter<'_> {
    /// Counts bytes.
    pub fn add(&mut self, bytes: usize) {
        *self.one += bytes as u64;
        self.all.inc_by(bytes as u64);
    }
}

impl<'a> CopyDirection<'a> {
    /// Creates a direction that has copied nothing yet.
    pub(crate) fn new(from: Side) -> Self {
        Self {
            from,
            chunk: Bytes::new(),
            full: false,
            counter: None,
            given: 0,
            unflushed: false,
            lost: false,
            state: State::Copying,
        }
    }

    /// Creates a direction that is counted. It begins with `early`, which was read and counted before.
    pub(crate) fn counted(from: Side, early: Bytes, counter: ByteCounter<'a>) -> Self {
        Self { chunk: early, counter: Some(counter), ..Self::new(from) }
    }

    /// Counts bytes that were read from, or written to, that side.
    fn count(&mut self, side: Side, bytes: usize) {
        if side == Side::B
            && let Some(counter) = &mut self.counter
        {
            counter.add(bytes);
        }
    }

    /// Returns true if nothing is left to deliver in either direction.
    pub(crate) fn over(one: &CopyDirection<'_>, other: &CopyDirection<'_>) -> bool {
        let idle = |flow: &CopyDirection<'_>| matches!(flow.state, State::Done | State::Discarding);
        idle(one) && idle(other)
    }

    /// Copies bytes until the direction has to wait (`Continue`), the turn is used up, or the source cannot be read.
    pub(crate) fn run(
        &mut self,
        turn: &mut CopyTurn<'_, '_>,
        from: &mut dyn ChunkStream,
        to: &mut dyn ChunkStream,
    ) -> ControlFlow<CopyStep> {
        loop {
            // A turn ends between two chunks, because bytes that were read must not wait for the next turn.
            let reads = matches!(self.state, State::Copying | State::Discarding) && self.chunk.is_empty();
            if reads && *turn.left == 0 {
                return ControlFlow::Break(CopyStep::Turn);
            }
            let step = match self.state {
                State::Copying => self.copy(turn, from, to),
                State::Finishing => self.finish(turn, to),
                State::Discarding => self.discard(turn, from),
                State::Done => Poll::Pending,
            };
            match step {
                Poll::Pending => return ControlFlow::Continue(()),
                Poll::Ready(ControlFlow::Break(stop)) => return ControlFlow::Break(stop),
                Poll::Ready(ControlFlow::Continue(())) => {}
            }
        }
    }

    fn copy(
        &mut self,
        turn: &mut CopyTurn<'_, '_>,
        from: &mut dyn ChunkStream,
        to: &mut dyn ChunkStream,
    ) -> CopyPoll {
        if self.chunk.is_empty() {
            // Bytes that wait here for room are in no budget, so none are read before there is some. A lost source has
            // few left, and its end must not wait.
            self.full = !self.lost && to.poll_write_chunk(turn.cx, &mut Bytes::new()).is_pending();
            if self.full {
                return Poll::Pending;
            }
            match from.poll_read_chunk(turn.cx) {
                Poll::Ready(Ok(chunk)) if chunk.is_empty() => return self.source_finished(turn),
                Poll::Ready(Ok(chunk)) => {
                    self.count(self.from, chunk.len());
                    self.chunk = chunk;
                }
                Poll::Ready(Err(cause)) => return self.source_failed(&cause, turn),
                // Nothing more arrives for now, so what was written must not wait in a buffer.
                Poll::Pending => return self.flush(turn, to),
            }
        }
        let before = self.chunk.len();
        let written = to.poll_write_chunk(turn.cx, &mut self.chunk);
        self.full = written.is_pending();
        match ready!(written) {
            Ok(()) => {
                let given = before - self.chunk.len();
                self.given += given as u64;
                self.count(self.from.other(), given);
                self.unflushed = true;
                *turn.left = turn.left.saturating_sub(given);
            }
            Err(cause) => self.destination_failed(&cause, turn),
        }
        Poll::Ready(ControlFlow::Continue(()))
    }

    /// Flushes the destination's buffer when there is nothing more to write for now.
    fn flush(&mut self, turn: &mut CopyTurn<'_, '_>, to: &mut dyn ChunkStream) -> CopyPoll {
        if self.unflushed {
            match ready!(to.poll_flush(turn.cx)) {
                Ok(()) => self.unflushed = false,
                Err(cause) => {
                    self.destination_failed(&cause, turn);
                    return Poll::Ready(ControlFlow::Continue(()));
                }
            }
        }
        Poll::Pending
    }

    fn finish(&mut self, turn: &mut CopyTurn<'_, '_>, to: &mut dyn ChunkStream) -> CopyPoll {
        if let Err(cause) = ready!(to.poll_finish(turn.cx)) {
            turn.log.failed(self.from.other(), EndKind::WriteFailed(cause.kind()));
        }
        self.state = State::Done;
        Poll::Ready(ControlFlow::Continue(()))
    }

    fn discard(&mut self, turn: &mut CopyTurn<'_, '_>, from: &mut dyn ChunkStream) -> CopyPoll {
        match ready!(from.poll_read_chunk(turn.cx)) {
            Ok(chunk) if chunk.is_empty() => self.state = State::Done,
            Ok(chunk) => {
                self.count(self.from, chunk.len());
                *turn.left = turn.left.saturating_sub(chunk.len());
            }
            Err(cause) => return self.source_failed(&cause, turn),
        }
        Poll::Ready(ControlFlow::Continue(()))
    }

    /// Checks whether the source is lost, and returns true if that is new. `back` is the direction towards it.
    fn check_source(
        &mut self,
        turn: &mut CopyTurn<'_, '_>,
        from: &mut dyn ChunkStream,
        back: &mut CopyDirection<'_>,
    ) -> bool {
        if !self.lost
            && let Poll::Ready(cause) = from.poll_lost(turn.cx)
        {
            self.lost = true;
            // No write may take the error from the system, because then a read would report a clean end.
            back.destination_failed(&cause, turn);
            return true;
        }
        false
    }

    /// Returns true if no read waits that would report an error of the source.
    fn is_unwatched(&self) -> bool {
        !self.lost && (matches!(self.state, State::Finishing | State::Done) || self.full)
    }

    /// Returns true if the source is lost and waits for nothing but more bytes of it. Call after [`Self::run`].
    fn is_exhausted(&self) -> bool {
        self.lost && self.state == State::Copying && !self.full
    }

    fn source_finished(&mut self, turn: &mut CopyTurn<'_, '_>) -> CopyPoll {
        // The system reports the error of a connection only once, and it was reported to the writer. So this read is
        // not an end of stream, unless that had arrived before the error.
        if let Some(CopyEnd { by, how: EndKind::WriteFailed(kind) }) = turn.log.failed
            && by == self.from
            && kind != io::ErrorKind::BrokenPipe
        {
            return Poll::Ready(ControlFlow::Break(CopyStep::Over));
        }
        turn.log.finished.get_or_insert(self.from);
        self.state = State::Finishing;
        Poll::Ready(ControlFlow::Continue(()))
    }

    fn source_failed(&self, cause: &io::Error, turn: &mut CopyTurn<'_, '_>) -> CopyPoll {
        turn.log.failed(self.from, EndKind::ReadFailed(cause.kind()));
        Poll::Ready(ControlFlow::Break(CopyStep::Over))
    }

    fn destination_failed(&mut self, cause: &io::Error, turn: &mut CopyTurn<'_, '_>) {
        turn.log.failed(self.from.other(), EndKind::WriteFailed(cause.kind()));
        self.chunk = Bytes::new();
        self.full = false;
        self.state = match self.state {
            State::Copying | State::Discarding => State::Discarding,
            State::Finishing | State::Done => State::Done,
        };
    }
}

/// Which side ended a copy, and how: the first failure if there was one, otherwise the side that finished first.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct CopyEnd {
    /// The side.
    pub by: Side,
    /// How it ended.
    pub how: EndKind,
}

/// One of the two streams, by its position in the arguments.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Side {
    /// The first argument.
    A,
    /// The second argument.
    B,
}

/// How one side of a copy ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum EndKind {
    /// It finished its direction cleanly.
    Finished,
    /// Reading from it failed: it was reset, or became unresponsive.
    ReadFailed(io::ErrorKind),
    /// Writing to it failed while the other side still sent bytes, or would fail if it did.
    WriteFailed(io::ErrorKind),
}

impl CopyEnd {
    /// Returns true if a session was evicted. Then nothing more is delivered, because bytes that wait take memory.
    pub(crate) fn is_for_memory(self) -> bool {
        use io::ErrorKind::OutOfMemory;
        matches!(self.how, EndKind::ReadFailed(OutOfMemory) | EndKind::WriteFailed(OutOfMemory))
    }
}

impl Side {
    /// Returns the other side.
    pub fn other(self) -> Self {
        match self {
            Self::A => Self::B,
            Self::B => Self::A,
        }
    }
}

/// What one copy has recorded about its end: the side that finished first, and the first failure, which takes
/// precedence in its [`CopyEnd`].
#[derive(Default)]
pub(crate) struct CopyEndRecord {
    /// The side that finished first.
    pub(crate) finished: Option<Side>,
    /// The first failure.
    pub(crate) failed: Option<CopyEnd>,
}

impl CopyEndRecord {
    /// Records a failure if it is the first.
    pub(crate) fn failed(&mut self, by: Side, how: EndKind) {
        self.failed.get_or_insert(CopyEnd { by, how });
    }

    /// Returns how long a failure lets the copying wait for the next byte to be accepted.
    fn flush_timeout(&self) -> Duration {
        match self.failed {
            Some(end) if end.is_for_memory() => Duration::ZERO,
            Some(CopyEnd { how: EndKind::WriteFailed(io::ErrorKind::BrokenPipe), .. }) => READER_PAUSE,
            _ => DELIVERY_TIMEOUT,
        }
    }

    /// Returns how the copy ended.
    pub(crate) fn ended(&self) -> CopyEnd {
        let finished = CopyEnd { by: self.finished.unwrap_or(Side::A), how: EndKind::Finished };
        self.failed.unwrap_or(finished)
    }
}

#[cfg(test)]
mod tests;
