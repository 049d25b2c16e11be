//! Recently disconnected nodes for operators: when each disconnected, and the last error of each node.

use std::cmp::Reverse;
use std::collections::{HashMap, VecDeque};
use std::sync::Arc;

use tokio::time::Instant;

use tunnel_proto::names::NodeName;

/// The last error of a node: its link ended or was refused.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct NodeLinkError {
    /// Time of the error.
    pub at: Instant,
    /// The reason, in at most 320 characters.
    pub why: Arc<str>,
}

/// A node without a link here.
#[derive(Debug, Clone)]
pub struct UnlinkedNode {
    /// The node.
    pub node: NodeName,
    /// When it disconnected or was last refused; of an absent node, the start of this process.
    pub at: Instant,
    /// Its last error.
    pub error: Option<NodeLinkError>,
    /// Why it has none.
    pub why: WhyUnlinked,
}

/// Why a node has no link here.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum WhyUnlinked {
    /// Its link, here or at its last server, has ended.
    Lost,
    /// It was refused, and was never linked here.
    Refused,
    /// It has joined, and no server that this process knows has had it.
    Absent,
}

/// The history of up to [`MAX_NODES`] nodes that were linked here.
#[derive(Debug, Default)]
pub(crate) struct NodeHistory {
    nodes: HashMap<NodeName, RememberedNode>,
    /// The nodes that were refused and never linked here, the latest last. They are separate, because invented names
    /// must not displace the others.
    refused: VecDeque<(NodeName, NodeLinkError)>,
    /// The last ends of links, with a share for each node, the latest last.
    drops: VecDeque<(NodeName, NodeLinkError)>,
}

/// What is remembered of one node.
#[derive(Debug, Default)]
struct RememberedNode {
    disconnected: Option<Instant>,
    error: Option<NodeLinkError>,
}

impl NodeHistory {
    /// Records that the node has just lost its link.
    pub(crate) fn on_unlinked(&mut self, node: &NodeName) {
        self.enter(node).disconnected = Some(Instant::now());
    }

    /// Records that the node is linked.
    pub(crate) fn on_linked(&mut self, node: &NodeName) {
        self.refused.retain(|(refused, _)| refused != node);
        let Some(was) = self.nodes.get_mut(node) else { return };
        was.disconnected = None;
        if was.error.is_none() {
            self.nodes.remove(node);
        }
    }

    /// Records an error of the node that has just occurred.
    pub(crate) fn failed(&mut self, node: &NodeName, why: &str) {
        self.enter(node).error = Some(NodeLinkError::now(why));
    }

    /// Records that a node without a link was refused.
    pub(crate) fn refused(&mut self, node: &NodeName, why: &str) {
        if self.disconnected(node).is_some() {
            return self.failed(node, why);
        }
        self.refused.retain(|(refused, _)| refused != node);
        self.refused.push_back((node.clone(), NodeLinkError::now(why)));
        if self.refused.len() > MAX_REFUSED {
            self.refused.pop_front();
        }
    }

    /// Records that a link of the node has just ended.
    pub(crate) fn dropped(&mut self, node: &NodeName, why: &str) {
        // A node that drops often forgets its own oldest entry, not those of others.
        let is_own = |(dropped, _): &(NodeName, _)| dropped == node;
        if self.drops.iter().filter(|drop| is_own(drop)).count() >= MAX_DROPS_PER_NODE {
            let oldest = self.drops.iter().position(is_own);
            oldest.map(|at| self.drops.remove(at));
        } else if self.drops.len() >= MAX_DROPS {
            self.drops.pop_front();
        }
        self.drops.push_back((node.clone(), NodeLinkError::now(why)));
    }

    /// Returns the last ends of links, the latest last.
    pub(crate) fn drops(&self) -> Vec<(NodeName, NodeLinkError)> {
        self.drops.iter().cloned().collect()
    }

    /// Returns when the node lost its link, if it is not linked again.
    pub(crate) fn disconnected(&self, node: &NodeName) -> Option<Instant> {
        self.nodes.get(node)?.disconnected
    }

    /// Returns the last error of the node.
    pub(crate) fn error(&self, node: &NodeName) -> Option<NodeLinkError> {
        self.nodes.get(node)?.error.clone()
    }

    /// Returns up to `most` of the nodes that have lost their link, the latest first.
    pub(crate) fn lost(&self, most: usize) -> Vec<UnlinkedNode> {
        let mut lost: Vec<_> =
            self.nodes.iter().filter_map(|(node, was)| Some((was.disconnected?, node, was))).collect();
        lost.sort_unstable_by_key(|(at, ..)| Reverse(*at));
        let unlinked = |(at, node, was): (Instant, &NodeName, &RememberedNode)| UnlinkedNode {
            node: node.clone(),
            at,
            error: was.error.clone(),
            why: WhyUnlinked::Lost,
        };
        lost.into_iter().take(most).map(unlinked).collect()
    }

    /// Returns up to `most` of the nodes without a link, the latest first.
    pub(crate) fn all_disconnected(&self, most: usize) -> Vec<UnlinkedNode> {
        let refused = self.refused.iter().map(|(node, error)| UnlinkedNode {
            node: node.clone(),
            at: error.at,
            error: Some(error.clone()),
            why: WhyUnlinked::Refused,
        });
        let mut all: Vec<_> = self.lost(most).into_iter().chain(refused).collect();
        all.sort_by_key(|unlinked| Reverse(unlinked.at));
        all.truncate(most);
        all
    }

    /// Returns the node's entry.
    fn enter(&mut self, node: &NodeName) -> &mut RememberedNode {
        if self.nodes.len() >= MAX_NODES && !self.nodes.contains_key(node) {
            self.forget_half();
        }
        self.nodes.entry(node.clone()).or_default()
    }

    /// Removes the half of the entries that have not changed for longest.
    fn forget_half(&mut self) {
        let mut times: Vec<_> = self.nodes.values().map(RememberedNode::last).collect();
        let middle = times.len() / 2;
        let (_, middle, _) = times.select_nth_unstable(middle);
        self.nodes.retain(|_, was| was.last() > *middle);
    }
}

impl RememberedNode {
    /// Returns when the entry last changed.
    fn last(&self) -> Option<Instant> {
        self.disconnected.max(self.error.as_ref().map(|error| error.at))
    }
}

impl NodeLinkError {
    fn now(why: &str) -> Self {
        Self { at: Instant::now(), why: why.into() }
    }
}

/// Maximum number of remembered nodes.
const MAX_NODES: usize = 20_000;
/// Maximum number of remembered nodes that were refused and never linked.
pub(crate) const MAX_REFUSED: usize = 50;

/// Maximum number of remembered ends of links, of all nodes and of one.
const MAX_DROPS: usize = 200;
const MAX_DROPS_PER_NODE: usize = 10;

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use proptest::prelude::*;

    use super::*;

    impl NodeHistory {
        /// Returns the number of remembered nodes.
        pub(crate) fn len(&self) -> usize {
            self.nodes.len()
        }
    }

    #[derive(Debug, Clone)]
    enum Step {
        Left,
        Came,
        Failed(usize),
    }

    fn step() -> impl Strategy<Value = Step> {
        prop_oneof![Just(Step::Left), Just(Step::Came), (0usize..160).prop_map(Step::Failed)]
    }

    proptest! {
        /// After any changes, the last change of each node is remembered.
        #[test]
        fn the_history_matches_a_simple_model(steps in prop::collection::vec((0u8..20, step()), 1..300)) {
            let mut past = NodeHistory::default();
            let mut model = HashMap::<u8, (bool, Option<String>)>::new();
            for (n, (node, step)) in steps.into_iter().enumerate() {
                // Names are not case-sensitive.
                let name = if n % 2 == 0 { format!("node{node}") } else { format!("NODE{node}") };
                let name: NodeName = name.parse().unwrap();
                let was = model.entry(node).or_default();
                match step {
                    Step::Left => { past.on_unlinked(&name); was.0 = true; }
                    Step::Came => { past.on_linked(&name); was.0 = false; }
                    Step::Failed(len) => {
                        let why = "é".repeat(len) + &n.to_string();
                        past.failed(&name, &why);
                        was.1 = Some(why);
                    }
                }
                for (node, (disconnected, why)) in &model {
                    let name = format!("node{node}").parse().unwrap();
                    prop_assert_eq!(past.disconnected(&name).is_some(), *disconnected);
                    prop_assert_eq!(past.error(&name).map(|error| error.why.to_string()), why.clone());
                }
                let disconnected = past.all_disconnected(usize::MAX);
                prop_assert_eq!(disconnected.len(), model.values().filter(|was| was.0).count());
            }
        }
    }

    #[test]
    fn a_node_that_loses_its_link_often_leaves_room_for_the_drops_of_others() {
        let mut past = NodeHistory::default();
        let node = |n: usize| format!("node{n}").parse::<NodeName>().unwrap();
        past.dropped(&node(1), "first");
        for n in 0..100 {
            past.dropped(&node(0), &n.to_string());
        }
        let seen: Vec<_> = past.drops().iter().map(|(node, drop)| format!("{node}: {}", drop.why)).collect();
        assert_eq!((seen.len(), &*seen[0], &*seen[1]), (11, "node1: first", "node0: 90"));
        for n in 2..2 + MAX_DROPS {
            past.dropped(&node(n), "closed");
        }
        let seen = past.drops();
        assert_eq!(
            (seen.len(), &seen[0].0, &seen[MAX_DROPS - 1].0),
            (MAX_DROPS, &node(2), &node(1 + MAX_DROPS))
        );
    }

    #[tokio::test(start_paused = true)]
    async fn excess_nodes_evict_those_that_disconnected_first() {
        let mut past = NodeHistory::default();
        let node = |n: usize| format!("node{n}").parse::<NodeName>().unwrap();
        for n in 0..3 * MAX_NODES {
            past.failed(&node(n), "closed by the remote end");
            past.on_unlinked(&node(n));
            tokio::time::advance(Duration::from_millis(1)).await;
        }
        let newest = past.all_disconnected(MAX_NODES / 2);
        assert!(past.nodes.len() <= MAX_NODES && newest.len() == MAX_NODES / 2);
        for (nth, unlinked) in newest.iter().enumerate() {
            assert_eq!(unlinked.node, node(3 * MAX_NODES - 1 - nth));
        }
        // Once all have linked again without an error, only errors are left.
        for n in 0..3 * MAX_NODES {
            past.on_linked(&node(n));
        }
        assert!(past.all_disconnected(1).is_empty() && past.error(&node(3 * MAX_NODES - 1)).is_some());
    }
}
