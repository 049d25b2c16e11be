//! The access log: one line for each session, including failed ones. Lines about refusals are limited.

use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;
use std::time::Duration;

use arc_swap::ArcSwapOption;
use tokio::time::Instant;
use tracing::info;

use crate::logging::ACCESS;
use crate::metrics::{Door, Metrics};
use crate::policy::grants::Grant;
use crate::policy::source_of;
use crate::refusal_log::RefusalLog;
use tunnel_proto::names::{DeviceName, NodeName, SessionId, Target};

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
    /// The grant that has allowed the session last; `None` if a rule has. It is judged again after each change.
    pub grant: Arc<ArcSwapOption<Grant>>,
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
    /// While the session has opened nothing: limits the lines of its client.
    limit: Option<RefusalLog>,
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
            grant: Arc::default(),
            up: 0,
            down: 0,
            resumed: 0,
            status: None,
            started: Instant::now(),
            silent: false,
            limit: None,
        }
    }

    /// Returns the time since the session started.
    pub fn age(&self) -> Duration {
        self.started.elapsed()
    }

    /// Writes the line. `result` is a fixed word, `why` a sentence that names the side that ended the session.
    pub fn end(mut self, result: &str, why: &str) {
        self.silent = true;
        if self.may_write() {
            self.write(result, why);
        }
    }

    /// Like [`Self::end`], for a refused client at `from`, which is also counted. Writes no line if there are too many
    /// similar ones.
    pub fn refuse(mut self, result: &'static str, why: &str, from: IpAddr, metrics: &Metrics) {
        self.silent = true;
        if metrics.refuse(Door::Listener(self.listener), result, from) {
            self.write(result, why);
        }
    }

    /// Sets whether the session is not requested yet. Dropping the entry then writes no line.
    pub fn set_pending(&mut self, is_pending: bool) {
        self.silent = is_pending;
        self.limit = None;
    }

    /// Sets that the session has opened nothing so far. Of such sessions only the first few lines of a user, or an
    /// address, within a minute are written.
    pub fn set_opening(&mut self, refusals: &RefusalLog) {
        self.silent = false;
        self.limit = Some(refusals.clone());
    }

    fn may_write(&self) -> bool {
        let from = || self.client.parse().map(|at: SocketAddr| source_of(at.ip()).to_string()).ok();
        let client = || self.user.clone().or_else(from).unwrap_or_default();
        self.limit.as_ref().is_none_or(|limit| limit.may_log_about("unopened_session", client()))
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
            grant = self.grant.load().as_ref().map(|grant| grant.id.as_str()),
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
        if !self.silent && self.may_write() {
            self.write(
                "aborted",
                "the process stopped, or the client disconnected while the session was being opened",
            );
        }
    }
}

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
    fn sessions_that_open_nothing_log_ten_lines_a_minute_for_each_client() {
        let refusals = RefusalLog::default();
        let lines = lines_of(|| {
            for n in 0..100 {
                for client in ["192.0.2.1:5".to_owned(), format!("[2001:db8::{n}]:5")] {
                    let mut access = AccessLogEntry::start("connect", client);
                    access.set_opening(&refusals);
                    if n % 2 == 0 { drop(access) } else { access.end("unknown_session", "") }
                }
            }
            let mut opened = AccessLogEntry::start("connect", "192.0.2.1:5".to_owned());
            opened.set_opening(&refusals);
            opened.set_pending(false);
        });
        assert_eq!(lines.len(), 2 * 10 + 1);
    }

    #[test]
    fn an_aborted_session_logs_one_line() {
        let lines = lines_of(|| drop(AccessLogEntry::start("connect", String::new())));
        assert_eq!(lines.len(), 1);
        assert_eq!(lines[0]["result"], "aborted");
    }
}
