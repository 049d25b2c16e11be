//! The other pods of this cloud: where they are, links to them, and their answers about nodes.
//!
//! Locks: one for the list of pods, one for the questions under way, and small ones inside each sibling. No two are
//! held at once. So each operation copies the list (`pods`) and looks at the copy without the lock; a pod that is added
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

use crate::base::drain::Drain;
use crate::base::names::{Instance, NodeName};
use crate::link::sender::LinkSender;
use crate::net::resolver::Lookup;
use crate::proto::frame::{Found, Load};
use crate::proto::state::LinkId;
use crate::registry::Registry;
use crate::registry::peers::peer::{Announcements, DialContext, PeerDialer, Sibling, UNASKED, Unreachable};
use crate::registry::peers::replicas::Membership;

/// Links to the other pods, made when needed, and those that they have made to us.
#[derive(Debug)]
pub struct Siblings {
    means: DialContext,
    pods: Mutex<Pods>,
    /// The questions under way, by number and link: an answer counts only from the link over which it was asked for.
    questions: Mutex<HashMap<(u64, LinkId), oneshot::Sender<Found>>>,
    next_question: AtomicU64,
    /// What other pods have said of their nodes, and when.
    loads: Mutex<HashMap<Instance, (Load, Instant)>>,
    /// The pods among which each node has its homes.
    membership: Mutex<Membership>,
}

#[derive(Debug, Default)]
struct Pods {
    /// Pods whose address is known.
    known: BTreeMap<SocketAddr, Arc<Sibling>>,
    /// Links that other pods have made.
    incoming: Vec<Incoming>,
}

#[derive(Debug, Clone)]
struct Incoming {
    sender: Arc<LinkSender>,
    news: Arc<Announcements>,
}

impl Siblings {
    /// Follows `addresses` (this pod's own may be among them) until draining begins. `own` is this process. For each
    /// link to a pod that ends, on whichever side it was made, the caller calls [`Self::left`].
    pub fn new(
        addresses: watch::Receiver<Vec<SocketAddr>>,
        registry: Arc<Registry>,
        dialer: Arc<dyn PeerDialer>,
        own: Instance,
        drain: Drain,
    ) -> Arc<Self> {
        let siblings = Arc::new(Self {
            means: DialContext {
                dialer,
                own,
                registry,
                drain,
                changed: watch::Sender::new(()),
                members_changed: Arc::default(),
                catches: Arc::default(),
            },
            pods: Mutex::default(),
            questions: Mutex::default(),
            next_question: AtomicU64::new(UNASKED + 1),
            loads: Mutex::default(),
            membership: Mutex::new(Membership::of_one(own)),
        });
        let first = addresses.borrow().clone();
        siblings.list(&first);
        siblings.means.drain.spawn(info_span!("siblings"), siblings.clone().follow(addresses));
        siblings.means.drain.spawn(info_span!("homes"), siblings.clone().follow_members());
        siblings
    }

    /// Takes in a link that another pod has made. One that is to stand `beside` its older ones leaves them alone: they
    /// are returned, as they have fallen silent for that pod, so that sessions had better go on over the new one. Otherwise
    /// those that do not answer a ping are closed.
    pub fn joined(&self, sender: &Arc<LinkSender>, beside: bool) -> Vec<Arc<LinkSender>> {
        let incoming = Incoming { sender: sender.clone(), news: Arc::default() };
        let before = {
            let mut pods = self.lock();
            let same = |old: &&Incoming| sender.instance.is_some() && old.sender.instance == sender.instance;
            let before: Vec<_> = pods.incoming.iter().filter(same).map(|old| old.sender.clone()).collect();
            pods.incoming.push(incoming.clone());
            before
        };
        self.means.registry.told_of_a_pod();
        self.means.greet(sender, &incoming.news);
        self.means.members_changed.notify_one();
        for (newer, old) in (1..).zip(before.iter().rev().cloned()) {
            // A pod may reach this one by two addresses, or may have lost the older link: a ping shows which.
            self.means.drain.spawn(info_span!("old"), async move {
                if newer >= MOST_OF_ONE || !beside && !old.answers_within(PONG_TIMEOUT).await {
                    old.close();
                }
            });
        }
        let (registry, own) = (self.means.registry.clone(), self.means.own);
        self.means.drain.spawn(info_span!("news"), async move {
            while !incoming.sender.is_closed() {
                tokio::select! {
                    () = incoming.sender.closed() => {}
                    () = incoming.news.come() => incoming.news.send(&incoming.sender, &registry, own).await,
                }
            }
        });
        if beside { before } else { Vec::new() }
    }

    /// A link to another pod has ended, on whichever side it was made.
    pub fn left(&self, sender: &LinkSender) {
        self.lock().incoming.retain(|incoming| incoming.sender.id != sender.id);
        sender.instance.into_iter().for_each(|pod| self.note_lost(pod));
        self.means.members_changed.notify_one();
    }

    /// All other pods that can be asked for a node, each once.
    pub fn all(&self) -> Vec<PeerHandle> {
        let (mut known, incoming) = self.pods();
        known.retain(|sibling| {
            !sibling.is_ourselves() && (sibling.listed.load(Relaxed) || sibling.up().is_some())
        });
        let linked: Vec<_> = known.iter().filter_map(|sibling| sibling.up()?.instance).collect();
        let more = incoming.into_iter().map(|incoming| incoming.sender);
        let more = more.filter(|sender| sender.instance.is_none_or(|pod| !linked.contains(&pod)));
        known.into_iter().map(Which::Known).chain(more.map(Which::Incoming)).map(PeerHandle).collect()
    }

    /// The pod at the other end of a link; notes that the link has just been used.
    pub fn behind(&self, sender: &Arc<LinkSender>) -> PeerHandle {
        let known = self.lock().known.values().find(|sibling| sibling.has_link(sender.id)).cloned();
        PeerHandle(known.map_or_else(
            || Which::Incoming(sender.clone()),
            |sibling| {
                sibling.touch();
                Which::Known(sibling)
            },
        ))
    }

    /// Links to other pods that are up at this moment.
    pub fn links(&self) -> Vec<Arc<LinkSender>> {
        let (known, incoming): (Vec<_>, Vec<_>) = {
            let pods = self.lock();
            (pods.known.values().cloned().collect(), pods.incoming.iter().map(|i| i.sender.clone()).collect())
        };
        known.iter().filter_map(|sibling| sibling.up()).chain(incoming).collect()
    }

    /// Asks one pod whether a node is linked to it. Takes at most 2 s. Cancel safe.
    pub async fn ask(&self, pod: &PeerHandle, node: &NodeName) -> Result<FindAnswer, Unreachable> {
        let sender = pod.link().await?;
        let silent = || Unreachable::Silent(pod.to_string());
        let question = self.next_question.fetch_add(1, Relaxed);
        let (answer, answered) = oneshot::channel();
        // Entered before it is sent, as the answer may come on another thread before `find` returns. The guard below
        // takes it out again, whether it was answered, timed out or cancelled.
        self.questions().insert((question, sender.id), answer);
        let _asked = Question { siblings: self, key: (question, sender.id) };
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
            pod: from,
            yes: here.then(|| NodeLocationAnswer { pod: pod.clone(), sender, instance, silence, ips }),
            seen: (!here && !silence.is_zero()).then_some(silence),
            at: at.filter(|_| !here),
            authoritative,
        })
    }

    /// Takes a Found that answers a Find. Returns one that is an announcement.
    pub fn on_found(&self, from: &LinkSender, found: Found) -> Option<Found> {
        if found.question == UNASKED {
            return Some(found);
        }
        if let Some(asked) = self.questions().remove(&(found.question, from.id)) {
            // This fails only if the waiter has just gone.
            let _ = asked.send(found);
        }
        None
    }

    /// A copy of the list, to be looked at without the lock. Of the links that one pod has made it has only the newest.
    fn pods(&self) -> (Vec<Arc<Sibling>>, Vec<Incoming>) {
        let pods = self.lock();
        let mut seen = HashSet::new();
        let newest = pods.incoming.iter().rev();
        let newest = newest.filter(|incoming| incoming.sender.instance.is_none_or(|pod| seen.insert(pod)));
        (pods.known.values().cloned().collect(), newest.cloned().collect())
    }

    fn lock(&self) -> MutexGuard<'_, Pods> {
        self.pods.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn membership(&self) -> MutexGuard<'_, Membership> {
        self.membership.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn questions(&self) -> MutexGuard<'_, HashMap<(u64, LinkId), oneshot::Sender<Found>>> {
        self.questions.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Removes a question when its waiter goes.
struct Question<'a> {
    siblings: &'a Siblings,
    key: (u64, LinkId),
}

impl Drop for Question<'_> {
    fn drop(&mut self) {
        self.siblings.questions().remove(&self.key);
    }
}

/// Links that one pod may have made and keep side by side; beyond it the oldest is closed.
const MOST_OF_ONE: usize = 4;
/// How long an old link has to answer a ping when its pod has made another.
const PONG_TIMEOUT: Duration = Duration::from_secs(1);
/// How long a pod may take to answer whether it has a node.
const ANSWER_TIMEOUT: Duration = Duration::from_secs(1);

// Which other pods there are: those that are listed, and those that DNS names.

impl Siblings {
    /// The pods at an address that DNS named: those of the list that have it, else the one at `port`. None if that is
    /// ourselves.
    pub fn at(&self, ip: IpAddr, port: u16) -> Vec<PeerHandle> {
        let (mut found, over) = split(self.known());
        found.retain(|sibling| sibling.at.ip() == ip);
        if found.is_empty() {
            self.strike(&over);
            found.extend(self.add(SocketAddr::new(ip, port), false));
        }
        found.retain(|sibling| !sibling.is_ourselves());
        found.into_iter().map(|sibling| PeerHandle(Which::Known(sibling))).collect()
    }

    /// The addresses of those of which one is known.
    pub fn addresses(&self) -> Vec<IpAddr> {
        let known = self.known().into_iter();
        known.filter(|sibling| !sibling.is_ourselves()).map(|sibling| sibling.at.ip()).collect()
    }

    /// Which of those that are listed cannot be linked to, and why.
    ///
    /// # Errors
    ///
    /// Some: a sentence of all.
    pub fn check(&self) -> Result<(), String> {
        let mut all = self.known();
        all.retain(|sibling| sibling.listed.load(Relaxed));
        let troubles: Vec<_> =
            all.iter().filter_map(|sibling| sibling.trouble()).map(|why| why.to_string()).collect();
        if troubles.is_empty() { Ok(()) } else { Err(troubles.join("; ")) }
    }

    /// Changes when [`Self::check`] may have another result.
    pub fn changes(&self) -> watch::Receiver<()> {
        self.means.changed.subscribe()
    }

    pub(crate) async fn follow(self: Arc<Self>, mut addresses: watch::Receiver<Vec<SocketAddr>>) {
        let drain = self.means.drain.clone();
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
        for sibling in known {
            if list.contains(&sibling.at) {
                sibling.listed.store(true, Relaxed);
            } else if sibling.listed.load(Relaxed) && sibling.unlist() {
                over.push(sibling);
            }
        }
        self.strike(&over);
        for at in list {
            self.add(*at, true);
        }
        self.means.registry.told_of_a_pod();
        self.means.members_changed.notify_one();
    }

    fn strike(&self, over: &[Arc<Sibling>]) {
        let mut pods = self.lock();
        for sibling in over {
            if pods.known.get(&sibling.at).is_some_and(|known| Arc::ptr_eq(known, sibling)) {
                pods.known.remove(&sibling.at);
            }
        }
    }

    /// The one at that address. None if there are too many for one that is not listed.
    fn add(&self, at: SocketAddr, listed: bool) -> Option<Arc<Sibling>> {
        let new = Sibling::new(at, listed);
        {
            let mut pods = self.lock();
            if let Some(known) = pods.known.get(&at) {
                return Some(known.clone());
            }
            if !listed && pods.known.len() >= MOST_KNOWN {
                return None;
            }
            pods.known.insert(at, new.clone());
        }
        let keeping = new.clone().keep(self.means.clone());
        self.means.drain.spawn(info_span!("sibling", %at), keeping);
        Some(new)
    }

    /// Those whose address is known, to look at each without the lock.
    pub(crate) fn known(&self) -> Vec<Arc<Sibling>> {
        self.lock().known.values().cloned().collect()
    }
}

/// Those that are pods, and those of which nobody takes care any more.
fn split(known: Vec<Arc<Sibling>>) -> (Vec<Arc<Sibling>>, Vec<Arc<Sibling>>) {
    known.into_iter().partition(|sibling| !sibling.is_over())
}

/// Pods whose address is known; beyond it DNS names strangers.
pub(crate) const MOST_KNOWN: usize = 1000;

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
pub struct PeerHandle(pub(crate) Which);

#[derive(Debug, Clone)]
pub(crate) enum Which {
    Known(Arc<Sibling>),
    Incoming(Arc<LinkSender>),
}

/// A pod has a node.
#[derive(Debug, Clone)]
pub struct NodeLocationAnswer {
    /// Which pod.
    pub pod: PeerHandle,
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
    pub pod: Option<Instance>,
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
    pub async fn link(&self) -> Result<Arc<LinkSender>, Unreachable> {
        match &self.0 {
            Which::Known(sibling) => sibling.link().await,
            Which::Incoming(sender) if sender.is_closed() => Err(Unreachable::Silent(self.to_string())),
            Which::Incoming(sender) => Ok(sender.clone()),
        }
    }

    /// The link to it, if there is one.
    pub fn up(&self) -> Option<Arc<LinkSender>> {
        match &self.0 {
            Which::Known(sibling) => sibling.up(),
            Which::Incoming(sender) => (!sender.is_closed()).then(|| sender.clone()),
        }
    }

    /// The process that it is, if that is known.
    pub fn process(&self) -> Option<Instance> {
        match &self.0 {
            Which::Known(sibling) => sibling.process().map(|member| member.pod),
            Which::Incoming(sender) => sender.instance,
        }
    }

    /// Why the last try to link to it failed; none once one succeeds.
    pub fn trouble(&self) -> Option<Unreachable> {
        match &self.0 {
            Which::Known(sibling) => sibling.trouble(),
            Which::Incoming(_) => None,
        }
    }

    /// Whether it can never be asked again: it was known by its own link only, and that has ended.
    pub fn is_gone(&self) -> bool {
        matches!(&self.0, Which::Incoming(sender) if sender.is_closed())
    }

    /// Whether both are the same.
    pub fn is(&self, other: &Self) -> bool {
        match (&self.0, &other.0) {
            (Which::Known(one), Which::Known(two)) => Arc::ptr_eq(one, two),
            (Which::Incoming(one), Which::Incoming(two)) => one.id == two.id,
            _ => false,
        }
    }
}

impl fmt::Display for PeerHandle {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.0 {
            Which::Known(sibling) => sibling.at.fmt(f),
            Which::Incoming(sender) => match sender.instance {
                Some(instance) => write!(f, "{instance:?}"),
                None => f.write_str("without a name"),
            },
        }
    }
}

// Looking for one certain pod: by its process, or for a sign of life.

impl Siblings {
    /// A link to the pod that is this process, made if need be. Takes 1 s at most. Cancel safe.
    ///
    /// # Errors
    ///
    /// None of those that could be asked is it. Returns those that could not.
    pub async fn process(&self, instance: Instance) -> Result<Arc<LinkSender>, Vec<Unreachable>> {
        let is = |link: &Arc<LinkSender>| link.instance == Some(instance) && !link.is_closed();
        // Of two links to one pod, one may be dead and not known to be.
        if let Some(link) = self.links().into_iter().filter(is).min_by_key(|link| link.silence()) {
            return Ok(link);
        }
        let pods = self.all();
        let mut links: FuturesUnordered<_> = pods.iter().map(|pod| pod.link()).collect();
        let mut trouble = Vec::new();
        while let Some(link) = links.next().await {
            match link {
                Ok(link) if is(&link) => return Ok(link),
                Ok(_) | Err(Unreachable::Itself(_)) => {}
                Err(why) => trouble.push(why),
            }
        }
        Err(trouble)
    }

    /// Whether the pod at an address, its gRPC port being `port`, answers over a link, made if need be. An accepted
    /// connection proves nothing: it may be a proxy's on the way. Takes 2 s at most. Cancel safe.
    pub async fn answers(&self, ip: IpAddr, port: u16) -> bool {
        for pod in self.at(ip, port) {
            if let Ok(link) = pod.link().await
                && link.answers_within(PONG_TIMEOUT).await
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

impl Siblings {
    /// Tells every other pod how many nodes this one has; to be called every [`ANNOUNCE_EVERY`]. `hold`: links to all pods
    /// that are listed are made for that, and kept.
    pub fn announce_load(&self, load: Load, hold: bool) {
        if load.stopping {
            self.note_stopping(self.means.own);
        }
        self.means.catches.store(load.catches, Relaxed);
        self.note_catching(self.means.own, load.catches);
        let (known, incoming) = self.pods();
        let mut told = Vec::new();
        for sibling in known.iter().filter(|sibling| !sibling.is_ourselves()) {
            let hold = hold && sibling.listed.load(Relaxed);
            match sibling.up() {
                Some(up) => {
                    up.load(load);
                    told.extend(up.instance);
                    if hold {
                        sibling.touch();
                    }
                }
                None if hold => sibling.wanted.notify_one(),
                None => {}
            }
        }
        let untold = |sender: &&Arc<LinkSender>| sender.instance.is_none_or(|pod| !told.contains(&pod));
        for sender in incoming.iter().map(|incoming| &incoming.sender).filter(untold) {
            sender.load(load);
        }
    }

    /// Takes what another pod tells.
    pub fn on_load(&self, from: &LinkSender, load: Load) {
        let Some(pod) = from.instance else { return };
        if load.stopping {
            self.note_stopping(pod);
        }
        self.note_catching(pod, load.catches);
        let (now, mut loads) = (Instant::now(), self.loads.lock().unwrap_or_else(PoisonError::into_inner));
        loads.retain(|_, (_, at)| now - *at < FRESH);
        if loads.len() < MOST_KNOWN || loads.contains_key(&pod) {
            loads.insert(pod, (load, now));
        }
    }

    /// Every other pod with its nodes. `None`: one of them has said nothing for a while, is not linked, or is stopping.
    pub fn loads(&self) -> Option<Vec<PeerLoad>> {
        let (known, incoming) = self.pods();
        let mut pods = Vec::new();
        for sibling in known.iter().filter(|sibling| !sibling.is_ourselves()) {
            match sibling.up() {
                Some(up) => pods.push((Some(sibling.at), up.instance?)),
                None if sibling.listed.load(Relaxed) => return None,
                None => {}
            }
        }
        for sender in
            incoming.into_iter().map(|incoming| incoming.sender).filter(|sender| !sender.is_closed())
        {
            pods.push((None, sender.instance?));
        }
        pods.sort_by_key(|(at, pod)| (pod.to_bytes(), at.is_none()));
        pods.dedup_by_key(|(_, pod)| *pod);
        let loads = self.loads.lock().unwrap_or_else(PoisonError::into_inner);
        let load = |(at, pod): (Option<SocketAddr>, _)| {
            let (load, heard) = loads.get(&pod)?;
            (!load.stopping && heard.elapsed() < FRESH).then_some(PeerLoad { at, nodes: load.nodes })
        };
        pods.into_iter().map(load).collect()
    }
}

/// Between two times that a pod tells the others.
pub const ANNOUNCE_EVERY: Duration = Duration::from_secs(5);
/// What a pod has said counts for so long.
const FRESH: Duration = Duration::from_secs(16);

#[cfg(test)]
pub(crate) mod tests;

#[cfg(test)]
mod addresses_tests {
    use crate::net::resolver::Resolver;

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
