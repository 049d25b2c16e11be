//! By how much a line's round trip changes without us.

use std::collections::VecDeque;
use std::time::Duration;

/// What falls again while as much is under way was no queue of ours.
#[derive(Debug, Default)]
pub(super) struct Noise {
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

impl Noise {
    /// The round trip varied by so much while nothing of ours was under way. What the kernel has not measured, but assumes,
    /// counts up to [`MOST`]: on a line that jitters bulk would else begin at half of the rate and stay there.
    pub(super) fn alone(&mut self, by: Duration, measured: bool) {
        self.alone = self.alone.max(Some(if measured { by } else { by.min(MOST) }));
    }

    /// A round trip was measured.
    pub(super) fn sample(&mut self, trip: Duration) {
        self.longest = self.longest.max(trip);
        self.fall = self.fall.max(self.longest - trip);
        self.sum += trip;
        self.samples += 1;
    }

    /// A round is over, and the next begins with `trip`. What fell counts if as much was under way all the time.
    pub(super) fn end_round(&mut self, trip: Duration, counts: bool) {
        if let Some(change) = self.alone.take().or(counts.then_some(self.fall)) {
            self.learn(change);
        }
        self.usual = Some(self.usual());
        (self.longest, self.fall, self.sum, self.samples) = (trip, Duration::ZERO, Duration::ZERO, 0);
    }

    /// It was so much in a round.
    pub(super) fn learn(&mut self, change: Duration) {
        self.changes.truncate(ROUNDS_KEPT - 1);
        self.changes.push_front(change);
    }

    /// How much it is of late, on a line with that least round trip.
    pub(super) fn now(&self, least: Duration) -> Duration {
        self.changes.iter().copied().max().unwrap_or_default().min(MOST.max(least / 2))
    }

    /// The mean round trip of late, half of it that of the round that is on.
    pub(super) fn usual(&self) -> Duration {
        let mean = self.sum / self.samples.max(1);
        self.usual.map_or(mean, |before| (before + mean) / 2)
    }
}

/// Of how many rounds it is remembered: by chance a line may be quiet for a second.
const ROUNDS_KEPT: usize = 24;
/// More is believed to be a queue, or more than half of the least round trip if that is longer.
const MOST: Duration = Duration::from_millis(50);
