//! Counts refusals, and limits the log lines that remotes cause, so that no remote can fill the log.

use std::cmp::Reverse;
use std::collections::{BTreeMap, HashMap, VecDeque};
use std::fmt;
use std::net::IpAddr;
use std::pin::pin;
use std::sync::Arc;
use std::time::Duration;

use parking_lot::Mutex;
use tokio::time::Instant;
use tracing::warn;

use crate::policy::source_of;

/// The refusals of a process, and the log lines that remotes have caused within the current minute. Allows a few lines
/// for each kind and cause, and sums up the rest. Cheap to clone.
///
/// Causes beyond a limit share one count for each kind.
#[derive(Debug, Clone, Default)]
pub struct RefusalLog(Arc<Mutex<RefusalCounts>>);

#[derive(Debug, Default)]
struct RefusalCounts {
    /// The lines of this minute, by kind and cause. The cause `None` stands for all others.
    lines: BTreeMap<&'static str, HashMap<Option<String>, LineCount>>,
    /// The refusals of the last hour by minutes, the newest last. Reasons are fixed words, so their number is bounded.
    minutes: VecDeque<(Instant, BTreeMap<&'static str, u64>)>,
}

/// The lines of one kind and cause.
#[derive(Debug, Default)]
struct LineCount {
    written: u64,
    suppressed: u64,
}

/// Writes a log line, given as for the macro of `tracing` with the name of its level, if the condition is true:
/// `limited!(metrics.refuse(..) => warn, remote_addr = %from, "edge refused")`.
///
/// Modules that serve remotes write all lines by it whose number a remote decides. A test refuses others there.
#[macro_export]
macro_rules! limited {
    ($may:expr => $level:ident, $($line:tt)+) => {
        if $may {
            tracing::$level!($($line)+);
        }
    };
}

impl RefusalLog {
    /// Counts a refusal and returns true if it may be logged. `reason` is a fixed word.
    pub fn may_log(&self, reason: &'static str, from: IpAddr) -> bool {
        let mut counts = self.0.lock();
        counts.count(reason);
        counts.may_log(reason, source_of(from).to_string(), EACH, MAX_SOURCES)
    }

    /// Returns true if a line of this kind about `name` may be logged: the first few within a minute. `kind` is a fixed
    /// word, and a remote has proved the name.
    pub fn may_log_about(&self, kind: &'static str, name: impl fmt::Display) -> bool {
        self.0.lock().may_log(kind, name.to_string(), EACH, MAX_NAMES)
    }

    /// Like [`Self::may_log_about`], but only for the first line within a minute.
    pub fn may_log_once(&self, kind: &'static str, name: impl fmt::Display) -> bool {
        self.0.lock().may_log(kind, name.to_string(), 1, MAX_NAMES)
    }

    /// Returns the refusals of the last hour by reason, to the minute.
    pub fn last_hour(&self) -> BTreeMap<&'static str, u64> {
        let mut counts = self.0.lock();
        counts.forget_old();
        let mut sum = BTreeMap::new();
        for (reason, count) in counts.minutes.iter().flat_map(|(_, minute)| minute) {
            *sum.entry(*reason).or_default() += count;
        }
        sum
    }

    /// Logs the number of suppressed lines once a minute and resets the counts, until `end` completes. Cancel safe.
    pub async fn sum_up(self, end: impl Future<Output = ()>) {
        let mut end = pin!(end);
        loop {
            tokio::select! {
                biased;
                () = &mut end => return self.next(),
                () = tokio::time::sleep(MINUTE) => self.next(),
            }
        }
    }

    fn next(&self) {
        let lines = std::mem::take(&mut self.0.lock().lines);
        for (reason, causes) in lines {
            let mut causes: Vec<_> =
                causes.into_iter().map(|(cause, count)| (count.suppressed, cause)).collect();
            causes.retain(|(suppressed, _)| *suppressed > 0);
            causes.sort_by_key(|(suppressed, _)| Reverse(*suppressed));
            for (suppressed, source) in causes.iter().take(MAX_SUMMED) {
                warn!(reason, source, suppressed, "similar lines not logged");
            }
            let suppressed: u64 = causes.iter().skip(MAX_SUMMED).map(|(suppressed, _)| suppressed).sum();
            if suppressed > 0 {
                warn!(reason, suppressed, "similar lines not logged");
            }
        }
    }
}

impl RefusalCounts {
    fn may_log(&mut self, kind: &'static str, cause: String, most: u64, max_causes: usize) -> bool {
        let causes = self.lines.entry(kind).or_default();
        let cause = Some(cause);
        let is_known = causes.len() < max_causes || causes.contains_key(&cause);
        let count = causes.entry(cause.filter(|_| is_known)).or_default();
        let may = count.written < most;
        *(if may { &mut count.written } else { &mut count.suppressed }) += 1;
        may
    }

    fn count(&mut self, reason: &'static str) {
        self.forget_old();
        let now = Instant::now();
        if self.minutes.back().is_none_or(|(start, _)| now - *start >= MINUTE) {
            self.minutes.push_back((now, BTreeMap::new()));
        }
        if let Some((_, minute)) = self.minutes.back_mut() {
            *minute.entry(reason).or_default() += 1;
        }
    }

    fn forget_old(&mut self) {
        while self.minutes.front().is_some_and(|(start, _)| start.elapsed() >= HOUR) {
            self.minutes.pop_front();
        }
    }
}

/// Lines per minute for each kind and cause.
const EACH: u64 = 10;
/// Maximum number of sources of one reason counted separately within a minute, as any stranger may have several.
const MAX_SOURCES: usize = 100;
/// The same for names, which are proved: nodes, users.
const MAX_NAMES: usize = 20_000;
/// Maximum number of causes of one kind that are summed up one by one.
const MAX_SUMMED: usize = 10;
const MINUTE: Duration = Duration::from_secs(60);
const HOUR: Duration = Duration::from_secs(3600);

#[cfg(test)]
mod tests {
    use crate::logging::tests::lines_of;

    use super::*;

    #[test]
    fn each_reason_and_source_logs_ten_lines_a_minute_and_counts_the_rest() {
        let refusals = RefusalLog::default();
        let ip = |text: &str| text.parse::<IpAddr>().unwrap();
        let logged = |reason, from| (0..21_000).filter(|_| refusals.may_log(reason, ip(from))).count();
        let lines = lines_of(true, || {
            assert_eq!(
                (
                    logged("token", "192.0.2.1"),
                    logged("token", "192.0.2.2"),
                    logged("overloaded", "192.0.2.1")
                ),
                (10, 10, 10)
            );
            refusals.next();
            assert!(refusals.may_log("token", ip("192.0.2.1")), "a minute later it may be logged again");
            refusals.next();
        });
        assert_eq!(lines.lines().count(), 3, "{lines}");
        assert!(lines.lines().all(|line| line.contains("\"suppressed\":20990")), "{lines}");
        assert!(lines.contains(r#""reason":"overloaded","source":"192.0.2.1""#), "{lines}");
    }

    #[test]
    fn lines_about_names_have_a_limit_of_their_kind_and_few_sums() {
        let refusals = RefusalLog::default();
        let logged = |name: usize| (0..4).filter(|_| refusals.may_log_once("node_linked", name)).count();
        let lines = lines_of(true, || {
            assert_eq!((0..1000).map(logged).sum::<usize>(), 1000);
            refusals.next();
        });
        assert_eq!(lines.lines().count(), MAX_SUMMED + 1, "{lines}");
        assert!(lines.contains("\"suppressed\":2970"), "990 names together: {lines}");
        assert_eq!(refusals.last_hour(), BTreeMap::new(), "they are no refusals");
    }

    #[test]
    fn an_ipv6_64_is_one_source_and_mapped_ipv4_is_the_same_as_ipv4() {
        let refusals = RefusalLog::default();
        let logged = |from: &str| refusals.may_log("token", from.parse().unwrap());
        for last in 0..EACH {
            assert!(logged(&format!("2001:db8::{last}")) && logged("::ffff:192.0.2.1"));
        }
        assert!(!logged("2001:db8::ffff") && !logged("192.0.2.1") && logged("2001:db8:0:1::1"));
    }

    #[test]
    fn many_sources_grow_neither_the_log_nor_memory_without_bound() {
        let refusals = RefusalLog::default();
        let logged =
            (0..100_000_u32).filter(|n| refusals.may_log("token", IpAddr::from(n.to_be_bytes()))).count();
        assert_eq!(logged, MAX_SOURCES + usize::try_from(EACH).unwrap());
        assert_eq!(refusals.0.lock().lines["token"].len(), MAX_SOURCES + 1);
    }

    #[tokio::test(start_paused = true)]
    async fn refusals_of_the_last_hour_are_counted_by_reason() {
        let refusals = RefusalLog::default();
        let from = IpAddr::from([192, 0, 2, 1]);
        let refuse = |reason, times| {
            for _ in 0..times {
                refusals.may_log(reason, from);
            }
        };
        refuse("token", 100);
        for _ in 0..59 {
            tokio::time::advance(MINUTE).await;
            refuse("overloaded", 1);
        }
        assert_eq!(refusals.last_hour(), BTreeMap::from([("token", 100), ("overloaded", 59)]));
        tokio::time::advance(MINUTE).await;
        assert_eq!(refusals.last_hour(), BTreeMap::from([("overloaded", 59)]));
        for _ in 0..1000 {
            tokio::time::advance(Duration::from_secs(1)).await;
            refuse("token", 1);
        }
        assert!(refusals.0.lock().minutes.len() <= 61);
        tokio::time::advance(HOUR).await;
        assert_eq!(refusals.last_hour(), BTreeMap::new());
    }
}
