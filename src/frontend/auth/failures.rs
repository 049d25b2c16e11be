//! Who gave wrong passwords, and has to wait.

use std::collections::HashMap;
use std::time::Duration;

use tokio::time::Instant;

use crate::net::door::{Limits, Shares, Source};

/// Wrong passwords of the last minute, by source and user. A full memory forgets first what it has most of: a source
/// that tries many names makes nobody else's failures forgotten.
#[derive(Debug)]
pub(super) struct Failures {
    shares: Shares<Source>,
    counts: HashMap<Who, Count>,
    /// Whose slots [`Self::shares`] has given.
    numbers: HashMap<u64, Who>,
}

/// A source, and what stands for a user's name.
pub(super) type Who = (Source, u64);

#[derive(Debug)]
struct Count {
    number: u64,
    failed: u32,
    since: Instant,
}

impl Failures {
    pub(super) fn new() -> Self {
        let shares = Shares::new(Limits::slots(MOST));
        Self { shares, counts: HashMap::new(), numbers: HashMap::new() }
    }

    /// Whether that one failed too often and is not listened to for now.
    pub(super) fn bar(&self, who: &Who, now: Instant) -> bool {
        let recent = |count: &&Count| now.saturating_duration_since(count.since) < WINDOW;
        self.counts.get(who).filter(recent).is_some_and(|count| count.failed >= ALLOWED)
    }

    /// That one failed once more.
    pub(super) fn add(&mut self, who: Who, now: Instant) {
        if let Some(count) = self.counts.get_mut(&who) {
            if now.saturating_duration_since(count.since) >= WINDOW {
                (count.failed, count.since) = (0, now);
            }
            count.failed += 1;
            self.shares.heard(count.number, false, now);
            return;
        }
        let Ok((number, effects)) = self.shares.enter(&who.0, now) else { return };
        self.numbers.insert(number, who);
        self.counts.insert(who, Count { number, failed: 1, since: now });
        if let Some(lost) = effects.lost.and_then(|lost| self.numbers.remove(&lost)) {
            self.counts.remove(&lost);
        }
    }

    /// That one has proved who he is.
    pub(super) fn forget(&mut self, who: &Who, now: Instant) {
        if let Some(count) = self.counts.remove(who) {
            self.numbers.remove(&count.number);
            self.shares.leave(count.number, now);
        }
    }
}

/// Failures that are counted for so many at once; about 300 bytes each.
const MOST: usize = 4096;

/// Wrong passwords in [`WINDOW`] before one has to wait for its end.
const ALLOWED: u32 = 10;

const WINDOW: Duration = Duration::from_secs(60);

#[cfg(test)]
mod tests {
    use super::*;

    fn source(last: u8) -> Source {
        Source::of([10, 0, 0, last].into())
    }

    #[test]
    fn what_is_remembered_is_bounded_and_one_source_drives_out_its_own_only() {
        let (mut failures, now) = (Failures::new(), Instant::now());
        for _ in 0..ALLOWED {
            failures.add((source(1), 0), now);
        }
        for name in 0..3 * MOST as u64 {
            failures.add((source(2), name), now);
        }
        assert!(failures.bar(&(source(1), 0), now));
        assert_eq!((failures.counts.len(), failures.numbers.len()), (MOST, MOST));
        for name in 0..3 * MOST as u64 {
            failures.forget(&(source(2), name), now);
        }
        failures.forget(&(source(1), 0), now);
        assert!(failures.shares.is_empty() && failures.counts.is_empty() && failures.numbers.is_empty());
    }
}
