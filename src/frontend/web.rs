//! The front ends of node ports: a port of this pod stands for one port of every node, and each request names its node.
//! With TLS (`[mode.cloud.https]`, `mode = "terminate"`) or without (`[mode.cloud.http]`).

mod asked;

use std::net::SocketAddr;
use std::sync::Arc;

use bytes::Bytes;
use http::request::Parts;
use tokio::net::TcpStream;
use tokio::sync::watch;
use tokio_rustls::rustls::ClientConfig;
use tracing::{Span, field, info_span};

use super::requests::{Requests, credentials};
use super::{Denial, FrontEnd, Handshake, OpenRequest, Proof, Visit, forward};
use crate::net::reload::Reload;
use crate::net::socket::Connection;
use crate::net::tls::TlsSocket;
use crate::policy::{ProxyPorts, StandsFor};
use crate::protocol::Category;
use crate::registry::Finder;
use asked::Asker;

/// What one port stands for, and who knows the nodes.
#[derive(Debug, Clone)]
pub struct NodePort {
    /// What the node dials.
    pub stands_for: StandsFor,
    /// Knows which nodes there are.
    pub finder: Arc<Finder>,
    /// Which ports of nodes are those of their loopback.
    pub ports: watch::Receiver<ProxyPorts>,
}

/// A node port without TLS.
#[derive(Debug)]
pub struct Http(pub NodePort);

/// A node port behind TLS; the edge uses TLS to the target again.
#[derive(Debug)]
pub struct Https(pub NodePort);

/// A node port behind TLS, where this pod uses TLS to the target as well, with a certificate of its own that no edge has:
/// only for clients that have shown one.
#[derive(Debug)]
pub struct Reencrypted {
    /// The port.
    pub port: NodePort,
    /// What is shown to targets, and which of them are believed.
    pub tls: Reload<ClientConfig>,
}

impl FrontEnd<TcpStream> for Http {
    const NAME: &'static str = "http";
    /// Not `Https`, with which the edge would use TLS to the target.
    const CATEGORY: Category = Category::HttpProxy;
    type Connection = TcpStream;

    fn span(&self, from: SocketAddr) -> Span {
        info_span!("http", client = %from, trace = field::Empty, session = field::Empty)
    }

    fn rejection_bytes(&self, denial: &Denial, trace: &str) -> Bytes {
        denial.text(trace)
    }

    async fn handshake(&self, socket: TcpStream, visit: &mut Visit<'_>) -> Handshake<TcpStream> {
        self.0.serve(socket, (None, 80), (None, || Denial::NoHost), visit).await
    }
}

impl FrontEnd<TlsSocket> for Https {
    const NAME: &'static str = "https";
    const CATEGORY: Category = Category::Https;
    type Connection = TlsSocket;

    fn span(&self, from: SocketAddr) -> Span {
        info_span!("https", client = %from, trace = field::Empty, session = field::Empty)
    }

    fn rejection_bytes(&self, denial: &Denial, trace: &str) -> Bytes {
        denial.text(trace)
    }

    async fn handshake(&self, socket: TlsSocket, visit: &mut Visit<'_>) -> Handshake<TlsSocket> {
        let name = socket.get_ref().1.server_name().map(str::to_owned);
        self.0.serve(socket, (name, 443), (None, || Denial::Unnamed), visit).await
    }
}

impl FrontEnd<TlsSocket> for Reencrypted {
    const NAME: &'static str = Https::NAME;
    /// Not `Https`, with which the edge would use TLS to the target.
    const CATEGORY: Category = Category::HttpProxy;
    type Connection = TlsSocket;

    fn span(&self, from: SocketAddr) -> Span {
        info_span!("https", client = %from, trace = field::Empty, session = field::Empty)
    }

    fn rejection_bytes(&self, denial: &Denial, trace: &str) -> Bytes {
        denial.text(trace)
    }

    async fn handshake(&self, socket: TlsSocket, visit: &mut Visit<'_>) -> Handshake<TlsSocket> {
        let name = socket.get_ref().1.server_name().map(str::to_owned);
        self.port.serve(socket, (name, 443), (Some(self.tls.clone()), || Denial::Unnamed), visit).await
    }
}

impl NodePort {
    async fn serve<C: Connection>(
        &self,
        socket: C,
        (server_name, default_port): (Option<String>, u16),
        (tls, unnamed): (Option<Reload<ClientConfig>>, fn() -> Denial),
        visit: &mut Visit<'_>,
    ) -> Handshake<C> {
        let (context, proof, from) = (visit.context(), visit.proof.clone(), visit.from().ip());
        let shown = tls.is_none() || matches!(proof, Proof::Certificate(_));
        let parse = |head: &Parts| {
            if !shown {
                return Err(Denial::Forbidden("this port is for clients that show a certificate".to_owned()));
            }
            let gate = context.gate.load();
            let asker = Asker {
                server_name: server_name.as_deref(),
                trusted: gate.trusts(&proof, from),
                default_port,
                gate: &gate,
                addresses: &context.addresses,
            };
            let (node, target) = self.place(head, &asker)?.ok_or_else(unnamed)?;
            Ok(OpenRequest { node: Some(node), target, credentials: credentials(&head.headers) })
        };
        forward(socket, Requests::over(tls, visit, parse), context).await
    }
}
