//! The links of each node at this server, each with a role, and the one operation that replaces them.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;

use crate::registry::history::NodeHistory;
use crate::registry::{LinkedNode, Registry};
use tunnel_base::limited;
use tunnel_link::link::Link;
use tunnel_proto::frame::ListedNode;
use tunnel_proto::names::{Instance, NodeName};
use tunnel_proto::state::LinkId;

/// The role of a link among the links of its node. A node has at most one link of each role.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum NodeLinkRole {
    /// The node is found by this link.
    Primary,
    /// The previous link of a process that keeps two for a while.
    Previous,
    /// Carries interactive sessions, in addition to the primary link.
    Interactive,
    /// Is only there for its sessions: its edge has announced another link.
    Retiring,
    /// Is only there for sessions that its edge opens; the node is found at another server.
    Opener,
}

/// The links of all nodes at this server, under the registry's lock.
#[derive(Debug, Default)]
pub(crate) struct LinksByNode {
    by_node: HashMap<NodeName, RoleLinks>,
    /// Number of nodes with a primary link.
    linked: usize,
    /// When each disconnected node lost its link, and the last error of each node.
    pub(crate) past: NodeHistory,
}

/// The links of one node.
#[derive(Debug, Default)]
struct RoleLinks {
    /// In no particular order.
    links: Vec<(NodeLinkRole, LinkedNode)>,
    /// Bytes sent and received on earlier links. They keep the node's totals from falling while it is linked.
    earlier_bytes: [u64; 2],
}

/// A node that is found here, with all its links.
#[derive(Debug, Clone)]
pub struct NodeWithLinks {
    /// The node.
    pub node: NodeName,
    /// Its primary link.
    pub primary: LinkedNode,
    /// All its links.
    links: Vec<Arc<Link>>,
    earlier_bytes: [u64; 2],
}

impl Registry {
    /// Makes a link its node's primary link and closes the one before.
    ///
    /// With `is_backup`, the earlier link stays as the previous link if it belongs to the same process. It is then
    /// returned, because its edge finds it unresponsive and sessions should continue on the new one. At most two links
    /// stay, so a third one closes the oldest.
    pub fn insert(&self, linked: LinkedNode, is_backup: bool) -> Option<Arc<Link>> {
        let node = linked.link.peer.node().cloned()?;
        self.replace(&node, |links| links.put_primary(linked, is_backup));
        let nodes = self.nodes.lock();
        nodes.get(&node, NodeLinkRole::Previous).map(|previous| previous.link.clone())
    }

    /// Returns true if that process may add an interactive link to its node's primary link. It must be linked here and
    /// have no previous link, because then one of its two links is about to close.
    pub fn may_add_interactive(&self, node: &NodeName, instance: Option<Instance>) -> bool {
        self.nodes.lock().busy_link(node, instance).is_some()
    }

    /// Adds an interactive link to its node's primary link and returns that, or adds a link for sessions that the edge
    /// opens. Closes the earlier such link, if any. Returns `None` if [`Self::may_add_interactive`] does not allow it.
    pub fn add_secondary(&self, linked: LinkedNode, is_interactive: bool) -> Option<Arc<Link>> {
        let node = linked.link.peer.node().cloned()?;
        if !is_interactive {
            self.replace(&node, |links| links.put(NodeLinkRole::Opener, linked));
            return None;
        }
        let busy = self.nodes.lock().busy_link(&node, linked.link.instance)?;
        self.replace(&node, |links| links.put_interactive(linked));
        Some(busy)
    }

    /// Retires a link whose edge has announced another link. The node is no longer found by it, and it stays for its
    /// sessions until the edge closes it. If the node has two such links, the older one is closed.
    pub fn retire_link(&self, link: &Link) {
        if let Some(node) = link.peer.node() {
            self.replace(node, |links| links.retire(link.id));
        }
    }

    /// Removes a link that has ended. The node's previous link, if any, becomes its primary link again. Does nothing if
    /// a newer link has replaced it: when a link's end is noticed, the node may already be linked again.
    pub fn remove(&self, link: &Link) {
        if let Some(node) = link.peer.node() {
            self.replace(node, |links| links.end(link.id));
        }
    }

    /// Changes the links of a node: closes those that have no role any more, which `change` returns, and wakes whom that
    /// concerns.
    fn replace(&self, node: &NodeName, change: impl FnOnce(&mut RoleLinks) -> Vec<LinkedNode>) {
        let mut nodes = self.nodes.lock();
        let (closed, has_new_primary) = nodes.apply(node, change);
        self.metrics.nodes.set(i64::try_from(nodes.len()).unwrap_or(i64::MAX));
        // Closing takes the link's own lock, and two locks are never held at once. A link delivers frames until its
        // loop ends.
        drop(nodes);
        for old in closed {
            limited!(
                self.metrics.refusals.may_log_about("link_replaced", node) => warn,
                %node, old_addr = %old.from, "link replaced by a newer one"
            );
            old.link.close();
        }
        if has_new_primary {
            // Sessions wait for a path.
            self.awaited.wake(node);
            self.changed.send_replace(());
        }
    }

    /// Returns the node's links here, except its primary link.
    pub(crate) fn secondary_links(&self, node: &NodeName) -> Vec<Arc<Link>> {
        let nodes = self.nodes.lock();
        let secondary = nodes.of(node).filter(|(role, _)| *role != NodeLinkRole::Primary);
        secondary.map(|(_, linked)| linked.link.clone()).collect()
    }
}

impl LinksByNode {
    /// Applies a change to the links of a node. Returns those without a role, which the caller closes, and whether the
    /// node is found by another link, or no longer.
    fn apply(
        &mut self,
        node: &NodeName,
        change: impl FnOnce(&mut RoleLinks) -> Vec<LinkedNode>,
    ) -> (Vec<LinkedNode>, bool) {
        let links = self.by_node.entry(node.clone()).or_default();
        let before = links.get(NodeLinkRole::Primary).map(|linked| linked.link.id);
        let closed = change(links);
        // The previous link takes the place of a primary link that has ended or retires.
        if links.get(NodeLinkRole::Primary).is_none()
            && let Some(previous) = links.take(NodeLinkRole::Previous)
        {
            links.links.push((NodeLinkRole::Primary, previous));
        }
        closed.iter().for_each(|linked| links.add_bytes(linked));
        // The number and the history of nodes follow the primary link.
        let after = links.get(NodeLinkRole::Primary).map(|linked| linked.link.id);
        if links.links.is_empty() {
            self.by_node.remove(node);
        }
        match (before, after) {
            (None, Some(_)) => {
                self.linked += 1;
                self.past.on_linked(node);
            }
            (Some(_), None) => {
                self.linked -= 1;
                self.past.on_unlinked(node);
            }
            _ => {}
        }
        (closed, before != after)
    }

    /// Returns the link of a node with that role.
    pub(crate) fn get(&self, node: &NodeName, role: NodeLinkRole) -> Option<&LinkedNode> {
        self.by_node.get(node)?.get(role)
    }

    /// Returns the primary link of a node.
    pub(crate) fn primary(&self, node: &NodeName) -> Option<&LinkedNode> {
        self.get(node, NodeLinkRole::Primary)
    }

    /// Returns all links, in no particular order.
    pub(crate) fn all(&self) -> impl Iterator<Item = (&NodeName, NodeLinkRole, &LinkedNode)> {
        self.by_node
            .iter()
            .flat_map(|(node, links)| links.links.iter().map(move |(role, of)| (node, *role, of)))
    }

    /// Returns the links of a node, in no particular order.
    pub(crate) fn of(&self, node: &NodeName) -> impl Iterator<Item = (NodeLinkRole, &LinkedNode)> {
        let links = self.by_node.get(node).map(|links| links.links.iter());
        links.into_iter().flatten().map(|(role, linked)| (*role, linked))
    }

    /// Returns the nodes that are found here, each with its primary link, in no particular order.
    pub(crate) fn primaries(&self) -> impl Iterator<Item = (&NodeName, &LinkedNode)> {
        self.by_node.iter().filter_map(|(node, links)| Some((node, links.get(NodeLinkRole::Primary)?)))
    }

    /// Returns a node that is found here, with all its links.
    pub(crate) fn view(&self, node: &NodeName) -> Option<NodeWithLinks> {
        let (node, links) = self.by_node.get_key_value(node)?;
        links.view(node)
    }

    /// Returns the nodes that are found here, each with all its links, in no particular order.
    pub(crate) fn views(&self) -> impl Iterator<Item = NodeWithLinks> {
        self.by_node.iter().filter_map(|(node, links)| links.view(node))
    }

    /// Returns the number of nodes that are found here.
    pub(crate) fn len(&self) -> usize {
        self.linked
    }

    /// Returns the primary link to which that process may add an interactive one. It must be linked here and have no
    /// previous link, because then one of its two links is about to close.
    pub(crate) fn busy_link(&self, node: &NodeName, instance: Option<Instance>) -> Option<Arc<Link>> {
        self.by_node.get(node)?.busy_link(instance).map(|busy| busy.link.clone())
    }
}

impl RoleLinks {
    /// Returns the node with all its links, if it is found here.
    fn view(&self, node: &NodeName) -> Option<NodeWithLinks> {
        let primary = self.get(NodeLinkRole::Primary)?.clone();
        let links = self.links.iter().map(|(_, linked)| linked.link.clone()).collect();
        Some(NodeWithLinks { node: node.clone(), primary, links, earlier_bytes: self.earlier_bytes })
    }

    /// Adds the bytes of a link that no longer has a role.
    fn add_bytes(&mut self, linked: &LinkedNode) {
        let traffic = linked.link.traffic();
        let [sent, received] = &mut self.earlier_bytes;
        *sent += traffic.sent_bytes;
        *received += traffic.received_bytes;
    }

    /// Gives a link this role. Returns the link that had it.
    fn put(&mut self, role: NodeLinkRole, linked: LinkedNode) -> Vec<LinkedNode> {
        let before = self.take(role);
        self.links.push((role, linked));
        before.into_iter().collect()
    }

    /// Adds a primary link. Returns the links that it replaces, and the interactive link of another process.
    ///
    /// `is_backup` says that the primary link is unresponsive, or handed over: it becomes the previous one if it lives and
    /// belongs to the same process.
    fn put_primary(&mut self, linked: LinkedNode, is_backup: bool) -> Vec<LinkedNode> {
        let instance = linked.link.instance;
        let is_foreign = |other: &LinkedNode| other.link.instance != instance;
        let mut closed: Vec<_> = self.take(NodeLinkRole::Previous).into_iter().collect();
        if self.get(NodeLinkRole::Interactive).is_some_and(is_foreign) {
            closed.extend(self.take(NodeLinkRole::Interactive));
        }
        for earlier in self.put(NodeLinkRole::Primary, linked) {
            if is_backup && !is_foreign(&earlier) && !earlier.link.is_closed() {
                self.links.push((NodeLinkRole::Previous, earlier));
            } else {
                closed.push(earlier);
            }
        }
        closed
    }

    /// Adds a link for interactive sessions, unless [`Self::busy_link`] returns none.
    fn put_interactive(&mut self, linked: LinkedNode) -> Vec<LinkedNode> {
        match self.busy_link(linked.link.instance) {
            Some(_) => self.put(NodeLinkRole::Interactive, linked),
            None => vec![linked],
        }
    }

    /// Retires a link: its edge has announced another one, at this server or a peer.
    fn retire(&mut self, link: LinkId) -> Vec<LinkedNode> {
        let retired = self.links.iter().position(|(role, linked)| {
            linked.link.id == link && matches!(role, NodeLinkRole::Primary | NodeLinkRole::Previous)
        });
        let Some(retired) = retired else { return Vec::new() };
        let (_, retired) = self.links.remove(retired);
        self.put(NodeLinkRole::Retiring, retired)
    }

    /// Removes a link that has ended. Compares ids: a link that ends late never removes the newer link that replaced it.
    fn end(&mut self, link: LinkId) -> Vec<LinkedNode> {
        let ended: Vec<_> = self.links.extract_if(.., |(_, linked)| linked.link.id == link).collect();
        ended.iter().for_each(|(_, linked)| self.add_bytes(linked));
        Vec::new()
    }

    fn busy_link(&self, instance: Option<Instance>) -> Option<&LinkedNode> {
        let primary = self.get(NodeLinkRole::Primary).filter(|primary| primary.link.instance == instance);
        primary.filter(|_| instance.is_some() && self.get(NodeLinkRole::Previous).is_none())
    }

    fn get(&self, role: NodeLinkRole) -> Option<&LinkedNode> {
        self.links.iter().find(|(has, _)| *has == role).map(|(_, linked)| linked)
    }

    fn take(&mut self, role: NodeLinkRole) -> Option<LinkedNode> {
        let at = self.links.iter().position(|(has, _)| *has == role)?;
        Some(self.links.swap_remove(at).1)
    }
}

impl NodeWithLinks {
    /// Returns the number of sessions on all links, including relayed ones.
    pub fn sessions(&self) -> usize {
        self.links.iter().map(|link| link.sessions()).sum()
    }

    /// Returns how many bytes were sent to the node and received from it since it was linked.
    pub fn bytes(&self) -> [u64; 2] {
        self.links.iter().fold(self.earlier_bytes, |[sent, received], link| {
            let traffic = link.traffic();
            [sent + traffic.sent_bytes, received + traffic.received_bytes]
        })
    }

    /// Returns the time since the node last sent anything.
    pub fn idle_for(&self) -> Duration {
        self.links.iter().map(|link| link.idle_for()).min().unwrap_or_default()
    }

    /// Returns the node for a list of nodes.
    pub fn listed(&self) -> ListedNode {
        let primary = &self.primary.link;
        ListedNode {
            node: self.node.clone(),
            age: primary.age(),
            address: Some(self.primary.from),
            round_trip: primary.measured_round_trip(),
            sessions: Some(self.sessions() as u64),
            version: primary.ends().and_then(|ends| ends.version.as_deref()).map(Into::into),
            bytes: Some(self.bytes()),
            websocket: primary.websocket().map(Into::into),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::collections::HashSet;

    use proptest::prelude::*;

    use tunnel_base::metrics::Metrics;
    use tunnel_proto::frame::Remote;

    use super::*;

    fn linked(number: u64, instance: Option<u8>) -> LinkedNode {
        let peer = Remote::Edge("node1".parse().unwrap());
        let instance = instance.map(|instance| Instance::from_bits(instance.into()));
        let link = Link::new(LinkId(number), peer, instance);
        LinkedNode { link, from: ([10, 0, 0, 1], 1).into() }
    }

    proptest! {
        #[test]
        fn each_link_has_one_role_until_it_ends_or_is_returned_to_be_closed(
            steps in proptest::collection::vec((0..5, proptest::option::of(0_u8..2), any::<proptest::sample::Index>()), 1..40)
        ) {
            let (node, mut nodes) = ("node1".parse::<NodeName>().unwrap(), LinksByNode::default());
            let mut open = HashSet::new();
            for (number, (step, instance, link)) in steps.into_iter().enumerate() {
                let new = linked(number as u64, instance);
                let known: Vec<_> = nodes.of(&node).map(|(_, linked)| linked.link.id).collect();
                let known = if known.is_empty() { LinkId(u64::MAX) } else { *link.get(&known) };
                if step < 3 {
                    open.insert(new.link.id);
                }
                let before = nodes.primary(&node).map(|linked| linked.link.id);
                let (closed, has_new_primary) = nodes.apply(&node, |links| match step {
                    0 => links.put_primary(new, false),
                    1 => links.put_primary(new, true),
                    2 => links.put_interactive(new),
                    3 => links.retire(known),
                    _ => {
                        open.remove(&known);
                        links.end(known)
                    }
                });
                for closed in closed {
                    prop_assert!(open.remove(&closed.link.id));
                }
                let held: Vec<_> = nodes.of(&node).map(|(role, linked)| (role, linked.link.id)).collect();
                prop_assert_eq!(held.iter().map(|(_, id)| *id).collect::<HashSet<_>>(), open.clone());
                prop_assert_eq!(held.iter().map(|(role, _)| *role).collect::<HashSet<_>>().len(), held.len());
                let after = nodes.primary(&node).map(|linked| linked.link.id);
                prop_assert_eq!((nodes.len(), has_new_primary), (usize::from(after.is_some()), before != after));
                let has = |role| nodes.get(&node, role).is_some();
                prop_assert!(has(NodeLinkRole::Primary) || !has(NodeLinkRole::Previous), "it would be primary");
            }
        }
    }

    /// If the total fell with one of several links, a scraper would count all bytes again.
    #[test]
    fn a_node_keeps_the_bytes_of_its_earlier_links_until_it_has_none() {
        let (node, mut nodes) = ("node1".parse::<NodeName>().unwrap(), LinksByNode::default());
        let [first, second, third] = [(1, 1), (2, 1), (3, 2)].map(|(n, process)| linked(n, Some(process)));
        nodes.apply(&node, |links| links.put_primary(first, false));
        nodes.apply(&node, |links| links.put_interactive(second.clone()));
        nodes.by_node.get_mut(&node).unwrap().earlier_bytes = [5, 7];
        nodes.apply(&node, |links| links.end(second.link.id));
        assert_eq!(nodes.view(&node).unwrap().bytes(), [5, 7]);
        nodes.apply(&node, |links| links.put_primary(third.clone(), false));
        assert_eq!(nodes.view(&node).unwrap().bytes(), [5, 7]);
        nodes.apply(&node, |links| links.end(third.link.id));
        assert!(nodes.view(&node).is_none());
        nodes.apply(&node, |links| links.put_primary(linked(4, None), false));
        assert_eq!(nodes.view(&node).unwrap().bytes(), [0, 0]);
    }

    #[tokio::test]
    async fn an_interactive_link_needs_a_primary_link_of_its_process_and_is_not_found() {
        let registry = Registry::new(Metrics::server("", ""));
        let [busy, first, second] = [1, 2, 3].map(|number| linked(number, Some(7)));
        let node = "node1".parse().unwrap();
        assert!(registry.add_secondary(first.clone(), true).is_none(), "the node is not linked here");
        registry.insert(busy.clone(), false);
        assert!(registry.add_secondary(linked(9, Some(8)), true).is_none(), "another process");
        assert_eq!(registry.add_secondary(first.clone(), true).map(|busy| busy.id), Some(busy.link.id));
        assert_eq!(registry.link_of(&node).map(|found| found.link.id), Some(busy.link.id));
        registry.add_secondary(second.clone(), true).unwrap();
        assert!(first.link.is_closed() && !second.link.is_closed(), "the newer one stays");
        registry.remove(&first.link);
        assert_eq!(registry.secondary_links(&node)[0].id, second.link.id);
        let again = linked(10, Some(7));
        assert!(registry.may_add_interactive(&node, busy.link.instance));
        let backup = linked(8, Some(7));
        registry.insert(backup.clone(), true);
        assert!(!registry.may_add_interactive(&node, busy.link.instance), "one of the two is about to close");
        registry.remove(&backup.link);
        registry.insert(again.clone(), false);
        assert!(busy.link.is_closed() && !second.link.is_closed(), "its process may continue there");
        registry.insert(linked(11, Some(12)), false);
        assert!(second.link.is_closed(), "its process has been replaced");
        registry.links().iter().for_each(|link| link.close());
        assert!(registry.secondary_links(&node).iter().all(|link| link.is_closed()));
    }

    #[tokio::test]
    async fn a_link_for_sessions_that_an_edge_opens_is_not_found_and_there_is_one() {
        let registry = Registry::new(Metrics::server("", ""));
        let node = "node1".parse().unwrap();
        let [first, second] = [1, 2].map(|number| linked(number, Some(7)));
        for opener in [&first, &second] {
            assert!(registry.add_secondary(opener.clone(), false).is_none());
            assert!(registry.link_of(&node).is_none() && registry.node_count() == 0);
        }
        assert!(first.link.is_closed() && !second.link.is_closed());
        registry.remove(&second.link);
        assert!(registry.links().is_empty());
    }

    #[tokio::test]
    async fn a_retired_link_is_not_found_and_only_the_newest_stays_for_sessions() {
        let registry = Registry::new(Metrics::server("", ""));
        let node = "node1".parse().unwrap();
        let [old, new] = [1, 2].map(|number| linked(number, Some(1)).link);
        let insert = |link: &Arc<Link>| {
            registry.insert(LinkedNode { link: link.clone(), from: ([10, 0, 0, 1], 1).into() }, false)
        };
        insert(&old);
        registry.retire_link(&old);
        assert!(registry.link_of(&node).is_none() && !old.is_closed());
        assert_eq!(registry.node_count(), 0);
        insert(&new);
        registry.retire_link(&old);
        assert!(registry.link_of(&node).is_some(), "the node was not found by that link");
        registry.retire_link(&new);
        assert!(old.is_closed() && !new.is_closed(), "the older of two is closed");
        registry.remove(&new);
        assert!(registry.secondary_links(&node).is_empty());
    }
}
