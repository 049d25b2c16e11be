//! Several servers: addresses that one has learned are intercepted by the others as well.

use std::io::Write;
use std::process::ChildStdin;
use std::time::{Duration, SystemTime};

use super::*;

#[test]
fn addresses_of_nodes_at_another_server_are_intercepted() {
    let Some(world) = World::start(2) else { return };
    // The second line also has an address that its node cannot have.
    let lines =
        format!("node1:{TOKEN} ip=10.79.1.2,fd79:1::2\nnode2:{TOKEN} ip=10.79.2.2,fd79:2::2,10.79.2.1\n");
    std::fs::write(world.place.path().join("token"), lines).unwrap();
    let keys = format!("{SHORT}{}", peers(2));
    let mut server = world.server(&keys);
    let mut second = world.start_without_waiting("second", &world.plain_config(1, &peers(2)), &[], &[]);
    ready(&mut second, &world.host, ADMIN + 1);
    let _kubelets = [world.kubelet(1), world.kubelet(2)];
    let first = world.edge_of(1, "10.79.1.1:9001", "");
    let other = world.edge_of(2, "10.79.2.1:9001", "");
    for number in [1, 2] {
        for ip in addresses(number) {
            world.is_intercepted(&ip, true);
            world.assert_kubelet_answers(number, &ip);
        }
    }
    server.wait_for_log(
        "address claim rejected ip=10.79.2.1 node=node2 source=the token file reason=it is this host's",
    );
    assert!(!server.log().contains("node is linked"), "both are linked to the other server");
    // It disconnects without any request for it.
    drop(other);
    for ip in addresses(2) {
        world.is_intercepted(&ip, false);
    }
    // A server that starts later learns of the other one as well.
    server.kill();
    let _server = world.server(&keys);
    for ip in addresses(1) {
        world.is_intercepted(&ip, true);
        world.assert_kubelet_answers(1, &ip);
    }
    drop(first);
}

#[test]
fn each_of_five_servers_intercepts_for_the_nodes_of_all() {
    let Some(world) = World::start(5) else { return };
    // Of each node, one address is in the config, and the other in the token file.
    let lines: String = (1..=5).map(|n| format!("node{n}:{TOKEN} ip=fd79:{n}::2\n")).collect();
    std::fs::write(world.place.path().join("token"), lines).unwrap();
    let fixed: String = (1..=5).map(|n| format!("\"10.79.{n}.2\" = \"node{n}\"\n")).collect();
    let tables = format!("{SHORT}{}[server.addresses.nodes]\n{fixed}", peers(5));
    let mut servers: Vec<_> = (0..5)
        .map(|n| {
            let keys = format!("table = \"tunnel{n}\"\n{tables}");
            world.start_without_waiting(&format!("pod-{n}"), &world.config(n, &keys), &[], &[])
        })
        .collect();
    for (n, server) in (0..).zip(&mut servers) {
        ready(server, &world.host, ADMIN + n);
    }
    let mut edges: Vec<_> =
        (1..=5).map(|n| world.edge_of(n, &format!("10.79.{n}.1:{}", 9000 + n - 1), "")).collect();
    let intercepted = |node: usize, is: bool| {
        for (table, ip) in (0..5).flat_map(|server| addresses(node).map(|ip| (format!("tunnel{server}"), ip)))
        {
            world.is_intercepted_in(&table, &ip, is);
        }
    };
    (1..=5).for_each(|node| intercepted(node, true));
    let _kubelets: Vec<_> = (1..=5).map(|n| world.kubelet(n)).collect();
    for node in 1..=5 {
        addresses(node).iter().for_each(|ip| world.assert_kubelet_answers(node, ip));
    }
    edges[2].kill();
    intercepted(3, false);
    (1..=5).filter(|node| *node != 3).for_each(|node| intercepted(node, true));
}

#[test]
fn a_session_survives_a_20_s_outage_despite_the_chains_of_yurttunnel() {
    if !are_installed(&["iptables"]) {
        return;
    }
    let Some(world) = World::start(1) else { return };
    // The second server is on a separate machine, and the node links only to it.
    let far = machine(&world.host, 100, false);
    world.host.sh("echo 1 > /proc/sys/net/ipv4/ip_forward");
    far.sh("ip route add default via 10.79.100.1");
    world.nodes[0].sh("ip route add default via 10.79.1.1");
    world.host.sh(CHAINS);
    let peers = "[server.peers]\naddresses = [\"10.79.100.1:9000\", \"10.79.100.2:9000\"]\n";
    let mut server = world.server(&format!("{peers}{}", world.fixed()));
    let config = world.place.cloud_config("10.79.100.2:9000".parse().unwrap(), ADMIN) + peers;
    let closed = "[server.connect]\nlisten = \"127.0.0.1:2222\"\nauth = \"none\"\n";
    let mut second = world.place.tunnel_as(
        far.command(PROGRAM),
        ("server", "far"),
        &(config + closed),
        &[],
        &["--verbosity=4"],
    );
    ready(&mut second, &far, ADMIN);
    let mut socat = world.nodes[0].command("socat");
    socat.args(["TCP-LISTEN:9100,pf=ip6,ipv6only=0,fork,reuseaddr", "EXEC:cat"]);
    let _echo = Running::start("echo", world.place.path(), &mut socat);
    let _edge = world.edge_of(1, "10.79.100.2:9000", "");
    let ip = &addresses(1)[0];
    world.is_intercepted(ip, true);
    let (mut client, mut stdin) = world.echoes("client", ip);
    stdin.write_all(b"before\n").unwrap();
    client.wait_for_log("before");
    let started = SystemTime::now();
    far.sh("nft add table inet cut; nft add chain inet cut input '{ type filter hook input priority 0; }'
        nft add rule inet cut input ip saddr 10.79.1.2 drop");
    stdin.write_all(b"meanwhile\n").unwrap();
    second.wait_for_log("link has ended");
    // New connections are refused at once, because it is unknown whether the node will reconnect.
    wait_until("new connections are refused without waiting", TIMEOUT, || {
        let refused = world.get(&format!("http://{ip}:9100/"));
        !refused.status.success() && refused.status.code() != Some(28)
    });
    server.wait_for_log("node node1 is not connected");
    wait_until("the cut has lasted 20 s", 2 * TIMEOUT, || {
        started.elapsed().is_ok_and(|since| since >= Duration::from_secs(20))
    });
    assert!(!client.log().contains("meanwhile"));
    far.sh("nft delete table inet cut");
    client.wait_for_log("meanwhile");
    stdin.write_all(b"after\n").unwrap();
    client.wait_for_log("after");
    assert!(!server.log().contains("node is linked"), "the node is reached through the other server");
    // The session may continue before the server has updated its intercepted addresses.
    wait_until("new connections reach the node again", TIMEOUT, || world.echoes_at(&format!("{ip}:9100")));
}

impl World {
    /// Starts a client on the host that sends its input to port 9100 of an address.
    fn echoes(&self, name: &str, ip: &str) -> (Running, ChildStdin) {
        let mut client = self.host.command("socat");
        client.args(["-", &format!("TCP:{ip}:9100")]);
        Running::start_with_stdin(name, self.place.path(), &mut client)
    }
}

/// Returns the table that lists this number of servers on the host as peers.
fn peers(servers: u16) -> String {
    let list: Vec<_> = (0..servers).map(|n| format!("\"10.79.1.1:{}\"", 9000 + n)).collect();
    format!("[server.peers]\naddresses = [{}]\n", list.join(", "))
}

/// YurtTunnel's rules: connections to a port, at any address, go to its own listener, where no program listens.
const CHAINS: &str = "iptables -t nat -N TUNNEL-PORT; iptables -t nat -A OUTPUT -p tcp -j TUNNEL-PORT
    iptables -t nat -N TUNNEL-PORT-9100
    iptables -t nat -A TUNNEL-PORT -p tcp --dport 9100 -j TUNNEL-PORT-9100
    iptables -t nat -A TUNNEL-PORT-9100 -d 127.0.0.1/32 -j RETURN
    iptables -t nat -A TUNNEL-PORT-9100 -p tcp -j DNAT --to-destination 127.0.0.1:10264";
