//! Builds, runs and stops a server.

pub mod config;
pub mod config_files;
pub(crate) mod edge_links;
pub(crate) mod interactive_links;
pub mod invitations;
pub(crate) mod link_denial;
pub mod link_events;
pub mod links;
pub(crate) mod listeners;
pub(crate) mod load;
pub(crate) mod peers;
pub(crate) mod rates;
pub mod registry;
pub(crate) mod running;
mod shutdown;
pub(crate) mod user_links;

use std::collections::BTreeSet;
use std::net::{IpAddr, SocketAddr};
use std::path::{Path, PathBuf};
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use arc_swap::{ArcSwap, ArcSwapOption};
use futures_util::FutureExt as _;
use rustix::system::uname;
use tokio::sync::{Mutex, Semaphore, watch};
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;
use tracing::{info, info_span};

use crate::acceptor::SessionAcceptor;
use crate::acceptor::target_dialer::{DirectDialer, TargetDialer, TargetDialerRole};
use crate::admin::certificate_expiry::MonitoredCertificates;
use crate::admin::config_plan::ConfigPlanner;
use crate::admin::page::PageViewers;
use crate::admin::readiness::{RESTART_CONDITION, Readiness};
use crate::admin::server::{ServerAdmin, end_parked};
use crate::admin::status::collect::WallClock;
use crate::admin::{self, AdminContext};
use crate::admission::access::{AccessPolicies, bind_admin};
use crate::admission::heads::PendingLimits;
use crate::admission::{self, AccessPolicy, ListenerContext};
use crate::config::ConfigErrors;
use crate::config::config_watch::ConfigFile;
use crate::config::plan::{ConfigPlan, RIGHTS_CHANGED, log_changed, waits};
use crate::config::server::{LinkListenerConfig, MEMORY, SessionConfig, clients};
use crate::enrolment::OpenedEnrolments;
use crate::kubernetes::ServerPods;
use crate::listener::{ListenerDeps, connect};
use crate::parts::{self, with_kubernetes};
use crate::registry::{Finder, Registry};
use crate::route::SessionRouter;
use crate::server::config::ServerConfig;
use crate::server::config_files::{LivePolicies, LoadedServerFiles, PartFiles};
use crate::server::edge_links::EdgeAuthenticator;
use crate::server::link_events::edge_access;
use crate::server::listeners::{OpenListeners, PreparedListener};
use crate::server::rates::RateLimiter;
use crate::server::running::RunningParts;
use crate::server::user_links::UserLinks;
use crate::session_io::judged::JudgedSessions;
use crate::session_io::rights::RightsChange;
use crate::startup::daemon::{DaemonConfig, Serving};
use crate::startup::signals::Signals;
use crate::startup::systemd::wait_stop;
use crate::startup::{Prepared, StartupErrorCollector, StartupErrors};
use tunnel_base::drain::{Drain, Drained};
use tunnel_base::logging::LogLevelHandle;
use tunnel_base::metrics::Metrics;
use tunnel_base::policy::Networks;
use tunnel_base::policy::ports::ConfigMapPorts;
use tunnel_base::policy::targets::Targets;
use tunnel_link::grpc::LinkContext;
use tunnel_link::table::{SESSION_MEMORY, SessionLimits, SessionTable};
use tunnel_net::interfaces::LocalAddresses;
use tunnel_net::limiter::FairLimiter;
use tunnel_net::listen::TcpListenSocket;
use tunnel_net::os::memory;
use tunnel_net::pool::BufferPool;
use tunnel_net::reload::{FileWatcher, ReloadedValue};
use tunnel_net::tls::client_certificate::ServerTls;
use tunnel_net::tls::peer::PeerTls;
use tunnel_proto::frame::SessionCategory;
use tunnel_proto::halves::WindowLimits;
use tunnel_proto::names::{Instance, NodeName, Target};

/// The addresses at which a server listens.
#[derive(Debug, Clone)]
pub struct ServerListenAddresses {
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

impl ServerListenAddresses {
    /// Returns the address of the CONNECT listener; `None` if there is none.
    pub fn connect(&self) -> Option<SocketAddr> {
        self.clients.iter().find(|(name, _)| *name == connect::KIND.name).map(|(_, at)| *at)
    }
}

/// A running server: its addresses, and how to stop it.
#[derive(Debug)]
pub struct Server {
    /// The addresses at which it listens.
    pub bound: ServerListenAddresses,
    /// Its metrics.
    pub metrics: Metrics,
    /// The nodes that are linked here.
    pub registry: Arc<Registry>,
    /// The table of sessions.
    pub table: Arc<SessionTable>,
    /// The nodes that join by invitation, once that is enabled.
    pub enrolment: OpenedEnrolments,
    /// The config at the start.
    settings: Arc<ServerConfig>,
    context: Arc<ServerContext>,
    following: Arc<Mutex<Following>>,
}

/// What follows the config.
#[derive(Debug)]
struct Following {
    listeners: OpenListeners,
    parts: RunningParts,
}

/// The files and ports named by the config, prepared before anything runs.
struct PreparedServer {
    pub(crate) files: LoadedServerFiles,
    /// For edges and peers.
    grpc: TcpListenSocket,
    pub(crate) admin: admin::AdminListeners,
    /// The ports of both, each with its key.
    other_ports: Vec<(String, SocketAddr)>,
    /// For clients.
    listeners: Vec<PreparedListener>,
    pub(crate) policies: AccessPolicies,
    /// The access policy of users' programs.
    users: Arc<ArcSwap<AccessPolicy>>,
    pub(crate) viewers: Option<PageViewers>,
}

/// The state shared by the tasks of a server.
#[derive(Debug)]
pub(crate) struct ServerContext {
    // Links and sessions.
    pub(crate) link_context: LinkContext,
    pub(crate) registry: Arc<Registry>,
    pub(crate) finder: Arc<Finder>,
    /// What admits clients: all ports, and links of users. Its category is that of users' links; ports set their own.
    pub(crate) clients: ListenerContext,
    /// Dials targets of the cloud for edges.
    pub(crate) acceptor: SessionAcceptor,
    // Who may do what.
    pub(crate) edge_links: Arc<EdgeAuthenticator>,
    pub(crate) user_links: UserLinks,
    /// Answers operators, also over links of users. Set before the first link is accepted.
    pub(crate) admin: OnceLock<AdminContext>,
    /// The nodes that join by invitation, once that is enabled.
    pub(crate) enrolment: OpenedEnrolments,
    /// Servers that the config names, for machines that join.
    pub(crate) named_servers: ArcSwap<Vec<Target>>,
    /// The TLS of the port for links.
    pub(crate) tls: ReloadedValue<ServerTls>,
    /// The access rules for what can be reached through this server.
    pub(crate) policies: LivePolicies,
    /// Maximum number of links: as many as fit into a quarter of the memory.
    pub(crate) max_links: usize,
    /// Permits for concurrent searches of all edges.
    pub(crate) search_permits: Semaphore,
    /// Permits for pinging older links of nodes that have linked again.
    pub(crate) move_permits: Arc<Semaphore>,
    /// How many links each node has opened recently.
    pub(crate) link_rates: RateLimiter<NodeName>,
    /// Rates of the sessions that each edge and user requests.
    pub(crate) session_rates: RateLimiter<String>,
    // The surroundings, as the parts of the server find them.
    pub(crate) part_files: ArcSwap<PartFiles>,
    /// TLS for dialling peers, from the first config on that requires it.
    pub(crate) peer_tls: OnceLock<ReloadedValue<PeerTls>>,
    /// The addresses of peers.
    pub(crate) peer_addresses: watch::Sender<Vec<SocketAddr>>,
    /// The pods of the servers, as a Service lists them.
    pub(crate) pods: ArcSwapOption<ServerPods>,
    /// The ports of nodes that are redirected here, and which of them are ports of the node's loopback.
    pub(crate) ports: watch::Sender<ConfigMapPorts>,
    /// Addresses in the DNS records of nodes that do not belong to any server.
    pub(crate) service_addresses: watch::Sender<BTreeSet<IpAddr>>,
    /// Where nodes are published, as a fixed word.
    pub(crate) publishes: Arc<ArcSwap<Option<&'static str>>>,
    /// The port of all servers for links.
    pub(crate) port: u16,
    /// The ports at which this server listens.
    pub(crate) own_ports: BTreeSet<u16>,
    /// Reported at `/readyz`.
    pub(crate) readiness: Readiness,
    /// Reloads files when they change.
    pub(crate) watcher: FileWatcher,
    /// The files of certificates, for their expiry.
    pub(crate) certificates: MonitoredCertificates,
    /// Cancelled when the server begins to stop; no call is accepted from then on.
    pub(crate) stopping: CancellationToken,
    pub(crate) drains: Drains,
}

/// The tasks in the order in which they are stopped: clients first, links when no session needs them, admin ports last.
#[derive(Debug, Default)]
pub(crate) struct Drains {
    /// Holds a token while clients are redirected to a listener.
    pub(crate) redirecting: TaskTracker,
    pub(crate) clients: Drain,
    pub(crate) publisher: Drain,
    pub(crate) links: Drain,
    pub(crate) admin: Drain,
}

impl DaemonConfig for ServerConfig {
    fn check(&self, startup: &mut StartupErrorCollector) {
        Server::validate(self, startup);
    }

    fn plan(&self, new: &dyn DaemonConfig) -> ConfigPlan {
        new.of().map(|new| Self::plan(self, new)).unwrap_or_default()
    }

    fn uses_no_kubernetes(&self) -> Option<&'static str> {
        if let Err(why) = parts::KUBERNETES {
            return Some(why);
        }
        let asks = self.peers.cluster.is_some() || self.addresses.cluster.is_some();
        let proves = self.csr.is_some() || self.service_account.is_some();
        let unused = "no key requires Kubernetes; set publish or kubernetes_service of [server.peers], kubernetes = true in \
                      [server.addresses], name of [server.service_account], or profiles of [server.csr]";
        (!asks && !proves).then_some(unused)
    }

    fn secrets(&self, _: &Path) -> Vec<(String, PathBuf)> {
        self.secrets()
    }

    fn admin_socket(&self) -> Option<&Path> {
        self.admin.listen.as_deref()
    }

    fn serve(self: Box<Self>, file: ConfigFile, level: LogLevelHandle, mut signals: Signals) -> Serving {
        let serving = async move {
            // The cluster's signers may take any time, and a signal must end the wait.
            tokio::select! {
                () = Server::wait_for_certificates(&self) => {}
                () = signals.next() => return Ok(Drained::Finished),
            }
            let server = Server::start(*self, Some(level))?;
            server.watch_config(file);
            wait_stop(&mut signals).await;
            Ok(server.shutdown(signals.next()).await)
        };
        serving.boxed()
    }
}

impl Server {
    /// Reads the files named by the config, binds every port, then serves.
    ///
    /// # Errors
    ///
    /// Contains every file that cannot be used and every configured port that cannot be bound. Nothing runs then.
    pub fn start(settings: ServerConfig, level: Option<LogLevelHandle>) -> Result<Self, StartupErrors> {
        let mut startup = StartupErrorCollector::default();
        let prepared = PreparedServer::new(&settings, &mut startup);
        let prepared = startup.finish(prepared)?;
        let bound = prepared.addresses(&settings);
        let settings = Arc::new(settings);
        let context = Arc::new(ServerContext::new(&settings, &prepared));
        context.spawn_upkeep(&prepared.files);
        invitations::start(&settings, prepared.files.authority.clone(), &context);
        let PreparedServer { grpc, admin: admin_ports, other_ports, listeners, policies, viewers, .. } =
            prepared;
        let admin_addr = admin_ports.log.as_ref().map(TcpListenSocket::at);
        context.spawn_admin(&settings, admin_ports, viewers, level, bound.grpc);
        let parts = RunningParts::start(&context, &settings);
        let deps = context.listener_deps();
        let tls = settings.tls.clone();
        let mut open = OpenListeners { deps, policies, tls, other_ports, open: Vec::new() };
        listeners.into_iter().for_each(|listener| open.serve(listener));
        open.watch_users();
        let admin_addr = admin_addr.map(tracing::field::display);
        let connect_addr = bound.connect().map(tracing::field::display);
        let LinkListenerConfig { proxy_protocol, trusted_proxies, .. } = settings.links.clone();
        // Last, so that all that serves an edge's sessions has started before the first edge links.
        links::spawn(grpc, proxy_protocol, trusted_proxies, context.clone());
        info!(links_addr = %bound.grpc, connect_addr, admin_addr, "server started");
        Ok(Self {
            bound,
            metrics: context.link_context.metrics.clone(),
            registry: context.registry.clone(),
            table: context.link_context.table.clone(),
            enrolment: context.enrolment.clone(),
            context,
            following: Arc::new(Mutex::new(Following { listeners: open, parts })),
            settings,
        })
    }

    /// Follows the config when it changes: reloads the access rules, ends the sessions that they no longer allow, has the
    /// parts of the server follow their tables, and opens and closes listeners.
    pub fn watch_config(&self, config: ConfigFile) {
        let context = self.context.clone();
        let following = self.following.clone();
        let started = self.settings.clone();
        let apply = move |settings: Arc<ServerConfig>, plan: ConfigPlan| {
            let context = context.clone();
            let following = following.clone();
            let started = started.clone();
            let apply = async move {
                let mut following = following.lock().await;
                context.reload(&settings, &started, &plan, &mut following).await
            };
            apply.boxed()
        };
        let ServerContext { watcher, drains, admin, readiness, .. } = &*self.context;
        let readiness = readiness.clone();
        let applied = move |_: Option<&str>, waiting: &BTreeSet<String>| {
            readiness.set_degraded(RESTART_CONDITION, waits(waiting));
        };
        let read = config.follow(
            (ServerConfig::examine, ServerConfig::plan),
            watcher,
            &drains.links,
            apply,
            applied,
        );
        let read = Arc::new(read);
        let Some(admin) = admin.get() else { return };
        let context = self.context.clone();
        let following = self.following.clone();
        admin.planner.set(move |text| {
            let context = context.clone();
            let following = following.clone();
            let read = read.clone();
            async move {
                let (settings, mut plan) = read(&text)?;
                let Following { listeners, .. } = &mut *following.lock().await;
                // The reload itself reports files that cannot be read.
                let mut startup = StartupErrorCollector::default();
                let change = context.rights(&settings, &mut listeners.policies, &mut startup);
                listeners.watch_users();
                plan.ends = context.clients.judged.ended_by(&change);
                Ok(serde_json::json!(plan).to_string())
            }
        });
    }

    /// Waits until the cluster's signers have issued the certificates that the config requires. Cancel safe.
    pub async fn wait_for_certificates(settings: &ServerConfig) {
        if let Some(csr) = &settings.csr {
            with_kubernetes!(api::server::csr::wait_issued(csr).await, else ());
        }
    }

    /// Finds all errors that would prevent a start, and starts nothing. A check also finds certificates that clients
    /// would reject.
    pub fn validate(settings: &ServerConfig, startup: &mut StartupErrorCollector) {
        // The errors are in `startup`.
        let _ = PreparedServer::new(settings, startup);
        if startup.is_check {
            for (key, file) in settings.server_certificates() {
                startup.check_dates(&key, &file);
            }
        }
    }
}

impl PreparedServer {
    /// Prepares everything.
    fn new(settings: &ServerConfig, startup: &mut StartupErrorCollector) -> Prepared<Self> {
        let files = LoadedServerFiles::read(settings, startup);
        let grpc = startup.bind("server.links.listen", settings.links.listen);
        let admin =
            bind_admin("server", ("links", &settings.links.ports), &settings.admin, &settings.tls, startup);
        let other_ports = startup.ports().to_vec();
        let mut policies = AccessPolicies::default();
        let mut rights = RightsChange::default();
        policies.change(&settings.access(), &mut rights, startup);
        rights.apply();
        let viewers = policies.viewers(config::ADMIN, &settings.admin);
        let users = policies.of(clients::TABLE);
        // All of them, so that each error is noted.
        let tables = settings.listeners.iter();
        let listeners: Vec<_> =
            tables.map(|table| listeners::prepare(table, &settings.tls, startup)).collect();
        Ok(Self {
            files: files?,
            grpc: grpc?,
            admin: admin?,
            other_ports,
            listeners: listeners.into_iter().collect::<Result<_, _>>()?,
            policies,
            users,
            viewers,
        })
    }

    /// Returns the ports at which this server listens.
    fn own_ports(&self) -> BTreeSet<u16> {
        let admin::AdminListeners { log, metrics, channelz, .. } = &self.admin;
        let ports = [log, metrics, channelz].into_iter().flatten().map(TcpListenSocket::at);
        let clients = self.clients().map(|(_, at)| at);
        ports.chain(clients).chain([self.grpc.at()]).map(|at| at.port()).collect()
    }

    /// Returns the ports for clients, each with the name of its listener.
    fn clients(&self) -> impl Iterator<Item = (&'static str, SocketAddr)> {
        self.listeners.iter().flat_map(|PreparedListener { table, ports, .. }| {
            ports.iter().filter_map(|port| Some((table.kind.name, port.at?)))
        })
    }

    fn addresses(&self, settings: &ServerConfig) -> ServerListenAddresses {
        let admin = &self.admin;
        ServerListenAddresses {
            grpc: self.grpc.at(),
            clients: self.clients().collect(),
            log: admin.log.as_ref().map_or(settings.links.ports.admin_listen, TcpListenSocket::at),
            metrics: admin.metrics.as_ref().map(TcpListenSocket::at),
            channelz: admin.channelz.as_ref().map(TcpListenSocket::at),
        }
    }
}

impl ServerContext {
    /// Builds the state, without what the parts of the server add.
    fn new(settings: &ServerConfig, prepared: &PreparedServer) -> Self {
        let files = &prepared.files;
        let session = &settings.session;
        let drains = Drains::default();
        let readiness = Readiness::waiting_for(&[]);
        let link_context = link_context(settings, &drains.links);
        let table = link_context.table.clone();
        let metrics = link_context.metrics.clone();
        let registry = Registry::new(metrics.clone());
        let enrolment = OpenedEnrolments::default();
        let tokens = files.tokens.clone();
        let edge_links = EdgeAuthenticator::new(tokens, enrolment.clone());
        let pool = BufferPool::new();
        let judged = JudgedSessions::default();
        let policies = LivePolicies::new(settings);
        let finder = Finder::without_peers(registry.clone(), table.instance());
        // Two lists of targets: what edges reach in the cloud, and what clients reach without an edge.
        let for_edges = dialer(settings, files, TargetDialerRole::ForEdges, &policies.for_edges);
        let for_clients = dialer(settings, files, TargetDialerRole::ForClients, &policies.for_clients);
        let memory = memory(session.memory_limit);
        let paths = finder.clone();
        let drain = drains.clients.clone();
        let clients = ListenerContext {
            listener: "",
            category: SessionCategory::Ssh,
            policy: Arc::default(),
            judged: judged.clone(),
            sessions: admission::sessions(max_sessions(session, memory), session.max_per_client),
            pending: PendingLimits::new(memory, false),
            pool: pool.clone(),
            route: SessionRouter::new(paths, table, session.open_timeout, session.resume_timeout),
            zone: Arc::default(),
            addresses: Arc::default(),
            direct: Some(DirectDialer::new(for_clients, session.open_timeout)),
            uplink: None,
            metrics: metrics.clone(),
            drain: drain.clone(),
            stopping: drain.clone(),
        };
        Self {
            user_links: UserLinks::new(prepared.users.clone(), clients.clone()),
            clients,
            registry,
            finder,
            acceptor: SessionAcceptor::new(for_edges, None, pool, judged, metrics, drain),
            link_context,
            edge_links,
            admin: OnceLock::new(),
            enrolment,
            named_servers: ArcSwap::default(),
            tls: files.tls.clone(),
            max_links: memory / 4 / load::LINK_MEMORY,
            policies,
            search_permits: Semaphore::new(link_events::MAX_SEARCHES),
            move_permits: Arc::new(Semaphore::new(MAX_CONCURRENT_MOVES)),
            link_rates: RateLimiter::new(links::MAX_LINKS, Duration::from_secs(60)),
            session_rates: RateLimiter::new(link_events::MAX_SESSIONS, link_events::SESSIONS_WINDOW),
            part_files: ArcSwap::new(files.parts.clone()),
            peer_tls: OnceLock::new(),
            peer_addresses: watch::Sender::default(),
            pods: ArcSwapOption::empty(),
            ports: watch::Sender::default(),
            service_addresses: watch::Sender::default(),
            publishes: Arc::default(),
            port: prepared.grpc.at().port(),
            own_ports: prepared.own_ports(),
            readiness,
            watcher: FileWatcher::new(&drains.links),
            certificates: MonitoredCertificates::default(),
            stopping: CancellationToken::new(),
            drains,
        }
    }

    /// Returns what a config changes in the rights. Notes users files that cannot be read.
    fn rights(
        &self,
        settings: &ServerConfig,
        policies: &mut AccessPolicies,
        startup: &mut StartupErrorCollector,
    ) -> RightsChange {
        let mut change = self.policies.change(settings);
        policies.change(&settings.access(), &mut change, startup);
        change
    }

    /// Applies a changed config, all that can be applied.
    ///
    /// # Errors
    ///
    /// A listener cannot be opened, or a file cannot be read. These are as before.
    async fn reload(
        self: &Arc<Self>,
        settings: &Arc<ServerConfig>,
        started: &ServerConfig,
        plan: &ConfigPlan,
        Following { listeners, parts }: &mut Following,
    ) -> Result<(), ConfigErrors> {
        let mut startup = StartupErrorCollector::default();
        // Rights first: what is taken away does not wait for a port.
        self.rights(settings, &mut listeners.policies, &mut startup).apply();
        // All else of the port for links is as at the start.
        let links =
            ServerConfig { links: started.links.clone(), tls: started.tls.clone(), ..(**settings).clone() };
        let tls = config_files::tls(&links, &mut startup).inspect(|tls| self.tls.replace(tls));
        self.clients.judged.rights_changed();
        log_changed(&plan.judges, RIGHTS_CHANGED);
        if !self.enrolment.initialized()
            && let Ok(authority) = config_files::invitation_ca(settings, &mut startup)
        {
            invitations::start(settings, authority, self);
        }
        let read = |files: PartFiles| self.part_files.store(Arc::new(files));
        parts.follow(settings, || PartFiles::read(&links, tls.is_ok(), &mut startup).map(read).is_ok()).await;
        let mut errors = startup.into_errors();
        errors.0.extend(listeners.apply(&settings.listeners).await.0);
        // A listener that has opened again may ask for another certificate.
        self.clients.judged.rights_changed();
        self.certificates.set(settings.certificates(), settings.ca_files());
        errors.report(&self.readiness)
    }

    /// Returns what the listeners share.
    fn listener_deps(&self) -> ListenerDeps {
        let edge_links = self.edge_links.clone();
        ListenerDeps {
            context: self.clients.clone(),
            proxies: Networks::default(),
            finder: self.finder.clone(),
            ports: self.ports.subscribe(),
            claims: Arc::new(move || edge_links.address_claims()),
            readiness: self.readiness.clone(),
            stopping: self.stopping.clone(),
            accepting: TaskTracker::new(),
            redirecting: self.drains.redirecting.clone(),
            links: self.drains.links.clone(),
            files: self.watcher.clone(),
        }
    }

    /// Starts the tasks that watch files, report on peers and remove expired state.
    fn spawn_upkeep(self: &Arc<Self>, files: &LoadedServerFiles) {
        let drain = &self.drains.links;
        let LinkContext { table, metrics, .. } = &self.link_context;
        files.watch(&self.watcher);
        drain.spawn(info_span!("refusals"), metrics.refusals.clone().sum_up(drain.clone().started()));
        let edge_links = self.edge_links.clone();
        let registry = self.registry.clone();
        let revocations = edge_links.watch_revocations(registry, table.clone(), drain.clone());
        drain.spawn(info_span!("tokens"), revocations);
        drain.spawn(info_span!("upkeep"), table.clone().upkeep(self.clients.pool.clone(), drain.clone()));
        let finder = self.finder.clone();
        let table = self.link_context.table.clone();
        let ended = move |one: &_, why: &str| end_parked(&finder, &table, one, why);
        let judged = self.clients.judged.clone();
        drain.spawn(info_span!("judged"), judged.follow(self.watcher.clone(), ended, drain.clone()));
        drain.spawn(info_span!("relays"), edge_access::judge_relays(self.clone(), drain.clone()));
        drain.spawn(info_span!("users"), invitations::follow_users(self.clone(), drain.clone()));
        drain.spawn(info_span!("resume_parked"), self.clients.route.clone().resume_parked(drain.clone()));
    }

    /// Serves the admin ports.
    fn spawn_admin(
        &self,
        settings: &ServerConfig,
        ports: admin::AdminListeners,
        viewers: Option<PageViewers>,
        level: Option<LogLevelHandle>,
        grpc: SocketAddr,
    ) {
        let users = self.user_links.policy();
        let process = ServerAdmin {
            name: self.link_context.server_name.clone(),
            finder: self.finder.clone(),
            max_links: self.max_links,
            publishes: self.publishes.clone(),
            enrolment: self.enrolment.clone(),
            rights: Arc::new(move || users.load().rights.clone()),
            port: grpc.port(),
        };
        let admin = self.admin.get_or_init(|| AdminContext {
            process: Arc::new(process),
            table: self.link_context.table.clone(),
            judged: self.clients.judged.clone(),
            metrics: self.link_context.metrics.clone(),
            readiness: self.readiness.clone(),
            level,
            level_at_ports: settings.links.ports.sets_level,
            clock: WallClock::now(),
            viewers,
            streams: FairLimiter::new(admin::STREAMS),
            planner: ConfigPlanner::default(),
        });
        self.certificates.set(settings.certificates(), settings.ca_files());
        admin.spawn(ports, Some(grpc), self.certificates.clone(), &self.watcher, &self.drains.admin);
    }
}

fn dialer(
    settings: &ServerConfig,
    files: &LoadedServerFiles,
    role: TargetDialerRole,
    targets: &Arc<ArcSwap<Targets>>,
) -> TargetDialer {
    let own = LocalAddresses::of_interfaces(settings.pod_ip.into_iter().collect());
    let resolver = files.parts.resolver.clone();
    TargetDialer { role, own, targets: targets.clone(), resolver, sockets: None }
}

fn link_context(settings: &ServerConfig, links: &Drain) -> LinkContext {
    let metrics = Metrics::server(&settings.pod_namespace, &settings.pod_name);
    let session = &settings.session;
    let memory = memory(session.memory_limit);
    let limits = SessionLimits {
        windows: WINDOWS,
        memory: session.buffer_memory.unwrap_or(MEMORY.min(memory / 5)),
        sessions: max_sessions(session, memory),
        resume_timeout: session.resume_timeout,
        max_resume_timeout: session.max_resume_timeout,
    };
    LinkContext {
        table: SessionTable::new(Instance::random(), limits, metrics.clone()),
        // A host with a name that no server may have has none.
        server_name: settings
            .links
            .name
            .clone()
            .or_else(|| uname().nodename().to_string_lossy().parse().ok()),
        metrics,
        drain: links.clone(),
        congestion: settings.links.congestion.as_deref().map(Arc::from),
        plain_idle_timeout: session.superedge_idle_timeout,
    }
}

/// Returns the maximum number of sessions of a process that may use `memory` bytes.
fn max_sessions(session: &SessionConfig, memory: usize) -> usize {
    session.max_sessions.min(memory / 5 / SESSION_MEMORY)
}

/// Receive windows of a server's sessions, in bytes.
const WINDOWS: WindowLimits = WindowLimits { start: 64 * 1024, max: 4 << 20 };

/// Maximum number of nodes whose older links are pinged at once. Limits the effect of a server that announces nodes
/// endlessly.
const MAX_CONCURRENT_MOVES: usize = 10_000;
