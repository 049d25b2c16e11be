//! Connections of other machines that the server's host forwards.

use super::*;

#[test]
fn only_forwarded_connections_of_listed_networks_are_intercepted() {
    let Some(world) = World::start(1) else { return };
    let host = &world.host;
    // The strictest kernel settings that a host may have.
    host.sh("echo 1 > /proc/sys/net/ipv4/ip_forward; echo 1 > /proc/sys/net/ipv6/conf/all/forwarding
        for all in /proc/sys/net/ipv4/conf/*/rp_filter; do echo 1 > $all; done
        for all in /proc/sys/net/ipv4/conf/*/route_localnet; do echo 0 > $all; done");
    let (office, shop) = (neighbour(&world, 80), neighbour(&world, 81));
    let (other, _answers) = world.other();
    other.sh("ip route add default via 10.79.200.1");
    let keys = "forwarded_networks = [\"10.80.0.0/24\", \"fd80::/64\"]\nport = 15000\n\
                allow_from = [\"10.80.0.0/24\", \"fd80::/64\"]\n";
    let mut server = world.server(&format!("{keys}{}", world.fixed()));
    let (_kubelet, _edge) = (world.kubelet(1), world.edge(1, ""));
    for ip in addresses(1) {
        world.is_intercepted(&ip, true);
        let output = run_command("curl", &mut world.kubelet_client_of(&office, 1, &ip), None, TIMEOUT);
        assert_eq!(output.stdout, "node1", "{ip}: {output:?}\n{}", server.log());
    }
    server.wait_for_log_of(LISTENER, "10.80.0.2");
    server.wait_for_log_of(LISTENER, "fd80::2");
    // A machine outside of these networks is not intercepted, and gets no response, because the node accepts no
    // connections.
    for ip in addresses(1) {
        let output = get(&shop, &format!("http://{}/", at(&ip, 10250)));
        assert_eq!(output.status.code(), Some(28), "{ip}: {output:?}");
    }
    // Nor are connections to other addresses or ports.
    assert_eq!(get(&office, &format!("http://{OTHER}:10250/")).stdout, OTHER);
    assert_eq!(get(&office, "http://10.79.1.2:10251/").status.code(), Some(28));
    // The listener for the host's own connections is on loopback only; the other listener refuses connections that
    // were not redirected.
    for near in ["10.80.0.1", "fd80::1"] {
        assert_eq!(get(&office, &format!("http://{}/", at(near, 15000))).status.code(), Some(7), "{near}");
        let direct = get(&office, &format!("http://{}/", at(near, 15001)));
        assert!(!direct.status.success() && direct.status.code() != Some(28), "{near}: {direct:?}");
    }
    assert_eq!(server.log().matches(LISTENER).count(), 2, "{}", server.log());
}

impl World {
    /// Like [`Self::kubelet_client`], but for another machine.
    fn kubelet_client_of(&self, machine: &Machine, number: usize, ip: &str) -> Command {
        let mut curl = machine.command("curl");
        self.asking(&mut curl, number, ip);
        curl
    }
}

fn get(from: &Machine, url: &str) -> ProcessOutput {
    run_command("curl", from.command("curl").args(["-sS", "-g", "-m", "3", url]), None, TIMEOUT)
}

/// Creates a machine with a default route through the host.
fn neighbour(world: &World, network: u8) -> Machine {
    let machine = Machine::new();
    let device = format!("near{network}");
    let (near, far) = (format!("10.{network}.0.1/24"), format!("10.{network}.0.2/24"));
    world.host.cable((&device, &near), &machine, ("lan", &far));
    world.host.sh(&format!("ip addr add fd{network}::1/64 dev {device} nodad"));
    machine.sh(&format!(
        "ip addr add fd{network}::2/64 dev lan nodad
        ip route add default via 10.{network}.0.1; ip -6 route add default via fd{network}::1"
    ));
    machine
}
