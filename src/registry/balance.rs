//! Which edges a server asks to link to a peer. Times are those of the links, so that tests need no sleeping.

use std::cmp::Reverse;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use crate::registry::Registry;
use crate::registry::peers::node_counts::PeerLoad;
use tunnel_link::link::Link;

impl Registry {
    /// Returns the links whose edges this server asks now to link to a peer, and the address of the peer that has
    /// fewest nodes: up to 1 % of the links here, at least one. Links with the fewest sessions come first; among equals
    /// the oldest. The caller waits for [`pause`] afterwards.
    ///
    /// Links older than `MIN_LINK_AGE` are due while this server has more than 1.3 times the mean of its peers, and
    /// otherwise those older than `MAX_LINK_AGE`. Plain links, and those asked lately, are never due.
    pub fn links_to_move(&self, peers: &[PeerLoad]) -> Option<(SocketAddr, Vec<Arc<Link>>)> {
        let least = peers.iter().min_by_key(|peer| peer.nodes)?;
        let mean = peers.iter().map(|peer| as_f64(peer.nodes)).sum::<f64>() / as_f64(peers.len() as u64);
        let nodes = self.nodes.lock();
        let here = nodes.len();
        // With one node less, this server would have to get it back.
        if least.nodes >= (here as u64).saturating_sub(1) {
            return None;
        }
        let is_crowded = as_f64(here as u64) > mean * MAX_RATIO;
        let due = nodes.primaries().map(|(_, linked)| &linked.link).filter(|link| is_due(link, is_crowded));
        let mut links: Vec<_> = due.cloned().collect();
        // The number of its sessions takes a link's own lock.
        drop(nodes);
        links.sort_by_cached_key(|link| (link.sessions(), Reverse(link.age())));
        links.truncate((here / 100).max(1));
        (!links.is_empty()).then_some((least.at, links))
    }
}

/// Returns true if the edge of that link may be asked now.
fn is_due(link: &Link, is_crowded: bool) -> bool {
    // A plain link, which has no instance, knows no such request.
    let Some(instance) = link.instance else { return false };
    // The links of a server that was restarted are equally old. They must not all move at once.
    let [chance, ..] = instance.to_bytes();
    let most = MAX_LINK_AGE - MAX_LINK_AGE / 5 / 255 * u32::from(chance);
    let age = link.age();
    // An edge that stayed reached no other server. It is asked again when its link is twice as old.
    let may_repeat = link.move_requested().is_none_or(|since| since * 2 >= age);
    may_repeat && age >= if is_crowded { MIN_LINK_AGE } else { most }
}

/// Returns the time to wait after `asked` of `here` edges were asked, so that these are at most 1 % in a second.
pub fn pause(asked: usize, here: usize) -> Duration {
    INTERVAL.max(Duration::from_millis(100_000 * asked as u64 / here.max(1) as u64))
}

#[expect(clippy::cast_precision_loss, reason = "counts of nodes and servers")]
fn as_f64(count: u64) -> f64 {
    count as f64
}

/// A server with more nodes than this multiple of its peers' mean asks edges to move. It is never reached by chance.
const MAX_RATIO: f64 = 1.3;
/// Maximum age of a link if a peer has fewer nodes. For each link up to a fifth is subtracted.
const MAX_LINK_AGE: Duration = Duration::from_hours(24);
/// Minimum age of a link before its edge is asked: after a restart many edges are about to link again.
const MIN_LINK_AGE: Duration = Duration::from_secs(30);
/// Interval between two checks.
const INTERVAL: Duration = Duration::from_secs(1);

#[cfg(test)]
mod tests {
    use std::sync::atomic::AtomicU64;
    use std::sync::atomic::Ordering::Relaxed;

    use tokio::time::advance;
    use tunnel_base::metrics::Metrics;
    use tunnel_proto::frame::Remote;
    use tunnel_proto::names::Instance;
    use tunnel_proto::state::LinkId;

    use super::*;
    use crate::registry::LinkedNode;

    /// Inserts and returns new links, each of its own node. `chance` is the first byte of their instances; `None` for
    /// plain links.
    fn linked(registry: &Registry, count: usize, chance: Option<u8>) -> Vec<Arc<Link>> {
        static LINKS: AtomicU64 = AtomicU64::new(0);
        let new = |_| {
            let number = LINKS.fetch_add(1, Relaxed);
            let instance =
                chance.map(|chance| Instance::from_bits(u128::from(chance) << 120 | u128::from(number)));
            let peer = Remote::Edge(format!("node{number}").parse().unwrap());
            let link = Link::new(LinkId(number), peer, instance);
            registry.insert(LinkedNode { link: link.clone(), from: at(1) }, false);
            link
        };
        (0..count).map(new).collect()
    }

    fn at(port: u16) -> SocketAddr {
        ([10, 0, 0, 1], port).into()
    }

    fn peers(nodes: &[u64]) -> Vec<PeerLoad> {
        (2..).zip(nodes).map(|(port, nodes)| PeerLoad { at: at(port), nodes: *nodes }).collect()
    }

    /// Asks as the server does. Returns how many were asked, and whom they were sent to.
    fn ask(registry: &Registry, nodes: &[u64]) -> (usize, Option<SocketAddr>) {
        let Some((to, links)) = registry.links_to_move(&peers(nodes)) else { return (0, None) };
        (links.iter().filter(|link| link.request_move(to)).count(), Some(to))
    }

    #[tokio::test(start_paused = true)]
    async fn one_percent_of_a_crowded_server_is_asked_to_link_to_the_peer_with_fewest() {
        let registry = Registry::new(Metrics::server("", ""));
        linked(&registry, 260, Some(0));
        assert_eq!(ask(&registry, &[100]).0, 0, "young links stay");
        advance(MIN_LINK_AGE).await;
        assert_eq!(ask(&registry, &[200, 200]).0, 0, "it has 1.3 times the mean");
        assert_eq!(ask(&registry, &[199, 200]), (2, Some(at(2))));
        assert_eq!(ask(&registry, &[250, 0, 250]), (2, Some(at(3))));
        assert_eq!(ask(&registry, &[u64::MAX, u64::MAX, 2]).0, 0, "an extreme load does not overflow");
        assert_eq!(ask(&registry, &[]).0, 0);
        assert_eq!(
            [(0, 9), (1, 9), (1, 150), (2, 260), (50, 5000), (43_000, 4_300_000)]
                .map(|(asked, here)| pause(asked, here).as_millis()),
            [1000, 11_111, 1000, 1000, 1000, 1000]
        );
    }

    #[tokio::test(start_paused = true)]
    async fn a_move_must_make_servers_more_even() {
        for (here, others) in [(0, vec![0]), (1, vec![0, 0]), (2, vec![1]), (3, vec![2, 2])] {
            let registry = Registry::new(Metrics::server("", ""));
            linked(&registry, here, Some(0));
            advance(2 * MAX_LINK_AGE).await;
            assert_eq!(ask(&registry, &others).0, 0, "{here} with peers {others:?}");
        }
    }

    #[tokio::test(start_paused = true)]
    async fn plain_links_are_not_asked_and_an_edge_that_stays_is_asked_again_at_twice_the_age() {
        let registry = Registry::new(Metrics::server("", ""));
        linked(&registry, 3, None);
        let [link] = linked(&registry, 1, Some(0)).try_into().unwrap();
        advance(MIN_LINK_AGE).await;
        for age in [30, 60, 120, 240] {
            assert_eq!((link.age().as_secs(), ask(&registry, &[0]).0), (age, 1));
            advance(link.age() - Duration::from_secs(1)).await;
            assert_eq!(ask(&registry, &[0]).0, 0);
            advance(Duration::from_secs(1)).await;
        }
        assert!(!link.is_drained(), "it is in use");
    }

    #[tokio::test(start_paused = true)]
    async fn links_older_than_a_day_less_up_to_a_fifth_move_to_a_peer_with_fewer() {
        let registry = Registry::new(Metrics::server("", ""));
        let [first] = linked(&registry, 1, Some(255)).try_into().unwrap();
        let [last] = linked(&registry, 1, Some(0)).try_into().unwrap();
        linked(&registry, 8, Some(128));
        advance(MAX_LINK_AGE / 5 * 4).await;
        assert_eq!(ask(&registry, &[9]).0, 0, "no peer has fewer");
        advance(Duration::from_secs(1)).await;
        assert_eq!(ask(&registry, &[8]).0, 1);
        assert!(first.move_requested().is_some());
        assert_eq!(ask(&registry, &[8]).0, 0);
        advance(MAX_LINK_AGE / 5 - Duration::from_secs(2)).await;
        for _ in 0..8 {
            assert_eq!(ask(&registry, &[8]).0, 1);
        }
        assert!(last.move_requested().is_none());
        advance(Duration::from_secs(1)).await;
        assert_eq!(ask(&registry, &[8]).0, 1);
    }
}
