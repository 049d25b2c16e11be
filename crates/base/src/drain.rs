//! Graceful shutdown: takes no new work, lets running tasks finish until a deadline, then aborts them.

use std::collections::HashMap;
use std::future::Future;
use std::sync::Arc;
use std::time::Duration;

use futures_util::FutureExt as _;
use parking_lot::Mutex;
use tokio::task::AbortHandle;
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

/// The tasks that can be aborted. Their handles are kept here, so that a running task never has to check for the abort.
///
/// A task may be spawned while [`Drain::finish`] aborts tasks on another thread, and it may end before its handle is
/// known. The lock orders the three steps. A task is entered without a handle before it is spawned, and removes its
/// entry when it ends. The spawner adds the handle only if the entry still exists, and then checks `aborted`. Either
/// [`Drain::finish`] finds the handle in the table, or the spawner finds `aborted` set and aborts the task itself. Both
/// may happen, so a task may be aborted twice.
#[derive(Debug, Default)]
struct TaskTable {
    next: u64,
    /// `None` while the task is being spawned.
    tasks: HashMap<u64, Option<AbortHandle>>,
    /// Whether all tasks were aborted. A task that is being spawned meanwhile is aborted by its spawner.
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
        let done = self.enter();
        let id = done.id;
        // Boxed, so that the compiler generates tokio's code for tasks once, and not for each kind of task. An async
        // block around the task would hold it twice, and each of thousands of links has three tasks.
        let task = task.boxed().map(move |()| drop(done));
        let tracked = self.tasks.track_future(task.instrument(span));
        #[expect(
            clippy::disallowed_methods,
            reason = "the one place that spawns: tracked, with a span, aborted at the end"
        )]
        let handle = tokio::spawn(tracked);
        self.spawned(id, &handle.abort_handle());
    }

    /// Registers a task that is about to be spawned.
    fn enter(&self) -> TaskEntryGuard {
        let mut running = self.running.lock();
        running.next += 1;
        let id = running.next;
        running.tasks.insert(id, None);
        TaskEntryGuard { drain: self.clone(), id }
    }

    /// Registers the abort handle of a spawned task, which may have ended since.
    fn spawned(&self, id: u64, handle: &AbortHandle) {
        let aborted = {
            let mut running = self.running.lock();
            // A task that has already ended has removed its entry and needs no handle.
            if let Some(task) = running.tasks.get_mut(&id) {
                *task = Some(handle.clone());
            }
            running.aborted
        };
        if aborted {
            handle.abort();
        }
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
                // One lock for the flag and the handles: a task that is just being spawned is in the list, or finds the
                // flag.
                let tasks: Vec<_> = {
                    let mut running = self.running.lock();
                    running.aborted = true;
                    running.tasks.values().flatten().cloned().collect()
                };
                for task in tasks {
                    task.abort();
                }
                self.tasks.wait().await;
                Drained::Aborted(left)
            }
        }
    }
}

/// A guard that removes a task's entry when the task ends or is dropped.
#[derive(Debug)]
struct TaskEntryGuard {
    drain: Drain,
    id: u64,
}

impl Drop for TaskEntryGuard {
    fn drop(&mut self) {
        self.drain.running.lock().tasks.remove(&self.id);
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
        assert_eq!((drain.tasks(), drain.running.lock().tasks.len()), (0, 0));
    }

    #[tokio::test]
    async fn a_task_that_ends_while_it_is_spawned_leaves_no_entry() {
        let (drain, spawned) = (Drain::new(), tokio::task::JoinSet::new().spawn(async {}));
        let done = drain.enter();
        let id = done.id;
        assert_eq!(drain.running.lock().tasks.len(), 1);
        drop(done);
        drain.spawned(id, &spawned);
        assert_eq!(drain.running.lock().tasks.len(), 0);
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
