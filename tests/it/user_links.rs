//! Links of users' programs: sessions through one server and another, who may open what, and what such a link never is.

use std::net::SocketAddr;
use std::path::PathBuf;
use std::time::Duration;

use http::{HeaderMap, HeaderValue};
use tokio::time::sleep;
use tonic::{Code, Status};
use tunnel::config::live::ConfigFile;
use tunnel::config::{Environment, Secret};
use tunnel::invitations::store::SecretHash;
use tunnel::route::RouteError;
use tunnel::server::Server;
use tunnel::server::config::ServerConfig;
use tunnel::uplink::client::{ClientLinkConfig, ClientLinkError, ClientLinks, UserCredentials};
use tunnel_base::names::{ClientName, Instance, NodeName, SessionId, Target};
use tunnel_link::table::stream::Session;
use tunnel_net::reload::reload_now;
use tunnel_net::tls::Identity;
use tunnel_proto::codec::to_message;
use tunnel_proto::frame::{
    Category, Conflict, ErrorCode, Found, Frame, FrameKind, Load, Opener, SessionFrame,
};
use tunnel_proto::hello::{Caller, ClientHello, Hello, UserProof};

use crate::admin::tunnel_sessions;
use crate::certificates::Authority;
use crate::support::call::Call;
use crate::support::line::Line;
use crate::support::programs::{TOKEN, TestDir, TestServer, at, edge};
use crate::support::remote::{self, ScriptedServer};
use crate::support::servers::{self, KillableServer};
use crate::support::sessions::assert_session_echo;
use crate::support::{assert_eventually, targets, wait_until};
use crate::words::LogLines;

/// The token of each of the test's devices.
pub(crate) const USER_TOKEN: &str = "a token of 32 letters and digits";

/// Writes the store with the devices that have joined, and returns the tables of a server that accepts their links.
pub(crate) fn tables(place: &TestDir, clients: &str) -> String {
    let hash = serde_json::to_string(&SecretHash::of(USER_TOKEN)).unwrap();
    let devices = ["alice/laptop", "alice/phone", "bob/laptop"].map(|device| format!("\"{device}\":{hash}"));
    let store =
        place.file("enrolled", &format!("{{\"invitations\":{{}},\"tokens\":{{{}}}}}", devices.join(",")));
    format!(
        "[server.invitations]\nstore = \"file\"\nfile = {store:?}\n[server.clients]\nrules = [{{ users = [\"alice\"], nodes = [\
         \"node*\"] }}]\n{clients}\n"
    )
}

pub(crate) async fn server(place: &TestDir, more: &str) -> TestServer {
    let server = TestServer::with(place, &tables(place, more));
    server.server.enrolment.as_ref().unwrap().refresh().await;
    server
}

/// Starts servers that know each other and accept users, each in its own runtime.
async fn fleet(place: &TestDir, count: u8) -> (Vec<KillableServer>, Vec<SocketAddr>) {
    place.authority.write(place.path(), &["cloud.test", "127.0.0.1", "127.0.0.2", "127.0.0.3", "127.0.0.4"]);
    let (all, tables) = (servers::addresses(count), tables(place, ""));
    let mut started = Vec::new();
    for at in &all {
        let text = servers::config(place, *at, &format!("{}\n{tables}", servers::peers(&all)));
        started.push(KillableServer::start(text).await);
    }
    (started, all)
}

fn config(place: &TestDir, client: &str, servers: &[SocketAddr]) -> ClientLinkConfig {
    let ClientName { user, device } = client.parse().unwrap();
    let token = Secret::new(USER_TOKEN);
    ClientLinkConfig {
        tls_server_name: None,
        servers: servers.iter().map(|at| Target::from(*at)).collect(),
        device,
        proof: UserCredentials::Token(user, token),
        ca: Some(place.files.ca.clone()),
        https_proxy: None,
        no_proxy: None,
    }
}

pub(crate) async fn link(place: &TestDir, client: &str, servers: &[SocketAddr]) -> ClientLinks {
    ClientLinks::connect(config(place, client, servers)).await.unwrap()
}

/// Opens a session. Returns the error text if it is refused.
async fn open(links: &ClientLinks, target: &str) -> Result<Session, String> {
    links.open(&target.parse().unwrap()).await.map_err(|error| error.to_string())
}

/// Opens a session to a node that another server has, once the user's server knows that server.
async fn open_once_known(links: &ClientLinks, target: &str) -> Session {
    loop {
        match open(links, target).await {
            Ok(session) => return session,
            Err(why) => assert!(why.contains("not connected"), "{why}"),
        }
    }
}

/// Polls until the session is reset, and returns the reason.
pub(crate) async fn reset(session: &mut Session) -> String {
    wait_until("the session has ended", || session.ended().is_some()).await;
    session.ended().unwrap().reason
}

#[tokio::test]
async fn a_users_session_runs_through_one_server_and_is_logged_with_user_and_device() {
    let (lines, _guard) = LogLines::start();
    let (place, echo) = (TestDir::new(), targets::echo().await);
    let server = server(&place, "").await;
    let _edge = edge(&place, &server, "node1").await;
    let links = link(&place, "alice/laptop", &[server.server.bound.grpc]).await;
    let mut session = open(&links, &at("node1", echo)).await.unwrap();
    assert_session_echo(&mut session, "hello").await;
    assert_eq!(server.server.metrics.sessions.now("clients"), 1);
    drop(session);
    links.close().await;
    wait_until("the server has released the session", || server.server.table.relayed() == (0, 0)).await;
    wait_until("the session is logged", || lines.count("listener=\"clients\"") == 1).await;
    let logged = |part: &str| lines.count(part) == 1;
    assert!(
        logged("listener=\"clients\" session=") && logged("user=\"alice\" device=laptop bytes_to_target=5")
    );
    // The node's own line has the same user.
    wait_until("the node logs it", || lines.count("client=\"alice/laptop@127.0.0.1:") == 1).await;
    server.assert_idle().await;
}

#[tokio::test]
async fn a_users_session_resumes_through_another_server_when_its_server_is_killed() {
    let (place, echo) = (TestDir::new(), targets::echo().await);
    let (mut servers, all) = fleet(&place, 3).await;
    let _edge = edge(&place, &servers[2].server, "node1").await;
    let links = link(&place, "alice/laptop", &all[..2]).await;
    let mut session = open_once_known(&links, &at("node1", echo)).await;
    assert_session_echo(&mut session, "through a peer").await;
    servers[0].kill();
    assert_session_echo(&mut session, "through another server").await;
    assert_eq!(session.resumed(), 1);
    assert_eq!(servers[1].server.server.table.relayed().0, 1);
    drop(session);
    links.close().await;
}

#[tokio::test]
async fn a_users_session_waits_for_the_last_server_to_return() {
    let (place, echo) = (TestDir::new(), targets::echo().await);
    let (mut servers, all) = fleet(&place, 1).await;
    let _edge = edge(&place, &servers[0].server, "node1").await;
    let links = link(&place, "alice/laptop", &all).await;
    let mut session = open(&links, &at("node1", echo)).await.unwrap();
    assert_session_echo(&mut session, "before").await;
    servers[0].kill();
    wait_until("the port is free", || std::net::TcpListener::bind(all[0]).is_ok()).await;
    let text = servers::config(&place, all[0], &tables(&place, ""));
    servers[0] = KillableServer::start(text).await;
    assert_session_echo(&mut session, "through a new process").await;
    assert_eq!(session.resumed(), 1);
    drop(session);
    links.close().await;
}

#[tokio::test]
async fn an_operator_lists_the_sessions_of_a_users_link_and_ends_them() {
    let (place, echo) = (TestDir::new(), targets::echo().await);
    let socket = place.path().join("admin.sock");
    let server = server(&place, &format!("[server.admin]\nlisten = \"unix:{}\"\n", socket.display())).await;
    let _edge = edge(&place, &server, "node1").await;
    let links = link(&place, "alice/laptop", &[server.server.bound.grpc]).await;
    let target = at("node1", echo);
    let mut session = open(&links, &target).await.unwrap();
    assert_session_echo(&mut session, "hello").await;
    let listed = tunnel_sessions(&socket, "").await.unwrap();
    let row: Vec<_> = listed.lines().nth(1).unwrap().split_whitespace().collect();
    let client = row[4].parse::<SocketAddr>();
    assert_eq!(
        (row[1], row[2], row[3], row[5], client.is_ok()),
        ("node1", &*target, "alice", "clients", true),
        "{listed}"
    );
    assert!(listed.contains("5 B") && listed.contains("relayed"), "{listed}");
    assert_eq!(tunnel_sessions(&socket, "end --user alice").await.unwrap(), "1 session ended");
    reset(&mut session).await;
    assert_eq!(tunnel_sessions(&socket, "").await.unwrap().lines().count(), 1);
    assert!(open(&links, &target).await.is_ok(), "the link stays");
    links.close().await;
}

#[tokio::test]
async fn a_users_session_moves_when_its_server_stops() {
    let (place, echo) = (TestDir::new(), targets::echo().await);
    let (servers, all) = fleet(&place, 2).await;
    let _edge = edge(&place, &servers[1].server, "node1").await;
    let stopped =
        TestServer::from_text(&place.cloud(&format!("{}\n{}", servers::peers(&all), tables(&place, ""))));
    stopped.server.enrolment.as_ref().unwrap().refresh().await;
    let links = link(&place, "alice/laptop", &[stopped.server.bound.grpc, all[1]]).await;
    let mut session = open_once_known(&links, &at("node1", echo)).await;
    assert_session_echo(&mut session, "before").await;
    stopped.server.shutdown(std::future::pending()).await;
    assert_session_echo(&mut session, "through the other server").await;
    assert_eq!((session.resumed(), servers[1].server.server.table.relayed().0), (1, 1));
    drop(session);
    links.close().await;
}

#[tokio::test]
async fn a_users_session_survives_a_reset_and_a_silent_line() {
    let (place, echo) = (TestDir::new(), targets::echo().await);
    let server = server(&place, "").await;
    let _edge = edge(&place, &server, "node1").await;
    let line = Line::to(server.server.bound.grpc).await;
    let links = link(&place, "alice/laptop", &[line.at]).await;
    let mut session = open(&links, &at("node1", echo)).await.unwrap();
    assert_session_echo(&mut session, "before").await;
    line.reset();
    assert_session_echo(&mut session, "over a new connection").await;
    // The old address is gone without a word: a backup link is dialled.
    line.become_unresponsive();
    assert_session_echo(&mut session, "over a backup link").await;
    assert_eq!(session.resumed(), 2);
    drop(session);
    links.close().await;
}

#[tokio::test]
async fn each_server_authorizes_a_resume_again() {
    let (place, echo) = (TestDir::new(), targets::echo().await);
    let (mut servers, all) = fleet(&place, 2).await;
    let nothing = tables(&place, "").replace("node*", "other");
    let second = servers::config(&place, all[1], &format!("{}\n{nothing}", servers::peers(&all)));
    servers[1].kill();
    wait_until("the port is free", || std::net::TcpListener::bind(all[1]).is_ok()).await;
    servers[1] = KillableServer::start(second).await;
    let _edge = edge(&place, &servers[1].server, "node1").await;
    let links = link(&place, "alice/laptop", &all).await;
    let target = at("node1", echo);
    let mut session = open_once_known(&links, &target).await;
    assert_session_echo(&mut session, "allowed by the first server").await;
    servers[0].kill();
    let why = reset(&mut session).await;
    assert!(why.starts_with("no rule lets alice reach port"), "{why}");
    drop(links);
}

#[tokio::test]
async fn a_user_reaches_only_what_a_rule_allows_and_refusals_are_logged_with_her_name() {
    let (lines, _guard) = LogLines::start();
    let (place, echo) = (TestDir::new(), targets::echo().await);
    let server = server(&place, "").await;
    let _edges = [edge(&place, &server, "node1").await, edge(&place, &server, "other1").await];
    let at_server = [server.server.bound.grpc];
    let alice = link(&place, "alice/laptop", &at_server).await;
    let error = alice.open(&at("other1", echo).parse().unwrap()).await.unwrap_err();
    let RouteError::Refused { refusal, .. } = &error.why else { panic!("{error}") };
    assert_eq!(refusal.code, ErrorCode::NotAllowed);
    let expected = format!("no rule lets alice reach port {} of node other1", echo.port());
    assert_eq!(refusal.reason, expected);
    assert_eq!(lines.count(&format!("result=\"forbidden\" reason=\"{expected}\"")), 1);
    assert_eq!(lines.count("user=\"alice\" device=laptop"), 1);
    let bob = link(&place, "bob/laptop", &at_server).await;
    let why = open(&bob, &at("node1", echo)).await.unwrap_err();
    assert!(why.contains("no rule lets bob reach"), "{why}");
    let why = open(&alice, "127.0.0.1:22").await.unwrap_err();
    assert!(why.contains("never dial loopback"), "{why}");
    let mut session = open(&alice, &at("node1", echo)).await.unwrap();
    assert_session_echo(&mut session, "allowed").await;
    assert_eq!(server.server.metrics.sessions.closed("clients", "forbidden"), 2);
}

#[tokio::test]
async fn open_sessions_and_links_end_when_the_rules_no_longer_allow_them() {
    let (place, echo, other) = (TestDir::new(), targets::echo().await, targets::echo().await);
    let text = |ports: &str, from: &str| {
        let rules =
            format!("rules = [{{ nodes = [\"node1\"], ports = [{ports}] }}]\nallow_from = [\"{from}\"]");
        place
            .cloud(&tables(&place, ""))
            .replace("rules = [{ users = [\"alice\"], nodes = [\"node*\"] }]", &rules)
    };
    let (both, one) = (format!("{}, {}", echo.port(), other.port()), other.port().to_string());
    let first = text(&both, "127.0.0.0/8");
    let path: PathBuf = place.file("server.toml", &first);
    let settings = ServerConfig::read(&first, &Environment::default()).unwrap().0;
    let server = Server::start(settings, None).unwrap();
    server.watch_config(ConfigFile { path: path.clone(), text: first, environment: Environment::default() });
    let server = TestServer::from(server);
    let _edge = edge(&place, &server, "node1").await;
    let links = link(&place, "bob/laptop", &[server.server.bound.grpc]).await;
    let mut ends = open(&links, &at("node1", echo)).await.unwrap();
    let mut stays = open(&links, &at("node1", other)).await.unwrap();
    assert_session_echo(&mut ends, "allowed").await;
    let reloaded = async |text: String| {
        std::fs::write(&path, text).unwrap();
        loop {
            reload_now();
            sleep(Duration::from_millis(50)).await;
        }
    };
    let why = tokio::select! {
        why = reset(&mut ends) => why,
        () = reloaded(text(&one, "127.0.0.0/8")) => unreachable!(),
    };
    assert!(why.starts_with("no rule lets bob reach port"), "{why}");
    assert_session_echo(&mut stays, "still allowed").await;
    let why = tokio::select! {
        why = reset(&mut stays) => why,
        () = reloaded(text(&one, "192.0.2.0/24")) => unreachable!(),
    };
    assert!(why.contains("your address 127.0.0.1 is not allowed here"), "{why}");
    assert_eq!(server.server.metrics.sessions.closed("clients", "revoked"), 2);
    wait_until("the link has ended", || links.links() == 0).await;
}

#[tokio::test]
async fn a_revoked_device_loses_its_links_and_sessions_and_other_devices_keep_theirs() {
    let (place, echo) = (TestDir::new(), targets::echo().await);
    let server = server(&place, "").await;
    let _edge = edge(&place, &server, "node1").await;
    let at_server = [server.server.bound.grpc];
    let (laptop, phone) =
        (link(&place, "alice/laptop", &at_server).await, link(&place, "alice/phone", &at_server).await);
    let mut ends = open(&laptop, &at("node1", echo)).await.unwrap();
    let mut stays = open(&phone, &at("node1", echo)).await.unwrap();
    let client: ClientName = "alice/laptop".parse().unwrap();
    assert_eq!(server.server.close_user(&client.user, Some(&client.device)), 1);
    assert_eq!(reset(&mut ends).await, "the access of user alice was revoked");
    assert_session_echo(&mut stays, "another device").await;
    assert_eq!(server.server.close_user(&"bob".parse().unwrap(), None), 0);
    assert!(server.server.close_user(&client.user, None) >= 1);
    assert_eq!(reset(&mut stays).await, "the access of user alice was revoked");
}

/// The store is read as each server reads it every few seconds: `enrol` has the test of that time.
#[tokio::test]
async fn a_revocation_at_one_server_ends_the_links_and_sessions_at_another_one() {
    let (place, echo) = (TestDir::new(), targets::echo().await);
    place.authority.write(place.path(), &["cloud.test", "127.0.0.1", "127.0.0.2", "127.0.0.3"]);
    let (all, tables) = (servers::addresses(2), tables(&place, ""));
    let text = |at| servers::config(&place, at, &format!("{}\n{tables}", servers::peers(&all)));
    let [one, two] = [all[0], all[1]].map(|at| TestServer::from_text(&text(at)));
    let [store, other] = [&one, &two].map(|server| server.server.enrolment.as_ref().unwrap());
    assert!(store.refresh().await && other.refresh().await);
    let _edge = edge(&place, &one, "node1").await;
    let (laptop, phone) =
        (link(&place, "alice/laptop", &all[..1]).await, link(&place, "alice/phone", &all[1..]).await);
    let target = at("node1", echo);
    let mut at_one = open_once_known(&laptop, &target).await;
    let mut at_two = open_once_known(&phone, &target).await;
    assert!(store.revoke(&"alice/phone".parse().unwrap(), "test").await.unwrap());
    assert!(other.refresh().await);
    assert_eq!(reset(&mut at_two).await, "the access of user alice was revoked");
    wait_until("the link has ended", || phone.links() == 0).await;
    assert_session_echo(&mut at_one, "another device").await;
    assert_eq!(two.server.close_user(&"alice".parse().unwrap(), None), 0, "none is left there");
    assert!(other.revoke(&"alice/".parse().unwrap(), "test").await.unwrap());
    assert!(store.refresh().await);
    assert_eq!(reset(&mut at_one).await, "the access of user alice was revoked");
    wait_until("the link has ended", || laptop.links() == 0).await;
    for server in [&one, &two] {
        server.assert_idle().await;
        assert_eq!(server.server.metrics.sessions.now("clients"), 0);
    }
    let again = ClientLinks::connect(config(&place, "alice/laptop", &all)).await.unwrap_err().to_string();
    assert!(again.contains("the access of this device was revoked"), "{again}");
}

#[tokio::test]
async fn sessions_of_a_user_are_bounded_over_all_her_devices() {
    let (place, echo) = (TestDir::new(), targets::echo().await);
    let server = server(&place, "[server.session]\nmax_per_client = 2").await;
    let _edge = edge(&place, &server, "node1").await;
    let at_server = [server.server.bound.grpc];
    let (laptop, phone) =
        (link(&place, "alice/laptop", &at_server).await, link(&place, "alice/phone", &at_server).await);
    let target = at("node1", echo);
    let first = open(&laptop, &target).await.unwrap();
    let _second = open(&phone, &target).await.unwrap();
    for links in [&laptop, &phone] {
        let why = open(links, &target).await.unwrap_err();
        assert!(why.contains("per-client session limit reached"), "{why}");
    }
    drop(first);
    wait_until("the first has ended", || server.server.metrics.sessions.now("clients") == 1).await;
    open(&phone, &target).await.unwrap();
}

/// Returns the hello of a user with that proof.
pub(crate) fn hello(proof: UserProof) -> ClientHello {
    let (device, instance) = ("laptop".parse().unwrap(), Instance::from_bits(7));
    ClientHello { proof, device, instance, is_backup: false }
}

pub(crate) fn token(user: &str, token: &str) -> UserProof {
    UserProof::Token { user: user.parse().unwrap(), token: token.to_owned() }
}

/// Links with this metadata and certificate. Returns the code if the server refuses.
pub(crate) async fn attempt(
    place: &TestDir,
    server: &TestServer,
    shows: Option<&Identity>,
    headers: HeaderMap,
) -> Result<Call, Code> {
    let server = server.server.bound.grpc;
    let call = remote::link_as_peer(place, server, shows.cloned(), headers, "pod").await;
    call.map_err(|status| status.code())
}

#[tokio::test]
async fn what_proves_a_user_never_proves_an_edge_or_a_server_nor_the_other_way_round() {
    let place = TestDir::new();
    // The CA of users signs for others too, here even the name of servers.
    let (foreign, dir) = (Authority::new(), place.path().join("foreign"));
    std::fs::create_dir(&dir).unwrap();
    let forged = foreign.write(&dir, &["cloud.test"]);
    let forged = Identity { cert: forged.cert, key: forged.key };
    let authorities =
        [std::fs::read_to_string(&place.files.ca).unwrap(), foreign.0.cert().to_owned()].concat();
    let users = place.file("users-ca.crt", &authorities);
    let users = format!("client_ca = {users:?}\nnames = [\"alice\", \"cloud.test\"]");
    let server = server(&place, &users).await;
    let alice = place.client("alice");
    let peer = Identity { cert: place.files.cert.clone(), key: place.files.key.clone() };
    let certificate = || hello(UserProof::Certificate).request();
    assert!(attempt(&place, &server, Some(&alice), certificate()).await.is_ok());
    assert!(attempt(&place, &server, None, hello(token("alice", USER_TOKEN)).request()).await.is_ok());
    let as_role = |mut headers: HeaderMap, role: &'static str| {
        headers.insert("tunnel-role", HeaderValue::from_static(role));
        headers
    };
    let edge = |token: &str| Hello::edge_request(&"alice".parse().unwrap(), token, Instance::from_bits(8));
    let peer_request = || Caller::peer_request(Instance::from_bits(9));
    let user_token = || hello(token("alice", USER_TOKEN)).request();
    for (what, shows, headers, code) in [
        ("no proof", None, certificate(), Code::PermissionDenied),
        ("a server's certificate", Some(&peer), certificate(), Code::PermissionDenied),
        ("the servers' name by the users' CA", Some(&forged), certificate(), Code::Unavailable),
        ("the same as a server", Some(&forged), peer_request(), Code::Unavailable),
        ("an edge's token", None, hello(token("alice", TOKEN)).request(), Code::Unauthenticated),
        ("another user's token", None, hello(token("carol", USER_TOKEN)).request(), Code::Unauthenticated),
        ("an edge's hello as a client", None, as_role(edge(TOKEN), "client"), Code::Unknown),
        ("a user's hello as an edge", None, as_role(user_token(), "edge"), Code::Unknown),
        ("a user's token as an edge", None, edge(USER_TOKEN), Code::Unauthenticated),
        ("a user's certificate as an edge", Some(&alice), edge(USER_TOKEN), Code::Unauthenticated),
        ("a user's certificate as a server", Some(&alice), peer_request(), Code::Unauthenticated),
        ("a user's token as a server", None, as_role(user_token(), "peer"), Code::Unauthenticated),
        ("both", Some(&alice), as_role(user_token(), "peer"), Code::Unauthenticated),
    ] {
        let refused = attempt(&place, &server, shows, headers).await.map(drop);
        assert_eq!(refused, Err(code), "{what}");
    }
    assert_eq!(server.server.registry.nodes().len(), 0, "no attempt is a node");
}

#[tokio::test]
async fn a_users_link_answers_nothing_announces_nothing_and_is_never_a_node() {
    let (place, echo) = (TestDir::new(), targets::echo().await);
    let server = server(&place, "").await;
    let _edge = edge(&place, &server, "node1").await;
    let victim = link(&place, "alice/phone", &[server.server.bound.grpc]).await;
    let mut session = open(&victim, &at("node1", echo)).await.unwrap();
    assert_session_echo(&mut session, "before").await;
    let mut call = attempt(&place, &server, None, hello(token("alice", USER_TOKEN)).request()).await.unwrap();
    let node: NodeName = "node1".parse().unwrap();
    let refused = || tunnel_proto::frame::SessionError::new(ErrorCode::NotAllowed, "forged");
    let foreign = [
        SessionFrame::Opened { limit: 9, epoch: 1, instance: Some(Instance::from_bits(7)) },
        SessionFrame::Resumed { received: 0, limit: 9, epoch: 9 },
        SessionFrame::Refused { epoch: 9, refusal: refused() },
        SessionFrame::Reset { epoch: 9, refusal: refused() },
        SessionFrame::PathLost { epoch: 9 },
        SessionFrame::Data("forged".into()),
    ];
    // The id of another's session is known to the attacker here; usually it is not.
    for id in [session.id(), SessionId::random()] {
        for frame in foreign.clone() {
            call.send_session(id, frame).await;
        }
    }
    let found = Found { here: true, instance: Some(Instance::from_bits(7)), ..Found::not_here(0) };
    let conflict = Conflict { instance: None, reason: "forged".into() };
    for body in [
        FrameKind::Found(found),
        FrameKind::Find(1),
        FrameKind::Load(Load { nodes: 0, stopping: true }),
        FrameKind::Conflict(conflict),
    ] {
        call.send(to_message(Frame { node: node.clone(), body })).await;
    }
    let dropped = |reason| server.server.metrics.frames_dropped.counted(reason);
    wait_until("all signals are dropped", || dropped("unknown_type") == 4).await;
    wait_until("all frames of sessions are dropped", || dropped("unknown_session") == 12).await;
    // Neither the id nor a forged opener takes over the session of another device.
    let forged = Some(Opener::Client("alice/phone".parse().unwrap()));
    let target: Target = at("node1", echo).parse().unwrap();
    let resume =
        SessionFrame::Resume { received: 0, limit: 9, epoch: 50, instance: None, opener: forged, target };
    let body = FrameKind::Session(session.id(), Category::Ssh, resume);
    call.send(to_message(Frame { node: node.clone(), body })).await;
    let (_, answer) = call.next_session_frame().await;
    let SessionFrame::Reset { refusal, .. } = answer else { panic!("{answer:?}") };
    assert_eq!(refusal.code, ErrorCode::UnknownSession);
    assert_session_echo(&mut session, "undisturbed").await;
    assert!(server.link("alice").is_none() && server.link("node1").is_some());
}

#[tokio::test]
async fn a_server_that_takes_no_links_of_users_says_so_and_an_older_one_is_named_as_such() {
    let (lines, _guard) = LogLines::start();
    let place = TestDir::new();
    let server = TestServer::start(&place);
    let refused =
        async |at| ClientLinks::connect(config(&place, "alice/laptop", &[at])).await.unwrap_err().to_string();
    let why = refused(server.server.bound.grpc).await;
    assert!(why.contains("accepts no links of users; they require a table [server.clients]"), "{why}");
    assert_eq!(lines.count("user refused user=alice device=laptop"), 1);
    let mut older = ScriptedServer::start(&place).await;
    let older_at = older.at;
    let answer = async {
        let mut call = older.call().await;
        // As a server without the role reads the hello.
        let why = Hello::from_request(&call.headers).unwrap_err();
        call.answer_as(Status::unknown(why.to_string()).into_http::<()>().headers().clone());
    };
    let (why, ()) = tokio::join!(refused(older_at), answer);
    assert!(
        why.contains("this server is too old for links of users; ask its operator to upgrade it"),
        "{why}"
    );
    let wrong = self::server(&place, "").await;
    let why = assert_eventually("the refusal", async {
        let proof = UserCredentials::Token("alice".parse().unwrap(), Secret::new("wrong"));
        let wrong = ClientLinkConfig { proof, ..config(&place, "alice/laptop", &[wrong.server.bound.grpc]) };
        ClientLinks::connect(wrong).await.unwrap_err()
    })
    .await;
    assert!(matches!(why, ClientLinkError::Denied(_)), "{why}");
    let why = why.to_string();
    assert!(why.contains("invalid token") && why.contains("the access of this device was revoked"), "{why}");
}
