//! Links for interactive sessions, which stand beside their node's current link.

use std::sync::Arc;

use super::{Linked, Nodes, Registry};
use crate::names::{Instance, NodeName};
use crate::protocol::LinkSender;

impl Nodes {
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
    /// Puts a link for interactive sessions beside the current one of its node, which is returned; one that stood there
    /// is closed. None, if the node is not linked here as the same process.
    pub fn stand_beside(&self, linked: Linked) -> Option<Arc<LinkSender>> {
        let node = linked.sender.peer.node().cloned()?;
        let sender = linked.sender.clone();
        let (busy, before) = {
            let mut nodes = self.lock();
            let same = |current: &&Linked| current.instance.is_some() && current.instance == linked.instance;
            let busy = nodes.linked.get(&node).filter(same)?.sender.clone();
            (busy, nodes.interactive.insert(node, linked))
        };
        busy.stand_beside(Some(sender));
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
        assert_eq!(busy.sender.beside().map(|beside| beside.id), Some(second.sender.id));
        let again = linked(10, 7);
        registry.insert(again.clone(), false);
        assert!(busy.sender.is_closed() && !second.sender.is_closed(), "its process may go on there");
        registry.insert(linked(11, 12), false);
        assert!(second.sender.is_closed(), "its process is gone");
        registry.close_all();
        assert!(registry.lock().interactive.is_empty());
    }
}
