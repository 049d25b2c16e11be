//! SuperEdge's tunnel, and what it needs of Kubernetes: a stand-in for kube-apiserver that knows one pod.

use std::fs;
use std::io::{self, BufRead, BufReader, Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::os::unix::fs::symlink;
use std::thread;

use anyhow::Result;

use crate::peers::{Parts, Peer};
use crate::place::free_ports;
use crate::tunnel::{NODE, TOKEN};
use crate::way::{Address, Way, Ways};

/// Its ports are open on every address, so it needs a network namespace. It also needs root: its files have fixed
/// paths, which exist in a mount namespace only.
pub(crate) fn parts(peer: &Peer<'_>) -> Result<Parts> {
    let [connect, ssh, log, metrics, edge_log, edge_proxy] = free_ports()?;
    let (place, port) = (peer.place, peer.port);
    let etc = place.file("superedge-etc");
    for dir in ["certs", "token", "nodes", "cache", "secrets/kubernetes.io/serviceaccount"] {
        fs::create_dir_all(etc.join("tunnel").join(dir))?;
    }
    for (path, from) in [("cloud.crt", &peer.cert), ("cloud.key", &peer.key), ("ca.crt", &peer.ca)] {
        symlink(from, etc.join("tunnel/certs").join(path))?;
    }
    let file = |path: &str, text: &str| fs::write(etc.join("tunnel").join(path), text);
    file("token/token", &format!("default:{TOKEN}\n"))?;
    file("secrets/kubernetes.io/serviceaccount/token", TOKEN)?;
    let api = stand_in()?;
    file(
        "kubeconfig",
        &format!(
            "{{apiVersion: v1, kind: Config, current-context: a, contexts: [{{name: a, context: {{cluster: a}}}}], \
         clusters: [{{name: a, cluster: {{server: \"http://{api}\"}}}}]}}"
        ),
    )?;
    file(
        "cloud.toml",
        &format!(
            "[mode.cloud.stream.server]\ngrpc_port = {port}\nlog_port = {log}\nmetrics_port = {metrics}\n\
         [mode.cloud.http_proxy]\nport = {connect}\n[mode.cloud.ssh]\nport = {ssh}\n"
        ),
    )?;
    file(
        "edge.toml",
        &format!(
            "[mode.edge.stream.client]\ntoken = \"{TOKEN}\"\ndns = \"localhost\"\nserver_name = \"127.0.0.1:{port}\"\n\
         log_port = {edge_log}\n[mode.edge.http_proxy]\nip = \"127.0.0.1\"\nport = \"{edge_proxy}\"\n"
        ),
    )?;
    let script = place.file("superedge.sh");
    fs::write(
        &script,
        format!(
            "mount --bind {etc} /etc && mount --bind {etc}/tunnel /run && exec env NODE_NAME={NODE} POD_NAME=a \
         POD_IP=127.0.0.1 KUBERNETES_SERVICE_HOST=127.0.0.1 KUBERNETES_SERVICE_PORT=1 {program} --m=$1 \
         --c=/etc/tunnel/$1.toml --k=/etc/tunnel/kubeconfig\n",
            etc = etc.display(),
            program = peer.dir.join("tunnel").display(),
        ),
    )?;
    let line = |end: &str| format!("/usr/bin/unshare --mount /bin/sh {} {end}", script.display());
    let at = Address::Tcp(([127, 0, 0, 1], connect).into());
    let way = |to: SocketAddr| Way { address: at.clone(), connect: Some(to.to_string()) };
    Ok(([line("cloud"), line("edge")], Ways::each(peer.targets.all(), way)))
}

/// Starts the stand-in in this process. Returns its address.
fn stand_in() -> Result<SocketAddr> {
    let listener = TcpListener::bind(("127.0.0.1", 0))?;
    let at = listener.local_addr()?;
    thread::spawn(move || {
        for client in listener.incoming().flatten() {
            thread::spawn(move || answer(client));
        }
    });
    Ok(at)
}

/// Answers one request: a list of the objects of a kind, a watch without events, or 404.
fn answer(mut client: TcpStream) -> io::Result<()> {
    let mut reader = BufReader::new(client.try_clone()?);
    let mut first = String::new();
    reader.read_line(&mut first)?;
    let mut line = String::new();
    while reader.read_line(&mut line)? > 2 {
        line.clear();
    }
    let kind = KINDS.iter().find(|(path, ..)| first.starts_with(&format!("GET /api/v1/{path}?")));
    let json = "Content-Type: application/json\r\n";
    let Some((_, kind, items)) = kind else {
        return write!(client, "HTTP/1.1 404 Not Found\r\nConnection: close\r\nContent-Length: 0\r\n\r\n");
    };
    if first.contains("watch=") {
        write!(client, "HTTP/1.1 200 OK\r\n{json}Transfer-Encoding: chunked\r\n\r\n")?;
        return reader.read_to_end(&mut Vec::new()).map(drop);
    }
    let list = format!(
        "{{\"kind\": \"{kind}\", \"apiVersion\": \"v1\", \"metadata\": {{\"resourceVersion\": \"1\"}}, \"items\": [{items}]}}"
    );
    write!(
        client,
        "HTTP/1.1 200 OK\r\n{json}Connection: close\r\nContent-Length: {}\r\n\r\n{list}",
        list.len()
    )
}

/// Path, kind and objects of each list. SuperEdge finds the node of a target by the address of its pod.
const KINDS: [(&str, &str, &str); 4] = [
    (
        "pods",
        "PodList",
        r#"{"metadata": {"name": "a", "namespace": "a"}, "spec": {"nodeName": "node1"}, "status": {"podIP": "127.0.0.1"}}"#,
    ),
    ("nodes", "NodeList", ""),
    ("services", "ServiceList", ""),
    ("endpoints", "EndpointsList", ""),
];
