//! Cache of logins that succeeded within the last minute and need no second check.

use std::collections::{HashMap, VecDeque};
use std::time::Duration;

use tokio::time::Instant;

/// A cache of fingerprints of successful logins with their times, oldest first.
#[derive(Debug, Default)]
pub(crate) struct LoginCache {
    since: HashMap<u128, Instant>,
    order: VecDeque<(Instant, u128)>,
}

impl LoginCache {
    pub(crate) fn contains(&self, print: u128, now: Instant) -> bool {
        self.since.get(&print).is_some_and(|since| now.saturating_duration_since(*since) < LOGIN_TTL)
    }

    pub(crate) fn add(&mut self, print: u128, now: Instant) {
        while let Some((since, oldest)) = self.order.front().copied() {
            if self.order.len() < MAX_CACHED_LOGINS && now.saturating_duration_since(since) < LOGIN_TTL {
                break;
            }
            self.order.pop_front();
            // Keep an entry that has been renewed since.
            if self.since.get(&oldest) == Some(&since) {
                self.since.remove(&oldest);
            }
        }
        self.since.insert(print, now);
        self.order.push_back((now, print));
    }
}

/// Lifetime of a cached login. It saves a bcrypt check for each of many short connections.
pub(crate) const LOGIN_TTL: Duration = Duration::from_secs(60);

/// Maximum number of cached logins, about 100 bytes each.
const MAX_CACHED_LOGINS: usize = 16 * 1024;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_login_cache_is_bounded_and_expires() {
        let (mut recent, now) = (LoginCache::default(), Instant::now());
        for print in 0..3 * MAX_CACHED_LOGINS as u128 {
            recent.add(print, now);
            recent.add(print, now);
            assert!(recent.contains(print, now));
        }
        assert!(recent.since.len() <= MAX_CACHED_LOGINS && recent.order.len() <= MAX_CACHED_LOGINS);
        assert!(!recent.contains(3 * MAX_CACHED_LOGINS as u128 - 1, now + LOGIN_TTL));
    }
}
