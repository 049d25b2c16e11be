//! Paths for sessions: from a request to an open session, and from a session without a path to its next one.

mod paths;
mod relay;
mod search;

use std::sync::Arc;
use std::time::Duration;

use tokio::time::{Instant, timeout_at};
use tracing::info_span;

use crate::drain::Drain;
use crate::names::{NodeName, SessionId, Target};
use crate::protocol::{Answer, Category, Code, Opening, Parked, Refusal, Session, SessionTable, TableFull};
use crate::registry::{Finder, NotFound, Uplinks};

use paths::PathSource;
pub use relay::Room;
use search::Search;

/// What a front end asks for.
#[derive(Debug, Clone)]
pub struct Request {
    /// The node at which the target is.
    pub node: NodeName,
    /// What to dial there. Its host may be the node itself.
    pub target: Target,
    /// The front end that asks.
    pub category: Category,
    /// The client (user and address), for the log of the far end.
    pub client: String,
}

/// Why a target could not be reached. Each sentence is shown to the client as it is.
#[derive(Debug, thiserror::Error)]
pub enum RouteError {
    /// The node is not linked to any pod. The usual cause: its edge is down, or still connecting.
    #[error("node {node} {}", missing.sentence())]
    Offline {
        /// The node that was asked for.
        node: NodeName,
        /// Which pods were asked, and when the node was last seen.
        missing: NotFound,
    },
    /// The node's edge refused; its link works.
    #[error("node {node}: {refusal}")]
    Refused {
        /// The node that refused.
        node: NodeName,
        /// The edge's reason.
        refusal: Refusal,
    },
    /// No answer within the time to open.
    #[error("node {node} did not answer within {patience:?}")]
    Timeout {
        /// The node that was asked.
        node: NodeName,
        /// How long the answer was waited for.
        patience: Duration,
    },
    /// This pod has as many sessions as it may, or is draining.
    #[error("{0}")]
    Busy(&'static str),
}

/// Why no session was opened, and the id of the one that was asked for, if it came to that: the far end knows it.
#[derive(Debug, thiserror::Error)]
#[error("{why}")]
pub struct NotOpened {
    /// The id that the far end may have logged.
    pub session: Option<SessionId>,
    /// Why.
    #[source]
    pub why: RouteError,
}

impl From<RouteError> for NotOpened {
    fn from(why: RouteError) -> Self {
        Self { session: None, why }
    }
}

/// Opens sessions, and finds new paths for those that lost theirs. Cheap to clone.
#[derive(Debug, Clone)]
pub struct Route {
    paths: PathSource,
    table: Arc<SessionTable>,
    /// How long opening may take in all.
    patience: Duration,
    /// How long a session may be without a path.
    grace: Duration,
    chance: Chance,
}

/// A random number from 0 to 1, for the pauses between tries.
pub type Chance = fn() -> f64;

impl Route {
    /// For a pod: paths lead to the nodes that `finder` finds.
    pub fn new(finder: Arc<Finder>, table: Arc<SessionTable>, patience: Duration, grace: Duration) -> Self {
        Self { paths: PathSource::Pod(finder), table, patience, grace, chance: rand::random }
    }

    /// For an edge: every path leads over one of its links to the cloud.
    pub fn from_edge(
        uplinks: Arc<Uplinks>,
        table: Arc<SessionTable>,
        patience: Duration,
        grace: Duration,
    ) -> Self {
        Self { paths: PathSource::Edge(uplinks), table, patience, grace, chance: rand::random }
    }

    /// With pauses drawn from `chance`, for simulations with a seed.
    #[must_use]
    pub fn with_chance(self, chance: Chance) -> Self {
        Self { chance, ..self }
    }

    /// Opens a session to the request's target. Cancel safe: a dropped call leaves nothing behind.
    ///
    /// # Errors
    ///
    /// No session could be opened; the sentence is fit for the client.
    pub async fn open(&self, request: Request) -> Result<Session, NotOpened> {
        let Request { node, target, category, client } = request;
        let until = Instant::now() + self.patience;
        let late = || RouteError::Timeout { node: node.clone(), patience: self.patience };
        let mut search = Search::new(&self.paths, &node, None, until, self.chance);
        if let PathSource::Pod(_) = self.paths {
            search = search.at_most(MOVING);
        }
        if let Err(missing) = search.first().await {
            return Err(RouteError::Offline { node, missing }.into());
        }
        let opening = self.table.open(node.clone(), target, category, client);
        let opening = opening.map_err(|TableFull| {
            RouteError::Busy(match self.paths {
                PathSource::Pod(_) | PathSource::Pods(_) => {
                    "this pod has no room left: [mode.cloud.session] max or memory of the pod"
                }
                PathSource::Edge(_) => "this edge has no room left: [mode.edge.session] memory of the edge",
            })
        })?;
        let asked = timeout_at(until, ask(&opening, &mut search)).await.unwrap_or_else(|_| Err(late()));
        match asked {
            Ok(()) => Ok(opening.into_session()),
            Err(why) => Err(NotOpened { session: Some(opening.id()), why }),
        }
    }

    /// Has a new path looked for, as [`Self::seek`] does, in a task of its own.
    pub fn mend(&self, parked: Parked, drain: &Drain) {
        let (route, span) = (self.clone(), info_span!("seek", session = %parked.id()));
        drain.spawn(span, async move { route.seek(parked).await });
    }

    /// Looks for paths for openings that were given up when they had none, so that their acceptors get the reset, until
    /// draining begins.
    pub async fn mend_given_up(self, drain: Drain) {
        loop {
            tokio::select! {
                () = drain.draining() => return,
                parked = self.table.given_up() => self.mend(parked, &drain),
            }
        }
    }

    /// Looks for a new path for a session until the session has one or is over, or the grace time has passed.
    ///
    /// At most one task looks for a path of a session, because there is at most one [`Parked`] of it. If the new path
    /// is lost before this notices, the loop goes on with the same [`Parked`], which is the right to look for a path:
    /// [`Parked::seeks`] gives it up only when it finds, under the session's lock, that no path is needed. So a loss is
    /// never left without a seeker.
    pub async fn seek(&self, parked: Parked) {
        let until = Instant::now() + self.grace;
        let node = parked.node().clone();
        let far = self.paths.call(&node);
        let mut search = Search::new(&self.paths, &node, parked.instance(), until, self.chance);
        search.again(parked.again()).await;
        while parked.seeks() {
            if let Err(missing) = search.next().await {
                let (code, why) = if missing.another {
                    (Code::Unknown, format!("{far} came back as another process"))
                } else {
                    (Code::GivenUp, format!("{far} did not come back within {:?}", self.grace))
                };
                return parked.give_up(Refusal::new(code, why));
            }
            let answered = search.ask(|path| parked.resume(&path.sender), parked.answered());
            if timeout_at(until, answered).await.is_err() {
                let why = format!("{far} did not resume");
                return parked.give_up(Refusal::new(Code::GivenUp, why));
            }
        }
    }
}

/// Asks on one path after another until the session is open or refused for good.
async fn ask(opening: &Opening, search: &mut Search<'_>) -> Result<(), RouteError> {
    loop {
        match search.ask(|path| opening.ask(&path.sender, path.instance), opening.answer()).await {
            Answer::Open => return Ok(()),
            Answer::Refused(refusal) => {
                return Err(RouteError::Refused { node: search.node().clone(), refusal });
            }
            Answer::NoPath => {
                let node = search.node().clone();
                search.next().await.map_err(|missing| RouteError::Offline { node, missing })?;
            }
        }
    }
}

/// How long a new session waits for a node that was linked a moment ago, or was remembered at a pod that no longer has
/// it.
const MOVING: Duration = Duration::from_secs(3);
