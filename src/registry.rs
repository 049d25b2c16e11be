//! Where a node is: the links of this pod, by node name; and below, at which other pod it is.

mod addresses;
mod awaited;
mod balance;
mod cell;
#[cfg(feature = "kubernetes")]
mod cluster;
mod conflicts;
mod dns;
#[cfg(feature = "kubernetes")]
mod endpoints;
mod etcd;
mod find;
#[cfg(feature = "kubernetes")]
mod follow;
mod interactive;
#[cfg(feature = "kubernetes")]
mod kept;
mod linked;
mod moves;
#[cfg(feature = "kubernetes")]
mod nodes;
mod overview;
mod past;
mod publish;
mod shared_file;
mod siblings;
mod uplinks;

use std::collections::HashMap;
use std::net::SocketAddr;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use tokio::sync::watch;
use tokio::time::{Instant, timeout_at};

use crate::names::{Instance, NodeName};
use crate::protocol::LinkSender;
use crate::telemetry::Metrics;

#[cfg(feature = "kubernetes")]
pub use addresses::AddressWatch;
pub use addresses::{
    AddressBook, Claim, Claimant, Claims, FactTable, Facts, Holders, Location, NodeFacts, NotLocated,
    PodFacts, ReadyEndpoint, ServiceFacts, ServicePort, ServiceSide, SliceFacts, Void, Why,
};
pub use awaited::Arrival;
use awaited::Awaited;
pub use balance::{Balance, Weights};
#[cfg(feature = "kubernetes")]
pub use cell::SecretCell;
pub use cell::{Cell, CellError, EtcdCell, FileCell, Seen};
#[cfg(feature = "kubernetes")]
pub use cluster::{Cluster, ClusterError};
use conflicts::Conflicts;
pub use dns::Dns;
#[cfg(feature = "kubernetes")]
pub use endpoints::{EndpointWatch, Endpoints, KnownEndpoints};
pub use etcd::{CALL_TIMEOUT, EtcdAccess, EtcdAnswer, EtcdCalls, EtcdDialer, EtcdError};
pub use find::{Finder, NotFound, Path};
#[cfg(feature = "kubernetes")]
pub(crate) use follow::{MOST_NODE_ADDRESSES, NodeStatus, part_of};
#[cfg(feature = "kubernetes")]
pub use kept::{NodeNameParams, NodeNames, PortParams, PortWatch};
pub use linked::Linked;
#[cfg(feature = "kubernetes")]
pub use nodes::{KnownNodes, NodeWatch};
pub use overview::{Overview, Standing};
pub use past::LastError;
use past::Past;
#[cfg(feature = "kubernetes")]
pub use publish::{ConfigMap, ConfigMapError, ConfigMapParams, Lives};
pub use publish::{Etcd, EtcdParams, Hosts, PublishError, Publisher, Store, Vet};
pub use shared_file::SharedFileError;
pub use siblings::{
    ANNOUNCE_EVERY, FindAnswer, NodeFound, PodAddresses, PodDialer, PodLoad, SiblingPod, Siblings,
    TlsPodDialer, Unreachable,
};
pub use uplinks::Uplinks;

/// The nodes that are linked to this pod. The newest link of a node wins.
///
/// Links come and go on tasks of their own, so two threads may change one node's entry at the same time. One lock holds
/// all entries; it is released before a link is closed, a waiter is woken or a metric changes, because each of these
/// takes another lock. What happens after the release rests on three rules:
///
/// - [`Registry::insert`] and [`Registry::remove`] compare links by their ids under the lock, so a link that ends late
///   never removes the newer one that took its place.
/// - A waiter registers first and looks second ([`Registry::wait`]), so a link that is inserted between the two wakes
///   it.
/// - A link that was read from here may have ended since. Its users see that, as it takes nothing more; no caller
///   relies on it being alive.
#[derive(Debug)]
pub struct Registry {
    nodes: Mutex<Nodes>,
    /// Wakes those who wait for a node, whenever that is linked.
    awaited: Awaited,
    conflicts: Conflicts,
    /// Sent to whenever the set of linked nodes may have changed.
    changed: watch::Sender<()>,
    metrics: Metrics,
}

/// Where a node is.
#[derive(Debug, Clone)]
pub enum NodeLocation {
    /// Linked to this pod.
    Here(Linked),
    /// It is not linked to this pod, perhaps to another. How long ago it last was here; none if never, or forgotten.
    Nowhere(Option<Duration>),
}

/// Another process holds the node's name, and its link is alive.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("node {node} is linked from {from} by another process, which is alive: two machines with one name?")]
pub struct Taken {
    /// The name that both processes use.
    pub node: NodeName,
    /// The address of the process that keeps it.
    pub from: SocketAddr,
}

#[derive(Debug, Default)]
struct Nodes {
    linked: HashMap<NodeName, Linked>,
    /// The older link of a process that keeps two for a while: at most one for each node.
    older: HashMap<NodeName, Linked>,
    /// The link of an edge that has said that it has another one, and stays for the sessions that run there: at most one
    /// for each node. Nobody finds the node by it.
    leaving: HashMap<NodeName, Linked>,
    /// Links for interactive sessions. Nobody finds a node by its one.
    interactive: HashMap<NodeName, Linked>,
    /// When each node that is not linked any more lost its link, and what last went wrong with nodes.
    past: Past,
}

impl Nodes {
    /// Every link, the older ones too.
    fn all(&self) -> Vec<Linked> {
        let aside = self.leaving.values().chain(self.interactive.values());
        self.linked.values().chain(self.older.values()).chain(aside).cloned().collect()
    }
}

impl Registry {
    /// A registry without nodes.
    pub fn new(metrics: Metrics) -> Arc<Self> {
        let changed = watch::Sender::new(());
        let (awaited, conflicts) = (Awaited::default(), Conflicts::default());
        Arc::new(Self { nodes: Mutex::default(), awaited, conflicts, changed, metrics })
    }

    /// Whether the node is linked here, or else when it last was.
    pub fn find(&self, node: &NodeName) -> NodeLocation {
        let nodes = self.lock();
        match nodes.linked.get(node) {
            Some(linked) => NodeLocation::Here(linked.clone()),
            None => NodeLocation::Nowhere(nodes.past.gone(node).map(|at| at.elapsed())),
        }
    }

    /// The link of a node, if it is linked here.
    pub fn here(&self, node: &NodeName) -> Option<Linked> {
        self.lock().linked.get(node).cloned()
    }

    /// A waiter for the node: it is woken by each link of the node, here or at another pod, that comes after this call.
    pub fn arrival(&self, node: &NodeName) -> Arrival<'_> {
        self.awaited.arrival(node)
    }

    /// Wakes those who wait for the node: another pod has announced it.
    pub fn wake_waiters(&self, node: &NodeName) {
        self.awaited.wake(node);
    }

    /// Wakes all who wait for any node: a link to another pod has come up, and the node may be there.
    pub fn told_of_a_pod(&self) {
        self.awaited.wake_all();
    }

    /// Waits until a node has a link other than `not`, at most until `until`. Cancel safe.
    pub async fn wait(&self, node: &NodeName, not: Option<&LinkSender>, until: Instant) -> Option<Linked> {
        loop {
            // The waiter is registered before the look: a link that is inserted between the two wakes it. The other way
            // round it would be missed, and this would wait until the deadline.
            let arrival = self.arrival(node);
            match self.here(node) {
                Some(linked) if not.is_none_or(|not| not.id != linked.sender.id) => return Some(linked),
                _ => timeout_at(until, arrival.come()).await.ok()?,
            }
        }
    }

    /// Checks whether a process may link as `node` from that address. It may not while another process of that name
    /// answers a ping; that one is then sent a Conflict. A plain link cannot be pinged, and its process gives way.
    /// Takes up to 2 s.
    ///
    /// The lock is not held while the ping is under way. Two newcomers may both pass if neither finds the other linked;
    /// then [`Self::insert`] decides, and the later one stays.
    ///
    /// # Errors
    ///
    /// Another process of that name is alive.
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

    /// Makes a link its node's current one. The one before is closed, unless the new one is to stand `beside` it and
    /// belongs to the same process: then the older one is returned, which has fallen silent for its edge, so that sessions
    /// had better go on over the new one. At most two stand side by side, so a third one closes the oldest.
    pub fn insert(&self, linked: Linked, beside: bool) -> Option<Arc<LinkSender>> {
        let node = linked.sender.peer.node().cloned()?;
        let mut nodes = self.lock();
        nodes.past.came(&node);
        let instance = linked.instance;
        let before = nodes.linked.insert(node.clone(), linked);
        let oldest = nodes.older.remove(&node);
        let foreign = nodes.take_foreign(&node, instance);
        let (kept, before): (Vec<_>, Vec<_>) = before.into_iter().partition(|before| {
            beside && before.instance.is_some() && before.instance == instance && !before.sender.is_closed()
        });
        let silent = kept.first().map(|kept| kept.sender.clone());
        nodes.older.extend(kept.into_iter().map(|kept| (node.clone(), kept)));
        self.count(&nodes);
        // Closing takes the link's own lock, and two are never held at once. A link delivers frames until its loop ends.
        drop(nodes);
        for old in oldest.into_iter().chain(foreign).chain(before) {
            tracing::warn!(%node, old = %old.from, "link replaced by a newer one");
            old.sender.close();
        }
        self.awaited.wake(&node);
        self.changed.send_replace(());
        silent
    }

    /// Removes a link that has ended. An older link that stood beside it becomes the node's current one again. Nothing
    /// happens if a newer link has replaced it: by the time a link's end is noticed, the node may be linked anew.
    pub fn remove(&self, sender: &LinkSender) {
        let Some(node) = sender.peer.node() else { return };
        let mut nodes = self.lock();
        if !nodes.take_aside(node, sender) && nodes.take(node, sender).is_some() {
            self.count(&nodes);
            drop(nodes);
            self.changed.send_replace(());
        }
    }

    /// Names of all nodes that are linked here, in no order.
    pub fn nodes(&self) -> Vec<NodeName> {
        self.lock().linked.keys().cloned().collect()
    }

    /// Notices every change of [`Self::nodes`]; several changes between two looks count as one.
    pub fn changes(&self) -> watch::Receiver<()> {
        self.changed.subscribe()
    }

    /// Sends Drain on every link: each edge then links to another pod.
    pub fn drain_all(&self) {
        let all = self.lock().all();
        for linked in all {
            linked.sender.drain(None);
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
