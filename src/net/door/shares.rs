//! Decides which source gets a slot, and which holder loses one.

use std::collections::{BTreeSet, HashMap};
use std::hash::Hash;
use std::time::Duration;

use tokio::time::Instant;

/// The limits of a door.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Limits {
    /// Slots that may be held at once.
    pub slots: usize,
    /// Slots that one source may hold or wait for, even while no other does.
    pub for_one: usize,
    /// Entrants that may wait for a slot; beyond that, the source with most of them loses the one that waited longest.
    pub waiting: usize,
    /// How long an entrant may be silent before another one of a source that holds as much may have its slot.
    /// `None`: a holder keeps its slot.
    pub patience: Option<Duration>,
}

/// Why an entrant gets no slot.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum NoSlot {
    /// This source holds [`Limits::for_one`] slots.
    #[error("one client has all it may have")]
    ForOne,
    /// No holder has to give way, and no more may wait.
    #[error("all slots are taken")]
    ForAll,
}

/// Slots and their holders, as a pure data structure: each call costs a few steps in ordered sets, whatever their
/// size. Only entrants that hold a slot or wait take memory.
#[derive(Debug)]
pub struct Shares<K> {
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

/// What a call to [`Shares`] changed, as numbers of entrants.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Effects {
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
    /// It holds none, and comes back by [`Shares::waits`].
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
    pub fn slots(slots: usize) -> Self {
        Self { slots, for_one: usize::MAX, waiting: 0, patience: Some(Duration::ZERO) }
    }
}

impl<K: Clone + Ord + Hash> Shares<K> {
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
    pub fn enter(&mut self, who: &K, now: Instant) -> Result<(u64, Effects), NoSlot> {
        self.enter_within(who, usize::MAX, now)
    }

    /// As [`Self::enter`], as if there were `most` slots at the most.
    ///
    /// # Errors
    ///
    /// As [`Self::enter`].
    pub fn enter_within(&mut self, who: &K, most: usize, now: Instant) -> Result<(u64, Effects), NoSlot> {
        let Limits { slots, for_one, .. } = self.limits;
        if for_one < slots
            && self.own.get(who).is_some_and(|own| own.held.len() + own.waiting.len() >= for_one)
        {
            return Err(NoSlot::ForOne);
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
    pub fn step_aside(&mut self, id: u64, now: Instant) -> Effects {
        let Some((who, State::Holds { busy, since })) = self.entrants.get(&id).cloned() else {
            return Effects::default();
        };
        self.held -= 1;
        self.change(&who, |own| own.held.remove(&(busy, since, id)));
        self.entrants.insert(id, (who, State::Aside));
        self.settle(now)
    }

    /// Marks an entrant as silent from now on. One that has stepped aside holds a slot again: if none is free, that of
    /// the holder that would be the next to lose one.
    pub fn waits(&mut self, id: u64, now: Instant) -> Effects {
        let Some((who, State::Aside)) = self.entrants.get(&id).cloned() else {
            self.mark(id, false, now);
            return Effects::default();
        };
        let full = self.held >= self.limits.slots;
        let lost = self.next_to_go().filter(|_| full).map(|(.., lost)| lost);
        lost.into_iter().for_each(|lost| self.forget(lost));
        self.hold(id, &who, now);
        Effects { granted: None, lost }
    }

    /// Removes an entrant, whether it held a slot or waited. Does nothing if it was lost before.
    pub fn leave(&mut self, id: u64, now: Instant) -> Effects {
        self.forget(id);
        self.settle(now)
    }

    /// Grants a slot to a waiting entrant, if one is free or can be taken by now. Call it again while any wait.
    pub fn settle(&mut self, now: Instant) -> Effects {
        self.settle_within(usize::MAX, now)
    }

    fn settle_within(&mut self, most: usize, now: Instant) -> Effects {
        let Some((_, _, neediest)) = self.by_need.first().cloned() else { return Effects::default() };
        let mut effects = Effects::default();
        if self.held >= self.limits.slots.min(most) {
            effects.lost = self.gives_way(&neediest, now);
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
    fn gives_way(&self, newcomer: &K, now: Instant) -> Option<u64> {
        let patience = self.limits.patience?;
        let (most, busy, since, id) = self.next_to_go()?;
        let has = self.own.get(newcomer).map_or(0, |own| own.held.len());
        let silent = !busy && now.saturating_duration_since(since) >= patience;
        (has + 1 < most || silent).then_some(id)
    }

    /// How many slots the source with most has, and of its holders the first in their order.
    fn next_to_go(&self) -> Option<(usize, bool, Instant, u64)> {
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

#[cfg(test)]
mod tests;
