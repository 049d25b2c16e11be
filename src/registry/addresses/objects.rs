//! The objects of Kubernetes, as far as we read them: the rest of their text is skipped, and never in memory as values.

use std::borrow::Cow;
use std::collections::{BTreeMap, HashMap};
use std::fmt::Debug;
use std::net::IpAddr;

use k8s_openapi::api::core::v1 as core;
use k8s_openapi::api::discovery::v1 as discovery;
use kube::Resource;
use kube::api::ObjectMeta;
use serde::{Deserialize, Deserializer};

use super::facts::{Facts, NodeFacts, PodFacts, ReadyEndpoint, ServiceFacts, ServicePort, Side, SliceFacts};
use super::table::{Claims, FactTable};
use crate::registry::endpoints::SERVICE_LABEL;

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

/// Takes over from the whole type what a part of its objects is called.
macro_rules! part_of {
    ($part:ident, $whole:ty) => {
        impl Resource for $part {
            type DynamicType = ();
            type Scope = <$whole as Resource>::Scope;

            fn kind((): &()) -> Cow<'_, str> {
                <$whole>::kind(&())
            }

            fn group((): &()) -> Cow<'_, str> {
                <$whole>::group(&())
            }

            fn version((): &()) -> Cow<'_, str> {
                <$whole>::version(&())
            }

            fn plural((): &()) -> Cow<'_, str> {
                <$whole>::plural(&())
            }

            fn meta(&self) -> &ObjectMeta {
                &self.metadata
            }

            fn meta_mut(&mut self) -> &mut ObjectMeta {
                &mut self.metadata
            }
        }
    };
}

part_of!(Node, core::Node);
part_of!(Pod, core::Pod);
part_of!(Service, core::Service);
part_of!(Slice, discovery::EndpointSlice);
part_of!(Cache, core::ConfigMap);

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
pub(super) struct Node {
    #[serde(deserialize_with = "meta")]
    metadata: ObjectMeta,
    #[serde(default)]
    status: NodeStatus,
}

#[derive(Debug, Clone, Deserialize, Default)]
#[serde(default)]
struct NodeStatus {
    addresses: Vec<NodeAddress>,
}

#[derive(Debug, Clone, Deserialize)]
struct NodeAddress {
    #[serde(rename = "type")]
    kind: String,
    address: String,
}

impl Partial for Node {
    type Facts = NodeFacts;

    fn table(facts: &mut Facts) -> &mut FactTable<NodeFacts> {
        &mut facts.nodes
    }

    fn facts(self) -> Option<NodeFacts> {
        let internal = self.status.addresses.iter().filter(|address| address.kind == "InternalIP");
        Some(NodeFacts { ips: addresses(internal.map(|address| address.address.as_str())) })
    }
}

#[derive(Debug, Clone, Deserialize)]
pub(super) struct Pod {
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

impl Partial for Pod {
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

#[derive(Debug, Clone, Deserialize)]
pub(super) struct Service {
    #[serde(deserialize_with = "meta")]
    metadata: ObjectMeta,
    #[serde(default)]
    spec: ServiceSpec,
}

#[derive(Debug, Clone, Deserialize, Default)]
#[serde(default, rename_all = "camelCase")]
struct ServiceSpec {
    #[serde(rename = "type")]
    kind: String,
    #[serde(rename = "clusterIPs")]
    cluster_ips: Vec<String>,
    external_name: Option<String>,
    ports: Vec<PortSpec>,
}

#[derive(Debug, Clone, Deserialize, Default)]
#[serde(default)]
struct PortSpec {
    name: Option<String>,
    port: Option<u16>,
    protocol: Option<String>,
}

impl Partial for Service {
    type Facts = ServiceFacts;

    fn table(facts: &mut Facts) -> &mut FactTable<ServiceFacts> {
        &mut facts.services
    }

    fn facts(self) -> Option<ServiceFacts> {
        let ServiceSpec { kind, cluster_ips, external_name, ports } = self.spec;
        let external = match (kind.as_str(), external_name) {
            ("ExternalName", name) => Some(name?.parse().ok()?),
            _ => None,
        };
        // A headless one has "None" there.
        let ips = addresses(cluster_ips.iter().map(String::as_str));
        Some(ServiceFacts { ips, ports: tcp(ports), external })
    }
}

#[derive(Debug, Clone, Deserialize)]
pub(super) struct Slice {
    #[serde(deserialize_with = "meta")]
    metadata: ObjectMeta,
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

impl Partial for Slice {
    type Facts = SliceFacts;

    fn table(facts: &mut Facts) -> &mut FactTable<SliceFacts> {
        &mut facts.slices
    }

    fn facts(self) -> Option<SliceFacts> {
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
pub(super) struct Cache {
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
    pub(super) fn sides(&self) -> HashMap<String, Side> {
        let lines = self.data.user_services.lines();
        let sides = lines.filter_map(|line| {
            let mut words = line.split_whitespace();
            let (service, namespace) = words.next()?.split_once('.')?;
            let side = match words.next()? {
                "edge" => Side::Edge,
                "cloud" => Side::Cloud,
                _ => return None,
            };
            Some((format!("{namespace}/{service}"), side))
        });
        sides.collect()
    }
}

fn addresses<'a>(texts: impl Iterator<Item = &'a str>) -> Box<[IpAddr]> {
    texts.filter_map(|text| text.parse().ok()).collect()
}

fn tcp(ports: Vec<PortSpec>) -> Box<[ServicePort]> {
    let tcp = ports.into_iter().filter(|port| port.protocol.as_deref().is_none_or(|name| name == "TCP"));
    tcp.filter_map(|port| {
        Some(ServicePort { name: port.name.unwrap_or_default().into(), number: port.port? })
    })
    .collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::{Value, json};

    fn read<K: Partial>(object: Value) -> Option<K::Facts> {
        serde_json::from_value::<K>(object).unwrap().facts()
    }

    fn ips(texts: &[&str]) -> Box<[IpAddr]> {
        addresses(texts.iter().copied())
    }

    fn port(name: &str, number: u16) -> ServicePort {
        ServicePort { name: name.into(), number }
    }

    #[test]
    fn of_a_node_its_internal_addresses_are_kept() {
        let addresses = json!([
            {"type": "Hostname", "address": "edge1"}, {"type": "InternalIP", "address": "10.0.0.5"},
            {"type": "ExternalIP", "address": "192.0.2.5"}, {"type": "InternalIP", "address": "fd00::5"},
        ]);
        let node = json!({"metadata": {"name": "edge1"}, "status": {"addresses": addresses}});
        assert_eq!(read::<Node>(node), Some(NodeFacts { ips: ips(&["10.0.0.5", "fd00::5"]) }));
        assert_eq!(read::<Node>(json!({"metadata": {"name": "new"}})), Some(NodeFacts { ips: ips(&[]) }));
    }

    #[test]
    fn a_pod_has_addresses_of_its_own_while_it_runs_and_is_not_in_its_nodes_network() {
        let pod = |phase: &str, host: bool| {
            read::<Pod>(json!({
                "metadata": {"name": "p", "namespace": "n", "managedFields": [{"fieldsV1": {"f:spec": {}}}]},
                "spec": {"nodeName": "edge1", "hostNetwork": host, "containers": [{"name": "c"}]},
                "status": {"phase": phase, "podIP": "10.244.0.7", "podIPs": [{"ip": "10.244.0.7"}, {"ip": "fd01::7"}]},
            }))
        };
        let kept = |texts| Some(PodFacts { node: "edge1".parse().unwrap(), ips: ips(texts) });
        assert_eq!(pod("Running", false), kept(&["10.244.0.7", "fd01::7"]));
        assert_eq!(pod("Pending", false), kept(&["10.244.0.7", "fd01::7"]));
        for (phase, host) in [("Running", true), ("Succeeded", false), ("Failed", false)] {
            assert_eq!(pod(phase, host), kept(&[]), "{phase}");
        }
        assert_eq!(read::<Pod>(json!({"metadata": {"name": "p"}, "spec": {}})), None, "it has no node yet");
    }

    #[test]
    fn of_a_service_its_addresses_and_tcp_ports_are_kept() {
        let service =
            |spec| read::<Service>(json!({"metadata": {"name": "s", "namespace": "n"}, "spec": spec}));
        let ports = json!([{"name": "dns", "port": 53, "protocol": "UDP"}, {"name": "tcp", "port": 53, "protocol": "TCP"}, {"port": 80}]);
        let whole =
            service(json!({"type": "ClusterIP", "clusterIPs": ["10.96.0.10", "fd96::a"], "ports": ports}));
        let ports = [port("tcp", 53), port("", 80)].into();
        assert_eq!(whole, Some(ServiceFacts { ips: ips(&["10.96.0.10", "fd96::a"]), ports, external: None }));
        let headless =
            service(json!({"type": "ClusterIP", "clusterIP": "None", "clusterIPs": ["None"]})).unwrap();
        assert!(headless.ips.is_empty() && headless.external.is_none());
        let external = service(json!({"type": "ExternalName", "externalName": "example.org"})).unwrap();
        assert_eq!(external.external, Some("example.org".parse().unwrap()));
    }

    #[test]
    fn of_a_slice_what_is_ready_is_kept() {
        let endpoints = json!([
            {"addresses": ["10.0.0.1"], "nodeName": "edge1", "conditions": {"ready": true}},
            {"addresses": ["10.0.0.2"], "nodeName": "edge2", "conditions": {"ready": false}},
            {"addresses": ["10.0.0.3", "10.0.0.4"]},
        ]);
        let meta = json!({"name": "s-1", "namespace": "n", "labels": {"kubernetes.io/service-name": "s", "other": "x"}});
        let kept = read::<Slice>(
            json!({"metadata": meta, "endpoints": endpoints, "ports": [{"name": "", "port": 8080}]}),
        );
        let one = ReadyEndpoint { ip: "10.0.0.1".parse().unwrap(), node: Some("edge1".parse().unwrap()) };
        let three = ReadyEndpoint { ip: "10.0.0.3".parse().unwrap(), node: None };
        let ports = [port("", 8080)].into();
        assert_eq!(kept, Some(SliceFacts { service: "n/s".into(), ports, ready: [one, three].into() }));
        let empty = read::<Slice>(json!({"metadata": meta, "endpoints": null, "ports": null})).unwrap();
        assert!(empty.ready.is_empty() && empty.ports.is_empty());
        assert_eq!(
            read::<Slice>(json!({"metadata": {"name": "s-1", "namespace": "n"}, "endpoints": []})),
            None
        );
    }

    #[test]
    fn what_people_write_of_services_is_read_line_by_line() {
        let text = "web.shop    edge\n\ndb.shop\tcloud and more\noneword\nx.y nowhere\nplain edge\n";
        let cache: Cache = serde_json::from_value(
            json!({"metadata": {"name": "c"}, "data": {"user_services": text, "services": "a.b edge"}}),
        )
        .unwrap();
        let expected = [("shop/web".to_owned(), Side::Edge), ("shop/db".to_owned(), Side::Cloud)];
        assert_eq!(cache.sides(), HashMap::from(expected));
        let empty: Cache = serde_json::from_value(json!({"metadata": {"name": "c"}})).unwrap();
        assert!(empty.sides().is_empty());
    }
}
