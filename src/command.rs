//! Commands for people.

pub mod args;
pub mod demo;
