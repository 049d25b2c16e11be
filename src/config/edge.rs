//! Tables of an edge's config, except those of its listener.

pub mod csr;

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::str::FromStr;
use std::sync::Arc;
use std::time::Duration;

use educe::Educe;
use serde::de::{Deserializer, Error};
use serde::{Deserialize, Serialize, Serializer};

use crate::config::admin_ports::AdminPorts;
use crate::config::table::ConfigTableReader;
use crate::config::value::forms::{self, ByteSize, FilePath, Millis};
use crate::config::{self, DAY, MIN_MEMORY, ProxyVariables, SecretString, WarningKind, listen_tls, value};
use tunnel_base::policy::targets::Targets;
use tunnel_proto::names::{Host, NameError, NodeName, Target};

/// `[edge.uplink]`: the servers that an edge dials, its identity, and its ports for operators.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize, Serialize, Educe)]
#[educe(Default)]
#[serde(default)]
pub struct UplinkConfig {
    /// Kubernetes name of this node, which clients use to reach it. Default: NODE_NAME of the environment. One of the
    /// two is required.
    ///
    /// Example: `"edge-1"`
    #[educe(Default = NodeName::none())]
    pub node: NodeName,
    /// Token of this node, as in the servers' token file. No default; set token or token_file, or enabled = true in
    /// `[edge.csr]`.
    ///
    /// Example: `"32 random letters and digits"`
    pub token: Option<SecretString>,
    /// File that contains only the token, or two tokens, one a line, which are tried in turn while the servers change
    /// from the old one to the new one. Re-read when it changes. No default.
    ///
    /// Required: `"/etc/tunnel/token/token"`
    pub token_file: Option<FilePath>,
    /// File (PEM) of the CAs that may sign the servers' certificate. Re-read when it changes.
    #[educe(Default = config::CA.into())]
    pub ca: FilePath,
    /// Name or address that the certificate of every server must contain. Default: the host of each entry of servers.
    ///
    /// Example: `"tunnel.cloud.io"`
    #[serde(deserialize_with = "server_name")]
    pub tls_server_name: Option<Host>,
    /// Addresses (host:port) of servers, the preferred one first. If no link can be made to one, the next is tried. The
    /// addresses before it are tried again every minute. Names are resolved for each dial, by /etc/hosts or DNS. While
    /// DNS fails, the edge dials the last known addresses. If DNS answers that a name does not exist, it does so for
    /// the resume_timeout of `[edge.session]`. Where HTTP/2 does not pass, the link is inside of a WebSocket; "wss://"
    /// before an address requires that from the start. Required.
    ///
    /// Required: `["tunnel.example.org:9000"]`
    pub servers: Vec<ServerEntry>,
    /// Files (PEM) of CAs, each for an entry of servers. A proxy there that ends TLS may present a certificate from them,
    /// as well as from a CA of the system or of ca. Only the TLS around a WebSocket to that server trusts them. Read for
    /// each link. Default: none.
    ///
    /// Example: `{ "proxy.example.org:443" = "/etc/tunnel/certs/proxy-ca.crt" }`
    pub websocket_ca: BTreeMap<String, FilePath>,
    /// The ports for operators.
    #[serde(skip)]
    pub ports: AdminPorts,
    /// The kernel's congestion control for the link, one of /proc/sys/net/ipv4/tcp_allowed_congestion_control. "bbr"
    /// handles packet loss better than "cubic". But once in ten seconds of bulk transfer it pauses for 0.2 s and one or
    /// two RTTs, for keystrokes too. An edge's interactive link next to a bulk link always uses "cubic", or "reno" if
    /// that is not allowed. Default: the system's, net.ipv4.tcp_congestion_control.
    ///
    /// Example: `"bbr"`
    #[serde(deserialize_with = "forms::filled_text")]
    pub congestion: Option<String>,
    /// The proxy to dial through.
    #[serde(skip)]
    pub proxy: ProxyVariables,
}

impl UplinkConfig {
    /// Returns the servers, each with the name that its certificate must contain, and the CAs of its proxy.
    pub fn server_addresses(&self) -> impl Iterator<Item = ServerAddress> {
        self.servers.iter().map(|server| server.address(self.tls_server_name.as_ref(), &self.websocket_ca))
    }
}

/// One of `servers`.
#[derive(derive_more::Display, Debug, Clone, PartialEq, Eq)]
#[display("{}{at}", if *is_websocket { WEBSOCKET } else { "" })]
pub struct ServerEntry {
    /// The address to dial.
    pub at: Target,
    /// Whether links to it are always inside of a WebSocket.
    pub is_websocket: bool,
}

impl ServerEntry {
    /// Returns the address with the name that the server's certificate must contain, the host by default, and its file of
    /// these.
    pub fn address(&self, name: Option<&Host>, cas: &BTreeMap<String, FilePath>) -> ServerAddress {
        let Self { at, is_websocket } = self.clone();
        let websocket_ca = cas.get(&self.to_string()).map(|file| file.0.clone());
        ServerAddress { dns: name.unwrap_or(&at.host).clone(), at, is_websocket, websocket_ca }
    }

    /// Returns the key of a file of CAs that is for none of these servers.
    pub(crate) fn stray_ca(servers: &[Self], cas: &BTreeMap<String, FilePath>) -> Option<String> {
        let stray = cas.keys().find(|key| servers.iter().all(|server| server.to_string() != **key));
        stray.map(|key| format!("{:?}", value::excerpt(key)))
    }
}

impl FromStr for ServerEntry {
    type Err = NameError;

    fn from_str(text: &str) -> Result<Self, NameError> {
        let at = text.strip_prefix(WEBSOCKET);
        let is_websocket = at.is_some();
        let at = at.unwrap_or(text);
        let placeholder =
            at.rsplit_once(':').and_then(|(host, port)| Some((template(host)?, port.parse().ok()?)));
        let at = match placeholder {
            Some((host, port)) => Target { host, port },
            None => at.parse()?,
        };
        Ok(Self { at, is_websocket })
    }
}

impl<'de> Deserialize<'de> for ServerEntry {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let text: String = forms::filled_text(deserializer)?;
        text.parse().map_err(|_| D::Error::custom(SERVER_EXPECTED))
    }
}

impl Serialize for ServerEntry {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

/// What requires a WebSocket, before an address.
const WEBSOCKET: &str = "wss://";
/// What is expected as a key of `websocket_ca`.
pub(crate) const EXPECTED_ENTRY: &str = "expected an entry of servers, written as there";
const SERVER_EXPECTED: &str =
    "expected the server's host:port, for example tunnel.example.org:9000 or [fd00::1]:9000";

/// The address of a server that an edge dials, with the name that its certificate must contain.
#[derive(derive_more::Display, Debug, Clone, PartialEq, Eq)]
#[display("{}{at}", if *is_websocket { WEBSOCKET } else { "" })]
pub struct ServerAddress {
    /// The address to dial.
    pub at: Target,
    /// The name or address in the server's certificate; also sent as `:authority`.
    pub dns: Host,
    /// Whether links to it are always inside of a WebSocket.
    pub is_websocket: bool,
    /// File of the CAs of its proxy, which only the TLS around a WebSocket trusts.
    pub websocket_ca: Option<PathBuf>,
}

/// `[edge.session]`: limits of sessions.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize, Serialize, Educe)]
#[educe(Default)]
#[serde(default)]
pub struct EdgeSessionConfig {
    /// Timeout for resuming a session while no server is reachable.
    #[serde(with = "Millis::<0, DAY>")]
    #[educe(Default = config::RESUME_TIMEOUT)]
    pub resume_timeout: Duration,
    /// Maximum time for which a session of a user's link may be without a path. Her program requests 12h on port 22 and
    /// 10m on others, and the smallest value of her program, her servers and the edge applies. Sessions of all other
    /// clients have resume_timeout.
    #[serde(with = "Millis::<0, DAY>")]
    #[educe(Default = config::MAX_RESUME_TIMEOUT)]
    pub max_resume_timeout: Duration,
    /// Timeout for sessions to finish once the edge is stopping.
    #[serde(with = "Millis::<0, DAY>")]
    #[educe(Default = config::DRAIN_TIMEOUT)]
    pub drain_timeout: Duration,
    /// Maximum number of bytes that sessions may reserve for incoming data. Default: a fifth of the memory limit
    /// without 14MiB, at most 12MiB. As many bytes again may be unacknowledged, and as many may be relayed. Half of it may be queued for
    /// programs of SuperEdge. The metrics tunnel_buffer_bytes and tunnel_buffer_limit_bytes
    /// report each. If it is used up, the client with most sessions here loses sessions to other clients.
    ///
    /// Example: `"12MiB"`
    #[serde(with = "ByteSize::<MIN_MEMORY>")]
    pub buffer_memory: Option<usize>,
    /// Maximum number of bytes of memory that this process may use: its limits of sessions and connections are parts
    /// of it. Default: the smallest limit of its control groups, or all memory of the machine. A larger value has no
    /// effect.
    ///
    /// Example: `"40MiB"`
    #[serde(with = "ByteSize::<MIN_MEMORY>")]
    pub memory_limit: Option<usize>,
}

/// `[edge.allow]`: the targets that clients may reach through an edge.
#[derive(Debug, Clone, PartialEq, Eq, Default, Deserialize, Serialize)]
#[serde(default)]
pub struct AllowConfig {
    /// Targets that clients may reach through this edge, as network:port. "*" is any port. "self" is the addresses of
    /// this machine with loopback, except link-local ones and those of dummy interfaces; NODE_IP and POD_IP always
    /// belong to it. A list replaces the default: everything that it does not contain is forbidden. Names are resolved
    /// first, and each address is checked. Default: loopback and "self", any port. Other examples: "10.1.2.3:443",
    /// "[fd00::/8]:22".
    pub targets: Targets,
}

/// Default maximum of bytes that sessions may reserve. Edges are small machines.
pub const MEMORY: usize = 12 << 20;

/// Reads `[edge.uplink]`. `certified` is true if a certificate is issued for this edge.
pub(crate) fn uplink(edge: &mut ConfigTableReader<'_>, certified: bool) -> UplinkConfig {
    let mut table = edge.table("uplink");
    let keys: UplinkConfig = table.fields();
    let mut uplink =
        UplinkConfig { ports: AdminPorts::read(&mut table), proxy: edge.env.proxy.clone(), ..keys };
    if uplink.servers.is_empty() && !table.is_wrong("servers") {
        table.error("servers", None, "list the servers' addresses as host:port");
    }
    let stray = ServerEntry::stray_ca(&uplink.servers, &uplink.websocket_ca);
    if stray.is_some() && !table.is_wrong("servers") {
        table.error("websocket_ca", stray, EXPECTED_ENTRY);
    }
    if !table.has("node") {
        uplink.node = env_node(&table).unwrap_or(uplink.node);
    }
    check_token(&table, uplink.token.as_ref(), certified);
    warn_template(&table, "servers", uplink.servers.iter().map(|server| &server.at.host));
    warn_template(&table, "tls_server_name", uplink.tls_server_name.iter());
    table.close(&uplink);
    uplink
}

fn env_node(table: &ConfigTableReader<'_>) -> Option<NodeName> {
    let Some(name) = table.env.node_name.as_deref().filter(|name| !name.is_empty()) else {
        let here = table.key("node");
        if table.report().spelling.of(&here) == here {
            let expected = "set this node's name here or in the environment variable NODE_NAME";
            table.error("node", None, expected);
        } else {
            table.report().error("NODE_NAME", None, "set this environment variable to the node's name");
        }
        return None;
    };
    name.parse()
        .map_err(|error| table.report().error("NODE_NAME", Some(value::excerpt(name)), format!("{error}")))
        .ok()
}

fn check_token(table: &ConfigTableReader<'_>, token: Option<&SecretString>, certified: bool) {
    match (table.has("token"), table.has("token_file")) {
        (true, true) => {
            let expected = "both set the token; keep token_file";
            table.error("token", Some("token_file is also set".to_owned()), expected);
        }
        (false, false) if !certified => {
            let expected = "set the token here or in token_file, or set enabled = true in [edge.csr]";
            table.error("token", None, expected);
        }
        _ => {}
    }
    let Some(token) = token.map(SecretString::reveal) else { return };
    if token.is_empty() {
        let text = "empty token: a server of this program never accepts it; set a token";
        table.warn("token", WarningKind::Insecure, text);
    } else if token.contains([' ', ':']) {
        let text =
            "the token contains ' ' or ':', which a token file cannot contain: the server will reject it";
        table.warn("token", WarningKind::Unexpected, text);
    }
}

/// Reads `tls_server_name`; an empty text means none.
fn server_name<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Option<Host>, D::Error> {
    let text = String::deserialize(deserializer)?;
    match template(&text) {
        None if text.is_empty() => Ok(None),
        None => text.parse().map(Some).map_err(D::Error::custom),
        template => Ok(template),
    }
}

/// Parses a placeholder that a manifest's template should have filled in. It loads, as in SuperEdge, but resolves to
/// nothing.
fn template(text: &str) -> Option<Host> {
    (text.starts_with("{{") && text.ends_with("}}")).then(|| Host::Name(Arc::from(text)))
}

fn warn_template<'h>(
    table: &ConfigTableReader<'_>,
    key: &'static str,
    mut hosts: impl Iterator<Item = &'h Host>,
) {
    if hosts.any(|host| matches!(host, Host::Name(name) if template(name).is_some())) {
        let text = "unfilled template placeholder {{…}}: the server cannot be reached until it is replaced";
        table.warn(key, WarningKind::Unexpected, text);
    }
}

/// `[edge.target_tls]`: TLS to targets, for clients of the servers' HTTPS ports (`[server.https]`, mode = "terminate").
#[derive(Debug, Clone, PartialEq, Eq, Default, Deserialize, Serialize)]
#[serde(default)]
pub struct TargetTlsConfig {
    /// File (PEM) of the certificate presented to targets; kubelets require one. Every client that the servers accept
    /// at those ports acts with this certificate: restrict them there with client_ca and names. Re-read when it
    /// changes.
    ///
    /// Example: `"/etc/tunnel/certs/apiserver-kubelet-client.crt"`
    pub cert: Option<FilePath>,
    /// File (PEM) of its private key. Re-read when it changes.
    ///
    /// Example: `"/etc/tunnel/certs/apiserver-kubelet-client.key"`
    pub key: Option<FilePath>,
    /// File (PEM) of the CAs that may sign targets' certificates. Targets on loopback are always trusted, as their
    /// traffic cannot be intercepted; all others require this key. Re-read when it changes. No default.
    ///
    /// Example: `"/etc/tunnel/certs/cluster-ca.crt"`
    pub ca: Option<FilePath>,
}

pub(crate) fn target_tls(edge: &mut ConfigTableReader<'_>) -> TargetTlsConfig {
    let mut table = edge.table("target_tls");
    let tls: TargetTlsConfig = table.fields();
    listen_tls::require_pair(&table);
    table.close(&tls);
    tls
}
