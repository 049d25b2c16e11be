//! What this program says about itself: numbers for a scraper, lines for a reader.

mod access;
mod log;
mod metrics;
mod process;
mod refusals;
mod said;

pub use access::Access;
pub use log::{LogEnded, LogError, LogLevel, LogSettings, Logs};
pub use metrics::{Alive, Causes, Memory, Metrics, Sessions, Timing};
pub use process::third_of_memory;
pub use refusals::Refusals;
pub use said::said;
