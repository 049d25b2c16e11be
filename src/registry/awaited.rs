//! Who waits for which node, so that a node that comes wakes only those who wait for it.

use std::collections::HashMap;
use std::collections::hash_map::Entry;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use tokio::sync::watch;

use crate::names::NodeName;

/// The nodes that somebody waits for.
#[derive(Debug, Default)]
pub(super) struct Awaited(Mutex<HashMap<NodeName, Arc<watch::Sender<()>>>>);

/// Notices that a node comes, from the moment it was made.
#[derive(Debug)]
pub struct Arrival<'a> {
    awaited: &'a Awaited,
    node: NodeName,
    told: watch::Receiver<()>,
}

impl Awaited {
    pub(super) fn arrival(&self, node: &NodeName) -> Arrival<'_> {
        let told = match self.lock().entry(node.clone()) {
            Entry::Occupied(known) => known.get().subscribe(),
            Entry::Vacant(new) => new.insert(Arc::new(watch::Sender::new(()))).subscribe(),
        };
        Arrival { awaited: self, node: node.clone(), told }
    }

    pub(super) fn tell(&self, node: &NodeName) {
        let waiting = self.lock().get(node).cloned();
        if let Some(waiting) = waiting {
            waiting.send_replace(());
        }
    }

    /// Any of them may have come.
    pub(super) fn tell_all(&self) {
        let waiting: Vec<_> = self.lock().values().cloned().collect();
        for waiting in waiting {
            waiting.send_replace(());
        }
    }

    fn lock(&self) -> MutexGuard<'_, HashMap<NodeName, Arc<watch::Sender<()>>>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Arrival<'_> {
    /// Waits until the node has come since this was made. Cancel safe.
    pub async fn come(&self) {
        let mut told = self.told.clone();
        if told.changed().await.is_err() {
            // Its sender lives as long as this.
            std::future::pending::<()>().await;
        }
    }
}

impl Drop for Arrival<'_> {
    fn drop(&mut self) {
        let mut awaited = self.awaited.lock();
        if awaited.get(&self.node).is_some_and(|waiting| waiting.receiver_count() <= 1) {
            awaited.remove(&self.node);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use futures_util::FutureExt as _;

    #[tokio::test]
    async fn only_who_waits_for_that_node_hears_of_it_and_nothing_is_kept() {
        let awaited = Awaited::default();
        let (one, two): (NodeName, NodeName) = ("one".parse().unwrap(), "two".parse().unwrap());
        let (first, second, other) = (awaited.arrival(&one), awaited.arrival(&one), awaited.arrival(&two));
        awaited.tell(&one);
        assert!(first.come().now_or_never().is_some() && second.come().now_or_never().is_some());
        assert!(other.come().now_or_never().is_none());
        drop(first);
        awaited.tell(&one);
        assert!(second.come().now_or_never().is_some());
        drop((second, other));
        assert!(awaited.lock().is_empty());
    }
}
