//! The listener for intercepted connections to nodes' addresses. Clients are unaware of it: they connected to the node,
//! and the kernel reports the original destination.

use std::collections::HashMap;
use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;

use arc_swap::ArcSwap;
use bytes::Bytes;
use tokio::net::TcpStream;
use tokio::sync::watch;
use tokio::time::Instant;
use tracing::{Span, debug, field, info_span};

use crate::intercept::meant_for;
use crate::listener::Denial;
use crate::listener::admission::{Admission, HandshakeOutcome, ListenerProtocol};
use crate::registry::NodeNotFound;
use crate::route::RouteError;
use tunnel_base::names::{Host, NodeName, Target};
use tunnel_base::policy::plain;
use tunnel_base::policy::ports::ProxyPorts;
use tunnel_net::socket::Connection;
use tunnel_proto::frame::Category;

/// A listener to which the kernel redirects connections meant for nodes.
#[derive(Debug)]
pub struct Intercept {
    /// The nodes with intercepted addresses.
    pub intercepted: Arc<InterceptTable>,
    /// The ports that are served on the nodes' loopback.
    pub ports: watch::Receiver<ProxyPorts>,
}

/// The currently intercepted addresses and their nodes.
#[derive(Debug, Default)]
pub struct InterceptTable(ArcSwap<HashMap<IpAddr, InterceptedNode>>);

/// The node that an intercepted address belongs to, in an [`InterceptTable`].
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct InterceptedNode {
    /// The node.
    pub node: NodeName,
    /// Time of the node's disconnection, if it is connected to no server. Its connections are then refused at once.
    pub left: Option<Instant>,
}

impl InterceptTable {
    /// Replaces the intercepted addresses.
    pub fn set(&self, nodes: HashMap<IpAddr, InterceptedNode>) {
        self.0.store(Arc::new(nodes));
    }

    fn node(&self, ip: IpAddr) -> Option<InterceptedNode> {
        self.0.load().get(&ip).cloned()
    }
}

impl InterceptedNode {
    /// Returns the node, or a denial if it is disconnected.
    fn reachable(self) -> Result<NodeName, Denial> {
        let Some(left) = self.left else { return Ok(self.node) };
        let missing = NodeNotFound { seen: Some(left.elapsed()), ..NodeNotFound::default() };
        Err(RouteError::Offline { node: self.node, missing }.into())
    }
}

impl Intercept {
    /// Returns the node and target that the client meant. The error is a fixed label for a connection that was not
    /// intercepted on its way to a node.
    fn asked(&self, socket: &TcpStream, client: IpAddr) -> Result<(InterceptedNode, Target), &'static str> {
        let meant = meant_for(socket, client).map_err(|cause| {
            debug!(error = %cause, "original destination unknown");
            "not_redirected"
        })?;
        let meant = SocketAddr::new(plain(meant.ip()), meant.port());
        let here = socket.local_addr().map(|at| SocketAddr::new(plain(at.ip()), at.port()));
        if here.is_ok_and(|here| here == meant) {
            return Err("not_redirected");
        }
        let node = self.intercepted.node(meant.ip()).ok_or("not_a_nodes_address")?;
        let target = at(&node.node, meant, self.ports.borrow().is_on_loopback(meant.port()));
        Ok((node, target))
    }
}

/// Returns the target to request from the node's edge. A port that may be open only on loopback is requested by the
/// node's name, which stands for its loopback and its addresses.
fn at(node: &NodeName, meant: SocketAddr, on_loopback: bool) -> Target {
    match node.as_str().parse() {
        Ok(host @ Host::Name(_)) if on_loopback => Target { host, port: meant.port() },
        _ => meant.into(),
    }
}

impl ListenerProtocol<TcpStream> for Intercept {
    const NAME: &'static str = "intercept";
    const CATEGORY: Category = Category::Tcp;
    type Connection = TcpStream;

    fn span(&self, from: SocketAddr) -> Span {
        info_span!("intercept", client = %from, trace_id = field::Empty, session = field::Empty)
    }

    async fn handshake(&self, socket: TcpStream, admission: &mut Admission) -> HandshakeOutcome<TcpStream> {
        // Reset on failure, because TCP cannot report a denial and a normal close would look like an empty response.
        socket.set_reset_on_drop(true);
        let (node, target) = match self.asked(&socket, admission.from().ip()) {
            Ok(asked) => asked,
            Err(reason) => return HandshakeOutcome::Failed { reason, socket: None },
        };
        match admission.open_at(node.reachable(), &target, &socket).await {
            None => HandshakeOutcome::Failed { reason: "reset_while_opening", socket: None },
            Some(Err(_)) => HandshakeOutcome::Closed(None),
            Some(Ok(session)) => HandshakeOutcome::Opened { session, socket, buffered: Bytes::new() },
        }
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    fn node(name: &str) -> NodeName {
        name.parse().unwrap()
    }

    #[test]
    fn what_may_be_on_loopback_is_asked_for_by_name_and_all_else_by_the_nodes_address() {
        for (meant, asked) in [
            ("10.0.0.7:10250", "edge7:10250"),
            ("[fd00::7]:10255", "edge7:10255"),
            ("10.0.0.7:10266", "edge7:10266"),
            ("10.0.0.7:9100", "10.0.0.7:9100"),
            ("[fd00::7]:9100", "[fd00::7]:9100"),
        ] {
            let meant: SocketAddr = meant.parse().unwrap();
            let on_loopback = ProxyPorts::default().is_on_loopback(meant.port());
            assert_eq!(at(&node("edge7"), meant, on_loopback).to_string(), asked);
        }
    }

    #[tokio::test(start_paused = true)]
    async fn a_node_that_has_left_is_refused_with_the_time_that_it_is_gone() {
        let intercepted = InterceptTable::default();
        let ip = IpAddr::from([10, 0, 0, 7]);
        intercepted
            .set(HashMap::from([(ip, InterceptedNode { node: node("edge7"), left: Some(Instant::now()) })]));
        tokio::time::advance(Duration::from_secs(3)).await;
        let denial = intercepted.node(ip).unwrap().reachable().unwrap_err();
        assert_eq!(denial.to_string(), "node edge7 is not connected, last seen 3s ago");
        assert_eq!(InterceptedNode { node: node("edge7"), left: None }.reachable().unwrap(), node("edge7"));
        assert_eq!(intercepted.node([10, 0, 0, 8].into()), None);
    }
}
