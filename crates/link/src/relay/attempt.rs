//! An Open or Resume to be relayed, and the search for its path.

use std::sync::Arc;

use tokio::sync::Notify;

use crate::link::Link;
use tunnel_proto::frame::{Opener, SessionFrame, SessionKey};
use tunnel_proto::names::Target;

/// One Open or Resume to be relayed, with the link it came from. Its epoch tells answers to older ones apart.
#[derive(Debug, Clone)]
pub(crate) struct Attempt {
    pub(crate) key: SessionKey,
    pub(crate) epoch: u64,
    pub(crate) from: Arc<Link>,
    /// The opener of the session.
    pub(crate) opener: Option<Opener>,
    pub(crate) target: Target,
    /// At whose cost its answers are: the edge or user that asks, or the client that a peer names.
    pub(crate) client: Arc<str>,
    /// Notified whenever its binding has changed, for the search for its path.
    pub(crate) changed: Arc<Notify>,
}

/// The result of registering an Open or Resume.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum BindOutcome {
    /// The newest: it has the binding now.
    Newest,
    /// Late: there was a newer one.
    Stale,
    /// Another opener opened the session.
    WrongOpener,
}

/// How far a relayed Open or Resume has got; derived from the session's binding.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum AttemptState {
    /// It has no path: it was not passed on yet, or the acceptor was not there.
    Searching,
    /// It was passed on and is not answered yet.
    Pending,
    /// It was answered, or is no longer current.
    Done,
}

/// Ends the search for a path when dropped.
#[derive(Debug)]
pub(super) struct SearchGuard(pub(super) Arc<Notify>);

impl Attempt {
    /// Creates an attempt for an Open or Resume. Returns `None` for any other frame.
    pub(crate) fn new(from: Arc<Link>, key: SessionKey, frame: &SessionFrame) -> Option<Self> {
        let (SessionFrame::Open { epoch, opener, target, .. }
        | SessionFrame::Resume { epoch, opener, target, .. }) = frame
        else {
            return None;
        };
        let opener = opener.clone();
        let target = target.clone();
        let client = Arc::default();
        Some(Self { key, epoch: *epoch, from, opener, target, client, changed: Arc::default() })
    }
}

impl Drop for SearchGuard {
    fn drop(&mut self) {
        self.0.notify_one();
    }
}
