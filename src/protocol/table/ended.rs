//! Ids of sessions that are over, kept so that a late Open does not dial again, but learns why.

use std::collections::{HashMap, VecDeque};

use tokio::time::Instant;

use crate::names::SessionId;
use crate::protocol::wire::frame::{Code, Refusal};

/// Ids of sessions that are over, for as long as a late Open could come for one.
#[derive(Debug, Default)]
pub(super) struct EndedSessions {
    ids: HashMap<SessionId, (Instant, Code)>,
    order: VecDeque<(Instant, SessionId)>,
}

impl EndedSessions {
    /// The answer to a request for a session that ended not long ago: the peer may have missed the first answer.
    pub(super) fn refusal(&self, id: SessionId) -> Option<Refusal> {
        self.ids.get(&id).map(|(_, code)| Refusal::new(*code, "this session has ended"))
    }

    /// One of which this process knows nothing was to be resumed: an Open that is still under way, over a path that its
    /// opener has left, must not be served any more.
    pub(super) fn add_unknown(&mut self, id: SessionId, now: Instant) {
        if !self.ids.contains_key(&id) {
            self.add(id, None, now);
        }
    }

    /// One that has ended, for the given reason if it did not end by itself.
    pub(super) fn add(&mut self, id: SessionId, why: Option<Code>, now: Instant) {
        // These two would send the opener on, or look to it like success.
        let code = why.filter(|code| !matches!(code, Code::NotHere | Code::Over)).unwrap_or(Code::Unknown);
        if self.order.len() >= MOST_ENDED
            && let Some((_, oldest)) = self.order.pop_front()
        {
            self.ids.remove(&oldest);
        }
        self.ids.insert(id, (now, code));
        self.order.push_back((now, id));
    }

    pub(super) fn forget_before(&mut self, before: Instant) {
        while let Some((at, id)) = self.order.front().copied().filter(|(at, _)| *at <= before) {
            self.order.pop_front();
            if self.ids.get(&id).is_some_and(|(kept, _)| *kept == at) {
                self.ids.remove(&id);
            }
        }
        if self.order.is_empty() {
            self.order.shrink_to_fit();
            self.ids.shrink_to_fit();
        }
    }
}

/// Ids of ended sessions kept at the most: 48 bytes each.
const MOST_ENDED: usize = 20_000;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn who_missed_the_first_refusal_learns_its_code_from_the_next() {
        let (mut ended, id) = (EndedSessions::default(), SessionId::from_bits(1));
        assert_eq!(ended.refusal(id), None);
        for (why, told) in [
            (Some(Code::Busy), Code::Busy),
            (Some(Code::TargetRefused), Code::TargetRefused),
            (Some(Code::NotHere), Code::Unknown),
            (Some(Code::Over), Code::Unknown),
            (None, Code::Unknown),
        ] {
            ended.add(id, why, Instant::now());
            assert_eq!(ended.refusal(id).map(|refusal| refusal.code), Some(told), "{why:?}");
        }
    }
}
