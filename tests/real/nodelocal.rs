//! Node-local services, at a link-local address and on a dummy interface: no client reaches them by the node's name,
//! its headers or its address.

use std::io::Write;

use crate::network::{Network, SERVER, address};
use crate::parts::are_installed;
use crate::process::TIMEOUT;
use crate::wait::wait_until;

/// Address where a node's own proxy listens, which uses the node's credentials.
const LINK_LOCAL: &str = "169.254.2.1";

/// The address of a dummy interface.
const DUMMY: &str = "10.99.0.1";

#[test]
fn no_client_reaches_services_at_link_local_and_dummy_addresses_of_a_node() {
    let Some(network) = Network::start(1).filter(|_| are_installed(&["busybox"])) else { return };
    let (node, own) = (&network.edges[0], address(1));
    node.sh(&format!("ip addr add {LINK_LOCAL} dev lo"));
    let dummy = format!(
        "ip link add kept type dummy && ip addr add {DUMMY}/32 dev kept && ip link set kept up && echo made || true"
    );
    let has_dummy = node.sh(&dummy).contains("made");
    let _server = network.server(
        SERVER,
        &format!(
            "[server.connect]\nlisten = \"{SERVER}:2222\"\nauth = \"none\"
[server.http]\nlisten_ip = \"{SERVER}\"\nports = {{ \"7080\" = \"host\" }}\nallow_from = [\"10.77.0.0/16\"]
[server.addresses.nodes]\n\"{own}\" = \"node1\"\n\"{LINK_LOCAL}\" = \"node1\"\n\"{DUMMY}\" = \"node1\"\n"
        ),
    );
    let _edge = network.edge(1, SERVER, "");
    let get =
        |with: &str, url: &str| network.try_sh(&format!("curl -sf -m 20 {with} http://{url}/who")).stdout;
    let by_name = |port: &str| get(&format!("-p -x http://{SERVER}:2222"), &format!("node1:{port}"));
    let by_address = |at: &str| get(&format!("-p -x http://{SERVER}:2222"), at);
    let by_headers = |at: &str| {
        let headers = format!("-H 'X-Tunnel-Proxy-Host: node1' -H 'X-Tunnel-Proxy-Dest: {at}'");
        get(&headers, &format!("{SERVER}:7080"))
    };
    let _open = network.page(node, ("open", &format!("{own}:10262")), ("who", "open"));
    let at = format!("{own}:10262");
    wait_until("the node's public service is reachable", TIMEOUT, || {
        [by_name("10262"), by_address(&at), by_headers(&at)] == ["open"; 3]
    });
    let kept: &[_] =
        if has_dummy { &[(LINK_LOCAL, "10261"), (DUMMY, "10263")] } else { &[(LINK_LOCAL, "10261")] };
    for (ip, port) in kept {
        let at = format!("{ip}:{port}");
        let _kept = network.page(node, (ip, &at), ("who", "kept"));
        wait_until("the service is reachable from the node itself", TIMEOUT, || {
            node.sh(&format!("curl -sf -m 2 http://{at}/who || true")) == "kept"
        });
        assert_eq!([by_name(port), by_address(&at), by_headers(&at)], ["", "", ""], "{at}");
    }
    if !has_dummy {
        let _ = writeln!(
            std::io::stderr(),
            "this kernel has no dummy interfaces: tested with a link-local address only"
        );
    }
}
