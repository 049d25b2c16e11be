//! The web page and the download at the demo's edge.

use std::io;
use std::net::SocketAddr;
use std::time::Duration;

use anyhow::Context as _;
use tokio::io::{AsyncRead, AsyncReadExt as _, AsyncWrite, AsyncWriteExt as _};
use tokio::time::{MissedTickBehavior, interval, timeout};
use tokio_rustls::TlsAcceptor;
use tracing::info_span;

use super::{EPHEMERAL, TIMEOUT};
use tunnel_base::drain::Drain;
use tunnel_net::listen::TcpListenSocket;
use tunnel_net::tls::params::TlsParams;
use tunnel_net::tls::{ClientAuth, IdentityFiles, TlsServerConfig};

/// Serves the page on each connection, whatever the request, until draining starts. Returns its addresses, without TLS and
/// with this certificate.
pub(crate) fn serve(identity: &IdentityFiles, drain: &Drain) -> anyhow::Result<(SocketAddr, SocketAddr)> {
    let config = TlsServerConfig {
        identity: identity.clone(),
        clients: ClientAuth::Anonymous,
        offer: TlsParams::default(),
        alpn: vec![b"http/1.1".to_vec()],
    };
    let acceptor = config.load()?.load().acceptor();
    Ok((serve_at(None, drain)?, serve_at(Some(acceptor), drain)?))
}

fn serve_at(tls: Option<TlsAcceptor>, drain: &Drain) -> anyhow::Result<SocketAddr> {
    let listener = TcpListenSocket::bind_public(EPHEMERAL.parse()?)?;
    let at = listener.at();
    let tasks = drain.clone();
    drain.spawn(info_span!("page"), async move {
        while let Some((socket, _)) = tasks.run_until(listener.accept()).await {
            let tls = tls.clone();
            tasks.spawn(info_span!("page"), async move {
                match tls {
                    None => answer(socket).await,
                    Some(tls) => {
                        if let Ok(socket) = tls.accept(socket).await {
                            answer(socket).await;
                        }
                    }
                }
            });
        }
    });
    Ok(at)
}

/// Reads the head of a response.
pub(crate) async fn read_head<S: AsyncRead + Unpin>(stream: &mut S) -> anyhow::Result<String> {
    let mut head = Vec::new();
    while !head.ends_with(b"\r\n\r\n") {
        head.push(stream.read_u8().await.context("the server closed the connection")?);
    }
    Ok(String::from_utf8_lossy(&head).into_owned())
}

async fn answer<S: AsyncRead + AsyncWrite + Unpin>(mut socket: S) {
    let mut request = [0; 4096];
    let Ok(read) = socket.read(&mut request).await else { return };
    let is_download = request[..read].starts_with(format!("GET {DOWNLOAD} ").as_bytes());
    let length = if is_download { LENGTH } else { PAGE.len() };
    let head = format!("HTTP/1.0 200 OK\r\nContent-Type: text/html\r\nContent-Length: {length}\r\n\r\n");
    let sent = async {
        socket.write_all(head.as_bytes()).await?;
        if is_download {
            send_download(&mut socket).await?
        } else {
            socket.write_all(PAGE.as_bytes()).await?
        }
        socket.shutdown().await
    };
    if sent.await.is_ok() {
        // The client has everything it needs; how it closes does not matter.
        let _ = timeout(TIMEOUT, socket.read(&mut request)).await;
    }
}

/// Sends the download at its pace.
async fn send_download<S: AsyncWrite + Unpin>(socket: &mut S) -> io::Result<()> {
    let mut pace = interval(PACE);
    pace.set_missed_tick_behavior(MissedTickBehavior::Burst);
    for number in 0..LENGTH / PIECE {
        pace.tick().await;
        socket.write_all(&piece(number)).await?;
    }
    Ok(())
}

/// Returns a piece of the download, of which each has other bytes.
pub(crate) fn piece(number: usize) -> Vec<u8> {
    number.to_be_bytes().repeat(PIECE / size_of::<usize>())
}

pub(crate) const PAGE: &str =
    "<!doctype html><title>node1</title><h1>Hello from node1</h1><p>This came through the tunnel.\n";
/// Path of the download.
pub(crate) const DOWNLOAD: &str = "/download";
pub(crate) const MIB: usize = 1024 * 1024;
/// Number of bytes that are sent at once.
pub(crate) const PIECE: usize = 64 * 1024;
/// Length of the download in bytes, and the time for each piece: 10 s for all, so that one can follow it.
pub(crate) const LENGTH: usize = 64 * MIB;
const PACE: Duration = Duration::from_micros(9_765);
