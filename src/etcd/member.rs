//! Calls to one member. Only this file knows etcd's messages.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;
use std::{fmt, io};

use http::uri::PathAndQuery;
use hyper_util::rt::TokioIo;
use tokio::time::timeout;
use tokio_rustls::TlsConnector;
use tokio_rustls::rustls::ClientConfig;
use tokio_util::either::Either;
use tonic::body::Body;
use tonic::client::Grpc;
use tonic::metadata::{Ascii, MetadataValue};
use tonic::transport::{Endpoint, Uri};
use tonic::{Code, Request, Response, Status};
use tonic_prost::ProstCodec;
use tower::ServiceExt as _;
use tower::util::BoxCloneSyncService;

use crate::etcd::CALL_TIMEOUT;
use crate::etcd::wire::{
    AuthenticateRequest, AuthenticateResponse, Compare, DeleteRangeRequest, DeleteRangeResponse,
    LeaseGrantRequest, LeaseGrantResponse, LeaseKeepAliveRequest, LeaseKeepAliveResponse, LeaseRevokeRequest,
    LeaseRevokeResponse, PutRequest, PutResponse, RangeRequest, RangeResponse, RequestOp, TxnRequest,
    TxnResponse,
};
use tunnel_base::files;
use tunnel_base::silence::unless_silent;
use tunnel_net::dial::dial;
use tunnel_net::resolver::Resolver;
use tunnel_net::tls::server_name;
use tunnel_proto::names::Target;
use tunnel_proto::printable::printable;

/// Error of a call to etcd, of publishing or of the store of invitations.
#[derive(Debug, thiserror::Error)]
pub enum EtcdError {
    /// There is no connection, for the reason in the text: the member cannot be reached, or a file is not usable. Usual
    /// causes: the member is down, a firewall, or mismatched TLS settings.
    #[error("{0}")]
    NotConnected(String),
    /// The member returned an error.
    #[error("etcd at {at}: {} ({:?})", printable(.status.message()), .status.code())]
    Refused {
        /// Address of the member.
        at: Target,
        /// Status that it returned.
        status: Box<Status>,
    },
    /// The lease no longer exists.
    #[error("the lease no longer exists in etcd")]
    LeaseLost,
}

/// The kind of an [`EtcdError`], by what the caller can do about it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum EtcdErrorKind {
    /// Log in again.
    LoggedOut,
    /// Create a new lease.
    LeaseLost,
    /// Try another member.
    Other,
}

/// A service that carries calls to a member.
pub type EtcdChannel = BoxCloneSyncService<http::Request<Body>, http::Response<Body>, Status>;

/// A connection to one member, logged in if required. Each call takes at most [`CALL_TIMEOUT`]; a call that is dropped
/// may still be carried out. Cheap to clone.
#[derive(derive_more::Debug, Clone)]
#[debug("EtcdConnection({at})")]
pub struct EtcdConnection {
    at: Target,
    channel: EtcdChannel,
    token: Option<MetadataValue<Ascii>>,
}

impl EtcdError {
    pub(crate) fn kind(&self) -> EtcdErrorKind {
        match self {
            Self::LeaseLost => EtcdErrorKind::LeaseLost,
            Self::Refused { status, .. } => match status.code() {
                Code::Unauthenticated => EtcdErrorKind::LoggedOut,
                // The token was issued before users or roles were changed.
                Code::InvalidArgument if status.message().contains("auth") => EtcdErrorKind::LoggedOut,
                Code::NotFound => EtcdErrorKind::LeaseLost,
                _ => EtcdErrorKind::Other,
            },
            Self::NotConnected(_) => EtcdErrorKind::Other,
        }
    }

    /// Returns the more telling one of this error and that of another member: that of a member which answered.
    pub(crate) fn or_answer_of(self, other: Option<Self>) -> Self {
        match (self, other) {
            (Self::NotConnected(_), Some(answer @ Self::Refused { .. })) => answer,
            (own, _) => own,
        }
    }
}

impl EtcdConnection {
    /// Creates a connection over a channel to a member that needs no login.
    pub fn over(at: Target, channel: EtcdChannel) -> Self {
        Self { at, channel, token: None }
    }

    /// Connects, and logs in if there is a user.
    pub(crate) async fn open(
        at: &Target,
        tls: Option<Arc<ClientConfig>>,
        resolver: Resolver,
        login: Option<&(String, PathBuf)>,
    ) -> Result<Self, EtcdError> {
        let unreachable =
            |cause: &dyn fmt::Display| EtcdError::NotConnected(format!("etcd at {at}: {cause}"));
        // "http" even with TLS: tonic must leave TLS to this connector.
        let endpoint =
            Endpoint::from_shared(format!("http://{at}")).map_err(|e| unreachable(&cause_of(&e)))?;
        let endpoint = endpoint.timeout(CALL_TIMEOUT);
        let target = at.clone();
        let connector = tower::service_fn(move |_: Uri| {
            let target = target.clone();
            let tls = tls.clone();
            let resolver = resolver.clone();
            async move { connect(&target, tls, &resolver).await.map(TokioIo::new) }
        });
        let opened = timeout(CALL_TIMEOUT, endpoint.connect_with_connector(connector)).await;
        let channel = opened
            .map_err(|_| unreachable(&format_args!("no response within {CALL_TIMEOUT:?}")))?
            .map_err(|e| unreachable(&cause_of(&e)))?;
        let channel = BoxCloneSyncService::new(channel.map_err(|cause| Status::from_error(cause.into())));
        let mut connection = Self::over(at.clone(), channel);
        if let Some((user, password_file)) = login {
            connection.token = Some(connection.authenticate(user, password_file).await?);
        }
        Ok(connection)
    }

    async fn authenticate(&self, user: &str, file: &Path) -> Result<MetadataValue<Ascii>, EtcdError> {
        let password = tokio::fs::read(file).await.and_then(files::text);
        let password = password
            .map_err(|cause| EtcdError::NotConnected(format!("password_file {}: {cause}", file.display())))?;
        let password = password.trim_end_matches(['\r', '\n']).to_owned();
        let message = AuthenticateRequest { name: user.to_owned(), password };
        let answer: AuthenticateResponse = self.call("/etcdserverpb.Auth/Authenticate", message).await?;
        answer
            .token
            .parse()
            .map_err(|_| self.refused(Status::internal("the login token is not a valid header value")))
    }

    /// Calls a method with one message. Returns the first message of the response.
    async fn call<M, R>(&self, method: &'static str, message: M) -> Result<R, EtcdError>
    where
        M: prost::Message + 'static,
        R: prost::Message + Default + 'static,
    {
        let mut request = Request::new(message);
        if let Some(token) = &self.token {
            request.metadata_mut().insert("token", token.clone());
        }
        let mut client = Grpc::new(self.channel.clone());
        client.ready().await.map_err(|status| self.refused(status))?;
        let answer = client.unary(request, PathAndQuery::from_static(method), ProstCodec::default());
        // The endpoint's timeout ends with the head of the response.
        let answer = unless_silent(CALL_TIMEOUT, answer).await;
        let answer = answer.unwrap_or_else(|| Err(Status::deadline_exceeded("no response in time")));
        answer.map(Response::into_inner).map_err(|status| self.refused(status))
    }

    fn refused(&self, status: Status) -> EtcdError {
        EtcdError::Refused { at: self.at.clone(), status: Box::new(status) }
    }

    /// Creates a lease of this length and returns its ID.
    pub(crate) async fn grant(&self, length: Duration) -> Result<i64, EtcdError> {
        let ttl = i64::try_from(length.as_secs()).unwrap_or(i64::MAX);
        let message = LeaseGrantRequest { ttl, id: 0 };
        let granted: LeaseGrantResponse = self.call("/etcdserverpb.Lease/LeaseGrant", message).await?;
        Ok(granted.id)
    }

    /// Renews a lease for its whole length. Returns false if it does not exist.
    pub(crate) async fn keep_alive(&self, lease: i64) -> Result<bool, EtcdError> {
        // The method takes a stream of messages; this one has one.
        let message = LeaseKeepAliveRequest { id: lease };
        let kept: LeaseKeepAliveResponse = self.call("/etcdserverpb.Lease/LeaseKeepAlive", message).await?;
        Ok(kept.ttl > 0)
    }

    /// Revokes a lease and deletes its keys. A lease that no longer exists is no error.
    pub(crate) async fn revoke(&self, lease: i64) -> Result<(), EtcdError> {
        let revoked = self.call("/etcdserverpb.Lease/LeaseRevoke", LeaseRevokeRequest { id: lease }).await;
        match revoked.map(|LeaseRevokeResponse {}| ()) {
            Err(cause) if cause.kind() == EtcdErrorKind::LeaseLost => Ok(()),
            revoked => revoked,
        }
    }

    /// Writes a key, which is deleted with the lease.
    pub(crate) async fn put(&self, key: Vec<u8>, value: Vec<u8>, lease: i64) -> Result<(), EtcdError> {
        let message = PutRequest { key: key.into(), value: value.into(), lease };
        self.call("/etcdserverpb.KV/Put", message).await.map(|PutResponse {}| ())
    }

    /// Deletes a key if it exists.
    pub(crate) async fn delete(&self, key: Vec<u8>) -> Result<(), EtcdError> {
        let message = DeleteRangeRequest { key: key.into() };
        self.call("/etcdserverpb.KV/DeleteRange", message).await.map(|DeleteRangeResponse {}| ())
    }

    /// Returns a key's value and modification revision, or `None` if the key does not exist.
    pub(crate) async fn get(&self, key: Vec<u8>) -> Result<Option<(Vec<u8>, i64)>, EtcdError> {
        let message = RangeRequest { key: key.into() };
        let found: RangeResponse = self.call("/etcdserverpb.KV/Range", message).await?;
        Ok(found.kvs.into_iter().next().map(|found| (found.value.into(), found.mod_revision)))
    }

    /// Writes a key if its modification revision is `last_changed` (0 if the key must not exist). Returns true if it
    /// was.
    pub(crate) async fn swap(
        &self,
        key: Vec<u8>,
        last_changed: i64,
        value: Vec<u8>,
    ) -> Result<bool, EtcdError> {
        let key = bytes::Bytes::from(key);
        let compare = Compare {
            result: COMPARE_EQUAL,
            target: COMPARE_MOD_REVISION,
            key: key.clone(),
            mod_revision: Some(last_changed),
        };
        let put = PutRequest { key, value: value.into(), lease: 0 };
        let success = vec![RequestOp { request_put: Some(put) }];
        let message = TxnRequest { compare: vec![compare], success };
        let done: TxnResponse = self.call("/etcdserverpb.KV/Txn", message).await?;
        Ok(done.succeeded)
    }
}

type EtcdIo = Either<tokio::net::TcpStream, tokio_rustls::client::TlsStream<tokio::net::TcpStream>>;

pub(super) async fn connect(
    at: &Target,
    tls: Option<Arc<ClientConfig>>,
    resolver: &Resolver,
) -> io::Result<EtcdIo> {
    let addresses = resolver.lookup_target(at).await.map_err(io::Error::other)?;
    let socket = dial(&at.host, &addresses, CALL_TIMEOUT).await.map_err(io::Error::other)?;
    let Some(tls) = tls else { return Ok(Either::Left(socket)) };
    let name = server_name(&at.host.to_string()).map_err(io::Error::other)?;
    Ok(Either::Right(TlsConnector::from(tls).connect(name, socket).await?))
}

/// Returns an error's root cause: tonic's own text is just "transport error".
fn cause_of(error: &dyn std::error::Error) -> String {
    let causes = std::iter::successors(error.source(), |cause| cause.source());
    causes.last().map_or_else(|| error.to_string(), ToString::to_string)
}

/// etcd's numbers for comparisons.
const COMPARE_EQUAL: i32 = 0;
const COMPARE_MOD_REVISION: i32 = 2;
