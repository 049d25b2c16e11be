//! Which sessions run on one link.

use std::collections::{HashMap, HashSet};
use std::ptr;
use std::sync::Arc;

use crate::names::SessionId;
use crate::protocol::budget::{Budget, Share};
use crate::protocol::link::sender::LinkSender;
use crate::protocol::link::source::{FrameSource, RelaySource};
use crate::protocol::lock;
use crate::protocol::wire::frame::SessionKey;

/// The sessions that run on a link: those with an end here, and those that are relayed, each with a number for the
/// order in which it came. In that order they learn of the link's end.
///
/// The list is what the link's end goes by. [`LinkSender::disband`] takes it out whole, and from then on joining fails:
/// a session that comes too late sees so and treats the link as ended itself. So every session learns of the end once,
/// in one way or the other.
#[derive(Debug, Default)]
pub(crate) struct Members {
    own: HashMap<SessionId, u64>,
    relayed: HashMap<SessionId, Relayed>,
    came: u64,
}

#[derive(Debug)]
struct Relayed {
    came: u64,
    source: Arc<dyn RelaySource>,
    /// The attempt that it belongs to.
    epoch: u64,
}

/// What ran on a link that has ended, in the order in which it came.
#[derive(Debug, Default)]
pub(crate) struct Disbanded {
    /// Sessions with an end in this process.
    pub(crate) own: Vec<SessionId>,
    /// Sessions that were relayed.
    pub(crate) relayed: Vec<SessionId>,
}

impl LinkSender {
    /// Number of sessions whose path this link is, those that are relayed among them.
    pub fn sessions(&self) -> usize {
        lock(&self.members).as_ref().map_or(0, |members| members.own.len() + members.relayed.len())
    }

    /// Whether it was the path of a session at any time, be it one that has ended since.
    pub fn has_carried(&self) -> bool {
        lock(&self.members).as_ref().is_some_and(|members| members.came > 0)
    }

    /// Adds a session that runs here. False if the link has ended: the caller then treats its path as lost.
    pub(crate) fn join(&self, id: SessionId) -> bool {
        let mut members = lock(&self.members);
        if let Some(members) = members.as_mut() {
            members.came += 1;
            members.own.insert(id, members.came);
        }
        members.is_some()
    }

    /// Removes a session that runs elsewhere, or is over.
    pub(crate) fn part(&self, id: SessionId) {
        if let Some(members) = lock(&self.members).as_mut() {
            members.own.remove(&id);
        }
    }

    /// Adds a relay's source for attempt `epoch`. An older source of the same session sends nothing more, except the
    /// Lost of an attempt that is newer still. False if the link has ended.
    ///
    /// Attempts may be added out of order, because the relay table releases its lock before it calls this.
    pub(crate) fn pass<S: RelaySource + 'static>(&self, source: &Arc<S>, epoch: u64) -> bool {
        let id = source.key().id;
        let mut members = lock(&self.members);
        let Some(known) = members.as_mut() else { return false };
        if known.relayed.get(&id).is_some_and(|newer| newer.epoch > epoch) {
            // This attempt comes late: a newer one has passed here meanwhile.
            drop(members);
            source.close();
            return true;
        }
        known.came += 1;
        let relayed = Relayed { came: known.came, source: source.clone(), epoch };
        let older = known.relayed.insert(id, relayed);
        drop(members);
        if let Some(older) = older {
            older.source.retire(epoch);
        }
        // Another thread may have closed the source, or it may have sent its last frame, before it was added: nobody
        // else would remove it then, so this looks again.
        if source.is_over() {
            self.leave_relay(&**source);
        }
        true
    }

    /// An empty share of what may wait here for all sessions that are relayed: `most` bytes.
    pub(crate) fn room_for_relays(&self, most: usize) -> Share {
        self.room.get_or_init(|| Budget::new(most)).share()
    }

    /// An empty share of what may wait here for readers of a plain peer's sessions, which the table of sessions bounds
    /// in all.
    pub(crate) fn room_unread(&self, most: usize) -> Share {
        self.unread.get_or_init(|| Budget::new(most)).share()
    }

    /// Whether sessions of this plain link have more unread than its share, while half of all is spent.
    pub(crate) fn has_more_than_its_share(&self, all: &Budget) -> bool {
        self.unread.get().is_some_and(|share| share.is_spent()) && all.used() >= all.limit() / 2
    }

    /// Removes a relay's source. A newer source of the same session stays: the two differ in their addresses.
    pub(crate) fn leave_relay<S: FrameSource + ?Sized>(&self, source: &S) {
        let id = &source.key().id;
        if let Some(members) = lock(&self.members).as_mut()
            && members.relayed.get(id).is_some_and(|known| ptr::addr_eq(Arc::as_ptr(&known.source), source))
        {
            members.relayed.remove(id);
        }
    }

    /// Sessions that are relayed over this link.
    pub(crate) fn relayed(&self) -> Vec<SessionKey> {
        let members = lock(&self.members);
        let relayed = members.iter().flat_map(|members| members.relayed.values());
        in_order(relayed.map(|relayed| (relayed.came, relayed.source.key().clone())))
    }

    /// Sessions with an end here.
    pub(crate) fn own(&self) -> Vec<SessionId> {
        let members = lock(&self.members);
        in_order(members.iter().flat_map(|members| &members.own).map(|(id, came)| (*came, *id)))
    }

    /// Every session here.
    pub(super) fn members(&self) -> HashSet<SessionId> {
        let members = lock(&self.members);
        members.iter().flat_map(|members| members.own.keys().chain(members.relayed.keys())).copied().collect()
    }

    /// Closes the link for good and returns all that ran on it.
    pub(crate) fn disband(&self) -> Disbanded {
        self.close();
        let Some(Members { own, relayed, .. }) = lock(&self.members).take() else {
            return Disbanded::default();
        };
        Disbanded {
            own: in_order(own.into_iter().map(|(id, came)| (came, id))),
            relayed: in_order(relayed.into_iter().map(|(id, relayed)| (relayed.came, id))),
        }
    }
}

fn in_order<T>(members: impl Iterator<Item = (u64, T)>) -> Vec<T> {
    let mut members: Vec<(u64, T)> = members.collect();
    members.sort_unstable_by_key(|(came, _)| *came);
    members.into_iter().map(|(_, member)| member).collect()
}
