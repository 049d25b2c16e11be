//! Remotes that speak only SuperEdge's protocol, message by message.

use std::time::Duration;

use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::time::{Instant, timeout};
use tunnel_proto::codec::proto::StreamMsg;

use crate::support::call::Call;
use crate::support::clients::{self, assert_echo, assert_reset, rest};
use crate::support::programs::{TestDir, TestServer, assert_edge_idle, start_edge};
use crate::support::remote::ScriptedServer;
use crate::support::{Stopwatch, assert_eventually, pause_time, remote, spawn, targets, wait_until};

/// Opens a session to a plain edge, which accepts it.
async fn accepted(server: &TestServer, edge: &mut Call) -> (tokio::net::TcpStream, String) {
    let accept = async {
        let open = edge.next_session_message().await;
        assert_eq!((open.r#type.as_str(), open.addr.as_str()), ("connecting", "127.0.0.1:22"));
        edge.send_plain("connected", &open.topic, "").await;
        open.topic
    };
    tokio::join!(server.open("node1:22"), accept)
}

#[tokio::test]
async fn a_plain_edge_is_served_with_superedges_messages() {
    let place = TestDir::new();
    let server = TestServer::start(&place);
    let mut edge = remote::link(&place, &server, "node1", None).await;
    assert!(edge.headers.contains_key("tunnel-instance"), "a server names itself to every edge");
    let accept = async {
        let open = edge.next_session_message().await;
        let expected =
            edge.plain("connecting", &open.topic, "CONNECT 127.0.0.1:22 HTTP/1.1\r\n\r\n\r\n".into());
        assert_eq!(open, StreamMsg { addr: "127.0.0.1:22".into(), ..expected });
        edge.send_plain("connected", &open.topic, "").await;
        open.topic
    };
    let (mut client, topic) = tokio::join!(server.open("node1:22"), accept);
    client.write_all(b"hello").await.unwrap();
    assert_eq!(edge.next_session_message().await, edge.plain("tcp-forward", &topic, "hello".into()));
    edge.send_plain("tcp-forward", &topic, "wor").await;
    edge.send_plain("tcp-forward", &topic, "ld").await;
    edge.send_plain("closed", &topic, "EOF").await;
    assert_eq!(rest(&mut client).await, b"world");
    client.shutdown().await.unwrap();
    server.assert_idle().await;
    // Later messages are answered as SuperEdge does, so that the remote closes as well.
    edge.send_plain("tcp-forward", &topic, "late").await;
    let closed = edge.plain("closed", &topic, "msg cannot be forwarded due to disconnection".into());
    assert_eq!(edge.next_session_message().await, closed);
}

#[tokio::test]
async fn programs_behind_a_plain_edge_reach_allowed_targets_in_the_cloud() {
    let (place, echo, other) = (TestDir::new(), targets::echo().await, targets::echo().await);
    let server = TestServer::with(&place, &format!("[server.edge_access]\ntargets = [\"{echo}\"]\n"));
    let mut edge = remote::link(&place, &server, "node1", None).await;
    let message = |edge: &Call, kind: &str, addr: String, data: String| {
        let category = "httpProxy".into();
        StreamMsg { category, addr, ..edge.plain(kind, "a topic", data.into()) }
    };
    let open_message = |edge: &Call, to| {
        message(edge, "connecting", format!("{to}"), format!("CONNECT {to} HTTP/1.1\r\n\r\n\r\n"))
    };
    edge.send(open_message(&edge, other)).await;
    let refused = edge.next_session_message().await;
    assert_eq!(refused.r#type, "connect-failed", "{refused:?}");
    let why = String::from_utf8_lossy(&refused.data).into_owned();
    assert!(why.contains("it is not in server.edge_access.targets"), "{why}");
    edge.send(open_message(&edge, echo)).await;
    assert_eq!(edge.next_session_message().await, message(&edge, "connected", String::new(), String::new()));
    edge.send(message(&edge, "tcp-forward", String::new(), "there and back".into())).await;
    assert_eq!(
        edge.next_session_message().await,
        message(&edge, "tcp-forward", String::new(), "there and back".into())
    );
    edge.send(message(&edge, "closed", String::new(), "EOF".into())).await;
    server.assert_idle().await;
}

#[tokio::test]
async fn a_plain_edges_failed_dial_has_its_status_and_reason() {
    let place = TestDir::new();
    let server = TestServer::start(&place);
    let mut edge = remote::link(&place, &server, "node1", None).await;
    for (reason, status) in [
        ("dial tcp 127.0.0.1:22: connect: connection refused", 502),
        ("dial tcp 127.0.0.1:22: i/o timeout", 504),
        ("dial tcp: lookup x: no such host", 502),
    ] {
        let refuse = async {
            let open = edge.next_session_message().await;
            edge.send_plain("connect-failed", &open.topic, reason).await;
        };
        let (answer, ()) = tokio::join!(server.request_connect("node1:22"), refuse);
        assert_eq!((answer.status, answer.phrase), (status, format!("node node1: {reason}")));
    }
    server.assert_idle().await;
}

#[tokio::test]
async fn a_plain_edge_that_never_answers_times_out_and_gets_a_close() {
    let place = TestDir::new();
    let server = TestServer::with(&place, "[server.session]\nopen_timeout = \"300ms\"");
    let mut edge = remote::link(&place, &server, "node1", None).await;
    let (answer, open) = tokio::join!(server.request_connect("node1:22"), edge.next_session_message());
    assert_eq!(answer.status, 504, "{answer:?}");
    let closed = edge.next_session_message().await;
    assert_eq!((closed.r#type.as_str(), closed.topic), ("closed", open.topic));
    server.assert_idle().await;
}

#[tokio::test]
async fn a_plain_edges_heartbeat_is_echoed_at_once() {
    let place = TestDir::new();
    let server = TestServer::start(&place);
    let mut edge = remote::link(&place, &server, "node1", None).await;
    let heartbeat = StreamMsg {
        node: "node1".into(),
        category: "stream".into(),
        r#type: "heartbeat".into(),
        topic: "node1heartbeat".into(),
        ..StreamMsg::default()
    };
    for _ in 0..3 {
        edge.send(heartbeat.clone()).await;
        assert_eq!(assert_eventually("the echo", edge.next()).await.unwrap(), heartbeat);
    }
}

#[tokio::test]
async fn a_half_closed_client_still_gets_the_plain_edges_response() {
    let place = TestDir::new();
    let server = TestServer::start(&place);
    let mut edge = remote::link(&place, &server, "node1", None).await;
    let (mut client, topic) = accepted(&server, &mut edge).await;
    client.write_all(b"question").await.unwrap();
    client.shutdown().await.unwrap();
    assert_eq!(edge.next_session_message().await.data, "question");
    edge.send_plain("tcp-forward", &topic, "answer").await;
    edge.send_plain("closed", &topic, "EOF").await;
    assert_eq!(rest(&mut client).await, b"answer");
    server.assert_idle().await;
}

#[tokio::test]
async fn a_half_closed_plain_session_ends_after_half_a_minute_of_silence() {
    let place = TestDir::new();
    let server = TestServer::start(&place);
    let mut edge = remote::link(&place, &server, "node1", None).await;
    let (mut client, topic) = accepted(&server, &mut edge).await;
    pause_time();
    let started = Instant::now();
    client.shutdown().await.unwrap();
    // Half a minute is longer than the usual timeout of a message.
    let closed = loop {
        let message = edge.next().await.unwrap();
        if message.category != "stream" {
            break message;
        }
    };
    assert_eq!(closed, edge.plain("closed", &topic, "EOF".into()));
    assert!((30..45).contains(&started.elapsed().as_secs()), "{:?}", started.elapsed());
    server.assert_idle().await;
}

#[tokio::test]
async fn sessions_of_a_plain_link_end_with_it() {
    let place = TestDir::new();
    let server = TestServer::start(&place);
    let mut edge = remote::link(&place, &server, "node1", None).await;
    let (mut client, _) = accepted(&server, &mut edge).await;
    drop(edge);
    assert_reset(&mut client).await;
    server.assert_idle().await;
}

#[tokio::test]
async fn a_slow_reader_of_a_plain_link_is_reset_and_others_continue() {
    let place = TestDir::new();
    let server = TestServer::start(&place);
    let mut edge = remote::link(&place, &server, "node1", None).await;
    let (mut slow, slow_topic) = accepted(&server, &mut edge).await;
    let (mut neighbour, topic) = accepted(&server, &mut edge).await;
    let started = Stopwatch::start();
    let flood = async {
        // More than all buffers on the path hold.
        for _ in 0..2000 {
            edge.send_plain("tcp-forward", &slow_topic, vec![0; 16 * 1024]).await;
        }
        edge.send_plain("tcp-forward", &topic, "for the neighbour").await;
    };
    let mut text = [0; 17];
    let (read, ()) =
        tokio::join!(assert_eventually("the neighbour's bytes", neighbour.read_exact(&mut text)), flood);
    read.unwrap();
    assert_eq!(&text, b"for the neighbour");
    assert!(started.elapsed().as_secs() < 4, "{:?}", started.elapsed());
    let resets = || server.server.metrics.resets.counted("slow_reader");
    wait_until("the reset is counted", || resets() == 1).await;
    assert!(server.server.metrics.read_pauses.get() > 0);
    let mut all = Vec::new();
    assert!(assert_eventually("the end of the slow session", slow.read_to_end(&mut all)).await.is_err());
    edge.send_plain("closed", &topic, "EOF").await;
    drop((slow, neighbour));
    server.assert_idle().await;
}

/// Stalled sessions are reset after a pause of 2 s and of 1 s. Then a session that is slow, but read, has a pause left.
#[tokio::test]
async fn two_stalled_readers_of_a_plain_link_cost_a_slow_one_nothing() {
    let place = TestDir::new();
    let server = TestServer::start(&place);
    let mut edge = remote::link(&place, &server, "node1", None).await;
    let mut stalled = Vec::new();
    for _ in 0..2 {
        stalled.push(accepted(&server, &mut edge).await);
    }
    let (mut slow, topic) = accepted(&server, &mut edge).await;
    let resets = || server.server.metrics.resets.counted("slow_reader");
    let flood = async {
        for (_, topic) in &stalled {
            for _ in 0..2000 {
                edge.send_plain("tcp-forward", topic, vec![0; 16 * 1024]).await;
            }
        }
        for _ in 0..2000 {
            edge.send_plain("tcp-forward", &topic, vec![1; 16 * 1024]).await;
        }
    };
    let read = async {
        wait_until("the stalled sessions are reset", || resets() == 2).await;
        let pauses = server.server.metrics.read_pauses.get();
        wait_until("the link pauses for the slow session", || {
            server.server.metrics.read_pauses.get() > pauses || resets() > 2
        })
        .await;
        let mut all = vec![0; 2000 * 16 * 1024];
        assert_eventually("every byte of the slow session", slow.read_exact(&mut all)).await
    };
    let (read, ()) = tokio::join!(read, flood);
    read.unwrap();
    assert_eq!(resets(), 2);
    for (client, _) in &mut stalled {
        let mut all = Vec::new();
        let end = assert_eventually("the end of a stalled session", client.read_to_end(&mut all)).await;
        assert!(end.is_err());
    }
    edge.send_plain("closed", &topic, "EOF").await;
    drop((stalled, slow));
    server.assert_idle().await;
}

#[tokio::test]
async fn an_edge_serves_a_plain_server_that_waits_for_a_heartbeat() {
    let (place, echo) = (TestDir::new(), targets::echo().await);
    let mut server = ScriptedServer::start(&place).await;
    let edge = start_edge(&place.edge("node1", server.at, ""));
    let mut call = server.call().await;
    let heartbeat = assert_eventually("a heartbeat before any answer", call.next()).await.unwrap();
    assert_eq!((heartbeat.r#type.as_str(), heartbeat.topic.as_str()), ("heartbeat", "node1heartbeat"));
    call.answer(None);
    call.send(heartbeat).await;

    let connecting = call.plain("connecting", "any text", "CONNECT x HTTP/1.1\r\n\r\n\r\n".into());
    call.send(StreamMsg { addr: echo.to_string(), ..connecting.clone() }).await;
    assert_eq!(call.next_session_message().await, call.plain("connected", "any text", "".into()));
    call.send_plain("tcp-forward", "any text", "hello").await;
    assert_eq!(call.next_session_message().await, call.plain("tcp-forward", "any text", "hello".into()));
    call.send_plain("closed", "any text", "EOF").await;
    assert_edge_idle(&edge).await;

    let nothing = targets::closed_port().await;
    call.send(StreamMsg { addr: nothing.to_string(), topic: "two".into(), ..connecting.clone() }).await;
    let failed = call.next_session_message().await;
    assert_eq!((failed.r#type.as_str(), failed.topic.as_str()), ("connect-failed", "two"));
    assert_eq!(failed.data, format!("{nothing} refused the connection"));
    call.send(StreamMsg { addr: "no port".into(), topic: "three".into(), ..connecting }).await;
    assert_eq!(call.next_session_message().await.r#type, "connect-failed");
    assert_edge_idle(&edge).await;
}

#[tokio::test]
async fn a_target_that_closes_ends_its_plain_session_after_its_last_bytes() {
    let place = TestDir::new();
    let target = targets::serve(|mut socket| async move {
        let _ = socket.write_all(b"last words").await;
    })
    .await;
    let mut server = ScriptedServer::start(&place).await;
    let edge = start_edge(&place.edge("node1", server.at, ""));
    let mut call = server.call().await;
    call.answer(None);
    let connecting = call.plain("connecting", "t", "".into());
    call.send(StreamMsg { addr: target.to_string(), ..connecting }).await;
    assert_eq!(call.next_session_message().await.r#type, "connected");
    assert_eq!(call.next_session_message().await.data, "last words");
    // The client waits only for this message.
    let started = Stopwatch::start();
    assert_eq!(call.next_session_message().await.r#type, "closed");
    assert!(started.elapsed().as_millis() < 3000, "{:?}", started.elapsed());
    assert_edge_idle(&edge).await;
}

/// A client that continues to send after the target's end gets half a minute, but not if its bytes are not read.
#[tokio::test]
async fn a_target_that_stops_reading_closes_its_plain_session_at_once() {
    let place = TestDir::new();
    let ends = targets::serve(|mut socket| async move {
        let _ = socket.write_all(b"last words").await;
    })
    .await;
    let breaks_off = targets::serve(|mut socket| async move {
        let _ = socket.write_all(b"last words").await;
        let _ = socket.read_u8().await;
        clients::reset(socket);
    })
    .await;
    let mut server = ScriptedServer::start(&place).await;
    let edge = start_edge(&place.edge("node1", server.at, ""));
    let mut call = server.call().await;
    call.answer(None);
    for (target, topic) in [(ends, "ends"), (breaks_off, "breaks off")] {
        let connecting = call.plain("connecting", topic, "".into());
        call.send(StreamMsg { addr: target.to_string(), ..connecting }).await;
        // Bytes for the previous target that crossed its end are answered.
        while call.next_session_message().await.r#type != "connected" {}
        assert_eq!(call.next_session_message().await.data, "last words");
        let started = Stopwatch::start();
        let closed = loop {
            call.send_plain("tcp-forward", topic, "more").await;
            if let Ok(message) = timeout(Duration::from_millis(20), call.next_session_message()).await {
                break message;
            }
        };
        assert_eq!((closed.r#type.as_str(), closed.topic.as_str()), ("closed", topic));
        assert!(started.elapsed().as_millis() < 900, "{topic}: {:?}", started.elapsed());
    }
    assert_edge_idle(&edge).await;
}

#[tokio::test]
async fn an_edge_sends_a_plain_server_a_heartbeat_each_minute() {
    let place = TestDir::new();
    let mut server = ScriptedServer::start(&place).await;
    let _edge = start_edge(&place.edge("node1", server.at, ""));
    let mut call = server.call().await;
    let first = call.next().await.unwrap();
    call.answer(None);
    call.send(first.clone()).await;
    pause_time();
    let mut last = Instant::now();
    for _ in 0..3 {
        assert_eq!(call.next().await.unwrap(), first);
        assert!((55..70).contains(&last.elapsed().as_secs()), "{:?}", last.elapsed());
        last = Instant::now();
        call.send(first.clone()).await;
    }
    // The server is alive, and so is the link.
    spawn(async move { while call.next().await.is_some() {} });
}

#[tokio::test]
async fn an_extended_and_a_plain_edge_share_one_server() {
    let (place, echo) = (TestDir::new(), targets::echo().await);
    let server = TestServer::start(&place);
    let _edge = crate::support::programs::edge(&place, &server, "node2").await;
    let mut plain = remote::link(&place, &server, "node1", None).await;
    let (_client, _) = accepted(&server, &mut plain).await;
    assert_echo(&mut server.open(&format!("node2:{}", echo.port())).await, "hello").await;
    assert_eq!(server.server.metrics.nodes.get(), 2);
}
