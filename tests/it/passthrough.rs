//! TLS that is passed through to the node named in the ClientHello.

use std::sync::Arc;

use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;
use tokio_rustls::client::TlsStream;
use tokio_rustls::rustls::AlertDescription;
use tokio_rustls::rustls::pki_types::ServerName;
use tokio_rustls::{TlsConnector, rustls};
use tunnel_net::tls::params::TlsParams;
use tunnel_net::tls::{ClientAuth, IdentityFiles, TlsClientConfig, TlsServerConfig, Trust};

use crate::certificates::{Authority, Files};
use crate::support::clients::rest;
use crate::support::programs::{TestDir, TestServer, assert_edge_idle, edge};
use crate::support::{assert_eventually, pause_time, remote, targets};

/// Returns config lines with one port for that target of every node. `more` is added to the table.
fn port(target: std::net::SocketAddr, more: &str) -> String {
    format!(
        "[server.https]\nmode = \"passthrough\"\nlisten_ip = \"127.0.0.1\"\n{more}\n\
         [server.https.ports]\n\"0\" = \"{target}\"\n"
    )
}

/// Certificates of the targets of these nodes, from another CA than the server's.
struct TargetCertificates {
    _dir: tempfile::TempDir,
    files: Files,
}

impl TargetCertificates {
    fn new(names: &[&str]) -> Self {
        let dir = tempfile::tempdir().unwrap();
        let files = Authority::new().write(dir.path(), names);
        Self { _dir: dir, files }
    }

    /// Starts a target that speaks TLS and echoes.
    async fn echo(&self) -> std::net::SocketAddr {
        let identity = IdentityFiles { cert: self.files.cert.clone(), key: self.files.key.clone() };
        let params = TlsParams::default();
        let server = TlsServerConfig { identity, clients: ClientAuth::Anonymous, params, alpn: Vec::new() };
        let acceptor = server.load().unwrap().load().acceptor();
        targets::serve(move |socket| {
            let acceptor = acceptor.clone();
            async move {
                let Ok(mut socket) = acceptor.accept(socket).await else { return };
                let (mut from, mut to) = tokio::io::split(&mut socket);
                let _ = tokio::io::copy(&mut from, &mut to).await;
                let _ = to.shutdown().await;
            }
        })
        .await
    }

    /// Opens TLS through the server's port with that name. An IP address is not sent.
    async fn connect(&self, server: &TestServer, name: &str) -> std::io::Result<TlsStream<TcpStream>> {
        let client =
            TlsClientConfig { trust: Trust::Ca(self.files.ca.clone()), identity: None, alpn: Vec::new() };
        let connector = TlsConnector::from(client.load().unwrap().load());
        let name = ServerName::try_from(name.to_owned()).unwrap();
        let socket = server.client("https").await;
        assert_eventually("a handshake, or its failure", Box::pin(connector.connect(name, socket))).await
    }

    /// Returns the alert that ends a client's handshake.
    async fn alert(&self, server: &TestServer, name: &str) -> AlertDescription {
        let failed = self.connect(server, name).await.unwrap_err();
        let Some(error) = failed.get_ref() else { panic!("{failed:?}") };
        match error.downcast_ref() {
            Some(rustls::Error::AlertReceived(alert)) => *alert,
            _ => panic!("{failed:?}"),
        }
    }
}

#[tokio::test]
async fn tls_goes_between_client_and_the_target_of_the_node_that_it_names() {
    let (place, nodes) = (TestDir::new(), TargetCertificates::new(&["node1", "Node2"]));
    let echo = nodes.echo().await;
    let server = TestServer::with(&place, &port(echo, ""));
    let (one, two) = (edge(&place, &server, "node1").await, edge(&place, &server, "node2").await);
    for (name, at, not) in [("node1", &one, &two), ("node2", &two, &one)] {
        let mut client = nodes.connect(&server, name).await.unwrap();
        assert_eq!((at.table.len(), not.table.len()), (1, 0));
        client.write_all(b"through the tunnel").await.unwrap();
        client.shutdown().await.unwrap();
        let mut received = String::new();
        assert_eventually("the echo", client.read_to_string(&mut received)).await.unwrap();
        assert_eq!(received, "through the tunnel");
        drop(client);
        server.assert_idle().await;
        assert_edge_idle(at).await;
    }
    assert_eq!(server.server.metrics.sessions.closed("https", "ok"), 2);
}

#[tokio::test]
async fn a_client_without_a_nodes_server_name_gets_the_alert_unrecognized_name() {
    let (place, nodes) = (TestDir::new(), TargetCertificates::new(&["127.0.0.1"]));
    let server = TestServer::with(&place, &port(nodes.echo().await, ""));
    let _edge = edge(&place, &server, "node1").await;
    assert_eq!(nodes.alert(&server, "127.0.0.1").await, AlertDescription::UnrecognisedName);
    assert_eq!(server.server.metrics.sessions.closed("https", "node_not_named"), 1);
    let config = rustls::ClientConfig::builder().with_root_certificates(rustls::RootCertStore::empty());
    let name = ServerName::try_from("127.0.0.1").unwrap();
    let mut hello = Vec::new();
    let mut client = rustls::ClientConnection::new(Arc::new(config.with_no_client_auth()), name).unwrap();
    client.write_tls(&mut hello).unwrap();
    let mut socket = server.client("https").await;
    socket.write_all(&hello).await.unwrap();
    assert_eq!(rest(&mut socket).await, [21, 3, 3, 0, 2, 2, 112]);
}

#[tokio::test]
async fn a_refusal_is_sent_as_an_alert_and_counted_by_cause() {
    let (place, nodes) = (TestDir::new(), TargetCertificates::new(&["node1"]));
    let (echo, nothing) = (nodes.echo().await, targets::closed_port().await);
    let elsewhere = |at: &str| at.parse().unwrap();
    for (target, more, name, alert, cause) in [
        (echo, "", "node9", AlertDescription::InternalError, "node_not_connected"),
        (nothing, "", "node1", AlertDescription::InternalError, "target_refused"),
        (elsewhere("192.0.2.1:10250"), "", "node1", AlertDescription::InternalError, "not_allowed"),
        (elsewhere("169.254.169.254:80"), "", "node1", AlertDescription::InternalError, "not_allowed"),
        (echo, "rules = [{ nodes = [\"x\"] }]", "node1", AlertDescription::AccessDenied, "forbidden"),
        (echo, "allow_from = [\"192.0.2.0/24\"]", "node1", AlertDescription::AccessDenied, "forbidden"),
    ] {
        let server = TestServer::with(&place, &port(target, more));
        let _edge = edge(&place, &server, "node1").await;
        assert_eq!(nodes.alert(&server, name).await, alert, "{cause}");
        assert_eq!(server.server.metrics.sessions.closed("https", cause), 1, "{cause}");
        server.assert_idle().await;
    }
}

#[tokio::test]
async fn a_connection_without_tls_is_closed_without_a_response() {
    let (place, nodes) = (TestDir::new(), TargetCertificates::new(&["node1"]));
    let server = TestServer::with(&place, &port(nodes.echo().await, ""));
    for bytes in [&b"GET / HTTP/1.1\r\nHost: node1\r\n\r\n"[..], b"SSH-2.0-x\r\n"] {
        let mut socket = server.client("https").await;
        socket.write_all(bytes).await.unwrap();
        assert_eq!(rest(&mut socket).await, b"");
    }
    assert_eq!(server.server.metrics.connections_rejected.counted("not_tls"), 2);
}

#[tokio::test]
async fn a_missing_client_hello_times_out_after_ten_seconds() {
    let (place, nodes) = (TestDir::new(), TargetCertificates::new(&["node1"]));
    let server = TestServer::with(&place, &port(nodes.echo().await, ""));
    let mut socket = server.client("https").await;
    socket.write_all(&[22, 3, 1]).await.unwrap();
    pause_time();
    let started = tokio::time::Instant::now();
    assert_eq!(rest(&mut socket).await, b"");
    assert!((9..15).contains(&started.elapsed().as_secs()), "{:?}", started.elapsed());
    assert_eq!(server.server.metrics.connections_rejected.counted("header_timeout"), 1);
}

#[tokio::test]
async fn a_plain_edge_gets_an_ordinary_connect_request() {
    let (place, nodes) = (TestDir::new(), TargetCertificates::new(&["node1"]));
    let server = TestServer::with(&place, &port("127.0.0.1:10250".parse().unwrap(), ""));
    let mut edge = remote::link(&place, &server, "node1", None).await;
    let refused = async {
        let open = edge.next_session_message().await;
        let fields = (open.category.as_str(), open.r#type.as_str(), open.addr.as_str());
        assert_eq!(fields, ("ssh", "connecting", "127.0.0.1:10250"));
        edge.send_plain("connect-failed", &open.topic, "connection refused").await;
    };
    let (alert, ()) = tokio::join!(nodes.alert(&server, "node1"), refused);
    assert_eq!(alert, AlertDescription::InternalError);
}
