//! The calls to one member of an etcd: the only place that knows its messages.

use std::fmt;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use futures_util::{FutureExt as _, stream};
use hyper_util::rt::TokioIo;
use tokio::time::timeout;
use tokio_rustls::TlsConnector;
use tokio_rustls::rustls::ClientConfig;
use tokio_util::either::Either;
use tonic::metadata::{Ascii, MetadataValue};
use tonic::transport::{Channel, Endpoint, Uri};
use tonic::{Code, Request, Response, Status};

use wire::auth_client::AuthClient;
use wire::kv_client::KvClient;
use wire::lease_client::LeaseClient;

use super::{CALL_TIMEOUT, EtcdAnswer, EtcdCalls};
use crate::names::{Host, Target};
use crate::net::dial::dial;
use crate::net::resolver::Resolver;
use crate::net::tls::server_name;
use crate::telemetry::printable;

/// The messages of `proto/etcd.proto`, compiled.
#[allow(missing_docs, unreachable_pub, missing_debug_implementations, clippy::all, reason = "generated")]
mod wire {
    include!(concat!(env!("OUT_DIR"), "/etcdserverpb.rs"));
}

/// Why etcd did not do as asked.
#[derive(Debug, thiserror::Error)]
pub enum EtcdError {
    /// The list of members is empty.
    #[error("no etcd member is named")]
    NoMember,
    /// It cannot be reached. Usual causes: it is down, a firewall, or TLS that does not fit.
    #[error("etcd at {at}: {cause}")]
    Unreachable {
        /// Which member.
        at: Target,
        /// All that is known.
        cause: String,
    },
    /// Files for TLS will not do.
    #[error("etcd_ca, etcd_cert, etcd_key: {0}")]
    Tls(String),
    /// The password cannot be read.
    #[error("etcd_password_file {}: {cause}", .path.display())]
    Password {
        /// Which file.
        path: PathBuf,
        /// The system's error.
        cause: io::Error,
    },
    /// It answered no.
    #[error("etcd at {at}: {} ({:?})", printable(.status.message()), .status.code())]
    Refused {
        /// Which member.
        at: Target,
        /// Its answer.
        status: Box<Status>,
    },
    /// The lease is gone.
    #[error("etcd has forgotten the lease")]
    LeaseLost,
}

/// What an error asks for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(in crate::registry) enum ErrorKind {
    /// To log in again.
    LoggedOut,
    /// A new lease.
    LeaseLost,
    /// Another member.
    Other,
}

/// One member, reached and logged in to.
pub(super) struct Connection {
    at: Target,
    channel: Channel,
    token: Option<MetadataValue<Ascii>>,
}

impl EtcdError {
    pub(in crate::registry) fn kind(&self) -> ErrorKind {
        match self {
            Self::LeaseLost => ErrorKind::LeaseLost,
            Self::Refused { status, .. } => match status.code() {
                Code::Unauthenticated => ErrorKind::LoggedOut,
                // A token from before users or roles were changed.
                Code::InvalidArgument if status.message().contains("auth") => ErrorKind::LoggedOut,
                Code::NotFound => ErrorKind::LeaseLost,
                _ => ErrorKind::Other,
            },
            _ => ErrorKind::Other,
        }
    }
}

impl Connection {
    /// Connects, and logs in if there is a user.
    pub(super) async fn open(
        at: &Target,
        tls: Option<Arc<ClientConfig>>,
        resolver: Resolver,
        login: Option<&(String, PathBuf)>,
    ) -> Result<Self, EtcdError> {
        let unreachable =
            |cause: &dyn fmt::Display| EtcdError::Unreachable { at: at.clone(), cause: cause.to_string() };
        // "http" though it may be TLS: tonic must leave that to our connector.
        let endpoint =
            Endpoint::from_shared(format!("http://{at}")).map_err(|e| unreachable(&cause_of(&e)))?;
        let endpoint = endpoint.timeout(CALL_TIMEOUT);
        let target = at.clone();
        let connector = tower::service_fn(move |_: Uri| {
            let (target, tls, resolver) = (target.clone(), tls.clone(), resolver.clone());
            async move { connect(&target, tls, &resolver).await.map(TokioIo::new) }
        });
        let opened = timeout(CALL_TIMEOUT, endpoint.connect_with_connector(connector)).await;
        let channel = opened
            .map_err(|_| unreachable(&format_args!("no answer within {CALL_TIMEOUT:?}")))?
            .map_err(|e| unreachable(&cause_of(&e)))?;
        let mut connection = Self { at: at.clone(), channel, token: None };
        if let Some((user, password_file)) = login {
            connection.token = Some(connection.authenticate(user, password_file).await?);
        }
        Ok(connection)
    }

    async fn authenticate(&self, user: &str, file: &Path) -> Result<MetadataValue<Ascii>, EtcdError> {
        let password = tokio::fs::read_to_string(file).await;
        let password = password.map_err(|cause| EtcdError::Password { path: file.to_owned(), cause })?;
        let password = password.trim_end_matches(['\r', '\n']).to_owned();
        let message = Request::new(wire::AuthenticateRequest { name: user.to_owned(), password });
        let answer = self.checked(AuthClient::new(self.channel.clone()).authenticate(message).await)?;
        answer.token.parse().map_err(|_| self.refused(Status::internal("a token that cannot be sent")))
    }

    fn request<T>(&self, message: T) -> Request<T> {
        let mut request = Request::new(message);
        if let Some(token) = &self.token {
            request.metadata_mut().insert("token", token.clone());
        }
        request
    }

    fn checked<T>(&self, answer: Result<Response<T>, Status>) -> Result<T, EtcdError> {
        answer.map(Response::into_inner).map_err(|status| self.refused(status))
    }

    fn refused(&self, status: Status) -> EtcdError {
        EtcdError::Refused { at: self.at.clone(), status: Box::new(status) }
    }
}

impl EtcdCalls for Connection {
    fn grant(&self, length: Duration) -> EtcdAnswer<'_, i64> {
        async move {
            let ttl = i64::try_from(length.as_secs()).unwrap_or(i64::MAX);
            let message = wire::LeaseGrantRequest { ttl, id: 0 };
            let answer = LeaseClient::new(self.channel.clone()).lease_grant(self.request(message)).await;
            Ok(self.checked(answer)?.id)
        }
        .boxed()
    }

    fn keep_alive(&self, lease: i64) -> EtcdAnswer<'_, bool> {
        async move {
            let message = stream::iter([wire::LeaseKeepAliveRequest { id: lease }]);
            let asking = async {
                let mut client = LeaseClient::new(self.channel.clone());
                let answer = client.lease_keep_alive(self.request(message)).await;
                let answer = self.checked(answer)?.message().await;
                answer.map_err(|status| self.refused(status))
            };
            let answer = timeout(CALL_TIMEOUT, asking).await;
            let answer =
                answer.map_err(|_| self.refused(Status::deadline_exceeded("no answer in time")))??;
            Ok(answer.is_some_and(|answer| answer.ttl > 0))
        }
        .boxed()
    }

    fn revoke(&self, lease: i64) -> EtcdAnswer<'_, ()> {
        async move {
            let message = self.request(wire::LeaseRevokeRequest { id: lease });
            match LeaseClient::new(self.channel.clone()).lease_revoke(message).await {
                Err(status) if status.code() != Code::NotFound => Err(self.refused(status)),
                _ => Ok(()),
            }
        }
        .boxed()
    }

    fn put(&self, key: Vec<u8>, value: Vec<u8>, lease: i64) -> EtcdAnswer<'_, ()> {
        async move {
            let message = wire::PutRequest { key: key.into(), value: value.into(), lease };
            let answer = KvClient::new(self.channel.clone()).put(self.request(message)).await;
            self.checked(answer).map(drop)
        }
        .boxed()
    }

    fn delete(&self, key: Vec<u8>) -> EtcdAnswer<'_, ()> {
        async move {
            let message = self.request(wire::DeleteRangeRequest { key: key.into() });
            let answer = KvClient::new(self.channel.clone()).delete_range(message).await;
            self.checked(answer).map(drop)
        }
        .boxed()
    }

    fn get(&self, key: Vec<u8>) -> EtcdAnswer<'_, Option<(Vec<u8>, i64)>> {
        async move {
            let message = self.request(wire::RangeRequest { key: key.into() });
            let answer = self.checked(KvClient::new(self.channel.clone()).range(message).await)?;
            Ok(answer.kvs.into_iter().next().map(|found| (found.value.into(), found.mod_revision)))
        }
        .boxed()
    }

    fn swap(&self, key: Vec<u8>, last_changed: i64, value: Vec<u8>) -> EtcdAnswer<'_, bool> {
        async move {
            let key = bytes::Bytes::from(key);
            let compare = wire::Compare {
                result: COMPARE_EQUAL,
                target: COMPARE_MOD_REVISION,
                key: key.clone(),
                mod_revision: Some(last_changed),
            };
            let put = wire::PutRequest { key, value: value.into(), lease: 0 };
            let success = vec![wire::RequestOp { request_put: Some(put) }];
            let message = self.request(wire::TxnRequest { compare: vec![compare], success });
            Ok(self.checked(KvClient::new(self.channel.clone()).txn(message).await)?.succeeded)
        }
        .boxed()
    }
}

impl fmt::Debug for Connection {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Connection").field("at", &self.at).finish_non_exhaustive()
    }
}

type Line = Either<tokio::net::TcpStream, tokio_rustls::client::TlsStream<tokio::net::TcpStream>>;

async fn connect(at: &Target, tls: Option<Arc<ClientConfig>>, resolver: &Resolver) -> io::Result<Line> {
    let host = match &at.host {
        Host::Ip(ip) => ip.to_string(),
        Host::Name(name) => name.to_string(),
    };
    let addresses = resolver.lookup(&host).await.map_err(io::Error::other)?;
    let addresses: Vec<_> = addresses.into_iter().map(|ip| (ip, at.port).into()).collect();
    let socket = dial(&addresses, CALL_TIMEOUT).await.map_err(io::Error::other)?;
    let Some(tls) = tls else { return Ok(Either::Left(socket)) };
    let name = server_name(&host).map_err(io::Error::other)?;
    Ok(Either::Right(TlsConnector::from(tls).connect(name, socket).await?))
}

/// An error with its causes: tonic's own words are just "transport error".
fn cause_of(error: &dyn std::error::Error) -> String {
    let causes = std::iter::successors(error.source(), |cause| cause.source());
    causes.last().map_or_else(|| error.to_string(), ToString::to_string)
}

/// etcd's numbers of comparisons.
const COMPARE_EQUAL: i32 = 0;
const COMPARE_MOD_REVISION: i32 = 2;
