//! What others want to reach through this pod: the same search finds its way that finds those of our own sessions.

use std::pin::pin;
use std::sync::Arc;
use std::time::Duration;

use futures_util::FutureExt as _;
use tokio::sync::Semaphore;
use tokio::time::Instant;

use super::search::Search;
use super::{MOVING, Route};
use crate::protocol::{Code, LinkSender, Peer, Refusal, RelayRequest};
use crate::registry::find::NotFound;

/// How many ways may be looked for at once: by one link, and by all together. What is here or was found before needs no
/// looking.
#[derive(Debug, Clone)]
pub struct Room {
    /// For this link.
    pub own: Arc<Semaphore>,
    /// For all.
    pub all: Arc<Semaphore>,
}

impl Route {
    /// Leads what an edge asks of a node, or of the pod that has dialled for it, to where that is, and goes on to look
    /// while the answer is *not here*. Nobody but its opener moves a session: once it may have reached its acceptor, the
    /// opener hears that the path is lost, and what was learned here serves the next attempt.
    ///
    /// Returns it with the node's link if that speaks plain: then this pod is to be the session's end.
    pub async fn relay(&self, asked: RelayRequest, room: &Room) -> Option<(RelayRequest, Arc<LinkSender>)> {
        let (node, instance) = (asked.node().clone(), asked.instance());
        // An edge serves its own node itself, so by that name it means the cloud.
        let own = matches!(&asked.from().peer, Peer::Edge(edge) if *edge == node);
        let ways = if own { self.ways.of_pods() } else { self.ways.clone() };
        let patience = if instance.is_some() { LOOKED_FOR } else { self.patience };
        let mut search = Search::new((&ways, self.chance), &node, instance, Instant::now() + patience);
        if instance.is_none() {
            search = search.at_most(MOVING);
        }
        let mut first = true;
        loop {
            let looking = async { if first { search.first().await } else { search.next().await } };
            let found = tokio::select! {
                biased;
                () = asked.unwanted() => return None,
                found = placed(looking, room) => found,
            };
            match found {
                Ok(Ok(())) => {}
                Ok(Err(missing)) => {
                    asked.refuse(refusal(&missing, own, instance.is_some()));
                    return None;
                }
                Err(why) => {
                    let code = if instance.is_some() { Code::NotHere } else { Code::Busy };
                    asked.refuse(Refusal::new(code, why));
                    return None;
                }
            }
            if let Some(plain) = search.plain() {
                return Some((asked, plain));
            }
            if !search.ask(|link| asked.try_way(link), asked.tried()).await {
                return None;
            }
            first = false;
        }
    }
}

/// Looks, in a place if it takes longer than a look at what is known. An error says for whom there are no places left.
async fn placed<T>(looking: impl Future<Output = T>, room: &Room) -> Result<T, &'static str> {
    let mut looking = pin!(looking);
    if let Some(found) = looking.as_mut().now_or_never() {
        return Ok(found);
    }
    let own = room.own.try_acquire();
    let _own = own.map_err(|_| "too many nodes are looked for at once on this link")?;
    let all = room.all.try_acquire();
    let _all = all.map_err(|_| "too many nodes are looked for at once on this pod")?;
    Ok(looking.await)
}

/// What the opener hears if there is no way. To open, that is the end: it was looked for as long as a client waits.
/// To resume, it may try on.
fn refusal(missing: &NotFound, own: bool, resumes: bool) -> Refusal {
    if own && missing.trouble.is_empty() {
        return Refusal::new(Code::Unknown, "the pod that dialled for this session is gone");
    }
    if own {
        return Refusal::new(Code::NotHere, format!("the pod that holds this session is not found{missing}"));
    }
    let code = match (resumes, missing.another) {
        (false, _) => Code::TargetUnreachable,
        (true, false) => Code::NotHere,
        (true, true) => Code::Unknown,
    };
    Refusal::new(code, format!("it {}", missing.sentence()))
}

/// How long the other end of a session is looked for, before its opener tries anew: pods are known by names and lists
/// that take up to 5 s to follow.
const LOOKED_FOR: Duration = Duration::from_secs(6);
