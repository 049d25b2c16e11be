//! Runs hyper's tasks of a link.

use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::AtomicU8;
use std::sync::atomic::Ordering::SeqCst;
use std::task::{Context, Poll, Wake, Waker};

use futures_util::task::AtomicWaker;
use hyper_util::rt::TokioExecutor;
use pin_project_lite::pin_project;

/// Spawns hyper's tasks. A task that wakes itself is polled again at once.
///
/// For each frame, hyper's task of a call registers its waker, and then reserves room in the stream, which wakes it.
/// tokio would put the task at the end of its queue and start another thread for it: 15 % of the time of an echo.
#[derive(Debug, Clone, Copy)]
pub(crate) struct LinkExecutor;

impl<F> hyper::rt::Executor<F> for LinkExecutor
where
    F: Future<Output: Send> + Send + 'static,
{
    fn execute(&self, task: F) {
        TokioExecutor::new().execute(SelfWaking::new(task));
    }
}

pin_project! {
    /// A task that is polled again at once if it was woken while it was polled. Its waker leads to `wakes`.
    struct SelfWaking<F> {
        #[pin]
        task: F,
        wakes: Arc<TaskWaker>,
        waker: Waker,
    }
}

/// Where the wakes of a task go.
#[derive(Debug, Default)]
struct TaskWaker {
    /// One of [`WAITING`], [`POLLED`] and [`WOKEN`].
    state: AtomicU8,
    runtime: AtomicWaker,
}

/// The task waits: a wake goes to the runtime.
const WAITING: u8 = 0;
/// The task is being polled.
const POLLED: u8 = 1;
/// The task was woken while it was polled.
const WOKEN: u8 = 2;

impl<F> SelfWaking<F> {
    fn new(task: F) -> Self {
        let wakes = Arc::<TaskWaker>::default();
        Self { task, waker: wakes.clone().into(), wakes }
    }
}

impl<F: Future> Future for SelfWaking<F> {
    type Output = F::Output;

    fn poll(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<F::Output> {
        let mut this = self.project();
        this.wakes.runtime.register(cx.waker());
        // Only twice, so that a task that always wakes itself does not starve others.
        for _ in 0..2 {
            this.wakes.state.store(POLLED, SeqCst);
            if let Poll::Ready(output) = this.task.as_mut().poll(&mut Context::from_waker(this.waker)) {
                return Poll::Ready(output);
            }
            if this.wakes.state.swap(WAITING, SeqCst) == POLLED {
                return Poll::Pending;
            }
        }
        cx.waker().wake_by_ref();
        Poll::Pending
    }
}

impl Wake for TaskWaker {
    fn wake(self: Arc<Self>) {
        self.wake_by_ref();
    }

    fn wake_by_ref(self: &Arc<Self>) {
        if self.state.compare_exchange(POLLED, WOKEN, SeqCst, SeqCst) == Err(WAITING) {
            self.runtime.wake();
        }
    }
}

#[cfg(test)]
mod tests {
    use std::future::poll_fn;
    use std::pin::pin;

    use futures_util::task::noop_waker_ref;

    use super::*;

    /// Counts wakes.
    #[derive(Default)]
    struct Runtime(AtomicU8);

    impl Wake for Runtime {
        fn wake(self: Arc<Self>) {
            self.0.fetch_add(1, SeqCst);
        }
    }

    /// Polls a task once that wakes itself in its first `wakes` polls. Returns its polls and the runtime's wakes.
    fn polled(wakes: u8) -> (u8, u8) {
        let (runtime, mut polls) = (Arc::<Runtime>::default(), 0);
        let task = SelfWaking::new(poll_fn(|cx| {
            polls += 1;
            if polls <= wakes {
                cx.waker().wake_by_ref();
            }
            Poll::<()>::Pending
        }));
        assert!(pin!(task).poll(&mut Context::from_waker(&runtime.clone().into())).is_pending());
        (polls, runtime.0.load(SeqCst))
    }

    #[test]
    fn a_task_that_wakes_itself_is_polled_again_without_the_runtime() {
        assert_eq!([polled(0), polled(1)], [(1, 0), (2, 0)]);
    }

    #[test]
    fn a_task_that_always_wakes_itself_lets_others_run() {
        assert_eq!(polled(u8::MAX), (2, 1));
    }

    #[test]
    fn a_wake_from_elsewhere_reaches_the_runtime() {
        let (runtime, mut waker) = (Arc::<Runtime>::default(), None);
        {
            let mut task = pin!(SelfWaking::new(poll_fn(|cx| {
                waker.get_or_insert_with(|| cx.waker().clone());
                Poll::<()>::Pending
            })));
            assert!(task.as_mut().poll(&mut Context::from_waker(noop_waker_ref())).is_pending());
            assert!(task.as_mut().poll(&mut Context::from_waker(&runtime.clone().into())).is_pending());
        }
        waker.unwrap().wake();
        assert_eq!(runtime.0.load(SeqCst), 1);
    }
}
