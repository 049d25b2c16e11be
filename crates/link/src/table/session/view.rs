//! What is visible of one end of a session from outside.

use tokio::time::Instant;

use crate::table::SessionTable;
use crate::table::session::{SessionOrigin, SharedSession};
use tunnel_proto::frame::{SessionCategory, SessionKey};
use tunnel_proto::names::{NodeName, SessionId, Target};
use tunnel_proto::state::{LinkId, Phase};

/// A snapshot of one end of a session.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SessionView {
    /// The session's id; people see 8 of its digits.
    pub id: SessionId,
    /// The node that it leads to, or that it was opened from.
    pub node: NodeName,
    /// The requested target and the client; `None` at the acceptor.
    pub opened_for: Option<(Target, String)>,
    /// The listener that accepted the client; `None` at the acceptor.
    pub listener: Option<&'static str>,
    /// The phase as a fixed word.
    pub phase: &'static str,
    /// The link that it runs on; `None` while it has none.
    pub link: Option<LinkId>,
    /// When this end was created.
    pub started: Instant,
    /// Number of times it was resumed on another link.
    pub resumed: u32,
    /// Bytes written to it here.
    pub sent_bytes: u64,
    /// Bytes received here.
    pub received_bytes: u64,
}

impl SessionTable {
    /// Returns the number of sessions with an end here and at most `most` of them, without requests of operators. The
    /// order is stable, so two calls return the same ones while they live. Each of the table's locks is held only for a
    /// copy.
    pub fn overview(&self, most: usize) -> (usize, Vec<SessionView>) {
        let mut sessions = self.all();
        sessions.retain(|session| session.key.category != SessionCategory::Admin);
        sessions.sort_unstable_by_key(|session| session.key.id);
        (sessions.len(), sessions.iter().take(most).map(|session| session.view()).collect())
    }
}

impl SharedSession {
    /// Returns a snapshot of this end.
    pub(crate) fn view(&self) -> SessionView {
        let SessionKey { id, node, .. } = &self.key;
        let inner = self.lock();
        let state = &inner.state;
        SessionView {
            id: *id,
            node: node.clone(),
            opened_for: state.opened_for(),
            listener: if let SessionOrigin::Here { listener } = self.origin { Some(listener) } else { None },
            phase: word(state.phase()),
            link: state.path(),
            started: self.started,
            resumed: state.resumed(),
            sent_bytes: state.send.written(),
            received_bytes: state.recv.taken() + state.recv.queued() as u64,
        }
    }

    /// Returns the time of the last received frame, or of the creation if there was none.
    pub(crate) fn last_frame(&self) -> Instant {
        self.lock().last_frame
    }
}

fn word(phase: Phase) -> &'static str {
    match phase {
        Phase::Opening | Phase::Accepting => "opening",
        Phase::Open => "open",
        Phase::Parked => "parked",
        Phase::Resuming => "resuming",
        Phase::LastAck | Phase::Closing | Phase::Closed => "closing",
    }
}
