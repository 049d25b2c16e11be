//! What the tests stand on: pods, edges, clients, targets, and peers that follow a script.

#[cfg(feature = "kubernetes")]
pub(crate) mod apiserver;
pub(crate) mod call;
pub(crate) mod clients;
pub(crate) mod line;
pub(crate) mod peer;
pub(crate) mod process;
pub(crate) mod programs;
pub(crate) mod raw;
pub(crate) mod remote;
pub(crate) mod servers;
pub(crate) mod sessions;
pub(crate) mod talk;
pub(crate) mod targets;

use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering::Relaxed};
use std::time::Duration;

use tokio::task::JoinHandle;
use tokio::time::{Instant, sleep};

/// Asks until it is so.
///
/// # Panics
///
/// Once [`PATIENCE`] is over, with what was waited for.
pub(crate) async fn wait_until(what: &str, is: impl FnMut() -> bool) {
    wait_within(TIMEOUT, what, is).await;
}

/// [`wait_until`] with a patience of its own, for what takes its time by design.
pub(crate) async fn wait_within(patience: Duration, what: &str, mut is: impl FnMut() -> bool) {
    let deadline = Instant::now() + patience;
    while !is() {
        assert!(Instant::now() < deadline, "not within {patience:?}: {what}");
        sleep(BETWEEN).await;
    }
}

/// The result, which has to come soon.
///
/// # Panics
///
/// Once [`PATIENCE`] is over, with what was waited for.
pub(crate) async fn assert_eventually<F: Future>(what: &str, work: F) -> F::Output {
    let done = tokio::time::timeout(TIMEOUT, work).await;
    done.unwrap_or_else(|_| panic!("not within {TIMEOUT:?}: {what}"))
}

/// Runs beside the test, until its runtime ends.
#[expect(clippy::disallowed_methods, reason = "the end of a test's runtime ends its tasks")]
pub(crate) fn beside<F>(task: F) -> JoinHandle<F::Output>
where
    F: Future<Output: Send> + Send + 'static,
{
    tokio::spawn(task)
}

/// A clock that goes on only as far as this runtime does: while the machine has no time for it, it stands still. For
/// bounds of what has to come soon. On a runtime of one thread whatever that has to do first stops it as well.
pub(crate) struct Stopwatch(Arc<AtomicU32>);

impl Stopwatch {
    pub(crate) fn start() -> Self {
        let turns = Arc::<AtomicU32>::default();
        let counted = Arc::downgrade(&turns);
        beside(async move {
            while let Some(turns) = counted.upgrade() {
                sleep(TURN).await;
                turns.fetch_add(1, Relaxed);
            }
        });
        Self(turns)
    }

    /// For how long it has run.
    pub(crate) fn elapsed(&self) -> Duration {
        TURN * self.0.load(Relaxed)
    }
}

/// From now on time runs a hundred times faster than it does, and every timer keeps its turn.
///
/// Bare paused time leaps to the next timer whenever the runtime has nothing to do, even if the kernel still carries a
/// segment from one socket to another.
pub(crate) fn hurry() {
    tokio::time::pause();
    beside(async {
        loop {
            sleep(LEAP).await;
            std::thread::sleep(LEAP / 100);
        }
    });
}

/// For whatever should take milliseconds: two busy cores are no failure. Below the grace time after which a session
/// without a path is forgotten in any case.
pub(crate) const TIMEOUT: Duration = Duration::from_secs(45);
/// How far hurried time goes at once.
const LEAP: Duration = Duration::from_millis(10);
/// A step of a [`Stopwatch`].
const TURN: Duration = Duration::from_millis(10);
/// Between two questions.
const BETWEEN: Duration = Duration::from_millis(5);
