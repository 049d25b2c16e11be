//! Who gets a slot, and who gives it up.

use std::collections::{BTreeSet, HashMap};
use std::hash::Hash;
use std::time::Duration;

use tokio::time::Instant;

/// What a door has to give.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Limits {
    /// Slots that may be held at once.
    pub slots: usize,
    /// Slots that one source may hold or wait for, even while no other does.
    pub for_one: usize,
    /// Entrants that may wait for a slot; beyond that, the source with most of them loses the one that waited longest.
    pub waiting: usize,
    /// How long an entrant may be silent before another one of a source that holds as much may have its slot.
    /// None: whoever holds a slot keeps it.
    pub patience: Option<Duration>,
}

/// Why there is no slot.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum Full {
    /// This source holds [`Limits::for_one`] slots.
    #[error("one client has all it may have")]
    ForOne,
    /// Nobody has to give way, and no more may wait.
    #[error("all slots are taken")]
    ForAll,
}

/// Slots and who holds them, as a pure data structure: each call costs a few steps in ordered sets, whatever their
/// size, and holds memory for those only who hold a slot or wait.
#[derive(Debug)]
pub struct Shares<K> {
    limits: Limits,
    next: u64,
    /// Counts slots given.
    turn: u64,
    entrants: HashMap<u64, (K, State)>,
    own: HashMap<K, SourceShare>,
    /// Sources that hold something, with how much.
    by_held: BTreeSet<(usize, K)>,
    /// Sources of which somebody waits: how much they hold, when they last got a slot, and who.
    by_need: BTreeSet<(usize, u64, K)>,
    /// Sources of which somebody waits, with how many do.
    by_waiting: BTreeSet<(usize, K)>,
    held: usize,
    waiting: usize,
}

/// What a call to [`Shares`] did to entrants, by their numbers.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Effects {
    /// Has a slot now.
    pub granted: Option<u64>,
    /// Holds its slot no longer, or waits no longer, and is forgotten.
    pub lost: Option<u64>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum State {
    Waits,
    /// Holds a slot. Ordered as slots are given up: who is silent first, then by time.
    Holds {
        busy: bool,
        since: Instant,
    },
}

/// What one source holds and waits for.
#[derive(Debug, Default)]
struct SourceShare {
    held: BTreeSet<(bool, Instant, u64)>,
    waiting: BTreeSet<u64>,
    served: u64,
}

impl Limits {
    /// Slots that nobody waits for: a newcomer takes that of a silent one, or goes.
    pub fn slots(slots: usize) -> Self {
        Self { slots, for_one: usize::MAX, waiting: 0, patience: Some(Duration::ZERO) }
    }
}

impl<K: Clone + Ord + Hash> Shares<K> {
    /// Nobody holds anything.
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

    /// A newcomer, as a number. It waits unless it was granted a slot, or was itself lost.
    ///
    /// # Errors
    ///
    /// If its source may have no more.
    pub fn enter(&mut self, who: &K, now: Instant) -> Result<(u64, Effects), Full> {
        let Limits { slots, for_one, .. } = self.limits;
        if for_one < slots
            && self.own.get(who).is_some_and(|own| own.held.len() + own.waiting.len() >= for_one)
        {
            return Err(Full::ForOne);
        }
        self.next += 1;
        let id = self.next;
        self.entrants.insert(id, (who.clone(), State::Waits));
        self.waiting += 1;
        self.change(who, |own| own.waiting.insert(id));
        let mut effects = self.settle(now);
        if self.waiting > self.limits.waiting {
            effects.lost = self.longest_waiting().inspect(|lost| self.forget(*lost));
        }
        Ok((id, effects))
    }

    /// An entrant has spoken and it is our turn (`busy`), or we wait for it from now on. False if it holds no slot.
    pub fn heard(&mut self, id: u64, busy: bool, now: Instant) -> bool {
        let Some((who, state @ State::Holds { .. })) = self.entrants.get_mut(&id) else { return false };
        let State::Holds { busy: was, since } = *state else { return false };
        *state = State::Holds { busy, since: now };
        if let Some(own) = self.own.get_mut(who) {
            own.held.remove(&(was, since, id));
            own.held.insert((busy, now, id));
        }
        true
    }

    /// An entrant goes, whether it held a slot or waited. Nothing happens if it was lost before.
    pub fn leave(&mut self, id: u64, now: Instant) -> Effects {
        self.forget(id);
        self.settle(now)
    }

    /// Gives a slot to one who waits, if one can be had by now. To be called again while somebody waits.
    pub fn settle(&mut self, now: Instant) -> Effects {
        let Some((_, _, neediest)) = self.by_need.first().cloned() else { return Effects::default() };
        let mut effects = Effects::default();
        if self.held >= self.limits.slots {
            effects.lost = self.gives_way(&neediest, now);
            let Some(lost) = effects.lost else { return effects };
            self.forget(lost);
        }
        effects.granted = self.own.get(&neediest).and_then(|own| own.waiting.first().copied());
        if let Some(id) = effects.granted {
            self.waiting -= 1;
            self.held += 1;
            let order = (false, now, id);
            self.entrants.insert(id, (neediest.clone(), State::Holds { busy: false, since: now }));
            self.turn += 1;
            let served = self.turn;
            self.change(&neediest, |own| {
                own.served = served;
                own.waiting.remove(&id) && own.held.insert(order)
            });
        }
        effects
    }

    /// Nobody holds a slot or waits.
    pub fn is_empty(&self) -> bool {
        self.entrants.is_empty()
    }

    /// Who gives its slot to `newcomer`: one of the source that holds most, at once if that keeps more than the newcomer
    /// has then, and otherwise if it has been silent for long enough.
    fn gives_way(&self, newcomer: &K, now: Instant) -> Option<u64> {
        let patience = self.limits.patience?;
        let (most, rich) = self.by_held.last()?;
        let (busy, since, id) = self.own.get(rich)?.held.first().copied()?;
        let has = self.own.get(newcomer).map_or(0, |own| own.held.len());
        let silent = !busy && now.saturating_duration_since(since) >= patience;
        (has + 1 < *most || silent).then_some(id)
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
        }
    }

    /// Changes what a source has, and its position in every order. A source that has nothing is forgotten.
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
