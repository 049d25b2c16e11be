//! The location replicas of a node: a few servers that keep its location for all others. Chooses them, and announces
//! nodes to them and to servers that intercept traffic to nodes' addresses, which get every node.

use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;
use std::time::Duration;

use tokio::task::yield_now;
use tokio::time::{Instant, sleep};

use crate::registry::peers::peer::UNSOLICITED;
use crate::registry::peers::rendezvous::{Member, Members, MembershipChange};
use crate::registry::peers::{HandleKind, MAX_KNOWN, PeerHandle, Peers};
use tunnel_base::names::{Instance, NodeName};
use tunnel_proto::frame::Found;

impl Peers {
    /// Announces that a node is linked here now: to its location replicas, and to servers that intercept.
    pub fn announce(&self, node: &NodeName) {
        for told in self.members().announcement_targets(node) {
            self.announce_to(told.server, node, None);
        }
        let unknown: Vec<_> = {
            let servers = self.servers.lock();
            servers.known.values().filter(|peer| peer.process().is_none()).cloned().collect()
        };
        // The process of a peer is only known once it is linked; if that is a replica, it gets all its announcements then.
        for peer in unknown.iter().filter(|peer| !peer.is_self()) {
            peer.request_link();
        }
    }

    /// Announces to the servers that intercept that a node is no longer linked here.
    pub fn announce_gone(&self, node: &NodeName) {
        let gone = Found { silence: Duration::from_millis(1), ..Found::not_here(UNSOLICITED) };
        for told in self.members().intercepting() {
            self.announce_to(told.server, node, Some(gone.clone()));
        }
    }

    /// Announces a node to one server: that it is linked here, or the Found of another server, `forwarded`.
    pub fn announce_to(&self, server: Instance, node: &NodeName, forwarded: Option<Found>) {
        match self.of_process(server) {
            Some(PeerHandle(HandleKind::Known(peer))) => peer.announce(node, forwarded),
            Some(PeerHandle(HandleKind::Incoming(_))) => {
                let (_, incoming) = self.servers();
                if let Some(its) = incoming.iter().find(|incoming| incoming.sender.instance == Some(server)) {
                    its.has_announced.store(true, Relaxed);
                    its.news.add(node, forwarded);
                    // Checked last, because it may just have been removed.
                    if its.sender.is_closed() {
                        self.dial_context.note_lost(server);
                    }
                }
            }
            None => {}
        }
    }

    /// Returns the peers that are location replicas of the node.
    pub fn replicas_of(&self, node: &NodeName) -> Vec<PeerHandle> {
        self.members().homes(node).filter_map(|home| self.of_process(home.server)).collect()
    }

    /// Returns true if this server is a location replica of the node.
    pub fn is_replica_for(&self, node: &NodeName) -> bool {
        self.members().is_home(self.dial_context.own, node)
    }

    /// Returns a predicate for nodes whose location this server keeps regardless of searches: nodes that it is a
    /// replica of, and all if it intercepts. It holds the current state and takes no lock.
    pub fn replicated_here(&self) -> impl Fn(&NodeName) -> bool + use<> {
        let (members, own) = (self.members(), self.dial_context.own);
        let catches = members.intercepting().any(|member| member.server == own);
        move |node| catches || members.is_home(own, node)
    }

    /// Returns the number of peers that may be location replicas.
    pub fn other_members(&self) -> usize {
        self.members().others(self.dial_context.own)
    }

    /// Returns true if the members have not changed for long enough and include all servers. Then every server derives
    /// the same replicas, and each replica of a node knows the node.
    pub fn has_converged(&self) -> bool {
        let same = self.dial_context.membership.lock().age() >= CONVERGENCE_TIME;
        same && {
            let (known, _) = self.servers();
            known
                .iter()
                .filter(|server| server.listed.load(Relaxed))
                .all(|server| server.is_self() || server.process().is_some())
        }
    }

    /// Records that a server, which may be this one, is stopping: it is no longer a location replica.
    pub(crate) fn set_stopping(&self, server: Instance) {
        let new = self.dial_context.membership.lock().set_stopping(server);
        if new {
            self.dial_context.members_changed.notify_one();
        }
    }

    /// Records whether a server, which may be this one, intercepts. If so, every node is announced to it from now on.
    ///
    /// It may announce this before it is a member. The next update of the members, which this call triggers, forgets
    /// servers that are unknown.
    pub(crate) fn set_intercepting(&self, server: Instance, catches: bool) {
        let changed = self.dial_context.membership.lock().set_intercepting(server, catches);
        if changed {
            self.dial_context.members_changed.notify_one();
        }
    }

    /// Returns the peer with this process, if known.
    pub fn of_process(&self, server: Instance) -> Option<PeerHandle> {
        let servers = self.servers.lock();
        if let Some(known) = servers.known.values().find(|peer| peer.may_be(server)) {
            return Some(PeerHandle(HandleKind::Known(known.clone())));
        }
        let its = servers.incoming.iter().rev().find(|incoming| incoming.sender.instance == Some(server))?;
        Some(PeerHandle(HandleKind::Incoming(its.sender.clone())))
    }

    /// Returns the same peer by a live link, if it was known by a link that has ended.
    pub fn current(&self, server: PeerHandle) -> Option<PeerHandle> {
        if server.is_gone() { self.of_process(server.process()?) } else { Some(server) }
    }

    /// Watches the members. Announces to each the nodes here of which it has become a replica, or all if it intercepts.
    pub(crate) async fn follow_members(self: Arc<Self>) {
        let drain = self.dial_context.drain.clone();
        loop {
            tokio::select! {
                () = drain.draining() => return,
                () = self.dial_context.members_changed.notified() => {}
            }
            let started = Instant::now();
            if self.announce_to_new_members().await {
                // Servers that join and leave endlessly cost at most a tenth of a core.
                sleep(GATHERED.max(9 * started.elapsed())).await;
            }
        }
    }

    /// Returns true if the members have changed.
    async fn announce_to_new_members(&self) -> bool {
        let servers = self.candidates();
        let Some([old, new]) = self.dial_context.membership.lock().update(servers) else { return false };
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

    /// Returns the servers that may be location replicas unless they are stopping: this one, the linked peers, and
    /// peers that were linked when that was last tried.
    fn candidates(&self) -> Vec<Member> {
        let (known, incoming) = self.servers();
        let known = known.iter().filter_map(|peer| peer.process());
        let incoming = incoming.iter().filter_map(|incoming| incoming.sender.instance);
        let servers: Vec<_> = [self.dial_context.own].into_iter().chain(known).chain(incoming).collect();
        let membership = self.dial_context.membership.lock();
        let member = |server| Member { server, generation: membership.generation(server), catches: false };
        servers.into_iter().map(member).take(MAX_KNOWN).collect()
    }

    fn members(&self) -> Arc<Members> {
        self.dial_context.membership.lock().members()
    }
}

/// Servers refresh their lists from DNS every 5 s and dial new ones at once; this adds a wide margin.
const CONVERGENCE_TIME: Duration = Duration::from_secs(30);
/// Changes of members within this time are processed together, because each pass goes through all nodes.
const GATHERED: Duration = Duration::from_millis(100);
/// Number of nodes processed before other tasks may run.
const AT_ONCE: usize = 1000;

#[cfg(test)]
mod tests;
