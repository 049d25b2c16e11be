//! Builds and runs a pod.

mod balance;
mod bridge;
mod callers;
mod certificates;
mod connect;
mod context;
mod core;
mod csr;
mod drive;
mod egress;
mod enrol;
mod etcd;
mod files;
mod https;
mod interactive;
mod intercept;
mod kubernetes;
mod links;
mod policies;
mod ports;
mod proven;
mod proxy;
mod publish;
mod requests;
mod siblings;
mod stop;
mod tcp;
mod unshaken;

use std::net::SocketAddr;
use std::sync::Arc;

use tracing::info;

use self::core::Core;
pub use csr::Issued;
use files::PodFiles;
use intercept::Interception;
use policies::Policies;
use ports::{ClientPort, Ports};
use stop::Stopping;

use crate::admin::{Admin, Clock, Listeners, PodView, Program, Readiness, Streams, Viewers};
use crate::config::cloud::Cloud;
use crate::enrol::Enrolment;
use crate::frontend::{Module, Ssh};
use crate::net::listen::Listener;
use crate::protocol::SessionTable;
use crate::registry::{Finder, Registry};
use crate::startup::{ConfigFile, Doors, Gates, StartFaults, Startup};
use crate::telemetry::{LogLevel, Metrics};

/// Where a pod listens.
#[derive(Debug, Clone)]
pub struct PodBound {
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
pub struct Pod {
    /// Where it listens.
    pub bound: PodBound,
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
    stopping: Stopping,
    policies: Policies,
    doors: Doors,
}

/// What the settings name, had before anything runs.
struct Prepared {
    files: PodFiles,
    ports: Ports,
    gates: Gates,
    client_ports: Vec<ClientPort>,
    interception: Option<Interception>,
    viewers: Viewers,
}

/// From the settings of a module to its ports; `None`: something is wrong, and noted.
type Prepare = fn(&Cloud, &mut Gates, &mut Startup) -> Option<Vec<ClientPort>>;

/// The name of the front end for CONNECT.
const CONNECT: &str = <Ssh as Module>::NAME;

/// The modules that clients come to, a line for each.
const MODULES: [Prepare; 6] =
    [connect::prepare, egress::prepare, proxy::prepare, tcp::prepare, https::prepare, https::prepare_plain];

impl Pod {
    /// Reads the files that the settings name, binds every port, then serves.
    ///
    /// # Errors
    ///
    /// Every file that cannot be used, and every configured port that cannot be bound. Nothing runs then.
    pub fn start(settings: Cloud, level: Option<LogLevel>) -> Result<Self, StartFaults> {
        let mut startup = Startup::default();
        let prepared = Prepared::new(&settings, &mut startup);
        let Prepared { files, ports, gates, client_ports, interception, viewers } =
            startup.finish(prepared)?;
        let port = ports.grpc.at().port();
        interception.iter().for_each(Interception::mark_own);
        let mut core = Core::new(&settings, &files, port, ports.own(&client_ports));
        let bound = PodBound {
            grpc: ports.grpc.at(),
            clients: client_ports.iter().filter_map(|port| Some((port.name, port.at?))).collect(),
            log: ports.log.as_ref().map_or(settings.server.log_listen.at, Listener::at),
            metrics: ports.metrics.as_ref().map(Listener::at),
            channelz: ports.channelz.as_ref().map(Listener::at),
        };
        let doors = gates.watch(&core.stopping.links);
        for port in client_ports {
            (port.spawn)(&core);
        }
        core.stopping.caught = interception.map(|interception| interception.spawn(&core, &settings));
        publish::spawn(&settings, files.dns, &core, port);
        let pod = Self {
            bound,
            metrics: core.context.ground.metrics.clone(),
            registry: core.context.registry.clone(),
            table: core.context.ground.table.clone(),
            enrolment: core.context.enrolment.clone(),
            finder: core.context.finder.clone(),
            readiness: core.readiness,
            stopping: core.stopping,
            policies: core.context.policies.clone(),
            doors,
        };
        let view = PodView {
            registry: pod.registry.clone(),
            table: pod.table.clone(),
            siblings: core.context.siblings.clone(),
            publishes: settings.registry.publish.name(),
            enrolment: core.context.enrolment.clone(),
            port,
        };
        let admin = pod.admin(view, viewers, level, !settings.server.log_listen.is_local());
        let listeners = Listeners {
            log: ports.log,
            metrics: ports.metrics,
            local: ports.admin,
            channelz: ports.channelz,
            grpc: Some(pod.bound.grpc),
        };
        admin.spawn(listeners, &pod.stopping.admin);
        admin.follow_certificates(settings.certificates(), settings.authorities(), &pod.stopping.admin);
        balance::spawn(&core.context, &settings);
        let proxies = settings.server.proxy_protocol;
        links::spawn(ports.grpc, proxies, files.tls, core.made, core.context);
        let PodBound { grpc, log, .. } = &pod.bound;
        info!(%grpc, ssh = pod.bound.connect().map(tracing::field::display), %log, "pod is up");
        Ok(pod)
    }

    /// Reads the config again when it changes: who may reach what counts for whoever comes next.
    pub fn follow(&self, config: ConfigFile) {
        let (policies, doors) = (self.policies.clone(), self.doors.clone());
        let apply = move |settings: &Cloud| policies.apply(settings, &doors);
        config.follow(Cloud::examine, &self.stopping.links, apply);
    }

    /// Finds all faults that would prevent a start, and starts nothing.
    pub fn check(settings: &Cloud, startup: &mut Startup) {
        Prepared::new(settings, startup);
    }

    fn admin(
        &self,
        view: PodView,
        viewers: Viewers,
        level: Option<LogLevel>,
        level_from_anywhere: bool,
    ) -> Admin {
        Admin {
            side: Program::Cloud(view),
            clock: Clock::now(),
            viewers,
            streams: Streams::default(),
            metrics: self.metrics.clone(),
            readiness: self.readiness.clone(),
            level,
            level_from_anywhere,
        }
    }
}

impl PodBound {
    /// Address of the CONNECT front end; `None` if the default port could not be had.
    pub fn connect(&self) -> Option<SocketAddr> {
        self.clients.iter().find(|(name, _)| *name == CONNECT).map(|(_, at)| *at)
    }
}

impl Prepared {
    /// `None`: there are faults, which `startup` has noted.
    fn new(settings: &Cloud, startup: &mut Startup) -> Option<Self> {
        let files = PodFiles::read(settings, startup);
        let ports = Ports::bind(settings, startup);
        let mut gates = Gates::default();
        let viewers = gates.viewers(&settings.admin, startup);
        let prepared = MODULES.map(|prepare| prepare(settings, &mut gates, startup));
        let caught = intercept::prepare(settings, &mut gates, startup);
        let client_ports = prepared.into_iter().collect::<Option<Vec<_>>>();
        let (more, interception) = caught?;
        let client_ports = client_ports?.into_iter().flatten().chain(more).collect();
        Some(Self { files: files?, ports: ports?, gates, client_ports, interception, viewers: viewers? })
    }
}
