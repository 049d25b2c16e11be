//! Who wants to reach a node, or the cloud itself, through this pod, and where that leads.

use tracing::info_span;

use crate::cloud::bridge;
use crate::cloud::context::PodContext;
use crate::protocol::{Code, Peer, Refusal, RelayRequest};
use crate::route::Room;

/// Somebody wants to reach a node through this pod. `room`: for what his link may look for at once.
pub(super) fn answer(asked: RelayRequest, shared: &PodContext, room: &Room) {
    match &asked.from().peer {
        // An edge serves its own node itself, so by that name it means the cloud.
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

/// Looks for a way as long as it takes.
fn relay(asked: RelayRequest, shared: &PodContext, room: &Room) {
    let span = info_span!("relay", node = %asked.node());
    let (room, shared) = (room.clone(), shared.clone());
    shared.ground.drain.clone().spawn(span, async move {
        if let Some((asked, plain)) = Box::pin(shared.route.relay(asked, &room)).await {
            bridge::lead(asked, plain, &shared);
        }
    });
}

/// An edge wants a target of the cloud itself: this pod dials it.
fn dial(asked: RelayRequest, shared: &PodContext) {
    if shared.stopping.is_cancelled() {
        // So it asks the pod that it links to next.
        return asked.refuse(Refusal::new(Code::NotHere, "this pod is stopping"));
    }
    if let Some(offer) = asked.offer() {
        shared.backend.take(offer);
    }
}

/// Nodes and pods that are looked for at once for edges; each search takes a few seconds at most.
pub(super) const MOST_SEARCHES: usize = 1000;
/// Of these, for one edge.
pub(super) const MOST_SEARCHES_OF_ONE: usize = 100;
