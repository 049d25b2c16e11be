//! Which two links a session passes through, and whose it is.

use crate::protocol::link::source::LinkId;
use crate::protocol::relay::table::attempt::{Attempt, Seeker};
use crate::protocol::relay::table::hop::RelayLeg;
use crate::protocol::wire::opener::Opener;
use crate::protocol::wire::peer::Peer;

/// Which two links a session passes through, and who seeks the second one.
#[derive(Debug)]
pub(super) struct Binding {
    pub(super) epoch: u64,
    /// Who opened the session, once that is known.
    pub(super) by: Option<Opener>,
    pub(super) opener: RelayLeg,
    /// None while a path to the acceptor is sought.
    pub(super) acceptor: Option<RelayLeg>,
    /// Who seeks that path until the attempt is answered, if anybody does.
    pub(super) seeker: Option<Seeker>,
}

impl Binding {
    /// Whether this attempt has made it.
    pub(super) fn is_of(&self, attempt: &Attempt) -> bool {
        self.epoch == attempt.epoch && self.opener.link.id == attempt.from.id
    }

    /// The leg on that link, and the other one if there is one. None if no leg is there.
    pub(super) fn legs(&self, link: LinkId) -> Option<(RelayLeg, Option<RelayLeg>)> {
        if self.opener.link.id == link {
            return Some((self.opener.clone(), self.acceptor.clone()));
        }
        let acceptor = self.acceptor.clone().filter(|acceptor| acceptor.link.id == link)?;
        Some((acceptor, Some(self.opener.clone())))
    }

    /// Whether another process opened the session. An older pod does not send the opener; then the edge that accepted
    /// the session is foreign.
    pub(super) fn is_foreign(&self, attempt: &Attempt) -> bool {
        let accepted = |hop: &RelayLeg| hop.link.peer == attempt.from.peer && hop.link.peer != Peer::Pod;
        let unknown = self.by.is_none();
        !Opener::agree(self.by.as_ref(), attempt.opener.as_ref())
            || unknown && self.acceptor.as_ref().is_some_and(accepted)
    }
}
