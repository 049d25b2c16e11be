//! The homes of a node: a few pods that keep for all others where it is. Who they are, and announcing it to them, and to
//! the pods that catch what is sent to nodes' addresses, which are told of every node.

use std::collections::{HashMap, HashSet};
use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;
use std::time::Duration;

use tokio::task::yield_now;
use tokio::time::{Instant, sleep};

use crate::registry::peers::peer::{UNSOLICITED, process};
use crate::registry::peers::rendezvous::{Member, Members, MembershipChange};
use crate::registry::peers::{HandleKind, IncomingPeer, MAX_KNOWN, PeerHandle, Peers};
use tunnel_base::names::{Instance, NodeName};
use tunnel_proto::frame::Found;
use tunnel_proto::hello::Dialect;

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
        let members = Arc::new(Members::new(vec![Member { server: own, generation: 0, catches: false }]));
        let [stopping, catching] = [HashSet::new(), HashSet::new()];
        Self { members, since: Instant::now(), stopping, catching, losses: HashMap::new() }
    }

    /// Takes the pods that are known now. The members before and from now on, if they are others.
    fn update(&mut self, mut servers: Vec<Member>) -> Option<[Arc<Members>; 2]> {
        let known: HashSet<_> = servers.iter().map(|member| member.server).collect();
        self.stopping.retain(|server| known.contains(server));
        self.catching.retain(|server| known.contains(server));
        self.losses.retain(|server, _| known.contains(server));
        servers.retain(|member| !self.stopping.contains(&member.server));
        servers.iter_mut().for_each(|member| member.catches = self.catching.contains(&member.server));
        let new = Arc::new(Members::new(servers));
        if *self.members == *new {
            return None;
        }
        self.since = Instant::now();
        Some([std::mem::replace(&mut self.members, new.clone()), new])
    }
}

impl Peers {
    /// Announces that a node is linked here now: to its homes, to pods that catch, and to those that know of no homes.
    pub fn announce(&self, node: &NodeName) {
        for told in self.members().announcement_targets(node) {
            self.announce_to(told.server, node, None);
        }
        let older = |incoming: &IncomingPeer| !incoming.sender.dialect.supports(Dialect::LOCATION_REPLICAS);
        let (unknown, any_older) = {
            let servers = self.lock();
            let unknown = servers.known.values().filter(|peer| peer.process().is_none());
            (unknown.cloned().collect::<Vec<_>>(), servers.incoming.iter().any(older))
        };
        for peer in unknown.iter().filter(|peer| !peer.is_self()) {
            match peer.up() {
                Some(up) if !up.dialect.supports(Dialect::LOCATION_REPLICAS) => peer.announce(node, None),
                Some(_) => {}
                // Which process it is shows once it is linked; if that is a home, it gets all its announcements then.
                None => peer.request_link(),
            }
        }
        if !any_older {
            return;
        }
        let (known, incoming) = self.servers();
        let linked: Vec<_> = known.iter().filter_map(|peer| peer.up()?.instance).collect();
        for incoming in incoming.iter().filter(|incoming| older(incoming)) {
            if incoming.sender.instance.is_none_or(|server| !linked.contains(&server)) {
                incoming.news.add(node, None);
            }
        }
    }

    /// Tells the pods that catch that a node is not linked here any more.
    pub fn announce_gone(&self, node: &NodeName) {
        let gone = Found { silence: Duration::from_millis(1), ..Found::not_here(UNSOLICITED) };
        for told in self.members().intercepting() {
            self.announce_to(told.server, node, Some(gone.clone()));
        }
    }

    /// Announces a node to one pod: that it is linked here, or what another pod has said of it, `forwarded`.
    pub fn announce_to(&self, server: Instance, node: &NodeName, forwarded: Option<Found>) {
        match self.of_process(server) {
            Some(PeerHandle(HandleKind::Known(peer))) => peer.announce(node, forwarded),
            Some(PeerHandle(HandleKind::Incoming(_))) => {
                let (_, incoming) = self.servers();
                if let Some(its) = incoming.iter().find(|incoming| incoming.sender.instance == Some(server)) {
                    its.news.add(node, forwarded);
                }
            }
            None => {}
        }
    }

    /// The other pods that are homes of the node.
    pub fn replicas_of(&self, node: &NodeName) -> Vec<PeerHandle> {
        self.members().homes(node).filter_map(|home| self.of_process(home.server)).collect()
    }

    /// Whether this pod is a home of the node.
    pub fn is_replica_for(&self, node: &NodeName) -> bool {
        self.members().is_home(self.dial_context.own, node)
    }

    /// Which nodes this pod keeps the whereabouts of, whether anybody has asked it for them or not: those whose home it is,
    /// and all if it catches. As it is now, without a lock.
    pub fn replicated_here(&self) -> impl Fn(&NodeName) -> bool + use<> {
        let (members, own) = (self.members(), self.dial_context.own);
        let catches = members.intercepting().any(|member| member.server == own);
        move |node| catches || members.is_home(own, node)
    }

    /// How many other pods may be homes.
    pub fn other_members(&self) -> usize {
        self.members().others(self.dial_context.own)
    }

    /// Whether the members have been the same for long enough, and all pods are among them: then every pod derives the
    /// same homes, and each home of a node has heard of it.
    pub fn has_converged(&self) -> bool {
        let same = self.membership().since.elapsed() >= CONVERGENCE_TIME;
        same && {
            let (known, incoming) = self.servers();
            known
                .iter()
                .filter(|server| server.listed.load(Relaxed))
                .all(|server| server.is_self() || server.process().is_some())
                && incoming
                    .iter()
                    .all(|incoming| incoming.sender.dialect.supports(Dialect::LOCATION_REPLICAS))
        }
    }

    /// Notes that a pod is stopping, which may be this one: from now on it is no home.
    pub(crate) fn set_stopping(&self, server: Instance) {
        let mut membership = self.membership();
        let new = membership.members.contains(server) && membership.stopping.insert(server);
        drop(membership);
        if new {
            self.dial_context.members_changed.notify_one();
        }
    }

    /// Notes whether a pod, which may be this one, catches: if so, it is told of every node from now on. It may say so before
    /// it is one of the members; who becomes none is forgotten with the next look at them, which this brings about.
    pub(crate) fn set_intercepting(&self, server: Instance, catches: bool) {
        let mut membership = self.membership();
        let catching = &mut membership.catching;
        let changed = if catches { catching.insert(server) } else { catching.remove(&server) };
        drop(membership);
        if changed {
            self.dial_context.members_changed.notify_one();
        }
    }

    /// Notes that a link which a pod had made has ended.
    pub(crate) fn note_lost(&self, server: Instance) {
        let mut membership = self.membership();
        if membership.members.contains(server) {
            *membership.losses.entry(server).or_default() += 1;
        }
    }

    /// The pod that is this process, if it is known.
    pub fn of_process(&self, server: Instance) -> Option<PeerHandle> {
        let servers = self.lock();
        if let Some(known) = servers.known.values().find(|peer| peer.may_be(server)) {
            return Some(PeerHandle(HandleKind::Known(known.clone())));
        }
        let its = servers.incoming.iter().rev().find(|incoming| incoming.sender.instance == Some(server))?;
        Some(PeerHandle(HandleKind::Incoming(its.sender.clone())))
    }

    /// The same pod by a link that lives, if it was known by one that has ended.
    pub fn current(&self, server: PeerHandle) -> Option<PeerHandle> {
        if server.is_gone() { self.of_process(server.process()?) } else { Some(server) }
    }

    /// Follows who the members are, and announces to each of them the nodes here whose home it has become, or all if it
    /// catches.
    pub(crate) async fn follow_members(self: Arc<Self>) {
        let drain = self.dial_context.drain.clone();
        loop {
            tokio::select! {
                () = drain.draining() => return,
                () = self.dial_context.members_changed.notified() => {}
            }
            let started = Instant::now();
            if self.announce_to_new_members().await {
                // Pods that come and go without end cost a tenth of a core at most.
                sleep(GATHERED.max(9 * started.elapsed())).await;
            }
        }
    }

    /// Returns whether the members have changed.
    async fn announce_to_new_members(&self) -> bool {
        let servers = self.candidates();
        let Some([old, new]) = self.membership().update(servers) else { return false };
        let change = MembershipChange::new(&old, &new);
        for (n, node) in self.dial_context.registry.nodes().iter().enumerate() {
            for told in change.newly_told(node) {
                self.announce_to(told.server, node, None);
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
        let (known, incoming) = self.servers();
        let own = Member { server: self.dial_context.own, generation: 0, catches: false };
        let known = known.iter().filter_map(|peer| peer.process());
        let losses = self.membership().losses.clone();
        let generation = |server: Instance| losses.get(&server).copied().unwrap_or(0);
        let member = |server| Member { server, generation: generation(server), catches: false };
        let incoming = incoming.iter().filter_map(|incoming| process(&incoming.sender)).map(member);
        [own].into_iter().chain(known).chain(incoming).take(MAX_KNOWN).collect()
    }

    fn members(&self) -> Arc<Members> {
        self.membership().members.clone()
    }
}

/// Pods have their lists from DNS every 5 s, and dial those that are new at once; a long while beyond that.
const CONVERGENCE_TIME: Duration = Duration::from_secs(30);
/// Pods that come and go within this time are looked at together: each look goes through all nodes.
const GATHERED: Duration = Duration::from_millis(100);
/// Nodes that are looked at before other tasks may run.
const AT_ONCE: usize = 1000;

#[cfg(test)]
mod tests;
