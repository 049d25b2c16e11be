//! Measures a session's round trip over its whole path, by the bytes that follow a Credit.
//!
//! A ping measures the first link only; behind it there may be other pods. The time from a Credit that raises the limit
//! to the first byte above the old limit is one round trip, if the sender had reached that limit and waited there. With
//! a sender that had not reached it, or had nothing to send, the time would be too long.

use std::time::Duration;

use tokio::time::Instant;

/// What a session's link knows of the way to the far end.
#[derive(Debug, Clone, Copy, Default)]
pub struct LinkRtt {
    /// The latest round trip of the link. The way is longer if another pod stands on it.
    pub latest: Duration,
    /// The least round trip of the whole way; none if another pod may stand on it, or before it was measured.
    pub least: Option<Duration>,
}

/// One measurement at a time, and the result of the last one.
#[derive(Debug, Default)]
pub(crate) struct PathRttEstimator {
    under_way: Option<RttProbe>,
    /// The latest measurement; zero before the first.
    latest: Duration,
    way: LinkRtt,
    /// The round trip by which windows grow, and the least that it has been.
    reckoned: Option<(Duration, Duration)>,
}

#[derive(Debug)]
struct RttProbe {
    /// The limit that the sender knew before the Credit.
    old_limit: u64,
    since: Instant,
    /// When all below the old limit had come, and nothing above it.
    stood: Option<Instant>,
}

impl PathRttEstimator {
    /// A Credit that raises the limit is sent when `received` bytes have come.
    pub(crate) fn credit(&mut self, old_limit: u64, received: u64, now: Instant) {
        let stood = (received == old_limit).then_some(now);
        self.under_way.get_or_insert(RttProbe { old_limit, since: now, stood });
    }

    /// Bytes have come up to offset `end`. Whether these are the first that a Credit let come to a sender that had stood
    /// at its limit.
    pub(crate) fn arrived(&mut self, end: u64, now: Instant) -> bool {
        let Some(way) = &mut self.under_way else { return false };
        if end == way.old_limit {
            way.stood = Some(now);
        }
        if end <= way.old_limit {
            return false;
        }
        let trip = now - way.since;
        let held_up = way.stood.is_some_and(|stood| (now - stood) * MIN_BLOCKED_FRACTION >= trip);
        if held_up {
            self.latest = trip;
        }
        self.under_way = None;
        held_up
    }

    /// The round trip by which windows grow now: the link's, or the one measured over the whole path if that is longer.
    pub(crate) fn effective_rtt(&mut self, way: LinkRtt) -> Duration {
        self.way = way;
        let trip = way.latest.max(self.latest);
        let least = self.reckoned.map_or(trip, |(_, least)| least.min(trip));
        self.reckoned = Some((trip, least));
        trip
    }

    /// Whether the way is a short one. A round trip of now may be long because a machine is busy, so the least one says it
    /// where it is known.
    pub(crate) fn is_short(&self) -> bool {
        self.way.least.unwrap_or_else(|| self.way.latest.max(self.latest)) < SHORT
    }

    /// Of bytes that came in a round trip of now, those of the least one.
    pub(crate) fn of_least(&self, bytes: u64) -> u64 {
        self.reckoned.map_or(bytes, |(now, least)| part(bytes, least, now))
    }

    /// Discards the measurement under way, because the sender was silent.
    pub(crate) fn interrupt(&mut self) {
        self.under_way = None;
    }

    /// Discards all results, because the session runs on another path.
    pub(crate) fn forget(&mut self) {
        *self = Self::default();
    }
}

/// On a shorter way the window is at most half of all that was taken. What the kernel stores for a client comes within a
/// few round trips there, and says nothing of whether the client will ever read; to grow step by step costs
/// milliseconds. On a longer way it would hold up the begin of each download.
const SHORT: Duration = Duration::from_millis(5);
/// A sender that stood stood for at least this part of the trip. A frame that ends at the old limit by chance, with the
/// next one close behind it, proves nothing.
const MIN_BLOCKED_FRACTION: u32 = 4;

// How much a reader takes in a round trip, and how wide a window that asks for.

/// What the reader took in this round trip and in the one before.
#[derive(Debug, Default)]
pub(crate) struct ReadRate {
    now: Option<RttSample>,
    before: u64,
}

#[derive(Debug, Clone, Copy)]
struct RttSample {
    since: Instant,
    /// Bytes taken when it began.
    from: u64,
    /// Nothing was taken for a while before it. What is taken at once then has waited, and shows no rate.
    late: bool,
}

impl ReadRate {
    /// Bytes have come; the reader has taken `taken` in all.
    pub(crate) fn arrived(&mut self, taken: u64, now: Instant) {
        self.now.get_or_insert(RttSample { since: now, from: taken, late: false });
    }

    /// The reader had taken `before` bytes in all, and has `taken` now. Returns the window for that: two round trips'
    /// worth, and four while it doubles from one to the next.
    pub(crate) fn took(&mut self, before: u64, taken: u64, trip: Duration, now: Instant) -> u64 {
        let Some(round) = &mut self.now else { return 0 };
        let took = now - round.since;
        if took > trip {
            self.before = part(before - round.from, trip, took);
            *round = RttSample { since: now, from: before, late: took > trip * 2 };
        }
        if round.late {
            return 0;
        }
        let here = taken - round.from;
        let times = (here * 2).checked_div(self.before).map_or(4, |halves| halves.clamp(2, 4));
        here.saturating_mul(times)
    }

    /// What was taken in a round trip of late, once `taken` bytes were in all.
    pub(crate) fn in_a_trip(&self, taken: u64) -> u64 {
        self.now.map_or(0, |round| (taken - round.from).max(self.before))
    }

    /// Forgets all, because nothing comes any more, or nothing has come for long.
    pub(crate) fn interrupt(&mut self) {
        *self = Self::default();
    }
}

/// Of `bytes` that took one time, those of another.
pub(crate) fn part(bytes: u64, time: Duration, of: Duration) -> u64 {
    let part = u128::from(bytes) * time.as_micros() / of.as_micros().max(1);
    u64::try_from(part).unwrap_or(u64::MAX)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        /// A sender that always has more is measured: never shorter than the way, longer only by what its frames take.
        #[test]
        fn a_trip_is_as_long_as_the_way(
            way in 1u64..200, window in 1_000u64..100_000, frame in 1u64..20_000, rate in 10u64..20_000
        ) {
            let began = Instant::now();
            let at = |micros: u64| began + Duration::from_micros(micros);
            let (way, frame) = (way * 1000, frame.clamp(window / 50, window));
            let (mut trips, mut limit, mut sent, mut reported) = (PathRttEstimator::default(), window, 0u64, 0u64);
            // When the line is free, and when each limit reaches the sender.
            let (mut free, mut credits, mut measured) = (0u64, std::collections::VecDeque::new(), 0);
            for _ in 0..500 {
                while sent == limit || credits.front().is_some_and(|(when, _)| *when <= free) {
                    let Some((when, raised)) = credits.pop_front() else { break };
                    free = free.max(when);
                    limit = raised;
                }
                prop_assert!(sent < limit, "the sender stands for ever");
                let len = frame.min(limit - sent);
                sent += len;
                free += 1 + len * 1000 / rate;
                let now = free + way / 2;
                trips.arrived(sent, at(now));
                if trips.latest > Duration::ZERO {
                    measured += 1;
                    let (trip, most) = (trips.latest.as_micros() as u64, 1 + frame * 1000 / rate);
                    prop_assert!(trip >= way / 2 * 2, "{trip} of {way}");
                    prop_assert!(trip <= way + 4 * most, "{trip} of {way}, a frame takes {most}");
                }
                if sent + window - reported.max(window) >= window / 2 {
                    trips.credit(reported.max(window), sent, at(now));
                    reported = sent + window;
                    credits.push_back((now + way / 2, reported));
                }
            }
            let held_up = window * 1000 / rate < way / 2;
            prop_assert!(!held_up || measured > 0, "a sender that the window holds up is measured");
        }
    }

    #[tokio::test(start_paused = true)]
    async fn only_a_sender_that_stood_at_the_old_limit_is_measured() {
        let now = Instant::now();
        let ms = Duration::from_millis;
        let mut trips = PathRttEstimator::default();
        // Bytes flow over the old limit: it was still busy below it.
        trips.credit(1000, 500, now);
        trips.arrived(990, now + ms(50));
        trips.arrived(1400, now + ms(60));
        assert_eq!(trips.latest, Duration::ZERO);
        // A frame ends there by chance.
        trips.credit(1500, 1400, now + ms(60));
        trips.arrived(1500, now + ms(100));
        trips.arrived(1600, now + ms(101));
        assert_eq!(trips.latest, Duration::ZERO);
        // It stands there when the credit is sent, or comes there soon after.
        trips.credit(2000, 2000, now + ms(110));
        trips.arrived(2100, now + ms(140));
        assert_eq!(trips.latest, ms(30));
        trips.credit(2500, 2100, now + ms(150));
        trips.arrived(2500, now + ms(155));
        trips.arrived(2501, now + ms(190));
        assert_eq!(trips.latest, ms(40));
        // It had nothing to send.
        trips.credit(3000, 3000, now + ms(200));
        trips.interrupt();
        trips.arrived(3001, now + ms(9000));
        assert_eq!(trips.latest, ms(40));
        trips.forget();
        assert_eq!(trips.latest, Duration::ZERO);
    }
}
