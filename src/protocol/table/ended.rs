//! Ids of sessions that are over, kept so that a late Open does not dial again, but learns why.

use std::sync::Arc;

use tokio::time::Instant;

use crate::names::SessionId;
use crate::net::door::FairMap;
use crate::protocol::lock;
use crate::protocol::table::SessionTable;
use crate::protocol::wire::frame::{Code, Refusal};
use crate::protocol::wire::opener::Opener;

/// Ids of sessions that are over, for as long as a late Open could come for one; by who had opened them.
#[derive(Debug)]
pub(super) struct EndedSessions(FairMap<Arc<str>, SessionId, Ended>);

#[derive(Debug)]
struct Ended {
    at: Instant,
    why: Code,
}

impl Default for EndedSessions {
    fn default() -> Self {
        Self(FairMap::new(MOST_ENDED))
    }
}

impl EndedSessions {
    /// The answer to a request for a session that ended not long ago: the peer may have missed the first answer.
    pub(super) fn refusal(&self, id: SessionId) -> Option<Refusal> {
        self.0.get(&id).map(|ended| Refusal::new(ended.why, "this session has ended"))
    }

    /// A session of a client that has ended, for the given reason if it did not end by itself.
    fn add(&mut self, client: &Arc<str>, id: SessionId, why: Option<Code>, now: Instant) {
        // These two would send the opener on, or look to it like success.
        let why = why.filter(|code| !matches!(code, Code::NotHere | Code::Over)).unwrap_or(Code::Unknown);
        self.0.insert(client, id, Ended { at: now, why }, now);
    }

    pub(super) fn forget_before(&mut self, before: Instant, now: Instant) {
        self.0.retain(|ended| ended.at > before, now);
    }
}

impl SessionTable {
    /// A session has ended here, or is to. Only what another process has opened can be asked for again.
    pub(super) fn add_ended(&self, id: SessionId, why: Option<Code>) {
        let Some(client) = lock(&self.clients).remove(id) else { return };
        lock(&self.ended).add(&client, id, why, Instant::now());
    }

    /// A session of which this process knows nothing was to be resumed: an Open that is still under way, over a path
    /// that its opener has left, must not be served any more.
    pub(super) fn add_unknown(&self, id: SessionId, opener: Option<&Opener>) {
        let mut ended = lock(&self.ended);
        if ended.refusal(id).is_none() {
            // As the client of an edge's sessions is called, so that both count as one source.
            let client = match opener {
                Some(Opener::Node(node)) => format!("node {node}"),
                Some(Opener::Pod(_)) | None => String::new(),
            };
            ended.add(&client.into(), id, None, Instant::now());
        }
    }
}

/// Ids of ended sessions kept at the most.
const MOST_ENDED: usize = 8192;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn who_missed_the_first_refusal_learns_its_code_from_the_next() {
        let (mut ended, id, now) = (EndedSessions::default(), SessionId::from_bits(1), Instant::now());
        assert_eq!(ended.refusal(id), None);
        for (why, told) in [
            (Some(Code::Busy), Code::Busy),
            (Some(Code::TargetRefused), Code::TargetRefused),
            (Some(Code::NotHere), Code::Unknown),
            (Some(Code::Over), Code::Unknown),
            (None, Code::Unknown),
        ] {
            ended.add(&"ann".into(), id, why, now);
            assert_eq!(ended.refusal(id).map(|refusal| refusal.code), Some(told), "{why:?}");
        }
        ended.forget_before(now, now);
        assert_eq!(ended.refusal(id), None);
    }

    #[test]
    fn who_ends_many_sessions_drives_out_none_of_another() {
        let (mut ended, now) = (EndedSessions::default(), Instant::now());
        ended.add(&"ann".into(), SessionId::from_bits(0), Some(Code::Busy), now);
        for id in 1..=2 * MOST_ENDED as u128 {
            ended.add(&"node mallory".into(), SessionId::from_bits(id), None, now);
        }
        assert!(ended.refusal(SessionId::from_bits(0)).is_some());
        assert!(ended.refusal(SessionId::from_bits(1)).is_none());
    }
}
