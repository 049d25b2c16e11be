//! Shares limited permits fairly among sources: unauthenticated connections, sessions, password checks.
//!
//! A limiter has a fixed number of permits. A source may hold all of them while no other source needs one, because
//! thousands of edges behind one NAT or balancer have one address. When all permits are taken and a source with fewer
//! requests one, the source with most loses a permit: that of its longest idle holder.
//!
//! [`FairShares`] decides, and reads no clock. [`FairLimiter`] applies its decisions to tasks, [`FairMap`] to data
//! about sources. Code that serves a listening socket uses [`crate::accept_loop`], which has a limiter.

use std::collections::{BTreeSet, HashMap};
use std::hash::Hash;
use std::io;
use std::net::{IpAddr, Ipv6Addr};
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;

use parking_lot::{Mutex, MutexGuard};
use tokio::io::{AsyncRead, ReadBuf};
use tokio::sync::oneshot;
use tokio::time::{Instant, timeout};
use tokio_util::sync::CancellationToken;

use crate::socket::{Hooked, ReadHook};
use tunnel_base::policy::plain;

/// The unit that shares are fair among: an IPv4 address, or the /64 network of an IPv6 address.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Source(IpAddr);

/// A limiter with [`FairShares`] for tasks. Cheap to clone; clones share the permits.
#[derive(Debug)]
pub struct FairLimiter<K: Clone + Ord + Hash = Source>(Arc<Mutex<LimiterState<K>>>);

/// The state that the clones of a [`FairLimiter`] share, under its lock.
#[derive(Debug)]
struct LimiterState<K> {
    shares: FairShares<K>,
    holders: HashMap<u64, HolderChannels>,
}

/// The channels to the task that waits for a permit or holds it.
#[derive(Debug)]
struct HolderChannels {
    /// Sent when the permit is granted; dropped unsent if the entrant loses its place while it waits.
    granted: Option<oneshot::Sender<()>>,
    /// Cancelled when the permit is revoked.
    lost: CancellationToken,
}

/// A permit, released on drop. It may be revoked earlier in favour of another source.
#[derive(Debug)]
#[must_use = "dropping a permit releases it"]
pub struct Permit<K: Clone + Ord + Hash = Source> {
    limiter: FairLimiter<K>,
    id: u64,
    lost: CancellationToken,
}

impl Source {
    /// Returns the source of an address. An IPv4-mapped IPv6 address is treated as IPv4.
    pub fn of(ip: IpAddr) -> Self {
        Self(match plain(ip) {
            IpAddr::V6(v6) => IpAddr::V6(Ipv6Addr::from_bits(v6.to_bits() & !u128::from(u64::MAX))),
            v4 @ IpAddr::V4(_) => v4,
        })
    }
}

impl<K: Clone + Ord + Hash> FairLimiter<K> {
    /// Creates a limiter with these limits and no holders.
    pub fn new(limits: Limits) -> Self {
        Self(Arc::new(Mutex::new(LimiterState { shares: FairShares::new(limits), holders: HashMap::new() })))
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
        let (permit, mut granted) = self.enter(who, most)?;
        granted.try_recv().map(|()| permit).map_err(|_| AcquireError::Total)
    }

    /// Waits until this source is granted a permit. Cancel safe: a dropped call leaves the queue.
    ///
    /// # Errors
    ///
    /// Too many entrants wait, and most of them are from this source.
    pub async fn acquire(&self, who: &K) -> Result<Permit<K>, AcquireError> {
        let (permit, mut granted) = self.enter(who, usize::MAX)?;
        loop {
            match timeout(GRANT_INTERVAL, &mut granted).await {
                Ok(granted) => return granted.map(|()| permit).map_err(|_| AcquireError::Total),
                Err(_) => self.change(|shares| shares.grant_next(Instant::now())),
            }
        }
    }

    /// Adds an entrant. Its receiver is notified when the permit is granted, and closed if the entrant loses its place.
    fn enter(&self, who: &K, most: usize) -> Result<(Permit<K>, oneshot::Receiver<()>), AcquireError> {
        let (granted, receiver) = oneshot::channel();
        let lost = CancellationToken::new();
        let mut state = self.lock();
        let (id, changes) = state.shares.enter(who, most, Instant::now())?;
        state.holders.insert(id, HolderChannels { granted: Some(granted), lost: lost.clone() });
        LimiterState::notify(state, changes);
        Ok((Permit { limiter: self.clone(), id, lost }, receiver))
    }

    fn change(&self, change: impl FnOnce(&mut FairShares<K>) -> Changes) {
        let mut state = self.lock();
        let changes = change(&mut state.shares);
        LimiterState::notify(state, changes);
    }

    fn lock(&self) -> MutexGuard<'_, LimiterState<K>> {
        self.0.lock()
    }
}

impl<K: Clone + Ord + Hash> Clone for FairLimiter<K> {
    fn clone(&self) -> Self {
        Self(Arc::clone(&self.0))
    }
}

impl<K> LimiterState<K> {
    /// Notifies the tasks that changes concern. Releases the lock first, because a woken task may use this limiter at
    /// once.
    fn notify(mut state: MutexGuard<'_, Self>, changes: Changes) {
        let granted = changes.granted.and_then(|id| state.holders.get_mut(&id)?.granted.take());
        let lost = changes.lost.and_then(|id| state.holders.remove(&id));
        drop(state);
        if let Some(granted) = granted {
            // Fails only if the waiting call was dropped; its permit is then released.
            let _ = granted.send(());
        }
        if let Some(lost) = lost {
            lost.lost.cancel();
        }
    }
}

impl<K: Clone + Ord + Hash> Permit<K> {
    /// Marks the holder as active: it has sent something, and this process works on it until [`Self::mark_idle`].
    pub fn mark_active(&self) {
        self.limiter.lock().shares.mark(self.id, true, Instant::now());
    }

    /// Suspends the permit while another limit applies to its holder. [`Self::mark_idle`] resumes it.
    pub fn suspend(&self) {
        self.limiter.change(|shares| shares.suspend(self.id, Instant::now()));
    }

    /// Marks the holder as idle: from now on this process waits for it. Resumes a suspended permit.
    pub fn mark_idle(&self) {
        self.limiter.change(|shares| shares.mark_idle(self.id, Instant::now()));
    }

    /// Wraps the holder's connection so that its reads mark the permit as active or idle.
    pub fn track_activity<T>(&self, io: T) -> ActivityTracked<T, K> {
        Hooked { io, hook: ActivityHook { permit: Some((self.limiter.clone(), self.id)), silent: true } }
    }

    /// Returns a token that is cancelled when the permit is revoked. The holder must then close its connection at once.
    pub fn revoked(&self) -> CancellationToken {
        self.lost.clone()
    }
}

impl<K: Clone + Ord + Hash> Drop for Permit<K> {
    fn drop(&mut self) {
        let mut state = self.limiter.lock();
        let gone = state.holders.remove(&self.id);
        let changes = state.shares.leave(self.id, Instant::now());
        LimiterState::notify(state, changes);
        drop(gone);
    }
}

/// A connection that marks its permit: a read that finds nothing marks the holder as idle, any other read as active.
///
/// Once the permit is released it is a plain wrapper.
pub type ActivityTracked<T, K = Source> = Hooked<T, ActivityHook<K>>;

/// The permit of an [`ActivityTracked`] connection, and how it was last marked.
#[derive(Debug)]
pub struct ActivityHook<K: Clone + Ord + Hash = Source> {
    permit: Option<(FairLimiter<K>, u64)>,
    silent: bool,
}

impl<T: AsyncRead + Unpin, K: Clone + Ord + Hash> ReadHook<T> for ActivityHook<K> {
    fn poll_read(
        &mut self,
        io: Pin<&mut T>,
        cx: &mut Context<'_>,
        out: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        let read = io.poll_read(cx, out);
        let silent = read.is_pending();
        if let Some((limiter, id)) = self.permit.as_ref().filter(|_| silent != self.silent) {
            let held = limiter.lock().shares.mark(*id, !silent, Instant::now());
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

// Decides which source is granted a permit, and which holder loses one.

/// The limits that [`FairShares`] enforce.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Limits {
    /// Maximum number of permits held at once.
    pub permits: usize,
    /// Maximum number of permits that one source may hold or wait for, even while no other source needs one.
    pub per_source: usize,
    /// Maximum number of waiting entrants. Beyond it, the source with most of them loses the one that waited longest.
    pub waiting: usize,
    /// Idle time after which a holder may lose its permit to a source that holds as many. `None`: never.
    pub idle_timeout: Option<Duration>,
}

/// The reason why an entrant is granted no permit.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum AcquireError {
    /// This source holds or waits for [`Limits::per_source`] permits.
    #[error("per-client limit reached")]
    PerSource,
    /// No permit can be revoked, and no more entrants may wait.
    #[error("limit reached")]
    Total,
}

/// Permits and their holders, as a pure data structure.
///
/// Each call costs a few steps in ordered sets of any size. Only entrants that hold or wait for a permit take memory.
#[derive(Debug)]
pub struct FairShares<K> {
    limits: Limits,
    next: u64,
    /// Number of permits granted so far.
    turn: u64,
    entrants: HashMap<u64, (K, State)>,
    own: HashMap<K, SourceShare>,
    /// Sources by the number of permits that they hold.
    by_held: BTreeSet<(usize, K)>,
    /// Sources with waiting entrants, by the permits that they hold, then by when they were last granted one.
    by_need: BTreeSet<(usize, u64, K)>,
    /// Sources with waiting entrants, by the number of those.
    by_waiting: BTreeSet<(usize, K)>,
    held: usize,
    waiting: usize,
}

/// The effects of a call to [`FairShares`], as numbers of entrants.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Changes {
    /// The entrant that was granted a permit.
    pub granted: Option<u64>,
    /// The entrant that lost its permit or its place in the queue, and was removed.
    pub lost: Option<u64>,
}

/// The state of one entrant: whether it waits for a permit or holds it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum State {
    Waits,
    /// It holds a permit. The order is that in which permits are revoked: idle ones first, then by time.
    Holds {
        busy: bool,
        since: Instant,
    },
    /// Its permit is suspended until [`FairShares::mark_idle`].
    Aside,
}

/// The permits that one source holds and waits for.
#[derive(Debug, Default)]
struct SourceShare {
    held: BTreeSet<(bool, Instant, u64)>,
    waiting: BTreeSet<u64>,
    served: u64,
}

impl Limits {
    /// Returns limits without a queue: a newcomer takes the permit of an idle holder, or is refused.
    pub fn permits(permits: usize) -> Self {
        Self { permits, per_source: usize::MAX, waiting: 0, idle_timeout: Some(Duration::ZERO) }
    }
}

impl<K: Clone + Ord + Hash> FairShares<K> {
    /// Creates shares without entrants.
    pub fn new(limits: Limits) -> Self {
        Self {
            limits,
            next: 0,
            turn: 0,
            entrants: HashMap::new(),
            own: HashMap::new(),
            by_held: BTreeSet::new(),
            by_need: BTreeSet::new(),
            by_waiting: BTreeSet::new(),
            held: 0,
            waiting: 0,
        }
    }

    /// Adds an entrant and returns its number, as if there were at most `most` permits. It waits unless the changes
    /// grant it a permit or report it as lost.
    ///
    /// # Errors
    ///
    /// The source has reached its limit.
    pub fn enter(&mut self, who: &K, most: usize, now: Instant) -> Result<(u64, Changes), AcquireError> {
        let Limits { permits: all, per_source: for_one, .. } = self.limits;
        if for_one < all && self.own.get(who).is_some_and(|own| own.held.len() + own.waiting.len() >= for_one)
        {
            return Err(AcquireError::PerSource);
        }
        self.next += 1;
        let id = self.next;
        self.entrants.insert(id, (who.clone(), State::Waits));
        self.waiting += 1;
        self.change(who, |own| own.waiting.insert(id));
        let mut actions = self.grant_within(most, now);
        if self.waiting > self.limits.waiting {
            actions.lost = self.longest_waiting().inspect(|lost| self.forget(*lost));
        }
        Ok((id, actions))
    }

    /// Marks an entrant as active (`busy`) or idle as of `now`. Returns false if it holds no permit.
    pub fn mark(&mut self, id: u64, busy: bool, now: Instant) -> bool {
        let Some((who, state @ State::Holds { .. })) = self.entrants.get_mut(&id) else { return false };
        let State::Holds { busy: was, since } = *state else { return false };
        if (was, since) == (busy, now) {
            return true;
        }
        *state = State::Holds { busy, since: now };
        if let Some(own) = self.own.get_mut(who) {
            own.held.remove(&(was, since, id));
            own.held.insert((busy, now, id));
        }
        true
    }

    /// Suspends a holder's permit while another limit applies to it; [`Self::mark_idle`] resumes it.
    ///
    /// Does nothing if it holds none.
    pub fn suspend(&mut self, id: u64, now: Instant) -> Changes {
        let Some((who, State::Holds { busy, since })) = self.entrants.get(&id).cloned() else {
            return Changes::default();
        };
        self.held -= 1;
        self.change(&who, |own| own.held.remove(&(busy, since, id)));
        self.entrants.insert(id, (who, State::Aside));
        self.grant_next(now)
    }

    /// Marks an entrant as idle as of `now`, and resumes a suspended permit.
    ///
    /// If none is free, it takes the permit that would be revoked next.
    pub fn mark_idle(&mut self, id: u64, now: Instant) -> Changes {
        let Some((who, State::Aside)) = self.entrants.get(&id).cloned() else {
            self.mark(id, false, now);
            return Changes::default();
        };
        let full = self.held >= self.limits.permits;
        let lost = self.next_victim().filter(|_| full).map(|(.., lost)| lost);
        lost.into_iter().for_each(|lost| self.forget(lost));
        self.hold(id, &who, now);
        Changes { granted: None, lost }
    }

    /// Removes an entrant, whether it holds a permit or waits. Does nothing if it was removed before.
    pub fn leave(&mut self, id: u64, now: Instant) -> Changes {
        self.forget(id);
        self.grant_next(now)
    }

    /// Grants a permit to a waiting entrant if one is free or can be revoked at `now`. Call it again while any wait.
    pub fn grant_next(&mut self, now: Instant) -> Changes {
        self.grant_within(usize::MAX, now)
    }

    fn grant_within(&mut self, most: usize, now: Instant) -> Changes {
        let Some((_, _, neediest)) = self.by_need.first().cloned() else { return Changes::default() };
        let mut actions = Changes::default();
        if self.held >= self.limits.permits.min(most) {
            actions.lost = self.victim_for(&neediest, now);
            let Some(lost) = actions.lost else { return actions };
            self.forget(lost);
        }
        actions.granted = self.own.get(&neediest).and_then(|own| own.waiting.first().copied());
        if let Some(id) = actions.granted {
            self.waiting -= 1;
            self.hold(id, &neediest, now);
        }
        actions
    }

    /// Returns true if there are no entrants.
    pub fn is_empty(&self) -> bool {
        self.entrants.is_empty()
    }

    /// Returns the holder that loses its permit to `newcomer`: a holder of the source with most permits.
    ///
    /// It loses the permit at once if its source still has more than the newcomer afterwards, otherwise only after
    /// [`Limits::idle_timeout`].
    fn victim_for(&self, newcomer: &K, now: Instant) -> Option<u64> {
        let patience = self.limits.idle_timeout?;
        let (most, busy, since, id) = self.next_victim()?;
        let has = self.held_by(newcomer);
        let silent = !busy && now.saturating_duration_since(since) >= patience;
        (has + 1 < most || silent).then_some(id)
    }

    /// Returns the number of permits of a source.
    fn held_by(&self, who: &K) -> usize {
        self.own.get(who).map_or(0, |own| own.held.len())
    }

    /// Returns the number of permits of the source with most, and the first of its holders in order of revocation.
    fn next_victim(&self) -> Option<(usize, bool, Instant, u64)> {
        let (most, rich) = self.by_held.last()?;
        let (busy, since, id) = self.own.get(rich)?.held.first().copied()?;
        Some((*most, busy, since, id))
    }

    /// Gives a permit to an entrant, which is idle as of `now`.
    fn hold(&mut self, id: u64, who: &K, now: Instant) {
        self.held += 1;
        self.turn += 1;
        let served = self.turn;
        self.entrants.insert(id, (who.clone(), State::Holds { busy: false, since: now }));
        self.change(who, |own| {
            own.served = served;
            own.waiting.remove(&id);
            own.held.insert((false, now, id))
        });
    }

    fn longest_waiting(&self) -> Option<u64> {
        let (_, who) = self.by_waiting.last()?;
        self.own.get(who)?.waiting.first().copied()
    }

    fn forget(&mut self, id: u64) {
        let Some((who, state)) = self.entrants.remove(&id) else { return };
        match state {
            State::Waits => {
                self.waiting -= 1;
                self.change(&who, |own| own.waiting.remove(&id));
            }
            State::Holds { busy, since } => {
                self.held -= 1;
                self.change(&who, |own| own.held.remove(&(busy, since, id)));
            }
            State::Aside => {}
        }
    }

    /// Updates the numbers of a source and its position in every order. A source without entrants is removed.
    fn change(&mut self, who: &K, change: impl FnOnce(&mut SourceShare) -> bool) {
        let turn = self.turn;
        let own = self
            .own
            .entry(who.clone())
            .or_insert_with(|| SourceShare { served: turn, ..SourceShare::default() });
        let (held, waiting, served) = (own.held.len(), own.waiting.len(), own.served);
        change(own);
        let now = (own.held.len(), own.waiting.len(), own.served);
        if held > 0 {
            self.by_held.remove(&(held, who.clone()));
        }
        if waiting > 0 {
            self.by_need.remove(&(held, served, who.clone()));
            self.by_waiting.remove(&(waiting, who.clone()));
        }
        if now.0 > 0 {
            self.by_held.insert((now.0, who.clone()));
        }
        if now.1 > 0 {
            self.by_need.insert((now.0, now.2, who.clone()));
            self.by_waiting.insert((now.1, who.clone()));
        }
        if (now.0, now.1) == (0, 0) {
            self.own.remove(who);
        }
    }
}

// A bounded map that sources share fairly.

/// A bounded map of data about many sources; an entry takes about 300 bytes.
///
/// When it is full, the source with most entries loses its oldest. So a source that fills the map does not push out
/// data about others.
#[derive(Debug)]
pub struct FairMap<S, K, V> {
    shares: FairShares<S>,
    entries: HashMap<K, Entry<V>>,
    /// The key of each permit of [`Self::shares`], by the permit's number.
    keys: HashMap<u64, K>,
}

/// A value in a [`FairMap`], with the permit that it holds.
#[derive(Debug)]
struct Entry<V> {
    /// Number of its permit.
    number: u64,
    value: V,
}

impl<S: Clone + Ord + Hash, K: Clone + Eq + Hash, V> FairMap<S, K, V> {
    /// Creates a map for at most `most` entries.
    pub fn new(most: usize) -> Self {
        Self { shares: FairShares::new(Limits::permits(most)), entries: HashMap::new(), keys: HashMap::new() }
    }

    /// Returns the value of a key.
    pub fn get(&self, key: &K) -> Option<&V> {
        self.entries.get(key).map(|entry| &entry.value)
    }

    /// Returns the value of a key for changes, and makes its entry the newest of its source.
    pub fn renew(&mut self, key: &K, now: Instant) -> Option<&mut V> {
        let entry = self.entries.get_mut(key)?;
        self.shares.mark(entry.number, false, now);
        Some(&mut entry.value)
    }

    /// Sets the value of a key, even if it came from another source before. Stores nothing if the map has no capacity.
    /// Returns the key that was pushed out for it.
    pub fn insert(&mut self, source: &S, key: K, value: V, now: Instant) -> Option<K> {
        self.remove(&key, now);
        let (number, actions) = self.shares.enter(source, usize::MAX, now).ok()?;
        self.keys.insert(number, key.clone());
        self.entries.insert(key, Entry { number, value });
        let lost = self.keys.remove(&actions.lost?)?;
        self.entries.remove(&lost);
        Some(lost)
    }

    /// Returns the oldest key of the source with most, and when it was last renewed. Returns `None` unless that source
    /// would still have more keys than `newcomer` if it lost this one to it.
    pub fn victim_for(&self, newcomer: &S) -> Option<(K, Instant)> {
        let (most, _, since, number) = self.shares.next_victim()?;
        let key = self.keys.get(&number)?.clone();
        (self.count(newcomer) + 1 < most).then_some((key, since))
    }

    /// Returns the number of keys of a source.
    pub fn count(&self, source: &S) -> usize {
        self.shares.held_by(source)
    }

    /// Removes the oldest key of the source with most, and returns it.
    pub fn pop(&mut self, now: Instant) -> Option<K> {
        let (.., number) = self.shares.next_victim()?;
        let key = self.keys.get(&number)?.clone();
        self.remove(&key, now);
        Some(key)
    }

    /// Removes a key.
    pub fn remove(&mut self, key: &K, now: Instant) {
        if let Some(entry) = self.entries.remove(key) {
            self.keys.remove(&entry.number);
            self.shares.leave(entry.number, now);
        }
    }

    /// Removes all keys with values for which `kept` returns false. Frees memory if none is left.
    pub fn retain(&mut self, mut kept: impl FnMut(&V) -> bool, now: Instant) {
        let gone = self.entries.iter().filter(|(_, entry)| !kept(&entry.value));
        for key in gone.map(|(key, _)| key.clone()).collect::<Vec<_>>() {
            self.remove(&key, now);
        }
        if self.entries.is_empty() {
            self.entries.shrink_to_fit();
            self.keys.shrink_to_fit();
        }
    }
}

// Counts wrong passwords, and delays sources with too many.

/// Wrong passwords of the last minute, by source and user.
///
/// A source that tries many names does not push out the failures of others.
#[derive(Debug)]
pub struct LoginThrottle(FairMap<Source, Who, Count>);

/// A source, and a keyed hash of a user name.
pub type Who = (Source, u64);

/// The number of recent failures of one source and user.
#[derive(Debug)]
struct Count {
    failed: u32,
    since: Instant,
}

impl Default for LoginThrottle {
    fn default() -> Self {
        Self::new()
    }
}

impl LoginThrottle {
    /// Creates a throttle without failures.
    pub fn new() -> Self {
        Self(FairMap::new(MAX_KEYS))
    }

    /// Returns true if this source and user failed too often, so that their next password must not be checked yet.
    pub fn check(&self, who: &Who, now: Instant) -> bool {
        let recent = |count: &&Count| now.saturating_duration_since(count.since) < WINDOW;
        self.0.get(who).filter(recent).is_some_and(|count| count.failed >= ALLOWED)
    }

    /// Records a failure.
    pub fn add(&mut self, who: Who, now: Instant) {
        let Some(count) = self.0.renew(&who, now) else {
            self.0.insert(&who.0.clone(), who, Count { failed: 1, since: now }, now);
            return;
        };
        if now.saturating_duration_since(count.since) >= WINDOW {
            (count.failed, count.since) = (0, now);
        }
        count.failed += 1;
    }

    /// Removes the failures after a correct password.
    pub fn forget(&mut self, who: &Who, now: Instant) {
        self.0.remove(who, now);
    }
}

/// Maximum number of entries (source and user); about 300 bytes each.
const MAX_KEYS: usize = 4096;

/// Wrong passwords within [`WINDOW`] after which no more are checked until it ends.
const ALLOWED: u32 = 10;

const WINDOW: Duration = Duration::from_secs(60);

#[cfg(test)]
mod tests;

#[cfg(test)]
mod shares_tests;

#[cfg(test)]
mod fair_map_tests {
    use std::collections::{BTreeMap, HashSet};

    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn it_is_bounded_and_who_has_most_loses_the_oldest(
            most in 1usize..8,
            steps in prop::collection::vec((0u8..4, 0u8..12, any::<bool>()), 1..80),
        ) {
            let (mut map, now) = (FairMap::new(most), Instant::now());
            // The keys of each source, oldest first.
            let mut model: BTreeMap<u8, Vec<(u8, u8)>> = BTreeMap::new();
            for (source, key, adds) in steps {
                let key = (source, key);
                let own = model.entry(source).or_default();
                own.retain(|known| *known != key);
                if !adds {
                    map.remove(&key, now);
                    continue;
                }
                own.push(key);
                map.insert(&source, key, key, now);
                let held: Vec<_> = model.values().flatten().copied().collect();
                if held.len() > most {
                    let lost: Vec<_> = held.iter().filter(|key| map.get(key).is_none()).collect();
                    prop_assert_eq!(lost.len(), 1);
                    let (of, lost) = (lost[0].0, *lost[0]);
                    let fullest = model.values().map(Vec::len).max();
                    let theirs = model.entry(of).or_default();
                    // A source with as many keys, not counting the new one, may lose one instead.
                    let full = Some(theirs.len() + 1) >= fullest;
                    prop_assert!(full && theirs[0] == lost, "{lost:?} of {theirs:?}");
                    theirs.remove(0);
                }
            }
            let held: HashSet<_> = model.into_values().flatten().collect();
            prop_assert!(held.len() <= most && held.iter().all(|key| map.get(key) == Some(key)));
            prop_assert_eq!((map.entries.len(), map.keys.len()), (held.len(), held.len()));
            map.retain(|_| false, now);
            prop_assert!(map.shares.is_empty() && map.entries.is_empty() && map.keys.is_empty());
        }
    }
}

#[cfg(test)]
mod failures_tests {
    use super::*;

    fn source(last: u8) -> Source {
        Source::of([10, 0, 0, last].into())
    }

    #[test]
    fn one_source_drives_out_its_own_failures_only() {
        let (mut failures, now) = (LoginThrottle::new(), Instant::now());
        for _ in 0..ALLOWED {
            failures.add((source(1), 0), now);
        }
        for name in 0..3 * MAX_KEYS as u64 {
            failures.add((source(2), name), now);
        }
        assert!(failures.check(&(source(1), 0), now));
        failures.forget(&(source(1), 0), now);
        assert!(!failures.check(&(source(1), 0), now));
    }
}
