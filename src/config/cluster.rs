//! The Kubernetes cluster that a process uses.

use std::path::PathBuf;

use derive_more::From;
use serde::de::{Deserializer, Error};
use serde::{Deserialize, Serialize};

use crate::config::Environment;
use crate::parts;
use tunnel_proto::names::NodeName;

/// The Kubernetes cluster that this process uses.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct ClusterSettings {
    /// The kubeconfig file (`--kubeconfig`); `None` uses the service account that Kubernetes gives to each pod.
    pub kubeconfig: Option<PathBuf>,
    /// `POD_NAMESPACE`; `None` means the namespace of the service account or the file.
    pub namespace: Option<String>,
}

/// Returns the cluster.
///
/// # Errors
///
/// Returns the reason and a hint if Kubernetes cannot be used.
pub(crate) fn reached(env: &Environment) -> Result<ClusterSettings, &'static str> {
    parts::KUBERNETES?;
    let namespace = env.pod_namespace.clone().filter(|name| !name.is_empty());
    let cluster = ClusterSettings { kubeconfig: env.kubeconfig.clone(), namespace };
    let inside = env.kubernetes_service_host.as_ref().is_some_and(|host| !host.is_empty());
    let outside = "this process runs outside a cluster; set its kubeconfig with --kubeconfig";
    if inside || env.kubeconfig.is_some() { Ok(cluster) } else { Err(outside) }
}

/// The name of a Kubernetes object.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize, Serialize, From)]
#[from(forward)]
#[serde(transparent)]
pub struct ObjectName(#[serde(deserialize_with = "object_name")] pub String);

fn object_name<'de, D: Deserializer<'de>>(deserializer: D) -> Result<String, D::Error> {
    optional_name(deserializer)?.ok_or_else(|| D::Error::custom(NAME))
}

/// Reads the name of a Kubernetes object; an empty text means none.
pub(crate) fn optional_name<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Option<String>, D::Error> {
    parse_name(&String::deserialize(deserializer)?).map_err(D::Error::custom)
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
        _ => Err(NAME),
    }
}

const NAME: &str = "expected a Kubernetes name: lower-case letters, digits, '-' and '.'";
