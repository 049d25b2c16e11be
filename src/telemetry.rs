//! What this program says about itself: numbers for a scraper, lines for a reader.

pub mod log;
pub mod metrics;
mod process;

pub use metrics::Metrics;
