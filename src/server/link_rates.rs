//! Limits how many links a node opens within a minute, and how many log lines they cause.

use std::collections::HashMap;
use std::sync::Arc;

use parking_lot::Mutex;
use tracing::warn;

use tunnel_base::names::NodeName;

/// The links that each node has opened in the current minute. Cheap to clone.
#[derive(Debug, Clone, Default)]
pub(crate) struct LinkRateLimiter(Arc<Mutex<HashMap<NodeName, LinkCount>>>);

/// The links of one node in the current minute.
#[derive(Debug, Default)]
struct LinkCount {
    opened: u32,
    refused: u32,
}

/// How a node's next link is treated.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum LinkRateOutcome {
    /// Accepted; its begin and its end are logged.
    Logged,
    /// Accepted; only the number of such links is logged, at the end of the minute.
    Unlogged,
    /// Refused.
    Refused,
}

impl LinkRateLimiter {
    /// Counts a link that a node is about to open.
    pub(crate) fn count(&self, node: &NodeName) -> LinkRateOutcome {
        let mut nodes = self.0.lock();
        if nodes.len() >= MAX_NODES && !nodes.contains_key(node) {
            return LinkRateOutcome::Unlogged;
        }
        let count = nodes.entry(node.clone()).or_default();
        if count.opened < MAX_LINKS {
            count.opened += 1;
            return if count.opened <= MAX_LOGGED {
                LinkRateOutcome::Logged
            } else {
                LinkRateOutcome::Unlogged
            };
        }
        count.refused += 1;
        LinkRateOutcome::Refused
    }

    /// Ends the minute: logs the nodes with unlogged or refused links, and starts again at 0.
    pub(crate) fn end_minute(&self) {
        let nodes = std::mem::take(&mut *self.0.lock());
        let mut busy: Vec<_> = nodes.into_iter().filter(|(_, count)| count.opened > MAX_LOGGED).collect();
        busy.sort_by_key(|(_, count)| std::cmp::Reverse(count.opened + count.refused));
        for (node, LinkCount { opened, refused }) in busy.iter().take(MAX_SUMMARISED) {
            warn!(
                %node, opened, refused,
                hint = "check whether another process uses the node's token, or its line breaks often",
                "node opened many links within a minute"
            );
        }
        if let Some(nodes) = busy.len().checked_sub(MAX_SUMMARISED).filter(|nodes| *nodes > 0) {
            warn!(nodes, "more nodes opened many links within a minute");
        }
    }
}

/// Maximum number of links of a node in a minute. A line that breaks every second, with a backup link each time, is
/// below it.
pub(crate) const MAX_LINKS: u32 = 120;
/// Maximum number of these that are logged.
const MAX_LOGGED: u32 = 10;
/// Maximum number of nodes in the summary of a minute.
const MAX_SUMMARISED: usize = 20;
/// Maximum number of nodes that are counted. Further nodes are not limited.
const MAX_NODES: usize = 100_000;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_node_that_links_too_often_is_refused_until_the_minute_ends() {
        let rates = LinkRateLimiter::default();
        let [busy, other] = ["node1", "node2"].map(|node| node.parse().unwrap());
        let results: Vec<_> = (0..MAX_LINKS + 1000).map(|_| rates.count(&busy)).collect();
        let of = |kind| results.iter().filter(|result| **result == kind).count();
        assert_eq!(
            [of(LinkRateOutcome::Logged), of(LinkRateOutcome::Unlogged), of(LinkRateOutcome::Refused)],
            [MAX_LOGGED as usize, (MAX_LINKS - MAX_LOGGED) as usize, 1000]
        );
        assert_eq!(rates.count(&other), LinkRateOutcome::Logged);
        rates.end_minute();
        assert_eq!(rates.count(&busy), LinkRateOutcome::Logged);
    }

    #[test]
    fn link_rates_of_endless_names_take_bounded_memory() {
        let rates = LinkRateLimiter::default();
        for n in 0..MAX_NODES + 10 {
            assert_ne!(rates.count(&format!("n{n}").parse().unwrap()), LinkRateOutcome::Refused);
        }
        assert_eq!(rates.0.lock().len(), MAX_NODES);
    }
}
