//! Commands for people.

mod args;
mod demo;
mod manual;

pub use args::{Args, Command, Form, Mode, is_wrong};
pub use demo::{Module, run as demo};
pub use manual::{completions, man};
