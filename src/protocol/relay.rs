//! What only passes through this pod: sessions whose two ends are at other processes.

pub(super) mod queue;
pub(super) mod table;
