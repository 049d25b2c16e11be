//! Links, and sessions that outlive them.

pub mod backup;
pub mod congestion;
mod frame_log;
pub mod grpc;
pub mod link;
pub mod link_reader;
pub mod liveness;
mod lock;
#[cfg_attr(not(feature = "superedge"), path = "without_plain.rs")]
mod plain;
pub mod relay;
pub mod schedule;
pub mod table;

pub use plain::SUPEREDGE;
