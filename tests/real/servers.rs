//! Several servers: copies and shells continue while connections break, servers are killed and replaced, and nodes
//! move.

use std::io::Write;
use std::process::{ChildStdin, Command};
use std::sync::atomic::{AtomicBool, Ordering::SeqCst};
use std::time::Duration;

use tokio::time::Instant;

use crate::fleet::{Fleet, Line};
use crate::parts::are_installed;
use crate::process::{Running, TIMEOUT, run};
use crate::ssh::{goes_both_ways, helper};
use crate::sshd::Sshd;
use crate::tunnel::Edge;
use crate::wait::wait_until;

/// A shell on the node that repeats each line.
struct Shell {
    ssh: Running,
    input: ChildStdin,
    lines_sent: usize,
}

impl Shell {
    fn start(fleet: &Fleet, sshd: &Sshd, server: usize) -> Self {
        let mut command = Command::new("ssh");
        command.args(sshd.options(&helper("nc.openbsd", fleet.servers[server].connect)));
        command.args(["node1", "echo begun; while read line; do echo heard $line; done"]);
        let (mut ssh, input) = Running::start_with_stdin("ssh", fleet.place.path(), &mut command);
        ssh.wait_for_log("begun");
        Self { ssh, input, lines_sent: 0 }
    }

    /// Sends a line, waits until it comes back, and returns how long that took.
    fn echo_time(&mut self) -> Duration {
        let started = Instant::now();
        self.lines_sent += 1;
        writeln!(self.input, "line {}", self.lines_sent).unwrap();
        let expected = format!("heard line {}", self.lines_sent);
        wait_until(&expected, 2 * TIMEOUT, || {
            self.ssh.assert_running();
            self.ssh.log().contains(&expected)
        });
        started.elapsed()
    }
}

fn ready(registry: &str) -> Option<(Sshd, Fleet, Line, Edge)> {
    if !are_installed(&["sshd", "ssh", "scp", "ssh-keygen", "nc.openbsd"]) {
        return None;
    }
    let mut fleet = Fleet::start(registry);
    let line = Line::to(fleet.at[1]);
    let edge = fleet.node(&line, 1);
    Some((Sshd::start(), fleet, line, edge))
}

#[test]
fn a_copy_survives_twenty_moves_between_servers() {
    let Some((sshd, fleet, line, _edge)) = ready("") else { return };
    let mut shell = Shell::start(&fleet, &sshd, 0);
    let done = AtomicBool::new(false);
    let cuts = std::thread::scope(|scope| {
        let cutting = scope.spawn(|| {
            let mut cuts = 0;
            // 240 MB are transferred, some of it twice or three times, so that data follows even the last cut.
            while !done.load(SeqCst) && cuts < 20 {
                let before = line.carried();
                let enough = || line.carried() >= before + 8_000_000 || done.load(SeqCst);
                wait_until("8 MB more", Duration::from_secs(60), enough);
                line.lead_to(fleet.at[cuts % 3]);
                if cuts % 10 == 4 {
                    line.fall_silent();
                } else {
                    line.reset();
                }
                cuts += 1;
            }
            cuts
        });
        goes_both_ways(&sshd, fleet.servers[0].connect, 120_000_000);
        done.store(true, SeqCst);
        cutting.join().unwrap()
    });
    assert_eq!(cuts, 20, "all cuts happen during the copies");
    shell.echo_time();
}

#[test]
fn a_shell_continues_when_the_server_of_the_link_is_killed() {
    let Some((sshd, mut fleet, line, _edge)) = ready("") else { return };
    let mut shell = Shell::start(&fleet, &sshd, 0);
    shell.echo_time();
    line.lead_to(fleet.at[2]);
    fleet.servers[1].process.kill();
    let pause = shell.echo_time();
    assert!(pause < Duration::from_secs(20), "{pause:?}");
    fleet.servers[2].wait_for_node("node1");
    sshd.works_through(&helper("nc.openbsd", fleet.servers[0].connect));
    sshd.works_through(&helper("nc.openbsd", fleet.servers[2].connect));
}

#[test]
fn a_rolling_restart_refuses_no_session_and_aborts_none_of_other_servers() {
    let Some((sshd, mut fleet, line, _edge)) = ready("") else { return };
    let (mut done, mut opened) = (AtomicBool::new(false), 0);
    let lead = |fleet: &Fleet, server: usize| line.lead_to(fleet.at[server]);
    for server in 0..3 {
        let (front, next) = ((server + 1) % 3, (server + 2) % 3);
        let mut shell = Shell::start(&fleet, &sshd, front);
        shell.echo_time();
        // A Service routes only to servers that are ready.
        lead(&fleet, next);
        *done.get_mut() = false;
        fleet.servers[server].process.terminate();
        let proxies = [fleet.servers[front].connect, fleet.servers[next].connect];
        opened += std::thread::scope(|scope| {
            let load = scope.spawn(|| {
                let mut opened = 0;
                while !done.load(SeqCst) {
                    sshd.works_through(&helper("nc.openbsd", proxies[opened % 2]));
                    opened += 1;
                }
                opened
            });
            assert_eq!(fleet.servers[server].process.wait_for_exit(STOPPED).code(), Some(0));
            fleet.replace(server);
            shell.echo_time();
            done.store(true, SeqCst);
            load.join().unwrap()
        });
        shell.echo_time();
    }
    assert!(opened >= 6, "{opened} sessions under load");
}

#[test]
fn frozen_edges_and_servers_are_detected() {
    let Some((sshd, mut fleet, line, mut edge)) = ready("") else { return };
    let mut shell = Shell::start(&fleet, &sshd, 0);
    shell.echo_time();
    line.lead_to(fleet.at[2]);
    let started = Instant::now();
    fleet.servers[1].process.freeze();
    shell.echo_time();
    assert!(started.elapsed() < FROZEN, "{:?}", started.elapsed());
    fleet.servers[2].wait_for_node("node1");
    let started = Instant::now();
    edge.process.freeze();
    let is_disconnected = || {
        let output = run("curl", &["-s", &fleet.servers[2].page("/cloud/healthz")], None, TIMEOUT);
        !output.stdout.contains("node1")
    };
    wait_until("the frozen edge is disconnected", FROZEN, is_disconnected);
    assert!(started.elapsed() < FROZEN);
    edge.process.thaw();
    shell.echo_time();
}

/// Shorter than the 25 s that a server waits for its sessions.
const STOPPED: Duration = Duration::from_secs(20);

/// Time until a frozen process is detected: 15 s, plus some time for a busy machine.
const FROZEN: Duration = Duration::from_secs(35);
