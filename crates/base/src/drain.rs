//! Stopping well: take no new work, let old work finish until a deadline, then cut.

use std::collections::HashMap;
use std::future::Future;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use futures_util::FutureExt as _;
use tokio::task::AbortHandle;
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;
use tracing::{Instrument, Span};

/// Handle to the stopping of this process: every task is spawned through it, so none is lost.
///
/// Three states, in order: running, draining (take no new work), cut (end now). Cheap to clone.
#[derive(Debug, Clone, Default)]
pub struct Drain {
    draining: CancellationToken,
    tasks: TaskTracker,
    running: Arc<Mutex<Running>>,
}

/// The tasks that can be cut. They are kept aside, so that a task at work never looks whether it is to be cut.
///
/// A task may be spawned while [`Drain::finish`] cuts on another thread, and it may end before its handle is known. The
/// lock orders the three: a task is entered without a handle before it is spawned; it removes its entry when it ends;
/// the spawner adds the handle only if the entry is still there, and then looks whether the cut has come. Either the
/// cutter finds the handle in the table, or the spawner finds `cut` set and aborts the task itself. Both may happen,
/// and a task may be aborted twice.
#[derive(Debug, Default)]
struct Running {
    next: u64,
    /// The handle is missing while the task is being spawned.
    tasks: HashMap<u64, Option<AbortHandle>>,
    /// All tasks were cut: a task that is being spawned just now is aborted by its spawner.
    cut: bool,
}

/// How a drain ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Drained {
    /// All work was finished.
    Finished,
    /// This many tasks were still at work at the deadline, or at the second signal, and were cut.
    Cut(usize),
}

/// hyper's tasks, spawned where they are waited for.
impl<F> hyper::rt::Executor<F> for Drain
where
    F: Future<Output: Send> + Send + 'static,
{
    fn execute(&self, task: F) {
        self.spawn(Span::current(), task.map(drop));
    }
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
        let done = self.enter();
        let id = done.id;
        // Not an async block around the task: that would hold it twice, and thousands of links have three tasks each.
        let tracked = self.tasks.track_future(task.map(move |()| drop(done)).instrument(span));
        #[expect(
            clippy::disallowed_methods,
            reason = "the one place that spawns: tracked, with a span, cut at the end"
        )]
        let handle = tokio::spawn(tracked);
        self.spawned(id, &handle.abort_handle());
    }

    /// Notes a task that is about to be spawned.
    fn enter(&self) -> Done {
        let mut running = self.running();
        running.next += 1;
        let id = running.next;
        running.tasks.insert(id, None);
        Done { drain: self.clone(), id }
    }

    /// Notes how a task that is spawned can be cut; it may have ended since.
    fn spawned(&self, id: u64, handle: &AbortHandle) {
        let cut = {
            let mut running = self.running();
            // A task that has ended already has removed its entry, and needs no handle.
            if let Some(task) = running.tasks.get_mut(&id) {
                *task = Some(handle.clone());
            }
            running.cut
        };
        if cut {
            handle.abort();
        }
    }

    /// Begins draining. Calling it again changes nothing.
    pub fn start(&self) {
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

    /// As [`Self::draining`], as a future of its own for code that takes no [`Drain`].
    pub fn started(self) -> impl Future<Output = ()> + Send {
        self.draining.cancelled_owned()
    }

    fn running(&self) -> MutexGuard<'_, Running> {
        self.running.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Number of tasks at work.
    pub fn tasks(&self) -> usize {
        self.tasks.len()
    }

    /// Begins draining, waits for all tasks, and cuts those that are left after `deadline` or once `at_once` completes.
    pub async fn finish(&self, deadline: Duration, at_once: impl Future<Output = ()>) -> Drained {
        self.finish_after(deadline, at_once, std::future::ready(())).await
    }

    /// As [`Self::finish`], but runs `before_cut` first: it gives the tasks the cause, so that they may end by
    /// themselves until it completes.
    pub async fn finish_after(
        &self,
        deadline: Duration,
        at_once: impl Future<Output = ()>,
        before_cut: impl Future<Output = ()>,
    ) -> Drained {
        self.start();
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
                tokio::select! {
                    biased;
                    () = before_cut => {}
                    () = self.tasks.wait() => {}
                }
                let tasks: Vec<_> = {
                    let mut running = self.running();
                    running.cut = true;
                    running.tasks.values().flatten().cloned().collect()
                };
                for task in tasks {
                    task.abort();
                }
                self.tasks.wait().await;
                Drained::Cut(left)
            }
        }
    }
}

/// Strikes a task off the list, however it ends.
#[derive(Debug)]
struct Done {
    drain: Drain,
    id: u64,
}

impl Drop for Done {
    fn drop(&mut self) {
        let mut running = self.drain.running();
        running.tasks.remove(&self.id);
        tunnel_pages::shrink(&mut running.tasks);
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
        assert_eq!((drain.tasks(), drain.running().tasks.len()), (0, 0));
    }

    #[tokio::test]
    async fn nothing_is_kept_of_tasks_that_end_while_they_are_spawned() {
        let (drain, spawned) = (Drain::new(), tokio::task::JoinSet::new().spawn(async {}));
        let done = drain.enter();
        let id = done.id;
        assert_eq!(drain.running().tasks.len(), 1);
        drop(done);
        drain.spawned(id, &spawned);
        assert_eq!(drain.running().tasks.len(), 0);
    }

    #[tokio::test(start_paused = true)]
    async fn what_is_spawned_after_the_cut_is_cut_too() {
        let drain = Drain::new();
        drain.spawn(Span::none(), pending());
        assert_eq!(drain.finish(Duration::ZERO, pending()).await, Drained::Cut(1));
        drain.spawn(Span::none(), pending());
        drain.tasks.wait().await;
    }

    #[tokio::test(start_paused = true)]
    async fn the_deadline_cuts_what_is_left() {
        let drain = Drain::new();
        drain.spawn(Span::none(), pending());
        assert_eq!(drain.finish(Duration::from_secs(4), pending()).await, Drained::Cut(1));
    }

    #[tokio::test(start_paused = true)]
    async fn what_is_cut_may_end_by_itself_once_it_is_told_why() {
        let (drain, (tell, told)) = (Drain::new(), tokio::sync::oneshot::channel());
        let (before, ended) = (tokio::time::Instant::now(), Arc::new(Mutex::new(None)));
        let end = ended.clone();
        drain.spawn(Span::none(), async move { *end.lock().unwrap() = told.await.ok() });
        let before_cut = async {
            tell.send("why").unwrap();
            pending().await
        };
        assert_eq!(drain.finish_after(Duration::from_secs(4), pending(), before_cut).await, Drained::Cut(1));
        assert_eq!((*ended.lock().unwrap(), before.elapsed().as_secs()), (Some("why"), 4));
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
