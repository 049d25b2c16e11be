//! Listeners of node ports: a port of this server stands for one port of every node, and each request names its node.
//! With TLS (`[server.https]`, `mode = "terminate"`) or without (`[server.http]`).

pub mod routing;

use std::net::SocketAddr;
use std::sync::Arc;

use bytes::{Bytes, BytesMut};
use http::request::Parts;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;
use tokio::sync::watch;
use tokio_rustls::rustls::server::{Accepted, Acceptor};
use tokio_rustls::rustls::{self, ClientConfig};
use tracing::{Span, debug, field, info_span};

use crate::listener::Denial;
use crate::listener::admission::{
    Admission, ClientIdentity, HandshakeOutcome, ListenerProtocol, OpenRequest,
};
use crate::listener::forward::forward;
use crate::listener::https::routing::RoutingContext;
use crate::listener::requests::credentials;
use crate::registry::Finder;
use tunnel_base::names::{NodeName, Target};
use tunnel_base::policy::ports::{PortTarget, ProxyPorts};
use tunnel_net::reload::Reload;
use tunnel_net::socket::Connection;
use tunnel_net::tls::handshake::TlsSocket;
use tunnel_proto::frame::Category;

/// A node port: its meaning at the nodes, and how nodes are found.
#[derive(Debug, Clone)]
pub struct NodePort {
    /// The target that the node dials.
    pub stands_for: PortTarget,
    /// Finds the connected nodes.
    pub finder: Arc<Finder>,
    /// The ports that are served on the nodes' loopback.
    pub ports: watch::Receiver<ProxyPorts>,
}

/// The protocol of a node port without TLS.
#[derive(Debug)]
pub struct Http(pub NodePort);

/// A node port over TLS. The edge opens a new TLS connection to the target.
#[derive(Debug)]
pub struct Https(pub NodePort);

/// A node port over TLS where this server itself speaks TLS with the target, using a client certificate that no edge
/// has. Clients must present a certificate themselves.
#[derive(Debug)]
pub struct HttpsReencrypt {
    /// The port.
    pub port: NodePort,
    /// Client certificate for targets, and the CAs trusted for theirs.
    pub tls: Reload<ClientConfig>,
}

impl ListenerProtocol<TcpStream> for Http {
    const NAME: &'static str = "http";
    /// Not `Https`, because the edge would then use TLS to the target.
    const CATEGORY: Category = Category::HttpProxy;
    type Connection = TcpStream;

    fn span(&self, from: SocketAddr) -> Span {
        info_span!("http", client = %from, trace_id = field::Empty, session = field::Empty)
    }

    fn rejection_bytes(&self, denial: &Denial, trace: &str) -> Bytes {
        denial.text(trace)
    }

    async fn handshake(&self, socket: TcpStream, admission: &mut Admission) -> HandshakeOutcome<TcpStream> {
        self.0.serve(socket, Transport::Plain, None, admission).await
    }
}

impl ListenerProtocol<TlsSocket> for Https {
    const NAME: &'static str = "https";
    const CATEGORY: Category = Category::Https;
    type Connection = TlsSocket;

    fn span(&self, from: SocketAddr) -> Span {
        info_span!("https", client = %from, trace_id = field::Empty, session = field::Empty)
    }

    fn rejection_bytes(&self, denial: &Denial, trace: &str) -> Bytes {
        denial.text(trace)
    }

    async fn handshake(&self, socket: TlsSocket, admission: &mut Admission) -> HandshakeOutcome<TlsSocket> {
        let transport = Transport::of(&socket);
        self.0.serve(socket, transport, None, admission).await
    }
}

impl ListenerProtocol<TlsSocket> for HttpsReencrypt {
    const NAME: &'static str = Https::NAME;
    /// Not `Https`, because the edge would then use TLS to the target.
    const CATEGORY: Category = Category::HttpProxy;
    type Connection = TlsSocket;

    fn span(&self, from: SocketAddr) -> Span {
        info_span!("https", client = %from, trace_id = field::Empty, session = field::Empty)
    }

    fn rejection_bytes(&self, denial: &Denial, trace: &str) -> Bytes {
        denial.text(trace)
    }

    async fn handshake(&self, socket: TlsSocket, admission: &mut Admission) -> HandshakeOutcome<TlsSocket> {
        let transport = Transport::of(&socket);
        self.port.serve(socket, transport, Some(self.tls.clone()), admission).await
    }
}

/// How a client speaks HTTP with a node port.
enum Transport {
    Plain,
    /// Over TLS, with the server name that the client sent.
    Tls(Option<String>),
}

impl Transport {
    fn of(socket: &TlsSocket) -> Self {
        Self::Tls(socket.get_ref().1.server_name().map(str::to_owned))
    }
}

impl NodePort {
    /// Serves a client. With `tls`, this server speaks TLS with the targets.
    async fn serve<C: Connection>(
        &self,
        socket: C,
        transport: Transport,
        tls: Option<Reload<ClientConfig>>,
        admission: &mut Admission,
    ) -> HandshakeOutcome<C> {
        let (server_name, default_port) = match &transport {
            Transport::Plain => (None, 80),
            Transport::Tls(name) => (name.as_deref(), 443),
        };
        let unnamed = || match transport {
            Transport::Plain => Denial::NoHost,
            Transport::Tls(_) => Denial::NoNodeInHost,
        };
        let (context, proof, from) =
            (admission.context().clone(), admission.proof.clone(), admission.from().ip());
        let shown = tls.is_none() || matches!(proof, ClientIdentity::Certificate(_));
        let parse = |head: &Parts| {
            if !shown {
                return Err(Denial::Forbidden("this port requires a client certificate".to_owned()));
            }
            let policy = context.policy.load();
            let requester = RoutingContext {
                server_name,
                trusted: policy.is_trusted_proxy(&proof, from),
                default_port,
                policy: &policy,
                addresses: &context.addresses,
            };
            let (node, target) = self.place(head, &requester)?.ok_or_else(unnamed)?;
            Ok(OpenRequest { node: Some(node), target, credentials: credentials(&head.headers) })
        };
        forward(socket, admission, tls, &parse).await
    }
}

// The passthrough listener: TLS for a target at the node that the ClientHello names. Only the ClientHello is read; TLS
// stays between client and target.

/// A port of `[server.https.ports]` that passes TLS through.
#[derive(Debug)]
pub struct Passthrough {
    /// The target that the named node dials.
    pub target: Target,
}

impl ListenerProtocol<TcpStream> for Passthrough {
    const NAME: &'static str = "https";
    /// Not `Https`, because the edge would then use TLS to the target itself.
    const CATEGORY: Category = Category::Tcp;
    type Connection = TcpStream;

    fn span(&self, from: SocketAddr) -> Span {
        info_span!("passthrough", client = %from, trace_id = field::Empty, session = field::Empty)
    }

    fn rejection_bytes(&self, denial: &Denial, _trace: &str) -> Bytes {
        denial.alert()
    }

    async fn handshake(
        &self,
        mut socket: TcpStream,
        admission: &mut Admission,
    ) -> HandshakeOutcome<TcpStream> {
        let hello = match ClientHello::read(&mut socket).await {
            Ok(hello) => hello,
            Err(ClientHelloError { reason, why }) => {
                debug!(error = %why, reason, "no TLS ClientHello");
                return HandshakeOutcome::Failed { reason, socket: Some(socket) };
            }
        };
        let Some(opened) = admission.open_at(hello.node(), &self.target, &socket).await else {
            return HandshakeOutcome::Failed { reason: "reset_while_opening", socket: None };
        };
        match opened {
            Ok(session) => HandshakeOutcome::Opened { session, socket, buffered: hello.bytes },
            Err(denied) => match socket.write_all(&denied.denial.alert()).await {
                Ok(()) => HandshakeOutcome::Closed(Some(socket)),
                Err(_) => HandshakeOutcome::Failed { reason: "reset", socket: None },
            },
        }
    }
}

/// The first TLS message of a client of a [`Passthrough`] port, read for the name of its target.
#[derive(Debug)]
struct ClientHello {
    /// The name in its SNI.
    name: Option<String>,
    /// All bytes read, to be sent to the target.
    bytes: Bytes,
}

/// The error of reading a [`ClientHello`].
#[derive(Debug, thiserror::Error)]
#[error("{why}")]
struct ClientHelloError {
    /// A fixed label for metrics.
    reason: &'static str,
    why: String,
}

impl ClientHello {
    /// Reads until the ClientHello is complete.
    async fn read(socket: &mut TcpStream) -> Result<Self, ClientHelloError> {
        let mut acceptor = Acceptor::default();
        let mut bytes = BytesMut::with_capacity(FIRST_READ);
        loop {
            let before = bytes.len();
            let read = (&mut *socket).take((HELLO_BYTES - before) as u64).read_buf(&mut bytes).await;
            match read {
                Ok(n) if n > 0 => {}
                Ok(_) if before == HELLO_BYTES => {
                    let why = format!("longer than {HELLO_BYTES} bytes");
                    return Err(ClientHelloError { reason: "client_hello_too_large", why });
                }
                Ok(_) if before == 0 => {
                    return Err(ClientHelloError {
                        reason: "client_hello_missing",
                        why: "nothing received".into(),
                    });
                }
                Ok(_) => {
                    return Err(ClientHelloError {
                        reason: "client_hello_missing",
                        why: "connection closed within it".into(),
                    });
                }
                Err(error) => return Err(ClientHelloError { reason: "reset", why: error.to_string() }),
            }
            if let Some(accepted) = feed(&mut acceptor, &bytes[before..]).map_err(|error| no_tls(&error))? {
                let name = accepted.client_hello().server_name().map(str::to_owned);
                return Ok(Self { name, bytes: bytes.freeze() });
            }
        }
    }

    /// Returns the node that the server name identifies.
    fn node(&self) -> Result<NodeName, Denial> {
        let name = self.name.as_deref().ok_or(Denial::NoServerName)?;
        Ok(name.parse()?)
    }
}

/// Feeds bytes to the parser and returns the ClientHello once it is complete.
fn feed(acceptor: &mut Acceptor, mut bytes: &[u8]) -> Result<Option<Accepted>, rustls::Error> {
    while !bytes.is_empty() {
        acceptor.read_tls(&mut bytes).map_err(|error| rustls::Error::General(error.to_string()))?;
        // Ignore the alert: this process terminates no TLS here.
        if let Some(accepted) = acceptor.accept().map_err(|(error, _alert)| error)? {
            return Ok(Some(accepted));
        }
    }
    Ok(None)
}

fn no_tls(error: &rustls::Error) -> ClientHelloError {
    ClientHelloError { reason: "not_tls", why: error.to_string() }
}

/// Maximum length of a ClientHello in bytes. Those of browsers and Go are below 2 KiB; one with many tickets fits too.
const HELLO_BYTES: usize = 16 * 1024;

/// Size of the first read in bytes, enough for nearly every ClientHello.
const FIRST_READ: usize = 2048;

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use tokio::net::TcpListener;
    use tokio_rustls::rustls::{ClientConfig, ClientConnection, RootCertStore};

    use super::*;

    /// Returns the ClientHello that rustls sends for a server's name or address.
    fn hello(server: &str) -> Vec<u8> {
        let provider = Arc::new(rustls::crypto::aws_lc_rs::default_provider());
        let config =
            ClientConfig::builder_with_provider(provider).with_safe_default_protocol_versions().unwrap();
        let config = config.with_root_certificates(RootCertStore::empty()).with_no_client_auth();
        let mut client =
            ClientConnection::new(Arc::new(config), server.to_owned().try_into().unwrap()).unwrap();
        let mut bytes = Vec::new();
        client.write_tls(&mut bytes).unwrap();
        bytes
    }

    /// Sends these bytes in pieces, closes the connection, and returns the result of reading the ClientHello.
    async fn read(bytes: &[u8], piece: usize) -> Result<ClientHello, ClientHelloError> {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let (client, accepted) =
            tokio::join!(TcpStream::connect(listener.local_addr().unwrap()), listener.accept());
        let (mut client, mut server) = (client.unwrap(), accepted.unwrap().0);
        client.set_nodelay(true).unwrap();
        let send = async {
            for piece in bytes.chunks(piece) {
                if client.write_all(piece).await.is_err() {
                    break;
                }
            }
            let _ = client.shutdown().await;
        };
        tokio::join!(ClientHello::read(&mut server), send).0
    }

    #[tokio::test]
    async fn the_name_is_found_and_every_byte_is_kept() {
        let buffered = [hello("Node1.example.org"), b"more".to_vec()].concat();
        for (bytes, name, piece) in [
            (hello("node1"), Some("node1"), 4096),
            (hello("node1"), Some("node1"), 1),
            (hello("192.0.2.1"), None, 100),
        ] {
            let hello = read(&bytes, piece).await.unwrap();
            assert_eq!((hello.name.as_deref(), hello.bytes), (name, Bytes::from(bytes)), "{piece}");
        }
        let hello = read(&buffered, buffered.len()).await.unwrap();
        assert_eq!(hello.bytes, buffered);
        assert_eq!(hello.node().unwrap().as_str().to_lowercase(), "node1.example.org");
    }

    #[tokio::test]
    async fn what_is_no_hello_is_told_apart() {
        let half = hello("node1");
        let half = &half[..half.len() / 2];
        // Records of a handshake message of 65,535 bytes, which is never completed.
        let mut long = Vec::new();
        for n in 0..20 {
            let head: &[u8] = if n == 0 { &[1, 0, 0xff, 0xff] } else { &[0; 4] };
            long.extend([&[22, 3, 1, 4, 0], head, &[0; 1020]].concat());
        }
        for (bytes, reason) in [
            (&b""[..], "client_hello_missing"),
            (half, "client_hello_missing"),
            (b"GET / HTTP/1.1\r\nHost: node1\r\n\r\n", "not_tls"),
            (b"SSH-2.0-client\r\n", "not_tls"),
            (&[22, 3, 1, 0, 4, 2, 0, 0, 0], "not_tls"),
            (&long, "client_hello_too_large"),
        ] {
            assert_eq!(read(bytes, 1000).await.unwrap_err().reason, reason, "{reason}");
        }
    }
}
