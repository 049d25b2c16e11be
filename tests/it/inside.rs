//! Targets in the cloud that a server dials for edges.

use std::future::pending;
use std::net::SocketAddr;

use tunnel::edge::Edge;
use tunnel::route::SessionRequest;
use tunnel_base::drain::Drained;
use tunnel_link::table::handles::Session;
use tunnel_net::ChunkStream as _;
use tunnel_proto::frame::{ErrorCode, SessionCategory};

use crate::support::line::Line;
use crate::support::programs::{TestDir, TestServer, assert_edge_idle, edge, start_edge, target};
use crate::support::servers::{self, KillableServer};
use crate::support::sessions::{assert_session_echo, open_session};
use crate::support::{assert_eventually, spawn, targets, wait_until};

/// Opens a session from an edge to a target in the cloud. Returns the text of the refusal if it is refused.
pub(crate) async fn inside(edge: &Edge, node: &str, to: &str) -> Result<Session, String> {
    open_session(edge, node.parse().unwrap(), target(to)).await
}

/// Waits for the session's end, and returns its cause.
async fn ends(session: &mut Session) -> ErrorCode {
    while assert_eventually("the end", std::future::poll_fn(|cx| session.poll_read_chunk(cx))).await.is_ok() {
    }
    session.ended().unwrap().code
}

/// Returns the config of the targets that a server dials.
fn allow(entries: &str) -> String {
    format!("[server.edge_access]\ntargets = [{entries}]\n")
}

/// Returns the configs of a server at each of these addresses. Each lets edges reach loopback through it.
fn texts(place: &TestDir, all: &[SocketAddr]) -> Vec<String> {
    let text = |at: &SocketAddr| servers::config(place, *at, &servers::peers(all));
    all.iter().map(|at| format!("{}\n{}", text(at), allow("\"127.0.0.0/8:*\""))).collect()
}

#[tokio::test]
async fn by_default_a_server_dials_nothing_for_edges() {
    let (place, echo) = (TestDir::new(), targets::echo().await);
    let server = TestServer::with(&place, "[server.edge_access]\nnodes = [\"*\"]\n");
    let requester = edge(&place, &server, "asker").await;
    for to in [format!("127.0.0.1:{}", echo.port()), format!("localhost:{}", echo.port()), "asker:22".into()]
    {
        let refused = inside(&requester, "asker", &to).await.unwrap_err();
        assert!(refused.contains(&format!("edges may not have the server dial {to}")), "{refused}");
        assert!(refused.contains("server.edge_access.targets"), "{refused}");
    }
    assert_eq!(server.server.metrics.sessions.closed("acceptor", "not_allowed"), 3);
    server.assert_idle().await;
    assert_edge_idle(&requester).await;
}

#[tokio::test]
async fn a_refusal_by_the_remote_reports_the_session_id() {
    let place = TestDir::new();
    let server = TestServer::with(&place, "");
    let requester = edge(&place, &server, "asker").await;
    wait_until("the edge has a link", || requester.metrics.links.all() > 0).await;
    let request = |to| SessionRequest {
        node: "asker".parse().unwrap(),
        target: target(to),
        category: SessionCategory::HttpProxy,
        client: "test".into(),
        listener: "http_proxy",
        permit: None,
    };
    let refused = requester.route.open(request("asker:22")).await.unwrap_err();
    assert!(refused.session.is_some(), "{refused}");
}

#[tokio::test]
async fn an_edge_reaches_only_the_listed_targets_by_address_and_by_name() {
    let (place, echo, other) = (TestDir::new(), targets::echo().await, targets::echo().await);
    let entry = format!("\"127.0.0.0/8:{}\", \"10.0.0.0/8:{}\", \"self:*\"", echo.port(), other.port());
    let server = TestServer::with(&place, &allow(&entry));
    let requester = edge(&place, &server, "asker").await;
    for host in ["127.0.0.1", "localhost", "web.localhost"] {
        let mut session = inside(&requester, "asker", &format!("{host}:{}", echo.port())).await.unwrap();
        assert_session_echo(&mut session, "to the cloud and back").await;
        assert_eq!(server.server.metrics.sessions.now("acceptor"), 1);
        drop(session);
        wait_until("the end of the session", || server.server.metrics.sessions.now("acceptor") == 0).await;
    }
    for host in ["127.0.0.1", "localhost", "web.localhost"] {
        let refused = inside(&requester, "asker", &format!("{host}:{}", other.port())).await.unwrap_err();
        assert!(refused.contains("edges may not have the server dial"), "{host}: {refused}");
    }
    let spare = targets::closed_port().await.port();
    let refused = inside(&requester, "asker", &format!("127.0.0.1:{spare}")).await.unwrap_err();
    assert!(
        refused.contains("edges may not have the server dial"),
        "`own` does not include loopback: {refused}"
    );
    server.assert_idle().await;
    assert_edge_idle(&requester).await;
}

#[tokio::test]
async fn an_address_of_another_node_is_reached_through_the_edge_of_that_node() {
    let (place, echo) = (TestDir::new(), targets::serve_at("127.9.0.1:0", targets::echo_one).await);
    let tables = "[server.edge_access]\nnodes = [\"shop\"]\n[server.addresses.nodes]\n\"127.9.0.0/16\" = \"shop\"\n\"127.8.0.0/16\" = \"secret\"\n";
    let server = TestServer::with(&place, tables);
    let requester = edge(&place, &server, "asker").await;
    let other = edge(&place, &server, "shop").await;
    let mut session = inside(&requester, "asker", &echo.to_string()).await.unwrap();
    assert_session_echo(&mut session, "by its address").await;
    assert_eq!(other.metrics.sessions.now("acceptor"), 1);
    assert_eq!(server.server.metrics.sessions.now("acceptor"), 0);
    drop(session);
    let refused = inside(&requester, "asker", "127.8.0.1:80").await.unwrap_err();
    assert!(refused.contains("edges may not have the server dial"), "the node is not allowed: {refused}");
    drop(other);
    server.assert_idle().await;
    assert_edge_idle(&requester).await;
}

#[tokio::test]
async fn a_session_to_the_cloud_continues_when_its_edge_moves() {
    let (place, echo) = (TestDir::new(), targets::echo().await);
    let all = servers::addresses(3);
    let servers: Vec<_> = texts(&place, &all).iter().map(|text| TestServer::from_text(text)).collect();
    let line = Line::to(servers[0].server.bound.grpc).await;
    let requester = start_edge(&place.edge("asker", line.at, ""));
    servers[0].wait_for_node("asker").await;
    let mut session = inside(&requester, "asker", &echo.to_string()).await.unwrap();
    assert_session_echo(&mut session, "at the first").await;
    for server in [&servers[1], &servers[2], &servers[0], &servers[1]] {
        line.route_to(server.server.bound.grpc);
        line.reset();
        server.wait_for_node("asker").await;
        assert_session_echo(&mut session, "through another, or back").await;
    }
    assert_eq!(servers[0].server.metrics.sessions.now("acceptor"), 1);
    drop(session);
    assert_edge_idle(&requester).await;
    for server in &servers {
        server.assert_idle().await;
        assert_eq!(server.server.metrics.sessions.now("acceptor"), 0);
        wait_until("no session is relayed", || server.server.table.relayed() == (0, 0)).await;
    }
}

#[tokio::test]
async fn a_session_to_the_cloud_ends_with_its_server() {
    let (place, echo) = (TestDir::new(), targets::echo().await);
    let all = servers::addresses(2);
    let texts = texts(&place, &all);
    let mut first = KillableServer::start(texts[0].clone()).await;
    let second = TestServer::from_text(&texts[1]);
    let line = Line::to(first.server.server.bound.grpc).await;
    let requester = start_edge(&place.edge("asker", line.at, "[edge.session]\nresume_timeout = \"30s\"\n"));
    first.server.wait_for_node("asker").await;
    let mut session = inside(&requester, "asker", &echo.to_string()).await.unwrap();
    assert_session_echo(&mut session, "before").await;
    line.route_to(second.server.bound.grpc);
    first.kill();
    second.wait_for_node("asker").await;
    // The session may resume while its server does not answer. Another process in its place proves that it cannot.
    let again = TestServer::from_text(&texts[0]);
    assert_eq!(ends(&mut session).await, ErrorCode::UnknownSession);
    let mut session = inside(&requester, "asker", &echo.to_string()).await.unwrap();
    assert_session_echo(&mut session, "after").await;
    line.route_to(again.server.bound.grpc);
    line.reset();
    assert_session_echo(&mut session, "and again").await;
}

#[tokio::test]
async fn a_session_to_a_lone_server_ends_once_another_process_replaces_it() {
    let (place, echo) = (TestDir::new(), targets::echo().await);
    let text = place.cloud(&allow("\"127.0.0.0/8:*\""));
    let mut first = KillableServer::start(text.clone()).await;
    let line = Line::to(first.server.server.bound.grpc).await;
    let requester = start_edge(&place.edge("asker", line.at, ""));
    first.server.wait_for_node("asker").await;
    let mut session = inside(&requester, "asker", &echo.to_string()).await.unwrap();
    assert_session_echo(&mut session, "before").await;
    let second = TestServer::from_text(&text);
    line.route_to(second.server.bound.grpc);
    first.kill();
    assert_eq!(ends(&mut session).await, ErrorCode::UnknownSession);
}

#[tokio::test]
async fn a_stopping_server_keeps_the_sessions_of_an_edge_that_has_moved() {
    let (place, echo) = (TestDir::new(), targets::echo().await);
    let all = servers::addresses(2);
    let mut both: Vec<_> = texts(&place, &all).iter().map(|text| TestServer::from_text(text)).collect();
    let (second, first) = (both.remove(1), both.remove(0));
    let line = Line::to(first.server.bound.grpc).await;
    let requester = start_edge(&place.edge("asker", line.at, ""));
    first.wait_for_node("asker").await;
    let mut session = inside(&requester, "asker", &echo.to_string()).await.unwrap();
    line.route_to(second.server.bound.grpc);
    let (metrics, stopped) = (first.server.metrics.clone(), spawn(first.server.shutdown(pending())));
    second.wait_for_node("asker").await;
    wait_until("the edge has both links", || requester.metrics.links.all() == 2).await;
    assert_session_echo(&mut session, "over the old link").await;
    let mut newer = inside(&requester, "asker", &echo.to_string()).await.unwrap();
    assert_session_echo(&mut newer, "through the other server").await;
    assert_eq!((metrics.sessions.now("acceptor"), second.server.metrics.sessions.now("acceptor")), (1, 1));
    drop(session);
    assert_eq!(assert_eventually("the end of the server", stopped).await.unwrap(), Drained::Finished);
    wait_until("the old link is closed", || requester.metrics.links.all() == 1).await;
    assert_session_echo(&mut newer, "still").await;
}
