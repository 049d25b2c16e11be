//! Which of two links of one node stays, here or at a peer, and which process keeps the name.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;

use futures_util::future::join_all;
use parking_lot::Mutex;
use tokio::join;
use tokio::time::Instant;

use crate::registry::{Finder, LinkedNode, NameInUse, Registry};
use tunnel_base::limited;
use tunnel_base::refusal_log::RefusalLog;
use tunnel_link::link::Link;
use tunnel_link::liveness::Suspicion;
use tunnel_proto::frame::{Conflict, Found};
use tunnel_proto::names::{Instance, NodeName};

/// The process at a peer that was last refused each name, and when; at most [`MAX_TRACKED_NAMES`].
#[derive(Debug, Default)]
pub(crate) struct Conflicts(Mutex<HashMap<NodeName, (Option<Instance>, Instant)>>);

impl Registry {
    /// Keeps the name for a node that is linked here and alive, and rejects another process that tried to link at
    /// `place`.
    ///
    /// Logs the conflict and sends the node a Conflict. Returns the error for the other process.
    pub(crate) fn reject_newcomer(&self, node: &NodeName, linked: &LinkedNode, place: &str) -> NameInUse {
        let why = format!(
            "another process tried to link as node {node} {place} and was rejected while this one is alive; give each \
             machine its own name"
        );
        self.log_conflict(node, &why);
        linked.link.conflict(node, linked.link.instance, why);
        NameInUse { node: node.clone(), from: linked.from }
    }

    /// Closes all links of a process that is linked here and loses its name to another one, with that reason.
    pub(crate) fn close_loser(&self, node: &NodeName, linked: &LinkedNode, why: String) {
        self.log_conflict(node, &why);
        let of_loser = |link: &Arc<Link>| link.instance == linked.link.instance;
        for link in self.secondary_links(node).into_iter().filter(of_loser) {
            link.close_name_taken(why.clone());
        }
        linked.link.close_name_taken(why);
    }

    fn log_conflict(&self, node: &NodeName, why: &str) {
        self.metrics.node_name_conflicts.inc();
        limited!(
            self.metrics.refusals.may_log_once("name_conflict", node) => warn,
            %node, reason = %why, "node name conflict"
        );
    }
}

impl Conflicts {
    /// Records that a process at a peer was refused the name. Only names refused over [`MIN_TRACKED`] ago make room.
    fn record_refused(&self, node: &NodeName, from: Option<Instance>) {
        let mut all = self.0.lock();
        if all.len() >= MAX_TRACKED_NAMES {
            all.retain(|_, (_, at)| at.elapsed() < MIN_TRACKED);
        }
        if all.len() < MAX_TRACKED_NAMES {
            all.insert(node.clone(), (from, Instant::now()));
        }
    }

    /// Returns true if that process was the last to be refused the name.
    fn was_refused(&self, node: &NodeName, from: Instance) -> bool {
        self.0.lock().get(node).is_some_and(|(last, _)| *last == Some(from))
    }
}

/// Maximum number of tracked names.
const MAX_TRACKED_NAMES: usize = 1000;
/// Minimum time for which a name is tracked: both servers send a Conflict within moments.
const MIN_TRACKED: Duration = Duration::from_secs(60);

/// Pings a link of a node that was `found` elsewhere. Returns true if it answers, and closes it otherwise.
async fn close_unless_answered(link: &Link, node: &NodeName, found: &Found, refusals: &RefusalLog) -> bool {
    let suspicion = if found.instance == link.instance {
        Suspicion::EdgeMoved { idle: link.idle_for(), line: link.line_round_trip() }
    } else {
        Suspicion::NameRequested
    };
    let answers = link.is_alive(suspicion).await;
    // An edge that has moved closes its previous link.
    if !answers && !link.is_closed() {
        let message = match found.instance == link.instance {
            true => "previous link closed, its edge has linked to a peer",
            false => "unresponsive link closed, node is linked to a peer",
        };
        limited!(refusals.may_log_about("link_closed", node) => info, link = %link.id, %node, "{message}");
        link.close();
    }
    answers
}

impl Finder {
    /// Resolves where a node stays after the server with process `at` has announced it there.
    ///
    /// Pings each link of the node here, including the interactive one. Closes those that do not answer within 1 s, or
    /// 2 s if the two processes differ. A link of the same process gets less time if nothing was received on it for
    /// a while.
    ///
    /// If the process here answers and its link is the older one, it keeps the name, and the other server gets a
    /// Conflict.
    pub async fn resolve_conflict(&self, at: Instance, node: &NodeName, found: Found) {
        let secondary_links = self.registry.secondary_links(node);
        let refusals = &self.registry.metrics.refusals;
        let checks = secondary_links.iter().map(|link| close_unless_answered(link, node, &found, refusals));
        join!(join_all(checks), self.contest_current(at, node, &found));
    }

    async fn contest_current(&self, at: Instance, node: &NodeName, found: &Found) {
        let Some(linked) = self.registry.link_of(node) else { return };
        // Whether it is alive cannot be found out.
        if !linked.link.abilities.signals {
            return;
        }
        let same = found.instance == linked.link.instance;
        let older = found.age.is_some_and(|age| age < linked.link.age());
        let refusals = &self.registry.metrics.refusals;
        if !close_unless_answered(&linked.link, node, found, refusals).await || same || !older {
            return;
        }
        let Some(others) = self.others() else { return };
        let Ok(other) = others.peers.process(at).await else { return };
        let place = format!("at peer {}", others.peers.peer_of(&other));
        let taken = self.registry.reject_newcomer(node, &linked, &place);
        self.registry.conflicts.record_refused(node, found.instance);
        other.conflict(node, linked.link.instance, taken);
    }

    /// Handles a Conflict from a peer: a process there keeps the node's name, because it is alive and its link is
    /// older.
    ///
    /// Both servers may send this at the same time. If the ages of the links differ by less than a frame's time between
    /// the servers, each finds its own link the older one. Then both servers decide that the process with the larger
    /// number loses the name.
    pub fn handle_conflict(&self, node: &NodeName, conflict: Conflict) {
        let Some(linked) = self.registry.link_of(node) else { return };
        let own = linked.link.instance;
        let Some(keeper) = conflict.instance.filter(|_| conflict.instance != own) else { return };
        let smaller = own.is_some_and(|own| own.to_bytes() < keeper.to_bytes());
        if smaller && self.registry.conflicts.was_refused(node, keeper) {
            return;
        }
        self.registry.close_loser(node, &linked, conflict.reason);
    }
}

#[cfg(test)]
mod tests {
    use tunnel_base::metrics::Metrics;
    use tunnel_proto::frame::Remote;
    use tunnel_proto::state::LinkId;

    use super::*;

    fn linked(number: u64) -> LinkedNode {
        let peer = Remote::Edge("node1".parse().unwrap());
        let link = Link::new(LinkId(number), peer, Some(Instance::from_bits(7)));
        LinkedNode { link, from: ([10, 0, 0, 1], 1).into() }
    }

    #[tokio::test(start_paused = true)]
    async fn refused_names_are_bounded_and_old_ones_make_room() {
        let conflicts = Conflicts::default();
        let node = |n: usize| format!("node{n}").parse::<NodeName>().unwrap();
        let process = Instance::from_bits(7);
        for n in 0..=MAX_TRACKED_NAMES {
            conflicts.record_refused(&node(n), Some(process));
        }
        assert!(
            conflicts.was_refused(&node(0), process)
                && !conflicts.was_refused(&node(MAX_TRACKED_NAMES), process)
        );
        tokio::time::advance(MIN_TRACKED).await;
        conflicts.record_refused(&node(MAX_TRACKED_NAMES), Some(process));
        assert!(
            !conflicts.was_refused(&node(0), process)
                && conflicts.was_refused(&node(MAX_TRACKED_NAMES), process)
        );
    }

    #[tokio::test]
    async fn a_process_that_loses_a_name_conflict_loses_all_its_links() {
        let registry = Registry::new(Metrics::server("", ""));
        let [older, primary, interactive] = [1, 2, 3].map(linked);
        registry.insert(primary.clone(), false);
        registry.add_secondary(interactive.clone(), true).unwrap();
        registry.insert(older.clone(), true);
        let node = "node1".parse().unwrap();
        registry.close_loser(&node, &registry.link_of(&node).unwrap(), "another machine".into());
        for LinkedNode { link, .. } in [older, primary, interactive] {
            assert!(link.is_closed(), "{:?}", link.id);
        }
    }
}
