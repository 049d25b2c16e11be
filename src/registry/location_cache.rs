//! At which pod a node is: what pods announce to each other, who is told, and what is remembered.

use std::collections::HashMap;
use std::collections::hash_map::Entry;
use std::net::IpAddr;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use tokio::time::Instant;

use crate::base::names::{Instance, NodeName};
use crate::link::sender::LinkSender;
use crate::proto::frame::Found;
use crate::proto::hello::Dialect;
use crate::registry::peers::PeerHandle;
use crate::registry::{Finder, NodeLocation, NotFound};

/// Nodes at other pods, and nodes that were just looked for in vain.
#[derive(Debug, Default)]
pub(crate) struct LocationCache {
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
    pod: Option<PeerHandle>,
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
    pub(crate) fn of(&self, node: &NodeName) -> Option<(PeerHandle, Option<Instance>)> {
        let nodes = self.lock();
        nodes.all.get(node).filter(|at| !at.doubted).and_then(|at| Some((at.pod.clone()?, at.instance)))
    }

    /// The last known pod of the node.
    pub(crate) fn last_pod(&self, node: &NodeName) -> Option<PeerHandle> {
        self.lock().all.get(node)?.pod.clone()
    }

    /// The first by name of the nodes at pods to which there is a link, and whether there are others.
    pub(crate) fn first(&self) -> Option<(NodeName, bool)> {
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
    pub(crate) fn learn(&self, node: &NodeName, pod: PeerHandle, instance: Option<Instance>, keep: bool) {
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
    pub(crate) fn claim(&self, node: &NodeName, ips: Arc<[IpAddr]>) {
        if let Some(at) = self.lock().all.get_mut(node) {
            at.ips = ips;
        }
    }

    /// The nodes whose edges say which addresses they have.
    pub(crate) fn claims(&self) -> Vec<(NodeName, Arc<[IpAddr]>)> {
        let nodes = self.lock();
        let claiming = nodes.all.iter().filter(|(_, at)| !at.ips.is_empty() && !at.doubted);
        claiming.map(|(node, at)| (node.clone(), at.ips.clone())).collect()
    }

    /// How long it is known where the node is, or was.
    pub(crate) fn age(&self, node: &NodeName) -> Option<Duration> {
        Some(self.lock().all.get(node)?.learned.elapsed())
    }

    /// Whether all that is to be kept for other pods has room.
    pub(crate) fn is_complete(&self) -> bool {
        let nodes = self.lock();
        nodes.kept < MOST_KEPT && nodes.kept_at.values().all(|kept| *kept < MOST_KEPT_AT_ONE)
    }

    /// Once there is no room any more: forgets what was kept of nodes that need not be `kept` any longer, and at pods that
    /// are gone. Once a minute at most, as it looks at all.
    pub(crate) fn make_room(&self, kept: impl Fn(&NodeName) -> bool) {
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
    pub(crate) fn miss(&self, node: &NodeName, said: &NotFound) {
        let mut missed = self.missed();
        if missed.len() >= MOST_MISSED {
            missed.retain(|_, (at, _)| at.elapsed() < MISSED_FOR);
        }
        if missed.len() < MOST_MISSED {
            missed.insert(node.clone(), (Instant::now(), said.clone()));
        }
    }

    /// The result of a search that found the node nowhere less than [`MISSED_FOR`] ago.
    pub(crate) fn missing(&self, node: &NodeName) -> Option<NotFound> {
        let missed = self.missed();
        missed.get(node).filter(|(at, _)| at.elapsed() < MISSED_FOR).map(|(_, said)| said.clone())
    }

    /// No pod has the node: for how long that has been so, if it was known to be at one.
    pub(crate) fn lost(&self, node: &NodeName) -> Option<Duration> {
        let mut nodes = self.lock();
        let at = nodes.all.get_mut(node).filter(|at| at.pod.is_some())?;
        Some(at.lost.get_or_insert_with(Instant::now).elapsed())
    }

    /// How long ago the node turned out not to be at another pod any more; none if it is not known to have been there.
    pub(crate) fn seen(&self, node: &NodeName) -> Option<Duration> {
        self.lock().all.get(node)?.lost.map(|at| at.elapsed())
    }

    /// Notes that the node is not at that pod, if it is remembered there; an entry that another thread has made for a
    /// newer pod stays. What is kept for other pods is only doubted: it is the link there that may have been wrong, and
    /// the pod does not announce the node again.
    pub(crate) fn forget(&self, node: &NodeName, pod: &PeerHandle) {
        let mut nodes = self.lock();
        let process = pod.process();
        let is = |at: &PeerHandle| at.is(pod) || process.is_some() && at.process() == process;
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
    pub(crate) fn forget_all(&self, node: &NodeName) {
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

// What pods announce to each other: a pod that gains a node announces it to the node's homes, and these to whoever is
// interested.

impl Finder {
    /// Announces to the node's homes, and to pods that catch, that it is linked here now. If this pod is one of its homes,
    /// also to those that are interested.
    pub fn gained(&self, node: &NodeName) {
        let Some(others) = &self.others else { return };
        let before = others.known.last_pod(node).and_then(|pod| pod.process());
        others.known.forget_all(node);
        others.siblings.announce(node);
        for pod in self.interested(node, before, self.own) {
            others.siblings.announce_to(pod, node, None);
        }
    }

    /// Tells the pods that catch that a link of the node's has ended, if it has no other one here.
    pub fn lost(&self, node: &NodeName) {
        let Some(others) = self.others.as_ref().filter(|_| self.registry.here(node).is_none()) else {
            return;
        };
        others.siblings.announce_gone(node);
        // It may have come back in between, and that been announced first.
        if self.registry.here(node).is_some() {
            others.siblings.announce(node);
        }
    }

    /// Answers another pod's question: from this pod's own links, else with the pod at which the node is, as far as this
    /// one knows.
    pub fn answer(&self, to: &Arc<LinkSender>, node: &NodeName, question: u64) {
        if let Some(others) = &self.others {
            others.siblings.behind(to);
            // Before the look: a node that comes after it is announced to who has asked.
            if let Some(pod) = to.instance.filter(|_| others.siblings.is_home(node)) {
                others.interest.note(node, pod);
            }
        }
        let linked = self.registry.here(node).filter(|linked| !linked.sender.is_closed());
        let found = match linked {
            Some(linked) => linked.found(question, self.own),
            None => self.elsewhere(to, node, question),
        };
        // Dropped if too much waits on that link: a pod that does not read its answers gets none.
        to.found(node, found);
    }

    /// Takes a Found of another pod: an answer, or the announcement that a node is there or elsewhere, or not there any more.
    /// The process of the pod at which the node is now, if it is news: the caller then calls [`Self::contest`] and
    /// [`Self::make_way`].
    pub fn on_found(&self, from: &Arc<LinkSender>, node: &NodeName, found: Found) -> Option<Instance> {
        let others = self.others.as_ref()?;
        let found = others.siblings.on_found(from, found)?;
        let (at, pod) = match found.at {
            _ if found.here => (from.instance?, others.siblings.behind(from)),
            Some(at) if at != self.own => (at, others.siblings.of_process(at)?),
            Some(_) => return None,
            None => {
                others.known.forget(node, &others.siblings.behind(from));
                return None;
            }
        };
        let before = others.known.last_pod(node).and_then(|pod| pod.process());
        if !others.known.is_complete() {
            others.known.make_room(others.siblings.kept());
        }
        others.known.learn(node, pod, found.instance, others.siblings.kept()(node));
        if found.here {
            // A home that tells where the node is says nothing of them.
            others.known.claim(node, found.ips);
        }
        self.registry.wake_waiters(node);
        if found.here && from.dialect.has(Dialect::HOMES) {
            let forwarded = Found {
                at: Some(at),
                instance: found.instance,
                age: found.age,
                ..Found::away(found.question)
            };
            for pod in self.interested(node, before, at) {
                others.siblings.announce_to(pod, node, Some(forwarded.clone()));
            }
        }
        Some(at)
    }

    /// The pods to which a home of the node announces that it is now at the pod `at`: the one that had it `before`, and
    /// those that have asked for it. None if this pod is no home of it.
    fn interested(&self, node: &NodeName, before: Option<Instance>, at: Instance) -> Vec<Instance> {
        let Some(others) = self.others.as_ref().filter(|others| others.siblings.is_home(node)) else {
            return Vec::new();
        };
        let mut pods = others.interest.of(node);
        pods.extend(before.filter(|before| !pods.contains(before)));
        pods.retain(|pod| *pod != at && *pod != self.own);
        pods
    }

    /// The answer about a node that is not linked here.
    fn elsewhere(&self, to: &LinkSender, node: &NodeName, question: u64) -> Found {
        let away = Found::away(question);
        let Some(others) = self.others.as_ref().filter(|_| to.dialect.has(Dialect::HOMES)) else {
            return away;
        };
        let last = others.known.last_pod(node);
        // What is known may be out of date: then the pod that has the node may be one of which this one has not heard.
        let authoritative = last.is_none()
            && others.siblings.is_home(node)
            && others.siblings.has_converged()
            && others.known.is_complete();
        let at = last.and_then(|pod| others.siblings.current(pod)?.process());
        let seen = match self.registry.find(node) {
            NodeLocation::Nowhere(Some(seen)) => Some(seen),
            // The pod that had it knows it better.
            _ if at.is_some() => None,
            _ => others.known.lost(node),
        };
        // 0 stands for never.
        let silence = seen.map_or(Duration::ZERO, |seen| seen.max(Duration::from_millis(1)));
        Found { at: at.filter(|at| Some(*at) != to.instance), authoritative, silence, ..away }
    }
}

// Which pods have asked for a node whose home this pod is: they are told when it moves.

/// The pods that have asked for each node, the latest last.
#[derive(Debug, Default)]
pub(crate) struct Interest(Mutex<HashMap<NodeName, Vec<Instance>>>);

impl Interest {
    /// Notes that a pod has asked for the node.
    pub(crate) fn note(&self, node: &NodeName, pod: Instance) {
        let mut nodes = self.lock();
        if nodes.len() >= MOST_NODES && !nodes.contains_key(node) {
            // Half of them, whichever: who is not told finds the node by asking again.
            let mut keep = false;
            nodes.retain(|_, _| {
                keep = !keep;
                keep
            });
        }
        let pods = nodes.entry(node.clone()).or_default();
        pods.retain(|known| *known != pod);
        if pods.len() >= MOST_PODS {
            pods.remove(0);
        }
        pods.push(pod);
    }

    /// Those that have asked for the node.
    pub(crate) fn of(&self, node: &NodeName) -> Vec<Instance> {
        self.lock().get(node).cloned().unwrap_or_default()
    }

    fn lock(&self) -> MutexGuard<'_, HashMap<NodeName, Vec<Instance>>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Nodes of which it is remembered who has asked; some MiB.
const MOST_NODES: usize = 50_000;
/// Pods that are told of one node: what a node that moves costs must not grow with the number of pods.
const MOST_PODS: usize = 8;

#[cfg(test)]
mod tests {
    use crate::registry::peers::tests::pod;

    use super::*;

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

#[cfg(test)]
mod announce_tests {
    use std::task::{Context, Poll, Waker};

    use tokio::time::Instant;

    use crate::base::metrics::Metrics;
    use crate::base::policy::zone::Zone;
    use crate::net::resolver::Resolver;
    use crate::proto::frame::{FrameKind, Remote};
    use crate::proto::state::LinkId;
    use crate::registry::peers::tests::{settled, siblings};
    use crate::registry::search::Dns;
    use crate::registry::{LinkedNode, Registry};

    use super::*;

    /// What is said to a pod about nodes.
    fn told(link: &LinkSender) -> Vec<Found> {
        let mut cx = Context::from_waker(Waker::noop());
        let mut all = Vec::new();
        while let Poll::Ready(Some(frame)) = link.poll_pull(&mut cx, Instant::now()) {
            if let FrameKind::Found(found) = frame.body {
                all.push(found);
            }
        }
        all
    }

    /// A DNS that does not answer.
    fn nowhere() -> Dns {
        let resolver = Arc::new(Resolver::of_servers(&[([127, 0, 0, 1], 9).into()]).unwrap());
        Dns::new(resolver, Arc::new(Zone::new(String::new(), Vec::new(), |_| true)))
    }

    #[tokio::test(start_paused = true)]
    async fn a_home_refers_to_the_pod_and_announces_to_it_and_to_who_asked_that_the_node_has_moved() {
        let (siblings, _tell, _made) = siblings(&[]);
        let own = Instance::from_bits(1);
        let finder = Finder::new(Registry::new(Metrics::cloud("", "")), own, siblings.clone(), nowhere(), 1);
        let pod = |id| Instance::from_bits(u128::from(id));
        let link = |id, dialect| LinkSender::new(LinkId(id), Remote::Pod, Some(pod(id)), dialect);
        let [first, second, asker] = [7, 8, 9].map(|id| link(id, Dialect::NEWEST));
        let older = link(10, Dialect::Extended(2));
        for link in [&first, &second, &asker, &older] {
            siblings.joined(link, false);
        }
        settled().await;
        let names = (0..).map(|n| format!("node{n}").parse::<NodeName>().unwrap());
        let node = &names.into_iter().find(|node| siblings.is_home(node)).unwrap();
        let here = Found { here: true, instance: Some(pod(77)), ..Found::away(0) };
        assert_eq!(finder.on_found(&first, node, here.clone()), Some(pod(7)));
        finder.answer(&asker, node, 5);
        finder.answer(&older, node, 5);
        assert_eq!(told(&asker), [Found { at: Some(pod(7)), ..Found::away(5) }]);
        assert_eq!(told(&older), [Found::away(5)], "it knows of no homes");
        assert_eq!(finder.on_found(&second, node, here), Some(pod(8)));
        settled().await;
        let moved = Found { at: Some(pod(8)), instance: Some(pod(77)), ..Found::away(0) };
        assert_eq!((told(&first), told(&asker)), (vec![moved.clone()], vec![moved.clone()]));
        assert_eq!((told(&second), told(&older)), (vec![], vec![moved.clone()]), "an older pod drops it");
        // As the other two hear it.
        assert_eq!(finder.on_found(&second, node, moved.clone()), Some(pod(8)));
        assert_eq!(
            finder.on_found(&second, node, Found { at: Some(own), ..moved }),
            None,
            "this pod knows better"
        );
    }

    #[tokio::test(start_paused = true)]
    async fn who_asks_for_a_node_that_has_just_left_hears_so_and_may_wait_for_it() {
        let (siblings, _addresses, _made) = siblings(&[]);
        let registry = Registry::new(Metrics::cloud("", ""));
        let finder = Finder::new(registry.clone(), Instance::from_bits(1), siblings.clone(), nowhere(), 1);
        let node: &NodeName = &"node1".parse().unwrap();
        let link = |id, peer| {
            LinkSender::new(LinkId(id), peer, Some(Instance::from_bits(id.into())), Dialect::NEWEST)
        };
        let (asker, other) = (link(9, Remote::Pod), link(8, Remote::Pod));
        siblings.joined(&asker, false);
        siblings.joined(&other, false);
        settled().await;
        finder.answer(&asker, node, 5);
        assert_eq!(told(&asker), [Found::away(5)], "it was never anywhere");
        let edge = link(7, Remote::Edge(node.clone()));
        registry.insert(
            LinkedNode {
                sender: edge.clone(),
                instance: None,
                from: ([127, 0, 0, 1], 1).into(),
                ips: Arc::default(),
            },
            false,
        );
        registry.remove(&edge);
        tokio::time::advance(Duration::from_secs(2)).await;
        finder.answer(&asker, node, 6);
        assert_eq!(told(&asker), [Found { silence: Duration::from_secs(2), ..Found::away(6) }]);
        // It is at a pod, as that one says, which is gone then.
        let gone: &NodeName = &"node2".parse().unwrap();
        finder.on_found(&other, gone, Found { here: true, ..Found::away(0) });
        finder.answer(&asker, gone, 7);
        assert_eq!(told(&asker), [Found { at: other.instance, ..Found::away(7) }]);
        siblings.left(&other);
        other.close();
        finder.answer(&asker, gone, 8);
        assert_eq!(told(&asker), [Found { silence: Duration::from_millis(1), ..Found::away(8) }]);
    }

    #[tokio::test(start_paused = true)]
    async fn what_an_edge_at_another_pod_says_of_its_addresses_counts_while_it_is_there_and_that_pod_linked()
    {
        let (siblings, _addresses, _made) = siblings(&[]);
        let registry = Registry::new(Metrics::cloud("", ""));
        let finder = Finder::new(registry, Instance::from_bits(1), siblings.clone(), nowhere(), 1);
        let node: &NodeName = &"node1".parse().unwrap();
        let pod = |id| Instance::from_bits(u128::from(id));
        let link = |id| LinkSender::new(LinkId(id), Remote::Pod, Some(pod(id)), Dialect::NEWEST);
        let links @ [first, second] = &[7, 8].map(link);
        links.iter().for_each(|link| drop(siblings.joined(link, false)));
        settled().await;
        let says = |from: &Arc<LinkSender>, found| finder.on_found(from, node, found);
        let claims = || finder.claims().into_iter().map(|claim| claim.ip.to_string()).collect::<Vec<_>>();
        let (edge, ips) = (Some(pod(77)), ["10.0.0.7", "fd00::7"]);
        let mine = ips.map(|ip| ip.parse().unwrap()).into();
        let here = Found { here: true, instance: edge, ips: mine, ..Found::away(0) };
        says(first, here.clone());
        assert_eq!(claims(), ips);
        says(second, Found { at: Some(pod(7)), instance: edge, ..Found::away(0) });
        assert_eq!(claims(), ips, "a home says where the node is, and nothing of its addresses");
        says(second, Found::away(0));
        assert!(finder.knows(node), "only the pod that has it says that it is gone");
        says(first, Found::away(0));
        assert!(!finder.knows(node) && claims().is_empty(), "it is gone");
        says(first, here.clone());
        says(second, Found { at: Some(pod(7)), instance: Some(pod(78)), ..Found::away(0) });
        assert!(claims().is_empty(), "it is another process, of which nothing is known");
        says(second, here.clone());
        assert_eq!(claims(), ips);
        second.close();
        assert!(claims().is_empty(), "nobody knows whether it is still there");
        tokio::time::advance(Duration::from_millis(1)).await;
        let again = link(8);
        siblings.joined(&again, false);
        settled().await;
        assert!(!finder.knows(node) && claims().is_empty(), "it has not been said by the new link");
        says(&again, here);
        assert_eq!(claims(), ips);
    }
}

#[cfg(test)]
mod interest_tests {
    use super::*;

    #[test]
    fn the_latest_few_that_asked_are_known_and_no_names_make_it_grow() {
        let (interest, node) = (Interest::default(), "node1".parse().unwrap());
        let pod = |n: usize| Instance::from_bits(n as u128);
        for n in [0, 1, 0].into_iter().chain(2..MOST_PODS + 1) {
            interest.note(&node, pod(n));
        }
        let latest: Vec<_> = [0].into_iter().chain(2..MOST_PODS + 1).map(pod).collect();
        assert_eq!(interest.of(&node), latest);
        for n in 0..2 * MOST_NODES {
            interest.note(&format!("other{n}").parse().unwrap(), pod(1));
        }
        assert!(interest.lock().len() <= MOST_NODES);
    }
}
