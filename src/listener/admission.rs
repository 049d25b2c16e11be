//! The common part of all listeners: access checks, connection permits, the timeout for request heads, opening and
//! carrying sessions, metrics and logs.
//!
//! A listener's protocol ([`ListenerProtocol`]) parses a client's first bytes into an [`OpenRequest`] and responds.

pub mod destination;

use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;
use std::time::Duration;

use arc_swap::ArcSwap;
use bytes::Bytes;
use http::{HeaderMap, StatusCode};
use tokio::sync::oneshot;
use tokio::time::{Instant, timeout};
use tracing::{Span, debug, field};

use crate::acceptor::DirectDialer;
use crate::listener::admission::destination::{Destination, EdgeRouting};
use crate::listener::auth::AccessPolicy;
use crate::listener::{self, Denial};
use crate::route::SessionRouter;
use crate::session_io::copy::close_gracefully;
use crate::session_io::{LocalPeer, OpenSession, run_session};
use tunnel_base::access_log::AccessLogEntry;
use tunnel_base::addresses::AddressBook;
use tunnel_base::drain::Drain;
use tunnel_base::metrics::Metrics;
use tunnel_base::names::{NodeName, Target};
use tunnel_base::policy::Networks;
use tunnel_base::process::third_of_memory;
use tunnel_net::accept_loop::{self, AcceptLimits, Accepted, ConnectionHandler, Rejection};
use tunnel_net::fd_limit;
use tunnel_net::limiter::{AcquireError, FairLimiter, Limits, Permit, Source};
use tunnel_net::listen::Accept;
use tunnel_net::pool::Pool;
use tunnel_net::socket::{Connection, Socket};
use tunnel_proto::frame::Category;

/// A listener's protocol: reads a client's request from the accepted stream `S` and responds.
pub trait ListenerProtocol<S>: Send + Sync + 'static {
    /// Name in metrics and the access log.
    const NAME: &'static str;

    /// Category in the Open frame.
    const CATEGORY: Category;

    /// The stream that carries the session's bytes: the accepted stream, or TLS over it.
    type Connection: Connection;

    /// Returns the span for log messages about a client. Its fields `trace` and `session` are recorded once known.
    fn span(&self, from: SocketAddr) -> Span;

    /// Returns a short response to a client that is rejected before its head is read. Empty by default.
    fn rejection_bytes(&self, _denial: &Denial, _trace: &str) -> Bytes {
        Bytes::new()
    }

    /// Reads the head, passes the request to [`Admission::open`], and responds to the client. A protocol with many
    /// requests per connection passes each of them to [`Admission::authorize`] instead.
    ///
    /// The future is dropped at an await point if it calls neither within [`HEAD_TIME`], or at the end of draining. It
    /// is also dropped if the client's permit is revoked in favour of another source.
    fn handshake(
        &self,
        socket: S,
        admission: &mut Admission<'_>,
    ) -> impl Future<Output = HandshakeOutcome<Self::Connection>> + Send;
}

/// Everything that a listener needs to serve clients. All but `policy` is shared by the listeners of a process. Cheap to
/// clone.
#[derive(Debug, Clone)]
pub struct ListenerContext {
    /// The access policy. It is reloaded with the config and applies to new requests.
    pub policy: Arc<ArcSwap<AccessPolicy>>,
    /// Limiter of sessions, shared by all listeners of this process.
    pub sessions: FairLimiter<ClientKey>,
    /// Pool of read buffers.
    pub pool: Pool,
    /// Router that opens sessions.
    pub route: SessionRouter,
    /// Address book that finds the node of an address, a pod or a Service.
    pub addresses: Arc<AddressBook>,
    /// Dialer for targets at no node. `None` means that this process dials no target.
    pub direct: Option<DirectDialer>,
    /// Routing at an edge, where a server dials targets that are at no node. `None` at a server.
    pub edge_routing: Option<EdgeRouting>,
    /// Metrics of connections, sessions and bytes.
    pub metrics: Metrics,
    /// Once draining starts, no client is accepted; the drain waits for the connected ones.
    pub drain: Drain,
}

impl ListenerContext {
    /// Returns the dialer for a target at this port that is at no node, or `None` if dialling it is not allowed. `all`
    /// is true for clients that may reach every target that is not off limits.
    fn direct_dialer(&self, port: u16, all: bool) -> Option<&DirectDialer> {
        self.direct.as_ref().filter(|direct| direct.may_dial(port, all))
    }

    /// Returns the denial while this process is stopping.
    fn stopping_denial(&self) -> Denial {
        Denial::Busy(if self.edge_routing.is_some() {
            "this edge is stopping"
        } else {
            "this server is stopping"
        })
    }

    /// Returns the denial if no permit for another session is available.
    fn no_permit(&self, why: AcquireError) -> Denial {
        Denial::Busy(match (why, &self.edge_routing) {
            (AcquireError::PerSource, None) => {
                "per-client session limit reached: [mode.cloud.session] max_for_client of this server"
            }
            (AcquireError::Total, None) => "session limit reached: [mode.cloud.session] max of this server",
            (AcquireError::PerSource, Some(_)) => "per-client session limit of this edge reached",
            (AcquireError::Total, Some(_)) => "session limit of this edge reached",
        })
    }
}

/// A session opened for a client, with its permit.
pub type GrantedSession = OpenSession<Permit<ClientKey>>;

/// The outcome of a client's handshake; `C` is its connection.
#[derive(Debug)]
pub enum HandshakeOutcome<C, T = GrantedSession> {
    /// The client has its response, and its connection now carries the session's bytes.
    Opened {
        /// The session opened for the client.
        session: T,
        /// The connection, without any wrapper of the handshake.
        socket: C,
        /// Bytes received after the head before the response was sent.
        buffered: Bytes,
    },
    /// The protocol served the client completely, and no session remains. The connection, if it is still open, must be
    /// closed gracefully.
    Served(Option<C>),
    /// The denial was sent. The connection must be closed gracefully, because the client may still be sending.
    Denied(C),
    /// No head was received, or the response could not be sent.
    Failed {
        /// A fixed label for metrics.
        reason: &'static str,
        /// The connection, if it is still open. It is closed gracefully, because an error response may be in flight.
        socket: Option<C>,
    },
}

impl<C, T> HandshakeOutcome<C, T> {
    /// Converts the connection.
    pub(crate) fn map<D>(self, change: impl FnOnce(C) -> D) -> HandshakeOutcome<D, T> {
        match self {
            Self::Opened { session, socket, buffered } => {
                HandshakeOutcome::Opened { session, socket: change(socket), buffered }
            }
            Self::Served(socket) => HandshakeOutcome::Served(socket.map(change)),
            Self::Denied(socket) => HandshakeOutcome::Denied(change(socket)),
            Self::Failed { reason, socket } => {
                HandshakeOutcome::Failed { reason, socket: socket.map(change) }
            }
        }
    }
}

/// Serves clients until draining starts; the drain then waits for the connected ones. A connection from a network in
/// `proxies` must start with a PROXY header.
pub async fn serve<L, F>(protocol: F, listener: L, proxies: Networks, context: ListenerContext)
where
    L: Accept,
    F: ListenerProtocol<L::AnyStream>,
{
    let (refused, refusals) =
        (context.metrics.connections_rejected.clone(), context.metrics.refusals.clone());
    let permits = max_pending(context.edge_routing.is_some());
    let limits = AcceptLimits { permits, proxies, refused, refusals };
    let (drain, context) = (context.drain.clone(), Arc::new(context));
    accept_loop::serve(listener, limits, ProtocolHandler { protocol, context }, drain).await;
}

/// Serves accepted connections with a listener's protocol: checks the source, runs the handshake, then the session.
struct ProtocolHandler<F> {
    protocol: F,
    context: Arc<ListenerContext>,
}

impl<S, F> ConnectionHandler<S> for ProtocolHandler<F>
where
    S: Connection + 'static,
    F: ListenerProtocol<S>,
{
    fn span(&self, from: SocketAddr) -> Span {
        self.protocol.span(from)
    }

    fn admits(&self, from: SocketAddr) -> bool {
        self.context.policy.load().check_source(from.ip()).is_ok()
    }

    fn rejection_bytes(&self, from: SocketAddr, why: Rejection) -> Bytes {
        let denial = match why {
            Rejection::Forbidden => match self.context.policy.load().check_source(from.ip()) {
                Err(denial) => denial,
                Ok(()) => return Bytes::new(),
            },
            Rejection::Full => Denial::Busy("too many connections are waiting without a request"),
            Rejection::OpenFiles => {
                Denial::Busy("limit of open files reached; raise it (ulimit -Hn, LimitNOFILE)")
            }
        };
        let metrics = &self.context.metrics;
        metrics.sessions.refused(F::NAME, denial.name());
        let mut access = AccessLogEntry::start(F::NAME, from.to_string());
        access.trace = listener::new();
        access.status = Some(denial.status().as_u16());
        let told = self.protocol.rejection_bytes(&denial, &access.trace);
        access.refuse(denial.name(), &denial.to_string(), from.ip(), &metrics.refusals);
        told
    }

    async fn serve(self: Arc<Self>, accepted: Accepted<S>) {
        let Accepted { socket, from, permit } = accepted;
        let (head_done, head_is_done) = oneshot::channel();
        let mut admission = Admission::new::<S, F>(&self.context, from, permit, head_done);
        let head = {
            // Boxed, so that a session does not retain the memory of the handshake.
            let handshake = Box::pin(self.protocol.handshake(socket, &mut admission));
            tokio::select! {
                biased;
                head = handshake => head,
                () = too_slow(head_is_done) => HandshakeOutcome::Failed { reason: "header_timeout", socket: None },
            }
        };
        let socket = match head {
            HandshakeOutcome::Opened { session, socket, buffered } => {
                // The session has its own permit. Clients that exhaust the connection limiter must not end it.
                drop(admission);
                let client = Socket::with_early(socket, self.context.pool.clone(), buffered);
                return run_session(session, LocalPeer::Client, client, &self.context.metrics).await;
            }
            HandshakeOutcome::Served(socket) => socket,
            HandshakeOutcome::Denied(socket) => Some(socket),
            HandshakeOutcome::Failed { reason, socket } => {
                debug!(reason, "handshake failed, no session");
                self.context.metrics.connections_rejected.count(reason);
                socket
            }
        };
        if let Some(socket) = socket {
            // Close gracefully, so that the response arrives. The client keeps its permit until then.
            admission.mark_idle();
            close_gracefully(&mut Socket::new(socket, self.context.pool.clone())).await;
        }
    }
}

/// Completes after [`HEAD_TIME`], unless `head_done` is dropped before.
async fn too_slow(head_done: oneshot::Receiver<()>) {
    if timeout(HEAD_TIME, head_done).await.is_ok() {
        std::future::pending().await
    }
}

/// Timeout for receiving a client's head.
pub const HEAD_TIME: Duration = Duration::from_secs(10);

/// Maximum length in bytes of a request's or response's head, and of the buffered part of a body.
pub(crate) const HEAD_BYTES: usize = 64 * 1024;

/// Returns the maximum number of pending connections of a listener: without a head, or not yet past the checks.
///
/// Their heads of maximum size must fit into a quarter of the memory for sessions. An edge is a small machine.
fn max_pending(at_edge: bool) -> usize {
    let memory = third_of_memory(if at_edge { EDGE_MEMORY } else { SERVER_MEMORY }) / 4;
    fd_limit::at_most(WAITING.min(memory / HEAD_BYTES), 8)
}

/// Upper bound for pending connections of a listener on any machine: without a head, or not yet past the checks.
pub(crate) const WAITING: usize = 4096;
const SERVER_MEMORY: usize = 256 << 20;
const EDGE_MEMORY: usize = 32 << 20;

// Admission of one client at a listener: checks its request and opens the session.

/// A client's request, as read by the listener.
#[derive(Debug)]
pub struct OpenRequest {
    /// The node, if the listener knows it. Otherwise the target's host names it.
    pub node: Option<NodeName>,
    /// The target to dial there.
    pub target: Target,
    /// The headers. `Proxy-Authorization` may contain a password.
    pub credentials: HeaderMap,
}

/// The identity that a client's connection proves.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub enum ClientIdentity {
    /// No identity. A password is requested if the access policy requires one.
    #[default]
    None,
    /// A local user of this machine.
    User(String),
    /// CN and DNS names of the client's certificate. The access policy may accept only some of them.
    Certificate(Vec<String>),
}

/// A denied request, with the data for its response.
#[derive(Debug)]
pub struct DeniedRequest {
    /// The reason.
    pub denial: Denial,
    /// Whether the response may contain addresses and times.
    pub trusted: bool,
    /// The trace ID, with which operators find the line in the log.
    pub trace: String,
}

/// The admission of one client, from its connection to its session. It holds a connection permit or, after a denied
/// request, a session permit until the client has disconnected.
///
/// A protocol with one request per connection calls [`Self::open`], which releases the connection permit.
///
/// A protocol with many requests per connection calls [`Self::authorize`] for each of them, opens sessions with
/// [`AuthorizedRequest::open`], and calls [`Self::mark_idle`] after each response. Its clients keep their connection
/// permits. An authorized request suspends the permit: its session permit bounds it, and clients that exhaust the
/// connection limiter must not end it.
#[derive(Debug)]
pub struct Admission<'a> {
    context: &'a Arc<ListenerContext>,
    listener: &'static str,
    category: Category,
    from: SocketAddr,
    /// The identity proved by the connection itself. The protocol sets it before it calls [`Self::open`] or
    /// [`Self::authorize`]; then no password is requested.
    pub proof: ClientIdentity,
    /// Dropped once the head is read.
    head_done: Option<oneshot::Sender<()>>,
    connection_permit: Option<Permit>,
    session_permit: Option<Permit<ClientKey>>,
}

/// A request that has passed all checks. It owns its data, so that it can outlive the [`Admission`].
#[derive(Debug)]
#[must_use = "dropping it logs in the access log that the client disconnected"]
pub struct AuthorizedRequest {
    context: Arc<ListenerContext>,
    category: Category,
    from: SocketAddr,
    destination: Destination,
    access: AccessLogEntry,
}

impl<'a> Admission<'a> {
    pub(crate) fn new<S, F: ListenerProtocol<S>>(
        context: &'a Arc<ListenerContext>,
        from: SocketAddr,
        limiter: Permit,
        head_done: oneshot::Sender<()>,
    ) -> Self {
        Self {
            context,
            listener: F::NAME,
            category: F::CATEGORY,
            from,
            proof: ClientIdentity::None,
            head_done: Some(head_done),
            connection_permit: Some(limiter),
            session_permit: None,
        }
    }

    /// Returns the connection permit, which is held until the session is opened.
    pub(crate) fn permit(&self) -> Option<&Permit> {
        self.connection_permit.as_ref()
    }

    /// Returns the client's address.
    pub fn from(&self) -> SocketAddr {
        self.from
    }

    /// Returns the listener's context.
    pub fn context(&self) -> &'a ListenerContext {
        self.context
    }

    /// Checks the request and opens the session; counts and logs it. An error in `request` is reported only to clients
    /// with an allowed address. Cancel safe: dropping the future leaves no session.
    ///
    /// # Errors
    ///
    /// Returns the denial to send to the client.
    pub async fn open(
        &mut self,
        request: Result<OpenRequest, Denial>,
        trace: String,
    ) -> Result<GrantedSession, DeniedRequest> {
        let permitted = self.authorize(request, trace).await?;
        let (permitted, permit) = permitted.acquire_permit().map_err(|denied| *denied)?;
        // Opening may take long; a client that has passed the checks must not keep others from connecting meanwhile.
        self.connection_permit = None;
        permitted.open_in(permit).await.map_err(|(denied, permit)| {
            self.session_permit = Some(permit);
            denied
        })
    }

    /// Like [`Self::open`], for a listener that knows the node. Returns `None` if the client disconnected meanwhile.
    pub async fn open_at<C: Connection>(
        &mut self,
        node: Result<NodeName, Denial>,
        target: &Target,
        client: &C,
    ) -> Option<Result<GrantedSession, DeniedRequest>> {
        let (target, credentials) = (target.clone(), HeaderMap::new());
        let request = node.map(|node| OpenRequest { node: Some(node), target, credentials });
        tokio::select! {
            biased;
            opened = self.open(request, listener::new()) => Some(opened),
            () = client.gone() => None,
        }
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
        self.head_done = None;
        if let Some(permit) = &self.connection_permit {
            permit.mark_active();
        }
        let mut access = AccessLogEntry::start(self.listener, self.from.to_string());
        access.trace = trace;
        Span::current().record("trace_id", access.trace.as_str());
        let (context, category, from) = (Arc::clone(self.context), self.category, self.from);
        match self.check(request, &mut access).await {
            Ok(destination) => Ok(AuthorizedRequest { context, category, from, destination, access }),
            Err(denial) => Err(DeniedRequest::new(denial, access, &context, from)),
        }
    }

    /// Marks the permit as idle after a response: from now on this process waits for the client.
    pub fn mark_idle(&self) {
        if let Some(permit) = &self.connection_permit {
            permit.mark_idle();
        }
    }

    /// Makes all checks that need no remote end, in the order that reveals least to strangers.
    pub(crate) async fn check(
        &self,
        request: Result<OpenRequest, Denial>,
        access: &mut AccessLogEntry,
    ) -> Result<Destination, Denial> {
        let (policy, from) = (self.context.policy.load_full(), self.from.ip());
        // Check again, because the config may have changed since the connection was accepted.
        policy.check_source(from)?;
        if self.context.drain.is_draining() {
            return Err(self.context.stopping_denial());
        }
        let OpenRequest { node, target, credentials } = request?;
        access.target = Some(target.clone());
        access.user = match &self.proof {
            ClientIdentity::User(user) => Some(user.clone()),
            ClientIdentity::Certificate(names) => Some(policy.user_of_certificate(names, self.listener)?),
            ClientIdentity::None => policy.authenticate(&credentials, from).await?,
        };
        // kube-apiserver's egress selector sends all targets here, including targets that no edge reaches.
        let trusted =
            self.category == Category::Egress && matches!(self.proof, ClientIdentity::Certificate(_));
        let mut destination = policy.locate(node, target, self.context, trusted)?;
        access.node = Some(destination.node.clone());
        let permit = |node: &_, port| policy.authorize(access.user.as_deref(), from, node, port);
        permit(&destination.node, destination.target.port)?;
        destination.narrow(|node, port| permit(node, port).is_ok());
        Ok(destination)
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

    /// Returns the authenticated user, if there is one.
    pub fn user(&self) -> Option<&str> {
        self.access.user.as_deref()
    }

    /// Returns true if responses to the client may contain addresses and times.
    pub fn is_trusted(&self) -> bool {
        self.from.ip().is_loopback() || self.access.user.is_some()
    }

    /// Discards the access log entry of a request that needs no session: the session that serves it has an entry.
    pub fn forget(self) {
        self.access.discard();
    }

    /// Opens a session; counts and logs it. Cancel safe: dropping the future leaves no session.
    ///
    /// # Errors
    ///
    /// Returns the denial for the client.
    pub async fn open(self) -> Result<GrantedSession, DeniedRequest> {
        let (permitted, permit) = self.acquire_permit().map_err(|denied| *denied)?;
        permitted.open_in(permit).await.map_err(|(denied, _slot)| denied)
    }

    /// Acquires a session permit.
    fn acquire_permit(self) -> Result<(Self, Permit<ClientKey>), Box<DeniedRequest>> {
        let key = ClientKey::of(self.access.user.as_deref(), self.from.ip());
        match self.context.sessions.try_acquire(&key).map_err(|why| self.context.no_permit(why)) {
            Ok(permit) => Ok((self, permit)),
            Err(full) => Err(Box::new(DeniedRequest::new(full, self.access, &self.context, self.from))),
        }
    }

    /// Opens a session with that permit, which is returned with a denial.
    async fn open_in(
        self,
        permit: Permit<ClientKey>,
    ) -> Result<GrantedSession, (DeniedRequest, Permit<ClientKey>)> {
        let Self { context, category, from, destination, mut access } = self;
        let client = access.user.as_ref().map_or_else(|| from.to_string(), |user| format!("{user}@{from}"));
        let started = Instant::now();
        let opened = destination.open(&context, (category, client), &mut access).await;
        context.metrics.open_duration.observe(started.elapsed());
        match opened {
            Ok(session) => {
                access.id = session.id();
                access.status = Some(StatusCode::OK.as_u16());
                if let Some(id) = session.id() {
                    Span::current().record("session", field::display(id));
                }
                let alive = context.metrics.sessions.start(access.listener);
                Ok(OpenSession { session, buffered: Bytes::new(), access, alive, permit })
            }
            Err(denial) => Err((DeniedRequest::new(denial, access, &context, from), permit)),
        }
    }
}

impl DeniedRequest {
    /// Creates a denied request; counts and logs it.
    fn new(denial: Denial, mut access: AccessLogEntry, context: &ListenerContext, from: SocketAddr) -> Self {
        let metrics = &context.metrics;
        metrics.sessions.refused(access.listener, denial.name());
        access.status = Some(denial.status().as_u16());
        let trusted = from.ip().is_loopback() || access.user.is_some();
        let trace = access.trace.clone();
        access.refuse(denial.name(), &denial.to_string(), from.ip(), &metrics.refusals);
        Self { denial, trusted, trace }
    }
}

// Sharing of a server's sessions between clients.

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
    FairLimiter::new(Limits { permits: most, per_source: for_one, waiting: 0, idle_timeout: None })
}

#[cfg(test)]
pub(crate) mod tests;
