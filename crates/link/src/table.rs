//! The sessions of this process: how frames about them are handled, which sessions are accepted, and what a link's end
//! does.

pub(crate) mod eviction;
pub mod handles;
pub mod relay_request;
pub mod session;
pub(crate) mod tombstones;
pub mod traffic_class;
mod upkeep;

use std::collections::hash_map::Entry;
use std::collections::{HashMap, VecDeque};
use std::sync::Arc;
use std::sync::atomic::AtomicUsize;
use std::sync::atomic::Ordering::Relaxed;
use std::time::Duration;

use tokio::sync::Notify;
use tokio::task::coop::consume_budget;
use tokio::time::Instant;

use crate::link::Link;
use crate::lock::{Mutex, MutexGuard};
use crate::relay::RelayTable;
use crate::relay::attempt::{Attempt, BindOutcome};
use crate::table::eviction::{ByClient, MAX_ORPHANS, client_of, source};
use crate::table::handles::{IncomingSession, PathSearchRight, PendingOpen, Session};
use crate::table::relay_request::{RelayRequest, refused};
use crate::table::session::{SessionOrigin, SharedSession};
use crate::table::tombstones::{Tombstones, unknown_session};
use tunnel_base::metrics::Metrics;
use tunnel_proto::budget::Budget;
use tunnel_proto::frame::{
    ErrorCode, Frame, Opener, Remote, SessionCategory, SessionError, SessionFrame, SessionKey,
};
use tunnel_proto::halves::WindowLimits;
use tunnel_proto::halves::recv::RecvHalf;
use tunnel_proto::halves::send::SendHalf;
use tunnel_proto::names::{Instance, NodeName, SessionId, Target, UserDevice};
use tunnel_proto::state::SessionState;

/// Upper bound in bytes for the memory of an idle session, with its client's connection.
pub const SESSION_MEMORY: usize = 12 * 1024;

/// Limits for all sessions of one process.
#[derive(Debug, Clone)]
pub struct SessionLimits {
    /// Receive windows of each session.
    pub windows: WindowLimits,
    /// Bytes reserved for what remotes may send, and the same again for unacknowledged bytes, and for relayed ones. Each
    /// should be at most a fifth of the process's memory.
    pub memory: usize,
    /// Maximum number of concurrent sessions. With [`SESSION_MEMORY`] each they should also have at most a fifth.
    pub sessions: usize,
    /// How long a session without a path, and the id of an ended session, are kept.
    pub resume_timeout: Duration,
    /// The most that is granted to a session of a user's link, which may ask for more than that.
    pub max_resume_timeout: Duration,
}

/// All sessions of this process by id; creates new ones.
#[derive(Debug)]
pub struct SessionTable {
    instance: Instance,
    limits: SessionLimits,
    metrics: Metrics,
    reserved: Arc<Budget>,
    unacked: Arc<Budget>,
    /// Bytes from plain remotes, for which nothing was reserved.
    pub(crate) unreserved: Arc<Budget>,
    shards: Vec<Mutex<HashMap<SessionId, Arc<SharedSession>>>>,
    count: AtomicUsize,
    ended: Mutex<Tombstones>,
    /// The sessions that another process has opened here.
    clients: Mutex<ByClient>,
    /// The orphaned sessions that may be evicted.
    orphans: Mutex<ByClient>,
    /// Sessions that need a path, for which no task searches one yet.
    parked: Mutex<VecDeque<PathSearchRight>>,
    /// Notified when a session is added to `parked`.
    came: Notify,
    /// The sessions that this process relays.
    pub relays: RelayTable,
}

/// What a frame requires the caller to do.
#[derive(Debug)]
pub enum FrameEvent {
    /// The remote end requests a session here.
    Incoming(IncomingSession),
    /// A request to reach a node through this server.
    RelayRequest(RelayRequest),
    /// A frame that is about no session, and that the link itself does not handle.
    Signal(Frame),
    /// A node here keeps that session, which has no path, for this device, to this target.
    Parked(SessionKey, Box<(UserDevice, Target)>),
    /// A peer has ended a session, which it does not relay here, for this reason.
    Ended(SessionId, String),
}

/// The limit of sessions is reached, or no memory is left to reserve.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("too many sessions")]
pub struct TableFull;

impl SessionTable {
    /// Creates an empty table for the process `instance`.
    pub fn new(instance: Instance, limits: SessionLimits, metrics: Metrics) -> Arc<Self> {
        let largest = usize::try_from(limits.windows.max).unwrap_or(usize::MAX);
        let most = MAX_RELAY_QUEUE.min(limits.memory).max(largest);
        let relays = RelayTable::new(most, limits.memory.max(most));
        let table = Arc::new(Self {
            instance,
            metrics,
            reserved: Budget::new(limits.memory),
            unacked: Budget::new(limits.memory),
            unreserved: Budget::new(limits.memory / 2),
            ended: Mutex::new(Tombstones::new(limits.sessions)),
            limits,
            shards: (0..SHARDS).map(|_| Mutex::default()).collect(),
            count: AtomicUsize::new(0),
            clients: Mutex::new(ByClient::new(usize::MAX)),
            orphans: Mutex::new(ByClient::new(MAX_ORPHANS)),
            parked: Mutex::default(),
            came: Notify::new(),
            relays,
        });
        table.show_memory();
        table
    }

    /// Returns the instance of this process.
    pub fn instance(&self) -> Instance {
        self.instance
    }

    /// Returns the current number of sessions.
    pub fn len(&self) -> usize {
        self.count.load(Relaxed)
    }

    /// Returns true if there is no session.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Returns the bytes reserved for remotes, and the unacknowledged bytes.
    pub fn memory(&self) -> (usize, usize) {
        (self.reserved.used(), self.unacked.used())
    }

    /// Returns the bytes that were received and not read, over all sessions.
    pub fn queued(&self) -> usize {
        self.all().iter().map(|session| session.read(|state| state.recv.queued())).sum()
    }

    /// Returns the unread bytes from plain remotes, including the overhead of their pieces, and their limit.
    pub fn unreserved(&self) -> (usize, usize) {
        (self.unreserved.used(), self.unreserved.limit())
    }

    /// Creates a session to `target` at `node`, which has no link yet. `listener` is the name of the listener that
    /// accepted the client.
    pub fn open(
        self: &Arc<Self>,
        node: NodeName,
        target: Target,
        category: SessionCategory,
        client: String,
        listener: &'static str,
    ) -> Result<PendingOpen, TableFull> {
        let halves = if self.make_place(|| false) { self.halves() } else { None };
        let (send, recv) = halves.ok_or(TableFull)?;
        let source = source(&client);
        let end = SessionState::opener(target, client, send, recv);
        let key = SessionKey { id: SessionId::random(), category, node };
        let shared = SharedSession::new(key, self, source, SessionOrigin::Here { listener }, end, None);
        // Its id is new.
        let _ = self.insert(&shared);
        Ok(PendingOpen::new(shared))
    }

    /// Returns the number of sessions that are relayed or for which a path is searched, and the bytes that wait for
    /// them.
    pub fn relayed(&self) -> (usize, usize) {
        (self.relays.len(), self.relays.queued.used())
    }

    /// Resets every session and sends the reason to all remote ends.
    pub fn reset_all(&self, why: &SessionError) {
        for session in self.all() {
            session.reset(why.clone());
        }
    }

    /// Returns all sessions.
    pub(crate) fn all(&self) -> Vec<Arc<SharedSession>> {
        self.shards.iter().flat_map(|shard| shard.lock().values().cloned().collect::<Vec<_>>()).collect()
    }

    /// Makes place for another session. If there is none, evicts an orphan, or with `evict` another session. Returns
    /// false if there is no place. The last frame of an evicted session may have to wait on a slow link, so the number
    /// of such sessions is limited.
    fn make_place(&self, evict: impl Fn() -> bool) -> bool {
        let most = self.limits.sessions;
        if self.len() < most {
            return true;
        }
        let with_slack = most + most.div_ceil(CLOSE_FRAME_DIVISOR);
        let evicted = self.evict_orphan("sessions") || self.len() < with_slack && evict();
        evicted && self.len() < with_slack
    }

    fn halves(&self) -> Option<(SendHalf, RecvHalf)> {
        let WindowLimits { start, max } = self.limits.windows;
        let promised = self.reserved.reserve_window(usize::try_from(start).ok()?)?;
        let windows = WindowLimits { start: u64::try_from(promised.size()).ok()?, max };
        Some((SendHalf::new(self.unacked.reservation()), RecvHalf::new(windows, promised)))
    }

    /// Adds a session. Fails with the session that has its id already.
    pub(crate) fn insert(&self, shared: &Arc<SharedSession>) -> Result<(), Arc<SharedSession>> {
        match self.shard(shared.key.id).entry(shared.key.id) {
            Entry::Occupied(known) => return Err(known.get().clone()),
            Entry::Vacant(place) => place.insert(shared.clone()),
        };
        self.count.fetch_add(1, Relaxed);
        Ok(())
    }

    /// Returns the session if it has an end here.
    pub(crate) fn session(&self, id: SessionId) -> Option<Arc<SharedSession>> {
        self.shard(id).get(&id).cloned()
    }

    fn shard(&self, id: SessionId) -> MutexGuard<'_, HashMap<SessionId, Arc<SharedSession>>> {
        self.shards[id.shard(SHARDS)].lock()
    }

    /// Handles a frame about a session from `link`. For a request, the key's node is the acceptor's.
    pub fn on_frame(
        self: &Arc<Self>,
        link: &Arc<Link>,
        key: SessionKey,
        mut frame: SessionFrame,
        now: Instant,
    ) -> Option<FrameEvent> {
        if let SessionFrame::Parked(of) = frame {
            return matches!(link.peer, Remote::Edge(_)).then_some(FrameEvent::Parked(key, of));
        }
        if let Some(opener) = frame.opener() {
            *opener = Opener::verified(opener.take(), &link.peer, link.instance);
        }
        if let SessionFrame::Open { opener, resume_timeout, .. } = &mut frame {
            let most = self.limits.max_resume_timeout.max(self.limits.resume_timeout);
            let asks = matches!(opener, Some(Opener::User(_)));
            *resume_timeout = resume_timeout.filter(|_| asks).map(|asked| asked.min(most));
        }
        if let SessionFrame::Resume { place, .. } = &mut frame
            && !matches!(link.peer, Remote::User(_))
        {
            *place = None;
        }
        let mut known = self.session(key.id);
        if known.as_ref().is_some_and(|shared| !shared.is_of_origin(&frame)) {
            self.reject_opener(link, &key, &frame);
            return None;
        }
        if let SessionFrame::Resume { instance: Some(meant), .. } = &frame
            && *meant != self.instance
        {
            known = known.filter(|shared| !shared.supersede());
        }
        let Some(shared) = known else { return self.on_frame_without_end(link, key, frame) };
        let resumes = matches!(frame, SessionFrame::Resume { .. } | SessionFrame::Resumed { .. });
        if !shared.on_frame(link, frame, now) {
            self.metrics.frames_dropped.count("unexpected");
            return None;
        }
        if resumes {
            self.metrics.resumed.inc();
        }
        None
    }

    /// Handles a frame about a session that has no end here, or none yet.
    fn on_frame_without_end(
        self: &Arc<Self>,
        link: &Arc<Link>,
        key: SessionKey,
        frame: SessionFrame,
    ) -> Option<FrameEvent> {
        // A server's requests to an edge are meant for that edge; a link to it carries nothing else.
        let at_server = !matches!(link.peer, Remote::Server(_));
        match &frame {
            SessionFrame::Open { .. } | SessionFrame::Resume { .. }
                if key.category == SessionCategory::Admin && !matches!(link.peer, Remote::User(_)) =>
            {
                let why = "only the program of a user opens sessions of the category admin";
                let refusal = SessionError::new(ErrorCode::NotAllowed, why);
                link.reply_to(&client_of(&link.peer, &frame), &key, refused(&frame, refusal));
                None
            }
            SessionFrame::Open { .. } if at_server => self.on_request(link, key, frame),
            // Only an edge that gives up a pending open does not know the process.
            SessionFrame::Resume { instance, .. } if at_server && *instance != Some(self.instance) => {
                self.on_request(link, key, frame)
            }
            SessionFrame::Open { .. } => self.on_open(link, key, frame).map(FrameEvent::Incoming),
            SessionFrame::Resume { epoch, opener, .. } => {
                let failed = self.failed_resume(key.id, opener.as_ref(), *epoch);
                link.reply_to(&client_of(&link.peer, &frame), &key, failed);
                None
            }
            _ => {
                // A peer has ended a session that may resume here.
                let ended = match &frame {
                    SessionFrame::Reset {
                        refusal: SessionError { code: ErrorCode::NotAllowed, reason },
                        ..
                    } if link.peer == Remote::Peer => Some(FrameEvent::Ended(key.id, reason.clone())),
                    _ => None,
                };
                if self.relays.on_frame(link, key.id, frame) {
                    return None;
                }
                if ended.is_none() {
                    self.metrics.frames_dropped.count("unknown_session");
                }
                ended
            }
        }
    }

    fn on_request(
        self: &Arc<Self>,
        from: &Arc<Link>,
        key: SessionKey,
        frame: SessionFrame,
    ) -> Option<FrameEvent> {
        let client = client_of(&from.peer, &frame);
        let attempt = Attempt { client, ..Attempt::new(from.clone(), key, &frame)? };
        let most = self.limits.sessions;
        let too_many = if from.is_answer_queue_full(&attempt.client) || from.sessions() >= most {
            Some("too many sessions on this link")
        } else if self.exceeds_fair_share(&from.peer) && !self.relays.knows(attempt.key.id) {
            Some("too many sessions of this edge or user, and half of all sessions of this server are in use")
        } else if self.relays.len() >= most && !self.relays.knows(attempt.key.id) {
            Some("too many sessions relayed by this server")
        } else {
            None
        };
        if let Some(why) = too_many {
            let refusal = SessionError::new(ErrorCode::Overloaded, why);
            from.reply_to(&attempt.client, &attempt.key, refused(&frame, refusal));
            return None;
        }
        match self.relays.on_request(&attempt) {
            BindOutcome::Newest => {
                let table = self.clone();
                let frame = Some(frame);
                return Some(FrameEvent::RelayRequest(RelayRequest { table, attempt, frame }));
            }
            BindOutcome::Stale => self.metrics.frames_dropped.count("unexpected"),
            BindOutcome::WrongOpener => self.reject_opener(from, &attempt.key, &frame),
        }
        None
    }

    /// Returns true if an edge or a user has requested a quarter of all sessions that are possible, and half of them
    /// are in use. So none takes the places of all others.
    fn exceeds_fair_share(&self, peer: &Remote) -> bool {
        let (Some(requester), most) = (peer.requester(), self.limits.sessions) else { return false };
        let is_crowded = self.relays.len().max(self.len()) >= most / 2;
        if !is_crowded {
            return false;
        }
        let ends_here = self.clients.lock().count(&requester.as_str().into());
        self.relays.requested_by(&requester) + ends_here >= most.div_ceil(4)
    }

    /// Rejects a remote that tries to resume or end another opener's session, or as one to another target, with the same
    /// answer as for an unknown session.
    fn reject_opener(&self, from: &Link, session: &SessionKey, frame: &SessionFrame) {
        self.metrics.frames_dropped.count("wrong_opener");
        from.reply_to(&client_of(&from.peer, frame), session, refused(frame, unknown_session()));
    }

    /// Returns the offer of a session that an Open requests here. Returns `None` if it was refused, and then the opener
    /// gets Refused.
    pub(crate) fn on_open(
        self: &Arc<Self>,
        link: &Arc<Link>,
        key: SessionKey,
        open: SessionFrame,
    ) -> Option<IncomingSession> {
        let SessionFrame::Open { ref target, limit, epoch, ref client, ref opener, resume_timeout, boot } =
            open
        else {
            return None;
        };
        let target = target.clone();
        let client = client.clone();
        // A server keeps its end of a user's session, with a plain remote, only as long as that of any other.
        let is_at_node = matches!(link.peer, Remote::Server(_));
        let boot = boot.filter(|_| is_at_node);
        let origin = SessionOrigin::Remote { opener: opener.clone(), target: target.clone(), boot };
        self.end_earlier_boots(&origin);
        let source = source(&client);
        let ended = self.ended.lock().refusal(key.id);
        let halves = if let Some(refusal) = ended {
            Err(refusal)
        } else if link.is_answer_queue_full(&source) {
            Err(SessionError::new(ErrorCode::Overloaded, "too many unread replies on this link"))
        } else {
            self.halves_for(&source).ok_or_else(|| self.out_of_memory())
        };
        let (send, mut recv) = match halves {
            Ok(halves) => halves,
            Err(refusal) => {
                link.reply_to(&client_of(&link.peer, &open), &key, SessionFrame::Refused { epoch, refusal });
                return None;
            }
        };
        recv.set_unpromised(link.unread_reservation());
        let mut end = SessionState::acceptor(link.id, epoch, limit, send, recv);
        end.resume_timeout = resume_timeout.filter(|_| is_at_node);
        let shared = SharedSession::new(key, self, source.clone(), origin, end, Some(link.clone()));
        if let Err(first) = self.insert(&shared) {
            // The same Open has just arrived on another link, which another task reads.
            if first.is_of_origin(&open) {
                first.on_frame(link, open, Instant::now());
            }
            return None;
        }
        let id = shared.key.id;
        let now = Instant::now();
        self.clients.lock().insert(&source, id, (), now);
        // It may have ended before it was added.
        if self.session(id).is_none() {
            self.clients.lock().remove(&id);
        }
        // Inserted here before it joins the link: a link that ends looks up its sessions in the table.
        shared.join_first(link);
        let dial_timeout = link.abilities.dial_timeout;
        Some(IncomingSession { session: Session::new(shared), target, client, dial_timeout })
    }

    /// Returns room for another session of a client. If there is none, a client with more sessions gives up some of its
    /// own.
    fn halves_for(&self, source: &Arc<str>) -> Option<(SendHalf, RecvHalf)> {
        // An evicted session frees its memory at once, and its place in the table once the remote end has got the
        // reset.
        if !self.make_place(|| self.evict_idle_session(source)) {
            return None;
        }
        let mut halves = self.halves();
        for _ in 0..MAX_EVICTIONS {
            if halves.is_some() || !self.evict_idle_session(source) {
                break;
            }
            halves = self.halves();
        }
        halves
    }

    /// Returns the refusal for lack of room.
    fn out_of_memory(&self) -> SessionError {
        let most = self.limits.sessions;
        let why = match self.len() >= most {
            true => format!("limit of {most} sessions reached there"),
            false => "no memory left there for another session".to_owned(),
        };
        SessionError::new(ErrorCode::Overloaded, why)
    }

    /// Forgets a session that is over; `why` is set if it did not end cleanly.
    pub(crate) fn forget(&self, session: &SharedSession, is_opener: bool, why: Option<ErrorCode>) {
        let id = session.key.id;
        let now = Instant::now();
        // Only a session that another process opened can be requested again. Added first, so that a late Open always
        // finds one of the two.
        if !is_opener {
            self.ended.lock().add(&session.client, id, why, now);
        }
        if self.shard(id).remove(&id).is_some() {
            if let Some(code) = why {
                self.metrics.resets.count(code.name());
            }
            self.count.fetch_sub(1, Relaxed);
        }
        for by_client in [&self.clients, &self.orphans] {
            by_client.lock().remove(&id);
        }
    }

    /// Handles the end of a link: parks its sessions, or ends them with `why` if the remote cannot resume, and sends
    /// PathLost to the other side of relayed ones. Returns the number of sessions with an end here that ran on it.
    pub fn link_ended(&self, link: &Link, why: &SessionError, now: Instant) -> usize {
        let why = (!link.abilities.resumes).then(|| why.clone());
        let (own, relayed) = link.detach_all();
        let sessions = own.len();
        for shared in own.into_iter().filter_map(|id| self.session(id)) {
            shared.lose_path(link.id, why.clone(), now);
        }
        self.relays.release_on(link, relayed);
        sessions
    }

    /// Makes sessions leave that link for another path: all that are relayed over it, and those opened here if `meant`
    /// accepts the process of their remote end. With `of`, only those of that node. Their remote ends get PathLost.
    /// Returns the number of those opened here.
    pub fn leave(
        &self,
        link: &Link,
        of: Option<&NodeName>,
        meant: impl Fn(Option<Instance>) -> bool,
    ) -> usize {
        for id in link.relayed(of) {
            self.relays.path_lost(id, None);
        }
        let sessions = self.on_link(link, of).into_iter();
        sessions.filter(|session| meant(session.read(SessionState::instance)) && session.leave(link)).count()
    }

    /// Resets every session that runs on that link or is relayed over it, and sends the reason to all their ends.
    pub fn reset_on(&self, link: &Link, why: &SessionError) {
        for session in self.on_link(link, None) {
            session.reset(why.clone());
        }
        for id in link.relayed(None) {
            self.relays.reset(id, why);
        }
    }

    /// Returns the sessions with an end here that run on that link, in the order in which they joined it: all, or those
    /// of one node.
    pub(crate) fn on_link(&self, link: &Link, of: Option<&NodeName>) -> Vec<Arc<SharedSession>> {
        link.own(of).into_iter().filter_map(|id| self.session(id)).collect()
    }

    /// Waits for a session that was opened here, has lost its path, and needs another one. So does a pending open that
    /// was given up while its acceptor still has to get the reset.
    ///
    /// One task calls this, and has a path searched for each.
    ///
    /// # Cancel safety
    ///
    /// Cancel safe.
    pub async fn next_parked(&self) -> PathSearchRight {
        // A runtime that ends drops each search at once, and its session needs another one. Without this, the task that
        // calls would never give way, and the runtime would never end.
        consume_budget().await;
        loop {
            let came = self.came.notified();
            if let Some(parked) = self.parked.lock().pop_front() {
                return parked;
            }
            came.await;
        }
    }

    pub(crate) fn add_parked(&self, session: &Arc<SharedSession>, consecutive_losses: u32) {
        let parked = PathSearchRight { shared: session.clone(), consecutive_losses, is_released: false };
        self.parked.lock().push_back(parked);
        self.came.notify_one();
    }
}

/// Bytes that may wait for one relayed session in one direction; less if the memory is smaller, but never below the
/// largest window.
const MAX_RELAY_QUEUE: usize = 8 << 20;
/// The limit of sessions may be exceeded by one part in this many while last frames wait.
const CLOSE_FRAME_DIVISOR: usize = 8;
/// Number of locks over which the sessions are spread, so that busy sessions seldom contend.
const SHARDS: usize = 16;

/// Maximum number of sessions of one client that are evicted for a session of another one: then there is room, or the
/// client no longer has more.
const MAX_EVICTIONS: usize = 8;

#[cfg(test)]
mod simulation_tests;
