//! All that one HTTP/2 connection needs to run, in one task.
//!
//! hyper makes futures of a connection, of each call on it and of what each sends, and at every frame one wakes the next.
//! As tasks they would wake other threads for that, which fetch the task and its bytes to their core; so here they are
//! polled by turns on one thread, and the runtime hears only of what comes from outside.

use std::fmt;
use std::pin::Pin;
use std::sync::atomic::{AtomicBool, Ordering::SeqCst};
use std::sync::{Arc, Mutex};
use std::task::{Context, Poll, Wake, Waker};

use futures_util::FutureExt as _;
use futures_util::stream::{FuturesUnordered, Stream as _};
use futures_util::task::AtomicWaker;

use crate::protocol::lock;

/// Takes the futures of one connection, for the task that runs it. Cheap to clone.
#[derive(Clone, Default)]
pub(super) struct Crew(Arc<Mutex<Vec<Member>>>);

type Member = Pin<Box<dyn Future<Output = ()> + Send>>;

/// Runs a connection and its crew; ends when all have ended. Who was not woken is not polled: a look at a connection on which
/// nothing has happened is a good part of what an idle link costs.
pub(super) struct Run {
    members: FuturesUnordered<Member>,
    arrivals: Crew,
    bell: Arc<Bell>,
    waker: Waker,
}

/// Remembers that something is to be polled, and wakes the task unless it is at it already.
#[derive(Default)]
struct Bell {
    rung: AtomicBool,
    polling: AtomicBool,
    task: AtomicWaker,
}

impl<F> hyper::rt::Executor<F> for Crew
where
    F: Future + Send + 'static,
{
    /// Only while [`Self::run`] polls, or before: nothing wakes it for this.
    fn execute(&self, member: F) {
        lock(&self.0).push(Box::pin(member.map(drop)));
    }
}

impl Crew {
    /// Runs the connection `lead` with all that it executes on this crew.
    pub(super) fn run(self, lead: Member) -> Run {
        let bell = Arc::<Bell>::default();
        let waker = Waker::from(bell.clone());
        Run { members: FuturesUnordered::from_iter([lead]), arrivals: self, bell, waker }
    }
}

impl Run {
    /// Polls all that were woken, once.
    fn round(&mut self) -> Poll<()> {
        let cx = &mut Context::from_waker(&self.waker);
        loop {
            self.members.extend(std::mem::take(&mut *lock(&self.arrivals.0)));
            let next = Pin::new(&mut self.members).poll_next(cx);
            if matches!(next, Poll::Ready(None) | Poll::Pending) && lock(&self.arrivals.0).is_empty() {
                return next.map(drop);
            }
        }
    }
}

impl Future for Run {
    type Output = ();

    fn poll(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<()> {
        let this = self.get_mut();
        this.bell.task.register(cx.waker());
        for _ in 0..ROUNDS {
            this.bell.begin();
            if this.round().is_ready() {
                return Poll::Ready(());
            }
            if !this.bell.has_rung() {
                return Poll::Pending;
            }
        }
        cx.waker().wake_by_ref();
        Poll::Pending
    }
}

impl Bell {
    fn begin(&self) {
        self.polling.store(true, SeqCst);
        self.rung.store(false, SeqCst);
    }

    /// Ends a round: whether there has to be another. Whoever rings after this look sees that nobody polls.
    fn has_rung(&self) -> bool {
        self.polling.store(false, SeqCst);
        self.rung.load(SeqCst)
    }
}

impl Wake for Bell {
    fn wake(self: Arc<Self>) {
        self.wake_by_ref();
    }

    fn wake_by_ref(self: &Arc<Self>) {
        self.rung.store(true, SeqCst);
        if !self.polling.load(SeqCst) {
            self.task.wake();
        }
    }
}

impl fmt::Debug for Crew {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Crew")
    }
}

/// After so many rounds other tasks have their turn: each is a frame or two.
const ROUNDS: usize = 8;

#[cfg(test)]
mod tests {
    use std::sync::atomic::AtomicUsize;

    use hyper::rt::Executor as _;
    use tokio::sync::mpsc;

    use super::*;

    #[derive(Default)]
    struct Woken(AtomicUsize);

    impl Wake for Woken {
        fn wake(self: Arc<Self>) {
            self.0.fetch_add(1, SeqCst);
        }
    }

    /// Takes what comes and sends it on, `left` times.
    async fn pass(mut from: mpsc::Receiver<u32>, to: mpsc::Sender<u32>, left: u32) {
        for _ in 0..left {
            let Some(next) = from.recv().await else { return };
            let _ = to.send(next + 1).await;
        }
    }

    /// A lead and a member that pass a number to and fro, `times` each.
    fn two(times: u32) -> Run {
        let (crew, (one, from_one), (other, from_other)) =
            (Crew::default(), mpsc::channel(1), mpsc::channel(1));
        one.try_send(0).unwrap();
        crew.execute(pass(from_one, other, times));
        crew.run(Box::pin(pass(from_other, one, times)))
    }

    #[test]
    fn a_crew_that_wakes_itself_does_not_wake_its_task() {
        let woken = Arc::<Woken>::default();
        let mut run = two(3);
        assert!(Pin::new(&mut run).poll(&mut Context::from_waker(&woken.clone().into())).is_ready());
        assert_eq!(woken.0.load(SeqCst), 0);
    }

    #[test]
    fn a_lead_is_not_polled_for_what_concerns_a_member_alone() {
        let (crew, (send, receive), (back, mut came)) = (Crew::default(), mpsc::channel(1), mpsc::channel(1));
        crew.execute(pass(receive, back, u32::MAX));
        let polls = Arc::<AtomicUsize>::default();
        let counted = polls.clone();
        let mut run = crew.run(Box::pin(std::future::poll_fn(move |_| {
            counted.fetch_add(1, SeqCst);
            Poll::Pending
        })));
        let mut cx = Context::from_waker(Waker::noop());
        for n in 0..5 {
            send.try_send(n).unwrap();
            assert!(Pin::new(&mut run).poll(&mut cx).is_pending());
            assert_eq!(came.try_recv(), Ok(n + 1));
        }
        assert_eq!(polls.load(SeqCst), 1);
    }

    #[test]
    fn a_crew_that_never_rests_gives_way_and_is_woken_again() {
        let woken = Arc::<Woken>::default();
        let waker = woken.clone().into();
        let (mut run, mut polls) = (two(1000), 1);
        while Pin::new(&mut run).poll(&mut Context::from_waker(&waker)).is_pending() {
            assert_eq!(woken.0.load(SeqCst), polls);
            polls += 1;
        }
        assert!(polls >= 1000 / ROUNDS, "{polls}");
    }

    #[test]
    fn what_a_member_executes_runs_at_once_and_the_lead_may_end_first() {
        let (crew, (done, mut ended)) = (Crew::default(), mpsc::channel(1));
        let inner = crew.clone();
        crew.execute(async move { inner.execute(async move { done.send(7).await }) });
        let mut run = crew.run(Box::pin(std::future::ready(())));
        assert!(Pin::new(&mut run).poll(&mut Context::from_waker(Waker::noop())).is_ready());
        assert_eq!(ended.try_recv(), Ok(7));
    }

    #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
    async fn nothing_that_another_thread_wakes_is_lost() {
        let (crew, (send, receive), (back, mut came)) = (Crew::default(), mpsc::channel(1), mpsc::channel(1));
        crew.execute(pass(receive, back, u32::MAX));
        let drain = crate::drain::Drain::new();
        drain.spawn(tracing::Span::none(), crew.run(Box::pin(std::future::ready(()))));
        for n in 0..20_000 {
            send.send(n).await.unwrap();
            assert_eq!(came.recv().await, Some(n + 1));
        }
    }
}
