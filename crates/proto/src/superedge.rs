//! Represents a plain remote: translates frames to SuperEdge's messages, and back.
//!
//! Two generations are served (docs/reference/superedge-wire.md#generations), and [`generations`] finds out which one a
//! remote is. What only one of them does is in this module for the newest, and in [`g4`] for v0.8 and v0.9. A session
//! keeps the generation that it started with.
//!
//! A plain remote knows no limits, no half-close and no resume. So its limit is infinite, and bytes handed to the link
//! count as received. A finished direction is remembered until the other is finished as well, and `closed` ends both.
//! When a target has ended, its client usually only waits for that, so `closed` follows soon. Timers stand in for what
//! a remote does not report: each session has at most one, and its meaning depends on the session's state.

pub mod g4;
pub mod generations;

use std::collections::{BTreeSet, HashMap, VecDeque};
use std::time::Duration;

use bytes::Bytes;
use tokio::time::Instant;

use crate::codec::extended::heartbeat;
use crate::codec::proto::StreamMsg;
use crate::frame::{ErrorCode, Frame, FrameKind, SessionCategory, SessionError, SessionFrame};
use crate::names::{NodeName, SessionId, Target};
use crate::superedge::g4::{ANSWER_TIMEOUT, G4Stage, NO_ANSWER};
use crate::superedge::generations::SuperEdgeGeneration;

/// The sessions of a link to a program of SuperEdge, with their state.
#[derive(Debug)]
pub struct SuperEdgeTranslator {
    node: NodeName,
    /// Whether the remote is an edge.
    to_edge: bool,
    by_topic: HashMap<String, SessionId>,
    sessions: HashMap<SessionId, PlainSession>,
    /// The timers of sessions, in order of time.
    timers: BTreeSet<(Instant, SessionId)>,
    /// Messages to send. Those that the remote causes are bounded by [`MAX_WAITING`] and [`MAX_SESSIONS`].
    waiting: VecDeque<StreamMsg>,
    generation: Option<SuperEdgeGeneration>,
    probe_topic: String,
    /// When a remote that has not answered the probe is taken for an older one.
    decide_at: Instant,
    /// Sessions to request once the generation is known. Bounded by the sessions of this process.
    held: HashMap<SessionId, RequestedSession>,
    /// Time without traffic after which a session of v0.8 or v0.9 ends.
    idle_timeout: Duration,
    /// Topics of v0.8 and v0.9 that were closed here: bytes that cross `closed` must not make this end dial again. At
    /// most [`MAX_CLOSED`](g4::MAX_CLOSED).
    closed: VecDeque<String>,
    /// Bytes of all sessions that wait for their dial here, with an overhead for each piece.
    early: usize,
}

/// The state of a session with a plain remote.
#[derive(Debug)]
struct PlainSession {
    generation: SuperEdgeGeneration,
    topic: String,
    category: SessionCategory,
    /// Whether the target is at this end.
    accepted: bool,
    /// Category of the messages from here.
    wire_category: SessionCategory,
    /// Type of those with data.
    data_type: &'static str,
    /// Target that they repeat; empty if they do not.
    addr: String,
    /// What a session of v0.8 or v0.9 waits for; others are open.
    stage: G4Stage,
    epoch: u64,
    /// Bytes sent to the remote.
    sent: u64,
    /// Bytes received from the remote.
    received: u64,
    /// When our direction was finished. `closed` is sent once the remote's is finished as well, or after [`HALF_OPEN`]
    /// without traffic.
    finished: Option<Instant>,
    /// Whether the remote has sent bytes after our direction was finished.
    received_after_fin: bool,
    last: Instant,
    /// Time of its entry in [`SuperEdgeTranslator::timers`].
    timer: Option<Instant>,
}

impl PlainSession {
    /// Creates a session of the newest generation.
    fn new(topic: String, category: SessionCategory, epoch: u64, accepted: bool, now: Instant) -> Self {
        // A plain remote no longer has a category for TCP ports, and `ssh` has the same effect.
        let wire_category = if category == SessionCategory::Tcp { SessionCategory::Ssh } else { category };
        Self {
            generation: SuperEdgeGeneration::G5,
            topic,
            category,
            accepted,
            wire_category,
            data_type: "tcp-forward",
            addr: String::new(),
            stage: G4Stage::Open,
            epoch,
            sent: 0,
            received: 0,
            finished: None,
            received_after_fin: false,
            last: now,
            timer: None,
        }
    }

    /// Returns when its timer is due, as things are now.
    fn deadline(&self, idle_timeout: Duration) -> Option<Instant> {
        let is_g4 = self.generation == SuperEdgeGeneration::G4;
        let idle = is_g4.then(|| self.last + idle_timeout);
        let half_open = if self.waits_for_client() { AFTER_TARGET } else { HALF_OPEN };
        let half_open = self.finished.map(|_| self.last + half_open);
        [idle, self.stage.deadline(), half_open].into_iter().flatten().min()
    }

    /// Returns true if the target here has ended, and the client has sent nothing since.
    fn waits_for_client(&self) -> bool {
        self.accepted && self.finished.is_some() && !self.received_after_fin
    }

    fn opened(&self) -> SessionFrame {
        SessionFrame::opened(u64::MAX, self.epoch)
    }

    fn receive(&mut self, data: Bytes) -> SessionFrame {
        self.received_after_fin |= self.finished.is_some();
        self.received += u64::try_from(data.len()).unwrap_or(u64::MAX);
        SessionFrame::Data(data)
    }

    /// Returns true if the remote handles `closed`.
    fn is_closable(&self) -> bool {
        self.generation == SuperEdgeGeneration::G5 || self.wire_category != SessionCategory::HttpProxy
    }

    /// Returns the frames for this end if the remote has closed both directions.
    fn closing(&self) -> Vec<SessionFrame> {
        let refusal = SessionError::new(ErrorCode::NoError, "closed by remote");
        vec![
            SessionFrame::Fin { total: self.received + 1 },
            SessionFrame::Reset { epoch: self.epoch, refusal },
        ]
    }
}

/// A session that this end requests.
#[derive(Debug)]
struct RequestedSession {
    id: SessionId,
    category: SessionCategory,
    target: Target,
    epoch: u64,
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
    /// The reply is queued: [`SuperEdgeTranslator::next_message`] returns it.
    Answered,
    /// An unknown message, with the cause for metrics.
    Unknown(&'static str),
}

impl SuperEdgeTranslator {
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

    fn send_session_frame(
        &mut self,
        id: SessionId,
        category: SessionCategory,
        frame: SessionFrame,
        now: Instant,
    ) -> Option<Decoded> {
        match &frame {
            SessionFrame::Open { target, epoch, .. } => {
                let target = target.clone();
                return self.request(RequestedSession { id, category, target, epoch: *epoch }, now);
            }
            SessionFrame::Resume { epoch, .. } => {
                return Some(self.end_confirmed(id, category, *epoch, "EOF"));
            }
            SessionFrame::ResetAt { refusal, .. } => {
                return Some(self.end_confirmed(id, category, 0, &refusal.reason));
            }
            // The only other frame of such a session ends it, and the remote does not know it.
            _ if self.held.remove(&id).is_some() => return None,
            _ => {}
        }
        let session = self.sessions.get_mut(&id)?;
        let frames = match frame {
            SessionFrame::Opened { epoch, .. } => {
                (session.epoch, session.last) = (epoch, now);
                if session.generation == SuperEdgeGeneration::G4 {
                    self.accepted_g4(id)
                } else {
                    self.send_message(id, "connected", Bytes::new());
                    Vec::new()
                }
            }
            SessionFrame::Data(bytes) => {
                session.last = now;
                session.sent += u64::try_from(bytes.len()).unwrap_or(u64::MAX);
                session.stage.on_data_sent(now);
                let received = session.sent;
                self.send_data(id, bytes);
                vec![SessionFrame::Credit { received, limit: u64::MAX }]
            }
            SessionFrame::Fin { total } => {
                (session.finished, session.last) = (Some(now), now);
                vec![SessionFrame::Credit { received: total, limit: u64::MAX }]
            }
            SessionFrame::Refused { refusal, .. } if session.generation == SuperEdgeGeneration::G5 => {
                self.send_message(id, "connect-failed", refusal.reason.into());
                self.remove(id);
                return None;
            }
            SessionFrame::Refused { refusal, .. } | SessionFrame::Reset { refusal, .. } => {
                self.answer_failed_access(id, &refusal);
                self.end(id, if refusal.code == ErrorCode::NoError { "EOF" } else { &refusal.reason });
                return None;
            }
            SessionFrame::PathLost { .. } => {
                self.end(id, "session moved to another path");
                return None;
            }
            _ => return None,
        };
        self.advance_timer(id);
        (!frames.is_empty()).then_some(Decoded { id, category, frames })
    }

    /// Requests a session from a remote of the newest generation.
    fn open(&mut self, requested: RequestedSession, now: Instant) {
        let RequestedSession { id, category, target, epoch } = requested;
        let session = PlainSession::new(id.topic(), category, epoch, false, now);
        let addr = self.address(&target);
        let text = format!("CONNECT {addr} HTTP/1.1\r\n\r\n\r\n");
        self.waiting.push_back(StreamMsg { addr, ..self.message(&session, "connecting", text.into()) });
        self.insert(id, session);
    }

    /// Returns the target in a form that SuperEdge's edge at that node can dial. The node's own name may not resolve
    /// there, so it becomes loopback.
    fn address(&self, target: &Target) -> String {
        if self.node.matches_host(&target.host) {
            format!("127.0.0.1:{}", target.port)
        } else {
            target.to_string()
        }
    }

    /// Returns the next message to send.
    pub fn next_message(&mut self) -> Option<StreamMsg> {
        self.waiting.pop_front()
    }

    /// Returns true if messages wait to be sent.
    pub fn has_messages(&self) -> bool {
        !self.waiting.is_empty()
    }

    /// Sends data of a session.
    fn send_data(&mut self, id: SessionId, data: Bytes) {
        let Some(kind) = self.sessions.get(&id).map(|session| session.data_type) else { return };
        self.send_message(id, kind, data);
    }

    fn send_message(&mut self, id: SessionId, kind: &str, data: Bytes) {
        let Some(session) = self.sessions.get(&id) else { return };
        self.waiting.push_back(self.message(session, kind, data));
    }

    fn message(&self, session: &PlainSession, kind: &str, data: Bytes) -> StreamMsg {
        StreamMsg {
            node: self.node.as_str().to_owned(),
            category: session.wire_category.name().into(),
            r#type: kind.into(),
            topic: session.topic.clone(),
            data,
            addr: session.addr.clone(),
        }
    }

    /// Sends a reply to a message about an unknown session. Beyond [`MAX_WAITING`] queued messages there is none.
    fn answer(&mut self, reply: StreamMsg) -> PlainEvent {
        if self.waiting.len() < MAX_WAITING {
            self.waiting.push_back(reply);
        }
        PlainEvent::Answered
    }

    /// Ends a session at the remote, if that handles `closed`.
    fn end(&mut self, id: SessionId, text: &str) {
        let closable = self.sessions.get(&id).is_some_and(PlainSession::is_closable);
        // A remote that does not read must not fill the queue by opening sessions.
        if closable && self.waiting.len() < MAX_SESSIONS {
            self.send_message(id, "closed", Bytes::copy_from_slice(text.as_bytes()));
        }
        if let Some(session) = self.remove(id)
            && session.is_closable()
        {
            self.remember_closed(session);
        }
    }

    /// Ends a session for its opener's end here, which waits for a confirmation that the remote never sends.
    fn end_confirmed(&mut self, id: SessionId, category: SessionCategory, epoch: u64, text: &str) -> Decoded {
        self.held.remove(&id);
        self.end(id, text);
        let refusal = SessionError::new(ErrorCode::UnknownSession, "SuperEdge's programs resume no sessions");
        Decoded { id, category, frames: vec![SessionFrame::Reset { epoch, refusal }] }
    }

    fn insert(&mut self, id: SessionId, session: PlainSession) {
        self.remove(id);
        self.by_topic.insert(session.topic.clone(), id);
        self.sessions.insert(id, session);
        self.reset_timer(id);
    }

    fn remove(&mut self, id: SessionId) -> Option<PlainSession> {
        let session = self.sessions.remove(&id)?;
        self.by_topic.remove(&session.topic);
        if let Some(at) = session.timer {
            self.timers.remove(&(at, id));
        }
        self.early = self.early.saturating_sub(session.stage.early());
        Some(session)
    }

    /// Sets a session's timer to its deadline.
    fn reset_timer(&mut self, id: SessionId) {
        let Some(session) = self.sessions.get_mut(&id) else { return };
        let next = session.deadline(self.idle_timeout);
        if let Some(before) = std::mem::replace(&mut session.timer, next) {
            self.timers.remove(&(before, id));
        }
        self.timers.extend(next.map(|at| (at, id)));
    }

    /// Sets a session's timer if its deadline is now earlier. A later one is noticed when the timer is due, so that
    /// data does not reorder the timers.
    fn advance_timer(&mut self, id: SessionId) {
        let idle = self.idle_timeout;
        let sooner = |session: &PlainSession| {
            session.deadline(idle).is_some_and(|at| session.timer.is_none_or(|timer| at < timer))
        };
        if self.sessions.get(&id).is_some_and(sooner) {
            self.reset_timer(id);
        }
    }

    /// Returns when to call [`Self::due`], if nothing changes.
    pub fn next_due(&self) -> Option<Instant> {
        let timer = self.timers.first().map(|(at, _)| *at);
        let undecided = self.generation.is_none().then_some(self.decide_at);
        undecided.into_iter().chain(timer).min()
    }

    /// Returns the sessions for which [`Self::handle_due`] must be called.
    pub fn due(&mut self, now: Instant) -> Vec<SessionId> {
        if self.generation.is_none() && now >= self.decide_at {
            self.decide(SuperEdgeGeneration::G4, now);
        }
        self.timers.iter().take_while(|(at, _)| *at <= now).map(|(_, id)| *id).collect()
    }

    /// Handles a session's timer. `taken` is true if the target here has received all bytes from the remote. Returns
    /// the frames for this end.
    pub fn handle_due(&mut self, id: SessionId, taken: bool, now: Instant) -> Option<Decoded> {
        let session = self.sessions.get_mut(&id)?;
        let category = session.category;
        let epoch = session.epoch;
        if session.deadline(self.idle_timeout).is_none_or(|at| at > now) {
            self.reset_timer(id);
            return None;
        }
        let reset = |code, reason: String| {
            vec![SessionFrame::Reset { epoch, refusal: SessionError::new(code, reason) }]
        };
        let frames = match &session.stage {
            G4Stage::Dialling { .. } => {
                session.stage = G4Stage::Unanswered { since: None };
                let opened = session.opened();
                self.reset_timer(id);
                return Some(Decoded { id, category, frames: vec![opened] });
            }
            G4Stage::Unanswered { since: Some(since) } if now - *since >= ANSWER_TIMEOUT => {
                reset(ErrorCode::TargetTimeout, NO_ANSWER.into())
            }
            // A target that reads nothing any longer must not keep the session.
            _ if session.waits_for_client()
                && !taken
                && session.finished.is_some_and(|at| now - at < HALF_OPEN) =>
            {
                session.last = now;
                self.reset_timer(id);
                return None;
            }
            _ if session.finished.is_some() => session.closing(),
            _ => {
                let idle = self.idle_timeout;
                reset(ErrorCode::Cancelled, format!("no bytes for {idle:?}; SuperEdge v0.9 reports no ends"))
            }
        };
        self.end(id, "EOF");
        Some(Decoded { id, category, frames })
    }

    /// Handles a message about a session that is known.
    fn handle_session_message(&mut self, id: SessionId, message: StreamMsg, now: Instant) -> PlainEvent {
        let Some(session) = self.sessions.get_mut(&id) else { return PlainEvent::Unknown("unknown_session") };
        session.last = now;
        let category = session.category;
        let epoch = session.epoch;
        let frames = match (session.generation, message.r#type.as_str()) {
            (_, "closed") => {
                let frames = session.closing();
                self.remove(id);
                frames
            }
            (SuperEdgeGeneration::G4, "frontend" | "backend") => {
                return self.handle_data(id, message.data, now);
            }
            (SuperEdgeGeneration::G5, "connected") => vec![session.opened()],
            (SuperEdgeGeneration::G5, "connect-failed") => {
                self.remove(id);
                vec![SessionFrame::Refused { epoch, refusal: refusal(&message.data) }]
            }
            (SuperEdgeGeneration::G5, "tcp-forward") => vec![session.receive(message.data)],
            _ => return PlainEvent::Unknown("unknown_type"),
        };
        PlainEvent::Session(Decoded { id, category, frames })
    }

    /// Handles a message of the newest generation about a session that is not known.
    fn handle_other_message(
        &mut self,
        category: SessionCategory,
        message: StreamMsg,
        now: Instant,
    ) -> PlainEvent {
        match message.r#type.as_str() {
            "connecting" => self.handle_connecting(category, message, now),
            "closed" => PlainEvent::Unknown("unknown_session"),
            // Check the length of the id first: long ids repeated in a thousand replies would take gigabytes.
            _ if message.topic.len() > MAX_TOPIC => PlainEvent::Unknown("bad_session_id"),
            _ => self.answer(reply(&message, "closed", SESSION_CLOSED_TEXT.into())),
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
            let failed = StreamMsg { topic: message.topic.chars().take(MAX_TOPIC).collect(), ..message };
            return self.answer(reply(&failed, "connect-failed", text.into()));
        };
        let id = SessionId::random();
        self.insert(id, PlainSession::new(message.topic, category, 1, true, now));
        requested_by_remote(id, category, target)
    }
}

/// Returns the request of a plain remote for a session here.
fn requested_by_remote(id: SessionId, category: SessionCategory, target: Target) -> PlainEvent {
    let client = "a plain remote".into();
    let open = SessionFrame::open(target, u64::MAX, 1, client);
    PlainEvent::Session(Decoded { id, category, frames: vec![open] })
}

/// Returns a reply to a message of which only the length of the topic was checked.
fn reply(to: &StreamMsg, kind: &str, data: Bytes) -> StreamMsg {
    let node = to.node.clone();
    let category = to.category.clone();
    let topic = to.topic.clone();
    StreamMsg { node, category, r#type: kind.into(), topic, data, addr: String::new() }
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

/// Time after the last byte for which a finished direction waits for the other, because `closed` ends both.
const HALF_OPEN: Duration = Duration::from_secs(30);
/// Time after the end of a target in which the remote may send more.
const AFTER_TARGET: Duration = Duration::from_secs(1);
/// Maximum length of a plain remote's topic in bytes; it may be any text.
const MAX_TOPIC: usize = 256;
/// Maximum number of replies queued for one link.
const MAX_WAITING: usize = 1000;
/// Maximum number of sessions per plain link: bounds the memory that a remote can use.
const MAX_SESSIONS: usize = 20_000;
/// SuperEdge's text for a message about a closed session.
const SESSION_CLOSED_TEXT: &str = "msg cannot be forwarded due to disconnection";

#[cfg(test)]
mod tests;
