//! The nodes of this pod for people who look on, also those that have gone, and why.

use std::collections::HashMap;

use tokio::time::Instant;

use super::{LastError, Linked, Registry};
use crate::names::NodeName;
use crate::protocol::LinkSender;

/// How a link of a node stands.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Standing {
    /// The node is found by it.
    Current,
    /// The older one of two that its process keeps.
    Older,
    /// It stands beside the current one for interactive sessions.
    Interactive,
    /// It stays for its sessions only; the node is found elsewhere.
    Leaving,
}

/// Every link of a node here at one moment.
#[derive(Debug, Default)]
pub struct Overview {
    /// The links, by node's name; the current one of a node first.
    pub linked: Vec<(NodeName, Standing, Linked, Option<LastError>)>,
    /// The nodes that are not linked here any more, and since when; the last to go first.
    pub gone: Vec<(NodeName, Instant, Option<LastError>)>,
}

impl Registry {
    /// The node whose link here is the oldest, and whether there are others.
    pub fn longest(&self) -> Option<(NodeName, bool)> {
        let nodes = self.lock();
        let living = nodes.linked.iter().filter(|(_, linked)| !linked.sender.is_closed());
        let (node, _) = living.max_by_key(|(_, linked)| linked.sender.age())?;
        Some((node.clone(), nodes.linked.len() > 1))
    }

    /// The nodes whose links here are the oldest, in that order, `most` of them.
    pub fn oldest(&self, most: usize) -> Vec<NodeName> {
        let nodes = self.lock();
        let mut all: Vec<_> = nodes.linked.iter().map(|(node, linked)| (linked.sender.age(), node)).collect();
        all.sort_by_key(|(age, _)| std::cmp::Reverse(*age));
        all.into_iter().take(most).map(|(_, node)| node.clone()).collect()
    }

    /// All links, and up to `most` of the nodes that have gone.
    pub fn overview(&self, most: usize) -> Overview {
        let nodes = self.lock();
        let links = |map: &HashMap<NodeName, Linked>, standing| -> Vec<_> {
            let error = |node| nodes.past.error(node);
            map.iter().map(|(node, linked)| (node.clone(), standing, linked.clone(), error(node))).collect()
        };
        let mut linked = links(&nodes.linked, Standing::Current);
        linked.extend(links(&nodes.older, Standing::Older));
        linked.extend(links(&nodes.interactive, Standing::Interactive));
        linked.extend(links(&nodes.leaving, Standing::Leaving));
        let gone = nodes.past.all_gone(most);
        drop(nodes);
        linked.sort_by(|(one, at, ..), (two, other, ..)| (one.as_str(), at).cmp(&(two.as_str(), other)));
        Overview { linked, gone }
    }

    /// Notes why a link of a node has ended; then as [`Self::remove`].
    pub fn ended(&self, sender: &LinkSender, why: &str) {
        if let Some(node) = sender.peer.node() {
            self.lock().past.failed(node, &excerpt(why));
        }
        self.remove(sender);
    }

    /// Notes that a link of a node was refused. Nothing is noted of a node that never was here: names that strangers make
    /// up would push out the others.
    pub fn refused(&self, node: &NodeName, why: &str) {
        let mut nodes = self.lock();
        if nodes.linked.contains_key(node) || nodes.past.gone(node).is_some() {
            nodes.past.failed(node, &excerpt(why));
        }
    }
}

fn excerpt(why: &str) -> String {
    why.chars().take(MOST_CHARS).collect()
}

/// Longest text of an error that is kept.
const MOST_CHARS: usize = 160;

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use super::*;
    use crate::names::Instance;
    use crate::protocol::{Dialect, LinkId, Peer};
    use crate::telemetry::Metrics;

    fn link(registry: &Registry, id: u64, node: &str) -> Arc<LinkSender> {
        let instance = Some(Instance::from_bits(1));
        let peer = Peer::Edge(node.parse().unwrap());
        let sender = LinkSender::new(LinkId(id), peer, instance, Dialect::NEWEST);
        let linked =
            Linked { sender: sender.clone(), instance, from: ([10, 0, 0, 1], 1).into(), ips: Arc::default() };
        registry.insert(linked, true);
        sender
    }

    #[tokio::test]
    async fn nodes_are_told_by_name_with_what_last_went_wrong_and_those_that_have_gone() {
        let registry = Registry::new(Metrics::cloud("", ""));
        let (first, _b, _a) = (link(&registry, 1, "c"), link(&registry, 2, "b"), link(&registry, 3, "a"));
        registry.refused(&"b".parse().unwrap(), "the token differs");
        registry.refused(&"stranger".parse().unwrap(), "the token differs");
        let second = link(&registry, 4, "c");
        registry.ended(&second, "nothing was received for 15s");
        registry.ended(&first, &"é".repeat(500));
        let Overview { linked, gone } = registry.overview(10);
        let told: Vec<_> = linked
            .iter()
            .map(|(node, standing, _, error)| (node.as_str(), *standing, error.as_ref().map(|e| &*e.why)))
            .collect();
        assert_eq!(
            told,
            [("a", Standing::Current, None), ("b", Standing::Current, Some("the token differs"))]
        );
        assert_eq!(gone.len(), 1);
        assert_eq!((gone[0].0.as_str(), gone[0].2.as_ref().unwrap().why.chars().count()), ("c", MOST_CHARS));
        assert!(registry.overview(0).gone.is_empty());
        assert_eq!(registry.lock().past.len(), 2, "nothing is kept of strangers");
    }
}
