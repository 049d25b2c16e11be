//! Copying between two byte streams, both ways, until both are done.

use std::future::poll_fn;
use std::io;
use std::ops::ControlFlow;
use std::task::{Context, Poll, ready};
use std::time::Duration;

use bytes::Bytes;
use prometheus_client::metrics::counter::Counter;
use tokio::time::{Instant, timeout, timeout_at};

use tunnel_net::ByteStream;
use tunnel_net::socket::{Connection, Socket};
use tunnel_net::tcp_info::unacknowledged;

/// Copies both ways until both sides have finished, without copying a byte in memory.
///
/// - A side that finishes ends one direction only: the other side is finished, and its own direction goes on.
/// - A side that cannot be written to may still have an answer under way (a server that refuses an upload): it is read
///   to its end, and what the other side goes on sending is taken and thrown away so that it does not get stuck. That
///   ends once that other side has taken no byte of the answer for [`DELIVERY`].
/// - A side that has finished and is [lost](ByteStream::poll_lost) ends the splice: the other side may be silent for ever.
/// - A side that cannot be read ends the splice. All that came from it has been given to the other side, which is
///   **not** finished: [`close_gracefully`] on it delivers the tail with a clean end, dropping it shows that something broke.
///
/// Yields to other tasks every [`BYTES_PER_TURN`] bytes. Dropping the future leaves both streams usable, but bytes that
/// were read from one and not yet written to the other are lost.
pub async fn copy_bidirectional<A: ByteStream, B: ByteStream>(a: &mut A, b: &mut B) -> Outcome {
    let mut to_b = CopyDirection::new(Side::A);
    let mut to_a = CopyDirection::new(Side::B);
    let mut log = Log::default();
    let mut patience = FlushDeadline { given: None, until: Instant::now() };
    let mut b_first = false;
    let mut healthy = true;
    while healthy || patience.lasts(to_a.given + to_b.given) {
        let mut room = BYTES_PER_TURN;
        let turn = poll_fn(|cx| {
            // The direction that used up the last turn comes second now, so that neither starves the other.
            for b_now in [b_first, !b_first] {
                let run = if b_now {
                    to_a.run(cx, b, a, &mut room, &mut log)
                } else {
                    to_b.run(cx, a, b, &mut room, &mut log)
                };
                // Also when the turn is used up: a source that always has more would never let the copy end.
                if CopyDirection::over(&to_a, &to_b) {
                    return Poll::Ready(CopyStep::Over);
                }
                if let ControlFlow::Break(stop) = run {
                    return Poll::Ready(stop);
                }
            }
            // A turn that waits has no bound in time before the first failure, and one behind it.
            if healthy && log.failed.is_some() { Poll::Ready(CopyStep::Turn) } else { Poll::Pending }
        });
        let stop = match healthy {
            true => turn.await,
            false => timeout_at(patience.until, turn).await.unwrap_or(CopyStep::Turn),
        };
        healthy = log.failed.is_none();
        match stop {
            CopyStep::Turn => {
                b_first = !b_first;
                tokio::task::yield_now().await;
            }
            CopyStep::Over => break,
        }
    }
    Outcome { to_a: to_a.given, to_b: to_b.given, ended: log.ended() }
}

/// Bounds what follows the first failure: it goes on while some bytes are taken within every [`DELIVERY`].
struct FlushDeadline {
    /// Bytes that both sides had taken when `until` was set; none before the failure.
    given: Option<u64>,
    until: Instant,
}

impl FlushDeadline {
    /// Whether to go on, now that both sides have taken so many bytes.
    fn lasts(&mut self, given: u64) -> bool {
        let now = Instant::now();
        if self.given != Some(given) {
            *self = Self { given: Some(given), until: now + DELIVERY };
        }
        now < self.until
    }
}

/// Bytes moved before other tasks get their turn. tokio alone lets one task go on for 128 operations, 8 MiB with our
/// buffers, and a keystroke beside four downloads then waits 8 ms instead of 1.2.
pub const BYTES_PER_TURN: usize = 256 * 1024;

// One direction of a splice.

/// One direction.
pub(crate) struct CopyDirection {
    from: Side,
    /// Bytes that were read and not yet written.
    chunk: Bytes,
    /// Bytes that the destination has taken.
    pub(crate) given: u64,
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
pub(crate) enum CopyStep {
    /// The turn is used up.
    Turn,
    Over,
}

impl CopyDirection {
    /// One that has moved nothing yet.
    pub(crate) fn new(from: Side) -> Self {
        Self { from, chunk: Bytes::new(), given: 0, unflushed: false, state: State::Copying }
    }

    /// Whether nothing is left to deliver in either direction.
    pub(crate) fn over(one: &Self, other: &Self) -> bool {
        let idle = |flow: &Self| matches!(flow.state, State::Done | State::Discarding);
        idle(one) && idle(other)
    }

    /// Moves bytes until the direction has to wait (`Continue`), `room` is used up, or the source cannot be read.
    pub(crate) fn run<F: ByteStream, T: ByteStream>(
        &mut self,
        cx: &mut Context<'_>,
        from: &mut F,
        to: &mut T,
        room: &mut usize,
        log: &mut Log,
    ) -> ControlFlow<CopyStep> {
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
    ) -> Poll<ControlFlow<CopyStep>> {
        if self.chunk.is_empty() {
            if *room == 0 {
                return Poll::Ready(ControlFlow::Break(CopyStep::Turn));
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
    ) -> Poll<ControlFlow<CopyStep>> {
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
    ) -> Poll<ControlFlow<CopyStep>> {
        if let Err(cause) = ready!(to.poll_finish(cx)) {
            log.failed(self.from.other(), EndKind::WriteFailed(cause.kind()));
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
    ) -> Poll<ControlFlow<CopyStep>> {
        if *room == 0 {
            return Poll::Ready(ControlFlow::Break(CopyStep::Turn));
        }
        match ready!(from.poll_read_chunk(cx)) {
            Ok(chunk) if chunk.is_empty() => self.state = State::Done,
            Ok(chunk) => *room = room.saturating_sub(chunk.len()),
            Err(cause) => return self.source_failed(&cause, log),
        }
        Poll::Ready(ControlFlow::Continue(()))
    }

    /// All is given. The other side may never send the source anything, so no write may ever show that the source is gone.
    fn wait<F: ByteStream>(
        &self,
        cx: &mut Context<'_>,
        from: &F,
        log: &mut Log,
    ) -> Poll<ControlFlow<CopyStep>> {
        ready!(from.poll_lost(cx));
        log.failed(self.from, EndKind::WriteFailed(io::ErrorKind::BrokenPipe));
        Poll::Ready(ControlFlow::Break(CopyStep::Over))
    }

    fn source_finished(&mut self, log: &mut Log) -> Poll<ControlFlow<CopyStep>> {
        // The system reports a reset once, and it reported it to the writer: this read is not an end of stream.
        let reset = CopyEnd { by: self.from, how: EndKind::WriteFailed(io::ErrorKind::ConnectionReset) };
        if log.failed == Some(reset) {
            return Poll::Ready(ControlFlow::Break(CopyStep::Over));
        }
        log.finished.get_or_insert(self.from);
        self.state = State::Finishing;
        Poll::Ready(ControlFlow::Continue(()))
    }

    fn source_failed(&self, cause: &io::Error, log: &mut Log) -> Poll<ControlFlow<CopyStep>> {
        log.failed(self.from, EndKind::ReadFailed(cause.kind()));
        Poll::Ready(ControlFlow::Break(CopyStep::Over))
    }

    fn destination_failed(&mut self, cause: &io::Error, log: &mut Log) {
        log.failed(self.from.other(), EndKind::WriteFailed(cause.kind()));
        self.chunk = Bytes::new();
        self.state = State::Discarding;
    }
}

// How a splice ends.

/// The result of a splice, for the access log.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Outcome {
    /// Bytes written to `a`.
    pub to_a: u64,
    /// Bytes written to `b`.
    pub to_b: u64,
    /// Which side ended it, and how.
    pub ended: CopyEnd,
}

/// Which side ended a splice, and how: the first failure if there was one, else the side that finished first.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct CopyEnd {
    /// The side.
    pub by: Side,
    /// How it ended.
    pub how: EndKind,
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
pub enum EndKind {
    /// It finished its direction in good order.
    Finished,
    /// Reading from it failed: it was reset, or went silent.
    ReadFailed(io::ErrorKind),
    /// Writing to it failed while the other side still sent bytes, or would fail if it did.
    WriteFailed(io::ErrorKind),
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

/// What has ended so far.
#[derive(Default)]
pub(crate) struct Log {
    /// The side that finished first.
    pub(crate) finished: Option<Side>,
    /// The first failure.
    pub(crate) failed: Option<CopyEnd>,
}

impl Log {
    /// Records a failure, unless it is not the first.
    pub(crate) fn failed(&mut self, by: Side, how: EndKind) {
        self.failed.get_or_insert(CopyEnd { by, how });
    }

    /// How the splice ended, once it has.
    pub(crate) fn ended(&self) -> CopyEnd {
        let finished = CopyEnd { by: self.finished.unwrap_or(Side::A), how: EndKind::Finished };
        self.failed.unwrap_or(finished)
    }
}

// A byte stream that counts the bytes that pass through it.

/// Counts as bytes pass, so that a session that is cut is counted up to that point.
#[derive(Debug)]
pub struct Counted<'a, D> {
    /// The stream itself.
    pub stream: &'a mut D,
    /// What was taken from it, and counted, before: handed out first.
    pub buffered: Bytes,
    /// Bytes read from it.
    pub taken: ByteCounter<'a>,
    /// Bytes written to it.
    pub given: ByteCounter<'a>,
}

/// Byte counters of one direction.
#[derive(Debug)]
pub struct ByteCounter<'a> {
    /// Counter of this session.
    pub one: &'a mut u64,
    /// Counter of all sessions of the process.
    pub all: &'a Counter,
}

impl ByteCounter<'_> {
    fn add(&mut self, bytes: usize) {
        *self.one += bytes as u64;
        self.all.inc_by(bytes as u64);
    }
}

impl<D: ByteStream> ByteStream for Counted<'_, D> {
    fn poll_read_chunk(&mut self, cx: &mut Context<'_>) -> Poll<io::Result<Bytes>> {
        if !self.buffered.is_empty() {
            return Poll::Ready(Ok(std::mem::take(&mut self.buffered)));
        }
        let bytes = ready!(self.stream.poll_read_chunk(cx))?;
        self.taken.add(bytes.len());
        Poll::Ready(Ok(bytes))
    }

    fn poll_write_chunk(&mut self, cx: &mut Context<'_>, bytes: &mut Bytes) -> Poll<io::Result<()>> {
        let before = bytes.len();
        let given = self.stream.poll_write_chunk(cx, bytes);
        self.given.add(before.saturating_sub(bytes.len()));
        given
    }

    fn poll_flush(&mut self, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        self.stream.poll_flush(cx)
    }

    fn poll_finish(&mut self, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        self.stream.poll_finish(cx)
    }

    fn poll_lost(&self, cx: &mut Context<'_>) -> Poll<()> {
        self.stream.poll_lost(cx)
    }
}

// Closes a stream without destroying bytes that its peer has not read, or not received, yet.

/// Closes one side of a splice that [breaks off](Connection::breaks_off) and has ended: in good order, unless the other
/// side failed. Then the peer receives what was written to it, and dropping the socket resets the connection.
pub async fn close<C: Connection>(socket: &mut Socket<C>, side: Side, ended: CopyEnd) {
    if ended.by == side || ended.how == EndKind::Finished {
        socket.io().breaks_off(false);
        close_gracefully(socket).await;
    } else {
        wait_acknowledged(socket).await;
    }
}

/// Closes a stream without destroying bytes that its peer has not read yet. Call it before dropping a socket.
///
/// Finishes the sending direction, then reads and throws away until the peer finishes too: closing a socket while
/// bytes from the peer are unread makes the kernel send RST, and that discards what the peer has not read. Gives up
/// after [`LINGER_SILENCE`] without a byte, [`LINGER_TIMEOUT`] in all, or [`LINGER_MAX_BYTES`] bytes. Ignores errors.
pub async fn close_gracefully<D: ByteStream>(stream: &mut D) {
    let _ = timeout(LINGER_TIMEOUT, async {
        if poll_fn(|cx| stream.poll_finish(cx)).await.is_err() {
            return;
        }
        let mut discarded = 0;
        while discarded < LINGER_MAX_BYTES {
            match timeout(LINGER_SILENCE, poll_fn(|cx| stream.poll_read_chunk(cx))).await {
                Ok(Ok(bytes)) if !bytes.is_empty() => discarded += bytes.len(),
                _ => return,
            }
        }
    })
    .await;
}

/// Waits until the peer's kernel has all that was written to a socket, which may then be reset. A reset discards what
/// still waits to be sent here, in the kernel or in TLS, but not what has arrived there.
///
/// Discards what comes meanwhile, so that a peer that first writes and then reads does not get stuck. Gives up when the
/// peer resets the connection, or after [`DELIVERY`]; where the system does not report acknowledgements, after
/// [`LINGER_SILENCE`]. Without TCP under it, what was written arrives by itself.
pub async fn wait_acknowledged<C: Connection>(socket: &mut Socket<C>) {
    let started = Instant::now();
    let (mut pause, mut leaving) = (FIRST_LOOK, Leaving { socket, flushed: false, ended: false });
    loop {
        let patience = match leaving.socket.io().tcp().map(unacknowledged) {
            _ if !leaving.flushed => DELIVERY,
            None | Some(Ok(0)) => return,
            Some(Ok(_)) => DELIVERY,
            Some(Err(_)) => LINGER_SILENCE,
        };
        let left = patience.saturating_sub(started.elapsed());
        if left.is_zero() {
            return;
        }
        let look = if leaving.flushed { pause.min(left) } else { left };
        match timeout(look, poll_fn(|cx| leaving.poll(cx))).await {
            Ok(Ok(())) => {}
            Ok(Err(_)) => return,
            Err(_) => pause = (pause * 2).min(SELDOM_LOOK),
        }
    }
}

/// A socket that nothing more is written to.
struct Leaving<'a, C> {
    socket: &'a mut Socket<C>,
    /// The kernel has everything.
    flushed: bool,
    /// The peer has finished its direction.
    ended: bool,
}

impl<C: Connection> Leaving<'_, C> {
    /// Flushes it, and throws away what comes. Completes once it is flushed, and fails once its peer is gone.
    fn poll(&mut self, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        if !self.flushed && self.socket.poll_flush(cx)?.is_ready() {
            self.flushed = true;
            return Poll::Ready(Ok(()));
        }
        while !self.ended {
            self.ended = ready!(self.socket.poll_read_chunk(cx))?.is_empty();
        }
        Poll::Pending
    }
}

/// How long a peer may take to get what was written to it: as long as a session may be without a path by default.
pub const DELIVERY: Duration = Duration::from_secs(60);

/// Pauses between two looks at what is under way: about a round trip at first.
const FIRST_LOOK: Duration = Duration::from_millis(1);
const SELDOM_LOOK: Duration = Duration::from_millis(100);

/// Silence after which a peer is taken to send nothing more: TCP has then repeated a lost segment three times.
pub const LINGER_SILENCE: Duration = Duration::from_secs(2);

/// How long closing may take in all, so that a peer that never stops sending cannot hold us.
pub const LINGER_TIMEOUT: Duration = Duration::from_secs(10);

/// Bytes to throw away at most: several times what both kernels' buffers hold, half a second of a 1 Gbit/s upload.
pub const LINGER_MAX_BYTES: usize = 64 << 20;

#[cfg(test)]
mod tests;
