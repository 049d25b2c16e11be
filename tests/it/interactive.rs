//! Interactive links, each next to a primary link that is busy with bulk.

mod elsewhere;
mod far;
mod hostile;
mod kernel;
mod lost;
mod stops;

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use tunnel::edge::Edge;
use tunnel::registry::links::NodeLinkRole;
use tunnel_link::link::Link;

use crate::support::clients::open;
use crate::support::line::Line;
use crate::support::programs::{TestDir, TestServer, at, edge, start_edge};
use crate::support::servers;
use crate::support::talk::{ExchangeMode, ScriptedExchange};
use crate::support::{Stopwatch, pause_time, targets, wait_until, wait_within};

/// Delay of the path in each direction.
const DELAY: Duration = Duration::from_millis(10);
/// Less than the 15 s after which an unresponsive link is closed in any case.
const SOON: Duration = Duration::from_secs(8);

/// A server and an edge with a long path between them, and an echo target.
struct World {
    place: TestDir,
    server: TestServer,
    line: Line,
    edge: Edge,
    echo: SocketAddr,
}

impl World {
    async fn new() -> Self {
        let place = TestDir::new();
        let server = place.cloud(ALLOW);
        Self::of(place, &server, PROXY).await
    }

    /// Like [`World::new`], but with this config of the server, and `edge` appended to the config of the edge.
    async fn of(place: TestDir, server: &str, edge: &str) -> Self {
        let (server, echo) = (TestServer::from_text(server), targets::echo().await);
        let line = Line::slow(server.server.bound.grpc, DELAY).await;
        let edge = start_edge(&place.edge("node1", line.at, edge));
        server.wait_for_node("node1").await;
        wait_until("the edge knows its link", || edge.metrics.links.all() == 1).await;
        Self { place, server, line, edge, echo }
    }

    /// Opens a session from a client of the server.
    async fn exchange(&self, mode: ExchangeMode) -> ScriptedExchange {
        ScriptedExchange::on(self.server.open(&at("node1", self.echo)).await, mode)
    }

    /// Opens a session from a program at the node.
    async fn exchange_from_node(&self, to: &str, mode: ExchangeMode) -> ScriptedExchange {
        ScriptedExchange::on(open(self.edge.bound.proxy.unwrap(), to).await, mode)
    }

    /// Returns the address of a target in the cloud.
    fn in_cloud(&self) -> String {
        format!("web.localhost:{}", self.echo.port())
    }

    /// Like [`World::new`], with a session for bulk and a session that types.
    async fn shared() -> (Self, ScriptedExchange, ScriptedExchange) {
        let world = Self::new().await;
        let (bulk, typed) =
            (world.exchange(ExchangeMode::Bulk).await, world.exchange(ExchangeMode::Keystrokes).await);
        wait_for_sessions_on_links(&world.server, 1, 1).await;
        (world, bulk, typed)
    }
}

/// Two servers that know each other, an edge linked to the first over a long path, and an edge near the second.
struct TwoServers {
    place: TestDir,
    servers: Vec<TestServer>,
    line: Line,
    edge: Edge,
    _other: Edge,
    echo: SocketAddr,
}

impl TwoServers {
    async fn new() -> Self {
        let (place, echo) = (TestDir::new(), targets::echo().await);
        let servers = two_servers(&place);
        let line = Line::slow(servers[0].server.bound.grpc, DELAY).await;
        let edge = start_edge(&place.edge("node1", line.at, PROXY));
        servers[0].wait_for_node("node1").await;
        let other = self::edge(&place, &servers[1], "node2").await;
        Self { place, servers, line, edge, _other: other, echo }
    }
}

fn two_servers(place: &TestDir) -> Vec<TestServer> {
    let all = servers::addresses(2);
    let text = |at: &SocketAddr| servers::config(place, *at, &format!("{}\n{ALLOW}", servers::peers(&all)));
    all.iter().map(|at| TestServer::from_text(&text(at))).collect()
}

/// Returns node1's interactive link at a server.
fn interactive(server: &TestServer) -> Option<Arc<Link>> {
    let links = server.server.registry.overview(0).linked;
    let mut links = links
        .into_iter()
        .filter(|(node, role, ..)| node.as_str() == "node1" && *role == NodeLinkRole::Interactive);
    let found = links.next().map(|(_, _, linked, _)| linked.link);
    assert!(links.next().is_none(), "at most one interactive link");
    found.filter(|link| !link.is_closed())
}

fn first(server: &TestServer) -> Option<Arc<Link>> {
    server.link("node1").map(|linked| linked.link)
}

/// Waits until `primary_sessions` sessions run on the node's primary link at a server, and `interactive_sessions` on
/// its interactive link.
async fn wait_for_sessions_on_links(
    server: &TestServer,
    primary_sessions: usize,
    interactive_sessions: usize,
) {
    let on = |link: Option<Arc<Link>>| link.map_or(0, |link| link.sessions());
    let counted = || [on(first(server)), on(interactive(server))];
    wait_until("each session runs on its link", || counted() == [primary_sessions, interactive_sessions])
        .await;
}

/// Waits until no session runs on a dead link, which must not take long.
async fn assert_sessions_leave(dead: &[Arc<Link>]) {
    let watch = Stopwatch::start();
    wait_until("no session runs on a dead link", || dead.iter().all(|link| link.sessions() == 0)).await;
    assert!(watch.elapsed() < SOON, "{:?}", watch.elapsed());
}

async fn assert_all_finish(talks: impl IntoIterator<Item = ScriptedExchange>) {
    for talk in talks {
        talk.finish().await;
    }
}

#[tokio::test]
async fn an_echo_next_to_bulk_gets_its_own_link_until_the_bulk_ends() {
    let (world, bulk, typed) = World::shared().await;
    let link = interactive(&world.server).unwrap();
    let first = first(&world.server).unwrap();
    assert_eq!(first.interactive().map(|interactive| interactive.id), Some(link.id));
    let before = link.traffic().received_bytes;
    typed.echo_time().await;
    bulk.echo_time().await;
    assert!(link.traffic().received_bytes - before < 64 * 1024, "bulk runs on the other link");
    bulk.finish().await;
    pause_time();
    wait_within(Duration::from_secs(120), "the interactive link is closed", || {
        interactive(&world.server).is_none()
    })
    .await;
    wait_for_sessions_on_links(&world.server, 1, 0).await;
    assert_eq!(self::first(&world.server).map(|now| now.id), Some(first.id));
    wait_until("the edge has one link", || world.edge.metrics.links.all() == 1).await;
    typed.echo_time().await;
    typed.finish().await;
    world.server.assert_idle().await;
}

#[tokio::test]
async fn sessions_move_between_links_as_they_become_bulk_or_interactive() {
    let (world, bulk, typed) = World::shared().await;
    typed.switch_mode(ExchangeMode::Bulk);
    wait_for_sessions_on_links(&world.server, 2, 0).await;
    bulk.switch_mode(ExchangeMode::Keystrokes);
    wait_for_sessions_on_links(&world.server, 1, 1).await;
    bulk.switch_mode(ExchangeMode::Bulk);
    wait_for_sessions_on_links(&world.server, 2, 0).await;
    assert_all_finish([bulk, typed]).await;
}

/// Config with which edges reach one another and loopback through the server.
const ALLOW: &str = "[server.edge_access]\nnodes = [\"*\"]\ntargets = [\"127.0.0.0/8:*\", \"[::1]:*\"]\n";
const PROXY: &str = "[edge.http_proxy]\nlisten = \"127.0.0.1:0\"\n";
