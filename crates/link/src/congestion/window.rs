//! How much may be under way on a line, from round trips and from what has arrived.
//!
//! When the round trip grows, a queue is standing somewhere, and the cap is set to what the line carries in its least
//! round trip plus a little. Whether the queue was ours shows after that: if it is as long as before, it was not, and
//! the line is simply as long as that now.

use std::collections::VecDeque;
use std::time::Duration;

use tokio::time::Instant;

use crate::congestion::{carried, per_second, time_of};

/// The cap, and what it is derived from.
#[derive(Debug)]
pub(crate) struct CongestionWindow {
    bytes: u64,
    /// Doubling until the first standing queue is met.
    doubling: bool,
    /// The round trip of the line when nothing of ours waits there.
    least: Option<Duration>,
    /// Bytes per second, at least, that the line is known to carry.
    rate: Option<u64>,
    /// Bytes per second of the latest rounds. What arrives is known in steps, so that one round alone may show much too
    /// little; the best of them is what the line carries.
    rates: VecDeque<u64>,
    round: Round,
    /// Time spent capped since the least round trip was last renewed.
    capped_for: Duration,
    renewal: Option<ProbeRtt>,
    trial: Option<WindowCut>,
    /// The doubling has just ended.
    overshot: bool,
    /// Whether much was under way in the round before. If not, what stands on the line is older, or not ours.
    was_near: bool,
    /// When much was under way last, and how many rounds there were since.
    busy_at: Option<Instant>,
    quiet: u32,
    /// The cap has just changed: what comes of it shows after so many rounds.
    probing_cooldown: u32,
    /// How often in a row it has grown without a queue.
    grown: u32,
    /// Rounds since it was cut, or since much less than the cap was under way though more was to be sent, as
    /// where BBR looks for the least round trip. What falls just behind that is a queue that goes.
    steady: u32,
    /// Rounds in a row in which the cap was reached and did not grow.
    full: u32,
    pub(crate) noise: RttJitter,
}

impl CongestionWindow {
    /// Of a line of which nothing is known yet.
    pub(crate) fn new() -> Self {
        Self {
            bytes: INITIAL_CWND,
            doubling: true,
            least: None,
            rate: None,
            rates: VecDeque::with_capacity(ROUNDS_KEPT),
            round: Round::default(),
            capped_for: Duration::ZERO,
            renewal: None,
            trial: None,
            overshot: false,
            was_near: false,
            busy_at: None,
            quiet: 0,
            probing_cooldown: 0,
            grown: 0,
            steady: ROUNDS_TO_DRAIN,
            full: 0,
            noise: RttJitter::default(),
        }
    }

    /// Bytes that may be under way just now.
    pub(crate) fn bytes(&self) -> u64 {
        let eighths = self.renewal.and_then(|r| RENEWAL_EIGHTHS.get(r.step)).unwrap_or(&8);
        (self.bytes / 8 * eighths).max(MIN_CWND)
    }

    /// Whether so many bytes under way are as many as may be. Those who ask have more to send.
    pub(crate) fn is_reached(&mut self, under_way: u64) -> bool {
        self.round.near |= under_way >= self.bytes() / 8;
        self.round.low |= under_way < self.bytes() / 2;
        // While it doubles, the line must not wait for that.
        self.round.hit |= under_way >= if self.doubling { self.bytes() / 2 } else { self.bytes() };
        under_way >= self.bytes()
    }

    /// The round trips lie so far apart with little under way. That is the line, if nothing of ours stands on it any more.
    pub(crate) fn varies(&mut self, by: Duration, now: Instant) {
        if self.busy_at.is_none_or(|busy| now - busy >= RESTED) {
            self.noise.on_idle_sample(by, self.quiet >= QUIET_ROUNDS);
        }
    }

    /// The least round trip, once one is known.
    pub(crate) fn min_rtt(&self) -> Option<Duration> {
        self.least
    }

    /// The shortest round trip `met` while no queue of ours stood. What it is longer than the one known before, by less than
    /// the line jitters, is chance.
    pub(crate) fn update_min_rtt(&mut self, met: Duration) {
        let known = self.least.unwrap_or(met);
        self.least = Some(if met < known + self.jitter(known) { met.min(known) } else { met });
        self.capped_for = Duration::ZERO;
    }

    /// Rounds in a row in which the cap was reached and did not grow: as many in which the line was full.
    pub(crate) fn rounds_at_limit(&self) -> u32 {
        self.full
    }

    /// How fast bulk may be let go on a long line: a little faster than the line is known to carry it. And how long it may be
    /// let go at once. None while the cap still doubles.
    pub(crate) fn pacing_rate(&self) -> Option<(u64, Duration)> {
        let least = self.least.filter(|least| *least >= LONG && !self.doubling)?;
        let best = self.best();
        (best > 0).then(|| (best / 16 * 17, self.jitter(least)))
    }

    /// Bytes per second that the line is known to carry.
    pub(crate) fn bandwidth(&self) -> Option<u64> {
        self.rate
    }

    /// A round trip was measured; `delivered` bytes have arrived in all.
    pub(crate) fn sample(&mut self, trip: Duration, delivered: u64, now: Instant) {
        self.least = Some(self.least.map_or(trip, |least| least.min(trip)));
        self.round.least = Some(self.round.least.map_or(trip, |least| least.min(trip)));
        self.noise.sample(trip);
        self.busy_at = if self.round.near { Some(now) } else { self.busy_at };
        let next = Round { since: Some(now), delivered, ..Round::default() };
        let Some(since) = self.round.since else {
            self.round = Round { hit: self.round.hit, near: self.round.near, low: self.round.low, ..next };
            return;
        };
        let (Some(shortest), Some(least)) = (self.round.least, self.least) else { return };
        let jitter = self.jitter(least);
        // Half a round more of doubling would fill the queue of any line.
        let overfull = self.doubling && self.was_near && trip > least + standing(least) + jitter;
        let (lasts, here) = match jitter {
            _ if overfull => (MIN_ROUND, trip),
            Duration::ZERO => (trip.max(MIN_ROUND), shortest),
            // Of a line that jitters one round trip says little, and the shortest one least.
            _ => (trip.max(jitter), self.noise.usual().saturating_sub(usual(jitter))),
        };
        if now - since >= lasts {
            self.end_round(here, trip, delivered, now - since);
            self.round = next;
        }
    }

    fn end_round(&mut self, here: Duration, trip: Duration, delivered: u64, took: Duration) {
        let (Some(shortest), Some(least)) = (self.round.least, self.least) else { return };
        // A round in which there was a pause shows nothing.
        let paused = took > PAUSE.max(shortest * 3);
        let (hit, near) = (self.round.hit && !paused, self.round.near && !paused);
        let rate = per_second(delivered.wrapping_sub(self.round.delivered), took);
        if hit || rate > self.best() {
            self.rates.truncate(ROUNDS_KEPT - 1);
            self.rates.push_front(rate);
        }
        let ours = std::mem::replace(&mut self.was_near, near) && near;
        self.rate = Some(if hit { rate } else { self.rate.map_or(rate, |known| known.max(rate)) });
        self.quiet = if self.round.near { 0 } else { self.quiet.saturating_add(1) };
        self.steady = if self.round.low { 0 } else { self.steady };
        let counts = ours && self.steady >= ROUNDS_TO_DRAIN && self.renewal.is_none();
        self.noise.end_round(trip, counts);
        self.steady = self.steady.saturating_add(1);
        if let Some(mut renewal) = self.renewal.take() {
            renewal.least = Some(renewal.least.map_or(shortest, |l| l.min(shortest)));
            renewal.step += 1;
            if renewal.step < RENEWAL_EIGHTHS.len() {
                self.renewal = Some(renewal);
            } else {
                self.update_min_rtt(renewal.least.unwrap_or(least));
            }
            return;
        }
        let queue = here.saturating_sub(least);
        if self.probing_cooldown > 0 {
            self.probing_cooldown -= 1;
            // While the queue of the doubling was sent, the line's rate showed.
            if std::mem::take(&mut self.overshot) {
                self.bytes = self.bytes.max(carried(self.best(), least + self.target(least)));
            }
        } else if queue > standing(least) {
            if ours {
                self.on_standing_queue(here, least);
            }
        } else {
            self.trial = None;
            self.on_no_queue(queue, least, hit);
        }
        self.full = if hit && self.grown == 0 { self.full.saturating_add(1) } else { 0 };
        if hit {
            self.capped_for += took;
            if self.capped_for >= renew_after(least) {
                (self.full, self.trial, self.renewal) = (0, None, Some(ProbeRtt { step: 0, least: None }));
            }
        }
    }

    /// A queue stands on the line.
    fn on_standing_queue(&mut self, here: Duration, least: Duration) {
        let (bytes, best) = (self.bytes, self.best());
        let target = carried(best, least + self.target(least));
        if target >= bytes && !self.doubling && self.trial.is_none() {
            // So little under way makes no such queue: the line does that by itself.
            self.noise.learn(self.round.least.unwrap_or(here).saturating_sub(least));
            return;
        }
        let trial = self.trial.take().unwrap_or(WindowCut { bytes, trip: here, shorter: Duration::ZERO });
        if trial.shorter >= self.target(least) && here + trial.shorter / 2 > trial.trip {
            // Less under way, and it is as long as before: it is not ours.
            (self.least, self.bytes) = (Some(here), trial.bytes);
            return;
        }
        let lowered = target.clamp(MIN_CWND, bytes);
        let less = time_of(bytes - lowered, best).min(here.saturating_sub(least));
        // Of what was sent while it doubled, most has yet to come to the queue: that proves nothing.
        let tried = WindowCut { shorter: trial.shorter + less, ..trial };
        self.overshot = std::mem::take(&mut self.doubling);
        self.trial = (!self.overshot).then_some(tried);
        (self.bytes, self.probing_cooldown, self.grown, self.steady) = (lowered, 1, 0, 0);
    }

    /// The queue that is allowed.
    fn target(&self, least: Duration) -> Duration {
        target(least, self.jitter(least))
    }

    /// By how much the round trip changes without us, if that is more than what would be taken for a queue.
    fn jitter(&self, least: Duration) -> Duration {
        Some(self.noise.now(least)).filter(|noise| *noise > standing(least)).unwrap_or_default()
    }

    /// What the line carries, as far as is known.
    fn best(&self) -> u64 {
        self.rates.iter().copied().max().unwrap_or_default()
    }

    /// None does.
    fn on_no_queue(&mut self, queue: Duration, least: Duration, hit: bool) {
        if !hit {
            return;
        }
        if queue > allowed(least) / 2 {
            self.grown = 0;
            return;
        }
        self.grown += 1;
        let step = match self.grown {
            _ if self.doubling => self.bytes,
            // A cap that is much too low need not grow by little for long.
            grown @ GROWN_BY_LITTLE.. => (self.bytes / 8) << (grown - GROWN_BY_LITTLE).min(3),
            _ => carried(self.best(), allowed(least) / 2),
        };
        self.bytes = (self.bytes + step.min(self.bytes)).min(MAX_CWND);
        self.probing_cooldown = match self.grown {
            _ if self.doubling => 0,
            // Its least round trip began before.
            GROWN_BY_LITTLE.. => 2,
            _ => 1,
        };
    }
}

/// Before anything is known: about what TCP itself sends at first, several times over.
pub(crate) const INITIAL_CWND: u64 = 64 * 1024;
/// On a shorter line a cap that is let go at once is no queue that anybody would notice.
const LONG: Duration = Duration::from_millis(5);
/// Below this a link's own overhead would eat it.
const MIN_CWND: u64 = 16_000;
/// More than HTTP/2 lets be under way in any case.
const MAX_CWND: u64 = 64 << 20;
/// A round that takes longer, and three round trips, had a pause in it.
const PAUSE: Duration = Duration::from_millis(100);
/// A shorter round would measure the scheduler, not the line.
const MIN_ROUND: Duration = Duration::from_millis(10);
/// Of how many rounds the rates are remembered: as many as show the line's rate at least once.
const ROUNDS_KEPT: usize = 8;
/// After so many rounds the queue of before a cut is gone.
const ROUNDS_TO_DRAIN: u32 = 3;
/// So long after much was under way, what varies is the line: BBR's look for the least round trip takes less.
const RESTED: Duration = Duration::from_secs(2);
/// And after so many rounds the kernel has measured that: Linux takes half of a new line's round trip for its variation, and gives up a quarter of that in
/// each. Five times what is left then is less than an eighth of the round trip.
const QUIET_ROUNDS: u32 = 12;
/// Less often it grows by little without meeting a queue, then by an eighth.
const GROWN_BY_LITTLE: u32 = 3;

// How long a queue on the line counts as one that stands, and how long a queue is allowed.

/// By how much a round trip above that least one means that a queue stands.
pub(crate) fn standing(least: Duration) -> Duration {
    STANDING.max(least / 8)
}

/// The queue that is allowed on a line with that least round trip, if it never changes by itself.
pub(crate) fn allowed(least: Duration) -> Duration {
    ALLOWED.max(least / 12)
}

/// How much of the jitter the usual round trip of a line has in it. The more is taken for that, the longer a queue stands
/// unseen, and the surer the line is full.
pub(crate) fn usual(jitter: Duration) -> Duration {
    jitter / 10 * 7
}

/// The queue that a cap is cut to. A line that jitters carries what it can only if as much is under way as its usual round
/// trip takes.
pub(crate) fn target(least: Duration, jitter: Duration) -> Duration {
    allowed(least) + jitter / 20 * 11
}

/// Round trips this much above the least, or an eighth of it if that is more, mean that a queue stands on the way.
const STANDING: Duration = Duration::from_millis(12);
/// So that the line never runs dry; on a long line a twelfth of its round trip.
const ALLOWED: Duration = Duration::from_millis(8);

// What the cap learns in one round trip, and what it tries over some.

/// One round trip, or 10 ms if that is longer.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct Round {
    pub(crate) since: Option<Instant>,
    pub(crate) delivered: u64,
    pub(crate) least: Option<Duration>,
    pub(crate) hit: bool,
    /// Much is under way, whether the cap is what holds it or the kernel.
    pub(crate) near: bool,
    /// Less than half of the cap is under way.
    pub(crate) low: bool,
}

/// Some rounds below the cap, which empty the queue that we may keep standing ourselves.
#[derive(Debug, Clone, Copy)]
pub(crate) struct ProbeRtt {
    /// Which of its steps is on.
    pub(crate) step: usize,
    pub(crate) least: Option<Duration>,
}

/// The cap was lowered: does the queue become shorter?
#[derive(Debug, Clone, Copy)]
pub(crate) struct WindowCut {
    /// The cap and the round trip before.
    pub(crate) bytes: u64,
    pub(crate) trip: Duration,
    /// By how much the round trip should be shorter now.
    pub(crate) shorter: Duration,
}

/// How long the cap is reached, in all, before the least round trip is renewed.
pub(crate) fn renew_after(least: Duration) -> Duration {
    MIN_RTT_EXPIRY.max(least * RENEW_AFTER_TRIPS)
}

/// After this long at the cap the least round trip is measured anew, as the route may have changed.
const MIN_RTT_EXPIRY: Duration = Duration::from_secs(10);
/// But not within so many round trips, as it takes some.
const RENEW_AFTER_TRIPS: u32 = 100;
/// The cap in each round of a renewal, in eighths: two at half, which show the least round trip, then up in steps, as
/// half a cap let loose at once would itself be a queue.
pub(crate) const RENEWAL_EIGHTHS: [u64; 5] = [4, 4, 5, 6, 7];

// By how much a line's round trip changes without us.

/// What falls again while as much is under way was no queue of ours.
#[derive(Debug, Default)]
pub(crate) struct RttJitter {
    /// The longest round trip of the round that is on, and by how much a later one was shorter at the most.
    longest: Duration,
    fall: Duration,
    /// By how much it varied at the most while nothing of ours was under way in this round.
    alone: Option<Duration>,
    /// The round trips of this round, in all, and how many.
    sum: Duration,
    samples: u32,
    /// The mean round trip of the rounds before, the later ones counting more.
    usual: Option<Duration>,
    /// The same changes of some rounds, the latest first.
    changes: VecDeque<Duration>,
}

impl RttJitter {
    /// The round trip varied by so much while nothing of ours was under way. What the kernel has not measured, but assumes,
    /// counts up to [`MOST`]: on a line that jitters bulk would else begin at half of the rate and stay there.
    pub(crate) fn on_idle_sample(&mut self, by: Duration, measured: bool) {
        self.alone = self.alone.max(Some(if measured { by } else { by.min(MAX_JITTER) }));
    }

    /// A round trip was measured.
    pub(crate) fn sample(&mut self, trip: Duration) {
        self.longest = self.longest.max(trip);
        self.fall = self.fall.max(self.longest - trip);
        self.sum += trip;
        self.samples += 1;
    }

    /// A round is over, and the next begins with `trip`. What fell counts if as much was under way all the time.
    pub(crate) fn end_round(&mut self, trip: Duration, counts: bool) {
        if let Some(change) = self.alone.take().or(counts.then_some(self.fall)) {
            self.learn(change);
        }
        self.usual = Some(self.usual());
        (self.longest, self.fall, self.sum, self.samples) = (trip, Duration::ZERO, Duration::ZERO, 0);
    }

    /// It was so much in a round.
    pub(crate) fn learn(&mut self, change: Duration) {
        self.changes.truncate(NOISE_ROUNDS_KEPT - 1);
        self.changes.push_front(change);
    }

    /// How much it is of late, on a line with that least round trip.
    pub(crate) fn now(&self, least: Duration) -> Duration {
        self.changes.iter().copied().max().unwrap_or_default().min(MAX_JITTER.max(least / 2))
    }

    /// The mean round trip of late, half of it that of the round that is on.
    pub(crate) fn usual(&self) -> Duration {
        let mean = self.sum / self.samples.max(1);
        self.usual.map_or(mean, |before| (before + mean) / 2)
    }
}

/// Of how many rounds it is remembered: by chance a line may be quiet for a second.
const NOISE_ROUNDS_KEPT: usize = 24;
/// More is believed to be a queue, or more than half of the least round trip if that is longer.
const MAX_JITTER: Duration = Duration::from_millis(50);
