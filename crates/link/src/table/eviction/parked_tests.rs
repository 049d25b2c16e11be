//! Tests of sessions of users' links at an edge, which wait for a path for hours.

use std::future::poll_fn;
use std::sync::Arc;
use std::task::{Context, Poll, Waker};
use std::time::Duration;

use bytes::Bytes;
use tokio::time::{Instant, advance};

use crate::link::Link;
use crate::table::handles::Session;
use crate::table::{FrameEvent, SessionLimits, SessionTable};
use tunnel_base::metrics::Metrics;
use tunnel_net::ChunkStream as _;
use tunnel_proto::frame::{
    ErrorCode, FrameKind, Remote, SessionCategory, SessionError, SessionFrame, SessionKey,
};
use tunnel_proto::halves::WindowLimits;
use tunnel_proto::names::{Instance, SessionId};
use tunnel_proto::state::LinkId;

const HOUR: Duration = Duration::from_secs(60 * 60);
const MAX: Duration = Duration::from_secs(12 * 60 * 60);
const MEMORY: usize = 4 << 20;

/// A table with one link.
struct Process {
    table: Arc<SessionTable>,
    link: Arc<Link>,
}

impl Process {
    fn new(peer: Remote) -> Self {
        let limits = SessionLimits {
            windows: WindowLimits { start: 32 << 10, max: 1 << 20 },
            memory: MEMORY,
            sessions: 1000,
            resume_timeout: Duration::from_secs(60),
            max_resume_timeout: MAX,
        };
        let table = SessionTable::new(Instance::from_bits(1), limits, Metrics::edge());
        Self { table, link: link(1, peer) }
    }

    fn edge() -> Self {
        Self::new(Remote::Server("node1".parse().unwrap()))
    }

    /// Opens a session whose Open names this opener and asks for this time. Returns it with what was granted.
    fn open(&self, opener: Option<&str>, asked: Option<Duration>) -> (Session, Option<Duration>) {
        self.open_after(None, opener, asked)
    }

    /// The same after this boot of the opener's machine.
    fn open_after(
        &self,
        boot: Option<u128>,
        opener: Option<&str>,
        asked: Option<Duration>,
    ) -> (Session, Option<Duration>) {
        let user = opener.and_then(|opener| opener.strip_prefix("client/")).unwrap_or("me");
        let open = SessionFrame::Open {
            target: "node1:22".parse().unwrap(),
            limit: 1 << 30,
            epoch: 1,
            client: format!("{user}@10.0.0.1:4711"),
            opener: opener.map(|opener| opener.parse().unwrap()),
            resume_timeout: asked,
            boot,
        };
        let event = self.table.on_frame(&self.link, key(SessionId::random()), open, Instant::now());
        let Some(FrameEvent::Incoming(offer)) = event else { panic!("{event:?}") };
        let session = offer.accept();
        let sent = frames_on(&self.link);
        let [SessionFrame::Opened { resume_timeout, .. }] = sent[..] else { panic!("{sent:?}") };
        (session, resume_timeout)
    }

    /// Opens a session of that device.
    fn login(&self, device: &str) -> Session {
        self.open(Some(&format!("client/{device}")), Some(MAX)).0
    }

    /// Ends the link of all sessions so far. The next ones have another one.
    fn lose_link(&mut self) {
        let next = link(self.link.id.0 + 1, self.link.peer.clone());
        let lost = std::mem::replace(&mut self.link, next);
        let why = SessionError::new(ErrorCode::Internal, "lost");
        self.table.link_ended(&lost, &why, Instant::now());
    }

    async fn wait(&self, time: Duration) {
        advance(time).await;
        self.table.tick(Instant::now());
    }
}

fn link(id: u64, peer: Remote) -> Arc<Link> {
    Link::new(LinkId(id), peer, Some(Instance::from_bits(9)))
}

fn key(id: SessionId) -> SessionKey {
    SessionKey { id, category: SessionCategory::Ssh, node: "node1".parse().unwrap() }
}

fn frames_on(link: &Arc<Link>) -> Vec<SessionFrame> {
    let mut cx = Context::from_waker(Waker::noop());
    let mut frames = Vec::new();
    while let Poll::Ready(Some(frame)) = link.poll_pull(&mut cx, Instant::now()) {
        if let FrameKind::Session(_, _, frame) = frame.body {
            frames.push(frame);
        }
    }
    frames
}

async fn write(session: &mut Session, bytes: usize) {
    poll_fn(|cx| session.poll_write_chunk(cx, &mut Bytes::from(vec![7; bytes]))).await.unwrap();
}

fn why(session: &Session) -> String {
    session.ended().map(|why| why.reason).unwrap_or_default()
}

#[tokio::test(start_paused = true)]
async fn only_a_users_session_waits_for_longer_and_not_longer_than_was_granted() {
    let alice = Some("client/alice/laptop");
    let server = "server/0000000000000000000000000000000a";
    let minute = Duration::from_secs(60);
    for (opener, asked, granted) in [
        (alice, Some(MAX * 2), Some(MAX)),
        (alice, Some(HOUR), Some(HOUR)),
        (alice, Some(minute / 2), Some(minute / 2)),
        (alice, None, None),
        (Some("node/edge2"), Some(MAX), None),
        (Some(server), Some(MAX), None),
        (None, Some(MAX), None),
    ] {
        let mut edge = Process::edge();
        let (session, answer) = edge.open(opener, asked);
        assert_eq!(answer, granted, "{opener:?} {asked:?}");
        edge.lose_link();
        let kept = granted.unwrap_or(minute);
        edge.wait(kept - Duration::from_secs(1)).await;
        assert_eq!(session.ended(), None, "{opener:?} {asked:?}");
        edge.wait(Duration::from_secs(1)).await;
        assert!(why(&session).starts_with("no path for"), "{opener:?} {asked:?}: {}", why(&session));
    }
}

#[tokio::test(start_paused = true)]
async fn the_end_of_a_session_without_a_path_names_whose_line_was_lost() {
    for (opener, is_linked, whose) in [
        ("client/alice/laptop", true, "alice/laptop did not resume it, and this machine is linked"),
        ("node/edge2", true, "its opener did not resume it, and this machine is linked"),
        ("client/alice/laptop", false, "this machine has no link to a server"),
    ] {
        let mut edge = Process::edge();
        let (session, _) = edge.open(Some(opener), None);
        edge.lose_link();
        if is_linked {
            edge.table.metrics.links.opened("server");
        }
        edge.wait(Duration::from_secs(60)).await;
        assert_eq!(why(&session), format!("no path for 1 min: {whose}"));
    }
}

/// A server passes on what a user asks, within its own limit, and keeps nothing of it.
#[test]
fn a_server_bounds_what_a_user_asks_and_lets_no_other_ask() {
    let device = "alice/laptop";
    for (peer, opener, granted) in [
        (Remote::User(device.parse().unwrap()), None, Some(MAX)),
        (Remote::Peer, Some("client/alice/laptop"), Some(MAX)),
        (Remote::Peer, Some("node/edge2"), None),
        (Remote::Edge("edge2".parse().unwrap()), Some("client/alice/laptop"), None),
    ] {
        let server = Process::new(peer.clone());
        let edge = Link::new(LinkId(7), Remote::Edge("node1".parse().unwrap()), Some(Instance::from_bits(7)));
        let open = || SessionFrame::Open {
            target: "node1:22".parse().unwrap(),
            limit: 1000,
            epoch: 1,
            client: "me".into(),
            opener: opener.map(|opener| opener.parse().unwrap()),
            resume_timeout: Some(MAX * 2),
            boot: None,
        };
        let [passed, accepted] = [0; 2].map(|_| {
            let event = server.table.on_frame(&server.link, key(SessionId::random()), open(), Instant::now());
            let Some(FrameEvent::RelayRequest(request)) = event else { panic!("{event:?}") };
            request
        });
        passed.pass(&edge);
        let sent = frames_on(&edge);
        let [SessionFrame::Open { resume_timeout, .. }] = sent[..] else { panic!("{sent:?}") };
        assert_eq!(resume_timeout, granted, "{peer:?} {opener:?}");
        // Where a server itself is the end, as with a plain remote.
        let _session = accepted.offer().unwrap().accept();
        let sent = frames_on(&server.link);
        let [SessionFrame::Opened { resume_timeout: None, .. }] = sent[..] else { panic!("{sent:?}") };
    }
}

#[tokio::test(start_paused = true)]
async fn a_device_keeps_its_newest_eight_and_users_share_what_a_node_keeps() {
    let mut edge = Process::edge();
    let mut of_alice = Vec::new();
    for device in ["alice/a", "alice/b", "alice/c", "alice/d", "alice/e"] {
        for _ in 0..9 {
            of_alice.push(edge.login(device));
            edge.lose_link();
            advance(Duration::from_millis(100)).await;
        }
    }
    let of_bob = edge.login("bob/a");
    edge.lose_link();
    edge.wait(Duration::from_secs(50)).await;
    assert_eq!(edge.table.len(), 46, "in the first minute nothing is counted");
    edge.wait(Duration::from_secs(20)).await;
    assert_eq!((edge.table.len(), of_bob.ended()), (32, None));
    let places: Vec<usize> = (0..45).filter(|place| of_alice[*place].ended().is_some()).collect();
    // The oldest of each device, and then her oldest of all.
    assert_eq!(places, [0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 18, 27, 36]);
    assert!(why(&of_alice[0]).contains("its device has 8 other sessions"), "{}", why(&of_alice[0]));
    assert!(why(&of_alice[1]).contains("32 other sessions"), "{}", why(&of_alice[1]));
    assert!(of_alice[44].ended().is_none());
}

#[tokio::test(start_paused = true)]
async fn a_device_keeps_its_login_before_sessions_that_wait_for_minutes() {
    let mut edge = Process::edge();
    let login = edge.login("alice/a");
    let pages: Vec<Session> =
        (0..9).map(|_| edge.open(Some("client/alice/a"), Some(10 * HOUR / 60)).0).collect();
    edge.lose_link();
    edge.wait(Duration::from_secs(70)).await;
    assert_eq!((edge.table.len(), login.ended()), (8, None));
    assert_eq!(pages.iter().filter(|page| page.ended().is_some()).count(), 2);
}

#[tokio::test(start_paused = true)]
async fn idle_logins_take_little_and_the_largest_end_first() {
    let mut edge = Process::edge();
    let mut logins: Vec<Session> = (0..32).map(|n| edge.login(&format!("user{n}/a"))).collect();
    for (login, bytes) in logins.iter_mut().zip([0, 700_000, 500_000, 300_000, 100_000]) {
        write(login, bytes).await;
    }
    let open = edge.table.memory();
    edge.lose_link();
    for _ in 0..3 {
        edge.wait(Duration::from_secs(30)).await;
    }
    let ended: Vec<usize> = (0..32).filter(|place| logins[*place].ended().is_some()).collect();
    assert_eq!(ended, [1, 2], "the quarter of 1 MiB has room for the others");
    assert!(why(&logins[1]).contains("it keeps most"), "{}", why(&logins[1]));
    assert_eq!(edge.table.metrics.truncated.counted("memory"), 2);
    let (reserved, unacked) = edge.table.memory();
    assert!(reserved <= 32 * 4096 && reserved < open.0, "{reserved} of {}", open.0);
    assert!(unacked < 500_000, "{unacked}");
}

#[tokio::test(start_paused = true)]
async fn a_target_that_writes_to_nobody_is_stopped_after_a_minute() {
    let mut edge = Process::edge();
    let mut login = edge.login("alice/laptop");
    edge.lose_link();
    edge.wait(Duration::from_secs(59)).await;
    for _ in 0..3 {
        write(&mut login, 1000).await;
    }
    edge.wait(Duration::from_secs(1)).await;
    let mut cx = Context::from_waker(Waker::noop());
    assert!(login.poll_write_chunk(&mut cx, &mut Bytes::from_static(b"more")).is_pending());
}

#[tokio::test(start_paused = true)]
async fn what_a_target_left_is_delivered_hours_after_it_has_gone() {
    let mut edge = Process::edge();
    let mut login = edge.login("alice/laptop");
    let id = login.id();
    edge.lose_link();
    write(&mut login, 1000).await;
    login.break_off(SessionError::new(ErrorCode::ConnectionFailed, "the target is gone"));
    edge.wait(HOUR * 7).await;
    let resume = SessionFrame::Resume {
        received: 0,
        limit: 1 << 30,
        epoch: 2,
        instance: Some(edge.table.instance()),
        opener: Some("client/alice/laptop".parse().unwrap()),
        target: "node1:22".parse().unwrap(),
        place: None,
    };
    edge.table.on_frame(&edge.link, key(id), resume, Instant::now());
    edge.wait(Duration::from_secs(5)).await;
    let sent = frames_on(&edge.link);
    let [SessionFrame::Resumed { .. }, SessionFrame::Data(bytes), SessionFrame::ResetAt { total: 1001, .. }] =
        &sent[..]
    else {
        panic!("{sent:?}")
    };
    assert_eq!(bytes.len(), 1000);
    assert_eq!(edge.table.metrics.truncated.counted("delivery_timeout"), 0);
}

#[tokio::test(start_paused = true)]
async fn a_refused_resume_ends_the_openers_session_and_only_one_that_waits() {
    let mut edge = Process::edge();
    let login = edge.login("alice/laptop");
    let other = edge.login("alice/laptop");
    let revoke = |edge: &Process, id: SessionId, opener: &str| {
        let refusal = SessionError::new(ErrorCode::NotAllowed, "no rule lets her");
        let opener = format!("client/{opener}").parse().ok();
        let frame = SessionFrame::Revoked { opener, refusal };
        assert!(edge.table.on_frame(&edge.link, key(id), frame, Instant::now()).is_none());
    };
    revoke(&edge, login.id(), "alice/laptop");
    assert_eq!(login.ended(), None, "it runs");
    edge.lose_link();
    revoke(&edge, login.id(), "bob/laptop");
    revoke(&edge, login.id(), "alice/phone");
    assert_eq!(login.ended(), None, "of another opener");
    revoke(&edge, login.id(), "alice/laptop");
    assert_eq!((why(&login).as_str(), other.ended()), ("no rule lets her", None));
}

#[tokio::test(start_paused = true)]
async fn a_restarted_device_ends_its_earlier_sessions_without_a_path_and_no_others() {
    let mut edge = Process::edge();
    let on = |edge: &Process, device: &str, machine: u128, boot: u128| {
        edge.open_after(Some(machine << 64 | boot), Some(&format!("client/{device}")), Some(MAX)).0
    };
    let earlier = on(&edge, "alice/laptop", 1, 1);
    let others = [
        on(&edge, "alice/laptop", 2, 1),
        on(&edge, "alice/phone", 1, 1),
        on(&edge, "alice/laptop", 1, 2),
        edge.login("alice/laptop"),
    ];
    edge.lose_link();
    let running = on(&edge, "alice/laptop", 1, 2);
    assert_eq!(why(&earlier), "its device was restarted");
    let _later = on(&edge, "alice/laptop", 1, 3);
    assert_eq!((others[2].ended().is_some(), running.ended()), (true, None), "one that runs may do so");
    assert!([&others[0], &others[1], &others[3]].iter().all(|other| other.ended().is_none()));
}

#[tokio::test(start_paused = true)]
async fn an_edge_names_the_sessions_of_users_that_have_no_path_for_a_while() {
    let mut edge = Process::edge();
    let login = edge.login("alice/laptop");
    let _client = edge.open(Some("server/0000000000000000000000000000000a"), None);
    edge.lose_link();
    let running = edge.login("alice/laptop");
    let reported = |edge: &Process| {
        edge.table.report_parked(&edge.link);
        frames_on(&edge.link)
    };
    assert_eq!(reported(&edge), [], "it may have been opened by a right that its server has not read yet");
    edge.wait(Duration::from_secs(2)).await;
    let of = ("alice/laptop".parse().unwrap(), "node1:22".parse().unwrap());
    assert_eq!(reported(&edge), [SessionFrame::Parked(Box::new(of.clone()))]);
    assert_eq!((login.ended(), running.ended()), (None, None));
    // Only edges have such sessions.
    for (peer, expected) in [
        (Remote::Edge("node1".parse().unwrap()), true),
        (Remote::User("alice/laptop".parse().unwrap()), false),
        (Remote::Peer, false),
    ] {
        let server = Process::new(peer.clone());
        let frame = SessionFrame::Parked(Box::new(of.clone()));
        let event = server.table.on_frame(&server.link, key(login.id()), frame, Instant::now());
        assert_eq!(matches!(event, Some(FrameEvent::Parked(..))), expected, "{peer:?}");
    }
}
