use std::future::ready;
use std::sync::atomic::AtomicUsize;

use futures_util::FutureExt as _;
use futures_util::future::BoxFuture;
use tokio::sync::mpsc;

use super::*;
use crate::registry::peers::MAX_KNOWN;
use crate::registry::peers::node_counts::PeerLoad;
use crate::registry::peers::node_list::{LIST_TIMEOUT, MAX_LISTED, NodeListEnd};
use crate::registry::peers::peer::PeerState;
use crate::registry::peers::peer_dialer::{PeerDialer, REDIAL_DELAY, TlsPeerDialer};
use tunnel_base::metrics::Metrics;
use tunnel_link::grpc::LinkContext;
use tunnel_link::link_reader::LinkReader;
use tunnel_link::table::{SessionLimits, SessionTable};
use tunnel_net::pool::BufferPool;
use tunnel_net::reload::ReloadedValue;
use tunnel_net::tls::peer::PeerTls;
use tunnel_net::tls::{self, TlsClientConfig, Trust};
use tunnel_proto::frame::{ListedNode, MAX_PAGE_NODES, Remote};
use tunnel_proto::halves::WindowLimits;
use tunnel_proto::state::LinkId;

impl Peer {
    /// Sets the state as if it had just been linked.
    fn set_linked(&self, link: &Arc<Link>) {
        self.state.send_replace(PeerState::Linked(link.clone()));
    }

    /// Returns the earliest time of the next attempt, if the last one failed.
    fn failed_until(&self) -> Option<Instant> {
        if let PeerState::Failed(until, _) = &*self.state.borrow() { Some(*until) } else { None }
    }
}

/// Returns the peers of a server with this list, at addresses where nothing listens.
pub(crate) fn peers(
    list: &[&str],
) -> (Arc<Peers>, watch::Sender<Vec<SocketAddr>>, mpsc::Receiver<LinkReader>) {
    let client = TlsClientConfig { trust: Trust::NoVerify, identity: None, alpn: Vec::new() };
    let name = tls::server_name("cloud.test").unwrap();
    let tls = ReloadedValue::fixed(PeerTls { config: client.load().unwrap().load(), name });
    let metrics = Metrics::server("", "");
    let windows = WindowLimits { start: 1000, max: 1000 };
    let limits = SessionLimits {
        windows,
        memory: 100_000,
        sessions: 10,
        resume_timeout: Duration::from_secs(60),
        max_resume_timeout: Duration::ZERO,
    };
    let table = SessionTable::new(Instance::from_bits(1), limits, metrics.clone());
    let link_context = LinkContext::new(table, metrics.clone(), Drain::new());
    let (tell, addresses) = watch::channel(list.iter().map(|at| at.parse().unwrap()).collect());
    let (own, drain) = (link_context.table.instance(), link_context.drain.clone());
    let (dialer, made) = TlsPeerDialer::new(tls, BufferPool::new(), link_context);
    let peers = Peers::new(addresses, Registry::new(metrics), dialer, own, drain);
    (peers, tell, made)
}

/// Waits until all announcements have been sent.
pub(crate) async fn settled() {
    tokio::time::sleep(Duration::from_secs(1)).await;
}

fn names(servers: &[PeerHandle]) -> Vec<String> {
    servers.iter().map(PeerHandle::to_string).collect()
}

#[tokio::test(start_paused = true)]
async fn a_peer_that_is_no_longer_listed_is_not_queried() {
    let (peers, tell, _made) = peers(&["127.0.0.1:1", "127.0.0.1:2"]);
    let before = peers.all();
    assert_eq!(names(&before), ["127.0.0.1:1", "127.0.0.1:2"]);
    tell.send_replace(vec!["127.0.0.1:2".parse().unwrap(), "127.0.0.1:3".parse().unwrap()]);
    while names(&peers.all()) != ["127.0.0.1:2", "127.0.0.1:3"] {
        tokio::time::sleep(Duration::from_millis(1)).await;
    }
    let node = "node1".parse().unwrap();
    let unlisted = peers.ask(&before[0], &node).await.unwrap_err();
    assert!(unlisted.to_string().contains("no longer listed as a peer"), "{unlisted}");
    let dead = peers.ask(&before[1], &node).await.unwrap_err();
    assert!(dead.to_string().contains("127.0.0.1:2") && dead.to_string().contains("refused"), "{dead}");
}

#[tokio::test(start_paused = true)]
async fn an_unlisted_peer_remains_until_its_link_closes() {
    let (peers, tell, _made) = peers(&["127.0.0.1:1"]);
    let PeerHandle::Known(peer) = peers.all().pop().unwrap() else { panic!("it is on the list") };
    // It is dialled at once, unsuccessfully.
    peers.changes().changed().await.unwrap();
    let link = Link::new(LinkId(7), Remote::Peer, Some(Instance::from_bits(7)));
    peer.set_linked(&link);
    tell.send_replace(vec!["127.0.0.1:2".parse().unwrap()]);
    while !names(&peers.all()).contains(&"127.0.0.1:2".to_owned()) {
        tokio::time::sleep(Duration::from_millis(1)).await;
    }
    assert_eq!(names(&peers.all()), ["127.0.0.1:1", "127.0.0.1:2"]);
    assert_eq!(peers.links().len(), 1);
    link.close();
    assert_eq!(names(&peers.all()), ["127.0.0.1:2"]);
}

#[tokio::test(start_paused = true)]
async fn listed_peers_are_dialled_at_once_and_unreachable_ones_reported() {
    let (peers, tell, _made) = peers(&["127.0.0.1:1"]);
    let mut changes = peers.changes();
    assert_eq!(peers.check(), Ok(()), "not tried yet");
    changes.changed().await.unwrap();
    let why = peers.check().unwrap_err();
    assert!(why.contains("peer 127.0.0.1:1 cannot be reached") && why.contains("refused"), "{why}");
    tell.send_replace(Vec::new());
    while peers.check().is_err() {
        changes.changed().await.unwrap();
    }
}

/// Dials this server's own address: at first its certificate has expired.
#[derive(Debug, Default)]
struct OwnAddress(AtomicUsize);

impl PeerDialer for OwnAddress {
    fn dial(&self, at: SocketAddr, _: bool) -> BoxFuture<'_, Result<Arc<Link>, PeerError>> {
        let expired = self.0.fetch_add(1, Relaxed) == 0;
        let cause = "the certificate expired".to_owned();
        ready(Err(if expired { PeerError::NotAPeer { at, cause } } else { PeerError::SelfDial(at) })).boxed()
    }
}

#[tokio::test(start_paused = true)]
async fn an_error_of_a_listed_address_ends_once_it_is_known_as_this_server() {
    let (tell, addresses) = watch::channel(vec!["127.0.0.1:1".parse().unwrap()]);
    let (registry, own) = (Registry::new(Metrics::server("", "")), Instance::from_bits(1));
    let peers = Peers::new(addresses, registry, Arc::<OwnAddress>::default(), own, Drain::new());
    let mut changes = peers.changes();
    changes.changed().await.unwrap();
    assert!(peers.check().unwrap_err().contains("expired"));
    let started = tokio::time::Instant::now();
    tokio::time::timeout(Duration::from_secs(60), changes.changed()).await.unwrap().unwrap();
    assert_eq!(peers.check(), Ok(()));
    assert!(started.elapsed() <= Duration::from_secs(20), "{:?}", started.elapsed());
    drop(tell);
}

#[tokio::test(start_paused = true)]
async fn an_address_from_dns_is_not_dialled_for_each_client() {
    let (peers, _tell, _made) = peers(&[]);
    let mut dials = 0;
    let mut last = None;
    for _ in 0..300 {
        let server = peers.at([127, 0, 0, 1].into(), 1).pop().unwrap();
        assert!(server.link().await.is_err());
        let PeerHandle::Known(dead) = &server else { panic!("it has an address") };
        let until = dead.failed_until();
        if until.is_some() && until != last {
            (dials, last) = (dials + 1, until);
        }
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
    assert!((2..=4).contains(&dials), "{dials} dials in 3 s");
}

#[tokio::test(start_paused = true)]
async fn an_unresponsive_peer_is_redialled_with_backoff_without_delaying_searches() {
    let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let at = listener.local_addr().unwrap();
    listener.set_nonblocking(true).unwrap();
    let (peers, _tell, _made) = peers(&[&at.to_string()]);
    let dead = &peers.all()[0];
    // It accepts connections and sends nothing. The first search waits for a second, the next one for the remaining
    // time.
    let started = tokio::time::Instant::now();
    assert!(dead.link().await.is_err());
    assert_eq!(started.elapsed().as_secs(), 1);
    let started = tokio::time::Instant::now();
    for _ in 0..100 {
        assert!(dead.link().await.is_err());
    }
    assert!(started.elapsed() < Duration::from_millis(10), "{:?}", started.elapsed());
    // Held open, because a closed connection would be noticed at once.
    let mut held = Vec::new();
    held.extend(std::iter::from_fn(|| listener.accept().ok()));
    assert_eq!(held.len(), 1);
    for _ in 0..60 {
        tokio::time::sleep(Duration::from_secs(1)).await;
        let _ = dead.link().await;
        held.extend(std::iter::from_fn(|| listener.accept().ok()));
    }
    assert!((5..=15).contains(&held.len()), "tried {} times in a minute", held.len());
}

#[tokio::test(start_paused = true)]
async fn unlinked_addresses_from_dns_are_bounded_and_expire() {
    let (peers, _tell, _made) = peers(&["127.0.0.1:1"]);
    assert_eq!(names(&peers.at([127, 0, 0, 1].into(), 9000)), ["127.0.0.1:1"], "the list knows the port");
    for n in 0..2 * MAX_KNOWN {
        let [.., high, low] = n.to_be_bytes();
        peers.at([10, 0, high, low].into(), 9000);
    }
    assert_eq!(peers.servers.lock().known.len(), MAX_KNOWN);
    assert_eq!(names(&peers.all()), ["127.0.0.1:1"], "they are not asked for every node");
    tokio::time::sleep(Duration::from_secs(61)).await;
    assert_eq!(names(&peers.at([10, 9, 9, 9].into(), 9000)), ["10.9.9.9:9000"]);
    assert_eq!(peers.servers.lock().known.len(), 2);
}

#[tokio::test]
async fn an_answer_is_accepted_only_over_the_link_of_its_query() {
    let (peers, _tell, _made) = peers(&[]);
    let link = Link::new(LinkId(7), Remote::Peer, Some(Instance::from_bits(7)));
    peers.add_incoming(&link, false);
    let server = peers.all().pop().unwrap();
    let node = "node1".parse().unwrap();
    let found = |question| Found { here: true, ..Found::not_here(question) };
    let other = Link::new(LinkId(8), Remote::Peer, Some(Instance::random()));
    let answers = async {
        while peers.questions.pending.lock().is_empty() {
            tokio::task::yield_now().await;
        }
        assert!(peers.handle_found(&other, found(1)).is_none(), "not asked over that link");
        assert_eq!(peers.questions.pending.lock().len(), 1);
        assert!(peers.handle_found(&link, found(1)).is_none());
    };
    let (queried, ()) = tokio::join!(peers.ask(&server, &node), answers);
    assert_eq!(queried.unwrap().0.id, link.id);
    assert_eq!(peers.handle_found(&link, found(UNSOLICITED)), Some(found(UNSOLICITED)));
    peers.remove(&link);
    assert!(peers.all().is_empty() && peers.questions.pending.lock().is_empty());
}

/// Returns a page with these nodes.
fn page(question: u64, names: &[String], more: bool) -> NodePage {
    let listed = |name: &String| ListedNode {
        node: name.parse().unwrap(),
        age: Duration::ZERO,
        address: None,
        round_trip: None,
        sessions: None,
        version: None,
        bytes: None,
        websocket: None,
    };
    NodePage { question, nodes: names.iter().map(listed).collect(), more }
}

/// Answers each request that is pending, as `answers` does with its number.
async fn answer_pages(peers: &Peers, link: &Link, answers: impl Fn(u64) -> NodePage) {
    loop {
        let pending: Vec<_> =
            peers.pages.pending.lock().keys().filter(|(_, id)| *id == link.id).copied().collect();
        for (question, _) in pending {
            peers.handle_node_page(link, answers(question));
        }
        tokio::time::sleep(Duration::from_millis(1)).await;
    }
}

#[tokio::test(start_paused = true)]
async fn nodes_of_all_peers_are_listed_and_a_silent_peer_is_reported() {
    let (peers, _tell, _made) = peers(&["127.0.0.1:1"]);
    let link = |id: u64| Link::new(LinkId(id), Remote::Peer, Some(Instance::from_bits(id.into())));
    let (answering, silent) = (link(7), link(8));
    peers.add_incoming(&answering, false);
    peers.add_incoming(&silent, false);
    // Over another link the answer is dropped.
    peers.handle_node_page(&silent, page(1, &["b".to_owned()], false));
    let answers =
        answer_pages(&peers, &answering, |question| page(question, &["a".to_owned(), "b".to_owned()], false));
    let listed = tokio::select! {
        listed = peers.list_nodes() => listed,
        () = answers => unreachable!(),
    };
    let ends: Vec<_> = listed.iter().map(|one| (one.server.to_string(), one.nodes.len(), &one.end)).collect();
    assert!(matches!(ends[0].2, NodeListEnd::NotLinked(_)), "{ends:?}");
    let of = |link: &Arc<Link>| {
        listed.iter().find(|one| one.server.up().is_some_and(|up| up.id == link.id)).unwrap()
    };
    assert_eq!((of(&answering).nodes.len(), &of(&answering).end), (2, &NodeListEnd::Complete));
    assert_eq!((of(&silent).nodes.len(), &of(&silent).end), (0, &NodeListEnd::Silent));
    assert!(peers.pages.pending.lock().is_empty());
}

#[tokio::test(start_paused = true)]
async fn callers_that_wait_for_a_list_share_the_next_one() {
    let (peers, _tell, _made) = peers(&[]);
    let silent = Link::new(LinkId(7), Remote::Peer, Some(Instance::from_bits(7)));
    peers.add_incoming(&silent, false);
    let started = tokio::time::Instant::now();
    let later = async {
        tokio::time::sleep(Duration::from_secs(1)).await;
        futures_util::future::join_all((0..50).map(|_| peers.list_nodes())).await
    };
    let (first, lists) = tokio::join!(peers.list_nodes(), later);
    // The first list takes 2 s, and the others another one.
    assert_eq!(started.elapsed().as_secs(), 4);
    assert!(lists.iter().all(|list| Arc::ptr_eq(list, &lists[0]) && !Arc::ptr_eq(list, &first)));
    assert!(peers.listing.lock().await.is_none(), "it is not kept");
}

#[tokio::test(start_paused = true)]
async fn the_node_list_of_a_peer_is_truncated_at_its_limit() {
    let (peers, _tell, _made) = peers(&[]);
    let link = Link::new(LinkId(7), Remote::Peer, Some(Instance::from_bits(7)));
    peers.add_incoming(&link, false);
    let full = |question: u64| {
        let names: Vec<_> = (0..MAX_PAGE_NODES).map(|n| format!("node-{question}-{n}")).collect();
        page(question, &names, true)
    };
    let answers = answer_pages(&peers, &link, full);
    let listed = tokio::select! {
        listed = peers.list_nodes() => listed,
        () = answers => unreachable!(),
    };
    assert_eq!((listed[0].nodes.len(), &listed[0].end), (MAX_LISTED, &NodeListEnd::Truncated));
    // An empty page ends the list, even if more is announced.
    let answers = answer_pages(&peers, &link, |question| page(question, &[], true));
    let listed = tokio::select! {
        listed = peers.list_nodes() => listed,
        () = answers => unreachable!(),
    };
    assert_eq!((listed[0].nodes.len(), &listed[0].end), (0, &NodeListEnd::Complete));
}

#[tokio::test(start_paused = true)]
async fn the_nodes_of_a_slow_peer_are_all_listed_while_its_pages_arrive() {
    let (peers, _tell, _made) = peers(&[]);
    let link = Link::new(LinkId(7), Remote::Peer, Some(Instance::from_bits(7)));
    peers.add_incoming(&link, false);
    let slow = async {
        for number in 1..=12 {
            while !peers.pages.pending.lock().contains_key(&(number, link.id)) {
                tokio::time::sleep(Duration::from_millis(10)).await;
            }
            tokio::time::sleep(Duration::from_millis(1500)).await;
            peers.handle_node_page(&link, page(number, &[format!("node-{number}")], number < 12));
        }
    };
    let (listed, _) = tokio::join!(peers.list_nodes(), tokio::time::timeout(LIST_TIMEOUT, slow));
    assert_eq!((listed[0].nodes.len(), &listed[0].end), (12, &NodeListEnd::Complete));
}

#[tokio::test(start_paused = true)]
async fn a_relinked_peer_is_queried_over_the_newer_link_and_the_dead_one_closes() {
    let (peers, _tell, _made) = peers(&[]);
    let link = |id| Link::new(LinkId(id), Remote::Peer, Some(Instance::from_bits(7)));
    let (old, new) = (link(1), link(2));
    peers.add_incoming(&old, false);
    peers.add_incoming(&new, false);
    let queried: Vec<_> = peers.all().iter().filter_map(|server| server.up()).map(|up| up.id).collect();
    assert_eq!(queried, [new.id]);
    assert_eq!(peers.links().len(), 2, "sessions may run on either");
    old.closed().await;
    assert!(!new.is_closed());
}

#[tokio::test(start_paused = true)]
async fn a_peer_linked_in_both_directions_is_queried_once() {
    let (peers, _tell, _made) = peers(&["127.0.0.1:1"]);
    let PeerHandle::Known(known) = peers.all().pop().unwrap() else { panic!("it is on the list") };
    // It is dialled at once, unsuccessfully.
    peers.changes().changed().await.unwrap();
    let link = |id| Link::new(LinkId(id), Remote::Peer, Some(Instance::from_bits(7)));
    peers.add_incoming(&link(1), false);
    assert_eq!(peers.all().len(), 2, "not yet known to be the same server");
    known.set_linked(&link(2));
    assert_eq!(names(&peers.all()), ["127.0.0.1:1"]);
}

#[tokio::test(start_paused = true)]
async fn a_refusing_peer_is_redialled_with_backoff() {
    let (peers, _tell, _made) = peers(&["127.0.0.1:1"]);
    let PeerHandle::Known(dead) = &peers.all()[0] else { panic!("it is on the list") };
    let (mut failures, mut last, mut longest) = (0, None, Duration::ZERO);
    for _ in 0..10_000 {
        assert!(dead.link().now_or_never().is_none_or(|link| link.is_err()));
        tokio::time::sleep(Duration::from_millis(1)).await;
        if let Some(until) = dead.failed_until()
            && last != Some(until)
        {
            let pause = until - tokio::time::Instant::now();
            assert!(failures > 0 || pause <= REDIAL_DELAY.mul_f64(1.25), "{pause:?} after the first failure");
            (failures, last, longest) = (failures + 1, Some(until), longest.max(pause));
        }
    }
    assert!((2..=12).contains(&failures), "{failures} dials in 10 s");
    assert!(
        (REDIAL_DELAY * 5..=REDIAL_DELAY * 10).contains(&longest),
        "a server that is back must be found soon: {longest:?}"
    );
}

#[tokio::test]
async fn a_new_peer_link_wakes_waiters_for_a_node() {
    let (peers, _tell, _made) = peers(&[]);
    let registry = peers.dial_context.registry.clone();
    let arrival = registry.arrival(&"node1".parse().unwrap());
    let link = Link::new(LinkId(7), Remote::Peer, Some(Instance::from_bits(7)));
    peers.add_incoming(&link, false);
    assert!(arrival.wait().now_or_never().is_some());
}

#[tokio::test(start_paused = true)]
async fn loads_are_those_of_linked_peers_that_report_and_do_not_stop() {
    let (peers, tell, _made) = peers(&["127.0.0.1:1"]);
    let PeerHandle::Known(listed) = peers.all().pop().unwrap() else { panic!("it is on the list") };
    peers.changes().changed().await.unwrap();
    let link = |id: u64| Link::new(LinkId(id), Remote::Peer, Some(Instance::from_bits(id.into())));
    let load = |nodes| Load { nodes, stopping: false, problems: "store: lost".into() };
    let (dialled, incoming) = (link(7), link(8));
    peers.add_incoming(&incoming, false);
    peers.handle_load(&incoming, load(80));
    assert_eq!(peers.loads(), [], "its address is unknown");
    listed.set_linked(&dialled);
    assert_eq!(peers.loads(), [], "it has not reported yet");
    let known = PeerLoad { at: listed.at, nodes: 70 };
    for (reported, expected) in
        [(load(70), vec![known]), (Load { stopping: true, ..load(0) }, vec![]), (load(70), vec![known])]
    {
        peers.handle_load(&dialled, reported);
        assert_eq!(peers.loads(), expected);
        assert_eq!(peers.problems_at(&dialled).unwrap(), "store: lost");
    }
    tokio::time::advance(Duration::from_secs(20)).await;
    assert_eq!(peers.problems_at(&dialled), None);
    assert_eq!(peers.loads(), [], "its load is out of date");
    tell.send_replace(Vec::new());
}

#[tokio::test(start_paused = true)]
async fn loads_of_many_instances_are_bounded() {
    let (peers, _tell, _made) = peers(&[]);
    for id in 0..MAX_KNOWN as u64 + 10 {
        let link = Link::new(LinkId(id), Remote::Peer, Some(Instance::from_bits(id.into())));
        peers.handle_load(&link, Load { nodes: 1, stopping: false, problems: String::new() });
    }
    assert_eq!(peers.loads.lock().len(), MAX_KNOWN);
}
