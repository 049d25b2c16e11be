//! Congestion control with readings of a simulated kernel on a simulated line.

use crate::congestion::{CongestionController, MAX_UNREAD};
use std::collections::VecDeque;

use super::*;

/// A kernel that sends on a line, in steps of a millisecond.
struct Wire {
    now: Instant,
    /// Bytes per second.
    rate: u64,
    rtt: Duration,
    /// A part of the RTT that is independent of what is sent.
    noise: Duration,
    /// Maximum random delay in each direction; also the interval at which a new delay is chosen.
    jitter: Duration,
    there: Duration,
    /// Percentage of segments lost at random; they arrive an RTT later.
    loss: f64,
    chance: u64,
    chosen: Instant,
    free_at: Instant,
    /// Time of the acknowledgement, bytes, and time of sending of everything in flight.
    under_way: VecDeque<(Instant, u64, Instant)>,
    /// The kernel's congestion window; grows by what is acknowledged, up to `most`.
    window: u64,
    most: u64,
    unsent: u64,
    written: u64,
    delivered: u64,
    smoothed: Duration,
    variation: Duration,
    /// Segments since the last one that was used for an RTT measurement.
    unmeasured: u32,
    /// The longest that a byte would have waited in the socket and for the line.
    worst: Duration,
}

impl Wire {
    fn new(mbit: u64, trip_millis: u64) -> Self {
        let (now, rtt) = (Instant::now(), Duration::from_millis(trip_millis));
        Self {
            now,
            rate: mbit * 125_000,
            rtt,
            noise: Duration::ZERO,
            there: Duration::ZERO,
            jitter: Duration::ZERO,
            loss: 0.0,
            chance: 1,
            chosen: now,
            free_at: now,
            under_way: VecDeque::new(),
            window: WINDOW,
            most: u64::MAX,
            unsent: 0,
            written: 0,
            delivered: 0,
            smoothed: rtt,
            // Linux assumes this before it has measured.
            variation: rtt / 2,
            unmeasured: 0,
            worst: Duration::ZERO,
        }
    }

    /// 50 Mbit/s at 40 ms with 30 ms jitter, after a hundred echoes.
    fn behind_echoes(chance: u64) -> (Self, CongestionController) {
        let (mut wire, mut pace) = (Self::new(50, 40), CongestionController::new());
        (wire.jitter, wire.chance) = (Duration::from_millis(30), chance);
        for _ in 0..100 {
            wire.ping(1);
            pace.read(wire.reading(), wire.now);
        }
        (wire, pace)
    }

    fn reading(&self) -> TcpInfo {
        let in_flight = self.under_way.iter().map(|(_, len, _)| len).sum::<u64>();
        TcpInfo {
            rtt: self.smoothed,
            least_round_trip: self.rtt,
            variation: self.variation,
            pacing: self.window * 2_000_000 / self.smoothed.as_micros() as u64,
            // Wraps like the kernel's counter.
            delivered: self.delivered as u32,
            segment: 1,
            in_flight,
            unsent: self.unsent,
            written: self.written,
        }
    }

    /// Runs a sender that always has data; returns the share of the line's capacity that was used. Without `pace` the
    /// socket always holds more than the kernel sends.
    fn run(&mut self, pace: Option<&mut CongestionController>, time: Duration) -> f64 {
        let (end, before) = (self.now + time, self.delivered);
        let mut pace = pace;
        self.worst = Duration::ZERO;
        while self.now < end {
            self.now += STEP;
            self.step();
            match &mut pace {
                None => {
                    let more = (1u64 << 20).saturating_sub(self.unsent);
                    (self.unsent, self.written) = (self.unsent + more, self.written + more);
                }
                Some(pace) => self.pull(pace),
            }
            let here = Duration::from_secs_f64(self.unsent as f64 / self.rate as f64);
            self.worst = self.worst.max(self.free_at.saturating_duration_since(self.now) + here);
        }
        (self.delivered - before) as f64 / (self.rate as f64 * time.as_secs_f64())
    }

    fn pull(&mut self, pace: &mut CongestionController) {
        if pace.wants_reading(self.now) {
            pace.read(self.reading(), self.now);
        }
        while !pace.is_blocked(self.now) {
            let frame = pace.longest_frame();
            pace.on_sent(frame);
            (self.unsent, self.written) = (self.unsent + frame as u64, self.written + frame as u64);
        }
        assert!(pace.retry_after().is_some(), "nothing else opens the window");
    }

    fn step(&mut self) {
        if self.now - self.chosen >= self.jitter && !self.jitter.is_zero() {
            self.chosen = self.now;
            let back = self.there;
            self.there = self.jitter.mul_f64(self.chance());
            self.noise = self.there + back;
        }
        while let Some((at, len, sent)) = self.under_way.front().copied().filter(|(at, ..)| *at <= self.now) {
            self.under_way.pop_front();
            self.delivered += len;
            // On a jittery line many segments are acknowledged at once.
            self.unmeasured += 1;
            if self.unmeasured >= 12 || self.under_way.len() < 12 || self.jitter.is_zero() {
                self.unmeasured = 0;
                self.variation = (self.variation * 3 + (at - sent).abs_diff(self.smoothed)) / 4;
                self.smoothed = (self.smoothed * 7 + (at - sent)) / 8;
            }
            self.window = (self.window + len).min(self.most);
        }
        let mut in_flight: u64 = self.under_way.iter().map(|(_, len, _)| len).sum();
        while in_flight < self.window && self.unsent > 0 {
            let len = self.unsent.min(SEGMENT);
            self.unsent -= len;
            in_flight += len;
            let on_line = Duration::from_secs_f64(len as f64 / self.rate as f64);
            self.free_at = self.free_at.max(self.now) + on_line;
            if self.loss > 0.0 && self.chance() * 100.0 < self.loss {
                self.free_at += on_line;
                let at = self.free_at + self.rtt * 2;
                let behind = self.under_way.partition_point(|(earlier, ..)| *earlier <= at);
                // A retransmitted segment does not measure the RTT.
                self.under_way.insert(behind, (at, len, at - self.smoothed));
                continue;
            }
            let at = self.free_at + self.rtt + self.noise;
            // Jitter does not reorder segments. A lost segment delays no other: the later ones are acknowledged
            // selectively.
            let before = self.under_way.back().filter(|_| !self.jitter.is_zero());
            let at = before.map_or(at, |(before, ..)| at.max(*before));
            let behind = self.under_way.partition_point(|(earlier, ..)| *earlier <= at);
            self.under_way.insert(behind, (at, len, self.now));
        }
    }

    /// Returns a random number from 0 to 1.
    fn chance(&mut self) -> f64 {
        self.chance =
            self.chance.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (self.chance >> 33) as f64 / f64::from(1u32 << 31)
    }

    /// Lets the link idle for a while, so that the kernel measures the RTT's variation.
    fn stand(&mut self, pace: &mut CongestionController) {
        for _ in 0..80 {
            self.ping(1);
            pace.read(self.reading(), self.now);
        }
    }

    /// Sends small frames there and back, one after the other.
    fn ping(&mut self, times: u32) {
        for _ in 0..times {
            (self.unsent, self.written) = (self.unsent + 100, self.written + 100);
            self.step();
            while !self.under_way.is_empty() {
                self.now += STEP;
                self.step();
            }
        }
    }

    /// Probes the minimum RTT as BBR does every ten seconds: four segments for 200 ms, then everything at once.
    fn look(&mut self, pace: &mut CongestionController) {
        let window = std::mem::replace(&mut self.window, 4 * SEGMENT);
        self.most = 4 * SEGMENT;
        self.run(Some(pace), Duration::from_millis(200) + self.rtt * 2);
        (self.window, self.most) = (window, u64::MAX);
    }

    /// Sends nothing for a while; then the kernel restarts with its initial window.
    fn rest(&mut self, time: Duration) {
        let end = self.now + time;
        self.unsent = 0;
        while self.now < end {
            self.now += STEP;
            self.step();
        }
        self.window = WINDOW;
    }
}

const SECOND: Duration = Duration::from_secs(1);
const STEP: Duration = Duration::from_millis(1);
const SEGMENT: u64 = 1448;
const WINDOW: u64 = 10 * SEGMENT;

#[tokio::test(start_paused = true)]
async fn keystrokes_wait_for_no_reading_until_they_fill_a_segment() {
    let (wire, mut pace) = (Wire::new(50, 40), CongestionController::new());
    let reading = TcpInfo { segment: 1448, ..wire.reading() };
    pace.read(reading, wire.now);
    let later = wire.now + Duration::from_secs(1);
    let mut keystrokes = 0;
    while !pace.wants_reading(later) {
        assert!(!pace.is_blocked(later));
        pace.on_sent(64);
        keystrokes += 1;
    }
    assert_eq!(keystrokes, 1448_usize.div_ceil(64));
    // The kernel still has a segment of the bytes that were sent.
    pace.read(TcpInfo { in_flight: 1448, written: 1448, ..reading }, later);
    assert!(pace.wants_reading(later + Duration::from_secs(1)));
}

#[tokio::test(start_paused = true)]
async fn a_line_is_kept_full_with_a_short_queue_though_the_kernel_would_fill_it() {
    for (mbit, rtt, most) in [(20, 40, 20), (100, 200, 40), (10, 600, 90), (4, 80, 30)] {
        let (mut wire, mut pace) = (Wire::new(mbit, rtt), CongestionController::new());
        wire.stand(&mut pace);
        wire.run(Some(&mut pace), SECOND * 10);
        let share = wire.run(Some(&mut pace), SECOND * 10);
        assert!(share > 0.9, "{share} of {mbit} Mbit/s at {rtt} ms");
        let worst = wire.worst.as_millis();
        assert!(worst <= most, "{worst} ms wait at {mbit} Mbit/s, {rtt} ms");
    }
}

#[tokio::test(start_paused = true)]
async fn what_the_kernel_sends_too_much_at_first_is_not_taken_for_the_line() {
    for (mbit, rtt, most) in [(20, 40, 30), (100, 200, 70), (4, 80, 40)] {
        let (mut wire, mut pace) = (Wire::new(mbit, rtt), CongestionController::new());
        wire.stand(&mut pace);
        wire.run(Some(&mut pace), SECOND * 2);
        wire.run(Some(&mut pace), SECOND * 6);
        let worst = wire.worst.as_millis();
        assert!(worst <= most, "{worst} ms wait at {mbit} Mbit/s, {rtt} ms");
    }
}

#[tokio::test(start_paused = true)]
async fn a_link_comes_up_as_soon_as_its_kernel_does_fresh_and_after_a_pause() {
    for (mbit, rtt) in [(10, 600), (100, 200), (20, 40)] {
        let (mut wire, mut plain, mut pace) =
            (Wire::new(mbit, rtt), Wire::new(mbit, rtt), CongestionController::new());
        for when in ["fresh", "after a pause", "after another"] {
            let (share, alone) = (wire.run(Some(&mut pace), SECOND * 8), plain.run(None, SECOND * 8));
            assert!(share > alone * 0.9, "{when}: {share}, plain TCP {alone} of {mbit} Mbit/s at {rtt} ms");
            wire.rest(SECOND * 20);
            plain.rest(SECOND * 20);
        }
    }
}

#[tokio::test(start_paused = true)]
async fn what_the_kernel_holds_back_waits_with_the_sessions() {
    let (mut wire, mut pace) = (Wire::new(20, 40), CongestionController::new());
    // The kernel sends at a quarter of the line's rate.
    wire.most = 25_000;
    wire.run(Some(&mut pace), SECOND);
    let share = wire.run(Some(&mut pace), SECOND * 5);
    assert!(share > 0.24, "{share}");
    assert!(wire.unsent <= 25_000, "{} bytes waiting in the socket", wire.unsent);
}

#[tokio::test(start_paused = true)]
async fn a_round_trip_that_is_longer_for_another_reason_costs_no_rate() {
    let (mut wire, mut pace) = (Wire::new(50, 40), CongestionController::new());
    wire.run(Some(&mut pace), SECOND * 3);
    wire.noise = Duration::from_millis(30);
    wire.run(Some(&mut pace), SECOND);
    let share = wire.run(Some(&mut pace), SECOND * 5);
    assert!(share > 0.9, "{share}");
    // Once the noise ends, a queue takes its place until the minimum RTT is renewed.
    wire.noise = Duration::ZERO;
    wire.run(Some(&mut pace), SECOND * 12);
    wire.run(Some(&mut pace), SECOND * 5);
    assert!(wire.worst < Duration::from_millis(20), "{:?}", wire.worst);
}

#[tokio::test(start_paused = true)]
async fn answers_that_wait_behind_a_lost_packet_do_not_hold_bulk() {
    let (mut wire, mut pace) = (Wire::new(20, 40), CongestionController::new());
    wire.run(Some(&mut pace), SECOND);
    // No pong arrives at all.
    pace.ping(wire.now);
    let share = wire.run(Some(&mut pace), SECOND * 2);
    assert!(share > 0.9, "{share}");
}

#[tokio::test(start_paused = true)]
async fn behind_a_proxy_pings_are_believed_and_else_the_kernel() {
    for (behind, kernel) in [(100, false), (3, true)] {
        let (mut wire, mut pace) = (Wire::new(20, 10), CongestionController::new());
        wire.run(Some(&mut pace), SECOND);
        for _ in 0..20 {
            let number = pace.ping(wire.now);
            pace.on_ack(number, wire.now + wire.smoothed + Duration::from_millis(behind));
        }
        assert_eq!(pace.retry_after().is_some(), kernel, "{behind} ms");
    }
}

#[tokio::test(start_paused = true)]
async fn a_path_behind_a_proxy_that_becomes_long_is_seen_and_one_without_a_proxy_again() {
    let (mut wire, mut pace) = (Wire::new(20, 10), CongestionController::new());
    wire.run(Some(&mut pace), SECOND);
    for (behind, minutes, kernel) in [(3, 1, true), (100, 11, false), (3, 1, true)] {
        for _ in 0..minutes * 10 {
            wire.rest(SECOND * 6);
            pace.read(wire.reading(), wire.now);
            let number = pace.ping(wire.now);
            pace.on_ack(number, wire.now + wire.smoothed + Duration::from_millis(behind));
        }
        assert_eq!(pace.retry_after().is_some(), kernel, "{behind} ms");
    }
}

#[tokio::test(start_paused = true)]
async fn a_neighbour_that_roams_to_a_long_path_may_have_more_unread() {
    let (mut wire, mut pace) = (Wire::new(1000, 1), CongestionController::new());
    wire.run(Some(&mut pace), SECOND);
    let unread = pace.max_unread(wire.now);
    (wire.rtt, wire.smoothed) = (Duration::from_millis(60), Duration::from_millis(60));
    pace.read(wire.reading(), wire.now);
    assert_eq!([unread, pace.max_unread(wire.now)], [MAX_UNREAD, u64::MAX]);
}

#[tokio::test(start_paused = true)]
async fn neither_shorter_segments_nor_a_counter_that_wraps_seem_to_be_a_faster_line() {
    let (mut wire, mut pace) = (Wire::new(20, 40), CongestionController::new());
    wire.stand(&mut pace);
    wire.run(Some(&mut pace), SECOND * 5);
    // The counter stands just below its end, and then segments become shorter.
    let mut reading = TcpInfo { segment: SEGMENT, delivered: u32::MAX - 100, ..wire.reading() };
    pace.read(reading, wire.now);
    let window = pace.congestion_window();
    for segment in [SEGMENT, SEGMENT / 2] {
        reading.segment = segment;
        for _ in 0..40 {
            wire.now += STEP * 10;
            pace.is_blocked(wire.now);
            reading.delivered = reading.delivered.wrapping_add(10);
            pace.read(reading, wire.now);
        }
        let now = pace.congestion_window();
        assert!(now <= window * 3 / 2, "{now} after {window} with segments of {segment}");
    }
}

#[tokio::test(start_paused = true)]
async fn a_line_that_jitters_is_kept_full() {
    for (mbit, rtt, jitter) in [(50, 40, 30), (10, 80, 20), (20, 20, 10)] {
        let (mut buffered, mut late) = (0.0, 0.0);
        for chance in 1..=10 {
            let (mut wire, mut pace) = (Wire::new(mbit, rtt), CongestionController::new());
            (wire.jitter, wire.chance) = (Duration::from_millis(jitter), chance);
            wire.ping(10);
            buffered += wire.run(Some(&mut pace), SECOND * 6) / 10.0;
            late += wire.run(Some(&mut pace), SECOND * 10) / 10.0;
        }
        assert!(
            buffered > 0.7 && late > 0.9,
            "{buffered}, {late} of {mbit} Mbit/s at {rtt} ms, jitter {jitter}"
        );
    }
}

#[tokio::test(start_paused = true)]
async fn a_line_that_jitters_is_kept_full_behind_echoes_that_met_its_least_round_trip() {
    let (mut buffered, mut late, mut least) = (0.0, 0.0, 1.0f64);
    for chance in 1..=20 {
        let (mut wire, mut pace) = Wire::behind_echoes(chance);
        buffered += wire.run(Some(&mut pace), SECOND * 3) / 20.0;
        let share = wire.run(Some(&mut pace), SECOND * 12);
        (late, least) = (late + share / 20.0, least.min(share));
    }
    assert!(buffered > 0.7 && late > 0.9 && least > 0.7, "{buffered}, {late}, minimum {least}");
}

#[tokio::test(start_paused = true)]
async fn a_long_copy_next_to_an_interactive_link_does_not_sink_where_the_line_jitters() {
    let (mut mean, mut least) = (0.0, 1.0f64);
    for chance in 1..=20 {
        let (mut wire, mut pace) = Wire::behind_echoes(chance);
        pace.set_shared(true);
        wire.run(Some(&mut pace), SECOND * 3);
        for _ in 0..12 {
            let share = wire.run(Some(&mut pace), SECOND * 5);
            (mean, least) = (mean + share / 240.0, least.min(share));
        }
    }
    assert!(mean > 0.9 && least > 0.7, "{mean}, minimum {least} in five seconds");
}

#[tokio::test(start_paused = true)]
async fn a_cap_that_is_much_too_low_grows_on_a_line_that_jitters() {
    let mut mean = 0.0;
    for chance in 1..=20 {
        let (mut wire, mut pace) = (Wire::new(5, 40), CongestionController::new());
        (wire.jitter, wire.chance) = (Duration::from_millis(30), chance);
        wire.run(Some(&mut pace), SECOND * 4);
        // Other traffic that used nine tenths of the line ends.
        wire.rate *= 10;
        wire.run(Some(&mut pace), SECOND * 4);
        mean += wire.run(Some(&mut pace), SECOND * 4) / 20.0;
    }
    assert!(mean > 0.7, "{mean}");
}

#[tokio::test(start_paused = true)]
async fn a_queue_that_stands_while_little_is_sent_is_not_ours() {
    let (mut wire, mut pace) = (Wire::new(10, 600), CongestionController::new());
    wire.run(Some(&mut pace), SECOND);
    // Answers are queued behind traffic in the other direction while only keystrokes are sent in this one.
    wire.noise = Duration::from_millis(200);
    for _ in 0..300 {
        wire.ping(1);
        pace.read(wire.reading(), wire.now);
        pace.is_blocked(wire.now);
    }
    wire.noise = Duration::ZERO;
    let share = wire.run(Some(&mut pace), SECOND * 8);
    let alone = Wire::new(10, 600).run(None, SECOND * 8);
    assert!(share > alone * 0.85, "{share}, plain TCP {alone}");
}

#[tokio::test(start_paused = true)]
async fn a_line_that_a_kernel_emptied_for_a_look_is_not_flooded_behind_that() {
    for (mbit, rtt, most) in [(100, 200, 45), (1000, 20, 25), (10, 600, 130)] {
        let (mut wire, mut pace) = (Wire::new(mbit, rtt), CongestionController::new());
        wire.run(Some(&mut pace), SECOND * 12);
        for _ in 0..5 {
            wire.run(Some(&mut pace), SECOND * 3);
            wire.look(&mut pace);
            let share = wire.run(Some(&mut pace), SECOND * 3);
            let worst = wire.worst.as_millis();
            assert!(worst <= most && share > 0.75, "{worst} ms wait, {share} of {mbit} Mbit/s at {rtt} ms");
        }
    }
}

#[tokio::test(start_paused = true)]
async fn what_the_kernel_assumes_of_a_new_line_and_a_queue_behind_its_look_are_no_jitter_for_long() {
    for (mbit, rtt, most) in [(10, 600, 110), (100, 200, 40), (20, 40, 20)] {
        for stands in [false, true] {
            let (mut wire, mut pace) = (Wire::new(mbit, rtt), CongestionController::new());
            pace.set_shared(true);
            if stands {
                wire.stand(&mut pace);
            }
            // The assumption is soon forgotten on a short path, and never trusted on a long one.
            wire.run(Some(&mut pace), SECOND * 12);
            for looks in 0..2 {
                wire.run(Some(&mut pace), SECOND * 3);
                let worst = wire.worst.as_millis();
                let what = format!("link stands: {stands}, {looks} looks");
                assert!(worst <= most, "{what}: {worst} ms wait at {mbit} Mbit/s, {rtt} ms");
                wire.look(&mut pace);
                wire.run(Some(&mut pace), SECOND * 3);
            }
        }
    }
}

#[tokio::test(start_paused = true)]
async fn what_the_doubling_sends_too_much_drains_soon_and_costs_no_rate() {
    for (mbit, rtt, most) in [(10, 600, 400), (7, 600, 400), (130, 200, 120), (70, 200, 120), (20, 40, 70)] {
        let (mut wire, mut plain, mut pace) =
            (Wire::new(mbit, rtt), Wire::new(mbit, rtt), CongestionController::new());
        wire.stand(&mut pace);
        let share = wire.run(Some(&mut pace), SECOND * 6) / plain.run(None, SECOND * 6);
        let first = wire.worst.as_millis();
        wire.run(Some(&mut pace), SECOND * 2);
        wire.run(Some(&mut pace), SECOND * 4);
        let then = wire.worst.as_millis();
        let what =
            format!("{share} of plain TCP, {first} ms, then {then} ms wait at {mbit} Mbit/s, {rtt} ms");
        assert!(share > 0.98 && first <= most && then <= (rtt / 6).max(20).into(), "{what}");
    }
}

#[tokio::test(start_paused = true)]
async fn on_a_short_way_bulk_waits_for_a_peer_that_is_behind_with_reading_the_sooner_next_to_interactive_ones()
 {
    const MIB: u64 = 1 << 20;
    for (rtt, interactive_before, most) in [
        (1, None, Some(4 * MIB)),
        (1, Some(0), Some(384 << 10)),
        (1, Some(9), Some(384 << 10)),
        (1, Some(10), Some(4 * MIB)),
        (10, None, None),
        (10, Some(0), None),
    ] {
        let (mut wire, mut pace, mut number) = (Wire::new(8000, rtt), CongestionController::new(), 0);
        if let Some(seconds) = interactive_before {
            pace.interactive(wire.now);
            wire.now += SECOND * seconds;
        }
        let mut pulled = 0;
        while pulled < 32 * MIB {
            // The remote kernel has acknowledged everything.
            (wire.written, wire.delivered) = (pulled, pulled);
            pace.read(wire.reading(), wire.now);
            if pace.is_blocked(wire.now) {
                break;
            }
            pace.on_sent(32 * 1024);
            pulled += 32 * 1024;
            if pace.ping_due(wire.now) {
                number = pace.ping(wire.now);
            }
        }
        assert_eq!(
            pulled,
            most.unwrap_or(32 * MIB),
            "unread at {rtt} ms, interactive before {interactive_before:?} s"
        );
        pace.on_ack(number, wire.now);
        assert!(!pace.is_blocked(wire.now));
    }
}

#[tokio::test(start_paused = true)]
async fn on_a_line_that_jitters_only_a_short_queue_stands_and_a_longer_way_is_learnt() {
    let (mut standing, mut longer) = (Duration::ZERO, 0.0);
    for chance in 1..=8 {
        let (mut wire, mut pace) = Wire::behind_echoes(chance);
        wire.run(Some(&mut pace), SECOND * 6);
        // The minimum RTT is renewed twice meanwhile.
        for _ in 0..2000 {
            wire.run(Some(&mut pace), Duration::from_millis(10));
            standing += wire.free_at.saturating_duration_since(wire.now) / 16_000;
        }
        wire.rtt += Duration::from_millis(25);
        wire.run(Some(&mut pace), SECOND * 3);
        longer += wire.run(Some(&mut pace), SECOND * 12) / 8.0;
    }
    assert!(standing < Duration::from_millis(20), "standing queue of {standing:?}");
    assert!(longer > 0.75, "{longer} of the line once it is longer");
}

#[tokio::test(start_paused = true)]
async fn next_to_an_interactive_link_no_queue_stands_for_most_of_the_time_and_the_line_is_kept_nearly_full() {
    for (mbit, rtt, jitter, loss) in
        [(50, 40, 30, 0.0), (20, 40, 0, 0.0), (4, 80, 0, 3.0), (100, 200, 0, 0.0), (10, 600, 0, 0.0)]
    {
        let (mut share, mut queues) = (0.0, Vec::new());
        for chance in 1..=4 {
            let (mut wire, mut pace) = (Wire::new(mbit, rtt), CongestionController::new());
            (wire.jitter, wire.chance, wire.loss) = (Duration::from_millis(jitter), chance, loss);
            wire.ping(10);
            wire.run(Some(&mut pace), SECOND * 6);
            pace.set_shared(true);
            wire.run(Some(&mut pace), SECOND * 6);
            for _ in 0..6000 {
                share += wire.run(Some(&mut pace), Duration::from_millis(10)) / 24_000.0;
                queues.push(wire.free_at.saturating_duration_since(wire.now));
            }
        }
        queues.sort();
        let (usual, line) =
            (queues[queues.len() / 2], format!("{mbit} Mbit/s at {rtt} ms, jitter {jitter}, {loss} % lost"));
        assert!(usual < Duration::from_millis(7) && share > 0.88, "a queue of {usual:?}, {share} of {line}");
    }
}

#[tokio::test(start_paused = true)]
async fn next_to_an_interactive_link_what_the_line_carries_is_learnt_again_once_it_is_more_or_less() {
    for (before, after) in [(20, 8), (8, 20)] {
        let (mut wire, mut pace) = (Wire::new(before, 40), CongestionController::new());
        wire.ping(10);
        pace.set_shared(true);
        wire.run(Some(&mut pace), SECOND * 15);
        wire.rate = after * 125_000;
        let (buffered, late) = if after < before { (3, 10) } else { (22, 30) };
        wire.run(Some(&mut pace), SECOND * buffered);
        let share = wire.run(Some(&mut pace), SECOND * late);
        let longest = wire.worst;
        assert!(share > 0.9, "{share} of the line once it carries {after} Mbit/s");
        assert!(longest < Duration::from_millis(40), "a queue of {longest:?} once it carries {after} Mbit/s");
    }
}

#[tokio::test(start_paused = true)]
async fn next_to_an_interactive_link_a_way_that_becomes_longer_is_learnt_and_the_line_kept_full() {
    for more in [6, 10, 30] {
        let (mut wire, mut pace) = (Wire::new(20, 40), CongestionController::new());
        wire.ping(10);
        pace.set_shared(true);
        wire.run(Some(&mut pace), SECOND * 15);
        wire.rtt += Duration::from_millis(more);
        wire.run(Some(&mut pace), SECOND * 45);
        let share = wire.run(Some(&mut pace), SECOND * 30);
        assert!(share > 0.92, "{share} of the line once it is {more} ms longer");
    }
}

#[tokio::test(start_paused = true)]
async fn a_link_with_an_interactive_one_before_its_first_kernel_reading_cruises() {
    let (wire, mut pace) = (Wire::new(20, 40), CongestionController::new());
    pace.set_shared(true);
    pace.read(wire.reading(), wire.now);
    assert!(pace.kernel.is_some_and(|kernel| kernel.cruise.is_some()));
}
