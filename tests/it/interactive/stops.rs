//! Servers and edges that stop, and tokens that are revoked, while sessions run on both links.

use std::future::pending;
use std::time::Duration;

use tunnel_base::drain::Drained;

use super::{Pods, SOON, World, are_over, has_moved, interactive};
use crate::support::programs::at;
use crate::support::talk::{ExchangeStep, ScriptedExchange};
use crate::support::{Stopwatch, assert_eventually, beside, wait_until};

#[tokio::test]
async fn sessions_continue_at_another_server_when_their_server_stops() {
    let Pods { place: _place, mut servers, line, edge, _other, echo } = Pods::new().await;
    let proxy = edge.bound.proxy.unwrap();
    let mut talks = Vec::new();
    for does in [ExchangeStep::Bulk, ExchangeStep::Types] {
        talks.push(ScriptedExchange::on(servers[1].open(&at("node1", echo)).await, does));
        talks
            .push(ScriptedExchange::on(crate::support::clients::open(proxy, &at("node2", echo)).await, does));
    }
    has_moved(&servers[0], 2, 2).await;
    line.route_to(servers[1].server.bound.grpc);
    let first = servers.remove(0);
    let stopped = beside(first.server.shutdown(pending()));
    has_moved(&servers[0], 2, 2).await;
    for typed in &talks[2..] {
        let took = typed.is_alive().await;
        assert!(took < SOON, "{took:?}");
    }
    assert_eq!(assert_eventually("the end of the server", stopped).await.unwrap(), Drained::Finished);
    are_over(talks).await;
    wait_until("no session is relayed", || servers[0].server.table.relayed() == (0, 0)).await;
}

#[tokio::test]
async fn the_edge_stops_once_its_sessions_are_over() {
    let (World { place: _place, server, line: _line, edge, echo: _ }, bulk, typed) = World::shared().await;
    let metrics = edge.metrics.clone();
    let stopped = beside(edge.shutdown(pending()));
    typed.is_alive().await;
    are_over([bulk, typed]).await;
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
