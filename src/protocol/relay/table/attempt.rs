//! One Open or Resume that a pod has to relay, and who seeks a path for it.

use std::sync::Arc;

use tokio::sync::Notify;

use crate::protocol::link::sender::LinkSender;
use crate::protocol::wire::frame::{Code, SessionFrame, SessionKey};
use crate::protocol::wire::opener::Opener;

/// Which Open or Resume is meant: an answer to an older one counts no more.
#[derive(Debug, Clone)]
pub(crate) struct Attempt {
    pub(crate) key: SessionKey,
    pub(crate) epoch: u64,
    pub(crate) from: Arc<LinkSender>,
    /// Who opened the session, where that is known.
    pub(crate) opener: Option<Opener>,
    /// Notified whenever its binding has changed, for the search for its path.
    pub(crate) changed: Arc<Notify>,
}

/// What an Open or Resume is to the session's binding.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Claim {
    /// The newest: it has the binding now.
    Newest,
    /// Late: there was a newer one.
    Old,
    /// Another opener opened the session.
    Foreign,
}

/// How an attempt stands.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Stand {
    /// It has no path: it was not passed on yet, or the acceptor was not there.
    Sought,
    /// It was passed on, and not answered.
    Tried,
    /// It was answered, or counts no more.
    Over,
}

/// Ends the search for a path when dropped.
#[derive(Debug)]
pub(super) struct Seeker(pub(super) Arc<Notify>);

impl Attempt {
    pub(crate) fn new(from: &Arc<LinkSender>, key: SessionKey, epoch: u64, opener: Option<Opener>) -> Self {
        Self { key, epoch, from: from.clone(), opener, changed: Arc::default() }
    }
}

impl Drop for Seeker {
    fn drop(&mut self) {
        self.0.notify_one();
    }
}

/// Whether nothing about the attempt follows it.
pub(super) fn is_last(frame: &SessionFrame) -> bool {
    matches!(frame, SessionFrame::Refused { .. } | SessionFrame::Reset { .. } | SessionFrame::Lost { .. })
}

/// Whether the frame means that the acceptor is not there.
pub(super) fn is_not_here(frame: &SessionFrame) -> bool {
    matches!(frame, SessionFrame::Refused { refusal, .. } | SessionFrame::Reset { refusal, .. } if refusal.code == Code::NotHere)
}
