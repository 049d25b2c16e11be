//! Graceful shutdown: takes no new work, lets running tasks finish until a deadline, then aborts them.

use std::sync::Arc;
use std::time::Duration;

use futures_util::FutureExt as _;
use parking_lot::Mutex;
use tokio::task::JoinSet;
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;
use tracing::{Instrument, Span};

/// A handle for shutting down this process. Tasks are spawned through it, so none is lost, except hyper's tasks for a
/// link, for channelz or for kube-apiserver, which end with their connection.
///
/// Has three states, in order: running, draining (no new work) and cut (tasks are aborted). Cheap to clone.
#[derive(Debug, Clone, Default)]
pub struct Drain {
    draining: CancellationToken,
    tasks: TaskTracker,
    running: Arc<Mutex<TaskTable>>,
}

/// The tasks that can be aborted. Under their lock, so that a task which is spawned while others are aborted is either
/// one of these, or finds `aborted`.
#[derive(Debug, Default)]
struct TaskTable {
    /// Also has the last tasks that ended.
    tasks: JoinSet<()>,
    /// Whether all tasks were aborted. A later one is aborted at once.
    aborted: bool,
}

/// The result of a drain: whether all tasks finished in time.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Drained {
    /// All tasks finished.
    Finished,
    /// Number of tasks that were still running at the deadline or at the second signal, and were aborted.
    Aborted(usize),
}

impl Drain {
    /// Returns a handle in the running state.
    pub fn new() -> Self {
        Self::default()
    }

    /// Returns a handle for a part of the work, which may start draining before the rest. It also drains with this
    /// handle, which waits for its tasks, and is the one to finish.
    pub fn child(&self) -> Self {
        Self { draining: self.draining.child_token(), ..self.clone() }
    }

    /// Spawns a task that [`Self::finish`] waits for. The task is dropped at its current await point if it is aborted.
    pub fn spawn<F: Future<Output = ()> + Send + 'static>(&self, span: Span, task: F) {
        let drain = self.clone();
        // Boxed, so that the compiler generates tokio's code for tasks once, and not for each kind of task. An async
        // block around the task would hold it twice, and each of thousands of links has three tasks.
        let task = task.boxed().map(move |()| drain.forget_ended());
        let tracked = self.tasks.track_future(task.instrument(span));
        let mut running = self.running.lock();
        let handle = running.tasks.spawn(tracked);
        if running.aborted {
            handle.abort();
        }
    }

    /// Called by each task at its end, so that a set of many ended tasks does not stay until the next one is spawned.
    fn forget_ended(&self) {
        let mut running = self.running.lock();
        while running.tasks.try_join_next().is_some() {}
    }

    /// Starts draining. Further calls have no effect.
    pub fn start(&self) {
        self.draining.cancel();
    }

    /// Returns true if new work is refused.
    pub fn is_draining(&self) -> bool {
        self.draining.is_cancelled()
    }

    /// Waits until draining starts. Cancel safe.
    pub async fn draining(&self) {
        self.draining.cancelled().await;
    }

    /// Runs `work` until draining starts. Returns `None` if that happens first, and drops `work`. Cancel safe if `work`
    /// is.
    pub async fn run_until<F: Future>(&self, work: F) -> Option<F::Output> {
        self.draining.run_until_cancelled(work).await
    }

    /// Like [`Self::draining`], but returns an owned future for code that takes no [`Drain`].
    pub fn started(self) -> impl Future<Output = ()> + Send {
        self.draining.cancelled_owned()
    }

    /// Returns the number of running tasks.
    pub fn tasks(&self) -> usize {
        self.tasks.len()
    }

    /// Starts draining, waits for all tasks, and aborts those left after `deadline` or once `abort_now` completes.
    pub async fn finish(&self, deadline: Duration, abort_now: impl Future<Output = ()>) -> Drained {
        self.finish_after(deadline, abort_now, std::future::ready(())).await
    }

    /// Like [`Self::finish`], but runs `before_abort` before aborting. It passes the reason to the tasks, which may end
    /// on their own until it completes.
    pub async fn finish_after(
        &self,
        deadline: Duration,
        abort_now: impl Future<Output = ()>,
        before_abort: impl Future<Output = ()>,
    ) -> Drained {
        self.start();
        self.tasks.close();
        // Biased, so that a deadline of zero is no abort if all tasks have finished.
        tokio::select! {
            biased;
            () = self.tasks.wait() => Drained::Finished,
            _ = tokio::time::timeout(deadline, abort_now) => {
                let left = self.tasks.len();
                // A task that ends on its own can report the reason that it got; an aborted one is only dropped.
                tokio::select! {
                    biased;
                    () = before_abort => {}
                    () = self.tasks.wait() => {}
                }
                {
                    let mut running = self.running.lock();
                    running.aborted = true;
                    running.tasks.abort_all();
                }
                self.tasks.wait().await;
                Drained::Aborted(left)
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::future::pending;

    use super::*;

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

    #[tokio::test]
    async fn ended_tasks_are_not_kept() {
        let drain = Drain::new();
        for _ in 0..3 {
            for _ in 0..100 {
                drain.spawn(Span::none(), async {});
            }
            while drain.tasks() > 0 {
                tokio::task::yield_now().await;
            }
            // The last one ended after it had removed the others.
            assert_eq!(drain.running.lock().tasks.len(), 1);
        }
    }

    #[tokio::test(start_paused = true)]
    async fn a_task_spawned_after_the_deadline_is_aborted() {
        let drain = Drain::new();
        drain.spawn(Span::none(), pending());
        assert_eq!(drain.finish(Duration::ZERO, pending()).await, Drained::Aborted(1));
        drain.spawn(Span::none(), pending());
        drain.tasks.wait().await;
    }

    #[tokio::test(start_paused = true)]
    async fn a_child_drains_alone_or_with_its_parent_which_waits_for_its_tasks() {
        let drain = Drain::new();
        let [early, late] = [(); 2].map(|()| drain.child());
        for child in [&early, &late] {
            let seen = child.clone();
            child.spawn(Span::none(), async move { seen.draining().await });
        }
        early.start();
        assert!(early.is_draining() && !late.is_draining() && !drain.is_draining());
        late.spawn(Span::none(), pending());
        assert_eq!(drain.finish(Duration::from_secs(4), pending()).await, Drained::Aborted(1));
        assert!(late.is_draining());
    }

    #[tokio::test(start_paused = true)]
    async fn the_deadline_aborts_the_remaining_tasks() {
        let drain = Drain::new();
        drain.spawn(Span::none(), pending());
        assert_eq!(drain.finish(Duration::from_secs(4), pending()).await, Drained::Aborted(1));
    }

    #[tokio::test(start_paused = true)]
    async fn at_the_deadline_tasks_may_still_end_on_their_own_before_the_abort() {
        let (drain, (sender, receiver)) = (Drain::new(), tokio::sync::oneshot::channel());
        let (before, ended) = (tokio::time::Instant::now(), Arc::new(Mutex::new(None)));
        let end = ended.clone();
        drain.spawn(Span::none(), async move { *end.lock() = receiver.await.ok() });
        let before_abort = async {
            sender.send("why").unwrap();
            pending().await
        };
        assert_eq!(
            drain.finish_after(Duration::from_secs(4), pending(), before_abort).await,
            Drained::Aborted(1)
        );
        assert_eq!((*ended.lock(), before.elapsed().as_secs()), (Some("why"), 4));
    }

    #[tokio::test(start_paused = true)]
    async fn a_second_signal_aborts_the_tasks_at_once() {
        let drain = Drain::new();
        drain.spawn(Span::none(), pending());
        let before = tokio::time::Instant::now();
        assert_eq!(drain.finish(Duration::from_secs(4), async {}).await, Drained::Aborted(1));
        assert_eq!(before.elapsed(), Duration::ZERO);
    }
}
