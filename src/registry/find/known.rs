//! At which pod a node was found last: used until it proves wrong, and remembered as having been there.

use std::collections::HashMap;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use tokio::time::Instant;

use super::NotFound;
use crate::names::{Instance, NodeName};
use crate::registry::siblings::SiblingPod;

/// Nodes at other pods, and nodes that were just looked for in vain.
#[derive(Debug, Default)]
pub(super) struct LocationCache {
    /// Bounded by [`MAX_LOCATIONS`].
    nodes: Mutex<HashMap<NodeName, At>>,
    /// Bounded by [`MOST_MISSED`].
    missed: Mutex<HashMap<NodeName, (Instant, NotFound)>>,
}

/// The pod that has a node, as far as this process knows.
#[derive(Debug)]
struct At {
    /// None: it is not there any more.
    pod: Option<SiblingPod>,
    instance: Option<Instance>,
    /// Since when no pod has it, although this one had: the node may be linking to another.
    lost: Option<Instant>,
}

impl LocationCache {
    /// The last known pod of the node, and the node's process.
    pub(super) fn of(&self, node: &NodeName) -> Option<(SiblingPod, Option<Instance>)> {
        self.lock().get(node).and_then(|at| Some((at.pod.clone()?, at.instance)))
    }

    /// The first by name of the nodes at pods to which there is a link, and whether there are others.
    pub(super) fn first(&self) -> Option<(NodeName, bool)> {
        let nodes = self.lock();
        let mut living = nodes
            .iter()
            .filter(|(_, at)| at.lost.is_none() && at.pod.as_ref().is_some_and(|pod| pod.up().is_some()));
        let (mut first, mut several) = (living.next()?.0, false);
        for (node, _) in living {
            several = true;
            if node.as_str() < first.as_str() {
                first = node;
            }
        }
        Some((first.clone(), several))
    }

    /// Notes that a pod has the node.
    pub(super) fn learn(&self, node: &NodeName, pod: SiblingPod, instance: Option<Instance>) {
        let mut nodes = self.lock();
        if nodes.len() >= MAX_LOCATIONS && !nodes.contains_key(node) {
            // Half of them, whichever: each can be found again.
            let mut keep = false;
            nodes.retain(|_, _| {
                keep = !keep;
                keep
            });
        }
        nodes.insert(node.clone(), At { pod: Some(pod), instance, lost: None });
        drop(nodes);
        self.missed().remove(node);
    }

    /// Notes that a search for the node has found it nowhere.
    pub(super) fn miss(&self, node: &NodeName, said: &NotFound) {
        let mut missed = self.missed();
        if missed.len() >= MOST_MISSED {
            missed.retain(|_, (at, _)| at.elapsed() < MISSED_FOR);
        }
        if missed.len() < MOST_MISSED {
            missed.insert(node.clone(), (Instant::now(), said.clone()));
        }
    }

    /// The result of a search that found the node nowhere less than [`MISSED_FOR`] ago.
    pub(super) fn missing(&self, node: &NodeName) -> Option<NotFound> {
        let missed = self.missed();
        missed.get(node).filter(|(at, _)| at.elapsed() < MISSED_FOR).map(|(_, said)| said.clone())
    }

    /// No pod has the node: for how long that has been so, if it was known to be at one.
    pub(super) fn lost(&self, node: &NodeName) -> Option<Duration> {
        let mut nodes = self.lock();
        let at = nodes.get_mut(node).filter(|at| at.pod.is_some())?;
        Some(at.lost.get_or_insert_with(Instant::now).elapsed())
    }

    /// How long ago the node turned out not to be at another pod any more; none if it is not known to have been there.
    pub(super) fn seen(&self, node: &NodeName) -> Option<Duration> {
        self.lock().get(node)?.lost.map(|at| at.elapsed())
    }

    /// Notes that the node is not at that pod, if it is remembered there; an entry that another thread has made for a
    /// newer pod stays.
    pub(super) fn forget(&self, node: &NodeName, pod: &SiblingPod) {
        if let Some(at) = self.lock().get_mut(node)
            && at.pod.take_if(|known| known.is(pod)).is_some()
        {
            at.lost.get_or_insert_with(Instant::now);
        }
    }

    /// Forgets everything about the node.
    pub(super) fn forget_all(&self, node: &NodeName) {
        self.lock().remove(node);
        self.missed().remove(node);
    }

    fn lock(&self) -> MutexGuard<'_, HashMap<NodeName, At>> {
        self.nodes.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn missed(&self) -> MutexGuard<'_, HashMap<NodeName, (Instant, NotFound)>> {
        self.missed.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Nodes that are remembered; a few MiB.
const MAX_LOCATIONS: usize = 50_000;
/// Failed searches that are remembered. In a flood of more names than this, each name is searched for each time.
const MOST_MISSED: usize = 4096;
/// How long a failed search counts as the answer to the next one, unless the node comes.
const MISSED_FOR: Duration = Duration::from_secs(1);

#[cfg(test)]
mod tests {
    use super::*;
    use crate::registry::siblings::tests::pod;

    #[tokio::test(start_paused = true)]
    async fn a_miss_is_remembered_for_a_second_or_until_the_node_comes_and_there_are_few() {
        let (known, node) = (LocationCache::default(), "node1".parse().unwrap());
        let said = NotFound { asked: 3, ..NotFound::default() };
        for come in [
            |known: &LocationCache, node: &NodeName| known.learn(node, pod(1), None),
            LocationCache::forget_all,
        ] {
            known.miss(&node, &said);
            assert_eq!(known.missing(&node), Some(said.clone()));
            come(&known, &node);
            assert_eq!(known.missing(&node), None);
        }
        for n in 0..MOST_MISSED + 10 {
            known.miss(&format!("node{n}").parse().unwrap(), &said);
        }
        assert_eq!(known.missed().len(), MOST_MISSED);
        tokio::time::advance(MISSED_FOR).await;
        assert_eq!(known.missing(&node), None);
        known.miss(&node, &said);
        assert_eq!((known.missing(&node), known.missed().len()), (Some(said), 1));
    }

    #[tokio::test]
    async fn any_node_is_the_first_by_name_that_is_not_lost() {
        let known = LocationCache::default();
        assert_eq!(known.first(), None);
        let [a, b, c]: [NodeName; 3] = ["a", "b", "c"].map(|name| name.parse().unwrap());
        for node in [&c, &a, &b] {
            known.learn(node, pod(1), None);
        }
        assert_eq!(known.first(), Some((a.clone(), true)));
        known.lost(&a);
        assert_eq!(known.first(), Some((b.clone(), true)));
        known.forget_all(&b);
        assert_eq!(known.first(), Some((c, false)));
    }

    #[tokio::test]
    async fn what_is_remembered_is_bounded_and_forgotten_once_wrong() {
        let (known, one, two) = (LocationCache::default(), pod(1), pod(2));
        for n in 0..MAX_LOCATIONS + 10 {
            known.learn(&format!("node{n}").parse().unwrap(), one.clone(), None);
        }
        assert!(known.lock().len() <= MAX_LOCATIONS);
        let newest: NodeName = format!("node{}", MAX_LOCATIONS + 9).parse().unwrap();
        known.forget(&newest, &two);
        assert!(known.of(&newest).is_some(), "it is not the other pod that was wrong");
        assert_eq!(known.seen(&newest), None);
        known.forget(&newest, &one);
        assert!(known.of(&newest).is_none() && known.lost(&newest).is_none());
        assert!(known.seen(&newest).is_some(), "it was there");
    }
}
