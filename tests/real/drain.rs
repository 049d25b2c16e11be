//! Graceful shutdown: a process that stops first lets running ssh sessions end.

use std::io::Write;
use std::process::{ChildStdin, Command};
use std::time::Duration;

use crate::parts::are_installed;
use crate::process::{Running, TIMEOUT, run};
use crate::ssh::helper;
use crate::sshd::Sshd;
use crate::tunnel::Pair;

#[test]
fn a_server_that_stops_lets_an_ssh_session_end() {
    let Some((sshd, mut pair)) = ready() else { return };
    let (mut ssh, mut input) = session(&sshd, &pair);
    pair.cloud.process.terminate();
    pair.cloud.process.wait_for_log("draining");
    let args = format!("-X connect -x 127.0.0.1:{} node1 {}", pair.cloud.connect, sshd.port);
    let output = run("nc.openbsd", &args.split(' ').collect::<Vec<_>>(), None, TIMEOUT);
    assert!(!output.status.success() && output.stdout.is_empty(), "no new session: {output:?}");
    ends_well(&mut ssh, &mut input);
    assert_eq!(pair.cloud.process.wait_for_exit(SOON).code(), Some(0));
}

#[test]
fn an_edge_that_stops_lets_an_ssh_session_end() {
    let Some((sshd, mut pair)) = ready() else { return };
    let (mut ssh, mut input) = session(&sshd, &pair);
    pair.edge.process.terminate();
    pair.edge.process.wait_for_log("draining");
    ends_well(&mut ssh, &mut input);
    assert_eq!(pair.edge.process.wait_for_exit(SOON).code(), Some(0));
}

#[test]
fn a_second_signal_ends_the_server_at_once() {
    let Some((sshd, mut pair)) = ready() else { return };
    let (mut ssh, _input) = session(&sshd, &pair);
    pair.cloud.process.terminate();
    pair.cloud.process.wait_for_log("draining");
    pair.cloud.process.terminate();
    assert_eq!(pair.cloud.process.wait_for_exit(SOON).code(), Some(0));
    assert_eq!(ssh.wait_for_exit(TIMEOUT).code(), Some(255), "ssh reports that its connection was lost");
}

#[test]
fn a_second_signal_ends_the_edge_at_once() {
    let Some((sshd, mut pair)) = ready() else { return };
    let (mut ssh, _input) = session(&sshd, &pair);
    pair.edge.process.terminate();
    pair.edge.process.wait_for_log("draining");
    pair.edge.process.terminate();
    assert_eq!(pair.edge.process.wait_for_exit(SOON).code(), Some(0));
    assert_eq!(ssh.wait_for_exit(TIMEOUT).code(), Some(255), "ssh reports that its connection was lost");
}

#[test]
fn a_hangup_reloads_the_files_and_ends_nothing() {
    let mut pair = Pair::start();
    pair.cloud.process.wait_for_log("secret file is readable by every user");
    std::fs::write(pair.place.path().join("token"), "default:another\nnode1 no-colon\n").unwrap();
    for process in [&mut pair.cloud.process, &mut pair.edge.process] {
        process.hang_up();
        process.wait_for_log("SIGHUP");
        process.assert_running();
    }
    pair.cloud.process.wait_for_log("links ended: token revoked");
    pair.cloud.process.wait_for_log("the token differs from that of the default line");
    pair.cloud.process.assert_logged("error=it has no ':'");
    assert!(!pair.cloud.process.log().contains("no-colon"), "a bad line may hold a secret");
}

#[test]
fn processes_without_sessions_stop_at_once() {
    let mut pair = Pair::start();
    pair.edge.process.terminate();
    assert_eq!(pair.edge.process.wait_for_exit(SOON).code(), Some(0));
    pair.cloud.process.terminate();
    assert_eq!(pair.cloud.process.wait_for_exit(SOON).code(), Some(0));
}

fn ready() -> Option<(Sshd, Pair)> {
    are_installed(&["sshd", "ssh", "ssh-keygen", "nc.openbsd"]).then(|| (Sshd::start(), Pair::start()))
}

/// Starts an ssh session that ends after it has received a line.
fn session(sshd: &Sshd, pair: &Pair) -> (Running, ChildStdin) {
    let mut command = Command::new("ssh");
    command.args(sshd.options(&helper("nc.openbsd", pair.cloud.connect)));
    command.args(["node1", "echo begun; read line; echo told $line; exit 5"]);
    let (mut ssh, input) = Running::start_with_stdin("ssh", pair.place.path(), &mut command);
    ssh.wait_for_log("begun");
    (ssh, input)
}

fn ends_well(ssh: &mut Running, input: &mut ChildStdin) {
    ssh.assert_running();
    input.write_all(b"a line\n").unwrap();
    assert_eq!(ssh.wait_for_exit(TIMEOUT).code(), Some(5));
    assert!(ssh.log().contains("told a line"), "{}", ssh.log());
}

/// Much shorter than the 25 s that a process waits for its sessions.
const SOON: Duration = Duration::from_secs(10);
