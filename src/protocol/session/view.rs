//! What can be seen of one end of a session from outside.

use tokio::time::Instant;

use crate::names::{NodeName, SessionId, Target};
use crate::protocol::link::source::LinkId;
use crate::protocol::session::SessionCore;
use crate::protocol::session::state::Phase;
use crate::protocol::wire::frame::SessionKey;

/// One end of a session at one moment.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SessionView {
    /// Its id, of which people are shown 8 digits.
    pub id: SessionId,
    /// The node that it leads to, or that it was opened from.
    pub node: NodeName,
    /// What was asked for, and by whom; `None` at the end that was asked.
    pub opened_for: Option<(Target, String)>,
    /// How it stands, as a fixed word.
    pub phase: &'static str,
    /// The link that it runs on; `None` while it has none.
    pub link: Option<LinkId>,
    /// When this end was made.
    pub begun: Instant,
    /// How often it was resumed on another link.
    pub resumed: u32,
    /// Bytes that were written to it here.
    pub sent_bytes: u64,
    /// Bytes that have arrived here.
    pub received_bytes: u64,
}

impl SessionCore {
    /// How it stands now.
    pub(in crate::protocol) fn view(&self) -> SessionView {
        let SessionKey { id, node, .. } = &self.key;
        let inner = self.lock();
        let state = &inner.state;
        SessionView {
            id: *id,
            node: node.clone(),
            opened_for: state.opened_for(),
            phase: word(state.phase()),
            link: state.path(),
            begun: self.begun,
            resumed: state.resumed(),
            sent_bytes: state.send.written(),
            received_bytes: state.recv.taken() + state.recv.queued() as u64,
        }
    }

    /// When its last frame came in; before the first one, when it was made.
    pub(in crate::protocol) fn last_frame(&self) -> Instant {
        self.lock().last_frame
    }

    /// Bytes that have arrived and were not read.
    pub(in crate::protocol) fn queued(&self) -> usize {
        self.lock().state.recv.queued()
    }
}

fn word(phase: Phase) -> &'static str {
    match phase {
        Phase::Asking | Phase::Dialling => "opening",
        Phase::Open => "open",
        Phase::Parked => "parked",
        Phase::Resuming => "resuming",
        Phase::Delivered | Phase::Leaving | Phase::Gone => "ending",
    }
}
