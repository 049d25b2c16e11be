//! Certificates that change on disk while sessions run: new connections get the new one, and no session is aborted.

use std::net::SocketAddr;
use std::sync::{Arc, Mutex};

use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt};
use tokio::time::{Instant, sleep};
use tokio_rustls::TlsConnector;
use tokio_rustls::client::TlsStream;
use tunnel::uplink::client::{UserCredentials, UserLinkConfig, UserUplinks};
use tunnel_net::reload::reload_now;
use tunnel_net::tls::params::TlsParams;
use tunnel_net::tls::{ClientAuth, IdentityFiles, TlsClientConfig, TlsServerConfig, Trust, server_name};

use crate::certificates::Authority;
use crate::support::clients::ESTABLISHED;
use crate::support::programs::{NAME, TestDir, TestServer, at, edge_with};
use crate::support::sessions::assert_session_echo;
use crate::support::{TIMEOUT, assert_eventually, servers, spawn, targets, users, wait_until};

/// Writes a certificate of a server or of a client, and returns its files.
fn certify(place: &TestDir, name: &str) -> IdentityFiles {
    let files = IdentityFiles {
        cert: place.path().join(format!("{name}.crt")),
        key: place.path().join(format!("{name}.key")),
    };
    let authority = &place.authority.0;
    let issued = if name == "client" { authority.client(name) } else { authority.server(&[NAME]) };
    issued.unwrap().write(&files.cert, &files.key).unwrap();
    files
}

/// Returns the lines of a table that name these files.
fn lines(files: &IdentityFiles) -> String {
    format!("cert = {:?}\nkey = {:?}\n", files.cert, files.key)
}

type Client = TlsStream<tokio::net::TcpStream>;

async fn dial(server: &TestServer, front: &str) -> Client {
    let config = TlsClientConfig { trust: Trust::NoVerify, identity: None, alpn: Vec::new() }.load().unwrap();
    let socket = server.client(front).await;
    let connector = TlsConnector::from(config.load());
    assert_eventually("a handshake", connector.connect(server_name(NAME).unwrap(), socket)).await.unwrap()
}

/// Returns the certificate that a server presented.
fn shown(client: &Client) -> Vec<u8> {
    client.get_ref().1.peer_certificates().unwrap()[0].to_vec()
}

/// Sends a text, and expects this response.
async fn assert_response<S: AsyncRead + AsyncWrite + Unpin>(socket: &mut S, text: &str, back: &str) {
    socket.write_all(text.as_bytes()).await.unwrap();
    socket.flush().await.unwrap();
    let mut received = vec![0; back.len()];
    assert_eventually("a response", socket.read_exact(&mut received)).await.unwrap();
    assert_eq!(String::from_utf8(received).unwrap(), back);
}

/// Starts a web server behind TLS. Returns its address and the certificates that its clients presented, one per
/// connection.
async fn web(place: &TestDir) -> (SocketAddr, Arc<Mutex<Vec<Vec<u8>>>>) {
    let clients = ClientAuth::Required(place.files.ca.clone());
    let identity = certify(place, "web");
    let server = TlsServerConfig { identity, clients, params: TlsParams::default(), alpn: Vec::new() };
    let acceptor = server.load().unwrap().load().acceptor();
    let seen = Arc::<Mutex<Vec<Vec<u8>>>>::default();
    let sees = seen.clone();
    let at = targets::serve(move |socket| {
        let (acceptor, sees) = (acceptor.clone(), sees.clone());
        async move {
            let Ok(mut socket) = acceptor.accept(socket).await else { return };
            sees.lock().unwrap().push(socket.get_ref().1.peer_certificates().unwrap()[0].to_vec());
            let mut head = Vec::new();
            while let Ok(byte) = socket.read_u8().await {
                head.push(byte);
                if head.ends_with(b"\r\n\r\n") {
                    let _ = socket.write_all(OK.as_bytes()).await;
                    let _ = socket.flush().await;
                }
            }
        }
    })
    .await;
    (at, seen)
}

#[tokio::test]
async fn new_connections_get_the_new_certificate_and_sessions_continue() {
    let (place, echo) = (TestDir::new(), targets::echo().await);
    let [egress, https, client] = ["egress", "https", "client"].map(|name| certify(&place, name));
    let (web, seen) = web(&place).await;
    let more = format!(
        "[server.egress]\nlisten = \"127.0.0.1:0\"\n{}[server.https]\nlisten_ip = \"127.0.0.1\"\n\
         ports = {{ \"0\" = \"{web}\" }}\n{}",
        lines(&egress),
        lines(&https)
    );
    let server = TestServer::with(&place, &more);
    let _edge = edge_with(&place, &server, "node-a", &format!("[edge.target_tls]\n{}", lines(&client))).await;
    let (mut tunnel, mut site) = (dial(&server, "egress").await, dial(&server, "https").await);
    assert_response(&mut tunnel, &format!("CONNECT {} HTTP/1.1\r\n\r\n", at("node-a", echo)), ESTABLISHED)
        .await;
    assert_response(&mut tunnel, "before", "before").await;
    assert_response(&mut site, GET, OK).await;

    for name in ["egress", "https", "client"] {
        certify(&place, name);
    }
    reload_now();
    let started = Instant::now();
    for (front, old) in [("egress", shown(&tunnel)), ("https", shown(&site))] {
        while shown(&dial(&server, front).await) == old {
            assert!(started.elapsed() < TIMEOUT, "{front} still presents the old certificate");
            sleep(PAUSE).await;
        }
    }
    // Each client has its own session, for which the edge presents its certificate again.
    let same = || seen.lock().unwrap().windows(2).all(|pair| pair[0] == pair[1]);
    while same() {
        assert!(started.elapsed() < TIMEOUT, "the edge still presents the old certificate");
        assert_response(&mut dial(&server, "https").await, GET, OK).await;
        sleep(PAUSE).await;
    }
    let connections = seen.lock().unwrap().len();
    assert_response(&mut tunnel, "after", "after").await;
    assert_response(&mut site, GET, OK).await;
    assert_eq!(seen.lock().unwrap().len(), connections, "the first client's session is still there");
}

#[tokio::test]
async fn a_users_session_continues_with_her_renewed_certificate() {
    let place = TestDir::new();
    let target = at("node1", targets::echo().await);
    let rules = "rules = [{ users = [\"client\"], nodes = [\"node*\"] }]";
    let clients = format!("[server.clients]\nclient_ca = {:?}\nnames = [\"*\"]\n{rules}\n", place.files.ca);
    let server = TestServer::with(&place, &clients);
    let _edge = edge_with(&place, &server, "node1", "").await;
    let proof = UserCredentials::Certificate(certify(&place, "client"));
    let config =
        UserLinkConfig { proof, ..users::config(&place, "client/laptop", &[server.server.bound.grpc]) };
    let links = UserUplinks::connect(config).await.unwrap();
    let mut session = users::open(&links, &target).await.unwrap();
    assert_session_echo(&mut session, "with the first").await;
    certify(&place, "client");
    reload_now();
    wait_until("the session has left the link of the first", || session.resumed() == 1).await;
    assert_session_echo(&mut session, "with the other").await;
    wait_until("only one link is left", || links.links() == 1).await;
}

/// Starts tasks that echo over sessions without a pause. A task ends if its session fails.
async fn start_echo_tasks(servers: &[TestServer], echo: SocketAddr) -> Vec<tokio::task::JoinHandle<()>> {
    let mut all = Vec::new();
    for client in 0..4 {
        let mut socket = servers[client % servers.len()].open(&at("node-a", echo)).await;
        all.push(spawn(async move {
            for turn in 0_u64.. {
                let text = format!("{turn:08}");
                assert_response(&mut socket, &text, &text).await;
                tokio::task::yield_now().await;
            }
        }));
    }
    all
}

/// Returns true if a server has a path to the target.
async fn reaches(server: &TestServer, echo: SocketAddr) -> bool {
    let mut socket = server.client("connect").await;
    let request = format!("CONNECT {} HTTP/1.1\r\nHost: x\r\n\r\n", at("node-a", echo));
    socket.write_all(request.as_bytes()).await.unwrap();
    let mut begin = [0; 12];
    assert_eventually("a response", socket.read_exact(&mut begin)).await.unwrap();
    begin == *b"HTTP/1.1 200"
}

/// Returns the certificate that the port for links presents.
async fn shown_to_edges(server: &TestServer) -> Vec<u8> {
    let trust = TlsClientConfig { trust: Trust::NoVerify, identity: None, alpn: vec![b"h2".to_vec()] };
    let connector = TlsConnector::from(trust.load().unwrap().load());
    let socket = tokio::net::TcpStream::connect(server.server.bound.grpc).await.unwrap();
    shown(
        &assert_eventually("a handshake", connector.connect(server_name(NAME).unwrap(), socket))
            .await
            .unwrap(),
    )
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_ca_is_replaced_under_load_and_no_session_is_lost() {
    let (place, echo) = (TestDir::new(), targets::echo().await);
    let next = Authority::new();
    let all = servers::addresses(3);
    let server =
        |at: &SocketAddr| TestServer::from_text(&servers::config(&place, *at, &servers::peers(&all)));
    let servers: Vec<_> = all[..2].iter().map(server).collect();
    let first = edge_with(&place, &servers[0], "node-a", "").await;
    let load = start_echo_tasks(&servers, echo).await;
    let both = format!("{}{}", place.authority.0.cert(), next.0.cert());
    let issued = next.0.server(&[NAME, "127.0.0.1"]).unwrap();
    let old = shown_to_edges(&servers[0]).await;
    // Both CAs everywhere, then the new certificate, then only the new CA.
    for (step, authorities) in [both.as_str(), both.as_str(), next.0.cert()].into_iter().enumerate() {
        if step == 1 {
            issued.write(&place.files.cert, &place.files.key).unwrap();
        } else {
            place.file("ca.crt", authorities);
        }
        reload_now();
        for server in &servers {
            while (shown_to_edges(server).await == old) != (step == 0) {
                sleep(PAUSE).await;
            }
        }
        // New connections trust the current file.
        let late = edge_with(&place, &servers[1], &format!("late-{step}"), "").await;
        assert_response(&mut servers[1].open(&at(&format!("late-{step}"), echo)).await, "new", "new").await;
        late.shutdown(std::future::ready(())).await;
    }
    // A server that never knew the old CA links to the others.
    let third = server(&all[2]);
    let started = Instant::now();
    while !reaches(&third, echo).await {
        assert!(started.elapsed() < TIMEOUT, "the third server reaches no peer");
        sleep(PAUSE).await;
    }
    for session in &load {
        assert!(!session.is_finished(), "a session was lost");
        session.abort();
    }
    assert_eq!(first.metrics.resumed.get(), 0);
}

const GET: &str = "GET / HTTP/1.1\r\nHost: node-a\r\n\r\n";
const OK: &str = "HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok";
/// Pause between two handshakes.
const PAUSE: std::time::Duration = std::time::Duration::from_millis(50);
