//! When a certificate is renewed, and with which names. Pure.

use std::collections::BTreeSet;
use std::time::{Duration, SystemTime};

use crate::csr::error::CsrError;

/// The next step of a [`CertificateRenewer`].
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum RenewalStep {
    /// Wait for this long.
    Wait(Duration),
    /// Request a certificate.
    Issue {
        /// Names to request.
        names: BTreeSet<String>,
        /// Names to request if those are denied: one forbidden name must not prevent the renewal of the existing
        /// certificate.
        fallback: Option<BTreeSet<String>>,
        /// Time to wait after it was issued.
        delay: Duration,
        /// Reason of the request, as a clause.
        why: &'static str,
    },
}

/// Returns the next step. `required` are the names the certificate should have, and `last_requested` those of the last
/// request. `held` are the names of the current certificate and the time until its renewal (`None` if it is due).
///
/// # Errors
///
/// Fails if the wanted names are unknown and no certificate is due with the names of the current one.
pub(crate) fn step(
    required: Result<BTreeSet<String>, CsrError>,
    held: Option<(BTreeSet<String>, Option<Duration>)>,
    last_requested: Option<&BTreeSet<String>>,
) -> Result<RenewalStep, CsrError> {
    let (names, fallback, delay, why) = match (held, required) {
        (None, required) => (required?, None, AFTER_ISSUE, "no certificate"),
        (Some((held, Some(left))), required) => {
            let required = required?;
            if required.is_subset(&held) || last_requested == Some(&required) {
                return Ok(RenewalStep::Wait(left.min(CHECK_INTERVAL)));
            }
            // The pause bounds how often a party that can change a name causes a new certificate.
            (required, None, CHECK_INTERVAL, "new name or address")
        }
        (Some((held, None)), Ok(required)) => {
            let fallback = (held != required).then_some(held);
            (required, fallback, AFTER_ISSUE, "renewal is due")
        }
        (Some((held, None)), Err(_)) => (
            held,
            None,
            AFTER_ISSUE,
            "renewal is due; the names it should have are unknown, so its own are used",
        ),
    };
    Ok(RenewalStep::Issue { names, fallback, delay, why })
}

/// Returns the time of the next renewal: after 70 to 90 % of the validity that remained on receipt, selected by
/// `chance` from 0 to 1. The spread keeps certificates issued together from being renewed together. Validity before the
/// receipt does not matter, because signers backdate certificates.
pub(crate) fn due(received: SystemTime, until: SystemTime, chance: f64) -> SystemTime {
    let left = until.duration_since(received).unwrap_or_default();
    // A chance outside of 0 to 1 is a bug of the caller; the middle is used.
    let chance = if (0.0..=1.0).contains(&chance) { chance } else { 0.5 };
    received + left.mul_f64(EARLIEST + (LATEST - EARLIEST) * chance)
}

const EARLIEST: f64 = 0.7;
const LATEST: f64 = 0.9;

/// Delay after a certificate was issued. It prevents a busy loop if the certificate expires immediately.
const AFTER_ISSUE: Duration = Duration::from_secs(2);
/// Time between two checks of the names that the certificate should have.
const CHECK_INTERVAL: Duration = Duration::from_secs(60);

#[cfg(test)]
mod tests {
    use super::*;

    fn set(names: &[&str]) -> BTreeSet<String> {
        names.iter().map(|name| (*name).to_owned()).collect()
    }

    fn unknown() -> CsrError {
        CsrError::NoService("s".to_owned(), "n".to_owned())
    }

    const LEFT: Option<Duration> = Some(Duration::from_secs(5));

    fn issue(step: Result<RenewalStep, CsrError>) -> (BTreeSet<String>, Option<BTreeSet<String>>, Duration) {
        match step.unwrap() {
            RenewalStep::Issue { names, fallback, delay, .. } => (names, fallback, delay),
            other @ RenewalStep::Wait(_) => panic!("{other:?}"),
        }
    }

    #[test]
    fn new_names_are_requested_at_most_once_a_minute() {
        let (old, new) = (set(&["a", "b"]), set(&["a", "c"]));
        let held = || Some((old.clone(), LEFT));
        assert_eq!(step(Ok(set(&["a"])), held(), None).unwrap(), RenewalStep::Wait(Duration::from_secs(5)));
        let (names, fallback, delay) = issue(step(Ok(new.clone()), held(), None));
        assert_eq!((names, fallback), (new.clone(), None));
        assert!(delay >= Duration::from_secs(60), "{delay:?}");
        // A name that the signer leaves out is not requested again.
        assert_eq!(
            step(Ok(new.clone()), held(), Some(&new)).unwrap(),
            RenewalStep::Wait(Duration::from_secs(5))
        );
    }

    #[test]
    fn a_due_certificate_is_renewed_even_with_unknown_or_denied_names() {
        let (old, new) = (set(&["a", "b"]), set(&["a", "c"]));
        let due = || Some((old.clone(), None));
        assert_eq!(issue(step(Err(unknown()), due(), None)).0, old);
        let (names, fallback, _) = issue(step(Ok(new.clone()), due(), None));
        assert_eq!(
            (names, fallback),
            (new.clone(), Some(old.clone())),
            "the old names are requested if the new ones are denied"
        );
        assert_eq!(issue(step(Ok(old.clone()), due(), None)).1, None);
        // An error is returned if there is no certificate, or if it is not due yet.
        assert!(step(Err(unknown()), Some((old.clone(), LEFT)), None).is_err());
        assert!(step(Err(unknown()), None, None).is_err());
        assert_eq!(issue(step(Ok(new.clone()), None, None)).0, new);
    }
}

#[cfg(test)]
mod due_tests {
    use std::time::Duration;

    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn renewal_is_due_at_70_to_90_percent_of_the_remaining_lifetime(
            begin in 0_u64..4_000_000_000, life in 0_u64..1_000_000_000, chance in 0.0_f64..=1.0,
        ) {
            let received = SystemTime::UNIX_EPOCH + Duration::from_secs(begin);
            let life = Duration::from_secs(life);
            let after = due(received, received + life, chance).duration_since(received).unwrap();
            prop_assert!(after >= life.mul_f64(0.699_999) && after <= life.mul_f64(0.900_001), "{after:?} of {life:?}");
        }
    }

    #[test]
    fn an_expired_certificate_is_due_at_once_and_an_invalid_chance_is_the_mean() {
        let now = SystemTime::now();
        assert_eq!(due(now, now - Duration::from_secs(9), 0.5), now);
        let (end, hundred) = (now + Duration::from_secs(100), Duration::from_secs(100));
        for odd in [7.0, -1.0, f64::NAN] {
            assert_eq!(due(now, end, odd), now + hundred.mul_f64(0.8), "{odd}");
        }
    }
}
