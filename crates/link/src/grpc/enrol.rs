//! The calls that turn a machine with an invitation into a node, or a device of a user: both ends.

use std::net::SocketAddr;
use std::time::Duration;

use futures_util::future::join;
use http::uri::PathAndQuery;
use http::{Request, Response as HttpResponse, Uri};
use hyper::body::Incoming;
use tokio::sync::oneshot;
use tokio::time::timeout;
use tonic::client::Grpc;
use tonic::{Code as GrpcCode, Response, Status};
use tonic_prost::ProstCodec;
use tower::service_fn;

use crate::grpc::call_body::CallBody;
use crate::grpc::dial::open_http2;
use crate::grpc::enrol::wire::{CaReply, GetCaRequest, JoinRequest};
use crate::grpc::read_ahead::ReadAheadBound;
use tunnel_net::socket::AnyConnection;
use tunnel_proto::frame::{ErrorCode, SessionError};
use tunnel_proto::names::Target;
use tunnel_proto::printable::printable;

/// The messages of `proto/enrol.proto`, compiled.
#[allow(unreachable_pub, reason = "generated")]
#[rustfmt::skip]
pub(crate) mod wire;

/// A request to a server from a machine that has not joined yet. Dropping it rejects it.
#[derive(Debug)]
#[must_use = "dropping a request rejects it"]
pub struct EnrolRequest {
    /// The caller's address.
    pub from: SocketAddr,
    /// The requested method.
    pub wish: EnrolOperation,
    answer: oneshot::Sender<Result<CaReply, SessionError>>,
}

/// The requested method with its parameters. All of them come from an untrusted caller.
#[derive(Debug)]
pub enum EnrolOperation {
    /// Returns the CA of the servers' certificates.
    Ca,
    /// Joins as a node or device.
    Join(JoinCredentials),
}

/// The parameters of a join. `Debug` omits the secrets.
#[derive(derive_more::Debug, Clone)]
#[debug("JoinCredentials({name})")]
pub struct JoinCredentials {
    /// The secret of the invitation.
    pub secret: String,
    /// The node's name, or `USER/DEVICE`.
    pub name: String,
    /// The token with which it will authenticate.
    pub token: String,
}

/// The reason why a server did not grant an enrolment request, as the caller sees it.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum EnrolCallError {
    /// The server did not answer, or cannot at the moment. Another server may.
    #[error("{0}")]
    Unanswered(String),
    /// The server rejected the request, and other servers would as well.
    #[error("{0}")]
    Refused(String),
    /// The server takes no invitations. Another server may.
    #[error("this server takes no invitations")]
    Unserved,
}

impl EnrolRequest {
    /// Grants the request with the CA certificates (PEM) to trust the servers by. A machine that joins also gets `servers`.
    pub fn accept(self, certificates: String, servers: &[Target]) {
        let joins = matches!(self.wish, EnrolOperation::Join(_));
        let servers = servers.iter().filter(|_| joins).map(Target::to_string).collect();
        // A caller that no longer waits for the response will retry.
        let _ = self.answer.send(Ok(CaReply { certificates, servers }));
    }

    /// Rejects the request.
    pub fn refuse(self, why: SessionError) {
        let _ = self.answer.send(Err(why));
    }
}

/// Serves an enrolment request; `hand_on` passes it to its handler and returns false if there is none.
pub(crate) async fn answer<F: Fn(EnrolRequest) -> bool + Send + Sync>(
    request: Request<Incoming>,
    from: SocketAddr,
    hand_on: F,
) -> HttpResponse<CallBody> {
    let response = match request.uri().path() {
        GET_CA => {
            let get_ca =
                service_fn(|_: tonic::Request<GetCaRequest>| ask(from, EnrolOperation::Ca, &hand_on));
            unary_server().unary(get_ca, request).await
        }
        JOIN => {
            let join = service_fn(|request: tonic::Request<JoinRequest>| {
                let JoinRequest { secret, node: name, token } = request.into_inner();
                ask(from, EnrolOperation::Join(JoinCredentials { secret, name, token }), &hand_on)
            });
            unary_server().unary(join, request).await
        }
        _ => Status::unimplemented("").into_http(),
    };
    response.map(CallBody::Full)
}

fn unary_server<R: prost::Message + Default + 'static>() -> tonic::server::Grpc<ProstCodec<CaReply, R>> {
    tonic::server::Grpc::new(ProstCodec::default()).max_decoding_message_size(MAX_REQUEST_BYTES)
}

/// Passes a request to its handler and returns the answer.
async fn ask(
    from: SocketAddr,
    wish: EnrolOperation,
    hand_on: &(impl Fn(EnrolRequest) -> bool + Sync),
) -> Result<Response<CaReply>, Status> {
    let (answer, answered) = oneshot::channel();
    if !hand_on(EnrolRequest { from, wish, answer }) {
        return Err(Status::unavailable("server is shutting down or has too many pending calls"));
    }
    match answered.await {
        Ok(Ok(reply)) => Ok(Response::new(reply)),
        Ok(Err(SessionError { code, reason })) => Err(match code {
            ErrorCode::NotAllowed => Status::permission_denied(reason),
            _ => Status::unavailable(reason),
        }),
        Err(_) => Err(Status::unavailable("server is shutting down")),
    }
}

/// Sends an enrolment request over an encrypted connection. Returns the CA certificates (PEM) to trust the servers by,
/// and the addresses of other servers.
///
/// # Errors
///
/// Fails if the server does not answer or rejects the request.
pub async fn call_enrol(
    io: AnyConnection,
    authority: &str,
    wish: EnrolOperation,
) -> Result<(String, Vec<String>), EnrolCallError> {
    let broken = |cause: &dyn std::error::Error| EnrolCallError::Unanswered(cause.to_string());
    // "http" because the connection is already encrypted.
    let origin: Uri = format!("http://{authority}").parse().map_err(|cause| broken(&cause))?;
    let (sender, connection) =
        open_http2(io, &ReadAheadBound::default()).await.map_err(|cause| broken(&cause))?;
    // On the wire, an empty request of Join is one of GetCa, which has no fields.
    let (path, request) = match wish {
        EnrolOperation::Ca => (GET_CA, JoinRequest::default()),
        EnrolOperation::Join(JoinCredentials { secret, name, token }) => {
            (JOIN, JoinRequest { secret, node: name, token })
        }
    };
    // It has the only sender, so that the connection ends with it.
    let call = async move {
        let send = service_fn(move |call: Request<_>| sender.clone().send_request(call.map(CallBody::Full)));
        let mut client = Grpc::with_origin(send, origin).max_decoding_message_size(MAX_REPLY_BYTES);
        let path = PathAndQuery::from_static(path);
        let answer = client.unary(tonic::Request::new(request), path, ProstCodec::default()).await;
        answer.map(Response::into_inner)
    };
    let (answer, _) = join(timeout(ANSWER_TIMEOUT, call), connection).await;
    let answer = answer.unwrap_or_else(|_| Err(Status::deadline_exceeded("no response in time")));
    answer.map(|CaReply { certificates, servers }| (certificates, servers)).map_err(|status| {
        let message = printable(status.message());
        match status.code() {
            GrpcCode::PermissionDenied => EnrolCallError::Refused(message),
            GrpcCode::Unimplemented => EnrolCallError::Unserved,
            code => EnrolCallError::Unanswered(format!("{message} ({code:?})")),
        }
    })
}

/// Prefix of the paths of its calls, and these paths.
pub(crate) const SERVICE: &str = "/enrol.Enrol/";
const GET_CA: &str = "/enrol.Enrol/GetCa";
const JOIN: &str = "/enrol.Enrol/Join";

/// Maximum size of a request in bytes: three short texts. It is stored for a caller that has proven nothing.
const MAX_REQUEST_BYTES: usize = 1024;
/// Maximum size of a reply in bytes: a few certificates.
const MAX_REPLY_BYTES: usize = 64 * 1024;

/// Timeout for the whole response, which is small: the server has to query its store.
const ANSWER_TIMEOUT: Duration = Duration::from_secs(20);
