//! Requests that come over links: which are relayed to a node, which this pod dials, which it refuses.

use tracing::info_span;

use crate::cloud::bridge;
use crate::cloud::context::PodContext;
use crate::protocol::{Code, Peer, Refusal, RelayRequest};
use crate::route::Room;

/// Answers a request that came over a link. `room` limits the searches that this link may cause at once.
pub(super) fn answer(request: RelayRequest, shared: &PodContext, room: &Room) {
    match &request.from().peer {
        // An edge does not reach its own node through a pod: with that name it asks for a target of the cloud.
        Peer::Edge(edge) if edge == request.node() && request.instance().is_none() => dial(request, shared),
        Peer::Edge(edge) if edge == request.node() => relay(request, shared, room),
        Peer::Edge(_) | Peer::Cloud(_) => {
            if shared.reachable.iter().any(|glob| glob.matches(request.node())) {
                return relay(request, shared, room);
            }
            let node = request.node();
            let why = format!(
                "edges may not reach node {node}: their pod's mode.cloud.allow.nodes does not hold it"
            );
            request.refuse(Refusal::new(Code::NotAllowed, why));
        }
        Peer::Pod => {
            if let Some((request, plain)) = shared.route.pass(request) {
                bridge::lead(request, plain, shared);
            }
        }
    }
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

/// Searches for nodes and pods that run at once for all edges; each takes a few seconds at most.
pub(super) const MOST_SEARCHES: usize = 1000;
/// Of these, for one edge.
pub(super) const MOST_SEARCHES_OF_ONE: usize = 100;
