//! What only passes through this pod: sessions whose two ends are at other processes.

pub mod queue;
pub mod request;
pub mod table;
