//! How much may be under way on a link.
//!
//! What lies below the link, in kernels and in the line's own queue, waits in an order that no scheduler can mend. So
//! the bytes under way are capped. The kernel knows of its line what has arrived and how long that took; but a proxy on
//! the way, which acknowledges what it has only stored, hides the line behind it, and some systems do not tell. There
//! pings do: one goes out behind every few bytes, and its answer proves that all before it arrived. Reads no clock and
//! asks no kernel: time and readings come in.

mod cap;
mod cruise;
mod kernel;
mod noise;
mod rate;

use std::collections::VecDeque;
use std::time::Duration;

use tokio::time::Instant;

use crate::net::socket::CHUNK;
use crate::net::tcp_info::TcpInfo;
use crate::protocol::link::pace::cap::Cap;
use crate::protocol::link::pace::kernel::Kernel;

/// The cap on the bytes under way on one link, and what it is derived from.
#[derive(Debug)]
pub(crate) struct Pace {
    /// Bytes pulled so far.
    sent: u64,
    /// Bytes known to have arrived.
    arrived: u64,
    pings: VecDeque<Ping>,
    next_number: u64,
    latest: Duration,
    /// What pings have shown.
    pinged: Cap,
    /// What the kernel has shown, if it tells. Boxed, as most links never carry bulk.
    kernel: Option<Box<Kernel>>,
    hidden: Hidden,
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
struct Hidden {
    /// By how much pings take longer than the kernel's own round trip, at least.
    least: Option<Duration>,
    answers: u32,
}

impl Pace {
    /// A link of which nothing is known yet.
    pub(crate) fn new() -> Self {
        Self {
            sent: 0,
            arrived: 0,
            pings: VecDeque::new(),
            next_number: 1,
            latest: FIRST_ROUND_TRIP,
            pinged: Cap::new(),
            kernel: None,
            hidden: Hidden::default(),
            shared: false,
            interactive: None,
        }
    }

    /// Whether an interactive link stands beside this one, for which bulk is to leave a little of the line free.
    pub(crate) fn share(&mut self, shared: bool) {
        self.shared = shared;
        self.kernel.iter_mut().for_each(|kernel| kernel.share(shared));
    }

    /// Counts bytes that were pulled.
    pub(crate) fn pulled(&mut self, bytes: usize) {
        self.sent += u64::try_from(bytes).unwrap_or(u64::MAX);
    }

    /// An interactive session sends something on this link, with bulk or without.
    pub(crate) fn interactive(&mut self, now: Instant) {
        self.interactive = Some(now);
    }

    /// Whether a ping should follow what was pulled.
    pub(crate) fn ping_due(&self, now: Instant) -> bool {
        let marked = self.pings.back().map_or(self.arrived, |p| p.sent);
        let mark = (self.cap() / 8).min(self.most_unread(now) / 4).clamp(LEAST_MARK, MOST_MARK);
        self.pings.len() < MOST_PINGS && self.sent - marked >= mark
    }

    /// Whether the kernel should be read before [`Self::is_capped`] is asked.
    pub(crate) fn wants_reading(&self, now: Instant) -> bool {
        self.kernel.as_ref().is_none_or(|kernel| kernel.is_stale(now))
    }

    /// What the kernel knows just now.
    pub(crate) fn read(&mut self, reading: TcpInfo, now: Instant) {
        match &mut self.kernel {
            Some(kernel) => kernel.read(reading, self.sent, now),
            none => none.insert(Box::new(Kernel::new(reading, self.sent, now))).share(self.shared),
        }
    }

    /// The kernel does not tell any more.
    pub(crate) fn blind(&mut self) {
        self.kernel = None;
    }

    /// Whether bulk has to wait. The caller looks again after [`Self::look_after`], and sends a ping if
    /// [`Self::waits_for_ping`] is true.
    pub(crate) fn is_capped(&mut self, now: Instant) -> bool {
        let (sent, unread) = (self.sent, self.sent - self.arrived >= self.most_unread(now));
        match self.seen() {
            Some(kernel) => unread || kernel.is_capped(sent),
            None => self.pinged.is_reached(sent - self.arrived),
        }
    }

    /// How long to wait for the kernel, if that is what lifts the cap.
    pub(crate) fn look_after(&mut self) -> Option<Duration> {
        self.seen().map(|kernel| kernel.look_after())
    }

    /// Whether no ping is under way although bytes are: then nothing would ever lift the cap.
    pub(crate) fn waits_for_ping(&self) -> bool {
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
    pub(crate) fn pong(&mut self, number: u64, now: Instant) {
        let mut answered = None;
        while let Some(ping) = self.pings.front().filter(|p| p.number <= number) {
            answered = Some(*ping);
            self.pings.pop_front();
        }
        let Some(ping) = answered.filter(|p| p.number == number) else { return };
        let trip = now - ping.at;
        self.arrived = self.arrived.max(ping.sent);
        self.latest = trip;
        self.pinged.sample(trip, self.arrived, now);
        if let Some(kernel) = &self.kernel {
            self.hidden.answered(trip.saturating_sub(kernel.round_trip()));
        }
    }

    /// Bytes that the peer may not have read yet. Its kernel acknowledges what it has only stored, so on a short way, where
    /// the machines and not the line are what is slow, megabytes would stand there before every keystroke.
    fn most_unread(&self, now: Instant) -> u64 {
        let least = self.kernel.as_ref().and_then(|kernel| kernel.cap.least());
        if least.is_none_or(|least| least > SHORT_WAY) {
            return u64::MAX;
        }
        let quiet = self.interactive.is_none_or(|at| now.saturating_duration_since(at) >= QUIET_AFTER);
        if quiet { MOST_UNREAD } else { MOST_UNREAD_BESIDE }
    }

    /// The longest frame that the link carries in about 2 ms.
    pub(crate) fn longest_frame(&self) -> usize {
        let Some(rate) = self.seen_cap().rate() else { return FIRST_FRAME };
        usize::try_from(rate / 500).unwrap_or(LARGEST_FRAME).clamp(SMALLEST_FRAME, LARGEST_FRAME)
    }

    /// The latest round trip measured; 100 ms before the first.
    pub(crate) fn round_trip(&self) -> Duration {
        self.latest
    }

    /// Bytes that may be under way just now.
    pub(crate) fn cap(&self) -> u64 {
        self.seen_cap().bytes()
    }

    /// What the kernel has shown, if that is the whole way.
    fn seen(&mut self) -> Option<&mut Kernel> {
        if self.sees_all() { self.kernel.as_deref_mut() } else { None }
    }

    fn seen_cap(&self) -> &Cap {
        match &self.kernel {
            Some(kernel) if self.sees_all() => &kernel.cap,
            _ => &self.pinged,
        }
    }

    /// Whether the kernel tells, and no proxy hides a part of the way.
    fn sees_all(&self) -> bool {
        self.kernel.as_ref().is_some_and(|kernel| !self.hidden.is_much(kernel.cap.least()))
    }
}

impl Hidden {
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

impl Default for Pace {
    fn default() -> Self {
        Self::new()
    }
}

/// A least round trip up to this is a way between neighbours.
const SHORT_WAY: Duration = Duration::from_millis(1);
/// What is unread there at the most: so much that neither end waits for the other one at each turn.
const MOST_UNREAD: u64 = 4 << 20;
/// The same beside an interactive session: 0.4 ms at 1 GB/s.
const MOST_UNREAD_BESIDE: u64 = 384 << 10;
/// There is none on the link once all have sent nothing for so long.
const QUIET_AFTER: Duration = Duration::from_secs(10);
/// A ping goes out behind every eighth of the cap, and every quarter of what may be unread, within these bytes.
const LEAST_MARK: u64 = 4 * 1024;
const MOST_MARK: u64 = 1 << 19;
/// Pings under way at the most: a peer that answers none must not make us grow.
const MOST_PINGS: usize = 64;
/// Assumed before the first answer.
const FIRST_ROUND_TRIP: Duration = Duration::from_millis(100);
/// By how much longer than the kernel's, and half of that beside, every ping may take that no proxy delays.
const LITTLE_HIDDEN: Duration = Duration::from_millis(5);
/// Fewer answers may all have waited behind something.
const ANSWERS_TO_BELIEVE: u32 = 8;
/// Frame length before the rate is known: short enough for a slow line, long enough for the first moments of a fast
/// one.
const FIRST_FRAME: usize = 16 * 1024;
/// Below this headers weigh too much.
const SMALLEST_FRAME: usize = 4 * 1024;
/// What a socket hands over at once, so that it is not cut. Header and data fit one HTTP/2 frame of 64 KiB.
pub(crate) const LARGEST_FRAME: usize = CHUNK;

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
        fn run(&mut self, pace: &mut Pace, time: Duration) {
            let end = self.now + time;
            (self.worst, self.carried) = (Duration::ZERO, 0);
            while self.now < end {
                while !pace.is_capped(self.now) {
                    let frame = pace.longest_frame();
                    pace.pulled(frame);
                    self.carried += frame as u64;
                    self.free_at =
                        self.free_at.max(self.now) + Duration::from_secs_f64(frame as f64 / self.rate as f64);
                    if pace.ping_due(self.now) {
                        self.ping(pace);
                    }
                }
                if pace.waits_for_ping() {
                    self.ping(pace);
                }
                let (at, number) = self.answers.pop_front().unwrap();
                self.now = self.now.max(at);
                self.worst = self.worst.max(self.free_at.saturating_duration_since(self.now));
                pace.pong(number, self.now);
            }
        }

        fn ping(&mut self, pace: &mut Pace) {
            let number = pace.ping(self.now);
            self.answers.push_back((self.free_at.max(self.now) + self.trip, number));
        }
    }

    #[tokio::test(start_paused = true)]
    async fn a_narrow_line_is_kept_full_with_a_short_queue() {
        let (mut pace, mut line) = (Pace::new(), Line::new(2_500_000, Duration::from_millis(40)));
        line.run(&mut pace, Duration::from_secs(5));
        line.run(&mut pace, Duration::from_secs(9));
        assert!(line.worst < Duration::from_millis(20), "queue of {:?}", line.worst);
        assert!(line.carried > 2_500_000 * 9 * 90 / 100, "carried {}", line.carried);
        assert_eq!(pace.longest_frame(), 2_500_000 / 500);
    }

    #[tokio::test(start_paused = true)]
    async fn a_wide_line_soon_gets_large_frames_and_is_not_held() {
        let (mut pace, mut line) = (Pace::new(), Line::new(1 << 30, Duration::from_micros(200)));
        line.run(&mut pace, Duration::from_millis(500));
        line.run(&mut pace, Duration::from_millis(500));
        assert_eq!(pace.longest_frame(), LARGEST_FRAME);
        assert!(line.carried > (1 << 29) * 9 / 10, "carried {}", line.carried);
    }

    #[tokio::test(start_paused = true)]
    async fn a_longer_way_is_learnt_within_a_dozen_seconds() {
        let (mut pace, mut line) = (Pace::new(), Line::new(2_500_000, Duration::from_millis(20)));
        line.run(&mut pace, Duration::from_secs(3));
        line.trip = Duration::from_millis(60);
        line.run(&mut pace, Duration::from_secs(14));
        line.run(&mut pace, Duration::from_secs(5));
        assert!(line.carried > 2_500_000 * 5 * 85 / 100, "carried {}", line.carried);
    }

    #[tokio::test(start_paused = true)]
    async fn answers_nobody_asked_for_change_nothing() {
        let mut pace = Pace::new();
        let now = Instant::now();
        let number = pace.ping(now);
        pace.pulled(50_000);
        pace.pong(number + 7, now);
        assert!(pace.waits_for_ping() && pace.pinged.least().is_none() && pace.arrived == 0);
    }

    #[tokio::test(start_paused = true)]
    async fn a_peer_that_never_answers_does_not_make_us_grow() {
        let mut pace = Pace::new();
        for _ in 0..10_000 {
            pace.pulled(LARGEST_FRAME);
            if pace.ping_due(Instant::now()) {
                pace.ping(Instant::now());
            }
        }
        assert_eq!(pace.pings.len(), MOST_PINGS);
    }
}
