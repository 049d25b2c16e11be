//! Who is at the other end of a link.

use crate::names::NodeName;

/// Who is at the other end of a link.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Peer {
    /// An edge, as its pod sees it: the node that it has proved to be.
    Edge(NodeName),
    /// The cloud, as an edge sees it: which node we are.
    Cloud(NodeName),
    /// Another pod of this cloud.
    Pod,
}

impl Peer {
    /// Whose link it is; none between pods.
    pub fn node(&self) -> Option<&NodeName> {
        match self {
            Self::Edge(node) | Self::Cloud(node) => Some(node),
            Self::Pod => None,
        }
    }
}
