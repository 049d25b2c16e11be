//! `tunnel`: reach edge nodes behind NAT by name, through HTTP CONNECT.

pub mod admin;
pub mod backend;
pub mod cloud;
pub mod config;
pub mod drain;
pub mod edge;
pub mod frontend;
pub mod names;
pub mod net;
pub mod policy;
pub mod registry;
pub mod route;
pub mod telemetry;
pub mod tunnel;
