//! Remotes that violate the protocol: they lose their session or their link, and no other party is affected.

use std::time::Duration;

use bytes::Bytes;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;
use tunnel::edge::Edge;
use tunnel_proto::codec::encode_whole;
use tunnel_proto::codec::extended::to_message;
use tunnel_proto::codec::proto::StreamMsg;
use tunnel_proto::frame::{ErrorCode, Frame, FrameKind, SessionFrame};
use tunnel_proto::names::{Instance, SessionId};

use crate::support::call::{Call, message};
use crate::support::clients::{assert_echo, assert_reset};
use crate::support::programs::{TestDir, TestServer, assert_edge_idle, at, edge, start_edge, target};
use crate::support::raw::{DATA, RawHttp2};
use crate::support::remote::ScriptedServer;
use crate::support::{assert_eventually, pause_time, raw, remote, spawn, targets, wait_until, wait_within};

/// Links a hostile edge `bad` and an honest edge `node1`.
async fn both(place: &TestDir, server: &TestServer) -> (Call, Edge) {
    (remote::link(place, server, "bad", Some(Instance::random())).await, edge(place, server, "node1").await)
}

/// Opens a session to a scripted edge, which accepts it.
async fn accepted(server: &TestServer, edge: &mut Call) -> (TcpStream, SessionId) {
    let accept = async {
        let (id, SessionFrame::Open { epoch, .. }) = edge.next_session_frame().await else {
            panic!("an Open first")
        };
        edge.send_session(id, SessionFrame::opened(1000, epoch)).await;
        id
    };
    tokio::join!(server.open("bad:22"), accept)
}

#[tokio::test]
async fn frames_of_unknown_sessions_are_counted_and_dropped() {
    let (place, echo) = (TestDir::new(), targets::echo().await);
    let server = TestServer::start(&place);
    let (mut bad, _edge) = both(&place, &server).await;
    for _ in 0..5000 {
        bad.send_session(SessionId::random(), SessionFrame::Data("x".into())).await;
    }
    let unknown = || server.server.metrics.frames_dropped.counted("unknown_session");
    wait_until("all are counted", || unknown() == 5000).await;
    assert_echo(&mut server.open(&at("node1", echo)).await, "hello").await;
    accepted(&server, &mut bad).await;
}

#[tokio::test]
async fn a_flood_packed_in_few_http_frames_without_window_updates_is_dropped() {
    let place = TestDir::new();
    let server = TestServer::start(&place);
    let bad = RawHttp2::link(&place, &server, "bad", Some(Instance::random())).await;
    for _ in 0..50 {
        let frame = || message(&bad.node, SessionId::random(), SessionFrame::Data("x".into()));
        assert!(bad.send_messages((0..400).map(|_| frame())).await);
    }
    let unknown = || server.server.metrics.frames_dropped.counted("unknown_session");
    wait_until("all are counted", || unknown() == 50 * 400).await;
    // A frame that is too long ends the link, not the server.
    bad.frame(DATA, 0, 1, &[0; 70_000]).await;
    wait_until("its link is closed", || server.server.metrics.links.all() == 0).await;
    accepted(&server, &mut remote::link(&place, &server, "bad", Some(Instance::random())).await).await;
}

#[tokio::test]
async fn unknown_and_forbidden_frames_are_dropped_and_the_link_continues() {
    let place = TestDir::new();
    let server = TestServer::start(&place);
    let mut bad = remote::link(&place, &server, "bad", Some(Instance::random())).await;
    let frame = bad.message(SessionId::random(), SessionFrame::Fin { total: 1 });
    let dropped = |cause| server.server.metrics.frames_dropped.counted(cause);
    for (message, cause) in [
        (StreamMsg { r#type: "no such type".into(), ..frame.clone() }, "unknown_type"),
        (StreamMsg { category: "no such category".into(), ..frame.clone() }, "unknown_type"),
        (StreamMsg { category: "stream".into(), r#type: "find".into(), ..frame.clone() }, "unknown_type"),
        (StreamMsg { topic: "no id".into(), ..frame.clone() }, "bad_session_id"),
        (StreamMsg { data: Bytes::from_static(b"\xff\xff"), ..frame.clone() }, "bad_field"),
        (StreamMsg { node: "node1".into(), ..frame.clone() }, "wrong_node"),
    ] {
        let before = dropped(cause);
        bad.send(message).await;
        wait_until(cause, || dropped(cause) == before + 1).await;
    }
    accepted(&server, &mut bad).await;
}

#[tokio::test]
async fn endless_opens_are_refused_and_take_no_memory_from_others() {
    flooded("node1", 1001, ErrorCode::NodeNotAllowed).await;
}

/// Each of these Opens is a session until it is refused.
#[tokio::test]
async fn endless_opens_to_the_cloud_itself_are_refused() {
    flooded("bad", 2100, ErrorCode::NotAllowed).await;
}

/// Lets the edge `bad` open sessions to a node endlessly. At most `most` answers wait for it, all with that code.
async fn flooded(node: &str, most: usize, code: ErrorCode) {
    let (place, echo) = (TestDir::new(), targets::echo().await);
    let server = TestServer::with(&place, "[server.session]\nbuffer_memory = \"1MiB\"");
    let (mut bad, _edge) = both(&place, &server).await;
    let target = "node1:22".parse().unwrap();
    let open = SessionFrame::Open {
        target,
        limit: 1,
        epoch: 1,
        client: String::new(),
        opener: None,
        resume_timeout: None,
        boot: None,
    };
    // It does not read the answers meanwhile.
    for n in 0..20_000 {
        let mut open = open.clone();
        // It may name any client.
        if let SessionFrame::Open { client, .. } = &mut open {
            *client = format!("10.0.{}.{}:1", n / 256, n % 256);
        }
        let message = bad.message(SessionId::random(), open);
        bad.send(StreamMsg { node: node.into(), ..message }).await;
    }
    assert_echo(&mut server.open(&at("node1", echo)).await, "hello").await;
    let waiting = server.link("bad").unwrap().link.waiting();
    assert!((500..=most).contains(&waiting), "{waiting}");
    let left = || (server.server.table.len(), server.server.table.relayed());
    wait_until("only the client's session is left", || left().0 <= 1 && left().1 == (0, 0)).await;
    let (_, answer) = bad.next_session_frame().await;
    assert!(matches!(&answer, SessionFrame::Refused { refusal, .. } if refusal.code == code), "{answer:?}");
    assert_echo(&mut server.open(&at("node1", echo)).await, "hello").await;
    drop(bad);
    server.assert_idle().await;
}

#[tokio::test]
async fn endless_pings_and_resumes_leave_a_bounded_number_of_answers() {
    let (place, echo) = (TestDir::new(), targets::echo().await);
    let server = TestServer::start(&place);
    let (mut bad, _edge) = both(&place, &server).await;
    let resume = SessionFrame::Resume {
        received: 0,
        limit: 1,
        epoch: 1,
        instance: Some(Instance::random()),
        opener: None,
        target: echo.into(),
        place: None,
    };
    // It does not read the answers meanwhile.
    for number in 0..10_000 {
        bad.send_session(SessionId::random(), resume.clone()).await;
        bad.send(to_message(Frame { node: bad.node.clone(), body: FrameKind::Ping(Some(number)) })).await;
    }
    assert_echo(&mut server.open(&at("node1", echo)).await, "hello").await;
    let waiting = server.link("bad").unwrap().link.waiting();
    assert!(waiting <= 1001, "{waiting}");
    assert_eq!(server.server.table.relayed(), (0, 0));
    let (_, answer) = bad.next_session_frame().await;
    assert!(
        matches!(&answer, SessionFrame::Reset { refusal, .. } if refusal.code == ErrorCode::NotAllowed),
        "{answer:?}"
    );
    assert_echo(&mut server.open(&at("node1", echo)).await, "hello").await;
    drop(bad);
    server.assert_idle().await;
}

#[tokio::test]
async fn an_edge_that_sends_but_never_reads_loses_its_link_and_sessions() {
    let (place, echo) = (TestDir::new(), targets::echo().await);
    let server = TestServer::start(&place);
    let (bad, _edge) = both(&place, &server).await;
    let open = SessionFrame::Open {
        target: "node1:22".parse().unwrap(),
        limit: 1,
        epoch: 1,
        client: String::new(),
        opener: None,
        resume_timeout: None,
        boot: None,
    };
    // Enough Opens to fill the queue of answers.
    for _ in 0..20_000 {
        bad.send_session(SessionId::random(), open.clone()).await;
    }
    wait_until("answers are queued", || server.link("bad").unwrap().link.waiting() > 500).await;
    pause_time();
    let speaking = spawn(async move {
        loop {
            bad.send_session(SessionId::random(), SessionFrame::Fin { total: 1 }).await;
            tokio::time::sleep(Duration::from_secs(1)).await;
        }
    });
    let answer = server.request_connect("bad:22").await;
    assert_eq!(answer.status, 504, "{answer:?}");
    let link = server.link("bad").unwrap().link;
    tokio::time::timeout(Duration::from_secs(90), link.closed()).await.expect("its link is closed");
    wait_until("it is counted", || server.server.metrics.links_closed.counted("write_stalled") == 1).await;
    server.assert_idle().await;
    assert_echo(&mut server.open(&at("node1", echo)).await, "hello").await;
    speaking.abort();
}

#[tokio::test]
async fn an_edge_that_drains_its_own_links_keeps_one_unused_link() {
    let place = TestDir::new();
    let server = TestServer::start(&place);
    let instance = Some(Instance::random());
    let mut links = Vec::new();
    for _ in 0..20 {
        let mut bad = remote::link(&place, &server, "bad", instance).await;
        for body in [FrameKind::Drain(None), FrameKind::Ping(Some(9))] {
            bad.send(to_message(Frame { node: bad.node.clone(), body })).await;
        }
        // The pong arrives after the server has processed both frames.
        while assert_eventually("a pong", bad.next()).await.is_some_and(|message| message.r#type != "pong") {}
        assert!(server.link("bad").is_none());
        links.push(bad);
    }
    let alive = || server.server.metrics.links.all();
    wait_within(Duration::from_secs(5), "the other links are closed", || alive() == 1).await;
}

#[tokio::test]
async fn an_edge_survives_a_server_that_opens_endlessly() {
    let (place, echo) = (TestDir::new(), targets::echo().await);
    let mut bad = ScriptedServer::start(&place).await;
    let edge = start_edge(&place.edge("node1", bad.at, "[edge.session]\nbuffer_memory = \"1MiB\""));
    let mut call = bad.call().await;
    call.answer(Some(Instance::random()));
    let open = SessionFrame::Open {
        target: echo.into(),
        limit: 1,
        epoch: 1,
        client: String::new(),
        opener: None,
        resume_timeout: None,
        boot: None,
    };
    for _ in 0..500 {
        call.send_session(SessionId::random(), open.clone()).await;
    }
    let (mut opened, mut refused) = (0, 0);
    while opened + refused < 500 {
        match call.next_session_frame().await.1 {
            SessionFrame::Opened { .. } => opened += 1,
            SessionFrame::Refused { refusal, .. } if refusal.code == ErrorCode::Overloaded => refused += 1,
            other => panic!("{other:?}"),
        }
    }
    // 12 windows of 32 KiB, 24 of 8 KiB and 96 of 2 KiB are three quarters of 1 MiB.
    assert_eq!((opened, edge.table.len()), (132, 132));
    assert!(edge.table.memory().0 <= 1 << 20);
}

#[tokio::test]
async fn idle_sessions_of_a_client_that_fills_an_edge_are_evicted_for_other_clients() {
    let (place, echo) = (TestDir::new(), targets::echo().await);
    let mut server = ScriptedServer::start(&place).await;
    let edge = start_edge(&place.edge("node1", server.at, "[edge.session]\nbuffer_memory = \"1MiB\""));
    let mut call = server.call().await;
    call.answer(Some(Instance::random()));
    let mut open_session = async |client: &str| {
        let (target, client, id) = (echo.into(), client.into(), SessionId::random());
        call.send_session(
            id,
            SessionFrame::Open {
                target,
                limit: 1,
                epoch: 1,
                client,
                opener: None,
                resume_timeout: None,
                boot: None,
            },
        )
        .await;
        let mut cut = 0;
        loop {
            match call.next_session_frame().await.1 {
                SessionFrame::Opened { .. } => return (Ok(()), cut),
                SessionFrame::Refused { refusal, .. } => return (Err(refusal), cut),
                SessionFrame::Reset { refusal, .. } if refusal.code == ErrorCode::Overloaded => cut += 1,
                other => panic!("{other:?}"),
            }
        }
    };
    // Connections from different ports are one client, which may use all memory while it is alone.
    let mut all = 0;
    let refusal = loop {
        match open_session(&format!("10.0.0.1:{all}")).await {
            (Ok(()), 0) => all += 1,
            (Err(refusal), 0) => break refusal,
            other => panic!("{other:?}"),
        }
    };
    assert_eq!(all, 132);
    assert!(refusal.reason.contains("no memory left there"), "{refusal:?}");
    let (mut others, mut evicted) = (0, 0);
    while let (Ok(()), cut) = open_session("ann@10.0.0.2:1").await {
        (others, evicted) = (others + 1, evicted + cut);
    }
    assert!(others + 1 >= all - evicted && others >= 50, "{others} next to {} of {all}", all - evicted);
    assert_eq!(open_session("bob@10.0.0.1:9").await, (Ok(()), 1), "a new client evicts one session");
    assert!(edge.table.memory().0 <= 1 << 20);
}

#[tokio::test]
async fn data_past_the_limit_resets_the_session_and_leaves_the_link() {
    let place = TestDir::new();
    let server = TestServer::start(&place);
    let mut bad = remote::link(&place, &server, "bad", Some(Instance::random())).await;
    let (mut victim, id) = accepted(&server, &mut bad).await;
    let (mut other, other_id) = accepted(&server, &mut bad).await;
    bad.send_session(id, SessionFrame::Data(vec![0; 100 << 10].into())).await;
    let (about, reset) = bad.next_session_frame().await;
    let SessionFrame::Reset { refusal, .. } = reset else { panic!("{reset:?}") };
    assert_eq!((about, refusal.code), (id, ErrorCode::ProtocolError), "{refusal:?}");
    assert_reset(&mut victim).await;
    bad.send_session(other_id, SessionFrame::Data("still here".into())).await;
    let mut text = [0; 10];
    assert_eventually("the other session's bytes", other.read_exact(&mut text)).await.unwrap();
    assert_eq!(&text, b"still here");
    assert_eq!(server.server.metrics.sessions.closed("connect", "protocol_error"), 1);
}

#[tokio::test]
async fn wrong_offsets_reset_the_session() {
    let place = TestDir::new();
    let server = TestServer::start(&place);
    let mut bad = remote::link(&place, &server, "bad", Some(Instance::random())).await;
    for frame in [
        SessionFrame::Fin { total: 7 },
        SessionFrame::Fin { total: u64::MAX },
        SessionFrame::Credit { received: 7, limit: 7 },
        SessionFrame::Credit { received: u64::MAX, limit: u64::MAX },
    ] {
        let (mut client, id) = accepted(&server, &mut bad).await;
        bad.send_session(id, frame.clone()).await;
        let (about, reset) = bad.next_session_frame().await;
        let violation =
            matches!(&reset, SessionFrame::Reset { refusal, .. } if refusal.code == ErrorCode::ProtocolError);
        assert!(about == id && violation, "{frame:?}: {reset:?}");
        assert_reset(&mut client).await;
    }
    server.assert_idle().await;
}

#[tokio::test]
async fn a_message_that_is_too_long_ends_the_link_and_not_the_server() {
    let (place, echo) = (TestDir::new(), targets::echo().await);
    let server = TestServer::start(&place);
    let (mut bad, _edge) = both(&place, &server).await;
    bad.send_session(SessionId::random(), SessionFrame::Data(vec![0; 200 << 10].into())).await;
    bad.wait_for_end().await;
    wait_until("the link's end is counted", || {
        server.server.metrics.links_closed.counted("protocol_error") == 1
    })
    .await;
    assert!(server.link("bad").is_none());
    assert_echo(&mut server.open(&at("node1", echo)).await, "hello").await;
}

#[tokio::test]
async fn bytes_that_are_no_messages_end_the_link_and_not_the_server() {
    let (place, echo) = (TestDir::new(), targets::echo().await);
    let server = TestServer::start(&place);
    let _edge = edge(&place, &server, "node1").await;
    let frame = StreamMsg { category: "\u{0}".repeat(100), ..StreamMsg::default() };
    let mut broken = encode_whole(frame).to_vec();
    broken[6] = 0xff;
    for bytes in [broken, vec![1, 0, 0, 0, 0], vec![0xff; 100]] {
        let mut bad = remote::link(&place, &server, "bad", Some(Instance::random())).await;
        bad.send_bytes(bytes.into()).await;
        bad.wait_for_end().await;
        wait_until("the node is disconnected", || server.link("bad").is_none()).await;
    }
    assert_eq!(server.server.metrics.links_closed.counted("protocol_error"), 3);
    assert_echo(&mut server.open(&at("node1", echo)).await, "hello").await;
}

#[tokio::test]
async fn connections_that_send_garbage_before_or_after_tls_are_closed() {
    let (place, echo) = (TestDir::new(), targets::echo().await);
    let server = TestServer::start(&place);
    let _edge = edge(&place, &server, "node1").await;
    let mut before = TcpStream::connect(server.server.bound.grpc).await.unwrap();
    before.write_all(b"PUT / HTTP/1.1\r\nHost: x\r\n\r\n").await.unwrap();
    let _ = assert_eventually("the end of the connection", before.read_to_end(&mut Vec::new())).await;
    wait_until("it is counted", || server.server.metrics.links_rejected.counted("tls") == 1).await;
    let mut after = remote::encrypted(&place, server.server.bound.grpc).await;
    after.write_all(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n").await.unwrap();
    let _ = assert_eventually("the end of the connection", after.read_to_end(&mut Vec::new())).await;
    assert_echo(&mut server.open(&at("node1", echo)).await, "hello").await;
}

#[tokio::test]
async fn a_thousand_silent_connections_time_out_and_block_no_edge_or_client() {
    let (place, echo) = (TestDir::new(), targets::echo().await);
    let server = TestServer::start(&place);
    let edge_one = edge(&place, &server, "node1").await;
    pause_time();
    let _silent = raw::silent(server.server.bound.grpc, 1000).await;
    let edge_two = start_edge(&place.edge("node2", server.server.bound.grpc, ""));
    let refused = |cause| server.server.metrics.links_rejected.counted(cause);
    assert_echo(&mut server.open(&at("node1", echo)).await, "hello").await;
    wait_until("the silent connections are closed", || refused("timed_out") == 1000).await;
    server.wait_for_node("node2").await;
    assert_echo(&mut server.open(&at("node2", echo)).await, "hello").await;
    for edge in [edge_one, edge_two] {
        assert_edge_idle(&edge).await;
    }
}

#[tokio::test]
async fn a_tls_connection_without_a_grpc_call_is_closed() {
    let place = TestDir::new();
    let server = TestServer::start(&place);
    pause_time();
    let mut silent = remote::encrypted(&place, server.server.bound.grpc).await;
    let _ = silent.read_to_end(&mut Vec::new()).await;
    let late = || server.server.metrics.links_rejected.counted("call_timeout");
    wait_until("it is counted", || late() == 1).await;
}

#[tokio::test]
async fn targets_outside_the_policy_are_refused_in_any_spelling() {
    let (place, echo) = (TestDir::new(), targets::echo().await);
    let mut server = ScriptedServer::start(&place).await;
    let port = echo.port();
    let allow = format!("[edge.allow]\ntargets = [\"127.0.0.0/8:{port}\"]");
    let _edge = start_edge(&place.edge("node1", server.at, &allow));
    let mut call = server.call().await;
    call.answer(Some(Instance::random()));
    let elsewhere =
        ["10.0.0.1:80", "[::ffff:10.0.0.1]:80", "[::10.0.0.1]:80", "[fe80::1]:22", "169.254.169.254:80"];
    let wrong_port = ["127.0.0.1:1", "localhost:1", "LocalHost.:1", "node1:1", "[::ffff:127.0.0.1]:1"];
    let other_loopback = [format!("[::1]:{port}"), format!("0.0.0.0:{port}"), format!("[::]:{port}")];
    let forbidden = elsewhere.into_iter().chain(wrong_port).chain(other_loopback.iter().map(String::as_str));
    for text in forbidden {
        assert_eq!(open(&mut call, text).await, Some(ErrorCode::NotAllowed), "{text}");
    }
    for host in
        ["127.0.0.1", "localhost", "LOCALHOST", "localhost.", "NODE1", "[::ffff:127.0.0.1]", "127.1.2.3"]
    {
        // The target listens at all but the last, which is allowed but refuses connections.
        let answer = open(&mut call, &format!("{host}:{port}")).await;
        let expected = (host == "127.1.2.3").then_some(ErrorCode::TargetRefused);
        assert_eq!(answer, expected, "{host}");
    }
}

#[tokio::test]
async fn the_default_policy_of_an_edge_allows_only_its_own_machine() {
    let (place, echo) = (TestDir::new(), targets::serve_ipv6(targets::echo_one).await);
    let mut server = ScriptedServer::start(&place).await;
    let _edge = start_edge(&place.edge("node1", server.at, ""));
    let mut call = server.call().await;
    call.answer(Some(Instance::random()));
    for text in [echo.to_string(), format!("localhost:{}", echo.port()), format!("node1:{}", echo.port())] {
        assert_eq!(open(&mut call, &text).await, None, "{text}");
    }
    for text in ["192.0.2.1:80", "[2001:db8::1]:80", "[::ffff:192.0.2.1]:80", "169.254.169.254:80"] {
        assert_eq!(open(&mut call, text).await, Some(ErrorCode::NotAllowed), "{text}");
    }
}

/// Opens a session at an edge. Returns the code of the refusal, if it refuses.
async fn open(call: &mut Call, text: &str) -> Option<ErrorCode> {
    let id = SessionId::random();
    call.send_session(
        id,
        SessionFrame::Open {
            target: target(text),
            limit: 1,
            epoch: 1,
            client: String::new(),
            opener: None,
            resume_timeout: None,
            boot: None,
        },
    )
    .await;
    match call.next_session_frame().await.1 {
        SessionFrame::Opened { .. } => None,
        SessionFrame::Refused { refusal, .. } => Some(refusal.code),
        other => panic!("{other:?}"),
    }
}
