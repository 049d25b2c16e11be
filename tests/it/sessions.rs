//! Many sessions: afterwards nothing of them is left in any table, budget or counter.

use std::sync::Arc;

use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::task::JoinSet;

use crate::support::clients::{assert_echo, rest};
use crate::support::programs::{TestDir, TestServer, assert_edge_idle, at, edge, edge_with};
use crate::support::{assert_eventually, targets};

#[tokio::test]
async fn two_thousand_consecutive_sessions_leave_no_state() {
    // The target closes first, so that no port of the client is left waiting.
    let (place, target) = (TestDir::new(), targets::serve(one_byte).await);
    let server = TestServer::start(&place);
    let edge = edge(&place, &server, "node1").await;
    let target = at("node1", target);
    for round in 0..2_000 {
        let mut client = server.open(&target).await;
        client.write_all(b"x").await.unwrap();
        let mut back = Vec::new();
        client.read_to_end(&mut back).await.unwrap();
        assert_eq!(back, b"x", "round {round}");
    }
    server.assert_idle().await;
    assert_edge_idle(&edge).await;
    let (servers, edges) = (&server.server.metrics.sessions, &edge.metrics.sessions);
    assert_eq!((servers.closed("connect", "ok"), edges.closed("acceptor", "ok")), (2_000, 2_000));
}

async fn one_byte(mut socket: tokio::net::TcpStream) {
    let Ok(byte) = socket.read_u8().await else { return };
    let _ = socket.write_all(&[byte]).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn five_hundred_concurrent_sessions_work_and_leave_no_state() {
    let (place, echo) = (TestDir::new(), targets::echo().await);
    let server = Arc::new(TestServer::start(&place));
    let edge = edge_with(&place, &server, "node1", "[edge.session]\nbuffer_memory = \"32MiB\"").await;
    let all = Arc::new(tokio::sync::Barrier::new(500));
    let mut sessions = JoinSet::new();
    for number in 0..500 {
        let (server, all, target) = (server.clone(), all.clone(), at("node1", echo));
        sessions.spawn(async move {
            let mut client = server.open(&target).await;
            assert_echo(&mut client, &format!("session {number}")).await;
            let together = all.wait().await;
            if together.is_leader() {
                assert_eq!(server.server.table.len(), 500);
            }
            all.wait().await;
            assert_echo(&mut client, &format!("session {number} again")).await;
            client.shutdown().await.unwrap();
            assert_eq!(rest(&mut client).await, b"");
        });
    }
    assert_eventually("the end of all sessions", sessions.join_all()).await;
    server.assert_idle().await;
    assert_edge_idle(&edge).await;
}

#[tokio::test]
async fn an_edge_without_memory_left_refuses_and_takes_sessions_again_later() {
    let (place, echo) = (TestDir::new(), targets::echo().await);
    let server = TestServer::start(&place);
    // Three quarters of the memory are for new sessions. Each reserves 32 KiB until half of that is used, then 8 KiB,
    // and 2 KiB in the last quarter of it.
    let edge = edge_with(&place, &server, "node1", "[edge.session]\nbuffer_memory = \"1MiB\"").await;
    let mut open = Vec::new();
    for _ in 0..12 + 24 + 96 {
        open.push(server.open(&at("node1", echo)).await);
    }
    let refused = server.request_connect(&at("node1", echo)).await;
    assert_eq!(refused.status, 503, "{refused:?}");
    assert!(refused.phrase.contains("no memory left"), "{refused:?}");
    drop(open);
    server.assert_idle().await;
    assert_edge_idle(&edge).await;
    assert_echo(&mut server.open(&at("node1", echo)).await, "hello").await;
}
