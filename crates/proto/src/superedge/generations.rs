//! Finds out which generation of SuperEdge a remote is, and translates with that generation's codec.
//!
//! Nothing on the wire names the generation. So each link begins with a message that the newest generation answers at
//! once with an error, and that older ones ignore. Sessions wait for the answer. See
//! docs/reference/superedge-wire.md#which-generation-a-remote-is.

use std::collections::HashMap;
use std::time::Duration;

use bytes::Bytes;
use tokio::time::Instant;

use super::g4::G4Codec;
use super::{Decoded, PlainCodec, PlainEvent};
use crate::codec::extended::STREAM;
use crate::codec::proto::StreamMsg;
use crate::frame::{ErrorCode, Frame, FrameKind, SessionCategory, SessionError, SessionFrame};
use tunnel_base::names::{NodeName, SessionId};

/// The sessions of a link to a program of SuperEdge, with the codecs of both generations.
#[derive(Debug)]
pub struct SuperEdgeCodec {
    newest: PlainCodec,
    g4: G4Codec,
    generation: Option<SuperEdgeGeneration>,
    /// The probe, until it is sent.
    probe: Option<StreamMsg>,
    probe_topic: String,
    /// When a remote that has not answered the probe is taken for an older one.
    decide_at: Instant,
    /// Sessions to open once the generation is known. Bounded by the sessions of this process.
    held: HashMap<SessionId, Frame>,
}

/// A generation of SuperEdge that is served; see docs/reference/superedge-wire.md#generations.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum SuperEdgeGeneration {
    /// v0.8 and v0.9.
    G4,
    /// The main branch since May 2023.
    G5,
}

impl SuperEdgeGeneration {
    /// Returns the name of its dialect.
    pub fn dialect(self) -> &'static str {
        match self {
            Self::G4 => "superedge-0.9",
            Self::G5 => "plain",
        }
    }
}

impl SuperEdgeCodec {
    /// Creates the state of a new link to or from `node`. `to_edge` is true if the remote is an edge. Sessions of a
    /// remote that does not report ends are closed after `idle_timeout` without traffic.
    pub fn new(node: NodeName, to_edge: bool, idle_timeout: Duration, now: Instant) -> Self {
        let probe = probe(&node, to_edge);
        Self {
            newest: PlainCodec::new(node.clone()),
            g4: G4Codec::new(node, to_edge, idle_timeout),
            generation: None,
            probe_topic: probe.topic.clone(),
            probe: Some(probe),
            decide_at: now + PROBE_TIMEOUT,
            held: HashMap::new(),
        }
    }

    /// Returns the remote's generation, once known.
    pub fn generation(&self) -> Option<SuperEdgeGeneration> {
        self.generation
    }

    /// Sends a frame. Returns the frames that the local session gets at once, because the remote does not send them.
    pub fn send_frame(&mut self, frame: Frame, now: Instant) -> Option<Decoded> {
        match frame.body {
            FrameKind::Session(id, _, SessionFrame::Open { .. }) => self.open(id, frame, now),
            // The only other frame of such a session ends it, and the remote does not know it.
            FrameKind::Session(id, ..) if self.held.remove(&id).is_some() => None,
            FrameKind::Session(id, category, session_frame) if self.g4.has(id) => {
                self.g4.send_frame(id, category, session_frame, now)
            }
            _ => self.newest.send_frame(frame, now),
        }
    }

    fn open(&mut self, id: SessionId, frame: Frame, now: Instant) -> Option<Decoded> {
        match (self.generation, frame.body) {
            // Refused on behalf of the remote: no supported generation uses TLS to targets.
            (
                _,
                FrameKind::Session(_, category @ SessionCategory::Https, SessionFrame::Open { epoch, .. }),
            ) => {
                let refusal = SessionError::new(ErrorCode::TargetUnreachable, NO_TLS);
                Some(Decoded { id, category, frames: vec![SessionFrame::Refused { refusal, epoch }] })
            }
            (Some(SuperEdgeGeneration::G4), FrameKind::Session(_, category, open)) => {
                self.g4.send_frame(id, category, open, now)
            }
            (Some(_), body) => self.newest.send_frame(Frame { node: frame.node, body }, now),
            (None, body) => {
                self.held.insert(id, Frame { node: frame.node, body });
                None
            }
        }
    }

    /// Returns the next message to send.
    pub fn next_message(&mut self) -> Option<StreamMsg> {
        let probe = self.probe.take();
        probe.or_else(|| self.newest.next_message()).or_else(|| self.g4.next_message())
    }

    /// Returns true if messages wait to be sent.
    pub fn has_messages(&self) -> bool {
        self.probe.is_some() || !self.newest.waiting.is_empty() || self.g4.has_messages()
    }

    /// Returns the bytes of a session, and of all sessions, that wait for a dial here. Returns 0 for both if none of
    /// the session do.
    pub fn early(&self, id: SessionId) -> (usize, usize) {
        self.g4.early(id)
    }

    /// Ends a session that has too many such bytes. Returns the frames for this end.
    pub fn give_up_early(&mut self, id: SessionId) -> Option<Decoded> {
        self.g4.give_up_early(id)
    }

    /// Sends `closed` for half-closed sessions that were idle for long. Returns the frames for this end.
    pub fn tick(&mut self, now: Instant) -> Vec<Decoded> {
        self.newest.tick(now)
    }

    /// Returns when to call [`Self::due`], if nothing changes.
    pub fn next_due(&self) -> Option<Instant> {
        let undecided = self.generation.is_none().then_some(self.decide_at);
        [undecided, self.newest.next_end(), self.g4.next_due()].into_iter().flatten().min()
    }

    /// Returns the sessions for which [`Self::handle_due`] must be called.
    pub fn due(&mut self, now: Instant) -> Vec<SessionId> {
        if self.generation.is_none() && now >= self.decide_at {
            self.decide(SuperEdgeGeneration::G4, now);
        }
        let mut due = self.newest.ended(now);
        due.extend(self.g4.due(now));
        due
    }

    /// Handles a session that is due. `taken` is true if the target here has received all bytes from the remote.
    /// Returns the frames for this end.
    pub fn handle_due(&mut self, id: SessionId, taken: bool, now: Instant) -> Option<Decoded> {
        if self.g4.has(id) {
            return self.g4.handle_due(id, taken, now);
        }
        if !taken {
            self.newest.postpone_close(id, now);
            return None;
        }
        self.newest.close(id)
    }

    /// Handles a message from the remote.
    pub fn handle_message(&mut self, message: StreamMsg, now: Instant) -> PlainEvent {
        if message.category == STREAM {
            return self.newest.handle_message(message, now);
        }
        if message.topic == self.probe_topic {
            self.decide(SuperEdgeGeneration::G5, now);
            return PlainEvent::Answered;
        }
        match message.r#type.as_str() {
            "frontend" | "backend" | "access" => {
                self.decide(SuperEdgeGeneration::G4, now);
                self.g4.handle_message(message, now)
            }
            "closed" if self.g4.has_topic(&message.topic) => self.g4.handle_message(message, now),
            kind => {
                if matches!(kind, "connecting" | "connected" | "connect-failed" | "tcp-forward") {
                    self.decide(SuperEdgeGeneration::G5, now);
                }
                self.newest.handle_message(message, now)
            }
        }
    }

    /// Records the remote's generation, and opens the sessions that waited for it. A remote that was too slow for the
    /// probe is recognized by its later messages.
    fn decide(&mut self, generation: SuperEdgeGeneration, now: Instant) {
        self.generation = Some(generation);
        for (id, frame) in std::mem::take(&mut self.held) {
            // Opening a session produces no frames for it, except for one that was not held.
            let _ = self.open(id, frame, now);
        }
    }
}

/// Returns the message that a remote of the newest generation answers with an error, and that older ones ignore: an
/// edge cannot dial without an address, and a server requires a CONNECT.
fn probe(node: &NodeName, to_edge: bool) -> StreamMsg {
    let (category, data) = if to_edge {
        (SessionCategory::Ssh, "")
    } else {
        (SessionCategory::HttpProxy, "GET / HTTP/1.1\r\nHost: probe\r\n\r\n")
    };
    StreamMsg {
        node: node.as_str().into(),
        category: category.name().into(),
        r#type: "connecting".into(),
        topic: SessionId::random().topic(),
        data: Bytes::from_static(data.as_bytes()),
        addr: String::new(),
    }
}

/// Error text that names both solutions.
const NO_TLS: &str = "the edge is SuperEdge's and does not use TLS to targets; set mode = \"passthrough\" in \
                      [server.https], or run this program's edge there";
/// Time for the answer to the probe.
const PROBE_TIMEOUT: Duration = Duration::from_secs(3);

#[cfg(test)]
mod tests;
