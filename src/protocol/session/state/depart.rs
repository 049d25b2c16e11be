//! How an end departs: because its owner left, or for want of a path or memory; and how it delivers its last bytes.

use tokio::time::Instant;

use crate::protocol::session::send::BadOffset;
use crate::protocol::session::state::{DueFrame, Effects, Phase, SessionState};
use crate::protocol::wire::frame::{Code, Refusal, SessionFrame};

/// An owner that has left before its session was over.
#[derive(Debug)]
pub(super) struct Departed {
    why: Refusal,
    since: Instant,
    /// Broken is to be sent, behind all that was accepted.
    due: bool,
    /// What was accepted is forgotten.
    empty: bool,
}

impl SessionState {
    /// The owner drops the session: its bytes are dropped, and the peer gets `why`, on the next path if there is none
    /// now. If both directions were ended before, the rest is delivered instead.
    pub(crate) fn abandon(&mut self, why: Refusal, now: Instant) -> Effects {
        match self.phase {
            Phase::Delivered | Phase::Leaving | Phase::Gone => return Effects::default(),
            Phase::Open | Phase::Parked | Phase::Resuming if self.is_complete() => return Effects::default(),
            Phase::Open | Phase::Parked | Phase::Resuming => {
                self.send.forget();
                return self.depart(why, now, true);
            }
            Phase::Asking => return self.take_back(why, now),
            Phase::Dialling => self.answer = Some(DueFrame::Refused(why.clone())),
        }
        self.leave(why)
    }

    /// Gives up an opening. If its Open may have reached an acceptor, it stays until that is sure to have heard of it: a
    /// Reset may be lost with its path, so a Resume follows, which opens nothing where the Open never came, and is answered
    /// by *unknown* where the Reset did.
    fn take_back(&mut self, why: Refusal, now: Instant) -> Effects {
        let sent = self.path.is_some() && self.answer.is_none();
        if !sent && !self.astray {
            self.answer = Some(DueFrame::Reset(why.clone()));
            return self.leave(why);
        }
        self.phase = if self.path.is_some() { Phase::Resuming } else { Phase::Parked };
        let due = if sent { DueFrame::Reset(why.clone()) } else { DueFrame::Resume };
        self.answer = self.path.map(|_| due);
        self.depart(why, now, true)
    }

    /// The newest Open of an opening is refused, while an older one may come to an acceptor over a path that was left: as
    /// one that is given up, it stays until that is sure to have heard of it.
    pub(super) fn refused_elsewhere(&mut self, why: Refusal, now: Instant) -> Effects {
        self.phase = Phase::Resuming;
        self.epoch += 1;
        self.answer = Some(DueFrame::Resume);
        self.depart(why, now, true)
    }

    /// The owner's connection has broken off. All that it wrote is delivered, and then the reason; what the peer has
    /// sent and goes on sending is dropped.
    pub(crate) fn break_off(&mut self, why: Refusal, now: Instant) -> Effects {
        let open = matches!(self.phase, Phase::Open | Phase::Parked | Phase::Resuming);
        if !open || self.departed.is_some() || self.is_complete() {
            return self.abandon(why, now);
        }
        self.depart(why, now, false)
    }

    fn depart(&mut self, why: Refusal, now: Instant, empty: bool) -> Effects {
        // A reason that was recorded before stays.
        let (why, since) = self.departed.take().map_or((why, now), |before| (before.why, before.since));
        self.drop_unread(&why);
        self.recv.close();
        self.departed = Some(Departed { why, since, due: true, empty });
        Effects { read: true, write: true, state: true, ..Effects::default() }
    }

    /// Drops the bytes that its owner has not read, who is told why, in whatever phase the session is.
    pub(crate) fn drop_unread(&mut self, why: &Refusal) {
        self.recv.discard();
        self.ended.get_or_insert_with(|| why.clone());
        self.cut = true;
    }

    /// Opener: the path goes. If an Open has gone over it that was not answered, there may be an acceptor.
    pub(super) fn note_astray(&mut self) {
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
        let Some(Departed { why, .. }) = self.departed.take() else { return (false, Effects::default()) };
        let effects = match self.phase {
            Phase::Open | Phase::Resuming => {
                self.answer = Some(DueFrame::Reset(why.clone()));
                self.leave(why)
            }
            Phase::Parked => self.gone(why),
            _ => Effects::default(),
        };
        (true, effects)
    }

    /// Its opener has given it up while the target was being dialled: that is answered, and nothing more.
    pub(super) fn taken_back(&mut self) -> Effects {
        let why = Refusal::new(Code::GivenUp, "given up by its opener");
        self.answer = Some(DueFrame::Reset(why.clone()));
        self.leave(why)
    }

    /// Ends the session after the grace time without a path. An opener whose Resume is not answered yet sends the
    /// reason, as the acceptor may have resumed; one that was answered just now goes on.
    pub(crate) fn give_up(&mut self, why: Refusal) -> Effects {
        match self.phase {
            Phase::Resuming => {
                self.answer = Some(DueFrame::Reset(why.clone()));
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

    pub(super) fn take_break(&mut self) -> Option<SessionFrame> {
        if !self.break_due() {
            return None;
        }
        let departed = self.departed.as_mut()?;
        departed.due = false;
        let total = if departed.empty { 0 } else { self.send.written() + 1 };
        Some(SessionFrame::Broken { total, refusal: departed.why.clone() })
    }

    /// On a path whose peer does not know Broken: sends Reset in its place, and nothing more.
    pub(crate) fn reset_instead(&mut self, why: Refusal) -> (SessionFrame, Effects) {
        (SessionFrame::Reset { epoch: self.epoch, refusal: why.clone() }, self.gone(why))
    }

    /// Answers Broken once all bytes of the peer's departed owner are here, so that the peer need not keep them.
    pub(super) fn broken(&mut self, total: u64, why: Refusal) -> Effects {
        match self.recv.breaks(total) {
            Ok(()) => {
                self.answer = Some(DueFrame::Reset(Refusal::new(Code::Over, "")));
                self.leave(why)
            }
            Err(bad) => self.violated(bad),
        }
    }

    /// Whether its owner has left and its bytes are dropped.
    pub(super) fn is_empty(&self) -> bool {
        self.departed.as_ref().is_some_and(|departed| departed.empty)
    }

    /// Goes on on another path: bytes that were not acknowledged are sent again.
    pub(super) fn say_again(&mut self, received: u64, limit: u64) -> Result<(), BadOffset> {
        if let Some(departed) = &mut self.departed {
            departed.due = true;
        }
        if self.is_empty() { Ok(()) } else { self.send.put_back(received, limit) }
    }

    pub(super) fn violated(&mut self, bad: impl std::error::Error) -> Effects {
        let why = Refusal::new(Code::Violation, bad);
        self.answer = Some(DueFrame::Reset(why.clone()));
        self.leave(why)
    }

    /// Makes the waiting answer the last frame, if there is a path to send it on.
    pub(super) fn leave(&mut self, why: Refusal) -> Effects {
        if self.path.is_none() {
            return self.gone(why);
        }
        self.phase = Phase::Leaving;
        self.send.forget();
        self.recv.close();
        self.ended.get_or_insert(why);
        Effects { read: true, write: true, state: true, ..Effects::default() }
    }

    pub(super) fn gone(&mut self, why: Refusal) -> Effects {
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
