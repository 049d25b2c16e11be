//! Connections from the cloud's host to nodes' addresses go through the tunnel. The host and each node are separate
//! machines, and nodes accept no connections.

mod forwarded;
mod own;
mod owner;
mod ports;
mod servers;

use std::net::{IpAddr, SocketAddr};
use std::path::Path;
use std::process::Command;
use std::thread::{self, JoinHandle};

use crate::network::Machine;
use crate::parts::{all, are_installed, cached_program, is_root};
use crate::process::{ProcessOutput, Running, TIMEOUT, run_command};
use crate::tunnel::{PROGRAM, TOKEN, TestDir};
use crate::wait::wait_until;

#[test]
fn a_client_on_the_host_reaches_kubelets_by_address_over_tls() {
    let Some(world) = World::start(2) else { return };
    let mut server = world.server(&world.fixed());
    let (_kubelets, edges) = ([world.kubelet(1), world.kubelet(2)], [world.edge(1, ""), world.edge(2, "")]);
    for number in [1, 2] {
        for ip in addresses(number) {
            world.is_intercepted(&ip, true);
            world.assert_kubelet_answers(number, &ip);
        }
    }
    // Other ports are not intercepted, nor is another machine of the same network.
    let (other, direct) = world.other();
    assert_eq!(world.get(&format!("http://{OTHER}:10250/")).stdout, OTHER, "{}", server.log());
    drop((other, direct));
    let refused = world.get("http://10.79.1.2:10251/").status.code();
    assert_eq!(refused, Some(28), "no response, because only the node could answer");
    assert_eq!(server.log().matches(LISTENER).count(), 4, "{}", server.log());
    // The address of a disconnected node is intercepted for the resume timeout, so that clients get a reset instead
    // of waiting.
    let [_first, second] = edges;
    drop(second);
    world.is_refused(2);
    server.wait_for_log("node node2 is not connected");
    world.assert_kubelet_answers(1, &addresses(1)[0]);
    // A clean stop removes everything.
    server.terminate();
    assert!(server.wait_for_exit(TIMEOUT).success());
    assert!(!world.host.sh("nft list tables").contains("tunnel"));
}

#[test]
fn a_started_server_takes_over_the_nftables_table_of_a_killed_server() {
    // Waits until the ports of the killed server have expired.
    let Some(world) = all().then(|| World::start(1)).flatten() else { return };
    let tables = world.fixed();
    let mut server = world.server(&tables);
    let (_kubelet, edge) = (world.kubelet(1), world.edge(1, ""));
    world.is_intercepted(&addresses(1)[0], true);
    // Another server cannot have the same table while its owner is alive.
    let mut second = world.start_without_waiting("second", &world.config(1, &tables), &[], &[]);
    assert!(!second.wait_for_exit(TIMEOUT).success());
    second.assert_logged("table inet tunnel belongs to another running process");
    server.kill();
    // From now on the node accepts connections: they reach it if they are not intercepted.
    world.nodes[0].sh("nft delete table inet shut");
    wait_until("the kernel has removed the ports", TIMEOUT, || {
        !world.host.sh("nft list set inet tunnel ports").contains("elements")
    });
    for ip in addresses(1) {
        world.assert_kubelet_answers(1, &ip);
    }
    drop(edge);
    let server = world.server(&tables);
    server.assert_logged("taking over the table of a dead owner");
    let _edge = world.edge(1, "");
    for ip in addresses(1) {
        world.is_intercepted(&ip, true);
        world.assert_kubelet_answers(1, &ip);
    }
    assert_eq!(world.host.sh("nft list tables | sort"), "table inet tunnel\ntable inet tunnel-owner\n");
    assert_eq!(server.log().matches(LISTENER).count(), 2, "{}", server.log());
    // Delete the server's table, like a firewall that is reloaded.
    world.host.sh("nft flush ruleset");
    world.is_intercepted(&addresses(1)[0], true);
}

#[test]
fn a_server_refuses_to_start_and_keeps_the_nftables_table_of_another_program() {
    let Some(world) = World::start(0) else { return };
    world.host.sh("nft add table inet tunnel; nft add chain inet tunnel theirs");
    let mut server = world.start_without_waiting("pod", &world.config(0, ""), &[], &[]);
    assert!(!server.wait_for_exit(TIMEOUT).success());
    server.assert_logged("table inet tunnel exists and was not made by this program");
    assert!(world.host.sh("nft list table inet tunnel").contains("theirs"));
}

#[test]
fn a_server_that_cannot_intercept_reports_why_and_does_not_start() {
    let Some(world) = World::start(0) else { return };
    let lacks = |name: &str, entry: &[&str], env: &[(&str, &str)], why: &str| {
        let mut server = world.start_without_waiting(name, &world.config(0, ""), entry, env);
        assert!(!server.wait_for_exit(TIMEOUT).success());
        server.assert_logged(why);
    };
    lacks(
        "unable",
        &["setpriv", "--bounding-set=-net_admin", "--inh-caps=-net_admin"],
        &[],
        "CAP_NET_ADMIN is missing",
    );
    lacks("elsewhere", &[], &[("HOST_IP", "192.0.2.1")], "set hostNetwork: true");
    lacks("bare", &["env", "PATH=/nowhere"], &[], "cannot run nft");
}

#[test]
fn a_connection_started_before_its_node_links_is_intercepted() {
    let Some(world) = World::start(1) else { return };
    let server = world.server(&format!("{SHORT}{}", world.fixed()));
    let _kubelet = world.kubelet(1);
    for ip in addresses(1) {
        let waits = world.connecting(&ip);
        let edge = world.edge(1, "");
        let output = waits.join().unwrap();
        assert_eq!(output.stdout, "node1", "{ip}: {output:?}\n{}", server.log());
        drop(edge);
        world.is_intercepted(&ip, false);
    }
}

#[test]
fn connections_to_this_host_or_from_the_server_are_not_intercepted() {
    let Some(world) = World::start(1) else { return };
    let (other, _answers) = world.other();
    let near = "10.79.1.1";
    let tables = format!(
        "[server.addresses.nodes]\n\"{near}\" = \"node1\"\n[server.direct]\ntargets = [\"{OTHER}:10250\"]\n"
    );
    let mut server = world.server(&tables);
    // The edge of a node on the host itself.
    let config = world.place.edge_config("node1", "127.0.0.1:9000", ADMIN + 1);
    let mut edge = world.place.tunnel_as(
        world.host.command(PROGRAM),
        ("edge", "near"),
        &config,
        &[],
        &["--verbosity=2"],
    );
    ready(&mut edge, &world.host, ADMIN + 1);
    server.wait_for_log(
        "address claim rejected ip=10.79.1.1 node=node1 source=[server.addresses] reason=it is this host's",
    );
    let mut socat = world.host.command("socat");
    socat.arg("TCP-LISTEN:10250,fork,reuseaddr").arg(world.answer_command("here"));
    let _here = Running::start("here", world.place.path(), &mut socat);
    wait_until("the host listens", TIMEOUT, || world.host.sh("ss -tln").contains(":10250"));
    // Even if both addresses are added to the set.
    world.host.sh(&format!("nft add element inet tunnel nodes4 '{{ {near}, {OTHER} }}'"));
    assert_eq!(world.get(&format!("http://{near}:10250/")).stdout, "here");
    let through = ["-sS", "-m", "20", "-p", "-x", "http://127.0.0.1:2222", &format!("http://{OTHER}:10250/")];
    let output = run_command("curl", world.host.command("curl").args(through), None, TIMEOUT);
    assert_eq!(output.stdout, OTHER, "{output:?}");
    // A connection of another program is intercepted and fails, because the address belongs to no node.
    let intercepted = world.get(&format!("http://{OTHER}:10250/")).status.code();
    assert_ne!(intercepted, Some(0));
    assert!(!server.log().contains(LISTENER), "{}", server.log());
    drop(other);
}

#[test]
fn a_less_trusted_node_takes_no_address_of_a_more_trusted_one() {
    let Some(world) = World::start(2) else { return };
    // The line of the second node has the address of the first one, its own, and one that it cannot have.
    let lines = format!("default:{TOKEN}\nnode2:{TOKEN} ip=10.79.1.2,10.79.2.2,10.79.2.1\n");
    std::fs::write(world.place.path().join("token"), lines).unwrap();
    let mut server = world.server("[server.addresses.nodes]\n\"10.79.1.2\" = \"node1\"\n");
    let _kubelets = [world.kubelet(1), world.kubelet(2)];
    let _edges = [world.edge(1, ""), world.edge(2, "")];
    for number in [1, 2] {
        let ip = &addresses(number)[0];
        world.is_intercepted(ip, true);
        world.assert_kubelet_answers(number, ip);
    }
    server.wait_for_log(
        "address claim rejected ip=10.79.2.1 node=node2 source=the token file reason=it is this host's",
    );
}

#[test]
fn fifty_nodes_join_and_leave_under_load_and_nothing_is_misrouted() {
    let Some(world) = World::start(1) else { return };
    // One machine has all addresses, but the edge of each node dials only its own. A misrouted connection is refused,
    // or the response contains another address.
    let farm = &world.nodes[0];
    for ip in FARM.flat_map(farmed) {
        let length = if ip.is_ipv4() { "24" } else { "64 nodad" };
        farm.sh(&format!("ip addr add dev wan {ip}/{length}"));
    }
    let mut socat = farm.command("socat");
    socat.arg("TCP-LISTEN:9100,pf=ip6,ipv6only=0,fork,reuseaddr,backlog=128").arg(world.answer_command(""));
    let _answers = Running::start("answers", world.place.path(), &mut socat);
    let entry = |n| farmed(n).map(|ip| format!("\"{ip}\" = \"farm{n}\"\n")).concat();
    let entries: String = FARM.map(entry).collect();
    let mut server = world.server(&format!("{SHORT}[server.addresses.nodes]\n{entries}"));
    let mut edges: Vec<_> = FARM.map(|n| world.farmed(n)).collect();
    for ip in FARM.flat_map(farmed) {
        world.is_intercepted(&ip.to_string(), true);
    }
    // Every third node disconnects and returns while all are queried.
    let stop = std::sync::atomic::AtomicBool::new(false);
    let place = world.place.path().to_owned();
    let answered = std::thread::scope(|scope| {
        let requests = scope.spawn(|| {
            let mut answered = [0; 2];
            while !stop.load(std::sync::atomic::Ordering::Relaxed) {
                world.request_each_farm_node(&mut answered);
            }
            answered
        });
        for round in 0..3 {
            for at in (round..edges.len()).step_by(3) {
                edges[at].kill();
            }
            for ip in farmed(FARM.start() + round) {
                world.is_intercepted(&ip.to_string(), false);
            }
            for at in (round..edges.len()).step_by(3) {
                edges[at] = world.farmed(FARM.start() + at);
            }
            for ip in (round..edges.len()).step_by(3).flat_map(|at| farmed(FARM.start() + at)) {
                world.is_intercepted(&ip.to_string(), true);
            }
        }
        stop.store(true, std::sync::atomic::Ordering::Relaxed);
        requests.join().unwrap()
    });
    assert!(answered.iter().all(|of| *of >= 100), "only {answered:?} responses; {}", place.display());
    server.assert_running();
    assert!(!server.log().contains("not_allowed"), "an edge was asked to dial another one's address");
}

#[test]
fn the_component_gives_servers_the_host_network_and_net_admin() {
    let Some(kubectl) = cached_program("kubernetes-1.36.3/kubectl") else { return };
    // kustomize accepts no absolute paths.
    let overlay = Path::new(env!("CARGO_TARGET_TMPDIR")).join(format!("overlay-{}", std::process::id()));
    let deploy = Path::new(env!("CARGO_MANIFEST_DIR")).join("deploy/kustomize");
    std::fs::create_dir_all(&overlay).unwrap();
    let copied = Command::new("cp").arg("-r").arg(&deploy).arg(&overlay).status().unwrap();
    assert!(copied.success());
    let text = "apiVersion: kustomize.config.k8s.io/v1beta1\nkind: Kustomization\nresources: [kustomize/base]\n\
                components: [kustomize/components/intercept]\n";
    std::fs::write(overlay.join("kustomization.yaml"), text).unwrap();
    let output = run_command("kubectl", Command::new(kubectl).arg("kustomize").arg(&overlay), None, TIMEOUT);
    std::fs::remove_dir_all(&overlay).unwrap();
    assert!(output.status.success(), "{output:?}");
    let objects = output.stdout.split("---\n");
    let servers = objects.into_iter().find(|object| object.contains("kind: Deployment")).unwrap();
    for line in ["hostNetwork: true", "runAsUser: 0", "- NET_ADMIN", "name: HOST_IP", "maxSurge: 0"] {
        assert!(servers.contains(line), "{line}: {servers}");
    }
    assert!(!servers.contains("sysctls") && !output.stdout.contains("kind: Component"), "{servers}");
}

/// The host of the cloud, and nodes that can dial it.
struct World {
    // Fields drop in order: users of a resource before the resource.
    nodes: Vec<Machine>,
    host: Machine,
    place: TestDir,
}

impl World {
    /// Creates the host, and the machines of `node1` and so on. Returns `None` if a program is missing, or if the
    /// test does not run as root.
    fn start(nodes: usize) -> Option<Self> {
        if !are_installed(&["nft", "ip", "nsenter", "unshare", "curl", "socat", "ss", "setpriv"])
            || !is_root()
        {
            return None;
        }
        let servers = ["127.0.0.1", "10.79.1.1", "10.79.100.1", "10.79.100.2"];
        let (place, host) = (TestDir::serving(&servers), Machine::new());
        std::fs::write(place.path().join("answer"), ANSWER).unwrap();
        let nodes = (1..=nodes).map(|number| machine(&host, number, true)).collect();
        Some(Self { nodes, host, place })
    }

    /// Returns the table of addresses with those of all nodes.
    fn fixed(&self) -> String {
        let numbers = 1..=self.nodes.len();
        let entries = numbers.flat_map(|n| addresses(n).map(|ip| format!("\"{ip}\" = \"node{n}\"\n")));
        format!("[server.addresses.nodes]\n{}", entries.collect::<String>())
    }

    /// Starts a server on the host that intercepts, with these additional tables, and waits until it is ready.
    fn server(&self, tables: &str) -> Running {
        let mut server = self.start_without_waiting("pod", &self.config(0, tables), &[], &[]);
        ready(&mut server, &self.host, ADMIN);
        server
    }

    /// Returns the config of the server with that number on the host, with these additional tables.
    fn config(&self, number: u16, tables: &str) -> String {
        let catches =
            "[server.intercept]\nnetworks = [\"10.79.0.0/16\", \"fd79::/16\"]\nports = [10250, 9100]\n";
        self.plain_config(number, &format!("{catches}{tables}"))
    }

    /// Like [`Self::config`], but for a server that does not intercept.
    fn plain_config(&self, number: u16, tables: &str) -> String {
        let config = self.place.cloud_config(SocketAddr::from(([0; 4], 9000 + number)), ADMIN + number);
        let front = 2222 + number;
        format!("{config}[server.connect]\nlisten = \"127.0.0.1:{front}\"\nauth = \"none\"\n{tables}")
    }

    /// Starts a server on the host without waiting; `entry` are words before the program's name.
    fn start_without_waiting(
        &self,
        name: &str,
        config: &str,
        entry: &[&str],
        env: &[(&str, &str)],
    ) -> Running {
        let command = match entry {
            [] => self.host.command(PROGRAM),
            [first, rest @ ..] => {
                let mut command = self.host.command(first);
                command.args(rest).arg(PROGRAM);
                command
            }
        };
        self.place.tunnel_as(command, ("server", name), config, env, &["--verbosity=4"])
    }

    /// Starts a node's edge, with these additional tables, and waits until it is linked.
    fn edge(&self, number: usize, tables: &str) -> Running {
        self.edge_of(number, &format!("10.79.{number}.1:9000"), tables)
    }

    /// Like [`Self::edge`], but with the address of the server.
    fn edge_of(&self, number: usize, cloud: &str, tables: &str) -> Running {
        let config = self.place.edge_config(&format!("node{number}"), cloud, ADMIN) + tables;
        let machine = &self.nodes[number - 1];
        let command = machine.command(PROGRAM);
        let mut edge = self.place.tunnel_as(
            command,
            ("edge", &format!("edge-{number}")),
            &config,
            &[],
            &["--verbosity=2"],
        );
        ready(&mut edge, machine, ADMIN);
        edge
    }

    /// Requests a page from every node of the farm at both of its addresses, and counts the responses of each family.
    /// Fails the test if another node responds.
    fn request_each_farm_node(&self, answered: &mut [usize; 2]) {
        let ips: Vec<_> = FARM.flat_map(farmed).map(|ip| SocketAddr::new(ip, 9100).to_string()).collect();
        let line = "for at in $0 $@; do echo \"$at $(curl -s -g -m 5 http://$at/)\" & done; wait";
        let mut sh = self.host.command("sh");
        let output = run_command("sh", sh.args(["-c", line]).args(ips), None, TIMEOUT);
        for line in output.stdout.lines() {
            let (at, output) = line.split_once(' ').unwrap();
            if output.is_empty() {
                continue;
            }
            let requested = at.parse::<SocketAddr>().unwrap().ip();
            let by: IpAddr = output.trim_matches(['[', ']']).parse().unwrap();
            assert_eq!(by.to_canonical(), requested, "{line}");
            answered[usize::from(requested.is_ipv6())] += 1;
        }
    }

    /// Starts the edge of a node that has addresses of the first node's machine and dials no others.
    fn farmed(&self, number: usize) -> Running {
        let own = farmed(number).map(|ip| format!("\"{}\"", SocketAddr::new(ip, 9100))).join(", ");
        let own = format!("[edge.allow]\ntargets = [{own}]\n");
        let node = format!("farm{number}");
        let admin = 40_000 + u16::try_from(number).unwrap();
        let config = self.place.edge_config(&node, "10.79.1.1:9000", admin) + &own;
        self.place.tunnel_as(
            self.nodes[0].command(PROGRAM),
            ("edge", &node),
            &config,
            &[],
            &["--verbosity=1"],
        )
    }

    /// Starts a request to a node's kubelet by address, and waits until its first packet is sent.
    fn connecting(&self, ip: &str) -> JoinHandle<ProcessOutput> {
        let mut curl = self.kubelet_client(1, ip);
        let waits = thread::spawn(move || run_command("curl", &mut curl, None, TIMEOUT));
        let at = at(ip, 10250);
        wait_until("the connection is being opened", TIMEOUT, || {
            self.host.sh("ss -tnH state syn-sent").contains(&at)
        });
        waits
    }

    /// Waits until connections to the node's address are reset at once, because it has disconnected.
    fn is_refused(&self, number: usize) {
        wait_until("the node has disconnected", TIMEOUT, || {
            let mut client = self.kubelet_client(number, &addresses(number)[0]);
            let output = run_command("curl", &mut client, None, TIMEOUT);
            output.stderr.contains("reset")
        });
    }

    /// Starts a stand-in for a node's kubelet: TLS with a certificate for the node's name, which it returns.
    fn kubelet(&self, number: usize) -> Running {
        let node = format!("node{number}");
        let dir = self.place.path().join(&node);
        std::fs::create_dir_all(&dir).unwrap();
        let files = self.place.authority.write(&dir, &[&node]);
        let mut socat = self.nodes[number - 1].command("socat");
        let (cert, key) = (files.cert.display(), files.key.display());
        socat.arg(format!(
            "OPENSSL-LISTEN:10250,pf=ip6,ipv6only=0,fork,reuseaddr,verify=0,cert={cert},key={key}"
        ));
        socat.arg(self.answer_command(&node));
        let kubelet = Running::start(&format!("kubelet-{number}"), self.place.path(), &mut socat);
        wait_until("the kubelet listens", TIMEOUT, || {
            self.nodes[number - 1].sh("ss -tln").contains(":10250")
        });
        kubelet
    }

    /// Starts a machine of the same network that is not a node, and a server there that returns its own address.
    fn other(&self) -> (Machine, Running) {
        let other = machine(&self.host, 200, false);
        let mut socat = other.command("socat");
        socat.arg("TCP-LISTEN:10250,fork,reuseaddr").arg(self.answer_command(""));
        let answers = Running::start("other", self.place.path(), &mut socat);
        wait_until("the other machine answers", TIMEOUT, || other.sh("ss -tln").contains(":10250"));
        (other, answers)
    }

    /// Requests a node's kubelet by address, and checks that its certificate names the node.
    fn assert_kubelet_answers(&self, number: usize, ip: &str) {
        let output = run_command("curl", &mut self.kubelet_client(number, ip), None, TIMEOUT);
        assert_eq!(output.stdout, format!("node{number}"), "{ip}: {output:?}");
    }

    fn kubelet_client(&self, number: usize, ip: &str) -> Command {
        let mut curl = self.host.command("curl");
        self.asking(&mut curl, number, ip);
        curl
    }

    /// Appends curl's arguments for a request to a node's kubelet by address.
    fn asking(&self, curl: &mut Command, number: usize, ip: &str) {
        let node = format!("node{number}");
        let ca = self.place.files.ca.display().to_string();
        let to = format!("{node}:10250:{}", at(ip, 10250));
        curl.args([
            "-sS",
            "-m",
            "30",
            "--cacert",
            &ca,
            "--connect-to",
            &to,
            &format!("https://{node}:10250/"),
        ]);
    }

    /// Returns a socat address that answers any request with `text`, or with its own address if `text` is empty.
    fn answer_command(&self, text: &str) -> String {
        format!("SYSTEM:sh {} {text}", self.place.path().join("answer").display())
    }

    fn get(&self, url: &str) -> ProcessOutput {
        let mut curl = self.host.command("curl");
        run_command("curl", curl.args(["-sS", "-m", "3", url]), None, TIMEOUT)
    }

    /// Returns true if data that a client of the host sends to that address comes back.
    fn echoes_at(&self, at: &str) -> bool {
        let line = format!("echo asked | socat -T 3 - TCP:{at},connect-timeout=2");
        run_command("sh", self.host.command("sh").args(["-c", &line]), None, TIMEOUT).stdout == "asked\n"
    }

    /// Waits until an address is in the set, or is not.
    fn is_intercepted(&self, ip: &str, intercepted: bool) {
        self.is_intercepted_in("tunnel", ip, intercepted);
    }

    /// Like [`Self::is_intercepted`], but in the table of that name.
    fn is_intercepted_in(&self, table: &str, ip: &str, intercepted: bool) {
        let set = if ip.contains(':') { "nodes6" } else { "nodes4" };
        wait_until(&format!("{ip} is intercepted in {table}: {intercepted}"), TIMEOUT, || {
            let listed = self.host.sh(&format!("nft -j list set inet {table} {set} || true"));
            listed.contains(&format!("\"{ip}\"")) == intercepted
        });
    }
}

fn at(ip: &str, port: u16) -> String {
    SocketAddr::new(ip.parse().unwrap(), port).to_string()
}

/// Waits until this program is ready on that machine.
fn ready(running: &mut Running, machine: &Machine, admin: u16) {
    wait_until("the program is ready", TIMEOUT, || {
        running.assert_running();
        let mut curl = machine.command("curl");
        curl.args(["-sf", "-m", "2", &format!("http://127.0.0.1:{admin}/readyz")]);
        run_command("curl", &mut curl, None, TIMEOUT).status.success()
    });
}

/// Creates a machine with a cable to the host. If it is `shut`, it accepts no connections.
fn machine(host: &Machine, number: usize, shut: bool) -> Machine {
    let machine = Machine::new();
    let device = format!("node{number}");
    let (near, far) = (format!("10.79.{number}.1/24"), format!("10.79.{number}.2/24"));
    host.cable((&device, &near), &machine, ("wan", &far));
    host.sh(&format!("ip addr add fd79:{number}::1/64 dev {device} nodad"));
    machine.sh(&format!("ip addr add fd79:{number}::2/64 dev wan nodad"));
    if shut {
        machine.shut("wan");
    }
    machine
}

/// Returns the addresses of a node's machine.
fn addresses(number: usize) -> [String; 2] {
    [format!("10.79.{number}.2"), format!("fd79:{number}::2")]
}

/// Returns the addresses of a node of the farm.
fn farmed(number: usize) -> [IpAddr; 2] {
    [format!("10.79.1.{number}"), format!("fd79:1::{number}")].map(|ip| ip.parse().unwrap())
}

/// The numbers of the nodes with addresses on one machine.
const FARM: std::ops::RangeInclusive<usize> = 11..=60;
/// Reads the head of a request, and answers it.
const ANSWER: &str = r#"end=$(printf '\r'); while read -r line && [ "$line" != "$end" ]; do :; done
printf 'HTTP/1.0 200 OK\r\n\r\n%s' "${1:-$SOCAT_SOCKADDR}"
"#;
/// The field of access log lines of intercepted clients.
pub(crate) const LISTENER: &str = "access: listener=\"intercept\"";
/// Releases the addresses of disconnected nodes soon.
const SHORT: &str = "[server.session]\nresume_timeout = \"1s\"\n";
/// A machine that is not a node.
const OTHER: &str = "10.79.200.2";
/// The admin port of each process.
const ADMIN: u16 = 9010;
