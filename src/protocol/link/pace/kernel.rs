//! How much may be under way by what the kernel knows of the line.
//!
//! It tells two things apart that pings cannot. What waits in our own socket is no queue of the line's, and must be
//! little: the kernel, too, sends only as fast as it thinks right, and the rest stands before every keystroke. And what
//! is on the way is bounded by the line's own round trip.

use std::time::Duration;

use tokio::time::Instant;

use crate::net::tcp_info::TcpInfo;
use crate::protocol::link::pace::cap::{Cap, FIRST_CAP};
use crate::protocol::link::pace::cruise::Cruise;
use crate::protocol::link::pace::rate::carried;

/// What the kernel has shown of one line.
#[derive(Debug)]
pub(super) struct Kernel {
    pub(super) cap: Cap,
    /// While an interactive link stands beside this one.
    cruise: Option<Cruise>,
    latest: TcpInfo,
    at: Instant,
    /// Bytes pulled when it was read.
    sent: u64,
    /// Of these, the bytes that had not come to the kernel: they stand in HTTP/2's and TLS's buffers.
    above: u64,
    /// The least that the bytes pulled were ahead of those written. It only ever falls: what is pulled is counted
    /// without HTTP/2's and TLS's own, what is written with them.
    least_ahead: i64,
    /// Bytes that may be pulled before it is read again, if they are bounded. A kernel that has emptied the line, as BBR does to see its least
    /// round trip, would else send a whole cap at once behind that, which is a queue of half a round trip.
    allowed: Option<i64>,
}

impl Kernel {
    /// After the first reading.
    pub(super) fn new(reading: TcpInfo, sent: u64, now: Instant) -> Self {
        let mut this = Self {
            cap: Cap::new(),
            cruise: None,
            latest: reading,
            at: now,
            sent,
            above: 0,
            least_ahead: i64::MAX,
            allowed: None,
        };
        this.read(reading, sent, now);
        this
    }

    /// The next reading, when `sent` bytes have been pulled.
    pub(super) fn read(&mut self, reading: TcpInfo, sent: u64, now: Instant) {
        let ahead = sent.wrapping_sub(reading.written).cast_signed();
        self.least_ahead = self.least_ahead.min(ahead);
        self.above = ahead.wrapping_sub(self.least_ahead).cast_unsigned();
        self.allowed = self.pour().map(|(rate, jitter)| {
            // A frame may be longer than what was left: then the next one waits for that.
            let left = self.allowed.unwrap_or_default() - sent.wrapping_sub(self.sent).cast_signed();
            let more = left.saturating_add_unsigned(carried(rate, now - self.at));
            // What waits in the socket will go with it.
            let most = carried(rate, self.patience() + jitter).saturating_sub(reading.unsent);
            more.min(most.cast_signed())
        });
        (self.latest, self.sent, self.at) = (reading, sent, now);
        if reading.in_flight <= FEW {
            self.cap.varies(reading.variation * RANGE, now);
        }
        self.cap.sample(reading.round_trip, reading.delivered, now);
        if let Some(least) =
            self.cruise.as_mut().and_then(|cruise| cruise.read(&self.cap, reading.round_trip, sent, now))
        {
            self.cap.renew(least);
        }
    }

    /// Whether an interactive link stands beside this one.
    pub(super) fn share(&mut self, shared: bool) {
        let new = || Cruise::new(&self.cap, self.sent, self.at);
        self.cruise = shared.then(|| self.cruise.take().unwrap_or_else(new));
    }

    /// Whether it should be read again before anything is decided.
    pub(super) fn is_stale(&self, now: Instant) -> bool {
        now - self.at >= FRESH
    }

    /// Whether bulk has to wait when `sent` bytes have been pulled.
    pub(super) fn is_capped(&mut self, sent: u64) -> bool {
        let waits = self.latest.unsent + self.above + (sent - self.sent);
        // Not the line's, so nothing that its cap should grow by.
        let floods = self.allowed.is_some_and(|allowed| (sent - self.sent).cast_signed() >= allowed);
        waits >= self.may_wait() || floods || self.cap.is_reached(self.latest.in_flight + waits)
    }

    /// When to look again, if bulk has to wait: before all that waits is sent.
    pub(super) fn look_after(&self) -> Duration {
        self.patience() / 3
    }

    /// The round trip of late.
    pub(super) fn round_trip(&self) -> Duration {
        self.latest.round_trip
    }

    /// Bytes that may wait in our buffers and in the socket.
    fn may_wait(&self) -> u64 {
        if self.cap.rate().is_none() {
            return FIRST_CAP;
        }
        let rate = self.pour().map_or(self.latest.pacing, |(rate, _)| rate.min(self.latest.pacing));
        carried(rate, self.patience()).clamp(LEAST_WAITING, MOST_WAITING)
    }

    /// How fast bulk may be let go, and how long it may be let go at once, if that is bounded.
    fn pour(&self) -> Option<(u64, Duration)> {
        let (rate, jitter) = self.cap.pour()?;
        let slower = self.cruise.as_ref().and_then(Cruise::rate);
        Some((slower.map_or(rate, |slower| rate.min(slower)), jitter))
    }

    fn patience(&self) -> Duration {
        LONGEST_WAIT.max(self.cap.least().unwrap_or_default() / 16)
    }
}

/// With so few bytes under way the round trip varies by itself.
const FEW: u64 = 6000;
/// How far round trips lie apart, in their mean deviations. Less lets a line that jitters seem to have a queue.
const RANGE: u32 = 5;
/// A reading this old is renewed.
const FRESH: Duration = Duration::from_millis(1);
/// How long a byte may wait in our socket, or a sixteenth of the least round trip if that is more: the kernel never runs
/// dry while this side sleeps.
const LONGEST_WAIT: Duration = Duration::from_millis(12);
/// Two of the shortest frames.
const LEAST_WAITING: u64 = 8 * 1024;
/// More than buffers take in any case.
const MOST_WAITING: u64 = 8 << 20;

#[cfg(test)]
mod tests;
