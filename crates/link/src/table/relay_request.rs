//! An Open or a Resume that reached a server.

use std::sync::Arc;

use tokio::sync::oneshot;

use crate::link::Link;
use crate::relay::attempt::{Attempt, AttemptState};
use crate::relay::bindings::RelayOutcome;
use crate::table::SessionTable;
use crate::table::handles::IncomingSession;
use tunnel_proto::frame::{ErrorCode, Remote, SessionCategory, SessionError, SessionFrame, SessionKey};
use tunnel_proto::names::{Instance, NodeName, Target};

/// A request to reach a node through this server: pass it on, accept it as its end, or refuse it.
///
/// Dropping it refuses it if it has no path by then, so no opener is ever left waiting.
#[derive(Debug)]
#[must_use = "dropping a relay request without a path refuses it"]
pub struct RelayRequest {
    pub(super) table: Arc<SessionTable>,
    pub(super) attempt: Attempt,
    /// The Open or Resume itself, until it is passed on.
    pub(super) frame: Option<SessionFrame>,
}

impl RelayRequest {
    /// Returns the id of the session, its node, and the kind of the opener's listener: of a Resume, what the opener
    /// claims.
    pub fn key(&self) -> &SessionKey {
        &self.attempt.key
    }

    /// Attributes an Open to a client and its kind of listener, whatever the frame claims. A Resume names neither.
    pub fn attribute(&mut self, category: SessionCategory, name: String) {
        if let Some(SessionFrame::Open { client, .. }) = &mut self.frame {
            self.attempt.key.category = category;
            *client = name;
        }
    }

    /// Names another node and target, which this server knows by the requested name.
    pub fn redirect(&mut self, at: NodeName, to: Target) {
        self.attempt.key.node = at;
        match &mut self.frame {
            Some(SessionFrame::Open { target, .. }) => *target = to,
            Some(SessionFrame::Resume { target, place, .. }) => {
                *target = to;
                *place = None;
            }
            _ => {}
        }
    }

    /// Returns where a server has located the session when it was opened, if this is the Resume of a user's program
    /// that repeats it.
    pub fn place(&self) -> Option<&(NodeName, Target)> {
        match &self.frame {
            Some(SessionFrame::Resume { place, .. }) => place.as_deref(),
            _ => None,
        }
    }

    /// Returns a receiver of the end of this session's path through this server. Call it before the request is passed
    /// on or refused.
    pub fn watch_end(&self) -> oneshot::Receiver<RelayOutcome> {
        self.table.relays.watch_end(&self.attempt)
    }

    /// Returns the link that it came over.
    pub fn from(&self) -> &Arc<Link> {
        &self.attempt.from
    }

    /// Returns the process that holds the session's remote end, if this is a Resume: no other may be asked.
    pub fn instance(&self) -> Option<Instance> {
        match &self.frame {
            Some(SessionFrame::Resume { instance, .. }) => *instance,
            _ => None,
        }
    }

    /// Returns true if this is a Resume.
    pub fn resumes(&self) -> bool {
        matches!(self.frame, Some(SessionFrame::Resume { .. }))
    }

    /// Returns the target to dial there, which a Resume repeats.
    pub fn target(&self) -> &Target {
        &self.attempt.target
    }

    /// Waits until its opener no longer waits for this attempt.
    ///
    /// # Cancel safety
    ///
    /// Cancel safe.
    pub async fn wait_cancelled(&self) {
        self.wait_attempt_state(|state| state == AttemptState::Done).await;
    }

    /// Tries a path: passes the request on, and takes it back if the acceptor is not there.
    ///
    /// If another path is still unanswered, this path can only serve the next attempt. As only the opener moves a
    /// session, both ends get PathLost.
    pub fn try_path(&self, to: &Arc<Link>) {
        let to = &to.link_for(self.attempt.key.id);
        match (self.table.relays.attempt_state(&self.attempt), &self.frame) {
            (AttemptState::Searching, Some(frame))
                if self.is_valid_next_hop(to) && !to.is_answer_queue_full(&self.attempt.client) =>
            {
                self.table.relays.bind_acceptor(&self.attempt, to, frame.clone(), true);
            }
            (AttemptState::Pending, _) => {
                self.table.relays.path_lost(self.attempt.key.id, Some(self.attempt.epoch))
            }
            _ => {}
        }
    }

    /// Waits until the last path tried is answered. Returns true if the acceptor is not there, so that another path
    /// should be tried.
    ///
    /// # Cancel safety
    ///
    /// Cancel safe.
    pub async fn path_failed(&self) -> bool {
        self.wait_attempt_state(|state| state != AttemptState::Pending).await == AttemptState::Searching
    }

    async fn wait_attempt_state(&self, is: impl Fn(AttemptState) -> bool) -> AttemptState {
        loop {
            let changed = self.attempt.changed.notified();
            let state = self.table.relays.attempt_state(&self.attempt);
            if is(state) {
                return state;
            }
            changed.await;
        }
    }

    fn is_valid_next_hop(&self, to: &Link) -> bool {
        let from = &self.attempt.from;
        let second_hop = from.peer == Remote::Peer && to.peer == Remote::Peer;
        let back = from.id == to.id || to.instance == from.instance;
        !second_hop && !back && to.abilities.resumes
    }

    /// Passes the request on: this server relays the session from now on.
    ///
    /// A request from a peer goes to no other peer, and no request goes back to the process it came from. Both are
    /// refused as *not here*.
    pub fn pass(mut self, to: &Arc<Link>) {
        let to = &to.link_for(self.attempt.key.id);
        if !self.is_valid_next_hop(to) {
            return self.refuse(SessionError::new(
                ErrorCode::NodeNotConnected,
                "the node is not connected to this server",
            ));
        }
        if to.is_answer_queue_full(&self.attempt.client) {
            let why = "too many requests of this client wait for the node's line";
            return self.refuse(SessionError::new(ErrorCode::Overloaded, why));
        }
        if let Some(frame) = self.frame.take() {
            self.table.relays.bind_acceptor(&self.attempt, to, frame, false);
        }
    }

    /// Refuses the request. [`ErrorCode::NodeNotConnected`] makes the opener search elsewhere.
    pub fn refuse(mut self, why: SessionError) {
        self.answer(why);
    }

    /// Accepts the request as the session's acceptor. Returns `None` if that is impossible: a session to resume is not
    /// here, or a new one exceeds a limit.
    pub fn offer(mut self) -> Option<IncomingSession> {
        let Attempt { key, epoch, from, .. } = self.attempt.clone();
        let frame = self.frame.take();
        if self.table.relays.attempt_state(&self.attempt) != AttemptState::Searching {
            return None;
        }
        let Some(open @ SessionFrame::Open { .. }) = frame else {
            let unknown = self.table.failed_resume(key.id, self.attempt.opener.as_ref(), epoch);
            self.table.relays.end(&self.attempt, Some(unknown));
            return None;
        };
        self.table.relays.end(&self.attempt, None);
        self.table.on_open(&from, key, open)
    }

    fn answer(&mut self, refusal: SessionError) {
        if let Some(frame) = self.frame.take() {
            self.table.relays.end(&self.attempt, Some(refused(&frame, refusal)));
        }
    }
}

impl Drop for RelayRequest {
    fn drop(&mut self) {
        self.answer(SessionError::new(ErrorCode::Overloaded, "server is shutting down"));
    }
}

/// Returns the answer that refuses an Open or a Resume.
pub(crate) fn refused(frame: &SessionFrame, refusal: SessionError) -> SessionFrame {
    let epoch = frame.epoch().unwrap_or(0);
    match frame {
        SessionFrame::Open { .. } => SessionFrame::Refused { epoch, refusal },
        _ => SessionFrame::Reset { epoch, refusal },
    }
}
