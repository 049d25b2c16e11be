//! The settings for Kubernetes: our own keys (`[mode.cloud.registry]`) and SuperEdge's.

use std::path::PathBuf;

use toml::de::DeValue;

use crate::config::server::peers::PeerKey;
use crate::config::table::ConfigTable;
use crate::config::value::{self, ValueError};
use crate::config::{Diagnostics, Environment, WarningKind};
use tunnel_base::names::NodeName;

/// The cluster of Kubernetes that this pod asks.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ClusterSettings {
    /// The kubeconfig file to reach it by (`--k`); `None`: the service account that Kubernetes gives to each pod.
    pub kubeconfig: Option<PathBuf>,
    /// `POD_NAMESPACE`; `None`: the namespace of the service account or the file.
    pub namespace: Option<String>,
    /// Service whose ready endpoints are the pods; `None`: Kubernetes does not list the pods.
    pub service: Option<String>,
}

/// `[mode.cloud.stream.dns]` and `[mode.cloud.stream.register]`.
#[derive(Debug, Default)]
pub(crate) struct SuperEdge {
    configmap: Option<String>,
    /// And the table that names it.
    service: Option<(&'static str, String)>,
}

/// Reads SuperEdge's tables. `debug` means to do without Kubernetes.
pub(crate) fn superedge(stream: &mut ConfigTable<'_>, report: &mut Diagnostics) -> SuperEdge {
    let mut dns = stream.table("dns", report);
    let configmap = dns.read("configmap", name, report).flatten();
    // Where the ConfigMap is mounted: we neither need to read it nor ever write it.
    dns.ignore("hosts", report);
    let service = dns.read("service", name, report).flatten();
    let debug = dns.read("debug", value::flag, report).unwrap_or(false);
    dns.finish(report);
    let mut register = stream.table("register", report);
    let newer = register.read("service", name, report).flatten();
    register.finish(report);
    if debug {
        return SuperEdge::default();
    }
    let service = newer.map(|name| ("register", name)).or(service.map(|name| ("dns", name)));
    SuperEdge { configmap, service }
}

/// The ConfigMap to publish in, if any, the cluster if a setting needs it, and what names its Service. `publish`:
/// whether the file asks to publish there; `None`: it has no such key, and SuperEdge's tables count.
pub(crate) fn read(
    table: &mut ConfigTable<'_>,
    superedge: SuperEdge,
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
                table.error(key, Some("asks for Kubernetes".to_owned()), why, report);
            }
        }
        let mut tables: Vec<_> = superedge.service.iter().map(|(table, _)| *table).collect();
        tables.extend(superedge.configmap.iter().map(|_| "dns"));
        tables.sort_unstable();
        tables.dedup();
        for name in tables {
            let text =
                format!("{why}: nothing is published in a ConfigMap, and a Service tells of no other pods");
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

/// The cluster, without the Service of the pods.
///
/// # Errors
///
/// There is none: why, and what to do.
pub(crate) fn reached(env: &Environment) -> Result<ClusterSettings, &'static str> {
    let namespace = env.pod_namespace.clone().filter(|name| !name.is_empty());
    let cluster = ClusterSettings { kubeconfig: env.kubeconfig.clone(), namespace, service: None };
    unreachable(env).map_or(Ok(cluster), Err)
}

/// Why Kubernetes cannot be used, and the remedy.
fn unreachable(env: &Environment) -> Option<&'static str> {
    if !cfg!(feature = "kubernetes") {
        return Some(
            "this program is built without Kubernetes: build it with cargo's feature \"kubernetes\"",
        );
    }
    let inside = env.kubernetes_service_host.as_ref().is_some_and(|host| !host.is_empty());
    let outside = "this process runs outside a cluster: name its kubeconfig with --k";
    (!inside && env.kubeconfig.is_none()).then_some(outside)
}

/// Name of an object of Kubernetes; empty is none.
pub(crate) fn name(value: &DeValue<'_>) -> Result<Option<String>, ValueError> {
    let text = value::text(value)?;
    let sound =
        text.bytes().all(|b| b.is_ascii_lowercase() || b.is_ascii_digit() || matches!(b, b'-' | b'.'));
    match text {
        empty if empty.trim().is_empty() => Ok(None),
        text if sound && text.parse::<NodeName>().is_ok() => Ok(Some(text)),
        _ => Err(value::wrong(value, "want a name as Kubernetes has it: small letters, digits, '-' and '.'")),
    }
}

/// What SuperEdge calls it.
const CONFIGMAP: &str = "tunnel-nodes";
