//! Sessions whose owner has left before they were delivered: the oldest give way when memory or places run out.

use std::collections::HashMap;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use tokio::time::sleep;

use super::super::lock;
use super::super::session::Shared;
use super::Table;
use crate::names::SessionId;

impl Table {
    /// Waits until every session that is open here has been delivered: one whose owner is done may still have bytes to
    /// say, or to say again on another path. Cancel safe.
    pub async fn delivered(&self) {
        let owes = |shard: &Mutex<HashMap<SessionId, Arc<Shared>>>| {
            let sessions: Vec<_> = lock(shard).values().cloned().collect();
            sessions.iter().any(|session| session.owes())
        };
        while self.shards.iter().any(owes) {
            sleep(LOOK_EVERY).await;
        }
    }

    /// A session's owner has left, and it is still to be delivered.
    pub(in super::super) fn departed(&self, id: SessionId) {
        let many = {
            let mut departed = lock(&self.departed);
            departed.push_back(id);
            departed.len() > MOST_DEPARTED
        };
        if many {
            self.oldest_gives_way("sessions");
        }
        while self.kept.is_spent() && self.oldest_gives_way("memory") {}
    }

    /// The session that is to be delivered since longest is forgotten, for want of what `cause` says. False if there is
    /// none.
    pub(super) fn oldest_gives_way(&self, cause: &'static str) -> bool {
        loop {
            let Some(id) = lock(&self.departed).pop_front() else { return false };
            let session = self.shard(id).get(&id).cloned();
            if session.is_some_and(|session| session.give_way()) {
                self.metrics.undelivered.count(cause);
                return true;
            }
        }
    }

    /// What was delivered meanwhile needs no place among those that are not.
    pub(super) fn forget_delivered(&self) {
        let all = std::mem::take(&mut *lock(&self.departed));
        let mut left: Vec<_> = all.into_iter().filter(|id| self.shard(*id).contains_key(id)).collect();
        let mut departed = lock(&self.departed);
        left.extend(departed.drain(..));
        *departed = left.into();
    }
}

/// Ids of sessions that may still be delivered, at the most: 16 bytes each.
const MOST_DEPARTED: usize = 20_000;
/// Between two looks whether all is delivered.
const LOOK_EVERY: Duration = Duration::from_millis(50);
