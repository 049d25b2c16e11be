//! Relayed sessions: the two links that each of them is bound to.
//!
//! An Open or a Resume binds a session; frames from one of its two links then go to the other, unread. A binding is
//! removed only together with a frame to both ends, or by an attempt of higher epoch (docs/protocol.md#relaying).
//!
//! One lock guards all bindings. Under it a frame only finds its binding, changes it, and takes out the legs it goes
//! to; queues and links have their own locks and are used after its release. The read loops of the two links run on
//! different threads, so a frame may reach a queue after its binding was replaced. That does no harm: each binding has
//! its own queues, and a closed queue drops late frames.

pub(crate) mod attempt;
pub mod bindings;
pub mod queue;

use std::sync::Arc;

use tokio::sync::oneshot;

use crate::link::Link;
use crate::lock::Mutex;
use crate::relay::attempt::{Attempt, AttemptState, BindOutcome, SearchGuard};
use crate::relay::bindings::{Binding, BindingEndReporter, Bindings, RelayLeg, RelayOutcome, RelayStep, log};
use crate::relay::queue::RelayQueue;
use crate::schedule::frame_source::FrameSource as _;
use tunnel_proto::budget::{Budget, PairedReservation};
use tunnel_proto::frame::{Remote, SessionError, SessionFrame, SessionKey};
use tunnel_proto::names::{SessionId, Target};
use tunnel_proto::state::LinkId;

/// The bindings of all sessions that this process relays between two links.
#[derive(Debug)]
pub struct RelayTable {
    bindings: Mutex<Bindings>,
    /// Maximum number of bytes that wait for one session and direction.
    most: usize,
    /// Budget for the bytes of all sessions together, including the overhead of their frames.
    pub(crate) queued: Arc<Budget>,
    /// Maximum number of bytes that wait on one link.
    most_on_link: usize,
}

impl RelayTable {
    /// Creates a table without bindings. At most `most` bytes of each session may wait in each direction, and `all`
    /// bytes together. One link takes at most a quarter of `all`, so that a link that reads nothing leaves room for
    /// others.
    pub(crate) fn new(most: usize, all: usize) -> Self {
        Self { bindings: Mutex::default(), most, queued: Budget::new(all), most_on_link: most.max(all / 4) }
    }

    /// Returns the number of bindings, including those without a path to the acceptor yet.
    pub(crate) fn len(&self) -> usize {
        self.bindings.lock().all.len()
    }

    /// Returns the number of bindings that an edge or a user has requested.
    pub(crate) fn requested_by(&self, requester: &str) -> usize {
        self.bindings.lock().requested.get(requester).copied().unwrap_or(0)
    }

    /// Returns a receiver of the end of this attempt's binding.
    pub(crate) fn watch_end(&self, attempt: &Attempt) -> oneshot::Receiver<RelayOutcome> {
        let (reply, end) = oneshot::channel();
        let mut bindings = self.bindings.lock();
        if let Some(binding) = bindings.of(attempt) {
            let down = binding.opener_leg.queue.clone();
            let up = None;
            binding.watch = Some(BindingEndReporter { down, up, why: None, reply: Some(reply) });
        }
        end
    }

    /// Returns true if the session has a binding.
    pub(crate) fn knows(&self, id: SessionId) -> bool {
        self.bindings.lock().all.contains_key(&id)
    }

    /// Returns the bytes relayed in both directions since a session was bound to that link towards its acceptor.
    /// Returns `None` if it is not bound to it, or not answered yet.
    pub(crate) fn passed(&self, id: SessionId, link: LinkId) -> Option<u64> {
        let bindings = self.bindings.lock();
        let binding = bindings.all.get(&id).filter(|binding| binding.seeker.is_none())?;
        let acceptor_leg = binding.acceptor_leg.as_ref().filter(|leg| leg.link.id == link)?;
        Some(acceptor_leg.queue.passed() + binding.opener_leg.queue.passed())
    }

    /// Returns the bytes relayed so far to the acceptor and to the opener, without those over earlier paths. Returns
    /// `None` for a session without a path.
    pub fn traffic(&self, id: SessionId) -> Option<(u64, u64)> {
        let bindings = self.bindings.lock();
        let binding = bindings.all.get(&id)?;
        Some((binding.acceptor_leg.as_ref()?.queue.passed(), binding.opener_leg.queue.passed()))
    }

    /// Returns the sessions that are relayed for edges with a link here.
    pub fn of_edges(&self) -> Vec<RelayedEdgeSession> {
        let bindings = self.bindings.lock();
        let of_edge = |binding: &&Binding| matches!(binding.opener_leg.link.peer, Remote::Edge(_));
        let view = |binding: &Binding| RelayedEdgeSession {
            key: binding.opener_leg.queue.key().clone(),
            from: binding.opener_leg.link.clone(),
            target: binding.target.clone(),
        };
        bindings.all.values().filter(of_edge).map(view).collect()
    }

    /// Registers an Open or Resume: it gets the binding if its epoch is the newest and it comes from the session's
    /// opener.
    pub(crate) fn on_request(&self, attempt: &Attempt) -> BindOutcome {
        let opener_leg = self.new_leg(attempt, &attempt.from);
        let mut bindings = self.bindings.lock();
        let known = bindings.all.get(&attempt.key.id);
        if known.is_some_and(|known| known.opener != attempt.opener) {
            return BindOutcome::WrongOpener;
        }
        if known.is_some_and(|known| known.epoch >= attempt.epoch) {
            return BindOutcome::Stale;
        }
        let binding = Binding {
            epoch: attempt.epoch,
            opener: attempt.opener.clone(),
            target: attempt.target.clone(),
            place: None,
            opener_leg: opener_leg.clone(),
            acceptor_leg: None,
            seeker: Some(SearchGuard(attempt.changed.clone())),
            watch: None,
        };
        let logged = binding.logged();
        let before = bindings.insert(attempt.key.id, binding);
        drop(bindings);
        log(logged, "searching path for relayed session", None);
        if let Some(before) = before {
            // The new attempt may lead elsewhere. The acceptor reached by the previous attempt would then wait forever.
            let left = before.opener_leg.link.clone();
            before.end(None, Some(&left));
        }
        self.attach(attempt, &opener_leg);
        BindOutcome::Newest
    }

    /// Binds the session to the link towards its acceptor and sends the frame there. With `sought`, the answer *not
    /// here* makes the seeker search for another path; otherwise it goes to the opener.
    pub(crate) fn bind_acceptor(&self, attempt: &Attempt, to: &Arc<Link>, frame: SessionFrame, sought: bool) {
        let acceptor_leg = self.new_leg(attempt, to);
        let mut bindings = self.bindings.lock();
        let Some(binding) = bindings.of(attempt).filter(|known| known.acceptor_leg.is_none()) else { return };
        binding.acceptor_leg = Some(acceptor_leg.clone());
        if let (Remote::User(_), SessionFrame::Open { target, .. }) = (&attempt.from.peer, &frame) {
            binding.place = Some(Box::new((attempt.key.node.clone(), target.clone())));
        }
        if let Some(watch) = &mut binding.watch {
            watch.up = Some(acceptor_leg.queue.clone());
        }
        let seeker = binding.seeker.take_if(|_| !sought);
        let logged = binding.logged();
        drop(bindings);
        drop(seeker);
        log(logged, "relaying session", None);
        if self.attach(attempt, &acceptor_leg) {
            // Cannot be full: an Open or Resume empties the queue first.
            let _ = acceptor_leg.push(frame);
        }
    }

    /// Ends the search for a path. If the session has found none, its binding is removed, and `frame`, if any, goes to
    /// its opener.
    pub(crate) fn end(&self, attempt: &Attempt, frame: Option<SessionFrame>) {
        let mut bindings = self.bindings.lock();
        let Some(known) = bindings.of(attempt) else { return };
        let seeker = known.seeker.take();
        let binding = if known.acceptor_leg.is_none() { bindings.remove(&attempt.key.id) } else { None };
        drop(bindings);
        drop(seeker);
        let Some(mut binding) = binding else { return };
        let why = frame.as_ref().and_then(SessionFrame::refusal);
        binding.note_end(why);
        log(binding.logged(), "relay released, no path found", why);
        // The queue to the opener is empty, as no acceptor was reached: the answer need not go through it.
        binding.opener_leg.close();
        if let Some(frame) = frame {
            attempt.from.reply_to(&attempt.client, &attempt.key, frame);
        }
    }

    /// Returns the state of the attempt.
    pub(crate) fn attempt_state(&self, attempt: &Attempt) -> AttemptState {
        match self.bindings.lock().of(attempt) {
            Some(Binding { acceptor_leg: None, .. }) => AttemptState::Searching,
            Some(Binding { seeker: Some(_), .. }) => AttemptState::Pending,
            _ => AttemptState::Done,
        }
    }

    /// Passes a frame from `from` to the other side. Returns false if the frame was ignored.
    pub(crate) fn on_frame(&self, from: &Link, id: SessionId, mut frame: SessionFrame) -> bool {
        let mut bindings = self.bindings.lock();
        let step = bindings.handle_frame(from.id, id, &mut frame);
        drop(bindings);
        let (to, epoch) = match step {
            RelayStep::Ignore => return false,
            RelayStep::SearchAgain { back, changed, logged } => {
                log(logged, "acceptor not found, searching another path", frame.refusal());
                back.close();
                changed.notify_one();
                return true;
            }
            RelayStep::Pass { to, epoch } => (Some(to), epoch),
            RelayStep::Answer { to, epoch, search, logged } => {
                drop(search);
                log(logged, "relayed session answered by acceptor", None);
                (Some(to), epoch)
            }
            RelayStep::End { to, back, binding } => {
                let epoch = binding.epoch;
                let logged = binding.logged();
                drop(binding);
                log(logged, "relay released", frame.refusal());
                back.close();
                (to, epoch)
            }
        };
        if to.is_some_and(|to| to.push(frame).is_err()) {
            self.path_lost(id, Some(epoch));
        }
        true
    }

    /// Handles the end of a link: the bindings that used it are removed, and their other sides get PathLost.
    ///
    /// The link's list of sessions was taken before, under the link's lock. A session may have been bound again since,
    /// so each binding is checked again: only one that still uses this link is removed.
    pub(crate) fn release_on(&self, ended: &Link, passing: impl IntoIterator<Item = SessionId>) {
        for id in passing {
            self.release(id, |binding| binding.legs(ended.id).is_some(), None, Some(ended));
        }
    }

    /// Removes a binding and sends PathLost to both ends: they search for another path, or wait for one. With `epoch`,
    /// only if the binding still belongs to that attempt.
    pub(crate) fn path_lost(&self, id: SessionId, epoch: Option<u64>) {
        self.release(id, |binding| epoch.is_none_or(|epoch| binding.epoch == epoch), None, None);
    }

    /// Resets a session: both of its ends get the reason.
    pub fn reset(&self, id: SessionId, why: &SessionError) {
        self.release(id, |_| true, Some(why), None);
    }

    /// Removes a binding if it is meant, and ends it like [`Binding::end`].
    fn release(
        &self,
        id: SessionId,
        is_meant: impl FnOnce(&Binding) -> bool,
        why: Option<&SessionError>,
        ended: Option<&Link>,
    ) {
        let mut bindings = self.bindings.lock();
        let is_meant = bindings.all.get(&id).is_some_and(is_meant);
        let binding = if is_meant { bindings.remove(&id) } else { None };
        drop(bindings);
        let Some(binding) = binding else { return };
        let what =
            if ended.is_some() { "relay released, link ended" } else { "relay released by this server" };
        log(binding.logged(), what, why);
        binding.end(why, ended);
    }

    fn new_leg(&self, attempt: &Attempt, link: &Arc<Link>) -> RelayLeg {
        let all = self.queued.reservation();
        let of_link = link.relay_reservation(self.most_on_link);
        let taken = PairedReservation { all, of_link };
        let queue = RelayQueue::new(attempt.key.clone(), attempt.client.clone(), self.most, taken);
        RelayLeg { link: link.clone(), queue }
    }

    /// Adds the session to the link's list. Returns false if the link has ended meanwhile. The other side then gets
    /// PathLost from here, because the link's end did not find the session in the list.
    fn attach(&self, attempt: &Attempt, leg: &RelayLeg) -> bool {
        let alive = leg.link.attach_relay(&leg.queue, attempt.epoch);
        if !alive {
            self.release_on(&leg.link, [attempt.key.id]);
        }
        alive
    }
}

/// A session that this process relays for an edge.
#[derive(Debug, Clone)]
pub struct RelayedEdgeSession {
    /// Its id, category and node.
    pub key: SessionKey,
    /// The link of the edge that has opened it.
    pub from: Arc<Link>,
    /// The target of its last request.
    pub target: Target,
}

#[cfg(test)]
mod tests;
