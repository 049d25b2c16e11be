//! Shares limited permits fairly among sources: unauthenticated connections, sessions, password checks.
//!
//! A limiter has a fixed number of permits. A source may hold all of them while no other source needs one, because
//! thousands of edges behind one NAT or balancer have one address. When all permits are taken and a source with fewer
//! requests one, the source with most loses a permit: that of its longest idle holder.
//!
//! Code that serves a listening socket uses [`crate::accept_loop`], which has a limiter.

use std::collections::{HashMap, VecDeque};
use std::hash::Hash;
use std::io;
use std::net::IpAddr;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;

use parking_lot::Mutex;
use tokio::io::{AsyncRead, ReadBuf};
use tokio::sync::oneshot;
use tokio::time::{Instant, timeout};
use tokio_util::sync::CancellationToken;

use crate::fair_map::FairMap;
use crate::hooked::{Hooked, ReadHook};
use tunnel_base::policy::source_of;

/// The unit that shares are fair among: an IPv4 address, or the /64 network of an IPv6 address.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Source(IpAddr);

/// A limited number of permits that sources share fairly. Cheap to clone; clones share the permits.
#[derive(Debug, Clone)]
pub struct FairLimiter<K: Clone + Ord + Hash = Source>(Arc<Mutex<LimiterState<K>>>);

/// The limits that a [`FairLimiter`] enforces.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PermitLimits {
    /// Maximum number of permits held at once.
    pub permits: usize,
    /// Maximum number of permits that one source may hold, even while no other source needs one.
    pub per_source: usize,
    /// Maximum number of waiting calls. Beyond it, the source with most of them loses the one that waited longest.
    pub waiting: usize,
    /// Idle time after which a holder may lose its permit to a source that holds as many. `None`: no holder ever loses
    /// its permit.
    pub idle_timeout: Option<Duration>,
}

/// The reason why no permit is granted.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum AcquireError {
    /// This source holds [`PermitLimits::per_source`] permits.
    #[error("per-client limit reached")]
    PerSource,
    /// No permit can be revoked, and no more calls may wait.
    #[error("limit reached")]
    Total,
}

/// A permit, released on drop. It may be revoked earlier in favour of another source.
#[derive(Debug)]
#[must_use = "dropping a permit releases it"]
pub struct Permit<K: Clone + Ord + Hash = Source> {
    limiter: FairLimiter<K>,
    id: u64,
    revoked: CancellationToken,
}

/// The state that the clones of a [`FairLimiter`] share, under its lock.
#[derive(Debug)]
struct LimiterState<K> {
    limits: PermitLimits,
    next_id: u64,
    /// Number of permits and waiting calls that are not dropped yet. Revoked ones are in none of the maps.
    undropped: usize,
    /// The holders of permits, each with the token that is cancelled when its permit is revoked.
    holders: FairMap<K, u64, CancellationToken>,
    /// Holders whose permits are suspended, with their sources.
    suspended: HashMap<u64, K>,
    waiting: FairMap<K, u64, PermitWaiter>,
    /// The sources of `waiting`, each once. The first is granted the next permit, and is the last then.
    turns: VecDeque<K>,
}

/// A call that waits for a permit.
#[derive(Debug)]
struct PermitWaiter {
    /// Sent when the permit is granted; dropped unsent if the call loses its place.
    granted: oneshot::Sender<()>,
    revoked: CancellationToken,
}

impl Source {
    /// Returns the source of an address.
    pub fn of(ip: IpAddr) -> Self {
        Self(source_of(ip))
    }
}

impl PermitLimits {
    /// Returns limits without a queue: a newcomer takes the permit of an idle holder, or is refused.
    pub const fn permits(permits: usize) -> Self {
        Self { permits, per_source: usize::MAX, waiting: 0, idle_timeout: Some(Duration::ZERO) }
    }
}

impl<K: Clone + Ord + Hash> FairLimiter<K> {
    /// Creates a limiter with these limits and no holders.
    pub fn new(limits: PermitLimits) -> Self {
        Self(Arc::new(Mutex::new(LimiterState {
            limits,
            next_id: 0,
            undropped: 0,
            holders: FairMap::new(limits.permits),
            suspended: HashMap::new(),
            waiting: FairMap::new(limits.waiting),
            turns: VecDeque::new(),
        })))
    }

    /// Acquires a permit without waiting.
    ///
    /// # Errors
    ///
    /// No permit is free, and none can be revoked.
    pub fn try_acquire(&self, who: &K) -> Result<Permit<K>, AcquireError> {
        self.try_acquire_below(who, usize::MAX)
    }

    /// Like [`Self::try_acquire`], but as if the limiter had at most `most` permits.
    ///
    /// # Errors
    ///
    /// Fails like [`Self::try_acquire`].
    pub fn try_acquire_below(&self, who: &K, most: usize) -> Result<Permit<K>, AcquireError> {
        let revoked = CancellationToken::new();
        let mut state = self.0.lock();
        let PermitLimits { permits, per_source, .. } = state.limits;
        if per_source < permits && state.holders.count(who) >= per_source {
            return Err(AcquireError::PerSource);
        }
        let now = Instant::now();
        let has_turn = state.turns.is_empty();
        let evicted = state.make_room(who, most, has_turn, now)?;
        let id = state.new_id();
        state.holders.insert(who, id, revoked.clone(), now);
        drop(state);
        evicted.iter().for_each(CancellationToken::cancel);
        Ok(Permit { limiter: self.clone(), id, revoked })
    }

    /// Waits until this source is granted a permit. Cancel safe: a dropped call leaves the queue.
    ///
    /// # Errors
    ///
    /// Too many calls wait, and most of them are from this source.
    pub async fn acquire(&self, who: &K) -> Result<Permit<K>, AcquireError> {
        match self.try_acquire(who) {
            Err(AcquireError::Total) => {}
            acquired => return acquired,
        }
        let (permit, mut granted) = self.enqueue(who);
        loop {
            self.change(LimiterState::grant_next);
            if let Ok(granted) = timeout(GRANT_INTERVAL, &mut granted).await {
                return granted.map(|()| permit).map_err(|_| AcquireError::Total);
            }
        }
    }

    /// Returns true if a permit was revoked and is not dropped yet: its holder has not run since.
    pub(crate) fn has_revoked(&self) -> bool {
        let state = self.0.lock();
        state.undropped > state.holders.len() + state.suspended.len() + state.waiting.len()
    }

    /// Adds a waiting call. Its receiver is notified when the permit is granted, and closed if the call loses its
    /// place.
    fn enqueue(&self, who: &K) -> (Permit<K>, oneshot::Receiver<()>) {
        let (granted, receiver) = oneshot::channel();
        let revoked = CancellationToken::new();
        let mut state = self.0.lock();
        let id = state.new_id();
        if state.waiting.count(who) == 0 {
            state.turns.push_back(who.clone());
        }
        let lost =
            state.waiting.insert(who, id, PermitWaiter { granted, revoked: revoked.clone() }, Instant::now());
        if let Some(lost) = &lost {
            state.end_turns(&lost.source);
        }
        drop(state);
        drop(lost);
        (Permit { limiter: self.clone(), id, revoked }, receiver)
    }

    /// Applies a change, then notifies the tasks that it concerns. Releases the lock first, because a woken task may
    /// use this limiter at once.
    fn change(&self, change: impl FnOnce(&mut LimiterState<K>) -> LimiterWakeups) {
        let LimiterWakeups { granted, evicted } = change(&mut self.0.lock());
        if let Some(granted) = granted {
            // Fails only if the waiting call was dropped; its permit is then released.
            let _ = granted.send(());
        }
        evicted.iter().for_each(CancellationToken::cancel);
    }
}

/// The tasks that a change of a [`LimiterState`] concerns.
#[derive(Debug, Default)]
struct LimiterWakeups {
    granted: Option<oneshot::Sender<()>>,
    evicted: Option<CancellationToken>,
}

impl<K: Clone + Ord + Hash> LimiterState<K> {
    fn new_id(&mut self) -> u64 {
        self.next_id += 1;
        self.undropped += 1;
        self.next_id
    }

    /// Makes room for a permit of `who`, as if there were at most `most`. Returns the token of the holder that loses
    /// its permit for it, if none is free: a holder of the source with most permits.
    ///
    /// That holder loses it at once if its source still has more than `who` afterwards. Otherwise it loses it only
    /// after [`PermitLimits::idle_timeout`], to the source that has the next turn.
    fn make_room(
        &mut self,
        who: &K,
        most: usize,
        has_turn: bool,
        now: Instant,
    ) -> Result<Option<CancellationToken>, AcquireError> {
        if self.holders.len() < self.limits.permits.min(most) {
            return Ok(None);
        }
        let idle_timeout = self.limits.idle_timeout.ok_or(AcquireError::Total)?;
        let victim = self.holders.victim().ok_or(AcquireError::Total)?;
        let has_more = self.holders.count(who) + 1 < victim.count;
        let is_idle = !victim.active && now.saturating_duration_since(victim.since) >= idle_timeout;
        let may_evict = has_more || is_idle && has_turn;
        if may_evict { Ok(self.holders.pop().map(|evicted| evicted.value)) } else { Err(AcquireError::Total) }
    }

    /// Grants a permit to the source with the next turn, if one is free or can be revoked now.
    fn grant_next(&mut self) -> LimiterWakeups {
        let now = Instant::now();
        let Some(who) = self.turns.front().cloned() else { return LimiterWakeups::default() };
        let room = self.make_room(&who, usize::MAX, true, now);
        let Ok(evicted) = room else { return LimiterWakeups::default() };
        self.turns.rotate_left(1);
        let next = self.waiting.pop_of(&who);
        self.end_turns(&who);
        let granted = next.map(|next| {
            self.holders.insert(&who, next.key, next.value.revoked, now);
            next.value.granted
        });
        LimiterWakeups { granted, evicted }
    }

    /// Removes the turn of a source if none of its calls waits any longer.
    fn end_turns(&mut self, who: &K) {
        if self.waiting.count(who) == 0 {
            self.turns.retain(|other| other != who);
        }
    }

    /// Removes a holder or a waiting call, and grants its permit to another source.
    fn release(&mut self, id: u64) -> LimiterWakeups {
        self.undropped -= 1;
        self.suspended.remove(&id);
        self.holders.remove(&id);
        if let Some(left) = self.waiting.remove(&id) {
            self.end_turns(&left.source);
        }
        self.grant_next()
    }
}

impl<K: Clone + Ord + Hash> Permit<K> {
    /// Marks the holder as active: it has sent something, and this process works on it until [`Self::mark_idle`].
    pub fn mark_active(&self) {
        self.limiter.0.lock().holders.mark(&self.id, true, Instant::now());
    }

    /// Suspends the permit while another limit applies to its holder. [`Self::mark_idle`] resumes it.
    pub fn suspend(&self) {
        self.limiter.change(|state| {
            if let Some(holder) = state.holders.remove(&self.id) {
                state.suspended.insert(self.id, holder.source);
            }
            state.grant_next()
        });
    }

    /// Marks the holder as idle: from now on this process waits for it.
    ///
    /// Resumes a suspended permit. If none is free, it takes the permit that would be revoked next.
    pub fn mark_idle(&self) {
        self.limiter.change(|state| {
            let now = Instant::now();
            let Some(who) = state.suspended.remove(&self.id) else {
                state.holders.mark(&self.id, false, now);
                return LimiterWakeups::default();
            };
            let evicted = state.holders.insert(&who, self.id, self.revoked.clone(), now);
            LimiterWakeups { granted: None, evicted: evicted.map(|evicted| evicted.value) }
        });
    }

    /// Wraps the holder's connection so that its reads mark the permit as active or idle.
    pub fn track_activity<T>(&self, io: T) -> ActivityTracked<T, K> {
        let permit = Some((self.limiter.clone(), self.id, self.revoked()));
        Hooked { io, hook: ActivityHook { permit, silent: true } }
    }

    /// Returns a token that is cancelled when the permit is revoked. The holder must then close its connection at once.
    pub fn revoked(&self) -> CancellationToken {
        self.revoked.clone()
    }
}

impl<K: Clone + Ord + Hash> Drop for Permit<K> {
    fn drop(&mut self) {
        self.limiter.change(|state| state.release(self.id));
    }
}

/// A connection that marks its permit: a read that finds nothing marks the holder as idle, any other read as active.
///
/// Reads fail once it is revoked. Once it is released this is a plain wrapper.
pub type ActivityTracked<T, K = Source> = Hooked<T, ActivityHook<K>>;

/// The permit of an [`ActivityTracked`] connection, and how it was last marked.
#[derive(Debug)]
pub struct ActivityHook<K: Clone + Ord + Hash = Source> {
    permit: Option<(FairLimiter<K>, u64, CancellationToken)>,
    silent: bool,
}

impl<T: AsyncRead + Unpin, K: Clone + Ord + Hash> ReadHook<T> for ActivityHook<K> {
    fn poll_read(&mut self, io: &mut T, cx: &mut Context<'_>, out: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        if self.permit.as_ref().is_some_and(|(.., revoked)| revoked.is_cancelled()) {
            return Poll::Ready(Err(io::ErrorKind::ConnectionAborted.into()));
        }
        let read = Pin::new(io).poll_read(cx, out);
        let silent = read.is_pending();
        if let Some((limiter, id, _)) = self.permit.as_ref().filter(|_| silent != self.silent) {
            let held = limiter.0.lock().holders.mark(id, !silent, Instant::now()).is_some();
            self.silent = silent;
            if !held {
                self.permit = None;
            }
        }
        read
    }
}

/// How often a waiting call checks whether a holder has been idle for too long.
const GRANT_INTERVAL: Duration = Duration::from_millis(250);

#[cfg(test)]
mod tests;
