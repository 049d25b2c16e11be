//! How much a reader takes in a round trip, and how wide a window that asks for.

use std::time::Duration;

use tokio::time::Instant;

/// What the reader took in this round trip and in the one before.
#[derive(Debug, Default)]
pub(super) struct Rounds {
    now: Option<Round>,
    before: u64,
}

#[derive(Debug, Clone, Copy)]
struct Round {
    since: Instant,
    /// Bytes taken when it began.
    from: u64,
    /// Nothing was taken for a while before it. What is taken at once then has waited, and shows no rate.
    late: bool,
}

impl Rounds {
    /// Bytes have come; the reader has taken `taken` in all.
    pub(super) fn arrived(&mut self, taken: u64, now: Instant) {
        self.now.get_or_insert(Round { since: now, from: taken, late: false });
    }

    /// The reader had taken `before` bytes in all, and has `taken` now. Returns the window for that: two round trips'
    /// worth, and four while it doubles from one to the next.
    pub(super) fn took(&mut self, before: u64, taken: u64, trip: Duration, now: Instant) -> u64 {
        let Some(round) = &mut self.now else { return 0 };
        let took = now - round.since;
        if took > trip {
            self.before = part(before - round.from, trip, took);
            *round = Round { since: now, from: before, late: took > trip * 2 };
        }
        if round.late {
            return 0;
        }
        let here = taken - round.from;
        let times = (here * 2).checked_div(self.before).map_or(4, |halves| halves.clamp(2, 4));
        here.saturating_mul(times)
    }

    /// What was taken in a round trip of late, once `taken` bytes were in all.
    pub(super) fn in_a_trip(&self, taken: u64) -> u64 {
        self.now.map_or(0, |round| (taken - round.from).max(self.before))
    }

    /// Forgets all, because nothing comes any more, or nothing has come for long.
    pub(super) fn interrupt(&mut self) {
        *self = Self::default();
    }
}

/// Of `bytes` that took one time, those of another.
pub(super) fn part(bytes: u64, time: Duration, of: Duration) -> u64 {
    let part = u128::from(bytes) * time.as_micros() / of.as_micros().max(1);
    u64::try_from(part).unwrap_or(u64::MAX)
}
