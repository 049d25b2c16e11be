//! What the demo itself serves: the web page at the edge, and the line between edge and servers.

use std::net::SocketAddr;

use tokio::io::{AsyncRead, AsyncReadExt as _, AsyncWrite, AsyncWriteExt as _};
use tokio::net::TcpStream;
use tokio::sync::watch;
use tokio::time::timeout;
use tracing::info_span;

use super::{EPHEMERAL, TIMEOUT};
use tunnel_base::drain::Drain;
use tunnel_net::listen::TcpListenSocket;
use tunnel_net::tls::params::TlsParams;
use tunnel_net::tls::{ClientAuth, IdentityFiles, TlsServerConfig};

/// Serves each connection to a free port in a task of its own, until draining ends. Returns the address.
pub(super) fn serve<F: Future<Output = ()> + Send + 'static>(
    drain: &Drain,
    handle: impl Fn(TcpStream) -> F + Send + 'static,
) -> anyhow::Result<SocketAddr> {
    let listener = TcpListenSocket::bind_public(EPHEMERAL.parse()?)?;
    let at = listener.at();
    let tasks = drain.clone();
    drain.spawn(info_span!("port"), async move {
        while let Some((socket, _)) = tasks.run_until(listener.accept()).await {
            tasks.spawn(info_span!("connection"), handle(socket));
        }
    });
    Ok(at)
}

/// Serves the page over TLS with this certificate. Returns its address.
pub(super) fn serve_tls_page(identity: IdentityFiles, drain: &Drain) -> anyhow::Result<SocketAddr> {
    let config = TlsServerConfig {
        identity,
        clients: ClientAuth::Anonymous,
        params: TlsParams::default(),
        alpn: vec![b"http/1.1".to_vec()],
    };
    let acceptor = config.load()?.load().acceptor();
    serve(drain, move |socket| {
        let accepted = acceptor.accept(socket);
        async move {
            if let Ok(socket) = accepted.await {
                send_page(socket).await;
            }
        }
    })
}

/// Sends the page, whatever the request.
pub(super) async fn send_page<S: AsyncRead + AsyncWrite + Unpin>(mut socket: S) {
    let length = PAGE.len();
    let head = format!("HTTP/1.0 200 OK\r\nContent-Type: text/html\r\nContent-Length: {length}\r\n\r\n");
    let mut request = [0; 4096];
    let answered = async {
        let _ = socket.read(&mut request).await;
        socket.write_all((head + PAGE).as_bytes()).await?;
        socket.shutdown().await?;
        socket.read(&mut request).await
    };
    // An error is the client's to report.
    let _ = timeout(TIMEOUT, answered).await;
}

/// Serves the line to a server, which forwards connections unless it is cut. Returns the address to dial.
pub(super) fn serve_line(
    server: String,
    is_cut: watch::Receiver<bool>,
    drain: &Drain,
) -> anyhow::Result<SocketAddr> {
    serve(drain, move |mut socket| {
        let mut is_cut = is_cut.clone();
        let server = TcpStream::connect(server.clone());
        async move {
            let forward = async { tokio::io::copy_bidirectional(&mut socket, &mut server.await?).await };
            tokio::select! {
                _ = is_cut.wait_for(|is_cut| *is_cut) => {}
                _ = forward => {}
            }
        }
    })
}

pub(super) const PAGE: &str =
    "<!doctype html><title>node1</title><h1>Hello from node1</h1><p>This came through the tunnel.\n";
