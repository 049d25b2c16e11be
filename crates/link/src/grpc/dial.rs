//! The caller's end, an edge's or a pod's: an encrypted connection becomes a link.

use std::time::Duration;

use http::{HeaderMap, HeaderValue, Request, Uri};
use hyper::body::Incoming;
use hyper_util::rt::TokioIo;
use tokio::sync::oneshot;
use tokio_util::sync::{CancellationToken, DropGuard};
use tonic::{Code, Status};
use tracing::Span;

use crate::grpc::read_ahead::{Bounded, ReadAhead, cause};
use crate::grpc::{
    CallBody, ConnectionExecutor, FRAME, GRPC, LinkContext, METADATA, PATH, PING_TIMEOUT, PingTimer,
    SEND_BUFFER, WINDOW, ends, puller,
};
use crate::link::{Link, OutboundStream, RemoteInfo};
use crate::sender::signals::LinkEndpoints;
use tunnel_base::logging::printable;
use tunnel_base::names::{Instance, NodeName};
use tunnel_net::socket::Connection;
use tunnel_net::tcp_info::TcpInfoReader;
use tunnel_proto::codec::encode;
use tunnel_proto::frame::Remote;
use tunnel_proto::hello::{Caller, Dialect, Hello, user_agent};
use tunnel_proto::superedge::heartbeat;

/// Why a cloud could not be made a link to.
#[derive(Debug, thiserror::Error)]
pub enum LinkDialError {
    /// HTTP/2 could not be agreed, or the connection broke.
    #[error("the connection broke before the cloud answered: {0}")]
    Broken(String),
    /// The cloud does not want us. The usual causes are a wrong token or node name.
    #[error("the cloud refused: {message} ({code:?}){}", remedy(*code))]
    Refused {
        /// gRPC's code.
        code: Code,
        /// The cloud's text.
        message: String,
    },
    /// The pod at the other end is this process.
    #[error("this pod has dialled itself")]
    Itself,
    /// A pod without the extended dialect cannot be a sibling.
    #[error(
        "there is a pod, or another server, that does not speak our dialect, such as SuperEdge's: it cannot be reached \
         through this one ({0})"
    )]
    Plain(String),
    /// No answer within 10 s.
    #[error("the cloud did not answer the call within {ANSWER_TIMEOUT:?}")]
    Timeout,
}

impl LinkDialError {
    /// Whether our token is not the one that the cloud knows.
    pub fn is_token_refused(&self) -> bool {
        matches!(self, Self::Refused { code: Code::Unauthenticated, .. })
    }

    /// Whether another process of our name is alive and linked, so that dialling soon again is of no use.
    pub fn is_name_taken(&self) -> bool {
        matches!(self, Self::Refused { code: Code::AlreadyExists, .. })
    }
}

/// Makes an encrypted connection a link: the edge's side of the call, with the metadata that [`Hello`] makes.
pub async fn dial<IO>(
    io: IO,
    authority: &str,
    node: &NodeName,
    said: HeaderMap,
    link_context: &LinkContext,
) -> Result<Link, LinkDialError>
where
    IO: Connection + 'static,
{
    let answered = call(io, authority, said, node, link_context).await?;
    answered.refusal()?;
    Ok(answered.link(Remote::Server(node.clone()), link_context))
}

/// Makes an encrypted connection to another pod a link, `beside` an older one. The connection has shown our certificate.
pub async fn dial_peer<IO>(
    io: IO,
    authority: &str,
    beside: bool,
    link_context: &LinkContext,
) -> Result<Link, LinkDialError>
where
    IO: Connection + 'static,
{
    let own = link_context.table.instance();
    let said = if beside { Caller::peer_backup_request(own) } else { Caller::peer_request(own) };
    let answered = call(io, authority, said, &NodeName::none(), link_context).await?;
    match (answered.instance, answered.refusal()) {
        (Some(instance), _) if instance == own => Err(LinkDialError::Itself),
        (Some(_), refusal) => refusal.map(|()| answered.link(Remote::Peer, link_context)),
        (None, Err(refusal)) => Err(LinkDialError::Plain(refusal.to_string())),
        (None, Ok(())) => Err(LinkDialError::Plain("it answered without naming its process".into())),
    }
}

/// What came back on a call.
struct CallResponse {
    headers: http::response::Parts,
    incoming: Incoming,
    ahead: ReadAhead,
    tcp_info: Option<TcpInfoReader>,
    ends: LinkEndpoints,
    dialect: Dialect,
    instance: Option<Instance>,
    agree: oneshot::Sender<OutboundStream>,
    alarm: PingTimer,
    connection: DropGuard,
}

impl CallResponse {
    fn refusal(&self) -> Result<(), LinkDialError> {
        if let Some(status) = Status::from_header_map(&self.headers.headers) {
            return Err(LinkDialError::Refused { code: status.code(), message: printable(status.message()) });
        }
        if !self.headers.status.is_success() {
            let message = format!("HTTP status {}; is this the port of a tunnel cloud?", self.headers.status);
            return Err(LinkDialError::Refused { code: Code::Unknown, message });
        }
        Ok(())
    }

    fn link(self, peer: Remote, link_context: &LinkContext) -> Link {
        let puller = puller(peer, self.instance, self.dialect, &link_context.table, &self.alarm);
        puller.sender.reads_tcp_info(self.tcp_info);
        puller.sender.set_endpoints(self.ends);
        // Fails only if the body is gone with its connection; then the link's first read fails too.
        let _ = self.agree.send(puller.clone());
        let connection = self.connection.disarm();
        let far = RemoteInfo { answers: false, incoming: self.incoming, ahead: self.ahead, connection };
        Link::new(&puller, far, link_context.metrics.clone())
    }
}

/// Calls, with a heartbeat that a plain pod echoes as its answer.
async fn call<IO>(
    io: IO,
    authority: &str,
    said: HeaderMap,
    node: &NodeName,
    link_context: &LinkContext,
) -> Result<CallResponse, LinkDialError>
where
    IO: Connection + 'static,
{
    let (ahead, tcp_info) = (ReadAhead::default(), io.tcp().and_then(TcpInfoReader::of));
    let ends = ends(&io);
    let broken = |e: hyper::Error| LinkDialError::Broken(cause(&e));
    let (crew, alarm) = (ConnectionExecutor::default(), PingTimer::new());
    let (mut sender, driver) = hyper::client::conn::http2::Builder::new(crew.clone())
        .timer(alarm.clone())
        .initial_stream_window_size(WINDOW)
        .initial_connection_window_size(WINDOW)
        .max_frame_size(FRAME)
        .max_send_buf_size(SEND_BUFFER)
        .max_header_list_size(METADATA)
        .keep_alive_interval(Some(PING_PEER_AFTER))
        .keep_alive_timeout(PING_TIMEOUT)
        .handshake::<_, CallBody>(TokioIo::new(Bounded { io, hook: ahead.clone() }))
        .await
        .map_err(broken)?;
    let connection = CancellationToken::new();
    let over = connection.clone();
    let lead = Box::pin(async move {
        tokio::select! {
            ended = driver => if let Err(e) = ended { tracing::debug!(error = %e, "link connection ended") },
            () = over.cancelled() => {}
        }
    });
    link_context.drain.spawn(Span::current(), crew.run(lead));
    let connection = connection.drop_guard();
    let (agree, agreed) = oneshot::channel();
    let body = CallBody::Greeting { first: Some(encode(heartbeat(node))), agreed };
    let request = request(authority, said, body)?;
    let response = tokio::time::timeout(ANSWER_TIMEOUT, sender.send_request(request))
        .await
        .map_err(|_| LinkDialError::Timeout)?
        .map_err(broken)?;
    let (headers, incoming) = response.into_parts();
    let (dialect, instance) = Hello::from_response(&headers.headers);
    let ends = LinkEndpoints { version: user_agent(&headers.headers), dialled: true, ..ends };
    Ok(CallResponse { headers, incoming, ahead, tcp_info, ends, dialect, instance, agree, alarm, connection })
}

fn request(authority: &str, headers: HeaderMap, body: CallBody) -> Result<Request<CallBody>, LinkDialError> {
    let uri = Uri::builder().scheme("https").authority(authority).path_and_query(PATH).build();
    let uri = uri.map_err(|e| LinkDialError::Broken(format!("{authority} cannot be an authority: {e}")))?;
    let mut request = Request::new(body);
    *request.method_mut() = http::Method::POST;
    *request.uri_mut() = uri;
    *request.version_mut() = http::Version::HTTP_2;
    *request.headers_mut() = headers;
    request.headers_mut().insert(http::header::CONTENT_TYPE, GRPC);
    request.headers_mut().insert(http::header::TE, HeaderValue::from_static("trailers"));
    Ok(request)
}

/// What to do about a refusal, where that is known.
fn remedy(code: Code) -> &'static str {
    match code {
        Code::Unauthenticated => {
            ": compare token or token_file here with this node's line, or else the default line, in the cloud's tokenfile"
        }
        _ => "",
    }
}

/// A Go pod counts pings that come oftener than every 15 s as an attack.
const PING_PEER_AFTER: Duration = Duration::from_secs(20);
/// How long a pod may take to answer the call.
const ANSWER_TIMEOUT: Duration = Duration::from_secs(10);
