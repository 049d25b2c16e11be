//! What a keeper does at a look. Pure: what it has found is an argument.

use std::collections::BTreeSet;
use std::time::Duration;

use super::{AFTER_ISSUE, CsrError, LOOK_EVERY};

/// What is to be done.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Step {
    /// Nothing, until then.
    Rest(Duration),
    /// A certificate with these names is asked for.
    Issue(Issue),
}

/// Which one is asked for.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Issue {
    /// Its names.
    pub(super) names: BTreeSet<String>,
    /// Others, if those are refused: a name that nobody may have must not end what there is.
    pub(super) or: Option<BTreeSet<String>>,
    /// How long to rest once it is there.
    pub(super) rest: Duration,
    /// Why: a clause.
    pub(super) why: &'static str,
}

/// `wanted`: the names that it should have. `held`: the names of the one that there is, and how long until the next is due
/// (`None`: it is). `asked`: the names that were asked for last.
///
/// # Errors
///
/// The names are not known, and what there is does without.
pub(super) fn step(
    wanted: Result<BTreeSet<String>, CsrError>,
    held: Option<(BTreeSet<String>, Option<Duration>)>,
    asked: Option<&BTreeSet<String>>,
) -> Result<Step, CsrError> {
    let (names, or, rest, why) = match (held, wanted) {
        (None, wanted) => (wanted?, None, AFTER_ISSUE, "there is none"),
        (Some((held, Some(left))), wanted) => {
            let wanted = wanted?;
            if wanted.is_subset(&held) || asked == Some(&wanted) {
                return Ok(Step::Rest(left.min(LOOK_EVERY)));
            }
            // Whoever can change a name could have it issued without end.
            (wanted, None, LOOK_EVERY, "a name or an address is new")
        }
        (Some((held, None)), Ok(wanted)) => {
            let or = (held != wanted).then_some(held);
            (wanted, or, AFTER_ISSUE, "the old one is to be renewed")
        }
        (Some((held, None)), Err(_)) => (
            held,
            None,
            AFTER_ISSUE,
            "the old one is to be renewed, with its names, as those it should have are not known",
        ),
    };
    Ok(Step::Issue(Issue { names, or, rest, why }))
}

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

    fn issue(step: Result<Step, CsrError>) -> (BTreeSet<String>, Option<BTreeSet<String>>, Duration) {
        match step.unwrap() {
            Step::Issue(Issue { names, or, rest, .. }) => (names, or, rest),
            rest @ Step::Rest(_) => panic!("{rest:?}"),
        }
    }

    #[test]
    fn new_names_are_asked_for_once_a_minute_at_most() {
        let (old, new) = (set(&["a", "b"]), set(&["a", "c"]));
        let held = || Some((old.clone(), LEFT));
        assert_eq!(step(Ok(set(&["a"])), held(), None).unwrap(), Step::Rest(Duration::from_secs(5)));
        let (names, or, rest) = issue(step(Ok(new.clone()), held(), None));
        assert_eq!((names, or), (new.clone(), None));
        assert!(rest >= Duration::from_secs(60), "{rest:?}");
        // What its signer leaves out is not asked for again.
        assert_eq!(step(Ok(new.clone()), held(), Some(&new)).unwrap(), Step::Rest(Duration::from_secs(5)));
    }

    #[test]
    fn what_is_due_is_renewed_whatever_becomes_of_its_names() {
        let (old, new) = (set(&["a", "b"]), set(&["a", "c"]));
        let due = || Some((old.clone(), None));
        assert_eq!(issue(step(Err(unknown()), due(), None)).0, old);
        let (names, or, _) = issue(step(Ok(new.clone()), due(), None));
        assert_eq!((names, or), (new.clone(), Some(old.clone())), "the old names if the new are refused");
        assert_eq!(issue(step(Ok(old.clone()), due(), None)).1, None);
        // Until it is due, and where there is none, an operator is told.
        assert!(step(Err(unknown()), Some((old.clone(), LEFT)), None).is_err());
        assert!(step(Err(unknown()), None, None).is_err());
        assert_eq!(issue(step(Ok(new.clone()), None, None)).0, new);
    }
}
