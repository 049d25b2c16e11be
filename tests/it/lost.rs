//! Clients and targets that disconnect where no read and no write reveals it.

use std::net::SocketAddr;

use socket2::SockRef;
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt};
use tokio::net::{TcpStream, UnixStream};
use tokio_rustls::rustls::ClientConnection;
use tunnel_net::tls::{TlsClientConfig, Trust, server_name};

use crate::egress::{self, APISERVER};
use crate::support::clients::{reset, rest};
use crate::support::programs::{TestDir, TestServer, assert_edge_idle, at, edge};
use crate::support::{assert_eventually, pause_time, targets, wait_until};

/// Starts a target that hangs: it accepts connections, and neither reads, writes nor closes.
async fn hanging_target() -> SocketAddr {
    targets::serve(|socket| async move {
        std::future::pending::<()>().await;
        drop(socket);
    })
    .await
}

/// Starts a server with every kind of listener, apart from that of intercepted connections.
fn server(place: &TestDir, target: SocketAddr) -> TestServer {
    let dir = place.path().display();
    TestServer::with(
        place,
        &format!(
            "[server.tcp]\n\"127.0.0.1:0\" = \"node1/{target}\"\n\
             [server.http_proxy]\nlisten = \"127.0.0.1:0\"\n\
             [server.http]\nlisten_ip = \"127.0.0.1\"\n[server.http.ports]\n\"0\" = \"{target}\"\n\
             [server.https]\nmode = \"passthrough\"\nlisten_ip = \"127.0.0.1\"\n\
             [server.https.ports]\n\"0\" = \"{target}\"\n\
             [server.egress]\nlisten = \"127.0.0.1:0\"\ncert = \"{dir}/cloud.crt\"\nkey = \"{dir}/cloud.key\"\n\
             client_ca = \"{dir}/ca.crt\"\nnames = [\"system:*\"]\n"
        ),
    )
}

/// Opens a session to the node whose name a ClientHello contains.
async fn passthrough(place: &TestDir, port: SocketAddr) -> TcpStream {
    let trust = Trust::Ca(place.files.ca.clone());
    let config = TlsClientConfig { trust, identity: None, alpn: Vec::new() }.load().unwrap();
    let mut hello = Vec::new();
    let mut tls = ClientConnection::new(config.load(), server_name("node1").unwrap()).unwrap();
    tls.write_tls(&mut hello).unwrap();
    let mut client = TcpStream::connect(port).await.unwrap();
    client.write_all(&hello).await.unwrap();
    client
}

/// Ends the client's direction, once the session is open and has its first bytes, and resets the connection.
async fn leave<S: AsyncRead + AsyncWrite + Unpin>(
    server: &TestServer,
    mut client: S,
    tcp: impl Fn(&S) -> &TcpStream,
) {
    let up = server.server.metrics.bytes_to_target.get();
    client.write_all(b"check").await.unwrap();
    client.shutdown().await.unwrap();
    wait_until("the session has the bytes", || server.server.metrics.bytes_to_target.get() > up).await;
    SockRef::from(tcp(&client)).set_linger(Some(std::time::Duration::ZERO)).unwrap();
}

#[tokio::test]
async fn a_client_that_disconnects_after_its_end_is_noticed_at_every_listener() {
    let (place, hanging_target) = (TestDir::new(), hanging_target().await);
    let server = server(&place, hanging_target);
    let edge = edge(&place, &server, "node1").await;
    let metrics = &server.server.metrics.sessions;
    let target = at("node1", hanging_target);
    let raw = |client: TcpStream| leave(&server, client, |client| client);
    raw(server.open(&target).await).await;
    raw(server.client("tcp").await).await;
    raw(passthrough(&place, server.port("https")).await).await;
    let proxy = crate::support::clients::open(server.port("http_proxy"), &target).await;
    raw(proxy).await;
    let mut apiserver =
        egress::dial(&place, server.port("egress"), Some(&place.client(APISERVER)), &[]).await.unwrap();
    egress::send_connect(&mut apiserver, &target).await.unwrap();
    leave(&server, apiserver, |client| client.get_ref().0).await;
    for listener in ["connect", "tcp", "https", "http_proxy", "egress"] {
        wait_until(&format!("{listener} has ended its session"), || {
            metrics.closed(listener, "client_io_error") == 1 && metrics.now(listener) == 0
        })
        .await;
    }
    server.assert_idle().await;
    assert_edge_idle(&edge).await;
}

/// hyper reads nothing while a response is pending, so these clients are checked now and then.
#[tokio::test]
async fn a_client_that_disconnects_before_its_response_is_noticed_at_listeners_for_requests() {
    let (place, hanging_target) = (TestDir::new(), hanging_target().await);
    let server = server(&place, hanging_target);
    let edge = edge(&place, &server, "node1").await;
    let head = format!("GET http://{0}/ HTTP/1.1\r\nHost: {0}\r\n\r\n", at("node1", hanging_target));
    pause_time();
    for listener in ["http_proxy", "http"] {
        // hyper does not read the bytes of a next request yet.
        for (next, ends) in [("", true), ("", false), ("GET ", false)] {
            let up = server.server.metrics.bytes_to_target.get();
            let mut client = server.client(listener).await;
            client.write_all(format!("{head}{next}").as_bytes()).await.unwrap();
            if ends {
                client.shutdown().await.unwrap();
            }
            wait_until("the request has arrived", || server.server.metrics.bytes_to_target.get() > up).await;
            reset(client);
            wait_until("the session has ended", || server.server.metrics.sessions.now(listener) == 0).await;
        }
    }
    server.assert_idle().await;
    assert_edge_idle(&edge).await;
}

#[tokio::test]
async fn a_target_that_disconnects_after_its_end_is_noticed_with_a_silent_client() {
    let place = TestDir::new();
    let breaks = targets::serve(|mut socket| async move {
        let _ = socket.write_all(b"answer").await;
        let _ = socket.shutdown().await;
        // The client's word that it has everything.
        let _ = socket.read_u8().await;
        reset(socket);
    })
    .await;
    let server = server(&place, breaks);
    let edge = edge(&place, &server, "node1").await;
    for mut client in [server.open(&at("node1", breaks)).await, server.client("tcp").await] {
        assert_eq!(rest(&mut client).await, b"answer");
        client.write_all(b"!").await.unwrap();
        is_reset_after_its_end(&mut client).await;
    }
    server.assert_idle().await;
    assert_edge_idle(&edge).await;
    assert_eq!(server.server.metrics.sessions.closed("tcp", "target_io_error"), 1);
}

/// Waits for the reset of a connection that was read to its end.
async fn is_reset_after_its_end(client: &mut TcpStream) {
    assert_eventually("a reset", client.ready(tokio::io::Interest::ERROR)).await.unwrap();
}

/// A Unix socket reports no error, so it is checked now and then.
#[tokio::test]
async fn a_client_that_closes_its_unix_socket_after_its_end_is_noticed() {
    let (place, hanging_target) = (TestDir::new(), hanging_target().await);
    let path = place.path().join("egress.sock");
    let server =
        TestServer::with(&place, &format!("[server.egress]\nlisten = \"unix:{}\"\n", path.display()));
    let edge = edge(&place, &server, "node1").await;
    let mut client = UnixStream::connect(&path).await.unwrap();
    egress::send_connect(&mut client, &at("node1", hanging_target)).await.unwrap();
    client.write_all(b"check").await.unwrap();
    client.shutdown().await.unwrap();
    wait_until("the session has the bytes", || server.server.metrics.bytes_to_target.get() == 5).await;
    pause_time();
    drop(client);
    wait_until("the session has ended", || server.server.metrics.sessions.now("egress") == 0).await;
    server.assert_idle().await;
    assert_edge_idle(&edge).await;
}
