//! Where a node is: the links of this pod, by node name; and below, at which other pod it is.

pub mod balance;
pub mod history;
pub mod location_cache;
pub mod peers;
pub mod replace;
pub mod search;

use std::collections::HashMap;
use std::fmt;
use std::net::{IpAddr, SocketAddr};
use std::pin::pin;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use futures_util::future::join_all;
use tokio::sync::watch;
use tokio::time::{Instant, timeout_at};

use crate::registry::history::NodeHistory;
use crate::registry::location_cache::{LocationCache, Subscribers};
use crate::registry::peers::peer::PeerError;
use crate::registry::peers::{NodeLocationAnswer, Peers};
use crate::registry::replace::Conflicts;
use crate::registry::search::{Dns, NodeQuery, Searches};
use tunnel_base::addresses::{AddressClaim, ClaimSource};
use tunnel_base::metrics::Metrics;
use tunnel_base::names::{Instance, NodeName};
use tunnel_link::sender::LinkSender;
use tunnel_link::session::stream::Parked;
use tunnel_link::table::SessionTable;
use tunnel_proto::frame::{Found, Remote};

/// The nodes that are linked to this pod. The newest link of a node wins.
///
/// Links come and go on tasks of their own, so two threads may change one node's entry at the same time. One lock holds
/// all entries; it is released before a link is closed, a waiter is woken or a metric changes, because each of these
/// takes another lock. What happens after the release rests on three rules:
///
/// - [`Registry::insert`] and [`Registry::remove`] compare links by their ids under the lock, so a link that ends late
///   never removes the newer one that took its place.
/// - A waiter registers first and looks second ([`Registry::wait`]), so a link that is inserted between the two wakes
///   it.
/// - A link that was read from here may have ended since. Its users see that, as it takes nothing more; no caller
///   relies on it being alive.
#[derive(Debug)]
pub struct Registry {
    nodes: Mutex<NodeLinks>,
    /// Wakes those who wait for a node, whenever that is linked.
    awaited: NodeWaiters,
    conflicts: Conflicts,
    /// Sent to whenever the set of linked nodes may have changed.
    changed: watch::Sender<()>,
    metrics: Metrics,
}

/// Where a node is.
#[derive(Debug, Clone)]
pub enum NodeLocation {
    /// Linked to this pod.
    Here(LinkedNode),
    /// It is not linked to this pod, perhaps to another. How long ago it last was here; none if never, or forgotten.
    NotHere(Option<Duration>),
}

/// Another process holds the node's name, and its link is alive.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("node {node} is linked from {from} by another process, which is alive: two machines with one name?")]
pub struct NameInUse {
    /// The name that both processes use.
    pub node: NodeName,
    /// The address of the process that keeps it.
    pub from: SocketAddr,
}

#[derive(Debug, Default)]
struct NodeLinks {
    linked: HashMap<NodeName, LinkedNode>,
    /// The older link of a process that keeps two for a while: at most one for each node.
    older: HashMap<NodeName, LinkedNode>,
    /// The link of an edge that has said that it has another one, and stays for the sessions that run there: at most one
    /// for each node. Nobody finds the node by it.
    leaving: HashMap<NodeName, LinkedNode>,
    /// Links for interactive sessions. Nobody finds a node by its one.
    interactive: HashMap<NodeName, LinkedNode>,
    /// When each node that is not linked any more lost its link, and what last went wrong with nodes.
    past: NodeHistory,
}

impl NodeLinks {
    /// Every link, the older ones too.
    fn all(&self) -> Vec<LinkedNode> {
        let aside = self.leaving.values().chain(self.interactive.values());
        self.linked.values().chain(self.older.values()).chain(aside).cloned().collect()
    }
}

impl Registry {
    /// A registry without nodes.
    pub fn new(metrics: Metrics) -> Arc<Self> {
        let changed = watch::Sender::new(());
        let (awaited, conflicts) = (NodeWaiters::default(), Conflicts::default());
        Arc::new(Self { nodes: Mutex::default(), awaited, conflicts, changed, metrics })
    }

    /// Whether the node is linked here, or else when it last was.
    pub fn find(&self, node: &NodeName) -> NodeLocation {
        let nodes = self.lock();
        match nodes.linked.get(node) {
            Some(linked) => NodeLocation::Here(linked.clone()),
            None => NodeLocation::NotHere(nodes.past.gone(node).map(|at| at.elapsed())),
        }
    }

    /// The link of a node, if it is linked here.
    pub fn link_of(&self, node: &NodeName) -> Option<LinkedNode> {
        self.lock().linked.get(node).cloned()
    }

    /// A waiter for the node: it is woken by each link of the node, here or at another pod, that comes after this call.
    pub fn arrival(&self, node: &NodeName) -> NodeWaiter<'_> {
        self.awaited.arrival(node)
    }

    /// Wakes those who wait for the node: another pod has announced it.
    pub fn wake_waiters(&self, node: &NodeName) {
        self.awaited.wake(node);
    }

    /// Wakes all who wait for any node: a link to another pod has come up, and the node may be there.
    pub fn wake_all_waiters(&self) {
        self.awaited.wake_all();
    }

    /// Waits until a node has a link other than `not`, at most until `until`. Cancel safe.
    pub async fn wait(
        &self,
        node: &NodeName,
        not: Option<&LinkSender>,
        until: Instant,
    ) -> Option<LinkedNode> {
        loop {
            // The waiter is registered before the look: a link that is inserted between the two wakes it. The other way
            // round it would be missed, and this would wait until the deadline.
            let arrival = self.arrival(node);
            match self.link_of(node) {
                Some(linked) if not.is_none_or(|not| not.id != linked.sender.id) => return Some(linked),
                _ => timeout_at(until, arrival.wait()).await.ok()?,
            }
        }
    }

    /// Checks whether a process may link as `node` from that address. It may not while another process of that name
    /// answers a ping; that one is then sent a Conflict. A plain link cannot be pinged, and its process gives way.
    /// Takes up to 2 s.
    ///
    /// The lock is not held while the ping is under way. Two newcomers may both pass if neither finds the other linked;
    /// then [`Self::insert`] decides, and the later one stays.
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
        let NodeLocation::Here(old) = self.find(node) else { return Ok(()) };
        if old.instance.is_none() || old.instance == instance {
            return Ok(());
        }
        if old.sender.ping_within(PONG_TIMEOUT).await {
            return Err(self.reject_newcomer(node, &old, &format!("from {from}")));
        }
        tracing::warn!(%node, old = %old.from, "the old link does not answer and is replaced by another process");
        Ok(())
    }

    /// Makes a link its node's current one. The one before is closed, unless the new one is to stand `beside` it and
    /// belongs to the same process: then the older one is returned, which has fallen silent for its edge, so that sessions
    /// had better go on over the new one. At most two stand side by side, so a third one closes the oldest.
    pub fn insert(&self, linked: LinkedNode, beside: bool) -> Option<Arc<LinkSender>> {
        let node = linked.sender.peer.node().cloned()?;
        let mut nodes = self.lock();
        nodes.past.on_linked(&node);
        let instance = linked.instance;
        let before = nodes.linked.insert(node.clone(), linked);
        let oldest = nodes.older.remove(&node);
        let foreign = nodes.take_foreign(&node, instance);
        let (kept, before): (Vec<_>, Vec<_>) = before.into_iter().partition(|before| {
            beside && before.instance.is_some() && before.instance == instance && !before.sender.is_closed()
        });
        let silent = kept.first().map(|kept| kept.sender.clone());
        nodes.older.extend(kept.into_iter().map(|kept| (node.clone(), kept)));
        self.count(&nodes);
        // Closing takes the link's own lock, and two are never held at once. A link delivers frames until its loop ends.
        drop(nodes);
        for old in oldest.into_iter().chain(foreign).chain(before) {
            tracing::warn!(%node, old = %old.from, "link replaced by a newer one");
            old.sender.close();
        }
        self.awaited.wake(&node);
        self.changed.send_replace(());
        silent
    }

    /// Removes a link that has ended. An older link that stood beside it becomes the node's current one again. Nothing
    /// happens if a newer link has replaced it: by the time a link's end is noticed, the node may be linked anew.
    pub fn remove(&self, sender: &LinkSender) {
        let Some(node) = sender.peer.node() else { return };
        let mut nodes = self.lock();
        if !nodes.remove_secondary(node, sender) && nodes.take(node, sender).is_some() {
            self.count(&nodes);
            drop(nodes);
            self.changed.send_replace(());
        }
    }

    /// Names of all nodes that are linked here, in no order.
    pub fn nodes(&self) -> Vec<NodeName> {
        self.lock().linked.keys().cloned().collect()
    }

    /// Notices every change of [`Self::nodes`]; several changes between two looks count as one.
    pub fn subscribe(&self) -> watch::Receiver<()> {
        self.changed.subscribe()
    }

    /// Sends Drain on every link: each edge then links to another pod.
    pub fn drain_all(&self) {
        let all = self.lock().all();
        for linked in all {
            linked.sender.drain(None);
        }
    }

    /// Closes every link.
    pub fn close_all(&self) {
        let all = self.lock().all();
        for linked in all {
            linked.sender.close();
        }
    }

    fn count(&self, nodes: &NodeLinks) {
        self.metrics.nodes.set(i64::try_from(nodes.linked.len()).unwrap_or(i64::MAX));
    }

    fn lock(&self) -> MutexGuard<'_, NodeLinks> {
        self.nodes.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// How long an old link has to show that its process is alive, when another one comes with its name.
const PONG_TIMEOUT: Duration = Duration::from_secs(2);

// Who waits for which node, so that a node that comes wakes only those who wait for it.
//
// The order is always: make an [`Arrival`], then look whether the node is there, then wait. An arrival notices every
// node that comes after it was made, so nothing is lost between the look and the wait. The entry of a node is made and
// removed under one lock together with its count; waking happens after the lock is released, on a handle taken under
// it, and at worst wakes a waiter that has just left.

/// The nodes that somebody waits for.
#[derive(Debug, Default)]
pub(crate) struct NodeWaiters(Mutex<HashMap<NodeName, Waiters>>);

/// Who waits for one node.
#[derive(Debug)]
struct Waiters {
    wake: Arc<watch::Sender<()>>,
    /// How many wait. It is counted under the lock rather than read from the channel: two waiters that leave at the
    /// same time would each still see the other's receiver, and the entry would stay for ever.
    count: usize,
}

/// A waiter for one node: it notices each time the node comes after the waiter was made.
#[derive(Debug)]
pub struct NodeWaiter<'a> {
    awaited: &'a NodeWaiters,
    node: NodeName,
    wake_waiters: watch::Receiver<()>,
}

impl NodeWaiters {
    pub(crate) fn arrival(&self, node: &NodeName) -> NodeWaiter<'_> {
        let mut awaited = self.lock();
        let new = || Waiters { wake: Arc::new(watch::Sender::new(())), count: 0 };
        let waiting = awaited.entry(node.clone()).or_insert_with(new);
        waiting.count += 1;
        let wake_waiters = waiting.wake.subscribe();
        drop(awaited);
        NodeWaiter { awaited: self, node: node.clone(), wake_waiters }
    }

    pub(crate) fn wake(&self, node: &NodeName) {
        let waiting = self.lock().get(node).map(|waiting| waiting.wake.clone());
        if let Some(waiting) = waiting {
            waiting.send_replace(());
        }
    }

    /// Wakes every waiter, as any of the nodes may have come.
    pub(crate) fn wake_all(&self) {
        let waiting: Vec<_> = self.lock().values().map(|waiting| waiting.wake.clone()).collect();
        for waiting in waiting {
            waiting.send_replace(());
        }
    }

    fn lock(&self) -> MutexGuard<'_, HashMap<NodeName, Waiters>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl NodeWaiter<'_> {
    /// Waits until the node comes; returns at once if it has come since this waiter was made. Cancel safe.
    pub async fn wait(&self) {
        let mut wake_waiters = self.wake_waiters.clone();
        if wake_waiters.changed().await.is_err() {
            // Never reached: this waiter is counted, and the sender lives as long as anybody is.
            std::future::pending::<()>().await;
        }
    }
}

impl Drop for NodeWaiter<'_> {
    fn drop(&mut self) {
        let mut awaited = self.awaited.lock();
        if let Some(waiting) = awaited.get_mut(&self.node) {
            waiting.count -= 1;
            if waiting.count == 0 {
                awaited.remove(&self.node);
            }
        }
    }
}

// A node's link, as the registry keeps it.

/// A node's link.
#[derive(Debug, Clone)]
pub struct LinkedNode {
    /// The sending side of the link.
    pub sender: Arc<LinkSender>,
    /// The edge's process; none on a plain link, whose edge does not name it.
    pub instance: Option<Instance>,
    /// The address that the edge connected from.
    pub from: SocketAddr,
    /// The addresses that the edge says its node has.
    pub ips: Arc<[IpAddr]>,
}

impl LinkedNode {
    /// The answer to another pod's `question` about this node. `own` is this pod's process: it stands for a plain node,
    /// because this pod is the end of that node's sessions.
    pub fn found(&self, question: u64, own: Instance) -> Found {
        Found {
            here: true,
            silence: self.sender.idle_for(),
            instance: Some(self.instance.unwrap_or(own)),
            age: Some(self.sender.age()),
            ips: self.ips.clone(),
            ..Found::not_here(question)
        }
    }
}

// Finding a node: linked here, else where it was found before, else by DNS and by asking the other pods.

/// Finds nodes, here and at other pods.
#[derive(Debug)]
pub struct Finder {
    registry: Arc<Registry>,
    /// This process.
    own: Instance,
    others: Option<FindPeers>,
}

/// What one of several pods needs to find nodes elsewhere.
#[derive(Debug)]
struct FindPeers {
    peers: Arc<Peers>,
    known: Arc<LocationCache>,
    searches: Searches,
    interest: Subscribers,
}

/// A path to a node: the link over which a session is to be opened or resumed.
#[derive(Debug, Clone)]
pub struct Path {
    /// The node's own link, or one to the pod that has it.
    pub sender: Arc<LinkSender>,
    /// The node's process; none for a plain node that is linked here.
    pub instance: Option<Instance>,
}

impl Finder {
    /// For a pod that is alone.
    pub fn without_peers(registry: Arc<Registry>, own: Instance) -> Arc<Self> {
        Arc::new(Self { registry, own, others: None })
    }

    /// For one of several pods, the process `own`. A pod that DNS names is asked at `port`, unless a list names
    /// another.
    pub fn new(registry: Arc<Registry>, own: Instance, peers: Arc<Peers>, dns: Dns, port: u16) -> Arc<Self> {
        let known = Arc::new(LocationCache::default());
        let searches = Searches::new(peers.clone(), known.clone(), dns, port);
        Arc::new(Self {
            registry,
            own,
            others: Some(FindPeers { peers, known, searches, interest: Subscribers::default() }),
        })
    }

    /// Whether no other pod is ever asked.
    pub fn is_alone(&self) -> bool {
        self.others.is_none()
    }

    /// The nodes that are linked to this pod.
    pub fn registry(&self) -> &Arc<Registry> {
        &self.registry
    }

    /// A path to a node: to its process `instance` if one is given, and neither over the link `not` nor through the pod
    /// at that link's other end. Takes about 2 s at most. Cancel safe.
    ///
    /// # Errors
    ///
    /// No pod has the node; the error names the pods that were asked.
    pub async fn find(
        &self,
        node: &NodeName,
        instance: Option<Instance>,
        not: Option<&LinkSender>,
    ) -> Result<Path, NodeNotFound> {
        let wanted = NodeQuery::new(node, instance, not);
        if let Ok(path) = self.find_cached(&wanted) {
            return Ok(path);
        }
        let mut searching = pin!(self.search(wanted.clone()));
        let mut came = false;
        loop {
            // The waiter is made before the second look: a node that comes between the two ends the wait below. The
            // search itself would not notice it, as it asks other pods only.
            let arrival = self.registry.arrival(node);
            let missing = match self.find_cached(&wanted) {
                Ok(path) => return Ok(path),
                // The node has come, but as another process than the one that is sought. The caller decides how long it
                // still waits for that one.
                Err(missing) if came && missing.another => return Err(missing),
                Err(missing) => missing,
            };
            let not_found = tokio::select! {
                biased;
                found = &mut searching => match found {
                    Ok(yes) => return Ok(Path { sender: yes.sender, instance: yes.instance }),
                    Err(not_found) => not_found,
                },
                () = arrival.wait() => {
                    came = true;
                    continue;
                }
            };
            let another = missing.another || not_found.another;
            let moving = missing.moving || not_found.moving;
            let seen = missing.seen.into_iter().chain(not_found.seen).min();
            return Err(NodeNotFound { seen, another, moving, ..not_found });
        }
    }

    /// Whether there is a node of that name, as far as is known without asking anybody. What was heard of a pod's nodes
    /// before the link to it was made does not count: nobody has said since that they are there, or gone.
    pub fn knows(&self, node: &NodeName) -> bool {
        let Ok(Path { sender, .. }) = self.find_cached(&NodeQuery::new(node, None, None)) else {
            return false;
        };
        let heard = || self.others.as_ref().and_then(|others| others.known.age(node));
        sender.peer != Remote::Peer || heard().is_some_and(|heard| heard <= sender.age())
    }

    /// What edges at other pods say of their nodes' addresses, as far as the nodes are known to be there.
    pub fn claims(&self) -> Vec<AddressClaim> {
        let Some(others) = &self.others else { return Vec::new() };
        let mut said = others.known.claims();
        said.retain(|(node, _)| self.knows(node));
        let claim = |node: &NodeName, ip: &IpAddr| AddressClaim {
            ip: *ip,
            node: node.clone(),
            by: ClaimSource::Edge,
        };
        said.iter().flat_map(|(node, ips)| ips.iter().map(move |ip| claim(node, ip))).collect()
    }

    /// The node that has been linked to this pod for longest, and whether there are others. If there is none here: one
    /// of those that are known to be at other pods, the first by name.
    pub fn oldest_link(&self) -> Option<(NodeName, bool)> {
        self.registry.longest().or_else(|| self.others.as_ref()?.known.first())
    }

    /// A path that needs no search: the node is linked here, or at a pod that is remembered and to which there is a
    /// link.
    fn find_cached(&self, wanted: &NodeQuery) -> Result<Path, NodeNotFound> {
        let node = &wanted.node;
        let mut missing = NodeNotFound::default();
        match self.registry.find(node) {
            // The link is closed already and its task is about to remove it: another thread is between the two.
            NodeLocation::Here(linked) if linked.sender.is_closed() => missing.seen = Some(Duration::ZERO),
            NodeLocation::Here(linked) if wanted.accepts(linked.instance, &linked.sender) => {
                return Ok(Path { sender: linked.sender, instance: linked.instance });
            }
            NodeLocation::Here(linked) => missing.another = !wanted.is_of(linked.instance),
            NodeLocation::NotHere(seen) => missing.seen = seen,
        }
        missing.moving = missing.seen.is_some_and(|seen| seen < RELINK_WINDOW);
        if let Some(others) = &self.others
            && let Some((server, instance)) = others.known.of(node)
            && let Some(sender) = others.peers.current(server).and_then(|server| server.up())
        {
            if wanted.accepts(instance, &sender) {
                return Ok(Path { sender, instance });
            }
            missing.another |= !wanted.is_of(instance);
        }
        Err(missing)
    }

    async fn search(&self, wanted: NodeQuery) -> Result<NodeLocationAnswer, NodeNotFound> {
        let Some(others) = &self.others else { return Err(NodeNotFound::default()) };
        let node = wanted.node.clone();
        let any = wanted.is_any();
        let missed = if any { others.known.negative_age(&node) } else { None };
        let found = match missed {
            Some(not_found) => Err(not_found),
            None => others.searches.join(wanted).await.inspect_err(|not_found| {
                if any {
                    others.known.insert_negative(&node, not_found);
                }
            }),
        };
        found.map_err(|not_found| {
            let lost = others.known.lost(&node);
            let moving = lost.into_iter().chain(not_found.seen).any(|since| since < RELINK_WINDOW);
            let seen = not_found.seen.into_iter().chain(others.known.seen(&node)).min();
            NodeNotFound { seen, moving, ..not_found }
        })
    }

    /// A path to the pod whose process is `instance`. Takes 1 s at most. Cancel safe.
    ///
    /// # Errors
    ///
    /// No pod that could be reached is that process. The error names those that could not be reached.
    pub async fn find_server(&self, instance: Option<Instance>) -> Result<Path, NodeNotFound> {
        let (Some(others), Some(wanted)) = (&self.others, instance) else {
            return Err(NodeNotFound::default());
        };
        match others.peers.process(wanted).await {
            Ok(sender) => Ok(Path { sender, instance }),
            Err(trouble) => Err(NodeNotFound { trouble, ..NodeNotFound::default() }),
        }
    }

    /// Whether the node is known to be linked, and as another process than this one.
    pub fn is_another(&self, node: &NodeName, instance: Instance) -> bool {
        let wanted = NodeQuery::new(node, Some(instance), None);
        self.find_cached(&wanted).is_err_and(|missing| missing.another)
    }

    /// Closes all links to other pods.
    pub fn close_links(&self) {
        for link in self.others.iter().flat_map(|others| others.peers.links()) {
            link.close();
        }
    }

    /// Notes that the node is not at the pod behind this path, because the node was not there.
    pub fn invalidate(&self, node: &NodeName, path: &Path) {
        if let Some(others) = &self.others {
            others.known.forget(node, &others.peers.peer_of(&path.sender));
        }
    }

    /// A node was linked anew at the pod `at`, which may be this one. Other links over which our sessions run to it are
    /// pinged; those that do not answer within 1 s are left. Returns the sessions that need another path.
    pub async fn migrate_from_old_links(
        &self,
        at: Instance,
        node: &NodeName,
        table: &SessionTable,
    ) -> Vec<Parked> {
        let Some(others) = &self.others else { return Vec::new() };
        if table.is_empty() && table.relayed().0 == 0 {
            return Vec::new();
        }
        let mut links = others.peers.links();
        links.retain(|link| {
            link.instance != Some(at) && link.sessions() > 0 && table.has_sessions_on(link, node)
        });
        let lives = join_all(links.iter().map(|link| link.ping_within(CONTEST_PONG_TIMEOUT))).await;
        let mut parked = Vec::new();
        for (link, _) in links.iter().zip(lives).filter(|(_, lives)| !lives) {
            self.invalidate(node, &Path { sender: link.clone(), instance: None });
            table.detach_relays(link, |of| of == node);
            parked.extend(table.leave(link, |of, _| of == node));
        }
        parked
    }
}

/// How long an edge that has lost its link usually takes to link again: for so long its node counts as moving.
pub(crate) const RELINK_WINDOW: Duration = Duration::from_secs(3);
/// How long an old link has to answer a ping when its node has come elsewhere.
const CONTEST_PONG_TIMEOUT: Duration = Duration::from_secs(1);

// Why a node was not found, in words.

/// No pod has the node: the pods that were asked, and their answers.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct NodeNotFound {
    /// How long ago the node was last linked here, or known to be at another pod, here or to a pod that was asked, if ever.
    pub seen: Option<Duration>,
    /// Why DNS named no pod, if DNS was asked.
    pub dns: Option<String>,
    /// How many other pods answered that the node is not there.
    pub asked: usize,
    /// The other pods that could not be reached.
    pub trouble: Vec<PeerError>,
    /// It was found, but as another process than the one that is sought.
    pub another: bool,
    /// It was linked a moment ago, and may be linking to another pod.
    pub moving: bool,
}

impl NodeNotFound {
    /// No link from that node is remembered anywhere: it may have no edge at all.
    pub fn is_unknown_node(&self) -> bool {
        self.seen.is_none() && !self.moving && !self.another
    }

    /// The whole of it, behind the node's name.
    pub fn sentence(&self) -> String {
        let seen = self.seen.map(|seen| format!(", last seen {} ago", short(seen))).unwrap_or_default();
        format!("is not connected{seen}{self}")
    }
}

impl fmt::Display for NodeNotFound {
    /// Goes on where a sentence on the node has ended.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if let Some(dns) = &self.dns {
            write!(f, "; {dns}")?;
        }
        match self.asked {
            0 => {}
            1 => f.write_str("; not at the other pod")?,
            n => write!(f, "; not at {n} other pods")?,
        }
        for trouble in &self.trouble {
            write!(f, "; {trouble}")?;
        }
        if self.another { f.write_str("; it is linked as another process") } else { Ok(()) }
    }
}

/// A duration in its largest whole unit: `45s`, `3m`, `2h`.
fn short(d: Duration) -> String {
    match d.as_secs() {
        s @ 0..120 => format!("{s}s"),
        s @ 120..7200 => format!("{}m", s / 60),
        s => format!("{}h", s / 3600),
    }
}

#[cfg(test)]
mod tests {
    use futures_util::FutureExt as _;

    use super::*;

    #[tokio::test]
    async fn only_who_waits_for_that_node_hears_of_it_and_nothing_is_kept() {
        let awaited = NodeWaiters::default();
        let (one, two): (NodeName, NodeName) = ("one".parse().unwrap(), "two".parse().unwrap());
        let (first, second, other) = (awaited.arrival(&one), awaited.arrival(&one), awaited.arrival(&two));
        awaited.wake(&one);
        assert!(first.wait().now_or_never().is_some() && second.wait().now_or_never().is_some());
        assert!(other.wait().now_or_never().is_none());
        drop(first);
        awaited.wake(&one);
        assert!(second.wait().now_or_never().is_some());
        drop((second, other));
        assert!(awaited.lock().is_empty());
    }

    #[test]
    fn nothing_is_kept_of_two_who_stop_waiting_at_once() {
        let awaited = NodeWaiters::default();
        let node: NodeName = "one".parse().unwrap();
        for _ in 0..20_000 {
            let (first, second) = (awaited.arrival(&node), awaited.arrival(&node));
            let both = std::sync::Barrier::new(2);
            std::thread::scope(|threads| {
                threads.spawn(|| {
                    both.wait();
                    drop(first);
                });
                both.wait();
                drop(second);
            });
            assert!(awaited.lock().is_empty());
        }
    }
}
