//! Clients without rights cannot keep others out, and no client can take all permits.

use std::net::{IpAddr, SocketAddr};
use std::time::Duration;

use futures_util::future::join_all;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpSocket, TcpStream};
use tokio::sync::{Mutex, MutexGuard};
use tokio::time::Instant;
use tunnel::edge::Edge;
use tunnel_net::fd_limit;
use tunnel_proto::frame::{ErrorCode, SessionError, SessionFrame};
use tunnel_proto::names::{Instance, SessionId};

use crate::support::call::Call;
use crate::support::clients::{Answer, ESTABLISHED, answer, assert_echo, get, head, rest};
use crate::support::programs::{TestDir, TestServer, at, edge, start_edge};
use crate::support::{assert_eventually, pause_time, remote, spawn, targets, wait_until, wait_within};
use crate::words::LogLines;

/// Connects from one of this machine's many addresses.
async fn connect_from(from: &str, to: SocketAddr) -> TcpStream {
    let socket = TcpSocket::new_v4().unwrap();
    socket.bind(SocketAddr::new(from.parse::<IpAddr>().unwrap(), 0)).unwrap();
    assert_eventually("a connection", socket.connect(to)).await.unwrap()
}

/// Connections that send nothing. Only one test at a time has them, because the whole process shares one limit of open
/// files.
struct SilentConnections {
    sockets: Vec<TcpStream>,
    _turn: MutexGuard<'static, ()>,
}

/// Opens `count` silent connections from one address.
async fn silent(count: usize, from: &str, to: SocketAddr) -> SilentConnections {
    static TURN: Mutex<()> = Mutex::const_new(());
    let turn = TURN.lock().await;
    let needed = u64::try_from(2 * count).unwrap() + 2000;
    let raised = fd_limit::raise();
    assert!(raised.to >= needed, "needs {needed} open files, the hard limit is {}", raised.hard);
    let mut sockets = Vec::with_capacity(count);
    while sockets.len() < count {
        let some = (0..200.min(count - sockets.len())).map(|_| connect_from(from, to));
        sockets.extend(join_all(some).await);
    }
    SilentConnections { sockets, _turn: turn }
}

/// Sends a CONNECT request from an address, and returns the response.
async fn request_connect_from(from: &str, server: &TestServer, target: &str) -> Answer {
    let mut socket = connect_from(from, server.connect).await;
    let request = format!("CONNECT {target} HTTP/1.1\r\nHost: x\r\n\r\n");
    // The server may have refused and closed the connection by then.
    let _ = socket.write_all(request.as_bytes()).await;
    answer(socket).await
}

/// Opens a session from an address.
async fn open_from(from: &str, server: &TestServer, target: &str) -> TcpStream {
    let mut socket = connect_from(from, server.connect).await;
    socket.write_all(format!("CONNECT {target} HTTP/1.1\r\n\r\n").as_bytes()).await.unwrap();
    assert_eq!(head(&mut socket).await, ESTABLISHED);
    socket
}

#[tokio::test]
async fn silent_connections_from_one_address_block_no_edge() {
    let (place, echo) = (TestDir::new(), targets::echo().await);
    let server = TestServer::start(&place);
    // Time passes only while both ends are idle, so a busy machine does not count.
    pause_time();
    let _silent = silent(SILENT, OTHER, server.server.bound.grpc).await;
    let started = Instant::now();
    let _edge = edge(&place, &server, "node1").await;
    assert!(started.elapsed() < Duration::from_secs(5), "linked after {:?}", started.elapsed());
    let refused = |cause| server.server.metrics.links_rejected.counted(cause);
    assert_eq!(refused("timed_out"), 0, "the edge did not wait for them");
    assert_echo(&mut server.open(&at("node1", echo)).await, "hello").await;
    let all = u64::try_from(SILENT).unwrap();
    wait_within(Duration::from_secs(30), "the silent connections are closed", || {
        refused("timed_out") + refused("evicted") == all
    })
    .await;
    let took = started.elapsed();
    assert!(took < Duration::from_secs(20), "they stayed open for {took:?}");
}

#[tokio::test]
async fn edges_of_one_address_reconnect_despite_silent_connections() {
    let place = TestDir::new();
    pause_time();
    let alone = reconnect_time(&place, 0).await;
    let next_to_silent = reconnect_time(&place, SILENT).await;
    assert!(
        next_to_silent < 4 * alone + Duration::from_secs(5),
        "{alone:?} alone, {next_to_silent:?} next to silent connections"
    );
}

/// Returns how long many edges at one address take to link at once, next to `others` silent connections.
async fn reconnect_time(place: &TestDir, others: usize) -> Duration {
    let server = TestServer::start(place);
    let _silent = silent(others, "127.0.0.1", server.server.bound.grpc).await;
    let started = Instant::now();
    let edges: Vec<Edge> = (0..EDGES)
        .map(|n| start_edge(&place.edge(&format!("edge{n}"), server.server.bound.grpc, "")))
        .collect();
    wait_until("all are linked", || server.server.registry.nodes().len() == EDGES).await;
    let took = started.elapsed();
    join_all(edges.into_iter().map(|edge| edge.shutdown(async {}))).await;
    took
}

#[tokio::test(flavor = "multi_thread")]
async fn silent_connections_from_one_address_block_no_client() {
    let (place, echo) = (TestDir::new(), targets::echo().await);
    let server = TestServer::start(&place);
    let _edge = edge(&place, &server, "node1").await;
    let mut silent = silent(SILENT, OTHER, server.connect).await;
    assert_echo(&mut server.open(&at("node1", echo)).await, "hello").await;
    // From the same address as well: the connection that was silent for longest is evicted.
    assert_echo(&mut open_from(OTHER, &server, &at("node1", echo)).await, "hello").await;
    assert_eq!(rest(&mut silent.sockets[0]).await, b"", "the oldest was closed");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_forbidden_client_is_refused_at_once_and_takes_no_permit() {
    let (place, echo) = (TestDir::new(), targets::echo().await);
    let server = TestServer::with(&place, "allow_from = [\"127.0.0.1\"]");
    let _edge = edge(&place, &server, "node1").await;
    // Before any request was sent.
    let text = rest(&mut connect_from(OTHER, server.connect).await).await;
    assert!(text.starts_with(b"HTTP/1.1 403 your address 127.0.0.77 is not allowed here\r\n"), "{text:?}");
    for _ in 0..50 {
        let answer = request_connect_from(OTHER, &server, &at("node1", echo)).await;
        assert_eq!(
            (answer.status, answer.phrase.as_str()),
            (403, "your address 127.0.0.77 is not allowed here")
        );
        assert!(answer.head.contains("connection: close"), "{answer:?}");
    }
    let _silent = silent(SILENT, OTHER, server.connect).await;
    assert_echo(&mut server.open(&at("node1", echo)).await, "hello").await;
    let forbidden = || server.server.metrics.connections_rejected.counted("forbidden");
    let all = u64::try_from(SILENT).unwrap() + 51;
    wait_until("all are counted", || forbidden() == all).await;
}

#[tokio::test]
async fn idle_connections_to_an_admin_port_block_no_probe() {
    let place = TestDir::new();
    let server = TestServer::start(&place);
    let _silent = silent(200, "127.0.0.1", server.server.bound.log).await;
    for _ in 0..10 {
        assert_eq!(get(server.server.bound.log, "/livez").await.status, 200);
    }
}

#[tokio::test]
async fn a_connect_with_a_body_is_refused_and_early_bytes_are_not_lost() {
    let (place, echo) = (TestDir::new(), targets::echo().await);
    let server = TestServer::start(&place);
    let _edge = edge(&place, &server, "node1").await;
    let target = at("node1", echo);
    for field in ["Content-Length: 5", "Transfer-Encoding: chunked"] {
        let mut socket = TcpStream::connect(server.connect).await.unwrap();
        let request = format!("CONNECT {target} HTTP/1.1\r\n{field}\r\n\r\nearly");
        socket.write_all(request.as_bytes()).await.unwrap();
        let answer = answer(socket).await;
        assert_eq!(answer.status, 400, "{field}: {answer:?}");
    }
    let mut socket = TcpStream::connect(server.connect).await.unwrap();
    let request = format!("CONNECT {target} HTTP/1.1\r\nContent-Length: 0\r\n\r\nearly");
    socket.write_all(request.as_bytes()).await.unwrap();
    assert_eq!(head(&mut socket).await, ESTABLISHED);
    let mut buffered = [0; 5];
    assert_eventually("early bytes", socket.read_exact(&mut buffered)).await.unwrap();
    assert_eq!(&buffered, b"early");
}

#[tokio::test]
async fn a_client_has_its_share_of_sessions_and_the_refusal_names_the_key() {
    let (place, echo) = (TestDir::new(), targets::echo().await);
    let server = TestServer::with(&place, "[server.session]\nmax_sessions = 8");
    let _edge = edge(&place, &server, "node1").await;
    let target = at("node1", echo);
    let mut held = [server.open(&target).await, server.open(&target).await];
    let refused = server.request_connect(&target).await;
    assert_eq!(refused.status, 503, "{refused:?}");
    let key = "[server.session] max_per_client of this server";
    assert!(refused.phrase.contains(key), "{refused:?}");
    assert_echo(&mut open_from(OTHER, &server, &target).await, "hello").await;
    held[0].shutdown().await.unwrap();
    rest(&mut held[0]).await;
    // Until then it may have bytes to deliver.
    wait_until("the session is over at both ends", || server.server.table.len() <= 1).await;
    assert_echo(&mut server.open(&target).await, "hello").await;
}

/// Waits until the scripted edge is asked for a session.
async fn next_open(edge: &mut Call) -> (SessionId, u64) {
    loop {
        if let (id, SessionFrame::Open { epoch, .. }) = edge.next_session_frame().await {
            return (id, epoch);
        }
    }
}

/// Opens a session from an address to the scripted edge `bad`. Both ends finish it, and the edge acknowledges nothing.
async fn ends_unread(from: &str, server: &TestServer, edge: &mut Call) {
    let accept = async {
        let (id, epoch) = next_open(edge).await;
        edge.send_session(id, SessionFrame::opened(1000, epoch)).await;
        edge.send_session(id, SessionFrame::Fin { total: 1 }).await;
    };
    let (mut client, ()) = tokio::join!(open_from(from, server, "bad:22"), accept);
    client.write_all(&[0; 500]).await.unwrap();
    client.shutdown().await.unwrap();
    assert_eq!(rest(&mut client).await, b"");
}

#[tokio::test]
async fn sessions_with_undelivered_bytes_count_for_their_client_and_are_evicted_for_others() {
    let (place, echo) = (TestDir::new(), targets::echo().await);
    let server = TestServer::with(&place, "[server.session]\nmax_sessions = 8");
    let _edge = edge(&place, &server, "node1").await;
    let mut bad = remote::link(&place, &server, "bad", Some(Instance::random())).await;
    for from in ["127.0.0.81", "127.0.0.82", "127.0.0.83", "127.0.0.84"] {
        for _ in 0..2 {
            ends_unread(from, &server, &mut bad).await;
        }
        let refused = request_connect_from(from, &server, &at("node1", echo)).await;
        assert_eq!(refused.status, 503, "{refused:?}");
        assert!(refused.phrase.contains("max_per_client"), "{refused:?}");
    }
    assert_eq!(server.server.table.len(), 8);
    // They have made no progress for a while.
    server.server.table.tick(Instant::now() + Duration::from_secs(6));
    let mut other = open_from("127.0.0.85", &server, &at("node1", echo)).await;
    assert_echo(&mut other, "hello").await;
    let evicted = server.server.metrics.truncated.counted("sessions");
    assert!(
        (1..=2).contains(&evicted),
        "one for its permit, and one for its place while that is not free yet: {evicted}"
    );
    server.server.table.tick(Instant::now() + Duration::from_secs(61));
    wait_until("the others are dropped", || server.server.table.len() == 1).await;
    assert_eq!(server.server.metrics.truncated.counted("delivery_timeout"), 8 - evicted);
}

#[tokio::test]
async fn a_cancelled_open_counts_for_its_client_until_the_edge_confirms_the_cancellation() {
    let (place, echo) = (TestDir::new(), targets::echo().await);
    let server = TestServer::with(&place, "[server.session]\nmax_sessions = 8");
    let _edge = edge(&place, &server, "node1").await;
    let mut bad = remote::link(&place, &server, "bad", Some(Instance::random())).await;
    let mut cancelled = Vec::new();
    for _ in 0..2 {
        let mut client = connect_from("127.0.0.81", server.connect).await;
        client.write_all(b"CONNECT bad:22 HTTP/1.1\r\n\r\n").await.unwrap();
        cancelled.push(next_open(&mut bad).await.0);
        drop(client);
        while !matches!(bad.next_session_frame().await, (_, SessionFrame::Resume { .. })) {}
    }
    let refused = request_connect_from("127.0.0.81", &server, &at("node1", echo)).await;
    assert!(refused.status == 503 && refused.phrase.contains("max_per_client"), "{refused:?}");
    for id in cancelled {
        let refusal = SessionError::new(ErrorCode::UnknownSession, "no such session");
        bad.send_session(id, SessionFrame::Reset { epoch: 2, refusal }).await;
    }
    wait_until("they are forgotten", || server.server.table.is_empty()).await;
    assert_echo(&mut open_from("127.0.0.81", &server, &at("node1", echo)).await, "hello").await;
}

#[tokio::test]
async fn proxy_headers_are_accepted_only_from_the_load_balancer() {
    let (lines, _guard) = LogLines::start();
    let (place, echo) = (TestDir::new(), targets::echo().await);
    let more = format!("proxy_protocol = [\"{OTHER}\"]\nallow_from = [\"203.0.113.0/24\", \"127.0.0.1\"]");
    let server = TestServer::with(&place, &more);
    let _edge = edge(&place, &server, "node1").await;
    let target = at("node1", echo);
    let connect = format!("CONNECT {target} HTTP/1.1\r\n\r\n");
    let send_from = |from: &'static str, header: &'static [u8]| {
        let (to, request) = (server.connect, [header, connect.as_bytes()].concat());
        async move {
            let mut socket = connect_from(from, to).await;
            socket.write_all(&request).await.unwrap();
            socket
        }
    };
    let v2 = b"\r\n\r\n\0\r\nQUIT\n\x21\x11\0\x0c\xcb\0\x71\x09\x0a\0\0\x01\x0f\xa0\0\x16";
    for header in [&b"PROXY TCP4 203.0.113.9 10.0.0.1 4000 22\r\n"[..], v2] {
        let mut socket = send_from(OTHER, header).await;
        assert_eq!(head(&mut socket).await, ESTABLISHED);
        assert_echo(&mut socket, "hello").await;
        let opened = server.server.metrics.connections_rejected.counted("forbidden");
        assert_eq!(opened, 0, "the balancer's own address was checked");
    }
    // The client that the header names may be forbidden, and so may the balancer itself.
    for header in [&b"PROXY TCP4 192.0.2.1 10.0.0.1 4000 22\r\n"[..], b"PROXY UNKNOWN\r\n"] {
        assert_eq!(answer(send_from(OTHER, header).await).await.status, 403);
    }
    // No header from there, and a header from elsewhere.
    let _ = rest_of(send_from(OTHER, b"").await).await;
    let closed = || server.server.metrics.connections_rejected.counted("proxy_header");
    wait_until("the connection is counted", || closed() == 1).await;
    let garbage = send_from("127.0.0.1", b"PROXY TCP4 203.0.113.9 10.0.0.1 4000 22\r\n").await;
    assert_eq!(answer(garbage).await.status, 400);
    assert_eq!(closed(), 1);
    // A check that the port is open makes no line.
    drop(connect_from(OTHER, server.connect).await);
    let checks = || server.server.metrics.connections_rejected.counted("gone");
    wait_until("the check is counted", || checks() == 1).await;
    assert_eq!((closed(), lines.count("no valid PROXY header")), (1, 1), "{}", lines.text());
}

#[tokio::test]
async fn edges_behind_a_balancer_are_counted_by_their_own_addresses() {
    let place = TestDir::new();
    let text = place.cloud("").replacen(
        "listen = \"127.0.0.1:0\"",
        &format!("listen = \"127.0.0.1:0\"\nproxy_protocol = [\"{OTHER}\"]"),
        1,
    );
    let server = TestServer::from_text(&text);
    let balancer = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
    let (at, to) = (balancer.local_addr().unwrap(), server.server.bound.grpc);
    spawn(async move {
        while let Ok((mut edge, _)) = balancer.accept().await {
            let mut onward = connect_from(OTHER, to).await;
            onward.write_all(b"PROXY TCP4 203.0.113.9 10.0.0.1 4000 9000\r\n").await.unwrap();
            spawn(async move { tokio::io::copy_bidirectional(&mut edge, &mut onward).await });
        }
    });
    let _edge = start_edge(&place.edge("node1", at, ""));
    assert_eq!(server.wait_for_node("node1").await.from.to_string(), "203.0.113.9:4000");
}

/// Waits until a connection ends in any way, and returns the bytes received.
async fn rest_of(mut socket: TcpStream) -> Vec<u8> {
    let mut all = Vec::new();
    let _ = assert_eventually("the end", socket.read_to_end(&mut all)).await;
    all
}

/// Enough connections to lock out all clients of limiters with 1,000 and 4,096 permits.
const SILENT: usize = 4500;
/// An address of this machine that no other test uses.
const OTHER: &str = "127.0.0.77";
/// Number of edges that link at once.
const EDGES: usize = 200;
