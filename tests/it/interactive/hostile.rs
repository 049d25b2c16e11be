//! Remotes that follow a script next to an interactive link, and hostile remotes.

use std::net::SocketAddr;

use http::HeaderMap;
use tonic::Code as Grpc;
use tunnel_proto::codec::extended::to_message;
use tunnel_proto::frame::{Frame, FrameKind, SessionFrame};
use tunnel_proto::hello::{EdgeHello, LinkPurpose};
use tunnel_proto::names::{Instance, SessionId};

use super::{DELAY, World, assert_all_finish, first, interactive, wait_for_sessions_on_links};
use crate::support::line::Line;
use crate::support::peer::open_frame;
use crate::support::programs::{TestDir, TestServer, start_edge};
use crate::support::remote::{self, ScriptedServer};
use crate::support::{targets, wait_until};

/// The test plays a server over a long path. Its edge has bulk and a session that sends nothing, so it calls again.
#[tokio::test]
async fn an_interactive_link_has_its_role_in_its_hello() {
    let place = TestDir::new();
    let mut server = ScriptedServer::start(&place).await;
    let line = Line::slow(server.at, DELAY).await;
    let _edge = start_edge(&place.edge("node1", line.at, ""));
    let mut call = server.call().await;
    call.answer(Some(Instance::random()));
    for target in [targets::endless_source().await, targets::echo().await] {
        let SessionFrame::Open { epoch, client, opener, .. } = open_frame(1) else { unreachable!("an Open") };
        let target = SocketAddr::from(([127, 0, 0, 1], target.port())).to_string().parse().unwrap();
        call.send_session(
            SessionId::random(),
            SessionFrame::Open {
                target,
                limit: 1 << 40,
                epoch,
                client,
                opener,
                resume_timeout: None,
                boot: None,
            },
        )
        .await;
    }
    // Reads everything, and answers pings.
    let reads = async {
        let mut received = 0;
        loop {
            if let (id, SessionFrame::Data(bytes)) = call.next_session_frame().await {
                received += u64::try_from(bytes.len()).unwrap();
                call.send_session(id, SessionFrame::Credit { received, limit: 1 << 40 }).await;
            }
        }
    };
    let again = tokio::select! {
        () = reads => unreachable!("it never ends"),
        again = server.call() => again,
    };
    assert_eq!(again.headers.get("tunnel-role").unwrap(), "interactive");
}

fn spawn(node: &str, instance: Option<Instance>) -> HeaderMap {
    let mut headers = remote::headers(node, instance);
    EdgeHello::with_purpose(&mut headers, LinkPurpose::Interactive);
    headers
}

#[tokio::test]
async fn an_interactive_link_without_its_primary_link_is_refused() {
    let (world, bulk, typed) = World::shared().await;
    let (at, link) = (world.server.server.bound.grpc, interactive(&world.server).unwrap().id);
    let other = Some(Instance::random());
    let refused = async |node: &str, instance| {
        remote::dial(&world.place, at, spawn(node, instance), node).await.err().map(|status| status.code())
    };
    assert_eq!(refused("node2", other).await, Some(Grpc::FailedPrecondition), "it has no primary link");
    assert_eq!(refused("node1", other).await, Some(Grpc::AlreadyExists), "the other process is alive");
    assert_eq!(refused("node2", Some(world.edge.table.instance())).await, Some(Grpc::FailedPrecondition));
    assert_eq!(world.server.server.registry.nodes().len(), 1);
    assert_eq!(interactive(&world.server).map(|now| now.id), Some(link));
    assert_all_finish([bulk, typed]).await;
}

#[tokio::test]
async fn sessions_continue_while_a_hundred_interactive_links_are_replaced() {
    let (world, bulk, typed) = World::shared().await;
    let instance = Some(world.edge.table.instance());
    let link = first(&world.server).unwrap().id;
    let mut calls = Vec::new();
    for _ in 0..100 {
        let headers = spawn("node1", instance);
        calls.push(
            remote::dial(&world.place, world.server.server.bound.grpc, headers, "node1").await.unwrap(),
        );
        interactive(&world.server);
    }
    // The primary link, the last of these, and perhaps one that the edge has recreated.
    wait_until("all but the last are closed", || world.server.server.metrics.links.all() <= 3).await;
    drop(calls);
    wait_for_sessions_on_links(&world.server, 1, 1).await;
    assert_eq!(first(&world.server).unwrap().id, link);
    typed.echo_time().await;
    assert_all_finish([bulk, typed]).await;
    world.server.assert_idle().await;
}

#[tokio::test]
async fn a_restarted_process_closes_the_interactive_link_of_the_old_one() {
    let (place, server) = {
        let place = TestDir::new();
        let server = TestServer::start(&place);
        (place, server)
    };
    let (before, after) = (Instance::random(), Instance::random());
    let dead = remote::link(&place, &server, "node1", Some(before)).await;
    let mut second =
        remote::dial(&place, server.server.bound.grpc, spawn("node1", Some(before)), "node1").await.unwrap();
    wait_until("both are up", || interactive(&server).is_some()).await;
    let _new = remote::try_link(&place, server.server.bound.grpc, "node1", Some(after)).await.unwrap();
    second.wait_for_end().await;
    wait_until("one link is left", || server.server.metrics.links.all() == 1).await;
    drop(dead);
}

#[tokio::test]
async fn a_session_moves_only_to_a_link_on_which_its_edge_has_sent() {
    let place = TestDir::new();
    let server = TestServer::start(&place);
    let instances = [Some(Instance::random()), Some(Instance::random())];
    let (mut edges, mut interactive, mut clients) = (Vec::new(), Vec::new(), Vec::new());
    for (node, instance) in ["node1", "node2"].into_iter().zip(instances) {
        let mut edge = remote::link(&place, &server, node, instance).await;
        let accept = async {
            let (id, SessionFrame::Open { epoch, .. }) = edge.next_session_frame().await else {
                panic!("an Open first")
            };
            edge.send_session(id, SessionFrame::opened(1000, epoch)).await;
        };
        let target = format!("{node}:22");
        clients.push(tokio::join!(server.open(&target), accept).0);
        edges.push(edge);
        let at = server.server.bound.grpc;
        interactive.push(remote::dial(&place, at, spawn(node, instance), node).await.unwrap());
    }
    // The first edge sends nothing. Without the check, its session would have moved before that of the second.
    let link = &mut interactive[1];
    link.send(to_message(Frame { node: link.node.clone(), body: FrameKind::Ping(Some(1)) })).await;
    let (_, frame) = link.next_session_frame().await;
    assert!(matches!(frame, SessionFrame::Resume { .. }), "{frame:?}");
    assert_eq!(first(&server).unwrap().sessions(), 1);
    assert_eq!(self::interactive(&server).unwrap().sessions(), 0);
}
