//! At which pod a node was found last: used until it proves wrong, and remembered as having been there.

use std::collections::HashMap;
use std::collections::hash_map::Entry;
use std::net::IpAddr;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use tokio::time::Instant;

use super::NotFound;
use crate::names::{Instance, NodeName};
use crate::registry::siblings::SiblingPod;

/// Nodes at other pods, and nodes that were just looked for in vain.
#[derive(Debug, Default)]
pub(super) struct LocationCache {
    nodes: Mutex<Locations>,
    /// Bounded by [`MOST_MISSED`].
    missed: Mutex<HashMap<NodeName, (Instant, NotFound)>>,
}

#[derive(Debug, Default)]
struct Locations {
    /// Bounded by [`MAX_LOCATIONS`] and [`MOST_KEPT`].
    all: HashMap<NodeName, At>,
    /// How many of them are kept, whatever is looked for.
    kept: usize,
    /// How many of them are kept at each pod; none that is 0.
    kept_at: HashMap<Instance, usize>,
    /// When those that need not be kept any more were last looked for.
    swept: Option<Instant>,
}

/// The pod that has a node, as far as this process knows.
#[derive(Debug)]
struct At {
    /// None: it is not there any more.
    pod: Option<SiblingPod>,
    instance: Option<Instance>,
    /// The process of that pod, if this is kept: for other pods, as this one is a home of the node, or as this one catches.
    kept: Option<Instance>,
    /// Whether a path there has proved wrong, so that the pod is asked before another one is tried.
    doubted: bool,
    /// When this was learned.
    learned: Instant,
    /// Since when no pod has it, although this one had: the node may be linking to another.
    lost: Option<Instant>,
    /// The addresses that its edge says it has, as a pod has told that had its link.
    ips: Arc<[IpAddr]>,
}

impl LocationCache {
    /// The pod at which the node is without a doubt, and the node's process.
    pub(super) fn of(&self, node: &NodeName) -> Option<(SiblingPod, Option<Instance>)> {
        let nodes = self.lock();
        nodes.all.get(node).filter(|at| !at.doubted).and_then(|at| Some((at.pod.clone()?, at.instance)))
    }

    /// The last known pod of the node.
    pub(super) fn last_pod(&self, node: &NodeName) -> Option<SiblingPod> {
        self.lock().all.get(node)?.pod.clone()
    }

    /// The first by name of the nodes at pods to which there is a link, and whether there are others.
    pub(super) fn first(&self) -> Option<(NodeName, bool)> {
        let nodes = self.lock();
        let lives = |at: &At| at.lost.is_none() && at.pod.as_ref().is_some_and(|pod| pod.up().is_some());
        let mut living = nodes.all.iter().filter(|(_, at)| lives(at));
        let (mut first, mut several) = (living.next()?.0, false);
        for (node, _) in living {
            several = true;
            if node.as_str() < first.as_str() {
                first = node;
            }
        }
        Some((first.clone(), several))
    }

    /// Notes that a pod has the node. `keep`: whatever else is looked for, as long as there is room for all and for that pod.
    pub(super) fn learn(&self, node: &NodeName, pod: SiblingPod, instance: Option<Instance>, keep: bool) {
        let process = if keep { pod.process() } else { None };
        let mut nodes = self.lock();
        let ips = nodes.all.get(node).filter(|at| at.instance == instance).map(|at| at.ips.clone());
        nodes.remove(node);
        if nodes.all.len() - nodes.kept >= MAX_LOCATIONS {
            // Half of them, whichever: each can be found again.
            let mut every_other = false;
            nodes.all.retain(|_, at| {
                every_other = !every_other;
                at.kept.is_some() || every_other
            });
        }
        let kept = process.filter(|pod| nodes.has_room(*pod));
        if let Some(pod) = kept {
            nodes.kept += 1;
            *nodes.kept_at.entry(pod).or_default() += 1;
        }
        let ips = ips.unwrap_or_default();
        let (pod, learned) = (Some(pod), Instant::now());
        nodes.all.insert(node.clone(), At { pod, instance, kept, doubted: false, learned, lost: None, ips });
        drop(nodes);
        self.missed().remove(node);
    }

    /// Notes which addresses the node's edge says it has, as the pod tells that has its link.
    pub(super) fn claim(&self, node: &NodeName, ips: Arc<[IpAddr]>) {
        if let Some(at) = self.lock().all.get_mut(node) {
            at.ips = ips;
        }
    }

    /// The nodes whose edges say which addresses they have.
    pub(super) fn claims(&self) -> Vec<(NodeName, Arc<[IpAddr]>)> {
        let nodes = self.lock();
        let claiming = nodes.all.iter().filter(|(_, at)| !at.ips.is_empty() && !at.doubted);
        claiming.map(|(node, at)| (node.clone(), at.ips.clone())).collect()
    }

    /// How long it is known where the node is, or was.
    pub(super) fn age(&self, node: &NodeName) -> Option<Duration> {
        Some(self.lock().all.get(node)?.learned.elapsed())
    }

    /// Whether all that is to be kept for other pods has room.
    pub(super) fn is_complete(&self) -> bool {
        let nodes = self.lock();
        nodes.kept < MOST_KEPT && nodes.kept_at.values().all(|kept| *kept < MOST_KEPT_AT_ONE)
    }

    /// Once there is no room any more: forgets what was kept of nodes that need not be `kept` any longer, and at pods that
    /// are gone. Once a minute at most, as it looks at all.
    pub(super) fn make_room(&self, kept: impl Fn(&NodeName) -> bool) {
        let mut nodes = self.lock();
        if nodes.swept.is_some_and(|swept| swept.elapsed() < SWEEP_INTERVAL) {
            return;
        }
        nodes.swept = Some(Instant::now());
        let over: Vec<_> = nodes
            .all
            .iter()
            .filter(|(_, at)| at.kept.is_some())
            .filter(|(node, at)| !kept(node) || at.pod.as_ref().is_none_or(|pod| pod.process() != at.kept))
            .map(|(node, _)| node.clone())
            .collect();
        for node in over {
            nodes.remove(&node);
        }
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
        let at = nodes.all.get_mut(node).filter(|at| at.pod.is_some())?;
        Some(at.lost.get_or_insert_with(Instant::now).elapsed())
    }

    /// How long ago the node turned out not to be at another pod any more; none if it is not known to have been there.
    pub(super) fn seen(&self, node: &NodeName) -> Option<Duration> {
        self.lock().all.get(node)?.lost.map(|at| at.elapsed())
    }

    /// Notes that the node is not at that pod, if it is remembered there; an entry that another thread has made for a
    /// newer pod stays. What is kept for other pods is only doubted: it is the link there that may have been wrong, and
    /// the pod does not announce the node again.
    pub(super) fn forget(&self, node: &NodeName, pod: &SiblingPod) {
        let mut nodes = self.lock();
        let process = pod.process();
        let is = |at: &SiblingPod| at.is(pod) || process.is_some() && at.process() == process;
        if let Some(at) = nodes.all.get_mut(node)
            && at.pod.as_ref().is_some_and(is)
        {
            at.lost.get_or_insert_with(Instant::now);
            at.doubted = true;
            if at.kept.is_none() {
                at.pod = None;
            }
        }
    }

    /// Forgets everything about the node.
    pub(super) fn forget_all(&self, node: &NodeName) {
        self.lock().remove(node);
        self.missed().remove(node);
    }

    fn lock(&self) -> MutexGuard<'_, Locations> {
        self.nodes.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn missed(&self) -> MutexGuard<'_, HashMap<NodeName, (Instant, NotFound)>> {
        self.missed.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Locations {
    fn has_room(&self, at: Instance) -> bool {
        self.kept < MOST_KEPT && self.kept_at.get(&at).is_none_or(|kept| *kept < MOST_KEPT_AT_ONE)
    }

    fn remove(&mut self, node: &NodeName) {
        let Some(pod) = self.all.remove(node).and_then(|at| at.kept) else { return };
        self.kept -= 1;
        if let Entry::Occupied(mut kept) = self.kept_at.entry(pod) {
            *kept.get_mut() -= 1;
            if *kept.get() == 0 {
                kept.remove();
            }
        }
    }
}

/// Nodes that are remembered because they were looked for; a few MiB.
const MAX_LOCATIONS: usize = 50_000;
/// Nodes that are kept for other pods: a home has three times as many as a pod has itself.
const MOST_KEPT: usize = 200_000;
/// Nodes at one pod that are kept: more than a pod has, so that one that announces names without end leaves room for
/// what others announce.
const MOST_KEPT_AT_ONE: usize = 50_000;
/// Between two looks for what need not be kept any more.
const SWEEP_INTERVAL: Duration = Duration::from_secs(60);
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
            |known: &LocationCache, node: &NodeName| known.learn(node, pod(1), None, false),
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
            known.learn(node, pod(1), None, false);
        }
        assert_eq!(known.first(), Some((a.clone(), true)));
        known.lost(&a);
        assert_eq!(known.first(), Some((b.clone(), true)));
        known.forget_all(&b);
        assert_eq!(known.first(), Some((c, false)));
    }

    #[tokio::test]
    async fn what_is_kept_for_others_outlives_a_doubt_and_any_number_of_names() {
        let (known, one, node) = (LocationCache::default(), pod(1), "kept".parse().unwrap());
        known.learn(&node, one.clone(), None, true);
        for n in 0..3 * MAX_LOCATIONS {
            known.learn(&format!("node{n}").parse().unwrap(), pod(2), None, false);
        }
        assert!(known.lock().all.len() <= MAX_LOCATIONS + 1);
        known.forget(&node, &one);
        assert!(known.of(&node).is_none(), "it is asked before it is tried again");
        assert!(known.last_pod(&node).is_some_and(|at| at.is(&one)));
        known.learn(&node, one, None, true);
        assert!(known.of(&node).is_some() && known.lock().kept == 1);
        known.forget_all(&node);
        assert!(known.last_pod(&node).is_none() && known.lock().kept == 0);
    }

    #[tokio::test(start_paused = true)]
    async fn a_pod_that_announces_names_without_end_fills_its_own_share_only() {
        let (known, loud, quiet) = (LocationCache::default(), pod(1), pod(2));
        let name = |pod: &str, n: usize| format!("{pod}{n}").parse::<NodeName>().unwrap();
        for n in 0..2 * MOST_KEPT_AT_ONE {
            known.learn(&name("loud", n), loud.clone(), None, true);
        }
        assert_eq!((known.is_complete(), known.lock().kept), (false, MOST_KEPT_AT_ONE));
        for n in 0..100 {
            known.learn(&name("quiet", n), quiet.clone(), None, true);
        }
        assert_eq!(known.lock().kept, MOST_KEPT_AT_ONE + 100);
        assert!(known.lock().all.len() <= MAX_LOCATIONS + MOST_KEPT_AT_ONE + 100);
        // It is no home of most of them any more.
        known.make_room(|node| node.as_str().starts_with("quiet"));
        assert_eq!((known.is_complete(), known.lock().kept), (true, 100));
        for n in 0..2 * MOST_KEPT_AT_ONE {
            known.learn(&name("loud", n), loud.clone(), None, true);
        }
        known.make_room(|node| node.as_str().starts_with("quiet"));
        assert!(!known.is_complete(), "all are looked at once a minute only");
        tokio::time::advance(SWEEP_INTERVAL).await;
        known.make_room(|node| node.as_str().starts_with("quiet"));
        assert!(known.is_complete());
    }

    #[tokio::test]
    async fn what_is_remembered_is_bounded_and_forgotten_once_wrong() {
        let (known, one, two) = (LocationCache::default(), pod(1), pod(2));
        for n in 0..MAX_LOCATIONS + 10 {
            known.learn(&format!("node{n}").parse().unwrap(), one.clone(), None, false);
        }
        assert!(known.lock().all.len() <= MAX_LOCATIONS);
        let newest: NodeName = format!("node{}", MAX_LOCATIONS + 9).parse().unwrap();
        known.forget(&newest, &two);
        assert!(known.of(&newest).is_some(), "it is not the other pod that was wrong");
        assert_eq!(known.seen(&newest), None);
        known.forget(&newest, &one);
        assert!(known.of(&newest).is_none() && known.lost(&newest).is_none());
        assert!(known.seen(&newest).is_some(), "it was there");
    }
}
