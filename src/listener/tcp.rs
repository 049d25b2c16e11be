//! The TCP listener: a port for one fixed target. Its clients send no request, so each gets a session at once.

use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::sync::atomic::Ordering::Relaxed;

use bytes::Bytes;
use tokio::net::TcpStream;
use tracing::{Span, field, info_span, warn};

use crate::listener::Denial;
use crate::listener::admission::{Admission, HandshakeOutcome, ListenerProtocol};
use crate::registry::Finder;
use tunnel_base::names::{NodeName, Target};
use tunnel_base::policy::plain;
use tunnel_net::accept_loop;
use tunnel_net::socket::Connection;
use tunnel_proto::frame::Category;

/// The protocol of one entry of `[server.tcp]`: forwards each connection to one target.
#[derive(Debug)]
pub struct Tcp {
    /// The node that dials. `None` means the node that has been connected longest.
    pub node: Option<NodeName>,
    /// The target that the node dials.
    pub target: Target,
    /// Whether the target receives a PROXY header (v2) with the client's address.
    pub send_proxy: bool,
    /// Finds the connected nodes.
    pub finder: Arc<Finder>,
    /// Whether the warning about several candidate nodes has been logged.
    pub warned: AtomicBool,
}

impl Tcp {
    /// Returns the node that dials for the next client.
    fn node(&self) -> Result<NodeName, Denial> {
        if let Some(node) = &self.node {
            return Ok(node.clone());
        }
        let (node, several) = self.finder.oldest_link().ok_or(Denial::NoNodeConnected)?;
        if several && !self.warned.swap(true, Relaxed) {
            warn!(
                %node,
                target = %self.target,
                hint = %format_args!("set the node in [server.tcp], as in \"{node}/{}\"", self.target),
                "several nodes connected, port uses the longest connected one"
            );
        }
        Ok(node)
    }

    /// Returns the bytes that the target receives before the client's first byte.
    fn proxy_header(&self, socket: &TcpStream, client: SocketAddr) -> Bytes {
        match socket.local_addr() {
            Ok(at) if self.send_proxy => {
                accept_loop::header(client, SocketAddr::new(plain(at.ip()), at.port()))
            }
            _ => Bytes::new(),
        }
    }
}

impl ListenerProtocol<TcpStream> for Tcp {
    const NAME: &'static str = "tcp";
    const CATEGORY: Category = Category::Tcp;
    type Connection = TcpStream;

    fn span(&self, from: SocketAddr) -> Span {
        info_span!("tcp", client = %from, trace_id = field::Empty, session = field::Empty)
    }

    async fn handshake(&self, socket: TcpStream, admission: &mut Admission) -> HandshakeOutcome<TcpStream> {
        let client = admission.from();
        let Some(opened) = admission.open_at(self.node(), &self.target, &socket).await else {
            return HandshakeOutcome::Failed { reason: "reset_while_opening", socket: None };
        };
        match opened {
            Ok(session) => {
                let buffered = self.proxy_header(&socket, client);
                HandshakeOutcome::Opened { session, socket, buffered }
            }
            Err(_) => {
                // Reset, because TCP cannot report a denial and a normal close would look like an empty response.
                socket.set_reset_on_drop(true);
                HandshakeOutcome::Closed(None)
            }
        }
    }
}
