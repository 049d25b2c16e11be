//! The command line, as service managers and users see it, apart from what the program carries.

use std::io::{Read as _, Write as _};
use std::net::{TcpListener, TcpStream};
use std::os::unix::fs::PermissionsExt as _;
use std::path::{Path, PathBuf};
use std::time::Duration;

use crate::parts::{are_installed, free_port, loopback};
use crate::process::{ProcessOutput, Running, TIMEOUT, run, send_request, set_level};
use crate::tunnel::{Edge, Pair, ServerProcess, TOKEN, TestDir, tunnel};
use crate::wait::wait_until;

#[test]
fn a_bad_config_is_reported_with_all_its_errors_and_exit_code_78() {
    let place = TestDir::new();
    let file = place.config(
        "bad",
        "[server.links]\nlisten = \"nowhere\"\nkey = 7\n[server.connect]\nprot = 22\n\
         [server.session]\nresume_timeout = \"long\"\n",
    );
    let output = started(&["server", &format!("--config={}", file.display())]);
    assert_eq!(output.status.code(), Some(78), "{output:?}");
    for (line, key) in [
        (2, "server.links.listen"),
        (3, "server.links.key"),
        (5, "server.connect.prot"),
        (7, "server.session.resume_timeout"),
    ] {
        let count = output.stderr.matches(&format!("key={key} line={line}\n")).count();
        assert_eq!(count, 1, "{key}: {}", output.stderr);
    }
    assert!(output.stderr.contains(&file.display().to_string()), "{}", output.stderr);
}

#[test]
fn a_missing_config_leads_to_exit_code_78() {
    let output = started(&["edge", "--config=/nowhere/edge.toml"]);
    assert_eq!(output.status.code(), Some(78), "{output:?}");
    assert!(
        output.stderr.contains("/nowhere/edge.toml") && output.stderr.contains("--config=FILE"),
        "{output:?}"
    );
}

/// A typo that is pushed to all machines must not end their links.
#[test]
fn an_edge_with_a_bad_config_starts_from_its_last_good_copy() {
    let place = TestDir::new();
    let (server_socket, admin) = place.admin_socket("server");
    let cloud = ServerProcess::start_with(&place, &admin, &[]);
    let log_port = free_port();
    let (socket, admin) = place.admin_socket("edge");
    let good = place.edge_config("node1", &format!("127.0.0.1:{}", cloud.grpc), log_port) + &admin;
    let state = place.path().join("state");
    std::fs::create_dir(&state).unwrap();
    let start = |text: &str| {
        place.tunnel(("edge", "edge"), text, &[("STATE_DIRECTORY", state.to_str().unwrap())], &[])
    };
    let typo = good.replace("servers", "severs");
    let mut never_good = start(&typo);
    assert_eq!(never_good.wait_for_exit(TIMEOUT).code(), Some(78), "{}", never_good.log());
    let mut edge = start(&good);
    edge.wait_for_answer(log_port, "/readyz", "ok");
    let file = place.path().join("edge.toml");
    let copy = state.join(
        file.to_str().unwrap().trim_start_matches('/').replace('-', "--").replace('/', "-") + ".last-good",
    );
    wait_until("the copy is kept", TIMEOUT, || std::fs::read_to_string(&copy).is_ok_and(|kept| kept == good));
    assert_eq!(std::fs::metadata(&copy).unwrap().permissions().mode() & 0o777, 0o600);
    edge.terminate();
    assert!(edge.wait_for_exit(TIMEOUT).success());
    for bad in [&typo, &good.replace("ca.", "no-ca."), "nonsense", ""] {
        let mut edge = start(bad);
        edge.wait_for_log("starting from the last good copy of this config");
        edge.wait_for_answer(log_port, "/readyz", "config: the config file has errors");
        let nodes = started(&["nodes", &format!("--socket={}", server_socket.display())]);
        let version = concat!(env!("CARGO_PKG_VERSION"), "+last-good-config");
        assert!(nodes.stdout.ends_with(&format!("\n1 of version {version}\n")), "{nodes:?}");
        let of_program = env!("CARGO_PKG_VERSION");
        for (version, names) in [(version, "node1\n"), (of_program, "node1\n"), ("0", "")] {
            let socket = format!("--socket={}", server_socket.display());
            assert_eq!(started(&["nodes", "--version", version, "-o", "name", &socket]).stdout, names);
            let shown = started(&["nodes", "--version", version, &socket]).stdout;
            assert_eq!(
                shown.starts_with("no node has this version; there are: 1 of version "),
                names.is_empty(),
                "{shown}"
            );
        }
        let status = started(&["status", &format!("--socket={}", socket.display())]);
        assert!(status.stdout.contains("! config: the config file has errors"), "{status:?}");
        let check = started(&["config", "check", file.to_str().unwrap()]);
        assert_eq!(check.status.code(), Some(78), "{check:?}");
        assert_eq!(std::fs::read_to_string(&copy).unwrap(), good);
        std::fs::write(&file, &good).unwrap();
        wait_until("the condition is gone", TIMEOUT, || {
            edge.hang_up();
            send_request(log_port, "GET", "/readyz", "")
                .is_some_and(|answer| answer.ends_with("\r\n\r\nok\n"))
        });
        edge.terminate();
        assert!(edge.wait_for_exit(TIMEOUT).success());
    }
}

#[test]
fn a_port_in_use_is_reported_with_its_key_and_exit_code_69() {
    let place = TestDir::new();
    let taken = TcpListener::bind("127.0.0.1:0").unwrap();
    let at = taken.local_addr().unwrap();
    let config = format!(
        "{}[server.connect]\nlisten = \"{at}\"\n",
        place.cloud_config(loopback(free_port()), free_port())
    );
    let output = started(&["server", &format!("--config={}", place.config("cloud", &config).display())]);
    assert_eq!(output.status.code(), Some(69), "{output:?}");
    assert!(output.stderr.contains("server.connect.listen"), "{output:?}");
    assert!(output.stderr.contains(&at.to_string()), "{output:?}");
}

/// Another user's program may have the port, on purpose or by chance.
#[test]
fn a_default_admin_port_that_is_taken_prevents_no_start() {
    let place = TestDir::new();
    // If this fails, another program has the port already.
    let _taken = TcpListener::bind("127.0.0.1:9010");
    let (set, (path, admin)) =
        (place.cloud_config(loopback(free_port()), 9010), place.admin_socket("server"));
    let by_default = set.replace("admin_listen = \"127.0.0.1:9010\"\n", "") + &admin;
    let file = place.config("default", &by_default);
    let config = format!("--config={}", file.display());
    let mut server = Running::start("cloud", place.path(), tunnel().args(["server", &config]));
    server.wait_for_log("continuing without it");
    let socket = format!("--socket={}", path.display());
    wait_until("the server answers at its socket", TIMEOUT, || {
        server.assert_running();
        started(&["status", &socket]).status.success()
    });
    let found = started(&["doctor", "server", &config]);
    assert!(found.stdout.contains("the server on this machine is ready"), "{found:?}");
    server.terminate();
    let output = started(&["server", &format!("--config={}", place.config("set", &set).display())]);
    assert_eq!(output.status.code(), Some(69), "{output:?}");
    assert!(output.stderr.contains("key=server.links.admin_listen"), "{output:?}");
}

/// SuperEdge's config files may not mention ssh at all, and the machine's own sshd often uses port 22.
#[test]
fn port_22_may_be_missing_if_the_config_does_not_request_it() {
    let place = TestDir::new();
    // The port is in use by another program, in use by this test, or forbidden to this user: it is missing in any
    // case.
    let _taken = TcpListener::bind("0.0.0.0:22");
    let (grpc, log_port) = (free_port(), free_port());
    let config = format!(
        "[mode.cloud.stream.server]\ngrpc_port = {grpc}\nlog_port = {log_port}\n\
         cert = {:?}\nkey = {:?}\ntokenfile = {:?}\n",
        place.files.cert,
        place.files.key,
        place.path().join("token")
    );
    let file = place.config("cloud", &config);
    let mut cloud = Running::start(
        "cloud",
        place.path(),
        tunnel().arg("server").arg(format!("--config={}", file.display())),
    );
    cloud.wait_for_answer(log_port, "/readyz", "");
    cloud.wait_for_log("continuing without it");
    let _edge = Edge::start(&place, &format!("127.0.0.1:{grpc}"));
    cloud.wait_for_answer(log_port, "/cloud/healthz", "node1");
}

#[test]
fn flags_in_go_spelling_are_understood_and_logs_go_to_files() {
    let place = TestDir::new();
    let dir = place.path().join("logs");
    let (grpc, log_port) = (free_port(), free_port());
    let file = place.config("cloud", &place.cloud_config(loopback(grpc), log_port));
    let mut command = tunnel();
    command.args(["-m=cloud", "-c"]).arg(&file).arg(format!("-log_dir={}", dir.display()));
    command.args(["-v", "2", "-kube_qps=50", "-kube-burst", "70", "-logtostderr=false", "--log_format=json"]);
    let mut cloud = Running::start("cloud", place.path(), &mut command);
    cloud.wait_for_answer(log_port, "/readyz", "");
    wait_until("the log file reports that the server has started", TIMEOUT, || {
        cloud.assert_running();
        logged(&dir, "tunnel-cloud").contains("\"server started\"")
    });
    assert_eq!(cloud.log(), "", "nothing goes to stderr in addition to the files");
    cloud.terminate();
    assert!(cloud.wait_for_exit(TIMEOUT).success());
    let log = logged(&dir, "tunnel-cloud");
    assert!(log.contains("\"stopped\""), "the last lines are written too: {log}");
    assert!(log.lines().all(|line| line.starts_with('{') && line.ends_with('}')), "{log}");
}

#[test]
fn logs_go_to_files_and_to_stderr_if_both_are_requested() {
    let place = TestDir::new();
    let dir = place.path().join("logs");
    let (log_port, connect) = (free_port(), free_port());
    let config = place.cloud_config(loopback(free_port()), log_port);
    let connects = format!("[server.connect]\nlisten = \"127.0.0.1:{connect}\"\nauth = \"none\"\n");
    let file = place.config("cloud", &(config + &connects));
    let mut command = tunnel();
    command.arg(format!("--log-dir={}", dir.display())).arg("-alsologtostderr");
    command.arg(format!("-c={}", file.display()));
    let mut cloud = Running::start("cloud", place.path(), &mut command);
    cloud.wait_for_log("server started");
    assert!(send_request(connect, "CONNECT", "node1:22", "").unwrap().contains("502 "));
    let line = cloud.wait_for_log("node1:22");
    let spans = line.split("tunnel::access").next().unwrap();
    assert_eq!(spans.matches("trace_id=").count(), 1, "{line}");
    wait_until("the log file has the same line", TIMEOUT, || logged(&dir, "tunnel-cloud").contains(&line));

    // Log rotation moves the file, and sends SIGHUP.
    let old = std::fs::read_dir(&dir).unwrap().next().unwrap().unwrap().path();
    std::fs::rename(&old, place.path().join("moved.log")).unwrap();
    cloud.hang_up();
    wait_until("a new log file begins", TIMEOUT, || logged(&dir, "tunnel-cloud").contains("SIGHUP"));
    assert!(!logged(&dir, "tunnel-cloud").contains("server started"));
}

/// SuperEdge's manifests mount a directory of root, which its image could write.
#[test]
fn superedges_command_line_starts_without_its_log_directory() {
    let place = TestDir::new();
    let log_port = free_port();
    let file = place.config("cloud", &place.cloud_config(loopback(free_port()), log_port));
    let mut command = tunnel();
    command.args(["--m=cloud", "--c"]).arg(&file).arg(format!("--log-dir={}/logs", file.display()));
    let mut cloud = Running::start("cloud", place.path(), &mut command);
    cloud.wait_for_answer(log_port, "/readyz", "");
    let line = cloud.wait_for_log("logging to stderr only");
    assert!(line.contains("WARN") && line.contains("key=\"--log-dir\"") && line.contains("/logs"), "{line}");
}

#[test]
fn an_unknown_flag_is_refused() {
    let output = started(&["server", "--verbose=3"]);
    assert_eq!(output.status.code(), Some(64), "{output:?}");
    assert!(output.stderr.contains("--verbose"), "{output:?}");
    let output = started(&["--help"]);
    assert_eq!(output.status.code(), Some(0), "{output:?}");
    assert!(output.stdout.contains("78  the config"), "{output:?}");
}

/// Writes a config with errors in everything that can be wrong: a key, the certificate, the tokens, the users, and a
/// port.
fn all_wrong(place: &TestDir, taken: &TcpListener) -> PathBuf {
    std::fs::write(&place.files.cert, "no certificate").unwrap();
    std::fs::remove_file(place.path().join("token")).unwrap();
    let config = format!(
        "{}[server.connect]\nlisten = \"{}\"\nauth = \"basic\"\nusers = \"/nowhere/users\"\n\
         [server.session]\nresume_timeout = \"long\"\n",
        place.cloud_config(loopback(free_port()), free_port()),
        taken.local_addr().unwrap(),
    );
    place.config("wrong", &config)
}

const ALL_WRONG: [(&str, &str); 4] = [
    ("server.session.resume_timeout", "long"),
    ("server.links.cert", "holds no certificate"),
    ("server.links.token_file", "cannot read"),
    ("server.connect.users", "/nowhere/users"),
];

#[test]
fn all_errors_are_reported_at_once_and_each_only_once() {
    let (place, taken) = (TestDir::new(), TcpListener::bind("127.0.0.1:0").unwrap());
    let file = all_wrong(&place, &taken);
    let output = started(&["server", "--log-format=json", &format!("--config={}", file.display())]);
    assert_eq!(output.status.code(), Some(78), "the exit code is that of the most severe error: {output:?}");
    let found = errors(&output.stderr);
    let port = taken.local_addr().unwrap().to_string();
    for (key, text) in ALL_WRONG.into_iter().chain([("server.connect.listen", port.as_str())]) {
        let found: Vec<_> = found.iter().filter(|(k, _)| k == key).collect();
        assert!(found.len() == 1 && found[0].1.contains(text), "{key}: {found:?}");
    }
    assert_eq!(found.len(), ALL_WRONG.len() + 1, "{found:?}");
    let begin = output.stderr.lines().next().unwrap();
    let config = file.display().to_string();
    assert!(begin.contains(env!("CARGO_PKG_VERSION")) && begin.contains(&config), "{begin}");
}

#[test]
fn a_check_reads_the_files_of_the_config_and_opens_no_port() {
    let (place, taken) = (TestDir::new(), TcpListener::bind("127.0.0.1:0").unwrap());
    let config = format!(
        "{}[server.connect]\nlisten = \"{}\"\n",
        place.cloud_config(loopback(free_port()), free_port()),
        taken.local_addr().unwrap()
    );
    let file = place.config("right", &config).display().to_string();
    let output = started(&["config", "check", &file]);
    assert!(output.status.success() && output.stdout.ends_with("right.toml: ok\n"), "{output:?}");

    let output = started(&["config", "check", "-o", "json", &file]);
    let last: serde_json::Value = serde_json::from_str(output.stderr.lines().last().unwrap()).unwrap();
    assert_eq!((&last["errors"], &last["config"]), (&0.into(), &file.as_str().into()), "{output:?}");
    assert!(output.status.success() && output.stdout.is_empty(), "{output:?}");

    let needs_kubernetes = place.config("asks", &format!("{config}[server.addresses]\nkubernetes = true\n"));
    let output = started(&["config", "check", "--kubeconfig=/nowhere/k", needs_kubernetes.to_str().unwrap()]);
    assert_eq!(output.status.code(), Some(78), "{output:?}");
    assert!(
        output.stderr.contains("cannot read /nowhere/k: ") && output.stderr.contains(" key=--kubeconfig"),
        "{output:?}"
    );

    let file = all_wrong(&place, &taken).display().to_string();
    let output = started(&["config", "check", "-o", "json", &file]);
    assert_eq!((output.status.code(), output.stdout.as_str()), (Some(78), ""), "{output:?}");
    let mut found: Vec<_> = errors(&output.stderr).into_iter().map(|(key, _)| key).collect();
    found.sort();
    let mut expected = ALL_WRONG.map(|(key, _)| key);
    expected.sort();
    assert_eq!(found, expected);
}

#[test]
fn a_check_of_an_edge_reads_its_files() {
    let place = TestDir::new();
    let config = |ca: &Path, token: &str| {
        let config = format!(
            "[edge.uplink]\nnode = \"node1\"\ntoken_file = \"{}\"\nca = \"{}\"\n\
             servers = [\"127.0.0.1:9000\"]\n",
            place.path().join(token).display(),
            ca.display()
        );
        place.config("edge", &config).display().to_string()
    };
    let output = started(&["config", "check", &config(&place.files.ca, "token")]);
    assert!(output.status.success() && output.stdout.ends_with("edge.toml: ok\n"), "{output:?}");
    let output = started(&["config", "check", "-o", "json", &config(&place.files.key, "missing")]);
    assert_eq!(output.status.code(), Some(78), "{output:?}");
    let keys: Vec<_> = errors(&output.stderr).into_iter().map(|(key, _)| key).collect();
    assert_eq!(keys, ["edge.uplink.ca", "edge.uplink.token_file"]);
}

#[test]
fn startup_errors_go_to_stderr_even_if_logs_go_to_files() {
    let place = TestDir::new();
    let logs = place.path().join("logs");
    let log_dir = format!("--log-dir={}", logs.display());
    let output = started(&["edge", "--config=/nowhere/edge.toml", &log_dir]);
    for log in [output.stderr.as_str(), &logged(&logs, "tunnel-edge")] {
        assert_eq!(log.matches("cannot read the config /nowhere/edge.toml").count(), 1, "{log}");
    }
    std::fs::write(place.path().join("file"), "").unwrap();
    let no_dir = format!("--log-dir={}", place.path().join("file").display());
    let no_file = format!("--audit-file={}", place.path().display());
    let output = started(&["server", &no_dir, &no_file, "--config=/nowhere/cloud.toml"]);
    assert_eq!(output.status.code(), Some(78), "{output:?}");
    for key in ["--log-dir", "--audit-file", "--config"] {
        assert!(output.stderr.contains(&format!("key={key}")), "{key}: {output:?}");
    }
}

/// Returns keys and texts of the errors in a log of JSON lines.
fn errors(log: &str) -> Vec<(String, String)> {
    let text = |value: &serde_json::Value| value.as_str().unwrap_or_default().to_owned();
    let lines = log.lines().map(|line| serde_json::from_str::<serde_json::Value>(line).unwrap());
    let errors =
        lines.filter(|line| line["level"] == "ERROR" && !line["message"].to_string().contains("secure"));
    let errors = errors.map(|line| (text(&line["key"]), text(&line["message"])));
    errors.filter(|(key, _)| !key.is_empty()).collect()
}

#[test]
fn the_log_level_can_be_set_at_run_time() {
    let place = TestDir::new();
    let (log_port, links, (socket, admin)) = (free_port(), free_port(), place.admin_socket("server"));
    let file = place.config("cloud", &(place.cloud_config(loopback(links), log_port) + &admin));
    let config = format!("--config={}", file.display());
    let mut cloud = Running::start("cloud", place.path(), tunnel().args(["server", &config]));
    cloud.wait_for_answer(log_port, "/readyz", "");
    // Any user of the machine may reach the port, and level 8 would fill the disk.
    let answer = send_request(log_port, "PUT", "/debug/flags/v", "8").unwrap();
    assert!(answer.contains("403 ") && answer.contains("curl --unix-socket"), "{answer}");
    assert!(!cloud.log().contains("DEBUG") && !cloud.log().contains("TRACE"), "{}", cloud.log());

    let answer = set_level(&socket, "6");
    assert!(answer.contains("200 OK"), "{answer}");
    assert!(answer.ends_with("successfully set klog.logging.verbosity to 6\n"), "{answer}");
    // A connection without TLS, which logs a line at debug level.
    let _ = send_request(links, "GET", "/", "");
    cloud.wait_for_log("DEBUG");

    let answer = set_level(&socket, "much");
    assert!(answer.contains("400 "), "{answer}");
    cloud.assert_running();
}

#[test]
fn level_8_logs_each_frame_but_not_its_contents() {
    if !are_installed(&["curl"]) {
        return;
    }
    let place = TestDir::new();
    let (socket, admin) = place.admin_socket("server");
    let mut cloud = ServerProcess::start_with(&place, &admin, &[]);
    let _edge = Edge::start(&place, &format!("127.0.0.1:{}", cloud.grpc));
    cloud.wait_for_node("node1");
    let target = TcpListener::bind("127.0.0.1:0").unwrap();
    let page = format!("http://node1:{}/", target.local_addr().unwrap().port());
    std::thread::spawn(move || {
        let mut client = target.accept().unwrap().0;
        let mut head = Vec::new();
        while !head.ends_with(b"\r\n\r\n") {
            let mut byte = [0];
            client.read_exact(&mut byte).unwrap();
            head.push(byte[0]);
        }
        client.write_all(b"HTTP/1.0 200 OK\r\n\r\nWHAT-IT-SAYS").unwrap();
    });
    assert!(set_level(&socket, "8").contains("200 OK"));
    let proxy = format!("http://127.0.0.1:{}", cloud.connect);
    let got = run("curl", &["-sS", "-p", "-x", &proxy, "-H", "note: WHAT-IS-ASKED", &page], None, TIMEOUT);
    assert_eq!(got.stdout, "WHAT-IT-SAYS", "{got:?}");
    for (what, kind) in [("sent", "Open"), ("received", "Opened"), ("sent", "Data"), ("received", "Fin")] {
        let line = cloud.process.wait_for_log_of(&format!("frame {what}"), &format!("kind=\"{kind}\""));
        assert!(
            line.contains(" tunnel::frames: ") && line.contains(" link=") && line.contains(" session="),
            "{line}"
        );
        assert_eq!(line.contains(" bytes="), kind == "Data", "{line}");
    }
    for carried in ["WHAT-IT-SAYS", "WHAT-IS-ASKED"] {
        assert!(!cloud.process.log().contains(carried), "{carried} is in the log");
    }
}

#[test]
fn metrics_have_their_own_port() {
    let Pair { edge, cloud, place } = Pair::start();
    let answer = send_request(cloud.metrics, "GET", "/metrics", "").unwrap();
    assert!(answer.lines().any(|line| line == "# TYPE tunnel_cloud_nodes gauge"), "{answer}");
    let answer = send_request(cloud.metrics, "PUT", "/debug/flags/v", "6").unwrap();
    assert!(answer.contains("404 "), "the log level cannot be set there: {answer}");
    drop((edge, cloud, place));
}

#[test]
fn systemd_is_notified_of_readiness_liveness_and_stopping() {
    let place = TestDir::new();
    let at = place.path().join("notify");
    let notify_socket = std::os::unix::net::UnixDatagram::bind(&at).unwrap();
    notify_socket.set_read_timeout(Some(TIMEOUT)).unwrap();
    let (grpc, log_port) = (free_port(), free_port());
    let ssh = "[server.connect]\nlisten = \"127.0.0.1:0\"\n";
    let file = place.config("cloud", &(place.cloud_config(loopback(grpc), log_port) + ssh));
    let mut command = tunnel();
    command.arg(format!("-c={}", file.display())).env("NOTIFY_SOCKET", &at).env("WATCHDOG_USEC", "400000");
    let mut cloud = Running::start("cloud", place.path(), &mut command);
    let expect_message = |expected: &str| {
        let mut text = [0; 256];
        loop {
            let long = notify_socket.recv(&mut text).unwrap();
            let message = String::from_utf8_lossy(&text[..long]);
            if message.lines().any(|line| line == expected) {
                return;
            }
            assert_eq!(message.trim(), "WATCHDOG=1", "before {expected}");
        }
    };
    expect_message("READY=1");
    cloud.wait_for_answer(log_port, "/readyz", "");
    for _ in 0..2 {
        expect_message("WATCHDOG=1");
    }
    cloud.terminate();
    expect_message("STOPPING=1");
    assert!(cloud.wait_for_exit(TIMEOUT).success());
}

#[test]
fn tokens_that_can_be_guessed_or_shared_are_logged_as_insecure() {
    let place = TestDir::new();
    let server = place.cloud_config(loopback(free_port()), free_port());
    let egress = format!("[server.egress]\nlisten = \"unix:{}\"\n", place.path().join("egress").display());
    let server = [format!("{server}[server.connect]\nlisten = \"127.0.0.1:0\"\n"), server + &egress];
    let own_token = place.path().join("mine");
    let edge = place.edge_config("node1", "127.0.0.1:1", free_port());
    let from_file = edge.replace(&format!("token = \"{TOKEN}\""), &format!("token_file = {own_token:?}"));
    let token = |text: &str| {
        let lines = if text.contains(':') { text.to_owned() } else { format!("node1:{text}\n") };
        std::fs::write(place.path().join("token"), lines).unwrap();
        std::fs::write(&own_token, text).unwrap();
    };
    let risks = |config: &str| {
        let file = place.config("checked", config).display().to_string();
        let output = started(&["config", "check", &file]);
        assert!(output.status.success(), "{output:?}");
        assert!(!output.stderr.contains("short-one"), "{output:?}");
        let lines = output.stderr.lines().filter(|line| line.contains("insecure configuration"));
        lines.map(|line| line.split_once("risk=").unwrap().1.to_owned()).collect::<Vec<_>>().join("\n")
    };
    let long = "0123456789abcdef0123456789abcdef";
    token(&format!("default:{long}\nnode2:{long}\n"));
    assert!(risks(&server[0]).contains("default line: any edge can take any name without its own line"));
    assert!(risks(&server[1]).contains("any name that kube-apiserver requests"));
    token("short-one");
    assert!(risks(&server[0]).contains("tokens of less than 32 characters can be guessed (1): node1"));
    for edge in [&edge, &from_file] {
        assert!(risks(edge).contains("a token of less than 32 characters can be guessed"), "{edge}");
    }
    token(long);
    for config in [&server[0], &from_file] {
        assert_eq!(risks(config), "", "{config}");
    }
}

#[test]
fn failing_tls_handshakes_cannot_make_a_library_flood_the_log() {
    let place = TestDir::new();
    let (links, log_port) = (free_port(), free_port());
    let file = place.config("cloud", &place.cloud_config(loopback(links), log_port));
    let config = format!("--config={}", file.display());
    let mut cloud = Running::start("cloud", place.path(), tunnel().args(["server", &config]));
    cloud.wait_for_answer(log_port, "/readyz", "");
    let hello = hello_with_server_name(b"127.0.0.1");
    for _ in 0..400 {
        let mut stranger = TcpStream::connect(loopback(links)).unwrap();
        stranger.write_all(&hello).unwrap();
        // Until the server has refused it.
        let _ = stranger.read_to_end(&mut Vec::new());
    }
    cloud.wait_for_log("further warnings of a library suppressed");
    let log = cloud.log();
    assert_eq!(log.matches("Illegal SNI").count(), 10, "{log}");
    assert!(log.lines().count() < 50, "{log}");
}

/// Returns the start of a TLS handshake in which a client requests this server.
fn hello_with_server_name(name: &[u8]) -> Vec<u8> {
    let with_length = |bytes: &[u8]| [&u16::try_from(bytes.len()).unwrap().to_be_bytes(), bytes].concat();
    let names = with_length(&[&[0], &with_length(name)[..]].concat());
    let extensions = with_length(&[&[0, 0], &with_length(&names)[..]].concat());
    let version_and_random = [&[3, 3], &[7; 32][..]].concat();
    let session_suites_compression = [0, 0, 2, 0x13, 1, 1, 0];
    let body = [&version_and_random[..], &session_suites_compression, &extensions].concat();
    let handshake = [&[1, 0], &with_length(&body)[..]].concat();
    [&[0x16, 3, 1], &with_length(&handshake)[..]].concat()
}

#[test]
fn doctor_ends_with_an_exit_code_that_scripts_can_check() {
    let place = TestDir::new();
    let config = place.edge_config("node1", "127.0.0.1:1", free_port());
    let file = format!("--config={}", place.config("edge", &config).display());
    let output = started(&["doctor", "edge", &file]);
    assert_eq!(output.status.code(), Some(1), "{output:?}");
    assert!(output.stdout.contains("FAIL port") && output.stdout.contains("failed\n"), "{output:?}");
    let output = started(&["doctor", "edge", &file, "-o=json"]);
    let found: serde_json::Value = serde_json::from_str(&output.stdout).unwrap();
    assert!(found.as_array().unwrap().iter().any(|one| one["check"] == "port"), "{found}");
}

/// Runs the program until it ends on its own, for example because it cannot start.
fn started(args: &[&str]) -> ProcessOutput {
    run(PROGRAM, args, None, TIMEOUT)
}

/// Returns the contents of a program's log files.
fn logged(dir: &Path, name: &str) -> String {
    let Ok(entries) = std::fs::read_dir(dir) else { return String::new() };
    let files = entries.map(|entry| entry.unwrap().path());
    let ours = files.filter(|file| file.file_name().unwrap().to_string_lossy().starts_with(name));
    ours.map(|file| std::fs::read_to_string(file).unwrap()).collect()
}

const PROGRAM: &str = env!("CARGO_BIN_EXE_tunnel");

/// Timeout for a demo of several steps, each of which may take 10 s.
const LONG: Duration = Duration::from_secs(40);

#[test]
fn bash_completes_commands_and_flags() {
    let script = "source <(\"$0\" completions bash); COMP_WORDS=(tunnel server --log-); COMP_CWORD=2; _tunnel tunnel --log- server; \
                  echo \"${COMPREPLY[@]}\"";
    let output = run("bash", &["-c", script, PROGRAM], None, LONG);
    assert!(output.stdout.contains("--log-dir") && output.stdout.contains("--log-format"), "{output:?}");
}

#[test]
fn man_pages_are_written_to_the_requested_directory_only() {
    let place = tempfile::tempdir().unwrap();
    let pages = place.path().join("man1");
    let output = run(PROGRAM, &["man", pages.to_str().unwrap()], None, LONG);
    assert!(output.status.success() && pages.join("tunnel-demo.1").exists(), "{output:?}");
    let output = run(PROGRAM, &["man", "/proc/man1"], None, LONG);
    assert_eq!(output.status.code(), Some(73), "{output:?}");
    assert!(output.stderr.contains("cannot write man pages into /proc/man1"), "{output:?}");
}
