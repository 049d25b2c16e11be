//! The state machine of one end of a session: the effects of each frame, lost path or call by its owner.
//!
//! Implements the tables of docs/protocol.md#states. Nothing here waits, locks or reads a clock. Every call returns its
//! `Actions`; the link fetches frames with `SessionState::poll_frame` when it can send.

pub(crate) mod ending;

use std::time::Duration;

use tokio::time::Instant;

use crate::frame::{ErrorCode, Place, SessionError, SessionFrame};
use crate::halves::FlowControlError;
use crate::halves::recv::RecvHalf;
use crate::halves::send::SendHalf;
use crate::names::{Instance, Target};
use crate::state::ending::{DepartedOwner, OwnerDeparture};

/// The id of a link of this process.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, derive_more::Display)]
pub struct LinkId(pub u64);

/// The priority of a frame that overtakes data, in rising order.
///
/// A caller that waits with one priority polls again only for a higher one.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum ControlPriority {
    /// Credit that can wait.
    Credit,
    /// Credit that the remote needs soon in order not to stop, or that ends the session.
    Needed,
    /// A reply, a request or a last frame, perhaps followed by credit.
    Answer,
}

/// The protocol state of one end of a session: decides which frames are sent next. Pure, without I/O.
#[derive(Debug)]
pub struct SessionState {
    role: SessionRole,
    phase: Phase,
    epoch: u64,
    path: Option<LinkId>,
    /// Opener: the process that holds the acceptor; while opening, the process that the Open is expected to reach,
    /// which a cancelled Open must reach, too.
    instance: Option<Instance>,
    /// Opener: the place that Opened has named, which each Resume repeats.
    place: Option<Place>,
    /// Opener: an Open was sent and its reply can no longer arrive, so there may be an acceptor.
    open_unanswered: bool,
    /// Frame that must be sent before anything else.
    answer: Option<PendingFrame>,
    /// Reason of the end, if the session did not end normally.
    ended: Option<SessionError>,
    /// Whether bytes that the owner has not read may have been dropped.
    truncated: bool,
    departed: Option<DepartedOwner>,
    /// Since when it has waited for something that only the remote can provide.
    waiting_since: Option<Instant>,
    resumed: u32,
    /// How long it may be without a path: while it opens what its opener asks for, then what the acceptor grants. `None`:
    /// as long as all others.
    pub resume_timeout: Option<Duration>,
    /// Direction from this end.
    pub send: SendHalf,
    /// Direction to this end.
    pub recv: RecvHalf,
}

/// A frame of a session that is to be sent before its data and credit.
#[derive(Debug, Clone, PartialEq, Eq)]
enum PendingFrame {
    Open,
    Opened,
    Refused(SessionError),
    Resume,
    Resumed,
    Reset(SessionError),
}

impl SessionState {
    /// Creates an opener without a path.
    pub fn opener(target: Target, client: String, send: SendHalf, recv: RecvHalf) -> Self {
        Self::new(SessionRole::Opener { target, client }, send, recv)
    }

    /// Creates an acceptor for an Open from link `from`. It may send below `limit` once it accepts.
    pub fn acceptor(from: LinkId, epoch: u64, limit: u64, mut send: SendHalf, recv: RecvHalf) -> Self {
        // Nothing was sent, so only an offset other than 0 could fail.
        let _ = send.acknowledge(0, limit);
        let end = Self::new(SessionRole::Acceptor, send, recv);
        Self { phase: Phase::Accepting, epoch, path: Some(from), ..end }
    }

    fn new(role: SessionRole, send: SendHalf, recv: RecvHalf) -> Self {
        Self {
            role,
            phase: Phase::Opening,
            epoch: 0,
            path: None,
            instance: None,
            place: None,
            open_unanswered: false,
            answer: None,
            ended: None,
            truncated: false,
            departed: None,
            waiting_since: None,
            resumed: 0,
            resume_timeout: None,
            send,
            recv,
        }
    }

    /// Returns the phase.
    pub fn phase(&self) -> Phase {
        self.phase
    }

    /// Returns the number of the newest attempt to open or resume the session.
    pub fn epoch(&self) -> u64 {
        self.epoch
    }

    /// Returns the link that the session runs on.
    pub fn path(&self) -> Option<LinkId> {
        self.path
    }

    /// Returns true if the data that the owner reads may be incomplete, even if it is followed by an end of stream.
    pub fn is_truncated(&self) -> bool {
        self.truncated
    }

    /// Returns the reason why the session ended, if it did not end normally.
    pub fn ended(&self) -> Option<&SessionError> {
        self.ended.as_ref()
    }

    /// Returns true if nothing is sent or received any longer, except for a last frame.
    pub fn is_over(&self) -> bool {
        self.ended.is_some() || matches!(self.phase, Phase::Closing | Phase::Closed)
    }

    /// Returns true if it is open, with or without a path: then the remote may wait for frames from this end.
    pub fn is_active(&self) -> bool {
        matches!(self.phase, Phase::Open | Phase::Parked | Phase::Resuming)
    }

    /// Returns true if the session was open and has no path, or none that is confirmed.
    pub fn needs_path(&self) -> bool {
        matches!(self.phase, Phase::Parked | Phase::Resuming)
    }

    /// Returns how long the session may wait for its remote now; `usual` unless it is open and more was granted.
    pub fn resume_timeout(&self, usual: Duration) -> Duration {
        self.resume_timeout.filter(|_| self.needs_path()).unwrap_or(usual)
    }

    /// Returns the number of bytes transferred in both directions together.
    pub fn bytes_transferred(&self) -> u64 {
        self.send.acknowledged() + self.recv.taken() + self.recv.queued() as u64
    }

    /// Returns how often the session was resumed on another path.
    pub fn resumed(&self) -> u32 {
        self.resumed
    }

    /// Opener: returns the process that holds the acceptor, once known.
    pub fn instance(&self) -> Option<Instance> {
        self.instance.filter(|_| self.phase != Phase::Opening)
    }

    /// Returns true if this end opened the session.
    pub fn is_opener(&self) -> bool {
        matches!(self.role, SessionRole::Opener { .. })
    }

    /// Opener: returns the target, and the client as reported to the acceptor.
    pub fn opened_for(&self) -> Option<(Target, String)> {
        match &self.role {
            SessionRole::Opener { target, client } => Some((target.clone(), client.clone())),
            SessionRole::Acceptor => None,
        }
    }

    /// Opener: queues an Open on `link`, or a Resume if the session was open before. Other ends do not change.
    /// `process` is the process that an Open is expected to reach, if known.
    pub fn start_attempt(&mut self, link: LinkId, process: Option<Instance>) -> Actions {
        let answer = match self.phase {
            Phase::Opening => PendingFrame::Open,
            Phase::Parked | Phase::Resuming if self.is_opener() => PendingFrame::Resume,
            _ => return Actions::default(),
        };
        self.mark_open_unanswered();
        self.phase = if answer == PendingFrame::Open { Phase::Opening } else { Phase::Resuming };
        self.epoch += 1;
        let left = self.path.replace(link).is_some_and(|before| before != link);
        self.instance = process.or(self.instance);
        self.waiting_since = None;
        self.answer = Some(answer);
        Actions { state: true, left, ..Actions::default() }
    }

    /// Acceptor: accepts the session, because the target was reached.
    pub fn accept(&mut self, now: Instant) -> Actions {
        if self.phase == Phase::Accepting {
            if self.path.is_some() {
                self.phase = Phase::Open;
                self.answer = Some(PendingFrame::Opened);
            } else {
                self.phase = Phase::Parked;
                self.waiting_since.get_or_insert(now);
            }
        }
        Actions::default()
    }

    /// Opener: leaves the path over `link`, which works, to continue on another one. Returns `None` if the session
    /// stays: it has another path, or only its last frame waits for its turn.
    pub fn leave_path(&mut self, link: LinkId, now: Instant) -> Option<Actions> {
        let leaves = self.is_opener() && self.phase != Phase::Closing && self.path == Some(link);
        leaves.then(|| Actions { left: true, ..self.drop_path(now) })
    }

    /// Handles the loss of the path over `link`. The session ends with it if the remote of the link cannot resume.
    pub fn lose_path(&mut self, link: LinkId, why: Option<SessionError>, now: Instant) -> Actions {
        if self.path != Some(link) {
            return Actions::default();
        }
        match why {
            Some(why) if self.phase != Phase::Closed => self.close(why),
            _ => self.drop_path(now),
        }
    }

    /// Returns the priority of the next frame that overtakes data: a reply or a reset, otherwise credit.
    pub fn control(&self) -> Option<ControlPriority> {
        self.path?;
        if self.answer.is_some() {
            return Some(ControlPriority::Answer);
        }
        if self.phase != Phase::Open || !self.recv.credit_due() {
            return None;
        }
        let is_urgent = self.recv.is_credit_urgent();
        Some(if is_urgent { ControlPriority::Needed } else { ControlPriority::Credit })
    }

    /// Returns the number of bytes that may be sent.
    ///
    /// Returns `Some(0)` if only the end of the direction is due, and `None` if nothing is due.
    pub fn backlog(&self) -> Option<usize> {
        if self.path.is_none() || self.phase != Phase::Open {
            return None;
        }
        let bytes = self.send.sendable();
        (bytes > 0 || self.send.finish_due() || self.reset_at_due()).then_some(bytes)
    }

    /// Returns the next frame for `link`: replies before credit, credit before at most `max` bytes, bytes before their
    /// end.
    pub fn poll_frame(&mut self, link: LinkId, max: usize) -> (Option<SessionFrame>, Actions) {
        if self.path != Some(link) {
            return (None, Actions::default());
        }
        if let Some(answer) = self.answer.take() {
            return self.send_answer(answer);
        }
        if self.phase != Phase::Open {
            return (None, Actions::default());
        }
        if self.recv.credit_due() {
            let (received, limit) = self.recv.credit();
            return (
                Some(SessionFrame::Credit { received, limit }),
                self.close_if_complete(Actions::default()),
            );
        }
        // This is a turn of answers and credits, which do not wait until data may be sent.
        if max == 0 {
            return (None, Actions::default());
        }
        let frame = self.send.take(max).map(SessionFrame::Data);
        let frame = frame.or_else(|| self.send.take_finish().map(|total| SessionFrame::Fin { total }));
        let frame = frame.or_else(|| self.take_reset_at());
        (frame, Actions { write: self.send.has_room(), ..Actions::default() })
    }

    fn send_answer(&mut self, answer: PendingFrame) -> (Option<SessionFrame>, Actions) {
        let epoch = self.epoch;
        let frame = match (answer, &self.role) {
            (PendingFrame::Open, SessionRole::Opener { target, client }) => {
                let target = target.clone();
                let client = client.clone();
                let resume_timeout = self.resume_timeout;
                let limit = self.recv.limit();
                SessionFrame::Open { target, limit, epoch, client, opener: None, resume_timeout, boot: None }
            }
            (PendingFrame::Open | PendingFrame::Resume, SessionRole::Acceptor) => {
                return (None, Actions::default());
            }
            (PendingFrame::Opened, _) => {
                let resume_timeout = self.resume_timeout;
                let limit = self.recv.limit();
                SessionFrame::Opened { limit, epoch, instance: None, place: None, resume_timeout }
            }
            (PendingFrame::Resume, SessionRole::Opener { target, .. }) => {
                let (received, limit) = self.recv.credit();
                let target = target.clone();
                let place = self.place.clone();
                let instance = self.instance;
                SessionFrame::Resume { received, limit, epoch, instance, opener: None, target, place }
            }
            (PendingFrame::Resumed, _) => {
                let (received, limit) = self.recv.credit();
                SessionFrame::Resumed { received, limit, epoch }
            }
            (PendingFrame::Refused(refusal), _) => SessionFrame::Refused { epoch, refusal },
            (PendingFrame::Reset(refusal), _) => SessionFrame::Reset { epoch, refusal },
        };
        // A cancelled opening: the Reset may be lost with its path. Only the answer to a Resume after it proves the end.
        if self.phase == Phase::Resuming && matches!(frame, SessionFrame::Reset { .. }) {
            self.epoch += 1;
            self.answer = Some(PendingFrame::Resume);
        }
        // No answer follows the last frame, so this end need not wait for one.
        if self.phase == Phase::Closing {
            self.phase = Phase::Closed;
            self.path = None;
            return (Some(frame), Actions { forget: true, ..Actions::default() });
        }
        (Some(frame), self.close_if_complete(Actions::default()))
    }
}

/// The role of one end of a session: whether it opened the session or accepted it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum SessionRole {
    /// The end that opened the session.
    Opener {
        /// Target that the acceptor must dial.
        target: Target,
        /// Client, for the acceptor's log.
        client: String,
    },
    /// The end that dials the target.
    Acceptor,
}

/// The phase of an end.
///
/// ```text
///          opener                                               acceptor
///
///   ask ─▶ Opening ──Refused─────────────▶ Closed        Open ─▶ Accepting ──refuse──▶ Closing
///             │ Opened                                              │ accept
///             ▼                                                     ▼
///   ┌─────▶ Open ──all acknowledged──────▶ Closing         ┌────▶ Open ──all sent and received──▶ LastAck
///   │         │ path lost                    │             │        │ path lost                    │
///   │         ▼                              │          Resume      ▼                              │
///   │       Parked ◀───────────┐         Reset is          └───── Parked                         Reset,
///   │         │ ask        path lost,    sent, or                   │                        or the resume
///   │         ▼             not here     path lost            resume timeout                    timeout
///   │ Resumed │                │             ▼                      ▼                              ▼
///   └────── Resuming ──────────┘           Closed                 Closed                         Closed
/// ```
///
/// Three events lead from any phase to Closing, or to Closed without a path: the owner drops the session, the remote
/// violates the protocol, or a ResetAt was answered.
///
/// If an opening is cancelled and may have reached an acceptor, it enters Resuming or Parked instead. A Reset from the
/// remote leads to Closed. A Resume may also find an acceptor in Open or LastAck.
///
/// A path may also be missing in [`Phase::Opening`], [`Phase::Accepting`] and [`Phase::LastAck`]. The tables of
/// docs/protocol.md#states list each frame in each phase.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Phase {
    /// Opener: waits for Opened or Refused.
    Opening,
    /// Acceptor: the Open is not answered yet.
    Accepting,
    /// Bytes are transferred.
    Open,
    /// No path: nothing is sent or accepted. Received bytes may still be read.
    Parked,
    /// Opener: waits for Resumed.
    Resuming,
    /// Acceptor: everything is sent and received. Kept until the opener confirms it with a Reset, or the resume
    /// timeout.
    LastAck,
    /// One last frame must be sent, then the end is dropped.
    Closing,
    /// The session has ended. Received bytes may still be read.
    Closed,
}

/// Actions that the caller must take after an event. Several may be set.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
#[must_use]
pub struct Actions {
    /// The reader may continue.
    pub read: bool,
    /// The writer may continue.
    pub write: bool,
    /// The phase or the path changed: wake the tasks that wait for a reply or for a path.
    pub state: bool,
    /// Nothing is left to send or receive: the table may drop the session.
    pub forget: bool,
    /// The frame was ignored because of its link, its role, its phase or an old epoch.
    pub dropped: bool,
    /// The session has left its path, which works: the remote must get PathLost there, with the epoch of that path.
    pub left: bool,
}

impl SessionState {
    /// Handles a frame that arrived over the link `from`.
    pub fn handle_frame(&mut self, from: LinkId, frame: SessionFrame, now: Instant) -> Actions {
        // What an absent owner has written may have waited for hours: its delivery only starts now.
        if self.resume_timeout.is_some()
            && matches!(frame, SessionFrame::Resume { .. } | SessionFrame::Resumed { .. })
            && let Some(departed) = &mut self.departed
        {
            departed.since = now;
        }
        match frame {
            SessionFrame::Open { limit, epoch, .. } => self.handle_open(from, epoch, limit),
            SessionFrame::Resume { received, limit, epoch, .. } => {
                self.handle_resume(from, epoch, received, limit)
            }
            // Only a session that nobody uses. If it runs, the opener has resumed it by a server that permits it.
            SessionFrame::Revoked { refusal, .. } if self.phase == Phase::Parked && !self.is_opener() => {
                self.close(refusal)
            }
            SessionFrame::Revoked { .. } | SessionFrame::Parked(_) => DROPPED,
            // Open and Resume name a new path, and their epoch is checked. All others are valid only on the session's
            // path.
            _ if self.path != Some(from) => DROPPED,
            SessionFrame::Opened { limit, epoch, instance, place, resume_timeout } => {
                self.handle_opened(limit, epoch, instance, place, resume_timeout)
            }
            SessionFrame::Refused { epoch, refusal } => self.handle_refused(epoch, refusal, now),
            SessionFrame::Resumed { received, limit, epoch } => self.handle_resumed(received, limit, epoch),
            SessionFrame::PathLost { epoch } if epoch >= self.epoch => self.drop_path(now),
            SessionFrame::PathLost { .. } => DROPPED,
            SessionFrame::Reset { epoch, refusal } => self.handle_reset(epoch, refusal, now),
            SessionFrame::ResetAt { total, refusal }
                if matches!(self.phase, Phase::Open | Phase::LastAck) =>
            {
                self.handle_reset_at(total, refusal)
            }
            SessionFrame::ResetAt { .. } => DROPPED,
            // Until Opened or Resumed has arrived, such frames may belong to an older attempt, with other offsets.
            SessionFrame::Data(_) | SessionFrame::Fin { .. } | SessionFrame::Credit { .. }
                if self.phase != Phase::Open =>
            {
                DROPPED
            }
            SessionFrame::Data(bytes) => match self.recv.data(bytes, now) {
                Ok(()) => Actions { read: self.departed.is_none(), ..Actions::default() },
                // No reset: the remote has kept the bytes, and sends them again on the next path.
                Err(FlowControlError::NoMemory) => Actions { read: true, left: true, ..self.drop_path(now) },
                Err(bad) => self.handle_protocol_error(bad),
            },
            SessionFrame::Fin { total } => match self.recv.finish(total) {
                Ok(()) => self.close_if_complete(Actions { read: true, ..Actions::default() }),
                Err(bad) => self.handle_protocol_error(bad),
            },
            SessionFrame::Credit { received, limit } => match self.send.acknowledge(received, limit) {
                Ok(()) => {
                    if let Some(departed) = &mut self.departed {
                        departed.handle_acknowledged(self.send.acknowledged(), now);
                    }
                    self.close_if_complete(Actions { write: self.send.has_room(), ..Actions::default() })
                }
                Err(bad) => self.handle_protocol_error(bad),
            },
        }
    }

    fn handle_opened(
        &mut self,
        limit: u64,
        epoch: u64,
        instance: Option<Instance>,
        place: Option<Place>,
        granted: Option<Duration>,
    ) -> Actions {
        if !self.awaits_opened() || epoch != self.epoch {
            return DROPPED;
        }
        self.phase = Phase::Open;
        self.instance = instance;
        self.place = place;
        self.resume_timeout = self.resume_timeout.zip(granted).map(|(asked, granted)| asked.min(granted));
        // If the opening was cancelled just now, the acceptor learns it from a ResetAt.
        self.answer = None;
        match self.send.acknowledge(0, limit) {
            Ok(()) => Actions { state: true, write: true, ..Actions::default() },
            Err(bad) => self.handle_protocol_error(bad),
        }
    }

    fn handle_refused(&mut self, epoch: u64, refusal: SessionError, now: Instant) -> Actions {
        if !self.awaits_opened() || epoch != self.epoch {
            return DROPPED;
        }
        if self.phase == Phase::Opening && refusal.code == ErrorCode::NodeNotConnected {
            self.path = None;
            return Actions { state: true, ..Actions::default() };
        }
        if !self.open_unanswered {
            return self.close(refusal);
        }
        // An older Open may still reach an acceptor over a previous path. Like a cancelled opening, the session stays
        // until that acceptor has confirmed the cancellation.
        self.phase = Phase::Resuming;
        self.epoch += 1;
        self.answer = Some(PendingFrame::Resume);
        self.resume_timeout = None;
        self.orphan(refusal, now, OwnerDeparture::Dropped)
    }

    /// Returns true if the reply to the newest Open is pending. After a cancelled opening it is, until its Reset is
    /// sent.
    fn awaits_opened(&self) -> bool {
        let cancelled = self.phase == Phase::Resuming && matches!(self.answer, Some(PendingFrame::Reset(_)));
        self.phase == Phase::Opening || cancelled
    }

    fn handle_resumed(&mut self, received: u64, limit: u64, epoch: u64) -> Actions {
        if self.phase != Phase::Resuming || epoch != self.epoch {
            return DROPPED;
        }
        self.phase = Phase::Open;
        self.resumed += 1;
        match self.resume_sending(received, limit) {
            Ok(()) => self.close_if_complete(Actions { state: true, write: true, ..Actions::default() }),
            Err(bad) => self.handle_protocol_error(bad),
        }
    }

    fn handle_reset(&mut self, epoch: u64, refusal: SessionError, now: Instant) -> Actions {
        match self.phase {
            Phase::Resuming if epoch != self.epoch => DROPPED,
            // A server on the path sent it, not the acceptor. The next path may reach the acceptor.
            Phase::Resuming
                if matches!(refusal.code, ErrorCode::NodeNotConnected | ErrorCode::Overloaded) =>
            {
                self.drop_path(now)
            }
            _ => self.close(refusal),
        }
    }

    /// Handles an Open at an acceptor.
    fn handle_open(&mut self, from: LinkId, epoch: u64, limit: u64) -> Actions {
        if self.is_opener() || epoch <= self.epoch {
            return DROPPED;
        }
        let is_new = self.recv.is_untouched() && (self.drops_bytes() || self.send.is_untouched());
        let answer = match self.phase {
            Phase::Accepting | Phase::Closing => None,
            Phase::Open | Phase::Parked if is_new => Some(PendingFrame::Opened),
            _ => return DROPPED,
        };
        self.continue_on(from, epoch, 0, limit, answer)
    }

    /// Handles a Resume at an acceptor.
    fn handle_resume(&mut self, from: LinkId, epoch: u64, received: u64, limit: u64) -> Actions {
        if self.is_opener() || epoch <= self.epoch {
            return DROPPED;
        }
        match self.phase {
            Phase::Closing => {
                // Refused answers only an Open: the opener that has cancelled it would wait for another answer.
                if let Some(PendingFrame::Refused(why)) = &self.answer {
                    self.answer = Some(PendingFrame::Reset(why.clone()));
                }
                self.continue_on(from, epoch, received, limit, None)
            }
            // A session that was not open yet is resumed only to cancel it.
            Phase::Accepting => {
                (self.epoch, self.path) = (epoch, Some(from));
                self.reset(SessionError::new(ErrorCode::Cancelled, "cancelled by its opener"))
            }
            Phase::Open | Phase::Parked | Phase::LastAck => {
                self.resumed += 1;
                self.continue_on(from, epoch, received, limit, Some(PendingFrame::Resumed))
            }
            _ => DROPPED,
        }
    }

    /// Continues on another link: sends `answer`, and then the bytes that the opener has not received. A session that
    /// closes sends its last frame there, because the previous link may be dead without notice.
    fn continue_on(
        &mut self,
        link: LinkId,
        epoch: u64,
        received: u64,
        limit: u64,
        answer: Option<PendingFrame>,
    ) -> Actions {
        (self.epoch, self.path) = (epoch, Some(link));
        if self.phase == Phase::Closing {
            return Actions::default();
        }
        self.waiting_since = None;
        if let Err(bad) = self.resume_sending(received, limit) {
            return self.handle_protocol_error(bad);
        }
        // In LastAck everything is sent and received, so the opener gets only the answer.
        if answer.is_some() && self.phase != Phase::LastAck {
            self.phase = Phase::Open;
        }
        self.answer = answer;
        self.close_if_complete(Actions { write: true, ..Actions::default() })
    }

    pub(crate) fn drop_path(&mut self, now: Instant) -> Actions {
        self.mark_open_unanswered();
        self.path = None;
        self.waiting_since = Some(now);
        match self.phase {
            Phase::Closing => {
                self.phase = Phase::Closed;
                return Actions { forget: true, ..Actions::default() };
            }
            Phase::Open | Phase::Resuming => {
                self.phase = Phase::Parked;
                self.answer = None;
            }
            _ => self.answer = None,
        }
        Actions { state: true, ..Actions::default() }
    }

    /// Ends the session if everything is sent and received. Call it after an acknowledgement.
    pub(crate) fn close_if_complete(&mut self, actions: Actions) -> Actions {
        if self.phase != Phase::Open || !self.send.is_done() || self.is_orphaned() {
            return actions;
        }
        if self.is_opener() && self.recv.is_ended() {
            self.phase = Phase::Closing;
            self.answer = Some(PendingFrame::Reset(SessionError::new(ErrorCode::NoError, "")));
        } else if !self.is_opener() && self.recv.is_done() && self.answer.is_none() {
            self.phase = Phase::LastAck;
        }
        actions
    }
}

const DROPPED: Actions =
    Actions { read: false, write: false, state: false, forget: false, dropped: true, left: false };

#[cfg(test)]
mod tests;
