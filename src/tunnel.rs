//! The protocol: links, and sessions that outlive them. This page is what upper layers may use.

pub mod budget;
pub mod frame;
pub mod pace;
pub mod recv;
pub mod schedule;
pub mod send;
pub mod session;

pub use frame::{Category, Code, Refusal};
