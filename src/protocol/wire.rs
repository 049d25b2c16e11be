//! Bytes to frames and back: the two dialects, and the hello of a link.

pub mod codec;
pub mod extension;
pub mod frame;
pub mod hello;
pub mod opener;
pub mod peer;
pub mod plain;

#[cfg(test)]
mod recorded;
