//! `tunnel`: reach edge nodes behind NAT by name, through HTTP CONNECT.

pub mod config;
pub mod drain;
pub mod names;
pub mod net;
pub mod policy;
pub mod route;
pub mod tunnel;
