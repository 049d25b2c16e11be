//! Limits how often each node or user may do something.

use std::collections::HashMap;
use std::hash::Hash;
use std::time::Duration;

use parking_lot::Mutex;
use tokio::time::Instant;

/// Counts what each key does within a window of time, from one window to the next.
#[derive(Debug)]
pub(crate) struct RateLimiter<K> {
    most: u32,
    window: Duration,
    counts: Mutex<(Instant, HashMap<K, u32>)>,
}

impl<K: Clone + Eq + Hash> RateLimiter<K> {
    /// Creates a limiter that allows each key `most` times in a window.
    pub(crate) fn new(most: u32, window: Duration) -> Self {
        Self { most, window, counts: Mutex::new((Instant::now(), HashMap::new())) }
    }

    /// Counts once more for this key, and returns true if that is allowed.
    pub(crate) fn allows(&self, key: &K) -> bool {
        let mut counts = self.counts.lock();
        let (began, keys) = &mut *counts;
        if began.elapsed() >= self.window {
            *began = Instant::now();
            keys.clear();
        }
        if keys.len() >= MAX_KEYS && !keys.contains_key(key) {
            return true;
        }
        let count = keys.entry(key.clone()).or_default();
        *count = count.saturating_add(1);
        *count <= self.most
    }
}

/// Maximum number of keys that are counted, all of which are proved names. Further ones are not limited.
const MAX_KEYS: usize = 100_000;

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test(start_paused = true)]
    async fn a_key_that_is_used_too_often_is_refused_until_the_window_ends() {
        let rates = RateLimiter::new(120, Duration::from_secs(60));
        assert_eq!((0..1120).filter(|_| rates.allows(&"busy")).count(), 120);
        assert!(rates.allows(&"other") && !rates.allows(&"busy"));
        tokio::time::advance(Duration::from_secs(60)).await;
        assert!(rates.allows(&"busy"));
    }

    #[tokio::test]
    async fn rates_of_endless_keys_take_bounded_memory() {
        let rates = RateLimiter::new(1, Duration::from_secs(3600));
        assert!((0..MAX_KEYS + 10).all(|n| rates.allows(&n)));
        assert_eq!(rates.counts.lock().1.len(), MAX_KEYS);
    }
}
