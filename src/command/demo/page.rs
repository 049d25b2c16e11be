//! The web page and the download at the demo's edge.

use std::sync::OnceLock;
use std::time::Duration;

use aws_lc_rs::digest::{Context as Digest, Digest as Hash, SHA256};
use tokio::io::{AsyncRead, AsyncReadExt as _, AsyncWrite, AsyncWriteExt as _};
use tokio::time::{MissedTickBehavior, interval, timeout};
use tokio_rustls::TlsAcceptor;
use tracing::info_span;

use super::TIMEOUT;
use tunnel_base::drain::Drain;
use tunnel_net::listen::TcpListenSocket;

/// Serves the page on each connection, whatever the request, until draining starts; over TLS if `tls` is set.
pub(crate) async fn serve(listener: TcpListenSocket, tls: Option<TlsAcceptor>, drain: Drain) {
    while let Some((socket, _)) = drain.run_until(listener.accept()).await {
        let tls = tls.clone();
        drain.spawn(info_span!("page"), async move {
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
}

async fn answer<S: AsyncRead + AsyncWrite + Unpin>(mut socket: S) {
    let mut request = [0; 4096];
    let Ok(read) = socket.read(&mut request).await else { return };
    let sent = if request[..read].starts_with(format!("GET {DOWNLOAD} ").as_bytes()) {
        send_download(&mut socket).await
    } else {
        let length = PAGE.len();
        let head = format!("HTTP/1.0 200 OK\r\nContent-Type: text/html\r\nContent-Length: {length}\r\n\r\n");
        socket.write_all((head + PAGE).as_bytes()).await
    };
    if sent.is_ok() {
        // The client has everything it needs; how it closes does not matter.
        let _ = socket.shutdown().await;
        let _ = timeout(TIMEOUT, socket.read(&mut request)).await;
    }
}

/// Sends the download at its pace, as an HTTP response.
async fn send_download<S: AsyncWrite + Unpin>(socket: &mut S) -> std::io::Result<()> {
    let head = format!(
        "HTTP/1.0 200 OK\r\nContent-Type: application/octet-stream\r\nContent-Length: {LENGTH}\r\n\r\n"
    );
    socket.write_all(head.as_bytes()).await?;
    let mut pace = interval(PACE);
    pace.set_missed_tick_behavior(MissedTickBehavior::Burst);
    for number in 0..LENGTH / PIECE {
        pace.tick().await;
        socket.write_all(&piece(number)).await?;
    }
    Ok(())
}

/// Returns a piece of the download: random bytes, and the piece's number, so that lost and repeated pieces change the
/// digest.
fn piece(number: usize) -> Vec<u8> {
    static RANDOM: OnceLock<Vec<u8>> = OnceLock::new();
    let random = RANDOM.get_or_init(|| (0..PIECE).map(|_| rand::random()).collect());
    let number = number.to_be_bytes();
    [&number[..], &random[number.len()..]].concat()
}

/// Returns the digest of the download.
pub(crate) fn expected_digest() -> Hash {
    let mut digest = Digest::new(&SHA256);
    (0..LENGTH / PIECE).for_each(|number| digest.update(&piece(number)));
    digest.finish()
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
