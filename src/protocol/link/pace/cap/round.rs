//! What the cap learns in one round trip, and what it tries over some.

use std::time::Duration;

use tokio::time::Instant;

/// One round trip, or 10 ms if that is longer.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct Round {
    pub(super) since: Option<Instant>,
    pub(super) delivered: u64,
    pub(super) least: Option<Duration>,
    pub(super) hit: bool,
    /// Much is under way, whether the cap is what holds it or the kernel.
    pub(super) near: bool,
    /// Less than half of the cap is under way.
    pub(super) low: bool,
}

/// Some rounds below the cap, which empty the queue that we may keep standing ourselves.
#[derive(Debug, Clone, Copy)]
pub(super) struct Renewal {
    /// Which of its steps is on.
    pub(super) step: usize,
    pub(super) least: Option<Duration>,
}

/// The cap was lowered: does the queue become shorter?
#[derive(Debug, Clone, Copy)]
pub(super) struct Trial {
    /// The cap and the round trip before.
    pub(super) bytes: u64,
    pub(super) trip: Duration,
    /// By how much the round trip should be shorter now.
    pub(super) shorter: Duration,
}

/// How long the cap is reached, in all, before the least round trip is renewed.
pub(super) fn renew_after(least: Duration) -> Duration {
    RENEW_AFTER.max(least * RENEW_AFTER_TRIPS)
}

/// After this long at the cap the least round trip is measured anew, as the route may have changed.
const RENEW_AFTER: Duration = Duration::from_secs(10);
/// But not within so many round trips, as it takes some.
const RENEW_AFTER_TRIPS: u32 = 100;
/// The cap in each round of a renewal, in eighths: two at half, which show the least round trip, then up in steps, as
/// half a cap let loose at once would itself be a queue.
pub(super) const RENEWAL_EIGHTHS: [u64; 5] = [4, 4, 5, 6, 7];
