//! A peer by its address: the link to it, and its known state.

use std::future::ready;
use std::net::SocketAddr;
use std::pin::pin;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::sync::atomic::Ordering::Relaxed;
use std::time::Duration;

use parking_lot::Mutex;
use tokio::sync::{Notify, watch};
use tokio::time::{Instant, sleep, timeout};
use tokio_util::sync::CancellationToken;

use crate::paths::node_not_found::PeerError;
use crate::registry::peers::peer_dialer::PeerDialContext;
use tunnel_link::backup::BackupDialer;
use tunnel_link::link::Link;
use tunnel_proto::names;

/// A peer. One task runs `run` for it.
///
/// Only that task changes the state and dials; others read the state and request a link by `redial`. A waiter for a
/// link subscribes to the state before checking it, so no change in between is missed.
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
    pub(super) state: watch::Sender<PeerState>,
    /// The name that it announced when it was last linked.
    name: Mutex<Option<names::ServerDisplayName>>,
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
            name: Mutex::default(),
        })
    }

    /// Returns the current link, if any.
    pub(crate) fn up(&self) -> Option<Arc<Link>> {
        let state = self.state.borrow().clone();
        match state {
            PeerState::Linked(link) if !link.is_closed() => Some(link),
            _ => None,
        }
    }

    /// Returns why the last attempt to link failed; `None` once one succeeds.
    pub(crate) fn last_error(&self) -> Option<PeerError> {
        match &*self.state.borrow() {
            PeerState::Failed(_, why) | PeerState::Dialling(_, Some(why)) => Some(why.clone()),
            _ => None,
        }
    }

    /// Returns the name that it announced when it was last linked.
    pub(crate) fn name(&self) -> Option<names::ServerDisplayName> {
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

    /// Keeps a link to it until draining begins or the peer is dismissed. For a peer that DNS returned, makes only one,
    /// on request.
    pub(crate) async fn run(self: Arc<Self>, context: PeerDialContext) {
        let drain = context.drain.clone();
        loop {
            self.keep_linked(&context).await;
            if self.is_self() {
                return;
            }
            let why = "no longer listed as a peer".into();
            self.state.send_replace(PeerState::Stopped(PeerError::NoLink { at: self.at, cause: why }));
            context.changed.send_replace(());
            // Checked after the state was set, because another thread may have listed the peer again. If that happened
            // before the check, this task continues; otherwise the list finds the stopped state and replaces the peer.
            if drain.is_draining() || self.dismissed.is_cancelled() || !self.listed.load(Relaxed) {
                return;
            }
            self.state.send_replace(PeerState::Unlinked);
        }
    }

    async fn keep_linked(&self, context: &PeerDialContext) {
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
            self.state.send_replace(PeerState::Dialling(Instant::now(), self.last_error()));
            let pause = match context.dialer.dial(self.at, false).await {
                Ok(link) => {
                    failures = 0;
                    self.serve(link, &mut second, context).await;
                    Duration::ZERO
                }
                Err(why @ PeerError::SelfDial(_)) => {
                    tracing::debug!(server_addr = %self.at, "address belongs to this server");
                    self.state.send_replace(PeerState::Stopped(why));
                    context.changed.send_replace(());
                    return;
                }
                Err(why) => {
                    failures += 1;
                    self.failed(failures, why, context)
                }
            };
            // Independent of requests: an unreachable server is not dialled for each client.
            drain.run_until(self.dismissed.run_until_cancelled(sleep(pause))).await;
            if !self.listed.load(Relaxed) {
                break;
            }
        }
    }

    /// Logs the failure and returns the time until the next attempt.
    fn failed(&self, failures: u32, why: PeerError, context: &PeerDialContext) -> Duration {
        let listed = self.listed.load(Relaxed);
        // Servers that start together do not reach each other at first.
        if listed && (failures == WARN_AFTER_FAILURES || failures == 1 && why.is_strange()) {
            tracing::warn!(error = %why, "cannot link to peer, retrying");
        } else {
            tracing::debug!(error = %why, "cannot link to peer");
        }
        let pause = why.pause(failures, listed);
        self.state.send_replace(PeerState::Failed(Instant::now() + pause, why));
        context.changed.send_replace(());
        pause
    }

    /// Serves a link until it ends. An unresponsive link is replaced by a new one.
    async fn serve(&self, mut link: Arc<Link>, second: &mut BackupDialer, context: &PeerDialContext) {
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
        link: &Arc<Link>,
        second: &mut BackupDialer,
        context: &PeerDialContext,
    ) -> Option<Arc<Link>> {
        let server = link.instance.map(tracing::field::debug);
        tracing::info!(link = %link.id, server_addr = %self.at, server, "linked to peer");
        *self.name.lock() = link.ends().and_then(|ends| ends.server_name.clone());
        self.state.send_replace(PeerState::Linked(link.clone()));
        context.changed.send_replace(());
        context.links_changed.notify_one();
        context.registry.awaited.wake_all();
        self.mark_used();
        let mut outrun = pin!(second.race(link, || context.dialer.dial(self.at, true)));
        while !link.is_closed() {
            tokio::select! {
                () = link.closed() => {}
                () = sleep(IDLE_TIMEOUT / 4) => {
                    if self.listed.load(Relaxed) || link.sessions() > 0 {
                        self.mark_used();
                    } else if self.used.lock().elapsed() >= IDLE_TIMEOUT {
                        tracing::debug!(server_addr = %self.at, "idle link to peer closed");
                        link.close();
                    }
                }
                next = &mut outrun => return Some(next),
            }
        }
        None
    }

    /// Returns the link, and makes one if there is none. Waits at most 1 s; a later call only waits for the rest of
    /// that time. For a while after a failure calls do not wait at all. Cancel safe.
    pub(crate) async fn link(&self) -> Result<Arc<Link>, PeerError> {
        let mut state = self.state.subscribe();
        let started = Instant::now();
        loop {
            let known = state.borrow_and_update().clone();
            let since = match known {
                PeerState::Linked(link) if !link.is_closed() => {
                    self.mark_used();
                    return Ok(link);
                }
                PeerState::Stopped(why) => return Err(why),
                PeerState::Failed(until, why) if Instant::now() < until => return Err(why),
                PeerState::Dialling(since, _) => since,
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

/// Number of failures in a row after which one is logged as a warning.
const WARN_AFTER_FAILURES: u32 = 3;
/// A link to a peer that DNS returned is closed if it was not used for this long.
const IDLE_TIMEOUT: Duration = Duration::from_secs(60);

/// How long a search waits for a link; other peers are asked at the same time.
const LINK_WAIT: Duration = Duration::from_secs(1);

/// The state of this server's own link to a peer.
#[derive(Debug, Clone)]
pub(crate) enum PeerState {
    /// No link, and none is requested.
    Unlinked,
    /// A link has been in progress since then. The last attempt failed for that reason, if it did.
    Dialling(Instant, Option<PeerError>),
    /// The last attempt failed; the next one starts no earlier than that time.
    Failed(Instant, PeerError),
    Linked(Arc<Link>),
    /// Its task has ended, or the address is this server's own.
    Stopped(PeerError),
}
