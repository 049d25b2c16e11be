//! One end of a session: its states and what each frame, lost path or call of its owner does to them.
//!
//! The tables of docs/protocol.md#states, as code. Nothing here waits, locks or reads a clock: every call returns its
//! `Effects`, and what the end has to send is fetched by `SessionState::next_frame` when the link has room for it.

use std::fmt;
use tokio::time::Instant;

use crate::base::names::{Instance, Target};
use crate::proto::frame::{Code, SessionError, SessionFrame};
use crate::proto::halves::{AckError, RecvHalf, SendHalf};

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
pub(crate) enum Control {
    /// Credit alone.
    Credit,
    /// Credit without which the peer would soon have to stop, or that ends the session.
    Needed,
    /// An answer, a request or a last frame; perhaps credit behind it.
    Answer,
}

/// One end; see the module.
#[derive(Debug)]
pub(crate) struct SessionState {
    role: Role,
    phase: Phase,
    epoch: u64,
    path: Option<LinkId>,
    /// Opener: the process that holds the acceptor; while it asks, the one that is believed to be asked.
    instance: Option<Instance>,
    /// Opener: an Open was sent whose answer cannot come any more, so there may be an acceptor.
    astray: bool,
    /// What must be sent before anything else.
    answer: Option<PendingFrame>,
    /// Why it ended, if it did not end in good order.
    ended: Option<SessionError>,
    /// Bytes that its owner has not read may have been dropped.
    cut: bool,
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
    pub(crate) fn opener(target: Target, client: String, send: SendHalf, recv: RecvHalf) -> Self {
        Self::new(Role::Opener { target, client }, Phase::Asking, 0, None, send, recv)
    }

    /// An acceptor that was asked by `from`, and may send below `limit` once it accepts.
    pub(crate) fn acceptor(from: LinkId, epoch: u64, limit: u64, mut send: SendHalf, recv: RecvHalf) -> Self {
        // Nothing was sent, so no offset but 0 can be wrong.
        let _ = send.acknowledge(0, limit);
        Self::new(Role::Acceptor, Phase::Dialling, epoch, Some(from), send, recv)
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
            astray: false,
            answer: None,
            ended: None,
            cut: false,
            departed: None,
            parked_since: None,
            resumed: 0,
            send,
            recv,
        }
    }

    /// Its phase.
    pub(crate) fn phase(&self) -> Phase {
        self.phase
    }

    /// The number of the newest attempt to open or resume it.
    pub(crate) fn epoch(&self) -> u64 {
        self.epoch
    }

    /// The link it runs on.
    pub(crate) fn path(&self) -> Option<LinkId> {
        self.path
    }

    /// Whether its owner may not take what it has read for all that was sent, even behind the end of stream.
    pub(crate) fn is_cut(&self) -> bool {
        self.cut
    }

    /// Why it ended, if it did not end in good order.
    pub(crate) fn ended(&self) -> Option<&SessionError> {
        self.ended.as_ref()
    }

    /// Since when it has waited for a path that only its peer can bring.
    pub(crate) fn parked_since(&self) -> Option<Instant> {
        self.parked_since
    }

    /// Whether it was open and has no path, or none that is confirmed.
    pub(crate) fn needs_path(&self) -> bool {
        matches!(self.phase, Phase::Parked | Phase::Resuming)
    }

    /// Bytes that have moved, in both directions together.
    pub(crate) fn moved(&self) -> u64 {
        self.send.acknowledged() + self.recv.taken() + self.recv.queued() as u64
    }

    /// How often it was resumed on another path.
    pub(crate) fn resumed(&self) -> u32 {
        self.resumed
    }

    /// Opener: the process that holds the acceptor, once it is known.
    pub(crate) fn instance(&self) -> Option<Instance> {
        self.instance.filter(|_| self.phase != Phase::Asking)
    }

    /// Opener: the process that the next Open is believed to reach.
    pub(crate) fn asks_of(&mut self, process: Option<Instance>) {
        if self.phase == Phase::Asking {
            self.instance = process.or(self.instance);
        }
    }

    /// Whether this end asked for the session.
    pub(crate) fn is_opener(&self) -> bool {
        matches!(self.role, Role::Opener { .. })
    }

    /// Opener: the target, and the client as the acceptor is told of it.
    pub(crate) fn opened_for(&self) -> Option<(Target, String)> {
        match &self.role {
            Role::Opener { target, client } => Some((target.clone(), client.clone())),
            Role::Acceptor => None,
        }
    }

    /// Opener: sends Open over `link` before the session was open, Resume after. Any other end stays unchanged.
    pub(crate) fn ask(&mut self, link: LinkId) -> Effects {
        let answer = match self.phase {
            Phase::Asking => PendingFrame::Open,
            Phase::Parked | Phase::Resuming if self.is_opener() => PendingFrame::Resume,
            _ => return Effects::default(),
        };
        self.note_astray();
        self.phase = if answer == PendingFrame::Open { Phase::Asking } else { Phase::Resuming };
        self.epoch += 1;
        self.path = Some(link);
        self.parked_since = None;
        self.answer = Some(answer);
        Effects { state: true, ..Effects::default() }
    }

    /// Acceptor: accepts, because the target answered.
    pub(crate) fn accept(&mut self, now: Instant) -> Effects {
        if self.phase == Phase::Dialling {
            if self.path.is_some() {
                self.phase = Phase::Open;
                self.answer = Some(PendingFrame::Opened);
            } else {
                self.phase = Phase::Parked;
                self.parked_since.get_or_insert(now);
            }
        }
        Effects::default()
    }

    /// Handles the loss of the path. The session ends with it if the link's peer cannot resume.
    pub(crate) fn link_ended(&mut self, link: LinkId, why: Option<SessionError>, now: Instant) -> Effects {
        if self.path != Some(link) {
            return Effects::default();
        }
        match why {
            Some(why) if self.phase != Phase::Gone => self.gone(why),
            _ => self.lose_path(now),
        }
    }

    /// What it has to send that overtakes data: an answer or a reset, or else credit.
    pub(crate) fn control(&self) -> Option<Control> {
        self.path?;
        let kind = || if self.recv.credit_needed() { Control::Needed } else { Control::Credit };
        let credit = || (self.phase == Phase::Open && self.recv.credit_due()).then(kind);
        self.answer.as_ref().map(|_| Control::Answer).or_else(credit)
    }

    /// How many bytes it may send. Some(0): only the end of its direction is due. None: neither.
    pub(crate) fn backlog(&self) -> Option<usize> {
        if self.path.is_none() || self.phase != Phase::Open {
            return None;
        }
        let bytes = self.send.sendable();
        (bytes > 0 || self.send.finish_due() || self.break_due()).then_some(bytes)
    }

    /// What it sends next on `link`: answers before credit, credit before at most `max` bytes, bytes before their end.
    pub(crate) fn next_frame(&mut self, link: LinkId, max: usize) -> (Option<SessionFrame>, Effects) {
        if self.path != Some(link) {
            return (None, Effects::default());
        }
        if let Some(answer) = self.answer.take() {
            return self.send_answer(answer);
        }
        if self.phase != Phase::Open {
            return (None, Effects::default());
        }
        if self.recv.credit_due() {
            let (received, limit) = self.recv.credit();
            return (Some(SessionFrame::Credit { received, limit }), self.settle(Effects::default()));
        }
        if max == 0 {
            return (None, Effects::default());
        }
        let frame = self.send.take(max).map(SessionFrame::Data);
        let frame = frame.or_else(|| self.send.take_finish().map(|total| SessionFrame::Finish { total }));
        let frame = frame.or_else(|| self.take_break());
        (frame, Effects { write: self.send.has_room(), ..Effects::default() })
    }

    fn send_answer(&mut self, answer: PendingFrame) -> (Option<SessionFrame>, Effects) {
        let epoch = self.epoch;
        let frame = match (answer, &self.role) {
            (PendingFrame::Open, Role::Opener { target, client }) => {
                let (target, client) = (target.clone(), client.clone());
                SessionFrame::Open { target, limit: self.recv.limit(), epoch, client, opener: None }
            }
            (PendingFrame::Open, Role::Acceptor) => return (None, Effects::default()),
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
        if self.phase == Phase::Leaving {
            self.phase = Phase::Gone;
            self.path = None;
            return (Some(frame), Effects { forget: true, ..Effects::default() });
        }
        (Some(frame), self.settle(Effects::default()))
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
/// A path may be missing in [`Phase::Asking`], [`Phase::Dialling`] and [`Phase::Delivered`] too.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Phase {
    /// Opener: waits for Opened or Refused.
    Asking,
    /// Acceptor: the offer is not answered yet.
    Dialling,
    /// Bytes move.
    Open,
    /// No path: nothing is sent, nothing taken; what has arrived may still be read.
    Parked,
    /// Opener: waits for Resumed.
    Resuming,
    /// Acceptor: everything is sent and received; kept until the opener confirms it by a Reset, or the grace time is
    /// over.
    Delivered,
    /// One last frame is to be sent, then the end is forgotten.
    Leaving,
    /// Over. What has arrived may still be read.
    Gone,
}

/// What the caller has to do after an event; all may be set at once.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
#[must_use]
pub(crate) struct Effects {
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
    pub(crate) fn on_frame(&mut self, from: LinkId, frame: SessionFrame, now: Instant) -> Effects {
        match frame {
            SessionFrame::Open { limit, epoch, .. } => self.asked_again(from, epoch, None, limit),
            SessionFrame::Resume { received, limit, epoch, .. } => {
                self.asked_again(from, epoch, Some(received), limit)
            }
            _ if self.path != Some(from) => DROPPED,
            SessionFrame::Opened { limit, epoch, instance } => self.opened(limit, epoch, instance),
            SessionFrame::Refused { epoch, refusal } => self.refused(epoch, refusal, now),
            SessionFrame::Resumed { received, limit, epoch } => self.put_back(received, limit, epoch),
            SessionFrame::Lost { epoch } if epoch >= self.epoch => self.lose_path(now),
            SessionFrame::Lost { .. } => DROPPED,
            SessionFrame::Reset { epoch, refusal } => self.reset(epoch, refusal, now),
            SessionFrame::Broken { total, refusal }
                if matches!(self.phase, Phase::Open | Phase::Delivered) =>
            {
                self.broken(total, refusal)
            }
            SessionFrame::Broken { .. } => DROPPED,
            SessionFrame::Data(_) | SessionFrame::Finish { .. } | SessionFrame::Credit { .. }
                if self.phase != Phase::Open =>
            {
                DROPPED
            }
            SessionFrame::Data(bytes) => match self.recv.data(bytes, now) {
                Ok(()) if self.departed.is_some() => {
                    self.recv.discard();
                    Effects::default()
                }
                Ok(()) => Effects { read: true, ..Effects::default() },
                Err(bad) => self.violated(bad),
            },
            SessionFrame::Finish { total } => match self.recv.finish(total) {
                Ok(()) => self.settle(Effects { read: true, ..Effects::default() }),
                Err(bad) => self.violated(bad),
            },
            SessionFrame::Credit { received, limit } => match self.send.acknowledge(received, limit) {
                Ok(()) => self.settle(Effects { write: self.send.has_room(), ..Effects::default() }),
                Err(bad) => self.violated(bad),
            },
        }
    }

    fn opened(&mut self, limit: u64, epoch: u64, instance: Option<Instance>) -> Effects {
        if !self.asks_to_open() || epoch != self.epoch {
            return DROPPED;
        }
        self.phase = Phase::Open;
        self.instance = instance;
        // It was given up just now: an open session hears that by Broken.
        self.answer = None;
        match self.send.acknowledge(0, limit) {
            Ok(()) => Effects { state: true, write: true, ..Effects::default() },
            Err(bad) => self.violated(bad),
        }
    }

    fn refused(&mut self, epoch: u64, refusal: SessionError, now: Instant) -> Effects {
        if !self.asks_to_open() || epoch != self.epoch {
            return DROPPED;
        }
        if self.phase == Phase::Asking && refusal.code == Code::NotHere {
            self.path = None;
            return Effects { state: true, ..Effects::default() };
        }
        // A Resume that is refused has found the acceptor, wherever that was.
        let answers_open = self.phase == Phase::Asking || matches!(self.answer, Some(PendingFrame::Reset(_)));
        if answers_open && self.astray && !self.recv.is_endless() {
            return self.refused_elsewhere(refusal, now);
        }
        self.gone(refusal)
    }

    /// Whether it waits for the answer to an Open. One that was given up asks for it by a Resume.
    fn asks_to_open(&self) -> bool {
        self.phase == Phase::Asking || self.phase == Phase::Resuming && self.departed.is_some()
    }

    fn put_back(&mut self, received: u64, limit: u64, epoch: u64) -> Effects {
        if self.phase != Phase::Resuming || epoch != self.epoch {
            return DROPPED;
        }
        self.phase = Phase::Open;
        self.resumed += 1;
        match self.say_again(received, limit) {
            Ok(()) => self.settle(Effects { state: true, write: true, ..Effects::default() }),
            Err(bad) => self.violated(bad),
        }
    }

    fn reset(&mut self, epoch: u64, refusal: SessionError, now: Instant) -> Effects {
        match self.phase {
            Phase::Parked => DROPPED,
            Phase::Resuming if epoch != self.epoch => DROPPED,
            // A pod on the path sent it, not the acceptor: the next path may lead to the acceptor.
            Phase::Resuming if matches!(refusal.code, Code::NotHere | Code::Busy) => self.lose_path(now),
            _ => self.gone(refusal),
        }
    }

    /// An Open (without `received`) or a Resume reaches an acceptor.
    fn asked_again(&mut self, from: LinkId, epoch: u64, received: Option<u64>, limit: u64) -> Effects {
        if self.is_opener() || epoch <= self.epoch {
            return DROPPED;
        }
        if self.phase == Phase::Leaving {
            // The last frame goes to where the opener is now: the link that it ran on may be dead unnoticed.
            (self.epoch, self.path) = (epoch, Some(from));
            return Effects::default();
        }
        if self.phase == Phase::Dialling && received.is_some() {
            // Nobody resumes what was not open, but to take it back.
            (self.epoch, self.path) = (epoch, Some(from));
            return self.taken_back();
        }
        let fresh = self.recv.is_untouched() && (self.is_empty() || self.send.is_untouched());
        let answer = match (self.phase, received) {
            (Phase::Dialling, _) => None,
            (Phase::Open | Phase::Parked, None) if fresh => Some(PendingFrame::Opened),
            (Phase::Open | Phase::Parked | Phase::Delivered, Some(_)) => Some(PendingFrame::Resumed),
            _ => return DROPPED,
        };
        self.epoch = epoch;
        self.path = Some(from);
        self.parked_since = None;
        if let Err(bad) = self.say_again(received.unwrap_or(0), limit) {
            return self.violated(bad);
        }
        if answer.is_some() && self.phase != Phase::Delivered {
            self.phase = Phase::Open;
        }
        self.resumed += u32::from(answer == Some(PendingFrame::Resumed));
        self.answer = answer;
        self.settle(Effects { write: true, ..Effects::default() })
    }

    pub(crate) fn lose_path(&mut self, now: Instant) -> Effects {
        self.note_astray();
        self.path = None;
        self.parked_since = Some(now);
        match self.phase {
            Phase::Leaving => {
                self.phase = Phase::Gone;
                return Effects { forget: true, ..Effects::default() };
            }
            Phase::Open | Phase::Resuming => {
                self.phase = Phase::Parked;
                self.answer = None;
            }
            _ => self.answer = None,
        }
        Effects { state: true, ..Effects::default() }
    }

    /// After something was acknowledged: ends the session if everything is sent and received.
    pub(crate) fn settle(&mut self, effects: Effects) -> Effects {
        if self.phase != Phase::Open || !self.send.is_done() || self.departed.is_some() {
            return effects;
        }
        if self.is_opener() && self.recv.is_ended() {
            self.phase = Phase::Leaving;
            self.answer = Some(PendingFrame::Reset(SessionError::new(Code::Over, "")));
        } else if !self.is_opener() && self.recv.is_done() && self.answer.is_none() {
            self.phase = Phase::Delivered;
        }
        effects
    }
}

const DROPPED: Effects = Effects { read: false, write: false, state: false, forget: false, dropped: true };

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
    pub(crate) fn abandon(&mut self, why: SessionError, now: Instant) -> Effects {
        match self.phase {
            Phase::Delivered | Phase::Leaving | Phase::Gone => return Effects::default(),
            Phase::Open | Phase::Parked | Phase::Resuming if self.is_complete() => return Effects::default(),
            Phase::Open | Phase::Parked | Phase::Resuming => {
                self.send.forget();
                return self.depart(why, now, true);
            }
            Phase::Asking => return self.take_back(why, now),
            Phase::Dialling => self.answer = Some(PendingFrame::Refused(why.clone())),
        }
        self.leave(why)
    }

    /// Gives up an opening. If its Open may have reached an acceptor, it stays until that is sure to have heard of it: a
    /// Reset may be lost with its path, so a Resume follows, which opens nothing where the Open never came, and is answered
    /// by *unknown* where the Reset did.
    fn take_back(&mut self, why: SessionError, now: Instant) -> Effects {
        let sent = self.path.is_some() && self.answer.is_none();
        if !sent && !self.astray {
            self.answer = Some(PendingFrame::Reset(why.clone()));
            return self.leave(why);
        }
        self.phase = if self.path.is_some() { Phase::Resuming } else { Phase::Parked };
        let due = if sent { PendingFrame::Reset(why.clone()) } else { PendingFrame::Resume };
        self.answer = self.path.map(|_| due);
        self.depart(why, now, true)
    }

    /// The newest Open of an opening is refused, while an older one may come to an acceptor over a path that was left: as
    /// one that is given up, it stays until that is sure to have heard of it.
    pub(crate) fn refused_elsewhere(&mut self, why: SessionError, now: Instant) -> Effects {
        self.phase = Phase::Resuming;
        self.epoch += 1;
        self.answer = Some(PendingFrame::Resume);
        self.depart(why, now, true)
    }

    /// The owner's connection has broken off. All that it wrote is delivered, and then the reason; what the peer has
    /// sent and goes on sending is dropped.
    pub(crate) fn break_off(&mut self, why: SessionError, now: Instant) -> Effects {
        let open = matches!(self.phase, Phase::Open | Phase::Parked | Phase::Resuming);
        if !open || self.departed.is_some() || self.is_complete() {
            return self.abandon(why, now);
        }
        self.depart(why, now, false)
    }

    fn depart(&mut self, why: SessionError, now: Instant, empty: bool) -> Effects {
        // A reason that was recorded before stays.
        let (why, since) = self.departed.take().map_or((why, now), |before| (before.why, before.since));
        self.drop_unread(&why);
        self.recv.close();
        self.departed = Some(Orphan { why, since, due: true, empty });
        Effects { read: true, write: true, state: true, ..Effects::default() }
    }

    /// Drops the bytes that its owner has not read, who is told why, in whatever phase the session is.
    pub(crate) fn drop_unread(&mut self, why: &SessionError) {
        self.recv.discard();
        self.ended.get_or_insert_with(|| why.clone());
        self.cut = true;
    }

    /// Opener: the path goes. If an Open has gone over it that was not answered, there may be an acceptor.
    pub(crate) fn note_astray(&mut self) {
        self.astray |= self.phase == Phase::Asking && self.path.is_some() && self.answer.is_none();
    }

    fn is_complete(&self) -> bool {
        self.send.is_finished() && self.recv.is_ended() && self.recv.queued() == 0
    }

    /// Since when it delivers its last bytes without an owner.
    pub(crate) fn departed_since(&self) -> Option<Instant> {
        self.departed.as_ref().map(|departed| departed.since)
    }

    /// Drops the bytes that it still delivers for an owner that has left. False if there is nothing to deliver.
    pub(crate) fn give_way(&mut self) -> (bool, Effects) {
        let Some(Orphan { why, .. }) = self.departed.take() else { return (false, Effects::default()) };
        let effects = match self.phase {
            Phase::Open | Phase::Resuming => {
                self.answer = Some(PendingFrame::Reset(why.clone()));
                self.leave(why)
            }
            Phase::Parked => self.gone(why),
            _ => Effects::default(),
        };
        (true, effects)
    }

    /// Its opener has given it up while the target was being dialled: that is answered, and nothing more.
    pub(crate) fn taken_back(&mut self) -> Effects {
        let why = SessionError::new(Code::GivenUp, "given up by its opener");
        self.answer = Some(PendingFrame::Reset(why.clone()));
        self.leave(why)
    }

    /// Ends the session after the grace time without a path. An opener whose Resume is not answered yet sends the
    /// reason, as the acceptor may have resumed; one that was answered just now goes on.
    pub(crate) fn give_up(&mut self, why: SessionError) -> Effects {
        match self.phase {
            Phase::Resuming => {
                self.answer = Some(PendingFrame::Reset(why.clone()));
                self.leave(why)
            }
            Phase::Parked => self.gone(why),
            _ if self.is_opener() => Effects::default(),
            _ => self.gone(why),
        }
    }

    /// Whether a last frame waits for its turn on the path that it has.
    pub(crate) fn owes_last_frame(&self) -> bool {
        let last = self.phase == Phase::Leaving || self.departed.is_some() && self.answer.is_some();
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
        Some(SessionFrame::Broken { total, refusal: departed.why.clone() })
    }

    /// On a path whose peer does not know Broken: sends Reset in its place, and nothing more.
    pub(crate) fn reset_instead(&mut self, why: SessionError) -> (SessionFrame, Effects) {
        (SessionFrame::Reset { epoch: self.epoch, refusal: why.clone() }, self.gone(why))
    }

    /// Answers Broken once all bytes of the peer's departed owner are here, so that the peer need not keep them.
    pub(crate) fn broken(&mut self, total: u64, why: SessionError) -> Effects {
        match self.recv.breaks(total) {
            Ok(()) => {
                self.answer = Some(PendingFrame::Reset(SessionError::new(Code::Over, "")));
                self.leave(why)
            }
            Err(bad) => self.violated(bad),
        }
    }

    /// Whether its owner has left and its bytes are dropped.
    pub(crate) fn is_empty(&self) -> bool {
        self.departed.as_ref().is_some_and(|departed| departed.empty)
    }

    /// Goes on on another path: bytes that were not acknowledged are sent again.
    pub(crate) fn say_again(&mut self, received: u64, limit: u64) -> Result<(), AckError> {
        if let Some(departed) = &mut self.departed {
            departed.due = true;
        }
        if self.is_empty() { Ok(()) } else { self.send.put_back(received, limit) }
    }

    pub(crate) fn violated(&mut self, bad: impl std::error::Error) -> Effects {
        let why = SessionError::new(Code::Violation, bad);
        self.answer = Some(PendingFrame::Reset(why.clone()));
        self.leave(why)
    }

    /// Makes the waiting answer the last frame, if there is a path to send it on.
    pub(crate) fn leave(&mut self, why: SessionError) -> Effects {
        if self.path.is_none() {
            return self.gone(why);
        }
        self.phase = Phase::Leaving;
        self.send.forget();
        self.recv.close();
        self.ended.get_or_insert(why);
        Effects { read: true, write: true, state: true, ..Effects::default() }
    }

    pub(crate) fn gone(&mut self, why: SessionError) -> Effects {
        self.phase = Phase::Gone;
        self.path = None;
        self.answer = None;
        let clean = why.code == Code::Over && self.recv.is_ended();
        if !clean || !self.send.is_finished() {
            self.ended.get_or_insert(why);
        }
        self.send.forget();
        Effects { read: true, write: true, state: true, forget: true, dropped: false }
    }
}

#[cfg(test)]
mod tests;
