//! Copying between two byte streams, both ways, until both are done.

mod flow;
mod linger;
mod outcome;

use std::future::poll_fn;
use std::ops::ControlFlow;
use std::task::Poll;

use tokio::time::{Instant, timeout_at};

pub use linger::{DELIVERY, LINGER_MAX_BYTES, LINGER_SILENCE, LINGER_TIMEOUT, close, deliver, linger};
pub use outcome::{Ended, How, Outcome, Side};

use crate::net::ByteStream;
use crate::net::splice::flow::{Flow, Stop};
use crate::net::splice::outcome::Log;

/// Copies both ways until both sides have finished, without copying a byte in memory.
///
/// - A side that finishes ends one direction only: the other side is finished, and its own direction goes on.
/// - A side that cannot be written to may still have an answer under way (a server that refuses an upload): it is read
///   to its end, and what the other side goes on sending is taken and thrown away so that it does not get stuck. That
///   ends once that other side has taken no byte of the answer for [`DELIVERY`].
/// - A side that has finished and is [lost](ByteStream::poll_lost) ends the splice: the other side may be silent for ever.
/// - A side that cannot be read ends the splice. All that came from it has been given to the other side, which is
///   **not** finished: [`linger`] on it delivers the tail with a clean end, dropping it shows that something broke.
///
/// Yields to other tasks every [`BYTES_PER_TURN`] bytes. Dropping the future leaves both streams usable, but bytes that
/// were read from one and not yet written to the other are lost.
pub async fn splice<A: ByteStream, B: ByteStream>(a: &mut A, b: &mut B) -> Outcome {
    let mut to_b = Flow::new(Side::A);
    let mut to_a = Flow::new(Side::B);
    let mut log = Log::default();
    let mut patience = Patience { given: None, until: Instant::now() };
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
                if Flow::over(&to_a, &to_b) {
                    return Poll::Ready(Stop::Over);
                }
                if let ControlFlow::Break(stop) = run {
                    return Poll::Ready(stop);
                }
            }
            // A turn that waits has no bound in time before the first failure, and one behind it.
            if healthy && log.failed.is_some() { Poll::Ready(Stop::Turn) } else { Poll::Pending }
        });
        let stop = match healthy {
            true => turn.await,
            false => timeout_at(patience.until, turn).await.unwrap_or(Stop::Turn),
        };
        healthy = log.failed.is_none();
        match stop {
            Stop::Turn => {
                b_first = !b_first;
                tokio::task::yield_now().await;
            }
            Stop::Over => break,
        }
    }
    Outcome { to_a: to_a.given, to_b: to_b.given, ended: log.ended() }
}

/// Bounds what follows the first failure: it goes on while some bytes are taken within every [`DELIVERY`].
struct Patience {
    /// Bytes that both sides had taken when `until` was set; none before the failure.
    given: Option<u64>,
    until: Instant,
}

impl Patience {
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

#[cfg(test)]
mod tests;
