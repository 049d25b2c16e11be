//! HTTP/1.1 on a client's connection: authorizes each request and forwards it over a session to its destination.
//!
//! A session belongs to one client connection, so that access logs, rules and identities remain exact. It is reused for
//! following requests with the same route. Bodies are streamed; after an upgrade both streams carry raw bytes.

pub(crate) mod client_connection;
pub(crate) mod headers;
pub mod idle_timer;
pub mod message;
pub(crate) mod meter;
pub(crate) mod requests;
pub mod upstream;

use std::convert::Infallible;
use std::future::poll_fn;
use std::pin::{Pin, pin};
use std::sync::Arc;
use std::task::{Poll, ready};

use bytes::Bytes;
use futures_util::future::BoxFuture;
use http::{Response, Version};
use hyper::service::service_fn;
use hyper_util::rt::TokioIo;
use tokio::io::AsyncWriteExt as _;
use tokio::time::{Instant, sleep_until, timeout};
use tokio_rustls::rustls::ClientConfig;

use crate::admission::client_handler::HEAD_TIME;
use crate::admission::denial::{Denial, bad_head, header_failure, reject_http2, written};
use crate::admission::forward::client_connection::ClientIo;
use crate::admission::forward::idle_timer::{ClientAction, IdleTimer};
use crate::admission::forward::message::ResponseBody;
use crate::admission::forward::requests::RequestForwarder;
use crate::admission::forward::upstream::UpstreamSession;
use crate::admission::heads::{LONG_HEAD_BYTES, LONG_HEAD_FIELDS, http_server};
use crate::admission::requests::{ParseRequest, RequestRouter};
use crate::admission::{Admission, AdmissionOutcome, ListenerContext, NO_PENDING};
use crate::session_io::copy::close::wait_acknowledged;
use tunnel_net::limiter::Source;
use tunnel_net::reload::ReloadedValue;
use tunnel_net::socket::{AnyConnection, CHUNK, Connection as _, Socket};
use tunnel_proto::frame::{ErrorCode, SessionError};

/// Serves a client's requests until the client disconnects or is idle for too long, draining starts, or client and
/// target switch to another protocol.
///
/// After a switch, the session is returned. `tls` and `parse` are as in [`RequestRouter`]. Not cancel safe:
/// dropping the future aborts the request in flight.
pub(crate) async fn forward(
    socket: AnyConnection,
    admission: &mut Admission,
    tls: Option<ReloadedValue<ClientConfig>>,
    parse: &ParseRequest<'_>,
) -> AdmissionOutcome {
    // hyper keeps the client's connection, and each request goes through the forwarder.
    socket.set_reset_on_drop(true);
    let context = Arc::clone(&admission.context);
    let source = Source::of(admission.client.from.ip());
    let permit = admission.permit().cloned();
    // Cancelled when another connection takes this one's place.
    let evicted = permit.as_ref().map(|permit| permit.revoked()).unwrap_or_default();
    let clock = Arc::new(IdleTimer::new(permit, &context.pending.long_heads, source));
    let router = RequestRouter { parse, admission, tls, sees_details: false, trace: String::new() };
    let exchange = RequestForwarder {
        router: router.into(),
        upstream: UpstreamSession::new(Arc::clone(&context), Arc::clone(&clock)),
        switched: None.into(),
        clock: Arc::clone(&clock),
    };
    let answer = |request| -> BoxFuture<'_, Result<Response<ResponseBody>, Infallible>> {
        Box::pin(exchange.answer(request))
    };
    let io = TokioIo::new(ClientIo::new(socket, Arc::clone(&clock)));
    let mut connection = http_server(LONG_HEAD_BYTES, LONG_HEAD_FIELDS)
        .preserve_header_case(true)
        .serve_connection(io, service_fn(answer));
    // Drive both ends in turns, and watch what ends them.
    let mut draining = pin!(context.drain.draining());
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
        let Some((deadline, action)) = clock.deadline(leaving) else { return Poll::Pending };
        if evicted.is_cancelled() && action != ClientAction::Transfer {
            return Poll::Ready(ConnectionEnd::Evicted);
        }
        if silence.deadline() != deadline {
            silence.as_mut().reset(deadline);
        }
        ready!(silence.as_mut().poll(cx));
        match action {
            ClientAction::Head => Poll::Ready(ConnectionEnd::TooSlow),
            ClientAction::Transfer => Poll::Ready(ConnectionEnd::Gone),
            ClientAction::Request => {
                leaving = true;
                Pin::new(&mut connection).graceful_shutdown();
                cx.waker().wake_by_ref();
                Poll::Pending
            }
        }
    })
    .await;
    // A head that was not read to its end, or cannot be parsed, still gets a response.
    let parts = connection.into_parts();
    let io = parts.io.into_inner();
    let rejected = io.rejected;
    let (socket, buffered) = io.into_parts(parts.read_buf);
    let denial = match (clock.client.refusal(), rejected) {
        (Some(refusal), _) => Some(refusal),
        (None, Some(status)) => Some(bad_head(status, &buffered, LONG_HEAD_BYTES, LONG_HEAD_FIELDS, INVALID)),
        (None, None) => {
            let is_evicted = matches!(ended, ConnectionEnd::Evicted) && !buffered.is_empty();
            is_evicted.then_some(Denial::Busy(NO_PENDING))
        }
    };
    match denial {
        Some(denial) => refuse(ended, socket, exchange, denial).await,
        None => finish(ended, socket, buffered, exchange, &context).await,
    }
}

/// Returns the outcome of serving a client, with its connection if that is still open.
async fn finish(
    ended: ConnectionEnd,
    mut socket: AnyConnection,
    buffered: Bytes,
    exchange: RequestForwarder<'_>,
    context: &ListenerContext,
) -> AdmissionOutcome {
    match exchange.end() {
        Some(session) if matches!(ended, ConnectionEnd::Hyper(Ok(()))) => {
            return AdmissionOutcome::Opened { session, socket, buffered };
        }
        Some(switched) => {
            let why = "the client's connection failed: it did not read the response";
            switched.break_off("client_io_error", SessionError::new(ErrorCode::ConnectionFailed, why));
        }
        None => {}
    }
    let error = match ended {
        ConnectionEnd::Hyper(ended) => ended.err(),
        ConnectionEnd::Evicted => None,
        ConnectionEnd::TooSlow => {
            socket.set_reset_on_drop(false);
            return AdmissionOutcome::Failed { reason: "header_timeout", socket: Some(socket) };
        }
        ConnectionEnd::Gone => return AdmissionOutcome::Failed { reason: "reset", socket: None },
    };
    if error.as_ref().is_some_and(hyper::Error::is_user) {
        // A truncated response must not look complete.
        wait_acknowledged(&mut Socket::new(socket, context.pool.clone())).await;
        return AdmissionOutcome::Closed(None);
    }
    reject_http2(&mut *socket, &buffered).await;
    socket.set_reset_on_drop(false);
    match error {
        Some(error) => AdmissionOutcome::Failed { reason: header_failure(&error), socket: Some(socket) },
        None => AdmissionOutcome::Closed(Some(socket)),
    }
}

/// Responds to a head that cannot be parsed.
async fn refuse(
    ended: ConnectionEnd,
    mut socket: AnyConnection,
    exchange: RequestForwarder<'_>,
    denial: Denial,
) -> AdmissionOutcome {
    let reason = match &ended {
        ConnectionEnd::Hyper(Err(_)) if matches!(denial, Denial::Request(_)) => "header_invalid",
        ConnectionEnd::Hyper(Err(_)) => "header_too_large",
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

/// Said of a head that is no HTTP.
const INVALID: &str = "no valid HTTP request; this port speaks only HTTP/1.1";

/// Maximum number of bytes that hyper reads at once: a part of a chunk, and less than a power of two. hyper doubles its
/// buffer once a read fills it, and each piece of a body keeps the buffer that it was read into.
const PIECE_BYTES: usize = CHUNK / 2;

#[cfg(test)]
mod tests;
