//! How many bytes may be in flight on a line, from RTTs and delivered bytes.
//!
//! A growing RTT means that there is a standing queue somewhere. The window is then cut to what the line carries in its
//! minimum RTT plus a little. Whether the queue was ours shows afterwards: if it is as long as before, it was not, and
//! the line's RTT has simply become longer.

use std::collections::VecDeque;
use std::time::Duration;

use tokio::time::Instant;

use crate::congestion::rtt_variation::RttJitter;
use crate::congestion::{carried, per_second, time_of};

/// The congestion window, and the measurements that it is derived from.
#[derive(Debug, Default)]
pub(crate) struct CongestionWindow {
    bytes: u64,
    /// Whether the window doubles each round, until the first standing queue.
    doubling: bool,
    /// The line's RTT without a queue of ours.
    least: Option<Duration>,
    /// Bytes per second that the line is known to carry at least.
    rate: Option<u64>,
    /// Bytes per second of the latest rounds. Deliveries are known in steps, so a single round may show far too little;
    /// the best of them is the line's rate.
    rates: VecDeque<u64>,
    round: RttRound,
    /// Time spent at the limit since the minimum RTT was last renewed.
    capped_for: Duration,
    renewal: Option<ProbeRttPhase>,
    trial: Option<WindowCutTrial>,
    /// Whether the doubling has just ended.
    overshot: bool,
    /// Whether much was in flight in the previous round. If not, a queue on the line is older, or not ours.
    was_near: bool,
    /// When much was last in flight, and the number of rounds since then.
    busy_at: Option<Instant>,
    quiet: u32,
    /// Rounds to wait before the effect of the latest change of the window shows.
    probing_cooldown: u32,
    /// Number of consecutive times that the window has grown without a queue.
    grown: u32,
    /// Rounds since the window was cut, or since much less than the window was in flight although more was to be sent
    /// (as when BBR probes the minimum RTT). A fall of the RTT right after that is a queue that drains.
    steady: u32,
    /// Consecutive rounds in which the window was reached and did not grow.
    full: u32,
    pub(crate) noise: RttJitter,
}

impl CongestionWindow {
    /// Creates the window for a line about which nothing is known yet.
    pub(crate) fn new() -> Self {
        Self {
            bytes: INITIAL_CWND,
            doubling: true,
            rates: VecDeque::with_capacity(ROUNDS_KEPT),
            steady: ROUNDS_TO_DRAIN,
            ..Self::default()
        }
    }

    /// Returns the number of bytes that may be in flight now.
    pub(crate) fn bytes(&self) -> u64 {
        let eighths = self.renewal.and_then(|r| RENEWAL_EIGHTHS.get(r.step)).unwrap_or(&8);
        (self.bytes / 8 * eighths).max(MIN_CWND)
    }

    /// Returns true if `under_way` bytes in flight reach the window. Called only if there is more to send.
    pub(crate) fn is_reached(&mut self, under_way: u64) -> bool {
        self.round.near |= under_way >= self.bytes() / 8;
        self.round.low |= under_way < self.bytes() / 2;
        // During the doubling the line must not wait for the next step.
        self.round.hit |= under_way >= if self.doubling { self.bytes() / 2 } else { self.bytes() };
        under_way >= self.bytes()
    }

    /// Records how much RTTs vary with little in flight. The variation is the line's own once no queue of ours is left.
    pub(crate) fn on_rtt_variation(&mut self, by: Duration, now: Instant) {
        if self.busy_at.is_none_or(|busy| now - busy >= RESTED) {
            self.noise.on_idle_sample(by, self.quiet >= QUIET_ROUNDS);
        }
    }

    /// Returns the minimum RTT, once one is known.
    pub(crate) fn min_rtt(&self) -> Option<Duration> {
        self.least
    }

    /// Sets the minimum RTT to `met`, the shortest RTT measured without a queue of ours. An increase smaller than the
    /// line's jitter is chance and is ignored.
    pub(crate) fn update_min_rtt(&mut self, met: Duration) {
        let known = self.least.unwrap_or(met);
        self.least = Some(if met < known + self.jitter(known) { met.min(known) } else { met });
        self.capped_for = Duration::ZERO;
    }

    /// Returns the number of consecutive rounds in which the window was reached and did not grow: the line was full.
    pub(crate) fn rounds_at_limit(&self) -> u32 {
        self.full
    }

    /// Returns the rate at which bulk may be sent on a long line, a little above the known rate, and the allowed burst
    /// time.
    ///
    /// Returns `None` while the window still doubles.
    pub(crate) fn pacing_rate(&self) -> Option<(u64, Duration)> {
        let least = self.least.filter(|least| *least >= LONG && !self.doubling)?;
        let best = self.best();
        (best > 0).then(|| (best / 16 * 17, self.jitter(least)))
    }

    /// Returns the bytes per second that the line is known to carry.
    pub(crate) fn bandwidth(&self) -> Option<u64> {
        self.rate
    }

    /// Takes an RTT measurement; `delivered` is the total number of bytes that have arrived.
    pub(crate) fn sample(&mut self, rtt: Duration, delivered: u64, now: Instant) {
        self.least = Some(self.least.map_or(rtt, |least| least.min(rtt)));
        self.round.least = Some(self.round.least.map_or(rtt, |least| least.min(rtt)));
        self.noise.sample(rtt);
        self.busy_at = if self.round.near { Some(now) } else { self.busy_at };
        let next = RttRound { since: Some(now), delivered, ..RttRound::default() };
        let Some(since) = self.round.since else {
            self.round = RttRound { hit: self.round.hit, near: self.round.near, low: self.round.low, ..next };
            return;
        };
        let (Some(shortest), Some(least)) = (self.round.least, self.least) else { return };
        let jitter = self.jitter(least);
        // Half a round more of doubling would fill the queue of any line.
        let overfull = self.doubling && self.was_near && rtt > least + standing_queue(least) + jitter;
        let (lasts, here) = match jitter {
            _ if overfull => (MIN_ROUND, rtt),
            Duration::ZERO => (rtt.max(MIN_ROUND), shortest),
            // On a jittery line a single RTT says little, and the shortest one says least.
            _ => (rtt.max(jitter), self.noise.usual().saturating_sub(usual(jitter))),
        };
        if now - since >= lasts {
            self.end_round(here, rtt, delivered, now - since);
            self.round = next;
        }
    }

    fn end_round(&mut self, here: Duration, rtt: Duration, delivered: u64, took: Duration) {
        let (Some(shortest), Some(least)) = (self.round.least, self.least) else { return };
        // A round with a pause shows nothing.
        let paused = took > PAUSE.max(shortest * 3);
        let hit = self.round.hit && !paused;
        let near = self.round.near && !paused;
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
        self.noise.end_round(rtt, counts);
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
            // The line's rate showed while the queue from the doubling was sent.
            if std::mem::take(&mut self.overshot) {
                self.bytes = self.bytes.max(carried(self.best(), least + self.target(least)));
            }
        } else if queue > standing_queue(least) {
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
            if self.capped_for >= MIN_RTT_EXPIRY.max(least * RENEW_AFTER_TRIPS) {
                (self.full, self.trial, self.renewal) =
                    (0, None, Some(ProbeRttPhase { step: 0, least: None }));
            }
        }
    }

    /// Handles a round with a standing queue.
    fn on_standing_queue(&mut self, here: Duration, least: Duration) {
        let bytes = self.bytes;
        let best = self.best();
        let target = carried(best, least + self.target(least));
        if target >= bytes && !self.doubling && self.trial.is_none() {
            // With so little in flight the queue cannot be ours: the line's RTT varies on its own.
            self.noise.learn(self.round.least.unwrap_or(here).saturating_sub(least));
            return;
        }
        let trial = self.trial.take().unwrap_or(WindowCutTrial { bytes, rtt: here, shorter: Duration::ZERO });
        if trial.shorter >= self.target(least) && here + trial.shorter / 2 > trial.rtt {
            // With less in flight the queue is as long as before, so it is not ours.
            (self.least, self.bytes) = (Some(here), trial.bytes);
            return;
        }
        let lowered = target.clamp(MIN_CWND, bytes);
        let less = time_of(bytes - lowered, best).min(here.saturating_sub(least));
        // Most of what was sent during the doubling has yet to reach the queue, so this cut proves nothing.
        let tried = WindowCutTrial { shorter: trial.shorter + less, ..trial };
        self.overshot = std::mem::take(&mut self.doubling);
        self.trial = (!self.overshot).then_some(tried);
        (self.bytes, self.probing_cooldown, self.grown, self.steady) = (lowered, 1, 0, 0);
    }

    /// Returns the queue that is allowed.
    fn target(&self, least: Duration) -> Duration {
        target(least, self.jitter(least))
    }

    /// Returns by how much the RTT changes without us, or zero if that is less than what counts as a queue.
    fn jitter(&self, least: Duration) -> Duration {
        Some(self.noise.now(least)).filter(|noise| *noise > standing_queue(least)).unwrap_or_default()
    }

    /// Returns the best known rate of the line.
    fn best(&self) -> u64 {
        self.rates.iter().copied().max().unwrap_or_default()
    }

    /// Handles a round without a standing queue.
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
            // A window that is much too small need not grow in small steps for long.
            grown @ GROWN_BY_LITTLE.. => (self.bytes / 8) << (grown - GROWN_BY_LITTLE).min(3),
            _ => carried(self.best(), allowed(least) / 2),
        };
        self.bytes = (self.bytes + step.min(self.bytes)).min(MAX_CWND);
        self.probing_cooldown = match self.grown {
            _ if self.doubling => 0,
            // Its minimum RTT was measured before the change.
            GROWN_BY_LITTLE.. => 2,
            _ => 1,
        };
    }
}

/// The window before anything is known: several times what TCP itself sends at first.
pub(crate) const INITIAL_CWND: u64 = 64 * 1024;
/// On a shorter line a whole window sent at once is no noticeable queue.
const LONG: Duration = Duration::from_millis(5);
/// Below this a link's own overhead would use up the window.
const MIN_CWND: u64 = 16_000;
/// More than HTTP/2 allows in flight in any case.
const MAX_CWND: u64 = 64 << 20;
/// A round that takes longer than this and three RTTs contained a pause.
const PAUSE: Duration = Duration::from_millis(100);
/// A shorter round would measure the scheduler, not the line.
const MIN_ROUND: Duration = Duration::from_millis(10);
/// Number of rounds for which rates are kept: enough to show the line's rate at least once.
const ROUNDS_KEPT: usize = 8;
/// After this number of rounds the queue from before a cut has drained.
const ROUNDS_TO_DRAIN: u32 = 3;
/// This long after much was in flight, variation is the line's own. BBR's probe of the minimum RTT takes less.
const RESTED: Duration = Duration::from_secs(2);
/// Rounds after which the kernel has measured the variation.
///
/// Linux assumes half of a new line's RTT as its variation, and reduces that by a quarter each round. Five times the
/// rest is then less than an eighth of the RTT.
const QUIET_ROUNDS: u32 = 12;
/// Number of consecutive growths without a queue after which the window grows by an eighth instead of a little.
const GROWN_BY_LITTLE: u32 = 3;

/// Returns by how much an RTT must exceed the minimum to indicate a standing queue.
pub(crate) fn standing_queue(least: Duration) -> Duration {
    STANDING.max(least / 8)
}

/// Returns the queue that is allowed on a line with that minimum RTT, without jitter.
pub(crate) fn allowed(least: Duration) -> Duration {
    ALLOWED.max(least / 12)
}

/// Returns the part of the jitter that a line's usual RTT contains. A larger part hides longer queues, but keeps the
/// line full more reliably.
pub(crate) fn usual(jitter: Duration) -> Duration {
    jitter / 10 * 7
}

/// Returns the queue that the window is cut to. A jittery line reaches its rate only with as much in flight as its
/// usual RTT takes.
pub(crate) fn target(least: Duration, jitter: Duration) -> Duration {
    allowed(least) + jitter / 20 * 11
}

/// An RTT that exceeds the minimum by this, or by an eighth of the minimum if that is more, indicates a standing queue.
const STANDING: Duration = Duration::from_millis(12);
/// Keeps the line from running dry; on a long line it is a twelfth of the RTT.
const ALLOWED: Duration = Duration::from_millis(8);

/// One RTT, or 10 ms if that is longer.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct RttRound {
    pub(crate) since: Option<Instant>,
    pub(crate) delivered: u64,
    pub(crate) least: Option<Duration>,
    pub(crate) hit: bool,
    /// Whether much was in flight, limited by the window or by the kernel.
    pub(crate) near: bool,
    /// Whether less than half of the window was in flight.
    pub(crate) low: bool,
}

/// Some rounds below the window that drain the queue which we may keep standing ourselves.
#[derive(Debug, Clone, Copy)]
pub(crate) struct ProbeRttPhase {
    /// Index of the current step.
    pub(crate) step: usize,
    pub(crate) least: Option<Duration>,
}

/// A trial after the window was cut: does the queue become shorter?
#[derive(Debug, Clone, Copy)]
pub(crate) struct WindowCutTrial {
    /// The window and the RTT before the cut.
    pub(crate) bytes: u64,
    pub(crate) rtt: Duration,
    /// By how much the RTT should be shorter now.
    pub(crate) shorter: Duration,
}

/// After this time at the limit the minimum RTT is measured again, because the route may have changed.
const MIN_RTT_EXPIRY: Duration = Duration::from_secs(10);
/// Minimum number of RTTs between two renewals, because a renewal takes several.
const RENEW_AFTER_TRIPS: u32 = 100;
/// The window in each round of a renewal, in eighths. Two rounds at half show the minimum RTT; then it grows in steps,
/// because half a window released at once would itself be a queue.
pub(crate) const RENEWAL_EIGHTHS: [u64; 5] = [4, 4, 5, 6, 7];
