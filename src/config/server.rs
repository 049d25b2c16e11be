//! Config of a server, read from the table `server`.

pub mod addresses;
pub mod connect;
pub mod csr;
pub mod egress;
pub mod http_proxy;
pub mod https;
pub mod intercept;
pub mod invitations;
pub mod kubernetes;
pub mod node_names;
pub mod peers;
pub mod ports;
pub mod registry;
pub mod tcp;

use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::path::{Path, PathBuf};
use std::time::Duration;

use serde::{Deserialize, Serialize};

use crate::config::listen::{self, AccessConfig, AdminConfig, AuthConfig};
use crate::config::server::addresses::AddressSettings;
use crate::config::server::connect::ConnectConfig;
use crate::config::server::csr::ServerCsrConfig;
use crate::config::server::egress::EgressConfig;
use crate::config::server::http_proxy::HttpProxyConfig;
use crate::config::server::https::{HttpConfig, HttpsConfig, HttpsMode};
use crate::config::server::intercept::InterceptConfig;
use crate::config::server::invitations::Invitations;
use crate::config::server::node_names::NodeNameSettings;
use crate::config::server::peers::PeerConfig;
use crate::config::server::ports::NodePortsConfig;
use crate::config::server::registry::{DnsConfig, EtcdSettings, PublishTo};
use crate::config::server::tcp::TcpListenerConfig;
use crate::config::table::ConfigTable;
use crate::config::value::{Bytes, Count, Millis};
use crate::config::{
    self, ConfigErrors, DAY, Diagnostics, Environment, MIN_MEMORY, ParsedConfig, Warning, WarningKind, value,
};
use tunnel_base::policy::targets::Targets;
use tunnel_base::policy::{Glob, Networks};

/// The validated config of a server: the tables below `[server]`, and values of the environment.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ServerConfig {
    /// The listener for links of edges, and those for operators.
    pub links: LinkListenerConfig,
    /// Versions and cipher suites of TLS at the server's ports.
    pub tls: Tls,
    /// The CONNECT listener and its access rules; `None` disables it.
    pub connect: Option<ConnectConfig>,
    /// The CONNECT listener for kube-apiserver; `None` disables it.
    pub egress: Option<EgressConfig>,
    /// The HTTP proxy; `None` disables it.
    pub http_proxy: Option<HttpProxyConfig>,
    /// Interception of the host's traffic by address; `None` disables it.
    pub intercept: Option<InterceptConfig>,
    /// TCP ports, each for one target.
    pub tcp: Vec<TcpListenerConfig>,
    /// TLS ports, each for one port of every node.
    pub https: HttpsConfig,
    /// HTTP ports, each for one port of every node.
    pub http: HttpConfig,
    /// The ConfigMap of named node ports; `None` disables it.
    pub ports: Option<NodePortsConfig>,
    /// The ConfigMap from which DNS reads the addresses of all nodes; `None` disables it.
    pub node_names: Option<NodeNameSettings>,
    /// The socket for commands on this machine.
    pub admin: AdminConfig,
    /// Limits of sessions.
    pub session: SessionConfig,
    /// Where this server publishes its nodes.
    pub dns: DnsConfig,
    /// Where its peers are.
    pub peers: PeerConfig,
    /// The store of invitations; `None` disables them.
    pub invitations: Option<Invitations>,
    /// The certificates that the cluster's signers issue for this server; `None` requests none.
    pub csr: Option<ServerCsrConfig>,
    /// How clients may address a target other than by its node's name.
    pub addresses: AddressSettings,
    /// What edges may reach through this server.
    pub edge_access: EdgeAccessConfig,
    /// `POD_NAME`, a label of the metrics; may be empty.
    pub pod_name: String,
    /// `POD_NAMESPACE`, a label of the metrics; may be empty.
    pub pod_namespace: String,
    /// `POD_IP`: where clients and peers reach this server. Set if records are published or Kubernetes is queried.
    pub pod_ip: Option<IpAddr>,
}

/// `[server.links]`: the port on which edges and peers make links, its certificates and tokens, and the ports for
/// operators.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize, Serialize)]
#[serde(default)]
pub struct LinkListenerConfig {
    /// Address (ip:port) that edges link to: gRPC, always over TLS.
    #[serde(deserialize_with = "value::listen_address")]
    pub listen: SocketAddr,
    /// Networks or addresses of load balancers in front of that port. Each of their connections must begin with a PROXY
    /// header (v1 or v2) that contains the client's address; a connection without one is closed.
    ///
    /// Example: `["10.0.0.5", "10.0.0.6"]`
    pub proxy_protocol: Networks,
    /// Address (ip:port) of the admin listener: health, log level, metrics and status page. Anyone who can reach it can
    /// change the log level. Requests must use an address or localhost as Host; with any other Host only /livez, /readyz
    /// and /metrics are served. No edge dials it.
    #[serde(deserialize_with = "value::listen_address")]
    pub admin_listen: SocketAddr,
    /// Whether no key sets `admin_listen`. The server then starts without it if it is not available.
    #[serde(skip)]
    pub admin_is_default: bool,
    /// Address (ip:port) of metrics, /livez and /readyz only, for Prometheus and probes. Default: none; the admin
    /// listener serves them too.
    ///
    /// Example: `"127.0.0.1:6000"`
    #[serde(deserialize_with = "value::listen_address")]
    pub metrics_listen: Option<SocketAddr>,
    /// Address (ip:port) of gRPC's debugging services for gRPC's own clients, channelz and reflection. They list links
    /// with addresses and counts, without TLS or a password.
    ///
    /// Example: `"127.0.0.1:6001"`
    #[serde(deserialize_with = "value::listen_address")]
    pub channelz_listen: Option<SocketAddr>,
    /// The kernel's congestion control for links, one of /proc/sys/net/ipv4/tcp_allowed_congestion_control. "bbr"
    /// handles packet loss better than "cubic". But once in ten seconds of bulk transfer it pauses for 0.2 s and one or
    /// two RTTs, for keystrokes too. An edge's interactive link next to a bulk link always uses "cubic", or "reno" if
    /// that is not allowed. Default: the system's, net.ipv4.tcp_congestion_control.
    ///
    /// Example: `"bbr"`
    #[serde(deserialize_with = "value::filled_text")]
    pub congestion: Option<String>,
    /// File (PEM) of the private key for that TLS. Re-read when it changes.
    #[serde(deserialize_with = "value::file")]
    pub key: PathBuf,
    /// File (PEM) of its certificate chain, leaf first. Re-read when it changes.
    #[serde(deserialize_with = "value::file")]
    pub cert: PathBuf,
    /// File of lines "node:token" that edges must match; "default:token" applies to all other nodes. A line without a
    /// token ("node:") rejects its node, even with a certificate. With "default" any edge can take any other name, which
    /// causes a warning if `[server.egress]` is set. If this server queries Kubernetes, a Node without an edge label is
    /// rejected, even with a valid token or certificate (see edges of `[server.node_names]`). Re-read when it changes.
    /// Within 10 s of a change, links with tokens that were removed are closed, and their sessions with them. A file
    /// that is missing, empty, or has no token at all changes nothing. To change a token without rejecting an edge:
    /// write both tokens into the edges' token_file, then the new one into this file. Then remove the old one from the
    /// edges.
    #[serde(deserialize_with = "value::file")]
    pub token_file: PathBuf,
    /// File (PEM) of the CA that signs servers' certificates, with which servers authenticate each other. Re-read when
    /// it changes. Not required while there is only one server. Once it exists, a caller whose certificate is not a
    /// server's is rejected.
    #[serde(deserialize_with = "value::file")]
    pub peer_ca: PathBuf,
}

impl Default for LinkListenerConfig {
    /// SuperEdge's port and paths.
    fn default() -> Self {
        Self {
            listen: (Ipv4Addr::UNSPECIFIED, 9000).into(),
            proxy_protocol: Networks::default(),
            admin_listen: listen::ADMIN_LISTEN,
            admin_is_default: true,
            metrics_listen: None,
            channelz_listen: None,
            congestion: None,
            key: "/etc/tunnel/certs/cloud.key".into(),
            cert: "/etc/tunnel/certs/cloud.crt".into(),
            token_file: "/etc/tunnel/token/token".into(),
            peer_ca: config::CA.into(),
        }
    }
}

/// `[server.session]`: limits of sessions.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize, Serialize)]
#[serde(default)]
pub struct SessionConfig {
    /// Timeout for resuming a session while its edge is disconnected.
    #[serde(with = "Millis::<0, DAY>")]
    pub resume_timeout: Duration,
    /// Timeout for the target to answer a client.
    #[serde(with = "Millis::<100, 600_000>")]
    pub open_timeout: Duration,
    /// Maximum number of concurrent sessions; further ones get 503.
    #[serde(with = "Count::<1, MAX_SESSIONS>")]
    pub max_sessions: usize,
    /// Maximum number of concurrent sessions per client; further ones get 503. A client is a user if auth = "basic",
    /// otherwise an IPv4 address or an IPv6 /64. Default: a quarter of max_sessions.
    #[serde(with = "Count::<1, MAX_SESSIONS>")]
    pub max_per_client: usize,
    /// Timeout for sessions to finish once the server is stopping.
    #[serde(with = "Millis::<0, DAY>")]
    pub drain_timeout: Duration,
    /// Maximum number of bytes that sessions may reserve for incoming data. Default: a third of the memory limit, at
    /// most 256MiB. As many bytes again may be unacknowledged, and as many may be relayed. Half of it may be queued for
    /// remotes that speak only SuperEdge's dialect. The metrics tunnel_buffer_bytes and tunnel_buffer_limit_bytes
    /// report each.
    ///
    /// Example: `"256MiB"`
    #[serde(with = "Bytes::<MIN_MEMORY>")]
    pub buffer_memory: Option<usize>,
}

impl Default for SessionConfig {
    fn default() -> Self {
        Self {
            resume_timeout: config::RESUME_TIMEOUT,
            // Two seconds more than an edge's dial timeout, so that its reason arrives.
            open_timeout: Duration::from_secs(12),
            // A process reaches its memory limit long before.
            max_sessions: 100_000,
            max_per_client: 25_000,
            drain_timeout: config::DRAIN_TIMEOUT,
            buffer_memory: None,
        }
    }
}

/// `[server.edge_access]`: what edges may reach through this server.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize, Serialize)]
#[serde(default)]
pub struct EdgeAccessConfig {
    /// Targets that edges may have this server dial, each "network:port" or "network:*", such as "10.96.0.10:53" or
    /// "10.0.0.0/8:443". "self" as network is this server's addresses, without loopback and those of dummy interfaces.
    /// This server resolves names, and dials only addresses that an entry contains. Loopback, link-local and similar
    /// addresses and the metadata addresses of clouds are dialled only if an entry contains nothing else, such as
    /// "127.0.0.1:5432". The request must contain a name that resolves to them: an edge's proxy rejects such an address
    /// itself, however it is written. Any edge with a token may reach all these targets, and programs at its node do so
    /// with its `[edge.http_proxy]`.
    pub targets: Targets,
    /// Patterns of nodes that edges may reach, such as "edge-*"; '*' matches any run of characters, case is ignored.
    pub nodes: Vec<Glob>,
}

impl Default for EdgeAccessConfig {
    fn default() -> Self {
        Self { targets: Targets::none(), nodes: Vec::new() }
    }
}

/// Default maximum of bytes that sessions may reserve.
pub const MEMORY: usize = 256 << 20;

impl ServerConfig {
    /// Reads a server's config.
    ///
    /// # Errors
    ///
    /// Returns all errors in the text.
    pub fn read(text: &str, env: &Environment) -> Result<(Self, Vec<Warning>), ConfigErrors> {
        Self::examine(text, env).whole()
    }

    /// Like [`Self::read`], but also returns a config that has errors, for further checks.
    pub fn examine(text: &str, env: &Environment) -> ParsedConfig<Self> {
        let mut report = Diagnostics::default();
        let cloud = Self::gather(text, env, &mut report);
        report.finish(text, cloud)
    }

    pub(crate) fn gather(text: &str, env: &Environment, report: &mut Diagnostics) -> Self {
        let mut file = ConfigTable::parse(text, env, report);
        let mut cloud = file.table("server", report);
        config::other_role(&mut file, &cloud, "edge", report);
        let links = links(&mut cloud, report);
        let (connect, inherited) = connect::read(&mut cloud, report);
        let (dns, peers) = peers::read(&mut cloud, env, report);
        let https = https::read(&mut cloud, &inherited, report);
        let http = https::read_http(&mut cloud, &inherited, report);
        let settings = Self {
            links,
            tls: tls(&mut cloud, report),
            egress: egress::read(&mut cloud, &inherited, report),
            http_proxy: http_proxy::read(&mut cloud, &inherited, env, report),
            intercept: intercept::read(&mut cloud, &inherited, env, report),
            tcp: tcp::read(&mut cloud, &inherited, report),
            ports: ports::read(&mut cloud, (&http, &https), env, report),
            https,
            http,
            connect,
            admin: listen::admin(&mut cloud, "cloud", env, report),
            session: session(&mut cloud, report),
            node_names: node_names::read(&mut cloud, &dns, env, report),
            dns,
            peers,
            invitations: invitations::read(&mut cloud, env, report),
            csr: csr::read(&mut cloud, env, report),
            edge_access: edge_access(&mut cloud, env, report),
            pod_name: env.pod_name.clone().unwrap_or_default(),
            pod_namespace: env.pod_namespace.clone().unwrap_or_default(),
            pod_ip: config::address("POD_IP", env.pod_ip.as_deref(), report),
            // After the modules.
            addresses: addresses::read(&mut cloud, env, report),
        };
        for table in [cloud, file] {
            table.finish(report);
        }
        settings
    }
}

fn links(cloud: &mut ConfigTable<'_>, report: &mut Diagnostics) -> LinkListenerConfig {
    let mut table = cloud.table("links", report);
    let mut links: LinkListenerConfig = table.fields(report);
    links.admin_is_default = !table.has("admin_listen");
    listen::warn_trusted(&table, &links.proxy_protocol, report);
    listen::warn_reachable(&table, links.admin_listen, links.channelz_listen, report);
    table.close(&links, report);
    links
}

fn session(cloud: &mut ConfigTable<'_>, report: &mut Diagnostics) -> SessionConfig {
    let mut table = cloud.table("session", report);
    let mut session: SessionConfig = table.fields(report);
    if !table.has("max_per_client") {
        session.max_per_client = session.max_sessions.div_ceil(CLIENTS);
    }
    table.close(&session, report);
    session
}

fn edge_access(cloud: &mut ConfigTable<'_>, env: &Environment, report: &mut Diagnostics) -> EdgeAccessConfig {
    let mut table = cloud.table("edge_access", report);
    let access: EdgeAccessConfig = table.fields(report);
    table.close(&access, report);
    let listed = env.edge_no_proxy.as_deref().is_some_and(|list| !list.trim().is_empty());
    if listed && !(access.targets.is_empty() && access.nodes.is_empty()) {
        let text = "SuperEdge's list of targets that edges may not reach is ignored; [server.edge_access] lists what they may reach";
        report.warn("EDGE_NO_PROXY".to_owned(), WarningKind::Insecure, text);
    }
    access
}

/// Number of clients that together may use all sessions, unless the file sets a limit.
const CLIENTS: usize = 4;

/// Upper limit; more than a process can have sockets for.
const MAX_SESSIONS: usize = 10_000_000;

// Things that several tables contain: secret files, etcd clusters, listeners.

impl ServerConfig {
    /// Returns the files that contain secrets, each with its key.
    pub fn secrets(&self) -> Vec<(&str, &Path)> {
        let mut all = vec![
            ("server.links.key", self.links.key.as_path()),
            ("server.links.token_file", &self.links.token_file),
        ];
        let connect = self.connect.as_ref().map(|connect| &connect.access);
        let egress = self.egress.as_ref().map(EgressConfig::access);
        let proxy = self.http_proxy.as_ref().map(|proxy| &proxy.access);
        for access in connect.into_iter().chain([&self.https.access]).chain(egress).chain(proxy) {
            // A file that several tables inherit from one is listed once.
            if let AuthConfig::Basic { users, key } = &access.auth
                && !all.contains(&(key, users))
            {
                all.push((key, users));
            }
        }
        all.extend(self.admin.users.iter().map(|users| ("server.admin.users", users.as_path())));
        if let Some(EgressConfig::Port { certificates, .. }) = &self.egress {
            all.push(("server.egress.key", &certificates.key));
        }
        if let HttpsMode::Terminate(certificates, targets) = &self.https.mode
            && !self.https.ports.is_empty()
        {
            all.push(("server.https.key", &certificates.key));
            all.extend(targets.iter().map(|shown| ("server.https.target_key", shown.key.as_path())));
        }
        for (table, etcd) in self.etcds() {
            let (key, password) = if table == REGISTRY {
                ("server.dns.etcd.key", "server.dns.etcd.password_file")
            } else {
                ("server.invitations.etcd.key", "server.invitations.etcd.password_file")
            };
            all.extend(etcd.key.iter().map(|file| (key, file.as_path())));
            all.extend(etcd.password_file.iter().map(|file| (password, file.as_path())));
        }
        if let Some(Invitations::File(file)) = &self.invitations {
            all.push(("server.invitations.file", file));
        }
        all
    }

    /// Returns each etcd in use, with the table that configures it.
    pub fn etcds(&self) -> impl Iterator<Item = (&'static str, &EtcdSettings)> {
        let publish = (self.dns.publish == PublishTo::Etcd).then_some((REGISTRY, &self.dns.etcd));
        let invitations = match &self.invitations {
            Some(Invitations::Etcd(etcd)) => Some(("server.invitations", etcd)),
            _ => None,
        };
        publish.into_iter().chain(invitations)
    }

    /// Returns the files of certificates that this server presents, each with its key.
    pub fn certificates(&self) -> Vec<(&'static str, &Path)> {
        let mut all = vec![("server.links.cert", self.links.cert.as_path())];
        if let Some(EgressConfig::Port { certificates, .. }) = &self.egress {
            all.push(("server.egress.cert", &certificates.cert));
        }
        if let HttpsMode::Terminate(certificates, targets) = &self.https.mode
            && !self.https.ports.is_empty()
        {
            all.push(("server.https.cert", &certificates.cert));
            all.extend(targets.iter().map(|shown| ("server.https.target_cert", shown.cert.as_path())));
        }
        all
    }

    /// Returns the CA files that this server trusts, each with its key.
    pub fn ca_files(&self) -> Vec<(&'static str, &Path)> {
        let mut all = vec![("server.links.peer_ca", self.links.peer_ca.as_path())];
        if let Some(EgressConfig::Port { certificates, .. }) = &self.egress {
            all.extend(certificates.client_ca.iter().map(|ca| ("server.egress.client_ca", ca.as_path())));
        }
        if let HttpsMode::Terminate(certificates, targets) = &self.https.mode {
            all.extend(certificates.client_ca.iter().map(|ca| ("server.https.client_ca", ca.as_path())));
            let ca = targets.iter().filter_map(|shown| shown.ca.as_ref());
            all.extend(ca.map(|ca| ("server.https.target_ca", ca.as_path())));
        }
        all
    }

    /// Returns the access rules of each listener, by the key of its table.
    pub fn listeners(&self) -> Vec<(&str, &AccessConfig)> {
        let tcp = self.tcp.iter().map(|port| (port.key.as_str(), &port.access));
        let egress = self.egress.iter().map(|egress| ("server.egress", egress.access()));
        let intercepted = self.intercept.iter().map(|intercept| ("server.intercept", &intercept.access));
        let proxy = self.http_proxy.iter().map(|proxy| ("server.http_proxy", &proxy.access));
        let fixed = [("server.https", &self.https.access), ("server.http", &self.http.access)];
        let connect = self.connect.iter().map(|connect| ("server.connect", &connect.access));
        connect.chain(fixed).chain(egress).chain(intercepted).chain(proxy).chain(tcp).collect()
    }
}

/// The table for publishing.
const REGISTRY: &str = "server.dns";

// The table `server.tls`: versions and cipher suites of TLS at the server's ports.

/// `[server.tls]`: the TLS versions and cipher suites that a server accepts.
#[derive(Debug, Clone, PartialEq, Eq, Default, Deserialize, Serialize)]
#[serde(default)]
pub struct Tls {
    /// Minimum TLS version, "1.2" or "1.3".
    pub min_version: TlsVersion,
    /// TLS 1.2 cipher suites by Go's names. Default: all secure ones.
    ///
    /// Example: `["TLS_ECDHE_RSA_WITH_AES_128_GCM_SHA256", "TLS_ECDHE_ECDSA_WITH_AES_128_GCM_SHA256"]`
    pub cipher_suites: Vec<String>,
}

/// A TLS version that may be set as the oldest one that a server accepts.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Deserialize, Serialize)]
pub enum TlsVersion {
    /// TLS 1.2.
    #[default]
    #[serde(rename = "1.2")]
    V12,
    /// TLS 1.3.
    #[serde(rename = "1.3")]
    V13,
}

fn tls(cloud: &mut ConfigTable<'_>, report: &mut Diagnostics) -> Tls {
    let mut table = cloud.table("tls", report);
    let tls: Tls = table.fields(report);
    table.close(&tls, report);
    tls
}
