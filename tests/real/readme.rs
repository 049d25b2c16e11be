//! The commands of the README and of a tutorial, exactly as they are there, on separate machines with a NAT between
//! them.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use crate::cluster::node::busy_name;
use crate::cluster::{Cluster, Way};
use crate::network::{BEHIND_NAT, Machine, SERVER};
use crate::parts::{are_installed, find, is_root};
use crate::process::{Running, TIMEOUT, run_command};
use crate::tunnel::{PROGRAM, TestDir};

#[test]
fn the_readmes_commands_reach_a_node_by_ssh_through_a_nat() {
    if !is_root() || !are_installed(&["unshare", "ip", "nft", "ssh", "sshd", "ssh-keygen"]) {
        return;
    }
    let place = TestDir::new();
    let [server, node] = [(); 2].map(|()| Machine::new());
    let _router = server.nat(&node);
    let (machine, server) = (&node, Terminal::new(&place, &server, "server", "10.78.0.1"));
    let node = Terminal::new(&place, machine, "node1", "10.78.0.1");
    node.has_program();
    let _sshd = start_sshd(&place, machine, &server);

    let mut steps = Steps::of("## First node");
    let _server = server.follow(&steps.next(), "tunnel server", "server started");
    let invitation = joined(&server.run_lines(&steps.next()));
    let join = steps.next();
    assert!(
        invitation.starts_with("echo ") && join[0].starts_with("echo INVITATION | tunnel join"),
        "{join:?}"
    );
    assert_eq!(
        invitation.split_once(' ').unwrap().1.split_once(' ').unwrap().1,
        join[0].strip_prefix("echo INVITATION ").unwrap(),
        "invite prints another command than the README"
    );
    let join = [invitation, join[1].clone()];
    let _edge = node.follow(&join, "tunnel edge", "linked");
    let look = steps.next();
    assert_eq!(look[0], "tunnel nodes");
    let output = server.line(&look[0], "");
    assert!(output.contains("node1"), "{output}");
    assert_eq!(look[1], "tunnel ssh root@node1");
    let output = server.line(&look[1], "ip -brief address show dev lan\n");
    assert!(output.contains(BEHIND_NAT), "{output}");
    steps.wait_for_exit();
}

/// A cluster with the flags and files of kubeadm, and a server next to its kube-apiserver.
#[test]
fn kubectl_reaches_a_node_behind_a_nat_by_the_commands_of_the_tutorial() {
    let Some((mut cluster, _nat)) = Cluster::with_nat() else { return };
    let place = TestDir::new();
    let server = Terminal::new(&place, &cluster.network.cloud, "server", SERVER);
    server.has_program();
    let node = Terminal::new(&place, &cluster.network.edges[0], "node1", SERVER);
    node.has_program();
    let admin = cluster.network.place.path().join("admin");
    std::fs::copy(admin, server.dir.join("etc/kubernetes/admin.conf")).unwrap();
    let without = cluster.network.try_sh("timeout 3 kubectl logs busy");
    assert!(!without.status.success(), "{without:?}");

    let section = |name: &str| Steps::on("docs/tutorials/kubectl.md", name);
    let mut run = section("## Run the server next to kube-apiserver");
    let start = run.next();
    // The README's reader has a server already, so she takes the tutorial's steps for such a server.
    let added = run.next();
    for line in Steps::of("## kubectl").next() {
        assert!(start.contains(&line) || added.contains(&line), "the README has {line:?}");
    }
    let program = "tunnel server --kubeconfig=/etc/kubernetes/admin.conf";
    let _server = server.follow(&start, program, "server started");
    cluster.change(Way::Files);
    let [label, invite] =
        [0, 1].map(|line| section("## Join the node").next()[line].replace("NODE", "node1"));
    cluster.sh(&label);
    let invitation = joined(&server.line(&invite, ""));
    let _edge = node.follow(&[invitation, "tunnel edge".to_owned()], "tunnel edge", "linked");
    // The other two nodes have no edge.
    for pod in [1, 2, 3].map(busy_name) {
        let lines = section("## Try kubectl").next();
        let [logs, exec] = [0, 1].map(|line| cluster.sh(&lines[line].replace("POD", pod)));
        assert!(logs.contains("line "), "{pod}: {logs}");
        assert_eq!(exec, format!("{pod}\n"));
    }
    let request = section("## If it fails").next().join("\n").replace("NODE", "node1");
    assert!(server.line(&request, "").contains("Unauthorized"), "the kubelet answers");
}

#[test]
fn the_first_two_commands_of_the_readme_are_run_by_ci_and_the_demo() {
    let lines = Steps::of("## Two commands").next();
    let commands: Vec<_> = lines.iter().map(|line| line.split('#').next().unwrap().trim()).collect();
    assert_eq!(commands, ["cargo run --release -- demo", "scripts/test.sh"]);
}

/// The commands of a section, one block after the other.
pub(crate) struct Steps(std::vec::IntoIter<Vec<String>>);

impl Steps {
    /// Those of the README.
    fn of(section: &str) -> Self {
        Self::on("README.md", section)
    }

    pub(crate) fn on(page: &str, section: &str) -> Self {
        let path = Path::new(env!("CARGO_MANIFEST_DIR")).join(page);
        let text = std::fs::read_to_string(path).unwrap();
        let (_, section) = text.split_once(&format!("{section}\n")).expect(section);
        let section = section.split("\n## ").next().unwrap();
        let blocks = section.split("```sh\n").skip(1).map(|block| block.split("```").next().unwrap());
        let blocks: Vec<Vec<String>> =
            blocks.map(|block| block.lines().map(str::to_owned).collect()).collect();
        Self(blocks.into_iter())
    }

    pub(crate) fn next(&mut self) -> Vec<String> {
        self.0.next().expect("one more block of commands")
    }

    fn wait_for_exit(&mut self) {
        assert_eq!(self.0.next(), None);
    }
}

/// A terminal on a machine with its own /etc, /run, /var/lib and /usr/local/bin, in an empty directory.
pub(crate) struct Terminal {
    /// The words that run a command on the machine.
    entry: String,
    pub(crate) dir: PathBuf,
}

impl Terminal {
    /// `tunnel.example.org` has this address.
    pub(crate) fn new(place: &TestDir, machine: &Machine, name: &str, server: &str) -> Self {
        let dir = place.path().join(name);
        for folder in ["bin", "work/target/release", "home"] {
            std::fs::create_dir_all(dir.join(folder)).unwrap();
        }
        let at = dir.display();
        machine.sh(&format!(
            "cp -a /etc {at}/etc; rm -rf {at}/etc/tunnel {at}/etc/kubernetes
            echo '{server} tunnel.example.org' >> {at}/etc/hosts
            mount --bind {at}/etc /etc; mount --bind {at}/bin /usr/local/bin
            for folder in /run /var/lib; do mount -t tmpfs none $folder; done"
        ));
        // The program is built already; a link is enough for `install`.
        std::os::unix::fs::symlink(PROGRAM, dir.join("work/target/release/tunnel")).unwrap();
        std::fs::write(dir.join("bin/cargo"), "#!/bin/sh\n[ \"$*\" = 'build --release' ]\n").unwrap();
        machine.sh(&format!("chmod 755 {at}/bin/cargo; mkdir -p /etc/kubernetes"));
        Self { entry: machine.entry(), dir }
    }

    pub(crate) fn has_program(&self) {
        self.run_lines(&[format!("install {PROGRAM} /usr/local/bin/")]);
    }

    fn command(&self, line: &str) -> Command {
        let mut words = self.entry.split(' ');
        let mut command = Command::new(words.next().unwrap());
        // Entering a machine resets the working directory.
        command.args(words).arg("env").arg("--chdir").arg(self.dir.join("work")).args(["sh", "-ec", line]);
        command
            .env("HOME", self.dir.join("home"))
            .env("PATH", "/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin");
        command
    }

    /// Runs a line with that input, and returns what it prints.
    pub(crate) fn line(&self, line: &str, input: &str) -> String {
        self.line_within(line, input, 6 * TIMEOUT)
    }

    /// Like [`Self::line`], but with another timeout.
    pub(crate) fn line_within(&self, line: &str, input: &str, patience: Duration) -> String {
        let file = self.dir.join("input");
        std::fs::write(&file, input).unwrap();
        let output = run_command(line, &mut self.command(line), Some(&file), patience);
        assert!(output.status.success(), "{line}: {output:?}");
        output.stdout
    }

    /// Runs lines one after the other, and returns what the last one prints.
    pub(crate) fn run_lines(&self, lines: &[String]) -> String {
        lines.iter().fold(String::new(), |_, line| self.line(line, ""))
    }

    /// Runs lines of which the last keeps running, and waits until that has logged `text`.
    pub(crate) fn follow(&self, lines: &[String], last: &str, text: &str) -> Running {
        let (line, before) = lines.split_last().expect("a line");
        assert_eq!(line, last);
        self.run_lines(before);
        let name = last.replace([' ', '/'], "-");
        let mut running = Running::start(&name, &self.dir, &mut self.command(&format!("exec {last}")));
        running.wait_for_log(text);
        running
    }
}

/// Returns the command for the node from what `tunnel invite` prints.
fn joined(printed: &str) -> String {
    printed.lines().map(str::trim).find(|line| line.starts_with("echo ")).expect(printed).to_owned()
}

/// Starts sshd at port 22 of the node, with a key that ssh has on the server's machine.
fn start_sshd(place: &TestDir, node: &Machine, server: &Terminal) -> Running {
    let dir = place.path();
    let (host_key, key, config) = (dir.join("hostkey"), dir.join("id"), dir.join("sshd_config"));
    for file in [&host_key, &key] {
        node.sh(&format!("ssh-keygen -q -t ed25519 -N '' -f {}", file.display()));
    }
    let text = format!(
        "HostKey {}\nAuthorizedKeysFile {}.pub\nPidFile none\nStrictModes no\nUsePAM no\n",
        host_key.display(),
        key.display()
    );
    std::fs::write(&config, text).unwrap();
    // Where a user confirms the node's key, and has a key of their own.
    let known_hosts = server.dir.join("home/known_hosts");
    let text = format!(
        "StrictHostKeyChecking accept-new\nUserKnownHostsFile {}\nIdentityFile {}\n",
        known_hosts.display(),
        key.display()
    );
    std::fs::write(server.dir.join("etc/ssh/ssh_config"), text).unwrap();
    node.sh("mkdir -p /run/sshd");
    let mut command = node.command(find("sshd").unwrap());
    let mut sshd = Running::start("sshd", dir, command.args(["-D", "-e", "-f"]).arg(&config));
    sshd.wait_for_log("Server listening on 0.0.0.0 port 22");
    sshd
}
