//! The peers of this server: where they are, links to them, and their answers about nodes.
//!
//! Locks: one for the list of servers, one for the pending questions, and small ones inside each peer. No two are held
//! at once. Each operation therefore copies the list (`servers`) and reads the copy without the lock. A server that is
//! added or removed meanwhile is noticed by the next check, or by the announcement that every new link makes.

pub mod addresses;
pub mod announcements;
pub mod node_counts;
pub mod node_list;
pub mod peer;
pub mod peer_dialer;
mod questions;

use std::collections::{BTreeMap, HashMap, HashSet};
use std::fmt;
use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;
use std::time::Duration;

use futures_util::stream::{FuturesUnordered, StreamExt as _};
use parking_lot::Mutex;
use tokio::sync::watch;
use tokio::time::Instant;
use tracing::info_span;

use crate::paths::node_not_found::PeerError;
use crate::registry::Registry;
use crate::registry::peers::announcements::{AnnouncementLinks, UNSOLICITED};
use crate::registry::peers::node_list::CachedPeerNodes;
use crate::registry::peers::peer::Peer;
use crate::registry::peers::peer_dialer::{PeerDialContext, PeerDialer};
use crate::registry::peers::questions::Questions;
use tunnel_base::drain::Drain;
use tunnel_link::link::Link;
use tunnel_link::liveness::Suspicion;
use tunnel_net::path_mtu::REMEDY;
use tunnel_proto::frame::{Found, FrameKind, Load, NodePage};
use tunnel_proto::names::{Instance, NodeName, ServerDisplayName};

/// The links to peers: made from here when needed, or by peers.
#[derive(Debug)]
pub struct Peers {
    dial_context: PeerDialContext,
    servers: Mutex<PeerList>,
    announcement_links: AnnouncementLinks,
    /// Whether they have a node.
    questions: Questions<Found>,
    /// Requests for pages of their nodes.
    pages: Questions<NodePage>,
    /// Held while a list of all nodes is made, so that there is one at a time. The last one is kept for callers that
    /// wait.
    listing: tokio::sync::Mutex<Option<CachedPeerNodes>>,
    /// Cloned by each caller that waits for a list.
    listing_waiters: Arc<()>,
    /// The loads that peers have reported, and when.
    loads: Mutex<HashMap<Instance, (Load, Instant)>>,
}

/// Peers by address, whether linked or not, and the links that peers have made here.
#[derive(Debug, Default)]
struct PeerList {
    /// Peers with a known address.
    known: BTreeMap<SocketAddr, Arc<Peer>>,
    /// Links that peers have made, the newest last.
    incoming: Vec<Arc<Link>>,
}

/// What a peer has answered about a node, and over which link.
pub(crate) type PeerAnswer = Result<(Arc<Link>, Found), PeerError>;

impl Peers {
    /// Returns the peers at `addresses`, which may include this server, and watches these until draining begins. `own`
    /// is this process. The caller calls [`Self::remove`] for each link that a peer has made and that ends.
    pub fn new(
        addresses: watch::Receiver<Vec<SocketAddr>>,
        registry: Arc<Registry>,
        dialer: Arc<dyn PeerDialer>,
        own: Instance,
        drain: Drain,
    ) -> Arc<Self> {
        let peers = Arc::new(Self {
            dial_context: PeerDialContext {
                dialer,
                own,
                registry,
                drain,
                changed: watch::Sender::new(()),
                links_changed: Arc::default(),
            },
            servers: Mutex::default(),
            announcement_links: AnnouncementLinks::default(),
            questions: Questions::default(),
            pages: Questions::default(),
            listing: tokio::sync::Mutex::default(),
            listing_waiters: Arc::default(),
            loads: Mutex::default(),
        });
        let first = addresses.borrow().clone();
        peers.list(&first);
        peers.dial_context.drain.spawn(info_span!("peers"), peers.clone().follow(addresses));
        peers.dial_context.drain.spawn(info_span!("announcements"), peers.clone().follow_links());
        peers
    }

    /// Adds a link that a peer has made.
    ///
    /// With `is_backup`, the peer's earlier links stay and are returned. They are unresponsive for that peer, so
    /// sessions should continue on the new link. Otherwise earlier links that do not answer a ping are closed.
    pub fn add_incoming(&self, link: &Arc<Link>, is_backup: bool) -> Vec<Arc<Link>> {
        let before: Vec<_> = {
            let mut servers = self.servers.lock();
            let same = |old: &&Arc<Link>| link.instance.is_some() && old.instance == link.instance;
            let before = servers.incoming.iter().filter(same).cloned().collect();
            servers.incoming.push(link.clone());
            before
        };
        if is_backup {
            before.iter().for_each(|unresponsive| self.stop_announcing_over(unresponsive));
        }
        self.dial_context.registry.awaited.wake_all();
        self.dial_context.links_changed.notify_one();
        for (newer, old) in (1..).zip(before.iter().rev().cloned()) {
            // A peer may reach this server by two addresses, or may have lost the older link: a ping tells which.
            self.dial_context.drain.spawn(info_span!("link_retire"), async move {
                if newer >= MAX_LINKS_PER_PEER || !is_backup && !old.is_alive(Suspicion::Superseded).await {
                    old.close();
                }
            });
        }
        if is_backup { before } else { Vec::new() }
    }

    /// Removes a link that a peer has made and that has ended.
    pub fn remove(&self, link: &Link) {
        self.servers.lock().incoming.retain(|incoming| incoming.id != link.id);
        // An older link of that peer may be its newest again, and sessions wait for a path.
        self.dial_context.registry.awaited.wake_all();
    }

    /// Returns all peers that can be asked for a node, each once.
    pub fn all(&self) -> Vec<PeerHandle> {
        let (mut known, incoming) = self.servers();
        known.retain(|peer| !peer.is_self() && (peer.listed.load(Relaxed) || peer.up().is_some()));
        let linked: Vec<_> = known.iter().filter_map(|peer| peer.up()?.instance).collect();
        let more =
            incoming.into_iter().filter(|link| link.instance.is_none_or(|server| !linked.contains(&server)));
        known.into_iter().map(PeerHandle::Known).chain(more.map(PeerHandle::Incoming)).collect()
    }

    /// Returns the peer at the remote end of a link.
    pub fn peer_of(&self, link: &Arc<Link>) -> PeerHandle {
        let is_linked = |peer: &Arc<Peer>| peer.up().is_some_and(|up| up.id == link.id);
        let known = self.known().into_iter().find(is_linked);
        known.map_or_else(|| PeerHandle::Incoming(link.clone()), PeerHandle::Known)
    }

    /// Returns the links to peers that are up now: those that this server has made, then those that peers have made,
    /// the newest first.
    pub fn links(&self) -> Vec<Arc<Link>> {
        let (known, incoming): (Vec<_>, Vec<_>) = {
            let servers = self.servers.lock();
            (servers.known.values().cloned().collect(), servers.incoming.clone())
        };
        let incoming = incoming.into_iter().rev().filter(|link| !link.is_closed());
        known.iter().filter_map(|peer| peer.up()).chain(incoming).collect()
    }

    /// Asks a peer whether a node is linked to it. Returns the answer and the link that it came over. Takes at most 2
    /// s. Cancel safe.
    pub(crate) async fn ask(&self, server: &PeerHandle, node: &NodeName) -> PeerAnswer {
        let link = server.link().await?;
        let find = |question| link.signal(node, FrameKind::Find(question));
        let found = self.questions.ask(&link, ANSWER_TIMEOUT, find).await;
        let found = found.ok_or_else(|| PeerError::Silent(server.to_string()))?;
        Ok((link, found))
    }

    /// Delivers a Found that answers a Find. Returns a Found that is an announcement.
    pub fn handle_found(&self, from: &Link, found: Found) -> Option<Found> {
        if found.question == UNSOLICITED {
            return Some(found);
        }
        self.questions.answer(found.question, from, found);
        None
    }

    /// Returns a copy of the list, to be read without the lock. It has only the newest live one of the links that one
    /// peer has made.
    fn servers(&self) -> (Vec<Arc<Peer>>, Vec<Arc<Link>>) {
        let servers = self.servers.lock();
        let mut seen = HashSet::new();
        let newest = servers.incoming.iter().rev();
        let newest = newest.filter(|link| !link.is_closed());
        let newest = newest.filter(|link| link.instance.is_none_or(|server| seen.insert(server)));
        (servers.known.values().cloned().collect(), newest.cloned().collect())
    }
}

/// Maximum number of links that one peer may have made at the same time; beyond it the oldest is closed.
const MAX_LINKS_PER_PEER: usize = 4;
/// Time for a peer to answer whether it has a node.
const ANSWER_TIMEOUT: Duration = Duration::from_secs(1);

impl Peers {
    /// Returns the peers at an address from DNS: listed peers with that address, otherwise the one at `port`. Returns
    /// none if that is this server.
    pub fn at(&self, ip: IpAddr, port: u16) -> Vec<PeerHandle> {
        let (mut found, over) = split(self.known());
        found.retain(|peer| peer.at.ip() == ip);
        if found.is_empty() {
            self.remove_unlisted(&over);
            found.extend(self.add(SocketAddr::new(ip, port), false));
        }
        found.retain(|peer| !peer.is_self());
        found.into_iter().map(PeerHandle::Known).collect()
    }

    /// Returns the addresses of all known peers.
    pub fn addresses(&self) -> Vec<IpAddr> {
        let known = self.known().into_iter();
        known.filter(|peer| !peer.is_self()).map(|peer| peer.at.ip()).collect()
    }

    /// Returns true if a peer is at that address, or has dialled a link from there that is still open.
    pub fn is_at(&self, ip: IpAddr) -> bool {
        let incoming =
            |link: &Arc<Link>| link.ends().and_then(|ends| ends.remote).is_some_and(|from| from.ip() == ip);
        self.addresses().contains(&ip) || self.servers.lock().incoming.iter().any(incoming)
    }

    /// Checks which listed peers cannot be linked to, or lose large packets on the way.
    ///
    /// # Errors
    ///
    /// There is at least one; the text contains the reason for each.
    pub fn check(&self) -> Result<(), String> {
        let mut all = self.known();
        all.retain(|peer| peer.listed.load(Relaxed));
        let failed = all.iter().filter_map(|peer| peer.last_error()).map(|why| why.to_string());
        let lossy = all.iter().filter_map(|peer| peer.up()?.packet_loss());
        let troubles: Vec<_> = failed.chain(lossy.map(|loss| format!("{loss}; {REMEDY}"))).collect();
        if troubles.is_empty() { Ok(()) } else { Err(troubles.join("; ")) }
    }

    /// Returns a channel that changes when [`Self::check`] may have another result.
    pub fn changes(&self) -> watch::Receiver<()> {
        self.dial_context.changed.subscribe()
    }

    pub(crate) async fn follow(self: Arc<Self>, mut addresses: watch::Receiver<Vec<SocketAddr>>) {
        let drain = self.dial_context.drain.clone();
        while let Some(Ok(())) = drain.run_until(addresses.changed()).await {
            let list = addresses.borrow_and_update().clone();
            self.list(&list);
        }
    }

    /// Replaces the list. A peer that is no longer listed stays known while its link lives.
    pub(crate) fn list(&self, list: &[SocketAddr]) {
        let (known, mut over) = split(self.known());
        for peer in known {
            if list.contains(&peer.at) {
                peer.relist();
            } else if peer.listed.load(Relaxed) && peer.unlist() {
                over.push(peer);
            }
        }
        self.remove_unlisted(&over);
        for at in list {
            self.add(*at, true);
        }
        self.dial_context.registry.awaited.wake_all();
    }

    fn remove_unlisted(&self, over: &[Arc<Peer>]) {
        let mut servers = self.servers.lock();
        for peer in over {
            if servers.known.get(&peer.at).is_some_and(|known| Arc::ptr_eq(known, peer)) {
                servers.known.remove(&peer.at);
            }
        }
    }

    /// Returns the peer at that address, and adds it if necessary. Returns `None` if there are too many peers and this
    /// one is not listed.
    fn add(&self, at: SocketAddr, listed: bool) -> Option<Arc<Peer>> {
        let new = Peer::new(at, listed);
        {
            let mut servers = self.servers.lock();
            if let Some(known) = servers.known.get(&at) {
                return Some(known.clone());
            }
            if !listed && servers.known.len() >= MAX_KNOWN {
                return None;
            }
            servers.known.insert(at, new.clone());
        }
        let keeping = new.clone().run(self.dial_context.clone());
        self.dial_context.drain.spawn(info_span!("peer", server_addr = %at), keeping);
        Some(new)
    }

    /// Returns the peers with a known address, to be read without the lock.
    pub(crate) fn known(&self) -> Vec<Arc<Peer>> {
        self.servers.lock().known.values().cloned().collect()
    }
}

/// Separates the active peers from those whose task has ended.
fn split(known: Vec<Arc<Peer>>) -> (Vec<Arc<Peer>>, Vec<Arc<Peer>>) {
    known.into_iter().partition(|peer| !peer.is_over())
}

/// Maximum number of peers with a known address; more than this is no real set of peers.
pub(crate) const MAX_KNOWN: usize = 1000;

/// A peer that can be asked: by its address, or over the link that it has made.
#[derive(Debug, Clone)]
pub enum PeerHandle {
    /// By its address: one of the known peers.
    Known(Arc<Peer>),
    /// By the link that it has made.
    Incoming(Arc<Link>),
}

impl PeerHandle {
    /// Returns a link to the peer, and makes one if necessary. Waits at most 1 s.
    pub async fn link(&self) -> Result<Arc<Link>, PeerError> {
        match self {
            Self::Known(peer) => peer.link().await,
            Self::Incoming(link) if link.is_closed() => Err(PeerError::Silent(self.to_string())),
            Self::Incoming(link) => Ok(link.clone()),
        }
    }

    /// Returns the current link to the peer, if any.
    pub fn up(&self) -> Option<Arc<Link>> {
        match self {
            Self::Known(peer) => peer.up(),
            Self::Incoming(link) => (!link.is_closed()).then(|| link.clone()),
        }
    }

    /// Returns why the last attempt to link failed; `None` once one succeeds.
    pub fn last_error(&self) -> Option<PeerError> {
        match self {
            Self::Known(peer) => peer.last_error(),
            Self::Incoming(_) => None,
        }
    }

    /// Returns the name that the peer announces, or announced when it was last linked.
    pub fn name(&self) -> Option<ServerDisplayName> {
        match self {
            Self::Known(peer) => peer.name(),
            Self::Incoming(link) => link.ends()?.server_name.clone(),
        }
    }

    /// Returns true if both are the same peer.
    pub fn is(&self, other: &Self) -> bool {
        match (self, other) {
            (Self::Known(one), Self::Known(two)) => Arc::ptr_eq(one, two),
            (Self::Incoming(one), Self::Incoming(two)) => one.id == two.id,
            _ => false,
        }
    }
}

impl fmt::Display for PeerHandle {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Known(peer) => peer.at.fmt(f),
            Self::Incoming(link) => match link.instance {
                Some(instance) => write!(f, "{instance:?}"),
                None => f.write_str("without a name"),
            },
        }
    }
}

impl Peers {
    /// Returns a link to the peer with this process, and makes one if necessary. Takes 1 s at most. Cancel safe.
    ///
    /// # Errors
    ///
    /// No reachable peer is that process. Returns the errors of the unreachable ones.
    pub async fn process(&self, instance: Instance) -> Result<Arc<Link>, Vec<PeerError>> {
        let is = |link: &Arc<Link>| link.instance == Some(instance) && !link.is_closed();
        // If there are two links to one peer, one may be dead without being known to be.
        if let Some(link) = self.links().into_iter().filter(is).min_by_key(|link| link.idle_for()) {
            return Ok(link);
        }
        let servers = self.all();
        let mut links: FuturesUnordered<_> = servers.iter().map(|server| server.link()).collect();
        let mut trouble = Vec::new();
        while let Some(link) = links.next().await {
            match link {
                Ok(link) if is(&link) => return Ok(link),
                Ok(_) | Err(PeerError::SelfDial(_)) => {}
                Err(why) => trouble.push(why),
            }
        }
        Err(trouble)
    }

    /// Returns true if the server at an address, with gRPC port `port`, answers over a link, which is made if
    /// necessary. An accepted connection proves nothing, because it may come from a proxy. Takes 2 s at most. Cancel
    /// safe.
    pub async fn answers(&self, ip: IpAddr, port: u16) -> bool {
        for server in self.at(ip, port) {
            if let Ok(link) = server.link().await
                && link.is_alive(Suspicion::Superseded).await
            {
                return true;
            }
        }
        false
    }
}

#[cfg(test)]
pub(crate) mod tests;
