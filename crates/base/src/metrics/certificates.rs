//! Expiration of certificates.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use parking_lot::Mutex;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;

/// The expiration time of each certificate, by the config key of its file.
#[derive(Debug, Clone, Default)]
pub struct CertificateExpiryMetric(
    pub(super) Family<[(&'static str, String); 1], Gauge>,
    Arc<Mutex<BTreeMap<String, u64>>>,
);

impl CertificateExpiryMetric {
    /// Sets the expiration time in seconds since 1970.
    pub fn set(&self, key: &str, end: u64) {
        self.0.get_or_create(&[("key", key.to_owned())]).set(i64::try_from(end).unwrap_or(i64::MAX));
        self.1.lock().insert(key.to_owned(), end);
    }

    /// Removes the certificates of all other config keys.
    pub fn retain(&self, keys: &BTreeSet<&str>) {
        self.1.lock().retain(|key, _| {
            let is_kept = keys.contains(key.as_str());
            if !is_kept {
                self.0.remove(&[("key", key.clone())]);
            }
            is_kept
        });
    }

    /// Returns the expiration times by config key, in seconds since 1970.
    pub fn all(&self) -> BTreeMap<String, u64> {
        self.1.lock().clone()
    }
}
