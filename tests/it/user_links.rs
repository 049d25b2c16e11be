//! Links of users' programs: sessions through one server and another, who may open what, and until when.

use std::net::SocketAddr;
use std::time::Duration;

use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::time::Instant;
use tonic::Status;
use tunnel::config::SecretString;
use tunnel::route::RouteError;
use tunnel::uplink::client::{UserCredentials, UserLinkConfig, UserLinkError, UserUplinks};
use tunnel_link::table::handles::Session;
use tunnel_net::byte_stream_io::ChunkStreamIo;
use tunnel_net::reload::ReloadedValue;
use tunnel_proto::codec::extended::to_message;
use tunnel_proto::frame::{ErrorCode, Frame, FrameKind, SessionCategory, SessionFrame};
use tunnel_proto::hello::EdgeHello;
use tunnel_proto::names::{Instance, NodeName, SessionId, Target};

use crate::addresses::own_address;
use crate::admin::tunnel_sessions;
use crate::enrol::{invited_user, join_as_user};
use crate::support::clients::get;
use crate::support::line::Line;
use crate::support::live::{self, reloaded};
use crate::support::programs::{TOKEN, TestDir, TestServer, at, edge, start_edge};
use crate::support::remote::ScriptedServer;
use crate::support::servers::{self, KillableServer};
use crate::support::sessions::assert_session_echo;
use crate::support::users::{self, config, link, open, reset, scripted, server, tables};
use crate::support::{Stopwatch, assert_eventually, pause_time, remote, targets, wait_until, wait_within};
use crate::words::LogLines;

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

/// Opens a session to a node that another server has, once the user's server knows that server.
async fn open_once_known(links: &UserUplinks, target: &str) -> Session {
    loop {
        match open(links, target).await {
            Ok(session) => return session,
            Err(why) => assert!(why.contains("not connected"), "{why}"),
        }
    }
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
async fn a_users_session_to_a_plain_node_is_logged_with_its_result() {
    let (lines, _guard) = LogLines::start();
    let place = TestDir::new();
    let server = server(&place, "").await;
    let mut plain = remote::link(&place, &server, "node1", None).await;
    let links = link(&place, "alice/laptop", &[server.server.bound.grpc]).await;
    let refuse = async {
        let open = plain.next_session_message().await;
        plain
            .send_plain("connect-failed", &open.topic, "dial tcp 127.0.0.1:22: connect: connection refused")
            .await;
    };
    let (refused, ()) = tokio::join!(open(&links, "node1:22"), refuse);
    assert!(refused.is_err());
    wait_until("the session is logged", || lines.count("listener=\"clients\"") == 1).await;
    assert_eq!(lines.count("both ends finished"), 0, "{}", lines.text());
    assert!(lines.text().contains("connection refused"), "{}", lines.text());

    let accept = async {
        let open = plain.next_session_message().await;
        plain.send_plain("connected", &open.topic, "").await;
        plain.send_plain("tcp-forward", &open.topic, "hello").await;
        plain.send_plain("closed", &open.topic, "EOF").await;
    };
    let (session, ()) = tokio::join!(open(&links, "node1:22"), accept);
    let mut session = ChunkStreamIo::new(session.unwrap());
    let mut received = Vec::new();
    session.read_to_end(&mut received).await.unwrap();
    assert_eq!(received, b"hello");
    session.shutdown().await.unwrap();
    wait_until("the bytes are logged", || lines.count("bytes_to_client=5") == 1).await;
    links.close().await;
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

/// The laptop's line is down, and comes back.
#[tokio::test]
async fn an_operator_lists_a_users_session_without_a_path_and_ends_it() {
    let place = TestDir::new();
    let echo = targets::echo().await;
    let socket = place.path().join("admin.sock");
    let server = server(&place, &format!("[server.admin]\nlisten = \"unix:{}\"\n", socket.display())).await;
    let _edge = edge(&place, &server, "node1").await;
    let line = Line::to(server.server.bound.grpc).await;
    let links = link(&place, "alice/laptop", &[line.at]).await;
    let target = at("node1", echo);
    let mut session = open(&links, &target).await.unwrap();
    assert_session_echo(&mut session, "hello").await;
    let nowhere = std::net::TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap();
    line.route_to(nowhere);
    line.reset();
    while !tunnel_sessions(&socket, "").await.unwrap().contains("parked") {}
    assert_eq!(tunnel_sessions(&socket, "end --user alice").await.unwrap(), "1 session ended");
    line.route_to(server.server.bound.grpc);
    let why = reset(&mut session).await;
    assert!(why.starts_with("ended by operator "), "{why}");
    assert_session_echo(&mut open(&links, &target).await.unwrap(), "the link is back").await;
    links.close().await;
}

/// Her line to one server is down, and an operator there ends the session before it resumes at the other one.
#[tokio::test]
async fn a_users_session_that_was_ended_at_one_server_does_not_resume_at_another() {
    let (place, echo) = (TestDir::new(), targets::echo().await);
    let (servers, all) = fleet(&place, 2).await;
    let _edge = edge(&place, &servers[1].server, "node1").await;
    let socket = place.path().join("admin.sock");
    let tables = format!("{}\n[server.admin]\nlisten = \"unix:{}\"\n", tables(&place, ""), socket.display());
    let first = TestServer::from_text(&place.cloud(&format!("{}\n{tables}", servers::peers(&all))));
    first.server.enrolment.get().unwrap().refresh().await.unwrap();
    let lines = [Line::to(first.server.bound.grpc).await, Line::to(all[1]).await];
    let nowhere = std::net::TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap();
    lines[1].route_to(nowhere);
    let links = link(&place, "alice/laptop", &[lines[0].at, lines[1].at]).await;
    let mut session = open_once_known(&links, &at("node1", echo)).await;
    assert_session_echo(&mut session, "before").await;
    lines[0].route_to(nowhere);
    lines[0].reset();
    while !tunnel_sessions(&socket, "").await.unwrap().contains("parked") {}
    assert_eq!(tunnel_sessions(&socket, "end --user alice").await.unwrap(), "1 session ended");
    lines[1].route_to(all[1]);
    let why = reset(&mut session).await;
    assert!(why.starts_with("ended by operator "), "{why}");
    links.close().await;
}

#[tokio::test]
async fn a_users_session_moves_when_its_server_stops() {
    let (place, echo) = (TestDir::new(), targets::echo().await);
    let (servers, all) = fleet(&place, 2).await;
    let _edge = edge(&place, &servers[1].server, "node1").await;
    let stopped =
        TestServer::from_text(&place.cloud(&format!("{}\n{}", servers::peers(&all), tables(&place, ""))));
    stopped.server.enrolment.get().unwrap().refresh().await.unwrap();
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
async fn a_lone_server_stops_without_waiting_for_sessions_that_resume_at_its_successor() {
    let (place, echo) = (TestDir::new(), targets::echo().await);
    place.authority.write(place.path(), &["cloud.test", "127.0.0.1", "127.0.0.2", "127.0.0.3"]);
    let all = servers::addresses(1);
    let text = servers::config(&place, all[0], &tables(&place, ""));
    let server = TestServer::from_text(&text);
    let _edge = edge(&place, &server, "node1").await;
    let links = link(&place, "alice/laptop", &all).await;
    let mut session = open(&links, &at("node1", echo)).await.unwrap();
    assert_session_echo(&mut session, "before").await;
    let since = Stopwatch::start();
    server.server.shutdown(std::future::pending()).await;
    assert!(since.elapsed() < Duration::from_secs(10), "{:?}", since.elapsed());
    let _successor = TestServer::from_text(&text);
    assert_session_echo(&mut session, "after").await;
    drop(session);
    links.close().await;
}

#[tokio::test]
async fn a_program_that_ends_waits_two_seconds_for_a_line_that_is_lost() {
    let (place, echo) = (TestDir::new(), targets::echo().await);
    let server = server(&place, "").await;
    let _edge = edge(&place, &server, "node1").await;
    let line = Line::to(server.server.bound.grpc).await;
    let [silent, lost] =
        [link(&place, "alice/laptop", &[line.at]).await, link(&place, "alice/phone", &[line.at]).await];
    let mut sessions = Vec::new();
    for links in [&silent, &lost] {
        sessions.push(open(links, &at("node1", echo)).await.unwrap());
        assert_session_echo(sessions.last_mut().unwrap(), "before").await;
    }
    line.route_to(targets::closed_port().await);
    pause_time();
    line.make_one_unresponsive(0);
    line.reset_one(1);
    drop(sessions);
    let since = Instant::now();
    tokio::join!(silent.close(), lost.close());
    assert!(since.elapsed() < Duration::from_secs(30), "{:?}", since.elapsed());
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
    let (mut servers, all) = fleet(&place, 3).await;
    let nothing = tables(&place, "").replace("node*", "other");
    let second = servers::config(&place, all[1], &format!("{}\n{nothing}", servers::peers(&all)));
    servers[1].kill();
    wait_until("the port is free", || std::net::TcpListener::bind(all[1]).is_ok()).await;
    servers[1] = KillableServer::start(second).await;
    let _edge = edge(&place, &servers[2].server, "node1").await;
    let links = link(&place, "alice/laptop", &all[..2]).await;
    let target = at("node1", echo);
    let mut session = open_once_known(&links, &target).await;
    assert_session_echo(&mut session, "allowed by the first server").await;
    servers[0].kill();
    let why = reset(&mut session).await;
    assert!(why.starts_with("no rule lets alice reach port"), "{why}");
    drop(links);
}

/// For its second server the address is another node's, which has an edge, too.
#[tokio::test]
async fn a_users_session_resumes_at_the_node_where_it_was_opened() {
    let place = TestDir::new();
    let echo = targets::serve_at(&format!("{}:0", own_address()), targets::echo_one).await;
    place.authority.write(place.path(), &["cloud.test", "127.0.0.1", "127.0.0.2", "127.0.0.3"]);
    let all = servers::addresses(2);
    let mut servers = Vec::new();
    for (at, node) in all.iter().zip(["node1", "node2"]) {
        let more = format!("[server.addresses.nodes]\n\"{}\" = \"{node}\"", echo.ip());
        let text = format!("{}\n{}", servers::peers(&all), tables(&place, &more));
        servers.push(KillableServer::start(servers::config(&place, *at, &text)).await);
    }
    let _edges =
        [edge(&place, &servers[1].server, "node1").await, edge(&place, &servers[1].server, "node2").await];
    let links = link(&place, "alice/laptop", &all).await;
    let mut session = open_once_known(&links, &echo.to_string()).await;
    assert_session_echo(&mut session, "through the first server").await;
    servers[0].kill();
    assert_session_echo(&mut session, "through the second server").await;
    assert_eq!(session.resumed(), 1);
    drop(session);
    links.close().await;
}

/// The first is what an older program sends. The second names a place, which is authorized.
#[tokio::test]
async fn a_resume_that_cannot_be_located_is_repeated_and_one_that_is_not_allowed_ends() {
    let place = TestDir::new();
    let server = server(&place, "").await;
    let mut node = remote::link(&place, &server, "other1", Some(Instance::from_bits(7))).await;
    let mut call = scripted(&place, &server).await;
    let target: Target = "10.99.0.7:22".parse().unwrap();
    let chosen = Box::new(("other1".parse().unwrap(), target.clone()));
    for (place, code) in [(None, ErrorCode::NodeNotConnected), (Some(chosen), ErrorCode::NotAllowed)] {
        let (id, target, instance) = (SessionId::random(), target.clone(), Some(Instance::random()));
        let resume =
            SessionFrame::Resume { received: 0, limit: 9, epoch: 2, instance, opener: None, target, place };
        let body = FrameKind::Session(id, SessionCategory::Ssh, resume);
        call.send(to_message(Frame { node: NodeName::direct(), body })).await;
        assert_eq!(call.refusal(id).await.code, code);
    }
    tokio::select! {
        _ = server.open("other1:22") => panic!("the node has not answered"),
        (_, frame) = node.next_session_frame() => {
            assert!(matches!(frame, SessionFrame::Open { .. }), "of refused ones a node hears nothing: {frame:?}");
        }
    }
}

#[tokio::test]
async fn sessions_that_never_were_fill_no_log_and_have_a_rate() {
    let (lines, _guard) = LogLines::start();
    let place = TestDir::new();
    let server = server(&place, "").await;
    let _edge = edge(&place, &server, "node1").await;
    let mut call = scripted(&place, &server).await;
    let target: Target = "node1:22".parse().unwrap();
    let resume = |id| {
        let (target, instance) = (target.clone(), None);
        let resume = SessionFrame::Resume {
            received: 0,
            limit: 9,
            epoch: 2,
            instance,
            opener: None,
            target,
            place: None,
        };
        let body = FrameKind::Session(id, SessionCategory::Ssh, resume);
        to_message(Frame { node: NodeName::direct(), body })
    };
    for _ in 0..30 {
        let id = SessionId::random();
        call.send(resume(id)).await;
        assert_eq!(call.refusal(id).await.code, ErrorCode::UnknownSession);
    }
    assert_eq!(server.server.metrics.sessions.closed("clients", "unknown_session"), 30, "all are counted");
    wait_until("some are logged", || lines.count("listener=\"clients\"") == 10).await;
    let is_refused = || server.server.metrics.sessions.closed("clients", "overloaded") > 0;
    let requests = async {
        while !is_refused() {
            call.send(resume(SessionId::random())).await;
        }
    };
    assert_eventually("a refusal for the rate", requests).await;
    wait_until("it is logged", || lines.count("within 10 s") > 0).await;
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
    let (server, config) = live::server(&place, &text(&both, "127.0.0.0/8"));
    let _edge = edge(&place, &server, "node1").await;
    let links = link(&place, "bob/laptop", &[server.server.bound.grpc]).await;
    let mut ends = open(&links, &at("node1", echo)).await.unwrap();
    let mut stays = open(&links, &at("node1", other)).await.unwrap();
    assert_session_echo(&mut ends, "allowed").await;
    std::fs::write(&config, text(&one, "127.0.0.0/8")).unwrap();
    let why = reloaded(reset(&mut ends)).await;
    assert!(why.starts_with("no rule lets bob reach port"), "{why}");
    assert_session_echo(&mut stays, "still allowed").await;
    std::fs::write(&config, text(&one, "192.0.2.0/24")).unwrap();
    let why = reloaded(reset(&mut stays)).await;
    assert!(why.contains("your address 127.0.0.1 is not allowed here"), "{why}");
    assert_eq!(server.server.metrics.sessions.closed("clients", "revoked"), 2);
    wait_until("the link has ended", || links.links() == 0).await;
}

/// The store is read as each server reads it every few seconds: `enrol` has the test of that time.
#[tokio::test]
async fn a_revocation_ends_the_links_and_sessions_at_its_server_and_at_another_one() {
    let (place, echo) = (TestDir::new(), targets::echo().await);
    place.authority.write(place.path(), &["cloud.test", "127.0.0.1", "127.0.0.2", "127.0.0.3"]);
    let (all, tables) = (servers::addresses(2), tables(&place, ""));
    let text = |at| servers::config(&place, at, &format!("{}\n{tables}", servers::peers(&all)));
    let [one, two] = [all[0], all[1]].map(|at| TestServer::from_text(&text(at)));
    let [store, other] = [&one, &two].map(|server| server.server.enrolment.get().unwrap());
    store.refresh().await.unwrap();
    other.refresh().await.unwrap();
    let _edge = edge(&place, &one, "node1").await;
    let (laptop, phone) =
        (link(&place, "alice/laptop", &all[..1]).await, link(&place, "alice/phone", &all[1..]).await);
    let target = at("node1", echo);
    let mut at_one = open_once_known(&laptop, &target).await;
    let mut at_two = open_once_known(&phone, &target).await;
    assert!(store.revoke(&"alice/phone".parse().unwrap(), "test").await.unwrap());
    other.refresh().await.unwrap();
    assert_eq!(reset(&mut at_two).await, "the access of user alice was revoked");
    wait_until("the link has ended", || phone.links() == 0).await;
    assert_session_echo(&mut at_one, "another device").await;
    assert!(store.revoke(&"bob/".parse().unwrap(), "test").await.unwrap());
    assert_session_echo(&mut at_one, "another user").await;
    assert!(store.revoke(&"alice/".parse().unwrap(), "test").await.unwrap());
    assert_eq!(reset(&mut at_one).await, "the access of user alice was revoked");
    wait_until("the link has ended", || laptop.links() == 0).await;
    for server in [&one, &two] {
        server.assert_idle().await;
        assert_eq!(server.server.metrics.sessions.now("clients"), 0);
    }
    other.refresh().await.unwrap();
    let again = UserUplinks::connect(config(&place, "alice/laptop", &all)).await.unwrap_err().to_string();
    assert!(again.contains("the access of this device was revoked"), "{again}");
}

#[tokio::test]
async fn a_server_that_cannot_read_its_store_denies_nobody() {
    let place = TestDir::new();
    let tables = tables(&place, "");
    let (store, away) = (place.path().join("enrolled"), place.path().join("away"));
    std::fs::rename(&store, &away).unwrap();
    let server = TestServer::with(&place, &tables);
    let at_server = server.server.bound.grpc;
    pause_time();
    for (is_missing, expected) in
        [(true, "invitations: the file of invitations does not exist"), (false, "cannot access the store")]
    {
        if !is_missing {
            std::fs::create_dir(&store).unwrap();
        }
        let why = UserUplinks::connect(config(&place, "alice/laptop", &[at_server])).await.unwrap_err();
        assert!(matches!(why, UserLinkError::Unreachable(_)), "{why}");
        assert!(why.to_string().contains("cannot check tokens, certificates or grants now"), "{why}");
        tokio::time::sleep(Duration::from_secs(10)).await;
        let ready = get(server.server.bound.log, "/readyz").await;
        assert!(ready.status == 200 && ready.body.contains(expected), "{ready:?}");
    }
    let stranger = place.edge("node1", at_server, "").replace(TOKEN, "of an invitation");
    let edge = start_edge(&stranger);
    let unchecked = || server.server.metrics.links_rejected.counted("unchecked");
    wait_until("the edge is not denied either", || unchecked() > 2).await;
    std::fs::remove_dir(&store).unwrap();
    std::fs::rename(&away, &store).unwrap();
    UserUplinks::connect(config(&place, "alice/laptop", &[at_server])).await.unwrap();
    assert_eq!(server.server.metrics.links_rejected.counted("token"), 0);
    drop(edge);
}

/// The other server may accept her, or be the one that knows the invitation.
#[tokio::test]
async fn only_a_denial_of_every_server_is_final() {
    let place = TestDir::new();
    let server = TestServer::start(&place);
    let without = server.server.bound.grpc;
    for (others, is_final) in [(vec![], true), (vec![targets::closed_port().await], false)] {
        let all: Vec<_> = [without].into_iter().chain(others).collect();
        let why = UserUplinks::connect(config(&place, "alice/laptop", &all)).await.unwrap_err();
        assert_eq!(matches!(why, UserLinkError::Denied(_)), is_final, "{why}");
        assert!(why.to_string().contains("accepts no links of users"), "{why}");
        let started = UserUplinks::start(config(&place, "alice/laptop", &all)).await;
        assert_eq!(started.is_err(), is_final, "tunnel proxy keeps dialling");
    }
}

/// The servers do not know each other, like two that have lost their links.
#[tokio::test]
async fn a_node_that_only_the_next_server_of_the_list_finds_is_reached_there() {
    let place = TestDir::new();
    let echo = targets::echo().await;
    let tables = tables(&place, "");
    let [one, two] = [(); 2].map(|()| TestServer::with(&place, &tables));
    let _edge = edge(&place, &two, "node1").await;
    let line = Line::to(two.server.bound.grpc).await;
    let links = link(&place, "alice/laptop", &[one.server.bound.grpc, line.at]).await;
    let mut session = open(&links, &at("node1", echo)).await.unwrap();
    assert_session_echo(&mut session, "there").await;
    let why = open(&links, "node9:22").await.unwrap_err();
    assert!(why.contains("not connected"), "{why}");
    pause_time();
    line.reset();
    assert_session_echo(&mut session, "again").await;
    drop(session);
    wait_within(Duration::from_secs(120), "the second link is closed", || links.links() == 1).await;
    links.close().await;
}

#[tokio::test]
async fn a_preferred_server_that_hangs_costs_a_second() {
    let place = TestDir::new();
    let server = server(&place, "").await;
    let silent = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
    let all = [silent.local_addr().unwrap(), server.server.bound.grpc];
    pause_time();
    let since = Instant::now();
    let links = link(&place, "alice/laptop", &all).await;
    assert!(since.elapsed() >= Duration::from_secs(1), "the preference stays");
    assert!(since.elapsed() < Duration::from_secs(9), "{:?}", since.elapsed());
    drop(links);
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

/// The old link is still there when its sessions resume.
#[tokio::test]
async fn all_sessions_that_a_user_may_have_resume_over_a_new_link() {
    let (place, echo) = (TestDir::new(), targets::echo().await);
    let tables = tables(&place, "[server.session]\nmax_per_client = 2");
    let killable = KillableServer::start(place.cloud(&tables)).await;
    let server = &killable.server;
    server.server.enrolment.get().unwrap().refresh().await.unwrap();
    let _edge = edge(&place, server, "node1").await;
    let line = Line::to(server.server.bound.grpc).await;
    let links = link(&place, "alice/laptop", &[line.at]).await;
    let target = at("node1", echo);
    let mut sessions = [open(&links, &target).await.unwrap(), open(&links, &target).await.unwrap()];
    line.become_unresponsive();
    for session in &mut sessions {
        assert_session_echo(session, "over another link").await;
    }
    let why = open(&links, &target).await.unwrap_err();
    assert!(why.contains("per-client session limit reached"), "{why}");
    drop(sessions);
    links.close().await;
}

#[tokio::test]
async fn each_refusal_of_a_user_is_logged_with_the_reason_and_her_name() {
    let (lines, _guard) = LogLines::start();
    let (place, echo) = (TestDir::new(), targets::echo().await);
    let text = place.cloud(&tables(&place, ""));
    let (server, config) = live::server(&place, &text);
    let at_server = server.server.bound.grpc;
    let _edges = [edge(&place, &server, "node1").await, edge(&place, &server, "other1").await];
    let logged = |parts: &[&str]| {
        let text = lines.text();
        let found = text.lines().filter(|line| parts.iter().all(|part| line.contains(part))).count();
        assert_eq!(found, 1, "{parts:?}: {text}");
    };

    let proof = UserCredentials::Token(
        "alice".parse().unwrap(),
        ReloadedValue::fixed(vec![SecretString::new("wrong")]),
    );
    let wrong = UserLinkConfig { proof, ..users::config(&place, "alice/laptop", &[at_server]) };
    UserUplinks::connect(wrong).await.unwrap_err();
    let why = "reason=\"the device has not joined for this user, was revoked or unused for 90 days, or has another token\"";
    logged(&["user refused user=alice device=laptop remote_addr=127.0.0.1:", why]);

    let invitation = invited_user(&server, "alice", Duration::from_secs(60)).await;
    join_as_user(&place, at_server, &invitation, "desk").await.unwrap();
    join_as_user(&place, at_server, &invitation, "other").await.unwrap_err();
    logged(&["join rejected remote_addr=127.0.0.1 name=\"alice/other\" reason=", "has been used already"]);

    let alice = link(&place, "alice/laptop", &[at_server]).await;
    open(&alice, &at("other1", echo)).await.unwrap_err();
    let why = format!("reason=\"no rule lets alice reach port {} of node other1\"", echo.port());
    logged(&["listener=\"clients\"", "user=\"alice\" device=laptop", "result=\"forbidden\"", &why]);

    let mut session = open(&alice, &at("node1", echo)).await.unwrap();
    assert_session_echo(&mut session, "allowed").await;
    std::fs::write(&config, text.replace("node*", "other*")).unwrap();
    reloaded(reset(&mut session)).await;
    // The node's edge logs it, too.
    let is_own = |line: &str| line.contains("listener=\"clients\"") && line.contains("result=\"revoked\"");
    wait_until("the end is logged", || lines.text().lines().any(is_own)).await;
    let why = format!("reason=\"no rule lets alice reach port {} of node node1\"", echo.port());
    logged(&["listener=\"clients\"", "user=\"alice\" device=laptop", "result=\"revoked\"", &why]);

    assert!(server.server.enrolment.get().unwrap().revoke(&"alice/".parse().unwrap(), "test").await.unwrap());
    wait_until("the link has ended", || alice.links() == 0).await;
    let why = "reason=\"the access of user alice was revoked\"";
    logged(&["link ended: user revoked", "user=alice device=laptop", why]);
}

#[tokio::test]
async fn a_server_that_takes_no_links_of_users_says_so_and_an_older_one_is_named_as_such() {
    let (lines, _guard) = LogLines::start();
    let place = TestDir::new();
    let server = TestServer::start(&place);
    let refused =
        async |at| UserUplinks::connect(config(&place, "alice/laptop", &[at])).await.unwrap_err().to_string();
    let why = refused(server.server.bound.grpc).await;
    assert!(why.contains("accepts no links of users; they require a table [server.clients]"), "{why}");
    assert_eq!(lines.count("user refused user=alice device=laptop"), 1);
    let mut older = ScriptedServer::start(&place).await;
    let older_at = older.at;
    let answer = async {
        let mut call = older.call().await;
        // As a server without the role reads the hello.
        let why = EdgeHello::from_request(&call.headers).unwrap_err();
        call.answer_as(Status::unknown(why.to_string()).into_http::<()>().headers().clone());
    };
    let (why, ()) = tokio::join!(refused(older_at), answer);
    assert!(
        why.contains("this server is too old for links of users; ask its operator to upgrade it"),
        "{why}"
    );
    let wrong = users::server(&place, "").await;
    let why = assert_eventually("the refusal", async {
        let proof = UserCredentials::Token(
            "alice".parse().unwrap(),
            ReloadedValue::fixed(vec![SecretString::new("wrong")]),
        );
        let wrong = UserLinkConfig { proof, ..config(&place, "alice/laptop", &[wrong.server.bound.grpc]) };
        UserUplinks::connect(wrong).await.unwrap_err()
    })
    .await;
    assert!(matches!(why, UserLinkError::Denied(_)), "{why}");
    let why = why.to_string();
    assert!(why.contains("invalid token") && why.contains("the access of this device was revoked"), "{why}");
}

#[tokio::test]
async fn the_first_table_of_users_needs_no_restart_and_a_removed_one_ends_their_links() {
    let place = TestDir::new();
    let echo = targets::echo().await;
    let with = place.cloud(&tables(&place, ""));
    let without = with.split("[server.clients]").next().unwrap().to_owned();
    let (server, file) = live::server(&place, &without);
    server.server.enrolment.get().unwrap().refresh().await.unwrap();
    let _edge = edge(&place, &server, "node1").await;
    let settings = || config(&place, "alice/laptop", &[server.server.bound.grpc]);
    let refused = UserUplinks::connect(settings()).await.unwrap_err().to_string();
    assert!(refused.contains("accepts no links of users"), "{refused}");
    std::fs::write(&file, with).unwrap();
    let linked = async {
        loop {
            if let Ok(links) = UserUplinks::connect(settings()).await {
                return links;
            }
        }
    };
    let links = reloaded(assert_eventually("a link", linked)).await;
    let mut session = open(&links, &at("node1", echo)).await.unwrap();
    assert_session_echo(&mut session, "allowed").await;
    std::fs::write(&file, without).unwrap();
    let why = reloaded(reset(&mut session)).await;
    assert!(why.contains("no rule lets alice") || why.contains("user alice has no grant"), "{why}");
    wait_until("the link has ended", || links.links() == 0).await;
}
