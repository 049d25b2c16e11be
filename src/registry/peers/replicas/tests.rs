use std::future::ready;
use std::net::SocketAddr;
use std::sync::atomic::AtomicUsize;
use std::task::{Context, Poll, Waker};

use futures_util::FutureExt as _;
use futures_util::future::BoxFuture;
use parking_lot::Mutex;
use tokio::sync::watch;

use crate::registry::peers::peer::{PeerDialer, PeerError, UNSOLICITED};
use crate::registry::peers::tests::{peers, settled};
use crate::registry::{LinkedNode, Registry};
use tunnel_base::drain::Drain;
use tunnel_base::metrics::Metrics;
use tunnel_link::sender::LinkSender;
use tunnel_proto::frame::{FrameKind, Load, Remote};
use tunnel_proto::state::LinkId;

use super::*;

/// Returns a link to a server; its process has the number `server`.
fn link(id: u64, server: u64) -> Arc<LinkSender> {
    LinkSender::new(LinkId(id), Remote::Peer, Some(Instance::from_bits(u128::from(server) << 64)))
}

/// Adds peers that have made links; `first` is the number of the first.
fn linked_servers(peers: &Peers, first: u64, count: u64) -> Vec<Arc<LinkSender>> {
    let servers: Vec<_> = (first..first + count).map(|id| link(id, id)).collect();
    for server in &servers {
        peers.add_incoming(server, false);
    }
    servers
}

fn node(n: u64) -> NodeName {
    format!("node{n}").parse().unwrap()
}

/// Links `count` nodes here.
fn link_nodes(peers: &Peers, count: u64) {
    for n in 0..count {
        let sender = LinkSender::new(LinkId(1000 + n), Remote::Edge(node(n)), Some(Instance::random()));
        let linked =
            LinkedNode { sender, instance: None, from: ([127, 0, 0, 1], 1).into(), ips: Arc::default() };
        peers.dial_context.registry.insert(linked, false);
        peers.announce(&node(n));
    }
}

/// Returns the nodes that were announced to a server.
fn announced(link: &LinkSender) -> Vec<NodeName> {
    let mut cx = Context::from_waker(Waker::noop());
    let mut all = Vec::new();
    while let Poll::Ready(Some(frame)) = link.poll_pull(&mut cx, Instant::now()) {
        if let FrameKind::Found(Found { here: true, question: UNSOLICITED, .. }) = frame.body {
            all.push(frame.node);
        }
    }
    all
}

fn number_announced(servers: &[Arc<LinkSender>]) -> usize {
    servers.iter().map(|server| announced(server).len()).sum()
}

#[tokio::test(start_paused = true)]
async fn a_node_is_announced_to_its_homes_and_to_a_server_that_comes_only_those_that_it_is_a_home_of() {
    let (peers, _addresses, _made) = peers(&[]);
    let servers = linked_servers(&peers, 10, 10);
    settled().await;
    link_nodes(&peers, 200);
    settled().await;
    let own = (0..200).filter(|n| peers.is_replica_for(&node(*n))).count();
    assert_eq!(number_announced(&servers) + own, 3 * 200);
    let new = link(40, 40);
    peers.add_incoming(&new, false);
    settled().await;
    let its = announced(&new);
    assert!((20..120).contains(&its.len()), "{its:?}");
    assert_eq!(number_announced(&servers), 0, "nothing is new to the others");
    // The nodes that it was a replica of now have another one.
    peers.remove(&new);
    new.close();
    settled().await;
    let again = number_announced(&servers);
    assert!((1..=its.len()).contains(&again), "{again} of {}", its.len());
}

#[tokio::test(start_paused = true)]
async fn a_server_that_intercepts_is_told_of_every_node_and_of_each_that_goes() {
    let (peers, _addresses, _made) = peers(&[]);
    let servers = linked_servers(&peers, 10, 10);
    settled().await;
    link_nodes(&peers, 100);
    settled().await;
    number_announced(&servers);
    let load = Load { nodes: 0, stopping: false, intercepts: true };
    let say = async |from: &Arc<LinkSender>, load| {
        peers.on_load(from, load);
        settled().await;
        number_announced(&servers)
    };
    assert_eq!(say(&servers[0], load).await, 100);
    assert_eq!(say(&servers[0], load).await, 0, "it has announced that before");
    peers.announce(&node(7));
    settled().await;
    assert_eq!(announced(&servers[0]), [node(7)]);
    number_announced(&servers);
    peers.announce_gone(&node(7));
    settled().await;
    let said =
        |link: &LinkSender| match link.poll_pull(&mut Context::from_waker(Waker::noop()), Instant::now()) {
            Poll::Ready(Some(frame)) => Some(frame.body),
            _ => None,
        };
    let gone = Found { silence: Duration::from_millis(1), ..Found::not_here(UNSOLICITED) };
    assert_eq!(said(&servers[0]), Some(FrameKind::Found(gone)));
    assert!(servers[1..].iter().all(|server| said(server).is_none()), "no other server is notified");
    // Announcements over a link that has ended may be lost.
    peers.remove(&servers[0]);
    settled().await;
    number_announced(&servers);
    peers.add_incoming(&servers[0], false);
    settled().await;
    number_announced(&servers);
    assert_eq!(say(&servers[0], load).await, 100);
    say(&servers[0], Load { intercepts: false, ..load }).await;
    assert_eq!(peers.members().intercepting().count(), 0);
    // The same for this server.
    assert!(!(0..100).all(|n| peers.replicated_here()(&node(n))));
    peers.broadcast_load(load, false);
    settled().await;
    assert!((0..100).all(|n| peers.replicated_here()(&node(n))));
}

#[tokio::test(start_paused = true)]
async fn homes_have_converged_once_the_servers_have_been_the_same_for_long_and_none_is_away() {
    let (peers, addresses, _made) = peers(&[]);
    assert!(!peers.has_converged());
    sleep(CONVERGENCE_TIME + Duration::from_secs(1)).await;
    assert!(peers.has_converged());
    addresses.send_replace(vec!["127.0.0.1:1".parse().unwrap()]);
    settled().await;
    assert!(!peers.has_converged(), "a listed peer is not linked");
}

#[tokio::test(start_paused = true)]
async fn a_server_that_is_stopping_is_no_home_any_more_and_its_nodes_get_others() {
    let (peers, _addresses, _made) = peers(&[]);
    let servers = linked_servers(&peers, 10, 5);
    settled().await;
    link_nodes(&peers, 100);
    settled().await;
    let its: Vec<_> = announced(&servers[0]);
    number_announced(&servers);
    let stopping = Load { nodes: 0, stopping: true, intercepts: false };
    peers.on_load(&servers[0], stopping);
    settled().await;
    // Each node has one replica fewer and gets another one, which may be this server.
    let again = number_announced(&servers[1..]);
    assert!(its.len() > 20 && (its.len() / 2..=its.len()).contains(&again), "{again} of {}", its.len());
    assert_eq!(number_announced(&servers[..1]), 0);
    let is = |home: &PeerHandle| home.process() == servers[0].instance;
    assert!((0..100).all(|n| !peers.replicas_of(&node(n)).iter().any(is)));
    peers.on_load(&servers[0], stopping);
    settled().await;
    assert_eq!(number_announced(&servers), 0, "it has announced that before");
    // It has disconnected, so nothing is kept about its process.
    peers.remove(&servers[0]);
    settled().await;
    assert_eq!((peers.other_members(), peers.dial_context.membership.lock().stopping.len()), (4, 0));
    // An announcement by an unknown server is not kept.
    peers.on_load(&link(90, 90), stopping);
    assert!(peers.dial_context.membership.lock().stopping.is_empty());
}

#[tokio::test(start_paused = true)]
async fn this_server_is_no_home_while_it_stops() {
    let (peers, _addresses, _made) = peers(&[]);
    let servers = linked_servers(&peers, 10, 2);
    settled().await;
    link_nodes(&peers, 10);
    assert!((0..10).all(|n| peers.is_replica_for(&node(n))), "three servers are replicas of all nodes");
    peers.broadcast_load(Load { nodes: 10, stopping: true, intercepts: false }, false);
    settled().await;
    assert!((0..10).all(|n| !peers.is_replica_for(&node(n)) && peers.replicas_of(&node(n)).len() == 2));
    assert_eq!(peers.other_members(), 2);
    assert_eq!(number_announced(&servers), 20, "its nodes are known to the peers");
}

/// A dialer that returns these links one after the other, and then fails.
#[derive(Debug)]
struct TheseLinks(Mutex<Vec<Arc<LinkSender>>>);

impl PeerDialer for TheseLinks {
    fn dial(&self, at: SocketAddr, _beside: bool) -> BoxFuture<'_, Result<Arc<LinkSender>, PeerError>> {
        let refused = PeerError::NoLink { at, cause: "refused".to_owned() };
        ready(self.0.lock().pop().ok_or(refused)).boxed()
    }
}

#[tokio::test(start_paused = true)]
async fn what_a_lost_link_may_not_have_carried_is_announced_over_the_other_one_of_that_server() {
    let at: SocketAddr = "127.0.0.1:2".parse().unwrap();
    let (_list, addresses) = watch::channel(vec![at]);
    let dialed = link(500, 2);
    let dialer = Arc::new(TheseLinks(Mutex::new(vec![dialed.clone()])));
    let registry = Registry::new(Metrics::server("", ""));
    let peers = Peers::new(addresses, registry, dialer.clone(), Instance::from_bits(1), Drain::new());
    // The server has also made a link to this one.
    let made = link(600, 2);
    peers.add_incoming(&made, false);
    settled().await;
    link_nodes(&peers, 100);
    settled().await;
    assert_eq!((announced(&dialed).len(), announced(&made).len()), (100, 0));
    // What is sent does not arrive any more, and no new link either.
    dialed.close();
    settled().await;
    assert_eq!(announced(&made).len(), 100);
    // A new link comes up, and the one that has carried announcements is lost.
    let again = link(501, 2);
    dialer.0.lock().push(again.clone());
    sleep(Duration::from_secs(60)).await;
    announced(&again);
    made.close();
    peers.remove(&made);
    settled().await;
    assert_eq!(announced(&again).len(), 100);
    // Nothing was sent over this one.
    let idle = link(601, 2);
    peers.add_incoming(&idle, false);
    settled().await;
    idle.close();
    peers.remove(&idle);
    settled().await;
    assert_eq!(announced(&again).len(), 0);
}

/// A dialer that returns a link to the server at port 2 and to no other. Counts its calls.
#[derive(Debug, Default)]
struct OnePeer(AtomicUsize);

impl PeerDialer for OnePeer {
    fn dial(&self, at: SocketAddr, _beside: bool) -> BoxFuture<'_, Result<Arc<LinkSender>, PeerError>> {
        let number = self.0.fetch_add(1, Relaxed) as u64;
        let refused = PeerError::NoLink { at, cause: "refused".to_owned() };
        ready(if at.port() == 2 { Ok(link(500 + number, 2)) } else { Err(refused) }).boxed()
    }
}

#[tokio::test(start_paused = true)]
async fn a_server_that_comes_and_goes_on_the_list_each_second_stays_a_home_and_one_that_is_dead_is_none() {
    let [alive, dead]: [SocketAddr; 2] = ["127.0.0.1:2", "127.0.0.1:3"].map(|at| at.parse().unwrap());
    let (list, addresses) = watch::channel(vec![alive, dead]);
    let (dialer, metrics) = (Arc::new(OnePeer::default()), Metrics::server("", ""));
    let own = Instance::from_bits(1);
    let peers = Peers::new(addresses, Registry::new(metrics), dialer.clone(), own, Drain::new());
    settled().await;
    link_nodes(&peers, 100);
    settled().await;
    let (members, its) = (peers.members(), peers.links().pop().unwrap());
    assert_eq!((members.others(own), announced(&its).len()), (1, 100));
    let dials = dialer.0.load(Relaxed);
    for second in 0..40 {
        list.send_replace(if second % 2 == 0 { Vec::new() } else { vec![alive, dead] });
        settled().await;
        assert!(Arc::ptr_eq(&peers.members(), &members), "the homes are the same");
        assert!(!its.is_closed() && announced(&its).is_empty(), "nothing is announced again");
    }
    let dials = dialer.0.load(Relaxed) - dials;
    assert!(dials <= 40, "{dials}");
}

#[tokio::test(start_paused = true)]
async fn servers_that_link_and_vanish_without_end_cost_their_own_announcements_and_leave_the_homes_right() {
    let (peers, _addresses, _made) = peers(&[]);
    let servers = linked_servers(&peers, 10, 9);
    settled().await;
    link_nodes(&peers, 200);
    settled().await;
    number_announced(&servers);
    let mut said = 0;
    for round in 0..50 {
        let new = link(100 + round, 100 + round);
        peers.add_incoming(&new, false);
        settled().await;
        said += number_announced(std::slice::from_ref(&new));
        peers.remove(&new);
        new.close();
        settled().await;
        said += number_announced(&servers);
    }
    // Each is a replica of 3 in 11 of the nodes, which get another replica once it disconnects.
    assert!((50 * 60..50 * 2 * 100).contains(&said), "{said}");
    // Faster changes are not all processed, and none stays.
    for round in 0..1000 {
        let new = link(1000 + round, 1000 + round);
        peers.add_incoming(&new, false);
        sleep(Duration::from_millis(10)).await;
        peers.remove(&new);
        new.close();
    }
    settled().await;
    assert_eq!(peers.other_members(), servers.len());
    let known = |home: &PeerHandle| servers.iter().any(|server| server.instance == home.process());
    assert!((0..200).all(|n| peers.replicas_of(&node(n)).iter().all(known)));
}

#[tokio::test(start_paused = true)]
async fn however_many_servers_link_the_members_are_a_bounded_number() {
    let (peers, _addresses, _made) = peers(&[]);
    linked_servers(&peers, 10, MAX_KNOWN as u64 + 50);
    settled().await;
    assert_eq!(peers.other_members(), MAX_KNOWN - 1);
    assert_eq!(peers.replicas_of(&node(1)).len(), 3 - usize::from(peers.is_replica_for(&node(1))));
}
