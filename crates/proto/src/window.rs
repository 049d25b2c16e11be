//! How far a session's receive window grows: by the RTT over its whole path, and the bytes that its reader takes in
//! one.
//!
//! The RTT is measured by the bytes that follow a Credit.
//! A ping measures the first link only; there may be more servers on the path. The time from a Credit that raises the
//! limit to the first byte above the old limit is one RTT, if the sender was blocked at that limit. If the sender had
//! not reached the limit, or had nothing to send, the time would be too long.

use std::time::Duration;

use tokio::time::Instant;

/// The RTT of a session's link towards the remote.
#[derive(Debug, Clone, Copy, Default)]
pub struct LinkRtt {
    /// Latest RTT of the link. The RTT of the path is longer if it passes another server.
    pub latest: Duration,
    /// Minimum RTT of the whole path. `None` if the path may pass another server, or before the first measurement.
    pub least: Option<Duration>,
}

/// An estimator that takes one measurement at a time and keeps the last result.
#[derive(Debug, Default)]
pub(crate) struct PathRttEstimator {
    pending: Option<CreditRttProbe>,
    /// Latest measurement; zero before the first.
    latest: Duration,
    link_rtt: LinkRtt,
    /// RTT used to widen windows, and its minimum so far.
    effective: Option<(Duration, Duration)>,
}

/// A measurement in progress: the time from a Credit to the first bytes that it released.
#[derive(Debug)]
struct CreditRttProbe {
    /// Limit known to the sender before the Credit.
    old_limit: u64,
    /// When the Credit was sent.
    since: Instant,
    /// Time when everything below the old limit had arrived, and nothing above it.
    blocked_at: Option<Instant>,
}

impl PathRttEstimator {
    /// Starts a measurement: a Credit that raises the limit is sent after `received` bytes have arrived.
    pub(crate) fn credit(&mut self, old_limit: u64, received: u64, now: Instant) {
        let blocked_at = (received == old_limit).then_some(now);
        self.pending.get_or_insert(CreditRttProbe { old_limit, since: now, blocked_at });
    }

    /// Handles bytes up to offset `end`. Returns true if they are the first that a Credit released from a sender
    /// blocked at its limit.
    pub(crate) fn arrived(&mut self, end: u64, now: Instant) -> bool {
        let Some(probe) = &mut self.pending else { return false };
        if end == probe.old_limit {
            probe.blocked_at = Some(now);
        }
        if end <= probe.old_limit {
            return false;
        }
        let rtt = now - probe.since;
        let was_blocked =
            probe.blocked_at.is_some_and(|blocked_at| (now - blocked_at) * MIN_BLOCKED_FRACTION >= rtt);
        if was_blocked {
            self.latest = rtt;
        }
        self.pending = None;
        was_blocked
    }

    /// Returns the RTT used to widen windows: the link's, or the one measured over the whole path if that is longer.
    pub(crate) fn effective_rtt(&mut self, link_rtt: LinkRtt) -> Duration {
        self.link_rtt = link_rtt;
        let rtt = link_rtt.latest.max(self.latest);
        let least = self.effective.map_or(rtt, |(_, least)| least.min(rtt));
        self.effective = Some((rtt, least));
        rtt
    }

    /// Returns true if the path is short. The current RTT may be long because a machine is busy, so the minimum is used
    /// where known.
    pub(crate) fn is_short(&self) -> bool {
        self.link_rtt.least.unwrap_or_else(|| self.link_rtt.latest.max(self.latest)) < SHORT_RTT
    }

    /// Scales `bytes` that arrived in the current RTT to the minimum RTT.
    pub(crate) fn scale_to_min_rtt(&self, bytes: u64) -> u64 {
        self.effective.map_or(bytes, |(now, least)| scale(bytes, least, now))
    }

    /// Discards the measurement in progress, because the sender was idle.
    pub(crate) fn interrupt(&mut self) {
        self.pending = None;
    }

    /// Discards all results, because the session runs on another path.
    pub(crate) fn forget(&mut self) {
        *self = Self::default();
    }
}

/// On a path with a lower RTT, the window is at most half of the bytes taken.
///
/// The client's kernel fills its buffers within a few RTTs there, which does not mean that the client will ever read.
/// Growing step by step costs only milliseconds; on a longer path it would delay the start of each download.
const SHORT_RTT: Duration = Duration::from_millis(5);
/// A sender counts as blocked if it stopped for at least 1/4 of the measured time. A frame that ends at the old limit
/// by chance, followed closely by the next one, proves nothing.
const MIN_BLOCKED_FRACTION: u32 = 4;

/// The bytes that the reader took in the current and the previous RTT.
#[derive(Debug, Default)]
pub(crate) struct ReadRate {
    now: Option<RateSample>,
    before: u64,
}

/// The measurement of a [`ReadRate`] in the current RTT.
#[derive(Debug, Clone, Copy)]
struct RateSample {
    since: Instant,
    /// Bytes taken at the start of the sample.
    from: u64,
    /// Whether nothing was taken for a while before it. Bytes taken at once then were queued, and indicate no rate.
    late: bool,
}

impl ReadRate {
    /// Handles arriving bytes; `taken` is the total that the reader has taken.
    pub(crate) fn arrived(&mut self, taken: u64, now: Instant) {
        self.now.get_or_insert(RateSample { since: now, from: taken, late: false });
    }

    /// Returns the window for a reader whose total rises from `before` to `taken`: the bytes of two RTTs, or of four
    /// while the rate doubles per RTT.
    pub(crate) fn handle_read(&mut self, before: u64, taken: u64, rtt: Duration, now: Instant) -> u64 {
        let Some(round) = &mut self.now else { return 0 };
        let elapsed = now - round.since;
        if elapsed > rtt {
            self.before = scale(before - round.from, rtt, elapsed);
            *round = RateSample { since: now, from: before, late: elapsed > rtt * 2 };
        }
        if round.late {
            return 0;
        }
        let here = taken - round.from;
        let times = (here * 2).checked_div(self.before).map_or(4, |halves| halves.clamp(2, 4));
        here.saturating_mul(times)
    }

    /// Returns the number of bytes taken in a recent RTT; `taken` is the total.
    pub(crate) fn in_one_rtt(&self, taken: u64) -> u64 {
        self.now.map_or(0, |round| (taken - round.from).max(self.before))
    }

    /// Discards everything, because no more bytes will arrive, or none have arrived for long.
    pub(crate) fn interrupt(&mut self) {
        *self = Self::default();
    }
}

/// Scales `bytes` from the duration `of` to the duration `time`.
pub(crate) fn scale(bytes: u64, time: Duration, of: Duration) -> u64 {
    let part = u128::from(bytes) * time.as_micros() / of.as_micros().max(1);
    u64::try_from(part).unwrap_or(u64::MAX)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        /// Measures a sender that always has more to send. The result is never below the RTT, and exceeds it by its
        /// frames only.
        #[test]
        fn the_measured_rtt_is_that_of_the_path(
            way in 1u64..200, window in 1_000u64..100_000, frame in 1u64..20_000, rate in 10u64..20_000
        ) {
            let began = Instant::now();
            let at = |micros: u64| began + Duration::from_micros(micros);
            let (way, frame) = (way * 1000, frame.clamp(window / 50, window));
            let (mut rtts, mut limit, mut sent, mut reported) = (PathRttEstimator::default(), window, 0u64, 0u64);
            // Time when the line is free, and the times when each limit reaches the sender.
            let (mut free, mut credits, mut measured) = (0u64, std::collections::VecDeque::new(), 0);
            for _ in 0..500 {
                while sent == limit || credits.front().is_some_and(|(when, _)| *when <= free) {
                    let Some((when, raised)) = credits.pop_front() else { break };
                    free = free.max(when);
                    limit = raised;
                }
                prop_assert!(sent < limit, "the sender is blocked forever");
                let len = frame.min(limit - sent);
                sent += len;
                free += 1 + len * 1000 / rate;
                let now = free + way / 2;
                rtts.arrived(sent, at(now));
                if rtts.latest > Duration::ZERO {
                    measured += 1;
                    let (rtt, most) = (rtts.latest.as_micros() as u64, 1 + frame * 1000 / rate);
                    prop_assert!(rtt >= way / 2 * 2, "{rtt} of {way}");
                    prop_assert!(rtt <= way + 4 * most, "{rtt} of {way}, a frame takes {most}");
                }
                if sent + window - reported.max(window) >= window / 2 {
                    rtts.credit(reported.max(window), sent, at(now));
                    reported = sent + window;
                    credits.push_back((now + way / 2, reported));
                }
            }
            let held_up = window * 1000 / rate < way / 2;
            prop_assert!(!held_up || measured > 0, "a sender blocked by the window is measured");
        }
    }

    #[tokio::test(start_paused = true)]
    async fn only_a_sender_blocked_at_the_old_limit_is_measured() {
        let now = Instant::now();
        let ms = Duration::from_millis;
        let mut rtts = PathRttEstimator::default();
        // Bytes flow across the old limit: the sender was still sending below it.
        rtts.credit(1000, 500, now);
        rtts.arrived(990, now + ms(50));
        rtts.arrived(1400, now + ms(60));
        assert_eq!(rtts.latest, Duration::ZERO);
        // A frame ends at the limit by chance.
        rtts.credit(1500, 1400, now + ms(60));
        rtts.arrived(1500, now + ms(100));
        rtts.arrived(1600, now + ms(101));
        assert_eq!(rtts.latest, Duration::ZERO);
        // The sender is blocked when the credit is sent, or soon after.
        rtts.credit(2000, 2000, now + ms(110));
        rtts.arrived(2100, now + ms(140));
        assert_eq!(rtts.latest, ms(30));
        rtts.credit(2500, 2100, now + ms(150));
        rtts.arrived(2500, now + ms(155));
        rtts.arrived(2501, now + ms(190));
        assert_eq!(rtts.latest, ms(40));
        // The sender had nothing to send.
        rtts.credit(3000, 3000, now + ms(200));
        rtts.interrupt();
        rtts.arrived(3001, now + ms(9000));
        assert_eq!(rtts.latest, ms(40));
        rtts.forget();
        assert_eq!(rtts.latest, Duration::ZERO);
    }
}
