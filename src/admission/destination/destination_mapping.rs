//! Locations of targets for clients of a process that has links to servers.

use crate::admission::denial::Denial;
use crate::admission::destination::Destination;
use crate::route::RouteError;
use tunnel_base::policy::NodeGlob;
use tunnel_base::policy::off_limits::{is_number, is_off_limits};
use tunnel_proto::frame::{ErrorCode, SessionError};
use tunnel_proto::names::{Host, NodeName, Target};

/// How a listener of a process with links to servers finds the targets of its clients.
#[derive(Debug, Clone)]
pub enum DestinationMapping {
    /// At an edge: at other nodes by name, or in the cloud.
    Edge {
        /// Name of the edge's own node.
        node: NodeName,
        /// Patterns of hosts that are nodes. `None` means names without a dot.
        nodes: Option<Vec<NodeGlob>>,
    },
    /// At a user's program: its server finds the node.
    User,
}

impl DestinationMapping {
    /// Returns where a target is: at the node that its host names, or in the cloud.
    pub(crate) fn destination(&self, target: Target) -> Result<Destination, Denial> {
        let node = target.host.node();
        let Self::Edge { node: own, nodes } = self else {
            return Ok(Destination::at(node.unwrap_or_else(NodeName::direct), target));
        };
        if node.as_ref() == Some(own) || target.host.is_localhost() {
            return Err(Denial::OwnNode(target));
        }
        // A server knows the nodes that are named by an address.
        let (Host::Name(name), Some(node)) = (&target.host, node) else { return cloud(target) };
        let is_node = match nodes {
            Some(globs) => globs.iter().any(|glob| glob.matches(&node)),
            None => !name.contains('.') && !is_number(name),
        };
        if is_node { Ok(Destination::at(node, target)) } else { cloud(target) }
    }
}

/// Returns the denial for a client of an edge; `in_cloud` if its target is not at a node.
pub(super) fn not_routed(why: RouteError, in_cloud: bool) -> Denial {
    match why {
        RouteError::Offline { .. } => Denial::EdgeOffline,
        RouteError::Refused { refusal, .. } if in_cloud => Denial::DirectDenied(refusal),
        RouteError::Timeout { timeout, .. } if in_cloud => {
            let late = format!("the cloud did not answer within {timeout:?}");
            Denial::DirectDenied(SessionError::new(ErrorCode::TargetTimeout, late))
        }
        why => why.into(),
    }
}

/// Returns the destination of a target that a server dials if its policy allows it.
pub(super) fn cloud(target: Target) -> Result<Destination, Denial> {
    let off_limits = match &target.host {
        Host::Ip(ip) => is_off_limits(*ip),
        Host::Name(name) => is_number(name),
    };
    if off_limits { Err(Denial::OffLimits(target)) } else { Ok(Destination::at(NodeName::direct(), target)) }
}
