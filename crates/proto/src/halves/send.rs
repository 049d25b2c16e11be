//! The sending half of a session: bytes that its owner wrote, until the remote has acknowledged them.
//!
//! ```text
//!    base          next                written
//!     | sent, kept  |  unsent           |
//! ----+-------------+-------------------+---> offsets; the end of stream counts as one more
//!     received by the remote: dropped   limit: offset up to which the remote accepts bytes
//! ```
//!
//! Nothing here waits, locks or reads a clock.

use std::collections::VecDeque;

use bytes::{Buf, Bytes, BytesMut};

use crate::budget::Reservation;
use crate::halves::{FlowControlError, PIECE, as_u64, joined};

/// The sending half. See the diagram at the top of this module.
#[derive(Debug)]
pub struct SendHalf {
    /// Bytes starting at `base`, in the pieces in which they were written.
    kept: VecDeque<Bytes>,
    /// Cost of [`Self::kept`]: its pieces with an overhead for each.
    cost: Reservation,
    /// Bytes of the first piece that are acknowledged, and still take memory.
    acked: usize,
    base: u64,
    next: u64,
    /// Highest value of `next` so far, including the end: the remote may have received this much.
    reached: u64,
    written: u64,
    limit: u64,
    /// Index of the piece that contains `next`, and the offset in it.
    cursor: (usize, usize),
    finished: bool,
    finish_sent: bool,
    finish_received: bool,
}

impl SendHalf {
    /// Creates an empty half that may not send yet; `cost` counts the bytes that it keeps.
    pub fn new(cost: Reservation) -> Self {
        Self {
            kept: VecDeque::new(),
            cost,
            acked: 0,
            base: 0,
            next: 0,
            reached: 0,
            written: 0,
            limit: 0,
            cursor: (0, 0),
            finished: false,
            finish_sent: false,
            finish_received: false,
        }
    }

    /// Returns true if the owner may write more. While the remote accepts nothing, further writes would only be
    /// buffered here.
    pub fn has_room(&self) -> bool {
        let kept = self.written - self.base;
        let pressure = self.cost.pressure();
        let most_unsent = if self.written < self.limit && pressure < 4 { MAX_UNSENT } else { 1 };
        let most_kept = (MAX_UNACKED >> (2 * pressure)).max(FAIR_UNACKED);
        self.unsent() < most_unsent && kept < most_kept
    }

    /// Returns the bytes of memory that it keeps.
    pub fn memory(&self) -> usize {
        self.cost.size()
    }

    /// Stops the owner once something waits, until the remote announces a limit again: nobody reads for long.
    pub fn stall(&mut self) {
        self.limit = self.limit.min(self.written);
    }

    /// Appends bytes to send. The caller has checked [`Self::has_room`].
    pub fn write(&mut self, bytes: Bytes) {
        if bytes.is_empty() || self.finished {
            return;
        }
        self.written += as_u64(bytes.len());
        let last = self.kept.len().wrapping_sub(1);
        if let Some(tail) = self.kept.back_mut().filter(|tail| tail.len() + bytes.len() <= MERGE_BELOW) {
            if self.cursor == (last + 1, 0) {
                self.cursor = (last, tail.len());
            }
            // What is acknowledged of the first piece is not copied.
            let freed = if last == 0 { std::mem::take(&mut self.acked) } else { 0 };
            self.cost.resize((self.cost.size() + bytes.len()).saturating_sub(freed));
            *tail = joined(std::mem::take(tail), &bytes);
            return;
        }
        self.cost.resize(self.cost.size() + bytes.len() + PIECE);
        self.kept.push_back(bytes);
    }

    /// Ends the direction. Idempotent.
    pub fn finish(&mut self) {
        self.finished = true;
    }

    /// Returns the bytes written but not sent.
    pub(crate) fn unsent(&self) -> u64 {
        self.written - self.next
    }

    /// Returns the number of bytes that may be sent now.
    pub(crate) fn sendable(&self) -> usize {
        usize::try_from(self.written.min(self.limit).saturating_sub(self.next)).unwrap_or(usize::MAX)
    }

    /// Returns the total number of bytes that the owner wrote.
    pub fn written(&self) -> u64 {
        self.written
    }

    /// Returns the number of bytes that the remote has received.
    pub(crate) fn acknowledged(&self) -> u64 {
        self.base
    }

    /// Returns true if the remote has received nothing.
    pub(crate) fn is_untouched(&self) -> bool {
        self.base == 0 && !self.finish_received
    }

    /// Takes the next bytes to send, at most `max`. Joins small pieces.
    pub(crate) fn take(&mut self, max: usize) -> Option<Bytes> {
        let max = max.min(self.sendable());
        let (at, skip) = self.cursor;
        let piece = self.kept.get(at)?;
        if max == 0 {
            return None;
        }
        let whole = piece.len() - skip;
        let bytes = if whole >= max || whole >= MIN_UNMERGED || at + 1 == self.kept.len() {
            let len = whole.min(max);
            self.cursor = if len == whole { (at + 1, 0) } else { (at, skip + len) };
            piece.slice(skip..skip + len)
        } else {
            self.join(max)
        };
        self.next += as_u64(bytes.len());
        self.reached = self.reached.max(self.next);
        Some(bytes)
    }

    /// Returns true if the end of stream is due.
    pub(crate) fn finish_due(&self) -> bool {
        self.finished && !self.finish_sent && self.next == self.written
    }

    /// Takes the end of stream, if it is due. Returns the number of bytes of this direction; the end counts as one.
    pub(crate) fn take_finish(&mut self) -> Option<u64> {
        if !self.finish_due() {
            return None;
        }
        self.finish_sent = true;
        self.reached = self.written + 1;
        Some(self.reached)
    }

    /// Handles an acknowledgement: the remote has everything before `received`, and accepts bytes below `limit`.
    /// Neither value ever decreases.
    pub(crate) fn acknowledge(&mut self, received: u64, limit: u64) -> Result<(), FlowControlError> {
        if received > self.reached {
            return Err(FlowControlError::WrongAck(received, self.base, self.reached));
        }
        self.limit = self.limit.max(limit);
        self.drop_before(received);
        Ok(())
    }

    /// Continues on a new path from the offset that the remote has received, and retransmits everything after it.
    pub(crate) fn rewind(&mut self, received: u64, limit: u64) -> Result<(), FlowControlError> {
        if received < self.base || received > self.reached {
            return Err(FlowControlError::WrongAck(received, self.base, self.reached));
        }
        self.acknowledge(received, limit)?;
        self.next = self.base;
        self.cursor = (0, 0);
        self.finish_sent = self.finish_received;
        Ok(())
    }

    /// Returns true if the owner has ended the direction.
    pub(crate) fn is_finished(&self) -> bool {
        self.finished
    }

    /// Returns true if the remote has received everything including the end.
    pub(crate) fn is_done(&self) -> bool {
        self.finish_received
    }

    /// Drops all bytes, because the session has ended.
    pub(crate) fn forget(&mut self) {
        self.kept.clear();
        self.cost.resize(0);
        self.acked = 0;
        self.cursor = (0, 0);
        self.base = self.written;
        self.next = self.written;
        self.finished = true;
        self.finish_sent = true;
    }

    /// Copies pieces, starting at the cursor, into one piece of at most `max` bytes.
    fn join(&mut self, max: usize) -> Bytes {
        let mut joined = BytesMut::with_capacity(max.min(JOINED));
        let (mut at, mut skip) = self.cursor;
        while let Some(piece) = self.kept.get(at) {
            let len = (piece.len() - skip).min(max.min(JOINED) - joined.len());
            if len == 0 {
                break;
            }
            joined.extend_from_slice(&piece[skip..skip + len]);
            skip += len;
            if skip == piece.len() {
                (at, skip) = (at + 1, 0);
            }
        }
        self.cursor = (at, skip);
        joined.freeze()
    }

    fn drop_before(&mut self, received: u64) {
        // The end counts as one byte, which only an acknowledgement beyond all bytes includes.
        if self.finished && received > self.written {
            self.finish_received = true;
            self.finish_sent = true;
        }
        let received = received.min(self.written);
        while self.base < received {
            let Some(front) = self.kept.front_mut() else { break };
            let acked = received - self.base;
            if acked >= as_u64(front.len()) {
                self.base += as_u64(front.len());
                let freed = std::mem::take(&mut self.acked) + front.len() + PIECE;
                self.cost.resize(self.cost.size().saturating_sub(freed));
                self.kept.pop_front();
                self.cursor = if self.cursor.0 == 0 { (0, 0) } else { (self.cursor.0 - 1, self.cursor.1) };
            } else {
                let part = usize::try_from(acked).unwrap_or(front.len());
                self.acked += part;
                front.advance(part);
                if front.len() < self.acked {
                    *front = Bytes::copy_from_slice(front);
                    self.cost.resize(self.cost.size().saturating_sub(std::mem::take(&mut self.acked)));
                }
                self.base = received;
                if self.cursor.0 == 0 {
                    self.cursor.1 = self.cursor.1.saturating_sub(part);
                }
            }
        }
        self.next = self.next.max(self.base);
    }
}

/// Maximum number of unsent bytes within the remote's limit: two large frames, so that the link never runs dry.
const MAX_UNSENT: u64 = 128 * 1024;
/// Maximum number of unacknowledged bytes per session, whatever the remote's limit: the largest window. A 16th of it
/// once half of the budget is used, and then less: sessions of one client whose targets do not read must not take all.
const MAX_UNACKED: u64 = 4 * 1024 * 1024;
/// A session that keeps fewer bytes than this may always write, even if others have spent the budget. Once it is
/// overdrawn, sessions of the client that keeps most are reset.
///
/// A remote acknowledges at least every 64 KiB, so a session never waits for an acknowledgement that is not due.
const FAIR_UNACKED: u64 = 64 * 1024;
/// Small writes are joined up to this many bytes, so that many of them do not cost a hundred times their bytes.
const MERGE_BELOW: usize = 1024;
/// A piece of at least this many bytes is sent unchanged: copying it would cost more than a separate frame.
const MIN_UNMERGED: usize = 4 * 1024;
/// Maximum length of a frame made by joining small pieces.
const JOINED: usize = 16 * 1024;

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use crate::budget::Budget;

    use super::*;

    /// Maximum number of bytes that a link takes at once.
    const MAX_FRAME: usize = 65_200;

    fn half() -> SendHalf {
        SendHalf::new(Budget::new(1 << 30).reservation())
    }

    /// Returns a half of which the remote has received `start` bytes.
    fn half_at(start: u64) -> SendHalf {
        SendHalf { base: start, next: start, reached: start, written: start, limit: start, ..half() }
    }

    #[derive(Debug, Clone)]
    enum Step {
        Write(usize),
        Take(usize),
        Acknowledge(u64),
        Rewind(u64),
        Grant(u64),
    }

    fn step() -> impl Strategy<Value = Step> {
        prop_oneof![
            (1usize..9000).prop_map(Step::Write),
            (1usize..70000).prop_map(Step::Take),
            (0u64..100).prop_map(Step::Acknowledge),
            (0u64..100).prop_map(Step::Rewind),
            (0u64..30000).prop_map(Step::Grant),
        ]
    }

    proptest! {
        /// The remote gets every byte once and in order, for any order of writing, sending, acknowledging and
        /// rewinding, also where offsets outgrow 32 bits.
        #[test]
        fn every_byte_arrives_once_and_in_order(steps in prop::collection::vec(step(), 0..80), start in prop_oneof![Just(0), Just((1u64 << 32) - 5000)]) {
            let mut half = half_at(start);
            let (mut written, mut arrived, mut limit, mut acked) = (Vec::<u8>::new(), Vec::<u8>::new(), 0u64, 0u64);
            for step in steps {
                match step {
                    Step::Write(n) => {
                        let piece: Vec<u8> = (0..n).map(|i| (written.len() + i) as u8).collect();
                        written.extend(&piece);
                        half.write(piece.into());
                    }
                    Step::Take(max) => if let Some(bytes) = half.take(max) {
                        prop_assert!(!bytes.is_empty() && bytes.len() <= max);
                        arrived.extend(bytes);
                        prop_assert!(arrived.len() as u64 <= limit);
                    },
                    Step::Acknowledge(percent) => {
                        acked = acked.max(arrived.len() as u64 * percent / 100);
                        half.acknowledge(start + acked, start + limit).unwrap();
                    }
                    Step::Rewind(percent) => {
                        acked = acked.max(arrived.len() as u64 * percent / 100);
                        arrived.truncate(acked as usize);
                        half.rewind(start + acked, start + limit).unwrap();
                    }
                    Step::Grant(more) => { limit += more; half.acknowledge(start + acked, start + limit).unwrap(); }
                }
                prop_assert_eq!(&written[..arrived.len()], &arrived[..]);
            }
            half.finish();
            half.acknowledge(start + acked, u64::MAX).unwrap();
            while let Some(bytes) = half.take(5000) { arrived.extend(bytes); }
            prop_assert_eq!(&written, &arrived);
            let end = start + written.len() as u64 + 1;
            prop_assert_eq!(half.take_finish(), Some(end));
            half.acknowledge(end, 0).unwrap();
            prop_assert!(half.is_done());
            prop_assert_eq!(half.cost.size(), 0);
        }

        #[test]
        fn an_offset_that_was_never_sent_is_refused(sent in 0usize..100, beyond in 1u64..100) {
            let mut half = half();
            half.write(vec![0; 100].into());
            half.acknowledge(0, 100).unwrap();
            if sent > 0 { half.take(sent); }
            prop_assert!(half.acknowledge(sent as u64 + beyond, 0).is_err());
            prop_assert!(half.rewind(sent as u64 + beyond, 0).is_err());
        }
    }

    #[test]
    fn an_unacknowledged_finish_is_sent_again_after_a_rewind() {
        let mut half = half();
        half.finish();
        assert_eq!(half.take_finish(), Some(1));
        assert_eq!(half.take_finish(), None);
        half.rewind(0, 0).unwrap();
        assert_eq!(half.take_finish(), Some(1));
        half.rewind(1, 0).unwrap();
        assert!(half.is_done() && half.take_finish().is_none());
    }

    #[test]
    fn writing_stops_at_the_limits_of_unsent_and_unacknowledged_bytes() {
        let mut half = half();
        half.acknowledge(0, u64::MAX).unwrap();
        half.write(vec![0; 128 * 1024].into());
        assert!(!half.has_room());
        while half.take(MAX_FRAME).is_some() {}
        assert!(half.has_room());
        while half.has_room() {
            half.write(vec![0; 64 * 1024].into());
            while half.take(MAX_FRAME).is_some() {}
        }
        assert!(half.written() >= 4 << 20 && half.written() < 5 << 20);
    }

    /// Bytes that a client never reads must not be read from its target: at most one write goes beyond the remote's
    /// limit.
    #[test]
    fn writing_stops_one_write_beyond_the_remotes_limit() {
        let mut half = half();
        half.write(vec![0; 100].into());
        assert!(!half.has_room(), "the remote has not announced a limit");
        half.acknowledge(0, 64 * 1024).unwrap();
        while half.has_room() {
            half.write(vec![0; 40 * 1024].into());
            while half.take(MAX_FRAME).is_some() {}
        }
        assert_eq!((half.written(), half.unsent()), (80 * 1024 + 100, 16 * 1024 + 100));
        half.acknowledge(0, 81 * 1024).unwrap();
        assert!(half.has_room(), "the limit was raised");
    }

    #[test]
    fn a_piece_costs_all_its_bytes_until_most_of_them_are_acknowledged() {
        let mut half = half();
        half.acknowledge(0, u64::MAX).unwrap();
        half.write(vec![0; 1000].into());
        half.write(vec![0; 1000].into());
        half.take(MAX_FRAME);
        let costs = [500, 501, 999, 1000, 2000].map(|received| {
            half.acknowledge(received, u64::MAX).unwrap();
            half.memory()
        });
        let whole = 1000 + PIECE;
        assert_eq!(costs, [2 * whole, 499 + PIECE + whole, 1 + PIECE + whole, whole, 0]);
    }

    #[test]
    fn one_byte_writes_are_merged() {
        let mut half = half();
        half.acknowledge(0, u64::MAX).unwrap();
        for _ in 0..10_000 {
            half.write(Bytes::from_static(b"x"));
        }
        assert!(half.cost.size() < 12_000, "{}", half.cost.size());
        assert_eq!(half.take(MAX_FRAME).unwrap().len(), 10_000);
    }

    #[test]
    fn stalled_sessions_keep_less_the_less_budget_is_left() {
        let budget = Budget::new(16 << 20);
        let mut halves: Vec<_> = (0..80).map(|_| SendHalf::new(budget.reservation())).collect();
        let mut kept: Vec<u64> = Vec::new();
        for half in &mut halves {
            half.acknowledge(0, 400 << 10).unwrap();
            while half.has_room() {
                half.write(vec![0; 8 << 10].into());
                while half.take(MAX_FRAME).is_some() {}
            }
            kept.push(half.written() >> 10);
        }
        let used = budget.used() >> 20;
        assert!(kept[0] >= 400 && kept[30] == 256 && kept[79] == 64, "{kept:?}");
        assert!(used < 16, "{used} MiB are used");
    }

    #[test]
    fn one_session_may_keep_the_largest_window_within_an_edges_budget() {
        let mut half = SendHalf::new(Budget::new(12 << 20).reservation());
        half.acknowledge(0, MAX_UNACKED).unwrap();
        while half.has_room() {
            half.write(vec![0; 64 << 10].into());
            while half.take(MAX_FRAME).is_some() {}
        }
        assert_eq!(half.written(), MAX_UNACKED);
    }

    /// The remote acknowledges only every 64 KiB. An interactive session must still proceed when others hold the whole
    /// budget.
    #[test]
    fn an_exhausted_budget_still_allows_each_session_64_kib() {
        let budget = Budget::new(1000);
        let mut half = SendHalf::new(budget.reservation());
        half.acknowledge(0, u64::MAX).unwrap();
        for _ in 0..64 * 1024 / 64 {
            assert!(half.has_room());
            half.write(vec![0; 64].into());
            half.take(MAX_FRAME);
        }
        assert!(budget.is_exhausted() && !half.has_room());
        half.acknowledge(64 * 1024, u64::MAX).unwrap();
        assert!(half.has_room());
    }
}
