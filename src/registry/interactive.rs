//! Links for interactive sessions, which stand beside their node's current link.

use std::sync::Arc;

use super::{Linked, Nodes, Registry};
use crate::names::{Instance, NodeName};
use crate::protocol::LinkSender;

impl Nodes {
    /// The link beside which an interactive one of that process may stand.
    fn busy(&self, node: &NodeName, instance: Option<Instance>) -> Option<Arc<LinkSender>> {
        let current = self.linked.get(node)?;
        let may = instance.is_some() && current.instance == instance && !self.older.contains_key(node);
        may.then(|| current.sender.clone())
    }

    /// Takes out the link that only carries sessions, and by which nobody finds the node, if that is `sender`.
    pub(super) fn take_aside(&mut self, node: &NodeName, sender: &LinkSender) -> bool {
        [&mut self.leaving, &mut self.interactive].into_iter().any(|links| {
            let is = links.get(node).is_some_and(|linked| linked.sender.id == sender.id);
            is && links.remove(node).is_some()
        })
    }

    /// Takes out the interactive link of another process than the one that has linked now.
    pub(super) fn take_foreign(&mut self, node: &NodeName, instance: Option<Instance>) -> Option<Linked> {
        let foreign = self.interactive.get(node).is_some_and(|beside| beside.instance != instance);
        if foreign { self.interactive.remove(node) } else { None }
    }
}

impl Registry {
    /// Returns the node's links here, except the one by which it is found.
    pub(super) fn beside(&self, node: &NodeName) -> Vec<Arc<LinkSender>> {
        let nodes = self.lock();
        let links = [&nodes.older, &nodes.leaving, &nodes.interactive];
        links.into_iter().filter_map(|links| links.get(node)).map(|linked| linked.sender.clone()).collect()
    }

    /// Whether a link for interactive sessions of that process may stand beside its node's current one: it is linked here, and
    /// has not made a second link because the first one is silent, of which one is about to go.
    pub fn may_stand_beside(&self, node: &NodeName, instance: Option<Instance>) -> bool {
        self.lock().busy(node, instance).is_some()
    }

    /// Takes an interactive link to its node's current one, which is returned; one that it had before is closed. None, if
    /// it may not stand there.
    pub fn stand_beside(&self, linked: Linked) -> Option<Arc<LinkSender>> {
        let node = linked.sender.peer.node().cloned()?;
        let (busy, before) = {
            let mut nodes = self.lock();
            let busy = nodes.busy(&node, linked.instance)?;
            (busy, nodes.interactive.insert(node, linked))
        };
        // As in `insert`: closing a link takes the link's own lock.
        before.inspect(|before| before.sender.close());
        Some(busy)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::protocol::{Dialect, LinkId, Peer};
    use crate::telemetry::Metrics;

    fn linked(number: u64, instance: u128) -> Linked {
        let (peer, instance) = (Peer::Edge("node1".parse().unwrap()), Some(Instance::from_bits(instance)));
        let sender = LinkSender::new(LinkId(number), peer, instance, Dialect::NEWEST);
        Linked { sender, instance, from: ([10, 0, 0, 1], 1).into(), ips: Arc::default() }
    }

    #[tokio::test]
    async fn an_interactive_link_stands_beside_a_link_of_its_process_and_is_not_found() {
        let registry = Registry::new(Metrics::cloud("", ""));
        let [busy, first, second] = [(1, 7), (2, 7), (3, 7)].map(|(number, of)| linked(number, of));
        let node = "node1".parse().unwrap();
        assert!(registry.stand_beside(first.clone()).is_none(), "the node is not here");
        registry.insert(busy.clone(), false);
        assert!(registry.stand_beside(linked(9, 8)).is_none(), "another process");
        assert_eq!(registry.stand_beside(first.clone()).map(|busy| busy.id), Some(busy.sender.id));
        assert_eq!(registry.here(&node).map(|found| found.sender.id), Some(busy.sender.id));
        registry.stand_beside(second.clone()).unwrap();
        assert!(first.sender.is_closed() && !second.sender.is_closed(), "the newer one stays");
        registry.remove(&first.sender);
        assert_eq!(registry.lock().interactive[&node].sender.id, second.sender.id);
        let again = linked(10, 7);
        assert!(registry.may_stand_beside(&node, busy.instance));
        let beside_silent = linked(8, 7);
        registry.insert(beside_silent.clone(), true);
        assert!(!registry.may_stand_beside(&node, busy.instance), "one of the two is about to go");
        registry.remove(&beside_silent.sender);
        registry.insert(again.clone(), false);
        assert!(busy.sender.is_closed() && !second.sender.is_closed(), "its process may go on there");
        registry.insert(linked(11, 12), false);
        assert!(second.sender.is_closed(), "its process is gone");
        registry.close_all();
        assert!(registry.lock().interactive.is_empty());
    }
}
