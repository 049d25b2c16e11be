//! Turns a plain peer's messages into frames.

use bytes::Bytes;
use tokio::time::Instant;

use crate::names::{SessionId, Target};
use crate::protocol::wire::codec::StreamMsg;
use crate::protocol::wire::extension::{HEARTBEAT, STREAM};
use crate::protocol::wire::frame::{Category, Code, Refusal, SessionFrame};
use crate::protocol::wire::plain::{Decoded, Plain, PlainSession, Received, over};

impl Plain {
    /// Handles a message from the peer.
    pub fn on_message(&mut self, message: StreamMsg, now: Instant) -> Received {
        if message.category == STREAM {
            return if message.r#type == HEARTBEAT {
                Received::Heartbeat
            } else {
                Received::Unknown("unknown_type")
            };
        }
        let Some(category) = Category::from_name(&message.category) else {
            return Received::Unknown("unknown_type");
        };
        if !message.node.eq_ignore_ascii_case(self.node.as_str()) {
            return Received::Unknown("wrong_node");
        }
        let known = self.by_topic.get(&message.topic).copied();
        match (known, message.r#type.as_str()) {
            (None, "connecting") => self.asked(category, message, now),
            (None, "closed") => Received::Unknown("unknown_session"),
            // The id is checked first: long ones, repeated in a thousand answers, would take gigabytes.
            (None, _) if message.topic.len() > LONGEST_TOPIC => Received::Unknown("bad_session_id"),
            (None, _) => self.answer("closed", category, message.topic, GONE.into()),
            (Some(id), _) => self.on_session_message(id, message, now),
        }
    }

    fn asked(&mut self, category: Category, message: StreamMsg, now: Instant) -> Received {
        let target: Result<Target, _> = message.addr.parse();
        let fits = message.topic.len() <= LONGEST_TOPIC && self.sessions.len() < MOST_SESSIONS;
        let (Ok(target), true) = (target, fits) else {
            let text = format!("cannot connect to {:.100}: want host:port", message.addr);
            let topic = message.topic.chars().take(LONGEST_TOPIC).collect();
            return self.answer("connect-failed", category, topic, text.into());
        };
        let id = SessionId::random();
        let topic = message.topic;
        self.enter(
            id,
            PlainSession {
                topic,
                category,
                epoch: 1,
                sent: 0,
                received: 0,
                finished: false,
                accepted: true,
                goes_on: false,
                last: now,
            },
        );
        let open = SessionFrame::Open {
            target,
            limit: u64::MAX,
            epoch: 1,
            client: "a plain peer".into(),
            opener: None,
        };
        Received::Session(Decoded { id, category, frames: vec![open] })
    }

    fn on_session_message(&mut self, id: SessionId, message: StreamMsg, now: Instant) -> Received {
        let Some(session) = self.sessions.get_mut(&id) else { return Received::Unknown("unknown_session") };
        session.last = now;
        let (category, epoch) = (session.category, session.epoch);
        let frames = match message.r#type.as_str() {
            "connected" => vec![SessionFrame::Opened { limit: u64::MAX, epoch, instance: None }],
            "connect-failed" => {
                self.drop_session(id);
                vec![SessionFrame::Refused { epoch, refusal: refusal(&message.data) }]
            }
            "tcp-forward" => {
                session.goes_on |= session.finished;
                session.received += u64::try_from(message.data.len()).unwrap_or(u64::MAX);
                vec![SessionFrame::Data(message.data)]
            }
            "closed" => {
                let decoded = over(id, session);
                self.drop_session(id);
                decoded.frames
            }
            _ => return Received::Unknown("unknown_type"),
        };
        Received::Session(Decoded { id, category, frames })
    }

    /// Answers a message about an unknown session; beyond [`MOST_WAITING`] waiting answers the peer gets none.
    fn answer(&mut self, kind: &str, category: Category, topic: String, data: Bytes) -> Received {
        if self.waiting.len() < MOST_WAITING {
            self.send(category, kind, topic, data);
        }
        Received::Answered
    }
}

/// The answer to a session of an HTTPS front end, given in the peer's place: no generation of SuperEdge that links here
/// uses TLS to targets.
pub(super) fn speaks_no_tls(id: SessionId, epoch: u64) -> Decoded {
    let refusal = Refusal::new(Code::TargetUnreachable, NO_TLS);
    Decoded { id, category: Category::Https, frames: vec![SessionFrame::Refused { refusal, epoch }] }
}

/// The code for Go's text of a failed dial.
fn refusal(text: &Bytes) -> Refusal {
    let text = String::from_utf8_lossy(text);
    let code = if text.contains("refused") {
        Code::TargetRefused
    } else if text.contains("timeout") || text.contains("timed out") {
        Code::TargetTimeout
    } else {
        Code::TargetUnreachable
    };
    Refusal::new(code, text)
}

/// Longest topic of a plain peer in bytes; it may be any text.
pub(crate) const LONGEST_TOPIC: usize = 256;
/// Answers that may wait for one link.
const MOST_WAITING: usize = 1000;
/// Sessions of one plain link at most: bounds the memory that a peer can take.
const MOST_SESSIONS: usize = 20_000;
/// SuperEdge's text for a message about a session that is gone.
const GONE: &str = "msg cannot be forwarded due to disconnection";
/// Names the two ways out.
const NO_TLS: &str = "its edge is SuperEdge's, which speaks no TLS to targets: set mode = \"passthrough\" in \
                      [mode.cloud.https], or run this program's edge there";
