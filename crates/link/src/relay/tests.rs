//! Tests of the binding of two links, and of what waits in between.

use std::task::Poll;
use std::time::Duration;

use bytes::Bytes;
use futures_util::FutureExt as _;
use proptest::prelude::*;
use tokio::time::Instant;

use crate::schedule::frame_source::FrameSource as _;
use crate::table::relay_request::RelayRequest;
use crate::table::{FrameEvent, SessionLimits, SessionTable};
use tunnel_base::metrics::Metrics;
use tunnel_proto::frame::{ErrorCode, FrameKind, Remote, SessionCategory, SessionError, SessionKey};
use tunnel_proto::halves::WindowLimits;
use tunnel_proto::names::{Instance, NodeName};

use super::*;

const ID: u128 = 7;

struct Relay {
    table: Arc<SessionTable>,
    client: Arc<Link>,
    edge: Arc<Link>,
}

fn id() -> SessionId {
    SessionId::from_bits(ID)
}

fn key(id: SessionId) -> SessionKey {
    SessionKey { id, category: SessionCategory::Ssh, node: node() }
}

fn node() -> NodeName {
    "edge1".parse().unwrap()
}

fn link(number: u64, peer: Remote) -> Arc<Link> {
    Link::new(LinkId(number), peer, Some(Instance::from_bits(u128::from(number))))
}

impl Relay {
    fn new() -> Self {
        Self::with(1 << 20)
    }

    fn with(memory: usize) -> Self {
        let windows = WindowLimits { start: 1000, max: 1000 };
        let limits = SessionLimits {
            windows,
            memory,
            sessions: 2000,
            resume_timeout: Duration::from_secs(60),
            max_resume_timeout: Duration::ZERO,
        };
        let table = SessionTable::new(Instance::from_bits(99), limits, Metrics::server("", ""));
        Self { table, client: link(1, Remote::Peer), edge: link(2, Remote::Edge(node())) }
    }

    fn bound() -> Self {
        let relay = Self::new();
        relay.ask(&relay.client, open(1)).unwrap().pass(&relay.edge);
        assert_eq!(frames(&relay.edge), [open(1)]);
        relay
    }

    fn on_frame(&self, from: &Arc<Link>, frame: SessionFrame) -> Option<FrameEvent> {
        self.table.on_frame(from, key(id()), frame, Instant::now())
    }

    fn ask(&self, from: &Arc<Link>, frame: SessionFrame) -> Option<RelayRequest> {
        match self.on_frame(from, frame)? {
            FrameEvent::RelayRequest(request) => Some(request),
            other => panic!("{other:?}"),
        }
    }

    fn end(&self, link: &Link) {
        let _ = self.table.link_ended(
            link,
            &SessionError::new(ErrorCode::Cancelled, "link closed"),
            Instant::now(),
        );
    }

    fn is_empty(&self) -> bool {
        self.table.relayed() == (0, 0) && self.client.sessions() == 0 && self.edge.sessions() == 0
    }
}

/// Returns the next frame on a link; pings are answered at once.
fn next(link: &Link) -> Option<SessionFrame> {
    let mut cx = std::task::Context::from_waker(std::task::Waker::noop());
    while let Poll::Ready(Some(frame)) = link.poll_pull(&mut cx, Instant::now()) {
        match frame.body {
            FrameKind::Session(_, _, frame) => return Some(frame),
            FrameKind::Ping(number) => drop(link.handle_pong(number.unwrap(), Instant::now())),
            other => panic!("{other:?}"),
        }
    }
    None
}

/// Returns all frames that wait on a link now.
fn frames(link: &Link) -> Vec<SessionFrame> {
    std::iter::from_fn(|| next(link)).collect()
}

fn open(epoch: u64) -> SessionFrame {
    SessionFrame::Open {
        target: "edge1:22".parse().unwrap(),
        limit: 1,
        epoch,
        client: "c".into(),
        opener: None,
        resume_timeout: None,
        boot: None,
    }
}

fn resume(epoch: u64) -> SessionFrame {
    SessionFrame::Resume {
        received: 0,
        limit: 9,
        epoch,
        instance: Some(Instance::from_bits(2)),
        opener: None,
        target: "edge1:22".parse().unwrap(),
        place: None,
    }
}

fn resumed(epoch: u64) -> SessionFrame {
    SessionFrame::Resumed { received: 0, limit: 9, epoch }
}

fn data(text: &'static str) -> SessionFrame {
    SessionFrame::Data(Bytes::from_static(text.as_bytes()))
}

fn reset(epoch: u64) -> SessionFrame {
    SessionFrame::Reset { epoch, refusal: SessionError::new(ErrorCode::Cancelled, "given up") }
}

fn lost(epoch: u64) -> SessionFrame {
    SessionFrame::PathLost { epoch }
}

/// Returns true if the only frame refuses that attempt for a session unknown to the server.
fn is_unknown(frames: &[SessionFrame], epoch: u64) -> bool {
    match frames {
        [SessionFrame::Reset { epoch: of, refusal } | SessionFrame::Refused { epoch: of, refusal }] => {
            (*of, refusal.code) == (epoch, ErrorCode::UnknownSession)
        }
        _ => false,
    }
}

fn opened_by(mut frame: SessionFrame, who: &str) -> SessionFrame {
    *frame.opener().unwrap() = Some(who.parse().unwrap());
    frame
}

fn room(budget: &Arc<Budget>) -> PairedReservation {
    PairedReservation { all: budget.reservation(), of_link: budget.reservation() }
}

#[tokio::test]
async fn a_session_is_taken_over_by_nobody_but_who_opened_it() {
    let (server, stranger) = (link(3, Remote::Peer), link(4, Remote::Edge("stranger".parse().unwrap())));
    let mut opener = link(5, Remote::Edge("opener".parse().unwrap()));
    let relay = Relay::new();
    relay.ask(&opener, open(1)).unwrap().pass(&relay.edge);
    // The server replaces the opener in an edge's frame with that edge.
    let mut passed = frames(&relay.edge);
    assert_eq!(passed.pop().and_then(|mut frame| frame.opener()?.take()), "node/opener".parse().ok());
    let goes_on = |opener: &Arc<Link>| {
        relay.on_frame(opener, data("up"));
        relay.on_frame(&relay.edge, data("down"));
        assert_eq!((frames(&relay.edge), frames(opener)), (vec![data("up")], vec![data("down")]));
    };
    for (from, frame) in [
        (&stranger, resume(7)),
        (&stranger, opened_by(resume(7), "node/opener")),
        (&stranger, open(7)),
        (&relay.edge, resume(7)),
        (&server, opened_by(resume(7), "node/stranger")),
        (&server, opened_by(resume(7), "server/00000000000000000000000000000003")),
    ] {
        assert!(relay.ask(from, frame.clone()).is_none());
        let answer = frames(from);
        assert!(is_unknown(&answer, 7), "{frame:?} from {:?}: {answer:?}", from.peer);
        goes_on(&opener);
    }
    // The opener itself may resume over another link, or through another server.
    for (from, frame) in [
        (link(6, Remote::Edge("opener".parse().unwrap())), resume(8)),
        (server.clone(), opened_by(resume(9), "node/opener")),
        (server, opened_by(resume(10), "node/opener")),
    ] {
        relay.ask(&from, frame).unwrap().pass(&relay.edge);
        assert!(matches!(&frames(&relay.edge)[..], [SessionFrame::Resume { .. }]));
        opener = from;
        goes_on(&opener);
    }
    // The opener is still remembered afterwards.
    assert!(relay.ask(&stranger, resume(11)).is_none());
    assert!(is_unknown(&frames(&stranger), 11));
}

#[tokio::test]
async fn an_acceptor_does_not_take_over_the_binding_of_its_own_session() {
    let relay = Relay::bound();
    assert!(relay.ask(&relay.edge, resume(2)).is_none());
    assert!(is_unknown(&frames(&relay.edge), 2));
    relay.on_frame(&relay.client, data("up"));
    assert_eq!((frames(&relay.edge), frames(&relay.client)), (vec![data("up")], vec![]));
}

#[tokio::test]
async fn frames_pass_between_the_two_links_and_from_no_third() {
    let relay = Relay::bound();
    relay.on_frame(&relay.edge, SessionFrame::opened(5, 1));
    relay.on_frame(&relay.edge, data("from the edge"));
    relay.on_frame(&relay.client, data("from the client"));
    relay.on_frame(&link(3, Remote::Peer), data("from a stranger"));
    relay.on_frame(&relay.client, SessionFrame::opened(9, 1));
    assert_eq!(frames(&relay.edge), [data("from the client")]);
    let opened = SessionFrame::opened(5, 1);
    assert_eq!(frames(&relay.client), [opened, data("from the edge")]);
}

/// What the acceptor itself sends as the place is ignored.
#[tokio::test]
async fn a_user_gets_the_place_that_her_server_has_chosen_and_a_peer_gets_none() {
    let place = |node: &str, target: &str| {
        Some(Box::new((node.parse::<NodeName>().unwrap(), target.parse::<Target>().unwrap())))
    };
    let opened =
        |place| SessionFrame::Opened { limit: 5, epoch: 1, instance: None, place, resume_timeout: None };
    for (peer, chosen) in [
        (Remote::User("alice/laptop".parse().unwrap()), place("edge1", "10.0.0.1:8080")),
        (Remote::Peer, None),
    ] {
        let relay = Relay { client: link(1, peer), ..Relay::new() };
        let mut request = relay.ask(&relay.client, open(1)).unwrap();
        request.redirect(node(), "10.0.0.1:8080".parse().unwrap());
        request.pass(&relay.edge);
        frames(&relay.edge);
        relay.on_frame(&relay.edge, opened(place("evil", "edge1:1")));
        assert_eq!(frames(&relay.client), [opened(chosen)]);
    }
}

#[tokio::test]
async fn frames_that_open_and_resume_discard_what_waits_and_credits() {
    for answer in [resumed(2), SessionFrame::opened(5, 2)] {
        let relay = Relay::bound();
        relay.on_frame(&relay.edge, data("old"));
        relay.on_frame(&relay.edge, SessionFrame::Credit { received: 1, limit: 2 });
        relay.ask(&relay.client, resume(2)).unwrap().pass(&relay.edge);
        relay.on_frame(&relay.edge, data("old still"));
        relay.on_frame(&relay.edge, SessionFrame::Credit { received: 2, limit: 3 });
        relay.on_frame(&relay.edge, answer.clone());
        relay.on_frame(&relay.edge, data("new"));
        assert_eq!(frames(&relay.client), [answer, data("new")]);
    }
}

#[tokio::test]
async fn lost_stays_behind_the_data_and_the_reset_before_it() {
    let relay = Relay::bound();
    relay.on_frame(&relay.edge, data("tail"));
    relay.end(&relay.edge);
    relay.on_frame(&relay.edge, data("late"));
    assert_eq!(frames(&relay.client), [data("tail"), lost(1)]);
    assert!(relay.is_empty());
    let relay = Relay::bound();
    relay.on_frame(&relay.edge, data("tail"));
    relay.on_frame(&relay.edge, reset(1));
    relay.end(&relay.edge);
    assert_eq!(frames(&relay.client), [data("tail"), reset(1)]);
    assert!(relay.is_empty());
}

#[tokio::test]
async fn only_a_higher_epoch_binds_again_and_what_the_old_link_says_is_dropped() {
    let relay = Relay::bound();
    let other = link(3, Remote::Peer);
    assert!(relay.ask(&other, resume(1)).is_none(), "not higher");
    relay.on_frame(&relay.edge, data("for the old link"));
    relay.ask(&other, resume(3)).unwrap().pass(&relay.edge);
    assert!(relay.ask(&relay.client, resume(2)).is_none(), "late");
    relay.on_frame(&relay.client, data("late"));
    relay.on_frame(&relay.edge, resumed(3));
    assert_eq!(frames(&relay.edge), [resume(3)]);
    assert_eq!((frames(&relay.client), frames(&other)), (vec![], vec![resumed(3)]));
    relay.on_frame(&relay.edge, reset(1));
    assert_eq!(relay.table.relayed().0, 1, "the end of an older attempt removes nothing");
    relay.on_frame(&relay.edge, reset(3));
    assert_eq!(frames(&other), [reset(3)]);
    assert!(relay.is_empty() && other.sessions() == 0);
}

#[tokio::test]
async fn frames_of_an_old_binding_are_not_sent_after_a_new_answer() {
    let relay = Relay::bound();
    relay.on_frame(&relay.edge, data("old"));
    relay.end(&relay.edge);
    // The opener does not know about it yet, and resumes on its own.
    let edge = link(4, Remote::Edge(node()));
    relay.ask(&relay.client, resume(2)).unwrap().pass(&edge);
    relay.on_frame(&edge, resumed(2));
    assert_eq!(frames(&relay.client), [resumed(2)]);
}

#[tokio::test]
async fn an_end_that_passes_takes_the_binding_along_in_both_directions() {
    for frame in [reset(1), lost(1)] {
        for of_client in [true, false] {
            let relay = Relay::bound();
            let (from, to) =
                if of_client { (&relay.client, &relay.edge) } else { (&relay.edge, &relay.client) };
            let (from, to) = (from.clone(), to.clone());
            relay.on_frame(&to, data("to the leaving side"));
            relay.on_frame(&from, data("last"));
            relay.on_frame(&from, frame.clone());
            relay.on_frame(&from, data("late"));
            assert_eq!(frames(&to), [data("last"), frame.clone()]);
            assert_eq!(frames(&from), []);
            assert!(relay.is_empty());
        }
    }
}

fn broken() -> SessionFrame {
    SessionFrame::ResetAt { total: 5, refusal: SessionError::new(ErrorCode::Cancelled, "given up") }
}

fn over(epoch: u64) -> SessionFrame {
    SessionFrame::Reset { epoch, refusal: SessionError::new(ErrorCode::NoError, "") }
}

#[tokio::test]
async fn a_break_stays_behind_its_data_and_is_answered_by_the_far_end() {
    let relay = Relay::bound();
    relay.on_frame(&relay.edge, data("last"));
    relay.on_frame(&relay.edge, broken());
    assert_eq!(frames(&relay.client), [data("last"), broken()]);
    assert!(!relay.is_empty(), "an answer is expected");
    relay.on_frame(&relay.client, over(1));
    assert_eq!(frames(&relay.edge), [over(1)]);
    assert!(relay.is_empty());
}

#[tokio::test]
async fn there_is_one_hop_between_servers_and_no_path_back() {
    let relay = Relay::new();
    let back = Link::new(LinkId(5), Remote::Edge(node()), relay.client.instance);
    for to in [link(3, Remote::Peer), relay.client.clone(), back] {
        relay.ask(&relay.client, open(1)).unwrap().pass(&to);
        assert!(
            matches!(&frames(&relay.client)[..], [SessionFrame::Refused { epoch: 1, refusal }] if refusal.code == ErrorCode::NodeNotConnected)
        );
        assert_eq!(frames(&to), []);
        assert!(relay.is_empty());
    }
}

#[tokio::test]
async fn who_asks_gets_an_answer_even_if_nobody_looks_at_it() {
    let relay = Relay::new();
    drop(relay.ask(&relay.client, open(1)));
    drop(relay.ask(&relay.client, resume(2)));
    let words = frames(&relay.client);
    assert!(
        matches!(&words[..], [SessionFrame::Refused { epoch: 1, .. }, SessionFrame::Reset { epoch: 2, .. }]),
        "{words:?}"
    );
    let request = relay.ask(&relay.client, open(3)).unwrap();
    relay.on_frame(&relay.client, reset(3));
    assert!(request.wait_cancelled().now_or_never().is_some());
    request.pass(&relay.edge);
    assert_eq!((frames(&relay.client), frames(&relay.edge)), (vec![], vec![]));
    assert!(relay.is_empty());
}

#[tokio::test]
async fn a_link_that_ended_meanwhile_is_as_good_as_lost() {
    let relay = Relay::new();
    let request = relay.ask(&relay.client, open(1)).unwrap();
    relay.end(&relay.edge);
    request.pass(&relay.edge);
    assert_eq!(frames(&relay.client), [lost(1)]);
    assert!(relay.is_empty());
}

#[tokio::test]
async fn too_much_for_one_session_costs_both_ends_a_resume_and_no_more() {
    let relay = Relay::bound();
    let piece = || SessionFrame::Data(vec![1; 64 * 1024].into());
    for _ in 0..8 * 16 {
        relay.on_frame(&relay.client, data("x"));
        relay.on_frame(&relay.client, piece());
    }
    assert_eq!((frames(&relay.client), frames(&relay.edge)), (vec![lost(1)], vec![lost(1)]));
    assert!(relay.is_empty());
}

#[tokio::test]
async fn an_attempt_that_goes_another_way_ends_the_one_before_behind_it() {
    let relay = Relay::bound();
    let other = link(4, Remote::Edge("edge2".parse().unwrap()));
    relay.ask(&relay.client, resume(2)).unwrap().pass(&other);
    assert_eq!((frames(&relay.edge), frames(&other)), (vec![lost(1)], vec![resume(2)]));
    assert_eq!((relay.edge.sessions(), other.sessions(), relay.client.sessions()), (0, 1, 1));
    // On the same path the new attempt itself ends the previous one.
    relay.ask(&relay.client, resume(3)).unwrap().pass(&other);
    assert_eq!(frames(&other).last(), Some(&resume(3)));
}

#[tokio::test]
async fn an_opener_that_leaves_before_its_newest_attempt_is_sent_ends_the_one_before() {
    for frame in [lost(2), reset(2)] {
        let relay = Relay::bound();
        relay.on_frame(&relay.client, frame.clone());
        assert_eq!(frames(&relay.edge), [frame]);
        assert!(relay.is_empty());
    }
}

#[tokio::test]
async fn a_credit_stays_behind_the_answer_before_it() {
    let relay = Relay::bound();
    let credit = SessionFrame::Credit { received: 1, limit: 9 };
    relay.on_frame(&relay.edge, resumed(1));
    relay.on_frame(&relay.edge, credit.clone());
    assert_eq!(frames(&relay.client), [resumed(1), credit]);
}

#[tokio::test]
async fn a_late_old_attempt_does_not_silence_that_a_newer_one_was_lost() {
    let relay = Relay::new();
    // The acceptor's side is a peer as well, through which an older attempt returns late.
    let server = link(3, Remote::Peer);
    let edge = link(4, Remote::Edge(node()));
    relay.ask(&edge, open(2)).unwrap().pass(&server);
    assert!(matches!(&frames(&server)[..], [SessionFrame::Open { epoch: 2, .. }]));
    relay.on_frame(&edge, lost(2));
    let request = relay.ask(&server, open(1)).unwrap();
    assert_eq!(frames(&server), [lost(2)]);
    drop(request);
}

#[test]
fn a_queue_takes_nothing_after_its_last_frame() {
    let budget = Budget::new(1000);
    let queue = RelayQueue::new(key(id()), "".into(), 1000, room(&budget));
    queue.push(lost(1)).unwrap();
    queue.push(data("late")).unwrap();
    queue.cut(reset(1));
    assert_eq!(budget.used(), 0);
}

#[tokio::test]
async fn an_acceptor_that_its_opener_left_takes_no_resume_meant_for_another_process() {
    let relay = Relay::new();
    let _offer = relay.ask(&relay.client, open(1)).unwrap().offer().unwrap();
    let request = relay.ask(&relay.client, resume(2)).unwrap();
    assert!(relay.table.is_empty());
    request.pass(&relay.edge);
    assert_eq!(frames(&relay.edge), [resume(2)]);
}

#[tokio::test]
async fn ends_of_stream_without_end_cost_room_as_data_does() {
    let relay = Relay::bound();
    for _ in 0..20_000 {
        relay.on_frame(&relay.client, SessionFrame::Fin { total: 1 });
    }
    assert_eq!((frames(&relay.client), frames(&relay.edge)), (vec![lost(1)], vec![lost(1)]));
    assert!(relay.is_empty());
    let relay = Relay::bound();
    relay.on_frame(&relay.client, data("tail"));
    relay.on_frame(&relay.client, SessionFrame::Fin { total: 5 });
    assert_eq!(frames(&relay.edge), [data("tail"), SessionFrame::Fin { total: 5 }]);
    assert_eq!(relay.table.relayed(), (1, 0), "nothing waits");
}

#[tokio::test]
async fn attempts_without_end_leave_nothing_on_a_link_that_takes_nothing() {
    let relay = Relay::bound();
    for epoch in 2..20_000 {
        relay.ask(&relay.client, resume(epoch)).unwrap().pass(&relay.edge);
        relay.on_frame(&relay.client, data("x"));
        assert_eq!(frames(&relay.client), []);
    }
    assert!(relay.edge.waiting() <= 2500, "{}", relay.edge.waiting());
    assert_eq!(frames(&relay.edge), [resume(19_999), data("x")]);
}

#[tokio::test]
async fn a_link_that_takes_nothing_leaves_room_for_others() {
    let relay = Relay::with(64 << 20);
    let (bad, on_frame) = (link(3, Remote::Edge("bad".parse().unwrap())), |id: u128, frame| {
        let id = SessionId::from_bits(id);
        relay.table.on_frame(&relay.client, key(id), frame, Instant::now())
    });
    let pass = |id, to| match on_frame(id, open(1)) {
        Some(FrameEvent::RelayRequest(request)) => request.pass(to),
        other => panic!("{other:?}"),
    };
    // A thousand sessions, each with as much as its link takes.
    for id in 100..1100 {
        pass(id, &bad);
        let _ = on_frame(id, SessionFrame::Data(vec![1; 70 * 1024].into()));
    }
    pass(ID, &relay.edge);
    for _ in 0..64 {
        let _ = on_frame(ID, SessionFrame::Data(vec![1; 64 * 1024].into()));
    }
    let arrived = frames(&relay.edge)
        .iter()
        .map(|w| if let SessionFrame::Data(d) = w { d.len() } else { 0 })
        .sum::<usize>();
    assert_eq!(arrived, 4 << 20);
    relay.end(&bad);
    assert_eq!(relay.table.relayed(), (1, 0));
}

#[tokio::test]
async fn no_more_sessions_pass_than_the_process_may_have_however_many_links_ask() {
    let relay = Relay::new();
    let ask = |from: &Arc<Link>, id: u128, frame: SessionFrame| {
        let id = SessionId::from_bits(id);
        relay.table.on_frame(from, key(id), frame, Instant::now())
    };
    let others = [link(5, Remote::Peer), link(6, Remote::Peer)];
    let mut first = None;
    for id in 0..3000 {
        if let Some(FrameEvent::RelayRequest(request)) = ask(&others[usize::from(id >= 1500)], id, open(1)) {
            request.pass(&relay.edge);
            let _ = frames(&relay.edge);
            first.get_or_insert(id);
        }
    }
    assert_eq!(relay.table.relayed().0, 2000);
    let refused = frames(&others[1]);
    assert!(refused.iter().all(
        |w| matches!(w, SessionFrame::Refused { refusal, .. } if refusal.code == ErrorCode::Overloaded)
    ));
    assert_eq!(refused.len(), 1000);
    // A session that is already relayed may take another path.
    assert!(matches!(ask(&others[0], first.unwrap(), resume(2)), Some(FrameEvent::RelayRequest(_))));
}

#[tokio::test]
async fn a_queue_that_is_over_before_its_link_knows_it_is_not_kept() {
    let edge = link(2, Remote::Edge(node()));
    let queue = RelayQueue::new(key(id()), "".into(), 1000, room(&Budget::new(1000)));
    queue.close();
    assert!(edge.attach_relay(&queue, 1));
    assert_eq!(edge.sessions(), 0);
}

#[tokio::test]
async fn a_late_attempt_does_not_replace_a_newer_queue() {
    let edge = link(2, Remote::Edge(node()));
    let queue = || RelayQueue::new(key(id()), "".into(), 1000, room(&Budget::new(1000)));
    let (newer, late) = (queue(), queue());
    assert!(edge.attach_relay(&newer, 2));
    assert!(edge.attach_relay(&late, 1));
    assert!(late.is_stale(0) && !newer.is_stale(0));
    assert!(newer.push(resume(2)).is_ok_and(|request| request.answer), "the newer queue still sends");
    edge.detach_relay(&*late);
    assert_eq!(edge.sessions(), 1);
}

#[tokio::test]
async fn not_here_comes_back_to_who_seeks_the_way_and_to_nobody_else() {
    let relay = Relay::new();
    let (requester, wrong) = (link(5, Remote::Edge("asker".parse().unwrap())), link(6, Remote::Peer));
    let not_here = || SessionFrame::Refused {
        epoch: 1,
        refusal: SessionError::new(ErrorCode::NodeNotConnected, "node disconnected"),
    };
    let request = relay.ask(&requester, open(1)).unwrap();
    request.try_path(&wrong);
    assert!(request.path_failed().now_or_never().is_none());
    relay.on_frame(&wrong, not_here());
    assert_eq!(request.path_failed().now_or_never(), Some(true));
    assert_eq!(
        (frames(&requester), frames(&wrong)),
        (vec![], vec![]),
        "the acceptor was not there, so nothing is sent"
    );
    request.try_path(&relay.edge);
    assert!(matches!(frames(&relay.edge)[..], [SessionFrame::Open { epoch: 1, .. }]));
    relay.on_frame(&relay.edge, SessionFrame::opened(1000, 1));
    assert_eq!(request.path_failed().now_or_never(), Some(false));
    assert!(matches!(frames(&requester)[..], [SessionFrame::Opened { epoch: 1, .. }]));
    drop(request);
    relay.on_frame(&relay.edge, SessionFrame::Data("hello".into()));
    assert_eq!(frames(&requester).len(), 1, "the binding remains");
    // Once the search has ended, its opener gets the answer.
    let request = relay.ask(&requester, resume(2)).unwrap();
    request.try_path(&wrong);
    drop(request);
    relay.on_frame(
        &wrong,
        SessionFrame::Reset {
            epoch: 2,
            refusal: SessionError::new(ErrorCode::NodeNotConnected, "not here either"),
        },
    );
    assert!(matches!(frames(&requester)[..], [SessionFrame::Reset { epoch: 2, .. }]));
}

#[tokio::test]
async fn nobody_but_its_opener_moves_a_session_to_another_path() {
    let relay = Relay::new();
    let (requester, silent) = (link(5, Remote::Edge("asker".parse().unwrap())), link(6, Remote::Peer));
    let request = relay.ask(&requester, open(1)).unwrap();
    request.try_path(&silent);
    assert!(matches!(frames(&silent)[..], [SessionFrame::Open { .. }]));
    request.try_path(&relay.edge);
    assert_eq!(request.path_failed().now_or_never(), Some(false));
    assert_eq!((frames(&requester), frames(&relay.edge)), (vec![lost(1)], vec![]));
    assert_eq!(frames(&silent), [lost(1)]);
    assert!(request.wait_cancelled().now_or_never().is_some());
    drop(request);
    assert!(relay.is_empty() && frames(&requester).is_empty());
}

/// An edge may name any client in its requests; a server's requests are of many.
#[tokio::test]
async fn replies_that_a_remote_does_not_read_are_bounded() {
    let relay = Relay::new();
    for (peer, most) in [(Remote::Edge("asker".parse().unwrap()), 1000), (Remote::Peer, 20_000)] {
        let remote = link(5, peer);
        for n in 0..25_000_u128 {
            let key = SessionKey { category: SessionCategory::Admin, ..key(SessionId::from_bits(n)) };
            let mut open = open(1);
            if let SessionFrame::Open { client, .. } = &mut open {
                *client = n.to_string();
            }
            assert!(relay.table.on_frame(&remote, key, open, Instant::now()).is_none());
        }
        assert_eq!(remote.waiting(), most);
    }
}

/// Else a client that opens or resumes sessions and leaves would keep a slow line busy with them.
#[tokio::test]
async fn a_request_that_was_not_sent_ends_without_a_frame() {
    for request in [open(1), resume(1)] {
        let relay = Relay::new();
        let requester = link(5, Remote::Edge("asker".parse().unwrap()));
        relay.ask(&requester, request).unwrap().pass(&relay.edge);
        relay.end(&requester);
        assert_eq!((frames(&relay.edge), relay.edge.sessions()), (vec![], 0));
        assert!(relay.is_empty());
    }
}

/// Else an acceptor whose opener has given up would wait until its resume timeout.
#[tokio::test]
async fn a_resume_that_was_not_sent_is_still_sent_with_a_reset() {
    let relay = Relay::new();
    let requester = link(5, Remote::Edge("asker".parse().unwrap()));
    relay.ask(&requester, resume(2)).unwrap().pass(&relay.edge);
    relay.on_frame(&requester, reset(2));
    let sent = frames(&relay.edge);
    assert!(
        matches!(&sent[..], [SessionFrame::Resume { epoch: 2, .. }, last] if *last == reset(2)),
        "{sent:?}"
    );
}

/// The remote must learn that the session has left, as the end of the earlier attempt was not sent.
#[tokio::test]
async fn an_open_that_was_not_sent_ends_an_earlier_attempt() {
    let relay = Relay::new();
    let requester = link(5, Remote::Edge("asker".parse().unwrap()));
    relay.ask(&requester, open(1)).unwrap().pass(&relay.edge);
    assert!(matches!(frames(&relay.edge)[..], [SessionFrame::Open { .. }]));
    relay.ask(&requester, open(2)).unwrap().pass(&relay.edge);
    relay.end(&requester);
    assert_eq!(frames(&relay.edge), [lost(2)]);
}

proptest! {
    /// However data is split and joined on the way, the bytes are the same, and small pieces cost little.
    #[test]
    fn bytes_pass_in_order_however_they_are_cut(pieces in prop::collection::vec(0usize..9000, 1..60), pulls in prop::collection::vec(any::<bool>(), 60)) {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_time().start_paused(true).build().unwrap();
        runtime.block_on(async {
            let relay = Relay::bound();
            let (mut sent, mut got, mut count) = (Vec::new(), Vec::new(), 0u8);
            for (piece, pull) in pieces.iter().zip(pulls) {
                let bytes: Vec<u8> = (0..*piece).map(|_| { count = count.wrapping_add(1); count }).collect();
                sent.extend_from_slice(&bytes);
                relay.on_frame(&relay.client, SessionFrame::Data(bytes.into()));
                if pull && let Some(SessionFrame::Data(bytes)) = next(&relay.edge) {
                    got.extend_from_slice(&bytes);
                }
            }
            for frame in frames(&relay.edge) {
                if let SessionFrame::Data(bytes) = frame { got.extend_from_slice(&bytes); }
            }
            assert_eq!(got.len(), sent.len());
            assert!(got == sent);
            assert_eq!(relay.table.relayed().1, 0, "nothing waits");
        });
    }
}
