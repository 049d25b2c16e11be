//! Both links of an edge die, and its next link leads to another pod.

use std::time::Duration;

use futures_util::future::join_all;

use super::{Pods, SOON, first, has_moved, interactive};
use crate::support::clients::open;
use crate::support::line::Line;
use crate::support::programs::at;
use crate::support::talk::{ExchangeStep, ScriptedExchange};
use crate::support::{Stopwatch, wait_until, wait_within};

/// An edge is linked to the first of two pods. Sessions type over its interactive link: one is opened by a client of the first
/// pod, one is relayed from the second, and two are opened by the edge, to the cloud and to another node. Then the harm is
/// done, and the edge's next link leads to the second pod: the sessions go on there soon.
async fn survives(harm: impl Fn(&Line)) {
    let Pods { place: _place, servers, line, edge, _other, echo } = Pods::new().await;
    let [here, there] = [&servers[0], &servers[1]];
    let proxy = edge.bound.proxy.unwrap();
    let (node1, node2, cloud) =
        (at("node1", echo), at("node2", echo), format!("web.localhost:{}", echo.port()));
    let bulk = ScriptedExchange::on(here.open(&node1).await, ExchangeStep::Bulk);
    let typed = [
        ScriptedExchange::on(here.open(&node1).await, ExchangeStep::Types),
        ScriptedExchange::on(there.open(&node1).await, ExchangeStep::Types),
        ScriptedExchange::on(open(proxy, &cloud).await, ExchangeStep::Types),
        ScriptedExchange::on(open(proxy, &node2).await, ExchangeStep::Types),
    ];
    has_moved(here, 1, 4).await;
    join_all(typed.iter().map(ScriptedExchange::is_alive)).await;
    line.route_to(there.server.bound.grpc);
    let dies = Stopwatch::start();
    harm(&line);
    wait_within(SOON, "the edge's next link leads to the second pod", || there.link("node1").is_some()).await;
    let (came, watch) = (dies.elapsed(), Stopwatch::start());
    let took = join_all(typed.iter().map(ScriptedExchange::is_alive)).await;
    assert!(watch.elapsed() < RESUMED, "linked after {came:?}; each took {took:?}");
    wait_until("the first pod has no link of it", || first(here).is_none() && interactive(here).is_none())
        .await;
    for talk in typed.into_iter().chain([bulk]) {
        talk.over().await;
    }
}

#[tokio::test]
async fn both_fall_silent_and_the_second_link_leads_to_another_server() {
    survives(Line::fall_silent).await;
}

#[tokio::test]
async fn the_busy_one_breaks_off_the_interactive_one_falls_silent_and_the_next_link_leads_to_another_server()
{
    survives(|line| {
        line.fall_silent_one(1);
        line.reset_one(0);
    })
    .await;
}

/// Sessions go on within this time after the next link has come.
const RESUMED: Duration = Duration::from_secs(2);
