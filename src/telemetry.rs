//! Metrics and logs of this program.

mod access;
mod log;
mod metrics;
mod printable;
mod process;
mod refusals;

pub use access::Access;
pub use log::{AUDIT, FRAMES, LogEnded, LogError, LogLevel, LogSettings, Logs, log_trouble, lost_lines};
pub use metrics::{Alive, Causes, Certificates, Form, Memory, Metrics, Requests, Sessions, Timing, UnderWay};
pub use printable::printable;
pub use process::third_of_memory;
pub use refusals::Refusals;
