//! Servers that are lost with their disks come back from a backup, by the commands of docs/how-to/upgrade.md.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use crate::enrol::{run_tunnel, with_admin};
use crate::parts::{are_installed, free_port, page};
use crate::process::{ProcessOutput, Running, TIMEOUT, run_command};
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

/// Runs the command that `tunnel invite` prints, with more arguments, for a user with that home.
fn join(machine: &Machine, invite: &[&str], more: &str, home: &Path) {
    let socket = format!("--socket={}", machine.disk.join("sock").display());
    let invited = run_tunnel(&[&["invite"], invite, &[&socket]].concat());
    let line =
        invited.stdout.lines().map(str::trim).find(|line| line.starts_with("echo ")).expect("a command");
    let line = line.replace("tunnel join", &format!("{PROGRAM} join {more}"));
    let mut command = Command::new("sh");
    let joined = run_command(
        "join",
        command.args(["-c", &line]).env("HOME", home).env_remove("XDG_CONFIG_HOME"),
        None,
        TIMEOUT,
    );
    assert!(joined.status.success(), "{line}: {joined:?}");
}

#[test]
fn an_edge_and_a_user_come_back_to_servers_that_were_restored_from_their_backups() {
    if !are_installed(&["sh", "cp", "tar"]) {
        return;
    }
    let place = tempfile::tempdir().unwrap();
    let at = |name: &str| place.path().join(name);
    let machines =
        ["first", "second"].map(|name| Machine { disk: at(name), grpc: free_port(), admin: free_port() });
    let made = run_tunnel(&["init", at("files").to_str().unwrap(), "--name", "localhost"]);
    assert!(made.status.success(), "{made:?}");
    let peers = machines.each_ref().map(|machine| machine.grpc);
    machines.iter().for_each(|machine| machine.install(&at("files/server"), &at("first"), peers));
    let mut servers = machines.each_ref().map(Machine::start);

    join(
        &machines[0],
        &["--node", "node1"],
        &format!("--install-dir {}", at("node").display()),
        place.path(),
    );
    join(&machines[0], &["--user", "alice", "--nodes", "node1"], "", place.path());
    let edge = at("node").join("edge.toml");
    let log = free_port();
    fs::write(&edge, with_admin(&fs::read_to_string(&edge).unwrap(), log)).unwrap();
    let config = format!("--config={}", edge.display());
    let mut edge = Running::start("edge", place.path(), tunnel().args(["edge", &config]));
    edge.wait_for_answer(log, "/readyz", "");
    let target = format!("node1:{}", page());
    let request = at("request");
    fs::write(&request, "GET / HTTP/1.0\r\n\r\n").unwrap();
    let reaches = |what: &str| {
        wait_until(what, TIMEOUT, || {
            let mut command = clear_environment(Command::new(PROGRAM));
            command.args(["connect", &target]).env("HOME", place.path()).env_remove("XDG_CONFIG_HOME");
            run_command("connect", &mut command, Some(&request), TIMEOUT).stdout.ends_with("from the node")
        });
    };
    reaches("alice reaches the node");

    let mut page = Steps::on("docs/how-to/upgrade.md", "## Back up and restore a server");
    let backup = page.next();
    let restore = page.next();
    for machine in &machines {
        let kept = machine.disk.with_extension("backup");
        fs::create_dir(&kept).unwrap();
        assert!(machine.sh(&kept, &backup[0]).status.success());
    }
    servers.iter_mut().for_each(Running::kill);
    for machine in &machines {
        fs::remove_dir_all(&machine.disk).unwrap();
        fs::create_dir(&machine.disk).unwrap();
    }
    for machine in &machines {
        for line in &restore[..2] {
            let done = machine.sh(&machine.disk.with_extension("backup"), line);
            assert!(done.status.success() && !done.stderr.contains("WARN"), "{line}: {done:?}");
        }
    }
    assert_eq!(restore[2..], ["sudo systemctl enable --now tunnel-server"]);
    let servers = machines.each_ref().map(Machine::start);
    reaches("alice reaches the node at the new servers");
    edge.assert_running();
    drop(servers);
}
