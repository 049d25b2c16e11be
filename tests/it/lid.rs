//! Sessions of users' links without a path for longer than those of other clients: a laptop's lid is closed.

use std::time::Duration;

use tokio::time::{Instant, sleep};
use tunnel::route::ResumeTimeouts;
use tunnel::uplink::client::{UserLinkConfig, UserUplinks};
use tunnel_link::table::handles::Session;
use tunnel_net::os::BOOT;
use tunnel_proto::frame::SessionFrame;
use tunnel_proto::names::Instance;

use crate::admin::tunnel_sessions;
use crate::connecting::{Local, home_of_alice};
use crate::enrol::run;
use crate::support::clients::{assert_echo, assert_reset};
use crate::support::line::Line;
use crate::support::programs::{TestDir, TestServer, at, edge_with, start_edge};
use crate::support::sessions::assert_session_echo;
use crate::support::{assert_eventually, pause_time, remote, targets, users, wait_until};
use crate::words::LogLines;

/// Other sessions end after this time without a path.
const SHORT: &str = "resume_timeout = \"2s\"\n";
const ASKED: Duration = Duration::from_secs(10 * 60);
const AWAY: Duration = Duration::from_secs(90);

async fn link(place: &TestDir, line: &Line) -> UserUplinks {
    let config = users::config(place, "alice/laptop", &[line.at]);
    let resume_timeouts = ResumeTimeouts { other: ASKED, ..ResumeTimeouts::default() };
    UserUplinks::connect(UserLinkConfig { resume_timeouts, ..config }).await.unwrap()
}

fn granted(session: &Session) -> Option<Duration> {
    session.path_monitor().resume_timeout()
}

/// Cuts a line for a minute and a half.
async fn cut(line: &Line, to: &TestServer) {
    line.route_to("127.0.0.1:1".parse().unwrap());
    line.reset();
    sleep(AWAY).await;
    line.route_to(to.server.bound.grpc);
}

#[tokio::test]
async fn a_users_session_outlives_a_closed_lid_and_a_session_of_connect_does_not() {
    let place = TestDir::new();
    let echo = targets::echo().await;
    let server = users::server(&place, &format!("[server.session]\n{SHORT}")).await;
    let [to_laptop, to_edge] =
        [Line::to(server.server.bound.grpc).await, Line::to(server.server.bound.grpc).await];
    let edge = start_edge(&place.edge("node1", to_edge.at, &format!("[edge.session]\n{SHORT}")));
    server.wait_for_node("node1").await;
    let links = link(&place, &to_laptop).await;
    let mut login = users::open(&links, &at("node1", echo)).await.unwrap();
    let mut client = server.open(&at("node1", echo)).await;
    assert_session_echo(&mut login, "before").await;
    assert_echo(&mut client, "before").await;
    assert_eq!(granted(&login), Some(ASKED));
    pause_time();
    cut(&to_laptop, &server).await;
    assert_eq!(server.server.table.relayed(), (0, 0), "nothing of it stays at the server");
    assert_eq!(edge.table.len(), 2);
    assert_session_echo(&mut login, "after").await;
    // The line of the node.
    cut(&to_edge, &server).await;
    assert_session_echo(&mut login, "and again").await;
    assert_reset(&mut client).await;
    wait_until("the edge keeps only the login", || edge.table.len() == 1).await;
    assert_eq!((login.resumed(), login.ended()), (2, None));
    drop(login);
    links.close().await;
    server.assert_idle().await;
}

#[tokio::test]
async fn a_server_and_an_edge_bound_what_a_user_asks() {
    for (at_server, at_edge, expected) in [("5m", "1h", 300), ("1h", "4m", 240), ("0s", "1h", 60)] {
        let place = TestDir::new();
        let echo = targets::echo().await;
        let bound = |most: &str| format!("session]\nmax_resume_timeout = \"{most}\"\n");
        let server = users::server(&place, &format!("[server.{}", bound(at_server))).await;
        let _edge = edge_with(&place, &server, "node1", &format!("[edge.{}", bound(at_edge))).await;
        let links = link(&place, &Line::to(server.server.bound.grpc).await).await;
        let session = users::open(&links, &at("node1", echo)).await.unwrap();
        assert_eq!(granted(&session).map(|time| time.as_secs()), Some(expected));
        drop(session);
        links.close().await;
    }
}

#[tokio::test]
async fn the_login_at_a_node_of_before_says_that_it_waits_for_a_minute() {
    let place = TestDir::new();
    let server = users::server(&place, "").await;
    let instance = Some(Instance::from_bits(7));
    let mut node = remote::link(&place, &server, "node1", instance).await;
    let line = Line::to(server.server.bound.grpc).await;
    let mut local = Local::start_with(&["node1:22"], home_of_alice(&place, line.at)).await;
    let _client = local.client().await;
    let (id, frame) = node.next_session_frame().await;
    let SessionFrame::Open { epoch, resume_timeout, boot, .. } = frame else { panic!("{frame:?}") };
    assert_eq!(boot, *BOOT);
    assert_eq!(resume_timeout, Some(Duration::from_secs(12 * 60 * 60)));
    node.send_session(
        id,
        SessionFrame::Opened { limit: 1000, epoch, instance, place: None, resume_timeout: None },
    )
    .await;
    let message = assert_eventually("the limit", local.messages.recv()).await.unwrap();
    assert!(
        message.starts_with("tunnel: without a line, this login ends after 1 min: the node of node1:22"),
        "{message}"
    );
}

#[tokio::test]
async fn a_login_without_a_line_ends_at_its_node_soon_after_its_right() {
    let (lines, _guard) = LogLines::start();
    let place = TestDir::new();
    let echo = targets::echo().await;
    let server = users::server(&place, "").await;
    let [to_laptop, to_phone] =
        [Line::to(server.server.bound.grpc).await, Line::to(server.server.bound.grpc).await];
    let edge = edge_with(&place, &server, "node1", "").await;
    let laptop = link(&place, &to_laptop).await;
    let phone = users::link(&place, "alice/phone", &[to_phone.at]).await;
    let mut logins = Vec::new();
    for links in [&laptop, &phone] {
        let mut login = users::open(links, &at("node1", echo)).await.unwrap();
        assert_session_echo(&mut login, "before").await;
        logins.push(login);
    }
    pause_time();
    for line in [&to_laptop, &to_phone] {
        line.route_to("127.0.0.1:1".parse().unwrap());
        line.reset();
    }
    sleep(AWAY).await;
    assert_eq!(edge.table.len(), 2, "they have rights");
    assert!(lines.count("result=\"moved\" reason=\"the user's link has ended\"") >= 2, "{}", lines.text());
    let revoked = Instant::now();
    let enrolment = server.server.enrolment.get().unwrap();
    assert!(enrolment.revoke(&"alice/laptop".parse().unwrap(), "test").await.unwrap());
    wait_until("one has ended", || edge.table.len() == 1).await;
    assert!(revoked.elapsed() < Duration::from_secs(12), "{:?}", revoked.elapsed());
    let why = "the access of user alice was revoked";
    let has_line = |line: &str| line.contains("listener=\"acceptor\"") && line.contains(why);
    wait_until("the reason is logged", || lines.text().lines().any(has_line)).await;
    to_phone.route_to(server.server.bound.grpc);
    assert_session_echo(&mut logins[1], "the other goes on").await;
}

#[tokio::test]
async fn a_login_without_a_line_ends_at_once_with_its_grant_which_its_reason_names() {
    let (lines, _guard) = LogLines::start();
    let place = TestDir::new();
    let echo = targets::echo().await;
    let socket = place.path().join("admin.sock");
    let admin = format!("[server.admin]\nlisten = \"unix:{}\"\n", socket.display());
    let server = users::server(&place, &admin).await;
    let to_laptop = Line::to(server.server.bound.grpc).await;
    let edge = edge_with(&place, &server, "node1", "").await;
    let grant = async || {
        let given = run(&socket, "grant bob --nodes node1").await.unwrap();
        format!("grant {}", given.trim_end().rsplit(' ').next().unwrap())
    };
    let first = grant().await;
    let config = users::config(&place, "bob/laptop", &[to_laptop.at]);
    let resume_timeouts = ResumeTimeouts { other: ASKED, ..ResumeTimeouts::default() };
    let links = UserUplinks::connect(UserLinkConfig { resume_timeouts, ..config }).await.unwrap();
    let mut login = users::granted(&links, &at("node1", echo)).await;
    assert_session_echo(&mut login, "before").await;
    pause_time();
    to_laptop.route_to("127.0.0.1:1".parse().unwrap());
    to_laptop.reset();
    sleep(AWAY).await;
    let second = grant().await;
    sleep(AWAY).await;
    run(&socket, &first.replace("grant", "grants revoke")).await.unwrap();
    sleep(AWAY).await;
    assert_eq!(edge.table.len(), 1, "another grant gives the same");
    run(&socket, &second.replace("grant", "grants revoke")).await.unwrap();
    let revoked = Instant::now();
    wait_until("the node has ended it", || edge.table.is_empty()).await;
    assert!(revoked.elapsed() < Duration::from_secs(2), "{:?}", revoked.elapsed());
    let why = format!("{second} was revoked");
    let has_line = |line: &str| line.contains("listener=\"acceptor\"") && line.contains(&why);
    wait_until("the reason is logged", || lines.text().lines().any(has_line)).await;
    to_laptop.route_to(server.server.bound.grpc);
    assert_eq!(users::reset(&mut login).await, why);
}

#[tokio::test]
async fn an_operator_sees_and_ends_a_login_that_has_had_no_line_for_long() {
    let place = TestDir::new();
    let echo = targets::echo().await;
    let socket = place.path().join("admin.sock");
    let admin = format!("[server.admin]\nlisten = \"unix:{}\"\n", socket.display());
    let server = users::server(&place, &admin).await;
    let to_laptop = Line::to(server.server.bound.grpc).await;
    let edge = edge_with(&place, &server, "node1", "").await;
    let links = link(&place, &to_laptop).await;
    let mut login = users::open(&links, &at("node1", echo)).await.unwrap();
    assert_session_echo(&mut login, "before").await;
    pause_time();
    to_laptop.route_to("127.0.0.1:1".parse().unwrap());
    to_laptop.reset();
    sleep(AWAY).await;
    let listed = tunnel_sessions(&socket, "").await.unwrap();
    assert!(listed.contains("alice") && listed.contains("parked"), "{listed}");
    assert_eq!(tunnel_sessions(&socket, "end --user alice").await.unwrap(), "1 session ended");
    wait_until("the node has ended it", || edge.table.is_empty()).await;
}

/// The line of the node is down for longer than a server searches.
#[tokio::test]
async fn a_resume_that_finds_no_node_changes_neither_age_nor_count_of_the_session() {
    let place = TestDir::new();
    let echo = targets::echo().await;
    let socket = place.path().join("admin.sock");
    let server =
        users::server(&place, &format!("[server.admin]\nlisten = \"unix:{}\"\n", socket.display())).await;
    let to_edge = Line::to(server.server.bound.grpc).await;
    let _edge = start_edge(&place.edge("node1", to_edge.at, ""));
    server.wait_for_node("node1").await;
    let links = link(&place, &Line::to(server.server.bound.grpc).await).await;
    let mut login = users::open(&links, &at("node1", echo)).await.unwrap();
    pause_time();
    sleep(Duration::from_secs(600)).await;
    assert_session_echo(&mut login, "before").await;
    cut(&to_edge, &server).await;
    assert_session_echo(&mut login, "resumed").await;
    let listed = tunnel_sessions(&socket, "").await.unwrap();
    let row: Vec<_> = listed.lines().nth(1).unwrap().split_whitespace().collect();
    assert!(row.contains(&"relayed") && row[6].starts_with("11m"), "{listed}");
    assert_eq!(row[row.len() - 1], "1", "{listed}");
    drop(login);
    links.close().await;
}
