//! Builds, runs and stops a pod.

pub mod authenticated_links;
pub mod config_files;
pub mod connect;
pub mod egress;
pub mod http_proxy;
pub mod https;
pub mod intercept;
pub mod kubernetes;
pub mod link_events;
pub mod links;
pub mod peers;
pub mod registry;
pub mod tcp;

use std::collections::BTreeSet;
use std::future::Future;
use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;
use std::time::Duration;

use arc_swap::ArcSwap;
use futures_util::FutureExt as _;
use tokio::net::TcpStream;
use tokio::sync::{Semaphore, mpsc, oneshot, watch};
use tokio::time::{Instant, sleep, sleep_until, timeout};
use tokio_util::sync::CancellationToken;
use tracing::{info, info_span, warn};

use crate::acceptor::{DialerRole, DirectDialer, SessionAcceptor, TargetDialer};
use crate::admin::page::{AdminUsers, EventStreamLimiter};
use crate::admin::readiness::Readiness;
use crate::admin::status::{Clock, ServerView};
use crate::admin::{Admin, Listeners, ProcessView};
use crate::config::ListenConfig;
use crate::config::live::ConfigFile;
use crate::config::server::{MEMORY, ServerConfig};
use crate::invitations::Enrolment;
use crate::listener::admission::{self, ClientKey, ListenerContext, ListenerProtocol, serve};
use crate::listener::auth::AccessPolicy;
use crate::listener::connect::{ConnectVariant, Ssh};
use crate::registry::peers::Peers;
use crate::registry::{Finder, Registry};
use crate::route::SessionRouter;
use crate::server::authenticated_links::AuthenticatedLinks;
use crate::server::config_files::{LivePolicies, ServerFiles};
use crate::server::intercept::PreparedIntercept;
use crate::server::kubernetes::ServerPods;
use crate::server::peers::{FinderDeps, FinderParts};
use crate::startup::access::{AccessPolicies, ListenerAccess, ListenerPolicies};
use crate::startup::{Startup, StartupErrors};
use tunnel_base::addresses::AddressBook;
use tunnel_base::drain::{Drain, Drained};
use tunnel_base::logging::LogLevel;
use tunnel_base::metrics::Metrics;
use tunnel_base::names::Instance;
use tunnel_base::policy::ports::ProxyPorts;
use tunnel_base::policy::zone::Zone;
use tunnel_base::process::third_of_memory;
use tunnel_link::grpc::LinkContext;
use tunnel_link::link::Link;
use tunnel_link::table::{SessionLimits, SessionTable};
use tunnel_net::interfaces::LocalAddresses;
use tunnel_net::limiter::FairLimiter;
use tunnel_net::listen::{Accept, TcpAccept, UnixAccept};
use tunnel_net::pool::Pool;
use tunnel_net::resolver::Resolver;
use tunnel_proto::frame::{ErrorCode, SessionError};
use tunnel_proto::halves::WindowLimits;

/// Where a pod listens.
#[derive(Debug, Clone)]
pub struct ServerAddresses {
    /// Address of the port that edges dial.
    pub grpc: SocketAddr,
    /// Names and addresses of all front ends on TCP ports, in the order in which their modules are read.
    pub clients: Vec<(&'static str, SocketAddr)>,
    /// Address of the port for health, log level and metrics.
    pub log: SocketAddr,
    /// Address of the port for metrics alone.
    pub metrics: Option<SocketAddr>,
    /// Address of gRPC's debugging port.
    pub channelz: Option<SocketAddr>,
}

/// A running pod: its addresses, and how to stop it.
#[derive(Debug)]
pub struct Server {
    /// Where it listens.
    pub bound: ServerAddresses,
    /// Its metrics.
    pub metrics: Metrics,
    /// The nodes that are linked here.
    pub registry: Arc<Registry>,
    /// The sessions.
    pub table: Arc<SessionTable>,
    /// Who joins by invitation; `None`: nobody.
    pub enrolment: Option<Arc<Enrolment>>,
    finder: Arc<Finder>,
    readiness: Readiness,
    stopping: Shutdown,
    policies: LivePolicies,
    doors: ListenerPolicies,
}

/// What the settings name, had before anything runs.
struct PreparedListeners {
    files: ServerFiles,
    ports: BaseListeners,
    gates: AccessPolicies,
    client_ports: Vec<ClientListener>,
    interception: Option<PreparedIntercept>,
    viewers: AdminUsers,
}

/// From the settings of a module to its ports; `None`: something is wrong, and noted.
type PrepareListener = fn(&ServerConfig, &mut AccessPolicies, &mut Startup) -> Option<Vec<ClientListener>>;

/// The name of the front end for CONNECT.
const CONNECT: &str = <Ssh as ConnectVariant>::NAME;

/// The modules that clients come to, a line for each.
const MODULES: [PrepareListener; 6] = [
    connect::prepare,
    egress::prepare,
    http_proxy::prepare,
    tcp::prepare,
    https::prepare,
    https::prepare_http,
];

impl Server {
    /// Reads the files that the settings name, binds every port, then serves.
    ///
    /// # Errors
    ///
    /// Every file that cannot be used, and every configured port that cannot be bound. Nothing runs then.
    pub fn start(settings: ServerConfig, level: Option<LogLevel>) -> Result<Self, StartupErrors> {
        let mut startup = Startup::default();
        let prepared = PreparedListeners::new(&settings, &mut startup);
        let PreparedListeners { files, ports, gates, client_ports, interception, viewers } =
            startup.finish(prepared)?;
        let port = ports.grpc.at().port();
        interception.iter().for_each(PreparedIntercept::mark_sockets);
        let mut core = ServerCore::new(&settings, &files, port, ports.local_addresses(&client_ports));
        let bound = ServerAddresses {
            grpc: ports.grpc.at(),
            clients: client_ports.iter().filter_map(|port| Some((port.name, port.at?))).collect(),
            log: ports.log.as_ref().map_or(settings.server.log_listen.at, TcpAccept::at),
            metrics: ports.metrics.as_ref().map(TcpAccept::at),
            channelz: ports.channelz.as_ref().map(TcpAccept::at),
        };
        let doors = gates.watch(&core.shutdown.links);
        for port in client_ports {
            (port.spawn)(&core);
        }
        core.shutdown.intercept_stopped =
            interception.map(|interception| interception.spawn(&core, &settings));
        registry::spawn_publisher(&settings, files.dns, &core, port);
        let server = Self {
            bound,
            metrics: core.context.link_context.metrics.clone(),
            registry: core.context.registry.clone(),
            table: core.context.link_context.table.clone(),
            enrolment: core.context.enrolment.clone(),
            finder: core.context.finder.clone(),
            readiness: core.readiness,
            stopping: core.shutdown,
            policies: core.context.policies.clone(),
            doors,
        };
        let view = ServerView {
            registry: server.registry.clone(),
            table: server.table.clone(),
            peers: core.context.peers.clone(),
            publishes: settings.registry.publish.name(),
            enrolment: core.context.enrolment.clone(),
            port,
        };
        let admin = server.admin(view, viewers, level, !settings.server.log_listen.is_local());
        let listeners = Listeners {
            log: ports.log,
            metrics: ports.metrics,
            local: ports.admin,
            channelz: ports.channelz,
            grpc: Some(server.bound.grpc),
        };
        admin.spawn(listeners, &server.stopping.admin);
        admin.follow_certificates(settings.certificates(), settings.ca_files(), &server.stopping.admin);
        registry::spawn_balance(&core.context, &settings);
        let proxies = settings.server.proxy_protocol;
        links::spawn(ports.grpc, proxies, files.tls, core.dialled_links, core.context);
        let ServerAddresses { grpc, log, .. } = &server.bound;
        info!(%grpc, ssh = server.bound.connect().map(tracing::field::display), %log, "pod is up");
        Ok(server)
    }

    /// Reads the config again when it changes: who may reach what counts for whoever comes next.
    pub fn watch_config(&self, config: ConfigFile) {
        let (policies, doors) = (self.policies.clone(), self.doors.clone());
        let apply = move |settings: &ServerConfig| policies.apply(settings, &doors);
        config.follow(ServerConfig::examine, &self.stopping.links, apply);
    }

    /// Finds all faults that would prevent a start, and starts nothing.
    pub fn validate(settings: &ServerConfig, startup: &mut Startup) {
        PreparedListeners::new(settings, startup);
    }

    fn admin(
        &self,
        view: ServerView,
        viewers: AdminUsers,
        level: Option<LogLevel>,
        level_from_anywhere: bool,
    ) -> Admin {
        Admin {
            side: ProcessView::Cloud(view),
            clock: Clock::now(),
            viewers,
            streams: EventStreamLimiter::default(),
            metrics: self.metrics.clone(),
            readiness: self.readiness.clone(),
            level,
            level_from_anywhere,
        }
    }
}

impl ServerAddresses {
    /// Address of the CONNECT front end; `None` if the default port could not be had.
    pub fn connect(&self) -> Option<SocketAddr> {
        self.clients.iter().find(|(name, _)| *name == CONNECT).map(|(_, at)| *at)
    }
}

impl PreparedListeners {
    /// `None`: there are faults, which `startup` has noted.
    fn new(settings: &ServerConfig, startup: &mut Startup) -> Option<Self> {
        let files = ServerFiles::read(settings, startup);
        let ports = BaseListeners::bind(settings, startup);
        let mut gates = AccessPolicies::default();
        let viewers = gates.viewers(&settings.admin, startup);
        let prepared = MODULES.map(|prepare| prepare(settings, &mut gates, startup));
        let intercepted = intercept::prepare(settings, &mut gates, startup);
        let client_ports = prepared.into_iter().collect::<Option<Vec<_>>>();
        let (more, interception) = intercepted?;
        let client_ports = client_ports?.into_iter().flatten().chain(more).collect();
        Some(Self { files: files?, ports: ports?, gates, client_ports, interception, viewers: viewers? })
    }
}

// What the tasks of a pod share.

/// What the tasks of a pod share. Cheap to clone.
#[derive(Debug, Clone)]
pub(crate) struct ServerContext {
    pub(crate) proven: Arc<AuthenticatedLinks>,
    /// Who joins by invitation; `None`: nobody.
    pub(crate) enrolment: Option<Arc<Enrolment>>,
    pub(crate) registry: Arc<Registry>,
    pub(crate) finder: Arc<Finder>,
    /// The other pods; `None` if this pod is alone.
    pub(crate) peers: Option<Arc<Peers>>,
    pub(crate) route: SessionRouter,
    pub(crate) link_context: LinkContext,
    pub(crate) pool: Pool,
    /// Cancelled when the pod begins to stop: no call is accepted then.
    pub(crate) stopping: CancellationToken,
    /// Dials targets of the cloud for edges.
    pub(crate) backend: SessionAcceptor,
    /// Whose an address is.
    pub(crate) addresses: Arc<AddressBook>,
    /// Ports of nodes that are led here, and which of them are those of their loopback.
    pub(crate) ports: watch::Receiver<ProxyPorts>,
    /// Dials for clients what is at no node.
    pub(crate) direct: DirectDialer,
    /// Who may reach what through this pod.
    pub(crate) policies: LivePolicies,
    /// Permits for searches that run at once for all edges.
    pub(crate) search_permits: Arc<Semaphore>,
    /// Permits for pinging older links of nodes that have linked anew.
    pub(crate) move_permits: Arc<Semaphore>,
}

// The core of a pod: its sessions, the nodes linked to it, and how it finds other pods.

/// The core, to which `cloud.rs` joins ports, front ends and the publisher.
#[derive(Debug)]
pub(crate) struct ServerCore {
    /// Shared by the tasks.
    pub(crate) context: ServerContext,
    /// The door to the sessions of all front ends.
    pub(crate) session_limiter: FairLimiter<ClientKey>,
    /// The names of nodes outside of this pod.
    pub(crate) zone: Arc<Zone>,
    /// Asks the system's DNS servers.
    pub(crate) resolver: Resolver,
    /// Shown as `/readyz`.
    pub(crate) readiness: Readiness,
    /// Its tasks, in the order in which they are stopped.
    pub(crate) shutdown: Shutdown,
    /// The pods as Kubernetes reports them.
    #[cfg_attr(not(feature = "kubernetes"), expect(dead_code, reason = "it says nothing then"))]
    pub(crate) servers: ServerPods,
    /// Addresses that no pod has, although names of nodes lead there in DNS.
    pub(crate) service_addresses: watch::Receiver<BTreeSet<IpAddr>>,
    /// Links that this pod has dialled to other pods; `None` if it is alone.
    pub(crate) dialled_links: Option<mpsc::Receiver<Link>>,
}

impl ServerCore {
    /// Builds the core and spawns its tasks. `port` is the gRPC port, `own` the addresses at which this pod listens.
    pub(crate) fn new(settings: &ServerConfig, files: &ServerFiles, port: u16, own: Vec<SocketAddr>) -> Self {
        let metrics = Metrics::server(&settings.pod_namespace, &settings.pod_name);
        let mut stopping = new_shutdown(settings);
        let (links, readiness) = (stopping.links.clone(), Readiness::waiting_for(&[]));
        let link_context = link_context(settings, &metrics, &links);
        let (table, enrolment) =
            (link_context.table.clone(), registry::start(settings, files, &readiness, &links));
        let nodes = (kubernetes::follow_nodes(settings, &links), kubernetes::edge_cas(settings).is_some());
        let proven =
            AuthenticatedLinks::start(files.tokens.clone(), enrolment.clone(), nodes, table.clone(), &links);
        let (registry, pool) = (Registry::new(metrics.clone()), Pool::new());
        let zone = zone(settings, proven.clone());
        let servers = kubernetes::follow(settings.registry.cluster.as_ref(), settings.pod_ip, port, &links);
        let no_servers = kubernetes::run_node_names(settings, &readiness, &links);
        let joined = FinderDeps {
            link_context: &link_context,
            pool: &pool,
            zone: &zone,
            tls: files.peers.clone(),
            resolver: &files.resolver,
            dns: &files.dns,
            no_servers: &no_servers,
            registry: registry.clone(),
            port,
        };
        let cluster = servers.peers.clone();
        let FinderParts { finder, several } = peers::finder(&settings.registry.peers, joined, cluster);
        stopping.has_peers = several.is_some();
        let (peers, made) = several.map(|several| (several.peers, several.made)).unzip();
        if let Some(peers) = &peers {
            peers::report(peers.clone(), readiness.clone(), &links);
        }
        let policies = LivePolicies::new(settings);
        let ports = kubernetes::watch_ports(settings, &own, &readiness, &links);
        let dialer = dialer(settings, &policies, files, own);
        let session = &settings.session;
        let context = ServerContext {
            proven,
            enrolment,
            registry,
            route: SessionRouter::new(finder.clone(), table, session.open_timeout, session.grace),
            finder,
            peers,
            ports,
            addresses: kubernetes::watch_addresses(&settings.addresses, &readiness, &links),
            direct: DirectDialer::new(client_dialer(&dialer, &policies), session.open_timeout),
            backend: SessionAcceptor::new(dialer, pool.clone(), metrics, stopping.clients.clone()),
            link_context,
            pool,
            stopping: stopping.started.clone(),
            policies,
            search_permits: Arc::new(Semaphore::new(link_events::MAX_SEARCHES)),
            move_permits: Arc::new(Semaphore::new(link_events::MAX_CONCURRENT_MOVES)),
        };
        let client_sessions = admission::sessions(session.max, session.max_for_client);
        let resolver = files.resolver.clone();
        let core = Self {
            context,
            session_limiter: client_sessions,
            zone,
            resolver,
            readiness,
            shutdown: stopping,
            servers,
            service_addresses: no_servers,
            dialled_links: made,
        };
        core.spawn_upkeep(files);
        core
    }

    /// The context of a front end with this gate.
    pub(crate) fn front_context(&self, gate: Arc<ArcSwap<AccessPolicy>>) -> ListenerContext {
        let ServerContext { pool, route, link_context, addresses, direct, .. } = &self.context;
        ListenerContext {
            gate,
            sessions: self.session_limiter.clone(),
            pool: pool.clone(),
            route: route.clone(),
            addresses: addresses.clone(),
            direct: Some(direct.clone()),
            edge_routing: None,
            metrics: link_context.metrics.clone(),
            drain: self.shutdown.clients.clone(),
        }
    }

    /// Spawns the tasks that follow files and remove what has expired.
    fn spawn_upkeep(&self, files: &ServerFiles) {
        let (drain, LinkContext { table, metrics, .. }) = (&self.shutdown.links, &self.context.link_context);
        drain.spawn(info_span!("dns"), self.resolver.clone().watch(drain.clone()));
        drain.spawn(info_span!("tls"), files.tls.clone().watch(drain.clone()));
        drain.spawn(info_span!("refusals"), metrics.refusals.clone().sum_up(drain.clone().started()));
        let give_back = || _ = tunnel_pages::trim_heap();
        let upkeep = table.clone().upkeep(self.context.pool.clone(), drain.clone(), give_back);
        drain.spawn(info_span!("upkeep"), upkeep);
        drain.spawn(info_span!("given up"), self.context.route.clone().resume_cancelled(drain.clone()));
    }
}

fn new_shutdown(settings: &ServerConfig) -> Shutdown {
    Shutdown {
        started: CancellationToken::new(),
        has_peers: false,
        intercept_stopped: None,
        clients: Drain::new(),
        publisher: Drain::new(),
        links: Drain::new(),
        admin: Drain::new(),
        deadline: settings.session.drain,
    }
}

fn link_context(settings: &ServerConfig, metrics: &Metrics, links: &Drain) -> LinkContext {
    LinkContext {
        table: SessionTable::new(Instance::random(), limits(settings), metrics.clone()),
        metrics: metrics.clone(),
        drain: links.clone(),
        congestion: settings.server.congestion.clone(),
    }
}

fn limits(settings: &ServerConfig) -> SessionLimits {
    SessionLimits {
        windows: WINDOWS,
        memory: settings.session.memory.unwrap_or_else(|| third_of_memory(MEMORY)),
        sessions: settings.session.max,
        grace: settings.session.grace,
    }
}

fn zone(settings: &ServerConfig, proven: Arc<AuthenticatedLinks>) -> Arc<Zone> {
    let patterns = settings.registry.publish_names.clone();
    Arc::new(Zone::new(settings.registry.zone.clone(), patterns, move |node: &_| proven.has_node(node)))
}

/// Dials for edges; never one of the addresses in `listening`.
fn dialer(
    settings: &ServerConfig,
    policies: &LivePolicies,
    files: &ServerFiles,
    listening: Vec<SocketAddr>,
) -> TargetDialer {
    TargetDialer {
        place: DialerRole::ForEdges,
        own: LocalAddresses::of_interfaces(settings.pod_ip.into_iter().collect()),
        targets: policies.for_edges.clone(),
        listening: listening.into_iter().collect(),
        resolver: files.resolver.clone(),
    }
}

/// The same, dialling for clients.
fn client_dialer(dialer: &TargetDialer, policies: &LivePolicies) -> TargetDialer {
    TargetDialer { place: DialerRole::ForClients, targets: policies.for_clients.clone(), ..dialer.clone() }
}

/// Receive windows of a pod's sessions in bytes.
const WINDOWS: WindowLimits = WindowLimits { start: 64 * 1024, max: 4 << 20 };

// The ports of a pod, bound before anything runs.

/// The ports for edges and operators.
#[derive(Debug)]
pub(crate) struct BaseListeners {
    /// gRPC, for edges and other pods.
    pub(crate) grpc: TcpAccept,
    /// Health, log level, metrics; `None` if the default port could not be had.
    pub(crate) log: Option<TcpAccept>,
    /// Metrics alone.
    pub(crate) metrics: Option<TcpAccept>,
    /// For gRPC's debugging clients.
    pub(crate) channelz: Option<TcpAccept>,
    /// For commands of this machine.
    pub(crate) admin: Option<UnixAccept>,
}

/// A port for clients, with what its front end needs of settings and files.
pub(crate) struct ClientListener {
    /// Its front end's name.
    pub(crate) name: &'static str,
    /// Its address; `None` for a unix socket.
    pub(crate) at: Option<SocketAddr>,
    /// Spawns its front end.
    pub(crate) spawn: Box<dyn FnOnce(&ServerCore) + Send>,
}

impl ClientListener {
    /// A TCP port behind which `front_end` serves.
    pub(crate) fn tcp<F>(
        listener: TcpAccept,
        guard: ListenerAccess,
        front_end: impl FnOnce(&ServerCore) -> F + Send + 'static,
    ) -> Self
    where
        F: ListenerProtocol<TcpStream>,
    {
        let at = listener.at();
        Self { at: Some(at), ..Self::new(listener, guard, front_end) }
    }

    /// A port of any kind behind which `front_end` serves.
    pub(crate) fn new<L, F>(
        listener: L,
        guard: ListenerAccess,
        front_end: impl FnOnce(&ServerCore) -> F + Send + 'static,
    ) -> Self
    where
        L: Accept + 'static,
        F: ListenerProtocol<L::AnyStream>,
    {
        let spawn = move |core: &ServerCore| {
            info!(module = F::NAME, at = %listener.at(), "clients may come in");
            let (proxies, front_end) = (guard.proxies(), front_end(core));
            let serving =
                serve(front_end, listener, proxies, core.front_context(guard.gate(Some(core.zone.clone()))));
            core.shutdown.clients.spawn(info_span!("clients", module = F::NAME), serving);
        };
        Self { name: F::NAME, at: None, spawn: Box::new(spawn) }
    }
}

impl BaseListeners {
    /// Binds all of them; `None`: one cannot be had, which `startup` has noted.
    pub(crate) fn bind(settings: &ServerConfig, startup: &mut Startup) -> Option<Self> {
        let server = &settings.server;
        let mut bind = |ListenConfig { at, key, .. }| startup.bind(&format!("{TABLE}.{key}"), at);
        let grpc = bind(server.listen);
        let metrics = server.metrics_listen.map(&mut bind);
        let log = startup.bind_optional_private(TABLE, server.log_listen);
        // Outer: whether it is asked for; inner: whether it could be had.
        let metrics = match metrics {
            None => None,
            Some(bound) => Some(bound?),
        };
        let channelz =
            match server.channelz.map(|at| startup.bind_private(&format!("{TABLE}.channelz_addr"), at)) {
                None => None,
                Some(bound) => Some(bound?),
            };
        let admin = startup.bind_admin("mode.cloud.admin.listen", &settings.admin.socket);
        Some(Self { grpc: grpc?, log: log?, metrics, channelz, admin: admin? })
    }

    /// The addresses at which this pod listens, which edges must not reach through it. The read-only port for metrics
    /// is not among them.
    pub(crate) fn local_addresses(&self, front_ends: &[ClientListener]) -> Vec<SocketAddr> {
        let more = self.log.iter().chain(&self.channelz).map(TcpAccept::at);
        [self.grpc.at()].into_iter().chain(more).chain(front_ends.iter().filter_map(|end| end.at)).collect()
    }
}

const TABLE: &str = "mode.cloud.stream.server";

// Stops a pod without cutting what can go on elsewhere.

/// The tasks in the order in which they are stopped: clients first, links when no session needs them, admin ports last.
#[derive(Debug)]
pub(crate) struct Shutdown {
    /// Cancelled when the pod begins to stop: no call is accepted then.
    pub(crate) started: CancellationToken,
    /// Whether there are other pods, which take over.
    pub(crate) has_peers: bool,
    /// Says that nothing is caught any more; `None`: nothing ever was.
    pub(crate) intercept_stopped: Option<oneshot::Receiver<()>>,
    pub(crate) clients: Drain,
    pub(crate) publisher: Drain,
    pub(crate) links: Drain,
    pub(crate) admin: Drain,
    pub(crate) deadline: Duration,
}

impl Server {
    /// Stops the pod. It becomes unready and asks its edges to link elsewhere. If there are other pods it still takes
    /// clients for a moment, until balancers notice. Then it closes its listeners, and waits for sessions until the
    /// deadline or until `at_once` completes.
    pub async fn shutdown(self, at_once: impl Future<Output = ()>) -> Drained {
        let Shutdown {
            started,
            has_peers: several,
            intercept_stopped: intercepted,
            clients,
            publisher,
            links,
            admin,
            deadline,
        } = self.stopping;
        let (at_once, until) = (at_once.shared(), Instant::now() + deadline);
        self.readiness.set("running", Err("stopping".into()));
        info!(
            sessions = self.table.len(),
            ?deadline,
            "stopping: no new sessions, waiting for those that run"
        );
        started.cancel();
        // First, so that balancers stop sending clients here.
        publisher.start();
        self.registry.drain_all();
        if let Some(emptied) = intercepted {
            // Whoever asks for a node from now on goes there itself, not to a listener that is about to close.
            let _ = timeout(CLOSE_TIMEOUT.min(deadline), emptied).await;
        }
        if several {
            tokio::select! {
                () = sleep(LISTEN_GRACE.min(deadline / 4)) => {}
                () = at_once.clone() => {}
            }
        }
        let left = until.saturating_duration_since(Instant::now());
        let why = SessionError::new(ErrorCode::Overloaded, "the pod is stopping");
        let before_cut = async {
            self.table.reset_all(&why);
            sleep(FLUSH_TIMEOUT).await;
            self.table.wait_closed().await;
        };
        let drained = clients.finish_after(left, at_once.clone(), before_cut).await;
        if let Drained::Cut(left) = drained {
            warn!(left, "deadline over: sessions are cut");
        }
        let passing = async {
            // The last bytes of clients may still be under way; sessions of other pods with plain nodes end here.
            self.table.wait_delivered().await;
            while self.table.relayed().0 > 0 {
                sleep(POLL_INTERVAL).await;
            }
        };
        tokio::select! {
            () = passing => {}
            () = sleep_until(until) => warn!("deadline over: other pods' sessions must find another path"),
            () = at_once => {}
        }
        self.table.reset_all(&why);
        publisher.finish(CLOSE_TIMEOUT, std::future::pending()).await;
        links.start();
        sleep(FLUSH_TIMEOUT).await;
        self.table.wait_closed().await;
        self.registry.close_all();
        self.finder.close_links();
        links.finish(CLOSE_TIMEOUT, std::future::pending()).await;
        admin.finish(CLOSE_TIMEOUT, std::future::pending()).await;
        drained
    }
}

/// How long balancers may still send clients to a pod that is not ready.
const LISTEN_GRACE: Duration = Duration::from_secs(2);
/// Between two looks whether other pods' sessions have found another path.
const POLL_INTERVAL: Duration = Duration::from_millis(50);
/// Time for sessions to end after their reset, and for the last resets to leave before links are closed.
const FLUSH_TIMEOUT: Duration = Duration::from_millis(100);
/// Time for connections to end by themselves at the very end.
const CLOSE_TIMEOUT: Duration = Duration::from_secs(3);
