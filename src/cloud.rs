//! Builds and runs a pod.

use std::future::Future;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use anyhow::Context as _;
use arc_swap::ArcSwap;
use tokio::net::TcpStream;
use tokio::sync::{OwnedSemaphorePermit, Semaphore, mpsc};
use tokio::time::{Instant, timeout_at};
use tokio_rustls::TlsAcceptor;
use tonic::Status;
use tracing::{debug, error, info, info_span, warn};

use crate::admin::{self, Admin, Port, Readiness, Side};
use crate::config::cloud::{Auth, Cloud, MEMORY, TlsVersion};
use crate::drain::{Drain, Drained};
use crate::frontend::auth::{Gate, Logins, Users};
use crate::frontend::connect;
use crate::names::Instance;
use crate::net::listen::{Listener, tune_link};
use crate::net::pool::Pool;
use crate::net::reload::Reload;
use crate::net::socket::Buffered;
use crate::net::tls::{self, Clients, Identity};
use crate::policy::tokens::Tokens;
use crate::registry::{Linked, Registry};
use crate::route::Route;
use crate::telemetry::log::Level;
use crate::telemetry::{Metrics, third_of_memory};
use crate::tunnel::grpc::{Call, Ground, Waiting, serve};
use crate::tunnel::{Code, Event, Limits, Link, Refusal, Table, Windows};

/// A running pod, and where it listens.
#[derive(Debug)]
pub struct Pod {
    /// Where edges link.
    pub grpc: SocketAddr,
    /// Where clients come in; none if the implicit port could not be had.
    pub ssh: Option<SocketAddr>,
    /// Health, log level, metrics.
    pub log: SocketAddr,
    /// Metrics alone.
    pub metrics_at: Option<SocketAddr>,
    /// The numbers.
    pub metrics: Metrics,
    /// The nodes that are linked here.
    pub registry: Arc<Registry>,
    /// The sessions.
    pub table: Arc<Table>,
    readiness: Readiness,
    stopping: Stopping,
}

/// What is stopped in which order: clients first, links when no session needs them, admin ports last.
#[derive(Debug)]
struct Stopping {
    clients: Drain,
    links: Drain,
    admin: Drain,
    deadline: Duration,
}

/// What the tasks of a pod share.
#[derive(Debug, Clone)]
struct Shared {
    tokens: Reload<Tokens>,
    registry: Arc<Registry>,
    route: Route,
    ground: Ground,
    pool: Pool,
    clients: Drain,
}

impl Pod {
    /// Reads the files that the settings name, binds every port, then serves.
    ///
    /// # Errors
    ///
    /// A file that will not do, or a port that was asked for and cannot be had. Nothing runs then.
    pub fn start(settings: Cloud, level: Option<Level>) -> anyhow::Result<Self> {
        let Cloud { server, tls, ssh, session, pod_name, pod_namespace, .. } = settings;
        let metrics = Metrics::cloud(&pod_namespace, &pod_name);
        let acceptor = acceptor(&server.cert, &server.key, &tls)?;
        let tokens =
            Reload::file(&server.tokenfile, |text| Ok(Tokens::parse(&String::from_utf8_lossy(text))))
                .with_context(|| {
                    format!("mode.cloud.stream.server.tokenfile: {}", server.tokenfile.display())
                })?;
        if tokens.load().is_empty() {
            warn!(file = %server.tokenfile.display(), "no token in the token file: every edge is refused until there is one");
        }
        let users = match &ssh.auth {
            Auth::None => None,
            Auth::Basic { users } => Some(read_users(users)?),
        };
        let grpc = Listener::bind(server.listen.at).context("mode.cloud.stream.server.listen")?;
        let log = bind(server.log_listen, "mode.cloud.stream.server.log_listen")?;
        let metrics_at = match server.metrics_listen {
            Some(listen) => {
                Some(Listener::bind(listen.at).context("mode.cloud.stream.server.metrics_listen")?)
            }
            None => None,
        };
        let front = bind(ssh.listen, "mode.cloud.ssh.listen")?;

        let stopping = Stopping {
            clients: Drain::new(),
            links: Drain::new(),
            admin: Drain::new(),
            deadline: session.drain,
        };
        let limits = Limits {
            windows: WINDOWS,
            memory: session.memory.unwrap_or_else(|| third_of_memory(MEMORY)),
            sessions: session.max,
            grace: session.grace,
        };
        let table = Table::new(Instance::random(), limits, metrics.clone());
        let registry = Registry::new(metrics.clone());
        let route = Route::new(registry.clone(), table.clone(), session.open_timeout, session.grace);
        let ground = Ground { table: table.clone(), metrics: metrics.clone(), drain: stopping.links.clone() };
        let pool = Pool::new();
        let shared = Shared {
            tokens: tokens.clone(),
            registry: registry.clone(),
            route: route.clone(),
            ground,
            pool: pool.clone(),
            clients: stopping.clients.clone(),
        };
        let readiness = Readiness::waiting_for(&[]);
        let nodes = registry.clone();
        let admin = Admin {
            side: Side::Cloud(Arc::new(move || nodes.nodes())),
            metrics: metrics.clone(),
            readiness: readiness.clone(),
            level,
            level_from_anywhere: !server.log_listen.is_local(),
        };
        let pod = Self {
            grpc: grpc.at(),
            ssh: front.as_ref().map(Listener::at),
            log: log.as_ref().map_or(server.log_listen.at, Listener::at),
            metrics_at: metrics_at.as_ref().map(Listener::at),
            metrics: metrics.clone(),
            registry,
            table,
            readiness,
            stopping,
        };
        pod.spawn_admin(log, metrics_at, &admin);
        pod.spawn_upkeep(tokens, acceptor.clone(), users.clone(), &pool);
        let gate = Gate { allow_from: ssh.allow_from, logins: users.map(Logins::new), rules: ssh.rules };
        let gate = Arc::new(ArcSwap::from_pointee(gate));
        if let Some(front) = front {
            let sessions = Arc::new(Semaphore::new(session.max.min(Semaphore::MAX_PERMITS)));
            let settings = connect::Settings { gate, sessions, pool };
            let drain = pod.stopping.clients.clone();
            let serving = connect::serve(front, settings, route, metrics, drain.clone());
            drain.spawn(info_span!("ssh"), serving);
        }
        let (calls, called) = mpsc::channel(MOST_WAITING);
        let links = &pod.stopping.links;
        links.spawn(info_span!("calls"), admit_calls(called, shared.clone()));
        links.spawn(info_span!("grpc"), accept(grpc, acceptor, calls, shared));
        info!(grpc = %pod.grpc, ssh = ?pod.ssh, log = %pod.log, "pod is up");
        Ok(pod)
    }

    /// Stops: not ready, listeners closed, sessions until the deadline or until `at_once` completes.
    pub async fn stop(self, at_once: impl Future<Output = ()>) -> Drained {
        let Stopping { clients, links, admin, deadline } = self.stopping;
        self.readiness.set("running", Err("stopping".into()));
        info!(
            sessions = self.table.len(),
            ?deadline,
            "stopping: no new sessions, waiting for those that run"
        );
        let drained = clients.finish(deadline, at_once).await;
        if let Drained::Cut(left) = drained {
            warn!(left, "deadline over: sessions are cut");
        }
        self.table.reset_all(&Refusal::new(Code::Busy, "the pod is stopping"));
        links.begin();
        tokio::time::sleep(LAST_WORDS).await;
        self.registry.close_all();
        links.finish(GOODBYE, std::future::pending()).await;
        admin.finish(GOODBYE, std::future::pending()).await;
        drained
    }

    fn spawn_admin(&self, log: Option<Listener>, metrics: Option<Listener>, admin: &Admin) {
        let drain = &self.stopping.admin;
        for (listener, port) in [(log, Port::Log), (metrics, Port::Metrics)] {
            if let Some(listener) = listener {
                drain.spawn(info_span!("admin"), admin::serve(listener, admin.clone(), port, drain.clone()));
            }
        }
    }

    fn spawn_upkeep(
        &self,
        tokens: Reload<Tokens>,
        tls: Reload<tokio_rustls::rustls::ServerConfig>,
        users: Option<Reload<Users>>,
        pool: &Pool,
    ) {
        let drain = &self.stopping.links;
        drain.spawn(info_span!("tokens"), tokens.watch(drain.clone()));
        drain.spawn(info_span!("tls"), tls.watch(drain.clone()));
        if let Some(users) = users {
            drain.spawn(info_span!("users"), users.watch(drain.clone()));
        }
        drain.spawn(info_span!("upkeep"), self.table.clone().upkeep(pool.clone(), drain.clone()));
    }
}

/// Takes connections, lets each do its TLS handshake in a task of its own, and hands it to the gRPC layer.
async fn accept(
    listener: Listener,
    tls: Reload<tokio_rustls::rustls::ServerConfig>,
    calls: mpsc::Sender<Call>,
    shared: Shared,
) {
    let links = shared.ground.drain.clone();
    let places = Arc::new(Semaphore::new(MOST_WAITING));
    loop {
        let (socket, from) = tokio::select! {
            biased;
            () = links.draining() => return,
            accepted = listener.accept() => accepted,
        };
        let Ok(place) = places.clone().try_acquire_owned() else {
            shared.ground.metrics.calls_refused.count("too_many_waiting");
            continue;
        };
        let tls = TlsAcceptor::from(tls.load());
        links.spawn(
            info_span!("link", %from),
            encrypted(socket, from, tls, place, calls.clone(), shared.clone()),
        );
    }
}

async fn encrypted(
    socket: TcpStream,
    from: SocketAddr,
    tls: TlsAcceptor,
    place: OwnedSemaphorePermit,
    calls: mpsc::Sender<Call>,
    shared: Shared,
) {
    let until = Instant::now() + LET_IN;
    if let Err(e) = tune_link(&socket) {
        return debug!(error = %e, "connection was gone at once");
    }
    match timeout_at(until, tls.accept(Buffered::new(socket, shared.pool.clone()))).await {
        Ok(Ok(io)) => serve(io, from, calls, shared.ground, Waiting { until, place }).await,
        Ok(Err(e)) => {
            shared.ground.metrics.calls_refused.count("tls");
            debug!(error = %e, "TLS handshake failed");
        }
        Err(_) => {
            shared.ground.metrics.calls_refused.count("tls_too_slow");
            debug!("TLS handshake took too long");
        }
    }
}

/// Lets callers in or sends them away, each in a task of its own, as asking an old link takes a while.
async fn admit_calls(mut calls: mpsc::Receiver<Call>, shared: Shared) {
    let links = shared.ground.drain.clone();
    loop {
        let call = tokio::select! {
            biased;
            () = links.draining() => return,
            call = calls.recv() => call,
        };
        let Some(call) = call else { return };
        let span = info_span!("link", node = %call.hello.node, from = %call.from);
        links.spawn(span, admit(call, shared.clone()));
    }
}

async fn admit(call: Call, shared: Shared) {
    let refused = &shared.ground.metrics.calls_refused;
    if !shared.tokens.load().prove(&call.hello.node, &call.hello.token) {
        refused.count("token");
        warn!("refused: invalid token");
        return call.refuse(Status::unauthenticated("invalid token"));
    }
    if shared.clients.is_draining() {
        refused.count("stopping");
        return call.refuse(Status::unavailable("this pod is stopping"));
    }
    if let Err(taken) = shared.registry.admit(&call.hello.node, call.hello.instance).await {
        refused.count("name_taken");
        error!(%taken, "refused");
        return call.refuse(Status::already_exists(taken.to_string()));
    }
    let (from, instance, dialect) = (call.from, call.hello.instance, call.hello.dialect);
    let link = call.accept();
    info!(?dialect, "node is linked");
    let outbox = link.outbox.clone();
    shared.registry.insert(Linked { outbox: outbox.clone(), instance, from });
    run(link, &shared).await;
    shared.registry.remove(&outbox);
}

/// Drives a link until it ends, then looks for new paths for its sessions.
async fn run(mut link: Link, shared: &Shared) {
    let links = &shared.ground.metrics.links;
    links.inc();
    let why = loop {
        match link.next().await {
            Ok(Event::Offer(offer)) => {
                let why = format!("edges may not reach {} through this pod", offer.target());
                offer.refuse(Refusal::new(Code::NotAllowed, why));
            }
            Ok(Event::Parked(parked)) => seek(parked, shared),
            Err(why) => break why,
        }
    };
    links.dec();
    shared.ground.metrics.links_ended.count(why.name());
    let parked = link.end(&why);
    info!(%why, sessions = parked.len(), "link has ended");
    for parked in parked {
        seek(parked, shared);
    }
}

fn seek(parked: crate::tunnel::Parked, shared: &Shared) {
    let route = shared.route.clone();
    let span = info_span!("seek", session = %parked.id());
    shared.ground.drain.spawn(span, async move { route.seek(parked).await });
}

fn acceptor(
    cert: &std::path::Path,
    key: &std::path::Path,
    tls: &crate::config::cloud::Tls,
) -> anyhow::Result<Reload<tokio_rustls::rustls::ServerConfig>> {
    let min_version = match tls.min_version {
        TlsVersion::V12 => "VersionTLS12",
        TlsVersion::V13 => "VersionTLS13",
    };
    let (offer, warnings) =
        tls::Offer::parse(min_version, &tls.cipher_suites.join(",")).context("mode.cloud.tls")?;
    for warning in warnings {
        warn!("{warning}");
    }
    let identity = Identity { cert: cert.into(), key: key.into() };
    let server = tls::Server { identity, clients: Clients::Anonymous, offer, alpn: vec![b"h2".to_vec()] };
    server.load().context("mode.cloud.stream.server.cert and key")
}

fn bind(listen: crate::config::Listen, key: &'static str) -> anyhow::Result<Option<Listener>> {
    Listener::bind_optional(listen.at, listen.implicit).context(key)
}

fn read_users(path: &std::path::Path) -> anyhow::Result<Reload<Users>> {
    let parse = |text: &[u8]| Users::parse(&String::from_utf8_lossy(text)).map_err(|e| e.to_string());
    Reload::file(path, parse).with_context(|| format!("mode.cloud.ssh.users: {}", path.display()))
}

/// Receive windows of a pod's sessions.
const WINDOWS: Windows = Windows { start: 64 * 1024, max: 4 << 20 };
/// Connections that were not let in yet, and calls that wait to be looked at.
const MOST_WAITING: usize = 1000;
/// From the connection to an accepted call.
const LET_IN: Duration = Duration::from_secs(10);
/// For the last resets to leave before the links are closed.
const LAST_WORDS: Duration = Duration::from_millis(100);
/// For connections to end by themselves at the very end.
const GOODBYE: Duration = Duration::from_secs(3);
