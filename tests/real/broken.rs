//! `tunnel connect` when a session fails: neither its caller nor the target takes partial data for complete data.

use std::fs::File;
use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};
use std::process::{Command, Stdio};

use crate::parts::{are_installed, free_port};
use crate::process::{Running, TIMEOUT};
use crate::sshd::Sshd;
use crate::tunnel::{Edge, PROGRAM, ServerProcess, TestDir};
use crate::wait::wait_for;

/// A server with a short resume timeout, and an edge.
struct ServerAndEdge {
    cloud: ServerProcess,
    edge: Edge,
    place: TestDir,
    egress: u16,
}

impl ServerAndEdge {
    fn start() -> Self {
        let (place, egress) = (TestDir::new(), free_port());
        let (cert, key) = (place.files.cert.display(), place.files.key.display());
        let more = format!(
            "[server.egress]\nlisten = \"127.0.0.1:{egress}\"\ncert = \"{cert}\"\nkey = \"{key}\"\n\
             [server.session]\nresume_timeout = \"1s\"\n"
        );
        let mut cloud = ServerProcess::start_with(&place, &more, &[]);
        let edge = Edge::start(&place, &format!("127.0.0.1:{}", cloud.grpc));
        cloud.wait_for_node("node1");
        Self { cloud, edge, place, egress }
    }

    /// Returns the arguments for a session to a port of the node, through the CONNECT port or the one with TLS.
    fn connect_args(&self, tls: bool, port: u16) -> Vec<String> {
        let target = format!("node1:{port}");
        let through = match tls {
            false => vec![format!("--server=http://127.0.0.1:{}", self.cloud.connect)],
            true => vec![
                format!("--server=https://localhost:{}", self.egress),
                format!("--ca={}", self.place.files.ca.display()),
            ],
        };
        [vec!["connect".to_owned()], through, vec![target]].concat()
    }

    /// Starts `tunnel connect` with a pipe as its input, and waits until its session is open.
    fn connects(&self, tls: bool) -> (Running, std::process::ChildStdin, TcpStream) {
        let target = TcpListener::bind("127.0.0.1:0").unwrap();
        let mut command = Command::new(PROGRAM);
        command.args(self.connect_args(tls, target.local_addr().unwrap().port()));
        let (mut running, mut input) = Running::start_with_stdin("connect", self.place.path(), &mut command);
        let (mut socket, _) = target.accept().unwrap();
        socket.set_read_timeout(Some(TIMEOUT)).unwrap();
        input.write_all(b"up").unwrap();
        socket.read_exact(&mut [0; 2]).unwrap();
        socket.write_all(b"half of it\n").unwrap();
        running.wait_for_log("half of it");
        (running, input, socket)
    }
}

/// Fails the test unless the session was aborted, the caller saw the reason, and the exit code matches.
fn broke_off(connect: &mut Running, why: &str) {
    assert_eq!(connect.wait_for_exit(TIMEOUT).code(), Some(74), "{}", connect.log());
    connect.assert_logged("session interrupted: server ");
    connect.assert_logged(why);
    connect.assert_logged("trace=");
}

#[test]
fn a_killed_edge_aborts_the_session_and_the_server_logs_its_trace() {
    let mut place = ServerAndEdge::start();
    for tls in [false, true] {
        let (mut connect, _input, _target) = place.connects(tls);
        place.edge.process.kill();
        broke_off(&mut connect, "");
        let text = connect.log();
        let (_, trace) = text.split_once("trace=").unwrap();
        let trace: String = trace.chars().take_while(char::is_ascii_hexdigit).collect();
        place.cloud.process.wait_for_log_of(&trace, "node node1 did not reconnect within 1 s");
        place.edge = Edge::start(&place.place, &format!("127.0.0.1:{}", place.cloud.grpc));
        place.cloud.wait_for_node("node1");
    }
}

#[test]
fn a_killed_server_aborts_the_session() {
    for tls in [false, true] {
        let mut place = ServerAndEdge::start();
        let (mut connect, _input, _target) = place.connects(tls);
        place.cloud.process.kill();
        broke_off(&mut connect, "unless it was killed");
    }
}

/// Like `tunnel connect node1:9000 < request > answer`: the upload is complete, and the download is aborted.
#[test]
fn an_aborted_download_does_not_look_complete() {
    let mut place = ServerAndEdge::start();
    let (mut connect, input, mut target) = place.connects(false);
    drop(input);
    assert_eq!(target.read(&mut [0]).unwrap(), 0, "the end of the input reaches the target");
    place.edge.process.kill();
    broke_off(&mut connect, "reset the connection");
}

#[test]
fn an_upload_of_a_killed_command_does_not_look_complete() {
    let place = ServerAndEdge::start();
    for tls in [false, true] {
        let (mut connect, _input, mut target) = place.connects(tls);
        connect.kill();
        let ended = target.read(&mut [0]);
        assert!(ended.as_ref().is_err_and(|e| e.kind() == std::io::ErrorKind::ConnectionReset), "{ended:?}");
    }
}

/// Behaves like ssh, which closes both pipes, sends SIGHUP, and does not wait.
#[test]
fn a_command_that_gets_sighup_first_delivers_the_end_of_its_input() {
    let place = ServerAndEdge::start();
    let (mut connect, input, mut target) = place.connects(false);
    drop(input);
    connect.hang_up();
    assert_eq!(target.read(&mut [0]).unwrap(), 0, "a clean end");
    drop(target);
    assert_eq!(connect.wait_for_exit(TIMEOUT).code(), Some(0), "{}", connect.log());
}

/// The reader of the pipe closes it, as in `tunnel connect node1:9000 | head -1`.
#[test]
fn a_closed_stdout_ends_the_session_with_its_reason() {
    let place = ServerAndEdge::start();
    let target = TcpListener::bind("127.0.0.1:0").unwrap();
    let err = place.place.path().join("err");
    let mut command = Command::new(PROGRAM);
    command.args(place.connect_args(false, target.local_addr().unwrap().port()));
    command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(File::create(&err).unwrap());
    let mut connect = command.spawn().unwrap();
    let (mut socket, _) = target.accept().unwrap();
    drop(connect.stdout.take());
    socket.write_all(b"more\n").unwrap();
    let status = wait_for("the command ends", TIMEOUT, || connect.try_wait().unwrap());
    assert_eq!(status.code(), Some(74));
    let output = std::fs::read_to_string(err).unwrap();
    assert!(output.contains("cannot write to stdout: broken pipe"), "{output}");
    socket.set_read_timeout(Some(TIMEOUT)).unwrap();
    assert!(socket.read(&mut [0]).is_err(), "the target must not see a complete upload");
}

#[test]
fn ssh_shows_why_its_session_failed_and_ends_cleanly_otherwise() {
    if !are_installed(&["sshd", "ssh", "ssh-keygen"]) {
        return;
    }
    let mut place = ServerAndEdge::start();
    let sshd = Sshd::start();
    let helper = format!("{PROGRAM} connect --server=http://127.0.0.1:{} %h %p", place.cloud.connect);
    sshd.works_through(&helper);
    place.cloud.process.wait_for_log_of("result=\"ok\"", "listener=\"connect\"");
    let mut command = Command::new("ssh");
    command.args(sshd.options(&helper)).args(["node1", "echo it runs; sleep 60"]);
    let mut ssh = Running::start("ssh", place.place.path(), &mut command);
    ssh.wait_for_log("it runs");
    place.edge.process.kill();
    assert_eq!(ssh.wait_for_exit(TIMEOUT).code(), Some(255));
    ssh.assert_logged("session interrupted: server ");
}
