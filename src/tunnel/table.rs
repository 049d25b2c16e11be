//! Every session of this process.

mod ended;

use std::collections::HashMap;
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::Duration;

use tokio::time::Instant;

use ended::Ended;

use super::asked::Asked;
use super::budget::Budget;
use super::frame::{Category, Code, Found, Refusal, Word};
use super::lock;
use super::middle::{Attempt, Middle};
use super::outbox::{Outbox, Peer, unknown};
use super::recv::{RecvHalf, Windows};
use super::send::SendHalf;
use super::session::end::End;
use super::session::{Offer, Opening, Parked, Shared};
use crate::drain::Drain;
use crate::names::{Instance, NodeName, SessionId, Target};
use crate::net::pool::Pool;
use crate::telemetry::Metrics;

/// What one process allows itself.
#[derive(Debug, Clone)]
pub struct Limits {
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
pub struct Table {
    instance: Instance,
    limits: Limits,
    metrics: Metrics,
    promised: Arc<Budget>,
    kept: Arc<Budget>,
    shards: Vec<Mutex<HashMap<SessionId, Arc<Shared>>>>,
    count: AtomicUsize,
    ended: Mutex<Ended>,
    pub(super) middle: Middle,
}

/// What a frame, or the end of a link, asks the wiring to do.
#[derive(Debug)]
pub enum Event {
    /// The far end wants to open a session here.
    Offer(Offer),
    /// A session that was opened here has lost its path.
    Parked(Parked),
    /// Somebody wants to reach a node through this pod.
    Asked(Asked),
    /// A pod asks whether a node is linked here; the number is to be repeated.
    Find(NodeName, u64),
    /// A pod tells of a node.
    Found(NodeName, Found),
    /// The pod wants its edge to attach elsewhere; or the edge says that it has.
    Drain,
}

/// There are as many sessions as there may be, or no memory is left to promise.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("too many sessions at once")]
pub struct Full;

impl Table {
    /// An empty table of the process `instance`.
    pub fn new(instance: Instance, limits: Limits, metrics: Metrics) -> Arc<Self> {
        let most = usize::try_from(limits.windows.max).unwrap_or(usize::MAX).max(MOST_PASSING);
        let middle = Middle::new(most, limits.memory.max(most));
        Arc::new(Self {
            instance,
            metrics,
            promised: Budget::new(limits.memory),
            kept: Budget::new(limits.memory),
            limits,
            shards: (0..SHARDS).map(|_| Mutex::default()).collect(),
            count: AtomicUsize::new(0),
            ended: Mutex::default(),
            middle,
        })
    }

    /// This process.
    pub fn instance(&self) -> Instance {
        self.instance
    }

    /// Sessions at this moment.
    pub fn len(&self) -> usize {
        self.count.load(Relaxed)
    }

    /// Whether there is none.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Bytes promised to peers, and bytes kept for them.
    pub fn memory(&self) -> (usize, usize) {
        (self.promised.used(), self.kept.used())
    }

    /// Bytes that have arrived and were not read, in all sessions.
    pub fn queued(&self) -> usize {
        self.shards
            .iter()
            .flat_map(|shard| lock(shard).values().cloned().collect::<Vec<_>>())
            .map(|s| s.queued())
            .sum()
    }

    /// A new session to `target` at `node`, to be asked for over a link.
    pub fn open(
        self: &Arc<Self>,
        node: NodeName,
        target: Target,
        category: Category,
        client: String,
    ) -> Result<Opening, Full> {
        let (send, recv) = self.halves().ok_or(Full)?;
        let end = End::opener(target, client, send, recv);
        let id = SessionId::random();
        let shared = Shared::new(id, category, node, Arc::downgrade(self), end, None);
        self.insert(&shared);
        Ok(Opening::new(shared))
    }

    /// One frame about a session, from the link of `outbox`. `node` is where its acceptor is, if the word asks.
    pub fn hear(
        self: &Arc<Self>,
        outbox: &Arc<Outbox>,
        node: NodeName,
        id: SessionId,
        category: Category,
        word: Word,
        now: Instant,
    ) -> Option<Event> {
        let known = self.shard(id).get(&id).cloned();
        let Some(shared) = known else { return self.hear_other(outbox, node, id, category, word) };
        let parks = matches!(word, Word::Lost { .. });
        if !shared.hear(outbox, word, now) {
            self.metrics.frames_dropped.count("out_of_place");
            return None;
        }
        if parks { shared.parked().map(Event::Parked) } else { None }
    }

    /// A frame about a session that has no end here, or none yet.
    fn hear_other(
        self: &Arc<Self>,
        outbox: &Arc<Outbox>,
        node: NodeName,
        id: SessionId,
        category: Category,
        mut word: Word,
    ) -> Option<Event> {
        let edge = match &outbox.peer {
            Peer::Edge(edge) => Some(edge),
            Peer::Cloud(_) | Peer::Pod => None,
        };
        let elsewhere = outbox.peer != Peer::Cloud(node.clone());
        match &mut word {
            Word::Open { epoch, client, .. } if elsewhere => {
                let mut category = category;
                // An edge must never borrow another front end's rights, nor another's name.
                if let Some(edge) = edge {
                    (category, *client) = (Category::HttpProxy, format!("node {edge}"));
                }
                let attempt = Attempt { id, category, node, epoch: *epoch, from: outbox.clone() };
                self.asked(attempt, word)
            }
            Word::Resume { epoch, instance: Some(instance), .. }
                if elsewhere && *instance != self.instance =>
            {
                let attempt = Attempt { id, category, node, epoch: *epoch, from: outbox.clone() };
                self.asked(attempt, word)
            }
            Word::Open { .. } => {
                let Word::Open { target, limit, epoch, client } = word else { return None };
                self.offered(outbox, (id, category, node), (target, client), (limit, epoch))
            }
            Word::Resume { epoch, .. } => {
                outbox.reply(id, category, &node, unknown(*epoch));
                None
            }
            _ => {
                if !self.middle.hear(outbox, id, word) {
                    self.metrics.frames_dropped.count("unknown_session");
                }
                None
            }
        }
    }

    fn asked(self: &Arc<Self>, attempt: Attempt, word: Word) -> Option<Event> {
        if self.middle.asked(&attempt) {
            return Some(Event::Asked(Asked::new(self.clone(), attempt, word)));
        }
        self.metrics.frames_dropped.count("out_of_place");
        None
    }

    /// A link has ended: parks what ran on it, or ends it with `why` if the peer cannot resume, and tells the other side
    /// of what passed through. Returns the sessions for which a new path is to be sought.
    pub fn link_ended(&self, outbox: &Outbox, why: &Refusal, now: Instant) -> Vec<Parked> {
        let why = (!outbox.resumes).then(|| why.clone());
        let mut parked = Vec::new();
        let (own, passing) = outbox.disband();
        for shared in own {
            shared.link_ended(outbox.id, why.clone(), now);
            parked.extend(shared.parked());
        }
        self.middle.link_ended(outbox.id, passing);
        parked
    }

    /// The sessions that were opened here and run on that link, to `node` if one is given, let go of it and say so
    /// there. Returns them: a new path is to be sought for each.
    pub fn leave(&self, outbox: &Arc<Outbox>, node: Option<&NodeName>) -> Vec<Parked> {
        let meant = |session: &Arc<Shared>| node.is_none_or(|node| session.node == *node);
        let mut parked = Vec::new();
        for session in outbox.own().into_iter().filter(meant) {
            session.leave(outbox);
            parked.extend(session.parked());
        }
        parked
    }

    /// What passes through that link goes another way: both ends of each session hear so.
    pub fn release(&self, outbox: &Outbox) {
        for id in outbox.passing() {
            self.middle.lose(id, None);
        }
    }

    /// Sessions that only pass through, or seek their way to a node, and the bytes that wait for them.
    pub fn passing(&self) -> (usize, usize) {
        (self.middle.len(), self.middle.queued())
    }

    /// Gives up what waited for a path longer than the grace time. To be called every few seconds.
    pub fn tick(&self, now: Instant) {
        if let Some(long_ago) = now.checked_sub(self.limits.grace.max(LATEST_OPEN)) {
            lock(&self.ended).forget_before(long_ago);
        }
        let Some(before) = now.checked_sub(self.limits.grace) else { return };
        let why = Refusal::new(Code::GivenUp, format!("no path for {:?}", self.limits.grace));
        for shard in &self.shards {
            let sessions: Vec<_> = lock(shard).values().cloned().collect();
            for session in sessions {
                session.expire(before, &why);
            }
        }
    }

    /// Gives up old sessions, and unused buffers of `pool`, every few seconds until draining begins.
    pub async fn upkeep(self: Arc<Self>, pool: Pool, drain: Drain) {
        let mut ticks = tokio::time::interval(UPKEEP);
        loop {
            tokio::select! {
                () = drain.draining() => return,
                _ = ticks.tick() => {
                    self.tick(Instant::now());
                    pool.trim();
                }
            }
        }
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

    /// The session is over, for the given reason if it did not end by itself.
    pub(super) fn forget(&self, id: SessionId, why: Option<Code>) {
        if self.shard(id).remove(&id).is_some() {
            if let Some(code) = why {
                self.metrics.resets.count(code.name());
            }
            self.count.fetch_sub(1, Relaxed);
            lock(&self.ended).add(id, Instant::now());
        }
    }

    pub(super) fn offered(
        self: &Arc<Self>,
        outbox: &Arc<Outbox>,
        (id, category, node): (SessionId, Category, NodeName),
        (target, client): (Target, String),
        (limit, epoch): (u64, u64),
    ) -> Option<Event> {
        let refused = if lock(&self.ended).contains(id) {
            Some(Refusal::new(Code::Unknown, "this session has ended"))
        } else if self.len() >= self.limits.sessions {
            Some(Refusal::new(Code::Busy, "too many sessions at the node"))
        } else if outbox.is_behind() {
            Some(Refusal::new(Code::Busy, "too many answers wait to be read on this link"))
        } else {
            None
        };
        let halves = if refused.is_none() { self.halves() } else { None };
        let Some((send, mut recv)) = halves else {
            let refusal = refused.unwrap_or_else(|| {
                Refusal::new(Code::Busy, "no memory left for another session at the node")
            });
            outbox.reply(id, category, &node, Word::Refused { epoch, refusal });
            return None;
        };
        if !outbox.resumes {
            recv.lift_limit();
        }
        let end = End::acceptor(outbox.id, epoch, limit, send, recv);
        let shared = Shared::new(id, category, node, Arc::downgrade(self), end, Some(outbox.clone()));
        outbox.join(&shared);
        self.insert(&shared);
        let patience = if outbox.resumes { PATIENCE } else { PLAIN_PATIENCE };
        Some(Event::Offer(Offer::new(shared, target, client, patience)))
    }

    fn halves(&self) -> Option<(SendHalf, RecvHalf)> {
        if self.len() >= self.limits.sessions {
            return None;
        }
        let start = self.limits.windows.start >> self.promised.scarcity();
        let promised = self.promised.claim(usize::try_from(start).ok()?)?;
        let windows = Windows { start, max: self.limits.windows.max };
        Some((SendHalf::new(self.kept.share()), RecvHalf::new(windows, promised)))
    }

    fn insert(&self, shared: &Arc<Shared>) {
        self.count.fetch_add(1, Relaxed);
        self.shard(shared.id).insert(shared.id, shared.clone());
    }

    fn shard(&self, id: SessionId) -> MutexGuard<'_, HashMap<SessionId, Arc<Shared>>> {
        lock(&self.shards[id.shard(SHARDS)])
    }
}

/// Bytes that may wait for one session that passes through, in one direction; never below the largest window.
const MOST_PASSING: usize = 8 << 20;
/// Locks the sessions are spread over, so that busy ones do not meet.
const SHARDS: usize = 16;
/// Between two rounds of upkeep.
const UPKEEP: Duration = Duration::from_secs(5);
/// No opener asks again for longer than this, so an ended id is remembered at least so long.
const LATEST_OPEN: Duration = Duration::from_secs(60);
/// How long an edge may dial: less than the 12 s a front end waits.
const PATIENCE: Duration = Duration::from_secs(10);
/// The same for a plain pod, which waits 5 s.
const PLAIN_PATIENCE: Duration = Duration::from_millis(4500);
