//! Who wants to reach a node, or the cloud itself, through this pod, and where that leads.

use std::sync::Arc;

use tracing::info_span;

use super::links::Shared;
use super::{bridge, inside};
use crate::tunnel::{Asked, Code, Outbox, Peer, Refusal};

/// Somebody wants to reach a node through this pod.
pub(super) fn answer(asked: Asked, shared: &Shared) {
    match &asked.from().peer {
        // An edge serves its own node itself, so by that name it means the cloud.
        Peer::Edge(edge) if edge == asked.node() => return inside::answer(asked, shared),
        Peer::Edge(_) | Peer::Cloud(_) => return answer_edge(asked, shared),
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
fn answer_edge(asked: Asked, shared: &Shared) {
    if !shared.reachable.iter().any(|glob| glob.matches(asked.node())) {
        let why = format!("edges may not reach node {} through this pod", asked.node());
        return asked.refuse(Refusal::new(Code::NotAllowed, why));
    }
    let Ok(place) = shared.searches.clone().try_acquire_owned() else {
        // That ends what is to be opened, and lets what is to be resumed try on.
        let code = if asked.instance().is_some() { Code::NotHere } else { Code::Busy };
        return asked.refuse(Refusal::new(code, "too many nodes are looked for at once on this pod"));
    };
    let (span, shared) = (info_span!("find", node = %asked.node()), shared.clone());
    shared.ground.drain.clone().spawn(span, async move {
        let node = asked.node().clone();
        match shared.finder.find(&node, asked.instance(), None).await {
            Ok(way) => lead(asked, &way.outbox, &shared),
            Err(missing) => {
                let why = format!("node {node} is not connected{missing}");
                asked.refuse(Refusal::new(Code::NotHere, why));
            }
        }
        drop(place);
    });
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
