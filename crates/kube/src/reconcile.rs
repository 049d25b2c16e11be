//! Objects of the cluster that the holder of the Lease reconciles.

pub mod lease;
pub mod node_names;
pub mod ports;
