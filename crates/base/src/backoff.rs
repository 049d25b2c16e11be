//! Delays between retries. Pure: random numbers and times are arguments.

use std::time::Duration;

/// Growing delays between attempts, with jitter so that thousands of edges that lost the same server do not reconnect
/// at the same moment.
///
/// The first delay is fully random, half of each later delay is. If all were fully random, a few of some thousand edges
/// that lost a server for two seconds would draw many short delays. Their next delay could then be 13 s. With this rule
/// every edge is back within twice the server's downtime.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Backoff {
    /// Attempts since the last success.
    tries: u32,
}

impl Backoff {
    /// Returns a backoff before its first attempt.
    pub fn new() -> Self {
        Self::default()
    }

    /// Returns a backoff after `tries` failed attempts.
    pub fn after(tries: u32) -> Self {
        Self { tries }
    }

    /// Returns the delay before the next attempt. `chance` is a random number from 0 to 1.
    pub fn pause(&mut self, chance: f64) -> Duration {
        let ceiling = self.ceiling();
        self.tries = self.tries.saturating_add(1);
        // A chance outside of 0 to 1 is a bug of the caller: the middle is used.
        let chance = if (0.0..=1.0).contains(&chance) { chance } else { 0.5 };
        if ceiling == INITIAL_CEILING { ceiling.mul_f64(chance) } else { ceiling.mul_f64(0.5 + chance / 2.0) }
    }

    /// Returns the longest delay while a session has waited for `waited` of `timeout` for a path: a tenth of the rest,
    /// so that both of its ends have time to link again. `chance` is a random number from 0 to 1.
    pub fn limit(waited: Duration, timeout: Duration, chance: f64) -> Duration {
        if waited >= URGENT_TIME {
            return MAX_PAUSE;
        }
        let tenth = timeout.saturating_sub(waited) / 10;
        tenth.clamp(MIN_PAUSE, MAX_URGENT_PAUSE).mul_f64(0.5 + chance.clamp(0.0, 1.0) / 2.0)
    }

    /// Records how the last attempt ended. A link that stayed up or carried a session is a success and resets the
    /// delays. A link dropped at once (by a proxy, or a server that refuses) is a failure, and the delays keep growing.
    pub fn on_attempt_end(&mut self, lived: Duration, carried_a_session: bool) {
        if carried_a_session || lived >= SUCCESS_AFTER {
            self.tries = 0;
        }
    }

    /// Skips the short delays: the server is reachable, and an immediate retry would get the same refusal.
    pub fn refused(&mut self) {
        self.tries = self.tries.max(FAST_RETRIES + 1);
    }

    /// Returns true if the failure of the latest attempt should be logged: the first failure, the one that ends the
    /// short delays, and after that one in every 32 tries.
    pub fn is_worth_logging(&self) -> bool {
        self.tries == 1 || self.tries == FAST_RETRIES + 1 || self.tries.is_multiple_of(LOGGED_TRIES)
    }

    /// Returns the upper bound of the next delay.
    fn ceiling(&self) -> Duration {
        match self.tries {
            0 => INITIAL_CEILING,
            n if n <= FAST_RETRIES => doubled(MIN_PAUSE, n - 1).min(BRISK_PAUSE),
            n => doubled(BRISK_PAUSE, n - FAST_RETRIES).min(MAX_PAUSE),
        }
    }
}

fn doubled(pause: Duration, times: u32) -> Duration {
    pause.saturating_mul(1_u32.checked_shl(times).unwrap_or(u32::MAX))
}

/// Upper bound of the first delay: short for a person, long enough to spread 5,000 edges that reconnect to one server.
const INITIAL_CEILING: Duration = Duration::from_millis(50);

/// Upper bound of the second delay, doubled for each further one up to [`BRISK_PAUSE`].
const MIN_PAUSE: Duration = Duration::from_millis(100);

/// Upper bound of the next [`FAST_RETRIES`] delays, some three seconds in total: a restarted server is back by then.
const BRISK_PAUSE: Duration = Duration::from_millis(450);

/// Number of delays bounded by [`BRISK_PAUSE`].
const FAST_RETRIES: u32 = 9;

/// Upper bound of all delays. Edges find a restarted server within half a minute, and attempts at a dead one cost
/// little.
pub const MAX_PAUSE: Duration = Duration::from_secs(30);

/// Upper bound of delays while a session waits, and the time for which they are bounded.
const MAX_URGENT_PAUSE: Duration = Duration::from_secs(3);
const URGENT_TIME: Duration = Duration::from_secs(120);

/// One in so many failures is logged: every twelve minutes at the longest delays, so that a week without a server takes
/// 900 lines.
const LOGGED_TRIES: u32 = 32;

/// Lifetime after which a link is a success. Dialling once in this time costs no more than [`BRISK_PAUSE`] does, and a
/// session may wait for a link that has carried none so far.
const SUCCESS_AFTER: Duration = Duration::from_secs(2);

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn ceilings_double_up_to_the_maximum() {
        let mut backoff = Backoff::new();
        let millis: Vec<_> = (0..18).map(|_| backoff.pause(1.0).as_millis()).collect();
        assert_eq!(millis[..10], [50, 100, 200, 400, 450, 450, 450, 450, 450, 450]);
        assert_eq!(millis[10..], [900, 1800, 3600, 7200, 14_400, 28_800, 30_000, 30_000]);
    }

    #[test]
    fn only_a_link_that_lasted_or_carried_a_session_resets_the_backoff() {
        let mut backoff = Backoff::new();
        for _ in 0..5 {
            backoff.pause(1.0);
            backoff.on_attempt_end(SUCCESS_AFTER - Duration::from_millis(1), false);
        }
        assert_eq!(backoff.ceiling(), BRISK_PAUSE);
        let mut lived = backoff.clone();
        lived.on_attempt_end(SUCCESS_AFTER, false);
        backoff.on_attempt_end(Duration::ZERO, true);
        assert_eq!([lived, backoff], [Backoff::new(), Backoff::new()]);
    }

    #[test]
    fn after_a_refusal_pauses_skip_the_brisk_phase_and_keep_doubling() {
        let mut backoff = Backoff::new();
        backoff.refused();
        assert_eq!(backoff.pause(1.0), 2 * BRISK_PAUSE);
        backoff.refused();
        assert_eq!(backoff.pause(1.0), 4 * BRISK_PAUSE);
    }

    #[test]
    fn the_first_failure_is_logged_and_a_week_of_failures_logs_few_lines() {
        let logged = |backoff: &mut Backoff, tries: u32| -> Vec<u32> {
            let failures = (1..=tries).filter(|_| {
                backoff.pause(0.5);
                backoff.is_worth_logging()
            });
            failures.collect()
        };
        assert_eq!(logged(&mut Backoff::new(), 100), [1, 10, 32, 64, 96]);
        let week = 7 * 24 * 3600 / 22;
        assert_eq!(logged(&mut Backoff::new(), week).len(), 861);

        let mut refused = Backoff::new();
        assert_eq!(logged(&mut refused, 3), [1]);
        refused.refused();
        assert!(refused.is_worth_logging(), "the first refusal");
        refused.pause(0.5);
        refused.refused();
        assert!(!refused.is_worth_logging(), "the second refusal");
    }

    #[test]
    fn a_waiting_session_bounds_the_pause_by_a_tenth_of_its_rest() {
        let limit = |waited, timeout, chance| {
            Backoff::limit(Duration::from_secs(waited), Duration::from_secs(timeout), chance).as_millis()
        };
        assert_eq!([limit(0, 60, 1.0), limit(0, 60, 0.0), limit(40, 60, 1.0)], [3000, 1500, 2000]);
        assert_eq!([limit(59, 60, 1.0), limit(70, 60, 1.0)], [100, 100], "never a busy loop");
        assert_eq!([limit(119, 3600, 1.0), limit(120, 3600, 1.0)], [3000, MAX_PAUSE.as_millis()]);
    }

    proptest! {
        #[test]
        fn no_pause_is_longer_than_its_ceiling(tries in 0..200_u32, chance: f64) {
            let mut backoff = Backoff { tries };
            let ceiling = backoff.ceiling();
            prop_assert!(backoff.pause(chance) <= ceiling && ceiling <= MAX_PAUSE);
            prop_assert!(backoff.ceiling() >= ceiling);
        }

        #[test]
        fn the_first_pause_is_fully_random_and_every_other_half_random(tries in 0..200_u32, chance in 0.0..=1.0) {
            let mut backoff = Backoff { tries };
            let whole = backoff.ceiling().as_secs_f64();
            let part = backoff.pause(chance).as_secs_f64();
            let fixed = if tries == 0 { 0.0 } else { 0.5 };
            prop_assert!((part - whole * (fixed + chance * (1.0 - fixed))).abs() < 1e-6);
        }

        #[test]
        fn the_next_attempt_follows_an_outage_within_twice_its_length(chances in prop::collection::vec(0.0..=1.0, 16), away in 1.0..20.0) {
            let (mut backoff, mut now) = (Backoff::new(), 0.0);
            for chance in chances {
                now += backoff.pause(chance).as_secs_f64();
                if now >= away { break; }
            }
            prop_assert!(now >= away && now <= 3.0 * away + 0.1, "back at {now}");
        }

        /// Both ends of a session must be back, so each uses a ninth of what an outage leaves at most.
        #[test]
        fn an_outage_shorter_than_the_resume_timeout_leaves_time_to_resume(
            chances in prop::collection::vec(0.0..=1.0, 64), away in 1.0..58.0
        ) {
            let timeout = Duration::from_secs(60);
            let mut backoff = Backoff::new();
            let mut now = 0.0;
            for chance in chances {
                let limit = Backoff::limit(Duration::from_secs_f64(now), timeout, chance);
                now += backoff.pause(chance).min(limit).as_secs_f64();
                if now >= away { break; }
            }
            prop_assert!(now >= away && now - away <= (60.0 - away) / 9.0 + 0.5, "back at {now}");
        }

        #[test]
        fn the_next_attempt_follows_a_short_outage_within_half_a_second(chances in prop::collection::vec(0.0..=1.0, 16), away in 0.0..1.6) {
            let (mut backoff, mut now) = (Backoff::new(), 0.0);
            for chance in chances {
                now += backoff.pause(chance).as_secs_f64();
                if now >= away { break; }
            }
            prop_assert!(now >= away && now <= away + 0.45, "back at {now}");
        }
    }
}
