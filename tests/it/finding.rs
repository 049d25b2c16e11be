//! One search for all sessions: opened by clients, opened by edges, or resumed through a server.

use std::time::Duration;

use tokio::time::Instant;
use tunnel::edge::Edge;
use tunnel_link::table::handles::Session;
use tunnel_proto::frame::{ErrorCode, SessionError, SessionFrame};
use tunnel_proto::names::{Instance, SessionId};

use crate::support::call::Call;
use crate::support::clients::{self, assert_echo, assert_reset};
use crate::support::line::Line;
use crate::support::peer::{
    accept_open, announce_node, next_find, open_frame, scripted_server, send_found, send_session_frame,
};
use crate::support::programs::{TestDir, TestServer, at, edge, start_edge};
use crate::support::remote::ScriptedServer;
use crate::support::servers::{self, Dns, DnsScript};
use crate::support::sessions;
use crate::support::{Stopwatch, TIMEOUT, pause_time, remote, targets, wait_until};

/// Config that lets edges reach every node.
const ALLOW: &str = "[server.edge_access]\nnodes = [\"*\"]\n";

/// Returns the config of the server at an address, which lets edges reach every node.
fn open_config(place: &TestDir, at: std::net::SocketAddr, tables: &str) -> String {
    format!("{}\n{ALLOW}", servers::config(place, at, tables))
}

fn start(place: &TestDir) -> TestServer {
    let at = servers::addresses(1)[0];
    TestServer::from_text(&open_config(place, at, &servers::peers(&[at])))
}

/// Refuses the next session that is opened, because the node is not here.
async fn refuse_open(server: &mut Call) {
    let (id, frame) = server.next_session_frame().await;
    let SessionFrame::Open { epoch, .. } = frame else { panic!("{frame:?}") };
    server
        .send_session(
            id,
            SessionFrame::Refused {
                epoch,
                refusal: SessionError::new(ErrorCode::NodeNotConnected, "the node has disconnected"),
            },
        )
        .await;
}

/// Answers that the node is not here, until the link ends.
async fn answer_not_here(mut server: Call) {
    loop {
        let question = next_find(&mut server).await;
        send_found(&server, question, false, Duration::ZERO).await;
    }
}

async fn open_between(edge: &Edge, to: &str) -> Result<Session, String> {
    let (node, _) = to.split_once(':').unwrap();
    sessions::open_session(edge, node.parse().unwrap(), to.parse().unwrap()).await
}

#[tokio::test]
async fn a_session_of_an_edge_finds_a_node_that_moved_without_notice() {
    let place = TestDir::new();
    let server = start(&place);
    let (mut wrong, mut right) =
        (scripted_server(&place, &server, 7).await, scripted_server(&place, &server, 8).await);
    announce_node(&mut wrong, 1).await;
    let mut one = remote::link(&place, &server, "asker", Some(Instance::from_bits(5))).await;
    let id = SessionId::random();
    send_session_frame(&one, "node1", id, open_frame(1)).await;
    refuse_open(&mut wrong).await;
    let (question, other) = tokio::join!(next_find(&mut right), next_find(&mut wrong));
    send_found(&wrong, other, false, Duration::ZERO).await;
    send_found(&right, question, true, Duration::ZERO).await;
    accept_open(&mut right).await;
    let (answered, frame) = one.next_session_frame().await;
    assert_eq!((answered, matches!(frame, SessionFrame::Opened { epoch: 1, .. })), (id, true), "{frame:?}");
    // The result of this search is shared by all.
    let (_client, ()) = tokio::join!(server.open("node1:22"), accept_open(&mut right));
}

#[tokio::test]
async fn an_edges_session_leaves_an_unresponsive_server_when_its_node_moves() {
    let (place, echo) = (TestDir::new(), targets::echo().await);
    let all = servers::addresses(3);
    // The first server reaches the second over a separate path.
    let between_servers = Line::to(all[1]).await;
    let text = |n: usize, list: &[std::net::SocketAddr]| open_config(&place, all[n], &servers::peers(list));
    let first = TestServer::from_text(&text(0, &[between_servers.at, all[2]]));
    let second = TestServer::from_text(&text(1, &[all[1]]));
    let third = TestServer::from_text(&text(2, &all));
    let line = Line::to(all[1]).await;
    let _node = start_edge(&place.edge("node1", line.at, ""));
    second.wait_for_node("node1").await;
    let requester = edge(&place, &first, "asker").await;
    let mut session = open_between(&requester, &at("node1", echo)).await.unwrap();
    sessions::assert_session_echo(&mut session, "before").await;
    between_servers.become_unresponsive();
    line.route_to(all[2]);
    line.reset();
    third.wait_for_node("node1").await;
    let started = Stopwatch::start();
    sessions::assert_session_echo(&mut session, "after").await;
    assert!(started.elapsed() < Duration::from_secs(2), "{:?}", started.elapsed());
}

#[tokio::test]
async fn an_edges_session_leaves_a_server_that_does_not_answer_its_open() {
    let place = TestDir::new();
    let server = start(&place);
    let (mut silent, mut right) =
        (scripted_server(&place, &server, 7).await, scripted_server(&place, &server, 8).await);
    announce_node(&mut silent, 1).await;
    let mut one = remote::link(&place, &server, "asker", Some(Instance::from_bits(5))).await;
    let id = SessionId::random();
    send_session_frame(&one, "node1", id, open_frame(1)).await;
    let started = Stopwatch::start();
    let (_, frame) = silent.next_session_frame().await;
    assert!(matches!(frame, SessionFrame::Open { epoch: 1, .. }), "{frame:?}");
    let question = next_find(&mut right).await;
    send_found(&right, question, true, Duration::ZERO).await;
    // Only the opener of a session moves it.
    let (_, frame) = one.next_session_frame().await;
    assert!(matches!(frame, SessionFrame::PathLost { epoch: 1 }), "{frame:?}");
    assert!(started.elapsed() < Duration::from_secs(5), "{:?}", started.elapsed());
    send_session_frame(&one, "node1", id, open_frame(2)).await;
    let (_, frame) = silent.next_session_frame().await;
    assert!(matches!(frame, SessionFrame::PathLost { epoch: 1 }), "{frame:?}");
    accept_open(&mut right).await;
    let (_, frame) = one.next_session_frame().await;
    assert!(matches!(frame, SessionFrame::Opened { epoch: 2, .. }), "{frame:?}");
}

#[tokio::test]
async fn the_first_client_of_a_lost_node_waits_3_s_and_gets_the_reason() {
    let place = TestDir::new();
    let server = start(&place);
    let mut disconnected = scripted_server(&place, &server, 7).await;
    announce_node(&mut disconnected, 1).await;
    let refusals = async {
        refuse_open(&mut disconnected).await;
        answer_not_here(disconnected).await;
    };
    let started = Stopwatch::start();
    let answer = tokio::select! { answer = server.request_connect("node1:22") => answer, () = refusals => unreachable!() };
    assert!(started.elapsed() < Duration::from_millis(3500), "{:?}", started.elapsed());
    let (last_seen, searched) = ("node node1 is not connected, last seen ", "ago; not at 1 peer");
    assert!(answer.body.contains(last_seen) && answer.body.contains(searched), "{answer:?}");
}

#[tokio::test]
async fn an_edges_session_to_a_lost_node_waits_3_s_and_gets_the_reason() {
    let place = TestDir::new();
    let server = start(&place);
    let mut disconnected = scripted_server(&place, &server, 7).await;
    announce_node(&mut disconnected, 1).await;
    let requester = edge(&place, &server, "asker").await;
    let refusals = async {
        refuse_open(&mut disconnected).await;
        answer_not_here(disconnected).await;
    };
    let started = Stopwatch::start();
    let answer = tokio::select! { answer = open_between(&requester, "node1:22") => answer, () = refusals => unreachable!() };
    assert!(started.elapsed() < Duration::from_millis(3500), "{:?}", started.elapsed());
    let why = answer.unwrap_err();
    assert!(why.contains("not connected, last seen ") && why.contains("ago; not at 1 peer"), "{why}");
    // For a node that was never seen, the refusal comes at once.
    let started = Stopwatch::start();
    let why = open_between(&requester, "never:22").await.unwrap_err();
    assert!(started.elapsed() < Duration::from_millis(1500), "{:?}", started.elapsed());
    assert!(why.contains("not connected"), "{why}");
}

#[tokio::test]
async fn a_search_that_waits_for_dns_notices_a_node_that_links() {
    let (place, echo) = (TestDir::new(), targets::echo().await);
    let dns = Dns::start(DnsScript::Nothing).await;
    let lines = format!("[server.dns]\nresolvers = [\"{}\"]\nzone = \"nodes.test\"", dns.at);
    let server = TestServer::from_text(&servers::config(&place, servers::addresses(1)[0], &lines));
    let line = Line::to(server.server.bound.grpc).await;
    let _edge = start_edge(&place.edge("node1", line.at, ""));
    server.wait_for_node("node1").await;
    let mut client = server.open(&at("node1", echo)).await;
    for _ in 0..3 {
        assert_echo(&mut client, "before").await;
        line.reset();
        let started = Stopwatch::start();
        assert_echo(&mut client, "after").await;
        assert!(started.elapsed() < Duration::from_millis(600), "{:?}", started.elapsed());
    }
}

#[tokio::test]
async fn a_restarted_edge_is_noticed_after_3_s_even_if_dns_is_slow() {
    let place = TestDir::new();
    let dns = Dns::start(DnsScript::Nothing).await;
    let at = servers::addresses(1)[0];
    let lines = format!("[server.dns]\nresolvers = [\"{}\"]\nzone = \"nodes.test\"", dns.at);
    let server = TestServer::from_text(&servers::config(&place, at, &lines));
    let mut old = remote::link(&place, &server, "node1", Some(Instance::from_bits(1))).await;
    let (mut client, ()) = tokio::join!(server.open("node1:22"), accept_open(&mut old));
    drop(old);
    wait_until("the old link is closed", || server.link("node1").is_none()).await;
    let (started, watch) = (Instant::now(), Stopwatch::start());
    let _new = remote::link(&place, &server, "node1", Some(Instance::from_bits(9))).await;
    assert_reset(&mut client).await;
    let (took, worked) = (started.elapsed(), watch.elapsed());
    assert!(
        took > Duration::from_millis(2900) && worked < Duration::from_millis(3500),
        "{took:?}, {worked:?}"
    );
}

#[tokio::test]
async fn a_node_is_found_by_its_zone_name_and_rules_match_its_own_name() {
    let (place, echo) = (TestDir::new(), targets::echo().await);
    let at_server = servers::addresses(1)[0];
    let lines = "[server.dns]\nzone = \"nodes.test\"\n[[server.connect.rules]]\nnodes = [\"node1\"]\n";
    let server = TestServer::from_text(&servers::config(&place, at_server, lines));
    let _edge = edge(&place, &server, "node1").await;
    for name in ["node1", "node1.nodes.test", "NODE1.Nodes.Test."] {
        assert_echo(&mut server.open(&at(name, echo)).await, "hello").await;
    }
    assert_eq!(server.request_connect("node2.nodes.test:22").await.status, 403);
}

#[tokio::test]
async fn an_untrusted_address_from_dns_is_not_called_nor_retried_for_a_minute() {
    let place = TestDir::new();
    // A server with another CA.
    let stranger = TestDir::new();
    let mut other = ScriptedServer::start(&stranger).await;
    let dns = Dns::start(DnsScript::At([127, 0, 0, 1].into())).await;
    let at_server = std::net::SocketAddr::from(([127, 0, 0, 2], other.at.port()));
    let lines = format!("[server.dns]\nresolvers = [\"{}\"]\nzone = \"nodes.test\"", dns.at);
    let server = TestServer::from_text(&servers::config(&place, at_server, &lines));
    let answer = server.request_connect("node1:22").await;
    assert!(answer.body.contains("TLS handshake as") && answer.body.contains("127.0.0.1"), "{answer:?}");
    pause_time();
    let started = Instant::now();
    for n in 0..10 {
        tokio::time::sleep(Duration::from_secs(4)).await;
        server.request_connect(&format!("node{n}:22")).await;
    }
    assert!(started.elapsed() < Duration::from_secs(60), "{:?}", started.elapsed());
    assert_eq!(other.connections(), 1);
    for n in 0.. {
        server.request_connect(&format!("other{n}:22")).await;
        if other.connections() == 2 {
            break;
        }
        assert!(started.elapsed() < Duration::from_secs(200), "the address is never tried again");
        tokio::time::sleep(Duration::from_secs(1)).await;
    }
    assert!(started.elapsed() > Duration::from_secs(55), "{:?}", started.elapsed());
    assert!(other.no_call(), "the stranger was called");
}

#[tokio::test]
async fn clients_of_a_missing_node_share_dns_queries_and_are_served_later() {
    let (place, echo) = (TestDir::new(), targets::echo().await);
    let dns = Dns::start(DnsScript::NoSuchName).await;
    let lines = format!("[server.dns]\nresolvers = [\"{}\"]\nzone = \"nodes.test\"", dns.at);
    let server = TestServer::from_text(&servers::config(&place, servers::addresses(1)[0], &lines));
    let started = Instant::now();
    for _ in 0..200 {
        assert_eq!(server.request_connect("node1:22").await.status, 502);
    }
    let seconds = started.elapsed().as_secs() + 1;
    let queries = dns.queries();
    assert!(queries <= 2 * usize::try_from(seconds).unwrap(), "{queries} queries in {seconds} s");
    let _edge = edge(&place, &server, "node1").await;
    assert_echo(&mut server.open(&at("node1", echo)).await, "at once").await;
}

#[tokio::test]
async fn servers_of_different_cas_report_it_on_their_readiness_page() {
    let (one, two) = (TestDir::new(), TestDir::new());
    let all = servers::addresses(2);
    let first = TestServer::from_text(&servers::config(&one, all[0], &servers::peers(&all)));
    let second = TestServer::from_text(&servers::config(&two, all[1], &servers::peers(&all)));
    // The first server was started before the second.
    for (server, other) in [(&second, all[0]), (&first, all[1])] {
        let expected = format!("peers: peer {other} cannot be reached: ");
        let started = Instant::now();
        loop {
            let ready = clients::get(server.server.bound.log, "/readyz").await;
            assert_eq!(ready.status, 200, "{ready:?}");
            if ready.body.contains(&expected) && ready.body.contains("TLS handshake as") {
                break;
            }
            assert!(started.elapsed() < TIMEOUT, "{ready:?}");
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
    }
}
