//! The objects of Kubernetes, as far as we read them: the rest of their text is skipped, and never in memory as values.

use std::borrow::Cow;
use std::collections::BTreeMap;
use std::fmt::Debug;
use std::net::IpAddr;

use k8s_openapi::api::core::v1 as whole;
use kube::Resource;
use kube::api::ObjectMeta;
use serde::{Deserialize, Deserializer};

use super::facts::{Facts, NodeFacts, PodFacts};
use super::table::{Claims, FactTable};
use crate::registry::endpoints::SERVICE_LABEL;
use crate::registry::follow::{NodeStatus, part_of};

/// An object of which facts are kept.
pub(super) trait Partial:
    Resource + Clone + for<'de> Deserialize<'de> + Debug + Send + 'static
{
    /// What is kept of it.
    type Facts: Claims;

    /// Where that is kept.
    fn table(facts: &mut Facts) -> &mut FactTable<Self::Facts>;

    /// What is to be kept of it; `None`: it does not count.
    fn facts(self) -> Option<Self::Facts>;
}

mod services;

pub(super) use services::{Cache, ServicePart, SlicePart};

part_of!(NodePart, whole::Node);
part_of!(PodPart, whole::Pod);

/// Of all that it may be labelled with, only whose slice it is.
#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct Meta {
    name: Option<String>,
    namespace: Option<String>,
    resource_version: Option<String>,
    #[serde(default)]
    labels: Labels,
}

#[derive(Deserialize, Default)]
struct Labels {
    #[serde(rename = "kubernetes.io/service-name")]
    service: Option<String>,
}

fn meta<'de, D: Deserializer<'de>>(from: D) -> Result<ObjectMeta, D::Error> {
    let Meta { name, namespace, resource_version, labels } = Meta::deserialize(from)?;
    let labels = labels.service.map(|service| BTreeMap::from([(SERVICE_LABEL.to_owned(), service)]));
    Ok(ObjectMeta { name, namespace, resource_version, labels, ..ObjectMeta::default() })
}

#[derive(Debug, Clone, Deserialize)]
pub(super) struct NodePart {
    #[serde(deserialize_with = "meta")]
    metadata: ObjectMeta,
    #[serde(default)]
    spec: NodeSpec,
    #[serde(default)]
    status: NodeStatus,
}

#[derive(Debug, Clone, Deserialize, Default)]
#[serde(default)]
struct NodeSpec {
    #[serde(rename = "podCIDRs")]
    pod_cidrs: Vec<String>,
}

impl Partial for NodePart {
    type Facts = NodeFacts;

    fn table(facts: &mut Facts) -> &mut FactTable<NodeFacts> {
        &mut facts.nodes
    }

    fn facts(self) -> Option<NodeFacts> {
        Some(NodeFacts {
            ips: self.status.ips("InternalIP"),
            outside: self.status.ips("ExternalIP"),
            pods: self.spec.pod_cidrs.iter().filter_map(|net| net.parse().ok()).collect(),
        })
    }
}

#[derive(Debug, Clone, Deserialize)]
pub(super) struct PodPart {
    #[serde(deserialize_with = "meta")]
    metadata: ObjectMeta,
    #[serde(default)]
    spec: PodSpec,
    #[serde(default)]
    status: PodStatus,
}

#[derive(Debug, Clone, Deserialize, Default)]
#[serde(default, rename_all = "camelCase")]
struct PodSpec {
    node_name: Option<String>,
    host_network: bool,
}

#[derive(Debug, Clone, Deserialize, Default)]
#[serde(default)]
struct PodStatus {
    phase: String,
    #[serde(rename = "podIPs")]
    pod_ips: Vec<PodIp>,
}

#[derive(Debug, Clone, Deserialize)]
struct PodIp {
    ip: String,
}

impl Partial for PodPart {
    type Facts = PodFacts;

    fn table(facts: &mut Facts) -> &mut FactTable<PodFacts> {
        &mut facts.pods
    }

    fn facts(self) -> Option<PodFacts> {
        let node = self.spec.node_name?.parse().ok()?;
        let over = matches!(self.status.phase.as_str(), "Succeeded" | "Failed");
        let own = self.status.pod_ips.iter().filter(|_| !over && !self.spec.host_network);
        Some(PodFacts { node, ips: addresses(own.map(|own| own.ip.as_str())) })
    }
}

fn addresses<'a>(texts: impl Iterator<Item = &'a str>) -> Box<[IpAddr]> {
    texts.filter_map(|text| text.parse().ok()).collect()
}

#[cfg(test)]
mod tests;
