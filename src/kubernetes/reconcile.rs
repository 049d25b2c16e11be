//! Objects of the cluster that the holder of the Lease reconciles.

#[cfg(feature = "kubernetes")]
pub mod lease;
#[cfg(feature = "kubernetes")]
pub mod node_names;
#[cfg(feature = "kubernetes")]
pub mod ports;
