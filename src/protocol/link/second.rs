//! A second link beside one that has fallen silent: the one that answers first carries the sessions on.

use std::fmt;
use std::time::Duration;

use tokio::time::{Instant, sleep_until};
use tracing::{info, warn};

use crate::protocol::link::sender::LinkSender;
use crate::protocol::wire::hello::Dialect;
use crate::telemetry::Metrics;

/// When a second link may be dialled, for whoever dials links to one place. There is at most one at a time.
#[derive(Debug)]
pub struct SecondLink {
    metrics: Metrics,
    /// Dialled in vain since one was of use, and when the last of them was.
    vain: u32,
    last: Option<Instant>,
    /// No other one is dialled until then.
    next: Instant,
}

impl SecondLink {
    /// None was dialled yet.
    pub fn new(metrics: Metrics) -> Self {
        Self { metrics, vain: 0, last: None, next: Instant::now() }
    }

    /// Waits until a link that was dialled here falls silent, and has another one dialled beside it. Returns that one if
    /// it is there before the silent link answers; otherwise the dial is dropped, and behind a pause that doubles with
    /// each dial that was of no use, all begins anew. Never returns if the far end would close the older link for the
    /// newer one. Cancel safe, if `dial` is.
    pub async fn beside<T, E, F>(&mut self, link: &LinkSender, dial: impl Fn() -> F) -> T
    where
        F: Future<Output = Result<T, E>>,
        E: fmt::Display,
    {
        if !link.dialect.has(Dialect::BESIDE) {
            std::future::pending::<()>().await;
        }
        loop {
            sleep_until(self.next).await;
            link.falls_silent().await;
            self.begins(link);
            let made = tokio::select! {
                biased;
                () = link.answers() => {
                    info!(link = %link.id, "the link answers again: the second one is not needed");
                    self.was_vain("lost", AFTER_LOST);
                    continue;
                }
                made = dial() => made,
            };
            match made {
                Ok(made) => {
                    info!(link = %link.id, "the second link answers first: sessions go on there, and the silent one is closed");
                    self.metrics.second_links.count("won");
                    self.vain = 0;
                    return made;
                }
                Err(why) => {
                    warn!(link = %link.id, error = %format_args!("{why:#}"), "a second link could not be made");
                    self.was_vain("failed", AFTER_FAILED);
                }
            }
        }
    }

    fn begins(&mut self, link: &LinkSender) {
        let now = Instant::now();
        if self.last.replace(now).is_some_and(|last| now - last >= FORGOTTEN) {
            self.vain = 0;
        }
        let (unanswered, round_trip) = (link.unanswered().unwrap_or_default(), link.round_trip());
        warn!(
            link = %link.id, ?unanswered, ?round_trip,
            "the link has fallen silent: a second one is dialled beside it, and whichever answers first is kept"
        );
        self.metrics.second_links.count("dialled");
    }

    fn was_vain(&mut self, outcome: &'static str, pause: Duration) {
        self.metrics.second_links.count(outcome);
        self.next = Instant::now() + pause.saturating_mul(1 << self.vain.min(10)).min(LONGEST_PAUSE);
        self.vain += 1;
    }
}

/// Behind the first one that was not needed, or could not be made; doubled with each further one in vain, so that a slow
/// line is not burdened with handshakes for ever.
const AFTER_LOST: Duration = Duration::from_secs(5);
const AFTER_FAILED: Duration = Duration::from_millis(500);
const LONGEST_PAUSE: Duration = Duration::from_secs(300);
/// After so long without one the pauses begin anew.
const FORGOTTEN: Duration = Duration::from_secs(600);

#[cfg(test)]
mod tests {
    use std::sync::Arc;
    use std::sync::atomic::{AtomicU32, Ordering::Relaxed};
    use std::task::{Context, Poll, Waker};

    use super::*;
    use crate::names::NodeName;
    use crate::protocol::link::source::LinkId;
    use crate::protocol::wire::frame::FrameKind;
    use crate::protocol::wire::peer::Peer;

    /// A link that has asked its far end, and the number of that ping.
    fn asked() -> (Arc<LinkSender>, u64) {
        let link = LinkSender::new(LinkId(1), Peer::Cloud(NodeName::none()), None, Dialect::NEWEST);
        link.probe();
        let pulled = link.poll_pull(&mut Context::from_waker(Waker::noop()), Instant::now());
        let Poll::Ready(Some(frame)) = pulled else { panic!("no ping") };
        let FrameKind::Ping(Some(number)) = frame.body else { panic!("{frame:?}") };
        (link, number)
    }

    /// How many second links are dialled within ten seconds beside a link whose process stands still for that long, if
    /// the answer is read `after` it goes on.
    async fn dialled(after: Option<Duration>) -> u32 {
        let (link, ping) = asked();
        let dials = AtomicU32::new(0);
        let mut second = SecondLink::new(Metrics::edge());
        let dial = || async {
            dials.fetch_add(1, Relaxed);
            std::future::pending::<Result<(), &str>>().await
        };
        let reader = async {
            tokio::time::advance(Duration::from_secs(10)).await;
            link.fell_silent();
            if let Some(after) = after {
                tokio::time::sleep(after).await;
                link.ponged(ping, Instant::now());
            }
            tokio::time::sleep(Duration::from_secs(1)).await;
        };
        tokio::select! {
            () = second.beside(&link, dial) => {}
            () = reader => {}
        }
        dials.load(Relaxed)
    }

    #[tokio::test(start_paused = true)]
    async fn a_process_that_stood_still_reads_what_came_before_it_dials_a_second_link() {
        assert_eq!(dialled(Some(Duration::from_millis(1))).await, 0);
        assert_eq!(dialled(None).await, 1);
    }
}
