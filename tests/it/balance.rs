//! A pod that comes late gets its share of the edges, and no session notices.

use std::time::Duration;

use tunnel::base::names::Instance;
use tunnel::edge::Edge;
use tunnel::proto::codec::to_message;
use tunnel::proto::frame::{Frame, FrameKind};

use crate::support::clients::{echoed, rest};
use crate::support::line::Balancer;
use crate::support::pods;
use crate::support::programs::{TestDir, TestServer, at, start_edge};
use crate::support::{hurry, peer, targets, wait_until, wait_within};

use tokio::io::AsyncWriteExt;

/// A pod of several, from its place in the list.
fn start(place: &TestDir, all: &[std::net::SocketAddr], n: usize) -> TestServer {
    TestServer::from_text(&pods::config(place, all[n], &pods::siblings(all)))
}

fn nodes(pod: &TestServer) -> usize {
    pod.pod.registry.nodes().len()
}

#[tokio::test]
async fn a_third_pod_that_comes_late_gets_its_share_and_no_session_is_cut() {
    let (place, echo) = (TestDir::new(), targets::echo().await);
    let all = pods::addresses(3);
    let mut pods = vec![start(&place, &all, 0), start(&place, &all, 1)];
    let balancer = Balancer::to(&all[..2]).await;
    let edges: Vec<Edge> =
        (0..EDGES).map(|n| start_edge(&place.edge(&format!("edge{n}"), balancer.at, ""))).collect();
    wait_until("all are linked", || nodes(&pods[0]) + nodes(&pods[1]) == EDGES).await;
    let mut clients = Vec::new();
    for n in 0..EDGES {
        clients.push(pods[n % 2].open(&at(&format!("edge{n}"), echo)).await);
    }
    hurry();
    tokio::time::sleep(Duration::from_secs(120)).await;
    let moved = |pods: &[TestServer]| pods.iter().map(|pod| pod.pod.metrics.moved.get()).sum::<u64>();
    assert_eq!(moved(&pods), 0, "one of the three is not known");
    pods.push(start(&place, &all, 2));
    balancer.add(all[2]);
    wait_within(Duration::from_secs(3600), "the new pod has its share", || nodes(&pods[2]) >= EDGES / 3 - 1)
        .await;
    for client in &mut clients {
        echoed(client, "on whichever path").await;
    }
    for mut client in clients {
        client.shutdown().await.unwrap();
        assert_eq!(rest(&mut client).await, b"");
    }
    for edge in &edges {
        wait_within(Duration::from_secs(600), "old links are gone", || edge.metrics.links.get() == 1).await;
        assert_eq!(edge.metrics.resets.counted("given_up") + edge.metrics.resets.counted("busy"), 0);
    }
    let asked = moved(&pods);
    tokio::time::sleep(Duration::from_secs(300)).await;
    assert!(moved(&pods) <= asked + 3, "it comes to rest: {asked}, then {}", moved(&pods));
    assert_eq!(pods.iter().map(nodes).sum::<usize>(), EDGES, "each node is at one pod");
}

#[tokio::test]
async fn an_edge_that_is_told_where_to_link_does_so_only_if_its_cloud_has_that_address() {
    let place = TestDir::new();
    let mut pod = peer::ScriptedServer::start(&place).await;
    let other = peer::ScriptedServer::start(&place).await;
    let _edge = start_edge(&place.edge("node1", pod.at, ""));
    let mut call = pod.call().await;
    call.answer(Some(Instance::random()));
    let body = FrameKind::Drain(Some(other.at));
    call.send(to_message(Frame { node: "node1".parse().unwrap(), body })).await;
    let mut again = pod.call().await;
    again.answer(Some(Instance::random()));
    assert_eq!(other.connections(), 0, "a stranger's address counts for nothing");
}

/// Edges of the test.
const EDGES: usize = 12;
