//! The link for interactive sessions next to a link that is busy with bulk, and the sessions assigned to it.
//!
//! `LinkSender::link_for` is the only place where it affects a session's path. Which sessions are interactive is
//! decided in `table::traffic_class`.

use std::collections::HashSet;
use std::sync::Arc;

use crate::sender::LinkSender;
use tunnel_base::names::SessionId;

/// The interactive link next to a busy one.
#[derive(Debug)]
pub(crate) struct InteractiveLink {
    link: Arc<LinkSender>,
    /// The sessions assigned to it.
    meant: HashSet<SessionId>,
}

impl LinkSender {
    /// Sets the link on which interactive sessions of this link may run, or none with `None`. Returns the previous one.
    ///
    /// Sessions that run on the previous link continue on the new one once they are resumed.
    pub fn set_interactive(&self, link: Option<Arc<Self>>) -> Option<Arc<Self>> {
        let meant = self.interactive().map(|before| before.members()).unwrap_or_default();
        let next = link.map(|link| Box::new(InteractiveLink { link, meant }));
        self.share(next.is_some());
        let before = std::mem::replace(&mut *self.interactive.lock(), next);
        before.map(|before| before.link)
    }

    /// Removes the interactive link if it is still `beside`.
    pub fn clear_interactive(&self, beside: &Self) {
        let left = self.interactive.lock().take_if(|interactive| interactive.link.id == beside.id);
        if left.is_some() {
            self.share(false);
        }
    }

    /// Makes bulk leave a little of the line free while there is an interactive link.
    fn share(&self, shared: bool) {
        self.lock().pacing.bulk.iter_mut().for_each(|bulk| bulk.set_shared(shared));
    }

    /// Returns the link for interactive sessions next to this one.
    pub fn interactive(&self) -> Option<Arc<Self>> {
        self.interactive.lock().as_ref().map(|interactive| interactive.link.clone())
    }

    /// Returns the link on which a session should be resumed: this one, or its interactive link.
    pub(crate) fn link_for(self: &Arc<Self>, id: SessionId) -> Arc<Self> {
        let beside = {
            let interactive = self.interactive.lock();
            let meant = interactive.as_ref().filter(|interactive| interactive.meant.contains(&id));
            meant.map(|interactive| interactive.link.clone())
        };
        beside.filter(|link| !link.is_closed()).unwrap_or_else(|| self.clone())
    }

    /// Sets whether a session runs on the interactive link, if there is one, after its next resumption.
    pub(crate) fn set_link_for(&self, id: SessionId, beside: bool) {
        if let Some(interactive) = self.interactive.lock().as_mut() {
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
    use tunnel_base::names::{Instance, NodeName};
    use tunnel_proto::frame::{Category, Remote, SessionKey};
    use tunnel_proto::state::LinkId;

    use super::*;

    #[tokio::test]
    async fn a_session_that_is_meant_for_the_link_beside_goes_there_while_that_lives() {
        let [busy, first, second] = [1, 2, 3].map(|number| {
            LinkSender::new(LinkId(number), Remote::Server(NodeName::none()), Some(Instance::random()))
        });
        let [meant, other] = [(); 2].map(|()| SessionId::random());
        let key = SessionKey { id: meant, category: Category::Ssh, node: NodeName::none() };
        busy.set_link_for(meant, true);
        assert_eq!(busy.link_for(meant).id, busy.id, "it has no interactive link");
        assert!(busy.set_interactive(Some(first.clone())).is_none());
        busy.set_link_for(meant, true);
        assert_eq!([meant, other].map(|id| busy.link_for(id).id), [first.id, busy.id]);
        first.attach(&key);
        first.close();
        assert_eq!(busy.link_for(meant).id, busy.id);
        busy.set_link_for(other, true);
        assert_eq!(busy.set_interactive(Some(second.clone())).map(|before| before.id), Some(first.id));
        assert_eq!(busy.link_for(meant).id, second.id, "it ran on the previous one");
        assert_eq!(busy.link_for(other).id, busy.id, "it did not");
        busy.set_link_for(meant, false);
        assert_eq!(busy.link_for(meant).id, busy.id);
        busy.clear_interactive(&first);
        assert_eq!(
            busy.interactive().map(|beside| beside.id),
            Some(second.id),
            "another link has replaced it"
        );
        busy.clear_interactive(&second);
        assert!(busy.interactive().is_none() && busy.set_interactive(None).is_none());
    }
}
