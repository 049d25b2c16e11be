//! The core of a pod: its sessions, the nodes linked to it, and how it finds other pods.

use std::collections::BTreeSet;
use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;

use arc_swap::ArcSwap;
use tokio::sync::{Semaphore, mpsc, watch};
use tokio_util::sync::CancellationToken;
use tracing::info_span;

use super::context::PodContext;
use super::drive;
use super::enrol;
use super::files::PodFiles;
use super::kubernetes::{self, Pods};
use super::policies::Policies;
use super::proven::Proven;
use super::requests;
use super::siblings::{self, FinderParts};
use super::stop::Stopping;
use crate::admin::Readiness;
use crate::backend::Backend;
use crate::config::cloud::{Cloud, MEMORY};
use crate::dialer::{DirectDialer, Place, TargetDialer};
use crate::drain::Drain;
use crate::frontend::{self, ClientKey, FrontContext, Gate};
use crate::names::Instance;
use crate::net::door::Door;
use crate::net::interfaces::LocalAddresses;
use crate::net::pool::Pool;
use crate::net::resolver::Resolver;
use crate::policy::Zone;
use crate::protocol::grpc::LinkContext;
use crate::protocol::{Link, SessionLimits, SessionTable, Windows};
use crate::registry::Registry;
use crate::route::Route;
use crate::telemetry::{Metrics, third_of_memory};

/// The core, to which `cloud.rs` joins ports, front ends and the publisher.
#[derive(Debug)]
pub(super) struct Core {
    /// Shared by the tasks.
    pub(super) context: PodContext,
    /// The door to the sessions of all front ends.
    pub(super) client_sessions: Door<ClientKey>,
    /// The names of nodes outside of this pod.
    pub(super) zone: Arc<Zone>,
    /// Asks the system's DNS servers.
    pub(super) resolver: Resolver,
    /// Shown as `/readyz`.
    pub(super) readiness: Readiness,
    /// Its tasks, in the order in which they are stopped.
    pub(super) stopping: Stopping,
    /// The pods as Kubernetes reports them.
    #[cfg_attr(not(feature = "kubernetes"), expect(dead_code, reason = "it says nothing then"))]
    pub(super) pods: Pods,
    /// Addresses that no pod has, although names of nodes lead there in DNS.
    pub(super) no_pods: watch::Receiver<BTreeSet<IpAddr>>,
    /// Links that this pod has dialled to other pods; `None` if it is alone.
    pub(super) made: Option<mpsc::Receiver<Link>>,
}

impl Core {
    /// Builds the core and spawns its tasks. `port` is the gRPC port, `own` the addresses at which this pod listens.
    pub(super) fn new(settings: &Cloud, files: &PodFiles, port: u16, own: Vec<SocketAddr>) -> Self {
        let metrics = Metrics::cloud(&settings.pod_namespace, &settings.pod_name);
        let mut stopping = stopping(settings);
        let (links, readiness) = (stopping.links.clone(), Readiness::waiting_for(&[]));
        let ground = ground(settings, &metrics, &links);
        let table = ground.table.clone();
        let enrolment = enrol::start(settings, files, &readiness, &links);
        let nodes = (kubernetes::follow_nodes(settings, &links), kubernetes::agents(settings).is_some());
        let proven = Proven::start(files.tokens.clone(), enrolment.clone(), nodes, table.clone(), &links);
        let (registry, pool) = (Registry::new(metrics.clone()), Pool::new());
        let zone = zone(settings, proven.clone());
        let pods = kubernetes::follow(settings.registry.cluster.as_ref(), settings.pod_ip, port, &links);
        let no_pods = kubernetes::follow_node_names(settings, &readiness, &links);
        let joined = siblings::Joined {
            ground: &ground,
            pool: &pool,
            zone: &zone,
            tls: files.siblings.clone(),
            resolver: &files.resolver,
            dns: &files.dns,
            no_pods: &no_pods,
            registry: registry.clone(),
            port,
        };
        let cluster = pods.siblings.clone();
        let FinderParts { finder, several } = siblings::finder(&settings.registry.siblings, joined, cluster);
        stopping.several = several.is_some();
        let (siblings, made) = several.map(|several| (several.siblings, several.made)).unzip();
        if let Some(siblings) = &siblings {
            siblings::report(siblings.clone(), readiness.clone(), &links);
        }
        let policies = Policies::new(settings);
        let ports = kubernetes::follow_ports(settings, &own, &readiness, &links);
        let dialer = dialer(settings, &policies, files, own);
        let session = &settings.session;
        let context = PodContext {
            proven,
            enrolment,
            registry,
            route: Route::new(finder.clone(), table, session.open_timeout, session.grace),
            finder,
            siblings,
            ports,
            addresses: kubernetes::follow_addresses(&settings.addresses, &readiness, &links),
            direct: DirectDialer::new(for_clients(&dialer, &policies), session.open_timeout),
            backend: Backend::new(dialer, pool.clone(), metrics, stopping.clients.clone()),
            ground,
            pool,
            stopping: stopping.begun.clone(),
            policies,
            searches: Arc::new(Semaphore::new(requests::MOST_SEARCHES)),
            moves: Arc::new(Semaphore::new(drive::MOST_MOVES)),
        };
        let client_sessions = frontend::sessions(session.max, session.max_for_client);
        let resolver = files.resolver.clone();
        let core =
            Self { context, client_sessions, zone, resolver, readiness, stopping, pods, no_pods, made };
        core.spawn_upkeep(files);
        core
    }

    /// The context of a front end with this gate.
    pub(super) fn front_context(&self, gate: Arc<ArcSwap<Gate>>) -> FrontContext {
        let PodContext { pool, route, ground, addresses, direct, .. } = &self.context;
        FrontContext {
            gate,
            sessions: self.client_sessions.clone(),
            pool: pool.clone(),
            route: route.clone(),
            addresses: addresses.clone(),
            direct: Some(direct.clone()),
            own_node: None,
            metrics: ground.metrics.clone(),
            drain: self.stopping.clients.clone(),
        }
    }

    /// Spawns the tasks that follow files and remove what has expired.
    fn spawn_upkeep(&self, files: &PodFiles) {
        let (drain, LinkContext { table, metrics, .. }) = (&self.stopping.links, &self.context.ground);
        drain.spawn(info_span!("dns"), self.resolver.clone().watch(drain.clone()));
        drain.spawn(info_span!("tls"), files.tls.clone().watch(drain.clone()));
        drain.spawn(info_span!("refusals"), metrics.refusals.clone().sum_up(drain.clone().begun()));
        let give_back = || _ = tunnel_pages::trim_heap();
        let upkeep = table.clone().upkeep(self.context.pool.clone(), drain.clone(), give_back);
        drain.spawn(info_span!("upkeep"), upkeep);
        drain.spawn(info_span!("given up"), self.context.route.clone().mend_given_up(drain.clone()));
    }
}

fn stopping(settings: &Cloud) -> Stopping {
    Stopping {
        begun: CancellationToken::new(),
        several: false,
        caught: None,
        clients: Drain::new(),
        publisher: Drain::new(),
        links: Drain::new(),
        admin: Drain::new(),
        deadline: settings.session.drain,
    }
}

fn ground(settings: &Cloud, metrics: &Metrics, links: &Drain) -> LinkContext {
    LinkContext {
        table: SessionTable::new(Instance::random(), limits(settings), metrics.clone()),
        metrics: metrics.clone(),
        drain: links.clone(),
        congestion: settings.server.congestion.clone(),
    }
}

fn limits(settings: &Cloud) -> SessionLimits {
    SessionLimits {
        windows: WINDOWS,
        memory: settings.session.memory.unwrap_or_else(|| third_of_memory(MEMORY)),
        sessions: settings.session.max,
        grace: settings.session.grace,
    }
}

fn zone(settings: &Cloud, proven: Arc<Proven>) -> Arc<Zone> {
    let patterns = settings.registry.publish_names.clone();
    Arc::new(Zone::new(settings.registry.zone.clone(), patterns, move |node: &_| proven.names(node)))
}

/// Dials for edges; never one of the addresses in `listening`.
fn dialer(
    settings: &Cloud,
    policies: &Policies,
    files: &PodFiles,
    listening: Vec<SocketAddr>,
) -> TargetDialer {
    TargetDialer {
        place: Place::ForEdges,
        own: LocalAddresses::of_interfaces(settings.pod_ip.into_iter().collect()),
        targets: policies.for_edges.clone(),
        listening: listening.into_iter().collect(),
        resolver: files.resolver.clone(),
    }
}

/// The same, dialling for clients.
fn for_clients(dialer: &TargetDialer, policies: &Policies) -> TargetDialer {
    TargetDialer { place: Place::ForClients, targets: policies.for_clients.clone(), ..dialer.clone() }
}

/// Receive windows of a pod's sessions in bytes.
const WINDOWS: Windows = Windows { start: 64 * 1024, max: 4 << 20 };
