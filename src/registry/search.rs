//! One search for a node at other pods: its homes are asked first, then DNS, then all at once.

use std::collections::{BTreeSet, HashMap};
use std::net::IpAddr;
use std::pin::pin;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use futures_util::FutureExt as _;
use futures_util::future::{BoxFuture, Fuse, FusedFuture as _, Shared, WeakShared};
use futures_util::stream::{FuturesUnordered, StreamExt as _};
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

/// What a search looks for.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub(crate) struct NodeQuery {
    pub(crate) node: NodeName,
    /// Only this process of it will do.
    instance: Option<Instance>,
    /// The link that must not be used.
    exclude_link: Option<LinkId>,
    /// The process of the pod at that link's other end, which must not be used over any other link either.
    not_server: Option<Instance>,
}

/// The searches under way. A request for the same node joins the search that runs, so that a thousand sessions of one
/// node ask the other pods once.
///
/// A search runs as long as somebody waits for it: the table holds weak handles, the waiters strong ones, and the last
/// waiter to leave removes the entry. A newcomer may come between the drop of the last strong handle and that removal.
/// It then finds a dead handle, begins a search of its own and puts that in its place; so the leaver looks again, under
/// the lock, whether the entry is still the dead one.
#[derive(Debug)]
pub(crate) struct Searches {
    means: SearchContext,
    running: Mutex<HashMap<NodeQuery, WeakShared<Running>>>,
}

#[derive(Debug, Clone)]
pub(crate) struct SearchContext {
    peers: Arc<Peers>,
    known: Arc<LocationCache>,
    dns: Arc<Dns>,
    port: u16,
}

type SearchResult = Result<NodeLocationAnswer, NodeNotFound>;
type Running = BoxFuture<'static, SearchResult>;

impl NodeQuery {
    pub(crate) fn new(node: &NodeName, instance: Option<Instance>, not: Option<&LinkSender>) -> Self {
        let not_server = not.filter(|not| not.peer == Remote::Peer).and_then(|not| not.instance);
        Self { node: node.clone(), instance, exclude_link: not.map(|not| not.id), not_server }
    }

    /// Whether any process of the node will do, by any link.
    pub(crate) fn is_any(&self) -> bool {
        self.instance.is_none() && self.exclude_link.is_none()
    }

    /// Whether it is the process that is looked for.
    pub(crate) fn is_of(&self, instance: Option<Instance>) -> bool {
        self.instance.is_none() || self.instance == instance
    }

    /// Whether that link, which leads to that process of the node, may be used.
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

    /// Searches, or joins the search that runs. Takes about 2 s at most. Cancel safe.
    pub(crate) async fn join(&self, wanted: NodeQuery) -> SearchResult {
        let search = {
            let mut running = self.lock();
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

    fn lock(&self) -> MutexGuard<'_, HashMap<NodeQuery, WeakShared<Running>>> {
        self.running.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// One waiter of a search. The last one to leave removes the search from the table.
struct SearchWaiter<'a> {
    searches: &'a Searches,
    wanted: NodeQuery,
    search: Option<Shared<Running>>,
}

impl Drop for SearchWaiter<'_> {
    fn drop(&mut self) {
        drop(self.search.take());
        let mut running = self.searches.lock();
        if running.get(&self.wanted).is_some_and(|search| search.upgrade().is_none()) {
            running.remove(&self.wanted);
        }
    }
}

/// Asks the pods that are likeliest to know, then DNS, then all: each of them only once those before had their time, or
/// have answered that they do not know.
async fn search(means: SearchContext, wanted: NodeQuery) -> SearchResult {
    let started = Instant::now();
    let (dns, node) = (means.dns.clone(), wanted.node.clone());
    let mut lookup = pin!(Fuse::terminated());
    let mut asking = PeerQueries::new(&means, &wanted);
    let mut best = None::<NodeLocationAnswer>;
    // The pod that had it last is asked at once, as the likeliest to have it: mostly the link to it was only dropped
    // for want of use, or has just ended.
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

/// Who has been asked so far.
#[derive(Clone, Copy)]
enum SearchStage {
    Homes,
    Dns,
    All,
}

/// The pods at the addresses that DNS named.
fn named(means: &SearchContext, addresses: Vec<IpAddr>) -> Vec<PeerHandle> {
    let first = addresses.into_iter().take(MAX_NAMED);
    first.flat_map(|ip| means.peers.at(ip, means.port)).collect()
}

/// How long the homes of a node, and each pod that they refer to, have to answer before others are asked.
const HOMES_FIRST: Duration = Duration::from_millis(100);
/// How long they have together, however often one refers to another.
const MAX_HOMES_FIRST: Duration = Duration::from_millis(300);
/// A pod that has received something from the node within this time has the node for certain.
const FRESH_ENOUGH: Duration = Duration::from_secs(7);
/// If no answer is as fresh, the search takes the freshest one after this time.
const FRESHEST_WITHIN: Duration = Duration::from_millis(300);
/// How long a whole search takes at most: DNS may take 1 s, and dialling a pod another.
const SEARCH_TIMEOUT: Duration = Duration::from_secs(2);
/// How many of the addresses that DNS names for one node are asked.
const MAX_NAMED: usize = 8;

// Whom one search has asked, and what they have said.

/// The pods that were asked, and the answers that are still to come.
pub(crate) struct PeerQueries<'a> {
    means: &'a SearchContext,
    wanted: &'a NodeQuery,
    asked: Vec<PeerHandle>,
    pub(crate) answers: FuturesUnordered<BoxFuture<'static, Answered>>,
    /// What those have said that do not have the node.
    pub(crate) said: NodeNotFound,
    /// The pods that have said so.
    without: Vec<Option<Instance>>,
    /// The homes of the node that have not yet said with authority that no pod has it. `None`: even if all do, others
    /// have to be asked.
    silent_homes: Option<Vec<Instance>>,
}

pub(crate) type Answered = Result<FindAnswer, PeerError>;

impl<'a> PeerQueries<'a> {
    pub(crate) fn new(means: &'a SearchContext, wanted: &'a NodeQuery) -> Self {
        let (asked, answers, without) = (Vec::new(), FuturesUnordered::new(), Vec::new());
        Self { means, wanted, asked, answers, said: NodeNotFound::default(), without, silent_homes: None }
    }

    /// Asks those of these pods that were not asked yet and can be reached.
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

    /// Asks the homes of the node.
    pub(crate) fn ask_replicas(&mut self) {
        let homes = self.means.peers.replicas_of(&self.wanted.node);
        // Only pods whose members have been the same for long agree on who they are.
        let agreed = self.means.peers.has_converged();
        self.silent_homes = agreed.then(|| homes.iter().filter_map(PeerHandle::process).collect());
        self.ask(homes);
    }

    /// Asks all pods, unless the homes of the node speak for them.
    pub(crate) fn ask_all(&mut self) {
        match &self.silent_homes {
            Some(silent) if silent.is_empty() => {
                self.said.asked = self.said.asked.max(self.means.peers.other_members());
            }
            _ => self.ask(self.means.peers.all()),
        }
    }

    /// Asks the pod that another refers to, if it was not asked yet. Returns whether it is.
    pub(crate) fn follow_referral(&mut self, answer: &Answered) -> bool {
        let at = answer.as_ref().ok().and_then(|answer| answer.at);
        let Some(server) = at.and_then(|at| self.means.peers.of_process(at)) else { return false };
        let before = self.asked.len();
        self.ask(vec![server]);
        self.asked.len() > before
    }

    /// Takes an answer. Returns where the node is, if it suits.
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
                // One pod may be asked twice: by its address, and over the link that it has made. It counts once.
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

// Looks a node up in DNS: its records are the pods it is linked to, as one of them published it.

/// Asks DNS for nodes, and knows whether that was of use lately.
#[derive(Debug)]
pub struct Dns {
    resolver: Arc<dyn Lookup>,
    /// Which nodes it may be asked for, and by which name.
    zone: Arc<Zone>,
    /// Addresses that no pod has, although names of nodes lead there.
    no_servers: Option<watch::Receiver<BTreeSet<IpAddr>>>,
    /// When a question was last in vain.
    failed: Mutex<Option<Instant>>,
}

impl Dns {
    /// Asks `resolver` for nodes by their names in `zone`, and for no other: what answers is linked to.
    pub fn new(resolver: Arc<dyn Lookup>, zone: Arc<Zone>) -> Self {
        Self { resolver, zone, no_servers: None, failed: Mutex::default() }
    }

    /// Takes none of these for a pod's: names of nodes lead there for other clients of the same DNS.
    pub fn excluding(self, no_servers: watch::Receiver<BTreeSet<IpAddr>>) -> Self {
        Self { no_servers: Some(no_servers), ..self }
    }

    /// The addresses of the pods that a node is linked to by its records; at least one. Takes at most 1 s. Cancel safe.
    ///
    /// # Errors
    ///
    /// DNS has no addresses for it, or does not answer: a sentence that gives the cause.
    pub async fn lookup(&self, node: &NodeName) -> Result<Vec<IpAddr>, String> {
        let name = self.zone.name(node).map_err(|why| format!("DNS was not asked ({why})"))?;
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
        if found.is_empty() { Err("in DNS at no pod".to_owned()) } else { Ok(found) }
    }

    /// Whether DNS gave no answer lately, so that nobody should wait for it.
    pub fn has_failed_lately(&self) -> bool {
        self.failed
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .is_some_and(|at| at.elapsed() < FAILURE_TTL)
    }
}

/// One query. A query that is dropped because another was quicker still counts in whether DNS is slow.
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
        *self.dns.failed.lock().unwrap_or_else(PoisonError::into_inner) = failed.then(Instant::now);
    }
}

/// Ceiling of a whole lookup: siblings know as well, so nobody waits longer.
const LOOKUP_TIMEOUT: Duration = Duration::from_secs(1);
/// Siblings are asked as well when DNS has not answered within this.
pub(crate) const SLOW: Duration = Duration::from_millis(50);
/// How long one failure is held against DNS: it is asked on, but siblings are asked at the same time.
const FAILURE_TTL: Duration = Duration::from_secs(10);

#[cfg(test)]
mod tests {
    use std::task::{Context, Poll, Waker};

    use crate::registry::peers::tests::peers;
    use tunnel_base::policy::zone::Zone;
    use tunnel_net::resolver::Resolver;
    use tunnel_proto::frame::{Found, FrameKind};
    use tunnel_proto::hello::Dialect;

    use super::*;

    /// The number of the question for a node that waits to be sent on a link.
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
        LinkSender::new(LinkId(id), Remote::Peer, Some(Instance::from_bits(server.into())), Dialect::NEWEST)
    }

    /// Nothing is known yet, and DNS does not answer.
    fn means(peers: &Arc<Peers>) -> SearchContext {
        let resolver = Resolver::of_servers(&[([127, 0, 0, 1], 9).into()]).unwrap();
        let zone = Zone::new("nodes.test".into(), Vec::new(), |_| false);
        let dns = Arc::new(Dns::new(Arc::new(resolver), Arc::new(zone)));
        SearchContext { peers: peers.clone(), known: Arc::default(), dns, port: 1 }
    }

    /// What pods answer until the search is over, each once: none says nothing. Returns the result, and who was asked.
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

    /// Ten pods that have been linked for so long that all agree on the homes.
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
        // One home is not sure, and others that are none pretend to be.
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
        // Each refers to the next one, after as long as it may; and all of them say that they have authority.
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
        // It had the node by the link before, and has made another one since.
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

    /// Answers every question with both addresses.
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
        assert_eq!(dns.lookup(&node).await.unwrap_err(), "in DNS at no pod");
    }

    #[tokio::test]
    async fn without_a_zone_dns_is_not_asked_for_what_may_be_somebody_elses() {
        let socket = UdpSocket::bind("127.0.0.1:0").await.unwrap();
        let resolver = Resolver::of_servers(&[socket.local_addr().unwrap()]).unwrap();
        let dns = Dns::new(Arc::new(resolver), Arc::new(Zone::new(String::new(), Vec::new(), |_| false)));
        for node in ["www.example.org", "localhost", "kubernetes.default.svc"] {
            let why = dns.lookup(&node.parse().unwrap()).await.unwrap_err();
            assert!(why.starts_with("DNS was not asked"), "{node}: {why}");
        }
        assert!(socket.try_recv(&mut [0; 512]).is_err(), "nothing was asked");
    }
}
