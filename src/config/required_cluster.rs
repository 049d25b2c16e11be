//! The cluster that a table requires.

use crate::config::cluster::{ClusterSettings, reached};
use crate::config::table::ConfigTableReader;

/// Returns the cluster if a table needs one. `key` is the key that needs it, for the error if there is none.
pub(crate) fn required_cluster(
    table: &ConfigTableReader<'_>,
    key: &'static str,
    is_needed: bool,
) -> Option<ClusterSettings> {
    let error = |why| table.error(key, Some("requires Kubernetes".to_owned()), why);
    is_needed.then(|| reached(table.env).map_err(error).ok()).flatten()
}

/// The minimum in Kubernetes, in milliseconds.
pub(crate) const MIN_LIFETIME: u64 = 600 * 1000;

/// Ten years, in milliseconds.
pub(crate) const MAX_LIFETIME: u64 = 10 * 366 * 24 * 3600 * 1000;
