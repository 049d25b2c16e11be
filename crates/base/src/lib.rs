//! Basic types that every other module may use: policies, the address book, logs and metrics.

pub mod access_log;
pub mod addresses;
pub mod backoff;
pub mod drain;
pub mod files;
pub mod logging;
pub mod metrics;
pub mod policy;
pub mod process;
pub mod refusal_log;
pub mod serde_forms;
mod serde_text;
pub mod silence;
pub mod stores;
pub mod unix_time;
