//! The other pods of this cloud: where they are, links to them, and their answers about nodes.
//!
//! Locks: one for the list of pods, one for the questions under way, and small ones inside each sibling. No two are
//! held at once. So each operation copies the list (`servers`) and looks at the copy without the lock; a pod that is added
//! or removed meanwhile is noticed by the next look, or by the announcement that every new link makes.

pub mod peer;
pub mod rendezvous;
pub mod replicas;

use std::collections::{BTreeMap, HashMap, HashSet};
use std::fmt;
use std::net::{IpAddr, SocketAddr};
use std::sync::atomic::AtomicU64;
use std::sync::atomic::Ordering::Relaxed;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use futures_util::stream::{FuturesUnordered, StreamExt as _};
use tokio::sync::{oneshot, watch};
use tokio::time::{Instant, MissedTickBehavior, interval, timeout};
use tracing::{info_span, warn};

use crate::registry::Registry;
use crate::registry::peers::peer::{Announcements, DialContext, Peer, PeerDialer, PeerError, UNSOLICITED};
use crate::registry::peers::replicas::Membership;
use tunnel_base::drain::Drain;
use tunnel_base::names::{Instance, NodeName};
use tunnel_link::sender::LinkSender;
use tunnel_net::resolver::Lookup;
use tunnel_proto::frame::{Found, Load};
use tunnel_proto::state::LinkId;

/// Links to the other pods, made when needed, and those that they have made to us.
#[derive(Debug)]
pub struct Peers {
    dial_context: DialContext,
    servers: Mutex<PeerList>,
    /// The questions under way, by number and link: an answer counts only from the link over which it was asked for.
    questions: Mutex<HashMap<(u64, LinkId), oneshot::Sender<Found>>>,
    next_question: AtomicU64,
    /// What other pods have said of their nodes, and when.
    loads: Mutex<HashMap<Instance, (Load, Instant)>>,
    /// The pods among which each node has its homes.
    membership: Mutex<Membership>,
}

#[derive(Debug, Default)]
struct PeerList {
    /// Pods whose address is known.
    known: BTreeMap<SocketAddr, Arc<Peer>>,
    /// Links that other pods have made.
    incoming: Vec<IncomingPeer>,
}

#[derive(Debug, Clone)]
struct IncomingPeer {
    sender: Arc<LinkSender>,
    news: Arc<Announcements>,
}

impl Peers {
    /// Follows `addresses` (this pod's own may be among them) until draining begins. `own` is this process. For each
    /// link to a pod that ends, on whichever side it was made, the caller calls [`Self::left`].
    pub fn new(
        addresses: watch::Receiver<Vec<SocketAddr>>,
        registry: Arc<Registry>,
        dialer: Arc<dyn PeerDialer>,
        own: Instance,
        drain: Drain,
    ) -> Arc<Self> {
        let peers = Arc::new(Self {
            dial_context: DialContext {
                dialer,
                own,
                registry,
                drain,
                changed: watch::Sender::new(()),
                members_changed: Arc::default(),
                catches: Arc::default(),
            },
            servers: Mutex::default(),
            questions: Mutex::default(),
            next_question: AtomicU64::new(UNSOLICITED + 1),
            loads: Mutex::default(),
            membership: Mutex::new(Membership::of_one(own)),
        });
        let first = addresses.borrow().clone();
        peers.list(&first);
        peers.dial_context.drain.spawn(info_span!("siblings"), peers.clone().follow(addresses));
        peers.dial_context.drain.spawn(info_span!("homes"), peers.clone().follow_members());
        peers
    }

    /// Takes in a link that another pod has made. One that is to stand `beside` its older ones leaves them alone: they
    /// are returned, as they have fallen silent for that pod, so that sessions had better go on over the new one. Otherwise
    /// those that do not answer a ping are closed.
    pub fn add_incoming(&self, sender: &Arc<LinkSender>, beside: bool) -> Vec<Arc<LinkSender>> {
        let incoming = IncomingPeer { sender: sender.clone(), news: Arc::default() };
        let before = {
            let mut servers = self.lock();
            let same =
                |old: &&IncomingPeer| sender.instance.is_some() && old.sender.instance == sender.instance;
            let before: Vec<_> = servers.incoming.iter().filter(same).map(|old| old.sender.clone()).collect();
            servers.incoming.push(incoming.clone());
            before
        };
        self.dial_context.registry.wake_all_waiters();
        self.dial_context.send_greeting(sender, &incoming.news);
        self.dial_context.members_changed.notify_one();
        for (newer, old) in (1..).zip(before.iter().rev().cloned()) {
            // A pod may reach this one by two addresses, or may have lost the older link: a ping shows which.
            self.dial_context.drain.spawn(info_span!("old"), async move {
                if newer >= MAX_LINKS_PER_PEER || !beside && !old.ping_within(PONG_TIMEOUT).await {
                    old.close();
                }
            });
        }
        let (registry, own) = (self.dial_context.registry.clone(), self.dial_context.own);
        self.dial_context.drain.spawn(info_span!("news"), async move {
            while !incoming.sender.is_closed() {
                tokio::select! {
                    () = incoming.sender.closed() => {}
                    () = incoming.news.wait_added() => incoming.news.send(&incoming.sender, &registry, own).await,
                }
            }
        });
        if beside { before } else { Vec::new() }
    }

    /// A link to another pod has ended, on whichever side it was made.
    pub fn remove(&self, sender: &LinkSender) {
        self.lock().incoming.retain(|incoming| incoming.sender.id != sender.id);
        sender.instance.into_iter().for_each(|server| self.note_lost(server));
        self.dial_context.members_changed.notify_one();
    }

    /// All other pods that can be asked for a node, each once.
    pub fn all(&self) -> Vec<PeerHandle> {
        let (mut known, incoming) = self.servers();
        known.retain(|peer| !peer.is_self() && (peer.listed.load(Relaxed) || peer.up().is_some()));
        let linked: Vec<_> = known.iter().filter_map(|peer| peer.up()?.instance).collect();
        let more = incoming.into_iter().map(|incoming| incoming.sender);
        let more = more.filter(|sender| sender.instance.is_none_or(|server| !linked.contains(&server)));
        known
            .into_iter()
            .map(HandleKind::Known)
            .chain(more.map(HandleKind::Incoming))
            .map(PeerHandle)
            .collect()
    }

    /// The pod at the other end of a link; notes that the link has just been used.
    pub fn peer_of(&self, sender: &Arc<LinkSender>) -> PeerHandle {
        let known = self.lock().known.values().find(|peer| peer.has_link(sender.id)).cloned();
        PeerHandle(known.map_or_else(
            || HandleKind::Incoming(sender.clone()),
            |peer| {
                peer.mark_used();
                HandleKind::Known(peer)
            },
        ))
    }

    /// Links to other pods that are up at this moment.
    pub fn links(&self) -> Vec<Arc<LinkSender>> {
        let (known, incoming): (Vec<_>, Vec<_>) = {
            let servers = self.lock();
            (
                servers.known.values().cloned().collect(),
                servers.incoming.iter().map(|i| i.sender.clone()).collect(),
            )
        };
        known.iter().filter_map(|peer| peer.up()).chain(incoming).collect()
    }

    /// Asks one pod whether a node is linked to it. Takes at most 2 s. Cancel safe.
    pub async fn ask(&self, server: &PeerHandle, node: &NodeName) -> Result<FindAnswer, PeerError> {
        let sender = server.link().await?;
        let silent = || PeerError::Silent(server.to_string());
        let question = self.next_question.fetch_add(1, Relaxed);
        let (answer, answered) = oneshot::channel();
        // Entered before it is sent, as the answer may come on another thread before `find` returns. The guard below
        // takes it out again, whether it was answered, timed out or cancelled.
        self.questions().insert((question, sender.id), answer);
        let _asked = PendingQuery { peers: self, key: (question, sender.id) };
        if !sender.find(node, question) {
            return Err(silent());
        }
        let found = tokio::select! {
            found = timeout(ANSWER_TIMEOUT, answered) => found.ok().and_then(Result::ok).ok_or_else(silent)?,
            () = sender.closed() => return Err(silent()),
        };
        let Found { here, silence, instance, at, authoritative, ips, .. } = found;
        let from = sender.instance;
        Ok(FindAnswer {
            server: from,
            yes: here.then(|| NodeLocationAnswer { server: server.clone(), sender, instance, silence, ips }),
            seen: (!here && !silence.is_zero()).then_some(silence),
            at: at.filter(|_| !here),
            authoritative,
        })
    }

    /// Takes a Found that answers a Find. Returns one that is an announcement.
    pub fn on_found(&self, from: &LinkSender, found: Found) -> Option<Found> {
        if found.question == UNSOLICITED {
            return Some(found);
        }
        if let Some(asked) = self.questions().remove(&(found.question, from.id)) {
            // This fails only if the waiter has just gone.
            let _ = asked.send(found);
        }
        None
    }

    /// A copy of the list, to be looked at without the lock. Of the links that one pod has made it has only the newest.
    fn servers(&self) -> (Vec<Arc<Peer>>, Vec<IncomingPeer>) {
        let servers = self.lock();
        let mut seen = HashSet::new();
        let newest = servers.incoming.iter().rev();
        let newest =
            newest.filter(|incoming| incoming.sender.instance.is_none_or(|server| seen.insert(server)));
        (servers.known.values().cloned().collect(), newest.cloned().collect())
    }

    fn lock(&self) -> MutexGuard<'_, PeerList> {
        self.servers.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn membership(&self) -> MutexGuard<'_, Membership> {
        self.membership.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn questions(&self) -> MutexGuard<'_, HashMap<(u64, LinkId), oneshot::Sender<Found>>> {
        self.questions.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Removes a question when its waiter goes.
struct PendingQuery<'a> {
    peers: &'a Peers,
    key: (u64, LinkId),
}

impl Drop for PendingQuery<'_> {
    fn drop(&mut self) {
        self.peers.questions().remove(&self.key);
    }
}

/// Links that one pod may have made and keep side by side; beyond it the oldest is closed.
const MAX_LINKS_PER_PEER: usize = 4;
/// How long an old link has to answer a ping when its pod has made another.
const PONG_TIMEOUT: Duration = Duration::from_secs(1);
/// How long a pod may take to answer whether it has a node.
const ANSWER_TIMEOUT: Duration = Duration::from_secs(1);

// Which other pods there are: those that are listed, and those that DNS names.

impl Peers {
    /// The pods at an address that DNS named: those of the list that have it, else the one at `port`. None if that is
    /// ourselves.
    pub fn at(&self, ip: IpAddr, port: u16) -> Vec<PeerHandle> {
        let (mut found, over) = split(self.known());
        found.retain(|peer| peer.at.ip() == ip);
        if found.is_empty() {
            self.strike(&over);
            found.extend(self.add(SocketAddr::new(ip, port), false));
        }
        found.retain(|peer| !peer.is_self());
        found.into_iter().map(|peer| PeerHandle(HandleKind::Known(peer))).collect()
    }

    /// The addresses of those of which one is known.
    pub fn addresses(&self) -> Vec<IpAddr> {
        let known = self.known().into_iter();
        known.filter(|peer| !peer.is_self()).map(|peer| peer.at.ip()).collect()
    }

    /// Which of those that are listed cannot be linked to, and why.
    ///
    /// # Errors
    ///
    /// Some: a sentence of all.
    pub fn check(&self) -> Result<(), String> {
        let mut all = self.known();
        all.retain(|peer| peer.listed.load(Relaxed));
        let troubles: Vec<_> =
            all.iter().filter_map(|peer| peer.last_error()).map(|why| why.to_string()).collect();
        if troubles.is_empty() { Ok(()) } else { Err(troubles.join("; ")) }
    }

    /// Changes when [`Self::check`] may have another result.
    pub fn changes(&self) -> watch::Receiver<()> {
        self.dial_context.changed.subscribe()
    }

    pub(crate) async fn follow(self: Arc<Self>, mut addresses: watch::Receiver<Vec<SocketAddr>>) {
        let drain = self.dial_context.drain.clone();
        loop {
            tokio::select! {
                () = drain.draining() => return,
                changed = addresses.changed() => if changed.is_err() { return },
            }
            let list = addresses.borrow_and_update().clone();
            self.list(&list);
        }
    }

    /// From now on these are listed. One that is not any more stays one of the pods as long as its link lives.
    pub(crate) fn list(&self, list: &[SocketAddr]) {
        let (known, mut over) = split(self.known());
        for peer in known {
            if list.contains(&peer.at) {
                peer.listed.store(true, Relaxed);
            } else if peer.listed.load(Relaxed) && peer.unlist() {
                over.push(peer);
            }
        }
        self.strike(&over);
        for at in list {
            self.add(*at, true);
        }
        self.dial_context.registry.wake_all_waiters();
        self.dial_context.members_changed.notify_one();
    }

    fn strike(&self, over: &[Arc<Peer>]) {
        let mut servers = self.lock();
        for peer in over {
            if servers.known.get(&peer.at).is_some_and(|known| Arc::ptr_eq(known, peer)) {
                servers.known.remove(&peer.at);
            }
        }
    }

    /// The one at that address. None if there are too many for one that is not listed.
    fn add(&self, at: SocketAddr, listed: bool) -> Option<Arc<Peer>> {
        let new = Peer::new(at, listed);
        {
            let mut servers = self.lock();
            if let Some(known) = servers.known.get(&at) {
                return Some(known.clone());
            }
            if !listed && servers.known.len() >= MAX_KNOWN {
                return None;
            }
            servers.known.insert(at, new.clone());
        }
        let keeping = new.clone().run(self.dial_context.clone());
        self.dial_context.drain.spawn(info_span!("sibling", %at), keeping);
        Some(new)
    }

    /// Those whose address is known, to look at each without the lock.
    pub(crate) fn known(&self) -> Vec<Arc<Peer>> {
        self.lock().known.values().cloned().collect()
    }
}

/// Those that are pods, and those of which nobody takes care any more.
fn split(known: Vec<Arc<Peer>>) -> (Vec<Arc<Peer>>, Vec<Arc<Peer>>) {
    known.into_iter().partition(|peer| !peer.is_over())
}

/// Pods whose address is known; beyond it DNS names strangers.
pub(crate) const MAX_KNOWN: usize = 1000;

// Where the other pods are: a fixed list, the addresses of a name, looked up again and again, and those that a cluster
// lists.

/// How pods are named; all ways together.
#[derive(Debug, Clone, Default)]
pub struct PeerAddressSource {
    /// Once and for all.
    pub list: Vec<SocketAddr>,
    /// By a name whose addresses they are, and their port.
    pub service: Option<(String, u16)>,
    /// The ready pods of the cluster, which Kubernetes keeps up to date.
    pub cluster: Option<watch::Receiver<Vec<SocketAddr>>>,
}

impl PeerAddressSource {
    /// All of them, followed until draining begins. A name that DNS does not answer for keeps its addresses.
    pub fn follow(self, resolver: Arc<dyn Lookup>, drain: &Drain) -> watch::Receiver<Vec<SocketAddr>> {
        let (sender, receiver) = watch::channel(self.all(&[]));
        if self.service.is_some() || self.cluster.is_some() {
            drain.spawn(info_span!("addresses"), look(self, resolver, sender, drain.clone()));
        }
        receiver
    }

    /// All of them, each once, with the addresses that the name has now.
    fn all(&self, found: &[IpAddr]) -> Vec<SocketAddr> {
        let mut all = self.list.clone();
        if let Some((_, port)) = self.service {
            all.extend(found.iter().map(|ip| SocketAddr::new(*ip, port)));
        }
        if let Some(cluster) = &self.cluster {
            all.extend(cluster.borrow().iter());
        }
        all.sort_unstable();
        all.dedup();
        all
    }

    /// Waits for a change in the cluster. Cancel safe.
    async fn changed(&mut self) {
        if let Some(cluster) = &mut self.cluster {
            if cluster.changed().await.is_ok() {
                return;
            }
            // The watcher is gone: its last list stays.
            let last = cluster.borrow().clone();
            self.list.extend(last);
            self.cluster = None;
        }
        std::future::pending().await
    }
}

async fn look(
    mut named: PeerAddressSource,
    resolver: Arc<dyn Lookup>,
    sender: watch::Sender<Vec<SocketAddr>>,
    drain: Drain,
) {
    let mut ticks = interval(CHECK_INTERVAL);
    ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
    let (mut found, mut warned) = (Vec::new(), None);
    loop {
        tokio::select! {
            () = drain.draining() => return,
            () = named.changed() => {}
            _ = ticks.tick() => if let Some((name, _)) = &named.service {
                match resolver.addresses(name).await {
                    Ok(addresses) => (found, warned) = (addresses, None),
                    Err(cause) => {
                        let cause = cause.to_string();
                        if warned.as_ref() != Some(&cause) {
                            warn!(%cause, "mode.cloud.registry.siblings_service: what was known stays in use");
                            warned = Some(cause);
                        }
                    }
                }
            },
        }
        let all = named.all(&found);
        sender.send_if_modified(|known| {
            let changed = *known != all;
            *known = all;
            changed
        });
    }
}

/// Between two look-ups: a new pod is found within this time, and announces its nodes by itself until then.
const CHECK_INTERVAL: Duration = Duration::from_secs(5);

// Another pod, as a search sees it.

/// One other pod that can be asked: by its address, or over the link that it has made.
#[derive(Debug, Clone)]
pub struct PeerHandle(pub(crate) HandleKind);

#[derive(Debug, Clone)]
pub(crate) enum HandleKind {
    Known(Arc<Peer>),
    Incoming(Arc<LinkSender>),
}

/// A pod has a node.
#[derive(Debug, Clone)]
pub struct NodeLocationAnswer {
    /// Which pod.
    pub server: PeerHandle,
    /// The link to it.
    pub sender: Arc<LinkSender>,
    /// The process that is a session's other end: the node's, or that pod's own if the node's link is plain.
    pub instance: Option<Instance>,
    /// How long ago the pod last read something from the node.
    pub silence: Duration,
    /// The addresses that its edge says it has.
    pub ips: Arc<[IpAddr]>,
}

/// What a pod has answered.
#[derive(Debug, Clone)]
pub struct FindAnswer {
    /// Which process it is.
    pub server: Option<Instance>,
    /// Where the node is, if it has it.
    pub yes: Option<NodeLocationAnswer>,
    /// How long ago it had the node, or knew of a pod that had it, if it did.
    pub seen: Option<Duration>,
    /// The process of the pod at which the node is instead, as far as this one knows.
    pub at: Option<Instance>,
    /// Whether it is a home of the node that would know if any pod had it.
    pub authoritative: bool,
}

impl PeerHandle {
    /// A link to it, made if need be. Waits at most 1 s.
    pub async fn link(&self) -> Result<Arc<LinkSender>, PeerError> {
        match &self.0 {
            HandleKind::Known(peer) => peer.link().await,
            HandleKind::Incoming(sender) if sender.is_closed() => Err(PeerError::Silent(self.to_string())),
            HandleKind::Incoming(sender) => Ok(sender.clone()),
        }
    }

    /// The link to it, if there is one.
    pub fn up(&self) -> Option<Arc<LinkSender>> {
        match &self.0 {
            HandleKind::Known(peer) => peer.up(),
            HandleKind::Incoming(sender) => (!sender.is_closed()).then(|| sender.clone()),
        }
    }

    /// The process that it is, if that is known.
    pub fn process(&self) -> Option<Instance> {
        match &self.0 {
            HandleKind::Known(peer) => peer.process().map(|member| member.server),
            HandleKind::Incoming(sender) => sender.instance,
        }
    }

    /// Why the last try to link to it failed; none once one succeeds.
    pub fn last_error(&self) -> Option<PeerError> {
        match &self.0 {
            HandleKind::Known(peer) => peer.last_error(),
            HandleKind::Incoming(_) => None,
        }
    }

    /// Whether it can never be asked again: it was known by its own link only, and that has ended.
    pub fn is_gone(&self) -> bool {
        matches!(&self.0, HandleKind::Incoming(sender) if sender.is_closed())
    }

    /// Whether both are the same.
    pub fn is(&self, other: &Self) -> bool {
        match (&self.0, &other.0) {
            (HandleKind::Known(one), HandleKind::Known(two)) => Arc::ptr_eq(one, two),
            (HandleKind::Incoming(one), HandleKind::Incoming(two)) => one.id == two.id,
            _ => false,
        }
    }
}

impl fmt::Display for PeerHandle {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.0 {
            HandleKind::Known(peer) => peer.at.fmt(f),
            HandleKind::Incoming(sender) => match sender.instance {
                Some(instance) => write!(f, "{instance:?}"),
                None => f.write_str("without a name"),
            },
        }
    }
}

// Looking for one certain pod: by its process, or for a sign of life.

impl Peers {
    /// A link to the pod that is this process, made if need be. Takes 1 s at most. Cancel safe.
    ///
    /// # Errors
    ///
    /// None of those that could be asked is it. Returns those that could not.
    pub async fn process(&self, instance: Instance) -> Result<Arc<LinkSender>, Vec<PeerError>> {
        let is = |link: &Arc<LinkSender>| link.instance == Some(instance) && !link.is_closed();
        // Of two links to one pod, one may be dead and not known to be.
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

    /// Whether the pod at an address, its gRPC port being `port`, answers over a link, made if need be. An accepted
    /// connection proves nothing: it may be a proxy's on the way. Takes 2 s at most. Cancel safe.
    pub async fn answers(&self, ip: IpAddr, port: u16) -> bool {
        for server in self.at(ip, port) {
            if let Ok(link) = server.link().await
                && link.ping_within(PONG_TIMEOUT).await
            {
                return true;
            }
        }
        false
    }
}

// How many nodes each pod has, as they tell each other.

/// Another pod, and how many nodes it has.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PeerLoad {
    /// Its gRPC port, as this pod dials it; none if only it dials this one.
    pub at: Option<SocketAddr>,
    /// Nodes that are linked to it.
    pub nodes: u64,
}

impl Peers {
    /// Tells every other pod how many nodes this one has; to be called every [`ANNOUNCE_INTERVAL`]. `hold`: links to all pods
    /// that are listed are made for that, and kept.
    pub fn broadcast_load(&self, load: Load, hold: bool) {
        if load.stopping {
            self.set_stopping(self.dial_context.own);
        }
        self.dial_context.catches.store(load.intercepts, Relaxed);
        self.set_intercepting(self.dial_context.own, load.intercepts);
        let (known, incoming) = self.servers();
        let mut told = Vec::new();
        for peer in known.iter().filter(|peer| !peer.is_self()) {
            let hold = hold && peer.listed.load(Relaxed);
            match peer.up() {
                Some(up) => {
                    up.load(load);
                    told.extend(up.instance);
                    if hold {
                        peer.mark_used();
                    }
                }
                None if hold => peer.wanted.notify_one(),
                None => {}
            }
        }
        let untold = |sender: &&Arc<LinkSender>| sender.instance.is_none_or(|server| !told.contains(&server));
        for sender in incoming.iter().map(|incoming| &incoming.sender).filter(untold) {
            sender.load(load);
        }
    }

    /// Takes what another pod tells.
    pub fn on_load(&self, from: &LinkSender, load: Load) {
        let Some(server) = from.instance else { return };
        if load.stopping {
            self.set_stopping(server);
        }
        self.set_intercepting(server, load.intercepts);
        let (now, mut loads) = (Instant::now(), self.loads.lock().unwrap_or_else(PoisonError::into_inner));
        loads.retain(|_, (_, at)| now - *at < FRESH);
        if loads.len() < MAX_KNOWN || loads.contains_key(&server) {
            loads.insert(server, (load, now));
        }
    }

    /// Every other pod with its nodes. `None`: one of them has said nothing for a while, is not linked, or is stopping.
    pub fn loads(&self) -> Option<Vec<PeerLoad>> {
        let (known, incoming) = self.servers();
        let mut servers = Vec::new();
        for peer in known.iter().filter(|peer| !peer.is_self()) {
            match peer.up() {
                Some(up) => servers.push((Some(peer.at), up.instance?)),
                None if peer.listed.load(Relaxed) => return None,
                None => {}
            }
        }
        for sender in
            incoming.into_iter().map(|incoming| incoming.sender).filter(|sender| !sender.is_closed())
        {
            servers.push((None, sender.instance?));
        }
        servers.sort_by_key(|(at, server)| (server.to_bytes(), at.is_none()));
        servers.dedup_by_key(|(_, server)| *server);
        let loads = self.loads.lock().unwrap_or_else(PoisonError::into_inner);
        let load = |(at, server): (Option<SocketAddr>, _)| {
            let (load, heard) = loads.get(&server)?;
            (!load.stopping && heard.elapsed() < FRESH).then_some(PeerLoad { at, nodes: load.nodes })
        };
        servers.into_iter().map(load).collect()
    }
}

/// Between two times that a pod tells the others.
pub const ANNOUNCE_INTERVAL: Duration = Duration::from_secs(5);
/// What a pod has said counts for so long.
const FRESH: Duration = Duration::from_secs(16);

#[cfg(test)]
pub(crate) mod tests;

#[cfg(test)]
mod addresses_tests {
    use tunnel_net::resolver::Resolver;

    use super::*;

    #[tokio::test]
    async fn a_list_a_name_and_a_cluster_are_followed_together() {
        let drain = Drain::new();
        let resolver = Resolver::of_servers(&["127.0.0.1:1".parse().unwrap()]).unwrap();
        let (sender, cluster) = watch::channel(Vec::new());
        let named = PeerAddressSource {
            list: vec!["192.0.2.1:9000".parse().unwrap()],
            service: Some(("localhost".into(), 9001)),
            cluster: Some(cluster),
        };
        let mut receiver = named.follow(Arc::new(resolver), &drain);
        let all = receiver.wait_for(|all| all.len() > 1).await.unwrap().clone();
        let expected = ["127.0.0.1:9001", "192.0.2.1:9000", "[::1]:9001"].map(|at| at.parse().unwrap());
        assert_eq!(all, expected);
        sender.send_replace(vec!["192.0.2.7:9000".parse().unwrap()]);
        let all = receiver.wait_for(|all| all.len() > 3).await.unwrap().clone();
        assert!(all.contains(&"192.0.2.7:9000".parse().unwrap()), "{all:?}");
    }
}
