//! From a target to a connection: resolved once, each address checked, the very address dialled that was checked.

use std::future::Future;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use std::sync::Arc;
use std::time::Duration;

use arc_swap::ArcSwap;
use tokio::net::TcpStream;
use tokio::time::{Instant, timeout_at};
use tracing::debug;

use crate::names::{Host, NodeName, Target};
use crate::net::dial::{DialError, Failure, dial};
use crate::net::interfaces::{Addresses, LocalAddresses};
use crate::net::listen::is_private;
use crate::net::resolver::{LookupError, Resolver};
use crate::policy::{Listening, Targets, is_number, is_off_limits, plain};
use crate::protocol::{Code, Refusal};

/// Where targets are dialled from, and which ones may be.
#[derive(Debug, Clone)]
pub struct TargetDialer {
    /// Where it stands, and for whom it dials.
    pub place: Place,
    /// The machine's own addresses. Those that other machines use are tried after loopback for a target of the node's name.
    pub own: LocalAddresses,
    /// What may be dialled; swap it when the config changes, for the sessions to come.
    pub targets: Arc<ArcSwap<Targets>>,
    /// Where this process itself listens: never dialled.
    pub listening: Listening,
    /// Resolves names.
    pub resolver: Resolver,
}

/// Where a dialer stands, and for whom it dials.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Place {
    /// At the node of this name: a target of that name is on this machine.
    Node(NodeName),
    /// At a pod, for edges: what is off limits is dialled only where it alone is allowed.
    ForEdges,
    /// At a pod, for its clients: what is off limits is not dialled, whatever is allowed.
    ForClients,
}

/// Why a target was not dialled.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct NotDialled {
    /// In words for the client.
    pub refusal: Refusal,
    /// Whether it is, or its name stands for, what no pod ever dials for a client.
    pub off_limits: bool,
}

impl TargetDialer {
    /// Connects to a target, if it is allowed and answers within `patience`. Cancel safe.
    ///
    /// # Errors
    ///
    /// Why not, in words for the client.
    pub async fn dial(&self, target: &Target, patience: Duration) -> Result<TcpStream, NotDialled> {
        let deadline = Instant::now() + patience;
        let mut here = self.own.now();
        if self.node().is_none() {
            // There a pod's own log port listens, for those on its machine: a rule for it has to name it.
            here.own.retain(|ip| !plain(*ip).is_loopback());
        }
        let ask = async |name: Arc<str>| self.resolver.lookup(&name).await;
        let found = self.addresses(target, &here, ask, deadline).await?;
        let dialled = dial(&found, deadline.saturating_duration_since(Instant::now())).await;
        let socket = dialled.map_err(|why| refusal(&why))?;
        // Only now, as a port of operators is announced before it takes connections.
        let is_private = socket.peer_addr().is_ok_and(|at| is_private(at, &here.all));
        if is_private { Err(self.ours(target).into()) } else { Ok(socket) }
    }

    /// The addresses to try, all of them allowed, in their order.
    async fn addresses<L>(
        &self,
        target: &Target,
        here: &Addresses,
        lookup: L,
        deadline: Instant,
    ) -> Result<Vec<SocketAddr>, NotDialled>
    where
        L: AsyncFnOnce(Arc<str>) -> Result<Vec<IpAddr>, LookupError>,
    {
        let (targets, at_node) = (self.targets.load_full(), self.node().is_some());
        // Nothing is asked of the cloud's DNS for an edge that may not dial what comes of it.
        if !at_node && !targets.name_port(target.port) {
            return Err(self.forbidden(target, None).into());
        }
        let all = match &target.host {
            Host::Name(name) if !at_node && is_number(name) => {
                return Err(self.forbidden(target, None).into());
            }
            Host::Ip(ip) => vec![*ip],
            Host::Name(name) if self.is_here(name) => {
                let loopback = [Ipv4Addr::LOCALHOST.into(), Ipv6Addr::LOCALHOST.into()];
                let own = if at_node { &here.own[..] } else { &[] };
                loopback.into_iter().chain(own.iter().copied()).collect()
            }
            Host::Name(name) => resolve(target, lookup(Arc::clone(name)), deadline).await?,
        };
        let mut found: Vec<SocketAddr> = Vec::new();
        for ip in all.iter().take(ADDRESSES).map(|ip| plain(*ip)) {
            let at = SocketAddr::new(ip, target.port);
            let off_limits = match self.place {
                Place::Node(_) => false,
                Place::ForEdges => is_off_limits(ip) && !targets.name_off_limits(at),
                Place::ForClients => is_off_limits(ip),
            };
            if off_limits {
                continue;
            }
            if targets.allows(at, &here.own) && !found.contains(&at) {
                // Even if others of its addresses are not: what comes of those would only hide the reason.
                if self.listening.holds(at, &here.all) {
                    return Err(self.ours(target).into());
                }
                // At a node that is loopback by another name, from which who asks may have been kept.
                if !(at_node && ip.is_unspecified()) {
                    found.push(at);
                }
            }
        }
        if !found.is_empty() {
            return Ok(found);
        }
        let refusal = match (all.first(), &target.host) {
            (None, _) => Refusal::new(Code::TargetUnreachable, format_args!("{target} has no address")),
            (Some(ip), Host::Name(name)) if !self.is_here(name) => self.forbidden(target, Some(plain(*ip))),
            _ => self.forbidden(target, None),
        };
        let off_limits = self.place == Place::ForClients && all.iter().any(|ip| is_off_limits(*ip));
        Err(NotDialled { refusal, off_limits })
    }

    /// The node at which it stands; `None` at a pod.
    pub fn node(&self) -> Option<&NodeName> {
        match &self.place {
            Place::Node(node) => Some(node),
            Place::ForEdges | Place::ForClients => None,
        }
    }

    fn ours(&self, target: &Target) -> Refusal {
        let why = match self.place {
            Place::Node(_) => {
                format!(
                    "{target} is a tunnel process's own port; its metrics_listen is the one that may be reached"
                )
            }
            Place::ForEdges | Place::ForClients => format!("{target} is a port of the cloud's own pod"),
        };
        Refusal::new(Code::OwnPort, why)
    }

    /// `found` is what the target's name stands for, if it is a name.
    fn forbidden(&self, target: &Target, found: Option<IpAddr>) -> Refusal {
        let why = match (&self.place, found) {
            (Place::Node(_), Some(ip)) => format!("{target} is {ip}, which this edge may not dial"),
            (Place::Node(_), None) => format!("this edge may not dial {target}"),
            // Neither an edge nor a client gets to know the addresses behind a name within the cloud.
            (Place::ForEdges, found) => {
                debug!(%target, found = found.map(display), "no entry of mode.cloud.allow.targets holds it");
                format!(
                    "edges may not have the cloud dial {target}: its pods' mode.cloud.allow.targets does not hold it"
                )
            }
            (Place::ForClients, found) => {
                debug!(%target, found = found.map(display), "no entry of mode.cloud.direct.targets holds it, or it is off limits");
                format!("the cloud does not dial {target} for its clients")
            }
        };
        Refusal::new(Code::NotAllowed, why)
    }

    /// Whether a name means this machine: its node name, or `localhost`, which no resolver is to be asked for.
    fn is_here(&self, name: &str) -> bool {
        self.node().is_some_and(|node| name.eq_ignore_ascii_case(node.as_str())) || name == "localhost"
    }
}

impl From<Refusal> for NotDialled {
    fn from(refusal: Refusal) -> Self {
        Self { refusal, off_limits: false }
    }
}

impl From<NotDialled> for Refusal {
    fn from(why: NotDialled) -> Self {
        why.refusal
    }
}

async fn resolve(
    target: &Target,
    lookup: impl Future<Output = Result<Vec<IpAddr>, LookupError>>,
    deadline: Instant,
) -> Result<Vec<IpAddr>, Refusal> {
    let unresolved = |why: String| Refusal::new(Code::TargetUnreachable, why);
    match timeout_at(deadline, lookup).await {
        Ok(found) => found.map_err(|cause| unresolved(format!("cannot resolve {target}: {cause}"))),
        Err(_) => Err(unresolved(format!("{target} was not resolved in time"))),
    }
}

fn refusal(why: &DialError) -> Refusal {
    let code = match why.first() {
        Some(Failure::Refused(_)) => Code::TargetRefused,
        Some(Failure::Timeout(..)) => Code::TargetTimeout,
        Some(Failure::Local(..)) => Code::Internal,
        Some(Failure::Unreachable(..)) | None => Code::TargetUnreachable,
    };
    Refusal::new(code, why)
}

/// What a pod dials itself for its clients, of all that is at no node. Cheap to clone.
#[derive(Debug, Clone)]
pub struct DirectDialer {
    /// What is listed in the settings.
    listed: Arc<TargetDialer>,
    /// Everything that is not off limits.
    all: Arc<TargetDialer>,
    patience: Duration,
}

impl DirectDialer {
    /// What `dialer` may dial, and for some clients everything else as well; each within `patience`.
    pub fn new(dialer: TargetDialer, patience: Duration) -> Self {
        let all = Arc::new(ArcSwap::from_pointee(Targets::everything()));
        let all = TargetDialer { targets: all, ..dialer.clone() };
        Self { listed: Arc::new(dialer), all: Arc::new(all), patience }
    }

    /// Whether anything may be dialled at this port, for a client who may have `all`.
    pub fn may_dial(&self, port: u16, all: bool) -> bool {
        all || self.listed.targets.load().name_port(port)
    }

    /// Connects to a target; `all`: for a client that may have every target that is not off limits. Cancel safe.
    ///
    /// # Errors
    ///
    /// Why not, in words for the client.
    pub async fn dial(&self, target: &Target, all: bool) -> Result<TcpStream, NotDialled> {
        let dialer = if all { &self.all } else { &self.listed };
        dialer.dial(target, self.patience).await
    }
}

/// Addresses of one target that are looked at: a name with more would only use up the patience of the first.
const ADDRESSES: usize = 16;

#[cfg(test)]
mod tests;
