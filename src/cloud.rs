//! Builds and runs a pod.

mod asked;
mod bridge;
mod callers;
mod connect;
mod context;
mod core;
mod files;
mod kubernetes;
mod links;
mod ports;
mod proven;
mod publish;
mod siblings;
mod stop;

use std::net::SocketAddr;
use std::sync::Arc;

use tracing::info;

use self::core::Core;
use files::Files;
use ports::{ClientPort, Ports};
use stop::Stopping;

use crate::admin::{Admin, Readiness, Side};
use crate::config::cloud::Cloud;
use crate::net::listen::Listener;
use crate::protocol::SessionTable;
use crate::registry::{Finder, Registry};
use crate::startup::{Faults, Startup};
use crate::telemetry::{LogLevel, Metrics};

/// A running pod: its addresses, and how to stop it.
#[derive(Debug)]
pub struct Pod {
    /// Address of the port that edges dial.
    pub grpc: SocketAddr,
    /// Address of the CONNECT front end; `None` if the default port could not be had.
    pub ssh: Option<SocketAddr>,
    /// Address of the port for health, log level and metrics.
    pub log: SocketAddr,
    /// Address of the port for metrics alone.
    pub metrics_at: Option<SocketAddr>,
    /// Its metrics.
    pub metrics: Metrics,
    /// The nodes that are linked here.
    pub registry: Arc<Registry>,
    /// The sessions.
    pub table: Arc<SessionTable>,
    finder: Arc<Finder>,
    readiness: Readiness,
    stopping: Stopping,
}

/// What the settings name, had before anything runs.
struct Prepared {
    files: Files,
    ports: Ports,
    front_ends: Vec<ClientPort>,
}

impl Pod {
    /// Reads the files that the settings name, binds every port, then serves.
    ///
    /// # Errors
    ///
    /// Every file that cannot be used, and every configured port that cannot be bound. Nothing runs then.
    pub fn start(settings: Cloud, level: Option<LogLevel>) -> Result<Self, Faults> {
        let mut startup = Startup::default();
        let prepared = Prepared::new(&settings, &mut startup);
        let Prepared { files, ports, front_ends } = startup.finish(prepared)?;
        let port = ports.grpc.at().port();
        let core = Core::new(&settings, &files, port, ports.own(&front_ends));
        let ssh = front_ends.iter().find(|end| end.name == connect::NAME).and_then(|end| end.at);
        for front_end in front_ends {
            (front_end.spawn)(&core);
        }
        publish::spawn(&settings, files.dns, &core, port);
        let pod = Self {
            grpc: ports.grpc.at(),
            ssh,
            log: ports.log.as_ref().map_or(settings.server.log_listen.at, Listener::at),
            metrics_at: ports.metrics.as_ref().map(Listener::at),
            metrics: core.context.ground.metrics.clone(),
            registry: core.context.registry.clone(),
            table: core.context.ground.table.clone(),
            finder: core.context.finder.clone(),
            readiness: core.readiness,
            stopping: core.stopping,
        };
        let admin = pod.admin(level, !settings.server.log_listen.is_local());
        admin.spawn(ports.log, ports.metrics, &pod.stopping.admin);
        let proxies = settings.server.proxy_protocol;
        links::spawn(ports.grpc, proxies, files.tls, core.made, core.context);
        info!(grpc = %pod.grpc, ssh = pod.ssh.map(tracing::field::display), log = %pod.log, "pod is up");
        Ok(pod)
    }

    /// Finds all faults that would prevent a start, and starts nothing.
    pub fn check(settings: &Cloud, startup: &mut Startup) {
        Prepared::new(settings, startup);
    }

    fn admin(&self, level: Option<LogLevel>, level_from_anywhere: bool) -> Admin {
        let nodes = self.registry.clone();
        Admin {
            side: Side::Cloud(Arc::new(move || nodes.nodes())),
            metrics: self.metrics.clone(),
            readiness: self.readiness.clone(),
            level,
            level_from_anywhere,
        }
    }
}

impl Prepared {
    /// `None`: there are faults, which `startup` has noted.
    fn new(settings: &Cloud, startup: &mut Startup) -> Option<Self> {
        let files = Files::read(settings, startup);
        let ports = Ports::bind(settings, startup);
        // A line for each.
        let front_ends = [connect::prepare(settings, startup)];
        let front_ends = front_ends.into_iter().collect::<Option<Vec<_>>>();
        Some(Self { files: files?, ports: ports?, front_ends: front_ends? })
    }
}
