//! How a session ends: its owner leaves, its last bytes and frames are delivered, or it waits too long for its remote.

use tokio::time::Instant;

use crate::frame::{ErrorCode, SessionError, SessionFrame};
use crate::halves::FlowControlError;
use crate::state::{Actions, PendingFrame, Phase, SessionState};

/// The departure of a session's owner before the session's end, and what is due since.
#[derive(Debug)]
pub(crate) struct DepartedOwner {
    why: SessionError,
    /// When the owner left, or the remote last acknowledged bytes.
    pub(crate) since: Instant,
    /// Bytes acknowledged by then.
    acknowledged: u64,
    left: OwnerDeparture,
    /// Whether a ResetAt must be sent after all accepted bytes.
    due: bool,
}

/// How an owner left its session.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum OwnerDeparture {
    /// After both directions had ended: the accepted bytes are delivered, and their end.
    Finished,
    /// Its connection failed: the accepted bytes are delivered, and then the reason.
    Failed,
    /// It ended the session: the accepted bytes are dropped.
    Dropped,
}

impl DepartedOwner {
    pub(crate) fn handle_acknowledged(&mut self, bytes: u64, now: Instant) {
        if bytes > self.acknowledged {
            (self.acknowledged, self.since) = (bytes, now);
        }
    }
}

impl SessionState {
    /// Handles an owner that drops the session: discards its bytes and sends `why`, on the next path if there is none
    /// now. If both directions had already ended, the remaining bytes are delivered instead.
    pub fn abandon(&mut self, why: SessionError, now: Instant) -> Actions {
        match self.phase {
            Phase::LastAck | Phase::Closing | Phase::Closed => return Actions::default(),
            Phase::Open | Phase::Parked | Phase::Resuming if self.is_complete() => {
                // An owner that has finished gave no reason that would have to be kept.
                if self.departed.as_ref().is_none_or(|owner| owner.left == OwnerDeparture::Finished) {
                    self.depart(why, now, OwnerDeparture::Finished);
                }
                return Actions::default();
            }
            Phase::Open | Phase::Parked | Phase::Resuming => {
                self.send.forget();
                return self.orphan(why, now, OwnerDeparture::Dropped);
            }
            Phase::Opening => return self.cancel_open(why, now),
            Phase::Accepting => self.answer = Some(PendingFrame::Refused(why.clone())),
        }
        self.start_closing(why)
    }

    /// Cancels an opening. If its Open may have reached an acceptor, the opening stays until the acceptor has confirmed
    /// the cancellation.
    ///
    /// A Reset may be lost with its path, so a Resume follows. It opens nothing if the Open never arrived, and is
    /// answered by *unknown* if the Reset did.
    fn cancel_open(&mut self, why: SessionError, now: Instant) -> Actions {
        let sent = self.path.is_some() && self.answer.is_none();
        if !sent && !self.open_unanswered {
            return self.reset(why);
        }
        self.phase = if self.path.is_some() { Phase::Resuming } else { Phase::Parked };
        let due = if sent { PendingFrame::Reset(why.clone()) } else { PendingFrame::Resume };
        self.answer = self.path.map(|_| due);
        self.resume_timeout = None;
        self.orphan(why, now, OwnerDeparture::Dropped)
    }

    /// Handles a failed connection of the owner. Delivers everything it wrote, then the reason; discards incoming data.
    pub fn abort(&mut self, why: SessionError, now: Instant) -> Actions {
        let open = matches!(self.phase, Phase::Open | Phase::Parked | Phase::Resuming);
        if !open || self.departed.is_some() || self.is_complete() {
            return self.abandon(why, now);
        }
        self.orphan(why, now, OwnerDeparture::Failed)
    }

    pub(crate) fn orphan(&mut self, why: SessionError, now: Instant, left: OwnerDeparture) -> Actions {
        // Keep a reason that was recorded earlier.
        let (why, since) = self.departed.take().map_or((why, now), |before| (before.why, before.since));
        self.drop_unread(&why);
        self.recv.close();
        self.depart(why, since, left);
        Actions { read: true, write: true, state: true, ..Actions::default() }
    }

    fn depart(&mut self, why: SessionError, since: Instant, left: OwnerDeparture) {
        let acknowledged = self.send.acknowledged();
        let due = left != OwnerDeparture::Finished;
        self.departed = Some(DepartedOwner { why, since, acknowledged, left, due });
    }

    /// Drops the bytes that the owner has not read, and records `why` for it. Valid in any phase.
    pub fn drop_unread(&mut self, why: &SessionError) {
        self.recv.discard();
        self.ended.get_or_insert_with(|| why.clone());
        self.truncated = true;
    }

    /// Opener: records that an Open was sent over the lost path and not answered, so that there may be an acceptor.
    pub(crate) fn mark_open_unanswered(&mut self) {
        self.open_unanswered |= self.phase == Phase::Opening && self.path.is_some() && self.answer.is_none();
    }

    fn is_complete(&self) -> bool {
        self.send.is_finished() && self.recv.is_ended() && self.recv.queued() == 0
    }

    /// Returns true if its owner has left before both directions had ended.
    pub fn is_orphaned(&self) -> bool {
        self.departed.as_ref().is_some_and(|departed| departed.left != OwnerDeparture::Finished)
    }

    /// Returns since when the session has waited for its remote, which alone can end or continue it. Returns `None` if
    /// it waits for its owner, or for the task that searches its path, or is closed. Call it regularly: if nothing but a
    /// last frame is missing, the first call marks the start of the wait.
    pub fn mark_waiting(&mut self, now: Instant) -> Option<Instant> {
        match (&self.departed, self.phase) {
            (_, Phase::Closed) => None,
            (Some(departed), _) => Some(departed.since),
            (None, Phase::LastAck | Phase::Closing) => Some(*self.waiting_since.get_or_insert(now)),
            (None, _) if self.is_opener() => None,
            (None, _) => self.waiting_since,
        }
    }

    /// Returns when the session lost its path, if it has none since.
    pub fn path_lost_at(&self) -> Option<Instant> {
        self.waiting_since.filter(|_| self.path.is_none() && self.phase != Phase::Closed)
    }

    /// Returns true if [`Self::evict`] would end the session, unless it is closed.
    pub fn can_be_evicted(&self) -> bool {
        self.departed.is_some() || matches!(self.phase, Phase::LastAck | Phase::Closing)
    }

    /// Ends a session without an owner, or one with only its last frame to send or to receive. Returns whether bytes
    /// were still to be delivered, or `None` if it is neither.
    pub fn evict(&mut self) -> (Option<bool>, Actions) {
        let departed = self.departed.take();
        match (self.phase, departed) {
            (Phase::LastAck | Phase::Closing, _) => {
                (Some(false), self.close(SessionError::new(ErrorCode::NoError, "")))
            }
            (Phase::Open | Phase::Resuming, Some(DepartedOwner { why, .. })) => (Some(true), self.reset(why)),
            (Phase::Parked, Some(DepartedOwner { why, .. })) => (Some(true), self.close(why)),
            _ => (None, Actions::default()),
        }
    }

    /// Ends a session that has waited for its remote for too long. Returns true if bytes were still to be delivered.
    pub fn expire(&mut self, why: SessionError) -> (bool, Actions) {
        match self.evict() {
            (Some(cut), actions) => (cut, actions),
            (None, _) => (false, self.give_up(why)),
        }
    }

    /// Ends the session after the resume timeout.
    ///
    /// An opener whose Resume is not answered yet sends the reason, because the acceptor may have resumed. If the reply
    /// has just arrived, the session continues.
    pub fn give_up(&mut self, why: SessionError) -> Actions {
        match self.phase {
            Phase::Resuming => self.reset(why),
            Phase::Parked => self.close(why),
            _ if self.is_opener() => Actions::default(),
            _ => self.close(why),
        }
    }

    /// Returns true if a last frame is queued for the current path.
    pub fn has_pending_close(&self) -> bool {
        let last = self.phase == Phase::Closing || self.is_orphaned() && self.answer.is_some();
        self.path.is_some() && (last || self.reset_at_due())
    }

    /// Returns true if everything an absent owner wrote is sent, and only the ResetAt is due.
    pub(crate) fn reset_at_due(&self) -> bool {
        self.departed.as_ref().is_some_and(|departed| departed.due) && self.send.unsent() == 0
    }

    pub(crate) fn take_reset_at(&mut self) -> Option<SessionFrame> {
        if !self.reset_at_due() {
            return None;
        }
        let departed = self.departed.as_mut()?;
        departed.due = false;
        let total = if departed.left == OwnerDeparture::Dropped { 0 } else { self.send.written() + 1 };
        Some(SessionFrame::ResetAt { total, refusal: departed.why.clone() })
    }

    /// Answers a ResetAt once all bytes of the remote's owner have arrived, so that the remote need not keep them.
    pub(crate) fn handle_reset_at(&mut self, total: u64, why: SessionError) -> Actions {
        match self.recv.check_reset_at(total) {
            Ok(()) => {
                self.answer = Some(PendingFrame::Reset(SessionError::new(ErrorCode::NoError, "")));
                self.start_closing(why)
            }
            Err(bad) => self.handle_protocol_error(bad),
        }
    }

    /// Returns true if the owner has left and its bytes are dropped.
    pub(crate) fn drops_bytes(&self) -> bool {
        self.departed.as_ref().is_some_and(|departed| departed.left == OwnerDeparture::Dropped)
    }

    /// Resumes on another path and retransmits unacknowledged bytes.
    pub(crate) fn resume_sending(&mut self, received: u64, limit: u64) -> Result<(), FlowControlError> {
        if let Some(departed) = &mut self.departed {
            departed.due = departed.left != OwnerDeparture::Finished;
        }
        if self.drops_bytes() { Ok(()) } else { self.send.rewind(received, limit) }
    }

    pub(crate) fn handle_protocol_error(&mut self, bad: FlowControlError) -> Actions {
        self.reset(SessionError::new(ErrorCode::ProtocolError, bad))
    }

    /// Sends a Reset as the last frame, if there is a path to send it on.
    pub(crate) fn reset(&mut self, why: SessionError) -> Actions {
        self.answer = Some(PendingFrame::Reset(why.clone()));
        self.start_closing(why)
    }

    /// Makes the pending frame the last one, if there is a path to send it on.
    pub(crate) fn start_closing(&mut self, why: SessionError) -> Actions {
        if self.path.is_none() {
            return self.close(why);
        }
        self.phase = Phase::Closing;
        self.send.forget();
        self.recv.close();
        self.ended.get_or_insert(why);
        Actions { read: true, write: true, state: true, ..Actions::default() }
    }

    pub(crate) fn close(&mut self, why: SessionError) -> Actions {
        self.phase = Phase::Closed;
        self.path = None;
        self.answer = None;
        let clean = why.code == ErrorCode::NoError && self.recv.is_ended();
        if !clean || !self.send.is_finished() {
            self.ended.get_or_insert(why);
        }
        self.send.forget();
        Actions { read: true, write: true, state: true, forget: true, ..Actions::default() }
    }
}
