//! x
pub mod end;
