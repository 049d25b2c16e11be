//! How long an address is intercepted: from its node's first link until the resume timeout after the last one.
//! Pure.

use std::collections::HashMap;
use std::net::IpAddr;
use std::sync::Arc;
use std::time::Duration;

use arc_swap::ArcSwap;
use tokio::time::Instant;

use crate::listener::intercept::InterceptedNode;
use tunnel_base::names::NodeName;

/// The addresses that a server intercepts now, with their nodes. The [`NftReconciler`] updates them from links and
/// claims, and the listeners look up what a client meant.
#[derive(Debug, Default)]
pub(super) struct InterceptedAddresses(ArcSwap<HashMap<IpAddr, InterceptedNode>>);

impl InterceptedAddresses {
    /// Updates from the holders of addresses, the claims that are refused, and the nodes that are linked to any server.
    /// Returns true if that changed anything.
    pub(super) fn update(
        &self,
        holders: &HashMap<IpAddr, NodeName>,
        refused: impl Fn(IpAddr, &NodeName) -> bool,
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
            // An edge's claim ends with its link, so the address may have no holder meanwhile. If another node holds
            // it, or the claim is refused now, the address is released at once.
            let is_its = match holders.get(ip) {
                Some(node) => *node == was.node,
                None => !refused(*ip, &was.node),
            };
            let stays = is_its && !linked(&was.node);
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

    /// Refuses no claim.
    const FREE: fn(IpAddr, &NodeName) -> bool = |_, _| false;

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
            presence.update(&holders, FREE, |_| linked, started + Duration::from_secs(at), RESUME_TIMEOUT)
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
        presence.update(&holders(&[(7, "old")]), FREE, |_| true, now, RESUME_TIMEOUT);
        assert!(presence.update(
            &holders(&[(7, "new")]),
            FREE,
            |node| node.as_str() == "new",
            now,
            RESUME_TIMEOUT
        ));
        assert_eq!(intercepted(&presence), one("new", false));
        // The other node is not an edge, so traffic is no longer intercepted.
        assert!(presence.update(&holders(&[(7, "cloud")]), FREE, |_| false, now, RESUME_TIMEOUT));
        assert!(presence.nodes().is_empty());
    }

    #[tokio::test]
    async fn an_edges_own_claim_outlives_its_link_but_not_its_withdrawal() {
        let now = Instant::now();
        let presence = InterceptedAddresses::default();
        presence.update(&holders(&[(7, "edge7")]), FREE, |_| true, now, RESUME_TIMEOUT);
        presence.update(&holders(&[]), FREE, |_| false, now, RESUME_TIMEOUT);
        assert_eq!(intercepted(&presence), one("edge7", true), "the link has ended, and the claim with it");
        presence.update(&holders(&[(7, "edge7")]), FREE, |_| true, now, RESUME_TIMEOUT);
        presence.update(&holders(&[]), FREE, |_| true, now, RESUME_TIMEOUT);
        assert!(presence.nodes().is_empty(), "the node is linked and no longer claims it");
    }

    #[tokio::test]
    async fn an_address_refused_while_its_node_is_disconnected_is_released_at_once() {
        let now = Instant::now();
        let presence = InterceptedAddresses::default();
        let disconnected = |presence: &InterceptedAddresses, refused| {
            presence.update(&holders(&[]), |_, _| refused, |_| false, now, RESUME_TIMEOUT);
            intercepted(presence)
        };
        presence.update(&holders(&[(7, "edge7")]), FREE, |_| true, now, RESUME_TIMEOUT);
        assert_eq!(disconnected(&presence, false), one("edge7", true));
        assert_eq!(disconnected(&presence, true), []);
        // A source with higher priority than the server's node still claims it.
        presence.update(&holders(&[(7, "edge7")]), FREE, |_| true, now, RESUME_TIMEOUT);
        presence.update(&holders(&[(7, "edge7")]), |_, _| true, |_| false, now, RESUME_TIMEOUT);
        assert_eq!(intercepted(&presence), one("edge7", true));
    }
}
