//! Every session of this process.

mod clients;
mod departed;
mod ended;
mod host;
mod links;
mod offers;
mod on_frame;
pub(super) mod overview;
pub(super) mod request;
pub(super) mod sorting;
mod upkeep;

use std::collections::{HashMap, VecDeque};
use std::net::SocketAddr;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering::Relaxed};
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::Duration;

use tokio::sync::Notify;

use crate::protocol::table::clients::Clients;
use crate::protocol::table::ended::EndedSessions;
use crate::protocol::table::request::RelayRequest;

use crate::names::{Instance, NodeName, SessionId, Target};
use crate::protocol::budget::Budget;
use crate::protocol::lock;
use crate::protocol::relay::table::RelayTable;
use crate::protocol::session::recv::{RecvHalf, Windows};
use crate::protocol::session::send::SendHalf;
use crate::protocol::session::state::SessionState;
use crate::protocol::session::{Offer, Opening, Parked, SessionCore};
use crate::protocol::wire::frame::{Category, Conflict, Found, Load, Refusal, SessionKey};
use crate::telemetry::Metrics;

/// What one process allows itself.
#[derive(Debug, Clone)]
pub struct SessionLimits {
    /// Receive windows of each session.
    pub windows: Windows,
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
    promised: Arc<Budget>,
    kept: Arc<Budget>,
    /// What plain peers have sent, to whom nothing was promised.
    pub(super) unpromised: Arc<Budget>,
    shards: Vec<Mutex<HashMap<SessionId, Arc<SessionCore>>>>,
    count: AtomicUsize,
    /// Whether a session or a link has ended since free memory was given back, or the process has just started.
    freed: AtomicBool,
    ended: Mutex<EndedSessions>,
    clients: Mutex<Clients>,
    /// Sessions whose owner has left and that may still have something to deliver, in the order in which they left.
    departed: Mutex<VecDeque<SessionId>>,
    /// Of these, the sessions for which no task looks for a path yet.
    unsought: Mutex<VecDeque<Parked>>,
    /// Notified when there is one more.
    came: Notify,
    pub(super) relays: RelayTable,
}

/// What a frame, or the end of a link, asks the wiring to do.
#[derive(Debug)]
pub enum Event {
    /// The far end wants to open a session here.
    Offer(Offer),
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
        let most = MOST_PASSING.min(limits.memory).max(largest);
        let relays = RelayTable::new(most, limits.memory.max(most));
        let table = Arc::new(Self {
            instance,
            metrics,
            promised: Budget::new(limits.memory),
            kept: Budget::new(limits.memory),
            unpromised: Budget::new(limits.memory / 2),
            limits,
            shards: (0..SHARDS).map(|_| Mutex::default()).collect(),
            count: AtomicUsize::new(0),
            freed: AtomicBool::new(true),
            ended: Mutex::default(),
            clients: Mutex::default(),
            departed: Mutex::default(),
            unsought: Mutex::default(),
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
        (self.promised.used(), self.kept.used())
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
    ) -> Result<Opening, TableFull> {
        let halves = if self.has_place() { self.halves() } else { None };
        let (send, recv) = halves.ok_or(TableFull)?;
        let end = SessionState::opener(target, client, send, recv);
        let key = SessionKey { id: SessionId::random(), category, node };
        let shared = SessionCore::new(key, self.host(), end, None);
        self.insert(&shared);
        Ok(Opening::new(shared))
    }

    /// Number of sessions that are relayed, or for which a path is sought, and the bytes that wait for them.
    pub fn passing(&self) -> (usize, usize) {
        (self.relays.len(), self.relays.queued())
    }

    /// Resets every session, with a reason for all far ends.
    pub fn reset_all(&self, why: &Refusal) {
        for shard in &self.shards {
            let sessions: Vec<_> = lock(shard).values().cloned().collect();
            for session in sessions {
                session.reset(why.clone());
            }
        }
    }

    /// Every session.
    pub(super) fn all(&self) -> Vec<Arc<SessionCore>> {
        self.shards.iter().flat_map(|shard| lock(shard).values().cloned().collect::<Vec<_>>()).collect()
    }

    fn halves(&self) -> Option<(SendHalf, RecvHalf)> {
        let start = self.limits.windows.start >> self.promised.scarcity();
        let promised = self.promised.claim(usize::try_from(start).ok()?)?;
        let windows = Windows { start, max: self.limits.windows.max };
        Some((SendHalf::new(self.kept.share()), RecvHalf::new(windows, promised)))
    }

    pub(super) fn insert(&self, shared: &Arc<SessionCore>) {
        self.count.fetch_add(1, Relaxed);
        let id = shared.key.id;
        self.shard(id).insert(id, shared.clone());
    }

    /// The session, if it has an end here.
    pub(super) fn session(&self, id: SessionId) -> Option<Arc<SessionCore>> {
        self.shard(id).get(&id).cloned()
    }

    fn shard(&self, id: SessionId) -> MutexGuard<'_, HashMap<SessionId, Arc<SessionCore>>> {
        lock(&self.shards[id.shard(SHARDS)])
    }
}

/// Bytes that may wait for one session that passes through, in one direction: as far as there is memory for that, and
/// never below the largest window.
const MOST_PASSING: usize = 8 << 20;
/// Locks the sessions are spread over, so that busy ones do not meet.
const SHARDS: usize = 16;
