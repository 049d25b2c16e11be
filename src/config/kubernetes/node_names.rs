//! Names of nodes.

use educe::Educe;
use serde::de::{Deserializer, Error};
use serde::{Deserialize, Serialize, Serializer};

use crate::config::cluster::{ClusterSettings, ObjectName};
use crate::config::kubernetes::ports::NAMESPACE;
use crate::config::required_cluster::required_cluster;
use crate::config::table::ConfigTableReader;
use tunnel_base::policy::NodeGlob;

/// `[server.node_names]`: addresses of all nodes of the cluster, in a ConfigMap that CoreDNS's hosts plugin mounts, as
/// in YurtTunnel. Names of edges resolve to a Service of the servers, all others to the nodes themselves. The server
/// that holds a Lease writes it. Servers do not use these names to find peers. A Node is left out, with a warning, in
/// three cases. Its name collides with names that programs look up (localhost, or below svc or cluster.local). Its name
/// has dots and matches none of names. Or the ConfigMap is full. Requires Kubernetes, as kubernetes_service of
/// `[server.peers]` does. Requires a role that may list and watch nodes, get, create and update the ConfigMap and the
/// Lease, and get the Service. Without this table none is written.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize, Serialize, Educe)]
#[educe(Default)]
#[serde(default)]
pub struct NodeNameSettings {
    /// Name of the ConfigMap. Its key belongs entirely to the servers. It is created if it does not exist.
    // Names that YurtTunnel uses; the Lease is ours.
    #[educe(Default = "yurt-tunnel-nodes".into())]
    pub configmap: ObjectName,
    /// Key in the ConfigMap.
    #[educe(Default = "tunnel-nodes".into())]
    pub key: ObjectName,
    /// Name of the Lease.
    #[educe(Default = "tunnel-node-names".into())]
    pub lease: ObjectName,
    /// Namespace of both.
    #[educe(Default = NAMESPACE.into())]
    pub namespace: ObjectName,
    /// Label and value of the Nodes that are edges. Nodes without it, and without superedge.io/node-edge=enable or
    /// openyurt.io/is-edge-worker=true, cannot link.
    #[serde(with = "LabelForm")]
    #[educe(Default = ("openyurt.io/is-edge-worker".to_owned(), "true".to_owned()))]
    pub edges: (String, String),
    /// Patterns of allowed Node names with dots. Anyone who can add a Node chooses its name, which could otherwise be
    /// that of any host on the Internet. Default: none, only Nodes with names of one label are written.
    ///
    /// Example: `["*.nodes.example.org"]`
    pub names: Vec<NodeGlob>,
    /// Service in the servers' namespace that edges' names resolve to.
    #[educe(Default = "x-tunnel-server-internal-svc".into())]
    pub service: ObjectName,
    /// What an edge's name resolves to. "service": the Service. "server": the server that the node is connected to, or
    /// the Service if there is none; requires what publish = "configmap" of `[server.dns]` writes, without a zone.
    pub resolve_to: ResolveTo,
    /// The cluster of the objects.
    #[serde(skip)]
    pub cluster: ClusterSettings,
    /// The ConfigMap that lists the server of each edge, if edges' names resolve to servers; `None` resolves them to
    /// the Service.
    #[serde(skip)]
    pub holders: Option<String>,
}

/// What the names of edges resolve to.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Deserialize, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum ResolveTo {
    /// The Service of the servers.
    #[default]
    Service,
    /// The server that the edge is connected to.
    Server,
}

/// Reads `[server.node_names]`. `published` is the ConfigMap in which nodes are published, `zone` their zone. Returns
/// `None` if the table is absent, or unusable, which is recorded.
pub(crate) fn node_names(
    cloud: &mut ConfigTableReader<'_>,
    published: Option<&ObjectName>,
    zone: &str,
) -> Option<NodeNameSettings> {
    let mut table = cloud.table("node_names");
    let names: NodeNameSettings = table.fields();
    if !table.is_present() {
        return None;
    }
    let cluster = required_cluster(&table, "configmap", true);
    // Two writers of one ConfigMap would undo each other's changes.
    if published == Some(&names.configmap) {
        let found = Some(format!("{:?}, which publish of [server.dns] writes", names.configmap.0));
        table.error("configmap", found, "use a separate ConfigMap");
    }
    let is_to_server = names.resolve_to == ResolveTo::Server;
    let holders = published.filter(|_| is_to_server && zone.is_empty()).map(|name| name.0.clone());
    if is_to_server && holders.is_none() {
        let expected = "requires publish = \"configmap\" of [server.dns], without a zone";
        table.error("resolve_to", Some("\"server\"".to_owned()), expected);
    }
    table.close(&names);
    Some(NodeNameSettings { cluster: cluster?, holders, ..names })
}

/// The form of a label with its value.
struct LabelForm;

impl LabelForm {
    fn deserialize<'de, D: Deserializer<'de>>(deserializer: D) -> Result<(String, String), D::Error> {
        let text = String::deserialize(deserializer)?;
        let sound = |b: u8| b.is_ascii_alphanumeric() || matches!(b, b'-' | b'_' | b'.' | b'/');
        match text.split_once('=') {
            Some((label, value)) if !label.is_empty() && label.bytes().chain(value.bytes()).all(sound) => {
                Ok((label.to_owned(), value.to_owned()))
            }
            _ => {
                let expected = "expected label=value, for example \"openyurt.io/is-edge-worker=true\"";
                Err(D::Error::custom(expected))
            }
        }
    }

    fn serialize<S: Serializer>(label: &(String, String), serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(&format_args!("{}={}", label.0, label.1))
    }
}
