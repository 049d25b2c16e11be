//! What a pod never dials itself, however it is spelt, whoever asks and whatever its config allows: not one packet
//! leaves.

use crate::certificates::Files;
use crate::network::{Network, OTHER_POD, POD};
use crate::parts::have;
use crate::process::PATIENCE;
use crate::wait::wait_until;

#[test]
fn not_a_packet_leaves_for_what_a_pod_must_not_dial() {
    let Some(network) = Network::start(1).filter(|_| have(&["socat"])) else { return };
    let dir = network.place.path();
    let (client_cert, client_key) = (dir.join("client.crt"), dir.join("client.key"));
    network.place.authority.0.client("a client").unwrap().write(&client_cert, &client_key).unwrap();
    let Files { ca, cert, key } = &network.place.files;
    let _pod = network.pod(
        POD,
        &format!(
            "[mode.cloud.ssh]\nlisten = \"{POD}:2222\"\nauth = \"none\"
[mode.cloud.egress]\nlisten = \"{POD}:8000\"\ncert = {cert:?}\nkey = {key:?}\nclient_ca = {ca:?}
[mode.cloud.http_proxy]\nlisten = \"{POD}:8080\"\nauth = \"none\"
[mode.cloud.direct]\ntargets = [\"0.0.0.0/0:*\", \"[::/0]:*\"]\n"
        ),
    );
    let hosts = "127.0.0.1 loop.test\n::1 loop6.test\n169.254.169.254 meta.test\n0.0.0.0 any.test\n";
    std::fs::write(dir.join("hosts"), format!("{hosts}{OTHER_POD} other.test\n")).unwrap();
    network.cloud.sh("nft add table inet seen; nft add counter inet seen probes
        nft add chain inet seen output '{ type filter hook output priority 0; }'
        nft add rule inet seen output tcp dport 7777 counter name probes");
    wait_until("names lead to addresses", PATIENCE, || {
        network.tries("getent ahosts any.test && getent ahosts other.test").status.success()
    });
    let unseen = || network.cloud.sh("nft list counter inet seen probes").contains("packets 0 ");
    for (front, method) in [
        (format!("TCP:{POD}:2222"), "CONNECT "),
        (format!("OPENSSL:{POD}:8000,cert={client_cert:?},key={client_key:?},cafile={ca:?}"), "CONNECT "),
        (format!("TCP:{POD}:8080"), "CONNECT "),
        (format!("TCP:{POD}:8080"), "GET http://"),
    ] {
        let ask = |target: &str| {
            let head = format!("{method}{target}:7777 HTTP/1.1\\r\\nHost: {target}:7777\\r\\n\\r\\n");
            // Its input stays open: who hangs up is not answered.
            network.sh(&format!(
                "coproc socat - {front}; printf '{head}' >&${{COPROC[1]}}
                read -r -t 20 line <&${{COPROC[0]}}; kill $COPROC_PID; echo \"$line\""
            ))
        };
        for target in ADDRESSES {
            let said = ask(target);
            assert!(said.starts_with("HTTP/1.1 403 "), "{front}: {method}{target}: {said}");
        }
        for name in NAMES {
            let said = ask(name);
            assert!(said.starts_with("HTTP/1.1 502 "), "{front}: {method}{name}: {said}");
        }
        assert!(unseen(), "{front}");
        // What may be dialled is seen.
        assert!(ask("other.test").contains("refused the connection"));
        assert!(!unseen());
        network.cloud.sh("nft reset counters");
    }
}

/// Addresses in all spellings, also of 127.0.0.1 as only some resolvers read it.
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

/// Names that lead to such.
const NAMES: [&str; 5] = ["localhost", "loop.test", "loop6.test", "meta.test", "any.test"];
