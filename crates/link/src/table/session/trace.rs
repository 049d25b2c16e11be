//! The log lines that trace a session: one for each change of its phase, its path or its epoch.
//!
//! Nothing is formatted under the session's lock, and a frame that changes none of the three costs one comparison.

use tracing::debug;

use crate::table::session::SharedSession;
use tunnel_proto::frame::SessionError;
use tunnel_proto::state::{LinkId, Phase, SessionState};

/// The part of an end's state that is logged.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct LoggedState {
    phase: Phase,
    pub(super) epoch: u64,
    pub(super) link: Option<LinkId>,
    resumed: u32,
}

/// A change to be logged once the lock is released.
#[derive(Debug)]
pub(super) struct LoggedTransition {
    pub(super) before: LoggedState,
    pub(super) now: LoggedState,
    pub(super) why: Option<SessionError>,
}

impl LoggedState {
    pub(super) fn of(state: &SessionState) -> Self {
        Self { phase: state.phase(), epoch: state.epoch(), link: state.path(), resumed: state.resumed() }
    }

    /// Returns the log message for the change.
    fn sentence(&self, before: &Self) -> &'static str {
        match (self.phase, self.link) {
            (Phase::Opening, Some(_)) => "opening session",
            (Phase::Opening, None) => "no link to open the session over",
            (Phase::Accepting, _) => "session moved while its target is dialled",
            (Phase::Open, _) if self.resumed > before.resumed => "session resumed",
            (Phase::Open, _) => "session opened",
            (Phase::Parked, _) => "session lost its path",
            (Phase::Resuming, _) => "resuming session",
            (Phase::LastAck, _) => "all session data sent and received",
            (Phase::Closing, _) => "closing session",
            (Phase::Closed, _) => "session closed",
        }
    }
}

impl LoggedTransition {
    /// Logs the change. Another thread's line about a later step may come first; they differ in epoch or link.
    pub(super) fn log(self, core: &SharedSession) {
        let Self { before, now, why } = self;
        // The last line names the link that was left.
        let link = now.link.or(before.link).map(tracing::field::display);
        let why = why.map(tracing::field::display);
        let session = core.key.id;
        let node = &core.key.node;
        let what = now.sentence(&before);
        debug!(%session, epoch = now.epoch, link, %node, role = core.origin.role(), error = why, "{what}");
    }
}
