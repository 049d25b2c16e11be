//! The HTTP proxy for programs at this node, from `[mode.edge.http_proxy]`.

use std::net::SocketAddr;
use std::sync::Arc;

use tracing::{info, info_span};

use crate::config::edge::http_proxy::HttpProxy;
use crate::edge::{Edge, MAX_SESSIONS};
use crate::listener::admission::destination::EdgeRouting;
use crate::listener::admission::{ListenerContext, serve, sessions};
use crate::listener::http_proxy::Proxy;
use crate::startup::Startup;
use crate::startup::access::{AccessPolicies, ListenerAccess, ListenerPolicies};
use tunnel_base::names::NodeName;
use tunnel_base::policy::Glob;
use tunnel_net::listen::TcpAccept;
use tunnel_net::pool::Pool;

/// The proxy, bound and not serving yet.
pub(crate) struct ProxyListener {
    listener: TcpAccept,
    guard: ListenerAccess,
    gates: AccessPolicies,
    nodes: Option<Vec<Glob>>,
}

impl ProxyListener {
    /// Reads its files and binds its port; `None`: there are faults, which `startup` has noted.
    pub(crate) fn prepare(settings: &HttpProxy, startup: &mut Startup) -> Option<Self> {
        let mut gates = AccessPolicies::default();
        let guard = gates.prepare(DOOR, &settings.access, startup);
        let listener =
            startup.bind(&format!("mode.edge.http_proxy.{}", settings.listen.key), settings.listen.at);
        Some(Self { listener: listener?, guard: guard?, gates, nodes: settings.nodes.clone() })
    }

    /// Its address.
    pub(crate) fn at(&self) -> SocketAddr {
        self.listener.at()
    }

    /// Serves clients until the edge stops; its drain waits for them. Gives the gate, which may follow the settings.
    pub(crate) fn spawn(self, node: NodeName, edge: &Edge, pool: Pool) -> ListenerPolicies {
        let Self { listener, guard, gates, nodes } = self;
        info!(at = %listener.at(), "programs may ask the HTTP proxy");
        let doors = gates.watch(&edge.links);
        let proxies = guard.proxies();
        let context = ListenerContext {
            gate: guard.gate(None),
            sessions: sessions(MAX_SESSIONS, MAX_SESSIONS.div_ceil(CLIENTS)),
            pool,
            route: edge.route.clone(),
            addresses: Arc::default(),
            direct: None,
            edge_routing: Some(EdgeRouting { node, nodes }),
            metrics: edge.metrics.clone(),
            drain: edge.sessions.clone(),
        };
        edge.sessions.spawn(info_span!("clients"), serve(Proxy, listener, proxies, context));
        doors
    }
}

/// The key of its table.
pub(crate) const DOOR: &str = "mode.edge.http_proxy";
/// Clients that together may have all sessions.
const CLIENTS: usize = 4;
