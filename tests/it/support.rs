//! Support of the tests: servers, edges, clients, targets, and remotes that follow a script.

pub(crate) mod apiserver;
pub(crate) mod call;
pub(crate) mod clients;
pub(crate) mod line;
pub(crate) mod live;
pub(crate) mod peer;
pub(crate) mod process;
pub(crate) mod programs;
pub(crate) mod raw;
pub(crate) mod remote;
pub(crate) mod servers;
pub(crate) mod sessions;
pub(crate) mod talk;
pub(crate) mod targets;
pub(crate) mod users;

use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering::Relaxed};
use std::time::Duration;

use tokio::task::JoinHandle;
use tokio::time::{Instant, sleep};

/// Polls until the condition is true.
///
/// # Panics
///
/// After [`TIMEOUT`], with what was waited for.
pub(crate) async fn wait_until(what: &str, is: impl FnMut() -> bool) {
    wait_within(TIMEOUT, what, is).await;
}

/// Like [`wait_until`], but with its own timeout, for events that take time by design.
pub(crate) async fn wait_within(patience: Duration, what: &str, mut is: impl FnMut() -> bool) {
    let deadline = Instant::now() + patience;
    while !is() {
        assert!(Instant::now() < deadline, "not within {patience:?}: {what}");
        sleep(BETWEEN).await;
    }
}

/// Returns the result, which must come soon.
///
/// # Panics
///
/// After [`TIMEOUT`], with what was waited for.
pub(crate) async fn assert_eventually<F: Future>(what: &str, work: F) -> F::Output {
    let done = tokio::time::timeout(TIMEOUT, work).await;
    done.unwrap_or_else(|_| panic!("not within {TIMEOUT:?}: {what}"))
}

/// Runs a task next to the test, until the test's runtime ends.
#[expect(clippy::disallowed_methods, reason = "the end of a test's runtime ends its tasks")]
pub(crate) fn spawn<F>(task: F) -> JoinHandle<F::Output>
where
    F: Future<Output: Send> + Send + 'static,
{
    tokio::spawn(task)
}

/// A clock that runs only while this runtime does: it stops while the machine has no time for the runtime. Use it for
/// upper bounds. On a runtime with one thread, other work on that thread stops it as well.
pub(crate) struct Stopwatch(Arc<AtomicU32>);

impl Stopwatch {
    pub(crate) fn start() -> Self {
        let turns = Arc::<AtomicU32>::default();
        let counted = Arc::downgrade(&turns);
        spawn(async move {
            while let Some(turns) = counted.upgrade() {
                sleep(TURN).await;
                turns.fetch_add(1, Relaxed);
            }
        });
        Self(turns)
    }

    /// Returns how long it has run.
    pub(crate) fn elapsed(&self) -> Duration {
        TURN * self.0.load(Relaxed)
    }
}

/// Makes time run a hundred times faster from now on, with all timers in their order.
///
/// Plain paused time jumps to the next timer whenever the runtime is idle, even if the kernel still carries a segment
/// from one socket to another.
pub(crate) fn pause_time() {
    tokio::time::pause();
    spawn(async {
        loop {
            sleep(LEAP).await;
            std::thread::sleep(LEAP / 100);
        }
    });
}

/// Timeout of things that should take milliseconds, long enough for two busy cores. Shorter than the resume timeout
/// after which a session without a path is dropped in any case.
pub(crate) const TIMEOUT: Duration = Duration::from_secs(45);
/// Step of accelerated time.
const LEAP: Duration = Duration::from_millis(10);
/// Step of a [`Stopwatch`].
const TURN: Duration = Duration::from_millis(10);
/// Pause between two polls.
const BETWEEN: Duration = Duration::from_millis(5);
