//! Where a node is: the links of this pod, by node name; and below, at which other pod it is.

#[cfg(feature = "kubernetes")]
pub mod addresses;
mod awaited;
#[cfg(feature = "kubernetes")]
pub mod cluster;
mod conflicts;
pub mod dns;
pub mod find;
pub mod publish;
pub mod siblings;
pub mod uplinks;

use std::collections::HashMap;
use std::net::SocketAddr;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use tokio::sync::watch;
use tokio::time::{Instant, timeout_at};

use crate::names::{Instance, NodeName};
use crate::protocol::{Found, LinkSender};
use crate::telemetry::Metrics;

pub use awaited::Arrival;
use awaited::Awaited;
use conflicts::Conflicts;

/// The nodes that are linked to this pod. The newest link of a node wins.
#[derive(Debug)]
pub struct Registry {
    nodes: Mutex<Nodes>,
    /// Told whenever a node is linked.
    awaited: Awaited,
    conflicts: Conflicts,
    /// Told whenever the set of linked nodes may have changed.
    changed: watch::Sender<()>,
    metrics: Metrics,
}

/// A node's link.
#[derive(Debug, Clone)]
pub struct Linked {
    /// Where to say things.
    pub sender: Arc<LinkSender>,
    /// The edge's process; none if it speaks plain.
    pub instance: Option<Instance>,
    /// Where it comes from.
    pub from: SocketAddr,
}

/// Where a node is.
#[derive(Debug, Clone)]
pub enum NodeLocation {
    /// Linked to this pod.
    Here(Linked),
    /// Nobody knows; linked here so long ago, if ever.
    Nowhere(Option<Duration>),
}

/// Another machine of that name is alive and linked.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("node {node} is linked from {from} by another process, which is alive: two machines with one name?")]
pub struct Taken {
    /// Which name.
    pub node: NodeName,
    /// Where the other one is.
    pub from: SocketAddr,
}

#[derive(Debug, Default)]
struct Nodes {
    linked: HashMap<NodeName, Linked>,
    /// Older links that their processes keep beside those: at most one of each node.
    older: HashMap<NodeName, Linked>,
    /// When nodes that are not linked any more were last; bounded by [`MOST_GONE`].
    gone: HashMap<NodeName, Instant>,
}

impl Nodes {
    /// Every link.
    fn all(&self) -> Vec<Linked> {
        self.linked.values().chain(self.older.values()).cloned().collect()
    }
}

impl Linked {
    /// What another pod is told of the node that is linked here, asked by that question; `own` is this pod, the end of
    /// the sessions of a plain node, which cannot resume.
    pub fn found(&self, question: u64, own: Instance) -> Found {
        Found {
            question,
            here: true,
            heard: self.sender.silence(),
            instance: Some(self.instance.unwrap_or(own)),
            age: Some(self.sender.age()),
        }
    }
}

impl Registry {
    /// No node is linked.
    pub fn new(metrics: Metrics) -> Arc<Self> {
        let changed = watch::Sender::new(());
        let (awaited, conflicts) = (Awaited::default(), Conflicts::default());
        Arc::new(Self { nodes: Mutex::default(), awaited, conflicts, changed, metrics })
    }

    /// Where a node is.
    pub fn find(&self, node: &NodeName) -> NodeLocation {
        let nodes = self.lock();
        match nodes.linked.get(node) {
            Some(linked) => NodeLocation::Here(linked.clone()),
            None => NodeLocation::Nowhere(nodes.gone.get(node).map(Instant::elapsed)),
        }
    }

    /// The link of a node, if it is linked here.
    pub fn here(&self, node: &NodeName) -> Option<Linked> {
        self.lock().linked.get(node).cloned()
    }

    /// From now on notices when the node is linked, here or elsewhere.
    pub fn arrival(&self, node: &NodeName) -> Arrival<'_> {
        self.awaited.arrival(node)
    }

    /// The node is said to be linked elsewhere now.
    pub fn told(&self, node: &NodeName) {
        self.awaited.tell(node);
    }

    /// There is a link to another pod: whoever waits for a node that is not found looks again.
    pub fn told_of_a_pod(&self) {
        self.awaited.tell_all();
    }

    /// Waits until a node has a link other than `not`, at most until `until`. Cancel safe.
    pub async fn wait(&self, node: &NodeName, not: Option<&LinkSender>, until: Instant) -> Option<Linked> {
        loop {
            // Begun before looking, so that a link that comes in between is not missed.
            let arrival = self.arrival(node);
            match self.here(node) {
                Some(linked) if not.is_none_or(|not| not.id != linked.sender.id) => return Some(linked),
                _ => timeout_at(until, arrival.come()).await.ok()?,
            }
        }
    }

    /// Whether a process may link as `node`, from that address: not while another one of that name is alive, which is
    /// told. A plain link cannot be asked and gives way. Takes up to 2 s.
    ///
    /// # Errors
    ///
    /// Another one is alive.
    pub async fn admit(
        &self,
        node: &NodeName,
        instance: Option<Instance>,
        from: SocketAddr,
    ) -> Result<(), Taken> {
        let NodeLocation::Here(old) = self.find(node) else { return Ok(()) };
        if old.instance.is_none() || old.instance == instance {
            return Ok(());
        }
        if old.sender.answers_within(PONG_TIMEOUT).await {
            return Err(self.keeps(node, &old, &format!("from {from}")));
        }
        tracing::warn!(%node, old = %old.from, "the old link does not answer and is replaced by another process");
        Ok(())
    }

    /// Makes a link the one of its node. The one before is closed, unless the new one is to stand `beside` it and is of
    /// the same process; a third one closes the oldest.
    pub fn insert(&self, linked: Linked, beside: bool) {
        let Some(node) = linked.sender.peer.node().cloned() else { return };
        let mut nodes = self.lock();
        nodes.gone.remove(&node);
        let instance = linked.instance;
        let before = nodes.linked.insert(node.clone(), linked);
        let oldest = nodes.older.remove(&node);
        let (kept, before): (Vec<_>, Vec<_>) = before.into_iter().partition(|before| {
            beside && before.instance.is_some() && before.instance == instance && !before.sender.is_closed()
        });
        nodes.older.extend(kept.into_iter().map(|kept| (node.clone(), kept)));
        self.count(&nodes);
        drop(nodes);
        for old in oldest.into_iter().chain(before) {
            tracing::warn!(%node, old = %old.from, "link replaced by a newer one");
            old.sender.close();
        }
        self.awaited.tell(&node);
        self.changed.send_replace(());
    }

    /// Removes a link that has ended, unless a newer one has its place. One that stood beside it takes its place.
    pub fn remove(&self, sender: &LinkSender) {
        let Some(node) = sender.peer.node() else { return };
        let mut nodes = self.lock();
        if nodes.older.get(node).is_some_and(|older| older.sender.id == sender.id) {
            nodes.older.remove(node);
        } else if nodes.linked.get(node).is_some_and(|linked| linked.sender.id == sender.id)
            && let Some(older) = nodes.older.remove(node)
        {
            nodes.linked.insert(node.clone(), older);
        } else if nodes.linked.get(node).is_some_and(|linked| linked.sender.id == sender.id) {
            nodes.linked.remove(node);
            if nodes.gone.len() >= MOST_GONE {
                nodes.gone.retain(|_, at| at.elapsed() < Duration::from_secs(600));
            }
            if nodes.gone.len() < MOST_GONE {
                nodes.gone.insert(node.clone(), Instant::now());
            }
            self.count(&nodes);
            drop(nodes);
            self.changed.send_replace(());
        }
    }

    /// Names of all nodes that are linked here, in no order.
    pub fn nodes(&self) -> Vec<NodeName> {
        self.lock().linked.keys().cloned().collect()
    }

    /// Tells of every change of [`Self::nodes`]; changes that nobody looked at meanwhile are told once.
    pub fn changes(&self) -> watch::Receiver<()> {
        self.changed.subscribe()
    }

    /// Asks every edge to link to another pod.
    pub fn drain_all(&self) {
        let all = self.lock().all();
        for linked in all {
            linked.sender.drain();
        }
    }

    /// Closes every link.
    pub fn close_all(&self) {
        let all = self.lock().all();
        for linked in all {
            linked.sender.close();
        }
    }

    fn count(&self, nodes: &Nodes) {
        self.metrics.nodes.set(i64::try_from(nodes.linked.len()).unwrap_or(i64::MAX));
    }

    fn lock(&self) -> MutexGuard<'_, Nodes> {
        self.nodes.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// How long an old link has to show that its process is alive, when another one comes with its name.
const PONG_TIMEOUT: Duration = Duration::from_secs(2);
/// Nodes of which we remember when they were here.
const MOST_GONE: usize = 20_000;
