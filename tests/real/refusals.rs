//! Errors as users see them: the reason is in the only line that ssh's helpers print.

use crate::parts::{are_installed, free_port};
use crate::process::{ProcessOutput, TIMEOUT, run};
use crate::tunnel::Pair;
use crate::wait::wait_until;

#[test]
fn nc_shows_that_a_node_is_not_connected() {
    if !are_installed(&["nc.openbsd"]) {
        return;
    }
    let pair = Pair::start();
    let output = nc(pair.cloud.connect, "node9", 22);
    assert!(output.stderr.contains("502 node node9 is not connected"), "{output:?}");
}

#[test]
fn nc_shows_that_a_node_has_disconnected() {
    if !are_installed(&["nc.openbsd"]) {
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
    if !are_installed(&["nc.openbsd"]) {
        return;
    }
    let pair = Pair::start();
    let output = nc(pair.cloud.connect, "node1", free_port());
    assert!(output.stderr.contains("502 ") && output.stderr.contains("refused"), "{output:?}");
}

#[test]
fn other_ssh_helpers_exit_with_an_error_when_refused() {
    if !are_installed(&["ncat", "corkscrew", "socat", "connect-proxy"]) {
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
        let output = run(program, &args, None, TIMEOUT);
        assert_eq!(output.stdout, "", "{program}: {output:?}");
        // corkscrew and socat print the reason, ncat the code, connect-proxy nothing.
        match program {
            "ncat" => assert!(output.stderr.contains("502"), "{program}: {output:?}"),
            "connect-proxy" => assert!(!output.status.success(), "{program}: {output:?}"),
            _ => assert!(output.stderr.contains("node9 is not connected"), "{program}: {output:?}"),
        }
    }
}

/// ssh does not read HTTP: the user sees only messages that ssh itself prints.
#[test]
fn ssh_without_a_helper_gets_a_hint_to_use_proxy_command() {
    if !are_installed(&["ssh"]) {
        return;
    }
    let mut pair = Pair::start();
    let port = pair.cloud.connect.to_string();
    let output = run("ssh", &["-F", "none", "-o", "BatchMode=yes", "-p", &port, "127.0.0.1"], None, TIMEOUT);
    assert!(
        output.stderr.contains("this port accepts HTTP CONNECT; ssh needs -o ProxyCommand="),
        "{output:?}"
    );
    pair.cloud.process.wait_for_log("ssh client connected without a proxy command");
}

fn nc(proxy: u16, host: &str, port: u16) -> ProcessOutput {
    let args = format!("-X connect -x 127.0.0.1:{proxy} {host} {port}");
    run("nc.openbsd", &args.split(' ').collect::<Vec<_>>(), None, TIMEOUT)
}
