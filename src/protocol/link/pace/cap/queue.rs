//! How long a queue on the line counts as one that stands, and how long a queue is allowed.

use std::time::Duration;

/// By how much a round trip above that least one means that a queue stands.
pub(super) fn standing(least: Duration) -> Duration {
    STANDING.max(least / 8)
}

/// The queue that is allowed on a line with that least round trip, if it never changes by itself.
pub(super) fn allowed(least: Duration) -> Duration {
    ALLOWED.max(least / 12)
}

/// How much of the jitter the usual round trip of a line has in it. The more is taken for that, the longer a queue stands
/// unseen, and the surer the line is full.
pub(super) fn usual(jitter: Duration) -> Duration {
    jitter / 10 * 7
}

/// The queue that a cap is cut to. A line that jitters carries what it can only if as much is under way as its usual round
/// trip takes.
pub(super) fn target(least: Duration, jitter: Duration) -> Duration {
    allowed(least) + jitter / 20 * 11
}

/// Round trips this much above the least, or an eighth of it if that is more, mean that a queue stands on the way.
const STANDING: Duration = Duration::from_millis(12);
/// So that the line never runs dry; on a long line a twelfth of its round trip.
const ALLOWED: Duration = Duration::from_millis(8);
