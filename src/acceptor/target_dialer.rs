//! From a target to a connection: resolves once, checks each address, and dials exactly the checked addresses.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use std::sync::Arc;
use std::time::Duration;

use arc_swap::ArcSwap;
use tokio::net::TcpStream;
use tokio::time::{Instant, timeout_at};
use tracing::debug;

use crate::session_io::rights::RightsChange;
use tunnel_base::policy::canonical_ip;
use tunnel_base::policy::off_limits::{is_number, is_off_limits};
use tunnel_base::policy::targets::Targets;
use tunnel_net::dial::{AddressFailure, ConnectError, SocketMemory, dial_target};
use tunnel_net::fd_limit;
use tunnel_net::interfaces::{InterfaceSnapshot, LocalAddresses};
use tunnel_net::os::announcement::is_announced;
use tunnel_net::resolver::{DnsLookupError, Resolver};
use tunnel_proto::frame::{ErrorCode, SessionError};
use tunnel_proto::names::{Host, NodeName, Target};

/// Dials targets if the access rules allow it.
#[derive(Debug, Clone)]
pub struct TargetDialer {
    /// Where it runs, and for which clients it dials.
    pub role: TargetDialerRole,
    /// The machine's own addresses. For a target with the node's name, the addresses that other machines use are tried
    /// after loopback.
    pub own: LocalAddresses,
    /// The allowed targets. Replaced when the config changes.
    pub targets: Arc<ArcSwap<Targets>>,
    /// The resolver of names.
    pub resolver: Resolver,
    /// Bounds the kernel's buffers of targets, or `None`.
    pub sockets: Option<SocketMemory>,
}

/// Where a dialer runs, and for which clients it dials.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum TargetDialerRole {
    /// At the node with this name: a target of that name is on this machine.
    Node(NodeName),
    /// At a server, for edges. Addresses that are off limits are dialled only if they alone are allowed by a rule.
    ForEdges,
    /// At a server, for its clients. Addresses that are off limits are not dialled, whatever is allowed.
    ForClients,
}

/// The reason why a target was not dialled.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TargetDialError {
    /// The error for the client.
    pub refusal: SessionError,
    /// Whether the target is, or resolves to, an address that no server ever dials for a client.
    pub off_limits: bool,
}

/// A connection to a target.
#[derive(Debug)]
pub struct DialledTarget {
    /// The connection.
    pub socket: TcpStream,
    /// The right to it.
    pub right: DialRight,
}

/// The right to a dialled target, which ends when the allowed targets change.
#[derive(Debug, Clone)]
pub struct DialRight {
    role: TargetDialerRole,
    targets: Arc<ArcSwap<Targets>>,
    target: Target,
    at: SocketAddr,
    /// Whether the address was one of this machine's own. Its networks may change, and that takes no right away.
    is_own: bool,
}

impl DialRight {
    /// Returns the port of the target.
    pub fn port(&self) -> u16 {
        self.at.port()
    }

    /// Returns an error if the target may no longer be dialled at its address, with a change of rights.
    ///
    /// # Errors
    ///
    /// Returns the same as a dial.
    pub fn judge(&self, change: &RightsChange) -> Result<(), SessionError> {
        let own = [self.at.ip()];
        let own = if self.is_own { &own[..] } else { &[] };
        if self.role.may_dial(self.at, &change.load(&self.targets), own) {
            return Ok(());
        }
        Err(self.role.forbidden_error(&self.target, Some(self.at.ip())))
    }
}

impl TargetDialerRole {
    /// Returns true if this address may be dialled, whatever name leads to it.
    fn may_dial(&self, at: SocketAddr, targets: &Targets, own: &[IpAddr]) -> bool {
        let barred = match self {
            // At a node the unspecified address is loopback, from which access rules may exclude the client.
            Self::Node(_) => at.ip().is_unspecified(),
            Self::ForEdges => is_off_limits(at.ip()) && !targets.allows_off_limits(at),
            Self::ForClients => is_off_limits(at.ip()),
        };
        !barred && targets.allows(at, own)
    }

    /// Returns the error of a forbidden target. `found` is the address that the target resolves to, if it is a name.
    fn forbidden_error(&self, target: &Target, found: Option<IpAddr>) -> SessionError {
        let found = found.filter(|ip| target.host != Host::Ip(*ip));
        let why = match (self, found) {
            (Self::Node(_), Some(ip)) => format!("{target} is {ip}, which this edge may not dial"),
            (Self::Node(_), None) => format!("this edge may not dial {target}"),
            // Neither edges nor clients learn the addresses of names inside the cloud.
            (Self::ForEdges, found) => {
                debug!(%target, found = found.map(display), "target not in server.edge_access.targets");
                format!(
                    "edges may not have the server dial {target}: it is not in server.edge_access.targets"
                )
            }
            (Self::ForClients, found) => {
                debug!(%target, found = found.map(display), "target not in server.direct.targets, or off limits");
                format!("the server does not dial {target} for clients")
            }
        };
        SessionError::new(ErrorCode::NotAllowed, why)
    }
}

impl TargetDialer {
    /// Connects to a target if it is allowed and responds within `timeout`. Cancel safe.
    ///
    /// # Errors
    ///
    /// The target is not allowed or cannot be reached. The error is for the client.
    pub async fn dial(&self, target: &Target, timeout: Duration) -> Result<DialledTarget, TargetDialError> {
        let deadline = Instant::now() + timeout;
        let (mut here, found) = self.resolve(target, deadline).await?;
        let left = deadline.saturating_duration_since(Instant::now());
        // Checked before it connects, because the connection would be the next client of a port that forwards to itself.
        let is_own_port = |at| is_announced(at, &here.all);
        let buffer = self.sockets.as_ref().map(SocketMemory::buffer);
        let dialled = dial_target(&target.host, &found, left, buffer, is_own_port).await;
        let socket = dialled.map_err(|why| match found.iter().any(|at| is_own_port(*at)) {
            true => self.own_port_error(target),
            false => connect_error(&why),
        })?;
        let internal = |cause| SessionError::new(ErrorCode::Internal, cause);
        let peer = socket.peer_addr().map_err(internal)?;
        let from = socket.local_addr().map_err(internal)?;
        // Checked again, because the port, or this machine's address, may be new. A connection to an own address comes
        // from that address.
        here.all.push(from.ip());
        if is_announced(peer, &here.all) {
            return Err(self.own_port_error(target).into());
        }
        // A connection to the unspecified address has loopback as its peer.
        let at = found
            .iter()
            .find(|at| **at == peer)
            .or_else(|| found.iter().find(|at| at.ip().is_unspecified()))
            .copied()
            .unwrap_or(peer);
        let is_own = here.own.iter().any(|own| canonical_ip(*own) == at.ip());
        let role = self.role.clone();
        let targets = self.targets.clone();
        let target = target.clone();
        Ok(DialledTarget { socket, right: DialRight { role, targets, target, at, is_own } })
    }

    /// Checks whether a target may be dialled, without dialling it. Cancel safe.
    ///
    /// # Errors
    ///
    /// Like [`Self::dial`].
    pub async fn check(&self, target: &Target, timeout: Duration) -> Result<(), TargetDialError> {
        self.resolve(target, Instant::now() + timeout).await.map(drop)
    }

    /// Returns this machine's addresses, and those of the target that may be dialled.
    async fn resolve(
        &self,
        target: &Target,
        deadline: Instant,
    ) -> Result<(InterfaceSnapshot, Vec<SocketAddr>), TargetDialError> {
        let mut here = self.own.now();
        if self.node().is_none() {
            // At a server, its own log port listens on loopback for users of its machine: a rule for loopback has to
            // name it.
            here.own.retain(|ip| !canonical_ip(*ip).is_loopback());
        }
        let ask = async |name: Arc<str>| {
            fd_limit::check().map_err(|_| DnsLookupError::OpenFiles)?;
            self.resolver.lookup(&name).await
        };
        let found = self.addresses(target, &here, ask, deadline).await?;
        Ok((here, found))
    }

    /// Returns the addresses to try, in order. All of them are allowed.
    async fn addresses<L: AsyncFnOnce(Arc<str>) -> Result<Vec<IpAddr>, DnsLookupError>>(
        &self,
        target: &Target,
        here: &InterfaceSnapshot,
        lookup: L,
        deadline: Instant,
    ) -> Result<Vec<SocketAddr>, TargetDialError> {
        let targets = self.targets.load_full();
        let at_node = self.node().is_some();
        // Does not query the cloud's DNS for an edge that may not dial the result.
        if !at_node && !targets.allows_port(target.port) {
            return Err(self.role.forbidden_error(target, None).into());
        }
        let all = match &target.host {
            Host::Name(name) if !at_node && is_number(name) => {
                return Err(self.role.forbidden_error(target, None).into());
            }
            Host::Ip(ip) => vec![*ip],
            // After loopback come the interfaces, because a service may listen at one of them only.
            Host::Name(_) if self.is_local(&target.host) => {
                let loopback = [Ipv4Addr::LOCALHOST.into(), Ipv6Addr::LOCALHOST.into()];
                let own = if at_node { &here.own[..] } else { &[] };
                loopback.into_iter().chain(own.iter().copied()).collect()
            }
            Host::Name(name) => resolve(target, lookup(Arc::clone(name)), deadline).await?,
        };
        // Exactly the checked addresses are dialled later: another lookup of the name could return others.
        let mut found: Vec<SocketAddr> = Vec::new();
        for ip in all.iter().take(ADDRESSES).map(|ip| canonical_ip(*ip)) {
            let at = SocketAddr::new(ip, target.port);
            if self.role.may_dial(at, &targets, &here.own) && !found.contains(&at) {
                found.push(at);
            }
        }
        if !found.is_empty() {
            return Ok(found);
        }
        // An operator needs the address to which a name resolves: the target does not show why it is refused.
        let refusal = match (all.first(), &target.host) {
            (None, _) => {
                SessionError::new(ErrorCode::TargetUnreachable, format_args!("{target} has no address"))
            }
            (Some(ip), host @ Host::Name(_)) if !self.is_local(host) => {
                self.role.forbidden_error(target, Some(canonical_ip(*ip)))
            }
            _ => self.role.forbidden_error(target, None),
        };
        let off_limits = self.role == TargetDialerRole::ForClients && all.iter().any(|ip| is_off_limits(*ip));
        Err(TargetDialError { refusal, off_limits })
    }

    /// Returns the node at which the dialer runs, or `None` at a server.
    pub fn node(&self) -> Option<&NodeName> {
        match &self.role {
            TargetDialerRole::Node(node) => Some(node),
            TargetDialerRole::ForEdges | TargetDialerRole::ForClients => None,
        }
    }

    fn own_port_error(&self, target: &Target) -> SessionError {
        let why = match self.role {
            TargetDialerRole::Node(_) => {
                format!("{target} is a tunnel process's own port; for metrics use its metrics_listen")
            }
            TargetDialerRole::ForEdges | TargetDialerRole::ForClients => {
                format!("{target} is a port of a tunnel process on the server's machine")
            }
        };
        SessionError::new(ErrorCode::OwnPort, why)
    }

    /// Returns true if a host means this machine.
    fn is_local(&self, host: &Host) -> bool {
        self.node().map_or_else(|| host.is_localhost(), |node| node.matches_host(host))
    }
}

impl From<SessionError> for TargetDialError {
    fn from(refusal: SessionError) -> Self {
        Self { refusal, off_limits: false }
    }
}

impl From<TargetDialError> for SessionError {
    fn from(why: TargetDialError) -> Self {
        why.refusal
    }
}

async fn resolve(
    target: &Target,
    lookup: impl Future<Output = Result<Vec<IpAddr>, DnsLookupError>>,
    deadline: Instant,
) -> Result<Vec<IpAddr>, SessionError> {
    let unresolved = |why: String| SessionError::new(ErrorCode::TargetUnreachable, why);
    match timeout_at(deadline, lookup).await {
        Ok(Err(DnsLookupError::OpenFiles)) => Err(too_many_files_error()),
        Ok(found) => found.map_err(|cause| unresolved(format!("cannot resolve {target}: {cause}"))),
        Err(_) => Err(unresolved(format!("{target} was not resolved in time"))),
    }
}

/// Returns the error of a dial that would use the last file descriptors.
fn too_many_files_error() -> SessionError {
    SessionError::new(ErrorCode::Overloaded, fd_limit::REACHED)
}

fn connect_error(why: &ConnectError) -> SessionError {
    let code = match why.first() {
        Some(AddressFailure::Local(_, cause)) if fd_limit::is_exceeded(cause) => {
            return too_many_files_error();
        }
        Some(AddressFailure::Refused(_)) => ErrorCode::TargetRefused,
        Some(AddressFailure::Timeout(..)) => ErrorCode::TargetTimeout,
        Some(AddressFailure::Local(..)) => ErrorCode::Internal,
        Some(AddressFailure::Unreachable(..)) | None => ErrorCode::TargetUnreachable,
    };
    SessionError::new(code, why)
}

/// Dials targets of a server's clients that are at no node. Cheap to clone.
#[derive(Debug, Clone)]
pub struct DirectDialer {
    /// Dials the targets listed in the config.
    listed: Arc<TargetDialer>,
    /// Dials all targets that are not off limits.
    all: Arc<TargetDialer>,
    timeout: Duration,
}

impl DirectDialer {
    /// Creates a dialer for the targets of `dialer`, and for some clients all others. Each dial takes at most
    /// `timeout`.
    pub fn new(dialer: TargetDialer, timeout: Duration) -> Self {
        let all = Arc::new(ArcSwap::from_pointee(Targets::everything()));
        let all = TargetDialer { targets: all, ..dialer.clone() };
        Self { listed: Arc::new(dialer), all: Arc::new(all), timeout }
    }

    /// Returns true if some target may be dialled at this port, by a client that may reach `all` targets or only the
    /// listed ones.
    pub fn may_dial(&self, port: u16, all: bool) -> bool {
        all || self.listed.targets.load().allows_port(port)
    }

    /// Connects to a target. `all` is true for a client that may reach every target that is not off limits. Cancel
    /// safe.
    ///
    /// # Errors
    ///
    /// The target is not allowed or cannot be reached. The error is for the client.
    pub async fn dial(&self, target: &Target, all: bool) -> Result<DialledTarget, TargetDialError> {
        let dialer = if all { &self.all } else { &self.listed };
        dialer.dial(target, self.timeout).await
    }
}

/// Maximum number of a target's addresses that are tried. More would only reduce the time for each.
const ADDRESSES: usize = 16;

#[cfg(test)]
mod tests;
