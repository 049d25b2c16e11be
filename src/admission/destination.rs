//! Targets that are at no linked node: what this process dials itself, and where clients of an edge find their targets.

pub mod destination_mapping;

use crate::acceptor::target_dialer::{DialRight, DialledTarget, DirectDialer, TargetDialError};
use crate::admission::denial::Denial;
use crate::admission::destination::destination_mapping::{DestinationMapping, not_routed};
use crate::admission::{ListenerContext, SessionPermit};
use crate::paths::node_not_found::NodeNotFound;
use crate::route::{RouteError, SessionRequest};
use crate::session_io::session_stream::SessionStream;
use tunnel_base::access_log::AccessLogEntry;
use tunnel_base::policy::off_limits::is_number;
use tunnel_proto::frame::{ErrorCode, SessionError};
use tunnel_proto::names::{Host, NodeName, Target};

/// An open stream to a target, and the right to the target if this process has dialled it.
pub(crate) struct TargetStream {
    pub(crate) stream: SessionStream,
    pub(crate) right: Option<DialRight>,
}

/// Where a client's target is: at a node, or at this process if it dials the target itself.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Destination {
    /// The node; [`NodeName::direct`] if this process dials or, at an edge, a server.
    pub(crate) node: NodeName,
    /// The target, as the node knows it.
    pub(crate) target: Target,
    /// The target that this process dials if no edge runs at the node.
    pub(crate) direct: Option<Target>,
    /// Whether the client may reach every target that is not off limits.
    pub(crate) all: bool,
}

impl Destination {
    /// Creates a destination at a node, which this process never dials itself.
    pub(crate) fn at(node: NodeName, target: Target) -> Self {
        Self { node, target, direct: None, all: false }
    }

    /// Returns the request for a session, or `None` if this process dials the target.
    pub(crate) fn session_request(
        &self,
        context: &ListenerContext,
        access: &AccessLogEntry,
        permit: &SessionPermit,
    ) -> Option<SessionRequest> {
        let node = match &context.uplink {
            None if self.node == NodeName::direct() => return None,
            // An edge serves its own node itself, so in a request its own node's name stands for the cloud.
            Some(DestinationMapping::Edge { node, .. }) if self.node == NodeName::direct() => node.clone(),
            _ => self.node.clone(),
        };
        let client = match &access.user {
            Some(user) => format!("{user}@{}", access.client),
            None => access.client.clone(),
        };
        Some(SessionRequest {
            node,
            target: self.target.clone(),
            category: context.category,
            client,
            listener: access.listener,
            permit: Some(permit.clone()),
        })
    }

    /// Dials a target that is at no node.
    pub(crate) async fn dial(self, context: &ListenerContext) -> Result<TargetStream, Denial> {
        let Self { target, direct, all, .. } = self;
        match direct.and_then(|direct| Some((context.direct_dialer(direct.port, all)?, direct))) {
            None => Err(Denial::NoNode(target)),
            Some((dialer, direct)) => {
                connect(dialer, &direct, all, context).await.map_err(|why| not_dialled(why, target))
            }
        }
    }

    /// Dials a target whose node may have no edge at all, after the route has failed because of `why`. Records in
    /// `access` that this process has dialled.
    pub(crate) async fn recover(
        self,
        why: RouteError,
        context: &ListenerContext,
        access: &mut AccessLogEntry,
    ) -> Result<TargetStream, Denial> {
        let Self { node, target, direct, all } = self;
        // Only a server dials instead of an edge. For an edge and a user's program, their server has decided that
        // already.
        match &context.uplink {
            None => {}
            Some(DestinationMapping::Edge { .. }) => return Err(not_routed(why, node == NodeName::direct())),
            Some(DestinationMapping::User) => return Err(Denial::of_user(why, &context.route)),
        }
        let direct = direct.and_then(|direct| Some((context.direct_dialer(direct.port, all)?, direct)));
        match (why, direct) {
            (RouteError::Refused { refusal, .. }, _) if refusal.code == ErrorCode::NotAllowed => {
                let refusal = with_remedy(refusal, &node, &target, context);
                Err(RouteError::Refused { node, refusal }.into())
            }
            (RouteError::Offline { missing, .. }, Some((dialer, direct))) if missing.is_unknown_node() => {
                match connect(dialer, &direct, all, context).await {
                    Ok(connection) => {
                        access.node = Some(NodeName::direct());
                        Ok(connection)
                    }
                    Err(why) if why.off_limits || is_literal(&direct) => Err(not_dialled(why, target)),
                    // Neither the node nor direct dialling works; report the node, because the client requested it.
                    Err(TargetDialError { refusal, .. }) if refusal.code == ErrorCode::NotAllowed => {
                        Err(RouteError::Offline { node, missing }.into())
                    }
                    Err(TargetDialError { refusal, .. }) if refusal.code == ErrorCode::TargetUnreachable => {
                        let missing = NodeNotFound { dns: Some(refusal.reason), ..missing };
                        Err(RouteError::Offline { node, missing }.into())
                    }
                    Err(why) => Err(not_dialled(why, target)),
                }
            }
            (RouteError::Offline { missing, .. }, None) if missing.is_unknown_node() => {
                // The client has requested an address and no node, so the answer does not speak of a node either.
                Err(match node.address() {
                    Some(ip) => Denial::NoNode(Target { host: Host::Ip(ip), port: target.port }),
                    None => RouteError::Offline { node, missing }.into(),
                })
            }
            (why, _) => Err(why.into()),
        }
    }
}

/// Returns true if the target's host is an address in any spelling.
fn is_literal(target: &Target) -> bool {
    match &target.host {
        Host::Ip(_) => true,
        Host::Name(name) => is_number(name),
    }
}

async fn connect(
    dialer: &DirectDialer,
    target: &Target,
    all: bool,
    context: &ListenerContext,
) -> Result<TargetStream, TargetDialError> {
    let DialledTarget { socket, right } = dialer.dial(target, all).await?;
    Ok(TargetStream { stream: SessionStream::direct(socket, context.pool.clone()), right: Some(right) })
}

fn not_dialled(why: TargetDialError, target: Target) -> Denial {
    if why.off_limits { Denial::OffLimits(target) } else { Denial::Direct(why.refusal) }
}

/// Adds the config key that allows the target to a refusal. An edge does not treat its pods' addresses as its own.
fn with_remedy(
    refusal: SessionError,
    node: &NodeName,
    target: &Target,
    context: &ListenerContext,
) -> SessionError {
    let Host::Ip(ip) = target.host else { return refusal };
    let net = context.addresses.pod_network(node, ip);
    let entry = if ip.is_ipv4() { format!("{net}:*") } else { format!("[{net}]:*") };
    let why = format!(
        "{}; add \"{entry}\" to [edge.allow] targets there and keep the entries of the list: it replaces the default",
        refusal.reason
    );
    SessionError::new(refusal.code, why)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn located(nodes: Option<&[&str]>, target: &str) -> Result<String, u16> {
        let nodes = nodes.map(|globs| globs.iter().map(|glob| glob.parse().unwrap()).collect());
        let own_node = DestinationMapping::Edge { node: "Edge-1".parse().unwrap(), nodes };
        let found =
            own_node.destination(target.parse().unwrap()).map_err(|denial| denial.status().as_u16())?;
        Ok(format!("{} {}", found.node, found.target))
    }

    #[test]
    fn a_name_without_a_dot_is_a_node_and_all_others_are_in_the_cloud() {
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
    fn name_patterns_decide_which_names_are_nodes() {
        let globs: Option<&[&str]> = Some(&["*.site.example", "edge-*"]);
        assert_eq!(located(globs, "n1.site.example:80").unwrap(), "n1.site.example n1.site.example:80");
        assert_eq!(located(globs, "edge-2:80").unwrap(), "edge-2 edge-2:80");
        assert_eq!(located(globs, "db:80").unwrap(), "- db:80");
        assert_eq!(located(Some(&[]), "edge-2:80").unwrap(), "- edge-2:80");
    }

    #[test]
    fn the_own_node_is_refused_through_its_own_proxy() {
        for target in ["edge-1:80", "EDGE-1.:80", "localhost:80"] {
            assert_eq!(located(None, target), Err(421), "{target}");
            assert_eq!(located(Some(&["*"]), target), Err(421), "{target}");
        }
    }

    #[test]
    fn forbidden_addresses_are_refused_at_the_edge_in_any_spelling() {
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
