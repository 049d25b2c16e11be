//! Ports for one port of every node: HTTPS that ends at the server and starts again at the edge, and HTTP by Host.

use std::io;
use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};

use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt};
use tokio::net::TcpStream;
use tokio::sync::{Notify, mpsc};
use tokio_rustls::client::TlsStream;
use tokio_rustls::rustls::crypto::aws_lc_rs;
use tokio_rustls::rustls::pki_types::pem::PemObject as _;
use tokio_rustls::rustls::pki_types::{CertificateDer, PrivateKeyDer};
use tokio_rustls::rustls::server::WebPkiClientVerifier;
use tokio_rustls::rustls::{RootCertStore, ServerConfig};
use tokio_rustls::{TlsAcceptor, TlsConnector};
use tunnel::edge::Edge;
use tunnel_net::tls::{IdentityFiles, TlsClientConfig, Trust, server_name};

use crate::addresses::own_address;
use crate::support::line::Line;
use crate::support::programs::{NAME, TestDir, TestServer, assert_edge_idle, edge_with, start_edge};
use crate::support::{assert_eventually, targets, wait_until};

/// Returns the TLS config of a target that requests client certificates.
fn tls_config(place: &TestDir) -> Arc<ServerConfig> {
    let mut roots = RootCertStore::empty();
    roots.add(CertificateDer::from_pem_file(&place.files.ca).unwrap()).unwrap();
    let provider = Arc::new(aws_lc_rs::default_provider());
    let clients = WebPkiClientVerifier::builder_with_provider(Arc::new(roots), provider.clone());
    let chain = CertificateDer::pem_file_iter(&place.files.cert).unwrap().flatten().collect();
    let tls_config = ServerConfig::builder_with_provider(provider)
        .with_safe_default_protocol_versions()
        .unwrap()
        .with_client_cert_verifier(clients.allow_unauthenticated().build().unwrap())
        .with_single_cert(chain, PrivateKeyDer::from_pem_file(&place.files.key).unwrap());
    Arc::new(tls_config.unwrap())
}

/// Starts a web server behind TLS that requests client certificates. Returns its address and a counter of its
/// connections.
async fn web_tls(place: &TestDir) -> (SocketAddr, Arc<AtomicUsize>) {
    web_tls_at(place, "127.0.0.1:0").await
}

async fn web_tls_at(place: &TestDir, at: &str) -> (SocketAddr, Arc<AtomicUsize>) {
    let (tls, count) = (tls_config(place), Arc::<AtomicUsize>::default());
    let counted = count.clone();
    let at = targets::serve_at(at, move |socket| {
        let (tls, counted) = (tls.clone(), counted.clone());
        async move {
            let Ok(mut stream) = TlsAcceptor::from(tls).accept(socket).await else { return };
            counted.fetch_add(1, Relaxed);
            let has_certificate = stream.get_ref().1.peer_certificates().is_some();
            let _ = web(&mut stream, if has_certificate { "known" } else { "unknown" }).await;
            let _ = stream.shutdown().await;
        }
    })
    .await;
    (at, count)
}

/// Serves requests: `/exec` switches to an echo protocol, `/sum` has trailers, `/put` expects a body of 4 bytes,
/// `/silent` gets no response.
async fn web<S: AsyncRead + AsyncWrite + Unpin>(stream: &mut S, client: &str) -> io::Result<()> {
    loop {
        let head = head(stream).await?;
        let answer = if head.starts_with("GET /silent ") {
            return stream.read_u8().await.map(drop);
        } else if head.starts_with("GET /exec ") {
            let changed =
                "HTTP/1.1 101 Switching Protocols\r\nConnection: Upgrade\r\nUpgrade: echo\r\n\r\nhi";
            stream.write_all(changed.as_bytes()).await?;
            let mut buffer = [0; 1024];
            loop {
                match stream.read(&mut buffer).await? {
                    0 => return stream.write_all(b"bye").await,
                    n => stream.write_all(&buffer[..n]).await?,
                }
                stream.flush().await?;
            }
        } else if head.starts_with("GET /sum ") {
            "HTTP/1.1 200 OK\r\nTrailer: X-Sum\r\nTransfer-Encoding: chunked\r\n\r\n2\r\nok\r\n0\r\nX-Sum: 2\r\n\r\n"
                .to_owned()
        } else if head.starts_with("PUT /put ") {
            stream.write_all(b"HTTP/1.1 100 Continue\r\n\r\n").await?;
            stream.flush().await?;
            let mut body = [0; 4];
            stream.read_exact(&mut body).await?;
            format!("HTTP/1.1 200 OK\r\nContent-Length: 4\r\n\r\n{}", String::from_utf8_lossy(&body))
        } else {
            format!("HTTP/1.1 200 OK\r\nContent-Length: {}\r\n\r\n{client}", client.len())
        };
        stream.write_all(answer.as_bytes()).await?;
        stream.flush().await?;
    }
}

async fn head<S: AsyncRead + Unpin>(stream: &mut S) -> io::Result<String> {
    let mut head = Vec::new();
    while !head.ends_with(b"\r\n\r\n") {
        head.push(assert_eventually("a head", stream.read_u8()).await?);
    }
    Ok(String::from_utf8(head).unwrap())
}

async fn send<S: AsyncWrite + Unpin>(stream: &mut S, text: &str) {
    stream.write_all(text.as_bytes()).await.unwrap();
    stream.flush().await.unwrap();
}

async fn expect_bytes<S: AsyncRead + Unpin>(stream: &mut S, text: &str) {
    let mut received = vec![0; text.len()];
    assert_eventually(text, stream.read_exact(&mut received)).await.unwrap();
    assert_eq!(String::from_utf8(received).unwrap(), text);
}

/// Starts a server with an HTTPS port for that port of every node.
fn server(place: &TestDir, target: SocketAddr) -> TestServer {
    server_with(place, target, "")
}

/// Like [`server`], but with additional keys.
fn server_with(place: &TestDir, target: SocketAddr, keys: &str) -> TestServer {
    let dir = place.path().display();
    let more = format!(
        "[server.https]\ncert = \"{dir}/cloud.crt\"\nkey = \"{dir}/cloud.key\"\nclient_ca = \"{dir}/ca.crt\"\n\
         names = [\"apiserver\"]\nlisten_ip = \"127.0.0.1\"\nports = {{ \"0\" = \"{target}\" }}\n{keys}"
    );
    TestServer::with(place, &more)
}

/// Returns the table of an edge that presents a certificate to targets.
fn shows(place: &TestDir) -> String {
    let IdentityFiles { cert, key } = place.client("apiserver");
    format!("[edge.target_tls]\ncert = {cert:?}\nkey = {key:?}\n")
}

/// Starts a server with such a port, and an edge that presents a certificate to targets.
async fn terminating(place: &TestDir, target: SocketAddr) -> (TestServer, Edge) {
    let server = server(place, target);
    let edge = edge_with(place, &server, "node-a", &shows(place)).await;
    (server, edge)
}

/// Opens a TLS connection that sends this server name, and presents a certificate if there is one.
async fn dial(
    server: &TestServer,
    name: &str,
    identity: Option<IdentityFiles>,
    alpn: &[&str],
) -> io::Result<TlsStream<TcpStream>> {
    let alpn = alpn.iter().map(|name| name.as_bytes().to_vec()).collect();
    let config = TlsClientConfig { trust: Trust::NoVerify, identity, alpn }.load().unwrap();
    let socket = server.client("https").await;
    assert_eventually(
        "a handshake",
        TlsConnector::from(config.load()).connect(server_name(name).unwrap(), socket),
    )
    .await
}

fn get(host: &str, path: &str) -> String {
    format!("GET {path} HTTP/1.1\r\nHost: {host}\r\n\r\n")
}

#[tokio::test]
async fn many_requests_share_a_session_and_the_edge_presents_its_certificate() {
    let place = TestDir::new();
    let (target, connections) = web_tls(&place).await;
    let (server, edge) = terminating(&place, target).await;
    let mut client = dial(&server, NAME, Some(place.client("apiserver")), &["h2", "http/1.1"]).await.unwrap();
    assert_eq!(client.get_ref().1.alpn_protocol(), Some(&b"http/1.1"[..]));
    for _ in 0..5 {
        send(&mut client, &get("node-a:10250", "/pods")).await;
        expect_bytes(&mut client, "HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\nknown").await;
    }
    assert_eq!((connections.load(Relaxed), server.server.metrics.sessions.now("https")), (1, 1));
    client.shutdown().await.unwrap();
    drop(client);
    wait_until("the session is over", || server.server.metrics.sessions.closed("https", "ok") == 1).await;
    server.assert_idle().await;
    assert_edge_idle(&edge).await;
}

#[tokio::test]
async fn an_exchange_survives_broken_paths_in_its_request_and_response() {
    let place = TestDir::new();
    let (arrived, mut arrives) = mpsc::channel(8);
    let (tls, go) = (tls_config(&place), Arc::new(Notify::new()));
    let goes = go.clone();
    let target = targets::serve(move |socket| {
        let (tls, arrived, goes) = (tls.clone(), arrived.clone(), goes.clone());
        async move {
            let mut stream = TlsAcceptor::from(tls).accept(socket).await.unwrap();
            arrived.send(head(&mut stream).await.unwrap()).await.unwrap();
            for _ in 0..2 {
                let mut half = [0; 3];
                stream.read_exact(&mut half).await.unwrap();
                arrived.send(String::from_utf8(half.to_vec()).unwrap()).await.unwrap();
            }
            send(&mut stream, "HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n3\r\nghi\r\n").await;
            goes.notified().await;
            send(&mut stream, "3\r\njkl\r\n0\r\n\r\n").await;
        }
    })
    .await;
    let server = server(&place, target);
    let line = Line::to(server.server.bound.grpc).await;
    let edge = start_edge(&place.edge("node-a", line.at, &shows(&place)));
    let first = server.wait_for_node("node-a").await.link.id;
    let mut client = dial(&server, NAME, Some(place.client("apiserver")), &[]).await.unwrap();
    send(&mut client, "POST / HTTP/1.1\r\nHost: node-a\r\nContent-Length: 6\r\n\r\nabc").await;
    assert!(assert_eventually("a head", arrives.recv()).await.unwrap().starts_with("POST / HTTP/1.1\r\n"));
    assert_eq!(assert_eventually("half a body", arrives.recv()).await.unwrap(), "abc");
    line.reset();
    wait_until("the link is closed", || server.link("node-a").is_none_or(|linked| linked.link.id != first))
        .await;
    send(&mut client, "def").await;
    assert_eq!(assert_eventually("the other half", arrives.recv()).await.unwrap(), "def");
    let answer = head(&mut client).await.unwrap();
    assert!(answer.starts_with("HTTP/1.1 200 OK\r\n"), "{answer}");
    expect_bytes(&mut client, "3\r\nghi\r\n").await;
    let second = server.wait_for_node("node-a").await.link.id;
    line.reset();
    wait_until("the link is closed", || server.link("node-a").is_none_or(|linked| linked.link.id != second))
        .await;
    go.notify_one();
    expect_bytes(&mut client, "3\r\njkl\r\n0\r\n\r\n").await;
    assert!(server.server.metrics.resumed.get() >= 2 && edge.metrics.resumed.get() >= 2);
}

#[tokio::test]
async fn the_tls_server_name_selects_the_node_if_host_names_none() {
    let place = TestDir::new();
    let (target, _) = web_tls(&place).await;
    let (server, _edge) = terminating(&place, target).await;
    let shows = place.client("apiserver");
    let mut client = dial(&server, "node-a", Some(shows.clone()), &[]).await.unwrap();
    send(&mut client, &get("127.0.0.1:6443", "/exec-not")).await;
    expect_bytes(&mut client, "HTTP/1.1 200 OK\r\n").await;
    let mut client = dial(&server, "127.0.0.1", Some(shows), &[]).await.unwrap();
    send(&mut client, &get("127.0.0.1:6443", "/exec/shop/web/nginx")).await;
    let response = head(&mut client).await.unwrap();
    assert!(
        response.starts_with("HTTP/1.1 421 neither Host nor TLS server name is a node's name"),
        "{response}"
    );
}

#[tokio::test]
async fn upgrades_trailers_and_100_continue_are_forwarded() {
    let place = TestDir::new();
    let (target, connections) = web_tls(&place).await;
    let (server, edge) = terminating(&place, target).await;
    let mut client = dial(&server, NAME, Some(place.client("apiserver")), &[]).await.unwrap();
    send(
        &mut client,
        "PUT /put HTTP/1.1\r\nHost: node-a\r\nExpect: 100-continue\r\nContent-Length: 4\r\n\r\n",
    )
    .await;
    expect_bytes(&mut client, "HTTP/1.1 100 Continue\r\n\r\n").await;
    send(&mut client, "body").await;
    expect_bytes(&mut client, "HTTP/1.1 200 OK\r\nContent-Length: 4\r\n\r\nbody").await;
    send(&mut client, "GET /sum HTTP/1.1\r\nHost: node-a\r\nTE: trailers\r\nConnection: TE\r\n\r\n").await;
    let answer = head(&mut client).await.unwrap().to_lowercase();
    assert!(
        answer.contains("trailer: x-sum\r\n") && answer.contains("transfer-encoding: chunked\r\n"),
        "{answer}"
    );
    expect_bytes(&mut client, "2\r\nok\r\n0\r\nx-sum: 2\r\n\r\n").await;
    send(
        &mut client,
        "GET /exec HTTP/1.1\r\nHost: node-a\r\nConnection: Upgrade\r\nUpgrade: echo\r\n\r\nearly",
    )
    .await;
    assert!(head(&mut client).await.unwrap().starts_with("HTTP/1.1 101 Switching Protocols\r\n"));
    expect_bytes(&mut client, "hiearly").await;
    send(&mut client, "more").await;
    expect_bytes(&mut client, "more").await;
    let under_way = || server.server.metrics.requests.now("GET", "/exec");
    assert_eq!(
        (under_way(), server.server.metrics.requests.now("PUT", "/put")),
        (1, 0),
        "an upgraded request lasts as long as its session"
    );
    client.shutdown().await.unwrap();
    let mut rest = String::new();
    assert_eventually("the end", client.read_to_string(&mut rest)).await.unwrap();
    assert_eq!(rest, "bye", "the end of one direction does not end the other");
    assert_eq!(connections.load(Relaxed), 1);
    wait_until("the session is over", || server.server.metrics.sessions.closed("https", "ok") == 1).await;
    wait_until("the request is over", || under_way() == 0).await;
    assert_edge_idle(&edge).await;
}

#[tokio::test]
async fn a_client_without_certificate_or_with_another_name_is_refused() {
    let place = TestDir::new();
    let (target, connections) = web_tls(&place).await;
    let (server, _edge) = terminating(&place, target).await;
    let refused = async {
        let mut client = dial(&server, NAME, None, &[]).await?;
        client.write_all(get("node-a", "/").as_bytes()).await?;
        head(&mut client).await
    };
    refused.await.unwrap_err();
    let mut client = dial(&server, NAME, Some(place.client("somebody")), &[]).await.unwrap();
    send(&mut client, &get("node-a", "/")).await;
    assert!(head(&mut client).await.unwrap().starts_with("HTTP/1.1 403 "));
    assert_eq!(connections.load(Relaxed), 0);
    let h2 = dial(&server, NAME, Some(place.client("apiserver")), &["h2"]).await.unwrap_err();
    assert!(
        h2.to_string().contains("no_application_protocol")
            || h2.to_string().contains("NoApplicationProtocol"),
        "{h2}"
    );
}

/// Over TLS, the end of a client's direction ends the session: a log that is followed may have no next line for hours.
#[tokio::test]
async fn a_client_that_disconnects_from_a_silent_target_ends_the_session() {
    let place = TestDir::new();
    let (target, connections) = web_tls(&place).await;
    let (server, edge) = terminating(&place, target).await;
    for (sessions, ends) in [(1, true), (2, false)] {
        let mut client = dial(&server, NAME, Some(place.client("apiserver")), &[]).await.unwrap();
        send(&mut client, &get("node-a", "/silent")).await;
        wait_until("the request has arrived", || connections.load(Relaxed) == sessions).await;
        if ends {
            client.shutdown().await.unwrap();
        } else {
            drop(client);
        }
        let ended = || server.server.metrics.sessions.closed("https", "client_io_error");
        wait_until("the session has failed", || ended() == sessions as u64).await;
    }
    assert_edge_idle(&edge).await;
}

/// On loopback no attacker can intercept the connection; elsewhere one could.
#[tokio::test]
async fn a_target_beyond_loopback_is_not_trusted_without_a_ca() {
    let place = TestDir::new();
    let (target, connections) = web_tls_at(&place, &format!("{}:0", own_address())).await;
    let (server, _edge) = terminating(&place, target).await;
    let mut client = dial(&server, NAME, Some(place.client("apiserver")), &[]).await.unwrap();
    send(&mut client, &get("node-a", "/")).await;
    let response = head(&mut client).await.unwrap();
    assert!(
        response.starts_with(&format!("HTTP/1.1 502 node node-a: TLS with {target}: its certificate cannot")),
        "{response}"
    );
    assert_eq!(connections.load(Relaxed), 0);
}

#[tokio::test]
async fn a_target_without_tls_is_reported_to_the_client() {
    let place = TestDir::new();
    let plain = targets::serve(|mut socket| async move {
        let _ = socket.read_u8().await;
        let _ = socket.write_all(b"HTTP/1.1 400 Bad Request\r\n\r\n").await;
    })
    .await;
    let (server, _edge) = terminating(&place, plain).await;
    let mut client = dial(&server, NAME, Some(place.client("apiserver")), &[]).await.unwrap();
    send(&mut client, &get("node-a", "/")).await;
    let response = head(&mut client).await.unwrap();
    let cause = format!("HTTP/1.1 502 node node-a: TLS with {plain}: it does not speak TLS\r\n");
    assert!(response.starts_with(&cause), "{response}");
}

#[tokio::test]
async fn an_http_node_port_selects_the_node_by_host() {
    let place = TestDir::new();
    let node = targets::serve(|mut socket| async move {
        let _ = web(&mut socket, "metrics").await;
    })
    .await;
    let more = format!("[server.http]\nlisten_ip = \"127.0.0.1\"\nports = {{ \"0\" = \"{node}\" }}\n");
    let server = TestServer::with(&place, &more);
    let _edge = edge_with(&place, &server, "node-a", "").await;
    let mut client = server.client("http").await;
    for _ in 0..2 {
        send(&mut client, &get("node-a:10255", "/metrics")).await;
        expect_bytes(&mut client, "HTTP/1.1 200 OK\r\nContent-Length: 7\r\n\r\nmetrics").await;
    }
    send(&mut client, &get("node-b:10255", "/metrics")).await;
    let response = head(&mut client).await.unwrap();
    assert!(response.starts_with("HTTP/1.1 502 node node-b is not connected"), "{response}");
    let mut client = server.client("http").await;
    send(&mut client, &get("127.0.0.1:10255", "/metrics")).await;
    assert!(head(&mut client).await.unwrap().starts_with("HTTP/1.1 421 "));
    let mut client = server.client("http").await;
    send(&mut client, "PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n").await;
    expect_bytes(&mut client, "HTTP/1.1 400 only HTTP/1.1 is served here\r\n").await;
}

/// Starts a web server on this machine's own address that responds to each request with the head that it received.
pub(crate) async fn repeats_heads() -> SocketAddr {
    targets::serve_at(&format!("{}:0", own_address()), |mut socket| async move {
        while let Ok(head) = head(&mut socket).await {
            let answer = format!("HTTP/1.1 200 OK\r\nContent-Length: {}\r\n\r\n{head}", head.len());
            send(&mut socket, &answer).await;
        }
    })
    .await
}

/// Starts a server with one port for every port of every node. The address of node-a is this machine's own. `more` sets
/// the access rules.
pub(crate) fn by_host(place: &TestDir, more: &str) -> TestServer {
    let own = own_address();
    TestServer::with(
        place,
        &format!(
            "[server.http]\nlisten_ip = \"127.0.0.1\"\nports = {{ \"0\" = \"host\" }}\n{more}\n\
             [server.addresses.nodes]\n\"{own}\" = \"node-a\"\n"
        ),
    )
}

/// Returns the request head that the target received for these headers, or the status line of a refusal.
pub(crate) async fn get_by_host(server: &TestServer, host: &str, headers: &str) -> String {
    let mut client = server.client("http").await;
    send(&mut client, &format!("GET /metrics HTTP/1.1\r\nHost: {host}\r\n{headers}\r\n")).await;
    let answer = head(&mut client).await.unwrap();
    if !answer.starts_with("HTTP/1.1 200 ") {
        return answer.lines().next().unwrap().to_owned();
    }
    head(&mut client).await.unwrap()
}

#[tokio::test]
async fn one_port_reaches_any_port_of_a_node_by_its_name_or_address_in_host() {
    let (place, at) = (TestDir::new(), repeats_heads().await);
    let server = by_host(&place, "");
    let _edge = edge_with(&place, &server, "node-a", "").await;
    for host in [format!("node-a:{}", at.port()), at.to_string()] {
        assert_eq!(
            get_by_host(&server, &host, "").await,
            format!("GET /metrics HTTP/1.1\r\nHost: {host}\r\n\r\n")
        );
    }
    let response = get_by_host(&server, "node-b:9051", "").await;
    assert!(response.starts_with("HTTP/1.1 421 no address of node node-b is known"), "{response}");
    let response = get_by_host(&server, "192.0.2.1:9051", "").await;
    assert!(response.starts_with("HTTP/1.1 421 "), "{response}");
}

#[tokio::test]
async fn trusted_clients_may_route_by_headers_that_no_target_receives() {
    let (place, at) = (TestDir::new(), repeats_heads().await);
    let server = by_host(&place, "allow_from = [\"127.0.0.0/8\"]");
    let _edge = edge_with(&place, &server, "node-a", "").await;
    let host = format!("tunnel.svc:{}", at.port());
    let plain = format!("GET /metrics HTTP/1.1\r\nHost: {host}\r\nX-Other: 1\r\n\r\n");
    let by_node = "X-Tunnel-Proxy-Host: node-a:10250\r\nX-Other: 1\r\n";
    assert_eq!(get_by_host(&server, &host, by_node).await, plain);
    let by_target = format!("X-Other: 1\r\nx-tunnel-proxy-host: node-a\r\nX-TUNNEL-PROXY-DEST: {at}\r\n");
    assert_eq!(get_by_host(&server, &host, &by_target).await, plain);
    let twice =
        get_by_host(&server, &host, "X-Tunnel-Proxy-Host: node-a\r\nX-Tunnel-Proxy-Host: node-b\r\n").await;
    assert!(twice.starts_with("HTTP/1.1 400 "), "{twice}");
    let loopback = format!("X-Tunnel-Proxy-Host: node-a\r\nX-Tunnel-Proxy-Dest: 127.0.0.1:{}\r\n", at.port());
    let response = get_by_host(&server, &host, &loopback).await;
    assert!(response.starts_with("HTTP/1.1 403 addresses local to a node are not reachable"), "{response}");

    let open = by_host(&place, "");
    let _edge = edge_with(&place, &open, "node-a", "").await;
    let own = format!("node-a:{}", at.port());
    let response = get_by_host(&open, &own, by_node).await;
    assert!(
        response.starts_with("HTTP/1.1 403 X-Tunnel-Proxy-Host and X-Tunnel-Proxy-Dest are allowed only"),
        "{response}"
    );
    assert!(get_by_host(&open, &own, "").await.starts_with("GET "));
}

/// Starts a server with such a port that opens TLS to targets itself. `believed` is the key that sets which targets it
/// trusts.
fn showing(place: &TestDir, target: SocketAddr, believed: &str) -> TestServer {
    let [cert, key] = ["shown.crt", "shown.key"].map(|name| place.path().join(name));
    place.authority.0.client("the server").unwrap().write(&cert, &key).unwrap();
    server_with(place, target, &format!("target_cert = {cert:?}\ntarget_key = {key:?}\n{believed}\n"))
}

#[tokio::test]
async fn targets_see_the_servers_certificate_and_sessions_survive_a_reset() {
    let place = TestDir::new();
    let (target, connections) = web_tls(&place).await;
    let server = showing(&place, target, &format!("target_ca = {:?}", place.files.ca));
    let line = Line::to(server.server.bound.grpc).await;
    // The target's certificate is only valid for the name of this node.
    let _edge = start_edge(&place.edge(NAME, line.at, ""));
    let first = server.wait_for_node(NAME).await.link.id;
    let mut client = dial(&server, NAME, Some(place.client("apiserver")), &[]).await.unwrap();
    send(&mut client, &get(NAME, "/pods")).await;
    expect_bytes(&mut client, "HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\nknown").await;
    let upgrade =
        format!("GET /exec HTTP/1.1\r\nHost: {NAME}\r\nConnection: Upgrade\r\nUpgrade: echo\r\n\r\n");
    send(&mut client, &upgrade).await;
    assert!(head(&mut client).await.unwrap().starts_with("HTTP/1.1 101 Switching Protocols\r\n"));
    expect_bytes(&mut client, "hi").await;
    line.reset();
    wait_until("the link is closed", || server.link(NAME).is_none_or(|linked| linked.link.id != first)).await;
    send(&mut client, "more").await;
    expect_bytes(&mut client, "more").await;
    client.shutdown().await.unwrap();
    let mut rest = String::new();
    assert_eventually("the end", client.read_to_string(&mut rest)).await.unwrap();
    assert_eq!((rest.as_str(), connections.load(Relaxed)), ("bye", 1));
}

#[tokio::test]
async fn a_target_with_a_bad_certificate_is_refused_unless_checks_are_off() {
    let place = TestDir::new();
    let (target, _) = web_tls(&place).await;
    let other = place.file("other.crt", crate::certificates::Authority::new().0.cert());
    let ours = format!("target_ca = {:?}", place.files.ca);
    for (believed, node, refusal) in [
        (ours, "node-a", Some(format!("its certificate is for {NAME}, 127.0.0.1, and not for that name"))),
        (
            format!("target_ca = {other:?}"),
            NAME,
            Some("its certificate was signed by a CA that this end does not trust".to_owned()),
        ),
        ("target_insecure_skip_verify = true".to_owned(), "node-a", None),
    ] {
        let server = showing(&place, target, &believed);
        let _edge = edge_with(&place, &server, node, "").await;
        let mut client = dial(&server, NAME, Some(place.client("apiserver")), &[]).await.unwrap();
        send(&mut client, &get(node, "/pods")).await;
        let answer = head(&mut client).await.unwrap();
        let Some(refusal) = refusal else {
            assert!(answer.starts_with("HTTP/1.1 200 OK\r\n"), "{answer}");
            continue;
        };
        assert!(
            answer.starts_with(&format!("HTTP/1.1 502 TLS with the target failed: {refusal}")),
            "{answer}"
        );
        let length = answer.lines().find_map(|line| line.strip_prefix("content-length: ")).unwrap();
        let mut body = vec![0; length.parse().unwrap()];
        assert_eventually("a body", client.read_exact(&mut body)).await.unwrap();
        let body = String::from_utf8(body).unwrap();
        assert!(body.contains("hint: ") && body.contains("target_ca of [server.https]"), "{body}");
        assert_eq!(server.server.metrics.sessions.closed("https", "target_tls"), 1);
    }
}
