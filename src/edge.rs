//! Builds and runs an edge.

mod csr;
mod files;
mod keeper;
mod link_dialer;
mod proxy;

use std::future::Future;
use std::net::SocketAddr;
use std::sync::atomic::AtomicUsize;
use std::sync::{Arc, Once};
use std::time::Duration;

use arc_swap::ArcSwap;
use futures_util::FutureExt as _;
use tokio::sync::Notify;
use tokio::time::{Instant, sleep, sleep_until};
use tracing::{info, info_span, warn};

use csr::OwnCertificate;
use files::{EdgeFiles, Ports, prepare};
use keeper::{Keeper, give_back};
pub use link_dialer::tls_remedy;
use link_dialer::{KnownAddresses, LinkDialer};
use proxy::ProxyPort;

use crate::admin::{Admin, Clock, EdgeView, Listeners, Program, Readiness, Streams, Viewers};
use crate::backend::Backend;
use crate::config::edge::{EdgeSettings as Settings, MEMORY};
use crate::dialer::{Place, TargetDialer};
use crate::drain::{Drain, Drained};
use crate::names::Instance;
use crate::net::interfaces::LocalAddresses;
use crate::net::listen::Listener;
use crate::net::pool::Pool;
use crate::policy::Targets;
use crate::protocol::grpc::LinkContext;
use crate::protocol::{Code, Refusal, SessionLimits, SessionTable, Windows};
use crate::registry::Uplinks;
use crate::route::Route;
use crate::startup::{ConfigFile, Doors, StartFaults, Startup};
use crate::telemetry::{LogLevel, Metrics, third_of_memory};

/// Where an edge listens.
#[derive(Debug, Clone)]
pub struct EdgeBound {
    /// Health, log level, metrics; none if the implicit port could not be had.
    pub log: Option<SocketAddr>,
    /// Metrics alone.
    pub metrics: Option<SocketAddr>,
    /// gRPC's debugging port.
    pub channelz: Option<SocketAddr>,
    /// The HTTP proxy.
    pub proxy: Option<SocketAddr>,
}

/// A running edge.
#[derive(Debug)]
pub struct Edge {
    /// Where it listens.
    pub bound: EdgeBound,
    /// The numbers.
    pub metrics: Metrics,
    /// The sessions.
    pub table: Arc<SessionTable>,
    /// The way to other nodes and to the cloud.
    pub route: Route,
    targets: Arc<ArcSwap<Targets>>,
    doors: Doors,
    readiness: Readiness,
    uplinks: Arc<Uplinks>,
    sessions: Drain,
    links: Drain,
    admin: Drain,
    deadline: Duration,
}

impl Edge {
    /// Reads the files that the settings name, binds the admin port, then keeps a link to the cloud.
    ///
    /// # Errors
    ///
    /// Every file that will not do, and every port that was asked for and cannot be had. Nothing runs then.
    pub fn start(settings: Settings, level: Option<LogLevel>) -> Result<Self, StartFaults> {
        let mut startup = Startup::default();
        let prepared = prepare(&settings, &mut startup);
        let (files, ports, proxy, (viewers, gates)) = startup.finish(prepared)?;
        let mut edge = Self::new(&settings, &ports, proxy.as_ref().map(ProxyPort::at));
        gates.watch(&edge.links);
        let level_from_anywhere = !settings.client.log_listen.is_local();
        let pool = Pool::new();
        if let Some(proxy) = proxy {
            edge.doors = proxy.spawn(settings.client.node.clone(), &edge, pool.clone());
        }
        let (ca, cert) = (settings.client.ca.clone(), settings.https.identity.clone().map(|(cert, _)| cert));
        let csr = settings.csr.clone();
        let keeper = edge.keeper(settings, files, pool.clone());
        edge.spawn_upkeep(&keeper, pool);
        if let Some(csr) = csr {
            let told = keeper.clone();
            csr::keep(csr, &keeper.dialer.node, &edge.links, move |of, state| told.certified(of, state));
        }
        edge.links.spawn(info_span!("network"), keeper.clone().follow_network());
        edge.links.spawn(info_span!("link", node = %keeper.dialer.node), keeper.keep());
        let listeners = Listeners {
            log: ports.log,
            metrics: ports.metrics,
            local: ports.admin,
            channelz: ports.channelz,
            grpc: None,
        };
        let admin = edge.admin(viewers, level, level_from_anywhere);
        admin.spawn(listeners, &edge.admin);
        let shown = cert.iter().map(|cert| ("mode.edge.https.cert", cert.as_path())).collect();
        admin.follow_certificates(shown, vec![("mode.edge.stream.client.cert", ca.as_path())], &edge.admin);
        if let Some(log) = edge.bound.log {
            info!(%log, "edge is up");
        }
        Ok(edge)
    }

    /// Reads the config again when it changes: who may reach what counts for whoever comes next.
    pub fn follow(&self, config: ConfigFile) {
        let (targets, doors) = (self.targets.clone(), self.doors.clone());
        let apply = move |settings: &Settings| {
            targets.store(Arc::new(settings.targets.clone()));
            if let Some(proxy) = &settings.http_proxy {
                doors.apply(&[(proxy::DOOR, &proxy.access)]);
            }
        };
        config.follow(Settings::examine, &self.links, apply);
    }

    /// Looks for all that is in the way of a start, and starts nothing.
    pub fn check(settings: &Settings, startup: &mut Startup) {
        prepare(settings, startup);
    }

    /// The core, which nothing is joined to yet.
    fn new(
        Settings { client, session, targets, .. }: &Settings,
        ports: &Ports,
        proxy: Option<SocketAddr>,
    ) -> Self {
        let metrics = Metrics::edge();
        let limits = SessionLimits {
            windows: WINDOWS,
            memory: session.memory.unwrap_or_else(|| third_of_memory(MEMORY)),
            sessions: MOST_SESSIONS,
            grace: session.grace,
        };
        let table = SessionTable::new(Instance::random(), limits, metrics.clone());
        let uplinks = Uplinks::new(client.node.clone());
        Self {
            bound: EdgeBound {
                log: ports.log.as_ref().map(Listener::at),
                metrics: ports.metrics.as_ref().map(Listener::at),
                channelz: ports.channelz.as_ref().map(Listener::at),
                proxy,
            },
            route: Route::from_edge(uplinks.clone(), table.clone(), OPEN_TIMEOUT, session.grace),
            metrics,
            table,
            targets: Arc::new(ArcSwap::from_pointee(targets.clone())),
            doors: Doors::default(),
            readiness: Readiness::waiting_for(&[LINK]),
            uplinks,
            sessions: Drain::new(),
            links: Drain::new(),
            admin: Drain::new(),
            deadline: session.drain,
        }
    }

    /// What keeps the link to the cloud, and serves what comes over it.
    fn keeper(&self, settings: Settings, files: EdgeFiles, pool: Pool) -> Arc<Keeper> {
        let Settings { client, session, own, csr, .. } = settings;
        let EdgeFiles { tls, servers, targets: target_tls, tokens, proxy, resolver } = files;
        target_tls.watch(&self.links);
        let dialer = TargetDialer {
            place: Place::Node(client.node.clone()),
            own: LocalAddresses::of_interfaces(own),
            targets: self.targets.clone(),
            // Not the one for metrics: it is read-only, and so that others reach it.
            listening: [self.bound.log, self.bound.channelz, self.bound.proxy]
                .into_iter()
                .flatten()
                .collect(),
            resolver: resolver.clone(),
        };
        let ground = LinkContext {
            table: self.table.clone(),
            metrics: self.metrics.clone(),
            drain: self.links.clone(),
            congestion: client.congestion,
        };
        let cloud = LinkDialer {
            node: client.node,
            ips: client.ips,
            servers,
            tokens,
            turn: AtomicUsize::new(0),
            tls,
            own: csr.map(|csr| OwnCertificate::new(csr.file, client.ca)),
            proxy,
            known: KnownAddresses::new(resolver, session.grace, self.links.clone()),
            pool: pool.clone(),
            ground: ground.clone(),
        };
        Arc::new(Keeper {
            dialer: cloud,
            ground,
            backend: Backend::new(dialer, pool, self.metrics.clone(), self.sessions.clone())
                .with_tls(target_tls),
            sessions: self.sessions.clone(),
            readiness: self.readiness.clone(),
            uplinks: self.uplinks.clone(),
            route: self.route.clone(),
            freed: Notify::new(),
            started: Once::new(),
        })
    }

    /// Follows files, and tidies up.
    fn spawn_upkeep(&self, keeper: &Keeper, pool: Pool) {
        let links = &self.links;
        let dialer = &keeper.dialer;
        links.spawn(info_span!("token"), dialer.tokens.clone().watch(links.clone()));
        links.spawn(info_span!("tls"), dialer.tls.clone().watch(links.clone()));
        links.spawn(info_span!("dns"), dialer.known.resolver.clone().watch(links.clone()));
        links.spawn(info_span!("refusals"), self.metrics.refusals.clone().sum_up(links.clone().begun()));
        links.spawn(info_span!("upkeep"), self.table.clone().upkeep(pool, links.clone(), give_back));
        links.spawn(info_span!("given up"), self.route.clone().mend_given_up(links.clone()));
    }

    fn admin(&self, viewers: Viewers, level: Option<LogLevel>, level_from_anywhere: bool) -> Admin {
        let view = EdgeView { uplinks: self.uplinks.clone(), table: self.table.clone() };
        Admin {
            side: Program::Edge(view),
            clock: Clock::now(),
            viewers,
            streams: Streams::default(),
            metrics: self.metrics.clone(),
            readiness: self.readiness.clone(),
            level,
            level_from_anywhere,
        }
    }

    /// Stops: not ready, no new sessions, those that run until the deadline or until `at_once` completes.
    pub async fn stop(self, at_once: impl Future<Output = ()>) -> Drained {
        self.readiness.set(RUNNING, Err("stopping".into()));
        info!(sessions = self.table.len(), deadline = ?self.deadline, "stopping: no new sessions, waiting for those that run");
        let (at_once, until) = (at_once.shared(), Instant::now() + self.deadline);
        let why = Refusal::new(Code::Busy, "the edge is stopping");
        let before_cut = async {
            self.table.reset_all(&why);
            sleep(FLUSH_TIMEOUT).await;
            self.table.last_frames_sent().await;
        };
        let drained = self.sessions.finish_after(self.deadline, at_once.clone(), before_cut).await;
        if let Drained::Cut(left) = drained {
            warn!(left, "deadline over: sessions are cut");
        }
        // The last bytes of targets are still on their way.
        tokio::select! {
            () = self.table.delivered() => {}
            () = sleep_until(until) => {}
            () = at_once => {}
        }
        self.table.reset_all(&why);
        self.links.begin();
        sleep(FLUSH_TIMEOUT).await;
        self.table.last_frames_sent().await;
        self.uplinks.close_all();
        self.links.finish(CLOSE_TIMEOUT, std::future::pending()).await;
        self.admin.finish(CLOSE_TIMEOUT, std::future::pending()).await;
        drained
    }
}

/// How long opening a session from here may take.
const OPEN_TIMEOUT: Duration = Duration::from_secs(12);
/// Condition of readiness: there is a link.
const LINK: &str = "link";
/// Shown beside readiness: another machine has our name, too.
const NAME: &str = "name";
/// Condition of readiness: not stopping.
const RUNNING: &str = "running";
/// Receive windows of an edge's sessions: a target on loopback or in the same network takes what comes. The largest is as
/// a pod's: 100 Mbit/s at 300 ms.
const WINDOWS: Windows = Windows { start: 32 * 1024, max: 4 << 20 };
/// Sessions at once; each costs a few KiB, and the cloud has its own limit.
const MOST_SESSIONS: usize = 20_000;
/// For sessions to end by themselves once they know the cause, and for the last resets to leave before the link is
/// closed.
const FLUSH_TIMEOUT: Duration = Duration::from_millis(100);
/// For connections to end by themselves at the very end.
const CLOSE_TIMEOUT: Duration = Duration::from_secs(3);
