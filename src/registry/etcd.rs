//! How this pod reaches an etcd: its members, tried in turn.

mod call;

use std::path::PathBuf;

pub use call::EtcdError;
pub(super) use call::{Connection, ErrorKind};

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

/// The member that is asked, and the connection to it.
#[derive(Debug)]
pub(super) struct EtcdMembers {
    access: EtcdAccess,
    resolver: Resolver,
    turn: usize,
    connection: Option<Connection>,
}

impl EtcdMembers {
    /// Nothing is asked yet.
    pub(super) fn new(access: EtcdAccess, resolver: Resolver) -> Self {
        Self { access, resolver, turn: 0, connection: None }
    }

    /// How many there are.
    pub(super) fn len(&self) -> usize {
        self.access.members.len()
    }

    /// The connection that there is, or a new one.
    pub(super) async fn connected(&mut self) -> Result<&Connection, EtcdError> {
        if self.connection.is_none() {
            let EtcdAccess { members, ca, identity, login } = &self.access;
            let Some((tls, at)) = members.get(self.turn % members.len().max(1)) else {
                return Err(EtcdError::NoMember);
            };
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
            self.connection = Some(Connection::open(at, tls, self.resolver.clone(), login.as_ref()).await?);
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
