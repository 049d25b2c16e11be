//! How much may be under way on a link, from pings and their answers.
//!
//! What lies below the link, in kernels and in the line's own queue, waits in an order that no scheduler can mend. So
//! the bytes under way are capped. A ping goes out behind every few bytes; its answer proves that all before it
//! arrived, and shows how long that took. When the round trip grows, a queue is standing somewhere, and the cap is set
//! to what the line carries in its least round trip plus a little. Reads no clock: time comes in.

use std::collections::VecDeque;
use std::time::Duration;

use tokio::time::Instant;

/// The cap on the bytes under way on one link, and what it is derived from.
#[derive(Debug)]
pub(crate) struct Pace {
    /// Bytes pulled so far.
    sent: u64,
    /// Bytes known to have arrived.
    arrived: u64,
    pings: VecDeque<Ping>,
    next_number: u64,
    cap: u64,
    /// Doubling until the first standing queue is met.
    doubling: bool,
    /// Least round trip known.
    least: Option<Duration>,
    latest: Duration,
    /// Bytes per second, at least, that the link is known to carry.
    rate: Option<u64>,
    /// Bytes per second of the latest rounds. Answers come in steps of an eighth of the cap, so that one round alone
    /// may show much too little; the best of them is what the line carries.
    rates: VecDeque<u64>,
    round: Round,
    /// Time spent capped since the least round trip was last renewed.
    capped_for: Duration,
    renewal: Option<Renewal>,
}

#[derive(Debug, Clone, Copy)]
struct Ping {
    number: u64,
    sent: u64,
    at: Instant,
}

/// One round trip, or [`SHORTEST_ROUND`] if that is longer.
#[derive(Debug, Clone, Copy, Default)]
struct Round {
    since: Option<Instant>,
    arrived: u64,
    least: Option<Duration>,
    hit: bool,
}

/// Some rounds below the cap, which empty the queue that we may keep standing ourselves.
#[derive(Debug, Clone, Copy)]
struct Renewal {
    /// Which of [`RENEWAL_EIGHTHS`] is on.
    step: usize,
    least: Option<Duration>,
}

impl Pace {
    /// A link of which nothing is known yet.
    pub(crate) fn new() -> Self {
        Self {
            sent: 0,
            arrived: 0,
            pings: VecDeque::new(),
            next_number: 1,
            cap: FIRST_CAP,
            doubling: true,
            least: None,
            latest: FIRST_ROUND_TRIP,
            rate: None,
            rates: VecDeque::with_capacity(ROUNDS_KEPT),
            round: Round::default(),
            capped_for: Duration::ZERO,
            renewal: None,
        }
    }

    /// Counts bytes that were pulled.
    pub(crate) fn pulled(&mut self, bytes: usize) {
        self.sent += u64::try_from(bytes).unwrap_or(u64::MAX);
    }

    /// Whether a ping should follow what was pulled.
    pub(crate) fn ping_due(&self) -> bool {
        let marked = self.pings.back().map_or(self.arrived, |p| p.sent);
        self.pings.len() < MOST_PINGS && self.sent - marked >= (self.cap() / 8).clamp(LEAST_MARK, MOST_MARK)
    }

    /// Whether bulk has to wait. The caller sends a ping if [`Self::waits_for_ping`] is true.
    pub(crate) fn is_capped(&mut self) -> bool {
        let capped = self.sent - self.arrived >= self.cap();
        self.round.hit |= capped;
        capped
    }

    /// Whether no ping is under way although bytes are: then nothing would ever lift the cap.
    pub(crate) fn waits_for_ping(&self) -> bool {
        self.pings.is_empty()
    }

    /// A ping goes out now; its number.
    pub(crate) fn ping(&mut self, now: Instant) -> u64 {
        let number = self.next_number;
        self.next_number += 1;
        self.pings.push_back(Ping { number, sent: self.sent, at: now });
        number
    }

    /// The answer to ping `number`: all that was pulled before it has arrived. Numbers never sent are ignored.
    pub(crate) fn pong(&mut self, number: u64, now: Instant) {
        let mut answered = None;
        while let Some(ping) = self.pings.front().filter(|p| p.number <= number) {
            answered = Some(*ping);
            self.pings.pop_front();
        }
        let Some(ping) = answered.filter(|p| p.number == number) else { return };
        let trip = now - ping.at;
        self.arrived = self.arrived.max(ping.sent);
        self.latest = trip;
        self.least = Some(self.least.map_or(trip, |least| least.min(trip)));
        self.round.least = Some(self.round.least.map_or(trip, |least| least.min(trip)));
        let Some(since) = self.round.since else {
            self.round = Round { since: Some(now), arrived: self.arrived, least: None, hit: self.round.hit };
            return;
        };
        if now - since >= trip.max(SHORTEST_ROUND) {
            self.end_round(now - since);
            self.round = Round { since: Some(now), arrived: self.arrived, least: None, hit: false };
        }
    }

    /// The longest frame that the link carries in about 2 ms.
    pub(crate) fn longest_frame(&self) -> usize {
        let Some(rate) = self.rate else { return FIRST_FRAME };
        usize::try_from(rate / 500).unwrap_or(LARGEST_FRAME).clamp(SMALLEST_FRAME, LARGEST_FRAME)
    }

    /// The latest round trip measured; 100 ms before the first.
    pub(crate) fn round_trip(&self) -> Duration {
        self.latest
    }

    /// Bytes that may be under way just now.
    pub(crate) fn cap(&self) -> u64 {
        let eighths = self.renewal.and_then(|r| RENEWAL_EIGHTHS.get(r.step)).unwrap_or(&8);
        (self.cap / 8 * eighths).max(LEAST_CAP)
    }

    fn end_round(&mut self, took: Duration) {
        let (Some(least_here), Some(least)) = (self.round.least, self.least) else { return };
        let rate = per_second(self.arrived - self.round.arrived, took);
        let hit = self.round.hit;
        self.rates.truncate(ROUNDS_KEPT - 1);
        self.rates.push_front(rate);
        self.rate = Some(if hit { rate } else { self.rate.map_or(rate, |known| known.max(rate)) });
        if let Some(mut renewal) = self.renewal.take() {
            renewal.least = Some(renewal.least.map_or(least_here, |l| l.min(least_here)));
            renewal.step += 1;
            if renewal.step < RENEWAL_EIGHTHS.len() {
                self.renewal = Some(renewal);
            } else {
                self.least = renewal.least;
            }
            return;
        }
        let excess = least_here.saturating_sub(least);
        if excess > STANDING_QUEUE {
            let best = self.rates.iter().copied().max().unwrap_or(rate);
            self.cap = self.cap.min(carried(best, least + TARGET_QUEUE)).max(LEAST_CAP);
            self.doubling = false;
        } else if hit && self.doubling {
            self.cap = (self.cap * 2).min(MOST_CAP);
        } else if hit && excess < TARGET_QUEUE {
            self.cap = (self.cap + self.cap / 8).min(MOST_CAP);
        }
        if hit {
            self.capped_for += took;
            if self.capped_for >= RENEW_AFTER {
                self.capped_for = Duration::ZERO;
                self.renewal = Some(Renewal { step: 0, least: None });
            }
        }
    }
}

impl Default for Pace {
    fn default() -> Self {
        Self::new()
    }
}

fn per_second(bytes: u64, took: Duration) -> u64 {
    let micros = took.as_micros().max(1);
    u64::try_from(u128::from(bytes) * 1_000_000 / micros).unwrap_or(u64::MAX)
}

fn carried(rate: u64, time: Duration) -> u64 {
    u64::try_from(u128::from(rate) * time.as_micros() / 1_000_000).unwrap_or(u64::MAX)
}

/// Before anything is known: about what TCP itself sends at first, several times over.
const FIRST_CAP: u64 = 64 * 1024;
/// Below this a link's own overhead would eat it.
const LEAST_CAP: u64 = 16_000;
/// More than HTTP/2 lets be under way in any case.
const MOST_CAP: u64 = 64 << 20;
/// Round trips this much above the least mean that a queue stands on the way.
const STANDING_QUEUE: Duration = Duration::from_millis(12);
/// The queue that is allowed, so that the line never runs dry.
const TARGET_QUEUE: Duration = Duration::from_millis(8);
/// A shorter round would measure the scheduler, not the line.
const SHORTEST_ROUND: Duration = Duration::from_millis(10);
/// Of how many rounds the rates are remembered: as many as show the line's rate at least once.
const ROUNDS_KEPT: usize = 8;
/// After this long at the cap the least round trip is measured anew, as the route may have changed.
const RENEW_AFTER: Duration = Duration::from_secs(10);
/// The cap in each round of a renewal, in eighths: two at half, which show the least round trip, then up in steps, as
/// half a cap let loose at once would itself be a queue.
const RENEWAL_EIGHTHS: [u64; 5] = [4, 4, 5, 6, 7];
/// A ping goes out behind every eighth of the cap, within these bytes.
const LEAST_MARK: u64 = 4 * 1024;
const MOST_MARK: u64 = 1 << 20;
/// Pings under way at the most: a peer that answers none must not make us grow.
const MOST_PINGS: usize = 64;
/// Assumed before the first answer.
const FIRST_ROUND_TRIP: Duration = Duration::from_millis(100);
/// Frame length before the rate is known: short enough for a slow line, long enough for the first moments of a fast
/// one.
const FIRST_FRAME: usize = 16 * 1024;
/// Below this headers weigh too much.
const SMALLEST_FRAME: usize = 4 * 1024;
/// So that header and data fit one HTTP/2 frame of 64 KiB.
pub(crate) const LARGEST_FRAME: usize = 65_400;

#[cfg(test)]
mod tests {
    use super::*;

    /// A line that carries `rate` bytes a second, with a queue of any length, and answers after `trip`.
    struct Line {
        now: Instant,
        free_at: Instant,
        answers: VecDeque<(Instant, u64)>,
        rate: u64,
        trip: Duration,
        worst: Duration,
        carried: u64,
    }

    impl Line {
        fn new(rate: u64, trip: Duration) -> Self {
            let now = Instant::now();
            Self {
                now,
                free_at: now,
                answers: VecDeque::new(),
                rate,
                trip,
                worst: Duration::ZERO,
                carried: 0,
            }
        }

        /// A backlogged sender for `time`.
        fn run(&mut self, pace: &mut Pace, time: Duration) {
            let end = self.now + time;
            (self.worst, self.carried) = (Duration::ZERO, 0);
            while self.now < end {
                while !pace.is_capped() {
                    let frame = pace.longest_frame();
                    pace.pulled(frame);
                    self.carried += frame as u64;
                    self.free_at =
                        self.free_at.max(self.now) + Duration::from_secs_f64(frame as f64 / self.rate as f64);
                    if pace.ping_due() {
                        self.ping(pace);
                    }
                }
                if pace.waits_for_ping() {
                    self.ping(pace);
                }
                let (at, number) = self.answers.pop_front().unwrap();
                self.now = self.now.max(at);
                self.worst = self.worst.max(self.free_at.saturating_duration_since(self.now));
                pace.pong(number, self.now);
            }
        }

        fn ping(&mut self, pace: &mut Pace) {
            let number = pace.ping(self.now);
            self.answers.push_back((self.free_at.max(self.now) + self.trip, number));
        }
    }

    #[tokio::test(start_paused = true)]
    async fn a_narrow_line_is_kept_full_with_a_short_queue() {
        let (mut pace, mut line) = (Pace::new(), Line::new(2_500_000, Duration::from_millis(40)));
        line.run(&mut pace, Duration::from_secs(5));
        line.run(&mut pace, Duration::from_secs(9));
        assert!(line.worst < Duration::from_millis(20), "queue of {:?}", line.worst);
        assert!(line.carried > 2_500_000 * 9 * 90 / 100, "carried {}", line.carried);
        assert_eq!(pace.longest_frame(), 2_500_000 / 500);
    }

    #[tokio::test(start_paused = true)]
    async fn a_wide_line_soon_gets_large_frames_and_is_not_held() {
        let (mut pace, mut line) = (Pace::new(), Line::new(1 << 30, Duration::from_micros(200)));
        line.run(&mut pace, Duration::from_millis(500));
        line.run(&mut pace, Duration::from_millis(500));
        assert_eq!(pace.longest_frame(), LARGEST_FRAME);
        assert!(line.carried > (1 << 29) * 9 / 10, "carried {}", line.carried);
    }

    #[tokio::test(start_paused = true)]
    async fn a_longer_way_is_learnt_within_a_dozen_seconds() {
        let (mut pace, mut line) = (Pace::new(), Line::new(2_500_000, Duration::from_millis(20)));
        line.run(&mut pace, Duration::from_secs(3));
        line.trip = Duration::from_millis(60);
        line.run(&mut pace, Duration::from_secs(14));
        line.run(&mut pace, Duration::from_secs(5));
        assert!(line.carried > 2_500_000 * 5 * 85 / 100, "carried {}", line.carried);
    }

    #[tokio::test(start_paused = true)]
    async fn answers_nobody_asked_for_change_nothing() {
        let mut pace = Pace::new();
        let now = Instant::now();
        let number = pace.ping(now);
        pace.pulled(50_000);
        pace.pong(number + 7, now);
        assert!(pace.waits_for_ping() && pace.least.is_none() && pace.arrived == 0);
    }

    #[tokio::test(start_paused = true)]
    async fn a_peer_that_never_answers_does_not_make_us_grow() {
        let mut pace = Pace::new();
        for _ in 0..10_000 {
            pace.pulled(65_400);
            if pace.ping_due() {
                pace.ping(Instant::now());
            }
        }
        assert_eq!(pace.pings.len(), MOST_PINGS);
    }
}
