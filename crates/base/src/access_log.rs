//! The access log: one line for each session, including failed ones. Lines about refusals are limited.

use std::collections::{BTreeMap, HashMap, VecDeque};
use std::future::Future;
use std::net::{IpAddr, Ipv6Addr};
use std::pin::pin;
use std::sync::Arc;
use std::time::Duration;

use parking_lot::Mutex;
use tokio::time::Instant;
use tracing::{info, warn};

use crate::logging::ACCESS;
use crate::names::{DeviceName, NodeName, SessionId, Target};

/// The access line of one session, filled while it runs. [`Self::end`] writes it; dropping it writes it with the result
/// `aborted`, unless [`Self::set_pending`] was called.
#[derive(Debug)]
pub struct AccessLogEntry {
    /// Name of the listener (`connect`, ...), or `acceptor` at the end that dials the target.
    pub listener: &'static str,
    /// ID of the session, once it has one; the line shows 8 digits.
    pub id: Option<SessionId>,
    /// Trace ID of the client's request: received from the client, or generated.
    pub trace: String,
    /// Node, if the request names one.
    pub node: Option<NodeName>,
    /// Target, if it could be parsed.
    pub target: Option<Target>,
    /// Address of the client; at the edge, the text of the Open frame.
    pub client: String,
    /// Authenticated user.
    pub user: Option<String>,
    /// The user's device, at the end of her link.
    pub device: Option<DeviceName>,
    /// Bytes from the client to the target.
    pub up: u64,
    /// Bytes from the target to the client.
    pub down: u64,
    /// Number of times the session was resumed over another path.
    pub resumed: u32,
    /// HTTP status of the response; `None` at the edge, which sends no response to clients.
    pub status: Option<u16>,
    started: Instant,
    /// Whether dropping it writes nothing.
    silent: bool,
}

impl AccessLogEntry {
    /// Creates the line of a session that starts now.
    pub fn start(listener: &'static str, client: String) -> Self {
        Self {
            listener,
            id: None,
            trace: String::new(),
            node: None,
            target: None,
            client,
            user: None,
            device: None,
            up: 0,
            down: 0,
            resumed: 0,
            status: None,
            started: Instant::now(),
            silent: false,
        }
    }

    /// Returns the time since the session started.
    pub fn age(&self) -> Duration {
        self.started.elapsed()
    }

    /// Writes the line. `result` is a fixed word, `why` a sentence that names the side that ended the session.
    pub fn end(mut self, result: &str, why: &str) {
        self.write(result, why);
    }

    /// Like [`Self::end`], for a refused client at `from`. Writes no line if there are too many similar ones.
    pub fn refuse(mut self, result: &'static str, why: &str, from: IpAddr, refusals: &RefusalLog) {
        self.silent = true;
        if refusals.may_log(result, from) {
            self.write(result, why);
        }
    }

    /// Sets whether the session is not requested yet. Dropping the entry then writes no line.
    pub fn set_pending(&mut self, is_pending: bool) {
        self.silent = is_pending;
    }

    fn write(&mut self, result: &str, why: &str) {
        self.silent = true;
        let seconds = self.age().as_secs_f64();
        info!(
            target: ACCESS,
            listener = self.listener,
            session = self.id.map(tracing::field::display),
            trace_id = (!self.trace.is_empty()).then_some(self.trace.as_str()),
            node = self.node.as_ref().map(tracing::field::display),
            target = self.target.as_ref().map(tracing::field::display),
            client = self.client,
            user = self.user,
            device = self.device.as_ref().map(tracing::field::display),
            bytes_to_target = self.up,
            bytes_to_client = self.down,
            duration_seconds = seconds,
            resume_count = self.resumed,
            status = self.status,
            result,
            reason = why,
        );
    }
}

impl Drop for AccessLogEntry {
    fn drop(&mut self) {
        if !self.silent {
            self.write(
                "aborted",
                "the process stopped, or the client disconnected while the session was being opened",
            );
        }
    }
}

// Counts refusals, and limits log lines about them, so that no client can fill the log.

/// The refusals of a process. Allows `EACH` log lines a second for each reason and source, and sums up the rest. Cheap
/// to clone.
///
/// Sources beyond `MAX_SOURCES_PER_SECOND` share one count for each reason.
#[derive(Debug, Clone, Default)]
pub struct RefusalLog(Arc<Mutex<RefusalCounts>>);

#[derive(Debug, Default)]
struct RefusalCounts {
    second: Second,
    /// The last hour by minutes, the newest last. Reasons are fixed words, so their number is bounded.
    minutes: VecDeque<(Instant, BTreeMap<&'static str, u64>)>,
}

/// Refusals in this second, by reason and source. The source `None` stands for all others.
type Second = HashMap<(&'static str, Option<IpAddr>), u64>;

impl RefusalLog {
    /// Counts a refusal and returns true if it may be logged. `reason` is a fixed word.
    pub fn may_log(&self, reason: &'static str, from: IpAddr) -> bool {
        let mut counts = self.0.lock();
        counts.count(reason);
        let second = &mut counts.second;
        let one = (reason, Some(source(from)));
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

/// Returns the source of an address: an IPv4 address, or the first address of an IPv6 address's /64.
fn source(from: IpAddr) -> IpAddr {
    match from.to_canonical() {
        IpAddr::V6(ip) => Ipv6Addr::from_bits(ip.to_bits() >> 64 << 64).into(),
        ip @ IpAddr::V4(_) => ip,
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
    use crate::logging::tests;

    use super::*;

    fn lines_of(work: impl FnOnce()) -> Vec<serde_json::Value> {
        let text = tests::lines_of(true, work);
        text.lines().map(|line| serde_json::from_str(line).unwrap()).collect()
    }

    #[test]
    fn a_session_logs_one_line_without_its_full_id() {
        let id = SessionId::random();
        let lines = lines_of(|| {
            let mut access = AccessLogEntry::start("connect", "10.0.0.1:5".into());
            access.id = Some(id);
            access.target = Some("node1:22".parse().unwrap());
            access.up = 7;
            access.status = Some(200);
            access.end("ok", "both ends finished");
        });
        let [line] = lines.try_into().unwrap();
        assert_eq!(
            (&line["session"], &line["bytes_to_target"], &line["status"], &line["result"]),
            (&id.to_string().into(), &7.into(), &200.into(), &"ok".into())
        );
        assert_eq!((&line["target"], &line["field_target"]), (&ACCESS.into(), &"node1:22".into()));
        assert!(line.get("user").is_none(), "{line}");
        assert!(!line.to_string().contains(&id.topic()));
    }

    #[test]
    fn an_aborted_session_logs_one_line() {
        let lines = lines_of(|| drop(AccessLogEntry::start("connect", String::new())));
        assert_eq!(lines.len(), 1);
        assert_eq!(lines[0]["result"], "aborted");
    }
}

#[cfg(test)]
mod refusal_log_tests {
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
