//! A map with a bound, which sources share fairly.

use std::collections::HashMap;
use std::hash::Hash;

use tokio::time::Instant;

use super::{Limits, Shares};

/// What is remembered of many sources. When it is full, the source with most entries loses its oldest, so that a source
/// that fills it does not push out what is known of others. An entry costs about 300 bytes.
#[derive(Debug)]
pub struct FairMap<S, K, V> {
    shares: Shares<S>,
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
        Self { shares: Shares::new(Limits::slots(most)), entries: HashMap::new(), keys: HashMap::new() }
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

#[cfg(test)]
mod tests {
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
