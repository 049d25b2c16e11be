//! Sessions that the server relays, or that were opened at the edge.

use super::{
    DELAY, PROXY, TwoServers, World, assert_all_finish, first, interactive, two_servers,
    wait_for_sessions_on_links,
};
use crate::support::line::Balancer;
use crate::support::programs::{TestDir, at, edge, start_edge};
use crate::support::talk::{ExchangeMode, ScriptedExchange};
use crate::support::{targets, wait_until};

#[tokio::test]
async fn the_edges_server_assigns_relayed_sessions_to_links() {
    let TwoServers { place: _place, servers, line: _line, edge: _edge, _other, echo } =
        TwoServers::new().await;
    let bulk = ScriptedExchange::on(servers[1].open(&at("node1", echo)).await, ExchangeMode::Bulk);
    let typed = ScriptedExchange::on(servers[1].open(&at("node1", echo)).await, ExchangeMode::Keystrokes);
    wait_for_sessions_on_links(&servers[0], 1, 1).await;
    assert_eq!(servers[0].server.table.len(), 0, "both sessions are relayed only");
    typed.echo_time().await;
    typed.switch_mode(ExchangeMode::Bulk);
    wait_for_sessions_on_links(&servers[0], 2, 0).await;
    bulk.switch_mode(ExchangeMode::Keystrokes);
    wait_for_sessions_on_links(&servers[0], 1, 1).await;
    assert_all_finish([bulk, typed]).await;
    wait_until("no session is relayed", || servers[0].server.table.relayed() == (0, 0)).await;
}

#[tokio::test]
async fn the_edge_assigns_the_sessions_that_it_opened_to_links() {
    let world = World::new().await;
    let _other = edge(&world.place, &world.server, "node2").await;
    let (cloud, node) = (world.in_cloud(), at("node2", world.echo));
    let bulk = world.exchange_from_node(&cloud, ExchangeMode::Bulk).await;
    let more = world.exchange_from_node(&node, ExchangeMode::Bulk).await;
    let typed = [
        world.exchange_from_node(&cloud, ExchangeMode::Keystrokes).await,
        world.exchange_from_node(&node, ExchangeMode::Keystrokes).await,
    ];
    wait_for_sessions_on_links(&world.server, 2, 2).await;
    for typed in &typed {
        typed.echo_time().await;
        typed.switch_mode(ExchangeMode::Bulk);
    }
    wait_for_sessions_on_links(&world.server, 4, 0).await;
    bulk.switch_mode(ExchangeMode::Keystrokes);
    more.switch_mode(ExchangeMode::Keystrokes);
    wait_for_sessions_on_links(&world.server, 2, 2).await;
    assert_all_finish(typed.into_iter().chain([bulk, more])).await;
    world.server.assert_idle().await;
}

#[tokio::test]
async fn a_balancer_that_picks_another_server_first_disturbs_no_session() {
    let (place, echo) = (TestDir::new(), targets::echo().await);
    let servers = two_servers(&place);
    let all: Vec<_> = servers.iter().map(|server| server.server.bound.grpc).collect();
    let balancer = Balancer::slow(&all, DELAY).await;
    let _edge = start_edge(&place.edge("node1", balancer.at, PROXY));
    // The first connection goes to the second address.
    let (has, has_not) = (&servers[1], &servers[0]);
    has.wait_for_node("node1").await;
    let link = first(has).unwrap().id;
    let bulk = ScriptedExchange::on(has.open(&at("node1", echo)).await, ExchangeMode::Bulk);
    let typed = ScriptedExchange::on(has.open(&at("node1", echo)).await, ExchangeMode::Keystrokes);
    wait_for_sessions_on_links(has, 1, 1).await;
    assert_eq!(has_not.server.metrics.links_rejected.counted("no_primary_link"), 1);
    assert!(has_not.server.registry.nodes().is_empty() && interactive(has_not).is_none());
    assert_eq!(first(has).unwrap().id, link);
    assert_all_finish([bulk, typed]).await;
}

#[tokio::test]
async fn a_link_that_is_refused_repeatedly_disturbs_no_session() {
    let TwoServers { place: _place, servers, line, edge, _other, echo } = TwoServers::new().await;
    let refused = || servers[1].server.metrics.links_rejected.counted("no_primary_link");
    let link = first(&servers[0]).unwrap().id;
    line.route_to(servers[1].server.bound.grpc);
    let bulk = ScriptedExchange::on(servers[0].open(&at("node1", echo)).await, ExchangeMode::Bulk);
    let typed = ScriptedExchange::on(servers[0].open(&at("node1", echo)).await, ExchangeMode::Keystrokes);
    wait_until("the link was refused three times", || refused() > 2).await;
    typed.echo_time().await;
    assert_eq!(first(&servers[0]).unwrap().id, link);
    assert!(servers[1].link("node1").is_none() && edge.metrics.links.all() == 1);
    assert_all_finish([bulk, typed]).await;
}
