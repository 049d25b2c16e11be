//! Limits on silence: a transfer may take any time while it makes progress.

use std::future::poll_fn;
use std::pin::pin;
use std::sync::atomic::AtomicBool;
use std::sync::atomic::Ordering::Relaxed;
use std::task::Poll;
use std::time::Duration;

use futures_util::Stream as _;
use futures_util::stream::FuturesUnordered;
use tokio::time::{Instant, sleep};

/// Runs `work` until it completes. Returns `None` if nothing has woken it for `limit`: for a request, no byte has arrived
/// and none could be sent. Work in another task, such as sending a large request there, wakes nothing here. As cancel safe
/// as `work`.
pub async fn unless_silent<T>(limit: Duration, work: impl Future<Output = T>) -> Option<T> {
    let is_woken = AtomicBool::new(false);
    let mut work = pin!(work);
    let work = poll_fn(|cx| {
        is_woken.store(true, Relaxed);
        work.as_mut().poll(cx)
    });
    // It polls the work only if that was woken itself, and not with all else of its task.
    let mut work = pin!(FuturesUnordered::from_iter([work]));
    let mut silence = pin!(sleep(limit));
    poll_fn(|cx| {
        if let done @ Poll::Ready(_) = work.as_mut().poll_next(cx) {
            return done;
        }
        if is_woken.swap(false, Relaxed) {
            silence.as_mut().reset(Instant::now() + limit);
        }
        silence.as_mut().poll(cx).map(|()| None)
    })
    .await
}

#[cfg(test)]
mod tests {
    use std::future::pending;

    use super::*;

    #[tokio::test(start_paused = true)]
    async fn progress_extends_the_time_and_silence_ends_it() {
        let limit = Duration::from_secs(10);
        let started = Instant::now();
        let slow = async {
            for _ in 0..5 {
                sleep(limit - Duration::from_secs(1)).await;
            }
        };
        assert_eq!(unless_silent(limit, slow).await, Some(()));
        assert_eq!(started.elapsed().as_secs(), 45);
        assert_eq!(unless_silent(limit, sleep(limit * 2)).await, None);
        assert_eq!(started.elapsed().as_secs(), 55);
    }

    #[tokio::test(start_paused = true)]
    async fn what_wakes_only_the_rest_of_the_task_is_no_progress() {
        let limit = Duration::from_secs(10);
        let busy = async {
            loop {
                sleep(Duration::from_secs(1)).await;
            }
        };
        let silent = async { tokio::time::timeout(limit * 2, unless_silent(limit, pending::<()>())).await };
        let ended = tokio::select! {
            ended = silent => ended,
            () = busy => unreachable!(),
        };
        assert_eq!(ended, Ok(None));
    }
}
