//! Remotes of SuperEdge v0.8 and v0.9, message by message: they report neither a failed dial nor an end.

use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;
use tokio::time::Instant;
use tunnel_proto::codec::proto::StreamMsg;

use crate::support::call::Call;
use crate::support::clients::{assert_reset, rest};
use crate::support::programs::{TestDir, TestServer, assert_edge_idle, start_edge};
use crate::support::remote::ScriptedServer;
use crate::support::{assert_eventually, pause_time, remote, targets, wait_until};

/// Links an edge of v0.9, which ignores the probe.
async fn older(place: &TestDir, server: &TestServer) -> Call {
    let mut edge = remote::link(place, server, "node1", None).await;
    edge.is_older = true;
    edge
}

/// Opens a session, for which the edge is made to dial. Returns its topic, and the message to answer with.
async fn dialled(server: &TestServer, edge: &mut Call) -> (TcpStream, StreamMsg) {
    let dial = async {
        let open = edge.next_session_message().await;
        let expected = edge.plain("frontend", &open.topic, "".into());
        assert_eq!(open, StreamMsg { addr: "127.0.0.1:22".into(), ..expected });
        open
    };
    tokio::join!(server.open("node1:22"), dial)
}

fn backend(open: &StreamMsg, data: &'static str) -> StreamMsg {
    StreamMsg { r#type: "backend".into(), data: data.into(), ..open.clone() }
}

#[tokio::test]
async fn bytes_of_a_target_that_sends_first_arrive_and_the_clients_end_is_forwarded() {
    let place = TestDir::new();
    let server = TestServer::start(&place);
    let mut edge = older(&place, &server).await;
    pause_time();
    let (mut client, open) = dialled(&server, &mut edge).await;
    edge.send(backend(&open, "SSH-2.0-target\r\n")).await;
    let mut greeting = [0; 16];
    assert_eventually("the greeting", client.read_exact(&mut greeting)).await.unwrap();
    assert_eq!(&greeting, b"SSH-2.0-target\r\n");
    client.write_all(b"SSH-2.0-client\r\n").await.unwrap();
    let data = edge.next_session_message().await;
    assert_eq!(data, StreamMsg { data: "SSH-2.0-client\r\n".into(), ..open.clone() });
    assert_eq!(server.link("node1").unwrap().link.generation(), "superedge-0.9");
    drop(client);
    let closed = edge.next_session_message().await;
    assert_eq!((closed.r#type.as_str(), &closed.topic), ("closed", &open.topic));
    server.assert_idle().await;
}

#[tokio::test]
async fn a_dial_that_fails_silently_resets_the_client_after_ten_seconds() {
    let place = TestDir::new();
    let server = TestServer::start(&place);
    let mut edge = older(&place, &server).await;
    pause_time();
    let (mut client, open) = dialled(&server, &mut edge).await;
    let started = Instant::now();
    client.write_all(b"hello").await.unwrap();
    assert_eq!(edge.next_session_message().await.data, "hello");
    assert_reset(&mut client).await;
    assert!((10..13).contains(&started.elapsed().as_secs()), "{:?}", started.elapsed());
    let closed = edge.next_session_message().await;
    assert_eq!((closed.r#type.as_str(), &closed.topic), ("closed", &open.topic));
    server.assert_idle().await;
    wait_until("the cause is counted", || {
        server.server.metrics.sessions.closed("connect", "target_timeout") == 1
    })
    .await;
}

#[tokio::test]
async fn an_http_request_without_a_response_gets_504() {
    let place = TestDir::new();
    let more = "[server.http_proxy]\nlisten = \"127.0.0.1:0\"\nauth = \"none\"\n";
    let server = TestServer::with(&place, more);
    let mut edge = older(&place, &server).await;
    pause_time();
    let mut client = server.client("http_proxy").await;
    client.write_all(b"GET http://node1:8080/ HTTP/1.1\r\nHost: node1:8080\r\n\r\n").await.unwrap();
    assert_eq!(edge.next_session_message().await.addr, "127.0.0.1:8080");
    let mut response = [0; 12];
    assert_eventually("a response", client.read_exact(&mut response)).await.unwrap();
    assert_eq!(&response, b"HTTP/1.1 504");
}

#[tokio::test]
async fn a_session_without_traffic_ends_after_the_configured_time() {
    let place = TestDir::new();
    let server = TestServer::with(&place, "[server.session]\nsuperedge_idle_timeout = \"90s\"\n");
    let mut edge = older(&place, &server).await;
    pause_time();
    let (mut client, open) = dialled(&server, &mut edge).await;
    edge.send(backend(&open, "x")).await;
    assert_eq!(assert_eventually("a byte", client.read_u8()).await.unwrap(), b'x');
    let started = Instant::now();
    let closed = loop {
        let message = edge.next().await.unwrap();
        if message.category != "stream" {
            break message;
        }
    };
    assert_eq!(closed.r#type, "closed");
    assert!((89..100).contains(&started.elapsed().as_secs()), "{:?}", started.elapsed());
    assert_reset(&mut client).await;
    server.assert_idle().await;
}

#[tokio::test]
async fn sessions_of_an_older_edge_end_with_its_link() {
    let place = TestDir::new();
    let server = TestServer::start(&place);
    let mut edge = older(&place, &server).await;
    pause_time();
    let (mut client, open) = dialled(&server, &mut edge).await;
    edge.send(backend(&open, "x")).await;
    assert_eq!(assert_eventually("a byte", client.read_u8()).await.unwrap(), b'x');
    drop(edge);
    assert_reset(&mut client).await;
    server.assert_idle().await;
}

#[tokio::test]
async fn programs_behind_an_older_edge_reach_allowed_targets_in_the_cloud() {
    let (place, echo, other) = (TestDir::new(), targets::echo().await, targets::echo().await);
    let server = TestServer::with(&place, &format!("[server.edge_access]\ntargets = [\"{echo}\"]\n"));
    let mut edge = older(&place, &server).await;
    let access = |topic: &str, to: std::net::SocketAddr| StreamMsg {
        category: "httpProxy".into(),
        addr: to.to_string(),
        ..edge.plain("access", topic, format!("CONNECT {to} HTTP/1.1\r\nHost: {to}\r\n\r\n").into())
    };
    let (allowed, refused) = (access("one", echo), access("two", other));
    edge.send(refused.clone()).await;
    let answer = edge.next_session_message().await;
    let text = String::from_utf8_lossy(&answer.data).into_owned();
    assert!(text.starts_with("HTTP/1.1 403 Forbidden\r\n"), "{text}");
    assert!(text.contains("it is not in server.edge_access.targets"), "{text}");
    edge.send(allowed.clone()).await;
    assert_eq!(
        edge.next_session_message().await,
        backend(&allowed, "HTTP/1.1 200 Connection established\r\n\r\n")
    );
    edge.send(backend(&allowed, "there and back")).await;
    assert_eq!(edge.next_session_message().await, backend(&allowed, "there and back"));
    // The edge reports no end, so the session ends with the link.
    drop(edge);
    server.assert_idle().await;
}

#[tokio::test]
async fn an_edge_serves_a_server_of_an_older_generation() {
    let (place, echo) = (TestDir::new(), targets::echo().await);
    let mut server = ScriptedServer::start(&place).await;
    let edge = start_edge(&place.edge("node1", server.at, ""));
    let mut call = server.call().await;
    call.is_older = true;
    call.answer(None);
    let frontend = call.plain("frontend", "a topic", "hello".into());
    let frontend = StreamMsg { addr: echo.to_string(), ..frontend };
    call.send(frontend.clone()).await;
    call.send(StreamMsg { data: " and more".into(), ..frontend.clone() }).await;
    let mut received = Vec::new();
    while received.len() < 14 {
        let message = call.next_session_message().await;
        assert_eq!(backend(&frontend, ""), StreamMsg { data: "".into(), ..message.clone() });
        received.extend_from_slice(&message.data);
    }
    assert_eq!(received, b"hello and more");
    call.send(StreamMsg { r#type: "closed".into(), ..frontend.clone() }).await;
    assert_edge_idle(&edge).await;

    let nothing = targets::closed_port().await;
    call.send(StreamMsg { addr: nothing.to_string(), topic: "two".into(), ..frontend.clone() }).await;
    let failed = call.next_session_message().await;
    assert_eq!((failed.r#type.as_str(), failed.topic.as_str()), ("closed", "two"));
    assert_eq!(failed.data, format!("{nothing} refused the connection"));
    assert_edge_idle(&edge).await;
}

#[tokio::test]
async fn the_proxy_of_an_edge_sends_access_to_an_older_server() {
    let place = TestDir::new();
    let mut server = ScriptedServer::start(&place).await;
    let edge = start_edge(&place.edge("node1", server.at, "[edge.http_proxy]\nlisten = \"127.0.0.1:0\"\n"));
    let mut call = server.call().await;
    call.is_older = true;
    call.answer(None);
    pause_time();
    wait_until("the edge has a link", || edge.metrics.links.all() > 0).await;
    let proxy = edge.bound.proxy.unwrap();
    let request = async {
        let mut client = TcpStream::connect(proxy).await.unwrap();
        client.write_all(b"CONNECT cloud.test:80 HTTP/1.1\r\nHost: x\r\n\r\n").await.unwrap();
        rest(&mut client).await
    };
    let serve = async {
        let access = call.next_session_message().await;
        assert_eq!((access.category.as_str(), access.r#type.as_str()), ("httpProxy", "access"));
        assert_eq!(access.addr, "cloud.test:80");
        call.send(backend(&access, "HTTP/1.1 500 Internal Server Error\r\n\r\n")).await;
    };
    let (answer, ()) = tokio::join!(request, serve);
    let answer = String::from_utf8_lossy(&answer).into_owned();
    assert!(answer.starts_with("HTTP/1.1 502 "), "{answer}");
    assert!(answer.contains("the server responded: HTTP/1.1 500 Internal Server Error"), "{answer}");
    assert_edge_idle(&edge).await;
}
