//! When a certificate is asked for anew. Pure: times and chance are arguments.

use std::time::SystemTime;

/// When to ask for the next one: after 70 to 90 % of the life that remained when it was received, by `chance` from 0 to
/// 1, so that what was issued together is not renewed together. What it had lived before counts for nothing: signers
/// date certificates back.
pub(super) fn due(received: SystemTime, until: SystemTime, chance: f64) -> SystemTime {
    let left = until.duration_since(received).unwrap_or_default();
    // A chance that is not a number from 0 to 1 is a bug of the caller: the middle is used.
    let chance = if (0.0..=1.0).contains(&chance) { chance } else { 0.5 };
    received + left.mul_f64(EARLIEST + (LATEST - EARLIEST) * chance)
}

const EARLIEST: f64 = 0.7;
const LATEST: f64 = 0.9;

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::time::Duration;

    proptest! {
        #[test]
        fn it_is_renewed_between_70_and_90_percent_of_what_remained(
            begin in 0_u64..4_000_000_000, life in 0_u64..1_000_000_000, chance in 0.0_f64..=1.0,
        ) {
            let received = SystemTime::UNIX_EPOCH + Duration::from_secs(begin);
            let life = Duration::from_secs(life);
            let after = due(received, received + life, chance).duration_since(received).unwrap();
            prop_assert!(after >= life.mul_f64(0.699_999) && after <= life.mul_f64(0.900_001), "{after:?} of {life:?}");
        }
    }

    #[test]
    fn what_was_over_when_it_came_is_due_at_once_and_an_odd_chance_is_still_one() {
        let now = SystemTime::now();
        assert_eq!(due(now, now - Duration::from_secs(9), 0.5), now);
        let (end, hundred) = (now + Duration::from_secs(100), Duration::from_secs(100));
        for odd in [7.0, -1.0, f64::NAN] {
            assert_eq!(due(now, end, odd), now + hundred.mul_f64(0.8), "{odd}");
        }
    }
}
