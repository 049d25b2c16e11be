//! Bulk that leaves a little of the line free for what goes over an interactive link beside it.
//!
//! What is under way above what the line holds is a queue, and where round trips vary by themselves no cap can tell the two
//! apart. Bulk that goes out a little slower than the line carries it leaves no queue, however round trips vary. So bulk
//! fills the line for some rounds, as far as its cap allows, which shows the line's rate; it cruises below that rate for
//! some time; and so on by turns. See "How much may be under way" in docs/protocol.md.

use std::time::Duration;

use tokio::time::Instant;

use crate::protocol::link::pace::cap::Cap;
use crate::protocol::link::pace::rate::per_second;

/// Whether bulk fills the line or cruises, and how fast.
#[derive(Debug)]
pub(super) struct Cruise {
    /// When bulk began to fill the line.
    began: Mark,
    /// Bytes pulled a second while bulk filled the line, the latest first: by chance some of them are too low.
    rates: [u64; RATES_KEPT],
    /// Until when it cruises, and the shortest round trip met meanwhile; none while it fills the line.
    until: Option<(Instant, Duration)>,
}

#[derive(Debug, Clone, Copy)]
struct Mark {
    at: Instant,
    /// Rounds in a row in which the line was full.
    full: u32,
    /// Bytes pulled.
    sent: u64,
}

impl Cruise {
    /// It fills the line from now on, when `sent` bytes have been pulled.
    pub(super) fn new(cap: &Cap, sent: u64, now: Instant) -> Self {
        Self { began: Mark { at: now, full: cap.full(), sent }, rates: [0; RATES_KEPT], until: None }
    }

    /// The kernel has been read, when `sent` bytes had been pulled. Behind a cruise, the shortest round trip that it met: no
    /// queue of ours was in it.
    pub(super) fn read(&mut self, cap: &Cap, trip: Duration, sent: u64, now: Instant) -> Option<Duration> {
        let (here, began) = (Mark { at: now, full: cap.full(), sent }, self.began);
        self.until = self.until.map(|(until, least)| (until, least.min(trip)));
        if here.full.saturating_sub(began.full) >= ROUNDS_TO_KNOW {
            // While it cruises, too: then the line has become narrower.
            self.rates.rotate_right(1);
            self.rates[0] = per_second(sent.wrapping_sub(began.sent), now - began.at);
            let lasts = self.lasts(cap.least().unwrap_or_default());
            self.until = (!self.rates.contains(&0)).then_some((now + lasts, trip));
            self.began = here;
        } else if let Some((_, least)) = self.until.take_if(|(until, _)| now >= *until) {
            self.began = here;
            return Some(least);
        } else if here.full == 0 {
            self.began = here;
        }
        None
    }

    /// Bytes a second at which bulk goes out while it cruises.
    pub(super) fn rate(&self) -> Option<u64> {
        self.until.map(|_| self.known() / 16 * 15)
    }

    /// What the line carries, as far as is known.
    fn known(&self) -> u64 {
        self.rates.iter().copied().max().unwrap_or_default()
    }

    /// How long the next cruise lasts: less where the line's rate changes, as a line that has become wider shows it only when it
    /// is filled.
    fn lasts(&self, least: Duration) -> Duration {
        let longest = LONGEST.max(least * LONGEST_TRIPS);
        let before = self.rates[1..].iter().copied().max().unwrap_or_default();
        let steady = self.rates[0].abs_diff(before) <= before / 8;
        if steady { longest } else { longest / 4 }
    }
}

/// So many rounds with a full line show its rate.
const ROUNDS_TO_KNOW: u32 = 8;
/// Before it has shown that so often there is no cruise.
const RATES_KEPT: usize = 4;
/// How long it cruises where the line has the same rate as before.
const LONGEST: Duration = Duration::from_secs(20);
/// Or for so many least round trips, if that is longer.
const LONGEST_TRIPS: u32 = 100;
