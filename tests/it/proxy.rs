//! A user's proxy on her machine.

use std::net::SocketAddr;
use std::os::unix::fs::fchown;
use std::time::Duration;

use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpSocket, TcpStream};
use tokio::runtime::{Builder, Runtime};
use tunnel::command::client;
use tunnel::config::Environment;
use tunnel::edge::Edge;
use tunnel::uplink::client::{UserLinkConfig, UserUplinks};
use tunnel::uplink::proxy::UserProxy;
use tunnel_net::listen::TcpListenSocket;

use crate::connecting::{Local, home_of_alice};
use crate::edge_proxy::assert_serves_a_hundred_at_once;
use crate::enrol::{invited_user, join_as_user};
use crate::http_proxy::{body, site};
use crate::socks5::{by_name, request_session};
use crate::support::clients::{assert_echo, assert_reset, head, open, rest, send_request};
use crate::support::line::Line;
use crate::support::live::reloaded;
use crate::support::programs::{TestDir, TestServer, at, edge};
use crate::support::users::{server, tables};
use crate::support::{Stopwatch, targets, wait_until};

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
        tokio::task::spawn_blocking(move || Self::new(config)).await.unwrap()
    }

    fn new(config: UserLinkConfig) -> Self {
        let runtime = Builder::new_multi_thread().worker_threads(1).enable_all().build().unwrap();
        let (http, socks5, proxy) = runtime.block_on(async {
            let any = || TcpListenSocket::bind("127.0.0.1:0".parse().unwrap()).unwrap();
            let [http, socks5] = [any(), any()];
            let (http_at, socks5_at) = (http.at(), socks5.at());
            let links = UserUplinks::start(config).await.unwrap();
            (http_at, socks5_at, UserProxy::start(links, Some(http), Some(socks5)))
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
async fn other_users_of_the_machine_and_web_pages_are_not_served() {
    let (echo, (_cloud, proxy)) = (targets::echo().await, proxy_to(&["node1"]).await);
    let target = at("node1", echo);
    for port in [proxy.http, proxy.socks5] {
        let client = TcpSocket::new_v4().unwrap();
        // Only root can give a socket to another user.
        if fchown(&client, Some(65534), None).is_ok() {
            let mut client = client.connect(port).await.unwrap();
            assert!(matches!(client.read(&mut [0]).await, Ok(0) | Err(_)), "closed without a byte");
        }
    }
    // What a browser sends to a page's host whose name resolves to loopback.
    let mut client = TcpStream::connect(proxy.http).await.unwrap();
    let request = format!("GET / HTTP/1.1\r\nHost: {target}\r\nSec-Fetch-Site: cross-site\r\n\r\n");
    client.write_all(request.as_bytes()).await.unwrap();
    let head = head(&mut client).await;
    assert!(head.starts_with("HTTP/1.1 400 bad request: a proxy expects the whole URL"), "{head}");
}

#[tokio::test]
async fn what_a_browser_sends_for_a_page_of_another_site_is_refused_and_for_the_nodes_own_pages_served() {
    let (echo, (_cloud, proxy)) = (targets::echo().await, proxy_to(&["node1"]).await);
    let (echo, target) = (at("node1", echo), at("node1", site("site").await));
    let own = format!("Origin: http://{target}");
    let marked = format!("{own}\r\nSec-Fetch-Site: cross-site");
    for (header, is_own) in [
        ("Accept: */*", true),
        (&*own, true),
        ("Origin: http://Node1", true),
        ("Sec-Fetch-Site: same-origin", true),
        ("Sec-Fetch-Site: same-site\r\nOrigin: https://other.node1", true),
        ("Sec-Fetch-Site: none", true),
        ("Sec-Fetch-Site: cross-site", false),
        (&*marked, false),
        ("Origin: https://evil.example", false),
        ("Origin: http://node1.evil.example", false),
        ("Origin: http://node2", false),
        ("Origin: null", false),
        ("Origin: \u{e9}", false),
    ] {
        let headers = format!("Host: {target}\r\n{header}\r\nConnection: close\r\n\r\n");
        let expected = if is_own { 200 } else { 403 };
        let get = format!("GET http://{target}/a HTTP/1.1\r\n{headers}");
        let answer = send_request(proxy.http, &get).await;
        assert_eq!(answer.status, expected, "{header}: {answer:?}");
        assert_eq!(answer.phrase.contains("a page of another site"), !is_own, "{header}: {answer:?}");
        let mut client = TcpStream::connect(proxy.http).await.unwrap();
        let connect = format!("CONNECT {echo} HTTP/1.1\r\n{headers}");
        client.write_all(connect.as_bytes()).await.unwrap();
        let answer = head(&mut client).await;
        assert!(answer.starts_with(&format!("HTTP/1.1 {expected} ")), "{header}: {answer}");
    }
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
    server.server.enrolment.get().unwrap().refresh().await.unwrap();
    let proxy = LocalProxy::start(home_of_alice(&place, server.server.bound.grpc)).await;
    let answer = send_request(proxy.http, "CONNECT 192.0.2.1:80 HTTP/1.1\r\n\r\n").await;
    let expected =
        "192.0.2.1:80 is at no node, and users' links lead to nodes only; for targets of [server.direct]";
    assert!(answer.status == 403 && answer.body.starts_with(expected), "{}", answer.body);
}

#[tokio::test]
async fn a_revoked_token_is_reported_at_once_and_that_of_a_new_invitation_is_read() {
    let (place, echo) = (TestDir::new(), targets::echo().await);
    let server = server(&place, "").await;
    let _edge = edge(&place, &server, "node1").await;
    let at_server = server.server.bound.grpc;
    let proxy = LocalProxy::start(home_of_alice(&place, at_server)).await;
    let joined = server.server.enrolment.get().unwrap();
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
async fn a_proxy_that_ends_resets_its_clients() {
    let (place, echo) = (TestDir::new(), targets::echo().await);
    let server = server(&place, "").await;
    let _edge = edge(&place, &server, "node1").await;
    let variable = home_of_alice(&place, server.server.bound.grpc);
    for is_killed in [true, false] {
        let proxy = LocalProxy::start(&variable).await;
        let mut client = open(proxy.http, &at("node1", echo)).await;
        assert_echo(&mut client, "hello").await;
        if is_killed {
            drop(proxy);
        } else {
            proxy.stop().await;
        }
        assert_reset(&mut client).await;
    }
}

#[tokio::test]
async fn tunnel_connect_has_a_link_of_its_own_next_to_a_proxy() {
    let (place, echo) = (TestDir::new(), targets::echo().await);
    let server = server(&place, "").await;
    let _edge = edge(&place, &server, "node1").await;
    let line = Line::to(server.server.bound.grpc).await;
    let variable = home_of_alice(&place, line.at);
    let proxy = LocalProxy::start(&variable).await;
    let local = Local::start_with(&[&at("node1", echo)], variable).await;
    let mut client = local.client().await;
    assert_echo(&mut client, "hello").await;
    assert_eq!((proxy.links(), line.connections()), (1, 2));
    drop(proxy);
    assert_echo(&mut client, "the proxy was not involved").await;
    drop(client);
    local.wait_for_end().await;
}

#[tokio::test]
async fn tunnel_connect_uses_the_link_of_a_proxy_if_its_port_is_the_server() {
    let (place, echo) = (TestDir::new(), targets::echo().await);
    let server = server(&place, "").await;
    let _edge = edge(&place, &server, "node1").await;
    let variable = home_of_alice(&place, server.server.bound.grpc);
    let proxy = LocalProxy::start(&variable).await;
    let through = format!("--server={}", proxy.http);
    let local = Local::start_with(&[&through, &at("node1", echo)], variable.clone()).await;
    local.assert_half_close().await;
    let mut local = Local::start_with(&[&through, "other1:22"], variable).await;
    let message = local.refusal().await;
    assert!(message.contains("403 no rule lets alice reach port"), "{message}");
    assert_eq!(proxy.links(), 1);
}
