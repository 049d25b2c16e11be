//! Joins a session of another pod with one to a node that is linked here with the plain dialect. A plain link cannot
//! resume, so this pod is an end of both sessions.

use std::sync::Arc;

use tokio::time::timeout;
use tracing::info_span;

use crate::carry::join;
use crate::cloud::context::PodContext;
use crate::names::NodeName;
use crate::protocol::{Answer, Code, LinkSender, Offer, Refusal, RelayRequest, SessionTable, TableFull};
use crate::telemetry::Metrics;

/// Accepts the request as the session's end, and opens a plain session to the node.
pub(super) fn lead(request: RelayRequest, plain: Arc<LinkSender>, shared: &PodContext) {
    let node = request.node().clone();
    if let Some(offer) = request.offer() {
        let span = info_span!("bridge", session = %offer.id(), %node);
        let ground = &shared.ground;
        let (table, metrics) = (ground.table.clone(), ground.metrics.clone());
        ground.drain.spawn(span, open(offer, node, plain, table, metrics));
    }
}

/// Opens a plain session for another pod's offer, and copies between the two until both are done.
async fn open(
    offer: Offer,
    node: NodeName,
    plain: Arc<LinkSender>,
    table: Arc<SessionTable>,
    metrics: Metrics,
) {
    let client = offer.client().to_owned();
    let opening = match table.open(node.clone(), offer.target().clone(), offer.category(), client) {
        Ok(opening) => opening,
        Err(TableFull) => {
            return offer.refuse(Refusal::new(Code::Busy, "too many sessions at once on that pod"));
        }
    };
    opening.ask(&plain, None);
    let answer = tokio::select! {
        answer = timeout(offer.patience(), opening.answer()) => answer,
        // Dropping the opening withdraws the request.
        () = offer.withdrawn() => return,
    };
    match answer {
        Ok(Answer::Open) => {}
        Ok(Answer::Refused(refusal)) => return offer.refuse(refusal),
        Ok(Answer::NoPath) => {
            return offer.refuse(Refusal::new(Code::NotHere, format!("the link of node {node} is gone")));
        }
        Err(_) => {
            let why = format!("node {node} did not answer within {:?}", offer.patience());
            return offer.refuse(Refusal::new(Code::TargetTimeout, why));
        }
    }
    let alive = metrics.sessions.begin(FRONT);
    join(offer.accept(), opening.into_session(), alive).await;
}

/// The front end's name under which metrics count these sessions.
const FRONT: &str = "bridge";
