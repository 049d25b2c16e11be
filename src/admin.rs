//! The admin ports for operators and machines: access control, and the response of each path.

pub mod channelz;
pub mod health;
pub mod linked;
pub mod nodes;
pub mod page;
pub mod readiness;
pub mod server_names;
pub mod sessions;
pub mod status;

use std::convert::Infallible;
use std::fmt;
use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use bytes::Bytes;
use http::header::{ACCEPT, ALLOW, CONTENT_TYPE, HOST, HeaderValue};
use http::{HeaderMap, Method, Request, Response, StatusCode};
use http_body_util::{BodyExt, Either, Full, Limited};
use hyper::body::Incoming;
use hyper::server::conn::http1;
use hyper::service::service_fn;
use hyper_util::rt::{TokioIo, TokioTimer};
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::UnixStream;
use tracing::{Span, debug, info, info_span};

use crate::admin::linked::LinkedUser;
use crate::admin::page::{AdminUsers, Events, STREAMS, live_page};
use crate::admin::readiness::Readiness;
use crate::admin::status::{Clock, EdgeView, ServerView};
use crate::invitations::subject::Subject;
use crate::invitations::{EnrolError, SharedEnrolments};
use crate::session_io::tls::TlsPort;
use tunnel_base::drain::Drain;
use tunnel_base::logging::{AUDIT, LogLevel, log_trouble};
use tunnel_base::metrics::Metrics;
use tunnel_base::metrics::format::ExpositionFormat;
use tunnel_base::names::{NodeName, Target};
use tunnel_base::policy::{Networks, canonical_ip};
use tunnel_net::accept_loop::{self, AcceptLimits, Accepted, ConnectionHandler};
use tunnel_net::fd_limit;
use tunnel_net::limiter::{FairLimiter, Permit};
use tunnel_net::listen::{Accept, TcpAccept, UnixAccept};
use tunnel_net::pool::BufferPool;
use tunnel_net::reload::{FileWatcher, Reload};
use tunnel_net::tls::verify::{ClientCertificate, ServerTls};

/// The data that the admin ports serve. Cheap to clone.
#[derive(Clone)]
pub struct Admin {
    /// Kind of this process.
    pub side: ProcessView,
    /// Metrics, served at `/metrics`.
    pub metrics: Metrics,
    /// Conditions, served at `/readyz`.
    pub readiness: Readiness,
    /// Log level, set by `PUT /debug/flags/v`; `None` if logs have no level.
    pub level: Option<LogLevel>,
    /// Whether ports also set the log level, as in SuperEdge. Otherwise only the socket does.
    pub level_at_ports: bool,
    /// The time, set at the start.
    pub clock: Clock,
    /// Users who may view pages from other machines.
    pub viewers: AdminUsers,
    /// Limiter of open live pages.
    pub streams: FairLimiter,
}

/// The body of a response: a text, or a stream of events.
type Reply = Either<Full<Bytes>, Events>;

/// The kind of this process, with the data that it serves.
#[derive(Debug, Clone)]
pub enum ProcessView {
    /// A server, with `/cloud/healthz`.
    Cloud(ServerView),
    /// An edge, with `/edge/healthz`.
    Edge(EdgeView),
}

/// The kind of an admin port of a process, which decides the paths that it serves and to whom.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum AdminPortKind {
    /// All paths; private ones only for this machine.
    Log,
    /// Only `/metrics`, `/metrics/nodes`, `/livez` and `/readyz`.
    Metrics,
    /// All paths, for users who may open the socket's file.
    Local,
}

/// The bound admin ports of a process that [`Admin`] serves, each `None` if there is none.
#[derive(Debug, Default)]
pub struct Listeners {
    /// Listener for all paths.
    pub log: Option<TcpAccept>,
    /// TLS of that listener, if it has any.
    pub tls: Option<Reload<ServerTls>>,
    /// Listener for metrics and health.
    pub metrics: Option<TcpAccept>,
    /// Socket for commands on this machine.
    pub local: Option<UnixAccept>,
    /// Listener for gRPC's debugging clients.
    pub channelz: Option<TcpAccept>,
}

/// Serves an admin port until `drain` starts.
///
/// Pass a separate drain that starts last: then `/readyz` and `/metrics` still respond while sessions drain.
pub async fn serve<L>(
    listener: L,
    tls: Option<Reload<ServerTls>>,
    admin: Admin,
    port: AdminPortKind,
    drain: Drain,
) where
    L: Accept,
    AdminConnectionHandler: ConnectionHandler<L::AnyStream>,
{
    let limits = accept_limits(CONNECTIONS, &admin.metrics);
    let tls = tls.map(|tls| TlsPort::new(tls, BufferPool::new(), CONNECTIONS));
    let handler = AdminConnectionHandler { tls, admin, port, drain: drain.clone() };
    accept_loop::run(listener, limits, handler, drain).await;
}

/// Returns the limits of a port for operators.
fn accept_limits(connections: usize, metrics: &Metrics) -> AcceptLimits {
    AcceptLimits {
        permits: fd_limit::at_most(connections, 16),
        proxies: Networks::default(),
        refused: metrics.connections_rejected.clone(),
        refusals: metrics.refusals.clone(),
        for_operators: true,
    }
}

/// The handler of connections of one port.
#[derive(Debug)]
pub struct AdminConnectionHandler {
    /// TLS of the port, if it has any.
    tls: Option<TlsPort>,
    admin: Admin,
    port: AdminPortKind,
    drain: Drain,
}

impl ConnectionHandler for AdminConnectionHandler {
    fn span(&self, from: SocketAddr) -> Span {
        info_span!("admin", remote_addr = %from)
    }

    async fn handle(self: Arc<Self>, Accepted { socket, from, permit }: Accepted) {
        let Some(tls) = &self.tls else {
            return self.serve(socket, Requester::Address(from.ip(), None), &permit).await;
        };
        let metrics = &self.admin.metrics;
        match tls.accept(socket, from, &permit, &metrics.refusals).await {
            Ok((stream, certificate)) => {
                self.serve(stream, Requester::Address(from.ip(), certificate), &permit).await;
            }
            Err(reason) => metrics.connections_rejected.count(reason),
        }
    }
}

impl ConnectionHandler<UnixStream> for AdminConnectionHandler {
    fn span(&self, _from: SocketAddr) -> Span {
        info_span!("admin", socket = true)
    }

    async fn handle(self: Arc<Self>, accepted: Accepted<UnixStream>) {
        // The system cannot name a client that has disconnected.
        let Ok(user) = accepted.socket.peer_cred() else { return };
        self.serve(accepted.socket, Requester::User(user.uid()), &accepted.permit).await;
    }
}

impl AdminConnectionHandler {
    /// Answers the requests of one connection.
    async fn serve<S: AsyncRead + AsyncWrite + Unpin + Send>(
        &self,
        socket: S,
        requester: Requester,
        permit: &Permit,
    ) {
        let answer = |request| self.admin.answer(request, self.port, &requester, &self.drain);
        serve_connection(socket, answer, &self.drain, permit).await;
    }
}

impl Admin {
    /// Creates the data of a process that starts now. `level` and `level_at_ports` are as in the fields.
    pub fn new(
        side: ProcessView,
        viewers: AdminUsers,
        metrics: Metrics,
        readiness: Readiness,
        level: Option<LogLevel>,
        level_at_ports: bool,
    ) -> Self {
        let (clock, streams) = (Clock::now(), FairLimiter::new(STREAMS));
        Self { side, metrics, readiness, level, level_at_ports, clock, viewers, streams }
    }

    /// Serves the configured admin ports until `drain` starts; see [`serve`]. `grpc` is the address at which edges link
    /// to a server. `files` reloads their TLS.
    pub fn spawn(&self, listeners: Listeners, grpc: Option<SocketAddr>, files: &FileWatcher, drain: &Drain) {
        if let Some(tls) = &listeners.tls {
            files.watch("admin tls", tls);
        }
        let (log, metrics) = (AdminPortKind::Log, AdminPortKind::Metrics);
        for (listener, tls, port) in [(listeners.log, listeners.tls, log), (listeners.metrics, None, metrics)]
        {
            if let Some(listener) = listener {
                drain.spawn(info_span!("admin"), serve(listener, tls, self.clone(), port, drain.clone()));
            }
        }
        if let Some(listener) = listeners.channelz {
            let serving = channelz::serve(listener, self.clone(), grpc, drain.clone());
            drain.spawn(info_span!("channelz"), serving);
        }
        if let Some(listener) = listeners.local {
            drain.spawn(
                info_span!("admin"),
                serve(listener, None, self.clone(), AdminPortKind::Local, drain.clone()),
            );
        }
    }
}

impl fmt::Debug for Admin {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Admin")
            .field("side", &self.side)
            .field("readiness", &self.readiness)
            .finish_non_exhaustive()
    }
}

async fn serve_connection<S, A>(
    socket: S,
    answer: impl Fn(Request<Incoming>) -> A + Send + Sync,
    drain: &Drain,
    permit: &Permit,
) where
    S: AsyncRead + AsyncWrite + Unpin + Send,
    A: Future<Output = Response<Reply>> + Send,
{
    let answer = |request| async {
        permit.mark_active();
        let answer = answer(request).await;
        permit.mark_idle();
        Ok::<_, Infallible>(answer)
    };
    let mut server = http1::Builder::new();
    server.timer(TokioTimer::new()).header_read_timeout(HEAD_TIME).max_buf_size(HEAD_BYTES).half_close(true);
    let mut connection = std::pin::pin!(server.serve_connection(TokioIo::new(socket), service_fn(answer)));
    let ended = tokio::select! {
        ended = connection.as_mut() => ended,
        () = drain.draining() => {
            connection.as_mut().graceful_shutdown();
            connection.await
        }
    };
    if let Err(error) = ended {
        debug!(%error, "admin connection ended");
    }
}

/// Maximum number of concurrent connections per port: a few scrapers and probes. Another one evicts the connection idle
/// for longest.
const CONNECTIONS: usize = 64;

/// Timeout for a request's head, and for the next request on a connection, so that idle connections do not use all
/// permits.
const HEAD_TIME: Duration = Duration::from_secs(10);

/// Maximum length of a head in bytes, as for the client listeners.
const HEAD_BYTES: usize = 16 * 1024;

// The response of each path of the admin ports.

impl Admin {
    /// Returns the response to one request.
    pub(crate) async fn answer(
        &self,
        request: Request<Incoming>,
        port: AdminPortKind,
        requester: &Requester,
        drain: &Drain,
    ) -> Response<Reply> {
        let path = request.uri().path();
        let private = PRIVATE.contains(&path) && READS.contains(request.method());
        if port != AdminPortKind::Metrics
            && !PUBLIC.contains(&path)
            && let Err(denied) = self.authenticate(requester, request.headers(), private).await
        {
            return denied.map(Reply::Left);
        }
        if port == AdminPortKind::Metrics
            && path == NODE_METRICS
            && let Err(why) = requester.check_access(request.headers(), false)
        {
            return plain_text(StatusCode::FORBIDDEN, format!("{why}\n")).map(Reply::Left);
        }
        if port != AdminPortKind::Metrics && private {
            return match (path, &self.side) {
                ("/events", _) => self.events(requester, request.headers(), drain),
                ("/status", _) => json(&self.status()).map(Reply::Left),
                ("/nodes", ProcessView::Cloud(server)) => json(&self.nodes(server).await).map(Reply::Left),
                ("/nodes", ProcessView::Edge(_)) => {
                    plain_text(StatusCode::NOT_FOUND, NOT_FOUND).map(Reply::Left)
                }
                _ => live_page().map(Reply::Left),
            };
        }
        self.answer_at_once(request, port, requester).await.map(Reply::Left)
    }

    async fn answer_at_once(
        &self,
        request: Request<Incoming>,
        port: AdminPortKind,
        requester: &Requester,
    ) -> Response<Full<Bytes>> {
        let is_public = |path| PUBLIC.contains(&path) || path == NODE_METRICS;
        if port == AdminPortKind::Metrics && !is_public(request.uri().path()) {
            return plain_text(StatusCode::NOT_FOUND, NOT_FOUND);
        }
        let read = READS.contains(request.method());
        let get = *request.method() == Method::GET;
        match (request.uri().path(), &self.side) {
            (
                "/metrics" | NODE_METRICS | "/livez" | "/readyz" | "/status" | "/nodes" | "/events" | "/",
                _,
            ) if !read => method_not_allowed("GET, HEAD", READ_ONLY),
            ("/metrics", _) => metrics(&request, |form| self.metrics.encode(form)),
            (NODE_METRICS, ProcessView::Cloud(server)) => {
                metrics(&request, |form| self.node_metrics(server, form))
            }
            ("/livez", _) => plain_text(StatusCode::OK, "ok\n"),
            ("/readyz", _) => ready(&self.readiness),
            ("/cloud/healthz", ProcessView::Cloud(_)) | ("/edge/healthz", ProcessView::Edge(_)) if !get => {
                method_not_allowed("GET", READ_ONLY)
            }
            ("/cloud/healthz", ProcessView::Cloud(server)) => {
                plain_text(StatusCode::OK, go_list(&server.registry.nodes()))
            }
            ("/edge/healthz", ProcessView::Edge(edge)) => {
                let linked = edge.uplinks.is_linked();
                let status = if linked { StatusCode::OK } else { StatusCode::INTERNAL_SERVER_ERROR };
                plain_text(status, "")
            }
            ("/invitations" | "/revocations", ProcessView::Cloud(_)) if port != AdminPortKind::Local => {
                plain_text(StatusCode::NOT_FOUND, NOT_FOUND)
            }
            ("/invitations", ProcessView::Cloud(server)) if get => list(server.enrolment.as_ref()).await,
            ("/invitations" | "/revocations", ProcessView::Cloud(_)) if *request.method() != Method::POST => {
                method_not_allowed("POST", "only supports POST method\n")
            }
            ("/invitations", ProcessView::Cloud(server)) => {
                invite(server.enrolment.as_ref(), server.port, request, requester).await
            }
            ("/revocations", ProcessView::Cloud(server)) => {
                revoke(server.enrolment.as_ref(), request, requester).await
            }
            ("/sessions/end", _) if *request.method() != Method::POST => {
                method_not_allowed("POST", "only supports POST method\n")
            }
            ("/sessions/end", _) => self.end_sessions(request, requester).await,
            ("/debug/flags/v", _) => self.set_level(request, requester).await,
            _ => plain_text(StatusCode::NOT_FOUND, NOT_FOUND),
        }
    }

    /// Sets the log level like SuperEdge, with its texts and statuses, including 406.
    async fn set_level(&self, request: Request<Incoming>, requester: &Requester) -> Response<Full<Bytes>> {
        if *request.method() != Method::PUT {
            return plain_text(StatusCode::NOT_ACCEPTABLE, "unsupported http method\n");
        }
        if !self.level_at_ports && matches!(requester, Requester::Address(..)) {
            return plain_text(StatusCode::FORBIDDEN, LEVEL_AT_SOCKET);
        }
        let body = tokio::time::timeout(BODY_TIME, Limited::new(request.into_body(), BODY_BYTES).collect());
        let Ok(Ok(body)) = body.await else {
            return plain_text(
                StatusCode::BAD_REQUEST,
                "failed set klog.logging.verbosity: the body is missing or too long\n",
            );
        };
        let body = body.to_bytes();
        let value = String::from_utf8_lossy(&body);
        let value = value.trim();
        let set = go_parse_int(value).and_then(|v| match &self.level {
            Some(level) => level.set(v).map(|()| v).map_err(|e| e.to_string()),
            None => Err("logs have no level here".to_owned()),
        });
        match set {
            Ok(v) => {
                info!(target: AUDIT, actor = %requester, verbosity = v, "log level set");
                plain_text(StatusCode::OK, format!("successfully set klog.logging.verbosity to {value}\n"))
            }
            Err(why) => {
                let why = format!("failed set klog.logging.verbosity {value}: {why}\n{LEVEL_BODY}");
                plain_text(StatusCode::BAD_REQUEST, why)
            }
        }
    }
}

/// Returns the response of `/readyz`: whether the process is ready, and the conditions that are not met.
pub(crate) fn ready(readiness: &Readiness) -> Response<Full<Bytes>> {
    match readiness.check() {
        Ok(troubles) => plain_text(StatusCode::OK, format!("ok\n{troubles}{}", log_trouble())),
        Err(reasons) => plain_text(StatusCode::SERVICE_UNAVAILABLE, format!("{reasons}{}", log_trouble())),
    }
}

/// Returns metrics in the format that the scraper prefers.
fn metrics<B>(
    request: &Request<B>,
    encode: impl FnOnce(ExpositionFormat) -> String,
) -> Response<Full<Bytes>> {
    let accept = request.headers().get(ACCEPT).and_then(|accept| accept.to_str().ok());
    let form = ExpositionFormat::from_accept(accept.unwrap_or_default());
    text(StatusCode::OK, encode(form), form.content_type())
}

/// Formats a list of nodes as Go prints a slice, which SuperEdge's watchers parse.
fn go_list(nodes: &[NodeName]) -> String {
    let names: Vec<_> = nodes.iter().map(NodeName::as_str).collect();
    format!("[{}]\n", names.join(" "))
}

/// Parses an integer like Go's `strconv.ParseInt(text, 10, 32)`, with the same error texts.
fn go_parse_int(text: &str) -> Result<i32, String> {
    let digits = text.strip_prefix(['+', '-']).unwrap_or(text);
    let number = !digits.is_empty() && digits.bytes().all(|b| b.is_ascii_digit());
    let why = if number { "value out of range" } else { "invalid syntax" };
    text.parse().map_err(|_| format!("strconv.ParseInt: parsing {text:?}: {why}"))
}

/// Paths that are only served to this machine.
const PRIVATE: [&str; 4] = ["/", "/events", "/status", "/nodes"];

const READS: [Method; 2] = [Method::GET, Method::HEAD];

/// Paths of the metrics port. They are served for any Host, because they name no node and change nothing.
const PUBLIC: [&str; 3] = ["/metrics", "/livez", "/readyz"];

/// The path of the metrics of nodes. It is served at the metrics port, but not for any Host, because it names nodes.
const NODE_METRICS: &str = "/metrics/nodes";

pub(crate) const NOT_FOUND: &str = "not found\n";

/// The response at a port, which any user of the machine may reach. A high level fills the disk.
const LEVEL_AT_SOCKET: &str = "the log level can only be set at the admin socket: \
                               curl --unix-socket /run/tunnel/server.sock -X PUT --data 2 \
                               http://localhost/debug/flags/v\n";

/// The hint after a failed change of the log level.
pub(crate) const LEVEL_BODY: &str = "hint: send only the level as the body, for example with curl -X PUT --data 2: \
                                     0 for operators, 2 debug, 4 also libraries, 6 everything\n";

/// SuperEdge's text for any other method.
const READ_ONLY: &str = "only supports GET method\n";

/// Timeout for a body of a few bytes.
const BODY_TIME: Duration = Duration::from_secs(5);

/// Maximum length of that body in bytes: any 32-bit number, with some space around it.
const BODY_BYTES: usize = 64;

// The requester, and whether it may see private data.

/// The sender of a request at an admin port; decides which paths it may use.
#[derive(Debug, Clone)]
pub enum Requester {
    /// A client at this address, with the certificate that it has presented.
    Address(IpAddr, Option<ClientCertificate>),
    /// A user of this machine at the admin socket, by user id.
    User(u32),
    /// A user who has proved this name by a certificate or a password.
    Person(String),
    /// A user's program, over its link.
    Linked(Arc<LinkedUser>),
}

/// The reason for a refusal, with a hint.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub(crate) enum AdminAccessError {
    /// The client is not on this machine.
    #[error("only available on this machine; connect to 127.0.0.1, or run `tunnel status` there")]
    Elsewhere,
    /// The name in Host may be one that a malicious page has made resolve to this address (DNS rebinding).
    #[error("connect by IP address or as localhost, not by another name")]
    Host,
}

impl Requester {
    /// Returns true if the requester is on this machine.
    pub fn is_local(&self) -> bool {
        match self {
            Self::Address(ip, _) => canonical_ip(*ip).is_loopback(),
            Self::User(_) => true,
            Self::Person(_) | Self::Linked(_) => false,
        }
    }

    /// Checks whether the requester may request paths that name nodes or change something. `private` paths, which show
    /// nodes, sessions and clients, are only for this machine.
    ///
    /// # Errors
    ///
    /// Returns an error if access is denied.
    pub(crate) fn check_access(&self, head: &HeaderMap, private: bool) -> Result<(), AdminAccessError> {
        match self {
            Self::User(_) | Self::Person(_) | Self::Linked(_) => Ok(()),
            Self::Address(..) if private && !self.is_local() => Err(AdminAccessError::Elsewhere),
            Self::Address(..) if is_plain_host(head) => Ok(()),
            // HTTP/1.0 requests of scripts and load balancers may omit Host; browsers never do.
            Self::Address(..) if !private && !head.contains_key(HOST) => Ok(()),
            Self::Address(..) => Err(AdminAccessError::Host),
        }
    }
}

impl fmt::Display for Requester {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Address(ip, _) => ip.fmt(f),
            Self::User(uid) => write!(f, "uid={uid}"),
            Self::Person(name) => f.write_str(name),
            Self::Linked(user) => user.client.fmt(f),
        }
    }
}

/// Returns true if the only Host is an address or `localhost`. A malicious page whose name resolves to 127.0.0.1 sends
/// another.
fn is_plain_host(head: &HeaderMap) -> bool {
    let mut hosts = head.get_all(HOST).iter();
    let (Some(Ok(host)), None) = (hosts.next().map(|host| host.to_str()), hosts.next()) else { return false };
    let Ok(authority) = host.parse::<http::uri::Authority>() else { return false };
    let name = authority.host().trim_start_matches('[').trim_end_matches(']');
    !host.contains('@') && (name.eq_ignore_ascii_case("localhost") || name.parse::<IpAddr>().is_ok())
}

// Complete responses of the admin ports.

pub(crate) fn method_not_allowed(methods: &'static str, why: &'static str) -> Response<Full<Bytes>> {
    let mut answer = plain_text(StatusCode::METHOD_NOT_ALLOWED, why);
    answer.headers_mut().insert(ALLOW, HeaderValue::from_static(methods));
    answer
}

pub(crate) fn plain_text(status: StatusCode, body: impl Into<Bytes>) -> Response<Full<Bytes>> {
    text(status, body, "text/plain; charset=utf-8")
}

pub(crate) fn text(status: StatusCode, body: impl Into<Bytes>, kind: &'static str) -> Response<Full<Bytes>> {
    let mut answer = Response::new(Full::new(body.into()));
    *answer.status_mut() = status;
    answer.headers_mut().insert(CONTENT_TYPE, HeaderValue::from_static(kind));
    answer
}

pub(crate) fn json(value: &impl Serialize) -> Response<Full<Bytes>> {
    match serde_json::to_vec(value) {
        Ok(body) => text(StatusCode::OK, body, "application/json"),
        Err(error) => plain_text(StatusCode::INTERNAL_SERVER_ERROR, format!("{error}\n")),
    }
}

// Invitations, created and revoked through the admin socket of a server.

/// The response to a request for an invitation.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct InvitationResponse {
    /// The secret code, for the operator who sets up the machine.
    pub code: String,
    /// End of validity in seconds since 1970.
    pub until: u64,
    /// Host and port of the cloud, by its certificate.
    pub cloud: String,
    /// ID of the join key, if it is one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub key: Option<String>,
}

/// The JSON body of a request to create or revoke an invitation, at the admin socket of a server.
#[derive(Default, Deserialize)]
#[serde(default, deny_unknown_fields)]
struct InvitationRequest {
    /// Whom to invite, or what to revoke: a [`Subject`].
    subject: Option<String>,
    /// Validity of the invitation.
    seconds: Option<u64>,
    /// Number of nodes that may use the join key.
    uses: Option<u32>,
    /// ID of the join key to revoke, instead of a subject.
    key: Option<String>,
    /// Whether to revoke the nodes that came by that key, too.
    with_nodes: bool,
}

/// Returns the response to `POST /invitations`. `port` is the port to which edges link.
pub(crate) async fn invite(
    enrolment: Option<&Arc<SharedEnrolments>>,
    port: u16,
    request: Request<Incoming>,
    requester: &Requester,
) -> Response<Full<Bytes>> {
    let (enrolment, invitee, wish) = match parse_request(enrolment, request, requester).await {
        Ok(parsed) => parsed,
        Err(refused) => return refused,
    };
    let (invitee, lasting) = match check_invitation(invitee, &wish) {
        Ok(checked) => checked,
        Err(why) => return plain_text(StatusCode::BAD_REQUEST, format!("{why}\n")),
    };
    match enrolment.invite(&invitee, wish.uses, lasting, &requester.to_string()).await {
        Ok(made) => {
            let until = made.until.duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default().as_secs();
            let unknown = || format!("CLOUD:{port}");
            let cloud = made.host.map_or_else(unknown, |host| Target { host, port }.to_string());
            json(&InvitationResponse { code: made.code.to_string(), until, cloud, key: made.key })
        }
        Err(why) => enrolment_error(&why),
    }
}

/// Returns whom to invite, and for how long.
fn check_invitation(
    invitee: Option<Subject>,
    wish: &InvitationRequest,
) -> Result<(Subject, Duration), String> {
    let invitee = invitee.ok_or("subject: missing")?;
    let max_seconds = match (&invitee, wish.uses) {
        (Subject::Device(_), _) => return Err("subject: a device is named when it joins".into()),
        (Subject::Nodes(_), Some(1..=MAX_USES)) => MAX_KEY_SECONDS,
        (Subject::Nodes(_), _) => return Err(format!("uses: expected 1 to {MAX_USES}")),
        (_, Some(_)) => return Err("uses: only a pattern of nodes has a number of uses".into()),
        (_, None) => MAX_INVITATION_SECONDS,
    };
    let seconds = wish.seconds.filter(|seconds| (MIN_INVITATION_SECONDS..=max_seconds).contains(seconds));
    let expected = || format!("seconds: expected {MIN_INVITATION_SECONDS} to {max_seconds}");
    Ok((invitee, Duration::from_secs(seconds.ok_or_else(expected)?)))
}

/// Returns the response to `GET /invitations`: those that have joined or are invited.
pub(crate) async fn list(enrolment: Option<&Arc<SharedEnrolments>>) -> Response<Full<Bytes>> {
    let enrolment = match enrolment.ok_or_else(no_invitations) {
        Ok(enrolment) => enrolment,
        Err(refused) => return refused,
    };
    match enrolment.list().await {
        Ok(all) => json(&all),
        Err(why) => enrolment_error(&why),
    }
}

/// Returns the response to `POST /revocations`.
pub(crate) async fn revoke(
    enrolment: Option<&Arc<SharedEnrolments>>,
    request: Request<Incoming>,
    requester: &Requester,
) -> Response<Full<Bytes>> {
    let (enrolment, subject, InvitationRequest { key, with_nodes, .. }) =
        match parse_request(enrolment, request, requester).await {
            Ok(parsed) => parsed,
            Err(refused) => return refused,
        };
    let who = requester.to_string();
    let (revoked, none) = match (key, subject) {
        (Some(key), _) => {
            let none = format!(
                "no open join key has the ID {key}; tunnel invitations list prints the keys, and --with-nodes revokes \
                 the nodes that came by a closed one\n"
            );
            (enrolment.end_key(&key, with_nodes, &who).await, none)
        }
        (None, None | Some(Subject::Nodes(_))) => {
            return plain_text(
                StatusCode::BAD_REQUEST,
                "subject: expected a node or a user, or the key's ID\n",
            );
        }
        (None, Some(subject)) => {
            let none = format!(
                "{subject} has not joined by an invitation, and has no open one; tunnel invitations list prints those \
                 that have. A token of the token file is revoked there\n"
            );
            (enrolment.revoke(&subject, &who).await, none)
        }
    };
    match revoked {
        Ok(true) => plain_text(StatusCode::OK, "revoked\n"),
        Ok(false) => plain_text(StatusCode::NOT_FOUND, none),
        Err(why) => enrolment_error(&why),
    }
}

async fn parse_request<'a>(
    enrolment: Option<&'a Arc<SharedEnrolments>>,
    request: Request<Incoming>,
    requester: &Requester,
) -> Result<(&'a Arc<SharedEnrolments>, Option<Subject>, InvitationRequest), Response<Full<Bytes>>> {
    let enrolment = enrolment.ok_or_else(no_invitations)?;
    let wish: InvitationRequest = read_json(request).await?;
    let wrong = |why| plain_text(StatusCode::BAD_REQUEST, format!("subject: {why}\n"));
    let subject = wish.subject.as_deref().map(str::parse::<Subject>).transpose().map_err(wrong)?;
    let checked = requester.check_user(subject.as_ref().and_then(Subject::user));
    checked.map_err(|why| plain_text(StatusCode::FORBIDDEN, why))?;
    Ok((enrolment, subject, wish))
}

/// Reads the JSON body of a request.
pub(crate) async fn read_json<T: DeserializeOwned>(
    request: Request<Incoming>,
) -> Result<T, Response<Full<Bytes>>> {
    let body = Limited::new(request.into_body(), JSON_BODY_BYTES).collect();
    let Ok(Ok(body)) = tokio::time::timeout(BODY_TIME, body).await else {
        return Err(plain_text(StatusCode::BAD_REQUEST, "the body is missing or too long\n"));
    };
    serde_json::from_slice(&body.to_bytes())
        .map_err(|why| plain_text(StatusCode::BAD_REQUEST, format!("{why}\n")))
}

fn no_invitations() -> Response<Full<Bytes>> {
    let why =
        "this server takes no invitations; set store in [server.invitations] of the config of each server\n";
    plain_text(StatusCode::NOT_FOUND, why)
}

fn enrolment_error(why: &EnrolError) -> Response<Full<Bytes>> {
    plain_text(StatusCode::SERVICE_UNAVAILABLE, format!("{why}\n"))
}

/// Validity of an invitation in seconds: one minute, enough to carry a line to another machine, to one week.
pub(crate) const MIN_INVITATION_SECONDS: u64 = 60;
pub(crate) const MAX_INVITATION_SECONDS: u64 = 7 * 24 * 3600;

/// Longest validity of a join key in seconds, as it is part of an image: a year.
pub(crate) const MAX_KEY_SECONDS: u64 = 365 * 24 * 3600;

/// Maximum number of nodes that a join key admits, so that its record stays small.
pub(crate) const MAX_USES: u32 = 10_000;

/// Maximum length of a JSON body in bytes.
const JSON_BODY_BYTES: usize = 1024;

#[cfg(test)]
mod tests;

#[cfg(test)]
mod requester_tests {
    use super::*;

    fn head(hosts: &[&str]) -> HeaderMap {
        hosts.iter().map(|host| (HOST, host.parse().unwrap())).collect()
    }

    #[test]
    fn private_pages_are_for_loopback_and_host_must_be_an_address_or_localhost() {
        let (near, far) = (
            Requester::Address("127.0.0.1".parse().unwrap(), None),
            Requester::Address("10.0.0.1".parse().unwrap(), None),
        );
        for host in
            ["127.0.0.1", "127.0.0.1:9010", "[::1]:9010", "localhost", "LocalHost:8080", "10.0.0.7:9010"]
        {
            assert_eq!(near.check_access(&head(&[host]), true), Ok(()), "{host}");
            assert_eq!(far.check_access(&head(&[host]), true), Err(AdminAccessError::Elsewhere), "{host}");
            assert_eq!(far.check_access(&head(&[host]), false), Ok(()), "{host}");
        }
        for host in [
            "evil.example",
            "127.0.0.1.evil.example:9010",
            "localhost.evil.example",
            "a@127.0.0.1",
            "",
            ":80",
        ] {
            assert_eq!(near.check_access(&head(&[host]), true), Err(AdminAccessError::Host), "{host}");
            assert_eq!(far.check_access(&head(&[host]), false), Err(AdminAccessError::Host), "{host}");
        }
        assert_eq!(near.check_access(&head(&[]), true), Err(AdminAccessError::Host));
        assert_eq!(near.check_access(&head(&[]), false), Ok(()), "HTTP/1.0 needs no Host");
        assert_eq!(near.check_access(&head(&["localhost", "localhost"]), true), Err(AdminAccessError::Host));
        assert_eq!(Requester::User(0).check_access(&head(&[]), true), Ok(()));
        let mapped = Requester::Address("::ffff:127.0.0.1".parse().unwrap(), None);
        assert!(mapped.is_local() && near.is_local() && !far.is_local());
        assert_eq!((near.to_string(), Requester::User(7).to_string()), ("127.0.0.1".into(), "uid=7".into()));
    }
}
