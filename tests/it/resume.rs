//! Sessions that outlive their links, and sessions that must not.

use std::time::Duration;

use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::time::Instant;
use tunnel::edge::Edge;
use tunnel_proto::frame::{ErrorCode, SessionError, SessionFrame};
use tunnel_proto::names::Instance;

use crate::support::clients::{assert_echo, assert_reset, rest};
use crate::support::line::Line;
use crate::support::programs::{TestDir, TestServer, assert_edge_idle, at, start_edge};
use crate::support::{Stopwatch, assert_eventually, pause_time, remote, spawn, targets, wait_until};

#[tokio::test]
async fn a_session_continues_over_new_links_without_losing_a_byte() {
    let (place, echo) = (TestDir::new(), targets::echo().await);
    let server = TestServer::start(&place);
    let line = Line::to(server.server.bound.grpc).await;
    let edge = start_edge(&place.edge("node1", line.at, ""));
    server.wait_for_node("node1").await;
    let (mut from, mut to) = server.open(&at("node1", echo)).await.into_split();
    let bytes = targets::pattern(8 << 20);
    let sent = bytes.clone();
    let link = spawn(async move {
        to.write_all(&sent).await.unwrap();
        to.shutdown().await.unwrap();
    });
    let mut back = Vec::new();
    for cut in 1..=3 {
        let mut part = vec![0; 2 << 20];
        assert_eventually("the next part", from.read_exact(&mut part)).await.unwrap();
        back.extend_from_slice(&part);
        let old = server.wait_for_node("node1").await;
        line.reset();
        wait_until("there is a new link", || {
            server.link("node1").is_some_and(|linked| linked.link.id != old.link.id)
        })
        .await;
        assert_eq!(server.server.table.len(), 1, "cut {cut}");
    }
    assert_eventually("the rest", from.read_to_end(&mut back)).await.unwrap();
    assert!(back == bytes, "{} of {} bytes, or wrong ones", back.len(), bytes.len());
    link.await.unwrap();
    server.assert_idle().await;
    assert_edge_idle(&edge).await;
}

#[tokio::test]
async fn a_session_outlives_a_path_that_stops_responding() {
    let (place, echo) = (TestDir::new(), targets::echo().await);
    let server = TestServer::start(&place);
    let line = Line::to(server.server.bound.grpc).await;
    let edge = start_edge(&place.edge("node1", line.at, ""));
    let old = server.wait_for_node("node1").await;
    let mut client = server.open(&at("node1", echo)).await;
    assert_echo(&mut client, "before").await;
    pause_time();
    line.become_unresponsive();
    client.write_all(b"lost on the way").await.unwrap();
    wait_until("there is a new link", || {
        server.link("node1").is_some_and(|linked| linked.link.id != old.link.id)
    })
    .await;
    let mut back = [0; 15];
    assert_eventually("the echo", client.read_exact(&mut back)).await.unwrap();
    assert_eq!(&back, b"lost on the way");
    assert_echo(&mut client, "after").await;
    client.shutdown().await.unwrap();
    assert_eq!(rest(&mut client).await, b"");
    drop(client);
    server.assert_idle().await;
    assert_edge_idle(&edge).await;
}

#[tokio::test]
async fn sessions_of_a_restarted_edge_end_with_a_reason() {
    let (place, echo) = (TestDir::new(), targets::echo().await);
    let server = TestServer::start(&place);
    let line = Line::to(server.server.bound.grpc).await;
    let old = start_edge(&place.edge("node1", line.at, ""));
    server.wait_for_node("node1").await;
    let mut client = server.open(&at("node1", echo)).await;
    assert_echo(&mut client, "hello").await;
    // Like a killed process: the edge can neither send nor reconnect.
    line.become_unresponsive();
    let held = line;
    let _new = restarted_edge(&place, &server).await;
    assert_reset(&mut client).await;
    server.assert_idle().await;
    assert_eq!(server.server.metrics.sessions.closed("connect", "unknown_session"), 1);
    assert_echo(&mut server.open(&at("node1", echo)).await, "hello").await;
    drop((old, held));
}

/// Starts another process of the same node, and waits until the server has replaced the dead link.
async fn restarted_edge(place: &TestDir, server: &TestServer) -> Edge {
    let old = server.link("node1").unwrap();
    let new = start_edge(&place.edge("node1", server.server.bound.grpc, ""));
    wait_until("the new edge is linked", || {
        server.link("node1").is_some_and(|linked| linked.link.id != old.link.id)
    })
    .await;
    new
}

#[tokio::test]
async fn a_session_of_a_lost_edge_ends_after_the_resume_timeout() {
    let (place, instance) = (TestDir::new(), Some(Instance::random()));
    let server = TestServer::with(&place, "[server.session]\nresume_timeout = \"30s\"");
    let mut edge = remote::link(&place, &server, "node1", instance).await;
    let accept = async {
        let (id, SessionFrame::Open { epoch, .. }) = edge.next_session_frame().await else {
            panic!("an Open first")
        };
        edge.send_session(
            id,
            SessionFrame::Opened { limit: 5, epoch, instance, place: None, resume_timeout: None },
        )
        .await;
    };
    let (mut client, ()) = tokio::join!(server.open("node1:22"), accept);
    pause_time();
    let started = Instant::now();
    drop(edge);
    let ended = client.read_u8().await;
    assert_eq!(ended.unwrap_err().kind(), std::io::ErrorKind::ConnectionReset);
    assert_eq!(started.elapsed().as_secs(), 30);
    server.assert_idle().await;
    assert_eq!(server.server.metrics.sessions.closed("connect", "cancelled"), 1);
}

#[tokio::test]
async fn a_scripted_edge_resumes_where_it_was() {
    let (place, instance) = (TestDir::new(), Some(Instance::random()));
    let server = TestServer::start(&place);
    let mut first = remote::link(&place, &server, "node1", instance).await;
    let accept = async {
        let (id, SessionFrame::Open { epoch, .. }) = first.next_session_frame().await else {
            panic!("an Open first")
        };
        first
            .send_session(
                id,
                SessionFrame::Opened { limit: 5, epoch, instance, place: None, resume_timeout: None },
            )
            .await;
        (id, epoch)
    };
    let (mut client, (id, opened)) = tokio::join!(server.open("node1:22"), accept);
    client.write_all(b"hello, resume").await.unwrap();
    let (_, data) = first.next_session_frame().await;
    assert_eq!(data, SessionFrame::Data("hello".into()), "no byte above the limit");
    drop(first);

    let mut second = remote::try_link(&place, server.server.bound.grpc, "node1", instance).await.unwrap();
    let (again, resume) = second.next_session_frame().await;
    let SessionFrame::Resume { received: 0, epoch, instance: named, .. } = resume else {
        panic!("{resume:?}")
    };
    assert!(again == id && epoch > opened && named == instance);
    // Data before the Resumed belongs to an earlier attempt.
    second.send_session(id, SessionFrame::Data("stale".into())).await;
    second.send_session(id, SessionFrame::Resumed { received: 2, limit: 100, epoch }).await;
    assert_eq!(second.next_session_frame().await, (id, SessionFrame::Data("llo, resume".into())));
    second.send_session(id, SessionFrame::Data("fresh".into())).await;
    second.send_session(id, SessionFrame::Fin { total: 6 }).await;
    assert_eq!(rest(&mut client).await, b"fresh");
    client.shutdown().await.unwrap();
    assert_eq!(second.next_session_frame().await, (id, SessionFrame::Fin { total: 14 }));
    second.send_session(id, SessionFrame::Credit { received: 14, limit: 100 }).await;
    let (_, over) = second.next_session_frame().await;
    assert!(
        matches!(&over, SessionFrame::Reset { refusal, .. } if refusal.code == ErrorCode::NoError),
        "{over:?}"
    );
    drop(client);
    server.assert_idle().await;
    assert!(server.server.metrics.frames_dropped.counted("unexpected") >= 1);
}

/// A remote that received an Open may have dialled. The next path tells it that the opening was abandoned.
#[tokio::test]
async fn an_open_abandoned_without_a_path_is_cancelled_over_the_next_one() {
    let (place, instance) = (TestDir::new(), Some(Instance::random()));
    let server = TestServer::with(&place, "[server.session]\nopen_timeout = \"1s\"");
    let mut first = remote::link(&place, &server, "node1", instance).await;
    let accept = async {
        let (id, SessionFrame::Open { epoch, .. }) = first.next_session_frame().await else {
            panic!("an Open first")
        };
        drop(first);
        (id, epoch)
    };
    let (answer, (id, opened)) = tokio::join!(server.request_connect("node1:22"), accept);
    assert_eq!(answer.status, 502, "{answer:?}");

    let mut second = remote::try_link(&place, server.server.bound.grpc, "node1", instance).await.unwrap();
    let started = Stopwatch::start();
    let (again, resume) = second.next_session_frame().await;
    let SessionFrame::Resume { received: 0, epoch, instance: named, .. } = resume else {
        panic!("never a second Open: {resume:?}")
    };
    assert!(again == id && epoch > opened && named == instance && started.elapsed().as_secs() < 1);
    second.send_session(id, SessionFrame::Resumed { received: 0, limit: 100, epoch }).await;
    let (_, broken) = second.next_session_frame().await;
    let SessionFrame::ResetAt { total: 0, refusal } = broken else { panic!("{broken:?}") };
    assert_eq!(refusal.code, ErrorCode::Cancelled);
    second
        .send_session(id, SessionFrame::Reset { epoch, refusal: SessionError::new(ErrorCode::NoError, "") })
        .await;
    server.assert_idle().await;
}

/// Users mostly give up while the path hangs, and the abort is lost with the path.
#[tokio::test]
async fn an_open_abandoned_on_a_lost_path_is_cancelled_over_the_next_one() {
    let (place, instance) = (TestDir::new(), Some(Instance::random()));
    let server = TestServer::with(&place, "[server.session]\nopen_timeout = \"1s\"");
    let mut first = remote::link(&place, &server, "node1", instance).await;
    let (answer, (id, open)) = tokio::join!(server.request_connect("node1:22"), first.next_session_frame());
    assert_eq!(answer.status, 504, "{answer:?}");
    let SessionFrame::Open { epoch: opened, .. } = open else { panic!("{open:?}") };
    let (_, reset) = first.next_session_frame().await;
    assert!(matches!(reset, SessionFrame::Reset { epoch, .. } if epoch == opened), "{reset:?}");
    drop(first);

    let mut second = remote::try_link(&place, server.server.bound.grpc, "node1", instance).await.unwrap();
    let (again, resume) = second.next_session_frame().await;
    let SessionFrame::Resume { received: 0, epoch, instance: named, .. } = resume else {
        panic!("never a second Open: {resume:?}")
    };
    assert!(again == id && epoch > opened && named == instance);
    // The server on the path has lost the node, so another path is searched for.
    second
        .send_session(
            id,
            SessionFrame::Reset { epoch, refusal: SessionError::new(ErrorCode::NodeNotConnected, "lost") },
        )
        .await;
    let (_, resume) = second.next_session_frame().await;
    let SessionFrame::Resume { epoch: last, .. } = resume else { panic!("{resume:?}") };
    assert!(last > epoch);
    second
        .send_session(
            id,
            SessionFrame::Reset { epoch: last, refusal: SessionError::new(ErrorCode::UnknownSession, "") },
        )
        .await;
    server.assert_idle().await;
}

/// The remote answers *not here* to the Resume that asks about the Open, while no other path is being searched for.
#[tokio::test]
async fn an_abandoned_open_tries_another_path_if_its_path_has_no_such_node() {
    let (place, instance) = (TestDir::new(), Some(Instance::random()));
    let server = TestServer::with(&place, "[server.session]\nopen_timeout = \"1s\"");
    let mut edge = remote::link(&place, &server, "node1", instance).await;
    let (_, (id, _)) = tokio::join!(server.request_connect("node1:22"), edge.next_session_frame());
    let (_, reset) = edge.next_session_frame().await;
    assert!(matches!(reset, SessionFrame::Reset { .. }), "{reset:?}");
    for code in [ErrorCode::NodeNotConnected, ErrorCode::UnknownSession] {
        let (_, resume) = edge.next_session_frame().await;
        let SessionFrame::Resume { epoch, .. } = resume else { panic!("{resume:?}") };
        edge.send_session(id, SessionFrame::Reset { epoch, refusal: SessionError::new(code, "") }).await;
    }
    server.assert_idle().await;
}

#[tokio::test]
async fn an_edge_with_a_session_reconnects_each_time_its_path_is_reset() {
    let (place, echo) = (TestDir::new(), targets::echo().await);
    let server = TestServer::start(&place);
    let line = Line::to(server.server.bound.grpc).await;
    let _edge = start_edge(&place.edge("node1", line.at, ""));
    server.wait_for_node("node1").await;
    let mut client = server.open(&at("node1", echo)).await;
    let started = Stopwatch::start();
    for cut in 0..9 {
        line.reset();
        assert_echo(&mut client, &format!("cut {cut}")).await;
    }
    // Doubled pauses would take ten seconds.
    assert!(started.elapsed().as_secs() < 3, "{:?}", started.elapsed());
}

#[tokio::test]
async fn a_path_that_is_lost_repeatedly_is_searched_for_with_pauses() {
    let place = TestDir::new();
    let server = TestServer::start(&place);
    let instance = Some(Instance::from_bits(1));
    let mut edge = remote::link(&place, &server, "node1", instance).await;
    let accept = async {
        let (id, _) = edge.next_session_frame().await;
        edge.send_session(
            id,
            SessionFrame::Opened { limit: 1000, epoch: 1, instance, place: None, resume_timeout: None },
        )
        .await;
        id
    };
    let (mut client, id) = tokio::join!(server.open("node1:22"), accept);
    let started = Instant::now();
    edge.send_session(id, SessionFrame::PathLost { epoch: 1 }).await;
    let mut last = 1;
    for _ in 0..6 {
        let (_, word) = edge.next_session_frame().await;
        let SessionFrame::Resume { epoch, .. } = word else { panic!("{word:?}") };
        last = epoch;
        edge.send_session(id, SessionFrame::Resumed { received: 0, limit: 1000, epoch }).await;
        edge.send_session(id, SessionFrame::PathLost { epoch }).await;
    }
    // Full jitter below 0.1, 0.2, 0.4, 0.8 and 1.6 s; without pauses it takes a few milliseconds.
    assert!(started.elapsed() > Duration::from_millis(150), "{:?}", started.elapsed());
    let (_, word) = edge.next_session_frame().await;
    let SessionFrame::Resume { epoch, .. } = word else { panic!("{word:?}") };
    assert!(epoch > last);
    edge.send_session(id, SessionFrame::Resumed { received: 0, limit: 1000, epoch }).await;
    edge.send_session(id, SessionFrame::Data("hello".into())).await;
    let mut back = [0; 5];
    assert_eventually("bytes", client.read_exact(&mut back)).await.unwrap();
    // Bytes have moved, so the session resumes at once after the next loss.
    edge.send_session(id, SessionFrame::PathLost { epoch }).await;
    let started = Stopwatch::start();
    let (_, word) = edge.next_session_frame().await;
    assert!(matches!(word, SessionFrame::Resume { .. }), "{word:?}");
    assert!(started.elapsed() < Duration::from_millis(500), "{:?}", started.elapsed());
}

#[tokio::test]
async fn an_edge_with_a_session_dials_often_until_it_would_end() {
    let (place, echo) = (TestDir::new(), targets::echo().await);
    let server = TestServer::start(&place);
    let line = Line::to(server.server.bound.grpc).await;
    let edges = ["node1", "node2"].map(|node| start_edge(&place.edge(node, line.at, "")));
    server.wait_for_node("node2").await;
    server.wait_for_node("node1").await;
    let mut client = server.open(&at("node1", echo)).await;
    assert_echo(&mut client, "before").await;
    line.route_to(targets::closed_port().await);
    pause_time();
    line.reset();
    tokio::time::sleep(Duration::from_secs(50)).await;
    let [with_session, without] = edges.each_ref().map(|edge| edge.metrics.link_reconnects.get());
    assert!(with_session >= 25 && without <= 20, "{with_session} and {without} dials");
    line.route_to(server.server.bound.grpc);
    assert_echo(&mut client, "after").await;
}
