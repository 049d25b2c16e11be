//! Objects of the cluster that the holder of the Lease reconciles.

pub(crate) mod hosts_text;
pub mod lease;
pub mod node_names;
pub mod ports;
pub(crate) mod service_ports;
