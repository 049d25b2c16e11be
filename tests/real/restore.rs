//! Servers that are lost with their disks come back from a backup, by the commands of docs/how-to/upgrade.md.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use crate::enrol::{run_tunnel, with_admin};
use crate::fleet::Line;
use crate::parts::{are_installed, free_port, loopback, page};
use crate::process::{ProcessOutput, Running, TIMEOUT, run, run_command};
use crate::readme::Steps;
use crate::tunnel::{PROGRAM, clear_environment, tunnel};
use crate::wait::wait_until;

/// A machine for a server. Its disk is a folder.
struct Machine {
    disk: PathBuf,
    grpc: u16,
    admin: u16,
}

impl Machine {
    /// Writes the files of `tunnel init`, changed as for two servers whose machines mount one folder for the store.
    fn install(&self, files: &Path, mounted: &Path, peers: [u16; 2]) {
        let etc = self.disk.join("etc/tunnel");
        let sockets = self.disk.join("sock");
        fs::create_dir_all(self.disk.join("var/lib/tunnel")).unwrap();
        fs::create_dir_all(self.disk.join("etc")).unwrap();
        assert!(
            self.sh(&self.disk, &format!("cp -rp {} {}", files.display(), etc.display())).status.success()
        );
        let config = etc.join("server.toml");
        let text = with_admin(&fs::read_to_string(&config).unwrap(), self.admin);
        let text =
            text.replace(":9000", &format!(":{}", self.grpc)).replace(":2222", &format!(":{}", free_port()));
        let text = text.replace("/etc/tunnel", etc.to_str().unwrap());
        let text = text.replace("/var/lib/tunnel", mounted.join("var/lib/tunnel").to_str().unwrap());
        let peers = peers.map(|port| format!("127.0.0.1:{port}"));
        let more = format!(
            "\n[server.admin]\nlisten = \"unix:{}\"\n[server.peers]\naddresses = {peers:?}\n",
            sockets.display()
        );
        fs::write(config, text + &more).unwrap();
    }

    fn start(&self) -> Running {
        let config = format!("--config={}", self.disk.join("etc/tunnel/server.toml").display());
        let name = format!("server-{}", self.grpc);
        let dir = self.disk.parent().unwrap();
        let mut server = Running::start(&name, dir, tunnel().args(["server", &config]));
        server.wait_for_answer(self.admin, "/readyz", "");
        server
    }

    /// Writes the addresses of new machines over those of the old ones in the config.
    fn correct(&self, addresses: &[(u16, u16)]) {
        let config = self.disk.join("etc/tunnel/server.toml");
        let old = fs::read_to_string(&config).unwrap();
        let new = addresses
            .iter()
            .fold(old, |text, (from, to)| text.replace(&format!(":{from}"), &format!(":{to}")));
        fs::write(config, new).unwrap();
    }

    /// Returns the output of a command that uses the admin socket.
    fn admin(&self, args: &[&str]) -> ProcessOutput {
        run_tunnel(&[args, &[&format!("--socket={}", self.disk.join("sock").display())]].concat())
    }

    /// Runs a line of the page in a folder, on this machine's disk.
    fn sh(&self, dir: &Path, line: &str) -> ProcessOutput {
        let disk = self.disk.display();
        let line = line.replace("sudo ", "").replace("-C / ", &format!("-C {disk} "));
        let line = line.replace(" /etc/tunnel", &format!(" {disk}/etc/tunnel"));
        let line = line.replace("tunnel config", &format!("{PROGRAM} config"));
        let mut command = Command::new("sh");
        run_command(&line, command.args(["-c", &line]).current_dir(dir), None, TIMEOUT)
    }
}

/// The machine of an edge or a user, which dials the name of the servers. All its files are in a folder.
struct Joiner {
    dir: PathBuf,
    line: Line,
}

impl Joiner {
    fn new(dir: PathBuf, line: &Line) -> Self {
        fs::create_dir_all(&dir).unwrap();
        Self { dir, line: line.clone() }
    }

    /// Runs the command that `tunnel invite` prints, with more arguments.
    fn join(&self, machine: &Machine, invite: &[&str], more: &str) {
        let invited = machine.admin(&[&["invite"], invite].concat());
        let line = invited.stdout.lines().map(str::trim).find(|line| line.starts_with("echo "));
        let line = line.expect("a command").replace("tunnel join", &format!("{PROGRAM} join {more}"));
        let line = line.replace(&format!(":{}", machine.grpc), &format!(":{}", self.line.port));
        let joined = run_command("join", self.at_home(Command::new("sh")).args(["-c", &line]), None, TIMEOUT);
        assert!(joined.status.success(), "{line}: {joined:?}");
    }

    /// Joins as a node, and starts its edge.
    fn join_as_node(&self, machine: &Machine, node: &str) -> Running {
        self.join(machine, &["--node", node], &format!("--install-dir {}", self.dir.join("etc").display()));
        self.start()
    }

    /// Starts the edge, and waits until it is linked.
    fn start(&self) -> Running {
        let config = self.dir.join("etc/edge.toml");
        let admin = free_port();
        fs::write(&config, with_admin(&fs::read_to_string(&config).unwrap(), admin)).unwrap();
        let config = format!("--config={}", config.display());
        let mut edge = Running::start("edge", &self.dir, tunnel().args(["edge", &config]));
        edge.wait_for_answer(admin, "/readyz", "");
        edge
    }

    /// Returns the output of a connection to the target, as the user of this machine.
    fn connect(&self, target: &str) -> ProcessOutput {
        let request = self.dir.join("request");
        fs::write(&request, "GET / HTTP/1.0\r\n\r\n").unwrap();
        let mut command = self.at_home(clear_environment(Command::new(PROGRAM)));
        run_command("connect", command.args(["connect", target]), Some(&request), TIMEOUT)
    }

    fn at_home(&self, mut command: Command) -> Command {
        command.env("HOME", &self.dir).env_remove("XDG_CONFIG_HOME");
        command
    }
}

#[test]
fn edges_and_users_come_back_to_servers_that_were_restored_at_other_addresses() {
    if !are_installed(&["sh", "cp", "tar"]) {
        return;
    }
    let place = tempfile::tempdir().unwrap();
    let at = |name: &str| place.path().join(name);
    let files = at("files").to_str().unwrap().to_owned();
    let made = run_tunnel(&["init", &files, "--name", "localhost", "--node", "node2"]);
    assert!(made.status.success(), "{made:?}");
    let mut machines =
        ["first", "second"].map(|name| Machine { disk: at(name), grpc: free_port(), admin: free_port() });
    let peers = machines.each_ref().map(|machine| machine.grpc);
    machines.iter().for_each(|machine| machine.install(&at("files/server"), &at("first"), peers));
    let mut servers = machines.each_ref().map(Machine::start);

    // The name that edges and users dial.
    let name = Line::to(loopback(machines[0].grpc));
    let [node1, node2, node3, node4, alice, bob] =
        ["node1", "node2", "node3", "node4", "alice", "bob"].map(|who| Joiner::new(at(who), &name));
    let mut edges = vec![node1.join_as_node(&machines[0], "node1")];
    let etc = at("node2/etc");
    let copied = run("cp", &["-r", &format!("{files}/edge-node2"), etc.to_str().unwrap()], None, TIMEOUT);
    assert!(copied.status.success(), "{copied:?}");
    let text = fs::read_to_string(etc.join("edge.toml")).unwrap();
    let text = text.replace("/etc/tunnel", etc.to_str().unwrap());
    fs::write(etc.join("edge.toml"), text.replace(":9000", &format!(":{}", name.port))).unwrap();
    edges.push(node2.start());
    let mut revoked = node3.join_as_node(&machines[0], "node3");
    alice.join(&machines[0], &["--user", "alice", "--nodes", "node1"], "");
    bob.join(&machines[0], &["--user", "bob", "--nodes", "node1"], "");
    let granted = machines[0].admin(&["grant", "alice", "--nodes", "node2,node4", "--for", "1h"]);
    assert!(granted.status.success(), "{granted:?}");
    for who in [["node3"].as_slice(), &["--user", "bob"]] {
        let done = machines[0].admin(&[&["invitations", "revoke"], who].concat());
        assert!(done.status.success(), "{done:?}");
    }
    let port = page();
    let reaches = |node: &str| {
        wait_until(&format!("alice reaches {node}"), TIMEOUT, || {
            alice.connect(&format!("{node}:{port}")).stdout.ends_with("from the node")
        });
    };
    reaches("node1");

    let mut page = Steps::on("docs/how-to/upgrade.md", "## Back up and restore a server");
    let backup = page.next();
    let restore = page.next();
    for machine in &machines {
        let kept = machine.disk.with_extension("backup");
        fs::create_dir(&kept).unwrap();
        assert!(machine.sh(&kept, &backup[0]).status.success());
    }
    servers.iter_mut().for_each(Running::kill);
    for machine in &mut machines {
        fs::remove_dir_all(&machine.disk).unwrap();
        fs::create_dir(&machine.disk).unwrap();
        machine.grpc = free_port();
    }
    let moved = [0, 1].map(|number| (peers[number], machines[number].grpc));
    for machine in &machines {
        let backup = machine.disk.with_extension("backup");
        assert!(machine.sh(&backup, &restore[0]).status.success());
        machine.correct(&moved);
        let checked = machine.sh(&backup, &restore[1]);
        assert!(checked.status.success() && !checked.stderr.contains("WARN"), "{checked:?}");
    }
    assert_eq!(restore[2..], ["sudo systemctl enable --now tunnel-server"]);
    let mut servers = machines.each_ref().map(Machine::start);
    name.lead_to(loopback(machines[0].grpc));

    // What was given holds: an invitation, a token of the file, grants.
    ["node1", "node2"].into_iter().for_each(reaches);
    // What was revoked stays so.
    assert!(!bob.connect(&format!("node1:{port}")).status.success());
    servers[0].wait_for_log_of("user refused", "bob");
    servers[0].wait_for_log_of("edge refused", "node3");
    revoked.assert_running();
    edges.push(node4.join_as_node(&machines[1], "node4"));
    reaches("node4");
    edges.iter_mut().for_each(Running::assert_running);
}
