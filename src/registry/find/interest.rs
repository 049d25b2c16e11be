//! Which pods have asked for a node whose home this pod is: they are told when it moves.

use std::collections::HashMap;
use std::sync::{Mutex, MutexGuard, PoisonError};

use crate::names::{Instance, NodeName};

/// The pods that have asked for each node, the latest last.
#[derive(Debug, Default)]
pub(super) struct Interest(Mutex<HashMap<NodeName, Vec<Instance>>>);

impl Interest {
    /// Notes that a pod has asked for the node.
    pub(super) fn note(&self, node: &NodeName, pod: Instance) {
        let mut nodes = self.lock();
        if nodes.len() >= MOST_NODES && !nodes.contains_key(node) {
            // Half of them, whichever: who is not told finds the node by asking again.
            let mut keep = false;
            nodes.retain(|_, _| {
                keep = !keep;
                keep
            });
        }
        let pods = nodes.entry(node.clone()).or_default();
        pods.retain(|known| *known != pod);
        if pods.len() >= MOST_PODS {
            pods.remove(0);
        }
        pods.push(pod);
    }

    /// Those that have asked for the node.
    pub(super) fn of(&self, node: &NodeName) -> Vec<Instance> {
        self.lock().get(node).cloned().unwrap_or_default()
    }

    fn lock(&self) -> MutexGuard<'_, HashMap<NodeName, Vec<Instance>>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Nodes of which it is remembered who has asked; some MiB.
const MOST_NODES: usize = 50_000;
/// Pods that are told of one node: what a node that moves costs must not grow with the number of pods.
const MOST_PODS: usize = 8;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_latest_few_that_asked_are_known_and_no_names_make_it_grow() {
        let (interest, node) = (Interest::default(), "node1".parse().unwrap());
        let pod = |n: usize| Instance::from_bits(n as u128);
        for n in [0, 1, 0].into_iter().chain(2..MOST_PODS + 1) {
            interest.note(&node, pod(n));
        }
        let latest: Vec<_> = [0].into_iter().chain(2..MOST_PODS + 1).map(pod).collect();
        assert_eq!(interest.of(&node), latest);
        for n in 0..2 * MOST_NODES {
            interest.note(&format!("other{n}").parse().unwrap(), pod(1));
        }
        assert!(interest.lock().len() <= MOST_NODES);
    }
}
