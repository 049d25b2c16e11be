//! One search for a node at peers: its location replicas are asked first, then DNS, then all peers.

use std::collections::{BTreeSet, HashMap};
use std::net::IpAddr;
use std::pin::pin;
use std::sync::Arc;
use std::time::Duration;

use futures_util::FutureExt as _;
use futures_util::future::{BoxFuture, Fuse, FusedFuture as _, Shared, WeakShared};
use futures_util::stream::{FuturesUnordered, StreamExt as _};
use parking_lot::Mutex;
use tokio::sync::watch;
use tokio::time::{Instant, sleep_until, timeout};

use crate::registry::NodeNotFound;
use crate::registry::location_cache::LocationCache;
use crate::registry::peers::peer::PeerError;
use crate::registry::peers::{FindAnswer, NodeLocationAnswer, PeerHandle, Peers};
use tunnel_base::names::{Instance, NodeName};
use tunnel_base::policy::zone::Zone;
use tunnel_link::sender::LinkSender;
use tunnel_net::resolver::{Lookup, LookupError};
use tunnel_proto::frame::Remote;
use tunnel_proto::state::LinkId;

/// The node that a search looks for, with its restrictions.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub(crate) struct NodeQuery {
    pub(crate) node: NodeName,
    /// The only process of the node that is accepted, if any.
    instance: Option<Instance>,
    /// The link that must not be used.
    exclude_link: Option<LinkId>,
    /// The process of the server at that link's remote end, which must not be used over any other link either.
    not_server: Option<Instance>,
}

/// The searches in progress. A request for the same node joins the running search, so that a thousand sessions of one
/// node ask the peers once.
///
/// A search runs while it has waiters. The table holds weak handles, the waiters strong ones, and the last waiter to
/// leave removes the entry. A new request may arrive between the drop of the last strong handle and that removal. It
/// then finds a dead handle, starts its own search and replaces the handle. The leaving waiter therefore checks again,
/// under the lock, that the entry is still dead.
#[derive(Debug)]
pub(crate) struct Searches {
    means: SearchContext,
    running: Mutex<HashMap<NodeQuery, WeakShared<RunningSearches>>>,
}

/// The parts of a server that its searches for nodes use.
#[derive(Debug, Clone)]
pub(crate) struct SearchContext {
    peers: Arc<Peers>,
    known: Arc<LocationCache>,
    dns: Arc<Dns>,
    /// Port of peers, for those found by DNS.
    port: u16,
}

type SearchResult = Result<NodeLocationAnswer, NodeNotFound>;
type RunningSearches = BoxFuture<'static, SearchResult>;

impl NodeQuery {
    pub(crate) fn new(node: &NodeName, instance: Option<Instance>, not: Option<&LinkSender>) -> Self {
        let not_server = not.filter(|not| not.peer == Remote::Peer).and_then(|not| not.instance);
        Self { node: node.clone(), instance, exclude_link: not.map(|not| not.id), not_server }
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
    pub(crate) fn accepts(&self, instance: Option<Instance>, sender: &LinkSender) -> bool {
        let is_not = self.exclude_link == Some(sender.id)
            || sender.peer == Remote::Peer && self.not_server.is_some() && self.not_server == sender.instance;
        self.is_of(instance) && !is_not
    }
}

impl SearchContext {
    fn learn(&self, node: &NodeName, yes: &NodeLocationAnswer) {
        self.known.insert(node, yes.server.clone(), yes.instance, self.peers.replicated_here()(node));
        self.known.claim(node, yes.ips.clone());
    }
}

impl Searches {
    pub(crate) fn new(peers: Arc<Peers>, known: Arc<LocationCache>, dns: Dns, port: u16) -> Self {
        Self { means: SearchContext { peers, known, dns: Arc::new(dns), port }, running: Mutex::default() }
    }

    /// Starts a search or joins the running one. Takes about 2 s at most. Cancel safe.
    pub(crate) async fn join(&self, wanted: NodeQuery) -> SearchResult {
        let search = {
            let mut running = self.running.lock();
            let known = running.get(&wanted).and_then(WeakShared::upgrade);
            known.unwrap_or_else(|| {
                let search = search(self.means.clone(), wanted.clone()).boxed().shared();
                running.extend(search.downgrade().map(|weak| (wanted.clone(), weak)));
                search
            })
        };
        let mut joined = SearchWaiter { searches: self, wanted, search: Some(search) };
        match &mut joined.search {
            Some(search) => search.await,
            None => Err(NodeNotFound::default()),
        }
    }
}

/// A waiter of a search. The last one to leave removes the search from the table.
struct SearchWaiter<'a> {
    searches: &'a Searches,
    wanted: NodeQuery,
    search: Option<Shared<RunningSearches>>,
}

impl Drop for SearchWaiter<'_> {
    fn drop(&mut self) {
        drop(self.search.take());
        let mut running = self.searches.running.lock();
        if running.get(&self.wanted).is_some_and(|search| search.upgrade().is_none()) {
            running.remove(&self.wanted);
        }
    }
}

/// Asks the servers that are likeliest to know, then DNS, then all peers. Each stage starts once the one before has
/// timed out or was answered negatively.
async fn search(means: SearchContext, wanted: NodeQuery) -> SearchResult {
    let started = Instant::now();
    let (dns, node) = (means.dns.clone(), wanted.node.clone());
    let mut lookup = pin!(Fuse::terminated());
    let mut asking = PeerQueries::new(&means, &wanted);
    let mut best = None::<NodeLocationAnswer>;
    // The last known server is asked at once, because it is the likeliest to have the node. Usually the link to it was
    // only closed for lack of use, or has just ended.
    let last = means.known.last_server(&wanted.node).and_then(|server| means.peers.current(server));
    asking.ask(last.into_iter().collect());
    asking.ask_replicas();
    let (mut stage, mut until) = (SearchStage::Homes, started + HOMES_FIRST);
    loop {
        let idle = lookup.is_terminated() && asking.answers.is_empty();
        match stage {
            SearchStage::All if idle => break,
            SearchStage::Homes if idle || Instant::now() >= until => {
                let (dns, node) = (dns.clone(), node.clone());
                let slow = if dns.has_failed_lately() { Duration::ZERO } else { SLOW };
                lookup.set(async move { dns.lookup(&node).await }.fuse());
                (stage, until) = (SearchStage::Dns, Instant::now() + slow);
            }
            SearchStage::Dns if idle || Instant::now() >= until => {
                stage = SearchStage::All;
                asking.ask_all();
                continue;
            }
            _ => {}
        }
        if let SearchStage::All = stage {
            until = started + if best.is_some() { FRESHEST_WITHIN } else { SEARCH_TIMEOUT };
        }
        tokio::select! {
            found = &mut lookup => match found {
                Ok(addresses) => asking.ask(named(&means, addresses)),
                Err(why) => asking.said.dns = Some(why),
            },
            Some(answer) = asking.answers.next() => {
                if asking.follow_referral(&answer) {
                    until = until.max(Instant::now() + HOMES_FIRST).min(started + MAX_HOMES_FIRST);
                }
                if let Some(yes) = asking.take(answer) {
                    let fresh = yes.silence <= FRESH_ENOUGH;
                    if best.as_ref().is_none_or(|best| yes.silence < best.silence) {
                        best = Some(yes);
                    }
                    if fresh {
                        break;
                    }
                }
            }
            () = sleep_until(until) => if let SearchStage::All = stage { break },
        }
    }
    let yes = best.ok_or(asking.said)?;
    means.learn(&wanted.node, &yes);
    Ok(yes)
}

/// The stages of a search, by the parties asked so far.
#[derive(Clone, Copy)]
enum SearchStage {
    Homes,
    Dns,
    All,
}

/// Returns the peers at the addresses that DNS returned.
fn named(means: &SearchContext, addresses: Vec<IpAddr>) -> Vec<PeerHandle> {
    let first = addresses.into_iter().take(MAX_NAMED);
    first.flat_map(|ip| means.peers.at(ip, means.port)).collect()
}

/// Time for location replicas, and for each server that they refer to, to answer before others are asked.
const HOMES_FIRST: Duration = Duration::from_millis(100);
/// Maximum of that time in total, regardless of the number of referrals.
const MAX_HOMES_FIRST: Duration = Duration::from_millis(300);
/// A server that has received something from the node within this time certainly has the node.
const FRESH_ENOUGH: Duration = Duration::from_secs(7);
/// If no answer is that fresh, the search takes the freshest one after this time.
const FRESHEST_WITHIN: Duration = Duration::from_millis(300);
/// Maximum duration of a search: DNS may take 1 s, and dialling a server another.
const SEARCH_TIMEOUT: Duration = Duration::from_secs(2);
/// Maximum number of addresses from DNS that are asked per node.
const MAX_NAMED: usize = 8;

// The peers that one search has asked, and their answers.

/// The peers that were asked, and the pending answers.
pub(crate) struct PeerQueries<'a> {
    means: &'a SearchContext,
    wanted: &'a NodeQuery,
    asked: Vec<PeerHandle>,
    pub(crate) answers: FuturesUnordered<BoxFuture<'static, Answered>>,
    /// The combined answers of the peers that do not have the node.
    pub(crate) said: NodeNotFound,
    /// The peers that gave such an answer.
    without: Vec<Option<Instance>>,
    /// The location replicas that have not yet given an authoritative answer that the node is connected nowhere. `None`
    /// if others must be asked even when all replicas have.
    silent_homes: Option<Vec<Instance>>,
}

pub(crate) type Answered = Result<FindAnswer, PeerError>;

impl<'a> PeerQueries<'a> {
    pub(crate) fn new(means: &'a SearchContext, wanted: &'a NodeQuery) -> Self {
        let (asked, answers, without) = (Vec::new(), FuturesUnordered::new(), Vec::new());
        Self { means, wanted, asked, answers, said: NodeNotFound::default(), without, silent_homes: None }
    }

    /// Asks those of these peers that can be reached and were not asked yet.
    pub(crate) fn ask(&mut self, servers: Vec<PeerHandle>) {
        for server in servers {
            if server.is_gone() || self.asked.iter().any(|asked| asked.is(&server)) {
                continue;
            }
            self.asked.push(server.clone());
            let (peers, node) = (self.means.peers.clone(), self.wanted.node.clone());
            self.answers.push(async move { peers.ask(&server, &node).await }.boxed());
        }
    }

    /// Asks the location replicas of the node.
    pub(crate) fn ask_replicas(&mut self) {
        let homes = self.means.peers.replicas_of(&self.wanted.node);
        // Servers only agree on the replicas if the members have not changed for long enough.
        let agreed = self.means.peers.has_converged();
        self.silent_homes = agreed.then(|| homes.iter().filter_map(PeerHandle::process).collect());
        self.ask(homes);
    }

    /// Asks all peers, unless the authoritative answers of all location replicas already cover them.
    pub(crate) fn ask_all(&mut self) {
        match &self.silent_homes {
            Some(silent) if silent.is_empty() => {
                self.said.asked = self.said.asked.max(self.means.peers.other_members());
            }
            _ => self.ask(self.means.peers.all()),
        }
    }

    /// Asks the server that an answer refers to, unless it was already asked. Returns true if it was asked now.
    pub(crate) fn follow_referral(&mut self, answer: &Answered) -> bool {
        let at = answer.as_ref().ok().and_then(|answer| answer.at);
        let Some(server) = at.and_then(|at| self.means.peers.of_process(at)) else { return false };
        let before = self.asked.len();
        self.ask(vec![server]);
        self.asked.len() > before
    }

    /// Handles an answer. Returns the location of the node if it is acceptable.
    pub(crate) fn take(&mut self, answer: Answered) -> Option<NodeLocationAnswer> {
        match answer {
            Ok(FindAnswer { yes: Some(yes), .. }) if self.wanted.accepts(yes.instance, &yes.sender) => {
                return Some(yes);
            }
            Ok(FindAnswer { yes: Some(yes), .. }) => self.said.another |= !self.wanted.is_of(yes.instance),
            Ok(FindAnswer { server, authoritative, seen, .. }) => {
                self.said.seen = self.said.seen.into_iter().chain(seen).min();
                if let Some(homes) = self.silent_homes.as_mut().filter(|_| authoritative) {
                    homes.retain(|home| Some(*home) != server);
                }
                // A peer may be asked twice, by its address and over its incoming link, but is only counted once.
                if server.is_none() || !self.without.contains(&server) {
                    self.without.push(server);
                    self.said.asked += 1;
                }
            }
            Err(PeerError::SelfDial(_)) => {}
            Err(trouble) => self.said.trouble.push(trouble),
        }
        None
    }
}

// Looking a node up in DNS: its records are the servers that it is linked to, as published by one of them.

/// A DNS client for nodes that remembers whether DNS has failed recently.
#[derive(Debug)]
pub struct Dns {
    resolver: Arc<dyn Lookup>,
    /// Defines which nodes are looked up, and under which name.
    zone: Arc<Zone>,
    /// Addresses in the records of nodes that do not belong to any server.
    no_servers: Option<watch::Receiver<BTreeSet<IpAddr>>>,
    /// Time of the last failed query.
    failed: Mutex<Option<Instant>>,
}

impl Dns {
    /// Returns a client that asks `resolver` only for nodes that have names in `zone`, because the results are dialled.
    pub fn new(resolver: Arc<dyn Lookup>, zone: Arc<Zone>) -> Self {
        Self { resolver, zone, no_servers: None, failed: Mutex::default() }
    }

    /// Excludes these addresses: nodes' records contain them for other clients of the same DNS.
    pub fn excluding(self, no_servers: watch::Receiver<BTreeSet<IpAddr>>) -> Self {
        Self { no_servers: Some(no_servers), ..self }
    }

    /// Returns the addresses of the servers that a node is linked to by its records; at least one. Takes at most 1 s.
    /// Cancel safe.
    ///
    /// # Errors
    ///
    /// DNS has no addresses for it or does not answer; the text gives the cause.
    pub async fn lookup(&self, node: &NodeName) -> Result<Vec<IpAddr>, String> {
        let name = self.zone.name(node).map_err(|why| format!("DNS was not queried ({why})"))?;
        let name = if self.zone.is_open() { name } else { format!("{name}.") };
        let mut asking = DnsQuery { dns: self, since: Instant::now(), answered: None };
        let found = timeout(LOOKUP_TIMEOUT, self.resolver.addresses(&name)).await;
        let found = found.unwrap_or(Err(LookupError::Timeout { name, timeout: LOOKUP_TIMEOUT }));
        asking.answered = Some(matches!(found, Ok(_) | Err(LookupError::NotFound(_))));
        let mut found = found.map_err(|cause| match cause {
            LookupError::NotFound(_) => "not in DNS".to_owned(),
            cause => cause.to_string(),
        })?;
        if let Some(no_servers) = &self.no_servers {
            let no_servers = no_servers.borrow();
            found.retain(|ip| !no_servers.contains(ip));
        }
        if found.is_empty() { Err("its DNS records name no server".to_owned()) } else { Ok(found) }
    }

    /// Returns true if DNS has recently failed, so that no search should wait for it.
    pub fn has_failed_lately(&self) -> bool {
        self.failed.lock().is_some_and(|at| at.elapsed() < FAILURE_TTL)
    }
}

/// One query. If it is dropped because another source was quicker, its duration still shows whether DNS is slow.
struct DnsQuery<'a> {
    dns: &'a Dns,
    since: Instant,
    answered: Option<bool>,
}

impl Drop for DnsQuery<'_> {
    fn drop(&mut self) {
        let failed = match self.answered {
            Some(answered) => !answered,
            None if self.since.elapsed() >= SLOW => true,
            None => return,
        };
        *self.dns.failed.lock() = failed.then(Instant::now);
    }
}

/// Timeout of a whole lookup; peers know the node's location as well, so nothing waits longer.
const LOOKUP_TIMEOUT: Duration = Duration::from_secs(1);
/// If DNS has not answered within this time, peers are asked as well.
pub(crate) const SLOW: Duration = Duration::from_millis(50);
/// How long a failure counts: DNS is still queried, but peers are asked at the same time.
const FAILURE_TTL: Duration = Duration::from_secs(10);

#[cfg(test)]
mod tests {
    use std::task::{Context, Poll, Waker};

    use crate::registry::peers::tests::peers;
    use tunnel_base::policy::zone::Zone;
    use tunnel_net::resolver::Resolver;
    use tunnel_proto::frame::{Found, FrameKind};

    use super::*;

    /// Returns the number of the question for a node that is queued on a link.
    fn question(link: &LinkSender) -> Option<u64> {
        let mut cx = Context::from_waker(Waker::noop());
        while let Poll::Ready(Some(frame)) = link.poll_pull(&mut cx, Instant::now()) {
            if let FrameKind::Find(question) = frame.body {
                return Some(question);
            }
        }
        None
    }

    fn link(id: u64, server: u64) -> Arc<LinkSender> {
        LinkSender::new(LinkId(id), Remote::Peer, Some(Instance::from_bits(server.into())))
    }

    /// Returns a context with an empty cache and a DNS that does not answer.
    fn means(peers: &Arc<Peers>) -> SearchContext {
        let resolver = Resolver::of_servers(&[([127, 0, 0, 1], 9).into()]).unwrap();
        let zone = Zone::new("nodes.test".into(), Vec::new(), |_| false);
        let dns = Arc::new(Dns::new(Arc::new(resolver), Arc::new(zone)));
        SearchContext { peers: peers.clone(), known: Arc::default(), dns, port: 1 }
    }

    /// Runs a search while servers answer with `answer`; `None` gives no answer. Returns the result and the links
    /// asked.
    async fn search_with(
        means: &SearchContext,
        links: &[Arc<LinkSender>],
        answer: impl Fn(&LinkSender, Found) -> Option<Found>,
    ) -> (SearchResult, Vec<u64>) {
        let mut asked = Vec::new();
        let answers = async {
            loop {
                for link in links {
                    if let Some(question) = question(link) {
                        asked.push(link.id.0);
                        if let Some(found) = answer(link, Found::not_here(question)) {
                            means.peers.on_found(link, found);
                        }
                    }
                }
                tokio::time::sleep(Duration::from_millis(1)).await;
            }
        };
        let node = "node1".parse().unwrap();
        let found = tokio::select! {
            found = search(means.clone(), NodeQuery::new(&node, None, None)) => found,
            () = answers => unreachable!(),
        };
        (found, asked)
    }

    /// Returns ten servers that have been linked long enough to agree on the location replicas.
    async fn converged() -> (SearchContext, Vec<Arc<LinkSender>>) {
        let (peers, _addresses, _made) = peers(&[]);
        let servers: Vec<_> = (10..20).map(|id| link(id, id)).collect();
        for server in &servers {
            peers.add_incoming(server, false);
        }
        tokio::time::sleep(Duration::from_secs(32)).await;
        (means(&peers), servers)
    }

    fn is_home(means: &SearchContext, link: &LinkSender) -> bool {
        let homes = means.peers.replicas_of(&"node1".parse().unwrap());
        homes.iter().any(|home| home.process() == link.instance)
    }

    #[tokio::test(start_paused = true)]
    async fn a_node_of_which_all_its_homes_know_nothing_is_nowhere_and_no_other_server_speaks_for_them() {
        let (means, servers) = converged().await;
        let homes = servers.iter().filter(|server| is_home(&means, server)).count();
        let all = |_: &LinkSender, away| Some(Found { authoritative: true, ..away });
        let (found, asked) = search_with(&means, &servers, all).await;
        assert_eq!((found.unwrap_err().asked, asked.len()), (10, homes), "{asked:?}");
        // One replica is not sure, and servers that are no replicas claim authority.
        let first = servers.iter().find(|server| is_home(&means, server)).unwrap().id;
        let but_one = |link: &LinkSender, away| Some(Found { authoritative: link.id != first, ..away });
        let (found, asked) = search_with(&means, &servers, but_one).await;
        assert_eq!((found.unwrap_err().asked, asked.len()), (10, 10), "{asked:?}");
    }

    #[tokio::test(start_paused = true)]
    async fn a_node_is_found_though_its_homes_say_nothing_or_refer_to_servers_that_have_it_not() {
        let (means, servers) = converged().await;
        let right = servers.iter().rfind(|server| !is_home(&means, server)).unwrap();
        let (started, has) = (Instant::now(), |link: &LinkSender| link.id == right.id);
        let silent = |link: &LinkSender, away: Found| match (has(link), is_home(&means, link)) {
            (true, _) => Some(Found { here: true, ..away }),
            (_, true) => None,
            _ => Some(away),
        };
        let (found, _) = search_with(&means, &servers, silent).await;
        assert_eq!(found.unwrap().sender.id, right.id);
        assert!(started.elapsed() < Duration::from_millis(200), "{:?}", started.elapsed());
        // Each server refers to the next one.
        let started = Instant::now();
        let next = |link: &LinkSender| {
            let after =
                servers.iter().map(|server| server.id.0).filter(|id| *id > link.id.0 && *id != right.id.0);
            Some(Instance::from_bits(after.min().unwrap_or(99).into()))
        };
        let refer = |link: &LinkSender, away: Found| match has(link) {
            true => Some(Found { here: true, ..away }),
            false => Some(Found { at: next(link), ..away }),
        };
        let (found, asked) = search_with(&means, &servers, refer).await;
        assert_eq!(found.unwrap().sender.id, right.id);
        assert!(asked.len() <= servers.len(), "each is asked once: {asked:?}");
        assert!(started.elapsed() < Duration::from_millis(500), "{:?}", started.elapsed());
    }

    #[tokio::test]
    async fn a_server_that_is_asked_over_two_links_says_once_that_the_node_is_not_there() {
        let (peers, _tell, _made) = peers(&[]);
        // The server had the node over the earlier link and has made another link since.
        let links = [link(1, 7), link(2, 7), link(3, 8)];
        let means = means(&peers);
        means.known.insert(&"node1".parse().unwrap(), peers.peer_of(&links[0]), None, false);
        for link in &links {
            peers.add_incoming(link, false);
        }
        let (found, asked) = search_with(&means, &links, |_, away| Some(away)).await;
        assert_eq!((asked.len(), found.unwrap_err().asked), (3, 2), "{asked:?}");
    }
}

#[cfg(test)]
mod dns_tests {
    use std::net::SocketAddr;

    use futures_util::future::BoxFuture;
    use tokio::net::UdpSocket;

    use tunnel_net::resolver::Resolver;

    use super::*;

    fn silent(at: SocketAddr) -> Dns {
        let zone = Zone::new("nodes.test".into(), Vec::new(), |_| false);
        Dns::new(Arc::new(Resolver::of_servers(&[at]).unwrap()), Arc::new(zone))
    }

    #[tokio::test(start_paused = true)]
    async fn a_silent_server_costs_a_second_and_is_remembered_for_a_while() {
        let socket = UdpSocket::bind("127.0.0.1:0").await.unwrap();
        let dns = silent(socket.local_addr().unwrap());
        assert!(!dns.has_failed_lately());
        let started = Instant::now();
        assert!(dns.lookup(&"edge1".parse().unwrap()).await.is_err());
        assert!(started.elapsed() <= LOOKUP_TIMEOUT + SLOW, "{:?}", started.elapsed());
        assert!(dns.has_failed_lately());
        tokio::time::advance(FAILURE_TTL).await;
        assert!(!dns.has_failed_lately());
    }

    #[tokio::test(start_paused = true)]
    async fn a_question_that_others_answered_first_tells_that_dns_is_slow() {
        let socket = UdpSocket::bind("127.0.0.1:0").await.unwrap();
        let dns = silent(socket.local_addr().unwrap());
        let node = "edge1".parse().unwrap();
        assert!(timeout(SLOW / 2, dns.lookup(&node)).await.is_err());
        assert!(!dns.has_failed_lately(), "it had no time to answer");
        assert!(timeout(SLOW * 2, dns.lookup(&node)).await.is_err());
        assert!(dns.has_failed_lately());
    }

    /// A resolver that answers every question with both addresses.
    #[derive(Debug)]
    struct Both;

    impl Lookup for Both {
        fn addresses<'a>(&'a self, _: &'a str) -> BoxFuture<'a, Result<Vec<IpAddr>, LookupError>> {
            Box::pin(std::future::ready(Ok(vec![[10, 96, 0, 20].into(), [10, 1, 0, 1].into()])))
        }
    }

    #[tokio::test]
    async fn what_names_of_nodes_lead_to_for_others_is_never_taken_for_a_server() {
        let zone = Arc::new(Zone::new("nodes.test".into(), Vec::new(), |_| false));
        let service = watch::Sender::new(BTreeSet::new());
        let dns = Dns::new(Arc::new(Both), zone).excluding(service.subscribe());
        let node = "edge1".parse().unwrap();
        assert_eq!(dns.lookup(&node).await.unwrap().len(), 2);
        service.send_modify(|all| all.extend([IpAddr::from([10, 96, 0, 20])]));
        assert_eq!(dns.lookup(&node).await.unwrap(), [IpAddr::from([10, 1, 0, 1])]);
        service.send_modify(|all| all.extend([IpAddr::from([10, 1, 0, 1])]));
        assert_eq!(dns.lookup(&node).await.unwrap_err(), "its DNS records name no server");
    }

    #[tokio::test]
    async fn without_a_zone_dns_is_not_asked_for_what_may_be_somebody_elses() {
        let socket = UdpSocket::bind("127.0.0.1:0").await.unwrap();
        let resolver = Resolver::of_servers(&[socket.local_addr().unwrap()]).unwrap();
        let dns = Dns::new(Arc::new(resolver), Arc::new(Zone::new(String::new(), Vec::new(), |_| false)));
        for node in ["www.example.org", "localhost", "kubernetes.default.svc"] {
            let why = dns.lookup(&node.parse().unwrap()).await.unwrap_err();
            assert!(why.starts_with("DNS was not queried"), "{node}: {why}");
        }
        assert!(socket.try_recv(&mut [0; 512]).is_err(), "no query was sent");
    }
}
