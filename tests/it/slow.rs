//! Readers that stall: they delay no other session, and cost the process no more than their windows.

use std::time::Duration;

use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;
use tokio::time::Instant;

use crate::support::clients::{assert_echo, reset, stalled};
use crate::support::programs::{TestDir, TestServer, assert_edge_idle, at, edge, edge_with};
use crate::support::{assert_eventually, targets, wait_until};

/// Returns how long some echoes take.
async fn echo_time(neighbour: &mut TcpStream) -> Duration {
    let started = Instant::now();
    for round in 0..200 {
        assert_echo(neighbour, &format!("round {round}")).await;
    }
    started.elapsed()
}

/// Waits until a number has not changed for a while, and returns it.
async fn settled(mut number: impl FnMut() -> u64) -> u64 {
    let (mut last, mut since) = (number(), Instant::now());
    wait_until("the number no longer changes", || {
        let now = number();
        if now != last {
            (last, since) = (now, Instant::now());
        }
        since.elapsed() >= Duration::from_millis(300)
    })
    .await;
    last
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_stalled_reader_does_not_stall_its_neighbour() {
    let (place, echo, fountain) = (TestDir::new(), targets::echo().await, targets::endless_source().await);
    let server = TestServer::start(&place);
    let edge = edge(&place, &server, "node1").await;
    let alone = echo_time(&mut server.open(&at("node1", echo)).await).await;
    let mut readers = Vec::new();
    for _ in 0..20 {
        readers.push(stalled(server.connect, &at("node1", fountain)).await);
    }
    settled(|| server.server.metrics.bytes_to_client.get()).await;
    let mut neighbour = server.open(&at("node1", echo)).await;
    let next_to_stalls = echo_time(&mut neighbour).await;
    assert!(
        next_to_stalls < 4 * alone + Duration::from_secs(2),
        "{alone:?} alone, {next_to_stalls:?} next to stalls"
    );
    // No session got more than a window. The unacknowledged bytes stay within the reserved bytes and a little more.
    let ((promised, _), (_, kept)) = (server.server.table.memory(), edge.table.memory());
    assert!(promised <= 21 * (4 << 20) && kept <= 6 << 20, "reserved {promised}, unacknowledged {kept}");
    for reader in readers {
        reset(reader);
    }
    drop(neighbour);
    server.assert_idle().await;
    assert_edge_idle(&edge).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_stalled_target_does_not_stall_its_neighbour() {
    let (place, echo) = (TestDir::new(), targets::echo().await);
    let hole = targets::serve(|socket| async move {
        std::future::pending::<()>().await;
        drop(socket);
    })
    .await;
    let server = TestServer::start(&place);
    let edge = edge(&place, &server, "node1").await;
    let alone = echo_time(&mut server.open(&at("node1", echo)).await).await;
    let (_from, mut to) = server.open(&at("node1", hole)).await.into_split();
    let sends = crate::support::spawn(async move { while to.write_all(&[1; 64 * 1024]).await.is_ok() {} });
    settled(|| edge.metrics.bytes_to_target.get()).await;
    let mut neighbour = server.open(&at("node1", echo)).await;
    let next_to_stalls = echo_time(&mut neighbour).await;
    assert!(
        next_to_stalls < 4 * alone + Duration::from_secs(2),
        "{alone:?} alone, {next_to_stalls:?} next to stalls"
    );
    assert!(edge.table.memory().0 <= 6 << 20);
    sends.abort();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_reader_that_stalled_gets_every_byte_once_it_reads() {
    let bytes = 32 << 20;
    let (place, source) = (TestDir::new(), targets::source(bytes).await);
    let server = TestServer::start(&place);
    let edge = edge(&place, &server, "node1").await;
    let mut client = stalled(server.connect, &at("node1", source)).await;
    settled(|| server.server.metrics.bytes_to_client.get()).await;
    let mut all = Vec::with_capacity(bytes);
    assert_eventually("all bytes", client.read_to_end(&mut all)).await.unwrap();
    assert!(all == targets::pattern(bytes), "{} of {bytes} bytes, or wrong ones", all.len());
    client.shutdown().await.unwrap();
    drop(client);
    server.assert_idle().await;
    assert_edge_idle(&edge).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn uploads_with_wide_windows_leave_an_edge_room_for_new_sessions() {
    let (place, echo, sink) = (TestDir::new(), targets::echo().await, targets::sink().await);
    let server = TestServer::start(&place);
    let edge = edge(&place, &server, "node1").await;
    let mut uploads = Vec::new();
    for _ in 0..12 {
        let (_from, mut to) = server.open(&at("node1", sink)).await.into_split();
        uploads.push(crate::support::spawn(async move {
            let _from = _from;
            while to.write_all(&[1; 64 * 1024]).await.is_ok() {}
        }));
    }
    let sent = edge.metrics.bytes_to_target.get();
    wait_until("the uploads are at full speed", || edge.metrics.bytes_to_target.get() > sent + (64 << 20))
        .await;
    for _ in 0..20 {
        assert_echo(&mut server.open(&at("node1", echo)).await, "hello").await;
    }
    assert!(edge.table.memory().0 > 1 << 20, "windows have grown: {:?}", edge.table.memory());
    for upload in uploads {
        upload.abort();
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn idle_sessions_do_not_keep_an_upload_at_its_initial_window() {
    let (place, echo, sink) = (TestDir::new(), targets::echo().await, targets::sink().await);
    let server = TestServer::start(&place);
    let edge = edge_with(&place, &server, "node1", "[edge.session]\nbuffer_memory = \"1MiB\"").await;
    let mut idle = Vec::new();
    // More than use half of the memory.
    while edge.table.memory().0 < 600 << 10 {
        idle.push(server.open(&at("node1", echo)).await);
    }
    let reserved = edge.table.memory().0;
    let (_from, mut to) = server.open(&at("node1", sink)).await.into_split();
    let sends = crate::support::spawn(async move { while to.write_all(&[1; 64 * 1024]).await.is_ok() {} });
    let mut most = 0;
    wait_until("the upload's window has grown", || {
        most = most.max(edge.table.memory().0);
        most > reserved + (64 << 10)
    })
    .await;
    assert!(most <= 1 << 20, "{most}");
    sends.abort();
}
