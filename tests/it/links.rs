//! Who may link, and whose link it is when several come.

use std::time::Duration;

use tokio::time::{Instant, sleep, timeout};
use tonic::Code as Grpc;
use tunnel::base::names::Instance;
use tunnel::edge::Edge;
use tunnel::proto::codec::from_message;
use tunnel::proto::frame::{FrameKind, Remote};
use tunnel::proto::hello::{Hello, Older};

use crate::certificates::Authority;
use crate::support::clients::{echoed, get, open};
use crate::support::line::Line;
use crate::support::programs::{NAME, TOKEN, TestDir, TestServer, at, edge, start_edge};
use crate::support::raw::{PING, Raw};
use crate::support::{beside, hurry, peer, soon, targets, wait_until, wait_within};

/// What an edge that is not ready says of it.
async fn not_ready(edge: &Edge, because: &str) {
    let log = edge.bound.log.unwrap();
    let mut last = String::new();
    let ask = async {
        loop {
            let page = get(log, "/readyz").await;
            assert_eq!(page.status, 503, "{page:?}");
            last = page.body;
            if last.contains(because) {
                break;
            }
            sleep(BETWEEN).await;
        }
    };
    let found = tokio::time::timeout(crate::support::PATIENCE, ask).await;
    assert!(found.is_ok(), "want {because:?}, is {last:?}");
    assert_eq!(get(log, "/edge/healthz").await.status, 500);
}

async fn is_ready(edge: &Edge) {
    let ask = async {
        while get(edge.bound.log.unwrap(), "/readyz").await.status != 200 {
            sleep(BETWEEN).await;
        }
    };
    soon("readiness", ask).await;
}

/// Between two looks at a page.
const BETWEEN: Duration = Duration::from_millis(20);

#[tokio::test]
async fn an_edge_with_a_wrong_token_is_refused_and_says_why() {
    let place = TestDir::new();
    let pod = TestServer::start(&place);
    let edge = start_edge(&place.edge("node1", pod.pod.bound.grpc, "").replace(TOKEN, "wrong"));
    not_ready(
        &edge,
        "link: the cloud refused: invalid token (Unauthenticated): compare token or token_file here",
    )
    .await;
    assert!(pod.pod.registry.nodes().is_empty());
    assert!(pod.pod.metrics.calls_refused.counted("token") > 0);
}

#[tokio::test]
async fn an_edge_that_was_refused_does_not_hurry_back() {
    let place = TestDir::new();
    let pod = TestServer::start(&place);
    let refused = || pod.pod.metrics.calls_refused.counted("token");
    let _edge = start_edge(&place.edge("node1", pod.pod.bound.grpc, "").replace(TOKEN, "wrong"));
    wait_until("it was refused", || refused() > 0).await;
    tokio::time::pause();
    let begun = Instant::now();
    wait_within(Duration::from_secs(600), "it was refused twice more", || refused() > 2).await;
    assert!(begun.elapsed() > Duration::from_millis(1300), "{:?}", begun.elapsed());
}

#[tokio::test]
async fn an_edge_believes_only_its_own_authority() {
    let (place, other) = (TestDir::new(), tempfile::tempdir().unwrap());
    let pod = TestServer::start(&place);
    let strange = Authority::new().write(other.path(), &[NAME]).ca;
    let text = place.edge("node1", pod.pod.bound.grpc, "");
    let edge = start_edge(&text.replace(place.files.ca.to_str().unwrap(), strange.to_str().unwrap()));
    not_ready(&edge, "TLS with the cloud as \"cloud.test\" failed").await;
    not_ready(&edge, "by an authority that is not believed; mode.edge.stream.client.cert has to hold").await;
    assert!(pod.pod.registry.nodes().is_empty());
}

#[tokio::test]
async fn an_edge_that_dials_another_port_of_the_pod_is_asked_whether_it_is_that() {
    let place = TestDir::new();
    let pod = TestServer::start(&place);
    let edge = start_edge(&place.edge("node1", pod.connect, ""));
    not_ready(&edge, "it does not speak TLS; that port speaks no TLS: is it the CONNECT port?").await;
    let files = [&place.files.cert, &place.files.key];
    let egress = format!(
        "[mode.cloud.egress]\nlisten = \"127.0.0.1:0\"\ncert = {:?}\nkey = {:?}\n",
        files[0], files[1]
    );
    let pod = TestServer::with(&place, &egress);
    let edge = start_edge(&place.edge("node1", pod.port("egress"), ""));
    not_ready(&edge, "that port takes no links: is it the one for egress or HTTPS?").await;
}

#[tokio::test]
async fn an_edge_wants_the_name_that_it_was_told() {
    let place = TestDir::new();
    let pod = TestServer::start(&place);
    let edge = start_edge(&place.edge("node1", pod.pod.bound.grpc, "").replace(NAME, "other.test"));
    not_ready(&edge, "TLS with the cloud as \"other.test\" failed").await;
    not_ready(&edge, "its certificate is for cloud.test, 127.0.0.1, and not for that name; set mode.edge.stream.client.dns")
        .await;
    assert!(pod.pod.registry.nodes().is_empty());
}

#[tokio::test]
async fn a_changed_token_file_counts_for_who_comes_next() {
    let place = TestDir::new();
    place.file("token", "default:another");
    let pod = TestServer::start(&place);
    hurry();
    let edge = start_edge(&place.edge("node1", pod.pod.bound.grpc, ""));
    not_ready(&edge, "invalid token").await;
    place.file("token", &format!("default:{TOKEN}"));
    wait_within(4 * crate::support::PATIENCE, "the edge is let in", || pod.link("node1").is_some()).await;
    place.file("token", "default:another");
    wait_refused(&place, &pod).await;
    std::fs::remove_file(place.path().join("token")).unwrap();
    wait_refused(&place, &pod).await;
}

async fn wait_refused(place: &TestDir, pod: &TestServer) {
    let refused = async {
        loop {
            match peer::try_link(place, pod.pod.bound.grpc, "node2", Some(Instance::random())).await {
                Err(status) => break assert_eq!(status.code(), Grpc::Unauthenticated),
                Ok(_) => sleep(BETWEEN).await,
            }
        }
    };
    soon("a refusal", refused).await;
}

#[tokio::test]
async fn a_node_with_a_line_of_its_own_cannot_use_the_default_token() {
    let place = TestDir::new();
    place.file("token", &format!("default:{TOKEN}\nnode1:its own"));
    let pod = TestServer::start(&place);
    let refused = peer::try_link(&place, pod.pod.bound.grpc, "node1", None).await.err().unwrap();
    assert_eq!((refused.code(), refused.message()), (Grpc::Unauthenticated, "invalid token"));
    peer::link(&place, &pod, "node2", None).await;
    let own = place.edge("node1", pod.pod.bound.grpc, "").replace(TOKEN, "itsown");
    let _edge = start_edge(&own);
    pod.has("node1").await;
}

#[tokio::test]
async fn a_link_that_is_marked_stands_beside_the_one_before_until_the_edge_ends_one() {
    let place = TestDir::new();
    let pod = TestServer::start(&place);
    let instance = Instance::random();
    let beside = || {
        let mut said = Hello::edge_request(&"node1".parse().unwrap(), TOKEN, instance);
        Hello::beside(&mut said, Older::Silent);
        said
    };
    let current = || pod.link("node1").unwrap().sender;
    let link = async || {
        let before = pod.link("node1").map(|linked| linked.sender.id);
        let call = peer::link_as_pod(&place, pod.pod.bound.grpc, None, beside(), "node1").await.unwrap();
        wait_until("the new link is the node's", || pod.link("node1").map(|l| l.sender.id) != before).await;
        call
    };
    let mut first = peer::link(&place, &pod, "node1", Some(instance)).await;
    let oldest = current();
    let second = link().await;
    assert!(!oldest.is_closed(), "both stand");
    drop(second);
    wait_until("the older one has its place again", || current().id == oldest.id).await;
    let _third = link().await;
    let middle = current();
    let mut fourth = link().await;
    first.ends().await;
    assert!(!middle.is_closed() && current().id != middle.id, "of three the oldest goes");
    let _last = peer::try_link(&place, pod.pod.bound.grpc, "node1", Some(instance)).await.unwrap();
    fourth.ends().await;
    wait_until("without the mark the newest stands alone", || middle.is_closed()).await;
    assert_eq!(pod.pod.registry.nodes().len(), 1);
}

#[tokio::test]
async fn a_second_link_of_one_process_replaces_the_first_at_once() {
    let (place, instance) = (TestDir::new(), Some(Instance::random()));
    let pod = TestServer::start(&place);
    let mut first = peer::link(&place, &pod, "node1", instance).await;
    let old = pod.has("node1").await;
    let _second = peer::try_link(&place, pod.pod.bound.grpc, "node1", instance).await.unwrap();
    first.ends().await;
    wait_until("the old one's end is over", || pod.pod.metrics.links.get() == 1).await;
    let new = pod.link("node1").expect("the old one's end leaves the new one alone");
    assert!(new.sender.id != old.sender.id && !new.sender.is_closed());
    assert_eq!(pod.pod.metrics.nodes.get(), 1);
}

#[tokio::test]
async fn of_two_machines_with_one_name_the_one_that_is_alive_stays() {
    let (place, echo) = (TestDir::new(), targets::echo().await);
    let pod = TestServer::start(&place);
    let edge = edge(&place, &pod, "node1").await;
    let old = pod.has("node1").await;
    let refused =
        peer::try_link(&place, pod.pod.bound.grpc, "node1", Some(Instance::random())).await.err().unwrap();
    assert_eq!(refused.code(), Grpc::AlreadyExists);
    assert!(refused.message().contains(&old.from.to_string()), "{refused:?}");
    assert_eq!(pod.link("node1").unwrap().sender.id, old.sender.id);
    echoed(&mut pod.open(&at("node1", echo)).await, "hello").await;

    let newcomer = start_edge(&place.edge("node1", pod.pod.bound.grpc, ""));
    not_ready(&newcomer, &format!("node node1 is linked from {}", old.from)).await;
    is_ready(&edge).await;
}

#[tokio::test]
async fn a_frozen_link_is_replaced_after_two_seconds() {
    let place = TestDir::new();
    let pod = TestServer::start(&place);
    let frozen = peer::link(&place, &pod, "node1", Some(Instance::random())).await;
    let old = pod.has("node1").await;
    hurry();
    let begun = Instant::now();
    let _new = peer::try_link(&place, pod.pod.bound.grpc, "node1", Some(Instance::random())).await.unwrap();
    assert_eq!(begun.elapsed().as_secs(), 2);
    wait_until("the new one is there", || pod.link("node1").is_some_and(|l| l.sender.id != old.sender.id))
        .await;
    assert!(old.sender.is_closed());
    drop(frozen);
}

#[tokio::test]
async fn a_plain_link_gives_way_at_once() {
    let place = TestDir::new();
    let pod = TestServer::start(&place);
    let mut plain = peer::link(&place, &pod, "node1", None).await;
    let old = pod.has("node1").await;
    hurry();
    let begun = Instant::now();
    let _new = peer::try_link(&place, pod.pod.bound.grpc, "node1", Some(Instance::random())).await.unwrap();
    wait_until("the old one is closed", || old.sender.is_closed()).await;
    assert!(begun.elapsed().as_secs() < 1);
    plain.ends().await;
    assert_ne!(pod.link("node1").unwrap().sender.id, old.sender.id);
}

#[tokio::test]
async fn a_silent_link_is_pinged_and_given_up() {
    let place = TestDir::new();
    let pod = TestServer::start(&place);
    hurry();
    let mut silent = peer::link(&place, &pod, "node1", Some(Instance::random())).await;
    let begun = Instant::now();
    let ping = silent.next().await.unwrap();
    let FrameKind::Ping(number) = from_message(ping, &Remote::Cloud(silent.node.clone())).unwrap().body
    else {
        panic!("a ping")
    };
    // The edge, which has dialled, would have asked after 6 s.
    assert!(number.is_some() && begun.elapsed().as_secs() == 7, "{:?}", begun.elapsed());
    while silent.next().await.is_some() {}
    assert_eq!(begun.elapsed().as_secs(), 15);
    wait_until("the node is gone", || pod.pod.registry.nodes().is_empty()).await;
    assert_eq!(pod.pod.metrics.links_ended.counted("silent"), 1);
}

/// An idle link of ours has pings of its own: a clock for HTTP/2's would wake its pod for nothing.
#[tokio::test]
async fn http_2_pings_only_a_peer_that_knows_no_other_pings() {
    let (place, nine) = (TestDir::new(), Duration::from_secs(9));
    let pod = TestServer::start(&place);
    hurry();
    for (node, instance, expected) in [("plain", None, true), ("ours", Some(Instance::random()), false)] {
        let mut idle = Raw::link(&place, &pod, node, instance).await;
        let pinged = async { while idle.next().await.unwrap().kind != PING {} };
        assert_eq!(timeout(nine + nine / 2, pinged).await.is_ok(), expected, "{node}");
    }
}

#[tokio::test]
async fn a_link_that_answers_its_pings_stays() {
    let place = TestDir::new();
    let pod = TestServer::start(&place);
    hurry();
    let mut idle = peer::link(&place, &pod, "node1", Some(Instance::random())).await;
    let link = pod.has("node1").await;
    let begun = Instant::now();
    beside(async move { idle.ends().await });
    wait_within(4 * crate::support::PATIENCE, "a minute is over", || begun.elapsed().as_secs() >= 16).await;
    assert_eq!(pod.link("node1").unwrap().sender.id, link.sender.id);
}

#[tokio::test]
async fn an_edge_whose_line_is_cut_is_back_at_once() {
    let (place, echo) = (TestDir::new(), targets::echo().await);
    let pod = TestServer::start(&place);
    let line = Line::to(pod.pod.bound.grpc).await;
    let edge = start_edge(&place.edge("node1", line.at, ""));
    let old = pod.has("node1").await;
    is_ready(&edge).await;
    line.reset();
    wait_until("there is a new link", || pod.link("node1").is_some_and(|l| l.sender.id != old.sender.id))
        .await;
    echoed(&mut open(pod.connect, &at("node1", echo)).await, "hello").await;
    is_ready(&edge).await;
}
