//! Searches for nodes whose addresses would be intercepted and that are not known to be linked anywhere. Peers
//! announce all their nodes, but a server with too many leaves some out, and one that only DNS names may have no
//! link.

use std::collections::{HashMap, HashSet};
use std::sync::Arc;
use std::time::Duration;

use futures_util::{StreamExt as _, stream};
use tokio::sync::Semaphore;
use tokio::time::Instant;
use tracing::info_span;

use crate::listener::ListenerDeps;
use crate::paths::PathProvider as _;
use tunnel_proto::names::NodeName;

/// Starts searches for nodes, and keeps when each node was searched for.
#[derive(Debug)]
pub(super) struct NodeDiscovery {
    sought: HashMap<NodeName, Instant>,
    /// One permit: a round of searches starts once the previous one has ended.
    free: Arc<Semaphore>,
}

impl NodeDiscovery {
    pub(super) fn new() -> Self {
        Self { sought: HashMap::new(), free: Arc::new(Semaphore::new(1)) }
    }

    /// Searches for those `unknown` nodes that were not searched for recently. Results are stored in the finder.
    pub(super) fn query_unknown(&mut self, unknown: &HashSet<NodeName>, deps: &ListenerDeps) {
        self.sought.retain(|node, at| unknown.contains(node) && at.elapsed() < RETRY_AFTER);
        let due: Vec<_> = unknown.iter().filter(|node| !self.sought.contains_key(*node)).cloned().collect();
        if due.is_empty() || deps.finder.is_alone() {
            return;
        }
        let Ok(permit) = self.free.clone().try_acquire_owned() else { return };
        self.sought.extend(due.iter().map(|node| (node.clone(), Instant::now())));
        let finder = deps.finder.clone();
        let drain = deps.links.clone();
        drain.clone().spawn(info_span!("node_discovery"), async move {
            let all = stream::iter(due).for_each_concurrent(MAX_CONCURRENT_QUERIES, |node| {
                let finder = finder.clone();
                async move { drop(finder.find(&node, None, None).await) }
            });
            let _ = drain.run_until(all).await;
            drop(permit);
        });
    }
}

/// Time after which an unknown node is searched for again.
const RETRY_AFTER: Duration = Duration::from_secs(60);

/// Maximum number of concurrent searches: each is a question to all servers.
const MAX_CONCURRENT_QUERIES: usize = 8;
