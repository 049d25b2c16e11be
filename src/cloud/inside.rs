//! What an edge wants of the cloud itself: a target that this pod dials, or a session whose other end is at a pod.

use std::fmt::Write as _;
use std::sync::Arc;
use std::time::Duration;

use tokio::sync::Semaphore;
use tokio::time::{Instant, sleep};
use tracing::info_span;

use super::asked::placed;
use super::links::Shared;
use crate::names::Instance;
use crate::registry::siblings::Siblings;
use crate::tunnel::{Asked, Code, Outbox, Refusal};

/// Dials for an edge, or leads it to the pod that has done so.
pub(super) fn answer(asked: Asked, shared: &Shared, searches: &Arc<Semaphore>) {
    if let Some(instance) = asked.instance() {
        return resume(asked, instance, shared, searches);
    }
    if shared.stopping.is_cancelled() {
        // So it asks the pod that it links to next.
        return asked.refuse(Refusal::new(Code::NotHere, "this pod is stopping"));
    }
    if let Some(offer) = asked.offer() {
        shared.backend.take(offer);
    }
}

/// The session's other end is at another pod.
fn resume(asked: Asked, instance: Instance, shared: &Shared, searches: &Arc<Semaphore>) {
    let Some(siblings) = shared.siblings.clone() else {
        return asked.refuse(Refusal::new(Code::Unknown, GONE));
    };
    let Some((asked, places)) = placed(asked, shared, searches) else { return };
    shared.ground.drain.spawn(info_span!("holder", ?instance), async move {
        match holder(&siblings, instance, &asked).await {
            Ok(link) => asked.pass(&link),
            Err(why) => asked.refuse(why),
        }
        drop(places);
    });
}

/// The link to the pod that is this process. That it is gone is believed only once all pods have answered and none new
/// has become known: the session ends then.
async fn holder(siblings: &Siblings, instance: Instance, asked: &Asked) -> Result<Arc<Outbox>, Refusal> {
    let until = Instant::now() + LOOKED_FOR;
    loop {
        let trouble = match siblings.process(instance).await {
            Ok(link) => return Ok(link),
            Err(trouble) => trouble,
        };
        if Instant::now() < until && asked.is_wanted() {
            sleep(AGAIN).await;
            continue;
        }
        if trouble.is_empty() {
            return Err(Refusal::new(Code::Unknown, GONE));
        }
        let mut why = "the pod that holds this session is not found".to_owned();
        for pod in trouble {
            // Writing to a text cannot fail.
            let _ = write!(why, "; {pod}");
        }
        return Err(Refusal::new(Code::NotHere, why));
    }
}

/// Why a session with the cloud itself ends when its pod does: nobody else has the connection to its target.
const GONE: &str = "the pod that dialled for this session is gone";
/// How long a pod is looked for: others are known by names and lists that take up to 5 s to follow.
const LOOKED_FOR: Duration = Duration::from_secs(6);
/// Between two looks.
const AGAIN: Duration = Duration::from_millis(500);
