//! The peer at the other end of a link.

use crate::names::NodeName;

/// The peer at the other end of a link.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Peer {
    /// At a pod: an edge, by the node that it has proved to be.
    Edge(NodeName),
    /// At an edge: the cloud. The name is the edge's own node.
    Cloud(NodeName),
    /// At a pod: another pod of this cloud.
    Pod,
}

impl Peer {
    /// The node whose link it is; `None` between pods.
    pub fn node(&self) -> Option<&NodeName> {
        match self {
            Self::Edge(node) | Self::Cloud(node) => Some(node),
            Self::Pod => None,
        }
    }
}
