//! An Open or a Resume that reached a pod and names a node behind it.

use std::sync::Arc;

use crate::names::{Instance, NodeName, Target};
use crate::protocol::link::sender::LinkSender;
use crate::protocol::relay::table::{Attempt, Stand};
use crate::protocol::session::Offer;
use crate::protocol::table::SessionTable;
use crate::protocol::table::offers::ReceivedOpen;
use crate::protocol::wire::frame::{Code, Refusal, SessionFrame};
use crate::protocol::wire::peer::Peer;

/// A request to reach a node through this pod: pass it on, accept it as its end, or refuse it.
///
/// Dropping it refuses it, so no opener is ever left waiting.
#[derive(Debug)]
#[must_use = "dropping it refuses it"]
pub struct RelayRequest {
    table: Arc<SessionTable>,
    attempt: Attempt,
    /// The Open or Resume itself, until it is passed on.
    frame: Option<SessionFrame>,
}

impl RelayRequest {
    pub(crate) fn new(table: Arc<SessionTable>, attempt: Attempt, frame: SessionFrame) -> Self {
        Self { table, attempt, frame: Some(frame) }
    }

    /// Which node.
    pub fn node(&self) -> &NodeName {
        &self.attempt.key.node
    }

    /// By which link it came.
    pub fn from(&self) -> &Arc<LinkSender> {
        &self.attempt.from
    }

    /// The process that holds the session's other end, if this is to resume it: no other may be asked.
    pub fn instance(&self) -> Option<Instance> {
        match &self.frame {
            Some(SessionFrame::Resume { instance, .. }) => *instance,
            _ => None,
        }
    }

    /// The target to dial there, if this is an Open.
    pub fn target(&self) -> Option<&Target> {
        match &self.frame {
            Some(SessionFrame::Open { target, .. }) => Some(target),
            _ => None,
        }
    }

    /// Waits until its opener does not wait for this attempt any more. Cancel safe.
    pub async fn unwanted(&self) {
        self.stands(|stand| stand == Stand::Over).await;
    }

    /// Tries a path: passes it on, and takes it back if the acceptor is not there. Tried while another path has not
    /// answered, this one is only for the next attempt: as only its opener moves a session, both ends get Lost.
    pub fn try_path(&self, to: &Arc<LinkSender>) {
        let to = &to.carrier(self.attempt.key.id);
        match (self.table.relays.stand(&self.attempt), &self.frame) {
            (Stand::Sought, Some(frame)) if self.leads(to) => {
                self.table.relays.pass(&self.attempt, to, frame.clone(), true);
            }
            (Stand::Tried, _) => self.table.relays.lose(self.attempt.key.id, Some(self.attempt.epoch)),
            _ => {}
        }
    }

    /// Waits until what was tried last is answered. Whether another path is to be tried: the acceptor is not there.
    /// Cancel safe.
    pub async fn path_failed(&self) -> bool {
        self.stands(|stand| stand != Stand::Tried).await == Stand::Sought
    }

    async fn stands(&self, is: impl Fn(Stand) -> bool) -> Stand {
        loop {
            let changed = self.attempt.changed.notified();
            let stand = self.table.relays.stand(&self.attempt);
            if is(stand) {
                return stand;
            }
            changed.await;
        }
    }

    fn leads(&self, to: &LinkSender) -> bool {
        let from = &self.attempt.from;
        let second_hop = from.peer == Peer::Pod && to.peer == Peer::Pod;
        let back = from.id == to.id || to.instance.is_some() && to.instance == from.instance;
        !second_hop && !back && to.resumes
    }

    /// Passes it on: this pod relays the session from now on. What came from a pod goes to no other pod, and
    /// nothing goes back to the process it came from; both are refused as *not here*.
    pub fn pass(mut self, to: &Arc<LinkSender>) {
        let to = &to.carrier(self.attempt.key.id);
        if !self.leads(to) {
            return self.refuse(Refusal::new(Code::NotHere, "the node is not linked to this pod"));
        }
        if let Some(frame) = self.frame.take() {
            self.table.relays.pass(&self.attempt, to, frame, false);
        }
    }

    /// Answers the opener that it goes no further: [`Code::NotHere`] lets it look elsewhere.
    pub fn refuse(mut self, why: Refusal) {
        self.answer(why);
    }

    /// Takes it as the session's acceptor; none if it cannot be one: a session to resume is not here, and a new one may
    /// be too many.
    pub fn offer(mut self) -> Option<Offer> {
        let Attempt { key, epoch, from, .. } = self.attempt.clone();
        let frame = self.frame.take();
        if self.table.relays.stand(&self.attempt) != Stand::Sought {
            return None;
        }
        let Some(SessionFrame::Open { target, limit, client, opener, .. }) = frame else {
            let unknown = self.table.resumed_in_vain(key.id, self.attempt.opener.as_ref(), epoch);
            self.table.relays.end(&self.attempt, Some(unknown));
            return None;
        };
        self.table.relays.end(&self.attempt, None);
        self.table.offered(&from, ReceivedOpen { key, target, client, opener, limit, epoch })
    }

    fn answer(&mut self, refusal: Refusal) {
        if let Some(frame) = self.frame.take() {
            self.table.relays.end(&self.attempt, Some(refused(&frame, refusal)));
        }
    }
}

impl Drop for RelayRequest {
    fn drop(&mut self) {
        self.answer(Refusal::new(Code::Busy, "this pod is stopping"));
    }
}

/// The answer that refuses an Open or a Resume.
pub(crate) fn refused(frame: &SessionFrame, refusal: Refusal) -> SessionFrame {
    let epoch = frame.epoch().unwrap_or(0);
    match frame {
        SessionFrame::Open { .. } => SessionFrame::Refused { epoch, refusal },
        _ => SessionFrame::Reset { epoch, refusal },
    }
}
