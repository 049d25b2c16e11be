//! Partial types of Kubernetes objects. Other fields are skipped and never held in memory as values.

use std::borrow::Cow;
use std::collections::HashMap;
use std::fmt::Debug;
use std::net::IpAddr;

use k8s_openapi::api::core::v1::{ConfigMap, Service, ServiceStatus};
use k8s_openapi::api::discovery::v1::{EndpointConditions, EndpointSlice};
use kube::Resource;
use kube::api::ObjectMeta;
use serde::Deserialize;

use crate::endpoint_watch::SERVICE_LABEL;
use crate::partial::{PartialNode, PartialPod, metadata, part_of};
use tunnel_base::addresses::cluster_state::{
    ClusterState, KubeEndpointSlice, KubeNode, KubePod, KubeService, ReadyEndpoint, ServicePort, ServiceSide,
};
use tunnel_base::addresses::object_index::{IndexKeys, ObjectIndex};

/// An object of which facts are kept.
pub(crate) trait PartialObject:
    Resource + Clone + for<'de> Deserialize<'de> + Debug + Send + 'static
{
    /// The facts that are kept.
    type Facts: IndexKeys;

    /// Returns the table of these facts.
    fn table(facts: &mut ClusterState) -> &mut ObjectIndex<Self::Facts>;

    /// Returns the facts of this object, or `None` if it is ignored.
    fn facts(self) -> Option<Self::Facts>;
}

impl PartialObject for PartialNode {
    type Facts = KubeNode;

    fn table(facts: &mut ClusterState) -> &mut ObjectIndex<KubeNode> {
        &mut facts.nodes
    }

    fn facts(self) -> Option<KubeNode> {
        Some(KubeNode {
            ips: self.status.ips("InternalIP"),
            outside: self.status.ips("ExternalIP"),
            names: self.status.names(self.meta().name.as_deref()),
            pods: self.spec.pod_cidrs.iter().filter_map(|net| net.parse().ok()).collect(),
        })
    }
}

impl PartialObject for PartialPod {
    type Facts = KubePod;

    fn table(facts: &mut ClusterState) -> &mut ObjectIndex<KubePod> {
        &mut facts.pods
    }

    fn facts(self) -> Option<KubePod> {
        let node = self.spec.node_name?.parse().ok()?;
        let over = matches!(self.status.phase.as_str(), "Succeeded" | "Failed");
        let own = self.status.pod_ips.iter().filter(|_| !over && !self.spec.host_network);
        Some(KubePod { node, ips: addresses(own.map(|own| own.ip.as_str())) })
    }
}

pub(super) fn addresses<'a>(texts: impl Iterator<Item = &'a str>) -> Box<[IpAddr]> {
    texts.filter_map(|text| text.parse().ok()).collect()
}

part_of!(PartialService, Service);
part_of!(PartialEndpointSlice, EndpointSlice);

/// The fields of a Service that the address book uses; read instead of the whole object.
#[derive(Debug, Clone, Deserialize)]
pub(crate) struct PartialService {
    #[serde(deserialize_with = "metadata")]
    metadata: ObjectMeta,
    #[serde(default)]
    spec: ServiceSpec,
    #[serde(default)]
    status: ServiceStatus,
}

/// The part of a Service's spec that is read: its type, addresses and ports.
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

/// A port of a Service or of an EndpointSlice.
#[derive(Debug, Clone, Deserialize, Default)]
#[serde(default)]
struct PortSpec {
    name: Option<String>,
    /// In a slice this may be any number, because Kubernetes does not check it. One invalid object must not hide all
    /// others.
    port: Option<i64>,
    protocol: Option<String>,
}

impl PartialObject for PartialService {
    type Facts = KubeService;

    fn table(facts: &mut ClusterState) -> &mut ObjectIndex<KubeService> {
        &mut facts.services
    }

    fn facts(self) -> Option<KubeService> {
        let ServiceSpec { kind, cluster_ips, external_ips, external_name, ports } = self.spec;
        let external = match (kind.as_str(), external_name) {
            ("ExternalName", name) => Some(name?.parse().ok()?),
            _ => None,
        };
        // A headless Service has "None" there.
        let ips = addresses(cluster_ips.iter().map(String::as_str));
        let balancer = self.status.load_balancer.and_then(|balancer| balancer.ingress).unwrap_or_default();
        // An ingress may have only a host name.
        let balanced = balancer.iter().filter_map(|ingress| ingress.ip.as_deref());
        let outside = addresses(external_ips.iter().map(String::as_str).chain(balanced));
        Some(KubeService { ips, outside, ports: tcp(ports), external })
    }
}

/// The fields of an EndpointSlice that the address book uses; read instead of the whole object.
#[derive(Debug, Clone, Deserialize)]
#[serde(rename_all = "camelCase")]
pub(crate) struct PartialEndpointSlice {
    #[serde(deserialize_with = "metadata")]
    metadata: ObjectMeta,
    #[serde(default)]
    address_type: String,
    // Both may be null.
    endpoints: Option<Vec<SliceEndpoint>>,
    ports: Option<Vec<PortSpec>>,
}

/// An endpoint in an EndpointSlice: its addresses, whether it is ready, and its node.
#[derive(Debug, Clone, Deserialize)]
#[serde(rename_all = "camelCase")]
struct SliceEndpoint {
    addresses: Vec<String>,
    #[serde(default)]
    conditions: EndpointConditions,
    node_name: Option<String>,
}

impl PartialObject for PartialEndpointSlice {
    type Facts = KubeEndpointSlice;

    fn table(facts: &mut ClusterState) -> &mut ObjectIndex<KubeEndpointSlice> {
        &mut facts.slices
    }

    fn facts(self) -> Option<KubeEndpointSlice> {
        // Kubernetes does not check what these names are, and a name that parses as 127.0.0.1 would be the edge itself.
        if self.address_type == "FQDN" {
            return None;
        }
        let service = self.metadata.labels.as_ref()?.get(SERVICE_LABEL)?;
        let service = format!("{}/{service}", self.metadata.namespace.as_deref()?).into();
        // An unknown readiness means ready, as Kubernetes specifies. The first of several addresses represents the
        // endpoint.
        let ready = self.endpoints.into_iter().flatten().filter(|one| one.conditions.ready.unwrap_or(true));
        let ready = ready.filter_map(|one| {
            let node = one.node_name.and_then(|name| name.parse().ok());
            Some(ReadyEndpoint { ip: one.addresses.first()?.parse().ok()?, node })
        });
        Some(KubeEndpointSlice {
            service,
            ports: tcp(self.ports.unwrap_or_default()),
            ready: ready.collect(),
        })
    }
}

/// Returns the side of each Service that operators list in SuperEdge's ConfigMap `tunnel-cache`, one per line, keyed by
/// `namespace/name`. Invalid lines are ignored.
pub(crate) fn sides(cache: &ConfigMap) -> HashMap<String, ServiceSide> {
    let text = cache.data.as_ref().and_then(|data| data.get("user_services"));
    let sides = text.into_iter().flat_map(|text| text.lines()).filter_map(|line| {
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

fn tcp(ports: Vec<PortSpec>) -> Box<[ServicePort]> {
    let tcp = ports.into_iter().filter(|port| port.protocol.as_deref().is_none_or(|name| name == "TCP"));
    tcp.filter_map(|port| {
        let number = u16::try_from(port.port?).ok().filter(|number| *number > 0)?;
        Some(ServicePort { name: port.name.unwrap_or_default().into(), number })
    })
    .collect()
}
