//! One other pod, by its address: a link to it that is made when it is needed, and dropped when it is not.

use std::net::SocketAddr;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use tokio::sync::{Notify, mpsc, watch};
use tokio::time::{Instant, sleep, timeout};
use tokio_rustls::TlsConnector;
use tokio_rustls::rustls::pki_types::ServerName;
use tokio_util::sync::CancellationToken;

use super::news::News;
use crate::names::NodeName;
use crate::net::dial::dial;
use crate::net::listen::tune_link;
use crate::net::pool::Pool;
use crate::net::reload::Reload;
use crate::net::socket::Buffered;
use crate::net::tls::Dialer;
use crate::registry::Registry;
use crate::tunnel::grpc::{DialError, Ground, dial_pod};
use crate::tunnel::{Link, Outbox};

/// One other pod. Its keeper runs [`Self::keep`].
#[derive(Debug)]
pub(super) struct Sibling {
    /// Where its gRPC port is.
    pub(super) at: SocketAddr,
    /// Whether it is one of those that are asked for every node; else DNS named it once.
    pub(super) listed: AtomicBool,
    /// What it is to be told.
    news: News,
    wanted: Notify,
    dismissed: CancellationToken,
    /// When its link was last of use.
    used: Mutex<Instant>,
    state: watch::Sender<State>,
}

/// Why another pod could not be asked.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum Unreachable {
    /// No link could be made. The cause says what to do.
    #[error("pod {at} cannot be reached: {cause}")]
    NoLink {
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
    Itself(SocketAddr),
}

/// What every keeper needs.
#[derive(Debug, Clone)]
pub(super) struct Means {
    pub(super) ground: Ground,
    pub(super) registry: Arc<Registry>,
    pub(super) tls: Reload<Dialer>,
    pub(super) pool: Pool,
    /// Where new links go, to be driven.
    pub(super) links: mpsc::Sender<Link>,
}

#[derive(Debug, Clone)]
enum State {
    /// No link, and none is wanted.
    Away,
    /// A link is being made since then.
    Dialling(Instant),
    /// None could be made; not tried again before then.
    Failed(Instant, Unreachable),
    Up(Arc<Outbox>),
    /// Its keeper has ended, or it is ourselves.
    Never(Unreachable),
}

impl Sibling {
    /// One at that address, without a link.
    pub(super) fn new(at: SocketAddr, listed: bool) -> Arc<Self> {
        Arc::new(Self {
            at,
            listed: AtomicBool::new(listed),
            news: News::default(),
            wanted: Notify::new(),
            dismissed: CancellationToken::new(),
            used: Mutex::new(Instant::now()),
            state: watch::Sender::new(State::Away),
        })
    }

    /// The link, if there is one.
    pub(super) fn up(&self) -> Option<Arc<Outbox>> {
        match &*self.state.borrow() {
            State::Up(outbox) if !outbox.is_closed() => Some(outbox.clone()),
            _ => None,
        }
    }

    /// Whether its keeper has ended for good.
    pub(super) fn is_over(&self) -> bool {
        matches!(&*self.state.borrow(), State::Never(Unreachable::NoLink { .. }))
    }

    /// Whether it is this very pod.
    pub(super) fn is_ourselves(&self) -> bool {
        matches!(&*self.state.borrow(), State::Never(Unreachable::Itself(_)))
    }

    /// The link, made if there is none. Waits at most 1 s for one; who comes later waits only what is left of it, and
    /// for a while after a failure nobody waits at all. Cancel safe.
    pub(super) async fn link(&self) -> Result<Arc<Outbox>, Unreachable> {
        let mut state = self.state.subscribe();
        let begun = Instant::now();
        loop {
            let known = state.borrow_and_update().clone();
            let since = match known {
                State::Up(outbox) if !outbox.is_closed() => {
                    self.touch();
                    return Ok(outbox);
                }
                State::Never(why) => return Err(why),
                State::Failed(until, why) if Instant::now() < until => return Err(why),
                State::Dialling(since) => since,
                State::Up(_) | State::Away | State::Failed(..) => {
                    self.wanted.notify_one();
                    begun
                }
            };
            let left = LOOK_UP.saturating_sub(since.elapsed());
            if !matches!(timeout(left, state.changed()).await, Ok(Ok(()))) {
                return Err(self.unreachable(format!("no link within {LOOK_UP:?}")));
            }
        }
    }

    /// It is to be told of a node, and linked if it is not.
    pub(super) fn tell(&self, node: &NodeName) {
        self.news.add(node);
        self.wanted.notify_one();
    }

    /// It was used by the other end.
    pub(super) fn touch(&self) {
        *self.used.lock().unwrap_or_else(PoisonError::into_inner) = Instant::now();
    }

    /// It is none of the pods any more: its link is not made again.
    pub(super) fn dismiss(&self) {
        self.listed.store(false, Relaxed);
        self.dismissed.cancel();
    }

    /// Makes links whenever one is wanted, until draining begins or it is dismissed; for one that DNS named, once.
    pub(super) async fn keep(self: Arc<Self>, means: Means) {
        let drain = means.ground.drain.clone();
        let mut failures = 0;
        loop {
            tokio::select! {
                biased;
                () = drain.draining() => break,
                () = self.dismissed.cancelled() => break,
                () = self.wanted.notified() => {}
                // DNS named it, and nobody waited for the answer.
                () = sleep(IDLE), if !self.listed.load(Relaxed) => break,
            }
            self.state.send_replace(State::Dialling(Instant::now()));
            let made = timeout(CONNECT, self.connect(&means)).await;
            let made = made.unwrap_or_else(|_| Err(self.unreachable(format!("no link within {CONNECT:?}"))));
            let pause = match made {
                Ok(link) => {
                    failures = 0;
                    self.serve(link, &means).await;
                    Duration::ZERO
                }
                Err(why @ Unreachable::Itself(_)) => {
                    tracing::debug!(at = %self.at, "this address is our own");
                    self.news.clear();
                    self.state.send_replace(State::Never(why));
                    return;
                }
                Err(why) => {
                    failures += 1;
                    self.failed(failures, why)
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
        self.state.send_replace(State::Never(self.unreachable("it is not one of our pods any more".into())));
    }

    /// A link is up: kept until it ends, or has had nothing to do for a minute.
    async fn serve(&self, link: Link, means: &Means) {
        let (outbox, own) = (link.outbox.clone(), means.ground.table.instance());
        if means.links.send(link).await.is_err() {
            return;
        }
        tracing::info!(at = %self.at, instance = ?outbox.instance, "linked to another pod");
        self.state.send_replace(State::Up(outbox.clone()));
        means.registry.told_of_a_pod();
        if !self.news.is_empty() {
            self.news.tell(&outbox, &means.registry, own).await;
        }
        // Whoever wanted it while it was made has it now.
        let _ = timeout(Duration::ZERO, self.wanted.notified()).await;
        self.touch();
        while !outbox.is_closed() {
            tokio::select! {
                () = outbox.closed() => {}
                () = self.news.come() => {
                    self.touch();
                    self.news.tell(&outbox, &means.registry, own).await;
                }
                () = sleep(IDLE / 4) => {
                    if outbox.sessions() > 0 {
                        self.touch();
                    } else if self.unused() >= IDLE {
                        tracing::debug!(at = %self.at, "the link to another pod is not needed any more");
                        outbox.close();
                    }
                }
            }
        }
        self.state.send_replace(State::Away);
    }

    /// Says so, and returns for how long nobody tries again.
    fn failed(&self, failures: u32, why: Unreachable) -> Duration {
        tracing::debug!(%why, "no link to another pod");
        self.news.clear();
        let pause = AGAIN
            .saturating_mul(1 << failures.saturating_sub(1).min(3))
            .mul_f64(0.75 + rand::random::<f64>() / 2.0);
        self.state.send_replace(State::Failed(Instant::now() + pause, why));
        pause
    }

    async fn connect(&self, means: &Means) -> Result<Link, Unreachable> {
        let no = |cause: String| self.unreachable(cause);
        let socket = dial(&[self.at], CONNECT).await.map_err(|e| no(e.to_string()))?;
        tune_link(&socket).map_err(|e| no(e.to_string()))?;
        let tls = means.tls.load();
        let connector = TlsConnector::from(tls.config.clone());
        let io = connector.connect(tls.name.clone(), Buffered::new(socket, means.pool.clone())).await;
        let io = io.map_err(|e| no(format!("TLS as {:?} failed: {e}", tls.name.to_str())))?;
        let authority = match &tls.name {
            ServerName::DnsName(name) => name.as_ref().to_owned(),
            _ => self.at.to_string(),
        };
        dial_pod(io, &authority, &means.ground).await.map_err(|e| match e {
            DialError::Itself => Unreachable::Itself(self.at),
            e => no(e.to_string()),
        })
    }

    /// Until when nobody tries again, if the last try failed.
    #[cfg(test)]
    pub(super) fn failed_until(&self) -> Option<Instant> {
        match &*self.state.borrow() {
            State::Failed(until, _) => Some(*until),
            _ => None,
        }
    }

    fn unused(&self) -> Duration {
        self.used.lock().unwrap_or_else(PoisonError::into_inner).elapsed()
    }

    fn unreachable(&self, cause: String) -> Unreachable {
        Unreachable::NoLink { at: self.at, cause }
    }
}

/// How long a look-up waits for a link; others are asked at the same time.
const LOOK_UP: Duration = Duration::from_secs(1);
/// How long making one may take: on a far line, or one that loses a packet, more than a look-up waits, and the next one
/// finds it.
const CONNECT: Duration = Duration::from_secs(4);
/// The first pause after a failure, doubled up to eight times: a dead pod costs nobody a timeout, one that is back is
/// soon asked again (and, once it has a node, tells so itself).
pub(super) const AGAIN: Duration = Duration::from_millis(250);
/// A link that nobody used for so long is dropped.
const IDLE: Duration = Duration::from_secs(60);
