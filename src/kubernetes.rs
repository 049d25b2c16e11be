//! Access to a cluster's API: the objects that are read from it and written to it.

#[cfg(feature = "kubernetes")]
pub mod address_watch;
#[cfg(feature = "kubernetes")]
pub mod cluster;
#[cfg(feature = "kubernetes")]
pub mod csr;
#[cfg(feature = "kubernetes")]
pub mod members;
pub mod reconcile;
#[cfg(feature = "kubernetes")]
pub mod watcher;
