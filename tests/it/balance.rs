//! A server that starts late gets its share of the edges, and no session is disturbed.

use std::time::Duration;

use futures_util::FutureExt as _;
use tunnel::edge::Edge;
use tunnel_proto::codec::extended::to_message;
use tunnel_proto::frame::{Frame, FrameKind};
use tunnel_proto::names::Instance;

use crate::support::clients::{assert_echo, rest};
use crate::support::line::Balancer;
use crate::support::programs::{TestDir, TestServer, at, start_edge};
use crate::support::servers;
use crate::support::{pause_time, remote, targets, wait_until, wait_within};

use tokio::io::AsyncWriteExt;

/// Starts one of several servers, by its index in the list.
fn start(place: &TestDir, all: &[std::net::SocketAddr], n: usize) -> TestServer {
    TestServer::from_text(&servers::config(place, all[n], &servers::peers(all)))
}

fn nodes(server: &TestServer) -> usize {
    server.server.registry.nodes().len()
}

#[tokio::test]
async fn a_third_server_gets_its_share_of_edges_and_no_session_is_aborted() {
    let (place, echo) = (TestDir::new(), targets::echo().await);
    let all = servers::addresses(3);
    let mut servers = vec![start(&place, &all, 0), start(&place, &all, 1)];
    let balancer = Balancer::to(&all[..2]).await;
    let edges: Vec<Edge> =
        (0..EDGES).map(|n| start_edge(&place.edge(&format!("edge{n}"), balancer.at, ""))).collect();
    wait_until("all are linked", || nodes(&servers[0]) + nodes(&servers[1]) == EDGES).await;
    let mut clients = Vec::new();
    for n in 0..EDGES {
        clients.push(servers[n % 2].open(&at(&format!("edge{n}"), echo)).await);
    }
    pause_time();
    tokio::time::sleep(Duration::from_secs(120)).await;
    let moved = |servers: &[TestServer]| {
        servers.iter().map(|server| server.server.metrics.edges_rebalanced.get()).sum::<u64>()
    };
    assert_eq!(moved(&servers), 0, "the two servers that are up have as many each");
    servers.push(start(&place, &all, 2));
    balancer.add(all[2]);
    wait_within(Duration::from_secs(3600), "the new server has its share", || {
        nodes(&servers[2]) >= EDGES / 3 - 1
    })
    .await;
    for client in &mut clients {
        assert_echo(client, "on any path").await;
    }
    for mut client in clients {
        client.shutdown().await.unwrap();
        assert_eq!(rest(&mut client).await, b"");
    }
    for edge in &edges {
        wait_within(Duration::from_secs(600), "old links are closed", || edge.metrics.links.all() == 1).await;
        assert_eq!(edge.metrics.resets.counted("cancelled") + edge.metrics.resets.counted("overloaded"), 0);
    }
    let moves = moved(&servers);
    tokio::time::sleep(Duration::from_secs(300)).await;
    assert!(moved(&servers) <= moves + 3, "rebalancing stops: {moves}, then {}", moved(&servers));
    assert_eq!(servers.iter().map(nodes).sum::<usize>(), EDGES, "each node is at one server");
}

#[tokio::test]
async fn an_edge_moves_on_request_only_to_an_address_of_its_list_and_stays_if_it_reaches_no_other_server() {
    let place = TestDir::new();
    let mut server = remote::ScriptedServer::start(&place).await;
    let other = remote::ScriptedServer::start(&place).await;
    let edge = start_edge(&place.edge("node1", server.at, ""));
    let here = Instance::random();
    let body = FrameKind::Drain(Some(other.at));
    let mut call = server.call().await;
    call.answer(Some(here));
    call.send(to_message(Frame { node: "node1".parse().unwrap(), body: body.clone() })).await;
    // The address may be that of a load balancer, so the edge dials it again, once.
    let mut again = server.call().await;
    again.answer(Some(here));
    again.wait_for_end().await;
    pause_time();
    tokio::time::sleep(Duration::from_secs(1)).await;
    assert!(server.no_call());
    // While time jumps, a handshake seems to take too long, and the edge makes a second connection.
    tokio::time::resume();
    // The first link is still served.
    call.send(to_message(Frame { node: "node1".parse().unwrap(), body })).await;
    let mut elsewhere = server.call().await;
    elsewhere.answer(Some(Instance::random()));
    wait_until("the edge has moved", || edge.metrics.link_reconnects.get() == 1).await;
    assert_eq!((server.connections(), other.connections()), (3, 0));
}

#[tokio::test]
async fn an_edge_moves_to_the_requested_address_whatever_its_place_in_the_list() {
    let place = TestDir::new();
    let [mut first, second, mut third] = [
        remote::ScriptedServer::start(&place).await,
        remote::ScriptedServer::start(&place).await,
        remote::ScriptedServer::start(&place).await,
    ];
    let servers = format!("{}\", \"{}\", \"{}", first.at, second.at, third.at);
    let edge = start_edge(&place.edge("node1", servers, ""));
    let mut call = first.call().await;
    call.answer(Some(Instance::random()));
    let body = FrameKind::Drain(Some(third.at));
    call.send(to_message(Frame { node: "node1".parse().unwrap(), body })).await;
    let mut requested = third.call().await;
    requested.answer(Some(Instance::random()));
    wait_until("the edge has moved", || edge.metrics.link_reconnects.get() == 1).await;
    assert_eq!((first.connections(), second.connections()), (1, 0));
}

#[tokio::test]
async fn an_edge_that_stops_does_not_move() {
    let (place, echo) = (TestDir::new(), targets::echo().await);
    let server = TestServer::start(&place);
    let other = remote::ScriptedServer::start(&place).await;
    let servers = format!("{}\", \"{}", server.server.bound.grpc, other.at);
    let edge = start_edge(&place.edge("node1", servers, ""));
    let node = "node1".parse().unwrap();
    wait_until("the edge is linked", || server.server.registry.link_of(&node).is_some()).await;
    let mut client = server.open(&at("node1", echo)).await;
    let mut stopping = Box::pin(edge.shutdown(std::future::pending()));
    assert!((&mut stopping).now_or_never().is_none());
    server.server.registry.link_of(&node).unwrap().link.request_move(other.at);
    for _ in 0..3 {
        assert_echo(&mut client, "after the request").await;
    }
    client.shutdown().await.unwrap();
    stopping.await;
    assert_eq!(other.connections(), 0);
}

/// Number of edges in the test.
const EDGES: usize = 12;
