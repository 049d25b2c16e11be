//! The HTTP proxy for programs at this node, configured in `[edge.http_proxy]`.

use std::net::SocketAddr;
use std::sync::Arc;

use tracing::{info, info_span};

use crate::config::edge::http_proxy::HttpProxyConfig;
use crate::edge::{Edge, MAX_SESSIONS};
use crate::listener::access::{AccessPolicyBuilder, ListenerAccess, ListenerPolicies};
use crate::listener::admission::destination::EdgeRouting;
use crate::listener::admission::{ListenerContext, serve, sessions};
use crate::listener::http_proxy::{self, Proxy};
use crate::startup::Startup;
use tunnel_base::names::NodeName;
use tunnel_base::policy::Glob;
use tunnel_net::listen::TcpAccept;
use tunnel_net::pool::Pool;

/// The proxy, bound but not serving yet.
pub(crate) struct ProxyListener {
    listener: TcpAccept,
    guard: ListenerAccess,
    policies: AccessPolicyBuilder,
    nodes: Option<Vec<Glob>>,
}

impl ProxyListener {
    /// Reads the proxy's files and binds its port. Returns `None` on errors, which `startup` has collected.
    pub(crate) fn prepare(settings: &HttpProxyConfig, startup: &mut Startup) -> Option<Self> {
        let mut policies = AccessPolicyBuilder::default();
        let guard = policies.prepare(KEY, &settings.access, startup);
        let listener = startup.bind(&format!("edge.http_proxy.{}", settings.listen.key), settings.listen.at);
        Some(Self { listener: listener?, guard: guard?, policies, nodes: settings.nodes.clone() })
    }

    /// Returns the listening address.
    pub(crate) fn at(&self) -> SocketAddr {
        self.listener.at()
    }

    /// Starts serving clients until the edge stops; its drain waits for them. Returns the access policy, which can be
    /// reloaded.
    pub(crate) fn spawn(self, node: NodeName, edge: &Edge, pool: Pool) -> ListenerPolicies {
        let Self { listener, guard, policies, nodes } = self;
        info!(local_addr = %listener.at(), "HTTP proxy started");
        let listener_policies = policies.watch(&edge.links);
        let proxies = guard.proxies();
        let context = ListenerContext {
            listener: http_proxy::KIND.name,
            policy: guard.policy(None),
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
        listener_policies
    }
}

/// Key of the config table.
pub(crate) const KEY: &str = "edge.http_proxy";
/// Number of clients that together may use all sessions.
const CLIENTS: usize = 4;
