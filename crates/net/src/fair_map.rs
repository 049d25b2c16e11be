//! A bounded map of data about many sources. When it is full, the source with most entries loses its oldest.

use std::cmp::Reverse;
use std::collections::{BTreeSet, HashMap};
use std::hash::Hash;

use tokio::time::Instant;

/// A bounded map that sources share fairly: a source that fills the map does not push out data about others.
///
/// Each call costs a few steps in ordered sets of any size. An entry takes about 450 bytes, also if its
/// source has no other.
#[derive(Debug)]
pub struct FairMap<S, K, V> {
    most: usize,
    entries: HashMap<K, Entry<S, V>>,
    /// All keys by source, in the order in which it loses them. One set for all takes less memory than one for each.
    by_source: BTreeSet<(S, Option<Place<K>>)>,
    /// The number of keys of each source.
    counts: HashMap<S, usize>,
    /// Sources by their number of keys. Of those with equally many, the last one has been idle for longest.
    by_count: BTreeSet<SourceRank<S>>,
}

/// The number of keys of a source, and the position of the first one that it loses.
type SourceRank<S> = (usize, Reverse<(bool, Instant)>, S);

/// The place of a key among those of its source: idle ones first, then by time.
type Place<K> = (bool, Instant, K);

/// A value in a [`FairMap`], with its position among those of its source.
#[derive(Debug)]
struct Entry<S, V> {
    source: S,
    active: bool,
    since: Instant,
    value: V,
}

/// The entry of a [`FairMap`] that is lost next.
#[derive(Debug)]
pub struct Victim<K> {
    /// Number of entries of its source, which has most.
    pub count: usize,
    /// Whether it is active. Then all entries of its source are.
    pub active: bool,
    /// Time of the last change of `active`, or of the last renewal.
    pub since: Instant,
    /// Its key.
    pub key: K,
}

/// An entry that was removed from a [`FairMap`].
#[derive(Debug)]
pub struct Removed<S, K, V> {
    /// Its source.
    pub source: S,
    /// Its key.
    pub key: K,
    /// Its value.
    pub value: V,
}

impl<S: Clone + Ord + Hash, K: Copy + Ord + Hash, V> FairMap<S, K, V> {
    /// Creates a map for at most `most` entries.
    pub fn new(most: usize) -> Self {
        Self {
            most,
            entries: HashMap::new(),
            by_source: BTreeSet::new(),
            counts: HashMap::new(),
            by_count: BTreeSet::new(),
        }
    }

    /// Returns the number of entries.
    pub fn len(&self) -> usize {
        self.entries.len()
    }

    /// Returns true if there are no entries.
    pub fn is_empty(&self) -> bool {
        self.entries.is_empty()
    }

    /// Returns the number of entries of a source.
    pub fn count(&self, source: &S) -> usize {
        self.counts.get(source).copied().unwrap_or_default()
    }

    /// Returns the value of a key.
    pub fn get(&self, key: &K) -> Option<&V> {
        self.entries.get(key).map(|entry| &entry.value)
    }

    /// Marks an entry as active or idle as of `now`, and returns its value. A source loses its idle entries first.
    pub fn mark(&mut self, key: &K, active: bool, now: Instant) -> Option<&mut V> {
        let entry = self.entries.get_mut(key)?;
        let before = (entry.active, entry.since, *key);
        (entry.active, entry.since) = (active, now);
        let source = entry.source.clone();
        self.place(&source, Some(before), Some((active, now, *key)));
        self.entries.get_mut(key).map(|entry| &mut entry.value)
    }

    /// Sets the value of a key, even if it came from another source before. Returns the entry that was pushed out for
    /// it.
    pub fn insert(&mut self, source: &S, key: K, value: V, now: Instant) -> Option<Removed<S, K, V>> {
        self.remove(&key);
        let lost = if self.len() >= self.most { self.pop() } else { None };
        self.entries.insert(key, Entry { source: source.clone(), active: false, since: now, value });
        self.place(source, None, Some((false, now, key)));
        lost
    }

    /// Returns the entry that [`Self::pop`] would remove.
    pub fn victim(&self) -> Option<Victim<K>> {
        let (count, _, source) = self.by_count.last()?;
        let (active, since, key) = self.first(source)?;
        Some(Victim { count: *count, active, since, key })
    }

    /// Returns the oldest key of the source with most, and when it was last renewed. Returns `None` unless that source
    /// would still have more keys than `newcomer` if it lost this one to it.
    pub fn victim_for(&self, newcomer: &S) -> Option<(K, Instant)> {
        let victim = self.victim()?;
        (self.count(newcomer) + 1 < victim.count).then_some((victim.key, victim.since))
    }

    /// Removes the oldest entry of the source with most, and returns it.
    pub fn pop(&mut self) -> Option<Removed<S, K, V>> {
        let key = self.victim()?.key;
        self.remove(&key)
    }

    /// Removes the oldest entry of a source, and returns it.
    pub fn pop_of(&mut self, source: &S) -> Option<Removed<S, K, V>> {
        let (_, _, key) = self.first(source)?;
        self.remove(&key)
    }

    /// Removes the entry of a key, and returns it.
    pub fn remove(&mut self, key: &K) -> Option<Removed<S, K, V>> {
        let Entry { source, active, since, value } = self.entries.remove(key)?;
        self.place(&source, Some((active, since, *key)), None);
        Some(Removed { source, key: *key, value })
    }

    /// Removes all keys with values for which `kept` returns false. Frees memory if none is left.
    pub fn retain(&mut self, mut kept: impl FnMut(&V) -> bool) {
        let removed: Vec<K> =
            self.entries.iter().filter(|(_, entry)| !kept(&entry.value)).map(|(key, _)| *key).collect();
        for key in removed {
            self.remove(&key);
        }
        if self.entries.is_empty() {
            self.entries.shrink_to_fit();
            self.counts.shrink_to_fit();
        }
    }

    /// Moves, adds or removes a key of a source, and moves the source by their number.
    fn place(&mut self, source: &S, before: Option<Place<K>>, after: Option<Place<K>>) {
        let count = self.count(source);
        if let Some(rank) = self.rank(source, count) {
            self.by_count.remove(&rank);
        }
        if before.is_some() {
            self.by_source.remove(&(source.clone(), before));
        }
        self.by_source.extend(after.map(|place| (source.clone(), Some(place))));
        let count = count + usize::from(after.is_some()) - usize::from(before.is_some());
        match count {
            0 => self.counts.remove(source),
            _ => self.counts.insert(source.clone(), count),
        };
        self.by_count.extend(self.rank(source, count));
    }

    fn rank(&self, source: &S, count: usize) -> Option<SourceRank<S>> {
        let (active, since, _) = self.first(source)?;
        Some((count, Reverse((active, since)), source.clone()))
    }

    /// Returns the key that a source loses first.
    fn first(&self, source: &S) -> Option<Place<K>> {
        let (of, place) = self.by_source.range((source.clone(), None)..).next()?;
        place.filter(|_| of == source)
    }
}

#[cfg(test)]
mod tests {
    use std::collections::{BTreeMap, HashSet};
    use std::time::Duration;

    use proptest::prelude::*;

    use super::*;

    /// Removes from the model what it may lose, and checks that the map has lost nothing else.
    fn follow(model: &mut BTreeMap<u8, Vec<(u8, u8)>>, map: &FairMap<u8, (u8, u8), (u8, u8)>) {
        let lost: Vec<_> = model.values().flatten().copied().filter(|key| map.get(key).is_none()).collect();
        assert_eq!(lost.len(), 1);
        let fullest = model.values().map(Vec::len).max();
        let keys = model.entry(lost[0].0).or_default();
        // A source with as many keys, not counting the new one, may lose one instead.
        assert!(Some(keys.len() + 1) >= fullest && keys[0] == lost[0], "{lost:?} of {keys:?}");
        keys.remove(0);
    }

    proptest! {
        #[test]
        fn the_map_is_bounded_and_the_source_with_most_keys_loses_its_oldest(
            most in 1usize..8,
            steps in prop::collection::vec((0u8..4, 0u8..12, any::<bool>()), 1..80),
        ) {
            let (mut map, mut now) = (FairMap::new(most), Instant::now());
            // The keys of each source, oldest first.
            let mut model: BTreeMap<u8, Vec<(u8, u8)>> = BTreeMap::new();
            for (source, key, adds) in steps {
                now += Duration::from_nanos(1);
                let key = (source, key);
                let keys = model.entry(source).or_default();
                keys.retain(|known| *known != key);
                if !adds {
                    map.remove(&key);
                    continue;
                }
                keys.push(key);
                map.insert(&source, key, key, now);
                if model.values().map(Vec::len).sum::<usize>() > most {
                    follow(&mut model, &map);
                }
            }
            let held: HashSet<_> = model.into_values().flatten().collect();
            prop_assert!(held.len() <= most && held.iter().all(|key| map.get(key) == Some(key)));
            prop_assert_eq!(map.len(), held.len());
            map.retain(|_| false);
            prop_assert!(map.is_empty() && map.by_source.is_empty() && map.by_count.is_empty());
        }
    }

    #[test]
    fn of_many_sources_the_one_that_is_idle_for_longest_loses_first() {
        let start = Instant::now();
        let mut map = FairMap::new(10);
        for (source, age) in [(1, 5), (2, 9), (3, 1)] {
            map.insert(&source, source * 10, (), start - Duration::from_secs(age));
        }
        let lost: Vec<_> = std::iter::from_fn(|| map.pop().map(|removed| removed.key)).collect();
        assert_eq!(lost, [20, 10, 30]);
    }
}
