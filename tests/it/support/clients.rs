//! Clients of the CONNECT port and of the admin ports.

use std::net::SocketAddr;
use std::time::Duration;

use socket2::SockRef;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;

use super::assert_eventually;

/// The response to a request.
#[derive(Debug)]
pub(crate) struct Answer {
    pub(crate) status: u16,
    /// Reason phrase.
    pub(crate) phrase: String,
    /// The whole head.
    pub(crate) head: String,
    pub(crate) body: String,
}

/// Sends a request's text and reads until the remote end closes.
pub(crate) async fn send_request(at: SocketAddr, request: &str) -> Answer {
    let mut socket = TcpStream::connect(at).await.unwrap();
    socket.write_all(request.as_bytes()).await.unwrap();
    answer(socket).await
}

/// Reads the response on a connection on which the request was sent.
pub(crate) async fn answer(mut socket: TcpStream) -> Answer {
    let mut text = String::new();
    assert_eventually("an answer and its end", socket.read_to_string(&mut text)).await.unwrap();
    let (head, body) = text.split_once("\r\n\r\n").unwrap_or_else(|| panic!("no head: {text:?}"));
    let mut line = head.lines().next().unwrap().splitn(3, ' ').skip(1);
    let status = line.next().unwrap().parse().unwrap();
    let phrase = line.next().unwrap_or_default().to_owned();
    Answer { status, phrase, head: head.to_owned(), body: body.to_owned() }
}

/// Opens a session to `target` through a CONNECT port.
pub(crate) async fn open(at: SocketAddr, target: &str) -> TcpStream {
    let mut socket = TcpStream::connect(at).await.unwrap();
    socket.set_nodelay(true).unwrap();
    socket.write_all(format!("CONNECT {target} HTTP/1.1\r\n\r\n").as_bytes()).await.unwrap();
    // Every other head is longer, so at least this number of bytes arrives.
    let mut head = vec![0; ESTABLISHED.len()];
    assert_eventually("an answer to CONNECT", socket.read_exact(&mut head)).await.unwrap();
    if head != ESTABLISHED.as_bytes() {
        head.extend(rest(&mut socket).await);
        panic!("asked for {target}: {}", String::from_utf8_lossy(&head));
    }
    socket
}

/// Reads a head, and not a byte more.
pub(crate) async fn head(socket: &mut TcpStream) -> String {
    let mut head = Vec::new();
    while !head.ends_with(b"\r\n\r\n") {
        let byte = assert_eventually("a head", socket.read_u8()).await;
        head.push(byte.unwrap_or_else(|e| panic!("{e} after {:?}", String::from_utf8_lossy(&head))));
    }
    String::from_utf8(head).unwrap()
}

/// Writes a text and reads it back.
pub(crate) async fn assert_echo(socket: &mut TcpStream, text: &str) {
    socket.write_all(text.as_bytes()).await.unwrap();
    let mut back = vec![0; text.len()];
    assert_eventually("an echo", socket.read_exact(&mut back)).await.unwrap();
    assert_eq!(String::from_utf8_lossy(&back), text);
}

/// Reads until the end of the stream.
pub(crate) async fn rest(socket: &mut TcpStream) -> Vec<u8> {
    let mut all = Vec::new();
    assert_eventually("the end of stream", socket.read_to_end(&mut all)).await.unwrap();
    all
}

/// Waits for the remote end to reset the connection. An orderly end is an error.
pub(crate) async fn assert_reset(socket: &mut TcpStream) {
    let mut all = Vec::new();
    let ended = assert_eventually("a reset", socket.read_to_end(&mut all)).await;
    assert_eq!(ended.unwrap_err().kind(), std::io::ErrorKind::ConnectionReset);
}

/// Resets a connection.
pub(crate) fn reset(socket: TcpStream) {
    SockRef::from(&socket).set_linger(Some(Duration::ZERO)).unwrap();
    drop(socket);
}

/// Gets a path of an admin port.
pub(crate) async fn get(at: SocketAddr, path: &str) -> Answer {
    send_request(at, &format!("GET {path} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")).await
}

/// The whole head of a successful response to CONNECT.
pub(crate) const ESTABLISHED: &str = "HTTP/1.1 200 Connection established\r\n\r\n";

/// Opens a session for a client with a receive buffer so small that it stalls soon.
pub(crate) async fn stalled(at: SocketAddr, target: &str) -> TcpStream {
    let socket = tokio::net::TcpSocket::new_v4().unwrap();
    socket.set_recv_buffer_size(4096).unwrap();
    let mut client = socket.connect(at).await.unwrap();
    client.write_all(format!("CONNECT {target} HTTP/1.1\r\n\r\n").as_bytes()).await.unwrap();
    let head = head(&mut client).await;
    assert_eq!(head, ESTABLISHED, "asked for {target}");
    client
}
