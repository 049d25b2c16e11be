//! HTTP/1.1 on a client's connection: each request is judged, and forwarded over a session to where it goes.
//!
//! A session belongs to one client connection, so that accounts, rules and identity stay exact. It is kept for the next
//! request that goes the same way. Bodies are passed on as they come; an upgrade leaves two bare streams.

mod body;
mod clock;
mod exchange;
mod head;
mod pipe;
mod upstream;
mod watched;

use std::convert::Infallible;
use std::future::poll_fn;
use std::pin::{Pin, pin};
use std::sync::Arc;
use std::task::Poll;

use bytes::Bytes;
use http::Response;
use http::request::Parts;
use hyper::server::conn::http1;
use hyper::service::service_fn;
use hyper_util::rt::TokioIo;
use tokio::time::{Instant, sleep_until};

use super::serve::HEAD_BYTES;
use super::{Denial, Denied, FrontContext, Granted, Handshake, no_head, turn_away_http_2};
use crate::net::socket::{Connection, Socket};
use crate::net::splice::deliver;
use body::AnswerBody;
use clock::{Clock, Deadline};
use exchange::Exchange;
pub(super) use head::{TUNNEL_DEST, TUNNEL_HOST};
use watched::Watched;

/// Judges the requests of one client, and opens sessions for them.
pub trait Router: Send {
    /// Where requests go, and as whose: those with an equal one may go over one session.
    type Way: PartialEq + Send + Sync;

    /// Returns where a request goes, if it may go there. Its URI is as the client has sent it, its Host is the one that
    /// it is for. Only clients that may come in get to know that a head is wrong.
    ///
    /// # Errors
    ///
    /// The denial for the client.
    fn judge(
        &mut self,
        head: Result<&Parts, Denial>,
    ) -> impl Future<Output = Result<Self::Way, Denied>> + Send;

    /// Opens a session. Cancel safe: a dropped call leaves nothing behind.
    ///
    /// # Errors
    ///
    /// The denial for the client.
    fn open(&mut self, way: &Self::Way) -> impl Future<Output = Result<Granted, Denied>> + Send;

    /// The denial for the client of the last request that was judged, whose session gave no answer.
    fn failed(&self, denial: Denial) -> Denied;

    /// The client has its answer, and is the one from whom something is expected now.
    fn answered(&self);
}

/// Serves a client's requests until it goes, or has nothing more to ask for a while, or draining begins, or it and the
/// target have agreed on another protocol: then the session is given back. Not cancel safe: a dropped call breaks off
/// what is under way.
pub async fn forward<C, R>(socket: C, router: R, context: &FrontContext) -> Handshake<C>
where
    C: Connection,
    R: Router,
{
    socket.breaks_off(true);
    let clock = Arc::new(Clock::new());
    let exchange = Exchange::new(router, Arc::clone(&clock), &context.metrics, &context.drain);
    let io = TokioIo::new(Watched::new(socket, Arc::clone(&clock)));
    let answer = |request| -> Answering<'_> { Box::pin(exchange.answer(request)) };
    let mut connection = server().serve_connection(io, service_fn(answer));
    let mut draining = pin!(context.drain.draining());
    let mut silence = pin!(sleep_until(Instant::now()));
    let mut leaving = false;
    let ended = poll_fn(|cx| {
        if !leaving && draining.as_mut().poll(cx).is_ready() {
            leaving = true;
            Pin::new(&mut connection).graceful_shutdown();
        }
        let served = connection.poll_without_shutdown(cx);
        exchange.poll(cx);
        if let Poll::Ready(ended) = served {
            return Poll::Ready(End::Hyper(ended));
        }
        let Some(deadline) = clock.deadline(leaving) else { return Poll::Pending };
        if silence.deadline() != deadline.at() {
            silence.as_mut().reset(deadline.at());
        }
        match (silence.as_mut().poll(cx), deadline) {
            (Poll::Ready(()), Deadline::Head(_)) => return Poll::Ready(End::TooSlow),
            (Poll::Ready(()), Deadline::Answer(_)) => return Poll::Ready(End::Gone),
            (Poll::Ready(()), Deadline::Request(_)) => {
                leaving = true;
                Pin::new(&mut connection).graceful_shutdown();
                cx.waker().wake_by_ref();
            }
            (Poll::Pending, _) => {}
        }
        Poll::Pending
    })
    .await;
    let parts = connection.into_parts();
    let (socket, early) = parts.io.into_inner().into_parts(parts.read_buf);
    finish(ended, socket, early, exchange.end(), context).await
}

type Answering<'a> = Pin<Box<dyn Future<Output = Result<Response<AnswerBody>, Infallible>> + Send + 'a>>;

/// Returns what is left of a client's connection.
async fn finish<C: Connection>(
    ended: End,
    mut socket: C,
    early: Bytes,
    switched: Option<Granted>,
    context: &FrontContext,
) -> Handshake<C> {
    let error = match (ended, switched) {
        (End::Hyper(Ok(())), Some(session)) => return Handshake::Opened { session, socket, early },
        (ended, switched) => {
            if let Some(opened) = switched {
                opened.break_off("client_failed", "the client's connection failed: it took no answer");
            }
            match ended {
                End::Hyper(ended) => ended.err(),
                End::TooSlow => {
                    socket.breaks_off(false);
                    return Handshake::Failed { cause: "slow_head", socket: Some(socket) };
                }
                End::Gone => return Handshake::Failed { cause: "reset", socket: None },
            }
        }
    };
    if error.as_ref().is_some_and(hyper::Error::is_user) {
        // An answer was cut short, and must not look complete.
        deliver(&mut Socket::new(socket, context.pool.clone())).await;
        return Handshake::Served(None);
    }
    turn_away_http_2(&mut socket, &early).await;
    socket.breaks_off(false);
    match error {
        Some(error) => Handshake::Failed { cause: no_head(&error), socket: Some(socket) },
        None => Handshake::Served(Some(socket)),
    }
}

/// How the serving of a client ended.
enum End {
    /// hyper's result.
    Hyper(hyper::Result<()>),
    /// The rest of a head did not come.
    TooSlow,
    /// The client is gone, or as good as gone: it took no more of its answer.
    Gone,
}

fn server() -> http1::Builder {
    let mut server = http1::Builder::new();
    server
        .preserve_header_case(true)
        .max_header_size(HEAD_BYTES)
        .max_buf_size(HEAD_BYTES)
        .auto_date_header(false)
        .half_close(true);
    server
}

#[cfg(test)]
mod tests;
