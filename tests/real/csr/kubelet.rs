//! A stand-in for a kubelet: it requires a client certificate, and returns its subject.

use std::collections::BTreeSet;
use std::net::SocketAddr;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use tokio::runtime::Runtime;
use tokio::sync::watch;
use tokio_rustls::TlsAcceptor;
use tokio_rustls::rustls::ServerConfig;
use tunnel_net::tls::params::TlsParams;
use tunnel_net::tls::{ClientAuth, IdentityFiles, TlsServerConfig};
use x509_parser::prelude::{FromDer, X509Certificate};

use crate::tunnel::TestDir;

pub(crate) struct Kubelet {
    pub(crate) at: SocketAddr,
    seen: SeenCertificates,
    finished: watch::Sender<bool>,
    _runtime: Runtime,
}

/// The subjects and serial numbers of the client certificates that were presented.
type SeenCertificates = Arc<Mutex<BTreeSet<String>>>;

impl Kubelet {
    /// Starts one. Its certificate is issued by the cluster's CA for the node's name, and clients need one of the
    /// same CA.
    pub(crate) fn start(place: &TestDir, node: &str) -> Self {
        let at = |end: &str| place.path().join(format!("kubelet.{end}"));
        let identity = IdentityFiles { cert: at("crt"), key: at("key") };
        place.authority.0.server(&[node]).unwrap().write(&identity.cert, &identity.key).unwrap();
        let clients = ClientAuth::Required(place.files.ca.clone());
        let alpn = vec![b"http/1.1".to_vec()];
        let tls = TlsServerConfig { identity, clients, params: TlsParams::default(), alpn }
            .load()
            .unwrap()
            .load()
            .config
            .clone();
        let runtime = Runtime::new().unwrap();
        let listener = runtime.block_on(TcpListener::bind("127.0.0.1:0")).unwrap();
        let (at, seen, finished) =
            (listener.local_addr().unwrap(), SeenCertificates::default(), watch::Sender::new(false));
        let (seen_requests, over) = (seen.clone(), finished.clone());
        let serving = async move {
            while let Ok((socket, _)) = listener.accept().await {
                // A client that disconnects early ends only its own connection.
                #[expect(
                    clippy::disallowed_methods,
                    reason = "a server of the test, which ends with its runtime"
                )]
                tokio::spawn(serve(socket, tls.clone(), seen_requests.clone(), over.subscribe()));
            }
        };
        runtime.spawn(serving);
        Self { at, seen, finished, _runtime: runtime }
    }

    /// Returns the number of client certificates that it has seen.
    pub(crate) fn certificates(&self) -> usize {
        self.seen.lock().unwrap().len()
    }

    /// Ends the responses that are in progress.
    pub(crate) fn finish(&self) {
        self.finished.send_replace(true);
    }
}

/// Answers a client's requests: `/long` lasts until `finish`, all others return the client's name.
async fn serve(
    socket: TcpStream,
    tls: Arc<ServerConfig>,
    seen: SeenCertificates,
    mut over: watch::Receiver<bool>,
) -> std::io::Result<()> {
    let mut stream = TlsAcceptor::from(tls).accept(socket).await?;
    let subject = {
        let shown = stream.get_ref().1.peer_certificates().unwrap();
        let (_, leaf) = X509Certificate::from_der(&shown[0]).unwrap();
        let name = leaf.subject().iter_common_name().next().unwrap().as_str().unwrap().to_owned();
        format!("{name} {}", leaf.raw_serial_as_string())
    };
    seen.lock().unwrap().insert(subject.clone());
    loop {
        let mut head = Vec::new();
        while !head.ends_with(b"\r\n\r\n") {
            head.push(stream.read_u8().await?);
        }
        if !head.starts_with(b"GET /long ") {
            let answer = format!("HTTP/1.1 200 OK\r\nContent-Length: {}\r\n\r\n{subject}", subject.len());
            stream.write_all(answer.as_bytes()).await?;
            stream.flush().await?;
            continue;
        }
        stream.write_all(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n").await?;
        while !*over.borrow_and_update() {
            stream.write_all(b"5\r\nline\n\r\n").await?;
            stream.flush().await?;
            let _ = tokio::time::timeout(Duration::from_millis(100), over.changed()).await;
        }
        stream.write_all(b"8\r\nthe end\n\r\n0\r\n\r\n").await?;
        stream.flush().await?;
    }
}
