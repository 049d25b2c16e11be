//! Counts wrong passwords, and delays sources with too many.

use std::time::Duration;

use tokio::time::Instant;

use tunnel_net::fair_map::FairMap;
use tunnel_net::limiter::Source;

/// Wrong passwords of the last minute, by source and user.
///
/// A source that tries many names does not push out the failures of others.
#[derive(Debug)]
pub(super) struct LoginThrottle(FairMap<Source, LoginThrottleKey, FailureCounter>);

/// A source, and a keyed hash of a user name.
pub(super) type LoginThrottleKey = (Source, u64);

/// The number of recent failures of one source and user.
#[derive(Debug)]
struct FailureCounter {
    failed: u32,
    since: Instant,
}

impl LoginThrottle {
    /// Creates a throttle without failures.
    pub(super) fn new() -> Self {
        Self(FairMap::new(MAX_KEYS))
    }

    /// Returns true if this source and user failed too often, so that their next password must not be checked yet.
    pub(super) fn check(&self, who: &LoginThrottleKey, now: Instant) -> bool {
        let recent = |count: &&FailureCounter| now.saturating_duration_since(count.since) < THROTTLE_WINDOW;
        self.0.get(who).filter(recent).is_some_and(|count| count.failed >= MAX_WRONG_PASSWORDS)
    }

    /// Records a failure.
    pub(super) fn add(&mut self, who: LoginThrottleKey, now: Instant) {
        let Some(count) = self.0.renew(&who, now) else {
            self.0.insert(&who.0.clone(), who, FailureCounter { failed: 1, since: now }, now);
            return;
        };
        if now.saturating_duration_since(count.since) >= THROTTLE_WINDOW {
            (count.failed, count.since) = (0, now);
        }
        count.failed += 1;
    }

    /// Removes the failures after a correct password.
    pub(super) fn forget(&mut self, who: &LoginThrottleKey) {
        self.0.remove(who);
    }
}

/// Maximum number of entries (source and user); about 300 bytes each.
const MAX_KEYS: usize = 4096;

/// Wrong passwords within [`THROTTLE_WINDOW`] after which no more are checked until it ends.
const MAX_WRONG_PASSWORDS: u32 = 10;

const THROTTLE_WINDOW: Duration = Duration::from_secs(60);

#[cfg(test)]
mod tests {
    use super::*;

    fn source(last: u8) -> Source {
        Source::of([10, 0, 0, last].into())
    }

    #[test]
    fn failures_of_one_source_evict_only_its_own() {
        let (mut failures, now) = (LoginThrottle::new(), Instant::now());
        for _ in 0..MAX_WRONG_PASSWORDS {
            failures.add((source(1), 0), now);
        }
        for name in 0..3 * MAX_KEYS as u64 {
            failures.add((source(2), name), now);
        }
        assert!(failures.check(&(source(1), 0), now));
        failures.forget(&(source(1), 0));
        assert!(!failures.check(&(source(1), 0), now));
    }
}
