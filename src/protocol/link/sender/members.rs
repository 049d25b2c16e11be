//! Which sessions run on one link.

use std::collections::HashMap;
use std::sync::{Arc, Weak};

use crate::names::SessionId;
use crate::protocol::link::sender::{FrameSource, LinkSender};
use crate::protocol::lock;
use crate::protocol::relay::queue::RelayQueue;
use crate::protocol::session::SessionCore;
use crate::protocol::session::budget::{Budget, Share};

/// The sessions that run on a link: those with an end here, and those that only pass through. Each with its turn in
/// which it came: in that order they are told when the link ends.
#[derive(Debug, Default)]
pub(crate) struct Members {
    own: HashMap<SessionId, (u64, Weak<SessionCore>)>,
    /// With the attempt that each belongs to.
    passing: HashMap<SessionId, (u64, Arc<RelayQueue>, u64)>,
    came: u64,
}

impl LinkSender {
    /// Number of sessions whose path this link is, those that only pass through among them.
    pub fn sessions(&self) -> usize {
        lock(&self.members).as_ref().map_or(0, |members| members.own.len() + members.passing.len())
    }

    /// Makes the session known as one that runs here. False if the link has ended.
    pub(crate) fn join(&self, session: &Arc<SessionCore>) -> bool {
        let mut members = lock(&self.members);
        if let Some(members) = members.as_mut() {
            members.came += 1;
            members.own.insert(session.id, (members.came, Arc::downgrade(session)));
        }
        members.is_some()
    }

    /// The session runs elsewhere, or is over.
    pub(crate) fn part(&self, id: SessionId) {
        if let Some(members) = lock(&self.members).as_mut() {
            members.own.remove(&id);
        }
    }

    /// Makes the queue known as one that leads through here, for attempt `epoch`; an older one of its session says no
    /// more, unless it is that a newer attempt was lost. False if the link has ended.
    pub(crate) fn pass(&self, queue: &Arc<RelayQueue>, epoch: u64) -> bool {
        let mut members = lock(&self.members);
        let Some(known) = members.as_mut() else { return false };
        if known.passing.get(&queue.id).is_some_and(|(.., newer)| *newer > epoch) {
            // This attempt comes late: a newer one has passed here meanwhile.
            drop(members);
            queue.close();
            return true;
        }
        known.came += 1;
        let older = known.passing.insert(queue.id, (known.came, queue.clone(), epoch));
        drop(members);
        if let Some((_, older, _)) = older {
            older.retire(epoch);
        }
        // It may have said its last word, or was closed, before it was known here; nobody else takes it off then.
        if queue.is_over() {
            self.leave_relay(queue);
        }
        true
    }

    /// An empty share of what may wait here for all sessions that pass through: `most` bytes.
    pub(crate) fn room_for_relays(&self, most: usize) -> Share {
        self.room.get_or_init(|| Budget::new(most)).share()
    }

    /// An empty share of what may wait here for readers of a plain peer's sessions, which [`SessionTable`] bounds in all.
    ///
    /// [`SessionTable`]: crate::protocol::table::SessionTable
    pub(crate) fn room_unread(&self, most: usize) -> Share {
        self.unread.get_or_init(|| Budget::new(most)).share()
    }

    /// Whether sessions of this plain link have more unread than its share, while half of all is spent.
    pub(crate) fn has_more_than_its_share(&self, all: &Budget) -> bool {
        self.unread.get().is_some_and(|share| share.is_spent()) && all.used() >= all.limit() / 2
    }

    /// The queue leads through here no more.
    pub(crate) fn leave_relay(&self, queue: &Arc<RelayQueue>) {
        if let Some(members) = lock(&self.members).as_mut()
            && members.passing.get(&queue.id).is_some_and(|(_, known, _)| Arc::ptr_eq(known, queue))
        {
            members.passing.remove(&queue.id);
        }
    }

    pub(super) fn forget_if_over(&self, source: &FrameSource) {
        if let FrameSource::Passing(queue) = source
            && queue.is_over()
        {
            self.leave_relay(queue);
        }
    }

    /// Sessions that pass through here.
    pub(crate) fn passing(&self) -> Vec<Arc<RelayQueue>> {
        let members = lock(&self.members);
        in_order(
            members
                .iter()
                .flat_map(|members| members.passing.values())
                .map(|(came, queue, _)| (*came, queue.clone())),
        )
    }

    /// Sessions with an end here.
    pub(crate) fn own(&self) -> Vec<Arc<SessionCore>> {
        let members = lock(&self.members);
        let own = members.iter().flat_map(|members| members.own.values());
        in_order(own.filter_map(|(came, session)| Some((*came, session.upgrade()?))))
    }

    /// Closes the link for good and returns all that ran on it.
    pub(crate) fn disband(&self) -> (Vec<Arc<SessionCore>>, Vec<SessionId>) {
        self.close();
        let Some(Members { own, passing, .. }) = lock(&self.members).take() else {
            return Default::default();
        };
        let own = own.into_values().filter_map(|(came, session)| Some((came, session.upgrade()?)));
        (in_order(own), in_order(passing.into_iter().map(|(id, (came, ..))| (came, id))))
    }

    /// Unread bytes of a session that runs here.
    pub(crate) fn queued(&self, id: SessionId) -> usize {
        let session =
            lock(&self.members).as_ref().and_then(|m| m.own.get(&id)).and_then(|(_, s)| s.upgrade());
        session.map_or(0, |s| s.queued())
    }
}

fn in_order<T>(members: impl Iterator<Item = (u64, T)>) -> Vec<T> {
    let mut members: Vec<(u64, T)> = members.collect();
    members.sort_unstable_by_key(|(came, _)| *came);
    members.into_iter().map(|(_, member)| member).collect()
}
