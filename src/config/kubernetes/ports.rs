//! Ports of nodes.

use educe::Educe;
use serde::{Deserialize, Serialize};

use crate::config::cluster::{self, ClusterSettings, ObjectName};
use crate::config::required_cluster::required_cluster;
use crate::config::table::ConfigTableReader;

/// `[server.node_ports]`: ports of nodes, listed in a ConfigMap while the servers run, as in YurtTunnel. Keys of the
/// ConfigMap: http-proxy-ports and https-proxy-ports, such as "9051,9052", for services at nodes that speak HTTP, and HTTP
/// over TLS. localhost-proxy-ports: ports that are on a node's loopback only (10266,10267 if the key is absent).
/// dnat-ports-pair: the older form, such as "9051=10264" for HTTP and "9443=10263" for TLS. 10250 and 10255 are always
/// served, and ports that servers listen on are rejected. Errors are logged and reported by /readyz; the valid entries
/// apply. Requires Kubernetes, as kubernetes_service of `[server.peers]` does. Requires a role that may get, list and
/// watch the ConfigMap, and get and update the Service. Without this table no ConfigMap is read.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize, Serialize, Educe)]
#[educe(Default)]
#[serde(default)]
pub struct NodePortsConfig {
    /// Name of the ConfigMap.
    // Names that YurtTunnel uses.
    #[educe(Default = "yurt-tunnel-server-cfg".into())]
    pub configmap: ObjectName,
    /// Its namespace.
    #[educe(Default = NAMESPACE.into())]
    pub namespace: ObjectName,
    /// Service in the servers' namespace that gets an entry dnat-PORT for each port. The entry points to the port of
    /// `[server.http]` or `[server.https]` that is set to "host". The Service is written only if it has the annotation
    /// tunnel.cloud.io/ports: managed, and only these entries are changed. Default: none is written.
    ///
    /// Example: `"x-tunnel-server-internal-svc"`
    #[serde(deserialize_with = "cluster::optional_name")]
    pub service: Option<String>,
    /// The cluster of the objects.
    #[serde(skip)]
    pub cluster: ClusterSettings,
    /// Port of this server that forwards to the node's port in a request's Host: the Service's target for HTTP ports;
    /// `None` if there is none.
    #[serde(skip)]
    pub http: Option<u16>,
    /// The same port with TLS: the Service's target for HTTPS ports; `None` if there is none.
    #[serde(skip)]
    pub https: Option<u16>,
}

/// Reads `[server.node_ports]`. `http` and `https` are the ports that forward by Host. Returns `None` if the table is
/// absent, or unusable, which is recorded.
pub(crate) fn node_ports(
    cloud: &mut ConfigTableReader<'_>,
    http: Option<u16>,
    https: Option<u16>,
) -> Option<NodePortsConfig> {
    let mut table = cloud.table("node_ports");
    let ports: NodePortsConfig = table.fields();
    if !table.is_present() {
        return None;
    }
    let cluster = required_cluster(&table, "configmap", true);
    if ports.service.is_some() && http.is_none() && https.is_none() {
        let found = Some("set, but it has no port to route to".to_owned());
        let expected = "route a port of [server.http] or [server.https] by Host: ports = { \
                      \"10264\" = \"host\" }";
        table.error("service", found, expected);
    }
    table.close(&ports);
    Some(NodePortsConfig { cluster: cluster?, http, https, ..ports })
}

/// The namespace that YurtTunnel uses.
pub(super) const NAMESPACE: &str = "kube-system";
