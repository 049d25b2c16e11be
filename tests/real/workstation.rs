//! Commands of operators and completions on a workstation, which has a user's link and no admin socket.

use std::path::Path;
use std::process::Command;

use crate::parts::{are_installed, is_root};
use crate::process::{ProcessOutput, TIMEOUT, run_command};
use crate::tunnel::{Edge, PROGRAM, ServerProcess, TestDir};

/// Runs a shell's line as the user with that home, on a machine without default admin sockets.
fn at_workstation(home: &Path, line: &str) -> ProcessOutput {
    let script = format!(
        "mount -t tmpfs none /run; [ ! -d /tmp/tunnel-0 ] || mount -t tmpfs none /tmp/tunnel-0\n\
         tunnel() {{ {PROGRAM} \"$@\"; }}\n{line}"
    );
    let mut command = Command::new("unshare");
    command.args(["-m", "bash", "-c", &script]).env("HOME", home).env_remove("XDG_CONFIG_HOME");
    run_command(line, command.env_remove("XDG_RUNTIME_DIR"), None, TIMEOUT)
}

/// Makes the machine with that home a device of the user whom `invite` invites, as its output says.
fn join(home: &Path, at: &str, invited: &ProcessOutput) {
    assert!(invited.status.success(), "{invited:?}");
    let code = invited.stdout.split_whitespace().skip_while(|word| *word != "echo").nth(1).unwrap();
    std::fs::create_dir(home).unwrap();
    let line = format!("echo {code} | tunnel join --user {at} --invitation -");
    let joined = at_workstation(home, &line);
    assert!(joined.status.success() && joined.stdout.contains("\n  tunnel ssh "), "{joined:?}");
}

#[test]
fn commands_of_operators_use_a_link_where_no_server_runs() {
    if !is_root() || !are_installed(&["unshare", "mount", "bash", "timeout"]) {
        return;
    }
    let place = TestDir::new();
    let (socket, store) = (place.path().join("server.sock"), place.path().join("enrolled"));
    let more = format!(
        "[server.admin]\nlisten = \"unix:{}\"\n[server.invitations]\nstore = \"file\"\nfile = {store:?}\n\
         [server.clients]\nadmins = [\"alice\"]\nrules = [{{ users = [\"bob\"], nodes = [\"other\"] }}]\n",
        socket.display()
    );
    let mut server = ServerProcess::start_with(&place, &more, &[]);
    let at = format!("localhost:{}", server.grpc);
    let _edge = Edge::start(&place, &at);
    server.wait_for_node("node1");
    let socket = format!("--socket={}", socket.display());
    let [alice, bob, nobody] = ["alice", "bob", "nobody"].map(|name| place.path().join(name));
    let missing = at_workstation(&nobody, "tunnel nodes");
    assert!(missing.status.code() == Some(69) && missing.stderr.contains("no admin socket"), "{missing:?}");
    join(&alice, &at, &at_workstation(&nobody, &format!("tunnel invite --user alice {socket}")));
    for (line, expected) in [
        ("tunnel nodes", "node1"),
        ("tunnel nodes -o name", "node1\n"),
        ("tunnel status", "0 sessions"),
        ("tunnel sessions -o json", "\"sessions\": ["),
        ("tunnel invitations list", "alice"),
        ("tunnel invite --node edge7", "on edge7, within 1 h, as root:"),
        ("PATH=/; tunnel completions fish", "nodes -o name"),
        (
            "source <(tunnel completions bash); COMP_WORDS=(tunnel ssh root@no); COMP_CWORD=2
             timeout() { shift; \"$@\"; }; _tunnel_with_nodes tunnel no ssh; echo ${COMPREPLY[@]}",
            "node1\n",
        ),
    ] {
        let output = at_workstation(&alice, line);
        assert!(output.status.success() && output.stdout.contains(expected), "{line}: {output:?}");
    }
    join(&bob, &at, &at_workstation(&alice, "tunnel invite --user bob"));
    assert_eq!(at_workstation(&bob, "tunnel nodes -o name").stdout, "", "no rule permits node1");
    for (home, line, expected) in [
        (&bob, "tunnel status", "user bob is not in admins of [server.clients]"),
        (&bob, "tunnel invite --user carol", "user bob is not in admins of [server.clients]"),
        (&alice, "tunnel invite --user alice", "user alice is in admins of [server.clients]"),
        (&alice, "tunnel invitations revoke --user alice --device x", "user alice is in admins"),
    ] {
        let output = at_workstation(home, line);
        assert!(output.status.code() == Some(77) && output.stderr.contains(expected), "{line}: {output:?}");
    }
    let revoked = at_workstation(&alice, "tunnel invitations revoke --user bob");
    assert!(revoked.status.success(), "{revoked:?}");
    let refused = at_workstation(&bob, "tunnel nodes");
    assert!(refused.status.code() == Some(77) && refused.stderr.contains("was revoked"), "{refused:?}");
    // A socket that is named wins.
    assert!(at_workstation(&bob, &format!("tunnel nodes {socket}")).stdout.contains("node1"));
    let line = server.process.wait_for_log_of("tunnel::audit", "path=\"/revocations\" status=200");
    assert!(line.contains("user=alice device="), "{line}");
}
