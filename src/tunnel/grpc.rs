//! Both ends of the one gRPC call, on hyper's HTTP/2: accept links, dial links.
//!
//! tonic's own transport hides HTTP/2's send buffer and joins messages, and its codec copies each of them twice; so the
//! call is made and served here, with tonic's statuses and the generated messages. See `decisions.md`, "Pull, not push".

use std::convert::Infallible;
use std::net::SocketAddr;
use std::pin::Pin;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::sync::{Arc, Mutex};
use std::task::{Context, Poll, ready};
use std::time::Duration;

use http::{HeaderMap, HeaderValue, Request, Response, Uri};
use http_body::Frame;
use hyper::body::Incoming;
use hyper_util::rt::{TokioIo, TokioTimer};
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::sync::{OwnedSemaphorePermit, mpsc, oneshot};
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;
use tonic::{Code, Status};
use tracing::Span;

use super::codec::{Chunk, encode};
use super::hello::{Dialect, Hello, HelloError};
use super::link::{Link, Peer, Puller, Voice};
use super::outbox::Outbox;
use super::plain::{Plain, heartbeat};
use super::session::end::LinkId;
use super::table::Table;
use crate::drain::Drain;
use crate::names::NodeName;
use crate::telemetry::Metrics;

/// What every link of this process shares.
#[derive(Debug, Clone)]
pub struct Ground {
    /// The sessions.
    pub table: Arc<Table>,
    /// The numbers.
    pub metrics: Metrics,
    /// Where connection tasks are spawned.
    pub drain: Drain,
}

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

/// Why a cloud could not be made a link to.
#[derive(Debug, thiserror::Error)]
pub enum DialError {
    /// HTTP/2 could not be agreed, or the connection broke.
    #[error("the connection broke before the cloud answered: {0}")]
    Broken(String),
    /// The cloud does not want us. The usual causes are a wrong token or node name.
    #[error("the cloud refused: {message} ({code:?})")]
    Refused {
        /// gRPC's code.
        code: Code,
        /// The cloud's words.
        message: String,
    },
    /// No answer within 10 s.
    #[error("the cloud did not answer the call within {ANSWER:?}")]
    Timeout,
}

/// Serves one encrypted connection until it ends: its calls go to `calls`.
pub async fn serve<IO>(io: IO, from: SocketAddr, calls: mpsc::Sender<Call>, ground: Ground, waiting: Waiting)
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
            async move { Ok::<_, Infallible>(answer(request, from, calls, ground, connection, accepted).await) }
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
    let mut serving = std::pin::pin!(http.serve_connection(TokioIo::new(io), service));
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

/// Makes an encrypted connection a link: the edge's side of the call.
pub async fn dial<IO>(
    io: IO,
    authority: &str,
    node: &NodeName,
    token: &str,
    ground: &Ground,
) -> Result<Link, DialError>
where
    IO: AsyncRead + AsyncWrite + Unpin + Send + 'static,
{
    let broken = |e: hyper::Error| DialError::Broken(super::link::cause(&e));
    let (mut sender, driver) = hyper::client::conn::http2::Builder::new(Spawn(ground.drain.clone()))
        .timer(TokioTimer::new())
        .initial_stream_window_size(EDGE_WINDOW)
        .initial_connection_window_size(EDGE_WINDOW)
        .max_frame_size(FRAME)
        .max_send_buf_size(SEND_BUFFER)
        .max_header_list_size(METADATA)
        .keep_alive_interval(Some(PING_POD_AFTER))
        .keep_alive_timeout(PING_TIMEOUT)
        .handshake::<_, CallBody>(TokioIo::new(io))
        .await
        .map_err(broken)?;
    let connection = CancellationToken::new();
    let over = connection.clone();
    ground.drain.spawn(Span::current(), async move {
        tokio::select! {
            ended = driver => if let Err(e) = ended { tracing::debug!(error = %e, "link connection ended") },
            () = over.cancelled() => {}
        }
    });
    let guard = connection.clone().drop_guard();
    let (agree, agreed) = oneshot::channel();
    let body = CallBody::Greeting { first: Some(encode(heartbeat(node))), agreed };
    let request = request(authority, Hello::edge_request(node, token, ground.table.instance()), body)?;
    let response = tokio::time::timeout(ANSWER, sender.send_request(request))
        .await
        .map_err(|_| DialError::Timeout)?
        .map_err(broken)?;
    let (parts, incoming) = response.into_parts();
    if let Some(status) = Status::from_header_map(&parts.headers) {
        return Err(DialError::Refused { code: status.code(), message: status.message().to_owned() });
    }
    if parts.status != http::StatusCode::OK {
        let message = format!("HTTP status {}; is this the port of a tunnel cloud?", parts.status);
        return Err(DialError::Refused { code: Code::Unknown, message });
    }
    let (dialect, instance) = Hello::from_response(&parts.headers);
    let puller = puller(node.clone(), dialect, &ground.table);
    // Fails only if the body is gone with its connection; then the link's first read says so.
    let _ = agree.send(puller.clone());
    let connection = guard.disarm();
    let peer = Peer { instance, answers: false, incoming, connection };
    Ok(Link::new(&puller, peer, ground.metrics.clone()))
}

impl Call {
    /// Lets the caller in.
    pub fn accept(self) -> Link {
        let puller = puller(self.hello.node.clone(), self.hello.dialect, &self.ground.table);
        let mut response = Response::new(CallBody::Pull { puller: puller.clone(), trailers: true });
        *response.headers_mut() = Hello::response(self.ground.table.instance());
        response.headers_mut().insert(http::header::CONTENT_TYPE, GRPC);
        self.accepted.cancel();
        // Fails only if the connection is gone; then the link's first read says so.
        let _ = self.answer.send(response);
        let peer = Peer {
            instance: self.hello.instance,
            answers: true,
            incoming: self.incoming,
            connection: self.connection,
        };
        Link::new(&puller, peer, self.ground.metrics)
    }

    /// Sends the caller away, with its connection.
    pub fn refuse(self, status: Status) {
        let _ = self.answer.send(status.into_http());
        let connection = self.connection;
        // The refusal is on its way before the connection goes: shutting down gracefully lets it out.
        connection.cancel();
    }
}

/// What one end of the call sends.
#[derive(Debug, Default)]
pub enum CallBody {
    /// Nothing: the call was refused.
    #[default]
    Refused,
    /// A heartbeat, until the pod has answered and the dialect is known.
    Greeting {
        /// The heartbeat, until it is sent.
        first: Option<Chunk>,
        /// What to go on with.
        agreed: oneshot::Receiver<Puller>,
    },
    /// Whatever the link has to say.
    Pull {
        /// The link's pull side.
        puller: Puller,
        /// Whether a status follows once the link is closed: a pod's does, an edge's does not.
        trailers: bool,
    },
}

impl http_body::Body for CallBody {
    type Data = Chunk;
    type Error = Infallible;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Chunk>, Infallible>>> {
        loop {
            match &mut *self {
                Self::Refused => return Poll::Ready(None),
                Self::Greeting { first, agreed } => {
                    if let Some(first) = first.take() {
                        return Poll::Ready(Some(Ok(Frame::data(first))));
                    }
                    *self = match ready!(Pin::new(agreed).poll(cx)) {
                        Ok(puller) => Self::Pull { puller, trailers: false },
                        Err(_) => Self::Refused,
                    };
                }
                Self::Pull { puller, trailers } => {
                    if let Some(chunk) = ready!(puller.poll_message(cx)) {
                        return Poll::Ready(Some(Ok(Frame::data(chunk))));
                    }
                    let trailers = *trailers;
                    *self = Self::Refused;
                    if trailers {
                        let status = HeaderMap::from_iter([(GRPC_STATUS, HeaderValue::from_static("0"))]);
                        return Poll::Ready(Some(Ok(Frame::trailers(status))));
                    }
                }
            }
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

fn puller(node: NodeName, dialect: Dialect, table: &Arc<Table>) -> Puller {
    let id = LinkId(NEXT_LINK.fetch_add(1, Relaxed));
    let outbox = Outbox::new(id, node.clone(), dialect != Dialect::Plain);
    let dialect = match dialect {
        Dialect::Plain => Voice::Plain(Arc::new(Mutex::new(Plain::new(node)))),
        Dialect::Extended(_) => Voice::Extended,
    };
    Puller { outbox, table: table.clone(), dialect }
}

fn request(authority: &str, headers: HeaderMap, body: CallBody) -> Result<Request<CallBody>, DialError> {
    let uri = Uri::builder().scheme("https").authority(authority).path_and_query(PATH).build();
    let uri = uri.map_err(|e| DialError::Broken(format!("{authority} cannot be an authority: {e}")))?;
    let mut request = Request::new(body);
    *request.method_mut() = http::Method::POST;
    *request.uri_mut() = uri;
    *request.version_mut() = http::Version::HTTP_2;
    *request.headers_mut() = headers;
    request.headers_mut().insert(http::header::CONTENT_TYPE, GRPC);
    request.headers_mut().insert(http::header::TE, HeaderValue::from_static("trailers"));
    Ok(request)
}

/// hyper's tasks, spawned where they are waited for.
#[derive(Debug, Clone)]
struct Spawn(Drain);

impl<F> hyper::rt::Executor<F> for Spawn
where
    F: Future + Send + 'static,
    F::Output: Send,
{
    fn execute(&self, task: F) {
        self.0.spawn(Span::current(), async move {
            task.await;
        });
    }
}

/// Links are numbered through the life of the process.
static NEXT_LINK: AtomicU64 = AtomicU64::new(1);

const PATH: &str = "/proto.Stream/TunnelStreaming";
const GRPC: HeaderValue = HeaderValue::from_static("application/grpc");
const GRPC_STATUS: http::HeaderName = http::HeaderName::from_static("grpc-status");
/// Twice the bandwidth-delay product of 1 Gbit/s at 100 ms is 25 MB: then HTTP/2's own windows never hold a link.
const POD_WINDOW: u32 = 32 << 20;
/// What an edge takes; its memory is scarcer.
const EDGE_WINDOW: u32 = 8 << 20;
/// A frame of ours, data and header, fits one of HTTP/2's.
const FRAME: u32 = 64 * 1024;
/// What waits below the pull is latency that no turn can mend; this much keeps the socket busy.
const SEND_BUFFER: usize = 64 * 1024;
/// Calls of one connection: one is used, the rest are for a peer that tries again on it.
const CALLS: u32 = 4;
/// Metadata of a call, in bytes.
const METADATA: u32 = 16 * 1024;
/// Before a Go edge's own 10 s, so that it stays quiet.
const PING_EDGE_AFTER: Duration = Duration::from_secs(9);
/// A Go pod counts pings that come oftener than every 15 s as an attack.
const PING_POD_AFTER: Duration = Duration::from_secs(20);
/// Long enough for a bad line, short enough to notice a dead one.
const PING_TIMEOUT: Duration = Duration::from_secs(15);
/// How long a pod may take to answer the call.
const ANSWER: Duration = Duration::from_secs(10);
/// For the last frames of a connection that is over.
const GOODBYE: Duration = Duration::from_secs(2);
