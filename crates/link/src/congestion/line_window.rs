//! How many bytes may be in flight, from the kernel's knowledge of the line.
//!
//! The kernel distinguishes two queues that pings cannot. Bytes in our own socket are not queued on the line. They
//! must be few, because the kernel limits its sending rate as well, and the rest is queued ahead of every
//! keystroke. Bytes on the line are limited by the line's own RTT.

use std::time::Duration;

use tokio::time::Instant;

use crate::congestion::spare_capacity::Cruise;
use crate::congestion::window::{CongestionWindow, INITIAL_CWND};
use crate::congestion::{carried, time_of};
use tunnel_net::tcp_info::TcpInfo;

/// The congestion window of one link, derived from the kernel's readings (`TCP_INFO`) of its TCP connection.
#[derive(Debug)]
pub(crate) struct TcpInfoCongestion {
    pub(crate) cap: CongestionWindow,
    /// Set while there is an interactive link next to this one.
    cruise: Option<Cruise>,
    pub(super) latest: TcpInfo,
    /// Bytes that have arrived since the first reading.
    delivered: u64,
    /// Time of the latest reading.
    at: Instant,
    /// Bytes pulled at the time of the latest reading.
    sent: u64,
    /// Of these, the bytes not yet written to the socket: they are in the buffers of HTTP/2 and TLS.
    above: u64,
    /// The smallest lead so far of the bytes pulled over the bytes written. It only ever falls, because the bytes
    /// pulled are counted without the overhead of HTTP/2 and TLS, and the bytes written with it.
    least_ahead: i64,
    /// Bytes that may be pulled before the next reading, if they are limited.
    ///
    /// A kernel may empty the line, as BBR does to probe the minimum RTT. Without this limit a whole window would be
    /// sent at once afterwards, which is a queue of half an RTT.
    allowed: Option<i64>,
}

impl TcpInfoCongestion {
    /// Creates the state after the first reading.
    pub(crate) fn new(reading: TcpInfo, sent: u64, now: Instant) -> Self {
        let mut this = Self {
            cap: CongestionWindow::new(),
            cruise: None,
            latest: reading,
            delivered: 0,
            at: now,
            sent,
            above: 0,
            least_ahead: i64::MAX,
            allowed: None,
        };
        this.read(reading, sent, now);
        this
    }

    /// Takes the next reading; `sent` bytes have been pulled by then.
    pub(crate) fn read(&mut self, reading: TcpInfo, sent: u64, now: Instant) {
        let ahead = sent.wrapping_sub(reading.written).cast_signed();
        self.least_ahead = self.least_ahead.min(ahead);
        self.above = ahead.wrapping_sub(self.least_ahead).cast_unsigned();
        self.allowed = self.pacing_rate().map(|(rate, jitter)| {
            // A frame may be longer than the remaining allowance; then the next frame waits for the difference.
            let left = self.allowed.unwrap_or_default() - sent.wrapping_sub(self.sent).cast_signed();
            let more = left.saturating_add_unsigned(carried(rate, now - self.at));
            // Bytes waiting in the socket will be sent along with it.
            let most = carried(rate, self.patience() + jitter).saturating_sub(reading.unsent);
            more.min(most.cast_signed())
        });
        // Only differences are used: the counter wraps, and a total would fall with the length of a segment.
        let segments = reading.delivered.wrapping_sub(self.latest.delivered).cast_signed();
        self.delivered += u64::try_from(segments).unwrap_or_default() * reading.segment;
        (self.latest, self.sent, self.at) = (reading, sent, now);
        if reading.in_flight <= FEW {
            self.cap.on_rtt_variation(reading.variation * RANGE, now);
        }
        self.cap.sample(reading.rtt, self.delivered, now);
        if let Some(least) =
            self.cruise.as_mut().and_then(|cruise| cruise.read(&self.cap, reading.rtt, sent, now))
        {
            self.cap.update_min_rtt(least);
        }
    }

    /// Sets whether there is an interactive link next to this one.
    pub(crate) fn share(&mut self, shared: bool) {
        self.cruise =
            shared.then(|| self.cruise.take().unwrap_or_else(|| Cruise::new(&self.cap, self.sent, self.at)));
    }

    /// Returns true if a new reading is needed before any decision when `sent` bytes have been pulled. Never true while
    /// less than a segment can be in flight: a keystroke does not have to wait for the kernel's answer.
    pub(crate) fn is_stale(&self, sent: u64, now: Instant) -> bool {
        let waits = self.waiting(sent);
        let few = self.latest.in_flight + waits < self.latest.segment && !self.floods(sent);
        !few && now - self.at >= FRESH
    }

    /// Returns true if bulk has to wait when `sent` bytes have been pulled.
    pub(crate) fn is_capped(&mut self, sent: u64) -> bool {
        let waits = self.waiting(sent);
        // The allowance is not the line's, so reaching it must not grow the window.
        waits >= self.max_unsent() || self.floods(sent) || self.cap.is_reached(self.latest.in_flight + waits)
    }

    /// Returns the number of bytes that may still wait in our buffers and in the socket.
    fn waiting(&self, sent: u64) -> u64 {
        self.latest.unsent + self.above + (sent - self.sent)
    }

    /// Returns true if all bytes that were allowed since the latest reading have been pulled.
    fn floods(&self, sent: u64) -> bool {
        self.allowed.is_some_and(|allowed| (sent - self.sent).cast_signed() >= allowed)
    }

    /// Returns how long a byte waits that is pulled now, until the kernel sends it.
    pub(super) fn wait(&self) -> Duration {
        time_of(self.latest.unsent + self.above, self.cap.bandwidth().unwrap_or(self.latest.pacing))
    }

    /// Returns the latest smoothed RTT.
    pub(crate) fn round_trip(&self) -> Duration {
        self.latest.rtt
    }

    /// Returns the number of bytes that may wait in our buffers and in the socket.
    fn max_unsent(&self) -> u64 {
        if self.cap.bandwidth().is_none() {
            return INITIAL_CWND;
        }
        let rate = self.pacing_rate().map_or(self.latest.pacing, |(rate, _)| rate.min(self.latest.pacing));
        carried(rate, self.patience()).clamp(MIN_WAITING, MAX_WAITING)
    }

    /// Returns the rate at which bulk may be sent and the time for which it may burst, if the rate is limited.
    fn pacing_rate(&self) -> Option<(u64, Duration)> {
        let (rate, jitter) = self.cap.pacing_rate()?;
        let slower = self.cruise.as_ref().and_then(Cruise::rate);
        Some((slower.map_or(rate, |slower| rate.min(slower)), jitter))
    }

    pub(crate) fn patience(&self) -> Duration {
        MAX_WAIT.max(self.cap.min_rtt().unwrap_or_default() / 16)
    }
}

/// With at most this many bytes in flight, variations of the RTT are the line's own.
const FEW: u64 = 6000;
/// The spread of RTTs in their mean deviations. With a smaller factor a jittery line would seem to have a queue.
const RANGE: u32 = 5;
/// A reading older than this is renewed.
const FRESH: Duration = Duration::from_millis(1);
/// How long a byte may wait in our socket, or a sixteenth of the minimum RTT if that is more. The kernel never runs out
/// of data while this side sleeps.
const MAX_WAIT: Duration = Duration::from_millis(12);
/// Two of the shortest frames.
const MIN_WAITING: u64 = 8 * 1024;
/// More than the buffers hold in any case.
const MAX_WAITING: u64 = 8 << 20;

#[cfg(test)]
mod tests;
