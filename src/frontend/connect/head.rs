//! The HTTP part of a CONNECT: takes a bare socket, reads the head, answers, and gives the bare socket back.

use std::future::Future;
use std::io;
use std::pin::Pin;
use std::sync::{Arc, Mutex, PoisonError};
use std::task::{Context, Poll, ready};

use bytes::Bytes;
use http::request::Parts;
use http::{Request, Response};
use http_body_util::Full;
use hyper::body::Incoming;
use hyper::ext::ReasonPhrase;
use hyper::server::conn::http1;
use hyper::service::service_fn;
use hyper_util::rt::TokioIo;
use socket2::SockRef;
use tokio::io::{AsyncRead, AsyncWrite, Interest, ReadBuf};
use tokio::net::TcpStream;

use crate::frontend::serve::Handshake;

/// Reads the head, passes it to `open`, and answers: 200 if that returns a session, else the response that it returns.
///
/// A client that finishes its direction early is still served, as `nc` and its like do so; `open` is dropped when the
/// client resets the connection. Not cancel safe.
pub(super) async fn handshake<S, F, O>(socket: TcpStream, open: F) -> Handshake<TcpStream, S>
where
    F: FnOnce(Parts) -> O,
    O: Future<Output = Result<S, Response<Full<Bytes>>>>,
{
    let socket = Arc::new(socket);
    let exchange = Exchange { open: Mutex::new(Some(open)), outcome: Mutex::new(None) };
    let said = {
        let answer = |request: Request<Incoming>| exchange.answer(request, &socket);
        let io = TokioIo::new(Shared(Arc::clone(&socket)));
        server().serve_connection(io, service_fn(answer)).without_shutdown().await.map(|p| p.read_buf)
    };
    let socket = Arc::into_inner(socket);
    let outcome = exchange.outcome.into_inner().unwrap_or_else(PoisonError::into_inner);
    match (said, outcome, socket) {
        (Ok(early), Some(Some(session)), Some(socket)) => Handshake::Opened { session, socket, early },
        (Ok(_), Some(None), Some(socket)) => Handshake::Denied(socket),
        (Ok(_), _, socket) => Handshake::Failed { cause: "no_head", socket },
        (Err(error), _, socket) => Handshake::Failed { cause: cause(&error), socket },
    }
}

struct Exchange<F, S> {
    open: Mutex<Option<F>>,
    /// None until answered; then what was opened, if anything.
    outcome: Mutex<Option<Option<S>>>,
}

impl<S, F, O> Exchange<F, S>
where
    F: FnOnce(Parts) -> O,
    O: Future<Output = Result<S, Response<Full<Bytes>>>>,
{
    async fn answer(
        &self,
        request: Request<Incoming>,
        socket: &TcpStream,
    ) -> Result<Response<Full<Bytes>>, ClientGone> {
        let open = self.open.lock().unwrap_or_else(PoisonError::into_inner).take().ok_or(ClientGone)?;
        let (parts, _body) = request.into_parts();
        let opened = tokio::select! {
            biased;
            opened = open(parts) => opened,
            // hyper does not look at the socket while it waits for us, so the reset is watched for here.
            _ = socket.ready(Interest::ERROR) => return Err(ClientGone),
        };
        let (outcome, answer) = match opened {
            Ok(session) => (Some(session), established()),
            Err(denied) => (None, denied),
        };
        *self.outcome.lock().unwrap_or_else(PoisonError::into_inner) = Some(outcome);
        Ok(answer)
    }
}

/// The client reset the connection before it was answered.
#[derive(Debug, thiserror::Error)]
#[error("the client went away")]
struct ClientGone;

/// The socket, shared with hyper so that this module can watch it for a reset.
struct Shared(Arc<TcpStream>);

impl AsyncRead for Shared {
    fn poll_read(self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        loop {
            ready!(self.0.poll_read_ready(cx))?;
            match self.0.try_read(buf.initialize_unfilled()) {
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
                read => return Poll::Ready(read.map(|n| buf.advance(n))),
            }
        }
    }
}

impl AsyncWrite for Shared {
    fn poll_write(self: Pin<&mut Self>, cx: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        loop {
            ready!(self.0.poll_write_ready(cx))?;
            match self.0.try_write(bytes) {
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
                written => return Poll::Ready(written),
            }
        }
    }

    fn poll_flush(self: Pin<&mut Self>, _cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Poll::Ready(Ok(()))
    }

    fn poll_shutdown(self: Pin<&mut Self>, _cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Poll::Ready(SockRef::from(&*self.0).shutdown(std::net::Shutdown::Write))
    }
}

/// Connections are not reused: every answer but the 200 carries `connection: close`.
fn server() -> http1::Builder {
    let mut server = http1::Builder::new();
    server.max_buf_size(HEAD_BYTES).half_close(true).auto_date_header(false);
    server
}

/// The 200 with SuperEdge's reason phrase. hyper writes its head in one piece, before the session's bytes.
fn established() -> Response<Full<Bytes>> {
    let mut answer = Response::new(Full::default());
    answer.extensions_mut().insert(ReasonPhrase::from_static(b"Connection established"));
    answer
}

fn cause(error: &hyper::Error) -> &'static str {
    if error.is_parse_too_large() {
        "long_head"
    } else if error.is_parse() {
        "bad_head"
    } else if error.is_user() {
        "reset_while_opening"
    } else {
        "reset"
    }
}

/// Longest head in bytes; hyper answers 431 beyond it. Usual heads are a line or two, credentials included.
const HEAD_BYTES: usize = 16 * 1024;

#[cfg(test)]
mod tests;
