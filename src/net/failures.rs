//! Counts wrong passwords and invitations, and makes those who gave too many wait.

use std::collections::HashMap;
use std::time::Duration;

use tokio::time::Instant;

use super::door::{Limits, Shares, Source};

/// Wrong passwords of the last minute, by source and user. When it is full, the source with most entries loses one: a
/// source that tries many names does not push out the failures of others.
#[derive(Debug)]
pub struct Failures {
    shares: Shares<Source>,
    counts: HashMap<Who, Count>,
    /// The entry that holds each slot of [`Self::shares`], by the slot's number.
    numbers: HashMap<u64, Who>,
}

/// A source, and a keyed hash of a user's name.
pub type Who = (Source, u64);

#[derive(Debug)]
struct Count {
    number: u64,
    failed: u32,
    since: Instant,
}

impl Default for Failures {
    fn default() -> Self {
        Self::new()
    }
}

impl Failures {
    /// None so far.
    pub fn new() -> Self {
        let shares = Shares::new(Limits::slots(MOST));
        Self { shares, counts: HashMap::new(), numbers: HashMap::new() }
    }

    /// Whether this source and user failed too often, so that their next password is not checked yet.
    pub fn bar(&self, who: &Who, now: Instant) -> bool {
        let recent = |count: &&Count| now.saturating_duration_since(count.since) < WINDOW;
        self.counts.get(who).filter(recent).is_some_and(|count| count.failed >= ALLOWED)
    }

    /// Counts a failure.
    pub fn add(&mut self, who: Who, now: Instant) {
        if let Some(count) = self.counts.get_mut(&who) {
            if now.saturating_duration_since(count.since) >= WINDOW {
                (count.failed, count.since) = (0, now);
            }
            count.failed += 1;
            self.shares.mark(count.number, false, now);
            return;
        }
        let Ok((number, effects)) = self.shares.enter(&who.0, now) else { return };
        self.numbers.insert(number, who);
        self.counts.insert(who, Count { number, failed: 1, since: now });
        if let Some(lost) = effects.lost.and_then(|lost| self.numbers.remove(&lost)) {
            self.counts.remove(&lost);
        }
    }

    /// Forgets the failures after a right password.
    pub fn forget(&mut self, who: &Who, now: Instant) {
        if let Some(count) = self.counts.remove(who) {
            self.numbers.remove(&count.number);
            self.shares.leave(count.number, now);
        }
    }
}

/// Entries (source and user) that are kept at most; about 300 bytes each.
const MOST: usize = 4096;

/// Wrong passwords within [`WINDOW`] after which further ones are not checked until it ends.
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
