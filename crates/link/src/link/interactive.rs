//! The link for interactive sessions in addition to a link that is busy with bulk, and the sessions assigned to it.
//!
//! `Link::link_for` is the only place where it affects a session's path. Which sessions are interactive is
//! decided in `table::traffic_class`.

use std::collections::HashSet;
use std::sync::Arc;

use crate::link::Link;
use tunnel_proto::names::SessionId;

/// The interactive link next to a busy one.
#[derive(Debug)]
pub(crate) struct InteractiveLink {
    link: Arc<Link>,
    /// The sessions assigned to it.
    meant: HashSet<SessionId>,
}

impl Link {
    /// Sets the link on which interactive sessions of this link may run, or none with `None`. Returns the previous one.
    ///
    /// Sessions that run on the previous link continue on the new one once they are resumed.
    pub fn set_interactive(&self, link: Option<Arc<Self>>) -> Option<Arc<Self>> {
        let meant = self.interactive().map(|before| before.members()).unwrap_or_default();
        let next = link.map(|link| Box::new(InteractiveLink { link, meant }));
        let before = self.with_state(|state| {
            state.queue.pacing.set_shared(next.is_some());
            std::mem::replace(&mut state.interactive, next)
        });
        before.map(|before| before.link)
    }

    /// Removes the interactive link if it is still that one.
    pub fn clear_interactive(&self, link: &Self) {
        let _removed = self.with_state(|state| {
            let removed = state.interactive.take_if(|interactive| interactive.link.id == link.id)?;
            state.queue.pacing.set_shared(false);
            Some(removed)
        });
    }

    /// Returns the link for interactive sessions next to this one.
    pub fn interactive(&self) -> Option<Arc<Self>> {
        self.lock().interactive.as_ref().map(|interactive| interactive.link.clone())
    }

    /// Returns the link on which a session should be resumed: this one, or its interactive link.
    pub(crate) fn link_for(self: &Arc<Self>, id: SessionId) -> Arc<Self> {
        let interactive = self.with_state(|state| {
            let meant = state.interactive.as_ref().filter(|interactive| interactive.meant.contains(&id));
            meant.map(|interactive| interactive.link.clone())
        });
        interactive.filter(|link| !link.is_closed()).unwrap_or_else(|| self.clone())
    }

    /// Sets whether a session runs on the interactive link, if there is one, after its next resumption.
    pub(crate) fn set_link_for(&self, id: SessionId, on_interactive: bool) {
        if let Some(interactive) = self.lock().interactive.as_mut() {
            if on_interactive {
                interactive.meant.insert(id)
            } else {
                interactive.meant.remove(&id)
            };
        }
    }
}

#[cfg(test)]
mod tests {
    use tunnel_proto::frame::{Remote, SessionCategory, SessionKey};
    use tunnel_proto::names::{Instance, NodeName};
    use tunnel_proto::state::LinkId;

    use super::*;

    #[tokio::test]
    async fn a_session_assigned_to_the_interactive_link_is_resumed_there_while_that_lives() {
        let [busy, first, second] = [1, 2, 3].map(|number| {
            Link::new(LinkId(number), Remote::Server(NodeName::none()), Some(Instance::random()))
        });
        let [meant, other] = [(); 2].map(|()| SessionId::random());
        let key = SessionKey { id: meant, category: SessionCategory::Ssh, node: NodeName::none() };
        busy.set_link_for(meant, true);
        assert_eq!(busy.link_for(meant).id, busy.id, "it has no interactive link");
        assert!(busy.set_interactive(Some(first.clone())).is_none());
        busy.set_link_for(meant, true);
        assert_eq!([meant, other].map(|id| busy.link_for(id).id), [first.id, busy.id]);
        first.attach(&key, 0);
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
            busy.interactive().map(|interactive| interactive.id),
            Some(second.id),
            "another link has replaced it"
        );
        busy.clear_interactive(&second);
        assert!(busy.interactive().is_none() && busy.set_interactive(None).is_none());
    }
}
