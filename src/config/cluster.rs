//! The Kubernetes cluster that a process uses.

use std::path::PathBuf;

use toml::de::DeValue;

use crate::config::Environment;
use crate::config::value::{self, ValueError};
use tunnel_base::names::NodeName;
use tunnel_base::parts::Part;

/// The Kubernetes cluster that this process uses.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ClusterSettings {
    /// The kubeconfig file (`--kubeconfig`); `None` uses the service account that Kubernetes gives to each pod.
    pub kubeconfig: Option<PathBuf>,
    /// `POD_NAMESPACE`; `None` means the namespace of the service account or the file.
    pub namespace: Option<String>,
    /// The Service whose ready endpoints are the servers; `None` if Kubernetes does not list them.
    pub service: Option<String>,
}

/// Returns the cluster for a part of the program, without the Service of the servers.
///
/// # Errors
///
/// Returns the reason and a hint if Kubernetes cannot be used.
pub(crate) fn reached(part: Part, env: &Environment) -> Result<ClusterSettings, &'static str> {
    part?;
    let namespace = env.pod_namespace.clone().filter(|name| !name.is_empty());
    let cluster = ClusterSettings { kubeconfig: env.kubeconfig.clone(), namespace, service: None };
    let inside = env.kubernetes_service_host.as_ref().is_some_and(|host| !host.is_empty());
    let outside = "this process runs outside a cluster; set its kubeconfig with --kubeconfig";
    if inside || env.kubeconfig.is_some() { Ok(cluster) } else { Err(outside) }
}

/// Reads the name of a Kubernetes object; an empty text means none.
pub(crate) fn name(value: &DeValue<'_>) -> Result<Option<String>, ValueError> {
    parse_name(&value::text(value)?).map_err(|wanted| value::wrong(value, wanted))
}

/// Parses the name of a Kubernetes object; an empty text means none.
///
/// # Errors
///
/// Returns a description of what is allowed.
pub(crate) fn parse_name(text: &str) -> Result<Option<String>, &'static str> {
    let sound =
        text.bytes().all(|b| b.is_ascii_lowercase() || b.is_ascii_digit() || matches!(b, b'-' | b'.'));
    match text {
        empty if empty.trim().is_empty() => Ok(None),
        text if sound && text.parse::<NodeName>().is_ok() => Ok(Some(text.to_owned())),
        _ => Err("expected a Kubernetes name: lower-case letters, digits, '-' and '.'"),
    }
}
