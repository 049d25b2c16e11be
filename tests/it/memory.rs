//! Peers that send more than is read: it costs the process no more than it has set aside for them.

use std::net::SocketAddr;
use std::time::Duration;

use bytes::Bytes;
use tokio::io::AsyncReadExt;
use tokio::net::TcpStream;
use tunnel::protocol::wire::codec::StreamMsg;

use crate::support::call::plain;
use crate::support::clients::{open, stalled};
use crate::support::process::PodProcess;
use crate::support::programs::{TestDir, TestPod};
use crate::support::raw::{DATA, Raw};
use crate::support::{beside, soon, wait_until};

/// A plain edge's next message.
async fn heard(edge: &mut Raw) -> StreamMsg {
    loop {
        let piece = soon("a message", edge.next()).await.unwrap();
        if piece.kind == DATA {
            let mut reader = tunnel::protocol::wire::codec::Reader::default();
            reader.piece(piece.payload);
            let message = reader.message().unwrap().expect("a pod says each in one frame");
            if message.category != "stream" {
                return message;
            }
        }
    }
}

/// A session to a plain edge, of a client that reads little if it is slow, and its topic.
async fn accepted(at: SocketAddr, edge: &mut Raw, slow: bool) -> (TcpStream, String) {
    let accept = async {
        let asked = heard(edge).await;
        edge.say([plain(&edge.node, "connected", &asked.topic, Bytes::new())]).await;
        asked.topic
    };
    let client = async { if slow { stalled(at, "bad:22").await } else { open(at, "bad:22").await } };
    tokio::join!(client, accept)
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_byte_for_a_quick_session_behind_each_piece_for_a_stalled_one_hides_nothing() {
    let place = TestDir::new();
    let pod = TestPod::start(&place);
    let mut bad = Raw::link(&place, &pod, "bad", None).await;
    let (_slow, slow) = accepted(pod.connect, &mut bad, true).await;
    let (mut quick, topic) = accepted(pod.connect, &mut bad, false).await;
    beside(async move { while quick.read_u8().await.is_ok() {} });
    let piece = [(slow.as_str(), vec![0; 14 * 1024].into()), (topic.as_str(), Bytes::from_static(b"x"))];
    let resets = || pod.pod.metrics.resets.counted("plain_reader_too_slow");
    let mut most = 0;
    for _ in 0..1200 {
        bad.say(piece.iter().map(|(topic, data)| plain(&bad.node, "tcp-forward", topic, data.clone()))).await;
        most = most.max(pod.pod.table.queued());
    }
    wait_until("the slow one is reset", || resets() == 1).await;
    assert!(most <= (1 << 20) + 64 * 1024, "{most} bytes waited");
    assert!(pod.pod.metrics.stalls.get() > 0);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn many_plain_sessions_together_have_no_more_than_the_process_has_for_them() {
    let place = TestDir::new();
    let pod = TestPod::with(&place, "[mode.cloud.session]\nmemory = \"4MiB\"");
    let mut bad = Raw::link(&place, &pod, "bad", None).await;
    let idle = accepted(pod.connect, &mut bad, false).await;
    let mut slow = Vec::new();
    for _ in 0..8 {
        slow.push(accepted(pod.connect, &mut bad, true).await);
    }
    let data = Bytes::from(vec![0; 48 * 1024]);
    let (mut most, limit) = (0, pod.pod.table.unpromised().1);
    assert_eq!(limit, 2 << 20);
    // None of them has much, and nobody waits for long.
    let flood = async {
        for round in 0..1500 {
            let topic = &slow[round % slow.len()].1;
            bad.say([plain(&bad.node, "tcp-forward", topic, data.clone())]).await;
            most = most.max(pod.pod.table.unpromised().0);
        }
    };
    tokio::time::timeout(Duration::from_secs(60), flood).await.expect("it goes on");
    assert!((limit / 4..=limit + 64 * 1024).contains(&most), "{most} bytes of {limit} waited");
    let table = &pod.pod.table;
    table.tick(tokio::time::Instant::now());
    let text = pod.pod.metrics.encode();
    for (budget, bound) in
        [("promised", 4 << 20), ("kept", 4 << 20), ("passing", 4 << 20), ("unpromised", 2 << 20)]
    {
        let line = format!("tunnel_memory_limit_bytes{{budget=\"{budget}\"}} {bound}");
        assert!(text.lines().any(|l| l == line), "{line} is not in\n{text}");
        let held = format!("tunnel_memory_bytes{{budget=\"{budget}\"}} ");
        let held = text.lines().find_map(|l| l.strip_prefix(&held)).unwrap().parse::<usize>().unwrap();
        assert!(held <= bound && (held > 0 || budget != "promised"), "{budget}: {held}");
    }
    wait_until("some are reset", || pod.pod.metrics.resets.counted("plain_reader_too_slow") > 0).await;
    drop((bad, slow, idle));
    pod.forgets_all().await;
    assert_eq!(pod.pod.table.unpromised().0, 0);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_plain_edge_that_sends_hundreds_of_mebibytes_for_a_stalled_session_grows_no_process() {
    let place = TestDir::new();
    let pod = PodProcess::start(&place).await;
    let mut bad = Raw::link_at(&place, pod.grpc, "bad", None).await;
    pod.has("bad").await;
    let (_slow, slow) = accepted(pod.connect, &mut bad, true).await;
    let (mut quick, topic) = accepted(pod.connect, &mut bad, false).await;
    beside(async move { while quick.read_u8().await.is_ok() {} });
    let before = pod.most_memory();
    let piece = [(slow.as_str(), vec![0; 14 * 1024].into()), (topic.as_str(), Bytes::from_static(b"x"))];
    for _ in 0..22_000 {
        bad.say(piece.iter().map(|(topic, data)| plain(&bad.node, "tcp-forward", topic, data.clone()))).await;
    }
    assert!(pod.most_memory() <= before + MOST_GROWTH, "{before} became {}", pod.most_memory());
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn bytes_that_come_one_by_one_for_stalled_sessions_grow_no_process() {
    let place = TestDir::new();
    let pod = PodProcess::start(&place).await;
    let mut bad = Raw::link_at(&place, pod.grpc, "bad", None).await;
    pod.has("bad").await;
    let mut slow = Vec::new();
    for _ in 0..4 {
        slow.push(accepted(pod.connect, &mut bad, true).await);
    }
    let before = pod.most_memory();
    for _ in 0..5_000 {
        let bytes = (0..200).map(|n| {
            let (_, topic) = &slow[n % slow.len()];
            plain(&bad.node, "tcp-forward", topic, Bytes::from_static(b"x"))
        });
        bad.say(bytes).await;
    }
    assert!(pod.most_memory() <= before + MOST_GROWTH, "{before} became {}", pod.most_memory());
}

/// What a peer that sends without end may cost a pod, with what its allocator keeps.
const MOST_GROWTH: usize = 16 << 20;
