//! Where paths come from: a pod finds nodes, an edge has its links to the cloud.

use std::sync::Arc;

use crate::names::{Instance, NodeName};
use crate::protocol::LinkSender;
use crate::registry::{Arrival, Finder, Linked, NotFound, Path, Uplinks};

/// Where this process gets its paths from.
#[derive(Debug, Clone)]
pub(super) enum PathSource {
    /// On a pod: paths to nodes.
    Pod(Arc<Finder>),
    /// On a pod: paths to other pods, by their process, for sessions whose target another pod has dialled for an edge.
    Pods(Arc<Finder>),
    /// On an edge: every path begins with a link to the cloud, which finds the rest.
    Edge(Arc<Uplinks>),
}

impl PathSource {
    /// A path to a node: to its process `instance` if one is given, and not over the link `not`. Cancel safe.
    pub(super) async fn find(
        &self,
        node: &NodeName,
        instance: Option<Instance>,
        not: Option<&LinkSender>,
    ) -> Result<Path, NotFound> {
        match self {
            Self::Pod(finder) => finder.find(node, instance, not).await,
            Self::Pods(finder) => finder.find_pod(instance).await,
            Self::Edge(uplinks) => {
                let newest = uplinks.newest(not.map(|not| not.id)).ok_or_else(|| uplinks.missing())?;
                // By its own name it means the cloud: the pod that it asks is the one that dials.
                let own = || newest.instance.filter(|_| uplinks.node() == node);
                Ok(Path { instance: instance.or_else(own), sender: newest })
            }
        }
    }

    /// The same pod's paths to other pods.
    pub(super) fn of_pods(&self) -> Self {
        match self {
            Self::Pod(finder) | Self::Pods(finder) => Self::Pods(finder.clone()),
            Self::Edge(uplinks) => Self::Edge(uplinks.clone()),
        }
    }

    /// The node's link to this pod, if it has one; an edge has no links of other nodes.
    pub(super) fn here(&self, node: &NodeName) -> Option<Linked> {
        match self {
            Self::Pod(finder) | Self::Pods(finder) => finder.registry().here(node),
            Self::Edge(_) => None,
        }
    }

    /// A waiter that notices when a path to the node may have come.
    pub(super) fn arrival(&self, node: &NodeName) -> Arrival<'_> {
        match self {
            Self::Pod(finder) | Self::Pods(finder) => finder.registry().arrival(node),
            Self::Edge(uplinks) => uplinks.arrival(),
        }
    }

    /// Whether the node is known to be linked as another process, here or elsewhere.
    pub(super) fn is_another(&self, node: &NodeName, instance: Option<Instance>) -> bool {
        match self {
            Self::Pod(finder) => instance.is_some_and(|instance| finder.is_another(node, instance)),
            Self::Pods(_) | Self::Edge(_) => false,
        }
    }

    /// Forgets that the node is at the end of this path, because the node was not there.
    pub(super) fn is_wrong(&self, node: &NodeName, path: &Path) {
        if let Self::Pod(finder) = self {
            finder.is_wrong(node, path);
        }
    }

    /// The far end of a session with that node, in words for people.
    pub(super) fn call(&self, node: &NodeName) -> String {
        match self {
            Self::Edge(uplinks) if uplinks.node() == node => "the pod that dialled".to_owned(),
            _ => format!("node {node}"),
        }
    }

    /// Whether this process never asks another one.
    pub(super) fn is_alone(&self) -> bool {
        match self {
            Self::Pod(finder) | Self::Pods(finder) => finder.is_alone(),
            Self::Edge(_) => false,
        }
    }
}
