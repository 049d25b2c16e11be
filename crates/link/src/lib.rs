//! Links, and sessions that outlive them.

pub mod congestion;
pub mod grpc;
pub mod link;
mod lock;
pub mod relay;
pub mod schedule;
pub mod sender;
pub mod table;
