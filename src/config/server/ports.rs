//! The table `server.node_ports`: a ConfigMap of named node ports, and the Service that routes them to the servers.

use crate::config::server::https::{HttpConfig, HttpsConfig, NodePortConfig};
use crate::config::server::kubernetes::{self, ClusterSettings};
use crate::config::table::ConfigTable;
use crate::config::{Diagnostics, Environment};
use crate::parts;
use tunnel_base::policy::ports::PortTarget;

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

/// Reads the table. Returns `None` if it is absent, or unusable, which is recorded.
pub(crate) fn read(
    cloud: &mut ConfigTable<'_>,
    (http, https): (&HttpConfig, &HttpsConfig),
    env: &Environment,
    report: &mut Diagnostics,
) -> Option<NodePortsConfig> {
    let mut table = cloud.table("node_ports", report);
    let mut name = |key, default: &str| {
        let name = table.read(key, kubernetes::name, report).flatten();
        name.unwrap_or_else(|| default.to_owned())
    };
    let (configmap, namespace) = (name("configmap", CONFIGMAP), name("namespace", NAMESPACE));
    let service = table.read("service", kubernetes::name, report).flatten();
    let by_host = |ports: &[NodePortConfig]| {
        let port = ports.iter().find(|port| port.stands_for == PortTarget::Host);
        port.map(|port| port.at.port())
    };
    let (http, https) = (by_host(&http.ports), by_host(&https.ports));
    let reached = kubernetes::reached(parts::KEEP, env);
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
const CONFIGMAP: &str = "yurt-tunnel-server-cfg";
const NAMESPACE: &str = "kube-system";
