//! A cloud and nodes on separate machines. Nodes can dial the cloud, but accept no connections.

mod machine;

use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::process::{ChildStdin, Command};

use crate::apiserver::NAMESPACE;
use crate::parts::{are_installed, cached_program, env_var, is_root};
use crate::process::{ProcessOutput, Running, TIMEOUT, run_command};
use crate::tunnel::{PROGRAM, TestDir};
use crate::wait::wait_until;
pub(crate) use machine::{BEHIND_NAT, Machine};

/// An address of the cloud, used by its first server.
pub(crate) const SERVER: &str = "10.77.0.1";

/// Another address of the cloud, used by a second server.
pub(crate) const OTHER_SERVER: &str = "10.77.0.2";

/// The machines, and CoreDNS in the cloud, which answers with the names that servers publish.
#[derive(Debug)]
pub(crate) struct Network {
    // Fields drop in order: users of a resource before the resource.
    _dns: Running,
    pub(crate) edges: Vec<Machine>,
    pub(crate) cloud: Machine,
    pub(crate) place: TestDir,
}

impl Network {
    /// Creates a cloud, and the machines of `node1` and so on. Returns `None` if a program is missing, or if the test
    /// does not run as root.
    pub(crate) fn start(nodes: usize) -> Option<Self> {
        let coredns = cached_program("coredns-1.15.0/coredns")?;
        if !are_installed(&["nft", "ip", "nsenter", "unshare", "curl"]) || !is_root() {
            return None;
        }
        let place = TestDir::serving(&[SERVER, OTHER_SERVER]);
        let cloud = Machine::new();
        cloud.sh(&format!("ip addr add {SERVER} dev lo; ip addr add {OTHER_SERVER} dev lo"));
        let edges = (1..=nodes).map(|number| edge(&cloud, number)).collect();
        let resolver = place.path().join("resolv.conf");
        std::fs::write(&resolver, "nameserver 127.0.0.1\n").unwrap();
        cloud.sh(&format!("mount --bind {} /etc/resolv.conf", resolver.display()));
        write_entry(&place, &cloud);
        let dns = start_dns(&place, &cloud, &coredns);
        Some(Self { _dns: dns, edges, cloud, place })
    }

    /// Adds IPv6 addresses to the cable of a node, and returns the node's.
    pub(crate) fn add_v6(&self, number: usize) -> String {
        let (near, far) = (format!("fd77:{number}::1"), format!("fd77:{number}::2"));
        self.cloud.sh(&format!("ip addr add {near}/64 dev node{number} nodad"));
        self.edges[number - 1]
            .sh(&format!("ip addr add {far}/64 dev wan nodad; ip route add default via {near}"));
        far
    }

    /// Runs a line of bash in the cloud, and returns its output, even if it fails.
    pub(crate) fn try_sh(&self, line: &str) -> ProcessOutput {
        run_command(line, &mut self.bash(line), None, 6 * TIMEOUT)
    }

    /// Like [`Self::try_sh`], but fails the test unless the line succeeds. Returns what it prints.
    pub(crate) fn sh(&self, line: &str) -> String {
        let output = self.try_sh(line);
        assert!(output.status.success(), "{line}: {output:?}");
        output.stdout
    }

    /// Like [`Self::try_sh`], but in the background; its log is `name.log`.
    pub(crate) fn spawn_sh(&self, name: &str, line: &str) -> (Running, ChildStdin) {
        Running::start_with_stdin(name, self.place.path(), &mut self.bash(line))
    }

    fn bash(&self, line: &str) -> Command {
        let mut command = Command::new("sh");
        command.arg(self.place.path().join("cloud")).args(["bash", "-o", "pipefail", "-c", line]);
        command.current_dir(self.place.path());
        command
    }

    /// Starts `tunnel server` at an address of the cloud, with these additional tables, and waits until it is
    /// ready. All servers are peers, and publish their nodes to CoreDNS.
    pub(crate) fn server(&self, ip: &str, tables: &str) -> Running {
        self.server_with(ip, tables, &[])
    }

    /// Like [`Self::server`], but with more arguments.
    pub(crate) fn server_with(&self, ip: &str, tables: &str, args: &[&str]) -> Running {
        let config = self.place.cloud_config(format!("{ip}:9000").parse().unwrap(), ADMIN);
        let registry = format!(
            "[server.dns]\npublish = \"hosts\"\nhosts_file = {:?}\n[server.peers]\naddresses = {:?}\n",
            self.place.path().join("hosts"),
            [SERVER, OTHER_SERVER].map(|server| format!("{server}:9000"))
        );
        let config = config.replace("127.0.0.1", ip) + &registry + tables;
        self.tunnel(&self.cloud, ("server", &format!("pod-{ip}")), &config, ip, args)
    }

    /// Starts `tunnel edge` on a node, with that server and these additional tables. Waits until it is linked,
    /// and its name resolves to that server.
    pub(crate) fn edge(&self, number: usize, server: &str, tables: &str) -> Running {
        self.edge_of(number, &[server], tables)
    }

    /// Like [`Self::edge`], but with several servers, which the edge tries in order.
    pub(crate) fn edge_of(&self, number: usize, servers: &[&str], tables: &str) -> Running {
        let node = format!("node{number}");
        let places = servers.iter().map(|server| format!("{server}:9000")).collect::<Vec<_>>().join("\", \"");
        let config = self.place.edge_config(&node, &places, ADMIN) + tables;
        let server = servers[0];
        let running = self.tunnel(&self.edges[number - 1], ("edge", &node), &config, "127.0.0.1", &[]);
        wait_until(&format!("{node} resolves to {server}"), TIMEOUT, || {
            self.try_sh(&format!("getent ahostsv4 {node}")).stdout.contains(server)
        });
        running
    }

    /// Starts a web server of that name on a machine, which serves one file.
    pub(crate) fn page(
        &self,
        machine: &Machine,
        (name, at): (&str, &str),
        (file, text): (&str, &str),
    ) -> Running {
        let dir = self.place.path().join(format!("page-{name}"));
        std::fs::create_dir(&dir).unwrap();
        std::fs::write(dir.join(file), text).unwrap();
        let mut httpd = machine.command("busybox");
        httpd.args(["httpd", "-f", "-p", at, "-h"]).arg(&dir);
        Running::start(&format!("page-{name}"), self.place.path(), &mut httpd)
    }

    fn tunnel(
        &self,
        machine: &Machine,
        names: (&str, &str),
        config: &str,
        ip: &str,
        args: &[&str],
    ) -> Running {
        let command = machine.command(env_var("TUNNEL").unwrap_or_else(|| PROGRAM.into()));
        let mut running = self.place.tunnel_as(
            command,
            names,
            config,
            &[("POD_IP", ip), ("POD_NAMESPACE", NAMESPACE)],
            args,
        );
        wait_until(&format!("{} is ready", names.1), TIMEOUT, || {
            running.assert_running();
            let mut curl = machine.command("curl");
            curl.args(["-sf", "-m", "2", &format!("http://{ip}:{ADMIN}/readyz")]);
            run_command("curl", &mut curl, None, TIMEOUT).status.success()
        });
        running
    }
}

/// Returns the address of a node's machine.
pub(crate) fn address(number: usize) -> String {
    format!("10.77.{number}.2")
}

/// Creates the machine of a node, which accepts no connections.
fn edge(cloud: &Machine, number: usize) -> Machine {
    let edge = Machine::new();
    let (near, far) = (format!("10.77.{number}.1"), address(number));
    cloud.cable((&format!("node{number}"), &format!("{near}/24")), &edge, ("wan", &format!("{far}/24")));
    edge.sh(&format!("ip route add default via {near}"));
    edge.shut("wan");
    edge
}

/// Writes a program `cloud` that runs another one in the cloud, with the programs of the test's directory in its
/// PATH.
fn write_entry(place: &TestDir, cloud: &Machine) {
    let dir = place.path().display();
    let environment = format!("KUBECONFIG={dir}/admin HOME={dir} PATH={dir}:/usr/sbin:/usr/bin:/sbin:/bin");
    let entry = place.path().join("cloud");
    std::fs::write(
        &entry,
        format!("#!/bin/sh\nexec {} env --chdir=\"$PWD\" {environment} \"$@\"\n", cloud.entry()),
    )
    .unwrap();
    std::fs::set_permissions(entry, std::fs::Permissions::from_mode(0o755)).unwrap();
}

fn start_dns(place: &TestDir, cloud: &Machine, program: &Path) -> Running {
    let (hosts, corefile) = (place.path().join("hosts"), place.path().join("Corefile"));
    std::fs::write(&hosts, "").unwrap();
    let text = format!(
        ". {{\n bind 127.0.0.1\n hosts {} {{\n ttl 1\n reload 300ms\n no_reverse\n }}\n}}\n",
        hosts.display()
    );
    std::fs::write(&corefile, text).unwrap();
    let mut dns = Running::start("coredns", place.path(), cloud.command(program).arg("-conf").arg(corefile));
    dns.wait_for_log("CoreDNS-");
    dns
}

/// The admin port of each process.
pub(crate) const ADMIN: u16 = 9010;
