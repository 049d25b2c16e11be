//! What becomes of sessions when a link ends, or is not to carry them any more.

use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;

use tokio::time::Instant;

use crate::names::{Instance, NodeName};
use crate::protocol::link::sender::{Disbanded, LinkSender};
use crate::protocol::session::{Parked, SessionCore};
use crate::protocol::table::SessionTable;
use crate::protocol::wire::frame::Refusal;

impl SessionTable {
    /// A link has ended: parks what ran on it, or ends it with `why` if the peer cannot resume, and sends Lost to the
    /// other side of what passed through. Returns the sessions for which a new path is to be sought.
    pub fn link_ended(&self, sender: &LinkSender, why: &Refusal, now: Instant) -> Vec<Parked> {
        let why = (!sender.resumes).then(|| why.clone());
        let mut parked = Vec::new();
        let Disbanded { own, relayed } = sender.disband();
        for shared in own.into_iter().filter_map(|id| self.session(id)) {
            shared.link_ended(sender.id, why.clone(), now);
            parked.extend(shared.parked());
        }
        self.relays.link_ended(sender.id, relayed);
        self.freed.store(true, Relaxed);
        parked
    }

    /// The sessions that were opened here and run on that link let go of it and send Lost there, if their node and the
    /// process of their other end, where that is known, are `meant`. Returns them: a new path is to be sought for each.
    pub fn leave(
        &self,
        sender: &Arc<LinkSender>,
        meant: impl Fn(&NodeName, Option<Instance>) -> bool,
    ) -> Vec<Parked> {
        let mut parked = Vec::new();
        for session in self.on_link(sender) {
            if !meant(&session.key.node, session.instance()) {
                continue;
            }
            session.leave(sender);
            parked.extend(session.parked());
        }
        parked
    }

    /// Whether any session with that node runs on that link, or passes through it.
    pub fn leads(&self, sender: &LinkSender, node: &NodeName) -> bool {
        self.on_link(sender).iter().any(|session| session.key.node == *node)
            || sender.relayed().iter().any(|session| session.node == *node)
    }

    /// What passes through that link to a node that is `meant` is to take another path: both ends of each session get
    /// Lost.
    pub fn release(&self, sender: &LinkSender, meant: impl Fn(&NodeName) -> bool) {
        for session in sender.relayed().into_iter().filter(|session| meant(&session.node)) {
            self.relays.lose(session.id, None);
        }
    }

    /// Resets every session that runs on that link or passes through it, with a reason for all of their ends.
    pub fn reset_on(&self, sender: &LinkSender, why: &Refusal) {
        for session in self.on_link(sender) {
            session.reset(why.clone());
        }
        for session in sender.relayed() {
            self.relays.reset(session.id, why);
        }
    }

    /// The sessions with an end here that run on that link, in the order in which they came to it.
    pub(in crate::protocol) fn on_link(&self, sender: &LinkSender) -> Vec<Arc<SessionCore>> {
        sender.own().into_iter().filter_map(|id| self.session(id)).collect()
    }
}
