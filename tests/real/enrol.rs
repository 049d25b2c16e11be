//! The setup of a new cloud: its files are created, its machines get them, and its nodes are reached.

use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::process::Command;

use crate::parts::{are_installed, free_port, is_root};
use crate::process::{ProcessOutput, Running, TIMEOUT, run, run_command};
use crate::tunnel::{PROGRAM, ServerProcess, TestDir, tunnel};

/// Creates files for `node1` and a server on this machine.
fn init(dir: &Path, to: &Path) -> ProcessOutput {
    let (dir, to) = (dir.display().to_string(), to.display().to_string());
    run(
        PROGRAM,
        &["init", &dir, "--name", "localhost", "--node", "node1", "--install-dir", &to],
        None,
        TIMEOUT,
    )
}

/// Runs a command of the program as a user.
pub(crate) fn run_tunnel(args: &[&str]) -> ProcessOutput {
    run(PROGRAM, args, None, TIMEOUT)
}

#[test]
fn a_node_is_invited_joins_links_and_is_revoked_by_one_command_each() {
    let place = TestDir::new();
    let socket = place.path().join("server.sock");
    let more = format!(
        "[server.admin]\nlisten = \"unix:{}\"\n[server.invitations]\nstore = \"file\"\nfile = {:?}\n",
        socket.display(),
        place.path().join("enrolled")
    );
    let mut cloud = ServerProcess::start_with(&place, &more, &[]);
    let socket = format!("--socket={}", socket.display());
    let invited = run_tunnel(&["invite", "--node", "edge7", "--expires", "90s", &socket]);
    assert!(
        invited.status.success() && invited.stdout.starts_with("on edge7, within 1 min 30 s"),
        "{invited:?}"
    );
    let line = invited.stdout.lines().map(str::trim).find(|line| line.starts_with("echo ")).unwrap();
    let code = line.split_whitespace().nth(1).unwrap().to_owned();
    assert_eq!(line, format!("echo {code} | tunnel join tunnel.test:{} --invitation -", cloud.grpc));

    let to = place.path().join("etc");
    let dir = to.display().to_string();
    let server = format!("localhost:{}", cloud.grpc);
    let join = ["join", &server, "--invitation", &code, "--install-dir", &dir];
    let joined = run_tunnel(&join);
    assert!(joined.status.success() && joined.stdout.starts_with("edge7 has joined"), "{joined:?}");
    let again = run_tunnel(&join);
    assert_eq!(again.status.code(), Some(73), "{again:?}");
    let second = format!("{dir}2");
    let used = run_tunnel(&[&join[..5], &[second.as_str()][..]].concat());
    assert_eq!(used.status.code(), Some(77), "{used:?}");
    assert!(used.stderr.contains("has been used already"), "{used:?}");
    let guess = run_tunnel(&["join", &server, "--invitation", "guess", "--install-dir", &second]);
    assert_eq!(guess.status.code(), Some(64), "{guess:?}");

    let log = free_port();
    set_admin(&to.join("edge.toml"), log);
    let config = format!("--config={}", to.join("edge.toml").display());
    let mut edge = Running::start("edge", place.path(), tunnel().args(["edge", &config]));
    edge.wait_for_answer(log, "/readyz", "");
    cloud.wait_for_node("edge7");

    let revoked = run_tunnel(&["invitations", "revoke", "edge7", &socket]);
    assert!(revoked.status.success(), "{revoked:?}");
    cloud.process.wait_for_log("links ended: token revoked");
    let none = run_tunnel(&["invitations", "revoke", "edge7", &socket]);
    assert!(none.stderr.contains("has not joined by an invitation"), "{none:?}");
    let uid = String::from_utf8(Command::new("id").arg("-u").output().unwrap().stdout).unwrap();
    for act in ["invitation created", "node joined", "invitations revoked"] {
        let line = cloud.process.wait_for_log_of("tunnel::audit", act);
        assert!(
            line.contains("edge7")
                && (act == "node joined" || line.contains(&format!("actor=\"uid={}", uid.trim()))),
            "{line}"
        );
    }
    assert!(!cloud.process.log().contains(&code), "the log must not contain secrets");
}

/// Replaces the folder and the ports in the config of a copy.
fn change(config: &Path, changes: &[(&str, String)]) {
    let text = std::fs::read_to_string(config).unwrap();
    let changed = changes.iter().fold(text, |text, (from, to)| {
        assert!(text.contains(from), "{from} is not in {text}");
        text.replace(from, to)
    });
    std::fs::write(config, changed).unwrap();
}

fn set_admin(config: &Path, port: u16) {
    let text = with_admin(&std::fs::read_to_string(config).unwrap(), port);
    std::fs::write(config, text).unwrap();
}

/// Returns the config of an init or a join with this admin port.
pub(crate) fn with_admin(config: &str, port: u16) -> String {
    let table = ["[server.links]\n", "[edge.uplink]\n"].into_iter().find(|table| config.contains(table));
    let table = table.unwrap();
    config.replace(table, &format!("{table}admin_listen = \"127.0.0.1:{port}\"\n"))
}

#[test]
fn files_of_init_are_copied_by_its_commands_and_carry_a_request() {
    if !are_installed(&["curl", "sh"]) {
        return;
    }
    let place = tempfile::tempdir().unwrap();
    let (dir, to, node) = (place.path().join("files"), place.path().join("etc"), place.path().join("node1"));
    let output = init(&dir, &to);
    assert!(output.status.success() && output.stderr.is_empty(), "{output:?}");
    let copies = output.stdout.lines().map(str::trim).find(|line| line.starts_with("cp ")).unwrap();
    assert!(run("sh", &["-c", copies], None, TIMEOUT).status.success(), "{copies}");
    // The node uses the same machine, so its folder must differ.
    std::fs::rename(dir.join("edge-node1"), &node).unwrap();
    let [grpc, connect, log, edge_log] = [(); 4].map(|()| free_port());
    let folder = (to.display().to_string(), node.display().to_string());
    change(&to.join("server.toml"), &[(":9000", format!(":{grpc}")), (":2222", format!(":{connect}"))]);
    change(&node.join("edge.toml"), &[(&folder.0, folder.1.clone()), (":9000", format!(":{grpc}"))]);
    set_admin(&to.join("server.toml"), log);
    set_admin(&node.join("edge.toml"), edge_log);
    let config = |file: &Path| format!("--config={}", file.display());
    for file in [to.join("server.toml"), node.join("edge.toml")] {
        let output = run(PROGRAM, &["config", "check", file.to_str().unwrap()], None, TIMEOUT);
        assert!(output.status.success() && !output.stderr.contains("WARN"), "{output:?}");
    }
    let start = |role: &str, file: &str| {
        Running::start(role, place.path(), tunnel().args([role, &config(&place.path().join(file))]))
    };
    let mut cloud = start("server", "etc/server.toml");
    let mut edge = start("edge", "node1/edge.toml");
    cloud.wait_for_answer(log, "/cloud/healthz", "node1");
    edge.wait_for_answer(edge_log, "/readyz", "");
    let proxy = format!("http://127.0.0.1:{connect}");
    let page = format!("http://node1:{}/", crate::parts::page());
    let got = run("curl", &["-sS", "-p", "-x", &proxy, &page], None, TIMEOUT);
    assert_eq!(got.stdout, "from the node", "{got:?}");
}

#[test]
fn a_cloud_named_by_an_address_of_ipv6_is_joined_by_the_command_that_invite_prints() {
    if !are_installed(&["sh"]) {
        return;
    }
    let place = tempfile::tempdir().unwrap();
    let (to, joined) = (place.path().join("etc"), place.path().join("joined"));
    let (etc, files) = (to.display().to_string(), place.path().join("files"));
    let output = run_tunnel(&["init", files.to_str().unwrap(), "--name", "::1", "--install-dir", &etc]);
    assert!(output.status.success(), "{output:?}");
    std::fs::rename(files.join("server"), &to).unwrap();
    let ([grpc, connect, log], socket) = ([(); 3].map(|()| free_port()), place.path().join("sock"));
    let admin = format!("[server.admin]\nlisten = \"unix:{}\"\n\n[server.connect]", socket.display());
    change(
        &to.join("server.toml"),
        &[
            ("[::]:9000", format!("[::]:{grpc}")),
            (":2222", format!(":{connect}")),
            ("[server.connect]", admin),
        ],
    );
    set_admin(&to.join("server.toml"), log);
    let config = format!("--config={etc}/server.toml");
    let mut cloud = Running::start("server", place.path(), tunnel().args(["server", &config]));
    cloud.wait_for_answer(log, "/readyz", "");
    let invited = run_tunnel(&["invite", "--node", "edge7", &format!("--socket={}", socket.display())]);
    let line = invited.stdout.lines().find(|line| line.contains("echo ")).unwrap();
    assert!(line.ends_with(&format!("| tunnel join '[::1]:{grpc}' --invitation -")), "{line}");
    let line = line.replace("tunnel join", &format!("{PROGRAM} join --install-dir {}", joined.display()));
    let ran = run("sh", &["-c", &line], None, TIMEOUT);
    assert!(ran.status.success() && ran.stdout.starts_with("edge7 has joined"), "{ran:?}");
    let edge = std::fs::read_to_string(joined.join("edge.toml")).unwrap();
    assert!(edge.contains(&format!("servers = [\"[::1]:{grpc}\"]")), "{edge}");
}

#[test]
fn a_second_init_overwrites_nothing_and_wrong_arguments_create_nothing() {
    let place = tempfile::tempdir().unwrap();
    let dir = place.path().join("files");
    assert!(init(&dir, Path::new("/etc/tunnel")).status.success());
    let key = std::fs::read(dir.join("ca.key")).unwrap();
    let again = init(&dir, Path::new("/etc/tunnel"));
    assert_eq!(again.status.code(), Some(73), "{again:?}");
    assert!(again.stderr.contains("ca.key") && again.stderr.contains("nothing is overwritten"), "{again:?}");
    assert_eq!(std::fs::read(dir.join("ca.key")).unwrap(), key);
    let other = place.path().join("other").display().to_string();
    for wrong in [
        &["init", &other, "--node", "node1"][..],
        &["init", &other, "--name", "no name", "--node", "node1"],
        &["init", &other, "--name", "localhost", "--node", "node1", "--ca-cert", "ca.crt"],
        &["init", &other, "--name", "localhost", "--node", "node1", "--days", "0"],
    ] {
        let output = run(PROGRAM, wrong, None, TIMEOUT);
        assert_eq!(output.status.code(), Some(64), "{output:?}");
        assert!(output.stderr.contains("--"), "{output:?}");
    }
    assert!(!Path::new(&other).exists());
}

#[test]
fn failures_of_disks_and_permissions_are_reported_and_leave_no_files() {
    if !are_installed(&["unshare", "mount", "setpriv", "find"]) || !is_root() {
        return;
    }
    let place = tempfile::tempdir().unwrap();
    std::fs::set_permissions(place.path(), std::fs::Permissions::from_mode(0o755)).unwrap();
    let (disk, program) = (place.path().join("disk"), place.path().join("tunnel"));
    std::fs::create_dir(&disk).unwrap();
    // In a folder from which every user may start it.
    std::fs::hard_link(PROGRAM, &program).or_else(|_| std::fs::copy(PROGRAM, &program).map(drop)).unwrap();
    let in_its_own = |line: &str| {
        let mut command = Command::new("unshare");
        command.args(["-m", "sh", "-c", line]);
        run_command(line, &mut command, None, TIMEOUT)
    };
    let (disk, program) = (disk.display(), program.display());
    for (mount, user, why) in [
        ("-o size=16k", "", "No space left"),
        ("-o ro", "", "Read-only file system"),
        ("-o mode=755", "setpriv --reuid 65534 --regid 65534 --clear-groups", "Permission denied"),
    ] {
        let script = format!(
            "mount -t tmpfs {mount} tmpfs {disk} || exit; \
             {user} {program} init {disk}/files --name localhost --node node1; echo code=$?; \
             find {disk} -mindepth 1"
        );
        let output = in_its_own(&script);
        assert_eq!(output.stdout, "code=73\n", "{why}: {output:?}");
        assert!(output.stderr.contains(why) && output.stderr.contains("check that the folder"), "{output:?}");
    }
}
