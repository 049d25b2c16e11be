//! What another pod is to be told: nodes that have come to this one, gathered while it cannot be told.

use std::collections::HashSet;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use tokio::sync::Notify;
use tokio::time::sleep;

use crate::names::{Instance, NodeName};
use crate::protocol::LinkSender;
use crate::registry::Registry;

/// Nodes that one other pod is to be told of.
#[derive(Debug, Default)]
pub(super) struct Announcements {
    nodes: Mutex<HashSet<NodeName>>,
    more: Notify,
}

impl Announcements {
    /// The node has come here. What does not fit is found when it is asked for.
    pub(super) fn add(&self, node: &NodeName) {
        let mut nodes = self.lock();
        if nodes.len() < MAX_ANNOUNCED {
            nodes.insert(node.clone());
        }
        drop(nodes);
        self.more.notify_one();
    }

    /// Whether there is something to tell.
    pub(super) fn is_empty(&self) -> bool {
        self.lock().is_empty()
    }

    /// Nobody can be told.
    pub(super) fn clear(&self) {
        *self.lock() = HashSet::new();
    }

    /// Waits until there is something to tell, or perhaps was. Cancel safe.
    pub(super) async fn come(&self) {
        self.more.notified().await;
    }

    /// Tells all there is to tell over a link, as fast as it takes it, until the link is closed. What was taken when
    /// this is dropped is not told.
    pub(super) async fn tell(&self, to: &Arc<LinkSender>, registry: &Registry, own: Instance) {
        let nodes = std::mem::take(&mut *self.lock());
        for node in nodes {
            // One that has gone meanwhile is no news.
            let Some(linked) = registry.here(&node) else { continue };
            let found = linked.found(UNASKED, own);
            while !to.found(&node, found) {
                if to.is_closed() {
                    return;
                }
                sleep(FULL).await;
            }
        }
    }

    fn lock(&self) -> MutexGuard<'_, HashSet<NodeName>> {
        self.nodes.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// The question that nobody asked.
pub(super) const UNASKED: u64 = 0;
/// Nodes that wait to be told of to one pod: more than a pod has.
const MAX_ANNOUNCED: usize = 50_000;
/// How long a link with too much to say is left alone.
const FULL: Duration = Duration::from_millis(5);
