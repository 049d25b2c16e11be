//! What one server, the holder of the Lease, keeps true in the cluster.

#[cfg(feature = "kubernetes")]
pub mod lease;
#[cfg(feature = "kubernetes")]
pub mod node_names;
#[cfg(feature = "kubernetes")]
pub mod ports;
