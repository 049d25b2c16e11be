//! Paths that stop responding: a backup link is dialled, and the first link that answers carries the sessions.

use std::net::SocketAddr;
use std::time::Duration;

use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::time::{Instant, sleep};
use tunnel::edge::Edge;
use tunnel::registry::LinkedNode;
use tunnel_link::link::Link;
use tunnel_proto::codec::extended::from_message;
use tunnel_proto::frame::{FrameKind, Remote, SessionFrame};
use tunnel_proto::names::{Instance, SessionId};
use tunnel_proto::state::LinkId;

use crate::support::clients::assert_echo;
use crate::support::line::{Line, Silent};
use crate::support::peer::{open_frame, send_session_frame};
use crate::support::programs::{TestDir, TestServer, at, edge, start_edge};
use crate::support::remote::ScriptedServer;
use crate::support::servers;
use crate::support::{assert_eventually, pause_time, targets, wait_within};

/// Less than the 15 s after which an unresponsive link is closed in any case.
const SOON: Duration = Duration::from_secs(8);

/// Returns the numbers of backup links that were used, unneeded, and failed.
fn backup_links(edge: &Edge) -> [u64; 3] {
    ["used", "unneeded", "failed"].map(|outcome| edge.metrics.backup_links.counted(outcome))
}

/// Checks that a session over a path that stops responding continues over the next connection of that path, without
/// losing a byte.
async fn goes_on_after(directions: Silent) {
    let (place, echo) = (TestDir::new(), targets::echo().await);
    let server = TestServer::start(&place);
    let line = Line::to(server.server.bound.grpc).await;
    let edge = start_edge(&place.edge("node1", line.at, ""));
    server.wait_for_node("node1").await;
    let mut client = server.open(&at("node1", echo)).await;
    pause_time();
    for cut in 1..=3 {
        assert_echo(&mut client, "before").await;
        // Long enough for a ping to measure the RTT.
        sleep(Duration::from_secs(2)).await;
        let old = server.wait_for_node("node1").await;
        line.become_unresponsive_in(directions);
        let started = Instant::now();
        client.write_all(b"lost on the way").await.unwrap();
        let mut back = [0; 15];
        assert_eventually("the echo", client.read_exact(&mut back)).await.unwrap();
        assert_eq!(&back, b"lost on the way");
        assert!(started.elapsed() < SOON, "{cut}: {:?}", started.elapsed());
        assert!(server.link("node1").is_some_and(|linked| linked.link.id != old.link.id));
        assert_eq!(backup_links(&edge), [cut, 0, 0]);
    }
    assert_echo(&mut client, "after").await;
}

#[tokio::test]
async fn a_session_continues_over_a_backup_link_if_its_path_is_silent() {
    goes_on_after(Silent::Both).await;
}

#[tokio::test]
async fn a_session_continues_if_only_bytes_from_the_edge_are_lost() {
    goes_on_after(Silent::Up).await;
}

#[tokio::test]
async fn a_session_continues_if_only_bytes_from_the_server_are_lost() {
    goes_on_after(Silent::Down).await;
}

#[tokio::test]
async fn a_server_that_sends_first_after_a_pause_uses_the_backup_link() {
    let (place, echo) = (TestDir::new(), targets::echo().await);
    let server = TestServer::start(&place);
    let line = Line::to(server.server.bound.grpc).await;
    let edge = start_edge(&place.edge("node1", line.at, ""));
    server.wait_for_node("node1").await;
    let mut client = server.open(&at("node1", echo)).await;
    assert_echo(&mut client, "before").await;
    pause_time();
    sleep(Duration::from_secs(60)).await;
    line.become_unresponsive();
    wait_within(SOON, "a backup link without any traffic", || backup_links(&edge) == [1, 0, 0]).await;
    assert_echo(&mut client, "after").await;
}

#[tokio::test]
async fn an_edge_that_was_idle_for_ten_minutes_dials_no_backup_link() {
    let (place, echo) = (TestDir::new(), targets::echo().await);
    let server = TestServer::start(&place);
    let line = Line::to(server.server.bound.grpc).await;
    let edge = start_edge(&place.edge("node1", line.at, ""));
    server.wait_for_node("node1").await;
    let mut client = server.open(&at("node1", echo)).await;
    assert_echo(&mut client, "before").await;
    pause_time();
    sleep(Duration::from_secs(610)).await;
    let old = server.wait_for_node("node1").await;
    line.become_unresponsive();
    wait_within(Duration::from_secs(45), "another link", || {
        server.link("node1").is_some_and(|linked| linked.link.id != old.link.id)
    })
    .await;
    assert_eq!((line.connections(), backup_links(&edge)), (2, [0, 0, 0]));
    assert_echo(&mut client, "after").await;
}

#[tokio::test]
async fn a_slow_path_keeps_its_link_and_gets_no_second_backup_at_once() {
    let (place, echo) = (TestDir::new(), targets::echo().await);
    let server = TestServer::start(&place);
    let line = Line::to(server.server.bound.grpc).await;
    let edge = start_edge(&place.edge("node1", line.at, ""));
    let link = server.wait_for_node("node1").await.link.id;
    let mut client = server.open(&at("node1", echo)).await;
    assert_echo(&mut client, "before").await;
    pause_time();
    sleep(Duration::from_secs(3)).await;
    for slow in 1..=2 {
        line.freeze(true);
        client.write_all(b"late").await.unwrap();
        if slow == 1 {
            wait_within(SOON, "a backup link is dialled", || line.connections() == 2).await;
        } else {
            sleep(Duration::from_secs(3)).await;
        }
        line.freeze(false);
        let mut back = [0; 4];
        assert_eventually("the echo", client.read_exact(&mut back)).await.unwrap();
        wait_within(SOON, "the backup link was not needed", || backup_links(&edge)[1] == 1).await;
        assert_eq!((line.connections(), backup_links(&edge)), (2, [0, 1, 0]), "{slow}");
        assert_eq!(server.link("node1").unwrap().link.id, link, "{slow}");
    }
}

/// The test plays a server that sends nothing more once a session is open.
#[tokio::test]
async fn the_backup_link_is_marked_in_its_hello() {
    let (place, echo) = (TestDir::new(), targets::echo().await);
    let mut server = ScriptedServer::start(&place).await;
    let _edge = start_edge(&place.edge("node1", server.at, ""));
    let mut first = server.call().await;
    first.answer(Some(Instance::random()));
    let id = SessionId::random();
    pause_time();
    let SessionFrame::Open { target: _, limit, epoch, client, opener, resume_timeout: None, boot: None } =
        open_frame(1)
    else {
        unreachable!("an Open")
    };
    let target = SocketAddr::from(([127, 0, 0, 1], echo.port())).to_string().parse().unwrap();
    first
        .send_session(
            id,
            SessionFrame::Open { target, limit, epoch, client, opener, resume_timeout: None, boot: None },
        )
        .await;
    let (_, frame) = first.next_session_frame().await;
    assert!(matches!(frame, SessionFrame::Opened { .. }), "{frame:?}");
    // Pings are answered for a while, so that the edge measures the RTT. Then the server stops responding.
    let _ = tokio::time::timeout(Duration::from_secs(3), first.wait_for_end()).await;
    let call = server.call().await;
    assert_eq!(call.headers.get("tunnel-link").unwrap(), "backup");
}

#[tokio::test]
async fn a_backup_link_to_another_server_takes_over_the_sessions() {
    the_second_server_takes_over(None).await;
}

#[tokio::test]
async fn a_backup_link_goes_to_another_server_if_the_current_one_cannot_be_reached() {
    // Nobody listens at the one address, and nobody answers at the other, as if the program there were stopped.
    let stopped = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    for unreachable in [servers::addresses(1)[0], stopped.local_addr().unwrap()] {
        the_second_server_takes_over(Some(unreachable)).await;
        tokio::time::resume();
    }
}

/// Checks that a session continues once the path of its edge to the first server is silent. New connections of that
/// path lead to the second server; or to `unreachable`, and then the edge knows the second server as well.
async fn the_second_server_takes_over(unreachable: Option<SocketAddr>) {
    let (place, echo) = (TestDir::new(), targets::echo().await);
    let servers = servers::start(&place, 2);
    let (line, second) = (Line::to(servers[0].server.bound.grpc).await, servers[1].server.bound.grpc);
    let mut known = line.at.to_string();
    if unreachable.is_some() {
        known += &format!("\", \"{second}");
    }
    let edge = start_edge(&place.edge("node1", known, ""));
    servers[0].wait_for_node("node1").await;
    let mut client = servers[0].open(&at("node1", echo)).await;
    assert_echo(&mut client, "before").await;
    pause_time();
    sleep(Duration::from_secs(2)).await;
    line.route_to(unreachable.unwrap_or(second));
    line.become_unresponsive();
    let started = Instant::now();
    assert_echo(&mut client, "lost on the way").await;
    assert!(started.elapsed() < SOON, "{:?}", started.elapsed());
    assert_eq!(backup_links(&edge), [1, 0, 0]);
    servers[1].wait_for_node("node1").await;
}

/// Checks that sessions resume between two servers. The edge is at the second server, and the first reaches it over a
/// path that stops responding.
async fn servers_resume_after(directions: Silent) {
    let (place, echo) = (TestDir::new(), targets::echo().await);
    let all = servers::addresses(2);
    let between = Line::to(all[1]).await;
    let text = |n: usize, list: &[SocketAddr]| servers::config(&place, all[n], &servers::peers(list));
    let first = TestServer::from_text(&text(0, &[between.at]));
    let second = TestServer::from_text(&text(1, &[all[1]]));
    let _edge = edge(&place, &second, "node1").await;
    let mut client = first.open(&at("node1", echo)).await;
    pause_time();
    for cut in 1..=3 {
        assert_echo(&mut client, "before").await;
        sleep(Duration::from_secs(2)).await;
        between.become_unresponsive_in(directions);
        let started = Instant::now();
        assert_echo(&mut client, "lost on the way").await;
        assert!(started.elapsed() < SOON, "{cut}: {:?}", started.elapsed());
        assert_eq!(first.server.metrics.backup_links.counted("used"), cut);
    }
}

#[tokio::test]
async fn an_unresponsive_link_between_servers_gets_a_backup_link() {
    servers_resume_after(Silent::Both).await;
}

#[tokio::test]
async fn a_link_between_servers_survives_lost_bytes_of_the_dialling_end() {
    servers_resume_after(Silent::Up).await;
}

#[tokio::test]
async fn a_link_between_servers_survives_lost_bytes_of_the_accepting_end() {
    servers_resume_after(Silent::Down).await;
}

/// Nodes with long names, so that the announcements of all of them do not fit into the windows of a link.
const NODES: u64 = 6000;

#[tokio::test]
async fn announcements_that_a_peer_does_not_take_delay_no_backup_link() {
    let place = TestDir::new();
    let mut peer = ScriptedServer::start(&place).await;
    let lines = servers::peers(&[peer.at]);
    let server = TestServer::from_text(&servers::config(&place, servers::addresses(1)[0], &lines));
    let mut first = peer.call().await;
    for number in 0..NODES {
        let node = format!("{}{number}", "n".repeat(200)).parse().unwrap();
        let link = Link::new(LinkId((1 << 40) + number), Remote::Edge(node), Some(Instance::random()));
        let from = SocketAddr::from(([127, 0, 0, 1], 1));
        let linked = LinkedNode { link, from };
        server.server.registry.insert(linked, false);
    }
    first.answer(Some(Instance::random()));
    // More than the first two announcements of a link: those of all nodes are on their way.
    for _ in 0..10 {
        let announced = async {
            loop {
                let message = first.next().await.expect("the stream continues");
                let body = from_message(message, &Remote::Peer).unwrap().body;
                if matches!(body, FrameKind::Found(_)) {
                    return;
                }
            }
        };
        assert_eventually("an announcement", announced).await;
    }
    // Only a link of sessions is watched.
    send_session_frame(&first, "node1", SessionId::random(), SessionFrame::Data("x".into())).await;
    // From now on the peer reads nothing.
    pause_time();
    let second = peer.call().await;
    assert!(second.headers.get("tunnel-link").is_some_and(|mark| mark == "backup"), "{:?}", second.headers);
}
