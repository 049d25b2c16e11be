//! One end of a session: its states and what each frame, lost path or call of its owner does to them.
//!
//! The tables of docs/protocol.md#states, as code. Nothing here waits, locks or reads a clock: every call returns its
//! `Effects`, and what the end has to send is fetched by `SessionState::next_frame` when the link has room for it.

use std::fmt;
use tokio::time::Instant;

use crate::frame::{ErrorCode, SessionError, SessionFrame};
use crate::halves::{AckError, RecvHalf, SendHalf};
use tunnel_base::names::{Instance, Target};

/// Which link of this process.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct LinkId(pub u64);

impl fmt::Display for LinkId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

/// What overtakes data.
///
/// The later one of two is the more urgent: who waits for one asks again only for that.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum ControlPriority {
    /// Credit alone.
    Credit,
    /// Credit without which the peer would soon have to stop, or that ends the session.
    Needed,
    /// An answer, a request or a last frame; perhaps credit behind it.
    Answer,
}

/// One end; see the module.
#[derive(Debug)]
pub struct SessionState {
    role: Role,
    phase: Phase,
    epoch: u64,
    path: Option<LinkId>,
    /// Opener: the process that holds the acceptor; while it asks, the one that is believed to be asked.
    instance: Option<Instance>,
    /// Opener: an Open was sent whose answer cannot come any more, so there may be an acceptor.
    open_unanswered: bool,
    /// What must be sent before anything else.
    answer: Option<PendingFrame>,
    /// Why it ended, if it did not end in good order.
    ended: Option<SessionError>,
    /// Bytes that its owner has not read may have been dropped.
    truncated: bool,
    departed: Option<Orphan>,
    parked_since: Option<Instant>,
    resumed: u32,
    /// The direction from this end.
    pub send: SendHalf,
    /// The direction to this end.
    pub recv: RecvHalf,
}

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
    /// An opener that has no path yet.
    pub fn opener(target: Target, client: String, send: SendHalf, recv: RecvHalf) -> Self {
        Self::new(Role::Opener { target, client }, Phase::Opening, 0, None, send, recv)
    }

    /// An acceptor that was asked by `from`, and may send below `limit` once it accepts.
    pub fn acceptor(from: LinkId, epoch: u64, limit: u64, mut send: SendHalf, recv: RecvHalf) -> Self {
        // Nothing was sent, so no offset but 0 can be wrong.
        let _ = send.acknowledge(0, limit);
        Self::new(Role::Acceptor, Phase::Accepting, epoch, Some(from), send, recv)
    }

    fn new(
        role: Role,
        phase: Phase,
        epoch: u64,
        path: Option<LinkId>,
        send: SendHalf,
        recv: RecvHalf,
    ) -> Self {
        Self {
            role,
            phase,
            epoch,
            path,
            instance: None,
            open_unanswered: false,
            answer: None,
            ended: None,
            truncated: false,
            departed: None,
            parked_since: None,
            resumed: 0,
            send,
            recv,
        }
    }

    /// Its phase.
    pub fn phase(&self) -> Phase {
        self.phase
    }

    /// The number of the newest attempt to open or resume it.
    pub fn epoch(&self) -> u64 {
        self.epoch
    }

    /// The link it runs on.
    pub fn path(&self) -> Option<LinkId> {
        self.path
    }

    /// Whether its owner may not take what it has read for all that was sent, even behind the end of stream.
    pub fn is_cut(&self) -> bool {
        self.truncated
    }

    /// Why it ended, if it did not end in good order.
    pub fn ended(&self) -> Option<&SessionError> {
        self.ended.as_ref()
    }

    /// Since when it has waited for a path that only its peer can bring.
    pub fn parked_since(&self) -> Option<Instant> {
        self.parked_since
    }

    /// Whether it was open and has no path, or none that is confirmed.
    pub fn needs_path(&self) -> bool {
        matches!(self.phase, Phase::Parked | Phase::Resuming)
    }

    /// Bytes that have moved, in both directions together.
    pub fn moved(&self) -> u64 {
        self.send.acknowledged() + self.recv.taken() + self.recv.queued() as u64
    }

    /// How often it was resumed on another path.
    pub fn resumed(&self) -> u32 {
        self.resumed
    }

    /// Opener: the process that holds the acceptor, once it is known.
    pub fn instance(&self) -> Option<Instance> {
        self.instance.filter(|_| self.phase != Phase::Opening)
    }

    /// Opener: the process that the next Open is believed to reach.
    pub fn asks_of(&mut self, process: Option<Instance>) {
        if self.phase == Phase::Opening {
            self.instance = process.or(self.instance);
        }
    }

    /// Whether this end asked for the session.
    pub fn is_opener(&self) -> bool {
        matches!(self.role, Role::Opener { .. })
    }

    /// Opener: the target, and the client as the acceptor is told of it.
    pub fn opened_for(&self) -> Option<(Target, String)> {
        match &self.role {
            Role::Opener { target, client } => Some((target.clone(), client.clone())),
            Role::Acceptor => None,
        }
    }

    /// Opener: sends Open over `link` before the session was open, Resume after. Any other end stays unchanged.
    pub fn ask(&mut self, link: LinkId) -> Actions {
        let answer = match self.phase {
            Phase::Opening => PendingFrame::Open,
            Phase::Parked | Phase::Resuming if self.is_opener() => PendingFrame::Resume,
            _ => return Actions::default(),
        };
        self.mark_open_unanswered();
        self.phase = if answer == PendingFrame::Open { Phase::Opening } else { Phase::Resuming };
        self.epoch += 1;
        self.path = Some(link);
        self.parked_since = None;
        self.answer = Some(answer);
        Actions { state: true, ..Actions::default() }
    }

    /// Acceptor: accepts, because the target answered.
    pub fn accept(&mut self, now: Instant) -> Actions {
        if self.phase == Phase::Accepting {
            if self.path.is_some() {
                self.phase = Phase::Open;
                self.answer = Some(PendingFrame::Opened);
            } else {
                self.phase = Phase::Parked;
                self.parked_since.get_or_insert(now);
            }
        }
        Actions::default()
    }

    /// Handles the loss of the path. The session ends with it if the link's peer cannot resume.
    pub fn link_ended(&mut self, link: LinkId, why: Option<SessionError>, now: Instant) -> Actions {
        if self.path != Some(link) {
            return Actions::default();
        }
        match why {
            Some(why) if self.phase != Phase::Closed => self.close(why),
            _ => self.lose_path(now),
        }
    }

    /// What it has to send that overtakes data: an answer or a reset, or else credit.
    pub fn control(&self) -> Option<ControlPriority> {
        self.path?;
        let kind =
            || if self.recv.is_credit_urgent() { ControlPriority::Needed } else { ControlPriority::Credit };
        let credit = || (self.phase == Phase::Open && self.recv.credit_due()).then(kind);
        self.answer.as_ref().map(|_| ControlPriority::Answer).or_else(credit)
    }

    /// How many bytes it may send. Some(0): only the end of its direction is due. None: neither.
    pub fn backlog(&self) -> Option<usize> {
        if self.path.is_none() || self.phase != Phase::Open {
            return None;
        }
        let bytes = self.send.sendable();
        (bytes > 0 || self.send.finish_due() || self.break_due()).then_some(bytes)
    }

    /// What it sends next on `link`: answers before credit, credit before at most `max` bytes, bytes before their end.
    pub fn next_frame(&mut self, link: LinkId, max: usize) -> (Option<SessionFrame>, Actions) {
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
        if max == 0 {
            return (None, Actions::default());
        }
        let frame = self.send.take(max).map(SessionFrame::Data);
        let frame = frame.or_else(|| self.send.take_finish().map(|total| SessionFrame::Fin { total }));
        let frame = frame.or_else(|| self.take_break());
        (frame, Actions { write: self.send.has_room(), ..Actions::default() })
    }

    fn send_answer(&mut self, answer: PendingFrame) -> (Option<SessionFrame>, Actions) {
        let epoch = self.epoch;
        let frame = match (answer, &self.role) {
            (PendingFrame::Open, Role::Opener { target, client }) => {
                let (target, client) = (target.clone(), client.clone());
                SessionFrame::Open { target, limit: self.recv.limit(), epoch, client, opener: None }
            }
            (PendingFrame::Open, Role::Acceptor) => return (None, Actions::default()),
            (PendingFrame::Opened, _) => {
                SessionFrame::Opened { limit: self.recv.limit(), epoch, instance: None }
            }
            (PendingFrame::Resume, _) => {
                let (received, limit) = self.recv.credit();
                SessionFrame::Resume { received, limit, epoch, instance: self.instance, opener: None }
            }
            (PendingFrame::Resumed, _) => {
                let (received, limit) = self.recv.credit();
                SessionFrame::Resumed { received, limit, epoch }
            }
            (PendingFrame::Refused(refusal), _) => SessionFrame::Refused { epoch, refusal },
            (PendingFrame::Reset(refusal), _) => SessionFrame::Reset { epoch, refusal },
        };
        if self.phase == Phase::Resuming && matches!(frame, SessionFrame::Reset { .. }) {
            self.epoch += 1;
            self.answer = Some(PendingFrame::Resume);
        }
        if self.phase == Phase::Closing {
            self.phase = Phase::Closed;
            self.path = None;
            return (Some(frame), Actions { forget: true, ..Actions::default() });
        }
        (Some(frame), self.close_if_complete(Actions::default()))
    }
}

// The phases of an end, and the effects of an event.

/// Which of the two ends.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Role {
    /// The end that asked for the session.
    Opener {
        /// What the acceptor is asked to dial.
        target: Target,
        /// The client, for the acceptor's log.
        client: String,
    },
    /// The end that dials.
    Acceptor,
}

/// The phase of an end.
///
/// ```text
///          opener                                              acceptor
///
///   ask ─▶ Asking ──Refused──────────────▶ Gone         Open ─▶ Dialling ──refuse──▶ Leaving
///             │ Opened                                             │ accept
///             ▼                                                    ▼
///   ┌─────▶ Open ──all is acknowledged──▶ Leaving         ┌────▶ Open ──all is sent and received──▶ Delivered
///   │         │ path lost                    │            │        │ path lost                        │
///   │         ▼                              │         Resume      ▼                                  │
///   │       Parked ◀───────────┐         Reset is         └───── Parked                             Reset,
///   │         │ ask        path lost,    sent, or                  │                          or the grace time
///   │         ▼             not here     path lost          the grace time is over                 is over
///   │ Resumed │                │             ▼                     ▼                                  ▼
///   └────── Resuming ──────────┘           Gone                  Gone                               Gone
/// ```
///
/// An owner that lets go, a peer that violates the protocol and a Broken that has been answered lead from any phase to
/// Leaving, or to Gone if there is no path; an opening that is given up and may have reached an acceptor goes to Resuming
/// or Parked instead. A Reset from the peer leads to Gone. Resume finds an acceptor in Open and
/// Delivered too. The tables of docs/protocol.md#states have each frame in each phase.
///
/// A path may be missing in [`Phase::Asking`], [`Phase::Dialling`] and [`Phase::LastAck`] too.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Phase {
    /// Opener: waits for Opened or Refused.
    Opening,
    /// Acceptor: the offer is not answered yet.
    Accepting,
    /// Bytes move.
    Open,
    /// No path: nothing is sent, nothing taken; what has arrived may still be read.
    Parked,
    /// Opener: waits for Resumed.
    Resuming,
    /// Acceptor: everything is sent and received; kept until the opener confirms it by a Reset, or the grace time is
    /// over.
    LastAck,
    /// One last frame is to be sent, then the end is forgotten.
    Closing,
    /// Over. What has arrived may still be read.
    Closed,
}

/// What the caller has to do after an event; all may be set at once.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
#[must_use]
pub struct Actions {
    /// The reader may go on.
    pub read: bool,
    /// The writer may go on.
    pub write: bool,
    /// The phase or the path changed: wake the tasks that wait for an answer or look for a path.
    pub state: bool,
    /// Nothing is left to send or receive: the table may forget the session.
    pub forget: bool,
    /// The frame was ignored: wrong link, role, phase or an old epoch.
    pub dropped: bool,
}

// Handles each frame, and the end of a session once both halves are done.

impl SessionState {
    /// Handles one frame that came over the link `from`.
    pub fn on_frame(&mut self, from: LinkId, frame: SessionFrame, now: Instant) -> Actions {
        match frame {
            SessionFrame::Open { limit, epoch, .. } => self.asked_again(from, epoch, None, limit),
            SessionFrame::Resume { received, limit, epoch, .. } => {
                self.asked_again(from, epoch, Some(received), limit)
            }
            _ if self.path != Some(from) => DROPPED,
            SessionFrame::Opened { limit, epoch, instance } => self.opened(limit, epoch, instance),
            SessionFrame::Refused { epoch, refusal } => self.refused(epoch, refusal, now),
            SessionFrame::Resumed { received, limit, epoch } => self.put_back(received, limit, epoch),
            SessionFrame::PathLost { epoch } if epoch >= self.epoch => self.lose_path(now),
            SessionFrame::PathLost { .. } => DROPPED,
            SessionFrame::Reset { epoch, refusal } => self.reset(epoch, refusal, now),
            SessionFrame::ResetAt { total, refusal }
                if matches!(self.phase, Phase::Open | Phase::LastAck) =>
            {
                self.on_reset_at(total, refusal)
            }
            SessionFrame::ResetAt { .. } => DROPPED,
            SessionFrame::Data(_) | SessionFrame::Fin { .. } | SessionFrame::Credit { .. }
                if self.phase != Phase::Open =>
            {
                DROPPED
            }
            SessionFrame::Data(bytes) => match self.recv.data(bytes, now) {
                Ok(()) if self.departed.is_some() => {
                    self.recv.discard();
                    Actions::default()
                }
                Ok(()) => Actions { read: true, ..Actions::default() },
                Err(bad) => self.on_protocol_error(bad),
            },
            SessionFrame::Fin { total } => match self.recv.finish(total) {
                Ok(()) => self.close_if_complete(Actions { read: true, ..Actions::default() }),
                Err(bad) => self.on_protocol_error(bad),
            },
            SessionFrame::Credit { received, limit } => match self.send.acknowledge(received, limit) {
                Ok(()) => {
                    self.close_if_complete(Actions { write: self.send.has_room(), ..Actions::default() })
                }
                Err(bad) => self.on_protocol_error(bad),
            },
        }
    }

    fn opened(&mut self, limit: u64, epoch: u64, instance: Option<Instance>) -> Actions {
        if !self.asks_to_open() || epoch != self.epoch {
            return DROPPED;
        }
        self.phase = Phase::Open;
        self.instance = instance;
        // It was given up just now: an open session hears that by Broken.
        self.answer = None;
        match self.send.acknowledge(0, limit) {
            Ok(()) => Actions { state: true, write: true, ..Actions::default() },
            Err(bad) => self.on_protocol_error(bad),
        }
    }

    fn refused(&mut self, epoch: u64, refusal: SessionError, now: Instant) -> Actions {
        if !self.asks_to_open() || epoch != self.epoch {
            return DROPPED;
        }
        if self.phase == Phase::Opening && refusal.code == ErrorCode::NodeNotConnected {
            self.path = None;
            return Actions { state: true, ..Actions::default() };
        }
        // A Resume that is refused has found the acceptor, wherever that was.
        let answers_open =
            self.phase == Phase::Opening || matches!(self.answer, Some(PendingFrame::Reset(_)));
        if answers_open && self.open_unanswered && !self.recv.is_endless() {
            return self.refused_elsewhere(refusal, now);
        }
        self.close(refusal)
    }

    /// Whether it waits for the answer to an Open. One that was given up asks for it by a Resume.
    fn asks_to_open(&self) -> bool {
        self.phase == Phase::Opening || self.phase == Phase::Resuming && self.departed.is_some()
    }

    fn put_back(&mut self, received: u64, limit: u64, epoch: u64) -> Actions {
        if self.phase != Phase::Resuming || epoch != self.epoch {
            return DROPPED;
        }
        self.phase = Phase::Open;
        self.resumed += 1;
        match self.resume_sending(received, limit) {
            Ok(()) => self.close_if_complete(Actions { state: true, write: true, ..Actions::default() }),
            Err(bad) => self.on_protocol_error(bad),
        }
    }

    fn reset(&mut self, epoch: u64, refusal: SessionError, now: Instant) -> Actions {
        match self.phase {
            Phase::Parked => DROPPED,
            Phase::Resuming if epoch != self.epoch => DROPPED,
            // A pod on the path sent it, not the acceptor: the next path may lead to the acceptor.
            Phase::Resuming
                if matches!(refusal.code, ErrorCode::NodeNotConnected | ErrorCode::Overloaded) =>
            {
                self.lose_path(now)
            }
            _ => self.close(refusal),
        }
    }

    /// An Open (without `received`) or a Resume reaches an acceptor.
    fn asked_again(&mut self, from: LinkId, epoch: u64, received: Option<u64>, limit: u64) -> Actions {
        if self.is_opener() || epoch <= self.epoch {
            return DROPPED;
        }
        if self.phase == Phase::Closing {
            // The last frame goes to where the opener is now: the link that it ran on may be dead unnoticed.
            (self.epoch, self.path) = (epoch, Some(from));
            return Actions::default();
        }
        if self.phase == Phase::Accepting && received.is_some() {
            // Nobody resumes what was not open, but to take it back.
            (self.epoch, self.path) = (epoch, Some(from));
            return self.on_open_cancelled();
        }
        let fresh = self.recv.is_untouched() && (self.is_empty() || self.send.is_untouched());
        let answer = match (self.phase, received) {
            (Phase::Accepting, _) => None,
            (Phase::Open | Phase::Parked, None) if fresh => Some(PendingFrame::Opened),
            (Phase::Open | Phase::Parked | Phase::LastAck, Some(_)) => Some(PendingFrame::Resumed),
            _ => return DROPPED,
        };
        self.epoch = epoch;
        self.path = Some(from);
        self.parked_since = None;
        if let Err(bad) = self.resume_sending(received.unwrap_or(0), limit) {
            return self.on_protocol_error(bad);
        }
        if answer.is_some() && self.phase != Phase::LastAck {
            self.phase = Phase::Open;
        }
        self.resumed += u32::from(answer == Some(PendingFrame::Resumed));
        self.answer = answer;
        self.close_if_complete(Actions { write: true, ..Actions::default() })
    }

    pub(crate) fn lose_path(&mut self, now: Instant) -> Actions {
        self.mark_open_unanswered();
        self.path = None;
        self.parked_since = Some(now);
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

    /// After something was acknowledged: ends the session if everything is sent and received.
    pub(crate) fn close_if_complete(&mut self, effects: Actions) -> Actions {
        if self.phase != Phase::Open || !self.send.is_done() || self.departed.is_some() {
            return effects;
        }
        if self.is_opener() && self.recv.is_ended() {
            self.phase = Phase::Closing;
            self.answer = Some(PendingFrame::Reset(SessionError::new(ErrorCode::NoError, "")));
        } else if !self.is_opener() && self.recv.is_done() && self.answer.is_none() {
            self.phase = Phase::LastAck;
        }
        effects
    }
}

const DROPPED: Actions = Actions { read: false, write: false, state: false, forget: false, dropped: true };

// How an end departs: because its owner left, or for want of a path or memory; and how it delivers its last bytes.

/// An owner that has left before its session was over.
#[derive(Debug)]
pub(crate) struct Orphan {
    why: SessionError,
    since: Instant,
    /// Broken is to be sent, behind all that was accepted.
    due: bool,
    /// What was accepted is forgotten.
    empty: bool,
}

impl SessionState {
    /// The owner drops the session: its bytes are dropped, and the peer gets `why`, on the next path if there is none
    /// now. If both directions were ended before, the rest is delivered instead.
    pub fn abandon(&mut self, why: SessionError, now: Instant) -> Actions {
        match self.phase {
            Phase::LastAck | Phase::Closing | Phase::Closed => return Actions::default(),
            Phase::Open | Phase::Parked | Phase::Resuming if self.is_complete() => return Actions::default(),
            Phase::Open | Phase::Parked | Phase::Resuming => {
                self.send.forget();
                return self.orphan(why, now, true);
            }
            Phase::Opening => return self.cancel_open(why, now),
            Phase::Accepting => self.answer = Some(PendingFrame::Refused(why.clone())),
        }
        self.start_closing(why)
    }

    /// Gives up an opening. If its Open may have reached an acceptor, it stays until that is sure to have heard of it: a
    /// Reset may be lost with its path, so a Resume follows, which opens nothing where the Open never came, and is answered
    /// by *unknown* where the Reset did.
    fn cancel_open(&mut self, why: SessionError, now: Instant) -> Actions {
        let sent = self.path.is_some() && self.answer.is_none();
        if !sent && !self.open_unanswered {
            self.answer = Some(PendingFrame::Reset(why.clone()));
            return self.start_closing(why);
        }
        self.phase = if self.path.is_some() { Phase::Resuming } else { Phase::Parked };
        let due = if sent { PendingFrame::Reset(why.clone()) } else { PendingFrame::Resume };
        self.answer = self.path.map(|_| due);
        self.orphan(why, now, true)
    }

    /// The newest Open of an opening is refused, while an older one may come to an acceptor over a path that was left: as
    /// one that is given up, it stays until that is sure to have heard of it.
    pub(crate) fn refused_elsewhere(&mut self, why: SessionError, now: Instant) -> Actions {
        self.phase = Phase::Resuming;
        self.epoch += 1;
        self.answer = Some(PendingFrame::Resume);
        self.orphan(why, now, true)
    }

    /// The owner's connection has broken off. All that it wrote is delivered, and then the reason; what the peer has
    /// sent and goes on sending is dropped.
    pub fn abort(&mut self, why: SessionError, now: Instant) -> Actions {
        let open = matches!(self.phase, Phase::Open | Phase::Parked | Phase::Resuming);
        if !open || self.departed.is_some() || self.is_complete() {
            return self.abandon(why, now);
        }
        self.orphan(why, now, false)
    }

    fn orphan(&mut self, why: SessionError, now: Instant, empty: bool) -> Actions {
        // A reason that was recorded before stays.
        let (why, since) = self.departed.take().map_or((why, now), |before| (before.why, before.since));
        self.drop_unread(&why);
        self.recv.close();
        self.departed = Some(Orphan { why, since, due: true, empty });
        Actions { read: true, write: true, state: true, ..Actions::default() }
    }

    /// Drops the bytes that its owner has not read, who is told why, in whatever phase the session is.
    pub fn drop_unread(&mut self, why: &SessionError) {
        self.recv.discard();
        self.ended.get_or_insert_with(|| why.clone());
        self.truncated = true;
    }

    /// Opener: the path goes. If an Open has gone over it that was not answered, there may be an acceptor.
    pub(crate) fn mark_open_unanswered(&mut self) {
        self.open_unanswered |= self.phase == Phase::Opening && self.path.is_some() && self.answer.is_none();
    }

    fn is_complete(&self) -> bool {
        self.send.is_finished() && self.recv.is_ended() && self.recv.queued() == 0
    }

    /// Since when it delivers its last bytes without an owner.
    pub fn departed_since(&self) -> Option<Instant> {
        self.departed.as_ref().map(|departed| departed.since)
    }

    /// Drops the bytes that it still delivers for an owner that has left. False if there is nothing to deliver.
    pub fn evict(&mut self) -> (bool, Actions) {
        let Some(Orphan { why, .. }) = self.departed.take() else { return (false, Actions::default()) };
        let effects = match self.phase {
            Phase::Open | Phase::Resuming => {
                self.answer = Some(PendingFrame::Reset(why.clone()));
                self.start_closing(why)
            }
            Phase::Parked => self.close(why),
            _ => Actions::default(),
        };
        (true, effects)
    }

    /// Its opener has given it up while the target was being dialled: that is answered, and nothing more.
    pub(crate) fn on_open_cancelled(&mut self) -> Actions {
        let why = SessionError::new(ErrorCode::Cancelled, "given up by its opener");
        self.answer = Some(PendingFrame::Reset(why.clone()));
        self.start_closing(why)
    }

    /// Ends the session after the grace time without a path. An opener whose Resume is not answered yet sends the
    /// reason, as the acceptor may have resumed; one that was answered just now goes on.
    pub fn give_up(&mut self, why: SessionError) -> Actions {
        match self.phase {
            Phase::Resuming => {
                self.answer = Some(PendingFrame::Reset(why.clone()));
                self.start_closing(why)
            }
            Phase::Parked => self.close(why),
            _ if self.is_opener() => Actions::default(),
            _ => self.close(why),
        }
    }

    /// Whether a last frame waits for its turn on the path that it has.
    pub fn has_pending_close(&self) -> bool {
        let last = self.phase == Phase::Closing || self.departed.is_some() && self.answer.is_some();
        self.path.is_some() && (last || self.break_due())
    }

    /// Whether all that a departed owner wrote is sent, and only Broken is not.
    pub(crate) fn break_due(&self) -> bool {
        self.departed.as_ref().is_some_and(|departed| departed.due) && self.send.unsent() == 0
    }

    pub(crate) fn take_break(&mut self) -> Option<SessionFrame> {
        if !self.break_due() {
            return None;
        }
        let departed = self.departed.as_mut()?;
        departed.due = false;
        let total = if departed.empty { 0 } else { self.send.written() + 1 };
        Some(SessionFrame::ResetAt { total, refusal: departed.why.clone() })
    }

    /// On a path whose peer does not know Broken: sends Reset in its place, and nothing more.
    pub fn reset_instead(&mut self, why: SessionError) -> (SessionFrame, Actions) {
        (SessionFrame::Reset { epoch: self.epoch, refusal: why.clone() }, self.close(why))
    }

    /// Answers Broken once all bytes of the peer's departed owner are here, so that the peer need not keep them.
    pub(crate) fn on_reset_at(&mut self, total: u64, why: SessionError) -> Actions {
        match self.recv.on_reset_at(total) {
            Ok(()) => {
                self.answer = Some(PendingFrame::Reset(SessionError::new(ErrorCode::NoError, "")));
                self.start_closing(why)
            }
            Err(bad) => self.on_protocol_error(bad),
        }
    }

    /// Whether its owner has left and its bytes are dropped.
    pub(crate) fn is_empty(&self) -> bool {
        self.departed.as_ref().is_some_and(|departed| departed.empty)
    }

    /// Goes on on another path: bytes that were not acknowledged are sent again.
    pub(crate) fn resume_sending(&mut self, received: u64, limit: u64) -> Result<(), AckError> {
        if let Some(departed) = &mut self.departed {
            departed.due = true;
        }
        if self.is_empty() { Ok(()) } else { self.send.rewind(received, limit) }
    }

    pub(crate) fn on_protocol_error(&mut self, bad: impl std::error::Error) -> Actions {
        let why = SessionError::new(ErrorCode::ProtocolError, bad);
        self.answer = Some(PendingFrame::Reset(why.clone()));
        self.start_closing(why)
    }

    /// Makes the waiting answer the last frame, if there is a path to send it on.
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
        Actions { read: true, write: true, state: true, forget: true, dropped: false }
    }
}

#[cfg(test)]
mod tests;
