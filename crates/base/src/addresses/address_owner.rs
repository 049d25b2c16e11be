//! Which object of Kubernetes owns an address, and which objects only claim it.

use std::net::IpAddr;

use crate::addresses::LocateError;
use crate::addresses::cluster_state::ClusterState;
use crate::addresses::object_index::IndexKey;
use tunnel_proto::names::NodeName;

/// A Kubernetes object that claims an address, to find and name the owners of a disputed one.
#[derive(derive_more::Display, Debug, Clone, PartialEq, Eq)]
pub(crate) enum Object {
    #[display("node {_0}")]
    Node(NodeName),
    #[display("pod {name} at {node}")]
    Pod {
        /// Pod, as `namespace/name`.
        name: String,
        node: NodeName,
    },
    /// Service, as `namespace/name`.
    #[display("Service {_0}")]
    Service(String),
}

impl ClusterState {
    /// Returns the node that has this address, or that runs the pod with this address.
    ///
    /// A kubelet writes the addresses of its Node and of that Node's pods. So an address that another object claims too
    /// belongs to neither. A ClusterIP is allocated by kube-apiserver and belongs to the Service alone.
    pub fn node_at(&self, ip: IpAddr) -> Result<Option<NodeName>, LocateError> {
        if self.services.is_claimed(IndexKey::Internal(ip)) {
            return Ok(None);
        }
        let Some(first) = self.kubelet_claimants(ip).next() else { return Ok(None) };
        let others = self.nodes_with(IndexKey::External(ip)).chain(self.kubelet_claimants(ip));
        // A load balancer may share the address of a Node, but not of a pod.
        let is_pod = matches!(first, Object::Pod { .. });
        let services = self.services_with(IndexKey::External(ip)).filter(|_| is_pod);
        match others.chain(services).find(|other| other.node() != first.node()) {
            Some(other) => Err(LocateError::ambiguous(ip, &first, &other)),
            None => Ok(first.node().cloned()),
        }
    }

    /// Returns the Service with this ClusterIP, as `namespace/name`.
    pub fn service_at(&self, ip: IpAddr) -> Result<Option<String>, LocateError> {
        let mut all = self.services_with(IndexKey::Internal(ip));
        match (all.next(), all.next()) {
            (Some(one), Some(other)) => Err(LocateError::ambiguous(ip, &one, &other)),
            (Some(Object::Service(name)), None) => Ok(Some(name)),
            _ => Ok(None),
        }
    }

    /// Returns the objects that claim an address written by a kubelet.
    pub(crate) fn kubelet_claimants(&self, ip: IpAddr) -> impl Iterator<Item = Object> {
        let pods = self.pods.claiming(IndexKey::Internal(ip));
        let pods = pods.map(|(name, pod)| Object::Pod { name: name.to_owned(), node: pod.node.clone() });
        self.nodes_with(IndexKey::Internal(ip)).chain(pods)
    }

    fn nodes_with(&self, at: IndexKey) -> impl Iterator<Item = Object> {
        self.nodes.claiming(at).filter_map(|(name, _)| Some(Object::Node(name.parse().ok()?)))
    }

    fn services_with(&self, at: IndexKey) -> impl Iterator<Item = Object> {
        self.services.claiming(at).map(|(name, _)| Object::Service(name.to_owned()))
    }
}

impl Object {
    /// Returns the node that the address would resolve to.
    pub(crate) fn node(&self) -> Option<&NodeName> {
        if let Self::Node(node) | Self::Pod { node, .. } = self { Some(node) } else { None }
    }
}

impl LocateError {
    fn ambiguous(ip: IpAddr, one: &Object, other: &Object) -> Self {
        Self::Ambiguous { ip, one: one.to_string(), other: other.to_string() }
    }
}
