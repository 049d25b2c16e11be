//! Where a node is: the links of this server by node name, and the search for nodes at peers.

pub mod balance;
pub mod conflicts;
pub mod dns_search;
pub mod history;
pub mod links;
pub mod nodes_at_peers;
pub mod peers;
pub mod search;
pub mod snapshot;

use std::collections::HashSet;
use std::net::SocketAddr;
use std::pin::pin;
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use futures_util::future::join_all;
use parking_lot::Mutex;
use tokio::sync::watch;

use crate::paths::node_not_found::{NodeNotFound, UnqueriedReason};
use crate::paths::waiters::{NodeWaiter, NodeWaiters};
use crate::paths::{Find, Path, PathProvider};
use crate::registry::conflicts::Conflicts;
use crate::registry::dns_search::NodeDnsLookup;
use crate::registry::links::LinksByNode;
use crate::registry::peers::Peers;
use crate::registry::search::{NodeSearchCriteria, PeerSearch};
use tunnel_base::limited;
use tunnel_base::metrics::Metrics;
use tunnel_link::link::Link;
use tunnel_link::liveness::Suspicion;
use tunnel_link::table::SessionTable;
use tunnel_proto::frame::{Found, Remote};
use tunnel_proto::names::{Host, Instance, NodeName};

/// The nodes that are linked to this server. The newest link of a node wins.
///
/// Each link has its own task, so two threads may change one node's entry at the same time. One lock holds all entries.
/// It is released before a link is closed or a waiter is woken, because each of these takes another lock. Three rules
/// make this safe:
///
/// - `Registry::replace` compares links by their ids under the lock, so a link that ends late never removes the
///   newer link that replaced it.
/// - A waiter registers first and checks second ([`Finder::find`]), so a link that is inserted in between wakes
///   it.
/// - A link that was read from here may have ended since. It then accepts no more data, and no caller relies on it
///   being alive.
#[derive(Debug)]
pub struct Registry {
    nodes: Mutex<LinksByNode>,
    /// Wakes the waiters of a node when it links, or a peer announces it; all waiters after a new link to a peer, which
    /// may lead to any node.
    pub(super) awaited: NodeWaiters,
    conflicts: Conflicts,
    /// Notified whenever the set of linked nodes may have changed.
    changed: watch::Sender<()>,
    metrics: Metrics,
}

/// The name is held by another process, and its link is alive.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error(
    "node {node} is linked from {from} by another process that is alive; end one of them if both run on one machine, \
     otherwise give each machine its own name"
)]
pub struct NameInUse {
    /// The name that both processes use.
    pub node: NodeName,
    /// The address of the process that keeps the name.
    pub from: SocketAddr,
}

impl Registry {
    /// Returns a registry without nodes.
    pub fn new(metrics: Metrics) -> Arc<Self> {
        let changed = watch::Sender::new(());
        let awaited = NodeWaiters::default();
        let conflicts = Conflicts::default();
        Arc::new(Self { nodes: Mutex::default(), awaited, conflicts, changed, metrics })
    }

    /// Returns the link of a node if it is linked here.
    pub fn link_of(&self, node: &NodeName) -> Option<LinkedNode> {
        self.nodes.lock().primary(node).cloned()
    }

    /// Returns how long ago the node was last linked here; `None` if it is linked now, or that is not remembered.
    pub fn last_linked(&self, node: &NodeName) -> Option<Duration> {
        let nodes = self.nodes.lock();
        match nodes.primary(node) {
            // Its task, on another thread, is about to remove it.
            Some(linked) => linked.link.is_closed().then_some(Duration::ZERO),
            None => nodes.past.disconnected(node).map(|at| at.elapsed()),
        }
    }

    /// Returns what this server, with process `own`, answers to a peer's `question` about the node.
    pub(crate) fn found(&self, node: &NodeName, question: u64, own: Instance) -> Found {
        match self.link_of(node).filter(|linked| !linked.link.is_closed()) {
            Some(linked) => linked.found(question, own),
            None => {
                // 0 means never.
                let silence = self.last_linked(node).map_or(Duration::ZERO, |since| since.max(MILLISECOND));
                Found { silence, ..Found::not_here(question) }
            }
        }
    }

    /// Returns a waiter for the node. Each later link of the node, here or at a peer, wakes it.
    pub fn arrival(&self, node: &NodeName) -> NodeWaiter<'_> {
        self.awaited.arrival(node)
    }

    /// Checks whether a process may link as `node` from that address. Takes up to 2 s.
    ///
    /// It may not while another process of that name answers a ping; that process is then sent a Conflict. A plain
    /// remote answers no pings, so it loses the name.
    ///
    /// The lock is not held during the ping. Two newcomers may both pass if neither finds the other linked.
    /// Then [`Self::insert`] decides, and the later one stays.
    ///
    /// # Errors
    ///
    /// Another process of that name is alive.
    pub async fn check_name(
        &self,
        node: &NodeName,
        instance: Option<Instance>,
        from: SocketAddr,
    ) -> Result<(), NameInUse> {
        let Some(old) = self.link_of(node) else { return Ok(()) };
        if !old.link.abilities.signals || old.link.instance == instance {
            return Ok(());
        }
        if old.link.is_alive(Suspicion::NameRequested).await {
            return Err(self.reject_newcomer(node, &old, &format!("from {from}")));
        }
        limited!(
            self.metrics.refusals.may_log_about("link_unresponsive", node) => warn,
            %node, old_addr = %old.from, "unresponsive link replaced by another process"
        );
        Ok(())
    }

    /// Returns the names of all nodes that are linked here, in no particular order.
    pub fn nodes(&self) -> Vec<NodeName> {
        self.nodes.lock().primaries().map(|(node, _)| node.clone()).collect()
    }

    /// Returns the number of nodes that are linked here.
    pub fn node_count(&self) -> usize {
        self.nodes.lock().len()
    }

    /// Subscribes to changes of [`Self::nodes`]. Several changes between two checks appear as one.
    pub fn subscribe(&self) -> watch::Receiver<()> {
        self.changed.subscribe()
    }

    /// Returns every link: a copy, so that no link's own lock is taken while this lock is held.
    pub fn links(&self) -> Vec<Arc<Link>> {
        self.nodes.lock().all().map(|(_, _, linked)| linked.link.clone()).collect()
    }
}

const MILLISECOND: Duration = Duration::from_millis(1);

/// A finder of nodes, here and at peers.
#[derive(Debug)]
pub struct Finder {
    pub(crate) registry: Arc<Registry>,
    /// This process.
    pub(super) own: Instance,
    /// The search at peers, from the first config on that requires one.
    pub(super) first_others: OnceLock<Arc<PeerSearch>>,
    /// Why servers that should be peers cannot be asked.
    unqueried_reason: Mutex<Option<UnqueriedReason>>,
}

impl Finder {
    /// Returns a finder for a server without peers.
    pub fn without_peers(registry: Arc<Registry>, own: Instance) -> Arc<Self> {
        Arc::new(Self { registry, own, first_others: OnceLock::new(), unqueried_reason: Mutex::default() })
    }

    /// Asks these peers from now on, always the same ones, and this DNS. A peer that DNS names is asked at `port`, unless
    /// a list gives another port for it.
    pub fn ask(&self, peers: &Arc<Peers>, dns: NodeDnsLookup, port: u16) {
        let others = self.first_others.get_or_init(|| PeerSearch::new(peers.clone(), port));
        others.dns.store(Some(Arc::new(dns)));
    }

    /// Asks neither peers nor DNS from now on.
    pub(crate) fn ask_no_one(&self) {
        self.first_others.get().inspect(|others| others.dns.store(None));
    }

    /// Returns the search at peers; `None` if this server has none now.
    pub(crate) fn others(&self) -> Option<&Arc<PeerSearch>> {
        self.first_others.get().filter(|others| others.dns.load().is_some())
    }

    /// Sets why servers that should be peers cannot be asked, for the error of a node that is not found.
    pub fn set_unqueried_reason(&self, why: Option<UnqueriedReason>) {
        *self.unqueried_reason.lock() = why;
    }

    /// Returns the peers; `None` if this server has none.
    pub fn peers(&self) -> Option<&Arc<Peers>> {
        self.others().map(|others| &others.peers)
    }

    /// Returns the peers, also if this server no longer asks them.
    pub(crate) fn first_peers(&self) -> Option<&Arc<Peers>> {
        self.first_others.get().map(|others| &others.peers)
    }

    /// Asks the peers, unless that has failed a moment ago.
    async fn search(&self, query: &NodeSearchCriteria) -> Result<Path, NodeNotFound> {
        let Some(others) = self.others() else { return Err(NodeNotFound::default()) };
        if !query.is_any() {
            return others.join(query.clone()).await;
        }
        if let Some(missing) = others.nodes.recent_failure(&query.node) {
            return Err(missing);
        }
        others.join(query.clone()).await.inspect_err(|missing| {
            others.nodes.record_failure(&query.node, missing);
            others.nodes.doubt(&query.node, None);
        })
    }

    /// Adds to the error of a search what this server knows without asking.
    fn complete(&self, query: &NodeSearchCriteria, missing: NodeNotFound) -> NodeNotFound {
        let at_peers = self.others().and_then(|others| others.nodes.last_seen(&query.node));
        let seen =
            missing.seen.into_iter().chain(self.registry.last_linked(&query.node)).chain(at_peers).min();
        let another = missing.another || self.is_another(query);
        NodeNotFound { seen, another, unqueried_reason: *self.unqueried_reason.lock(), ..missing }
    }

    /// Returns true if the node is known to be linked as another process than the requested one.
    fn is_another(&self, query: &NodeSearchCriteria) -> bool {
        self.known_paths(&query.node).any(|path| !query.is_of(path.instance))
    }

    /// Returns the paths that are known without asking: to the node here, and to a peer that has announced it.
    fn known_paths(&self, node: &NodeName) -> impl Iterator<Item = Path> {
        let here = self.registry.link_of(node).filter(|linked| !linked.link.is_closed());
        let here = here.map(|linked| Path { instance: linked.link.instance, link: linked.link });
        here.into_iter().chain(self.path_by_peer(node))
    }

    /// Returns the path to a node at a peer. What the peer said over a link that has ended does not count: that the
    /// node has left may be lost with the link.
    fn path_by_peer(&self, node: &NodeName) -> Option<Path> {
        let others = self.others()?;
        let at = others.nodes.get(node)?;
        let links = others.peers.links();
        if !links.iter().any(|link| link.id == at.link) {
            return None;
        }
        let link = links.into_iter().find(|link| link.instance == Some(at.server))?;
        Some(Path { link, instance: at.instance })
    }

    /// Returns true if the node is known to be linked, without asking peers.
    pub fn knows(&self, node: &NodeName) -> bool {
        self.known_paths(node).next().is_some()
    }

    /// Returns the node with the oldest link to this server, and whether there are others. If none is linked here,
    /// returns the first by name of the nodes known to be at peers.
    pub fn oldest_link(&self) -> Option<(NodeName, bool)> {
        if let Some(oldest) = self.registry.longest() {
            return Some(oldest);
        }
        let others = self.others()?;
        let up: HashSet<_> = others.peers.links().iter().map(|link| link.id).collect();
        let nodes = others.nodes.filter(|at| up.contains(&at.link));
        let (first, _) = nodes.iter().min_by_key(|(node, _)| node.as_str())?;
        Some((first.clone(), nodes.len() > 1))
    }

    /// Pings the other links that carry our sessions to a node that has linked at the server `at`, which may be this
    /// one. Its sessions leave those that do not answer within 1 s.
    pub async fn leave_silent_links(&self, at: Instance, node: &NodeName, table: &SessionTable) {
        let Some(others) = self.others() else { return };
        if table.is_empty() && table.relayed().0 == 0 {
            return;
        }
        let mut links = others.peers.links();
        links.retain(|link| link.instance != Some(at) && link.has_sessions_of(node));
        let lives = join_all(links.iter().map(|link| link.is_alive(Suspicion::Superseded))).await;
        for (link, _) in links.iter().zip(lives).filter(|(_, lives)| !lives) {
            self.invalidate(node, &Path { link: link.clone(), instance: None });
            table.leave(link, Some(node), |_| true);
        }
    }
}

/// A node that is linked to this server, with its link.
#[derive(Debug, Clone)]
pub struct LinkedNode {
    /// The sending side of the link.
    pub link: Arc<Link>,
    /// The address that the edge connected from.
    pub from: SocketAddr,
}

impl LinkedNode {
    /// Returns the answer to a peer's `question` about this node. `own` is this server's process. It is reported for a
    /// plain node, because this server is the end of that node's sessions.
    pub(super) fn found(&self, question: u64, own: Instance) -> Found {
        Found {
            here: true,
            silence: self.link.idle_for(),
            instance: Some(self.link.instance.unwrap_or(own)),
            age: Some(self.link.age()),
            ..Found::not_here(question)
        }
    }
}

impl PathProvider for Finder {
    /// Avoids the link `not` and the peer at its remote end. Takes about 2 s at most. The error names the peers that were
    /// asked.
    fn find<'a>(&'a self, node: &'a NodeName, instance: Option<Instance>, not: Option<&'a Link>) -> Find<'a> {
        Box::pin(async move {
            let query = NodeSearchCriteria::new(node, instance, not);
            let mut searching = pin!(self.search(&query));
            let mut has_linked = false;
            loop {
                // The waiter is created before the check, so a node that links in between ends the wait below. The search
                // would not notice it, because it only asks peers.
                let arrival = self.registry.arrival(node);
                let known = self.known_paths(node).find(|path| query.accepts(path.instance, &path.link));
                if let Some(path) = known {
                    return Ok(path);
                }
                // The node has linked, but as another process than the requested one. The caller decides how long it still
                // waits for that one.
                if has_linked && self.is_another(&query) {
                    return Err(self.complete(&query, NodeNotFound::default()));
                }
                tokio::select! {
                    biased;
                    found = &mut searching => return found.map_err(|missing| self.complete(&query, missing)),
                    () = arrival.wait() => has_linked = true,
                }
            }
        })
    }

    fn arrival(&self, node: &NodeName) -> NodeWaiter<'_> {
        self.registry.arrival(node)
    }

    fn is_replaced(&self, node: &NodeName, instance: Instance) -> bool {
        self.is_another(&NodeSearchCriteria::new(node, Some(instance), None))
    }

    fn invalidate(&self, node: &NodeName, path: &Path) {
        if let Some(others) = self.others().filter(|_| path.link.peer == Remote::Peer) {
            others.nodes.doubt(node, path.link.instance);
        }
    }

    fn is_alone(&self) -> bool {
        self.others().is_none()
    }

    fn node_named_by_address(&self, host: &Host) -> Option<NodeName> {
        let node = host.node().filter(|node| node.address().is_some())?;
        (self.others().is_some() || self.has_linked(&node)).then_some(node)
    }

    fn has_linked(&self, node: &NodeName) -> bool {
        self.knows(node) || self.registry.last_linked(node).is_some()
    }
}

/// Paths to peers, by process, for sessions of an edge with a target that a peer has dialled.
#[derive(Debug)]
pub(crate) struct PeerPaths(pub(crate) Arc<Finder>);

impl PathProvider for PeerPaths {
    /// Takes 1 s at most. The error names the peers that could not be reached.
    fn find<'a>(&'a self, _: &'a NodeName, instance: Option<Instance>, _: Option<&'a Link>) -> Find<'a> {
        Box::pin(async move {
            let (Some(others), Some(target_instance)) = (self.0.others(), instance) else {
                return Err(NodeNotFound::default());
            };
            match others.peers.process(target_instance).await {
                Ok(link) => Ok(Path { link, instance }),
                Err(trouble) => Err(NodeNotFound { trouble, ..NodeNotFound::default() }),
            }
        })
    }

    fn arrival(&self, node: &NodeName) -> NodeWaiter<'_> {
        self.0.registry.arrival(node)
    }

    fn is_alone(&self) -> bool {
        self.0.is_alone()
    }
}
