//! Stands in for a peer with the plain dialect: turns neutral frames into SuperEdge's messages, and back.
//!
//! Of SuperEdge's generations it implements the newest (docs/superedge.md#generations).
//!
//! A plain peer knows no limits, no half-close and no resume. So its limit is endless, what was handed to the link
//! counts as received, a finished direction is remembered until the other is finished too, and `closed` ends both. A
//! target that has ended is most often done with its client, which only waits for that: then `closed` follows soon.

use std::collections::{HashMap, VecDeque};
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use tokio::sync::Notify;
use tokio::time::Instant;

use crate::codec::proto::StreamMsg;
use crate::codec::{HEARTBEAT, STREAM};
use crate::frame::{Category, ErrorCode, Frame, FrameKind, SessionError, SessionFrame};
use tunnel_base::names::{Host, NodeName, SessionId, Target};

/// The sessions of one plain link, with the state of each.
#[derive(Debug)]
pub struct PlainCodec {
    node: NodeName,
    by_topic: HashMap<String, SessionId>,
    sessions: HashMap<SessionId, PlainSession>,
    /// Messages to send; bounded by [`MAX_WAITING`].
    waiting: VecDeque<StreamMsg>,
    /// Sessions whose target has ended, each with the time of its next check, in order of time.
    ending: VecDeque<(Instant, SessionId)>,
    /// Notified when one is added to them.
    pub more_ending: Arc<Notify>,
}

/// One session as the plain peer sees it.
#[derive(Debug)]
struct PlainSession {
    topic: String,
    category: Category,
    epoch: u64,
    /// Bytes sent to the peer.
    sent: u64,
    /// Bytes received from it.
    received: u64,
    /// Our direction is finished. `closed` is sent once the peer's is too, or after [`HALF_OPEN`] of silence.
    finished: bool,
    /// The target is at this end.
    accepted: bool,
    /// Whether the peer has sent bytes after our direction was finished.
    goes_on: bool,
    last: Instant,
}

/// The frames for one session that a plain message becomes.
#[derive(Debug, PartialEq)]
pub struct Decoded {
    /// The session.
    pub id: SessionId,
    /// Its front end.
    pub category: Category,
    /// The frames, in order.
    pub frames: Vec<SessionFrame>,
}

/// The result of a message from the peer.
#[derive(Debug, PartialEq)]
pub enum PlainEvent {
    /// Frames for one session.
    Session(Decoded),
    /// A ping; a pod answers with the same message.
    Heartbeat,
    /// The answer is queued: [`Plain::next_message`] returns it.
    Answered,
    /// An unknown message; the cause for metrics.
    Unknown(&'static str),
}

impl PlainCodec {
    /// The sessions of a new link to or from `node`.
    pub fn new(node: NodeName) -> Self {
        Self {
            node,
            by_topic: HashMap::new(),
            sessions: HashMap::new(),
            waiting: VecDeque::new(),
            ending: VecDeque::new(),
            more_ending: Arc::default(),
        }
    }

    /// Sends a frame. Returns the frames that the session here gets at once, because the peer does not send them.
    pub fn send_frame(&mut self, frame: Frame, now: Instant) -> Option<Decoded> {
        match frame.body {
            FrameKind::Ping(_) | FrameKind::Pong(_) => {
                self.waiting.push_back(heartbeat(&self.node));
                None
            }
            FrameKind::Session(id, category, word) => self.send_session_frame(id, category, word, now),
            // Never sent on a plain link: its link sender accepts no signals.
            _ => None,
        }
    }

    /// The next message to send.
    pub fn next_message(&mut self) -> Option<StreamMsg> {
        self.waiting.pop_front()
    }

    /// Sends `closed` for sessions whose end of stream has waited long enough for the peer's.
    pub fn tick(&mut self, now: Instant) -> Vec<Decoded> {
        let late = |s: &PlainSession| s.finished && now - s.last >= HALF_OPEN;
        let ids: Vec<SessionId> = self.sessions.iter().filter(|(_, s)| late(s)).map(|(id, _)| *id).collect();
        ids.into_iter().filter_map(|id| self.close(id)).collect()
    }

    /// When to call [`Self::ended`] next, if nothing changes.
    pub fn next_end(&self) -> Option<Instant> {
        self.ending.front().map(|(at, _)| *at)
    }

    /// Sessions whose target ended some time ago, and whose peer has sent nothing since. The caller closes each or puts
    /// it off.
    pub fn ended(&mut self, now: Instant) -> Vec<SessionId> {
        let count = self.ending.iter().take_while(|(at, _)| *at <= now).count();
        let due = self.ending.drain(..count).map(|(_, id)| id);
        due.filter(|id| self.sessions.get(id).is_some_and(|session| !session.goes_on)).collect()
    }

    /// Puts off the close of a session, because the target has not taken all bytes from the peer yet.
    pub fn postpone_close(&mut self, id: SessionId, now: Instant) {
        self.ending.push_back((now + AFTER_TARGET, id));
    }

    /// Ends a session in both directions. Returns the frames that this end gets.
    pub fn close(&mut self, id: SessionId) -> Option<Decoded> {
        self.end(id, "EOF").map(|session| is_fully_closed(id, &session))
    }

    fn send_session_frame(
        &mut self,
        id: SessionId,
        category: Category,
        word: SessionFrame,
        now: Instant,
    ) -> Option<Decoded> {
        if let SessionFrame::Open { target, epoch, .. } = word {
            if category == Category::Https {
                return Some(speaks_no_tls(id, epoch));
            }
            self.open(id, category, &target, epoch, now);
            return None;
        }
        let session = self.sessions.get_mut(&id)?;
        session.last = now;
        let topic = session.topic.clone();
        let received = match word {
            SessionFrame::Opened { epoch, .. } => {
                session.epoch = epoch;
                self.send(category, "connected", topic, Bytes::new());
                return None;
            }
            SessionFrame::Data(bytes) => {
                session.sent += u64::try_from(bytes.len()).unwrap_or(u64::MAX);
                let received = session.sent;
                self.send(category, "tcp-forward", topic, bytes);
                received
            }
            SessionFrame::Fin { total } => {
                session.finished = true;
                if session.accepted {
                    self.postpone_close(id, now);
                    self.more_ending.notify_one();
                }
                total
            }
            SessionFrame::Refused { refusal, .. } => {
                self.drop_session(id);
                self.send(category, "connect-failed", topic, refusal.reason.into());
                return None;
            }
            SessionFrame::Reset { refusal, .. } => {
                self.end(id, if refusal.code == ErrorCode::NoError { "EOF" } else { &refusal.reason });
                return None;
            }
            SessionFrame::PathLost { .. } => {
                self.end(id, "the session went another way");
                return None;
            }
            _ => return None,
        };
        Some(Decoded { id, category, frames: vec![SessionFrame::Credit { received, limit: u64::MAX }] })
    }

    fn open(&mut self, id: SessionId, category: Category, target: &Target, epoch: u64, now: Instant) {
        let topic = id.topic();
        let addr = self.address(target);
        self.enter(
            id,
            PlainSession {
                topic: topic.clone(),
                category,
                epoch,
                sent: 0,
                received: 0,
                finished: false,
                accepted: false,
                goes_on: false,
                last: now,
            },
        );
        let text = format!("CONNECT {addr} HTTP/1.1\r\n\r\n\r\n");
        let message = StreamMsg { addr, ..self.message(category, "connecting", topic, text.into()) };
        self.waiting.push_back(message);
    }

    /// The target as a plain edge can dial it: the node's own name, which may not resolve there, becomes loopback.
    fn address(&self, target: &Target) -> String {
        match &target.host {
            Host::Name(name) if name.eq_ignore_ascii_case(self.node.as_str()) => {
                format!("127.0.0.1:{}", target.port)
            }
            _ => target.to_string(),
        }
    }

    fn end(&mut self, id: SessionId, text: &str) -> Option<PlainSession> {
        let session = self.drop_session(id)?;
        self.send(session.category, "closed", session.topic.clone(), Bytes::copy_from_slice(text.as_bytes()));
        Some(session)
    }

    fn enter(&mut self, id: SessionId, session: PlainSession) {
        self.by_topic.insert(session.topic.clone(), id);
        self.sessions.insert(id, session);
    }

    fn drop_session(&mut self, id: SessionId) -> Option<PlainSession> {
        let session = self.sessions.remove(&id)?;
        self.by_topic.remove(&session.topic);
        Some(session)
    }

    fn send(&mut self, category: Category, kind: &str, topic: String, data: Bytes) {
        let message = self.message(category, kind, topic, data);
        self.waiting.push_back(message);
    }

    fn message(&self, category: Category, kind: &str, topic: String, data: Bytes) -> StreamMsg {
        let node = self.node.as_str().to_owned();
        StreamMsg {
            node,
            category: name(category).into(),
            r#type: kind.into(),
            topic,
            data,
            addr: String::new(),
        }
    }
}

/// What a plain peer calls a category. It knows none for TCP ports any more, and does for `ssh` what they need.
fn name(category: Category) -> &'static str {
    match category {
        Category::Tcp => Category::Ssh.name(),
        category => category.name(),
    }
}

/// SuperEdge's ping, the same message in both directions.
pub fn heartbeat(node: &NodeName) -> StreamMsg {
    StreamMsg {
        node: node.as_str().into(),
        category: STREAM.into(),
        r#type: HEARTBEAT.into(),
        topic: format!("{node}{HEARTBEAT}"),
        ..StreamMsg::default()
    }
}

/// The peer has closed both directions.
fn is_fully_closed(id: SessionId, session: &PlainSession) -> Decoded {
    let frames = vec![
        SessionFrame::Fin { total: session.received + 1 },
        SessionFrame::Reset {
            epoch: session.epoch,
            refusal: SessionError::new(ErrorCode::NoError, "closed by the far end"),
        },
    ];
    Decoded { id, category: session.category, frames }
}

/// How long after the last byte a finished direction waits for the other, as `closed` ends both.
const HALF_OPEN: Duration = Duration::from_secs(30);
/// How long a target's end waits for the peer to send more.
const AFTER_TARGET: Duration = Duration::from_secs(1);

// Turns a plain peer's messages into frames.

impl PlainCodec {
    /// Handles a message from the peer.
    pub fn on_message(&mut self, message: StreamMsg, now: Instant) -> PlainEvent {
        if message.category == STREAM {
            return if message.r#type == HEARTBEAT {
                PlainEvent::Heartbeat
            } else {
                PlainEvent::Unknown("unknown_type")
            };
        }
        let Some(category) = Category::from_name(&message.category) else {
            return PlainEvent::Unknown("unknown_type");
        };
        if !message.node.eq_ignore_ascii_case(self.node.as_str()) {
            return PlainEvent::Unknown("wrong_node");
        }
        let known = self.by_topic.get(&message.topic).copied();
        match (known, message.r#type.as_str()) {
            (None, "connecting") => self.asked(category, message, now),
            (None, "closed") => PlainEvent::Unknown("unknown_session"),
            // The id is checked first: long ones, repeated in a thousand answers, would take gigabytes.
            (None, _) if message.topic.len() > MAX_TOPIC => PlainEvent::Unknown("bad_session_id"),
            (None, _) => self.answer("closed", category, message.topic, SESSION_GONE_TEXT.into()),
            (Some(id), _) => self.on_session_message(id, message, now),
        }
    }

    fn asked(&mut self, category: Category, message: StreamMsg, now: Instant) -> PlainEvent {
        let target: Result<Target, _> = message.addr.parse();
        let fits = message.topic.len() <= MAX_TOPIC && self.sessions.len() < MAX_SESSIONS;
        let (Ok(target), true) = (target, fits) else {
            let text = format!("cannot connect to {:.100}: want host:port", message.addr);
            let topic = message.topic.chars().take(MAX_TOPIC).collect();
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
        PlainEvent::Session(Decoded { id, category, frames: vec![open] })
    }

    fn on_session_message(&mut self, id: SessionId, message: StreamMsg, now: Instant) -> PlainEvent {
        let Some(session) = self.sessions.get_mut(&id) else { return PlainEvent::Unknown("unknown_session") };
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
                let decoded = is_fully_closed(id, session);
                self.drop_session(id);
                decoded.frames
            }
            _ => return PlainEvent::Unknown("unknown_type"),
        };
        PlainEvent::Session(Decoded { id, category, frames })
    }

    /// Answers a message about an unknown session; beyond [`MAX_WAITING`] waiting answers the peer gets none.
    fn answer(&mut self, kind: &str, category: Category, topic: String, data: Bytes) -> PlainEvent {
        if self.waiting.len() < MAX_WAITING {
            self.send(category, kind, topic, data);
        }
        PlainEvent::Answered
    }
}

/// The answer to a session of an HTTPS front end, given in the peer's place: no generation of SuperEdge that links here
/// uses TLS to targets.
pub(crate) fn speaks_no_tls(id: SessionId, epoch: u64) -> Decoded {
    let refusal = SessionError::new(ErrorCode::TargetUnreachable, NO_TLS);
    Decoded { id, category: Category::Https, frames: vec![SessionFrame::Refused { refusal, epoch }] }
}

/// The code for Go's text of a failed dial.
fn refusal(text: &Bytes) -> SessionError {
    let text = String::from_utf8_lossy(text);
    let code = if text.contains("refused") {
        ErrorCode::TargetRefused
    } else if text.contains("timeout") || text.contains("timed out") {
        ErrorCode::TargetTimeout
    } else {
        ErrorCode::TargetUnreachable
    };
    SessionError::new(code, text)
}

/// Longest topic of a plain peer in bytes; it may be any text.
pub(crate) const MAX_TOPIC: usize = 256;
/// Answers that may wait for one link.
const MAX_WAITING: usize = 1000;
/// Sessions of one plain link at most: bounds the memory that a peer can take.
const MAX_SESSIONS: usize = 20_000;
/// SuperEdge's text for a message about a session that is gone.
const SESSION_GONE_TEXT: &str = "msg cannot be forwarded due to disconnection";
/// Names the two ways out.
const NO_TLS: &str = "its edge is SuperEdge's, which speaks no TLS to targets: set mode = \"passthrough\" in \
                      [mode.cloud.https], or run this program's edge there";

#[cfg(test)]
mod tests;
