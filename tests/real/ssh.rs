//! ssh and scp through every common helper between ssh and a CONNECT proxy.

use std::fs::File;
use std::io::Read;
use std::path::Path;
use std::process::Command;
use std::time::Duration;

use crate::parts::{are_installed, is_root};
use crate::process::{TIMEOUT, run, run_command};
use crate::sshd::Sshd;
use crate::tunnel::{PROGRAM, Pair, TestDir, tunnel};

#[test]
fn ssh_works_through_nc() {
    works_through("nc.openbsd");
}

#[test]
fn ssh_works_through_ncat() {
    works_through("ncat");
}

#[test]
fn ssh_works_through_corkscrew() {
    works_through("corkscrew");
}

#[test]
fn ssh_works_through_socat() {
    works_through("socat");
}

#[test]
fn ssh_works_through_connect_proxy() {
    works_through("connect-proxy");
}

#[test]
fn ssh_works_through_tunnel_connect() {
    works_through(PROGRAM);
}

/// The server is named by a flag, the environment and a file.
#[test]
fn tunnel_ssh_and_a_block_for_sshs_config_reach_a_node() {
    if !are_installed(&["sshd", "ssh", "ssh-keygen"]) {
        return;
    }
    let (sshd, pair, place) = (Sshd::start(), Pair::start(), TestDir::new());
    let at = format!("127.0.0.1:{}", pair.cloud.connect);
    std::fs::create_dir(place.path().join("tunnel")).unwrap();
    std::fs::write(place.path().join("tunnel/client.toml"), format!("server = \"{at}\"\n")).unwrap();
    let flag = format!("--server={at}");
    // ssh takes the first value of an option, so this helper must not run.
    let options = sshd.options("false");
    let answers = |mut command: Command| {
        let output = run_command("ssh", command.arg("echo over $((6 * 7)) bridges"), None, TIMEOUT);
        assert_eq!(output.stdout, "over 42 bridges\n", "{output:?}");
    };
    for (flags, variable) in [
        (&[flag.as_str()][..], ("TUNNEL_SERVER", "127.0.0.1:1")),
        (&[], ("TUNNEL_SERVER", &at)),
        (&[], ("XDG_CONFIG_HOME", place.path().to_str().unwrap())),
    ] {
        let mut command = tunnel();
        command.arg("ssh").args(flags).arg("node1").args(&options).env(variable.0, variable.1);
        answers(command);
    }
    let config = place.path().join("config");
    let block = run(PROGRAM, &["ssh-config", &flag, "node*"], None, TIMEOUT);
    std::fs::write(&config, &block.stdout).unwrap();
    let mut command = Command::new("ssh");
    // Without `-F none` at the beginning and the ProxyCommand at the end.
    let (own, _) = options[2..].split_at(options.len() - 4);
    command.arg("-F").arg(&config).args(own).arg("node1");
    answers(command);
}

/// ssh takes its user's home from the list of users, which is another one here.
#[test]
fn ssh_and_scp_use_what_ssh_config_writes_until_it_is_removed() {
    if !is_root() || !are_installed(&["sshd", "ssh", "scp", "ssh-keygen", "unshare", "mount"]) {
        return;
    }
    let (sshd, pair, place) = (Sshd::start(), Pair::start(), TestDir::new());
    let home = place.path().join("her home");
    std::fs::create_dir_all(home.join(".ssh")).unwrap();
    let options = sshd.options("false");
    let options = options.iter().filter(|option| option.contains('=') && !option.starts_with("ProxyCommand"));
    let lines: String = options.map(|option| option.replacen('=', " ", 1) + "\n").collect();
    let lines = format!("{lines}IdentityFile {}\n", sshd.options("false")[3]);
    std::fs::write(home.join(".ssh/config"), &lines).unwrap();
    let users = place.path().join("passwd");
    std::fs::write(&users, format!("root:x:0:0:root:{}:/bin/sh\n", home.display())).unwrap();
    let at_home = |line: &str| {
        let script = format!("set -e; mount --bind {} /etc/passwd; {line}", users.display());
        let mut command = Command::new("unshare");
        command.args(["-m", "bash", "-c", &script]).env("HOME", &home).current_dir(place.path());
        let output = run_command(line, &mut command, None, TIMEOUT);
        assert!(output.status.success(), "{line}: {output:?}");
        output.stdout
    };
    let write = format!("{PROGRAM} ssh-config --server=127.0.0.1:{} --write 'node*'", pair.cloud.connect);
    for _ in 0..2 {
        let output = at_home(&write);
        assert!(output.contains("her home/.ssh/tunnel_config and its Include"), "{output}");
    }
    assert!(at_home("ssh -G node7").contains(" connect --server="));
    assert!(!at_home("ssh -G other").contains("proxycommand"));
    assert_eq!(at_home("ssh node1 'echo over $((6 * 7)) bridges'"), "over 42 bridges\n");
    at_home("head -c 1M /dev/urandom > from; scp -q from \"node1:$PWD/to\"; cmp from to");
    at_home("! command -v rsync >/dev/null || { rsync from \"node1:$PWD/third\"; cmp from third; }");
    at_home(&format!("{PROGRAM} ssh-config --remove"));
    assert!(!at_home("ssh -G node7").contains("proxycommand"));
    assert_eq!(std::fs::read_to_string(home.join(".ssh/config")).unwrap(), lines);
}

#[test]
fn a_hundred_megabytes_go_up_and_come_back_unchanged() {
    if !are_installed(&["sshd", "ssh", "scp", "ssh-keygen", "nc.openbsd"]) {
        return;
    }
    copies_both_ways(&Pair::start());
}

/// Copies 100 MB to the node and back, and compares them.
pub(crate) fn copies_both_ways(pair: &Pair) {
    goes_both_ways(&Sshd::start(), pair.cloud.connect, 100_000_000);
}

/// Copies `bytes` bytes to the node and back, and compares them.
pub(crate) fn goes_both_ways(sshd: &Sshd, proxy: u16, bytes: u64) {
    let options = sshd.options(&helper("nc.openbsd", proxy));
    let dir = sshd.dir.path();
    let (original, there, back) = (dir.join("original"), dir.join("there"), dir.join("back"));
    // Random, so that no two parts are equal.
    let mut random = File::open("/dev/urandom").unwrap().take(bytes);
    std::io::copy(&mut random, &mut File::create(&original).unwrap()).unwrap();

    scp(&options, &original.display().to_string(), &format!("node1:{}", there.display()));
    assert_eq!(sha256(&original), sha256(&there), "on the way up");
    scp(&options, &format!("node1:{}", there.display()), &back.display().to_string());
    assert_eq!(sha256(&original), sha256(&back), "on the way back");
}

/// Returns a command for ssh's `ProxyCommand`.
pub(crate) fn helper(program: &str, proxy: u16) -> String {
    match program {
        "nc.openbsd" => format!("nc.openbsd -X connect -x 127.0.0.1:{proxy} %h %p"),
        "ncat" => format!("ncat --proxy-type http --proxy 127.0.0.1:{proxy} %h %p"),
        "corkscrew" => format!("corkscrew 127.0.0.1 {proxy} %h %p"),
        "socat" => format!("socat - PROXY:127.0.0.1:%h:%p,proxyport={proxy}"),
        "connect-proxy" => format!("connect-proxy -H 127.0.0.1:{proxy} %h %p"),
        PROGRAM => format!("{PROGRAM} connect --server=http://127.0.0.1:{proxy} %h %p"),
        other => panic!("{other} is not a helper"),
    }
}

/// Returns the hash of a file, computed by another program.
pub(crate) fn sha256(file: &Path) -> String {
    let output = run("sha256sum", &[file], None, TIMEOUT);
    output.stdout.split_whitespace().next().unwrap().to_owned()
}

fn works_through(program: &str) {
    if !are_installed(&["sshd", "ssh", "ssh-keygen"]) || program != PROGRAM && !are_installed(&[program]) {
        return;
    }
    let (sshd, pair) = (Sshd::start(), Pair::start());
    sshd.works_through(&helper(program, pair.cloud.connect));
}

fn scp(options: &[String], from: &str, to: &str) {
    let args: Vec<_> = options.iter().map(String::as_str).chain(["-q", from, to]).collect();
    let output = run("scp", &args, None, TRANSFER);
    assert!(output.status.success(), "{from} to {to}: {output:?}");
}

/// Timeout for 100 MB with unoptimised code on a busy machine.
const TRANSFER: Duration = Duration::from_secs(180);
