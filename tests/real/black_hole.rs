//! A router between the machines begins to drop large packets without notice. The kernel does not search for another
//! packet size by itself, as by default.
#![expect(clippy::print_stdout, reason = "the times are worth reading")]

use std::thread;
use std::time::Duration;

use tokio::time::Instant;

use crate::network::Machine;
use crate::process::{Running, TIMEOUT, run_command};
use crate::silent::{CLOUD, EDGE_ADMIN, NODE, World};
use crate::tunnel::PROGRAM;
use crate::wait::wait_until;

#[test]
fn sessions_continue_when_large_packets_from_an_edge_are_lost() {
    let Some(world) = start() else { return };
    let (_server, _echo) = (world.server(&world.cloud, CLOUD, &[]), world.echo());
    let edge = world.edge(CLOUD);
    lose(&world, &world.cloud);
    assert_mtu_reported(&world, &edge);
}

#[test]
fn sessions_continue_when_large_packets_to_an_edge_are_lost() {
    let Some(world) = start() else { return };
    let (_server, _echo) = (world.server(&world.cloud, CLOUD, &[]), world.echo());
    let edge = world.edge(CLOUD);
    lose(&world, &world.node);
    assert_mtu_reported(&world, &edge);
}

#[test]
fn sessions_continue_when_large_packets_between_servers_are_lost() {
    let Some(world) = start() else { return };
    let (_second, _echo) = (world.server(&world.node, NODE, &[NODE]), world.echo());
    let first = world.server(&world.cloud, CLOUD, &[NODE]);
    let _edge = world.edge(NODE);
    lose(&world, &world.node);
    wait_until("the log names the cause", TIMEOUT, || first.log().contains(LOST));
}

/// Creates the machines. Each packet is as large as it is on a line.
fn start() -> Option<World> {
    let world = World::start()?;
    for machine in [&world.cloud, &world.node] {
        machine.sh("ip link set wan gso_max_segs 1; sysctl -qw net.ipv4.tcp_mtu_probing=0");
    }
    Some(world)
}

/// Drops the large packets that arrive at a machine, and measures when bytes of two sessions arrive again.
fn lose(world: &World, receiver: &Machine) {
    let (mut keys, mut bulk) = (world.session(), world.session());
    keys.assert_answer("x", "x");
    bulk.assert_answer("x", "x");
    receiver.sh("nft add table inet hole
        nft add chain inet hole input '{ type filter hook input priority 0; }'
        nft add rule inet hole input iifname wan meta length \\> 1200 drop");
    let started = Instant::now();
    let bulk = thread::spawn(move || {
        let text = "bulk".repeat(100_000);
        bulk.assert_answer(&text, &text);
        started.elapsed()
    });
    let mut longest = Duration::ZERO;
    while !bulk.is_finished() {
        let sent = Instant::now();
        keys.assert_answer("x", "x");
        longest = longest.max(sent.elapsed());
        thread::sleep(Duration::from_millis(20));
    }
    let bulk = bulk.join().unwrap();
    println!("keystrokes after at most {longest:.2?}, bulk after {bulk:.2?}");
    assert!(longest < SOON && bulk < SOON, "keystrokes {longest:?}, bulk {bulk:?}");
}

/// Checks that the edge names the cause, and the doctor finds it.
fn assert_mtu_reported(world: &World, edge: &Running) {
    wait_until("the log names the cause", TIMEOUT, || edge.log().contains(LOST));
    let mut curl = world.node.command("curl");
    curl.args(["-s", &format!("http://127.0.0.1:{EDGE_ADMIN}/readyz")]);
    let ready = run_command("curl", &mut curl, None, TIMEOUT).stdout;
    assert!(ready.contains("mtu: large packets (1500 bytes)"), "{ready}");
    let mut doctor = world.node.command(PROGRAM);
    doctor.args(["doctor", "edge", "-c"]).arg(world.place.path().join("edge.toml"));
    let found = run_command("doctor", &mut doctor, None, TIMEOUT).stdout;
    assert!(found.contains("FAIL packets") && found.contains("MTU"), "{found}");
}

/// The log line.
const LOST: &str = "path loses large packets";
/// Shorter than the 15 s after which an unresponsive link is closed in any case.
const SOON: Duration = Duration::from_secs(12);
