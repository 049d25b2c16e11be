//! The lines by which a session can be followed through logs: one for each change of its phase, its path or its epoch.
//!
//! Nothing is formatted under the session's lock, and a frame that changes none of the three costs one comparison.

use tracing::{Level, debug, enabled};

use crate::protocol::link::source::LinkId;
use crate::protocol::session::state::{Phase, SessionState};
use crate::protocol::session::{Inner, SessionCore};
use crate::protocol::wire::frame::{Refusal, SessionKey};

/// The part of an end's state that is logged.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Stage {
    phase: Phase,
    epoch: u64,
    link: Option<LinkId>,
    resumed: u32,
    role: &'static str,
}

/// A change that is to be logged once the lock is released.
#[derive(Debug)]
pub(super) struct Change {
    before: Stage,
    now: Stage,
    why: Option<Refusal>,
}

impl Stage {
    pub(super) fn of(state: &SessionState) -> Self {
        Self {
            phase: state.phase(),
            epoch: state.epoch(),
            link: state.path(),
            resumed: state.resumed(),
            role: if state.is_opener() { "opener" } else { "acceptor" },
        }
    }

    /// Logs that there is a new session.
    pub(super) fn log_begin(&self, key: &SessionKey) {
        let SessionKey { id: session, node, .. } = key;
        let link = self.link.map(tracing::field::display);
        debug!(%session, epoch = self.epoch, link, %node, role = self.role, "the session begins");
    }

    /// The change as a sentence for people.
    fn sentence(&self, before: &Self) -> &'static str {
        match (self.phase, self.link) {
            (Phase::Asking, Some(_)) => "the far end is asked to open the session",
            (Phase::Asking, None) => "the session has no link over which it could be opened",
            (Phase::Dialling, _) => "the session has another path while its target is dialled",
            (Phase::Open, _) if self.resumed > before.resumed => "the session is resumed",
            (Phase::Open, _) => "the session is open",
            (Phase::Parked, _) => "the session has lost its path and is parked",
            (Phase::Resuming, _) => "the far end is asked to resume the session",
            (Phase::Delivered, _) => "all bytes of the session are sent and received",
            (Phase::Leaving, _) => "the session sends its last frame",
            (Phase::Gone, _) => "the session is over",
        }
    }
}

impl Inner {
    /// The change by the last step that is to be logged, if any.
    pub(super) fn change(&mut self) -> Option<Change> {
        let now = Stage::of(&self.state);
        if now == self.logged {
            return None;
        }
        let before = std::mem::replace(&mut self.logged, now);
        enabled!(Level::DEBUG).then(|| Change { before, now, why: self.state.ended().cloned() })
    }
}

impl Change {
    /// Logs it. Another thread's line about a later step may come first; they differ in epoch or link.
    pub(super) fn log(self, core: &SessionCore) {
        let Self { before, now, why } = self;
        // The last line names the link that was left.
        let link = now.link.or(before.link).map(tracing::field::display);
        let why = why.map(tracing::field::display);
        let (session, node, what) = (core.key.id, &core.key.node, now.sentence(&before));
        debug!(%session, epoch = now.epoch, link, %node, role = now.role, why, "{what}");
    }
}
