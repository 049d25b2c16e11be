//! The table `mode.cloud.ports`: a ConfigMap that names ports of nodes, and the Service that leads them to the pods.

use crate::config::server::https::{HttpConfig, HttpsConfig, NodePortConfig};
use crate::config::server::kubernetes::{self, ClusterSettings};
use crate::config::table::ConfigTable;
use crate::config::{Diagnostics, Environment};
use tunnel_base::policy::ports::PortTarget;

/// `[mode.cloud.ports]`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PortSettings {
    /// The cluster where all of it is.
    pub cluster: ClusterSettings,
    /// Namespace of the ConfigMap.
    pub namespace: String,
    /// Its name.
    pub configmap: String,
    /// The Service, in our own namespace; `None`: none is written.
    pub service: Option<String>,
    /// The port of the pod that stands for what Host names; `None`: there is none.
    pub http: Option<u16>,
    /// The same behind TLS.
    pub https: Option<u16>,
}

/// Reads the table; `None` without it, and where it is of no use, which is noted.
pub(crate) fn read(
    cloud: &mut ConfigTable<'_>,
    (http, https): (&HttpConfig, &HttpsConfig),
    env: &Environment,
    report: &mut Diagnostics,
) -> Option<PortSettings> {
    let mut table = cloud.table("ports", report);
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
    let reached = kubernetes::reached(env);
    if table.is_present() {
        if let Err(why) = reached {
            table.error("configmap", Some("asks for Kubernetes".to_owned()), why, report);
        }
        if service.is_some() && http.is_none() && https.is_none() {
            let found = Some("given, but it can lead nowhere".to_owned());
            let wanted = "let a port of [mode.cloud.http] or [mode.cloud.https] stand for what Host names: addr = { \
                          \"10264\" = \"host\" }";
            table.error("service", found, wanted, report);
        }
    }
    let present = table.is_present();
    table.finish(report);
    let cluster = reached.ok().filter(|_| present)?;
    Some(PortSettings { cluster, namespace, configmap, service, http, https })
}

/// What YurtTunnel calls it, and where it has it.
const CONFIGMAP: &str = "yurt-tunnel-server-cfg";
const NAMESPACE: &str = "kube-system";
