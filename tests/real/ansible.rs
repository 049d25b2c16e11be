//! The commands, the user data and the play of `docs/how-to/a-hundred-nodes.md`, exactly as they are there, for several
//! machines.

use std::path::Path;

use crate::network::Machine;
use crate::parts::{all, are_installed, find, is_root};
use crate::process::Running;
use crate::readme::Terminal;
use crate::tunnel::{PROGRAM, TestDir};

#[test]
fn the_play_and_the_user_data_of_the_page_join_each_machine_once_and_enable_its_edge() {
    if !all()
        || !is_root()
        || !are_installed(&["ansible-playbook", "ip", "unshare", "ssh", "sshd", "ssh-keygen"])
    {
        return;
    }
    let place = TestDir::new();
    let machine = Machine::new();
    let nodes: Vec<_> = (1..=NODES)
        .map(|number| {
            let node = Machine::new();
            let (device, near) = (format!("node{number}"), format!("10.78.{number}.1"));
            let far = format!("10.78.{number}.2/24");
            machine.cable((device.as_str(), &format!("{near}/24")), &node, ("wan", far.as_str()));
            let terminal = Terminal::new(&place, &node, &format!("shop-{number:03}"), &near);
            (terminal, node)
        })
        .collect();
    let server = Terminal::new(&place, &machine, "server", "127.0.0.1");
    server.has_program();
    let start =
        ["tunnel init tunnel-files --name tunnel.example.org", "cp -rT tunnel-files/server /etc/tunnel"];
    server.run_lines(&start.map(str::to_owned));
    let _server = server.follow(&["tunnel server".to_owned()], "tunnel server", "server started");
    let _sshds: Vec<_> = nodes.iter().map(|node| start_sshd(&place, node)).collect();

    let work = server.dir.join("work");
    std::fs::write(work.join("join.yml"), block("- hosts: edges")).unwrap();
    // Small, as it is copied to each machine.
    std::fs::write(work.join("tunnel"), format!("#!/bin/sh\nexec {PROGRAM} \"$@\"\n")).unwrap();
    server.line(&block("umask 077"), "");
    assert_eq!(block("[edges]"), "[edges]\nshop-[001:100]\n");
    let hosts: String =
        (1..=PLAYED).map(|number| format!("shop-{number:03} ansible_host=10.78.{number}.2\n")).collect();
    let inventory = format!("[edges]\n{hosts}");
    std::fs::write(work.join("inventory.ini"), inventory).unwrap();
    for (terminal, _) in &nodes {
        terminal.line(SYSTEMCTL, "");
    }

    let play = format!(
        "export ANSIBLE_HOST_KEY_CHECKING=False ANSIBLE_REMOTE_TMP=/run/ansible LC_ALL=C.UTF-8
        export ANSIBLE_SSH_ARGS='-o ControlMaster=no -o UserKnownHostsFile=/dev/null -o LogLevel=ERROR'
        ansible-playbook -i inventory.ini --private-key {} -e ansible_become=false \\
            -e ansible_python_interpreter=/usr/bin/python3 join.yml 2>&1",
        place.path().join("id").display()
    );
    let first = server.line(&play, "");
    let key = std::fs::read_to_string(work.join("join.key")).unwrap();
    assert!(key.contains(".shop-*") && !first.contains(key.trim()), "the key is printed: {first}");
    join_by_user_data(&nodes[PLAYED].0, "shop-004", key.trim());
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

    let joined = server.line("tunnel invitations list", "");
    assert!(joined.lines().any(|line| line.contains(" shop-* ") && line.contains(" 100 ")), "{joined}");
    assert!(joined.lines().any(|line| line.contains(" 96 ")), "one use for each: {joined}");

    let second = server.line(&play, "");
    let unchanged = second.lines().filter(|line| line.starts_with("shop-") && line.contains(" changed=0 "));
    assert_eq!(unchanged.count(), PLAYED, "{second}");
}

/// Does what cloud-init does with the user data, on a machine whose host has that name.
fn join_by_user_data(terminal: &Terminal, host: &str, key: &str) {
    let data = block("#cloud-config").replace("KEY", key);
    let (files, commands) = data.split_once("runcmd:\n  - >-\n").unwrap();
    let content = files.lines().find_map(|line| line.trim().strip_prefix("content: ")).unwrap();
    assert!(files.contains("- path: /run/join.key\n") && content == key, "{files}");
    let commands = commands.replace('\n', " ");
    terminal.has_program();
    terminal.line("umask 077; cat > /run/join.key", key);
    terminal.line(&format!("unshare --uts sh -ec 'hostname {host}; {commands}'"), "");
}

/// Number of machines, and how many of them the play joins.
const NODES: usize = 4;
const PLAYED: usize = 3;

/// Installs a `systemctl` that only enables a unit.
const SYSTEMCTL: &str = r#"cat >/usr/local/bin/systemctl <<'END'
#!/bin/sh
[ "$1 $2" != 'enable --now' ] || ln -s "$3" /etc/systemd/system/multi-user.target.wants/
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
