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

use std::net::{IpAddr, Ipv4Addr};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use crate::config::listen::{self, AccessConfig, AuthConfig};
use crate::config::server::addresses::AddressSettings;
use crate::config::server::connect::ConnectConfig;
use crate::config::server::csr::ServerCsrConfig;
use crate::config::server::egress::EgressConfig;
use crate::config::server::http_proxy::HttpProxyConfig;
use crate::config::server::https::{HttpConfig, HttpsConfig, HttpsMode};
use crate::config::server::intercept::InterceptConfig;
use crate::config::server::invitations::Invitations;
use crate::config::server::node_names::NodeNameSettings;
use crate::config::server::ports::NodePortsConfig;
use crate::config::server::registry::{EtcdSettings, PublishConfig, RegistrySettings};
use crate::config::server::tcp::TcpListenerConfig;
use crate::config::table::ConfigTable;
use crate::config::{
    self, AdminConfig, ConfigErrors, Diagnostics, Environment, ListenConfig, ParsedConfig, Warning,
    WarningKind, value,
};
use tunnel_base::policy::targets::{TargetEntry, Targets};
use tunnel_base::policy::{Glob, Networks};
use tunnel_link::grpc::PLAIN_IDLE_TIMEOUT;

/// The validated config of a server: the tables below `[server]`, and values of the environment.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ServerConfig {
    /// The listener for links of edges, and those for operators.
    pub server: LinkListenerConfig,
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
    /// Where this server publishes its nodes, and where its peers are.
    pub registry: RegistrySettings,
    /// The store of invitations; `None` disables them.
    pub invitations: Option<Invitations>,
    /// The certificates that the cluster's signers issue for this server; `None` requests none.
    pub csr: Option<ServerCsrConfig>,
    /// How clients may address a target other than by its node's name.
    pub addresses: AddressSettings,
    /// What edges may reach through this server.
    pub allow: EdgeAccessConfig,
    /// `POD_NAME`, a label of the metrics; may be empty.
    pub pod_name: String,
    /// `POD_NAMESPACE`, a label of the metrics; may be empty.
    pub pod_namespace: String,
    /// `POD_IP`: where clients and peers reach this server. Set if records are published or Kubernetes is queried.
    pub pod_ip: Option<IpAddr>,
}

/// `[server.links]`: the port on which edges and peers make links, its certificates and tokens, and the
/// ports for operators.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct LinkListenerConfig {
    /// Port for links: gRPC over TLS.
    pub listen: ListenConfig,
    /// Networks of load balancers in front of `listen`, which send PROXY headers.
    pub proxy_protocol: Networks,
    /// Health, log level, metrics.
    pub log_listen: ListenConfig,
    /// Metrics only; `None` serves them on the log port only.
    pub metrics_listen: Option<ListenConfig>,
    /// gRPC's debugging port (channelz); `None` disables it.
    pub channelz: Option<std::net::SocketAddr>,
    /// The kernel's congestion control for links; `None` uses the system's default.
    pub congestion: Option<Arc<str>>,
    /// PEM file of the server's private key.
    pub key: PathBuf,
    /// PEM file of the server's certificates.
    pub cert: PathBuf,
    /// File of lines `node:token`.
    pub tokenfile: PathBuf,
    /// PEM file of the CA that signs servers' certificates. Not required without peers.
    pub ca: PathBuf,
}

/// `[server.session]`: numbers, timeouts and memory of a server's sessions.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SessionConfig {
    /// Timeout for resuming a session that has no path.
    pub grace: Duration,
    /// How long a client waits for its target.
    pub open_timeout: Duration,
    /// Maximum number of concurrent sessions.
    pub max: usize,
    /// Maximum number of concurrent sessions per client.
    pub max_for_client: usize,
    /// How long sessions may continue once the server is stopping.
    pub drain: Duration,
    /// Time without traffic after which a session of an edge of SuperEdge v0.8 or v0.9 ends.
    pub plain_idle: Duration,
    /// Bytes that sessions may reserve; `None`: a third of the process's memory limit, at most [`MEMORY`].
    pub memory: Option<usize>,
}

/// `[server.edge_access]`: what edges may reach through this server.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct EdgeAccessConfig {
    /// Targets that the server may dial for them; by default none.
    pub targets: Targets,
    /// Nodes that they may reach; empty means none.
    pub nodes: Vec<Glob>,
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
        let server = server(&mut cloud, report);
        let (connect, inherited) = connect::read(&mut cloud, report);
        let registry = registry::read(&mut cloud, env, report);
        let https = https::read(&mut cloud, &inherited, report);
        let http = https::read_http(&mut cloud, &inherited, report);
        let settings = Self {
            server,
            tls: read(&mut cloud, report),
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
            node_names: node_names::read(&mut cloud, &registry, env, report),
            registry,
            invitations: invitations::read(&mut cloud, env, report),
            csr: csr::read(&mut cloud, env, report),
            allow: allow(&mut cloud, env, report),
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

fn server(cloud: &mut ConfigTable<'_>, report: &mut Diagnostics) -> LinkListenerConfig {
    let mut table = cloud.table("links", report);
    let grpc = listen::read(&mut table, "listen", report);
    let server = LinkListenerConfig {
        listen: grpc.unwrap_or(ListenConfig::by_default(Ipv4Addr::UNSPECIFIED, GRPC_PORT, "listen")),
        proxy_protocol: listen::proxies(&mut table, report).unwrap_or_default(),
        log_listen: listen::log(&mut table, report),
        metrics_listen: listen::read(&mut table, "metrics_listen", report),
        channelz: listen::channelz(&mut table, report),
        congestion: table.read("congestion", value::nonempty, report).map(Arc::from),
        key: table.read("key", value::file_path, report).unwrap_or_else(|| KEY_FILE.into()),
        cert: table.read("cert", value::file_path, report).unwrap_or_else(|| CERT.into()),
        tokenfile: table.read("token_file", value::file_path, report).unwrap_or_else(|| TOKENFILE.into()),
        ca: table.read("peer_ca", value::file_path, report).unwrap_or_else(|| config::CA.into()),
    };
    table.finish(report);
    server
}

fn session(cloud: &mut ConfigTable<'_>, report: &mut Diagnostics) -> SessionConfig {
    let mut table = cloud.table("session", report);
    let wait = value::duration(Duration::from_millis(100)..=Duration::from_secs(600));
    let idle = value::duration(Duration::from_secs(60)..=Duration::from_secs(86_400));
    let max = table.read("max_sessions", value::count(1..=MAX_SESSIONS), report).unwrap_or(MAX);
    let for_client = table.read("max_per_client", value::count(1..=MAX_SESSIONS), report);
    let session = SessionConfig {
        grace: config::grace(&mut table, report),
        open_timeout: table.read("open_timeout", wait, report).unwrap_or(OPEN_TIMEOUT),
        max,
        max_for_client: for_client.unwrap_or(max.div_ceil(CLIENTS)),
        drain: config::drain(&mut table, report),
        plain_idle: table.read("superedge_idle_timeout", idle, report).unwrap_or(PLAIN_IDLE_TIMEOUT),
        memory: table.read("buffer_memory", value::size(config::MIN_MEMORY), report),
    };
    table.finish(report);
    session
}

fn allow(cloud: &mut ConfigTable<'_>, env: &Environment, report: &mut Diagnostics) -> EdgeAccessConfig {
    let mut table = cloud.table("edge_access", report);
    let targets = table.list("targets", value::parsed::<TargetEntry>, report).unwrap_or_default();
    let nodes = table.list("nodes", value::parsed::<Glob>, report).unwrap_or_default();
    table.finish(report);
    let listed = env.edge_no_proxy.as_deref().is_some_and(|list| !list.trim().is_empty());
    if listed && !(targets.is_empty() && nodes.is_empty()) {
        let text = "SuperEdge's list of targets that edges may not reach is ignored; [server.edge_access] lists what they may reach";
        report.warn("EDGE_NO_PROXY".to_owned(), WarningKind::Insecure, text);
    }
    EdgeAccessConfig { targets: targets.into_iter().collect(), nodes }
}

/// The port that SuperEdge's manifests open for edges.
const GRPC_PORT: u16 = 9000;

/// Two seconds more than an edge's dial timeout, so that its reason arrives.
const OPEN_TIMEOUT: Duration = Duration::from_secs(12);

/// Default maximum of sessions. A process reaches its memory limit long before.
const MAX: usize = 100_000;

/// Number of clients that together may use all sessions, unless the file sets a limit.
const CLIENTS: usize = 4;

/// Upper limit; more than a process can have sockets for.
const MAX_SESSIONS: usize = 10_000_000;

/// SuperEdge's fixed path of the server's key.
const KEY_FILE: &str = "/etc/tunnel/certs/cloud.key";

/// SuperEdge's fixed path of the server's certificate.
const CERT: &str = "/etc/tunnel/certs/cloud.crt";

/// SuperEdge's fixed path of the token file.
const TOKENFILE: &str = "/etc/tunnel/token/token";

// Things that several tables contain: secret files, etcd clusters, listeners.

impl ServerConfig {
    /// Returns the files that contain secrets, each with its key.
    pub fn secrets(&self) -> Vec<(&str, &Path)> {
        let mut all = vec![
            ("server.links.key", self.server.key.as_path()),
            ("server.links.token_file", &self.server.tokenfile),
        ];
        let connect = self.connect.as_ref().map(|connect| &connect.access);
        let egress = self.egress.as_ref().map(EgressConfig::access);
        let proxy = self.http_proxy.as_ref().map(|proxy| &proxy.access);
        for access in
            connect.into_iter().chain([&self.https.access, &self.admin.access]).chain(egress).chain(proxy)
        {
            // A file that several tables inherit from one is listed once.
            if let AuthConfig::Basic { users, key } = &access.auth
                && !all.contains(&(key, users))
            {
                all.push((key, users));
            }
        }
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
            all.extend(etcd.identity.iter().map(|(_, file)| (key, file.as_path())));
            all.extend(etcd.login.iter().map(|(_, file)| (password, file.as_path())));
        }
        if let Some(Invitations::File(file)) = &self.invitations {
            all.push(("server.invitations.file", file));
        }
        all
    }

    /// Returns each etcd in use, with the table that configures it.
    pub fn etcds(&self) -> impl Iterator<Item = (&'static str, &EtcdSettings)> {
        let publish = match &self.registry.publish {
            PublishConfig::Etcd(etcd) => Some((REGISTRY, etcd)),
            _ => None,
        };
        let invitations = match &self.invitations {
            Some(Invitations::Etcd(etcd)) => Some(("server.invitations", etcd)),
            _ => None,
        };
        publish.into_iter().chain(invitations)
    }

    /// Returns the files of certificates that this server presents, each with its key.
    pub fn certificates(&self) -> Vec<(&'static str, &Path)> {
        let mut all = vec![("server.links.cert", self.server.cert.as_path())];
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
        let mut all = vec![("server.links.peer_ca", self.server.ca.as_path())];
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
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Tls {
    /// The oldest accepted version.
    pub min_version: TlsVersion,
    /// Go's names of cipher suites for TLS 1.2; empty allows all secure ones.
    pub cipher_suites: Vec<String>,
}

/// A TLS version that may be set as the oldest one that a server accepts.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum TlsVersion {
    /// TLS 1.2.
    V12,
    /// TLS 1.3.
    V13,
}

/// Reads the table.
pub(crate) fn read(cloud: &mut ConfigTable<'_>, report: &mut Diagnostics) -> Tls {
    let mut table = cloud.table("tls", report);
    let min_version = table.read(
        "min_version",
        |value| match value::text(value)?.as_str() {
            "1.2" => Ok(TlsVersion::V12),
            "1.3" => Ok(TlsVersion::V13),
            _ => Err(value::wrong(value, "expected \"1.2\" or \"1.3\"")),
        },
        report,
    );
    let cipher_suites = table.list("cipher_suites", value::nonempty, report).unwrap_or_default();
    table.finish(report);
    Tls { min_version: min_version.unwrap_or(TlsVersion::V12), cipher_suites }
}
