//! Servers that stop while others continue: no session that has another path is aborted.

use std::future::pending;
use std::time::Duration;

use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;
use tunnel::edge::Edge;
use tunnel_base::drain::Drained;
use tunnel_link::table::handles::Session;
use tunnel_proto::frame::ErrorCode;

use crate::support::clients::{self, assert_echo, rest};
use crate::support::line::Line;
use crate::support::programs::{TestDir, TestServer, assert_edge_idle, at, start_edge, target};
use crate::support::servers;
use crate::support::sessions::{assert_session_echo, open_session};
use crate::support::{Stopwatch, assert_eventually, remote, spawn, targets, wait_until};

#[tokio::test]
async fn a_session_continues_when_its_relay_stops() {
    let (place, echo) = (TestDir::new(), targets::echo().await);
    let mut both = servers::start(&place, 2);
    let (last, front) = (both.remove(1), both.remove(0));
    let line = Line::to(last.server.bound.grpc).await;
    // The opener's last Reset can be lost with the relay. The acceptor then keeps its end for this time.
    let edge = start_edge(&place.edge("node1", line.at, "[edge.session]\nresume_timeout = \"10s\"\n"));
    last.wait_for_node("node1").await;
    let (mut from, mut to) = front.open(&at("node1", echo)).await.into_split();
    let bytes = targets::pattern(8 << 20);
    let sent = bytes.clone();
    let sender = spawn(async move {
        to.write_all(&sent).await.unwrap();
        to.shutdown().await.unwrap();
    });
    let mut back = vec![0; 1 << 20];
    from.read_exact(&mut back).await.unwrap();
    line.route_to(front.server.bound.grpc);
    let stopped = spawn(last.server.shutdown(pending()));
    assert_eventually("the rest", from.read_to_end(&mut back)).await.unwrap();
    assert!(back == bytes, "{} of {} bytes, or wrong ones", back.len(), bytes.len());
    sender.await.unwrap();
    assert_eq!(assert_eventually("the end of the server", stopped).await.unwrap(), Drained::Finished);
    assert!(front.link("node1").is_some());
    assert_eq!(edge.metrics.resets.counted("cancelled"), 0);
    assert_edge_idle(&edge).await;
    wait_until("the old link is closed", || edge.metrics.links.all() == 1).await;
}

#[tokio::test]
async fn a_stopping_server_serves_its_clients_and_briefly_new_ones() {
    let (place, echo) = (TestDir::new(), targets::echo().await);
    let mut both = servers::start(&place, 2);
    let (last, other) = (both.remove(1), both.remove(0));
    let line = Line::to(last.server.bound.grpc).await;
    let edge = start_edge(&place.edge("node1", line.at, ""));
    last.wait_for_node("node1").await;
    let mut client = last.open(&at("node1", echo)).await;
    assert_echo(&mut client, "before").await;
    line.route_to(other.server.bound.grpc);
    let connect = last.connect;
    let stopped = spawn(last.server.shutdown(pending()));
    other.wait_for_node("node1").await;
    wait_until("the edge has both links", || edge.metrics.links.all() == 2).await;
    assert_echo(&mut client, "on the old link").await;
    let mut late = clients::open(connect, &at("node1", echo)).await;
    assert_echo(&mut late, "not known yet to be stopping").await;
    for mut client in [client, late] {
        client.shutdown().await.unwrap();
        assert_eq!(rest(&mut client).await, b"");
    }
    assert_eq!(assert_eventually("the end of the server", stopped).await.unwrap(), Drained::Finished);
    wait_until("the old link is closed", || edge.metrics.links.all() == 1).await;
}

/// Opens a session from an edge to a target at another node. Returns the text of the refusal if it is refused.
async fn between(edge: &Edge, to: &str) -> Result<Session, String> {
    let target = target(to);
    open_session(edge, target.host.to_string().parse().unwrap(), target).await
}

#[tokio::test]
async fn edges_reach_one_another_only_if_allowed_and_while_both_move() {
    let (place, echo) = (TestDir::new(), targets::echo().await);
    let all = servers::addresses(3);
    let text = |n: usize| servers::config(&place, all[n], &servers::peers(&all));
    let closed = TestServer::from_text(&text(0));
    let allow = "[server.edge_access]\nnodes = [\"node*\"]\n";
    let servers = [1, 2].map(|n| TestServer::from_text(&format!("{}\n{allow}", text(n))));
    let (line1, line2) =
        (Line::to(closed.server.bound.grpc).await, Line::to(servers[0].server.bound.grpc).await);
    let requester = start_edge(&place.edge("asker", line1.at, ""));
    let _edge = start_edge(&place.edge("node2", line2.at, ""));
    closed.wait_for_node("asker").await;
    servers[0].wait_for_node("node2").await;
    wait_until("the edge has a link", || requester.metrics.links.all() == 1).await;
    let refused = between(&requester, &at("node2", echo)).await.unwrap_err();
    assert!(refused.contains("may not reach node node2"), "{refused}");
    line1.route_to(servers[1].server.bound.grpc);
    line1.reset();
    servers[1].wait_for_node("asker").await;
    wait_until("the edge has a link", || requester.metrics.links.all() == 1).await;
    let mut session = between(&requester, &at("node2", echo)).await.unwrap();
    assert_session_echo(&mut session, "over two servers").await;
    line2.route_to(servers[1].server.bound.grpc);
    line2.reset();
    servers[1].wait_for_node("node2").await;
    assert_session_echo(&mut session, "over one").await;
    line1.route_to(servers[0].server.bound.grpc);
    line1.reset();
    servers[0].wait_for_node("asker").await;
    assert_session_echo(&mut session, "over two again").await;
    assert_eq!(session.ended().map(|why| why.code), None::<ErrorCode>);
    drop(session);
    assert_edge_idle(&requester).await;
}

#[tokio::test]
async fn an_edges_session_moves_when_its_server_stops() {
    let (place, echo) = (TestDir::new(), targets::echo().await);
    let all = servers::addresses(2);
    let allow = "[server.edge_access]\nnodes = [\"node2\"]\n";
    let text = |n: usize| format!("{}\n{allow}", servers::config(&place, all[n], &servers::peers(&all)));
    let (first, second) = (TestServer::from_text(&text(0)), TestServer::from_text(&text(1)));
    let line = Line::to(first.server.bound.grpc).await;
    let requester = start_edge(&place.edge("asker", line.at, ""));
    let _edge = start_edge(&place.edge("node2", second.server.bound.grpc, ""));
    first.wait_for_node("asker").await;
    second.wait_for_node("node2").await;
    wait_until("the edge has a link", || requester.metrics.links.all() == 1).await;
    let mut session = between(&requester, &at("node2", echo)).await.unwrap();
    assert_session_echo(&mut session, "before").await;
    line.route_to(second.server.bound.grpc);
    let started = Stopwatch::start();
    let stopped = assert_eventually("the end of the server", first.server.shutdown(pending())).await;
    assert_eq!(stopped, Drained::Finished);
    assert!(started.elapsed() < Duration::from_secs(8), "{:?}", started.elapsed());
    assert_session_echo(&mut session, "after").await;
}

#[tokio::test]
async fn a_session_with_a_plain_node_continues_while_its_server_stops() {
    let place = TestDir::new();
    let mut servers = servers::start(&place, 2);
    let mut edge = remote::link(&place, &servers[1], "node1", None).await;
    let accept = async {
        let open = edge.next_session_message().await;
        edge.send_plain("connected", &open.topic, "").await;
        open.topic
    };
    let (mut client, topic) = tokio::join!(servers[0].open("node1:22"), accept);
    let stopping = servers.pop().unwrap();
    let connect = stopping.connect;
    let stopped = spawn(stopping.server.shutdown(pending()));
    // The server still accepts clients until then. Without the session it would exit afterwards.
    assert_eventually("a closed port", async { while TcpStream::connect(connect).await.is_ok() {} }).await;
    tokio::time::sleep(Duration::from_millis(500)).await;
    edge.send_plain("tcp-forward", &topic, "still here").await;
    edge.send_plain("closed", &topic, "EOF").await;
    assert_eq!(rest(&mut client).await, b"still here");
    drop(client);
    assert_eq!(assert_eventually("the end of the server", stopped).await.unwrap(), Drained::Finished);
}

#[tokio::test]
async fn an_edge_reconnects_soon_after_a_slow_restart_of_its_only_server() {
    let (place, echo) = (TestDir::new(), targets::echo().await);
    let at_server = servers::addresses(1)[0];
    let text =
        format!("{}[server.session]\ndrain_timeout = \"5s\"\n", servers::config(&place, at_server, ""));
    let server = TestServer::from_text(&text);
    let edge = start_edge(&place.edge("node1", at_server, ""));
    server.wait_for_node("node1").await;
    let mut client = server.open(&at("node1", echo)).await;
    assert_echo(&mut client, "before").await;
    // The session stays until the deadline. Meanwhile the edge is refused repeatedly.
    assert_eq!(server.server.shutdown(pending()).await, Drained::Aborted(1));
    assert!(edge.metrics.link_reconnects.get() > 3);
    let started = Stopwatch::start();
    let server = TestServer::from_text(&text);
    server.wait_for_node("node1").await;
    assert!(started.elapsed() < Duration::from_secs(1), "{:?}", started.elapsed());
}
