//! What only sessions with a remote of SuperEdge v0.8 or v0.9 have: stages, and messages of their own.
//!
//! Such a remote reports neither the result of a dial nor an end
//! (docs/reference/superedge-wire.md#sessions-of-v08-and-v09). An edge dials on `frontend`, and its clients send
//! `access`, which a server answers in the session.

use std::collections::VecDeque;
use std::time::Duration;

use bytes::{Bytes, BytesMut};
use tokio::time::Instant;

use super::{
    Decoded, MAX_SESSIONS, MAX_TOPIC, PlainEvent, PlainSession, RequestedSession, SESSION_CLOSED_TEXT,
    SuperEdgeTranslator, reply, requested_by_remote,
};
use crate::codec::proto::StreamMsg;
use crate::frame::{ErrorCode, SessionCategory, SessionError, SessionFrame};
use crate::names::{SessionId, Target};
use crate::superedge::generations::SuperEdgeGeneration;

/// What a session with such a remote waits for.
#[derive(Debug)]
pub(super) enum G4Stage {
    /// The edge was made to dial. The client waits until then for its response.
    Dialling { until: Instant },
    /// The client has its response, and the target has sent nothing since the client's first bytes, if any.
    Unanswered { since: Option<Instant> },
    /// The server was asked; the start of its response.
    Requested { head: BytesMut },
    /// The target is dialled here; the bytes for it.
    Accepting { early: VecDeque<Bytes>, bytes: usize },
    /// Bytes are transferred.
    Open,
}

impl G4Stage {
    /// Returns when the wait ends.
    pub(super) fn deadline(&self) -> Option<Instant> {
        match self {
            Self::Dialling { until } => Some(*until),
            Self::Unanswered { since } => since.map(|since| since + ANSWER_TIMEOUT),
            Self::Requested { .. } | Self::Accepting { .. } | Self::Open => None,
        }
    }

    /// Records that bytes were sent to the remote.
    pub(super) fn on_data_sent(&mut self, now: Instant) {
        if let Self::Unanswered { since } = self {
            since.get_or_insert(now);
        }
    }

    /// Returns the bytes that wait for the dial here.
    pub(super) fn early(&self) -> usize {
        if let Self::Accepting { bytes, .. } = self { *bytes } else { 0 }
    }
}

impl SuperEdgeTranslator {
    /// Requests a session from such a remote.
    pub(super) fn open_g4(&mut self, requested: RequestedSession, now: Instant) {
        let RequestedSession { id, category, target, epoch } = requested;
        self.end(id, "opened again");
        let generation = SuperEdgeGeneration::G4;
        let session = PlainSession::new(id.topic(), category, epoch, false, now);
        if self.to_edge {
            // The only category that all edges since v0.4 have. They handle `closed` in it.
            let wire_category = SessionCategory::Ssh;
            let addr = self.address(&target);
            // The clients of all other listeners speak first, or need no response. kube-apiserver begins with TLS.
            let is_connect = category == SessionCategory::Ssh;
            let stage = G4Stage::Dialling { until: if is_connect { now + OPEN_AFTER } else { now } };
            let data_type = "frontend";
            self.insert(id, PlainSession { generation, wire_category, data_type, addr, stage, ..session });
            // Makes the edge dial at once, so that targets that speak first work.
            self.send_data(id, Bytes::new());
        } else {
            let addr = target.to_string();
            let stage = G4Stage::Requested { head: BytesMut::new() };
            let request = format!("CONNECT {addr} HTTP/1.1\r\nHost: {addr}\r\n\r\n");
            let wire_category = SessionCategory::HttpProxy;
            let data_type = "backend";
            self.insert(id, PlainSession { generation, wire_category, data_type, addr, stage, ..session });
            self.send_message(id, "access", request.into());
        }
    }

    /// Handles that the target here was reached. Returns the bytes that arrived before.
    pub(super) fn accepted_g4(&mut self, id: SessionId) -> Vec<SessionFrame> {
        let Some(session) = self.sessions.get_mut(&id) else { return Vec::new() };
        let G4Stage::Accepting { early, bytes } = std::mem::replace(&mut session.stage, G4Stage::Open) else {
            return Vec::new();
        };
        self.early = self.early.saturating_sub(bytes);
        let frames = early.into_iter().map(|data| session.receive(data)).collect();
        if self.to_edge {
            self.send_data(id, ESTABLISHED.into());
        }
        frames
    }

    /// Sends the reason to the client of an edge whose target was not reached. No other remote expects one.
    pub(super) fn answer_failed_access(&mut self, id: SessionId, why: &SessionError) {
        let accepting = |session: &PlainSession| matches!(session.stage, G4Stage::Accepting { .. });
        if self.to_edge && self.sessions.get(&id).is_some_and(accepting) {
            self.send_data(id, failure(why));
        }
    }

    /// Remembers the topic of a target's session at this edge, so that late bytes for it do not dial again.
    pub(super) fn remember_closed(&mut self, session: PlainSession) {
        if session.generation == SuperEdgeGeneration::G4 && session.accepted && !self.to_edge {
            if self.closed.len() >= MAX_CLOSED {
                self.closed.pop_front();
            }
            self.closed.push_back(session.topic);
        }
    }

    /// Returns the bytes of a session, and of all sessions, that wait for a dial here. Returns 0 for both if none of
    /// the session do.
    pub fn early(&self, id: SessionId) -> (usize, usize) {
        match self.sessions.get(&id).map_or(0, |session| session.stage.early()) {
            0 => (0, 0),
            bytes => (bytes, self.early),
        }
    }

    /// Ends a session that has too many such bytes. Returns the frames for this end.
    pub fn give_up_early(&mut self, id: SessionId) -> Option<Decoded> {
        let session = self.sessions.get(&id).filter(|session| session.stage.early() > 0)?;
        let category = session.category;
        let epoch = session.epoch;
        let refusal =
            SessionError::new(ErrorCode::Overloaded, "too many bytes before the target was reached");
        self.end(id, &refusal.reason);
        Some(Decoded { id, category, frames: vec![SessionFrame::Reset { epoch, refusal }] })
    }

    /// Handles a message of such a remote about a session that is not known.
    pub(super) fn handle_other_g4_message(
        &mut self,
        category: SessionCategory,
        message: StreamMsg,
        now: Instant,
    ) -> PlainEvent {
        if !matches!(category, SessionCategory::Ssh | SessionCategory::Egress | SessionCategory::HttpProxy) {
            return PlainEvent::Unknown("unknown_type");
        }
        if message.topic.len() > MAX_TOPIC {
            return PlainEvent::Unknown("bad_session_id");
        }
        match message.r#type.as_str() {
            "frontend" if !self.to_edge => self.handle_frontend(category, message, now),
            "access" if self.to_edge && category == SessionCategory::HttpProxy => {
                self.handle_access(message, now)
            }
            "backend" if self.to_edge && category != SessionCategory::HttpProxy => {
                self.answer(closed_message(&message, SESSION_CLOSED_TEXT))
            }
            "backend" => PlainEvent::Unknown("unknown_session"),
            _ => PlainEvent::Unknown("unknown_type"),
        }
    }

    /// Handles the first bytes for a target at this edge.
    fn handle_frontend(&mut self, category: SessionCategory, message: StreamMsg, now: Instant) -> PlainEvent {
        if self.closed.contains(&message.topic) {
            return PlainEvent::Unknown("unknown_session");
        }
        match self.target(&message.addr) {
            Some(target) => self.accept(category, target, message, now),
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
                self.accept(SessionCategory::HttpProxy, target, message, now)
            }
            None => {
                let refusal = SessionError::new(ErrorCode::TargetUnreachable, bad_target(&message.addr));
                self.answer(reply_with_target(&message, "backend", failure(&refusal)))
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
        target: Target,
        message: StreamMsg,
        now: Instant,
    ) -> PlainEvent {
        let id = SessionId::random();
        let generation = SuperEdgeGeneration::G4;
        let stage = G4Stage::Accepting { early: VecDeque::new(), bytes: 0 };
        let StreamMsg { topic, addr, data, .. } = message;
        let session = PlainSession::new(topic, category, 1, true, now);
        self.insert(id, PlainSession { generation, data_type: "backend", addr, stage, ..session });
        self.handle_data(id, data, now);
        requested_by_remote(id, category, target)
    }

    /// Handles bytes of a session that is known.
    pub(super) fn handle_data(&mut self, id: SessionId, data: Bytes, now: Instant) -> PlainEvent {
        let Some(session) = self.sessions.get_mut(&id) else { return PlainEvent::Unknown("unknown_session") };
        session.last = now;
        let category = session.category;
        let mut frames = Vec::new();
        match &mut session.stage {
            G4Stage::Dialling { .. } | G4Stage::Unanswered { .. } => {
                if matches!(session.stage, G4Stage::Dialling { .. }) {
                    frames.push(session.opened());
                }
                session.stage = G4Stage::Open;
            }
            G4Stage::Requested { head } => {
                head.extend_from_slice(&data);
                return self.handle_response(id);
            }
            G4Stage::Accepting { early, bytes } => {
                if !data.is_empty() {
                    let cost = data.len() + PIECE_COST;
                    early.push_back(data);
                    *bytes += cost;
                    self.early += cost;
                }
                return PlainEvent::Session(Decoded { id, category, frames });
            }
            G4Stage::Open => {}
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
        let G4Stage::Requested { head } = &mut session.stage else {
            return PlainEvent::Unknown("unknown_type");
        };
        let category = session.category;
        let epoch = session.epoch;
        let end = head.windows(4).position(|four| four == b"\r\n\r\n");
        if end.is_none() && head.len() < MAX_HEAD {
            return PlainEvent::Session(Decoded { id, category, frames: Vec::new() });
        }
        let rest = head.split_off(end.map_or(head.len(), |end| end + 4)).freeze();
        let text = String::from_utf8_lossy(head);
        let line = text.lines().next().unwrap_or_default();
        if end.is_some() && line.split(' ').nth(1) == Some("200") {
            let mut frames = vec![session.opened()];
            session.stage = G4Stage::Open;
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
}

fn closed_message(to: &StreamMsg, text: &str) -> StreamMsg {
    reply_with_target(to, "closed", Bytes::copy_from_slice(text.as_bytes()))
}

/// Returns a reply with the target of the message, unless that is too long to be one.
fn reply_with_target(to: &StreamMsg, kind: &str, data: Bytes) -> StreamMsg {
    let addr = if to.addr.len() <= MAX_ADDR { to.addr.clone() } else { String::new() };
    StreamMsg { addr, ..reply(to, kind, data) }
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
pub(super) const ANSWER_TIMEOUT: Duration = Duration::from_secs(10);
/// Text for a client that has had no answer in this time.
pub(super) const NO_ANSWER: &str =
    "the edge did not answer; SuperEdge v0.9 reports no dial errors, and v0.2 serves no sessions";
/// Response to the request of an edge's client.
const ESTABLISHED: &str = "HTTP/1.1 200 Connection established\r\n\r\n";
/// Maximum length of a server's response to such a request, in bytes.
const MAX_HEAD: usize = 8 * 1024;
/// Maximum length of a target in bytes: a name, a colon and a port are shorter.
const MAX_ADDR: usize = 300;
/// Number of closed topics that are remembered.
pub(super) const MAX_CLOSED: usize = 1000;
/// Bytes that each waiting piece costs in addition to its data.
const PIECE_COST: usize = 64;

#[cfg(test)]
mod tests;
