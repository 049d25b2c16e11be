//! Looks for nodes whose addresses would be caught, and of which this pod has not heard that any pod has them: it is told of
//! every node, but by older pods only of those of which it is a home, and of those that it has asked for.

use std::collections::{HashMap, HashSet};
use std::sync::Arc;
use std::time::Duration;

use futures_util::{StreamExt as _, stream};
use tokio::sync::Semaphore;
use tokio::time::Instant;
use tracing::info_span;

use crate::cloud::context::PodContext;
use crate::names::NodeName;

/// What was sought, and when.
#[derive(Debug)]
pub(super) struct Seeker {
    sought: HashMap<NodeName, Instant>,
    /// One permit: a search begins once the one before has ended.
    free: Arc<Semaphore>,
}

impl Seeker {
    pub(super) fn new() -> Self {
        Self { sought: HashMap::new(), free: Arc::new(Semaphore::new(1)) }
    }

    /// Asks the other pods for those of the `unknown` nodes for which nobody was asked for a while. What is found shows in
    /// the finder.
    pub(super) fn step(&mut self, unknown: &HashSet<NodeName>, shared: &PodContext) {
        self.sought.retain(|node, at| unknown.contains(node) && at.elapsed() < AGAIN);
        let due: Vec<_> = unknown.iter().filter(|node| !self.sought.contains_key(*node)).cloned().collect();
        if due.is_empty() || shared.finder.is_alone() {
            return;
        }
        let Ok(permit) = self.free.clone().try_acquire_owned() else { return };
        self.sought.extend(due.iter().map(|node| (node.clone(), Instant::now())));
        let (finder, drain) = (shared.finder.clone(), shared.ground.drain.clone());
        drain.clone().spawn(info_span!("seek"), async move {
            let all = stream::iter(due).for_each_concurrent(AT_ONCE, |node| {
                let finder = finder.clone();
                async move { drop(finder.find(&node, None, None).await) }
            });
            tokio::select! {
                () = drain.draining() => {}
                () = all => {}
            }
            drop(permit);
        });
    }
}

/// A node that is nowhere is asked for again after that.
const AGAIN: Duration = Duration::from_secs(60);

/// Nodes that are sought at once: each is a question to three pods, and may be one to all.
const AT_ONCE: usize = 8;
