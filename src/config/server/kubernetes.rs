//! Config for Kubernetes: our own keys (`[mode.cloud.registry]`) and SuperEdge's.

use std::path::PathBuf;

use toml::de::DeValue;

use crate::config::server::peers::PeerKey;
use crate::config::table::ConfigTable;
use crate::config::value::{self, ValueError};
use crate::config::{Diagnostics, Environment, WarningKind};
use tunnel_base::names::NodeName;

/// The Kubernetes cluster that this process uses.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ClusterSettings {
    /// The kubeconfig file (`--k`); `None` uses the service account that Kubernetes gives to each pod.
    pub kubeconfig: Option<PathBuf>,
    /// `POD_NAMESPACE`; `None` means the namespace of the service account or the file.
    pub namespace: Option<String>,
    /// The Service whose ready endpoints are the servers; `None` if Kubernetes does not list them.
    pub service: Option<String>,
}

/// Values of SuperEdge's tables `[mode.cloud.stream.dns]` and `[mode.cloud.stream.register]`, used where
/// `[mode.cloud.registry]` sets nothing.
#[derive(Debug, Default)]
pub(crate) struct SuperEdgeTables {
    /// ConfigMap in which this server publishes.
    configmap: Option<String>,
    /// Service that lists the peers, after the name of the table that names it.
    service: Option<(&'static str, String)>,
}

/// Reads SuperEdge's tables. `debug` means not to use Kubernetes.
pub(crate) fn superedge(stream: &mut ConfigTable<'_>, report: &mut Diagnostics) -> SuperEdgeTables {
    let mut dns = stream.table("dns", report);
    let configmap = dns.read("configmap", name, report).flatten();
    // Mount path of the ConfigMap, which we neither read nor write.
    dns.ignore("hosts", report);
    let service = dns.read("service", name, report).flatten();
    let debug = dns.read("debug", value::flag, report).unwrap_or(false);
    dns.finish(report);
    let mut register = stream.table("register", report);
    let newer = register.read("service", name, report).flatten();
    register.finish(report);
    if debug {
        return SuperEdgeTables::default();
    }
    let service = newer.map(|name| ("register", name)).or(service.map(|name| ("dns", name)));
    SuperEdgeTables { configmap, service }
}

/// Returns the ConfigMap to publish in, the cluster if a key requires it, and the key that names its Service. `publish`
/// is whether the file asks to publish there; `None` if it has no such key, so that SuperEdge's tables apply.
pub(crate) fn read(
    table: &mut ConfigTable<'_>,
    superedge: SuperEdgeTables,
    publish: Option<bool>,
    env: &Environment,
    report: &mut Diagnostics,
) -> (Option<String>, Option<ClusterSettings>, Option<PeerKey>) {
    let configmap = table.read("configmap", name, report).flatten();
    let service = table.read("service", name, report).flatten();
    let mut superedge = superedge;
    if publish.is_some() {
        superedge.configmap = None;
    }
    let reached = reached(env);
    if let Err(why) = reached {
        for (asked, key) in [(publish == Some(true), "publish"), (service.is_some(), "service")] {
            if asked {
                table.error(key, Some("requires Kubernetes".to_owned()), why, report);
            }
        }
        let mut tables: Vec<_> = superedge.service.iter().map(|(table, _)| *table).collect();
        tables.extend(superedge.configmap.iter().map(|_| "dns"));
        tables.sort_unstable();
        tables.dedup();
        for name in tables {
            let text = format!("nothing is published in a ConfigMap, and no Service lists peers: {why}");
            report.warn(format!("mode.cloud.stream.{name}"), WarningKind::Unsupported, text);
        }
        return (None, None, None);
    }
    let publish = publish.unwrap_or(superedge.configmap.is_some());
    let map = publish.then(|| configmap.or(superedge.configmap).unwrap_or_else(|| CONFIGMAP.to_owned()));
    let ours = service.as_ref().map(|_| PeerKey { key: "mode.cloud.registry.service", must_link: true });
    let named = ours.or(superedge.service.as_ref().map(|(table, _)| PeerKey {
        key: if *table == "register" {
            "mode.cloud.stream.register.service"
        } else {
            "mode.cloud.stream.dns.service"
        },
        must_link: false,
    }));
    let service = service.or(superedge.service.map(|(_, name)| name));
    let asked = map.is_some() || service.is_some();
    let cluster = reached.ok().filter(|_| asked).map(|cluster| ClusterSettings { service, ..cluster });
    (map, cluster, named)
}

/// Returns the cluster, without the Service of the servers.
///
/// # Errors
///
/// Returns the reason and a hint if Kubernetes cannot be used.
pub(crate) fn reached(env: &Environment) -> Result<ClusterSettings, &'static str> {
    let namespace = env.pod_namespace.clone().filter(|name| !name.is_empty());
    let cluster = ClusterSettings { kubeconfig: env.kubeconfig.clone(), namespace, service: None };
    unreachable(env).map_or(Ok(cluster), Err)
}

/// Returns the reason why Kubernetes cannot be used, with a hint.
fn unreachable(env: &Environment) -> Option<&'static str> {
    if !cfg!(feature = "kubernetes") {
        return Some(
            "this program is built without Kubernetes; build it with cargo's feature \"kubernetes\"",
        );
    }
    let inside = env.kubernetes_service_host.as_ref().is_some_and(|host| !host.is_empty());
    let outside = "this process runs outside a cluster; set its kubeconfig with --k";
    (!inside && env.kubeconfig.is_none()).then_some(outside)
}

/// Reads the name of a Kubernetes object; an empty text means none.
pub(crate) fn name(value: &DeValue<'_>) -> Result<Option<String>, ValueError> {
    let text = value::text(value)?;
    let sound =
        text.bytes().all(|b| b.is_ascii_lowercase() || b.is_ascii_digit() || matches!(b, b'-' | b'.'));
    match text {
        empty if empty.trim().is_empty() => Ok(None),
        text if sound && text.parse::<NodeName>().is_ok() => Ok(Some(text)),
        _ => Err(value::wrong(value, "expected a Kubernetes name: lower-case letters, digits, '-' and '.'")),
    }
}

/// SuperEdge's name of it.
const CONFIGMAP: &str = "tunnel-nodes";
