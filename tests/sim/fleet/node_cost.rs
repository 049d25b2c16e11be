//! Measures the memory that a known node takes at a server, and the bytes of its announcement.

use std::net::Ipv4Addr;
use std::process::Command;
use std::time::Duration;

use prost::Message as _;
use tunnel_link::link::Link;
use tunnel_proto::codec::extended::to_message;
use tunnel_proto::frame::{Found, Frame, FrameKind, Remote};
use tunnel_proto::names::NodeName;
use tunnel_proto::state::LinkId;

use super::figures::memory;
use super::fleet_size;
use super::net::Net;
use super::server::SimServer;

/// Runs in a separate process, because no other test may run at the same time.
#[test]
fn the_memory_and_the_announcement_of_a_registered_node_are_bounded() {
    if fleet_size().is_some() {
        return measure();
    }
    let test = "fleet::node_cost::the_memory_and_the_announcement_of_a_registered_node_are_bounded";
    let mut alone = Command::new(std::env::current_exe().unwrap());
    alone.args(["--exact", test, "--nocapture"]).env("FLEET", "10x3000");
    let measured = alone.output().unwrap();
    let output = String::from_utf8_lossy(&measured.stdout);
    println!("{output}");
    assert!(measured.status.success() && output.contains("a node that is known takes"), "{measured:?}");
}

/// Ten servers learn of 30,000 nodes each.
#[tokio::main(flavor = "current_thread", start_paused = true)]
async fn measure() {
    let net = Net::new(1);
    let servers = (1..=10)
        .map(|n| SimServer::start(&net, (Ipv4Addr::new(10, 0, 0, n), 9000).into()))
        .collect::<Vec<_>>();
    let (names, others) = (|| (0..30_000).map(|n| format!("node-{n:07}").parse::<NodeName>().unwrap()), 3);
    let links: Vec<_> =
        (0..others).map(|n| Link::new(LinkId(1 << 40 | n), Remote::Peer, Some(net.instance()))).collect();
    let (process, before) = (net.instance(), memory());
    for server in &servers {
        for (node, from) in names().zip(links.iter().cycle()) {
            let found = Found { here: true, instance: Some(process), ..Found::not_here(0) };
            server.handle_frame(from, Frame { node, body: FrameKind::Found(found) });
        }
    }
    let bytes_per_node = memory().saturating_sub(before) / (servers.len() * 30_000);
    println!("a node that is known takes {bytes_per_node} bytes");
    let bytes = announcement(names().next().unwrap(), &servers[0]);
    println!("its announcement is a message of {bytes} bytes");
    // Twice the measured values. Less than a name and an address would mean that the node was not recorded.
    assert!((100..=630).contains(&bytes_per_node), "{bytes_per_node} bytes");
}

/// Returns the size of the message that announces a node.
fn announcement(node: NodeName, server: &SimServer) -> usize {
    let (second, instance) = (Duration::from_secs(1), Some(server.own));
    let found = Found { here: true, silence: second, instance, age: Some(second), ..Found::not_here(0) };
    to_message(Frame { node, body: FrameKind::Found(found) }).encoded_len()
}
