//! Remotes that send more than is read: they cost the process no more memory than its limits allow.

use std::net::SocketAddr;
use std::time::Duration;

use bytes::Bytes;
use tokio::io::AsyncReadExt;
use tokio::net::TcpStream;
use tokio::time::timeout;
use tunnel_base::metrics::format::ExpositionFormat;
use tunnel_proto::codec::extended::from_message;
use tunnel_proto::codec::proto::StreamMsg;
use tunnel_proto::codec::{Decoder, encode_whole};
use tunnel_proto::frame::{FrameKind, Remote, SessionFrame};
use tunnel_proto::names::{Instance, SessionId};

use crate::support::call::{message, plain};
use crate::support::clients::{open, stalled};
use crate::support::process::ServerProcess;
use crate::support::programs::{TestDir, TestServer};
use crate::support::raw::{DATA, RawHttp2};
use crate::support::{assert_eventually, spawn, wait_until};

/// Returns the next message that an edge receives.
async fn next_message(edge: &mut RawHttp2) -> StreamMsg {
    loop {
        let piece = assert_eventually("a message", edge.next()).await.unwrap();
        if piece.kind == DATA {
            let mut reader = Decoder::default();
            reader.push(piece.payload);
            let message = reader.next_message().unwrap().expect("a server sends each in one frame");
            match message.category.as_str() {
                "stream" => {}
                // The question for the generation of SuperEdge.
                _ if message.addr.is_empty() && message.r#type == "connecting" => {
                    edge.send_messages([plain(&edge.node, "connect-failed", &message.topic, Bytes::new())])
                        .await;
                }
                _ => return message,
            }
        }
    }
}

/// Opens a session to a plain edge. Returns its client, which reads little if it is slow, and its topic.
async fn accepted(at: SocketAddr, edge: &mut RawHttp2, slow: bool) -> (TcpStream, String) {
    let accept = async {
        let open = next_message(edge).await;
        edge.send_messages([plain(&edge.node, "connected", &open.topic, Bytes::new())]).await;
        open.topic
    };
    let client = async { if slow { stalled(at, "bad:22").await } else { open(at, "bad:22").await } };
    tokio::join!(client, accept)
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_stalled_session_is_reset_despite_a_quick_one_on_the_same_link() {
    let place = TestDir::new();
    let server = TestServer::start(&place);
    let mut bad = RawHttp2::link(&place, &server, "bad", None).await;
    let (_slow, slow) = accepted(server.connect, &mut bad, true).await;
    let (mut quick, topic) = accepted(server.connect, &mut bad, false).await;
    spawn(async move { while quick.read_u8().await.is_ok() {} });
    let piece = [(slow.as_str(), vec![0; 14 * 1024].into()), (topic.as_str(), Bytes::from_static(b"x"))];
    let resets = || server.server.metrics.resets.counted("slow_reader");
    let mut most = 0;
    for _ in 0..1200 {
        bad.send_messages(
            piece.iter().map(|(topic, data)| plain(&bad.node, "tcp-forward", topic, data.clone())),
        )
        .await;
        most = most.max(server.server.table.queued());
    }
    wait_until("the slow session is reset", || resets() == 1).await;
    assert!(most <= (1 << 20) + 64 * 1024, "{most} bytes waited");
    assert!(server.server.metrics.read_pauses.get() > 0);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn many_plain_sessions_together_stay_within_the_memory_limit() {
    let place = TestDir::new();
    let server = TestServer::with(&place, "[server.session]\nbuffer_memory = \"4MiB\"");
    let mut bad = RawHttp2::link(&place, &server, "bad", None).await;
    let idle = accepted(server.connect, &mut bad, false).await;
    let mut slow = Vec::new();
    for _ in 0..8 {
        slow.push(accepted(server.connect, &mut bad, true).await);
    }
    let data = Bytes::from(vec![0; 48 * 1024]);
    let (mut most, limit) = (0, server.server.table.unreserved().1);
    assert_eq!(limit, 2 << 20);
    // No session holds much, and none waits for long.
    let flood = async {
        for round in 0..1500 {
            let topic = &slow[round % slow.len()].1;
            bad.send_messages([plain(&bad.node, "tcp-forward", topic, data.clone())]).await;
            most = most.max(server.server.table.unreserved().0);
        }
    };
    tokio::time::timeout(Duration::from_secs(600), flood).await.expect("all is read");
    assert!((limit / 4..=limit + 64 * 1024).contains(&most), "{most} bytes of {limit} waited");
    let table = &server.server.table;
    table.tick(tokio::time::Instant::now());
    let text = server.server.metrics.encode(ExpositionFormat::Open);
    for (budget, bound) in
        [("reserved", 4 << 20), ("unacknowledged", 4 << 20), ("relayed", 4 << 20), ("unreserved", 2 << 20)]
    {
        let line = format!("tunnel_buffer_limit_bytes{{budget=\"{budget}\"}} {bound}");
        assert!(text.lines().any(|l| l == line), "{line} is not in\n{text}");
        let held = format!("tunnel_buffer_bytes{{budget=\"{budget}\"}} ");
        let held = text.lines().find_map(|l| l.strip_prefix(&held)).unwrap().parse::<usize>().unwrap();
        assert!(held <= bound && (held > 0 || budget != "reserved"), "{budget}: {held}");
    }
    wait_until("some are reset", || server.server.metrics.resets.counted("slow_reader") > 0).await;
    drop((bad, slow, idle));
    server.assert_idle().await;
    assert_eq!(server.server.table.unreserved().0, 0);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_plain_edge_that_floods_a_stalled_session_does_not_grow_the_process() {
    let place = TestDir::new();
    let server = ServerProcess::start(&place).await;
    let mut bad = RawHttp2::link_at(&place, server.grpc, "bad", None).await;
    server.wait_for_node("bad").await;
    let (_slow, slow) = accepted(server.connect, &mut bad, true).await;
    let (mut quick, topic) = accepted(server.connect, &mut bad, false).await;
    spawn(async move { while quick.read_u8().await.is_ok() {} });
    let before = server.most_memory();
    let piece = [(slow.as_str(), vec![0; 14 * 1024].into()), (topic.as_str(), Bytes::from_static(b"x"))];
    for _ in 0..8_000 {
        bad.send_messages(
            piece.iter().map(|(topic, data)| plain(&bad.node, "tcp-forward", topic, data.clone())),
        )
        .await;
    }
    assert!(server.most_memory() <= before + MAX_GROWTH, "{before} became {}", server.most_memory());
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn single_bytes_for_stalled_sessions_do_not_grow_the_process() {
    let place = TestDir::new();
    let server = ServerProcess::start(&place).await;
    let mut bad = RawHttp2::link_at(&place, server.grpc, "bad", None).await;
    server.wait_for_node("bad").await;
    let mut slow = Vec::new();
    for _ in 0..4 {
        slow.push(accepted(server.connect, &mut bad, true).await);
    }
    let before = server.most_memory();
    for _ in 0..2_000 {
        let bytes = (0..200).map(|n| {
            let (_, topic) = &slow[n % slow.len()];
            plain(&bad.node, "tcp-forward", topic, Bytes::from_static(b"x"))
        });
        bad.send_messages(bytes).await;
    }
    assert!(server.most_memory() <= before + MAX_GROWTH, "{before} became {}", server.most_memory());
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn unfinished_messages_of_plain_links_leave_half_of_the_budget_to_others() {
    let place = TestDir::new();
    let server = TestServer::with(&place, "[server.session]\nbuffer_memory = \"4MiB\"");
    let table = &server.server.table;
    let begun = |bytes: u32| [&[0], &bytes.to_be_bytes()[..], &[0; 1000]].concat();
    let mut links = Vec::new();
    for (node, bytes) in [("short", 100 << 10), ("bad1", 2 << 20), ("bad2", 2 << 20)] {
        let raw = RawHttp2::link(&place, &server, node, None).await;
        raw.data(&begun(bytes)).await;
        for _ in 0..bytes / 1000 - 2 {
            raw.data(&[0; 1000]).await;
        }
        wait_until("its bytes have arrived", || server.link(node).is_none() || table.unreserved().0 > 0)
            .await;
        links.push(raw);
    }
    wait_until("both are closed", || server.server.metrics.links_closed.counted("protocol_error") == 2).await;
    wait_until("their bytes are released", || table.unreserved().0 <= 100 << 10).await;
    assert!(server.link("short").is_some());
}

/// A session of a hostile edge that is of this program, with its send limit.
struct ExtendedSession {
    id: SessionId,
    sent: u64,
    limit: u64,
}

impl ExtendedSession {
    /// Opens a session to the edge `bad`, with a client that reads nothing.
    async fn stalled(at: SocketAddr, edge: &mut RawHttp2) -> (TcpStream, Self) {
        let accept = async {
            let (id, epoch, limit) = loop {
                // Earlier sessions may send credit first.
                if let (id, SessionFrame::Open { epoch, limit, .. }) = next_session_frame(edge).await {
                    break (id, epoch, limit);
                }
            };
            edge.send_messages([message(&edge.node, id, SessionFrame::opened(0, epoch))]).await;
            Self { id, sent: 0, limit }
        };
        tokio::join!(stalled(at, "bad:22"), accept)
    }

    /// Sends bytes until the client's sockets are full, so that the next byte is queued in the server.
    async fn fill_sockets(&mut self, edge: &mut RawHttp2, server: &TestServer) {
        let before = server.server.table.queued();
        loop {
            // The session has no credit left if earlier bytes are queued in the server already.
            if timeout(STUCK, self.send_bytes(edge, 16 * 1024, 1)).await.is_err() {
                return;
            }
            let taken = async {
                while server.server.table.queued() > before {
                    tokio::task::yield_now().await;
                }
            };
            if timeout(STUCK, taken).await.is_err() {
                return;
            }
        }
    }

    /// Sends single bytes up to the limit.
    async fn fill_server_window(&mut self, edge: &mut RawHttp2) {
        while self.sent < self.limit {
            self.send_bytes(edge, 1, usize::try_from(self.limit - self.sent).unwrap().min(200)).await;
        }
    }

    /// Sends `pieces` pieces, once the limit allows it.
    async fn send_bytes(&mut self, edge: &mut RawHttp2, bytes: usize, pieces: usize) {
        while self.sent + (bytes * pieces) as u64 > self.limit {
            if let (id, SessionFrame::Credit { limit, .. }) = next_session_frame(edge).await
                && id == self.id
            {
                self.limit = limit;
            }
        }
        let data = SessionFrame::Data(vec![b'x'; bytes].into());
        let each = encode_whole(message(&edge.node, self.id, data));
        assert!(edge.data(&each.repeat(pieces)).await);
        self.sent += (bytes * pieces) as u64;
    }
}

/// Returns the next session frame that an extended edge receives.
async fn next_session_frame(edge: &mut RawHttp2) -> (SessionId, SessionFrame) {
    loop {
        let message = next_message(edge).await;
        if let FrameKind::Session(id, _, frame) =
            from_message(message, &Remote::Server(edge.node.clone())).unwrap().body
        {
            return (id, frame);
        }
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_counted_cost_of_one_byte_frames_is_close_to_their_bytes() {
    let place = TestDir::new();
    let server = TestServer::with(&place, "[server.session]\nbuffer_memory = \"2MiB\"");
    let mut bad = RawHttp2::link(&place, &server, "bad", Some(Instance::random())).await;
    let mut sessions = Vec::new();
    for _ in 0..4 {
        let (client, mut session) = ExtendedSession::stalled(server.connect, &mut bad).await;
        session.fill_sockets(&mut bad, &server).await;
        session.fill_server_window(&mut bad).await;
        sessions.push(client);
    }
    let (table, least) = (&server.server.table, 4 * WINDOW / 2);
    wait_until("all has arrived", || table.queued() > least).await;
    let (queued, promised) = (table.queued(), table.memory().0);
    assert!(queued <= MEMORY && promised >= queued, "{queued} bytes wait, {promised} are counted");
    // Counted one by one, they would cost a hundred times as much.
    assert!(promised <= MEMORY + queued / 4, "{promised} are counted for {queued}");
}

/// Memory for sessions of that server. `WINDOW` is the initial window of a session.
const MEMORY: usize = 2 << 20;
const WINDOW: usize = 64 * 1024;
/// Time without progress after which a socket counts as full. A busy machine may take a while.
const STUCK: Duration = Duration::from_secs(1);
/// Memory that a remote that sends endlessly may cost a server, including what the allocator keeps.
const MAX_GROWTH: usize = 16 << 20;
