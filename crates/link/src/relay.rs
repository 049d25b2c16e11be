//! Relayed sessions: the two links that each of them is bound to.
//!
//! An Open or a Resume binds a session; frames from one of its two links then go to the other, unread. A binding is
//! removed only together with a frame to both ends, or by an attempt of higher epoch (docs/protocol.md#relaying).
//!
//! One lock guards all bindings. Under it a frame only finds its binding, changes it, and takes out the legs it goes
//! to; queues and links have their own locks and are used after its release. The read loops of the two links run on
//! different threads, so a frame may reach a queue after its binding was replaced. That does no harm: each binding has
//! its own queues, and a closed queue drops late frames.

pub mod queue;

use std::collections::HashMap;
use std::sync::Arc;

use tokio::sync::{Notify, oneshot};
use tracing::{Level, debug, enabled};

use crate::lock::Mutex;
use crate::relay::queue::{QueueFull, RelayQueue};
use crate::schedule::FrameSource as _;
use crate::sender::LinkSender;
use tunnel_base::names::{SessionId, Target};
use tunnel_proto::budget::{Budget, LinkReservation};
use tunnel_proto::frame::{ErrorCode, Opener, Remote, SessionError, SessionFrame, SessionKey};
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
    pub(crate) fn watch_end(&self, attempt: &Attempt) -> oneshot::Receiver<RelayEnd> {
        let (reply, end) = oneshot::channel();
        let mut bindings = self.bindings.lock();
        if let Some(binding) = bindings.all.get_mut(&attempt.key.id).filter(|binding| binding.is_of(attempt))
        {
            let (down, up) = (binding.opener_leg.queue.clone(), None);
            binding.watch = Some(EndWatch { down, up, why: None, reply: Some(reply) });
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
    pub fn of_edges(&self) -> Vec<EdgeRelay> {
        let bindings = self.bindings.lock();
        let of_edge = |binding: &&Binding| matches!(binding.opener_leg.link.peer, Remote::Edge(_));
        let view = |binding: &Binding| EdgeRelay {
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
            before.opener_leg.close();
            // The new attempt may lead elsewhere. The acceptor reached by the previous attempt would then wait forever.
            if let Some(acceptor_leg) = before.acceptor_leg {
                acceptor_leg.cut(SessionFrame::PathLost { epoch: before.epoch });
            }
        }
        self.attach(attempt, &opener_leg);
        BindOutcome::Newest
    }

    /// Binds the session to the link towards its acceptor and sends the frame there. With `sought`, the answer *not
    /// here* makes the seeker search for another path; otherwise it goes to the opener.
    pub(crate) fn bind_acceptor(
        &self,
        attempt: &Attempt,
        to: &Arc<LinkSender>,
        frame: SessionFrame,
        sought: bool,
    ) {
        let acceptor_leg = self.new_leg(attempt, to);
        let mut bindings = self.bindings.lock();
        let waits = |binding: &&mut Binding| binding.is_of(attempt) && binding.acceptor_leg.is_none();
        let Some(binding) = bindings.all.get_mut(&attempt.key.id).filter(waits) else { return };
        binding.acceptor_leg = Some(acceptor_leg.clone());
        if let Some(watch) = &mut binding.watch {
            watch.up = Some(acceptor_leg.queue.clone());
        }
        let (seeker, logged) = (binding.seeker.take_if(|_| !sought), binding.logged());
        drop(bindings);
        drop(seeker);
        log(logged, "relaying session", Some(&frame));
        if self.attach(attempt, &acceptor_leg) {
            // Cannot be full: an Open or Resume empties the queue first.
            let _ = acceptor_leg.push(frame);
        }
    }

    /// Ends the search for a path. If the session has found none, its binding is removed, and `frame`, if any, goes to
    /// its opener.
    pub(crate) fn end(&self, attempt: &Attempt, frame: Option<SessionFrame>) {
        let mut bindings = self.bindings.lock();
        let Some(known) = bindings.all.get_mut(&attempt.key.id).filter(|binding| binding.is_of(attempt))
        else {
            return;
        };
        let seeker = known.seeker.take();
        let binding = if known.acceptor_leg.is_none() { bindings.remove(&attempt.key.id) } else { None };
        drop(bindings);
        drop(seeker);
        let Some(mut binding) = binding else { return };
        if let Some(frame) = &frame {
            binding.note_end(frame);
        }
        log(binding.logged(), "relay released, no path found", frame.as_ref());
        // The queue to the opener is empty, as no acceptor was reached: the answer need not go through it.
        binding.opener_leg.close();
        if let Some(frame) = frame {
            attempt.from.reply(&attempt.key, frame);
        }
    }

    /// Returns the state of the attempt.
    pub(crate) fn attempt_state(&self, attempt: &Attempt) -> AttemptState {
        match self.bindings.lock().all.get(&attempt.key.id).filter(|binding| binding.is_of(attempt)) {
            Some(Binding { acceptor_leg: None, .. }) => AttemptState::Searching,
            Some(Binding { seeker: Some(_), .. }) => AttemptState::Pending,
            _ => AttemptState::Done,
        }
    }

    /// Passes a frame from the link of `from` to the other side. Returns false if the frame was ignored.
    pub(crate) fn on_frame(&self, from: &LinkSender, id: SessionId, frame: SessionFrame) -> bool {
        let mut bindings = self.bindings.lock();
        let step = bindings.handle_frame(from.id, id, &frame);
        drop(bindings);
        let (to, epoch) = match step {
            RelayStep::Ignore => return false,
            RelayStep::SearchAgain { back, changed, logged } => {
                log(logged, "acceptor not found, searching another path", Some(&frame));
                back.close();
                changed.notify_one();
                return true;
            }
            RelayStep::Pass { to, epoch } => (Some(to), epoch),
            RelayStep::Answer { to, epoch, search, logged } => {
                drop(search);
                log(logged, "relayed session answered by acceptor", Some(&frame));
                (Some(to), epoch)
            }
            RelayStep::End { to, back, binding } => {
                let (epoch, logged) = (binding.epoch, binding.logged());
                drop(binding);
                log(logged, "relay released", Some(&frame));
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
    pub(crate) fn link_ended(&self, link: LinkId, passing: impl IntoIterator<Item = SessionId>) {
        for id in passing {
            let Some(binding) = self.remove_if(id, |binding| binding.legs(link).is_some()) else { continue };
            log(binding.logged(), "relay released, link ended", None);
            for leg in [Some(binding.opener_leg), binding.acceptor_leg].into_iter().flatten() {
                if leg.link.id == link {
                    leg.close();
                } else {
                    // Queued after what waits, as those bytes are still valid. It always fits: a PathLost costs no
                    // budget.
                    let _ = leg.push(SessionFrame::PathLost { epoch: binding.epoch });
                }
            }
        }
    }

    /// Removes a binding and sends PathLost to both ends: they search for another path, or wait for one. With `epoch`,
    /// only if the binding still belongs to that attempt.
    pub(crate) fn path_lost(&self, id: SessionId, epoch: Option<u64>) {
        self.cut(id, epoch, |epoch| SessionFrame::PathLost { epoch });
    }

    /// Resets a session: both of its ends get the reason.
    pub fn reset(&self, id: SessionId, why: &SessionError) {
        self.cut(id, None, |epoch| SessionFrame::Reset { epoch, refusal: why.clone() });
    }

    fn cut(&self, id: SessionId, epoch: Option<u64>, frame: impl Fn(u64) -> SessionFrame) {
        let is_meant = |binding: &Binding| epoch.is_none_or(|epoch| binding.epoch == epoch);
        let Some(mut binding) = self.remove_if(id, is_meant) else { return };
        let frame = frame(binding.epoch);
        binding.note_end(&frame);
        log(binding.logged(), "relay released by this server", Some(&frame));
        for leg in [Some(binding.opener_leg), binding.acceptor_leg].into_iter().flatten() {
            leg.cut(frame.clone());
        }
    }

    fn remove_if(&self, id: SessionId, is_meant: impl FnOnce(&Binding) -> bool) -> Option<Binding> {
        let mut bindings = self.bindings.lock();
        if bindings.all.get(&id).is_some_and(is_meant) { bindings.remove(&id) } else { None }
    }

    fn new_leg(&self, attempt: &Attempt, link: &Arc<LinkSender>) -> RelayLeg {
        let (all, of_link) = (self.queued.reservation(), link.relay_reservation(self.most_on_link));
        let taken = LinkReservation { all, of_link };
        let queue = RelayQueue::new(attempt.key.clone(), self.most, taken);
        RelayLeg { link: link.clone(), queue }
    }

    /// Adds the session to the link's list. Returns false if the link has ended meanwhile. The other side then gets
    /// PathLost from here, because the link's end did not find the session in the list.
    fn attach(&self, attempt: &Attempt, leg: &RelayLeg) -> bool {
        let alive = leg.link.attach_relay(&leg.queue, attempt.epoch);
        if !alive {
            self.link_ended(leg.link.id, [attempt.key.id]);
        }
        alive
    }
}

/// A session that this process relays for an edge.
#[derive(Debug, Clone)]
pub struct EdgeRelay {
    /// Its id, category and node.
    pub key: SessionKey,
    /// The link of the edge that has opened it.
    pub from: Arc<LinkSender>,
    /// The target of its last request.
    pub target: Target,
}

// An Open or Resume to be relayed, and the search for its path.

/// One Open or Resume to be relayed, with the link it came from. Its epoch tells answers to older ones apart.
#[derive(Debug, Clone)]
pub(crate) struct Attempt {
    pub(crate) key: SessionKey,
    pub(crate) epoch: u64,
    pub(crate) from: Arc<LinkSender>,
    /// The opener of the session.
    pub(crate) opener: Option<Opener>,
    pub(crate) target: Target,
    /// Notified whenever its binding has changed, for the search for its path.
    pub(crate) changed: Arc<Notify>,
}

/// The result of registering an Open or Resume.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum BindOutcome {
    /// The newest: it has the binding now.
    Newest,
    /// Late: there was a newer one.
    Stale,
    /// Another opener opened the session.
    WrongOpener,
}

/// How far a relayed Open or Resume has got; derived from the session's binding.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum AttemptState {
    /// It has no path: it was not passed on yet, or the acceptor was not there.
    Searching,
    /// It was passed on and is not answered yet.
    Pending,
    /// It was answered, or is no longer current.
    Done,
}

/// Ends the search for a path when dropped.
#[derive(Debug)]
struct SearchGuard(Arc<Notify>);

impl Attempt {
    /// Creates an attempt for an Open or Resume. Returns `None` for any other frame.
    pub(crate) fn new(from: Arc<LinkSender>, key: SessionKey, frame: &SessionFrame) -> Option<Self> {
        let (SessionFrame::Open { epoch, opener, target, .. }
        | SessionFrame::Resume { epoch, opener, target, .. }) = frame
        else {
            return None;
        };
        let (opener, target) = (opener.clone(), target.clone());
        Some(Self { key, epoch: *epoch, from, opener, target, changed: Arc::default() })
    }
}

impl Drop for SearchGuard {
    fn drop(&mut self) {
        self.0.notify_one();
    }
}

// The two links of a relayed session, and its opener.

/// All bindings, and how many of them each edge or user has requested.
#[derive(Debug, Default)]
struct Bindings {
    all: HashMap<SessionId, Binding>,
    requested: HashMap<String, usize>,
}

impl Bindings {
    fn insert(&mut self, id: SessionId, binding: Binding) -> Option<Binding> {
        let before = self.remove(&id);
        if let Some(requester) = binding.opener_leg.link.peer.requester() {
            *self.requested.entry(requester).or_default() += 1;
        }
        self.all.insert(id, binding);
        before
    }

    fn remove(&mut self, id: &SessionId) -> Option<Binding> {
        let binding = self.all.remove(id)?;
        if let Some(requester) = binding.opener_leg.link.peer.requester()
            && let Some(count) = self.requested.get_mut(&requester)
        {
            *count -= 1;
            if *count == 0 {
                self.requested.remove(&requester);
            }
        }
        Some(binding)
    }
}

/// What a frame from one side of a binding requires, without the lock of the bindings.
enum RelayStep {
    /// Nothing: it concerns no binding, or an older attempt, or this side may not send it.
    Ignore,
    /// The attempt has not reached the acceptor: the search for its path continues.
    SearchAgain { back: RelayLeg, changed: Arc<Notify>, logged: Option<LoggedBinding> },
    /// The frame goes to the other side.
    Pass { to: RelayLeg, epoch: u64 },
    /// It is the acceptor's answer, which goes to the opener and ends the search.
    Answer { to: RelayLeg, epoch: u64, search: Option<SearchGuard>, logged: Option<LoggedBinding> },
    /// It is the last one. It goes to the other side if there is one.
    End { to: Option<RelayLeg>, back: RelayLeg, binding: Binding },
}

impl Bindings {
    fn handle_frame(&mut self, from: LinkId, id: SessionId, frame: &SessionFrame) -> RelayStep {
        let Some(binding) = self.all.get_mut(&id) else { return RelayStep::Ignore };
        let Some((back, to)) = binding.legs(from) else { return RelayStep::Ignore };
        let (epoch, of_opener) = (binding.epoch, binding.opener_leg.link.id == from);
        let is_answer = matches!(frame, SessionFrame::Opened { .. } | SessionFrame::Resumed { .. });
        if of_opener && (is_answer || matches!(frame, SessionFrame::Refused { .. })) {
            return RelayStep::Ignore;
        }
        let is_last = matches!(
            frame,
            SessionFrame::Refused { .. } | SessionFrame::Reset { .. } | SessionFrame::PathLost { .. }
        );
        if !is_last {
            binding.note_end(frame);
            let Some(to) = to else { return RelayStep::Ignore };
            if is_answer {
                let search = binding.seeker.take();
                return RelayStep::Answer { to, epoch, search, logged: binding.logged() };
            }
            return RelayStep::Pass { to, epoch };
        }
        // The end of an older attempt does not concern this one. An epoch newer than the binding's does: the opener gave
        // up a newer attempt before its Open or Resume was sent, and has left this one too.
        if frame.epoch().is_some_and(|of| of < epoch) {
            return RelayStep::Ignore;
        }
        let is_not_here = frame.refusal().is_some_and(|why| why.code == ErrorCode::NodeNotConnected);
        if !of_opener
            && is_not_here
            && let Some(SearchGuard(changed)) = &binding.seeker
        {
            binding.acceptor_leg = None;
            return RelayStep::SearchAgain { back, changed: changed.clone(), logged: binding.logged() };
        }
        binding.note_end(frame);
        self.remove(&id).map_or(RelayStep::Ignore, |binding| RelayStep::End { to, back, binding })
    }
}

/// The two links of a relayed session, and the search for the second one.
#[derive(Debug)]
struct Binding {
    epoch: u64,
    /// The opener of the session.
    opener: Option<Opener>,
    /// The target of the newest request.
    target: Target,
    opener_leg: RelayLeg,
    /// `None` while a path to the acceptor is searched.
    acceptor_leg: Option<RelayLeg>,
    /// The search for that path, until the attempt is answered; `None` if there is none.
    seeker: Option<SearchGuard>,
    /// Reports the end of the binding; `None` if it is not watched.
    watch: Option<EndWatch>,
}

impl Binding {
    /// Returns true if this attempt created the binding.
    fn is_of(&self, attempt: &Attempt) -> bool {
        self.epoch == attempt.epoch && self.opener_leg.link.id == attempt.from.id
    }

    /// Records why the session ends, if this frame ends it. The first reason is the cause of the others.
    fn note_end(&mut self, frame: &SessionFrame) {
        if let (Some(watch), Some(why)) = (&mut self.watch, frame.refusal()) {
            watch.why.get_or_insert_with(|| why.clone());
        }
    }

    /// Returns the leg on that link, and the other one if there is one. Returns `None` if no leg is on that link.
    fn legs(&self, link: LinkId) -> Option<(RelayLeg, Option<RelayLeg>)> {
        if self.opener_leg.link.id == link {
            return Some((self.opener_leg.clone(), self.acceptor_leg.clone()));
        }
        let acceptor_leg = self.acceptor_leg.clone().filter(|leg| leg.link.id == link)?;
        Some((acceptor_leg, Some(self.opener_leg.clone())))
    }
}

/// How the path of a relayed session through this server has ended.
#[derive(Debug)]
pub struct RelayEnd {
    /// Why the session ended, or was refused. `None` if only this path ended.
    pub why: Option<SessionError>,
    /// Bytes that passed from the opener to the acceptor, repeated ones included.
    pub to_acceptor: u64,
    /// Bytes that passed the other way.
    pub to_opener: u64,
}

/// Reports the end of a binding when dropped with it, which happens without the lock of the bindings.
#[derive(Debug)]
struct EndWatch {
    why: Option<SessionError>,
    /// The queue to the acceptor, once there is a path.
    up: Option<Arc<RelayQueue>>,
    /// The queue to the opener.
    down: Arc<RelayQueue>,
    reply: Option<oneshot::Sender<RelayEnd>>,
}

impl Drop for EndWatch {
    fn drop(&mut self) {
        if let Some(reply) = self.reply.take() {
            let to_acceptor = self.up.as_ref().map_or(0, |queue| queue.passed());
            let (why, to_opener) = (self.why.take(), self.down.passed());
            // Fails if no task waits any longer.
            let _ = reply.send(RelayEnd { why, to_acceptor, to_opener });
        }
    }
}

// One side of a relayed session.

/// One side of a session: its link, and what waits there.
#[derive(Debug, Clone)]
struct RelayLeg {
    link: Arc<LinkSender>,
    queue: Arc<RelayQueue>,
}

impl RelayLeg {
    fn push(&self, frame: SessionFrame) -> Result<(), QueueFull> {
        let request = self.queue.push(frame)?;
        self.link.enter(&self.queue, &request);
        Ok(())
    }

    fn cut(&self, frame: SessionFrame) {
        let request = self.queue.cut(frame);
        self.link.enter(&self.queue, &request);
    }

    fn close(&self) {
        self.queue.close();
        self.link.detach_relay(&*self.queue);
    }
}

// The log lines that trace a relayed session through this server.

/// A log line's fields of a binding, taken under the table's lock and logged after its release.
#[derive(Debug)]
struct LoggedBinding {
    session: SessionKey,
    epoch: u64,
    link: LinkId,
    acceptor_link: Option<LinkId>,
}

impl Binding {
    /// Returns the fields of its log line, or `None` if such lines are not logged.
    fn logged(&self) -> Option<LoggedBinding> {
        enabled!(Level::DEBUG).then(|| LoggedBinding {
            session: self.opener_leg.queue.key().clone(),
            epoch: self.epoch,
            link: self.opener_leg.link.id,
            acceptor_link: self.acceptor_leg.as_ref().map(|leg| leg.link.id),
        })
    }
}

/// Logs what has become of a relayed session; `frame` is the frame that caused it, if any.
fn log(logged: Option<LoggedBinding>, what: &str, frame: Option<&SessionFrame>) {
    let Some(LoggedBinding { session, epoch, link, acceptor_link }) = logged else { return };
    let SessionKey { id: session, node, .. } = session;
    let acceptor_link = acceptor_link.map(tracing::field::display);
    let why = frame.and_then(SessionFrame::refusal).map(tracing::field::display);
    debug!(%session, epoch, %link, acceptor_link, %node, error = why, "{what}");
}

#[cfg(test)]
mod tests;
