//! Which nodes peers have, as they announce and answer, and which nodes were recently not found.

use std::collections::HashMap;
use std::time::Duration;

use parking_lot::Mutex;
use tokio::time::Instant;

use crate::paths::node_not_found::NodeNotFound;
use crate::registry::Finder;
use crate::registry::history::{NodeLinkError, UnlinkedNode, WhyUnlinked};
use tunnel_link::link::Link;
use tunnel_proto::frame::{Found, FrameKind};
use tunnel_proto::names::{Instance, NodeName};
use tunnel_proto::state::LinkId;

/// The nodes of all peers, and the searches that have failed.
#[derive(Debug, Default)]
pub(crate) struct NodesAtPeers {
    /// Bounded by [`MAX_NODES`].
    nodes: Mutex<HashMap<NodeName, NodeAtPeer>>,
    /// Bounded by [`MAX_FAILURES`].
    failures: Mutex<HashMap<NodeName, (Instant, NodeNotFound)>>,
}

/// The server that has a node.
#[derive(Debug, Clone)]
pub(crate) struct NodeAtPeer {
    /// The process of the server.
    pub(crate) server: Instance,
    /// The process of the node, or of the server if the node's link is plain.
    pub(crate) instance: Option<Instance>,
    /// The link over which the server said so.
    pub(crate) link: LinkId,
    /// Since when the node is probably no longer there. It may be linking to another server.
    doubted: Option<Instant>,
    /// When the link over which the server said so ended.
    link_ended: Option<Instant>,
}

impl NodesAtPeers {
    /// Returns which server has the node.
    pub(crate) fn get(&self, node: &NodeName) -> Option<NodeAtPeer> {
        self.nodes.lock().get(node).filter(|at| at.doubted.is_none()).cloned()
    }

    /// Returns all nodes for which `is` is true.
    pub(crate) fn filter(&self, is: impl Fn(&NodeAtPeer) -> bool) -> Vec<(NodeName, NodeAtPeer)> {
        let nodes = self.nodes.lock();
        let found = nodes.iter().filter(|(_, at)| at.doubted.is_none() && is(at));
        found.map(|(node, at)| (node.clone(), at.clone())).collect()
    }

    /// Records that the server at the remote end of a link has the node. If there are too many nodes, half of those of
    /// the server with most are removed, so that a server that announces names without end takes no room of others.
    pub(crate) fn insert(&self, node: &NodeName, link: &Link, found: &Found) {
        let Some(server) = link.instance else { return };
        let at =
            NodeAtPeer { server, instance: found.instance, link: link.id, doubted: None, link_ended: None };
        let mut nodes = self.nodes.lock();
        if nodes.len() >= MAX_NODES && !nodes.contains_key(node) {
            halve_largest_share(&mut nodes);
        }
        nodes.insert(node.clone(), at);
        drop(nodes);
        self.failures.lock().remove(node);
    }

    /// Records that the node is probably no longer at that server; `None` means at any server.
    pub(crate) fn doubt(&self, node: &NodeName, server: Option<Instance>) {
        if let Some(at) = self.nodes.lock().get_mut(node)
            && server.is_none_or(|server| server == at.server)
        {
            at.doubted.get_or_insert_with(Instant::now);
        }
    }

    /// Returns how long ago the node was last at a server; `None` if that is unknown, or it is still there.
    pub(crate) fn last_seen(&self, node: &NodeName) -> Option<Duration> {
        self.nodes.lock().get(node)?.doubted.map(|since| since.elapsed())
    }

    /// Records that a link to a peer has ended: what the peer said over it does not count any more.
    pub(crate) fn link_ended(&self, link: LinkId) {
        let now = Some(Instant::now());
        self.nodes.lock().values_mut().filter(|at| at.link == link).for_each(|at| at.link_ended = now);
    }

    /// Returns when and why the node was last at a peer; `None` if that is unknown, or it is still there.
    pub(crate) fn last_loss(&self, node: &NodeName) -> Option<NodeLinkError> {
        let (at, why) = self.nodes.lock().get(node)?.loss()?;
        Some(NodeLinkError { at, why: why.into() })
    }

    /// Returns the nodes that were last at a peer, and are no longer there since less than that time.
    fn lost(&self, within: Duration) -> Vec<NodeName> {
        let nodes = self.nodes.lock();
        let lost = nodes.iter().filter(|(_, at)| at.loss().is_some_and(|(at, _)| at.elapsed() < within));
        lost.map(|(node, _)| node.clone()).collect()
    }

    /// Removes everything known about the node.
    pub(crate) fn remove(&self, node: &NodeName) {
        self.nodes.lock().remove(node);
        self.failures.lock().remove(node);
    }

    /// Records that a search did not find the node.
    pub(crate) fn record_failure(&self, node: &NodeName, missing: &NodeNotFound) {
        let mut failures = self.failures.lock();
        if failures.len() >= MAX_FAILURES {
            failures.retain(|_, (at, _)| at.elapsed() < FAILURE_TTL);
        }
        if failures.len() < MAX_FAILURES {
            failures.insert(node.clone(), (Instant::now(), missing.clone()));
        }
    }

    /// Returns the error of a search for the node that has failed less than [`FAILURE_TTL`] ago.
    pub(crate) fn recent_failure(&self, node: &NodeName) -> Option<NodeNotFound> {
        let failures = self.failures.lock();
        failures.get(node).filter(|(at, _)| at.elapsed() < FAILURE_TTL).map(|(_, missing)| missing.clone())
    }
}

impl NodeAtPeer {
    /// Returns since when and why the node is probably no longer there.
    fn loss(&self) -> Option<(Instant, &'static str)> {
        match self.doubted {
            Some(at) => Some((at, "its link to another server ended")),
            None => Some((self.link_ended?, "its server was lost")),
        }
    }
}

/// Removes half of the nodes of the server with most nodes. Any half will do, because each node can be found again.
fn halve_largest_share(nodes: &mut HashMap<NodeName, NodeAtPeer>) {
    let mut shares = HashMap::<Instance, usize>::new();
    for at in nodes.values() {
        *shares.entry(at.server).or_default() += 1;
    }
    let largest = shares.into_iter().max_by_key(|(_, nodes)| *nodes).map(|(server, _)| server);
    let mut its = 0;
    nodes.retain(|_, at| {
        its += usize::from(Some(at.server) == largest);
        Some(at.server) != largest || its % 2 == 0
    });
}

/// Maximum number of nodes of all peers: thirty servers with 10,000 each.
const MAX_NODES: usize = 300_000;
/// Maximum number of remembered failed searches. In a flood of more names than this, every request starts a search.
const MAX_FAILURES: usize = 4096;
/// How long a failed search answers later requests, unless the node links.
const FAILURE_TTL: Duration = Duration::from_secs(1);

impl Finder {
    /// Announces to all peers that a node is linked here now.
    pub fn on_linked(&self, node: &NodeName) {
        if let Some(others) = self.first_others.get() {
            others.nodes.remove(node);
            others.peers.announce(node);
        }
    }

    /// Announces to all peers that a link of the node has ended, unless the node has another link here.
    pub fn on_unlinked(&self, node: &NodeName) {
        if let Some(others) = self.first_others.get().filter(|_| self.registry.link_of(node).is_none()) {
            others.peers.announce(node);
        }
    }

    /// Answers a peer's question whether a node is linked here.
    pub fn handle_find(&self, to: &Link, node: &NodeName, question: u64) {
        // Dropped if too much is queued on that link: a server that does not read its answers gets none.
        to.signal(node, FrameKind::Found(self.registry.found(node, question, self.own)));
    }

    /// Records that a link to a peer has ended.
    pub fn peer_link_ended(&self, link: &Link) {
        if let Some(others) = self.first_others.get() {
            others.nodes.link_ended(link.id);
        }
    }

    /// Returns when and why a node without a link was lost: here, or later at the server to which it had moved.
    pub fn last_loss(&self, mut lost: UnlinkedNode) -> UnlinkedNode {
        let elsewhere = self.others().and_then(|others| others.nodes.last_loss(&lost.node));
        if let Some(loss) = elsewhere.filter(|loss| lost.why == WhyUnlinked::Absent || loss.at > lost.at) {
            lost.at = loss.at;
            lost.error = Some(loss);
            lost.why = WhyUnlinked::Lost;
        }
        lost
    }

    /// Returns the nodes that peers have lost within that time.
    pub fn lost_at_peers(&self, within: Duration) -> Vec<NodeName> {
        self.others().map(|others| others.nodes.lost(within)).unwrap_or_default()
    }

    /// Handles a Found of a peer: an answer, or an announcement that a node is there, or no longer there.
    ///
    /// If the node is there, returns the process of the server. The caller then calls [`Self::resolve_conflict`] and
    /// [`Self::leave_silent_links`].
    pub fn handle_found(&self, from: &Link, node: &NodeName, found: Found) -> Option<Instance> {
        let others = self.first_others.get()?;
        let server = from.instance?;
        let found = others.peers.handle_found(from, found)?;
        if !found.here {
            others.nodes.doubt(node, Some(server));
            return None;
        }
        others.nodes.insert(node, from, &found);
        self.registry.awaited.wake(node);
        Some(server)
    }
}

#[cfg(test)]
mod tests {
    use tunnel_proto::frame::Remote;

    use super::*;

    fn server(number: usize) -> Instance {
        Instance::from_bits(number as u128)
    }

    impl NodesAtPeers {
        fn insert_at(&self, node: &NodeName, server: Instance) {
            let link = Link::new(LinkId(1), Remote::Peer, Some(server));
            self.insert(node, &link, &Found::not_here(0));
        }
    }

    fn node(server: &str, n: usize) -> NodeName {
        format!("{server}{n}").parse().unwrap()
    }

    #[tokio::test(start_paused = true)]
    async fn a_failed_search_is_cached_for_a_second_or_until_the_node_connects() {
        let (nodes, node) = (NodesAtPeers::default(), "node1".parse().unwrap());
        let missing = NodeNotFound { queried_peers: 3, ..NodeNotFound::default() };
        let comes = |nodes: &NodesAtPeers, node: &NodeName| nodes.insert_at(node, server(1));
        for ends in [comes, NodesAtPeers::remove] {
            nodes.record_failure(&node, &missing);
            assert_eq!(nodes.recent_failure(&node), Some(missing.clone()));
            ends(&nodes, &node);
            assert_eq!(nodes.recent_failure(&node), None);
        }
        for n in 0..MAX_FAILURES + 10 {
            nodes.record_failure(&format!("node{n}").parse().unwrap(), &missing);
        }
        assert_eq!(nodes.failures.lock().len(), MAX_FAILURES);
        tokio::time::advance(FAILURE_TTL).await;
        assert_eq!(nodes.recent_failure(&node), None);
        nodes.record_failure(&node, &missing);
        assert_eq!((nodes.recent_failure(&node), nodes.failures.lock().len()), (Some(missing), 1));
    }

    #[tokio::test(start_paused = true)]
    async fn a_node_is_in_doubt_after_its_own_server_disclaims_it_until_a_server_has_it() {
        let (nodes, node) = (NodesAtPeers::default(), node("node", 1));
        let at = || nodes.get(&node).map(|at| at.server);
        nodes.insert_at(&node, server(1));
        nodes.doubt(&node, Some(server(2)));
        assert_eq!((at(), nodes.last_seen(&node)), (Some(server(1)), None));
        nodes.doubt(&node, Some(server(1)));
        tokio::time::advance(Duration::from_secs(2)).await;
        nodes.doubt(&node, None);
        assert_eq!((at(), nodes.last_seen(&node)), (None, Some(Duration::from_secs(2))));
        nodes.insert_at(&node, server(2));
        assert_eq!((at(), nodes.last_seen(&node)), (Some(server(2)), None));
    }

    #[tokio::test]
    async fn a_server_that_announces_endless_names_evicts_only_its_own() {
        let nodes = NodesAtPeers::default();
        for n in 0..1000 {
            nodes.insert_at(&node("quiet", n), server(1));
        }
        for n in 0..MAX_NODES + 10 {
            nodes.insert_at(&node("loud", n), server(2));
        }
        for n in 1000..2000 {
            nodes.insert_at(&node("quiet", n), server(1));
        }
        let nodes = nodes.nodes.lock();
        assert!(nodes.len() <= MAX_NODES && nodes.len() > MAX_NODES / 2);
        assert_eq!(nodes.values().filter(|at| at.server == server(1)).count(), 2000);
    }
}

#[cfg(test)]
mod announcement_tests {
    use std::sync::Arc;
    use std::task::{Context, Poll, Waker};
    use tunnel_proto::frame::Remote;

    use tokio::sync::watch;

    use crate::registry::LinkedNode;
    use crate::registry::Registry;
    use crate::registry::dns_search::NodeDnsLookup;
    use crate::registry::peers::Peers;
    use crate::registry::peers::tests::{peers, settled};
    use tunnel_base::metrics::Metrics;
    use tunnel_base::policy::zone::NodeZone;
    use tunnel_net::resolver::Resolver;
    use tunnel_proto::state::LinkId;

    use super::*;

    /// Returns the Found frames sent to a server.
    fn sent(link: &Link) -> Vec<Found> {
        let mut cx = Context::from_waker(Waker::noop());
        let mut all = Vec::new();
        while let Poll::Ready(Some(frame)) = link.poll_pull(&mut cx, Instant::now()) {
            if let FrameKind::Found(found) = frame.body {
                all.push(found);
            }
        }
        all
    }

    /// Returns a finder that asks these peers, and a DNS that does not answer.
    fn finder(registry: &Arc<Registry>, peers: &Arc<Peers>) -> Arc<Finder> {
        let resolver = Arc::new(Resolver::of_servers(&[([127, 0, 0, 1], 9).into()]).unwrap());
        let zone = Arc::new(NodeZone::new(String::new(), Vec::new(), |_| true));
        let finder = Finder::without_peers(registry.clone(), Instance::from_bits(1));
        finder.ask(peers, NodeDnsLookup::new(resolver, zone, watch::Sender::default().subscribe()), 1);
        finder
    }

    fn link(id: u64, peer: Remote) -> Arc<Link> {
        Link::new(LinkId(id), peer, Some(Instance::from_bits(id.into())))
    }

    #[tokio::test(start_paused = true)]
    async fn an_answer_for_a_disconnected_node_contains_how_long_ago_it_left() {
        let (peers, _addresses, _made) = peers(&[]);
        let registry = Registry::new(Metrics::server("", ""));
        let finder = finder(&registry, &peers);
        let node: &NodeName = &"node1".parse().unwrap();
        let requester = link(9, Remote::Peer);
        finder.handle_find(&requester, node, 5);
        assert_eq!(sent(&requester), [Found::not_here(5)], "it was never linked");
        let edge = link(7, Remote::Edge(node.clone()));
        let from = ([127, 0, 0, 1], 1).into();
        let linked = LinkedNode { link: edge.clone(), from };
        registry.insert(linked, false);
        registry.remove(&edge);
        tokio::time::advance(Duration::from_secs(2)).await;
        finder.handle_find(&requester, node, 6);
        assert_eq!(sent(&requester), [Found { silence: Duration::from_secs(2), ..Found::not_here(6) }]);
    }

    #[tokio::test(start_paused = true)]
    async fn an_announcement_is_valid_until_it_is_withdrawn_or_its_links_end() {
        let (peers, _addresses, _made) = peers(&[]);
        let registry = Registry::new(Metrics::server("", ""));
        let finder = finder(&registry, &peers);
        let node: &NodeName = &"node1".parse().unwrap();
        let links @ [first, second] = &[7, 8].map(|id| link(id, Remote::Peer));
        links.iter().for_each(|link| drop(peers.add_incoming(link, false)));
        settled().await;
        let receive = |from: &Arc<Link>, found| finder.handle_found(from, node, found);
        let here = Found { here: true, instance: Some(Instance::from_bits(77)), ..Found::not_here(0) };
        assert_eq!(receive(first, here.clone()), first.instance);
        assert_eq!(finder.oldest_link(), Some((node.clone(), false)));
        assert_eq!(receive(second, Found::not_here(0)), None);
        assert!(finder.knows(node), "only the server that has it can report it as disconnected");
        receive(first, Found::not_here(0));
        assert!(!finder.knows(node) && finder.oldest_link().is_none(), "it has disconnected");
        receive(first, here.clone());
        assert_eq!(receive(second, here.clone()), second.instance, "it has moved");
        receive(first, Found::not_here(0));
        assert!(finder.oldest_link().is_some());
        let backup = Link::new(LinkId(9), Remote::Peer, second.instance);
        peers.add_incoming(&backup, false);
        second.close();
        assert!(finder.oldest_link().is_none(), "its server is not linked");
        tokio::time::advance(Duration::from_millis(1)).await;
        let again = Link::new(LinkId(9), Remote::Peer, second.instance);
        peers.add_incoming(&again, false);
        settled().await;
        assert!(
            !finder.knows(node) && finder.oldest_link().is_none(),
            "the server has not announced it over the new link"
        );
        receive(&again, here.clone());
        assert!(finder.oldest_link().is_some());
        // A newer link of a server that was linked all the time changes nothing.
        tokio::time::advance(Duration::from_millis(1)).await;
        let newer = Link::new(LinkId(10), Remote::Peer, second.instance);
        peers.add_incoming(&newer, true);
        assert!(finder.knows(node));
    }

    #[tokio::test(start_paused = true)]
    async fn a_node_that_had_moved_is_lost_with_its_last_server() {
        let (peers, _addresses, _made) = peers(&[]);
        let registry = Registry::new(Metrics::server("", ""));
        let finder = finder(&registry, &peers);
        let node: &NodeName = &"node1".parse().unwrap();
        let edge = link(7, Remote::Edge(node.clone()));
        registry.insert(LinkedNode { link: edge.clone(), from: ([127, 0, 0, 1], 1).into() }, false);
        let server = link(8, Remote::Peer);
        peers.add_incoming(&server, false);
        finder.handle_found(&server, node, Found { here: true, ..Found::not_here(0) });
        registry.ended(&edge, "end of stream");
        let lost = |registry: &Registry| finder.last_loss(registry.lost().pop().unwrap());
        let moved = lost(&registry);
        assert_eq!(&*moved.error.unwrap().why, "end of stream");
        tokio::time::advance(Duration::from_secs(400)).await;
        server.close();
        finder.peer_link_ended(&server);
        let loss = lost(&registry);
        assert_eq!(
            (&*loss.error.unwrap().why, loss.at - moved.at),
            ("its server was lost", Duration::from_secs(400))
        );
        // Only announced there, and no longer, it is no node without a history.
        let absent =
            UnlinkedNode { node: node.clone(), at: Instant::now(), error: None, why: WhyUnlinked::Absent };
        assert_eq!(finder.last_loss(absent).why, WhyUnlinked::Lost);
    }
}
