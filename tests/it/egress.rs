//! kube-apiserver at the egress port: CONNECT over mutual TLS, and over a unix socket.

use std::io;
use std::net::SocketAddr;
use std::os::unix::fs::MetadataExt;

use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt};
use tokio::net::{TcpStream, UnixStream};
use tokio_rustls::TlsConnector;
use tokio_rustls::client::TlsStream;
use tunnel_base::drain::Drained;
use tunnel_net::tls::{IdentityFiles, TlsClientConfig, Trust, server_name};

use crate::support::clients::{self, ESTABLISHED};
use crate::support::programs::{NAME, TestDir, TestServer, assert_edge_idle, at, edge};
use crate::support::{assert_eventually, targets, wait_until};

pub(crate) const APISERVER: &str = "system:kube-apiserver";

/// Starts a server with an egress port. `more` is appended to that table.
fn server(place: &TestDir, more: &str) -> TestServer {
    let dir = place.path().display();
    TestServer::with(
        place,
        &format!(
            "[server.egress]\nlisten = \"127.0.0.1:0\"\ncert = \"{dir}/cloud.crt\"\nkey = \"{dir}/cloud.key\"\n{more}"
        ),
    )
}

fn guarded(place: &TestDir) -> TestServer {
    server(place, &format!("client_ca = \"{}/ca.crt\"\nnames = [\"system:*\"]\n", place.path().display()))
}

fn port(server: &TestServer) -> SocketAddr {
    server.server.bound.clients.iter().find(|(name, _)| *name == "egress").unwrap().1
}

/// Opens a TLS connection that presents a certificate if there is one, and offers these protocols.
pub(crate) async fn dial(
    place: &TestDir,
    at: SocketAddr,
    shows: Option<&IdentityFiles>,
    alpn: &[&str],
) -> io::Result<TlsStream<TcpStream>> {
    let identity = shows.cloned();
    let alpn = alpn.iter().map(|name| name.as_bytes().to_vec()).collect();
    let config = TlsClientConfig { trust: Trust::Ca(place.files.ca.clone()), identity, alpn }.load().unwrap();
    let socket = TcpStream::connect(at).await?;
    assert_eventually(
        "a handshake",
        TlsConnector::from(config.load()).connect(server_name(NAME).unwrap(), socket),
    )
    .await
}

/// Sends a request like kube-apiserver, and returns the head of the response.
pub(crate) async fn send_connect<S: AsyncRead + AsyncWrite + Unpin>(
    socket: &mut S,
    target: &str,
) -> io::Result<String> {
    socket.write_all(format!("CONNECT {target} HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n").as_bytes()).await?;
    let mut head = Vec::new();
    while !head.ends_with(b"\r\n\r\n") {
        head.push(assert_eventually("a head", socket.read_u8()).await?);
    }
    Ok(String::from_utf8(head).unwrap())
}

async fn echoes<S: AsyncRead + AsyncWrite + Unpin>(socket: &mut S) {
    socket.write_all(b"hello").await.unwrap();
    socket.flush().await.unwrap();
    let mut back = [0; 5];
    assert_eventually("an echo", socket.read_exact(&mut back)).await.unwrap();
    assert_eq!(&back, b"hello");
}

#[tokio::test]
async fn kube_apiserver_reaches_a_node_over_mutual_tls() {
    let (place, echo) = (TestDir::new(), targets::echo().await);
    let server = guarded(&place);
    let edge = edge(&place, &server, "node-a").await;
    let shows = place.client(APISERVER);
    for alpn in [&[][..], &["http/1.1"], &["h2", "http/1.1"]] {
        let mut socket = dial(&place, port(&server), Some(&shows), alpn).await.unwrap();
        assert_eq!(send_connect(&mut socket, &at("node-a", echo)).await.unwrap(), ESTABLISHED);
        echoes(&mut socket).await;
        // It closes its direction as TLS does, and receives the end of the other one.
        socket.shutdown().await.unwrap();
        assert_eq!(assert_eventually("the end", socket.read_to_end(&mut Vec::new())).await.unwrap(), 0);
    }
    server.assert_idle().await;
    assert_edge_idle(&edge).await;
    assert_eq!(server.server.metrics.sessions.closed("egress", "ok"), 3);
}

#[tokio::test]
async fn a_client_without_an_accepted_certificate_is_refused_with_the_reason() {
    let (place, echo) = (TestDir::new(), targets::echo().await);
    let server = guarded(&place);
    let _edge = edge(&place, &server, "node-a").await;
    let target = at("node-a", echo);
    let alert = async |shows: Option<&IdentityFiles>| {
        let tried = async {
            let mut socket = dial(&place, port(&server), shows, &[]).await?;
            send_connect(&mut socket, &target).await
        };
        tried.await.unwrap_err().to_string()
    };
    let error = alert(None).await;
    assert!(error.contains("CertificateRequired"), "{error}");
    let others = TestDir::new();
    let error = alert(Some(&others.client(APISERVER))).await;
    assert!(error.contains("UnknownCA") || error.contains("DecryptError"), "{error}");
    let refused = dial(&place, port(&server), None, &["h2"]).await.unwrap_err().to_string();
    assert!(refused.contains("NoApplicationProtocol"), "{refused}");
    let refused = &server.server.metrics.connections_rejected;
    wait_until("all three are counted", || refused.counted("tls") == 3).await;

    let shows = place.client("kubelet");
    let mut socket = dial(&place, port(&server), Some(&shows), &[]).await.unwrap();
    let answer = send_connect(&mut socket, &target).await.unwrap();
    assert!(
        answer.starts_with("HTTP/1.1 403 no name (CN or DNS) in your certificate is allowed: \"kubelet\" is not in names of [server.egress]"),
        "{answer}"
    );
}

#[tokio::test]
async fn the_name_in_a_certificate_is_the_user_of_the_rules() {
    let (place, echo) = (TestDir::new(), targets::echo().await);
    let ca = place.path().display().to_string();
    let rules = "rules = [{ users = [\"ops\"], ports = [1] }, { users = [\"system:kube-apiserver\"] }]";
    let server = server(&place, &format!("client_ca = \"{ca}/ca.crt\"\nnames = [\"*\"]\n{rules}\n"));
    let _edge = edge(&place, &server, "node-a").await;
    for (name, answer) in [(APISERVER, ESTABLISHED), ("ops", "HTTP/1.1 403 no rule lets ops reach port ")] {
        let shows = place.client(name);
        let mut socket = dial(&place, port(&server), Some(&shows), &[]).await.unwrap();
        let response = send_connect(&mut socket, &at("node-a", echo)).await.unwrap();
        assert!(response.starts_with(answer), "{response}");
    }
}

#[tokio::test]
async fn without_a_client_ca_all_clients_are_served_and_errors_have_a_reason_phrase() {
    let place = TestDir::new();
    let server = server(&place, "");
    let mut socket = dial(&place, port(&server), None, &[]).await.unwrap();
    let answer = send_connect(&mut socket, "node-b:10250").await.unwrap();
    assert!(answer.starts_with("HTTP/1.1 502 node node-b is not connected"), "{answer}");
    let mut body = String::new();
    assert_eventually("the body", socket.read_to_string(&mut body)).await.unwrap();
    assert!(body.contains("hint: "), "{body}");
}

#[tokio::test]
async fn a_unix_socket_is_private_and_is_removed_with_the_server() {
    let (place, echo) = (TestDir::new(), targets::echo().await);
    let path = place.path().join("egress.sock");
    let text = format!("[server.egress]\nlisten = \"unix:{}\"\n", path.display());
    let server = TestServer::with(&place, &text);
    assert_eq!(std::fs::metadata(&path).unwrap().mode() & 0o777, 0o600);
    let edge = edge(&place, &server, "node-a").await;
    let mut socket = UnixStream::connect(&path).await.unwrap();
    assert_eq!(send_connect(&mut socket, &at("node-a", echo)).await.unwrap(), ESTABLISHED);
    echoes(&mut socket).await;
    socket.shutdown().await.unwrap();
    assert_eq!(assert_eventually("the end", socket.read_to_end(&mut Vec::new())).await.unwrap(), 0);
    assert_edge_idle(&edge).await;
    server.server.shutdown(async {}).await;
    assert!(!path.exists());
}

/// Starts a target that sends a response and resets the connection, with the client's bytes unread.
async fn breaker(answer: Vec<u8>) -> SocketAddr {
    targets::serve(move |mut socket| {
        let answer = answer.clone();
        async move {
            let _ = socket.read_u8().await;
            let _ = socket.write_all(&answer).await;
            clients::reset(socket);
        }
    })
    .await
}

#[tokio::test]
async fn bytes_before_a_target_reset_arrive_over_tls_and_look_incomplete() {
    let place = TestDir::new();
    let server = guarded(&place);
    let edge = edge(&place, &server, "node-a").await;
    let shows = place.client(APISERVER);
    for bytes in [300, 20_000, 100_000] {
        let target = breaker(targets::pattern(bytes)).await;
        for _ in 0..10 {
            let mut socket = dial(&place, port(&server), Some(&shows), &[]).await.unwrap();
            assert_eq!(send_connect(&mut socket, &at("node-a", target)).await.unwrap(), ESTABLISHED);
            socket.write_all(b"go").await.unwrap();
            let mut got = Vec::new();
            let ended = assert_eventually("the end of the response", socket.read_to_end(&mut got)).await;
            // Bytes that a kernel has not sent yet are lost with its reset, with and without a tunnel.
            assert!(targets::pattern(bytes).starts_with(&got) && ended.is_err(), "{} of {bytes}", got.len());
        }
    }
    server.assert_idle().await;
    assert_edge_idle(&edge).await;
}

#[tokio::test]
async fn tls_that_ends_without_close_notify_resets_the_target() {
    let place = TestDir::new();
    let (target, mut errors) = targets::report_broken_connection().await;
    let server = server(&place, "");
    let _edge = edge(&place, &server, "node-a").await;
    for reset in [false, true] {
        let mut socket = dial(&place, port(&server), None, &[]).await.unwrap();
        send_connect(&mut socket, &at("node-a", target)).await.unwrap();
        socket.write_all(b"half a fi").await.unwrap();
        let bare = socket.into_inner().0;
        if reset {
            clients::reset(bare);
        } else {
            drop(bare);
        }
        assert_eq!(
            assert_eventually("the target's error", errors.recv()).await,
            Some(io::ErrorKind::ConnectionReset)
        );
    }
    server.assert_idle().await;
}

#[tokio::test]
async fn a_session_over_tls_is_finished_while_the_server_drains() {
    let (place, echo) = (TestDir::new(), targets::echo().await);
    let server = server(&place, "");
    let _edge = edge(&place, &server, "node-a").await;
    let at_port = port(&server);
    let mut socket = dial(&place, at_port, None, &[]).await.unwrap();
    send_connect(&mut socket, &at("node-a", echo)).await.unwrap();
    echoes(&mut socket).await;
    let stops = server.server.shutdown(std::future::pending());
    let client = async {
        // Waits until the port is closed.
        while TcpStream::connect(at_port).await.is_ok() {
            tokio::time::sleep(std::time::Duration::from_millis(5)).await;
        }
        echoes(&mut socket).await;
        socket.shutdown().await.unwrap();
        assert_eq!(assert_eventually("the end", socket.read_to_end(&mut Vec::new())).await.unwrap(), 0);
    };
    let (drained, ()) =
        assert_eventually("the end of the server", async { tokio::join!(stops, client) }).await;
    assert_eq!(drained, Drained::Finished);
}
