//! Clients and targets that close abruptly: the bytes that they sent arrive, as without a tunnel.

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;
use tokio::sync::{Notify, mpsc};
use tunnel::edge::Edge;

use crate::support::line::Line;
use crate::support::programs::{TestDir, TestServer, assert_edge_idle, at, edge, start_edge};
use crate::support::{Stopwatch, assert_eventually, clients, servers, spawn, targets, wait_until};

/// A path to a target.
enum Path<'a> {
    Direct,
    Through(&'a TestServer),
}

impl Path<'_> {
    async fn open(&self, to: SocketAddr) -> TcpStream {
        match self {
            Self::Direct => TcpStream::connect(to).await.unwrap(),
            Self::Through(server) => server.open(&at("node1", to)).await,
        }
    }
}

/// Starts two servers with the node linked to the second, so that a path leads through one server or through both.
async fn two(place: &TestDir) -> (Vec<TestServer>, Edge) {
    let servers = servers::start(place, 2);
    let edge = edge(place, &servers[1], "node1").await;
    (servers, edge)
}

/// Starts a target that reads one byte, responds, and closes with the rest of the upload unread.
async fn target_with_unread_upload(bytes: usize) -> SocketAddr {
    let answer = targets::pattern(bytes);
    targets::serve(move |mut socket| {
        let answer = answer.clone();
        async move {
            let _ = socket.read_u8().await;
            let _ = socket.write_all(&answer).await;
            let _ = socket.readable().await;
        }
    })
    .await
}

/// Counts the complete responses of a target that refuses uploads, and the responses followed by a reset, out of
/// `TIMES`.
async fn count_whole_responses(path: &Path<'_>, bytes: usize) -> (usize, usize) {
    let (target, expected) = (target_with_unread_upload(bytes).await, targets::pattern(bytes));
    let (mut whole, mut broken) = (0, 0);
    for _ in 0..TIMES {
        let (mut from, mut to) = path.open(target).await.into_split();
        let upload = spawn(async move {
            let _ = to.write_all(&vec![1; UPLOAD]).await;
            to
        });
        let mut got = Vec::new();
        let ended = assert_eventually("the end of the response", from.read_to_end(&mut got)).await;
        whole += usize::from(got == expected);
        broken += usize::from(ended.is_err());
        drop(assert_eventually("the end of the upload", upload).await.unwrap());
    }
    (whole, broken)
}

#[tokio::test]
async fn a_response_arrives_whole_if_its_target_leaves_an_upload_unread() {
    let place = TestDir::new();
    let (servers, edge) = two(&place).await;
    let paths = [
        ("direct", Path::Direct),
        ("one server", Path::Through(&servers[1])),
        ("two servers", Path::Through(&servers[0])),
    ];
    let mut table = Vec::new();
    for bytes in [300, 20_000, 100_000] {
        for (name, path) in &paths {
            let (whole, _) = count_whole_responses(path, bytes).await;
            table.push((bytes, *name, whole));
        }
    }
    assert!(table.iter().all(|(.., whole)| *whole == TIMES), "complete responses of {TIMES}: {table:?}");
    for server in &servers {
        server.assert_idle().await;
    }
    assert_edge_idle(&edge).await;
}

/// Starts a target that sends a greeting and reports how many bytes it received until the end or a reset.
async fn counting_target() -> (SocketAddr, mpsc::Receiver<usize>) {
    let (sender, receiver) = mpsc::channel(TIMES);
    let at = targets::serve(move |mut socket| {
        let sender = sender.clone();
        async move {
            let _ = socket.write_all(&[7; 1000]).await;
            let mut got = Vec::new();
            let _ = socket.read_to_end(&mut got).await;
            let _ = sender.send(if got == targets::pattern(got.len()) { got.len() } else { 0 }).await;
        }
    })
    .await;
    (at, receiver)
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn bytes_sent_before_a_client_closes_with_unread_data_reach_the_target() {
    let place = TestDir::new();
    let (servers, edge) = two(&place).await;
    let paths = [
        ("direct", Path::Direct),
        ("one server", Path::Through(&servers[1])),
        ("two servers", Path::Through(&servers[0])),
    ];
    let mut table = Vec::new();
    for (name, path) in &paths {
        let (target, mut uploads) = counting_target().await;
        let mut whole = 0;
        for _ in 0..TIMES {
            let mut client = path.open(target).await;
            client.readable().await.unwrap();
            client.write_all(&targets::pattern(50_000)).await.unwrap();
            // With the greeting unread, the kernel resets the connection.
            drop(client);
            whole +=
                usize::from(assert_eventually("the end of the upload", uploads.recv()).await == Some(50_000));
        }
        table.push((*name, whole));
    }
    assert!(table.iter().all(|(_, whole)| *whole == TIMES), "complete uploads of {TIMES}: {table:?}");
    for server in &servers {
        server.assert_idle().await;
    }
    assert_edge_idle(&edge).await;
}

/// Checks that a response and a reset survive a broken path: the path is silent while the target sends both. Once the
/// path is reset, the next link delivers them.
async fn assert_response_survives_a_cut(client: &TestServer, holder: &TestServer, line: &Line, edge: &Edge) {
    for bytes in [300, 100_000] {
        let (go, closed) = (Arc::new(Notify::new()), Arc::new(Notify::new()));
        let (when, then, answer) = (go.clone(), closed.clone(), targets::pattern(bytes));
        let target = targets::serve(move |mut socket| {
            let (when, then, answer) = (when.clone(), then.clone(), answer.clone());
            async move {
                when.notified().await;
                let _ = socket.write_all(&answer).await;
                drop(socket);
                then.notify_one();
            }
        })
        .await;
        let (old, up) = (holder.wait_for_node("node1").await, edge.metrics.bytes_to_target.get());
        let mut socket = client.open(&at("node1", target)).await;
        socket.write_all(b"never read").await.unwrap();
        wait_until("the upload has arrived", || edge.metrics.bytes_to_target.get() > up).await;
        let before = edge.metrics.sessions.closed("acceptor", "target_io_error");
        line.become_unresponsive();
        go.notify_one();
        assert_eventually("the target's end", closed.notified()).await;
        wait_until("the edge has seen the reset", || {
            edge.metrics.sessions.closed("acceptor", "target_io_error") > before
        })
        .await;
        line.reset();
        wait_until("there is a new link", || {
            holder.link("node1").is_some_and(|linked| linked.link.id != old.link.id)
        })
        .await;
        let mut got = Vec::new();
        let ended = assert_eventually("the end of the response", socket.read_to_end(&mut got)).await;
        assert!(got == targets::pattern(bytes), "{} of {bytes} bytes", got.len());
        assert!(ended.is_err(), "the connection was not reset");
    }
}

#[tokio::test]
async fn a_response_survives_a_path_that_breaks_while_it_is_sent() {
    let place = TestDir::new();
    let servers = servers::start(&place, 2);
    let line = Line::to(servers[1].server.bound.grpc).await;
    let edge = start_edge(&place.edge("node1", line.at, ""));
    for client in [&servers[1], &servers[0]] {
        assert_response_survives_a_cut(client, &servers[1], &line, &edge).await;
    }
    for server in &servers {
        server.assert_idle().await;
    }
    assert_edge_idle(&edge).await;
}

/// Starts an echo target that reports when its client has disconnected.
async fn echo_with_end_signal() -> (SocketAddr, mpsc::Receiver<()>) {
    let (sender, receiver) = mpsc::channel(1);
    let at = targets::serve(move |socket| {
        let sender = sender.clone();
        async move {
            targets::echo_one(socket).await;
            let _ = sender.send(()).await;
        }
    })
    .await;
    (at, receiver)
}

#[tokio::test]
async fn a_session_abandoned_without_a_path_ends_at_its_target_on_reconnect() {
    let place = TestDir::new();
    let servers = servers::start(&place, 2);
    let line = Line::to(servers[1].server.bound.grpc).await;
    let edge = start_edge(&place.edge("node1", line.at, ""));
    let (target, mut ended) = echo_with_end_signal().await;
    for client in [&servers[1], &servers[0]] {
        for silent in [false, true] {
            let old = servers[1].wait_for_node("node1").await;
            let mut socket = client.open(&at("node1", target)).await;
            clients::assert_echo(&mut socket, "hello").await;
            line.route_to(targets::closed_port().await);
            if silent {
                line.become_unresponsive();
            } else {
                line.reset();
                wait_until("the link is closed", || servers[1].link("node1").is_none()).await;
            }
            clients::reset(socket);
            wait_until("the client's session has ended", || {
                client.server.metrics.sessions.now("connect") == 0
            })
            .await;
            line.reset();
            line.route_to(servers[1].server.bound.grpc);
            wait_until("there is a new link", || {
                servers[1].link("node1").is_some_and(|linked| linked.link.id != old.link.id)
            })
            .await;
            let started = Stopwatch::start();
            assert_eventually("the end of the session at the target", ended.recv()).await.unwrap();
            assert!(started.elapsed() < Duration::from_secs(1), "silent: {silent}, {:?}", started.elapsed());
        }
    }
    for server in &servers {
        server.assert_idle().await;
    }
    assert_edge_idle(&edge).await;
}

#[tokio::test]
async fn a_target_reset_without_a_path_is_reported_with_its_reason_on_reconnect() {
    let place = TestDir::new();
    let servers = servers::start(&place, 2);
    let line = Line::to(servers[1].server.bound.grpc).await;
    let edge = start_edge(&place.edge("node1", line.at, ""));
    let go = Arc::new(Notify::new());
    let when = go.clone();
    let target = targets::serve(move |socket| {
        let when = when.clone();
        async move {
            when.notified().await;
            clients::reset(socket);
        }
    })
    .await;
    for client in [&servers[1], &servers[0]] {
        servers[1].wait_for_node("node1").await;
        let mut socket = client.open(&at("node1", target)).await;
        wait_until("the edge has the session", || edge.metrics.sessions.now("acceptor") == 1).await;
        line.route_to(targets::closed_port().await);
        line.reset();
        wait_until("the link is closed", || servers[1].link("node1").is_none()).await;
        go.notify_one();
        wait_until("the edge's session has ended", || edge.metrics.sessions.now("acceptor") == 0).await;
        line.route_to(servers[1].server.bound.grpc);
        clients::assert_reset(&mut socket).await;
        assert_eq!(client.server.metrics.sessions.closed("connect", "target_io_error"), 1);
    }
    for server in &servers {
        server.assert_idle().await;
    }
    assert_edge_idle(&edge).await;
}

/// The edge is lost for longer than the resume timeout, while each kind of client waits for the rest.
#[tokio::test]
async fn a_session_that_is_lost_does_not_look_complete_at_any_listener() {
    let place = TestDir::new();
    let half = |answer: &'static str| {
        targets::serve(move |mut socket| async move {
            let _ = socket.write_all(answer.as_bytes()).await;
            let _ = socket.read_to_end(&mut Vec::new()).await;
        })
    };
    let raw = half("half").await;
    let length = half("HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\nhalf").await;
    let chunks = half("HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n4\r\nhalf\r\n").await;
    let until_end = half("HTTP/1.1 200 OK\r\nConnection: close\r\n\r\nhalf").await;
    let server = TestServer::with(
        &place,
        &format!(
            "[server.tcp]\n\"127.0.0.1:0\" = \"node1/{raw}\"\n\
             [server.http_proxy]\nlisten = \"127.0.0.1:0\"\n\
             [server.session]\nresume_timeout = \"100ms\"\n"
        ),
    );
    let line = Line::to(server.server.bound.grpc).await;
    let edge = start_edge(&place.edge("node1", line.at, ""));
    server.wait_for_node("node1").await;
    let mut sockets = vec![server.open(&at("node1", raw)).await, server.client("tcp").await];
    for site in [length, chunks, until_end] {
        let mut socket = server.client("http_proxy").await;
        let request = format!("GET http://{0}/ HTTP/1.1\r\nHost: {0}\r\n\r\n", at("node1", site));
        socket.write_all(request.as_bytes()).await.unwrap();
        sockets.push(socket);
    }
    for socket in &mut sockets {
        let mut got = Vec::new();
        while !got.windows(4).any(|four| four == b"half") {
            got.push(assert_eventually("half of the response", socket.read_u8()).await.unwrap());
        }
    }
    line.route_to(targets::closed_port().await);
    line.reset();
    for socket in &mut sockets {
        clients::assert_reset(socket).await;
    }
    drop(edge);
    server.assert_idle().await;
}

const TIMES: usize = 40;
/// More bytes than the kernel of a target accepts while its reader does not read.
const UPLOAD: usize = 2 << 20;
