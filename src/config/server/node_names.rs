//! The table `server.node_names`: a ConfigMap from which DNS answers for every node of the cluster.

use toml::de::DeValue;

use crate::config::server::kubernetes::{self, ClusterSettings};
use crate::config::server::registry::{PublishConfig, RegistrySettings};
use crate::config::table::ConfigTable;
use crate::config::value::{self, ValueError};
use crate::config::{Diagnostics, Environment};
use crate::parts;
use tunnel_base::policy::Glob;

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

/// Reads the table. Returns `None` if it is absent, or unusable, which is recorded.
pub(crate) fn read(
    cloud: &mut ConfigTable<'_>,
    registry: &RegistrySettings,
    env: &Environment,
    report: &mut Diagnostics,
) -> Option<NodeNameSettings> {
    let mut table = cloud.table("node_names", report);
    let mut name = |key, default: &str| {
        let name = table.read(key, kubernetes::name, report).flatten();
        name.unwrap_or_else(|| default.to_owned())
    };
    let (configmap, namespace) = (name("configmap", CONFIGMAP), name("namespace", NAMESPACE));
    let (key, lease, service) = (name("key", KEY), name("lease", LEASE), name("service", SERVICE));
    let edges = table.read("edges", label, report).unwrap_or_else(|| (LABEL.to_owned(), "true".to_owned()));
    let names = table.list("names", value::parsed::<Glob>, report).unwrap_or_default();
    let to_server = table.read("resolve_to", resolve_to, report).unwrap_or_default();
    let reached = kubernetes::reached(parts::KEEP, env);
    let present = table.is_present();
    if present && let Err(why) = reached {
        table.error("configmap", Some("requires Kubernetes".to_owned()), why, report);
    }
    let published = match &registry.publish {
        PublishConfig::ConfigMap(name) => Some(name),
        _ => None,
    };
    if present && published == Some(&configmap) {
        let found = Some(format!("{configmap:?}, which publish of [server.dns] writes"));
        table.error("configmap", found, "use a separate ConfigMap", report);
    }
    let holders = published.filter(|_| to_server && registry.zone.is_empty()).cloned();
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
const CONFIGMAP: &str = "yurt-tunnel-nodes";
const NAMESPACE: &str = "kube-system";
const KEY: &str = "tunnel-nodes";
const LABEL: &str = "openyurt.io/is-edge-worker";
const SERVICE: &str = "x-tunnel-server-internal-svc";
const LEASE: &str = "tunnel-node-names";
