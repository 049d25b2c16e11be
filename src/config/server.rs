//! Tables of a server's config, except those of its listeners.

pub mod addresses;
pub mod invitations;
pub mod kubernetes;
pub mod peers;
pub mod registry;

use std::net::Ipv4Addr;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use crate::config::listen;
use crate::config::table::ConfigTable;
use crate::config::{self, Diagnostics, Environment, ListenConfig, WarningKind, value};
use tunnel_base::policy::targets::{TargetEntry, Targets};
use tunnel_base::policy::{Glob, Networks};
use tunnel_link::grpc::PLAIN_IDLE_TIMEOUT;

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

pub(crate) fn links(cloud: &mut ConfigTable<'_>, report: &mut Diagnostics) -> LinkListenerConfig {
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

pub(crate) fn session(cloud: &mut ConfigTable<'_>, report: &mut Diagnostics) -> SessionConfig {
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

pub(crate) fn edge_access(
    cloud: &mut ConfigTable<'_>,
    env: &Environment,
    report: &mut Diagnostics,
) -> EdgeAccessConfig {
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
pub(crate) fn tls(cloud: &mut ConfigTable<'_>, report: &mut Diagnostics) -> Tls {
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
