//! Conversations with a remote of v0.8 or v0.9: as recorded, by hand from docs/reference/superedge.md, and at random.

use std::collections::{BTreeSet, HashMap};

use proptest::prelude::*;

use crate::codec::{Decoder, encode_whole};
use crate::frame::{Frame, FrameKind};
use crate::names::NodeName;
use crate::superedge::{AFTER_TARGET, HALF_OPEN};

use super::*;

const IDLE: Duration = Duration::from_secs(600);
const RECORDED: &str = include_str!("../../../../../tests/real/plainpeer/recorded-0.9.txt");

/// Returns the recorded message of that name.
fn recorded(name: &str) -> StreamMsg {
    let lines = RECORDED.lines().filter(|line| !line.starts_with('#'));
    let found: HashMap<_, _> = lines.filter_map(|line| line.split_once(" = ")).collect();
    let hex = found.get(name).unwrap_or_else(|| panic!("no {name}"));
    let byte = |two: &[u8]| u8::from_str_radix(std::str::from_utf8(two).unwrap(), 16).unwrap();
    let mut wire: Vec<u8> = hex.as_bytes().chunks(2).map(byte).collect();
    let mut decoder = Decoder::default();
    decoder.push(wire.clone().into());
    let message = decoder.next_message().unwrap().unwrap();
    // This program sends the data after the target, which means the same: the bytes are equal but for their order.
    let mut again = encode_whole(message.clone()).to_vec();
    wire.sort_unstable();
    again.sort_unstable();
    assert_eq!(again, wire, "{name}");
    message
}

fn node() -> NodeName {
    "node1".parse().unwrap()
}

fn translator(to_edge: bool) -> SuperEdgeTranslator {
    let now = Instant::now();
    let mut translator = SuperEdgeTranslator::new(node(), to_edge, IDLE, now);
    translator.decide(SuperEdgeGeneration::G4, now);
    translator.next_message();
    translator
}

fn server() -> SuperEdgeTranslator {
    translator(true)
}

fn edge() -> SuperEdgeTranslator {
    translator(false)
}

fn id() -> SessionId {
    SessionId::from_bits(42)
}

fn open(target: &str) -> SessionFrame {
    let target = target.parse().unwrap();
    SessionFrame::Open {
        target,
        limit: 9,
        epoch: 3,
        client: String::new(),
        opener: None,
        resume_timeout: None,
        boot: None,
    }
}

fn opened(epoch: u64) -> SessionFrame {
    SessionFrame::opened(u64::MAX, epoch)
}

fn send(
    translator: &mut SuperEdgeTranslator,
    category: SessionCategory,
    frame: SessionFrame,
) -> Vec<SessionFrame> {
    send_at(translator, id(), category, frame, Instant::now())
}

fn send_at(
    translator: &mut SuperEdgeTranslator,
    id: SessionId,
    category: SessionCategory,
    frame: SessionFrame,
    now: Instant,
) -> Vec<SessionFrame> {
    let frame = Frame { node: node(), body: FrameKind::Session(id, category, frame) };
    translator.send_frame(frame, now).map(|decoded| decoded.frames).unwrap_or_default()
}

/// Returns the next message, with its random topic replaced by that of `like`.
fn sent(translator: &mut SuperEdgeTranslator, like: &StreamMsg) -> StreamMsg {
    StreamMsg { topic: like.topic.clone(), ..translator.next_message().unwrap() }
}

fn handle_message(translator: &mut SuperEdgeTranslator, message: &StreamMsg, topic: &str) -> Decoded {
    let message = StreamMsg { topic: topic.into(), ..message.clone() };
    match translator.handle_message(message, Instant::now()) {
        PlainEvent::Session(decoded) => decoded,
        other => panic!("{other:?}"),
    }
}

/// Returns what the timers that are due at that time do.
fn pass(translator: &mut SuperEdgeTranslator, now: Instant) -> Vec<SessionFrame> {
    let due = translator.due(now);
    due.into_iter()
        .filter_map(|id| translator.handle_due(id, true, now))
        .flat_map(|decoded| decoded.frames)
        .collect()
}

#[tokio::test(start_paused = true)]
async fn a_servers_session_is_as_recorded_but_for_the_immediate_dial() {
    let mut translator = server();
    assert_eq!(send(&mut translator, SessionCategory::Ssh, open("node1:10022")), []);
    let first = recorded("ssh, first bytes");
    let dial = StreamMsg { data: Bytes::new(), ..first.clone() };
    let message = translator.next_message().unwrap();
    assert_eq!(StreamMsg { topic: dial.topic.clone(), ..message.clone() }, dial);
    let topic = message.topic;

    let answer = recorded("ssh, bytes of the target");
    let frames = handle_message(&mut translator, &answer, &topic).frames;
    assert_eq!(frames, [opened(3), SessionFrame::Data(answer.data.clone())]);
    let credit = send(&mut translator, SessionCategory::Ssh, SessionFrame::Data(first.data.clone()));
    let received = first.data.len() as u64;
    assert_eq!(credit, [SessionFrame::Credit { received, limit: u64::MAX }]);
    assert_eq!(sent(&mut translator, &first), first);
    let later = recorded("ssh, later bytes");
    send(&mut translator, SessionCategory::Ssh, SessionFrame::Data(later.data.clone()));
    assert_eq!(sent(&mut translator, &later), later);

    let refusal = SessionError::new(ErrorCode::Cancelled, "client left");
    send(&mut translator, SessionCategory::Ssh, SessionFrame::Reset { epoch: 3, refusal });
    let closed = translator.next_message().unwrap();
    assert_eq!((closed.category.as_str(), closed.r#type.as_str()), ("ssh", "closed"));
    assert_is_empty(&translator);
}

/// The others are the same, but v0.7 does not know httpProxy, v0.4 no egress, and none handles its `closed`.
#[tokio::test(start_paused = true)]
async fn every_session_to_an_edge_has_category_ssh_which_all_edges_know() {
    for category in [SessionCategory::HttpProxy, SessionCategory::Tcp, SessionCategory::Egress] {
        let mut translator = server();
        send(&mut translator, category, open("node1:10022"));
        let dial = translator.next_message().unwrap();
        assert_eq!((dial.category.as_str(), dial.addr.as_str()), ("ssh", "127.0.0.1:10022"));
        let answer = recorded("ssh, bytes of the target");
        assert_eq!(handle_message(&mut translator, &answer, &dial.topic).category, category);
    }
}

#[tokio::test(start_paused = true)]
async fn a_session_opens_after_half_a_second_and_is_reset_ten_after_unanswered_bytes() {
    let (mut translator, start) = (server(), Instant::now());
    send(&mut translator, SessionCategory::Ssh, open("node1:10022"));
    assert_eq!(translator.next_due(), Some(start + OPEN_AFTER));
    assert_eq!(pass(&mut translator, start + OPEN_AFTER), [opened(3)]);
    // No bytes of the client: a target that is slow to speak first is not given up.
    assert_eq!(translator.next_due(), Some(start + IDLE));
    let first = start + Duration::from_secs(60);
    send_at(&mut translator, id(), SessionCategory::Ssh, SessionFrame::Data("hello".into()), first);
    let second = first + Duration::from_secs(9);
    send_at(&mut translator, id(), SessionCategory::Ssh, SessionFrame::Data("are you there".into()), second);
    assert_eq!(translator.next_due(), Some(first + ANSWER_TIMEOUT));
    let end = pass(&mut translator, first + ANSWER_TIMEOUT);
    let [SessionFrame::Reset { epoch: 3, refusal }] = &end[..] else { panic!("{end:?}") };
    assert_eq!(
        (refusal.code, refusal.reason.as_str()),
        (
            ErrorCode::TargetTimeout,
            "the edge did not answer; SuperEdge v0.9 reports no dial errors, and v0.2 serves no sessions"
        )
    );
    assert_is_empty(&translator);
}

#[tokio::test(start_paused = true)]
async fn a_session_whose_client_speaks_first_opens_at_once() {
    for category in [SessionCategory::HttpProxy, SessionCategory::Tcp, SessionCategory::Egress] {
        let (mut translator, start) = (server(), Instant::now());
        send(&mut translator, category, open("node1:10022"));
        assert_eq!(translator.next_due(), Some(start));
        assert_eq!(pass(&mut translator, start), [opened(3)]);
        assert_eq!(translator.next_due(), Some(start + IDLE));
    }
}

#[tokio::test(start_paused = true)]
async fn a_session_ends_after_the_idle_timeout_and_not_before() {
    let (mut translator, start) = (server(), Instant::now());
    send(&mut translator, SessionCategory::Ssh, open("node1:10022"));
    let dial = translator.next_message().unwrap();
    let answer = recorded("ssh, bytes of the target");
    tokio::time::advance(Duration::from_millis(100)).await;
    handle_message(&mut translator, &answer, &dial.topic);
    let busy = start + IDLE / 2;
    send_at(&mut translator, id(), SessionCategory::Ssh, SessionFrame::Data("x".into()), busy);
    assert_eq!(pass(&mut translator, start + IDLE), [], "there was traffic since");
    assert_eq!(translator.next_due(), Some(busy + IDLE));
    let end = pass(&mut translator, busy + IDLE);
    let [SessionFrame::Reset { refusal, .. }] = &end[..] else { panic!("{end:?}") };
    assert_eq!(refusal.reason, "no bytes for 600s; SuperEdge v0.9 reports no ends");
    let kinds: Vec<_> =
        std::iter::from_fn(|| translator.next_message()).map(|message| message.r#type).collect();
    assert_eq!(kinds, ["frontend", "closed"]);
    assert_is_empty(&translator);
}

#[tokio::test(start_paused = true)]
async fn a_half_closed_session_ends_half_a_minute_after_the_clients_end() {
    let (mut translator, start) = (server(), Instant::now());
    send(&mut translator, SessionCategory::Ssh, open("node1:10022"));
    let topic = translator.next_message().unwrap().topic;
    send(&mut translator, SessionCategory::Ssh, SessionFrame::Data("question".into()));
    handle_message(&mut translator, &recorded("ssh, bytes of the target"), &topic);
    send(&mut translator, SessionCategory::Ssh, SessionFrame::Fin { total: 9 });
    assert_eq!(
        handle_message(&mut translator, &recorded("ssh, bytes of the target"), &topic).frames.len(),
        1
    );
    assert_eq!(pass(&mut translator, start + OPEN_AFTER), [], "the timer of the opening");
    assert_eq!(translator.next_due(), Some(start + HALF_OPEN));
    let end = pass(&mut translator, start + HALF_OPEN);
    assert!(matches!(end[..], [SessionFrame::Fin { total: 33 }, SessionFrame::Reset { .. }]), "{end:?}");
    assert_is_empty(&translator);
}

#[tokio::test(start_paused = true)]
async fn an_access_request_of_an_edge_is_answered_as_recorded() {
    let mut translator = server();
    let request = recorded("access");
    let decoded = handle_message(&mut translator, &request, "t");
    let [SessionFrame::Open { target, .. }] = &decoded.frames[..] else { panic!("{decoded:?}") };
    assert_eq!(
        (decoded.category, target.to_string()),
        (SessionCategory::HttpProxy, "127.0.0.1:10022".into())
    );
    let id = decoded.id;
    let early = recorded("access, bytes of the client");
    assert_eq!(handle_message(&mut translator, &early, "t").frames, [], "not dialled yet");
    assert_eq!(translator.early(id).0, early.data.len() + PIECE_COST);
    let accepted = SessionFrame::opened(1, 1);
    let frames = send_at(&mut translator, id, SessionCategory::HttpProxy, accepted, Instant::now());
    assert_eq!(frames, [SessionFrame::Data(early.data.clone())]);
    assert_eq!((translator.early(id), translator.early), ((0, 0), 0));
    for (name, data) in
        [("access, success", None), ("access, bytes of the target", Some("bytes of the target"))]
    {
        if let Some(data) = data {
            send_at(
                &mut translator,
                id,
                SessionCategory::HttpProxy,
                SessionFrame::Data(data.into()),
                Instant::now(),
            );
        }
        let expected = recorded(name);
        assert_eq!(sent(&mut translator, &expected), expected);
    }
    // The target ends. The edge cannot be told, and its client may go on for a while.
    send_at(&mut translator, id, SessionCategory::HttpProxy, SessionFrame::Fin { total: 20 }, Instant::now());
    assert_eq!(pass(&mut translator, Instant::now() + AFTER_TARGET).len(), 2);
    assert_eq!(translator.next_message(), None);
    assert_is_empty(&translator);
}

#[tokio::test(start_paused = true)]
async fn a_refused_access_request_is_answered_with_502_and_the_reason() {
    let mut translator = server();
    let decoded = handle_message(&mut translator, &recorded("access of a target that refuses"), "t");
    let refusal = SessionError::new(ErrorCode::TargetRefused, "refused the connection");
    let refused = SessionFrame::Refused { epoch: 1, refusal };
    send_at(&mut translator, decoded.id, SessionCategory::HttpProxy, refused, Instant::now());
    let answer = translator.next_message().unwrap();
    assert_eq!(answer.r#type, "backend");
    assert_eq!(
        answer.data,
        "HTTP/1.1 502 Bad Gateway\r\nContent-Length: 23\r\nConnection: close\r\n\r\nrefused the connection\n"
    );
    assert_eq!(translator.next_message(), None);
    assert_is_empty(&translator);
}

#[tokio::test(start_paused = true)]
async fn an_edge_dials_on_the_first_bytes_and_keeps_them_until_the_target_answers() {
    for name in ["ssh", "egress", "httpProxy"] {
        let mut translator = edge();
        let first = recorded(&format!("{name}, first bytes"));
        let decoded = handle_message(&mut translator, &first, "t");
        let [SessionFrame::Open { target, .. }] = &decoded.frames[..] else { panic!("{decoded:?}") };
        assert_eq!((decoded.category.name(), target.to_string()), (name, "127.0.0.1:10022".into()));
        handle_message(&mut translator, &recorded(&format!("{name}, later bytes")), "t");
        let (id, category) = (decoded.id, decoded.category);
        let accepted = SessionFrame::opened(1, 1);
        let frames = send_at(&mut translator, id, category, accepted, Instant::now());
        assert_eq!(frames, [SessionFrame::Data(first.data), SessionFrame::Data("later bytes".into())]);
        let answer = recorded(&format!("{name}, bytes of the target"));
        send_at(&mut translator, id, category, SessionFrame::Data(answer.data.clone()), Instant::now());
        assert_eq!(sent(&mut translator, &answer), answer);
        // The target ends, which the server learns where it has a handler for it.
        send_at(&mut translator, id, category, SessionFrame::Fin { total: 99 }, Instant::now());
        assert_eq!(pass(&mut translator, Instant::now() + AFTER_TARGET).len(), 2);
        let answer_kind = translator.next_message().map(|message| message.r#type);
        assert_eq!(answer_kind.as_deref(), if name == "httpProxy" { None } else { Some("closed") });
        assert_is_empty(&translator);
    }
}

#[tokio::test(start_paused = true)]
async fn a_failed_dial_at_an_edge_closes_the_session() {
    let mut translator = edge();
    let first = recorded("ssh, first bytes for a target that refuses");
    let decoded = handle_message(&mut translator, &first, "t");
    let refusal = SessionError::new(ErrorCode::TargetRefused, "refused");
    send_at(
        &mut translator,
        decoded.id,
        SessionCategory::Ssh,
        SessionFrame::Refused { epoch: 1, refusal },
        Instant::now(),
    );
    let closed = translator.next_message().unwrap();
    assert_eq!((closed.r#type.as_str(), &closed.data[..]), ("closed", &b"refused"[..]));
    // Bytes that crossed it must not reach a new connection.
    let crossed = StreamMsg { topic: "t".into(), ..first.clone() };
    assert_eq!(translator.handle_message(crossed, Instant::now()), PlainEvent::Unknown("unknown_session"));
    for n in 0..MAX_CLOSED {
        let decoded = handle_message(&mut translator, &first, &format!("topic {n}"));
        assert!(
            translator.handle_message(
                StreamMsg { r#type: "closed".into(), topic: format!("topic {n}"), ..first.clone() },
                Instant::now()
            ) != PlainEvent::Answered
        );
        assert!(!translator.sessions.contains_key(&decoded.id));
    }
    assert!(translator.closed.len() <= MAX_CLOSED);
}

#[tokio::test(start_paused = true)]
async fn a_session_with_undelivered_bytes_is_not_closed() {
    let (mut translator, start) = (edge(), Instant::now());
    let decoded = handle_message(&mut translator, &recorded("ssh, first bytes"), "t");
    let id = decoded.id;
    send_at(&mut translator, id, SessionCategory::Ssh, SessionFrame::opened(1, 1), start);
    send_at(&mut translator, id, SessionCategory::Ssh, SessionFrame::Fin { total: 1 }, start);
    let due = start + AFTER_TARGET;
    assert_eq!(translator.due(due), [id]);
    assert_eq!(translator.handle_due(id, false, due), None);
    assert_eq!((translator.due(due), translator.next_due()), (vec![], Some(due + AFTER_TARGET)));
    assert!(translator.handle_due(id, true, due + AFTER_TARGET).is_some());
}

#[tokio::test(start_paused = true)]
async fn an_edges_client_sends_access_and_reads_the_bytes_after_the_response() {
    let mut translator = edge();
    send(&mut translator, SessionCategory::HttpProxy, open("127.0.0.1:10022"));
    let request = recorded("access");
    let message = translator.next_message().unwrap();
    assert_eq!(StreamMsg { topic: request.topic.clone(), ..message.clone() }, request);
    let answer = recorded("access, success");
    let (start, end) = answer.data.split_at(20);
    let half = StreamMsg { data: Bytes::copy_from_slice(start), ..answer.clone() };
    assert_eq!(handle_message(&mut translator, &half, &message.topic).frames, []);
    let rest = StreamMsg { data: [end, b"first"].concat().into(), ..answer.clone() };
    assert_eq!(
        handle_message(&mut translator, &rest, &message.topic).frames,
        [opened(3), SessionFrame::Data("first".into())]
    );
    let bytes = recorded("access, bytes of the client");
    send(&mut translator, SessionCategory::HttpProxy, SessionFrame::Data(bytes.data.clone()));
    assert_eq!(sent(&mut translator, &bytes), bytes);
}

#[tokio::test(start_paused = true)]
async fn an_error_response_of_a_server_refuses_the_session() {
    for (response, expected) in [
        ("HTTP/1.1 500 Internal Server Error\r\n\r\n".to_owned(), "HTTP/1.1 500 Internal Server Error"),
        ("HTTP/0.0 500 Internal Server Error\r\n\r\n".to_owned(), "HTTP/0.0 500"),
        ("x".repeat(MAX_HEAD), "xxx"),
    ] {
        let mut translator = edge();
        send(&mut translator, SessionCategory::HttpProxy, open("127.0.0.1:10022"));
        let request = translator.next_message().unwrap();
        let answer = StreamMsg { r#type: "backend".into(), data: response.into(), ..request.clone() };
        let frames = handle_message(&mut translator, &answer, &request.topic).frames;
        let [SessionFrame::Refused { epoch: 3, refusal }] = &frames[..] else { panic!("{frames:?}") };
        assert!(refusal.reason.contains(expected), "{refusal}");
        assert_is_empty(&translator);
    }
}

#[tokio::test(start_paused = true)]
async fn bytes_for_an_ended_session_are_answered_with_closed_only_by_a_server() {
    let mut translator = server();
    let late = recorded("ssh, bytes for a client that has ended");
    assert_eq!(translator.handle_message(late, Instant::now()), PlainEvent::Answered);
    assert_eq!(translator.next_message().unwrap().r#type, "closed");
    let mut translator = edge();
    let late = recorded("access, bytes for a client that has ended");
    assert_eq!(translator.handle_message(late, Instant::now()), PlainEvent::Unknown("unknown_session"));
}

#[tokio::test(start_paused = true)]
async fn replies_do_not_echo_long_texts() {
    for mut translator in [server(), edge()] {
        for kind in ["frontend", "backend", "access", "closed", "control"] {
            for category in ["ssh", "egress", "httpProxy", "tcp"] {
                let message = StreamMsg {
                    node: "node1".into(),
                    category: category.into(),
                    r#type: kind.into(),
                    topic: "t".into(),
                    data: Bytes::new(),
                    addr: "x".repeat(1 << 20),
                };
                translator.handle_message(
                    StreamMsg { topic: "x".repeat(MAX_TOPIC + 1), ..message.clone() },
                    Instant::now(),
                );
                translator.handle_message(message, Instant::now());
            }
        }
        for message in std::iter::from_fn(|| translator.next_message()) {
            assert!(
                message.topic.len() <= MAX_TOPIC
                    && message.addr.len() <= MAX_ADDR
                    && message.data.len() < 1000
            );
        }
        assert_is_empty(&translator);
    }
}

fn assert_is_empty(translator: &SuperEdgeTranslator) {
    assert!(
        translator.sessions.is_empty() && translator.by_topic.is_empty() && translator.timers.is_empty(),
        "{translator:?}"
    );
    assert_eq!(translator.early, 0);
}

/// A step of a conversation in which neither side keeps to any rule.
#[derive(Debug, Clone)]
enum Step {
    Message { category: &'static str, kind: &'static str, topic: u8, bytes: usize },
    Frame { session: u8, frame: u8 },
    Pass(u16),
    GiveUp(u8),
    Pull,
}

fn steps() -> impl Strategy<Value = Vec<Step>> {
    let message = (
        prop::sample::select(vec!["ssh", "egress", "httpProxy", "tcp", "https"]),
        prop::sample::select(vec![
            "frontend",
            "backend",
            "access",
            "closed",
            "connecting",
            "connected",
            "tcp-forward",
        ]),
        0..6u8,
        prop::sample::select(vec![0, 1, 50, 9000]),
    );
    let message =
        message.prop_map(|(category, kind, topic, bytes)| Step::Message { category, kind, topic, bytes });
    let frame = (0..8u8, 0..8u8).prop_map(|(session, frame)| Step::Frame { session, frame });
    let step = prop_oneof![
        4 => message,
        4 => frame,
        1 => (0..2000u16).prop_map(Step::Pass),
        1 => (0..8u8).prop_map(Step::GiveUp),
        1 => Just(Step::Pull),
    ];
    prop::collection::vec(step, 0..120)
}

proptest! {
    /// The maps agree with each other, and hold nothing of an ended session.
    #[test]
    fn random_conversations_keep_the_maps_consistent(to_edge: bool, steps in steps()) {
        let runtime = tokio::runtime::Builder::new_current_thread().build().unwrap();
        let _entered = runtime.enter();
        let mut translator = translator(to_edge);
        let mut now = Instant::now();
        let mut ids: Vec<SessionId> = (0..4).map(SessionId::from_bits).collect();
        for step in steps {
            match step {
                Step::Message { category, kind, topic, bytes } => {
                    let known: Vec<_> = translator.by_topic.keys().cloned().collect();
                    let topic = known.get(usize::from(topic)).cloned().unwrap_or(format!("topic {topic}"));
                    let event = translator.handle_message(StreamMsg {
                        node: "node1".into(), category: category.into(), r#type: kind.into(), topic,
                        data: vec![b'x'; bytes].into(), addr: "10.0.0.1:22".into(),
                    }, now);
                    if let PlainEvent::Session(Decoded { id, .. }) = event { ids.push(id) }
                }
                Step::Frame { session, frame } => {
                    let id = ids[ids.len().saturating_sub(1 + usize::from(session))];
                    let refusal = SessionError::new(ErrorCode::TargetRefused, "x");
                    let frame = match frame {
                        0 => open("node1:22"),
                        1 => opened(2),
                        2 | 3 => SessionFrame::Data("data".into()),
                        4 => SessionFrame::Fin { total: 5 },
                        5 => SessionFrame::Refused { epoch: 1, refusal },
                        6 => SessionFrame::Reset { epoch: 1, refusal },
                        _ => SessionFrame::PathLost { epoch: 1 },
                    };
                    send_at(&mut translator, id, SessionCategory::Ssh, frame, now);
                }
                Step::Pass(seconds) => {
                    now += Duration::from_secs(seconds.into());
                    // A late timer may be followed by another one that is due.
                    for _ in 0..3 {
                        for id in translator.due(now) { translator.handle_due(id, seconds % 2 == 0, now); }
                    }
                    prop_assert!(translator.next_due().is_none_or(|due| due > now), "each timer was handled");
                }
                Step::GiveUp(session) => {
                    translator.give_up_early(ids[ids.len().saturating_sub(1 + usize::from(session))]);
                }
                Step::Pull => { translator.next_message(); }
            }
            prop_assert_eq!(translator.sessions.len(), translator.by_topic.len());
            let timers: BTreeSet<_> =
                translator.sessions.iter().filter_map(|(id, session)| Some((session.timer?, *id))).collect();
            prop_assert_eq!(&timers, &translator.timers);
            let early: usize = translator.sessions.values().map(|session| session.stage.early()).sum();
            prop_assert_eq!(early, translator.early);
            prop_assert!(translator.closed.len() <= MAX_CLOSED);
        }
        now += IDLE;
        for _ in 0..3 {
            for id in translator.due(now) { translator.handle_due(id, true, now); }
        }
        // The newest generation reports the ends of sessions.
        let g4 = translator.sessions.values().filter(|session| session.generation == SuperEdgeGeneration::G4);
        prop_assert_eq!(g4.count(), 0, "every session of v0.9 ends: {:?}", translator);
    }
}
