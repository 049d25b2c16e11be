//! The command line: what service managers and people see of the program, whatever it carries.

use std::net::TcpListener;
use std::path::Path;
use std::time::Duration;

use crate::parts::{free_port, loopback};
use crate::process::{PATIENCE, Running, Said, ask, run};
use crate::tunnel::{Edge, Pair, TestDir, tunnel};
use crate::wait::wait_until;

#[test]
fn the_demo_checks_itself_and_tells_times() {
    let said = run(PROGRAM, &["demo", "--check"], None, LONG);
    assert!(said.status.success(), "{said:?}");
    let lines: Vec<_> = said.stderr.lines().collect();
    for step in ["certificates", "pod:", "node1 is linked", "200", "the page is whole"] {
        let line = lines.iter().find(|line| line.contains(step));
        let line = line.unwrap_or_else(|| panic!("no line about {step}: {said:?}"));
        let time = line.split_whitespace().next().unwrap();
        assert!(time.ends_with('s') && time.starts_with(|c: char| c.is_ascii_digit()), "{line}");
    }
}

#[test]
fn a_bad_config_is_told_with_all_its_faults_and_exit_code_64() {
    let place = TestDir::new();
    let file = place.config(
        "bad",
        "[mode.cloud.stream.server]\nlisten = \"nowhere\"\nkey = 7\n[mode.cloud.ssh]\nprot = 22\n\
         [mode.cloud.session]\ngrace = \"long\"\n",
    );
    let said = started(&["--m=cloud", &format!("--c={}", file.display())]);
    assert_eq!(said.status.code(), Some(64), "{said:?}");
    for (line, key) in [
        (2, "mode.cloud.stream.server.listen"),
        (3, "mode.cloud.stream.server.key"),
        (5, "mode.cloud.ssh.prot"),
        (7, "mode.cloud.session.grace"),
    ] {
        assert!(said.stderr.contains(&format!("line {line}: {key}")), "{key}: {}", said.stderr);
    }
    assert!(said.stderr.contains(&file.display().to_string()), "{}", said.stderr);
}

#[test]
fn a_config_that_is_not_there_is_exit_code_64() {
    let said = started(&["--m=edge", "--c=/nowhere/edge.toml"]);
    assert_eq!(said.status.code(), Some(64), "{said:?}");
    assert!(said.stderr.contains("/nowhere/edge.toml") && said.stderr.contains("--c=FILE"), "{said:?}");
}

#[test]
fn a_port_in_use_is_told_with_its_key_and_exit_code_1() {
    let place = TestDir::new();
    let taken = TcpListener::bind("127.0.0.1:0").unwrap();
    let at = taken.local_addr().unwrap();
    let config = format!(
        "{}[mode.cloud.ssh]\nlisten = \"{at}\"\n",
        place.cloud_config(loopback(free_port()), free_port())
    );
    let said = started(&["--m=cloud", &format!("--c={}", place.config("cloud", &config).display())]);
    assert_eq!(said.status.code(), Some(1), "{said:?}");
    assert!(said.stderr.contains("mode.cloud.ssh.listen"), "{said:?}");
    assert!(said.stderr.contains(&at.to_string()), "{said:?}");
}

/// SuperEdge's files may not mention ssh at all, and its port 22 is often the machine's own sshd's.
#[test]
fn a_port_22_that_nobody_asked_for_may_be_missing() {
    let place = TestDir::new();
    // Taken by somebody else, taken here, or forbidden to this user: missing in any case.
    let _taken = TcpListener::bind("0.0.0.0:22");
    let (grpc, log_port) = (free_port(), free_port());
    let file = place.config("cloud", &place.cloud_config(loopback(grpc), log_port));
    let mut cloud = Running::start(
        "cloud",
        place.path(),
        tunnel().arg("--m=cloud").arg(format!("--c={}", file.display())),
    );
    cloud.answers(log_port, "/readyz", "");
    cloud.says("going on without this port");
    let _edge = Edge::start(&place, &format!("127.0.0.1:{grpc}"));
    cloud.answers(log_port, "/cloud/healthz", "node1");
}

#[test]
fn flags_in_gos_spelling_are_understood_and_logs_go_to_files() {
    let place = TestDir::new();
    let dir = place.path().join("logs");
    let (grpc, log_port) = (free_port(), free_port());
    let file = place.config("cloud", &place.cloud_config(loopback(grpc), log_port));
    let mut command = tunnel();
    command.args(["-m=cloud", "-c"]).arg(&file).arg(format!("-log_dir={}", dir.display()));
    command.args(["-v", "2", "-kube_qps=50", "-kube-burst", "70", "-logtostderr=false", "--log_format=json"]);
    let mut cloud = Running::start("cloud", place.path(), &mut command);
    cloud.answers(log_port, "/readyz", "");
    wait_until("the log file tells that the pod is up", PATIENCE, || {
        cloud.lives();
        logged(&dir, "tunnel-cloud").contains("\"pod is up\"")
    });
    assert_eq!(cloud.log(), "", "nothing goes to stderr beside the files");
    cloud.terminate();
    assert!(cloud.ends(PATIENCE).success());
    let log = logged(&dir, "tunnel-cloud");
    assert!(log.contains("\"stopped\""), "the last lines are written too: {log}");
    assert!(log.lines().all(|line| line.starts_with('{') && line.ends_with('}')), "{log}");
}

#[test]
fn logs_go_to_files_and_to_stderr_if_both_are_asked_for() {
    let place = TestDir::new();
    let dir = place.path().join("logs");
    let log_port = free_port();
    let file = place.config("cloud", &place.cloud_config(loopback(free_port()), log_port));
    let mut command = tunnel();
    command.arg(format!("--log-dir={}", dir.display())).arg("-alsologtostderr");
    command.arg(format!("-c={}", file.display()));
    let mut cloud = Running::start("cloud", place.path(), &mut command);
    cloud.says("pod is up");
    wait_until("the log file tells that the pod is up", PATIENCE, || {
        logged(&dir, "tunnel-cloud").contains("pod is up")
    });
}

#[test]
fn a_flag_that_nobody_knows_is_refused() {
    let said = started(&["--m=cloud", "--verbosity=3"]);
    assert_eq!(said.status.code(), Some(2), "{said:?}");
    assert!(said.stderr.contains("--verbosity"), "{said:?}");
}

#[test]
fn the_log_level_is_set_while_it_runs() {
    let place = TestDir::new();
    let log_port = free_port();
    let file = place.config("cloud", &place.cloud_config(loopback(free_port()), log_port));
    let config = format!("--c={}", file.display());
    let mut cloud = Running::start("cloud", place.path(), tunnel().args(["--m=cloud", &config]));
    cloud.answers(log_port, "/readyz", "");
    assert!(!cloud.log().contains("DEBUG") && !cloud.log().contains("TRACE"), "{}", cloud.log());

    let answer = ask(log_port, "PUT", "/debug/flags/v", "6").unwrap();
    assert!(answer.contains("200 OK"), "{answer}");
    assert!(answer.ends_with("successfully set klog.logging.verbosity to 6\n"), "{answer}");
    let _ = ask(log_port, "GET", "/livez", "");
    cloud.says("TRACE");

    let answer = ask(log_port, "PUT", "/debug/flags/v", "much").unwrap();
    assert!(answer.contains("400 "), "{answer}");
    cloud.lives();
}

#[test]
fn metrics_have_their_port() {
    let Pair { edge, cloud, place } = Pair::start();
    let answer = ask(cloud.metrics, "GET", "/metrics", "").unwrap();
    assert!(answer.lines().any(|line| line == "# EOF"), "{answer}");
    assert!(answer.contains("tunnel"), "{answer}");
    let answer = ask(cloud.metrics, "PUT", "/debug/flags/v", "6").unwrap();
    assert!(answer.contains("404 "), "the level is not set there: {answer}");
    drop((edge, cloud, place));
}

/// Runs it until it ends by itself, as it does when it cannot start.
fn started(args: &[&str]) -> Said {
    run(PROGRAM, args, None, PATIENCE)
}

/// All that stands in a program's log files.
fn logged(dir: &Path, name: &str) -> String {
    let Ok(entries) = std::fs::read_dir(dir) else { return String::new() };
    let files = entries.map(|entry| entry.unwrap().path());
    let ours = files.filter(|file| file.file_name().unwrap().to_string_lossy().starts_with(name));
    ours.map(|file| std::fs::read_to_string(file).unwrap()).collect()
}

const PROGRAM: &str = env!("CARGO_BIN_EXE_tunnel");

/// For a demo of several steps, each of which may take 10 s.
const LONG: Duration = Duration::from_secs(40);
