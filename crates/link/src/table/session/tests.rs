//! Tests of sessions and the links that have them as members.

use std::future::{Future as _, poll_fn};
use std::pin::pin;
use std::sync::Arc;
use std::task::{Context, Poll, Wake, Waker};
use std::time::Duration;

use futures_util::FutureExt as _;
use tokio::time::Instant;

use crate::link::Link;
use crate::plain::PlainRemote;
use crate::schedule::frame_source::{FrameSource as _, QueueMembership, QueuedSource, Turn};
use crate::table::handles::{OpenOutcome, PendingOpen, Session};
use crate::table::session::{Inner, SessionOrigin, SharedSession};
use crate::table::{FrameEvent, SessionLimits, SessionTable};
use tunnel_base::metrics::Metrics;
use tunnel_net::ChunkStream as _;
use tunnel_proto::budget::Budget;
use tunnel_proto::frame::{
    ErrorCode, Frame, FrameKind, Remote, SessionCategory, SessionError, SessionFrame, SessionKey,
};
use tunnel_proto::halves::WindowLimits;
use tunnel_proto::halves::recv::RecvHalf;
use tunnel_proto::halves::send::SendHalf;
use tunnel_proto::names::{Instance, NodeName, SessionId};
use tunnel_proto::state::{LinkId, SessionState};

fn table() -> Arc<SessionTable> {
    let limits = SessionLimits {
        windows: WINDOWS,
        memory: 1 << 20,
        sessions: 10,
        resume_timeout: Duration::from_secs(60),
        max_resume_timeout: Duration::ZERO,
    };
    SessionTable::new(Instance::from_bits(1), limits, Metrics::edge())
}

fn link(id: u64) -> Arc<Link> {
    Link::new(LinkId(id), Remote::Edge("node1".parse().unwrap()), Some(Instance::random()))
}

fn opener(table: &Arc<SessionTable>) -> Arc<SharedSession> {
    opener_with(table, 1000, &Budget::new(1 << 20))
}

fn opener_with(table: &Arc<SessionTable>, reserved: usize, budget: &Arc<Budget>) -> Arc<SharedSession> {
    let halves =
        (SendHalf::new(budget.reservation()), RecvHalf::new(WINDOWS, budget.try_reserve(reserved).unwrap()));
    let end = SessionState::opener("node1:22".parse().unwrap(), "me".into(), halves.0, halves.1);
    let key = key(SessionId::random());
    let session =
        SharedSession::new(key, table, "me".into(), SessionOrigin::Here { listener: "test" }, end, None);
    table.insert(&session).unwrap();
    session
}

fn key(id: SessionId) -> SessionKey {
    SessionKey { id, category: SessionCategory::Ssh, node: "node1".parse().unwrap() }
}

fn ask(session: &Arc<SharedSession>, link: &Arc<Link>) {
    let again = session.lock().state.needs_path();
    session.ask(link, None, again);
}

/// A waker's task may own another session, which is reset when the task is dropped with its last waker.
struct SessionOwner(#[expect(dead_code, reason = "only dropped")] Session);

impl Wake for SessionOwner {
    fn wake(self: Arc<Self>) {}
}

#[test]
fn a_replaced_waker_is_dropped_without_the_lock() {
    let (table, link, now) = (table(), link(1), Instant::now());
    let opening = PendingOpen::new(opener(&table));
    let owner = || Waker::from(Arc::new(SessionOwner(Session::new(opener(&table)))));
    opening.ask(&link, None);
    let polled = |waker: &Waker| pin!(opening.answer()).poll(&mut Context::from_waker(waker)).is_pending();
    assert!(polled(&owner()) && polled(Waker::noop()));
    let opened = SessionFrame::opened(0, 1);
    assert!(table.on_frame(&link, key(opening.id()), opened, now).is_none());
    let mut session = opening.into_session();
    let mut write = |waker: &Waker, bytes: &'static str| {
        session.poll_write_chunk(&mut Context::from_waker(waker), &mut bytes.into())
    };
    assert!(write(Waker::noop(), "all that fits").is_ready());
    assert!(write(&owner(), "more").is_pending() && write(Waker::noop(), "more").is_pending());
    let mut read = |waker: &Waker| session.poll_read_chunk(&mut Context::from_waker(waker)).is_pending();
    assert!(read(&owner()) && read(Waker::noop()));
    let mut lost = |waker: &Waker| session.poll_lost(&mut Context::from_waker(waker)).is_pending();
    assert!(lost(&owner()) && lost(Waker::noop()));
    drop(session);
    assert_eq!(table.len(), 1, "only this session waits for its last frame, and each owned one has ended");
}

/// Two tasks read the links of one node. Both may find no session of that id before either has added one.
#[test]
fn one_session_requested_on_two_links_at_once_is_one_session() {
    let table = table();
    let id = SessionId::random();
    let open = |epoch| SessionFrame::Open {
        target: "node1:22".parse().unwrap(),
        limit: 1000,
        epoch,
        client: "me".into(),
        opener: None,
        resume_timeout: None,
        boot: None,
    };
    let (first, second) = (link(1), link(2));
    let offer = table.on_open(&first, key(id), open(1));
    assert!(table.on_open(&second, key(id), open(2)).is_none());
    assert_eq!(table.len(), 1);
    drop(offer);
    assert!(frames_on(&first).is_empty(), "the newer request moves the session to its link");
    assert!(matches!(frames_on(&second)[..], [SessionFrame::Refused { epoch: 2, .. }]));
    assert_eq!(table.len(), 0);
    assert!(table.clients.lock().get(&id).is_none(), "its client is forgotten with it");
}

#[tokio::test]
async fn a_session_that_is_over_before_its_opener_looks_was_open() {
    let now = Instant::now();
    for (data, total) in [(Some("banner"), 7), (None, 1)] {
        let (table, link) = (table(), link(1));
        let session = opener(&table);
        let opening = PendingOpen::new(session.clone());
        opening.ask(&link, None);
        let opened = SessionFrame::opened(9, 1);
        let over = SessionFrame::Reset { epoch: 1, refusal: SessionError::new(ErrorCode::NoError, "closed") };
        let data_frame = data.map(|data| SessionFrame::Data(data.into()));
        for frame in
            [Some(opened), data_frame, Some(SessionFrame::Fin { total }), Some(over)].into_iter().flatten()
        {
            assert!(session.on_frame(&link, frame, now));
        }
        assert_eq!(opening.answer().await, OpenOutcome::Open);
        let mut owned = opening.into_session();
        for want in data.into_iter().chain([""]) {
            assert_eq!(poll_fn(|cx| owned.poll_read_chunk(cx)).await.unwrap(), want);
        }
    }
}

#[tokio::test]
async fn the_least_round_trip_of_a_way_is_known_only_where_the_link_leads_to_the_far_end() {
    let (table, [near, behind]) = (table(), [2, 3].map(Instance::from_bits));
    let node = NodeName::none;
    for (peer, end, known) in [
        (Remote::Edge(node()), None, true),
        (Remote::Peer, Some(near), true),
        (Remote::Peer, Some(behind), false),
        (Remote::Peer, None, false),
        (Remote::Server(node()), Some(near), true),
        (Remote::Server(node()), Some(behind), false),
    ] {
        let link = Link::new(LinkId(1), peer, Some(near));
        let session = opener(&table);
        session.ask(&link, end, false);
        session.on_frame(
            &link,
            SessionFrame::Opened { limit: 9, epoch: 1, instance: end, place: None, resume_timeout: None },
            Instant::now(),
        );
        let least = || session.path_rtt(&session.lock()).least;
        assert_eq!(least(), None, "no ping was answered yet");
        link.ping();
        let sent = poll_fn(|cx| link.poll_pull(cx, Instant::now())).await.unwrap().body;
        let FrameKind::Ping(Some(number)) = sent else { panic!("{sent:?}") };
        link.handle_pong(number, Instant::now());
        assert_eq!(least().is_some(), known, "{:?} {end:?}", link.peer);
    }
}

#[tokio::test]
async fn a_session_that_is_cut_short_never_seems_to_have_ended_in_order() {
    let (now, why) = (Instant::now(), SessionError::new(ErrorCode::Overloaded, "no memory left for it"));
    for (table_ends_it, finishes) in [(true, false), (true, true), (false, false), (false, true)] {
        let (table, link) = (table(), link(1));
        let session = opener(&table);
        let opening = PendingOpen::new(session.clone());
        opening.ask(&link, None);
        for frame in
            [SessionFrame::opened(9, 1), SessionFrame::Data("unread".into()), SessionFrame::Fin { total: 7 }]
        {
            assert!(session.on_frame(&link, frame, now));
        }
        let mut owned = opening.into_session();
        if finishes {
            poll_fn(|cx| owned.poll_finish(cx)).await.unwrap();
            assert!(frames_on(&link).iter().any(|word| matches!(word, SessionFrame::Fin { .. })));
            assert!(session.on_frame(&link, SessionFrame::Credit { received: 1, limit: 9 }, now));
        }
        match table_ends_it {
            true => table.reset_on(&link, &why),
            false => session.reset_unread(why.clone()),
        }
        let read = poll_fn(|cx| owned.poll_read_chunk(cx)).await;
        match read {
            Ok(bytes) => assert_eq!(bytes, "unread", "all received bytes are readable"),
            Err(why) => assert!(why.to_string().contains("no memory left for it")),
        }
    }
}

#[tokio::test]
async fn who_opens_a_session_takes_it_up_on_no_other_link_once_it_was_open() {
    let (table, links) = (table(), [link(1), link(2)]);
    let session = opener(&table);
    session.ask(&links[0], None, false);
    let opened = SessionFrame::Opened {
        limit: 9,
        epoch: 1,
        instance: Some(Instance::from_bits(2)),
        place: None,
        resume_timeout: None,
    };
    let now = Instant::now();
    assert!(
        session.on_frame(&links[0], opened, now)
            && session.on_frame(&links[0], SessionFrame::PathLost { epoch: 1 }, now)
    );
    session.ask(&links[1], None, false);
    assert!(session.lock().state.path().is_none());
    session.ask(&links[1], None, true);
    assert_eq!(session.lock().state.path(), Some(links[1].id));
}

/// The link carries sessions of others. The session leaves no path again, whatever its remote sends.
#[tokio::test]
async fn a_client_that_reads_no_answers_loses_a_session_without_memory_and_no_other_its_link() {
    let (table, link, now) = (table(), link(1), Instant::now());
    let session = opener_with(&table, 10, &Budget::new(10));
    ask(&session, &link);
    assert_eq!(frames_on(&link).len(), 1);
    assert!(session.on_frame(&link, SessionFrame::opened(9, 1), now));
    let refused =
        || SessionFrame::Refused { epoch: 1, refusal: SessionError::new(ErrorCode::Overloaded, "") };
    for n in 0..1000 {
        link.reply_to(&"me".into(), &key(SessionId::from_bits(n)), refused());
    }
    assert!(session.on_frame(&link, SessionFrame::Data(vec![0; 500].into()), now));
    assert!(!link.is_closed() && session.read(SessionState::is_orphaned));
    let mut sent = frames_on(&link).into_iter();
    assert_eq!(sent.next(), Some(SessionFrame::PathLost { epoch: 1 }));
    assert!(sent.all(|frame| frame == refused()));
}

#[tokio::test]
async fn a_session_that_is_over_joins_no_link() {
    let (table, link) = (table(), link(1));
    let session = opener(&table);
    session.reset(SessionError::new(ErrorCode::Cancelled, "enough"));
    ask(&session, &link);
    assert_eq!(link.sessions(), 0);
}

#[tokio::test]
async fn a_session_that_moves_to_a_dead_link_leaves_the_one_before() {
    let (table, alive, dead) = (table(), link(1), link(2));
    let closed = SessionError::new(ErrorCode::Cancelled, "link closed");
    assert_eq!(table.link_ended(&dead, &closed, Instant::now()), 0);
    let session = opener(&table);
    ask(&session, &alive);
    assert_eq!(alive.sessions(), 1);
    ask(&session, &dead);
    assert_eq!((alive.sessions(), dead.sessions()), (0, 0));
    // An edge redials at once after the end of a link that was used, even if its sessions were over by then.
    assert_eq!((alive.has_carried(), dead.has_carried()), (true, false));
    table.link_ended(&alive, &closed, Instant::now());
    assert!(alive.has_carried(), "its end is no reason to forget that");
}

#[tokio::test]
async fn a_session_has_one_seeker_however_often_it_loses_its_path() {
    let (table, links, now) = (table(), [link(1), link(2), link(3)], Instant::now());
    let session = opener(&table);
    ask(&session, &links[0]);
    assert!(session.on_frame(&links[0], SessionFrame::opened(0, 1), now));
    let closed = SessionError::new(ErrorCode::Cancelled, "link closed");
    let parked = || table.next_parked().now_or_never();
    table.link_ended(&links[0], &closed, now);
    let mut first = parked().unwrap();
    first.resume(&links[1]);
    table.link_ended(&links[1], &closed, now);
    assert!(parked().is_none(), "its seeker notices that itself");
    assert!(first.needs_path());
    first.resume(&links[2]);
    assert!(session.on_frame(&links[2], SessionFrame::Resumed { received: 0, limit: 0, epoch: 3 }, now));
    assert!(!first.needs_path());
    table.link_ended(&links[2], &closed, now);
    assert!(parked().is_some(), "the first has done its work");
    assert!(!first.needs_path(), "the second one takes over");
}

#[tokio::test]
async fn a_session_whose_seeker_was_lost_gets_another() {
    let (table, links, now) = (table(), [link(1), link(2)], Instant::now());
    let session = opener(&table);
    ask(&session, &links[0]);
    assert!(session.on_frame(&links[0], SessionFrame::opened(0, 1), now));
    let closed = SessionError::new(ErrorCode::Cancelled, "link closed");
    table.link_ended(&links[0], &closed, now);
    drop(table.next_parked().now_or_never().unwrap());
    assert!(table.next_parked().now_or_never().is_some());
}

#[tokio::test]
async fn an_opening_requested_on_a_plain_link_first_has_a_limit_on_the_next_one() {
    let (table, link) = (table(), link(2));
    let plain = Link::new(LinkId(1), Remote::Edge("node1".parse().unwrap()), None);
    let _remote = PlainRemote::of(&plain, &table, Duration::ZERO);
    let session = opener(&table);
    let mut limits = Vec::new();
    for link in [&plain, &link] {
        session.ask(link, None, false);
        let stay = session.lock().stay;
        let mut turn = Turn::Credit(QueuedSource { source: session.clone(), stay });
        let frame = session.clone().next_frame(link.id, &mut turn, Instant::now()).frame;
        let Some(SessionFrame::Open { limit, .. }) = frame else { panic!("{frame:?}") };
        limits.push(limit);
    }
    assert_eq!(limits, [u64::MAX, WINDOWS.start]);
}

#[tokio::test]
async fn an_opening_that_is_reset_from_elsewhere_was_never_open() {
    let (table, link) = (table(), link(1));
    let (node, target) = ("node1".parse().unwrap(), "node1:22".parse().unwrap());
    let opening = table.open(node, target, SessionCategory::Ssh, "c".into(), "test").unwrap();
    opening.ask(&link, None);
    assert_eq!(frames_on(&link).len(), 1);
    let why = SessionError::new(ErrorCode::NotAllowed, "its token is revoked");
    table.reset_on(&link, &why);
    assert_eq!(opening.answer().await, OpenOutcome::Refused(why));
}

/// Returns the frames that the session sends on that link.
fn frames_on(link: &Arc<Link>) -> Vec<SessionFrame> {
    let mut cx = Context::from_waker(Waker::noop());
    let pulled = std::iter::from_fn(|| match link.poll_pull(&mut cx, Instant::now()) {
        Poll::Ready(frame) => frame,
        Poll::Pending => None,
    });
    let word = |frame: Frame| match frame.body {
        FrameKind::Session(_, _, word) => Some(word),
        _ => None,
    };
    pulled.filter_map(word).collect()
}

/// An Open over one link is late; a newer one over another link was refused because of a limit.
#[tokio::test]
async fn an_opening_that_is_refused_leaves_no_acceptor_of_an_older_open() {
    for late in [false, true] {
        let (here, there) = (table(), table());
        let links = [link(1), link(2)];
        let far = [1, 2].map(|id| {
            Link::new(LinkId(id), Remote::Server("node1".parse().unwrap()), Some(Instance::random()))
        });
        let (node, target) = ("node1".parse().unwrap(), "node1:22".parse().unwrap());
        let opening = here.open(node, target, SessionCategory::Ssh, "c".into(), "test").unwrap();
        let key = key(opening.id());
        let hears = |at: &Arc<SessionTable>, link: &Arc<Link>, frame: &SessionFrame| {
            at.on_frame(link, key.clone(), frame.clone(), Instant::now())
        };
        opening.ask(&links[0], None);
        let older = frames_on(&links[0]).pop().unwrap();
        opening.ask(&links[1], None);
        assert!(matches!(frames_on(&links[1])[..], [SessionFrame::Open { epoch: 2, .. }]));
        let busy = SessionError::new(ErrorCode::Overloaded, "no room");
        hears(&here, &links[1], &SessionFrame::Refused { epoch: 2, refusal: busy.clone() });
        assert_eq!(opening.answer().await, OpenOutcome::Refused(busy));
        drop(opening);
        let resume = frames_on(&links[1]).pop().unwrap();
        let offer = if late { None } else { hears(&there, &far[0], &older) };
        assert!(late || matches!(offer, Some(FrameEvent::Incoming(_))));
        hears(&there, &far[1], &resume);
        if late {
            assert!(hears(&there, &far[0], &older).is_none(), "it must open nothing");
        }
        let answer = frames_on(&far[1]).pop().unwrap();
        let expected = if late { ErrorCode::UnknownSession } else { ErrorCode::Cancelled };
        assert!(
            matches!(&answer, SessionFrame::Reset { epoch: 3, refusal } if refusal.code == expected),
            "{answer:?}"
        );
        hears(&here, &links[1], &answer);
        assert!(here.is_empty() && there.is_empty(), "{late}");
    }
}

#[tokio::test]
async fn credits_that_wait_are_no_reason_to_refuse_a_session() {
    let windows = WindowLimits { start: 16, max: 16 };
    let limits = SessionLimits {
        windows,
        memory: 1 << 20,
        sessions: 2000,
        resume_timeout: Duration::from_secs(60),
        max_resume_timeout: Duration::ZERO,
    };
    let (table, now) = (SessionTable::new(Instance::from_bits(1), limits, Metrics::edge()), Instant::now());
    let link = Link::new(LinkId(1), Remote::Server("node1".parse().unwrap()), Some(Instance::random()));
    let on_frame = |id, frame| table.on_frame(&link, key(id), frame, now);
    let open = || SessionFrame::Open {
        target: "[::1]:1".parse().unwrap(),
        limit: 1,
        epoch: 1,
        client: String::new(),
        opener: None,
        resume_timeout: None,
        boot: None,
    };
    let mut cx = Context::from_waker(Waker::noop());
    let mut sessions = Vec::new();
    for _ in 0..1001 {
        let Some(FrameEvent::Incoming(offer)) = on_frame(SessionId::random(), open()) else {
            panic!("refused")
        };
        sessions.push(offer.accept());
        while link.poll_pull(&mut cx, now).is_ready() {}
    }
    // Each has an end of stream to acknowledge, and the link no longer takes anything.
    for session in &sessions {
        let _ = on_frame(session.id(), SessionFrame::Fin { total: 1 });
    }
    assert!(link.waiting() > 1000);
    let offered = on_frame(SessionId::random(), open());
    assert!(matches!(offered, Some(FrameEvent::Incoming(_))), "{offered:?}");
}

const WINDOWS: WindowLimits = WindowLimits { start: 1000, max: 4000 };

#[tokio::test]
async fn who_waits_with_a_credit_asks_again_once_it_is_needed() {
    let (table, link) = (table(), link(1));
    let session = opener(&table);
    session.ask(&link, None, false);
    let opened = SessionFrame::opened(9, 1);
    assert!(session.on_frame(&link, opened, Instant::now()));
    let mut inner = session.lock();
    inner.places = QueueMembership::default();
    let taken = |inner: &mut Inner| inner.take_request().map(|(_, request)| (request.credit, request.needed));
    assert_eq!(taken(&mut inner), None);
    inner.state.recv.data(vec![0; 500].into(), Instant::now()).unwrap();
    // Bytes that are not read need no credit.
    inner.state.recv.discard();
    assert_eq!(taken(&mut inner), Some((true, false)));
    assert_eq!(taken(&mut inner), None);
    inner.state.recv.finish(501).unwrap();
    assert_eq!(taken(&mut inner), Some((false, true)));
    assert_eq!(taken(&mut inner), None);
}
