//! Sessions that only pass through this pod: which two links each of them is bound to.
//!
//! An Open or a Resume binds a session; frames from one of its two links then go to the other, unread. A binding is
//! removed only together with a frame to both ends, or by an attempt of higher epoch (docs/protocol.md#relaying).
//!
//! One lock holds all bindings. Under it a frame only finds its binding, changes it, and takes out the legs it goes to;
//! queues and links, which have locks of their own, are touched after its release. The read loops of the two links run
//! on different threads, so a frame may reach a queue after its binding was replaced. That does no harm: each binding
//! has queues of its own, and a closed queue drops what comes late.

pub mod queue;

use std::collections::HashMap;
use std::sync::{Arc, Mutex};

use tokio::sync::Notify;
use tracing::{Level, debug, enabled};

use crate::lock;
use crate::relay::queue::{QueueFull, RelayQueue};
use crate::schedule::{FrameSource as _, RelayFrameSource as _};
use crate::sender::LinkSender;
use tunnel_base::names::SessionId;
use tunnel_proto::budget::Budget;
use tunnel_proto::frame::{ErrorCode, Opener, Remote, SessionError, SessionFrame, SessionKey};
use tunnel_proto::hello::Dialect;
use tunnel_proto::state::LinkId;

/// All bindings of this process.
#[derive(Debug)]
pub(crate) struct RelayTable {
    bindings: Mutex<HashMap<SessionId, Binding>>,
    /// Most bytes that wait for one session and direction.
    most: usize,
    /// What waits for all of them together.
    queued: Arc<Budget>,
    /// Most bytes that wait on one link.
    most_on_link: usize,
}

impl RelayTable {
    /// A table without bindings. At most `most` bytes of each session may wait in each direction, and `all` bytes
    /// together. One link takes at most a quarter of `all`, so that a link that reads nothing leaves room for others.
    pub(crate) fn new(most: usize, all: usize) -> Self {
        Self { bindings: Mutex::default(), most, queued: Budget::new(all), most_on_link: most.max(all / 4) }
    }

    /// Number of bindings, those without a path to the acceptor yet among them.
    pub(crate) fn len(&self) -> usize {
        lock(&self.bindings).len()
    }

    /// Whether the session has a binding.
    pub(crate) fn knows(&self, id: SessionId) -> bool {
        lock(&self.bindings).contains_key(&id)
    }

    /// Bytes that have passed in both directions since a session was bound to that link, which leads to its acceptor; none
    /// of one that is not, or that is not answered yet.
    pub(crate) fn passed(&self, id: SessionId, link: LinkId) -> Option<u64> {
        let queues = {
            let bindings = lock(&self.bindings);
            let binding = bindings.get(&id).filter(|binding| binding.seeker.is_none())?;
            let acceptor = binding.acceptor.as_ref().filter(|acceptor| acceptor.link.id == link)?;
            [binding.opener.queue.clone(), acceptor.queue.clone()]
        };
        Some(queues.iter().map(|queue| queue.passed()).sum())
    }

    /// Bytes that wait in all queues, with what their frames cost.
    pub(crate) fn queued(&self) -> usize {
        self.queued.used()
    }

    /// The budget that these bytes are counted in.
    pub(crate) fn budget(&self) -> &Budget {
        &self.queued
    }

    /// Takes in an Open or Resume: it gets the binding if its epoch is the newest and it comes from the session's
    /// opener.
    pub(crate) fn on_request(&self, attempt: &Attempt) -> AttemptStatus {
        let opener = self.hop(attempt, &attempt.from);
        let mut bindings = lock(&self.bindings);
        let known = bindings.get(&attempt.key.id);
        if known.is_some_and(|known| known.is_foreign(attempt)) {
            return AttemptStatus::WrongOpener;
        }
        if known.is_some_and(|known| known.epoch >= attempt.epoch) {
            return AttemptStatus::Stale;
        }
        let by = attempt.opener.clone().or_else(|| known.and_then(|known| known.by.clone()));
        let seeker = Some(SearchGuard(attempt.changed.clone()));
        let binding = Binding { epoch: attempt.epoch, by, opener: opener.clone(), acceptor: None, seeker };
        let bound = binding.bound();
        let before = bindings.insert(attempt.key.id, binding);
        drop(bindings);
        log(bound, "a path is sought for a session that is to be relayed", None);
        if let Some(before) = before {
            before.opener.close();
            // The new attempt may lead elsewhere. The acceptor that the attempt before had reached would then wait for
            // ever.
            if let Some(acceptor) = before.acceptor {
                acceptor.cut(SessionFrame::PathLost { epoch: before.epoch });
            }
        }
        self.admit(attempt, &opener);
        AttemptStatus::Newest
    }

    /// Binds the session to the link that leads to its acceptor, and sends the frame there. If `sought`, the answer
    /// *not here* makes the seeker look for another path; if not, it goes to the opener.
    pub(crate) fn pass(&self, attempt: &Attempt, to: &Arc<LinkSender>, frame: SessionFrame, sought: bool) {
        let acceptor = self.hop(attempt, to);
        let bind = |binding: &mut Binding| {
            binding.acceptor = Some(acceptor.clone());
            (binding.seeker.take_if(|_| !sought), binding.bound())
        };
        let Some((seeker, bound)) = self.with(attempt, bind) else { return };
        drop(seeker);
        log(bound, "the session is relayed to this link", Some(&frame));
        if self.admit(attempt, &acceptor) {
            // Cannot be full: an Open or Resume empties the queue first.
            let _ = acceptor.push(frame);
        }
    }

    /// Ends the search for a path. If the session has found none, its binding is removed, and `frame`, if any, goes to
    /// its opener.
    pub(crate) fn end(&self, attempt: &Attempt, frame: Option<SessionFrame>) {
        let mut bindings = lock(&self.bindings);
        let Some(known) = bindings.get_mut(&attempt.key.id).filter(|binding| binding.is_of(attempt)) else {
            return;
        };
        let seeker = known.seeker.take();
        let binding = if known.acceptor.is_none() { bindings.remove(&attempt.key.id) } else { None };
        drop(bindings);
        drop(seeker);
        let Some(binding) = binding else { return };
        log(binding.bound(), "the relay has found no path and is released", frame.as_ref());
        // The queue to the opener is empty, as no acceptor was reached: the answer need not go through it.
        binding.opener.close();
        if let Some(frame) = frame {
            attempt.from.reply(&attempt.key, frame);
        }
    }

    /// How the attempt stands.
    pub(crate) fn attempt_state(&self, attempt: &Attempt) -> AttemptState {
        match lock(&self.bindings).get(&attempt.key.id).filter(|binding| binding.is_of(attempt)) {
            Some(Binding { acceptor: None, .. }) => AttemptState::Searching,
            Some(Binding { seeker: Some(_), .. }) => AttemptState::Pending,
            _ => AttemptState::Done,
        }
    }

    /// Passes a frame that came over the link of `from` to the other side. False if the frame does not count.
    pub(crate) fn on_frame(&self, from: &LinkSender, id: SessionId, frame: SessionFrame) -> bool {
        let mut bindings = lock(&self.bindings);
        let Some(binding) = bindings.get_mut(&id) else { return false };
        let Some((back, to)) = binding.legs(from.id) else { return false };
        let of_opener = binding.opener.link.id == from.id;
        if let SessionFrame::Opened { .. } | SessionFrame::Resumed { .. } | SessionFrame::Refused { .. } =
            frame
            && of_opener
        {
            return false;
        }
        let epoch = binding.epoch;
        // A peer of version 1 does not know Broken: it gets Reset, which it does not answer, so this pod answers for
        // it.
        let unheard = matches!(frame, SessionFrame::ResetAt { .. })
            && to.as_ref().is_some_and(|to| !to.link.dialect.supports(Dialect::RESET_AT));
        let last = unheard || is_last(&frame);
        // The answer to an older attempt, or its end, does not concern this one. A newer epoch than the binding's does:
        // the opener gave up a newer attempt before its Open or Resume was sent, and has left this one too.
        if last && frame.epoch().is_some_and(|of| of < epoch) {
            return false;
        }
        // The search goes on: the attempt has not reached the acceptor.
        if is_not_here(&frame) && !of_opener && binding.seeker.is_some() {
            binding.acceptor = None;
            let changed = binding.seeker.as_ref().map(|seeker| seeker.0.clone());
            let bound = binding.bound();
            drop(bindings);
            log(bound, "the acceptor is not there, and another path is sought", Some(&frame));
            back.close();
            changed.inspect(|changed| changed.notify_one());
            return true;
        }
        let answered = matches!(frame, SessionFrame::Opened { .. } | SessionFrame::Resumed { .. });
        let seeker = if answered { binding.seeker.take() } else { None };
        let bound = if answered || last { binding.bound() } else { None };
        let removed = if last { bindings.remove(&id) } else { None };
        drop(bindings);
        drop((seeker, removed));
        let what =
            if last { "the relay is released" } else { "the relayed session is answered by its acceptor" };
        log(bound, what, Some(&frame));
        let frame = match frame {
            SessionFrame::ResetAt { refusal, .. } if unheard => {
                back.cut(SessionFrame::Reset { epoch, refusal: SessionError::new(ErrorCode::NoError, "") });
                SessionFrame::Reset { epoch, refusal }
            }
            frame => {
                if last {
                    back.close();
                }
                frame
            }
        };
        let Some(to) = to else { return last };
        if to.push(frame).is_err() {
            self.path_lost(id, Some(epoch));
        }
        true
    }

    /// A link has ended: the bindings that used it are removed, and their other sides get Lost.
    ///
    /// The link's list of sessions was taken before, under the link's lock. A session may have been bound anew since,
    /// so each binding is looked at again: only one that still uses this link is removed.
    pub(crate) fn link_ended(&self, link: LinkId, passing: impl IntoIterator<Item = SessionId>) {
        for id in passing {
            let mut bindings = lock(&self.bindings);
            let uses = |hop: &RelayLeg| hop.link.id == link;
            let affected =
                bindings.get(&id).is_some_and(|b| uses(&b.opener) || b.acceptor.as_ref().is_some_and(uses));
            let binding = if affected { bindings.remove(&id) } else { None };
            drop(bindings);
            let Some(binding) = binding else { continue };
            log(binding.bound(), "a link of the relay has ended, and the relay is released", None);
            for hop in [Some(binding.opener), binding.acceptor].into_iter().flatten() {
                if uses(&hop) {
                    hop.close();
                } else {
                    // It goes behind what waits, as those bytes are still good. It always fits: a Lost costs no budget.
                    let _ = hop.push(SessionFrame::PathLost { epoch: binding.epoch });
                }
            }
        }
    }

    /// Removes a binding and sends Lost to both ends: they look for another path, or wait for one. With `epoch`, only
    /// if the binding still belongs to that attempt.
    pub(crate) fn path_lost(&self, id: SessionId, epoch: Option<u64>) {
        self.cut(id, epoch, |epoch| SessionFrame::PathLost { epoch });
    }

    /// Ends a session for good: both of its ends get a Reset with the reason.
    pub(crate) fn reset(&self, id: SessionId, why: &SessionError) {
        self.cut(id, None, |epoch| SessionFrame::Reset { epoch, refusal: why.clone() });
    }

    fn cut(&self, id: SessionId, epoch: Option<u64>, frame: impl Fn(u64) -> SessionFrame) {
        let mut bindings = lock(&self.bindings);
        let meant = bindings.get(&id).is_some_and(|b| epoch.is_none_or(|epoch| b.epoch == epoch));
        let binding = if meant { bindings.remove(&id) } else { None };
        drop(bindings);
        let Some(binding) = binding else { return };
        let frame = frame(binding.epoch);
        log(binding.bound(), "the relay is released by this pod", Some(&frame));
        for hop in [Some(binding.opener), binding.acceptor].into_iter().flatten() {
            hop.cut(frame.clone());
        }
    }

    fn hop(&self, attempt: &Attempt, link: &Arc<LinkSender>) -> RelayLeg {
        let budgets = (self.queued.reservation(), link.relay_reservation(self.most_on_link));
        let queue = RelayQueue::new(attempt.key.clone(), self.most, budgets);
        RelayLeg { link: link.clone(), queue }
    }

    /// Enters the session in the link's list. False if the link has ended meanwhile; the other side then gets Lost from
    /// here, as the link's end did not find the session in the list.
    fn admit(&self, attempt: &Attempt, hop: &RelayLeg) -> bool {
        let alive = hop.link.attach_relay(&hop.queue, attempt.epoch);
        if !alive {
            self.link_ended(hop.link.id, [attempt.key.id]);
        }
        alive
    }

    fn with<T>(&self, attempt: &Attempt, step: impl FnOnce(&mut Binding) -> T) -> Option<T> {
        let mut bindings = lock(&self.bindings);
        let binding = bindings.get_mut(&attempt.key.id)?;
        (binding.is_of(attempt) && binding.acceptor.is_none()).then(|| step(binding))
    }
}

// What only passes through this pod: sessions whose two ends are at other processes.

// One Open or Resume that a pod has to relay, and who seeks a path for it.

/// Which Open or Resume is meant: an answer to an older one counts no more.
#[derive(Debug, Clone)]
pub(crate) struct Attempt {
    pub(crate) key: SessionKey,
    pub(crate) epoch: u64,
    pub(crate) from: Arc<LinkSender>,
    /// Who opened the session, where that is known.
    pub(crate) opener: Option<Opener>,
    /// Notified whenever its binding has changed, for the search for its path.
    pub(crate) changed: Arc<Notify>,
}

/// What an Open or Resume is to the session's binding.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum AttemptStatus {
    /// The newest: it has the binding now.
    Newest,
    /// Late: there was a newer one.
    Stale,
    /// Another opener opened the session.
    WrongOpener,
}

/// How an attempt stands.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum AttemptState {
    /// It has no path: it was not passed on yet, or the acceptor was not there.
    Searching,
    /// It was passed on, and not answered.
    Pending,
    /// It was answered, or counts no more.
    Done,
}

/// Ends the search for a path when dropped.
#[derive(Debug)]
pub(crate) struct SearchGuard(pub(crate) Arc<Notify>);

impl Attempt {
    pub(crate) fn new(from: &Arc<LinkSender>, key: SessionKey, epoch: u64, opener: Option<Opener>) -> Self {
        Self { key, epoch, from: from.clone(), opener, changed: Arc::default() }
    }
}

impl Drop for SearchGuard {
    fn drop(&mut self) {
        self.0.notify_one();
    }
}

/// Whether nothing about the attempt follows it.
pub(crate) fn is_last(frame: &SessionFrame) -> bool {
    matches!(frame, SessionFrame::Refused { .. } | SessionFrame::Reset { .. } | SessionFrame::PathLost { .. })
}

/// Whether the frame means that the acceptor is not there.
pub(crate) fn is_not_here(frame: &SessionFrame) -> bool {
    matches!(frame, SessionFrame::Refused { refusal, .. } | SessionFrame::Reset { refusal, .. } if refusal.code == ErrorCode::NodeNotConnected)
}

// Which two links a session passes through, and whose it is.

/// Which two links a session passes through, and who seeks the second one.
#[derive(Debug)]
pub(crate) struct Binding {
    pub(crate) epoch: u64,
    /// Who opened the session, once that is known.
    pub(crate) by: Option<Opener>,
    pub(crate) opener: RelayLeg,
    /// None while a path to the acceptor is sought.
    pub(crate) acceptor: Option<RelayLeg>,
    /// Who seeks that path until the attempt is answered, if anybody does.
    pub(crate) seeker: Option<SearchGuard>,
}

impl Binding {
    /// Whether this attempt has made it.
    pub(crate) fn is_of(&self, attempt: &Attempt) -> bool {
        self.epoch == attempt.epoch && self.opener.link.id == attempt.from.id
    }

    /// The leg on that link, and the other one if there is one. None if no leg is there.
    pub(crate) fn legs(&self, link: LinkId) -> Option<(RelayLeg, Option<RelayLeg>)> {
        if self.opener.link.id == link {
            return Some((self.opener.clone(), self.acceptor.clone()));
        }
        let acceptor = self.acceptor.clone().filter(|acceptor| acceptor.link.id == link)?;
        Some((acceptor, Some(self.opener.clone())))
    }

    /// Whether another process opened the session. An older pod does not send the opener; then the edge that accepted
    /// the session is foreign.
    pub(crate) fn is_foreign(&self, attempt: &Attempt) -> bool {
        let accepted = |hop: &RelayLeg| hop.link.peer == attempt.from.peer && hop.link.peer != Remote::Peer;
        let unknown = self.by.is_none();
        !Opener::is_compatible(self.by.as_ref(), attempt.opener.as_ref())
            || unknown && self.acceptor.as_ref().is_some_and(accepted)
    }
}

// One side of a session that passes through.

/// One side of a session: its link, and what waits there.
#[derive(Debug, Clone)]
pub(crate) struct RelayLeg {
    pub(crate) link: Arc<LinkSender>,
    pub(crate) queue: Arc<RelayQueue>,
}

impl RelayLeg {
    pub(crate) fn push(&self, frame: SessionFrame) -> Result<(), QueueFull> {
        let intent = self.queue.push(frame)?;
        self.link.enter(&self.queue, &intent);
        Ok(())
    }

    pub(crate) fn cut(&self, frame: SessionFrame) {
        let intent = self.queue.cut(frame);
        self.link.enter(&self.queue, &intent);
    }

    pub(crate) fn close(&self) {
        self.queue.close();
        self.link.detach_relay(&*self.queue);
    }
}

// The lines by which a session that passes through can be followed through this pod's log.

/// A log line's fields of a binding, taken under the table's lock and logged once that is released.
#[derive(Debug)]
pub(crate) struct LoggedBinding {
    session: SessionKey,
    epoch: u64,
    link: LinkId,
    acceptor_link: Option<LinkId>,
}

impl Binding {
    /// The fields of its line; `None` if such lines are not logged.
    pub(crate) fn bound(&self) -> Option<LoggedBinding> {
        enabled!(Level::DEBUG).then(|| LoggedBinding {
            session: self.opener.queue.key().clone(),
            epoch: self.epoch,
            link: self.opener.link.id,
            acceptor_link: self.acceptor.as_ref().map(|leg| leg.link.id),
        })
    }
}

/// Logs what has become of a relayed session; `frame` is the one that did it, if a frame did.
pub(crate) fn log(bound: Option<LoggedBinding>, what: &str, frame: Option<&SessionFrame>) {
    let Some(LoggedBinding { session, epoch, link, acceptor_link }) = bound else { return };
    let SessionKey { id: session, node, .. } = session;
    let acceptor_link = acceptor_link.map(tracing::field::display);
    let why = match frame {
        Some(
            SessionFrame::Refused { refusal, .. }
            | SessionFrame::Reset { refusal, .. }
            | SessionFrame::ResetAt { refusal, .. },
        ) => Some(tracing::field::display(refusal)),
        _ => None,
    };
    debug!(%session, epoch, %link, acceptor_link, %node, why, "{what}");
}

#[cfg(test)]
mod tests;
