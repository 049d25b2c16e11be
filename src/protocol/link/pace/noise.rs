//! By how much a line's round trip changes without us.

use std::collections::VecDeque;
use std::time::Duration;

/// What falls again while as much is under way was no queue of ours.
#[derive(Debug, Default)]
pub(super) struct Noise {
    /// The longest round trip of the round that is on, and by how much a later one was shorter at the most.
    longest: Duration,
    fall: Duration,
    /// The same falls of some rounds, the latest first.
    falls: VecDeque<Duration>,
}

impl Noise {
    /// The round trip varied by so much while nothing of ours was under way.
    pub(super) fn alone(&mut self, by: Duration) {
        self.falls.clear();
        self.falls.push_front(by);
    }

    /// A round trip was measured.
    pub(super) fn sample(&mut self, trip: Duration) {
        self.longest = self.longest.max(trip);
        self.fall = self.fall.max(self.longest - trip);
    }

    /// A round is over, and the next begins with `trip`. It counts if as much was under way all the time.
    pub(super) fn end_round(&mut self, trip: Duration, counts: bool) {
        if counts {
            self.falls.truncate(ROUNDS_KEPT - 1);
            self.falls.push_front(self.fall);
        }
        (self.longest, self.fall) = (trip, Duration::ZERO);
    }

    /// How much it is of late.
    pub(super) fn now(&self) -> Duration {
        self.falls.iter().copied().max().unwrap_or_default().min(MOST)
    }
}

/// Of how many rounds it is remembered.
const ROUNDS_KEPT: usize = 16;
/// More is believed to be a queue.
const MOST: Duration = Duration::from_millis(60);
