//! What a link at work asks of the pod, and what becomes of its sessions when it ends or is left.

use std::sync::Arc;

use tokio::sync::Semaphore;
use tracing::{field, info, info_span};

use crate::cloud::context::PodContext;
use crate::cloud::requests;
use crate::names::{Instance, NodeName};
use crate::protocol::{Code, Event, Found, Link, LinkEnded, LinkSender, Refusal};
use crate::route::Room;

/// Drives a link until it ends, then looks for new paths for its sessions.
pub(super) async fn run(mut link: Link, shared: &PodContext) -> LinkEnded {
    shared.ground.metrics.links.inc();
    let room = room(shared);
    let why = loop {
        match link.next().await {
            Ok(event) => take(event, &link.sender, &room, shared),
            Err(why) => break why,
        }
    };
    ended(&link, &why, shared);
    why
}

/// The searches that one more link may cause at once.
pub(super) fn room(shared: &PodContext) -> Room {
    let own = Arc::new(Semaphore::new(requests::MOST_SEARCHES_OF_ONE));
    Room { own, all: shared.searches.clone() }
}

/// Does what the link of `sender` asks for.
pub(super) fn take(event: Event, sender: &Arc<LinkSender>, room: &Room, shared: &PodContext) {
    match event {
        Event::Offer(offer) => {
            // Never happens: a pod gets its requests as `Event::Request` first.
            let why = format!("edges may not reach {} through this pod", offer.target());
            offer.refuse(Refusal::new(Code::NotAllowed, why));
        }
        Event::Parked(parked) => shared.route.mend(parked, &shared.ground.drain),
        Event::RelayRequest(request) => requests::answer(request, shared, room),
        Event::Find(node, question) => shared.finder.answer(sender, &node, question),
        Event::Found(node, found) => {
            if let Some(at) = shared.finder.on_found(sender, &node, found.clone()) {
                make_way(at, node, Some(found), shared);
            }
        }
        Event::Conflict(node, conflict) => shared.finder.gives_way(&node, conflict),
        Event::Drain(_) => {
            // The edge has another link now, over which it is found.
            shared.registry.leave(sender);
            shared.ground.table.release(sender, |_| true);
        }
        Event::Load(load) => {
            if let Some(siblings) = &shared.siblings {
                siblings.on_load(sender, load);
            }
        }
    }
}

/// A link has ended: new paths are looked for, for its sessions.
pub(super) fn ended(link: &Link, why: &LinkEnded, shared: &PodContext) {
    shared.ground.metrics.links.dec();
    shared.ground.metrics.links_ended.count(why.name());
    let parked = link.end(why);
    let node = link.sender.peer.node().map(field::display);
    info!(link = %link.sender.id, node, %why, sessions = parked.len(), "link has ended");
    for parked in parked {
        shared.route.mend(parked, &shared.ground.drain);
    }
}

/// Has the sessions of a link that is not to carry them any more go on over its node's current one. The link itself stays:
/// if it was silent for the process that dialled it, and answers first after all, the new one ends, and they come back.
pub(super) fn move_from(left: &Arc<LinkSender>, shared: &PodContext) {
    let table = &shared.ground.table;
    table.release(left, |_| true);
    let parked = table.leave(left, |_, _| true);
    let node = left.peer.node().map(field::display);
    info!(link = %left.id, node, sessions = parked.len(), "the far end has another link: sessions go on there");
    for parked in parked {
        shared.route.mend(parked, &shared.ground.drain);
    }
}

/// After a node has linked anew at the pod `at`, here or as was `found` elsewhere: pings its older links, and drops
/// those that do not answer.
pub(super) fn make_way(at: Instance, node: NodeName, found: Option<Found>, shared: &PodContext) {
    if shared.siblings.is_none() {
        return;
    }
    // Beyond that many at once, the silence of a dead link shows that it is dead.
    let Ok(permit) = shared.moves.clone().try_acquire_owned() else { return };
    let (span, shared) = (info_span!("moved", %node), shared.clone());
    shared.ground.drain.clone().spawn(span, async move {
        let contest = async {
            if let Some(found) = found {
                shared.finder.contest(at, &node, found).await;
            }
        };
        let table = &shared.ground.table;
        let (parked, ()) = tokio::join!(shared.finder.make_way(at, &node, table), contest);
        for parked in parked {
            shared.route.mend(parked, &shared.ground.drain);
        }
        drop(permit);
    });
}

/// Nodes whose older links are pinged at once. Bounds what a pod that announces nodes without end can cause.
pub(super) const MOST_MOVES: usize = 10_000;
