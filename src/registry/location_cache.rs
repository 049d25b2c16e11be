//! At which server a node is: announcements between servers, their subscribers, and the cache of locations.

use std::collections::HashMap;
use std::collections::hash_map::Entry;
use std::net::IpAddr;
use std::sync::Arc;
use std::time::Duration;

use parking_lot::Mutex;
use tokio::time::Instant;

use crate::registry::peers::PeerHandle;
use crate::registry::{Finder, NodeLocation, NodeNotFound};
use tunnel_base::names::{Instance, NodeName};
use tunnel_link::sender::LinkSender;
use tunnel_proto::frame::Found;

/// A cache of nodes at peers, and of nodes that were recently not found.
#[derive(Debug, Default)]
pub(crate) struct LocationCache {
    nodes: Mutex<Locations>,
    /// Bounded by [`MAX_NEGATIVE_ENTRIES`].
    missed: Mutex<HashMap<NodeName, (Instant, NodeNotFound)>>,
}

/// The nodes that peers have, under the lock of the [`LocationCache`].
#[derive(Debug, Default)]
struct Locations {
    /// Bounded by [`MAX_LOCATIONS`] and [`MAX_REPLICATED`].
    all: HashMap<NodeName, CachedLocation>,
    /// Number of entries that are kept as replicas, regardless of searches.
    kept: usize,
    /// Number of replicated entries per server; no entry is 0.
    kept_at: HashMap<Instance, usize>,
    /// Time of the last sweep for replicas that are no longer needed.
    swept: Option<Instant>,
}

/// The server that has a node, as far as this process knows.
#[derive(Debug)]
struct CachedLocation {
    /// `None` if the node is no longer there.
    server: Option<PeerHandle>,
    instance: Option<Instance>,
    /// The process of that server if this entry is kept as a replica: for peers, because this server is a location
    /// replica of the node, or because this server intercepts.
    kept: Option<Instance>,
    /// Whether a path there has failed, so that the server is asked before another path is tried.
    suspect: bool,
    /// When this was learned.
    learned: Instant,
    /// Since when no server has the node, although this one had it; the node may be linking to another.
    lost: Option<Instant>,
    /// The addresses that its edge claims, as reported by the server that had its link.
    ips: Arc<[IpAddr]>,
}

impl LocationCache {
    /// Returns the server where the node certainly is, and the node's process.
    pub(crate) fn of(&self, node: &NodeName) -> Option<(PeerHandle, Option<Instance>)> {
        let nodes = self.nodes.lock();
        nodes.all.get(node).filter(|at| !at.suspect).and_then(|at| Some((at.server.clone()?, at.instance)))
    }

    /// Returns the last known server of the node.
    pub(crate) fn last_server(&self, node: &NodeName) -> Option<PeerHandle> {
        self.nodes.lock().all.get(node)?.server.clone()
    }

    /// Returns the first node by name among those at linked peers, and whether there are others.
    pub(crate) fn first(&self) -> Option<(NodeName, bool)> {
        let nodes = self.nodes.lock();
        let lives = |at: &CachedLocation| {
            at.lost.is_none() && at.server.as_ref().is_some_and(|server| server.up().is_some())
        };
        let mut living = nodes.all.iter().filter(|(_, at)| lives(at));
        let (mut first, mut several) = (living.next()?.0, false);
        for (node, _) in living {
            several = true;
            if node.as_str() < first.as_str() {
                first = node;
            }
        }
        Some((first.clone(), several))
    }

    /// Records that a server has the node. `keep` keeps the entry regardless of searches, while the limits in total and
    /// per server allow it.
    pub(crate) fn insert(&self, node: &NodeName, server: PeerHandle, instance: Option<Instance>, keep: bool) {
        let process = if keep { server.process() } else { None };
        let mut nodes = self.nodes.lock();
        let ips = nodes.all.get(node).filter(|at| at.instance == instance).map(|at| at.ips.clone());
        nodes.remove(node);
        if nodes.all.len() - nodes.kept >= MAX_LOCATIONS {
            // Any half of them will do, because each can be found again.
            let mut every_other = false;
            nodes.all.retain(|_, at| {
                every_other = !every_other;
                at.kept.is_some() || every_other
            });
        }
        let kept = process.filter(|server| nodes.has_room(*server));
        if let Some(server) = kept {
            nodes.kept += 1;
            *nodes.kept_at.entry(server).or_default() += 1;
        }
        let ips = ips.unwrap_or_default();
        let (server, learned) = (Some(server), Instant::now());
        nodes.all.insert(
            node.clone(),
            CachedLocation { server, instance, kept, suspect: false, learned, lost: None, ips },
        );
        drop(nodes);
        self.missed.lock().remove(node);
    }

    /// Records the addresses that the node's edge claims, as reported by the server that has its link.
    pub(crate) fn claim(&self, node: &NodeName, ips: Arc<[IpAddr]>) {
        if let Some(at) = self.nodes.lock().all.get_mut(node) {
            at.ips = ips;
        }
    }

    /// Returns the nodes whose edges claim addresses, with the addresses.
    pub(crate) fn claims(&self) -> Vec<(NodeName, Arc<[IpAddr]>)> {
        let nodes = self.nodes.lock();
        let claiming = nodes.all.iter().filter(|(_, at)| !at.ips.is_empty() && !at.suspect);
        claiming.map(|(node, at)| (node.clone(), at.ips.clone())).collect()
    }

    /// Returns how long the node's current or last location has been known.
    pub(crate) fn age(&self, node: &NodeName) -> Option<Duration> {
        Some(self.nodes.lock().all.get(node)?.learned.elapsed())
    }

    /// Returns true if there is space for everything that must be replicated for peers.
    pub(crate) fn is_complete(&self) -> bool {
        let nodes = self.nodes.lock();
        nodes.kept < MAX_REPLICATED && nodes.kept_at.values().all(|kept| *kept < MAX_REPLICATED_PER_PEER)
    }

    /// Removes replicas of nodes that need no longer be `kept`, and of servers that have disconnected. Called when
    /// space runs out. Runs at most once a minute, because it checks all entries.
    pub(crate) fn make_room(&self, kept: impl Fn(&NodeName) -> bool) {
        let mut nodes = self.nodes.lock();
        if nodes.swept.is_some_and(|swept| swept.elapsed() < SWEEP_INTERVAL) {
            return;
        }
        nodes.swept = Some(Instant::now());
        let over: Vec<_> = nodes
            .all
            .iter()
            .filter(|(_, at)| at.kept.is_some())
            .filter(|(node, at)| {
                !kept(node) || at.server.as_ref().is_none_or(|server| server.process() != at.kept)
            })
            .map(|(node, _)| node.clone())
            .collect();
        for node in over {
            nodes.remove(&node);
        }
    }

    /// Records that a search did not find the node.
    pub(crate) fn insert_negative(&self, node: &NodeName, said: &NodeNotFound) {
        let mut missed = self.missed.lock();
        if missed.len() >= MAX_NEGATIVE_ENTRIES {
            missed.retain(|_, (at, _)| at.elapsed() < NEGATIVE_TTL);
        }
        if missed.len() < MAX_NEGATIVE_ENTRIES {
            missed.insert(node.clone(), (Instant::now(), said.clone()));
        }
    }

    /// Returns the result of a failed search for the node less than [`NEGATIVE_TTL`] ago.
    pub(crate) fn negative_age(&self, node: &NodeName) -> Option<NodeNotFound> {
        let missed = self.missed.lock();
        missed.get(node).filter(|(at, _)| at.elapsed() < NEGATIVE_TTL).map(|(_, said)| said.clone())
    }

    /// Returns how long no server has had the node, if it was known to be at one.
    pub(crate) fn lost(&self, node: &NodeName) -> Option<Duration> {
        let mut nodes = self.nodes.lock();
        let at = nodes.all.get_mut(node).filter(|at| at.server.is_some())?;
        Some(at.lost.get_or_insert_with(Instant::now).elapsed())
    }

    /// Returns how long ago the node was found missing at a peer; `None` if it is not known to have been there.
    pub(crate) fn seen(&self, node: &NodeName) -> Option<Duration> {
        self.nodes.lock().all.get(node)?.lost.map(|at| at.elapsed())
    }

    /// Records that the node is not at that server, if it is remembered there. An entry that another thread has created
    /// for a newer server stays.
    ///
    /// A replica is only marked as suspect: perhaps only the link there has failed, and the server does not announce
    /// the node again.
    pub(crate) fn forget(&self, node: &NodeName, server: &PeerHandle) {
        let mut nodes = self.nodes.lock();
        let process = server.process();
        let is = |at: &PeerHandle| at.is(server) || process.is_some() && at.process() == process;
        if let Some(at) = nodes.all.get_mut(node)
            && at.server.as_ref().is_some_and(is)
        {
            at.lost.get_or_insert_with(Instant::now);
            at.suspect = true;
            if at.kept.is_none() {
                at.server = None;
            }
        }
    }

    /// Removes everything known about the node.
    pub(crate) fn forget_all(&self, node: &NodeName) {
        self.nodes.lock().remove(node);
        self.missed.lock().remove(node);
    }
}

impl Locations {
    fn has_room(&self, at: Instance) -> bool {
        self.kept < MAX_REPLICATED && self.kept_at.get(&at).is_none_or(|kept| *kept < MAX_REPLICATED_PER_PEER)
    }

    fn remove(&mut self, node: &NodeName) {
        let Some(server) = self.all.remove(node).and_then(|at| at.kept) else { return };
        self.kept -= 1;
        if let Entry::Occupied(mut kept) = self.kept_at.entry(server) {
            *kept.get_mut() -= 1;
            if *kept.get() == 0 {
                kept.remove();
            }
        }
    }
}

/// Maximum number of nodes that are remembered after a search; a few MiB.
const MAX_LOCATIONS: usize = 50_000;
/// Maximum number of replicas for peers: a server is a replica for three times as many nodes as it has itself.
const MAX_REPLICATED: usize = 200_000;
/// Maximum number of replicas per server. It exceeds the nodes of one server, so a server that announces names
/// endlessly leaves space for announcements by others.
const MAX_REPLICATED_PER_PEER: usize = 50_000;
/// Minimum time between two sweeps for replicas that are no longer needed.
const SWEEP_INTERVAL: Duration = Duration::from_secs(60);
/// Maximum number of remembered failed searches. In a flood of more names than this, every request starts a search.
const MAX_NEGATIVE_ENTRIES: usize = 4096;
/// How long a failed search answers later requests, unless the node links.
const NEGATIVE_TTL: Duration = Duration::from_secs(1);

// Announcements between servers: a server that gains a node announces it to the node's location replicas, and these to
// their subscribers.

impl Finder {
    /// Announces to the node's location replicas, and to servers that intercept, that it is linked here now. If this
    /// server is one of its replicas, also announces it to the subscribers.
    pub fn on_linked(&self, node: &NodeName) {
        let Some(others) = &self.others else { return };
        let before = others.known.last_server(node).and_then(|server| server.process());
        others.known.forget_all(node);
        others.peers.announce(node);
        for server in self.announcement_targets(node, before, self.own) {
            others.peers.announce_to(server, node, None);
        }
    }

    /// Notifies servers that intercept that a link of the node has ended, unless the node has another link here.
    pub fn on_unlinked(&self, node: &NodeName) {
        let Some(others) = self.others.as_ref().filter(|_| self.registry.link_of(node).is_none()) else {
            return;
        };
        others.peers.announce_gone(node);
        // The node may have linked again in between, and that announcement may have been sent first.
        if self.registry.link_of(node).is_some() {
            others.peers.announce(node);
        }
    }

    /// Answers a peer's question: from this server's own links, otherwise with the server that last had the node.
    pub fn answer(&self, to: &Arc<LinkSender>, node: &NodeName, question: u64) {
        if let Some(others) = &self.others {
            others.peers.peer_of(to);
            // Recorded before the check, so a node that links after the check is announced to the peer that asked.
            if let Some(server) = to.instance.filter(|_| others.peers.is_replica_for(node)) {
                others.interest.note(node, server);
            }
        }
        let linked = self.registry.link_of(node).filter(|linked| !linked.sender.is_closed());
        let found = match linked {
            Some(linked) => linked.found(question, self.own),
            None => self.elsewhere(to, node, question),
        };
        // Dropped if too much is queued on that link: a server that does not read its answers gets none.
        to.found(node, found);
    }

    /// Handles a Found of a peer: an answer, or an announcement that a node is there, elsewhere, or no longer there.
    ///
    /// If this changes the node's location, returns the process of the server that has it now. The caller then calls
    /// [`Self::resolve_conflict`] and [`Self::migrate_from_old_links`].
    pub fn on_found(&self, from: &Arc<LinkSender>, node: &NodeName, found: Found) -> Option<Instance> {
        let others = self.others.as_ref()?;
        let found = others.peers.on_found(from, found)?;
        let (at, server) = match found.at {
            _ if found.here => (from.instance?, others.peers.peer_of(from)),
            Some(at) if at != self.own => (at, others.peers.of_process(at)?),
            Some(_) => return None,
            None => {
                others.known.forget(node, &others.peers.peer_of(from));
                return None;
            }
        };
        let before = others.known.last_server(node).and_then(|server| server.process());
        if !others.known.is_complete() {
            others.known.make_room(others.peers.replicated_here());
        }
        others.known.insert(node, server, found.instance, others.peers.replicated_here()(node));
        if found.here {
            // A replica that reports where the node is does not send its addresses.
            others.known.claim(node, found.ips);
        }
        self.registry.wake_waiters(node);
        if found.here {
            let forwarded = Found {
                at: Some(at),
                instance: found.instance,
                age: found.age,
                ..Found::not_here(found.question)
            };
            for server in self.announcement_targets(node, before, at) {
                others.peers.announce_to(server, node, Some(forwarded.clone()));
            }
        }
        Some(at)
    }

    /// Returns the servers to which a location replica announces that the node is now at the server `at`. They are the
    /// server that had it `before` and the subscribers; none if this server is no replica of the node.
    fn announcement_targets(&self, node: &NodeName, before: Option<Instance>, at: Instance) -> Vec<Instance> {
        let Some(others) = self.others.as_ref().filter(|others| others.peers.is_replica_for(node)) else {
            return Vec::new();
        };
        let mut servers = others.interest.of(node);
        servers.extend(before.filter(|before| !servers.contains(before)));
        servers.retain(|server| *server != at && *server != self.own);
        servers
    }

    /// Returns the answer about a node that is not linked here.
    fn elsewhere(&self, to: &LinkSender, node: &NodeName, question: u64) -> Found {
        let away = Found::not_here(question);
        let Some(others) = &self.others else { return away };
        let last = others.known.last_server(node);
        // A cached location may be out of date; the server that has the node now may be one that this server does not
        // know.
        let authoritative = last.is_none()
            && others.peers.is_replica_for(node)
            && others.peers.has_converged()
            && others.known.is_complete();
        let at = last.and_then(|server| others.peers.current(server)?.process());
        let seen = match self.registry.find(node) {
            NodeLocation::NotHere(Some(seen)) => Some(seen),
            // The server that had the node knows better.
            _ if at.is_some() => None,
            _ => others.known.lost(node),
        };
        // 0 means never.
        let silence = seen.map_or(Duration::ZERO, |seen| seen.max(Duration::from_millis(1)));
        Found { at: at.filter(|at| Some(*at) != to.instance), authoritative, silence, ..away }
    }
}

// Subscribers: the servers that have asked for a node of which this server is a location replica. They are notified
// when it moves.

/// The servers that have asked for each node, the latest last.
#[derive(Debug, Default)]
pub(crate) struct Subscribers(Mutex<HashMap<NodeName, Vec<Instance>>>);

impl Subscribers {
    /// Records that a server has asked for the node.
    pub(crate) fn note(&self, node: &NodeName, server: Instance) {
        let mut nodes = self.0.lock();
        if nodes.len() >= MAX_NODES && !nodes.contains_key(node) {
            // Any half of them will do: a server that is not notified finds the node by asking again.
            let mut keep = false;
            nodes.retain(|_, _| {
                keep = !keep;
                keep
            });
        }
        let servers = nodes.entry(node.clone()).or_default();
        servers.retain(|known| *known != server);
        if servers.len() >= MAX_SERVERS {
            servers.remove(0);
        }
        servers.push(server);
    }

    /// Returns the servers that have asked for the node.
    pub(crate) fn of(&self, node: &NodeName) -> Vec<Instance> {
        self.0.lock().get(node).cloned().unwrap_or_default()
    }
}

/// Maximum number of nodes with subscribers; some MiB.
const MAX_NODES: usize = 50_000;
/// Maximum number of subscribers per node: the cost of a move must not grow with the number of servers.
const MAX_SERVERS: usize = 8;

#[cfg(test)]
mod tests {
    use crate::registry::peers::tests::server;

    use super::*;

    #[tokio::test(start_paused = true)]
    async fn a_miss_is_remembered_for_a_second_or_until_the_node_comes_and_there_are_few() {
        let (known, node) = (LocationCache::default(), "node1".parse().unwrap());
        let said = NodeNotFound { asked: 3, ..NodeNotFound::default() };
        for come in [
            |known: &LocationCache, node: &NodeName| known.insert(node, server(1), None, false),
            LocationCache::forget_all,
        ] {
            known.insert_negative(&node, &said);
            assert_eq!(known.negative_age(&node), Some(said.clone()));
            come(&known, &node);
            assert_eq!(known.negative_age(&node), None);
        }
        for n in 0..MAX_NEGATIVE_ENTRIES + 10 {
            known.insert_negative(&format!("node{n}").parse().unwrap(), &said);
        }
        assert_eq!(known.missed.lock().len(), MAX_NEGATIVE_ENTRIES);
        tokio::time::advance(NEGATIVE_TTL).await;
        assert_eq!(known.negative_age(&node), None);
        known.insert_negative(&node, &said);
        assert_eq!((known.negative_age(&node), known.missed.lock().len()), (Some(said), 1));
    }

    #[tokio::test]
    async fn any_node_is_the_first_by_name_that_is_not_lost() {
        let known = LocationCache::default();
        assert_eq!(known.first(), None);
        let [a, b, c]: [NodeName; 3] = ["a", "b", "c"].map(|name| name.parse().unwrap());
        for node in [&c, &a, &b] {
            known.insert(node, server(1), None, false);
        }
        assert_eq!(known.first(), Some((a.clone(), true)));
        known.lost(&a);
        assert_eq!(known.first(), Some((b.clone(), true)));
        known.forget_all(&b);
        assert_eq!(known.first(), Some((c, false)));
    }

    #[tokio::test]
    async fn what_is_kept_for_others_outlives_a_doubt_and_any_number_of_names() {
        let (known, one, node) = (LocationCache::default(), server(1), "kept".parse().unwrap());
        known.insert(&node, one.clone(), None, true);
        for n in 0..3 * MAX_LOCATIONS {
            known.insert(&format!("node{n}").parse().unwrap(), server(2), None, false);
        }
        assert!(known.nodes.lock().all.len() <= MAX_LOCATIONS + 1);
        known.forget(&node, &one);
        assert!(known.of(&node).is_none(), "the server is asked before the path is used again");
        assert!(known.last_server(&node).is_some_and(|at| at.is(&one)));
        known.insert(&node, one, None, true);
        assert!(known.of(&node).is_some() && known.nodes.lock().kept == 1);
        known.forget_all(&node);
        assert!(known.last_server(&node).is_none() && known.nodes.lock().kept == 0);
    }

    #[tokio::test(start_paused = true)]
    async fn a_server_that_announces_names_without_end_fills_its_own_share_only() {
        let (known, loud, quiet) = (LocationCache::default(), server(1), server(2));
        let name = |server: &str, n: usize| format!("{server}{n}").parse::<NodeName>().unwrap();
        for n in 0..2 * MAX_REPLICATED_PER_PEER {
            known.insert(&name("loud", n), loud.clone(), None, true);
        }
        assert_eq!((known.is_complete(), known.nodes.lock().kept), (false, MAX_REPLICATED_PER_PEER));
        for n in 0..100 {
            known.insert(&name("quiet", n), quiet.clone(), None, true);
        }
        assert_eq!(known.nodes.lock().kept, MAX_REPLICATED_PER_PEER + 100);
        assert!(known.nodes.lock().all.len() <= MAX_LOCATIONS + MAX_REPLICATED_PER_PEER + 100);
        // This server is no longer a replica of most of them.
        known.make_room(|node| node.as_str().starts_with("quiet"));
        assert_eq!((known.is_complete(), known.nodes.lock().kept), (true, 100));
        for n in 0..2 * MAX_REPLICATED_PER_PEER {
            known.insert(&name("loud", n), loud.clone(), None, true);
        }
        known.make_room(|node| node.as_str().starts_with("quiet"));
        assert!(!known.is_complete(), "a sweep runs at most once a minute");
        tokio::time::advance(SWEEP_INTERVAL).await;
        known.make_room(|node| node.as_str().starts_with("quiet"));
        assert!(known.is_complete());
    }

    #[tokio::test]
    async fn what_is_remembered_is_bounded_and_forgotten_once_wrong() {
        let (known, one, two) = (LocationCache::default(), server(1), server(2));
        for n in 0..MAX_LOCATIONS + 10 {
            known.insert(&format!("node{n}").parse().unwrap(), one.clone(), None, false);
        }
        assert!(known.nodes.lock().all.len() <= MAX_LOCATIONS);
        let newest: NodeName = format!("node{}", MAX_LOCATIONS + 9).parse().unwrap();
        known.forget(&newest, &two);
        assert!(known.of(&newest).is_some(), "the other server's entry is not affected");
        assert_eq!(known.seen(&newest), None);
        known.forget(&newest, &one);
        assert!(known.of(&newest).is_none() && known.lost(&newest).is_none());
        assert!(known.seen(&newest).is_some(), "the node was there");
    }
}

#[cfg(test)]
mod announce_tests {
    use std::task::{Context, Poll, Waker};

    use tokio::time::Instant;

    use crate::registry::peers::tests::{peers, settled};
    use crate::registry::search::Dns;
    use crate::registry::{LinkedNode, Registry};
    use tunnel_base::metrics::Metrics;
    use tunnel_base::policy::zone::Zone;
    use tunnel_net::resolver::Resolver;
    use tunnel_proto::frame::{FrameKind, Remote};
    use tunnel_proto::state::LinkId;

    use super::*;

    /// Returns the Found frames sent to a server.
    fn told(link: &LinkSender) -> Vec<Found> {
        let mut cx = Context::from_waker(Waker::noop());
        let mut all = Vec::new();
        while let Poll::Ready(Some(frame)) = link.poll_pull(&mut cx, Instant::now()) {
            if let FrameKind::Found(found) = frame.body {
                all.push(found);
            }
        }
        all
    }

    /// Returns a DNS client that gets no answers.
    fn nowhere() -> Dns {
        let resolver = Arc::new(Resolver::of_servers(&[([127, 0, 0, 1], 9).into()]).unwrap());
        Dns::new(resolver, Arc::new(Zone::new(String::new(), Vec::new(), |_| true)))
    }

    #[tokio::test(start_paused = true)]
    async fn a_home_refers_to_the_server_and_announces_to_it_and_to_who_asked_that_the_node_has_moved() {
        let (peers, _tell, _made) = peers(&[]);
        let own = Instance::from_bits(1);
        let finder = Finder::new(Registry::new(Metrics::server("", "")), own, peers.clone(), nowhere(), 1);
        let server = |id| Instance::from_bits(u128::from(id));
        let link = |id| LinkSender::new(LinkId(id), Remote::Peer, Some(server(id)));
        let [first, second, requester] = [7, 8, 9].map(link);
        for link in [&first, &second, &requester] {
            peers.add_incoming(link, false);
        }
        settled().await;
        let names = (0..).map(|n| format!("node{n}").parse::<NodeName>().unwrap());
        let node = &names.into_iter().find(|node| peers.is_replica_for(node)).unwrap();
        let here = Found { here: true, instance: Some(server(77)), ..Found::not_here(0) };
        assert_eq!(finder.on_found(&first, node, here.clone()), Some(server(7)));
        finder.answer(&requester, node, 5);
        assert_eq!(told(&requester), [Found { at: Some(server(7)), ..Found::not_here(5) }]);
        assert_eq!(finder.on_found(&second, node, here), Some(server(8)));
        settled().await;
        let moved = Found { at: Some(server(8)), instance: Some(server(77)), ..Found::not_here(0) };
        assert_eq!((told(&first), told(&requester)), (vec![moved.clone()], vec![moved.clone()]));
        assert_eq!(told(&second), []);
        // Like the other two servers that receive it.
        assert_eq!(finder.on_found(&second, node, moved.clone()), Some(server(8)));
        assert_eq!(
            finder.on_found(&second, node, Found { at: Some(own), ..moved }),
            None,
            "this server knows better"
        );
    }

    #[tokio::test(start_paused = true)]
    async fn who_asks_for_a_node_that_has_just_left_hears_so_and_may_wait_for_it() {
        let (peers, _addresses, _made) = peers(&[]);
        let registry = Registry::new(Metrics::server("", ""));
        let finder = Finder::new(registry.clone(), Instance::from_bits(1), peers.clone(), nowhere(), 1);
        let node: &NodeName = &"node1".parse().unwrap();
        let link = |id, peer| LinkSender::new(LinkId(id), peer, Some(Instance::from_bits(id.into())));
        let (requester, other) = (link(9, Remote::Peer), link(8, Remote::Peer));
        peers.add_incoming(&requester, false);
        peers.add_incoming(&other, false);
        settled().await;
        finder.answer(&requester, node, 5);
        assert_eq!(told(&requester), [Found::not_here(5)], "it was never linked anywhere");
        let edge = link(7, Remote::Edge(node.clone()));
        registry.insert(
            LinkedNode {
                sender: edge.clone(),
                instance: None,
                from: ([127, 0, 0, 1], 1).into(),
                ips: Arc::default(),
            },
            false,
        );
        registry.remove(&edge);
        tokio::time::advance(Duration::from_secs(2)).await;
        finder.answer(&requester, node, 6);
        assert_eq!(told(&requester), [Found { silence: Duration::from_secs(2), ..Found::not_here(6) }]);
        // A peer reports that it has the node, and then disconnects.
        let gone: &NodeName = &"node2".parse().unwrap();
        finder.on_found(&other, gone, Found { here: true, ..Found::not_here(0) });
        finder.answer(&requester, gone, 7);
        assert_eq!(told(&requester), [Found { at: other.instance, ..Found::not_here(7) }]);
        peers.remove(&other);
        other.close();
        finder.answer(&requester, gone, 8);
        assert_eq!(told(&requester), [Found { silence: Duration::from_millis(1), ..Found::not_here(8) }]);
    }

    #[tokio::test(start_paused = true)]
    async fn what_an_edge_at_another_server_says_of_its_addresses_counts_while_it_is_there_and_that_server_linked()
     {
        let (peers, _addresses, _made) = peers(&[]);
        let registry = Registry::new(Metrics::server("", ""));
        let finder = Finder::new(registry, Instance::from_bits(1), peers.clone(), nowhere(), 1);
        let node: &NodeName = &"node1".parse().unwrap();
        let server = |id| Instance::from_bits(u128::from(id));
        let link = |id| LinkSender::new(LinkId(id), Remote::Peer, Some(server(id)));
        let links @ [first, second] = &[7, 8].map(link);
        links.iter().for_each(|link| drop(peers.add_incoming(link, false)));
        settled().await;
        let says = |from: &Arc<LinkSender>, found| finder.on_found(from, node, found);
        let claims = || finder.claims().into_iter().map(|claim| claim.ip.to_string()).collect::<Vec<_>>();
        let (edge, ips) = (Some(server(77)), ["10.0.0.7", "fd00::7"]);
        let mine = ips.map(|ip| ip.parse().unwrap()).into();
        let here = Found { here: true, instance: edge, ips: mine, ..Found::not_here(0) };
        says(first, here.clone());
        assert_eq!(claims(), ips);
        says(second, Found { at: Some(server(7)), instance: edge, ..Found::not_here(0) });
        assert_eq!(claims(), ips, "a replica reports the location without addresses");
        says(second, Found::not_here(0));
        assert!(finder.knows(node), "only the server that has it can report it as disconnected");
        says(first, Found::not_here(0));
        assert!(!finder.knows(node) && claims().is_empty(), "it has disconnected");
        says(first, here.clone());
        says(second, Found { at: Some(server(7)), instance: Some(server(78)), ..Found::not_here(0) });
        assert!(claims().is_empty(), "nothing is known of the other process");
        says(second, here.clone());
        assert_eq!(claims(), ips);
        second.close();
        assert!(claims().is_empty(), "its location is unknown without a link to its server");
        tokio::time::advance(Duration::from_millis(1)).await;
        let again = link(8);
        peers.add_incoming(&again, false);
        settled().await;
        assert!(!finder.knows(node) && claims().is_empty(), "the new link has not announced it");
        says(&again, here);
        assert_eq!(claims(), ips);
    }
}

#[cfg(test)]
mod interest_tests {
    use super::*;

    #[test]
    fn the_latest_few_that_asked_are_known_and_no_names_make_it_grow() {
        let (interest, node) = (Subscribers::default(), "node1".parse().unwrap());
        let server = |n: usize| Instance::from_bits(n as u128);
        for n in [0, 1, 0].into_iter().chain(2..MAX_SERVERS + 1) {
            interest.note(&node, server(n));
        }
        let latest: Vec<_> = [0].into_iter().chain(2..MAX_SERVERS + 1).map(server).collect();
        assert_eq!(interest.of(&node), latest);
        for n in 0..2 * MAX_NODES {
            interest.note(&format!("other{n}").parse().unwrap(), server(1));
        }
        assert!(interest.0.lock().len() <= MAX_NODES);
    }
}
