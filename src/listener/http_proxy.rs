//! The HTTP proxy: CONNECT, and plain requests with an absolute URL. Each request is authorized separately.

use std::io;
use std::net::SocketAddr;
use std::pin::Pin;
use std::task::{Context, Poll};

use bytes::Bytes;
use http::header::HOST;
use http::request::Parts;
use tokio::io::{AsyncRead, AsyncReadExt, ReadBuf};
use tracing::{Span, field, info_span};

use crate::listener::admission::{Admission, HandshakeOutcome, ListenerProtocol, OpenRequest};
use crate::listener::forward::forward;
use crate::listener::requests::credentials;
use crate::listener::{Denial, connect};
use tunnel_base::names::{NameError, Target};
use tunnel_net::socket::{Connection, Hooked, ReadHook};
use tunnel_proto::frame::Category;

/// The protocol of an HTTP proxy listener: CONNECT, and plain HTTP requests.
#[derive(Debug)]
pub struct Proxy;

impl<C: Connection + 'static> ListenerProtocol<C> for Proxy {
    const NAME: &'static str = "http_proxy";
    const CATEGORY: Category = Category::HttpProxy;
    type Connection = C;

    fn span(&self, from: SocketAddr) -> Span {
        info_span!("proxy", client = %from, trace_id = field::Empty, session = field::Empty)
    }

    fn rejection_bytes(&self, denial: &Denial, trace: &str) -> Bytes {
        denial.text(trace)
    }

    async fn handshake(&self, mut socket: C, admission: &mut Admission) -> HandshakeOutcome<C> {
        let Ok(begin) = start(&mut socket).await else {
            return HandshakeOutcome::Failed { reason: "header_missing", socket: Some(socket) };
        };
        let connects = begin == CONNECT;
        let socket = Hooked { io: socket, hook: Begun(begin) };
        let served = if connects {
            connect::serve(socket, admission).await
        } else {
            forward(socket, admission, None, &plain).await
        };
        // The buffered first bytes were read with the first head, so the wrapper is no longer needed.
        served.map(|socket| socket.io)
    }
}

/// Returns the open request for a plain request: to the host of its URL or, as in SuperEdge, of its Host header.
fn plain(head: &Parts) -> Result<OpenRequest, Denial> {
    if head.uri.scheme().is_some_and(|scheme| *scheme != http::uri::Scheme::HTTP) {
        return Err(Denial::Request("only http:// URLs are accepted; use CONNECT for other protocols"));
    }
    // The check of the head has already replaced Host by the URL's host, if there is one.
    let host = head.headers.get(HOST).and_then(|host| host.to_str().ok()).unwrap_or_default();
    let target: Result<Target, NameError> = host.parse();
    let target = match target {
        Err(NameError::Port(_)) if !host.is_empty() => format!("{host}:80").parse()?,
        target => target?,
    };
    Ok(OpenRequest { node: None, target, credentials: credentials(&head.headers) })
}

/// Reads as many bytes as are needed to distinguish CONNECT from other requests.
async fn start<C: AsyncRead + Unpin>(socket: &mut C) -> io::Result<Vec<u8>> {
    let (mut space, mut have) = ([0; CONNECT.len()], 0);
    while have < CONNECT.len() && space.get(..have) == CONNECT.get(..have) {
        let room = space.get_mut(have..).unwrap_or_default();
        match socket.read(room).await? {
            0 if have == 0 => return Err(io::ErrorKind::UnexpectedEof.into()),
            0 => break,
            n => have += n,
        }
    }
    Ok(space.get(..have).unwrap_or_default().to_vec())
}

/// The bytes already read from a stream, which are read again first.
#[derive(Debug)]
struct Begun(Vec<u8>);

impl<T: AsyncRead + Unpin> ReadHook<T> for Begun {
    fn poll_read(
        &mut self,
        io: Pin<&mut T>,
        cx: &mut Context<'_>,
        out: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        if self.0.is_empty() {
            return io.poll_read(cx, out);
        }
        let n = self.0.len().min(out.remaining());
        out.put_slice(self.0.get(..n).unwrap_or_default());
        self.0.drain(..n);
        Poll::Ready(Ok(()))
    }
}

/// First bytes of a CONNECT request.
const CONNECT: &[u8; 8] = b"CONNECT ";
