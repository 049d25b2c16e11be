//! One end of a session: its lock and wakers, the frames it gives to its link, and its paths.

mod trace;
pub mod view;

use std::any::Any;
use std::sync::atomic::AtomicU64;
use std::sync::atomic::Ordering::Relaxed;
use std::sync::{Arc, Weak};
use std::task::Waker;
use std::time::Duration;

use tokio::time::Instant;
use tracing::{Level, debug, enabled};

use crate::link::Link;
use crate::lock::{Mutex, MutexGuard};
use crate::schedule::frame_source::{FrameSource, QueueMembership, QueueRequest, Turn, TurnOutput};
use crate::table::SessionTable;
use crate::table::session::trace::{LoggedState, LoggedTransition};
use tunnel_base::unix_time::in_words;
use tunnel_net::os::BOOT;
use tunnel_proto::frame::{
    ErrorCode, Opener, Remote, SessionCategory, SessionError, SessionFrame, SessionKey,
};
use tunnel_proto::names::{Instance, Target, UserDevice};
use tunnel_proto::state::{Actions, LinkId, Phase, SessionState};
use tunnel_proto::window::LinkRtt;

/// The state of one end, shared by the session table, the owner and the links.
#[derive(Debug)]
pub(crate) struct SharedSession {
    /// Id, category and node.
    pub key: SessionKey,
    /// The table that it is in. Its locks are never taken under the session's.
    pub(super) table: Weak<SessionTable>,
    /// When it was created.
    pub(super) started: Instant,
    /// The client's user or address, with which the session counts.
    pub client: Arc<str>,
    pub(super) origin: SessionOrigin,
    /// A copy of [`Inner::stay`] that is read without the lock.
    stay: AtomicU64,
    inner: Mutex<Inner>,
}

/// How a session began at this end.
#[derive(Debug)]
pub(crate) enum SessionOrigin {
    /// Opened here, for a client that this listener accepted.
    Here { listener: &'static str },
    /// Opened by another process. Each later Open or Resume must have the same opener and target: only the opener may
    /// resume a session, and a server authorizes a Resume by its target.
    Remote { opener: Option<Opener>, target: Target, boot: Option<u128> },
}

impl SessionOrigin {
    fn role(&self) -> &'static str {
        if let Self::Here { .. } = self { "opener" } else { "acceptor" }
    }

    /// Returns the user's device that has opened it, and the target, unless it was opened here or for another party.
    pub(super) fn device(&self) -> Option<(&UserDevice, &Target)> {
        match self {
            Self::Remote { opener: Some(Opener::User(device)), target, .. } => Some((device, target)),
            _ => None,
        }
    }
}

/// The part of a [`SharedSession`] that changes, under its lock.
#[derive(Debug)]
pub(crate) struct Inner {
    pub(super) state: SessionState,
    /// The link of the state's path; follows it in [`Inner::follow_path`].
    pub(super) link: Option<Arc<Link>>,
    /// Number of its stays on links so far. Its entries from earlier stays are stale and harmless.
    stay: u64,
    /// Where it waits on its link, and what it has sent there.
    places: QueueMembership,
    /// Whether a `PathSearchRight` has the right to search for a path.
    pub(super) is_searched: bool,
    /// The last loss of its path.
    pub(super) lost: Option<PathLoss>,
    /// Time of the last received frame.
    pub(super) last_frame: Instant,
    pub(super) reader: Option<Waker>,
    pub(super) writer: Option<Waker>,
    /// The tasks that wait for an answer, a path or the end.
    pub(super) watcher: Option<Waker>,
    /// Its client's permit, until the session is over.
    pub(super) permit: Option<AnyPermit>,
}

/// A permit of any kind that a session keeps.
pub type AnyPermit = Arc<dyn Any + Send + Sync>;

/// A loss of a session's path.
#[derive(Debug, Clone, Copy)]
pub(super) struct PathLoss {
    /// Number of losses before it without a byte moved in between.
    pub(super) consecutive: u32,
    pub(super) at: Instant,
    /// Bytes that the session had moved by then.
    pub(super) moved: u64,
}

impl SharedSession {
    pub(crate) fn new(
        key: SessionKey,
        table: &Arc<SessionTable>,
        client: Arc<str>,
        origin: SessionOrigin,
        state: SessionState,
        link: Option<Arc<Link>>,
    ) -> Arc<Self> {
        let logged = LoggedState::of(&state);
        let session = key.id;
        let node = &key.node;
        let on = logged.link.map(tracing::field::display);
        debug!(%session, epoch = logged.epoch, link = on, %node, role = origin.role(), "session created");
        Arc::new(Self {
            key,
            table: Arc::downgrade(table),
            started: Instant::now(),
            client,
            origin,
            stay: AtomicU64::new(FIRST_STAY),
            inner: Mutex::new(Inner {
                state,
                link,
                stay: FIRST_STAY,
                places: QueueMembership::default(),
                is_searched: false,
                lost: None,
                last_frame: Instant::now(),
                reader: None,
                writer: None,
                watcher: None,
                permit: None,
            }),
        })
    }

    /// Handles a frame of this session from `link`. Returns false if the frame was ignored. An Open or
    /// Resume may move the session to that link.
    pub(crate) fn on_frame(self: &Arc<Self>, link: &Arc<Link>, frame: SessionFrame, now: Instant) -> bool {
        let actions = self.with_link(Some(link), |inner| {
            inner.last_frame = now;
            let actions = inner.state.handle_frame(link.id, frame, now);
            (actions, actions)
        });
        // A client that reads nothing must not make more and more frames wait: a session that ends can leave no path again.
        if actions.left && link.drops_replies(&self.client) {
            self.reset(SessionError::new(ErrorCode::Overloaded, "no memory left, and no answers are read"));
        }
        !actions.dropped
    }

    /// Returns true if the session ends with its link.
    fn ends_with_link(&self) -> bool {
        self.key.category == SessionCategory::Admin
    }

    /// Returns false if the frame is an Open or Resume of another opener than the session's, or to another place, or
    /// the Resume of a session that ends with its link.
    pub(crate) fn is_of_origin(&self, frame: &SessionFrame) -> bool {
        match (&self.origin, frame) {
            (SessionOrigin::Remote { .. }, SessionFrame::Resume { .. }) if self.ends_with_link() => false,
            (
                SessionOrigin::Remote { opener, target, .. },
                SessionFrame::Resume { opener: claimed, place: Some(place), .. },
            ) => opener == claimed && (&self.key.node, target) == (&place.0, &place.1),
            (
                SessionOrigin::Remote { opener, target, .. },
                SessionFrame::Open { opener: claimed, target: at, .. }
                | SessionFrame::Resume { opener: claimed, target: at, .. },
            ) => opener == claimed && target == at,
            (SessionOrigin::Remote { opener, .. }, SessionFrame::Revoked { opener: claimed, .. }) => {
                opener == claimed
            }
            _ => true,
        }
    }

    /// Resets the session from this side and drops undelivered bytes.
    pub(crate) fn reset(self: &Arc<Self>, why: SessionError) {
        self.with_state(|inner| ((), inner.state.abandon(why, Instant::now())));
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

    /// Ends a session without an owner, or one with only its last frame to send or to receive. Returns whether bytes
    /// were still to be delivered, or `None` if it is neither.
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

    /// Reads the protocol state under the lock.
    pub(crate) fn read<T>(&self, read: impl FnOnce(&SessionState) -> T) -> T {
        read(&self.lock().state)
    }

    /// Like [`Self::with_link`], for a step that moves the session to no other link.
    pub(super) fn with_state<T>(self: &Arc<Self>, step: impl FnOnce(&mut Inner) -> (T, Actions)) -> T {
        self.with_link(None, step)
    }

    /// Runs `step`, which may move the session to `link`, under the lock, and returns its result. What follows from the
    /// step is taken under the lock too, and carried out without it: two locks are never held at once.
    fn with_link<T>(
        self: &Arc<Self>,
        link: Option<&Arc<Link>>,
        step: impl FnOnce(&mut Inner) -> (T, Actions),
    ) -> T {
        let mut inner = self.lock();
        let before = LoggedState::of(&inner.state);
        let (result, actions) = step(&mut inner);
        let consequences = Consequences::take(&mut inner, before, &actions, link, &self.stay);
        drop(inner);
        if let Some(consequences) = consequences {
            consequences.carry_out(self);
        }
        result
    }

    /// Makes the links' lists follow a change of the path, without the session's lock. With `lost`, sends PathLost of
    /// that epoch on the link that the session has left: it works, and the remote end would wait there.
    ///
    /// Another thread may have moved the session on meanwhile, and may even do this first. Each stay has its number, so
    /// a list is never changed for another stay than the one meant; and after joining, a stay that is over by then
    /// ends. If the link has ended before, its end is handled here, because its list did not contain the session.
    fn follow(self: &Arc<Self>, moved: Moved, lost: Option<u64>) {
        let Moved { left, joined, stay } = moved;
        if let Some(left) = left {
            left.detach(self.key.id, stay - 1);
            if let Some(epoch) = lost {
                left.send_path_lost(&self.key, epoch);
            }
        }
        let Some(link) = joined else { return };
        if !link.attach(&self.key, stay) {
            self.lose_path(link.id, None, Instant::now());
        } else if self.stay.load(Relaxed) != stay {
            link.detach(self.key.id, stay);
        }
    }

    /// Makes a new acceptor join the link that its Open came over.
    pub(crate) fn join_first(self: &Arc<Self>, link: &Arc<Link>) {
        self.follow(Moved { left: None, joined: Some(link.clone()), stay: FIRST_STAY }, None);
    }

    pub(super) fn lock(&self) -> MutexGuard<'_, Inner> {
        self.inner.lock()
    }
}

impl Inner {
    /// Takes the right to search for a path if the session needs one, has none, and no task searches. The caller holds
    /// the session's lock, so that of two threads that notice the same loss only one takes it.
    fn take_search(&mut self) -> Option<PathLoss> {
        let needs = self.state.is_opener() && self.state.needs_path() && self.state.path().is_none();
        if !needs || self.is_searched {
            return None;
        }
        self.is_searched = true;
        let at = Instant::now();
        let moved = self.state.bytes_transferred();
        let repeats = |last: &PathLoss| at - last.at < RECENT_LOSS && last.moved == moved;
        let consecutive = self.lost.filter(repeats).map_or(0, |last| last.consecutive + 1);
        self.lost = Some(PathLoss { consecutive, at, moved });
        self.lost
    }

    /// Makes what is derived from the state's path follow it: the link, and the session's place there. A step moves a
    /// session to no other link than `link`. Returns what the links' own lists have to follow.
    fn follow_path(&mut self, link: Option<&Arc<Link>>, shown: &AtomicU64) -> Moved {
        let path = self.state.path();
        let joined = link.filter(|link| Some(link.id) == path).cloned();
        let left = std::mem::replace(&mut self.link, joined.clone());
        self.places = QueueMembership::default();
        self.stay += 1;
        shown.store(self.stay, Relaxed);
        Moved { left, joined, stay: self.stay }
    }
}

/// What follows from a step of a session. Each part runs a waker or takes another lock, so it waits until the session's
/// lock is released. Another thread may change the session meanwhile, and each part tolerates that.
struct Consequences {
    /// The line of the log.
    transition: Option<LoggedTransition>,
    /// Tasks that wait for the session. One that is woken too often only checks again.
    wakers: [Option<Waker>; 3],
    /// The links to leave and to join; [`SharedSession::follow`] compares the numbers of stays.
    moved: Option<Moved>,
    /// The epoch whose loss the link that was left must report.
    lost: Option<u64>,
    /// The turns that the session needs. On a link that it has left meanwhile they are stale, and no frame comes of them.
    request: Option<(Arc<Link>, QueueRequest)>,
    /// The end of a session that is removed from the table. It never comes back.
    forgotten: Option<Forgotten>,
    /// The search for a path, which only this thread has taken.
    search: Option<PathLoss>,
}

/// A session that its table forgets.
struct Forgotten {
    is_opener: bool,
    why: Option<ErrorCode>,
    permit: Option<AnyPermit>,
}

impl Consequences {
    /// Returns `None` if nothing follows, as from most steps.
    fn take(
        inner: &mut Inner,
        before: LoggedState,
        actions: &Actions,
        link: Option<&Arc<Link>>,
        stay: &AtomicU64,
    ) -> Option<Self> {
        let now = LoggedState::of(&inner.state);
        let moved = (now.link != before.link).then(|| inner.follow_path(link, stay));
        // After the path was followed: the turns are those of the link that the session is on now.
        let request = inner.take_request();
        let search = inner.take_search();
        if now == before && *actions == Actions::default() && request.is_none() && search.is_none() {
            return None;
        }
        let lost = actions.left.then_some(before.epoch);
        let wakers = [
            inner.reader.take_if(|_| actions.read),
            inner.writer.take_if(|_| actions.write),
            inner.watcher.take_if(|_| actions.state || actions.forget),
        ];
        let forgotten = actions.forget.then(|| Forgotten {
            is_opener: inner.state.is_opener(),
            why: inner.state.ended().map(|why| why.code),
            permit: inner.permit.take(),
        });
        let is_logged = now != before && enabled!(Level::DEBUG);
        let why = inner.state.ended().filter(|_| is_logged).cloned();
        let transition = is_logged.then_some(LoggedTransition { before, now, why });
        Some(Self { transition, wakers, moved, lost, request, forgotten, search })
    }

    fn carry_out(self, session: &Arc<SharedSession>) {
        if let Some(transition) = self.transition {
            transition.log(session);
        }
        self.wakers.into_iter().flatten().for_each(Waker::wake);
        if let Some(moved) = self.moved {
            session.follow(moved, self.lost);
        }
        if let Some((link, request)) = self.request {
            link.enter(session, &request);
        }
        if self.forgotten.is_none() && self.search.is_none() {
            return;
        }
        let table = session.table.upgrade();
        if let Some(Forgotten { is_opener, why, permit }) = self.forgotten {
            table.iter().for_each(|table| table.forget(session, is_opener, why));
            // Last, so that a client that gets the permit finds a place in the table.
            drop(permit);
        }
        if let (Some(table), Some(loss)) = (table, self.search) {
            table.add_parked(session, loss.consecutive);
        }
    }
}

/// A change of a session's path, to be followed by the links.
#[derive(Debug)]
struct Moved {
    left: Option<Arc<Link>>,
    joined: Option<Arc<Link>>,
    /// Number of the new stay.
    stay: u64,
}

/// Number of the stay in which a session is created.
const FIRST_STAY: u64 = 0;

impl FrameSource for SharedSession {
    fn key(&self) -> &SessionKey {
        &self.key
    }

    fn client(&self) -> &Arc<str> {
        &self.client
    }

    fn is_stale(&self, stay: u64) -> bool {
        stay != self.stay.load(Relaxed)
    }

    fn next_frame(self: Arc<Self>, link: LinkId, turn: &mut Turn, now: Instant) -> TurnOutput {
        self.with_state(|inner| {
            if turn.entry().stay != inner.stay {
                return (TurnOutput::default(), Actions::default());
            }
            match turn {
                Turn::Answer(_) | Turn::Credit(_) => {
                    let (frame, actions) = self.poll_frame(inner, link, 0, now);
                    (inner.places.on_control(turn, frame), actions)
                }
                Turn::Data { flow, longest, most } => {
                    let is_held = inner.state.backlog().is_some_and(|backlog| backlog > *most);
                    let (frame, actions) = if is_held {
                        Default::default()
                    } else {
                        self.poll_frame(inner, link, *longest, now)
                    };
                    let backlog = inner.state.backlog();
                    (inner.places.on_data(flow, frame, backlog), actions)
                }
            }
        })
    }
}

impl SharedSession {
    /// Returns the state's next frame. Adds what the state does not know: this process's instance and the opener, as an
    /// edge names no opener and its server adds it. Records when a credit is sent; that measurement ends when the
    /// session moves to another path.
    fn poll_frame(
        &self,
        inner: &mut Inner,
        link: LinkId,
        max: usize,
        now: Instant,
    ) -> (Option<SessionFrame>, Actions) {
        let (mut frame, actions) = inner.state.poll_frame(link, max);
        let to_server = |link: &Arc<Link>| matches!(link.peer, Remote::Server(_));
        if let Some(SessionFrame::Open { resume_timeout: Some(_), boot, .. }) = &mut frame {
            *boot = *BOOT;
        }
        match &mut frame {
            Some(SessionFrame::Credit { .. }) => inner.state.recv.credit_sent(now),
            Some(SessionFrame::Opened { instance, place, .. }) => {
                *instance = self.table.upgrade().map(|table| table.instance());
                if let Some((_, target)) = self.origin.device() {
                    *place = Some(Box::new((self.key.node.clone(), target.clone())));
                }
            }
            Some(SessionFrame::Open { opener, .. } | SessionFrame::Resume { opener, .. }) => {
                inner.state.recv.reset_rtt();
                if !inner.link.as_ref().is_some_and(to_server) {
                    *opener = self.table.upgrade().map(|table| Opener::Server(table.instance()));
                }
            }
            Some(SessionFrame::Resumed { .. }) => inner.state.recv.reset_rtt(),
            _ => {}
        }
        (frame, actions)
    }
}

impl Inner {
    /// Takes the request for the entries that it needs on its link and has not requested yet.
    pub(crate) fn take_request(&mut self) -> Option<(Arc<Link>, QueueRequest)> {
        let link = self.link.as_ref()?;
        let request = self.places.request(self.state.control(), self.state.backlog());
        let is_new = !request.is_empty();
        is_new.then(|| (link.clone(), QueueRequest { stay: self.stay, ..request }))
    }
}

impl SharedSession {
    /// Returns the link's RTTs for the path to the session's remote end.
    pub(crate) fn path_rtt(&self, inner: &Inner) -> LinkRtt {
        let Some(link) = &inner.link else { return LinkRtt::default() };
        let far = match &self.origin {
            SessionOrigin::Remote { opener: Some(Opener::Server(opener)), .. } => Some(*opener),
            SessionOrigin::Remote { .. } | SessionOrigin::Here { .. } => inner.state.instance(),
        };
        // An edge relays nothing. A server may, so there the process of the remote end is compared with the link's.
        let ends_there = matches!(link.peer, Remote::Edge(_)) || (far.is_some() && far == link.instance);
        LinkRtt { latest: link.round_trip(), least: link.min_rtt().filter(|_| ends_there) }
    }

    /// Sends Open over `link`, or Resume if `again`; only for the opener. `process` is the process that
    /// an Open is expected to reach, if known.
    ///
    /// One task opens a session and another finds a new path for it. If the session has opened and lost its path before
    /// the first task calls this, an Open would be wrong. So nothing is sent unless `again` matches the state.
    pub(crate) fn ask(self: &Arc<Self>, link: &Arc<Link>, process: Option<Instance>, again: bool) {
        let unpromised = link.unread_reservation();
        self.with_link(Some(link), |inner| {
            if again != inner.state.needs_path() {
                return ((), Actions::default());
            }
            let actions = inner.state.start_attempt(link.id, process);
            inner.state.recv.set_unpromised(unpromised);
            ((), actions)
        });
    }

    /// Leaves the path over `link`, which may still work, to continue on another one; only for the
    /// opener. Sends PathLost to the remote end. Returns false if the session stays: another thread has moved it
    /// meanwhile, only its last frame waits for its turn, or it ends with the link.
    pub(crate) fn leave(self: &Arc<Self>, link: &Link) -> bool {
        self.with_state(|inner| {
            let left =
                if self.ends_with_link() { None } else { inner.state.leave_path(link.id, Instant::now()) };
            (left.is_some(), left.unwrap_or_default())
        })
    }

    /// Handles the loss of the path over a link; `why` is set if its remote cannot resume.
    pub(crate) fn lose_path(self: &Arc<Self>, link: LinkId, why: Option<SessionError>, now: Instant) {
        let why = match why {
            None if self.ends_with_link() => {
                let text = "its link has closed, and it is never resumed";
                Some(SessionError::new(ErrorCode::Cancelled, text))
            }
            why => why,
        };
        self.with_state(|inner| ((), inner.state.lose_path(link, why, now)));
    }

    /// Returns whether the session was opened here, and the number of bytes moved in both directions. Returns `None`
    /// unless it is open and runs on that link: a session that has left the link without a new path is still a member.
    pub(crate) fn traffic(&self, link: LinkId) -> Option<(bool, u64)> {
        let inner = self.lock();
        let runs = inner.state.phase() == Phase::Open && inner.state.path() == Some(link);
        runs.then(|| (inner.state.is_opener(), inner.state.bytes_transferred()))
    }

    /// Ends a session that has waited for its remote for its resume timeout, which is `usual` if it has none of its own.
    /// One that is idle gives memory back. Without a link of this process it is not its opener whose line was lost.
    pub(crate) fn expire(self: &Arc<Self>, now: Instant, usual: Duration, is_linked: bool) -> ExpiryOutcome {
        self.with_state(|inner| {
            inner.state.recv.release_idle();
            let Some(since) = inner.state.mark_waiting(now) else {
                return (ExpiryOutcome::None, Actions::default());
            };
            let waited = now.saturating_duration_since(since);
            let timeout = inner.state.resume_timeout(usual);
            if waited >= timeout {
                let opener =
                    self.origin.device().map_or("its opener".to_owned(), |(device, _)| device.to_string());
                let whose = match is_linked {
                    _ if inner.state.is_opener() => String::new(),
                    true => format!(": {opener} did not resume it, and this machine is linked"),
                    false => ": this machine has no link to a server".to_owned(),
                };
                let why = format!("no path for {}{whose}", in_words(timeout));
                let (cut, actions) = inner.state.expire(SessionError::new(ErrorCode::Cancelled, why));
                return (if cut { ExpiryOutcome::Truncated } else { ExpiryOutcome::None }, actions);
            }
            let is_stalled = waited >= STALLED_AFTER && inner.state.can_be_evicted();
            let evictable = is_stalled || inner.state.is_orphaned();
            (if evictable { ExpiryOutcome::Evictable } else { ExpiryOutcome::None }, Actions::default())
        })
    }

    /// Returns the session if it has been without a path for so long that only its own resume timeout keeps it. Its owner
    /// stores little more from then on.
    pub(crate) fn long_parked(self: &Arc<Self>, now: Instant) -> Option<LongParked> {
        let mut inner = self.lock();
        let timeout = inner.state.resume_timeout.filter(|_| inner.state.needs_path())?;
        let lost = inner.lost.map(|loss| loss.at).or_else(|| inner.state.path_lost_at())?;
        if now.saturating_duration_since(lost) < LONG_PARKED {
            return None;
        }
        inner.state.send.stall();
        let kept = inner.state.send.memory() + inner.state.recv.memory();
        let device = self.origin.device().map(|(device, _)| device.clone());
        Some(LongParked { session: self.clone(), device, timeout, lost, kept: kept.max(MIN_PARKED_MEMORY) })
    }

    /// Returns true if the session is open, and has or had a working path within [`DELIVERY_WITHOUT_PATH`].
    pub(crate) fn can_deliver(&self, now: Instant) -> bool {
        let inner = self.lock();
        if !inner.state.is_active() {
            return false;
        }
        let lost_at = inner.state.path_lost_at();
        let link = inner.link.clone();
        drop(inner);
        let failed_at = lost_at.or_else(|| link.as_ref()?.unresponsive_since(now));
        failed_at.is_none_or(|at| now.saturating_duration_since(at) < DELIVERY_WITHOUT_PATH)
    }

    /// Ends an acceptor here that its opener has left, because a Resume names another process as the acceptor. Returns
    /// true if there was one; the session may then be relayed through this process.
    pub(crate) fn supersede(self: &Arc<Self>) -> bool {
        self.with_state(|inner| {
            let yields = !inner.state.is_opener();
            let why = SessionError::new(ErrorCode::UnknownSession, "its opener moved to another process");
            (yields, if yields { inner.state.give_up(why) } else { Actions::default() })
        })
    }
}

/// A session that has been without a path for more than [`LONG_PARKED`].
pub(crate) struct LongParked {
    pub(super) session: Arc<SharedSession>,
    /// The device that opened it; `None` at the opener.
    pub(super) device: Option<UserDevice>,
    /// How long it may be without a path.
    pub(super) timeout: Duration,
    pub(super) lost: Instant,
    /// The bytes that it is counted with.
    pub(super) kept: usize,
}

/// Time without a path after which a session is counted among those that wait for long. Others end after that time.
const LONG_PARKED: Duration = Duration::from_secs(60);
/// What an idle login is counted with at each end.
const MIN_PARKED_MEMORY: usize = 8 * 1024;

/// Time for which a program that ends awaits delivery without a working path.
const DELIVERY_WITHOUT_PATH: Duration = Duration::from_secs(2);

/// Losses of a path within this time, without a byte moved in between, count as consecutive.
const RECENT_LOSS: Duration = Duration::from_secs(10);

/// The result of [`SharedSession::expire`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum ExpiryOutcome {
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

#[cfg(test)]
mod tests;
