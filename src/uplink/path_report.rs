//! Reports to a user that the path of her session is lost and works again, and why the session was interrupted.

use std::time::Duration;

use tokio::time::{Instant, MissedTickBehavior, interval};

use crate::config::RESUME_TIMEOUT;
use crate::uplink::client::UserUplinks;
use tunnel_base::unix_time::in_words;
use tunnel_link::table::handles::SessionMonitor;
use tunnel_net::os::suspended;
use tunnel_proto::frame::ErrorCode;
use tunnel_proto::names::Target;

/// Reports with `print_line` that the path of a session is lost, and that it works again, until the session is over. At
/// its begin, that it may not be without a path for as long as a login should.
pub async fn report_path(path: SessionMonitor, target: Target, print_line: impl Fn(&str)) {
    let limit = in_words(path.resume_timeout().unwrap_or(RESUME_TIMEOUT));
    if path.resume_timeout().is_none() && target.port == 22 {
        print_line(&format!(
            "without a line, this login ends after {limit}: the node of {target}, or a server, cannot keep it for longer"
        ));
    }
    let session = format!("the session to {target}");
    let waits = format!("it waits for up to {limit}");
    report(|| path.lost_since(), || path.is_over(), suspended, [&session, &waits], print_line).await;
}

/// Reports with `print_line` that a program has no link, and that it has one again, until it ends.
pub async fn report_links(links: &UserUplinks, print_line: impl Fn(&str)) {
    let started = Instant::now();
    let texts = ["all sessions", "the line to the servers is dialled again"];
    report(|| links.lost_since(started), || false, suspended, texts, print_line).await;
}

/// Reports losses of a line that carries `what`, with a `note`. `suspended` returns the seconds for which this machine has
/// slept.
async fn report(
    lost_since: impl Fn() -> Option<Instant>,
    is_over: impl Fn() -> bool,
    suspended: impl Fn() -> i64,
    [what, note]: [&str; 2],
    print_line: impl Fn(&str),
) {
    // Since when the path has been lost, and whether that was reported.
    let mut lost = None;
    let mut reported = false;
    // How long the machine slept before the loss, or since, and when it woke. Its clock stood still meanwhile, and a path
    // that was lost in its sleep is noticed only then.
    let mut asleep = Duration::ZERO;
    let mut woke = None;
    let mut suspended_before = suspended();
    let mut checks = interval(CHECK_INTERVAL);
    checks.set_missed_tick_behavior(MissedTickBehavior::Delay);
    loop {
        checks.tick().await;
        if is_over() {
            return;
        }
        let suspended = suspended();
        let slept = suspended - std::mem::replace(&mut suspended_before, suspended);
        // Each of the two clocks is read in whole seconds.
        if slept > 1 {
            asleep += Duration::from_secs(slept.unsigned_abs());
            woke = Some(Instant::now());
        }
        match (lost_since(), lost) {
            // A process that was suspended reads what arrived meanwhile before the next check.
            (Some(since), None) => lost = Some(since),
            (Some(_), Some(since)) if !reported && since.elapsed() >= REPORT_AFTER => {
                print_line(&format!("line lost, resuming {what}; {note}"));
                reported = true;
            }
            (Some(_), Some(_)) => {}
            (None, Some(since)) => {
                if reported || asleep > REPORT_AFTER {
                    print_line(&format!("resumed {what} after {}", in_words(since.elapsed() + asleep)));
                }
                (lost, reported, asleep) = (None, false, Duration::ZERO);
            }
            (None, None) if woke.is_none_or(|woke: Instant| woke.elapsed() >= WAKE_TIME) => {
                asleep = Duration::ZERO
            }
            (None, None) => {}
        }
    }
}

/// Returns why a session was interrupted, for its user; `None` if it ended cleanly.
pub fn interruption(path: &SessionMonitor) -> Option<String> {
    let why = path.ended()?;
    let limit = in_words(path.resume_timeout().unwrap_or(RESUME_TIMEOUT));
    let limit = match why.code {
        ErrorCode::UnknownSession => format!("; without a line it is kept for {limit}"),
        _ => String::new(),
    };
    Some(format!("{}{limit}; see the servers' access logs (session={})", why.reason, path.id()))
}

/// Interval of checks.
const CHECK_INTERVAL: Duration = Duration::from_millis(500);
/// A path that is lost for less is not reported.
const REPORT_AFTER: Duration = Duration::from_secs(3);
/// Time in which a path that was lost in the machine's sleep is noticed.
const WAKE_TIME: Duration = Duration::from_secs(20);

#[cfg(test)]
mod tests {
    use std::sync::Arc;
    use std::sync::atomic::Ordering::Relaxed;
    use std::sync::atomic::{AtomicBool, AtomicI64};

    use parking_lot::Mutex;
    use tokio::task::JoinSet;
    use tokio::time::sleep;

    use super::*;

    #[tokio::test(start_paused = true)]
    async fn a_lost_path_is_reported_after_three_seconds_and_its_return_with_the_time_asleep() {
        let lost = Arc::new(Mutex::new(None));
        let lines = Arc::new(Mutex::new(Vec::new()));
        let over = Arc::new(AtomicBool::new(false));
        let asleep = Arc::new(AtomicI64::new(100));
        let shown = lines.clone();
        let print = move |line: &str| shown.lock().push(line.to_owned());
        let mut reporting = JoinSet::new();
        let read = lost.clone();
        let ended = over.clone();
        let slept = asleep.clone();
        reporting.spawn(async move {
            let texts = ["node1:22", "it waits"];
            report(|| *read.lock(), || ended.load(Relaxed), || slept.load(Relaxed), texts, print).await;
        });
        let lose = |for_seconds: f64| {
            let lost = lost.clone();
            async move {
                *lost.lock() = Some(Instant::now());
                sleep(Duration::from_secs_f64(for_seconds)).await;
                *lost.lock() = None;
                sleep(Duration::from_secs(1)).await;
            }
        };
        let reported = || std::mem::take(&mut *lines.lock());
        sleep(Duration::from_millis(100)).await;
        lose(2.8).await;
        assert!(reported().is_empty());
        *lost.lock() = Some(Instant::now());
        sleep(Duration::from_secs(3)).await;
        assert!(reported().is_empty());
        sleep(Duration::from_millis(600)).await;
        let first = "line lost, resuming node1:22; it waits";
        assert_eq!(reported(), [first]);
        lose(7.0).await;
        // The loss before has not ended in between.
        assert_eq!(reported(), ["resumed node1:22 after 10 s"]);
        // The lid was closed, and the path is found lost a moment after the wake.
        asleep.fetch_add(7 * 3600 + 12 * 60, Relaxed);
        sleep(Duration::from_secs(1)).await;
        lose(1.8).await;
        assert_eq!(reported(), ["resumed node1:22 after 7 h 12 min"]);
        // It slept, and the path was not lost. The next loss, later, has nothing to do with that.
        asleep.fetch_add(300, Relaxed);
        sleep(WAKE_TIME * 2).await;
        lose(1.8).await;
        assert!(reported().is_empty());
        *lost.lock() = Some(Instant::now());
        sleep(Duration::from_secs(4)).await;
        over.store(true, Relaxed);
        *lost.lock() = None;
        assert!(reporting.join_next().await.unwrap().is_ok());
        assert_eq!(reported(), [first], "a session that has ended is not connected again");
    }
}
