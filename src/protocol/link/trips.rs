//! The round trips of a link of late, and how long an answer may take.

use std::time::Duration;

/// The smoothed round trip of pings, and how much it varies. Pure.
#[derive(Debug, Default)]
pub(super) struct Trips {
    /// `None` before the first answer.
    smoothed: Option<Duration>,
    variation: Duration,
}

impl Trips {
    /// A ping was answered after so long.
    pub(super) fn sample(&mut self, trip: Duration) {
        let Some(smoothed) = self.smoothed else {
            self.smoothed = Some(trip);
            return;
        };
        self.variation = (self.variation * 3 + smoothed.abs_diff(trip)) / 4;
        self.smoothed = Some((smoothed * 7 + trip) / 8);
    }

    /// After how long without an answer a link counts as silent: 1 s and four round trips. A packet that is lost is sent
    /// again after little more than two of them, and a second time a second later. `None` before the first answer.
    pub(super) fn patience(&self) -> Option<Duration> {
        self.smoothed.map(|smoothed| LEAST_PATIENCE + (smoothed + self.variation) * TRIPS)
    }
}

const LEAST_PATIENCE: Duration = Duration::from_secs(1);
const TRIPS: u32 = 4;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_steady_line_is_given_a_second_and_four_round_trips_and_one_that_varies_more() {
        let mut trips = Trips::default();
        assert_eq!(trips.patience(), None);
        for _ in 0..20 {
            trips.sample(Duration::from_millis(100));
        }
        assert_eq!(trips.patience(), Some(Duration::from_millis(1400)));
        trips.sample(Duration::from_millis(500));
        let patience = trips.patience().unwrap();
        assert_eq!(patience, Duration::from_millis(1000 + 4 * (150 + 100)));
    }
}
