//! The links of an edge or a user's program to servers, and why there is none.

use std::sync::Arc;
use std::time::Duration;

use futures_util::future::ready;
use parking_lot::Mutex;
use tokio::sync::Notify;
use tokio::time::{Instant, timeout};

use crate::paths::node_not_found::NodeNotFound;
use crate::paths::waiters::{NodeWaiter, NodeWaiters};
use crate::paths::{Find, Path, PathProvider, RELINK_WINDOW};
use tunnel_link::link::Link;
use tunnel_proto::names::{Instance, NodeName};
use tunnel_proto::state::LinkId;

/// The links of this process: one, and more while sessions are handed over from an older link.
#[derive(Debug)]
pub struct Uplinks {
    /// Node of this edge.
    pub(crate) node: NodeName,
    state: Mutex<UplinkState>,
    /// Wakes the waiters after a link was added or denied.
    came: NodeWaiters,
    /// Notified when the server of the newest link does not find a node.
    elsewhere: Notify,
}

/// What changes of [`Uplinks`], under its lock.
#[derive(Debug, Default)]
struct UplinkState {
    /// Links, the newest last.
    links: Vec<Arc<Link>>,
    /// Time when a link was closed.
    lost: Option<Instant>,
    /// Why the last attempt to link has failed, until there is a link.
    failure: Option<LinkFailure>,
    /// Whether this process links to another server on request.
    has_other_servers: bool,
}

/// Why an attempt to link has failed.
#[derive(Debug, Clone)]
pub(crate) struct LinkFailure {
    pub(crate) text: String,
    /// Whether a server refused what this process proves, as it will until that has changed.
    pub(crate) is_denied: bool,
}

impl Uplinks {
    /// Creates an empty list of links.
    pub fn new(node: NodeName) -> Arc<Self> {
        let came = NodeWaiters::default();
        Arc::new(Self { node, state: Mutex::default(), came, elsewhere: Notify::new() })
    }

    /// Adds a new link. Closes the oldest link beyond `MAX_LINKS`.
    pub fn add(&self, link: Arc<Link>) {
        let mut state = self.state.lock();
        state.links.push(link);
        state.failure = None;
        let oldest = (state.links.len() > MAX_LINKS).then(|| state.links[0].clone());
        drop(state);
        if let Some(oldest) = oldest {
            oldest.close();
        }
        self.came.wake(&self.node);
    }

    /// Adds a link to another server, which is asked after that of the newest link.
    pub(crate) fn add_other_server(&self, link: Arc<Link>) {
        self.state.lock().links.insert(0, link);
        self.came.wake(&self.node);
    }

    /// Requests a link to another server than that of the newest link.
    pub(crate) fn request_other_server(&self) {
        self.elsewhere.notify_one();
    }

    /// Waits until a link to another server is requested. From the first call on, sessions wait for such a link. Cancel
    /// safe.
    pub(crate) async fn wait_other_server_request(&self) {
        self.state.lock().has_other_servers = true;
        self.elsewhere.notified().await;
    }

    /// Returns a link to another server than that of the newest link. Requests one and waits for a moment if there is
    /// none. Cancel safe.
    pub(crate) async fn other_server(&self) -> Option<Arc<Link>> {
        let first = self.newest(None).filter(|_| self.state.lock().has_other_servers)?;
        let other =
            |first: &Link| self.newest(Some(first.id)).filter(|other| other.instance != first.instance);
        self.request_other_server();
        let _ = timeout(OTHER_SERVER_WAIT, self.wait(|| other(&first).is_some())).await;
        other(&first)
    }

    /// Removes a closed link.
    pub fn remove(&self, link: &Link) {
        let mut state = self.state.lock();
        state.links.retain(|known| known.id != link.id);
        state.lost = Some(Instant::now());
    }

    /// Returns the newest link, for new sessions and searches.
    pub fn newest(&self, not: Option<LinkId>) -> Option<Arc<Link>> {
        self.all().into_iter().rev().find(|link| !link.is_closed() && not != Some(link.id))
    }

    /// Returns the reason why there is no link. A link that was closed recently is about to be replaced, unless a
    /// server has denied that.
    pub fn not_linked_reason(&self) -> NodeNotFound {
        let state = self.state.lock();
        let lost = state.lost.map(|at| at.elapsed());
        let seen = lost.filter(|lost| *lost < RELINK_WINDOW && !state.is_denied());
        NodeNotFound { seen, ..NodeNotFound::default() }
    }

    /// Records why an attempt to link has failed.
    pub fn note_failure(&self, text: &str, is_denied: bool) {
        self.state.lock().failure = Some(LinkFailure { text: text.to_owned(), is_denied });
        if is_denied {
            self.came.wake(&self.node);
        }
    }

    /// Returns why the last attempt to link has failed. Returns `None` if there is a link.
    pub(crate) fn failure(&self) -> Option<LinkFailure> {
        self.state.lock().failure.clone()
    }

    /// Returns true if there is a link.
    pub fn is_linked(&self) -> bool {
        !self.state.lock().links.is_empty()
    }

    /// Returns the time since which there is no link, at the earliest `started`.
    pub(crate) fn lost_since(&self, started: Instant) -> Option<Instant> {
        let state = self.state.lock();
        state.links.is_empty().then(|| state.lost.unwrap_or(started))
    }

    /// Returns a waiter for the next link, or for a denial of one.
    pub fn arrival(&self) -> NodeWaiter<'_> {
        self.came.arrival(&self.node)
    }

    /// Waits until there is a link, and one newer than `than` if that is given. Cancel safe.
    pub async fn wait_newer(&self, than: Option<LinkId>) {
        self.wait(|| self.newest(None).is_some_and(|newest| Some(newest.id) > than)).await;
    }

    /// Waits until there is a link, or a server has denied one. Cancel safe.
    pub(crate) async fn wait_decided(&self) {
        self.wait(|| self.newest(None).is_some() || self.state.lock().is_denied()).await;
    }

    /// Waits until this is true, which is checked when a link is added or denied. Cancel safe.
    async fn wait(&self, is_over: impl Fn() -> bool) {
        loop {
            // Create the waiter before the check: a link that is added in between ends the wait.
            let arrival = self.arrival();
            if is_over() {
                return;
            }
            arrival.wait().await;
        }
    }

    /// Pings the server of every link, also over interactive links, because the network path may have changed.
    pub fn probe(&self) {
        for link in self.all() {
            link.interactive().inspect(|interactive_link| interactive_link.probe());
            link.probe();
        }
    }

    /// Returns every link, the newest last: a copy, so that no link's own lock is taken while this lock is held.
    pub fn all(&self) -> Vec<Arc<Link>> {
        self.state.lock().links.clone()
    }
}

impl PathProvider for Uplinks {
    fn find<'a>(&'a self, node: &'a NodeName, instance: Option<Instance>, not: Option<&'a Link>) -> Find<'a> {
        let newest = self.newest(not.map(|not| not.id)).ok_or_else(|| self.not_linked_reason());
        // On an edge, its own name means the cloud: the server that is asked dials the target.
        let is_own = instance.is_none() && self.node == *node;
        let path = |newest: Arc<Link>| Path {
            instance: if is_own { newest.instance } else { instance },
            link: newest,
        };
        Box::pin(ready(newest.map(path)))
    }

    fn arrival(&self, _: &NodeName) -> NodeWaiter<'_> {
        self.arrival()
    }

    fn uplinks(&self) -> Option<&Self> {
        Some(self)
    }
}

impl UplinkState {
    fn is_denied(&self) -> bool {
        self.failure.as_ref().is_some_and(|failure| failure.is_denied)
    }
}

/// Maximum number of concurrent links; two are usual while a server drains. Beyond this the oldest is closed, so that
/// the number stays bounded if all servers are draining.
const MAX_LINKS: usize = 8;
/// Time for which a request that was refused waits for a link to another server.
const OTHER_SERVER_WAIT: Duration = Duration::from_secs(2);
