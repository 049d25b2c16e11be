//! The homes of a node: a few pods that keep for all others where it is. Who they are, and announcing it to them, and to
//! the pods that catch what is sent to nodes' addresses, which are told of every node.

use std::collections::{HashMap, HashSet};
use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;
use std::time::Duration;

use tokio::task::yield_now;
use tokio::time::{Instant, sleep};

use crate::base::names::{Instance, NodeName};
use crate::proto::frame::Found;
use crate::proto::hello::Dialect;
use crate::registry::peers::peer::{UNASKED, process};
use crate::registry::peers::rendezvous::{Change, Member, Members};
use crate::registry::peers::{Incoming, MOST_KNOWN, PeerHandle, Siblings, Which};

/// The pods that may be homes now.
#[derive(Debug)]
pub(crate) struct Membership {
    members: Arc<Members>,
    /// Since when they are these.
    since: Instant,
    /// Pods that have said that they are stopping; each is a pod that is known.
    stopping: HashSet<Instance>,
    /// Pods that have said that they catch; likewise.
    catching: HashSet<Instance>,
    /// How many links that a pod has made have ended, so that announcements that were under way may be lost. Of pods
    /// that are known.
    losses: HashMap<Instance, u64>,
}

impl Membership {
    /// Of a pod that knows no other.
    pub(crate) fn of_one(own: Instance) -> Self {
        let members = Arc::new(Members::new(vec![Member { pod: own, generation: 0, catches: false }]));
        let [stopping, catching] = [HashSet::new(), HashSet::new()];
        Self { members, since: Instant::now(), stopping, catching, losses: HashMap::new() }
    }

    /// Takes the pods that are known now. The members before and from now on, if they are others.
    fn update(&mut self, mut pods: Vec<Member>) -> Option<[Arc<Members>; 2]> {
        let known: HashSet<_> = pods.iter().map(|member| member.pod).collect();
        self.stopping.retain(|pod| known.contains(pod));
        self.catching.retain(|pod| known.contains(pod));
        self.losses.retain(|pod, _| known.contains(pod));
        pods.retain(|member| !self.stopping.contains(&member.pod));
        pods.iter_mut().for_each(|member| member.catches = self.catching.contains(&member.pod));
        let new = Arc::new(Members::new(pods));
        if *self.members == *new {
            return None;
        }
        self.since = Instant::now();
        Some([std::mem::replace(&mut self.members, new.clone()), new])
    }
}

impl Siblings {
    /// Announces that a node is linked here now: to its homes, to pods that catch, and to those that know of no homes.
    pub fn announce(&self, node: &NodeName) {
        for told in self.members().told(node) {
            self.announce_to(told.pod, node, None);
        }
        let older = |incoming: &Incoming| !incoming.sender.dialect.has(Dialect::HOMES);
        let (unknown, any_older) = {
            let pods = self.lock();
            let unknown = pods.known.values().filter(|sibling| sibling.process().is_none());
            (unknown.cloned().collect::<Vec<_>>(), pods.incoming.iter().any(older))
        };
        for sibling in unknown.iter().filter(|sibling| !sibling.is_ourselves()) {
            match sibling.up() {
                Some(up) if !up.dialect.has(Dialect::HOMES) => sibling.announce(node, None),
                Some(_) => {}
                // Which process it is shows once it is linked; if that is a home, it gets all its announcements then.
                None => sibling.want(),
            }
        }
        if !any_older {
            return;
        }
        let (known, incoming) = self.pods();
        let linked: Vec<_> = known.iter().filter_map(|sibling| sibling.up()?.instance).collect();
        for incoming in incoming.iter().filter(|incoming| older(incoming)) {
            if incoming.sender.instance.is_none_or(|pod| !linked.contains(&pod)) {
                incoming.news.add(node, None);
            }
        }
    }

    /// Tells the pods that catch that a node is not linked here any more.
    pub fn announce_gone(&self, node: &NodeName) {
        let gone = Found { silence: Duration::from_millis(1), ..Found::away(UNASKED) };
        for told in self.members().catching() {
            self.announce_to(told.pod, node, Some(gone.clone()));
        }
    }

    /// Announces a node to one pod: that it is linked here, or what another pod has said of it, `forwarded`.
    pub fn announce_to(&self, pod: Instance, node: &NodeName, forwarded: Option<Found>) {
        match self.of_process(pod) {
            Some(PeerHandle(Which::Known(sibling))) => sibling.announce(node, forwarded),
            Some(PeerHandle(Which::Incoming(_))) => {
                let (_, incoming) = self.pods();
                if let Some(its) = incoming.iter().find(|incoming| incoming.sender.instance == Some(pod)) {
                    its.news.add(node, forwarded);
                }
            }
            None => {}
        }
    }

    /// The other pods that are homes of the node.
    pub fn homes_of(&self, node: &NodeName) -> Vec<PeerHandle> {
        self.members().homes(node).filter_map(|home| self.of_process(home.pod)).collect()
    }

    /// Whether this pod is a home of the node.
    pub fn is_home(&self, node: &NodeName) -> bool {
        self.members().is_home(self.means.own, node)
    }

    /// Which nodes this pod keeps the whereabouts of, whether anybody has asked it for them or not: those whose home it is,
    /// and all if it catches. As it is now, without a lock.
    pub fn kept(&self) -> impl Fn(&NodeName) -> bool + use<> {
        let (members, own) = (self.members(), self.means.own);
        let catches = members.catching().any(|member| member.pod == own);
        move |node| catches || members.is_home(own, node)
    }

    /// How many other pods may be homes.
    pub fn other_members(&self) -> usize {
        self.members().others(self.means.own)
    }

    /// Whether the members have been the same for long enough, and all pods are among them: then every pod derives the
    /// same homes, and each home of a node has heard of it.
    pub fn has_converged(&self) -> bool {
        let same = self.membership().since.elapsed() >= CONVERGED;
        same && {
            let (known, incoming) = self.pods();
            known
                .iter()
                .filter(|pod| pod.listed.load(Relaxed))
                .all(|pod| pod.is_ourselves() || pod.process().is_some())
                && incoming.iter().all(|incoming| incoming.sender.dialect.has(Dialect::HOMES))
        }
    }

    /// Notes that a pod is stopping, which may be this one: from now on it is no home.
    pub(crate) fn note_stopping(&self, pod: Instance) {
        let mut membership = self.membership();
        let new = membership.members.contains(pod) && membership.stopping.insert(pod);
        drop(membership);
        if new {
            self.means.members_changed.notify_one();
        }
    }

    /// Notes whether a pod, which may be this one, catches: if so, it is told of every node from now on. It may say so before
    /// it is one of the members; who becomes none is forgotten with the next look at them, which this brings about.
    pub(crate) fn note_catching(&self, pod: Instance, catches: bool) {
        let mut membership = self.membership();
        let catching = &mut membership.catching;
        let changed = if catches { catching.insert(pod) } else { catching.remove(&pod) };
        drop(membership);
        if changed {
            self.means.members_changed.notify_one();
        }
    }

    /// Notes that a link which a pod had made has ended.
    pub(crate) fn note_lost(&self, pod: Instance) {
        let mut membership = self.membership();
        if membership.members.contains(pod) {
            *membership.losses.entry(pod).or_default() += 1;
        }
    }

    /// The pod that is this process, if it is known.
    pub fn of_process(&self, pod: Instance) -> Option<PeerHandle> {
        let pods = self.lock();
        if let Some(known) = pods.known.values().find(|sibling| sibling.may_be(pod)) {
            return Some(PeerHandle(Which::Known(known.clone())));
        }
        let its = pods.incoming.iter().rev().find(|incoming| incoming.sender.instance == Some(pod))?;
        Some(PeerHandle(Which::Incoming(its.sender.clone())))
    }

    /// The same pod by a link that lives, if it was known by one that has ended.
    pub fn current(&self, pod: PeerHandle) -> Option<PeerHandle> {
        if pod.is_gone() { self.of_process(pod.process()?) } else { Some(pod) }
    }

    /// Follows who the members are, and announces to each of them the nodes here whose home it has become, or all if it
    /// catches.
    pub(crate) async fn follow_members(self: Arc<Self>) {
        let drain = self.means.drain.clone();
        loop {
            tokio::select! {
                () = drain.draining() => return,
                () = self.means.members_changed.notified() => {}
            }
            let begun = Instant::now();
            if self.announce_to_new_members().await {
                // Pods that come and go without end cost a tenth of a core at most.
                sleep(GATHERED.max(9 * begun.elapsed())).await;
            }
        }
    }

    /// Returns whether the members have changed.
    async fn announce_to_new_members(&self) -> bool {
        let pods = self.candidates();
        let Some([old, new]) = self.membership().update(pods) else { return false };
        let change = Change::new(&old, &new);
        for (n, node) in self.means.registry.nodes().iter().enumerate() {
            for told in change.newly_told(node) {
                self.announce_to(told.pod, node, None);
            }
            if n % AT_ONCE == 0 {
                yield_now().await;
            }
        }
        true
    }

    /// The pods that may be homes unless they are stopping: those that are linked, or were when that was last tried, and
    /// this one.
    fn candidates(&self) -> Vec<Member> {
        let (known, incoming) = self.pods();
        let own = Member { pod: self.means.own, generation: 0, catches: false };
        let known = known.iter().filter_map(|sibling| sibling.process());
        let losses = self.membership().losses.clone();
        let generation = |pod: Instance| losses.get(&pod).copied().unwrap_or(0);
        let member = |pod| Member { pod, generation: generation(pod), catches: false };
        let incoming = incoming.iter().filter_map(|incoming| process(&incoming.sender)).map(member);
        [own].into_iter().chain(known).chain(incoming).take(MOST_KNOWN).collect()
    }

    fn members(&self) -> Arc<Members> {
        self.membership().members.clone()
    }
}

/// Pods have their lists from DNS every 5 s, and dial those that are new at once; a long while beyond that.
const CONVERGED: Duration = Duration::from_secs(30);
/// Pods that come and go within this time are looked at together: each look goes through all nodes.
const GATHERED: Duration = Duration::from_millis(100);
/// Nodes that are looked at before other tasks may run.
const AT_ONCE: usize = 1000;

#[cfg(test)]
mod tests;
