//! WebSockets below the TLS of links, for paths without HTTP/2: both ends of the handshake, and the stream of bytes.
//!
//! A proxy that ends TLS may read and change everything here. So it carries nothing but the link's own TLS.

use std::io;
use std::net::{IpAddr, SocketAddr};
use std::pin::Pin;
use std::task::{Context, Poll, ready};

use bytes::Bytes;
use futures_util::{SinkExt as _, StreamExt as _};
use tokio::io::{AsyncWrite, AsyncWriteExt as _};
use tokio::net::TcpStream;
use tokio_tungstenite::tungstenite::client::IntoClientRequest as _;
use tokio_tungstenite::tungstenite::handshake::server::{ErrorResponse, Request, Response};
use tokio_tungstenite::tungstenite::http::{HeaderMap, StatusCode, header};
use tokio_tungstenite::tungstenite::protocol::{Role, WebSocketConfig};
use tokio_tungstenite::tungstenite::{Error, Message};
use tokio_tungstenite::{WebSocketStream, accept_hdr_async, client_async_with_config};

use crate::ChunkStream;
use crate::byte_stream_io::ChunkStreamIo;
use crate::socket::Connection;
use tunnel_base::policy::{Networks, canonical_ip};

/// A WebSocket as a stream of bytes.
pub type WebSocket = ChunkStreamIo<WebSocketMessages>;

/// The binary messages of a WebSocket.
#[derive(derive_more::Debug)]
#[debug("WebSocketMessages")]
pub struct WebSocketMessages(Box<WebSocketStream<Carrier>>);

/// The connection that carries a WebSocket: TLS with the proxy, or TCP at a server whose proxy speaks no TLS to it.
type Carrier = Box<dyn Connection + Sync>;

impl WebSocket {
    /// Requests a WebSocket from the server `authority`.
    ///
    /// # Errors
    ///
    /// Returns why there is none, with a hint.
    pub async fn connect(io: impl Connection + Sync + 'static, authority: &str) -> Result<Self, String> {
        let io: Carrier = Box::new(io);
        let request = format!("wss://{authority}{PATH}").into_client_request().map_err(|e| e.to_string())?;
        match client_async_with_config(request, io, Some(limits())).await {
            Ok((messages, _)) => Ok(Self::of(messages)),
            Err(Error::Http(response)) => {
                let status = response.status();
                Err(format!("it was answered with HTTP status {}; {}", status.as_u16(), hint(status)))
            }
            Err(error) => Err(format!("{error}; {}", hint(StatusCode::BAD_GATEWAY))),
        }
    }

    /// Accepts a WebSocket, requested by `from`. Returns also the address of the client: if `from` is one of `proxies`,
    /// it is the last one in X-Forwarded-For that is none of them.
    ///
    /// # Errors
    ///
    /// Returns why the request was refused. The caller has been answered.
    pub async fn accept(
        mut io: impl Connection + Sync + 'static,
        from: SocketAddr,
        proxies: &Networks,
    ) -> Result<(Self, SocketAddr), String> {
        let mut client = from;
        #[expect(clippy::result_large_err, reason = "the library's type")]
        let check = |request: &Request, response: Response| {
            let headers = request.headers();
            // A web page must not use its visitor's access to this port.
            if headers.contains_key(header::ORIGIN) {
                return Err(refusal(StatusCode::FORBIDDEN));
            }
            if request.uri().path() != PATH {
                return Err(refusal(StatusCode::NOT_FOUND));
            }
            if proxies.contains(from.ip()) {
                client = forwarded_for(headers, proxies).map_or(from, |ip| SocketAddr::new(ip, 0));
            }
            Ok(response)
        };
        // The library closes without an answer what is no request for a WebSocket, and a proxy would then report that
        // the server is down.
        if let Err(error) = accept_hdr_async(&mut io, check).await {
            if !matches!(error, Error::Http(_) | Error::Io(_)) {
                let _ = io.write_all(UPGRADE_REQUIRED).await;
                let _ = io.flush().await;
            }
            return Err(error.to_string());
        }
        let io: Carrier = Box::new(io);
        let messages = WebSocketStream::from_raw_socket(io, Role::Server, Some(limits())).await;
        Ok((Self::of(messages), client))
    }

    fn of(messages: WebSocketStream<Carrier>) -> Self {
        Self::new(WebSocketMessages(Box::new(messages)))
    }
}

impl ChunkStream for WebSocketMessages {
    fn poll_read_chunk(&mut self, cx: &mut Context<'_>) -> Poll<io::Result<Bytes>> {
        loop {
            return Poll::Ready(match ready!(self.0.poll_next_unpin(cx)) {
                // TLS has no use for an empty one, and they cost time.
                Some(Ok(Message::Binary(bytes))) if !bytes.is_empty() => Ok(bytes),
                Some(Ok(Message::Ping(_) | Message::Pong(_))) => continue,
                Some(Ok(Message::Close(_))) | None => Ok(Bytes::new()),
                Some(Ok(_)) => Err(io::ErrorKind::InvalidData.into()),
                Some(Err(error)) => Err(io_error(error)),
            });
        }
    }

    fn poll_write_chunk(&mut self, cx: &mut Context<'_>, bytes: &mut Bytes) -> Poll<io::Result<()>> {
        ready!(self.0.poll_ready_unpin(cx)).map_err(io_error)?;
        if bytes.is_empty() {
            return Poll::Ready(Ok(()));
        }
        let message = bytes.split_to(bytes.len().min(MAX_MESSAGE));
        Poll::Ready(self.0.start_send_unpin(Message::Binary(message)).map_err(io_error))
    }

    fn poll_flush(&mut self, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        self.0.poll_flush_unpin(cx).map_err(io_error)
    }

    fn poll_finish(&mut self, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        // Fails if the remote has closed, too.
        let _ = ready!(self.0.poll_close_unpin(cx));
        Pin::new(self.0.get_mut()).poll_shutdown(cx)
    }

    fn tcp(&self) -> Option<&TcpStream> {
        self.0.get_ref().tcp()
    }
}

fn limits() -> WebSocketConfig {
    WebSocketConfig::default()
        .read_buffer_size(READ_BUFFER)
        .write_buffer_size(MAX_MESSAGE)
        .max_write_buffer_size(MAX_UNSENT)
        .max_message_size(Some(MAX_MESSAGE))
        .max_frame_size(Some(MAX_MESSAGE))
}

/// Returns the last address of a request that is not one of these proxies; `None` if there is none.
fn forwarded_for(headers: &HeaderMap, proxies: &Networks) -> Option<IpAddr> {
    let lines = headers.get_all("x-forwarded-for").into_iter();
    let all: Vec<&[u8]> = lines.flat_map(|line| line.as_bytes().split(|byte| *byte == b',')).collect();
    let parse = |entry: &&[u8]| {
        let entry = str::from_utf8(entry).ok()?.trim();
        let ip = entry.parse().or_else(|_| entry.parse().map(|at: SocketAddr| at.ip()));
        ip.ok().map(canonical_ip)
    };
    // What is before an entry that is no address was written by a party of which nothing is known.
    all.iter().rev().map_while(parse).find(|ip| !proxies.contains(*ip))
}

fn refusal(status: StatusCode) -> ErrorResponse {
    let mut response = ErrorResponse::new(None);
    *response.status_mut() = status;
    response
}

fn io_error(error: Error) -> io::Error {
    match error {
        Error::Io(error) => error,
        error => io::Error::other(error),
    }
}

/// Returns a hint for the operator of an edge whose request was answered with this status.
fn hint(status: StatusCode) -> &'static str {
    match status {
        StatusCode::UPGRADE_REQUIRED => {
            "the proxy does not pass WebSockets (nginx: proxy_http_version 1.1, and the headers Upgrade and Connection)"
        }
        StatusCode::BAD_GATEWAY | StatusCode::SERVICE_UNAVAILABLE | StatusCode::GATEWAY_TIMEOUT => {
            "the proxy does not reach the server, or the server is an older version without WebSockets"
        }
        _ => {
            "a proxy or this port leads to another program, or to a server without WebSockets; name the port for \
              links, listen of its [server.links] (default 9000)"
        }
    }
}

/// The path of requests for WebSockets.
pub const PATH: &str = "/tunnel/link";
/// Maximum size of a message in bytes. A connection that has proven nothing can make this end store one.
const MAX_MESSAGE: usize = 64 * 1024;
/// Bytes that wait for a remote that does not read: what is collected, one message, and answers to its pings. More of
/// these are not stored.
const MAX_UNSENT: usize = 3 * MAX_MESSAGE;
/// Bytes that a read asks for at most, next to the rest of a message. Each link has this buffer.
const READ_BUFFER: usize = 16 * 1024;
/// The answer to other requests.
const UPGRADE_REQUIRED: &[u8] = b"HTTP/1.1 426 Upgrade Required\r\nUpgrade: websocket\r\nConnection: close, upgrade\r\nContent-Length: 0\r\n\r\n";

#[cfg(test)]
mod tests {
    use std::io::IoSlice;
    use std::time::Duration;

    use tokio::io::{AsyncReadExt as _, duplex};
    use tokio::time::timeout;

    use super::*;
    use crate::socket::CHUNK;

    #[test]
    fn the_client_is_the_last_address_that_is_no_proxy() {
        let proxies: Networks =
            ["10.0.0.0/8", "fd00::/8"].iter().map(|text| text.parse::<ipnet::IpNet>().unwrap()).collect();
        for (lines, client) in [
            (&["203.0.113.7"][..], Some("203.0.113.7")),
            (&["198.51.100.1, 203.0.113.7,10.0.0.2 , fd00::1"], Some("203.0.113.7")),
            (&["198.51.100.1", "203.0.113.7:4711"], Some("203.0.113.7")),
            (&["[2001:db8::1]:4711"], Some("2001:db8::1")),
            (&["::ffff:203.0.113.7"], Some("203.0.113.7")),
            (&["203.0.113.7, unknown, 10.0.0.2"], None),
            (&["198.51.100.1", "\u{ff}, 203.0.113.7"], Some("203.0.113.7")),
            (&["198.51.100.1", "\u{ff}, 10.0.0.2"], None),
            (&["10.0.0.2"], None),
            (&[""], None),
            (&[], None),
        ] {
            let line = |line: &&str| {
                (
                    header::HeaderName::from_static("x-forwarded-for"),
                    header::HeaderValue::from_bytes(line.as_bytes()).unwrap(),
                )
            };
            let headers = lines.iter().map(line).collect();
            assert_eq!(forwarded_for(&headers, &proxies), client.map(|ip| ip.parse().unwrap()), "{lines:?}");
        }
    }

    /// Returns both ends of a WebSocket. The client's may send longer messages.
    async fn pair(buffer: usize) -> (WebSocketStream<tokio::io::DuplexStream>, WebSocket) {
        let (near, far) = duplex(buffer);
        let request = format!("wss://a{PATH}").into_client_request().unwrap();
        let from = "192.0.2.1:1".parse().unwrap();
        let proxies = Networks::default();
        let (client, server) = tokio::join!(
            tokio_tungstenite::client_async(request, near),
            WebSocket::accept(far, from, &proxies)
        );
        let (server, client_address) = server.unwrap();
        assert_eq!(client_address, from);
        (client.unwrap().0, server)
    }

    #[tokio::test]
    async fn all_bytes_arrive_in_messages_of_bounded_length() {
        let (mut client, mut server) = pair(1 << 20).await;
        client.send(Message::Ping(Bytes::new())).await.unwrap();
        client.send(Message::binary(vec![1; MAX_MESSAGE])).await.unwrap();
        let mut read = vec![0; MAX_MESSAGE];
        server.read_exact(&mut read).await.unwrap();
        assert_eq!(read, vec![1; MAX_MESSAGE]);
        let slices = [IoSlice::new(&[2; CHUNK - 1]), IoSlice::new(&[3; 2])];
        assert_eq!(server.write_vectored(&slices).await.unwrap(), CHUNK);
        server.shutdown().await.unwrap();
        assert_eq!(client.next().await.unwrap().unwrap(), Message::Pong(Bytes::new()));
        assert_eq!(client.next().await.unwrap().unwrap().len(), CHUNK);
        assert!(client.next().await.unwrap().unwrap().is_close());
    }

    #[tokio::test]
    async fn longer_and_empty_messages_and_texts_end_the_stream() {
        for message in
            [Message::binary(vec![0; MAX_MESSAGE + 1]), Message::binary(vec![]), Message::text("text")]
        {
            let (mut client, mut server) = pair(1 << 20).await;
            client.send(message).await.unwrap();
            assert!(server.read_u8().await.is_err_and(|why| why.kind() != io::ErrorKind::UnexpectedEof));
        }
    }

    #[tokio::test(start_paused = true)]
    async fn answers_to_pings_of_a_remote_that_does_not_read_are_bounded() {
        let (mut client, mut server) = pair(256).await;
        let flood = async {
            let raw = client.get_mut();
            let ping = [&[0x89, 0xfd, 0, 0, 0, 0][..], &[b'a'; 125]].concat();
            for _ in 0..10_000 {
                raw.write_all(&ping).await.unwrap();
            }
            let mut stored = 0;
            // Time passes only when nothing more arrives.
            while let Ok(read) = timeout(Duration::from_secs(1), raw.read(&mut [0; 4096])).await {
                stored += read.unwrap();
            }
            stored
        };
        let stored = tokio::select! {
            stored = flood => stored,
            read = server.read_u8() => panic!("{read:?}"),
        };
        assert!((1..=MAX_UNSENT + 4096).contains(&stored), "{stored}");
    }
}
