//! The homes of a node: the few pods that keep where it is, for all others.
//!
//! Every pod derives them from the node's name and from the processes that it takes for pods, so nobody has to be asked
//! who they are, and a pod that comes or goes changes the homes of few nodes.

use crate::names::{Instance, NodeName};

/// The pods that keep places, this one among them, as far as this one knows.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(super) struct HomeSet(Vec<Keeper>);

/// One pod that keeps places.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Keeper {
    pub(super) pod: Instance,
    /// Another number after each time that announcements to it may have been lost.
    pub(super) since: u64,
}

impl HomeSet {
    /// Those of the pods; of one that is there twice the first counts.
    pub(super) fn new(mut pods: Vec<Keeper>) -> Self {
        pods.sort_by_key(|keeper| keeper.pod.to_bytes());
        pods.dedup_by_key(|keeper| keeper.pod);
        Self(pods)
    }

    /// How many pods there are.
    pub(super) fn len(&self) -> usize {
        self.0.len()
    }

    /// The homes of the node: those pods that weigh most for its name. All pods, if there are no more than
    /// [`HOMES`].
    pub(super) fn of(&self, node: &NodeName) -> impl Iterator<Item = Keeper> + use<> {
        let name = name(node);
        let mut heaviest: [Option<(u64, Keeper)>; HOMES] = [None; HOMES];
        for keeper in &self.0 {
            let mut next = Some((weight(name, keeper.pod), *keeper));
            for place in &mut heaviest {
                if next.map(|(weight, _)| weight) > place.map(|(weight, _)| weight) {
                    std::mem::swap(place, &mut next);
                }
            }
        }
        heaviest.into_iter().flatten().map(|(_, keeper)| keeper)
    }

    /// Whether the pod is one of the node's homes.
    pub(super) fn is_home(&self, pod: Instance, node: &NodeName) -> bool {
        self.of(node).any(|home| home.pod == pod)
    }
}

/// FNV-1a of the name in lower case: pods of all builds have to agree on it.
fn name(node: &NodeName) -> u64 {
    let bytes = node.as_str().bytes().map(|byte| u64::from(byte.to_ascii_lowercase()));
    bytes.fold(0xcbf2_9ce4_8422_2325, |hash, byte| (hash ^ byte).wrapping_mul(0x100_0000_01b3))
}

/// What the pod weighs for that name: the two mixed as SplitMix64 does it.
fn weight(name: u64, pod: Instance) -> u64 {
    let [high, low] = [0, 8].map(|at| {
        let mut half = [0; 8];
        half.copy_from_slice(&pod.to_bytes()[at..at + 8]);
        u64::from_be_bytes(half)
    });
    let mixed = name ^ high ^ low.rotate_left(32);
    let mixed = (mixed ^ mixed >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let mixed = (mixed ^ mixed >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
    mixed ^ mixed >> 31
}

/// How many pods keep a node's place: with three, two may go at once and the place is still known.
const HOMES: usize = 3;

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::HashMap;

    fn set(pods: impl Iterator<Item = u128>) -> HomeSet {
        let random = |n: u128| (n + 1).wrapping_mul(0x9e37_79b9_7f4a_7c15_f39c_c060_5ced_c835);
        HomeSet::new(pods.map(|n| Keeper { pod: Instance::from_bits(random(n)), since: 0 }).collect())
    }

    fn node(n: usize) -> NodeName {
        format!("node-{n}").parse().unwrap()
    }

    #[test]
    fn a_node_has_three_homes_whatever_the_case_of_its_name_and_few_pods_are_all_homes() {
        let (few, many) = (set(0..3), set(0..100));
        for n in 0..100 {
            assert_eq!(few.of(&node(n)).count(), 3);
            let homes: Vec<_> = many.of(&node(n)).map(|keeper| keeper.pod).collect();
            assert_eq!(homes.len(), 3);
            assert!(homes[0] != homes[1] && homes[1] != homes[2] && homes[0] != homes[2]);
            assert!(many.of(&format!("NODE-{n}").parse().unwrap()).map(|keeper| keeper.pod).eq(homes));
        }
        assert_eq!(set(0..1).of(&node(1)).count(), 1);
    }

    #[test]
    fn each_pod_is_a_home_of_as_many_nodes_and_one_that_goes_changes_only_its_own() {
        let (all, fewer) = (set(0..20), set(0..19));
        let mut kept: HashMap<_, usize> = HashMap::new();
        let gone = set(19..20).0[0].pod;
        for n in 0..20_000 {
            let before: Vec<_> = all.of(&node(n)).map(|home| home.pod).collect();
            let after: Vec<_> = fewer.of(&node(n)).map(|home| home.pod).collect();
            assert!(before.iter().all(|home| *home == gone || after.contains(home)), "{n}");
            before.into_iter().for_each(|home| *kept.entry(home).or_default() += 1);
        }
        assert!(kept.len() == 20 && kept.values().all(|n| (2_500..3_500).contains(n)), "{kept:?}");
    }

    #[test]
    fn the_weights_are_what_the_protocol_says() {
        let pod = Instance::from_bits(0x0102_0304_0506_0708_090a_0b0c_0d0e_0f10);
        let name = name(&"A".parse().unwrap());
        assert_eq!(name, 0xaf63_dc4c_8601_ec8c);
        assert_eq!(weight(name, pod), 0x5089_3235_db27_5820);
    }
}
