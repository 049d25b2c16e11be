//! A server and an edge at their limit of open files: operators, probes and reloaded files still get some.

use std::fs::OpenOptions;
use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};
use std::process::Command;

use crate::parts::{are_installed, free_port, loopback};
use crate::process::{Running, TIMEOUT, run, send_request};
use crate::tunnel::{PROGRAM, ServerProcess, TestDir};

/// Returns a command that runs the program with few open files.
fn limited() -> Command {
    let mut command = Command::new("prlimit");
    command.args([&format!("--nofile={LIMIT}:{LIMIT}"), PROGRAM]);
    command
}

/// Opens sessions until one is refused, and returns them and the refusal.
fn fill(connect: u16, target: u16) -> (Vec<TcpStream>, String) {
    let mut open = Vec::new();
    loop {
        let mut client = TcpStream::connect(loopback(connect)).unwrap();
        client.set_read_timeout(Some(TIMEOUT)).unwrap();
        write!(client, "CONNECT node1:{target} HTTP/1.1\r\n\r\n").unwrap();
        let mut head = [0; ESTABLISHED.len()];
        client.read_exact(&mut head).unwrap();
        if head != ESTABLISHED.as_bytes() {
            let mut refusal = String::from_utf8_lossy(&head).into_owned();
            client.read_to_string(&mut refusal).unwrap();
            return (open, refusal);
        }
        open.push(client);
        assert!(open.len() < LIMIT, "more sessions than files");
    }
}

/// Checks that a full process answers operators and probes, and reloads a changed file.
fn answers_all(place: &TestDir, process: &mut Running, ports: &[u16], socket: &str) {
    for _ in 0..3 {
        for port in ports {
            for path in ["/livez", "/readyz", "/metrics"] {
                let answer = send_request(*port, "GET", path, "").unwrap_or_default();
                assert!(answer.starts_with("HTTP/1.0 200"), "{port}{path}: {answer:?}");
            }
        }
    }
    let status = run(PROGRAM, &["status", &format!("--socket={socket}")], None, TIMEOUT);
    assert!(status.status.success(), "{status:?}");
    let mut ca = OpenOptions::new().append(true).open(&place.files.ca).unwrap();
    ca.write_all(b"\n").unwrap();
    process.hang_up();
    process.wait_for_log("files reloaded");
    for error in ["cannot reload", "Too many open files", "cannot accept"] {
        assert!(!process.log().contains(error), "{error}");
    }
}

#[test]
fn a_full_server_answers_operators_and_probes_and_reloads_files() {
    if !are_installed(&["prlimit"]) {
        return;
    }
    let (place, target) = (TestDir::new(), TcpListener::bind(loopback(0)).unwrap());
    let (grpc, connect, admin, metrics) = (free_port(), free_port(), free_port(), free_port());
    let socket = place.path().join("server.sock").display().to_string();
    let config = format!(
        "{}metrics_listen = \"127.0.0.1:{metrics}\"\n\
         [server.connect]\nlisten = \"127.0.0.1:{connect}\"\nauth = \"none\"\n\
         [server.admin]\nlisten = \"unix:{socket}\"\n",
        place.cloud_config(loopback(grpc), admin)
    );
    let mut server = place.tunnel_as(limited(), ("server", "cloud"), &config, &[], &[]);
    server.wait_for_answer(admin, "/readyz", "");
    let edge = place.edge_config("node1", &format!("127.0.0.1:{grpc}"), free_port());
    let _edge = place.tunnel(("edge", "edge"), &edge, &[], &[]);
    server.wait_for_answer(admin, "/cloud/healthz", "node1");
    let (clients, refusal) = fill(connect, target.local_addr().unwrap().port());
    assert!(refusal.contains("503") && refusal.contains(REACHED), "{refusal}");
    answers_all(&place, &mut server, &[admin, metrics], &socket);
    drop(clients);
}

#[test]
fn a_full_edge_refuses_sessions_and_answers_operators_and_probes() {
    if !are_installed(&["prlimit"]) {
        return;
    }
    let (place, target) = (TestDir::new(), TcpListener::bind(loopback(0)).unwrap());
    let mut cloud = ServerProcess::start(&place);
    let (admin, metrics) = (free_port(), free_port());
    let socket = place.path().join("edge.sock").display().to_string();
    let config = format!(
        "{}metrics_listen = \"127.0.0.1:{metrics}\"\n[edge.admin]\nlisten = \"unix:{socket}\"\n",
        place.edge_config("node1", &format!("127.0.0.1:{}", cloud.grpc), admin)
    );
    let mut edge = place.tunnel_as(limited(), ("edge", "edge"), &config, &[], &[]);
    cloud.wait_for_node("node1");
    let (clients, refusal) = fill(cloud.connect, target.local_addr().unwrap().port());
    assert!(refusal.contains("503") && refusal.contains(&format!("node node1: {REACHED}")), "{refusal}");
    assert!(
        refusal.contains(
            "hint: try again in a moment; if a limit was reached, raise it: buffer_memory of [edge.session]"
        ),
        "{refusal}"
    );
    answers_all(&place, &mut edge, &[admin, metrics], &socket);
    drop(clients);
    // Files that are free again are used.
    fill(cloud.connect, target.local_addr().unwrap().port());
}

const LIMIT: usize = 96;
const REACHED: &str = "limit of open files reached; raise it (ulimit -Hn, LimitNOFILE)";
const ESTABLISHED: &str = "HTTP/1.1 200 Connection established\r\n\r\n";
