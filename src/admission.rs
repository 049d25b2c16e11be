//! How a client gets a session, at a listener of a server and at the proxy of an edge or a user: access policies and
//! their checks, permits, opening sessions, metrics and logs. Files below have the protocols of several kinds of ports.
//!
//! A listener's protocol ([`ListenerProtocol`]) parses a client's first bytes into an [`OpenRequest`] and responds.

pub mod access;
pub mod auth;
pub mod basis;
pub mod client_handler;
pub mod connect;
pub mod denial;
pub mod destination;
pub mod forward;
pub mod heads;
pub mod http_proxy;
pub mod relayed;
pub mod requests;
pub mod socks5;
mod trace_id;

use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;

use arc_swap::ArcSwap;
use bytes::Bytes;
use http::{HeaderMap, Response, StatusCode};
use tokio::sync::Notify;
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;
use tracing::{Span, field};

use crate::acceptor::target_dialer::DirectDialer;
use crate::admission::auth::{Login, PasswordChecker};
use crate::admission::basis::{AccessBasis, ClientIdentity};
use crate::admission::denial::Denial;
use crate::admission::destination::destination_mapping::DestinationMapping;
use crate::admission::destination::{Destination, TargetStream};
use crate::admission::heads::PendingLimits;
use crate::admission::requests::refuse_other_sites;
use crate::admission::trace_id::new_trace;
use crate::route::{OpenError, SessionRouter};
use crate::session_io::OpenSession;
use crate::session_io::judged::JudgedSessions;
use tunnel_base::access_log::AccessLogEntry;
use tunnel_base::addresses::{AddressBook, Location};
use tunnel_base::drain::Drain;
use tunnel_base::metrics::Metrics;
use tunnel_base::policy::grants::{Grant, Rights};
use tunnel_base::policy::off_limits::is_off_limits;
use tunnel_base::policy::zone::NodeZone;
use tunnel_base::policy::{CertificateGlob, Networks, canonical_ip};
use tunnel_base::unix_time::now;
use tunnel_net::limiter::{AcquireError, FairLimiter, Permit, PermitLimits, Source};
use tunnel_net::pool::BufferPool;
use tunnel_net::reload::ReloadedValue;
use tunnel_net::socket::AnyConnection;
use tunnel_net::tls::client_certificate::ServerTls;
use tunnel_proto::frame::{ErrorCode, SessionCategory, SessionError};
use tunnel_proto::names::{DeviceName, Host, NodeName, SessionId, Target};

/// A listener's protocol: reads a client's request from the accepted stream `S` and responds.
pub trait ListenerProtocol<S>: Send + Sync + 'static {
    /// Returns a short response to a client that is rejected before its head is read. Empty by default.
    fn rejection_bytes(&self, _denial: &Denial, _trace: &str) -> Bytes {
        Bytes::new()
    }

    /// Reads the head, passes the request to [`Admission::open`], and responds to the client. A protocol with many
    /// requests per connection passes each of them to [`Admission::authorize`] instead.
    ///
    /// The future is dropped at an await point if it calls neither within `HEAD_TIME`, or at the end of draining. It
    /// is also dropped if the client's permit is revoked in favour of another source.
    fn handshake(
        &self,
        socket: S,
        admission: &mut Admission,
    ) -> impl Future<Output = AdmissionOutcome> + Send;
}

/// Everything that a listener needs to serve clients. All but `listener`, `category`, `policy` and `drain` is shared by
/// the listeners of a process. Cheap to clone.
#[derive(Debug, Clone)]
pub struct ListenerContext {
    /// The name of the listener in metrics and the access log.
    pub listener: &'static str,
    /// The category of its sessions in the Open frame. With `Https`, the edge speaks TLS with the target.
    pub category: SessionCategory,
    /// The access policy, which is reloaded with the config.
    pub policy: Arc<ArcSwap<AccessPolicy>>,
    /// Open sessions, which are judged again when rights change; shared by all listeners of this process.
    pub judged: JudgedSessions,
    /// Limiter of sessions, shared by all listeners of this process.
    pub sessions: FairLimiter<ClientKey>,
    /// Limiters of connections that have proven nothing, shared by all ports of this process.
    pub pending: PendingLimits,
    /// Pool of read buffers.
    pub pool: BufferPool,
    /// Router that opens sessions.
    pub route: SessionRouter,
    /// Zone in which nodes have a second name.
    pub zone: Arc<ArcSwap<NodeZone>>,
    /// Address book that finds the node of an address, a pod or a Service.
    pub addresses: Arc<AddressBook>,
    /// Dialer for targets at no node. `None` means that this process dials no target.
    pub direct: Option<DirectDialer>,
    /// Routing over links to servers. `None` at a server.
    pub uplink: Option<DestinationMapping>,
    /// Metrics of connections, sessions and bytes.
    pub metrics: Metrics,
    /// Once draining starts, no client is accepted; the drain waits for the connected ones.
    pub drain: Drain,
    /// The drain of the process's clients. Once it starts, requests are denied. A listener that closes alone still serves
    /// the clients whose connections it has accepted.
    pub stopping: Drain,
}

impl ListenerContext {
    /// Returns the dialer for a target at this port that is at no node, or `None` if dialling it is not allowed. `all`
    /// is true for clients that may reach every target that is not off limits.
    fn direct_dialer(&self, port: u16, all: bool) -> Option<&DirectDialer> {
        self.direct.as_ref().filter(|direct| direct.may_dial(port, all))
    }

    /// Returns the denial while this process is stopping.
    fn stopping_denial(&self) -> Denial {
        Denial::Busy(match self.uplink {
            None => "this server is stopping",
            Some(DestinationMapping::Edge { .. }) => "this edge is stopping",
            Some(DestinationMapping::User) => "this proxy is stopping",
        })
    }

    /// Returns the denial if no permit for another session is available.
    fn no_permit(&self, why: AcquireError) -> Denial {
        Denial::Busy(match (why, &self.uplink) {
            (AcquireError::PerSource, None) => {
                "per-client session limit reached: [server.session] max_per_client of this server"
            }
            (AcquireError::Total, None) => {
                "session limit reached: [server.session] max_sessions of this server"
            }
            (_, Some(DestinationMapping::User)) => "session limit of this proxy reached",
            (AcquireError::PerSource, Some(_)) => "per-client session limit of this edge reached",
            (AcquireError::Total, Some(_)) => "session limit of this edge reached",
        })
    }
}

/// The access checks of one listener. Every client must pass them before a session is opened for it.
#[derive(Debug, Clone, Default)]
pub struct AccessPolicy {
    /// Networks from which clients may connect. `None` means any address.
    pub allow_from: Option<Networks>,
    /// Users and their passwords. `None` means that no password is required.
    pub logins: Option<Arc<PasswordChecker>>,
    /// Names of client certificates that are accepted.
    pub names: Vec<CertificateGlob>,
    /// The users and networks that may reach each node and port.
    pub rights: Rights,
    /// Whom its open ports ask for a certificate; `None` if no port does.
    pub certificates: Option<CertificateRequest>,
    /// Whether the config has its table no longer, or not yet: it admits no one.
    pub is_removed: bool,
}

/// The request of a listener's ports for a certificate of the client.
#[derive(Debug, Clone)]
pub struct CertificateRequest {
    /// The TLS of its port, by whose CAs certificates are verified now.
    pub tls: ReloadedValue<ServerTls>,
    /// Whether all of its ports ask, so that it has no clients without a certificate.
    pub is_everywhere: bool,
}

impl AccessPolicy {
    /// Returns the policy of a table that the config does not have.
    pub fn removed() -> Self {
        Self { is_removed: true, ..Self::default() }
    }

    /// Checks the client's address against [`Self::allow_from`].
    ///
    /// # Errors
    ///
    /// Returns [`Denial::Forbidden`] if the address is not allowed, or the table was removed.
    pub fn check_source(&self, from: impl Into<Option<IpAddr>>) -> Result<(), Denial> {
        match self.allow_from.as_ref().zip(from.into()) {
            _ if self.is_removed => Err(Denial::Forbidden(REMOVED.to_owned())),
            Some((networks, from)) if !networks.contains(from) => {
                Err(Denial::Forbidden(format!("your address {} is not allowed here", canonical_ip(from))))
            }
            _ => Ok(()),
        }
    }

    /// Returns the login of the user whose password is in the request's headers, or `None` if no password is required.
    /// Cancel safe.
    ///
    /// # Errors
    ///
    /// Returns [`Denial::Credentials`] if the password is missing and [`Denial::Password`] if it is wrong. Returns
    /// [`Denial::Busy`] if too many checks are in progress, and [`Denial::WrongPasswords`] after too many wrong
    /// passwords for this user from this address.
    pub async fn authenticate(&self, credentials: &HeaderMap, from: IpAddr) -> Result<Option<Login>, Denial> {
        match &self.logins {
            None => Ok(None),
            Some(logins) => logins.check(credentials, Source::of(from)).await.map(Some),
        }
    }

    /// Returns the user that a certificate with these names identifies: the first name that this listener accepts.
    ///
    /// # Errors
    ///
    /// Returns [`Denial::Forbidden`] if it accepts none of them.
    pub fn user_of_certificate(&self, names: &[String], table: &str) -> Result<String, Denial> {
        let accepted = |name: &&String| self.names.iter().any(|glob| glob.matches(name));
        let user = names.iter().find(accepted).cloned();
        user.ok_or_else(|| Denial::unknown(names, table))
    }

    /// Checks the rules and grants for this client, node and port. Returns the grant that allows the access; `None` if a
    /// rule does.
    ///
    /// # Errors
    ///
    /// Returns [`Denial::Forbidden`] if neither allows the access.
    pub fn authorize(
        &self,
        user: Option<&str>,
        from: impl Into<Option<IpAddr>>,
        node: &NodeName,
        port: u16,
    ) -> Result<Option<Arc<Grant>>, Denial> {
        let from = from.into();
        if self.rights.rules.allow(user, from, node, port) {
            return Ok(None);
        }
        let grant = user.and_then(|user| self.rights.find(user, from, node, Some(port), now()));
        let who = user.unwrap_or("you");
        grant
            .map(Some)
            .ok_or_else(|| Denial::Forbidden(format!("no rule lets {who} reach port {port} of node {node}")))
    }
}

/// The reason for clients whose listener the config has no longer.
const REMOVED: &str = "the table that allowed this was removed from the config of this server or edge";

/// A session permit. The session shares it, and keeps it until its last bytes are delivered.
pub type SessionPermit = Arc<Permit<ClientKey>>;

/// The outcome of a client's handshake.
#[derive(derive_more::Debug)]
#[expect(
    clippy::large_enum_variant,
    reason = "it is moved twice per client, and a box would be allocated for each"
)]
pub enum AdmissionOutcome {
    /// The client has its response, and its connection now carries the session's bytes.
    Opened {
        /// The session opened for the client.
        session: OpenSession,
        /// The connection: the accepted stream, TLS over it, or another wrapper of it.
        #[debug(skip)]
        socket: AnyConnection,
        /// Bytes received after the head before the response was sent.
        buffered: Bytes,
    },
    /// The client was served or denied completely, and no session remains. The connection, if it is still open, must be
    /// closed gracefully, because the client may still be sending.
    Closed(#[debug(skip)] Option<AnyConnection>),
    /// No head was received, or the response could not be sent.
    Failed {
        /// A fixed label for metrics.
        reason: &'static str,
        /// The connection, if it is still open. It is closed gracefully, because an error response may be in flight.
        #[debug(skip)]
        socket: Option<AnyConnection>,
    },
}

/// A client's request, as read by the listener.
#[derive(Debug)]
pub struct OpenRequest {
    /// The node, if the listener knows it. Otherwise the target's host names it.
    pub node: Option<NodeName>,
    /// The target to dial there.
    pub target: Target,
    /// The headers by which it is judged. `Proxy-Authorization` may contain a password.
    pub credentials: HeaderMap,
}

/// A denied request, with the data for its response.
#[derive(Debug)]
pub struct DeniedRequest {
    /// The reason.
    pub denial: Denial,
    /// Whether the response may contain addresses and times.
    pub sees_details: bool,
    /// The trace ID, with which operators find the line in the log.
    pub trace: Box<str>,
}

/// The admission of one client, from its connection to its session. It holds a permit until the client has
/// disconnected, or its session has one.
///
/// A protocol with one request per connection calls [`Self::open`], which exchanges the connection permit for a session
/// permit.
///
/// A protocol with many requests per connection calls [`Self::authorize`] for each of them, opens sessions with
/// [`AuthorizedRequest::open`], and calls [`Self::mark_idle`] after each response. Its clients keep their connection
/// permits. An authorized request suspends the permit: its session permit bounds it, and clients that exhaust the
/// connection limiter must not end it.
#[derive(Debug)]
pub struct Admission {
    pub(crate) context: Arc<ListenerContext>,
    pub(crate) client: AdmittedClient,
    /// Notified once the head is read.
    head_is_read: Arc<Notify>,
    permit: ClientPermit,
}

/// A client, as its connection or link has shown it before a request is read.
#[derive(Debug, Clone)]
pub(crate) struct AdmittedClient {
    /// Its address.
    pub(crate) from: SocketAddr,
    /// The identity proved by the connection itself. With one, no password is requested.
    pub(crate) proof: ClientIdentity,
    /// The server name that it sent in TLS (SNI).
    pub(crate) server_name: Option<String>,
    /// The user's device and the session it requests, if it has a link here.
    pub(crate) linked: Option<(DeviceName, SessionId)>,
}

/// The permit that limits a client.
#[derive(Debug)]
pub(crate) enum ClientPermit {
    /// That of its connection, until it requests a session with [`Admission::open`].
    Connection(Arc<Permit>),
    /// That of its session. Its connection keeps no other client from connecting any more.
    Session(#[expect(dead_code, reason = "held until the client has disconnected")] SessionPermit),
    /// None: its link has limits of its own.
    Link,
}

/// A request that has passed all checks. It owns its data, so that it can outlive the [`Admission`]. Without
/// [`Self::open`] it has no line in the access log: the session that serves it has one.
#[derive(Debug)]
pub struct AuthorizedRequest {
    context: Arc<ListenerContext>,
    from: SocketAddr,
    basis: AccessBasis,
    destination: Destination,
    access: AccessLogEntry,
}

impl Admission {
    pub(crate) fn new(context: Arc<ListenerContext>, from: SocketAddr, permit: Permit) -> Self {
        let client = AdmittedClient { from, proof: ClientIdentity::None, server_name: None, linked: None };
        Self::of(context, client, ClientPermit::Connection(Arc::new(permit)))
    }

    pub(crate) fn of(context: Arc<ListenerContext>, client: AdmittedClient, permit: ClientPermit) -> Self {
        Self { context, client, head_is_read: Arc::default(), permit }
    }

    /// Returns the permit of the client's connection, while it has one.
    pub(crate) fn permit(&self) -> Option<&Arc<Permit>> {
        if let ClientPermit::Connection(permit) = &self.permit { Some(permit) } else { None }
    }

    /// Checks the request and opens the session; counts and logs it. An error in `request` is reported only to clients
    /// with an allowed address. Returns `None` if `reset` completes first, because the client disconnected. Cancel
    /// safe: dropping the future leaves no session.
    ///
    /// # Errors
    ///
    /// Returns the denial to send to the client.
    pub async fn open(
        &mut self,
        reset: impl Future<Output = ()>,
        request: Result<OpenRequest, Denial>,
        trace: String,
    ) -> Option<Result<OpenSession, DeniedRequest>> {
        let opening = async {
            let (authorized, permit) = self.authorize(request, trace).await?.with_permit()?;
            // Opening may take long; a client that has passed the checks must not keep others from connecting
            // meanwhile.
            self.permit = ClientPermit::Session(permit.clone());
            authorized.open_with(permit).await
        };
        tokio::select! {
            biased;
            opened = opening => Some(opened),
            () = reset => None,
        }
    }

    /// Like [`Self::open`], for a listener that knows the node.
    pub async fn open_at(
        &mut self,
        reset: impl Future<Output = ()>,
        node: Result<NodeName, Denial>,
        target: &Target,
    ) -> Option<Result<OpenSession, DeniedRequest>> {
        let target = target.clone();
        let credentials = HeaderMap::new();
        let request = node.map(|node| OpenRequest { node: Some(node), target, credentials });
        self.open(reset, request, new_trace()).await
    }

    /// Checks a request without opening a session; counts and logs a denial. The client's permit is active until
    /// [`Self::mark_idle`]. Cancel safe.
    ///
    /// # Errors
    ///
    /// Like [`Self::open`].
    pub async fn authorize(
        &mut self,
        request: Result<OpenRequest, Denial>,
        trace: String,
    ) -> Result<AuthorizedRequest, DeniedRequest> {
        self.head_is_read.notify_one();
        self.mark_active();
        let from = self.client.from;
        let mut access = AccessLogEntry::start(self.context.listener, from.to_string());
        access.trace = trace;
        access.device = self.client.linked.as_ref().map(|(device, _)| device.clone());
        Span::current().record("trace_id", access.trace.as_str());
        let context = Arc::clone(&self.context);
        // The place is lost and this poll is the last: a check that waits would leave the client without an answer.
        let checked = match self.is_evicted() {
            true => Err(Denial::Busy(NO_PENDING)),
            false => self.check(request, &mut access).await,
        };
        match checked {
            Ok((destination, basis)) => {
                access.set_pending(true);
                Ok(AuthorizedRequest { context, from, basis, destination, access })
            }
            Err(denial) => Err(DeniedRequest::new(denial, access, &context, from)),
        }
    }

    /// Marks the permit as active: bytes of a request have been read, so no newcomer of the same source takes the permit.
    pub(crate) fn mark_active(&self) {
        self.permit().into_iter().for_each(|permit| permit.mark_active());
    }

    /// Returns true if the permit was revoked. The connection is dropped after this poll, so answer now.
    pub(crate) fn is_evicted(&self) -> bool {
        self.evicted().is_cancelled()
    }

    /// Returns a token that is cancelled when the permit is revoked.
    pub(crate) fn evicted(&self) -> CancellationToken {
        self.permit().map(|permit| permit.revoked()).unwrap_or_default()
    }

    /// Marks the permit as idle after a response: from now on this process waits for the client.
    pub fn mark_idle(&self) {
        self.permit().into_iter().for_each(|permit| permit.mark_idle());
    }

    /// Makes all checks that need no remote end, in the order that reveals least to strangers.
    pub(crate) async fn check(
        &self,
        request: Result<OpenRequest, Denial>,
        access: &mut AccessLogEntry,
    ) -> Result<(Destination, AccessBasis), Denial> {
        let policy = self.context.policy.load_full();
        let from = self.client.from.ip();
        // Check again, because the config may have changed since the connection was accepted.
        policy.check_source(from)?;
        if self.context.stopping.is_draining() {
            return Err(self.context.stopping_denial());
        }
        let OpenRequest { node, target, credentials } = request?;
        access.target = Some(target.clone());
        let identity = match &self.client.proof {
            ClientIdentity::None => {
                let login = policy.authenticate(&credentials, from).await?;
                login.map_or(ClientIdentity::None, ClientIdentity::Password)
            }
            proof => proof.clone(),
        };
        if self.context.uplink.is_some() {
            refuse_other_sites(&credentials, &target)?;
        }
        let listener = self.context.listener;
        (access.user, _) = identity.judge(&policy, listener)?;
        let user = access.user.clone();
        let judge = |node: &_, port| policy.authorize(user.as_deref(), from, node, port);
        let may = |node: &_, port| judge(node, port).is_ok();
        // Rules name nodes, so the node of an address or a Service is found before they are checked.
        let mut destination = self.destination(node, target, may)?;
        let node = destination.node.clone();
        let port = destination.target.port;
        access.node = Some(node.clone());
        // A parked session may have been ended meanwhile. It must not return on another path, whatever its user may now.
        if let Some((_, session)) = &self.client.linked {
            self.context.judged.check_parked(*session).map_err(Denial::Forbidden)?;
        }
        access.grant.store(judge(&node, port)?);
        // Without an edge this process dials, which a rule must permit by itself.
        destination.direct = destination.direct.filter(|direct| may(&NodeName::direct(), direct.port));
        let policy = self.context.policy.clone();
        let grant = access.grant.clone();
        let from = Some(from);
        Ok((destination, AccessBasis { policy, listener, from, identity, node, port, grant, direct: None }))
    }

    /// Returns where the target of a client is. `node` is the node if the listener knows it. An address that
    /// belongs to no known node may be a node's name, if the client `may` reach that node.
    fn destination(
        &self,
        node: Option<NodeName>,
        target: Target,
        may: impl Fn(&NodeName, u16) -> bool,
    ) -> Result<Destination, Denial> {
        if let Some(uplink) = &self.context.uplink {
            return uplink.destination(target);
        }
        // kube-apiserver's egress selector sends all targets here, including targets that no edge reaches.
        let all = self.context.category == SessionCategory::Egress
            && matches!(self.client.proof, ClientIdentity::Certificate(_));
        if let Some(node) = node {
            return Ok(Destination { all, ..Destination::at(self.context.zone.load().node(node), target) });
        }
        let requested = match (&target.host, target.host.node()) {
            // Replace a name in the zone by the node's own name, which the edge knows.
            (Host::Name(_), Some(name)) => {
                Target { host: self.context.zone.load().node(name).as_str().parse()?, port: target.port }
            }
            _ => target.clone(),
        };
        // The same session finds the same endpoint of a Service again.
        let chance = self.client.linked.as_ref().map_or_else(rand::random, |(_, session)| session.chance());
        let has_linked = |node: &NodeName| self.context.route.has_linked(node);
        match self.context.addresses.locate(&requested, chance, has_linked)? {
            Location::Node { node, target, direct } => Ok(Destination { node, target, direct, all }),
            Location::Direct(direct) if matches!(direct.host, Host::Ip(ip) if is_off_limits(ip)) => {
                Err(Denial::OffLimits(target))
            }
            Location::Direct(direct) => {
                let named = self.context.route.node_named_by_address(&requested.host);
                let (node, target) = match named.filter(|node| may(node, target.port)) {
                    Some(node) => (node.clone(), node.target(target.port)),
                    None if self.context.direct_dialer(direct.port, all).is_none() => {
                        return Err(Denial::NoNode(target));
                    }
                    None => (NodeName::direct(), direct.clone()),
                };
                Ok(Destination { node, target, direct: Some(direct), all })
            }
        }
    }
}

impl AuthorizedRequest {
    /// Returns the node by its own name, or [`NodeName::direct`] if this process dials.
    pub fn node(&self) -> &NodeName {
        &self.destination.node
    }

    /// Returns the target to dial there.
    pub fn target(&self) -> &Target {
        &self.destination.target
    }

    /// Returns true if responses to the client may contain addresses and times.
    pub fn sees_details(&self) -> bool {
        self.from.ip().is_loopback() || self.access.user.is_some()
    }

    /// Opens a session; counts and logs it. Cancel safe: dropping the future leaves no session.
    ///
    /// # Errors
    ///
    /// Returns the denial for the client.
    pub async fn open(self) -> Result<OpenSession, DeniedRequest> {
        let (request, permit) = self.with_permit()?;
        request.open_with(permit).await
    }

    /// Acquires a session permit for this request.
    fn with_permit(self) -> Result<(Self, SessionPermit), DeniedRequest> {
        let sessions = &self.context.sessions;
        let key = ClientKey::of(self.access.user.as_deref(), self.from.ip());
        let mut permit = sessions.try_acquire(&key);
        if permit.as_ref().is_err_and(|full| *full == AcquireError::Total)
            && self.context.route.evict_orphan()
        {
            permit = sessions.try_acquire(&key);
        }
        match permit {
            Ok(permit) => Ok((self, Arc::new(permit))),
            Err(full) => {
                let denial = self.context.no_permit(full);
                Err(DeniedRequest::new(denial, self.access, &self.context, self.from))
            }
        }
    }

    /// Opens the session, which keeps the permit.
    async fn open_with(self, permit: SessionPermit) -> Result<OpenSession, DeniedRequest> {
        let Self { context, from, basis, destination, mut access } = self;
        access.set_opening(&context.metrics.refusals);
        let started = Instant::now();
        let opened = match destination.session_request(&context, &access, &permit) {
            None => destination.dial(&context).await,
            Some(request) => match context.route.open(request).await {
                Ok(session) => Ok(TargetStream { stream: session.into(), right: None }),
                Err(OpenError { session, why }) => {
                    access.id = session;
                    destination.recover(why, &context, &mut access).await
                }
            },
        };
        context.metrics.open_duration.observe(started.elapsed().as_secs_f64());
        // The opening may have taken seconds, so the rights of this moment decide whether the session stays.
        let granted = opened.and_then(|TargetStream { stream, right }| {
            let basis = AccessBasis { direct: right, ..basis };
            access.id = stream.id();
            let judge = move |change: &_| basis.judge(change).map_err(|denial| denial.to_string());
            match context.judged.add((&access).into(), judge) {
                Ok(judged) => Ok((stream, judged)),
                Err(why) => {
                    stream.reset(SessionError::new(ErrorCode::NotAllowed, &why));
                    Err(Denial::Forbidden(why))
                }
            }
        });
        match granted {
            Ok((session, judged)) => {
                access.set_pending(false);
                access.status = Some(StatusCode::OK.as_u16());
                if let Some(id) = access.id {
                    Span::current().record("session", field::display(id));
                }
                let alive = context.metrics.sessions.start(access.listener);
                let buffered = Bytes::new();
                Ok(OpenSession { session, buffered, access, judged, alive, permit: Some(permit) })
            }
            Err(denial) => Err(DeniedRequest::new(denial, access, &context, from)),
        }
    }
}

impl DeniedRequest {
    /// Returns the HTTP response.
    pub(crate) fn answer(&self) -> Response<Bytes> {
        self.denial.answer(self.sees_details, &self.trace)
    }

    /// Creates a denied request; counts and logs it.
    fn new(denial: Denial, mut access: AccessLogEntry, context: &ListenerContext, from: SocketAddr) -> Self {
        access.status = Some(denial.status().as_u16());
        let sees_details = from.ip().is_loopback() || access.user.is_some();
        let trace = access.trace.clone().into_boxed_str();
        access.refuse(denial.name(), &denial.to_string(), from.ip(), &context.metrics);
        Self { denial, sees_details, trace }
    }
}

/// The reason for a client that finds no room, or loses its place before its head was complete.
pub(crate) const NO_PENDING: &str = "too many connections are waiting without a request";

/// The key of a client in the session limiter: the user or, at listeners without users, the source.
#[derive(Debug, Clone, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum ClientKey {
    /// An authenticated user.
    User(Arc<str>),
    /// An IPv4 address or the /64 network of an IPv6 address.
    Source(Source),
}

impl ClientKey {
    /// Returns the key of a client at `from`, authenticated as `user` if that is given.
    pub fn of(user: Option<&str>, from: IpAddr) -> Self {
        user.map_or_else(|| Self::Source(Source::of(from)), |name| Self::User(name.into()))
    }
}

/// Creates the session limiter of a process: at most `most` concurrent sessions, and `for_one` per client.
pub fn sessions(most: usize, for_one: usize) -> FairLimiter<ClientKey> {
    FairLimiter::new(PermitLimits { permits: most, per_source: for_one, waiting: 0, idle_timeout: None })
}

#[cfg(test)]
pub(crate) mod tests;
