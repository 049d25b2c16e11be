//! The TCP listener: a port for one fixed target, or a range of ports. Its clients send no request, so each gets a
//! session at once.

pub mod range;

use std::net::SocketAddr;
use std::str::FromStr;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::sync::atomic::Ordering::Relaxed;

use bytes::Bytes;
use serde::{Deserialize, Serialize};
use tokio::net::TcpStream;
use tracing::warn;

use crate::admission::denial::Denial;
use crate::admission::{Admission, AdmissionOutcome, ListenerProtocol};
use crate::config::WarningKind;
use crate::config::access::{AccessConfig, AuthMethods};
use crate::config::listen_tls::{PortTlsState, Tls};
use crate::config::table::ConfigTableReader;
use crate::listener::tcp::range::ListenPortRange;
use crate::listener::{BoundPort, ListenerConfig, ListenerConfigs, ListenerKind, single};
use crate::registry::Finder;
use crate::startup::{NotPrepared, StartupErrorCollector};
use tunnel_base::policy::canonical_ip;
use tunnel_net::proxy_protocol;
use tunnel_net::socket::Connection;
use tunnel_proto::frame::SessionCategory;
use tunnel_proto::names::{Host, NameError, NodeName, Target};
use tunnel_proto::serde_as_text;

/// `[server.tcp."[::]:6443"]`: TCP ports of this server, each for one target at a node. Each key is an address
/// (ip:port) to listen on. The short form is a line in `[server.tcp]`: "127.0.0.1:6443" = "node1/127.0.0.1:6443".
/// A key "ip:first-last" is a range of ports, and the target is that of the first. The next port reaches the next port
/// of the target, and so on: port 7010 of "0.0.0.0:7000-7099" = "node1/127.0.0.1:8000" reaches 8010. All entries
/// together may have 1000 ports.
/// Connections from outside allow_from are closed. Connections to a node that does not exist, or that rules deny, are
/// reset. The access log contains the reason. Default: none. These clients cannot send a password: if auth is "basic"
/// in `[server.connect]`, set auth = "none" here, preferably with allow_from.
#[derive(Debug, Default, Deserialize, Serialize)]
#[serde(default)]
struct TcpConfigKeys {
    /// The target: "node/host:port" as that node dials it, so 127.0.0.1 is the node's own. Without "node/" the node
    /// that has been linked to this server for longest is used. Without one, it is the first by name of the nodes that
    /// peers have announced. If there are several nodes, that causes a warning. Required.
    ///
    /// Required: `"node1/127.0.0.1:6443"`
    target: Option<TcpTarget>,
    /// Whether connections to the target begin with a PROXY header (v2) that contains the client's address.
    send_proxy: bool,
}

/// One entry of `[server.tcp]`: TCP ports of a server that each stand for one target.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TcpListenerConfig {
    /// The ports where clients connect.
    pub ports: ListenPortRange,
    /// The full key of the entry.
    pub key: String,
    /// The target of the first port.
    pub to: TcpTarget,
    /// Whether the target receives a PROXY header (v2) with the client's address.
    pub send_proxy: bool,
    /// Access rules.
    pub access: AccessConfig,
}

/// A target at a node, written as `node1/127.0.0.1:6443`, or as `127.0.0.1:6443` without a node.
#[derive(derive_more::Display, Debug, Clone, PartialEq, Eq)]
#[display("{}{target}", node.as_ref().map(|node| format!("{node}/")).unwrap_or_default())]
pub struct TcpTarget {
    /// The node that dials; `None` means the node that has been connected for longest.
    pub node: Option<NodeName>,
    /// The target that it dials.
    pub target: Target,
}

pub(crate) const KIND: ListenerKind = ListenerKind { name: "tcp", by_address: false, read };

/// Reads the table. Its keys are addresses, as in SuperEdge.
fn read(mut table: ConfigTableReader<'_>, inherited: &mut AccessConfig) -> ListenerConfigs {
    let mut listeners: Vec<TcpListenerConfig> = Vec::new();
    for (name, entry) in table.named(TARGET) {
        listeners.extend(listener(&name, entry, inherited, &listeners));
    }
    table.finish();
    listeners.into_iter().flat_map(|listener| single(Some(listener))).collect()
}

/// Reads one entry; `earlier` are those before it. Returns `None` if it is unusable, which is recorded.
fn listener(
    name: &str,
    mut table: ConfigTableReader<'_>,
    inherited: &AccessConfig,
    earlier: &[TcpListenerConfig],
) -> Option<TcpListenerConfig> {
    let ports = ports(name, earlier);
    if let Err(expected) = &ports {
        table.name_error(name, expected);
    }
    let keys: TcpConfigKeys = table.fields();
    if !table.has(TARGET) {
        table.error(TARGET, None, "set the target, as in target = \"node1/127.0.0.1:6443\"");
    }
    if let (Ok(ports), Some(to)) = (&ports, &keys.target)
        && ports.last_target(&to.target).is_none()
    {
        let expected = format!(
            "this is the target of the first of {} ports, and that of the last would exceed port 65535; choose a lower \
             target port, or a shorter range",
            ports.count()
        );
        table.error(TARGET, Some(format!("port {}", to.target.port)), expected);
    }
    let access = AccessConfig::read(&mut table, AUTH_METHODS, inherited);
    table.record(&keys);
    let listener = ports.ok().zip(keys.target).map(|(ports, to)| TcpListenerConfig {
        ports,
        key: table.path().to_owned(),
        to,
        send_proxy: keys.send_proxy,
        access,
    });
    if let Some(TcpListenerConfig { ports, key, to, access, .. }) = &listener {
        let reached = match ports.count() {
            1 => to.described(),
            count => format!("{} (other ports of this range: {})", to.described(), count - 1),
        };
        access.warn_if_open(key.clone(), ports.first(), AUTH_METHODS, &reached, &mut table.report());
        // Elsewhere node1:22 is port 22 of a node.
        if let TcpTarget { node: None, target: Target { host: Host::Name(name), port } } = to
            && !name.contains('.')
            && **name != *"localhost"
        {
            let text =
                format!("this is {}; for a node {name}, write {name}/127.0.0.1:{port}", to.described());
            table.warn(key, WarningKind::Unexpected, text);
        }
    }
    table.finish();
    listener
}

/// Parses the ports of an entry. Returns what is expected if they are invalid, too many, or a range that another entry
/// overlaps.
fn ports(name: &str, earlier: &[TcpListenerConfig]) -> Result<ListenPortRange, String> {
    let ports = ListenPortRange::parse(name)?;
    let is_range = |ports: &ListenPortRange| ports.count() > 1;
    // A port that is no range is compared with those of all listeners, when they are bound.
    let mut ranges = earlier.iter().filter(|other| is_range(&ports) || is_range(&other.ports));
    if let Some(other) = ranges.find(|other| other.ports.overlaps(ports)) {
        return Err(format!("{} has some of these ports; list each port once", other.key));
    }
    let total = earlier.iter().map(|other| other.ports.count()).sum::<usize>() + ports.count();
    if total > MAX_PORTS {
        return Err(format!(
            "up to here [server.tcp] has {total} ports, and at most {MAX_PORTS} are supported; name fewer, or use a \
             listener at which clients name the target, such as [server.connect]"
        ));
    }
    Ok(ports)
}

/// Maximum number of ports in `[server.tcp]`. Each has two open files and a task.
const MAX_PORTS: usize = 1000;

impl FromStr for TcpTarget {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let (node, target) = text.split_once('/').map_or((None, text), |(node, target)| (Some(node), target));
        let node = node.map(str::parse).transpose();
        let node = node.map_err(|error: NameError| format!("{error}; a node is optional"))?;
        let target = target.parse().map_err(|error: NameError| {
            format!("{error}; put the node before the target, as in node1/127.0.0.1:22")
        });
        Ok(Self { node, target: target? })
    }
}

serde_as_text!(TcpTarget);

impl TcpTarget {
    /// Returns it as a sentence names it.
    fn described(&self) -> String {
        match &self.node {
            Some(node) => format!("{} at node {node}", self.target),
            None => format!("{} at the node that has been connected for longest", self.target),
        }
    }
}

/// The protocol of a TCP port is the target's, so clients cannot be asked for a password or a certificate.
const AUTH_METHODS: AuthMethods = AuthMethods { password: false, tls: PortTlsState::Unsupported };

/// The key that a plain text value stands for.
const TARGET: &str = "target";

impl ListenerConfig for TcpListenerConfig {
    fn access(&self) -> (&str, &AccessConfig) {
        (&self.key, &self.access)
    }

    fn bind(&self, _tls: &Tls, startup: &mut StartupErrorCollector) -> Result<Vec<BoundPort>, NotPrepared> {
        let Self { ports, to: TcpTarget { node, target }, send_proxy, .. } = self;
        let bound = ports.with_targets(target).map(|(at, target)| {
            let listener = startup.bind(&self.key, at)?;
            let node = node.clone();
            let send_proxy = *send_proxy;
            Ok(BoundPort::tcp(SessionCategory::Tcp, listener, move |deps| {
                let finder = deps.finder.clone();
                TcpProtocol { node, target, send_proxy, finder, warned: AtomicBool::new(false) }
            }))
        });
        // All ports first, so that each error is noted.
        bound.collect::<Vec<_>>().into_iter().collect()
    }
}

/// The protocol of one entry of `[server.tcp]`: forwards each connection to one target.
#[derive(Debug)]
pub struct TcpProtocol {
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

impl TcpProtocol {
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
                proxy_protocol::header(client, SocketAddr::new(canonical_ip(at.ip()), at.port()))
            }
            _ => Bytes::new(),
        }
    }
}

impl ListenerProtocol<TcpStream> for TcpProtocol {
    async fn handshake(&self, socket: TcpStream, admission: &mut Admission) -> AdmissionOutcome {
        let client = admission.client.from;
        let Some(opened) = admission.open_at(socket.remote_reset(), self.node(), &self.target).await else {
            return AdmissionOutcome::Failed { reason: "reset_while_opening", socket: None };
        };
        match opened {
            Ok(session) => {
                let buffered = self.proxy_header(&socket, client);
                AdmissionOutcome::Opened { session, socket: Box::new(socket), buffered }
            }
            Err(_) => {
                // Reset, because TCP cannot report a denial and a normal close would look like an empty response.
                socket.set_reset_on_drop(true);
                AdmissionOutcome::Closed(None)
            }
        }
    }
}
