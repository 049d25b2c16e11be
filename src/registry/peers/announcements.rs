//! Announcements: each server notifies its peers which nodes are linked to it, and which no longer are.
//!
//! Each peer gets them over one link. The first announcements over a link are all nodes, because those over an earlier
//! link may be lost.

use std::collections::hash_map::Entry;
use std::collections::{HashMap, HashSet};
use std::sync::Arc;
use std::time::Duration;

use parking_lot::Mutex;
use tokio::sync::Notify;
use tokio::time::sleep;
use tracing::info_span;

use crate::registry::Registry;
use crate::registry::peers::Peers;
use tunnel_link::link::Link;
use tunnel_proto::frame::FrameKind;
use tunnel_proto::names::{Instance, NodeName};

/// The links over which nodes are announced, one for each peer, by the peer's process.
#[derive(Debug, Default)]
pub(crate) struct AnnouncementLinks(Mutex<HashMap<Instance, Arc<AnnouncementLink>>>);

/// A link over which nodes are announced. Any thread adds nodes; one task sends.
#[derive(Debug)]
struct AnnouncementLink {
    link: Arc<Link>,
    /// The nodes that have connected or disconnected since they were last announced.
    pending: Mutex<HashSet<NodeName>>,
    added: Notify,
}

impl Peers {
    /// Announces to all peers whether a node is linked here.
    pub fn announce(&self, node: &NodeName) {
        let links: Vec<_> = self.announcement_links.0.lock().values().cloned().collect();
        for link in links {
            link.add(node);
        }
    }

    /// Sends a peer's further announcements over another link than this one, which is unresponsive.
    pub(crate) fn stop_announcing_over(&self, unresponsive: &Link) {
        self.announcement_links.0.lock().retain(|_, used| used.link.id != unresponsive.id);
        self.dial_context.links_changed.notify_one();
    }

    /// Announces over a link to each linked peer, until draining begins.
    pub(crate) async fn follow_links(self: Arc<Self>) {
        let drain = self.dial_context.drain.clone();
        self.choose_links();
        while drain.run_until(self.dial_context.links_changed.notified()).await.is_some() {
            self.choose_links();
        }
    }

    /// Chooses a link for each linked peer that has none for its announcements.
    fn choose_links(&self) {
        let links = self.links();
        let mut used = self.announcement_links.0.lock();
        used.retain(|_, used| !used.link.is_closed());
        for link in links {
            let Some(Entry::Vacant(free)) = link.instance.map(|server| used.entry(server)) else { continue };
            let new = AnnouncementLink { link, pending: Mutex::default(), added: Notify::new() };
            let new = free.insert(Arc::new(new)).clone();
            let registry = self.dial_context.registry.clone();
            let own = self.dial_context.own;
            let links_changed = self.dial_context.links_changed.clone();
            self.dial_context.drain.spawn(info_span!("announcements"), async move {
                new.serve(&registry, own).await;
                links_changed.notify_one();
            });
        }
    }
}

impl AnnouncementLink {
    fn add(&self, node: &NodeName) {
        let mut pending = self.pending.lock();
        if pending.len() < MAX_PENDING {
            pending.insert(node.clone());
        }
        drop(pending);
        self.added.notify_one();
    }

    /// Announces all nodes, then each change, until the link is closed.
    async fn serve(&self, registry: &Registry, own: Instance) {
        let sending = async {
            self.send(registry.nodes(), registry, own).await;
            loop {
                self.added.notified().await;
                let pending = std::mem::take(&mut *self.pending.lock());
                self.send(pending, registry, own).await;
            }
        };
        tokio::select! {
            () = self.link.closed() => {}
            () = sending => {}
        }
    }

    /// Announces the present state of these nodes, in pieces that leave room on the link for other frames.
    async fn send(&self, nodes: impl IntoIterator<Item = NodeName>, registry: &Registry, own: Instance) {
        for node in nodes {
            while self.link.waiting_replies() >= MAX_QUEUED
                || !self.link.signal(&node, FrameKind::Found(registry.found(&node, UNSOLICITED, own)))
            {
                sleep(QUEUE_FULL_PAUSE).await;
            }
        }
    }
}

/// The question number that marks an announcement; no question has it.
pub(crate) const UNSOLICITED: u64 = 0;
/// Maximum number of pending announcements to one peer: more than a server has nodes. If a node is left out, the peer
/// finds it by asking, or is told that it is not here.
const MAX_PENDING: usize = 50_000;
/// Maximum number of signals and replies that wait on a link when another announcement is added. Sessions do not count:
/// they take turns with announcements, however many have data.
const MAX_QUEUED: usize = 100;
/// The pause before another attempt when that many wait.
const QUEUE_FULL_PAUSE: Duration = Duration::from_millis(5);

#[cfg(test)]
mod tests;
