//! Two hundred edges that lose their server at the same time.

use std::net::{SocketAddr, TcpListener};

use futures_util::future::join_all;
use tokio::time::{Duration, Instant};
use tunnel::config::Environment;
use tunnel::edge::Edge;
use tunnel::server::Server;
use tunnel::server::config::ServerConfig;
use tunnel_base::backoff::Backoff;

use crate::support::clients::{assert_echo, open};
use crate::support::programs::{TestDir, TestServer, at, start_edge};
use crate::support::{targets, wait_until, wait_within};

#[tokio::test(flavor = "multi_thread")]
async fn edges_that_lost_their_server_reconnect_no_faster_than_their_backoff() {
    let started = Instant::now();
    let (place, echo, port) = (TestDir::new(), targets::echo().await, port());
    let server = server(&place, port);
    let edges: Vec<Edge> = (0..EDGES).map(|n| start_edge(&place.edge(&node(n), port, ""))).collect();
    wait_until("all are linked", || server.server.registry.nodes().len() == EDGES).await;

    let before: Vec<u64> = edges.iter().map(|edge| edge.metrics.link_reconnects.get()).collect();
    let (since, table, registry) =
        (Instant::now(), server.server.table.clone(), server.server.registry.clone());
    server.server.shutdown(async {}).await;
    assert!(table.is_empty() && registry.nodes().is_empty(), "the stopped server still holds state");
    let mut backoff = Backoff::new();
    if started.elapsed() < Duration::from_secs(10) {
        // No link lived long enough to reset the backoff, so each backoff continues after its first pause.
        backoff.pause(0.0);
    }
    // The link's end counts as one reconnect, and each failed dial as one more.
    let dials = |n: usize| edges[n].metrics.link_reconnects.get() - before[n] - 1;
    wait_until("all have failed to dial", || (0..EDGES).all(|n| dials(n) > 3)).await;
    let most = (0..EDGES).map(dials).max().unwrap();
    // The pauses start again once the link to the stopping server has ended.
    let mut restarted = Backoff::new();
    let pauses = (0..most).map(|n| if n % 2 == 0 { backoff.pause(0.0) } else { restarted.pause(0.0) });
    let least: Duration = pauses.sum();
    assert!(since.elapsed() >= least, "{most} dials within {:?}, which take {least:?}", since.elapsed());

    let server = self::server(&place, port);
    wait_within(RETRY_AFTER, "all edges are linked again", || server.server.registry.nodes().len() == EDGES)
        .await;
    join_all((0..EDGES).map(|n| {
        let target = at(&node(n), echo);
        async move { assert_echo(&mut open(server.connect, &target).await, "hello").await }
    }))
    .await;
    server.assert_idle().await;
    join_all(edges.into_iter().map(|edge| edge.shutdown(async {}))).await;
    wait_until("no node is left", || server.server.registry.nodes().is_empty()).await;
}

fn node(number: usize) -> String {
    format!("edge{number}")
}

/// Starts a server at a fixed address, so that its edges find it after a restart.
fn server(place: &TestDir, grpc: SocketAddr) -> TestServer {
    let text = place.cloud("").replacen("127.0.0.1:0", &grpc.to_string(), 1);
    let (settings, _) = ServerConfig::read(&text, &Environment::default()).unwrap();
    TestServer::from(Server::start(settings, None).unwrap())
}

/// Returns a free port below the kernel's ephemeral ports. Otherwise an edge that dials a stopped server would
/// sometimes get the server's own port, and connect to itself.
fn port() -> SocketAddr {
    let first = 20_000 + u16::try_from(std::process::id() % 10_000).unwrap();
    (first..32_000)
        .map(|port| SocketAddr::from(([127, 0, 0, 1], port)))
        .find(|at| TcpListener::bind(at).is_ok())
        .unwrap()
}

/// With three sockets each, they stay below the limit of 1,024 open files of many systems.
const EDGES: usize = 200;
/// Twice the time that the edges have waited by then, with slack for a busy machine.
const RETRY_AFTER: Duration = Duration::from_secs(60);
