//! The CONNECT port: clients get every byte and every end of a stream.

use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;

use crate::support::clients::{self, ESTABLISHED, assert_echo, assert_reset, head, rest};
use crate::support::programs::{TestDir, TestServer, assert_edge_idle, at, edge};
use crate::support::{assert_eventually, targets};

#[tokio::test]
async fn connect_transfers_bytes_both_ways_and_leaves_no_session_state() {
    let (place, echo) = (TestDir::new(), targets::echo().await);
    let server = TestServer::start(&place);
    let edge = edge(&place, &server, "node1").await;
    let mut client = server.open(&at("node1", echo)).await;
    assert_echo(&mut client, "hello").await;
    assert_echo(&mut client, "again").await;
    client.shutdown().await.unwrap();
    assert_eq!(rest(&mut client).await, b"");
    server.assert_idle().await;
    assert_edge_idle(&edge).await;
    assert_eq!(server.server.metrics.sessions.closed("connect", "ok"), 1);
    assert_eq!(
        (server.server.metrics.bytes_to_target.get(), server.server.metrics.bytes_to_client.get()),
        (10, 10)
    );
}

#[tokio::test]
async fn a_nodes_name_is_case_insensitive() {
    let (place, echo) = (TestDir::new(), targets::echo().await);
    let server = TestServer::start(&place);
    let _edge = edge(&place, &server, "Node1").await;
    assert_echo(&mut server.open(&at("nODE1", echo)).await, "hello").await;
}

#[tokio::test]
async fn connect_requests_of_all_common_clients_are_accepted() {
    let (place, echo) = (TestDir::new(), targets::echo().await);
    let server = TestServer::start(&place);
    let _edge = edge(&place, &server, "node1").await;
    let target = at("node1", echo);
    for request in [
        format!("CONNECT {target} HTTP/1.0\r\n\r\n"),
        format!("CONNECT {target} HTTP/1.1\r\n\r\n"),
        format!("CONNECT {target} HTTP/1.1\r\nHost: somewhere.else:1\r\nTraceid: t\r\n\r\n"),
        format!("CONNECT {target} HTTP/1.1\r\nHost: {target}\r\nProxy-Connection: keep-alive\r\n\r\n"),
    ] {
        let mut client = TcpStream::connect(server.connect).await.unwrap();
        client.write_all(request.as_bytes()).await.unwrap();
        let answer = head(&mut client).await;
        // An HTTP/1.0 client may get a response of its own version.
        assert_eq!(answer.replace("HTTP/1.0", "HTTP/1.1"), ESTABLISHED, "{request}");
        assert_echo(&mut client, "hello").await;
    }
}

#[tokio::test]
async fn bytes_after_the_request_head_are_kept() {
    let (place, echo) = (TestDir::new(), targets::echo().await);
    let server = TestServer::start(&place);
    let _edge = edge(&place, &server, "node1").await;
    let mut client = TcpStream::connect(server.connect).await.unwrap();
    let mut all = format!("CONNECT {} HTTP/1.1\r\n\r\n", at("node1", echo)).into_bytes();
    let buffered = targets::pattern(50_000);
    all.extend_from_slice(&buffered);
    client.write_all(&all).await.unwrap();
    assert_eq!(head(&mut client).await, ESTABLISHED);
    client.shutdown().await.unwrap();
    assert!(rest(&mut client).await == buffered);
}

#[tokio::test]
async fn a_client_may_close_its_direction_after_its_head() {
    let (place, source) = (TestDir::new(), targets::source(100_000).await);
    let server = TestServer::start(&place);
    let _edge = edge(&place, &server, "node1").await;
    let mut client = TcpStream::connect(server.connect).await.unwrap();
    let request = format!("CONNECT {} HTTP/1.1\r\n\r\n", at("node1", source));
    client.write_all(request.as_bytes()).await.unwrap();
    client.shutdown().await.unwrap();
    assert_eq!(head(&mut client).await, ESTABLISHED);
    assert!(rest(&mut client).await == targets::pattern(100_000));
}

#[tokio::test]
async fn the_targets_response_arrives_after_the_client_has_half_closed() {
    let (place, sink) = (TestDir::new(), targets::sink().await);
    let server = TestServer::start(&place);
    let _edge = edge(&place, &server, "node1").await;
    let mut client = server.open(&at("node1", sink)).await;
    client.write_all(&targets::pattern(300_000)).await.unwrap();
    client.shutdown().await.unwrap();
    assert_eq!(rest(&mut client).await, b"300000");
    server.assert_idle().await;
}

#[tokio::test]
async fn the_clients_bytes_arrive_after_the_target_has_half_closed() {
    let place = TestDir::new();
    let (end_sender, mut errors) = tokio::sync::mpsc::channel(1);
    // Closes its direction at once, and reports the bytes that it received in the other.
    let target = targets::serve(move |mut socket| {
        let end_sender = end_sender.clone();
        async move {
            socket.shutdown().await.unwrap();
            let mut all = Vec::new();
            socket.read_to_end(&mut all).await.unwrap();
            end_sender.send(all).await.unwrap();
        }
    })
    .await;
    let server = TestServer::start(&place);
    let _edge = edge(&place, &server, "node1").await;
    let mut client = server.open(&at("node1", target)).await;
    assert_eq!(rest(&mut client).await, b"", "the target's end arrives");
    client.write_all(&targets::pattern(200_000)).await.unwrap();
    client.shutdown().await.unwrap();
    assert!(assert_eventually("all bytes", errors.recv()).await.unwrap() == targets::pattern(200_000));
    server.assert_idle().await;
}

#[tokio::test]
async fn the_whole_response_arrives_while_the_client_still_sends() {
    let place = TestDir::new();
    let answer = targets::pattern(200_000);
    // Reads one byte, responds and closes. The bytes that the client still sends are discarded.
    let target = targets::serve(move |mut socket| {
        let answer = answer.clone();
        async move {
            socket.read_u8().await.unwrap();
            socket.write_all(&answer).await.unwrap();
            socket.shutdown().await.unwrap();
            let _ = tokio::io::copy(&mut socket, &mut tokio::io::sink()).await;
        }
    })
    .await;
    let server = TestServer::start(&place);
    let edge = edge(&place, &server, "node1").await;
    for round in 0..50 {
        let (mut from, mut to) = server.open(&at("node1", target)).await.into_split();
        let sends = crate::support::spawn(async move { while to.write_all(&[1; 4096]).await.is_ok() {} });
        let mut all = Vec::new();
        assert_eventually("the end of the response", from.read_to_end(&mut all)).await.unwrap();
        sends.abort();
        assert!(all == targets::pattern(200_000), "round {round}: {} bytes", all.len());
    }
    server.assert_idle().await;
    assert_edge_idle(&edge).await;
}

#[tokio::test]
async fn a_target_that_sends_first_is_received_after_the_head() {
    let place = TestDir::new();
    let target = targets::serve(|mut socket| async move {
        socket.write_all(b"SSH-2.0-banner\r\n").await.unwrap();
        let _ = socket.read_u8().await;
    })
    .await;
    let server = TestServer::start(&place);
    let _edge = edge(&place, &server, "node1").await;
    let mut client = TcpStream::connect(server.connect).await.unwrap();
    client.write_all(format!("CONNECT {} HTTP/1.1\r\n\r\n", at("node1", target)).as_bytes()).await.unwrap();
    assert_eq!(head(&mut client).await, ESTABLISHED);
    let mut banner = [0; 16];
    assert_eventually("the banner", client.read_exact(&mut banner)).await.unwrap();
    assert_eq!(&banner, b"SSH-2.0-banner\r\n");
}

#[tokio::test]
async fn a_client_reset_resets_the_connection_to_the_target() {
    let place = TestDir::new();
    let (target, mut errors) = targets::report_broken_connection().await;
    let server = TestServer::start(&place);
    let _edge = edge(&place, &server, "node1").await;
    let mut client = server.open(&at("node1", target)).await;
    client.write_all(b"half a fi").await.unwrap();
    clients::reset(client);
    let kind = assert_eventually("the target's error", errors.recv()).await.unwrap();
    assert_eq!(kind, std::io::ErrorKind::ConnectionReset);
    server.assert_idle().await;
    assert_eq!(server.server.metrics.sessions.closed("connect", "client_io_error"), 1);
}

#[tokio::test]
async fn a_target_reset_resets_the_connection_to_the_client() {
    let place = TestDir::new();
    let target = targets::serve(|mut socket| async move {
        socket.read_u8().await.unwrap();
        clients::reset(socket);
    })
    .await;
    let server = TestServer::start(&place);
    let _edge = edge(&place, &server, "node1").await;
    let mut client = server.open(&at("node1", target)).await;
    client.write_all(b"x").await.unwrap();
    assert_reset(&mut client).await;
    server.assert_idle().await;
}
