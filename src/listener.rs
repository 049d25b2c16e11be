//! Listeners of a server for clients. [`LISTENERS`] lists the kinds; each has a file with its table of settings and its
//! ports, and with how it serves a client unless [`crate::admission`] has that.

pub mod authenticated;
pub mod connect;
pub mod egress;
pub mod http;
pub mod http_proxy;
pub mod https;
pub mod intercept;
pub mod passthrough;
pub mod tcp;

use std::any::Any;
use std::fmt;
use std::net::SocketAddr;
use std::sync::Arc;

use tokio::net::TcpStream;
use tokio::sync::watch;
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;
use tracing::info_span;

use crate::admin::readiness::Readiness;
use crate::admission::{ListenerContext, ListenerProtocol, client_handler};
use crate::config::access::AccessConfig;
use crate::config::listen_tls::Tls;
use crate::config::table::ConfigTableReader;
use crate::listener::authenticated::TlsListenerProtocol;
use crate::listener::http::NodePortConfig;
use crate::registry::Finder;
use crate::startup::tls_files::NamedFile;
use crate::startup::{NotPrepared, StartupErrorCollector};
use tunnel_base::addresses::owners::AddressClaim;
use tunnel_base::drain::Drain;
use tunnel_base::policy::Networks;
use tunnel_base::policy::ports::ConfigMapPorts;
use tunnel_net::listen::{Accept, TcpListenSocket};
use tunnel_net::reload::{FileWatcher, ReloadedValue};
use tunnel_net::tls::client_certificate::ServerTls;
use tunnel_net::tls::handshake::TlsSocket;
use tunnel_proto::frame::SessionCategory;

/// The kinds of listeners, in the order in which their tables are read.
pub const LISTENERS: &[ListenerKind] = &[
    connect::KIND, // The first, because the others inherit its access rules.
    egress::KIND,
    http_proxy::KIND,
    tcp::KIND,
    https::KIND,
    http::KIND,
    intercept::KIND,
];

/// One kind of listener.
#[derive(Debug, Clone, Copy)]
pub struct ListenerKind {
    /// The table below `[server]` that sets it, and the label `listener` of metrics and logs.
    pub name: &'static str,
    /// Whether clients may name a target by its address. Then addresses are watched in Kubernetes by default.
    pub by_address: bool,
    /// Reads the table. Returns nothing if it is absent or unusable, which is recorded. The access rules are those of a
    /// listener whose table has none.
    pub(crate) read: fn(ConfigTableReader<'_>, &mut AccessConfig) -> ListenerConfigs,
}

impl ListenerKind {
    /// Returns true if its listeners open and close when the config changes. Otherwise a change waits for a restart: the
    /// table of nftables and the mark of interception are the process's.
    pub(crate) fn is_live(&self) -> bool {
        self.name != intercept::KIND.name
    }
}

/// The settings of all listeners of a table.
pub(crate) type ListenerConfigs = Vec<Arc<dyn ListenerConfig>>;

/// Returns the only listener of a table, if it has one.
pub(crate) fn single<T: ListenerConfig>(listener: Option<T>) -> ListenerConfigs {
    listener.into_iter().map(|listener| Arc::new(listener) as Arc<dyn ListenerConfig>).collect()
}

/// The settings of a configured listener: those of one table.
pub(crate) trait ListenerConfig: Any + fmt::Debug + Send + Sync {
    /// Returns the files that it reads, except those of its access rules.
    fn files(&self) -> Vec<NamedFile> {
        Vec::new()
    }

    /// Returns the key of its table, and its access rules.
    fn access(&self) -> (&str, &AccessConfig);

    /// Returns its ports that stand for a port of every node.
    fn node_ports(&self) -> Vec<NodePortConfig> {
        Vec::new()
    }

    /// Reads its files, except those of its access rules, and binds its ports. `tls` has the TLS versions and cipher
    /// suites of the server's ports.
    fn bind(&self, tls: &Tls, startup: &mut StartupErrorCollector) -> Result<Vec<BoundPort>, NotPrepared>;
}

/// What a listener of a server is served with. All but the name, policy and drain in `context`, `proxies` and
/// `accepting` is shared by all listeners. Cheap to clone.
#[derive(Clone)]
pub(crate) struct ListenerDeps {
    /// The context of the listener, without the category of a port.
    pub(crate) context: ListenerContext,
    /// The networks of load balancers in front of its ports.
    pub(crate) proxies: Networks,
    pub(crate) finder: Arc<Finder>,
    /// The ports of nodes that are redirected here, and which of them are ports of the node's loopback.
    pub(crate) ports: watch::Receiver<ConfigMapPorts>,
    /// Returns the address claims of the token file.
    pub(crate) claims: Arc<dyn Fn() -> Vec<AddressClaim> + Send + Sync>,
    pub(crate) readiness: Readiness,
    /// Cancelled when the server begins to stop.
    pub(crate) stopping: CancellationToken,
    /// The accept loops of a listener. They end once the drain of `context` starts, and with them its ports close.
    pub(crate) accepting: TaskTracker,
    /// Holds a token while clients are redirected to a port, which must not close before.
    pub(crate) redirecting: TaskTracker,
    /// Ends once no session needs a link any more.
    pub(crate) links: Drain,
    /// Reloads files when they change.
    pub(crate) files: FileWatcher,
}

/// A bound port or socket of a listener.
pub(crate) struct BoundPort {
    /// Its address; `None` for a Unix socket.
    pub(crate) at: Option<SocketAddr>,
    /// Its address or path, for messages.
    pub(crate) shown: String,
    /// Its TLS, if it has any.
    pub(crate) tls: Option<ReloadedValue<ServerTls>>,
    /// Starts serving.
    pub(crate) spawn: Box<dyn FnOnce(&ListenerDeps) + Send>,
}

impl BoundPort {
    /// Returns a listener on a TCP port, served by `protocol`.
    pub(crate) fn tcp<P: ListenerProtocol<TcpStream>>(
        category: SessionCategory,
        listener: TcpListenSocket,
        protocol: impl FnOnce(&ListenerDeps) -> P + Send + 'static,
    ) -> Self {
        let at = listener.at();
        Self { at: Some(at), ..Self::new(category, listener, protocol) }
    }

    /// Returns a listener on a TCP port, with TLS if that is given, served by `protocol`.
    pub(crate) fn tcp_or_tls<P: ListenerProtocol<TcpStream> + ListenerProtocol<TlsSocket>>(
        category: SessionCategory,
        listener: TcpListenSocket,
        tls: Option<ReloadedValue<ServerTls>>,
        protocol: P,
    ) -> Self {
        let Some(tls) = tls else { return Self::tcp(category, listener, |_| protocol) };
        let served = tls.clone();
        let port = Self::tcp(category, listener, move |deps| {
            deps.files.watch("tls", &served);
            TlsListenerProtocol::new(protocol, served, &deps.context)
        });
        Self { tls: Some(tls), ..port }
    }

    /// Returns a listener on any kind of port, served by `protocol`.
    pub(crate) fn new<L, P>(
        category: SessionCategory,
        listener: L,
        protocol: impl FnOnce(&ListenerDeps) -> P + Send + 'static,
    ) -> Self
    where
        L: Accept + 'static,
        P: ListenerProtocol<L::AnyStream>,
    {
        let shown = listener.at().to_string();
        let spawn = Box::new(move |deps: &ListenerDeps| {
            let protocol = protocol(deps);
            let proxies = deps.proxies.clone();
            let context = ListenerContext { category, ..deps.context.clone() };
            let span = info_span!("clients", listener = context.listener);
            let serving = client_handler::run(protocol, listener, proxies, context);
            deps.context.drain.spawn(span, deps.accepting.track_future(serving));
        });
        Self { at: None, shown, tls: None, spawn }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_the_intercept_listener_waits_for_a_restart() {
        let waiting: Vec<_> = LISTENERS.iter().filter(|kind| !kind.is_live()).map(|kind| kind.name).collect();
        assert_eq!(waiting, ["intercept"]);
    }

    #[test]
    fn each_kind_of_listener_has_its_row_in_the_docs() {
        let root = std::path::Path::new(env!("CARGO_MANIFEST_DIR"));
        let document = std::fs::read_to_string(root.join("docs/README.md")).unwrap();
        let ports = std::fs::read_to_string(root.join("docs/reference/ports.md")).unwrap();
        for ListenerKind { name, .. } in LISTENERS {
            let row = format!("| [`[server.{name}]`](");
            assert!(document.contains(&row), "docs/README.md: {row}");
            let start = format!("\n| `[server.{name}");
            assert!(ports.contains(&start), "docs/reference/ports.md: {start}");
        }
    }
}
