//! Servers and edges with the memory limits of our manifests, against strangers who leave everything unfinished.

use std::io;
use std::net::{Ipv4Addr, SocketAddr};
use std::sync::Arc;
use std::sync::atomic::AtomicUsize;
use std::sync::atomic::Ordering::Relaxed;
use std::time::Duration;

use http::HeaderMap;
use socket2::SockRef;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpSocket, TcpStream};
use tokio::task::JoinSet;
use tokio::time::timeout;
use tunnel_net::fd_limit;
use tunnel_proto::names::Instance;

use crate::support::clients::{assert_echo, get, open};
use crate::support::process::{Killed, MemoryGroup, ServerProcess};
use crate::support::programs::{TestDir, TestServer, at, edge, start_edge};
use crate::support::raw::{DATA, MAX_WINDOW, RawHttp2};
use crate::support::{remote, servers, targets, wait_until};

/// A thing that a port accepts and waits for the rest of.
#[derive(Debug, Clone, Copy)]
enum Unfinished {
    ClientHello,
    /// TLS, and nothing else.
    Handshake,
    /// HTTP/2 without a call.
    Http2,
    /// Four calls of 65,000 bytes, of which the last one is missing.
    Joins,
    /// A plain node's message of 4 MiB without its last quarter.
    Message,
    /// The same of a node of this program.
    ExtendedMessage,
    /// 60 KiB of a head.
    Head,
}

impl Unfinished {
    /// Sends it, and keeps the connection. Ends once the remote closes it, or it is dropped.
    async fn hold(self, place: Arc<TestDir>, to: SocketAddr, number: usize, begun: &AtomicUsize) {
        let node = format!("bad{number}");
        let held: Box<dyn Send> = match self {
            Self::ClientHello => {
                let mut socket = TcpStream::connect(to).await.unwrap();
                let record = [&[22, 3, 1, 0x40, 0, 1, 0, 0x3f, 0xfc, 3, 3][..], &[0; 16_000]].concat();
                let _ = socket.write_all(&record).await;
                Box::new(socket)
            }
            Self::Head => {
                let mut socket = TcpStream::connect(to).await.unwrap();
                let head = format!("GET http://node1/ HTTP/1.1\r\nx: {}", "y".repeat(60 << 10));
                let _ = socket.write_all(head.as_bytes()).await;
                Box::new(socket)
            }
            Self::Handshake => Box::new(remote::encrypted(&place, to).await),
            Self::Http2 => Box::new(RawHttp2::connect(&place, to, &node, MAX_WINDOW).await),
            Self::Joins => {
                let mut raw = RawHttp2::connect(&place, to, &node, MAX_WINDOW).await;
                let begin = [&[0], &65_001u32.to_be_bytes()[..], &vec![10; 65_000]].concat();
                for _ in 0..4 {
                    let stream = raw.call_path("/enrol.Enrol/Join", &HeaderMap::new()).await;
                    for piece in begin.chunks(16 * 1024) {
                        // It may be closed by then.
                        raw.frame(DATA, 0, stream, piece).await;
                    }
                }
                Box::new(raw)
            }
            Self::Message => Box::new(unfinished_message(&place, to, &node, None).await),
            Self::ExtendedMessage => {
                Box::new(unfinished_message(&place, to, &node, Some(Instance::random())).await)
            }
        };
        begun.fetch_add(1, Relaxed);
        std::future::pending::<()>().await;
        drop(held);
    }
}

/// Links as a node, and sends 3 MiB of a message of 4 MiB.
async fn unfinished_message(
    place: &TestDir,
    to: SocketAddr,
    node: &str,
    instance: Option<Instance>,
) -> RawHttp2 {
    let raw = RawHttp2::link_at(place, to, node, instance).await;
    raw.data(&[&[0], &(4u32 << 20).to_be_bytes()[..]].concat()).await;
    for _ in 0..3 * 64 {
        raw.data(&[0; 16 * 1024]).await;
    }
    raw
}

/// Has `count` of these held at once: waits until `enough` are, and until `check` is done.
async fn hold(
    kind: Unfinished,
    place: &Arc<TestDir>,
    to: SocketAddr,
    [count, enough]: [usize; 2],
    check: impl Future<Output = ()>,
) {
    let begun = Arc::new(AtomicUsize::new(0));
    let mut tasks = JoinSet::new();
    for number in 0..count {
        let (place, begun) = (place.clone(), begun.clone());
        tasks.spawn(async move { kind.hold(place, to, number, &begun).await });
    }
    // Some may have been refused, which panics in their tasks only.
    wait_until(&format!("{kind:?}"), || begun.load(Relaxed) >= enough || tasks.is_empty()).await;
    check.await;
    tasks.shutdown().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_server_of_100_mib_survives_all_that_strangers_leave_unfinished_and_a_fleet() {
    let Some(group) = MemoryGroup::new("server", 100) else { return };
    fd_limit::raise();
    let (place, echo) = (Arc::new(TestDir::new()), targets::echo().await);
    let proxy = servers::addresses(1)[0];
    let table = format!("[server.http_proxy]\nlisten = \"{proxy}\"");
    let server = ServerProcess::start_as(&place, &table, group.command()).await;
    let _edge = start_edge(&place.edge("node1", server.grpc, ""));
    server.wait_for_node("node1").await;
    let mut session = open(server.connect, &at("node1", echo)).await;
    for (kind, to, counts) in [
        (Unfinished::ClientHello, server.grpc, [300, 300]),
        (Unfinished::Handshake, server.grpc, [300, 80]),
        (Unfinished::Http2, server.grpc, [300, 80]),
        (Unfinished::Joins, server.grpc, [300, 300]),
        (Unfinished::Head, server.connect, [300, 300]),
        (Unfinished::Head, proxy, [300, 300]),
        (Unfinished::Message, server.grpc, [30, 30]),
        (Unfinished::ExtendedMessage, server.grpc, [30, 30]),
    ] {
        let check = async {
            assert_echo(&mut session, "goes on").await;
            assert_echo(&mut open(server.connect, &at("node1", echo)).await, "a new one").await;
        };
        hold(kind, &place, to, counts, check).await;
        assert_eq!(group.kills(), 0, "{kind:?}");
    }
    let mut fleet = JoinSet::new();
    for number in 0..FLEET {
        let (place, at) = (place.clone(), server.grpc);
        fleet.spawn(async move {
            let headers = remote::headers(&format!("fleet{number}"), Some(Instance::random()));
            remote::dial(&place, at, headers, "fleet").await
        });
    }
    let mut links = Vec::new();
    let mut refused = 0;
    while let Some(called) = fleet.join_next().await {
        match called.unwrap() {
            Ok(link) => links.push(link),
            Err(status) if status.message().contains("no memory for more than 457 links") => refused += 1,
            Err(status) => panic!("{status}"),
        }
    }
    assert!(links.len() >= 450 && refused >= 40, "{} links, {refused} refused", links.len());
    assert_echo(&mut session, "goes on").await;
    assert!(get(server.log, "/readyz").await.body.contains("room: this server has no memory for"));
    assert_eq!(group.kills(), 0);
}

/// Connects from an address that nobody else uses, leaves a message unfinished, and goes after a while.
async fn come(number: usize, to: SocketAddr, begin: &[u8]) -> io::Result<()> {
    let socket = TcpSocket::new_v4()?;
    let from = Ipv4Addr::from_bits(Ipv4Addr::new(127, 1, 0, 0).to_bits() + u32::try_from(number).unwrap());
    socket.bind((from, 0).into())?;
    let mut socket = socket.connect(to).await?;
    socket.write_all(begin).await?;
    let _ = timeout(Duration::from_millis(200), socket.read_to_end(&mut Vec::new())).await;
    Ok(())
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_session_goes_on_while_a_thousand_sources_come_and_go() {
    let Some(group) = MemoryGroup::new("sources", 100) else { return };
    fd_limit::raise();
    let place = TestDir::new();
    let echo = targets::echo().await;
    let server = ServerProcess::start_as(&place, "", group.command()).await;
    let _edge = start_edge(&place.edge("node1", server.grpc, ""));
    server.wait_for_node("node1").await;
    let target = at("node1", echo);
    let mut session = open(server.connect, &target).await;
    let hello = [&[22, 3, 1, 0x40, 0, 1, 0, 0x3f, 0xfc, 3, 3][..], &[0; 16_000]].concat();
    let head = format!("GET http://node1/ HTTP/1.1\r\nx: {}", "y".repeat(60 << 10)).into_bytes();
    let doors = Arc::new([(server.grpc, hello), (server.connect, head)]);
    let come_so_far = Arc::new(AtomicUsize::new(0));
    let mut strangers = JoinSet::new();
    for number in 0..1000 {
        let doors = doors.clone();
        let come_so_far = come_so_far.clone();
        strangers.spawn(async move {
            let (to, begin) = &doors[number % 2];
            loop {
                // It may be closed at any time.
                let _ = come(come_so_far.fetch_add(1, Relaxed), *to, begin).await;
            }
        });
    }
    while come_so_far.load(Relaxed) < 10_000 {
        assert_echo(&mut session, "goes on").await;
    }
    strangers.shutdown().await;
    assert_eq!(group.kills(), 0);
    assert_echo(&mut open(server.connect, &target).await, "afterwards").await;
    assert_echo(&mut session, "goes on").await;
}

/// More edges than 100 MiB are enough for.
const FLEET: usize = 500;

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_edge_of_40_mib_survives_unfinished_requests_and_serves_a_hundred_at_once() {
    let Some(group) = MemoryGroup::new("edge", 40) else { return };
    fd_limit::raise();
    let (place, echo) = (Arc::new(TestDir::new()), targets::echo().await);
    let server = TestServer::with(&place, "[server.edge_access]\nnodes = [\"*\"]");
    let _other = edge(&place, &server, "node2").await;
    let proxy = servers::addresses(1)[0];
    let table = format!("[edge.http_proxy]\nlisten = \"{proxy}\"");
    let file = place.file("edge.toml", &place.edge("node1", server.server.bound.grpc, &table));
    let _limited = Killed::start(group.command().arg("edge").arg(format!("--config={}", file.display())));
    server.wait_for_node("node1").await;
    let mut session = server.open(&at("node1", echo)).await;
    let target = at("node2", echo);
    let check = async { assert_echo(&mut session, "goes on").await };
    hold(Unfinished::Head, &place, proxy, [300, 300], check).await;
    let requests = (0..100).map(|_| open(proxy, &target));
    let opened = futures_util::future::join_all(requests).await;
    assert_eq!(opened.len(), 100);
    assert_echo(&mut session, "goes on").await;
    assert_eq!(group.kills(), 0);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_kernel_keeps_little_for_200_stalled_sessions_of_an_edge_of_40_mib() {
    let Some(group) = MemoryGroup::new("stalled", 40) else { return };
    fd_limit::raise();
    let (place, echo) = (TestDir::new(), targets::echo().await);
    let server = TestServer::with(&place, "");
    let file = place.file("edge.toml", &place.edge("node1", server.server.bound.grpc, ""));
    let _limited = Killed::start(group.command().arg("edge").arg(format!("--config={}", file.display())));
    server.wait_for_node("node1").await;
    let mut session = server.open(&at("node1", echo)).await;
    // It and its clients write, and never read.
    let written = Arc::new(AtomicUsize::new(0));
    let by_targets = written.clone();
    let target = targets::serve(move |mut socket| {
        let written = by_targets.clone();
        async move {
            SockRef::from(&socket).set_send_buffer_size(SENT).unwrap();
            let _ = socket.write_all(&[0; SENT]).await;
            written.fetch_add(1, Relaxed);
            std::future::pending().await
        }
    });
    let target = at("node1", target.await);
    let mut held = Vec::new();
    for number in 1..=200 {
        let mut client = server.open(&target).await;
        SockRef::from(&client).set_send_buffer_size(SENT).unwrap();
        client.write_all(&[0; SENT]).await.unwrap();
        held.push(client);
        wait_until("the target has written", || written.load(Relaxed) == number).await;
    }
    assert_echo(&mut session, "goes on").await;
    assert_eq!(group.kills(), 0);
    let sockets = group.sockets() >> 20;
    assert!(sockets < 12, "{sockets} MiB");
}

/// Bytes of a stalled session in each direction. More than a new socket's buffers take.
const SENT: usize = 200 << 10;
