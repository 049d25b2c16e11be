//! Waiters of nodes, by node name, so that a node that links wakes only its own waiters.
//!
//! The order is always: create a [`NodeWaiter`], check whether the node is linked, then wait. A waiter notices
//! every link after its creation, so none is lost between the check and the wait. A node's entry is created and
//! removed under one lock together with its count. Waking happens after the lock is released, on a handle taken
//! under it, and at worst wakes a waiter that has just left.

use std::collections::HashMap;
use std::sync::Arc;

use parking_lot::Mutex;
use tokio::sync::watch;

use tunnel_proto::names::NodeName;

/// The waiters of all nodes that are waited for.
#[derive(Debug, Default)]
pub(crate) struct NodeWaiters(Mutex<HashMap<NodeName, Waiters>>);

/// The waiters of one node, woken when it links.
#[derive(Debug)]
struct Waiters {
    wake: Arc<watch::Sender<()>>,
    /// Number of waiters. It is counted under the lock, not read from the channel: two waiters that leave at the same
    /// time would each still see the other's receiver, and the entry would stay forever.
    count: usize,
}

/// A waiter for one node. It notices each link of the node after its creation.
#[derive(Debug)]
pub struct NodeWaiter<'a> {
    awaited: &'a NodeWaiters,
    node: NodeName,
    wake_waiters: watch::Receiver<()>,
}

impl NodeWaiters {
    pub(crate) fn arrival(&self, node: &NodeName) -> NodeWaiter<'_> {
        let mut awaited = self.0.lock();
        let waiting = awaited
            .entry(node.clone())
            .or_insert_with(|| Waiters { wake: Arc::new(watch::Sender::new(())), count: 0 });
        waiting.count += 1;
        let wake_waiters = waiting.wake.subscribe();
        drop(awaited);
        NodeWaiter { awaited: self, node: node.clone(), wake_waiters }
    }

    pub(crate) fn wake(&self, node: &NodeName) {
        let waiting = self.0.lock().get(node).map(|waiting| waiting.wake.clone());
        if let Some(waiting) = waiting {
            waiting.send_replace(());
        }
    }

    /// Wakes every waiter, because any of the nodes may have linked.
    pub(crate) fn wake_all(&self) {
        let waiting: Vec<_> = self.0.lock().values().map(|waiting| waiting.wake.clone()).collect();
        for waiting in waiting {
            waiting.send_replace(());
        }
    }
}

impl NodeWaiter<'_> {
    /// Waits until the node links; returns at once if it has linked since this waiter was created. Cancel safe.
    pub async fn wait(&self) {
        // The sender lives while this waiter is counted.
        let _ = self.wake_waiters.clone().changed().await;
    }
}

impl Drop for NodeWaiter<'_> {
    fn drop(&mut self) {
        let mut awaited = self.awaited.0.lock();
        if let Some(waiting) = awaited.get_mut(&self.node) {
            waiting.count -= 1;
            if waiting.count == 0 {
                awaited.remove(&self.node);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use futures_util::FutureExt as _;

    use super::*;

    #[tokio::test]
    async fn only_waiters_for_that_node_are_woken_and_then_forgotten() {
        let awaited = NodeWaiters::default();
        let (one, two): (NodeName, NodeName) = ("one".parse().unwrap(), "two".parse().unwrap());
        let (first, second, other) = (awaited.arrival(&one), awaited.arrival(&one), awaited.arrival(&two));
        awaited.wake(&one);
        assert!(first.wait().now_or_never().is_some() && second.wait().now_or_never().is_some());
        assert!(other.wait().now_or_never().is_none());
        drop(first);
        awaited.wake(&one);
        assert!(second.wait().now_or_never().is_some());
        drop((second, other));
        assert!(awaited.0.lock().is_empty());
    }

    #[test]
    fn two_waiters_dropped_at_once_leave_no_entry() {
        let awaited = NodeWaiters::default();
        let node: NodeName = "one".parse().unwrap();
        for _ in 0..20_000 {
            let (first, second) = (awaited.arrival(&node), awaited.arrival(&node));
            let both = std::sync::Barrier::new(2);
            std::thread::scope(|threads| {
                threads.spawn(|| {
                    both.wait();
                    drop(first);
                });
                both.wait();
                drop(second);
            });
            assert!(awaited.0.lock().is_empty());
        }
    }
}
