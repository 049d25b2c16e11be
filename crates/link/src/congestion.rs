//! How much may be under way on a link.
//!
//! What lies below the link, in kernels and in the line's own queue, waits in an order that no scheduler can mend. So
//! the bytes under way are capped. The kernel knows of its line what has arrived and how long that took; but a proxy on
//! the way, which acknowledges what it has only stored, hides the line behind it, and some systems do not tell. There
//! pings do: one goes out behind every few bytes, and its answer proves that all before it arrived. Reads no clock and
//! asks no kernel: time and readings come in.

pub mod window;

use std::collections::VecDeque;
use std::time::Duration;

use tokio::time::Instant;

use crate::congestion::window::{CongestionWindow, INITIAL_CWND};
use tunnel_net::socket::CHUNK;
use tunnel_net::tcp_info::TcpInfo;

/// The cap on the bytes under way on one link, and what it is derived from.
#[derive(Debug)]
pub(crate) struct CongestionController {
    /// Bytes pulled so far.
    sent: u64,
    /// Bytes known to have arrived.
    acked: u64,
    pings: VecDeque<Ping>,
    next_number: u64,
    latest: Duration,
    /// What pings have shown.
    pinged: CongestionWindow,
    /// What the kernel has shown, if it tells. Boxed, as most links never carry bulk.
    kernel: Option<Box<TcpInfoWindow>>,
    hidden: ProxyDelay,
    /// Whether an interactive link stands beside this one.
    shared: bool,
    /// When an interactive session last sent something on this one.
    interactive: Option<Instant>,
}

#[derive(Debug, Clone, Copy)]
struct Ping {
    number: u64,
    sent: u64,
    at: Instant,
}

/// How much of the way the kernel does not see.
#[derive(Debug, Default)]
struct ProxyDelay {
    /// By how much pings take longer than the kernel's own round trip, at least.
    least: Option<Duration>,
    answers: u32,
}

impl CongestionController {
    /// A link of which nothing is known yet.
    pub(crate) fn new() -> Self {
        Self {
            sent: 0,
            acked: 0,
            pings: VecDeque::new(),
            next_number: 1,
            latest: INITIAL_RTT,
            pinged: CongestionWindow::new(),
            kernel: None,
            hidden: ProxyDelay::default(),
            shared: false,
            interactive: None,
        }
    }

    /// Whether an interactive link stands beside this one, for which bulk is to leave a little of the line free.
    pub(crate) fn set_shared(&mut self, shared: bool) {
        self.shared = shared;
        self.kernel.iter_mut().for_each(|kernel| kernel.share(shared));
    }

    /// Counts bytes that were pulled.
    pub(crate) fn on_sent(&mut self, bytes: usize) {
        self.sent += u64::try_from(bytes).unwrap_or(u64::MAX);
    }

    /// An interactive session sends something on this link, with bulk or without.
    pub(crate) fn interactive(&mut self, now: Instant) {
        self.interactive = Some(now);
    }

    /// Whether a ping should follow what was pulled.
    pub(crate) fn ping_due(&self, now: Instant) -> bool {
        let marked = self.pings.back().map_or(self.acked, |p| p.sent);
        let mark = (self.congestion_window() / 8).min(self.max_unread(now) / 4).clamp(MIN_MARK, MAX_MARK);
        self.pings.len() < MAX_PINGS_IN_FLIGHT && self.sent - marked >= mark
    }

    /// Whether the kernel should be read before [`Self::is_capped`] is asked.
    pub(crate) fn wants_reading(&self, now: Instant) -> bool {
        self.kernel.as_ref().is_none_or(|kernel| kernel.is_stale(now))
    }

    /// What the kernel knows just now.
    pub(crate) fn read(&mut self, reading: TcpInfo, now: Instant) {
        match &mut self.kernel {
            Some(kernel) => kernel.read(reading, self.sent, now),
            none => none.insert(Box::new(TcpInfoWindow::new(reading, self.sent, now))).share(self.shared),
        }
    }

    /// The kernel does not tell any more.
    pub(crate) fn disable_tcp_info(&mut self) {
        self.kernel = None;
    }

    /// Whether bulk has to wait. The caller looks again after [`Self::look_after`], and sends a ping if
    /// [`Self::needs_ping`] is true.
    pub(crate) fn is_blocked(&mut self, now: Instant) -> bool {
        let (sent, unread) = (self.sent, self.sent - self.acked >= self.max_unread(now));
        match self.tcp_info_window() {
            Some(kernel) => unread || kernel.is_capped(sent),
            None => self.pinged.is_reached(sent - self.acked),
        }
    }

    /// How long to wait for the kernel, if that is what lifts the cap.
    pub(crate) fn retry_after(&mut self) -> Option<Duration> {
        self.tcp_info_window().map(|kernel| kernel.look_after())
    }

    /// Whether no ping is under way although bytes are: then nothing would ever lift the cap.
    pub(crate) fn needs_ping(&self) -> bool {
        self.pings.is_empty()
    }

    /// A ping goes out now; its number.
    pub(crate) fn ping(&mut self, now: Instant) -> u64 {
        let number = self.next_number;
        self.next_number += 1;
        self.pings.push_back(Ping { number, sent: self.sent, at: now });
        number
    }

    /// When the oldest ping that has no answer was sent.
    pub(crate) fn unanswered(&self) -> Option<Instant> {
        self.pings.front().map(|ping| ping.at)
    }

    /// The answer to ping `number`: all that was pulled before it has arrived. Numbers never sent are ignored.
    pub(crate) fn on_ack(&mut self, number: u64, now: Instant) {
        let mut answered = None;
        while let Some(ping) = self.pings.front().filter(|p| p.number <= number) {
            answered = Some(*ping);
            self.pings.pop_front();
        }
        let Some(ping) = answered.filter(|p| p.number == number) else { return };
        let trip = now - ping.at;
        self.acked = self.acked.max(ping.sent);
        self.latest = trip;
        self.pinged.sample(trip, self.acked, now);
        if let Some(kernel) = &self.kernel {
            self.hidden.answered(trip.saturating_sub(kernel.round_trip()));
        }
    }

    /// Bytes that the peer may not have read yet. Its kernel acknowledges what it has only stored, so on a short way, where
    /// the machines and not the line are what is slow, megabytes would stand there before every keystroke.
    fn max_unread(&self, now: Instant) -> u64 {
        let least = self.kernel.as_ref().and_then(|kernel| kernel.cap.min_rtt());
        if least.is_none_or(|least| least > SHORT_RTT) {
            return u64::MAX;
        }
        let quiet = self.interactive.is_none_or(|at| now.saturating_duration_since(at) >= QUIET_AFTER);
        if quiet { MAX_UNREAD } else { MAX_UNREAD_BESIDE }
    }

    /// The longest frame that the link carries in about 2 ms.
    pub(crate) fn longest_frame(&self) -> usize {
        let Some(rate) = self.seen_cap().bandwidth() else { return INITIAL_FRAME };
        usize::try_from(rate / 500).unwrap_or(MAX_FRAME).clamp(MIN_FRAME, MAX_FRAME)
    }

    /// The latest round trip measured; 100 ms before the first.
    pub(crate) fn latest_rtt(&self) -> Duration {
        self.latest
    }

    /// Bytes that may be under way just now.
    pub(crate) fn congestion_window(&self) -> u64 {
        self.seen_cap().bytes()
    }

    /// What the kernel has shown, if that is the whole way.
    fn tcp_info_window(&mut self) -> Option<&mut TcpInfoWindow> {
        if self.sees_all() { self.kernel.as_deref_mut() } else { None }
    }

    fn seen_cap(&self) -> &CongestionWindow {
        match &self.kernel {
            Some(kernel) if self.sees_all() => &kernel.cap,
            _ => &self.pinged,
        }
    }

    /// Whether the kernel tells, and no proxy hides a part of the way.
    fn sees_all(&self) -> bool {
        self.kernel.as_ref().is_some_and(|kernel| !self.hidden.is_much(kernel.cap.min_rtt()))
    }
}

impl ProxyDelay {
    fn answered(&mut self, longer: Duration) {
        self.least = Some(self.least.map_or(longer, |least| least.min(longer)));
        self.answers = self.answers.saturating_add(1);
    }

    /// Whether it is more than a peer's own delay and what waits here.
    fn is_much(&self, seen: Option<Duration>) -> bool {
        let usual = LITTLE_HIDDEN + seen.unwrap_or_default() / 2;
        self.answers >= ANSWERS_TO_BELIEVE && self.least.is_some_and(|least| least > usual)
    }
}

impl Default for CongestionController {
    fn default() -> Self {
        Self::new()
    }
}

/// A least round trip up to this is a way between neighbours.
const SHORT_RTT: Duration = Duration::from_millis(1);
/// What is unread there at the most: so much that neither end waits for the other one at each turn.
const MAX_UNREAD: u64 = 4 << 20;
/// The same beside an interactive session: 0.4 ms at 1 GB/s.
const MAX_UNREAD_BESIDE: u64 = 384 << 10;
/// There is none on the link once all have sent nothing for so long.
const QUIET_AFTER: Duration = Duration::from_secs(10);
/// A ping goes out behind every eighth of the cap, and every quarter of what may be unread, within these bytes.
const MIN_MARK: u64 = 4 * 1024;
const MAX_MARK: u64 = 1 << 19;
/// Pings under way at the most: a peer that answers none must not make us grow.
const MAX_PINGS_IN_FLIGHT: usize = 64;
/// Assumed before the first answer.
const INITIAL_RTT: Duration = Duration::from_millis(100);
/// By how much longer than the kernel's, and half of that beside, every ping may take that no proxy delays.
const LITTLE_HIDDEN: Duration = Duration::from_millis(5);
/// Fewer answers may all have waited behind something.
const ANSWERS_TO_BELIEVE: u32 = 8;
/// Frame length before the rate is known: short enough for a slow line, long enough for the first moments of a fast
/// one.
const INITIAL_FRAME: usize = 16 * 1024;
/// Below this headers weigh too much.
const MIN_FRAME: usize = 4 * 1024;
/// What a socket hands over at once, so that it is not cut. Header and data fit one HTTP/2 frame of 64 KiB.
pub(crate) const MAX_FRAME: usize = CHUNK;

// How much may be under way by what the kernel knows of the line.
//
// It tells two things apart that pings cannot. What waits in our own socket is no queue of the line's, and must be
// little: the kernel, too, sends only as fast as it thinks right, and the rest stands before every keystroke. And what
// is on the way is bounded by the line's own round trip.

/// What the kernel has shown of one line.
#[derive(Debug)]
pub(crate) struct TcpInfoWindow {
    pub(crate) cap: CongestionWindow,
    /// While an interactive link stands beside this one.
    cruise: Option<Cruise>,
    latest: TcpInfo,
    at: Instant,
    /// Bytes pulled when it was read.
    sent: u64,
    /// Of these, the bytes that had not come to the kernel: they stand in HTTP/2's and TLS's buffers.
    above: u64,
    /// The least that the bytes pulled were ahead of those written. It only ever falls: what is pulled is counted
    /// without HTTP/2's and TLS's own, what is written with them.
    least_ahead: i64,
    /// Bytes that may be pulled before it is read again, if they are bounded. A kernel that has emptied the line, as BBR does to see its least
    /// round trip, would else send a whole cap at once behind that, which is a queue of half a round trip.
    allowed: Option<i64>,
}

impl TcpInfoWindow {
    /// After the first reading.
    pub(crate) fn new(reading: TcpInfo, sent: u64, now: Instant) -> Self {
        let mut this = Self {
            cap: CongestionWindow::new(),
            cruise: None,
            latest: reading,
            at: now,
            sent,
            above: 0,
            least_ahead: i64::MAX,
            allowed: None,
        };
        this.read(reading, sent, now);
        this
    }

    /// The next reading, when `sent` bytes have been pulled.
    pub(crate) fn read(&mut self, reading: TcpInfo, sent: u64, now: Instant) {
        let ahead = sent.wrapping_sub(reading.written).cast_signed();
        self.least_ahead = self.least_ahead.min(ahead);
        self.above = ahead.wrapping_sub(self.least_ahead).cast_unsigned();
        self.allowed = self.pacing_rate().map(|(rate, jitter)| {
            // A frame may be longer than what was left: then the next one waits for that.
            let left = self.allowed.unwrap_or_default() - sent.wrapping_sub(self.sent).cast_signed();
            let more = left.saturating_add_unsigned(carried(rate, now - self.at));
            // What waits in the socket will go with it.
            let most = carried(rate, self.patience() + jitter).saturating_sub(reading.unsent);
            more.min(most.cast_signed())
        });
        (self.latest, self.sent, self.at) = (reading, sent, now);
        if reading.in_flight <= FEW {
            self.cap.varies(reading.variation * RANGE, now);
        }
        self.cap.sample(reading.rtt, reading.delivered, now);
        if let Some(least) =
            self.cruise.as_mut().and_then(|cruise| cruise.read(&self.cap, reading.rtt, sent, now))
        {
            self.cap.update_min_rtt(least);
        }
    }

    /// Whether an interactive link stands beside this one.
    pub(crate) fn share(&mut self, shared: bool) {
        let new = || Cruise::new(&self.cap, self.sent, self.at);
        self.cruise = shared.then(|| self.cruise.take().unwrap_or_else(new));
    }

    /// Whether it should be read again before anything is decided.
    pub(crate) fn is_stale(&self, now: Instant) -> bool {
        now - self.at >= FRESH
    }

    /// Whether bulk has to wait when `sent` bytes have been pulled.
    pub(crate) fn is_capped(&mut self, sent: u64) -> bool {
        let waits = self.latest.unsent + self.above + (sent - self.sent);
        // Not the line's, so nothing that its cap should grow by.
        let floods = self.allowed.is_some_and(|allowed| (sent - self.sent).cast_signed() >= allowed);
        waits >= self.max_unsent() || floods || self.cap.is_reached(self.latest.in_flight + waits)
    }

    /// When to look again, if bulk has to wait: before all that waits is sent.
    pub(crate) fn look_after(&self) -> Duration {
        self.patience() / 3
    }

    /// The round trip of late.
    pub(crate) fn round_trip(&self) -> Duration {
        self.latest.rtt
    }

    /// Bytes that may wait in our buffers and in the socket.
    fn max_unsent(&self) -> u64 {
        if self.cap.bandwidth().is_none() {
            return INITIAL_CWND;
        }
        let rate = self.pacing_rate().map_or(self.latest.pacing, |(rate, _)| rate.min(self.latest.pacing));
        carried(rate, self.patience()).clamp(MIN_WAITING, MAX_WAITING)
    }

    /// How fast bulk may be let go, and how long it may be let go at once, if that is bounded.
    fn pacing_rate(&self) -> Option<(u64, Duration)> {
        let (rate, jitter) = self.cap.pacing_rate()?;
        let slower = self.cruise.as_ref().and_then(Cruise::rate);
        Some((slower.map_or(rate, |slower| rate.min(slower)), jitter))
    }

    fn patience(&self) -> Duration {
        MAX_WAIT.max(self.cap.min_rtt().unwrap_or_default() / 16)
    }
}

/// With so few bytes under way the round trip varies by itself.
const FEW: u64 = 6000;
/// How far round trips lie apart, in their mean deviations. Less lets a line that jitters seem to have a queue.
const RANGE: u32 = 5;
/// A reading this old is renewed.
const FRESH: Duration = Duration::from_millis(1);
/// How long a byte may wait in our socket, or a sixteenth of the least round trip if that is more: the kernel never runs
/// dry while this side sleeps.
const MAX_WAIT: Duration = Duration::from_millis(12);
/// Two of the shortest frames.
const MIN_WAITING: u64 = 8 * 1024;
/// More than buffers take in any case.
const MAX_WAITING: u64 = 8 << 20;

// Bulk that leaves a little of the line free for what goes over an interactive link beside it.
//
// What is under way above what the line holds is a queue, and where round trips vary by themselves no cap can tell the two
// apart. Bulk that goes out a little slower than the line carries it leaves no queue, however round trips vary. So bulk
// fills the line for some rounds, as far as its cap allows, which shows the line's rate; it cruises below that rate for
// some time; and so on by turns. See "How much may be under way" in docs/protocol.md.

/// Whether bulk fills the line or cruises, and how fast.
#[derive(Debug)]
pub(crate) struct Cruise {
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
    pub(crate) fn new(cap: &CongestionWindow, sent: u64, now: Instant) -> Self {
        Self {
            began: Mark { at: now, full: cap.rounds_at_limit(), sent },
            rates: [0; RATES_KEPT],
            until: None,
        }
    }

    /// The kernel has been read, when `sent` bytes had been pulled. Behind a cruise, the shortest round trip that it met: no
    /// queue of ours was in it.
    pub(crate) fn read(
        &mut self,
        cap: &CongestionWindow,
        trip: Duration,
        sent: u64,
        now: Instant,
    ) -> Option<Duration> {
        let (here, began) = (Mark { at: now, full: cap.rounds_at_limit(), sent }, self.began);
        self.until = self.until.map(|(until, least)| (until, least.min(trip)));
        if here.full.saturating_sub(began.full) >= ROUNDS_TO_KNOW {
            // While it cruises, too: then the line has become narrower.
            self.rates.rotate_right(1);
            self.rates[0] = per_second(sent.wrapping_sub(began.sent), now - began.at);
            let lasts = self.lasts(cap.min_rtt().unwrap_or_default());
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
    pub(crate) fn rate(&self) -> Option<u64> {
        self.until.map(|_| self.known() / 16 * 15)
    }

    /// What the line carries, as far as is known.
    fn known(&self) -> u64 {
        self.rates.iter().copied().max().unwrap_or_default()
    }

    /// How long the next cruise lasts: less where the line's rate changes, as a line that has become wider shows it only when it
    /// is filled.
    fn lasts(&self, least: Duration) -> Duration {
        let longest = LONGEST.max(least * MAX_TRIPS);
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
const MAX_TRIPS: u32 = 100;

// Bytes, time, and bytes a second.

/// Bytes a second, of so many in a time.
pub(crate) fn per_second(bytes: u64, took: Duration) -> u64 {
    let micros = took.as_micros().max(1);
    u64::try_from(u128::from(bytes) * 1_000_000 / micros).unwrap_or(u64::MAX)
}

/// What `rate` bytes a second carry in a time.
pub(crate) fn carried(rate: u64, time: Duration) -> u64 {
    u64::try_from(u128::from(rate) * time.as_micros() / 1_000_000).unwrap_or(u64::MAX)
}

/// How long so many bytes take at `rate` bytes a second.
pub(crate) fn time_of(bytes: u64, rate: u64) -> Duration {
    let micros = u128::from(bytes) * 1_000_000 / u128::from(rate.max(1));
    Duration::from_micros(u64::try_from(micros).unwrap_or(u64::MAX))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A line that carries `rate` bytes a second, with a queue of any length, and answers after `trip`.
    struct Line {
        now: Instant,
        free_at: Instant,
        answers: VecDeque<(Instant, u64)>,
        rate: u64,
        trip: Duration,
        worst: Duration,
        carried: u64,
    }

    impl Line {
        fn new(rate: u64, trip: Duration) -> Self {
            let now = Instant::now();
            Self {
                now,
                free_at: now,
                answers: VecDeque::new(),
                rate,
                trip,
                worst: Duration::ZERO,
                carried: 0,
            }
        }

        /// A backlogged sender for `time`.
        fn run(&mut self, pace: &mut CongestionController, time: Duration) {
            let end = self.now + time;
            (self.worst, self.carried) = (Duration::ZERO, 0);
            while self.now < end {
                while !pace.is_blocked(self.now) {
                    let frame = pace.longest_frame();
                    pace.on_sent(frame);
                    self.carried += frame as u64;
                    self.free_at =
                        self.free_at.max(self.now) + Duration::from_secs_f64(frame as f64 / self.rate as f64);
                    if pace.ping_due(self.now) {
                        self.ping(pace);
                    }
                }
                if pace.needs_ping() {
                    self.ping(pace);
                }
                let (at, number) = self.answers.pop_front().unwrap();
                self.now = self.now.max(at);
                self.worst = self.worst.max(self.free_at.saturating_duration_since(self.now));
                pace.on_ack(number, self.now);
            }
        }

        fn ping(&mut self, pace: &mut CongestionController) {
            let number = pace.ping(self.now);
            self.answers.push_back((self.free_at.max(self.now) + self.trip, number));
        }
    }

    #[tokio::test(start_paused = true)]
    async fn a_narrow_line_is_kept_full_with_a_short_queue() {
        let (mut pace, mut line) =
            (CongestionController::new(), Line::new(2_500_000, Duration::from_millis(40)));
        line.run(&mut pace, Duration::from_secs(5));
        line.run(&mut pace, Duration::from_secs(9));
        assert!(line.worst < Duration::from_millis(20), "queue of {:?}", line.worst);
        assert!(line.carried > 2_500_000 * 9 * 90 / 100, "carried {}", line.carried);
        assert_eq!(pace.longest_frame(), 2_500_000 / 500);
    }

    #[tokio::test(start_paused = true)]
    async fn a_wide_line_soon_gets_large_frames_and_is_not_held() {
        let (mut pace, mut line) =
            (CongestionController::new(), Line::new(1 << 30, Duration::from_micros(200)));
        line.run(&mut pace, Duration::from_millis(500));
        line.run(&mut pace, Duration::from_millis(500));
        assert_eq!(pace.longest_frame(), MAX_FRAME);
        assert!(line.carried > (1 << 29) * 9 / 10, "carried {}", line.carried);
    }

    #[tokio::test(start_paused = true)]
    async fn a_longer_way_is_learnt_within_a_dozen_seconds() {
        let (mut pace, mut line) =
            (CongestionController::new(), Line::new(2_500_000, Duration::from_millis(20)));
        line.run(&mut pace, Duration::from_secs(3));
        line.trip = Duration::from_millis(60);
        line.run(&mut pace, Duration::from_secs(14));
        line.run(&mut pace, Duration::from_secs(5));
        assert!(line.carried > 2_500_000 * 5 * 85 / 100, "carried {}", line.carried);
    }

    #[tokio::test(start_paused = true)]
    async fn answers_nobody_asked_for_change_nothing() {
        let mut pace = CongestionController::new();
        let now = Instant::now();
        let number = pace.ping(now);
        pace.on_sent(50_000);
        pace.on_ack(number + 7, now);
        assert!(pace.needs_ping() && pace.pinged.min_rtt().is_none() && pace.acked == 0);
    }

    #[tokio::test(start_paused = true)]
    async fn a_peer_that_never_answers_does_not_make_us_grow() {
        let mut pace = CongestionController::new();
        for _ in 0..10_000 {
            pace.on_sent(MAX_FRAME);
            if pace.ping_due(Instant::now()) {
                pace.ping(Instant::now());
            }
        }
        assert_eq!(pace.pings.len(), MAX_PINGS_IN_FLIGHT);
    }
}

#[cfg(test)]
mod kernel_tests;
