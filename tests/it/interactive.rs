//! A second link for interactive sessions, beside one that is busy with bulk.

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use tunnel::edge::Edge;
use tunnel::protocol::LinkSender;
use tunnel::registry::Standing;

use crate::support::clients::open;
use crate::support::line::Line;
use crate::support::programs::{TestDir, TestPod, at, start_edge};
use crate::support::talk::{Does, Talk};
use crate::support::{hurry, targets, wait_until, wait_within};

/// How long each way of the line is.
const DELAY: Duration = Duration::from_millis(10);
/// Less than the 15 s after which a silent link is given up in any case.
const SOON: Duration = Duration::from_secs(8);

/// A pod and an edge with a long line between them, and what repeats whatever it is told.
struct World {
    place: TestDir,
    pod: TestPod,
    line: Line,
    edge: Edge,
    echo: SocketAddr,
}

impl World {
    async fn new() -> Self {
        let (place, echo) = (TestDir::new(), targets::echo().await);
        let pod = TestPod::with(&place, ALLOW);
        let line = Line::slow(pod.pod.bound.grpc, DELAY).await;
        let edge = start_edge(&place.edge("node1", line.at, PROXY));
        pod.has("node1").await;
        Self { place, pod, line, edge, echo }
    }

    /// A session that a client of the pod opens.
    async fn talk(&self, does: Does) -> Talk {
        Talk::on(self.pod.open(&at("node1", self.echo)).await, does)
    }

    /// The same with a session on a second link beside one for bulk.
    async fn shared() -> (Self, Talk, Talk) {
        let world = Self::new().await;
        let (bulk, typed) = (world.talk(Does::Bulk).await, world.talk(Does::Types).await);
        has_moved(&world.pod, 1, 1).await;
        (world, bulk, typed)
    }
}

/// The node's link for interactive sessions at a pod.
fn interactive(pod: &TestPod) -> Option<Arc<LinkSender>> {
    let links = pod.pod.registry.overview(0).linked;
    let beside = links.into_iter().find(|(_, standing, ..)| *standing == Standing::Interactive);
    beside.map(|(_, _, linked, _)| linked.sender).filter(|link| !link.is_closed())
}

/// Waits until so many sessions run on the node's first link at a pod, and so many on the one beside it.
async fn has_moved(pod: &TestPod, busy: usize, beside: usize) {
    let on = |link: Option<Arc<LinkSender>>| link.map_or(0, |link| link.sessions());
    let counted = || [on(pod.link("node1").map(|linked| linked.sender)), on(interactive(pod))];
    wait_until("each session runs where it belongs", || counted() == [busy, beside]).await;
}

#[tokio::test]
async fn an_echo_beside_bulk_gets_a_link_of_its_own_until_the_bulk_is_over() {
    let (world, bulk, typed) = World::shared().await;
    let link = interactive(&world.pod).unwrap();
    let first = world.pod.link("node1").unwrap().sender;
    assert_eq!(first.beside().map(|beside| beside.id), Some(link.id));
    let before = (typed.heard(), bulk.heard(), link.traffic());
    typed.is_alive().await;
    bulk.is_alive().await;
    assert!(link.traffic().received_bytes - before.2.received_bytes < 64 * 1024, "bulk runs elsewhere");
    bulk.is_over().await;
    hurry();
    wait_within(Duration::from_secs(120), "the second link goes", || interactive(&world.pod).is_none()).await;
    has_moved(&world.pod, 1, 0).await;
    assert_eq!(world.pod.link("node1").unwrap().sender.id, first.id);
    wait_until("the edge has one link", || world.edge.metrics.links.get() == 1).await;
    typed.is_alive().await;
    typed.is_over().await;
    world.pod.forgets_all().await;
}

#[tokio::test]
async fn a_session_that_becomes_bulk_moves_back_and_bulk_that_falls_quiet_moves_over() {
    let (world, bulk, typed) = World::shared().await;
    typed.goes_on(Does::Bulk);
    has_moved(&world.pod, 2, 0).await;
    bulk.goes_on(Does::Types);
    has_moved(&world.pod, 1, 1).await;
    typed.goes_on(Does::Types);
    bulk.goes_on(Does::Bulk);
    has_moved(&world.pod, 1, 1).await;
    bulk.is_over().await;
    typed.is_over().await;
}

/// Edges reach one another and loopback through the pod.
const ALLOW: &str = "[mode.cloud.allow]\nnodes = [\"*\"]\ntargets = [\"127.0.0.0/8:*\"]\n";
const PROXY: &str = "[mode.edge.http_proxy]\nlisten = \"127.0.0.1:0\"\n";
