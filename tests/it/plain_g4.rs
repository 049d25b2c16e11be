//! Remotes of SuperEdge v0.8 and v0.9, message by message: they report neither a failed dial nor an end.

use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;
use tokio::time::Instant;
use tunnel_proto::codec::proto::StreamMsg;

use crate::support::call::Call;
use crate::support::clients::{is_reset, rest};
use crate::support::programs::{TestDir, TestServer, edge_forgets_all, start_edge};
use crate::support::remote::ScriptedServer;
use crate::support::{assert_eventually, hurry, remote, targets, wait_until};

/// Links an edge of v0.9, which ignores the probe.
async fn older(place: &TestDir, server: &TestServer) -> Call {
    let mut edge = remote::link(place, server, "node1", None).await;
    edge.is_older = true;
    edge
}

/// Opens a session, for which the edge is made to dial. Returns its topic, and the message to answer with.
async fn dialled(server: &TestServer, edge: &mut Call) -> (TcpStream, StreamMsg) {
    let dial = async {
        let asked = edge.hears().await;
        let expected = edge.plain("frontend", &asked.topic, "".into());
        assert_eq!(asked, StreamMsg { addr: "127.0.0.1:22".into(), ..expected });
        asked
    };
    tokio::join!(server.open("node1:22"), dial)
}

fn backend(asked: &StreamMsg, data: &'static str) -> StreamMsg {
    StreamMsg { r#type: "backend".into(), data: data.into(), ..asked.clone() }
}

#[tokio::test]
async fn a_target_that_speaks_first_is_heard_and_the_clients_end_is_reported() {
    let place = TestDir::new();
    let server = TestServer::start(&place);
    let mut edge = older(&place, &server).await;
    hurry();
    let (mut client, asked) = dialled(&server, &mut edge).await;
    edge.send(backend(&asked, "SSH-2.0-target\r\n")).await;
    let mut greeting = [0; 16];
    assert_eventually("the greeting", client.read_exact(&mut greeting)).await.unwrap();
    assert_eq!(&greeting, b"SSH-2.0-target\r\n");
    client.write_all(b"SSH-2.0-client\r\n").await.unwrap();
    let said = edge.hears().await;
    assert_eq!(said, StreamMsg { data: "SSH-2.0-client\r\n".into(), ..asked.clone() });
    assert_eq!(server.link("node1").unwrap().sender.dialect_name(), "superedge-0.9");
    drop(client);
    let closed = edge.hears().await;
    assert_eq!((closed.r#type.as_str(), &closed.topic), ("closed", &asked.topic));
    server.assert_idle().await;
}

#[tokio::test]
async fn a_dial_that_fails_silently_resets_the_client_after_ten_seconds() {
    let place = TestDir::new();
    let server = TestServer::start(&place);
    let mut edge = older(&place, &server).await;
    hurry();
    let (mut client, asked) = dialled(&server, &mut edge).await;
    let started = Instant::now();
    client.write_all(b"hello").await.unwrap();
    assert_eq!(edge.hears().await.data, "hello");
    is_reset(&mut client).await;
    assert!((10..13).contains(&started.elapsed().as_secs()), "{:?}", started.elapsed());
    let closed = edge.hears().await;
    assert_eq!((closed.r#type.as_str(), &closed.topic), ("closed", &asked.topic));
    server.assert_idle().await;
    wait_until("the cause is counted", || {
        server.server.metrics.sessions.closed("connect", "target_timeout") == 1
    })
    .await;
}

#[tokio::test]
async fn a_request_of_http_without_an_answer_gets_504() {
    let place = TestDir::new();
    let more = "[server.http_proxy]\nlisten = \"127.0.0.1:0\"\nauth = \"none\"\n";
    let server = TestServer::with(&place, more);
    let mut edge = older(&place, &server).await;
    hurry();
    let mut client = server.client("http_proxy").await;
    client.write_all(b"GET http://node1:8080/ HTTP/1.1\r\nHost: node1:8080\r\n\r\n").await.unwrap();
    assert_eq!(edge.hears().await.addr, "127.0.0.1:8080");
    let mut response = [0; 12];
    assert_eventually("a response", client.read_exact(&mut response)).await.unwrap();
    assert_eq!(&response, b"HTTP/1.1 504");
}

#[tokio::test]
async fn a_session_without_traffic_ends_after_the_configured_time() {
    let place = TestDir::new();
    let server = TestServer::with(&place, "[server.session]\nsuperedge_idle_timeout = \"90s\"\n");
    let mut edge = older(&place, &server).await;
    hurry();
    let (mut client, asked) = dialled(&server, &mut edge).await;
    edge.send(backend(&asked, "x")).await;
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
    is_reset(&mut client).await;
    server.assert_idle().await;
}

#[tokio::test]
async fn sessions_of_an_older_edge_end_with_its_link() {
    let place = TestDir::new();
    let server = TestServer::start(&place);
    let mut edge = older(&place, &server).await;
    hurry();
    let (mut client, asked) = dialled(&server, &mut edge).await;
    edge.send(backend(&asked, "x")).await;
    assert_eq!(assert_eventually("a byte", client.read_u8()).await.unwrap(), b'x');
    drop(edge);
    is_reset(&mut client).await;
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
    let answer = edge.hears().await;
    let text = String::from_utf8_lossy(&answer.data).into_owned();
    assert!(text.starts_with("HTTP/1.1 403 Forbidden\r\n"), "{text}");
    assert!(text.contains("it is not in server.edge_access.targets"), "{text}");
    edge.send(allowed.clone()).await;
    assert_eq!(edge.hears().await, backend(&allowed, "HTTP/1.1 200 Connection established\r\n\r\n"));
    edge.send(backend(&allowed, "there and back")).await;
    assert_eq!(edge.hears().await, backend(&allowed, "there and back"));
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
    let mut said = Vec::new();
    while said.len() < 14 {
        let message = call.hears().await;
        assert_eq!(backend(&frontend, ""), StreamMsg { data: "".into(), ..message.clone() });
        said.extend_from_slice(&message.data);
    }
    assert_eq!(said, b"hello and more");
    call.send(StreamMsg { r#type: "closed".into(), ..frontend.clone() }).await;
    edge_forgets_all(&edge).await;

    let nothing = targets::nothing().await;
    call.send(StreamMsg { addr: nothing.to_string(), topic: "two".into(), ..frontend.clone() }).await;
    let failed = call.hears().await;
    assert_eq!((failed.r#type.as_str(), failed.topic.as_str()), ("closed", "two"));
    assert_eq!(failed.data, format!("{nothing} refused the connection"));
    edge_forgets_all(&edge).await;
}

#[tokio::test]
async fn an_edges_proxy_asks_an_older_server_with_access() {
    let place = TestDir::new();
    let mut server = ScriptedServer::start(&place).await;
    let edge = start_edge(&place.edge("node1", server.at, "[edge.http_proxy]\nlisten = \"127.0.0.1:0\"\n"));
    let mut call = server.call().await;
    call.is_older = true;
    call.answer(None);
    hurry();
    wait_until("the edge has a link", || edge.metrics.links.all() > 0).await;
    let proxy = edge.bound.proxy.unwrap();
    let request = async {
        let mut client = TcpStream::connect(proxy).await.unwrap();
        client.write_all(b"CONNECT cloud.test:80 HTTP/1.1\r\nHost: x\r\n\r\n").await.unwrap();
        rest(&mut client).await
    };
    let serve = async {
        let asked = call.hears().await;
        assert_eq!((asked.category.as_str(), asked.r#type.as_str()), ("httpProxy", "access"));
        assert_eq!(asked.addr, "cloud.test:80");
        call.send(backend(&asked, "HTTP/1.1 500 Internal Server Error\r\n\r\n")).await;
    };
    let (answer, ()) = tokio::join!(request, serve);
    let answer = String::from_utf8_lossy(&answer).into_owned();
    assert!(answer.starts_with("HTTP/1.1 502 "), "{answer}");
    assert!(answer.contains("the server responded: HTTP/1.1 500 Internal Server Error"), "{answer}");
    edge_forgets_all(&edge).await;
}
