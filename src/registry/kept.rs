//! Objects of Kubernetes that pods keep as they should be: ports of a Service, names of nodes for DNS.

mod lease;
mod node_names;
mod ports;

pub use node_names::{NodeNameParams, NodeNames};
pub use ports::{PortParams, PortWatch};
