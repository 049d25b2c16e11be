//! Rights that are taken away end the sessions that they gave, and no others.

use std::net::SocketAddr;
use std::time::{Duration, SystemTime};

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use rcgen::{CertificateParams, DistinguishedName, DnType, ExtendedKeyUsagePurpose, Issuer, KeyPair};
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt};
use tokio::net::{TcpSocket, TcpStream};
use tokio::time::sleep;
use tokio_rustls::TlsConnector;
use tokio_rustls::client::TlsStream;
use tunnel::command::Format;
use tunnel::command::config::{ConfigFileArgs, diff};
use tunnel::config::Environment;
use tunnel::edge::Edge;
use tunnel::uplink::client::{UserCredentials, UserLinkConfig, UserUplinks};
use tunnel_net::pki::CertificateAuthority;
use tunnel_net::tls::{IdentityFiles, TlsClientConfig, Trust, server_name};
use tunnel_proto::frame::{ErrorCode, SessionFrame};
use tunnel_proto::names::{Instance, SessionId};

use crate::http_proxy::{body, site};
use crate::support::clients::{ESTABLISHED, assert_echo, assert_reset, head, open, send_request};
use crate::support::line::Line;
use crate::support::live::{self, reloaded};
use crate::support::programs::{NAME, TOKEN, TestDir, TestServer, at, edge, start_edge};
use crate::support::sessions::assert_session_echo;
use crate::support::{assert_eventually, remote, servers, targets, users, wait_until};

/// Sends a request from an address of this machine, and returns the connection once it is accepted.
async fn open_from(ip: [u8; 4], at: SocketAddr, request: &str) -> TcpStream {
    let socket = TcpSocket::new_v4().unwrap();
    socket.bind((ip, 0).into()).unwrap();
    let mut client = socket.connect(at).await.unwrap();
    client.write_all(request.as_bytes()).await.unwrap();
    assert_eq!(head(&mut client).await, ESTABLISHED);
    client
}

/// Returns the value of the header with this user's password.
fn login(user: &str, password: &str) -> String {
    format!("Proxy-Authorization: Basic {}\r\n", STANDARD.encode(format!("{user}:{password}")))
}

fn hashed(user: &str, password: &str) -> String {
    format!("{user}:{}\n", bcrypt::hash(password, 4).unwrap())
}

#[tokio::test]
async fn sessions_end_with_their_users_addresses_and_rules() {
    let (place, echo, other) = (TestDir::new(), targets::echo().await, targets::echo().await);
    let all = ["gone", "changed", "ruled", "moved", "stays"].map(|user| hashed(user, "pw"));
    let users = place.file("users", &all.concat());
    let limits = |from: &str, rules: &str| {
        place.cloud(&format!(
            "auth = \"basic\"\nusers = {users:?}\nallow_from = [{from}]\nrules = [{rules}]\n"
        ))
    };
    let everyone = "\"127.0.0.0/8\"";
    let (server, config) = live::server(&place, &limits(everyone, "{}"));
    let edge = edge(&place, &server, "node1").await;
    let open = async |user: &str, ip, target| {
        let request = format!("CONNECT {} HTTP/1.1\r\n{}\r\n", at("node1", target), login(user, "pw"));
        open_from(ip, server.connect, &request).await
    };
    let here = [127, 0, 0, 1];
    let mut removed = open("gone", here, echo).await;
    let mut changed = open("changed", here, echo).await;
    let mut ruled = open("ruled", here, other).await;
    let mut moved = open("moved", [127, 0, 0, 2], echo).await;
    let mut stays = open("stays", here, echo).await;

    // A reload that fails takes no rights away.
    std::fs::write(&users, "\n").unwrap();
    std::fs::write(&config, limits("\"nobody\"", "{}")).unwrap();
    let log = server.server.bound.log;
    let reported = async {
        loop {
            let page = crate::support::clients::get(log, "/readyz").await.body;
            if page.contains("is empty") && page.contains("server.toml") {
                return;
            }
            sleep(Duration::from_millis(20)).await;
        }
    };
    reloaded(assert_eventually("the errors in /readyz", reported)).await;

    std::fs::write(&users, all[2..].concat() + &hashed("changed", "new")).unwrap();
    reloaded(async { tokio::join!(assert_reset(&mut removed), assert_reset(&mut changed)) }).await;
    let rules = format!("{{ ports = [{}] }}", echo.port());
    std::fs::write(&config, limits(everyone, &rules)).unwrap();
    reloaded(assert_reset(&mut ruled)).await;
    std::fs::write(&config, limits("\"127.0.0.1\"", &rules)).unwrap();
    reloaded(assert_reset(&mut moved)).await;
    assert_echo(&mut stays, "is still allowed").await;
    assert_eq!(server.server.metrics.sessions.closed("connect", "revoked"), 4);
    // The node's edge has the reason, too.
    wait_until("the edge has ended them", || edge.metrics.sessions.closed("acceptor", "revoked") == 4).await;
}

#[tokio::test]
async fn requests_in_flight_and_kept_connections_end_with_their_user() {
    let (place, web) = (TestDir::new(), site("site").await);
    // Takes requests and never responds.
    let silent = targets::serve(|mut socket| async move { while socket.read_u8().await.is_ok() {} }).await;
    let users = place.file("users", &(hashed("ops", "pw") + &hashed("dev", "pw")));
    let proxy =
        format!("[server.http_proxy]\nlisten = \"127.0.0.1:0\"\nauth = \"basic\"\nusers = {users:?}\n");
    let (server, _) = live::server(&place, &place.cloud(&proxy));
    let _edge = edge(&place, &server, "node1").await;
    let send = async |client: &mut TcpStream, target, user| {
        let login = login(user, "pw");
        let request = format!("GET http://{}/ HTTP/1.1\r\n{login}\r\n", at("node1", target));
        client.write_all(request.as_bytes()).await.unwrap();
    };
    let [mut kept, mut waits, mut stays] = [
        server.client("http_proxy").await,
        server.client("http_proxy").await,
        server.client("http_proxy").await,
    ];
    for (client, user) in [(&mut kept, "ops"), (&mut stays, "dev")] {
        send(client, web, user).await;
        assert!(body(client).await.starts_with("site"));
    }
    send(&mut waits, silent, "ops").await;
    wait_until("its request is in flight", || server.server.metrics.sessions.now("http_proxy") == 3).await;
    std::fs::write(&users, hashed("dev", "pw") + &hashed("other", "pw")).unwrap();
    // The new hash of dev ends its sessions as well.
    reloaded(async {
        tokio::join!(assert_reset(&mut kept), assert_reset(&mut waits), assert_reset(&mut stays))
    })
    .await;
    assert_eq!(server.server.metrics.sessions.closed("http_proxy", "revoked"), 3);
}

/// Opens a session through the egress port with this certificate.
async fn by_certificate(
    place: &TestDir,
    server: &TestServer,
    shows: &IdentityFiles,
    target: &str,
) -> std::io::Result<TlsStream<TcpStream>> {
    let trust = Trust::Ca(place.files.ca.clone());
    let config = TlsClientConfig { trust, identity: Some(shows.clone()), alpn: Vec::new() }.load().unwrap();
    let socket = server.client("egress").await;
    let connector = TlsConnector::from(config.load());
    let mut socket = connector.connect(server_name(NAME).unwrap(), socket).await?;
    socket.write_all(format!("CONNECT {target} HTTP/1.1\r\n\r\n").as_bytes()).await?;
    let mut response = Vec::new();
    while !response.ends_with(b"\r\n\r\n") {
        response.push(socket.read_u8().await?);
    }
    assert_eq!(String::from_utf8(response).unwrap(), ESTABLISHED);
    Ok(socket)
}

async fn echoes<S: AsyncRead + AsyncWrite + Unpin>(socket: &mut S) {
    socket.write_all(b"hello").await.unwrap();
    let mut back = [0; 5];
    assert_eventually("an echo", socket.read_exact(&mut back)).await.unwrap();
}

async fn is_cut<S: AsyncRead + Unpin>(socket: &mut S) {
    assert!(assert_eventually("the end", socket.read_to_end(&mut Vec::new())).await.is_err());
}

#[tokio::test]
async fn sessions_end_with_the_certificate_its_name_and_its_ca() {
    let (place, echo) = (TestDir::new(), targets::echo().await);
    let [first, second] = ["first", "second"].map(|name| CertificateAuthority::new(name, VALID).unwrap());
    let cas = place.file("client-ca.crt", &format!("{}{}", first.cert(), second.cert()));
    let identity = |file: &str| IdentityFiles {
        cert: place.path().join(format!("{file}.crt")),
        key: place.path().join(format!("{file}.key")),
    };
    let issue = |authority: &CertificateAuthority, name: &str| {
        let identity = identity(name);
        authority.client(name).unwrap().write(&identity.cert, &identity.key).unwrap();
        identity
    };
    let dir = place.path().display().to_string();
    let text = |names: &str| {
        place.cloud(&format!(
            "[server.egress]\nlisten = \"127.0.0.1:0\"\ncert = \"{dir}/cloud.crt\"\nkey = \"{dir}/cloud.key\"\n\
             client_ca = {cas:?}\nnames = [{names}]\n"
        ))
    };
    let (server, config) = live::server(&place, &text("\"stays\", \"renamed\", \"foreign\", \"brief\""));
    let _edge = edge(&place, &server, "node1").await;
    let target = at("node1", echo);
    let open = async |shows: &IdentityFiles| by_certificate(&place, &server, shows, &target).await.unwrap();
    let stays = issue(&first, "stays");
    let mut stays = (open(&stays).await, open(&stays).await);
    let mut renamed = open(&issue(&first, "renamed")).await;
    let mut foreign = open(&issue(&second, "foreign")).await;
    let ends = SystemTime::now() + BRIEF;
    let brief = identity("brief");
    issue_until(&first, &brief, ends);
    let mut brief = open(&brief).await;

    std::fs::write(&config, text("\"stays\", \"foreign\", \"brief\"")).unwrap();
    reloaded(is_cut(&mut renamed)).await;
    std::fs::write(&cas, first.cert()).unwrap();
    reloaded(is_cut(&mut foreign)).await;
    is_cut(&mut brief).await;
    assert!(SystemTime::now() > ends);
    echoes(&mut stays.0).await;
    echoes(&mut stays.1).await;
    assert_eq!(server.server.metrics.sessions.closed("egress", "revoked"), 3);
}

/// Issues a client certificate that expires at that time.
fn issue_until(authority: &CertificateAuthority, identity: &IdentityFiles, ends: SystemTime) {
    let key = KeyPair::generate().unwrap();
    let issuer = KeyPair::from_pem(&authority.key()).unwrap();
    let issuer = Issuer::from_ca_cert_pem(authority.cert(), issuer).unwrap();
    let mut params = CertificateParams::default();
    params.distinguished_name = DistinguishedName::new();
    params.distinguished_name.push(DnType::CommonName, "brief");
    params.extended_key_usages = vec![ExtendedKeyUsagePurpose::ClientAuth];
    params.not_after = ends.into();
    std::fs::write(&identity.cert, params.signed_by(&key, &issuer).unwrap().pem()).unwrap();
    std::fs::write(&identity.key, key.serialize_pem()).unwrap();
}

#[tokio::test]
async fn sessions_end_with_the_targets_of_their_edge() {
    let (place, echo, other) = (TestDir::new(), targets::echo().await, targets::echo().await);
    let server = TestServer::start(&place);
    let text = place.edge("node1", server.server.bound.grpc, "");
    let (edge, path) = live::edge(&place, &text);
    server.wait_for_node("node1").await;
    let mut ends = server.open(&at("node1", other)).await;
    let mut stays = server.open(&at("node1", echo)).await;
    let allow = format!("[edge.allow]\ntargets = [\"127.0.0.0/8:{}\"]\n", echo.port());
    std::fs::write(&path, text + &allow).unwrap();
    reloaded(assert_reset(&mut ends)).await;
    assert_echo(&mut stays, "is still allowed").await;
    assert_eq!(edge.metrics.sessions.closed("acceptor", "revoked"), 1);
    wait_until("the server has the reason", || {
        server.server.metrics.sessions.closed("connect", "revoked") == 1
    })
    .await;
}

/// Returns the tables with which edges reach these nodes, and these ports of loopback in the cloud.
fn edge_access(nodes: &str, ports: &[u16]) -> String {
    let targets =
        ports.iter().flat_map(|port| [format!("\"127.0.0.0/8:{port}\""), format!("\"[::1]:{port}\"")]);
    let targets = targets.collect::<Vec<_>>().join(", ");
    format!("[server.edge_access]\nnodes = [{nodes}]\ntargets = [{targets}]\n")
}

/// Starts an edge with a proxy that links to an address.
fn asker(place: &TestDir, to: SocketAddr) -> (Edge, SocketAddr) {
    let edge = start_edge(&place.edge("asker", to, "[edge.http_proxy]\nlisten = \"127.0.0.1:0\"\n"));
    let proxy = edge.bound.proxy.unwrap();
    (edge, proxy)
}

fn in_cloud(target: SocketAddr) -> String {
    format!("web.localhost:{}", target.port())
}

#[tokio::test]
async fn sessions_of_edges_end_with_the_edge_access() {
    let (place, echo, other) = (TestDir::new(), targets::echo().await, targets::echo().await);
    let (e, o) = (echo.port(), other.port());
    let (server, config) = live::server(&place, &place.cloud(&edge_access("\"node1\", \"node2\"", &[e, o])));
    let _edges = [edge(&place, &server, "node1").await, edge(&place, &server, "node2").await];
    let (edge, proxy) = asker(&place, server.server.bound.grpc);
    server.wait_for_node("asker").await;
    wait_until("the edge has a link", || edge.metrics.links.all() > 0).await;
    let mut ends = [open(proxy, &at("node2", echo)).await, open(proxy, &in_cloud(other)).await];
    let mut stays = [open(proxy, &at("node1", echo)).await, open(proxy, &in_cloud(echo)).await];
    std::fs::write(&config, place.cloud(&edge_access("\"node1\"", &[e]))).unwrap();
    for client in &mut ends {
        reloaded(assert_reset(client)).await;
    }
    for client in &mut stays {
        assert_echo(client, "is still allowed").await;
    }
    assert_eq!(server.server.metrics.sessions.closed("acceptor", "revoked"), 1, "the session to the cloud");
    assert_eq!(edge.metrics.sessions.closed("http_proxy", "revoked"), 2);
}

/// Two servers with their own edge access, and an edge that is linked to the first through a line.
#[tokio::test]
async fn a_session_that_moves_to_another_server_needs_its_permission_there() {
    let (place, echo, other) = (TestDir::new(), targets::echo().await, targets::echo().await);
    let all = servers::addresses(2);
    let (e, o) = (echo.port(), other.port());
    let text = |n: usize, access: &str| {
        servers::config(&place, all[n], &format!("{}\n{access}", servers::peers(&all)))
    };
    let first = TestServer::from_text(&text(0, &edge_access("", &[e, o])));
    let (second, config) = live::server(&place, &text(1, &edge_access("", &[e])));
    let line = Line::to(all[0]).await;
    let (edge, proxy) = asker(&place, line.at);
    first.wait_for_node("asker").await;
    wait_until("the edge has a link", || edge.metrics.links.all() > 0).await;
    let (mut stays, mut ends) = (open(proxy, &in_cloud(echo)).await, open(proxy, &in_cloud(other)).await);
    assert_echo(&mut stays, "before").await;
    line.route_to(all[1]);
    line.reset();
    second.wait_for_node("asker").await;
    assert_reset(&mut ends).await;
    assert_echo(&mut stays, "is allowed there, too").await;
    assert_eq!(edge.metrics.sessions.closed("http_proxy", "revoked"), 1);
    // The second server relays it now, and judges it again.
    std::fs::write(&config, text(1, &edge_access("", &[o]))).unwrap();
    reloaded(assert_reset(&mut stays)).await;
    assert_eq!(edge.metrics.sessions.closed("http_proxy", "revoked"), 2);
}

/// Otherwise an edge would name an allowed target for a session to another one.
#[tokio::test]
async fn a_resume_that_names_another_target_than_the_open_is_refused() {
    let (place, echo) = (TestDir::new(), targets::echo().await);
    let all = servers::addresses(3);
    let loopback = "[server.edge_access]\ntargets = [\"127.0.0.0/8:*\"]\n";
    let servers = [loopback, loopback, ""].map(|access| format!("{}\n{access}", servers::peers(&all)));
    let mut next = all.iter();
    let servers = servers.map(|more| servers::config(&place, *next.next().unwrap(), &more));
    let servers = servers.map(|text| TestServer::from_text(&text));
    let instance = Some(Instance::from_bits(1));
    let mut first = remote::link(&place, &servers[0], "asker", instance).await;
    let id = SessionId::random();
    let (target, limit, client) = (echo.into(), 1000, String::new());
    first
        .send_session(
            id,
            SessionFrame::Open {
                target,
                limit,
                epoch: 1,
                client,
                opener: None,
                resume_timeout: None,
                boot: None,
            },
        )
        .await;
    let (_, SessionFrame::Opened { instance: holder, .. }) = first.next_session_frame().await else {
        panic!("not opened")
    };
    let mut links = [
        remote::link(&place, &servers[1], "asker", instance).await,
        remote::link(&place, &servers[2], "asker", instance).await,
    ];
    for (at, epoch, target, expected) in [
        (0, 2, SocketAddr::from(([127, 0, 0, 1], 1)), Some(ErrorCode::UnknownSession)),
        (0, 3, echo, None),
        (1, 4, echo, Some(ErrorCode::NotAllowed)),
    ] {
        let (received, opener, target) = (0, None, target.into());
        let resume =
            SessionFrame::Resume { received, limit, epoch, instance: holder, opener, target, place: None };
        links[at].send_session(id, resume).await;
        let refused = match links[at].next_session_frame().await.1 {
            SessionFrame::Reset { refusal, .. } => Some(refusal.code),
            SessionFrame::Resumed { .. } => None,
            frame => panic!("{frame:?}"),
        };
        assert_eq!(refused, expected, "{epoch}");
    }
}

#[tokio::test]
async fn a_blocked_node_gets_no_session_once_its_sessions_are_reset() {
    let (place, echo) = (TestDir::new(), targets::echo().await);
    let server = TestServer::with(&place, &edge_access("", &[echo.port()]));
    let (_edge, proxy) = asker(&place, server.server.bound.grpc);
    server.wait_for_node("asker").await;
    let mut ends = [server.open(&at("asker", echo)).await, open(proxy, &in_cloud(echo)).await];
    place.file("token", &format!("asker:\ndefault:{TOKEN}\n"));
    let [to, from] = &mut ends;
    reloaded(assert_reset(to)).await;
    let request = format!("CONNECT {} HTTP/1.1\r\n\r\n", in_cloud(echo));
    let target = at("asker", echo);
    let (to_node, from_node) = tokio::join!(server.request_connect(&target), send_request(proxy, &request));
    assert_eq!(to_node.status, 502, "{to_node:?}");
    assert!(matches!(from_node.status, 403 | 502), "{from_node:?}");
    assert_reset(from).await;
}

const VALID: Duration = Duration::from_secs(3600);
/// Validity of a certificate that must expire within a test: long enough for a handshake on a busy machine.
const BRIEF: Duration = Duration::from_secs(6);

#[tokio::test]
async fn a_listener_that_asks_for_a_password_ends_the_sessions_that_have_given_none() {
    let place = TestDir::new();
    let target = at("node1", targets::echo().await);
    let (server, config) = live::server(&place, &place.cloud(""));
    let _edge = edge(&place, &server, "node1").await;
    let mut anonymous = server.open(&target).await;
    let users = place.file("users", &hashed("ops", "pw"));
    std::fs::write(&config, place.cloud(&format!("auth = \"basic\"\nusers = {users:?}\n"))).unwrap();
    reloaded(assert_reset(&mut anonymous)).await;
    assert_eq!(server.server.metrics.sessions.closed("connect", "revoked"), 1);
    assert_eq!(server.request_connect(&target).await.status, 407);
    // The other way round nothing is taken away.
    let request = format!("CONNECT {target} HTTP/1.1\r\n{}\r\n", login("ops", "pw"));
    let mut stays = open_from([127, 0, 0, 1], server.connect, &request).await;
    std::fs::write(&config, place.cloud("")).unwrap();
    reloaded(async { while server.request_connect("other:1").await.status == 407 {} }).await;
    assert_echo(&mut stays, "needs no password now").await;
}

#[tokio::test]
async fn another_file_of_users_ends_the_sessions_of_those_whom_it_lacks() {
    let place = TestDir::new();
    let target = at("node1", targets::echo().await);
    let dev = hashed("dev", "pw");
    let files = [place.file("one", &(hashed("ops", "pw") + &dev)), place.file("two", &dev)];
    let text = |file: &std::path::Path| place.cloud(&format!("auth = \"basic\"\nusers = {file:?}\n"));
    let (server, config) = live::server(&place, &text(&files[0]));
    let _edge = edge(&place, &server, "node1").await;
    let open = async |user: &str| {
        let request = format!("CONNECT {target} HTTP/1.1\r\n{}\r\n", login(user, "pw"));
        open_from([127, 0, 0, 1], server.connect, &request).await
    };
    let mut ends = open("ops").await;
    let mut stays = open("dev").await;
    std::fs::write(&config, text(&files[1])).unwrap();
    reloaded(assert_reset(&mut ends)).await;
    assert_echo(&mut stays, "is in the other file, too").await;
    assert_eq!(server.server.metrics.sessions.closed("connect", "revoked"), 1);
}

#[tokio::test]
async fn rights_are_taken_away_although_a_port_of_the_same_change_cannot_open() {
    let place = TestDir::new();
    let target = at("node1", targets::echo().await);
    let users = place.file("users", &(hashed("admin", "pw") + &hashed("dev", "pw")));
    let text = |more: &str| place.cloud(&format!("auth = \"basic\"\nusers = {users:?}\n{more}"));
    let (server, config) = live::server(&place, &text(""));
    let _edge = edge(&place, &server, "node1").await;
    let request = |user: &str| format!("CONNECT {target} HTTP/1.1\r\n{}\r\n", login(user, "pw"));
    let mut ends = open_from([127, 0, 0, 1], server.connect, &request("admin")).await;
    let mut stays = open_from([127, 0, 0, 1], server.connect, &request("dev")).await;
    let taken = servers::addresses(1)[0];
    let _holder = std::net::TcpListener::bind(taken).unwrap();
    let proxy = format!("rules = [{{ users = [\"dev\"] }}]\n[server.http_proxy]\nlisten = \"{taken}\"\n");
    std::fs::write(&config, text(&proxy)).unwrap();
    reloaded(assert_reset(&mut ends)).await;
    assert_eq!(send_request(server.connect, &request("admin")).await.status, 403);
    assert_echo(&mut stays, "is still allowed").await;
    let log = server.server.bound.log;
    let reported = async {
        while !crate::support::clients::get(log, "/readyz")
            .await
            .body
            .contains("listeners: server.http_proxy")
        {}
    };
    reloaded(assert_eventually("the port in /readyz", reported)).await;
}

#[tokio::test]
async fn a_removed_table_takes_its_rights_with_it() {
    let place = TestDir::new();
    let echo = targets::echo().await;
    let port = servers::addresses(1)[0];
    let tcp = format!("[server.tcp.\"{port}\"]\ntarget = \"node1/{echo}\"\n");
    let (server, config) = live::server(&place, &place.cloud(&tcp));
    let _edge = edge(&place, &server, "node1").await;
    let mut ends = TcpStream::connect(port).await.unwrap();
    assert_echo(&mut ends, "open").await;
    let mut stays = server.open(&at("node1", echo)).await;
    std::fs::write(&config, place.cloud("")).unwrap();
    reloaded(assert_reset(&mut ends)).await;
    assert_echo(&mut stays, "of another table").await;
    assert_eq!(server.server.metrics.sessions.closed("tcp", "revoked"), 1);
}

#[tokio::test]
async fn sessions_end_if_their_listener_trusts_another_ca_now() {
    let place = TestDir::new();
    let target = at("node1", targets::echo().await);
    let dir = place.path().display().to_string();
    let text = |ca: &str| {
        place.cloud(&format!(
            "[server.egress]\nlisten = \"127.0.0.1:0\"\ncert = \"{dir}/cloud.crt\"\nkey = \"{dir}/cloud.key\"\n\
             client_ca = \"{dir}/{ca}\"\nnames = [\"*\"]\n"
        ))
    };
    for name in ["first", "second"] {
        let authority = CertificateAuthority::new(name, VALID).unwrap();
        let identity = IdentityFiles {
            cert: place.path().join(format!("of-{name}.crt")),
            key: place.path().join(format!("of-{name}.key")),
        };
        authority.client(name).unwrap().write(&identity.cert, &identity.key).unwrap();
        place.file(name, authority.cert());
    }
    let (server, config) = live::server(&place, &text("first"));
    let _edge = edge(&place, &server, "node1").await;
    let shows =
        IdentityFiles { cert: place.path().join("of-first.crt"), key: place.path().join("of-first.key") };
    let mut client = by_certificate(&place, &server, &shows, &target).await.unwrap();
    echoes(&mut client).await;
    std::fs::write(&config, text("second")).unwrap();
    reloaded(is_cut(&mut client)).await;
    assert_eq!(server.server.metrics.sessions.closed("egress", "revoked"), 1);
}

#[tokio::test]
async fn a_reload_with_another_ca_of_users_admits_its_users_and_ends_the_links_of_the_others() {
    let place = TestDir::new();
    let target = at("node1", targets::echo().await);
    let text = |tables: &str| place.cloud(tables);
    let table = |ca: &str| {
        let ca = place.path().join(ca);
        let rules = "rules = [{ users = [\"first\", \"second\"], nodes = [\"node*\"] }]";
        format!("[server.clients]\nclient_ca = {ca:?}\nnames = [\"*\"]\n{rules}\n")
    };
    let (server, config) = live::server(&place, &text(""));
    let _edge = edge(&place, &server, "node1").await;
    let links = ["first", "second"].map(|name| {
        let authority = CertificateAuthority::new(name, VALID).unwrap();
        place.file(name, authority.cert());
        let cert = place.path().join(format!("of-{name}.crt"));
        let key = place.path().join(format!("of-{name}.key"));
        authority.client(name).unwrap().write(&cert, &key).unwrap();
        let proof = UserCredentials::Certificate(IdentityFiles { cert, key });
        UserLinkConfig { proof, ..users::config(&place, "alice/laptop", &[server.server.bound.grpc]) }
    });
    let connect = async |config: &UserLinkConfig| {
        loop {
            if let Ok(linked) = UserUplinks::connect(config.clone()).await {
                return linked;
            }
        }
    };
    let mut former = None;
    for (ca, config_of_user) in ["first", "second"].iter().zip(&links) {
        std::fs::write(&config, text(&table(ca))).unwrap();
        let linked = reloaded(assert_eventually("a link", connect(config_of_user))).await;
        let mut session = users::open(&linked, &target).await.unwrap();
        assert_session_echo(&mut session, "is allowed").await;
        if let Some((_, mut ended)) = former.replace((linked, session)) {
            users::reset(&mut ended).await;
        }
    }
}

#[tokio::test]
async fn a_running_server_says_which_sessions_a_new_config_would_end_and_ends_none() {
    let place = TestDir::new();
    let target = at("node1", targets::echo().await);
    let users = place.file("users", &(hashed("alice", "pw") + &hashed("bob", "pw")));
    let socket = place.path().join("admin.sock");
    let text = |more: &str| {
        place.cloud(&format!(
            "auth = \"basic\"\nusers = {users:?}\n{more}\n[server.admin]\nlisten = \"unix:{}\"\n",
            socket.display()
        ))
    };
    let (server, _) = live::server(&place, &text(""));
    let _edge = edge(&place, &server, "node1").await;
    let mut open = Vec::new();
    for user in ["alice", "alice", "bob"] {
        let request = format!("CONNECT {target} HTTP/1.1\r\n{}\r\n", login(user, "pw"));
        open.push(open_from([127, 0, 0, 1], server.connect, &request).await);
    }
    let new = text("rules = [{ users = [\"bob\"] }]\n[server.session]\nmax_sessions = 7");
    let file = ConfigFileArgs { file: Some(place.file("new.toml", &new)), kubeconfig: None };
    let asked = diff(&file.read().unwrap(), None, &Environment::default(), Format::Text).await.unwrap();
    let expected = format!(
        "compared with the running server at {}:\nreload: judges sessions of server.connect again\n\
         reload: ends 2 sessions of alice\nrestart: changes server.session\n",
        socket.display()
    );
    assert_eq!(asked, expected);
    for client in &mut open {
        assert_echo(client, "goes on").await;
    }
    // At a port nobody may ask.
    let request =
        "POST /config/plan HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\nContent-Length: 0\r\n\r\n";
    assert_eq!(send_request(server.server.bound.log, request).await.status, 404);
}
