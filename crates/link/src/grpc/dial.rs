//! The caller's end of links, at an edge or a server: turns an encrypted connection into a link.

use std::time::Duration;

use crate::grpc::executor::LinkExecutor;
use http::{HeaderMap, HeaderValue, Request, StatusCode, Uri};
use hyper::body::Incoming;
use hyper::client::conn::http2::{self, SendRequest};
use hyper_util::rt::{TokioIo, TokioTimer};
use tokio::sync::oneshot;
use tokio_util::sync::{CancellationToken, DropGuard};
use tonic::{Code, Status};
use tracing::Span;

use crate::grpc::call_body::{CallBody, OutboundStream};
use crate::grpc::link_end::cause;
use crate::grpc::read_ahead::{BoundedReadStream, ReadAheadBound};
use crate::grpc::{FRAME, GRPC, LinkContext, METADATA, PATH, SEND_BUFFER, WINDOW, check, ends, outbound};
use crate::link::stats::LinkEndpoints;
use crate::link_reader::{LinkReader, RemoteInfo};
use crate::liveness::{HTTP2_PING_AFTER, HTTP2_PING_TIMEOUT};
use tunnel_net::path_mtu::padding;
use tunnel_net::socket::{AnyConnection, Connection as _};
use tunnel_net::tcp_info::TcpInfoReader;
use tunnel_net::tls::error::TlsHandshakeError;
use tunnel_proto::codec::encode;
use tunnel_proto::codec::extended::heartbeat;
use tunnel_proto::frame::Remote;
use tunnel_proto::hello::{
    self, EdgeHello, LinkCaller, LinkPurpose, OtherVersion, pad, remote_instance, user_agent, websocket,
};
use tunnel_proto::names::{Instance, NodeName};
use tunnel_proto::printable::printable;

/// Why a link to a server could not be established.
#[derive(Debug, thiserror::Error)]
pub enum LinkDialError {
    /// HTTP/2 could not be negotiated, or the connection broke.
    #[error("connection broke before the server answered: {0}")]
    Broken(String),
    /// The server is stopping, and ended the TLS handshake.
    #[error("the server is stopping")]
    Stopping,
    /// The server rejected this end's certificate, or requires one. In TLS 1.3 it does so after the handshake.
    #[error("the server closed the connection: {0}; its log has the reason")]
    CertificateRejected(TlsHandshakeError),
    /// The server rejected the call. The usual causes are a wrong token or node name.
    #[error("rejected by the server: {message} ({code:?})")]
    Refused {
        /// The gRPC status code.
        code: Code,
        /// The server's message.
        message: String,
    },
    /// Another program than a server answered, with this HTTP status.
    #[error("HTTP status {0}; check that this is the links port of a server")]
    NotGrpc(StatusCode),
    /// The remote end is this process.
    #[error("server has dialled itself")]
    Itself,
    /// The remote server is plain (SuperEdge's, for example), so it cannot be a peer.
    #[error(
        "the remote server is no server of this program (SuperEdge's, for example) and cannot be a peer: {0}"
    )]
    Plain(String),
    /// The remote server is plain, and this program is built without SuperEdge.
    #[error("the server is SuperEdge's: {0}")]
    NoPlain(&'static str),
    /// The server speaks another version of the protocol.
    #[error(transparent)]
    OtherVersion(#[from] OtherVersion),
    /// The server did not answer within 10 s.
    #[error("no answer from the server within {ANSWER_TIMEOUT:?}")]
    Timeout,
}

impl LinkDialError {
    /// Returns a fixed label for metrics.
    pub fn reason(&self) -> &'static str {
        match self {
            Self::Broken(_) => "closed_by_remote",
            Self::Stopping => "stopping",
            Self::CertificateRejected(_) => "tls",
            Self::Refused { code: Code::Unauthenticated, .. } => "token",
            Self::Refused { code: Code::AlreadyExists, .. } => "name_in_use",
            Self::Refused { code: Code::FailedPrecondition, .. } => "no_primary_link",
            Self::Refused { code: Code::ResourceExhausted, .. } => "too_many_links",
            Self::Refused { .. } | Self::NotGrpc(_) => "rejected",
            Self::Itself => "self_dial",
            Self::Plain(_) | Self::NoPlain(_) => "plain_dialect",
            Self::OtherVersion(_) => "protocol_version",
            Self::Timeout => "call_timeout",
        }
    }

    /// Returns true if the server was reached and would also reject the next attempt, if that follows soon.
    pub fn is_refusal(&self) -> bool {
        use Code::{PermissionDenied, ResourceExhausted, Unauthenticated, Unavailable};
        let lasting = [PermissionDenied, ResourceExhausted, Unauthenticated, Unavailable];
        match self {
            Self::Stopping | Self::OtherVersion(_) => true,
            Self::Refused { code, .. } => lasting.contains(code),
            _ => false,
        }
    }

    /// Returns true if the server rejected our proof, or does not permit the link that it proves.
    pub fn is_denied(&self) -> bool {
        matches!(self, Self::Refused { code: Code::Unauthenticated | Code::PermissionDenied, .. })
    }

    /// Returns true if the server rejected our token.
    pub fn is_token_refused(&self) -> bool {
        matches!(self, Self::Refused { code: Code::Unauthenticated, .. })
    }

    /// Returns true if this end has opened too many links recently.
    pub fn is_over_rate(&self) -> bool {
        matches!(self, Self::Refused { code: Code::ResourceExhausted, .. })
    }

    /// Returns true if the server knows no links of users: those that do give them other codes.
    pub fn knows_no_users(&self) -> bool {
        matches!(self, Self::Refused { code: Code::Unknown, .. } | Self::NoPlain(_))
    }

    /// Returns true if another live process of our name has a link; then redialling soon is useless.
    pub fn is_name_taken(&self) -> bool {
        matches!(self, Self::Refused { code: Code::AlreadyExists, .. })
    }
}

/// Turns an edge's or a user's encrypted connection to a server into a link; `metadata` is the metadata that
/// [`EdgeHello`] creates.
pub async fn dial(
    io: AnyConnection,
    authority: &str,
    node: &NodeName,
    metadata: HeaderMap,
    link_context: &LinkContext,
) -> Result<LinkReader, LinkDialError> {
    let answered = call(io, authority, metadata, node, link_context).await?;
    answered.refusal()?;
    check(answered.instance).map_err(LinkDialError::NoPlain)?;
    Ok(answered.link(Remote::Server(node.clone()), link_context))
}

/// Turns an encrypted connection to a peer into a link; `is_backup` makes it the backup of an older link. The
/// connection has presented our certificate.
pub async fn dial_peer(
    io: AnyConnection,
    authority: &str,
    is_backup: bool,
    link_context: &LinkContext,
) -> Result<LinkReader, LinkDialError> {
    let own = link_context.table.instance();
    let mut metadata = LinkCaller::peer_request(own);
    if is_backup {
        EdgeHello::with_purpose(&mut metadata, LinkPurpose::Backup);
    }
    if let Some(name) = &link_context.server_name {
        EdgeHello::with_server_name(&mut metadata, name);
    }
    let answered = call(io, authority, metadata, &NodeName::none(), link_context).await?;
    match (answered.instance, answered.refusal()) {
        (Some(instance), _) if instance == own => Err(LinkDialError::Itself),
        (Some(_), refusal) => refusal.map(|()| answered.link(Remote::Peer, link_context)),
        (None, Err(refusal)) => Err(LinkDialError::Plain(refusal.to_string())),
        (None, Ok(())) => Err(LinkDialError::Plain("its response does not identify its process".into())),
    }
}

/// A server's response to the call of this process, with all parts of the link that it becomes unless it is a refusal.
struct LinkCallResponse {
    headers: http::response::Parts,
    incoming: Incoming,
    ahead: ReadAheadBound,
    tcp_info: Option<TcpInfoReader>,
    ends: LinkEndpoints,
    instance: Option<Instance>,
    /// Passes the link's outbound stream to the body of the call.
    agree: oneshot::Sender<OutboundStream>,
    /// Closes the connection when dropped.
    connection: DropGuard,
}

impl LinkCallResponse {
    fn refusal(&self) -> Result<(), LinkDialError> {
        if let Some(status) = Status::from_header_map(&self.headers.headers) {
            return Err(LinkDialError::Refused { code: status.code(), message: printable(status.message()) });
        }
        if !self.headers.status.is_success() {
            return Err(LinkDialError::NotGrpc(self.headers.status));
        }
        Ok(())
    }

    fn link(self, peer: Remote, link_context: &LinkContext) -> LinkReader {
        let outbound = outbound(peer, self.instance, link_context);
        outbound.link.set_tcp_info_reader(self.tcp_info);
        outbound.link.set_endpoints(self.ends);
        // Fails only if the body was dropped with its connection; then the link's first read fails too.
        let _ = self.agree.send(outbound.clone());
        let connection = self.connection.disarm();
        let incoming = self.incoming;
        let ahead = self.ahead;
        let far = RemoteInfo { answers: false, is_interactive: false, incoming, ahead, connection };
        LinkReader::new(outbound, far, link_context.table.clone(), link_context.metrics.clone())
    }
}

/// Makes the call and sends a heartbeat, which a plain server echoes as its response.
async fn call(
    io: AnyConnection,
    authority: &str,
    mut metadata: HeaderMap,
    node: &NodeName,
    link_context: &LinkContext,
) -> Result<LinkCallResponse, LinkDialError> {
    let ahead = ReadAheadBound::default();
    let tcp_info = io.tcp().and_then(TcpInfoReader::of);
    pad(&mut metadata, padding(tcp_info.as_ref()));
    let ends = LinkEndpoints { websocket: websocket(&metadata), ..ends(&io) };
    let broken = |e: hyper::Error| match ahead.rejection() {
        Some(alert) => LinkDialError::CertificateRejected(alert.clone()),
        None => LinkDialError::Broken(cause(&e)),
    };
    let (mut sender, driver) = open_http2(io, &ahead).await.map_err(broken)?;
    let connection = CancellationToken::new();
    let over = connection.clone();
    let lead = Box::pin(async move {
        tokio::select! {
            ended = driver => if let Err(e) = ended { tracing::debug!(error = %e, "link connection ended") },
            () = over.cancelled() => {}
        }
    });
    link_context.drain.spawn(Span::current(), lead);
    let connection = connection.drop_guard();
    let (agree, agreed) = oneshot::channel();
    let body = CallBody::Greeting { first: Some(encode(heartbeat(node))), agreed };
    let request = request(authority, metadata, body)?;
    let response = tokio::time::timeout(ANSWER_TIMEOUT, sender.send_request(request))
        .await
        .map_err(|_| LinkDialError::Timeout)?
        .map_err(broken)?;
    let (headers, incoming) = response.into_parts();
    let instance = remote_instance(&headers.headers)?;
    tracing::debug!(server = authority, protocol = hello::version(&headers.headers), "call answered");
    let version = user_agent(&headers.headers);
    let server_name = EdgeHello::server_name(&headers.headers);
    let ends = LinkEndpoints { version, server_name, dialled: true, ..ends };
    Ok(LinkCallResponse { headers, incoming, ahead, tcp_info, ends, instance, agree, connection })
}

/// Opens HTTP/2 on an encrypted connection. Returns what sends its requests, and what has to run for them.
pub(crate) async fn open_http2(
    io: AnyConnection,
    ahead: &ReadAheadBound,
) -> hyper::Result<(SendRequest<CallBody>, impl Future<Output = hyper::Result<()>> + use<>)> {
    http2::Builder::new(LinkExecutor)
        .timer(TokioTimer::new())
        .initial_stream_window_size(WINDOW)
        .initial_connection_window_size(WINDOW)
        .max_frame_size(FRAME)
        .max_send_buf_size(SEND_BUFFER)
        .max_header_list_size(METADATA)
        .keep_alive_interval(Some(HTTP2_PING_AFTER))
        .keep_alive_timeout(HTTP2_PING_TIMEOUT)
        .handshake(TokioIo::new(BoundedReadStream { io, hook: ahead.clone() }))
        .await
}

fn request(authority: &str, headers: HeaderMap, body: CallBody) -> Result<Request<CallBody>, LinkDialError> {
    let uri = Uri::builder().scheme("https").authority(authority).path_and_query(PATH).build();
    let uri = uri.map_err(|e| LinkDialError::Broken(format!("{authority} is not a valid authority: {e}")))?;
    let mut request = Request::new(body);
    *request.method_mut() = http::Method::POST;
    *request.uri_mut() = uri;
    *request.version_mut() = http::Version::HTTP_2;
    *request.headers_mut() = headers;
    request.headers_mut().insert(http::header::CONTENT_TYPE, GRPC);
    request.headers_mut().insert(http::header::TE, HeaderValue::from_static("trailers"));
    Ok(request)
}

/// Timeout for the server's response to the call.
pub const ANSWER_TIMEOUT: Duration = Duration::from_secs(10);
