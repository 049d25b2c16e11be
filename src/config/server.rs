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

use serde::{Deserialize, Serialize};

use crate::config::listen;
use crate::config::table::ConfigTable;
use crate::config::value::{Bytes, Count, Millis};
use crate::config::{self, DAY, Diagnostics, Environment, ListenConfig, MIN_MEMORY, WarningKind, value};
use tunnel_base::policy::targets::Targets;
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
    /// Time without traffic after which a session of an edge of SuperEdge v0.8 or v0.9 ends.
    #[serde(with = "Millis::<60_000, DAY>")]
    pub superedge_idle_timeout: Duration,
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
            superedge_idle_timeout: PLAIN_IDLE_TIMEOUT,
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
    let mut session: SessionConfig = table.fields(report);
    if !table.has("max_per_client") {
        session.max_per_client = session.max_sessions.div_ceil(CLIENTS);
    }
    table.close(&session, report);
    session
}

pub(crate) fn edge_access(
    cloud: &mut ConfigTable<'_>,
    env: &Environment,
    report: &mut Diagnostics,
) -> EdgeAccessConfig {
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

/// The port that SuperEdge's manifests open for edges.
const GRPC_PORT: u16 = 9000;

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

/// Reads the table.
pub(crate) fn tls(cloud: &mut ConfigTable<'_>, report: &mut Diagnostics) -> Tls {
    let mut table = cloud.table("tls", report);
    let tls: Tls = table.fields(report);
    table.close(&tls, report);
    tls
}
