//! Which of two links of one node stays: a newer one, one at another pod, a namesake's, or an interactive one beside it.

use std::cmp::Reverse;
use std::collections::HashMap;
use std::net::SocketAddr;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use futures_util::future::join_all;
use tokio::join;
use tokio::time::Instant;

use crate::registry::{self, CONTEST_PONG_TIMEOUT, Finder, LinkedNode, NameInUse, NodeLinks, Registry};
use tunnel_base::names::{Instance, NodeName};
use tunnel_link::sender::LinkSender;
use tunnel_proto::frame::{Conflict, Found};

/// Names with a recent conflict; at most [`MOST`] of them.
#[derive(Debug, Default)]
pub(crate) struct Conflicts(Mutex<HashMap<NodeName, NameConflict>>);

#[derive(Debug)]
struct NameConflict {
    /// The process at another pod that was refused the name last.
    kept_from: Option<Instance>,
    logged: Instant,
    /// Conflicts since then that were not logged.
    left_out: u64,
}

impl Registry {
    /// A node that is linked here is alive and keeps its name; another process of that name came at `place`. Logs that,
    /// and sends the node a Conflict. Returns the sentence for the other process.
    pub(crate) fn reject_newcomer(&self, node: &NodeName, linked: &LinkedNode, place: &str) -> NameInUse {
        let why = format!(
            "another process came as node {node}, {place}, and is kept out while this one is alive: two machines with \
             one name? Give each its own"
        );
        self.log_conflict(node, &why);
        linked.sender.conflict(node, linked.instance, why);
        NameInUse { node: node.clone(), from: linked.from }
    }

    /// A node that is linked here loses its name to another process: its link is closed with that reason.
    pub(crate) fn close_loser(&self, node: &NodeName, linked: &LinkedNode, why: String) {
        self.log_conflict(node, &why);
        linked.sender.close_name_taken(why);
    }

    fn log_conflict(&self, node: &NodeName, why: &str) {
        self.metrics.name_conflicts.inc();
        if let Some(more) = self.conflicts.may_log(node) {
            tracing::warn!(%node, left_out = more, "{why}");
        }
    }
}

impl Conflicts {
    /// Counts one more conflict over that name. Some: it is to be logged now, with how many were left out before it.
    /// None: it is left out, so that two machines that take turns do not fill the log.
    pub(crate) fn may_log(&self, node: &NodeName) -> Option<u64> {
        let mut all = self.lock();
        let now = Instant::now();
        if let Some(known) = all.get_mut(node) {
            if now - known.logged < LOG_INTERVAL {
                known.left_out += 1;
                return None;
            }
            known.logged = now;
            return Some(std::mem::take(&mut known.left_out));
        }
        if all.len() >= MAX_TRACKED_NAMES {
            all.retain(|_, known| now - known.logged < LOG_INTERVAL);
        }
        if all.len() >= MAX_TRACKED_NAMES {
            return None;
        }
        all.insert(node.clone(), NameConflict { kept_from: None, logged: now, left_out: 0 });
        Some(0)
    }

    /// Notes that a process at another pod was refused the name.
    pub(crate) fn kept(&self, node: &NodeName, from: Option<Instance>) {
        if let Some(known) = self.lock().get_mut(node) {
            known.kept_from = from;
        }
    }

    /// Whether that process was the last to be refused the name.
    pub(crate) fn was_kept(&self, node: &NodeName, from: Instance) -> bool {
        self.lock().get(node).is_some_and(|known| known.kept_from == Some(from))
    }

    fn lock(&self) -> MutexGuard<'_, HashMap<NodeName, NameConflict>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Names that are remembered at once.
const MAX_TRACKED_NAMES: usize = 1000;
/// Between two lines about one name.
const LOG_INTERVAL: Duration = Duration::from_secs(60);

// A node is linked here and, as another pod announces, there too: which of the two links stays.

/// Returns true if a link of the node, which was `found` elsewhere, answers. Closes it otherwise.
async fn closes_unless_it_answers(link: &LinkSender, node: &NodeName, found: &Found) -> bool {
    let same = found.instance == link.instance;
    let patience = if same { patience_with(link) } else { registry::PONG_TIMEOUT };
    let answers = link.ping_within(patience).await;
    if !answers {
        tracing::info!(link = %link.id, %node, "the node is linked to another pod, and its link here does not answer: it is closed");
        link.close();
    }
    answers
}

/// How long the link here may take to answer when its own process has linked elsewhere.
fn patience_with(link: &LinkSender) -> Duration {
    let line = link.line_round_trip().filter(|_| link.idle_for() >= SUSPECT_AFTER_IDLE);
    line.map_or(CONTEST_PONG_TIMEOUT, |line| CONTEST_PONG_TIMEOUT.min(MIN_PING_WAIT + 2 * line))
}

/// A link that is alive, and on which sessions have run lately, is hardly ever silent for so long: its edge asks every
/// second.
const SUSPECT_AFTER_IDLE: Duration = Duration::from_millis(1400);
/// How long its answer may take beside the line's round trips.
const MIN_PING_WAIT: Duration = Duration::from_millis(250);

impl Finder {
    /// The node is at another pod, the process `at`, as that one or a home of the node has said. Pings each link that the
    /// node has here, the interactive one too, and closes those that do not answer within 1 s, or 2 s if the two processes
    /// differ. A link of the same process has less time, if nothing has come from it for so long that it may have linked
    /// there because it hears nothing from here. If the process here answers and its link is the older one, it keeps the
    /// name, and the other pod gets a Conflict.
    pub async fn resolve_conflict(&self, at: Instance, node: &NodeName, found: Found) {
        let beside = self.registry.beside(node);
        let asked = beside.iter().map(|link| closes_unless_it_answers(link, node, &found));
        join!(join_all(asked), self.contest_current(at, node, &found));
    }

    async fn contest_current(&self, at: Instance, node: &NodeName, found: &Found) {
        let Some(linked) = self.registry.link_of(node) else { return };
        // A plain link cannot be pinged.
        if linked.instance.is_none() {
            return;
        }
        let same = found.instance == linked.instance;
        // A pod of version 1 sends no age and does not understand a conflict: then both links stay.
        let older = found.age.is_none_or(|age| age < linked.sender.age());
        if !closes_unless_it_answers(&linked.sender, node, found).await || same || !older {
            return;
        }
        let Some(others) = &self.others else { return };
        let Ok(other) = others.peers.process(at).await else { return };
        let place = format!("at pod {}", others.peers.peer_of(&other));
        let taken = self.registry.reject_newcomer(node, &linked, &place);
        self.registry.conflicts.kept(node, found.instance);
        other.conflict(node, linked.instance, taken);
    }

    /// Another pod has sent a Conflict: a process there keeps the node's name, because it is alive and its link is
    /// older.
    ///
    /// Both pods may send this to each other at the same time: if the links' ages differ by less than a frame takes
    /// from pod to pod, each finds its own link the older one. Then the process with the larger number gives way, at
    /// both.
    pub fn on_conflict(&self, node: &NodeName, conflict: Conflict) {
        let Some(linked) = self.registry.link_of(node) else { return };
        let Some(keeper) = conflict.instance.filter(|_| conflict.instance != linked.instance) else { return };
        let smaller = linked.instance.is_some_and(|own| own.to_bytes() < keeper.to_bytes());
        if smaller && self.registry.conflicts.was_kept(node, keeper) {
            return;
        }
        self.registry.close_loser(node, &linked, conflict.reason);
    }
}

// Links for interactive sessions, which stand beside their node's current link.

impl NodeLinks {
    /// The link beside which an interactive one of that process may stand.
    fn primary_for_interactive(
        &self,
        node: &NodeName,
        instance: Option<Instance>,
    ) -> Option<Arc<LinkSender>> {
        let current = self.linked.get(node)?;
        let may = instance.is_some() && current.instance == instance && !self.older.contains_key(node);
        may.then(|| current.sender.clone())
    }

    /// Takes out the link that only carries sessions, and by which nobody finds the node, if that is `sender`.
    pub(crate) fn remove_secondary(&mut self, node: &NodeName, sender: &LinkSender) -> bool {
        [&mut self.leaving, &mut self.interactive].into_iter().any(|links| {
            let is = links.get(node).is_some_and(|linked| linked.sender.id == sender.id);
            is && links.remove(node).is_some()
        })
    }

    /// Takes out the interactive link of another process than the one that has linked now.
    pub(crate) fn take_foreign(&mut self, node: &NodeName, instance: Option<Instance>) -> Option<LinkedNode> {
        let foreign = self.interactive.get(node).is_some_and(|beside| beside.instance != instance);
        if foreign { self.interactive.remove(node) } else { None }
    }
}

impl Registry {
    /// Returns the node's links here, except the one by which it is found.
    pub(crate) fn beside(&self, node: &NodeName) -> Vec<Arc<LinkSender>> {
        let nodes = self.lock();
        let links = [&nodes.older, &nodes.leaving, &nodes.interactive];
        links.into_iter().filter_map(|links| links.get(node)).map(|linked| linked.sender.clone()).collect()
    }

    /// Whether a link for interactive sessions of that process may stand beside its node's current one: it is linked here, and
    /// has not made a second link because the first one is silent, of which one is about to go.
    pub fn may_stand_beside(&self, node: &NodeName, instance: Option<Instance>) -> bool {
        self.lock().primary_for_interactive(node, instance).is_some()
    }

    /// Takes an interactive link to its node's current one, which is returned; one that it had before is closed. None, if
    /// it may not stand there.
    pub fn stand_beside(&self, linked: LinkedNode) -> Option<Arc<LinkSender>> {
        let node = linked.sender.peer.node().cloned()?;
        let (busy, before) = {
            let mut nodes = self.lock();
            let busy = nodes.primary_for_interactive(&node, linked.instance)?;
            (busy, nodes.interactive.insert(node, linked))
        };
        // As in `insert`: closing a link takes the link's own lock.
        before.inspect(|before| before.sender.close());
        Some(busy)
    }
}

// Edges that link elsewhere while this pod goes on.

impl NodeLinks {
    /// Takes out the link by which a node is found, or the older one beside it; that becomes the node's current one
    /// again. `None`: neither is that link.
    pub(crate) fn take(&mut self, node: &NodeName, sender: &LinkSender) -> Option<LinkedNode> {
        let is = |of: &HashMap<NodeName, LinkedNode>| {
            of.get(node).is_some_and(|known| known.sender.id == sender.id)
        };
        if is(&self.older) {
            return self.older.remove(node);
        }
        if !is(&self.linked) {
            return None;
        }
        if let Some(older) = self.older.remove(node) {
            return self.linked.insert(node.clone(), older);
        }
        self.past.on_unlinked(node);
        let gone = self.linked.remove(node);
        tunnel_pages::shrink(&mut self.linked);
        gone
    }
}

impl Registry {
    /// How many nodes are found here, and how many of them were asked to link elsewhere and have not done it yet.
    pub fn node_counts(&self) -> (usize, usize) {
        let nodes = self.lock();
        let asked = nodes.linked.values().filter(|linked| linked.sender.is_drained()).count();
        (nodes.linked.len(), asked)
    }

    /// Asks up to `most` edges to link to another pod, rather to the one at the address that `to` gives. First those
    /// with the fewest sessions, and of these the ones that were linked for longest; none that has come just now, that
    /// was asked already, or that speaks plain. Returns how many were asked.
    pub fn drain_some(&self, most: usize, mut to: impl FnMut() -> Option<SocketAddr>) -> usize {
        let mut links: Vec<_> = {
            let nodes = self.lock();
            let may = |link: &LinkSender| link.resumes && !link.is_drained() && link.age() >= MIN_LINK_AGE;
            nodes.linked.values().map(|linked| &linked.sender).filter(|link| may(link)).cloned().collect()
        };
        links.sort_by_cached_key(|link| (link.sessions(), Reverse(link.age())));
        links.iter().take(most).filter(|link| link.drain(to())).count()
    }

    /// An edge says that it has another link: its node is not found by this one any more, which stays for the sessions
    /// that run here until the edge ends it. Of two such links of a node the older one is closed.
    pub fn retire_link(&self, sender: &LinkSender) {
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
const MIN_LINK_AGE: Duration = Duration::from_secs(30);

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test(start_paused = true)]
    async fn each_name_is_told_of_once_a_minute_and_no_names_make_it_grow() {
        let conflicts = Conflicts::default();
        let node = |n: usize| format!("node{n}").parse::<NodeName>().unwrap();
        assert_eq!(conflicts.may_log(&node(0)), Some(0));
        assert_eq!((conflicts.may_log(&node(0)), conflicts.may_log(&node(0))), (None, None));
        let told = (1..3 * MAX_TRACKED_NAMES).filter(|n| conflicts.may_log(&node(*n)).is_some()).count();
        assert_eq!((told, conflicts.lock().len()), (MAX_TRACKED_NAMES - 1, MAX_TRACKED_NAMES));
        tokio::time::advance(LOG_INTERVAL).await;
        assert_eq!(conflicts.may_log(&node(0)), Some(2));
        assert_eq!(conflicts.may_log(&node(2 * MAX_TRACKED_NAMES)), Some(0), "old ones give way");
    }
}

#[cfg(test)]
mod interactive_tests {
    use tunnel_base::metrics::Metrics;
    use tunnel_proto::frame::Remote;
    use tunnel_proto::hello::Dialect;
    use tunnel_proto::state::LinkId;

    use super::*;

    fn linked(number: u64, instance: u128) -> LinkedNode {
        let (peer, instance) = (Remote::Edge("node1".parse().unwrap()), Some(Instance::from_bits(instance)));
        let sender = LinkSender::new(LinkId(number), peer, instance, Dialect::NEWEST);
        LinkedNode { sender, instance, from: ([10, 0, 0, 1], 1).into(), ips: Arc::default() }
    }

    #[tokio::test]
    async fn an_interactive_link_stands_beside_a_link_of_its_process_and_is_not_found() {
        let registry = Registry::new(Metrics::server("", ""));
        let [busy, first, second] = [(1, 7), (2, 7), (3, 7)].map(|(number, of)| linked(number, of));
        let node = "node1".parse().unwrap();
        assert!(registry.stand_beside(first.clone()).is_none(), "the node is not here");
        registry.insert(busy.clone(), false);
        assert!(registry.stand_beside(linked(9, 8)).is_none(), "another process");
        assert_eq!(registry.stand_beside(first.clone()).map(|busy| busy.id), Some(busy.sender.id));
        assert_eq!(registry.link_of(&node).map(|found| found.sender.id), Some(busy.sender.id));
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

#[cfg(test)]
mod moves_tests {
    use std::sync::Arc;
    use std::sync::atomic::AtomicU64;
    use std::sync::atomic::Ordering::Relaxed;

    use tokio::time::advance;

    use tunnel_base::metrics::Metrics;
    use tunnel_base::names::Instance;
    use tunnel_proto::frame::Remote;
    use tunnel_proto::hello::Dialect;
    use tunnel_proto::state::LinkId;

    use super::*;

    /// A new link of the node with that number.
    fn linked(registry: &Registry, number: u64, dialect: Dialect) -> Arc<LinkSender> {
        static LINKS: AtomicU64 = AtomicU64::new(0);
        let peer = Remote::Edge(format!("node{number}").parse().unwrap());
        let instance = (dialect != Dialect::Plain).then(|| Instance::from_bits(number.into()));
        let sender = LinkSender::new(LinkId(LINKS.fetch_add(1, Relaxed)), peer, instance, dialect);
        let from = ([10, 0, 0, 1], 1).into();
        registry.insert(LinkedNode { sender: sender.clone(), instance, from, ips: Arc::default() }, false);
        sender
    }

    #[tokio::test(start_paused = true)]
    async fn those_that_are_asked_have_settled_and_understand_it_and_are_asked_once() {
        let registry = Registry::new(Metrics::server("", ""));
        let plain = linked(&registry, 1, Dialect::Plain);
        let old = [2, 3].map(|number| linked(&registry, number, Dialect::Extended(1)));
        advance(MIN_LINK_AGE).await;
        let new = linked(&registry, 4, Dialect::NEWEST);
        assert_eq!(registry.node_counts(), (4, 0));
        assert_eq!(registry.drain_some(1, || None), 1);
        assert_eq!(registry.node_counts(), (4, 1));
        assert_eq!(registry.drain_some(5, || None), 1);
        assert!(old.iter().all(|link| link.is_drained()) && !plain.is_drained() && !new.is_drained());
        assert_eq!(registry.drain_some(5, || None), 0);
    }

    #[tokio::test]
    async fn a_node_that_leaves_is_not_found_and_keeps_one_link_for_its_sessions() {
        let registry = Registry::new(Metrics::server("", ""));
        let node = "node1".parse().unwrap();
        let old = linked(&registry, 1, Dialect::NEWEST);
        registry.retire_link(&old);
        assert!(registry.link_of(&node).is_none() && !old.is_closed());
        assert_eq!(registry.node_counts(), (0, 0));
        let new = linked(&registry, 1, Dialect::NEWEST);
        registry.retire_link(&old);
        assert!(registry.link_of(&node).is_some(), "it was not found by that link");
        registry.retire_link(&new);
        assert!(old.is_closed() && !new.is_closed(), "of two the older one goes");
        registry.remove(&new);
        assert_eq!(registry.lock().leaving.len(), 0);
    }
}
