//! How long an address is intercepted: from its node's first link until the resume timeout after the last one.
//! Pure.

use std::collections::HashMap;
use std::net::IpAddr;
use std::sync::Arc;
use std::time::Duration;

use arc_swap::ArcSwap;
use tokio::time::Instant;

use crate::listener::intercept::InterceptedNode;
use tunnel_proto::names::NodeName;

/// The addresses that a server intercepts now, with their nodes. The [`NftReconciler`] updates them from links and
/// claims, and the listeners look up what a client meant.
#[derive(Debug, Default)]
pub(super) struct InterceptedAddresses(ArcSwap<HashMap<IpAddr, InterceptedNode>>);

impl InterceptedAddresses {
    /// Updates from the holders of addresses and the nodes that are linked to any server. Returns true if that changed
    /// anything.
    pub(super) fn update(
        &self,
        holders: &HashMap<IpAddr, NodeName>,
        linked: impl Fn(&NodeName) -> bool,
        now: Instant,
        resume_timeout: Duration,
    ) -> bool {
        let old = self.nodes();
        let mut next = HashMap::with_capacity(old.len());
        for (ip, node) in holders {
            if linked(node) {
                next.insert(*ip, InterceptedNode { node: node.clone(), left: None });
            }
        }
        for (ip, was) in &*old {
            let stays = holders.get(ip) == Some(&was.node) && !linked(&was.node);
            let left = was.left.unwrap_or(now);
            if stays && now - left < resume_timeout {
                next.insert(*ip, InterceptedNode { left: Some(left), ..was.clone() });
            }
        }
        let changed = *old != next;
        self.0.store(Arc::new(next));
        changed
    }

    /// Returns all intercepted addresses.
    pub(super) fn nodes(&self) -> Arc<HashMap<IpAddr, InterceptedNode>> {
        self.0.load_full()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const RESUME_TIMEOUT: Duration = Duration::from_secs(60);

    /// Returns holders of the addresses 10.0.0.N, each a node of that name.
    fn holders(of: &[(u8, &str)]) -> HashMap<IpAddr, NodeName> {
        of.iter().map(|(last, node)| ([10, 0, 0, *last].into(), node.parse().unwrap())).collect()
    }

    fn intercepted(presence: &InterceptedAddresses) -> Vec<(String, String, bool)> {
        let nodes = presence.nodes();
        let mut all: Vec<_> =
            nodes.iter().map(|(ip, at)| (ip.to_string(), at.node.to_string(), at.left.is_some())).collect();
        all.sort();
        all
    }

    fn one(node: &str, left: bool) -> Vec<(String, String, bool)> {
        vec![("10.0.0.7".to_owned(), node.to_owned(), left)]
    }

    #[tokio::test(start_paused = true)]
    async fn an_address_is_intercepted_until_the_resume_timeout_after_its_nodes_last_link() {
        let (presence, holders, started) =
            (InterceptedAddresses::default(), holders(&[(7, "edge7")]), Instant::now());
        let step = |presence: &InterceptedAddresses, linked: bool, at: u64| {
            presence.update(&holders, |_| linked, started + Duration::from_secs(at), RESUME_TIMEOUT)
        };
        assert!(!step(&presence, false, 0), "it was never linked");
        assert!(step(&presence, true, 1) && !step(&presence, true, 2));
        assert_eq!(intercepted(&presence), one("edge7", false));
        assert!(step(&presence, false, 10) && !step(&presence, false, 69));
        assert_eq!(intercepted(&presence), one("edge7", true));
        // It links again, and its resume timeout starts again.
        assert!(step(&presence, true, 69) && step(&presence, false, 70) && !step(&presence, false, 129));
        assert!(step(&presence, false, 130));
        assert!(presence.nodes().is_empty());
    }

    #[tokio::test]
    async fn an_address_of_another_node_now_is_released_at_once() {
        let now = Instant::now();
        let presence = InterceptedAddresses::default();
        presence.update(&holders(&[(7, "old")]), |_| true, now, RESUME_TIMEOUT);
        assert!(presence.update(&holders(&[(7, "new")]), |node| node.as_str() == "new", now, RESUME_TIMEOUT));
        assert_eq!(intercepted(&presence), one("new", false));
        // The other node is not an edge, so traffic is no longer intercepted.
        assert!(presence.update(&holders(&[(7, "cloud")]), |_| false, now, RESUME_TIMEOUT));
        assert!(presence.nodes().is_empty());
    }

    #[tokio::test]
    async fn an_address_that_its_node_may_no_longer_have_is_released_at_once() {
        let now = Instant::now();
        let presence = InterceptedAddresses::default();
        for linked in [true, false] {
            presence.update(&holders(&[(7, "edge7")]), |_| true, now, RESUME_TIMEOUT);
            assert!(presence.update(&holders(&[]), |_| linked, now, RESUME_TIMEOUT));
            assert!(presence.nodes().is_empty());
        }
    }
}
