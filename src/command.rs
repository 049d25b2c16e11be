//! Commands for people.

pub mod demo;
