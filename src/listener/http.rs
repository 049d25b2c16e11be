//! The HTTP listener: a port of this server stands for one port of every node, and each request names its node. Over
//! TLS ([`https`](super::https)) it works the same.

pub mod routing;

use std::collections::BTreeMap;
use std::net::{IpAddr, Ipv6Addr, SocketAddr};
use std::sync::Arc;

use bytes::Bytes;
use educe::Educe;
use http::request::Parts;
use serde::{Deserialize, Serialize, Serializer};
use tokio::sync::watch;
use tokio_rustls::rustls::ClientConfig;

use crate::admission::basis::ClientIdentity;
use crate::admission::denial::Denial;
use crate::admission::forward::forward;
use crate::admission::requests::credentials;
use crate::admission::{Admission, AdmissionOutcome, ListenerProtocol, OpenRequest};
use crate::config::WarningKind;
use crate::config::access::{AccessConfig, AuthMethods};
use crate::config::listen_tls::{PortTlsState, Tls};
use crate::config::table::ConfigTableReader;
use crate::config::value::forms;
use crate::listener::http::routing::NodePortRouter;
use crate::listener::{BoundPort, ListenerConfig, ListenerConfigs, ListenerKind, single};
use crate::registry::Finder;
use crate::startup::{NotPrepared, StartupErrorCollector};
use tunnel_base::policy::ports::{ConfigMapPorts, PortTarget};
use tunnel_base::serde_forms::ConfigPort;
use tunnel_net::listen::TcpListenSocket;
use tunnel_net::reload::ReloadedValue;
use tunnel_net::socket::Connection;
use tunnel_proto::frame::SessionCategory;

/// `[server.http]`: ports that stand for one port of every node, without TLS. The Host of each request names the node:
/// http://node1:10255/metrics, if DNS resolves the nodes' names to this server. The headers of `[server.https]` apply,
/// from clients in allow_from. These clients cannot send a password: if auth is "basic" in `[server.connect]`, set auth
/// = "none" here.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize, Serialize, Educe)]
#[educe(Default)]
#[serde(default)]
pub struct HttpConfig {
    /// Address of the ports.
    #[serde(deserialize_with = "forms::ip")]
    #[educe(Default = Ipv6Addr::UNSPECIFIED.into())]
    listen_ip: IpAddr,
    /// The ports, and the target that a node dials for each: "port" = "host:port", or "host" as in `[server.https]`.
    /// Default: none.
    ///
    /// Example: `{ "10255" = "127.0.0.1:10255", "10264" = "host" }`
    #[serde(serialize_with = "by_text")]
    ports: NodePorts,
    /// Access rules.
    #[serde(skip)]
    pub access: AccessConfig,
}

/// The ports of `[server.http]` and `[server.https]`, and the target of each.
pub(crate) type NodePorts = BTreeMap<ConfigPort<0>, PortTarget>;

/// Writes each port as a text, since a key of TOML is one.
pub(crate) fn by_text<S: Serializer>(ports: &NodePorts, serializer: S) -> Result<S::Ok, S::Error> {
    serializer.collect_map(ports.iter().map(|(port, stands_for)| (port.0.to_string(), stands_for)))
}

/// A port of this server, and the port of each node that it stands for.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct NodePortConfig {
    /// Address where clients connect.
    pub at: SocketAddr,
    /// The full key of the entry.
    pub key: String,
    /// The target that the node dials.
    pub stands_for: PortTarget,
}

pub(crate) const KIND: ListenerKind = ListenerKind { name: "http", by_address: false, read };

/// Reads the table.
fn read(mut table: ConfigTableReader<'_>, inherited: &mut AccessConfig) -> ListenerConfigs {
    let methods = AuthMethods { password: false, tls: PortTlsState::Unsupported };
    let mut http: HttpConfig = table.fields();
    http.access = AccessConfig::read(&mut table, methods, inherited);
    warn_if_open(&table, &http.node_ports(), &http.access, methods);
    table.close_optional(&http);
    single((!http.ports.is_empty()).then_some(http))
}

/// Returns the ports of a table at this address, each with the full key of its entry.
pub(crate) fn node_ports(table: &str, ip: IpAddr, ports: &NodePorts) -> Vec<NodePortConfig> {
    let port = |(port, stands_for): (&ConfigPort<0>, &PortTarget)| NodePortConfig {
        at: SocketAddr::new(ip, port.0),
        key: format!("{table}.ports.\"{}\"", port.0),
        stands_for: stands_for.clone(),
    };
    ports.iter().map(port).collect()
}

pub(crate) fn warn_if_open(
    table: &ConfigTableReader<'_>,
    ports: &[NodePortConfig],
    access: &AccessConfig,
    proofs: AuthMethods,
) {
    if let Some(NodePortConfig { at, stands_for, .. }) = ports.first() {
        let reached = match ports.len() {
            1 => format!("{stands_for} at every node"),
            more => format!("{stands_for} at every node (other entries of this table: {})", more - 1),
        };
        access.warn_if_open(table.key("ports"), *at, proofs, &reached, &mut table.report());
    } else if table.is_present() && !table.is_wrong("ports") {
        table.warn("ports", WarningKind::Unexpected, "no port is set, so this table serves nothing");
    }
}

impl ListenerConfig for HttpConfig {
    fn access(&self) -> (&str, &AccessConfig) {
        ("server.http", &self.access)
    }

    fn node_ports(&self) -> Vec<NodePortConfig> {
        node_ports("server.http", self.listen_ip, &self.ports)
    }

    fn bind(&self, _tls: &Tls, startup: &mut StartupErrorCollector) -> Result<Vec<BoundPort>, NotPrepared> {
        let port = |(listener, stands_for)| {
            BoundPort::tcp(SessionCategory::HttpProxy, listener, |deps| {
                let finder = deps.finder.clone();
                let ports = deps.ports.clone();
                NodePortProtocol { stands_for, is_tls: false, target_tls: None, finder, ports }
            })
        };
        Ok(bind(&self.node_ports(), startup)?.into_iter().map(port).collect())
    }
}

/// Binds all ports before returning, so that each error is noted.
pub(crate) fn bind(
    ports: &[NodePortConfig],
    startup: &mut StartupErrorCollector,
) -> Result<Vec<(TcpListenSocket, PortTarget)>, NotPrepared> {
    let bound = ports.iter().map(|port| Ok((startup.bind(&port.key, port.at)?, port.stands_for.clone())));
    bound.collect::<Vec<_>>().into_iter().collect()
}

/// The protocol of a node port: what it means at the nodes, and how nodes are found.
#[derive(Debug, Clone)]
pub struct NodePortProtocol {
    /// The target that the node dials.
    pub stands_for: PortTarget,
    /// Whether clients use TLS.
    pub is_tls: bool,
    /// TLS of this server with targets, for clients that have presented a certificate; `None` if it speaks none.
    pub target_tls: Option<ReloadedValue<ClientConfig>>,
    /// Finds the connected nodes.
    pub finder: Arc<Finder>,
    /// The ports that are served on the nodes' loopback.
    pub ports: watch::Receiver<ConfigMapPorts>,
}

impl<C: Connection + 'static> ListenerProtocol<C> for NodePortProtocol {
    fn rejection_bytes(&self, denial: &Denial, trace: &str) -> Bytes {
        denial.text(trace)
    }

    async fn handshake(&self, socket: C, admission: &mut Admission) -> AdmissionOutcome {
        let tls = self.target_tls.clone();
        let server_name = admission.client.server_name.clone();
        let default_port = if self.is_tls { 443 } else { 80 };
        let context = admission.context.clone();
        let proof = admission.client.proof.clone();
        let from = admission.client.from.ip();
        // The server's certificate for targets may have rights over every node, so each client needs a certificate,
        // too.
        let shown = tls.is_none() || matches!(proof, ClientIdentity::Certificate(_));
        let parse = |head: &Parts| {
            if !shown {
                return Err(Denial::Forbidden("this port requires a client certificate".to_owned()));
            }
            let policy = context.policy.load();
            let router = NodePortRouter {
                port: self,
                server_name: server_name.as_deref(),
                may_name_target: policy.is_trusted_proxy(&proof, from),
                default_port,
                zone: &context.zone.load(),
                addresses: &context.addresses,
            };
            let Some((node, target)) = router.route(head)? else {
                return Err(if self.is_tls { Denial::NoNodeInHost } else { Denial::NoHost });
            };
            Ok(OpenRequest { node: Some(node), target, credentials: credentials(&head.headers) })
        };
        Box::pin(forward(Box::new(socket), admission, tls, &parse)).await
    }
}
