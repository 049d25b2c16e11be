//! How to get there: from a request to an open session.

use std::fmt;
use std::time::Duration;

use crate::names::{NodeName, Target};
use crate::tunnel::{Category, Refusal, Session};

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

/// STUB (being written): finds the way.
#[derive(Debug, Clone)]
pub struct Route {}

impl Route {
    /// Opens a session to the request's target. Cancel safe: a dropped call leaves nothing behind.
    #[allow(clippy::todo, clippy::missing_errors_doc)]
    pub async fn open(&self, _request: Request) -> Result<Session, RouteError> {
        todo!()
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
