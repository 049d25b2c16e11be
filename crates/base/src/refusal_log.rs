//! Counts refusals, and limits log lines about them, so that no client can fill the log.

use std::collections::{BTreeMap, HashMap, VecDeque};
use std::future::Future;
use std::net::IpAddr;
use std::pin::pin;
use std::sync::Arc;
use std::time::Duration;

use parking_lot::Mutex;
use tokio::time::Instant;
use tracing::warn;

use crate::policy::source_of;

/// The refusals of a process. Allows `EACH` log lines a second for each reason and source, and sums up the rest. Cheap
/// to clone.
///
/// Sources beyond `MAX_SOURCES_PER_SECOND` share one count for each reason.
#[derive(Debug, Clone, Default)]
pub struct RefusalLog(Arc<Mutex<RefusalCounts>>);

#[derive(Debug, Default)]
struct RefusalCounts {
    /// Refusals in this second, by reason and source. The source `None` stands for all others.
    second: HashMap<(&'static str, Option<IpAddr>), u64>,
    /// The last hour by minutes, the newest last. Reasons are fixed words, so their number is bounded.
    minutes: VecDeque<(Instant, BTreeMap<&'static str, u64>)>,
}

impl RefusalLog {
    /// Counts a refusal and returns true if it may be logged. `reason` is a fixed word.
    pub fn may_log(&self, reason: &'static str, from: IpAddr) -> bool {
        let mut counts = self.0.lock();
        counts.count(reason);
        let second = &mut counts.second;
        let one = (reason, Some(source_of(from)));
        let known = second.len() < MAX_SOURCES_PER_SECOND || second.contains_key(&one);
        let count = second.entry(if known { one } else { (reason, None) }).or_default();
        *count += 1;
        *count <= EACH
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

    /// Logs the number of suppressed lines once a second and resets the counts, until `end` completes. Cancel safe.
    pub async fn sum_up(self, end: impl Future<Output = ()>) {
        let mut end = pin!(end);
        loop {
            tokio::select! {
                biased;
                () = &mut end => return self.next(),
                () = tokio::time::sleep(SECOND) => self.next(),
            }
        }
    }

    fn next(&self) {
        let second = std::mem::take(&mut self.0.lock().second);
        for ((reason, source), count) in second {
            let Some(more) = count.checked_sub(EACH).filter(|more| *more > 0) else { continue };
            let source = source.map(tracing::field::display);
            warn!(reason, source, suppressed = more, "similar refusals not logged");
        }
    }
}

impl RefusalCounts {
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

/// Lines per second for each reason and source.
const EACH: u64 = 20;
/// Maximum number of (reason, source) pairs counted separately within a second.
const MAX_SOURCES_PER_SECOND: usize = 100;
const SECOND: Duration = Duration::from_secs(1);
const MINUTE: Duration = Duration::from_secs(60);
const HOUR: Duration = Duration::from_secs(3600);

#[cfg(test)]
mod tests {
    use crate::logging::tests::lines_of;

    use super::*;

    #[test]
    fn each_reason_and_source_logs_twenty_lines_a_second_and_counts_the_rest() {
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
                (20, 20, 20)
            );
            refusals.next();
            assert!(refusals.may_log("token", ip("192.0.2.1")), "a second later it may be logged again");
            refusals.next();
        });
        assert_eq!(lines.lines().count(), 3, "{lines}");
        assert!(lines.lines().all(|line| line.contains("\"suppressed\":20980")), "{lines}");
        assert!(lines.contains(r#""reason":"overloaded","source":"192.0.2.1""#), "{lines}");
    }

    #[test]
    fn an_ipv6_64_is_one_source_and_mapped_ipv4_is_the_same_as_ipv4() {
        let refusals = RefusalLog::default();
        let logged = |from: &str| refusals.may_log("token", from.parse().unwrap());
        for last in 0..20 {
            assert!(logged(&format!("2001:db8::{last}")) && logged("::ffff:192.0.2.1"));
        }
        assert!(!logged("2001:db8::ffff") && !logged("192.0.2.1") && logged("2001:db8:0:1::1"));
    }

    #[test]
    fn many_sources_grow_neither_the_log_nor_memory_without_bound() {
        let refusals = RefusalLog::default();
        let logged =
            (0..100_000_u32).filter(|n| refusals.may_log("token", IpAddr::from(n.to_be_bytes()))).count();
        assert_eq!(logged, MAX_SOURCES_PER_SECOND + usize::try_from(EACH).unwrap());
        assert_eq!(refusals.0.lock().second.len(), MAX_SOURCES_PER_SECOND + 1);
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
            tokio::time::advance(SECOND).await;
            refuse("token", 1);
        }
        assert!(refusals.0.lock().minutes.len() <= 61);
        tokio::time::advance(HOUR).await;
        assert_eq!(refusals.last_hour(), BTreeMap::new());
    }
}
