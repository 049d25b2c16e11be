//! Every session of this process: what each frame about one does, who is let in, and what a link's end means.

pub mod closed;
pub mod traffic_class;

use std::collections::{HashMap, VecDeque};
use std::net::SocketAddr;
use std::sync::atomic::Ordering::Relaxed;
use std::sync::atomic::{AtomicBool, AtomicUsize};
use std::sync::{Arc, Mutex, MutexGuard, Weak};
use std::time::Duration;

use tokio::sync::Notify;
use tokio::time::Instant;

use crate::lock;
use crate::relay::{Attempt, AttemptState, AttemptStatus, RelayTable};
use crate::sender::signals::{UNKNOWN, unknown};
use crate::sender::{DetachedSessions, LinkSender};
use crate::session::stream::{IncomingSession, Parked, PendingOpen};
use crate::session::{SessionCore, SessionHost, SessionView};
use crate::table::closed::{Clients, Tombstones, source};
use tunnel_base::metrics::Metrics;
use tunnel_base::names::{Instance, NodeName, SessionId, Target};
use tunnel_proto::budget::{Budget, Reservation};
use tunnel_proto::frame::{
    Category, Conflict, ErrorCode, Found, Load, Opener, Remote, SessionError, SessionFrame, SessionKey,
};
use tunnel_proto::halves::{RecvHalf, SendHalf, WindowLimits};
use tunnel_proto::state::SessionState;

/// What one process allows itself.
#[derive(Debug, Clone)]
pub struct SessionLimits {
    /// Receive windows of each session.
    pub windows: WindowLimits,
    /// Bytes that may be promised to peers, and the same again kept for them.
    pub memory: usize,
    /// Sessions at once.
    pub sessions: usize,
    /// How long a session without a path, and the id of one that ended, are remembered.
    pub grace: Duration,
}

/// All sessions of this process, by id; makes new ones.
#[derive(Debug)]
pub struct SessionTable {
    instance: Instance,
    limits: SessionLimits,
    metrics: Metrics,
    reserved: Arc<Budget>,
    unacked: Arc<Budget>,
    /// What plain peers have sent, to whom nothing was promised.
    pub(crate) unpromised: Arc<Budget>,
    shards: Vec<Mutex<HashMap<SessionId, Arc<SessionCore>>>>,
    count: AtomicUsize,
    /// Whether a session or a link has ended since free memory was given back, or the process has just started.
    freed: AtomicBool,
    ended: Mutex<Tombstones>,
    clients: Mutex<Clients>,
    /// Sessions whose owner has left and that may still have something to deliver, in the order in which they left.
    departed: Mutex<VecDeque<SessionId>>,
    /// Of these, the sessions for which no task looks for a path yet.
    unsearched: Mutex<VecDeque<Parked>>,
    /// Notified when there is one more.
    came: Notify,
    pub(crate) relays: RelayTable,
}

/// What a frame, or the end of a link, asks the wiring to do.
#[derive(Debug)]
pub enum Event {
    /// The far end wants to open a session here.
    Incoming(IncomingSession),
    /// A session that was opened here has lost its path.
    Parked(Parked),
    /// A request to reach a node through this pod.
    RelayRequest(RelayRequest),
    /// A pod asks whether a node is linked here; the number is to be repeated.
    Find(NodeName, u64),
    /// A pod's answer or announcement about a node.
    Found(NodeName, Found),
    /// The pod asks its edge to link to another pod, rather to the one at that address, or the edge confirms that it has.
    Drain(Option<SocketAddr>),
    /// A Conflict, from a pod to its edge or to another pod: another process has that node's name.
    Conflict(NodeName, Conflict),
    /// Another pod says how many nodes it has.
    Load(Load),
}

/// There are as many sessions as there may be, or no memory is left to promise.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("too many sessions at once")]
pub struct TableFull;

impl SessionTable {
    /// An empty table of the process `instance`.
    pub fn new(instance: Instance, limits: SessionLimits, metrics: Metrics) -> Arc<Self> {
        let largest = usize::try_from(limits.windows.max).unwrap_or(usize::MAX);
        let most = MAX_RELAY_QUEUE.min(limits.memory).max(largest);
        let relays = RelayTable::new(most, limits.memory.max(most));
        let table = Arc::new(Self {
            instance,
            metrics,
            reserved: Budget::new(limits.memory),
            unacked: Budget::new(limits.memory),
            unpromised: Budget::new(limits.memory / 2),
            limits,
            shards: (0..SHARDS).map(|_| Mutex::default()).collect(),
            count: AtomicUsize::new(0),
            freed: AtomicBool::new(true),
            ended: Mutex::default(),
            clients: Mutex::default(),
            departed: Mutex::default(),
            unsearched: Mutex::default(),
            came: Notify::new(),
            relays,
        });
        table.show_memory();
        table
    }

    /// This process.
    pub fn instance(&self) -> Instance {
        self.instance
    }

    /// Sessions at this moment.
    pub fn len(&self) -> usize {
        self.count.load(Relaxed)
    }

    /// True without any session.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Bytes promised to peers, and bytes kept for them.
    pub fn memory(&self) -> (usize, usize) {
        (self.reserved.used(), self.unacked.used())
    }

    /// Bytes that have arrived and were not read, in all sessions.
    pub fn queued(&self) -> usize {
        self.all().iter().map(|session| session.queued()).sum()
    }

    /// Bytes that plain peers have sent and nobody has read, with what their pieces cost, and how many there may be.
    pub fn unpromised(&self) -> (usize, usize) {
        (self.unpromised.used(), self.unpromised.limit())
    }

    /// A new session to `target` at `node`, which has no link yet.
    pub fn open(
        self: &Arc<Self>,
        node: NodeName,
        target: Target,
        category: Category,
        client: String,
    ) -> Result<PendingOpen, TableFull> {
        let halves = if self.has_place() { self.halves() } else { None };
        let (send, recv) = halves.ok_or(TableFull)?;
        let end = SessionState::opener(target, client, send, recv);
        let key = SessionKey { id: SessionId::random(), category, node };
        let shared = SessionCore::new(key, self.host(), end, None);
        self.insert(&shared);
        Ok(PendingOpen::new(shared))
    }

    /// Number of sessions that are relayed, or for which a path is sought, and the bytes that wait for them.
    pub fn relayed(&self) -> (usize, usize) {
        (self.relays.len(), self.relays.queued())
    }

    /// Resets every session, with a reason for all far ends.
    pub fn reset_all(&self, why: &SessionError) {
        for shard in &self.shards {
            let sessions: Vec<_> = lock(shard).values().cloned().collect();
            for session in sessions {
                session.reset(why.clone());
            }
        }
    }

    /// Every session.
    pub(crate) fn all(&self) -> Vec<Arc<SessionCore>> {
        self.shards.iter().flat_map(|shard| lock(shard).values().cloned().collect::<Vec<_>>()).collect()
    }

    fn halves(&self) -> Option<(SendHalf, RecvHalf)> {
        let start = self.limits.windows.start >> self.reserved.pressure();
        let promised = self.reserved.try_reserve(usize::try_from(start).ok()?)?;
        let windows = WindowLimits { start, max: self.limits.windows.max };
        Some((SendHalf::new(self.unacked.reservation()), RecvHalf::new(windows, promised)))
    }

    pub(crate) fn insert(&self, shared: &Arc<SessionCore>) {
        self.count.fetch_add(1, Relaxed);
        let id = shared.key.id;
        self.shard(id).insert(id, shared.clone());
    }

    /// The session, if it has an end here.
    pub(crate) fn session(&self, id: SessionId) -> Option<Arc<SessionCore>> {
        self.shard(id).get(&id).cloned()
    }

    fn shard(&self, id: SessionId) -> MutexGuard<'_, HashMap<SessionId, Arc<SessionCore>>> {
        lock(&self.shards[id.shard(SHARDS)])
    }
}

/// Bytes that may wait for one session that passes through, in one direction: as far as there is memory for that, and
/// never below the largest window.
const MAX_RELAY_QUEUE: usize = 8 << 20;
/// Locks the sessions are spread over, so that busy ones do not meet.
const SHARDS: usize = 16;

// What each frame about a session does: for an end here, for one that passes through, for one that is new.

impl SessionTable {
    /// One frame about a session, from the link of `sender`. The key's node is where its acceptor is, if the frame
    /// asks.
    pub fn on_frame(
        self: &Arc<Self>,
        sender: &Arc<LinkSender>,
        key: SessionKey,
        mut frame: SessionFrame,
        now: Instant,
    ) -> Option<Event> {
        let opener = frame.opener().and_then(|said| {
            *said = Opener::verified(said.take(), &sender.peer, sender.instance);
            said.clone()
        });
        let mut known = self.session(key.id);
        if known.as_ref().is_some_and(|shared| !shared.is_of(opener.as_ref())) {
            self.foreign(sender, &key, &frame);
            return None;
        }
        if let SessionFrame::Resume { instance: Some(meant), .. } = &frame
            && *meant != self.instance
        {
            known = known.filter(|shared| !shared.supersede());
        }
        let Some(shared) = known else { return self.on_foreign_frame(sender, key, frame) };
        // A Reset from a pod on the way sends its opener elsewhere.
        let parks = matches!(frame, SessionFrame::PathLost { .. } | SessionFrame::Reset { .. });
        let resumes = matches!(frame, SessionFrame::Resume { .. } | SessionFrame::Resumed { .. });
        if !shared.on_frame(sender, frame, now) {
            self.metrics.frames_dropped.count("out_of_place");
            return None;
        }
        if resumes {
            self.metrics.resumed.inc();
        }
        if let Some(opener) = opener {
            shared.opened_by(opener);
        }
        if parks { shared.parked().map(Event::Parked) } else { None }
    }

    /// A frame about a session that has no end here, or none yet.
    fn on_foreign_frame(
        self: &Arc<Self>,
        sender: &Arc<LinkSender>,
        mut key: SessionKey,
        mut frame: SessionFrame,
    ) -> Option<Event> {
        let edge = match &sender.peer {
            Remote::Edge(edge) => Some(edge),
            Remote::Server(_) | Remote::Peer => None,
        };
        // What the cloud asks of an edge is meant for that edge; a link to it carries nothing else.
        let elsewhere = !matches!(sender.peer, Remote::Server(_));
        match &mut frame {
            SessionFrame::Open { epoch, client, opener, .. } if elsewhere => {
                // An edge must never borrow another front end's rights, nor another's name.
                if let Some(edge) = edge {
                    (key.category, *client) = (Category::HttpProxy, format!("node {edge}"));
                }
                let attempt = Attempt::new(sender, key, *epoch, opener.clone());
                self.on_request(attempt, frame)
            }
            // Only an edge that gives up an opening does not know the process.
            SessionFrame::Resume { epoch, instance, opener, .. }
                if elsewhere && *instance != Some(self.instance) =>
            {
                let attempt = Attempt::new(sender, key, *epoch, opener.clone());
                self.on_request(attempt, frame)
            }
            SessionFrame::Open { .. } => {
                let SessionFrame::Open { target, limit, epoch, client, opener } = frame else { return None };
                let open = OpenFrame { key, target, client, opener, limit, epoch };
                self.on_open(sender, open).map(Event::Incoming)
            }
            SessionFrame::Resume { epoch, opener, .. } => {
                sender.reply(&key, self.failed_resumes(key.id, opener.as_ref(), *epoch));
                None
            }
            _ => {
                if !self.relays.on_frame(sender, key.id, frame) {
                    self.metrics.frames_dropped.count("unknown_session");
                }
                None
            }
        }
    }

    fn on_request(self: &Arc<Self>, attempt: Attempt, frame: SessionFrame) -> Option<Event> {
        let from = &attempt.from;
        let most = self.limits.sessions;
        let too_many = if from.is_reply_queue_full() || from.sessions() >= most {
            Some("too many sessions on this link at once")
        } else if self.relays.len() >= most && !self.relays.knows(attempt.key.id) {
            Some("too many sessions through this pod at once")
        } else {
            None
        };
        if let Some(why) = too_many {
            let refusal = SessionError::new(ErrorCode::Overloaded, why);
            from.reply(&attempt.key, refused(&frame, refusal));
            return None;
        }
        match self.relays.on_request(&attempt) {
            AttemptStatus::Newest => {
                return Some(Event::RelayRequest(RelayRequest::new(self.clone(), attempt, frame)));
            }
            AttemptStatus::Stale => self.metrics.frames_dropped.count("out_of_place"),
            AttemptStatus::WrongOpener => self.foreign(from, &attempt.key, &frame),
        }
        None
    }

    /// A peer that tries to resume another opener's session gets the same answer as for a session that does not exist.
    fn foreign(&self, from: &LinkSender, session: &SessionKey, frame: &SessionFrame) {
        self.metrics.frames_dropped.count("not_the_opener");
        from.reply(session, refused(frame, SessionError::new(ErrorCode::UnknownSession, UNKNOWN)));
    }
}

// A session that a peer asks this process to serve: whether there is room, and which client makes room.

/// What an Open asks for, as it came over a link.
#[derive(Debug)]
pub(crate) struct OpenFrame {
    pub(crate) key: SessionKey,
    /// The target to dial.
    pub(crate) target: Target,
    /// The opener, for the log.
    pub(crate) client: String,
    /// Who opens the session, where that is known.
    pub(crate) opener: Option<Opener>,
    /// The offset below which the opener takes bytes.
    pub(crate) limit: u64,
    /// The number of the attempt.
    pub(crate) epoch: u64,
}

impl SessionTable {
    /// The offer of a session that ends here; `None` if it was refused, and then the opener gets Refused.
    pub(crate) fn on_open(
        self: &Arc<Self>,
        sender: &Arc<LinkSender>,
        open: OpenFrame,
    ) -> Option<IncomingSession> {
        let OpenFrame { key, target, client, opener, limit, epoch } = open;
        let source = source(&client);
        let ended = lock(&self.ended).refusal(key.id);
        let halves = if let Some(refusal) = ended {
            Err(refusal)
        } else if sender.is_reply_queue_full() {
            Err(SessionError::new(ErrorCode::Overloaded, "too many answers wait to be read on this link"))
        } else {
            self.halves_for(&source).ok_or_else(|| self.out_of_memory(&sender.peer))
        };
        let (send, mut recv) = match halves {
            Ok(halves) => halves,
            Err(refusal) => {
                sender.reply(&key, SessionFrame::Refused { epoch, refusal });
                return None;
            }
        };
        if !sender.resumes {
            let (in_all, of_link) = self.room_unread(sender);
            recv.lift_limit(in_all, of_link);
        }
        let end = SessionState::acceptor(sender.id, epoch, limit, send, recv);
        let shared = SessionCore::new(key, self.host(), end, Some(sender.clone()));
        if let Some(opener) = opener {
            shared.opened_by(opener);
        }
        lock(&self.clients).add(shared.key.id, &source);
        self.insert(&shared);
        // Known here before it is known there: a link that ends looks for its sessions here.
        if !sender.attach(shared.key.id) {
            shared.link_ended(sender.id, None, Instant::now());
        }
        let patience = if sender.resumes { DIAL_TIMEOUT } else { PLAIN_DIAL_TIMEOUT };
        Some(IncomingSession::new(shared, target, client, patience))
    }

    /// The answer to a Resume of a session that has no end here, and that no late Open makes one any more.
    pub(crate) fn failed_resumes(&self, id: SessionId, opener: Option<&Opener>, epoch: u64) -> SessionFrame {
        self.add_unknown(id, opener);
        unknown(epoch)
    }

    /// Room for one session more of a client. If there is none, the client that has more than it gives some of its own.
    fn halves_for(&self, source: &str) -> Option<(SendHalf, RecvHalf)> {
        // A session that gives way leaves memory at once, and the table once its far end has got the reset.
        let given =
            || (0..MAX_EVICTIONS).take_while(|_| self.evict_idle_session(source)).find_map(|_| self.halves());
        self.has_place().then(|| self.halves()).flatten().or_else(given)
    }

    /// A refusal for want of room, and which key of which program makes more: a cloud asks an edge, any other asks a
    /// pod.
    fn out_of_memory(&self, peer: &Remote) -> SessionError {
        let (program, file) = match peer {
            Remote::Server(_) => ("edge", "the node's edge.toml"),
            Remote::Edge(_) | Remote::Peer => ("cloud", "that pod's cloud.toml"),
        };
        let most = self.limits.sessions;
        let why = match (self.len() >= most, program) {
            (true, "edge") => format!("{most} sessions run at the node, as many as an edge serves"),
            (true, _) => format!("{most} sessions run at that pod: see [mode.cloud.session] max in {file}"),
            (false, _) => format!(
                "no memory left there for another session: see [mode.{program}.session] memory in {file}"
            ),
        };
        SessionError::new(ErrorCode::Overloaded, why)
    }
}

/// Of one client, so many sessions may give way to one of another's: then there is room, or the one has no more.
const MAX_EVICTIONS: usize = 8;
/// How long an edge may dial: less than the 12 s a front end waits.
const DIAL_TIMEOUT: Duration = Duration::from_secs(10);
/// The same for a plain pod, which waits 5 s.
const PLAIN_DIAL_TIMEOUT: Duration = Duration::from_millis(4500);

// What each session asks of the table that keeps it.

impl SessionHost for SessionTable {
    fn instance(&self) -> Instance {
        self.instance
    }

    fn room_unread(&self, link: &LinkSender) -> (Reservation, Reservation) {
        (self.unpromised.reservation(), link.unread_reservation(self.unpromised.limit() / 4))
    }

    fn departed(&self, id: SessionId) {
        self.add_departed(id);
    }

    fn forget(&self, id: SessionId, why: Option<ErrorCode>) {
        if self.shard(id).remove(&id).is_some() {
            if let Some(code) = why {
                self.metrics.resets.count(code.name());
            }
            self.count.fetch_sub(1, Relaxed);
            self.freed.store(true, Relaxed);
            self.add_ended(id, why);
        }
    }
}

impl SessionTable {
    /// This table, as its sessions know it.
    pub(crate) fn host(self: &Arc<Self>) -> Weak<dyn SessionHost> {
        let table: Weak<Self> = Arc::downgrade(self);
        table
    }
}

// What becomes of sessions when a link ends, or is not to carry them any more.

impl SessionTable {
    /// A link has ended: parks what ran on it, or ends it with `why` if the peer cannot resume, and sends Lost to the
    /// other side of what passed through. Returns the sessions for which a new path is to be sought.
    pub fn link_ended(&self, sender: &LinkSender, why: &SessionError, now: Instant) -> Vec<Parked> {
        let why = (!sender.resumes).then(|| why.clone());
        let mut parked = Vec::new();
        let DetachedSessions { own, relayed } = sender.detach_all();
        for shared in own.into_iter().filter_map(|id| self.session(id)) {
            shared.link_ended(sender.id, why.clone(), now);
            parked.extend(shared.parked());
        }
        self.relays.link_ended(sender.id, relayed);
        self.freed.store(true, Relaxed);
        parked
    }

    /// The sessions that were opened here and run on that link let go of it and send Lost there, if their node and the
    /// process of their other end, where that is known, are `meant`. Returns them: a new path is to be sought for each.
    pub fn leave(
        &self,
        sender: &Arc<LinkSender>,
        meant: impl Fn(&NodeName, Option<Instance>) -> bool,
    ) -> Vec<Parked> {
        let mut parked = Vec::new();
        for session in self.on_link(sender) {
            if !meant(&session.key.node, session.instance()) {
                continue;
            }
            session.leave(sender);
            parked.extend(session.parked());
        }
        parked
    }

    /// Whether any session with that node runs on that link, or passes through it.
    pub fn has_sessions_on(&self, sender: &LinkSender, node: &NodeName) -> bool {
        self.on_link(sender).iter().any(|session| session.key.node == *node)
            || sender.relayed().iter().any(|session| session.node == *node)
    }

    /// What passes through that link to a node that is `meant` is to take another path: both ends of each session get
    /// Lost.
    pub fn detach_relays(&self, sender: &LinkSender, meant: impl Fn(&NodeName) -> bool) {
        for session in sender.relayed().into_iter().filter(|session| meant(&session.node)) {
            self.relays.path_lost(session.id, None);
        }
    }

    /// Resets every session that runs on that link or passes through it, with a reason for all of their ends.
    pub fn reset_on(&self, sender: &LinkSender, why: &SessionError) {
        for session in self.on_link(sender) {
            session.reset(why.clone());
        }
        for session in sender.relayed() {
            self.relays.reset(session.id, why);
        }
    }

    /// The sessions with an end here that run on that link, in the order in which they came to it.
    pub(crate) fn on_link(&self, sender: &LinkSender) -> Vec<Arc<SessionCore>> {
        sender.own().into_iter().filter_map(|id| self.session(id)).collect()
    }
}

// The sessions of this process, for people who look on.

impl SessionTable {
    /// Sessions with an end here, `most` of them at most, in the order of their ids: two looks show the same ones, as
    /// far as they live. Each of the table's locks is held for a copy only.
    pub fn overview(&self, most: usize) -> Vec<SessionView> {
        let mut shown: Vec<SessionView> = Vec::new();
        for shard in &self.shards {
            let left = most - shown.len();
            if left == 0 {
                break;
            }
            let mut sessions: Vec<_> = lock(shard).values().cloned().collect();
            sessions.sort_unstable_by_key(|session| session.key.id);
            shown.extend(sessions.iter().take(left).map(|session| session.view()));
        }
        shown
    }
}

// An Open or a Resume that reached a pod and names a node behind it.

/// A request to reach a node through this pod: pass it on, accept it as its end, or refuse it.
///
/// Dropping it refuses it, so no opener is ever left waiting.
#[derive(Debug)]
#[must_use = "dropping it refuses it"]
pub struct RelayRequest {
    table: Arc<SessionTable>,
    attempt: Attempt,
    /// The Open or Resume itself, until it is passed on.
    frame: Option<SessionFrame>,
}

impl RelayRequest {
    pub(crate) fn new(table: Arc<SessionTable>, attempt: Attempt, frame: SessionFrame) -> Self {
        Self { table, attempt, frame: Some(frame) }
    }

    /// Which node.
    pub fn node(&self) -> &NodeName {
        &self.attempt.key.node
    }

    /// By which link it came.
    pub fn from(&self) -> &Arc<LinkSender> {
        &self.attempt.from
    }

    /// The process that holds the session's other end, if this is to resume it: no other may be asked.
    pub fn instance(&self) -> Option<Instance> {
        match &self.frame {
            Some(SessionFrame::Resume { instance, .. }) => *instance,
            _ => None,
        }
    }

    /// The target to dial there, if this is an Open.
    pub fn target(&self) -> Option<&Target> {
        match &self.frame {
            Some(SessionFrame::Open { target, .. }) => Some(target),
            _ => None,
        }
    }

    /// Waits until its opener does not wait for this attempt any more. Cancel safe.
    pub async fn wait_cancelled(&self) {
        self.wait_attempt_state(|stand| stand == AttemptState::Done).await;
    }

    /// Tries a path: passes it on, and takes it back if the acceptor is not there. Tried while another path has not
    /// answered, this one is only for the next attempt: as only its opener moves a session, both ends get Lost.
    pub fn try_path(&self, to: &Arc<LinkSender>) {
        let to = &to.link_for(self.attempt.key.id);
        match (self.table.relays.attempt_state(&self.attempt), &self.frame) {
            (AttemptState::Searching, Some(frame)) if self.is_valid_next_hop(to) => {
                self.table.relays.pass(&self.attempt, to, frame.clone(), true);
            }
            (AttemptState::Pending, _) => {
                self.table.relays.path_lost(self.attempt.key.id, Some(self.attempt.epoch))
            }
            _ => {}
        }
    }

    /// Waits until what was tried last is answered. Whether another path is to be tried: the acceptor is not there.
    /// Cancel safe.
    pub async fn path_failed(&self) -> bool {
        self.wait_attempt_state(|stand| stand != AttemptState::Pending).await == AttemptState::Searching
    }

    async fn wait_attempt_state(&self, is: impl Fn(AttemptState) -> bool) -> AttemptState {
        loop {
            let changed = self.attempt.changed.notified();
            let stand = self.table.relays.attempt_state(&self.attempt);
            if is(stand) {
                return stand;
            }
            changed.await;
        }
    }

    fn is_valid_next_hop(&self, to: &LinkSender) -> bool {
        let from = &self.attempt.from;
        let second_hop = from.peer == Remote::Peer && to.peer == Remote::Peer;
        let back = from.id == to.id || to.instance.is_some() && to.instance == from.instance;
        !second_hop && !back && to.resumes
    }

    /// Passes it on: this pod relays the session from now on. What came from a pod goes to no other pod, and
    /// nothing goes back to the process it came from; both are refused as *not here*.
    pub fn pass(mut self, to: &Arc<LinkSender>) {
        let to = &to.link_for(self.attempt.key.id);
        if !self.is_valid_next_hop(to) {
            return self.refuse(SessionError::new(
                ErrorCode::NodeNotConnected,
                "the node is not linked to this pod",
            ));
        }
        if let Some(frame) = self.frame.take() {
            self.table.relays.pass(&self.attempt, to, frame, false);
        }
    }

    /// Answers the opener that it goes no further: [`Code::NotHere`] lets it look elsewhere.
    pub fn refuse(mut self, why: SessionError) {
        self.answer(why);
    }

    /// Takes it as the session's acceptor; none if it cannot be one: a session to resume is not here, and a new one may
    /// be too many.
    pub fn offer(mut self) -> Option<IncomingSession> {
        let Attempt { key, epoch, from, .. } = self.attempt.clone();
        let frame = self.frame.take();
        if self.table.relays.attempt_state(&self.attempt) != AttemptState::Searching {
            return None;
        }
        let Some(SessionFrame::Open { target, limit, client, opener, .. }) = frame else {
            let unknown = self.table.failed_resumes(key.id, self.attempt.opener.as_ref(), epoch);
            self.table.relays.end(&self.attempt, Some(unknown));
            return None;
        };
        self.table.relays.end(&self.attempt, None);
        self.table.on_open(&from, OpenFrame { key, target, client, opener, limit, epoch })
    }

    fn answer(&mut self, refusal: SessionError) {
        if let Some(frame) = self.frame.take() {
            self.table.relays.end(&self.attempt, Some(refused(&frame, refusal)));
        }
    }
}

impl Drop for RelayRequest {
    fn drop(&mut self) {
        self.answer(SessionError::new(ErrorCode::Overloaded, "this pod is stopping"));
    }
}

/// The answer that refuses an Open or a Resume.
pub(crate) fn refused(frame: &SessionFrame, refusal: SessionError) -> SessionFrame {
    let epoch = frame.epoch().unwrap_or(0);
    match frame {
        SessionFrame::Open { .. } => SessionFrame::Refused { epoch, refusal },
        _ => SessionFrame::Reset { epoch, refusal },
    }
}
