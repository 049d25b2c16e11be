//! Congestion control: how many bytes may be in flight on a link.
//!
//! Bytes queued in the kernel or in the network cannot be reordered, so the bytes in flight are limited. The kernel
//! knows what has arrived on its connection and how long that took. But a proxy on the path, which acknowledges bytes
//! that it has only stored, hides the rest of the path, and some systems report nothing. Then pings are used: one
//! follows every few bytes, and its answer proves that everything before it has arrived. The module reads no clock and
//! does not query the kernel: the caller passes in times and readings.

pub(crate) mod line_window;
pub(crate) mod rtt_variation;
pub(crate) mod spare_capacity;
pub mod window;

use std::collections::VecDeque;
use std::time::Duration;

use tokio::time::Instant;

use crate::congestion::line_window::TcpInfoCongestion;
use crate::congestion::window::CongestionWindow;
use tunnel_net::socket::CHUNK;
use tunnel_net::tcp_info::TcpInfo;

/// The limit on the bytes in flight on one link, and the measurements that it is derived from.
#[derive(Debug, Default)]
pub(crate) struct CongestionController {
    /// Bytes pulled so far.
    sent: u64,
    /// Bytes known to have arrived.
    acked: u64,
    pings: VecDeque<UnansweredPing>,
    next_number: u64,
    /// The latest RTT measured; 100 ms before the first measurement.
    pub(crate) latest: Duration,
    /// The window derived from pings.
    pinged: CongestionWindow,
    /// The window derived from the kernel's readings, if it still provides any. Boxed, as most links never carry bulk.
    pub(crate) kernel: Option<Box<TcpInfoCongestion>>,
    hidden: HiddenDelay,
    /// Whether there is an interactive link next to this one.
    shared: bool,
    /// When an interactive session last sent something on this link.
    interactive: Option<Instant>,
}

/// A ping that the remote has not answered yet; its answer gives an RTT and the bytes that have arrived.
#[derive(Debug, Clone, Copy)]
struct UnansweredPing {
    number: u64,
    /// Bytes pulled before it.
    sent: u64,
    /// When it was sent.
    at: Instant,
    /// How long it waits in the socket behind other bytes, which is no delay of the path.
    waits: Duration,
}

/// How much of the path the kernel does not see.
#[derive(Debug, Default)]
struct HiddenDelay {
    /// Minimum by which pings take longer than the kernel's own RTT.
    least: MinFilter,
    answers: u32,
}

/// The minimum of the measurements of the last five to ten minutes. Paths change, so older ones say nothing.
#[derive(Debug, Default)]
pub(crate) struct MinFilter {
    /// Minimum and number of the measurements since then, and the minimum of the time before.
    current: Option<(Duration, u32, Instant)>,
    previous: Option<Duration>,
}

impl MinFilter {
    /// Takes a measurement. Returns the minimum.
    pub(crate) fn sample(&mut self, measured: Duration, now: Instant) -> Duration {
        let (mut least, mut count, mut since) = self.current.unwrap_or((measured, 0, now));
        if now.saturating_duration_since(since) >= MIN_FILTER_PERIOD && count >= ANSWERS_TO_BELIEVE {
            self.previous = Some(least);
            (least, count, since) = (measured, 0, now);
        }
        least = least.min(measured);
        self.current = Some((least, count.saturating_add(1), since));
        self.previous.map_or(least, |previous| previous.min(least))
    }

    /// Returns the minimum, or `None` before the first measurement.
    fn get(&self) -> Option<Duration> {
        self.current.map(|(least, ..)| least).into_iter().chain(self.previous).min()
    }
}

/// As long as Linux keeps a minimum RTT (`tcp_min_rtt_wlen`).
const MIN_FILTER_PERIOD: Duration = Duration::from_secs(300);

impl CongestionController {
    /// Creates the state of a link about which nothing is known yet.
    pub(crate) fn new() -> Self {
        let pinged = CongestionWindow::new();
        Self { next_number: 1, latest: INITIAL_RTT, pinged, ..Self::default() }
    }

    /// Sets whether there is an interactive link next to this one. If so, bulk leaves a little of the line free for it.
    pub(crate) fn set_shared(&mut self, shared: bool) {
        self.shared = shared;
        self.kernel.iter_mut().for_each(|kernel| kernel.share(shared));
    }

    /// Counts bytes that were pulled.
    pub(crate) fn on_sent(&mut self, bytes: usize) {
        self.sent += u64::try_from(bytes).unwrap_or(u64::MAX);
    }

    /// Records that an interactive session sends something on this link, whether or not there is bulk.
    pub(crate) fn interactive(&mut self, now: Instant) {
        self.interactive = Some(now);
    }

    /// Returns true if a ping should follow the bytes pulled so far.
    pub(crate) fn ping_due(&self, now: Instant) -> bool {
        let marked = self.pings.back().map_or(self.acked, |p| p.sent);
        let mark = (self.congestion_window() / 8).min(self.max_unread(now) / 4).clamp(MIN_MARK, MAX_MARK);
        self.pings.len() < MAX_PINGS_IN_FLIGHT && self.sent - marked >= mark
    }

    /// Returns true if the kernel should be read before [`Self::is_blocked`] is called.
    pub(crate) fn wants_reading(&self, now: Instant) -> bool {
        self.kernel.as_ref().is_none_or(|kernel| kernel.is_stale(self.sent, now))
    }

    /// Takes a new reading of the kernel.
    pub(crate) fn read(&mut self, reading: TcpInfo, now: Instant) {
        match &mut self.kernel {
            Some(kernel) => kernel.read(reading, self.sent, now),
            none => none.insert(Box::new(TcpInfoCongestion::new(reading, self.sent, now))).share(self.shared),
        }
    }

    /// Returns true if bulk has to wait. The caller checks again after [`Self::retry_after`], and sends a ping if
    /// [`Self::needs_ping`] returns true.
    pub(crate) fn is_blocked(&mut self, now: Instant) -> bool {
        let sent = self.sent;
        let unread = self.sent - self.acked >= self.max_unread(now);
        match self.tcp_info_window() {
            Some(kernel) => unread || kernel.is_capped(sent),
            None => self.pinged.is_reached(sent - self.acked),
        }
    }

    /// Returns how long to wait before the next reading if the window depends on the kernel.
    pub(crate) fn retry_after(&mut self) -> Option<Duration> {
        self.tcp_info_window().map(|kernel| kernel.patience() / 3)
    }

    /// Returns true if bytes are in flight but no ping is: then no answer would ever open the window.
    pub(crate) fn needs_ping(&self) -> bool {
        self.pings.is_empty() && self.sent > self.acked
    }

    /// Records a ping that is sent now, and returns its number.
    pub(crate) fn ping(&mut self, now: Instant) -> u64 {
        let number = self.next_number;
        self.next_number += 1;
        let waits = self.kernel.as_ref().map_or(Duration::ZERO, |kernel| kernel.wait());
        self.pings.push_back(UnansweredPing { number, sent: self.sent, at: now, waits });
        number
    }

    /// Returns when the oldest unanswered ping was sent.
    pub(crate) fn unanswered(&self) -> Option<Instant> {
        self.pings.front().map(|ping| ping.at)
    }

    /// Handles the answer to ping `number`: everything pulled before it has arrived. Numbers never sent are ignored.
    pub(crate) fn on_ack(&mut self, number: u64, now: Instant) {
        let mut answered = None;
        while let Some(ping) = self.pings.front().filter(|p| p.number <= number) {
            answered = Some(*ping);
            self.pings.pop_front();
        }
        let Some(ping) = answered.filter(|p| p.number == number) else { return };
        let rtt = now - ping.at;
        self.acked = self.acked.max(ping.sent);
        self.latest = rtt;
        self.pinged.sample(rtt, self.acked, now);
        if let Some(kernel) = &self.kernel {
            self.hidden.answered(rtt.saturating_sub(kernel.round_trip() + ping.waits), now);
        }
    }

    /// Returns the number of bytes that the remote may not have read yet.
    ///
    /// Its kernel acknowledges bytes that it has only stored. On a short path the machines are the bottleneck, not the
    /// line, so megabytes would be queued there ahead of every keystroke.
    fn max_unread(&self, now: Instant) -> u64 {
        // The kernel's minimum, because the window's one may be that of an earlier path until the window is reached.
        let least = self.kernel.as_ref().map(|kernel| kernel.latest.least_round_trip);
        if least.is_none_or(|least| least > SHORT_RTT) {
            return u64::MAX;
        }
        let quiet = self.interactive.is_none_or(|at| now.saturating_duration_since(at) >= QUIET_AFTER);
        if quiet { MAX_UNREAD } else { MAX_UNREAD_INTERACTIVE }
    }

    /// Returns the length of the longest frame that the link carries in about 2 ms.
    pub(crate) fn longest_frame(&self) -> usize {
        let Some(rate) = self.seen_cap().bandwidth() else { return INITIAL_FRAME };
        usize::try_from(rate / 500).unwrap_or(MAX_FRAME).clamp(MIN_FRAME, MAX_FRAME)
    }

    /// Returns the number of bytes that may be in flight now.
    pub(crate) fn congestion_window(&self) -> u64 {
        self.seen_cap().bytes()
    }

    /// Returns the window derived from the kernel's readings if the kernel sees the whole path.
    fn tcp_info_window(&mut self) -> Option<&mut TcpInfoCongestion> {
        if self.sees_all() { self.kernel.as_deref_mut() } else { None }
    }

    fn seen_cap(&self) -> &CongestionWindow {
        match &self.kernel {
            Some(kernel) if self.sees_all() => &kernel.cap,
            _ => &self.pinged,
        }
    }

    /// Returns true if the kernel provides readings and no proxy hides a part of the path.
    fn sees_all(&self) -> bool {
        self.kernel.as_ref().is_some_and(|kernel| !self.hidden.is_much(kernel.latest.least_round_trip))
    }
}

impl HiddenDelay {
    fn answered(&mut self, longer: Duration, now: Instant) {
        self.least.sample(longer, now);
        self.answers = self.answers.saturating_add(1);
    }

    /// Returns true if the difference exceeds the remote's own delay and the queue at this end.
    fn is_much(&self, seen: Duration) -> bool {
        let usual = LITTLE_HIDDEN + seen / 2;
        self.answers >= ANSWERS_TO_BELIEVE && self.least.get().is_some_and(|least| least > usual)
    }
}

/// A path with a minimum RTT up to this is between close machines.
const SHORT_RTT: Duration = Duration::from_millis(1);
/// Maximum number of unread bytes on such a path: enough that neither end waits for the other in each turn.
const MAX_UNREAD: u64 = 4 << 20;
/// Like [`MAX_UNREAD`], but next to an interactive session: 0.4 ms at 1 GB/s.
const MAX_UNREAD_INTERACTIVE: u64 = 384 << 10;
/// A link has no interactive session once none has sent anything for this long.
const QUIET_AFTER: Duration = Duration::from_secs(10);
/// A ping follows every eighth of the window, and every quarter of what may be unread, within these bytes.
const MIN_MARK: u64 = 4 * 1024;
const MAX_MARK: u64 = 1 << 19;
/// Maximum number of pings in flight: a remote that answers none must not make the queue grow.
const MAX_PINGS_IN_FLIGHT: usize = 64;
/// Assumed before the first answer.
const INITIAL_RTT: Duration = Duration::from_millis(100);
/// Maximum by which pings take longer than the kernel's RTT without a proxy, in addition to half of that RTT.
const LITTLE_HIDDEN: Duration = Duration::from_millis(5);
/// Minimum number of answers before that difference is trusted: fewer may all have waited in a queue.
const ANSWERS_TO_BELIEVE: u32 = 8;
/// Frame length before the rate is known: short enough for a slow line, long enough for the start of a fast one.
const INITIAL_FRAME: usize = 16 * 1024;
/// Below this the overhead of headers is too high.
const MIN_FRAME: usize = 4 * 1024;
/// As many bytes as a socket hands over at once, so that they are not split. Header and data fit one HTTP/2 frame of 64
/// KiB.
pub(crate) const MAX_FRAME: usize = CHUNK;

/// Returns the rate in bytes per second of `bytes` in that time.
pub(crate) fn per_second(bytes: u64, took: Duration) -> u64 {
    let micros = took.as_micros().max(1);
    u64::try_from(u128::from(bytes) * 1_000_000 / micros).unwrap_or(u64::MAX)
}

/// Returns the bytes carried in that time at `rate` bytes per second.
pub(crate) fn carried(rate: u64, time: Duration) -> u64 {
    u64::try_from(u128::from(rate) * time.as_micros() / 1_000_000).unwrap_or(u64::MAX)
}

/// Returns the time that `bytes` take at `rate` bytes per second.
pub(crate) fn time_of(bytes: u64, rate: u64) -> Duration {
    let micros = u128::from(bytes) * 1_000_000 / u128::from(rate.max(1));
    Duration::from_micros(u64::try_from(micros).unwrap_or(u64::MAX))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A line that carries `rate` bytes per second, has an unlimited queue, and answers after `rtt`.
    struct Line {
        now: Instant,
        free_at: Instant,
        answers: VecDeque<(Instant, u64)>,
        rate: u64,
        rtt: Duration,
        worst: Duration,
        carried: u64,
    }

    impl Line {
        fn new(rate: u64, rtt: Duration) -> Self {
            let now = Instant::now();
            Self { now, free_at: now, answers: VecDeque::new(), rate, rtt, worst: Duration::ZERO, carried: 0 }
        }

        /// Runs a sender that always has data, for `time`.
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
            self.answers.push_back((self.free_at.max(self.now) + self.rtt, number));
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
        line.rtt = Duration::from_millis(60);
        line.run(&mut pace, Duration::from_secs(14));
        line.run(&mut pace, Duration::from_secs(5));
        assert!(line.carried > 2_500_000 * 5 * 85 / 100, "carried {}", line.carried);
    }

    #[tokio::test(start_paused = true)]
    async fn unrequested_answers_change_nothing() {
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
