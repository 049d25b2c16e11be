//! The nodes of this pod for people who look on, also those that have gone, and why.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use tokio::time::Instant;

use super::{Linked, MOST_GONE, Registry};
use crate::names::NodeName;
use crate::protocol::LinkSender;

/// What last went wrong with a node: its link ended, or was refused.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct LastError {
    /// When.
    pub at: Instant,
    /// Why, in at most [`MOST_CHARS`] characters.
    pub why: Arc<str>,
}

/// How a link of a node stands.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Standing {
    /// The node is found by it.
    Current,
    /// The older one of two that its process keeps.
    Older,
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

/// The last error of each node that was linked here.
#[derive(Debug, Default)]
pub(super) struct Errors(Mutex<HashMap<NodeName, LastError>>);

impl Errors {
    fn lock(&self) -> MutexGuard<'_, HashMap<NodeName, LastError>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
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
        let (mut linked, mut gone) = {
            let nodes = self.lock();
            let links = |map: &HashMap<NodeName, Linked>, standing| -> Vec<_> {
                map.iter().map(|(node, linked)| (node.clone(), standing, linked.clone(), None)).collect()
            };
            let mut linked = links(&nodes.linked, Standing::Current);
            linked.extend(links(&nodes.older, Standing::Older));
            linked.extend(links(&nodes.leaving, Standing::Leaving));
            let gone: Vec<_> = nodes.gone.iter().map(|(node, at)| (node.clone(), *at, None)).collect();
            (linked, gone)
        };
        linked.sort_by(|(one, at, ..), (two, other, ..)| (one.as_str(), at).cmp(&(two.as_str(), other)));
        gone.sort_by_key(|(_, at, _)| std::cmp::Reverse(*at));
        gone.truncate(most);
        let errors = self.errors.lock();
        for (node, _, _, error) in &mut linked {
            *error = errors.get(node).cloned();
        }
        for (node, _, error) in &mut gone {
            *error = errors.get(node).cloned();
        }
        drop(errors);
        Overview { linked, gone }
    }

    /// Notes why a link of a node has ended; then as [`Self::remove`].
    pub fn ended(&self, sender: &LinkSender, why: &str) {
        if let Some(node) = sender.peer.node() {
            self.note(node, why);
        }
        self.remove(sender);
    }

    /// Notes that a link of a node was refused. Nothing is noted of a node that never was here: names that strangers make
    /// up would push out the others.
    pub fn refused(&self, node: &NodeName, why: &str) {
        let known = {
            let nodes = self.lock();
            nodes.linked.contains_key(node) || nodes.gone.contains_key(node)
        };
        if known {
            self.note(node, why);
        }
    }

    fn note(&self, node: &NodeName, why: &str) {
        let why: String = why.chars().take(MOST_CHARS).collect();
        let mut errors = self.errors.lock();
        if errors.len() >= MOST_GONE && !errors.contains_key(node) {
            let oldest = errors.iter().min_by_key(|(_, error)| error.at).map(|(node, _)| node.clone());
            oldest.map(|oldest| errors.remove(&oldest));
        }
        errors.insert(node.clone(), LastError { at: Instant::now(), why: why.into() });
    }
}

/// Longest text of an error that is kept.
const MOST_CHARS: usize = 160;

#[cfg(test)]
mod tests {
    use super::*;
    use crate::names::Instance;
    use crate::protocol::{Dialect, LinkId, Peer};
    use crate::telemetry::Metrics;

    fn link(registry: &Registry, id: u64, node: &str) -> Arc<LinkSender> {
        let instance = Some(Instance::from_bits(1));
        let peer = Peer::Edge(node.parse().unwrap());
        let sender = LinkSender::new(LinkId(id), peer, instance, Dialect::NEWEST);
        let linked = Linked { sender: sender.clone(), instance, from: ([10, 0, 0, 1], 1).into() };
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
        assert_eq!(registry.errors.lock().len(), 2, "nothing is kept of strangers");
    }
}
