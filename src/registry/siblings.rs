//! The other pods of this cloud: where they are, links to them, and their answers about nodes.
//!
//! Locks: one for the list of pods, one for the questions under way, and small ones inside each sibling. No two are
//! held at once. So each operation copies the list (`pods`) and looks at the copy without the lock; a pod that is added
//! or removed meanwhile is noticed by the next look, or by the announcement that every new link makes.

mod addresses;
mod homes;
mod list;
mod load;
mod news;
mod pod;
mod process;
mod reach;
mod rendezvous;
mod sibling;
mod state;

use std::collections::{BTreeMap, HashMap, HashSet};
use std::net::SocketAddr;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use tokio::sync::{oneshot, watch};
use tokio::time::{Instant, timeout};
use tracing::info_span;

use crate::drain::Drain;
use crate::names::{Instance, NodeName};
use crate::protocol::{Found, LinkId, LinkSender, Load};
use crate::registry::Registry;

pub use addresses::PodAddresses;
use homes::Membership;
pub use load::{ANNOUNCE_EVERY, PodLoad};
use news::{Announcements, UNASKED};
use pod::Which;
pub use pod::{FindAnswer, NodeFound, SiblingPod};
use reach::DialContext;
pub use reach::{PodDialer, TlsPodDialer, Unreachable};
use sibling::Sibling;

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
        dialer: Arc<dyn PodDialer>,
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
    pub fn all(&self) -> Vec<SiblingPod> {
        let (mut known, incoming) = self.pods();
        known.retain(|sibling| {
            !sibling.is_ourselves() && (sibling.listed.load(Relaxed) || sibling.up().is_some())
        });
        let linked: Vec<_> = known.iter().filter_map(|sibling| sibling.up()?.instance).collect();
        let more = incoming.into_iter().map(|incoming| incoming.sender);
        let more = more.filter(|sender| sender.instance.is_none_or(|pod| !linked.contains(&pod)));
        known.into_iter().map(Which::Known).chain(more.map(Which::Incoming)).map(SiblingPod).collect()
    }

    /// The pod at the other end of a link; notes that the link has just been used.
    pub fn behind(&self, sender: &Arc<LinkSender>) -> SiblingPod {
        let known = self.lock().known.values().find(|sibling| sibling.has_link(sender.id)).cloned();
        SiblingPod(known.map_or_else(
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
    pub async fn ask(&self, pod: &SiblingPod, node: &NodeName) -> Result<FindAnswer, Unreachable> {
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
            yes: here.then(|| NodeFound { pod: pod.clone(), sender, instance, silence, ips }),
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

#[cfg(test)]
pub(super) mod tests;
