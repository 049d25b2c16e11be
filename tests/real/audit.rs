//! The audit log: each privileged action leaves one line with the user and the address; nothing else leaves any.

use std::io::{Read as _, Write as _};
use std::net::{TcpListener, TcpStream};
use std::os::unix::fs::PermissionsExt as _;
use std::path::Path;

use serde_json::Value;

use crate::enrol::{run_tunnel, with_admin};
use crate::parts::free_port;
use crate::process::{Running, TIMEOUT, set_level};
use crate::tunnel::{Edge, ServerProcess, TOKEN, TestDir};
use crate::wait::wait_until;

/// Returns the audit lines of a log of JSON lines.
fn audited(program: &Running) -> Vec<Value> {
    let log = program.log();
    // The last line may still be incomplete.
    let lines = log.lines().filter_map(|line| serde_json::from_str::<Value>(line).ok());
    lines.filter(|line| line["target"] == "tunnel::audit").collect()
}

/// Waits until exactly one more line is logged.
fn one_more(program: &Running, seen: &mut usize, message: &str, fields: &[(&str, &str)]) {
    wait_until(message, TIMEOUT, || audited(program).len() > *seen);
    let lines = audited(program);
    *seen += 1;
    assert_eq!(lines.len(), *seen, "{lines:?}");
    let line = lines.last().unwrap();
    assert!(line["message"].as_str().unwrap().contains(message), "{message}: {line}");
    for (field, value) in fields {
        assert_eq!(line[field], *value, "{line}");
    }
}

#[test]
fn each_privileged_action_at_a_server_logs_one_line_with_user_and_address() {
    let place = TestDir::new();
    let socket = place.path().join("server.sock");
    let more = format!(
        "allow_from = [\"127.0.0.0/8\"]\n[server.admin]\nlisten = \"unix:{}\"\n\
         [server.invitations]\nstore = \"file\"\nfile = {:?}\n",
        socket.display(),
        place.path().join("enrolled")
    );
    let mut cloud = ServerProcess::start_as(&place, &more, &[], &["--log-format=json"]);
    let at = format!("localhost:{}", cloud.grpc);
    let tokens = place.path().join("token");
    let mut seen = 0;
    assert_eq!(audited(&cloud.process), Vec::<Value>::new(), "a start leaves no audit line");
    let id = crate::process::run("id", &["-u"], None, TIMEOUT).stdout;
    let user = format!("uid={}", id.trim());

    assert!(set_level(&socket, "much").contains("400 "));
    assert!(set_level(&socket, "1").contains("200 OK"));
    one_more(&cloud.process, &mut seen, "log level set", &[("actor", &user)]);

    let socket = format!("--socket={}", socket.display());
    let invited = run_tunnel(&["invite", "--node", "edge7", "--expires", "90s", &socket]);
    let line = invited.stdout.lines().map(str::trim).find(|line| line.starts_with("echo ")).unwrap();
    let code = line.split_whitespace().nth(1).unwrap();
    let made = [("actor", user.as_str()), ("node", "edge7")];
    one_more(&cloud.process, &mut seen, "invitation created", &made);

    let to = place.path().join("etc").display().to_string();
    let join = |code: &str| run_tunnel(&["join", &at, "--invitation", code, "--install-dir", &to]);
    assert_eq!(join(&code.replace(".edge7", ".edge8")).status.code(), Some(77));
    assert!(join(code).status.success());
    let used = [("actor", "edge7"), ("remote_addr", "127.0.0.1")];
    one_more(&cloud.process, &mut seen, "node joined by invitation", &used);

    // The revocation also closes a link, which is not a second action.
    let text = std::fs::read_to_string(place.path().join("etc/edge.toml")).unwrap();
    let text = with_admin(&text, free_port());
    let mut joined = place.tunnel(("edge", "joined"), &text, &[], &[]);
    cloud.wait_for_node("edge7");
    assert!(run_tunnel(&["invitations", "revoke", "edge7", &socket]).status.success());
    cloud.process.wait_for_log("links ended: token revoked");
    let revoked = [("actor", user.as_str()), ("node", "edge7")];
    one_more(&cloud.process, &mut seen, "token and open invitations revoked", &revoked);
    assert!(!run_tunnel(&["invitations", "revoke", "edge7", &socket]).status.success());
    joined.terminate();

    let _edge = Edge::start(&place, &format!("127.0.0.1:{}", cloud.grpc));
    cloud.wait_for_node("node1");
    let target = TcpListener::bind("127.0.0.1:0").unwrap();
    let node1 = format!("node1:{}", target.local_addr().unwrap().port());
    let mut client = TcpStream::connect(("127.0.0.1", cloud.connect)).unwrap();
    write!(client, "CONNECT {node1} HTTP/1.1\r\n\r\n").unwrap();
    client.read_exact(&mut [0; 12]).unwrap();
    let ended = run_tunnel(&["sessions", "end", "--node=node1", &socket]);
    assert_eq!(ended.stdout.trim(), "1 session ended", "{ended:?}");
    let by_operator = [("actor", user.as_str()), ("node", "node1")];
    one_more(&cloud.process, &mut seen, "sessions ended", &by_operator);

    std::fs::write(&tokens, format!("node2:{TOKEN}\n")).unwrap();
    let by_file = [("actor", "the token file"), ("nodes", "default node2")];
    one_more(&cloud.process, &mut seen, "node tokens changed", &by_file);

    let config = place.path().join("cloud.toml");
    let text = std::fs::read_to_string(&config).unwrap();
    let changed =
        text.replace("allow_from = [\"127.0.0.0/8\"]", "allow_from = [\"127.0.0.0/8\", \"10.0.0.0/8\"]");
    assert_ne!(changed, text);
    std::fs::write(&config, changed).unwrap();
    cloud.process.hang_up();
    let by_config = [("actor", "the config"), ("keys", "server.connect")];
    one_more(&cloud.process, &mut seen, "access rules reloaded", &by_config);
}

#[test]
fn each_privileged_action_at_an_edge_logs_one_line_and_one_in_the_audit_file() {
    let (place, log) = (TestDir::new(), free_port());
    let (socket, admin) = place.admin_socket("edge");
    let allow = "[edge.allow]\ntargets = [\"127.0.0.0/8:22\"]\n";
    let config = place.edge_config("node1", "127.0.0.1:1", log) + allow + &admin;
    let (file, moved) = (place.path().join("audit.log"), place.path().join("audit.log.1"));
    let audit_file = format!("--audit-file={}", file.display());
    let mut edge = place.tunnel(("edge", "edge"), &config, &[], &["--log-format=json", &audit_file]);
    edge.wait_for_answer(log, "/livez", "");
    let mut seen = 0;
    assert!(set_level(&socket, "2").contains("200 OK"));
    one_more(&edge, &mut seen, "log level set", &[]);
    let lines = |file: &Path| {
        let text = std::fs::read_to_string(file).unwrap_or_default();
        text.lines().map(|line| serde_json::from_str(line).unwrap()).collect::<Vec<Value>>()
    };
    wait_until("its line in the file", TIMEOUT, || lines(&file) == audited(&edge));
    assert_eq!(std::fs::metadata(&file).unwrap().permissions().mode() & 0o777, 0o600);
    std::fs::rename(&file, &moved).unwrap();
    std::fs::write(place.path().join("edge.toml"), config.replace(":22\"", ":23\"")).unwrap();
    edge.hang_up();
    let by_config = [("actor", "the config"), ("keys", "edge.allow")];
    one_more(&edge, &mut seen, "access rules reloaded", &by_config);
    wait_until("its line in a new file", TIMEOUT, || lines(&file) == audited(&edge)[1..]);
    assert_eq!(lines(&moved), audited(&edge)[..1]);
}
