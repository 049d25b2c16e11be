//! Requests that come over links: which are relayed to a node, which this pod dials, which it refuses.

use tracing::info_span;

use crate::cloud::bridge;
use crate::cloud::context::PodContext;
use crate::protocol::{Code, Peer, Refusal, RelayRequest};
use crate::route::Room;

/// Answers a request that came over a link. `room` limits the searches that this link may cause at once.
pub(super) fn answer(asked: RelayRequest, shared: &PodContext, room: &Room) {
    match &asked.from().peer {
        // An edge does not reach its own node through a pod: with that name it asks for a target of the cloud.
        Peer::Edge(edge) if edge == asked.node() && asked.instance().is_none() => dial(asked, shared),
        Peer::Edge(edge) if edge == asked.node() => relay(asked, shared, room),
        Peer::Edge(_) | Peer::Cloud(_) => {
            if shared.reachable.iter().any(|glob| glob.matches(asked.node())) {
                return relay(asked, shared, room);
            }
            let why = format!("edges may not reach node {} through this pod", asked.node());
            asked.refuse(Refusal::new(Code::NotAllowed, why));
        }
        Peer::Pod => {
            if let Some((asked, plain)) = shared.route.pass(asked) {
                bridge::lead(asked, plain, shared);
            }
        }
    }
}

/// Relays the request in a task of its own, as the search for a path may take seconds.
fn relay(asked: RelayRequest, shared: &PodContext, room: &Room) {
    let span = info_span!("relay", node = %asked.node());
    let (room, shared) = (room.clone(), shared.clone());
    shared.ground.drain.clone().spawn(span, async move {
        if let Some((asked, plain)) = Box::pin(shared.route.relay(asked, &room)).await {
            bridge::lead(asked, plain, &shared);
        }
    });
}

/// Dials a target of the cloud for an edge.
fn dial(asked: RelayRequest, shared: &PodContext) {
    if shared.stopping.is_cancelled() {
        // With this code the edge asks the pod that it links to next.
        return asked.refuse(Refusal::new(Code::NotHere, "this pod is stopping"));
    }
    if let Some(offer) = asked.offer() {
        shared.backend.take(offer);
    }
}

/// Searches for nodes and pods that run at once for all edges; each takes a few seconds at most.
pub(super) const MOST_SEARCHES: usize = 1000;
/// Of these, for one edge.
pub(super) const MOST_SEARCHES_OF_ONE: usize = 100;
