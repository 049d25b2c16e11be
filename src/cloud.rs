//! Builds and runs a pod.

mod asked;
mod bridge;
mod callers;
mod kubernetes;
mod links;
mod proven;
mod publish;
mod siblings;
mod stop;

use std::net::SocketAddr;
use std::sync::Arc;

use anyhow::Context as _;
use arc_swap::ArcSwap;
use tokio::sync::Semaphore;
use tokio_util::sync::CancellationToken;
use tracing::{info, info_span, warn};

use links::PodContext;
use proven::Proven;
use stop::Stopping;

use crate::admin::{Admin, Readiness, Side};
use crate::backend::{Backend, LocalAddresses, TargetDialer};
use crate::config;
use crate::config::cloud::{Auth, Cloud, MEMORY, TlsVersion};
use crate::drain::Drain;
use crate::frontend::auth::{Gate, Logins, Users};
use crate::frontend::{self, connect};
use crate::names::Instance;
use crate::net::door::{Door, Limits as Places};
use crate::net::entrance::Entrance;
use crate::net::files;
use crate::net::listen::Listener;
use crate::net::pool::Pool;
use crate::net::reload::Reload;
use crate::net::resolver::Resolver;
use crate::net::tls::{self, Clients, Identity};
use crate::policy::zone::Zone;
use crate::protocol::link::grpc::LinkContext;
use crate::protocol::{Limits, SessionTable, Windows};
use crate::registry::Registry;
use crate::registry::find::Finder;
use crate::registry::publish::Publisher;
use crate::route::Route;
use crate::telemetry::log::Level;
use crate::telemetry::{Metrics, third_of_memory};

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
    pub table: Arc<SessionTable>,
    finder: Arc<Finder>,
    readiness: Readiness,
    stopping: Stopping,
}

impl Pod {
    /// Reads the files that the settings name, binds every port, then serves.
    ///
    /// # Errors
    ///
    /// A file that will not do, or a port that was asked for and cannot be had. Nothing runs then.
    pub fn start(settings: Cloud, level: Option<Level>) -> anyhow::Result<Self> {
        let Cloud {
            server,
            tls,
            ssh,
            session,
            registry: publishing,
            pod_name,
            pod_namespace,
            pod_ip,
            allow,
            ..
        } = settings;
        let metrics = Metrics::cloud(&pod_namespace, &pod_name);
        let acceptor = acceptor(&server, publishing.siblings.name.as_deref(), &tls)?;
        let users = match &ssh.auth {
            Auth::None => None,
            Auth::Basic { users } => Some(read_users(users)?),
        };
        let grpc = Listener::bind(server.listen.at).context("mode.cloud.stream.server.listen")?;
        let log = bind(server.log_listen, "mode.cloud.stream.server.log_listen")?;
        let metrics_at = server.metrics_listen.map(|listen| Listener::bind(listen.at)).transpose();
        let metrics_at = metrics_at.context("mode.cloud.stream.server.metrics_listen")?;
        let front = bind(ssh.listen, "mode.cloud.ssh.listen")?;

        let mut stopping = Stopping {
            begun: CancellationToken::new(),
            several: false,
            clients: Drain::new(),
            publisher: Drain::new(),
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
        let table = SessionTable::new(Instance::random(), limits, metrics.clone());
        let proven = Proven::start(&server.tokenfile, table.clone(), &stopping.links)?;
        let registry = Registry::new(metrics.clone());
        let ground =
            LinkContext { table: table.clone(), metrics: metrics.clone(), drain: stopping.links.clone() };
        let pool = Pool::new();
        let port = grpc.at().port();
        let pods = kubernetes::follow(publishing.cluster.as_ref(), pod_ip, port, &stopping.links);
        let cluster = pods.siblings.clone();
        let resolver = Resolver::system().context("DNS")?;
        let drain = stopping.links.clone();
        drain.spawn(info_span!("dns"), resolver.clone().watch(drain.clone()));
        let vouching = proven.clone();
        let patterns = publishing.publish_names.clone();
        let vouched = move |node: &_| vouching.names(node);
        let zone = Arc::new(Zone::new(publishing.zone.clone(), patterns, vouched));
        let means = (&ground, &pool, &resolver, &zone);
        let found = siblings::finder(&publishing, &server, registry.clone(), means, port, cluster)?;
        stopping.several = found.several.is_some();
        let (siblings, made) = found.several.map(|several| (several.siblings, several.made)).unzip();
        let finder = found.finder;
        let readiness = Readiness::waiting_for(&[]);
        if let Some(siblings) = &siblings {
            siblings::report(siblings.clone(), readiness.clone(), &drain);
        }
        let place = TargetDialer {
            node: None,
            own: LocalAddresses::of_interfaces(pod_ip.into_iter().collect()),
            targets: Arc::new(ArcSwap::from_pointee(allow.targets)),
            listening: [Some(&grpc), log.as_ref(), front.as_ref()]
                .into_iter()
                .flatten()
                .map(Listener::at)
                .collect(),
            resolver: resolver.clone(),
        };
        let backend = Backend::new(place, pool.clone(), metrics.clone(), stopping.clients.clone());
        let route = Route::new(finder.clone(), table.clone(), session.open_timeout, session.grace);
        let shared = PodContext {
            proven: proven.clone(),
            registry: registry.clone(),
            finder: finder.clone(),
            siblings,
            route: route.clone(),
            ground,
            pool: pool.clone(),
            stopping: stopping.begun.clone(),
            backend,
            reachable: allow.nodes.into(),
            searches: Arc::new(Semaphore::new(asked::MOST_SEARCHES)),
            moves: Arc::new(Semaphore::new(links::MOST_MOVES)),
        };
        let vet = publish::vet(&publishing, &resolver, pod_ip, (shared.siblings.clone(), port))?;
        let store = publish::store(publishing, pod_ip, &pods, (shared.siblings.clone(), port))?;
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
            finder,
            readiness,
            stopping,
        };
        admin.spawn(log, metrics_at, &pod.stopping.admin);
        pod.spawn_upkeep(acceptor.clone(), users.clone(), &pool);
        let gate = Gate {
            allow_from: ssh.allow_from,
            logins: users.map(Logins::new),
            rules: ssh.rules,
            zone: Some(zone.clone()),
        };
        let gate = Arc::new(ArcSwap::from_pointee(gate));
        if let Some(front) = front {
            let sessions = frontend::sessions(session.max, session.max_for_client);
            let settings = connect::Settings { gate, sessions, pool };
            let drain = pod.stopping.clients.clone();
            let serving =
                connect::serve((front, ssh.proxy_protocol), settings, route, metrics, drain.clone());
            drain.spawn(info_span!("ssh"), serving);
        }
        if let Some(store) = store {
            let readiness = pod.readiness.clone();
            let publisher = Publisher {
                registry: pod.registry.clone(),
                store,
                zone,
                vet,
                metrics: pod.metrics.clone(),
                tell: Box::new(move |state| readiness.note(publish::NAME, state)),
            };
            let drain = &pod.stopping.publisher;
            drain.spawn(info_span!("publisher"), publisher.run(drain.clone()));
        }
        let door = Door::new(Places::places(files::at_most(callers::CONNECTIONS, 4)));
        let (refused, refusals) = (pod.metrics.calls_refused.clone(), pod.metrics.refusals.clone());
        let entrance = Entrance { listener: grpc, door, proxies: server.proxy_protocol, refused, refusals };
        links::spawn(entrance, acceptor, made, shared);
        info!(grpc = %pod.grpc, ssh = pod.ssh.map(tracing::field::display), log = %pod.log, "pod is up");
        Ok(pod)
    }

    fn spawn_upkeep(
        &self,
        tls: Reload<tokio_rustls::rustls::ServerConfig>,
        users: Option<Reload<Users>>,
        pool: &Pool,
    ) {
        let drain = &self.stopping.links;
        drain.spawn(info_span!("tls"), tls.watch(drain.clone()));
        if let Some(users) = users {
            drain.spawn(info_span!("users"), users.watch(drain.clone()));
        }
        drain.spawn(info_span!("refusals"), self.metrics.refusals.clone().sum_up(drain.clone().begun()));
        drain.spawn(info_span!("upkeep"), self.table.clone().upkeep(pool.clone(), drain.clone()));
    }
}

fn acceptor(
    server: &config::cloud::Server,
    name: Option<&str>,
    tls: &config::cloud::Tls,
) -> anyhow::Result<Reload<tokio_rustls::rustls::ServerConfig>> {
    let min_version = match tls.min_version {
        TlsVersion::V12 => "VersionTLS12",
        TlsVersion::V13 => "VersionTLS13",
    };
    let (offer, warnings) =
        tls::TlsParams::parse(min_version, &tls.cipher_suites.join(",")).context("mode.cloud.tls")?;
    for warning in warnings {
        warn!("{warning}");
    }
    let identity = Identity { cert: server.cert.clone(), key: server.key.clone() };
    // Without the file there are no pods but this one, and nobody is asked for a certificate.
    let clients = if server.ca.exists() {
        let name = name.map(tls::server_name).transpose().context("mode.cloud.registry.name")?;
        Clients::Siblings(server.ca.clone(), name)
    } else {
        Clients::Anonymous
    };
    let server = tls::Server { identity, clients, offer, alpn: vec![b"h2".to_vec()] };
    server.load().context("mode.cloud.stream.server.cert and key")
}

fn bind(listen: config::Listen, key: &'static str) -> anyhow::Result<Option<Listener>> {
    Listener::bind_optional(listen.at, listen.implicit).context(key)
}

fn read_users(path: &std::path::Path) -> anyhow::Result<Reload<Users>> {
    let parse = |text: &[u8]| Users::parse(&String::from_utf8_lossy(text)).map_err(|e| e.to_string());
    Reload::file(path, parse).with_context(|| format!("mode.cloud.ssh.users: {}", path.display()))
}

/// Receive windows of a pod's sessions.
const WINDOWS: Windows = Windows { start: 64 * 1024, max: 4 << 20 };
