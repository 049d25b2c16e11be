//! How to get there: from a request to an open session.

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use tokio::time::{Instant, timeout_at};

use crate::names::{NodeName, Target};
use crate::registry::{Linked, Place, Registry};
use crate::tunnel::{Answer, Category, Code, Full, Parked, Refusal, Session, Table};

/// What a front end asks for.
#[derive(Debug, Clone)]
pub struct Request {
    /// Which node.
    pub node: NodeName,
    /// What to dial there. Its host may be the node itself.
    pub target: Target,
    /// Which front end asks.
    pub category: Category,
    /// Who asks (address, user), for the log of the far end.
    pub client: String,
}

/// When a node was last linked here.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Seen(pub Duration);

/// Why a target could not be reached. Each sentence is shown to the client as it is.
#[derive(Debug, thiserror::Error)]
pub enum RouteError {
    /// Not linked. Usual cause: the edge is down, or still connecting.
    #[error("node {node} is not connected{}", last_seen(*.seen))]
    Offline {
        /// Who was asked for.
        node: NodeName,
        /// When it was last linked, if ever.
        seen: Option<Seen>,
    },
    /// The link is fine; the edge refused.
    #[error("node {node}: {refusal}")]
    Refused {
        /// Who refused.
        node: NodeName,
        /// Why.
        refusal: Refusal,
    },
    /// No answer within the time to open.
    #[error("node {node} did not answer within {patience:?}")]
    Timeout {
        /// Who was asked.
        node: NodeName,
        /// How long we waited.
        patience: Duration,
    },
    /// This pod has as many sessions as it may, or is draining.
    #[error("{0}")]
    Busy(&'static str),
}

/// Finds the way: opens sessions, and finds new paths for those that lost theirs. Cheap to clone.
#[derive(Debug, Clone)]
pub struct Route {
    registry: Arc<Registry>,
    table: Arc<Table>,
    /// How long opening may take in all.
    patience: Duration,
    /// How long a session may be without a path.
    grace: Duration,
}

impl Route {
    /// Ways to the nodes of `registry`.
    pub fn new(registry: Arc<Registry>, table: Arc<Table>, patience: Duration, grace: Duration) -> Self {
        Self { registry, table, patience, grace }
    }

    /// Opens a session to the request's target. Cancel safe: a dropped call leaves nothing behind.
    ///
    /// # Errors
    ///
    /// Why there is none, in words for the client.
    pub async fn open(&self, request: Request) -> Result<Session, RouteError> {
        let Request { node, target, category, client } = request;
        let until = Instant::now() + self.patience;
        let late = || RouteError::Timeout { node: node.clone(), patience: self.patience };
        let mut link = match self.registry.find(&node) {
            Place::Here(linked) => linked,
            Place::Nowhere(seen) => return Err(RouteError::Offline { node, seen: seen.map(Seen) }),
        };
        let opening = self.table.open(node.clone(), target, category, client);
        let opening = opening.map_err(|Full| RouteError::Busy("too many sessions at once on this pod"))?;
        loop {
            opening.ask(&link.outbox);
            match timeout_at(until, opening.answer()).await.map_err(|_| late())? {
                Answer::Open => return Ok(opening.into_session()),
                Answer::Refused(refusal) => return Err(RouteError::Refused { node, refusal }),
                Answer::NoPath => {
                    let next = self.registry.wait(&node, Some(&link.outbox), until).await;
                    link = next.ok_or(RouteError::Offline { node: node.clone(), seen: None })?;
                }
            }
        }
    }

    /// Looks for a new path for a session until it has one, is over, or the grace time is.
    pub async fn seek(&self, parked: Parked) {
        let until = Instant::now() + self.grace;
        let mut last: Option<Linked> = None;
        while parked.seeks() {
            let not = last.as_ref().map(|linked| linked.outbox.as_ref());
            let Some(linked) = self.registry.wait(parked.node(), not, until).await else {
                let why = format!("node {} did not come back within {:?}", parked.node(), self.grace);
                return parked.give_up(Refusal::new(Code::GivenUp, why));
            };
            if !parked.belongs_to(linked.instance) {
                let why = format!("node {} came back as another process", parked.node());
                return parked.give_up(Refusal::new(Code::Unknown, why));
            }
            parked.resume(&linked.outbox);
            // Late is as good as lost: the link ends, or another one comes.
            if timeout_at(until, parked.answered()).await.is_err() {
                let why = format!("node {} did not resume", parked.node());
                return parked.give_up(Refusal::new(Code::GivenUp, why));
            }
            last = Some(linked);
        }
    }
}

fn last_seen(seen: Option<Seen>) -> impl fmt::Display {
    seen.map(|s| format!(", last seen {} ago", short(s.0))).unwrap_or_default()
}

/// A duration as a person says it: `45s`, `3m`, `2h`.
fn short(d: Duration) -> String {
    match d.as_secs() {
        s @ 0..120 => format!("{s}s"),
        s @ 120..7200 => format!("{}m", s / 60),
        s => format!("{}h", s / 3600),
    }
}
