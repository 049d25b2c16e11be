//! Handles each frame, and the end of a session once both halves are done.

use tokio::time::Instant;

use crate::names::Instance;
use crate::protocol::link::source::LinkId;
use crate::protocol::session::state::{DueFrame, Effects, Phase, SessionState};
use crate::protocol::wire::frame::{Code, Refusal, SessionFrame};

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

    fn refused(&mut self, epoch: u64, refusal: Refusal, now: Instant) -> Effects {
        if !self.asks_to_open() || epoch != self.epoch {
            return DROPPED;
        }
        if self.phase == Phase::Asking && refusal.code == Code::NotHere {
            self.path = None;
            return Effects { state: true, ..Effects::default() };
        }
        // A Resume that is refused has found the acceptor, wherever that was.
        let answers_open = self.phase == Phase::Asking || matches!(self.answer, Some(DueFrame::Reset(_)));
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

    fn reset(&mut self, epoch: u64, refusal: Refusal, now: Instant) -> Effects {
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
            (Phase::Open | Phase::Parked, None) if fresh => Some(DueFrame::Opened),
            (Phase::Open | Phase::Parked | Phase::Delivered, Some(_)) => Some(DueFrame::Resumed),
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
        self.resumed += u32::from(answer == Some(DueFrame::Resumed));
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
            self.answer = Some(DueFrame::Reset(Refusal::new(Code::Over, "")));
        } else if !self.is_opener() && self.recv.is_done() && self.answer.is_none() {
            self.phase = Phase::Delivered;
        }
        effects
    }
}

const DROPPED: Effects = Effects { read: false, write: false, state: false, forget: false, dropped: true };
