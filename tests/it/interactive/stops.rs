//! Servers and edges that stop, and tokens that are revoked, while sessions run on both links.

use std::future::pending;
use std::time::Duration;

use tunnel_base::drain::Drained;

use super::{SOON, TwoServers, World, assert_all_finish, interactive, wait_for_sessions_on_links};
use crate::support::programs::at;
use crate::support::talk::{ExchangeMode, ScriptedExchange};
use crate::support::{Stopwatch, assert_eventually, spawn, wait_until};

#[tokio::test]
async fn sessions_continue_at_another_server_when_their_server_stops() {
    let TwoServers { place: _place, mut servers, line, edge, _other, echo } = TwoServers::new().await;
    let proxy = edge.bound.proxy.unwrap();
    let mut talks = Vec::new();
    for mode in [ExchangeMode::Bulk, ExchangeMode::Keystrokes] {
        talks.push(ScriptedExchange::on(servers[1].open(&at("node1", echo)).await, mode));
        talks
            .push(ScriptedExchange::on(crate::support::clients::open(proxy, &at("node2", echo)).await, mode));
    }
    wait_for_sessions_on_links(&servers[0], 2, 2).await;
    line.route_to(servers[1].server.bound.grpc);
    let first = servers.remove(0);
    let stopped = spawn(first.server.shutdown(pending()));
    wait_for_sessions_on_links(&servers[0], 2, 2).await;
    for typed in &talks[2..] {
        let took = typed.echo_time().await;
        assert!(took < SOON, "{took:?}");
    }
    assert_eq!(assert_eventually("the end of the server", stopped).await.unwrap(), Drained::Finished);
    assert_all_finish(talks).await;
    wait_until("no session is relayed", || servers[0].server.table.relayed() == (0, 0)).await;
}

#[tokio::test]
async fn the_edge_stops_once_its_sessions_are_over() {
    let (World { place: _place, server, line: _line, edge, echo: _ }, bulk, typed) = World::shared().await;
    let metrics = edge.metrics.clone();
    let stopped = spawn(edge.shutdown(pending()));
    typed.echo_time().await;
    assert_all_finish([bulk, typed]).await;
    let watch = Stopwatch::start();
    assert_eq!(assert_eventually("the end of the edge", stopped).await.unwrap(), Drained::Finished);
    assert!(watch.elapsed() < Duration::from_secs(2), "both links end on their own: {:?}", watch.elapsed());
    assert_eq!(metrics.links.all(), 0);
    wait_until("the server has no link", || server.server.metrics.links.all() == 0).await;
    assert!(interactive(&server).is_none() && server.link("node1").is_none());
}

#[tokio::test]
async fn a_revoked_token_closes_both_links() {
    let (world, bulk, typed) = World::shared().await;
    world.place.file("token", "default:another\n");
    wait_until("both links have ended", || world.server.server.metrics.links.all() == 0).await;
    assert!(interactive(&world.server).is_none() && world.server.link("node1").is_none());
    wait_until("the edge knows the reason", || world.edge.metrics.resets.counted("not_allowed") == 2).await;
    [bulk, typed].into_iter().for_each(ScriptedExchange::abort);
}
