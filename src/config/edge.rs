//! Config of an edge, read from the table `edge`.

pub mod http_proxy;

use std::net::{IpAddr, SocketAddr};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use serde::{Deserialize, Serialize};

use crate::config::edge::http_proxy::HttpProxyConfig;
use crate::config::listen::{self, AuthConfig};
use crate::config::server::kubernetes::{self, EdgeCsrConfig};
use crate::config::table::ConfigTable;
use crate::config::value::{Bytes, Millis};
use crate::config::{
    self, AdminConfig, ConfigErrors, DAY, Diagnostics, Environment, ListenConfig, MIN_MEMORY, ParsedConfig,
    Secret, Warning, WarningKind, value,
};
use tunnel_base::names::{Host, NodeName, Target};
use tunnel_base::policy::targets::Targets;

/// The validated config of an edge: the tables below `[edge]`, and values of the environment.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct EdgeConfig {
    /// The servers to dial, and this edge's identity.
    pub client: UplinkConfig,
    /// The socket for commands on this machine.
    pub admin: AdminConfig,
    /// Limits of sessions.
    pub session: EdgeSessions,
    /// The targets that this edge may dial.
    pub allow: AllowConfig,
    /// TLS to targets.
    pub https: TargetTlsConfig,
    /// The proxy for programs on this node; `None` disables it.
    pub http_proxy: Option<HttpProxyConfig>,
    /// The certificate that identifies this edge in addition to its token; `None` if it has none.
    pub csr: Option<EdgeCsrConfig>,
    /// `NODE_IP` and `POD_IP`: addresses of this machine in addition to those of its interfaces.
    pub own: Vec<IpAddr>,
}

/// `[edge.uplink]`: the servers that an edge dials, its identity, and its ports for operators.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct UplinkConfig {
    /// This node's name.
    pub node: NodeName,
    /// The addresses that this edge reports for its node.
    pub ips: Vec<IpAddr>,
    /// The token; `None` if only a certificate identifies this edge.
    pub token: Option<Token>,
    /// PEM file of the CAs that may sign the server's certificate.
    pub ca: PathBuf,
    /// The servers, tried in turn; at least one.
    pub servers: Vec<ServerAddress>,
    /// Health, log level, metrics.
    pub log_listen: ListenConfig,
    /// Metrics only, for clients that connect through the tunnel; `None` serves them on the log port only.
    pub metrics_listen: Option<SocketAddr>,
    /// gRPC's debugging port (channelz); `None` disables it.
    pub channelz: Option<SocketAddr>,
    /// The kernel's congestion control for the link; `None` uses the system's default.
    pub congestion: Option<Arc<str>>,
    /// `HTTPS_PROXY`: URL of the proxy to dial through.
    pub https_proxy: Option<Secret>,
    /// `NO_PROXY`: hosts that are dialled without the proxy.
    pub no_proxy: Option<String>,
}

/// The address of a server that an edge dials, with the name that its certificate must contain.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ServerAddress {
    /// The address to dial.
    pub at: Target,
    /// The name or address in the server's certificate; also sent as `:authority`.
    pub dns: Host,
}

/// Where the config says the edge's token is, which proves its name to a server.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Token {
    /// A token in the config file.
    Text(Secret),
    /// A separate file with one or two tokens, one per line; it is re-read when it changes.
    File(PathBuf),
}

/// `[edge.session]`: limits of sessions.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize, Serialize)]
#[serde(default)]
pub struct EdgeSessions {
    /// Timeout for resuming a session while no server is reachable.
    #[serde(with = "Millis::<0, DAY>")]
    pub resume_timeout: Duration,
    /// Timeout for sessions to finish once the edge is stopping.
    #[serde(with = "Millis::<0, DAY>")]
    pub drain_timeout: Duration,
    /// Maximum number of bytes that sessions may reserve for incoming data. Default: a third of the memory limit, at
    /// most 12MiB. As many bytes again may be unacknowledged, and as many may be relayed. Half of it may be queued for
    /// remotes that speak only SuperEdge's dialect. The metrics tunnel_buffer_bytes and tunnel_buffer_limit_bytes
    /// report each. If it is used up, the client with most sessions here loses sessions to other clients.
    ///
    /// Example: `"12MiB"`
    #[serde(with = "Bytes::<MIN_MEMORY>")]
    pub buffer_memory: Option<usize>,
}

impl Default for EdgeSessions {
    fn default() -> Self {
        Self {
            resume_timeout: config::RESUME_TIMEOUT,
            drain_timeout: config::DRAIN_TIMEOUT,
            buffer_memory: None,
        }
    }
}

/// `[edge.allow]`: the targets that clients may reach through an edge.
#[derive(Debug, Clone, PartialEq, Eq, Default, Deserialize, Serialize)]
#[serde(default)]
pub struct AllowConfig {
    /// Targets that clients may reach through this edge, as network:port. "*" is any port. "self" is the addresses of
    /// this machine, except link-local ones and those of dummy interfaces; NODE_IP and POD_IP always belong to it. A
    /// list replaces the default: everything that it does not contain is forbidden. Names are resolved first, and each
    /// address is checked. Default: loopback and "self", any port. Other examples: "10.1.2.3:443", "[fd00::/8]:22".
    pub targets: Targets,
}

/// Default maximum of bytes that sessions may reserve. Edges are small machines.
pub const MEMORY: usize = 12 << 20;

impl EdgeConfig {
    /// Reads an edge's config.
    ///
    /// # Errors
    ///
    /// Returns all errors in the text and the environment.
    pub fn read(text: &str, env: &Environment) -> Result<(Self, Vec<Warning>), ConfigErrors> {
        Self::examine(text, env).whole()
    }

    /// Like [`Self::read`], but also returns a config that has errors, for further checks.
    pub fn examine(text: &str, env: &Environment) -> ParsedConfig<Self> {
        let mut report = Diagnostics::default();
        let edge = Self::gather(text, env, &mut report);
        report.finish(text, edge)
    }

    /// Returns the files that contain secrets, each with its key. `config` is the path of the config file.
    pub fn secrets(&self, config: &Path) -> Vec<(String, PathBuf)> {
        let token = self.client.token.iter().map(|token| match token {
            Token::Text(_) => ("edge.uplink.token", config),
            Token::File(file) => ("edge.uplink.token_file", file.as_path()),
        });
        let key = self.https.identity.iter().map(|(_, key)| ("edge.target_tls.key", key.as_path()));
        let proxy = self.http_proxy.iter().map(|proxy| ("edge.http_proxy.users", &proxy.access));
        let all = proxy.chain([("edge.admin.users", &self.admin.access)]);
        let users = all.filter_map(|(key, access)| match &access.auth {
            AuthConfig::None => None,
            AuthConfig::Basic { users, .. } => Some((key, users.as_path())),
        });
        let all = token.chain(key).chain(users);
        all.map(|(key, path)| (key.to_owned(), path.to_owned())).collect()
    }

    pub(crate) fn gather(text: &str, env: &Environment, report: &mut Diagnostics) -> Self {
        let mut file = ConfigTable::parse(text, env, report);
        let mut edge = file.table("edge", report);
        config::other_role(&mut file, &edge, "server", report);
        let node_ip = config::address("NODE_IP", env.node_ip.as_deref(), report);
        let csr = kubernetes::edge_csr(&mut edge, node_ip, env, report);
        let client = client(&mut edge, env, (node_ip, csr.is_some()), report);
        let admin = listen::admin(&mut edge, "edge", env, report);
        let session = session(&mut edge, report);
        let allow = allow(&mut edge, report);
        let pod_ip = config::address("POD_IP", env.pod_ip.as_deref(), report);
        let https = read(&mut edge, report);
        let http_proxy = http_proxy::read(&mut edge, report);
        for table in [edge, file] {
            table.finish(report);
        }
        let own = node_ip.into_iter().chain(pod_ip).collect();
        Self { client, admin, session, allow, https, http_proxy, csr, own }
    }
}

/// Reads the table `client`. Wrong or missing values are reported and replaced by placeholders. `certified` is true if
/// a certificate is issued for this edge.
fn client(
    edge: &mut ConfigTable<'_>,
    env: &Environment,
    (node_ip, certified): (Option<IpAddr>, bool),
    report: &mut Diagnostics,
) -> UplinkConfig {
    let mut table = edge.table("uplink", report);
    let servers = servers(&mut table, report);
    let node = node(&mut table, env, report);
    let ips = table.list("node_ips", value::parsed::<IpAddr>, report);
    let token = token(&mut table, certified, report);
    let ca = table.read("ca", value::file_path, report).unwrap_or_else(|| config::CA.into());
    let log_listen = listen::log(&mut table, report);
    let metrics_listen = table.read("metrics_listen", value::socket, report);
    let congestion = table.read("congestion", value::nonempty, report).map(Arc::from);
    let channelz = listen::channelz(&mut table, report);
    table.finish(report);
    UplinkConfig {
        node: node.unwrap_or_else(NodeName::none),
        ips: ips.unwrap_or_else(|| node_ip.into_iter().collect()),
        token,
        ca,
        servers,
        log_listen,
        metrics_listen,
        channelz,
        congestion,
        https_proxy: env.https_proxy.clone().filter(|url| !url.reveal().is_empty()),
        no_proxy: env.no_proxy.clone().filter(|hosts| !hosts.is_empty()),
    }
}

fn node(table: &mut ConfigTable<'_>, env: &Environment, report: &mut Diagnostics) -> Option<NodeName> {
    let written = table.read("node", value::parsed::<NodeName>, report);
    if table.has("node") {
        return written;
    }
    let Some(name) = env.node_name.as_deref().filter(|name| !name.is_empty()) else {
        table.error(
            "node",
            None,
            "set this node's name here or in the environment variable NODE_NAME",
            report,
        );
        return None;
    };
    name.parse()
        .map_err(|error| report.error("NODE_NAME", Some(value::excerpt(name)), format!("{error}")))
        .ok()
}

fn token(table: &mut ConfigTable<'_>, certified: bool, report: &mut Diagnostics) -> Option<Token> {
    let text = table.read("token", value::secret, report);
    let file = table.read("token_file", value::file_path, report);
    match (table.has("token"), table.has("token_file")) {
        (true, true) => {
            let wanted = "both set the token; keep token_file";
            table.error("token", Some("token_file is also set".to_owned()), wanted, report);
        }
        (false, false) if !certified => {
            let wanted = "set the token here or in token_file, or set enabled = true in [edge.csr]";
            table.error("token", None, wanted, report);
        }
        _ => {}
    }
    let text = text.inspect(|text| {
        let key = table.key("token");
        if text.reveal().is_empty() {
            report.warn(
                key,
                WarningKind::Insecure,
                "empty token: a server of this program never accepts it; set a token",
            );
        } else if text.reveal().contains([' ', ':']) {
            let text =
                "the token contains ' ' or ':', which a token file cannot contain: the server will reject it";
            report.warn(key, WarningKind::Unexpected, text);
        }
    });
    text.map(Token::Text).or(file.map(Token::File))
}

fn servers(table: &mut ConfigTable<'_>, report: &mut Diagnostics) -> Vec<ServerAddress> {
    let read = |value: &_| {
        let text = value::nonempty(value)?;
        let wanted = "expected the server's host:port, for example tunnel.example.org:9000 or [fd00::1]:9000";
        let (host, port) = text.rsplit_once(':').ok_or_else(|| value::wrong(value, wanted))?;
        if let (Some(host), Ok(port)) = (template(host), port.parse()) {
            return Ok((Target { host, port }, true));
        }
        text.parse().map(|target| (target, false)).map_err(|_| value::wrong(value, wanted))
    };
    let before = report.fault_count();
    let found = table.list("servers", read, report).unwrap_or_default();
    if found.is_empty() && report.fault_count() == before {
        table.error("servers", None, "list the servers' addresses as host:port", report);
    }
    if found.iter().any(|(_, unfilled)| *unfilled) {
        warn_template(table, "servers", report);
    }
    let dns = dns(table, report);
    let server = |at: Target| ServerAddress { dns: dns.clone().unwrap_or_else(|| at.host.clone()), at };
    found.into_iter().map(|(at, _)| server(at)).collect()
}

fn dns(table: &mut ConfigTable<'_>, report: &mut Diagnostics) -> Option<Host> {
    let read = |value: &_| match value::text(value)?.as_str() {
        "" => Ok(None),
        text => match template(text) {
            Some(host) => Ok(Some((host, true))),
            None => value::parsed::<Host>(value).map(|host| Some((host, false))),
        },
    };
    let (host, unfilled) = table.read("tls_server_name", read, report)??;
    if unfilled {
        warn_template(table, "tls_server_name", report);
    }
    Some(host)
}

/// Parses a placeholder that a manifest's template should have filled in. It loads, as in SuperEdge, but resolves to
/// nothing.
fn template(text: &str) -> Option<Host> {
    (text.starts_with("{{") && text.ends_with("}}")).then(|| Host::Name(Arc::from(text)))
}

fn warn_template(table: &ConfigTable<'_>, key: &'static str, report: &mut Diagnostics) {
    let text = "unfilled template placeholder {{…}}: the server cannot be reached until it is replaced";
    report.warn(table.key(key), WarningKind::Unexpected, text);
}

fn session(edge: &mut ConfigTable<'_>, report: &mut Diagnostics) -> EdgeSessions {
    let mut table = edge.table("session", report);
    let session: EdgeSessions = table.fields(report);
    table.close(&session, report);
    session
}

fn allow(edge: &mut ConfigTable<'_>, report: &mut Diagnostics) -> AllowConfig {
    let mut table = edge.table("allow", report);
    let allow: AllowConfig = table.fields(report);
    table.close(&allow, report);
    allow
}

// The table `edge.target_tls`: TLS to targets.

/// `[edge.target_tls]`: TLS to the targets of the servers' HTTPS ports.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct TargetTlsConfig {
    /// PEM files of the certificate presented to targets, and of its key.
    pub identity: Option<(PathBuf, PathBuf)>,
    /// PEM file of the CAs that may sign a target's certificate; `None` trusts only targets on loopback.
    pub ca: Option<PathBuf>,
}

/// Reads the table.
pub(crate) fn read(edge: &mut ConfigTable<'_>, report: &mut Diagnostics) -> TargetTlsConfig {
    let mut table = edge.table("target_tls", report);
    let cert = table.read("cert", value::file_path, report);
    let key = table.read("key", value::file_path, report);
    for (given, other) in [("cert", "key"), ("key", "cert")] {
        if table.has(given) && !table.has(other) {
            table.error(other, None, "a certificate needs its key; set both files", report);
        }
    }
    let ca = table.read("ca", value::file_path, report);
    table.finish(report);
    TargetTlsConfig { identity: cert.zip(key), ca }
}
