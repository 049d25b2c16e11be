//! The HTTP proxy of an edge, as users use it: curl on a node requests pages of the cloud and of another node.

use crate::network::{Network, OTHER_SERVER, SERVER};
use crate::parts::are_installed;
use crate::process::{TIMEOUT, run_command};

#[test]
fn curl_on_a_node_reaches_the_cloud_and_nodes_of_any_server() {
    if !are_installed(&["busybox"]) {
        return;
    }
    let Some(network) = Network::start(2) else { return };
    let allow = format!("[server.edge_access]\ntargets = [\"{SERVER}:8088\"]\nnodes = [\"node*\"]\n");
    let _servers = [network.server(SERVER, &allow), network.server(OTHER_SERVER, &allow)];
    let _pages = [
        network.page(&network.cloud, ("cloud", &format!("{SERVER}:8088")), ("index.html", "cloud\n")),
        network.page(&network.edges[1], ("node2", "127.0.0.1:9100"), ("index.html", "node2\n")),
    ];
    let _proxy_node = network.edge(1, SERVER, PROXY);
    for server in [SERVER, OTHER_SERVER] {
        let _serves = network.edge(2, server, "");
        for (url, expected) in
            [(format!("http://{SERVER}:8088/"), "cloud\n"), ("http://node2:9100/".into(), "node2\n")]
        {
            for way in ["", "-p"] {
                assert_eq!(
                    curl(&network, &format!("{way} {url}")),
                    expected,
                    "{way} {url}, node2 at {server}"
                );
            }
        }
    }
    let refused = curl(&network, &format!("-w %{{http_code}} http://{OTHER_SERVER}:8088/"));
    assert!(
        refused.contains("add the target to [server.edge_access] targets") && refused.ends_with("403"),
        "{refused}"
    );
}

#[test]
fn by_default_curl_on_a_node_reaches_nothing_and_reads_the_config_key() {
    let Some(network) = Network::start(2) else { return };
    let _server = network.server(SERVER, "");
    let _edges = [network.edge(1, SERVER, PROXY), network.edge(2, SERVER, "")];
    for (url, key) in [
        (format!("http://{SERVER}:8088/"), "server.edge_access.targets"),
        ("http://node2:9100/".into(), "server.edge_access.nodes"),
        ("http://node1:9100/".into(), "no_proxy"),
    ] {
        let refused = curl(&network, &url);
        assert!(refused.contains(key), "{url}: {refused}");
    }
}

/// Runs curl on the first node through the proxy there, and returns its output.
fn curl(network: &Network, args: &str) -> String {
    let mut command = network.edges[0].command("sh");
    let line = format!("curl -s -m 20 -x http://127.0.0.1:3128 {args}");
    command.args(["-c", &line]);
    let output = run_command(&line, &mut command, None, 2 * TIMEOUT);
    assert!(output.status.success(), "{line}: {output:?}");
    output.stdout
}

const PROXY: &str = "[edge.http_proxy]\nlisten = \"127.0.0.1:3128\"\n";
