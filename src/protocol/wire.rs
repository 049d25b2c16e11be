//! Bytes to frames and back: the two dialects, and what two peers say of themselves when they meet.

pub mod codec;
pub mod extension;
pub mod frame;
pub mod hello;
pub mod opener;
pub mod peer;
pub mod plain;

#[cfg(test)]
mod recorded;
