//! Targets of sessions.

use std::future::pending;
use std::net::SocketAddr;

use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpSocket, TcpStream};
use tokio::sync::mpsc;

use super::spawn;

/// Serves each connection with a task.
pub(crate) async fn serve<F>(task: impl Fn(TcpStream) -> F + Send + 'static) -> SocketAddr
where
    F: Future<Output = ()> + Send + 'static,
{
    serve_at("127.0.0.1:0", task).await
}

/// Like [`serve`], but at an address.
pub(crate) async fn serve_at<F>(at: &str, task: impl Fn(TcpStream) -> F + Send + 'static) -> SocketAddr
where
    F: Future<Output = ()> + Send + 'static,
{
    serve_on(TcpListener::bind(at).await.unwrap(), task)
}

fn serve_on<F>(listener: TcpListener, task: impl Fn(TcpStream) -> F + Send + 'static) -> SocketAddr
where
    F: Future<Output = ()> + Send + 'static,
{
    let at = listener.local_addr().unwrap();
    spawn(async move {
        while let Ok((socket, _)) = listener.accept().await {
            // A broken connection matters to the test, not to the target.
            drop(spawn(task(socket)));
        }
    });
    at
}

/// Like [`serve`], but at `[::1]`. The same port of 127.0.0.1, which edges dial first for the node's own name, is kept
/// from other tests: edges refuse the port of another test's server.
pub(crate) async fn serve_ipv6<F>(task: impl Fn(TcpStream) -> F + Send + 'static) -> SocketAddr
where
    F: Future<Output = ()> + Send + 'static,
{
    loop {
        let listener = TcpListener::bind("[::1]:0").await.unwrap();
        let unused = TcpSocket::new_v4().unwrap();
        let at = SocketAddr::from(([127, 0, 0, 1], listener.local_addr().unwrap().port()));
        if unused.bind(at).is_ok() {
            spawn(async move {
                let _unused = unused;
                pending::<()>().await;
            });
            return serve_on(listener, task);
        }
    }
}

/// Sends all bytes back, and ends when the client does.
pub(crate) async fn echo() -> SocketAddr {
    serve(echo_one).await
}

pub(crate) async fn echo_one(mut socket: TcpStream) {
    let _ = socket.set_nodelay(true);
    let (mut from, mut to) = socket.split();
    let _ = tokio::io::copy(&mut from, &mut to).await;
    let _ = to.shutdown().await;
}

/// Reads to the end, then sends the number of bytes.
pub(crate) async fn sink() -> SocketAddr {
    serve(|mut socket| async move {
        let mut taken = tokio::io::sink();
        let count = tokio::io::copy(&mut socket, &mut taken).await.unwrap_or(0);
        let _ = socket.write_all(count.to_string().as_bytes()).await;
    })
    .await
}

/// Sends `bytes` bytes of [`pattern`], ends its direction, and reads until the client ends too.
pub(crate) async fn source(bytes: usize) -> SocketAddr {
    let all = pattern(bytes);
    serve(move |mut socket| {
        let all = all.clone();
        async move {
            if socket.write_all(&all).await.is_ok() && socket.shutdown().await.is_ok() {
                let _ = socket.read_to_end(&mut Vec::new()).await;
            }
        }
    })
    .await
}

/// Sends endlessly.
pub(crate) async fn endless_source() -> SocketAddr {
    serve(|mut socket| async move { while socket.write_all(&[7; 32 * 1024]).await.is_ok() {} }).await
}

/// Returns the address of a port on which no program listens.
pub(crate) async fn closed_port() -> SocketAddr {
    TcpListener::bind("127.0.0.1:0").await.unwrap().local_addr().unwrap()
}

/// Returns bytes in which each lost, duplicated or reordered byte is detectable.
pub(crate) fn pattern(bytes: usize) -> Vec<u8> {
    (0..bytes.div_ceil(4)).flat_map(|n| u32::try_from(n).unwrap().to_be_bytes()).take(bytes).collect()
}

/// Reports the error with which each of its connections failed.
pub(crate) async fn report_broken_connection() -> (SocketAddr, mpsc::Receiver<std::io::ErrorKind>) {
    let (sender, receiver) = mpsc::channel(1);
    let at = serve(move |mut socket| {
        let sender = sender.clone();
        async move {
            let ended = socket.read_to_end(&mut Vec::new()).await;
            sender.send(ended.unwrap_err().kind()).await.unwrap();
        }
    })
    .await;
    (at, receiver)
}
