//! Who keeps the places of nodes, and telling them.

use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;
use std::time::Duration;

use tokio::task::yield_now;
use tokio::time::{Instant, sleep};

use super::homes::{HomeSet, Keeper};
use super::pod::Which;
use super::{SiblingPod, Siblings};
use crate::names::{Instance, NodeName};
use crate::protocol::{Dialect, Found};

/// The homes as they are now.
#[derive(Debug)]
pub(super) struct Homes {
    set: Arc<HomeSet>,
    /// Since when they are these.
    since: Instant,
}

impl Homes {
    /// Of a pod that knows no other.
    pub(super) fn of_one(own: Instance) -> Self {
        let set = Arc::new(HomeSet::new(vec![Keeper { pod: own, since: 0 }]));
        Self { set, since: Instant::now() }
    }
}

impl Siblings {
    /// Announces that a node is linked here now: to its homes, and to pods that know of no homes.
    pub fn announce(&self, node: &NodeName) {
        for home in self.homes().of(node) {
            self.announce_to(home.pod, node, None);
        }
        let (known, incoming) = self.pods();
        for sibling in known.iter().filter(|sibling| !sibling.is_ourselves()) {
            match sibling.up() {
                Some(up) if !up.dialect.has(Dialect::HOMES) => sibling.announce(node, None),
                // Who they are is not known yet, and tells itself once they are linked.
                None if sibling.process().is_none() => sibling.want(),
                _ => {}
            }
        }
        let linked: Vec<_> = known.iter().filter_map(|sibling| sibling.up()?.instance).collect();
        for incoming in incoming.iter().filter(|incoming| !incoming.sender.dialect.has(Dialect::HOMES)) {
            if incoming.sender.instance.is_none_or(|pod| !linked.contains(&pod)) {
                incoming.news.add(node, None);
            }
        }
    }

    /// Tells one pod of a node: that it is linked here, or what another pod has `said` of it.
    pub fn announce_to(&self, pod: Instance, node: &NodeName, said: Option<Found>) {
        match self.of_process(pod) {
            Some(SiblingPod(Which::Known(sibling))) => sibling.announce(node, said),
            Some(SiblingPod(Which::Incoming(_))) => {
                let (_, incoming) = self.pods();
                if let Some(its) = incoming.iter().find(|incoming| incoming.sender.instance == Some(pod)) {
                    its.news.add(node, said);
                }
            }
            None => {}
        }
    }

    /// The other pods that are homes of the node.
    pub fn homes_of(&self, node: &NodeName) -> Vec<SiblingPod> {
        self.homes().of(node).filter_map(|home| self.of_process(home.pod)).collect()
    }

    /// Whether this pod is a home of the node.
    pub fn is_home(&self, node: &NodeName) -> bool {
        self.homes().is_home(self.means.own, node)
    }

    /// How many other pods keep places.
    pub fn keepers(&self) -> usize {
        self.homes().len() - 1
    }

    /// Whether all pods that are listed have been the same for long enough, and keep places: then each home of a node
    /// knows of all of them what it has to know.
    pub fn is_settled(&self) -> bool {
        let settled = self.homes_lock().since.elapsed() >= SETTLED;
        settled && {
            let (known, incoming) = self.pods();
            known
                .iter()
                .filter(|pod| pod.listed.load(Relaxed))
                .all(|pod| pod.is_ourselves() || pod.process().is_some())
                && incoming.iter().all(|incoming| incoming.sender.dialect.has(Dialect::HOMES))
        }
    }

    /// The pod that is this process, if it is known.
    pub fn of_process(&self, pod: Instance) -> Option<SiblingPod> {
        let is = |sibling: &Arc<super::Sibling>| sibling.process().is_some_and(|keeper| keeper.pod == pod);
        if let Some(known) = self.known().into_iter().find(is) {
            return Some(SiblingPod(Which::Known(known)));
        }
        let pods = self.lock();
        let its = pods.incoming.iter().rev().find(|incoming| incoming.sender.instance == Some(pod))?;
        Some(SiblingPod(Which::Incoming(its.sender.clone())))
    }

    /// The same pod by a link that lives, if it was known by one that has ended.
    pub fn now(&self, pod: SiblingPod) -> Option<SiblingPod> {
        if pod.is_gone() { self.of_process(pod.process()?) } else { Some(pod) }
    }

    /// Follows who keeps places, and tells each pod of the nodes here whose home it has become.
    pub(super) async fn settle(self: Arc<Self>) {
        let drain = self.means.drain.clone();
        loop {
            tokio::select! {
                () = drain.draining() => return,
                () = self.means.pods.notified() => {}
            }
            self.tell_new_homes().await;
            sleep(GATHERED).await;
        }
    }

    async fn tell_new_homes(&self) {
        let new = Arc::new(HomeSet::new(self.keeping()));
        let old = {
            let mut homes = self.homes_lock();
            if *homes.set == *new {
                return;
            }
            homes.since = Instant::now();
            std::mem::replace(&mut homes.set, new.clone())
        };
        for (n, node) in self.means.registry.nodes().iter().enumerate() {
            let before: Vec<_> = old.of(node).collect();
            for home in new.of(node).filter(|home| !before.contains(home)) {
                self.announce_to(home.pod, node, None);
            }
            if n % AT_ONCE == 0 {
                yield_now().await;
            }
        }
    }

    /// The pods that keep places now, this one first.
    fn keeping(&self) -> Vec<Keeper> {
        let (known, incoming) = self.pods();
        let mut all = vec![Keeper { pod: self.means.own, since: 0 }];
        all.extend(known.iter().filter_map(|sibling| sibling.process()));
        let keeps = incoming.iter().filter(|incoming| incoming.sender.dialect.has(Dialect::HOMES));
        all.extend(keeps.filter_map(|incoming| {
            Some(Keeper { pod: incoming.sender.instance?, since: incoming.sender.id.0 })
        }));
        all
    }

    fn homes(&self) -> Arc<HomeSet> {
        self.homes_lock().set.clone()
    }
}

/// Pods have their lists from DNS every 5 s, and dial those that are new at once; a long while beyond that.
const SETTLED: Duration = Duration::from_secs(30);
/// Pods that come and go within this time are looked at together: each look goes through all nodes.
const GATHERED: Duration = Duration::from_millis(100);
/// Nodes that are looked at before other tasks may run.
const AT_ONCE: usize = 1000;
