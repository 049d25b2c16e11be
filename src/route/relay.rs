//! Paths for sessions that others ask to have relayed through this pod, found by the same search as for our own.

use std::pin::pin;
use std::sync::Arc;
use std::time::Duration;

use futures_util::FutureExt as _;
use tokio::sync::Semaphore;
use tokio::time::Instant;

use super::search::Search;
use super::{MOVING, Route};
use crate::protocol::{Code, LinkSender, Peer, Refusal, RelayRequest};
use crate::registry::NotFound;

/// How many searches may run at once: for one link, and for all together. A node that is linked here, or remembered,
/// needs no search.
#[derive(Debug, Clone)]
pub struct Room {
    /// Searches for this link.
    pub own: Arc<Semaphore>,
    /// Searches for all links.
    pub all: Arc<Semaphore>,
}

impl Route {
    /// Relays an edge's request to the node it names, or to the pod that has dialled for the edge, and goes on looking
    /// while the answer is *not here*.
    ///
    /// Only its opener moves a session to another path. So once a request may have reached its acceptor, this pod does
    /// not try a second path by itself: it sends the opener Lost, and what it has learned serves the opener's next
    /// attempt.
    ///
    /// Returns the request with the node's link if that is a plain one: this pod is then to be the session's end.
    pub async fn relay(&self, request: RelayRequest, room: &Room) -> Option<(RelayRequest, Arc<LinkSender>)> {
        let (node, instance) = (request.node().clone(), request.instance());
        // An edge serves its own node itself, so by that name it means the cloud.
        let own = matches!(&request.from().peer, Peer::Edge(edge) if *edge == node);
        let paths = if own { self.paths.of_pods() } else { self.paths.clone() };
        let resumes = request.target().is_none();
        let patience = if resumes { LOOKED_FOR } else { self.patience };
        let until = Instant::now() + patience;
        let mut search = Search::new(&paths, &node, instance, until, self.chance);
        if !resumes {
            search = search.at_most(MOVING);
        }
        let mut first = true;
        loop {
            let looking = async { if first { search.first().await } else { search.next().await } };
            let found = tokio::select! {
                biased;
                () = request.unwanted() => return None,
                found = placed(looking, room) => found,
            };
            match found {
                Ok(Ok(())) => {}
                Ok(Err(missing)) => {
                    request.refuse(refusal(&missing, own, resumes));
                    return None;
                }
                Err(why) => {
                    let code = if resumes { Code::NotHere } else { Code::Busy };
                    request.refuse(Refusal::new(code, why));
                    return None;
                }
            }
            if let Some(plain) = search.plain() {
                return Some((request, plain));
            }
            if !search.ask(|path| request.try_path(&path.sender), request.path_failed()).await {
                return None;
            }
            first = false;
        }
    }

    /// Relays another pod's request to a node that is linked to this one. That pod has searched already, and only our
    /// own links are looked at, so there is at most one hop between pods.
    ///
    /// Returns the request as [`Self::relay`] does.
    pub fn pass(&self, request: RelayRequest) -> Option<(RelayRequest, Arc<LinkSender>)> {
        let Some(linked) = self.paths.here(request.node()).filter(|linked| !linked.sender.is_closed()) else {
            let why = format!("node {} is not linked to this pod", request.node());
            request.refuse(Refusal::new(Code::NotHere, why));
            return None;
        };
        if request.instance().is_some_and(|wanted| linked.instance != Some(wanted)) {
            let why = format!("node {} is linked as another process", request.node());
            request.refuse(Refusal::new(Code::Unknown, why));
            return None;
        }
        if !linked.sender.resumes {
            return Some((request, linked.sender));
        }
        request.pass(&linked.sender);
        None
    }
}

/// Runs a search, and takes a permit for it unless it is ready at once. An error names the owner of the permits that
/// are used up.
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

/// The answer to the opener if no path was found. For an Open it is final, as the search has taken as long as a client
/// waits. After a Resume the opener may try again.
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

/// How long a pod looks for the other end of a session before the opener tries again. Other pods are known by names and
/// lists that take up to 5 s to follow.
const LOOKED_FOR: Duration = Duration::from_secs(6);
