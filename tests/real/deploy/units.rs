//! The units of `deploy/systemd`, used by systemd.

use std::path::Path;
use std::process::Command;

use super::deploy;
use crate::parts::{are_installed, free_port, is_root, loopback, page, skip};
use crate::process::{TIMEOUT, run, run_command};
use crate::tunnel::{Edge, PROGRAM, ServerProcess, TestDir};
use crate::users;

fn unit(side: &str) -> String {
    std::fs::read_to_string(deploy("systemd").join(format!("tunnel-{side}.service"))).unwrap()
}

/// Runs systemd's own check. There must be no ExecStartPre: `RestartPreventExitStatus` does not apply to its exit
/// code.
#[test]
fn systemd_accepts_the_units() {
    for (side, role) in [("server", "server"), ("edge", "edge")] {
        let text = unit(side);
        assert!(!text.lines().any(|line| line.starts_with("ExecStartPre")), "{side}");
        let nonsense = tempfile::NamedTempFile::new().unwrap();
        std::fs::write(nonsense.path(), "nonsense = 1\n").unwrap();
        let prevented = text.lines().find_map(|line| line.strip_prefix("RestartPreventExitStatus="));
        for wrong in [format!("--config={}", nonsense.path().display()), "--nonsense".to_owned()] {
            let output = run(PROGRAM, &[role, &wrong], None, TIMEOUT);
            let code = output.status.code().unwrap().to_string();
            assert!(prevented.unwrap().split(' ').any(|one| one == code), "{code}: {output:?}");
        }
    }
    if !are_installed(&["systemd-analyze"]) {
        return;
    }
    let dir = tempfile::tempdir().unwrap();
    for (side, of) in [("server", "--system"), ("edge", "--system"), ("proxy", "--user")] {
        let name = format!("tunnel-{side}.service");
        // With the user that the package adds.
        let text = unit(side).replace("ExecStart=tunnel", &format!("ExecStart={PROGRAM}"));
        let text =
            text.replace("RuntimeDirectory=tunnel", "User=tunnel\nGroup=tunnel\nRuntimeDirectory=tunnel");
        assert!(text.contains("\nLimitCORE=0\n"), "{side}: a core has keys");
        let text: String = text
            .lines()
            .filter(|line| !line.starts_with("Documentation="))
            .map(|line| format!("{line}\n"))
            .collect();
        let file = dir.path().join(&name);
        std::fs::write(&file, text).unwrap();
        let mut verify = Command::new("systemd-analyze");
        verify.args([of, "verify"]).arg(&file).env("XDG_RUNTIME_DIR", dir.path());
        let output = run_command("systemd-analyze", &mut verify, None, TIMEOUT);
        let of_it: Vec<_> = output.stderr.lines().filter(|line| line.contains(&name)).collect();
        assert!(output.status.success() && of_it.is_empty(), "{output:?}");
        if of == "--user" {
            continue;
        }
        // Tenths of systemd's exposure level. What remains is needed: the network, its own capability, /proc/sys.
        let rate = ["security", "--offline=true", "--threshold=16", file.to_str().unwrap()];
        let output = run("systemd-analyze", &rate, None, TIMEOUT);
        assert!(output.status.success(), "{output:?}");
    }
}

/// A systemd user manager runs the units, but without their sandbox, which it cannot provide.
#[test]
fn systemd_restarts_a_unit_unless_its_config_is_wrong() {
    if !is_root() || !are_installed(&["unshare", "systemctl", MANAGER]) {
        return;
    }
    let place = TestDir::new();
    let units = place.path().join("units");
    std::fs::create_dir(&units).unwrap();
    for side in ["server", "edge"] {
        let text = unit(side)
            .replace("ExecStart=tunnel", &format!("ExecStart={PROGRAM}"))
            .replace("/etc/tunnel", place.path().to_str().unwrap());
        let paragraphs = text.split("\n\n").filter(|paragraph| !paragraph.contains("ProtectSystem="));
        let text = paragraphs.collect::<Vec<_>>().join("\n\n");
        std::fs::write(units.join(format!("tunnel-{side}.service")), text).unwrap();
    }
    let taken = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let ssh = "[server.connect]\nlisten = \"127.0.0.1:0\"\n";
    place.config("server", &(place.cloud_config(taken.local_addr().unwrap(), free_port()) + ssh));
    place.config("good", &(place.cloud_config(loopback(free_port()), free_port()) + ssh));
    std::fs::write(place.path().join("edge.toml"), "nonsense = 1\n").unwrap();
    let script = "systemctl --user start --no-block tunnel-edge tunnel-server
         reaches tunnel-edge '0 78 failed failed'
         reaches tunnel-server '[0-9]* 69 activating auto-restart'
         cp good.toml server.toml
         reaches tunnel-server '[0-9]* 0 active running'
         systemctl --user stop tunnel-server
         reaches tunnel-server '[0-9]* 0 inactive dead'";
    assert_under_manager(place.path(), &units, script);
}

/// The unit is in the home of a user whose device has joined.
#[test]
fn systemd_runs_a_users_proxy_with_her_login_and_restarts_it_unless_her_device_is_refused() {
    if !is_root() || !are_installed(&["unshare", "systemctl", "curl", MANAGER]) {
        return;
    }
    let place = TestDir::new();
    let socket = place.path().join("server.sock");
    let tables = users::tables(&place, ["alice/laptop"], "rules = [{ nodes = [\"node1\"] }]");
    let more = format!("[server.admin]\nlisten = \"unix:{}\"\n{tables}", socket.display());
    let mut server = ServerProcess::start_with(&place, &more, &[]);
    let at = format!("localhost:{}", server.grpc);
    let _edge = Edge::start(&place, &at);
    server.wait_for_node("node1");
    let config = place.path().join("home/.config");
    users::write_client_file(&place, &config.join("tunnel"), &[&at]);
    let [http, socks5] = [free_port(), free_port()];
    let page = format!("curl -sSf -x 127.0.0.1:{http} http://node1:{}/", page());
    // What `systemctl --user edit tunnel-proxy` writes.
    let edited =
        format!("[Service]\nExecStart=\nExecStart={PROGRAM} proxy --http {http} --socks5 {socks5}\n");
    let script = format!(
        "install -m 644 {} home/.config/systemd/user/
         systemctl --user daemon-reload
         mkdir home/.config/systemd/user/tunnel-proxy.service.d
         echo '{edited}' >home/.config/systemd/user/tunnel-proxy.service.d/override.conf
         systemctl --user daemon-reload
         systemctl --user enable tunnel-proxy.service
         systemctl --user start default.target
         reaches tunnel-proxy '0 0 active running'
         [ \"$({page})\" = 'from the node' ]
         kill -9 $(systemctl --user show -p MainPID --value tunnel-proxy)
         reaches tunnel-proxy '1 0 active running'
         [ \"$({page})\" = 'from the node' ]
         {PROGRAM} invitations revoke --user alice --socket {socket}
         systemctl --user restart tunnel-proxy || :
         reaches tunnel-proxy '0 77 failed failed'",
        deploy("systemd/tunnel-proxy.service").display(),
        socket = socket.display()
    );
    assert_under_manager(place.path(), &config.join("systemd/user"), &script);
}

/// Runs a shell's script in that directory, which has a folder `home`, next to a user manager of systemd that reads
/// units from the folder `units`. It has its own namespaces of mounts and processes. The test is skipped if no manager
/// starts here.
fn assert_under_manager(dir: &Path, units: &Path, script: &str) {
    std::fs::create_dir_all(units).unwrap();
    for target in ["sockets.target", "timers.target"] {
        std::os::unix::fs::symlink("/dev/null", units.join(target)).unwrap();
    }
    let script = format!(
        "set -e; mount -t tmpfs none /run; mkdir -p -m 700 /run/systemd/system /run/user; cd {}
         export HOME=$PWD/home XDG_RUNTIME_DIR=/run/user SYSTEMD_UNIT_PATH={}:/usr/lib/systemd/user
         {MANAGER} --user --unit=basic.target &
         state() {{ echo $(systemctl --user show -p ActiveState -p SubState -p ExecMainStatus -p NRestarts --value $1); }}
         reaches() {{ n=0; until state $1 | grep -qx \"$2\"; do n=$((n+1)); [ $n -lt 300 ] || {{ state $1; exit 9; }}; sleep 0.1; done; }}
         n=0; until systemctl --user is-active -q basic.target; do n=$((n+1)); [ $n -lt 300 ] || exit 8; sleep 0.1; done
         {script}
         echo all is well",
        dir.display(),
        units.display()
    );
    let alone = ["-m", "-p", "-f", "--kill-child", "--mount-proc", "--propagation", "private"];
    let output = run("unshare", &[&alone[..], &["sh", "-c", &script]].concat(), None, 6 * TIMEOUT);
    if output.status.code() == Some(8) {
        skip(&format!("no user manager of systemd starts here: {}", output.stderr));
        return;
    }
    assert!(output.status.success() && output.stdout.ends_with("all is well\n"), "{output:?}");
}

/// Path of systemd on Debian.
const MANAGER: &str = "/lib/systemd/systemd";
