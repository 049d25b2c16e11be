//! What all front ends share: access checks, shares of slots, the time for a head, opening a session,
//! carrying it, and what is counted and logged of it.
//!
//! A front end itself ([`ListenerProtocol`]) is a parser from a client's first bytes to an [`OpenRequest`], and an answer.

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
use tunnel_net::accept_loop::{AcceptLoop, Accepted, ConnectionHandler, Rejection};
use tunnel_net::fd_limit;
use tunnel_net::limiter::{AcquireError, FairLimiter, Limits, Permit, Source};
use tunnel_net::listen::Accept;
use tunnel_net::pool::Pool;
use tunnel_net::socket::{Connection, Socket};
use tunnel_proto::frame::Category;

/// A front end: it reads what a client asks for from the stream `S` that was accepted, and answers.
pub trait ListenerProtocol<S>: Send + Sync + 'static {
    /// Its name in metrics and the access log.
    const NAME: &'static str;

    /// The category that the Open frame carries.
    const CATEGORY: Category;

    /// The stream that carries the session's bytes: what was accepted, or what a handshake (TLS) made of it.
    type Connection: Connection;

    /// What is logged about a client stands in this span; its fields `trace` and `session` are filled in once there are
    /// some.
    fn span(&self, from: SocketAddr) -> Span;

    /// A few bytes that are sent to a client that is rejected before its head is read; empty for none, the default.
    fn rejection_bytes(&self, _denial: &Denial, _trace: &str) -> Bytes {
        Bytes::new()
    }

    /// Reads the head, passes the request to [`Admission::open`], and answers the client. A front end that serves many
    /// requests over one connection passes each to [`Admission::judge`] instead.
    ///
    /// The future is dropped where it waits if it has called neither within [`HEAD_TIME`], if the client's slot is
    /// given to another source, or at the end of draining.
    fn handshake(
        &self,
        socket: S,
        visit: &mut Admission<'_>,
    ) -> impl Future<Output = HandshakeOutcome<Self::Connection>> + Send;
}

/// What a front end serves with. All but the gate is shared by those of a process. Cheap to clone.
#[derive(Debug, Clone)]
pub struct ListenerContext {
    /// The access checks. They follow the config: clients that connect later are checked by the new one.
    pub gate: Arc<ArcSwap<AccessPolicy>>,
    /// The door to the sessions of all front ends of this process.
    pub sessions: FairLimiter<ClientKey>,
    /// Read buffers.
    pub pool: Pool,
    /// Opens the sessions.
    pub route: SessionRouter,
    /// Finds the node at which an address, a pod or a Service is.
    pub addresses: Arc<AddressBook>,
    /// Dials what is at no node; `None`: nothing is dialled from here.
    pub direct: Option<DirectDialer>,
    /// The node at which all of this stands, and whose cloud dials what is at no node; `None`: at a pod.
    pub edge_routing: Option<EdgeRouting>,
    /// Counts connections, sessions and bytes.
    pub metrics: Metrics,
    /// Once it begins no client is let in; it waits for those that are.
    pub drain: Drain,
}

impl ListenerContext {
    /// What dials a target at this port without a node; `None`: it may dial none at all. `all`: for a client who may
    /// have all that is not off limits.
    fn direct_dialer(&self, port: u16, all: bool) -> Option<&DirectDialer> {
        self.direct.as_ref().filter(|direct| direct.may_dial(port, all))
    }

    /// It is stopping.
    fn is_stopping(&self) -> Denial {
        Denial::Busy(if self.edge_routing.is_some() {
            "this edge is stopping"
        } else {
            "this pod is stopping"
        })
    }

    /// There is no slot for another session.
    fn no_permit(&self, why: AcquireError) -> Denial {
        Denial::Busy(match (why, &self.edge_routing) {
            (AcquireError::PerSource, None) => {
                "you have as many sessions as one client may: [mode.cloud.session] max_for_client of the pod"
            }
            (AcquireError::Total, None) => "this pod is full: [mode.cloud.session] max of the pod is reached",
            (AcquireError::PerSource, Some(_)) => "you have as many sessions as one client of this edge may",
            (AcquireError::Total, Some(_)) => "this edge is full: it has as many sessions as it may",
        })
    }
}

/// A session that was opened for a client.
pub type GrantedSession = OpenSession<Permit<ClientKey>>;

/// How a client's handshake ended; `C` is its connection.
#[derive(Debug)]
pub enum HandshakeOutcome<C, T = GrantedSession> {
    /// The client has its answer; from now on its connection carries the session's bytes.
    Opened {
        /// What was opened for it.
        session: T,
        /// The connection, without any wrapper of the handshake.
        socket: C,
        /// Bytes that came behind the head before the answer was sent.
        buffered: Bytes,
    },
    /// The front end has served the client by itself, and no session is left to carry. The connection must be closed
    /// with care, if it is still there.
    Served(Option<C>),
    /// The client has been sent the denial. The connection must be closed with care, as it may still be sending.
    Denied(C),
    /// No head came, or the answer could not be sent.
    Failed {
        /// A fixed label for metrics.
        cause: &'static str,
        /// The connection, if it is still there; it is closed with care, as an error may be on its way to the client.
        socket: Option<C>,
    },
}

impl<C, T> HandshakeOutcome<C, T> {
    /// The same of another connection, made of this one.
    pub(crate) fn map<D>(self, change: impl FnOnce(C) -> D) -> HandshakeOutcome<D, T> {
        match self {
            Self::Opened { session, socket, buffered } => {
                HandshakeOutcome::Opened { session, socket: change(socket), buffered }
            }
            Self::Served(socket) => HandshakeOutcome::Served(socket.map(change)),
            Self::Denied(socket) => HandshakeOutcome::Denied(change(socket)),
            Self::Failed { cause, socket } => HandshakeOutcome::Failed { cause, socket: socket.map(change) },
        }
    }
}

/// Serves clients until draining begins; the drain then waits for those that are connected. A connection from a network
/// of `proxies` must begin with a PROXY header.
pub async fn serve<L, F>(front_end: F, listener: L, proxies: Networks, context: ListenerContext)
where
    L: Accept,
    F: ListenerProtocol<L::AnyStream>,
{
    let (refused, refusals) = (context.metrics.connections_refused.clone(), context.metrics.refusals.clone());
    let door = FairLimiter::new(Limits::slots(max_pending(context.edge_routing.is_some())));
    let entrance = AcceptLoop { listener, door, proxies, refused, refusals };
    let (drain, context) = (context.drain.clone(), Arc::new(context));
    entrance.run(Arc::new(ProtocolHandler { front_end, context }), drain).await;
}

struct ProtocolHandler<F> {
    front_end: F,
    context: Arc<ListenerContext>,
}

impl<S, F> ConnectionHandler<S> for ProtocolHandler<F>
where
    S: Connection + 'static,
    F: ListenerProtocol<S>,
{
    fn span(&self, from: SocketAddr) -> Span {
        self.front_end.span(from)
    }

    fn admits(&self, from: SocketAddr) -> bool {
        self.context.gate.load().check_source(from.ip()).is_ok()
    }

    fn rejection_bytes(&self, from: SocketAddr, why: Rejection) -> Bytes {
        let denial = match why {
            Rejection::Forbidden => match self.context.gate.load().check_source(from.ip()) {
                Err(denial) => denial,
                Ok(()) => return Bytes::new(),
            },
            Rejection::Full => Denial::Busy("too many connections wait at once without a request"),
            Rejection::OpenFiles => {
                Denial::Busy("no files are left to open here: raise their limit (ulimit -Hn, LimitNOFILE)")
            }
        };
        let metrics = &self.context.metrics;
        metrics.sessions.refused(F::NAME, denial.name());
        let mut access = AccessLogEntry::start(F::NAME, from.to_string());
        access.trace = listener::new();
        access.status = Some(denial.status().as_u16());
        let told = self.front_end.rejection_bytes(&denial, &access.trace);
        access.refuse(denial.name(), &denial.to_string(), from.ip(), &metrics.refusals);
        told
    }

    async fn serve(self: Arc<Self>, accepted: Accepted<S>) {
        let Accepted { socket, from, slot } = accepted;
        let (head_done, head_is_done) = oneshot::channel();
        let mut visit = Admission::new::<S, F>(&self.context, from, slot, head_done);
        let head = {
            // Boxed, so that a session does not keep the memory of the handshake.
            let handshake = Box::pin(self.front_end.handshake(socket, &mut visit));
            tokio::select! {
                biased;
                head = handshake => head,
                () = too_slow(head_is_done) => HandshakeOutcome::Failed { cause: "slow_head", socket: None },
            }
        };
        let socket = match head {
            HandshakeOutcome::Opened { session, socket, buffered } => {
                // The session has a slot of its own: strangers who fill the door must not end it.
                drop(visit);
                let client = Socket::with_early(socket, self.context.pool.clone(), buffered);
                return run_session(session, LocalPeer::Client, client, &self.context.metrics).await;
            }
            HandshakeOutcome::Served(socket) => socket,
            HandshakeOutcome::Denied(socket) => Some(socket),
            HandshakeOutcome::Failed { cause, socket } => {
                debug!(cause, "no session");
                self.context.metrics.connections_refused.count(cause);
                socket
            }
        };
        if let Some(socket) = socket {
            // Closed with care, so that the answer arrives; until then the client keeps its slot.
            visit.mark_idle();
            close_gracefully(&mut Socket::new(socket, self.context.pool.clone())).await;
        }
    }
}

/// Completes [`HEAD_TIME`] after the start, unless `head_done` is dropped first.
async fn too_slow(head_done: oneshot::Receiver<()>) {
    if timeout(HEAD_TIME, head_done).await.is_ok() {
        std::future::pending().await
    }
}

/// How long a client may take to send its head.
pub const HEAD_TIME: Duration = Duration::from_secs(10);

/// Longest head in bytes, of a request and of an answer; also how much of a body waits on its way.
pub(crate) const HEAD_BYTES: usize = 64 * 1024;

/// How many connections to one front end may not have sent a head or not passed the checks: as many as have room for a
/// head of the largest size in a quarter of what sessions may keep. An edge is a small machine.
fn max_pending(at_edge: bool) -> usize {
    let memory = third_of_memory(if at_edge { EDGE_MEMORY } else { SERVER_MEMORY }) / 4;
    fd_limit::at_most(WAITING.min(memory / HEAD_BYTES), 8)
}

/// Connections to one front end at most that have not sent a head or not passed the checks, on any machine.
pub(crate) const WAITING: usize = 4096;
const SERVER_MEMORY: usize = 256 << 20;
const EDGE_MEMORY: usize = 32 << 20;

// One client at a front end: checks its request and opens the session.

/// A client's request, as its front end has read it.
#[derive(Debug)]
pub struct OpenRequest {
    /// The node, where the front end knows it; else the target's host names it.
    pub node: Option<NodeName>,
    /// What is to be dialled there.
    pub target: Target,
    /// The headers, of which `Proxy-Authorization` may hold a password.
    pub credentials: HeaderMap,
}

/// Who a client's connection proves it to be.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub enum ClientIdentity {
    /// Nobody: a password is asked for if the gate wants one.
    #[default]
    None,
    /// A user of this machine.
    User(String),
    /// The CN and DNS names of the certificate that it has shown. The gate may know some of them only.
    Certificate(Vec<String>),
}

/// Why a client gets no session, and how much of that it may know.
#[derive(Debug)]
pub struct DeniedRequest {
    /// Why.
    pub denial: Denial,
    /// Whether the answer may show addresses and times.
    pub trusted: bool,
    /// The trace, by which the operator finds the line in the log.
    pub trace: String,
}

/// One client from its connection to its session. Until it has gone it holds a slot: the one of the door, or after a
/// denied request the one among the sessions.
///
/// A front end whose clients ask once calls [`Self::open`], which gives the slot at the door back. A front end that
/// serves many requests over one connection calls [`Self::judge`] for each, opens what it needs by [`AuthorizedRequest::open`],
/// and calls [`Self::waits`] after each answer. Its clients keep their slots at the door, but step aside from there for
/// a request that is permitted: a slot among the sessions bounds it, and strangers who fill the door must not end it.
#[derive(Debug)]
pub struct Admission<'a> {
    context: &'a Arc<ListenerContext>,
    front: &'static str,
    category: Category,
    from: SocketAddr,
    /// Who the connection itself proves the client to be. The front end sets it before it calls [`Self::open`] or
    /// [`Self::judge`]; no password is asked for then.
    pub proof: ClientIdentity,
    /// Dropped once the head is read.
    head_done: Option<oneshot::Sender<()>>,
    connection_permit: Option<Permit>,
    session_permit: Option<Permit<ClientKey>>,
}

/// What a client asked for and may have. It owns what it needs, so that it can outlive the visit.
#[derive(Debug)]
#[must_use = "dropping it says in the access log that the client went away"]
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
        door: Permit,
        head_done: oneshot::Sender<()>,
    ) -> Self {
        Self {
            context,
            front: F::NAME,
            category: F::CATEGORY,
            from,
            proof: ClientIdentity::None,
            head_done: Some(head_done),
            connection_permit: Some(door),
            session_permit: None,
        }
    }

    /// Its slot at the door, until its session is opened.
    pub(crate) fn slot(&self) -> Option<&Permit> {
        self.connection_permit.as_ref()
    }

    /// Address of the client.
    pub fn from(&self) -> SocketAddr {
        self.from
    }

    /// What the front end serves with.
    pub fn context(&self) -> &'a ListenerContext {
        self.context
    }

    /// Checks the request and opens the session; counts and logs it. An error in `request` is shown only to clients
    /// whose address is allowed. Cancel safe: a dropped call leaves nothing behind.
    ///
    /// # Errors
    ///
    /// The denial, which the front end sends to the client.
    pub async fn open(
        &mut self,
        request: Result<OpenRequest, Denial>,
        trace: String,
    ) -> Result<GrantedSession, DeniedRequest> {
        let permitted = self.authorize(request, trace).await?;
        let (permitted, slot) = permitted.acquire_permit().map_err(|denied| *denied)?;
        // Opening may take long; a client that has passed the checks must not keep others from the door meanwhile.
        self.connection_permit = None;
        permitted.open_in(slot).await.map_err(|(denied, slot)| {
            self.session_permit = Some(slot);
            denied
        })
    }

    /// As [`Self::open`], for a front end that knows the node. `None`: the client has gone meanwhile.
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

    /// Whether the client may have what it asks for. A denial is counted and logged. Until [`Self::waits`] the client
    /// waits for this end. Cancel safe.
    ///
    /// # Errors
    ///
    /// As [`Self::open`].
    pub async fn authorize(
        &mut self,
        request: Result<OpenRequest, Denial>,
        trace: String,
    ) -> Result<AuthorizedRequest, DeniedRequest> {
        self.head_done = None;
        if let Some(slot) = &self.connection_permit {
            slot.mark_active();
        }
        let mut access = AccessLogEntry::start(self.front, self.from.to_string());
        access.trace = trace;
        Span::current().record("trace", access.trace.as_str());
        let (context, category, from) = (Arc::clone(self.context), self.category, self.from);
        match self.check(request, &mut access).await {
            Ok(destination) => Ok(AuthorizedRequest { context, category, from, destination, access }),
            Err(denial) => Err(DeniedRequest::new(denial, access, &context, from)),
        }
    }

    /// The client was answered: from now on this process waits for it.
    pub fn mark_idle(&self) {
        if let Some(slot) = &self.connection_permit {
            slot.mark_idle();
        }
    }

    /// All checks that need no far end, in the order that shows a stranger least.
    pub(crate) async fn check(
        &self,
        request: Result<OpenRequest, Denial>,
        access: &mut AccessLogEntry,
    ) -> Result<Destination, Denial> {
        let (gate, from) = (self.context.gate.load_full(), self.from.ip());
        // Checked again, as the config may have changed since the connection was accepted.
        gate.check_source(from)?;
        if self.context.drain.is_draining() {
            return Err(self.context.is_stopping());
        }
        let OpenRequest { node, target, credentials } = request?;
        access.target = Some(target.clone());
        access.user = match &self.proof {
            ClientIdentity::User(user) => Some(user.clone()),
            ClientIdentity::Certificate(names) => Some(gate.user_of_certificate(names, self.front)?),
            ClientIdentity::None => gate.authenticate(&credentials, from).await?,
        };
        // kube-apiserver's egress selector sends every target here, also those that no edge reaches.
        let trusted =
            self.category == Category::Egress && matches!(self.proof, ClientIdentity::Certificate(_));
        let mut destination = gate.locate(node, target, self.context, trusted)?;
        access.node = Some(destination.node.clone());
        let permit = |node: &_, port| gate.authorize(access.user.as_deref(), from, node, port);
        permit(&destination.node, destination.target.port)?;
        destination.narrow(|node, port| permit(node, port).is_ok());
        Ok(destination)
    }
}

impl AuthorizedRequest {
    /// The node, by its own name; [`NodeName::outside`] if this process dials.
    pub fn node(&self) -> &NodeName {
        &self.destination.node
    }

    /// What is to be dialled there.
    pub fn target(&self) -> &Target {
        &self.destination.target
    }

    /// Who the client has proved to be.
    pub fn user(&self) -> Option<&str> {
        self.access.user.as_deref()
    }

    /// Whether the client may be shown addresses and times.
    pub fn is_trusted(&self) -> bool {
        self.from.ip().is_loopback() || self.access.user.is_some()
    }

    /// Needs no session of its own: the one that serves it has a line in the access log.
    pub fn forget(self) {
        self.access.discard();
    }

    /// Opens it; counts and logs that. Cancel safe: a dropped call leaves nothing behind.
    ///
    /// # Errors
    ///
    /// The denial for the client.
    pub async fn open(self) -> Result<GrantedSession, DeniedRequest> {
        let (permitted, slot) = self.acquire_permit().map_err(|denied| *denied)?;
        permitted.open_in(slot).await.map_err(|(denied, _slot)| denied)
    }

    /// Takes a slot among the sessions.
    fn acquire_permit(self) -> Result<(Self, Permit<ClientKey>), Box<DeniedRequest>> {
        let key = ClientKey::of(self.access.user.as_deref(), self.from.ip());
        match self.context.sessions.try_acquire(&key).map_err(|why| self.context.no_permit(why)) {
            Ok(slot) => Ok((self, slot)),
            Err(full) => Err(Box::new(DeniedRequest::new(full, self.access, &self.context, self.from))),
        }
    }

    /// Opens it in that slot, which comes back with a denial.
    async fn open_in(
        self,
        slot: Permit<ClientKey>,
    ) -> Result<GrantedSession, (DeniedRequest, Permit<ClientKey>)> {
        let Self { context, category, from, destination, mut access } = self;
        let client = access.user.as_ref().map_or_else(|| from.to_string(), |user| format!("{user}@{from}"));
        let started = Instant::now();
        let opened = destination.open(&context, (category, client), &mut access).await;
        context.metrics.opening.observe(started.elapsed());
        match opened {
            Ok(session) => {
                access.id = session.id();
                access.status = Some(StatusCode::OK.as_u16());
                if let Some(id) = session.id() {
                    Span::current().record("session", field::display(id));
                }
                let alive = context.metrics.sessions.start(access.front);
                Ok(OpenSession { session, buffered: Bytes::new(), access, alive, permit: slot })
            }
            Err(denial) => Err((DeniedRequest::new(denial, access, &context, from), slot)),
        }
    }
}

impl DeniedRequest {
    /// Counts and logs it.
    fn new(denial: Denial, mut access: AccessLogEntry, context: &ListenerContext, from: SocketAddr) -> Self {
        let metrics = &context.metrics;
        metrics.sessions.refused(access.front, denial.name());
        access.status = Some(denial.status().as_u16());
        let trusted = from.ip().is_loopback() || access.user.is_some();
        let trace = access.trace.clone();
        access.refuse(denial.name(), &denial.to_string(), from.ip(), &metrics.refusals);
        Self { denial, trusted, trace }
    }
}

// How clients share the sessions of a pod.

/// The key by which clients share a pod's sessions: the user, or the source where the front end asks for no user.
#[derive(Debug, Clone, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum ClientKey {
    /// A user, by the name that was proved.
    User(Arc<str>),
    /// An address, or the /64 of an IPv6 address.
    Source(Source),
}

impl ClientKey {
    /// The key of a client at `from`, which has proved to be `user` if that is given.
    pub fn of(user: Option<&str>, from: IpAddr) -> Self {
        user.map_or_else(|| Self::Source(Source::of(from)), |name| Self::User(name.into()))
    }
}

/// The door to the sessions of all front ends of a pod: at once `most` in all, and `for_one` for one client.
pub fn sessions(most: usize, for_one: usize) -> FairLimiter<ClientKey> {
    FairLimiter::new(Limits { permits: most, per_source: for_one, waiting: 0, idle_timeout: None })
}

#[cfg(test)]
pub(crate) mod tests;
