//! What edges ask of the cloud itself: targets that a pod dials for them.

use std::future::pending;
use std::net::SocketAddr;

use tunnel::edge::Edge;
use tunnel::route::SessionRequest;
use tunnel_base::drain::Drained;
use tunnel_link::session::stream::Session;
use tunnel_net::ByteStream as _;
use tunnel_proto::frame::{Category, ErrorCode};

use crate::support::line::Line;
use crate::support::programs::{TestDir, TestServer, edge, edge_forgets_all, start_edge, target};
use crate::support::servers::{self, SeparateServers};
use crate::support::sessions::{asked, says};
use crate::support::{assert_eventually, beside, targets, wait_until};

/// A session from an edge to a target in the cloud, or the words that refuse it.
pub(crate) async fn inside(edge: &Edge, node: &str, to: &str) -> Result<Session, String> {
    asked(edge, node.parse().unwrap(), target(to)).await
}

/// Waits for the session's end, and gives its cause.
async fn ends(session: &mut Session) -> ErrorCode {
    while assert_eventually("the end", std::future::poll_fn(|cx| session.poll_read_chunk(cx))).await.is_ok() {
    }
    session.account().ended.unwrap().code
}

/// What a pod's config says of targets.
fn allow(entries: &str) -> String {
    format!("[mode.cloud.allow]\ntargets = [{entries}]\n")
}

/// As many pods as there are addresses, each lets edges have it dial loopback.
fn texts(place: &TestDir, all: &[SocketAddr]) -> Vec<String> {
    let text = |at: &SocketAddr| servers::config(place, *at, &servers::peers(all));
    all.iter().map(|at| format!("{}\n{}", text(at), allow("\"127.0.0.0/8:*\""))).collect()
}

#[tokio::test]
async fn a_server_dials_nothing_for_edges_unless_it_is_told_to() {
    let (place, echo) = (TestDir::new(), targets::echo().await);
    let server = TestServer::with(&place, "[mode.cloud.allow]\nnodes = [\"*\"]\n");
    let asker = edge(&place, &server, "asker").await;
    for to in [format!("127.0.0.1:{}", echo.port()), format!("localhost:{}", echo.port()), "asker:22".into()]
    {
        let refused = inside(&asker, "asker", &to).await.unwrap_err();
        assert!(refused.contains(&format!("edges may not have the server dial {to}")), "{refused}");
        assert!(refused.contains("mode.cloud.allow.targets"), "{refused}");
    }
    assert_eq!(server.server.metrics.sessions.ended("backend", "not_allowed"), 3);
    server.assert_idle().await;
    edge_forgets_all(&asker).await;
}

#[tokio::test]
async fn of_a_session_that_the_far_end_refused_the_id_is_told() {
    let place = TestDir::new();
    let server = TestServer::with(&place, "");
    let asker = edge(&place, &server, "asker").await;
    wait_until("the edge has a link", || asker.metrics.links.get() > 0).await;
    let request = |to| SessionRequest {
        node: "asker".parse().unwrap(),
        target: target(to),
        category: Category::HttpProxy,
        client: "test".into(),
    };
    let refused = asker.route.open(request("asker:22")).await.unwrap_err();
    assert!(refused.session.is_some(), "{refused}");
}

#[tokio::test]
async fn an_edge_reaches_what_a_server_may_dial_by_address_and_by_name_and_nothing_else() {
    let (place, echo, other) = (TestDir::new(), targets::echo().await, targets::echo().await);
    let entry = format!("\"127.0.0.0/8:{}\", \"10.0.0.0/8:{}\", \"own:*\"", echo.port(), other.port());
    let server = TestServer::with(&place, &allow(&entry));
    let asker = edge(&place, &server, "asker").await;
    for host in ["127.0.0.1", "localhost", "web.localhost"] {
        let mut session = inside(&asker, "asker", &format!("{host}:{}", echo.port())).await.unwrap();
        says(&mut session, "to the cloud and back").await;
        assert_eq!(server.server.metrics.sessions.now("backend"), 1);
        drop(session);
        wait_until("its end", || server.server.metrics.sessions.now("backend") == 0).await;
    }
    for host in ["127.0.0.1", "localhost", "web.localhost"] {
        let refused = inside(&asker, "asker", &format!("{host}:{}", other.port())).await.unwrap_err();
        assert!(refused.contains("edges may not have the server dial"), "{host}: {refused}");
    }
    let spare = targets::nothing().await.port();
    let refused = inside(&asker, "asker", &format!("127.0.0.1:{spare}")).await.unwrap_err();
    assert!(refused.contains("edges may not have the server dial"), "own is not loopback: {refused}");
    server.assert_idle().await;
    edge_forgets_all(&asker).await;
}

#[tokio::test]
async fn what_a_server_dialled_for_an_edge_goes_on_when_the_edge_moves_to_other_servers() {
    let (place, echo) = (TestDir::new(), targets::echo().await);
    let all = servers::addresses(3);
    let servers: Vec<_> = texts(&place, &all).iter().map(|text| TestServer::from_text(text)).collect();
    let line = Line::to(servers[0].server.bound.grpc).await;
    let asker = start_edge(&place.edge("asker", line.at, ""));
    servers[0].has("asker").await;
    let mut session = inside(&asker, "asker", &echo.to_string()).await.unwrap();
    says(&mut session, "at the first").await;
    for server in [&servers[1], &servers[2], &servers[0], &servers[1]] {
        line.route_to(server.server.bound.grpc);
        line.reset();
        server.has("asker").await;
        says(&mut session, "through another, or back").await;
    }
    assert_eq!(servers[0].server.metrics.sessions.now("backend"), 1);
    drop(session);
    edge_forgets_all(&asker).await;
    for server in &servers {
        server.assert_idle().await;
        assert_eq!(server.server.metrics.sessions.now("backend"), 0);
        wait_until("nothing passes", || server.server.table.relayed() == (0, 0)).await;
    }
}

#[tokio::test]
async fn what_a_server_dialled_for_an_edge_ends_with_that_server() {
    let (place, echo) = (TestDir::new(), targets::echo().await);
    let all = servers::addresses(2);
    let texts = texts(&place, &all);
    let mut first = SeparateServers::start(texts[0].clone()).await;
    let second = TestServer::from_text(&texts[1]);
    let line = Line::to(first.server.server.bound.grpc).await;
    let asker = start_edge(&place.edge("asker", line.at, "[mode.edge.session]\ngrace = \"30s\"\n"));
    first.server.has("asker").await;
    let mut session = inside(&asker, "asker", &echo.to_string()).await.unwrap();
    says(&mut session, "before").await;
    line.route_to(second.server.bound.grpc);
    first.kill();
    second.has("asker").await;
    // As long as its pod does not answer it may come back; another process in its place is proof that it does not.
    let again = TestServer::from_text(&texts[0]);
    assert_eq!(ends(&mut session).await, ErrorCode::UnknownSession);
    let mut session = inside(&asker, "asker", &echo.to_string()).await.unwrap();
    says(&mut session, "after").await;
    line.route_to(again.server.bound.grpc);
    line.reset();
    says(&mut session, "and again").await;
}

#[tokio::test]
async fn what_a_lone_server_dialled_ends_at_once_when_another_process_takes_its_place() {
    let (place, echo) = (TestDir::new(), targets::echo().await);
    let text = place.cloud(&allow("\"127.0.0.0/8:*\""));
    let mut first = SeparateServers::start(text.clone()).await;
    let line = Line::to(first.server.server.bound.grpc).await;
    let asker = start_edge(&place.edge("asker", line.at, ""));
    first.server.has("asker").await;
    let mut session = inside(&asker, "asker", &echo.to_string()).await.unwrap();
    says(&mut session, "before").await;
    let second = TestServer::from_text(&text);
    line.route_to(second.server.bound.grpc);
    first.kill();
    assert_eq!(ends(&mut session).await, ErrorCode::UnknownSession);
}

#[tokio::test]
async fn a_server_that_stops_carries_on_what_it_dialled_for_an_edge_that_has_moved() {
    let (place, echo) = (TestDir::new(), targets::echo().await);
    let all = servers::addresses(2);
    let mut both: Vec<_> = texts(&place, &all).iter().map(|text| TestServer::from_text(text)).collect();
    let (second, first) = (both.remove(1), both.remove(0));
    let line = Line::to(first.server.bound.grpc).await;
    let asker = start_edge(&place.edge("asker", line.at, ""));
    first.has("asker").await;
    let mut session = inside(&asker, "asker", &echo.to_string()).await.unwrap();
    line.route_to(second.server.bound.grpc);
    let (metrics, stopped) = (first.server.metrics.clone(), beside(first.server.shutdown(pending())));
    second.has("asker").await;
    wait_until("the edge has both links", || asker.metrics.links.get() == 2).await;
    says(&mut session, "over the old link").await;
    let mut newer = inside(&asker, "asker", &echo.to_string()).await.unwrap();
    says(&mut newer, "by the other pod").await;
    assert_eq!((metrics.sessions.now("backend"), second.server.metrics.sessions.now("backend")), (1, 1));
    drop(session);
    assert_eq!(assert_eventually("the pod's end", stopped).await.unwrap(), Drained::Finished);
    wait_until("the old link is gone", || asker.metrics.links.get() == 1).await;
    says(&mut newer, "still").await;
}
