use std::future::ready;
use std::net::SocketAddr;
use std::task::{Context, Poll, Waker};

use futures_util::FutureExt as _;
use futures_util::future::BoxFuture;
use tokio::sync::watch;
use tokio::time::Instant;

use crate::paths::node_not_found::PeerError;
use crate::registry::LinkedNode;
use crate::registry::peers::peer_dialer::PeerDialer;
use crate::registry::peers::tests::{peers, settled};
use tunnel_base::drain::Drain;
use tunnel_base::metrics::Metrics;
use tunnel_link::table::{SessionLimits, SessionTable};
use tunnel_proto::frame::{Remote, SessionCategory};
use tunnel_proto::halves::WindowLimits;
use tunnel_proto::names::Target;
use tunnel_proto::state::LinkId;

use super::*;

/// Returns a link to a server; its process has the number `server`.
fn link(id: u64, server: u64) -> Arc<Link> {
    Link::new(LinkId(id), Remote::Peer, Some(Instance::from_bits(server.into())))
}

fn node(n: u64) -> NodeName {
    format!("node{n}").parse().unwrap()
}

/// Links `count` nodes here.
fn link_nodes(peers: &Peers, count: u64) -> Vec<Arc<Link>> {
    let mut links = Vec::new();
    for n in 0..count {
        let link = Link::new(LinkId(1000 + n), Remote::Edge(node(n)), Some(Instance::random()));
        let linked = LinkedNode { link: link.clone(), from: ([127, 0, 0, 1], 1).into() };
        peers.dial_context.registry.insert(linked, false);
        peers.announce(&node(n));
        links.push(link);
    }
    links
}

/// Takes the announcements that wait on a link: the nodes, and whether each is here.
fn taken(link: &Link) -> Vec<(NodeName, bool)> {
    let mut cx = Context::from_waker(Waker::noop());
    let mut all = Vec::new();
    while let Poll::Ready(Some(frame)) = link.poll_pull(&mut cx, Instant::now()) {
        if let FrameKind::Found(found) = frame.body
            && found.question == UNSOLICITED
        {
            all.push((frame.node, found.here));
        }
    }
    all
}

/// Takes all announcements over a link until no more follow, and returns their number.
async fn count_announced(link: &Link) -> usize {
    let mut count = 0;
    loop {
        settled().await;
        match taken(link).len() {
            0 => return count,
            some => count += some,
        }
    }
}

#[tokio::test(start_paused = true)]
async fn each_peer_gets_all_nodes_once_and_then_each_change() {
    let (peers, _addresses, _made) = peers(&[]);
    let before = link(1, 7);
    peers.add_incoming(&before, false);
    let edges = link_nodes(&peers, 250);
    assert_eq!(count_announced(&before).await, 250);
    let after = link(2, 8);
    peers.add_incoming(&after, false);
    assert_eq!((count_announced(&after).await, count_announced(&before).await), (250, 0));
    peers.dial_context.registry.remove(&edges[7]);
    peers.announce(&node(7));
    // Only the last state of a node is announced.
    peers.announce(&node(7));
    settled().await;
    assert_eq!([taken(&before), taken(&after)], [vec![(node(7), false)], vec![(node(7), false)]]);
}

#[tokio::test(start_paused = true)]
async fn announcements_leave_room_on_a_link_for_other_signals() {
    let (peers, _addresses, _made) = peers(&[]);
    link_nodes(&peers, 5000);
    let slow = link(1, 7);
    peers.add_incoming(&slow, false);
    settled().await;
    assert_eq!(slow.waiting(), MAX_QUEUED);
    assert!(slow.signal(&node(1), FrameKind::Find(5)), "a question has room");
    assert_eq!(count_announced(&slow).await, 5000);
}

#[tokio::test(start_paused = true)]
async fn sessions_that_wait_for_their_turn_hold_no_announcement_back() {
    let (peers, _addresses, _made) = peers(&[]);
    link_nodes(&peers, 1);
    let busy = link(1, 7);
    let windows = WindowLimits { start: 1000, max: 1000 };
    let limits = SessionLimits {
        windows,
        memory: 1 << 20,
        sessions: MAX_QUEUED,
        resume_timeout: Duration::ZERO,
        max_resume_timeout: Duration::ZERO,
    };
    let table = SessionTable::new(Instance::random(), limits, Metrics::server("", ""));
    let target: Target = "127.0.0.1:22".parse().unwrap();
    let sessions: Vec<_> = (0..MAX_QUEUED)
        .map(|_| table.open(node(1), target.clone(), SessionCategory::Ssh, String::new(), "").unwrap())
        .collect();
    sessions.iter().for_each(|session| session.ask(&busy, None));
    assert!(busy.waiting() >= MAX_QUEUED);
    peers.add_incoming(&busy, false);
    settled().await;
    assert_eq!(taken(&busy), [(node(0), true)]);
}

#[tokio::test(start_paused = true)]
async fn pending_announcements_for_a_slow_peer_are_bounded() {
    let (peers, _addresses, _made) = peers(&[]);
    let slow = link(1, 7);
    peers.add_incoming(&slow, false);
    settled().await;
    for n in 0..MAX_PENDING as u64 + 200 {
        peers.announce(&node(n));
    }
    let pending = || -> Vec<usize> {
        let links = peers.announcement_links.0.lock();
        links.values().map(|link| link.pending.lock().len()).collect()
    };
    assert_eq!(pending(), [MAX_PENDING]);
}

/// A dialer that returns these links one after the other, and then fails.
#[derive(Debug)]
struct ScriptedDialer(Mutex<Vec<Arc<Link>>>);

impl PeerDialer for ScriptedDialer {
    fn dial(&self, at: SocketAddr, _is_backup: bool) -> BoxFuture<'_, Result<Arc<Link>, PeerError>> {
        let refused = PeerError::NoLink { at, cause: "refused".to_owned() };
        ready(self.0.lock().pop().ok_or(refused)).boxed()
    }
}

#[tokio::test(start_paused = true)]
async fn announcements_of_a_lost_link_are_repeated_over_another_link_of_that_server() {
    let at: SocketAddr = "127.0.0.1:2".parse().unwrap();
    let (_list, addresses) = watch::channel(vec![at]);
    let dialled = link(500, 2);
    let dialer = Arc::new(ScriptedDialer(Mutex::new(vec![dialled.clone()])));
    let registry = Registry::new(Metrics::server("", ""));
    let peers = Peers::new(addresses, registry, dialer.clone(), Instance::from_bits(1), Drain::new());
    settled().await;
    // The server has also made a link to this one.
    let incoming = link(600, 2);
    peers.add_incoming(&incoming, false);
    link_nodes(&peers, 100);
    assert_eq!((count_announced(&dialled).await, count_announced(&incoming).await), (100, 0));
    // What is sent does not arrive any more, and there is no new link either.
    dialled.close();
    assert_eq!(count_announced(&incoming).await, 100);
    // A new link to the server is made, and then its own is lost.
    let again = link(501, 2);
    dialer.0.lock().push(again.clone());
    // The pause before a dial is random.
    while !dialer.0.lock().is_empty() {
        settled().await;
    }
    assert_eq!(count_announced(&again).await, 0, "one link is enough");
    incoming.close();
    peers.remove(&incoming);
    assert_eq!(count_announced(&again).await, 100);
    // The server finds that link unresponsive and makes another one.
    let second = link(601, 2);
    peers.add_incoming(&second, false);
    let backup = link(602, 2);
    peers.add_incoming(&backup, true);
    assert_eq!(
        (count_announced(&second).await, count_announced(&backup).await),
        (0, 0),
        "it is another link"
    );
}
