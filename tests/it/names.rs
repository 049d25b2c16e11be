//! Names that nodes may have, such as addresses and names that TLS libraries reject, at every listener.

use std::net::SocketAddr;
use std::sync::Arc;

use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;
use tokio_rustls::rustls;
use tokio_rustls::rustls::pki_types::ServerName;

use crate::edge_proxy::{ALLOW, requester};
use crate::http_proxy::{body, site};
use crate::support::clients::{assert_echo, open, rest};
use crate::support::programs::{TestDir, TestServer, at, edge, edge_with};
use crate::support::{assert_eventually, servers, targets};

/// A node's name that is an address, as in clusters of k3s and KubeEdge. No machine has this address.
const ADDRESS: &str = "192.0.2.33";

/// A node's name that is no server name for TLS, because the last label is a number.
const NUMBER: &str = "docker-node-worker-7.9";

/// Returns the tables of listeners that find the node of a request.
fn listeners(site: SocketAddr) -> String {
    format!(
        "[server.http_proxy]\nlisten = \"127.0.0.1:0\"\n\
         [server.http]\nlisten_ip = \"127.0.0.1\"\nports = {{ \"0\" = \"{site}\" }}\n{ALLOW}"
    )
}

/// Requests a path of a site and returns its response.
async fn get(at: SocketAddr, url: &str, host: &str) -> String {
    let mut client = TcpStream::connect(at).await.unwrap();
    client.write_all(format!("GET {url} HTTP/1.1\r\nHost: {host}\r\n\r\n").as_bytes()).await.unwrap();
    body(&mut client).await
}

#[tokio::test]
async fn a_node_is_reached_by_any_name_that_it_may_have_at_every_listener() {
    let (place, echo, site) = (TestDir::new(), targets::echo().await, site("site").await);
    let server = TestServer::with(&place, &listeners(site));
    let (_asker, proxy) = requester(&place, &server, server.server.bound.grpc, "").await;
    let long = "x".repeat(64);
    for name in [ADDRESS, NUMBER, &long, "7"] {
        let _edge = edge(&place, &server, name).await;
        assert_echo(&mut server.open(&at(name, echo)).await, "CONNECT").await;
        let (proxied, url) = (server.port("http_proxy"), format!("http://{}/", at(name, site)));
        assert!(get(proxied, &url, "other").await.starts_with("site\n"), "{name}");
        assert!(get(server.port("http"), "/", name).await.starts_with("site\n"), "{name}");
    }
    for name in [&format!("[::ffff:{ADDRESS}]"), &format!("{}.", NUMBER.to_uppercase())] {
        assert_echo(&mut server.open(&at(name, echo)).await, "in another spelling").await;
    }
    assert_echo(&mut open(proxy, &at(ADDRESS, echo)).await, "from another node").await;
}

#[tokio::test]
async fn a_node_named_by_its_address_is_found_at_a_peer() {
    let (place, echo) = (TestDir::new(), targets::echo().await);
    let servers = servers::start(&place, 2);
    let _edge = edge(&place, &servers[0], ADDRESS).await;
    assert_echo(&mut servers[1].open(&at(ADDRESS, echo)).await, "relayed").await;
    let unknown = servers[1].request_connect("192.0.2.34:22").await;
    assert_eq!((unknown.status, unknown.phrase.as_str()), (421, "no node is known for 192.0.2.34:22"));
}

#[tokio::test]
async fn a_node_named_like_an_address_is_reached_by_it_unless_another_node_owns_it() {
    let (place, echo) = (TestDir::new(), targets::echo().await);
    let table = |node: &str| format!("[server.addresses.nodes]\n\"{ADDRESS}\" = \"{node}\"\n");
    let own = TestServer::with(&place, &table(ADDRESS));
    let _edge = edge(&place, &own, ADDRESS).await;
    assert_echo(&mut own.open(&at(ADDRESS, echo)).await, "loopback").await;
    let of_other = TestServer::with(&place, &table("node2"));
    let (_one, _two) = (edge(&place, &of_other, ADDRESS).await, edge(&place, &of_other, "node2").await);
    let refused = of_other.request_connect(&at(ADDRESS, echo)).await;
    assert!(refused.body.starts_with("node node2: this edge may not dial"), "{refused:?}");
}

#[tokio::test]
async fn rules_apply_to_a_node_named_by_its_address() {
    let (place, echo) = (TestDir::new(), targets::echo().await);
    for (rule, status) in [("192.0.2.*", 200), ("node*", 421)] {
        let server = TestServer::with(&place, &format!("rules = [{{ nodes = [\"{rule}\"] }}]"));
        let _edge = edge(&place, &server, ADDRESS).await;
        let mut client = TcpStream::connect(server.connect).await.unwrap();
        let request = format!("CONNECT {} HTTP/1.1\r\n\r\n", at(ADDRESS, echo));
        client.write_all(request.as_bytes()).await.unwrap();
        client.shutdown().await.unwrap();
        let answer = String::from_utf8(rest(&mut client).await).unwrap();
        assert!(answer.starts_with(&format!("HTTP/1.1 {status} ")), "{rule}: {answer}");
    }
}

/// Returns a ClientHello with a server name that rustls itself would not send.
fn hello(name: &str) -> Vec<u8> {
    let config = rustls::ClientConfig::builder().with_root_certificates(rustls::RootCertStore::empty());
    // A name of the same length that rustls accepts.
    let stand_in: String = ["y".repeat(name.len() / 2 - 1), "z".repeat(name.len().div_ceil(2))].join(".");
    let server = ServerName::try_from(stand_in.clone()).unwrap();
    let mut client = rustls::ClientConnection::new(Arc::new(config.with_no_client_auth()), server).unwrap();
    let mut hello = Vec::new();
    client.write_tls(&mut hello).unwrap();
    let place = hello.windows(name.len()).position(|bytes| bytes == stand_in.as_bytes()).unwrap();
    hello[place..place + name.len()].copy_from_slice(name.as_bytes());
    hello
}

#[tokio::test]
async fn passthrough_finds_a_node_by_a_server_name_that_tls_libraries_reject() {
    let (place, echo) = (TestDir::new(), targets::echo().await);
    let server = TestServer::with(
        &place,
        &format!(
            "[server.https]\nmode = \"passthrough\"\nlisten_ip = \"127.0.0.1\"\nports = {{ \"0\" = \"{echo}\" }}\n"
        ),
    );
    for name in [NUMBER, ADDRESS, &"x".repeat(64)] {
        let _edge = edge_with(&place, &server, name, "").await;
        let hello = hello(name);
        let mut client = server.client("https").await;
        client.write_all(&hello).await.unwrap();
        let mut back = vec![0; hello.len()];
        assert_eventually("the hello", client.read_exact(&mut back)).await.unwrap();
        assert_eq!(back, hello, "{name}");
    }
}

#[tokio::test]
async fn an_edge_with_a_reserved_name_is_refused() {
    let place = TestDir::new();
    let server = TestServer::start(&place);
    for name in ["default", "-", "pod"] {
        let text = place.edge("node1", server.server.bound.grpc, "").replace("node1", name);
        let wrong = tunnel::edge::config::EdgeConfig::read(&text, &tunnel::config::Environment::default());
        let wrong = wrong.unwrap_err().to_string();
        assert!(wrong.contains(&format!("no node can have the name \"{name}\"")), "{wrong}");
        assert_eq!(server.request_connect(&format!("{name}:22")).await.status, 421, "{name}");
    }
}
