//! The access log: exactly one line for each session, also for one that failed.

use std::net::IpAddr;
use std::time::Duration;

use tokio::time::Instant;
use tracing::info;

use crate::names::{NodeName, SessionId, Target};

use super::Refusals;
use super::log::ACCESS;

/// The line of one session, filled while it runs. [`Self::end`] writes it; dropping it writes it with the result `cut`.
#[derive(Debug)]
pub struct Access {
    /// The name of the front end (`ssh`, ...), or `backend` at the edge.
    pub front: &'static str,
    /// The session's id, once it has one; the line shows 8 digits.
    pub id: Option<SessionId>,
    /// The client's trace, its own or the one that it was sent.
    pub trace: String,
    /// The node, if the request names one.
    pub node: Option<NodeName>,
    /// The target, if it could be parsed.
    pub target: Option<Target>,
    /// The client: its address; at the edge the text of the Open frame.
    pub client: String,
    /// The user that the client has proved to be.
    pub user: Option<String>,
    /// Bytes from the client towards the target.
    pub up: u64,
    /// Bytes from the target towards the client.
    pub down: u64,
    /// How often the session was resumed over another path.
    pub resumed: u32,
    /// The HTTP status of the answer; `None` at the edge, which answers no client.
    pub status: Option<u16>,
    begun: Instant,
    written: bool,
}

impl Access {
    /// A line for a session that begins now.
    pub fn begin(front: &'static str, client: String) -> Self {
        Self {
            front,
            id: None,
            trace: String::new(),
            node: None,
            target: None,
            client,
            user: None,
            up: 0,
            down: 0,
            resumed: 0,
            status: None,
            begun: Instant::now(),
            written: false,
        }
    }

    /// How long ago the session began.
    pub fn age(&self) -> Duration {
        self.begun.elapsed()
    }

    /// Writes the line: `result` is a fixed word, `why` a sentence that names the side that ended the session.
    pub fn end(mut self, result: &str, why: &str) {
        self.write(result, why);
    }

    /// As [`Self::end`], for a client at `from` that was refused: no line if there are too many alike.
    pub fn refuse(mut self, result: &'static str, why: &str, from: IpAddr, refusals: &Refusals) {
        self.written = true;
        if refusals.may_log(result, from) {
            self.write(result, why);
        }
    }

    /// Writes no line.
    pub fn forget(mut self) {
        self.written = true;
    }

    fn write(&mut self, result: &str, why: &str) {
        self.written = true;
        let seconds = self.age().as_secs_f64();
        info!(
            target: ACCESS,
            front = self.front,
            session = self.id.map(tracing::field::display),
            trace = (!self.trace.is_empty()).then_some(self.trace.as_str()),
            node = self.node.as_ref().map(tracing::field::display),
            target = self.target.as_ref().map(tracing::field::display),
            client = self.client,
            user = self.user,
            up_bytes = self.up,
            down_bytes = self.down,
            seconds,
            resumed = self.resumed,
            status = self.status,
            result,
            why,
        );
    }
}

impl Drop for Access {
    fn drop(&mut self) {
        if !self.written {
            self.write("cut", "the process stopped, or the client went away while the session was opened");
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::telemetry::log::tests;

    fn lines_of(work: impl FnOnce()) -> Vec<serde_json::Value> {
        let text = tests::lines_of(true, work);
        text.lines().map(|l| serde_json::from_str::<serde_json::Value>(l).unwrap()["fields"].take()).collect()
    }

    #[test]
    fn a_session_has_one_line_and_shows_no_whole_id() {
        let id = SessionId::random();
        let lines = lines_of(|| {
            let mut access = Access::begin("ssh", "10.0.0.1:5".into());
            access.id = Some(id);
            access.target = Some("node1:22".parse().unwrap());
            access.up = 7;
            access.status = Some(200);
            access.end("over", "both ends finished");
        });
        let [line] = lines.try_into().unwrap();
        assert_eq!(
            (&line["session"], &line["up_bytes"], &line["status"], &line["result"]),
            (&id.to_string().into(), &7.into(), &200.into(), &"over".into())
        );
        assert_eq!(line["target"], "node1:22");
        assert!(line.get("user").is_none(), "{line}");
        assert!(!line.to_string().contains(&id.topic()));
    }

    #[test]
    fn a_session_that_is_cut_has_its_line_too() {
        let lines = lines_of(|| drop(Access::begin("ssh", String::new())));
        assert_eq!(lines.len(), 1);
        assert_eq!(lines[0]["result"], "cut");
    }
}
