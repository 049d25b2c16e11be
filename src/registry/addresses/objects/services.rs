//! Services, their endpoints, and what people write of them.

use std::borrow::Cow;
use std::collections::HashMap;

use k8s_openapi::api::core::v1 as whole;
use k8s_openapi::api::discovery::v1::EndpointSlice;
use kube::Resource;
use kube::api::ObjectMeta;
use serde::Deserialize;

use super::{Partial, addresses, meta};
use crate::registry::addresses::facts::{
    Facts, ReadyEndpoint, ServiceFacts, ServicePort, ServiceSide, SliceFacts,
};
use crate::registry::addresses::table::FactTable;
use crate::registry::endpoints::SERVICE_LABEL;
use crate::registry::follow::part_of;

part_of!(ServicePart, whole::Service);
part_of!(SlicePart, EndpointSlice);
part_of!(Cache, whole::ConfigMap);

#[derive(Debug, Clone, Deserialize)]
pub(crate) struct ServicePart {
    #[serde(deserialize_with = "meta")]
    metadata: ObjectMeta,
    #[serde(default)]
    spec: ServiceSpec,
    #[serde(default)]
    status: ServiceStatus,
}

#[derive(Debug, Clone, Deserialize, Default)]
#[serde(default, rename_all = "camelCase")]
struct ServiceSpec {
    #[serde(rename = "type")]
    kind: String,
    #[serde(rename = "clusterIPs")]
    cluster_ips: Vec<String>,
    #[serde(rename = "externalIPs")]
    external_ips: Vec<String>,
    external_name: Option<String>,
    ports: Vec<PortSpec>,
}

#[derive(Debug, Clone, Deserialize, Default)]
#[serde(default, rename_all = "camelCase")]
struct ServiceStatus {
    load_balancer: LoadBalancer,
}

#[derive(Debug, Clone, Deserialize, Default)]
#[serde(default)]
struct LoadBalancer {
    ingress: Vec<Ingress>,
}

#[derive(Debug, Clone, Deserialize)]
struct Ingress {
    /// It may have a name alone.
    ip: Option<String>,
}

#[derive(Debug, Clone, Deserialize, Default)]
#[serde(default)]
struct PortSpec {
    name: Option<String>,
    /// Of a slice it may be any number: Kubernetes does not check it, and one bad object must not hide all others.
    port: Option<i64>,
    protocol: Option<String>,
}

impl Partial for ServicePart {
    type Facts = ServiceFacts;

    fn table(facts: &mut Facts) -> &mut FactTable<ServiceFacts> {
        &mut facts.services
    }

    fn facts(self) -> Option<ServiceFacts> {
        let ServiceSpec { kind, cluster_ips, external_ips, external_name, ports } = self.spec;
        let external = match (kind.as_str(), external_name) {
            ("ExternalName", name) => Some(name?.parse().ok()?),
            _ => None,
        };
        // A headless one has "None" there.
        let ips = addresses(cluster_ips.iter().map(String::as_str));
        let balanced = self.status.load_balancer.ingress.iter().filter_map(|ingress| ingress.ip.as_deref());
        let outside = addresses(external_ips.iter().map(String::as_str).chain(balanced));
        Some(ServiceFacts { ips, outside, ports: tcp(ports), external })
    }
}

#[derive(Debug, Clone, Deserialize)]
#[serde(rename_all = "camelCase")]
pub(crate) struct SlicePart {
    #[serde(deserialize_with = "meta")]
    metadata: ObjectMeta,
    #[serde(default)]
    address_type: String,
    // Both may be null.
    endpoints: Option<Vec<SliceEndpoint>>,
    ports: Option<Vec<PortSpec>>,
}

#[derive(Debug, Clone, Deserialize)]
#[serde(rename_all = "camelCase")]
struct SliceEndpoint {
    addresses: Vec<String>,
    #[serde(default)]
    conditions: Conditions,
    node_name: Option<String>,
}

#[derive(Debug, Clone, Deserialize, Default)]
struct Conditions {
    ready: Option<bool>,
}

impl Partial for SlicePart {
    type Facts = SliceFacts;

    fn table(facts: &mut Facts) -> &mut FactTable<SliceFacts> {
        &mut facts.slices
    }

    fn facts(self) -> Option<SliceFacts> {
        // Of names Kubernetes does not check what they are, and one that reads as 127.0.0.1 would be the edge itself.
        if self.address_type == "FQDN" {
            return None;
        }
        let service = self.metadata.labels.as_ref()?.get(SERVICE_LABEL)?;
        let service = format!("{}/{service}", self.metadata.namespace.as_deref()?).into();
        // Unknown counts as ready, as Kubernetes wants it; of several addresses the first one stands for all.
        let ready = self.endpoints.into_iter().flatten().filter(|one| one.conditions.ready.unwrap_or(true));
        let ready = ready.filter_map(|one| {
            let node = one.node_name.and_then(|name| name.parse().ok());
            Some(ReadyEndpoint { ip: one.addresses.first()?.parse().ok()?, node })
        });
        Some(SliceFacts { service, ports: tcp(self.ports.unwrap_or_default()), ready: ready.collect() })
    }
}

/// SuperEdge's ConfigMap `tunnel-cache`, of which only what people write by hand counts.
#[derive(Debug, Clone, Deserialize)]
pub(crate) struct Cache {
    #[serde(deserialize_with = "meta")]
    metadata: ObjectMeta,
    #[serde(default)]
    data: CacheData,
}

#[derive(Debug, Clone, Deserialize, Default)]
#[serde(default)]
struct CacheData {
    user_services: String,
}

impl Cache {
    /// The Services, as `namespace/name`, and where they are. What cannot be read counts for nothing.
    pub(crate) fn sides(&self) -> HashMap<String, ServiceSide> {
        let lines = self.data.user_services.lines();
        let sides = lines.filter_map(|line| {
            let mut words = line.split_whitespace();
            let (service, namespace) = words.next()?.split_once('.')?;
            let side = match words.next()? {
                "edge" => ServiceSide::Edge,
                "cloud" => ServiceSide::Cloud,
                _ => return None,
            };
            Some((format!("{namespace}/{service}"), side))
        });
        sides.collect()
    }
}

fn tcp(ports: Vec<PortSpec>) -> Box<[ServicePort]> {
    let tcp = ports.into_iter().filter(|port| port.protocol.as_deref().is_none_or(|name| name == "TCP"));
    tcp.filter_map(|port| {
        let number = u16::try_from(port.port?).ok().filter(|number| *number > 0)?;
        Some(ServicePort { name: port.name.unwrap_or_default().into(), number })
    })
    .collect()
}
