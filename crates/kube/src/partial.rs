//! Partial types of Kubernetes objects: only the fields that are read, so that the rest never becomes a value.

use std::borrow::Cow;
use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;
use std::sync::Arc;

use k8s_openapi::api::core::v1::{Node, NodeAddress, Pod, PodIP};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;
use kube::api::ObjectMeta;
use kube::{Resource, ResourceExt as _};
use serde::{Deserialize, Deserializer};

use tunnel_proto::names::Host;

/// The fields that are read of a Node.
#[derive(Debug, Clone, Deserialize)]
pub(crate) struct PartialNode {
    #[serde(deserialize_with = "metadata")]
    metadata: ObjectMeta,
    #[serde(default)]
    pub(crate) spec: NodeSpec,
    #[serde(default)]
    pub(crate) status: PartialNodeStatus,
}

/// The fields that are read of a pod.
#[derive(Debug, Clone, Deserialize)]
pub(crate) struct PartialPod {
    #[serde(deserialize_with = "metadata")]
    pub(crate) metadata: ObjectMeta,
    #[serde(default)]
    pub(crate) spec: PodSpec,
    #[serde(default)]
    pub(crate) status: PodStatus,
}

/// The part of a pod's spec that is read: its node, and whether it uses the node's network.
#[derive(Debug, Clone, Deserialize, Default)]
#[serde(default, rename_all = "camelCase")]
pub(crate) struct PodSpec {
    pub(crate) node_name: Option<String>,
    pub(crate) host_network: bool,
}

/// The part of a pod's status that is read: its phase and its addresses.
#[derive(Debug, Clone, Deserialize, Default)]
#[serde(default)]
pub(crate) struct PodStatus {
    pub(crate) phase: String,
    #[serde(rename = "podIPs")]
    pub(crate) pod_ips: Vec<PodIP>,
}

/// The metadata that is read. Annotations and managed fields may be most of an object.
#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct Metadata {
    name: Option<String>,
    namespace: Option<String>,
    uid: Option<String>,
    resource_version: Option<String>,
    deletion_timestamp: Option<Time>,
    labels: Option<BTreeMap<String, String>>,
}

pub(crate) fn metadata<'de, D: Deserializer<'de>>(from: D) -> Result<ObjectMeta, D::Error> {
    let Metadata { name, namespace, uid, resource_version, deletion_timestamp, labels } =
        Metadata::deserialize(from)?;
    let rest = ObjectMeta::default();
    Ok(ObjectMeta { name, namespace, uid, resource_version, deletion_timestamp, labels, ..rest })
}

/// The part of a Node's spec that is read: the networks of its pods.
#[derive(Debug, Clone, Deserialize, Default)]
#[serde(default)]
pub(crate) struct NodeSpec {
    #[serde(rename = "podCIDRs")]
    pub(crate) pod_cidrs: Vec<String>,
}

/// A Node's addresses as its kubelet reports them.
#[derive(Debug, Clone, Deserialize, Default)]
#[serde(default)]
pub(crate) struct PartialNodeStatus {
    addresses: Vec<NodeAddress>,
}

impl PartialNodeStatus {
    /// Returns all addresses of these kinds.
    pub(crate) fn of_kinds<const N: usize>(&self, kinds: [&'static str; N]) -> impl Iterator<Item = &str> {
        let all = self.addresses.iter().filter(move |address| kinds.contains(&address.type_.as_str()));
        all.map(|address| address.address.as_str())
    }

    /// Returns the first [`MAX_NODE_ADDRESSES`] names among the addresses, without that of the Node.
    pub(crate) fn names(&self, own: Option<&str>) -> Box<[Arc<str>]> {
        let all = self.of_kinds(["Hostname", "InternalDNS", "ExternalDNS"]);
        let names = all.filter_map(|address| match address.parse() {
            Ok(Host::Name(name)) if Some(&*name) != own => Some(Arc::from(&*name)),
            _ => None,
        });
        // Usually one name has two kinds.
        let names: BTreeSet<_> = names.take(MAX_NODE_ADDRESSES).collect();
        names.into_iter().collect()
    }

    /// Returns the first [`MAX_NODE_ADDRESSES`] IP addresses of a kind.
    pub(crate) fn ips<C: FromIterator<IpAddr>>(&self, kind: &'static str) -> C {
        let all = self.of_kinds([kind]).filter_map(|address| address.parse().ok());
        all.take(MAX_NODE_ADDRESSES).collect()
    }
}

/// Maximum number of addresses kept per Node. Its kubelet reports them and may be compromised; two of each family, and
/// their names, are usual.
pub(crate) const MAX_NODE_ADDRESSES: usize = 8;

/// Returns true if an object has a label with this value.
pub(crate) fn has_label(object: &impl Resource, label: &str, value: &str) -> bool {
    object.labels().get(label).is_some_and(|found| found == value)
}

/// Labels of nodes behind NAT: SuperEdge's and OpenYurt's.
pub(crate) const EDGE_LABELS: [(&str, &str); 2] =
    [("superedge.io/node-edge", "enable"), ("openyurt.io/is-edge-worker", "true")];

/// Implements `Resource` for a partial type by delegating to the whole type. The partial type must have a field
/// `metadata`.
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

pub(crate) use part_of;

part_of!(PartialNode, Node);
part_of!(PartialPod, Pod);
