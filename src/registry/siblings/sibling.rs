//! One other pod, by its address: a link to it that is made when it is needed, and dropped when it is not.

mod up;
mod wait;

use std::net::SocketAddr;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::Relaxed};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use tokio::sync::{Notify, watch};
use tokio::time::{Instant, sleep};
use tokio_util::sync::CancellationToken;

use super::news::Announcements;
use super::reach::{DialContext, Unreachable};
use super::rendezvous::Member;
use super::state::{KnownProcess, State};
use crate::names::{Instance, NodeName};
use crate::protocol::{Found, LinkId, LinkSender, SecondLink};

/// One other pod. Its keeper is the one task that runs [`Self::keep`].
///
/// Only the keeper changes the state and dials; others read the state and ask for a link by `wanted`. A request that
/// comes during a dial is kept by the `Notify` and taken back after it, as its link is there. A waiter for a link
/// subscribes to the state before it looks, so no change between the two is missed.
#[derive(Debug)]
pub(super) struct Sibling {
    /// Where its gRPC port is.
    pub(super) at: SocketAddr,
    /// Whether it is in the list of pods, which are asked for every node; else DNS named it once.
    pub(super) listed: AtomicBool,
    /// What is to be announced to it.
    news: Announcements,
    /// Notified when a link is to be made; not while there is one.
    pub(super) wanted: Notify,
    dismissed: CancellationToken,
    /// When its link was last used.
    used: Mutex<Instant>,
    state: watch::Sender<State>,
    /// The number of the link of that state, so that who looks for the pod behind a link locks nothing of each pod.
    link: AtomicU64,
    /// Why the last try to link to it failed; none once one succeeds.
    trouble: Mutex<Option<Unreachable>>,
    process: KnownProcess,
}

impl Sibling {
    /// One at that address, without a link.
    pub(super) fn new(at: SocketAddr, listed: bool) -> Arc<Self> {
        let sibling = Self {
            at,
            listed: AtomicBool::new(listed),
            news: Announcements::default(),
            wanted: Notify::new(),
            dismissed: CancellationToken::new(),
            used: Mutex::new(Instant::now()),
            state: watch::Sender::new(State::Away),
            link: AtomicU64::new(NO_LINK),
            trouble: Mutex::default(),
            process: KnownProcess::default(),
        };
        if listed {
            // It is dialled at once, so that the first client need not wait for the link.
            sibling.wanted.notify_one();
        }
        Arc::new(sibling)
    }

    /// The link, if there is one.
    pub(super) fn up(&self) -> Option<Arc<LinkSender>> {
        let state = self.state.borrow().clone();
        match state {
            State::Up(sender) if !sender.is_closed() => Some(sender),
            _ => None,
        }
    }

    /// Why the last try to link to it failed; none once one succeeds.
    pub(super) fn trouble(&self) -> Option<Unreachable> {
        self.trouble.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Whether its keeper has ended for good.
    pub(super) fn is_over(&self) -> bool {
        matches!(&*self.state.borrow(), State::Never(Unreachable::NoLink { .. }))
    }

    /// Whether the address is this pod's own.
    pub(super) fn is_ourselves(&self) -> bool {
        matches!(&*self.state.borrow(), State::Never(Unreachable::Itself(_)))
    }

    /// Whether that link is the one that leads to it.
    pub(super) fn has_link(&self, link: LinkId) -> bool {
        self.link.load(Relaxed) == link.0
    }

    /// Whether it is that process, as far as is known.
    pub(super) fn may_be(&self, pod: Instance) -> bool {
        self.process.may_be(pod)
    }

    fn becomes(&self, state: State) {
        let link = if let State::Up(link) = &state { link.id.0 } else { NO_LINK };
        self.link.store(link, Relaxed);
        self.state.send_replace(state);
    }

    /// Announces a node to it, as [`Announcements::add`] does, and makes a link for that if there is none.
    pub(super) fn announce(&self, node: &NodeName, forwarded: Option<Found>) {
        self.news.add(node, forwarded);
        self.want();
    }

    /// Has a link made if there is none.
    pub(super) fn want(&self) {
        self.wanted.notify_one();
    }

    /// The process that it is, if it may be a home and is not known to be gone. It may have no link just now.
    pub(super) fn process(&self) -> Option<Member> {
        self.process.get()
    }

    /// Notes which process it is by its link, or that nobody knows.
    fn is_process(&self, link: Option<&LinkSender>, means: &DialContext) {
        if self.process.is(link) {
            means.members_changed.notify_one();
        }
    }

    /// Notes that its link has just been used.
    pub(super) fn touch(&self) {
        *self.used.lock().unwrap_or_else(PoisonError::into_inner) = Instant::now();
    }

    /// Notes that the list has it no more: it stays one of the pods as long as its link lives, and that is not made
    /// again. Returns whether it has no link, so that it is over.
    pub(super) fn unlist(&self) -> bool {
        self.listed.store(false, Relaxed);
        let over = self.up().is_none();
        if over {
            self.dismissed.cancel();
        }
        over
    }

    /// Makes links whenever one is wanted, until draining begins or it is dismissed; for one that DNS named, once.
    pub(super) async fn keep(self: Arc<Self>, means: DialContext) {
        let drain = means.drain.clone();
        loop {
            self.keep_linked(&means).await;
            if self.is_ourselves() {
                return;
            }
            let why = "it is not one of our pods any more".into();
            self.becomes(State::Never(Unreachable::NoLink { at: self.at, cause: why }));
            self.note(None, &means);
            self.is_process(None, &means);
            // This look comes after the state was set, as another thread may have put it back into the list: before the
            // look, the keeper goes on; after it, the list finds the state over, and replaces it.
            if drain.is_draining() || self.dismissed.is_cancelled() || !self.listed.load(Relaxed) {
                return;
            }
            self.becomes(State::Away);
        }
    }

    async fn keep_linked(&self, means: &DialContext) {
        let drain = means.drain.clone();
        let mut failures = 0;
        let mut second = SecondLink::new(means.registry.metrics.clone());
        loop {
            tokio::select! {
                biased;
                () = drain.draining() => break,
                () = self.dismissed.cancelled() => break,
                () = self.wanted.notified() => {}
                // DNS named it, and nobody waited for the answer.
                () = sleep(IDLE), if !self.listed.load(Relaxed) => break,
                // A pod that failed is tried again from time to time, so that its trouble does not outlast it.
                () = sleep(UNASKED_AGAIN), if failures > 0 => {}
            }
            self.becomes(State::Dialling(Instant::now()));
            let pause = match means.dialer.dial(self.at, false).await {
                Ok(link) => {
                    failures = 0;
                    self.serve(link, &mut second, means).await;
                    Duration::ZERO
                }
                Err(why @ Unreachable::Itself(_)) => {
                    tracing::debug!(at = %self.at, "this address is our own");
                    self.news.clear();
                    self.is_process(None, means);
                    self.becomes(State::Never(why));
                    return;
                }
                Err(why) => {
                    failures += 1;
                    self.failed(failures, why, means)
                }
            };
            // Whatever is wanted meanwhile: a dead pod is not dialled each time a node comes to us.
            tokio::select! {
                () = drain.draining() => {}
                () = self.dismissed.cancelled() => {}
                () = sleep(pause) => {}
            }
            if !self.listed.load(Relaxed) {
                break;
            }
        }
    }

    /// Logs the failure, and returns the time until the next try.
    fn failed(&self, failures: u32, why: Unreachable, means: &DialContext) -> Duration {
        let listed = self.listed.load(Relaxed);
        // Pods that start together find each other not there yet.
        if listed && (failures == LOUD_AFTER || failures == 1 && why.is_strange()) {
            tracing::warn!(%why, "no link to another pod; trying again");
        } else {
            tracing::debug!(%why, "no link to another pod");
        }
        self.news.clear();
        self.is_process(None, means);
        let pause = why.pause(failures, listed);
        self.becomes(State::Failed(Instant::now() + pause, why.clone()));
        self.note(Some(why), means);
        pause
    }

    fn note(&self, trouble: Option<Unreachable>, means: &DialContext) {
        let mut known = self.trouble.lock().unwrap_or_else(PoisonError::into_inner);
        let changed = *known != trouble;
        *known = trouble;
        drop(known);
        if changed {
            means.changed.send_replace(());
        }
    }

    /// As if it had just been linked.
    #[cfg(test)]
    pub(super) fn is_linked(&self, link: &Arc<LinkSender>) {
        self.becomes(State::Up(link.clone()));
    }

    /// Until when nobody tries again, if the last try failed.
    #[cfg(test)]
    pub(super) fn failed_until(&self) -> Option<Instant> {
        if let State::Failed(until, _) = &*self.state.borrow() { Some(*until) } else { None }
    }

    fn unused(&self) -> Duration {
        self.used.lock().unwrap_or_else(PoisonError::into_inner).elapsed()
    }
}

/// The number of no link.
const NO_LINK: u64 = u64::MAX;
/// Between two tries of one that is listed and does not answer, while nobody wants it.
const UNASKED_AGAIN: Duration = Duration::from_secs(10);
/// Failures in a row after which one is logged as a warning.
const LOUD_AFTER: u32 = 3;
/// A link that nobody used for so long is dropped.
const IDLE: Duration = Duration::from_secs(60);
