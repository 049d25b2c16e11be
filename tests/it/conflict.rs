//! Two machines with one name, at one server and at two: the older link keeps the name, and every party reports the
//! conflict.

use std::time::Duration;

use tokio::time::Instant;
use tonic::Code as Grpc;
use tunnel::edge::Edge;
use tunnel_net::tls::IdentityFiles;
use tunnel_proto::codec::extended::{from_message, to_message};
use tunnel_proto::codec::proto::StreamMsg;
use tunnel_proto::frame::{Conflict, Found, Frame, FrameKind, Remote};
use tunnel_proto::hello::LinkCaller;
use tunnel_proto::names::Instance;

use crate::support::call::Call;
use crate::support::clients::{assert_echo, get};
use crate::support::programs::{TestDir, TestServer, at, edge, start_edge};
use crate::support::{Stopwatch, assert_eventually, pause_time, remote, servers, spawn, targets, wait_until};

/// Waits until the edge's readiness page has this status and contains this text.
async fn assert_readiness(edge: &Edge, status: u16, text: &str) {
    let mut last = String::new();
    let polling = async {
        loop {
            let page = get(edge.bound.log.unwrap(), "/readyz").await;
            last = page.body;
            if page.status == status && last.contains(text) {
                break;
            }
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    };
    let found = tokio::time::timeout(crate::support::TIMEOUT, polling).await;
    assert!(found.is_ok(), "expected {status} and {text:?}, got {last:?}");
}

fn conflicts(server: &TestServer) -> u64 {
    server.server.metrics.node_name_conflicts.get()
}

fn instance(number: u128) -> Option<Instance> {
    Some(Instance::from_bits(number))
}

#[tokio::test]
async fn a_second_process_with_the_same_name_at_another_server_is_refused_and_reported() {
    let (place, echo) = (TestDir::new(), targets::echo().await);
    let servers = servers::start(&place, 2);
    let older = edge(&place, &servers[0], "node1").await;
    let keeps = servers[0].wait_for_node("node1").await;
    let started = Stopwatch::start();
    let younger = start_edge(&place.edge("node1", servers[1].server.bound.grpc, ""));
    assert_readiness(&younger, 503, &format!("node node1 is linked from {} by another process", keeps.from))
        .await;
    assert_readiness(&older, 200, "node_name: another process tried to link as node node1 at peer ").await;
    wait_until("both count it", || conflicts(&servers[0]) > 0 && conflicts(&servers[1]) > 0).await;
    assert!(started.elapsed() < Duration::from_secs(5), "{:?}", started.elapsed());
    wait_until("the younger link is closed", || servers[1].link("node1").is_none()).await;
    assert_eq!(servers[0].link("node1").unwrap().link.id, keeps.link.id);
    for server in &servers {
        assert_echo(&mut server.open(&at("node1", echo)).await, "at the older edge").await;
    }
    assert_eq!(conflicts(&servers[1]), 1, "the younger edge waits");
    assert_readiness(&younger, 503, "another process").await;
}

#[tokio::test]
async fn at_one_server_both_edges_report_the_conflict() {
    let place = TestDir::new();
    let server = TestServer::start(&place);
    let older = edge(&place, &server, "node1").await;
    let younger = start_edge(&place.edge("node1", server.server.bound.grpc, ""));
    assert_readiness(&younger, 503, "by another process that is alive").await;
    assert_readiness(&older, 200, "node_name: another process tried to link as node node1 from 127.0.0.1:")
        .await;
    assert_eq!(conflicts(&server), 1);
    let refused = server.server.metrics.refusals.last_hour();
    assert_eq!(refused.get("name_in_use"), Some(&1), "the live page counts it: {refused:?}");
}

#[tokio::test]
async fn an_unresponsive_older_link_at_another_server_is_evicted() {
    let place = TestDir::new();
    let servers = servers::start(&place, 2);
    let mut frozen = remote::link(&place, &servers[0], "node1", instance(1)).await;
    pause_time();
    let started = Instant::now();
    let _alive = remote::link(&place, &servers[1], "node1", instance(2)).await;
    while frozen.next().await.is_some() {}
    assert!(started.elapsed() < Duration::from_secs(5), "{:?}", started.elapsed());
    assert!(servers[1].link("node1").is_some());
    assert_eq!((conflicts(&servers[0]), conflicts(&servers[1])), (0, 0));
}

#[tokio::test]
async fn the_same_process_at_two_servers_is_no_conflict() {
    let place = TestDir::new();
    let servers = servers::start(&place, 2);
    let mut first = remote::link(&place, &servers[0], "node1", instance(1)).await;
    let mut second = remote::link(&place, &servers[1], "node1", instance(1)).await;
    let ping = first.next().await.unwrap();
    assert_eq!(ping.r#type, "heartbeat", "the peer has announced the node");
    first.send(StreamMsg { r#type: "pong".into(), ..ping }).await;
    let (first, second) =
        (spawn(async move { first.wait_for_end().await }), spawn(async move { second.wait_for_end().await }));
    let mut other = scripted(&place, &servers[0], 7).await;
    send_frame(&mut other, found(1, Some(Duration::from_secs(100)))).await;
    tokio::time::sleep(Duration::from_millis(200)).await;
    assert_eq!((conflicts(&servers[0]), conflicts(&servers[1])), (0, 0));
    assert!(!first.is_finished() && !second.is_finished());
}

/// Links to the server as a peer that the test plays.
async fn scripted(place: &TestDir, server: &TestServer, number: u128) -> Call {
    let shows = IdentityFiles { cert: place.files.cert.clone(), key: place.files.key.clone() };
    let headers = LinkCaller::peer_request(Instance::from_bits(number));
    remote::link_as_peer(place, server.server.bound.grpc, Some(shows), headers, "node1").await.unwrap()
}

fn found(instance: u128, age: Option<Duration>) -> FrameKind {
    let instance = Some(Instance::from_bits(instance));
    FrameKind::Found(Found { here: true, instance, age, ..Found::not_here(0) })
}

fn conflict(instance: u128) -> FrameKind {
    let instance = Some(Instance::from_bits(instance));
    FrameKind::Conflict(Conflict { instance, reason: "the other one is alive".into() })
}

/// Sends this about the node, and waits until the server has processed it: it answers the question that follows.
async fn send_frame(call: &mut Call, body: FrameKind) {
    for body in [body, FrameKind::Find(5)] {
        call.send(to_message(Frame { node: call.node.clone(), body })).await;
    }
    while !matches!(next_frame(call).await, FrameKind::Found(Found { question: 5, .. })) {}
}

/// Returns the server's next frame of any kind.
async fn next_frame(call: &mut Call) -> FrameKind {
    let message = assert_eventually("a frame", call.next()).await.expect("the stream continues");
    from_message(message, &Remote::Peer).unwrap().body
}

/// Waits until the server announces that its own node keeps the name.
async fn assert_conflict_received(call: &mut Call, keeps: u128) {
    loop {
        if let FrameKind::Conflict(Conflict { instance, reason }) = next_frame(call).await {
            assert_eq!(instance, Some(Instance::from_bits(keeps)));
            return assert!(reason.contains("node node1 is linked from 127.0.0.1:"), "{reason}");
        }
    }
}

/// Starts an edge that answers pings until its link ends, and returns the final status.
async fn linked_node(
    place: &TestDir,
    server: &TestServer,
    number: u128,
) -> tokio::task::JoinHandle<Option<tonic::Status>> {
    let mut call = remote::link(place, server, "node1", instance(number)).await;
    spawn(async move { call.status().await })
}

#[tokio::test]
async fn link_ages_decide_as_each_server_has_measured_them() {
    let place = TestDir::new();
    let all = servers::addresses(2);
    // Alone in its list: the peer is the test, which links to it.
    let server = TestServer::from_text(&servers::config(&place, all[0], &servers::peers(&all[..1])));
    let link = linked_node(&place, &server, 2).await;
    let mut other = scripted(&place, &server, 7).await;
    // Without an age, nothing is compared.
    send_frame(&mut other, found(3, None)).await;
    // The peer's link is younger: this server keeps the name.
    send_frame(&mut other, found(3, Some(Duration::from_millis(1)))).await;
    assert_conflict_received(&mut other, 2).await;
    assert_eq!(conflicts(&server), 1);
    // The peer's link is older: the peer must report that it is alive.
    send_frame(&mut other, found(4, Some(Duration::from_secs(100)))).await;
    assert!(server.link("node1").is_some() && conflicts(&server) == 1);
    send_frame(&mut other, conflict(4)).await;
    let status = assert_eventually("the end of the link", link).await.unwrap().unwrap();
    assert_eq!((status.code(), status.message()), (Grpc::AlreadyExists, "the other one is alive"));
    assert_eq!(conflicts(&server), 2);
}

#[tokio::test]
async fn if_both_servers_claim_the_older_link_one_is_evicted() {
    let place = TestDir::new();
    let all = servers::addresses(2);
    let server = TestServer::from_text(&servers::config(&place, all[0], &servers::peers(&all[..1])));
    let link = linked_node(&place, &server, 5).await;
    let mut other = scripted(&place, &server, 7).await;
    for (theirs, stays) in [(9, true), (3, false)] {
        send_frame(&mut other, found(theirs, Some(Duration::from_millis(1)))).await;
        assert_conflict_received(&mut other, 5).await;
        send_frame(&mut other, conflict(theirs)).await;
        assert_eq!(server.link("node1").is_some_and(|linked| !linked.link.is_closed()), stays, "{theirs}");
    }
    assert_eq!(
        assert_eventually("the end of the link", link).await.unwrap().unwrap().code(),
        Grpc::AlreadyExists
    );
}
