//! The HTTP part of a CONNECT: takes a bare stream, reads the head, answers, and gives the bare stream back.

use std::convert::Infallible;
use std::future::{Future, Pending, pending, poll_fn};
use std::sync::{Mutex, PoisonError};
use std::task::Poll;

use bytes::Bytes;
use http::request::Parts;
use http::{Request, Response, Version};
use http_body_util::Empty;
use hyper::body::Incoming;
use hyper::server::conn::http1;
use hyper::service::service_fn;
use hyper_util::rt::TokioIo;
use tokio::io::AsyncWriteExt;

use crate::frontend::serve::Handshake;
use crate::frontend::{SSH, no_head, turn_away_http_2, turn_away_ssh, written};
use crate::net::socket::Connection;

/// Reads the head, passes it to `open`, and answers: 200 if that returns a session, else the response that it returns.
///
/// The answer is one write, which over TLS is one record: kube-apiserver treats a byte that it reads together with the
/// 200 as an error. A client that finishes its direction early is still served, as `nc` and its like do so; `open` is
/// dropped when the client goes away, as far as [`Connection::gone`] sees that. Not cancel safe.
pub(super) async fn handshake<C, T, F, O>(socket: C, open: F) -> Handshake<C, T>
where
    C: Connection,
    F: FnOnce(Parts) -> O,
    O: Future<Output = Result<T, Response<Bytes>>>,
{
    let Asked { request, mut socket, early } = match read(socket).await {
        Ok(asked) => asked,
        Err((cause, socket)) => return Handshake::Failed { cause, socket: Some(socket) },
    };
    let version = request.version;
    let opened = tokio::select! {
        biased;
        opened = open(request) => opened,
        () = socket.gone() => return Handshake::Failed { cause: "reset_while_opening", socket: Some(socket) },
    };
    let answer = match &opened {
        Ok(_) => established(version),
        Err(denied) => written(version, denied),
    };
    if send(&mut socket, &answer).await.is_err() {
        return Handshake::Failed { cause: "reset", socket: Some(socket) };
    }
    match opened {
        Ok(session) => Handshake::Opened { session, socket, early },
        Err(_) => Handshake::Denied(socket),
    }
}

/// A head that was read.
struct Asked<C> {
    request: Parts,
    socket: C,
    /// What came behind it.
    early: Bytes,
}

/// Lets hyper read a head, and takes the stream back from it before hyper does anything else. A malformed
/// head is answered, with 400 or 431.
async fn read<C: Connection>(socket: C) -> Result<Asked<C>, (&'static str, C)> {
    let taken = Mutex::new(None);
    let take = |request: Request<Incoming>| -> Pending<Result<Response<Empty<Bytes>>, Infallible>> {
        *taken.lock().unwrap_or_else(PoisonError::into_inner) = Some(request);
        pending()
    };
    let mut connection = server().serve_connection(TokioIo::new(socket), service_fn(take));
    let (ended, request) = poll_fn(|cx| {
        let polled = connection.poll_without_shutdown(cx);
        let request = taken.lock().unwrap_or_else(PoisonError::into_inner).take();
        match (polled, request) {
            (_, Some(request)) => Poll::Ready((Ok(()), Some(request))),
            (Poll::Ready(ended), None) => Poll::Ready((ended, None)),
            (Poll::Pending, None) => Poll::Pending,
        }
    })
    .await;
    let parts = connection.into_parts();
    let (mut socket, early) = (parts.io.into_inner(), parts.read_buf);
    match (ended, request) {
        (_, Some(request)) => Ok(Asked { request: request.into_parts().0, socket, early }),
        (Ok(()), None) => Err(("no_head", socket)),
        (Err(_), None) if turn_away_ssh(&mut socket, &early).await => Err((SSH, socket)),
        (Err(error), None) => {
            turn_away_http_2(&mut socket, &early).await;
            Err((no_head(&error), socket))
        }
    }
}

/// Writes the answer and flushes it. It fits into the empty buffer of any socket, so this needs no time limit of its
/// own.
async fn send<C: Connection>(socket: &mut C, answer: &[u8]) -> std::io::Result<()> {
    socket.write_all(answer).await?;
    socket.flush().await
}

/// Connections are not reused.
fn server() -> http1::Builder {
    let mut server = http1::Builder::new();
    server.max_buf_size(HEAD_BYTES).half_close(true).auto_date_header(false);
    server
}

/// The 200 as SuperEdge writes it, and as short: some clients read no more than a line or two.
fn established(version: Version) -> Bytes {
    format!("{version:?} 200 Connection established\r\n\r\n").into()
}

/// Longest head in bytes; hyper answers 431 beyond it. Ours are a line or two, credentials included.
const HEAD_BYTES: usize = 16 * 1024;

#[cfg(test)]
mod tests;
