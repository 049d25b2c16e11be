//! Bulk that leaves a little of the line free for an interactive link next to it.
//!
//! Bytes in flight above the line's capacity form a queue, and where RTTs vary on their own, no window can tell the
//! two apart. Bulk that is sent slightly slower than the line's rate leaves no queue, however RTTs vary. So bulk
//! first fills the line for some rounds, up to its window, which shows the line's rate. Then it cruises below that
//! rate for some time, and then it fills the line again. See "How much may be under way" in docs/protocol.md.

use crate::congestion::per_second;
use std::time::Duration;

use tokio::time::Instant;

use crate::congestion::window::CongestionWindow;

/// Whether bulk fills the line or cruises, and at which rate.
#[derive(Debug)]
pub(crate) struct Cruise {
    /// When bulk started to fill the line.
    began: LinkProgress,
    /// Rates in bytes per second while bulk filled the line, latest first. Some of them are too low by chance.
    rates: [u64; RATES_KEPT],
    /// End of the cruise, and the shortest RTT seen during it; `None` while bulk fills the line.
    until: Option<(Instant, Duration)>,
}

/// The progress of a link at one moment, to measure what happens after it.
#[derive(Debug, Clone, Copy)]
struct LinkProgress {
    at: Instant,
    /// Consecutive rounds in which the line was full.
    full: u32,
    /// Bytes pulled.
    sent: u64,
}

impl Cruise {
    /// Starts filling the line when `sent` bytes have been pulled.
    pub(crate) fn new(cap: &CongestionWindow, sent: u64, now: Instant) -> Self {
        Self {
            began: LinkProgress { at: now, full: cap.rounds_at_limit(), sent },
            rates: [0; RATES_KEPT],
            until: None,
        }
    }

    /// Takes a reading of the kernel, when `sent` bytes had been pulled. After a cruise, returns the shortest RTT seen
    /// during it: it contained no queue of ours.
    pub(crate) fn read(
        &mut self,
        cap: &CongestionWindow,
        rtt: Duration,
        sent: u64,
        now: Instant,
    ) -> Option<Duration> {
        let here = LinkProgress { at: now, full: cap.rounds_at_limit(), sent };
        let began = self.began;
        self.until = self.until.map(|(until, least)| (until, least.min(rtt)));
        if here.full.saturating_sub(began.full) >= ROUNDS_TO_KNOW {
            // A full line during a cruise as well: then the line has become narrower.
            self.rates.rotate_right(1);
            self.rates[0] = per_second(sent.wrapping_sub(began.sent), now - began.at);
            let lasts = self.lasts(cap.min_rtt().unwrap_or_default());
            self.until = (!self.rates.contains(&0)).then_some((now + lasts, rtt));
            self.began = here;
        } else if let Some((_, least)) = self.until.take_if(|(until, _)| now >= *until) {
            self.began = here;
            return Some(least);
        } else if here.full == 0 {
            self.began = here;
        }
        None
    }

    /// Returns the rate of bulk, in bytes per second, during a cruise.
    pub(crate) fn rate(&self) -> Option<u64> {
        self.until.map(|_| self.known() / 16 * 15)
    }

    /// Returns the best known rate of the line.
    fn known(&self) -> u64 {
        self.rates.iter().copied().max().unwrap_or_default()
    }

    /// Returns how long the next cruise lasts. It is shorter if the line's rate changes, because a wider line is
    /// noticed only when it is filled.
    fn lasts(&self, least: Duration) -> Duration {
        let longest = LONGEST.max(least * MAX_TRIPS);
        let before = self.rates[1..].iter().copied().max().unwrap_or_default();
        let steady = self.rates[0].abs_diff(before) <= before / 8;
        if steady { longest } else { longest / 4 }
    }
}

/// Number of rounds with a full line that show its rate.
const ROUNDS_TO_KNOW: u32 = 8;
/// Number of measured rates kept; there is no cruise before all of them are known.
const RATES_KEPT: usize = 4;
/// Duration of a cruise if the line's rate is unchanged.
const LONGEST: Duration = Duration::from_secs(20);
/// Minimum duration of such a cruise in minimum RTTs.
const MAX_TRIPS: u32 = 100;
