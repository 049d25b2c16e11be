//! The page at the demo's edge: served, and asked for.

use std::time::Duration;

use anyhow::{Context as _, bail};
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt};
use tokio::time::timeout;
use tokio_rustls::TlsAcceptor;
use tracing::info_span;

use crate::drain::Drain;
use crate::net::listen::Listener;

/// Serves the page for each connection, whatever it asks, until draining begins; `tls`: under TLS.
pub(super) async fn serve(listener: Listener, tls: Option<TlsAcceptor>, drain: Drain) {
    loop {
        let (socket, _) = tokio::select! {
            () = drain.draining() => return,
            accepted = listener.accept() => accepted,
        };
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
    let length = PAGE.len();
    let head = format!("HTTP/1.0 200 OK\r\nContent-Type: text/html\r\nContent-Length: {length}\r\n\r\n");
    if socket.read(&mut request).await.is_ok() && socket.write_all((head + PAGE).as_bytes()).await.is_ok() {
        // The client has all it needs; how it closes does not matter.
        let _ = socket.shutdown().await;
        let _ = timeout(PATIENCE, socket.read(&mut request)).await;
    }
}

/// Asks for the page over a connection, and reads it whole. How many bytes came.
pub(super) async fn get<S>(mut stream: S, url: &str, host: &str) -> anyhow::Result<usize>
where
    S: AsyncRead + AsyncWrite + Unpin,
{
    let ask = format!("GET {url} HTTP/1.1\r\nHost: {host}\r\nConnection: close\r\n\r\n");
    stream.write_all(ask.as_bytes()).await?;
    let mut answer = String::new();
    timeout(PATIENCE, stream.read_to_string(&mut answer)).await.context("no page within 10 s")??;
    if !answer.ends_with(PAGE) {
        bail!("the page came back wrong: {answer:?}");
    }
    Ok(answer.len())
}

/// Asks with CONNECT for a target. The first line of the answer.
pub(super) async fn connect<S>(stream: &mut S, target: &str) -> anyhow::Result<String>
where
    S: AsyncRead + AsyncWrite + Unpin,
{
    stream.write_all(format!("CONNECT {target} HTTP/1.1\r\nHost: {target}\r\n\r\n").as_bytes()).await?;
    let head = timeout(PATIENCE, read_head(stream)).await.context("no answer to CONNECT within 10 s")??;
    let line = head.lines().next().unwrap_or("nothing");
    if !head.contains(" 200 ") {
        bail!("CONNECT was answered: {line}");
    }
    Ok(line.to_owned())
}

async fn read_head<S: AsyncRead + Unpin>(stream: &mut S) -> anyhow::Result<String> {
    let mut head = Vec::new();
    while !head.ends_with(b"\r\n\r\n") {
        let byte = stream.read_u8().await.context("the pod hung up")?;
        head.push(byte);
    }
    Ok(String::from_utf8_lossy(&head).into_owned())
}

const PAGE: &str =
    "<!doctype html><title>node1</title><h1>Hello from node1</h1><p>This came through the tunnel.\n";
/// For each step of the demo.
pub(super) const PATIENCE: Duration = Duration::from_secs(10);
