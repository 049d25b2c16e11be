//! `tunnel demo`, as a newcomer sees it.

use std::os::unix::fs::PermissionsExt as _;
use std::path::{Path, PathBuf};
use std::process::Command;

use crate::parts::{are_installed, is_root};
use crate::process::{Running, TIMEOUT, run, run_command};
use crate::tunnel::{PROGRAM, TestDir, tunnel};
use crate::wait::wait_until;

#[test]
fn the_demo_checks_itself_and_reports_times() {
    let output = run(PROGRAM, &["demo", "--check"], None, TIMEOUT);
    assert!(output.status.success(), "{output:?}");
    let lines: Vec<_> = output.stderr.lines().collect();
    for step in
        ["certificates", "server1:", "server2:", "node1 is connected", "CONNECT node1:", "page is complete"]
    {
        let line = lines.iter().find(|line| line.contains(step));
        let line = line.unwrap_or_else(|| panic!("no line about {step}: {output:?}"));
        let time = line.split_whitespace().next().unwrap();
        assert!(time.ends_with('s') && time.starts_with(|c: char| c.is_ascii_digit()), "{line}");
    }
    assert!(!dir(&output.stderr).exists(), "{output:?}");
}

#[test]
fn the_demo_makes_one_request_to_each_listener() {
    if !are_installed(&["curl"]) {
        return;
    }
    for listeners in ["tcp,http,https,egress,proxy,tcp", "all"] {
        let output = run(PROGRAM, &["demo", "--check", "--listeners", listeners], None, TIMEOUT);
        assert!(output.status.success(), "{output:?}");
        for way in ["tcp", "http", "https", "egress", "proxy"] {
            let count = output.stderr.matches(&format!(" {way} at 127.0.0.1:")).count();
            assert_eq!(count, 1, "{way}: {output:?}");
        }
        assert_eq!(output.stderr.matches("the page is complete").count(), 6, "{output:?}");
    }
    let output = run(PROGRAM, &["demo", "--check", "--listeners", "tcp,smtp"], None, TIMEOUT);
    assert_eq!(output.status.code(), Some(64), "{output:?}");
    assert!(output.stderr.contains("[possible values: all, tcp, http, https, egress, proxy]"), "{output:?}");
}

#[test]
fn a_download_survives_two_killed_servers_and_a_cut_line() {
    let place = TestDir::new();
    // The printed commands must work with such a path.
    std::fs::create_dir(place.path().join("a b")).unwrap();
    let mut demo = start(&place, tunnel().args(["demo", "--listeners", "all"]).env("TMPDIR", "a b"));
    wait_until("the demo prints commands", 3 * TIMEOUT, || {
        demo.assert_running();
        demo.log().contains("Press Ctrl-C to stop.")
    });
    let output = demo.log();
    let files = dir(&output);
    for server in ["server1 (process ", "server2 (process "] {
        let killed = output.split(server).nth(1).and_then(|rest| rest.split(')').next()).unwrap();
        assert!(!is_tunnel(killed), "process {killed} was killed: {output}");
    }
    for step in [
        ") is killed: it held the link of node1",
        "is cut for 2 s",
        "the line is back",
        ") is killed: it held the link of alice",
        "64 MiB received, none lost",
    ] {
        assert!(output.contains(step), "{step}: {output}");
    }
    assert_eq!(output.matches("the download continues; its longest pause was").count(), 3, "{output}");
    // The account of the server to which it moved.
    let log = std::fs::read_to_string(files.join("server1.log")).unwrap();
    let moved = ["listener=\"clients\"", "user=\"alice\" device=laptop", "resume_count=1"];
    assert!(log.lines().any(|line| moved.iter().all(|part| line.contains(part))), "{log}");

    let mode = |path: &Path| std::fs::metadata(path).unwrap().permissions().mode() & 0o777;
    assert_eq!(mode(&files), 0o700, "{output}");
    for file in ["token", "tokens", "server.key", "client.key", "server1.log"] {
        assert_eq!(mode(&files.join(file)), 0o600, "{file}");
    }
    if are_installed(&["curl"]) {
        let lines: Vec<_> = output.lines().map(str::trim).filter(|line| line.starts_with("curl ")).collect();
        assert_eq!(lines.len(), 6, "{output}");
        for line in lines {
            let page = run("sh", &["-c", &format!("{line} -sS -m 20")], None, TIMEOUT);
            assert!(page.stdout.contains("Hello from node1"), "{line}: {page:?}");
        }
        let url = output.lines().map(str::trim).find(|line| line.starts_with("http://")).unwrap();
        let page = run("curl", &["-sS", "-m", "20", url], None, TIMEOUT);
        assert!(page.stdout.contains("<!doctype html>"), "{url}: {page:?}");
    }
    let status = output.lines().find(|line| line.contains(" status --socket=")).unwrap();
    let status = run("sh", &["-c", status], None, TIMEOUT);
    assert!(status.stdout.contains("node1"), "{status:?}");

    demo.terminate();
    assert!(demo.wait_for_exit(TIMEOUT).success());
    assert_nothing_remains(&files);
}

#[test]
fn a_demo_that_is_stopped_or_killed_early_leaves_no_processes() {
    let place = TestDir::new();
    for signal in ["TERM", "HUP", "KILL"] {
        let mut demo = start(&place, tunnel().arg("demo"));
        demo.wait_for_log("is killed: it held the link");
        let files = dir(&demo.log());
        assert!(!processes(&files).is_empty(), "{}", demo.log());
        if signal == "KILL" {
            demo.kill();
            wait_until("no process of the demo runs", TIMEOUT, || processes(&files).is_empty());
            std::fs::remove_dir_all(&files).unwrap();
        } else {
            if signal == "HUP" {
                demo.hang_up()
            } else {
                demo.terminate()
            }
            assert!(demo.wait_for_exit(TIMEOUT).success());
            assert_nothing_remains(&files);
        }
    }
}

#[test]
fn under_nohup_the_demo_outlives_its_terminal() {
    if !are_installed(&["nohup"]) {
        return;
    }
    let place = TestDir::new();
    let mut demo = start(&place, Command::new("nohup").args([PROGRAM, "demo"]));
    demo.wait_for_log("node1 is connected");
    demo.hang_up();
    demo.wait_for_log("is killed: it held the link");
    demo.terminate();
    assert!(demo.wait_for_exit(TIMEOUT).success());
}

#[test]
fn a_temporary_directory_that_the_demo_cannot_use_is_named() {
    let place = TestDir::new();
    let long = "x".repeat(100);
    for (dir, why) in [
        ("no\"thing", "expected an absolute path without quotes"),
        ("missing", "set TMPDIR"),
        (&long, "set TMPDIR to a shorter path"),
    ] {
        let mut demo = tunnel();
        demo.args(["demo", "--check"]).env("TMPDIR", place.path().join(dir));
        let output = run_command("demo", &mut demo, None, TIMEOUT);
        assert!(!output.status.success(), "{output:?}");
        assert!(output.stderr.contains(dir) && output.stderr.contains(why), "{output:?}");
    }
}

#[test]
fn the_demo_ignores_this_machines_settings() {
    if !are_installed(&["unshare", "mount", "curl"]) || !is_root() {
        return;
    }
    let place = TestDir::new();
    let etc = place.path().join("etc");
    let script = format!(
        "cp -a /etc {etc} && mkdir -p {etc}/tunnel && cd {etc}/tunnel && mount --bind {etc} /etc || exit; \
         for file in server edge client; do echo nonsense > $file.toml; done; \
         export HTTPS_PROXY=http://127.0.0.1:9 https_proxy=http://127.0.0.1:9 NODE_NAME=other TUNNEL_SERVER=nowhere; \
         exec {PROGRAM} demo --check --listeners all",
        etc = etc.display()
    );
    let output =
        run_command("demo", Command::new("unshare").args(["-m", "sh", "-c", &script]), None, TIMEOUT);
    assert!(output.status.success() && output.stderr.contains("CONNECT node1:"), "{output:?}");
}

fn start(place: &TestDir, command: &mut Command) -> Running {
    Running::start("demo", place.path(), command.current_dir(place.path()))
}

/// Returns the directory that the demo has named.
fn dir(log: &str) -> PathBuf {
    log.split("made in ")
        .nth(1)
        .and_then(|rest| rest.lines().next())
        .unwrap_or_else(|| panic!("{log}"))
        .into()
}

fn assert_nothing_remains(files: &Path) {
    assert_eq!(processes(files), Vec::<String>::new());
    assert!(!files.exists(), "{}", files.display());
}

/// Returns the servers and edges that run with a config in that directory.
fn processes(files: &Path) -> Vec<String> {
    let all =
        std::fs::read_dir("/proc").unwrap().filter_map(|entry| entry.ok()?.file_name().into_string().ok());
    let ours = |id: &String| {
        let line = std::fs::read_to_string(format!("/proc/{id}/cmdline")).unwrap_or_default();
        line.contains(&files.display().to_string())
    };
    all.filter(ours).collect()
}

fn is_tunnel(id: &str) -> bool {
    std::fs::read_to_string(format!("/proc/{id}/cmdline")).is_ok_and(|line| line.contains("end-with-parent"))
}
