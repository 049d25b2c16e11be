//! A user's laptop behind NAT: curl, nc and ssh through her proxy, and sessions that outlive her network, her sleep and
//! her server. `LAPTOP=full` makes the failures as long as in life.
#![expect(clippy::print_stdout, reason = "the times are worth reading")]

use std::fs::{self, File};
use std::io::{BufRead, BufReader, Write};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::SeqCst};
use std::sync::{Arc, mpsc};
use std::thread;
use std::time::Duration;

use tokio::time::Instant;

use crate::network::Machine;
use crate::parts::{are_installed, env_var, is_root};
use crate::process::{Running, TIMEOUT, run, run_command};
use crate::sshd::Sshd;
use crate::tunnel::{PROGRAM, TestDir, clear_environment};
use crate::users;
use crate::wait::{wait_for, wait_until};

/// Two servers, the node, and the laptop behind a NAT.
struct World {
    // Fields drop in order: processes before the files they use.
    servers: Vec<Running>,
    _edge: Running,
    sshd: Sshd,
    laptop: Machine,
    nat: Machine,
    node: Machine,
    cloud: Machine,
    place: TestDir,
}

impl World {
    fn start() -> Option<Self> {
        let programs =
            ["nft", "ip", "nsenter", "unshare", "curl", "busybox", "nc.openbsd", "sshd", "ssh", "scp"];
        if !are_installed(&programs) || !is_root() {
            return None;
        }
        let place = TestDir::serving(&SERVERS);
        let [laptop, nat, node, cloud] = std::array::from_fn(|_| Machine::new());
        let [first, second] = SERVERS;
        cloud.sh(&format!("ip addr add {first} dev lo; ip addr add {second} dev lo"));
        cloud.cable(("nat", "10.89.1.1/24"), &nat, ("wan", "10.89.1.2/24"));
        cloud.cable(("node", "10.89.3.1/24"), &node, ("wan", "10.89.3.2/24"));
        nat.cable(("home", "10.89.2.1/24"), &laptop, ("wifi", "10.89.2.10/24"));
        node.sh("ip route add default via 10.89.3.1");
        laptop.sh("ip route add default via 10.89.2.1");
        nat.sh("ip route add default via 10.89.1.1
            echo 1 > /proc/sys/net/ipv4/ip_forward
            nft add table ip nat
            nft add chain ip nat out '{ type nat hook postrouting priority srcnat; }'
            nft add rule ip nat out oifname wan masquerade
            nft add chain ip nat line '{ type filter hook forward priority 0; }'");
        prepare_home(&place);
        let servers = [(first, 9010), (second, 9011)];
        let servers: Vec<_> = servers.map(|server| start_server(&place, &cloud, server)).into();
        let config = place.edge_config("node1", &format!("{second}:9000"), 9010);
        let edge = start_tunnel(&place, &node, ("edge", "edge"), &config, 9010);
        let sshd = Sshd::start_on(&node);
        Some(Self { servers, _edge: edge, sshd, laptop, nat, node, cloud, place })
    }

    fn home(&self) -> PathBuf {
        self.place.path().join("home")
    }

    /// Returns a command of the laptop's user.
    fn on_laptop(&self, program: &str) -> Command {
        let mut command = clear_environment(self.laptop.command(program));
        command.env("HOME", self.home()).env_remove("XDG_CONFIG_HOME");
        command
    }

    fn proxy(&self) -> Running {
        let mut command = self.on_laptop(PROGRAM);
        let mut proxy = Running::start("proxy", self.place.path(), command.arg("proxy"));
        proxy.wait_for_log_of("socks5", "listening for clients");
        proxy
    }

    /// Returns the number of links of the laptop.
    fn links(&self) -> usize {
        self.laptop.sh("ss -tnH state established dport = :9000").lines().count()
    }

    /// Returns `tunnel ssh` to the node, with a link of its own unless `by_proxy` is true.
    fn ssh(&self, by_proxy: bool) -> Command {
        let mut command = self.on_laptop(PROGRAM);
        command.arg("ssh").args(by_proxy.then_some(BY_PROXY)).arg("node1").args(self.sshd.options("false"));
        command
    }
}

/// Runs a command on the node.
fn assert_login(name: &str, mut ssh: Command) {
    let output = run_command(name, ssh.arg("echo over $((6 * 7)) bridges; exit 7"), None, TIMEOUT);
    assert_eq!((output.stdout.as_str(), output.status.code()), ("over 42 bridges\n", Some(7)), "{output:?}");
}

/// Writes `client.toml` of alice's laptop.
fn prepare_home(place: &TestDir) {
    users::write_client_file(
        place,
        &place.path().join("home/.config/tunnel"),
        &SERVERS.map(|server| format!("{server}:9000")).each_ref().map(String::as_str),
    );
}

fn start_server(place: &TestDir, cloud: &Machine, (ip, admin): (&str, u16)) -> Running {
    let peers = SERVERS.map(|server| format!("{server}:9000"));
    let config = place.cloud_config(format!("{ip}:9000").parse().unwrap(), admin)
        + &format!("[server.peers]\naddresses = {peers:?}\n")
        + &users::tables(place, ["alice/laptop"], "rules = [{ users = [\"alice\"], nodes = [\"node1\"] }]");
    start_tunnel(place, cloud, ("server", ip), &config, admin)
}

fn start_tunnel(
    place: &TestDir,
    machine: &Machine,
    names: (&str, &str),
    config: &str,
    admin: u16,
) -> Running {
    let mut running = place.tunnel_as(machine.command(PROGRAM), names, config, &[], &["--verbosity=2"]);
    wait_until(&format!("{} is ready", names.1), TIMEOUT, || {
        running.assert_running();
        let mut curl = machine.command("curl");
        curl.args(["-sf", "-m", "2", &format!("http://127.0.0.1:{admin}/readyz")]);
        run_command("curl", &mut curl, None, TIMEOUT).status.success()
    });
    running
}

#[test]
fn curl_nc_and_ssh_reach_a_node_through_a_users_proxy_and_ssh_does_without() {
    let Some(world) = World::start() else { return };
    let site = world.place.path().join("site");
    fs::create_dir(&site).unwrap();
    fs::write(site.join("page"), "from the node").unwrap();
    let mut httpd = world.node.command("busybox");
    httpd.args(["httpd", "-f", "-p", "127.0.0.1:8080", "-h"]).arg(&site);
    let _httpd = Running::start("httpd", world.place.path(), &mut httpd);
    let mut proxy = world.proxy();
    for flags in [
        &["-x", "http://127.0.0.1:3128"][..],
        &["-p", "-x", "http://127.0.0.1:3128"],
        &["--socks5-hostname", "127.0.0.1:1080"],
    ] {
        let mut curl = world.on_laptop("curl");
        curl.args(["-sS", "--retry", "5", "--retry-all-errors"]).args(flags).arg("http://node1:8080/page");
        let output = run_command("curl", &mut curl, None, TIMEOUT);
        assert_eq!(output.stdout, "from the node", "{flags:?}: {output:?}");
    }
    for helper in ["nc.openbsd -X connect -x 127.0.0.1:3128 %h %p", "nc.openbsd -X 5 -x 127.0.0.1:1080 %h %p"]
    {
        let mut ssh = world.on_laptop("ssh");
        ssh.args(world.sshd.options(helper)).arg("node1");
        assert_login(helper, ssh);
    }
    assert_login("tunnel ssh by the proxy", world.ssh(true));
    let mut cat = Cat::start(&world, "killed", true);
    assert_eq!(world.links(), 1, "that of the proxy");
    assert_login("tunnel ssh next to the proxy", world.ssh(false));
    proxy.kill();
    wait_until("ssh ends", TIMEOUT, || cat.ssh.try_wait().unwrap().is_some());
    let message = fs::read_to_string(&cat.errors).unwrap();
    assert!(message.contains("session interrupted: server 127.0.0.1:3128 reset the connection"), "{message}");
    assert_login("tunnel ssh without the proxy", world.ssh(false));
}

/// `cat` on the node, over `tunnel ssh`: each line is a number, which comes back.
struct Cat {
    name: &'static str,
    ssh: Child,
    errors: PathBuf,
    sent: Arc<AtomicU64>,
    stop: Arc<AtomicBool>,
    back: mpsc::Receiver<(u64, Instant)>,
    last: u64,
}

impl Cat {
    fn start(world: &World, name: &'static str, by_proxy: bool) -> Self {
        let errors = world.place.path().join(format!("{name}.err"));
        let mut command = world.ssh(by_proxy);
        command.arg("cat").stdin(Stdio::piped()).stdout(Stdio::piped());
        let mut ssh = command.stderr(File::create(&errors).unwrap()).spawn().unwrap();
        let (mut input, output) = (ssh.stdin.take().unwrap(), BufReader::new(ssh.stdout.take().unwrap()));
        let (sent, stop) = (Arc::new(AtomicU64::new(0)), Arc::new(AtomicBool::new(false)));
        let (count, stopped) = (sent.clone(), stop.clone());
        thread::spawn(move || {
            while !stopped.load(SeqCst) && writeln!(input, "{}", count.load(SeqCst) + 1).is_ok() {
                count.fetch_add(1, SeqCst);
                thread::sleep(Duration::from_millis(20));
            }
        });
        let (sender, back) = mpsc::channel();
        thread::spawn(move || {
            for line in output.lines().map_while(Result::ok) {
                let _ = sender.send((line.parse().unwrap(), Instant::now()));
            }
        });
        let mut cat = Self { name, ssh, errors, sent, stop, back, last: 0 };
        cat.wait_until_back(Instant::now(), "started");
        cat
    }

    /// Waits until a line that is sent from now on comes back, and checks that none before it is missing.
    fn wait_until_back(&mut self, since: Instant, what: &str) {
        let first = self.sent.load(SeqCst) + 2;
        while self.last < first {
            let (number, at) = self.back.recv_timeout(2 * TIMEOUT).unwrap_or_else(|_| {
                panic!("{}: {what}: no echo: {}", self.name, fs::read_to_string(&self.errors).unwrap())
            });
            assert_eq!(number, self.last + 1, "{}: {what}", self.name);
            self.last = number;
            if number == first {
                println!("{}: {what}: {:.2?}", self.name, at - since);
            }
        }
    }

    /// Ends the input, and checks that each line has come back.
    fn finish(mut self) -> String {
        self.stop.store(true, SeqCst);
        let status = wait_for("ssh ends", TIMEOUT, || self.ssh.try_wait().unwrap());
        assert!(status.success(), "{}: {status}", self.name);
        let last = self.back.iter().last().map_or(self.last, |(number, _)| number);
        assert_eq!(last, self.sent.load(SeqCst), "{}", self.name);
        fs::read_to_string(&self.errors).unwrap()
    }
}

/// Starts a copy of a file to the node. Returns it with the source and the destination.
fn scp(
    world: &World,
    name: &str,
    (megabytes, rate): (u64, u64),
    by_proxy: bool,
) -> (Running, PathBuf, PathBuf) {
    let [from, to] = ["from", "to"].map(|end| world.place.path().join(format!("{name}.{end}")));
    let size = format!("head -c {megabytes}M /dev/urandom > {}", from.display());
    assert!(run("sh", &["-c", &size], None, TIMEOUT).status.success());
    let mut command = world.on_laptop("scp");
    let through = if by_proxy { BY_PROXY } else { "" };
    let helper = format!("{PROGRAM} connect {through} %h %p");
    command.args(world.sshd.options(&helper)).arg("-l").arg(rate.to_string());
    command.arg(&from).arg(format!("node1:{}", to.display()));
    (Running::start(name, world.place.path(), &mut command), from, to)
}

fn sha256(file: &Path) -> String {
    let output = run("sha256sum", &[file], None, TIMEOUT);
    output.stdout.split_whitespace().next().unwrap().to_owned()
}

#[test]
fn logins_and_copies_of_a_laptop_survive_its_network_its_sleep_and_its_server() {
    let Some(mut world) = World::start() else { return };
    let full = env_var("LAPTOP").as_deref() == Some("full");
    let (lost, slept, size) = if full { (30, 40, (500, 160_000)) } else { (4, 3, (100, 100_000)) };
    let _proxy = world.proxy();
    let mut cats =
        [Cat::start(&world, "cat by its own link", false), Cat::start(&world, "cat by the proxy", true)];
    let mut copies = [scp(&world, "scp-by-proxy", size, true), scp(&world, "scp-by-link", size, false)];
    // The times are printed. Required here is that all logins and copies live on, and that no byte is lost.
    let mut check = |world: &World, what: &str| {
        let since = Instant::now();
        for cat in &mut cats {
            cat.wait_until_back(since, what);
        }
        for (copy, from, to) in &mut copies {
            let size = |file: &Path| fs::metadata(file).map_or(0, |file| file.len());
            let before = size(to);
            wait_until(&format!("{what}: the copy continues"), 2 * TIMEOUT, || {
                // A busy machine takes longer for the failures than the copies last.
                if size(to) == size(from) {
                    return true;
                }
                copy.assert_running();
                size(to) > before
            });
        }
        assert!(world.links() >= 2);
        // The next failure meets sessions that carry bytes again, not their resumption.
        thread::sleep(Duration::from_secs(1));
    };
    check(&world, "before");
    world.laptop.sh("ip addr del 10.89.2.10/24 dev wifi; ip addr add 10.89.2.20/24 dev wifi
        ip route add default via 10.89.2.1");
    check(&world, "another address");
    world.nat.sh("nft add rule ip nat line drop");
    thread::sleep(Duration::from_secs(lost));
    world.nat.sh("nft flush chain ip nat line");
    check(&world, "line lost");
    let everything = "space=$(readlink /proc/self/ns/net)
        for p in /proc/[0-9]*; do
            [ \"$(readlink $p/ns/net)\" != $space ] || [ ${p#/proc/} = $$ ] || kill -SIGNAL ${p#/proc/} 2>/dev/null || :
        done";
    world.laptop.sh(&everything.replace("SIGNAL", "STOP"));
    thread::sleep(Duration::from_secs(slept));
    world.laptop.sh(&everything.replace("SIGNAL", "CONT"));
    check(&world, "stopped");
    world.servers[0].kill();
    check(&world, "server killed");
    let [errors, _] = cats.map(Cat::finish);
    assert!(errors.contains("tunnel: line lost, resuming the session to node1:"), "{errors}");
    assert!(errors.contains("tunnel: resumed the session to node1:"), "{errors}");
    for (mut copy, from, to) in copies {
        assert!(copy.wait_for_exit(4 * TIMEOUT).success(), "{}", copy.log());
        assert_eq!(sha256(&from), sha256(&to));
    }
    drop(world.cloud);
}

/// The flag with which a command uses the link of the proxy.
const BY_PROXY: &str = "--server=127.0.0.1:3128";
/// The addresses of the servers, in the laptop's order of preference.
const SERVERS: [&str; 2] = ["10.89.0.1", "10.89.0.2"];
