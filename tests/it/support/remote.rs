//! Remotes that follow a script: an edge for a server, and a server for an edge.

use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};

use http::{HeaderMap, HeaderValue, Request};
use http_body::Body as _;
use hyper::body::Incoming;
use hyper_util::rt::{TokioExecutor, TokioIo};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::{mpsc, oneshot};
use tokio_rustls::client::TlsStream;
use tokio_rustls::rustls::pki_types::ServerName;
use tokio_rustls::{TlsAcceptor, TlsConnector};
use tonic::Status;
use tunnel_net::tls::params::TlsParams;
use tunnel_net::tls::{ClientAuth, IdentityFiles, TlsClientConfig, TlsServerConfig, Trust};
use tunnel_proto::hello::EdgeHello;
use tunnel_proto::names::{Instance, NodeName};

use super::call::{Call, frame_channel};
use super::programs::{NAME, TOKEN, TestDir, TestServer};
use super::{assert_eventually, spawn};

/// A server that the test plays. Edges may dial it any number of times.
pub(crate) struct ScriptedServer {
    pub(crate) at: SocketAddr,
    calls: mpsc::Receiver<Call>,
    connections: Arc<AtomicUsize>,
}

/// Links to a server as an edge. The edge speaks extended if it has an instance, otherwise plain.
pub(crate) async fn link(
    place: &TestDir,
    server: &TestServer,
    node: &str,
    instance: Option<Instance>,
) -> Call {
    let call = try_link(place, server.server.bound.grpc, node, instance).await.unwrap();
    server.wait_for_node(node).await;
    call
}

/// Like [`link`], but the server may refuse.
pub(crate) async fn try_link(
    place: &TestDir,
    server: SocketAddr,
    node: &str,
    instance: Option<Instance>,
) -> Result<Call, Status> {
    dial(place, server, headers(node, instance), node).await
}

/// Returns the metadata of an edge's call. It announces extended only if there is an instance.
pub(crate) fn headers(node: &str, instance: Option<Instance>) -> HeaderMap {
    let mut headers =
        EdgeHello::edge_request(&node.parse().unwrap(), TOKEN, instance.unwrap_or(Instance::from_bits(0)));
    if instance.is_none() {
        for name in ["tunnel-dialect", "tunnel-instance", "tunnel-role"] {
            headers.remove(name);
        }
    }
    headers
}

/// Links to a server as a peer with this certificate, if any. Its messages are about `node`.
pub(crate) async fn link_as_peer(
    place: &TestDir,
    server: SocketAddr,
    shows: Option<IdentityFiles>,
    headers: HeaderMap,
    node: &str,
) -> Result<Call, Status> {
    let io = connect(place, server, shows).await;
    call(io.map_err(|e| Status::unavailable(e.to_string()))?, headers, node).await
}

/// Returns a TLS connection to a server's gRPC port.
pub(crate) async fn encrypted(place: &TestDir, server: SocketAddr) -> TlsStream<TcpStream> {
    connect(place, server, None).await.unwrap()
}

async fn connect(
    place: &TestDir,
    server: SocketAddr,
    identity: Option<IdentityFiles>,
) -> std::io::Result<TlsStream<TcpStream>> {
    let trust = Trust::Ca(place.files.ca.clone());
    let client = TlsClientConfig { trust, identity, alpn: vec![b"h2".to_vec()] };
    let socket = TcpStream::connect(server).await.unwrap();
    let name = ServerName::try_from(NAME).unwrap();
    Box::pin(TlsConnector::from(client.load().unwrap().load()).connect(name, socket)).await
}

/// Links to a server with this metadata. Its messages are about `node`.
pub(crate) async fn dial(
    place: &TestDir,
    server: SocketAddr,
    headers: HeaderMap,
    node: &str,
) -> Result<Call, Status> {
    Box::pin(call(encrypted(place, server).await, headers, node)).await
}

/// Links over this connection with this metadata. Its messages are about `node`.
pub(crate) async fn call(io: TlsStream<TcpStream>, headers: HeaderMap, node: &str) -> Result<Call, Status> {
    let io = TokioIo::new(io);
    let shaken = hyper::client::conn::http2::handshake(TokioExecutor::new(), io).await;
    let (mut sender, driver) = shaken.map_err(|e| Status::unavailable(e.to_string()))?;
    spawn(driver);
    let (frames_sender, body) = frame_channel();
    let uri = format!("https://{NAME}/proto.Stream/TunnelStreaming");
    let mut request = Request::post(uri).version(http::Version::HTTP_2).body(body).unwrap();
    *request.headers_mut() = headers;
    request.headers_mut().insert("content-type", HeaderValue::from_static("application/grpc"));
    let response = assert_eventually("an answer to the call", sender.send_request(request)).await;
    let response = response.map_err(|e| Status::unavailable(e.to_string()))?;
    match Status::from_header_map(response.headers()) {
        Some(status) => {
            assert!(response.body().is_end_stream(), "a status in the head ends the stream: {status}");
            Err(status)
        }
        None => {
            let (parts, incoming_body) = response.into_parts();
            let node = NodeName::placeholder(node).unwrap_or_else(|| node.parse().unwrap());
            Ok(Call::outgoing(node, parts.headers, frames_sender, incoming_body))
        }
    }
}

impl ScriptedServer {
    /// Starts a server with the certificate of `place`.
    pub(crate) async fn start(place: &TestDir) -> Self {
        let identity = IdentityFiles { cert: place.files.cert.clone(), key: place.files.key.clone() };
        let params = TlsParams::default();
        let server =
            TlsServerConfig { identity, clients: ClientAuth::Anonymous, params, alpn: vec![b"h2".to_vec()] };
        let acceptor = server.load().unwrap().load().acceptor();
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let at = listener.local_addr().unwrap();
        let (called, calls) = mpsc::channel(16);
        let connections = Arc::new(AtomicUsize::new(0));
        let accepted = connections.clone();
        spawn(async move {
            while let Ok((socket, _)) = listener.accept().await {
                accepted.fetch_add(1, Relaxed);
                spawn(serve(socket, acceptor.clone(), called.clone()));
            }
        });
        Self { at, calls, connections }
    }

    /// Returns the number of accepted connections.
    pub(crate) fn connections(&self) -> usize {
        self.connections.load(Relaxed)
    }

    /// Returns true if no call has arrived.
    pub(crate) fn no_call(&mut self) -> bool {
        self.calls.try_recv().is_err()
    }

    /// Waits for the next call, which is not yet answered.
    pub(crate) async fn call(&mut self) -> Call {
        assert_eventually("a call", self.calls.recv()).await.unwrap()
    }
}

async fn serve(socket: TcpStream, acceptor: TlsAcceptor, called: mpsc::Sender<Call>) {
    let Ok(io) = acceptor.accept(socket).await else { return };
    let service = hyper::service::service_fn(move |request: Request<Incoming>| {
        let called = called.clone();
        async move {
            let (answer, answered) = oneshot::channel();
            let (parts, incoming_body) = request.into_parts();
            let _ = called.send(Call::incoming(parts.headers, incoming_body, answer)).await;
            answered.await
        }
    });
    let http = hyper::server::conn::http2::Builder::new(TokioExecutor::new());
    let _ = http.serve_connection(TokioIo::new(io), service).await;
}
