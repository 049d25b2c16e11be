//! How much a line's RTT changes without us.

use std::collections::VecDeque;
use std::time::Duration;

/// Changes of the RTT that are not caused by us: a fall while as much is in flight was no queue of ours.
#[derive(Debug, Default)]
pub(crate) struct RttJitter {
    /// The longest RTT of the current round, and the largest fall after it.
    longest: Duration,
    fall: Duration,
    /// The largest variation while nothing of ours was in flight in this round.
    alone: Option<Duration>,
    /// The sum and the number of the RTTs of this round.
    sum: Duration,
    samples: u32,
    /// The mean RTT of the previous rounds, weighted towards the later ones.
    usual: Option<Duration>,
    /// The changes of some rounds, latest first.
    changes: VecDeque<Duration>,
}

impl RttJitter {
    /// Records how much the RTT varied while nothing of ours was in flight.
    ///
    /// A value that the kernel assumes and has not measured counts up to [`MAX_JITTER`]. It must count at all:
    /// otherwise bulk on a jittery line would start at half of the rate and stay there.
    pub(crate) fn on_idle_sample(&mut self, by: Duration, measured: bool) {
        self.alone = self.alone.max(Some(if measured { by } else { by.min(MAX_JITTER) }));
    }

    /// Takes an RTT measurement.
    pub(crate) fn sample(&mut self, rtt: Duration) {
        self.longest = self.longest.max(rtt);
        self.fall = self.fall.max(self.longest - rtt);
        self.sum += rtt;
        self.samples += 1;
    }

    /// Ends a round; the next one starts with `rtt`. The fall of the RTT counts if as much was in flight all the time.
    pub(crate) fn end_round(&mut self, rtt: Duration, counts: bool) {
        if let Some(change) = self.alone.take().or(counts.then_some(self.fall)) {
            self.learn(change);
        }
        self.usual = Some(self.usual());
        (self.longest, self.fall, self.sum, self.samples) = (rtt, Duration::ZERO, Duration::ZERO, 0);
    }

    /// Records the change of a round.
    pub(crate) fn learn(&mut self, change: Duration) {
        self.changes.truncate(NOISE_ROUNDS_KEPT - 1);
        self.changes.push_front(change);
    }

    /// Returns the recent jitter on a line with that minimum RTT.
    pub(crate) fn now(&self, least: Duration) -> Duration {
        self.changes.iter().copied().max().unwrap_or_default().min(MAX_JITTER.max(least / 2))
    }

    /// Returns the recent mean RTT; the current round contributes half of it.
    pub(crate) fn usual(&self) -> Duration {
        let mean = self.sum / self.samples.max(1);
        self.usual.map_or(mean, |before| (before + mean) / 2)
    }
}

/// Number of rounds for which changes are kept: a line may happen to be steady for a second.
const NOISE_ROUNDS_KEPT: usize = 24;
/// Larger changes count as a queue, unless half of the minimum RTT is even more.
const MAX_JITTER: Duration = Duration::from_millis(50);
