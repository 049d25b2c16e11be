//! Where servers keep what others read: the records of their nodes, and texts that all servers of a cloud share.

use std::collections::BTreeSet;
use std::fmt;
use std::net::IpAddr;
use std::time::Duration;

use futures_util::future::BoxFuture;
use tokio::time::Instant;

/// A store in which a server writes the records of its nodes: a hosts file, etcd, or a ConfigMap.
pub trait RecordStore: fmt::Debug + Send + Sync {
    /// Replaces our records with these. Not cancel safe: a write in progress may continue.
    ///
    /// # Errors
    ///
    /// Returns why the records could not be written; the caller tries again.
    fn write<'a>(&'a mut self, records: &'a BTreeSet<String>) -> StoreFuture<'a, ()>;

    /// Removes our records.
    ///
    /// # Errors
    ///
    /// Returns why they could not be removed.
    fn withdraw(&mut self) -> StoreFuture<'_, ()>;

    /// Returns the addresses of all servers that have records, including stopped ones. Empty if the store does not list
    /// them.
    fn servers(&self) -> BoxFuture<'_, BTreeSet<IpAddr>>;

    /// Returns the time of the next write without changes.
    fn due(&self) -> Instant;

    /// Returns the debounce time of changes.
    fn debounce_time(&self) -> Duration {
        Duration::ZERO
    }
}

/// The store of a text that is shared by all servers: a file, etcd, or a Secret of Kubernetes. Its display tells where.
pub trait TextStore: fmt::Debug + fmt::Display + Send {
    /// Reads the text.
    ///
    /// # Errors
    ///
    /// Fails if the store does not respond or denies access.
    fn read(&mut self) -> StoreFuture<'_, VersionedText>;

    /// Reads the text unless it is as it was `seen` last. By default reads it, and compares.
    ///
    /// # Errors
    ///
    /// Like [`Self::read`].
    fn read_since<'a>(&'a mut self, seen: &'a VersionedText) -> StoreFuture<'a, Option<VersionedText>> {
        Box::pin(async move { Ok(Some(self.read().await?).filter(|read| read != seen)) })
    }

    /// Writes the text if it has not changed since `seen`. Returns false, without writing, if another server changed
    /// it. Not cancel safe: if the call is dropped, the text may or may not be written.
    ///
    /// # Errors
    ///
    /// Like [`Self::read`]; after an error the text may or may not be written.
    fn write<'a>(&'a mut self, seen: &'a VersionedText, text: Vec<u8>) -> StoreFuture<'a, bool>;
}

/// The result of a store's operation, once it is done.
pub type StoreFuture<'a, T> = BoxFuture<'a, Result<T, StoreError>>;

/// The reason why a store could not be read or written. Only its text is used.
pub type StoreError = Box<dyn std::error::Error + Send + Sync>;

/// A shared text as read from its store. It is given back when writing, to detect another server's
/// change.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct VersionedText {
    /// The text; empty if none was written yet.
    pub text: Vec<u8>,
    /// Version number in the store; empty if the text does not exist, or if the store compares the text itself.
    pub version: String,
    /// Whether it is a file that does not exist.
    pub is_missing: bool,
}
