//! Links that are reset or stop responding, while sessions run on both.

use std::time::Duration;

use super::{
    SOON, TwoServers, World, assert_all_finish, assert_sessions_leave, first, interactive,
    wait_for_sessions_on_links,
};
use crate::support::line::Line;
use crate::support::programs::at;
use crate::support::talk::{ExchangeMode, ScriptedExchange};
use crate::support::{Stopwatch, targets, wait_until};

/// Checks that sessions leave the dead links soon and lose no bytes. `harm` breaks the links that `which` selects.
///
/// The server opens one bulk session and one that types, and so does the edge.
async fn assert_sessions_survive(harm: impl Fn(&Line), which: [bool; 2]) {
    let world = World::new().await;
    let bulk = [
        world.exchange(ExchangeMode::Bulk).await,
        world.exchange_from_node(&world.in_cloud(), ExchangeMode::Bulk).await,
    ];
    let typed = [
        world.exchange(ExchangeMode::Keystrokes).await,
        world.exchange_from_node(&world.in_cloud(), ExchangeMode::Keystrokes).await,
    ];
    wait_for_sessions_on_links(&world.server, 2, 2).await;
    for typed in &typed {
        typed.echo_time().await;
    }
    let links = [first(&world.server).unwrap(), interactive(&world.server).unwrap()];
    let dead: Vec<_> = links.into_iter().zip(which).filter(|(_, dies)| *dies).map(|(link, _)| link).collect();
    harm(&world.line);
    assert_sessions_leave(&dead).await;
    for typed in &typed {
        let took = typed.echo_time().await;
        assert!(took < SOON, "{took:?}");
    }
    wait_for_sessions_on_links(&world.server, 2, 2).await;
    assert_all_finish(bulk.into_iter().chain(typed)).await;
    world.server.assert_idle().await;
}

#[tokio::test]
async fn sessions_survive_a_reset_of_the_interactive_link() {
    assert_sessions_survive(|line| line.reset_one(1), [false, true]).await;
}

#[tokio::test]
async fn sessions_survive_an_unresponsive_interactive_link() {
    assert_sessions_survive(|line| line.make_one_unresponsive(1), [false, true]).await;
}

#[tokio::test]
async fn sessions_survive_while_new_interactive_links_reach_another_server() {
    let TwoServers { place: _place, servers, line, edge: _edge, _other, echo } = TwoServers::new().await;
    let refused = || servers[1].server.metrics.links_rejected.counted("no_primary_link");
    let bulk = ScriptedExchange::on(servers[0].open(&at("node1", echo)).await, ExchangeMode::Bulk);
    let typed = ScriptedExchange::on(servers[0].open(&at("node1", echo)).await, ExchangeMode::Keystrokes);
    wait_for_sessions_on_links(&servers[0], 1, 1).await;
    typed.echo_time().await;
    line.route_to(servers[1].server.bound.grpc);
    line.make_one_unresponsive(1);
    let took = typed.echo_time().await;
    assert!(took < SILENT, "{took:?}");
    wait_until("the link was refused three times", || refused() > 2).await;
    let took = typed.echo_time().await;
    assert!(took < SILENT, "{took:?}");
    line.route_to(servers[0].server.bound.grpc);
    wait_for_sessions_on_links(&servers[0], 1, 1).await;
    typed.echo_time().await;
    assert_all_finish([bulk, typed]).await;
}

#[tokio::test]
async fn sessions_survive_a_reset_of_the_primary_link() {
    assert_sessions_survive(|line| line.reset_one(0), [true, false]).await;
}

#[tokio::test]
async fn sessions_survive_an_unresponsive_primary_link() {
    assert_sessions_survive(|line| line.make_one_unresponsive(0), [true, false]).await;
}

#[tokio::test]
async fn sessions_survive_a_reset_of_both_links() {
    assert_sessions_survive(Line::reset, [true, true]).await;
}

#[tokio::test]
async fn sessions_survive_two_unresponsive_links() {
    assert_sessions_survive(Line::become_unresponsive, [true, true]).await;
}

#[tokio::test]
async fn without_a_primary_link_sessions_stay_on_the_interactive_one() {
    let (world, bulk, typed) = World::shared().await;
    let link = interactive(&world.server).unwrap();
    world.line.route_to(targets::closed_port().await);
    world.line.reset_one(0);
    wait_until("the primary link has ended", || first(&world.server).is_none()).await;
    typed.switch_mode(ExchangeMode::Bulk);
    assert_bulk_continues(&typed, Duration::from_secs(3)).await;
    assert_eq!(link.sessions(), 1);
    world.line.route_to(world.server.server.bound.grpc);
    assert_all_finish([bulk, typed]).await;
}

/// Checks that the session moves bulk for `time` without a notable pause.
async fn assert_bulk_continues(talk: &ScriptedExchange, time: Duration) {
    let watch = Stopwatch::start();
    while watch.elapsed() < time {
        let took = talk.echo_time().await;
        assert!(took < Duration::from_secs(2), "{took:?}");
    }
}

/// Time within which an unresponsive link is detected: half a second until the next ping, 1 s and four RTTs, and a
/// little for other work.
const SILENT: Duration = Duration::from_secs(3);
