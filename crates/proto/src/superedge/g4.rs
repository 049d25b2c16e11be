//! Represents a remote of SuperEdge v0.8 or v0.9: translates frames to its messages, and back.
//!
//! Such a remote reports neither the result of a dial nor an end
//! (docs/reference/superedge-wire.md#sessions-of-v08-and-v09). Timers stand in for both: each session has one, and its
//! meaning depends on the session's stage.

use std::collections::{BTreeSet, HashMap, VecDeque};
use std::time::Duration;

use bytes::{Bytes, BytesMut};
use tokio::time::Instant;

use super::{
    AFTER_TARGET, Decoded, HALF_OPEN, MAX_SESSIONS, MAX_TOPIC, MAX_WAITING, PlainEvent, SESSION_CLOSED_TEXT,
};
use crate::codec::proto::StreamMsg;
use crate::frame::{ErrorCode, SessionCategory, SessionError, SessionFrame};
use tunnel_base::names::{NodeName, SessionId, Target};

/// The sessions of a link to such a remote, with their state.
#[derive(Debug)]
pub struct G4Codec {
    node: NodeName,
    /// Whether the remote is an edge. It dials on `frontend`, and its clients send `access`.
    to_edge: bool,
    /// Time without traffic after which a session ends.
    idle_timeout: Duration,
    by_topic: HashMap<String, SessionId>,
    sessions: HashMap<SessionId, SuperEdgeG4Session>,
    /// The timer of each session, in order of time.
    timers: BTreeSet<(Instant, SessionId)>,
    /// Messages to send; those that the remote causes are bounded by [`MAX_WAITING`] and [`MAX_SESSIONS`].
    waiting: VecDeque<StreamMsg>,
    /// Topics that were closed here: bytes that cross `closed` must not make this end dial again. At most
    /// [`MAX_CLOSED`].
    closed: VecDeque<String>,
    /// Bytes of all sessions that wait for their dial here, with [`PIECE_COST`] for each piece.
    early: usize,
}

/// The state of a session with such a remote.
#[derive(Debug)]
struct SuperEdgeG4Session {
    topic: String,
    category: SessionCategory,
    /// Target, which every message repeats.
    addr: String,
    role: PlainSessionRole,
    stage: PlainSessionStage,
    epoch: u64,
    sent: u64,
    received: u64,
    /// Whether our direction is finished.
    finished: bool,
    /// Whether the remote has sent bytes after our direction was finished.
    received_after_fin: bool,
    last: Instant,
    /// Time of its entry in [`G4Codec::timers`].
    timer: Instant,
}

/// The end that has the client or the target here.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum PlainSessionRole {
    /// A client here; the edge dials.
    Client,
    /// A client here, at an edge; the server answers `access`.
    EdgeClient,
    /// The target of a `frontend`, at an edge.
    Target,
    /// The target of an `access`, which is answered in the session.
    AccessTarget,
}

#[derive(Debug)]
enum PlainSessionStage {
    /// The edge was made to dial. The client waits for its response.
    Dialling,
    /// The client has its response, and the target has sent nothing since the client's first bytes, if any.
    Unanswered { since: Option<Instant> },
    /// The server was asked; the start of its response.
    Requested { head: BytesMut },
    /// The target is dialled here; the bytes for it.
    Accepting { early: VecDeque<Bytes>, bytes: usize },
    /// Bytes are transferred.
    Open,
}

impl SuperEdgeG4Session {
    /// Returns when its timer is due, as things are now.
    fn deadline(&self, idle_timeout: Duration) -> Instant {
        let idle = self.last + idle_timeout;
        let deadline = match &self.stage {
            PlainSessionStage::Dialling => self.last + OPEN_AFTER,
            PlainSessionStage::Unanswered { since: Some(since) } => idle.min(*since + ANSWER_TIMEOUT),
            _ => idle,
        };
        let half_open = if self.waits_for_client() { AFTER_TARGET } else { HALF_OPEN };
        if self.finished { deadline.min(self.last + half_open) } else { deadline }
    }

    /// Returns true if the target here has ended, and the client has sent nothing since.
    fn waits_for_client(&self) -> bool {
        self.finished
            && !self.received_after_fin
            && matches!(self.role, PlainSessionRole::Target | PlainSessionRole::AccessTarget)
    }

    /// Returns the category of its messages.
    fn wire_category(&self) -> SessionCategory {
        match (self.role, self.category) {
            // An edge handles `closed` in these two categories only; they are the same otherwise.
            (PlainSessionRole::Client, SessionCategory::Egress) => SessionCategory::Egress,
            (PlainSessionRole::Client, _) => SessionCategory::Ssh,
            (PlainSessionRole::EdgeClient, _) => SessionCategory::HttpProxy,
            (PlainSessionRole::Target | PlainSessionRole::AccessTarget, category) => category,
        }
    }

    /// Returns the type of the messages with data from here.
    fn data_type(&self) -> &'static str {
        if self.role == PlainSessionRole::Client { "frontend" } else { "backend" }
    }

    /// Returns true if the remote handles `closed`.
    fn is_closable(&self) -> bool {
        self.wire_category() != SessionCategory::HttpProxy
    }

    fn early(&self) -> usize {
        if let PlainSessionStage::Accepting { bytes, .. } = &self.stage { *bytes } else { 0 }
    }

    fn opened(&self) -> SessionFrame {
        SessionFrame::Opened { limit: u64::MAX, epoch: self.epoch, instance: None }
    }

    fn receive(&mut self, data: Bytes) -> SessionFrame {
        self.received_after_fin |= self.finished;
        self.received += u64::try_from(data.len()).unwrap_or(u64::MAX);
        SessionFrame::Data(data)
    }
}

impl G4Codec {
    /// Creates the state of a new link to or from `node`. Sessions without traffic end after `idle_timeout`.
    pub fn new(node: NodeName, to_edge: bool, idle_timeout: Duration) -> Self {
        Self {
            node,
            to_edge,
            idle_timeout,
            by_topic: HashMap::new(),
            sessions: HashMap::new(),
            timers: BTreeSet::new(),
            waiting: VecDeque::new(),
            closed: VecDeque::new(),
            early: 0,
        }
    }

    /// Returns true if it has this session.
    pub fn has(&self, id: SessionId) -> bool {
        self.sessions.contains_key(&id)
    }

    /// Returns true if it has a session with this topic.
    pub fn has_topic(&self, topic: &str) -> bool {
        self.by_topic.contains_key(topic)
    }

    /// Returns the next message to send.
    pub fn next_message(&mut self) -> Option<StreamMsg> {
        self.waiting.pop_front()
    }

    /// Returns true if messages wait to be sent.
    pub fn has_messages(&self) -> bool {
        !self.waiting.is_empty()
    }

    /// Returns the bytes of a session, and of all sessions, that wait for a dial here. Returns 0 for both if none of
    /// the session do.
    pub fn early(&self, id: SessionId) -> (usize, usize) {
        match self.sessions.get(&id).map_or(0, SuperEdgeG4Session::early) {
            0 => (0, 0),
            bytes => (bytes, self.early),
        }
    }

    /// Sends a frame of a session. Returns the frames that the local session gets at once, because the remote does not
    /// send them.
    pub fn send_frame(
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
        let frames = match frame {
            SessionFrame::Opened { epoch, .. } => {
                (session.epoch, session.last) = (epoch, now);
                self.accepted(id)
            }
            SessionFrame::Data(bytes) => {
                session.last = now;
                session.sent += u64::try_from(bytes.len()).unwrap_or(u64::MAX);
                if let PlainSessionStage::Unanswered { since } = &mut session.stage {
                    since.get_or_insert(now);
                }
                let received = session.sent;
                self.send_data(id, bytes);
                vec![SessionFrame::Credit { received, limit: u64::MAX }]
            }
            SessionFrame::Fin { total } => {
                (session.finished, session.last) = (true, now);
                vec![SessionFrame::Credit { received: total, limit: u64::MAX }]
            }
            SessionFrame::Refused { refusal, .. } | SessionFrame::Reset { refusal, .. } => {
                let normal = refusal.code == ErrorCode::NoError;
                if session.role == PlainSessionRole::AccessTarget
                    && matches!(session.stage, PlainSessionStage::Accepting { .. })
                {
                    self.send_data(id, failure(&refusal));
                }
                self.end(id, if normal { "EOF" } else { &refusal.reason });
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

    fn open(&mut self, id: SessionId, category: SessionCategory, target: &Target, epoch: u64, now: Instant) {
        self.end(id, "opened again");
        let (role, stage, addr) = if self.to_edge {
            (PlainSessionRole::Client, PlainSessionStage::Dialling, super::address(&self.node, target))
        } else {
            (
                PlainSessionRole::EdgeClient,
                PlainSessionStage::Requested { head: BytesMut::new() },
                target.to_string(),
            )
        };
        let request = format!("CONNECT {addr} HTTP/1.1\r\nHost: {addr}\r\n\r\n");
        let session = SuperEdgeG4Session::new(id.topic(), category, addr, role, stage, now);
        self.insert(id, SuperEdgeG4Session { epoch, ..session });
        if role == PlainSessionRole::Client {
            // Makes the edge dial at once, so that targets that speak first work.
            self.send_data(id, Bytes::new());
        } else {
            self.send_message(id, "access", request.into());
        }
    }

    /// Handles that the target here was reached. Returns the bytes that arrived before.
    fn accepted(&mut self, id: SessionId) -> Vec<SessionFrame> {
        let Some(session) = self.sessions.get_mut(&id) else { return Vec::new() };
        let PlainSessionStage::Accepting { early, bytes } =
            std::mem::replace(&mut session.stage, PlainSessionStage::Open)
        else {
            return Vec::new();
        };
        self.early = self.early.saturating_sub(bytes);
        let frames = early.into_iter().map(|data| session.receive(data)).collect();
        if session.role == PlainSessionRole::AccessTarget {
            self.send_data(id, ESTABLISHED.into());
        }
        frames
    }

    /// Returns when to call [`Self::due`].
    pub fn next_due(&self) -> Option<Instant> {
        self.timers.first().map(|(at, _)| *at)
    }

    /// Returns the sessions for which [`Self::handle_due`] must be called.
    pub fn due(&self, now: Instant) -> Vec<SessionId> {
        self.timers.iter().take_while(|(at, _)| *at <= now).map(|(_, id)| *id).collect()
    }

    /// Handles a session's timer. `taken` is true if the target here has received all bytes from the remote. Returns
    /// the frames for this end.
    pub fn handle_due(&mut self, id: SessionId, taken: bool, now: Instant) -> Option<Decoded> {
        let session = self.sessions.get_mut(&id)?;
        if session.deadline(self.idle_timeout) <= now {
            let (category, epoch) = (session.category, session.epoch);
            let reset = |code, reason: String| {
                vec![SessionFrame::Reset { epoch, refusal: SessionError::new(code, reason) }]
            };
            let frames = match &session.stage {
                PlainSessionStage::Dialling => {
                    session.stage = PlainSessionStage::Unanswered { since: None };
                    let opened = session.opened();
                    self.reset_timer(id);
                    return Some(Decoded { id, category, frames: vec![opened] });
                }
                PlainSessionStage::Unanswered { since: Some(since) } if now - *since >= ANSWER_TIMEOUT => {
                    reset(ErrorCode::TargetTimeout, NO_ANSWER.into())
                }
                _ if session.waits_for_client() && !taken => {
                    session.last = now;
                    self.reset_timer(id);
                    return None;
                }
                _ if session.finished => super::closing(session.received, epoch),
                _ => {
                    let idle = self.idle_timeout;
                    reset(
                        ErrorCode::Cancelled,
                        format!("no bytes for {idle:?}; SuperEdge v0.9 reports no ends"),
                    )
                }
            };
            self.end(id, "EOF");
            return Some(Decoded { id, category, frames });
        }
        self.reset_timer(id);
        None
    }

    /// Ends a session that has too many bytes for a target that is not reached yet. Returns the frames for this end.
    pub fn give_up_early(&mut self, id: SessionId) -> Option<Decoded> {
        let session = self.sessions.get(&id).filter(|session| session.early() > 0)?;
        let (category, epoch) = (session.category, session.epoch);
        let refusal =
            SessionError::new(ErrorCode::Overloaded, "too many bytes before the target was reached");
        self.end(id, &refusal.reason);
        Some(Decoded { id, category, frames: vec![SessionFrame::Reset { epoch, refusal }] })
    }

    /// Handles a message from the remote.
    pub fn handle_message(&mut self, message: StreamMsg, now: Instant) -> PlainEvent {
        let category = SessionCategory::from_name(&message.category);
        let Some(category @ (SessionCategory::Ssh | SessionCategory::Egress | SessionCategory::HttpProxy)) =
            category
        else {
            return PlainEvent::Unknown("unknown_type");
        };
        if !message.node.eq_ignore_ascii_case(self.node.as_str()) {
            return PlainEvent::Unknown("wrong_node");
        }
        if message.topic.len() > MAX_TOPIC {
            return PlainEvent::Unknown("bad_session_id");
        }
        let known = self.by_topic.get(&message.topic).copied();
        match (known, message.r#type.as_str()) {
            (Some(id), "closed") => self.closed(id),
            (Some(id), "frontend" | "backend") => self.handle_data(id, message.data, now),
            (None, "frontend") if !self.to_edge => self.handle_frontend(category, message, now),
            (None, "access") if self.to_edge && category == SessionCategory::HttpProxy => {
                self.handle_access(message, now)
            }
            (None, "backend") if self.to_edge && category != SessionCategory::HttpProxy => {
                self.answer(closed_message(&message, SESSION_CLOSED_TEXT))
            }
            (None, "backend" | "closed") => PlainEvent::Unknown("unknown_session"),
            _ => PlainEvent::Unknown("unknown_type"),
        }
    }

    fn closed(&mut self, id: SessionId) -> PlainEvent {
        let Some(session) = self.remove(id) else { return PlainEvent::Unknown("unknown_session") };
        let frames = super::closing(session.received, session.epoch);
        PlainEvent::Session(Decoded { id, category: session.category, frames })
    }

    /// Handles the first bytes for a target at this edge.
    fn handle_frontend(&mut self, category: SessionCategory, message: StreamMsg, now: Instant) -> PlainEvent {
        if self.closed.contains(&message.topic) {
            return PlainEvent::Unknown("unknown_session");
        }
        match self.target(&message.addr) {
            Some(target) => self.accept(category, PlainSessionRole::Target, target, message, now),
            None if category == SessionCategory::HttpProxy => PlainEvent::Unknown("bad_target"),
            None => self.answer(closed_message(&message, &bad_target(&message.addr))),
        }
    }

    /// Handles the request of a client at the remote edge.
    fn handle_access(&mut self, message: StreamMsg, now: Instant) -> PlainEvent {
        match self.target(&message.addr) {
            Some(target) => {
                // Its data is the client's request; only the target matters.
                let message = StreamMsg { data: Bytes::new(), ..message };
                self.accept(SessionCategory::HttpProxy, PlainSessionRole::AccessTarget, target, message, now)
            }
            None => {
                let refusal = SessionError::new(ErrorCode::TargetUnreachable, bad_target(&message.addr));
                self.answer(reply(&message, "backend", failure(&refusal)))
            }
        }
    }

    /// Returns the target of a new session, or `None` if there cannot be one.
    fn target(&self, addr: &str) -> Option<Target> {
        let fits = addr.len() <= MAX_ADDR && self.sessions.len() < MAX_SESSIONS;
        addr.parse().ok().filter(|_| fits)
    }

    fn accept(
        &mut self,
        category: SessionCategory,
        role: PlainSessionRole,
        target: Target,
        message: StreamMsg,
        now: Instant,
    ) -> PlainEvent {
        let id = SessionId::random();
        let stage = PlainSessionStage::Accepting { early: VecDeque::new(), bytes: 0 };
        let StreamMsg { topic, addr, data, .. } = message;
        let session = SuperEdgeG4Session::new(topic, category, addr, role, stage, now);
        self.insert(id, session);
        self.handle_data(id, data, now);
        let client = "a plain remote".into();
        let open = SessionFrame::Open { target, limit: u64::MAX, epoch: 1, client, opener: None };
        PlainEvent::Session(Decoded { id, category, frames: vec![open] })
    }

    fn handle_data(&mut self, id: SessionId, data: Bytes, now: Instant) -> PlainEvent {
        let Some(session) = self.sessions.get_mut(&id) else { return PlainEvent::Unknown("unknown_session") };
        session.last = now;
        let category = session.category;
        let mut frames = Vec::new();
        match &mut session.stage {
            PlainSessionStage::Dialling | PlainSessionStage::Unanswered { .. } => {
                if matches!(session.stage, PlainSessionStage::Dialling) {
                    frames.push(session.opened());
                }
                session.stage = PlainSessionStage::Open;
            }
            PlainSessionStage::Requested { head } => {
                head.extend_from_slice(&data);
                return self.handle_response(id);
            }
            PlainSessionStage::Accepting { early, bytes } => {
                if !data.is_empty() {
                    let cost = data.len() + PIECE_COST;
                    early.push_back(data);
                    *bytes += cost;
                    self.early += cost;
                }
                return PlainEvent::Session(Decoded { id, category, frames });
            }
            PlainSessionStage::Open => {}
        }
        if !data.is_empty() {
            frames.push(session.receive(data));
        }
        self.advance_timer(id);
        PlainEvent::Session(Decoded { id, category, frames })
    }

    /// Handles the server's response to `access`, once it is complete: the target's bytes follow it.
    fn handle_response(&mut self, id: SessionId) -> PlainEvent {
        let Some(session) = self.sessions.get_mut(&id) else { return PlainEvent::Unknown("unknown_session") };
        let PlainSessionStage::Requested { head } = &mut session.stage else {
            return PlainEvent::Unknown("unknown_type");
        };
        let (category, epoch) = (session.category, session.epoch);
        let end = head.windows(4).position(|four| four == b"\r\n\r\n");
        if end.is_none() && head.len() < MAX_HEAD {
            return PlainEvent::Session(Decoded { id, category, frames: Vec::new() });
        }
        let rest = head.split_off(end.map_or(head.len(), |end| end + 4)).freeze();
        let text = String::from_utf8_lossy(head);
        let line = text.lines().next().unwrap_or_default();
        if end.is_some() && line.split(' ').nth(1) == Some("200") {
            let mut frames = vec![session.opened()];
            session.stage = PlainSessionStage::Open;
            if !rest.is_empty() {
                frames.push(session.receive(rest));
            }
            return PlainEvent::Session(Decoded { id, category, frames });
        }
        let refusal =
            SessionError::new(ErrorCode::TargetUnreachable, format!("the server responded: {line}"));
        self.remove(id);
        PlainEvent::Session(Decoded { id, category, frames: vec![SessionFrame::Refused { epoch, refusal }] })
    }

    /// Sends data of a session.
    fn send_data(&mut self, id: SessionId, data: Bytes) {
        let Some(kind) = self.sessions.get(&id).map(SuperEdgeG4Session::data_type) else { return };
        self.send_message(id, kind, data);
    }

    fn send_message(&mut self, id: SessionId, kind: &str, data: Bytes) {
        let Some(session) = self.sessions.get(&id) else { return };
        self.waiting.push_back(StreamMsg {
            node: self.node.as_str().to_owned(),
            category: session.wire_category().name().into(),
            r#type: kind.into(),
            topic: session.topic.clone(),
            data,
            addr: session.addr.clone(),
        });
    }

    /// Sends a reply to a message about an unknown session. Beyond [`MAX_WAITING`] queued messages there is none.
    fn answer(&mut self, message: StreamMsg) -> PlainEvent {
        if self.waiting.len() < MAX_WAITING {
            self.waiting.push_back(message);
        }
        PlainEvent::Answered
    }

    /// Ends a session at the remote, if it can be told.
    fn end(&mut self, id: SessionId, text: &str) {
        let closable = self.sessions.get(&id).is_some_and(SuperEdgeG4Session::is_closable);
        // A remote that does not read must not fill the queue by opening sessions.
        if closable && self.waiting.len() < MAX_SESSIONS {
            self.send_message(id, "closed", Bytes::copy_from_slice(text.as_bytes()));
        }
        if let Some(session) = self.remove(id)
            && session.role == PlainSessionRole::Target
            && session.is_closable()
        {
            if self.closed.len() >= MAX_CLOSED {
                self.closed.pop_front();
            }
            self.closed.push_back(session.topic);
        }
    }

    fn insert(&mut self, id: SessionId, session: SuperEdgeG4Session) {
        self.by_topic.insert(session.topic.clone(), id);
        self.timers.insert((session.timer, id));
        self.sessions.insert(id, session);
        self.reset_timer(id);
    }

    fn remove(&mut self, id: SessionId) -> Option<SuperEdgeG4Session> {
        let session = self.sessions.remove(&id)?;
        self.by_topic.remove(&session.topic);
        self.timers.remove(&(session.timer, id));
        self.early = self.early.saturating_sub(session.early());
        Some(session)
    }

    /// Sets a session's timer to its deadline.
    fn reset_timer(&mut self, id: SessionId) {
        let Some(session) = self.sessions.get_mut(&id) else { return };
        self.timers.remove(&(session.timer, id));
        session.timer = session.deadline(self.idle_timeout);
        self.timers.insert((session.timer, id));
    }

    /// Sets a session's timer if its deadline is now earlier. A later one is noticed when the timer is due, so that
    /// data does not reorder the timers.
    fn advance_timer(&mut self, id: SessionId) {
        let sooner = |session: &SuperEdgeG4Session| session.deadline(self.idle_timeout) < session.timer;
        if self.sessions.get(&id).is_some_and(sooner) {
            self.reset_timer(id);
        }
    }
}

impl SuperEdgeG4Session {
    fn new(
        topic: String,
        category: SessionCategory,
        addr: String,
        role: PlainSessionRole,
        stage: PlainSessionStage,
        now: Instant,
    ) -> Self {
        Self {
            topic,
            category,
            addr,
            role,
            stage,
            epoch: 1,
            sent: 0,
            received: 0,
            finished: false,
            received_after_fin: false,
            last: now,
            timer: now,
        }
    }
}

fn closed_message(to: &StreamMsg, text: &str) -> StreamMsg {
    reply(to, "closed", Bytes::copy_from_slice(text.as_bytes()))
}

/// Returns a reply to a message of which only the length of the topic was checked.
fn reply(to: &StreamMsg, kind: &str, data: Bytes) -> StreamMsg {
    let addr = if to.addr.len() <= MAX_ADDR { to.addr.clone() } else { String::new() };
    let (node, category, topic) = (to.node.clone(), to.category.clone(), to.topic.clone());
    StreamMsg { node, category, r#type: kind.into(), topic, data, addr }
}

fn bad_target(addr: &str) -> String {
    format!("cannot connect to {addr:.100}: expected host:port, or too many sessions")
}

/// Returns the response for a client of an edge whose request failed.
fn failure(refusal: &SessionError) -> Bytes {
    let status = match refusal.code {
        ErrorCode::TargetTimeout => "504 Gateway Timeout",
        ErrorCode::NotAllowed | ErrorCode::NodeNotAllowed | ErrorCode::OwnPort => "403 Forbidden",
        ErrorCode::Overloaded => "503 Service Unavailable",
        _ => "502 Bad Gateway",
    };
    let body = format!("{}\n", refusal.reason);
    format!("HTTP/1.1 {status}\r\nContent-Length: {}\r\nConnection: close\r\n\r\n{body}", body.len()).into()
}

/// Time for the target's first bytes before the client gets its response anyway: it may have to speak first.
const OPEN_AFTER: Duration = Duration::from_millis(500);
/// Time for the target's first bytes after the client's.
const ANSWER_TIMEOUT: Duration = Duration::from_secs(10);
/// Text for a client that has had no answer in this time.
const NO_ANSWER: &str = "the edge did not answer; SuperEdge v0.9 reports no dial errors";
/// Response to the request of an edge's client.
const ESTABLISHED: &str = "HTTP/1.1 200 Connection established\r\n\r\n";
/// Maximum length of a server's response to such a request, in bytes.
const MAX_HEAD: usize = 8 * 1024;
/// Maximum length of a target in bytes: a name, a colon and a port are shorter.
const MAX_ADDR: usize = 300;
/// Number of closed topics that are remembered.
const MAX_CLOSED: usize = 1000;
/// Bytes that each waiting piece costs in addition to its data.
const PIECE_COST: usize = 64;

#[cfg(test)]
mod tests;
