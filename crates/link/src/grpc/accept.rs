//! The server's end of links: serves connections and accepts calls as links.

use std::io;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use crate::grpc::executor::LinkExecutor;
use http::{Request, Response};
use hyper::body::Incoming;
use hyper::server::conn::http2;
use hyper_util::rt::{TokioIo, TokioTimer};
use tokio::sync::{Semaphore, mpsc, oneshot};
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;
use tonic::{Code, Status};

use crate::grpc::call_body::CallBody;
use crate::grpc::enrol::{self, EnrolRequest};
use crate::grpc::read_ahead::{BoundedReadStream, ReadAheadBound};
use crate::grpc::{FRAME, GRPC, LinkContext, METADATA, PATH, SEND_BUFFER, WINDOW, check, ends, outbound};
use crate::link::stats::LinkEndpoints;
use crate::link_reader::{LinkReader, RemoteInfo};
use crate::liveness::{HTTP2_PING_EDGE_AFTER, HTTP2_PING_TIMEOUT};
use tunnel_base::limited;
use tunnel_base::metrics::Door;
use tunnel_net::limiter::Permit;
use tunnel_net::path_mtu::padding;
use tunnel_net::socket::{AnyConnection, Connection as _};
use tunnel_net::tcp_info::TcpInfoReader;
use tunnel_net::tls::client_certificate::ClientCertificate;
use tunnel_proto::frame::Remote;
use tunnel_proto::hello::{
    self, EdgeHello, HelloError, LinkCaller, LinkPurpose, is_padded, local_headers, pad, user_agent,
    websocket,
};
use tunnel_proto::names::{NodeName, UserName};

/// What arrives at the listener for links.
#[derive(Debug)]
pub enum IncomingCall {
    /// A request to become a link.
    Link(Box<LinkCall>),
    /// A request from a machine that is not a node yet.
    Enrol(EnrolRequest),
}

/// A call that requests a link. Dropping it rejects it.
#[derive(Debug)]
#[must_use = "dropping a call rejects it"]
pub struct LinkCall {
    /// The caller's address.
    pub from: SocketAddr,
    /// The caller as described by its hello. A peer is authenticated by its certificate, others not yet.
    pub caller: LinkCaller,
    /// The client certificate that the connection presented, if any.
    pub certificate: CallerCertificate,
    incoming: Incoming,
    /// `None` closes the connection without a response.
    answer: oneshot::Sender<Option<Response<CallBody>>>,
    ends: LinkEndpoints,
    shared: LinkConnectionState,
}

/// The client certificate that the handshake has accepted.
#[derive(Debug, Clone)]
pub enum CallerCertificate {
    /// No certificate.
    None,
    /// A peer's certificate.
    Peer,
    /// An edge's certificate, and its node if it is for a single node.
    Edge(Option<NodeName>),
    /// A user's certificate.
    User(ClientCertificate),
}

/// An accepted connection on which no call has been accepted yet. It is closed unless that happens in time.
#[derive(Debug)]
pub struct PendingConnection {
    /// The certificate that it has presented.
    pub certificate: CallerCertificate,
    /// Whether enrolment requests are read at all.
    pub takes_enrolments: bool,
    /// When the connection is closed if it still has no accepted call.
    pub until: Instant,
    /// Its permit for waiting, released once a call is accepted. The code that admits connections watches it.
    pub waiting_permit: Permit,
    /// Its permit for being served, released at the same time. The connection is closed if the permit is revoked.
    pub permit: Permit,
}

/// Why a call was rejected; sent to the caller.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum CallRejection {
    /// The caller could not prove its name.
    #[error("invalid token")]
    Token,
    /// Too many callers of this address could not. The token was not compared.
    #[error("too many wrong tokens came from your address, or revoked ones; it may try again in a minute")]
    TooManyGuesses,
    /// This server cannot tell now whether the caller has proved its name, or has a grant.
    #[error("this server cannot check tokens, certificates or grants now; its log has the reason")]
    Unknown,
    /// This server takes no new links.
    #[error("server is shutting down")]
    Stopping,
    /// The node has opened too many links recently.
    #[error("node {node} opened {links} links within a minute; another process may use its token")]
    TooManyLinks {
        /// The node.
        node: NodeName,
        /// The number of links.
        links: u32,
    },
    /// Another live process of that name has a link.
    #[error("{0}")]
    NameTaken(String),
    /// The user has as many links as one user may have, or all users together have too many.
    #[error(
        "user {user} has {links} links to this server, or all users together have too many; another program may use this \
         user's token"
    )]
    TooManyUserLinks {
        /// The user.
        user: UserName,
        /// The number of links that one user may have.
        links: usize,
    },
    /// The memory of this server fits only that many links.
    #[error("this server has no memory for more than {0} links; raise its memory limit, or add a server")]
    NoRoom(usize),
    /// This server accepts no such caller.
    #[error("{0}")]
    Forbidden(String),
    /// The caller is this very process.
    #[error("the caller is this server")]
    SelfDial,
    /// The link that the new link should back up is not at this server.
    #[error("the primary link is not connected to this server")]
    NoPrimaryLink,
}

/// Serves one encrypted connection until it ends, and sends its calls to `arrivals`.
pub fn serve(
    io: AnyConnection,
    from: SocketAddr,
    arrivals: mpsc::Sender<IncomingCall>,
    link_context: LinkContext,
    waiting: PendingConnection,
) -> impl Future<Output = ()> + Send {
    let connection = CancellationToken::new();
    let accepted = CancellationToken::new();
    let ahead = ReadAheadBound::unproven();
    let handler = CallHandler {
        from,
        certificate: waiting.certificate.clone(),
        takes_enrolments: waiting.takes_enrolments,
        pending: Arc::new(Semaphore::new(1)),
        arrivals,
        ends: LinkEndpoints { remote: Some(from), ..ends(&io) },
        shared: LinkConnectionState {
            link_context: link_context.clone(),
            ahead: ahead.clone(),
            tcp_info: io.tcp().and_then(TcpInfoReader::of),
            connection: connection.clone(),
            accepted: accepted.clone(),
        },
    };
    let service = hyper::service::service_fn(move |request: Request<Incoming>| {
        // Boxed, because hyper keeps its memory for the duration of the call.
        Box::pin(handler.clone().answer(request))
    });
    // Boxed outside of any async block: an async block would store it twice for the lifetime of the link.
    let io = TokioIo::new(BoundedReadStream { io, hook: ahead });
    let mut serving = Box::pin(http().serve_connection(io, service));
    Box::pin(async move {
        let lost = waiting.permit.revoked();
        let let_in = async {
            link_context.metrics.links_rejected.count(tokio::select! {
                biased;
                () = accepted.cancelled() => {
                    drop((waiting.waiting_permit, waiting.permit));
                    std::future::pending().await
                }
                () = lost.cancelled() => "evicted",
                () = tokio::time::sleep_until(waiting.until) => "call_timeout",
            });
        };
        let ended = tokio::select! {
            ended = serving.as_mut() => Some(ended),
            () = let_in => None,
            () = connection.cancelled() => {
                serving.as_mut().graceful_shutdown();
                tokio::time::timeout(CLOSE_TIMEOUT, serving.as_mut()).await.ok()
            }
        };
        if let Some(Err(e)) = ended {
            tracing::debug!(remote_addr = %from, error = %e, "link connection ended");
        }
    })
}

/// Configures HTTP/2 for a server.
fn http() -> http2::Builder<LinkExecutor> {
    let mut http = http2::Builder::new(LinkExecutor);
    http.timer(TokioTimer::new())
        .initial_stream_window_size(WINDOW)
        .initial_connection_window_size(WINDOW)
        .max_frame_size(FRAME)
        .max_send_buf_size(SEND_BUFFER)
        .max_concurrent_streams(CALLS)
        .max_header_list_size(METADATA)
        .keep_alive_interval(Some(HTTP2_PING_EDGE_AFTER))
        .keep_alive_timeout(HTTP2_PING_TIMEOUT);
    http
}

impl LinkCall {
    /// Accepts the call and returns its link to `peer`, which is who the caller has proved to be.
    ///
    /// Takes the box, because a caller that moves the call out of it keeps the empty box for as long as the link lives.
    pub fn accept(self: Box<Self>, peer: Remote) -> LinkReader {
        let instance = self.caller.instance();
        let mut is_interactive = false;
        if let LinkCaller::Edge(hello) = &self.caller {
            is_interactive = hello.purpose == LinkPurpose::Interactive;
            self.shared.ahead.set_purpose(hello.purpose);
        }
        let LinkConnectionState { link_context, ahead, tcp_info, connection, accepted } = self.shared;
        let outbound = outbound(peer, instance, &link_context);
        outbound.link.set_tcp_info_reader(tcp_info);
        outbound.link.set_endpoints(self.ends);
        let mut response = Response::new(CallBody::Stream { outbound: outbound.clone(), trailers: true });
        *response.headers_mut() = local_headers(link_context.table.instance());
        if let Some(name) = &link_context.server_name {
            EdgeHello::with_server_name(response.headers_mut(), name);
        }
        response.headers_mut().insert(http::header::CONTENT_TYPE, GRPC);
        ahead.on_accepted();
        accepted.cancel();
        // Fails only if the connection is closed; then the link's first read fails too.
        let _ = self.answer.send(Some(response));
        LinkReader::new(
            outbound,
            RemoteInfo { answers: true, is_interactive, incoming: self.incoming, ahead, connection },
            link_context.table,
            link_context.metrics,
        )
    }

    /// Rejects the call and closes its connection.
    pub fn refuse(self, why: CallRejection) {
        let mut response = Status::from(why).into_http();
        // Lets a peer see that one of our servers has rejected it.
        response.headers_mut().extend(local_headers(self.shared.link_context.table.instance()));
        let _ = self.answer.send(Some(response));
        // The graceful shutdown sends the response before it closes the connection.
        self.shared.connection.cancel();
    }

    /// Closes the connection without a response.
    pub fn close(self) {
        let _ = self.answer.send(None);
        self.shared.connection.cancel();
    }
}

impl From<CallRejection> for Status {
    fn from(why: CallRejection) -> Self {
        let text = why.to_string();
        match why {
            CallRejection::Token => Self::unauthenticated(text),
            CallRejection::TooManyGuesses
            | CallRejection::Stopping
            | CallRejection::Unknown
            | CallRejection::NoRoom(_) => Self::unavailable(text),
            CallRejection::TooManyLinks { .. } | CallRejection::TooManyUserLinks { .. } => {
                Self::resource_exhausted(text)
            }
            CallRejection::Forbidden(_) => Self::permission_denied(text),
            CallRejection::NameTaken(_) | CallRejection::SelfDial => Self::already_exists(text),
            CallRejection::NoPrimaryLink => Self::failed_precondition(text),
        }
    }
}

/// State shared by the calls of one connection.
#[derive(Debug, Clone)]
struct CallHandler {
    from: SocketAddr,
    certificate: CallerCertificate,
    takes_enrolments: bool,
    /// The permit of the only call that may wait for its answer: each stores what its caller has sent.
    pending: Arc<Semaphore>,
    arrivals: mpsc::Sender<IncomingCall>,
    ends: LinkEndpoints,
    shared: LinkConnectionState,
}

/// State of one accepted connection: each of its calls has a clone, and the call that is accepted passes it to its
/// link.
#[derive(Debug, Clone)]
struct LinkConnectionState {
    link_context: LinkContext,
    ahead: ReadAheadBound,
    tcp_info: Option<TcpInfoReader>,
    /// Cancelled to close the connection.
    connection: CancellationToken,
    /// Cancelled when a call is accepted.
    accepted: CancellationToken,
}

impl CallHandler {
    /// Answers a request, padded if the request is.
    async fn answer(self, request: Request<Incoming>) -> io::Result<Response<CallBody>> {
        let bytes = is_padded(request.headers()).then(|| padding(self.shared.tcp_info.as_ref()));
        let mut response = self.respond(request).await?;
        if let Some(bytes) = bytes {
            pad(response.headers_mut(), bytes);
        }
        Ok(response)
    }

    /// Returns the response, or an error to reset the call without one.
    async fn respond(self, request: Request<Incoming>) -> io::Result<Response<CallBody>> {
        let pending = Arc::clone(&self.pending);
        let Ok(_permit) = pending.try_acquire() else {
            self.shared.link_context.metrics.links_rejected.count("overloaded");
            return Ok(Status::unavailable("another call of this connection is pending").into_http());
        };
        if request.uri().path().starts_with(enrol::SERVICE) {
            if !self.takes_enrolments {
                return self
                    .refuse(Status::unimplemented("joining by invitation is not enabled"), "no_invitations");
            }
            let arrivals = self.arrivals;
            let hand_on = move |enrol_request| arrivals.try_send(IncomingCall::Enrol(enrol_request)).is_ok();
            return Ok(enrol::answer(request, self.from, hand_on).await);
        }
        if request.uri().path() != PATH {
            let status = Status::unimplemented("this port serves only tunnel links");
            return self.refuse(status, "unknown_method");
        }
        let (parts, incoming) = request.into_parts();
        let caller = match LinkCaller::from_request(
            &parts.headers,
            matches!(self.certificate, CallerCertificate::Peer),
        ) {
            Ok(caller) => caller,
            Err(e @ (HelloError::BadRole(_) | HelloError::NoCertificate)) => {
                return self.refuse(Status::unauthenticated(e.to_string()), "bad_role");
            }
            Err(e @ HelloError::OtherVersion(_)) => {
                return self.refuse(Status::unimplemented(e.to_string()), "protocol_version");
            }
            Err(e) => return self.refuse(Status::unknown(e.to_string()), "bad_metadata"),
        };
        if let Err(why) = check(caller.instance()) {
            return self.refuse(Status::unimplemented(why), "plain_dialect");
        }
        tracing::debug!(remote_addr = %self.from, protocol = hello::version(&parts.headers), "call received");
        let (answer, answered) = oneshot::channel();
        let is_server = matches!(caller, LinkCaller::Peer { .. });
        let server_name = is_server.then(|| EdgeHello::server_name(&parts.headers)).flatten();
        let call = LinkCall {
            from: self.from,
            caller,
            certificate: self.certificate.clone(),
            incoming,
            answer,
            ends: LinkEndpoints {
                version: user_agent(&parts.headers),
                server_name,
                websocket: websocket(&parts.headers),
                ..self.ends.clone()
            },
            shared: self.shared.clone(),
        };
        if self.arrivals.try_send(IncomingCall::Link(Box::new(call))).is_err() {
            return self.refuse(
                Status::unavailable("server is shutting down or has too many pending calls"),
                "overloaded",
            );
        }
        match answered.await {
            Ok(response) => response.ok_or_else(|| io::ErrorKind::ConnectionAborted.into()),
            Err(_) => self.refuse(Status::unavailable("server is shutting down"), "stopping"),
        }
    }

    fn refuse(&self, status: Status, reason: &'static str) -> io::Result<Response<CallBody>> {
        let metrics = &self.shared.link_context.metrics;
        if status.code() == Code::Unavailable {
            metrics.count_refusal(Door::Links, reason);
        } else {
            limited!(
                metrics.refuse(Door::Links, reason, self.from.ip()) => warn,
                remote_addr = %self.from, reason = status.message(), "call refused"
            );
        }
        self.shared.connection.cancel();
        let mut response = status.into_http();
        response.headers_mut().extend(local_headers(self.shared.link_context.table.instance()));
        Ok(response)
    }
}

/// Maximum number of concurrent calls per connection: one is used, the others allow a remote to retry on it. A second
/// pending one is refused, so it costs no memory.
const CALLS: u32 = 4;
/// Timeout for sending the last frames of a closing connection.
const CLOSE_TIMEOUT: Duration = Duration::from_secs(2);
