//! Recently disconnected nodes for operators: when each disconnected, and the last error of each node.

use std::cmp::Reverse;
use std::collections::{HashMap, VecDeque};
use std::hash::{BuildHasher as _, RandomState};
use std::ops::Range;
use std::sync::Arc;

use tokio::time::Instant;

use crate::registry::links::LinkRole;
use crate::registry::{LinkedNode, Registry};
use tunnel_base::names::NodeName;
use tunnel_link::sender::LinkSender;
use tunnel_proto::frame::ListedNode;

/// The last error of a node: its link ended or was refused.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct LastError {
    /// Time of the error.
    pub at: Instant,
    /// The reason, in at most 320 characters.
    pub why: Arc<str>,
}

/// The history of up to [`MAX_NODES`] nodes that were linked here.
///
/// Names and errors are stored in one text. A separate allocation for each, made when a link has just started or ended,
/// would hold a memory page of its own. These pages would be most of the memory of a server that thousands of edges
/// have left.
#[derive(Debug, Default)]
pub(crate) struct NodeHistory {
    /// By the hash of the name. Of two nodes with the same hash only the newer is remembered.
    nodes: HashMap<u64, HistoryEntry>,
    texts: String,
    hashes: RandomState,
    /// The nodes that were refused and never linked here, the latest last. They are separate, because invented names must
    /// not displace the others.
    refused: VecDeque<(NodeName, LastError)>,
}

/// The entry of one node. The ranges are positions in the text.
#[derive(Debug, Default)]
struct HistoryEntry {
    name: Range<usize>,
    disconnected: Option<Instant>,
    error: Option<(Instant, Range<usize>)>,
}

impl NodeHistory {
    /// Records that the node has just lost its link.
    pub(crate) fn on_unlinked(&mut self, node: &NodeName) {
        self.enter(node, 0).disconnected = Some(Instant::now());
    }

    /// Records that the node is linked.
    pub(crate) fn on_linked(&mut self, node: &NodeName) {
        self.refused.retain(|(refused, _)| refused != node);
        let hash = self.hashes.hash_one(node);
        let Some(was) = self.nodes.get_mut(&hash).filter(|was| was.is(&self.texts, node)) else { return };
        was.disconnected = None;
        if was.error.is_none() {
            self.nodes.remove(&hash);
        }
    }

    /// Records an error of the node that has just occurred.
    pub(crate) fn failed(&mut self, node: &NodeName, why: &str) {
        self.enter(node, why.len());
        let why = put(&mut self.texts, why);
        self.enter(node, 0).error = Some((Instant::now(), why));
    }

    /// Records that a node without a link was refused.
    pub(crate) fn refused(&mut self, node: &NodeName, why: &str) {
        if self.disconnected(node).is_some() {
            return self.failed(node, why);
        }
        self.refused.retain(|(refused, _)| refused != node);
        self.refused.push_back((node.clone(), LastError { at: Instant::now(), why: why.into() }));
        if self.refused.len() > MAX_REFUSED {
            self.refused.pop_front();
        }
    }

    /// Returns when the node lost its link, if it is not linked again.
    pub(crate) fn disconnected(&self, node: &NodeName) -> Option<Instant> {
        self.get(node)?.disconnected
    }

    /// Returns the last error of the node.
    pub(crate) fn error(&self, node: &NodeName) -> Option<LastError> {
        self.last_error(self.get(node)?)
    }

    /// Returns the number of remembered nodes.
    #[cfg(test)]
    pub(crate) fn len(&self) -> usize {
        self.nodes.len()
    }

    /// Returns up to `most` of the nodes without a link, each with the time when it disconnected or, if it was never
    /// linked, was last refused; the latest first.
    pub(crate) fn all_disconnected(&self, most: usize) -> Vec<(NodeName, Instant, Option<LastError>)> {
        let mut disconnected: Vec<_> =
            self.nodes.values().filter_map(|was| Some((was.disconnected?, was))).collect();
        disconnected.sort_unstable_by_key(|(at, _)| Reverse(*at));
        let with_error = |(at, was): (Instant, &HistoryEntry)| {
            Some((text(&self.texts, &was.name).parse().ok()?, at, self.last_error(was)))
        };
        let disconnected = disconnected.into_iter().take(most).filter_map(with_error);
        let refused = self.refused.iter().map(|(node, error)| (node.clone(), error.at, Some(error.clone())));
        let mut all: Vec<_> = disconnected.chain(refused).collect();
        all.sort_by_key(|(_, at, _)| Reverse(*at));
        all.truncate(most);
        all
    }

    fn last_error(&self, was: &HistoryEntry) -> Option<LastError> {
        let (at, why) = was.error.as_ref()?;
        Some(LastError { at: *at, why: text(&self.texts, why).into() })
    }

    fn get(&self, node: &NodeName) -> Option<&HistoryEntry> {
        self.nodes.get(&self.hashes.hash_one(node)).filter(|was| was.is(&self.texts, node))
    }

    /// Returns the node's entry, and reserves `more` bytes in the text.
    fn enter(&mut self, node: &NodeName, more: usize) -> &mut HistoryEntry {
        let name = node.as_str();
        if self.get(node).is_some() {
            self.make_room(more);
        } else {
            if self.nodes.len() >= MAX_NODES {
                self.forget_half();
            }
            self.make_room(name.len() + more);
        }
        let was = self.nodes.entry(self.hashes.hash_one(node)).or_default();
        if !was.is(&self.texts, node) {
            *was = HistoryEntry { name: put(&mut self.texts, name), ..HistoryEntry::default() };
        }
        was
    }

    /// Removes the half of the entries that have not changed for longest.
    fn forget_half(&mut self) {
        let mut times: Vec<_> = self.nodes.values().map(HistoryEntry::last).collect();
        let middle = times.len() / 2;
        let (_, middle, _) = times.select_nth_unstable(middle);
        self.nodes.retain(|_, was| was.last() > *middle);
    }

    /// Reserves `more` bytes: drops the parts of the text that no node refers to.
    fn make_room(&mut self, more: usize) {
        if self.texts.len() + more <= self.texts.capacity() {
            return;
        }
        let used: usize = self.nodes.values().flat_map(HistoryEntry::ranges).map(Range::len).sum();
        let before = std::mem::replace(&mut self.texts, String::with_capacity(2 * (used + more)));
        for range in self.nodes.values_mut().flat_map(HistoryEntry::ranges_mut) {
            *range = put(&mut self.texts, text(&before, range));
        }
    }
}

impl HistoryEntry {
    fn is(&self, texts: &str, node: &NodeName) -> bool {
        text(texts, &self.name).eq_ignore_ascii_case(node.as_str())
    }

    /// Returns when the entry last changed.
    fn last(&self) -> Option<Instant> {
        self.disconnected.max(self.error.as_ref().map(|(at, _)| *at))
    }

    fn ranges(&self) -> impl Iterator<Item = &Range<usize>> {
        std::iter::once(&self.name).chain(self.error.as_ref().map(|(_, why)| why))
    }

    fn ranges_mut(&mut self) -> impl Iterator<Item = &mut Range<usize>> {
        std::iter::once(&mut self.name).chain(self.error.as_mut().map(|(_, why)| why))
    }
}

fn text<'t>(texts: &'t str, range: &Range<usize>) -> &'t str {
    texts.get(range.clone()).unwrap_or_default()
}

fn put(texts: &mut String, text: &str) -> Range<usize> {
    let start = texts.len();
    texts.push_str(text);
    start..texts.len()
}

/// Maximum number of remembered nodes.
const MAX_NODES: usize = 20_000;
/// Maximum number of remembered nodes that were refused and never linked.
const MAX_REFUSED: usize = 50;

// An overview of this server's nodes for operators, including disconnected ones and their errors.

/// All links of nodes here at one moment, and the disconnected nodes.
#[derive(Debug, Default)]
pub struct Overview {
    /// The links by node name, the primary link of a node first.
    pub linked: Vec<(NodeName, LinkRole, LinkedNode, Option<LastError>)>,
    /// The nodes without a link here, each with the time when it disconnected or was refused, the latest first.
    pub disconnected: Vec<(NodeName, Instant, Option<LastError>)>,
}

impl Registry {
    /// Returns the node with the oldest link here, and whether there are others.
    pub fn longest(&self) -> Option<(NodeName, bool)> {
        let nodes = self.nodes.lock();
        let living = nodes.primaries().filter(|(_, linked)| !linked.sender.is_closed());
        let (node, _) = living.max_by_key(|(_, linked)| linked.sender.age())?;
        Some((node.clone(), nodes.len() > 1))
    }

    /// Returns up to `most` nodes after `after`, by the bytes of their names, and whether more follow. Their names have
    /// at most 32 KiB in total.
    pub fn page(&self, after: Option<&NodeName>, most: usize) -> (Vec<ListedNode>, bool) {
        let nodes = self.nodes.lock();
        let later = |node: &NodeName| after.is_none_or(|after| node.as_str() > after.as_str());
        let mut all: Vec<_> = nodes.primaries().filter(|(node, _)| later(node)).collect();
        all.sort_unstable_by_key(|(node, _)| node.as_str());
        let mut bytes = 0;
        let fits = |(node, _): &&(&NodeName, &LinkedNode)| {
            bytes += node.as_str().len();
            bytes <= MAX_PAGE_BYTES
        };
        let page: Vec<_> = all.iter().take(most).take_while(fits).collect();
        let more = page.len() < all.len();
        let listed = |(node, linked): &&(&NodeName, &LinkedNode)| ListedNode {
            node: (*node).clone(),
            age: linked.sender.age(),
            address: Some(linked.from),
        };
        (page.iter().map(listed).collect(), more)
    }

    /// Returns all links, and up to `most` of the disconnected nodes.
    pub fn overview(&self, most: usize) -> Overview {
        let nodes = self.nodes.lock();
        let entry = |(node, role, linked): (&NodeName, _, &LinkedNode)| {
            (node.clone(), role, linked.clone(), nodes.past.error(node))
        };
        let mut linked: Vec<_> = nodes.all().map(entry).collect();
        let mut disconnected = nodes.past.all_disconnected(most);
        // A node that has moved to a peer may have a link here for its earlier sessions.
        disconnected.retain(|(node, ..)| nodes.of(node).next().is_none());
        drop(nodes);
        linked.sort_by(|(one, at, ..), (two, other, ..)| (one.as_str(), at).cmp(&(two.as_str(), other)));
        Overview { linked, disconnected }
    }

    /// Records why a link of a node has ended, then removes it like [`Self::remove`].
    pub fn ended(&self, sender: &LinkSender, why: &str) {
        if let Some(node) = sender.peer.node() {
            self.nodes.lock().past.failed(node, &excerpt(why));
        }
        self.remove(sender);
    }

    /// Records that a link of a node was refused.
    pub fn refused(&self, node: &NodeName, why: &str) {
        let mut nodes = self.nodes.lock();
        if nodes.primary(node).is_some() {
            nodes.past.failed(node, &excerpt(why));
        } else {
            nodes.past.refused(node, &excerpt(why));
        }
    }
}

fn excerpt(why: &str) -> String {
    why.chars().take(MAX_CHARS).collect()
}

/// Maximum length of all names in a page, so that its frame takes a short turn on a link.
const MAX_PAGE_BYTES: usize = 32 * 1024;
/// Maximum length of a stored error text.
const MAX_CHARS: usize = 320;

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use proptest::prelude::*;

    use super::*;

    #[tokio::test]
    async fn pages_contain_every_node_once_sorted_by_name() {
        use tunnel_base::metrics::Metrics;
        use tunnel_base::names::Instance;
        use tunnel_proto::frame::Remote;
        use tunnel_proto::state::LinkId;

        let registry = Registry::new(Metrics::server("", ""));
        let mut names: Vec<String> = (0..25).map(|n| format!("node-{n}")).collect();
        for (id, name) in (0..).zip(&names) {
            let peer = Remote::Edge(name.parse().unwrap());
            let sender = LinkSender::new(LinkId(id), peer, Some(Instance::random()));
            let from = ([10, 0, 0, 1], 1).into();
            registry.insert(LinkedNode { sender, instance: None, from, ips: Arc::default() }, false);
        }
        names.sort();
        let (mut after, mut seen) = (None, Vec::new());
        loop {
            let (page, more) = registry.page(after.as_ref(), 10);
            assert_eq!(page.len(), if more { 10 } else { 5 });
            seen.extend(page.iter().map(|listed| listed.node.to_string()));
            after = page.last().map(|last| last.node.clone());
            if !more {
                break;
            }
        }
        assert_eq!(seen, names);
        assert_eq!(registry.page(after.as_ref(), 10), (Vec::new(), false));
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
        /// After any changes, the last change of each node is remembered in at most twice the necessary memory.
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
                // Twenty nodes and the one being added: each has a name and an error of up to 160 characters.
                prop_assert!(past.texts.capacity() <= 2 * 21 * 340, "{}", past.texts.capacity());
            }
        }
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
        for (nth, (name, ..)) in newest.iter().enumerate() {
            assert_eq!(*name, node(3 * MAX_NODES - 1 - nth));
        }
        assert!(past.texts.capacity() < 200 * MAX_NODES, "{}", past.texts.capacity());
        // Once all have linked again without an error, only errors are left.
        for n in 0..3 * MAX_NODES {
            past.on_linked(&node(n));
        }
        assert!(past.all_disconnected(1).is_empty() && past.error(&node(3 * MAX_NODES - 1)).is_some());
    }
}

#[cfg(test)]
mod overview_tests {
    use std::sync::Arc;

    use tunnel_base::metrics::Metrics;
    use tunnel_base::names::Instance;
    use tunnel_proto::frame::Remote;
    use tunnel_proto::state::LinkId;

    use super::*;

    fn link(registry: &Registry, id: u64, node: &str) -> Arc<LinkSender> {
        let instance = Some(Instance::from_bits(1));
        let peer = Remote::Edge(node.parse().unwrap());
        let sender = LinkSender::new(LinkId(id), peer, instance);
        let linked = LinkedNode {
            sender: sender.clone(),
            instance,
            from: ([10, 0, 0, 1], 1).into(),
            ips: Arc::default(),
        };
        registry.insert(linked, true);
        sender
    }

    #[tokio::test]
    async fn the_overview_lists_nodes_by_name_with_last_errors_and_disconnected_nodes() {
        let registry = Registry::new(Metrics::server("", ""));
        let (first, _b, _a) = (link(&registry, 1, "c"), link(&registry, 2, "b"), link(&registry, 3, "a"));
        registry.refused(&"b".parse().unwrap(), "the token differs");
        registry.refused(&"stranger".parse().unwrap(), "the token differs");
        let second = link(&registry, 4, "c");
        registry.ended(&second, "nothing was received for 15s");
        registry.ended(&first, &"é".repeat(500));
        let Overview { linked, disconnected } = registry.overview(10);
        let with_error: Vec<_> = linked
            .iter()
            .map(|(node, role, _, error)| (node.as_str(), *role, error.as_ref().map(|e| &*e.why)))
            .collect();
        assert_eq!(
            with_error,
            [("a", LinkRole::Primary, None), ("b", LinkRole::Primary, Some("the token differs"))]
        );
        let names: Vec<_> = disconnected.iter().map(|(node, ..)| node.as_str()).collect();
        assert_eq!(names, ["c", "stranger"]);
        assert_eq!(disconnected[0].2.as_ref().unwrap().why.chars().count(), MAX_CHARS);
        assert!(registry.overview(0).disconnected.is_empty());
        assert_eq!(registry.nodes.lock().past.len(), 2, "unknown nodes do not displace the others");
        for n in 0..1000 {
            registry.refused(&format!("invented{n}").parse().unwrap(), "the token differs");
        }
        let _stranger = link(&registry, 5, "invented999");
        assert_eq!(registry.overview(1000).disconnected.len(), 1 + MAX_REFUSED - 1);
    }
}
