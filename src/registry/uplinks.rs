//! The links of an edge to the cloud: every path of an edge leads over one of them.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use tokio::time::Instant;

use crate::names::NodeName;
use crate::protocol::{LinkId, LinkSender};
use crate::registry::awaited::{Arrival, Awaited};
use crate::registry::find::{MOVE_WINDOW, NotFound};

/// The links of an edge: one, and more while a draining pod still holds sessions.
#[derive(Debug)]
pub struct Uplinks {
    /// The node that this edge is.
    node: NodeName,
    /// The newest last.
    links: Mutex<Vec<Arc<LinkSender>>>,
    /// When a link has ended.
    lost: Mutex<Option<Instant>>,
    came: Awaited,
}

impl Uplinks {
    /// No link yet.
    pub fn new(node: NodeName) -> Arc<Self> {
        Arc::new(Self { node, links: Mutex::default(), lost: Mutex::default(), came: Awaited::default() })
    }

    /// The node that this edge is. A request for that name through the cloud means the cloud itself.
    pub fn node(&self) -> &NodeName {
        &self.node
    }

    /// A link is up.
    pub fn add(&self, link: Arc<LinkSender>) {
        let oldest = {
            let mut links = self.lock();
            links.push(link);
            (links.len() > MAX_LINKS).then(|| links[0].clone())
        };
        if let Some(oldest) = oldest {
            oldest.close();
        }
        self.came.wake(&self.node);
    }

    /// A link has ended.
    pub fn remove(&self, link: &LinkSender) {
        self.lock().retain(|known| known.id != link.id);
        *self.lost.lock().unwrap_or_else(PoisonError::into_inner) = Some(Instant::now());
    }

    /// The newest link, for whatever begins or looks for a path now.
    pub fn newest(&self, not: Option<LinkId>) -> Option<Arc<LinkSender>> {
        self.links().into_iter().rev().find(|link| !link.is_closed() && not != Some(link.id))
    }

    /// Why there is no link to use: one that has just ended is about to be replaced.
    pub fn missing(&self) -> NotFound {
        let lost = *self.lost.lock().unwrap_or_else(PoisonError::into_inner);
        let moving = lost.is_some_and(|at| at.elapsed() < MOVE_WINDOW);
        NotFound { moving, ..NotFound::default() }
    }

    /// Whether there is a link.
    pub fn is_linked(&self) -> bool {
        !self.lock().is_empty()
    }

    /// Notices the next link that comes.
    pub fn arrival(&self) -> Arrival<'_> {
        self.came.arrival(&self.node)
    }

    /// Waits until there is a link. Cancel safe.
    pub async fn any(&self) {
        loop {
            // As in [`Self::newer`].
            let arrival = self.arrival();
            if self.newest(None).is_some() {
                return;
            }
            arrival.come().await;
        }
    }

    /// Waits until there is a newer link than this one. Cancel safe.
    pub async fn newer(&self, than: LinkId) {
        loop {
            // The arrival is made before the look: a link that is added between the two then ends the wait.
            let arrival = self.arrival();
            if self.newest(None).is_some_and(|newest| newest.id > than) {
                return;
            }
            arrival.come().await;
        }
    }

    /// Asks every link's pod for a sign of life, by interactive links as well, as the way to it may have changed.
    pub fn probe(&self) {
        for link in self.links() {
            link.beside().inspect(|beside| beside.probe());
            link.probe();
        }
    }

    /// Closes every link.
    pub fn close_all(&self) {
        for link in self.links() {
            link.close();
        }
    }

    /// Every link, the newest last.
    pub fn all(&self) -> Vec<Arc<LinkSender>> {
        self.links()
    }

    /// A copy of the list, so that no link's own lock is taken while this one is held.
    fn links(&self) -> Vec<Arc<LinkSender>> {
        self.lock().clone()
    }

    fn lock(&self) -> MutexGuard<'_, Vec<Arc<LinkSender>>> {
        self.links.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Links at once: two are usual while a pod stops. Beyond this the oldest is closed, so that a cloud of which every pod
/// is stopping does not make the edge grow.
const MAX_LINKS: usize = 8;
