//! Tables of the parts that use Kubernetes: `[server.csr]`, `[edge.csr]`, `[server.node_ports]` and
//! `[server.node_names]`.

use std::collections::BTreeSet;
use std::net::IpAddr;
use std::path::PathBuf;
use std::time::Duration;

use toml::de::DeValue;

use crate::config::cluster::{ClusterSettings, name, reached};
use crate::config::table::ConfigTable;
use crate::config::value::{self, ValueError};
use crate::config::{Diagnostics, Environment};
use crate::parts;
use tunnel_base::policy::Glob;

/// The certificates to request, and where they are stored.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ServerCsrConfig {
    /// The cluster that issues them.
    pub cluster: ClusterSettings,
    /// Directory of the files, one for each certificate with its key.
    pub dir: PathBuf,
    /// Names in the certificate for the ports with TLS; `None` requests none.
    pub server: Option<ServerNames>,
    /// Whether to request a certificate that is presented to targets.
    pub proxy_client: bool,
    /// The requested validity; `None` leaves it to the signer.
    pub lifetime: Option<Duration>,
    /// PEM file of the CA that signs edges' certificates; `None` if edges have only tokens.
    pub edge_ca: Option<PathBuf>,
}

/// The names at which clients reach the ports of a server.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ServerNames {
    /// Services in our namespace.
    pub services: Vec<String>,
    /// Names and addresses in addition to those of the Services.
    pub names: BTreeSet<String>,
}

/// A profile of certificates that `[server.csr]` can request for a server.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum ProfileKind {
    Server,
    ProxyClient,
}

/// Reads `[server.csr]`. Returns `None` if nothing is requested.
pub(crate) fn csr(
    cloud: &mut ConfigTable<'_>,
    env: &Environment,
    report: &mut Diagnostics,
) -> Option<ServerCsrConfig> {
    let mut table = cloud.table("csr", report);
    let kinds = table.list("profiles", profile, report).unwrap_or_default();
    let dir = table.read("dir", value::file_path, report).unwrap_or_else(|| CSR_DIR.into());
    let services = table.list("services", name, report).unwrap_or_default();
    let services: Vec<_> = services.into_iter().flatten().collect();
    let names: BTreeSet<_> = table.list("names", host_name, report).unwrap_or_default().into_iter().collect();
    let lifetime = lifetime(&mut table, report);
    let edge_ca = table.read("edge_ca", value::file_path, report);
    let server = kinds.contains(&ProfileKind::Server);
    if server && services.is_empty() && names.is_empty() {
        let wanted =
            "list the Services that route to this server's ports, or in names their DNS names and addresses";
        table.error("services", Some("neither services nor names is set".to_owned()), wanted, report);
    }
    let asks = if kinds.is_empty() { "edge_ca" } else { "profiles" };
    let cluster = issuing_cluster(&mut table, asks, !kinds.is_empty() || edge_ca.is_some(), env, report);
    table.finish(report);
    let server = server.then_some(ServerNames { services, names });
    let proxy_client = kinds.contains(&ProfileKind::ProxyClient);
    Some(ServerCsrConfig { cluster: cluster?, dir, server, proxy_client, lifetime, edge_ca })
}

/// Reads the requested validity of a certificate.
fn lifetime(table: &mut ConfigTable<'_>, report: &mut Diagnostics) -> Option<Duration> {
    table.read("lifetime", value::duration(MIN_LIFETIME..=MAX_LIFETIME), report)
}

/// Returns the cluster that issues certificates if one is `wanted`; `key` is the key that requires it.
fn issuing_cluster(
    table: &mut ConfigTable<'_>,
    key: &'static str,
    wanted: bool,
    env: &Environment,
    report: &mut Diagnostics,
) -> Option<ClusterSettings> {
    let reached = reached(parts::CSR, env);
    if let (Err(why), true) = (&reached, wanted) {
        table.error(key, Some("requires Kubernetes".to_owned()), *why, report);
    }
    reached.ok().filter(|_| wanted)
}

fn profile(value: &DeValue<'_>) -> Result<ProfileKind, ValueError> {
    match value::text(value)?.as_str() {
        "server" => Ok(ProfileKind::Server),
        "proxy-client" => Ok(ProfileKind::ProxyClient),
        _ => Err(value::wrong(value, "expected \"server\" or \"proxy-client\"")),
    }
}

/// Reads a DNS name or an address.
fn host_name(value: &DeValue<'_>) -> Result<String, ValueError> {
    let name = value::nonempty(value)?;
    let sound = |b: u8| b.is_ascii_alphanumeric() || matches!(b, b'-' | b'.' | b':');
    if name.bytes().all(sound) && (!name.contains(':') || name.parse::<std::net::IpAddr>().is_ok()) {
        return Ok(name.to_ascii_lowercase());
    }
    Err(value::wrong(value, "expected a DNS name or an address, without a port"))
}

const CSR_DIR: &str = "/var/lib/tunnel/pki";

/// The minimum in Kubernetes.
const MIN_LIFETIME: Duration = Duration::from_secs(600);
const MAX_LIFETIME: Duration = Duration::from_secs(10 * 366 * 24 * 3600);

/// `[edge.csr]`: how the certificate that identifies an edge is requested, and where it is stored.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct EdgeCsrConfig {
    /// The cluster to send the request to, as this node.
    pub cluster: ClusterSettings,
    /// The file of certificate and key.
    pub file: PathBuf,
    /// The requested validity; `None` leaves it to the signer.
    pub lifetime: Option<Duration>,
    /// `NODE_IP`, which the certificate contains.
    pub node_ip: Option<IpAddr>,
}

/// Reads `[edge.csr]`. Returns `None` if the token alone identifies this edge.
pub(crate) fn edge_csr(
    edge: &mut ConfigTable<'_>,
    node_ip: Option<IpAddr>,
    env: &Environment,
    report: &mut Diagnostics,
) -> Option<EdgeCsrConfig> {
    let mut table = edge.table("csr", report);
    let asked = table.read("enabled", value::flag, report).unwrap_or(false);
    let file = table.read("file", value::file_path, report).unwrap_or_else(|| EDGE_CERTIFICATE.into());
    let lifetime = lifetime(&mut table, report);
    let cluster = issuing_cluster(&mut table, "enabled", asked, env, report);
    table.finish(report);
    Some(EdgeCsrConfig { cluster: cluster?, file, lifetime, node_ip })
}

const EDGE_CERTIFICATE: &str = "/var/lib/tunnel/pki/agent.pem";

// Ports of nodes.

/// `[server.node_ports]`: a ConfigMap that lists ports of nodes, and the Service that routes these ports to this
/// server's HTTP and TLS ports.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct NodePortsConfig {
    /// The cluster of the objects.
    pub cluster: ClusterSettings,
    /// Namespace of the ConfigMap.
    pub namespace: String,
    /// Name of the ConfigMap.
    pub configmap: String,
    /// Service in the server's namespace that gets the listed ports; `None` changes no Service.
    pub service: Option<String>,
    /// Port of this server that forwards to the node's port in a request's Host: the Service's target for HTTP ports;
    /// `None` if there is none.
    pub http: Option<u16>,
    /// The same port with TLS: the Service's target for HTTPS ports; `None` if there is none.
    pub https: Option<u16>,
}

/// Reads `[server.node_ports]`. `http` and `https` are the ports that forward by Host. Returns `None` if the table is
/// absent, or unusable, which is recorded.
pub(crate) fn node_ports(
    cloud: &mut ConfigTable<'_>,
    (http, https): (Option<u16>, Option<u16>),
    env: &Environment,
    report: &mut Diagnostics,
) -> Option<NodePortsConfig> {
    let mut table = cloud.table("node_ports", report);
    let mut named = |key, default: &str| {
        let found = table.read(key, name, report).flatten();
        found.unwrap_or_else(|| default.to_owned())
    };
    let (configmap, namespace) = (named("configmap", PORTS_CONFIGMAP), named("namespace", NAMESPACE));
    let service = table.read("service", name, report).flatten();
    let reached = reached(parts::KEEP, env);
    if table.is_present() {
        if let Err(why) = reached {
            table.error("configmap", Some("requires Kubernetes".to_owned()), why, report);
        }
        if service.is_some() && http.is_none() && https.is_none() {
            let found = Some("set, but it has no port to route to".to_owned());
            let wanted = "route a port of [server.http] or [server.https] by Host: ports = { \
                          \"10264\" = \"host\" }";
            table.error("service", found, wanted, report);
        }
    }
    let present = table.is_present();
    table.finish(report);
    let cluster = reached.ok().filter(|_| present)?;
    Some(NodePortsConfig { cluster, namespace, configmap, service, http, https })
}

/// Names that YurtTunnel uses.
const PORTS_CONFIGMAP: &str = "yurt-tunnel-server-cfg";
const NAMESPACE: &str = "kube-system";

// Names of nodes.

/// `[server.node_names]`: the ConfigMap from which the cluster's DNS reads the addresses of all nodes.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct NodeNameSettings {
    /// The cluster of the objects.
    pub cluster: ClusterSettings,
    /// Namespace of ConfigMap and Lease.
    pub namespace: String,
    /// Name of the ConfigMap.
    pub configmap: String,
    /// Key in the ConfigMap.
    pub key: String,
    /// The Lease; its holder writes the ConfigMap.
    pub lease: String,
    /// Label and value of the Nodes that are edges.
    pub edges: (String, String),
    /// Patterns of allowed Node names with dots.
    pub names: Vec<Glob>,
    /// The Service, in our own namespace, that edges' names resolve to.
    pub service: String,
    /// The ConfigMap that lists the server of each edge, if edges' names resolve to servers; `None` resolves them to
    /// the Service.
    pub holders: Option<String>,
}

/// Reads `[server.node_names]`. `published` is the ConfigMap in which nodes are published, `zone` their zone. Returns `None` if it is absent, or unusable, which is recorded.
pub(crate) fn node_names(
    cloud: &mut ConfigTable<'_>,
    (published, zone): (Option<&String>, &str),
    env: &Environment,
    report: &mut Diagnostics,
) -> Option<NodeNameSettings> {
    let mut table = cloud.table("node_names", report);
    let mut named = |key, default: &str| {
        let found = table.read(key, name, report).flatten();
        found.unwrap_or_else(|| default.to_owned())
    };
    let (configmap, namespace) = (named("configmap", NAMES_CONFIGMAP), named("namespace", NAMESPACE));
    let (key, lease, service) =
        (named("key", NAMES_KEY), named("lease", NAMES_LEASE), named("service", NAMES_SERVICE));
    let edges =
        table.read("edges", label, report).unwrap_or_else(|| (EDGE_LABEL.to_owned(), "true".to_owned()));
    let names = table.list("names", value::parsed::<Glob>, report).unwrap_or_default();
    let to_server = table.read("resolve_to", resolve_to, report).unwrap_or_default();
    let reached = reached(parts::KEEP, env);
    let present = table.is_present();
    if present && let Err(why) = reached {
        table.error("configmap", Some("requires Kubernetes".to_owned()), why, report);
    }
    if present && published == Some(&configmap) {
        let found = Some(format!("{configmap:?}, which publish of [server.dns] writes"));
        table.error("configmap", found, "use a separate ConfigMap", report);
    }
    let holders = published.filter(|_| to_server && zone.is_empty()).cloned();
    if to_server && holders.is_none() {
        let wanted = "requires publish = \"configmap\" of [server.dns], without a zone";
        table.error("resolve_to", Some("\"server\"".to_owned()), wanted, report);
    }
    table.finish(report);
    let cluster = reached.ok().filter(|_| present)?;
    Some(NodeNameSettings { cluster, namespace, configmap, key, lease, edges, names, service, holders })
}

/// Returns true if edges' names resolve to the servers that they are connected to, false if to the Service.
fn resolve_to(value: &DeValue<'_>) -> Result<bool, ValueError> {
    match value::text(value)?.as_str() {
        "service" => Ok(false),
        "server" => Ok(true),
        _ => Err(value::wrong(value, "expected \"service\" or \"server\"")),
    }
}

/// Reads a label with its value.
fn label(value: &DeValue<'_>) -> Result<(String, String), ValueError> {
    let text = value::nonempty(value)?;
    let sound = |b: u8| b.is_ascii_alphanumeric() || matches!(b, b'-' | b'_' | b'.' | b'/');
    match text.split_once('=') {
        Some((label, value)) if !label.is_empty() && label.bytes().chain(value.bytes()).all(sound) => {
            Ok((label.to_owned(), value.to_owned()))
        }
        _ => Err(value::wrong(value, "expected label=value, as in \"openyurt.io/is-edge-worker=true\"")),
    }
}

/// Names that YurtTunnel uses; the Lease is ours.
const NAMES_CONFIGMAP: &str = "yurt-tunnel-nodes";
const NAMES_KEY: &str = "tunnel-nodes";
const EDGE_LABEL: &str = "openyurt.io/is-edge-worker";
const NAMES_SERVICE: &str = "x-tunnel-server-internal-svc";
const NAMES_LEASE: &str = "tunnel-node-names";
