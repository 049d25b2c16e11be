//! Who wants to reach a node, or the cloud itself, through this pod, and where that leads.

use std::sync::Arc;

use futures_util::FutureExt as _;
use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use tracing::info_span;

use super::links::Shared;
use super::{bridge, inside};
use crate::registry::find::{NotFound, Way};
use crate::tunnel::{Asked, Code, Outbox, Peer, Refusal};

/// Somebody wants to reach a node through this pod. `searches`: places for those that his link may have under way.
pub(super) fn answer(asked: Asked, shared: &Shared, searches: &Arc<Semaphore>) {
    match &asked.from().peer {
        // An edge serves its own node itself, so by that name it means the cloud.
        Peer::Edge(edge) if edge == asked.node() => return inside::answer(asked, shared, searches),
        Peer::Edge(_) | Peer::Cloud(_) => return answer_edge(asked, shared, searches),
        Peer::Pod => {}
    }
    // At most one hop between pods: what comes from one is answered from our own links only.
    let linked = shared.registry.here(asked.node()).filter(|linked| !linked.outbox.is_closed());
    let Some(linked) = linked else {
        let why = format!("node {} is not linked to this pod", asked.node());
        return asked.refuse(Refusal::new(Code::NotHere, why));
    };
    if asked.instance().is_some_and(|wanted| linked.instance != Some(wanted)) {
        let why = format!("node {} is linked as another process", asked.node());
        return asked.refuse(Refusal::new(Code::Unknown, why));
    }
    lead(asked, &linked.outbox, shared);
}

/// An edge wants to reach a node: if the settings allow it, wherever that is.
fn answer_edge(asked: Asked, shared: &Shared, searches: &Arc<Semaphore>) {
    if !shared.reachable.iter().any(|glob| glob.matches(asked.node())) {
        let why = format!("edges may not reach node {} through this pod", asked.node());
        return asked.refuse(Refusal::new(Code::NotAllowed, why));
    }
    let (finder, node, instance) = (shared.finder.clone(), asked.node().clone(), asked.instance());
    let mut finding = Box::pin(async move { finder.find(&node, instance, None).await });
    // One that is here, or was found before, is no search.
    if let Some(found) = finding.as_mut().now_or_never() {
        return lead_on(asked, found, shared);
    }
    let Some((asked, places)) = placed(asked, shared, searches) else { return };
    let (span, shared) = (info_span!("find", node = %asked.node()), shared.clone());
    shared.ground.drain.clone().spawn(span, async move {
        lead_on(asked, finding.await, &shared);
        drop(places);
    });
}

/// Places for one search, among all and among those of one link. What finds none is refused: that ends what is to be
/// opened, and lets what is to be resumed try on.
pub(super) fn placed(
    asked: Asked,
    shared: &Shared,
    searches: &Arc<Semaphore>,
) -> Option<(Asked, [OwnedSemaphorePermit; 2])> {
    let code = if asked.instance().is_some() { Code::NotHere } else { Code::Busy };
    let Ok(own) = searches.clone().try_acquire_owned() else {
        asked.refuse(Refusal::new(code, "too many nodes are looked for at once on this link"));
        return None;
    };
    let Ok(place) = shared.searches.clone().try_acquire_owned() else {
        asked.refuse(Refusal::new(code, "too many nodes are looked for at once on this pod"));
        return None;
    };
    Some((asked, [own, place]))
}

fn lead_on(asked: Asked, found: Result<Way, NotFound>, shared: &Shared) {
    match found {
        Ok(way) => lead(asked, &way.outbox, shared),
        Err(missing) => {
            let why = format!("node {} is not connected{missing}", asked.node());
            asked.refuse(Refusal::new(Code::NotHere, why));
        }
    }
}

/// Passes it on by a link; if the node there speaks plain, this pod is the session's end.
fn lead(asked: Asked, link: &Arc<Outbox>, shared: &Shared) {
    if link.resumes {
        return asked.pass(link);
    }
    let node = asked.node().clone();
    if let Some(offer) = asked.offer() {
        let span = info_span!("bridge", session = %offer.id(), %node);
        let ground = &shared.ground;
        let (table, metrics) = (ground.table.clone(), ground.metrics.clone());
        ground.drain.spawn(span, bridge::carry(offer, node, link.clone(), table, metrics));
    }
}

/// Nodes and pods that are looked for at once for edges; each search takes a few seconds at most.
pub(super) const MOST_SEARCHES: usize = 1000;
/// Of these, for one edge.
pub(super) const MOST_SEARCHES_OF_ONE: usize = 100;
