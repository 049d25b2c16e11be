//! An edge that has several addresses of its cloud.

use std::sync::Arc;
use std::sync::atomic::AtomicU32;
use std::sync::atomic::Ordering::Relaxed;
use std::time::Duration;

use tokio::io::{AsyncWriteExt, copy_bidirectional};
use tokio::net::{TcpListener, TcpStream};

use crate::support::clients::{assert_echo, get, rest};
use crate::support::programs::{TestDir, TestServer, at, start_edge};
use crate::support::servers::{self, KillableServer};
use crate::support::{pause_time, spawn, targets, wait_until, wait_within};

#[tokio::test]
async fn an_edge_uses_the_next_address_and_returns_without_aborting_sessions() {
    let (place, echo) = (TestDir::new(), targets::echo().await);
    let all = servers::addresses(2);
    let text = |n: usize| servers::config(&place, all[n], "");
    let second = TestServer::from_text(&text(1));
    let list = format!("servers = [\"{}\", \"{}\"]", all[0], all[1]);
    let config = place.edge("node1", all[0], "").replace(&format!("servers = [\"{}\"]", all[0]), &list);
    let edge = start_edge(&config);
    second.wait_for_node("node1").await;
    let mut client = second.open(&at("node1", echo)).await;
    assert_echo(&mut client, "at the second address").await;
    let first = TestServer::from_text(&text(0));
    pause_time();
    wait_within(Duration::from_secs(600), "the edge is back", || first.link("node1").is_some()).await;
    wait_within(Duration::from_secs(60), "the second server has no link", || second.link("node1").is_none())
        .await;
    assert_echo(&mut client, "over the old link").await;
    assert_echo(&mut first.open(&at("node1", echo)).await, "at the first address").await;
    assert_eq!(edge.metrics.links.all(), 2, "the session keeps the old link");
    client.shutdown().await.unwrap();
    assert_eq!(rest(&mut client).await, b"");
    drop(client);
    wait_within(Duration::from_secs(60), "the old link is closed", || edge.metrics.links.all() == 1).await;
}

/// A balancer in front of a server is the first address, and the server itself the second.
#[tokio::test]
async fn an_edge_with_two_addresses_of_one_server_returns_to_the_first_once() {
    let (place, echo) = (TestDir::new(), targets::echo().await);
    let all = servers::addresses(2);
    let server = TestServer::from_text(&servers::config(&place, all[1], ""));
    let list = format!("servers = [\"{}\", \"{}\"]", all[0], all[1]);
    let edge =
        start_edge(&place.edge("node1", all[0], "").replace(&format!("servers = [\"{}\"]", all[0]), &list));
    server.wait_for_node("node1").await;
    let mut client = server.open(&at("node1", echo)).await;
    assert_echo(&mut client, "at the second address").await;
    let balancer = TcpListener::bind(all[0]).await.unwrap();
    let accepted = Arc::new(AtomicU32::new(0));
    let (count, to) = (accepted.clone(), all[1]);
    spawn(async move {
        loop {
            let (mut near, _) = balancer.accept().await.unwrap();
            count.fetch_add(1, Relaxed);
            spawn(async move {
                let mut far = TcpStream::connect(to).await.unwrap();
                let _ = copy_bidirectional(&mut near, &mut far).await;
            });
        }
    });
    pause_time();
    wait_within(Duration::from_secs(600), "the edge is back", || accepted.load(Relaxed) > 0).await;
    tokio::time::sleep(Duration::from_secs(600)).await;
    assert_eq!(accepted.load(Relaxed), 1, "it stays there");
    assert_eq!(edge.metrics.link_reconnects.get(), 1, "one return");
    assert_echo(&mut client, "over the first address").await;
}

#[tokio::test]
async fn an_edge_moves_to_the_next_address_and_stays_while_the_first_is_down() {
    let (place, echo) = (TestDir::new(), targets::echo().await);
    let all = servers::addresses(2);
    let mut first = KillableServer::start(servers::config(&place, all[0], "")).await;
    let second = TestServer::from_text(&servers::config(&place, all[1], ""));
    let list = format!("servers = [\"{}\", \"{}\"]", all[0], all[1]);
    let edge =
        start_edge(&place.edge("node1", all[0], "").replace(&format!("servers = [\"{}\"]", all[0]), &list));
    first.server.wait_for_node("node1").await;
    assert!(second.link("node1").is_none(), "the first address is preferred");
    first.kill();
    second.wait_for_node("node1").await;
    assert_echo(&mut second.open(&at("node1", echo)).await, "hello").await;
    let dials = edge.metrics.link_reconnects.get();
    pause_time();
    tokio::time::sleep(Duration::from_secs(300)).await;
    assert!(
        second.link("node1").is_some() && edge.metrics.link_reconnects.get() == dials,
        "it dials no more"
    );
}

#[tokio::test]
async fn an_edge_without_any_link_reports_the_error_of_each_address() {
    let place = TestDir::new();
    let all = servers::addresses(2);
    let list = format!("servers = [\"{}\", \"{}\"]", all[0], all[1]);
    let edge =
        start_edge(&place.edge("node1", all[0], "").replace(&format!("servers = [\"{}\"]", all[0]), &list));
    let mut body = String::new();
    while !all.iter().all(|at| body.contains(&format!("{at}: it refused the connection"))) {
        body = get(edge.bound.log.unwrap(), "/readyz").await.body;
    }
    wait_until("the edge continues to dial", || edge.metrics.link_reconnects.get() > 2).await;
}
