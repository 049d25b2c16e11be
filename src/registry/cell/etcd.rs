//! A shared text in one key of etcd.

use tracing::debug;

use super::{CellError, Seen};
use crate::net::resolver::Resolver;
use crate::registry::etcd::{ErrorKind, EtcdAccess, EtcdError, EtcdMembers, GrpcDialer};

/// One key of an etcd.
#[derive(Debug)]
pub struct EtcdCell {
    members: EtcdMembers,
    key: Vec<u8>,
}

impl EtcdCell {
    /// Nothing is asked yet.
    pub fn new(access: EtcdAccess, key: &str, resolver: Resolver) -> Self {
        let dialer = GrpcDialer::new(access, resolver);
        Self { members: EtcdMembers::new(dialer), key: key.as_bytes().to_vec() }
    }

    pub(super) async fn read(&mut self) -> Result<Seen, CellError> {
        let mut left = self.members.len();
        loop {
            let found = match self.members.connected().await {
                Ok(connection) => connection.get(self.key.clone()).await,
                Err(cause) => Err(cause),
            };
            match found {
                Ok(None) => return Ok(Seen::default()),
                Ok(Some((text, changed))) => return Ok(Seen { text, version: changed.to_string() }),
                Err(cause) => self.failed(cause, &mut left)?,
            }
        }
    }

    pub(super) async fn write(&mut self, seen: &Seen, text: &[u8]) -> Result<bool, CellError> {
        let last_changed = seen.version.parse().unwrap_or(0);
        let mut left = self.members.len();
        loop {
            let swapped = match self.members.connected().await {
                Ok(connection) => connection.swap(self.key.clone(), last_changed, text.to_vec()).await,
                Err(cause) => Err(cause),
            };
            match swapped {
                // After a try whose answer was lost this may be false although we have written.
                Ok(swapped) => return Ok(swapped),
                Err(cause) => self.failed(cause, &mut left)?,
            }
        }
    }

    /// Goes on to the next of the members that are `left`; where the login is over, to the same one with a new login.
    fn failed(&mut self, cause: EtcdError, left: &mut usize) -> Result<(), EtcdError> {
        debug!(%cause, "an etcd member failed");
        if cause.kind() == ErrorKind::LoggedOut {
            self.members.forget();
        } else {
            self.members.next();
        }
        *left = left.checked_sub(1).ok_or(cause)?;
        Ok(())
    }
}
