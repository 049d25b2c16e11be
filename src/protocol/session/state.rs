//! One end of a session: its states and what each frame, lost path or call of its owner does to them.
//!
//! The tables of docs/protocol.md#states, as code. Nothing here waits, locks or reads a clock: every call returns its
//! [`Effects`], and what the end has to send is fetched by [`SessionState::next_frame`] when the link has room for it.

mod depart;
mod on_frame;
mod phase;

use tokio::time::Instant;

use crate::names::{Instance, Target};
use crate::protocol::link::source::{Control, LinkId};
use crate::protocol::session::recv::RecvHalf;
use crate::protocol::session::send::SendHalf;
use crate::protocol::wire::frame::{Refusal, SessionFrame};

use crate::protocol::session::state::depart::Departed;
pub(crate) use crate::protocol::session::state::phase::{Effects, Phase, Role};

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
    answer: Option<DueFrame>,
    /// Why it ended, if it did not end in good order.
    ended: Option<Refusal>,
    /// Bytes that its owner has not read may have been dropped.
    cut: bool,
    departed: Option<Departed>,
    parked_since: Option<Instant>,
    resumed: u32,
    /// The direction from this end.
    pub send: SendHalf,
    /// The direction to this end.
    pub recv: RecvHalf,
}

#[derive(Debug, Clone, PartialEq, Eq)]
enum DueFrame {
    Open,
    Opened,
    Refused(Refusal),
    Resume,
    Resumed,
    Reset(Refusal),
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
    pub(crate) fn ended(&self) -> Option<&Refusal> {
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
            Phase::Asking => DueFrame::Open,
            Phase::Parked | Phase::Resuming if self.is_opener() => DueFrame::Resume,
            _ => return Effects::default(),
        };
        self.note_astray();
        self.phase = if answer == DueFrame::Open { Phase::Asking } else { Phase::Resuming };
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
                self.answer = Some(DueFrame::Opened);
            } else {
                self.phase = Phase::Parked;
                self.parked_since.get_or_insert(now);
            }
        }
        Effects::default()
    }

    /// Handles the loss of the path. The session ends with it if the link's peer cannot resume.
    pub(crate) fn link_ended(&mut self, link: LinkId, why: Option<Refusal>, now: Instant) -> Effects {
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

    fn send_answer(&mut self, answer: DueFrame) -> (Option<SessionFrame>, Effects) {
        let epoch = self.epoch;
        let frame = match (answer, &self.role) {
            (DueFrame::Open, Role::Opener { target, client }) => {
                let (target, client) = (target.clone(), client.clone());
                SessionFrame::Open { target, limit: self.recv.limit(), epoch, client, opener: None }
            }
            (DueFrame::Open, Role::Acceptor) => return (None, Effects::default()),
            (DueFrame::Opened, _) => SessionFrame::Opened { limit: self.recv.limit(), epoch, instance: None },
            (DueFrame::Resume, _) => {
                let (received, limit) = self.recv.credit();
                SessionFrame::Resume { received, limit, epoch, instance: self.instance, opener: None }
            }
            (DueFrame::Resumed, _) => {
                let (received, limit) = self.recv.credit();
                SessionFrame::Resumed { received, limit, epoch }
            }
            (DueFrame::Refused(refusal), _) => SessionFrame::Refused { epoch, refusal },
            (DueFrame::Reset(refusal), _) => SessionFrame::Reset { epoch, refusal },
        };
        if self.phase == Phase::Resuming && matches!(frame, SessionFrame::Reset { .. }) {
            self.epoch += 1;
            self.answer = Some(DueFrame::Resume);
        }
        if self.phase == Phase::Leaving {
            self.phase = Phase::Gone;
            self.path = None;
            return (Some(frame), Effects { forget: true, ..Effects::default() });
        }
        (Some(frame), self.settle(Effects::default()))
    }
}

#[cfg(test)]
mod tests;
