//! A backup link next to an unresponsive one: the link that answers first continues to carry the sessions.

use std::fmt;
use std::time::Duration;

use tokio::time::{Instant, sleep_until};
use tracing::{info, warn};

use crate::link::Link;
use tunnel_base::metrics::Metrics;

/// Decides when a backup link may be dialled to one place. There is at most one at a time.
#[derive(Debug)]
pub struct BackupDialer {
    metrics: Metrics,
    /// Number of dials in a row that failed, or only replaced a link that never answered.
    failures: u32,
    /// No backup link is dialled before this time.
    next: Instant,
}

impl BackupDialer {
    /// Creates the state without any backup link so far.
    pub fn new(metrics: Metrics) -> Self {
        Self { metrics, failures: 0, next: Instant::now() }
    }

    /// Waits until a link that was dialled here is unresponsive, and dials a backup link.
    ///
    /// Returns the backup link if it is ready before the unresponsive link answers. Otherwise the dial is dropped and
    /// the wait starts again after a pause, which doubles with each failed dial. After an unneeded dial it does not,
    /// because the link's timeout grows with the silence that was a false alarm. Never returns for a remote that
    /// answers no pings.
    ///
    /// # Cancel safety
    ///
    /// Cancel safe if `dial` is.
    pub async fn race<T, E, F>(&mut self, link: &Link, dial: impl Fn() -> F) -> T
    where
        F: Future<Output = Result<T, E>>,
        E: fmt::Display,
    {
        loop {
            sleep_until(self.next).await;
            link.wait_unresponsive().await;
            let unanswered = link.unanswered().unwrap_or_default();
            let round_trip = link.round_trip();
            warn!(link = %link.id, ?unanswered, rtt = ?round_trip, "link unresponsive, dialling backup link");
            let made = tokio::select! {
                biased;
                () = link.wait_responsive() => {
                    info!(link = %link.id, "link responsive again, backup link not needed");
                    self.metrics.backup_links.count("unneeded");
                    (self.failures, self.next) = (0, Instant::now() + AFTER_UNNEEDED);
                    continue;
                }
                made = dial() => made,
            };
            match made {
                Ok(made) => {
                    info!(link = %link.id, "unresponsive link replaced by backup link");
                    self.metrics.backup_links.count("used");
                    if link.min_rtt().is_some() {
                        (self.failures, self.next) = (0, Instant::now());
                    } else {
                        // It never worked, and neither may its replacement.
                        self.put_off();
                    }
                    return made;
                }
                Err(why) => {
                    warn!(link = %link.id, error = %format_args!("{why:#}"), "cannot establish backup link");
                    self.metrics.backup_links.count("failed");
                    self.put_off();
                }
            }
        }
    }

    /// Delays the next backup link, longer each time.
    fn put_off(&mut self) {
        self.next = Instant::now() + (AFTER_FAILED * (1 << self.failures.min(10))).min(MAX_PAUSE);
        self.failures += 1;
    }
}

/// Pause after a backup link that was not needed.
const AFTER_UNNEEDED: Duration = Duration::from_secs(5);
/// Pause after a backup link that could not be established, or replaced one that never answered. It doubles with each
/// further one.
const AFTER_FAILED: Duration = Duration::from_millis(500);
const MAX_PAUSE: Duration = Duration::from_secs(30);

#[cfg(test)]
mod tests {
    use std::sync::Arc;
    use std::sync::atomic::AtomicU32;
    use std::sync::atomic::Ordering::Relaxed;
    use std::task::{Context, Poll, Waker};

    use crate::liveness::DEAD;
    use tunnel_proto::frame::{FrameKind, Remote};
    use tunnel_proto::names::{Instance, NodeName};
    use tunnel_proto::state::LinkId;

    use super::*;

    /// Returns a link that has pinged its remote, and the number of that ping.
    fn pinged() -> (Arc<Link>, u64) {
        let link = Link::new(LinkId(1), Remote::Server(NodeName::none()), Some(Instance::random()));
        let number = ping(&link);
        (link, number)
    }

    /// Pings a link's remote. Returns the number of the ping.
    fn ping(link: &Link) -> u64 {
        link.probe();
        let pulled = link.poll_pull(&mut Context::from_waker(Waker::noop()), Instant::now());
        let Poll::Ready(Some(frame)) = pulled else { panic!("no ping") };
        let FrameKind::Ping(Some(number)) = frame.body else { panic!("{frame:?}") };
        number
    }

    #[tokio::test(start_paused = true)]
    async fn false_alarms_make_a_link_patient_and_a_real_death_is_still_noticed() {
        let (link, first) = pinged();
        link.handle_pong(first, Instant::now());
        let (dials, mut backup) = (AtomicU32::new(0), BackupDialer::new(Metrics::edge()));
        let dial = || async {
            dials.fetch_add(1, Relaxed);
            std::future::pending::<Result<(), &str>>().await
        };
        let pings = async {
            let mut silences = Vec::new();
            for alarm in 1..=12 {
                for _ in 0..60 {
                    let ping = ping(&link);
                    tokio::time::sleep(Duration::from_millis(100)).await;
                    link.handle_pong(ping, Instant::now());
                }
                link.mark_active(Instant::now());
                let (ping, since) = (ping(&link), Instant::now());
                while dials.load(Relaxed) < alarm && since.elapsed() < DEAD {
                    link.wake_unresponsive();
                    tokio::time::sleep(Duration::from_millis(10)).await;
                }
                silences.push(since.elapsed().as_millis());
                link.handle_pong(ping, Instant::now());
            }
            silences
        };
        let silences = tokio::select! {
            () = backup.race(&link, dial) => panic!("the link answered each time"),
            silences = pings => silences,
        };
        assert!(silences[0] < 1600, "{silences:?}");
        assert!(silences.windows(2).all(|two| two[0] <= two[1] + 20), "{silences:?}");
        assert!(silences[11] >= 9_900 && silences[11] < 10_200, "{silences:?}");
    }

    /// Returns the number of backup links dialled within ten seconds, next to a link of a process suspended for that
    /// time. The answer is read `after` the process continues.
    async fn dialled(after: Option<Duration>) -> u32 {
        let (link, ping) = pinged();
        let dials = AtomicU32::new(0);
        let mut backup = BackupDialer::new(Metrics::edge());
        let dial = || async {
            dials.fetch_add(1, Relaxed);
            std::future::pending::<Result<(), &str>>().await
        };
        let reader = async {
            tokio::time::advance(Duration::from_secs(10)).await;
            link.wake_unresponsive();
            if let Some(after) = after {
                tokio::time::sleep(after).await;
                link.handle_pong(ping, Instant::now());
            }
            tokio::time::sleep(Duration::from_secs(1)).await;
        };
        tokio::select! {
            () = backup.race(&link, dial) => {}
            () = reader => {}
        }
        dials.load(Relaxed)
    }

    #[tokio::test(start_paused = true)]
    async fn a_process_that_stood_still_reads_what_came_before_it_dials_a_backup_link() {
        assert_eq!(dialled(Some(Duration::from_millis(1))).await, 0);
        assert_eq!(dialled(None).await, 1);
    }
}
