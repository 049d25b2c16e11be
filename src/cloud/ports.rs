//! The ports of a pod, bound before anything runs.

use std::net::SocketAddr;

use tokio::net::TcpStream;
use tracing::{info, info_span};

use super::core::Core;
use crate::config::Listen;
use crate::config::cloud::Cloud;
use crate::frontend::{FrontEnd, serve};
use crate::net::listen::{Accept, Listener, LocalListener};
use crate::startup::{Guard, Startup};

/// The ports for edges and operators.
#[derive(Debug)]
pub(super) struct Ports {
    /// gRPC, for edges and other pods.
    pub(super) grpc: Listener,
    /// Health, log level, metrics; `None` if the default port could not be had.
    pub(super) log: Option<Listener>,
    /// Metrics alone.
    pub(super) metrics: Option<Listener>,
    /// For gRPC's debugging clients.
    pub(super) channelz: Option<Listener>,
    /// For commands of this machine.
    pub(super) admin: Option<LocalListener>,
}

/// A port for clients, with what its front end needs of settings and files.
pub(super) struct ClientPort {
    /// Its front end's name.
    pub(super) name: &'static str,
    /// Its address; `None` for a unix socket.
    pub(super) at: Option<SocketAddr>,
    /// Spawns its front end.
    pub(super) spawn: Box<dyn FnOnce(&Core) + Send>,
}

impl ClientPort {
    /// A TCP port behind which `front_end` serves.
    pub(super) fn tcp<F>(
        listener: Listener,
        guard: Guard,
        front_end: impl FnOnce(&Core) -> F + Send + 'static,
    ) -> Self
    where
        F: FrontEnd<TcpStream>,
    {
        let at = listener.at();
        Self { at: Some(at), ..Self::new(listener, guard, front_end) }
    }

    /// A port of any kind behind which `front_end` serves.
    pub(super) fn new<L, F>(
        listener: L,
        guard: Guard,
        front_end: impl FnOnce(&Core) -> F + Send + 'static,
    ) -> Self
    where
        L: Accept + 'static,
        F: FrontEnd<L::Stream>,
    {
        let spawn = move |core: &Core| {
            info!(module = F::NAME, at = %listener.at(), "clients may come in");
            let (proxies, front_end) = (guard.proxies(), front_end(core));
            let serving =
                serve(front_end, listener, proxies, core.front_context(guard.gate(Some(core.zone.clone()))));
            core.stopping.clients.spawn(info_span!("clients", module = F::NAME), serving);
        };
        Self { name: F::NAME, at: None, spawn: Box::new(spawn) }
    }
}

impl Ports {
    /// Binds all of them; `None`: one cannot be had, which `startup` has noted.
    pub(super) fn bind(settings: &Cloud, startup: &mut Startup) -> Option<Self> {
        let server = &settings.server;
        let mut bind = |Listen { at, key, .. }| startup.bind(&format!("{TABLE}.{key}"), at);
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
    pub(super) fn own(&self, front_ends: &[ClientPort]) -> Vec<SocketAddr> {
        let more = self.log.iter().chain(&self.channelz).map(Listener::at);
        [self.grpc.at()].into_iter().chain(more).chain(front_ends.iter().filter_map(|end| end.at)).collect()
    }
}

const TABLE: &str = "mode.cloud.stream.server";
