//! Checks that the wire format is stable: every frame and header is compared byte for byte with `recorded.txt`.
//! Programs of other versions rely on each line. A new frame gets a new line; changing or removing one breaks them.

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::time::Duration;

use bytes::Bytes;
use http::HeaderMap;
use tokio::time::Instant;

use crate::codec::extended::{from_message, heartbeat, to_message};
use crate::codec::proto::StreamMsg;
use crate::codec::{Decoder, encode_whole};
use crate::frame::{
    Conflict, ErrorCode, Found, Frame, FrameKind, ListNodes, ListedNode, Load, NodePage, Remote,
    SessionCategory, SessionError, SessionFrame,
};
use crate::hello::{EdgeHello, LinkCaller, LinkPurpose, local_headers};
use crate::names::{Instance, NodeName, SessionId};
use crate::superedge::{PlainEvent, SuperEdgeTranslator};

fn node() -> NodeName {
    "Edge-1".parse().unwrap()
}

fn id() -> SessionId {
    SessionId::from_bits(0x0011_2233_4455_6677_8899_aabb_ccdd_eeff)
}

fn instance() -> Instance {
    Instance::from_bits(0x0102_0304_0506_0708_090a_0b0c_0d0e_0f10)
}

fn refusal(code: ErrorCode) -> SessionError {
    SessionError::new(code, "because")
}

fn open(opener: Option<&str>) -> SessionFrame {
    let opener = opener.map(|text| text.parse().unwrap());
    SessionFrame::Open {
        target: "[fd00::1]:22".parse().unwrap(),
        limit: 65_536,
        epoch: 1,
        client: "root".into(),
        opener,
        resume_timeout: None,
        boot: None,
    }
}

fn resume() -> SessionFrame {
    let opener = "node/Edge-2".parse().ok();
    let target = "[fd00::1]:22".parse().unwrap();
    let instance = Some(instance());
    SessionFrame::Resume { received: 300, limit: 70_000, epoch: 2, instance, opener, target, place: None }
}

const SERVER: &str = "server/0102030405060708090a0b0c0d0e0f10";

/// Returns every session frame.
fn session_frames() -> Vec<(&'static str, SessionFrame)> {
    vec![
        ("open, to its server", open(None)),
        ("open, of an edge", open(Some("node/Edge-2"))),
        ("open, of a server", open(Some(SERVER))),
        (
            "opened",
            SessionFrame::Opened {
                limit: 65_536,
                epoch: 1,
                instance: Some(instance()),
                place: None,
                resume_timeout: None,
            },
        ),
        ("refused", SessionFrame::Refused { epoch: 1, refusal: refusal(ErrorCode::TargetRefused) }),
        ("data", SessionFrame::Data(Bytes::from_static(b"hello"))),
        ("data, none", SessionFrame::Data(Bytes::new())),
        ("fin", SessionFrame::Fin { total: 6 }),
        ("reset-at", SessionFrame::ResetAt { total: 6, refusal: refusal(ErrorCode::Cancelled) }),
        ("reset", SessionFrame::Reset { epoch: 1, refusal: refusal(ErrorCode::Cancelled) }),
        ("reset, over", SessionFrame::Reset { epoch: 1, refusal: SessionError::new(ErrorCode::NoError, "") }),
        ("credit", SessionFrame::Credit { received: 5, limit: 131_072 }),
        ("resume", resume()),
        ("resumed", SessionFrame::Resumed { received: 300, limit: 70_000, epoch: 2 }),
        ("path-lost", SessionFrame::PathLost { epoch: 2 }),
    ]
}

/// Returns the frames of a user's session that other sessions do not have.
fn resume_timeouts() -> [(&'static str, SessionFrame); 4] {
    let resume_timeout = Some(Duration::from_secs(12 * 60 * 60));
    let SessionFrame::Open { target, limit, epoch, client, opener, .. } = open(Some("client/alice/laptop"))
    else {
        unreachable!("an Open")
    };
    let opened =
        SessionFrame::Opened { limit, epoch, instance: Some(instance()), place: None, resume_timeout };
    let open = SessionFrame::Open { target, limit, epoch, client, opener, resume_timeout, boot: None };
    let opener = "client/alice/laptop".parse().ok();
    let revoked = SessionFrame::Revoked { opener, refusal: refusal(ErrorCode::NotAllowed) };
    let parked =
        SessionFrame::Parked(Box::new(("alice/laptop".parse().unwrap(), "node1:22".parse().unwrap())));
    [("open, of a user", open), ("opened, to a user", opened), ("revoked", revoked), ("parked", parked)]
}

/// Returns every other frame, with the remote that receives it.
fn signals() -> Vec<(&'static str, FrameKind, Remote)> {
    let edge = Remote::Edge(node());
    let cloud = Remote::Server(node());
    let found = FrameKind::Found(Found {
        here: true,
        silence: Duration::from_millis(1500),
        instance: Some(instance()),
        age: Some(Duration::from_secs(60)),
        ..Found::not_here(7)
    });
    let conflict =
        FrameKind::Conflict(Conflict { instance: Some(instance()), reason: "two machines".into() });
    let load = Load { nodes: 5000, stopping: false, problems: String::new() };
    vec![
        ("ping", FrameKind::Ping(Some(258)), edge.clone()),
        ("pong", FrameKind::Pong(Some(258)), cloud.clone()),
        ("drain", FrameKind::Drain(None), cloud.clone()),
        ("drain, elsewhere", FrameKind::Drain(Some(([10, 0, 0, 7], 9000).into())), cloud.clone()),
        ("find", FrameKind::Find(7), Remote::Peer),
        ("found", found, Remote::Peer),
        ("found, away", FrameKind::Found(Found::not_here(7)), Remote::Peer),
        ("conflict", conflict, cloud),
        (
            "conflict, between servers",
            FrameKind::Conflict(Conflict { instance: None, reason: String::new() }),
            Remote::Peer,
        ),
        ("load", FrameKind::Load(load.clone()), Remote::Peer),
        ("load, problems", FrameKind::Load(Load { problems: "a: b".into(), ..load.clone() }), Remote::Peer),
        ("load, stopping", FrameKind::Load(Load { stopping: true, ..load }), Remote::Peer),
    ]
}

/// Returns the frames for lists of nodes, which only servers receive.
fn node_lists() -> Vec<(&'static str, FrameKind, Remote)> {
    let address = Some(([10, 0, 0, 7], 40_000).into());
    let first = ListedNode {
        node: node(),
        age: Duration::from_secs(60),
        address,
        round_trip: None,
        sessions: None,
        version: None,
        bytes: None,
        websocket: None,
    };
    let second =
        ListedNode { node: "edge-2".parse().unwrap(), age: Duration::ZERO, address: None, ..first.clone() };
    let with_figures = ListedNode {
        round_trip: Some(Duration::from_millis(20)),
        sessions: Some(0),
        version: Some("1.2.3".into()),
        ..first.clone()
    };
    let with_bytes = ListedNode { bytes: Some([0, 1 << 40]), ..with_figures.clone() };
    let page = |question, nodes, more| FrameKind::NodePage(NodePage { question, nodes, more });
    vec![
        ("list-nodes", FrameKind::ListNodes(ListNodes { question: 7, after: None }), Remote::Peer),
        (
            "list-nodes, next",
            FrameKind::ListNodes(ListNodes { question: 8, after: Some(node()) }),
            Remote::Peer,
        ),
        ("node-page", page(7, vec![first, second], true), Remote::Peer),
        ("node-page, last", page(8, vec![], false), Remote::Peer),
        ("node-page, figures", page(9, vec![with_figures], false), Remote::Peer),
        ("node-page, bytes", page(9, vec![with_bytes], false), Remote::Peer),
        ("cluster", FrameKind::Cluster(Bytes::from_static(b"{}")), Remote::Peer),
    ]
}

/// Returns the messages of a plain link: from a server to its edge, and from an edge to its server.
fn plain_messages() -> Vec<(&'static str, StreamMsg)> {
    let mut sent = Vec::new();
    let now = Instant::now();
    let mut plain = SuperEdgeTranslator::new(node(), true, Duration::from_secs(60), now);
    let probe = plain.next_message().unwrap();
    plain.handle_message(StreamMsg { r#type: "connect-failed".into(), ..probe }, now);
    let mut record = |plain: &mut SuperEdgeTranslator, name, id, frame| {
        let _ = plain.send_frame(
            Frame { node: node(), body: FrameKind::Session(id, SessionCategory::Ssh, frame) },
            now,
        );
        sent.push((name, plain.next_message().unwrap()));
    };
    record(&mut plain, "plain connecting", id(), open(None));
    record(&mut plain, "plain tcp-forward", id(), SessionFrame::Data(Bytes::from_static(b"hello")));
    record(
        &mut plain,
        "plain closed",
        id(),
        SessionFrame::Reset { epoch: 1, refusal: refusal(ErrorCode::Cancelled) },
    );
    let connecting = sent[0].1.clone();
    let mut record = |name, topic: &str, frame| {
        let message = StreamMsg { topic: topic.into(), ..connecting.clone() };
        let PlainEvent::Session(message) = plain.handle_message(message, now) else { panic!("not an Open") };
        let body = FrameKind::Session(message.id, SessionCategory::Ssh, frame);
        let _ = plain.send_frame(Frame { node: node(), body }, now);
        sent.push((name, plain.next_message().unwrap()));
    };
    record("plain connected", "any text", SessionFrame::opened(1, 1));
    record(
        "plain connect-failed",
        "other text",
        SessionFrame::Refused { epoch: 1, refusal: refusal(ErrorCode::TargetRefused) },
    );
    sent.push(("plain heartbeat", heartbeat(&node())));
    sent
}

fn headers(headers: &HeaderMap) -> String {
    let lines = headers.iter().map(|(name, value)| (name.as_str(), value.to_str().unwrap()));
    let mut lines: BTreeMap<_, _> = lines.collect();
    // Differs with each release.
    if let Some(version) = lines.get_mut("tunnel-version") {
        *version = "VERSION";
    }
    lines.iter().map(|(name, value)| format!("{name}: {value}; ")).collect()
}

fn hex(message: StreamMsg) -> String {
    encode_whole(message).iter().fold(String::new(), |mut text, byte| {
        let _ = write!(text, "{byte:02x}");
        text
    })
}

#[tokio::test]
async fn every_frame_and_header_is_byte_for_byte_as_recorded() {
    let mut now = Vec::new();
    for (name, frame) in session_frames() {
        let body = FrameKind::Session(id(), SessionCategory::HttpProxy, frame);
        now.push((name, hex(to_message(Frame { node: node(), body }))));
    }
    for (name, body, _) in signals() {
        now.push((name, hex(to_message(Frame { node: node(), body }))));
    }
    for (name, message) in plain_messages() {
        now.push((name, hex(message)));
    }
    now.push(("header of an edge", headers(&EdgeHello::edge_request(&node(), "a<b>", instance()))));
    for (name, older) in [
        ("header of an edge, backup", LinkPurpose::Backup),
        ("header of an edge, opener", LinkPurpose::Opener),
        ("header of an edge, interactive", LinkPurpose::Interactive),
    ] {
        let mut sent = EdgeHello::edge_request(&node(), "t", instance());
        EdgeHello::with_purpose(&mut sent, older);
        now.push((name, headers(&sent)));
    }
    now.push(("header of a server", headers(&LinkCaller::peer_request(instance()))));
    let mut backup = LinkCaller::peer_request(instance());
    EdgeHello::with_purpose(&mut backup, LinkPurpose::Backup);
    now.push(("header of a server, backup", headers(&backup)));
    now.push(("header of a response", headers(&local_headers(instance()))));
    let mut named = local_headers(instance());
    EdgeHello::with_server_name(&mut named, &"eu-1".parse().unwrap());
    now.push(("header of a response, with the server's name", headers(&named)));
    for (name, body, _) in node_lists() {
        now.push((name, hex(to_message(Frame { node: node(), body }))));
    }
    for (name, frame) in resume_timeouts() {
        let body = FrameKind::Session(id(), SessionCategory::Ssh, frame);
        now.push((name, hex(to_message(Frame { node: node(), body }))));
    }
    let now: String = now.iter().map(|(name, sent)| format!("{name} = {}\n", sent.trim_end())).collect();
    let recorded = include_str!("recorded.txt");
    for (now, recorded) in now.lines().zip(recorded.lines()) {
        assert_eq!(now, recorded, "wire format changed: other versions would not understand it");
    }
    assert_eq!(now.lines().count(), recorded.lines().count(), "a frame has no line, or was removed:\n{now}");
}

#[test]
fn every_recorded_frame_is_still_decoded() {
    let known: BTreeMap<&str, &str> =
        include_str!("recorded.txt").lines().map(|line| line.split_once(" = ").unwrap()).collect();
    let read = |name: &str| {
        let text = known[name];
        let bytes = (0..text.len()).step_by(2).map(|at| u8::from_str_radix(&text[at..at + 2], 16).unwrap());
        let mut reader = Decoder::default();
        reader.push(bytes.collect());
        reader.next_message().unwrap().unwrap()
    };
    for (name, frame) in session_frames() {
        let frame = Frame { node: node(), body: FrameKind::Session(id(), SessionCategory::HttpProxy, frame) };
        assert_eq!(from_message(read(name), &Remote::Peer), Ok(frame), "{name}");
    }
    for (name, frame) in resume_timeouts() {
        let frame = Frame { node: node(), body: FrameKind::Session(id(), SessionCategory::Ssh, frame) };
        assert_eq!(from_message(read(name), &Remote::Peer), Ok(frame), "{name}");
    }
    for (name, body, peer) in signals().into_iter().chain(node_lists()) {
        assert_eq!(from_message(read(name), &peer), Ok(Frame { node: node(), body }), "{name}");
    }
}
