//! Who wants to reach a node through this pod, and where that leads.

use std::sync::Arc;

use tracing::info_span;

use super::bridge;
use super::links::Shared;
use crate::tunnel::{Asked, Code, Outbox, Peer, Refusal};

/// Somebody wants to reach a node through this pod.
pub(super) fn answer(asked: Asked, shared: &Shared) {
    if asked.from().peer != Peer::Pod {
        return answer_edge(asked, shared);
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
        return asked.refuse(Refusal::new(Code::Busy, "too many nodes are looked for at once on this pod"));
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

/// Nodes that are looked for at once for edges; each search takes about 2 s at most.
pub(super) const MOST_SEARCHES: usize = 1000;
