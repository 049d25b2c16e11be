//! Programs of a later release, which speak version 5 of the protocol too or alone, with programs of this one.

use std::net::SocketAddr;

use crate::parts::{free_port, loopback, page};
use crate::process::{Running, TIMEOUT, run};
use crate::tunnel::{PROGRAM, ServerProcess, TestDir};
use crate::wait::wait_until;

/// Two servers, peers of each other, and an edge that dials the first one.
struct Programs {
    servers: [ServerProcess; 2],
    edge: Running,
}

impl Programs {
    /// Starts servers of these versions, and an edge of those of the second.
    fn start(place: &TestDir, versions: [&str; 2]) -> Self {
        let at = [(); 2].map(|()| loopback(free_port()));
        let server = |number: usize| {
            let peers = format!("[server.peers]\naddresses = [\"{}\"]\n", at[1 - number]);
            let (name, env) = (format!("server{number}"), [(VERSIONS, versions[number])]);
            ServerProcess::launch(place, (&name, at[number]), &peers, &env, &[])
        };
        let servers = [server(0), server(1)];
        Self { edge: edge(place, at[0], versions[1]), servers }
    }

    /// Returns the logs of the first server, and of those that dial it, with quotes as they are in texts.
    fn logs(&self) -> [String; 3] {
        let [first, second] = &self.servers;
        [&first.process, &second.process, &self.edge].map(|process| process.log().replace('\\', ""))
    }
}

fn edge(place: &TestDir, server: SocketAddr, versions: &str) -> Running {
    let config = place.edge_config("node1", &server.to_string(), free_port());
    place.tunnel(("edge", "edge"), &config, &[(VERSIONS, versions)], &[])
}

#[test]
fn servers_and_edges_use_the_highest_version_that_both_speak() {
    if !cfg!(debug_assertions) {
        return;
    }
    for (versions, common) in
        [(["4-5", "4"], 4), (["4", "4-5"], 4), (["4-5"; 2], 5), (["5", "4-5"], 5), (["4-5", "5"], 5)]
    {
        let place = TestDir::new();
        let request = place.path().join("request");
        std::fs::write(&request, "GET / HTTP/1.0\r\n\r\n").unwrap();
        let mut programs = Programs::start(&place, versions);
        programs.servers.iter_mut().for_each(ServerProcess::ready);
        // The client's server speaks with the peer, which speaks with the edge.
        let server = format!("--server=http://127.0.0.1:{}", programs.servers[1].connect);
        let target = format!("node1:{}", page());
        wait_until(&format!("{versions:?}: the second server reaches the node"), TIMEOUT, || {
            let got = run(PROGRAM, &["connect", &server, &target], Some(&request), TIMEOUT);
            got.stdout.ends_with("from the node")
        });
        let logs = programs.logs().concat();
        for line in logs.lines().filter(|line| line.contains("protocol=")) {
            assert!(line.contains(&format!("protocol={common}")), "{versions:?}: {line}");
        }
        for end in ["call received", "call answered"] {
            assert!(logs.contains(end), "{versions:?}: {logs}");
        }
    }
}

#[test]
fn programs_without_a_common_version_refuse_each_other_and_each_log_has_both_versions() {
    if !cfg!(debug_assertions) {
        return;
    }
    for versions in [["5", "4"], ["4", "5"], ["4-5", "6-7"]] {
        let place = TestDir::new();
        let programs = Programs::start(&place, versions);
        let refused = |own: usize| {
            let (own, remote) = (versions[own], versions[1 - own]);
            format!(
                "the remote speaks version \"{remote}\" of the protocol, and this program version {own}; update the \
                 end with the lower one"
            )
        };
        let expected = [refused(0), refused(1), refused(1)];
        wait_until(&format!("{versions:?}: all three log why"), TIMEOUT, || {
            programs.logs().iter().zip(&expected).all(|(log, text)| log.contains(text))
        });
        assert!(programs.logs().iter().all(|log| !log.contains("protocol=")), "{versions:?}");
    }
}

/// The versions that a debug build of the program speaks instead of its own.
const VERSIONS: &str = "TUNNEL_TEST_VERSIONS";
