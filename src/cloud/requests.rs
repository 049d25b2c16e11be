//! Requests that come over links: which are relayed to a node, which this pod dials, which it refuses.

use std::net::Ipv4Addr;

use tracing::info_span;

use crate::cloud::bridge;
use crate::cloud::context::PodContext;
use crate::protocol::{Code, Peer, Refusal, RelayRequest};
use crate::route::Room;
use crate::telemetry::Access;

/// Answers a request that came over a link. `room` limits the searches that this link may cause at once.
pub(super) fn answer(request: RelayRequest, shared: &PodContext, room: &Room) {
    match &request.from().peer {
        // An edge does not reach its own node through a pod: with that name it asks for a target of the cloud.
        Peer::Edge(edge) if edge == request.node() && request.instance().is_none() => dial(request, shared),
        Peer::Edge(edge) if edge == request.node() => relay(request, shared, room),
        Peer::Edge(_) | Peer::Cloud(_) => {
            if shared.policies.nodes.load().iter().any(|glob| glob.matches(request.node())) {
                return relay(request, shared, room);
            }
            forbid(request, shared);
        }
        Peer::Pod => {
            if let Some((request, plain)) = shared.route.pass(request) {
                bridge::lead(request, plain, shared);
            }
        }
    }
}

/// Refuses an edge a node that edges may not reach; counts and logs it.
fn forbid(request: RelayRequest, shared: &PodContext) {
    let (node, metrics) = (request.node(), &shared.ground.metrics);
    let why = format!("edges may not reach node {node}: their pod's mode.cloud.allow.nodes does not hold it");
    let asker = request.from().peer.node();
    let linked = asker.and_then(|asker| shared.registry.here(asker));
    let at = linked.map_or(Ipv4Addr::UNSPECIFIED.into(), |linked| linked.from.ip());
    let mut access = Access::begin(FRONT, at.to_string());
    access.user = asker.map(ToString::to_string);
    access.node = Some(node.clone());
    access.target = request.target().cloned();
    metrics.sessions.refused(FRONT, Code::NodeNotAllowed.name());
    access.refuse(Code::NodeNotAllowed.name(), &why, at, &metrics.refusals);
    request.refuse(Refusal::new(Code::NodeNotAllowed, why));
}

/// Relays the request in a task of its own, as the search for a path may take seconds.
fn relay(request: RelayRequest, shared: &PodContext, room: &Room) {
    let span = info_span!("relay", node = %request.node());
    let (room, shared) = (room.clone(), shared.clone());
    shared.ground.drain.clone().spawn(span, async move {
        if let Some((request, plain)) = Box::pin(shared.route.relay(request, &room)).await {
            bridge::lead(request, plain, &shared);
        }
    });
}

/// Dials a target of the cloud for an edge.
fn dial(request: RelayRequest, shared: &PodContext) {
    if shared.stopping.is_cancelled() {
        // With this code the edge asks the pod that it links to next.
        return request.refuse(Refusal::new(Code::NotHere, "this pod is stopping"));
    }
    if let Some(offer) = request.offer() {
        shared.backend.take(offer);
    }
}

/// What edges ask of a pod, in metrics and the access log.
const FRONT: &str = "backend";
/// Searches for nodes and pods that run at once for all edges; each takes a few seconds at most.
pub(super) const MOST_SEARCHES: usize = 1000;
/// Of these, for one edge.
pub(super) const MOST_SEARCHES_OF_ONE: usize = 100;
