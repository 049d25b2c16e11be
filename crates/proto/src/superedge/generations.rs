//! Finds out which generation of SuperEdge a remote is, and has each session translated as that generation requires.
//!
//! Nothing on the wire names the generation. So each link begins with a message that the newest generation answers at
//! once with an error, and that older ones ignore. Sessions wait for the answer. See
//! docs/reference/superedge-wire.md#which-generation-a-remote-is.

use std::collections::{BTreeSet, HashMap, VecDeque};
use std::time::Duration;

use bytes::Bytes;
use tokio::time::Instant;

use super::{Decoded, PlainEvent, RequestedSession, SuperEdgeTranslator};
use crate::codec::extended::{HEARTBEAT, STREAM};
use crate::codec::proto::StreamMsg;
use crate::frame::{ErrorCode, SessionCategory, SessionError, SessionFrame};
use crate::names::{NodeName, SessionId};

/// A generation of SuperEdge that is served; see docs/reference/superedge-wire.md#generations.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum SuperEdgeGeneration {
    /// v0.8 and v0.9.
    G4,
    /// The main branch since May 2023.
    G5,
}

impl SuperEdgeGeneration {
    /// Returns its name, for people and metrics.
    pub fn name(self) -> &'static str {
        match self {
            Self::G4 => "superedge-0.9",
            Self::G5 => "plain",
        }
    }

    /// Returns the only generation that sends messages of that type; `None` if both do, or none.
    fn of_message(kind: &str) -> Option<Self> {
        match kind {
            "frontend" | "backend" | "access" => Some(Self::G4),
            "connecting" | "connected" | "connect-failed" | "tcp-forward" => Some(Self::G5),
            _ => None,
        }
    }
}

impl SuperEdgeTranslator {
    /// Creates the state of a new link to or from `node`. `to_edge` is true if the remote is an edge. Sessions of a
    /// remote that does not report ends are closed after `idle_timeout` without traffic.
    pub fn new(node: NodeName, to_edge: bool, idle_timeout: Duration, now: Instant) -> Self {
        let probe = probe(&node, to_edge);
        Self {
            node,
            to_edge,
            by_topic: HashMap::new(),
            sessions: HashMap::new(),
            timers: BTreeSet::new(),
            generation: None,
            probe_topic: probe.topic.clone(),
            waiting: VecDeque::from([probe]),
            decide_at: now + PROBE_TIMEOUT,
            held: HashMap::new(),
            idle_timeout,
            closed: VecDeque::new(),
            early: 0,
        }
    }

    /// Returns the remote's generation, once known.
    pub fn generation(&self) -> Option<SuperEdgeGeneration> {
        self.generation
    }

    /// Requests a session, once the generation is known. Returns the refusal of one that no generation can serve.
    pub(super) fn request(&mut self, requested: RequestedSession, now: Instant) -> Option<Decoded> {
        let RequestedSession { id, category, epoch, .. } = requested;
        // Refused on behalf of the remote: no supported generation uses TLS to targets.
        if category == SessionCategory::Https {
            let refusal = SessionError::new(ErrorCode::TargetUnreachable, NO_TLS);
            return Some(Decoded { id, category, frames: vec![SessionFrame::Refused { refusal, epoch }] });
        }
        match self.generation {
            Some(SuperEdgeGeneration::G4) => self.open_g4(requested, now),
            Some(SuperEdgeGeneration::G5) => self.open(requested, now),
            None => drop(self.held.insert(id, requested)),
        }
        None
    }

    /// Handles a message from the remote.
    pub fn handle_message(&mut self, message: StreamMsg, now: Instant) -> PlainEvent {
        if message.category == STREAM {
            let beats = message.r#type == HEARTBEAT;
            return if beats { PlainEvent::Heartbeat } else { PlainEvent::Unknown("unknown_type") };
        }
        if message.topic == self.probe_topic {
            self.decide(SuperEdgeGeneration::G5, now);
            return PlainEvent::Answered;
        }
        let generation = SuperEdgeGeneration::of_message(&message.r#type);
        if let Some(generation) = generation {
            self.decide(generation, now);
        }
        let Some(category) = SessionCategory::from_name(&message.category) else {
            return PlainEvent::Unknown("unknown_type");
        };
        if !message.node.eq_ignore_ascii_case(self.node.as_str()) {
            return PlainEvent::Unknown("wrong_node");
        }
        if let Some(id) = self.by_topic.get(&message.topic) {
            return self.handle_session_message(*id, message, now);
        }
        match generation {
            Some(SuperEdgeGeneration::G4) => self.handle_other_g4_message(category, message, now),
            Some(SuperEdgeGeneration::G5) | None => self.handle_other_message(category, message, now),
        }
    }

    /// Records the remote's generation, and requests the sessions that waited for it. A remote that was too slow for
    /// the probe is recognized by its later messages.
    pub(super) fn decide(&mut self, generation: SuperEdgeGeneration, now: Instant) {
        self.generation = Some(generation);
        for (_, requested) in std::mem::take(&mut self.held) {
            // One that is refused was not held.
            let _ = self.request(requested, now);
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
const NO_TLS: &str = "the edge is SuperEdge's and does not use TLS to targets; use a port with passthrough, or run this \
                      program's edge there";
/// Time for the answer to the probe.
const PROBE_TIMEOUT: Duration = Duration::from_secs(3);

#[cfg(test)]
mod tests;
