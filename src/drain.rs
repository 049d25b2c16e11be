//! Stopping well: take no new work, let old work finish until a deadline, then cut.

use std::future::Future;
use std::time::Duration;

use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;
use tracing::{Instrument, Span};

/// Handle to the stopping of this process: every task is spawned through it, so none is lost.
///
/// Three states, in order: running, draining (take no new work), cut (end now). Cheap to clone.
#[derive(Debug, Clone, Default)]
pub struct Drain {
    draining: CancellationToken,
    cut: CancellationToken,
    tasks: TaskTracker,
}

/// How a drain ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Drained {
    /// All work was finished.
    Finished,
    /// This many tasks were still at work at the deadline, or at the second signal, and were cut.
    Cut(usize),
}

impl Drain {
    /// A handle in the state running.
    pub fn new() -> Self {
        Self::default()
    }

    /// Runs a task that [`Self::finish`] waits for. It is dropped where it stands once work is cut.
    pub fn spawn<F>(&self, span: Span, task: F)
    where
        F: Future<Output = ()> + Send + 'static,
    {
        let cut = self.cut.clone();
        #[expect(
            clippy::disallowed_methods,
            reason = "the one place that spawns: tracked, with a span, cut at the end"
        )]
        tokio::spawn(
            self.tasks.track_future(
                async move {
                    tokio::select! {
                        biased;
                        () = cut.cancelled() => {}
                        () = task => {}
                    }
                }
                .instrument(span),
            ),
        );
    }

    /// Begins draining. Calling it again changes nothing.
    pub fn begin(&self) {
        self.draining.cancel();
    }

    /// Whether new work is refused.
    pub fn is_draining(&self) -> bool {
        self.draining.is_cancelled()
    }

    /// Waits until draining begins. Cancel safe.
    pub async fn draining(&self) {
        self.draining.cancelled().await;
    }

    /// Number of tasks at work.
    pub fn tasks(&self) -> usize {
        self.tasks.len()
    }

    /// Begins draining, waits for all tasks, and cuts those that are left after `deadline` or once `at_once` completes.
    pub async fn finish(&self, deadline: Duration, at_once: impl Future<Output = ()>) -> Drained {
        self.begin();
        self.tasks.close();
        let patience = async {
            tokio::select! {
                () = tokio::time::sleep(deadline) => {}
                () = at_once => {}
            }
        };
        tokio::select! {
            biased;
            () = self.tasks.wait() => Drained::Finished,
            () = patience => {
                let left = self.tasks.len();
                self.cut.cancel();
                self.tasks.wait().await;
                Drained::Cut(left)
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::future::pending;

    #[tokio::test(start_paused = true)]
    async fn a_drain_waits_for_its_tasks() {
        let drain = Drain::new();
        let seen = drain.clone();
        drain.spawn(Span::none(), async move {
            seen.draining().await;
            tokio::time::sleep(Duration::from_secs(3)).await;
        });
        assert!(!drain.is_draining());
        assert_eq!(drain.finish(Duration::from_secs(4), pending()).await, Drained::Finished);
        assert_eq!(drain.tasks(), 0);
    }

    #[tokio::test(start_paused = true)]
    async fn the_deadline_cuts_what_is_left() {
        let drain = Drain::new();
        drain.spawn(Span::none(), pending());
        assert_eq!(drain.finish(Duration::from_secs(4), pending()).await, Drained::Cut(1));
    }

    #[tokio::test(start_paused = true)]
    async fn a_second_signal_cuts_at_once() {
        let drain = Drain::new();
        drain.spawn(Span::none(), pending());
        let before = tokio::time::Instant::now();
        assert_eq!(drain.finish(Duration::from_secs(4), async {}).await, Drained::Cut(1));
        assert_eq!(before.elapsed(), Duration::ZERO);
    }
}
