//! Pages of the admin ports of a running server and a running edge.

use std::path::Path;

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use clap::Parser;
use tokio::io::AsyncWriteExt;
use tokio::net::TcpStream;
use tunnel::command::CommandError;
use tunnel::command::sessions::{self, SessionsArgs};
use tunnel::config::Environment;

use crate::support::clients::{answer, assert_echo, assert_reset, get, head, send_request};
use crate::support::programs::{TestDir, TestServer, at, edge, edge_with, start_edge};
use crate::support::{targets, wait_until};
use crate::words::LogLines;

#[tokio::test]
async fn a_servers_pages_show_its_nodes_and_its_sessions() {
    let (place, echo) = (TestDir::new(), targets::echo().await);
    let server = TestServer::start(&place);
    assert_eq!(get(server.server.bound.log, "/cloud/healthz").await.body, "[]\n");
    let _edge = edge(&place, &server, "node1").await;
    assert_eq!(get(server.server.bound.log, "/cloud/healthz").await.body, "[node1]\n");
    let mut client = server.open(&at("node1", echo)).await;
    assert_echo(&mut client, "hello").await;
    let metrics_at = server.server.bound.metrics.unwrap();
    for at in [server.server.bound.log, metrics_at] {
        let page = get(at, "/metrics").await;
        for line in [
            "tunnel_cloud_nodes 1",
            "tunnel_nodes_connected 1",
            "tunnel_links_open{remote=\"edge\"} 1",
            "tunnel_sessions_open{listener=\"connect\"} 1",
            "tunnel_session_bytes_total{direction=\"to_target\"} 5",
            "tunnel_session_bytes_total{direction=\"to_client\"} 5",
        ] {
            assert!(page.body.lines().any(|l| l == line), "{line} is not in\n{}", page.body);
        }
        let nodes = get(at, "/metrics/nodes").await;
        for line in ["tunnel_node_up{node=\"node1\"} 1", "tunnel_node_sessions{node=\"node1\"} 1"] {
            assert!(nodes.body.lines().any(|l| l == line), "{line} is not in\n{}", nodes.body);
        }
        for direction in ["to_node", "from_node"] {
            let name = format!("tunnel_node_bytes_total{{node=\"node1\",direction=\"{direction}\"}} ");
            let bytes = nodes.body.lines().find_map(|line| line.strip_prefix(&name)).unwrap();
            // Control messages count, too.
            assert!(bytes.parse::<u64>().unwrap() >= 5, "{direction}: {bytes}");
        }
        let targets = get(at, "/sd/nodes?port=9100").await;
        assert_eq!(targets.status, 200);
        let targets: serde_json::Value = serde_json::from_str(&targets.body).unwrap();
        assert_eq!(targets[0]["targets"], serde_json::json!(["node1:9100"]));
        assert_eq!(targets[0]["labels"]["__meta_tunnel_node"], "node1");
        assert_eq!(targets[0]["labels"]["__meta_tunnel_version"], env!("CARGO_PKG_VERSION"));
        for wrong in ["", "?port=0", "?port=x", "?other=1"] {
            let answer = get(at, &format!("/sd/nodes{wrong}")).await;
            assert!(answer.status == 400 && answer.body.contains("port=9100"), "{wrong}: {}", answer.body);
        }
        // Like all paths with names, against pages whose name resolves to this address.
        for path in ["/metrics/nodes", "/sd/nodes?port=9100"] {
            let request = format!("GET {path} HTTP/1.1\r\nHost: evil.example\r\nConnection: close\r\n\r\n");
            assert_eq!(send_request(at, &request).await.status, 403);
        }
        for path in ["/livez", "/readyz"] {
            assert_eq!(get(at, path).await.status, 200, "{path}");
        }
    }
    assert_eq!(get(metrics_at, "/cloud/healthz").await.status, 404);
    assert_eq!(get(server.server.bound.log, "/edge/healthz").await.status, 404);
    drop(client);
    server.assert_idle().await;
    let page = get(server.server.bound.log, "/metrics").await.body;
    assert!(page.contains("tunnel_sessions_open{listener=\"connect\"} 0\n"), "{page}");
    assert!(page.contains("tunnel_sessions_closed_total{listener=\"connect\",result=\"ok\"} 1\n"), "{page}");
}

#[tokio::test]
async fn an_edges_pages_report_whether_it_is_linked() {
    let place = TestDir::new();
    let nothing = targets::closed_port().await;
    let lost = start_edge(&place.edge("node1", nothing, ""));
    let log = lost.bound.log.unwrap();
    assert_eq!(get(log, "/livez").await.status, 200);
    assert_eq!(get(log, "/readyz").await.status, 503);
    assert_eq!(get(log, "/edge/healthz").await.status, 500);
    wait_until("the failed dial is counted", || lost.metrics.link_dial_failures.counted("refused") > 0).await;

    let server = TestServer::start(&place);
    let edge = edge(&place, &server, "node2").await;
    let log = edge.bound.log.unwrap();
    wait_until("the edge has a link", || edge.metrics.links.all() == 1).await;
    assert_eq!(get(log, "/edge/healthz").await.status, 200);
    assert_eq!(get(log, "/readyz").await.body, "ok\n");
    assert!(get(log, "/metrics").await.body.contains("tunnel_links_open{remote=\"server\"} 1\n"));
}

#[tokio::test]
async fn an_edges_admin_port_is_no_target_but_its_metrics_port_may_be() {
    let place = TestDir::new();
    let server = TestServer::start(&place);
    let edge = edge_with(&place, &server, "node1", "metrics_listen = \"127.0.0.1:0\"").await;
    let refused = server.request_connect(&at("node1", edge.bound.log.unwrap())).await;
    assert_eq!(refused.status, 403, "{refused:?}");
    assert!(refused.phrase.ends_with("for metrics use its metrics_listen"), "{refused:?}");
    for (path, status) in [("/metrics", 200), ("/edge/healthz", 404), ("/debug/flags/v", 404)] {
        let mut metrics = server.open(&at("node1", edge.bound.metrics.unwrap())).await;
        let request = format!("GET {path} HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n");
        metrics.write_all(request.as_bytes()).await.unwrap();
        let page = answer(metrics).await;
        assert_eq!(page.status, status, "{path}");
        assert_eq!(page.body.contains("tunnel_links_open{remote=\"server\"} 1\n"), status == 200, "{page:?}");
    }
}

#[tokio::test]
async fn the_log_level_cannot_be_set_at_the_admin_port() {
    let server = TestServer::start(&TestDir::new());
    let put =
        "PUT /debug/flags/v HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\nContent-Length: 1\r\n\r\n4";
    let answer = send_request(server.server.bound.log, put).await;
    assert_eq!(answer.status, 403, "any user of the machine can reach it: {answer:?}");
    assert_eq!(get(server.server.bound.log, "/debug/flags/v").await.status, 406);
}

#[derive(Debug, Parser)]
struct SessionsLine {
    #[command(flatten)]
    sessions: SessionsArgs,
}

/// Runs `tunnel sessions` with these words.
pub(crate) async fn tunnel_sessions(socket: &Path, words: &str) -> Result<String, CommandError> {
    let socket = format!("--socket={}", socket.display());
    let line = ["sessions", &socket].into_iter().chain(words.split_whitespace());
    sessions::run(SessionsLine::try_parse_from(line).unwrap().sessions, &Environment::default()).await
}

#[tokio::test]
async fn an_operator_lists_sessions_and_ends_them_by_id_user_or_node() {
    let (place, echo) = (TestDir::new(), targets::echo().await);
    let hash = bcrypt::hash("pw", 4).unwrap();
    let users = place.file("users", &format!("ops:{hash}\ndev:{hash}\n"));
    let socket = place.path().join("admin.sock");
    let more = format!(
        "auth = \"basic\"\nusers = {users:?}\n[server.admin]\nlisten = \"unix:{}\"\nusers = {users:?}\n",
        socket.display()
    );
    let server = TestServer::with(&place, &more);
    let (_one, _two) = (edge(&place, &server, "node1").await, edge(&place, &server, "node2").await);
    let login = |user: &str| STANDARD.encode(format!("{user}:pw"));
    let open = async |user: &str, node: &str| {
        let mut client = TcpStream::connect(server.connect).await.unwrap();
        let (target, login) = (at(node, echo), login(user));
        let request = format!("CONNECT {target} HTTP/1.1\r\nProxy-Authorization: Basic {login}\r\n\r\n");
        client.write_all(request.as_bytes()).await.unwrap();
        assert!(head(&mut client).await.starts_with("HTTP/1.1 200 "));
        assert_echo(&mut client, "hello").await;
        client
    };
    let [mut one, mut two] = [open("ops", "node1").await, open("ops", "node2").await];
    let [mut three, mut four, mut five] =
        [open("dev", "node1").await, open("dev", "node2").await, open("dev", "node2").await];
    let listed = tunnel_sessions(&socket, "").await.unwrap();
    let rows: Vec<Vec<&str>> = listed.lines().map(|line| line.split_whitespace().collect()).collect();
    let row = |client: &TcpStream| {
        let address = client.local_addr().unwrap().to_string();
        rows.iter().find(|row| row[4] == address).unwrap_or_else(|| panic!("{address} in {listed}")).clone()
    };
    let target = at("node1", echo);
    let found = row(&three);
    assert_eq!((found[1], found[2], found[3], found[5]), ("node1", &*target, "dev", "connect"), "{listed}");
    assert_eq!(rows.len(), 6, "{listed}");

    assert_eq!(tunnel_sessions(&socket, "end --user ops").await.unwrap(), "2 sessions ended");
    for client in [&mut one, &mut two] {
        assert_reset(client).await;
    }
    assert_eq!(tunnel_sessions(&socket, "end --node NODE1").await.unwrap(), "1 session ended");
    assert_reset(&mut three).await;
    assert_eq!(tunnel_sessions(&socket, &format!("end {}", row(&four)[0])).await.unwrap(), "1 session ended");
    assert_reset(&mut four).await;
    assert_echo(&mut five, "another session").await;
    let missing = tunnel_sessions(&socket, "end --user ops").await.unwrap_err();
    assert!(missing.text.contains("no such session here"), "{missing}");
    let json: serde_json::Value =
        serde_json::from_str(&tunnel_sessions(&socket, "-o json").await.unwrap()).unwrap();
    assert_eq!(
        (json["sessions"].as_array().unwrap().len(), &json["sessions"][0]["user"]),
        (1, &"dev".into())
    );
    let closed = &server.server.metrics.sessions;
    wait_until("the access log has the reason", || closed.closed("connect", "revoked") == 4).await;

    // At the port only for a user who proves a name, and not for a foreign page.
    let body = "{\"user\":\"dev\"}";
    let post = async |headers: &str| {
        let request = format!(
            "POST /sessions/end HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n{headers}Content-Length: {}\r\n\r\n{body}",
            body.len()
        );
        send_request(server.server.bound.log, &request).await.status
    };
    let (basic, kind) =
        (format!("Authorization: Basic {}\r\n", login("ops")), "Content-Type: application/json\r\n");
    assert_eq!(post(kind).await, 401);
    assert_eq!(post(&basic).await, 415);
    assert_eq!(get(server.server.bound.log, "/sessions/end").await.status, 405);
    assert_echo(&mut five, "still there").await;
    assert_eq!(post(&format!("{basic}{kind}")).await, 200);
    assert_reset(&mut five).await;
    let without = TestServer::start(&TestDir::new());
    let request = "POST /sessions/end HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n";
    assert_eq!(send_request(without.server.bound.log, request).await.status, 403);
}

#[tokio::test]
async fn wrong_passwords_at_the_admin_port_are_counted_and_have_audit_lines() {
    let (lines, _guard) = LogLines::start();
    let place = TestDir::new();
    let users = place.file("users", &format!("ops:{}\n", bcrypt::hash("right", 4).unwrap()));
    let server = TestServer::with(&place, &format!("[server.admin]\nusers = {users:?}\n"));
    // The first has a foreign Host.
    for head in
        ["GET /status HTTP/1.1\r\nHost: admin.example", "POST /sessions/end HTTP/1.1\r\nHost: localhost"]
    {
        let login = STANDARD.encode("ops:wrong");
        let request = format!("{head}\r\nConnection: close\r\nAuthorization: Basic {login}\r\n\r\n");
        assert_eq!(send_request(server.server.bound.log, &request).await.status, 401);
    }
    assert_eq!(server.server.metrics.sessions.closed("admin", "credentials_invalid"), 2);
    assert_eq!(server.server.metrics.refusals.last_hour().get("credentials_invalid"), Some(&2));
    let text = lines.text();
    let written = text.lines().filter(|line| line.contains("tunnel::audit") && line.contains("unknown user"));
    assert_eq!(written.count(), 2, "{text}");
}
