//! Links through a proxy that ends TLS and passes only HTTP/1.1.

use std::net::SocketAddr;

use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt, copy_bidirectional};
use tokio::net::TcpStream;
use tokio_rustls::TlsConnector;
use tunnel::command::doctor::DoctorRole;
use tunnel::command::status::{self, NodesArgs};
use tunnel::config::Environment;
use tunnel_net::tls::params::TlsParams;
use tunnel_net::tls::{ClientAuth, IdentityFiles, TlsClientConfig, TlsServerConfig, Trust, server_name};
use tunnel_net::websocket::PATH;

use crate::doctor::findings;
use crate::enrol::{invited, join, settings, with_socket};
use crate::status::{socket, status};
use crate::support::clients::{assert_echo, get, send_request};
use crate::support::line::Line;
use crate::support::programs::{NAME, TestDir, TestServer, at, start_edge};
use crate::support::remote::ScriptedServer;
use crate::support::{assert_eventually, targets, wait_until};

/// The address that the proxy names as its client.
const CLIENT: &str = "203.0.113.7";

/// How a proxy speaks to the server.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Onward {
    Plain,
    Tls,
}

/// Starts a proxy to a server, which offers these protocols and passes requests for WebSockets.
async fn proxy(place: &TestDir, to: SocketAddr, alpn: &[&str], onward: Onward) -> SocketAddr {
    let identity = IdentityFiles { cert: place.files.cert.clone(), key: place.files.key.clone() };
    let (clients, params) = (ClientAuth::Anonymous, TlsParams::default());
    let alpn = alpn.iter().map(|name| name.as_bytes().to_vec()).collect();
    let acceptor = TlsServerConfig { identity, clients, params, alpn }.load().unwrap().load().acceptor();
    let client = TlsClientConfig { trust: Trust::NoVerify, identity: None, alpn: Vec::new() };
    let connector = TlsConnector::from(client.load().unwrap().load());
    targets::serve(move |socket| {
        let (acceptor, connector) = (acceptor.clone(), connector.clone());
        async move {
            let Ok(client) = acceptor.accept(socket).await else { return };
            let Ok(server) = TcpStream::connect(to).await else { return };
            match onward {
                Onward::Plain => forward(client, server).await,
                Onward::Tls => {
                    let connected = connector.connect(server_name(NAME).unwrap(), server).await;
                    forward(client, connected.unwrap()).await;
                }
            }
        }
    })
    .await
}

/// Forwards a request, with the header of a proxy, and what follows.
async fn forward(
    mut client: impl AsyncRead + AsyncWrite + Unpin,
    mut server: impl AsyncRead + AsyncWrite + Unpin,
) {
    let mut head = Vec::new();
    while !head.ends_with(b"\r\n\r\n") {
        let Ok(byte) = client.read_u8().await else { return };
        head.push(byte);
    }
    if !head.starts_with(b"GET ") {
        let _ = client.write_all(b"HTTP/1.1 400 Bad Request\r\nContent-Length: 0\r\n\r\n").await;
        return;
    }
    head.truncate(head.len() - 2);
    let more = format!("X-Forwarded-For: 198.51.100.1, {CLIENT}, 127.0.0.1\r\n\r\n");
    let _ = server.write_all(&[&head, more.as_bytes()].concat()).await;
    let _ = server.flush().await;
    let _ = copy_bidirectional(&mut client, &mut server).await;
}

#[tokio::test]
async fn an_edge_links_through_a_proxy_without_http_2_and_both_ends_say_why() {
    for (alpn, onward, trusted, why) in [
        (&["http/1.1"][..], Onward::Tls, true, "a proxy offers no HTTP/2 in TLS"),
        (&[], Onward::Plain, true, "HTTP/2 breaks off"),
        (&["h2", "http/1.1"], Onward::Plain, false, "HTTP/2 breaks off"),
    ] {
        let (place, echo) = (TestDir::new(), targets::echo().await);
        let (path, table) = socket(&place, "server");
        let links =
            if trusted { "trusted_proxies = [\"127.0.0.1\"]\n[server.connect]" } else { "[server.connect]" };
        let server = TestServer::from_text(&place.cloud(&table).replace("[server.connect]", links));
        let proxy = proxy(&place, server.server.bound.grpc, alpn, onward).await;
        let (edge_path, table) = socket(&place, "edge");
        let _edge = start_edge(&place.edge("node1", proxy, &table));
        let from = server.wait_for_node("node1").await.from.ip().to_string();
        assert_eq!(from, if trusted { CLIENT } else { "127.0.0.1" }, "{alpn:?}");
        assert_echo(&mut server.open(&at("node1", echo)).await, "through a WebSocket").await;

        assert_eq!(status(&edge_path).await.links[0].websocket.as_deref(), Some(why));
        let nodes =
            status::nodes(NodesArgs { socket: Some(path), ..NodesArgs::default() }, &Environment::default())
                .await
                .unwrap();
        assert!(nodes.contains(&format!("\n! through a WebSocket, because {why}: node1\n")), "{nodes}");
    }
}

#[tokio::test]
async fn a_ca_of_an_address_is_trusted_only_around_its_websocket() {
    let (place, other, echo) = (TestDir::new(), TestDir::new(), targets::echo().await);
    let server = TestServer::start(&place);
    let proxies = async || proxy(&other, server.server.bound.grpc, &["http/1.1"], Onward::Tls).await;
    let [named, unnamed] = [proxies().await, proxies().await];
    let ca = |entry: &str| format!("websocket_ca = {{ \"{entry}\" = {:?} }}\n", other.files.ca);

    let why = "a proxy ends TLS with another certificate";
    let config = |node| place.edge(node, named, &ca(&named.to_string()));
    let _edge = start_edge(&config("node1"));
    assert_eq!(server.wait_for_node("node1").await.link.websocket(), Some(why));
    assert_echo(&mut server.open(&at("node1", echo)).await, "through a WebSocket").await;

    let found = findings(&place, DoctorRole::Edge, &config("node2"), |_| ()).await;
    let text = format!("{named} is reached through a WebSocket, because {why}");
    assert!(found.contains(&("path".into(), "warning".into(), text)), "{found:#?}");

    // A server of that CA accepts the WebSocket, and the link's own TLS fails.
    let their_server = TestServer::start(&other);
    let theirs = format!("wss://{}", their_server.server.bound.grpc);
    for (servers, entry, reason) in [
        (format!("wss://{unnamed}\", \"127.0.0.1:1"), "127.0.0.1:1", "websocket"),
        (theirs.clone(), &theirs, "tls"),
    ] {
        let edge = start_edge(&place.edge("node2", servers, &ca(entry)));
        wait_until(reason, || edge.metrics.link_dial_failures.counted(reason) > 0).await;
    }
}

#[tokio::test]
async fn a_session_continues_when_the_proxy_is_restarted() {
    let (place, echo) = (TestDir::new(), targets::echo().await);
    let server = TestServer::start(&place);
    let proxy = proxy(&place, server.server.bound.grpc, &["http/1.1"], Onward::Tls).await;
    let line = Line::to(proxy).await;
    let _edge = start_edge(&place.edge("node1", line.at, ""));
    let old = server.wait_for_node("node1").await;
    let mut client = server.open(&at("node1", echo)).await;
    assert_echo(&mut client, "before").await;
    let dialled = line.connections();
    line.reset();
    wait_until("there is a new link", || {
        server.link("node1").is_some_and(|linked| linked.link.id != old.link.id)
    })
    .await;
    assert_echo(&mut client, "after").await;
    assert_eq!(line.connections(), dialled + 1, "the reason is remembered");
}

#[tokio::test]
async fn a_link_may_be_required_to_be_inside_of_a_websocket() {
    let (place, echo) = (TestDir::new(), targets::echo().await);
    let server = TestServer::start(&place);
    let at_server = format!("wss://{}", server.server.bound.grpc);
    let _edge = start_edge(&place.edge("node1", at_server, ""));
    let linked = server.wait_for_node("node1").await;
    assert_eq!(linked.link.websocket(), Some("servers has wss:// here"));
    let mut client = server.open(&at("node1", echo)).await;
    let sent = targets::pattern(4 << 20);
    let (mut from, mut to) = client.split();
    let mut back = vec![0; sent.len()];
    let (written, read) =
        tokio::join!(to.write_all(&sent), assert_eventually("all", from.read_exact(&mut back)));
    assert!(written.is_ok() && read.is_ok() && back == sent);
}

#[tokio::test]
async fn a_server_of_an_older_version_is_named_as_one_without_websockets() {
    let place = TestDir::new();
    let server = ScriptedServer::start(&place).await;
    let proxy = proxy(&place, server.at, &["http/1.1"], Onward::Tls).await;
    for (at, part) in [
        (proxy.to_string(), "not the required protocol over it (ALPN)"),
        (format!("wss://{}", server.at), "it offers no HTTP/1.1 in TLS"),
    ] {
        let edge = start_edge(&place.edge("node1", at, ""));
        let log = edge.bound.log.unwrap();
        assert_eventually("the reason in /readyz", async {
            while !get(log, "/readyz").await.body.contains("no WebSocket") {}
        })
        .await;
        let body = get(log, "/readyz").await.body;
        assert!(body.contains(part) && body.contains("older version without WebSockets"), "{body}");
    }
}

#[tokio::test]
async fn other_requests_are_answered_and_pages_of_browsers_refused() {
    let place = TestDir::new();
    let server = TestServer::start(&place);
    let at = server.server.bound.grpc;
    let websocket = |path: &str, more: &str| {
        format!(
            "GET {path} HTTP/1.1\r\nHost: a\r\nConnection: upgrade\r\nUpgrade: websocket\r\n\
             Sec-WebSocket-Version: 13\r\nSec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\n{more}\r\n"
        )
    };
    for (request, status) in [
        (websocket(PATH, "Origin: https://a\r\n"), 403),
        (websocket("/other", ""), 404),
        (format!("GET {PATH} HTTP/1.1\r\nHost: a\r\n\r\n"), 426),
        (format!("GET {PATH} HTTP/1.0\r\nHost: a\r\n\r\n"), 426),
    ] {
        assert_eq!(send_request(at, &request).await.status, status, "{request}");
    }
    assert_eq!(server.server.metrics.links_rejected.counted("websocket"), 4);
}

#[tokio::test]
async fn doctor_links_through_a_websocket_and_says_why() {
    let place = TestDir::new();
    let server = TestServer::start(&place);
    let proxy = proxy(&place, server.server.bound.grpc, &["http/1.1"], Onward::Tls).await;
    let found = findings(&place, DoctorRole::Edge, &place.edge("node1", proxy, ""), |_| ()).await;
    let text = format!("{proxy} is reached through a WebSocket, because a proxy offers no HTTP/2 in TLS");
    assert!(found.contains(&("path".into(), "warning".into(), text)), "{found:#?}");
    assert!(found.iter().any(|(check, state, _)| check == "dialect" && state == "ok"), "{found:#?}");
}

#[tokio::test]
async fn a_machine_joins_through_such_a_proxy() {
    let place = TestDir::new();
    let (server, _) = with_socket(&place);
    let to = ["http/1.1", "none"].map(|alpn| place.path().join(alpn.replace('/', "")));
    for (alpn, to) in [&["http/1.1"][..], &[]].iter().zip(&to) {
        let proxy = proxy(&place, server.server.bound.grpc, alpn, Onward::Tls).await;
        join(proxy, &invited(&server).await, to).await.unwrap();
    }
    let _edge = start_edge(&settings(&to[1]));
    server.wait_for_node("edge7").await;
}
