//! `tunnel status` of a running server and a running edge.

use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::time::Duration;

use rustix::system::uname;
use tokio::net::TcpListener;
use tunnel::admin::nodes::NodesResponse;
use tunnel::admin::status::StatusResponse;
use tunnel::command::status::{NodesArgs, NodesFormat};
use tunnel::command::{Format, status};
use tunnel::config::Environment;
use tunnel_link::liveness::Suspicion;
use tunnel_proto::names::Instance;

use crate::support::clients::{assert_echo, get};
use crate::support::peer::scripted_server;
use crate::support::programs::{TestDir, TestServer, at, edge_with, start_edge};
use crate::support::{Stopwatch, assert_eventually, pause_time, servers, targets, wait_until};

/// Returns the path of a program's admin socket, and the table that configures it.
pub(crate) fn socket(place: &TestDir, role: &str) -> (PathBuf, String) {
    let path = place.path().join(format!("{role}.sock"));
    let table = format!("[{role}.admin]\nlisten = \"unix:{}\"\n", path.display());
    (path, table)
}

pub(crate) async fn status(path: &Path) -> StatusResponse {
    let json = status::status(Some(path.to_owned()), Format::Json, &Environment::default()).await.unwrap();
    serde_json::from_str(&json).unwrap()
}

/// Polls the status until it matches.
async fn status_with(path: &Path, what: &str, is: impl Fn(&StatusResponse) -> bool) -> StatusResponse {
    let asking = async {
        loop {
            let report = status(path).await;
            if is(&report) {
                return report;
            }
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    };
    assert_eventually(what, asking).await
}

#[tokio::test]
async fn a_server_reports_its_nodes_their_sessions_and_disconnect_reasons() {
    let (place, echo) = (TestDir::new(), targets::echo().await);
    let (path, table) = socket(&place, "server");
    let server = TestServer::with(&place, &table);
    assert_eq!(std::fs::metadata(&path).unwrap().permissions().mode() & 0o777, 0o600);
    let (edge_path, table) = socket(&place, "edge");
    let edge = edge_with(&place, &server, "node1", &table).await;
    let mut client = server.open(&at("node1", echo)).await;
    assert_echo(&mut client, "hello").await;

    let started = Stopwatch::start();
    let report = status(&path).await;
    assert!(
        started.elapsed() < Duration::from_secs(5),
        "the response ends the call: {:?}",
        started.elapsed()
    );
    assert_eq!((report.role.as_str(), report.ready, report.totals.sessions), ("server", true, 1));
    let node = &report.links[0];
    assert_eq!((node.name.as_str(), node.state.as_str(), node.sessions), ("node1", "linked", 1));
    assert_eq!(
        (node.version.as_deref(), node.dialect.as_deref()),
        (Some(env!("CARGO_PKG_VERSION")), Some("extended"))
    );
    assert!(node.sent_bytes >= 5 && node.received_bytes >= 5, "{node:?}");
    assert!(node.since.unwrap() <= report.now && node.address.as_ref().unwrap().starts_with("127.0.0.1:"));
    let session = &report.sessions[0];
    assert_eq!((session.node.as_str(), session.state.as_str(), session.id.len()), ("node1", "open", 8));
    assert_eq!(session.target.as_deref(), Some(&*at("node1", echo)));
    assert_eq!((session.sent_bytes, session.received_bytes, session.link), (5, 5, node.link));

    let report = status(&edge_path).await;
    assert_eq!((report.role.as_str(), report.node.as_deref(), report.ready), ("edge", Some("node1"), true));
    assert_eq!((report.links.len(), report.links[0].state.as_str()), (1, "linked"));
    assert_eq!(report.links[0].address.as_deref(), Some(&*server.server.bound.grpc.to_string()));
    assert_eq!(report.links[0].instance, Some(status(&path).await.instance));
    assert_eq!((report.sessions[0].sent_bytes, report.sessions[0].target.as_deref()), (5, None));

    drop(client);
    server.assert_idle().await;
    assert!(status(&path).await.sessions.is_empty());
    edge.shutdown(std::future::ready(())).await;
    wait_until("the node is disconnected", || server.link("node1").is_none()).await;
    let report = status(&path).await;
    assert!(report.links.is_empty());
    assert_eq!(
        (report.disconnected[0].name.as_str(), report.disconnected[0].state.as_str()),
        ("node1", "down")
    );
    assert_eq!((report.drops.len(), report.drops[0].name.as_str()), (1, "node1"));
    assert_eq!(report.drops[0].reason, report.disconnected[0].error.as_ref().unwrap().text);
    assert!(!report.disconnected[0].error.as_ref().unwrap().text.is_empty());
    let table = status::status(Some(path.clone()), Format::Text, &Environment::default()).await.unwrap();
    assert!(table.contains("no node is connected") && table.contains("NOT LINKED"), "{table}");
}

#[tokio::test]
async fn an_edge_without_a_link_reports_the_reason() {
    let place = TestDir::new();
    let (path, table) = socket(&place, "edge");
    let nothing = targets::closed_port().await;
    let _edge = start_edge(&place.edge("node1", nothing, &table));
    let tried = |report: &StatusResponse| {
        report.conditions.iter().any(|one| one.message.as_deref().is_some_and(|text| text != "not yet"))
    };
    let report = status_with(&path, "an attempt to link", tried).await;
    assert!(
        !report.ready && report.conditions.iter().any(|one| one.name == "link" && one.status == "not_ready"),
        "{:?}",
        report.conditions
    );
    let text = status::status(Some(path), Format::Text, &Environment::default()).await.unwrap();
    assert!(text.contains("not ready") && text.contains("\n! link: "), "{text}");
}

#[tokio::test]
async fn an_edge_names_a_server_that_accepts_connections_and_sends_nothing() {
    let place = TestDir::new();
    let (path, table) = socket(&place, "edge");
    let silent = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let at = silent.local_addr().unwrap();
    let _edge = start_edge(&place.edge("node1", at, &table));
    pause_time();
    let expected = format!("{at} did not answer within 10s, but accepted the connection; check ");
    let is_expected = |report: &StatusResponse| {
        report
            .conditions
            .iter()
            .any(|one| one.message.as_deref().is_some_and(|text| text.starts_with(&expected)))
    };
    status_with(&path, "the server's address and what it did", is_expected).await;
}

/// Returns a server's config with a name.
fn named(text: &str, name: &str) -> String {
    text.replacen("[server.links]\n", &format!("[server.links]\nname = \"{name}\"\n"), 1)
}

#[tokio::test]
async fn peers_are_listed_with_their_link_or_its_error() {
    let place = TestDir::new();
    let all = servers::addresses(2);
    let (path, table) = socket(&place, "server");
    let text = servers::config(&place, all[0], &servers::peers(&all)) + &table;
    let first = TestServer::from_text(&named(&text, "eu-1"));
    // The list contains the server's own address until it has been dialled.
    let has_error = |report: &StatusResponse| report.peers.len() == 1 && report.peers[0].error.is_some();
    let report = status_with(&path, "the reason for the missing link", has_error).await;
    let other = &report.peers[0];
    assert_eq!((other.name.as_str(), other.state.as_str()), (&*all[1].to_string(), "not_linked"));
    let second = TestServer::from_text(&servers::config(&place, all[1], &servers::peers(&all)));
    let linked = |report: &StatusResponse| report.peers[0].state == "linked";
    let report = status_with(&path, "the link", linked).await;
    assert_eq!(report.peers[0].error, None);
    let process = |server: &TestServer| format!("{:?}", server.server.table.instance());
    assert_eq!(report.peers[0].instance, Some(process(&second)));
    // The default is the name of this host.
    let host = uname().nodename().to_string_lossy().into_owned();
    assert_eq!((report.name.as_deref(), report.peers[0].name.as_str()), (Some("eu-1"), host.as_str()));
    // The name stays while there is no link, and an edge shows it, too.
    let (edge_path, table) = socket(&place, "edge");
    let _edge = edge_with(&place, &first, "node1", &table).await;
    assert_eq!(status(&edge_path).await.links[0].name, "eu-1");
    second.server.shutdown(std::future::ready(())).await;
    let lost = |report: &StatusResponse| report.peers.first().is_some_and(|peer| peer.state == "not_linked");
    assert_eq!(status_with(&path, "the loss", lost).await.peers[0].name, host);
}

#[tokio::test]
async fn the_nodes_of_all_servers_are_listed_and_a_silent_server_is_named() {
    let place = TestDir::new();
    let all = servers::addresses(2);
    let (path, table) = socket(&place, "server");
    let text = named(&servers::config(&place, all[0], &servers::peers(&all)), "eu-1") + &table;
    let first = TestServer::from_text(&text);
    let text = named(&servers::config(&place, all[1], &servers::peers(&all)), "us-1");
    let second = TestServer::from_text(&text);
    let _near = edge_with(&place, &first, "near", "").await;
    let _far = edge_with(&place, &second, "far", "").await;
    // Its script answers no request for nodes.
    let _silent = scripted_server(&place, &first, 77).await;
    let nodes = async |output, down| {
        let args = NodesArgs { socket: Some(path.clone()), output, down, ..NodesArgs::default() };
        status::nodes(args, &Environment::default()).await.unwrap()
    };
    let json = nodes(NodesFormat::Json, false).await;
    let report: NodesResponse = serde_json::from_str(&json).unwrap();
    let names: Vec<_> = report.nodes.iter().map(|node| (node.name.as_str(), node.server.as_str())).collect();
    assert_eq!(names, [("far", "us-1"), ("near", "eu-1")]);
    assert!(report.nodes.iter().all(|node| node.since <= report.now));
    assert!(report.nodes.iter().all(|node| node.address.as_ref().unwrap().starts_with("127.0.0.")));
    let states: Vec<_> = report.servers.iter().map(|server| (server.nodes, server.state.as_str())).collect();
    assert_eq!(states, [(1, "complete"), (1, "complete"), (0, "does_not_tell")]);
    // The scripted server announces no name, like one of an older version.
    let scripted = format!("{:?}", Instance::from_bits(77));
    let servers: Vec<_> = report.servers.iter().map(|server| server.name.as_str()).collect();
    assert_eq!(servers, ["eu-1", "us-1", &scripted]);
    let status = status(&path).await;
    let peers: Vec<_> = status.peers.iter().map(|peer| peer.name.as_str()).collect();
    assert_eq!((status.name.as_deref(), peers), (Some("eu-1"), vec!["us-1", &scripted]));
    let version = env!("CARGO_PKG_VERSION");
    for node in &report.nodes {
        assert_eq!(node.version.as_deref(), Some(version), "{node:?}");
        assert_eq!(node.sessions, Some(0), "{node:?}");
    }
    let text = nodes(NodesFormat::Text, false).await;
    assert!(text.contains("eu-1") && text.contains("does not tell its nodes"), "{text}");
    assert!(text.contains(version) && !text.contains("ADDRESS"), "{text}");
    let text = nodes(NodesFormat::Wide, false).await;
    assert!(text.contains("ADDRESS") && text.contains("127.0.0."), "{text}");
    assert_eq!(nodes(NodesFormat::Name, false).await, "far\nnear\n");
    assert_eq!(nodes(NodesFormat::Name, true).await, "");
    let text = status::status(Some(path), Format::Text, &Environment::default()).await.unwrap();
    assert!(text.starts_with("server eu-1 ") && text.contains("far") && text.contains("us-1"), "{text}");
}

#[tokio::test]
async fn nodes_at_peers_have_their_figures_and_lost_ones_are_down() {
    let (place, echo) = (TestDir::new(), targets::echo().await);
    let all = servers::addresses(2);
    let (path, table) = socket(&place, "server");
    let first = TestServer::from_text(&(servers::config(&place, all[0], &servers::peers(&all)) + &table));
    let second = TestServer::from_text(&servers::config(&place, all[1], &servers::peers(&all)));
    let nodes = async |output, down| {
        let args = NodesArgs { socket: Some(path.clone()), output, down, ..NodesArgs::default() };
        status::nodes(args, &Environment::default()).await.unwrap()
    };
    let [near, far] =
        [edge_with(&place, &first, "near", "").await, edge_with(&place, &second, "far", "").await];
    let mut client = second.open(&at("far", echo)).await;
    assert_echo(&mut client, "hello").await;
    let linked = second.link("far").unwrap();
    assert!(linked.link.is_alive(Suspicion::New).await);
    let report: NodesResponse = serde_json::from_str(&nodes(NodesFormat::Json, false).await).unwrap();
    let listed = report.nodes.iter().find(|node| node.name == "far").unwrap();
    assert_eq!(listed.sessions, Some(1));
    // Both directions have carried the echo.
    assert!(
        listed.sent_bytes.is_some_and(|sent| sent > 5) && listed.received_bytes.is_some_and(|got| got > 5)
    );
    let measured = linked.link.measured_round_trip().unwrap().as_secs_f64();
    assert!(
        listed.rtt_seconds.is_some_and(|rtt| rtt > 0.0 && rtt <= (100.0 * measured).max(0.1)),
        "{listed:?}"
    );
    assert!(report.down.is_empty());

    // It is lost here, and then found at the peer.
    near.shutdown(std::future::ready(())).await;
    wait_until("the node is lost", || first.link("near").is_none()).await;
    assert_eq!(nodes(NodesFormat::Name, true).await, "near\n");
    let text = nodes(NodesFormat::Text, true).await;
    assert!(
        text.starts_with("NODE  JOINED  LAST SEEN  REASON")
            && text.contains("near  ")
            && text.contains("s ago"),
        "{text}"
    );
    let metrics = async || get(first.server.bound.metrics.unwrap(), "/metrics/nodes").await.body;
    let series = metrics().await;
    assert!(series.contains("tunnel_node_up{node=\"near\"} 0\n"), "{series}");
    assert!(!series.contains("\"far\"") && !series.contains("tunnel_node_sessions{"), "{series}");
    let _near = edge_with(&place, &second, "near", "").await;
    let announced = async {
        while metrics().await.contains("tunnel_node_up{") {
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    };
    assert_eventually("the peer announces it", announced).await;
    assert_eq!(nodes(NodesFormat::Name, true).await, "");

    // It was never linked here: its server has said that it is lost.
    drop(client);
    far.shutdown(std::future::ready(())).await;
    let lost = async { while nodes(NodesFormat::Name, true).await != "far\n" {} };
    assert_eventually("the loss at the peer", lost).await;
    assert!(nodes(NodesFormat::Text, true).await.contains("its link to another server ended"));
    assert!(metrics().await.contains("tunnel_node_up{node=\"far\"} 0\n"));
}

#[tokio::test]
async fn a_watched_status_is_redrawn_until_it_is_interrupted() {
    let place = TestDir::new();
    let (path, table) = socket(&place, "server");
    let _server = TestServer::with(&place, &table);
    let (shown, stop) = (std::cell::Cell::new(0), tokio::sync::Notify::new());
    let show = |text: &str| {
        assert!(text.starts_with("\x1b[H\x1b[2J") && text.contains("no node is connected"), "{text}");
        shown.set(shown.get() + 1);
        if shown.get() == 2 {
            stop.notify_one();
        }
    };
    pause_time();
    let env = Environment::default();
    let watching = status::watch(Some(path), &env, stop.notified(), show);
    assert_eq!(assert_eventually("the end", watching).await.unwrap(), "");
    assert_eq!(shown.get(), 2);
}

#[tokio::test]
async fn a_socket_without_a_program_is_reported_with_a_hint() {
    let place = TestDir::new();
    let (path, table) = socket(&place, "server");
    let failed = status::status(Some(path.clone()), Format::Text, &Environment::default()).await.unwrap_err();
    assert!(failed.code == 69 && failed.text.contains("server.sock does not respond"), "{failed}");
    let server = TestServer::with(&place, &table);
    // A public port shows none of this: the metrics port has no such page.
    assert_eq!(get(server.server.bound.metrics.unwrap(), "/status").await.status, 404);
    server.server.shutdown(std::future::ready(())).await;
    assert!(!path.exists(), "the socket is removed with its program");
}
