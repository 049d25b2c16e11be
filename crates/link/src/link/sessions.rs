//! The sessions that run on one link: those with an end here, and relayed ones.

use std::collections::{HashMap, HashSet};
use std::ptr;
use std::sync::Arc;

use crate::link::Link;
use crate::relay::queue::RelayQueue;
use crate::schedule::frame_source::FrameSource;
use tunnel_proto::budget::{Budget, PairedReservation, Reservation};
use tunnel_proto::frame::SessionKey;
use tunnel_proto::names::{NodeName, SessionId};

/// The sessions that run on a link: those with an end here and relayed ones. Each has a number for the order in which
/// it joined; in that order they are notified of the link's end, so that a simulation repeats from its seed.
///
/// [`Link::detach_all`] takes the whole list out, and afterwards joining fails. A session that comes too late
/// sees that and handles the link's end itself. So every session handles the end exactly once.
#[derive(Debug, Default)]
pub(crate) struct LinkSessions {
    /// Sessions with an end in this process, each with the number of its stay on this link. It is on the link as long
    /// as its state says so; this list follows a moment later, and the numbers keep a late change from undoing a newer
    /// one.
    own: LinkSessionIndex<u64>,
    relayed: LinkSessionIndex<RelayedEntry>,
    /// Number of sessions that have joined so far.
    joined: u64,
    /// Whether the link has ended: no session may join any longer.
    ended: bool,
}

/// A relayed session whose frames are sent on this link.
#[derive(Debug)]
struct RelayedEntry {
    source: Arc<RelayQueue>,
    /// The epoch of its attempt.
    epoch: u64,
}

/// Sessions of one kind on a link, by id and by node: a node that moves concerns only its own sessions, and thousands
/// may move at once.
#[derive(Debug, educe::Educe)]
#[educe(Default)]
struct LinkSessionIndex<T> {
    all: HashMap<SessionId, SessionEntry<T>>,
    by_node: HashMap<NodeName, HashSet<SessionId>>,
}

/// A session on a link.
#[derive(Debug)]
struct SessionEntry<T> {
    /// Its number in the order in which sessions joined the link.
    number: u64,
    node: NodeName,
    more: T,
}

impl<T> LinkSessionIndex<T> {
    fn insert(&mut self, id: SessionId, member: SessionEntry<T>) -> Option<T> {
        let before = self.remove(id);
        self.by_node.entry(member.node.clone()).or_default().insert(id);
        self.all.insert(id, member);
        before
    }

    fn get(&self, id: SessionId) -> Option<&T> {
        self.all.get(&id).map(|member| &member.more)
    }

    fn remove(&mut self, id: SessionId) -> Option<T> {
        let member = self.all.remove(&id)?;
        if let Some(ids) = self.by_node.get_mut(&member.node) {
            ids.remove(&id);
            if ids.is_empty() {
                self.by_node.remove(&member.node);
            }
        }
        Some(member.more)
    }

    /// Returns all sessions, or those of one node, each with its number.
    fn numbered(&self, of: Option<&NodeName>) -> Vec<(u64, SessionId)> {
        match of {
            None => self.all.iter().map(|(id, member)| (member.number, *id)).collect(),
            Some(node) => {
                let ids = self.by_node.get(node).into_iter().flatten();
                ids.filter_map(|id| Some((self.all.get(id)?.number, *id))).collect()
            }
        }
    }
}

impl LinkSessions {
    fn next_number(&mut self) -> u64 {
        self.joined += 1;
        self.joined
    }

    /// Adds a session with an end here. Does nothing if a later stay of it is known.
    fn handle_attached(&mut self, key: &SessionKey, stay: u64) {
        let number = self.next_number();
        if self.own.get(key.id).is_none_or(|known| *known < stay) {
            self.own.insert(key.id, SessionEntry { number, node: key.node.clone(), more: stay });
        }
    }

    /// Ends that stay of a session with an end here.
    fn handle_detached(&mut self, id: SessionId, stay: u64) {
        if self.own.get(id) == Some(&stay) {
            self.own.remove(id);
        }
    }

    /// Adds a relay's source for attempt `epoch`. Returns an older source of the same session, which it replaces, or
    /// else this one if a newer one is known: attempts may be added out of order.
    fn handle_relay_attached(&mut self, source: &Arc<RelayQueue>, epoch: u64) -> Option<SupersededQueue> {
        let key = source.key();
        if self.relayed.get(key.id).is_some_and(|known| known.epoch > epoch) {
            return Some(SupersededQueue::New);
        }
        let more = RelayedEntry { source: source.clone(), epoch };
        let member = SessionEntry { number: self.next_number(), node: key.node.clone(), more };
        self.relayed.insert(key.id, member).map(|older| SupersededQueue::Old(older.source))
    }

    /// Removes a relay's source. A newer source of the same session stays; the two are compared by address.
    fn handle_relay_detached(&mut self, id: SessionId, source: *const ()) -> Option<RelayedEntry> {
        let known = self.relayed.get(id)?;
        if !ptr::addr_eq(Arc::as_ptr(&known.source), source) {
            return None;
        }
        self.relayed.remove(id)
    }
}

/// Which of two sources of a relayed session has been replaced by the other.
enum SupersededQueue {
    Old(Arc<RelayQueue>),
    New,
}

/// Returns the sessions in the order of their numbers.
fn in_order(mut numbered: Vec<(u64, SessionId)>) -> Vec<SessionId> {
    numbered.sort_unstable();
    numbered.into_iter().map(|(_, id)| id).collect()
}

impl Link {
    /// Returns the number of sessions that have their path over this link, including relayed ones.
    pub fn sessions(&self) -> usize {
        let sessions = &self.lock().sessions;
        sessions.own.all.len() + sessions.relayed.all.len()
    }

    /// Returns true if a session with that node has its path over this link.
    pub fn has_sessions_of(&self, node: &NodeName) -> bool {
        let sessions = &self.lock().sessions;
        sessions.own.by_node.contains_key(node) || sessions.relayed.by_node.contains_key(node)
    }

    /// Returns true if the link has ever been the path of a session, including sessions that have ended.
    pub fn has_carried(&self) -> bool {
        self.lock().sessions.joined > 0
    }

    /// Adds a session with an end here, for that stay. Returns false if the link has ended: then its path is lost.
    pub(crate) fn attach(&self, key: &SessionKey, stay: u64) -> bool {
        self.with_sessions(|sessions| sessions.handle_attached(key, stay)).is_some()
    }

    /// Ends that stay of a session, which runs elsewhere or is over.
    pub(crate) fn detach(&self, id: SessionId, stay: u64) {
        self.with_sessions(|sessions| sessions.handle_detached(id, stay));
    }

    /// Adds a relay's source for attempt `epoch`. An older source of the same session sends nothing more, except the
    /// PathLost frame of a newer attempt. Returns false if the link has ended.
    pub(crate) fn attach_relay(&self, source: &Arc<RelayQueue>, epoch: u64) -> bool {
        let Some(superseded) = self.with_sessions(|sessions| sessions.handle_relay_attached(source, epoch))
        else {
            return false;
        };
        match superseded {
            Some(SupersededQueue::New) => source.close(),
            Some(SupersededQueue::Old(older)) => {
                older.retire(epoch);
                source.follow();
            }
            None => {}
        }
        // The source may have been closed, or have sent its last frame, before it was added. Then nothing else would
        // remove it.
        if source.is_over() {
            self.detach_relay(&**source);
        }
        true
    }

    /// Removes a relay's source, unless another one of the same session has replaced it.
    pub(crate) fn detach_relay(&self, source: &dyn FrameSource) {
        let id = source.key().id;
        let address = ptr::from_ref(source).cast();
        let _removed = self.with_sessions(|sessions| sessions.handle_relay_detached(id, address));
    }

    /// Returns an empty reservation in the budget of `most` bytes for relayed sessions on this link.
    pub(crate) fn relay_reservation(&self, most: usize) -> Reservation {
        self.relay_budget.get_or_init(|| Budget::new(most)).reservation()
    }

    /// Returns an empty reservation for unread bytes of a session, if the remote honours no limits.
    pub(crate) fn unread_reservation(&self) -> Option<PairedReservation> {
        self.plain.get().map(|plain| plain.reservation())
    }

    /// Returns the sessions that are relayed over this link, in the order of joining: all, or those of one node.
    pub(crate) fn relayed(&self, of: Option<&NodeName>) -> Vec<SessionId> {
        let sessions = self.lock().sessions.relayed.numbered(of);
        in_order(sessions)
    }

    /// Returns the sessions with an end here, in the order of joining: all, or those of one node.
    pub(crate) fn own(&self, of: Option<&NodeName>) -> Vec<SessionId> {
        let sessions = self.lock().sessions.own.numbered(of);
        in_order(sessions)
    }

    /// Returns all sessions on this link.
    pub(crate) fn members(&self) -> HashSet<SessionId> {
        let sessions = &self.lock().sessions;
        sessions.own.all.keys().chain(sessions.relayed.all.keys()).copied().collect()
    }

    /// Closes the link for good. Returns the sessions with an end in this process that ran on it, and the relayed ones,
    /// each in the order of joining.
    pub(crate) fn detach_all(&self) -> (Vec<SessionId>, Vec<SessionId>) {
        self.close();
        let (own, relayed) = {
            let sessions = &mut self.lock().sessions;
            sessions.ended = true;
            (std::mem::take(&mut sessions.own), std::mem::take(&mut sessions.relayed))
        };
        (in_order(own.numbered(None)), in_order(relayed.numbered(None)))
    }

    /// Runs `step` on the sessions of the link. Returns `None` if the link has ended.
    fn with_sessions<T>(&self, step: impl FnOnce(&mut LinkSessions) -> T) -> Option<T> {
        let sessions = &mut self.lock().sessions;
        if sessions.ended { None } else { Some(step(sessions)) }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use tunnel_proto::frame::SessionCategory;

    use super::*;

    /// Returns the links of a session's stays, and the changes of the links' lists in any order: each stay ends the one
    /// before (false) and begins (true).
    fn moves() -> impl Strategy<Value = (Vec<usize>, Vec<(usize, bool)>)> {
        prop::collection::vec(0..3_usize, 1..8).prop_flat_map(|links| {
            let changes: Vec<_> = (0..links.len()).flat_map(|stay| [(stay, false), (stay, true)]).collect();
            (Just(links), Just(changes).prop_shuffle())
        })
    }

    proptest! {
        #[test]
        fn a_session_is_on_the_link_of_its_last_stay_in_whatever_order_threads_apply_its_moves((links, changes) in moves()) {
            let key = SessionKey { id: SessionId::from_bits(1), category: SessionCategory::Ssh, node: NodeName::none() };
            let mut lists: [LinkSessions; 3] = Default::default();
            let last = links.len() - 1;
            for (stay, begins) in changes {
                if begins {
                    lists[links[stay]].handle_attached(&key, stay as u64);
                }
                let ended = if !begins { stay.checked_sub(1) } else { Some(stay).filter(|stay| *stay != last) };
                if let Some(ended) = ended {
                    lists[links[ended]].handle_detached(key.id, ended as u64);
                }
            }
            for (link, list) in lists.iter().enumerate() {
                let stay = Some(last as u64).filter(|_| link == links[last]);
                prop_assert_eq!(list.own.get(key.id).copied(), stay);
                prop_assert_eq!(list.own.by_node.len(), usize::from(stay.is_some()));
            }
        }
    }
}
