//! The pod's end: connections that are served, and calls that ask to become links.

use std::convert::Infallible;
use std::net::SocketAddr;
use std::time::Duration;

use futures_util::FutureExt as _;
use http::{Request, Response};
use hyper::body::Incoming;
use hyper_util::rt::{TokioIo, TokioTimer};
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::sync::{OwnedSemaphorePermit, mpsc, oneshot};
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;
use tonic::Status;

use super::body::CallBody;
use super::{FRAME, GRPC, Ground, METADATA, PATH, PING_TIMEOUT, SEND_BUFFER, Spawn, puller};
use crate::tunnel::hello::{Hello, HelloError};
use crate::tunnel::link::{Far, Link};
use crate::tunnel::outbox::Peer;

/// A call that asks to become a link. Dropping it refuses it.
#[derive(Debug)]
#[must_use = "dropping a call refuses it"]
pub struct Call {
    /// Where it comes from.
    pub from: SocketAddr,
    /// Who it says it is.
    pub hello: Hello,
    incoming: Incoming,
    answer: oneshot::Sender<Response<CallBody>>,
    connection: CancellationToken,
    accepted: CancellationToken,
    ground: Ground,
}

/// A connection that was not let in yet.
#[derive(Debug)]
pub struct Waiting {
    /// When it is closed if it still has no accepted call.
    pub until: Instant,
    /// Its place among those that wait; given back once it is let in.
    pub place: OwnedSemaphorePermit,
}

/// Why a caller is sent away; shown to it.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum Dismissal {
    /// It could not prove its name.
    #[error("invalid token")]
    Token,
    /// This pod takes no new links.
    #[error("this pod is stopping")]
    Stopping,
    /// Another process of that name is alive and linked.
    #[error("{0}")]
    NameTaken(String),
}

/// Serves one encrypted connection until it ends: its calls go to `calls`.
pub fn serve<IO>(
    io: IO,
    from: SocketAddr,
    calls: mpsc::Sender<Call>,
    ground: Ground,
    waiting: Waiting,
) -> impl Future<Output = ()> + Send
where
    IO: AsyncRead + AsyncWrite + Unpin + Send + 'static,
{
    let connection = CancellationToken::new();
    let accepted = CancellationToken::new();
    let service = {
        let (ground, connection, accepted) = (ground.clone(), connection.clone(), accepted.clone());
        hyper::service::service_fn(move |request: Request<Incoming>| {
            let (ground, connection, accepted) = (ground.clone(), connection.clone(), accepted.clone());
            let calls = calls.clone();
            // Boxed, because hyper keeps its room as long as the call lasts.
            let answered = Box::pin(answer(request, from, calls, ground, connection, accepted));
            answered.map(Ok::<_, Infallible>)
        })
    };
    let mut http = hyper::server::conn::http2::Builder::new(Spawn(ground.drain.clone()));
    http.timer(TokioTimer::new())
        .initial_stream_window_size(POD_WINDOW)
        .initial_connection_window_size(POD_WINDOW)
        .max_frame_size(FRAME)
        .max_send_buf_size(SEND_BUFFER)
        .max_concurrent_streams(CALLS)
        .max_header_list_size(METADATA)
        .keep_alive_interval(Some(PING_EDGE_AFTER))
        .keep_alive_timeout(PING_TIMEOUT);
    // Boxed, and outside of any async block: those hold what they are given twice, and this one is for as long as a
    // link lives.
    let mut serving = Box::pin(http.serve_connection(TokioIo::new(io), service));
    async move {
        let let_in = async {
            if tokio::time::timeout_at(waiting.until, accepted.cancelled()).await.is_ok() {
                drop(waiting.place);
                std::future::pending::<()>().await;
            }
        };
        let ended = tokio::select! {
            ended = serving.as_mut() => Some(ended),
            () = let_in => {
                ground.metrics.calls_refused.count("no_call_in_time");
                None
            }
            () = connection.cancelled() => {
                serving.as_mut().graceful_shutdown();
                tokio::time::timeout(GOODBYE, serving.as_mut()).await.ok()
            }
        };
        if let Some(Err(e)) = ended {
            tracing::debug!(%from, error = %e, "link connection ended");
        }
    }
}

impl Call {
    /// Lets the caller in.
    pub fn accept(self) -> Link {
        let Hello { node, instance, dialect, .. } = self.hello;
        let puller = puller(Peer::Edge(node), instance, dialect, &self.ground.table);
        let mut response = Response::new(CallBody::Pull { puller: puller.clone(), trailers: true });
        *response.headers_mut() = Hello::response(self.ground.table.instance());
        response.headers_mut().insert(http::header::CONTENT_TYPE, GRPC);
        self.accepted.cancel();
        // Fails only if the connection is gone; then the link's first read says so.
        let _ = self.answer.send(response);
        let far = Far { answers: true, incoming: self.incoming, connection: self.connection };
        Link::new(&puller, far, self.ground.metrics)
    }

    /// Sends the caller away, with its connection.
    pub fn refuse(self, why: Dismissal) {
        let _ = self.answer.send(Status::from(why).into_http());
        let connection = self.connection;
        // The refusal is on its way before the connection goes: shutting down gracefully lets it out.
        connection.cancel();
    }
}

impl From<Dismissal> for Status {
    fn from(why: Dismissal) -> Self {
        let text = why.to_string();
        match why {
            Dismissal::Token => Self::unauthenticated(text),
            Dismissal::Stopping => Self::unavailable(text),
            Dismissal::NameTaken(_) => Self::already_exists(text),
        }
    }
}

async fn answer(
    request: Request<Incoming>,
    from: SocketAddr,
    calls: mpsc::Sender<Call>,
    ground: Ground,
    connection: CancellationToken,
    accepted: CancellationToken,
) -> Response<CallBody> {
    let refuse = |status: Status, cause| {
        ground.metrics.calls_refused.count(cause);
        connection.cancel();
        status.into_http()
    };
    if request.uri().path() != PATH {
        return refuse(Status::unimplemented("this port serves only tunnel links"), "unknown_method");
    }
    let (parts, incoming) = request.into_parts();
    let hello = match Hello::from_request(&parts.headers) {
        Ok(hello) => hello,
        Err(HelloError::BadRole(role)) => {
            return refuse(Status::unauthenticated(HelloError::BadRole(role).to_string()), "bad_role");
        }
        Err(e) => return refuse(Status::unknown(e.to_string()), "bad_metadata"),
    };
    let (answer, answered) = oneshot::channel();
    let call = Call {
        from,
        hello,
        incoming,
        answer,
        connection: connection.clone(),
        accepted,
        ground: ground.clone(),
    };
    if calls.try_send(call).is_err() {
        return refuse(Status::unavailable("stopping, or too many calls at once"), "busy");
    }
    match answered.await {
        Ok(response) => response,
        Err(_) => refuse(Status::unavailable("stopping"), "stopping"),
    }
}

/// Twice the bandwidth-delay product of 1 Gbit/s at 100 ms is 25 MB: then HTTP/2's own windows never hold a link.
const POD_WINDOW: u32 = 32 << 20;
/// Calls of one connection: one is used, the rest are for a peer that tries again on it.
const CALLS: u32 = 4;
/// Before a Go edge's own 10 s, so that it stays quiet.
const PING_EDGE_AFTER: Duration = Duration::from_secs(9);
/// For the last frames of a connection that is over.
const GOODBYE: Duration = Duration::from_secs(2);
