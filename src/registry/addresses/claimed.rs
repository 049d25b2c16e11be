//! Which object of Kubernetes has an address, and which objects only claim it.

use std::fmt;
use std::net::IpAddr;

use super::NotLocated;
use super::facts::{At, Facts};
use crate::names::NodeName;

/// An object that claims an address.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Object {
    Node(NodeName),
    Pod {
        /// As `namespace/name`.
        name: String,
        node: NodeName,
    },
    /// As `namespace/name`.
    Service(String),
}

impl Facts {
    /// The node that has this address, or whose pod has it.
    ///
    /// A kubelet writes the addresses of its Node and of that Node's pods. So an address that another object claims too
    /// leads to neither of them, and a ClusterIP, which kube-apiserver allocates, is the Service's alone.
    pub(super) fn node_at(&self, ip: IpAddr) -> Result<Option<NodeName>, NotLocated> {
        if self.services.is_claimed(At::Own(ip)) {
            return Ok(None);
        }
        let Some(first) = self.by_kubelets(ip).next() else { return Ok(None) };
        let others = self.nodes_with(At::Outside(ip)).chain(self.by_kubelets(ip));
        // A load balancer may have the address of a Node, but none of a pod.
        let is_pod = matches!(first, Object::Pod { .. });
        let services = self.services_with(At::Outside(ip)).filter(|_| is_pod);
        match others.chain(services).find(|other| other.node() != first.node()) {
            Some(other) => Err(NotLocated::ambiguous(ip, &first, &other)),
            None => Ok(first.node().cloned()),
        }
    }

    /// The Service, as `namespace/name`, that has this ClusterIP.
    pub(super) fn service_at(&self, ip: IpAddr) -> Result<Option<String>, NotLocated> {
        let mut all = self.services_with(At::Own(ip));
        match (all.next(), all.next()) {
            (Some(one), Some(other)) => Err(NotLocated::ambiguous(ip, &one, &other)),
            (Some(Object::Service(name)), None) => Ok(Some(name)),
            _ => Ok(None),
        }
    }

    /// The objects that claim an address because a kubelet has written it.
    pub(super) fn by_kubelets(&self, ip: IpAddr) -> impl Iterator<Item = Object> {
        let pods = self.pods.claiming(ip);
        let pods = pods.map(|(name, pod)| Object::Pod { name: name.to_owned(), node: pod.node.clone() });
        self.nodes_with(At::Own(ip)).chain(pods)
    }

    fn nodes_with(&self, at: At) -> impl Iterator<Item = Object> {
        self.nodes.claiming(at).filter_map(|(name, _)| Some(Object::Node(name.parse().ok()?)))
    }

    fn services_with(&self, at: At) -> impl Iterator<Item = Object> {
        self.services.claiming(at).map(|(name, _)| Object::Service(name.to_owned()))
    }
}

impl Object {
    /// The node to which the address would lead.
    pub(super) fn node(&self) -> Option<&NodeName> {
        match self {
            Self::Node(node) | Self::Pod { node, .. } => Some(node),
            Self::Service(_) => None,
        }
    }
}

impl NotLocated {
    fn ambiguous(ip: IpAddr, one: &Object, other: &Object) -> Self {
        Self::Ambiguous { ip, one: one.to_string(), other: other.to_string() }
    }
}

impl fmt::Display for Object {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Node(node) => write!(f, "node {node}"),
            Self::Pod { name, node } => write!(f, "pod {name} at {node}"),
            Self::Service(name) => write!(f, "Service {name}"),
        }
    }
}
