//! A snapshot of this server's nodes for operators, including disconnected ones and their errors.

use crate::registry::history::{NodeLinkError, UnlinkedNode};
use crate::registry::links::{NodeLinkRole, NodeWithLinks};
use crate::registry::{LinkedNode, Registry};
use tunnel_link::link::Link;
use tunnel_proto::frame::ListedNode;
use tunnel_proto::names::NodeName;

/// All links of nodes here at one moment, and the disconnected nodes.
#[derive(Debug, Default)]
pub struct RegistrySnapshot {
    /// The links by node name, the primary link of a node first.
    pub linked: Vec<(NodeName, NodeLinkRole, LinkedNode, Option<NodeLinkError>)>,
    /// The nodes without a link here, the latest first.
    pub disconnected: Vec<UnlinkedNode>,
    /// The last ends of links that nodes were found by or had been found by, the latest last.
    pub drops: Vec<(NodeName, NodeLinkError)>,
}

impl Registry {
    /// Returns the node with the oldest link here, and whether there are others.
    pub fn longest(&self) -> Option<(NodeName, bool)> {
        let nodes = self.nodes.lock();
        let living = nodes.primaries().filter(|(_, linked)| !linked.link.is_closed());
        let (node, _) = living.max_by_key(|(_, linked)| linked.link.age())?;
        Some((node.clone(), nodes.len() > 1))
    }

    /// Returns up to `most` nodes after `after`, by the bytes of their names, and whether more follow. Their names and
    /// versions have at most 32 KiB in total.
    pub fn page(&self, after: Option<&NodeName>, most: usize) -> (Vec<ListedNode>, bool) {
        let nodes = self.nodes.lock();
        let later = |node: &NodeName| after.is_none_or(|after| node.as_str() > after.as_str());
        let mut all: Vec<_> = nodes.primaries().filter(|(node, _)| later(node)).collect();
        all.sort_unstable_by_key(|(node, _)| node.as_str());
        let mut bytes = 0;
        let fits = |(node, linked): &&(&NodeName, &LinkedNode)| {
            let ends = linked.link.ends();
            let texts = ends.into_iter().flat_map(|ends| [&ends.version, &ends.websocket]).flatten();
            bytes += node.as_str().len() + texts.map(|text| text.len()).sum::<usize>();
            bytes <= MAX_PAGE_BYTES
        };
        let page: Vec<_> = all.iter().take(most).take_while(fits).collect();
        let more = page.len() < all.len();
        let page: Vec<_> = page.into_iter().filter_map(|(node, _)| nodes.view(node)).collect();
        // Counting sessions takes the lock of each link.
        drop(nodes);
        (page.iter().map(NodeWithLinks::listed).collect(), more)
    }

    /// Returns the nodes that are found here, each with all its links, in no particular order.
    pub fn views(&self) -> Vec<NodeWithLinks> {
        self.nodes.lock().views().collect()
    }

    /// Returns the nodes that have lost their link here and have none, the latest first.
    pub fn lost(&self) -> Vec<UnlinkedNode> {
        let nodes = self.nodes.lock();
        let mut lost = nodes.past.lost(usize::MAX);
        // One that has a link for its earlier sessions has moved.
        lost.retain(|lost| nodes.of(&lost.node).next().is_none());
        lost
    }

    /// Returns all links, and up to `most` of the disconnected nodes.
    pub fn overview(&self, most: usize) -> RegistrySnapshot {
        let nodes = self.nodes.lock();
        let entry = |(node, role, linked): (&NodeName, _, &LinkedNode)| {
            (node.clone(), role, linked.clone(), nodes.past.error(node))
        };
        let mut linked: Vec<_> = nodes.all().map(entry).collect();
        let mut disconnected = nodes.past.all_disconnected(most);
        // A node that has moved to a peer may have a link here for its earlier sessions.
        disconnected.retain(|unlinked| nodes.of(&unlinked.node).next().is_none());
        let drops = nodes.past.drops();
        drop(nodes);
        linked.sort_by(|(one, at, ..), (two, other, ..)| (one.as_str(), at).cmp(&(two.as_str(), other)));
        RegistrySnapshot { linked, disconnected, drops }
    }

    /// Records why a link of a node has ended, then removes it like [`Self::remove`].
    pub fn ended(&self, link: &Link, why: &str) {
        if let Some(node) = link.peer.node() {
            let mut nodes = self.nodes.lock();
            let why = excerpt(why);
            nodes.past.failed(node, &why);
            // A link for interactive sessions comes and goes with the load of the other.
            if nodes.get(node, NodeLinkRole::Interactive).is_none_or(|linked| linked.link.id != link.id) {
                nodes.past.dropped(node, &why);
            }
        }
        self.remove(link);
    }

    /// Records that a link of a node was refused.
    pub fn refused(&self, node: &NodeName, why: &str) {
        let mut nodes = self.nodes.lock();
        if nodes.primary(node).is_some() {
            nodes.past.failed(node, &excerpt(why));
        } else {
            nodes.past.refused(node, &excerpt(why));
        }
    }
}

fn excerpt(why: &str) -> String {
    why.chars().take(MAX_CHARS).collect()
}

/// Maximum length of all names and versions in a page, so that its frame takes a short turn on a link.
const MAX_PAGE_BYTES: usize = 32 * 1024;
/// Maximum length of a stored error text.
const MAX_CHARS: usize = 320;

#[cfg(test)]
mod tests {
    use std::sync::Arc;
    use std::time::Duration;

    use tunnel_base::metrics::Metrics;
    use tunnel_proto::frame::Remote;
    use tunnel_proto::names::Instance;
    use tunnel_proto::state::LinkId;

    use super::*;
    use crate::registry::history::{MAX_REFUSED, WhyUnlinked};

    #[tokio::test]
    async fn pages_contain_every_node_once_sorted_by_name() {
        let registry = Registry::new(Metrics::server("", ""));
        let mut names: Vec<String> = (0..25).map(|n| format!("node-{n}")).collect();
        for (id, name) in (0..).zip(&names) {
            let peer = Remote::Edge(name.parse().unwrap());
            let link = Link::new(LinkId(id), peer, Some(Instance::random()));
            let from = ([10, 0, 0, 1], 1).into();
            registry.insert(LinkedNode { link, from }, false);
        }
        names.sort();
        let (mut after, mut seen) = (None, Vec::new());
        loop {
            let (page, more) = registry.page(after.as_ref(), 10);
            assert_eq!(page.len(), if more { 10 } else { 5 });
            seen.extend(page.iter().map(|listed| listed.node.to_string()));
            after = page.last().map(|last| last.node.clone());
            if !more {
                break;
            }
        }
        assert_eq!(seen, names);
        assert_eq!(registry.page(after.as_ref(), 10), (Vec::new(), false));
    }

    fn link(registry: &Registry, id: u64, node: &str) -> Arc<Link> {
        let instance = Some(Instance::from_bits(1));
        let peer = Remote::Edge(node.parse().unwrap());
        let link = Link::new(LinkId(id), peer, instance);
        let linked = LinkedNode { link: link.clone(), from: ([10, 0, 0, 1], 1).into() };
        registry.insert(linked, true);
        link
    }

    #[tokio::test(start_paused = true)]
    async fn a_node_is_lost_after_its_last_link_and_a_refused_one_never() {
        let registry = Registry::new(Metrics::server("", ""));
        let links = ["a", "b", "c"].map(|node| link(&registry, u64::from(node.as_bytes()[0]), node));
        registry.ended(&links[0], "closed by the remote end");
        registry.refused(&"stranger".parse().unwrap(), "the token differs");
        tokio::time::advance(Duration::from_secs(60)).await;
        registry.ended(&links[1], "nothing was received for 15s");
        let lost = |registry: &Registry| {
            let lost = registry.lost().into_iter();
            lost.map(|lost| format!("{}: {}", lost.node, lost.error.unwrap().why)).collect::<Vec<_>>()
        };
        let a = "a: closed by the remote end";
        assert_eq!(lost(&registry), ["b: nothing was received for 15s", a]);
        let _again = link(&registry, 1000, "b");
        assert_eq!(lost(&registry), [a]);
    }

    #[tokio::test]
    async fn the_overview_lists_nodes_by_name_with_last_errors_and_disconnected_nodes() {
        let registry = Registry::new(Metrics::server("", ""));
        let (first, _b, _a) = (link(&registry, 1, "c"), link(&registry, 2, "b"), link(&registry, 3, "a"));
        registry.refused(&"b".parse().unwrap(), "the token differs");
        registry.refused(&"stranger".parse().unwrap(), "the token differs");
        let second = link(&registry, 4, "c");
        registry.ended(&second, "nothing was received for 15s");
        registry.ended(&first, &"é".repeat(500));
        let RegistrySnapshot { linked, disconnected, drops } = registry.overview(10);
        let with_error: Vec<_> = linked
            .iter()
            .map(|(node, role, _, error)| (node.as_str(), *role, error.as_ref().map(|e| &*e.why)))
            .collect();
        assert_eq!(
            with_error,
            [("a", NodeLinkRole::Primary, None), ("b", NodeLinkRole::Primary, Some("the token differs"))]
        );
        let names: Vec<_> = disconnected.iter().map(|one| (one.node.as_str(), one.why)).collect();
        assert_eq!(names, [("c", WhyUnlinked::Lost), ("stranger", WhyUnlinked::Refused)]);
        let drops: Vec<_> =
            drops.iter().map(|(node, drop)| (node.as_str(), drop.why.chars().count())).collect();
        assert_eq!(drops, [("c", 28), ("c", MAX_CHARS)]);
        assert_eq!(disconnected[0].error.as_ref().unwrap().why.chars().count(), MAX_CHARS);
        assert!(registry.overview(0).disconnected.is_empty());
        assert_eq!(registry.nodes.lock().past.len(), 2, "unknown nodes do not displace the others");
        for n in 0..1000 {
            registry.refused(&format!("invented{n}").parse().unwrap(), "the token differs");
        }
        let _stranger = link(&registry, 5, "invented999");
        assert_eq!(registry.overview(1000).disconnected.len(), 1 + MAX_REFUSED - 1);
    }
}
