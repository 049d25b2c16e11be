//! Ids of ended sessions, so that a late Open does not dial again but gets the reason.

use std::sync::Arc;

use tokio::time::Instant;

use crate::table::SessionTable;
use tunnel_net::fair_map::FairMap;
use tunnel_proto::frame::{ErrorCode, Opener, SessionError, SessionFrame};
use tunnel_proto::names::SessionId;

/// Ids of ended sessions by client, kept for as long as a late Open could arrive.
#[derive(Debug)]
pub(crate) struct Tombstones(FairMap<Arc<str>, SessionId, EndedSession>);

/// An ended session in [`Tombstones`].
#[derive(Debug)]
struct EndedSession {
    /// When it ended.
    at: Instant,
    /// The code for the answer to a late Open.
    why: ErrorCode,
}

impl Tombstones {
    /// Creates an empty list, for a table that has at most so many sessions.
    pub(crate) fn new(sessions: usize) -> Self {
        Self(FairMap::new(MAX_TOMBSTONES.min(sessions.saturating_mul(4))))
    }

    /// Returns the answer to a request for a recently ended session: the remote may have missed the first answer.
    pub(crate) fn refusal(&self, id: SessionId) -> Option<SessionError> {
        self.0.get(&id).map(|ended| SessionError::new(ended.why, ENDED))
    }

    /// Adds an ended session of a client; `why` is set if it did not end cleanly.
    pub(crate) fn add(&mut self, client: &Arc<str>, id: SessionId, why: Option<ErrorCode>, now: Instant) {
        // These would make the opener search elsewhere, look like success, or hide that no path was found in time.
        let untold = [ErrorCode::NodeNotConnected, ErrorCode::NoError, ErrorCode::Cancelled];
        let why = why.filter(|code| !untold.contains(code)).unwrap_or(ErrorCode::UnknownSession);
        self.0.insert(client, id, EndedSession { at: now, why }, now);
    }

    pub(crate) fn forget_before(&mut self, before: Instant) {
        self.0.retain(|ended| ended.at > before);
    }
}

impl SessionTable {
    /// Returns the answer to a Resume of a session that has no end here, and records its id: an Open that is still in
    /// flight, over a path that its opener has left, must not be served later.
    pub(crate) fn failed_resume(&self, id: SessionId, opener: Option<&Opener>, epoch: u64) -> SessionFrame {
        let mut ended = self.ended.lock();
        if ended.refusal(id).is_none() {
            // The source of the opener's sessions, so that both count as one.
            let client = opener.map(Opener::source).unwrap_or_default();
            ended.add(&client.into(), id, None, Instant::now());
        }
        SessionFrame::Reset { epoch, refusal: unknown_session() }
    }
}

/// Returns the refusal of a session that a remote does not find here.
pub(crate) fn unknown_session() -> SessionError {
    SessionError::new(ErrorCode::UnknownSession, ENDED)
}

/// Why a session is not found here. Its opener adds for how long it had no path.
const ENDED: &str = "the other end no longer has this session: it was restarted, the session had no path for too long, or other \
                     sessions without one needed its place";

/// Maximum number of ids of ended sessions: 4 MiB. A process with little memory keeps four for each of its sessions.
const MAX_TOMBSTONES: usize = 8192;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn who_missed_the_first_refusal_learns_its_code_from_the_next() {
        let mut ended = Tombstones::new(1);
        let id = SessionId::from_bits(1);
        let now = Instant::now();
        assert_eq!(ended.refusal(id), None);
        for (why, expected) in [
            (Some(ErrorCode::Overloaded), ErrorCode::Overloaded),
            (Some(ErrorCode::TargetRefused), ErrorCode::TargetRefused),
            (Some(ErrorCode::NodeNotConnected), ErrorCode::UnknownSession),
            (Some(ErrorCode::NoError), ErrorCode::UnknownSession),
            (Some(ErrorCode::Cancelled), ErrorCode::UnknownSession),
            (None, ErrorCode::UnknownSession),
        ] {
            ended.add(&"ann".into(), id, why, now);
            assert_eq!(ended.refusal(id).map(|refusal| refusal.code), Some(expected), "{why:?}");
        }
        ended.forget_before(now);
        assert_eq!(ended.refusal(id), None);
    }

    #[test]
    fn who_ends_many_sessions_drives_out_none_of_another() {
        let mut ended = Tombstones::new(MAX_TOMBSTONES);
        let now = Instant::now();
        ended.add(&"ann".into(), SessionId::from_bits(0), Some(ErrorCode::Overloaded), now);
        for id in 1..=2 * MAX_TOMBSTONES as u128 {
            ended.add(&"node mallory".into(), SessionId::from_bits(id), None, now);
        }
        assert!(ended.refusal(SessionId::from_bits(0)).is_some());
        assert!(ended.refusal(SessionId::from_bits(1)).is_none());
    }
}
