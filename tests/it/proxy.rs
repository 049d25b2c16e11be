//! A user's proxy on her machine: its ports, and the socket by which other programs share its link.

use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::time::Duration;

use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;
use tokio::runtime::{Builder, Runtime};
use tunnel::command::client;
use tunnel::config::Environment;
use tunnel::edge::Edge;
use tunnel::uplink::client::{ClientLinkConfig, ClientUplinks};
use tunnel::uplink::proxy::{UserProxy, bind_shared, connect_shared, shared_sockets};
use tunnel_net::listen::TcpListenSocket;

use crate::connecting::{Local, home_of_alice};
use crate::edge_proxy::assert_serves_a_hundred_at_once;
use crate::enrol::{invited_user, join_as_user};
use crate::http_proxy::{body, site};
use crate::socks5::{by_name, request_session};
use crate::support::clients::{ESTABLISHED, assert_echo, assert_reset, open, rest, send_request};
use crate::support::line::Line;
use crate::support::live::reloaded;
use crate::support::programs::{TestDir, TestServer, at, edge};
use crate::support::users::{server, tables};
use crate::support::{Stopwatch, assert_eventually, targets, wait_until};

/// A proxy with its own runtime, so that it can be killed.
pub(crate) struct LocalProxy {
    http: SocketAddr,
    pub(crate) socks5: SocketAddr,
    proxy: Option<UserProxy>,
    runtime: Option<Runtime>,
}

impl LocalProxy {
    async fn start(variable: impl Fn(&str) -> Option<String>) -> Self {
        let config = client::links(&Environment::read(&variable)).unwrap().unwrap();
        let dir = PathBuf::from(variable("XDG_RUNTIME_DIR").unwrap());
        tokio::task::spawn_blocking(move || Self::new(config, &dir)).await.unwrap()
    }

    fn new(config: ClientLinkConfig, dir: &Path) -> Self {
        let runtime = Builder::new_multi_thread().worker_threads(1).enable_all().build().unwrap();
        let (http, socks5, proxy) = runtime.block_on(async {
            let any = || TcpListenSocket::bind("127.0.0.1:0".parse().unwrap()).unwrap();
            let (http, socks5, shared) = (any(), any(), bind_shared(&config, Some(dir)).unwrap());
            assert!(
                bind_shared(&config, Some(dir))
                    .unwrap_err()
                    .to_string()
                    .contains("; use that one, or stop it")
            );
            let (http_at, socks5_at) = (http.at(), socks5.at());
            let links = ClientUplinks::start(config).await.unwrap();
            (http_at, socks5_at, UserProxy::start(links, http, socks5, shared))
        });
        Self { http, socks5, proxy: Some(proxy), runtime: Some(runtime) }
    }

    /// Ends it like SIGTERM.
    async fn stop(mut self) {
        self.proxy.take().unwrap().shutdown().await;
    }

    fn links(&self) -> usize {
        self.proxy.as_ref().unwrap().links.links()
    }
}

/// Ends it like SIGKILL.
impl Drop for LocalProxy {
    fn drop(&mut self) {
        self.runtime.take().unwrap().shutdown_background();
    }
}

/// Starts a server, edges of these nodes, and a proxy of alice.
pub(crate) async fn proxy_to(nodes: &[&str]) -> ((TestServer, Vec<Edge>, TestDir), LocalProxy) {
    let place = TestDir::new();
    let server = server(&place, "").await;
    let mut edges = Vec::new();
    for node in nodes {
        edges.push(edge(&place, &server, node).await);
    }
    let proxy = LocalProxy::start(home_of_alice(&place, server.server.bound.grpc)).await;
    ((server, edges, place), proxy)
}

#[tokio::test]
async fn programs_reach_nodes_by_connect_by_plain_requests_and_by_socks5() {
    let (echo, (_cloud, proxy)) = (targets::echo().await, proxy_to(&["node1"]).await);
    let mut connected = open(proxy.http, &at("node1", echo)).await;
    let (mut socks5, code) = request_session(proxy.socks5, &by_name("Node1", echo.port())).await;
    assert_eq!(code, 0);
    for client in [&mut connected, &mut socks5] {
        assert_echo(client, "there and back").await;
        client.shutdown().await.unwrap();
        assert_eq!(rest(client).await, b"");
    }
    let target = at("node1", site("site").await);
    let mut client = TcpStream::connect(proxy.http).await.unwrap();
    for _ in 0..2 {
        let request = format!("GET http://{target}/a HTTP/1.1\r\nHost: {target}\r\n\r\n");
        client.write_all(request.as_bytes()).await.unwrap();
        let expected = format!("site\nget /a http/1.1\r\nhost: {target}\r\n\r\n");
        assert_eq!(body(&mut client).await.to_lowercase(), expected);
    }
    assert_eq!(proxy.links(), 1);
}

#[tokio::test]
async fn a_hundred_connects_and_kept_alive_requests_at_once_are_all_served() {
    let (echo, (_cloud, proxy)) = (targets::echo().await, proxy_to(&["node1"]).await);
    let site = at("node1", site("site").await);
    assert_serves_a_hundred_at_once(proxy.http, &at("node1", echo), &site).await;
}

#[tokio::test]
async fn what_is_no_node_of_the_user_is_refused_with_the_reason_and_a_hint() {
    let (echo, ((server, _edges, _place), proxy)) =
        (targets::echo().await, proxy_to(&["node1", "other1"]).await);
    let closed = targets::closed_port().await;
    for (target, status, part) in [
        (at("other1", echo), 403, "no rule lets alice reach port"),
        ("example.org:443".to_owned(), 403, "no rule lets alice reach port 443 of node example.org"),
        ("node9:22".to_owned(), 502, "node node9 is not connected"),
        ("127.0.0.1:22".to_owned(), 403, "never dial loopback"),
        (at("node1", closed), 502, "refused"),
    ] {
        let answer = send_request(proxy.http, &format!("CONNECT {target} HTTP/1.1\r\n\r\n")).await;
        assert!(
            answer.status == status && answer.phrase.contains(part),
            "{target}: {} {}",
            answer.status,
            answer.phrase
        );
        let hint = if status == 403 { "ask an operator of the servers: " } else { "" };
        assert!(answer.body.contains(&format!("\nhint: {hint}")), "{}", answer.body);
    }
    server.server.shutdown(std::future::pending()).await;
    let answer = send_request(proxy.http, "CONNECT node1:22 HTTP/1.1\r\n\r\n").await;
    let expected = "this machine has no link to a server: ";
    assert!(
        answer.status == 502 && answer.phrase.starts_with(expected),
        "{} {}",
        answer.status,
        answer.phrase
    );
}

#[tokio::test]
async fn a_target_of_the_servers_direct_list_is_refused_over_a_users_link() {
    let place = TestDir::new();
    let direct = "[server.direct]\ntargets = [\"192.0.2.0/24:*\"]\n";
    let server = TestServer::with(&place, &tables(&place, direct).replace("\"node*\"", "\"*\""));
    server.server.enrolment.as_ref().unwrap().refresh().await;
    let proxy = LocalProxy::start(home_of_alice(&place, server.server.bound.grpc)).await;
    let answer = send_request(proxy.http, "CONNECT 192.0.2.1:80 HTTP/1.1\r\n\r\n").await;
    let expected =
        "192.0.2.1:80 is at no node, and users' links lead to nodes only; for targets of [server.direct]";
    assert!(answer.status == 403 && answer.body.starts_with(expected), "{}", answer.body);
}

#[tokio::test]
async fn a_client_of_the_socket_that_is_killed_does_not_end_its_session_like_a_complete_one() {
    let (place, echo) = (TestDir::new(), targets::echo().await);
    let server = server(&place, "").await;
    let edge = edge(&place, &server, "node1").await;
    let variable = home_of_alice(&place, server.server.bound.grpc);
    let config = client::links(&Environment::read(&variable)).unwrap().unwrap();
    let _proxy = LocalProxy::start(&variable).await;
    let [socket] = shared_sockets(&config, Some(&place.path().join("run")))
        .try_into()
        .unwrap_or_else(|all| panic!("{all:?}"));
    let mut client = connect_shared(&socket, |_| {}).await.unwrap();
    client.write_all(format!("CONNECT {} HTTP/1.1\r\n\r\npart", at("node1", echo)).as_bytes()).await.unwrap();
    client.flush().await.unwrap();
    let mut answer = vec![0; ESTABLISHED.len() + 4];
    assert_eventually("an echo", client.read_exact(&mut answer)).await.unwrap();
    assert_eq!(String::from_utf8_lossy(&answer), format!("{ESTABLISHED}part"));
    drop(client);
    wait_until("the target is reset", || edge.metrics.sessions.closed("acceptor", "client_io_error") == 1)
        .await;
}

/// Waits until the proxy that has ended has left no socket.
async fn wait_until_socket_is_closed(place: &TestDir) {
    let is_socket = |name: &std::ffi::OsStr| name.to_string_lossy().ends_with(".sock");
    let sockets = || std::fs::read_dir(place.path().join("run/tunnel")).into_iter().flatten();
    wait_until("its socket is closed", || !sockets().any(|file| is_socket(&file.unwrap().file_name()))).await;
}

#[tokio::test]
async fn tunnel_connect_shares_the_link_of_a_proxy_and_falls_back_to_its_own() {
    let (place, echo) = (TestDir::new(), targets::echo().await);
    let server = server(&place, "").await;
    let _edges = [edge(&place, &server, "node1").await, edge(&place, &server, "other1").await];
    let line = Line::to(server.server.bound.grpc).await;
    let variable = home_of_alice(&place, line.at);
    let proxy = LocalProxy::start(variable.clone()).await;
    let local = Local::start_with(&[&at("node1", echo)], variable.clone()).await;
    local.assert_half_close().await;
    let mut local = Local::start_with(&[&at("other1", echo)], variable.clone()).await;
    let message = local.refusal().await;
    assert!(message.contains("403 no rule lets alice reach port"), "{message}");
    assert_eq!(line.connections(), 1, "that of the proxy");
    drop(proxy);
    wait_until_socket_is_closed(&place).await;
    let local = Local::start_with(&[&at("node1", echo)], variable).await;
    assert_echo(&mut local.client().await, "hello").await;
    assert_eq!(line.connections(), 2);
    local.wait_for_end().await;
}

/// Returns a `tunnel connect` through a proxy, and a client of it with an open session.
async fn through(
    proxy: &LocalProxy,
    target: &str,
    variable: impl Fn(&str) -> Option<String> + Send + 'static,
) -> (Local, TcpStream) {
    let local = Local::start_with(&[target], variable).await;
    let mut client = local.client().await;
    assert_echo(&mut client, "hello").await;
    assert_eq!(proxy.links(), 1);
    (local, client)
}

#[tokio::test]
async fn a_proxy_that_ends_interrupts_its_sessions_with_a_message() {
    let (place, echo) = (TestDir::new(), targets::echo().await);
    let server = server(&place, "").await;
    let _edge = edge(&place, &server, "node1").await;
    let variable = home_of_alice(&place, server.server.bound.grpc);
    let target = at("node1", echo);
    for is_killed in [true, false] {
        wait_until_socket_is_closed(&place).await;
        let proxy = LocalProxy::start(variable.clone()).await;
        let (mut local, mut client) = through(&proxy, &target, variable.clone()).await;
        if is_killed {
            drop(proxy);
        } else {
            proxy.stop().await;
        }
        assert_reset(&mut client).await;
        let message = assert_eventually("the reason", local.messages.recv()).await.unwrap();
        let expected = if is_killed {
            "has ended"
        } else {
            "the user's program has ended; see the servers' access logs"
        };
        assert!(
            message.starts_with("tunnel: session interrupted: ") && message.contains(expected),
            "{message}"
        );
    }
}

#[tokio::test]
async fn a_revoked_token_is_reported_at_once_and_that_of_a_new_invitation_is_read() {
    let (place, echo) = (TestDir::new(), targets::echo().await);
    let server = server(&place, "").await;
    let _edge = edge(&place, &server, "node1").await;
    let at_server = server.server.bound.grpc;
    let proxy = LocalProxy::start(home_of_alice(&place, at_server)).await;
    let joined = server.server.enrolment.as_ref().unwrap();
    assert!(joined.revoke(&"alice/laptop".parse().unwrap(), "test").await.unwrap());
    wait_until("the link has ended", || proxy.links() == 0).await;
    let since = Stopwatch::start();
    let refused = send_request(proxy.http, "CONNECT node1:22 HTTP/1.1\r\n\r\n").await;
    assert!(refused.body.contains("invalid token (Unauthenticated)"), "{refused:?}");
    assert!(since.elapsed() < Duration::from_secs(7), "{:?}", since.elapsed());

    let invitation = invited_user(&server, "alice", Duration::from_secs(60)).await;
    join_as_user(&place, at_server, &invitation, "laptop").await.unwrap();
    std::fs::copy(place.path().join("laptop/tunnel/client.toml"), place.path().join("tunnel/client.toml"))
        .unwrap();
    reloaded(wait_until("a link with the new token", || proxy.links() == 1)).await;
    assert_echo(&mut open(proxy.http, &at("node1", echo)).await, "hello").await;
}

#[tokio::test]
async fn a_client_of_the_proxy_is_told_that_its_path_is_lost_and_works_again() {
    let (place, echo) = (TestDir::new(), targets::echo().await);
    let server = server(&place, "").await;
    let _edge = edge(&place, &server, "node1").await;
    let line = Line::to(server.server.bound.grpc).await;
    let variable = home_of_alice(&place, line.at);
    let proxy = LocalProxy::start(variable.clone()).await;
    let target = at("node1", echo);
    let (mut shared, mut client) = through(&proxy, &target, variable.clone()).await;
    line.freeze(true);
    let message = assert_eventually("the loss", shared.messages.recv()).await.unwrap();
    let expected = format!("tunnel: no connection to {target} for 2s; the session waits for up to 60s");
    assert_eq!(message, expected);
    line.freeze(false);
    let message = assert_eventually("the return", shared.messages.recv()).await.unwrap();
    assert!(message.starts_with(&format!("tunnel: connected to {target} again, after ")), "{message}");
    assert_echo(&mut client, "nothing lost").await;
}
