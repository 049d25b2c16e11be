//! A NAT forgets one connection: its packets are lost, and new connections work. Each end is a separate machine, and
//! nftables drops the packets of one flow by its source port. `SILENT_TIMES=20` sets how often each cut is repeated.
#![expect(clippy::print_stdout, reason = "the times are worth reading")]

use std::io::{Read, Write};
use std::process::{Child, Stdio};
use std::sync::mpsc::{Receiver, channel};
use std::thread;
use std::time::Duration;

use tokio::time::Instant;

use crate::network::Machine;
use crate::parts::{all, are_installed, env_var, is_root};
use crate::process::{Running, TIMEOUT, run_command};
use crate::tunnel::{PROGRAM, TestDir};
use crate::wait::wait_until;

#[test]
fn a_session_continues_when_a_nat_forgets_the_connection_of_an_edge() {
    let Some(world) = all().then(World::start).flatten() else { return };
    let (_server, _echo) = (world.server(&world.cloud, CLOUD, &[]), world.echo());
    let _edge = world.edge(CLOUD);
    world.cut_often(&world.node, &[DOWN, UP, &[UP[0], DOWN[0]]]);
}

#[test]
fn a_session_continues_when_a_nat_forgets_a_connection_between_servers() {
    let Some(world) = all().then(World::start).flatten() else { return };
    let (_second, _echo) = (world.server(&world.node, NODE, &[NODE]), world.echo());
    let _first = world.server(&world.cloud, CLOUD, &[NODE]);
    let _edge = world.edge(NODE);
    world.cut_often(&world.cloud, &[DOWN, UP, &[UP[0], DOWN[0]]]);
}

#[test]
fn an_edge_probes_its_link_when_addresses_or_the_default_route_change() {
    let Some(world) = World::start() else { return };
    let _server = world.server(&world.cloud, CLOUD, &[]);
    let mut edge = world.edge(CLOUD);
    let route_changes = |edge: &Running| edge.log().matches("default route changed").count();
    for change in [
        "ip addr add 10.78.0.3/24 dev wan",
        &format!("ip route add default via {CLOUD}"),
        "ip addr del 10.78.0.3/24 dev wan",
    ] {
        let before = route_changes(&edge);
        world.node.sh(change);
        wait_until(&format!("the edge notices: {change}"), TIMEOUT, || {
            edge.assert_running();
            route_changes(&edge) > before
        });
    }
}

/// Two machines with a cable between them.
pub(crate) struct World {
    pub(crate) place: TestDir,
    pub(crate) cloud: Machine,
    pub(crate) node: Machine,
}

/// A client's session. The received bytes arrive in the channel.
pub(crate) struct Session {
    client: Child,
    received: Receiver<u8>,
}

impl World {
    pub(crate) fn start() -> Option<Self> {
        if !are_installed(&["nft", "ip", "ss", "nsenter", "unshare", "curl", "socat", "bash"]) || !is_root() {
            return None;
        }
        let place = TestDir::serving(&[CLOUD, NODE]);
        let (cloud, node) = (Machine::new(), Machine::new());
        cloud.cable(("wan", &format!("{CLOUD}/24")), &node, ("wan", &format!("{NODE}/24")));
        Some(Self { place, cloud, node })
    }

    /// Starts a server on a machine, with these peers or without any.
    pub(crate) fn server(&self, machine: &Machine, ip: &str, others: &[&str]) -> Running {
        let mut config = self.place.cloud_config(format!("{ip}:9000").parse().unwrap(), ADMIN);
        config += &format!("[server.connect]\nlisten = \"127.0.0.1:{CONNECT}\"\nauth = \"none\"\n");
        if !others.is_empty() {
            let all: Vec<_> = others.iter().map(|other| format!("{other}:9000")).collect();
            config += &format!("[server.peers]\naddresses = {all:?}\n");
        }
        self.tunnel(machine, "server", &format!("pod-{ip}"), &config, ADMIN)
    }

    /// Starts the edge of `node1` on the node, which dials that server.
    pub(crate) fn edge(&self, server: &str) -> Running {
        let config = self.place.edge_config("node1", &format!("{server}:9000"), EDGE_ADMIN);
        self.tunnel(&self.node, "edge", "edge", &config, EDGE_ADMIN)
    }

    fn tunnel(&self, machine: &Machine, mode: &str, name: &str, config: &str, admin: u16) -> Running {
        let mut running =
            self.place.tunnel_as(machine.command(PROGRAM), (mode, name), config, &[], &["--verbosity=2"]);
        wait_until(&format!("{name} is ready"), TIMEOUT, || {
            running.assert_running();
            let mut curl = machine.command("curl");
            curl.args(["-sf", "-m", "2", &format!("http://127.0.0.1:{admin}/readyz")]);
            run_command("curl", &mut curl, None, TIMEOUT).status.success()
        });
        running
    }

    /// Starts a server on the node that echoes its input.
    pub(crate) fn echo(&self) -> Running {
        let mut command = self.node.command("socat");
        command.args(["TCP-LISTEN:7,bind=127.0.0.1,fork,reuseaddr,nodelay", "EXEC:cat"]);
        Running::start("echo", self.place.path(), &mut command)
    }

    pub(crate) fn session(&self) -> Session {
        let mut bash = self.cloud.command("bash");
        bash.args(["-c", &format!("exec 3<>/dev/tcp/127.0.0.1/{CONNECT}; cat <&3 & exec cat >&3")]);
        let mut client = bash.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap();
        let (sender, received) = channel();
        let mut out = client.stdout.take().unwrap();
        thread::spawn(move || {
            let mut byte = [0];
            while out.read_exact(&mut byte).is_ok() && sender.send(byte[0]).is_ok() {}
        });
        let mut session = Session { client, received };
        session
            .assert_answer("CONNECT node1:7 HTTP/1.1\r\n\r\n", "HTTP/1.1 200 Connection established\r\n\r\n");
        session
    }

    /// Drops the packets of the connection from a machine to a server, in one direction, the other and both. Measures
    /// the time until bytes arrive again: with data sent right after the cut, and after a pause.
    fn cut_often(&self, dials: &Machine, directions: &[&[&str]]) {
        let times = env_var("SILENT_TIMES").map_or(1, |times| times.parse().unwrap());
        let mut session = self.session();
        dials.sh("nft add table inet silent
            nft add chain inet silent output '{ type filter hook output priority 0; }'
            nft add chain inet silent input '{ type filter hook input priority 0; }'");
        for drops in directions {
            for pause in [Duration::from_millis(20), PAUSE] {
                let took: Vec<_> = (0..times).map(|_| Self::cut(dials, drops, pause, &mut session)).collect();
                let worst = took.iter().max().unwrap();
                println!("{drops:?}, data after {pause:?}: worst {worst:.2?} of {took:.2?}");
                assert!(*worst < SOON, "{drops:?}: {took:?}");
            }
        }
    }

    fn cut(dials: &Machine, drops: &[&str], pause: Duration, session: &mut Session) -> Duration {
        let calm = Instant::now();
        while calm.elapsed() < CALM {
            session.assert_answer("x", "x");
            thread::sleep(Duration::from_millis(50));
        }
        let port = dials.sh("ss -tnH state established dport = :9000 | awk '{ print $3 }' | sed 's/.*://'");
        let ports: Vec<_> = port.split_whitespace().collect();
        for port in &ports {
            for rule in drops {
                dials.sh(&format!("nft add rule inet silent {}", rule.replace("PORT", port)));
            }
        }
        let started = Instant::now();
        if pause < CALM {
            session.assert_answer("after", "after");
            return started.elapsed();
        }
        thread::sleep(pause);
        let started = Instant::now();
        session.assert_answer("after", "after");
        started.elapsed()
    }
}

impl Session {
    pub(crate) fn assert_answer(&mut self, text: &str, answer: &str) {
        self.client.stdin.as_mut().unwrap().write_all(text.as_bytes()).unwrap();
        let bytes: Vec<u8> = answer
            .bytes()
            .map(|_| self.received.recv_timeout(TIMEOUT).unwrap_or_else(|_| panic!("no answer to {text:?}")))
            .collect();
        assert_eq!(String::from_utf8_lossy(&bytes), answer);
    }
}

impl Drop for Session {
    fn drop(&mut self) {
        let _ = self.client.kill();
        let _ = self.client.wait();
    }
}

/// Rules on the machine that has dialled, which drop the packets of a connection by its port: sent ones and received
/// ones.
const UP: &[&str] = &["output tcp sport PORT drop"];
const DOWN: &[&str] = &["input tcp dport PORT drop"];
/// The addresses of the two machines.
pub(crate) const CLOUD: &str = "10.78.0.1";
pub(crate) const NODE: &str = "10.78.0.2";
/// Ports of each machine.
const ADMIN: u16 = 9010;
pub(crate) const EDGE_ADMIN: u16 = 9011;
const CONNECT: u16 = 2222;
/// Duration of normal traffic before each cut.
const CALM: Duration = Duration::from_secs(3);
/// Pause without traffic after a cut.
const PAUSE: Duration = Duration::from_secs(4);
/// Shorter than the 15 s after which an unresponsive link is closed in any case.
const SOON: Duration = Duration::from_secs(12);
