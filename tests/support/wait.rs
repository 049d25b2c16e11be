//! Waits for another process by polling until a deadline, without fixed sleeps.

#![expect(clippy::disallowed_types, reason = "other processes live in real time")]

use std::time::{Duration, Instant};

/// Polls until there is an answer, and returns it.
///
/// # Panics
///
/// Panics when the timeout expires, and names what was waited for.
pub(crate) fn wait_for<T>(what: &str, patience: Duration, mut poll: impl FnMut() -> Option<T>) -> T {
    let deadline = Instant::now() + patience;
    loop {
        if let Some(answer) = poll() {
            return answer;
        }
        assert!(Instant::now() < deadline, "not within {patience:?}: {what}");
        std::thread::sleep(BETWEEN);
    }
}

/// Like [`wait_for`], but for a condition.
pub(crate) fn wait_until(what: &str, patience: Duration, mut is: impl FnMut() -> bool) {
    wait_for(what, patience, || is().then_some(()));
}

/// Delay between two polls: short compared to the waits, but long enough to leave two cores to the other process.
const BETWEEN: Duration = Duration::from_millis(10);
