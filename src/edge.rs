//! Builds and runs an edge: its files, ports and tasks.

pub mod config;
pub(crate) mod edge_files;
pub mod http_proxy;

use std::collections::BTreeSet;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;
use std::sync::atomic::{AtomicBool, AtomicUsize};
use std::time::Duration;

use arc_swap::ArcSwap;
use futures_util::FutureExt as _;
use parking_lot::Mutex;
use tokio::time::{Instant, sleep, sleep_until};
use tokio_util::task::TaskTracker;
use tracing::{info, info_span, warn};

use crate::acceptor::SessionAcceptor;
use crate::acceptor::target_dialer::{TargetDialer, TargetDialerRole};
use crate::admin::certificate_expiry::MonitoredCertificates;
use crate::admin::config_plan::ConfigPlanner;
use crate::admin::readiness::{DRAINING_CONDITION, RESTART_CONDITION, Readiness};
use crate::admin::status::collect::WallClock;
use crate::admin::{self, AdminContext};
use crate::admission::access::AccessPolicies;
use crate::admission::destination::destination_mapping::DestinationMapping;
use crate::admission::heads::PendingLimits;
use crate::admission::http_proxy::{HttpProxyProtocol, NAME as PROXY};
use crate::admission::{self, AccessPolicy, ListenerContext, client_handler};
use crate::config::config_watch::ConfigFile;
use crate::config::edge::MEMORY;
use crate::config::plan::{ConfigPlan, RIGHTS_CHANGED, log_changed, waits};
use crate::edge::config::EdgeConfig as Settings;
use crate::edge::edge_files::{LoadedEdgeFiles, PreparedEdge, prepare};
use crate::edge::http_proxy::{EdgeProxyConfig, KEY as PROXY_KEY};
use crate::parts::with_kubernetes;
use crate::paths::uplinks::Uplinks;
use crate::route::SessionRouter;
use crate::session_io::judged::JudgedSessions;
use crate::session_io::rights::RightsChange;
use crate::startup::daemon::{DaemonConfig, Serving};
use crate::startup::signals::Signals;
use crate::startup::systemd::wait_stop;
use crate::startup::{StartupErrorCollector, StartupErrors};
use crate::uplink::link_dialer::LinkDialer;
use crate::uplink::link_dialer::caching_resolver::CachingResolver;
use crate::uplink::link_dialer::client_certificate::EdgeCertificate;
use crate::uplink::reconnect::{LINK_CONDITION, Reconnector};
use tunnel_base::drain::{Drain, Drained};
use tunnel_base::files;
use tunnel_base::logging::LogLevelHandle;
use tunnel_base::metrics::Metrics;
use tunnel_base::policy::targets::Targets;
use tunnel_link::grpc::LinkContext;
use tunnel_link::table::{SESSION_MEMORY, SessionLimits, SessionTable};
use tunnel_net::dial::SocketMemory;
use tunnel_net::interfaces::LocalAddresses;
use tunnel_net::limiter::FairLimiter;
use tunnel_net::listen::TcpListenSocket;
use tunnel_net::os::memory;
use tunnel_net::pool::BufferPool;
use tunnel_net::reload::FileWatcher;
use tunnel_proto::frame::{ErrorCode, SessionCategory, SessionError};
use tunnel_proto::halves::WindowLimits;
use tunnel_proto::names::{Instance, NodeName};

/// The addresses on which an edge listens.
#[derive(Debug, Clone)]
pub struct EdgeListenAddresses {
    /// Health, log level and metrics. `None` if the default port could not be bound.
    pub log: Option<SocketAddr>,
    /// Metrics only.
    pub metrics: Option<SocketAddr>,
    /// channelz, gRPC's debugging service.
    pub channelz: Option<SocketAddr>,
    /// HTTP proxy.
    pub proxy: Option<SocketAddr>,
}

/// A running edge: its addresses, its tables, and what is needed to reload its config and to stop it.
#[derive(Debug)]
pub struct Edge {
    /// Addresses on which the edge listens.
    pub bound: EdgeListenAddresses,
    /// Metrics of the process.
    pub metrics: Metrics,
    /// Table of sessions.
    pub table: Arc<SessionTable>,
    /// Router of sessions to other nodes and to the cloud.
    pub route: SessionRouter,
    targets: Arc<ArcSwap<Targets>>,
    policies: Arc<Mutex<AccessPolicies>>,
    proxy: Arc<Mutex<EdgeProxy>>,
    judged: JudgedSessions,
    readiness: Readiness,
    is_last_good: Arc<AtomicBool>,
    files: FileWatcher,
    uplinks: Arc<Uplinks>,
    sessions: Drain,
    links: Drain,
    admin: Drain,
    deadline: Duration,
}

/// The proxy for programs on this node. Its port follows the config.
#[derive(Debug)]
struct EdgeProxy {
    node: NodeName,
    /// What each port shares with the ones before: all but the policy, the nodes and the drain.
    context: ListenerContext,
    open: Option<OpenProxy>,
}

#[derive(Debug)]
struct OpenProxy {
    config: EdgeProxyConfig,
    /// Accepts no client once this drain starts. Its sessions continue.
    drain: Drain,
    /// Its accept loop, which owns the port.
    accepting: TaskTracker,
}

impl DaemonConfig for Settings {
    fn check(&self, startup: &mut StartupErrorCollector) {
        Edge::validate(self, startup);
    }

    fn plan(&self, new: &dyn DaemonConfig) -> ConfigPlan {
        new.of().map(|new| Self::plan(self, new)).unwrap_or_default()
    }

    fn uses_no_kubernetes(&self) -> Option<&'static str> {
        let unused = "an edge uses Kubernetes only for its certificate; set enabled = true in [edge.csr]";
        self.csr.is_none().then_some(unused)
    }

    fn secrets(&self, config: &Path) -> Vec<(String, PathBuf)> {
        Self::secrets(self, config)
    }

    fn admin_socket(&self) -> Option<&Path> {
        self.admin.listen.as_deref()
    }

    fn set_last_good(&mut self) {
        self.is_last_good = true;
    }

    fn serve(self: Box<Self>, file: ConfigFile, level: LogLevelHandle, mut signals: Signals) -> Serving {
        let serving = async move {
            let edge = Edge::start(*self, Some(level))?;
            edge.watch_config(file);
            wait_stop(&mut signals).await;
            Ok(edge.shutdown(signals.next()).await)
        };
        serving.boxed()
    }
}

impl Edge {
    /// Reads the files named in the config, binds the ports, then starts to keep a link to a server.
    ///
    /// # Errors
    ///
    /// Returns an error for each unusable file and each configured port that cannot be bound. Nothing is started then.
    pub fn start(settings: Settings, level: Option<LogLevelHandle>) -> Result<Self, StartupErrors> {
        let mut startup = StartupErrorCollector::default();
        let prepared = prepare(&settings, &mut startup);
        let PreparedEdge { files, admin: ports, proxy, mut policies, viewers } = startup.finish(prepared)?;
        let pool = BufferPool::new();
        let mut edge = Self::new(&settings, &ports, proxy.as_ref().map(TcpListenSocket::at), pool.clone());
        policies.watch(&edge.files);
        if settings.is_last_good {
            let why = "the config file has errors, so this edge has started from its last good copy; run `tunnel config check`, \
                       correct the file";
            edge.readiness.set_degraded(CONFIG_CONDITION, Err(why.to_owned()));
        }
        let level_at_ports = settings.uplink.ports.sets_level;
        if let (Some(config), Some(listener)) = (&settings.http_proxy, proxy) {
            edge.proxy.lock().serve(config, listener, policies.of(PROXY_KEY));
        }
        edge.policies = Arc::new(Mutex::new(policies));
        let authorities = settings.ca_files();
        let shown = settings.certificates();
        let certificate = settings.csr.clone();
        let reconnector = edge.reconnector(settings, files, pool.clone());
        edge.spawn_upkeep(&reconnector, pool);
        if let Some(settings) = certificate {
            let reporter = reconnector.clone();
            let report = move |of, state| reporter.set_certificate_state(of, state);
            with_kubernetes!(api::csr::keep_edge(settings, &reconnector.dialer.node, &edge.links, report), else ());
        }
        edge.links.spawn(info_span!("network"), reconnector.clone().follow_network());
        edge.links.spawn(info_span!("link", node = %reconnector.dialer.node), reconnector.run(None));
        let admin = AdminContext {
            process: edge.uplinks.clone(),
            table: edge.table.clone(),
            judged: edge.judged.clone(),
            metrics: edge.metrics.clone(),
            readiness: edge.readiness.clone(),
            level,
            level_at_ports,
            clock: WallClock::now(),
            viewers,
            streams: FairLimiter::new(admin::STREAMS),
            planner: ConfigPlanner::default(),
        };
        let certificates = MonitoredCertificates::default();
        certificates.set(shown, authorities);
        admin.spawn(ports, None, certificates, &edge.files, &edge.admin);
        info!(admin_addr = edge.bound.log.map(tracing::field::display), "edge started");
        Ok(edge)
    }

    /// Follows the config when it changes: reloads the access rules, ends the sessions that they no longer allow, and
    /// opens and closes the proxy.
    pub fn watch_config(&self, config: ConfigFile) {
        let targets = self.targets.clone();
        let policies = self.policies.clone();
        let judged = self.judged.clone();
        let files = self.files.clone();
        let proxy = self.proxy.clone();
        let readiness = self.readiness.clone();
        let keep_applied = {
            let copy = config.copy.clone();
            let readiness = readiness.clone();
            let is_last_good = self.is_last_good.clone();
            move |text: Option<&str>, waiting: &BTreeSet<String>| {
                readiness.set_degraded(RESTART_CONDITION, waits(waiting));
                let Some(text) = text else { return };
                if is_last_good.swap(false, Relaxed) {
                    readiness.set_degraded(CONFIG_CONDITION, Ok(()));
                }
                copy.iter().for_each(|copy| keep(copy, text));
            }
        };
        let apply = move |settings: Arc<Settings>, plan: ConfigPlan| {
            let mut startup = StartupErrorCollector::default();
            let mut change = RightsChange::default();
            change.replace(&targets, settings.allow.targets.clone());
            let mut policies = policies.lock();
            policies.change(&settings.access(), &mut change, &mut startup);
            policies.watch(&files);
            change.apply();
            judged.rights_changed();
            log_changed(&plan.judges, RIGHTS_CHANGED);
            let policy = policies.of(PROXY_KEY);
            let proxy = proxy.clone();
            let readiness = readiness.clone();
            let apply = async move {
                follow_proxy(&proxy, settings.http_proxy.as_ref(), policy, &mut startup).await;
                startup.into_errors().report(&readiness)
            };
            apply.boxed()
        };
        let _ =
            config.follow((Settings::examine, Settings::plan), &self.files, &self.links, apply, keep_applied);
    }

    /// Collects all errors that would prevent a start, without starting anything.
    pub fn validate(settings: &Settings, startup: &mut StartupErrorCollector) {
        // The errors are in `startup`.
        let _ = prepare(settings, startup);
        if startup.is_check {
            for (key, file) in settings.certificates() {
                startup.check_dates(&key, &file);
            }
        }
    }

    /// Creates the core, before any task is started.
    fn new(
        Settings { uplink, session, allow, is_last_good, .. }: &Settings,
        ports: &admin::AdminListeners,
        proxy: Option<SocketAddr>,
        pool: BufferPool,
    ) -> Self {
        let metrics = Metrics::edge();
        let memory = memory(session.memory_limit);
        let shared = shared(memory);
        let limits = SessionLimits {
            windows: WINDOWS,
            memory: session.buffer_memory.unwrap_or(MEMORY.min(shared / 5)),
            // The kernel keeps more than as much again for a target that does not read.
            sessions: MAX_SESSIONS.min(shared / 5 / (2 * SESSION_MEMORY)),
            resume_timeout: session.resume_timeout,
            max_resume_timeout: session.max_resume_timeout,
        };
        let table = SessionTable::new(Instance::random(), limits, metrics.clone());
        let uplinks = Uplinks::new(uplink.node.clone());
        let links = Drain::new();
        let sessions = Drain::new();
        let judged = JudgedSessions::default();
        let paths = uplinks.clone();
        let route = SessionRouter::new(paths, table.clone(), OPEN_TIMEOUT, session.resume_timeout);
        let context = ListenerContext {
            listener: PROXY,
            category: SessionCategory::HttpProxy,
            policy: Arc::default(),
            judged: judged.clone(),
            sessions: admission::sessions(MAX_SESSIONS, MAX_SESSIONS.div_ceil(PROXY_CLIENTS)),
            pending: PendingLimits::new(memory, true),
            pool,
            route: route.clone(),
            zone: Arc::default(),
            addresses: Arc::default(),
            direct: None,
            uplink: None,
            metrics: metrics.clone(),
            drain: sessions.clone(),
            stopping: sessions.clone(),
        };
        Self {
            bound: EdgeListenAddresses {
                log: ports.log.as_ref().map(TcpListenSocket::at),
                metrics: ports.metrics.as_ref().map(TcpListenSocket::at),
                channelz: ports.channelz.as_ref().map(TcpListenSocket::at),
                proxy,
            },
            route,
            metrics,
            table,
            targets: Arc::new(ArcSwap::from_pointee(allow.targets.clone())),
            policies: Arc::default(),
            proxy: Arc::new(Mutex::new(EdgeProxy { node: uplink.node.clone(), context, open: None })),
            judged,
            readiness: Readiness::waiting_for(&[LINK_CONDITION]),
            is_last_good: Arc::new(AtomicBool::new(*is_last_good)),
            files: FileWatcher::new(&links),
            uplinks,
            sessions,
            links,
            admin: Drain::new(),
            deadline: session.drain_timeout,
        }
    }

    /// Creates the reconnector, which keeps a link to a server and serves incoming sessions.
    fn reconnector(&self, settings: Settings, files: LoadedEdgeFiles, pool: BufferPool) -> Arc<Reconnector> {
        let Settings { uplink, session, own, csr, .. } = settings;
        let LoadedEdgeFiles { tls, servers, targets: target_tls, tokens, proxy, resolver } = files;
        target_tls.watch(&self.files);
        let memory = memory(session.memory_limit);
        let dialer = TargetDialer {
            role: TargetDialerRole::Node(uplink.node.clone()),
            own: LocalAddresses::of_interfaces(own),
            targets: self.targets.clone(),
            resolver: resolver.clone(),
            sockets: (memory < SMALL_MEMORY)
                .then(|| SocketMemory { bytes: shared(memory) / 5, sessions: self.sessions.clone() }),
        };
        let link_context = LinkContext {
            congestion: uplink.congestion.as_deref().map(Arc::from),
            ..LinkContext::new(self.table.clone(), self.metrics.clone(), self.links.clone())
        };
        let judged = self.judged.clone();
        let metrics = self.metrics.clone();
        let sessions = self.sessions.clone();
        let acceptor =
            SessionAcceptor::new(dialer, Some(target_tls), pool.clone(), judged, metrics, sessions);
        let cloud = LinkDialer {
            node: uplink.node,
            is_last_good: self.is_last_good.clone(),
            user: None,
            servers,
            tokens,
            turn: AtomicUsize::new(0),
            tls,
            ca: Some(uplink.ca.to_path_buf()),
            own: csr.map(|csr| EdgeCertificate::new(csr.file.0, uplink.ca.0)),
            proxy,
            known: CachingResolver::new(resolver, session.resume_timeout, self.links.clone()),
            pool,
            link_context,
        };
        let readiness = self.readiness.clone();
        Reconnector::new(cloud, Some(acceptor), self.sessions.clone(), readiness, self.uplinks.clone())
    }

    /// Starts the tasks that watch files and do periodic cleanup.
    fn spawn_upkeep(&self, reconnector: &Reconnector, pool: BufferPool) {
        let links = &self.links;
        let dialer = &reconnector.dialer;
        self.files.watch("tokens", &dialer.tokens);
        self.files.watch("tls", &dialer.tls);
        links.spawn(info_span!("refusals"), self.metrics.refusals.clone().sum_up(links.clone().started()));
        links.spawn(info_span!("upkeep"), self.table.clone().upkeep(pool, links.clone()));
        let judged = self.judged.clone();
        links.spawn(info_span!("judged"), judged.follow(self.files.clone(), |_, _| (), links.clone()));
        links.spawn(info_span!("resume_parked"), self.route.clone().resume_parked(links.clone()));
        let reports = report_parked(self.table.clone(), self.uplinks.clone(), links.clone());
        links.spawn(info_span!("report_parked"), reports);
    }

    /// Shuts the edge down: reports not ready, accepts no new sessions, and waits for running sessions until the drain
    /// timeout or until `at_once` completes.
    pub async fn shutdown(self, at_once: impl Future<Output = ()>) -> Drained {
        self.readiness.set(DRAINING_CONDITION, Err("stopping".into()));
        info!(sessions = self.table.len(), timeout = ?self.deadline, "draining");
        let at_once = at_once.shared();
        let until = Instant::now() + self.deadline;
        let why = SessionError::new(ErrorCode::Overloaded, "the edge is stopping");
        let ending = self.table.end_all(&why);
        let drained = self.sessions.finish_after(self.deadline, at_once.clone(), ending).await;
        if let Drained::Aborted(left) = drained {
            warn!(sessions_remaining = left, "drain timeout, aborting sessions");
        }
        // The last bytes of targets may still be in flight.
        tokio::select! {
            () = self.table.wait_delivered() => {}
            () = sleep_until(until) => {}
            () = at_once.clone() => {}
        }
        self.links.start();
        self.table.end_all(&why).await;
        self.uplinks.all().iter().for_each(|link| link.close());
        let soon = at_once.then(|()| sleep(AT_ONCE)).shared();
        self.links.finish(CLOSE_TIMEOUT, soon.clone()).await;
        self.admin.finish(CLOSE_TIMEOUT, soon).await;
        drained
    }
}

/// Lets the server judge the sessions of users without a path, until draining starts.
async fn report_parked(table: Arc<SessionTable>, uplinks: Arc<Uplinks>, drain: Drain) {
    while drain.run_until(sleep(PARKED_REPORT)).await.is_some() {
        uplinks.newest(None).inspect(|link| table.report_parked(link));
    }
}

/// Interval of these reports.
const PARKED_REPORT: Duration = Duration::from_secs(10);

impl EdgeProxy {
    /// Serves clients, by this policy.
    fn serve(
        &mut self,
        config: &EdgeProxyConfig,
        listener: TcpListenSocket,
        policy: Arc<ArcSwap<AccessPolicy>>,
    ) {
        info!(local_addr = %listener.at(), "HTTP proxy started");
        let drain = self.context.drain.child();
        let accepting = TaskTracker::new();
        let uplink = DestinationMapping::Edge { node: self.node.clone(), nodes: config.nodes.clone() };
        let context =
            ListenerContext { policy, drain: drain.clone(), uplink: Some(uplink), ..self.context.clone() };
        let proxies = config.access.proxy_protocol.clone();
        let serving = client_handler::run(HttpProxyProtocol, listener, proxies, context);
        drain.spawn(info_span!("clients", listener = PROXY), accepting.track_future(serving));
        self.open = Some(OpenProxy { config: config.clone(), drain, accepting });
    }
}

/// Opens and closes the proxy as the config says. A changed port closes first, because the new one may overlap it, and
/// opens again if the new one cannot be bound, which is noted. Not cancel safe.
async fn follow_proxy(
    proxy: &Mutex<EdgeProxy>,
    wanted: Option<&EdgeProxyConfig>,
    policy: Arc<ArcSwap<AccessPolicy>>,
    startup: &mut StartupErrorCollector,
) {
    let of_port = EdgeProxyConfig::of_port;
    let is_kept = |open: &OpenProxy| wanted.map(of_port) == Some(of_port(&open.config));
    let closed = proxy.lock().open.take_if(|open| !is_kept(open));
    if let Some(OpenProxy { drain, accepting, .. }) = &closed {
        drain.start();
        accepting.close();
        accepting.wait().await;
        info!("HTTP proxy closed");
    }
    let mut proxy = proxy.lock();
    let Some(wanted) = wanted.filter(|_| proxy.open.is_none()) else { return };
    if let Ok(listener) = wanted.bind(startup) {
        return proxy.serve(wanted, listener, policy);
    }
    if let Some(OpenProxy { config, .. }) = closed
        && let Ok(listener) = config.bind(&mut StartupErrorCollector::default())
    {
        proxy.serve(&config, listener, policy);
    }
}

/// Keeps a config that was applied. Blocks on the disk, once for each content.
fn keep(copy: &Path, text: &str) {
    if files::read_text(copy).is_ok_and(|kept| kept == text) {
        return;
    }
    if let Err(cause) = files::replace(copy, 0o600, text.as_bytes(), |_| Ok(())) {
        let hint =
            "with a bad config file this edge would not start; make the directory writable for this user";
        warn!(file = %copy.display(), error = %cause, hint, "cannot keep a copy of the config");
    }
}

/// Returns the part of a process's memory that sessions share.
fn shared(memory: usize) -> usize {
    memory.saturating_sub(BASE_MEMORY).max(memory / 2)
}

/// Condition: the edge runs with its config file, not with the last good copy of it. Set only if it has started with
/// that.
const CONFIG_CONDITION: &str = "config";
/// Timeout for opening a session from this edge.
const OPEN_TIMEOUT: Duration = Duration::from_secs(12);
/// Receive windows of an edge's sessions. They start large, because targets on loopback or in the same network read
/// fast. The maximum, like a server's, allows 100 Mbit/s at 300 ms.
const WINDOWS: WindowLimits = WindowLimits { start: 32 * 1024, max: 4 << 20 };
/// Memory that sessions do not share: of an idle edge, of buffers that are kept for later, and of fragments.
const BASE_MEMORY: usize = 14 << 20;
/// An edge with less memory bounds the kernel's buffers of its targets. It slows targets that are far away.
const SMALL_MEMORY: usize = 256 << 20;
/// Maximum number of concurrent sessions. Each costs a few KiB, and servers have their own limit.
const MAX_SESSIONS: usize = 20_000;

/// Number of clients of the proxy that together may use all sessions.
const PROXY_CLIENTS: usize = 4;
/// Time for links to send their last frames after a second signal.
const AT_ONCE: Duration = Duration::from_secs(1);
/// Time for connections to end on their own at the end of the shutdown.
const CLOSE_TIMEOUT: Duration = Duration::from_secs(3);
