//! The commands, the user data and the play of `docs/how-to/a-hundred-nodes.md`, exactly as they are there, for several
//! machines.

use std::io::Write;
use std::path::{Path, PathBuf};
use std::time::Duration;

use tokio::time::Instant;

use crate::network::Machine;
use crate::parts::{all, are_installed, find, is_root};
use crate::process::Running;
use crate::readme::Terminal;
use crate::tunnel::{PROGRAM, TestDir};

#[test]
fn the_play_and_the_user_data_of_the_page_join_each_machine_once_and_enable_its_edge() {
    if all() && can_run() {
        join_machines(4, 3);
    }
}

/// Prints how long the play takes, and the memory of the server.
#[test]
#[ignore = "takes minutes"]
fn a_hundred_machines_join_by_one_key_and_the_play() {
    if can_run() {
        join_machines(100, 100);
    }
}

fn can_run() -> bool {
    is_root() && are_installed(&["ansible-playbook", "ip", "unshare", "ssh", "sshd", "ssh-keygen"])
}

/// Joins this many machines by one key, and starts their edges: the first `played` by the play, the last by its user
/// data.
fn join_machines(count: usize, played: usize) {
    let (place, machine) = (TestDir::new(), Machine::new());
    let nodes: Vec<_> = (1..=count)
        .map(|number| {
            let node = Machine::new();
            let (device, near) = (format!("node{number}"), format!("10.78.{number}.1"));
            let far = format!("10.78.{number}.2/24");
            machine.cable((device.as_str(), &format!("{near}/24")), &node, ("wan", far.as_str()));
            (Terminal::new(&place, &node, &node_name(number), &near), node)
        })
        .collect();
    let server = Terminal::new(&place, &machine, "server", "127.0.0.1");
    server.has_program();
    let start =
        ["tunnel init tunnel-files --name tunnel.example.org", "cp -rT tunnel-files/server /etc/tunnel"];
    server.run_lines(&start.map(str::to_owned));
    let started = server.follow(&["tunnel server".to_owned()], "tunnel server", "server started");
    let _sshds: Vec<_> = nodes.iter().map(|node| start_sshd(&place, node)).collect();
    prepare_play(&place, &server, played);
    for (terminal, _) in &nodes {
        terminal.line(SYSTEMCTL, "");
    }

    let began = Instant::now();
    let first = play(&place, &server, played);
    let key = std::fs::read_to_string(server.dir.join("work/join.key")).unwrap();
    assert!(key.contains(".shop-*") && !first.contains(key.trim()), "the key is printed: {first}");
    for number in played + 1..=count {
        join_by_user_data(&nodes[number - 1].0, &node_name(number), key.trim());
    }
    let joined_after = began.elapsed();
    let edges: Vec<_> = nodes
        .iter()
        .map(|(terminal, _)| {
            let unit = "/etc/systemd/system/multi-user.target.wants/tunnel-edge.service";
            assert!(terminal.line(&format!("cat {unit}"), "").contains("ExecStart="));
            terminal.follow(&["tunnel edge".to_owned()], "tunnel edge", "linked")
        })
        .collect();
    let listed = server.line("tunnel nodes", "");
    assert_eq!(listed.lines().filter(|line| line.starts_with("shop-")).count(), edges.len(), "{listed}");
    // By their names, some of which only the tunnel resolves.
    let reached = server.line_within(
        "export ANSIBLE_SSH_ARGS='-o ControlMaster=no' LC_ALL=C.UTF-8
        tunnel nodes -o ansible > tunnel.json; ansible tunnel -i tunnel.json -m raw -a 'echo reached' 2>&1",
        "",
        PLAY_TIMEOUT,
    );
    assert_eq!(reached.lines().filter(|line| *line == "reached").count(), edges.len(), "{reached}");
    let memory = server.line(&format!("grep VmRSS /proc/{}/status", started.id()), "");
    let _ = writeln!(
        std::io::stderr(),
        "{count} machines joined after {joined_after:?} and were linked after {:?}; server: {memory}",
        began.elapsed()
    );

    let joined = server.line("tunnel invitations list", "");
    assert!(joined.lines().any(|line| line.contains(" shop-* ") && line.contains(" 100 ")), "{joined}");
    let left = format!(" {} ", 100 - count);
    assert!(joined.lines().any(|line| line.contains(&left)), "one use for each: {joined}");
    let second = play(&place, &server, played);
    let unchanged = second.lines().filter(|line| line.starts_with("shop-") && line.contains(" changed=0 "));
    assert_eq!(unchanged.count(), played, "{second}");
}

/// Writes the files of the page where the play runs: on the server's machine, which resolves the names of the others.
fn prepare_play(place: &TestDir, server: &Terminal, played: usize) {
    let work = server.dir.join("work");
    std::fs::write(work.join("join.yml"), block("- hosts: edges")).unwrap();
    // Small, as it is copied to each machine.
    std::fs::write(work.join("tunnel"), format!("#!/bin/sh\nexec {PROGRAM} \"$@\"\n")).unwrap();
    std::fs::copy(unit(), work.join("tunnel-edge.service")).unwrap();
    server.line(&block("umask 077"), "");
    std::fs::write(work.join("inventory.ini"), block("[edges]")).unwrap();
    let hosts: String =
        (1..=played).map(|number| format!("10.78.{number}.2 {}\n", node_name(number))).collect();
    server.line("cat >> /etc/hosts", &hosts);
    let ssh = format!(
        "IdentityFile {}\nStrictHostKeyChecking no\nUserKnownHostsFile /dev/null\nLogLevel ERROR\n",
        place.path().join("id").display()
    );
    std::fs::write(server.dir.join("etc/ssh/ssh_config"), ssh).unwrap();
}

/// Runs the play for the first machines of the inventory, and returns what it prints.
fn play(place: &TestDir, server: &Terminal, played: usize) -> String {
    let file = place.path().join("played");
    std::fs::write(&file, (1..=played).map(|number| node_name(number) + "\n").collect::<String>()).unwrap();
    let line = format!(
        "export ANSIBLE_REMOTE_TMP=/run/ansible ANSIBLE_SSH_ARGS='-o ControlMaster=no' LC_ALL=C.UTF-8
        {} --limit @{} -e ansible_become=false -e ansible_python_interpreter=/usr/bin/python3 2>&1",
        block("ansible-playbook -i inventory.ini join.yml").trim(),
        file.display()
    );
    server.line_within(&line, "", PLAY_TIMEOUT)
}

fn node_name(number: usize) -> String {
    format!("shop-{number:03}")
}

/// A play takes some seconds for each machine, of which it prepares five at a time.
const PLAY_TIMEOUT: Duration = Duration::from_secs(1800);

/// Does what cloud-init does with the user data, on a machine whose host has that name.
fn join_by_user_data(terminal: &Terminal, host: &str, key: &str) {
    let data = block("#cloud-config").replace("KEY", key);
    let (files, commands) = data.split_once("runcmd:\n  - >-\n").unwrap();
    let content = files.lines().find_map(|line| line.trim().strip_prefix("content: ")).unwrap();
    assert!(files.contains("- path: /run/join.key\n") && content == key, "{files}");
    let commands = commands.replace('\n', " ");
    terminal.has_program();
    terminal.line("cat > /etc/systemd/system/tunnel-edge.service", &std::fs::read_to_string(unit()).unwrap());
    terminal.line("umask 077; cat > /run/join.key", key);
    terminal.line(&format!("unshare --uts sh -ec 'hostname {host}; {commands}'"), "");
}

fn unit() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("deploy/systemd/tunnel-edge.service")
}

/// Installs a `systemctl` that only enables a unit.
const SYSTEMCTL: &str = r#"cat >/usr/local/bin/systemctl <<'END'
#!/bin/sh
[ "$1 $2" != 'enable --now' ] || ln -s "/etc/systemd/system/$3.service" /etc/systemd/system/multi-user.target.wants/
END
chmod 755 /usr/local/bin/systemctl; mkdir -p /etc/systemd/system/multi-user.target.wants"#;

/// Returns the fenced block of the page that starts with this line, without its indentation.
fn block(first: &str) -> String {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("docs/how-to/a-hundred-nodes.md");
    let page = std::fs::read_to_string(path).unwrap();
    let mut lines = page.lines().skip_while(|line| line.trim() != first).peekable();
    let line = lines.peek().expect(first);
    let indent = line.len() - line.trim_start().len();
    let lines = lines.take_while(|line| !line.trim().starts_with("```"));
    lines.map(|line| line.get(indent..).unwrap_or_default().to_owned() + "\n").collect()
}

/// Starts sshd at port 22 of a machine. All of them have the same keys.
fn start_sshd(place: &TestDir, (terminal, machine): &(Terminal, Machine)) -> Running {
    let dir = place.path();
    let (key, config) = (dir.join("id"), dir.join("sshd_config"));
    if !key.exists() {
        machine.sh(&format!("ssh-keygen -q -t ed25519 -N '' -f {}", key.display()));
        let text = format!(
            "HostKey {0}\nAuthorizedKeysFile {0}.pub\nPidFile none\nStrictModes no\nUsePAM no\n\
             PermitRootLogin prohibit-password\nSubsystem sftp internal-sftp\n",
            key.display()
        );
        std::fs::write(&config, text).unwrap();
    }
    machine.sh("mkdir -p /run/sshd");
    let mut command = machine.command(find("sshd").unwrap());
    let mut sshd = Running::start("sshd", &terminal.dir, command.args(["-D", "-e", "-f"]).arg(&config));
    sshd.wait_for_log("Server listening on 0.0.0.0 port 22");
    sshd
}
