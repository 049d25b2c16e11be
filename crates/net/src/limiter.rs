//! Fair shares of what is limited for all sources together: unproved connections, sessions, checks of passwords.
//!
//! A door has a number of slots. A source may hold all of them while no other source wants one, since thousands of
//! honest peers behind one NAT or balancer are one address. When all slots are taken and a source with fewer of them
//! wants one, the source with most loses a slot: the one whose holder has been silent for longest.
//!
//! [`FairShares`] decides, and reads no clock; [`FairLimiter`] carries it out for tasks, [`FairMap`] for what is remembered of
//! sources. Code that serves a listening socket uses [`crate::accept_loop`], which has a door and its shares.

use std::collections::{BTreeSet, HashMap};
use std::hash::Hash;
use std::io;
use std::net::{IpAddr, Ipv6Addr};
use std::pin::Pin;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::{Context, Poll};
use std::time::Duration;

use tokio::io::{AsyncRead, ReadBuf};
use tokio::sync::oneshot;
use tokio::time::{Instant, timeout};
use tokio_util::sync::CancellationToken;

use crate::socket::{Hooked, ReadHook};
use tunnel_base::policy::plain;

/// What counts as one source: an IPv4 address, or the /64 of an IPv6 address.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Source(IpAddr);

/// [`FairShares`] whose slots are held by tasks. Cheap to clone; clones are one door.
#[derive(Debug)]
pub struct FairLimiter<K: Clone + Ord + Hash = Source>(Arc<Mutex<LimiterState<K>>>);

#[derive(Debug)]
struct LimiterState<K> {
    shares: FairShares<K>,
    holders: HashMap<u64, HolderChannels>,
}

/// The channels to the task of an entrant.
#[derive(Debug)]
struct HolderChannels {
    /// Sent when the slot is granted; dropped unsent if the entrant is lost while it waits.
    granted: Option<oneshot::Sender<()>>,
    lost: CancellationToken,
}

/// A slot, held until it is dropped, unless it is lost before to another source.
#[derive(Debug)]
#[must_use = "dropping it gives it back"]
pub struct Permit<K: Clone + Ord + Hash = Source> {
    door: FairLimiter<K>,
    id: u64,
    lost: CancellationToken,
}

impl Source {
    /// The source of an address; an IPv4 address in IPv6 form counts as IPv4.
    pub fn of(ip: IpAddr) -> Self {
        Self(match plain(ip) {
            IpAddr::V6(v6) => IpAddr::V6(Ipv6Addr::from_bits(v6.to_bits() & !u128::from(u64::MAX))),
            v4 @ IpAddr::V4(_) => v4,
        })
    }
}

impl<K: Clone + Ord + Hash> FairLimiter<K> {
    /// A door with these limits and no holders.
    pub fn new(limits: Limits) -> Self {
        Self(Arc::new(Mutex::new(LimiterState { shares: FairShares::new(limits), holders: HashMap::new() })))
    }

    /// Takes a slot without waiting.
    ///
    /// # Errors
    ///
    /// No slot is free, and no holder has to give way.
    pub fn try_acquire(&self, who: &K) -> Result<Permit<K>, AcquireError> {
        self.try_acquire_below(who, usize::MAX)
    }

    /// As [`Self::try_acquire`], as if the door had `most` slots at the most.
    ///
    /// # Errors
    ///
    /// As [`Self::try_acquire`].
    pub fn try_acquire_below(&self, who: &K, most: usize) -> Result<Permit<K>, AcquireError> {
        let (slot, mut granted) = self.join(who, most)?;
        granted.try_recv().map(|()| slot).map_err(|_| AcquireError::Total)
    }

    /// Waits for a slot until it is this source's turn. Cancel safe: a dropped call leaves the queue.
    ///
    /// # Errors
    ///
    /// Too many wait, and most of them are of this source.
    pub async fn acquire(&self, who: &K) -> Result<Permit<K>, AcquireError> {
        let (slot, mut granted) = self.join(who, usize::MAX)?;
        loop {
            match timeout(GRANT_INTERVAL, &mut granted).await {
                Ok(granted) => return granted.map(|()| slot).map_err(|_| AcquireError::Total),
                Err(_) => self.apply(|shares| shares.grant_next(Instant::now())),
            }
        }
    }

    fn join(&self, who: &K, most: usize) -> Result<(Permit<K>, oneshot::Receiver<()>), AcquireError> {
        let (granted, receiver) = oneshot::channel();
        let lost = CancellationToken::new();
        let (id, notices) = {
            let mut inside = self.inside();
            let (id, effects) = inside.shares.enter_within(who, most, Instant::now())?;
            inside.holders.insert(id, HolderChannels { granted: Some(granted), lost: lost.clone() });
            (id, inside.notices(effects))
        };
        notices.send();
        Ok((Permit { door: self.clone(), id, lost }, receiver))
    }

    fn apply(&self, change: impl FnOnce(&mut FairShares<K>) -> Changes) {
        let notices = {
            let mut inside = self.inside();
            let effects = change(&mut inside.shares);
            inside.notices(effects)
        };
        // Outside the lock: a task that is woken may use this door at once.
        notices.send();
    }

    fn inside(&self) -> MutexGuard<'_, LimiterState<K>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl<K: Clone + Ord + Hash> Clone for FairLimiter<K> {
    fn clone(&self) -> Self {
        Self(Arc::clone(&self.0))
    }
}

/// The tasks to notify, once the lock is released.
struct Notices(Option<oneshot::Sender<()>>, Option<HolderChannels>);

impl<K> LimiterState<K> {
    fn notices(&mut self, effects: Changes) -> Notices {
        let granted = effects.granted.and_then(|id| self.holders.get_mut(&id)?.granted.take());
        Notices(granted, effects.lost.and_then(|id| self.holders.remove(&id)))
    }
}

impl Notices {
    fn send(self) {
        let Self(granted, lost) = self;
        if let Some(granted) = granted {
            // Fails only if the waiting call was dropped, and then its slot is given back.
            let _ = granted.send(());
        }
        if let Some(lost) = lost {
            lost.lost.cancel();
        }
    }
}

impl<K: Clone + Ord + Hash> Permit<K> {
    /// Marks the holder as active: it has sent something, and this process works on it until [`Self::waits`].
    pub fn mark_active(&self) {
        self.door.inside().shares.mark(self.id, true, Instant::now());
    }

    /// Frees the slot for others while what the holder does is bounded elsewhere: until [`Self::waits`] it has none to
    /// lose.
    pub fn suspend(&self) {
        self.door.apply(|shares| shares.step_aside(self.id, Instant::now()));
    }

    /// Marks the holder as silent: from now on this process waits for it. If it had stepped aside, it holds a slot
    /// again.
    pub fn mark_idle(&self) {
        self.door.apply(|shares| shares.waits(self.id, Instant::now()));
    }

    /// Wraps the holder's connection so that its reads mark the slot as active or silent.
    pub fn track_activity<T>(&self, io: T) -> ActivityTracked<T, K> {
        Hooked { io, hook: ActivityHook { slot: Some((self.door.clone(), self.id)), silent: true } }
    }

    /// Cancelled when the slot is lost: the holder must close its connection at once.
    pub fn revoked(&self) -> CancellationToken {
        self.lost.clone()
    }
}

impl<K: Clone + Ord + Hash> Drop for Permit<K> {
    fn drop(&mut self) {
        let (notices, gone) = {
            let mut inside = self.door.inside();
            let gone = inside.holders.remove(&self.id);
            let effects = inside.shares.leave(self.id, Instant::now());
            (inside.notices(effects), gone)
        };
        drop(gone);
        notices.send();
    }
}

/// A connection that marks its slot: a read that finds nothing marks the holder as silent, any other as active. Once
/// the slot is given back it is a plain wrapper.
pub type ActivityTracked<T, K = Source> = Hooked<T, ActivityHook<K>>;

/// The slot that an [`ActivityTracked`] connection marks, and how it last did.
#[derive(Debug)]
pub struct ActivityHook<K: Clone + Ord + Hash = Source> {
    slot: Option<(FairLimiter<K>, u64)>,
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
        if let Some((door, id)) = self.slot.as_ref().filter(|_| silent != self.silent) {
            let held = door.inside().shares.mark(*id, !silent, Instant::now());
            self.silent = silent;
            if !held {
                self.slot = None;
            }
        }
        read
    }
}

/// Between two looks of a waiting call whether a holder has been silent for too long.
const GRANT_INTERVAL: Duration = Duration::from_millis(250);

// Decides which source gets a slot, and which holder loses one.

/// The limits of a door.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Limits {
    /// Slots that may be held at once.
    pub permits: usize,
    /// Slots that one source may hold or wait for, even while no other does.
    pub per_source: usize,
    /// Entrants that may wait for a slot; beyond that, the source with most of them loses the one that waited longest.
    pub waiting: usize,
    /// How long an entrant may be silent before another one of a source that holds as much may have its slot.
    /// `None`: a holder keeps its slot.
    pub idle_timeout: Option<Duration>,
}

/// Why an entrant gets no slot.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum AcquireError {
    /// This source holds [`Limits::for_one`] slots.
    #[error("one client has all it may have")]
    PerSource,
    /// No holder has to give way, and no more may wait.
    #[error("all slots are taken")]
    Total,
}

/// Slots and their holders, as a pure data structure: each call costs a few steps in ordered sets, whatever their
/// size. Only entrants that hold a slot or wait take memory.
#[derive(Debug)]
pub struct FairShares<K> {
    limits: Limits,
    next: u64,
    /// Counts the slots that were granted.
    turn: u64,
    entrants: HashMap<u64, (K, State)>,
    own: HashMap<K, SourceShare>,
    /// Sources by the number of slots that they hold.
    by_held: BTreeSet<(usize, K)>,
    /// Sources with waiting entrants, by the slots that they hold, then by when they last got one.
    by_need: BTreeSet<(usize, u64, K)>,
    /// Sources with waiting entrants, by their number.
    by_waiting: BTreeSet<(usize, K)>,
    held: usize,
    waiting: usize,
}

/// What a call to [`FairShares`] changed, as numbers of entrants.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Changes {
    /// This entrant has a slot now.
    pub granted: Option<u64>,
    /// This entrant has lost its slot, or its turn to wait, and is forgotten.
    pub lost: Option<u64>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum State {
    Waits,
    /// It holds a slot. The order is that in which slots are lost: the silent ones first, then by time.
    Holds {
        busy: bool,
        since: Instant,
    },
    /// It holds none, and comes back by [`FairShares::waits`].
    Aside,
}

/// What one source holds and waits for.
#[derive(Debug, Default)]
struct SourceShare {
    held: BTreeSet<(bool, Instant, u64)>,
    waiting: BTreeSet<u64>,
    served: u64,
}

impl Limits {
    /// Slots without a queue: a newcomer takes the slot of a silent holder, or is refused.
    pub fn slots(permits: usize) -> Self {
        Self { permits, per_source: usize::MAX, waiting: 0, idle_timeout: Some(Duration::ZERO) }
    }
}

impl<K: Clone + Ord + Hash> FairShares<K> {
    /// No entrants.
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

    /// Adds an entrant and returns its number. It waits unless the effects grant it a slot, or name it as lost.
    ///
    /// # Errors
    ///
    /// Its source may have no more.
    pub fn enter(&mut self, who: &K, now: Instant) -> Result<(u64, Changes), AcquireError> {
        self.enter_within(who, usize::MAX, now)
    }

    /// As [`Self::enter`], as if there were `most` slots at the most.
    ///
    /// # Errors
    ///
    /// As [`Self::enter`].
    pub fn enter_within(
        &mut self,
        who: &K,
        most: usize,
        now: Instant,
    ) -> Result<(u64, Changes), AcquireError> {
        let Limits { permits: slots, per_source: for_one, .. } = self.limits;
        if for_one < slots
            && self.own.get(who).is_some_and(|own| own.held.len() + own.waiting.len() >= for_one)
        {
            return Err(AcquireError::PerSource);
        }
        self.next += 1;
        let id = self.next;
        self.entrants.insert(id, (who.clone(), State::Waits));
        self.waiting += 1;
        self.change(who, |own| own.waiting.insert(id));
        let mut effects = self.settle_within(most, now);
        if self.waiting > self.limits.waiting {
            effects.lost = self.longest_waiting().inspect(|lost| self.forget(*lost));
        }
        Ok((id, effects))
    }

    /// Marks an entrant as active (`busy`) or as silent from now on. False if it holds no slot.
    pub fn mark(&mut self, id: u64, busy: bool, now: Instant) -> bool {
        let Some((who, state @ State::Holds { .. })) = self.entrants.get_mut(&id) else { return false };
        let State::Holds { busy: was, since } = *state else { return false };
        *state = State::Holds { busy, since: now };
        if let Some(own) = self.own.get_mut(who) {
            own.held.remove(&(was, since, id));
            own.held.insert((busy, now, id));
        }
        true
    }

    /// Frees a holder's slot for others while what it does is bounded elsewhere: until [`Self::waits`] it has none to
    /// lose. Does nothing if it holds none.
    pub fn step_aside(&mut self, id: u64, now: Instant) -> Changes {
        let Some((who, State::Holds { busy, since })) = self.entrants.get(&id).cloned() else {
            return Changes::default();
        };
        self.held -= 1;
        self.change(&who, |own| own.held.remove(&(busy, since, id)));
        self.entrants.insert(id, (who, State::Aside));
        self.grant_next(now)
    }

    /// Marks an entrant as silent from now on. One that has stepped aside holds a slot again: if none is free, that of
    /// the holder that would be the next to lose one.
    pub fn waits(&mut self, id: u64, now: Instant) -> Changes {
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

    /// Removes an entrant, whether it held a slot or waited. Does nothing if it was lost before.
    pub fn leave(&mut self, id: u64, now: Instant) -> Changes {
        self.forget(id);
        self.grant_next(now)
    }

    /// Grants a slot to a waiting entrant, if one is free or can be taken by now. Call it again while any wait.
    pub fn grant_next(&mut self, now: Instant) -> Changes {
        self.settle_within(usize::MAX, now)
    }

    fn settle_within(&mut self, most: usize, now: Instant) -> Changes {
        let Some((_, _, neediest)) = self.by_need.first().cloned() else { return Changes::default() };
        let mut effects = Changes::default();
        if self.held >= self.limits.permits.min(most) {
            effects.lost = self.victim_for(&neediest, now);
            let Some(lost) = effects.lost else { return effects };
            self.forget(lost);
        }
        effects.granted = self.own.get(&neediest).and_then(|own| own.waiting.first().copied());
        if let Some(id) = effects.granted {
            self.waiting -= 1;
            self.hold(id, &neediest, now);
        }
        effects
    }

    /// True without any entrant.
    pub fn is_empty(&self) -> bool {
        self.entrants.is_empty()
    }

    /// The holder that loses its slot to `newcomer`: one of the source with most slots. It loses it at once if its
    /// source keeps more than the newcomer has then, otherwise only after a long enough silence.
    fn victim_for(&self, newcomer: &K, now: Instant) -> Option<u64> {
        let patience = self.limits.idle_timeout?;
        let (most, busy, since, id) = self.next_victim()?;
        let has = self.own.get(newcomer).map_or(0, |own| own.held.len());
        let silent = !busy && now.saturating_duration_since(since) >= patience;
        (has + 1 < most || silent).then_some(id)
    }

    /// How many slots the source with most has, and of its holders the first in their order.
    fn next_victim(&self) -> Option<(usize, bool, Instant, u64)> {
        let (most, rich) = self.by_held.last()?;
        let (busy, since, id) = self.own.get(rich)?.held.first().copied()?;
        Some((*most, busy, since, id))
    }

    /// Gives a slot to an entrant, which is silent from now on.
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

    /// Changes the counts of a source, and its position in every order. A source without entrants is forgotten.
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

// A map with a bound, which sources share fairly.

/// What is remembered of many sources. When it is full, the source with most entries loses its oldest, so that a source
/// that fills it does not push out what is known of others. An entry costs about 300 bytes.
#[derive(Debug)]
pub struct FairMap<S, K, V> {
    shares: FairShares<S>,
    entries: HashMap<K, Entry<V>>,
    /// The key that holds each slot of [`Self::shares`], by the slot's number.
    keys: HashMap<u64, K>,
}

#[derive(Debug)]
struct Entry<V> {
    number: u64,
    value: V,
}

impl<S: Clone + Ord + Hash, K: Clone + Eq + Hash, V> FairMap<S, K, V> {
    /// No entries, and at most `most`.
    pub fn new(most: usize) -> Self {
        Self { shares: FairShares::new(Limits::slots(most)), entries: HashMap::new(), keys: HashMap::new() }
    }

    /// The value of a key.
    pub fn get(&self, key: &K) -> Option<&V> {
        self.entries.get(key).map(|entry| &entry.value)
    }

    /// The value of a key, to be changed: its entry is the newest of its source from now on.
    pub fn renew(&mut self, key: &K, now: Instant) -> Option<&mut V> {
        let entry = self.entries.get_mut(key)?;
        self.shares.mark(entry.number, false, now);
        Some(&mut entry.value)
    }

    /// Sets the value of a key, whichever source it came from before. Nothing is kept if the map has no place at all.
    pub fn insert(&mut self, source: &S, key: K, value: V, now: Instant) {
        self.remove(&key, now);
        let Ok((number, effects)) = self.shares.enter(source, now) else { return };
        self.keys.insert(number, key.clone());
        self.entries.insert(key, Entry { number, value });
        if let Some(lost) = effects.lost.and_then(|lost| self.keys.remove(&lost)) {
            self.entries.remove(&lost);
        }
    }

    /// Forgets a key.
    pub fn remove(&mut self, key: &K, now: Instant) {
        if let Some(entry) = self.entries.remove(key) {
            self.keys.remove(&entry.number);
            self.shares.leave(entry.number, now);
        }
    }

    /// Forgets all keys but those whose value is to be kept, and gives free memory back if none is left.
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

// Counts wrong passwords and invitations, and makes those who gave too many wait.

/// Wrong passwords of the last minute, by source and user. A source that tries many names does not push out the
/// failures of others.
#[derive(Debug)]
pub struct LoginThrottle(FairMap<Source, Who, Count>);

/// A source, and a keyed hash of a user's name.
pub type Who = (Source, u64);

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
    /// None so far.
    pub fn new() -> Self {
        Self(FairMap::new(MAX_KEYS))
    }

    /// Whether this source and user failed too often, so that their next password is not checked yet.
    pub fn check(&self, who: &Who, now: Instant) -> bool {
        let recent = |count: &&Count| now.saturating_duration_since(count.since) < WINDOW;
        self.0.get(who).filter(recent).is_some_and(|count| count.failed >= ALLOWED)
    }

    /// Counts a failure.
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

    /// Forgets the failures after a right password.
    pub fn forget(&mut self, who: &Who, now: Instant) {
        self.0.remove(who, now);
    }
}

/// Entries (source and user) that are kept at most; about 300 bytes each.
const MAX_KEYS: usize = 4096;

/// Wrong passwords within [`WINDOW`] after which further ones are not checked until it ends.
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
            // For each source its keys, oldest first.
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
                    // Who has as many without the newcomer may lose one in its place.
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
