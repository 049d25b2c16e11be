//! Conversations with a plain peer, written by hand from docs/superedge.md#session-messages.

use super::*;
use crate::protocol::wire::plain::on_message::LONGEST_TOPIC;

fn plain() -> Plain {
    Plain::new("edge-1".parse().unwrap())
}

fn id() -> SessionId {
    SessionId::from_bits(42)
}

/// The message that is sent, and what our session hears.
fn say_to(plain: &mut Plain, id: SessionId, word: SessionFrame) -> (Option<StreamMsg>, Vec<SessionFrame>) {
    let node = plain.node.clone();
    let heard = plain.say(Frame { node, body: FrameKind::Session(id, Category::Ssh, word) }, Instant::now());
    let message = plain.next_message();
    assert_eq!(plain.next_message(), None);
    (message, heard.map(|h| h.words).unwrap_or_default())
}

fn say(plain: &mut Plain, word: SessionFrame) -> (Option<StreamMsg>, Vec<SessionFrame>) {
    say_to(plain, id(), word)
}

/// The type of the message with which the peer is answered.
fn answer(plain: &mut Plain, meaning: &Meaning) -> String {
    assert_eq!(*meaning, Meaning::Answered);
    plain.next_message().unwrap().r#type
}

fn hear(plain: &mut Plain, kind: &str, topic: &str, data: &str) -> Meaning {
    let message = StreamMsg {
        node: "edge-1".into(),
        category: "ssh".into(),
        r#type: kind.into(),
        topic: topic.into(),
        data: Bytes::copy_from_slice(data.as_bytes()),
        addr: "127.0.0.1:22".into(),
    };
    plain.hear(message, Instant::now())
}

fn words(meaning: Meaning) -> Vec<SessionFrame> {
    match meaning {
        Meaning::Session(heard) => heard.words,
        other => panic!("{other:?}"),
    }
}

fn opened(plain: &mut Plain) -> String {
    let open = SessionFrame::Open {
        target: "edge-1:22".parse().unwrap(),
        limit: 9,
        epoch: 3,
        client: String::new(),
        opener: None,
    };
    let message = say(plain, open).0.unwrap();
    assert_eq!((message.r#type.as_str(), message.addr.as_str()), ("connecting", "127.0.0.1:22"));
    assert_eq!(&message.data[..], b"CONNECT 127.0.0.1:22 HTTP/1.1\r\n\r\n\r\n");
    assert_eq!(
        words(hear(plain, "connected", &message.topic, "")),
        [SessionFrame::Opened { limit: u64::MAX, epoch: 3, instance: None }]
    );
    message.topic
}

#[tokio::test(start_paused = true)]
async fn a_session_that_the_edge_closes() {
    let mut plain = plain();
    let topic = opened(&mut plain);
    let said = say(&mut plain, SessionFrame::Data("ls\n".into()));
    assert_eq!(said.0.unwrap().r#type, "tcp-forward");
    assert_eq!(said.1, [SessionFrame::Credit { received: 3, limit: u64::MAX }]);
    assert_eq!(words(hear(&mut plain, "tcp-forward", &topic, "a b")), [SessionFrame::Data("a b".into())]);
    let end = words(hear(&mut plain, "closed", &topic, "EOF"));
    assert!(
        matches!(&end[..], [SessionFrame::Finish { total: 4 }, SessionFrame::Reset { epoch: 3, refusal }] if refusal.code == Code::Over)
    );
    assert_eq!(say(&mut plain, SessionFrame::Finish { total: 4 }), (None, vec![]), "closed is said once");
    assert!(plain.sessions.is_empty() && plain.by_topic.is_empty());
}

#[tokio::test(start_paused = true)]
async fn a_finished_direction_is_remembered_until_the_other_is_done_or_silent() {
    let mut plain = plain();
    let topic = opened(&mut plain);
    let said = say(&mut plain, SessionFrame::Finish { total: 1 });
    assert!(said.0.is_none());
    assert_eq!(said.1, [SessionFrame::Credit { received: 1, limit: u64::MAX }]);
    assert_eq!(words(hear(&mut plain, "tcp-forward", &topic, "late answer")).len(), 1);
    assert!(plain.tick(Instant::now() + Duration::from_secs(29)).is_empty());
    let ended = plain.tick(Instant::now() + Duration::from_secs(30));
    assert_eq!(plain.next_message().unwrap().r#type, "closed");
    assert!(matches!(ended[0].words[..], [SessionFrame::Finish { total: 12 }, SessionFrame::Reset { .. }]));
}

#[tokio::test(start_paused = true)]
async fn a_targets_end_closes_soon_unless_the_peer_goes_on() {
    for goes_on in [false, true] {
        let (mut plain, now) = (plain(), Instant::now());
        let Meaning::Session(asked) = hear(&mut plain, "connecting", "t", "CONNECT") else { panic!() };
        words(hear(&mut plain, "tcp-forward", "t", "question"));
        say_to(&mut plain, asked.id, SessionFrame::Data("answer".into()));
        assert_eq!(plain.next_end(), None);
        assert_eq!(say_to(&mut plain, asked.id, SessionFrame::Finish { total: 7 }).0, None);
        assert_eq!(plain.next_end(), Some(now + AFTER_TARGET));
        if goes_on {
            words(hear(&mut plain, "tcp-forward", "t", "more"));
        }
        let ended = plain.ended(now + AFTER_TARGET);
        assert_eq!(ended, if goes_on { vec![] } else { vec![asked.id] });
        for id in ended {
            // What has come is not taken yet.
            plain.put_off(id, now + AFTER_TARGET);
            assert_eq!(plain.ended(now + AFTER_TARGET), []);
            assert_eq!(plain.ended(now + AFTER_TARGET * 2), [id]);
            let heard = plain.close(id).unwrap();
            assert!(
                matches!(heard.words[..], [SessionFrame::Finish { total: 9 }, SessionFrame::Reset { .. }]),
                "{heard:?}"
            );
            assert_eq!(plain.next_message().unwrap().r#type, "closed");
        }
        assert_eq!(plain.tick(now + Duration::from_secs(30)).len(), usize::from(goes_on));
        assert!(plain.sessions.is_empty());
    }
}

#[tokio::test(start_paused = true)]
async fn a_failed_dial_says_why() {
    let mut plain = plain();
    let open = SessionFrame::Open {
        target: "10.0.0.9:22".parse().unwrap(),
        limit: 9,
        epoch: 1,
        client: String::new(),
        opener: None,
    };
    let topic = say(&mut plain, open).0.unwrap().topic;
    let text = "dial tcp 10.0.0.9:22: connect: connection refused";
    let heard = words(hear(&mut plain, "connect-failed", &topic, text));
    assert!(
        matches!(&heard[..], [SessionFrame::Refused { epoch: 1, refusal }] if refusal.code == Code::TargetRefused && refusal.reason == text)
    );
    assert!(plain.sessions.is_empty());
}

#[tokio::test(start_paused = true)]
async fn a_late_answer_to_a_session_given_up_is_closed() {
    let mut plain = plain();
    let topic = opened(&mut plain);
    let left = SessionFrame::Reset { epoch: 3, refusal: Refusal::new(Code::GivenUp, "client left") };
    assert_eq!(say(&mut plain, left).0.unwrap().r#type, "closed");
    let meaning = hear(&mut plain, "tcp-forward", &topic, "x");
    assert_eq!(answer(&mut plain, &meaning), "closed");
    let meaning = hear(&mut plain, "closed", &topic, "");
    assert!(matches!(meaning, Meaning::Unknown(_)), "never answer closed with closed");
}

#[tokio::test(start_paused = true)]
async fn a_plain_pod_opens_with_any_topic() {
    let mut plain = plain();
    let Meaning::Session(heard) = hear(&mut plain, "connecting", "any text at all", "CONNECT") else {
        panic!()
    };
    let [SessionFrame::Open { limit: u64::MAX, target, .. }] = &heard.words[..] else { panic!("{heard:?}") };
    assert_eq!(target.to_string(), "127.0.0.1:22");
    let opened = SessionFrame::Opened { limit: 1, epoch: 1, instance: None };
    assert_eq!(say_to(&mut plain, heard.id, opened).0.unwrap().topic, "any text at all");
    let meaning = hear(&mut plain, "connecting", &"x".repeat(257), "");
    assert_eq!(answer(&mut plain, &meaning), "connect-failed");
}

#[tokio::test(start_paused = true)]
async fn heartbeats_and_nonsense() {
    let mut plain = plain();
    let beat = heartbeat(&plain.node);
    assert_eq!(beat.topic, "edge-1heartbeat");
    assert_eq!(plain.hear(beat, Instant::now()), Meaning::Heartbeat);
    let meaning = hear(&mut plain, "access", "t", "");
    assert_eq!(answer(&mut plain, &meaning), "closed");
    let foreign = StreamMsg { node: "other".into(), category: "ssh".into(), ..StreamMsg::default() };
    assert_eq!(plain.hear(foreign, Instant::now()), Meaning::Unknown("wrong_node"));
}

#[tokio::test]
async fn what_is_said_of_a_topic_that_nobody_could_have_is_not_repeated() {
    let mut plain = plain();
    let long = "x".repeat(LONGEST_TOPIC + 1);
    for kind in ["tcp-forward", "connected", "connecting"] {
        let meaning = hear(&mut plain, kind, &long, "");
        let said = plain.next_message().map_or(0, |message| message.topic.len());
        assert!(said <= LONGEST_TOPIC, "{kind}: {meaning:?} and {said} bytes");
    }
}
