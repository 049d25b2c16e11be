//! Two machines with one name, at one pod and at two: the one whose link is older keeps it, and everybody is told.

use std::time::Duration;

use tokio::time::Instant;
use tonic::Code as Grpc;
use tunnel::edge::Edge;
use tunnel_base::names::Instance;
use tunnel_net::tls::Identity;
use tunnel_proto::codec::proto::StreamMsg;
use tunnel_proto::codec::{from_message, to_message};
use tunnel_proto::frame::{Conflict, Found, Frame, FrameKind, Remote};
use tunnel_proto::hello::Caller;

use crate::support::call::Call;
use crate::support::clients::{echoed, get};
use crate::support::programs::{TestDir, TestServer, at, edge, start_edge};
use crate::support::{Stopwatch, assert_eventually, beside, hurry, remote, servers, targets, wait_until};

/// Waits until an edge's page of readiness has that status, and says that.
async fn says(edge: &Edge, status: u16, text: &str) {
    let mut last = String::new();
    let ask = async {
        loop {
            let page = get(edge.bound.log.unwrap(), "/readyz").await;
            last = page.body;
            if page.status == status && last.contains(text) {
                break;
            }
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    };
    let found = tokio::time::timeout(crate::support::TIMEOUT, ask).await;
    assert!(found.is_ok(), "want {status} and {text:?}, is {last:?}");
}

fn conflicts(server: &TestServer) -> u64 {
    server.server.metrics.name_conflicts.get()
}

fn instance(number: u128) -> Option<Instance> {
    Some(Instance::from_bits(number))
}

#[tokio::test]
async fn of_two_machines_with_one_name_at_two_servers_the_older_link_stays_and_all_four_say_so() {
    let (place, echo) = (TestDir::new(), targets::echo().await);
    let servers = servers::start(&place, 2);
    let older = edge(&place, &servers[0], "node1").await;
    let keeps = servers[0].has("node1").await;
    let started = Stopwatch::start();
    let younger = start_edge(&place.edge("node1", servers[1].server.bound.grpc, ""));
    says(&younger, 503, &format!("node node1 is linked from {} by another process", keeps.from)).await;
    says(&older, 200, "name: another process tried to link as node node1 at peer ").await;
    wait_until("both pods count it", || conflicts(&servers[0]) > 0 && conflicts(&servers[1]) > 0).await;
    assert!(started.elapsed() < Duration::from_secs(5), "{:?}", started.elapsed());
    wait_until("the younger link is gone", || servers[1].link("node1").is_none()).await;
    assert_eq!(servers[0].link("node1").unwrap().sender.id, keeps.sender.id);
    for server in &servers {
        echoed(&mut server.open(&at("node1", echo)).await, "the older one's").await;
    }
    assert_eq!(conflicts(&servers[1]), 1, "the younger one waits");
    says(&younger, 503, "another process").await;
}

#[tokio::test]
async fn at_one_server_both_edges_are_told_too() {
    let place = TestDir::new();
    let server = TestServer::start(&place);
    let older = edge(&place, &server, "node1").await;
    let younger = start_edge(&place.edge("node1", server.server.bound.grpc, ""));
    says(&younger, 503, "by another process that is alive").await;
    says(&older, 200, "name: another process tried to link as node node1 from 127.0.0.1:").await;
    assert_eq!(conflicts(&server), 1);
}

#[tokio::test]
async fn an_older_link_that_does_not_answer_gives_way_at_another_server_too() {
    let place = TestDir::new();
    let servers = servers::start(&place, 2);
    let mut frozen = remote::link(&place, &servers[0], "node1", instance(1)).await;
    hurry();
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
    let was_asked = first.next().await.unwrap();
    assert_eq!(was_asked.r#type, "heartbeat", "the other pod has told of it");
    first.send(StreamMsg { r#type: "pong".into(), ..was_asked }).await;
    let (first, second) =
        (beside(async move { first.ends().await }), beside(async move { second.ends().await }));
    let mut other = scripted(&place, &servers[0], 7, false).await;
    tells(&mut other, found(1, Some(Duration::from_secs(100)))).await;
    tokio::time::sleep(Duration::from_millis(200)).await;
    assert_eq!((conflicts(&servers[0]), conflicts(&servers[1])), (0, 0));
    assert!(!first.is_finished() && !second.is_finished());
}

/// Another pod that is the test, linked to that one: of version 1, if it is old.
async fn scripted(place: &TestDir, server: &TestServer, number: u128, old: bool) -> Call {
    let shows = Identity { cert: place.files.cert.clone(), key: place.files.key.clone() };
    let headers = Caller::peer_request(Instance::from_bits(number));
    let headers = if old { remote::old(headers) } else { headers };
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

/// Says it of the node, and waits until the pod has heard it: the answer to a question comes after.
async fn tells(call: &mut Call, body: FrameKind) {
    for body in [body, FrameKind::Find(5)] {
        call.send(to_message(Frame { node: call.node.clone(), body })).await;
    }
    while !matches!(hears(call).await, FrameKind::Found(Found { question: 5, .. })) {}
}

/// What the pod says next, of anything.
async fn hears(call: &mut Call) -> FrameKind {
    let message = assert_eventually("a word", call.next()).await.expect("the stream goes on");
    from_message(message, &Remote::Peer).unwrap().body
}

/// The pod says that its own node keeps the name.
async fn is_told_of_a_conflict(call: &mut Call, keeps: u128) {
    loop {
        if let FrameKind::Conflict(Conflict { instance, reason }) = hears(call).await {
            assert_eq!(instance, Some(Instance::from_bits(keeps)));
            return assert!(reason.contains("node node1 is linked from 127.0.0.1:"), "{reason}");
        }
    }
}

/// An edge that answers its pings, until its link ends: then, with which status.
async fn living(
    place: &TestDir,
    server: &TestServer,
    number: u128,
) -> tokio::task::JoinHandle<Option<tonic::Status>> {
    let mut call = remote::link(place, server, "node1", instance(number)).await;
    beside(async move { call.status().await })
}

#[tokio::test]
async fn ages_decide_as_each_server_has_measured_them() {
    let place = TestDir::new();
    let all = servers::addresses(2);
    // Alone in its list: the other pod is the test, which links to it.
    let server = TestServer::from_text(&servers::config(&place, all[0], &servers::peers(&all[..1])));
    let link = living(&place, &server, 2).await;
    let mut other = scripted(&place, &server, 7, false).await;
    // The other one's is younger: this one keeps the name.
    tells(&mut other, found(3, Some(Duration::from_millis(1)))).await;
    is_told_of_a_conflict(&mut other, 2).await;
    assert_eq!(conflicts(&server), 1);
    // The other one's is older: it is for the other pod to say that it lives.
    tells(&mut other, found(4, Some(Duration::from_secs(100)))).await;
    assert!(server.link("node1").is_some() && conflicts(&server) == 1);
    tells(&mut other, conflict(4)).await;
    let status = assert_eventually("the end of the link", link).await.unwrap().unwrap();
    assert_eq!((status.code(), status.message()), (Grpc::AlreadyExists, "the other one is alive"));
    assert_eq!(conflicts(&server), 2);
}

#[tokio::test]
async fn of_two_servers_that_both_hold_theirs_for_the_older_one_gives_way() {
    let place = TestDir::new();
    let all = servers::addresses(2);
    let server = TestServer::from_text(&servers::config(&place, all[0], &servers::peers(&all[..1])));
    let link = living(&place, &server, 5).await;
    let mut other = scripted(&place, &server, 7, false).await;
    for (theirs, stays) in [(9, true), (3, false)] {
        tells(&mut other, found(theirs, Some(Duration::from_millis(1)))).await;
        is_told_of_a_conflict(&mut other, 5).await;
        tells(&mut other, conflict(theirs)).await;
        assert_eq!(server.link("node1").is_some_and(|link| !link.sender.is_closed()), stays, "{theirs}");
    }
    assert_eq!(
        assert_eventually("the end of the link", link).await.unwrap().unwrap().code(),
        Grpc::AlreadyExists
    );
}

#[tokio::test]
async fn with_a_server_of_version_1_both_links_stay_and_this_side_says_so() {
    let place = TestDir::new();
    let all = servers::addresses(2);
    let server = TestServer::from_text(&servers::config(&place, all[0], &servers::peers(&all[..1])));
    let link = living(&place, &server, 5).await;
    let mut other = scripted(&place, &server, 7, true).await;
    tells(&mut other, found(3, None)).await;
    wait_until("it is counted", || conflicts(&server) == 1).await;
    tells(&mut other, found(3, None)).await;
    let more = tokio::time::timeout(Duration::from_millis(200), hears(&mut other)).await;
    assert!(more.is_err(), "it would not understand {more:?}");
    assert!(!link.is_finished());
}
