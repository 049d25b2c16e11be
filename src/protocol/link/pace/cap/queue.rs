//! How long a queue on the line counts as one that stands, and how long a queue is allowed.

use std::time::Duration;

use crate::protocol::link::pace::SMALLEST_FRAME;
use crate::protocol::link::pace::rate::time_of;

/// By how much a round trip above that least one means that a queue stands.
pub(super) fn standing(least: Duration) -> Duration {
    STANDING.max(least / 8)
}

/// The queue that is allowed on a line with that least round trip, if it never changes by itself; a shorter one where others
/// wait behind it.
pub(super) fn allowed(least: Duration, shared: bool) -> Duration {
    let most = ALLOWED.max(least / 12);
    if shared { most / 8 * 5 } else { most }
}

/// How much of the jitter the usual round trip of a line has in it. The more is taken for that, the longer a queue stands
/// unseen, and the surer the line is full.
pub(super) fn usual(jitter: Duration, shared: bool) -> Duration {
    jitter / 20 * if shared { 11 } else { 14 }
}

/// Up to which queue the cap grows: half of the allowed one. Beside an interactive link less of the jitter counts as the
/// line's, so a queue of that difference may seem to stand where there is none. Half of the difference is added, since a
/// cap that waited for it to go would be cut by chance and never grow again.
pub(super) fn growing(least: Duration, jitter: Duration, shared: bool) -> Duration {
    allowed(least, shared) / 2 + (usual(jitter, false) - usual(jitter, shared)) / 2
}

/// The queue that a cap is cut to. A line that jitters carries what it can only if as much is under way as its usual round
/// trip takes. Beside an interactive link a cut takes a little less, as the cap grows back by little.
pub(super) fn target(least: Duration, jitter: Duration, shared: bool) -> Duration {
    allowed(least, shared) + jitter / 20 * if shared { 12 } else { 11 }
}

/// By how much the few round trips of a renewal may be above the least one by chance. Beside an interactive link more is taken for
/// chance: that the way has become longer shows there by a cap that is lowered in vain.
pub(super) fn by_chance(least: Duration, jitter: Duration, shared: bool) -> Duration {
    if shared { standing(least).max(jitter) } else { jitter }
}

/// By how much a queue, too short to count as one that stands, is longer than those on an interactive link should wait
/// behind. Half of a frame is no excess, as frames go out whole. Zero on a line that jitters, whose round trips show little.
pub(super) fn excess(queue: Duration, least: Duration, jitter: Duration, rate: u64) -> Duration {
    let enough = allowed(least, true) / 4 * 3 + time_of(SMALLEST_FRAME as u64, rate) / 2;
    if jitter.is_zero() { queue.saturating_sub(enough) } else { Duration::ZERO }
}

/// Round trips this much above the least, or an eighth of it if that is more, mean that a queue stands on the way.
const STANDING: Duration = Duration::from_millis(12);
/// So that the line never runs dry; on a long line a twelfth of its round trip.
const ALLOWED: Duration = Duration::from_millis(8);
