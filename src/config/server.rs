//! Config of a server, read from the table `mode.cloud`.

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
use crate::config::server::connect::SshConfig;
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

/// The validated config of a server: the tables below `[mode.cloud]`, and values of the environment.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ServerConfig {
    /// The listener for links of edges, and those for operators.
    pub server: LinkListenerConfig,
    /// Versions and cipher suites of TLS at the server's ports.
    pub tls: Tls,
    /// The CONNECT listener and its access rules.
    pub ssh: SshConfig,
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

/// `[mode.cloud.stream.server]`: the port on which edges and peers make links, its certificates and tokens, and the
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

/// `[mode.cloud.session]`: numbers, timeouts and memory of a server's sessions.
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
    /// Bytes that sessions may reserve; `None`: a third of the process's memory limit, at most [`MEMORY`].
    pub memory: Option<usize>,
}

/// `[mode.cloud.allow]`: what edges may reach through this server.
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
        let mut file = ConfigTable::parse(text, report);
        let mut mode = file.table("mode", report);
        let mut cloud = mode.table("cloud", report);
        config::other_mode(&mut mode, &cloud, "edge", report);
        let mut stream = cloud.table("stream", report);
        let server = server(&mut stream, report);
        let superedge = kubernetes::superedge(&mut stream, report);
        stream.finish(report);
        let ssh = connect::read(&mut cloud, report);
        let registry = registry::read(&mut cloud, superedge, env, report);
        let https = https::read(&mut cloud, &ssh.access, report);
        let http = https::read_http(&mut cloud, &ssh.access, report);
        let settings = Self {
            server,
            tls: read(&mut cloud, report),
            egress: egress::read(&mut cloud, &ssh.access, report),
            http_proxy: http_proxy::read(&mut cloud, &ssh.access, env, report),
            intercept: intercept::read(&mut cloud, &ssh.access, env, report),
            tcp: tcp::read(&mut cloud, &ssh.access, report),
            ports: ports::read(&mut cloud, (&http, &https), env, report),
            https,
            http,
            ssh,
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
        for table in [cloud, mode, file] {
            table.finish(report);
        }
        settings
    }
}

fn server(stream: &mut ConfigTable<'_>, report: &mut Diagnostics) -> LinkListenerConfig {
    let mut table = stream.table("server", report);
    let grpc = listen::read(&mut table, "listen", "grpc_port", report);
    let server = LinkListenerConfig {
        listen: grpc.unwrap_or(ListenConfig::by_default(Ipv4Addr::UNSPECIFIED, GRPC_PORT, "listen")),
        proxy_protocol: listen::proxies(&mut table, report).unwrap_or_default(),
        log_listen: listen::log(&mut table, report),
        metrics_listen: listen::read(&mut table, "metrics_listen", "metrics_port", report),
        channelz: listen::channelz(&mut table, report),
        congestion: table.read("congestion", value::nonempty, report).map(Arc::from),
        key: table.read("key", value::file_path, report).unwrap_or_else(|| KEY_FILE.into()),
        cert: table.read("cert", value::file_path, report).unwrap_or_else(|| CERT.into()),
        tokenfile: table.read("tokenfile", value::file_path, report).unwrap_or_else(|| TOKENFILE.into()),
        ca: table.read("ca", value::file_path, report).unwrap_or_else(|| config::CA.into()),
    };
    table.finish(report);
    server
}

fn session(cloud: &mut ConfigTable<'_>, report: &mut Diagnostics) -> SessionConfig {
    let mut table = cloud.table("session", report);
    let wait = value::duration(Duration::from_millis(100)..=Duration::from_secs(600));
    let max = table.read("max", value::count(1..=MAX_SESSIONS), report).unwrap_or(MAX);
    let for_client = table.read("max_for_client", value::count(1..=MAX_SESSIONS), report);
    let session = SessionConfig {
        grace: config::grace(&mut table, report),
        open_timeout: table.read("open_timeout", wait, report).unwrap_or(OPEN_TIMEOUT),
        max,
        max_for_client: for_client.unwrap_or(max.div_ceil(CLIENTS)),
        drain: config::drain(&mut table, report),
        memory: table.read("memory", value::size(config::MIN_MEMORY), report),
    };
    table.finish(report);
    session
}

fn allow(cloud: &mut ConfigTable<'_>, env: &Environment, report: &mut Diagnostics) -> EdgeAccessConfig {
    let mut table = cloud.table("allow", report);
    let targets = table.list("targets", value::parsed::<TargetEntry>, report).unwrap_or_default();
    let nodes = table.list("nodes", value::parsed::<Glob>, report).unwrap_or_default();
    table.finish(report);
    let listed = env.edge_no_proxy.as_deref().is_some_and(|list| !list.trim().is_empty());
    if listed && !(targets.is_empty() && nodes.is_empty()) {
        let text = "SuperEdge's list of targets that edges may not reach is ignored; [mode.cloud.allow] lists what they may reach";
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
            ("mode.cloud.stream.server.key", self.server.key.as_path()),
            ("mode.cloud.stream.server.tokenfile", &self.server.tokenfile),
        ];
        let egress = self.egress.as_ref().map(EgressConfig::access);
        let proxy = self.http_proxy.as_ref().map(|proxy| &proxy.access);
        for access in
            [&self.ssh.access, &self.https.access, &self.admin.access].into_iter().chain(egress).chain(proxy)
        {
            // A file that several tables inherit from one is listed once.
            if let AuthConfig::Basic { users, key } = &access.auth
                && !all.contains(&(key, users))
            {
                all.push((key, users));
            }
        }
        if let Some(EgressConfig::Port { certificates, .. }) = &self.egress {
            all.push(("mode.cloud.egress.key", &certificates.key));
        }
        if let HttpsMode::Terminate(certificates, targets) = &self.https.mode
            && !self.https.ports.is_empty()
        {
            all.push(("mode.cloud.https.key", &certificates.key));
            all.extend(targets.iter().map(|shown| ("mode.cloud.https.target_key", shown.key.as_path())));
        }
        for (table, etcd) in self.etcds() {
            let (key, password) = if table == REGISTRY {
                ("mode.cloud.registry.etcd_key", "mode.cloud.registry.etcd_password_file")
            } else {
                ("mode.cloud.invitations.etcd_key", "mode.cloud.invitations.etcd_password_file")
            };
            all.extend(etcd.identity.iter().map(|(_, file)| (key, file.as_path())));
            all.extend(etcd.login.iter().map(|(_, file)| (password, file.as_path())));
        }
        if let Some(Invitations::File(file)) = &self.invitations {
            all.push(("mode.cloud.invitations.file", file));
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
            Some(Invitations::Etcd(etcd)) => Some(("mode.cloud.invitations", etcd)),
            _ => None,
        };
        publish.into_iter().chain(invitations)
    }

    /// Returns the files of certificates that this server presents, each with its key.
    pub fn certificates(&self) -> Vec<(&'static str, &Path)> {
        let mut all = vec![("mode.cloud.stream.server.cert", self.server.cert.as_path())];
        if let Some(EgressConfig::Port { certificates, .. }) = &self.egress {
            all.push(("mode.cloud.egress.cert", &certificates.cert));
        }
        if let HttpsMode::Terminate(certificates, targets) = &self.https.mode
            && !self.https.ports.is_empty()
        {
            all.push(("mode.cloud.https.cert", &certificates.cert));
            all.extend(targets.iter().map(|shown| ("mode.cloud.https.target_cert", shown.cert.as_path())));
        }
        all
    }

    /// Returns the CA files that this server trusts, each with its key.
    pub fn ca_files(&self) -> Vec<(&'static str, &Path)> {
        let mut all = vec![("mode.cloud.stream.server.ca", self.server.ca.as_path())];
        if let Some(EgressConfig::Port { certificates, .. }) = &self.egress {
            all.extend(certificates.client_ca.iter().map(|ca| ("mode.cloud.egress.client_ca", ca.as_path())));
        }
        if let HttpsMode::Terminate(certificates, targets) = &self.https.mode {
            all.extend(certificates.client_ca.iter().map(|ca| ("mode.cloud.https.client_ca", ca.as_path())));
            let ca = targets.iter().filter_map(|shown| shown.ca.as_ref());
            all.extend(ca.map(|ca| ("mode.cloud.https.target_ca", ca.as_path())));
        }
        all
    }

    /// Returns the access rules of each listener, by the key of its table.
    pub fn listeners(&self) -> Vec<(&str, &AccessConfig)> {
        let tcp = self.tcp.iter().map(|port| (port.key.as_str(), &port.access));
        let egress = self.egress.iter().map(|egress| ("mode.cloud.egress", egress.access()));
        let intercepted = self.intercept.iter().map(|intercept| ("mode.cloud.intercept", &intercept.access));
        let proxy = self.http_proxy.iter().map(|proxy| ("mode.cloud.http_proxy", &proxy.access));
        let fixed = [
            ("mode.cloud.ssh", &self.ssh.access),
            ("mode.cloud.https", &self.https.access),
            ("mode.cloud.http", &self.http.access),
        ];
        fixed.into_iter().chain(egress).chain(intercepted).chain(proxy).chain(tcp).collect()
    }
}

/// The table for publishing.
const REGISTRY: &str = "mode.cloud.registry";

// The table `mode.cloud.tls`: versions and cipher suites of TLS at the server's ports.

/// `[mode.cloud.tls]`: the TLS versions and cipher suites that a server accepts.
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
        "tls_min_version",
        |value| match value::text(value)?.as_str() {
            "" | "VersionTLS12" => Ok((TlsVersion::V12, None)),
            "VersionTLS13" => Ok((TlsVersion::V13, None)),
            old @ ("VersionTLS10" | "VersionTLS11") => Ok((TlsVersion::V12, Some(old.to_owned()))),
            _ => Err(value::wrong(value, "expected VersionTLS12 or VersionTLS13")),
        },
        report,
    );
    if let Some((_, Some(old))) = &min_version {
        let text = format!("{old} is insecure and not supported; the oldest version is TLS 1.2");
        report.warn(table.key("tls_min_version"), WarningKind::Unexpected, text);
    }
    let suites = table.read("tls_cipher_suites", value::text, report).unwrap_or_default();
    let names = suites.split(',').map(str::trim).filter(|name| !name.is_empty());
    let tls = Tls {
        min_version: min_version.map_or(TlsVersion::V12, |(version, _)| version),
        cipher_suites: names.map(str::to_owned).collect(),
    };
    table.finish(report);
    tls
}
