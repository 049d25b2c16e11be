//! A cloud's first day: its files are made, its machines get them, and its nodes are reached.

use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::process::Command;

use crate::parts::{free_port, have, root};
use crate::process::{PATIENCE, Running, Said, run, run_command};
use crate::tunnel::{PROGRAM, tunnel};

/// Makes files for `node1` and a cloud on this machine.
fn init(dir: &Path, to: &Path) -> Said {
    let (dir, to) = (dir.display().to_string(), to.display().to_string());
    run(PROGRAM, &["init", &dir, "--name", "localhost", "--node", "node1", "--to", &to], None, PATIENCE)
}

/// Gives the settings of a copy another folder and other ports.
fn change(config: &Path, changes: &[(&str, String)]) {
    let text = std::fs::read_to_string(config).unwrap();
    let changed = changes.iter().fold(text, |text, (from, to)| {
        assert!(text.contains(from), "{from} is not in {text}");
        text.replace(from, to)
    });
    std::fs::write(config, changed).unwrap();
}

#[test]
fn what_init_has_made_is_copied_as_it_says_and_carries_a_request() {
    if !have(&["curl", "sh"]) {
        return;
    }
    let place = tempfile::tempdir().unwrap();
    let (dir, to, node) = (place.path().join("files"), place.path().join("etc"), place.path().join("node1"));
    let said = init(&dir, &to);
    assert!(said.status.success() && said.stderr.is_empty(), "{said:?}");
    let copies = said.stdout.lines().map(str::trim).find(|line| line.starts_with("cp ")).unwrap();
    assert!(run("sh", &["-c", copies], None, PATIENCE).status.success(), "{copies}");
    // The machine of the node is this one, too, so that its folder is another one.
    std::fs::rename(dir.join("edge-node1"), &node).unwrap();
    let [grpc, connect, log, edge_log] = [(); 4].map(|()| free_port());
    let folder = (to.display().to_string(), node.display().to_string());
    change(
        &to.join("cloud.toml"),
        &[(":9000", format!(":{grpc}")), (":2222", format!(":{connect}")), (":51010", format!(":{log}"))],
    );
    change(
        &node.join("edge.toml"),
        &[(&folder.0, folder.1.clone()), (":9000", format!(":{grpc}")), (":51010", format!(":{edge_log}"))],
    );
    let config = |file: &Path| format!("--c={}", file.display());
    for (mode, file) in [("--m=cloud", to.join("cloud.toml")), ("--m=edge", node.join("edge.toml"))] {
        let said = run(PROGRAM, &[mode, "--check", &config(&file)], None, PATIENCE);
        assert!(said.status.success() && !said.stderr.contains("WARN"), "{said:?}");
    }
    let start = |name: &str, file: &str| {
        Running::start(
            name,
            place.path(),
            tunnel().args([&format!("--m={name}"), &config(&place.path().join(file))]),
        )
    };
    let mut cloud = start("cloud", "etc/cloud.toml");
    let mut edge = start("edge", "node1/edge.toml");
    cloud.answers(log, "/cloud/healthz", "node1");
    edge.answers(edge_log, "/readyz", "");
    let proxy = format!("http://127.0.0.1:{connect}");
    // A server that there is at the node's machine anyhow.
    let page = format!("http://node1:{log}/livez");
    let got = run("curl", &["-sS", "-p", "-x", &proxy, &page], None, PATIENCE);
    assert_eq!(got.stdout, "ok\n", "{got:?}");
}

#[test]
fn a_second_run_overwrites_nothing_and_a_wrong_line_makes_nothing() {
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
        &["init", &other, "--name", "localhost"][..],
        &["init", &other, "--name", "no name", "--node", "node1"],
        &["init", &other, "--name", "localhost", "--node", "node1", "--ca-cert", "ca.crt"],
        &["init", &other, "--name", "localhost", "--node", "node1", "--days", "0"],
    ] {
        let said = run(PROGRAM, wrong, None, PATIENCE);
        assert_eq!(said.status.code(), Some(64), "{said:?}");
        assert!(said.stderr.contains("--"), "{said:?}");
    }
    assert!(!Path::new(&other).exists());
}

#[test]
fn a_full_disk_a_read_only_one_and_missing_rights_are_told_and_leave_nothing() {
    if !have(&["unshare", "mount", "setpriv", "find"]) || !root() {
        return;
    }
    let place = tempfile::tempdir().unwrap();
    std::fs::set_permissions(place.path(), std::fs::Permissions::from_mode(0o755)).unwrap();
    let (disk, program) = (place.path().join("disk"), place.path().join("tunnel"));
    std::fs::create_dir(&disk).unwrap();
    // Where everybody may start it.
    std::fs::hard_link(PROGRAM, &program).or_else(|_| std::fs::copy(PROGRAM, &program).map(drop)).unwrap();
    let in_its_own = |line: &str| {
        let mut command = Command::new("unshare");
        command.args(["-m", "sh", "-c", line]);
        run_command(line, &mut command, None, PATIENCE)
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
        let said = in_its_own(&script);
        assert_eq!(said.stdout, "code=73\n", "{why}: {said:?}");
        assert!(said.stderr.contains(why) && said.stderr.contains("check that the folder"), "{said:?}");
    }
}
