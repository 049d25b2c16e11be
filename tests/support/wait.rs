//! Waiting for what another process does: asked again and again until a deadline, never slept for.

#![expect(clippy::disallowed_types, reason = "other processes live in real time")]

use std::time::{Duration, Instant};

/// Asks until there is an answer, and returns it.
///
/// # Panics
///
/// Once the patience is over, with what was waited for.
pub(crate) fn wait_for<T>(what: &str, patience: Duration, mut ask: impl FnMut() -> Option<T>) -> T {
    let deadline = Instant::now() + patience;
    loop {
        if let Some(answer) = ask() {
            return answer;
        }
        assert!(Instant::now() < deadline, "not within {patience:?}: {what}");
        std::thread::sleep(BETWEEN);
    }
}

/// [`wait_for`] a condition.
pub(crate) fn wait_until(what: &str, patience: Duration, mut is: impl FnMut() -> bool) {
    wait_for(what, patience, || is().then_some(()));
}

/// Between two questions: short against what is waited for, long enough to leave two cores to the answerer.
const BETWEEN: Duration = Duration::from_millis(10);
