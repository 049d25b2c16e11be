//! The link for interactive sessions that stands beside one that is busy with bulk, and which sessions are to run there.

use std::collections::HashSet;
use std::sync::Arc;

use crate::names::SessionId;
use crate::protocol::link::sender::LinkSender;
use crate::protocol::lock;

/// The link beside a busy one.
#[derive(Debug)]
pub(super) struct Interactive {
    link: Arc<LinkSender>,
    /// The sessions that are to run there.
    meant: HashSet<SessionId>,
}

impl LinkSender {
    /// From now on interactive sessions of this link may run on that one; on none, with `None`. Returns the one before. What
    /// runs there goes on over the new one, once it is resumed.
    pub fn stand_beside(&self, link: Option<Arc<Self>>) -> Option<Arc<Self>> {
        let meant = self.beside().map(|before| before.members()).unwrap_or_default();
        let next = link.map(|link| Box::new(Interactive { link, meant }));
        self.share(next.is_some());
        let before = std::mem::replace(&mut *lock(&self.interactive), next);
        before.map(|before| before.link)
    }

    /// From now on nothing more goes from here to that link, if it still is the one beside this.
    pub fn leave_beside(&self, beside: &Self) {
        let left = lock(&self.interactive).take_if(|interactive| interactive.link.id == beside.id);
        if left.is_some() {
            self.share(false);
        }
    }

    /// Bulk leaves a little of the line free while others have a link there.
    fn share(&self, shared: bool) {
        self.lock().pace.iter_mut().for_each(|pace| pace.share(shared));
    }

    /// The link for interactive sessions beside this one.
    pub fn beside(&self) -> Option<Arc<Self>> {
        lock(&self.interactive).as_ref().map(|interactive| interactive.link.clone())
    }

    /// Where a session is to run that is to be resumed on this link: here, or on the link beside it.
    pub(crate) fn carrier(self: &Arc<Self>, id: SessionId) -> Arc<Self> {
        let beside = {
            let interactive = lock(&self.interactive);
            let meant = interactive.as_ref().filter(|interactive| interactive.meant.contains(&id));
            meant.map(|interactive| interactive.link.clone())
        };
        beside.filter(|link| !link.is_closed()).unwrap_or_else(|| self.clone())
    }

    /// Has a session run on the link beside this one, if there is one, or here, from when it is resumed next.
    pub(crate) fn divert(&self, id: SessionId, beside: bool) {
        if let Some(interactive) = lock(&self.interactive).as_mut() {
            if beside {
                interactive.meant.insert(id)
            } else {
                interactive.meant.remove(&id)
            };
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::names::NodeName;
    use crate::protocol::link::source::LinkId;
    use crate::protocol::wire::hello::Dialect;
    use crate::protocol::wire::peer::Peer;

    #[tokio::test]
    async fn a_session_that_is_meant_for_the_link_beside_goes_there_while_that_lives() {
        let [busy, first, second] = [1, 2, 3].map(|number| {
            LinkSender::new(LinkId(number), Peer::Cloud(NodeName::none()), None, Dialect::NEWEST)
        });
        let [meant, other] = [(); 2].map(|()| SessionId::random());
        busy.divert(meant, true);
        assert_eq!(busy.carrier(meant).id, busy.id, "there is none beside it");
        assert!(busy.stand_beside(Some(first.clone())).is_none());
        busy.divert(meant, true);
        assert_eq!([meant, other].map(|id| busy.carrier(id).id), [first.id, busy.id]);
        first.join(meant);
        first.close();
        assert_eq!(busy.carrier(meant).id, busy.id);
        busy.divert(other, true);
        assert_eq!(busy.stand_beside(Some(second.clone())).map(|before| before.id), Some(first.id));
        assert_eq!(busy.carrier(meant).id, second.id, "it ran on the one before");
        assert_eq!(busy.carrier(other).id, busy.id, "it did not");
        busy.divert(meant, false);
        assert_eq!(busy.carrier(meant).id, busy.id);
        busy.leave_beside(&first);
        assert_eq!(busy.beside().map(|beside| beside.id), Some(second.id), "another one has its place");
        busy.leave_beside(&second);
        assert!(busy.beside().is_none() && busy.stand_beside(None).is_none());
    }
}
