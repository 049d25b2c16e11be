//! Where targets are for clients of an edge: at other nodes, or in the cloud.

use super::FrontContext;
use super::destination::Destination;
use crate::carry::FarEnd;
use crate::frontend::Denial;
use crate::names::{Host, NodeName, Target};
use crate::policy::{Glob, is_number, is_off_limits};
use crate::protocol::{Category, Code, Refusal};
use crate::route::{NotOpened, Request, RouteError};
use crate::telemetry::Access;

/// The node at which a front end stands.
#[derive(Debug, Clone)]
pub struct OwnNode {
    /// Its name.
    pub node: NodeName,
    /// Which hosts are nodes; `None`: names without a dot.
    pub nodes: Option<Vec<Glob>>,
}

impl OwnNode {
    /// Where a target is: at the node that its host names, or in the cloud.
    pub(super) fn locate(&self, target: Target) -> Result<Destination, Denial> {
        let Host::Name(name) = &target.host else { return cloud(target) };
        let node: NodeName = name.parse()?;
        if node == self.node || node.as_str() == "localhost" {
            return Err(Denial::OwnNode(target));
        }
        let is_node = match &self.nodes {
            Some(globs) => globs.iter().any(|glob| glob.matches(&node)),
            None => !name.contains('.') && !is_number(name),
        };
        if is_node { Ok(Destination::at(node, target)) } else { cloud(target) }
    }

    /// Opens what [`Self::locate`] has found. What is known of the session is noted in `access`.
    pub(super) async fn open(
        &self,
        (node, target): (NodeName, Target),
        context: &FrontContext,
        (category, client): (Category, String),
        access: &mut Access,
    ) -> Result<FarEnd, Denial> {
        let in_cloud = node == NodeName::outside();
        // An edge serves its own node itself, so that name means the cloud.
        let node = if in_cloud { self.node.clone() } else { node };
        let why = match context.route.open(Request { node, target, category, client }).await {
            Ok(session) => return Ok(session.into()),
            Err(NotOpened { session, why }) => {
                access.id = session;
                why
            }
        };
        Err(match why {
            RouteError::Offline { .. } => Denial::Unlinked,
            RouteError::Refused { refusal, .. } if in_cloud => Denial::Cloud(refusal),
            RouteError::Timeout { patience, .. } if in_cloud => {
                let late = format!("the cloud did not answer within {patience:?}");
                Denial::Cloud(Refusal::new(Code::TargetTimeout, late))
            }
            why => why.into(),
        })
    }
}

/// A target that a pod dials, if its own policy lets it.
fn cloud(target: Target) -> Result<Destination, Denial> {
    let off_limits = match &target.host {
        Host::Ip(ip) => is_off_limits(*ip),
        Host::Name(name) => is_number(name),
    };
    if off_limits { Err(Denial::OffLimits(target)) } else { Ok(Destination::at(NodeName::outside(), target)) }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn located(nodes: Option<&[&str]>, target: &str) -> Result<String, u16> {
        let nodes = nodes.map(|globs| globs.iter().map(|glob| glob.parse().unwrap()).collect());
        let own_node = OwnNode { node: "Edge-1".parse().unwrap(), nodes };
        let found = own_node.locate(target.parse().unwrap()).map_err(|denial| denial.status().as_u16())?;
        Ok(format!("{} {}", found.node, found.target))
    }

    #[test]
    fn a_name_without_a_dot_is_a_node_and_all_else_is_in_the_cloud() {
        for (target, found) in [
            ("Node2:80", "node2 node2:80"),
            ("node2.:80", "node2 node2:80"),
            ("web.shop.svc:80", "- web.shop.svc:80"),
            ("node2.example.org:22", "- node2.example.org:22"),
            ("10.0.0.1:443", "- 10.0.0.1:443"),
            ("[fd00::1]:443", "- [fd00::1]:443"),
        ] {
            assert_eq!(located(None, target).as_deref(), Ok(found));
        }
    }

    #[test]
    fn which_names_are_nodes_may_be_said() {
        let globs: Option<&[&str]> = Some(&["*.site.example", "edge-*"]);
        assert_eq!(located(globs, "n1.site.example:80").unwrap(), "n1.site.example n1.site.example:80");
        assert_eq!(located(globs, "edge-2:80").unwrap(), "edge-2 edge-2:80");
        assert_eq!(located(globs, "db:80").unwrap(), "- db:80");
        assert_eq!(located(Some(&[]), "edge-2:80").unwrap(), "- edge-2:80");
    }

    #[test]
    fn this_machine_is_not_asked_for_through_its_own_proxy() {
        for target in ["edge-1:80", "EDGE-1.:80", "localhost:80"] {
            assert_eq!(located(None, target), Err(421), "{target}");
            assert_eq!(located(Some(&["*"]), target), Err(421), "{target}");
        }
    }

    #[test]
    fn what_is_off_limits_is_asked_of_no_cloud_however_it_is_spelt() {
        for target in [
            "127.0.0.1:80",
            "[::1]:80",
            "0.0.0.0:80",
            "[::ffff:169.254.169.254]:80",
            "169.254.169.254:80",
            "2130706433:80",
            "0177.0.0.1:80",
            "0x7f.1:80",
            "127.1:80",
        ] {
            assert_eq!(located(None, target), Err(403), "{target}");
        }
    }
}
