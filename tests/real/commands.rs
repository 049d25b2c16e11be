//! Each command as users run it: for the first and the second time, with wrong arguments, without the required
//! permissions, and with a full or read-only disk. The tests of `tunnel init` are in `enrol`.

use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};

use crate::enrol::run_tunnel;
use crate::network::Machine;
use crate::parts::{are_installed, free_port, is_root, loopback};
use crate::process::{ProcessOutput, Running, TIMEOUT, run_command};
use crate::tunnel::{PROGRAM, TestDir};
use crate::wait::wait_until;

#[test]
fn wrong_arguments_are_reported_with_what_is_expected() {
    let code = format!("i{}.edge7", "A".repeat(43));
    for (line, exit, expected) in [
        ("invite", 64, "--node <NAME>"),
        ("invite --node x/y", 64, "is not a name; expected 1 to 253 letters"),
        ("invite --user x/y", 64, "is not a user; expected 1 to 63 letters"),
        ("invite --node edge7 --user alice", 64, "cannot be used with"),
        ("invite --user alice --nodes a/b", 64, "not a node name"),
        ("invite --node edge7 --expires 1s", 64, "from 1m to 365d"),
        ("invite --node edge7 --expires 8d", 64, "at most 7d"),
        ("invite --nodes shop-*", 64, "set --uses for a join key"),
        ("invite --nodes shop-* --uses 0", 64, "0 is not in 1..=10000"),
        ("invitations revoke --with-nodes", 64, "--key <ID>"),
        ("invite --node edge7 --socket=/nowhere/s", 69, "start its program, or set another --socket"),
        ("invitations revoke", 64, "<NODE>"),
        ("invitations revoke edge7 --socket=/nowhere/s", 69, "start its program, or set another --socket"),
        ("status --socket=/nowhere/s", 69, "start its program, or set another --socket"),
        ("status more", 64, "unexpected argument"),
        ("doctor none", 64, "[possible values: server, edge, client]"),
        ("connect", 64, "<NODE:PORT>"),
        ("connect node1", 64, "has no port; expected host:port"),
        ("connect node1:99999", 64, "is not a port; expected 1 to 65535"),
        ("connect node1:22 --server=ftp://x", 64, "expected HOST:PORT, http://HOST:PORT"),
        ("connect node1:22 --server=http://127.0.0.1:1", 69, "refused the connection"),
        ("join", 64, "<SERVER:PORT>"),
        ("join nowhere --invitation CODE", 64, "has no port; expected host:port"),
        ("join localhost:1 --invitation short", 64, "cannot read short"),
        ("join localhost:1 --invitation CODE --install-dir relative", 64, "--install-dir"),
        ("join localhost:1 --user --invitation CODE --install-dir /x", 64, "cannot be used with"),
        ("join localhost:1 --user --invitation CODE", 64, "the invitation is for node edge7"),
        ("join localhost:1 --invitation CODE --device laptop", 64, "--user"),
    ] {
        let line = line.replace("CODE", &code);
        let output = run_tunnel(&line.split(' ').collect::<Vec<_>>());
        assert_eq!(output.status.code(), Some(exit), "{line}: {output:?}");
        assert!(output.stderr.contains(expected) && output.stdout.is_empty(), "{line}: {output:?}");
    }
    let output = run_tunnel(&["doctor", "edge", "--config=/nowhere"]);
    assert!(
        output.status.code() == Some(1) && output.stdout.contains("name another with --config=FILE"),
        "{output:?}"
    );
}

/// A machine with a small disk for the server and one for the joining node, and the program where every user may
/// start it.
struct CommandTest {
    machine: Machine,
    program: PathBuf,
    place: TestDir,
}

/// One step: the commands that run before it, the user, the arguments, the exit code, and the expected text.
type Step<'a> = (&'a str, RunAs, &'a str, i32, &'a str);

#[derive(Clone, Copy, PartialEq)]
enum RunAs {
    Root,
    Nobody,
}
use RunAs::{Nobody, Root};

impl CommandTest {
    /// Returns `None` without root, or if a required program is missing.
    fn new() -> Option<Self> {
        if !is_root() || !are_installed(&["unshare", "nsenter", "mount", "setpriv", "ip"]) {
            return None;
        }
        let (machine, place) = (Machine::new(), TestDir::new());
        std::fs::set_permissions(place.path(), std::fs::Permissions::from_mode(0o755)).unwrap();
        let program = place.path().join("tunnel");
        std::fs::hard_link(PROGRAM, &program)
            .or_else(|_| std::fs::copy(PROGRAM, &program).map(drop))
            .unwrap();
        for disk in ["disk", "joining"] {
            std::fs::create_dir(place.path().join(disk)).unwrap();
        }
        machine.sh(&format!("mount -t tmpfs -o size=64k tmpfs {}", place.path().join("disk").display()));
        Some(Self { machine, program, place })
    }

    fn path(&self, name: &str) -> PathBuf {
        self.place.path().join(name)
    }

    /// Runs shell commands in the folder of the test.
    fn prepare(&self, line: &str) {
        if !line.is_empty() {
            self.machine.sh(&format!("cd {}; {line}", self.place.path().display()));
        }
    }

    fn run(&self, user: RunAs, line: &str) -> ProcessOutput {
        let mut command = match user {
            Root => self.machine.command(&self.program),
            Nobody => {
                let mut command = self.machine.command("setpriv");
                command.args(["--reuid", "65534", "--regid", "65534", "--clear-groups"]).arg(&self.program);
                command
            }
        };
        command.args(line.split(' ')).env_remove("HTTPS_PROXY").env_remove("https_proxy");
        run_command(line, &mut command, None, 2 * TIMEOUT)
    }

    /// Runs the steps; in their lines, each of `words` is replaced by its value.
    fn run_steps(&self, words: &[(&str, &str)], steps: &[Step<'_>]) {
        for (before, user, line, code, expected) in steps {
            self.prepare(before);
            let line = words
                .iter()
                .fold((*line).to_owned(), |line, (word, replacement)| line.replace(word, replacement));
            let output = self.run(*user, &line);
            assert_eq!(output.status.code(), Some(*code), "{line}: {output:?}");
            assert!(
                (output.stdout.clone() + &output.stderr).contains(expected),
                "{line}: {expected:?} is not in {output:?}"
            );
        }
    }

    fn server(&self, grpc: u16, log: u16, more: &str, args: &[&str]) -> Running {
        let config = self.place.cloud_config(loopback(grpc), log) + more;
        let command = self.machine.command(&self.program);
        self.place.tunnel_as(command, ("server", "pod"), &config, &[], args)
    }

    /// Returns the server's page at that path.
    fn page(&self, log: u16, path: &str) -> String {
        let mut curl = self.machine.command("curl");
        curl.args(["-s", "-m", "5", &format!("http://127.0.0.1:{log}{path}")]);
        run_command("curl", &mut curl, None, TIMEOUT).stdout
    }
}

#[test]
fn failures_of_disks_and_permissions_are_reported_and_leave_no_damage() {
    let Some(stage) = CommandTest::new().filter(|_| are_installed(&["curl"])) else { return };
    let (grpc, log, connect) = (free_port(), free_port(), free_port());
    let (socket, disk) = (stage.path("pod.sock"), stage.path("disk"));
    let more = format!(
        "[server.connect]\nlisten = \"127.0.0.1:{connect}\"\n[server.admin]\nlisten = \"unix:{}\"\n\
         [server.invitations]\nstore = \"file\"\nfile = {:?}\n",
        socket.display(),
        disk.join("enrolled")
    );
    let mut server = stage.server(grpc, log, &more, &[]);
    wait_until("the server is ready", TIMEOUT, || {
        server.assert_running();
        stage.page(log, "/readyz").starts_with("ok")
    });
    let invited = stage.run(Root, &format!("invite --node edge7 --socket={}", socket.display()));
    let code = invited
        .stdout
        .split(' ')
        .skip_while(|word| *word != "echo")
        .nth(1)
        .unwrap_or_else(|| panic!("{invited:?}"));
    let (socket, at) = (socket.display().to_string(), format!("localhost:{grpc}"));
    let (to, config) =
        (stage.path("joining/etc").display().to_string(), stage.path("pod.toml").display().to_string());
    let through = format!("http://127.0.0.1:{connect}");
    let join = "join CLOUD --invitation CODE --install-dir FOLDER";
    let words = [
        ("CLOUD", at.as_str()),
        ("CODE", code),
        ("FOLDER", &to),
        ("SOCKET", &socket),
        ("CONFIG", &config),
        ("THROUGH", &through),
    ];
    let mounts = |how: &str| {
        format!("[ -z \"$(ls -A joining)\" ]; umount joining || true; mount -t tmpfs -o {how} tmpfs joining")
    };
    stage.run_steps(
        &words,
        &[
            (
                "",
                Nobody,
                "invite --node edge7 --socket=SOCKET",
                77,
                "only the user that runs its program and root",
            ),
            (
                "",
                Nobody,
                "invitations revoke edge7 --socket=SOCKET",
                77,
                "only the user that runs its program and root",
            ),
            ("", Nobody, "status --socket=SOCKET", 77, "only the user that runs its program and root"),
            ("chmod 600 pod.toml", Nobody, "doctor server -c CONFIG", 1, "Permission denied"),
            ("", Root, "status --socket=SOCKET", 0, "ready"),
            ("", Root, "status --socket=SOCKET -o json", 0, "\"role\""),
            (&mounts("size=8k"), Root, join, 73, "No space left on device"),
            (&mounts("ro"), Root, join, 73, "Read-only file system"),
            (&mounts("mode=755"), Nobody, join, 73, "Permission denied"),
        ],
    );
    let mut left = stage.machine.command("find");
    let left = run_command("find", left.arg(stage.path("joining")).args(["-mindepth", "1"]), None, TIMEOUT);
    assert_eq!(left.stdout, "", "a failed command leaves no files");
    stage.run_steps(
        &words,
        &[
            // The invitation is still valid.
            ("", Root, join, 0, "edge7 has joined"),
            ("", Root, join, 73, "nothing is overwritten"),
            (
                "cat /dev/zero >disk/fill || true",
                Root,
                "invite --node edge8 --socket=SOCKET",
                69,
                "No space left on device",
            ),
            ("", Root, "invitations revoke edge7 --socket=SOCKET", 69, "No space left on device"),
            ("", Root, "status --socket=SOCKET", 0, "ready"),
            ("rm disk/fill", Root, "invite --node edge8 --socket=SOCKET", 0, "on edge8"),
            ("", Root, "invite --node edge8 --socket=SOCKET", 0, "on edge8"),
            (
                "mount -o remount,ro disk",
                Root,
                "invite --node edge8 --socket=SOCKET",
                69,
                "Read-only file system",
            ),
            ("", Root, "invitations revoke edge7 --socket=SOCKET", 69, "Read-only file system"),
            ("mount -o remount,rw disk", Root, "invitations revoke edge7 --socket=SOCKET", 0, "revoked"),
            ("", Root, "invitations revoke edge7 --socket=SOCKET", 77, "has not joined by an invitation"),
            ("", Root, "connect node1:22 --server=THROUGH", 69, "node node1 is not connected"),
            ("", Root, "connect node1:22 --server=THROUGH", 69, "node node1 is not connected"),
        ],
    );
    server.terminate();
    server.wait_for_exit(TIMEOUT);
    stage.run_steps(&words, &[("", Root, "status --socket=SOCKET", 69, "start its program")]);
}

#[test]
fn a_full_disk_for_logs_is_reported_outside_of_the_log() {
    let Some(stage) = CommandTest::new().filter(|_| are_installed(&["curl"])) else { return };
    let log = free_port();
    let logs = format!("--log-dir={}", stage.path("disk").display());
    let tables = format!(
        "[server.connect]\nlisten = \"127.0.0.1:0\"\n[server.admin]\nlisten = \"unix:{}\"\n",
        stage.path("sock").display()
    );
    let mut server = stage.server(free_port(), log, &tables, &[&logs]);
    let lost = |page: &str| {
        let line = page.lines().find(|line| line.starts_with("tunnel_log_lines_dropped_total "));
        line.map_or(0, |line| line.rsplit(' ').next().unwrap().parse::<u64>().unwrap())
    };
    let level = |number: &str| {
        let mut curl = stage.machine.command("curl");
        curl.arg("--unix-socket").arg(stage.path("sock"));
        curl.args(["-s", "-X", "PUT", "--data", number, "http://localhost/debug/flags/v"]);
        run_command("curl", &mut curl, None, TIMEOUT).stdout
    };
    wait_until("the server is ready", TIMEOUT, || {
        server.assert_running();
        stage.page(log, "/readyz") == "ok\n"
    });
    // The file's last page has room for the few lines that requests may cause.
    stage.prepare("cat /dev/zero >disk/fill || true; mv disk/*.log disk/moved");
    wait_until("lines are lost", TIMEOUT, || {
        // Each request logs a line, whatever the level is.
        level("0");
        lost(&stage.page(log, "/metrics")) > 0
    });
    server.wait_for_log("log lines are dropped until this is fixed");
    let page = stage.page(log, "/readyz");
    assert!(page.starts_with("ok") && page.contains("log: ") && page.contains("No space left"), "{page}");
    stage.prepare("rm disk/fill");
    wait_until("lines are written again", TIMEOUT, || {
        level("0");
        let written = stage.machine.sh(&format!("cat {}/*.log", stage.path("disk").display()));
        written.contains("log files are writable again, lines were dropped")
    });
    assert_eq!(stage.page(log, "/readyz"), "ok\n");
}

/// A single server needs no CA. A feature that needs it reports the missing file before anything starts.
#[test]
fn a_server_without_a_ca_file_starts_unless_a_feature_needs_it() {
    let place = TestDir::new();
    std::fs::remove_file(&place.files.ca).unwrap();
    let invitations =
        format!("[server.invitations]\nstore = \"file\"\nfile = {:?}\n", place.path().join("enrolled"));
    let base = place.cloud_config(loopback(free_port()), free_port())
        + "[server.connect]\nlisten = \"127.0.0.1:0\"\n";
    let checked = |more: &str| {
        let file: &Path = &place.config("cloud", &(base.clone() + more));
        run_tunnel(&["config", "check", file.to_str().unwrap()])
    };
    let alone = checked("");
    assert!(alone.status.success(), "{alone:?}");
    for (more, key) in [
        ("[server.peers]\naddresses = [\"127.0.0.1:1\"]\n", "key=server.peers.addresses"),
        (invitations.as_str(), "key=server.links.peer_ca"),
    ] {
        let output = checked(more);
        assert_eq!(output.status.code(), Some(78), "{output:?}");
        assert!(output.stderr.contains(key) && output.stderr.contains("ca.crt: No such file"), "{output:?}");
    }
}
