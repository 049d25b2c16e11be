//! An edge that knows several places of its cloud.

use std::time::Duration;

use tokio::io::AsyncWriteExt;

use crate::support::clients::{echoed, get, rest};
use crate::support::programs::{TestDir, TestServer, at, start_edge};
use crate::support::servers::{self, SeparateServers};
use crate::support::{hurry, targets, wait_until, wait_within};

#[tokio::test]
async fn an_edge_goes_to_the_next_place_and_comes_back_without_cutting_a_session() {
    let (place, echo) = (TestDir::new(), targets::echo().await);
    let all = servers::addresses(2);
    let text = |n: usize| servers::config(&place, all[n], "");
    let second = TestServer::from_text(&text(1));
    let list = format!("server_name = [\"{}\", \"{}\"]", all[0], all[1]);
    let config = place.edge("node1", all[0], "").replace(&format!("server_name = \"{}\"", all[0]), &list);
    let edge = start_edge(&config);
    second.has("node1").await;
    let mut client = second.open(&at("node1", echo)).await;
    echoed(&mut client, "at the second place").await;
    let first = TestServer::from_text(&text(0));
    hurry();
    wait_within(Duration::from_secs(600), "it comes back", || first.link("node1").is_some()).await;
    wait_within(Duration::from_secs(60), "the second one is told", || second.link("node1").is_none()).await;
    echoed(&mut client, "over the old link").await;
    echoed(&mut first.open(&at("node1", echo)).await, "at the first place").await;
    assert_eq!(edge.metrics.links.get(), 2, "the session keeps the old link");
    client.shutdown().await.unwrap();
    assert_eq!(rest(&mut client).await, b"");
    drop(client);
    wait_within(Duration::from_secs(60), "the old link goes", || edge.metrics.links.get() == 1).await;
}

#[tokio::test]
async fn an_edge_whose_place_dies_is_at_the_next_one_and_stays_there_while_the_first_is_away() {
    let (place, echo) = (TestDir::new(), targets::echo().await);
    let all = servers::addresses(2);
    let mut first = SeparateServers::start(servers::config(&place, all[0], "")).await;
    let second = TestServer::from_text(&servers::config(&place, all[1], ""));
    let list = format!("server_name = [\"{}\", \"{}\"]", all[0], all[1]);
    let edge =
        start_edge(&place.edge("node1", all[0], "").replace(&format!("server_name = \"{}\"", all[0]), &list));
    first.server.has("node1").await;
    assert!(second.link("node1").is_none(), "the first of the list is wanted most");
    first.kill();
    second.has("node1").await;
    echoed(&mut second.open(&at("node1", echo)).await, "hello").await;
    let dials = edge.metrics.reconnects.get();
    hurry();
    tokio::time::sleep(Duration::from_secs(300)).await;
    assert!(second.link("node1").is_some() && edge.metrics.reconnects.get() == dials, "it is left in peace");
}

#[tokio::test]
async fn an_edge_that_no_place_takes_says_what_each_of_them_said() {
    let place = TestDir::new();
    let all = servers::addresses(2);
    let list = format!("server_name = [\"{}\", \"{}\"]", all[0], all[1]);
    let edge =
        start_edge(&place.edge("node1", all[0], "").replace(&format!("server_name = \"{}\"", all[0]), &list));
    let mut body = String::new();
    while !all.iter().all(|at| body.contains(&format!("{at} refused the connection"))) {
        body = get(edge.bound.log.unwrap(), "/readyz").await.body;
    }
    wait_until("it goes on trying", || edge.metrics.reconnects.get() > 2).await;
}
