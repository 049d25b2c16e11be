//! Which edges may link, and which link wins if there are several.

use std::time::Duration;

use tokio::time::{Instant, sleep, timeout};
use tonic::Code as Grpc;
use tunnel::edge::Edge;
use tunnel_proto::codec::extended::from_message;
use tunnel_proto::frame::{FrameKind, Remote};
use tunnel_proto::hello::{EdgeHello, LinkPurpose};
use tunnel_proto::names::Instance;

use crate::certificates::Authority;
use crate::support::clients::{assert_echo, get, open};
use crate::support::line::Line;
use crate::support::programs::{NAME, TOKEN, TestDir, TestServer, at, edge, start_edge};
use crate::support::raw::{PING, RawHttp2};
use crate::support::{assert_eventually, pause_time, remote, spawn, targets, wait_until, wait_within};
use crate::words::LogLines;

/// Waits until the edge's readiness page is a 503 that contains `because`.
async fn wait_until_not_ready(edge: &Edge, because: &str) {
    let log = edge.bound.log.unwrap();
    let mut last = String::new();
    let polling = async {
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
    let found = tokio::time::timeout(crate::support::TIMEOUT, polling).await;
    assert!(found.is_ok(), "expected {because:?}, got {last:?}");
    assert_eq!(get(log, "/edge/healthz").await.status, 500);
}

async fn wait_until_ready(edge: &Edge) {
    let polling = async {
        while get(edge.bound.log.unwrap(), "/readyz").await.status != 200 {
            sleep(BETWEEN).await;
        }
    };
    assert_eventually("readiness", polling).await;
}

/// Pause between two requests of a page.
const BETWEEN: Duration = Duration::from_millis(20);

#[tokio::test]
async fn a_node_that_links_endlessly_is_refused_for_a_while_and_others_are_not() {
    let (lines, _guard) = LogLines::start();
    let place = TestDir::new();
    let server = TestServer::start(&place);
    let grpc = server.server.bound.grpc;
    let endless = async {
        let mut links = 0;
        loop {
            // A link of a plain edge is replaced at once by that of another process.
            match remote::try_link(&place, grpc, "node1", None).await {
                Ok(_) => links += 1,
                Err(refused) => break (links, refused),
            }
        }
    };
    let (links, refused) = assert_eventually("a refusal", endless).await;
    assert_eq!((links, refused.code()), (120, Grpc::ResourceExhausted));
    let why = "node node1 opened 120 links within a minute; another process may use its token";
    assert_eq!(refused.message(), why);
    assert_eq!(server.server.metrics.links_rejected.counted("too_many_links"), 1);
    wait_until("all have ended", || server.server.metrics.links.all() == 0).await;
    assert_eq!(lines.count("node is linked"), 10);
    assert!(lines.count("link has ended") <= 10);
    remote::link(&place, &server, "node2", None).await;
    let edge = start_edge(&place.edge("node1", grpc, ""));
    wait_until_not_ready(&edge, &format!("link: rejected by the server: {why}")).await;
}

#[tokio::test]
async fn an_edge_with_a_wrong_token_is_refused_and_reports_the_reason() {
    let place = TestDir::new();
    let server = TestServer::start(&place);
    let edge = start_edge(&place.edge("node1", server.server.bound.grpc, "").replace(TOKEN, "wrong"));
    wait_until_not_ready(
        &edge,
        "link: rejected by the server: invalid token (Unauthenticated); compare token or token_file here",
    )
    .await;
    assert!(server.server.registry.nodes().is_empty());
    assert!(server.server.metrics.links_rejected.counted("token") > 0);
}

#[tokio::test]
async fn a_refused_edge_waits_before_it_dials_again() {
    let place = TestDir::new();
    let server = TestServer::start(&place);
    let refused = || server.server.metrics.links_rejected.counted("token");
    let _edge = start_edge(&place.edge("node1", server.server.bound.grpc, "").replace(TOKEN, "wrong"));
    wait_until("the edge was refused", || refused() > 0).await;
    tokio::time::pause();
    let started = Instant::now();
    wait_within(Duration::from_secs(600), "the edge was refused twice more", || refused() > 2).await;
    assert!(started.elapsed() > Duration::from_millis(1300), "{:?}", started.elapsed());
}

#[tokio::test]
async fn an_edge_trusts_only_its_own_ca() {
    let (place, other) = (TestDir::new(), tempfile::tempdir().unwrap());
    let server = TestServer::start(&place);
    let strange = Authority::new().write(other.path(), &[NAME]).ca;
    let text = place.edge("node1", server.server.bound.grpc, "");
    let edge = start_edge(&text.replace(place.files.ca.to_str().unwrap(), strange.to_str().unwrap()));
    wait_until_not_ready(&edge, "TLS handshake as \"cloud.test\" with ").await;
    wait_until_not_ready(&edge, "by a CA that this end does not trust; edge.uplink.ca must contain").await;
    assert!(server.server.registry.nodes().is_empty());
}

#[tokio::test]
async fn an_edge_that_dials_a_wrong_port_of_the_server_gets_a_hint() {
    let place = TestDir::new();
    let server = TestServer::start(&place);
    let edge = start_edge(&place.edge("node1", server.connect, ""));
    wait_until_not_ready(&edge, "it does not speak TLS; check that it is not the CONNECT port").await;
    let files = [&place.files.cert, &place.files.key];
    let egress =
        format!("[server.egress]\nlisten = \"127.0.0.1:0\"\ncert = {:?}\nkey = {:?}\n", files[0], files[1]);
    let server = TestServer::with(&place, &egress);
    let edge = start_edge(&place.edge("node1", server.port("egress"), ""));
    wait_until_not_ready(&edge, "check that it is not the port for egress or HTTPS").await;
}

#[tokio::test]
async fn an_edge_requires_the_configured_server_name() {
    let place = TestDir::new();
    let server = TestServer::start(&place);
    let edge = start_edge(&place.edge("node1", server.server.bound.grpc, "").replace(NAME, "other.test"));
    wait_until_not_ready(&edge, "TLS handshake as \"other.test\" with ").await;
    wait_until_not_ready(&edge, "its certificate is for cloud.test, 127.0.0.1, and not for that name; set edge.uplink.tls_server_name")
        .await;
    assert!(server.server.registry.nodes().is_empty());
}

#[tokio::test]
async fn a_changed_token_file_applies_to_the_next_links() {
    let place = TestDir::new();
    place.file("token", "default:another");
    let server = TestServer::start(&place);
    pause_time();
    let edge = start_edge(&place.edge("node1", server.server.bound.grpc, ""));
    wait_until_not_ready(&edge, "invalid token").await;
    place.file("token", &format!("default:{TOKEN}"));
    wait_within(4 * crate::support::TIMEOUT, "the edge is linked", || server.link("node1").is_some()).await;
    place.file("token", "default:another");
    wait_refused(&place, &server).await;
    std::fs::remove_file(place.path().join("token")).unwrap();
    wait_refused(&place, &server).await;
}

async fn wait_refused(place: &TestDir, server: &TestServer) {
    let refused = async {
        // Each time another node, because the links of one are limited.
        for n in 2.. {
            let (grpc, node) = (server.server.bound.grpc, format!("node{n}"));
            match remote::try_link(place, grpc, &node, Some(Instance::random())).await {
                Err(status) => return assert_eq!(status.code(), Grpc::Unauthenticated),
                Ok(_) => sleep(BETWEEN).await,
            }
        }
    };
    assert_eventually("a refusal", refused).await;
}

#[tokio::test]
async fn a_node_with_its_own_token_cannot_use_the_default_token() {
    let place = TestDir::new();
    place.file("token", &format!("default:{TOKEN}\nnode1:its own"));
    let server = TestServer::start(&place);
    let refused = remote::try_link(&place, server.server.bound.grpc, "node1", None).await.err().unwrap();
    assert_eq!((refused.code(), refused.message()), (Grpc::Unauthenticated, "invalid token"));
    remote::link(&place, &server, "node2", None).await;
    let own = place.edge("node1", server.server.bound.grpc, "").replace(TOKEN, "itsown");
    let _edge = start_edge(&own);
    server.wait_for_node("node1").await;
}

#[tokio::test]
async fn a_backup_link_runs_next_to_the_previous_one_until_one_is_closed() {
    let place = TestDir::new();
    let server = TestServer::start(&place);
    let instance = Instance::random();
    let backup_headers = || {
        let mut headers = EdgeHello::edge_request(&"node1".parse().unwrap(), TOKEN, instance);
        EdgeHello::with_purpose(&mut headers, LinkPurpose::Backup);
        headers
    };
    let current = || server.link("node1").unwrap().link;
    let link = async || {
        let before = server.link("node1").map(|linked| linked.link.id);
        let call = remote::link_as_peer(&place, server.server.bound.grpc, None, backup_headers(), "node1")
            .await
            .unwrap();
        wait_until("the new link is the primary", || server.link("node1").map(|l| l.link.id) != before).await;
        call
    };
    let mut first = remote::link(&place, &server, "node1", Some(instance)).await;
    let oldest = current();
    let second = link().await;
    assert!(!oldest.is_closed(), "both are up");
    drop(second);
    wait_until("the older link is primary again", || current().id == oldest.id).await;
    let _third = link().await;
    let middle = current();
    let mut fourth = link().await;
    first.wait_for_end().await;
    assert!(!middle.is_closed() && current().id != middle.id, "the oldest of three is closed");
    let _last = remote::try_link(&place, server.server.bound.grpc, "node1", Some(instance)).await.unwrap();
    fourth.wait_for_end().await;
    wait_until("without the mark the newest replaces all", || middle.is_closed()).await;
    assert_eq!(server.server.registry.nodes().len(), 1);
}

#[tokio::test]
async fn a_second_link_of_one_process_replaces_the_first_at_once() {
    let (place, instance) = (TestDir::new(), Some(Instance::random()));
    let server = TestServer::start(&place);
    let mut first = remote::link(&place, &server, "node1", instance).await;
    let old = server.wait_for_node("node1").await;
    let _second = remote::try_link(&place, server.server.bound.grpc, "node1", instance).await.unwrap();
    first.wait_for_end().await;
    wait_until("the old link has ended", || server.server.metrics.links.all() == 1).await;
    let new = server.link("node1").expect("the end of the old link leaves the new one");
    assert!(new.link.id != old.link.id && !new.link.is_closed());
    assert_eq!(server.server.metrics.nodes.get(), 1);
}

#[tokio::test]
async fn a_second_machine_with_the_same_name_does_not_replace_a_live_link() {
    let (place, echo) = (TestDir::new(), targets::echo().await);
    let server = TestServer::start(&place);
    let edge = edge(&place, &server, "node1").await;
    let old = server.wait_for_node("node1").await;
    let refused = remote::try_link(&place, server.server.bound.grpc, "node1", Some(Instance::random()))
        .await
        .err()
        .unwrap();
    assert_eq!(refused.code(), Grpc::AlreadyExists);
    assert!(refused.message().contains(&old.from.to_string()), "{refused:?}");
    assert_eq!(server.link("node1").unwrap().link.id, old.link.id);
    assert_echo(&mut server.open(&at("node1", echo)).await, "hello").await;

    let (lines, _guard) = LogLines::start();
    let newcomer = start_edge(&place.edge("node1", server.server.bound.grpc, ""));
    let line = lines.text().lines().find(|line| line.contains("admin socket open")).unwrap().to_owned();
    // The first socket may be free: edges of other tests had it when the first edge of this one started.
    assert_eq!(line.contains("another edge runs on this machine"), !line.contains("/edge.sock"), "{line}");
    wait_until_not_ready(&newcomer, &format!("node node1 is linked from {}", old.from)).await;
    wait_until_ready(&edge).await;
}

#[tokio::test]
async fn a_frozen_link_is_replaced_after_two_seconds() {
    let place = TestDir::new();
    let server = TestServer::start(&place);
    let frozen = remote::link(&place, &server, "node1", Some(Instance::random())).await;
    let old = server.wait_for_node("node1").await;
    pause_time();
    let started = Instant::now();
    let _new =
        remote::try_link(&place, server.server.bound.grpc, "node1", Some(Instance::random())).await.unwrap();
    assert_eq!(started.elapsed().as_secs(), 2);
    wait_until("the new link is up", || server.link("node1").is_some_and(|l| l.link.id != old.link.id)).await;
    assert!(old.link.is_closed());
    drop(frozen);
}

#[tokio::test]
async fn a_plain_link_is_replaced_at_once() {
    let place = TestDir::new();
    let server = TestServer::start(&place);
    let mut plain = remote::link(&place, &server, "node1", None).await;
    let old = server.wait_for_node("node1").await;
    pause_time();
    let started = Instant::now();
    let _new =
        remote::try_link(&place, server.server.bound.grpc, "node1", Some(Instance::random())).await.unwrap();
    wait_until("the old link is closed", || old.link.is_closed()).await;
    assert!(started.elapsed().as_secs() < 1);
    plain.wait_for_end().await;
    assert_ne!(server.link("node1").unwrap().link.id, old.link.id);
}

#[tokio::test]
async fn an_unresponsive_link_is_pinged_and_closed() {
    let place = TestDir::new();
    let server = TestServer::start(&place);
    pause_time();
    let mut silent = remote::link(&place, &server, "node1", Some(Instance::random())).await;
    let started = Instant::now();
    let ping = silent.next().await.unwrap();
    let FrameKind::Ping(number) = from_message(ping, &Remote::Server(silent.node.clone())).unwrap().body
    else {
        panic!("a ping")
    };
    // The edge has dialled, so it would have sent a ping after 6 s.
    assert!(number.is_some() && started.elapsed().as_secs() == 7, "{:?}", started.elapsed());
    while silent.next().await.is_some() {}
    assert_eq!(started.elapsed().as_secs(), 15);
    wait_until("the node is disconnected", || server.server.registry.nodes().is_empty()).await;
    assert_eq!(server.server.metrics.links_closed.counted("timed_out"), 1);
}

#[tokio::test]
async fn an_idle_connection_gets_http_2_pings() {
    let (place, nine) = (TestDir::new(), Duration::from_secs(9));
    let server = TestServer::start(&place);
    pause_time();
    let mut idle = RawHttp2::link(&place, &server, "plain", None).await;
    let pinged = async { while idle.next().await.unwrap().kind != PING {} };
    assert!(timeout(nine + nine / 2, pinged).await.is_ok());
}

#[tokio::test]
async fn a_link_that_answers_its_pings_stays() {
    let place = TestDir::new();
    let server = TestServer::start(&place);
    pause_time();
    let mut idle = remote::link(&place, &server, "node1", Some(Instance::random())).await;
    let linked = server.wait_for_node("node1").await;
    let started = Instant::now();
    spawn(async move { idle.wait_for_end().await });
    wait_within(4 * crate::support::TIMEOUT, "16 s have passed", || started.elapsed().as_secs() >= 16).await;
    assert_eq!(server.link("node1").unwrap().link.id, linked.link.id);
}

#[tokio::test]
async fn an_edge_reconnects_at_once_after_its_path_is_reset() {
    let (place, echo) = (TestDir::new(), targets::echo().await);
    let server = TestServer::start(&place);
    let line = Line::to(server.server.bound.grpc).await;
    let edge = start_edge(&place.edge("node1", line.at, ""));
    let old = server.wait_for_node("node1").await;
    wait_until_ready(&edge).await;
    line.reset();
    wait_until("there is a new link", || server.link("node1").is_some_and(|l| l.link.id != old.link.id))
        .await;
    assert_echo(&mut open(server.connect, &at("node1", echo)).await, "hello").await;
    wait_until_ready(&edge).await;
}
