//! A plain peer, written in another language with another gRPC library, as edge and as server.

use std::io::{Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::path::Path;
use std::process::Command;
use std::time::Duration;

use crate::parts::{are_installed, free_port, plain_peer};
use crate::process::{Running, TIMEOUT, run};
use crate::ssh::helper;
use crate::sshd::Sshd;
use crate::tunnel::{Edge, SERVER_NAME, ServerProcess, TOKEN, TestDir};

#[test]
fn a_plain_edge_works_with_this_server() {
    let Some(program) = ready() else { return };
    let (sshd, place) = (Sshd::start(), TestDir::new());
    let mut cloud = ServerProcess::start(&place);
    let _edge = plain_edge(program, &place, cloud.grpc);
    cloud.wait_for_node("node1");
    sshd.works_through(&helper("nc.openbsd", cloud.connect));
}

#[test]
fn a_plain_edge_reports_to_the_client_why_it_could_not_dial() {
    let Some(program) = ready() else { return };
    let place = TestDir::new();
    let mut cloud = ServerProcess::start(&place);
    let _edge = plain_edge(program, &place, cloud.grpc);
    cloud.wait_for_node("node1");
    let args = format!("-X connect -x 127.0.0.1:{} node1 {}", cloud.connect, free_port());
    let output = run("nc.openbsd", &args.split(' ').collect::<Vec<_>>(), None, TIMEOUT);
    assert!(output.stderr.contains("502 ") && output.stderr.contains("refused"), "{output:?}");
}

#[test]
fn a_plain_edge_learns_why_it_is_refused() {
    let Some(program) = ready() else { return };
    let place = TestDir::new();
    let cloud = ServerProcess::start(&place);
    let mut edge = plain_edge_with(program, &place, cloud.grpc, "wrong");
    edge.wait_for_log("call ended: rpc error: code = Unauthenticated desc = invalid token");
}

#[test]
fn a_plain_server_works_with_this_edge() {
    let Some(program) = ready() else { return };
    let (sshd, place) = (Sshd::start(), TestDir::new());
    let mut cloud = PlainServer::start(program, &place);
    let mut edge = Edge::start(&place, &cloud.grpc.to_string());
    cloud.process.wait_for_log("attached node1");
    cloud.process.wait_for_log("heartbeat node1");
    edge.process.wait_for_log("dialect=\"plain\"");
    sshd.works_through(&helper("nc.openbsd", cloud.connect.port()));
}

#[test]
fn a_response_ended_by_closing_ends_at_once_at_a_plain_servers_client() {
    let Some(program) = ready() else { return };
    let place = TestDir::new();
    let mut cloud = PlainServer::start(program, &place);
    let _edge = Edge::start(&place, &cloud.grpc.to_string());
    cloud.process.wait_for_log("attached node1");
    let target = TcpListener::bind("127.0.0.1:0").unwrap();
    let port = target.local_addr().unwrap().port();
    // Closes the connection after the response, like HTTP/1.0. The thread ends with the test.
    std::thread::spawn(move || {
        for conn in target.incoming() {
            conn.unwrap().write_all(b"an answer").unwrap();
        }
    });
    for _ in 0..3 {
        let mut client = TcpStream::connect(cloud.connect).unwrap();
        // The end of the session takes a second; this read fails if it takes longer than the timeout.
        client.set_read_timeout(Some(Duration::from_secs(5))).unwrap();
        write!(client, "CONNECT node1:{port} HTTP/1.1\r\nHost: node1\r\n\r\n").unwrap();
        let mut received = Vec::new();
        client.read_to_end(&mut received).unwrap();
        assert!(received.ends_with(b"an answer"), "{}", String::from_utf8_lossy(&received));
    }
}

/// Without this program: a failure here is not its error.
#[test]
fn the_plain_peers_work_with_each_other() {
    let Some(program) = ready() else { return };
    let (sshd, place) = (Sshd::start(), TestDir::new());
    let mut cloud = PlainServer::start(program, &place);
    let _edge = plain_edge(program, &place, cloud.grpc.port());
    cloud.process.wait_for_log("attached node1");
    for program in ["nc.openbsd", "ncat", "corkscrew", "socat", "connect-proxy"] {
        if are_installed(&[program]) {
            sshd.works_through(&helper(program, cloud.connect.port()));
        }
    }
}

#[test]
fn idle_links_with_plain_peers_survive_their_keepalive_timeouts() {
    let Some(program) = ready() else { return };
    let place = TestDir::new();
    let mut cloud = ServerProcess::start(&place);
    let mut plain_edge = plain_edge(program, &place, cloud.grpc);
    cloud.wait_for_node("node1");
    let mut plain_cloud = PlainServer::start(program, &place);
    let mut edge = Edge::start(&place, &plain_cloud.grpc.to_string());
    plain_cloud.process.wait_for_log("attached node1");

    // This wait takes real time, because the plain peers' clocks cannot be controlled.
    std::thread::sleep(KEEPALIVES);

    cloud.process.assert_running();
    edge.process.assert_running();
    plain_edge.assert_running();
    plain_cloud.process.assert_running();
    let (edge_log, cloud_log) = (plain_edge.log(), plain_cloud.process.log());
    assert_eq!(edge_log.matches("call open").count(), 1, "the plain edge opened another call:\n{edge_log}");
    assert!(!edge_log.contains("call ended"), "{edge_log}");
    assert_eq!(
        cloud_log.matches("attached node1").count(),
        1,
        "the edge of this program opened another call:\n{cloud_log}"
    );
    assert!(!cloud_log.contains("detached"), "{cloud_log}");
}

/// A plain server that is listening.
#[derive(Debug)]
struct PlainServer {
    process: Running,
    grpc: SocketAddr,
    connect: SocketAddr,
}

impl PlainServer {
    fn start(program: &Path, place: &TestDir) -> Self {
        let mut command = Command::new(program);
        command.args(["cloud", "--token", TOKEN, "--cert"]).arg(&place.files.cert);
        let mut process =
            Running::start("plain-cloud", place.path(), command.arg("--key").arg(&place.files.key));
        let line = process.wait_for_log("listening ");
        let mut addresses = line.split(' ').skip(1).map(|text| text.parse().unwrap());
        let (grpc, connect) = (addresses.next().unwrap(), addresses.next().unwrap());
        Self { process, grpc, connect }
    }
}

fn plain_edge(program: &Path, place: &TestDir, cloud: u16) -> Running {
    plain_edge_with(program, place, cloud, TOKEN)
}

fn plain_edge_with(program: &Path, place: &TestDir, cloud: u16, token: &str) -> Running {
    let mut command = Command::new(program);
    command.args(["edge", "--node", "node1", "--token", token, "--name", SERVER_NAME]);
    command.arg("--cloud").arg(format!("127.0.0.1:{cloud}")).arg("--ca").arg(&place.files.ca);
    Running::start("plain-edge", place.path(), &mut command)
}

fn ready() -> Option<&'static Path> {
    if are_installed(&["sshd", "ssh", "ssh-keygen", "nc.openbsd"]) { plain_peer() } else { None }
}

/// Longer than a plain peer's timeouts without traffic (6 s and 11 s), and than the time until three pings that are
/// too frequent are penalized (at most 45 s with one every 15 s).
const KEEPALIVES: Duration = Duration::from_secs(48);
