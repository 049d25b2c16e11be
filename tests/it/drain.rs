//! Shutdown: no new work, old work until the deadline, the links last.

use std::future::pending;
use std::net::SocketAddr;
use std::time::Duration;

use tokio::io::AsyncWriteExt;
use tokio::net::{TcpListener, TcpStream};
use tokio::time::Instant;
use tunnel_base::drain::Drained;
use tunnel_net::tls::IdentityFiles;
use tunnel_proto::frame::{ErrorCode, SessionError, SessionFrame};
use tunnel_proto::hello::LinkCaller;
use tunnel_proto::names::{Instance, SessionId};

use crate::support::call::Call;
use crate::support::clients::{assert_echo, assert_reset, get, rest};
use crate::support::programs::{TestDir, TestServer, at, edge, edge_with, start_edge};
use crate::support::remote::ScriptedServer;
use crate::support::{Stopwatch, assert_eventually, pause_time, remote, servers, spawn, targets, wait_until};

async fn is_closed(at: SocketAddr) {
    assert_eventually("a closed port", async { while TcpStream::connect(at).await.is_ok() {} }).await;
}

#[tokio::test]
async fn a_stopping_server_is_not_ready_and_lets_its_sessions_finish() {
    let (place, echo) = (TestDir::new(), targets::echo().await);
    let server = TestServer::start(&place);
    let edge = edge(&place, &server, "node1").await;
    let mut client = server.open(&at("node1", echo)).await;
    assert_echo(&mut client, "before").await;
    let (log, connect, grpc) = (server.server.bound.log, server.connect, server.server.bound.grpc);
    let (metrics, table) = (server.server.metrics.clone(), server.server.table.clone());
    assert_eq!(get(log, "/readyz").await.status, 200);
    let stopped = spawn(server.server.shutdown(pending()));
    is_closed(connect).await;
    let page = get(log, "/readyz").await;
    assert_eq!((page.status, page.body.as_str()), (503, "draining: stopping\n"));
    assert_eventually("an edge that no new session reaches", async {
        loop {
            let page = get(edge.bound.log.unwrap(), "/readyz").await;
            if page.status == 503 && page.body.contains("only earlier sessions continue") {
                break;
            }
            tokio::task::yield_now().await;
        }
    })
    .await;
    assert_eq!(get(log, "/livez").await.status, 200);
    assert!(!stopped.is_finished());
    assert_echo(&mut client, "while it stops").await;
    client.shutdown().await.unwrap();
    assert_eq!(rest(&mut client).await, b"");
    drop(client);
    assert_eq!(assert_eventually("the end of the server", stopped).await.unwrap(), Drained::Finished);
    assert!(table.is_empty());
    assert_eq!(metrics.sessions.closed("connect", "ok"), 1);
    assert_eq!(metrics.links.all(), 0);
    is_closed(log).await;
    is_closed(grpc).await;
    wait_until("the edge has lost its link", || edge.metrics.links.all() == 0).await;
}

#[tokio::test]
async fn sessions_are_aborted_at_a_servers_drain_timeout() {
    let (place, echo) = (TestDir::new(), targets::echo().await);
    let server = TestServer::with(&place, "[server.session]\ndrain_timeout = \"7s\"");
    let edge = edge(&place, &server, "node1").await;
    let mut client = server.open(&at("node1", echo)).await;
    assert_echo(&mut client, "before").await;
    pause_time();
    let started = Instant::now();
    let stopped = spawn(server.server.shutdown(pending()));
    let ended = rest_or_reset(&mut client).await;
    assert!(ended.is_err() && started.elapsed().as_secs() == 7, "{ended:?} after {:?}", started.elapsed());
    assert_eq!(assert_eventually("the end of the server", stopped).await.unwrap(), Drained::Aborted(1));
    wait_until("the edge has dropped the session", || edge.table.is_empty()).await;
}

async fn rest_or_reset(client: &mut TcpStream) -> std::io::Result<usize> {
    tokio::io::AsyncReadExt::read_to_end(client, &mut Vec::new()).await
}

#[tokio::test]
async fn a_second_signal_ends_a_server_at_once() {
    let (place, echo) = (TestDir::new(), targets::echo().await);
    let server = TestServer::start(&place);
    let _edge = edge(&place, &server, "node1").await;
    let mut client = server.open(&at("node1", echo)).await;
    assert_echo(&mut client, "before").await;
    let started = Stopwatch::start();
    let (signal, second) = tokio::sync::oneshot::channel();
    let connect = server.connect;
    let stopped = spawn(server.server.shutdown(async { drop(second.await) }));
    is_closed(connect).await;
    signal.send(()).unwrap();
    assert_eq!(assert_eventually("the end of the server", stopped).await.unwrap(), Drained::Aborted(1));
    assert_reset(&mut client).await;
    assert!(started.elapsed().as_secs() < 5, "{:?}", started.elapsed());
}

#[tokio::test]
async fn a_stopping_server_accepts_no_new_links() {
    let (place, echo) = (TestDir::new(), targets::echo().await);
    let server = TestServer::start(&place);
    let _edge = edge(&place, &server, "node1").await;
    let mut client = server.open(&at("node1", echo)).await;
    assert_echo(&mut client, "before").await;
    let (connect, grpc) = (server.connect, server.server.bound.grpc);
    let stopped = spawn(server.server.shutdown(pending()));
    is_closed(connect).await;
    let hello = remote::headers("node2", Some(Instance::random()));
    let refused = remote::link_as_peer(&place, grpc, None, hello, "node2").await.err().unwrap();
    assert!(refused.message().contains("UserCanceled"), "before it costs a TLS handshake: {refused}");
    drop(client);
    assert_eventually("the end of the server", stopped).await.unwrap();
}

#[tokio::test]
async fn a_stopping_server_accepts_links_of_its_peers_only() {
    let (place, echo) = (TestDir::new(), targets::echo().await);
    let [first, second] = servers::start(&place, 2).try_into().ok().unwrap();
    let _edge = edge(&place, &first, "node1").await;
    let mut client = first.open(&at("node1", echo)).await;
    assert_echo(&mut client, "before").await;
    let grpc = first.server.bound.grpc;
    let log = first.server.bound.log;
    let stopped = spawn(first.server.shutdown(pending()));
    assert_eventually("the stop", async { while get(log, "/readyz").await.status == 200 {} }).await;
    let shows = IdentityFiles { cert: place.files.cert.clone(), key: place.files.key.clone() };
    let hello = LinkCaller::peer_request(Instance::random());
    remote::link_as_peer(&place, grpc, Some(shows), hello, "node1").await.unwrap();
    // It has the address of the peers here.
    let refused = remote::try_link(&place, grpc, "node2", Some(Instance::random())).await.err().unwrap();
    assert_eq!((refused.code(), refused.message()), (tonic::Code::Unavailable, "server is shutting down"));
    drop((client, second));
    assert_eventually("the end of the server", stopped).await.unwrap();
}

#[tokio::test]
async fn an_edge_with_only_one_server_seldom_dials_it_while_it_stops() {
    let (place, echo) = (TestDir::new(), targets::echo().await);
    let server = TestServer::start(&place);
    let edge = edge(&place, &server, "node1").await;
    let mut client = server.open(&at("node1", echo)).await;
    assert_echo(&mut client, "before").await;
    pause_time();
    let stopped = spawn(server.server.shutdown(pending()));
    assert_eq!(assert_eventually("the end of the server", stopped).await.unwrap(), Drained::Aborted(1));
    let refused = edge.metrics.link_dial_failures.counted("stopping");
    assert!((2..=8).contains(&refused), "{refused} times in 25 s");
}

/// Its dials do not hold up the stop.
#[tokio::test]
async fn an_edge_stops_at_once_while_its_server_does_not_answer() {
    let place = TestDir::new();
    let silent = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let edge = start_edge(&place.edge("node1", silent.local_addr().unwrap(), ""));
    let _socket = assert_eventually("a dial", silent.accept()).await.unwrap();
    let stopped = tokio::time::timeout(Duration::from_secs(2), edge.shutdown(pending())).await;
    assert_eq!(stopped.unwrap(), Drained::Finished);
}

#[tokio::test]
async fn a_stopping_edge_finishes_its_sessions_and_refuses_new_ones() {
    let (place, echo) = (TestDir::new(), targets::echo().await);
    let server = TestServer::start(&place);
    let edge = edge(&place, &server, "node1").await;
    let mut client = server.open(&at("node1", echo)).await;
    assert_echo(&mut client, "before").await;
    let log = edge.bound.log.unwrap();
    let stopped = spawn(edge.shutdown(pending()));
    let refusal = async {
        loop {
            let answer = server.request_connect("node1:1").await;
            if answer.status == 503 {
                break answer;
            }
        }
    };
    assert_eq!(assert_eventually("a refusal", refusal).await.phrase, "node node1: the edge is stopping");
    let page = get(log, "/readyz").await;
    assert_eq!((page.status, page.body.as_str()), (503, "draining: stopping\n"));
    assert_echo(&mut client, "while it stops").await;
    client.shutdown().await.unwrap();
    assert_eq!(rest(&mut client).await, b"");
    drop(client);
    assert_eq!(assert_eventually("the end of the edge", stopped).await.unwrap(), Drained::Finished);
    wait_until("the server has lost the link", || server.link("node1").is_none()).await;
    is_closed(log).await;
    server.assert_idle().await;
}

#[tokio::test]
async fn sessions_are_aborted_at_an_edges_drain_timeout_and_clients_are_reset() {
    let (place, echo) = (TestDir::new(), targets::echo().await);
    let server = TestServer::start(&place);
    let edge = edge_with(&place, &server, "node1", "[edge.session]\ndrain_timeout = \"0s\"").await;
    let mut client = server.open(&at("node1", echo)).await;
    assert_echo(&mut client, "before").await;
    assert_eq!(assert_eventually("the end of the edge", edge.shutdown(pending())).await, Drained::Aborted(1));
    assert_reset(&mut client).await;
    server.assert_idle().await;
}

#[tokio::test]
async fn aborted_sessions_get_the_reason_that_server_or_edge_is_stopping() {
    let place = TestDir::new();
    let server = TestServer::with(&place, "[server.session]\ndrain_timeout = \"0s\"");
    let mut call = remote::link(&place, &server, "node1", Some(Instance::random())).await;
    let accepts = async {
        let (id, SessionFrame::Open { epoch, .. }) = call.next_session_frame().await else {
            panic!("an Open first")
        };
        call.send_session(id, SessionFrame::opened(10_000, epoch)).await;
        id
    };
    let (_client, id) = tokio::join!(server.open("node1:22"), accepts);
    let metrics = server.server.metrics.clone();
    let (stopped, frame) = tokio::join!(server.server.shutdown(pending()), call.next_session_frame());
    assert_eq!(stopped, Drained::Aborted(1));
    let why = |reason: &str| SessionError::new(ErrorCode::Overloaded, reason);
    assert_eq!(frame, (id, SessionFrame::ResetAt { total: 0, refusal: why("the server is stopping") }));
    assert_eq!(metrics.sessions.closed("connect", "overloaded"), 1, "it ends on its own, with that reason");

    let echo = targets::echo().await;
    let mut cloud = ScriptedServer::start(&place).await;
    let edge = start_edge(&place.edge("node1", cloud.at, "[edge.session]\ndrain_timeout = \"0s\""));
    let mut call = cloud.call().await;
    call.answer(Some(Instance::random()));
    let open = SessionFrame::Open {
        target: echo.into(),
        limit: 9,
        epoch: 1,
        client: String::new(),
        opener: None,
        resume_timeout: None,
        boot: None,
    };
    call.send_session(id, open).await;
    assert!(matches!(call.next_session_frame().await.1, SessionFrame::Opened { .. }));
    let (stopped, frame) = tokio::join!(edge.shutdown(pending()), call.next_session_frame());
    assert_eq!(stopped, Drained::Aborted(1));
    assert_eq!(frame, (id, SessionFrame::ResetAt { total: 0, refusal: why("the edge is stopping") }));
}

#[tokio::test]
async fn servers_and_edges_without_sessions_stop_at_once() {
    let place = TestDir::new();
    let server = TestServer::start(&place);
    let edge = edge(&place, &server, "node1").await;
    let started = Stopwatch::start();
    assert_eq!(edge.shutdown(pending()).await, Drained::Finished);
    assert_eq!(server.server.shutdown(pending()).await, Drained::Finished);
    assert!(started.elapsed().as_secs() < 3, "{:?}", started.elapsed());
}

#[tokio::test]
async fn a_stopping_edge_delivers_all_bytes_of_its_targets() {
    let (place, source) = (TestDir::new(), targets::source(50_000).await);
    let mut server = ScriptedServer::start(&place).await;
    let edge = start_edge(&place.edge("node1", server.at, ""));
    let mut call = server.call().await;
    call.answer(Some(Instance::random()));
    let id = SessionId::random();
    let open = SessionFrame::Open {
        target: source.into(),
        limit: 10_000,
        epoch: 1,
        client: String::new(),
        opener: None,
        resume_timeout: None,
        boot: None,
    };
    call.send_session(id, open).await;
    assert!(matches!(call.next_session_frame().await.1, SessionFrame::Opened { .. }));
    call.send_session(id, SessionFrame::Fin { total: 1 }).await;
    let stopped = slow_reader(&mut call, id, async |_| spawn(edge.shutdown(pending()))).await;
    call.send_session(
        id,
        SessionFrame::Reset { epoch: 1, refusal: SessionError::new(ErrorCode::NoError, "") },
    )
    .await;
    assert_eq!(assert_eventually("the end of the edge", stopped).await.unwrap(), Drained::Finished);
}

#[tokio::test]
async fn a_stopping_server_delivers_all_bytes_of_its_clients() {
    let place = TestDir::new();
    let server = TestServer::start(&place);
    let mut call = remote::link(&place, &server, "node1", Some(Instance::random())).await;
    let accepts = async {
        let (id, SessionFrame::Open { epoch, .. }) = call.next_session_frame().await else {
            panic!("an Open first")
        };
        call.send_session(id, SessionFrame::opened(10_000, epoch)).await;
        call.send_session(id, SessionFrame::Fin { total: 1 }).await;
        id
    };
    let (mut client, id) = tokio::join!(server.open("node1:22"), accepts);
    client.write_all(&targets::pattern(50_000)).await.unwrap();
    client.shutdown().await.unwrap();
    assert_eq!(rest(&mut client).await, b"");
    drop(client);
    let stopped = slow_reader(&mut call, id, async |_| spawn(server.server.shutdown(pending()))).await;
    assert_eq!(assert_eventually("the end of the server", stopped).await.unwrap(), Drained::Finished);
}

/// Reads 10,000 of 50,000 bytes, and the rest some time after `stop` was called.
async fn slow_reader<T>(call: &mut Call, id: SessionId, stop: impl AsyncFnOnce(()) -> T) -> T {
    let mut got = Vec::new();
    while got.len() < 10_000 {
        if let SessionFrame::Data(bytes) = call.next_session_frame().await.1 {
            got.extend_from_slice(&bytes);
        }
    }
    let stopped = stop(()).await;
    // Longer than a stop without work takes. There is no event to wait for meanwhile.
    tokio::time::sleep(std::time::Duration::from_millis(500)).await;
    call.send_session(id, SessionFrame::Credit { received: 10_000, limit: 100_000 }).await;
    loop {
        match call.next_session_frame().await.1 {
            SessionFrame::Data(bytes) => got.extend_from_slice(&bytes),
            SessionFrame::Fin { total } => {
                assert_eq!(total, 50_001);
                break;
            }
            other => panic!("{other:?}"),
        }
    }
    assert!(got == targets::pattern(50_000));
    call.send_session(id, SessionFrame::Credit { received: 50_001, limit: 100_000 }).await;
    stopped
}
