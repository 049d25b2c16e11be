//! Both links of an edge fail, and its next link is at another server.

use std::time::Duration;

use futures_util::future::join_all;

use super::{SOON, TwoServers, first, interactive, wait_for_sessions_on_links};
use crate::support::clients::open;
use crate::support::line::Line;
use crate::support::programs::at;
use crate::support::talk::{ExchangeMode, ScriptedExchange};
use crate::support::{Stopwatch, wait_until, wait_within};

/// Checks that sessions that type survive `harm` when the edge's next link is at the second of two servers.
///
/// A client of the first server opens one of them, and one is relayed from the second server. The edge opens two, to
/// the cloud and to another node.
async fn assert_sessions_survive(harm: impl Fn(&Line)) {
    let TwoServers { place: _place, servers, line, edge, _other, echo } = TwoServers::new().await;
    let [here, there] = [&servers[0], &servers[1]];
    let proxy = edge.bound.proxy.unwrap();
    let (node1, node2, cloud) =
        (at("node1", echo), at("node2", echo), format!("web.localhost:{}", echo.port()));
    let bulk = ScriptedExchange::on(here.open(&node1).await, ExchangeMode::Bulk);
    let typed = [
        ScriptedExchange::on(here.open(&node1).await, ExchangeMode::Keystrokes),
        ScriptedExchange::on(there.open(&node1).await, ExchangeMode::Keystrokes),
        ScriptedExchange::on(open(proxy, &cloud).await, ExchangeMode::Keystrokes),
        ScriptedExchange::on(open(proxy, &node2).await, ExchangeMode::Keystrokes),
    ];
    wait_for_sessions_on_links(here, 1, 4).await;
    join_all(typed.iter().map(ScriptedExchange::echo_time)).await;
    line.route_to(there.server.bound.grpc);
    let dies = Stopwatch::start();
    harm(&line);
    wait_within(SOON, "the edge's next link is at the second server", || there.link("node1").is_some()).await;
    let (came, watch) = (dies.elapsed(), Stopwatch::start());
    let took = join_all(typed.iter().map(ScriptedExchange::echo_time)).await;
    assert!(watch.elapsed() < RESUMED, "linked after {came:?}; each took {took:?}");
    wait_until("the first server has no link of it", || first(here).is_none() && interactive(here).is_none())
        .await;
    for talk in typed.into_iter().chain([bulk]) {
        talk.finish().await;
    }
}

#[tokio::test]
async fn sessions_survive_two_unresponsive_links_and_move_to_another_server() {
    assert_sessions_survive(Line::become_unresponsive).await;
}

#[tokio::test]
async fn sessions_survive_a_reset_and_an_unresponsive_link_and_move_elsewhere() {
    assert_sessions_survive(|line| {
        line.make_one_unresponsive(1);
        line.reset_one(0);
    })
    .await;
}

/// Time within which sessions continue once the next link is up.
const RESUMED: Duration = Duration::from_secs(2);
