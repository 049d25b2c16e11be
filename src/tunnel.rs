//! The protocol: links, and sessions that outlive them. This page is what upper layers may use.

pub mod budget;
pub mod frame;
pub mod recv;
pub mod send;

pub use frame::{Category, Code, Refusal};
