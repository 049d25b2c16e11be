//! How much may be under way on a line, from round trips and from what has arrived.
//!
//! When the round trip grows, a queue is standing somewhere, and the cap is set to what the line carries in its least
//! round trip plus a little. Whether the queue was ours shows after that: if it is as long as before, it was not, and
//! the line is simply as long as that now.

mod queue;
mod round;

use std::collections::VecDeque;
use std::time::Duration;

use tokio::time::Instant;

use crate::protocol::link::pace::cap::queue::{allowed, standing, target, usual};
use crate::protocol::link::pace::cap::round::{RENEWAL_EIGHTHS, Renewal, Round, Trial, renew_after};
use crate::protocol::link::pace::noise::Noise;
use crate::protocol::link::pace::rate::{carried, per_second, time_of};

/// The cap, and what it is derived from.
#[derive(Debug)]
pub(super) struct Cap {
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
    renewal: Option<Renewal>,
    trial: Option<Trial>,
    /// The doubling has just ended.
    overshot: bool,
    /// Whether much was under way in the round before. If not, what stands on the line is older, or not ours.
    was_near: bool,
    /// When much was under way last, and how many rounds there were since.
    busy_at: Option<Instant>,
    quiet: u32,
    /// The cap has just changed: what comes of it shows after so many rounds.
    settling: u32,
    /// How often in a row it has grown without a queue.
    grown: u32,
    /// Rounds since it was cut, or since much less than the cap was under way though more was to be sent, as
    /// where BBR looks for the least round trip. What falls just behind that is a queue that goes.
    steady: u32,
    /// Rounds in a row in which the cap was reached and did not grow.
    full: u32,
    pub(super) noise: Noise,
}

impl Cap {
    /// Of a line of which nothing is known yet.
    pub(super) fn new() -> Self {
        Self {
            bytes: FIRST_CAP,
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
            settling: 0,
            grown: 0,
            steady: ROUNDS_TO_DRAIN,
            full: 0,
            noise: Noise::default(),
        }
    }

    /// Bytes that may be under way just now.
    pub(super) fn bytes(&self) -> u64 {
        let eighths = self.renewal.and_then(|r| RENEWAL_EIGHTHS.get(r.step)).unwrap_or(&8);
        (self.bytes / 8 * eighths).max(LEAST_CAP)
    }

    /// Whether so many bytes under way are as many as may be. Those who ask have more to send.
    pub(super) fn is_reached(&mut self, under_way: u64) -> bool {
        self.round.near |= under_way >= self.bytes() / 8;
        self.round.low |= under_way < self.bytes() / 2;
        // While it doubles, the line must not wait for that.
        self.round.hit |= under_way >= if self.doubling { self.bytes() / 2 } else { self.bytes() };
        under_way >= self.bytes()
    }

    /// The round trips lie so far apart with little under way. That is the line, if nothing of ours stands on it any more.
    pub(super) fn varies(&mut self, by: Duration, now: Instant) {
        if self.busy_at.is_none_or(|busy| now - busy >= RESTED) {
            self.noise.alone(by, self.quiet >= QUIET_ROUNDS);
        }
    }

    /// The least round trip, once one is known.
    pub(super) fn least(&self) -> Option<Duration> {
        self.least
    }

    /// The shortest round trip `met` while no queue of ours stood. What it is longer than the one known before, by less than
    /// the line jitters, is chance.
    pub(super) fn renew(&mut self, met: Duration) {
        let known = self.least.unwrap_or(met);
        self.least = Some(if met < known + self.jitter(known) { met.min(known) } else { met });
        self.capped_for = Duration::ZERO;
    }

    /// Rounds in a row in which the cap was reached and did not grow: as many in which the line was full.
    pub(super) fn full(&self) -> u32 {
        self.full
    }

    /// How fast bulk may be let go on a long line: a little faster than the line is known to carry it. And how long it may be
    /// let go at once. None while the cap still doubles.
    pub(super) fn pour(&self) -> Option<(u64, Duration)> {
        let least = self.least.filter(|least| *least >= LONG && !self.doubling)?;
        let best = self.best();
        (best > 0).then(|| (best / 16 * 17, self.jitter(least)))
    }

    /// Bytes per second that the line is known to carry.
    pub(super) fn rate(&self) -> Option<u64> {
        self.rate
    }

    /// A round trip was measured; `delivered` bytes have arrived in all.
    pub(super) fn sample(&mut self, trip: Duration, delivered: u64, now: Instant) {
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
            _ if overfull => (SHORTEST_ROUND, trip),
            Duration::ZERO => (trip.max(SHORTEST_ROUND), shortest),
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
                self.renew(renewal.least.unwrap_or(least));
            }
            return;
        }
        let queue = here.saturating_sub(least);
        if self.settling > 0 {
            self.settling -= 1;
            // While the queue of the doubling was sent, the line's rate showed.
            if std::mem::take(&mut self.overshot) {
                self.bytes = self.bytes.max(carried(self.best(), least + self.target(least)));
            }
        } else if queue > standing(least) {
            if ours {
                self.stands(here, least);
            }
        } else {
            self.trial = None;
            self.flows(queue, least, hit);
        }
        self.full = if hit && self.grown == 0 { self.full.saturating_add(1) } else { 0 };
        if hit {
            self.capped_for += took;
            if self.capped_for >= renew_after(least) {
                (self.full, self.trial, self.renewal) = (0, None, Some(Renewal { step: 0, least: None }));
            }
        }
    }

    /// A queue stands on the line.
    fn stands(&mut self, here: Duration, least: Duration) {
        let (bytes, best) = (self.bytes, self.best());
        let target = carried(best, least + self.target(least));
        if target >= bytes && !self.doubling && self.trial.is_none() {
            // So little under way makes no such queue: the line does that by itself.
            self.noise.learn(self.round.least.unwrap_or(here).saturating_sub(least));
            return;
        }
        let trial = self.trial.take().unwrap_or(Trial { bytes, trip: here, shorter: Duration::ZERO });
        if trial.shorter >= self.target(least) && here + trial.shorter / 2 > trial.trip {
            // Less under way, and it is as long as before: it is not ours.
            (self.least, self.bytes) = (Some(here), trial.bytes);
            return;
        }
        let lowered = target.clamp(LEAST_CAP, bytes);
        let less = time_of(bytes - lowered, best).min(here.saturating_sub(least));
        // Of what was sent while it doubled, most has yet to come to the queue: that proves nothing.
        let tried = Trial { shorter: trial.shorter + less, ..trial };
        self.overshot = std::mem::take(&mut self.doubling);
        self.trial = (!self.overshot).then_some(tried);
        (self.bytes, self.settling, self.grown, self.steady) = (lowered, 1, 0, 0);
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
    fn flows(&mut self, queue: Duration, least: Duration, hit: bool) {
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
        self.bytes = (self.bytes + step.min(self.bytes)).min(MOST_CAP);
        self.settling = match self.grown {
            _ if self.doubling => 0,
            // Its least round trip began before.
            GROWN_BY_LITTLE.. => 2,
            _ => 1,
        };
    }
}

/// Before anything is known: about what TCP itself sends at first, several times over.
pub(super) const FIRST_CAP: u64 = 64 * 1024;
/// On a shorter line a cap that is let go at once is no queue that anybody would notice.
const LONG: Duration = Duration::from_millis(5);
/// Below this a link's own overhead would eat it.
const LEAST_CAP: u64 = 16_000;
/// More than HTTP/2 lets be under way in any case.
const MOST_CAP: u64 = 64 << 20;
/// A round that takes longer, and three round trips, had a pause in it.
const PAUSE: Duration = Duration::from_millis(100);
/// A shorter round would measure the scheduler, not the line.
const SHORTEST_ROUND: Duration = Duration::from_millis(10);
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
