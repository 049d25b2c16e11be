//! Short scripts: one process, links to remotes that the script plays, and single frames in a fixed order.

use std::sync::Arc;
use std::task::{Context, Poll, Waker};
use std::time::Duration;

use bytes::Bytes;
use futures_util::FutureExt as _;
use tokio::time::{Instant, advance};
use tunnel::registry::LinkedNode;
use tunnel::registry::Registry;
use tunnel_base::metrics::Metrics;
use tunnel_link::link::Link;
use tunnel_link::table::handles::{IncomingSession, PendingOpen, Session};
use tunnel_link::table::{FrameEvent, SessionLimits, SessionTable};
use tunnel_net::ChunkStream as _;
use tunnel_proto::frame::{
    ErrorCode, FrameKind, Remote, SessionCategory, SessionError, SessionFrame, SessionKey,
};
use tunnel_proto::halves::WindowLimits;
use tunnel_proto::names::{Instance, NodeName, SessionId};
use tunnel_proto::state::LinkId;

/// A server with some limits.
struct Script {
    table: Arc<SessionTable>,
    metrics: Metrics,
}

impl Script {
    fn new(sessions: usize) -> Self {
        let windows = WindowLimits { start: 1 << 10, max: 64 << 10 };
        let limits = SessionLimits {
            windows,
            memory: 64 << 20,
            sessions,
            resume_timeout: GRACE,
            max_resume_timeout: Duration::ZERO,
        };
        let metrics = Metrics::server("", "");
        Self { table: SessionTable::new(Instance::from_bits(1), limits, metrics.clone()), metrics }
    }

    fn open(&self, to: &NodeName) -> PendingOpen {
        let target = "node1:22".parse().unwrap();
        self.table.open(to.clone(), target, SessionCategory::Ssh, "ann".into(), "connect").unwrap()
    }

    /// Opens a session to a node over that link, whose remote accepts it.
    fn open_session(&self, link: &Arc<Link>, to: &NodeName) -> Session {
        self.accept_open(link, self.open(to))
    }

    fn accept_open(&self, link: &Arc<Link>, opening: PendingOpen) -> Session {
        opening.ask(link, None);
        self.receive_frame(link, opening.id(), SessionFrame::opened(1 << 40, 1));
        opening.into_session()
    }

    /// Accepts a session that the edge at the other end of that link opens to this server.
    fn accept_session(&self, link: &Arc<Link>) -> Option<Session> {
        let id = SessionId::random();
        match self.receive_frame(link, id, open_frame(1)) {
            Some(FrameEvent::RelayRequest(mut request)) => {
                // As a server does: sessions are evicted by client.
                request.attribute(SessionCategory::HttpProxy, link.peer.requester().unwrap_or_default());
                request.offer().map(IncomingSession::accept)
            }
            _ => None,
        }
    }

    /// Handles a frame of a session that arrives over that link.
    fn receive_frame(&self, link: &Arc<Link>, id: SessionId, frame: SessionFrame) -> Option<FrameEvent> {
        let node = link.peer.node().cloned().unwrap_or_else(|| node(1));
        let key = SessionKey { id, category: SessionCategory::Ssh, node };
        self.table.on_frame(link, key, frame, Instant::now())
    }

    /// Resumes the session that has lost its path over that link, whose remote accepts it.
    fn resume_session(&self, link: &Arc<Link>, epoch: u64) {
        let mut parked = self.table.next_parked().now_or_never().unwrap();
        parked.resume(link);
        let resumed = SessionFrame::Resumed { received: 0, limit: 1 << 40, epoch };
        self.receive_frame(link, parked.key().id, resumed);
        assert!(!parked.needs_path());
    }

    fn end_link(&self, link: &Link) {
        self.table.link_ended(link, &why(), Instant::now());
    }

    /// Lets that time pass, with the periodic work.
    async fn pass_time(&self, time: Duration) {
        let until = Instant::now() + time;
        while Instant::now() < until {
            advance(Duration::from_secs(5)).await;
            self.table.tick(Instant::now());
        }
    }
}

fn why() -> SessionError {
    SessionError::new(ErrorCode::Cancelled, "the link has closed")
}

fn node(number: u64) -> NodeName {
    format!("node{number}").parse().unwrap()
}

/// Returns a link to the edge of the node with that number.
fn link(number: u64) -> Arc<Link> {
    Link::new(LinkId(number), Remote::Edge(node(number)), Some(Instance::random()))
}

fn open_frame(epoch: u64) -> SessionFrame {
    let (target, client) = ("10.0.0.1:22".parse().unwrap(), String::new());
    SessionFrame::Open {
        target,
        limit: 1 << 40,
        epoch,
        client,
        opener: None,
        resume_timeout: None,
        boot: None,
    }
}

fn resume_frame(epoch: u64, at: Instance) -> SessionFrame {
    let (instance, target) = (Some(at), "10.0.0.1:22".parse().unwrap());
    SessionFrame::Resume { received: 0, limit: 1 << 40, epoch, instance, opener: None, target, place: None }
}

/// Takes the next frame about a session that a link sends.
fn next(link: &Link) -> Option<(SessionId, SessionFrame)> {
    let mut cx = Context::from_waker(Waker::noop());
    while let Poll::Ready(Some(frame)) = link.poll_pull(&mut cx, Instant::now()) {
        match frame.body {
            FrameKind::Session(id, _, frame) => return Some((id, frame)),
            FrameKind::Ping(Some(number)) => drop(link.handle_pong(number, Instant::now())),
            _ => {}
        }
    }
    None
}

/// Takes everything that a link sends about sessions.
fn sent(link: &Link) -> Vec<SessionFrame> {
    std::iter::from_fn(|| next(link)).map(|(_, frame)| frame).collect()
}

/// Writes as much as the session takes, at most `most` bytes.
fn fill(session: &mut Session, most: usize) {
    let mut left = most;
    let mut cx = Context::from_waker(Waker::noop());
    while left > 0 {
        let mut bytes = Bytes::from(vec![0; left.min(16 << 10)]);
        let len = bytes.len();
        if session.poll_write_chunk(&mut cx, &mut bytes).is_pending() {
            return;
        }
        left -= len;
    }
}

fn finish(session: &mut Session) {
    let _ = session.poll_finish(&mut Context::from_waker(Waker::noop()));
}

/// The resume timeout.
const GRACE: Duration = Duration::from_secs(60);

// Searches for paths.

/// The link's task ends before it has handled the event.
#[tokio::test]
async fn a_session_without_a_path_is_searched_for_even_if_its_event_is_dropped() {
    let (script, link) = (Script::new(10), link(1));
    let session = script.open_session(&link, &node(1));
    drop(script.receive_frame(&link, session.id(), SessionFrame::PathLost { epoch: 1 }));
    script.end_link(&link);
    let parked = script.table.next_parked().now_or_never();
    assert_eq!(parked.map(|parked| parked.key().id), Some(session.id()));
}

/// The task that has searched ends without noticing that the path is lost again.
#[tokio::test]
async fn a_path_that_is_lost_while_its_search_ends_is_searched_for_again() {
    let (script, links) = (Script::new(10), [link(1), link(2)]);
    let session = script.open_session(&links[0], &node(1));
    script.receive_frame(&links[0], session.id(), SessionFrame::PathLost { epoch: 1 });
    let parked = script.table.next_parked().now_or_never().unwrap();
    parked.resume(&links[1]);
    let resumed = SessionFrame::Resumed { received: 0, limit: 1 << 40, epoch: 2 };
    script.receive_frame(&links[1], session.id(), resumed);
    script.end_link(&links[1]);
    assert!(script.table.next_parked().now_or_never().is_none(), "one task searches");
    drop(parked);
    let parked = script.table.next_parked().now_or_never();
    assert_eq!(parked.map(|parked| parked.key().id), Some(session.id()));
}

/// While a runtime ends, it drops each search as soon as that starts, so that its session needs another one.
#[tokio::test]
async fn the_search_loop_yields_even_if_each_search_is_dropped_at_once() {
    let (script, link) = (Script::new(10), link(1));
    let session = script.open_session(&link, &node(1));
    script.receive_frame(&link, session.id(), SessionFrame::PathLost { epoch: 1 });
    let mut searches = 0;
    while script.table.next_parked().now_or_never().is_some() {
        searches += 1;
        assert!(searches < 1000, "it never gives way");
    }
    assert!(searches > 1);
}

/// Its Reset would be lost, and the remote would keep the session until the resume timeout.
#[tokio::test]
async fn a_session_with_a_last_frame_to_send_stays_on_a_link_that_others_leave() {
    let (script, link) = (Script::new(10), link(1));
    let (mut last, other) = (script.open_session(&link, &node(1)), script.open_session(&link, &node(1)));
    sent(&link);
    finish(&mut last);
    assert_eq!(sent(&link), [SessionFrame::Fin { total: 1 }]);
    script.receive_frame(&link, last.id(), SessionFrame::Fin { total: 1 });
    script.receive_frame(&link, last.id(), SessionFrame::Credit { received: 1, limit: 1 << 40 });
    assert_eq!(script.table.leave(&link, None, |_| true), 1);
    let all: Vec<_> = std::iter::from_fn(|| next(&link)).collect();
    let of = |id| all.iter().filter(move |(of, _)| *of == id).map(|(_, frame)| frame);
    assert!(of(last.id()).any(|frame| {
        matches!(frame, SessionFrame::Reset { refusal, .. } if refusal.code == ErrorCode::NoError)
    }));
    assert!(of(other.id()).eq([&SessionFrame::PathLost { epoch: 1 }]));
}

// Turns on a link.

/// Returns how many times the bytes of the other session one gets that has left the link and returned `returns` times.
async fn share(returns: u64) -> f64 {
    let (script, a, c) = (Script::new(10), link(1), link(2));
    let mut moved = script.open_session(&a, &node(1));
    let mut other = script.open_session(&a, &node(2));
    let mut epoch = 1;
    for number in 0..returns {
        fill(&mut moved, 1 << 20);
        // It leaves a link that takes nothing, and returns when the backup link ends.
        script.table.leave(&a, Some(&node(1)), |_| true);
        let c = Link::new(LinkId(10 + number), c.peer.clone(), Some(Instance::random()));
        script.resume_session(&c, epoch + 1);
        script.end_link(&c);
        script.resume_session(&a, epoch + 2);
        epoch += 2;
    }
    let mut bytes = [0, 0];
    for _ in 0..400 {
        fill(&mut moved, 1 << 20);
        fill(&mut other, 1 << 20);
        if let Some((id, SessionFrame::Data(data))) = next(&a) {
            bytes[usize::from(id == other.id())] += data.len();
            for session in [&moved, &other] {
                let received = bytes[usize::from(session.id() == other.id())] as u64;
                script.receive_frame(&a, session.id(), SessionFrame::Credit { received, limit: 1 << 40 });
            }
        }
    }
    bytes[0] as f64 / bytes[1] as f64
}

#[tokio::test(start_paused = true)]
async fn a_session_that_leaves_a_link_and_returns_has_the_same_share_as_before() {
    for returns in [0, 1, 3, 10] {
        let share = share(returns).await;
        assert!((0.9..1.1).contains(&share), "{share} after {returns} returns");
    }
}

#[tokio::test]
async fn resumes_that_alternate_between_two_links_leave_no_growing_queue() {
    let (script, links) = (Script::new(10), [1, 2].map(|_| link(1)));
    let links = [links[0].clone(), Link::new(LinkId(2), links[1].peer.clone(), Some(Instance::random()))];
    let session = script.accept_session(&links[0]).unwrap();
    let mine = script.table.instance();
    for epoch in 2..20_000 {
        let resume = resume_frame(epoch, mine);
        script.receive_frame(&links[usize::try_from(epoch).unwrap() % 2], session.id(), resume);
    }
    let waiting = links.map(|link| link.waiting());
    assert!(waiting.iter().all(|waiting| *waiting <= 2_000), "{waiting:?}");
}

/// A credit waits for its turn while answers, which go first, are pulled.
#[tokio::test]
async fn answered_resumes_leave_no_queued_credits() {
    let (script, link) = (Script::new(10), link(1));
    let session = script.accept_session(&link).unwrap();
    sent(&link);
    let mine = script.table.instance();
    for epoch in 2..5_000 {
        script.receive_frame(&link, session.id(), SessionFrame::Fin { total: 1 });
        let resume = resume_frame(epoch, mine);
        script.receive_frame(&link, session.id(), resume);
        assert!(matches!(next(&link), Some((_, SessionFrame::Resumed { .. }))));
    }
    assert!(link.waiting() <= 2, "{} entries wait", link.waiting());
}

// Sessions without an owner.

/// Ends a session whose remote has ended too and acknowledges nothing.
fn end_with_unread_bytes(script: &Script, link: &Arc<Link>, mut session: Session) -> SessionId {
    let id = session.id();
    fill(&mut session, 1000);
    finish(&mut session);
    script.receive_frame(link, id, SessionFrame::Fin { total: 1 });
    drop(session);
    sent(link);
    id
}

#[tokio::test(start_paused = true)]
async fn undelivered_bytes_of_a_finished_session_are_dropped_after_the_resume_timeout() {
    let (script, link) = (Script::new(10), link(1));
    let (opening, permit) = (script.open(&node(1)), Arc::new(()));
    opening.keep(permit.clone());
    let id = end_with_unread_bytes(&script, &link, script.accept_open(&link, opening));
    script.pass_time(GRACE - Duration::from_secs(10)).await;
    // The remote is only slow.
    script.receive_frame(&link, id, SessionFrame::Credit { received: 10, limit: 1 << 40 });
    script.pass_time(GRACE - Duration::from_secs(10)).await;
    assert_eq!((script.table.len(), Arc::strong_count(&permit)), (1, 2));
    script.pass_time(Duration::from_secs(15)).await;
    assert!(matches!(sent(&link)[..], [SessionFrame::Reset { .. }]));
    assert_eq!((script.table.len(), script.table.memory(), Arc::strong_count(&permit)), (0, (0, 0), 1));
    assert_eq!(script.metrics.truncated.counted("delivery_timeout"), 1);
}

#[tokio::test(start_paused = true)]
async fn finished_sessions_with_undelivered_bytes_are_evicted_for_new_ones() {
    let (script, link) = (Script::new(8), link(1));
    let all: Vec<_> = (0..8).map(|_| script.open_session(&link, &node(1))).collect();
    for session in all {
        end_with_unread_bytes(&script, &link, session);
    }
    let open = || {
        let target = "node1:22".parse().unwrap();
        script.table.open(node(1), target, SessionCategory::Ssh, "bob".into(), "connect")
    };
    assert!(open().is_err(), "the rest usually takes one RTT");
    script.pass_time(Duration::from_secs(10)).await;
    let mut opened = Vec::new();
    for _ in 0..8 {
        opened.push(open().unwrap());
        sent(&link);
    }
    assert!(open().is_err());
    assert_eq!((script.table.len(), script.metrics.truncated.counted("sessions")), (8, 8));
}

/// The remote says and acknowledges everything, and takes nothing from its link.
#[tokio::test(start_paused = true)]
async fn sessions_with_an_undelivered_last_frame_count_and_are_evicted_for_new_ones() {
    let (script, link, permit) = (Script::new(8), link(1), Arc::new(()));
    let open_with_permit = || {
        let opening = script.open(&node(1));
        opening.keep(permit.clone());
        script.accept_open(&link, opening)
    };
    let mut all: Vec<_> = (0..8).map(|_| open_with_permit()).collect();
    all.iter_mut().for_each(finish);
    sent(&link);
    for session in all {
        script.receive_frame(&link, session.id(), SessionFrame::Fin { total: 1 });
        script.receive_frame(&link, session.id(), SessionFrame::Credit { received: 1, limit: 1 << 40 });
    }
    assert_eq!((script.table.len(), Arc::strong_count(&permit)), (8, 9));
    script.pass_time(Duration::from_secs(10)).await;
    let opening = script.open(&node(1));
    assert_eq!((script.table.len(), Arc::strong_count(&permit)), (8, 8));
    script.pass_time(GRACE).await;
    assert_eq!((script.table.len(), Arc::strong_count(&permit)), (1, 1));
    assert_eq!(script.metrics.truncated.counted("sessions"), 0, "nothing was lost");
    drop(opening);
}

/// Both directions have ended, and the opener never sends its last frame.
fn close_without_last_frame(script: &Script, link: &Arc<Link>) {
    let mut session = script.accept_session(link).unwrap();
    let id = session.id();
    finish(&mut session);
    script.receive_frame(link, id, SessionFrame::Fin { total: 1 });
    sent(link);
    script.receive_frame(link, id, SessionFrame::Credit { received: 1, limit: 1 << 40 });
    sent(link);
}

#[tokio::test(start_paused = true)]
async fn a_session_without_the_last_frame_of_its_opener_ends_after_the_resume_timeout() {
    let (script, link) = (Script::new(8), link(1));
    close_without_last_frame(&script, &link);
    script.pass_time(GRACE - Duration::from_secs(10)).await;
    assert_eq!(script.table.len(), 1);
    script.pass_time(Duration::from_secs(20)).await;
    assert_eq!((script.table.len(), script.table.memory()), (0, (0, 0)));
    assert_eq!(script.metrics.truncated.counted("delivery_timeout"), 0, "nothing was lost");
}

#[tokio::test(start_paused = true)]
async fn sessions_that_wait_for_a_last_frame_block_no_new_session() {
    let script = Script::new(8);
    // An edge may have half of the places, and later ones a quarter.
    for (number, sessions) in [(1, 4), (2, 2), (3, 2)] {
        let edge = link(number);
        (0..sessions).for_each(|_| close_without_last_frame(&script, &edge));
    }
    let first = script.accept_session(&link(4)).expect("a place for another edge");
    script.pass_time(Duration::from_secs(10)).await;
    let second = script.accept_session(&link(4)).expect("a place for another edge");
    let opening = script.open(&node(1));
    assert_eq!(script.table.len(), 8);
    drop((first, second, opening));
}

#[tokio::test(start_paused = true)]
async fn the_longest_idle_session_of_the_client_with_most_sessions_is_evicted() {
    let script = Script::new(40);
    let (busy, other) = (link(1), link(2));
    let sessions: Vec<_> = (0..20).map(|_| script.accept_session(&busy).unwrap()).collect();
    let more: Vec<_> = [3, 4]
        .map(link)
        .iter()
        .flat_map(|edge| [0; 10].map(|_| script.accept_session(edge).unwrap()))
        .collect();
    // All but one are used.
    for _ in 0..3 {
        script.pass_time(Duration::from_secs(5)).await;
        for (at, session) in sessions.iter().enumerate() {
            if at != 15 {
                script.receive_frame(&busy, session.id(), SessionFrame::Data("x".into()));
            }
        }
    }
    script.pass_time(Duration::from_secs(5)).await;
    sent(&busy);
    let newcomer = script.accept_session(&other).unwrap();
    assert!(sessions[15].ended().is_some_and(|why| why.code == ErrorCode::Overloaded));
    let ended = sessions.iter().chain(&more).filter(|session| session.ended().is_some()).count();
    assert_eq!(ended, 1);
    drop(newcomer);
}

// Shares of relays.

#[tokio::test]
async fn relayed_sessions_of_one_edge_leave_permits_for_other_edges() {
    let script = Script::new(16);
    let acceptor = link(9);
    let relays = |edge: &Arc<Link>, sessions: usize| -> usize {
        let relayed = || {
            let (id, node) = (SessionId::random(), node(9));
            let key = SessionKey { id, category: SessionCategory::Ssh, node };
            match script.table.on_frame(edge, key, open_frame(1), Instant::now()) {
                Some(FrameEvent::RelayRequest(request)) => request.pass(&acceptor),
                _ => return false,
            }
            true
        };
        (0..sessions).filter(|_| relayed()).count()
    };
    assert_eq!(relays(&link(1), 16), 8, "half of the places while others need none");
    assert_eq!(relays(&link(2), 16), 4, "a quarter afterwards");
    assert_eq!(relays(&link(3), 2), 2);
    // Sessions that others open to an edge are not its own.
    assert_eq!(relays(&acceptor, 1), 1);
}

// Links that replace one another.

fn linked(link: &Arc<Link>) -> LinkedNode {
    LinkedNode { link: link.clone(), from: ([127, 0, 0, 1], 1).into() }
}

/// Checks that a node's waiter is woken, and finds the older link, once the backup link is gone.
fn assert_waiter_finds_the_older_link(remove: impl Fn(&Registry, &Link)) {
    let registry = Registry::new(Metrics::server("", ""));
    let older = link(1);
    let backup = Link::new(LinkId(2), older.peer.clone(), older.instance);
    registry.insert(linked(&older), false);
    registry.insert(linked(&backup), true);
    let node = node(1);
    let arrival = registry.arrival(&node);
    assert!(arrival.wait().now_or_never().is_none());
    remove(&registry, &backup);
    assert!(arrival.wait().now_or_never().is_some());
    assert_eq!(registry.link_of(&node).map(|linked| linked.link.id), Some(older.id));
}

#[tokio::test]
async fn a_waiter_finds_an_older_link_that_is_primary_again() {
    assert_waiter_finds_the_older_link(Registry::remove);
    assert_waiter_finds_the_older_link(Registry::retire_link);
}
