//! HTTP/1.1 on a client's connection: authorizes each request and forwards it over a session to its destination.
//!
//! A session belongs to one client connection, so that access logs, rules and identities remain exact. It is reused for
//! following requests with the same route. Bodies are streamed; after an upgrade both streams carry raw bytes.

pub(crate) mod client_connection;
pub(crate) mod headers;
pub mod idle_timer;
pub mod long_url;
pub mod message;
pub(crate) mod requests;
pub(crate) mod session_connection;
pub mod upstream;

use std::convert::Infallible;
use std::future::poll_fn;
use std::pin::{Pin, pin};
use std::sync::Arc;
use std::task::Poll;

use bytes::Bytes;
use futures_util::future::BoxFuture;
use http::{Response, StatusCode, Version};
use hyper::server::conn::http1;
use hyper::service::service_fn;
use hyper_util::rt::TokioIo;
use tokio::io::AsyncWriteExt as _;
use tokio::time::{Instant, sleep_until, timeout, timeout_at};
use tokio_rustls::rustls::ClientConfig;
use tokio_util::sync::CancellationToken;

use crate::listener::admission::heads::{
    HEAD_BYTES, HEAD_FIELDS, LONG_HEAD_BYTES, LONG_HEAD_FIELDS, http_server,
};
use crate::listener::admission::{Admission, AdmissionOutcome, ListenerContext, NO_PENDING};
use crate::listener::client_handler::HEAD_TIME;
use crate::listener::denial::{Denial, bad_head, header_failure, reject_http2, written};
use crate::listener::forward::client_connection::ClientIo;
use crate::listener::forward::idle_timer::{ClientDeadline, IdleTimer};
use crate::listener::forward::long_url::shorten;
use crate::listener::forward::message::ResponseBody;
use crate::listener::forward::requests::RequestForwarder;
use crate::listener::requests::{ParseRequest, RequestRouter};
use crate::session_io::copy::close::wait_acknowledged;
use tunnel_base::drain::Drain;
use tunnel_net::limiter::{Permit, Source};
use tunnel_net::reload::ReloadedValue;
use tunnel_net::socket::{Connection, Socket};
use tunnel_proto::frame::{ErrorCode, SessionError};

/// Serves a client's requests until the client disconnects or is idle for too long, draining starts, or client and
/// target switch to another protocol.
///
/// After a switch, the session is returned. `tls` and `parse` are as in [`RequestRouter::new`]. Not cancel safe:
/// dropping the future aborts the request in flight.
pub(crate) async fn forward<C: Connection>(
    socket: C,
    admission: &mut Admission,
    tls: Option<ReloadedValue<ClientConfig>>,
    parse: &ParseRequest<'_>,
) -> AdmissionOutcome<C> {
    socket.set_reset_on_drop(true);
    let context = Arc::clone(admission.context());
    let source = Source::of(admission.from().ip());
    let clock = Arc::new(IdleTimer::new());
    let evicted = admission.permit().map(Permit::revoked).unwrap_or_default();
    let router = RequestRouter::new(admission, tls, parse);
    let exchange = RequestForwarder::new(router, Arc::clone(&clock), &context, source);
    let io = ClientIo::new(socket, Arc::clone(&clock));
    let mut served = serve(io, server(), &exchange, &context.drain, &evicted).await;
    if served.rejected == Some(StatusCode::REQUEST_HEADER_FIELDS_TOO_LARGE) {
        // Most heads are short, so the connection of a long one is parsed again, with more memory, and not reused.
        match context.pending.long_heads.try_acquire(&source) {
            Ok(_permit) => {
                let ReleasedConnection { mut socket, buffered, .. } = served;
                let until = clock.deadline(false).map_or_else(Instant::now, ClientDeadline::at);
                let Ok(Ok((ahead, url_end))) = timeout_at(until, shorten(&mut socket, buffered)).await else {
                    return AdmissionOutcome::Failed { reason: "header_timeout", socket: Some(socket) };
                };
                *exchange.url_end.lock() = url_end;
                let io = ClientIo { ahead, ..ClientIo::new(socket, clock) };
                served = serve(io, long_server(), &exchange, &context.drain, &evicted).await;
                let limits = (LONG_HEAD_BYTES, LONG_HEAD_FIELDS);
                return finish(served, exchange, limits, &context).await;
            }
            Err(_) => return refuse(served, exchange, Denial::Busy(TOO_MANY_LONG_HEADS)).await,
        }
    }
    finish(served, exchange, (HEAD_BYTES, HEAD_FIELDS), &context).await
}

/// A client's connection that is no longer served, with the unread bytes.
struct ReleasedConnection<C> {
    ended: ConnectionEnd,
    socket: C,
    buffered: Bytes,
    /// The status of hyper's own response to the last head, which was withheld.
    rejected: Option<StatusCode>,
}

/// Serves requests with one configuration of hyper's server. `evicted` is cancelled when another connection takes this
/// one's place.
async fn serve<C: Connection>(
    io: ClientIo<C>,
    server: http1::Builder,
    exchange: &RequestForwarder<'_>,
    drain: &Drain,
    evicted: &CancellationToken,
) -> ReleasedConnection<C> {
    let clock = Arc::clone(&io.clock);
    let answer = |request| -> BoxFuture<'_, Result<Response<ResponseBody>, Infallible>> {
        Box::pin(exchange.answer(request))
    };
    let mut connection = server.serve_connection(TokioIo::new(io), service_fn(answer));
    let mut draining = pin!(drain.draining());
    let mut silence = pin!(sleep_until(Instant::now()));
    let mut leaving = false;
    let ended = poll_fn(|cx| {
        // A request that has begun to arrive is the last one.
        if !leaving && draining.as_mut().poll(cx).is_ready() && !clock.is_in_head() {
            leaving = true;
            Pin::new(&mut connection).graceful_shutdown();
        }
        let served = connection.poll_without_shutdown(cx);
        if exchange.poll(cx).is_ready() {
            return Poll::Ready(ConnectionEnd::Gone);
        }
        if let Poll::Ready(ended) = served {
            return Poll::Ready(ConnectionEnd::Hyper(ended));
        }
        if clock.is_lost() {
            return Poll::Ready(ConnectionEnd::Gone);
        }
        let Some(deadline) = clock.deadline(leaving) else { return Poll::Pending };
        if evicted.is_cancelled() && matches!(deadline, ClientDeadline::Head(_) | ClientDeadline::Request(_))
        {
            return Poll::Ready(ConnectionEnd::Evicted);
        }
        if silence.deadline() != deadline.at() {
            silence.as_mut().reset(deadline.at());
        }
        match (silence.as_mut().poll(cx), deadline) {
            (Poll::Ready(()), ClientDeadline::Head(_)) => return Poll::Ready(ConnectionEnd::TooSlow),
            (Poll::Ready(()), ClientDeadline::Answer(_) | ClientDeadline::Body(_)) => {
                return Poll::Ready(ConnectionEnd::Gone);
            }
            (Poll::Ready(()), ClientDeadline::Request(_)) => {
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
    let io = parts.io.into_inner();
    let rejected = io.rejected;
    let (socket, buffered) = io.into_parts(parts.read_buf);
    ReleasedConnection { ended, socket, buffered, rejected }
}

/// Returns the outcome of serving a client, with its connection if that is still open. `limits` are those of a head:
/// bytes, and fields.
async fn finish<C: Connection>(
    served: ReleasedConnection<C>,
    exchange: RequestForwarder<'_>,
    limits: (usize, usize),
    context: &ListenerContext,
) -> AdmissionOutcome<C> {
    if let Some(status) = served.rejected {
        return refuse(served, exchange, bad_head(status, limits.0, limits.1)).await;
    }
    if matches!(served.ended, ConnectionEnd::Evicted) && !served.buffered.is_empty() {
        return refuse(served, exchange, Denial::Busy(NO_PENDING)).await;
    }
    let ReleasedConnection { ended, mut socket, buffered, .. } = served;
    let error = match (ended, exchange.end()) {
        (ConnectionEnd::Hyper(Ok(())), Some(session)) => {
            return AdmissionOutcome::Opened { session, socket, buffered };
        }
        (ended, switched) => {
            if let Some(opened) = switched {
                let why = "the client's connection failed: it did not read the response";
                opened.break_off("client_io_error", SessionError::new(ErrorCode::ConnectionFailed, why));
            }
            match ended {
                ConnectionEnd::Hyper(ended) => ended.err(),
                ConnectionEnd::TooSlow => {
                    socket.set_reset_on_drop(false);
                    return AdmissionOutcome::Failed { reason: "header_timeout", socket: Some(socket) };
                }
                ConnectionEnd::Evicted => {
                    socket.set_reset_on_drop(false);
                    return AdmissionOutcome::Closed(Some(socket));
                }
                ConnectionEnd::Gone => return AdmissionOutcome::Failed { reason: "reset", socket: None },
            }
        }
    };
    if error.as_ref().is_some_and(hyper::Error::is_user) {
        // A truncated response must not look complete.
        wait_acknowledged(&mut Socket::new(socket, context.pool.clone())).await;
        return AdmissionOutcome::Closed(None);
    }
    reject_http2(&mut socket, &buffered).await;
    socket.set_reset_on_drop(false);
    match error {
        Some(error) => AdmissionOutcome::Failed { reason: header_failure(&error), socket: Some(socket) },
        None => AdmissionOutcome::Closed(Some(socket)),
    }
}

/// Responds to a head that cannot be parsed.
async fn refuse<C: Connection>(
    served: ReleasedConnection<C>,
    exchange: RequestForwarder<'_>,
    denial: Denial,
) -> AdmissionOutcome<C> {
    let ReleasedConnection { ended, mut socket, .. } = served;
    let reason = match &ended {
        ConnectionEnd::Hyper(Err(error)) => header_failure(error),
        _ => "reset",
    };
    let denied = exchange.router.lock().await.deny(denial).await;
    exchange.end();
    let answer = written(Version::HTTP_11, &denied.answer());
    socket.set_reset_on_drop(false);
    let sent = async { socket.write_all(&answer).await.is_ok() && socket.flush().await.is_ok() };
    let socket = if timeout(HEAD_TIME, sent).await == Ok(true) { Some(socket) } else { None };
    if matches!(ended, ConnectionEnd::Evicted) {
        return AdmissionOutcome::Closed(socket);
    }
    AdmissionOutcome::Failed { reason, socket }
}

/// The reason why serving a client ended.
enum ConnectionEnd {
    /// hyper returned this result.
    Hyper(hyper::Result<()>),
    /// The rest of a head was not received in time.
    TooSlow,
    /// Another connection has this one's place, between two requests or within a head.
    Evicted,
    /// The client disconnected, stopped sending its request or reading its response, or may no longer be served.
    Gone,
}

fn server() -> http1::Builder {
    let mut server = http_server();
    server.preserve_header_case(true);
    server
}

/// Returns the configuration for one request with a long head.
fn long_server() -> http1::Builder {
    let mut server = server();
    server
        .max_headers(LONG_HEAD_FIELDS)
        .max_header_size(LONG_HEAD_BYTES)
        .max_buf_size(LONG_HEAD_BYTES)
        .keep_alive(false);
    server
}

const TOO_MANY_LONG_HEADS: &str = "too many requests and responses with long heads at once";

#[cfg(test)]
mod tests;
