//! How long to wait before trying again. Pure: chance and time come in as values.

use std::time::Duration;

/// The pauses between tries of one thing: soon at first, then longer and longer, each with jitter so that thousands
/// who lost the same pod do not come back in step.
///
/// The first pause is all chance, of the others a half. Were they all chance, then of some thousands that lost a pod
/// for two seconds a few would draw so many short pauses that their next one is 13 s. So every one of them is back
/// within twice the time that the pod was away.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Backoff {
    /// Tries since the last that was worth it.
    tries: u32,
}

impl Backoff {
    /// At its start.
    pub fn new() -> Self {
        Self::default()
    }

    /// As it stands after so many tries in vain.
    pub fn after(tries: u32) -> Self {
        Self { tries }
    }

    /// The pause before the next try; `chance` is a random number from 0 to 1.
    pub fn pause(&mut self, chance: f64) -> Duration {
        let ceiling = self.ceiling();
        self.tries = self.tries.saturating_add(1);
        // Not a number, or out of range, is nobody's fault but ours: the middle will do.
        let chance = if (0.0..=1.0).contains(&chance) { chance } else { 0.5 };
        if ceiling == AT_FIRST { ceiling.mul_f64(chance) } else { ceiling.mul_f64(0.5 + chance / 2.0) }
    }

    /// Tells how the last try ended: a link that lived, or carried a session, was worth it. One that was made and
    /// dropped at once (by a proxy, or a pod that refuses) was not, and the pauses go on growing.
    pub fn ended(&mut self, lived: Duration, carried_a_session: bool) {
        if carried_a_session || lived >= WORTH_IT {
            self.tries = 0;
        }
    }

    /// The longest that the next pause can be.
    fn ceiling(&self) -> Duration {
        match self.tries {
            0 => AT_FIRST,
            n => MIN_PAUSE.saturating_mul(1_u32.checked_shl(n - 1).unwrap_or(u32::MAX)).min(MAX_PAUSE),
        }
    }
}

/// Ceiling of the first pause: at once for a person, yet spread for a pod that 5,000 edges come back to.
const AT_FIRST: Duration = Duration::from_millis(50);

/// Ceiling of the second pause, doubled with each further one.
const MIN_PAUSE: Duration = Duration::from_millis(100);

/// Ceiling of all pauses: a pod that is back is found within half a minute, and a dead one costs nobody anything.
pub const MAX_PAUSE: Duration = Duration::from_secs(30);

/// A link that lived so long was no mere flash.
const WORTH_IT: Duration = Duration::from_secs(10);

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn ceilings_double_up_to_the_most() {
        let mut backoff = Backoff::new();
        let millis: Vec<_> = (0..12).map(|_| backoff.pause(1.0).as_millis()).collect();
        assert_eq!(millis, [50, 100, 200, 400, 800, 1600, 3200, 6400, 12_800, 25_600, 30_000, 30_000]);
    }

    #[test]
    fn only_a_link_that_was_worth_it_starts_over() {
        let mut backoff = Backoff::new();
        for _ in 0..5 {
            backoff.pause(1.0);
            backoff.ended(WORTH_IT - Duration::from_millis(1), false);
        }
        assert_eq!(backoff.ceiling(), MIN_PAUSE * 16);
        let mut lived = backoff.clone();
        lived.ended(WORTH_IT, false);
        backoff.ended(Duration::ZERO, true);
        assert_eq!([lived, backoff], [Backoff::new(), Backoff::new()]);
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
        fn the_first_pause_is_all_chance_and_half_of_every_other(tries in 0..200_u32, chance in 0.0..=1.0) {
            let mut backoff = Backoff { tries };
            let whole = backoff.ceiling().as_secs_f64();
            let part = backoff.pause(chance).as_secs_f64();
            let fixed = if tries == 0 { 0.0 } else { 0.5 };
            prop_assert!((part - whole * (fixed + chance * (1.0 - fixed))).abs() < 1e-6);
        }

        #[test]
        fn who_was_without_a_pod_for_a_while_is_back_within_twice_that(chances in prop::collection::vec(0.0..=1.0, 12), away in 1.0..20.0) {
            let (mut backoff, mut now) = (Backoff::new(), 0.0);
            for chance in chances {
                now += backoff.pause(chance).as_secs_f64();
                if now >= away { break; }
            }
            prop_assert!(now >= away && now <= 3.0 * away + 0.1, "back at {now}");
        }
    }
}
