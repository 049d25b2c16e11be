//! The handles of a session before it is open, and while it looks for a path.

use std::future::poll_fn;
use std::sync::Arc;
use std::time::Duration;

use tokio::time::Instant;

use crate::names::{Instance, NodeName, SessionId, Target};
use crate::protocol::link::sender::LinkSender;
use crate::protocol::session::SessionCore;
use crate::protocol::session::owned::{ResetOnDrop, given_up, watch};
use crate::protocol::session::state::Phase;
use crate::protocol::session::stream::Session;
use crate::protocol::wire::frame::{Category, Refusal};

/// A session that is asked for and not open yet. Dropping it takes the request back, on the path that it has, and again on
/// the next one if there is none just then ([`SessionTable::given_up`](crate::protocol::SessionTable::given_up)) or it is
/// lost before the far end has answered.
#[derive(Debug)]
#[must_use = "dropping an opening takes the request back"]
pub struct Opening(ResetOnDrop);

/// The result of a request.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Answer {
    /// The target answered: [`Opening::into_session`].
    Open,
    /// The far end refused, and no other path would help.
    Refused(Refusal),
    /// The link ended, or the node is not behind it: another link may be tried.
    NoPath,
}

/// A session that the far end wants to open; answer it by accepting or refusing.
///
/// Dropping an offer refuses it, so no opener is ever left waiting.
#[derive(Debug)]
#[must_use = "dropping an offer refuses it"]
pub struct Offer {
    owned: ResetOnDrop,
    target: Target,
    client: String,
    patience: Duration,
}

/// The right to look for a path of an opener's session. There is at most one for each session, so that two tasks never
/// take each other's answers for late ones. Holding it keeps nothing alive but memory.
#[derive(Debug)]
pub struct Parked {
    shared: Arc<SessionCore>,
    seeker: u64,
    again: u32,
}

impl Opening {
    pub(crate) fn new(shared: Arc<SessionCore>) -> Self {
        Self(ResetOnDrop::new(shared))
    }

    /// The session's id.
    pub fn id(&self) -> SessionId {
        self.0.id()
    }

    /// Asks over a link, behind which `process` has the node, if that is known. May be repeated with another one.
    pub fn ask(&self, link: &Arc<LinkSender>, process: Option<Instance>) {
        self.0.with(|shared| shared.ask(link, process, false));
    }

    /// Waits until the request over the link it was last sent on is answered. Cancel safe.
    pub async fn answer(&self) -> Answer {
        poll_fn(|cx| {
            self.0.watch(cx, |end| match end.phase() {
                // Nobody is to have it any more, and its acceptor, if there is one, is still to hear that.
                _ if end.departed_since().is_some() => {
                    Some(Answer::Refused(end.ended().cloned().unwrap_or_else(given_up)))
                }
                Phase::Asking if end.path().is_some() => None,
                Phase::Asking => Some(Answer::NoPath),
                // The answer may have come, and all of the session behind it, before its owner looked: then it was
                // open.
                Phase::Leaving | Phase::Gone
                    if end.ended().is_some() && end.recv.is_untouched() && !end.recv.is_ended() =>
                {
                    Some(Answer::Refused(end.ended().cloned().unwrap_or_else(given_up)))
                }
                _ => Some(Answer::Open),
            })
        })
        .await
    }

    /// The open session, once [`Self::answer`] has returned [`Answer::Open`].
    pub fn into_session(mut self) -> Session {
        Session(ResetOnDrop { shared: self.0.shared.take() })
    }
}

impl Offer {
    pub(crate) fn new(shared: Arc<SessionCore>, target: Target, client: String, patience: Duration) -> Self {
        Self { owned: ResetOnDrop::new(shared), target, client, patience }
    }

    /// The session's id.
    pub fn id(&self) -> SessionId {
        self.owned.id()
    }

    /// The opener's kind of front end.
    pub fn category(&self) -> Category {
        self.owned.shared.as_ref().map_or(Category::Tcp, |s| s.key.category)
    }

    /// The node of the acceptor.
    pub fn node(&self) -> Option<&NodeName> {
        self.owned.shared.as_ref().map(|s| &s.key.node)
    }

    /// The target to dial.
    pub fn target(&self) -> &Target {
        &self.target
    }

    /// The client at the far end, for the log. Text of the peer: printable, at most 200 bytes.
    pub fn client(&self) -> &str {
        &self.client
    }

    /// How long the dial may take, so that the opener gets the answer in time.
    pub fn patience(&self) -> Duration {
        self.patience
    }

    /// Waits until the opener has given up. Cancel safe.
    pub async fn withdrawn(&self) {
        poll_fn(|cx| self.owned.watch(cx, |end| (end.phase() == Phase::Gone).then_some(()))).await;
    }

    /// Sends Opened, and returns the byte stream.
    pub fn accept(mut self) -> Session {
        self.owned.with(|shared| shared.act(|inner| inner.state.accept(Instant::now())));
        Session(ResetOnDrop { shared: self.owned.shared.take() })
    }

    /// Sends Refused.
    pub fn refuse(mut self, why: Refusal) {
        if let Some(shared) = self.owned.shared.take() {
            shared.reset(why);
        }
    }
}

impl Parked {
    pub(crate) fn new(shared: Arc<SessionCore>, seeker: u64, again: u32) -> Self {
        Self { shared, seeker, again }
    }

    /// How often in a row its path was lost before this without that a byte moved.
    pub fn again(&self) -> u32 {
        self.again
    }

    /// The node of its acceptor.
    pub fn node(&self) -> &NodeName {
        &self.shared.key.node
    }

    /// The session's id.
    pub fn id(&self) -> SessionId {
        self.shared.key.id
    }

    /// The process of its other end.
    pub fn instance(&self) -> Option<Instance> {
        self.shared.instance()
    }

    /// Whether the session still needs a path. Once it returns false, the next loss makes another [`Parked`].
    pub fn seeks(&self) -> bool {
        let mut inner = self.shared.lock();
        let mine = inner.seeker == Some(self.seeker);
        let seeks = mine && inner.state.needs_path();
        if mine && !seeks {
            inner.seeker = None;
        }
        seeks
    }

    /// Sends Resume over a link, or the one beside it if the session is to run there.
    pub fn resume(&self, link: &Arc<LinkSender>) {
        self.shared.ask(&link.carrier(self.id()), None, true);
    }

    /// Waits until the last [`Self::resume`] is answered or its path is lost. Cancel safe.
    pub async fn answered(&self) {
        poll_fn(|cx| watch(&self.shared, cx, |end| (end.phase() != Phase::Resuming).then_some(()))).await;
    }

    /// Ends the session, because no path was found.
    pub fn give_up(self, why: Refusal) {
        self.shared.act(|inner| inner.state.give_up(why));
    }
}

impl Drop for Parked {
    fn drop(&mut self) {
        let mut inner = self.shared.lock();
        if inner.seeker == Some(self.seeker) {
            inner.seeker = None;
        }
    }
}
