//! Ids of sessions that are over, kept so that a late Open does not dial again.

use std::collections::{HashMap, VecDeque};

use tokio::time::Instant;

use crate::names::SessionId;

/// Ids of sessions that are over, for as long as a late Open could come for one.
#[derive(Debug, Default)]
pub(super) struct Ended {
    ids: HashMap<SessionId, Instant>,
    order: VecDeque<(Instant, SessionId)>,
}

impl Ended {
    /// Whether the session ended not long ago.
    pub(super) fn contains(&self, id: SessionId) -> bool {
        self.ids.contains_key(&id)
    }

    pub(super) fn add(&mut self, id: SessionId, now: Instant) {
        if self.order.len() >= MOST_ENDED
            && let Some((_, oldest)) = self.order.pop_front()
        {
            self.ids.remove(&oldest);
        }
        self.ids.insert(id, now);
        self.order.push_back((now, id));
    }

    pub(super) fn forget_before(&mut self, before: Instant) {
        while let Some((at, id)) = self.order.front().copied().filter(|(at, _)| *at <= before) {
            self.order.pop_front();
            if self.ids.get(&id) == Some(&at) {
                self.ids.remove(&id);
            }
        }
        if self.order.is_empty() {
            self.order.shrink_to_fit();
            self.ids.shrink_to_fit();
        }
    }
}

/// Ids of ended sessions kept at the most: 40 bytes each.
const MOST_ENDED: usize = 20_000;
