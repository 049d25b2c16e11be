//! One end of a session without I/O: frames, codecs, the hello, the state machine and its two halves.

pub mod budget;
pub mod codec;
pub mod frame;
#[cfg(test)]
pub mod golden;
pub mod halves;
pub mod hello;
pub mod names;
pub mod printable;
pub mod state;
#[cfg(feature = "superedge")]
pub mod superedge;
mod text_forms;
pub mod window;
