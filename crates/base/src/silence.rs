//! Limits on silence: a transfer may take any time while it makes progress.

use std::future::poll_fn;
use std::pin::pin;
use std::task::Poll;
use std::time::Duration;

use tokio::time::{Instant, sleep};

/// Runs `work` until it completes. Returns `None` if nothing has woken it for `limit`: for a request, no byte has arrived
/// and none could be sent. Work in another task, such as sending a large request there, wakes nothing here. As cancel safe
/// as `work`.
pub async fn unless_silent<T>(limit: Duration, work: impl Future<Output = T>) -> Option<T> {
    let mut work = pin!(work);
    let mut silence = pin!(sleep(limit));
    poll_fn(|cx| {
        if let Poll::Ready(done) = work.as_mut().poll(cx) {
            return Poll::Ready(Some(done));
        }
        if silence.as_mut().poll(cx).is_ready() {
            return Poll::Ready(None);
        }
        silence.as_mut().reset(Instant::now() + limit);
        silence.as_mut().poll(cx).map(|()| None)
    })
    .await
}

#[cfg(test)]
mod tests {
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
}
