//! Bytes, time, and bytes a second.

use std::time::Duration;

/// Bytes a second, of so many in a time.
pub(super) fn per_second(bytes: u64, took: Duration) -> u64 {
    let micros = took.as_micros().max(1);
    u64::try_from(u128::from(bytes) * 1_000_000 / micros).unwrap_or(u64::MAX)
}

/// What `rate` bytes a second carry in a time.
pub(super) fn carried(rate: u64, time: Duration) -> u64 {
    u64::try_from(u128::from(rate) * time.as_micros() / 1_000_000).unwrap_or(u64::MAX)
}

/// How long so many bytes take at `rate` bytes a second.
pub(super) fn time_of(bytes: u64, rate: u64) -> Duration {
    let micros = u128::from(bytes) * 1_000_000 / u128::from(rate.max(1));
    Duration::from_micros(u64::try_from(micros).unwrap_or(u64::MAX))
}
