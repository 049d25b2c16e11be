//! Builds, runs and stops a server.

pub mod authenticated_links;
pub(crate) mod cluster;
pub mod config;
pub mod config_files;
pub mod invitations;
pub mod link_events;
pub mod link_rates;
pub mod links;
pub mod peers;
pub mod registry;

use std::collections::BTreeSet;
use std::future::Future;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use futures_util::FutureExt as _;
use futures_util::future::join_all;
use tokio::sync::{Semaphore, mpsc, oneshot, watch};
use tokio::time::{Instant, sleep, sleep_until, timeout};
use tokio_util::sync::CancellationToken;
use tracing::{info, info_span, warn};

use crate::acceptor::{DialerRole, DirectDialer, SessionAcceptor, TargetDialer};
use crate::admin::page::{AdminUsers, EventStreamLimiter};
use crate::admin::readiness::{DRAINING_CONDITION, Readiness};
use crate::admin::status::{Clock, ServerView};
use crate::admin::{Admin, Listeners, ProcessView};
use crate::config::live::ConfigFile;
use crate::config::server::MEMORY;
use crate::invitations::Enrolment;
use crate::listener::access::{AccessPolicyBuilder, ListenerPolicies};
use crate::listener::admission::heads::long_heads;
use crate::listener::admission::{self, ListenerContext};
use crate::listener::{BoundListener, ListenerDeps, ListenerSetup, connect};
use crate::parts::with_kubernetes;
use crate::registry::peers::Peers;
use crate::registry::{Finder, Registry};
use crate::route::SessionRouter;
use crate::server::authenticated_links::AuthenticatedLinks;
use crate::server::cluster::ClusterView;
use crate::server::config::ServerConfig;
use crate::server::config_files::{LivePolicies, ServerFiles};
use crate::server::link_rates::LinkRates;
use crate::server::peers::FinderDeps;
use crate::session_io::grants::Grants;
use crate::startup::{NotPrepared, Startup, StartupErrors};
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
use tunnel_net::listen::{TcpAccept, UnixAccept};
use tunnel_net::pool::Pool;
use tunnel_net::reload::FileWatcher;
use tunnel_net::resolver::Resolver;
use tunnel_proto::frame::{ErrorCode, SessionError};
use tunnel_proto::halves::WindowLimits;

/// The addresses at which a server listens.
#[derive(Debug, Clone)]
pub struct ServerAddresses {
    /// Address of the port that edges dial.
    pub grpc: SocketAddr,
    /// Names and addresses of all listeners on TCP ports, in the order in which their modules are read.
    pub clients: Vec<(&'static str, SocketAddr)>,
    /// Address of the port for health, log level and metrics.
    pub log: SocketAddr,
    /// Address of the port for metrics alone.
    pub metrics: Option<SocketAddr>,
    /// Address of gRPC's debugging port.
    pub channelz: Option<SocketAddr>,
}

/// A running server: its addresses, and how to stop it.
#[derive(Debug)]
pub struct Server {
    /// The addresses at which it listens.
    pub bound: ServerAddresses,
    /// Its metrics.
    pub metrics: Metrics,
    /// The nodes that are linked here.
    pub registry: Arc<Registry>,
    /// The table of sessions.
    pub table: Arc<SessionTable>,
    /// The nodes that join by invitation; `None` if that is not enabled.
    pub enrolment: Option<Arc<Enrolment>>,
    finder: Arc<Finder>,
    readiness: Readiness,
    files: FileWatcher,
    stopping: Shutdown,
    policies: LivePolicies,
    listener_policies: ListenerPolicies,
    grants: Grants,
}

/// The files and ports named by the config, prepared before anything runs.
struct PreparedListeners {
    files: ServerFiles,
    ports: BaseListeners,
    builder: AccessPolicyBuilder,
    client_ports: Vec<BoundListener>,
    viewers: AdminUsers,
}

impl Server {
    /// Reads the files named by the config, binds every port, then serves.
    ///
    /// # Errors
    ///
    /// Contains every file that cannot be used and every configured port that cannot be bound. Nothing runs then.
    pub fn start(settings: ServerConfig, level: Option<LogLevel>) -> Result<Self, StartupErrors> {
        let mut startup = Startup::default();
        let prepared = PreparedListeners::new(&settings, &mut startup);
        let PreparedListeners { files, ports, builder, client_ports, viewers } = startup.finish(prepared)?;
        let port = ports.grpc.at().port();
        let mut core = ServerCore::new(&settings, &files, port, &ports.local_addresses(&client_ports));
        let bound = ServerAddresses {
            grpc: ports.grpc.at(),
            clients: client_ports.iter().filter_map(|port| Some((port.name, port.at?))).collect(),
            log: ports.log.as_ref().map_or(settings.links.admin_listen, TcpAccept::at),
            metrics: ports.metrics.as_ref().map(TcpAccept::at),
            channelz: ports.channelz.as_ref().map(TcpAccept::at),
        };
        let listener_policies = builder.watch(&core.files);
        let deps = core.listener_deps(&settings);
        core.shutdown.redirects = client_ports.into_iter().filter_map(|port| (port.spawn)(&deps)).collect();
        registry::spawn_publisher(&settings, files.dns, &core, port);
        let server = Self {
            bound,
            metrics: core.context.link_context.metrics.clone(),
            registry: core.context.registry.clone(),
            table: core.context.link_context.table.clone(),
            enrolment: core.context.enrolment.clone(),
            finder: core.context.finder.clone(),
            readiness: core.readiness,
            files: core.files,
            stopping: core.shutdown,
            policies: core.context.policies.clone(),
            listener_policies,
            grants: core.context.grants.clone(),
        };
        let view = ServerView {
            registry: server.registry.clone(),
            table: server.table.clone(),
            peers: core.context.peers.clone(),
            publishes: settings.dns.publish.name(),
            enrolment: core.context.enrolment.clone(),
            port,
        };
        let admin_addr = ports.log.as_ref().map(|port| tracing::field::display(port.at()));
        let admin = server.admin(view, viewers, level, settings.links.admin_port.sets_level);
        let listeners = Listeners {
            log: ports.log,
            metrics: ports.metrics,
            local: ports.admin,
            channelz: ports.channelz,
            grpc: Some(server.bound.grpc),
        };
        let drain = &server.stopping.admin;
        admin.spawn(listeners, drain);
        admin.follow_files(settings.certificates(), settings.ca_files(), &server.files, drain);
        registry::spawn_balance(&core.context, &settings);
        let proxies = settings.links.proxy_protocol;
        links::spawn(ports.grpc, proxies, files.tls, core.dialled_links, core.context);
        let connect_addr = server.bound.connect().map(tracing::field::display);
        info!(links_addr = %server.bound.grpc, connect_addr, admin_addr, "server started");
        Ok(server)
    }

    /// Reloads the access rules when the config changes, and ends the sessions that they no longer allow.
    pub fn watch_config(&self, config: ConfigFile) {
        let (policies, listener_policies) = (self.policies.clone(), self.listener_policies.clone());
        let grants = self.grants.clone();
        let apply = move |settings: &ServerConfig| {
            policies.apply(settings, &listener_policies);
            grants.rights_changed();
        };
        config.follow(ServerConfig::examine, &self.files, &self.stopping.links, apply);
    }

    /// Waits until the cluster's signers have issued the certificates that the config requires. Cancel safe.
    pub async fn wait_for_certificates(settings: &ServerConfig) {
        if let Some(csr) = &settings.csr {
            with_kubernetes!(api::csr::wait_issued(csr).await, else ());
        }
    }

    /// Finds all errors that would prevent a start, and starts nothing. A check also finds certificates that clients
    /// would reject.
    pub fn validate(settings: &ServerConfig, startup: &mut Startup) {
        // The errors are in `startup`.
        let _ = PreparedListeners::new(settings, startup);
        if startup.is_check() {
            for (key, file) in settings.server_certificates() {
                startup.check_dates(&key, &file);
            }
        }
    }

    fn admin(
        &self,
        view: ServerView,
        viewers: AdminUsers,
        level: Option<LogLevel>,
        level_at_ports: bool,
    ) -> Admin {
        Admin {
            side: ProcessView::Cloud(view),
            clock: Clock::now(),
            viewers,
            streams: EventStreamLimiter::default(),
            metrics: self.metrics.clone(),
            readiness: self.readiness.clone(),
            level,
            level_at_ports,
        }
    }
}

impl ServerAddresses {
    /// Returns the address of the CONNECT listener; `None` if there is none.
    pub fn connect(&self) -> Option<SocketAddr> {
        self.clients.iter().find(|(name, _)| *name == connect::KIND.name).map(|(_, at)| *at)
    }
}

impl PreparedListeners {
    /// Prepares everything.
    fn new(settings: &ServerConfig, startup: &mut Startup) -> Result<Self, NotPrepared> {
        let files = ServerFiles::read(settings, startup);
        let ports = BaseListeners::bind(settings, startup);
        let mut builder = AccessPolicyBuilder::default();
        let viewers = builder.viewers("server.admin.users", &settings.admin, startup);
        let mut setup = ListenerSetup { policies: &mut builder, tls: &settings.tls, startup };
        // All of them, so that each error is noted.
        let bound: Vec<_> = settings.listeners.iter().map(|listener| listener.bind(&mut setup)).collect();
        let client_ports = bound.into_iter().collect::<Result<Vec<_>, _>>()?.into_iter().flatten().collect();
        Ok(Self { files: files?, ports: ports?, builder, client_ports, viewers: viewers? })
    }
}

// The state shared by the tasks of a server.

/// The state shared by the tasks of a server. Cheap to clone.
#[derive(Debug, Clone)]
pub(crate) struct ServerContext {
    pub(crate) proven: Arc<AuthenticatedLinks>,
    /// The nodes that join by invitation; `None` if that is not enabled.
    pub(crate) enrolment: Option<Arc<Enrolment>>,
    pub(crate) registry: Arc<Registry>,
    pub(crate) finder: Arc<Finder>,
    /// The peers; `None` if this server has none.
    pub(crate) peers: Option<Arc<Peers>>,
    pub(crate) route: SessionRouter,
    pub(crate) link_context: LinkContext,
    pub(crate) pool: Pool,
    /// Cancelled when the server begins to stop; no call is accepted from then on.
    pub(crate) stopping: CancellationToken,
    /// Dials targets of the cloud for edges.
    pub(crate) backend: SessionAcceptor,
    /// Maps addresses to nodes.
    pub(crate) addresses: Arc<AddressBook>,
    /// The ports of nodes that are redirected here, and which of them are ports of the node's loopback.
    pub(crate) ports: watch::Receiver<ProxyPorts>,
    /// Dials targets outside of nodes for clients.
    pub(crate) direct: DirectDialer,
    /// The access rules for what can be reached through this server.
    pub(crate) policies: LivePolicies,
    /// Grants of the sessions with an end here.
    pub(crate) grants: Grants,
    /// Permits for concurrent searches of all edges.
    pub(crate) search_permits: Arc<Semaphore>,
    /// How many links each node has opened recently.
    pub(crate) link_rates: LinkRates,
    /// Permits for pinging older links of nodes that have linked again.
    pub(crate) move_permits: Arc<Semaphore>,
}

// The core of a server: its sessions, the nodes linked to it, and how it finds peers.

/// The core, to which this module adds ports, listeners and the publisher.
#[derive(Debug)]
pub(crate) struct ServerCore {
    /// The state shared by the tasks.
    pub(crate) context: ServerContext,
    /// The names of nodes outside of this server.
    pub(crate) zone: Arc<Zone>,
    /// A client of the system's DNS servers.
    pub(crate) resolver: Resolver,
    /// Reported at `/readyz`.
    pub(crate) readiness: Readiness,
    /// Reloads files when they change.
    pub(crate) files: FileWatcher,
    /// Its tasks, in the order in which they are stopped.
    pub(crate) shutdown: Shutdown,
    /// What it knows of its Kubernetes cluster.
    pub(crate) cluster: ClusterView,
    /// Links that this server has dialled to peers; `None` if it has none.
    pub(crate) dialled_links: Option<mpsc::Receiver<Link>>,
}

impl ServerCore {
    /// Builds the core and spawns its tasks. `port` is the gRPC port, `own` the addresses at which this server listens.
    pub(crate) fn new(settings: &ServerConfig, files: &ServerFiles, port: u16, own: &[SocketAddr]) -> Self {
        let metrics = Metrics::server(&settings.pod_namespace, &settings.pod_name);
        let (mut stopping, readiness) = (new_shutdown(settings), Readiness::waiting_for(&[]));
        let (links, clients, session) = (stopping.links.clone(), stopping.clients.clone(), &settings.session);
        let link_context = link_context(settings, &metrics, &links);
        let (table, authority) = (link_context.table.clone(), files.authority.clone());
        let enrolment = invitations::start(settings, authority, &files.resolver, &readiness, &links);
        let cluster = ClusterView::follow(settings, port, own_ports(settings, own), &readiness, &links);
        let (registry, pool, grants) = (Registry::new(metrics.clone()), Pool::new(), Grants::default());
        let proven =
            authenticated_links(settings, files, enrolment.clone(), &cluster, &registry, &table, &links);
        let (zone, policies) = (zone(settings, proven.clone()), LivePolicies::new(settings));
        let joined = FinderDeps {
            link_context: &link_context,
            pool: &pool,
            zone: &zone,
            tls: files.peers.clone(),
            resolver: &files.resolver,
            dns: &files.dns,
            no_servers: &cluster.service_addresses,
            registry: registry.clone(),
            port,
        };
        let (finder, several) = peers::finder(&settings.peers, joined, cluster.pods.as_ref(), &readiness);
        stopping.has_peers = several.is_some();
        let (dialer, (peers, made)) = (dialer(settings, &policies, files), several.unzip());
        let context = ServerContext {
            proven,
            enrolment,
            registry,
            route: SessionRouter::new(finder.clone(), table, session.open_timeout, session.resume_timeout),
            finder,
            peers,
            ports: cluster.ports.clone(),
            addresses: cluster.addresses.clone(),
            direct: DirectDialer::new(client_dialer(&dialer, &policies), session.open_timeout),
            backend: SessionAcceptor::new(dialer, pool.clone(), grants.clone(), metrics, clients),
            link_context,
            pool,
            stopping: stopping.started.clone(),
            policies,
            grants,
            search_permits: Arc::new(Semaphore::new(link_events::MAX_SEARCHES)),
            link_rates: LinkRates::default(),
            move_permits: Arc::new(Semaphore::new(link_events::MAX_CONCURRENT_MOVES)),
        };
        Self {
            context,
            zone,
            resolver: files.resolver.clone(),
            readiness,
            files: FileWatcher::new(&links),
            shutdown: stopping,
            cluster,
            dialled_links: made,
        }
        .with_upkeep(files)
    }

    /// Returns what the listeners share.
    fn listener_deps(&self, settings: &ServerConfig) -> ListenerDeps {
        let shared = self.context.clone();
        let session = &settings.session;
        let context = ListenerContext {
            listener: "",
            policy: Arc::default(),
            grants: shared.grants,
            sessions: admission::sessions(session.max_sessions, session.max_per_client),
            long_heads: long_heads(false),
            pool: shared.pool,
            route: shared.route,
            addresses: shared.addresses,
            direct: Some(shared.direct),
            edge_routing: None,
            metrics: shared.link_context.metrics,
            drain: self.shutdown.clients.clone(),
        };
        ListenerDeps {
            context,
            zone: self.zone.clone(),
            registry: shared.registry,
            finder: shared.finder,
            peers: shared.peers,
            ports: shared.ports,
            claims: Arc::new(move || shared.proven.address_claims()),
            readiness: self.readiness.clone(),
            stopping: shared.stopping,
            links: self.shutdown.links.clone(),
            files: self.files.clone(),
            resume_timeout: session.resume_timeout,
            asks_kubernetes: settings.addresses.cluster.is_some(),
        }
    }

    /// Spawns the tasks that watch files and remove expired state.
    fn with_upkeep(self, files: &ServerFiles) -> Self {
        let (drain, LinkContext { table, metrics, .. }) = (&self.shutdown.links, &self.context.link_context);
        files.watch(&self.files);
        drain.spawn(info_span!("refusals"), metrics.refusals.clone().sum_up(drain.clone().started()));
        let upkeep = table.clone().upkeep(self.context.pool.clone(), drain.clone());
        drain.spawn(info_span!("upkeep"), upkeep);
        let grants = self.context.grants.clone();
        drain.spawn(info_span!("grants"), grants.follow(self.files.clone(), drain.clone()));
        let relays = link_events::judge_relays(self.context.clone(), drain.clone());
        drain.spawn(info_span!("relays"), relays);
        drain.spawn(info_span!("resume_parked"), self.context.route.clone().resume_parked(drain.clone()));
        self
    }
}

/// Returns the ports at which this server listens.
fn own_ports(settings: &ServerConfig, own: &[SocketAddr]) -> BTreeSet<u16> {
    let metrics = settings.links.metrics_listen.map(|at| at.port());
    own.iter().map(SocketAddr::port).chain(metrics).collect()
}

fn authenticated_links(
    settings: &ServerConfig,
    files: &ServerFiles,
    enrolment: Option<Arc<Enrolment>>,
    cluster: &ClusterView,
    registry: &Arc<Registry>,
    table: &Arc<SessionTable>,
    links: &Drain,
) -> Arc<AuthenticatedLinks> {
    let nodes = cluster.nodes.clone();
    let certificates = config_files::edge_cas(settings).is_some();
    let (tokens, registry, table) = (files.tokens.clone(), registry.clone(), table.clone());
    AuthenticatedLinks::start(tokens, enrolment, nodes, certificates, registry, table, links)
}

fn new_shutdown(settings: &ServerConfig) -> Shutdown {
    Shutdown {
        started: CancellationToken::new(),
        has_peers: false,
        redirects: Vec::new(),
        clients: Drain::new(),
        publisher: Drain::new(),
        links: Drain::new(),
        admin: Drain::new(),
        deadline: settings.session.drain_timeout,
    }
}

fn link_context(settings: &ServerConfig, metrics: &Metrics, links: &Drain) -> LinkContext {
    LinkContext {
        table: SessionTable::new(Instance::random(), limits(settings), metrics.clone()),
        metrics: metrics.clone(),
        drain: links.clone(),
        congestion: settings.links.congestion.as_deref().map(Arc::from),
        plain_idle_timeout: settings.session.superedge_idle_timeout,
    }
}

fn limits(settings: &ServerConfig) -> SessionLimits {
    SessionLimits {
        windows: WINDOWS,
        memory: settings.session.buffer_memory.unwrap_or_else(|| third_of_memory(MEMORY)),
        sessions: settings.session.max_sessions,
        grace: settings.session.resume_timeout,
    }
}

fn zone(settings: &ServerConfig, proven: Arc<AuthenticatedLinks>) -> Arc<Zone> {
    let patterns = settings.dns.publish_names.clone();
    Arc::new(Zone::new(settings.dns.zone.clone(), patterns, move |node: &_| proven.has_node(node)))
}

/// Returns the dialer for edges.
fn dialer(settings: &ServerConfig, policies: &LivePolicies, files: &ServerFiles) -> TargetDialer {
    TargetDialer {
        place: DialerRole::ForEdges,
        own: LocalAddresses::of_interfaces(settings.pod_ip.into_iter().collect()),
        targets: policies.for_edges.clone(),
        resolver: files.resolver.clone(),
    }
}

/// Returns the same dialer for clients.
fn client_dialer(dialer: &TargetDialer, policies: &LivePolicies) -> TargetDialer {
    TargetDialer { place: DialerRole::ForClients, targets: policies.for_clients.clone(), ..dialer.clone() }
}

/// Receive windows of a server's sessions, in bytes.
const WINDOWS: WindowLimits = WindowLimits { start: 64 * 1024, max: 4 << 20 };

// The ports of a server, bound before anything runs.

/// The bound ports of a server for edges, peers and operators.
#[derive(Debug)]
pub(crate) struct BaseListeners {
    /// gRPC, for edges and peers.
    pub(crate) grpc: TcpAccept,
    /// Health, log level and metrics; `None` if the default port was not available.
    pub(crate) log: Option<TcpAccept>,
    /// Only metrics.
    pub(crate) metrics: Option<TcpAccept>,
    /// For gRPC's debugging clients.
    pub(crate) channelz: Option<TcpAccept>,
    /// For commands on this machine.
    pub(crate) admin: Option<UnixAccept>,
}

impl BaseListeners {
    /// Binds all ports.
    pub(crate) fn bind(settings: &ServerConfig, startup: &mut Startup) -> Result<Self, NotPrepared> {
        let links = &settings.links;
        let grpc = startup.bind("server.links.listen", links.listen);
        let (admin, is_default) = (links.admin_listen, links.admin_port.is_default);
        let log = startup.bind_optional("server.links.admin_listen", admin, is_default);
        let metrics =
            links.metrics_listen.map(|at| startup.bind_public("server.links.metrics_listen", at)).transpose();
        let channelz = links.channelz_listen;
        let channelz = channelz.map(|at| startup.bind("server.links.channelz_listen", at)).transpose();
        let admin = startup.bind_admin("server.admin.listen", &settings.admin);
        Ok(Self { grpc: grpc?, log: log?, metrics: metrics?, channelz: channelz?, admin: admin? })
    }

    /// Returns the addresses at which this server listens, except the port for metrics.
    pub(crate) fn local_addresses(&self, listeners: &[BoundListener]) -> Vec<SocketAddr> {
        let more = self.log.iter().chain(&self.channelz).map(TcpAccept::at);
        [self.grpc.at()].into_iter().chain(more).chain(listeners.iter().filter_map(|port| port.at)).collect()
    }
}

// Shuts a server down without aborting sessions that can resume elsewhere.

/// The tasks in the order in which they are stopped: clients first, links when no session needs them, admin ports last.
#[derive(Debug)]
pub(crate) struct Shutdown {
    /// Cancelled when the server begins to stop; no call is accepted from then on.
    pub(crate) started: CancellationToken,
    /// Whether there are peers that take over.
    pub(crate) has_peers: bool,
    /// Each completes once no more clients are redirected to a listener.
    pub(crate) redirects: Vec<oneshot::Receiver<()>>,
    pub(crate) clients: Drain,
    pub(crate) publisher: Drain,
    pub(crate) links: Drain,
    pub(crate) admin: Drain,
    pub(crate) deadline: Duration,
}

impl Server {
    /// Shuts the server down. It becomes unready and asks its edges to link elsewhere. With peers, it still accepts
    /// clients for a moment, until balancers notice. Then it closes its listeners, and waits for sessions until the
    /// deadline or until `at_once` completes.
    pub async fn shutdown(self, at_once: impl Future<Output = ()>) -> Drained {
        let Shutdown { started, has_peers: several, redirects, clients, publisher, links, admin, deadline } =
            self.stopping;
        let (at_once, until) = (at_once.shared(), Instant::now() + deadline);
        self.readiness.set(DRAINING_CONDITION, Err("stopping".into()));
        info!(sessions = self.table.len(), timeout = ?deadline, "draining");
        started.cancel();
        // Started first, so that balancers stop sending clients here.
        publisher.start();
        self.registry.drain_all();
        // From then on, traffic to nodes goes there directly, not to a listener that is about to close.
        let _ = timeout(CLOSE_TIMEOUT.min(deadline), join_all(redirects)).await;
        if several {
            tokio::select! {
                () = sleep(LISTEN_GRACE.min(deadline / 4)) => {}
                () = at_once.clone() => {}
            }
        }
        let left = until.saturating_duration_since(Instant::now());
        let why = SessionError::new(ErrorCode::Overloaded, "the server is stopping");
        let before_cut = async {
            self.table.reset_all(&why);
            sleep(FLUSH_TIMEOUT).await;
            self.table.wait_closed().await;
        };
        let drained = clients.finish_after(left, at_once.clone(), before_cut).await;
        if let Drained::Cut(left) = drained {
            warn!(sessions_remaining = left, "drain timeout, aborting sessions");
        }
        tokio::select! {
            () = wait_relayed(&self.table) => {}
            () = sleep_until(until) => warn!("drain timeout, relayed sessions must find another path"),
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

/// Waits until the last bytes of clients are delivered, and peers' sessions with plain nodes have ended.
async fn wait_relayed(table: &SessionTable) {
    table.wait_delivered().await;
    while table.relayed().0 > 0 {
        sleep(POLL_INTERVAL).await;
    }
}

/// How long balancers may still send clients to a server that is not ready.
const LISTEN_GRACE: Duration = Duration::from_secs(2);
/// Interval between checks whether relayed sessions have found another path.
const POLL_INTERVAL: Duration = Duration::from_millis(50);
/// Time for sessions to end after their reset, and for the last resets to be sent before links are closed.
const FLUSH_TIMEOUT: Duration = Duration::from_millis(100);
/// Time for connections to end on their own at the very end.
const CLOSE_TIMEOUT: Duration = Duration::from_secs(3);
