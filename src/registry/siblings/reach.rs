//! Making a link to another pod, and why there is none.

use std::fmt;
use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::time::Duration;

use futures_util::FutureExt as _;
use futures_util::future::BoxFuture;
use tokio::sync::{Notify, mpsc, watch};
use tokio::time::timeout;
use tokio_rustls::TlsConnector;
use tokio_rustls::rustls::pki_types::ServerName;

use super::news::Announcements;
use crate::drain::Drain;
use crate::names::Instance;
use crate::net::dial::dial;
use crate::net::listen::tune_link;
use crate::net::pool::Pool;
use crate::net::reload::Reload;
use crate::net::socket::Buffered;
use crate::net::tls::{Dialer, Fault};
use crate::protocol::grpc::{DialError, LinkContext, dial_pod};
use crate::protocol::{Link, LinkSender, Load};
use crate::registry::Registry;

/// Why another pod could not be asked.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum Unreachable {
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
    Stranger {
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

impl Unreachable {
    /// Whether what is there is not one of our pods.
    pub(super) fn is_strange(&self) -> bool {
        matches!(self, Self::Stranger { .. })
    }

    /// For how long nobody tries again, after so many failures in a row of one that is listed, or that DNS named.
    pub(super) fn pause(&self, failures: u32, listed: bool) -> Duration {
        match (self.is_strange(), listed) {
            (true, _) => STRANGE_FOR,
            (false, true) => {
                let again = REDIAL_DELAY.saturating_mul(1 << failures.saturating_sub(1).min(3));
                again.mul_f64(0.75 + rand::random::<f64>() / 2.0)
            }
            // A client that asks for a name chooses what DNS answers, and must not cause a dial for each answer.
            (false, false) => NAMED_AGAIN,
        }
    }
}

/// Makes links to other pods.
pub trait PodDialer: fmt::Debug + Send + Sync {
    /// Makes a link to the pod at an address, `beside` an older one, and has it driven until it ends. Returns its sending
    /// side. Cancel safe: a dropped call leaves no link.
    fn dial(&self, at: SocketAddr, beside: bool) -> BoxFuture<'_, Result<Arc<LinkSender>, Unreachable>>;
}

/// Makes links over TLS. The links come out of a channel, for their driver.
#[derive(Debug)]
pub struct TlsPodDialer {
    ground: LinkContext,
    tls: Reload<Dialer>,
    pool: Pool,
    /// Where new links go, to be driven.
    links: mpsc::Sender<Link>,
}

/// What every keeper needs.
#[derive(Debug, Clone)]
pub(super) struct DialContext {
    pub(super) dialer: Arc<dyn PodDialer>,
    /// This process.
    pub(super) own: Instance,
    pub(super) registry: Arc<Registry>,
    pub(super) drain: Drain,
    /// Notified when the set of pods that cannot be reached may have changed.
    pub(super) changed: watch::Sender<()>,
    /// Notified when the pods that may be homes may have changed.
    pub(super) members_changed: Arc<Notify>,
    /// Whether this pod is to be told of every node.
    pub(super) catches: Arc<AtomicBool>,
}

impl DialContext {
    /// Says first over a new link to another pod, at whichever side it was made, what that has to know.
    pub(super) fn greet(&self, link: &LinkSender, news: &Announcements) {
        if self.catches.load(Relaxed) {
            link.load(Load { nodes: self.registry.held().0 as u64, stopping: false, catches: true });
        }
        news.greet(&self.registry);
    }
}

impl TlsPodDialer {
    /// The links that it makes come out of the second value; the caller drives them.
    pub fn new(tls: Reload<Dialer>, pool: Pool, ground: LinkContext) -> (Arc<Self>, mpsc::Receiver<Link>) {
        let (links, made) = mpsc::channel(MOST_MADE);
        (Arc::new(Self { ground, tls, pool, links }), made)
    }

    /// A link to the pod at an address. Nothing is sent there before TLS has proved that it is one of ours.
    async fn connect(&self, at: SocketAddr, beside: bool) -> Result<Link, Unreachable> {
        let no = |cause: String| Unreachable::NoLink { at, cause };
        let socket = dial(&[at], CONNECT).await.map_err(|e| no(e.to_string()))?;
        tune_link(&socket, self.ground.congestion.as_deref()).map_err(|e| no(e.to_string()))?;
        let tls = self.tls.load();
        let connector = TlsConnector::from(tls.config.clone());
        let io = connector.connect(tls.name.clone(), Buffered::new(socket, self.pool.clone())).await;
        let io = io.map_err(|e| {
            let (fault, name) = (Fault::of(&e), tls.name.to_str());
            let cause = format!("TLS as {name:?} failed: {fault}{}", remedy(&fault));
            if fault.is_of_the_certificate() { Unreachable::Stranger { at, cause } } else { no(cause) }
        })?;
        let authority = match &tls.name {
            ServerName::DnsName(name) => name.as_ref().to_owned(),
            _ => at.to_string(),
        };
        dial_pod(io, &authority, beside, &self.ground).await.map_err(|e| match e {
            DialError::Itself => Unreachable::Itself(at),
            e => no(e.to_string()),
        })
    }
}

impl PodDialer for TlsPodDialer {
    fn dial(&self, at: SocketAddr, beside: bool) -> BoxFuture<'_, Result<Arc<LinkSender>, Unreachable>> {
        async move {
            let no = |cause: String| Unreachable::NoLink { at, cause };
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
fn remedy(fault: &Fault) -> &'static str {
    match fault {
        Fault::Authority | Fault::Disbelieves(_) => {
            "; all pods need certificates of one authority, and its file as mode.cloud.stream.server.ca"
        }
        Fault::Name(_) => "; all pods need one name in common, mode.cloud.registry.name",
        _ => "",
    }
}

/// Links that may wait to be driven.
const MOST_MADE: usize = 16;
/// How long making one may take: on a far line, or one that loses a packet, more than a look-up waits, and the next one
/// finds it.
const CONNECT: Duration = Duration::from_secs(4);
/// The first pause after a failure, doubled up to eight times: a dead pod costs nobody a timeout, one that is back is
/// soon dialled again (and, once it has a node, dials by itself).
pub(super) const REDIAL_DELAY: Duration = Duration::from_millis(250);
/// After a failure of one that DNS named.
const NAMED_AGAIN: Duration = Duration::from_secs(1);
/// After one that is not a pod of ours: its certificate, or ours, has to change first.
const STRANGE_FOR: Duration = Duration::from_secs(60);
