//! What this program says about itself: numbers for a scraper, lines for a reader.

pub mod access;
pub mod log;
pub mod metrics;
mod process;
pub mod refusals;
pub mod said;

pub use access::Access;
pub use metrics::Metrics;
pub use process::third_of_memory;
pub use refusals::Refusals;
pub use said::said;
