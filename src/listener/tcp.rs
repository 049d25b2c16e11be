//! The TCP listener: a port for one fixed target. Its clients send no request, so each gets a session at once.

use std::fmt;
use std::net::{Ipv6Addr, SocketAddr};
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::sync::atomic::Ordering::Relaxed;

use bytes::Bytes;
use serde::de::{Deserializer, Error};
use serde::{Deserialize, Serialize, Serializer};
use tokio::net::TcpStream;
use tracing::{Span, field, info_span, warn};

use crate::config::Diagnostics;
use crate::config::listen::{AccessConfig, AuthMethods, PortTls};
use crate::config::table::ConfigTable;
use crate::listener::admission::{Admission, HandshakeOutcome, ListenerProtocol};
use crate::listener::denial::Denial;
use crate::listener::{BoundListener, ListenerConfig, ListenerKind, ListenerSetup, ListenerTables, single};
use crate::registry::Finder;
use crate::startup::NotPrepared;
use tunnel_base::names::{NameError, NodeName, Target};
use tunnel_base::policy::canonical_ip;
use tunnel_net::accept_loop;
use tunnel_net::socket::Connection;
use tunnel_proto::frame::Category;

/// `[server.tcp."[::]:6443"]`: TCP ports of this server, each for one target at a node. Each key is an address
/// (ip:port) to listen on. The short form is a line in `[server.tcp]`: "127.0.0.1:6443" = "node1/127.0.0.1:6443".
/// Connections from outside allow_from are closed. Connections to a node that does not exist, or that rules deny, are reset.
/// The access log contains the reason. Default: none. These clients cannot send a password: if auth is "basic" in
/// `[server.connect]`, set auth = "none" here, preferably with allow_from.
#[derive(Debug, Default, Deserialize, Serialize)]
#[serde(default)]
struct TcpKeys {
    /// The target: "node/host:port" as that node dials it, so 127.0.0.1 is the node's own. Without "node/" the node that
    /// has been linked to this server for longest is used. Without one, it is the first by name of the nodes that peers
    /// have announced. If there are several nodes, that causes a warning. Required.
    ///
    /// Required: `"node1/127.0.0.1:6443"`
    target: Option<ForwardTarget>,
    /// Whether connections to the target begin with a PROXY header (v2) that contains the client's address.
    send_proxy: bool,
}

/// One entry of `[server.tcp]`: a TCP port of a server that stands for one target.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TcpListenerConfig {
    /// Address where clients connect.
    pub at: SocketAddr,
    /// The full key of the entry.
    pub key: String,
    /// The target.
    pub to: ForwardTarget,
    /// Whether the target receives a PROXY header (v2) with the client's address.
    pub send_proxy: bool,
    /// Access rules.
    pub access: AccessConfig,
}

/// A target at a node, written as `node1/127.0.0.1:6443`, or as `127.0.0.1:6443` without a node.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ForwardTarget {
    /// The node that dials; `None` means the node that has been connected for longest.
    pub node: Option<NodeName>,
    /// The target that it dials.
    pub target: Target,
}

pub(crate) const KIND: ListenerKind = ListenerKind { name: "tcp", by_address: false, is_live: true, read };

/// Reads the table. Its keys are addresses, as in SuperEdge.
fn read(tables: &mut ListenerTables<'_, '_>) -> Vec<Arc<dyn ListenerConfig>> {
    let (report, inherited) = (&mut *tables.report, &tables.inherited);
    let mut table = tables.server.table(KIND.name, report);
    let entries = table.named(TARGET, report).into_iter();
    entries.flat_map(|(name, entry)| single(port(&name, entry, inherited, report))).collect()
}

/// Reads one port. Returns `None` if the entry is unusable, which is recorded.
fn port(
    name: &str,
    mut table: ConfigTable<'_>,
    inherited: &AccessConfig,
    report: &mut Diagnostics,
) -> Option<TcpListenerConfig> {
    let at = listen(name);
    if at.is_none() {
        let expected =
            "expected an address to listen on as the key: \"ip:port\", for example \"127.0.0.1:6443\"";
        table.name_error(name, expected, report);
    }
    let keys: TcpKeys = table.fields(report);
    if !table.has(TARGET) {
        table.error(TARGET, None, "set the target, as in target = \"node1/127.0.0.1:6443\"", report);
    }
    let access = AccessConfig::read(&mut table, AUTH_METHODS, inherited, report);
    table.record(&keys, report);
    let port = at.zip(keys.target).map(|(at, to)| TcpListenerConfig {
        at,
        key: table.path().to_owned(),
        to,
        send_proxy: keys.send_proxy,
        access,
    });
    if let Some(TcpListenerConfig { at, key, to, access, .. }) = &port {
        access.warn_if_open(key.clone(), *at, AUTH_METHODS, &to.to_string(), report);
    }
    table.finish(report);
    port
}

/// Parses an address to listen on. As in Go, SuperEdge's language, the IP may be absent, which means all addresses.
fn listen(name: &str) -> Option<SocketAddr> {
    match name.strip_prefix(':') {
        Some(port) => Some((Ipv6Addr::UNSPECIFIED, port.parse().ok()?).into()),
        None => name.parse().ok(),
    }
}

impl<'de> Deserialize<'de> for ForwardTarget {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let text = String::deserialize(deserializer)?;
        let (node, target) =
            text.split_once('/').map_or((None, text.as_str()), |(node, target)| (Some(node), target));
        let node = node.map(str::parse).transpose();
        let target = target.parse().map_err(|error: NameError| {
            D::Error::custom(format_args!(
                "{error}; put the node before the target, as in node1/127.0.0.1:22"
            ))
        });
        let node =
            node.map_err(|error: NameError| D::Error::custom(format_args!("{error}; a node is optional")));
        Ok(Self { node: node?, target: target? })
    }
}

impl Serialize for ForwardTarget {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        match &self.node {
            Some(node) => serializer.collect_str(&format_args!("{node}/{}", self.target)),
            None => self.target.serialize(serializer),
        }
    }
}

impl fmt::Display for ForwardTarget {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.node {
            Some(node) => write!(f, "{} at node {node}", self.target),
            None => write!(f, "{} at the node that has been connected for longest", self.target),
        }
    }
}

/// The protocol of a TCP port is the target's, so clients cannot be asked for a password or a certificate.
const AUTH_METHODS: AuthMethods = AuthMethods { password: false, tls: PortTls::Unsupported };

/// The key that a plain text value stands for.
const TARGET: &str = "target";

impl ListenerConfig for TcpListenerConfig {
    fn name(&self) -> &'static str {
        KIND.name
    }

    fn access(&self) -> (&str, &AccessConfig) {
        (&self.key, &self.access)
    }

    fn bind(&self, setup: &mut ListenerSetup<'_>) -> Result<Vec<BoundListener>, NotPrepared> {
        let access = setup.policies.prepare(&self.key, &self.access, setup.startup);
        let listener = setup.startup.bind(&self.key, self.at);
        let Self { to: ForwardTarget { node, target }, send_proxy, .. } = self.clone();
        Ok(vec![BoundListener::tcp(KIND.name, listener?, access?, move |deps| {
            let finder = deps.finder.clone();
            Tcp { node, target, send_proxy, finder, warned: AtomicBool::new(false) }
        })])
    }
}

/// The protocol of one entry of `[server.tcp]`: forwards each connection to one target.
#[derive(Debug)]
pub struct Tcp {
    /// The node that dials. `None` means the node that has been connected longest.
    pub node: Option<NodeName>,
    /// The target that the node dials.
    pub target: Target,
    /// Whether the target receives a PROXY header (v2) with the client's address.
    pub send_proxy: bool,
    /// Finds the connected nodes.
    pub finder: Arc<Finder>,
    /// Whether the warning about several candidate nodes has been logged.
    pub warned: AtomicBool,
}

impl Tcp {
    /// Returns the node that dials for the next client.
    fn node(&self) -> Result<NodeName, Denial> {
        if let Some(node) = &self.node {
            return Ok(node.clone());
        }
        let (node, several) = self.finder.oldest_link().ok_or(Denial::NoNodeConnected)?;
        if several && !self.warned.swap(true, Relaxed) {
            warn!(
                %node,
                target = %self.target,
                hint = %format_args!("set the node in [server.tcp], as in \"{node}/{}\"", self.target),
                "several nodes connected, port uses the longest connected one"
            );
        }
        Ok(node)
    }

    /// Returns the bytes that the target receives before the client's first byte.
    fn proxy_header(&self, socket: &TcpStream, client: SocketAddr) -> Bytes {
        match socket.local_addr() {
            Ok(at) if self.send_proxy => {
                accept_loop::header(client, SocketAddr::new(canonical_ip(at.ip()), at.port()))
            }
            _ => Bytes::new(),
        }
    }
}

impl ListenerProtocol<TcpStream> for Tcp {
    type Connection = TcpStream;

    fn category(&self) -> Category {
        Category::Tcp
    }

    fn span(&self, from: SocketAddr) -> Span {
        info_span!("tcp", client = %from, trace_id = field::Empty, session = field::Empty)
    }

    async fn handshake(&self, socket: TcpStream, admission: &mut Admission) -> HandshakeOutcome<TcpStream> {
        let client = admission.from();
        let Some(opened) = admission.open_at(self.node(), &self.target, &socket).await else {
            return HandshakeOutcome::Failed { reason: "reset_while_opening", socket: None };
        };
        match opened {
            Ok(session) => {
                let buffered = self.proxy_header(&socket, client);
                HandshakeOutcome::Opened { session, socket, buffered }
            }
            Err(_) => {
                // Reset, because TCP cannot report a denial and a normal close would look like an empty response.
                socket.set_reset_on_drop(true);
                HandshakeOutcome::Closed(None)
            }
        }
    }
}
