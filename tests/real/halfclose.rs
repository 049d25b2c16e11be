//! Half-close from end to end: the client ends its sending side, and still receives the response.

use std::fs::File;
use std::io::{Read, Write as _};
use std::net::TcpListener;
use std::os::fd::OwnedFd;
use std::process::Command;
use std::time::Duration;

use crate::parts::are_installed;
use crate::process::{Running, run};
use crate::ssh::sha256;
use crate::tunnel::{PROGRAM, Pair};

#[test]
fn nc_receives_the_response_after_its_half_close() {
    answer_comes_after_the_end("nc.openbsd", |proxy, port| {
        format!("-N -X connect -x 127.0.0.1:{proxy} node1 {port}")
    });
}

#[test]
fn ncat_receives_the_response_after_its_half_close() {
    answer_comes_after_the_end("ncat", |proxy, port| {
        format!("--proxy-type http --proxy 127.0.0.1:{proxy} node1 {port}")
    });
}

#[test]
fn socat_receives_the_response_after_its_half_close() {
    answer_comes_after_the_end("socat", |proxy, port| {
        format!("-t 20 - PROXY:127.0.0.1:node1:{port},proxyport={proxy}")
    });
}

#[test]
fn tunnel_connect_receives_the_response_after_its_half_close() {
    answer_comes_after_the_end(PROGRAM, |proxy, port| {
        format!("connect --server=http://127.0.0.1:{proxy} node1:{port}")
    });
}

#[test]
fn tunnel_connect_at_a_terminal_ends_with_its_target() {
    if !are_installed(&["script"]) {
        return;
    }
    let pair = Pair::start();
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let target = format!("node1:{}", listener.local_addr().unwrap().port());
    std::thread::spawn(move || listener.accept().unwrap().0.write_all(b"until then\n").unwrap());
    let line = format!("{PROGRAM} connect --server=http://127.0.0.1:{} {target}", pair.cloud.connect);
    let mut script = Command::new("script");
    script.args(["-qec", &line, "/dev/null"]);
    let (mut terminal, _typed) = Running::start_with_stdin("terminal", pair.place.path(), &mut script);
    assert!(terminal.wait_for_exit(ANSWER).success());
    terminal.assert_logged("until then");
}

/// Sends three million bytes to a server that responds with their hash after the end of its input.
fn answer_comes_after_the_end(program: &str, args: impl Fn(u16, u16) -> String) {
    if !are_installed(&["sha256sum"]) || program != PROGRAM && !are_installed(&[program]) {
        return;
    }
    let pair = Pair::start();
    let sent = pair.place.path().join("sent");
    let mut random = File::open("/dev/urandom").unwrap().take(3_000_000);
    std::io::copy(&mut random, &mut File::create(&sent).unwrap()).unwrap();

    let args = args(pair.cloud.connect, hash_server());
    let args: Vec<_> = args.split(' ').collect();
    let output = run(program, &args, Some(&sent), ANSWER);
    assert_eq!(output.stdout, format!("{}  -\n", sha256(&sent)), "{program}: {output:?}");
}

/// Starts a server that runs `sha256sum` on one connection. Its thread ends with the test.
fn hash_server() -> u16 {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let port = listener.local_addr().unwrap().port();
    std::thread::spawn(move || {
        let (conn, _) = listener.accept().unwrap();
        let out = OwnedFd::from(conn.try_clone().unwrap());
        Command::new("sha256sum").stdin(OwnedFd::from(conn)).stdout(out).status().unwrap();
    });
    port
}

/// Timeout for three megabytes and their hash on a busy machine.
const ANSWER: Duration = Duration::from_secs(30);
