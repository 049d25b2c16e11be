//! Who waits for which node, so that a node that comes wakes only those who wait for it.
//!
//! The order is always: make an [`Arrival`], then look whether the node is there, then wait. An arrival notices every
//! node that comes after it was made, so nothing is lost between the look and the wait. The entry of a node is made and
//! removed under one lock together with its count; waking happens after the lock is released, on a handle taken under
//! it, and at worst wakes a waiter that has just left.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use tokio::sync::watch;

use crate::names::NodeName;

/// The nodes that somebody waits for.
#[derive(Debug, Default)]
pub(super) struct Awaited(Mutex<HashMap<NodeName, Waiters>>);

/// Who waits for one node.
#[derive(Debug)]
struct Waiters {
    wake: Arc<watch::Sender<()>>,
    /// How many wait. It is counted under the lock rather than read from the channel: two waiters that leave at the
    /// same time would each still see the other's receiver, and the entry would stay for ever.
    count: usize,
}

/// A waiter for one node: it notices each time the node comes after the waiter was made.
#[derive(Debug)]
pub struct Arrival<'a> {
    awaited: &'a Awaited,
    node: NodeName,
    wake_waiters: watch::Receiver<()>,
}

impl Awaited {
    pub(super) fn arrival(&self, node: &NodeName) -> Arrival<'_> {
        let mut awaited = self.lock();
        let new = || Waiters { wake: Arc::new(watch::Sender::new(())), count: 0 };
        let waiting = awaited.entry(node.clone()).or_insert_with(new);
        waiting.count += 1;
        let wake_waiters = waiting.wake.subscribe();
        drop(awaited);
        Arrival { awaited: self, node: node.clone(), wake_waiters }
    }

    pub(super) fn wake(&self, node: &NodeName) {
        let waiting = self.lock().get(node).map(|waiting| waiting.wake.clone());
        if let Some(waiting) = waiting {
            waiting.send_replace(());
        }
    }

    /// Wakes every waiter, as any of the nodes may have come.
    pub(super) fn wake_all(&self) {
        let waiting: Vec<_> = self.lock().values().map(|waiting| waiting.wake.clone()).collect();
        for waiting in waiting {
            waiting.send_replace(());
        }
    }

    fn lock(&self) -> MutexGuard<'_, HashMap<NodeName, Waiters>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Arrival<'_> {
    /// Waits until the node comes; returns at once if it has come since this waiter was made. Cancel safe.
    pub async fn come(&self) {
        let mut wake_waiters = self.wake_waiters.clone();
        if wake_waiters.changed().await.is_err() {
            // Never reached: this waiter is counted, and the sender lives as long as anybody is.
            std::future::pending::<()>().await;
        }
    }
}

impl Drop for Arrival<'_> {
    fn drop(&mut self) {
        let mut awaited = self.awaited.lock();
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
    use super::*;
    use futures_util::FutureExt as _;

    #[tokio::test]
    async fn only_who_waits_for_that_node_hears_of_it_and_nothing_is_kept() {
        let awaited = Awaited::default();
        let (one, two): (NodeName, NodeName) = ("one".parse().unwrap(), "two".parse().unwrap());
        let (first, second, other) = (awaited.arrival(&one), awaited.arrival(&one), awaited.arrival(&two));
        awaited.wake(&one);
        assert!(first.come().now_or_never().is_some() && second.come().now_or_never().is_some());
        assert!(other.come().now_or_never().is_none());
        drop(first);
        awaited.wake(&one);
        assert!(second.come().now_or_never().is_some());
        drop((second, other));
        assert!(awaited.lock().is_empty());
    }

    #[test]
    fn nothing_is_kept_of_two_who_stop_waiting_at_once() {
        let awaited = Awaited::default();
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
            assert!(awaited.lock().is_empty());
        }
    }
}
