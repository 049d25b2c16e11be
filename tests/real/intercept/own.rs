//! The server's own connections, of any of its parts.

use super::*;

#[test]
fn all_connections_of_the_server_carry_its_mark() {
    let Some(world) = World::start(1) else { return };
    let node = &world.nodes[0];
    node.sh("nft delete table inet shut");
    // At the node's own address run a DNS server with responses too long for UDP, an etcd and a kube-apiserver, none
    // of which responds usefully. The host sends nothing else there.
    std::fs::write(world.place.path().join("truncates"), TRUNCATES).unwrap();
    let truncates = format!("SYSTEM:sh {}", world.place.path().join("truncates").display());
    let servers = [
        ("dns", "UDP-RECVFROM:53,fork", truncates.as_str()),
        ("dns-tcp", "TCP-LISTEN:53,fork,reuseaddr", "SYSTEM:exit"),
        ("etcd", "TCP-LISTEN:2379,fork,reuseaddr", "SYSTEM:exit"),
        ("apiserver", "TCP-LISTEN:6443,fork,reuseaddr", "SYSTEM:exit"),
    ];
    let _servers = servers.map(|(name, at, does)| {
        Running::start(name, world.place.path(), node.command("socat").args([at, does]))
    });
    world.host.sh(COUNTERS);
    std::fs::write(world.place.path().join("kubeconfig"), KUBECONFIG).unwrap();
    let tables = format!(
        "[server.dns]\nresolvers = [\"10.79.1.2:53\"]\npublish = \"etcd\"\netcd.endpoints = [\"http://10.79.1.2:2379\"]\n\
         [server.addresses]\nkubernetes = true\n{}",
        world.fixed()
    );
    let config = world.config(0, &tables).replace("[10250, 9100]", "[10250, 53, 2379, 6443]");
    let kubeconfig = format!("--kubeconfig={}", world.place.path().join("kubeconfig").display());
    let env = [("POD_IP", "10.79.1.1"), ("POD_NAMESPACE", "default")];
    let command = world.host.command(PROGRAM);
    let mut server =
        world.place.tunnel_as(command, ("server", "pod"), &config, &env, &["--verbosity=4", &kubeconfig]);
    let _edge = world.edge(1, "");
    world.is_intercepted("10.79.1.2", true);
    // The server queries DNS for a node that is not connected.
    let curl_args = ["-sS", "-m", "20", "-p", "-x", "http://127.0.0.1:2222", "http://node9:22/"];
    run_command("curl", world.host.command("curl").args(curl_args), None, TIMEOUT);
    for of in ["dns_udp", "dns_tcp", "etcd", "apiserver"] {
        wait_until(&format!("{of} is queried"), TIMEOUT, || world.counted(of) > 0);
    }
    assert_eq!(world.counted("unmarked"), 0, "{}", world.host.sh("nft list table inet counts"));
    assert!(!server.log().contains(LISTENER), "{}", server.log());
    server.assert_running();
}

impl World {
    /// Returns the packet count of one of [`COUNTERS`].
    fn counted(&self, name: &str) -> u64 {
        let output = self.host.sh(&format!("nft list counter inet counts {name}"));
        let packets = output.split("packets ").nth(1).and_then(|rest| rest.split(' ').next());
        packets.unwrap().parse().unwrap()
    }
}

/// Counts connections from the host to the first node before they are redirected.
const COUNTERS: &str = "nft -f - <<'END'
table inet counts {
    counter unmarked {}
    counter dns_udp {}
    counter dns_tcp {}
    counter etcd {}
    counter apiserver {}
    chain output {
        type filter hook output priority -200;
        ip daddr != 10.79.1.2 return
        ct state != new return
        meta mark & 0x40 == 0 counter name unmarked return
        udp dport 53 counter name dns_udp
        tcp dport 53 counter name dns_tcp
        tcp dport 2379 counter name etcd
        tcp dport 6443 counter name apiserver
    }
}
END";
const KUBECONFIG: &str = "{apiVersion: v1, kind: Config, current-context: a, users: [{name: a, user: {}}],
contexts: [{name: a, context: {cluster: a, user: a}}],
clusters: [{name: a, cluster: {server: 'http://10.79.1.2:6443'}}]}
";
/// Answers a DNS query with itself, marked as truncated.
const TRUNCATES: &str = r"{ dd bs=1 count=2; dd bs=1 count=2 of=/dev/null; printf '\203\200'; cat; } 2>/dev/null |
dd bs=512 iflag=fullblock 2>/dev/null
";
