//! Errors as users see them: the reason is in the only line that ssh's helpers print.

use crate::parts::{free_port, have};
use crate::process::{ProcessOutput, TIMEOUT, run};
use crate::tunnel::Pair;
use crate::wait::wait_until;

#[test]
fn nc_shows_that_a_node_is_not_connected() {
    if !have(&["nc.openbsd"]) {
        return;
    }
    let pair = Pair::start();
    let said = nc(pair.cloud.connect, "node9", 22);
    assert!(said.stderr.contains("502 node node9 is not connected"), "{said:?}");
}

#[test]
fn nc_shows_that_a_node_has_disconnected() {
    if !have(&["nc.openbsd"]) {
        return;
    }
    let Pair { edge, cloud, place } = Pair::start();
    drop(edge);
    wait_until("the server reports that node1 is not connected", TIMEOUT, || {
        nc(cloud.connect, "node1", 22).stderr.contains("502 node node1 is not connected")
    });
    drop((cloud, place));
}

#[test]
fn nc_shows_that_the_target_refused_the_connection() {
    if !have(&["nc.openbsd"]) {
        return;
    }
    let pair = Pair::start();
    let said = nc(pair.cloud.connect, "node1", free_port());
    assert!(said.stderr.contains("502 ") && said.stderr.contains("refused"), "{said:?}");
}

#[test]
fn the_other_helpers_fail() {
    if !have(&["ncat", "corkscrew", "socat", "connect-proxy"]) {
        return;
    }
    let pair = Pair::start();
    let port = pair.cloud.connect;
    for (program, args) in [
        ("ncat", format!("--proxy-type http --proxy 127.0.0.1:{port} node9 22")),
        ("corkscrew", format!("127.0.0.1 {port} node9 22")),
        ("socat", format!("- PROXY:127.0.0.1:node9:22,proxyport={port}")),
        ("connect-proxy", format!("-H 127.0.0.1:{port} node9 22")),
    ] {
        let args: Vec<_> = args.split(' ').collect();
        let said = run(program, &args, None, TIMEOUT);
        assert_eq!(said.stdout, "", "{program}: {said:?}");
        // corkscrew and socat print the reason, ncat the code, connect-proxy nothing.
        match program {
            "ncat" => assert!(said.stderr.contains("502"), "{program}: {said:?}"),
            "connect-proxy" => assert!(!said.status.success(), "{program}: {said:?}"),
            _ => assert!(said.stderr.contains("node9 is not connected"), "{program}: {said:?}"),
        }
    }
}

/// ssh does not read HTTP: the user sees only messages that ssh itself prints.
#[test]
fn ssh_without_a_helper_gets_a_hint_to_use_proxy_command() {
    if !have(&["ssh"]) {
        return;
    }
    let mut pair = Pair::start();
    let port = pair.cloud.connect.to_string();
    let said = run("ssh", &["-F", "none", "-o", "BatchMode=yes", "-p", &port, "127.0.0.1"], None, TIMEOUT);
    assert!(said.stderr.contains("this port accepts HTTP CONNECT; ssh needs -o ProxyCommand="), "{said:?}");
    pair.cloud.process.says("ssh client connected without a proxy command");
}

fn nc(proxy: u16, host: &str, port: u16) -> ProcessOutput {
    let args = format!("-X connect -x 127.0.0.1:{proxy} {host} {port}");
    run("nc.openbsd", &args.split(' ').collect::<Vec<_>>(), None, TIMEOUT)
}
