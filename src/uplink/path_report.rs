//! Reports to a user that the path of her session is lost and works again, and why the session was interrupted.

use std::time::Duration;

use tokio::time::{Instant, MissedTickBehavior, interval};

use crate::config::RESUME_TIMEOUT;
use crate::uplink::client::UserUplinks;
use tunnel_link::table::handles::SessionMonitor;
use tunnel_proto::names::Target;

/// Reports with `print_line` that the path of a session is lost, and that it works again, until the session is over.
pub async fn report_path(path: SessionMonitor, target: Target, print_line: impl Fn(&str)) {
    let target = target.to_string();
    report(|| path.lost_since(), || path.is_over(), &target, print_line).await;
}

/// Reports with `print_line` that a program has no link, and that it has one again, until it ends.
pub async fn report_links(links: &UserUplinks, print_line: impl Fn(&str)) {
    let started = Instant::now();
    report(|| links.lost_since(started), || false, "the servers", print_line).await;
}

async fn report(
    lost_since: impl Fn() -> Option<Instant>,
    is_over: impl Fn() -> bool,
    target: &str,
    print_line: impl Fn(&str),
) {
    // Since when the path has been lost, and whether that was reported.
    let mut lost = None;
    let mut reported = false;
    let mut checks = interval(CHECK_INTERVAL);
    checks.set_missed_tick_behavior(MissedTickBehavior::Delay);
    loop {
        checks.tick().await;
        if is_over() {
            return;
        }
        match (lost_since(), lost) {
            // A process that was suspended reads what arrived meanwhile before the next check.
            (Some(since), None) => lost = Some(since),
            (Some(_), Some(since)) if !reported && since.elapsed() >= REPORT_AFTER => {
                print_line(&format!(
                    "no connection to {target} for {}; the session waits for up to {RESUME_TIMEOUT:?}",
                    seconds(since)
                ));
                reported = true;
            }
            (Some(_), Some(_)) => {}
            (None, Some(since)) => {
                if reported {
                    print_line(&format!("connected to {target} again, after {}", seconds(since)));
                }
                (lost, reported) = (None, false);
            }
            (None, None) => {}
        }
    }
}

fn seconds(since: Instant) -> String {
    format!("{}s", since.elapsed().as_secs())
}

/// Returns why a session was interrupted, for its user; `None` if it ended cleanly.
pub fn interruption(path: &SessionMonitor) -> Option<String> {
    let why = path.ended()?;
    Some(format!("{}; see the servers' access logs (session={})", why.reason, path.id()))
}

/// Interval of checks.
const CHECK_INTERVAL: Duration = Duration::from_millis(500);
/// A path that is lost for less is not reported.
const REPORT_AFTER: Duration = Duration::from_secs(2);

#[cfg(test)]
mod tests {
    use std::sync::Arc;
    use std::sync::atomic::AtomicBool;
    use std::sync::atomic::Ordering::Relaxed;

    use parking_lot::Mutex;
    use tokio::task::JoinSet;
    use tokio::time::sleep;

    use super::*;

    #[tokio::test(start_paused = true)]
    async fn a_lost_path_is_reported_after_two_seconds_and_its_return_too() {
        let (lost, lines) = (Arc::new(Mutex::new(None)), Arc::new(Mutex::new(Vec::new())));
        let over = Arc::new(AtomicBool::new(false));
        let (shown, read, ended) = (lines.clone(), lost.clone(), over.clone());
        let print = move |line: &str| shown.lock().push(line.to_owned());
        let mut reporting = JoinSet::new();
        reporting
            .spawn(async move { report(|| *read.lock(), || ended.load(Relaxed), "node1:22", print).await });
        let lose = |for_seconds: f64| {
            let lost = lost.clone();
            async move {
                *lost.lock() = Some(Instant::now());
                sleep(Duration::from_secs_f64(for_seconds)).await;
                *lost.lock() = None;
                sleep(Duration::from_secs(1)).await;
            }
        };
        sleep(Duration::from_millis(100)).await;
        lose(1.8).await;
        assert!(lines.lock().is_empty());
        *lost.lock() = Some(Instant::now());
        sleep(Duration::from_secs(2)).await;
        assert!(lines.lock().is_empty());
        sleep(Duration::from_millis(600)).await;
        let first = "no connection to node1:22 for 2s; the session waits for up to 60s";
        assert_eq!(*lines.lock(), [first]);
        lose(7.0).await;
        // The loss before has not ended in between.
        let again = "connected to node1:22 again, after 9s";
        assert_eq!(*lines.lock(), [first, again]);
        *lost.lock() = Some(Instant::now());
        sleep(Duration::from_secs(3)).await;
        over.store(true, Relaxed);
        *lost.lock() = None;
        assert!(reporting.join_next().await.unwrap().is_ok());
        assert_eq!(*lines.lock(), [first, again, first], "a session that has ended is not connected again");
    }
}
