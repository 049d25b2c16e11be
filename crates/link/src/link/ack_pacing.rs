//! Pacing of acknowledgements: Pongs and credits are sent together, a few times per RTT.
//!
//! While bulk is received, each would be a packet of its own. The kernel's congestion window grows as long as such
//! packets use half of it. From a window of 16 packets on, and with nine acknowledgements per RTT, cubic leaves
//! slow start for good once the RTT of these packets grows. It does grow, because they queue behind the bulk; our
//! later bulk would then start at the rate of the small packets. Four per RTT keep the window near its initial ten.

use std::time::Duration;

use tokio::time::Instant;

use tunnel_net::tcp_info::TcpInfo;

/// When Pongs and credits are sent on one link.
#[derive(Debug, Default)]
pub(crate) struct AckPacing {
    /// When some were sent last.
    went: Option<Instant>,
    /// Minimum time between two of them.
    apart: Duration,
    /// Whether they are sent at once: one of them is urgent, or another frame is sent anyway.
    hurried: bool,
    /// When the kernel was last read.
    read: Option<Instant>,
}

impl AckPacing {
    /// Returns true if they may be sent now.
    pub(crate) fn may_go(&self, now: Instant) -> bool {
        self.hurried || self.next().is_none_or(|next| next <= now)
    }

    /// Returns when they may be sent if nothing else is sent before.
    pub(crate) fn next(&self) -> Option<Instant> {
        self.went.map(|went| went + self.apart)
    }

    /// Records that one is sent now; the others go with it.
    pub(crate) fn on_sent(&mut self, now: Instant) {
        self.went = Some(now);
        self.hurried = true;
    }

    /// Makes them go with the next frame.
    pub(crate) fn send_now(&mut self) {
        self.hurried = true;
    }

    /// Records that everything that may be sent has been sent.
    pub(crate) fn on_flushed(&mut self) {
        self.hurried = false;
    }

    /// Returns true if the kernel should be read before [`Self::may_go`] is called for one that waits. Never true while
    /// they are rare.
    pub(crate) fn wants_reading(&self, now: Instant) -> bool {
        let known = self.read.is_some_and(|read| now - read < FRESH);
        !self.hurried && !known && self.went.is_some_and(|went| now - went < MAX_WAIT)
    }

    /// Takes a reading of the kernel.
    pub(crate) fn read(&mut self, reading: &TcpInfo, now: Instant) {
        let least = reading.least_round_trip;
        self.read = Some(now);
        // The current RTT with its queue counts, but not a long queue of others.
        self.apart = if least < SHORT { Duration::ZERO } else { reading.rtt.clamp(least, least * 2) / TIMES };
        self.apart = self.apart.min(MAX_WAIT);
    }
}

/// Number of times per RTT that they are sent.
const TIMES: u32 = 4;
/// On a shorter path they do not wait.
const SHORT: Duration = Duration::from_millis(5);
/// Maximum wait on any path.
pub(super) const MAX_WAIT: Duration = Duration::from_millis(200);
/// A reading of the RTT is renewed after this time.
const FRESH: Duration = Duration::from_millis(100);
