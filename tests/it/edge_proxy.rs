//! The proxy of an edge: programs on a node use it to reach services in the cloud, and other nodes.

use std::future::pending;
use std::net::SocketAddr;
use std::time::Duration;

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use futures_util::future::join_all;
use tokio::io::AsyncWriteExt;
use tokio::net::{TcpListener, TcpStream};
use tunnel::edge::Edge;
use tunnel_base::drain::Drained;

use crate::addresses;
use crate::http_proxy::{body, site};
use crate::support::clients::{
    Answer, ESTABLISHED, assert_echo, assert_reset, get, head, open, rest, send_request,
};
use crate::support::line::Line;
use crate::support::live::{self, reloaded};
use crate::support::programs::{TestDir, TestServer, assert_edge_idle, at, edge, edge_with, start_edge};
use crate::support::servers;
use crate::support::{assert_eventually, pause_time, spawn, targets, wait_until, wait_within};

/// Starts an edge named `requester` that links to that address, with its proxy. `more` is appended to the proxy's
/// table.
pub(crate) async fn requester(
    place: &TestDir,
    server: &TestServer,
    to: SocketAddr,
    more: &str,
) -> (Edge, SocketAddr) {
    let proxy = format!("[edge.http_proxy]\nlisten = \"127.0.0.1:0\"\n{more}");
    let edge = start_edge(&place.edge("asker", to, &proxy));
    server.wait_for_node("asker").await;
    wait_until("the edge has a link", || edge.metrics.links.all() > 0).await;
    let at = edge.bound.proxy.unwrap();
    (edge, at)
}

/// Starts a server through which edges reach one another and loopback, and an asker that is linked to it.
async fn alone(place: &TestDir) -> (TestServer, Edge, SocketAddr) {
    let server = TestServer::with(place, ALLOW);
    let (edge, proxy) = requester(place, &server, server.server.bound.grpc, "").await;
    (server, edge, proxy)
}

/// The servers do not know each other, like two that have lost their links.
#[tokio::test]
async fn a_node_that_only_the_next_server_of_the_list_finds_is_reached_there() {
    let place = TestDir::new();
    let echo = targets::echo().await;
    let [one, two] = [(); 2].map(|()| TestServer::with(&place, ALLOW));
    let _other = edge(&place, &two, "node1").await;
    let line = Line::to(two.server.bound.grpc).await;
    let list = format!("{}\", \"{}", one.server.bound.grpc, line.at);
    let proxy = "[edge.http_proxy]\nlisten = \"127.0.0.1:0\"";
    let asker = start_edge(&place.edge("asker", list, proxy));
    one.wait_for_node("asker").await;
    let at_proxy = asker.bound.proxy.unwrap();
    wait_until("the edge has a link", || asker.metrics.links.all() > 0).await;
    let mut client = open(at_proxy, &at("node1", echo)).await;
    assert_echo(&mut client, "there").await;
    assert!(two.link("asker").is_none(), "the edge is found at one server");
    let missing = connect(at_proxy, "node9:22").await;
    assert!(missing.status == 502 && missing.phrase.contains("not connected"), "{}", missing.phrase);
    line.reset();
    assert_echo(&mut client, "again").await;
    drop(client);
    pause_time();
    let is_closed = || asker.metrics.links.all() == 1;
    wait_within(Duration::from_secs(120), "the second link is closed", is_closed).await;
    assert!(one.link("asker").is_some());
}

/// The servers have lost each other when the node moves from one to the other.
#[tokio::test]
async fn the_address_of_a_node_that_only_the_next_server_of_the_list_finds_leads_there() {
    let place = TestDir::new();
    let echo = addresses::echo().await;
    let tables = format!("{ALLOW}[server.addresses.nodes]\n\"{}\" = \"node1\"\n", echo.ip());
    let [one, two] = [(); 2].map(|()| TestServer::with(&place, &tables));
    let line = Line::to(one.server.bound.grpc).await;
    let _other = start_edge(&place.edge("node1", line.at, ""));
    one.wait_for_node("node1").await;
    line.route_to(two.server.bound.grpc);
    line.reset();
    two.wait_for_node("node1").await;
    let list = format!("{}\", \"{}", one.server.bound.grpc, two.server.bound.grpc);
    let asker = start_edge(&place.edge("asker", list, "[edge.http_proxy]\nlisten = \"127.0.0.1:0\""));
    one.wait_for_node("asker").await;
    wait_until("the edge has a link", || asker.metrics.links.all() > 0).await;
    let mut client = open(asker.bound.proxy.unwrap(), &echo.to_string()).await;
    assert_echo(&mut client, "there").await;
}

async fn connect(proxy: SocketAddr, target: &str) -> Answer {
    send_request(proxy, &format!("CONNECT {target} HTTP/1.1\r\n\r\n")).await
}

/// Returns the address of a target in the cloud: this name resolves to loopback.
fn in_cloud(target: SocketAddr) -> String {
    format!("web.localhost:{}", target.port())
}

#[tokio::test]
async fn programs_reach_the_cloud_and_other_nodes_over_one_server_and_over_two() {
    let (place, echo) = (TestDir::new(), targets::echo().await);
    let all = servers::addresses(2);
    let text = |at: &SocketAddr| servers::config(&place, *at, &format!("{}\n{ALLOW}", servers::peers(&all)));
    let servers = [TestServer::from_text(&text(&all[0])), TestServer::from_text(&text(&all[1]))];
    let others = [edge(&place, &servers[0], "node1").await, edge(&place, &servers[1], "node2").await];
    let (edge, proxy) = requester(&place, &servers[0], all[0], "").await;
    for target in [at("node1", echo), at("Node2", echo), in_cloud(echo)] {
        let mut client = open(proxy, &target).await;
        assert_echo(&mut client, "there and back").await;
        client.shutdown().await.unwrap();
        assert_eq!(rest(&mut client).await, b"", "{target}");
    }
    assert_eq!(servers[0].server.metrics.sessions.closed("acceptor", "ok"), 1, "one session to the cloud");
    assert_edge_idle(&edge).await;
    assert_eq!(edge.metrics.sessions.closed("http_proxy", "ok"), 3);
    for other in &others {
        assert_edge_idle(other).await;
        assert_eq!(other.metrics.sessions.closed("acceptor", "ok"), 1);
    }
    for server in &servers {
        server.assert_idle().await;
        wait_until("no session is relayed", || server.server.table.relayed() == (0, 0)).await;
    }
}

#[tokio::test]
async fn each_plain_request_goes_to_its_own_url_without_the_password() {
    let place = TestDir::new();
    let (server, _edge, proxy) = alone(&place).await;
    let _other = edge(&place, &server, "node2").await;
    let node = (at("node2", site("node").await), "node");
    let cloud = (in_cloud(site("cloud").await), "cloud");
    let mut client = TcpStream::connect(proxy).await.unwrap();
    for (target, name) in [&node, &cloud, &cloud, &node] {
        let request = format!(
            "GET http://{target}/a?b=c HTTP/1.1\r\nHost: elsewhere:1\r\nProxy-Authorization: Basic eDp5\r\n\r\n"
        );
        client.write_all(request.as_bytes()).await.unwrap();
        let expected = format!("{name}\nGET /a?b=c HTTP/1.1\r\nHost: {target}\r\n\r\n");
        assert_eq!(body(&mut client).await.to_lowercase(), expected.to_lowercase());
    }
    let foreign = format!("POST http://{} HTTP/1.1\r\nOrigin: null\r\nConnection: close\r\n\r\n", node.0);
    assert_eq!(send_request(proxy, &foreign).await.status, 403);
    // A web page's request to a name that resolves to this port has no whole URL.
    client.write_all(format!("GET / HTTP/1.1\r\nHost: {}\r\n\r\n", node.0).as_bytes()).await.unwrap();
    let head = head(&mut client).await;
    assert!(head.starts_with("HTTP/1.1 400 bad request: a proxy expects the whole URL"), "{head}");
}

#[tokio::test]
async fn by_default_nodes_and_cloud_targets_are_refused_with_the_key_that_allows_them() {
    let (place, echo) = (TestDir::new(), targets::echo().await);
    let server = TestServer::start(&place);
    let _other = edge(&place, &server, "node2").await;
    let (edge, proxy) = requester(&place, &server, server.server.bound.grpc, "").await;
    let node = connect(proxy, &at("node2", echo)).await;
    assert_eq!(node.status, 403, "{node:?}");
    assert!(
        node.phrase.contains(&format!(
            "edges may not reach node node2: not in server.edge_access.nodes of server {}",
            server.server.bound.grpc
        )),
        "{node:?}"
    );
    assert!(node.body.contains("hint: add the node to [server.edge_access] nodes"), "{node:?}");
    assert_eq!(server.server.metrics.sessions.closed("acceptor", "node_not_allowed"), 1);
    let cloud = connect(proxy, &in_cloud(echo)).await;
    assert_eq!(cloud.status, 403, "{cloud:?}");
    assert!(cloud.body.contains("hint: add the target to [server.edge_access] targets"), "{cloud:?}");
    let mut plain = TcpStream::connect(proxy).await.unwrap();
    plain.write_all(format!("GET http://{}/ HTTP/1.1\r\n\r\n", in_cloud(echo)).as_bytes()).await.unwrap();
    let head = head(&mut plain).await;
    assert!(head.starts_with("HTTP/1.1 403 edges may not have the server dial "), "{head}");
    assert_eq!(edge.metrics.sessions.closed("http_proxy", "not_allowed"), 2);
    assert_eq!(edge.metrics.sessions.closed("http_proxy", "node_not_allowed"), 1);
}

#[tokio::test]
async fn the_other_node_refuses_targets_outside_its_own_policy() {
    let (place, echo) = (TestDir::new(), targets::echo().await);
    let (server, _edge, proxy) = alone(&place).await;
    let narrow = "[edge.allow]\ntargets = [\"10.1.2.3:443\"]";
    let _other = edge_with(&place, &server, "node2", narrow).await;
    let refused = connect(proxy, &at("node2", echo)).await;
    assert_eq!(refused.status, 403, "{refused:?}");
    assert!(refused.phrase.starts_with("node node2: this edge may not dial node2:"), "{refused:?}");
    assert!(refused.body.contains("hint: add the target to [edge.allow]"), "{refused:?}");
}

#[tokio::test]
async fn a_node_that_is_not_connected_has_the_hint_to_check_its_edge() {
    let place = TestDir::new();
    let (_server, _edge, proxy) = alone(&place).await;
    let refused = connect(proxy, "node9:22").await;
    assert_eq!((refused.status, &*refused.phrase), (502, "node node9 is not connected"));
    assert!(refused.body.contains("hint: check that `tunnel edge` runs on that node"), "{refused:?}");
}

#[tokio::test]
async fn the_own_node_and_forbidden_targets_are_refused_at_once() {
    let place = TestDir::new();
    let (server, edge, proxy) = alone(&place).await;
    for target in ["asker:22", "ASKER.:22", "localhost:22"] {
        let refused = connect(proxy, target).await;
        assert_eq!(refused.status, 421, "{refused:?}");
        assert!(
            refused.phrase.ends_with("is this machine itself; connect to it directly, not through its proxy"),
            "{refused:?}"
        );
        assert!(refused.body.contains("no_proxy"), "{refused:?}");
    }
    for target in ["127.0.0.1:22", "169.254.169.254:80", "2130706433:80"] {
        let refused = connect(proxy, target).await;
        assert_eq!(refused.status, 403, "{refused:?}");
        assert!(refused.phrase.contains(" is not allowed as a target"), "{refused:?}");
    }
    assert_eq!(server.server.metrics.sessions.closed("acceptor", "not_allowed"), 0, "no server was asked");
    assert!(edge.table.is_empty());
}

#[tokio::test]
async fn clients_must_authenticate_with_their_password() {
    let (place, echo) = (TestDir::new(), targets::echo().await);
    let server = TestServer::with(&place, ALLOW);
    let users = place.file("htpasswd", &format!("app:{}\n", bcrypt::hash("right", 4).unwrap()));
    let more = format!("auth = \"basic\"\nusers = {users:?}\nrules = [{{ nodes = [\"-\"] }}]\n");
    let (_edge, proxy) = requester(&place, &server, server.server.bound.grpc, &more).await;
    let with = |target: &str, password: &str| {
        let shown = STANDARD.encode(format!("app:{password}"));
        format!("CONNECT {target} HTTP/1.1\r\nProxy-Authorization: Basic {shown}\r\n\r\n")
    };
    assert_eq!(connect(proxy, &in_cloud(echo)).await.status, 407);
    assert_eq!(send_request(proxy, &with(&in_cloud(echo), "wrong")).await.status, 407);
    let mut client = TcpStream::connect(proxy).await.unwrap();
    client.write_all(with(&in_cloud(echo), "right").as_bytes()).await.unwrap();
    assert_eq!(head(&mut client).await, ESTABLISHED);
    assert_echo(&mut client, "hello").await;
    let ruled = send_request(proxy, &with("node2:22", "right")).await;
    assert_eq!(ruled.status, 403, "{ruled:?}");
    assert!(ruled.phrase.starts_with("no rule lets app reach port 22 of node node2"), "{ruled:?}");
}

#[tokio::test]
async fn the_proxy_itself_cannot_be_reached_through_the_tunnel() {
    let place = TestDir::new();
    let (server, _edge, proxy) = alone(&place).await;
    let refused = server.request_connect(&at("asker", proxy)).await;
    assert_eq!(refused.status, 403, "{refused:?}");
    assert!(refused.phrase.contains("is a tunnel process's own port"), "{refused:?}");
}

#[tokio::test]
async fn sessions_of_the_proxy_continue_over_new_links() {
    let (place, echo) = (TestDir::new(), targets::echo().await);
    let server = TestServer::with(&place, ALLOW);
    let _other = edge(&place, &server, "node2").await;
    let line = Line::to(server.server.bound.grpc).await;
    let (edge, proxy) = requester(&place, &server, line.at, "").await;
    let mut clients = [open(proxy, &at("node2", echo)).await, open(proxy, &in_cloud(echo)).await];
    for _ in 0..3 {
        for client in &mut clients {
            assert_echo(client, "before").await;
        }
        let old = server.wait_for_node("asker").await;
        line.reset();
        wait_until("there is a new link", || {
            server.link("asker").is_some_and(|linked| linked.link.id != old.link.id)
        })
        .await;
        for client in &mut clients {
            assert_echo(client, "after").await;
        }
    }
    drop(clients);
    assert_edge_idle(&edge).await;
    server.assert_idle().await;
}

#[tokio::test]
async fn an_edge_without_a_link_refuses_with_that_reason() {
    let place = TestDir::new();
    let nowhere = targets::closed_port().await;
    let proxy = "[edge.http_proxy]\nlisten = \"127.0.0.1:0\"\n";
    let edge = start_edge(&place.edge("asker", nowhere, proxy));
    for target in ["node2:22", "web.localhost:80"] {
        let refused = connect(edge.bound.proxy.unwrap(), target).await;
        assert_eq!(
            (refused.status, refused.phrase.as_str()),
            (502, "this edge is not connected to the cloud")
        );
    }
}

#[tokio::test]
async fn a_reload_opens_the_proxy_moves_it_and_closes_it_with_its_sessions() {
    let place = TestDir::new();
    let echo = targets::echo().await;
    let server = TestServer::with(&place, ALLOW);
    let text = |proxy: &str| place.edge("asker", server.server.bound.grpc, proxy);
    let (edge, config) = live::edge(&place, &text(""));
    server.wait_for_node("asker").await;
    let change = |proxy: &str| std::fs::write(&config, text(proxy)).unwrap();
    let table = |at: SocketAddr| format!("[edge.http_proxy]\nlisten = \"{at}\"\n");
    let is_open = async |at, expected: bool| {
        let waiting = async { while TcpStream::connect(at).await.is_ok() != expected {} };
        reloaded(assert_eventually("the port", waiting)).await;
    };
    let free = servers::addresses(2);
    let first = free[0];
    let second = free[1];
    change(&table(first));
    is_open(first, true).await;
    let mut client = open(first, &in_cloud(echo)).await;
    change(&table(second));
    is_open(second, true).await;
    is_open(first, false).await;
    assert_echo(&mut client, "goes on").await;
    // A port that cannot be opened leaves the proxy where it was.
    let taken = TcpListener::bind("127.0.0.1:0").await.unwrap();
    change(&table(taken.local_addr().unwrap()));
    let log = edge.bound.log.unwrap();
    let reported =
        async { while !get(log, "/readyz").await.body.contains("listeners: edge.http_proxy.listen") {} };
    reloaded(assert_eventually("the port in /readyz", reported)).await;
    assert_echo(&mut open(second, &in_cloud(echo)).await, "as before").await;
    change("");
    reloaded(assert_reset(&mut client)).await;
    is_open(second, false).await;
}

#[tokio::test]
async fn a_stopping_edge_accepts_no_clients_and_lets_sessions_finish() {
    let (place, echo) = (TestDir::new(), targets::echo().await);
    let (_server, edge, proxy) = alone(&place).await;
    let mut client = open(proxy, &in_cloud(echo)).await;
    assert_echo(&mut client, "before").await;
    let stopped = spawn(edge.shutdown(pending()));
    assert_eventually("a closed port", async { while TcpStream::connect(proxy).await.is_ok() {} }).await;
    assert_echo(&mut client, "while it stops").await;
    client.shutdown().await.unwrap();
    assert_eq!(rest(&mut client).await, b"");
    assert_eq!(assert_eventually("the end of the edge", stopped).await.unwrap(), Drained::Finished);

    let more = "[edge.session]\ndrain_timeout = \"0s\"\n";
    let server = TestServer::with(&place, ALLOW);
    let (edge, proxy) = requester(&place, &server, server.server.bound.grpc, more).await;
    let mut client = open(proxy, &in_cloud(echo)).await;
    assert_echo(&mut client, "before").await;
    assert_eq!(assert_eventually("the end of the edge", edge.shutdown(pending())).await, Drained::Aborted(1));
    assert_reset(&mut client).await;
}

/// Config with which a server lets edges reach one another, and loopback in the cloud.
pub(crate) const ALLOW: &str =
    "[server.edge_access]\nnodes = [\"*\"]\ntargets = [\"127.0.0.0/8:*\", \"[::1]:*\"]\n";

/// Has a hundred clients send a CONNECT at once, and a hundred others keep their connections between two requests each.
pub(crate) async fn assert_serves_a_hundred_at_once(proxy: SocketAddr, echo: &str, site: &str) {
    let mut opened = join_all((0..100).map(|_| open(proxy, echo))).await;
    let request = format!("GET http://{site}/ HTTP/1.1\r\nHost: {site}\r\n\r\n");
    let mut kept = join_all((0..100).map(|_| async { TcpStream::connect(proxy).await.unwrap() })).await;
    for _ in 0..2 {
        for client in &mut kept {
            client.write_all(request.as_bytes()).await.unwrap();
        }
        for client in &mut kept {
            body(client).await;
        }
    }
    for client in &mut opened {
        assert_echo(client, "lives").await;
    }
}

#[tokio::test]
async fn a_hundred_connects_and_kept_alive_requests_at_once_are_all_served() {
    let (place, echo) = (TestDir::new(), targets::echo().await);
    let (server, _edge, proxy) = alone(&place).await;
    let _other = edge(&place, &server, "node2").await;
    let site = at("node2", site("site").await);
    assert_serves_a_hundred_at_once(proxy, &at("node2", echo), &site).await;
}
