//! Logins that succeeded within the last minute and need no second check.

use std::collections::{HashMap, VecDeque};
use std::time::Duration;

use tokio::time::Instant;

/// Fingerprints of logins that succeeded, each with its time, the oldest first.
#[derive(Debug, Default)]
pub(super) struct Recent {
    since: HashMap<u128, Instant>,
    order: VecDeque<(Instant, u128)>,
}

impl Recent {
    pub(super) fn holds(&self, print: u128, now: Instant) -> bool {
        self.since.get(&print).is_some_and(|since| now.saturating_duration_since(*since) < LOGIN_TTL)
    }

    pub(super) fn add(&mut self, print: u128, now: Instant) {
        while let Some((since, oldest)) = self.order.front().copied() {
            if self.order.len() < RECENT && now.saturating_duration_since(since) < LOGIN_TTL {
                break;
            }
            self.order.pop_front();
            // An entry that was renewed since then stays.
            if self.since.get(&oldest) == Some(&since) {
                self.since.remove(&oldest);
            }
        }
        self.since.insert(print, now);
        self.order.push_back((now, print));
    }
}

/// How long a login needs no second check, so that each of many short connections does not cost a bcrypt.
pub(super) const LOGIN_TTL: Duration = Duration::from_secs(60);

/// Successful logins that are remembered at most, about 100 bytes each.
const RECENT: usize = 16 * 1024;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_remembered_is_bounded() {
        let (mut recent, now) = (Recent::default(), Instant::now());
        for print in 0..3 * RECENT as u128 {
            recent.add(print, now);
            recent.add(print, now);
            assert!(recent.holds(print, now));
        }
        assert!(recent.since.len() <= RECENT && recent.order.len() <= RECENT);
        assert!(!recent.holds(3 * RECENT as u128 - 1, now + LOGIN_TTL));
    }
}
