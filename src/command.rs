//! Commands for people.

mod args;
mod demo;

pub use args::{Args, Command, Form, Mode, is_wrong};
pub use demo::{Module, run as demo};
