//! When it is looked whose addresses are to be caught.

use std::time::Duration;

use tokio::sync::watch;
use tokio::time::{Instant, Interval, MissedTickBehavior, interval, sleep_until};

/// A look at each change and at each tick, and some time between any two.
#[derive(Debug)]
pub(super) struct Pace {
    ticks: Interval,
    looked: Instant,
}

impl Pace {
    /// The first look is now.
    pub(super) fn new() -> Self {
        let mut ticks = interval(TICK);
        ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
        Self { ticks, looked: Instant::now() }
    }

    /// Waits for the next look. Dropped early, no change is lost.
    pub(super) async fn next(&mut self, changes: &mut watch::Receiver<()>) {
        sleep_until(self.looked + LEAST).await;
        tokio::select! {
            // It never ends: the registry holds the sender.
            _ = changes.changed() => {}
            _ = self.ticks.tick() => {}
        }
        self.looked = Instant::now();
    }
}

/// Between two looks at what is not reported: nodes at other pods, claims, how long a node is gone.
const TICK: Duration = Duration::from_millis(500);

/// The least time between two looks, each of which reads all claims: edges that link again and again cause no more.
const LEAST: Duration = Duration::from_millis(150);

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test(start_paused = true)]
    async fn however_often_something_changes_some_time_passes_between_two_looks() {
        let (changed, mut changes) = watch::channel(());
        let (begun, mut pace) = (Instant::now(), Pace::new());
        for looks in 1..=10 {
            changed.send_replace(());
            pace.next(&mut changes).await;
            assert!(begun.elapsed() >= LEAST * looks, "{:?}", begun.elapsed());
        }
        assert!(begun.elapsed() < TICK * 10, "and no more than that");
    }
}
