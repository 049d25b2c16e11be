//! Addresses that a server dials itself, and addresses that it never dials, in any spelling, for any client and with
//! any config: not one packet is sent.

use crate::certificates::Files;
use crate::network::{Machine, Network, OTHER_SERVER, SERVER};
use crate::parts::are_installed;
use crate::process::{Running, TIMEOUT, run_command};
use crate::tunnel::TestDir;
use crate::wait::wait_until;

#[test]
fn no_packet_is_sent_to_targets_that_a_server_must_not_dial() {
    let Some(network) = Network::start(1).filter(|_| are_installed(&["socat"])) else { return };
    let place = &network.place;
    let Files { ca, cert, key } = &place.files;
    let tls = client(place, "a client");
    let _server = network.server(
        SERVER,
        &format!(
            "[server.connect]\nlisten = \"{SERVER}:2222\"\nauth = \"none\"
[server.egress]\nlisten = \"{SERVER}:8000\"\ncert = {cert:?}\nkey = {key:?}\nclient_ca = {ca:?}\nnames = [\"a client\"]
[server.http_proxy]\nlisten = \"{SERVER}:8080\"\nauth = \"none\"
[server.http]\nlisten_ip = \"{SERVER}\"\nports = {{ \"7080\" = \"127.0.0.1:7777\" }}
[server.https]\nlisten_ip = \"{SERVER}\"\nports = {{ \"7443\" = \"127.0.0.1:7777\" }}\ncert = {cert:?}\nkey = {key:?}
[server.direct]\ntargets = [\"0.0.0.0/0:*\", \"[::/0]:*\"]\n"
        ),
    );
    let _passes_through = network.server(
        OTHER_SERVER,
        &format!(
            "[server.https]\nmode = \"passthrough\"\nlisten_ip = \"{OTHER_SERVER}\"\nauth = \"none\"
ports = {{ \"7443\" = \"127.0.0.1:7777\" }}
[server.direct]\ntargets = [\"0.0.0.0/0:*\", \"[::/0]:*\"]\n"
        ),
    );
    define_names(&network);
    let probes = PacketCounter::start(&network);
    for (front, method) in [
        (format!("TCP:{SERVER}:2222"), "CONNECT "),
        (format!("OPENSSL:{SERVER}:8000,{tls}"), "CONNECT "),
        (format!("TCP:{SERVER}:8080"), "CONNECT "),
        (format!("TCP:{SERVER}:8080"), "GET http://"),
    ] {
        let request_status_line = |target: &str| {
            request_status_line(&network.cloud, &front, &format!("{method}{target}:7777"), target)
        };
        for target in ADDRESSES.iter().chain(&NAMES) {
            let output = request_status_line(target);
            assert!(output.starts_with("HTTP/1.1 403 "), "{front}: {method}{target}: {output}");
        }
        probes.none(&front);
        // Permitted targets are counted.
        assert!(request_status_line("other.test").contains("refused the connection"));
        probes.some();
    }
    // Ports that map to a port of the requested node never dial on their own: an address is not a node name there,
    // and a name is either a node's or unknown.
    for front in [format!("TCP:{SERVER}:7080"), format!("OPENSSL:{SERVER}:7443,{tls}")] {
        for target in ADDRESSES.iter().chain(&NAMES).chain(&["other.test"]) {
            let output = request_status_line(&network.cloud, &front, "GET /", target);
            let no_node = format!("HTTP/1.1 502 node {target} is not connected");
            assert!(
                output.starts_with("HTTP/1.1 421 ") || output.starts_with(&no_node),
                "{front}: {target}: {output}"
            );
        }
        probes.none(&front);
    }
    // In TLS, addresses are not valid names, and only some of these number forms are.
    let away = "alert internal error";
    let numbers = (&ADDRESSES[..], &["unrecognized name", "unexpected eof", away][..]);
    // No node is named localhost.
    for (names, alerts) in [numbers, (&NAMES, &["unrecognized name", away])] {
        for name in names.iter().map(|name| name.trim_matches(['[', ']'])) {
            let front = format!("OPENSSL:{OTHER_SERVER}:7443,verify=0,snihost={name}");
            let output = network.try_sh(&format!("timeout 60 socat -u '{front}' STDOUT"));
            let is_logged = alerts.iter().any(|alert| output.stderr.contains(alert));
            assert!(is_logged && output.stdout.is_empty(), "{name}: {output:?}");
        }
    }
    probes.none("passthrough");
}

#[test]
fn no_packet_is_sent_to_targets_that_a_server_must_not_dial_for_edges() {
    let Some(network) = Network::start(1).filter(|_| are_installed(&["socat"])) else { return };
    let _server = network
        .server(SERVER, "[server.edge_access]\ntargets = [\"0.0.0.0/0:*\", \"[::/0]:*\"]\nnodes = [\"*\"]\n");
    let _edge = network.edge(1, SERVER, "[edge.http_proxy]\nlisten = \"127.0.0.1:8080\"\n");
    define_names(&network);
    let probes = PacketCounter::start(&network);
    for method in ["CONNECT ", "GET http://"] {
        let request_status_line = |target: &str| {
            request_status_line(
                &network.edges[0],
                "TCP:127.0.0.1:8080",
                &format!("{method}{target}:7777"),
                target,
            )
        };
        for target in ADDRESSES.iter().chain(&NAMES) {
            let (output, own) = (request_status_line(target), *target == "localhost");
            let status = if own { "HTTP/1.1 421 " } else { "HTTP/1.1 403 " };
            assert!(output.starts_with(status), "{method}{target}: {output}");
        }
        probes.none(method);
        assert!(request_status_line("other.test").contains("refused the connection"));
        probes.some();
    }
}

#[test]
fn other_targets_are_dialled_only_for_egress_clients_with_a_certificate() {
    let Some(network) = Network::start(1).filter(|_| are_installed(&["socat"])) else { return };
    let place = &network.place;
    let Files { ca, cert, key } = &place.files;
    let tls = client(place, "system:kube-apiserver");
    let egress = format!("[server.egress]\ncert = {cert:?}\nkey = {key:?}\n");
    let _server = network.server(
        SERVER,
        &format!(
            "[server.connect]\nlisten = \"{SERVER}:2222\"\nauth = \"none\"
[server.http_proxy]\nlisten = \"{SERVER}:8080\"\nauth = \"none\"
{egress}listen = \"{SERVER}:8000\"\nclient_ca = {ca:?}\nnames = [\"system:*\"]\n"
        ),
    );
    let _without = network.server(OTHER_SERVER, &format!("{egress}listen = \"{OTHER_SERVER}:8000\"\n"));
    define_names(&network);
    let target = format!("TCP-LISTEN:7777,bind={OTHER_SERVER},fork,reuseaddr");
    let mut socat = network.cloud.command("socat");
    let _target = Running::start("target", place.path(), socat.args([&target, "EXEC:cat"]));
    let probes = PacketCounter::start(&network);
    for (front, method) in [
        (format!("TCP:{SERVER}:2222"), "CONNECT "),
        (format!("TCP:{SERVER}:8080"), "CONNECT "),
        (format!("TCP:{SERVER}:8080"), "GET http://"),
        (format!("OPENSSL:{OTHER_SERVER}:8000,{tls}"), "CONNECT "),
    ] {
        for (host, status) in [(OTHER_SERVER, "421"), ("other.test", "502")] {
            let output = request_status_line(&network.cloud, &front, &format!("{method}{host}:7777"), host);
            assert!(output.starts_with(&format!("HTTP/1.1 {status} ")), "{front}: {method}{host}: {output}");
        }
    }
    probes.none("clients without a certificate");
    let front = format!("OPENSSL:{SERVER}:8000,{tls}");
    for host in [OTHER_SERVER, "other.test"] {
        wait_until(&format!("{host} is reachable"), TIMEOUT, || {
            request_status_line(&network.cloud, &front, &format!("CONNECT {host}:7777"), host)
                .starts_with("HTTP/1.1 200 ")
        });
    }
    probes.some();
}

/// Returns a client certificate and the CA of the servers, as options of socat.
fn client(place: &TestDir, name: &str) -> String {
    let (cert, key) = (place.path().join("client.crt"), place.path().join("client.key"));
    place.authority.0.client(name).unwrap().write(&cert, &key).unwrap();
    format!("cert={},key={},cafile={}", cert.display(), key.display(), place.files.ca.display())
}

/// Defines the names of [`NAMES`] and a permitted one, and waits until they resolve.
fn define_names(network: &Network) {
    let hosts = "127.0.0.1 loop.test\n::1 loop6.test\n169.254.169.254 meta.test\n0.0.0.0 any.test\n";
    let file = network.place.path().join("hosts");
    std::fs::write(file, format!("{hosts}{OTHER_SERVER} other.test\n")).unwrap();
    wait_until("names resolve", TIMEOUT, || {
        network.try_sh("getent ahosts any.test && getent ahosts other.test").status.success()
    });
}

/// Sends a request to a listener from that machine, and returns the status line of the response.
fn request_status_line(machine: &Machine, front: &str, request: &str, host: &str) -> String {
    let head = format!("{request} HTTP/1.1\\r\\nHost: {host}:7777\\r\\n\\r\\n");
    // Keep the input open: a client that hangs up gets no response.
    let line = format!(
        "coproc socat - {front}; printf '{head}' >&${{COPROC[1]}}
        read -r -t 60 line <&${{COPROC[0]}}; kill $COPROC_PID; echo \"$line\""
    );
    let mut bash = machine.command("bash");
    run_command("bash", bash.args(["-c", &line]), None, 6 * TIMEOUT).stdout
}

/// Counts the packets that the cloud sends to port 7777.
struct PacketCounter<'a>(&'a Network);

impl<'a> PacketCounter<'a> {
    fn start(network: &'a Network) -> Self {
        network.cloud.sh("nft add table inet seen; nft add counter inet seen probes
            nft add chain inet seen output '{ type filter hook output priority 0; }'
            nft add rule inet seen output tcp dport 7777 counter name probes");
        Self(network)
    }

    /// Fails the test if there were any packets.
    fn none(&self, of: &str) {
        let counted = self.0.cloud.sh("nft list counter inet seen probes");
        assert!(counted.contains("packets 0 "), "{of}: {counted}");
    }

    /// Fails the test if there were no packets, and resets the counter.
    fn some(&self) {
        let counted = self.0.cloud.sh("nft list counter inet seen probes; nft reset counters >/dev/null");
        assert!(!counted.contains("packets 0 "), "{counted}");
    }
}

/// Addresses in all spellings, including forms of 127.0.0.1 that only some resolvers accept.
const ADDRESSES: [&str; 19] = [
    "127.0.0.1",
    "127.8.8.8",
    "0.0.0.0",
    "169.254.169.254",
    "168.63.129.16",
    "100.100.100.200",
    "224.0.0.1",
    "255.255.255.255",
    "[::1]",
    "[::]",
    "[::ffff:127.0.0.1]",
    "[::ffff:169.254.169.254]",
    "[fd00:ec2::254]",
    "[fe80::1]",
    "2130706433",
    "0177.0.0.1",
    "0x7f.0.0.1",
    "127.1",
    "0x7f000001",
];

/// Names that resolve to such addresses.
const NAMES: [&str; 5] = ["localhost", "loop.test", "loop6.test", "meta.test", "any.test"];
