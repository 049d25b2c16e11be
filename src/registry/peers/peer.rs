//! One other pod, by its address: the link to it, what is known of it, and what it is told.

use std::collections::HashMap;
use std::fmt;
use std::net::SocketAddr;
use std::pin::pin;
use std::sync::atomic::Ordering::Relaxed;
use std::sync::atomic::{AtomicBool, AtomicU64};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use arc_swap::ArcSwapOption;
use futures_util::FutureExt as _;
use futures_util::future::BoxFuture;
use tokio::sync::{Notify, mpsc, watch};
use tokio::time::{Instant, sleep, timeout};
use tokio_rustls::TlsConnector;
use tokio_rustls::rustls::pki_types::ServerName;
use tokio_util::sync::CancellationToken;

use crate::registry::Registry;
use crate::registry::peers::rendezvous::Member;
use tunnel_base::drain::Drain;
use tunnel_base::names::{Instance, NodeName};
use tunnel_link::grpc::LinkContext;
use tunnel_link::grpc::dial::{LinkDialError, dial_peer};
use tunnel_link::link::Link;
use tunnel_link::sender::LinkSender;
use tunnel_link::sender::signals::BackupLink;
use tunnel_net::dial::dial;
use tunnel_net::listen::tune_link;
use tunnel_net::pool::Pool;
use tunnel_net::reload::Reload;
use tunnel_net::socket::Buffered;
use tunnel_net::tls::PeerTls;
use tunnel_net::tls::handshake::HandshakeError;
use tunnel_proto::frame::{Found, Load};
use tunnel_proto::hello::Dialect;
use tunnel_proto::state::LinkId;

/// One other pod. Its keeper is the one task that runs [`Self::keep`].
///
/// Only the keeper changes the state and dials; others read the state and ask for a link by `wanted`. A request that
/// comes during a dial is kept by the `Notify` and taken back after it, as its link is there. A waiter for a link
/// subscribes to the state before it looks, so no change between the two is missed.
#[derive(Debug)]
pub(crate) struct Peer {
    /// Where its gRPC port is.
    pub(crate) at: SocketAddr,
    /// Whether it is in the list of pods, which are asked for every node; else DNS named it once.
    pub(crate) listed: AtomicBool,
    /// What is to be announced to it.
    news: Announcements,
    /// Notified when a link is to be made; not while there is one.
    pub(crate) wanted: Notify,
    dismissed: CancellationToken,
    /// When its link was last used.
    used: Mutex<Instant>,
    state: watch::Sender<PeerState>,
    /// The number of the link of that state, so that who looks for the pod behind a link locks nothing of each pod.
    link: AtomicU64,
    /// Why the last try to link to it failed; none once one succeeds.
    trouble: Mutex<Option<PeerError>>,
    process: KnownProcess,
}

impl Peer {
    /// One at that address, without a link.
    pub(crate) fn new(at: SocketAddr, listed: bool) -> Arc<Self> {
        let peer = Self {
            at,
            listed: AtomicBool::new(listed),
            news: Announcements::default(),
            wanted: Notify::new(),
            dismissed: CancellationToken::new(),
            used: Mutex::new(Instant::now()),
            state: watch::Sender::new(PeerState::Unlinked),
            link: AtomicU64::new(NO_LINK_ID),
            trouble: Mutex::default(),
            process: KnownProcess::default(),
        };
        if listed {
            // It is dialled at once, so that the first client need not wait for the link.
            peer.wanted.notify_one();
        }
        Arc::new(peer)
    }

    /// The link, if there is one.
    pub(crate) fn up(&self) -> Option<Arc<LinkSender>> {
        let state = self.state.borrow().clone();
        match state {
            PeerState::Linked(sender) if !sender.is_closed() => Some(sender),
            _ => None,
        }
    }

    /// Why the last try to link to it failed; none once one succeeds.
    pub(crate) fn last_error(&self) -> Option<PeerError> {
        self.trouble.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Whether its keeper has ended for good.
    pub(crate) fn is_over(&self) -> bool {
        matches!(&*self.state.borrow(), PeerState::Stopped(PeerError::NoLink { .. }))
    }

    /// Whether the address is this pod's own.
    pub(crate) fn is_self(&self) -> bool {
        matches!(&*self.state.borrow(), PeerState::Stopped(PeerError::SelfDial(_)))
    }

    /// Whether that link is the one that leads to it.
    pub(crate) fn has_link(&self, link: LinkId) -> bool {
        self.link.load(Relaxed) == link.0
    }

    /// Whether it is that process, as far as is known.
    pub(crate) fn may_be(&self, server: Instance) -> bool {
        self.process.may_be(server)
    }

    fn becomes(&self, state: PeerState) {
        let link = if let PeerState::Linked(link) = &state { link.id.0 } else { NO_LINK_ID };
        self.link.store(link, Relaxed);
        self.state.send_replace(state);
    }

    /// Announces a node to it, as [`Announcements::add`] does, and makes a link for that if there is none.
    pub(crate) fn announce(&self, node: &NodeName, forwarded: Option<Found>) {
        self.news.add(node, forwarded);
        self.request_link();
    }

    /// Has a link made if there is none.
    pub(crate) fn request_link(&self) {
        self.wanted.notify_one();
    }

    /// The process that it is, if it may be a home and is not known to be gone. It may have no link just now.
    pub(crate) fn process(&self) -> Option<Member> {
        self.process.get()
    }

    /// Notes which process it is by its link, or that nobody knows.
    fn set_process(&self, link: Option<&LinkSender>, means: &DialContext) {
        if self.process.is(link) {
            means.members_changed.notify_one();
        }
    }

    /// Notes that its link has just been used.
    pub(crate) fn mark_used(&self) {
        *self.used.lock().unwrap_or_else(PoisonError::into_inner) = Instant::now();
    }

    /// Notes that the list has it no more: it stays one of the pods as long as its link lives, and that is not made
    /// again. Returns whether it has no link, so that it is over.
    pub(crate) fn unlist(&self) -> bool {
        self.listed.store(false, Relaxed);
        let over = self.up().is_none();
        if over {
            self.dismissed.cancel();
        }
        over
    }

    /// Makes links whenever one is wanted, until draining begins or it is dismissed; for one that DNS named, once.
    pub(crate) async fn run(self: Arc<Self>, means: DialContext) {
        let drain = means.drain.clone();
        loop {
            self.keep_linked(&means).await;
            if self.is_self() {
                return;
            }
            let why = "it is not one of our pods any more".into();
            self.becomes(PeerState::Stopped(PeerError::NoLink { at: self.at, cause: why }));
            self.note(None, &means);
            self.set_process(None, &means);
            // This look comes after the state was set, as another thread may have put it back into the list: before the
            // look, the keeper goes on; after it, the list finds the state over, and replaces it.
            if drain.is_draining() || self.dismissed.is_cancelled() || !self.listed.load(Relaxed) {
                return;
            }
            self.becomes(PeerState::Unlinked);
        }
    }

    async fn keep_linked(&self, means: &DialContext) {
        let drain = means.drain.clone();
        let mut failures = 0;
        let mut second = BackupLink::new(means.registry.metrics.clone());
        loop {
            tokio::select! {
                biased;
                () = drain.draining() => break,
                () = self.dismissed.cancelled() => break,
                () = self.wanted.notified() => {}
                // DNS named it, and nobody waited for the answer.
                () = sleep(IDLE), if !self.listed.load(Relaxed) => break,
                // A pod that failed is tried again from time to time, so that its trouble does not outlast it.
                () = sleep(UNASKED_RETRY_AFTER), if failures > 0 => {}
            }
            self.becomes(PeerState::Dialling(Instant::now()));
            let pause = match means.dialer.dial(self.at, false).await {
                Ok(link) => {
                    failures = 0;
                    self.serve(link, &mut second, means).await;
                    Duration::ZERO
                }
                Err(why @ PeerError::SelfDial(_)) => {
                    tracing::debug!(at = %self.at, "this address is our own");
                    self.news.clear();
                    self.set_process(None, means);
                    self.becomes(PeerState::Stopped(why));
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
    fn failed(&self, failures: u32, why: PeerError, means: &DialContext) -> Duration {
        let listed = self.listed.load(Relaxed);
        // Pods that start together find each other not there yet.
        if listed && (failures == WARN_AFTER_FAILURES || failures == 1 && why.is_strange()) {
            tracing::warn!(%why, "no link to another pod; trying again");
        } else {
            tracing::debug!(%why, "no link to another pod");
        }
        self.news.clear();
        self.set_process(None, means);
        let pause = why.pause(failures, listed);
        self.becomes(PeerState::Failed(Instant::now() + pause, why.clone()));
        self.note(Some(why), means);
        pause
    }

    fn note(&self, trouble: Option<PeerError>, means: &DialContext) {
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
    pub(crate) fn is_linked(&self, link: &Arc<LinkSender>) {
        self.becomes(PeerState::Linked(link.clone()));
    }

    /// Until when nobody tries again, if the last try failed.
    #[cfg(test)]
    pub(crate) fn failed_until(&self) -> Option<Instant> {
        if let PeerState::Failed(until, _) = &*self.state.borrow() { Some(*until) } else { None }
    }

    fn unused(&self) -> Duration {
        self.used.lock().unwrap_or_else(PoisonError::into_inner).elapsed()
    }
}

/// The number of no link.
const NO_LINK_ID: u64 = u64::MAX;
/// Between two tries of one that is listed and does not answer, while nobody wants it.
const UNASKED_RETRY_AFTER: Duration = Duration::from_secs(10);
/// Failures in a row after which one is logged as a warning.
const WARN_AFTER_FAILURES: u32 = 3;
/// A link that nobody used for so long is dropped.
const IDLE: Duration = Duration::from_secs(60);

// The link to another pod while it is up.

impl Peer {
    /// A link is up: kept until it ends, or has had nothing to do for a minute. Where it falls silent, another one takes
    /// its place.
    pub(crate) async fn serve(
        &self,
        mut link: Arc<LinkSender>,
        second: &mut BackupLink,
        means: &DialContext,
    ) {
        let end = loop {
            match self.serve_one(&link, second, means).await {
                LinkEndReason::Outrun(next) => {
                    self.becomes(PeerState::Linked(next.clone()));
                    link.close();
                    link = next;
                    // What was announced over the silent one may be lost.
                    self.set_process(None, means);
                }
                end => break end,
            }
        };
        self.becomes(PeerState::Unlinked);
        if let LinkEndReason::Lost = end {
            self.set_process(None, means);
            if self.listed.load(Relaxed) {
                // Whether it lives is known by the next link.
                self.request_link();
            }
        }
    }

    async fn serve_one(
        &self,
        link: &Arc<LinkSender>,
        second: &mut BackupLink,
        means: &DialContext,
    ) -> LinkEndReason {
        let server = link.instance.map(tracing::field::debug);
        tracing::info!(link = %link.id, at = %self.at, server, "linked to another pod");
        self.becomes(PeerState::Linked(link.clone()));
        self.note(None, means);
        self.set_process(Some(link), means);
        means.registry.wake_all_waiters();
        means.send_greeting(link, &self.news);
        self.news.send(link, &means.registry, means.own).await;
        // Requests that came during the dial have their link now.
        let _ = timeout(Duration::ZERO, self.wanted.notified()).await;
        self.mark_used();
        let mut outrun = pin!(second.race(link, || means.dialer.dial(self.at, true)));
        while !link.is_closed() {
            tokio::select! {
                () = link.closed() => {}
                () = self.news.wait_added() => {
                    self.mark_used();
                    self.news.send(link, &means.registry, means.own).await;
                }
                () = sleep(IDLE / 4) => {
                    if link.sessions() > 0 {
                        self.mark_used();
                    } else if self.unused() >= IDLE {
                        tracing::debug!(at = %self.at, "the link to another pod is not needed any more");
                        link.close();
                        return LinkEndReason::Idle;
                    }
                }
                next = &mut outrun => return LinkEndReason::Outrun(next),
            }
        }
        LinkEndReason::Lost
    }
}

/// Why a link is not served any more.
enum LinkEndReason {
    /// Nobody needs it.
    Idle,
    Lost,
    /// It is silent, and this one beside it has answered first.
    Outrun(Arc<LinkSender>),
}

// Waiting for a link to another pod.

impl Peer {
    /// The link, made if there is none. Waits at most 1 s for one; a later call waits only what is left of it, and for
    /// a while after a failure nobody waits at all. Cancel safe.
    pub(crate) async fn link(&self) -> Result<Arc<LinkSender>, PeerError> {
        let mut state = self.state.subscribe();
        let started = Instant::now();
        loop {
            let known = state.borrow_and_update().clone();
            let since = match known {
                PeerState::Linked(sender) if !sender.is_closed() => {
                    self.mark_used();
                    return Ok(sender);
                }
                PeerState::Stopped(why) => return Err(why),
                PeerState::Failed(until, why) if Instant::now() < until => return Err(why),
                PeerState::Dialling(since) => since,
                PeerState::Linked(_) | PeerState::Unlinked | PeerState::Failed(..) => {
                    self.wanted.notify_one();
                    started
                }
            };
            let left = LOOK_UP.saturating_sub(since.elapsed());
            if !matches!(timeout(left, state.changed()).await, Ok(Ok(()))) {
                let cause = format!("no link within {LOOK_UP:?}");
                return Err(PeerError::NoLink { at: self.at, cause });
            }
        }
    }
}

/// How long a search waits for a link; other pods are asked at the same time.
const LOOK_UP: Duration = Duration::from_secs(1);

// What is known of one other pod: whether it is linked, and which process it is.

#[derive(Debug, Clone)]
pub(crate) enum PeerState {
    /// No link, and none is wanted.
    Unlinked,
    /// A link is being made since then.
    Dialling(Instant),
    /// The last try failed; the next one begins no earlier than that time.
    Failed(Instant, PeerError),
    Linked(Arc<LinkSender>),
    /// Its keeper has ended, or the address is this pod's own.
    Stopped(PeerError),
}

/// The process that a pod was when it was linked last, if it may be a home; none once nobody can say whether it lives.
#[derive(Debug, Default)]
pub(crate) struct KnownProcess {
    server: ArcSwapOption<Instance>,
    /// How often a link to it has failed, so that announcements that were under way may be lost.
    losses: AtomicU64,
}

impl KnownProcess {
    pub(crate) fn get(&self) -> Option<Member> {
        let server = **self.server.load().as_ref()?;
        Some(Member { server, generation: self.losses.load(Relaxed), catches: false })
    }

    /// Whether it is that process, as far as anybody knows.
    pub(crate) fn may_be(&self, server: Instance) -> bool {
        self.server.load().as_deref() == Some(&server)
    }

    /// Takes the process at the end of a link, or that nobody knows it any more. True if that changes anything. For one
    /// task only.
    pub(crate) fn is(&self, link: Option<&LinkSender>) -> bool {
        let (new, old) = (link.and_then(process), self.get().map(|member| member.server));
        if old.is_some() && new.is_none() {
            self.losses.fetch_add(1, Relaxed);
        }
        if new != old {
            self.server.store(new.map(Arc::new));
        }
        new != old
    }
}

/// The pod at a link's other end, if it may be a home.
pub(crate) fn process(link: &LinkSender) -> Option<Instance> {
    link.instance.filter(|_| link.dialect.supports(Dialect::LOCATION_REPLICAS))
}

// Making a link to another pod, and why there is none.

/// Why another pod could not be asked.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum PeerError {
    /// No link could be made. The cause has the remedy.
    #[error("pod {at} cannot be reached: {cause}")]
    NoLink {
        /// Where.
        at: SocketAddr,
        /// Why.
        cause: String,
    },
    /// Its certificate is not one of our pods'. The cause has what is wrong with it.
    #[error("pod {at} cannot be reached: {cause}")]
    NotAPeer {
        /// Where.
        at: SocketAddr,
        /// Why.
        cause: String,
    },
    /// It is linked and does not answer.
    #[error("pod {0} does not answer")]
    Silent(String),
    /// It is this pod.
    #[error("{0} is this pod")]
    SelfDial(SocketAddr),
}

impl PeerError {
    /// Whether what is there is not one of our pods.
    pub(crate) fn is_strange(&self) -> bool {
        matches!(self, Self::NotAPeer { .. })
    }

    /// For how long nobody tries again, after so many failures in a row of one that is listed, or that DNS named.
    pub(crate) fn pause(&self, failures: u32, listed: bool) -> Duration {
        match (self.is_strange(), listed) {
            (true, _) => NOT_A_PEER_BACKOFF,
            (false, true) => {
                let again = REDIAL_DELAY.saturating_mul(1 << failures.saturating_sub(1).min(3));
                again.mul_f64(0.75 + rand::random::<f64>() / 2.0)
            }
            // A client that asks for a name chooses what DNS answers, and must not cause a dial for each answer.
            (false, false) => NAMED_RETRY_AFTER,
        }
    }
}

/// Makes links to other pods.
pub trait PeerDialer: fmt::Debug + Send + Sync {
    /// Makes a link to the pod at an address, `beside` an older one, and has it driven until it ends. Returns its sending
    /// side. Cancel safe: a dropped call leaves no link.
    fn dial(&self, at: SocketAddr, beside: bool) -> BoxFuture<'_, Result<Arc<LinkSender>, PeerError>>;
}

/// Makes links over TLS. The links come out of a channel, for their driver.
#[derive(Debug)]
pub struct TlsPeerDialer {
    link_context: LinkContext,
    tls: Reload<PeerTls>,
    pool: Pool,
    /// Where new links go, to be driven.
    links: mpsc::Sender<Link>,
}

/// What every keeper needs.
#[derive(Debug, Clone)]
pub(crate) struct DialContext {
    pub(crate) dialer: Arc<dyn PeerDialer>,
    /// This process.
    pub(crate) own: Instance,
    pub(crate) registry: Arc<Registry>,
    pub(crate) drain: Drain,
    /// Notified when the set of pods that cannot be reached may have changed.
    pub(crate) changed: watch::Sender<()>,
    /// Notified when the pods that may be homes may have changed.
    pub(crate) members_changed: Arc<Notify>,
    /// Whether this pod is to be told of every node.
    pub(crate) catches: Arc<AtomicBool>,
}

impl DialContext {
    /// Says first over a new link to another pod, at whichever side it was made, what that has to know.
    pub(crate) fn send_greeting(&self, link: &LinkSender, news: &Announcements) {
        if self.catches.load(Relaxed) {
            link.load(Load {
                nodes: self.registry.node_counts().0 as u64,
                stopping: false,
                intercepts: true,
            });
        }
        news.add_initial(&self.registry);
    }
}

impl TlsPeerDialer {
    /// The links that it makes come out of the second value; the caller drives them.
    pub fn new(
        tls: Reload<PeerTls>,
        pool: Pool,
        link_context: LinkContext,
    ) -> (Arc<Self>, mpsc::Receiver<Link>) {
        let (links, made) = mpsc::channel(MAX_DIALLED);
        (Arc::new(Self { link_context, tls, pool, links }), made)
    }

    /// A link to the pod at an address. Nothing is sent there before TLS has proved that it is one of ours.
    async fn connect(&self, at: SocketAddr, beside: bool) -> Result<Link, PeerError> {
        let no = |cause: String| PeerError::NoLink { at, cause };
        let socket = dial(&[at], CONNECT).await.map_err(|e| no(e.to_string()))?;
        tune_link(&socket, self.link_context.congestion.as_deref()).map_err(|e| no(e.to_string()))?;
        let tls = self.tls.load();
        let connector = TlsConnector::from(tls.config.clone());
        let io = connector.connect(tls.name.clone(), Buffered::new(socket, self.pool.clone())).await;
        let io = io.map_err(|e| {
            let (fault, name) = (HandshakeError::of(&e), tls.name.to_str());
            let cause = format!("TLS as {name:?} failed: {fault}{}", remedy(&fault));
            if fault.is_of_the_certificate() { PeerError::NotAPeer { at, cause } } else { no(cause) }
        })?;
        let authority = match &tls.name {
            ServerName::DnsName(name) => name.as_ref().to_owned(),
            _ => at.to_string(),
        };
        dial_peer(io, &authority, beside, &self.link_context).await.map_err(|e| match e {
            LinkDialError::Itself => PeerError::SelfDial(at),
            e => no(e.to_string()),
        })
    }
}

impl PeerDialer for TlsPeerDialer {
    fn dial(&self, at: SocketAddr, beside: bool) -> BoxFuture<'_, Result<Arc<LinkSender>, PeerError>> {
        async move {
            let no = |cause: String| PeerError::NoLink { at, cause };
            let made = timeout(CONNECT, self.connect(at, beside)).await;
            let link = made.unwrap_or_else(|_| Err(no(format!("no link within {CONNECT:?}"))))?;
            let sender = link.sender.clone();
            self.links.send(link).await.map_err(|_| no("this pod is stopping".into()))?;
            Ok(sender)
        }
        .boxed()
    }
}

/// Which key of the pods mends it.
fn remedy(fault: &HandshakeError) -> &'static str {
    match fault {
        HandshakeError::UnknownIssuer | HandshakeError::AlertReceived(_) => {
            "; all pods need certificates of one authority, and its file as mode.cloud.stream.server.ca"
        }
        HandshakeError::Name(_) => "; all pods need one name in common, mode.cloud.registry.name",
        _ => "",
    }
}

/// Links that may wait to be driven.
const MAX_DIALLED: usize = 16;
/// How long making one may take: on a far line, or one that loses a packet, more than a look-up waits, and the next one
/// finds it.
const CONNECT: Duration = Duration::from_secs(4);
/// The first pause after a failure, doubled up to eight times: a dead pod costs nobody a timeout, one that is back is
/// soon dialled again (and, once it has a node, dials by itself).
pub(crate) const REDIAL_DELAY: Duration = Duration::from_millis(250);
/// After a failure of one that DNS named.
const NAMED_RETRY_AFTER: Duration = Duration::from_secs(1);
/// After one that is not a pod of ours: its certificate, or ours, has to change first.
const NOT_A_PEER_BACKOFF: Duration = Duration::from_secs(60);

// Announcements to one other pod: nodes that were linked here or moved, gathered while it has no link or a full one.

/// Nodes that are to be announced to one other pod. Any thread adds; one task sends.
#[derive(Debug, Default)]
pub(crate) struct Announcements {
    /// With what another pod has said of the node, if that is to be forwarded; else that it is linked here.
    nodes: Mutex<HashMap<NodeName, Option<Found>>>,
    more: Notify,
}

impl Announcements {
    /// Adds a node that is linked here, or of which another pod's Found is `forwarded`. One that does not fit is left
    /// out; the other pod then finds it by asking.
    pub(crate) fn add(&self, node: &NodeName, forwarded: Option<Found>) {
        let mut nodes = self.lock();
        if nodes.len() < MAX_ANNOUNCED {
            nodes.insert(node.clone(), forwarded);
        }
        drop(nodes);
        self.more.notify_one();
    }

    /// Adds two of the nodes that were linked before the other pod was: enough for what leads to any node, and to know
    /// that there are several. It finds the rest by asking.
    pub(crate) fn add_initial(&self, registry: &Registry) {
        registry.oldest(INITIAL_ANNOUNCEMENTS).iter().for_each(|node| self.add(node, None));
    }

    /// Forgets all of them, as the link has ended.
    pub(crate) fn clear(&self) {
        *self.lock() = HashMap::new();
    }

    /// Waits until a node was added; it may have been sent already. Cancel safe.
    pub(crate) async fn wait_added(&self) {
        self.more.notified().await;
    }

    /// Sends all announcements over a link, as fast as that takes them, until the link is closed.
    ///
    /// The set is taken out whole, so adders never wait for the link; nodes that are added meanwhile wait for the next
    /// call. Not cancel safe: a dropped call loses what it had taken out and not sent.
    pub(crate) async fn send(&self, to: &Arc<LinkSender>, registry: &Registry, own: Instance) {
        let nodes = std::mem::take(&mut *self.lock());
        for (node, forwarded) in nodes {
            // Looked up again now: the node may have gone since it was added, and then there is nothing to announce.
            let here = || registry.link_of(&node).map(|linked| linked.found(UNSOLICITED, own));
            let Some(found) = forwarded.or_else(here) else { continue };
            while !to.found(&node, found.clone()) {
                if to.is_closed() {
                    return;
                }
                sleep(FULL).await;
            }
        }
    }

    fn lock(&self) -> MutexGuard<'_, HashMap<NodeName, Option<Found>>> {
        self.nodes.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// The number that marks an announcement: no question has it.
pub(crate) const UNSOLICITED: u64 = 0;
/// Nodes that another pod is told of when it is linked.
const INITIAL_ANNOUNCEMENTS: usize = 2;
/// Nodes that may wait to be announced to one pod: more than a pod has.
const MAX_ANNOUNCED: usize = 50_000;
/// The pause before another try when too much waits on the link.
const FULL: Duration = Duration::from_millis(5);
