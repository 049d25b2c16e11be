//! The protocol of an HTTP proxy: CONNECT, and plain requests with an absolute URL. Each request is authorized separately.

use std::io;
use std::pin::Pin;
use std::task::{Context, Poll};

use bytes::Bytes;
use http::header::HOST;
use http::request::Parts;
use tokio::io::{AsyncRead, AsyncReadExt, ReadBuf};

use crate::admission::connect::serve_connect;
use crate::admission::denial::Denial;
use crate::admission::forward::forward;
use crate::admission::requests::credentials;
use crate::admission::{Admission, AdmissionOutcome, ListenerProtocol, OpenRequest};
use tunnel_net::hooked::{Hooked, ReadHook};
use tunnel_net::socket::Connection;
use tunnel_proto::names::{NameError, Target};

/// The label `listener` of HTTP proxies, and the name of their tables.
pub(crate) const NAME: &str = "http_proxy";

/// The protocol of an HTTP proxy listener: CONNECT, and plain HTTP requests.
#[derive(Debug)]
pub struct HttpProxyProtocol;

impl<C: Connection + 'static> ListenerProtocol<C> for HttpProxyProtocol {
    fn rejection_bytes(&self, denial: &Denial, trace: &str) -> Bytes {
        denial.text(trace)
    }

    async fn handshake(&self, mut socket: C, admission: &mut Admission) -> AdmissionOutcome {
        let Ok(begin) = start(&mut socket).await else {
            return AdmissionOutcome::Failed { reason: "header_missing", socket: Some(Box::new(socket)) };
        };
        admission.mark_active();
        let connects = begin == CONNECT;
        let socket = Box::new(Hooked { io: socket, hook: PrereadBytes(begin) });
        if connects {
            serve_connect(socket, admission).await
        } else {
            let is_server = admission.context.uplink.is_none();
            forward(socket, admission, None, &|head: &Parts| parse_plain(head, is_server)).await
        }
    }
}

/// Returns the open request for a plain request: to the host of its URL or, as in SuperEdge's servers, of its Host
/// header.
fn parse_plain(head: &Parts, is_server: bool) -> Result<OpenRequest, Denial> {
    if head.uri.scheme().is_none() && !is_server {
        // Otherwise a web page could reach nodes by a name that resolves to this port.
        return Err(Denial::Request(
            "a proxy expects the whole URL (http://node:port/path); configure it as a proxy",
        ));
    }
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
    let mut space = [0; CONNECT.len()];
    let mut have = 0;
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
pub struct PrereadBytes(Vec<u8>);

impl<T: AsyncRead + Unpin> ReadHook<T> for PrereadBytes {
    fn poll_read(&mut self, io: &mut T, cx: &mut Context<'_>, out: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        if self.0.is_empty() {
            return Pin::new(io).poll_read(cx, out);
        }
        let n = self.0.len().min(out.remaining());
        out.put_slice(self.0.get(..n).unwrap_or_default());
        self.0.drain(..n);
        Poll::Ready(Ok(()))
    }
}

/// First bytes of a CONNECT request.
const CONNECT: &[u8; 8] = b"CONNECT ";
