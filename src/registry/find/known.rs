//! Which pod a node was found at, believed until it proves wrong.

use std::collections::HashMap;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use tokio::time::Instant;

use crate::names::{Instance, NodeName};
use crate::registry::siblings::Pod;

/// Nodes at other pods. Bounded by [`MOST`].
#[derive(Debug, Default)]
pub(super) struct Known(Mutex<HashMap<NodeName, At>>);

/// Where a node is said to be.
#[derive(Debug)]
struct At {
    pod: Pod,
    instance: Option<Instance>,
    /// Since when nobody has it, though it was there: it may be on its way.
    lost: Option<Instant>,
}

impl Known {
    /// The pod that was last said to have the node, and the node's process.
    pub(super) fn of(&self, node: &NodeName) -> Option<(Pod, Option<Instance>)> {
        self.lock().get(node).map(|at| (at.pod.clone(), at.instance))
    }

    /// A pod has said that it has the node.
    pub(super) fn learn(&self, node: &NodeName, pod: Pod, instance: Option<Instance>) {
        let mut nodes = self.lock();
        if nodes.len() >= MOST && !nodes.contains_key(node) {
            // Half of them, whichever: each can be found again.
            let mut keep = false;
            nodes.retain(|_, _| {
                keep = !keep;
                keep
            });
        }
        nodes.insert(node.clone(), At { pod, instance, lost: None });
    }

    /// Nobody has the node. Since when that is so, if it was known to be somewhere.
    pub(super) fn lost(&self, node: &NodeName) -> Option<Duration> {
        self.lock().get_mut(node).map(|at| at.lost.get_or_insert_with(Instant::now).elapsed())
    }

    /// The node is not at that pod.
    pub(super) fn forget(&self, node: &NodeName, pod: &Pod) {
        let mut nodes = self.lock();
        if nodes.get(node).is_some_and(|at| at.pod.is(pod)) {
            nodes.remove(node);
        }
    }

    /// The node is somewhere else.
    pub(super) fn forget_all(&self, node: &NodeName) {
        self.lock().remove(node);
    }

    fn lock(&self) -> MutexGuard<'_, HashMap<NodeName, At>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Nodes that are remembered; a few MiB.
const MOST: usize = 50_000;

#[cfg(test)]
mod tests {
    use super::*;
    use crate::registry::siblings::tests::pod;

    #[tokio::test]
    async fn what_is_remembered_is_bounded_and_forgotten_once_wrong() {
        let (known, one, two) = (Known::default(), pod(1), pod(2));
        for n in 0..MOST + 10 {
            known.learn(&format!("node{n}").parse().unwrap(), one.clone(), None);
        }
        assert!(known.lock().len() <= MOST);
        let newest: NodeName = format!("node{}", MOST + 9).parse().unwrap();
        known.forget(&newest, &two);
        assert!(known.of(&newest).is_some(), "it is not the other pod that was wrong");
        known.forget(&newest, &one);
        assert!(known.of(&newest).is_none());
    }
}
