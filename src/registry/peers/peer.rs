//! A peer by its address: the link to it, and its known state.

use std::fmt;
use std::future::ready;
use std::net::SocketAddr;
use std::pin::pin;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::sync::atomic::Ordering::Relaxed;
use std::time::Duration;

use futures_util::FutureExt as _;
use futures_util::future::BoxFuture;
use parking_lot::Mutex;
use tokio::net::TcpStream;
use tokio::sync::{Notify, mpsc, watch};
use tokio::time::{Instant, sleep, timeout};
use tokio_rustls::TlsConnector;
use tokio_rustls::rustls::AlertDescription;
use tokio_rustls::rustls::pki_types::ServerName;
use tokio_util::sync::CancellationToken;

use crate::registry::Registry;
use tunnel_base::drain::Drain;
use tunnel_base::names::{self, Host, Instance};
use tunnel_link::backup::BackupDialer;
use tunnel_link::grpc::LinkContext;
use tunnel_link::grpc::dial::{LinkDialError, dial_peer};
use tunnel_link::link::Link;
use tunnel_link::sender::LinkSender;
use tunnel_net::dial::dial;
use tunnel_net::listen::tune_link;
use tunnel_net::path_mtu;
use tunnel_net::pool::BufferPool;
use tunnel_net::reload::Reload;
use tunnel_net::socket::Buffered;
use tunnel_net::tls::PeerTls;
use tunnel_net::tls::error::HandshakeError;

/// A peer. One task runs [`Self::run`] for it.
///
/// Only that task changes the state and dials; others read the state and request a link by `redial`. A waiter for a link
/// subscribes to the state before checking it, so no change in between is missed.
#[derive(Debug)]
pub struct Peer {
    /// The address of its gRPC port.
    pub(crate) at: SocketAddr,
    /// Whether it is in the list of peers, to which links are kept; otherwise DNS returned it once.
    pub(crate) listed: AtomicBool,
    /// Notified when a link should be made, if it is not listed.
    redial: Notify,
    dismissed: CancellationToken,
    /// Time of the last use of its link.
    used: Mutex<Instant>,
    state: watch::Sender<PeerState>,
    /// Why the last attempt to link failed; `None` once one succeeds.
    trouble: Mutex<Option<PeerError>>,
    /// The name that it announced when it was last linked.
    name: Mutex<Option<names::ServerName>>,
}

impl Peer {
    /// Returns a peer at that address, without a link.
    pub(crate) fn new(at: SocketAddr, listed: bool) -> Arc<Self> {
        Arc::new(Self {
            at,
            listed: AtomicBool::new(listed),
            redial: Notify::new(),
            dismissed: CancellationToken::new(),
            used: Mutex::new(Instant::now()),
            state: watch::Sender::new(PeerState::Unlinked),
            trouble: Mutex::default(),
            name: Mutex::default(),
        })
    }

    /// Returns the current link, if any.
    pub(crate) fn up(&self) -> Option<Arc<LinkSender>> {
        let state = self.state.borrow().clone();
        match state {
            PeerState::Linked(sender) if !sender.is_closed() => Some(sender),
            _ => None,
        }
    }

    /// Returns why the last attempt to link failed; `None` once one succeeds.
    pub(crate) fn last_error(&self) -> Option<PeerError> {
        self.trouble.lock().clone()
    }

    /// Returns the name that it announced when it was last linked.
    pub(crate) fn name(&self) -> Option<names::ServerName> {
        self.name.lock().clone()
    }

    /// Returns true if its task has ended for good.
    pub(crate) fn is_over(&self) -> bool {
        matches!(&*self.state.borrow(), PeerState::Stopped(PeerError::NoLink { .. }))
    }

    /// Returns true if the address is this server's own.
    pub(crate) fn is_self(&self) -> bool {
        matches!(&*self.state.borrow(), PeerState::Stopped(PeerError::SelfDial(_)))
    }

    /// Records that its link has just been used.
    pub(crate) fn mark_used(&self) {
        *self.used.lock() = Instant::now();
    }

    /// Adds it to the list: its link is kept, and made again when it is lost.
    pub(crate) fn relist(&self) {
        if !self.listed.swap(true, Relaxed) {
            self.redial.notify_one();
        }
    }

    /// Removes it from the list: it stays known while its link lives, and the link is not made again. Returns true if
    /// it has no link, so that it can be removed.
    pub(crate) fn unlist(&self) -> bool {
        self.listed.store(false, Relaxed);
        let over = self.up().is_none();
        if over {
            self.dismissed.cancel();
        }
        over
    }

    /// Keeps a link to it until draining begins or the peer is dismissed. For a peer that DNS returned, makes only one, on
    /// request.
    pub(crate) async fn run(self: Arc<Self>, context: DialContext) {
        let drain = context.drain.clone();
        loop {
            self.keep_linked(&context).await;
            if self.is_self() {
                return;
            }
            let why = "no longer listed as a peer".into();
            self.state.send_replace(PeerState::Stopped(PeerError::NoLink { at: self.at, cause: why }));
            self.note(None, &context);
            // Checked after the state was set, because another thread may have listed the peer again. If that happened
            // before the check, this task continues; otherwise the list finds the stopped state and replaces the peer.
            if drain.is_draining() || self.dismissed.is_cancelled() || !self.listed.load(Relaxed) {
                return;
            }
            self.state.send_replace(PeerState::Unlinked);
        }
    }

    async fn keep_linked(&self, context: &DialContext) {
        let drain = context.drain.clone();
        let mut failures = 0;
        let mut second = BackupDialer::new(context.registry.metrics.clone());
        loop {
            tokio::select! {
                biased;
                () = drain.draining() => break,
                () = self.dismissed.cancelled() => break,
                () = ready(()), if self.listed.load(Relaxed) => {}
                () = self.redial.notified() => {}
                // DNS returned it, and the search no longer waits for it.
                () = sleep(IDLE_TIMEOUT) => break,
            }
            self.state.send_replace(PeerState::Dialling(Instant::now()));
            let pause = match context.dialer.dial(self.at, false).await {
                Ok(link) => {
                    failures = 0;
                    self.serve(link, &mut second, context).await;
                    Duration::ZERO
                }
                Err(why @ PeerError::SelfDial(_)) => {
                    tracing::debug!(server_addr = %self.at, "address belongs to this server");
                    self.state.send_replace(PeerState::Stopped(why));
                    self.note(None, context);
                    return;
                }
                Err(why) => {
                    failures += 1;
                    self.failed(failures, why, context)
                }
            };
            // Independent of requests: an unreachable server is not dialled for each client.
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

    /// Logs the failure and returns the time until the next attempt.
    fn failed(&self, failures: u32, why: PeerError, context: &DialContext) -> Duration {
        let listed = self.listed.load(Relaxed);
        // Servers that start together do not reach each other at first.
        if listed && (failures == WARN_AFTER_FAILURES || failures == 1 && why.is_strange()) {
            tracing::warn!(error = %why, "cannot link to peer, retrying");
        } else {
            tracing::debug!(error = %why, "cannot link to peer");
        }
        let pause = why.pause(failures, listed);
        self.state.send_replace(PeerState::Failed(Instant::now() + pause, why.clone()));
        self.note(Some(why), context);
        pause
    }

    fn note(&self, trouble: Option<PeerError>, context: &DialContext) {
        let mut known = self.trouble.lock();
        let changed = *known != trouble;
        *known = trouble;
        drop(known);
        if changed {
            context.changed.send_replace(());
        }
    }

    /// Sets the state as if it had just been linked.
    #[cfg(test)]
    pub(crate) fn set_linked(&self, link: &Arc<LinkSender>) {
        self.state.send_replace(PeerState::Linked(link.clone()));
    }

    /// Returns the earliest time of the next attempt, if the last one failed.
    #[cfg(test)]
    pub(crate) fn failed_until(&self) -> Option<Instant> {
        if let PeerState::Failed(until, _) = &*self.state.borrow() { Some(*until) } else { None }
    }

    fn idle_time(&self) -> Duration {
        self.used.lock().elapsed()
    }
}

/// Number of failures in a row after which one is logged as a warning.
const WARN_AFTER_FAILURES: u32 = 3;
/// A link to a peer that DNS returned is closed if it was not used for this long.
const IDLE_TIMEOUT: Duration = Duration::from_secs(60);

// The link to a peer while it is up.

impl Peer {
    /// Serves a link until it ends. An unresponsive link is replaced by a new one.
    async fn serve(&self, mut link: Arc<LinkSender>, second: &mut BackupDialer, context: &DialContext) {
        while let Some(next) = self.serve_one(&link, second, context).await {
            self.state.send_replace(PeerState::Linked(next.clone()));
            link.close();
            link = next;
        }
        self.state.send_replace(PeerState::Unlinked);
    }

    /// Serves a link until it ends. Returns the backup link if it is unresponsive and that has answered first.
    async fn serve_one(
        &self,
        link: &Arc<LinkSender>,
        second: &mut BackupDialer,
        context: &DialContext,
    ) -> Option<Arc<LinkSender>> {
        let server = link.instance.map(tracing::field::debug);
        tracing::info!(link = %link.id, server_addr = %self.at, server, "linked to peer");
        *self.name.lock() = link.ends().and_then(|ends| ends.server_name.clone());
        self.state.send_replace(PeerState::Linked(link.clone()));
        self.note(None, context);
        context.changed.send_replace(());
        context.links_changed.notify_one();
        context.registry.wake_all_waiters();
        self.mark_used();
        let mut outrun = pin!(second.race(link, || context.dialer.dial(self.at, true)));
        while !link.is_closed() {
            tokio::select! {
                () = link.closed() => {}
                () = sleep(IDLE_TIMEOUT / 4) => {
                    if self.listed.load(Relaxed) || link.sessions() > 0 {
                        self.mark_used();
                    } else if self.idle_time() >= IDLE_TIMEOUT {
                        tracing::debug!(server_addr = %self.at, "idle link to peer closed");
                        link.close();
                    }
                }
                next = &mut outrun => return Some(next),
            }
        }
        None
    }
}

// Waiting for a link to a peer.

impl Peer {
    /// Returns the link, and makes one if there is none. Waits at most 1 s; a later call only waits for the rest of
    /// that time. For a while after a failure calls do not wait at all. Cancel safe.
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
                    self.redial.notify_one();
                    started
                }
            };
            let left = LINK_WAIT.saturating_sub(since.elapsed());
            if !matches!(timeout(left, state.changed()).await, Ok(Ok(()))) {
                let cause = format!("no link within {LINK_WAIT:?}");
                return Err(PeerError::NoLink { at: self.at, cause });
            }
        }
    }
}

/// How long a search waits for a link; other peers are asked at the same time.
const LINK_WAIT: Duration = Duration::from_secs(1);

// The state of a peer's link.

/// The state of this server's own link to a peer.
#[derive(Debug, Clone)]
pub(crate) enum PeerState {
    /// No link, and none is requested.
    Unlinked,
    /// A link has been in progress since then.
    Dialling(Instant),
    /// The last attempt failed; the next one starts no earlier than that time.
    Failed(Instant, PeerError),
    Linked(Arc<LinkSender>),
    /// Its task has ended, or the address is this server's own.
    Stopped(PeerError),
}

// Making a link to a peer, and why there is none.

/// Why a peer could not be asked.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum PeerError {
    /// No link could be made. The cause contains a hint.
    #[error("peer {at} cannot be reached: {cause}")]
    NoLink {
        /// The address.
        at: SocketAddr,
        /// The reason.
        cause: String,
    },
    /// Its certificate is not a peer's. The cause contains what is wrong with it.
    #[error("peer {at} cannot be reached: {cause}")]
    NotAPeer {
        /// The address.
        at: SocketAddr,
        /// The reason.
        cause: String,
    },
    /// It is linked and does not answer.
    #[error("peer {0} does not answer")]
    Silent(String),
    /// The address is this server's own.
    #[error("{0} is this server")]
    SelfDial(SocketAddr),
}

impl PeerError {
    /// Returns true if the remote end is not a peer.
    pub(crate) fn is_strange(&self) -> bool {
        matches!(self, Self::NotAPeer { .. })
    }

    /// Returns the pause before the next attempt, after that number of failures in a row. `listed` is false for a peer
    /// that DNS returned.
    pub(crate) fn pause(&self, failures: u32, listed: bool) -> Duration {
        match (self.is_strange(), listed) {
            (true, true) => NOT_A_PEER_BACKOFF,
            (true, false) => NAMED_NOT_A_PEER_BACKOFF,
            (false, true) => {
                let again = REDIAL_DELAY.saturating_mul(1 << failures.saturating_sub(1).min(3));
                again.mul_f64(0.75 + rand::random::<f64>() / 2.0)
            }
            // A client chooses the name that DNS is asked for, so it must not cause a dial for each answer.
            (false, false) => NAMED_RETRY_AFTER,
        }
    }
}

/// A dialer of links to peers, replaced in tests.
pub trait PeerDialer: fmt::Debug + Send + Sync {
    /// Makes a link to the server at an address, as a backup link if `is_backup`, and hands it to the driver. Returns its
    /// sending side. Cancel safe: a dropped call leaves no link.
    fn dial(&self, at: SocketAddr, is_backup: bool) -> BoxFuture<'_, Result<Arc<LinkSender>, PeerError>>;
}

/// A dialer over TLS. New links are sent to a channel, for their driver.
#[derive(Debug)]
pub struct TlsPeerDialer {
    link_context: LinkContext,
    tls: Reload<PeerTls>,
    pool: BufferPool,
    /// Receives new links, which are driven at the other end.
    links: mpsc::Sender<Link>,
}

/// The state shared by the tasks of all peers.
#[derive(Debug, Clone)]
pub(crate) struct DialContext {
    pub(crate) dialer: Arc<dyn PeerDialer>,
    /// This process.
    pub(crate) own: Instance,
    pub(crate) registry: Arc<Registry>,
    pub(crate) drain: Drain,
    /// Notified when the set of unreachable peers may have changed.
    pub(crate) changed: watch::Sender<()>,
    /// Notified when a link to a peer was made, or the one used for announcements has ended.
    pub(crate) links_changed: Arc<Notify>,
}

impl TlsPeerDialer {
    /// Returns the dialer and the receiver of its links, which the caller drives.
    pub fn new(
        tls: Reload<PeerTls>,
        pool: BufferPool,
        link_context: LinkContext,
    ) -> (Arc<Self>, mpsc::Receiver<Link>) {
        let (links, made) = mpsc::channel(MAX_DIALLED);
        (Arc::new(Self { link_context, tls, pool, links }), made)
    }

    /// Makes a link to the peer at an address. Nothing is sent before TLS has proved that it is a peer.
    ///
    /// An error comes with a fixed label for metrics.
    async fn connect(&self, at: SocketAddr, is_backup: bool) -> Result<Link, (&'static str, PeerError)> {
        let no = |cause: String| PeerError::NoLink { at, cause };
        let connect = async |_| {
            let socket = dial(&Host::Ip(at.ip()), &[at], CONNECT_TIMEOUT).await.map_err(|e| {
                let why = e.after(&at.into());
                (e.reason(), no(format!("{why}; check that it runs, and that firewalls allow this port")))
            })?;
            tune_link(&socket, self.link_context.congestion.as_deref())
                .map_err(|e| ("closed_by_remote", no(e.to_string())))?;
            Ok(socket)
        };
        path_mtu::handshake(connect, |socket, is_again| self.link(at, is_backup || is_again, socket)).await
    }

    /// Makes the TLS and link handshakes over a connection to a peer.
    async fn link(
        &self,
        at: SocketAddr,
        is_backup: bool,
        socket: TcpStream,
    ) -> Result<Link, (&'static str, PeerError)> {
        let no = |cause: String| PeerError::NoLink { at, cause };
        let tls = self.tls.load();
        let connector = TlsConnector::from(tls.config.clone());
        let io = connector.connect(tls.name.clone(), Buffered::new(socket, self.pool.clone())).await;
        let io = io.map_err(|e| {
            let (error, name) = (HandshakeError::of(&e), tls.name.to_str());
            let cause = format!("TLS handshake as {name:?} failed: {error}{}", hint(&error));
            let is_strange = error.is_of_the_certificate();
            ("tls", if is_strange { PeerError::NotAPeer { at, cause } } else { no(cause) })
        })?;
        let authority = match &tls.name {
            ServerName::DnsName(name) => name.as_ref().to_owned(),
            _ => at.to_string(),
        };
        dial_peer(io, &authority, is_backup, &self.link_context).await.map_err(|e| match e {
            LinkDialError::Itself => (e.reason(), PeerError::SelfDial(at)),
            LinkDialError::CertificateRejected(ref alert) => (e.reason(), no(format!("{e}{}", hint(alert)))),
            e => (e.reason(), no(e.to_string())),
        })
    }
}

impl PeerDialer for TlsPeerDialer {
    fn dial(&self, at: SocketAddr, is_backup: bool) -> BoxFuture<'_, Result<Arc<LinkSender>, PeerError>> {
        async move {
            let no = |cause: String| PeerError::NoLink { at, cause };
            let made = timeout(CONNECT_TIMEOUT, self.connect(at, is_backup)).await;
            let made =
                made.unwrap_or_else(|_| Err(("timeout", no(format!("no link within {CONNECT_TIMEOUT:?}")))));
            let link = made.map_err(|(reason, why)| {
                // The list of peers may contain this server's own address; that is no failure.
                if !matches!(why, PeerError::SelfDial(_)) {
                    self.link_context.metrics.link_dial_failures.count(reason);
                }
                why
            })?;
            let sender = link.sender.clone();
            self.links.send(link).await.map_err(|_| no("this server is stopping".into()))?;
            Ok(sender)
        }
        .boxed()
    }
}

/// Returns a hint with the config key that fixes the error.
fn hint(error: &HandshakeError) -> &'static str {
    match error {
        HandshakeError::Expired(..) => "; replace the certificate of that server",
        HandshakeError::AlertReceived(AlertDescription::CertificateExpired) => {
            "; replace this server's certificate, which server.links.cert names"
        }
        HandshakeError::UnknownIssuer | HandshakeError::AlertReceived(_) => {
            "; issue all servers' certificates from one CA and set server.links.peer_ca to it"
        }
        HandshakeError::Name(_) => "; issue every server certificate for server.peers.certificate_name",
        _ => "",
    }
}

/// Maximum number of links that wait to be driven.
const MAX_DIALLED: usize = 16;
/// Timeout of making a link. On a slow or lossy line this may exceed a search's wait; the next search then uses the
/// link.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(4);
/// The first pause after a failure, doubled up to eight times. A dead server then delays no search, and one that is
/// back is soon dialled again. Once it has a node, it dials on its own.
pub(crate) const REDIAL_DELAY: Duration = Duration::from_millis(250);
/// Pause after a failure of a peer that DNS returned.
const NAMED_RETRY_AFTER: Duration = Duration::from_secs(1);
/// Pause after a failed check of certificates: a certificate of either side has to change first. The operator who
/// replaces it watches `/readyz`.
const NOT_A_PEER_BACKOFF: Duration = Duration::from_secs(10);
/// The same for an address that DNS returned, and that may belong to a stranger.
const NAMED_NOT_A_PEER_BACKOFF: Duration = Duration::from_secs(60);
