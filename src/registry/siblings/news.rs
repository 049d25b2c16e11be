//! Announcements to one other pod: nodes that were linked here or moved, gathered while it has no link or a full one.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use tokio::sync::Notify;
use tokio::time::sleep;

use crate::names::{Instance, NodeName};
use crate::protocol::{Found, LinkSender};
use crate::registry::Registry;

/// Nodes that are to be announced to one other pod. Any thread adds; one task sends.
#[derive(Debug, Default)]
pub(super) struct Announcements {
    /// With what another pod has said of the node, if that is to be forwarded; else that it is linked here.
    nodes: Mutex<HashMap<NodeName, Option<Found>>>,
    more: Notify,
}

impl Announcements {
    /// Adds a node that is linked here, or of which another pod's Found is `forwarded`. One that does not fit is left
    /// out; the other pod then finds it by asking.
    pub(super) fn add(&self, node: &NodeName, forwarded: Option<Found>) {
        let mut nodes = self.lock();
        if nodes.len() < MAX_ANNOUNCED {
            nodes.insert(node.clone(), forwarded);
        }
        drop(nodes);
        self.more.notify_one();
    }

    /// Adds two of the nodes that were linked before the other pod was: enough for what leads to any node, and to know
    /// that there are several. It finds the rest by asking.
    pub(super) fn greet(&self, registry: &Registry) {
        registry.oldest(GREETED).iter().for_each(|node| self.add(node, None));
    }

    /// Forgets all of them, as the link has ended.
    pub(super) fn clear(&self) {
        *self.lock() = HashMap::new();
    }

    /// Waits until a node was added; it may have been sent already. Cancel safe.
    pub(super) async fn come(&self) {
        self.more.notified().await;
    }

    /// Sends all announcements over a link, as fast as that takes them, until the link is closed.
    ///
    /// The set is taken out whole, so adders never wait for the link; nodes that are added meanwhile wait for the next
    /// call. Not cancel safe: a dropped call loses what it had taken out and not sent.
    pub(super) async fn send(&self, to: &Arc<LinkSender>, registry: &Registry, own: Instance) {
        let nodes = std::mem::take(&mut *self.lock());
        for (node, forwarded) in nodes {
            // Looked up again now: the node may have gone since it was added, and then there is nothing to announce.
            let here = || registry.here(&node).map(|linked| linked.found(UNASKED, own));
            let Some(found) = forwarded.or_else(here) else { continue };
            while !to.found(&node, found.clone()) {
                if to.is_closed() {
                    return;
                }
                sleep(FULL).await;
            }
        }
    }

    fn lock(&self) -> MutexGuard<'_, HashMap<NodeName, Option<Found>>> {
        self.nodes.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// The number that marks an announcement: no question has it.
pub(super) const UNASKED: u64 = 0;
/// Nodes that another pod is told of when it is linked.
const GREETED: usize = 2;
/// Nodes that may wait to be announced to one pod: more than a pod has.
const MAX_ANNOUNCED: usize = 50_000;
/// The pause before another try when too much waits on the link.
const FULL: Duration = Duration::from_millis(5);
