//! The calls by which a machine that has an invitation becomes a node: both ends.

use std::net::SocketAddr;
use std::sync::Mutex;
use std::time::Duration;

use http::{Request, Response as HttpResponse};
use hyper::body::Incoming;
use hyper_util::rt::TokioIo;
use tokio::sync::oneshot;
use tonic::codegen::Service as _;
use tonic::transport::{Channel, Endpoint, Uri};
use tonic::{Code as GrpcCode, Response, Status};

use crate::grpc::CallBody;
use crate::grpc::enrol::wire::enrol_client::EnrolClient;
use crate::grpc::enrol::wire::enrol_server::{Enrol, EnrolServer};
use crate::grpc::enrol::wire::{AuthorityReply, AuthorityRequest, JoinRequest};
use tunnel_base::logging::printable;
use tunnel_net::socket::Connection;
use tunnel_proto::frame::{ErrorCode, SessionError};

/// The messages of `proto/enrol.proto`, compiled.
#[allow(missing_docs, unreachable_pub, missing_debug_implementations, clippy::all, reason = "generated")]
pub(crate) mod wire {
    include!(concat!(env!("OUT_DIR"), "/enrol.rs"));
}

/// What somebody who is no node yet asks of a pod. Dropping it refuses it.
#[derive(Debug)]
#[must_use = "dropping a petition refuses it"]
pub struct EnrolRequest {
    /// Where it comes from.
    pub from: SocketAddr,
    /// What is asked for.
    pub wish: EnrolMethod,
    answer: oneshot::Sender<Result<String, SessionError>>,
}

/// What is asked for. All of it is a stranger's.
#[derive(Debug)]
pub enum EnrolMethod {
    /// The authority that signs the cloud's certificates.
    Ca,
    /// To become a node.
    Join(JoinParams),
}

/// A wish to become a node. Its secrets are not shown.
#[derive(Clone)]
pub struct JoinParams {
    /// The invitation's.
    pub secret: String,
    /// The node's name.
    pub node: String,
    /// What the node wants to prove itself with.
    pub token: String,
}

/// Why a petition was not granted.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum EnrolCallError {
    /// The pod did not answer, or cannot at the moment. Another one may.
    #[error("{0}")]
    Unanswered(String),
    /// It said no, and others will, too.
    #[error("{0}")]
    Refused(String),
    /// It takes no invitations.
    #[error(
        "this cloud takes no invitations: set store in [mode.cloud.invitations] of its pods, if they are new enough"
    )]
    Unserved,
}

impl EnrolRequest {
    /// Grants it, with the certificates (PEM) by which the cloud is to be believed.
    pub fn accept(self, certificates: String) {
        // Who does not wait for the answer asks again.
        let _ = self.answer.send(Ok(certificates));
    }

    /// Refuses it. [`Code::NotHere`]: nobody is ever let in this way.
    pub fn refuse(self, why: SessionError) {
        let _ = self.answer.send(Err(why));
    }
}

impl std::fmt::Debug for JoinParams {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Joining").field("node", &self.node).finish_non_exhaustive()
    }
}

/// Whether a call is such a petition.
pub(crate) fn is_petition<B>(request: &Request<B>) -> bool {
    request.uri().path().starts_with(SERVICE)
}

/// Has a petition judged by who it is handed on to; that returns false if nobody takes it.
pub(crate) async fn answer<F>(
    request: Request<Incoming>,
    from: SocketAddr,
    hand_on: F,
) -> HttpResponse<CallBody>
where
    F: Fn(EnrolRequest) -> bool + Send + Sync + 'static,
{
    let mut desk = EnrolServer::new(EnrolHandler { from, hand_on }).max_decoding_message_size(MAX_BYTES);
    match desk.call(request).await {
        Ok(answer) => answer.map(CallBody::Full),
        Err(never) => match never {},
    }
}

/// Hands petitions on.
struct EnrolHandler<F> {
    from: SocketAddr,
    hand_on: F,
}

impl<F: Fn(EnrolRequest) -> bool> EnrolHandler<F> {
    async fn ask(&self, wish: EnrolMethod) -> Result<Response<AuthorityReply>, Status> {
        let (answer, answered) = oneshot::channel();
        let petition = EnrolRequest { from: self.from, wish, answer };
        if !(self.hand_on)(petition) {
            return Err(Status::unavailable("stopping, or too many calls at once"));
        }
        match answered.await {
            Ok(Ok(certificates)) => Ok(Response::new(AuthorityReply { certificates })),
            Ok(Err(SessionError { code: ErrorCode::NotAllowed, reason })) => {
                Err(Status::permission_denied(reason))
            }
            Ok(Err(SessionError { code: ErrorCode::NodeNotConnected, reason })) => {
                Err(Status::unimplemented(reason))
            }
            Ok(Err(SessionError { reason, .. })) => Err(Status::unavailable(reason)),
            Err(_) => Err(Status::unavailable("stopping")),
        }
    }
}

#[tonic::async_trait]
impl<F: Fn(EnrolRequest) -> bool + Send + Sync + 'static> Enrol for EnrolHandler<F> {
    async fn authority(
        &self,
        _: tonic::Request<AuthorityRequest>,
    ) -> Result<Response<AuthorityReply>, Status> {
        self.ask(EnrolMethod::Ca).await
    }

    async fn join(&self, request: tonic::Request<JoinRequest>) -> Result<Response<AuthorityReply>, Status> {
        let JoinRequest { secret, node, token } = request.into_inner();
        self.ask(EnrolMethod::Join(JoinParams { secret, node, token })).await
    }
}

/// Asks over an encrypted connection. The certificates (PEM) by which the cloud is to be believed.
///
/// # Errors
///
/// There is no answer, or it is no.
pub async fn call_enrol<IO>(io: IO, authority: &str, wish: EnrolMethod) -> Result<String, EnrolCallError>
where
    IO: Connection + 'static,
{
    let channel = channel(io, authority).await?;
    let mut client = EnrolClient::new(channel).max_decoding_message_size(MAX_BYTES);
    let answer = match wish {
        EnrolMethod::Ca => client.authority(AuthorityRequest {}).await,
        EnrolMethod::Join(JoinParams { secret, node, token }) => {
            client.join(JoinRequest { secret, node, token }).await
        }
    };
    answer.map(|answer| answer.into_inner().certificates).map_err(|status| {
        let said = printable(status.message());
        match status.code() {
            GrpcCode::PermissionDenied => EnrolCallError::Refused(said),
            GrpcCode::Unimplemented => EnrolCallError::Unserved,
            code => EnrolCallError::Unanswered(format!("{said} ({code:?})")),
        }
    })
}

async fn channel<IO>(io: IO, authority: &str) -> Result<Channel, EnrolCallError>
where
    IO: Connection + 'static,
{
    let broken = |cause: &dyn std::error::Error| EnrolCallError::Unanswered(cause.to_string());
    // "http" though it is TLS: that is done.
    let endpoint = Endpoint::from_shared(format!("http://{authority}")).map_err(|cause| broken(&cause))?;
    let io = Mutex::new(Some(io));
    let connector = tower::service_fn(move |_: Uri| {
        let io = io.lock().ok().and_then(|mut io| io.take()).map(TokioIo::new);
        std::future::ready(io.ok_or_else(|| std::io::Error::from(std::io::ErrorKind::NotConnected)))
    });
    let connected = endpoint.timeout(ANSWER_TIMEOUT).connect_with_connector(connector).await;
    connected.map_err(|cause| broken(&cause))
}

/// The paths of its calls begin so.
const SERVICE: &str = "/enrol.Enrol/";

/// A message: a few certificates, or a few short texts.
const MAX_BYTES: usize = 64 * 1024;

/// How long a pod may take: it asks its store.
const ANSWER_TIMEOUT: Duration = Duration::from_secs(20);
