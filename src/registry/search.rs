//! One search for a node: all peers, and DNS, are asked at the same time.

use std::collections::{HashMap, HashSet};
use std::net::IpAddr;
use std::pin::pin;
use std::sync::Arc;
use std::time::Duration;

use arc_swap::ArcSwapOption;
use futures_util::FutureExt as _;
use futures_util::future::{BoxFuture, FusedFuture as _, WeakShared};
use futures_util::stream::{FuturesUnordered, StreamExt as _};
use parking_lot::Mutex;
use tokio::time::{Instant, sleep_until};

use crate::paths::Path;
use crate::paths::node_not_found::{NodeNotFound, PeerError};
use crate::registry::dns_search::NodeDnsLookup;
use crate::registry::nodes_at_peers::NodesAtPeers;
use crate::registry::peers::{PeerAnswer, PeerHandle, Peers};
use tunnel_link::link::Link;
use tunnel_proto::frame::{Found, Remote};
use tunnel_proto::names::{Instance, NodeName};
use tunnel_proto::state::LinkId;

/// The node that a search looks for, with its restrictions.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub(crate) struct NodeSearchCriteria {
    pub(crate) node: NodeName,
    /// The only process of the node that is accepted, if any.
    instance: Option<Instance>,
    /// The link that must not be used.
    exclude_link: Option<LinkId>,
    /// The process of the server at that link's remote end, which must not be used over any other link either.
    exclude_server: Option<Instance>,
}

impl NodeSearchCriteria {
    pub(crate) fn new(node: &NodeName, instance: Option<Instance>, not: Option<&Link>) -> Self {
        let exclude_server = not.filter(|not| not.peer == Remote::Peer).and_then(|not| not.instance);
        Self { node: node.clone(), instance, exclude_link: not.map(|not| not.id), exclude_server }
    }

    /// Returns true if any process of the node is accepted, by any link.
    pub(crate) fn is_any(&self) -> bool {
        self.instance.is_none() && self.exclude_link.is_none()
    }

    /// Returns true if `instance` is the requested process.
    pub(crate) fn is_of(&self, instance: Option<Instance>) -> bool {
        self.instance.is_none() || self.instance == instance
    }

    /// Returns true if that link, which leads to that process of the node, may be used.
    pub(crate) fn accepts(&self, instance: Option<Instance>, link: &Link) -> bool {
        let is_excluded = self.exclude_link == Some(link.id)
            || link.peer == Remote::Peer
                && self.exclude_server.is_some()
                && self.exclude_server == link.instance;
        self.is_of(instance) && !is_excluded
    }
}

/// What a server with peers needs to find nodes elsewhere, and the searches in progress. A request for the same node
/// joins the running search, so that a thousand sessions of one node ask the peers once.
///
/// A search runs while it has waiters. The table holds weak handles, the waiters strong ones, and the last waiter to
/// leave removes the entry. A new request may arrive between the drop of the last strong handle and that removal. It
/// then finds a dead handle, starts its own search and replaces the handle. The leaving waiter therefore checks again,
/// under the lock, that the entry is still dead.
#[derive(Debug)]
pub(crate) struct PeerSearch {
    pub(crate) peers: Arc<Peers>,
    pub(super) nodes: NodesAtPeers,
    /// The client of the DNS servers that are asked; `None` while the config requires no search.
    pub(super) dns: ArcSwapOption<NodeDnsLookup>,
    /// Port of peers, for those found by DNS.
    port: u16,
    running: Mutex<HashMap<NodeSearchCriteria, WeakShared<RunningSearch>>>,
}

type RunningSearch = BoxFuture<'static, Result<Path, NodeNotFound>>;

impl PeerSearch {
    /// Returns a search that begins once it has a DNS.
    pub(crate) fn new(peers: Arc<Peers>, port: u16) -> Arc<Self> {
        let dns = ArcSwapOption::empty();
        Arc::new(Self { peers, nodes: NodesAtPeers::default(), dns, port, running: Mutex::default() })
    }

    /// Starts a search or joins the running one. Takes about 2 s at most. Cancel safe.
    pub(crate) async fn join(self: &Arc<Self>, query: NodeSearchCriteria) -> Result<Path, NodeNotFound> {
        // Dropped after the search, so that the last waiter finds no handle of it.
        let _waiter = SearchWaiter { running: &self.running, query: query.clone() };
        let search = {
            let mut running = self.running.lock();
            let joined = running.get(&query).and_then(WeakShared::upgrade);
            joined.unwrap_or_else(|| {
                let search = self.clone().search(query.clone()).boxed().shared();
                running.extend(search.downgrade().map(|weak| (query.clone(), weak)));
                search
            })
        };
        search.await
    }

    /// Asks all peers, and the servers that DNS names.
    async fn search(self: Arc<Self>, query: NodeSearchCriteria) -> Result<Path, NodeNotFound> {
        let started = Instant::now();
        let mut until = started + SEARCH_TIMEOUT;
        let Some(dns) = self.dns.load_full() else { return Err(NodeNotFound::default()) };
        let mut lookup = pin!(dns.lookup(&query.node).fuse());
        let mut queries = PeerQueries::new(&self.peers, &query);
        queries.ask(self.peers.all());
        let mut best = None::<(Arc<Link>, Found)>;
        while !lookup.is_terminated() || !queries.answers.is_empty() {
            tokio::select! {
                addresses = &mut lookup => match addresses {
                    Ok(addresses) => queries.ask(self.servers_at(&addresses)),
                    Err(why) => queries.missing.dns = Some(why),
                },
                Some(answer) = queries.answers.next() => {
                    let Some((link, found)) = queries.take(answer) else { continue };
                    let silence = found.silence;
                    if best.as_ref().is_none_or(|(_, best)| silence < best.silence) {
                        best = Some((link, found));
                    }
                    if silence <= FRESH_ANSWER_AGE {
                        break;
                    }
                    until = started + ANSWER_COMPARE_TIME;
                }
                () = sleep_until(until) => break,
            }
        }
        let (link, found) = best.ok_or(queries.missing)?;
        self.nodes.insert(&query.node, &link, &found);
        Ok(Path { link, instance: found.instance })
    }

    /// Returns the peers at addresses that DNS returned.
    fn servers_at(&self, addresses: &[IpAddr]) -> Vec<PeerHandle> {
        addresses.iter().take(MAX_NAMED).flat_map(|ip| self.peers.at(*ip, self.port)).collect()
    }
}

/// A waiter of a search. The last one to leave removes the search from the table.
struct SearchWaiter<'a> {
    running: &'a Mutex<HashMap<NodeSearchCriteria, WeakShared<RunningSearch>>>,
    query: NodeSearchCriteria,
}

impl Drop for SearchWaiter<'_> {
    fn drop(&mut self) {
        let mut running = self.running.lock();
        if running.get(&self.query).is_some_and(|search| search.upgrade().is_none()) {
            running.remove(&self.query);
        }
    }
}

/// A server that has received something from the node within this time certainly has the node.
const FRESH_ANSWER_AGE: Duration = Duration::from_secs(7);
/// If no answer is that fresh, the search takes the freshest one after this time.
const ANSWER_COMPARE_TIME: Duration = Duration::from_millis(300);
/// Maximum duration of a search: DNS may take 1 s, and dialling a server another.
const SEARCH_TIMEOUT: Duration = Duration::from_secs(2);
/// Maximum number of addresses from DNS that are asked per node.
const MAX_NAMED: usize = 8;

/// The peers that one search has asked, and their answers.
struct PeerQueries<'a> {
    peers: &'a Arc<Peers>,
    query: &'a NodeSearchCriteria,
    queried: Vec<PeerHandle>,
    answers: FuturesUnordered<BoxFuture<'static, PeerAnswer>>,
    /// The combined answers of the peers that do not have the node.
    missing: NodeNotFound,
    /// The processes of these peers. One may be asked by its address and over its own link, but is only counted once.
    without: HashSet<Option<Instance>>,
}

impl<'a> PeerQueries<'a> {
    fn new(peers: &'a Arc<Peers>, query: &'a NodeSearchCriteria) -> Self {
        Self {
            peers,
            query,
            queried: Vec::new(),
            answers: FuturesUnordered::new(),
            missing: NodeNotFound::default(),
            without: HashSet::new(),
        }
    }

    /// Asks those of these peers that were not asked yet.
    fn ask(&mut self, peers: Vec<PeerHandle>) {
        for peer in peers {
            if self.queried.iter().any(|known| known.is(&peer)) {
                continue;
            }
            self.queried.push(peer.clone());
            let peers = self.peers.clone();
            let node = self.query.node.clone();
            self.answers.push(async move { peers.ask(&peer, &node).await }.boxed());
        }
    }

    /// Handles an answer. Returns it if it leads to the node.
    fn take(&mut self, answer: PeerAnswer) -> Option<(Arc<Link>, Found)> {
        match answer {
            Ok((link, found)) if found.here => {
                self.missing.another |= !self.query.is_of(found.instance);
                return self.query.accepts(found.instance, &link).then_some((link, found));
            }
            Ok((link, found)) => {
                let seen = Some(found.silence).filter(|silence| !silence.is_zero());
                self.missing.seen = self.missing.seen.into_iter().chain(seen).min();
                self.without.insert(link.instance);
                self.missing.queried_peers = self.without.len();
            }
            Err(PeerError::SelfDial(_)) => {}
            Err(trouble) => self.missing.trouble.push(trouble),
        }
        None
    }
}

#[cfg(test)]
mod tests {
    use std::task::{Context, Poll, Waker};

    use crate::registry::peers::tests::peers;
    use tunnel_base::policy::zone::NodeZone;
    use tunnel_net::resolver::Resolver;
    use tunnel_proto::frame::{Found, FrameKind};

    use super::*;
    use tokio::sync::watch;

    /// Returns the number of the question for a node that is queued on a link.
    fn question(link: &Link) -> Option<u64> {
        let mut cx = Context::from_waker(Waker::noop());
        while let Poll::Ready(Some(frame)) = link.poll_pull(&mut cx, Instant::now()) {
            if let FrameKind::Find(question) = frame.body {
                return Some(question);
            }
        }
        None
    }

    fn link(id: u64, server: u64) -> Arc<Link> {
        Link::new(LinkId(id), Remote::Peer, Some(Instance::from_bits(server.into())))
    }

    /// Returns a search without known nodes and with a DNS that does not answer.
    fn peer_search(peers: &Arc<Peers>) -> Arc<PeerSearch> {
        let resolver = Resolver::of_servers(&[([127, 0, 0, 1], 9).into()]).unwrap();
        let zone = NodeZone::new("nodes.test".into(), Vec::new(), |_| false);
        let none = watch::Sender::default().subscribe();
        let search = PeerSearch::new(peers.clone(), 1);
        search.dns.store(Some(Arc::new(NodeDnsLookup::new(Arc::new(resolver), Arc::new(zone), none))));
        search
    }

    /// Runs a search while servers answer with `answer`; `None` gives no answer. Returns the result and the links
    /// asked.
    async fn search_with(
        searches: &Arc<PeerSearch>,
        links: &[Arc<Link>],
        answer: impl Fn(&Link, Found) -> Option<Found>,
    ) -> (Result<Path, NodeNotFound>, Vec<u64>) {
        let mut queried_peers = Vec::new();
        let answers = async {
            loop {
                for link in links {
                    if let Some(question) = question(link) {
                        queried_peers.push(link.id.0);
                        if let Some(found) = answer(link, Found::not_here(question)) {
                            searches.peers.handle_found(link, found);
                        }
                    }
                }
                tokio::time::sleep(Duration::from_millis(1)).await;
            }
        };
        let node = "node1".parse().unwrap();
        let found = tokio::select! {
            found = searches.clone().search(NodeSearchCriteria::new(&node, None, None)) => found,
            () = answers => unreachable!(),
        };
        (found, queried_peers)
    }

    #[tokio::test(start_paused = true)]
    async fn a_node_is_found_at_once_if_all_other_peers_are_silent() {
        let (peers, _addresses, _made) = peers(&[]);
        let servers: Vec<_> = (10..20).map(|id| link(id, id)).collect();
        for server in &servers {
            peers.add_incoming(server, false);
        }
        let (searches, started) = (peer_search(&peers), Instant::now());
        let answer = |link: &Link, away| (link.id.0 == 15).then_some(Found { here: true, ..away });
        let (found, queried_peers) = search_with(&searches, &servers, answer).await;
        assert_eq!((found.unwrap().link.id.0, queried_peers.len()), (15, 10));
        assert!(started.elapsed() < Duration::from_millis(50), "{:?}", started.elapsed());
        assert_eq!(searches.nodes.get(&"node1".parse().unwrap()).unwrap().server, Instance::from_bits(15));
    }

    #[tokio::test]
    async fn a_peer_queried_over_two_links_counts_once_as_not_having_the_node() {
        let (peers, _tell, _made) = peers(&[]);
        let links = [link(1, 7), link(2, 7), link(3, 8)];
        let query = NodeSearchCriteria::new(&"node1".parse().unwrap(), None, None);
        let mut queries = PeerQueries::new(&peers, &query);
        for link in links {
            queries.take(Ok((link, Found::not_here(1))));
        }
        assert_eq!(queries.missing.queried_peers, 2);
    }
}
