//! How this pod reaches an etcd: its members, tried in turn.

mod call;

use std::fmt;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use futures_util::FutureExt as _;
use futures_util::future::BoxFuture;

use call::Connection;
pub(super) use call::ErrorKind;
pub use call::EtcdError;

use crate::names::Target;
use crate::net::resolver::Resolver;
use crate::net::tls::{ClientSettings, Identity, Trust};

/// An etcd, and how to be let in.
#[derive(Debug, Clone)]
pub struct EtcdAccess {
    /// Its members, tried in turn: whether each takes TLS, and its address; at least one.
    pub members: Vec<(bool, Target)>,
    /// PEM file of the authority that members are believed with; members with TLS need one.
    pub ca: Option<PathBuf>,
    /// What we show of ourselves.
    pub identity: Option<Identity>,
    /// User, and the file of the password, which is read at each login.
    pub login: Option<(String, PathBuf)>,
}

/// What a member of an etcd answers, once it has.
pub type EtcdAnswer<'a, T> = BoxFuture<'a, Result<T, EtcdError>>;

/// Makes connections to the members of an etcd.
pub trait EtcdDialer: fmt::Debug + Send + Sync {
    /// How many members there are.
    fn members(&self) -> usize;

    /// Connects to the member of that number, from 0 on, and logs in there if need be. Takes twice [`CALL_TIMEOUT`] at most.
    fn open(&self, member: usize) -> EtcdAnswer<'_, Arc<dyn EtcdCalls>>;
}

/// What a member of an etcd is asked. Each call takes [`CALL_TIMEOUT`] at most; one that is dropped may be carried out.
pub trait EtcdCalls: fmt::Debug + Send + Sync {
    /// A lease of this length; its id.
    fn grant(&self, length: Duration) -> EtcdAnswer<'_, i64>;

    /// Whether there still is such a lease, from now on for its whole length.
    fn keep_alive(&self, lease: i64) -> EtcdAnswer<'_, bool>;

    /// Ends a lease, and with it its keys. One that is gone already is ended.
    fn revoke(&self, lease: i64) -> EtcdAnswer<'_, ()>;

    /// Writes a key, which goes with the lease.
    fn put(&self, key: Vec<u8>, value: Vec<u8>, lease: i64) -> EtcdAnswer<'_, ()>;

    /// Deletes a key, if it is there.
    fn delete(&self, key: Vec<u8>) -> EtcdAnswer<'_, ()>;

    /// A key's value, and when it was last changed; `None`: there is no such key.
    fn get(&self, key: Vec<u8>) -> EtcdAnswer<'_, Option<(Vec<u8>, i64)>>;

    /// Writes a key if it was last changed then, 0 for one that must not be there. Whether it was.
    fn swap(&self, key: Vec<u8>, last_changed: i64, value: Vec<u8>) -> EtcdAnswer<'_, bool>;
}

/// The member that is asked, and the connection to it.
#[derive(Debug)]
pub(super) struct EtcdMembers {
    dialer: Arc<dyn EtcdDialer>,
    turn: usize,
    connection: Option<Arc<dyn EtcdCalls>>,
}

impl EtcdMembers {
    /// Nothing is asked yet.
    pub(super) fn new(dialer: Arc<dyn EtcdDialer>) -> Self {
        Self { dialer, turn: 0, connection: None }
    }

    /// How many there are.
    pub(super) fn len(&self) -> usize {
        self.dialer.members()
    }

    /// The connection that there is, or a new one.
    pub(super) async fn connected(&mut self) -> Result<&Arc<dyn EtcdCalls>, EtcdError> {
        if self.connection.is_none() {
            self.connection = Some(self.dialer.open(self.turn % self.len().max(1)).await?);
        }
        self.connection.as_ref().ok_or(EtcdError::NoMember)
    }

    /// The next question begins with a new connection, and a new login.
    pub(super) fn forget(&mut self) {
        self.connection = None;
    }

    /// The next question goes to the next member.
    pub(super) fn next(&mut self) {
        self.forget();
        self.turn = self.turn.wrapping_add(1);
    }
}

/// Dials members as the settings say.
#[derive(Debug)]
pub(super) struct GrpcDialer {
    access: EtcdAccess,
    resolver: Resolver,
}

impl GrpcDialer {
    pub(super) fn new(access: EtcdAccess, resolver: Resolver) -> Arc<Self> {
        Arc::new(Self { access, resolver })
    }

    async fn connect(&self, member: usize) -> Result<Connection, EtcdError> {
        let EtcdAccess { members, ca, identity, login } = &self.access;
        let (tls, at) = members.get(member).ok_or(EtcdError::NoMember)?;
        let tls = match (tls, ca) {
            (false, _) => None,
            (true, None) => return Err(EtcdError::Tls("no authority is named".into())),
            (true, Some(ca)) => {
                let client = ClientSettings {
                    trust: Trust::Ca(ca.clone()),
                    identity: identity.clone(),
                    alpn: vec![b"h2".to_vec()],
                };
                // Read at each connection, so a renewed certificate needs no watching.
                let loaded = tokio::task::spawn_blocking(|| client.load()).await;
                let loaded = loaded.map_err(|cause| EtcdError::Tls(cause.to_string()))?;
                Some(loaded.map_err(|cause| EtcdError::Tls(cause.to_string()))?.load())
            }
        };
        Connection::open(at, tls, self.resolver.clone(), login.as_ref()).await
    }
}

impl EtcdDialer for GrpcDialer {
    fn members(&self) -> usize {
        self.access.members.len()
    }

    fn open(&self, member: usize) -> EtcdAnswer<'_, Arc<dyn EtcdCalls>> {
        async move { Ok(Arc::new(self.connect(member).await?) as Arc<dyn EtcdCalls>) }.boxed()
    }
}

/// For a connection and for each call: a lease must outlast one member that does not answer and the try at the next.
pub const CALL_TIMEOUT: Duration = Duration::from_secs(3);
