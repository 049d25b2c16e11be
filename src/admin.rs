//! The admin ports for operators and machines: access control, and the response of each path.

pub mod certificate_expiry;
pub mod channelz;
pub mod config_plan;
#[cfg(feature = "edge")]
mod edge;
pub mod grants;
pub mod health;
pub mod invitations;
pub mod nodes;
pub mod page;
pub(crate) mod page_events;
pub mod readiness;
pub mod requester;
pub(crate) mod responses;
#[cfg(feature = "server")]
pub mod server;
pub mod sessions;
pub mod status;

use std::convert::{Infallible, identity};
use std::fmt;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use futures_util::FutureExt as _;
use futures_util::future::BoxFuture;
use http::header::ACCEPT;
use http::{Method, Request, Response, StatusCode};
use http_body_util::{Either, Full};
use hyper::body::Incoming;
use hyper::server::conn::http1;
use hyper::service::service_fn;
use hyper_util::rt::{TokioIo, TokioTimer};
use tokio::net::UnixStream;
use tracing::{Span, debug, info_span};

use crate::admin::certificate_expiry::MonitoredCertificates;
use crate::admin::config_plan::ConfigPlanner;
use crate::admin::page::{PageViewers, live_page};
use crate::admin::page_events::EventStream;
use crate::admin::readiness::Readiness;
use crate::admin::requester::{AdminRequest, AdminRequester};
use crate::admin::responses::{
    AdminResponse, AdminResponseFuture, json, method_not_allowed, not_found, plain_text, read_body, text,
};
use crate::admin::status::StatusResponse;
use crate::admin::status::collect::WallClock;
use crate::session_io::judged::{JudgedSessions, SessionSubject};
use crate::session_io::tls::TlsPort;
use tunnel_base::drain::Drain;
use tunnel_base::limited;
use tunnel_base::logging::dropped_lines::log_trouble;
use tunnel_base::logging::{AUDIT, LogLevelHandle};
use tunnel_base::metrics::format::ExpositionFormat;
use tunnel_base::metrics::label_values::DENIALS;
use tunnel_base::metrics::{Door, Metrics};
use tunnel_base::policy::Networks;
use tunnel_link::link::Link;
use tunnel_link::table::SessionTable;
use tunnel_net::accept_loop::{self, AcceptSettings, Accepted, ConnectionHandler};
use tunnel_net::fd_limit;
use tunnel_net::limiter::{FairLimiter, Permit, PermitLimits};
use tunnel_net::listen::{Accept, TcpListenSocket};
use tunnel_net::pool::BufferPool;
use tunnel_net::reload::{FileWatcher, ReloadedValue};
use tunnel_net::socket::Connection;
use tunnel_net::tls::client_certificate::ServerTls;
use tunnel_net::tls::handshake::handshake_limits;
use tunnel_net::unix_accept::UnixAccept;

/// The data that the admin ports serve. Cheap to clone.
#[derive(Debug, Clone)]
pub struct AdminContext {
    /// Kind of this process.
    pub process: Arc<dyn AdminProcess>,
    /// Table of sessions.
    pub table: Arc<SessionTable>,
    /// Open sessions, which operators end.
    pub judged: JudgedSessions,
    /// Metrics, served at `/metrics`.
    pub metrics: Metrics,
    /// Conditions, served at `/readyz`.
    pub readiness: Readiness,
    /// Log level, set by `PUT /debug/flags/v`; `None` if logs have no level.
    pub level: Option<LogLevelHandle>,
    /// Whether ports also set the log level, as in SuperEdge. Otherwise only the socket does.
    pub level_at_ports: bool,
    /// The time, set at the start.
    pub clock: WallClock,
    /// Users who may view pages from other machines; `None` if there are none.
    pub viewers: Option<PageViewers>,
    /// Limiter of open live pages.
    pub streams: FairLimiter,
    /// Tells what a changed config would do.
    pub planner: ConfigPlanner,
}

/// The body of a response: a text, or a stream of events.
type AdminBody = Either<Full<Bytes>, EventStream>;

/// What a kind of process adds to the admin API: a server or an edge.
pub trait AdminProcess: fmt::Debug + Send + Sync {
    /// Adds what only this kind of process knows.
    fn add_status(&self, admin: &AdminContext, status: &mut StatusResponse);

    /// Returns all links.
    fn links(&self) -> Vec<Arc<Link>>;

    /// Ends a session that was ended here at other processes, where it may wait or resume.
    fn end_parked(&self, _admin: &AdminContext, _one: &SessionSubject, _why: &str) {}

    /// Returns the response to a request for a path that not all kinds have.
    fn answer<'a>(&'a self, admin: &'a AdminContext, request: AdminRequest<'a>) -> AdminResponseFuture<'a>;
}

/// The kind of an admin port of a process, which decides the paths that it serves. Who may request a path depends on the
/// requester.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum AdminPortKind {
    /// All paths, each for the requesters that may use it.
    All,
    /// Only `/metrics`, `/metrics/nodes`, `/sd/nodes`, `/livez` and `/readyz`.
    Metrics,
}

/// The bound admin ports of a process that [`AdminContext`] serves, each `None` if there is none.
#[derive(Debug, Default)]
pub struct AdminListeners {
    /// Listener for all paths, which SuperEdge calls the log port.
    pub log: Option<TcpListenSocket>,
    /// TLS of that listener, if it has any.
    pub tls: Option<ReloadedValue<ServerTls>>,
    /// Listener for metrics and health.
    pub metrics: Option<TcpListenSocket>,
    /// Socket for commands on this machine.
    pub local: Option<UnixAccept>,
    /// Listener for gRPC's debugging clients.
    pub channelz: Option<TcpListenSocket>,
}

/// Serves an admin port until `drain` starts.
///
/// Pass a separate drain that starts last: then `/readyz` and `/metrics` still respond while sessions drain.
pub async fn serve<L>(
    listener: L,
    tls: Option<ReloadedValue<ServerTls>>,
    admin: AdminContext,
    port: AdminPortKind,
    drain: Drain,
) where
    L: Accept,
    AdminConnectionHandler: ConnectionHandler<L::AnyStream>,
{
    let limits = accept_limits(CONNECTIONS, &admin.metrics);
    let handshakes = FairLimiter::new(handshake_limits(CONNECTIONS, CONNECTIONS));
    let tls = tls.map(|tls| TlsPort::new(tls, BufferPool::new(), handshakes));
    let handler = AdminConnectionHandler { tls, admin, port, drain: drain.clone() };
    accept_loop::run(listener, limits, handler, drain).await;
}

/// Returns the limits of a port for operators.
fn accept_limits(connections: usize, metrics: &Metrics) -> AcceptSettings {
    AcceptSettings {
        limiter: FairLimiter::new(PermitLimits::permits(fd_limit::at_most(connections, 16))),
        proxies: Networks::default(),
        metrics: metrics.clone(),
        door: Door::Connections,
        for_operators: true,
    }
}

/// The handler of connections of one port.
#[derive(Debug)]
pub struct AdminConnectionHandler {
    /// TLS of the port, if it has any.
    tls: Option<TlsPort>,
    admin: AdminContext,
    port: AdminPortKind,
    drain: Drain,
}

impl ConnectionHandler for AdminConnectionHandler {
    fn span(&self, from: SocketAddr) -> Span {
        info_span!("admin", remote_addr = %from)
    }

    async fn handle(self: Arc<Self>, Accepted { mut socket, from, permit }: Accepted) {
        let Some(tls) = &self.tls else {
            return self.serve(&mut socket, AdminRequester::Address(from.ip(), None), &permit).await;
        };
        let metrics = &self.admin.metrics;
        match tls.accept(socket, from, &permit, &metrics.refusals).await {
            Ok((mut stream, certificate)) => {
                self.serve(&mut stream, AdminRequester::Address(from.ip(), certificate), &permit).await;
            }
            Err(reason) => metrics.connections_rejected.count(reason),
        }
    }
}

impl ConnectionHandler<UnixStream> for AdminConnectionHandler {
    fn span(&self, _from: SocketAddr) -> Span {
        info_span!("admin", socket = true)
    }

    async fn handle(self: Arc<Self>, mut accepted: Accepted<UnixStream>) {
        // The system cannot name a client that has disconnected.
        let Ok(user) = accepted.socket.peer_cred() else { return };
        self.serve(&mut accepted.socket, AdminRequester::LocalUser(user.uid()), &accepted.permit).await;
    }
}

impl AdminConnectionHandler {
    /// Answers the requests of one connection.
    async fn serve(&self, socket: &mut dyn Connection, requester: AdminRequester, permit: &Permit) {
        let answer = |http| {
            let request = AdminRequest { http, requester: &requester };
            self.admin.answer(request, self.port, &self.drain).boxed()
        };
        serve_connection(socket, &answer, &self.drain, permit).await;
    }
}

impl AdminContext {
    /// Serves the configured admin ports until `drain` starts; see [`serve`]. `grpc` is the address at which edges link
    /// to a server. `files` reloads their TLS. Reports files that cannot be reloaded, and when `certificates` expire.
    pub fn spawn(
        &self,
        listeners: AdminListeners,
        grpc: Option<SocketAddr>,
        certificates: MonitoredCertificates,
        files: &FileWatcher,
        drain: &Drain,
    ) {
        if let Some(tls) = &listeners.tls {
            files.watch("admin tls", tls);
        }
        self.metrics.sessions.expose(LISTENER, &DENIALS);
        let all = AdminPortKind::All;
        let metrics = AdminPortKind::Metrics;
        for (listener, tls, port) in [(listeners.log, listeners.tls, all), (listeners.metrics, None, metrics)]
        {
            if let Some(listener) = listener {
                drain.spawn(info_span!("admin"), serve(listener, tls, self.clone(), port, drain.clone()));
            }
        }
        if let Some(listener) = listeners.channelz {
            let serving = channelz::serve(listener, self.clone(), grpc, drain.clone());
            drain.spawn(info_span!("channelz"), serving);
        }
        // The socket needs no TLS: its file decides who may open it.
        if let Some(listener) = listeners.local {
            drain.spawn(info_span!("admin"), serve(listener, None, self.clone(), all, drain.clone()));
        }
        let metrics = self.metrics.clone();
        let readiness = self.readiness.clone();
        let followed =
            certificate_expiry::follow(certificates, files.clone(), metrics, readiness, drain.clone());
        drain.spawn(info_span!("files"), followed);
    }
}

async fn serve_connection<'a>(
    socket: &mut dyn Connection,
    answer: &(dyn Fn(Request<Incoming>) -> BoxFuture<'a, Response<AdminBody>> + Sync),
    drain: &Drain,
    permit: &Permit,
) {
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

/// The label of refused requests in metrics.
const LISTENER: &str = "admin";

/// Maximum number of concurrent connections per port: a few scrapers and probes. Another one evicts the connection idle
/// for longest. It is no part of the budget of strangers, who must not shut operators out; a port uses 4 MiB at most.
const CONNECTIONS: usize = 64;

/// Timeout for a request's head, and for the next request on a connection, so that idle connections do not use all
/// permits.
const HEAD_TIME: Duration = Duration::from_secs(10);

/// Maximum length of a head in bytes, as for the client listeners.
const HEAD_BYTES: usize = 16 * 1024;

impl AdminContext {
    /// Returns the response to one request.
    pub(crate) async fn answer(
        &self,
        request: AdminRequest<'_>,
        port: AdminPortKind,
        drain: &Drain,
    ) -> Response<AdminBody> {
        let AdminRequest { http, requester } = &request;
        let path = http.uri().path();
        let head = http.headers();
        let private = PRIVATE.contains(&path) && READS.contains(http.method());
        let denied = match port {
            _ if PUBLIC.contains(&path) => None,
            AdminPortKind::All => self.authenticate(requester, head, private).await.err(),
            AdminPortKind::Metrics if [NODE_METRICS, NODE_TARGETS].contains(&path) => {
                let denied = requester.check_access(head, false).err();
                denied
                    .inspect(|why| self.refuse(requester, "forbidden", why))
                    .map(|why| plain_text(StatusCode::FORBIDDEN, format!("{why}\n")))
            }
            AdminPortKind::Metrics => Some(not_found()),
        };
        match denied {
            Some(denied) => denied.map(AdminBody::Left),
            None if private && path == "/events" => self.events(requester, head, drain),
            None => self.answer_at_once(request).await.map(AdminBody::Left),
        }
    }

    /// Counts and logs that a client of a port is refused.
    fn refuse(&self, requester: &AdminRequester, result: &'static str, why: &str) {
        if let AdminRequester::Address(ip, _) = requester {
            limited!(
                self.metrics.refuse(Door::Listener(LISTENER), result, *ip) => info,
                target: AUDIT, remote_addr = %ip, result, reason = why, "admin request refused"
            );
        }
    }

    /// Returns the response to a request whose access has been checked; `/events` is not answered here.
    pub(super) async fn answer_at_once(&self, request: AdminRequest<'_>) -> AdminResponse {
        let AdminRequest { http, requester } = &request;
        let read = READS.contains(http.method());
        let post = *http.method() == Method::POST;
        match http.uri().path() {
            "/metrics" | NODE_METRICS | NODE_TARGETS | "/livez" | "/readyz" | "/status" | "/nodes"
            | "/events" | "/"
                if !read =>
            {
                method_not_allowed("GET, HEAD", READ_ONLY)
            }
            "/" => live_page(),
            "/status" => json(&self.status()),
            "/metrics" => metrics(http, |form| self.metrics.encode(form)),
            "/livez" => plain_text(StatusCode::OK, "ok\n"),
            "/readyz" => ready(&self.readiness),
            // The text of a config may have secrets, and its errors may repeat what it names.
            CONFIG_PLAN if !matches!(requester, AdminRequester::LocalUser(_)) => not_found(),
            "/sessions/end" | CONFIG_PLAN if !post => method_not_allowed("POST", POST_ONLY),
            CONFIG_PLAN => self.planner.answer(request.http).await.unwrap_or_else(identity),
            "/sessions/end" => self.end_sessions(request).await.unwrap_or_else(identity),
            "/debug/flags/v" => self.set_level(request).await,
            _ => self.process.answer(self, request).await,
        }
    }

    /// Sets the log level like SuperEdge, with its texts and statuses, including 406.
    async fn set_level(&self, AdminRequest { http, requester }: AdminRequest<'_>) -> AdminResponse {
        if *http.method() != Method::PUT {
            return plain_text(StatusCode::NOT_ACCEPTABLE, "unsupported http method\n");
        }
        // Clients of a port could fill the disk with debug lines. Only SuperEdge's own config expects this there.
        if !self.level_at_ports && matches!(requester, AdminRequester::Address(..)) {
            return plain_text(StatusCode::FORBIDDEN, LEVEL_AT_SOCKET);
        }
        // Limited in time and size, because the client may be anyone who reaches the port.
        let Some(body) = read_body(http, BODY_BYTES).await else {
            return plain_text(
                StatusCode::BAD_REQUEST,
                "failed set klog.logging.verbosity: the body is missing or too long\n",
            );
        };
        let value = String::from_utf8_lossy(&body);
        let value = value.trim();
        let set = go_parse_int(value).and_then(|v| match &self.level {
            Some(level) => level.set(v).map(|()| v).map_err(|e| e.to_string()),
            None => Err("logs have no level here".to_owned()),
        });
        match set {
            Ok(v) => {
                limited!(
                    self.metrics.refusals.may_log_about("log_level", requester) => info,
                    target: AUDIT, actor = %requester, verbosity = v, "log level set"
                );
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
pub(crate) fn ready(readiness: &Readiness) -> AdminResponse {
    match readiness.check() {
        Ok(troubles) => plain_text(StatusCode::OK, format!("ok\n{troubles}{}", log_trouble())),
        Err(reasons) => plain_text(StatusCode::SERVICE_UNAVAILABLE, format!("{reasons}{}", log_trouble())),
    }
}

/// Returns metrics in the format that the scraper prefers.
pub(super) fn metrics<B>(
    request: &Request<B>,
    encode: impl FnOnce(ExpositionFormat) -> String,
) -> AdminResponse {
    let accept = request.headers().get(ACCEPT).and_then(|accept| accept.to_str().ok());
    let form = ExpositionFormat::from_accept(accept.unwrap_or_default());
    text(StatusCode::OK, encode(form), form.content_type())
}

/// Parses an integer like Go's `strconv.ParseInt(text, 10, 32)`, with the same error texts.
fn go_parse_int(text: &str) -> Result<i32, String> {
    let digits = text.strip_prefix(['+', '-']).unwrap_or(text);
    let number = !digits.is_empty() && digits.bytes().all(|b| b.is_ascii_digit());
    let why = if number { "value out of range" } else { "invalid syntax" };
    text.parse().map_err(|_| format!("strconv.ParseInt: parsing {text:?}: {why}"))
}

/// Paths that are only served to this machine.
const PRIVATE: [&str; 6] = ["/", "/events", "/status", "/nodes", "/grants", "/machines"];

const READS: [Method; 2] = [Method::GET, Method::HEAD];

/// Paths of the metrics port. They are served for any Host, because they name no node and change nothing.
const PUBLIC: [&str; 3] = ["/metrics", "/livez", "/readyz"];

/// The path of the metrics of nodes. It is served at the metrics port, but not for any Host, because it names nodes.
const NODE_METRICS: &str = "/metrics/nodes";

/// The path of the nodes as targets of Prometheus; served like [`NODE_METRICS`].
const NODE_TARGETS: &str = "/sd/nodes";

/// The path of the plan for a changed config, for the owner of the process at its socket.
pub(crate) const CONFIG_PLAN: &str = "/config/plan";

/// The response at a port, which any user of the machine may reach. A high level fills the disk.
const LEVEL_AT_SOCKET: &str = "the log level can only be set at the admin socket (by default /run/tunnel/server.sock or \
                               edge.sock): curl --unix-socket SOCKET -X PUT --data 2 \
                               http://localhost/debug/flags/v\n";

/// The hint after a failed change of the log level.
pub(crate) const LEVEL_BODY: &str = "hint: send only the level as the body, for example with curl -X PUT --data 2: \
                                     0 for operators, 2 debug, 4 also libraries, 6 everything\n";

const POST_ONLY: &str = "only supports POST method\n";
/// SuperEdge's text for any other method.
const READ_ONLY: &str = "only supports GET method\n";

/// Maximum length of that body in bytes: any 32-bit number, with some space around it.
const BODY_BYTES: usize = 64;

/// Number of open live pages, in total and for one source.
pub(crate) const STREAMS: PermitLimits = PermitLimits { per_source: 8, ..PermitLimits::permits(16) };

#[cfg(test)]
mod tests;
