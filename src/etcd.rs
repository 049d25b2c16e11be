//! An etcd client: members, tried in turn, and calls to one member.

pub mod member;
/// Generated messages of `proto/etcd.proto`.
#[allow(missing_docs, unreachable_pub, missing_debug_implementations, clippy::all, reason = "generated")]
#[rustfmt::skip]
pub mod wire;

use std::fmt;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use futures_util::FutureExt as _;
use futures_util::future::BoxFuture;
use tracing::debug;

use crate::etcd::member::{EtcdConnection, EtcdError, EtcdErrorKind};
use tunnel_net::resolver::Resolver;
use tunnel_net::tls::{IdentityFiles, TlsClientConfig, Trust};
use tunnel_proto::names::Target;

/// An etcd cluster and the credentials for it.
#[derive(Debug, Clone)]
pub struct EtcdAccess {
    /// Members, tried in turn: whether each uses TLS, and its address. At least one.
    pub members: Vec<(bool, Target)>,
    /// PEM file of the CA for the members' certificates; required for members with TLS.
    pub ca: Option<PathBuf>,
    /// Client certificate.
    pub identity: Option<IdentityFiles>,
    /// User and password file, which is read at each login.
    pub login: Option<(String, PathBuf)>,
}

/// Opens a connection to the member of this index (from 0), logged in if required. Takes at most twice
/// [`CALL_TIMEOUT`].
pub type EtcdConnector = dyn Fn(usize) -> BoxFuture<'static, Result<EtcdConnection, EtcdError>> + Send + Sync;

/// The members of an etcd cluster, dialled in turn, and the connection to the current one.
#[derive(derive_more::Debug)]
#[debug("EtcdClient({turn})")]
pub struct EtcdClient {
    /// Number of members.
    count: usize,
    open: Box<EtcdConnector>,
    /// Counts up with each change of the member; modulo their number, it is the index of the current one.
    turn: usize,
    connection: Option<EtcdConnection>,
}

/// The failed calls of one operation.
#[derive(Debug, Default)]
pub(crate) struct FailedCalls {
    /// Number of members that have failed.
    members: usize,
    /// Whether the login or lease at the current member had expired.
    has_expired: bool,
    /// The most telling error so far.
    reason: Option<EtcdError>,
}

impl EtcdClient {
    /// Creates a list of this many members without connecting.
    pub fn new(count: usize, open: Box<EtcdConnector>) -> Self {
        Self { count, open, turn: 0, connection: None }
    }

    /// Creates the list of the configured members without connecting.
    pub fn of(access: EtcdAccess, resolver: Resolver) -> Self {
        let count = access.members.len();
        let access = Arc::new(access);
        let open = move |member| {
            let access = access.clone();
            let resolver = resolver.clone();
            async move { access.connect(member, resolver).await }.boxed()
        };
        Self::new(count, Box::new(open))
    }

    /// Returns the current connection, or connects.
    pub(crate) async fn connected(&mut self) -> Result<&EtcdConnection, EtcdError> {
        let connection = match self.connection.take() {
            Some(connection) => connection,
            None => (self.open)(self.turn % self.count.max(1)).await?,
        };
        Ok(self.connection.insert(connection))
    }

    /// Calls the members in turn until one succeeds: each once, and once more after an expired login or lease.
    pub(crate) async fn call<T, F: Future<Output = Result<T, EtcdError>>>(
        &mut self,
        call: impl Fn(EtcdConnection) -> F,
    ) -> Result<T, EtcdError> {
        let mut failed = FailedCalls::default();
        loop {
            let done = match self.connected().await {
                Ok(connection) => call(connection.clone()).await,
                Err(cause) => Err(cause),
            };
            match done {
                Ok(done) => return Ok(done),
                Err(cause) => self.retry(cause, &mut failed)?,
            }
        }
    }

    /// Prepares the next call after one that failed: to the same member if only the login or the lease has expired, and
    /// otherwise to the next member.
    ///
    /// # Errors
    ///
    /// Returns the most telling error once all members have failed.
    pub(crate) fn retry(&mut self, cause: EtcdError, failed: &mut FailedCalls) -> Result<(), EtcdError> {
        debug!(error = %cause, "etcd member failed");
        let kind = cause.kind();
        let cause = cause.or_answer_of(failed.reason.take());
        if kind == EtcdErrorKind::Other || failed.has_expired {
            self.next();
            failed.has_expired = false;
            failed.members += 1;
            if failed.members >= self.count {
                return Err(cause);
            }
        } else {
            failed.has_expired = true;
            self.connection.take_if(|_| kind == EtcdErrorKind::LoggedOut);
        }
        failed.reason = Some(cause);
        Ok(())
    }

    /// Drops the connection and selects the next member.
    pub(crate) fn next(&mut self) {
        self.connection = None;
        self.turn = self.turn.wrapping_add(1);
    }
}

impl EtcdAccess {
    async fn connect(&self, member: usize, resolver: Resolver) -> Result<EtcdConnection, EtcdError> {
        let Self { members, ca, identity, login } = self;
        let wrong = |cause: &dyn fmt::Display| {
            EtcdError::NotConnected(format!("ca, cert or key of the table etcd: {cause}"))
        };
        let (tls, at) = members
            .get(member)
            .ok_or_else(|| EtcdError::NotConnected("no etcd member is configured".to_owned()))?;
        let tls = match (tls, ca) {
            (false, _) => None,
            (true, None) => return Err(wrong(&"no CA is configured")),
            (true, Some(ca)) => {
                let client = TlsClientConfig {
                    trust: Trust::Ca(ca.clone()),
                    identity: identity.clone(),
                    alpn: vec![b"h2".to_vec()],
                };
                // Read for each connection, so that renewed certificates need no watcher.
                let loaded = tokio::task::spawn_blocking(|| client.load()).await;
                let loaded = loaded.map_err(|cause| wrong(&cause))?;
                Some(loaded.map_err(|cause| wrong(&cause))?.load())
            }
        };
        EtcdConnection::open(at, tls, resolver, login.as_ref()).await
    }
}

/// Timeout for connecting and for each call. A lease must outlast one unresponsive member and the attempt at the next.
pub const CALL_TIMEOUT: Duration = Duration::from_secs(3);

#[cfg(test)]
pub(crate) mod tests {
    use bytes::Bytes;
    use futures_util::{StreamExt as _, stream};
    use http_body_util::StreamBody;
    use tokio::time::sleep;
    use tonic::Status;
    use tonic::body::Body;
    use tower::util::BoxCloneSyncService;

    use super::*;

    /// Returns a cluster of a dead member and one without space.
    pub(crate) fn dead_and_full() -> EtcdClient {
        let open = |member| {
            let service = tower::service_fn(|_: http::Request<Body>| async {
                Err::<http::Response<Body>, _>(Status::resource_exhausted("database space exceeded"))
            });
            let channel = BoxCloneSyncService::new(service);
            let opened = match member {
                0 => Err(EtcdError::NotConnected("refused".to_owned())),
                _ => Ok(EtcdConnection::over("etcd:2379".parse().unwrap(), channel)),
            };
            std::future::ready(opened).boxed()
        };
        EtcdClient::new(2, Box::new(open))
    }

    #[tokio::test(start_paused = true)]
    async fn a_long_answer_may_arrive_slowly() {
        let service = tower::service_fn(|_: http::Request<Body>| async {
            // An answer without a key, byte by byte.
            let frames = stream::iter(0..6).then(|n| async move {
                sleep(CALL_TIMEOUT - Duration::from_secs(1)).await;
                let ok = ("grpc-status".parse().unwrap(), "0".parse().unwrap());
                Ok::<_, Status>(match n {
                    5 => http_body::Frame::trailers(http::HeaderMap::from_iter([ok])),
                    _ => http_body::Frame::data(Bytes::from_static(&[0])),
                })
            });
            Ok::<_, Status>(http::Response::new(Body::new(StreamBody::new(Box::pin(frames)))))
        });
        let channel = BoxCloneSyncService::new(service);
        let member = EtcdConnection::over("etcd:2379".parse().unwrap(), channel);
        assert!(member.get(b"a".to_vec()).await.unwrap().is_none());
    }

    #[tokio::test]
    async fn the_reason_of_a_member_that_answers_outweighs_that_of_a_dead_one() {
        let call = |member: EtcdConnection| async move { member.get(b"a".to_vec()).await };
        let refused = dead_and_full().call(call).await.unwrap_err().to_string();
        assert!(refused.contains("space exceeded"), "{refused}");
    }
}
