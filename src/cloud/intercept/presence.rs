//! How long an address is caught: from its node's link to the grace time behind the last one. Pure.

use std::collections::HashMap;
use std::net::IpAddr;
use std::time::Duration;

use tokio::time::Instant;

use crate::frontend::CaughtNode;
use crate::names::NodeName;

/// The addresses that are caught.
#[derive(Debug, Default)]
pub(super) struct Presence(HashMap<IpAddr, CaughtNode>);

impl Presence {
    /// Takes in whose each address is, which ones no node may have on an edge's word, and which nodes are linked to any pod.
    /// Whether that has changed anything.
    pub(super) fn step(
        &mut self,
        holders: &HashMap<IpAddr, NodeName>,
        refused: impl Fn(IpAddr, &NodeName) -> bool,
        linked: impl Fn(&NodeName) -> bool,
        now: Instant,
        grace: Duration,
    ) -> bool {
        let mut next = HashMap::with_capacity(self.0.len());
        for (ip, node) in holders {
            if linked(node) {
                next.insert(*ip, CaughtNode { node: node.clone(), left: None });
            }
        }
        for (ip, was) in &self.0 {
            // What an edge itself says ends with its link, so that nobody may say whose the address is. Where somebody says
            // that it is another one's, or it has become no node's, it is given up at once.
            let is_its = match holders.get(ip) {
                Some(node) => *node == was.node,
                None => !refused(*ip, &was.node),
            };
            let stays = is_its && !linked(&was.node);
            let left = was.left.unwrap_or(now);
            if stays && now - left < grace {
                next.insert(*ip, CaughtNode { left: Some(left), ..was.clone() });
            }
        }
        let changed = self.0 != next;
        self.0 = next;
        changed
    }

    /// All of them.
    pub(super) fn nodes(&self) -> &HashMap<IpAddr, CaughtNode> {
        &self.0
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const GRACE: Duration = Duration::from_secs(60);

    /// No address is refused to any node.
    const FREE: fn(IpAddr, &NodeName) -> bool = |_, _| false;

    /// The addresses 10.0.0.N, each of a node of that name.
    fn holders(of: &[(u8, &str)]) -> HashMap<IpAddr, NodeName> {
        of.iter().map(|(last, node)| ([10, 0, 0, *last].into(), node.parse().unwrap())).collect()
    }

    fn caught(presence: &Presence) -> Vec<(String, String, bool)> {
        let all = presence.nodes().iter();
        let mut all: Vec<_> =
            all.map(|(ip, at)| (ip.to_string(), at.node.to_string(), at.left.is_some())).collect();
        all.sort();
        all
    }

    fn one(node: &str, left: bool) -> Vec<(String, String, bool)> {
        vec![("10.0.0.7".to_owned(), node.to_owned(), left)]
    }

    #[tokio::test(start_paused = true)]
    async fn an_address_is_caught_from_its_nodes_link_to_the_grace_time_behind_the_last() {
        let (mut presence, holders, begun) = (Presence::default(), holders(&[(7, "edge7")]), Instant::now());
        let step = |presence: &mut Presence, linked: bool, at: u64| {
            presence.step(&holders, FREE, |_| linked, begun + Duration::from_secs(at), GRACE)
        };
        assert!(!step(&mut presence, false, 0), "it was never linked");
        assert!(step(&mut presence, true, 1) && !step(&mut presence, true, 2));
        assert_eq!(caught(&presence), one("edge7", false));
        assert!(step(&mut presence, false, 10) && !step(&mut presence, false, 69));
        assert_eq!(caught(&presence), one("edge7", true));
        // It comes back, and its grace time begins anew.
        assert!(
            step(&mut presence, true, 69)
                && step(&mut presence, false, 70)
                && !step(&mut presence, false, 129)
        );
        assert!(step(&mut presence, false, 130));
        assert!(presence.nodes().is_empty());
    }

    #[tokio::test]
    async fn an_address_that_is_anothers_now_is_given_up_at_once() {
        let now = Instant::now();
        let mut presence = Presence::default();
        presence.step(&holders(&[(7, "old")]), FREE, |_| true, now, GRACE);
        assert!(presence.step(&holders(&[(7, "new")]), FREE, |node| node.as_str() == "new", now, GRACE));
        assert_eq!(caught(&presence), one("new", false));
        // The other one is no edge: what is sent there goes there.
        assert!(presence.step(&holders(&[(7, "cloud")]), FREE, |_| false, now, GRACE));
        assert!(presence.nodes().is_empty());
    }

    #[tokio::test]
    async fn what_an_edge_has_said_itself_outlives_its_link_but_not_its_withdrawal() {
        let now = Instant::now();
        let mut presence = Presence::default();
        presence.step(&holders(&[(7, "edge7")]), FREE, |_| true, now, GRACE);
        presence.step(&holders(&[]), FREE, |_| false, now, GRACE);
        assert_eq!(caught(&presence), one("edge7", true), "the link is gone, and the claim with it");
        presence.step(&holders(&[(7, "edge7")]), FREE, |_| true, now, GRACE);
        presence.step(&holders(&[]), FREE, |_| true, now, GRACE);
        assert!(presence.nodes().is_empty(), "the node is linked, and does not say it any more");
    }

    #[tokio::test]
    async fn what_has_become_no_nodes_while_its_node_was_away_is_given_up_at_once() {
        let now = Instant::now();
        let mut presence = Presence::default();
        let gone = |presence: &mut Presence, refused| {
            presence.step(&holders(&[]), |_, _| refused, |_| false, now, GRACE);
            caught(presence)
        };
        presence.step(&holders(&[(7, "edge7")]), FREE, |_| true, now, GRACE);
        assert_eq!(gone(&mut presence, false), one("edge7", true));
        assert_eq!(gone(&mut presence, true), []);
        // Who is believed more than a pod's node still says it.
        presence.step(&holders(&[(7, "edge7")]), FREE, |_| true, now, GRACE);
        presence.step(&holders(&[(7, "edge7")]), |_, _| true, |_| false, now, GRACE);
        assert_eq!(caught(&presence), one("edge7", true));
    }
}
