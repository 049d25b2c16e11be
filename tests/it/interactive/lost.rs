//! Links that are reset or stop responding, while sessions run on both.

use std::time::Duration;

use super::{Pods, SOON, World, are_over, first, has_moved, interactive, is_left};
use crate::support::line::Line;
use crate::support::programs::at;
use crate::support::talk::{ExchangeStep, ScriptedExchange};
use crate::support::{Stopwatch, targets, wait_until};

/// Checks that sessions leave the dead links soon and lose no bytes. `harm` breaks the links that `which` selects.
///
/// The server opens one bulk session and one that types, and so does the edge.
async fn survives(harm: impl Fn(&Line), which: [bool; 2]) {
    let world = World::new().await;
    let bulk = [
        world.talk(ExchangeStep::Bulk).await,
        world.talk_from_node(&world.in_cloud(), ExchangeStep::Bulk).await,
    ];
    let typed = [
        world.talk(ExchangeStep::Types).await,
        world.talk_from_node(&world.in_cloud(), ExchangeStep::Types).await,
    ];
    has_moved(&world.server, 2, 2).await;
    for typed in &typed {
        typed.is_alive().await;
    }
    let links = [first(&world.server).unwrap(), interactive(&world.server).unwrap()];
    let dead: Vec<_> = links.into_iter().zip(which).filter(|(_, dies)| *dies).map(|(link, _)| link).collect();
    harm(&world.line);
    is_left(&dead).await;
    for typed in &typed {
        let took = typed.is_alive().await;
        assert!(took < SOON, "{took:?}");
    }
    has_moved(&world.server, 2, 2).await;
    are_over(bulk.into_iter().chain(typed)).await;
    world.server.assert_idle().await;
}

#[tokio::test]
async fn sessions_survive_a_reset_of_the_interactive_link() {
    survives(|line| line.reset_one(1), [false, true]).await;
}

#[tokio::test]
async fn sessions_survive_an_unresponsive_interactive_link() {
    survives(|line| line.fall_silent_one(1), [false, true]).await;
}

#[tokio::test]
async fn sessions_survive_while_new_interactive_links_reach_another_server() {
    let Pods { place: _place, servers, line, edge: _edge, _other, echo } = Pods::new().await;
    let refused = || servers[1].server.metrics.links_rejected.counted("no_primary_link");
    let bulk = ScriptedExchange::on(servers[0].open(&at("node1", echo)).await, ExchangeStep::Bulk);
    let typed = ScriptedExchange::on(servers[0].open(&at("node1", echo)).await, ExchangeStep::Types);
    has_moved(&servers[0], 1, 1).await;
    typed.is_alive().await;
    line.route_to(servers[1].server.bound.grpc);
    line.fall_silent_one(1);
    let took = typed.is_alive().await;
    assert!(took < SILENT, "{took:?}");
    wait_until("the link was refused three times", || refused() > 2).await;
    let took = typed.is_alive().await;
    assert!(took < SILENT, "{took:?}");
    line.route_to(servers[0].server.bound.grpc);
    has_moved(&servers[0], 1, 1).await;
    typed.is_alive().await;
    are_over([bulk, typed]).await;
}

#[tokio::test]
async fn sessions_survive_a_reset_of_the_primary_link() {
    survives(|line| line.reset_one(0), [true, false]).await;
}

#[tokio::test]
async fn sessions_survive_an_unresponsive_primary_link() {
    survives(|line| line.fall_silent_one(0), [true, false]).await;
}

#[tokio::test]
async fn sessions_survive_a_reset_of_both_links() {
    survives(Line::reset, [true, true]).await;
}

#[tokio::test]
async fn sessions_survive_two_unresponsive_links() {
    survives(Line::fall_silent, [true, true]).await;
}

#[tokio::test]
async fn without_a_primary_link_sessions_stay_on_the_interactive_one() {
    let (world, bulk, typed) = World::shared().await;
    let link = interactive(&world.server).unwrap();
    world.line.route_to(targets::nothing().await);
    world.line.reset_one(0);
    wait_until("the primary link has ended", || first(&world.server).is_none()).await;
    typed.switch_to(ExchangeStep::Bulk);
    moves_for(&typed, Duration::from_secs(3)).await;
    assert_eq!(link.sessions(), 1);
    world.line.route_to(world.server.server.bound.grpc);
    are_over([bulk, typed]).await;
}

/// Checks that the session moves bulk for `time` without a notable pause.
async fn moves_for(talk: &ScriptedExchange, time: Duration) {
    let watch = Stopwatch::start();
    while watch.elapsed() < time {
        let took = talk.is_alive().await;
        assert!(took < Duration::from_secs(2), "{took:?}");
    }
}

/// Time within which an unresponsive link is detected: half a second until the next ping, 1 s and four RTTs, and a
/// little for other work.
const SILENT: Duration = Duration::from_secs(3);
