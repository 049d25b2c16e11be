//! Where the records of a server's nodes are written for DNS.

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
    fn write<'a>(&'a mut self, records: &'a BTreeSet<String>) -> BoxFuture<'a, Result<(), PublishError>>;

    /// Removes our records.
    ///
    /// # Errors
    ///
    /// Returns why they could not be removed.
    fn withdraw(&mut self) -> BoxFuture<'_, Result<(), PublishError>>;

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

/// The reason why records could not be written. Only its text is used.
pub type PublishError = Box<dyn std::error::Error + Send + Sync>;
