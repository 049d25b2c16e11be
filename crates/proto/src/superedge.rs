//! Represents a remote with the plain dialect: translates frames to SuperEdge's messages, and back.
//!
//! Implements the newest generation of SuperEdge (docs/reference/superedge-wire.md#generations); [`g4`] is the codec of
//! v0.8 and v0.9, and [`generations`] finds out which of the two a remote needs.
//!
//! A plain remote knows no limits, no half-close and no resume. So its limit is infinite, and bytes handed to the link
//! count as received. A finished direction is remembered until the other is finished as well, and `closed` ends both.
//! When a target has ended, its client usually only waits for that, so `closed` follows soon.

pub mod g4;
pub mod generations;

use std::collections::{HashMap, VecDeque};
use std::time::Duration;

use bytes::Bytes;
use tokio::time::Instant;

use crate::codec::extended::{HEARTBEAT, STREAM, heartbeat};
use crate::codec::proto::StreamMsg;
use crate::frame::{ErrorCode, Frame, FrameKind, SessionCategory, SessionError, SessionFrame};
use tunnel_base::names::{NodeName, SessionId, Target};

/// The sessions of a plain link, with their state.
#[derive(Debug)]
pub struct PlainCodec {
    node: NodeName,
    by_topic: HashMap<String, SessionId>,
    sessions: HashMap<SessionId, PlainSession>,
    /// Messages to send; replies are bounded by [`MAX_WAITING`].
    waiting: VecDeque<StreamMsg>,
    /// Sessions of which the target has ended, with the time of the next check, in order of time.
    ending: VecDeque<(Instant, SessionId)>,
}

/// The state of a session with a plain remote.
#[derive(Debug)]
struct PlainSession {
    topic: String,
    category: SessionCategory,
    epoch: u64,
    /// Bytes sent to the remote.
    sent: u64,
    /// Bytes received from the remote.
    received: u64,
    /// Whether our direction is finished. `closed` is sent once the remote's is finished as well, or after
    /// [`HALF_OPEN`] without traffic.
    finished: bool,
    /// Whether the target is at this end.
    accepted: bool,
    /// Whether the remote has sent bytes after our direction was finished.
    received_after_fin: bool,
    last: Instant,
}

impl PlainSession {
    fn new(topic: String, category: SessionCategory, epoch: u64, accepted: bool, now: Instant) -> Self {
        Self {
            topic,
            category,
            epoch,
            sent: 0,
            received: 0,
            finished: false,
            accepted,
            received_after_fin: false,
            last: now,
        }
    }
}

/// The frames of one session that result from a plain message.
#[derive(Debug, PartialEq)]
pub struct Decoded {
    /// The session.
    pub id: SessionId,
    /// Kind of the listener.
    pub category: SessionCategory,
    /// Frames, in order.
    pub frames: Vec<SessionFrame>,
}

/// The result of a message from the remote.
#[derive(Debug, PartialEq)]
pub enum PlainEvent {
    /// Frames for one session.
    Session(Decoded),
    /// A ping. A server replies with the same message.
    Heartbeat,
    /// The reply is queued: [`PlainCodec::next_message`] returns it.
    Answered,
    /// An unknown message, with the cause for metrics.
    Unknown(&'static str),
}

impl PlainCodec {
    /// Creates the state of a new link to or from `node`.
    pub fn new(node: NodeName) -> Self {
        Self {
            node,
            by_topic: HashMap::new(),
            sessions: HashMap::new(),
            waiting: VecDeque::new(),
            ending: VecDeque::new(),
        }
    }

    /// Sends a frame. Returns the frames that the local session gets at once, because the remote does not send them.
    pub fn send_frame(&mut self, frame: Frame, now: Instant) -> Option<Decoded> {
        match frame.body {
            FrameKind::Ping(_) | FrameKind::Pong(_) => {
                self.waiting.push_back(heartbeat(&self.node));
                None
            }
            FrameKind::Session(id, category, frame) => self.send_session_frame(id, category, frame, now),
            // Never sent: a plain link accepts no signals.
            _ => None,
        }
    }

    /// Returns the next message to send.
    pub fn next_message(&mut self) -> Option<StreamMsg> {
        self.waiting.pop_front()
    }

    /// Sends `closed` for finished sessions that were idle for `HALF_OPEN`.
    pub fn tick(&mut self, now: Instant) -> Vec<Decoded> {
        let late = |s: &PlainSession| s.finished && now - s.last >= HALF_OPEN;
        let ids: Vec<SessionId> = self.sessions.iter().filter(|(_, s)| late(s)).map(|(id, _)| *id).collect();
        ids.into_iter().filter_map(|id| self.close(id)).collect()
    }

    /// Returns the time of the next call to [`Self::ended`], if nothing changes.
    pub fn next_end(&self) -> Option<Instant> {
        self.ending.front().map(|(at, _)| *at)
    }

    /// Returns sessions whose target ended some time ago, and whose remote has sent nothing since. The caller closes or
    /// postpones each of them.
    pub fn ended(&mut self, now: Instant) -> Vec<SessionId> {
        let count = self.ending.iter().take_while(|(at, _)| *at <= now).count();
        let due = self.ending.drain(..count).map(|(_, id)| id);
        due.filter(|id| self.sessions.get(id).is_some_and(|session| !session.received_after_fin)).collect()
    }

    /// Postpones the close of a session, because the target has not yet taken all bytes from the remote.
    pub fn postpone_close(&mut self, id: SessionId, now: Instant) {
        self.ending.push_back((now + AFTER_TARGET, id));
    }

    /// Ends a session in both directions. Returns the frames for this end.
    pub fn close(&mut self, id: SessionId) -> Option<Decoded> {
        self.end(id, "EOF").map(|session| closing_frames(id, &session))
    }

    fn send_session_frame(
        &mut self,
        id: SessionId,
        category: SessionCategory,
        frame: SessionFrame,
        now: Instant,
    ) -> Option<Decoded> {
        if let SessionFrame::Open { target, epoch, .. } = frame {
            self.open(id, category, &target, epoch, now);
            return None;
        }
        let session = self.sessions.get_mut(&id)?;
        session.last = now;
        let topic = session.topic.clone();
        let received = match frame {
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
                self.end(id, "session moved to another path");
                return None;
            }
            _ => return None,
        };
        Some(Decoded { id, category, frames: vec![SessionFrame::Credit { received, limit: u64::MAX }] })
    }

    fn open(&mut self, id: SessionId, category: SessionCategory, target: &Target, epoch: u64, now: Instant) {
        let topic = id.topic();
        let addr = address(&self.node, target);
        self.insert(id, PlainSession::new(topic.clone(), category, epoch, false, now));
        let text = format!("CONNECT {addr} HTTP/1.1\r\n\r\n\r\n");
        let message = StreamMsg { addr, ..self.message(category, "connecting", topic, text.into()) };
        self.waiting.push_back(message);
    }

    fn end(&mut self, id: SessionId, text: &str) -> Option<PlainSession> {
        let session = self.drop_session(id)?;
        self.send(session.category, "closed", session.topic.clone(), Bytes::copy_from_slice(text.as_bytes()));
        Some(session)
    }

    fn insert(&mut self, id: SessionId, session: PlainSession) {
        self.by_topic.insert(session.topic.clone(), id);
        self.sessions.insert(id, session);
    }

    fn drop_session(&mut self, id: SessionId) -> Option<PlainSession> {
        let session = self.sessions.remove(&id)?;
        self.by_topic.remove(&session.topic);
        Some(session)
    }

    fn send(&mut self, category: SessionCategory, kind: &str, topic: String, data: Bytes) {
        let message = self.message(category, kind, topic, data);
        self.waiting.push_back(message);
    }

    fn message(&self, category: SessionCategory, kind: &str, topic: String, data: Bytes) -> StreamMsg {
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

/// Returns the name of a category for a plain remote. A plain remote no longer has one for TCP ports, and `ssh` has the
/// same effect.
fn name(category: SessionCategory) -> &'static str {
    match category {
        SessionCategory::Tcp => SessionCategory::Ssh.name(),
        category => category.name(),
    }
}

/// Returns the target in a form that SuperEdge's edge at that node can dial. The node's own name may not resolve there,
/// so it becomes loopback.
fn address(node: &NodeName, target: &Target) -> String {
    if node.matches_host(&target.host) { format!("127.0.0.1:{}", target.port) } else { target.to_string() }
}

/// Returns the frames for a remote that has closed both directions.
fn closing_frames(id: SessionId, session: &PlainSession) -> Decoded {
    Decoded { id, category: session.category, frames: closing(session.received, session.epoch) }
}

fn closing(received: u64, epoch: u64) -> Vec<SessionFrame> {
    let refusal = SessionError::new(ErrorCode::NoError, "closed by remote");
    vec![SessionFrame::Fin { total: received + 1 }, SessionFrame::Reset { epoch, refusal }]
}

/// Time after the last byte for which a finished direction waits for the other, because `closed` ends both.
const HALF_OPEN: Duration = Duration::from_secs(30);
/// Time after the end of a target in which the remote may send more.
const AFTER_TARGET: Duration = Duration::from_secs(1);

impl PlainCodec {
    /// Handles a message from the remote.
    pub fn handle_message(&mut self, message: StreamMsg, now: Instant) -> PlainEvent {
        if message.category == STREAM {
            return if message.r#type == HEARTBEAT {
                PlainEvent::Heartbeat
            } else {
                PlainEvent::Unknown("unknown_type")
            };
        }
        let Some(category) = SessionCategory::from_name(&message.category) else {
            return PlainEvent::Unknown("unknown_type");
        };
        if !message.node.eq_ignore_ascii_case(self.node.as_str()) {
            return PlainEvent::Unknown("wrong_node");
        }
        let known = self.by_topic.get(&message.topic).copied();
        match (known, message.r#type.as_str()) {
            (None, "connecting") => self.handle_connecting(category, message, now),
            (None, "closed") => PlainEvent::Unknown("unknown_session"),
            // Check the length of the id first: long ids repeated in a thousand replies would take gigabytes.
            (None, _) if message.topic.len() > MAX_TOPIC => PlainEvent::Unknown("bad_session_id"),
            (None, _) => self.answer("closed", category, message.topic, SESSION_CLOSED_TEXT.into()),
            (Some(id), _) => self.handle_session_message(id, message, now),
        }
    }

    fn handle_connecting(
        &mut self,
        category: SessionCategory,
        message: StreamMsg,
        now: Instant,
    ) -> PlainEvent {
        let target: Result<Target, _> = message.addr.parse();
        let fits = message.topic.len() <= MAX_TOPIC && self.sessions.len() < MAX_SESSIONS;
        let (Ok(target), true) = (target, fits) else {
            let text = format!("cannot connect to {:.100}: expected host:port", message.addr);
            let topic = message.topic.chars().take(MAX_TOPIC).collect();
            return self.answer("connect-failed", category, topic, text.into());
        };
        let id = SessionId::random();
        self.insert(id, PlainSession::new(message.topic, category, 1, true, now));
        let open = SessionFrame::Open {
            target,
            limit: u64::MAX,
            epoch: 1,
            client: "a plain remote".into(),
            opener: None,
        };
        PlainEvent::Session(Decoded { id, category, frames: vec![open] })
    }

    fn handle_session_message(&mut self, id: SessionId, message: StreamMsg, now: Instant) -> PlainEvent {
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
                session.received_after_fin |= session.finished;
                session.received += u64::try_from(message.data.len()).unwrap_or(u64::MAX);
                vec![SessionFrame::Data(message.data)]
            }
            "closed" => {
                let decoded = closing_frames(id, session);
                self.drop_session(id);
                decoded.frames
            }
            _ => return PlainEvent::Unknown("unknown_type"),
        };
        PlainEvent::Session(Decoded { id, category, frames })
    }

    /// Replies to a message about an unknown session. Beyond [`MAX_WAITING`] queued messages there is no reply.
    fn answer(&mut self, kind: &str, category: SessionCategory, topic: String, data: Bytes) -> PlainEvent {
        if self.waiting.len() < MAX_WAITING {
            self.send(category, kind, topic, data);
        }
        PlainEvent::Answered
    }
}

/// Returns the error code for Go's text of a failed dial.
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

/// Maximum length of a plain remote's topic in bytes; it may be any text.
pub(crate) const MAX_TOPIC: usize = 256;
/// Maximum number of replies queued for one link.
const MAX_WAITING: usize = 1000;
/// Maximum number of sessions per plain link: bounds the memory that a remote can use.
const MAX_SESSIONS: usize = 20_000;
/// SuperEdge's text for a message about a closed session.
const SESSION_CLOSED_TEXT: &str = "msg cannot be forwarded due to disconnection";

#[cfg(test)]
mod tests;
