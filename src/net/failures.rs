//! Counts wrong passwords and invitations, and makes those who gave too many wait.

use std::time::Duration;

use tokio::time::Instant;

use super::door::{FairMap, Source};

/// Wrong passwords of the last minute, by source and user. A source that tries many names does not push out the
/// failures of others.
#[derive(Debug)]
pub struct Failures(FairMap<Source, Who, Count>);

/// A source, and a keyed hash of a user's name.
pub type Who = (Source, u64);

#[derive(Debug)]
struct Count {
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
        Self(FairMap::new(MOST))
    }

    /// Whether this source and user failed too often, so that their next password is not checked yet.
    pub fn bar(&self, who: &Who, now: Instant) -> bool {
        let recent = |count: &&Count| now.saturating_duration_since(count.since) < WINDOW;
        self.0.get(who).filter(recent).is_some_and(|count| count.failed >= ALLOWED)
    }

    /// Counts a failure.
    pub fn add(&mut self, who: Who, now: Instant) {
        let Some(count) = self.0.renew(&who, now) else {
            self.0.insert(&who.0.clone(), who, Count { failed: 1, since: now }, now);
            return;
        };
        if now.saturating_duration_since(count.since) >= WINDOW {
            (count.failed, count.since) = (0, now);
        }
        count.failed += 1;
    }

    /// Forgets the failures after a right password.
    pub fn forget(&mut self, who: &Who, now: Instant) {
        self.0.remove(who, now);
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
    fn one_source_drives_out_its_own_failures_only() {
        let (mut failures, now) = (Failures::new(), Instant::now());
        for _ in 0..ALLOWED {
            failures.add((source(1), 0), now);
        }
        for name in 0..3 * MOST as u64 {
            failures.add((source(2), name), now);
        }
        assert!(failures.bar(&(source(1), 0), now));
        failures.forget(&(source(1), 0), now);
        assert!(!failures.bar(&(source(1), 0), now));
    }
}
