//! Reports to a user that the path of her session is lost and works again, and why the session was interrupted.

use std::sync::Arc;
use std::time::Duration;

use tokio::time::{Instant, MissedTickBehavior, interval};

use crate::config::RESUME_TIMEOUT;
use crate::paths::uplinks::{LinkFailure, Uplinks};
use crate::uplink::client::UserUplinks;
use tunnel_base::unix_time::in_words;
use tunnel_link::table::handles::SessionMonitor;
use tunnel_net::os::suspended;
use tunnel_proto::frame::{ErrorCode, SessionError};
use tunnel_proto::names::Target;

/// How long a line is lost.
#[derive(Debug, Clone, Copy, Default)]
struct Outage {
    /// Since when the path has been lost.
    lost: Option<Instant>,
    /// How long the machine slept before the loss, or since. Its clock stood still meanwhile, and a path that was lost in
    /// its sleep is noticed only then.
    asleep: Duration,
    /// The seconds for which the machine had slept at the last check.
    suspended: Option<i64>,
}

impl Outage {
    /// Adds the time for which the machine has slept since the last check. Returns false if it has not.
    fn add_sleep(&mut self, suspended: i64) -> bool {
        let slept = suspended - self.suspended.replace(suspended).unwrap_or(suspended);
        // Each of the two clocks is read in whole seconds.
        let slept = if slept > 1 { slept.unsigned_abs() } else { 0 };
        self.asleep += Duration::from_secs(slept);
        slept > 0
    }

    fn lasted(&self) -> Duration {
        self.lost.map_or(Duration::ZERO, |since| since.elapsed()) + self.asleep
    }
}

/// Prints a line on the terminal.
pub(crate) type PrintLine = Arc<dyn Fn(&str) + Send + Sync>;

/// Reports to a user what happens to the line of one of her sessions.
pub(crate) struct PathReport {
    target: Target,
    links: Arc<Uplinks>,
    outage: Outage,
    print_line: PrintLine,
}

impl PathReport {
    pub(crate) fn new(target: Target, links: &UserUplinks, print_line: PrintLine) -> Self {
        Self { target, links: links.uplinks.clone(), outage: Outage::default(), print_line }
    }

    /// Reports that the path is lost, and whose line that is, and that it works again, until the session is over. At its
    /// begin, that it may not be without a path for as long as a login should.
    pub(crate) async fn run(&mut self, path: SessionMonitor) {
        let Self { target, links, outage, print_line } = self;
        let limit = in_words(path.resume_timeout().unwrap_or(RESUME_TIMEOUT));
        if path.resume_timeout().is_none() && target.port == 22 {
            print_line(&format!(
                "without a line, this login ends after {limit}: the node of {target}, or a server, cannot keep it for longer"
            ));
        }
        let session = format!("the session to {target}");
        let texts = (&*session, |links: &Uplinks| {
            let is_linked = links.newest(None).is_some_and(|link| !link.is_unresponsive(Instant::now()));
            let whose = match links.failure().filter(|failure| failure.is_denied) {
                _ if is_linked => format!("the line of {}", target.host),
                Some(LinkFailure { text, .. }) => format!("this machine's line, which is refused: {text}"),
                None => "this machine's line".to_owned(),
            };
            format!("it waits for up to {limit} for {whose}")
        });
        report(links, |_| path.lost_since(), || path.is_over(), suspended, outage, texts, &**print_line)
            .await;
    }

    /// Returns why the session was interrupted, for its user; `None` if it ended cleanly.
    pub(crate) fn interruption(&self, path: &SessionMonitor) -> Option<String> {
        let SessionError { code, mut reason } = path.ended()?;
        if code == ErrorCode::UnknownSession {
            let limit = path.resume_timeout().unwrap_or(RESUME_TIMEOUT);
            let mut outage = self.outage;
            outage.add_sleep(suspended());
            let [lost, asleep, limit] = [outage.lasted(), outage.asleep, limit].map(in_words);
            reason += &format!(
                "; it had no line for {lost} (this machine slept for {asleep}), and is kept for {limit} without one"
            );
        }
        Some(format!("{reason}; see the servers' access logs (session={})", path.id()))
    }
}

/// Reports with `print_line` that a program has no link, and that it has one again, until it ends.
pub async fn report_links(links: &UserUplinks, print_line: impl Fn(&str)) {
    let started = Instant::now();
    let mut outage = Outage::default();
    let texts = ("all sessions", |_: &Uplinks| "the line to the servers is dialled again".to_owned());
    let lost_since = |links: &Uplinks| links.lost_since(started);
    report(&links.uplinks, lost_since, || false, suspended, &mut outage, texts, print_line).await;
}

/// Reports losses of a line of `links` that carries `what`, with a `note`. `suspended` returns the seconds for which this
/// machine has slept.
async fn report(
    links: &Uplinks,
    lost_since: impl Fn(&Uplinks) -> Option<Instant>,
    is_over: impl Fn() -> bool,
    suspended: impl Fn() -> i64,
    outage: &mut Outage,
    (what, note): (&str, impl Fn(&Uplinks) -> String),
    print_line: impl Fn(&str),
) {
    // Whether the loss was reported, and when the machine woke.
    let mut reported = false;
    let mut woke = None;
    let mut checks = interval(CHECK_INTERVAL);
    checks.set_missed_tick_behavior(MissedTickBehavior::Delay);
    loop {
        checks.tick().await;
        if is_over() {
            return;
        }
        if outage.add_sleep(suspended()) {
            woke = Some(Instant::now());
        }
        match (lost_since(links), outage.lost) {
            // A process that was suspended reads what arrived meanwhile before the next check.
            (Some(since), None) => outage.lost = Some(since),
            (Some(_), Some(since)) if !reported && since.elapsed() >= REPORT_AFTER => {
                print_line(&format!("line lost, resuming {what}; {}", note(links)));
                reported = true;
            }
            (Some(_), Some(_)) => {}
            (None, Some(_)) => {
                if reported || outage.asleep > REPORT_AFTER {
                    print_line(&format!("resumed {what} after {}", in_words(outage.lasted())));
                }
                *outage = Outage { suspended: outage.suspended, ..Outage::default() };
                reported = false;
            }
            (None, None) if woke.is_none_or(|woke: Instant| woke.elapsed() >= WAKE_TIME) => {
                outage.asleep = Duration::ZERO;
            }
            (None, None) => {}
        }
    }
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
    use tunnel_proto::names::NodeName;

    #[tokio::test(start_paused = true)]
    async fn an_outage_counts_the_sleep_of_the_machine_also_after_the_last_check() {
        let mut outage = Outage::default();
        let started = Instant::now();
        let links = Uplinks::new(NodeName::none());
        let lost_since = |_: &Uplinks| (started.elapsed() > Duration::from_secs(10)).then_some(started);
        let slept = || if started.elapsed() < Duration::from_secs(20) { 5 } else { 3605 };
        let texts = ("it", |_: &Uplinks| String::new());
        let is_over = || started.elapsed() > Duration::from_secs(100);
        report(&links, lost_since, is_over, slept, &mut outage, texts, |_| {}).await;
        assert_eq!([outage.lasted(), outage.asleep].map(in_words), ["1 h 1 min", "1 h"]);
        assert!(outage.add_sleep(3605 + 13 * 3600) && !outage.add_sleep(3606 + 13 * 3600));
        assert_eq!([outage.lasted(), outage.asleep].map(in_words), ["14 h 1 min", "14 h"]);
    }

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
        let mut outage = Outage::default();
        reporting.spawn(async move {
            let texts = ("node1:22", |_: &Uplinks| "it waits".to_owned());
            let links = Uplinks::new(NodeName::none());
            let lost_since = |_: &Uplinks| *read.lock();
            let over = || ended.load(Relaxed);
            report(&links, lost_since, over, || slept.load(Relaxed), &mut outage, texts, print).await;
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
