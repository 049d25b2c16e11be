//! Programs that are started with existing configs: SuperEdge's format, and environment variables.

use std::path::Path;

use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use tunnel::config::{Environment, ProxyVariables, SecretString};
use tunnel::edge::Edge;
use tunnel::edge::config::EdgeConfig as Settings;
use tunnel::server::Server;
use tunnel::server::config::ServerConfig;

use crate::support::clients::{assert_echo, head};
use crate::support::programs::{NAME, TOKEN, TestDir, TestServer, at};
use crate::support::{assert_eventually, spawn, targets};

#[tokio::test]
async fn superedges_config_format_starts_a_server_and_an_edge() {
    let place = TestDir::new();
    let echo = targets::echo().await;
    let dir = place.path().display();
    let cloud = format!(
        r#"
[mode]
[mode.cloud]
[mode.cloud.stream]
[mode.cloud.stream.server]
grpcport = 0
logport = 0
metricsport = 0
key = "{dir}/cloud.key"
cert = "{dir}/cloud.crt"
tokenfile = "{dir}/token"
[mode.cloud.stream.dns]
configmap = "tunnel-nodes"
hosts = "/etc/tunnel/nodes/hosts"
service = "tunnel-cloud"
debug = true
[mode.cloud.tls]
tls_min_version = "VersionTLS12"
tls_cipher_suites = "TLS_ECDHE_RSA_WITH_AES_128_GCM_SHA256,TLS_ECDHE_ECDSA_WITH_AES_128_GCM_SHA256"
[mode.cloud.ssh]
port = 0
[mode.cloud.egress]
port = 0
servercert = "{dir}/cloud.crt"
serverkey = "{dir}/cloud.key"
[mode.cloud.http_proxy]
proxyport = "0"
proxyip = "127.0.0.1"
[mode.cloud.https]
"#
    );
    let (settings, warnings) = ServerConfig::read(&cloud, &Environment::default()).unwrap();
    assert!(!warnings.is_empty(), "unsupported settings cause warnings");
    let server = Server::start(settings, None).unwrap();
    let ports =
        [server.bound.grpc, server.bound.connect().unwrap(), server.bound.log, server.bound.metrics.unwrap()];
    assert!(ports.iter().all(|at| at.ip().is_unspecified() && at.port() != 0), "{ports:?}");

    let edge = format!(
        r#"
[mode]
[mode.edge]
[mode.edge.stream]
[mode.edge.stream.client]
token = "{TOKEN}"
cert = "{dir}/ca.crt"
dns = "{NAME}"
servername = "127.0.0.1:{}"
logport = 0
[mode.edge.https]
cert = "{dir}/cloud.crt"
key = "{dir}/cloud.key"
"#,
        server.bound.grpc.port()
    );
    let env = Environment { node_name: Some("node1".into()), ..Environment::default() };
    let _edge = Edge::start(Settings::read(&edge, &env).unwrap().0, None).unwrap();
    let server =
        TestServer { connect: ([127, 0, 0, 1], server.bound.connect().unwrap().port()).into(), server };
    server.wait_for_node("node1").await;
    assert_echo(&mut server.open(&at("node1", echo)).await, "hello").await;
}

#[tokio::test]
async fn an_edge_dials_through_the_proxy_of_its_environment() {
    let place = TestDir::new();
    let echo = targets::echo().await;
    let server = TestServer::start(&place);
    let grpc = server.server.bound.grpc;
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let proxy = listener.local_addr().unwrap();
    let (request_sender, mut requests) = tokio::sync::mpsc::channel(1);
    spawn(async move {
        let (mut socket, _) = listener.accept().await.unwrap();
        request_sender.send(head(&mut socket).await).await.unwrap();
        let mut onward = TcpStream::connect(grpc).await.unwrap();
        socket.write_all(b"HTTP/1.1 200 OK\r\nVia: a proxy\r\n\r\n").await.unwrap();
        let _ = tokio::io::copy_bidirectional(&mut socket, &mut onward).await;
    });
    let env = Environment {
        proxy: ProxyVariables {
            https_proxy: Some(SecretString::new(format!("http://user:pass%20word@{proxy}"))),
            no_proxy: Some("other.test".into()),
        },
        ..Environment::default()
    };
    // A name that only the proxy can resolve.
    let text = place.edge("node1", format!("{NAME}:9000"), "");
    let _edge = Edge::start(Settings::read(&text, &env).unwrap().0, None).unwrap();
    let request = assert_eventually("a request to the proxy", requests.recv()).await.unwrap();
    assert!(
        request.starts_with("CONNECT cloud.test:9000 HTTP/1.1\r\nHost: cloud.test:9000\r\n"),
        "{request}"
    );
    assert!(request.contains("\r\nProxy-Authorization: Basic dXNlcjpwYXNzIHdvcmQ=\r\n"), "{request}");
    server.wait_for_node("node1").await;
    assert_echo(&mut server.open(&at("node1", echo)).await, "hello").await;
}

/// Returns the next message of a client of SOCKS5, and answers it.
async fn answered(socket: &mut TcpStream, answer: &[u8]) -> Vec<u8> {
    let mut message = vec![0; 512];
    let length = socket.read(&mut message).await.unwrap();
    socket.write_all(answer).await.unwrap();
    message[..length].to_vec()
}

#[tokio::test]
async fn an_edge_dials_through_a_socks5_proxy_that_resolves_the_servers_name() {
    let place = TestDir::new();
    let echo = targets::echo().await;
    let server = TestServer::start(&place);
    let grpc = server.server.bound.grpc;
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let proxy = listener.local_addr().unwrap();
    let (request_sender, mut requests) = tokio::sync::mpsc::channel(1);
    spawn(async move {
        let (mut socket, _) = listener.accept().await.unwrap();
        let mut onward = TcpStream::connect(grpc).await.unwrap();
        answered(&mut socket, &[5, 2]).await;
        let login = answered(&mut socket, &[1, 0]).await;
        let request = answered(&mut socket, &[5, 0, 0, 1, 0, 0, 0, 0, 0, 0]).await;
        request_sender.send((login, request)).await.unwrap();
        let _ = tokio::io::copy_bidirectional(&mut socket, &mut onward).await;
    });
    let https_proxy = Some(SecretString::new(format!("socks5://user:word@{proxy}")));
    let env = Environment { proxy: ProxyVariables { https_proxy, no_proxy: None }, ..Environment::default() };
    let text = place.edge("node1", format!("{NAME}:9000"), "");
    let _edge = Edge::start(Settings::read(&text, &env).unwrap().0, None).unwrap();
    let (login, request) = assert_eventually("a request to the proxy", requests.recv()).await.unwrap();
    assert_eq!(login, b"\x01\x04user\x04word");
    assert_eq!(request, [b"\x05\x01\x00\x03\x0a", NAME.as_bytes(), &9000_u16.to_be_bytes()].concat());
    server.wait_for_node("node1").await;
    assert_echo(&mut server.open(&at("node1", echo)).await, "hello").await;
}

#[tokio::test]
async fn ports_in_use_or_a_missing_key_prevent_the_start() {
    let place = TestDir::new();
    let taken = async || TcpListener::bind("127.0.0.1:0").await.unwrap();
    let taken = [taken().await, taken().await, taken().await];
    let [connect, metrics, channelz] = taken.each_ref().map(|taken| taken.local_addr().unwrap());
    let text = place
        .cloud("")
        .replace(
            "metrics_listen = \"127.0.0.1:0\"",
            &format!("metrics_listen = \"{metrics}\"\nchannelz_listen = \"{channelz}\""),
        )
        .replace(
            "[server.connect]\nlisten = \"127.0.0.1:0\"",
            &format!("[server.connect]\nlisten = \"{connect}\""),
        );
    let (settings, _) = ServerConfig::read(&text, &Environment::default()).unwrap();
    let failed = format!("{:#}", Server::start(settings, None).unwrap_err());
    let ports =
        [("connect.listen", connect), ("links.metrics_listen", metrics), ("links.channelz_listen", channelz)];
    for (key, at) in ports {
        assert!(failed.contains(&format!("server.{key}")) && failed.contains(&at.to_string()), "{failed}");
    }
    drop(taken);

    std::fs::remove_file(place.path().join("cloud.key")).unwrap();
    let (settings, _) = ServerConfig::read(&place.cloud(""), &Environment::default()).unwrap();
    let failed = format!("{:#}", Server::start(settings, None).unwrap_err());
    assert!(failed.contains("cloud.key"), "{failed}");
}

#[tokio::test]
async fn a_wrong_certificate_and_wrong_cas_are_reported_at_once() {
    let (place, other) = (TestDir::new(), TestDir::new());
    let (junk, missing, store) =
        (place.file("junk", "junk"), place.path().join("no"), place.path().join("store"));
    let errors = |cert: &Path, key: &Path, peer_ca: &Path, client_ca: &Path| {
        let text = format!(
            "[server.links]\nlisten = \"127.0.0.1:0\"\ncert = {cert:?}\nkey = {key:?}\npeer_ca = {peer_ca:?}\n\
             [server.clients]\nclient_ca = {client_ca:?}\nnames = [\"a\"]\nrules = []\n\
             [server.invitations]\nstore = \"file\"\nfile = {store:?}\n"
        );
        let (settings, _) = ServerConfig::read(&text, &Environment::default()).unwrap();
        let errors = Server::start(settings, None).unwrap_err().to_string();
        errors.lines().filter_map(|line| Some(line.split_once(": ")?.0.to_owned())).collect::<Vec<_>>()
    };
    let all = ["server.links.cert", "server.links.key", "server.links.peer_ca", "server.clients.client_ca"];
    let found = errors(&junk, &junk, &missing, &junk);
    assert!(all.iter().all(|key| found.iter().any(|found| found == key)), "{found:?}");
    let found = errors(&place.files.cert, &other.files.key, &other.files.ca, &place.files.ca);
    let both = ["server.links.cert, server.links.key", "server.links.peer_ca"];
    assert!(both.iter().all(|key| found.iter().any(|found| found == key)), "{found:?}");
}

#[tokio::test]
async fn a_missing_file_of_cas_and_one_for_no_server_prevent_an_edges_start() {
    let place = TestDir::new();
    let edge = |entry: &str| {
        place.edge("node1", "a.example:443", &format!("websocket_ca = {{ \"{entry}\" = \"/missing.crt\" }}"))
    };
    let env = Environment::default();
    let failed = Edge::start(Settings::read(&edge("a.example:443"), &env).unwrap().0, None).unwrap_err();
    let text = "edge.uplink.websocket_ca: cannot read /missing.crt: No such file or directory";
    assert!(failed.to_string().contains(text), "{failed}");
    let failed = Settings::read(&edge("b.example:443"), &env).unwrap_err().to_string();
    let text = "edge.uplink.websocket_ca: \"b.example:443\": expected an entry of servers, written as there";
    assert!(failed.contains(text), "{failed}");
}

#[tokio::test]
async fn an_edge_reads_its_token_and_its_target_addresses_as_configured() {
    let place = TestDir::new();
    place.file("mine", &format!("{TOKEN}\n"));
    let banner = targets::serve_ipv6(|mut socket| async move {
        let _ = socket.write_all(b"over IPv6").await;
    })
    .await;
    let server = TestServer::start(&place);
    let token_file = format!("token_file = \"{}/mine\"", place.path().display());
    let text = place
        .edge("node1", server.server.bound.grpc, "")
        .replace(&format!("token = \"{TOKEN}\""), &token_file);
    let _edge = Edge::start(Settings::read(&text, &Environment::default()).unwrap().0, None).unwrap();
    server.wait_for_node("node1").await;
    // The node's own name is tried on 127.0.0.1 and on [::1].
    let mut client = server.open(&at("node1", banner)).await;
    let mut all = String::new();
    assert_eventually("the banner", client.read_to_string(&mut all)).await.unwrap();
    assert_eq!(all, "over IPv6");
}

/// Writes a byte order mark in front of a file, as editors of Windows do.
fn mark(path: &std::path::Path) {
    let content = std::fs::read(path).unwrap();
    std::fs::write(path, [b"\xef\xbb\xbf", &content[..]].concat()).unwrap();
}

#[tokio::test]
async fn a_byte_order_mark_is_ignored_in_every_file() {
    let place = TestDir::new();
    let echo = targets::echo().await;
    let users = place.file("users", &format!("ops:{}\n", bcrypt::hash("secret", 4).unwrap()));
    let (tokens, token) = (place.file("token", &format!("node1:{TOKEN}\n")), place.file("own", TOKEN));
    let files = [&users, &tokens, &token, &place.files.ca, &place.files.cert, &place.files.key];
    for path in files {
        mark(path);
    }
    let config = format!("\u{feff}{}", place.cloud(&format!("auth = \"basic\"\nusers = {users:?}\n")));
    let server = TestServer::from_text(&config);
    let own = place.edge("node1", server.server.bound.grpc, "");
    let own = own.replace(&format!("token = \"{TOKEN}\""), &format!("token_file = {token:?}"));
    let _edge = crate::support::programs::start_edge(&format!("\u{feff}{own}"));
    server.wait_for_node("node1").await;
    let mut client = TcpStream::connect(server.connect).await.unwrap();
    let login = "Proxy-Authorization: Basic b3BzOnNlY3JldA==";
    let request = format!("CONNECT {} HTTP/1.1\r\n{login}\r\n\r\n", at("node1", echo));
    client.write_all(request.as_bytes()).await.unwrap();
    assert!(head(&mut client).await.starts_with("HTTP/1.1 200 "));
    assert_echo(&mut client, "through all files").await;
}

#[tokio::test]
async fn a_utf_16_file_is_refused_with_its_path() {
    let place = TestDir::new();
    let text: Vec<u8> = format!("node1:{TOKEN}\n").encode_utf16().flat_map(u16::to_le_bytes).collect();
    std::fs::write(place.path().join("token"), [&[0xff, 0xfe][..], &text].concat()).unwrap();
    let (settings, _) = ServerConfig::read(&place.cloud(""), &Environment::default()).unwrap();
    let request_sender = Server::start(settings, None).unwrap_err().to_string();
    let path = place.path().join("token");
    assert!(
        request_sender.contains(&format!("cannot read {}: it is UTF-16; save it as UTF-8", path.display())),
        "{request_sender}"
    );
    assert!(!request_sender.contains("may read it"), "{request_sender}");
}
