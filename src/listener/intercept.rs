//! The front end for what was caught on its way to a node's address. Its clients know nothing of it: they have asked the
//! kernel for the node, which says where they meant to go.

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

/// A listener to which the kernel leads what is meant for nodes.
#[derive(Debug)]
pub struct Intercept {
    /// Whose addresses are caught.
    pub intercepted: Arc<InterceptTable>,
    /// Which ports of nodes are those of their loopback.
    pub ports: watch::Receiver<ProxyPorts>,
}

/// The addresses that are caught, as of now.
#[derive(Debug, Default)]
pub struct InterceptTable(ArcSwap<HashMap<IpAddr, InterceptedNode>>);

/// The node of an address that is caught.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct InterceptedNode {
    /// The node.
    pub node: NodeName,
    /// Since when it is at no pod, if so: what is caught then is refused at once.
    pub left: Option<Instant>,
}

impl InterceptTable {
    /// From now on these are caught.
    pub fn set(&self, nodes: HashMap<IpAddr, InterceptedNode>) {
        self.0.store(Arc::new(nodes));
    }

    fn node(&self, ip: IpAddr) -> Option<InterceptedNode> {
        self.0.load().get(&ip).cloned()
    }
}

impl InterceptedNode {
    /// The node, if it can be reached now.
    fn reachable(self) -> Result<NodeName, Denial> {
        let Some(left) = self.left else { return Ok(self.node) };
        let missing = NodeNotFound { seen: Some(left.elapsed()), ..NodeNotFound::default() };
        Err(RouteError::Offline { node: self.node, missing }.into())
    }
}

impl Intercept {
    /// The node that the client means, and where there; else a fixed word for why it is none that is caught.
    fn asked(&self, socket: &TcpStream, client: IpAddr) -> Result<(InterceptedNode, Target), &'static str> {
        let meant = meant_for(socket, client).map_err(|cause| {
            debug!(%cause, "the kernel does not know where a connection was meant to go");
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

/// The target as the node's edge is asked for it. What may listen on loopback alone is asked for by the node's name, which
/// stands for its loopback and its addresses.
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
        info_span!("intercept", client = %from, trace = field::Empty, session = field::Empty)
    }

    async fn handshake(&self, socket: TcpStream, visit: &mut Admission<'_>) -> HandshakeOutcome<TcpStream> {
        // Whatever comes of it: TCP has no answer for a denial, and an end in good order would look like an empty one.
        socket.breaks_off(true);
        let (node, target) = match self.asked(&socket, visit.from().ip()) {
            Ok(asked) => asked,
            Err(cause) => return HandshakeOutcome::Failed { cause, socket: None },
        };
        match visit.open_at(node.reachable(), &target, &socket).await {
            None => HandshakeOutcome::Failed { cause: "reset_while_opening", socket: None },
            Some(Err(_)) => HandshakeOutcome::Served(None),
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
