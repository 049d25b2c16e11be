//! How the generation of a remote is found out, and what waits for that.

use crate::frame::{Frame, FrameKind};

use super::*;

fn translator(to_edge: bool) -> SuperEdgeTranslator {
    SuperEdgeTranslator::new(node(), to_edge, Duration::from_secs(600), Instant::now())
}

fn node() -> NodeName {
    "edge-1".parse().unwrap()
}

fn frame(id: u128, category: SessionCategory, frame: SessionFrame) -> Frame {
    Frame { node: node(), body: FrameKind::Session(SessionId::from_bits(id), category, frame) }
}

fn open(id: u128) -> Frame {
    let target = "edge-1:22".parse().unwrap();
    let open = SessionFrame::Open {
        target,
        limit: 9,
        epoch: 3,
        client: String::new(),
        opener: None,
        resume_timeout: None,
        boot: None,
    };
    frame(id, SessionCategory::Ssh, open)
}

fn message(kind: &str, topic: &str) -> StreamMsg {
    StreamMsg {
        node: "edge-1".into(),
        category: "ssh".into(),
        r#type: kind.into(),
        topic: topic.into(),
        data: Bytes::from_static(b"x"),
        addr: "127.0.0.1:22".into(),
    }
}

fn kinds(translator: &mut SuperEdgeTranslator) -> Vec<String> {
    std::iter::from_fn(|| translator.next_message()).map(|message| message.r#type).collect()
}

#[tokio::test(start_paused = true)]
async fn the_probe_is_the_first_message_in_either_direction() {
    let probe = translator(true).next_message().unwrap();
    let sent = (probe.node.as_str(), probe.category.as_str(), probe.r#type.as_str(), probe.addr.as_str());
    assert_eq!(sent, ("edge-1", "ssh", "connecting", ""));
    let probe = translator(false).next_message().unwrap();
    assert_eq!((probe.category.as_str(), probe.r#type.as_str()), ("httpProxy", "connecting"));
    assert!(probe.data.starts_with(b"GET "));
}

#[tokio::test(start_paused = true)]
async fn sessions_wait_for_the_answer_to_the_probe() {
    let mut translator = translator(true);
    let probe = translator.next_message().unwrap();
    for id in 1..=3 {
        assert_eq!(translator.send_frame(open(id), Instant::now()), None);
    }
    let refusal = SessionError::new(ErrorCode::Cancelled, "client left");
    translator.send_frame(
        frame(2, SessionCategory::Ssh, SessionFrame::Reset { epoch: 3, refusal }),
        Instant::now(),
    );
    assert!(!translator.has_messages() && translator.generation().is_none());
    let answer = StreamMsg { r#type: "connect-failed".into(), ..probe };
    assert_eq!(translator.handle_message(answer, Instant::now()), PlainEvent::Answered);
    assert_eq!(translator.generation(), Some(SuperEdgeGeneration::G5));
    assert_eq!(kinds(&mut translator), ["connecting", "connecting"], "without the session that has ended");
    assert!(translator.held.is_empty());
}

#[tokio::test(start_paused = true)]
async fn a_remote_that_ignores_the_probe_for_three_seconds_is_generation_4() {
    let mut translator = translator(true);
    translator.next_message();
    translator.send_frame(open(1), Instant::now());
    let decide_at = Instant::now() + PROBE_TIMEOUT;
    assert_eq!(translator.next_due(), Some(decide_at));
    translator.due(decide_at);
    assert_eq!(
        (translator.generation(), kinds(&mut translator)),
        (Some(SuperEdgeGeneration::G4), vec!["frontend".to_owned()])
    );
}

#[tokio::test(start_paused = true)]
async fn a_late_answer_and_later_messages_correct_the_generation() {
    let mut translator = translator(true);
    let probe = translator.next_message().unwrap();
    translator.due(Instant::now() + PROBE_TIMEOUT);
    translator.handle_message(StreamMsg { r#type: "connect-failed".into(), ..probe }, Instant::now());
    translator.send_frame(open(1), Instant::now());
    assert_eq!(
        (translator.generation(), kinds(&mut translator)),
        (Some(SuperEdgeGeneration::G5), vec!["connecting".to_owned()])
    );
    translator.handle_message(message("access", "t"), Instant::now());
    assert_eq!(translator.generation(), Some(SuperEdgeGeneration::G4));
    translator.handle_message(message("connecting", "u"), Instant::now());
    assert_eq!(translator.generation(), Some(SuperEdgeGeneration::G5));
}

#[tokio::test(start_paused = true)]
async fn the_first_message_of_a_session_determines_the_generation() {
    for (kind, generation) in [("frontend", SuperEdgeGeneration::G4), ("connecting", SuperEdgeGeneration::G5)]
    {
        let mut translator = translator(false);
        let event = translator.handle_message(message(kind, "t"), Instant::now());
        assert!(matches!(event, PlainEvent::Session(_)), "{event:?}");
        assert_eq!(translator.generation(), Some(generation));
    }
}

#[tokio::test(start_paused = true)]
async fn a_session_keeps_the_codec_that_it_started_with() {
    let mut translator = translator(false);
    let PlainEvent::Session(old) = translator.handle_message(message("frontend", "old"), Instant::now())
    else {
        panic!()
    };
    let PlainEvent::Session(new) = translator.handle_message(message("connecting", "new"), Instant::now())
    else {
        panic!()
    };
    kinds(&mut translator);
    for (session, data) in [(old.id, "backend"), (new.id, "tcp-forward")] {
        let accepted = SessionFrame::opened(1, 1);
        for step in [accepted, SessionFrame::Data("x".into())] {
            let body = FrameKind::Session(session, SessionCategory::Ssh, step);
            translator.send_frame(Frame { node: node(), body }, Instant::now());
        }
        assert_eq!(kinds(&mut translator).last().map(String::as_str), Some(data));
    }
    assert!(matches!(
        translator.handle_message(message("closed", "old"), Instant::now()),
        PlainEvent::Session(_)
    ));
    assert!(matches!(
        translator.handle_message(message("closed", "new"), Instant::now()),
        PlainEvent::Session(_)
    ));
}

#[tokio::test(start_paused = true)]
async fn a_request_for_tls_is_refused_without_waiting() {
    let mut translator = translator(true);
    let FrameKind::Session(id, _, open) = open(1).body else { panic!() };
    let body = FrameKind::Session(id, SessionCategory::Https, open);
    let decoded = translator.send_frame(Frame { node: node(), body }, Instant::now()).unwrap();
    let [SessionFrame::Refused { refusal, epoch: 3 }] = &decoded.frames[..] else { panic!("{decoded:?}") };
    assert!(refusal.reason.contains("passthrough"), "{refusal}");
}
