//! Links, and sessions that outlive them.

#![cfg_attr(
    not(all(feature = "invitations", feature = "superedge")),
    allow(
        dead_code,
        clippy::needless_pass_by_value,
        reason = "only optional parts use some functions and arguments"
    )
)]

pub mod congestion;
#[cfg_attr(not(feature = "superedge"), path = "foreign/absent.rs")]
mod foreign;
mod frame_log;
pub mod grpc;
pub mod link;
mod lock;
pub mod relay;
pub mod schedule;
pub mod sender;
pub mod table;
