//! The binding of two links, and what waits in between.

use std::task::Poll;
use std::time::Duration;

use bytes::Bytes;
use futures_util::FutureExt as _;
use proptest::prelude::*;
use tokio::time::Instant;

use super::*;
use crate::names::{Instance, NodeName};
use crate::protocol::link::source::{FrameSource as _, RelaySource as _};
use crate::protocol::session::recv::Windows;
use crate::protocol::table::{Event, Limits, SessionTable};
use crate::protocol::wire::frame::{Category, Code, FrameKind, Refusal, SessionKey};
use crate::protocol::wire::hello::Dialect;
use crate::protocol::wire::peer::Peer;
use crate::telemetry::Metrics;

const ID: u128 = 7;

struct Place {
    table: Arc<SessionTable>,
    client: Arc<LinkSender>,
    edge: Arc<LinkSender>,
}

fn id() -> SessionId {
    SessionId::from_bits(ID)
}

fn key(id: SessionId) -> SessionKey {
    SessionKey { id, category: Category::Ssh, node: node() }
}

fn node() -> NodeName {
    "edge1".parse().unwrap()
}

fn link(number: u64, peer: Peer) -> Arc<LinkSender> {
    LinkSender::new(LinkId(number), peer, Some(Instance::from_bits(u128::from(number))), Dialect::NEWEST)
}

impl Place {
    fn new() -> Self {
        Self::with(1 << 20)
    }

    fn with(memory: usize) -> Self {
        let windows = Windows { start: 1000, max: 1000 };
        let limits = Limits { windows, memory, sessions: 2000, grace: Duration::from_secs(60) };
        let table = SessionTable::new(Instance::from_bits(99), limits, Metrics::cloud("", ""));
        Self { table, client: link(1, Peer::Pod), edge: link(2, Peer::Edge(node())) }
    }

    fn bound() -> Self {
        let place = Self::new();
        place.ask(&place.client, open(1)).unwrap().pass(&place.edge);
        assert_eq!(said(&place.edge), [open(1)]);
        place
    }

    fn on_frame(&self, from: &Arc<LinkSender>, frame: SessionFrame) -> Option<Event> {
        self.table.on_frame(from, key(id()), frame, Instant::now())
    }

    fn ask(&self, from: &Arc<LinkSender>, frame: SessionFrame) -> Option<crate::protocol::RelayRequest> {
        match self.on_frame(from, frame)? {
            Event::RelayRequest(asked) => Some(asked),
            other => panic!("{other:?}"),
        }
    }

    fn end(&self, link: &LinkSender) {
        let _ = self.table.link_ended(link, &Refusal::new(Code::GivenUp, "gone"), Instant::now());
    }

    fn is_empty(&self) -> bool {
        self.table.passing() == (0, 0) && self.client.sessions() == 0 && self.edge.sessions() == 0
    }
}

/// What is said on a link next, its pings answered at once.
fn next(link: &LinkSender) -> Option<SessionFrame> {
    let mut cx = std::task::Context::from_waker(std::task::Waker::noop());
    while let Poll::Ready(Some(frame)) = link.poll_pull(&mut cx, Instant::now()) {
        match frame.body {
            FrameKind::Session(_, _, frame) => return Some(frame),
            FrameKind::Ping(number) => drop(link.ponged(number.unwrap(), Instant::now())),
            other => panic!("{other:?}"),
        }
    }
    None
}

/// All that is said on a link now.
fn said(link: &LinkSender) -> Vec<SessionFrame> {
    std::iter::from_fn(|| next(link)).collect()
}

fn open(epoch: u64) -> SessionFrame {
    SessionFrame::Open {
        target: "edge1:22".parse().unwrap(),
        limit: 1,
        epoch,
        client: "c".into(),
        opener: None,
    }
}

fn resume(epoch: u64) -> SessionFrame {
    SessionFrame::Resume {
        received: 0,
        limit: 9,
        epoch,
        instance: Some(Instance::from_bits(2)),
        opener: None,
    }
}

fn resumed(epoch: u64) -> SessionFrame {
    SessionFrame::Resumed { received: 0, limit: 9, epoch }
}

fn data(text: &'static str) -> SessionFrame {
    SessionFrame::Data(Bytes::from_static(text.as_bytes()))
}

fn reset(epoch: u64) -> SessionFrame {
    SessionFrame::Reset { epoch, refusal: Refusal::new(Code::GivenUp, "given up") }
}

fn lost(epoch: u64) -> SessionFrame {
    SessionFrame::Lost { epoch }
}

/// Whether the pod that said it does not know the session of that attempt.
fn is_unknown(said: &[SessionFrame], epoch: u64) -> bool {
    match said {
        [SessionFrame::Reset { epoch: of, refusal } | SessionFrame::Refused { epoch: of, refusal }] => {
            (*of, refusal.code) == (epoch, Code::Unknown)
        }
        _ => false,
    }
}

fn opened_by(mut frame: SessionFrame, who: &str) -> SessionFrame {
    *frame.opener().unwrap() = Some(who.parse().unwrap());
    frame
}

#[tokio::test]
async fn a_session_is_taken_over_by_nobody_but_who_opened_it() {
    let (pod, stranger) = (link(3, Peer::Pod), link(4, Peer::Edge("stranger".parse().unwrap())));
    let mut opener = link(5, Peer::Edge("opener".parse().unwrap()));
    let place = Place::new();
    place.ask(&opener, open(1)).unwrap().pass(&place.edge);
    // Whatever an edge says, its pod says who it is.
    let mut passed = said(&place.edge);
    assert_eq!(passed.pop().and_then(|mut frame| frame.opener()?.take()), "node/opener".parse().ok());
    let goes_on = |opener: &Arc<LinkSender>| {
        place.on_frame(opener, data("up"));
        place.on_frame(&place.edge, data("down"));
        assert_eq!((said(&place.edge), said(opener)), (vec![data("up")], vec![data("down")]));
    };
    for (from, frame) in [
        (&stranger, resume(7)),
        (&stranger, opened_by(resume(7), "node/opener")),
        (&stranger, open(7)),
        (&place.edge, resume(7)),
        (&pod, opened_by(resume(7), "node/stranger")),
        (&pod, opened_by(resume(7), "pod/00000000000000000000000000000003")),
    ] {
        assert!(place.ask(from, frame.clone()).is_none());
        let answer = said(from);
        assert!(is_unknown(&answer, 7), "{frame:?} from {:?}: {answer:?}", from.peer);
        goes_on(&opener);
    }
    // Itself may, over another link or through another pod, be that as old as it likes.
    for (from, frame) in [
        (link(6, Peer::Edge("opener".parse().unwrap())), resume(8)),
        (pod.clone(), opened_by(resume(9), "node/opener")),
        (pod, resume(10)),
    ] {
        place.ask(&from, frame).unwrap().pass(&place.edge);
        assert!(matches!(&said(&place.edge)[..], [SessionFrame::Resume { .. }]));
        opener = from;
        goes_on(&opener);
    }
    // It is not forgotten for that.
    assert!(place.ask(&stranger, resume(11)).is_none());
    assert!(is_unknown(&said(&stranger), 11));
}

#[tokio::test]
async fn an_acceptor_does_not_take_over_the_binding_of_its_own_session() {
    // Opened through a pod that is too old to say by whom.
    let place = Place::bound();
    assert!(place.ask(&place.edge, resume(2)).is_none());
    assert!(is_unknown(&said(&place.edge), 2));
    place.on_frame(&place.client, data("up"));
    assert_eq!((said(&place.edge), said(&place.client)), (vec![data("up")], vec![]));
}

#[tokio::test]
async fn frames_pass_between_the_two_links_and_from_no_third() {
    let place = Place::bound();
    place.on_frame(&place.edge, SessionFrame::Opened { limit: 5, epoch: 1, instance: None });
    place.on_frame(&place.edge, data("from the edge"));
    place.on_frame(&place.client, data("from the client"));
    place.on_frame(&link(3, Peer::Pod), data("from a stranger"));
    place.on_frame(&place.client, SessionFrame::Opened { limit: 9, epoch: 1, instance: None });
    assert_eq!(said(&place.edge), [data("from the client")]);
    let opened = SessionFrame::Opened { limit: 5, epoch: 1, instance: None };
    assert_eq!(said(&place.client), [opened, data("from the edge")]);
}

#[tokio::test]
async fn the_words_that_open_and_resume_empty_what_waits_credits_too() {
    for answer in [resumed(2), SessionFrame::Opened { limit: 5, epoch: 2, instance: None }] {
        let place = Place::bound();
        place.on_frame(&place.edge, data("old"));
        place.on_frame(&place.edge, SessionFrame::Credit { received: 1, limit: 2 });
        place.ask(&place.client, resume(2)).unwrap().pass(&place.edge);
        place.on_frame(&place.edge, data("old still"));
        place.on_frame(&place.edge, SessionFrame::Credit { received: 2, limit: 3 });
        place.on_frame(&place.edge, answer.clone());
        place.on_frame(&place.edge, data("new"));
        assert_eq!(said(&place.client), [answer, data("new")]);
    }
}

#[tokio::test]
async fn lost_stays_behind_the_data_and_the_reset_before_it() {
    let place = Place::bound();
    place.on_frame(&place.edge, data("tail"));
    place.end(&place.edge);
    place.on_frame(&place.edge, data("late"));
    assert_eq!(said(&place.client), [data("tail"), lost(1)]);
    assert!(place.is_empty());
    let place = Place::bound();
    place.on_frame(&place.edge, data("tail"));
    place.on_frame(&place.edge, reset(1));
    place.end(&place.edge);
    assert_eq!(said(&place.client), [data("tail"), reset(1)]);
    assert!(place.is_empty());
}

#[tokio::test]
async fn only_a_higher_epoch_binds_anew_and_what_the_old_link_says_is_dropped() {
    let place = Place::bound();
    let other = link(3, Peer::Pod);
    assert!(place.ask(&other, resume(1)).is_none(), "not higher");
    place.on_frame(&place.edge, data("for the old link"));
    place.ask(&other, resume(3)).unwrap().pass(&place.edge);
    assert!(place.ask(&place.client, resume(2)).is_none(), "late");
    place.on_frame(&place.client, data("late"));
    place.on_frame(&place.edge, resumed(3));
    assert_eq!(said(&place.edge), [resume(3)]);
    assert_eq!((said(&place.client), said(&other)), (vec![], vec![resumed(3)]));
    place.on_frame(&place.edge, reset(1));
    assert_eq!(place.table.passing().0, 1, "the end of an older attempt takes nothing along");
    place.on_frame(&place.edge, reset(3));
    assert_eq!(said(&other), [reset(3)]);
    assert!(place.is_empty() && other.sessions() == 0);
}

#[tokio::test]
async fn what_is_left_of_an_old_binding_is_not_said_behind_a_new_answer() {
    let place = Place::bound();
    place.on_frame(&place.edge, data("old"));
    place.end(&place.edge);
    // The opener has not heard of it yet, and comes by itself.
    let edge = link(4, Peer::Edge(node()));
    place.ask(&place.client, resume(2)).unwrap().pass(&edge);
    place.on_frame(&edge, resumed(2));
    assert_eq!(said(&place.client), [resumed(2)]);
}

#[tokio::test]
async fn an_end_that_passes_takes_the_binding_along_in_both_directions() {
    for frame in [reset(1), lost(1)] {
        for of_client in [true, false] {
            let place = Place::bound();
            let (from, to) =
                if of_client { (&place.client, &place.edge) } else { (&place.edge, &place.client) };
            let (from, to) = (from.clone(), to.clone());
            place.on_frame(&to, data("to who leaves"));
            place.on_frame(&from, data("last"));
            place.on_frame(&from, frame.clone());
            place.on_frame(&from, data("late"));
            assert_eq!(said(&to), [data("last"), frame.clone()]);
            assert_eq!(said(&from), []);
            assert!(place.is_empty());
        }
    }
}

fn broken() -> SessionFrame {
    SessionFrame::Broken { total: 5, refusal: Refusal::new(Code::GivenUp, "given up") }
}

fn over(epoch: u64) -> SessionFrame {
    SessionFrame::Reset { epoch, refusal: Refusal::new(Code::Over, "") }
}

#[tokio::test]
async fn a_break_stays_behind_its_data_and_is_answered_by_the_far_end() {
    let place = Place::bound();
    place.on_frame(&place.edge, data("last"));
    place.on_frame(&place.edge, broken());
    assert_eq!(said(&place.client), [data("last"), broken()]);
    assert!(!place.is_empty(), "the answer has to come back");
    place.on_frame(&place.client, over(1));
    assert_eq!(said(&place.edge), [over(1)]);
    assert!(place.is_empty());
}

#[tokio::test]
async fn a_break_is_a_reset_for_a_far_end_that_does_not_know_it_and_is_answered_here() {
    let mut place = Place::new();
    place.client = LinkSender::new(LinkId(1), Peer::Pod, Some(Instance::from_bits(1)), Dialect::Extended(1));
    place.ask(&place.client, open(1)).unwrap().pass(&place.edge);
    assert_eq!(said(&place.edge), [open(1)]);
    place.on_frame(&place.client, data("of no use"));
    place.on_frame(&place.edge, data("last"));
    place.on_frame(&place.edge, broken());
    assert_eq!(said(&place.client), [data("last"), reset(1)]);
    assert_eq!(said(&place.edge), [over(1)]);
    assert!(place.is_empty());
}

#[tokio::test]
async fn there_is_one_hop_between_pods_and_no_way_back() {
    let place = Place::new();
    let back = LinkSender::new(LinkId(5), Peer::Edge(node()), place.client.instance, Dialect::NEWEST);
    for to in [link(3, Peer::Pod), place.client.clone(), back] {
        place.ask(&place.client, open(1)).unwrap().pass(&to);
        assert!(
            matches!(&said(&place.client)[..], [SessionFrame::Refused { epoch: 1, refusal }] if refusal.code == Code::NotHere)
        );
        assert_eq!(said(&to), []);
        assert!(place.is_empty());
    }
}

#[tokio::test]
async fn whoever_asks_is_told_even_if_nobody_looks_at_it() {
    let place = Place::new();
    drop(place.ask(&place.client, open(1)));
    drop(place.ask(&place.client, resume(2)));
    let words = said(&place.client);
    assert!(
        matches!(&words[..], [SessionFrame::Refused { epoch: 1, .. }, SessionFrame::Reset { epoch: 2, .. }]),
        "{words:?}"
    );
    let asked = place.ask(&place.client, open(3)).unwrap();
    place.on_frame(&place.client, reset(3));
    assert!(asked.unwanted().now_or_never().is_some());
    asked.pass(&place.edge);
    assert_eq!((said(&place.client), said(&place.edge)), (vec![], vec![]));
    assert!(place.is_empty());
}

#[tokio::test]
async fn a_link_that_ended_meanwhile_is_as_good_as_lost() {
    let place = Place::new();
    let asked = place.ask(&place.client, open(1)).unwrap();
    place.end(&place.edge);
    asked.pass(&place.edge);
    assert_eq!(said(&place.client), [lost(1)]);
    assert!(place.is_empty());
}

#[tokio::test]
async fn too_much_for_one_session_costs_both_ends_a_resume_and_no_more() {
    let place = Place::bound();
    let piece = || SessionFrame::Data(vec![1; 64 * 1024].into());
    for _ in 0..8 * 16 {
        place.on_frame(&place.client, data("x"));
        place.on_frame(&place.client, piece());
    }
    assert_eq!((said(&place.client), said(&place.edge)), (vec![lost(1)], vec![lost(1)]));
    assert!(place.is_empty());
}

#[tokio::test]
async fn an_attempt_that_goes_another_way_ends_the_one_before_behind_it() {
    let place = Place::bound();
    let other = link(4, Peer::Edge("edge2".parse().unwrap()));
    place.ask(&place.client, resume(2)).unwrap().pass(&other);
    assert_eq!((said(&place.edge), said(&other)), (vec![lost(1)], vec![resume(2)]));
    assert_eq!((place.edge.sessions(), other.sessions(), place.client.sessions()), (0, 1, 1));
    // On the same way the new attempt itself is the end of the one before.
    place.ask(&place.client, resume(3)).unwrap().pass(&other);
    assert_eq!(said(&other).last(), Some(&resume(3)));
}

#[tokio::test]
async fn an_opener_that_leaves_before_it_has_said_its_newest_attempt_ends_the_one_before() {
    for frame in [lost(2), reset(2)] {
        let place = Place::bound();
        place.on_frame(&place.client, frame.clone());
        assert_eq!(said(&place.edge), [frame]);
        assert!(place.is_empty());
    }
}

#[tokio::test]
async fn a_credit_stays_behind_the_answer_before_it() {
    let place = Place::bound();
    let credit = SessionFrame::Credit { received: 1, limit: 9 };
    place.on_frame(&place.edge, resumed(1));
    place.on_frame(&place.edge, credit.clone());
    assert_eq!(said(&place.client), [resumed(1), credit]);
}

#[tokio::test]
async fn a_late_old_attempt_does_not_silence_that_a_newer_one_was_lost() {
    let place = Place::new();
    // The edge's side is a pod too, by way of which an older attempt comes back late.
    let pod = link(3, Peer::Pod);
    let edge = link(4, Peer::Edge(node()));
    place.ask(&edge, open(2)).unwrap().pass(&pod);
    assert!(matches!(&said(&pod)[..], [SessionFrame::Open { epoch: 2, .. }]));
    place.on_frame(&edge, lost(2));
    let asked = place.ask(&pod, open(1)).unwrap();
    assert_eq!(said(&pod), [lost(2)]);
    drop(asked);
}

#[test]
fn a_lane_takes_nothing_behind_its_last_word() {
    let budget = Budget::new(1000);
    let queue = RelayQueue::new(key(id()), 1000, (budget.share(), budget.share()));
    queue.push(lost(1)).unwrap();
    queue.push(data("late")).unwrap();
    queue.cut(reset(1));
    assert_eq!(budget.used(), 0);
}

#[tokio::test]
async fn an_acceptor_that_its_opener_left_takes_no_resume_meant_for_another_process() {
    let place = Place::new();
    let _offer = place.ask(&place.client, open(1)).unwrap().offer().unwrap();
    let asked = place.ask(&place.client, resume(2)).unwrap();
    assert!(place.table.is_empty());
    asked.pass(&place.edge);
    assert_eq!(said(&place.edge), [resume(2)]);
}

#[tokio::test]
async fn ends_of_stream_without_end_cost_room_as_data_does() {
    let place = Place::bound();
    for _ in 0..20_000 {
        place.on_frame(&place.client, SessionFrame::Finish { total: 1 });
    }
    assert_eq!((said(&place.client), said(&place.edge)), (vec![lost(1)], vec![lost(1)]));
    assert!(place.is_empty());
    let place = Place::bound();
    place.on_frame(&place.client, data("tail"));
    place.on_frame(&place.client, SessionFrame::Finish { total: 5 });
    assert_eq!(said(&place.edge), [data("tail"), SessionFrame::Finish { total: 5 }]);
    assert_eq!(place.table.passing(), (1, 0), "nothing waits");
}

#[tokio::test]
async fn attempts_without_end_leave_nothing_on_a_link_that_takes_nothing() {
    let place = Place::bound();
    for epoch in 2..20_000 {
        place.ask(&place.client, resume(epoch)).unwrap().pass(&place.edge);
        place.on_frame(&place.client, data("x"));
        assert_eq!(said(&place.client), []);
    }
    assert!(place.edge.waiting() <= 2500, "{}", place.edge.waiting());
    assert_eq!(said(&place.edge), [resume(19_999), data("x")]);
}

#[tokio::test]
async fn a_link_that_takes_nothing_leaves_room_for_others() {
    let place = Place::with(64 << 20);
    let (bad, on_frame) = (link(3, Peer::Edge("bad".parse().unwrap())), |id: u128, frame| {
        let id = SessionId::from_bits(id);
        place.table.on_frame(&place.client, key(id), frame, Instant::now())
    });
    let pass = |id, to| match on_frame(id, open(1)) {
        Some(Event::RelayRequest(asked)) => asked.pass(to),
        other => panic!("{other:?}"),
    };
    // A thousand sessions, each with as much as its link takes.
    for id in 100..1100 {
        pass(id, &bad);
        let _ = on_frame(id, SessionFrame::Data(vec![1; 70 * 1024].into()));
    }
    pass(ID, &place.edge);
    for _ in 0..64 {
        let _ = on_frame(ID, SessionFrame::Data(vec![1; 64 * 1024].into()));
    }
    let arrived = said(&place.edge)
        .iter()
        .map(|w| if let SessionFrame::Data(d) = w { d.len() } else { 0 })
        .sum::<usize>();
    assert_eq!(arrived, 4 << 20);
    place.end(&bad);
    assert_eq!(place.table.passing(), (1, 0));
}

#[tokio::test]
async fn no_more_sessions_pass_than_the_process_may_have_however_many_links_ask() {
    let place = Place::new();
    let ask = |from: &Arc<LinkSender>, id: u128, frame: SessionFrame| {
        let id = SessionId::from_bits(id);
        place.table.on_frame(from, key(id), frame, Instant::now())
    };
    let others = [link(5, Peer::Pod), link(6, Peer::Pod)];
    let mut first = None;
    for id in 0..3000 {
        if let Some(Event::RelayRequest(asked)) = ask(&others[usize::from(id >= 1500)], id, open(1)) {
            asked.pass(&place.edge);
            let _ = said(&place.edge);
            first.get_or_insert(id);
        }
    }
    assert_eq!(place.table.passing().0, 2000);
    let refused = said(&others[1]);
    assert!(
        refused
            .iter()
            .all(|w| matches!(w, SessionFrame::Refused { refusal, .. } if refusal.code == Code::Busy))
    );
    assert_eq!(refused.len(), 1000);
    // One that passes already goes on another way.
    assert!(matches!(ask(&others[0], first.unwrap(), resume(2)), Some(Event::RelayRequest(_))));
}

#[tokio::test]
async fn a_lane_that_is_over_before_its_link_knows_it_is_not_kept() {
    let edge = link(2, Peer::Edge(node()));
    let queue = RelayQueue::new(key(id()), 1000, (Budget::new(1000).share(), Budget::new(1000).share()));
    queue.close();
    assert!(edge.pass(&queue, 1));
    assert_eq!(edge.sessions(), 0);
}

#[tokio::test]
async fn a_late_attempt_does_not_take_a_newer_ones_lane() {
    let edge = link(2, Peer::Edge(node()));
    let queue = || RelayQueue::new(key(id()), 1000, (Budget::new(1000).share(), Budget::new(1000).share()));
    let (newer, late) = (queue(), queue());
    assert!(edge.pass(&newer, 2));
    assert!(edge.pass(&late, 1));
    assert!(late.is_closed() && !newer.is_closed());
    assert!(newer.push(resume(2)).is_ok_and(|intent| intent.control.is_some()), "it still speaks");
    edge.leave_relay(&*late);
    assert_eq!(edge.sessions(), 1);
}

#[tokio::test]
async fn not_here_comes_back_to_who_seeks_the_way_and_to_nobody_else() {
    let place = Place::new();
    let (asker, wrong) = (link(5, Peer::Edge("asker".parse().unwrap())), link(6, Peer::Pod));
    let not_here = || SessionFrame::Refused { epoch: 1, refusal: Refusal::new(Code::NotHere, "it has gone") };
    let asked = place.ask(&asker, open(1)).unwrap();
    asked.try_way(&wrong);
    assert!(asked.tried().now_or_never().is_none());
    place.on_frame(&wrong, not_here());
    assert_eq!(asked.tried().now_or_never(), Some(true));
    assert_eq!(
        (said(&asker), said(&wrong)),
        (vec![], vec![]),
        "it was said to be nowhere, so nothing is left there"
    );
    asked.try_way(&place.edge);
    assert!(matches!(said(&place.edge)[..], [SessionFrame::Open { epoch: 1, .. }]));
    place.on_frame(&place.edge, SessionFrame::Opened { limit: 1000, epoch: 1, instance: None });
    assert_eq!(asked.tried().now_or_never(), Some(false));
    assert!(matches!(said(&asker)[..], [SessionFrame::Opened { epoch: 1, .. }]));
    drop(asked);
    place.on_frame(&place.edge, SessionFrame::Data("hello".into()));
    assert_eq!(said(&asker).len(), 1, "it stays bound");
    // Once nobody seeks any more, its opener hears.
    let asked = place.ask(&asker, resume(2)).unwrap();
    asked.try_way(&wrong);
    drop(asked);
    place.on_frame(
        &wrong,
        SessionFrame::Reset { epoch: 2, refusal: Refusal::new(Code::NotHere, "not here either") },
    );
    assert!(matches!(said(&asker)[..], [SessionFrame::Reset { epoch: 2, .. }]));
}

#[tokio::test]
async fn nobody_but_its_opener_moves_a_session_to_another_way() {
    let place = Place::new();
    let (asker, silent) = (link(5, Peer::Edge("asker".parse().unwrap())), link(6, Peer::Pod));
    let asked = place.ask(&asker, open(1)).unwrap();
    asked.try_way(&silent);
    asked.try_way(&place.edge);
    assert_eq!(asked.tried().now_or_never(), Some(false));
    assert_eq!((said(&asker), said(&place.edge)), (vec![lost(1)], vec![]));
    assert!(matches!(said(&silent)[..], [SessionFrame::Open { .. }, SessionFrame::Lost { epoch: 1 }]));
    assert!(asked.unwanted().now_or_never().is_some());
    drop(asked);
    assert!(place.is_empty() && said(&asker).is_empty());
}

proptest! {
    /// However data is cut and joined on the way, the bytes are the same, and small pieces cost little.
    #[test]
    fn bytes_pass_in_order_however_they_are_cut(pieces in prop::collection::vec(0usize..9000, 1..60), pulls in prop::collection::vec(any::<bool>(), 60)) {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_time().start_paused(true).build().unwrap();
        runtime.block_on(async {
            let place = Place::bound();
            let (mut sent, mut got, mut count) = (Vec::new(), Vec::new(), 0u8);
            for (piece, pull) in pieces.iter().zip(pulls) {
                let bytes: Vec<u8> = (0..*piece).map(|_| { count = count.wrapping_add(1); count }).collect();
                sent.extend_from_slice(&bytes);
                place.on_frame(&place.client, SessionFrame::Data(bytes.into()));
                if pull && let Some(SessionFrame::Data(bytes)) = next(&place.edge) {
                    got.extend_from_slice(&bytes);
                }
            }
            for frame in said(&place.edge) {
                if let SessionFrame::Data(bytes) = frame { got.extend_from_slice(&bytes); }
            }
            assert_eq!(got.len(), sent.len());
            assert!(got == sent);
            assert_eq!(place.table.passing().1, 0, "nothing waits");
        });
    }
}
