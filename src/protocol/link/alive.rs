//! When a link's peer last sent anything, and when to ping it.

use std::time::Duration;

use tokio::time::Instant;

/// Time of the peer's last frame, and the ping or end that follows silence.
#[derive(Debug)]
pub(super) struct Alive {
    pub(super) last_received: Instant,
    pub(super) last_ping: Instant,
    pub(super) looked: Instant,
    /// Silence after which the link is given up.
    pub(super) silence_limit: Duration,
}

impl Alive {
    /// When to look for signs of life next.
    pub(super) fn next(&self) -> Instant {
        (self.last_received.max(self.last_ping) + PING_AFTER)
            .min(self.looked + PING_AFTER * 2)
            .max(self.looked + CHECK_INTERVAL)
    }
}

/// A peer that has sent nothing for this long is pinged.
pub(super) const PING_AFTER: Duration = Duration::from_secs(5);
/// A link on which nothing at all came in for this long is given up.
pub(super) const SILENT: Duration = Duration::from_secs(15);
/// The least time between two looks, so that clocks that stand still do not make us spin.
const CHECK_INTERVAL: Duration = Duration::from_millis(500);
/// SuperEdge's heartbeat, which a plain pod answers.
pub(super) const HEARTBEAT_EVERY: Duration = Duration::from_secs(60);
/// A plain edge sends a heartbeat each 60 s; HTTP/2's own pings notice a dead one much sooner.
pub(super) const SILENT_PLAIN_EDGE: Duration = Duration::from_secs(150);
