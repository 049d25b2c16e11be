//! One end of a session: its lock and wakers, the frames it gives to its link, its paths, and its log lines.

use std::any::Any;
use std::sync::atomic::AtomicU64;
use std::sync::atomic::Ordering::Relaxed;
use std::sync::{Arc, Weak};
use std::task::Waker;
use std::time::Duration;

use tokio::time::Instant;
use tracing::{Level, debug, enabled};

use crate::lock::{Mutex, MutexGuard};
use crate::schedule::{
    ControlOutcome, ControlQueue, DataRequest, Entry, FlowState, FrameSource, QueuePlaces, QueuedFlow,
    SendOutcome, SendRequest,
};
use crate::sender::LinkSender;
use crate::table::SessionTable;
use tunnel_base::names::{Instance, NodeName, SessionId, Target};
use tunnel_proto::frame::{Category, ErrorCode, Opener, Remote, SessionError, SessionFrame, SessionKey};
use tunnel_proto::state::{Actions, LinkId, Phase, SessionState};
use tunnel_proto::window::LinkRtt;

/// The state of one end, shared by the session table, the owner and the links.
#[derive(Debug)]
pub(crate) struct SessionCore {
    /// Id, category and node.
    pub key: SessionKey,
    /// The table that it is in. Its locks are never taken under the session's.
    table: Weak<SessionTable>,
    /// When it was created.
    started: Instant,
    /// The client's user or address, with which the session counts.
    pub client: Arc<str>,
    /// Opener: the listener that accepted the client.
    listener: Option<&'static str>,
    /// Acceptor: the origin of the session.
    origin: Option<Origin>,
    /// A copy of [`Inner::stay`] that is read without the lock.
    stay: AtomicU64,
    inner: Mutex<Inner>,
}

/// The party that opened a session, and the target of its Open. Each later Open or Resume must have the same: only the
/// opener may resume a session, and a server authorizes a Resume by its target.
#[derive(Debug)]
pub(crate) struct Origin {
    pub(crate) opener: Option<Opener>,
    pub(crate) target: Target,
}

/// The part of a [`SessionCore`] that changes, under its lock.
#[derive(Debug)]
pub(crate) struct Inner {
    pub(super) state: SessionState,
    pub(super) sender: Option<Arc<LinkSender>>,
    /// The previous link, which still has the session as a member.
    left: Option<Arc<LinkSender>>,
    /// Number of its stays on links so far. Its entries from earlier stays are stale and harmless.
    stay: u64,
    /// Where it waits on its link.
    places: QueuePlaces,
    /// What it has sent on its link, which decides on its turns; reset with each link.
    flow_state: FlowState,
    /// The number of the `Parked` that may search for a path, and the number of those handed out.
    pub(super) seeker: Option<u64>,
    pub(super) seekers: u64,
    /// The last loss of its path.
    pub(super) lost: Option<PathLoss>,
    /// Time of the last received frame.
    last_frame: Instant,
    pub(super) reader: Option<Waker>,
    pub(super) writer: Option<Waker>,
    /// The tasks that wait for an answer, a path or the end.
    pub(super) watcher: Option<Waker>,
    /// Its client's permit, until the session is over.
    pub(super) permit: Option<Permit>,
    /// The state that was logged last.
    logged: LoggedState,
}

/// A permit of any kind that a session keeps.
pub type Permit = Arc<dyn Any + Send + Sync>;

/// The right to search for a path, which one task has at a time.
#[derive(Debug)]
pub(crate) struct Search {
    pub(super) seeker: u64,
    /// Number of earlier consecutive losses of the path without a byte moved in between.
    pub(super) again: u32,
}

/// A loss of a session's path.
#[derive(Debug, Clone, Copy)]
pub(super) struct PathLoss {
    /// Number of losses before it without a byte moved in between.
    pub(super) consecutive: u32,
    pub(super) at: Instant,
    /// Bytes that the session had moved by then.
    pub(super) moved: u64,
}

impl SessionCore {
    pub(crate) fn new(
        key: SessionKey,
        table: &Arc<SessionTable>,
        client: Arc<str>,
        state: SessionState,
        sender: Option<Arc<LinkSender>>,
        listener: Option<&'static str>,
        origin: Option<Origin>,
    ) -> Arc<Self> {
        let logged = LoggedState::of(&state);
        logged.log_begin(&key);
        Arc::new(Self {
            key,
            table: Arc::downgrade(table),
            started: Instant::now(),
            client,
            listener,
            origin,
            stay: AtomicU64::new(0),
            inner: Mutex::new(Inner {
                state,
                sender,
                left: None,
                stay: 0,
                places: QueuePlaces::default(),
                flow_state: FlowState::default(),
                seeker: None,
                seekers: 0,
                lost: None,
                last_frame: Instant::now(),
                reader: None,
                writer: None,
                watcher: None,
                permit: None,
                logged,
            }),
        })
    }

    /// Handles a frame of this session from the link of `sender`. Returns false if the frame was ignored.
    ///
    /// An Open or Resume may move the session to that link. The session joins the link's members before its state moves
    /// there. In the opposite order another thread could move it on in between and try to remove a membership that does
    /// not exist yet; a stale one would remain. The link cannot end meanwhile, because the read loop that calls this
    /// also ends it. If the frame was ignored after all, the session leaves the members again.
    pub(crate) fn on_frame(
        self: &Arc<Self>,
        sender: &Arc<LinkSender>,
        frame: SessionFrame,
        now: Instant,
    ) -> bool {
        let moves = matches!(frame, SessionFrame::Open { .. } | SessionFrame::Resume { .. });
        if moves {
            sender.attach(&self.key);
        }
        let (dropped, here) = self.with_state(|inner| {
            inner.last_frame = now;
            let actions = inner.state.handle_frame(sender.id, frame, now);
            let here = inner.state.path() == Some(sender.id);
            if here {
                inner.move_to(sender);
            }
            ((actions.dropped, here), actions)
        });
        if moves && !here {
            self.detach(sender);
        }
        !dropped
    }

    /// Returns true if the session ends with its link.
    fn ends_with_link(&self) -> bool {
        self.key.category == Category::Admin
    }

    /// Returns false if the frame is an Open or Resume of another opener than the session's, or to another target, or the
    /// Resume of a session that ends with its link.
    pub(crate) fn is_of_origin(&self, frame: &SessionFrame) -> bool {
        match (&self.origin, frame) {
            (Some(_), SessionFrame::Resume { .. }) if self.ends_with_link() => false,
            (
                Some(origin),
                SessionFrame::Open { opener, target, .. } | SessionFrame::Resume { opener, target, .. },
            ) => origin.opener == *opener && origin.target == *target,
            _ => true,
        }
    }

    /// Returns the process of the remote end, once that is known.
    pub(crate) fn instance(&self) -> Option<Instance> {
        self.lock().state.instance()
    }

    /// Resets the session from this side and drops undelivered bytes.
    pub(crate) fn reset(self: &Arc<Self>, why: SessionError) {
        self.with_state(|inner| {
            let actions = inner.state.abandon(why, Instant::now());
            // A plain remote does not answer, and its sessions end with its link.
            let plain = inner.sender.as_ref().is_some_and(|sender| sender.is_plain());
            ((), if plain && inner.state.is_orphaned() { inner.state.evict().1 } else { actions })
        });
        self.orphan();
    }

    /// Resets the session after everything that was written.
    pub(super) fn abort(self: &Arc<Self>, why: SessionError) {
        self.with_state(|inner| ((), inner.state.abort(why, Instant::now())));
        self.orphan();
    }

    /// Hands an orphaned session to its table, which limits how long it stays.
    fn orphan(self: &Arc<Self>) {
        let stays = self.lock().state.is_orphaned();
        if stays && let Some(table) = self.table.upgrade() {
            table.add_broken_off(self);
        }
    }

    /// Ends a session without an owner, or one with only its last frame to send or to receive. Returns whether bytes were
    /// still to be delivered, or `None` if it is neither.
    pub(crate) fn evict(self: &Arc<Self>) -> Option<bool> {
        // Another client needs the permit now.
        let (cut, _permit) = self.with_state(|inner| {
            let (cut, actions) = inner.state.evict();
            ((cut, cut.and_then(|_| inner.permit.take())), actions)
        });
        cut
    }

    /// Resets the session at once and drops unread bytes, to free its memory.
    pub(crate) fn reset_unread(self: &Arc<Self>, why: SessionError) {
        self.with_state(|inner| {
            if inner.state.recv.queued() > 0 {
                inner.state.drop_unread(&why);
            }
            let abandoned = inner.state.abandon(why, Instant::now());
            // A last frame is still sent.
            let closes = inner.state.phase() == Phase::Closing;
            let actions = if closes { abandoned } else { inner.state.evict().1 };
            ((), Actions { read: true, ..actions })
        });
    }

    /// Returns true if it is open, with or without a path: then the remote may wait for frames from this end.
    pub(crate) fn is_active(&self) -> bool {
        matches!(self.lock().state.phase(), Phase::Open | Phase::Parked | Phase::Resuming)
    }

    /// Like [`Self::queued`], but 0 if the session does not run on that link.
    pub(crate) fn queued_from(&self, link: LinkId) -> usize {
        let inner = self.lock();
        if inner.state.path() == Some(link) { inner.state.recv.queued() } else { 0 }
    }

    /// Returns the unread bytes from a plain remote that were not covered by a limit.
    pub(crate) fn unreserved(&self) -> usize {
        self.lock().state.recv.unreserved()
    }

    /// Runs `step` under the lock, takes the pending actions out of the session, releases its lock, and applies them:
    /// logging, waking tasks, leaving links, requesting turns, removal from the table, and the search for a path. Returns
    /// the step's result.
    ///
    /// Each action takes another lock or runs a waker, and two locks are never held at once. Another thread may change
    /// the session between the release and the action, so each action tolerates that:
    ///
    /// - A spurious wake-up only makes its task check again.
    /// - [`Self::detach`] checks a second time.
    /// - A request for a turn on a link that the session has left is stale, and the link's puller gets no frame for it.
    /// - A session that may be forgotten never comes back.
    pub(super) fn with_state<T>(self: &Arc<Self>, step: impl FnOnce(&mut Inner) -> (T, Actions)) -> T {
        let mut inner = self.lock();
        let (result, actions) = step(&mut inner);
        let reader = if actions.read { inner.reader.take() } else { None };
        let writer = if actions.write { inner.writer.take() } else { None };
        let watcher = if actions.state || actions.forget { inner.watcher.take() } else { None };
        let sender = if inner.state.path().is_none() { inner.sender.take() } else { None };
        let left = [inner.left.take(), sender];
        self.stay.store(inner.stay, Relaxed);
        let intent = inner.intent();
        let ended = inner.state.ended().map(|why| why.code);
        let change = inner.change();
        let permit = if actions.forget { inner.permit.take() } else { None };
        let is_opener = inner.state.is_opener();
        let table = if inner.needs_search() { self.table.upgrade() } else { None };
        let search = table.map(|table| (table, inner.search()));
        drop(inner);
        if let Some(change) = change {
            change.log(self);
        }
        for waker in [reader, writer, watcher].into_iter().flatten() {
            waker.wake();
        }
        for left in left.into_iter().flatten() {
            self.detach(&left);
        }
        if let Some((sender, intent)) = intent {
            sender.enter(self, &intent);
        }
        if actions.forget
            && let Some(table) = self.table.upgrade()
        {
            table.forget(self, is_opener, ended);
        }
        drop(permit);
        if let Some((table, search)) = search {
            table.add_parked(self, &search);
        }
        result
    }

    /// Removes the session from the link's members. Adds it again if another thread has moved it back meanwhile.
    ///
    /// The link's lock and the session's lock are taken one after the other. A Resume may bring the session back to
    /// this link between the step that left it and this removal, which then removes the new membership. So there is a
    /// second check under the session's lock. If the link has just ended, joining fails. Its end is then handled here,
    /// because the link's own list did not contain the session.
    fn detach(self: &Arc<Self>, sender: &Arc<LinkSender>) {
        sender.detach(self.key.id);
        let back = self.lock().state.path() == Some(sender.id);
        if back && !sender.attach(&self.key) {
            self.link_ended(sender.id, None, Instant::now());
        }
    }

    pub(super) fn lock(&self) -> MutexGuard<'_, Inner> {
        self.inner.lock()
    }
}

impl Inner {
    /// Returns true if the session needs a path, has none, and no task searches one for it.
    fn needs_search(&self) -> bool {
        let needs = self.state.is_opener() && self.state.needs_path() && self.state.path().is_none();
        needs && self.seeker.is_none()
    }

    /// Takes the right to search for a path, which no task has. The caller holds the session's lock, so that of two
    /// threads that notice the same loss only one takes it.
    fn search(&mut self) -> Search {
        self.seekers += 1;
        self.seeker = Some(self.seekers);
        let (at, moved) = (Instant::now(), self.state.bytes_transferred());
        let repeats = |last: &PathLoss| at - last.at < RECENT_LOSS && last.moved == moved;
        let again = self.lost.filter(repeats).map_or(0, |last| last.consecutive + 1);
        self.lost = Some(PathLoss { consecutive: again, at, moved });
        Search { seeker: self.seekers, again }
    }

    /// Makes the link of `sender` the session's link. The session leaves the previous link once the lock is released.
    fn move_to(&mut self, sender: &Arc<LinkSender>) {
        if self.sender.as_ref().is_none_or(|o| o.id != sender.id) {
            (self.flow_state, self.places) = Default::default();
            self.stay += 1;
            self.left = self.sender.replace(sender.clone());
        }
    }
}

// The frames that a session gives to its link in its turn.

impl FrameSource for SessionCore {
    fn key(&self) -> &SessionKey {
        &self.key
    }

    fn is_stale(&self, stay: u64) -> bool {
        stay != self.stay.load(Relaxed)
    }

    fn next_control(
        self: Arc<Self>,
        link: LinkId,
        stay: u64,
        queue: ControlQueue,
        now: Instant,
    ) -> ControlOutcome {
        let frame = self.with_state(|inner| {
            if stay != inner.stay {
                return (None, Actions::default());
            }
            inner.places.on_control(queue);
            self.next_frame(inner, link, 0, now)
        });
        ControlOutcome { frame, again: false }
    }

    fn next_turn(
        self: Arc<Self>,
        link: LinkId,
        turn: &QueuedFlow<Entry>,
        longest: usize,
        most: usize,
        now: Instant,
    ) -> SendOutcome {
        self.with_state(|inner| {
            if turn.key.stay != inner.stay {
                let flow_state = turn.flow_state();
                let outcome = SendOutcome { frame: None, bytes: 0, flow_state, backlog: None };
                return (outcome, Actions::default());
            }
            let held = inner.state.backlog().is_some_and(|backlog| backlog > most);
            let (mut frame, mut actions) =
                if held { (None, Actions::default()) } else { self.next_frame(inner, link, longest, now) };
            if let Some(SessionFrame::ResetAt { refusal, .. }) = &frame
                && inner.sender.as_ref().is_none_or(|sender| sender.is_plain())
            {
                let (reset, over) = inner.state.reset_instead(refusal.clone());
                (frame, actions) = (Some(reset), over);
            }
            let bytes = if let Some(SessionFrame::Data(data)) = &frame { data.len() } else { 0 };
            let flow_state = if held { turn.flow_state() } else { turn.flow_state_after(bytes) };
            inner.flow_state = flow_state;
            let backlog = inner.state.backlog();
            inner.places.on_turn(backlog.is_some());
            (SendOutcome { frame, bytes, flow_state, backlog }, actions)
        })
    }
}

impl SessionCore {
    /// Returns the state's next frame. Adds what the state does not know: this process's instance and the opener, as an
    /// edge names no opener and its server adds it. Records when a credit is sent; that measurement ends when the
    /// session moves to another path.
    fn next_frame(
        &self,
        inner: &mut Inner,
        link: LinkId,
        max: usize,
        now: Instant,
    ) -> (Option<SessionFrame>, Actions) {
        let (mut frame, actions) = inner.state.poll_frame(link, max);
        let process = || self.table.upgrade().map(|table| table.instance());
        match &frame {
            Some(SessionFrame::Credit { .. }) => inner.state.recv.credit_sent(now),
            Some(SessionFrame::Resume { .. } | SessionFrame::Resumed { .. }) => inner.state.recv.reset_rtt(),
            _ => {}
        }
        match &mut frame {
            Some(SessionFrame::Opened { instance, .. }) => *instance = process(),
            Some(SessionFrame::Open { opener, .. } | SessionFrame::Resume { opener, .. })
                if !inner.speaks_to_cloud() =>
            {
                *opener = process().map(Opener::Server);
            }
            _ => {}
        }
        (frame, actions)
    }
}

impl Inner {
    /// Returns the entries that it needs on its link and does not have yet.
    pub(crate) fn intent(&mut self) -> Option<(Arc<LinkSender>, SendRequest)> {
        let sender = self.sender.as_ref()?;
        let data = self.state.backlog().map(|backlog| DataRequest { flow_state: self.flow_state, backlog });
        let request = self.places.request(self.state.control(), data);
        let is_new = request != SendRequest::default();
        is_new.then(|| (sender.clone(), SendRequest { stay: self.stay, ..request }))
    }

    fn speaks_to_cloud(&self) -> bool {
        self.sender.as_ref().is_some_and(|sender| matches!(sender.peer, Remote::Server(_)))
    }
}

// How an end gets, loses and leaves a path, and how it is given up.

impl SessionCore {
    /// Returns the link's RTTs for the path to the session's remote end.
    pub(crate) fn path_rtt(&self, inner: &Inner) -> LinkRtt {
        let Some(sender) = &inner.sender else { return LinkRtt::default() };
        let far = match self.origin.as_ref().and_then(|origin| origin.opener.as_ref()) {
            Some(Opener::Server(opener)) => Some(*opener),
            Some(Opener::Node(_) | Opener::Client(_)) | None => inner.state.instance(),
        };
        // An edge relays nothing. A server may, so there the process of the remote end is compared with the link's.
        let ends_there = matches!(sender.peer, Remote::Edge(_)) || (far.is_some() && far == sender.instance);
        LinkRtt { latest: sender.round_trip(), least: sender.min_rtt().filter(|_| ends_there) }
    }

    /// Sends Open over the link of `sender`, or Resume if `again`; only for the opener. `process` is the process that
    /// an Open is expected to reach, if known.
    ///
    /// One task opens a session and another finds a new path for it. If the session has opened and lost its path before
    /// the first task calls this, an Open would be wrong. So nothing is sent unless `again` matches the state. The
    /// session joins the link's members first: if the link has already ended, the state learns that at once, and if it
    /// ends later, its list contains the session.
    pub(crate) fn ask(self: &Arc<Self>, sender: &Arc<LinkSender>, process: Option<Instance>, again: bool) {
        let alive = sender.attach(&self.key);
        let room = self.table.upgrade().filter(|_| sender.is_plain()).map(|table| table.room_unread(sender));
        let (here, left) = self.with_state(|inner| {
            let before = inner.state.path().filter(|path| *path != sender.id).and(inner.sender.clone());
            let epoch = inner.state.epoch();
            let meant = again == inner.state.needs_path();
            let actions = if meant { inner.state.start_attempt(sender.id) } else { Actions::default() };
            if meant {
                inner.state.set_expected_process(process);
            }
            match room {
                _ if !meant => {}
                Some(room) => inner.state.recv.lift_limit(room),
                None => inner.state.recv.restore_limit(),
            }
            let here = inner.state.path() == Some(sender.id);
            if here {
                inner.move_to(sender);
            }
            let left = before.filter(|_| here).map(|old| (old, epoch));
            let actions =
                if alive { actions } else { inner.state.handle_link_ended(sender.id, None, Instant::now()) };
            ((here, left), actions)
        });
        if let Some((old, epoch)) = left {
            old.lost(&self.key, epoch);
        }
        // The session was resumed elsewhere, or ended, while its seeker waited for this link.
        if !here {
            self.detach(sender);
        }
    }

    /// Leaves the path over the link of `sender`, which may still work, to continue on another one; only for the
    /// opener. Sends PathLost to the remote end. Returns false if the session stays: another thread has moved it
    /// meanwhile, only its last frame waits for its turn, or it ends with the link.
    pub(crate) fn leave(self: &Arc<Self>, sender: &Arc<LinkSender>) -> bool {
        let left = self.with_state(|inner| {
            let state = &mut inner.state;
            let stays = !state.is_opener() || state.phase() == Phase::Closing || self.ends_with_link();
            if stays || state.path() != Some(sender.id) {
                return (None, Actions::default());
            }
            (Some(state.epoch()), state.handle_link_ended(sender.id, None, Instant::now()))
        });
        if let Some(epoch) = left {
            sender.lost(&self.key, epoch);
        }
        left.is_some()
    }

    /// Handles the end of a link; `why` is set if its remote cannot resume.
    pub(crate) fn link_ended(self: &Arc<Self>, link: LinkId, why: Option<SessionError>, now: Instant) {
        let lost = || SessionError::new(ErrorCode::Cancelled, "its link has closed, and it is never resumed");
        let why = why.or_else(|| self.ends_with_link().then(lost));
        self.with_state(|inner| ((), inner.state.handle_link_ended(link, why, now)));
    }

    /// Returns whether the session was opened here, and the number of bytes moved in both directions. Returns `None`
    /// unless it is open and runs on that link: a session that has left the link without a new path is still a member.
    pub(crate) fn traffic(&self, link: LinkId) -> Option<(bool, u64)> {
        let inner = self.lock();
        let runs = inner.state.phase() == Phase::Open && inner.state.path() == Some(link);
        runs.then(|| (inner.state.is_opener(), inner.state.bytes_transferred()))
    }

    /// Returns true if its last frame waits for a turn on the current path.
    pub(crate) fn owes_last_frame(&self) -> bool {
        self.lock().state.has_pending_close()
    }

    /// Ends a session that has waited for its remote for `grace`.
    pub(crate) fn expire(self: &Arc<Self>, now: Instant, grace: Duration, why: &SessionError) -> Expiry {
        self.with_state(|inner| {
            let Some(since) = inner.state.waiting_since(now) else {
                return (Expiry::None, Actions::default());
            };
            let waited = now.saturating_duration_since(since);
            if waited >= grace {
                let (cut, actions) = inner.state.expire(why.clone());
                return (if cut { Expiry::Truncated } else { Expiry::None }, actions);
            }
            let is_stalled = waited >= STALLED_AFTER && inner.state.can_be_evicted();
            let evictable = is_stalled || inner.state.is_orphaned();
            (if evictable { Expiry::Evictable } else { Expiry::None }, Actions::default())
        })
    }

    /// Ends an acceptor here that its opener left before it was open, because a Resume names another process as the
    /// acceptor. Returns true if there was one; the session may then be relayed through this process.
    pub(crate) fn supersede(self: &Arc<Self>) -> bool {
        self.with_state(|inner| {
            let yields = !inner.state.is_opener();
            let why = SessionError::new(ErrorCode::UnknownSession, "its opener moved to another process");
            (yields, if yields { inner.state.give_up(why) } else { Actions::default() })
        })
    }
}

/// Losses of a path within this time, without a byte moved in between, count as consecutive.
const RECENT_LOSS: Duration = Duration::from_secs(10);

/// The result of [`SessionCore::expire`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Expiry {
    /// It continues, or has ended with nothing left to deliver.
    None,
    /// It may be evicted.
    Evictable,
    /// It has ended, and undelivered bytes were dropped.
    Truncated,
}

/// A session that was finished by its owner may be evicted after this time without progress. Usually the rest takes one
/// RTT.
const STALLED_AFTER: Duration = Duration::from_secs(5);

// The log lines that trace a session: one for each change of its phase, its path or its epoch.
//
// Nothing is formatted under the session's lock, and a frame that changes none of the three costs one comparison.

/// The part of an end's state that is logged.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct LoggedState {
    phase: Phase,
    epoch: u64,
    link: Option<LinkId>,
    resumed: u32,
    role: &'static str,
}

/// A change to be logged once the lock is released.
#[derive(Debug)]
pub(crate) struct Change {
    before: LoggedState,
    now: LoggedState,
    why: Option<SessionError>,
}

impl LoggedState {
    pub(crate) fn of(state: &SessionState) -> Self {
        Self {
            phase: state.phase(),
            epoch: state.epoch(),
            link: state.path(),
            resumed: state.resumed(),
            role: if state.is_opener() { "opener" } else { "acceptor" },
        }
    }

    /// Logs a new session.
    pub(crate) fn log_begin(&self, key: &SessionKey) {
        let SessionKey { id: session, node, .. } = key;
        let link = self.link.map(tracing::field::display);
        debug!(%session, epoch = self.epoch, link, %node, role = self.role, "session created");
    }

    /// Returns the log message for the change.
    fn sentence(&self, before: &Self) -> &'static str {
        match (self.phase, self.link) {
            (Phase::Opening, Some(_)) => "opening session",
            (Phase::Opening, None) => "no link to open the session over",
            (Phase::Accepting, _) => "session moved while its target is dialled",
            (Phase::Open, _) if self.resumed > before.resumed => "session resumed",
            (Phase::Open, _) => "session opened",
            (Phase::Parked, _) => "session lost its path",
            (Phase::Resuming, _) => "resuming session",
            (Phase::LastAck, _) => "all session data sent and received",
            (Phase::Closing, _) => "closing session",
            (Phase::Closed, _) => "session closed",
        }
    }
}

impl Inner {
    /// Returns the change by the last step, if it must be logged.
    pub(crate) fn change(&mut self) -> Option<Change> {
        let now = LoggedState::of(&self.state);
        if now == self.logged {
            return None;
        }
        let before = std::mem::replace(&mut self.logged, now);
        enabled!(Level::DEBUG).then(|| Change { before, now, why: self.state.ended().cloned() })
    }
}

impl Change {
    /// Logs the change. Another thread's line about a later step may come first; they differ in epoch or link.
    pub(crate) fn log(self, core: &SessionCore) {
        let Self { before, now, why } = self;
        // The last line names the link that was left.
        let link = now.link.or(before.link).map(tracing::field::display);
        let why = why.map(tracing::field::display);
        let (session, node, what) = (core.key.id, &core.key.node, now.sentence(&before));
        debug!(%session, epoch = now.epoch, link, %node, role = now.role, error = why, "{what}");
    }
}

// What is visible of one end of a session from outside.

/// A snapshot of one end of a session.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SessionView {
    /// The session's id; people see 8 of its digits.
    pub id: SessionId,
    /// The node that it leads to, or that it was opened from.
    pub node: NodeName,
    /// The requested target and the client; `None` at the acceptor.
    pub opened_for: Option<(Target, String)>,
    /// The listener that accepted the client; `None` at the acceptor.
    pub listener: Option<&'static str>,
    /// The phase as a fixed word.
    pub phase: &'static str,
    /// The link that it runs on; `None` while it has none.
    pub link: Option<LinkId>,
    /// When this end was created.
    pub started: Instant,
    /// Number of times it was resumed on another link.
    pub resumed: u32,
    /// Bytes written to it here.
    pub sent_bytes: u64,
    /// Bytes received here.
    pub received_bytes: u64,
}

impl SessionTable {
    /// Returns at most `most` sessions with an end here, in a stable order, so that two calls return the same ones
    /// while they live. Each of the table's locks is held only for a copy.
    pub fn overview(&self, most: usize) -> Vec<SessionView> {
        let mut shown: Vec<SessionView> = Vec::new();
        for shard in &self.shards {
            let left = most - shown.len();
            if left == 0 {
                break;
            }
            let mut sessions: Vec<_> = shard.lock().values().cloned().collect();
            sessions.sort_unstable_by_key(|session| session.key.id);
            shown.extend(sessions.iter().take(left).map(|session| session.view()));
        }
        shown
    }
}

impl SessionCore {
    /// Returns a snapshot of this end.
    pub(crate) fn view(&self) -> SessionView {
        let SessionKey { id, node, .. } = &self.key;
        let inner = self.lock();
        let state = &inner.state;
        SessionView {
            id: *id,
            node: node.clone(),
            opened_for: state.opened_for(),
            listener: self.listener,
            phase: word(state.phase()),
            link: state.path(),
            started: self.started,
            resumed: state.resumed(),
            sent_bytes: state.send.written(),
            received_bytes: state.recv.taken() + state.recv.queued() as u64,
        }
    }

    /// Returns the time of the last received frame, or of the creation if there was none.
    pub(crate) fn last_frame(&self) -> Instant {
        self.lock().last_frame
    }

    /// Returns the bytes that were received and not read yet.
    pub(crate) fn queued(&self) -> usize {
        self.lock().state.recv.queued()
    }
}

fn word(phase: Phase) -> &'static str {
    match phase {
        Phase::Opening | Phase::Accepting => "opening",
        Phase::Open => "open",
        Phase::Parked => "parked",
        Phase::Resuming => "resuming",
        Phase::LastAck | Phase::Closing | Phase::Closed => "closing",
    }
}

#[cfg(test)]
mod tests;
