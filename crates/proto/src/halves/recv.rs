//! The receiving half of a session: the remote's limit, and the bytes that have arrived.
//!
//! ```text
//! limit = taken by the reader + queued (arrived, unread) + room (the remote may still send)
//! ```
//!
//! Credit is announced once half of the window is available. A steady sender then never stops, and small reads do not
//! cost a message each. Data past `limit` is a protocol violation. Nothing here waits, locks or reads a clock.
//!
//! A limit cannot be withdrawn. But a session that is idle gives the memory behind it back, and gets some again when
//! bytes arrive. If there is none by then, they are dropped, and are sent again over the next path.

use std::collections::VecDeque;
use std::time::Duration;

use bytes::Bytes;
use tokio::time::Instant;

use crate::budget::{PairedReservation, Reservation};
use crate::halves::{FlowControlError, PIECE, WindowLimits, as_u64, joined};
use crate::window::{LinkRtt, PathRttEstimator, ReadRate};

/// The receiving half. See the formula at the top of this module.
#[derive(Debug)]
pub struct RecvHalf {
    queue: Queue,
    /// Offset stored in order, read or not; the end counts as one.
    received: u64,
    taken: u64,
    limit: u64,
    /// Last value of `received` that was sent to the remote.
    reported: u64,
    total: Option<u64>,
    window: u64,
    windows: WindowLimits,
    /// Reservation for the bytes below the limit; if the session was idle, only for those that are queued.
    reserved: Reservation,
    /// Value of `taken` at the last check whether the session is idle.
    checked: Option<u64>,
    /// Whether bytes that arrive are dropped.
    is_closed: bool,
    read_rate: ReadRate,
    last_data: Option<Instant>,
    /// Limit before the last credit.
    old_limit: u64,
    rtts: PathRttEstimator,
}

impl RecvHalf {
    /// Creates a half with the initial window. `reserved` already holds the window's bytes.
    pub fn new(windows: WindowLimits, reserved: Reservation) -> Self {
        Self {
            queue: Queue::new(reserved.new_empty()),
            received: 0,
            taken: 0,
            limit: windows.start,
            reported: 0,
            total: None,
            window: windows.start,
            windows,
            reserved,
            checked: None,
            is_closed: false,
            read_rate: ReadRate::default(),
            last_data: None,
            old_limit: windows.start,
            rtts: PathRttEstimator::default(),
        }
    }

    /// Follows a new path. A remote that honours no limit has none, and its queued bytes are counted in `unpromised`
    /// instead; it has sent nothing if another remote follows it.
    pub fn set_unpromised(&mut self, unpromised: Option<PairedReservation>) {
        if let Some(room) = unpromised {
            self.limit = u64::MAX;
            self.queue.count_in(QueueCost::All(room));
        } else if self.queue.is_unpromised() {
            self.limit = self.taken.saturating_add(self.window);
            self.queue.count_in(QueueCost::Overhead(self.reserved.new_empty()));
        }
    }

    /// Gives the memory behind the limit back if less than a window was read since the last call. Must be called every
    /// few seconds.
    pub fn release_idle(&mut self) {
        let before = self.checked.replace(self.taken);
        if before.is_some_and(|before| self.taken - before < self.window) {
            self.release();
        }
    }

    /// Gives the memory behind the limit back if nothing has arrived for a second, because another session needs it.
    pub fn release_silent(&mut self, now: Instant) {
        if self.last_data.is_some_and(|last| now - last >= SILENCE) {
            self.release();
        }
    }

    fn release(&mut self) {
        if self.queue.is_unpromised() {
            return;
        }
        self.window = self.windows.start;
        let start = usize::try_from(self.window).unwrap_or(usize::MAX);
        let kept = self.queue.bytes().max(start.min(IDLE_RESERVATION));
        self.reserved.resize(kept.min(self.reserved.size()));
    }

    /// Returns how many of `len` bytes that arrive can be stored.
    fn room_for(&mut self, len: usize) -> usize {
        let all = self.queue.bytes() + len;
        let more = all.saturating_sub(self.reserved.size());
        let has_room = more == 0
            || self.queue.is_unpromised()
            || self.reserved.try_grow_arrived(more, as_u64(all) <= self.windows.start);
        if has_room { len } else { len.saturating_sub(more) }
    }

    /// Stores bytes that arrived. After [`FlowControlError::NoMemory`] the remote must send the rest again.
    pub fn data(&mut self, mut bytes: Bytes, now: Instant) -> Result<(), FlowControlError> {
        let end = self.received.saturating_add(as_u64(bytes.len()));
        if self.total.is_some() {
            return Err(FlowControlError::PastEnd);
        }
        if end > self.limit {
            return Err(FlowControlError::PastLimit(end, self.limit));
        }
        if bytes.is_empty() {
            return Ok(());
        }
        // After a pause the old rate and RTT are no measure of the reader, so measuring starts again.
        if self.last_data.is_some_and(|last| now - last >= WINDOW_IDLE) {
            self.window = self.windows.start;
            self.read_rate.interrupt();
            self.rtts.interrupt();
        }
        self.last_data = Some(now);
        // The remote may continue to send for an owner that has left. It must not be blocked at its limit before its
        // end.
        if self.is_closed {
            self.received = end;
            self.taken = end;
            return Ok(());
        }
        let len = bytes.len();
        // The part that fits need not be sent again.
        bytes.truncate(self.room_for(len));
        let is_whole = bytes.len() == len;
        let end = self.received + as_u64(bytes.len());
        let held_up = self.rtts.arrived(end, now);
        if held_up && self.queue.bytes() == 0 && !self.rtts.is_short() {
            // The reader waited as well, so the window was too small.
            self.grow(self.window.saturating_mul(2));
        }
        self.read_rate.arrived(self.taken, now);
        self.received = end;
        self.queue.push(bytes);
        if is_whole { Ok(()) } else { Err(FlowControlError::NoMemory) }
    }

    /// Stores the end of the remote's direction, which had `total` bytes including its end.
    pub fn finish(&mut self, total: u64) -> Result<(), FlowControlError> {
        if self.total == Some(total) {
            return Ok(());
        }
        if self.total.is_some() || total != self.received.saturating_add(1) {
            return Err(FlowControlError::WrongEnd(total, self.received));
        }
        self.total = Some(total);
        self.received = total;
        Ok(())
    }

    /// Checks that everything has arrived from a remote whose connection failed after `total` bytes, including its end.
    /// With 0 it has discarded the rest.
    pub(crate) fn check_reset_at(&self, total: u64) -> Result<(), FlowControlError> {
        let here = self.total.unwrap_or(self.received.saturating_add(1));
        if total == 0 || here == total {
            Ok(())
        } else {
            Err(FlowControlError::WrongEnd(total, self.received))
        }
    }

    /// Returns the next bytes for the reader, and widens the window if the reader is fast.
    pub fn take(&mut self, now: Instant, link_rtt: LinkRtt) -> Option<Bytes> {
        let bytes = self.queue.pop()?;
        let before = self.taken;
        self.taken += as_u64(bytes.len());
        let rtt = self.rtts.effective_rtt(link_rtt);
        let target = self.read_rate.handle_read(before, self.taken, rtt, now);
        let most = if self.rtts.is_short() { self.taken / 2 } else { u64::MAX };
        self.grow(target.min(most));
        Some(bytes)
    }

    /// Returns true if a Credit is due.
    pub(crate) fn credit_due(&self) -> bool {
        let unreported = self.received - self.reported;
        if self.total.is_some() {
            return unreported > 0;
        }
        let rise = self.next_limit().saturating_sub(self.limit);
        rise >= (self.window / 2).max(1) || unreported >= MAX_DELAYED_ACK
    }

    /// Returns true if a due Credit must not be delayed.
    ///
    /// That is the case if the remote's direction has ended. It is also the case if the remote may send less than it
    /// does in 1.25 RTTs: it would reach its limit before the Credit arrives.
    pub(crate) fn is_credit_urgent(&self) -> bool {
        let in_one_rtt = self.rtts.scale_to_min_rtt(self.read_rate.in_one_rtt(self.taken));
        self.total.is_some() || self.limit.saturating_sub(self.received) < in_one_rtt + in_one_rtt / 4
    }

    /// Returns the fields of a Credit, `received` and `limit`, and applies them.
    pub(crate) fn credit(&mut self) -> (u64, u64) {
        self.old_limit = self.limit;
        self.limit = self.next_limit();
        self.reported = self.received;
        if !self.queue.is_unpromised() {
            let promised = usize::try_from((self.limit - self.taken).max(self.window)).unwrap_or(usize::MAX);
            if self.total.is_some() {
                self.reserved.resize(self.queue.bytes());
            } else if promised < self.reserved.size() {
                self.reserved.resize(promised);
            }
        }
        (self.received, self.limit)
    }

    /// Records that the credit was sent on the path on which the bytes arrive.
    pub fn credit_sent(&mut self, now: Instant) {
        if self.limit > self.old_limit {
            self.rtts.credit(self.old_limit, self.received, now);
        }
    }

    /// Discards measurements, because the session runs on another path.
    pub fn reset_rtt(&mut self) {
        self.rtts.forget();
    }

    /// Returns the limit that the remote knows, or learns from the next reply; used in
    /// [`SessionFrame::Open`](crate::frame::SessionFrame::Open) and similar frames.
    pub(crate) fn limit(&self) -> u64 {
        self.limit
    }

    /// Drops all bytes that arrive from now on, and releases their budget at once. The remote may read the last frame
    /// much later.
    pub(crate) fn close(&mut self) {
        self.is_closed = true;
        self.read_rate.interrupt();
        // Without a limit, the queue itself counts its bytes.
        self.reserved.resize(if self.queue.is_unpromised() { 0 } else { self.queue.bytes() });
    }

    /// Drops bytes that were stored but not taken, as if the reader had taken them.
    pub fn discard(&mut self) {
        self.taken += as_u64(self.queued());
        self.queue.clear();
        self.read_rate.interrupt();
    }

    /// Returns the bytes stored and not yet taken.
    pub fn queued(&self) -> usize {
        self.queue.bytes()
    }

    /// Returns the bytes of memory that are reserved for it.
    pub fn memory(&self) -> usize {
        self.reserved.size()
    }

    /// Returns the queued bytes without a limit: all of them, or 0.
    pub fn unreserved(&self) -> usize {
        if self.queue.is_unpromised() { self.queue.bytes() } else { 0 }
    }

    /// Returns the total number of bytes that the reader has taken.
    pub fn taken(&self) -> u64 {
        self.taken
    }

    /// Returns true if nothing has arrived.
    pub fn is_untouched(&self) -> bool {
        self.received == 0
    }

    /// Returns true if the end of stream has arrived.
    pub fn is_ended(&self) -> bool {
        self.total.is_some()
    }

    /// Returns true if the end of stream has arrived and was acknowledged.
    pub(crate) fn is_done(&self) -> bool {
        self.total.is_some_and(|total| self.reported == total)
    }

    fn next_limit(&self) -> u64 {
        if self.total.is_some() { self.limit } else { self.limit.max(self.taken.saturating_add(self.window)) }
    }

    fn grow(&mut self, target: u64) {
        let wider = target.min(self.windows.max);
        // Do not grow for each read.
        if wider < self.window + self.window / 8 || self.queue.is_unpromised() {
            return;
        }
        let promised = usize::try_from(wider).unwrap_or(usize::MAX);
        if self.reserved.try_grow_shared(promised.saturating_sub(self.reserved.size())) {
            self.window = wider;
        }
    }
}

/// Maximum number of bytes that stay reserved for an idle session: more than what it takes to type.
const IDLE_RESERVATION: usize = 4 * 1024;
/// Time without data after which a session gives way to one that needs memory: more than a long RTT, since a window that
/// is too small arrives once in each.
const SILENCE: Duration = Duration::from_secs(1);
/// A session without data for this long starts again with its initial window.
const WINDOW_IDLE: Duration = Duration::from_secs(5);
/// Maximum number of received bytes without a Credit. A remote that has spent its memory for unacknowledged bytes
/// relies on it.
const MAX_DELAYED_ACK: u64 = 64 * 1024;

/// The bytes that wait for a reader. Small pieces are joined on arrival, so that one-byte frames cost no more than
/// large ones.
#[derive(Debug)]
pub(crate) struct Queue {
    pieces: VecDeque<Bytes>,
    bytes: usize,
    cost: QueueCost,
}

/// What a [`Queue`] counts in budgets.
#[derive(Debug)]
pub(crate) enum QueueCost {
    /// The overhead of the pieces: their bytes were promised to the remote, and are counted with its limit.
    Overhead(Reservation),
    /// The pieces with their bytes, because the remote has no limit.
    All(PairedReservation),
}

impl Queue {
    /// Creates an empty queue for a remote that honours a limit.
    pub(crate) fn new(cost: Reservation) -> Self {
        Self { pieces: VecDeque::new(), bytes: 0, cost: QueueCost::Overhead(cost) }
    }

    /// Counts what is queued in other budgets.
    pub(crate) fn count_in(&mut self, cost: QueueCost) {
        self.cost = cost;
        self.count();
    }

    /// Returns true if the bytes themselves are counted, because the remote has no limit.
    pub(crate) fn is_unpromised(&self) -> bool {
        matches!(self.cost, QueueCost::All(_))
    }

    pub(crate) fn push(&mut self, bytes: Bytes) {
        self.bytes += bytes.len();
        match self.pieces.pop_back() {
            Some(last) if last.len() + bytes.len() <= QUEUE_JOINED => {
                self.pieces.push_back(joined(last, &bytes))
            }
            last => self.pieces.extend(last.into_iter().chain([bytes])),
        }
        self.count();
    }

    pub(crate) fn pop(&mut self) -> Option<Bytes> {
        let bytes = self.pieces.pop_front()?;
        self.bytes -= bytes.len();
        self.count();
        Some(bytes)
    }

    pub(crate) fn clear(&mut self) {
        (self.pieces, self.bytes) = (VecDeque::new(), 0);
        self.count();
    }

    /// Returns the number of queued bytes.
    pub(crate) fn bytes(&self) -> usize {
        self.bytes
    }

    fn count(&mut self) {
        let pieces = self.pieces.len() * PIECE;
        match &mut self.cost {
            QueueCost::Overhead(cost) => cost.resize(pieces),
            QueueCost::All(cost) => cost.resize(self.bytes + pieces),
        }
    }
}

/// Consecutive pieces are joined up to this many bytes.
const QUEUE_JOINED: usize = 4 * 1024;

#[cfg(test)]
mod tests {
    use std::collections::VecDeque;
    use std::sync::Arc;

    use proptest::prelude::*;

    use crate::budget::Budget;

    use super::*;

    const WINDOWS: WindowLimits = WindowLimits { start: 1000, max: 8000 };

    fn half(budget: usize) -> RecvHalf {
        RecvHalf::new(WINDOWS, Budget::new(budget).try_reserve(1000).unwrap())
    }

    /// Returns RTTs of a link for which only the latest is known.
    fn over(latest: Duration) -> LinkRtt {
        LinkRtt { latest, least: None }
    }

    fn bytes(len: usize) -> Bytes {
        vec![0; len].into()
    }

    proptest! {
        /// A sender within its limit never violates the protocol and never stops permanently, and memory stays within a
        /// window, also where offsets outgrow 32 bits.
        #[test]
        fn credit_keeps_a_steady_sender_going(steps in prop::collection::vec((0usize..2000, 0u64..50, any::<bool>()), 1..200), start in prop_oneof![Just(0), Just((1u64 << 32) - 5000)]) {
            let mut half = RecvHalf { received: start, taken: start, reported: start, limit: start + WINDOWS.start, ..half(1 << 20) };
            let mut now = Instant::now();
            let mut sent = start;
            let mut limit = half.limit();
            for (want, millis, read) in steps {
                now += Duration::from_millis(millis);
                let len = want.min((limit - sent) as usize);
                half.data(bytes(len), now).unwrap();
                sent += len as u64;
                if read { while half.take(now, over(Duration::from_millis(10))).is_some() {} }
                if half.credit_due() {
                    let (received, new) = half.credit();
                    prop_assert_eq!(received, sent);
                    prop_assert!(new >= limit);
                    limit = new;
                }
                prop_assert!(half.queued() as u64 + (limit - sent) <= 8000);
                prop_assert!(half.reserved.size() as u64 >= limit - half.taken());
                prop_assert!(!(read && limit == sent), "a sender may send if its reader keeps up");
            }
        }
    }

    proptest! {
        /// For any split into pieces, the queue returns the bytes that arrived, costs little more, and releases
        /// everything.
        #[test]
        fn queued_data_costs_about_its_bytes(cuts in prop::collection::vec(prop_oneof![1usize..5, 1usize..5000], 1..300), plain: bool) {
            let promised = Budget::new(1 << 31);
            let plain_budgets = [Budget::new(0), Budget::new(0)];
            let mut half = RecvHalf::new(WindowLimits { start: 1 << 30, max: 1 << 30 }, promised.reservation());
            if plain { half.set_unpromised(Some(PairedReservation { all: plain_budgets[0].reservation(), of_link: plain_budgets[1].reservation() })); }
            let mut came = Vec::new();
            for (n, cut) in cuts.into_iter().enumerate() {
                came.extend(vec![n as u8; cut]);
                half.data(vec![n as u8; cut].into(), Instant::now()).unwrap();
            }
            let used = plain_budgets.each_ref().map(|budget| budget.used());
            let pieces = promised.used() - half.reserved.size() + used[0].saturating_sub(came.len());
            prop_assert!(pieces <= 96 + came.len() / 20, "{} for {}", pieces, came.len());
            prop_assert_eq!(used, if plain { [came.len() + pieces; 2] } else { [0; 2] });
            let mut taken = Vec::new();
            while let Some(bytes) = half.take(Instant::now(), over(Duration::ZERO)) { taken.extend_from_slice(&bytes); }
            prop_assert!(taken == came);
            prop_assert_eq!((promised.used() - half.reserved.size(), plain_budgets.map(|budget| budget.used())), (0, [0; 2]));
        }
    }

    #[tokio::test(start_paused = true)]
    async fn data_past_the_limit_is_a_violation() {
        let mut half = half(1 << 20);
        half.data(bytes(1000), Instant::now()).unwrap();
        assert_eq!(half.data(bytes(1), Instant::now()), Err(FlowControlError::PastLimit(1001, 1000)));
    }

    #[tokio::test(start_paused = true)]
    async fn a_direction_ends_once_at_its_total_and_is_acknowledged_at_once() {
        let mut half = half(1 << 20);
        half.data(bytes(10), Instant::now()).unwrap();
        assert!(!half.credit_due());
        assert_eq!(half.finish(10), Err(FlowControlError::WrongEnd(10, 10)));
        half.finish(11).unwrap();
        half.finish(11).unwrap();
        assert!(half.credit_due() && !half.is_done());
        assert_eq!(half.credit().0, 11);
        assert!(half.is_done() && !half.credit_due());
        assert_eq!(half.data(bytes(1), Instant::now()), Err(FlowControlError::PastEnd));
    }

    /// Returns the window after two seconds in which the reader took `per_trip` bytes in each RTT of 10 ms.
    async fn window_after(half: &mut RecvHalf, per_trip: usize) -> u64 {
        for _ in 0..200 {
            half.data(bytes(per_trip), Instant::now()).unwrap();
            half.take(Instant::now(), over(Duration::from_millis(10))).unwrap();
            half.credit();
            tokio::time::advance(Duration::from_micros(10_001)).await;
        }
        half.window
    }

    #[tokio::test(start_paused = true)]
    async fn a_window_is_two_round_trips_of_reading_within_the_budget() {
        assert_eq!(window_after(&mut half(1 << 20), 200).await, 1000);
        // It is not known whether the first RTT is followed by a larger one.
        assert_eq!(window_after(&mut half(1 << 20), 700).await, 2800);
        let mut steady = half(1 << 20);
        window_after(&mut steady, 200).await;
        assert_eq!(window_after(&mut steady, 290).await, 1000);
        assert_eq!(window_after(&mut steady, 420).await, 1000);
        assert_eq!(window_after(&mut steady, 600).await, 1200);
        assert_eq!(window_after(&mut steady, 900).await, 2700);
        assert_eq!(window_after(&mut half(1 << 20), 1000).await, 4000);
        assert_eq!(
            window_after(&mut half(4000), 1000).await,
            2000,
            "half of the budget stays free for others"
        );
    }

    /// Simulates TCP's slow start over an RTT of 600 ms, up to `rate` bytes per millisecond.
    ///
    /// Credits that are not urgent are at least `apart` ms apart. Returns the bytes sent, the bytes of a sender that is
    /// never stopped, and the number of credits in the last ten RTTs.
    async fn doubles_up_to(rate: u64, apart: usize, round_trips: usize) -> (u64, u64, usize) {
        const WAY: usize = 300;
        let windows = WindowLimits { start: 64 * 1024, max: 4 << 20 };
        let mut half = RecvHalf::new(windows, Budget::new(64 << 20).try_reserve(64 * 1024).unwrap());
        let (mut sent, mut limit, mut would) = (0, half.limit(), 0);
        let (mut data, mut credits) = (VecDeque::from([0; WAY]), VecDeque::from([limit; WAY]));
        let mut credit_times = Vec::<usize>::new();
        for milli in 0..round_trips * 2 * WAY {
            limit = limit.max(credits.pop_front().unwrap());
            let doublings = (milli / (2 * WAY)).min(20);
            would += (((14 * 1024) << doublings) / (2 * WAY as u64)).min(rate);
            let len = would.min(limit) - sent;
            sent += len;
            data.push_back(len as usize);
            half.data(bytes(data.pop_front().unwrap()), Instant::now()).unwrap();
            while half.take(Instant::now(), over(Duration::from_millis(600))).is_some() {}
            let may = half.is_credit_urgent() || credit_times.last().is_none_or(|last| milli >= last + apart);
            credits.push_back(if may && half.credit_due() {
                credit_times.push(milli);
                half.credit().1
            } else {
                0
            });
            tokio::time::advance(Duration::from_millis(1)).await;
        }
        let last = credit_times.iter().filter(|at| **at >= round_trips.saturating_sub(10) * 2 * WAY).count();
        (sent, would, last)
    }

    #[tokio::test(start_paused = true)]
    async fn a_sender_that_doubles_each_round_trip_is_hardly_limited() {
        let (sent, would, _) = doubles_up_to(u64::MAX, 0, 7).await;
        assert!(would > 1_700_000 && sent > would * 99 / 100, "{sent} of {would}");
    }

    #[tokio::test(start_paused = true)]
    async fn credits_a_quarter_of_a_round_trip_apart_limit_no_sender() {
        for rate in [20, 200, 2000, 4000] {
            let (at_once, _, _) = doubles_up_to(rate, 0, 20).await;
            let (sent, _, credits) = doubles_up_to(rate, 150, 20).await;
            assert!(sent >= at_once * 999 / 1000 && credits <= 40, "{sent} of {at_once}, {credits} credits");
        }
        // Beyond the largest window, every credit is needed.
        let (at_once, would, often) = doubles_up_to(10_000, 0, 20).await;
        let (sent, _, credits) = doubles_up_to(10_000, 150, 20).await;
        assert!(at_once < would * 9 / 10 && sent >= at_once * 99 / 100, "{sent} of {at_once}, of {would}");
        assert!(credits > 50 && often > 500, "{credits} credits, {often} without waiting");
    }

    /// One RTT may bring half a window: the credit for the first frame of a burst then covers it, and none is due for
    /// the others.
    #[tokio::test(start_paused = true)]
    async fn a_sender_blocked_at_its_limit_gets_a_wider_window() {
        let (way, windows) = (Duration::from_millis(600), WindowLimits { start: 16 * 4096, max: 4 << 20 });
        let mut half = RecvHalf::new(windows, Budget::new(64 << 20).try_reserve(16 * 4096).unwrap());
        let (mut sent, mut limit) = (0, half.limit());
        for round in 0..30 {
            let begin = Instant::now();
            // The sender starts slowly, and then sends everything that it may.
            let most = [6, 6, 9, 10, 10, 14].get(round).map_or(u64::MAX, |frames| frames * 4096);
            let until = limit.min(most.saturating_add(sent));
            while sent < until {
                sent += 4096;
                half.data(bytes(4096), Instant::now()).unwrap();
                half.take(Instant::now(), over(way)).unwrap();
                tokio::time::advance(Duration::from_micros(100)).await;
                if half.credit_due() {
                    limit = half.credit().1;
                    half.credit_sent(Instant::now());
                }
            }
            tokio::time::sleep_until(begin + way + Duration::from_millis(5)).await;
        }
        assert!(half.window > 3 << 20, "{}", half.window);
    }

    #[tokio::test(start_paused = true)]
    async fn a_sender_blocked_by_a_slow_reader_gets_no_wider_window() {
        let windows = WindowLimits { start: 128 * 1024, max: 4 << 20 };
        let mut half = RecvHalf::new(windows, Budget::new(64 << 20).try_reserve(128 * 1024).unwrap());
        let (mut sent, mut limit) = (0, half.limit());
        let mut credits = VecDeque::from([None; 60]);
        // The reader takes 4 KiB every 100 ms; the RTT is 600 ms.
        for tick in 0..2000 {
            while sent < limit {
                sent += 4096;
                half.data(bytes(4096), Instant::now()).unwrap();
            }
            if tick % 10 == 0 {
                half.take(Instant::now(), over(Duration::from_millis(600)));
            }
            let credit = half.credit_due().then(|| half.credit().1);
            if credit.is_some() {
                half.credit_sent(Instant::now());
            }
            credits.push_back(credit);
            limit = credits.pop_front().flatten().unwrap_or(limit);
            tokio::time::advance(Duration::from_millis(10)).await;
        }
        assert_eq!(half.window, windows.start);
    }

    /// Returns the window once `all` bytes were taken, as fast as the window allows.
    async fn window_once_taken(all: usize, way: LinkRtt) -> u64 {
        let windows = WindowLimits { start: 64 * 1024, max: 4 << 20 };
        let mut half = RecvHalf::new(windows, Budget::new(64 << 20).try_reserve(64 * 1024).unwrap());
        while half.taken < all as u64 {
            while half.received < half.limit() && half.taken < all as u64 {
                let len = (half.limit() - half.received).min(8 * 1024);
                half.data(bytes(len as usize), Instant::now()).unwrap();
                half.take(Instant::now(), way).unwrap();
            }
            half.credit();
            half.credit_sent(Instant::now());
            tokio::time::advance(way.latest + Duration::from_micros(1)).await;
        }
        half.window
    }

    #[tokio::test(start_paused = true)]
    async fn a_client_that_never_reads_is_granted_little_more_than_its_kernel_took() {
        let (near, far) = (over(Duration::from_millis(1)), over(Duration::from_millis(50)));
        let busy = LinkRtt { least: Some(Duration::from_micros(300)), ..far };
        for near in [near, busy] {
            assert!(window_once_taken(240 * 1024, near).await <= 128 * 1024);
        }
        assert!(window_once_taken(240 * 1024, far).await >= 240 * 1024);
        assert!(window_once_taken(9 << 20, near).await >= 3 << 20);
    }

    #[tokio::test(start_paused = true)]
    async fn a_reader_that_reads_everything_at_intervals_gets_no_wider_window() {
        let mut half = half(1 << 20);
        for _ in 0..20 {
            let room = (half.limit() - half.received) as usize;
            half.data(bytes(room), Instant::now()).unwrap();
            tokio::time::advance(Duration::from_millis(100)).await;
            while half.take(Instant::now(), over(Duration::from_millis(10))).is_some() {}
            half.credit();
        }
        assert_eq!(half.window, 1000);
    }

    #[tokio::test(start_paused = true)]
    async fn a_window_grows_by_the_rtt_of_the_whole_path_and_not_of_the_first_link() {
        let (way, ping) = (Duration::from_millis(100), Duration::from_millis(1));
        let mut half = half(1 << 20);
        let mut now = Instant::now();
        let (mut sent, mut limit) = (0, half.limit());
        while half.window < 8000 {
            assert!(now.duration_since(Instant::now()) < way * 20, "window stays at {}", half.window);
            // Everything that may be sent arrives and is read at once. The resulting credit takes effect one RTT later.
            half.data(bytes((limit - sent) as usize), now).unwrap();
            sent = limit;
            while half.take(now, over(ping)).is_some() {}
            assert!(half.credit_due());
            limit = half.credit().1;
            half.credit_sent(now);
            now += way;
        }
        assert!(!half.rtts.is_short());
        // Another path may be short.
        half.reset_rtt();
        assert!(half.rtts.is_short());
    }

    /// Transfers `all` bytes as fast as the window allows, and returns the number of RTTs.
    async fn transfer(half: &mut RecvHalf, all: u64, way: LinkRtt) -> u32 {
        let (until, mut trips) = (half.taken + all, 0);
        while half.taken < until {
            while half.received < half.limit && half.taken < until {
                let len = (half.limit - half.received).min(64 * 1024);
                half.data(bytes(len as usize), Instant::now()).unwrap();
                half.take(Instant::now(), way).unwrap();
            }
            half.credit();
            half.credit_sent(Instant::now());
            tokio::time::advance(way.latest + Duration::from_micros(1)).await;
            trips += 1;
        }
        trips
    }

    fn new_half(start: u64, budget: &Arc<Budget>) -> RecvHalf {
        let window = budget.reserve_window(start as usize).unwrap();
        RecvHalf::new(WindowLimits { start: window.size() as u64, max: 4 << 20 }, window)
    }

    /// Returns sessions of one process that have moved bulk, and then only a few keystrokes.
    async fn grown_and_idle(count: usize, start: u64, way: LinkRtt, budget: &Arc<Budget>) -> Vec<RecvHalf> {
        let mut all = Vec::new();
        for _ in 0..count {
            let mut half = new_half(start, budget);
            transfer(&mut half, 12 << 20, way).await;
            for second in 0..10 {
                tokio::time::advance(Duration::from_secs(1)).await;
                half.data(bytes(10), Instant::now()).unwrap();
                half.take(Instant::now(), way).unwrap();
                if second % 5 == 4 {
                    half.release_idle();
                }
            }
            all.push(half);
        }
        all
    }

    /// At a server, a user's program and an edge, with their usual budgets.
    #[tokio::test(start_paused = true)]
    async fn sessions_that_were_fast_once_do_not_slow_the_next_one() {
        for (start, budget, idle) in
            [(64 << 10, 256 << 20, 80), (32 << 10, 64 << 20, 80), (32 << 10, 12 << 20, 200)]
        {
            for millis in [1, 100, 600] {
                let (way, budget) = (over(Duration::from_millis(millis)), Budget::new(budget));
                let mut alone = new_half(start, &Budget::new(budget.limit()));
                let others = grown_and_idle(idle, start, way, &budget).await;
                let mut next = new_half(start, &budget);
                let [alone, next] =
                    [transfer(&mut alone, 24 << 20, way).await, transfer(&mut next, 24 << 20, way).await];
                assert!(next * 10 <= alone * 11, "{next} RTTs next to {}, {alone} alone", others.len());
            }
        }
    }

    /// Every promise can be used at any time, and then nobody reads.
    #[tokio::test(start_paused = true)]
    async fn old_limits_that_are_used_at_once_exceed_no_budget() {
        let budget = Budget::new(12 << 20);
        let mut all = grown_and_idle(40, 32 << 10, over(Duration::from_millis(100)), &budget).await;
        assert!(all.iter().all(|half| half.limit - half.received > 1 << 20), "they were fast");
        let (mut stored, mut refused) = (0, 0);
        for half in &mut all {
            let before = half.received;
            while half.limit > half.received {
                match half.data(bytes(((half.limit - half.received) as usize).min(64 << 10)), Instant::now())
                {
                    Ok(()) => {}
                    Err(why) => {
                        assert_eq!(why, FlowControlError::NoMemory);
                        refused += 1;
                        break;
                    }
                }
            }
            assert!(half.received > before && half.queued() as u64 == half.received - half.taken);
            stored += half.queued();
        }
        assert!(refused > 30 && stored > 8 << 20 && budget.used() <= budget.limit(), "{refused}, {stored}");
        assert!(budget.reserve_window(32 << 10).is_some(), "a new session has room");
        // What was refused is sent again, and has room once the sessions are read.
        let mut half = all.pop().unwrap();
        drop(all);
        while half.take(Instant::now(), over(Duration::from_millis(100))).is_some() {}
        let rest = half.limit - half.taken;
        assert!(rest > 0);
        transfer(&mut half, rest, over(Duration::from_millis(100))).await;
    }

    #[tokio::test(start_paused = true)]
    async fn an_idle_session_loses_its_grown_window() {
        let mut half = half(1 << 20);
        half.grow(4000);
        half.credit();
        assert_eq!((half.window, half.reserved.size()), (4000, 4000));
        let now = Instant::now();
        half.data(bytes(100), now).unwrap();
        half.data(bytes(3900), now + Duration::from_secs(5)).unwrap();
        while half.take(now + Duration::from_secs(6), over(Duration::ZERO)).is_some() {}
        assert_eq!(half.window, 1000);
        half.credit();
        assert_eq!(half.reserved.size(), 1000);
        assert_eq!(half.limit(), 5000);
    }
}
