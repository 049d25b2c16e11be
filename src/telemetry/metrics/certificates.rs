//! When certificates end.

use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;

use super::labels::KeyLabels;

/// The time at which each certificate ends, by the key that names its file.
#[derive(Debug, Clone, Default)]
pub struct Certificates(pub(super) Family<KeyLabels, Gauge>);

impl Certificates {
    /// Sets it, in seconds since 1970.
    pub fn set(&self, key: &'static str, end: u64) {
        self.0.get_or_create(&KeyLabels { key }).set(i64::try_from(end).unwrap_or(i64::MAX));
    }
}
