//! Tests conversations with a plain remote, written by hand from docs/reference/superedge-wire.md#session-messages.

use crate::superedge::MAX_TOPIC;

use super::*;

fn plain() -> SuperEdgeTranslator {
    let now = Instant::now();
    let mut plain = SuperEdgeTranslator::new("edge-1".parse().unwrap(), true, Duration::from_secs(600), now);
    plain.decide(SuperEdgeGeneration::G5, now);
    plain.next_message();
    plain
}

fn id() -> SessionId {
    SessionId::from_bits(42)
}

/// Returns the message that is sent, and the frames that our session gets.
fn send_frame_of(
    plain: &mut SuperEdgeTranslator,
    id: SessionId,
    frame: SessionFrame,
) -> (Option<StreamMsg>, Vec<SessionFrame>) {
    let node = plain.node.clone();
    let decoded = plain.send_frame(
        Frame { node, body: FrameKind::Session(id, SessionCategory::Ssh, frame) },
        Instant::now(),
    );
    let message = plain.next_message();
    assert_eq!(plain.next_message(), None);
    (message, decoded.map(|h| h.frames).unwrap_or_default())
}

fn send_frame(
    plain: &mut SuperEdgeTranslator,
    frame: SessionFrame,
) -> (Option<StreamMsg>, Vec<SessionFrame>) {
    send_frame_of(plain, id(), frame)
}

/// Returns the type of the reply to the remote.
fn answer(plain: &mut SuperEdgeTranslator, event: &PlainEvent) -> String {
    assert_eq!(*event, PlainEvent::Answered);
    plain.next_message().unwrap().r#type
}

fn handle_message(plain: &mut SuperEdgeTranslator, kind: &str, topic: &str, data: &str) -> PlainEvent {
    let message = StreamMsg {
        node: "edge-1".into(),
        category: "ssh".into(),
        r#type: kind.into(),
        topic: topic.into(),
        data: Bytes::copy_from_slice(data.as_bytes()),
        addr: "127.0.0.1:22".into(),
    };
    plain.handle_message(message, Instant::now())
}

fn frames(event: PlainEvent) -> Vec<SessionFrame> {
    match event {
        PlainEvent::Session(decoded) => decoded.frames,
        other => panic!("{other:?}"),
    }
}

#[test]
fn a_tcp_session_has_category_ssh_on_the_wire() {
    let mut plain = plain();
    let target = "127.0.0.1:6443".parse().unwrap();
    let open = SessionFrame::Open {
        target,
        limit: 9,
        epoch: 3,
        client: String::new(),
        opener: None,
        resume_timeout: None,
        boot: None,
    };
    let body = FrameKind::Session(id(), SessionCategory::Tcp, open);
    assert!(plain.send_frame(Frame { node: plain.node.clone(), body }, Instant::now()).is_none());
    let message = plain.next_message().unwrap();
    let sent = (message.category.as_str(), message.r#type.as_str(), message.addr.as_str());
    assert_eq!(sent, ("ssh", "connecting", "127.0.0.1:6443"));
    let PlainEvent::Session(decoded) = handle_message(&mut plain, "connected", &message.topic, "") else {
        panic!()
    };
    assert_eq!((decoded.id, decoded.category), (id(), SessionCategory::Tcp));
}

fn opened(plain: &mut SuperEdgeTranslator) -> String {
    let open = SessionFrame::Open {
        target: "edge-1:22".parse().unwrap(),
        limit: 9,
        epoch: 3,
        client: String::new(),
        opener: None,
        resume_timeout: None,
        boot: None,
    };
    let message = send_frame(plain, open).0.unwrap();
    assert_eq!((message.r#type.as_str(), message.addr.as_str()), ("connecting", "127.0.0.1:22"));
    assert_eq!(&message.data[..], b"CONNECT 127.0.0.1:22 HTTP/1.1\r\n\r\n\r\n");
    assert_eq!(
        frames(handle_message(plain, "connected", &message.topic, "")),
        [SessionFrame::opened(u64::MAX, 3)]
    );
    message.topic
}

#[tokio::test(start_paused = true)]
async fn a_session_that_the_edge_closes_ends_with_fin_and_reset() {
    let mut plain = plain();
    let topic = opened(&mut plain);
    let sent = send_frame(&mut plain, SessionFrame::Data("ls\n".into()));
    assert_eq!(sent.0.unwrap().r#type, "tcp-forward");
    assert_eq!(sent.1, [SessionFrame::Credit { received: 3, limit: u64::MAX }]);
    assert_eq!(
        frames(handle_message(&mut plain, "tcp-forward", &topic, "a b")),
        [SessionFrame::Data("a b".into())]
    );
    let end = frames(handle_message(&mut plain, "closed", &topic, "EOF"));
    assert!(
        matches!(&end[..], [SessionFrame::Fin { total: 4 }, SessionFrame::Reset { epoch: 3, refusal }] if refusal.code == ErrorCode::NoError)
    );
    assert_eq!(send_frame(&mut plain, SessionFrame::Fin { total: 4 }), (None, vec![]), "closed is sent once");
    assert!(plain.sessions.is_empty() && plain.by_topic.is_empty());
}

#[tokio::test(start_paused = true)]
async fn a_half_closed_session_ends_after_thirty_seconds() {
    let mut plain = plain();
    let topic = opened(&mut plain);
    let sent = send_frame(&mut plain, SessionFrame::Fin { total: 1 });
    assert!(sent.0.is_none());
    assert_eq!(sent.1, [SessionFrame::Credit { received: 1, limit: u64::MAX }]);
    assert_eq!(frames(handle_message(&mut plain, "tcp-forward", &topic, "late answer")).len(), 1);
    assert_eq!(plain.due(Instant::now() + Duration::from_secs(29)), []);
    let due = Instant::now() + Duration::from_secs(30);
    assert_eq!(plain.due(due), [id()]);
    let ended = plain.handle_due(id(), true, due).unwrap();
    assert_eq!(plain.next_message().unwrap().r#type, "closed");
    assert!(matches!(ended.frames[..], [SessionFrame::Fin { total: 12 }, SessionFrame::Reset { .. }]));
}

#[tokio::test(start_paused = true)]
async fn a_targets_end_closes_the_session_unless_the_remote_keeps_sending() {
    for received_after_fin in [false, true] {
        let (mut plain, now) = (plain(), Instant::now());
        let PlainEvent::Session(opened_session) = handle_message(&mut plain, "connecting", "t", "CONNECT")
        else {
            panic!()
        };
        frames(handle_message(&mut plain, "tcp-forward", "t", "question"));
        send_frame_of(&mut plain, opened_session.id, SessionFrame::Data("answer".into()));
        assert_eq!(plain.next_due(), None);
        assert_eq!(send_frame_of(&mut plain, opened_session.id, SessionFrame::Fin { total: 7 }).0, None);
        assert_eq!(plain.next_due(), Some(now + AFTER_TARGET));
        if received_after_fin {
            frames(handle_message(&mut plain, "tcp-forward", "t", "more"));
        }
        let id = opened_session.id;
        assert_eq!(plain.due(now + AFTER_TARGET), [id]);
        // The received bytes are not taken yet, or more have arrived.
        assert_eq!(plain.handle_due(id, received_after_fin, now + AFTER_TARGET), None);
        let due = now + if received_after_fin { HALF_OPEN } else { AFTER_TARGET * 2 };
        assert_eq!((plain.due(now + AFTER_TARGET), plain.next_due()), (vec![], Some(due)));
        let decoded = plain.handle_due(id, true, due).unwrap();
        let received = if received_after_fin { 13 } else { 9 };
        assert!(
            matches!(
                decoded.frames[..],
                [SessionFrame::Fin { total }, SessionFrame::Reset { .. }] if total == received
            ),
            "{decoded:?}"
        );
        assert_eq!(plain.next_message().unwrap().r#type, "closed");
        assert!(plain.sessions.is_empty() && plain.timers.is_empty());
    }
}

#[tokio::test(start_paused = true)]
async fn a_target_that_has_ended_and_reads_nothing_keeps_its_session_for_30_s() {
    let (mut plain, now) = (plain(), Instant::now());
    let PlainEvent::Session(opened) = handle_message(&mut plain, "connecting", "t", "CONNECT") else {
        panic!()
    };
    send_frame_of(&mut plain, opened.id, SessionFrame::Fin { total: 1 });
    let mut seconds = 0;
    while let Some(due) = plain.next_due() {
        seconds = (due - now).as_secs();
        if plain.handle_due(opened.id, false, due).is_some() || seconds > 60 {
            break;
        }
    }
    assert_eq!((seconds, plain.sessions.len()), (30, 0));
}

#[tokio::test(start_paused = true)]
async fn a_failed_dial_is_refused_with_its_reason() {
    let mut plain = plain();
    let open = SessionFrame::Open {
        target: "10.0.0.9:22".parse().unwrap(),
        limit: 9,
        epoch: 1,
        client: String::new(),
        opener: None,
        resume_timeout: None,
        boot: None,
    };
    let topic = send_frame(&mut plain, open).0.unwrap().topic;
    let text = "dial tcp 10.0.0.9:22: connect: connection refused";
    let decoded = frames(handle_message(&mut plain, "connect-failed", &topic, text));
    assert!(
        matches!(&decoded[..], [SessionFrame::Refused { epoch: 1, refusal }] if refusal.code == ErrorCode::TargetRefused && refusal.reason == text)
    );
    assert!(plain.sessions.is_empty());
}

#[tokio::test(start_paused = true)]
async fn a_late_answer_to_a_cancelled_session_is_closed() {
    let mut plain = plain();
    let topic = opened(&mut plain);
    let left =
        SessionFrame::Reset { epoch: 3, refusal: SessionError::new(ErrorCode::Cancelled, "client left") };
    assert_eq!(send_frame(&mut plain, left).0.unwrap().r#type, "closed");
    let event = handle_message(&mut plain, "tcp-forward", &topic, "x");
    assert_eq!(answer(&mut plain, &event), "closed");
    let event = handle_message(&mut plain, "closed", &topic, "");
    assert!(matches!(event, PlainEvent::Unknown(_)), "closed is never answered with closed");
}

#[tokio::test(start_paused = true)]
async fn a_plain_server_opens_with_any_topic() {
    let mut plain = plain();
    let PlainEvent::Session(decoded) = handle_message(&mut plain, "connecting", "any text at all", "CONNECT")
    else {
        panic!()
    };
    let [SessionFrame::Open { limit: u64::MAX, target, .. }] = &decoded.frames[..] else {
        panic!("{decoded:?}")
    };
    assert_eq!(target.to_string(), "127.0.0.1:22");
    let opened = SessionFrame::opened(1, 1);
    assert_eq!(send_frame_of(&mut plain, decoded.id, opened).0.unwrap().topic, "any text at all");
    let event = handle_message(&mut plain, "connecting", &"x".repeat(257), "");
    assert_eq!(answer(&mut plain, &event), "connect-failed");
}

#[tokio::test(start_paused = true)]
async fn heartbeats_are_recognised_and_unknown_messages_refused() {
    let mut plain = plain();
    let beat = heartbeat(&plain.node);
    assert_eq!(beat.topic, "edge-1heartbeat");
    assert_eq!(plain.handle_message(beat, Instant::now()), PlainEvent::Heartbeat);
    let event = handle_message(&mut plain, "control", "t", "");
    assert_eq!(answer(&mut plain, &event), "closed");
    let foreign = StreamMsg { node: "other".into(), category: "ssh".into(), ..StreamMsg::default() };
    assert_eq!(plain.handle_message(foreign, Instant::now()), PlainEvent::Unknown("wrong_node"));
}

#[tokio::test]
async fn an_overlong_topic_is_not_echoed() {
    let mut plain = plain();
    let long = "x".repeat(MAX_TOPIC + 1);
    for kind in ["tcp-forward", "connected", "connecting"] {
        let event = handle_message(&mut plain, kind, &long, "");
        let sent = plain.next_message().map_or(0, |message| message.topic.len());
        assert!(sent <= MAX_TOPIC, "{kind}: {event:?} and {sent} bytes");
    }
}

#[tokio::test(start_paused = true)]
async fn an_end_that_waits_for_a_confirmation_gets_one_though_the_edge_sends_none() {
    let why = SessionError::new(ErrorCode::Cancelled, "given up");
    let target = "edge-1:22".parse().unwrap();
    let resume = SessionFrame::Resume {
        received: 0,
        limit: 9,
        epoch: 4,
        instance: None,
        opener: None,
        target,
        place: None,
    };
    for (frame, epoch) in [(SessionFrame::ResetAt { total: 1, refusal: why }, 0), (resume, 4)] {
        let mut plain = plain();
        for kind in [Some("closed"), None] {
            if kind.is_some() {
                opened(&mut plain);
            }
            let (message, frames) = send_frame(&mut plain, frame.clone());
            assert_eq!(message.map(|message| message.r#type).as_deref(), kind);
            let [SessionFrame::Reset { epoch: confirmed, refusal }] = &frames[..] else {
                panic!("{frames:?}")
            };
            assert_eq!((*confirmed, refusal.code), (epoch, ErrorCode::UnknownSession));
        }
    }
}
