//! Edges that link elsewhere while this pod goes on.

use std::cmp::Reverse;
use std::collections::HashMap;
use std::net::SocketAddr;
use std::time::Duration;

use super::{Linked, Nodes, Registry};
use crate::names::NodeName;
use crate::protocol::LinkSender;

impl Nodes {
    /// Takes out the link by which a node is found, or the older one beside it; that becomes the node's current one
    /// again. `None`: neither is that link.
    pub(super) fn take(&mut self, node: &NodeName, sender: &LinkSender) -> Option<Linked> {
        let is =
            |of: &HashMap<NodeName, Linked>| of.get(node).is_some_and(|known| known.sender.id == sender.id);
        if is(&self.older) {
            return self.older.remove(node);
        }
        if !is(&self.linked) {
            return None;
        }
        if let Some(older) = self.older.remove(node) {
            return self.linked.insert(node.clone(), older);
        }
        self.past.left(node);
        let gone = self.linked.remove(node);
        tunnel_pages::shrink(&mut self.linked);
        gone
    }
}

impl Registry {
    /// How many nodes are found here, and how many of them were asked to link elsewhere and have not done it yet.
    pub fn held(&self) -> (usize, usize) {
        let nodes = self.lock();
        let asked = nodes.linked.values().filter(|linked| linked.sender.is_drained()).count();
        (nodes.linked.len(), asked)
    }

    /// Asks up to `most` edges to link to another pod, rather to the one at the address that `to` gives. First those
    /// with the fewest sessions, and of these the ones that were linked for longest; none that has come just now, that
    /// was asked already, or that speaks plain. Returns how many were asked.
    pub fn ask_to_move(&self, most: usize, mut to: impl FnMut() -> Option<SocketAddr>) -> usize {
        let mut links: Vec<_> = {
            let nodes = self.lock();
            let may = |link: &LinkSender| link.resumes && !link.is_drained() && link.age() >= SETTLED;
            nodes.linked.values().map(|linked| &linked.sender).filter(|link| may(link)).cloned().collect()
        };
        links.sort_by_cached_key(|link| (link.sessions(), Reverse(link.age())));
        links.iter().take(most).filter(|link| link.drain(to())).count()
    }

    /// An edge says that it has another link: its node is not found by this one any more, which stays for the sessions
    /// that run here until the edge ends it. Of two such links of a node the older one is closed.
    pub fn leave(&self, sender: &LinkSender) {
        let Some(node) = sender.peer.node() else { return };
        let mut nodes = self.lock();
        let Some(linked) = nodes.take(node, sender) else { return };
        let before = nodes.leaving.insert(node.clone(), linked);
        self.count(&nodes);
        // As in `insert`: closing a link takes the link's own lock.
        drop(nodes);
        if let Some(before) = before {
            before.sender.close();
        }
        self.changed.send_replace(());
    }
}

/// An edge that has come is left where it is for so long.
const SETTLED: Duration = Duration::from_secs(30);

#[cfg(test)]
mod tests {
    use std::sync::Arc;
    use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

    use tokio::time::advance;

    use super::*;
    use crate::names::Instance;
    use crate::protocol::{Dialect, LinkId, Peer};
    use crate::telemetry::Metrics;

    /// A new link of the node with that number.
    fn linked(registry: &Registry, number: u64, dialect: Dialect) -> Arc<LinkSender> {
        static LINKS: AtomicU64 = AtomicU64::new(0);
        let peer = Peer::Edge(format!("node{number}").parse().unwrap());
        let instance = (dialect != Dialect::Plain).then(|| Instance::from_bits(number.into()));
        let sender = LinkSender::new(LinkId(LINKS.fetch_add(1, Relaxed)), peer, instance, dialect);
        let from = ([10, 0, 0, 1], 1).into();
        registry.insert(Linked { sender: sender.clone(), instance, from, ips: Arc::default() }, false);
        sender
    }

    #[tokio::test(start_paused = true)]
    async fn those_that_are_asked_have_settled_and_understand_it_and_are_asked_once() {
        let registry = Registry::new(Metrics::cloud("", ""));
        let plain = linked(&registry, 1, Dialect::Plain);
        let old = [2, 3].map(|number| linked(&registry, number, Dialect::Extended(1)));
        advance(SETTLED).await;
        let new = linked(&registry, 4, Dialect::NEWEST);
        assert_eq!(registry.held(), (4, 0));
        assert_eq!(registry.ask_to_move(1, || None), 1);
        assert_eq!(registry.held(), (4, 1));
        assert_eq!(registry.ask_to_move(5, || None), 1);
        assert!(old.iter().all(|link| link.is_drained()) && !plain.is_drained() && !new.is_drained());
        assert_eq!(registry.ask_to_move(5, || None), 0);
    }

    #[tokio::test]
    async fn a_node_that_leaves_is_not_found_and_keeps_one_link_for_its_sessions() {
        let registry = Registry::new(Metrics::cloud("", ""));
        let node = "node1".parse().unwrap();
        let old = linked(&registry, 1, Dialect::NEWEST);
        registry.leave(&old);
        assert!(registry.here(&node).is_none() && !old.is_closed());
        assert_eq!(registry.held(), (0, 0));
        let new = linked(&registry, 1, Dialect::NEWEST);
        registry.leave(&old);
        assert!(registry.here(&node).is_some(), "it was not found by that link");
        registry.leave(&new);
        assert!(old.is_closed() && !new.is_closed(), "of two the older one goes");
        registry.remove(&new);
        assert_eq!(registry.lock().leaving.len(), 0);
    }
}
