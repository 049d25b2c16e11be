//! The handles of a session before it is open, and while it searches for a path.

use std::future::poll_fn;
use std::sync::Arc;
use std::time::Duration;

use tokio::time::Instant;

use crate::sender::LinkSender;
use crate::table::session::{AnyPermit, SearchTicket, SharedSession};
use crate::table::stream::Session;
use crate::table::waits::{given_up, watch};
use tunnel_base::names::{Instance, NodeName, SessionId, Target};
use tunnel_proto::frame::{SessionCategory, SessionError};
use tunnel_proto::state::{Actions, Phase, SessionState};

/// A session that was requested and is not open yet.
///
/// Dropping it withdraws the request on the current path. It does so on the next path if there is none at that time
/// (see [`SessionTable::next_parked`](crate::table::SessionTable::next_parked)), or if the path is lost before the
/// remote has answered.
#[derive(Debug)]
#[must_use = "dropping a pending open withdraws the request"]
pub struct PendingOpen(Session);

/// The result of a [`PendingOpen`]: the answer of the remote end, or the loss of the path.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum OpenOutcome {
    /// The target answered; see [`PendingOpen::into_session`].
    Open,
    /// The remote end refused, and no other path would help.
    Refused(SessionError),
    /// The link ended, or the node cannot be reached over it: another link may be tried.
    NoPath,
}

/// A session requested by the remote end and not answered yet. Dropping it refuses the session, so no opener is left
/// waiting.
#[derive(Debug)]
#[must_use = "dropping an offer refuses it"]
pub struct IncomingSession {
    pub(super) session: Session,
    pub(super) target: Target,
    pub(super) client: String,
    pub(super) dial_timeout: Duration,
}

/// The right to search for a path of an opener's session, from
/// [`SessionTable::next_parked`](crate::table::SessionTable::next_parked).
///
/// There is at most one per session, so that two tasks never mistake each other's answers for late ones. Holding it
/// keeps nothing alive but memory. If it is dropped while the session still needs a path, the table hands out another.
#[derive(Debug)]
pub struct ParkedSession {
    pub(super) shared: Arc<SharedSession>,
    pub(super) search: SearchTicket,
}

impl PendingOpen {
    pub(crate) fn new(shared: Arc<SharedSession>) -> Self {
        Self(Session::new(shared))
    }

    /// Returns the session's id.
    pub fn id(&self) -> SessionId {
        self.0.id()
    }

    /// Sends the request over a link; `process` is the process that has the node, if known. May be repeated with
    /// another link.
    pub fn ask(&self, link: &Arc<LinkSender>, process: Option<Instance>) {
        self.0.shared.ask(link, process, false);
    }

    /// Keeps a permit until the session is over: its owner has left, and everything is delivered.
    pub fn keep(&self, permit: AnyPermit) {
        let shared = &self.0.shared;
        shared.with_state(|inner| (inner.permit.replace(permit), Actions::default()));
    }

    /// Waits for the answer on the link of the last request.
    ///
    /// # Cancel safety
    ///
    /// Cancel safe.
    pub async fn answer(&self) -> OpenOutcome {
        poll_fn(|cx| {
            watch(&self.0.shared, cx, |end| match end.phase() {
                // The session has been given up, and its acceptor, if there is one, has yet to be notified.
                _ if end.is_orphaned() => {
                    Some(OpenOutcome::Refused(end.ended().cloned().unwrap_or_else(given_up)))
                }
                Phase::Opening if end.path().is_some() => None,
                Phase::Opening => Some(OpenOutcome::NoPath),
                // The answer and the whole session may have arrived before its owner checked: then it was open.
                Phase::Closing | Phase::Closed
                    if end.ended().is_some() && end.recv.is_untouched() && !end.recv.is_ended() =>
                {
                    Some(OpenOutcome::Refused(end.ended().cloned().unwrap_or_else(given_up)))
                }
                _ => Some(OpenOutcome::Open),
            })
        })
        .await
    }

    /// Returns the open session, once [`Self::answer`] has returned [`OpenOutcome::Open`].
    pub fn into_session(self) -> Session {
        self.0
    }
}

impl IncomingSession {
    /// Returns the session's id.
    pub fn id(&self) -> SessionId {
        self.session.id()
    }

    /// Returns the kind of the opener's listener.
    pub fn category(&self) -> SessionCategory {
        self.session.shared.key.category
    }

    /// Returns the node of the acceptor.
    pub fn node(&self) -> &NodeName {
        &self.session.shared.key.node
    }

    /// Returns the target to dial.
    pub fn target(&self) -> &Target {
        &self.target
    }

    /// Returns the client at the opener's end, for the log. It is the remote's text: printable, at most 200 bytes.
    pub fn client(&self) -> &str {
        &self.client
    }

    /// Returns how long the dial may take, so that the opener gets the answer in time.
    pub fn dial_timeout(&self) -> Duration {
        self.dial_timeout
    }

    /// Waits until the opener has given up.
    ///
    /// # Cancel safety
    ///
    /// Cancel safe.
    pub async fn withdrawn(&self) {
        poll_fn(|cx| watch(&self.session.shared, cx, |end| (end.phase() == Phase::Closed).then_some(())))
            .await;
    }

    /// Sends Opened and returns the byte stream.
    pub fn accept(self) -> Session {
        self.session.shared.with_state(|inner| ((), inner.state.accept(Instant::now())));
        self.session
    }

    /// Sends Refused.
    pub fn refuse(self, why: SessionError) {
        self.session.reset(why);
    }
}

impl ParkedSession {
    /// Returns the number of earlier consecutive losses of its path without a byte moved in between.
    pub fn consecutive_losses(&self) -> u32 {
        self.search.consecutive_losses
    }

    /// Returns the node of its acceptor.
    pub fn node(&self) -> &NodeName {
        &self.shared.key.node
    }

    /// Returns the session's id.
    pub fn id(&self) -> SessionId {
        self.shared.key.id
    }

    /// Returns the process of its remote end.
    pub fn instance(&self) -> Option<Instance> {
        self.shared.read(SessionState::instance)
    }

    /// Returns true if the session still needs a path. Once it returns false, the next loss creates another
    /// [`ParkedSession`].
    pub fn needs_path(&self) -> bool {
        let mut inner = self.shared.lock();
        let mine = inner.seeker == Some(self.search.seeker);
        let seeks = mine && inner.state.needs_path();
        if mine && !seeks {
            inner.seeker = None;
        }
        seeks
    }

    /// Sends Resume over a link, or over its interactive link if the session should run there.
    pub fn resume(&self, link: &Arc<LinkSender>) {
        self.shared.ask(&link.link_for(self.id()), None, true);
    }

    /// Waits until the last [`Self::resume`] is answered or its path is lost.
    ///
    /// # Cancel safety
    ///
    /// Cancel safe.
    pub async fn answered(&self) {
        poll_fn(|cx| watch(&self.shared, cx, |end| (end.phase() != Phase::Resuming).then_some(()))).await;
    }

    /// Ends the session because no path was found.
    pub fn give_up(self, why: SessionError) {
        self.shared.with_state(|inner| ((), inner.state.give_up(why)));
    }
}

impl Drop for ParkedSession {
    fn drop(&mut self) {
        self.shared.with_state(|inner| {
            inner.seeker.take_if(|seeker| *seeker == self.search.seeker);
            ((), Actions::default())
        });
    }
}
