//! Sending half of one session: the bytes that its owner wrote, until the peer has acknowledged them.
//!
//! ```text
//!    base          next                written
//!     | sent, kept  |  unsent           |
//! ----+-------------+-------------------+---> offsets; the end of stream counts as one more
//!     received by the peer: forgotten   limit: how far the peer lets us send
//! ```
//!
//! Nothing here waits, locks or reads a clock.

use std::collections::VecDeque;

use bytes::{Buf, Bytes, BytesMut};

use crate::protocol::budget::Share;
use crate::protocol::pieces::{PIECE, joined};

/// See the module's picture.
#[derive(Debug)]
pub(crate) struct SendHalf {
    /// Bytes from `base` on, in the pieces in which they were written.
    kept: VecDeque<Bytes>,
    /// What [`Self::kept`] costs: bytes, and an overhead for each piece.
    cost: Share,
    base: u64,
    next: u64,
    /// Highest `next` ever, end included: the peer may have received this much.
    reached: u64,
    written: u64,
    limit: u64,
    /// Which piece holds `next`, and how far into it.
    cursor: (usize, usize),
    finished: bool,
    finish_sent: bool,
    finish_received: bool,
}

/// The peer acknowledges bytes that were never sent.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("the peer acknowledged offset {received}, sent were {base} to {reached}")]
pub(crate) struct BadOffset {
    received: u64,
    base: u64,
    reached: u64,
}

impl SendHalf {
    /// An empty half that may not send yet; `cost` counts the bytes that it keeps.
    pub(crate) fn new(cost: Share) -> Self {
        Self {
            kept: VecDeque::new(),
            cost,
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

    /// Whether the owner may write more now. One whose peer takes no more has to wait: what it wrote would only lie here.
    pub(crate) fn has_room(&self) -> bool {
        let kept = self.written - self.base;
        let most_unsent = if self.written < self.limit { MAX_UNSENT } else { 1 };
        self.unsent() < most_unsent && kept < MAX_KEPT && (kept < FAIR_KEPT || !self.cost.is_spent())
    }

    /// Appends bytes to send. The caller has asked [`Self::has_room`].
    pub(crate) fn write(&mut self, bytes: Bytes) {
        if bytes.is_empty() || self.finished {
            return;
        }
        self.written += as_u64(bytes.len());
        let last = self.kept.len().wrapping_sub(1);
        if let Some(tail) = self.kept.back_mut().filter(|tail| tail.len() + bytes.len() <= MERGE_BELOW) {
            if self.cursor == (last + 1, 0) {
                self.cursor = (last, tail.len());
            }
            self.cost.set(self.cost.held() + bytes.len());
            *tail = joined(std::mem::take(tail), &bytes);
            return;
        }
        self.cost.set(self.cost.held() + bytes.len() + PIECE);
        self.kept.push_back(bytes);
    }

    /// Ends the direction. Calling it again changes nothing.
    pub(crate) fn finish(&mut self) {
        self.finished = true;
    }

    /// Bytes written and not sent.
    pub(crate) fn unsent(&self) -> u64 {
        self.written - self.next
    }

    /// Bytes that may be sent at once.
    pub(crate) fn sendable(&self) -> usize {
        usize::try_from(self.written.min(self.limit).saturating_sub(self.next)).unwrap_or(usize::MAX)
    }

    /// Bytes its owner wrote, in all.
    pub(crate) fn written(&self) -> u64 {
        self.written
    }

    /// Bytes that the peer has received.
    pub(crate) fn acknowledged(&self) -> u64 {
        self.base
    }

    /// Whether the peer has received anything.
    pub(crate) fn is_untouched(&self) -> bool {
        self.base == 0 && !self.finish_received
    }

    /// Takes the next bytes to send, at most `max`; small pieces are joined.
    pub(crate) fn take(&mut self, max: usize) -> Option<Bytes> {
        let max = max.min(self.sendable());
        let (at, skip) = self.cursor;
        let piece = self.kept.get(at)?;
        if max == 0 {
            return None;
        }
        let whole = piece.len() - skip;
        let bytes = if whole >= max || whole >= WORTH_ALONE || at + 1 == self.kept.len() {
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

    /// Whether the end of stream is to be sent now.
    pub(crate) fn finish_due(&self) -> bool {
        self.finished && !self.finish_sent && self.next == self.written
    }

    /// Takes the end of stream, if it is due: the number of bytes of this direction, its end counted.
    pub(crate) fn take_finish(&mut self) -> Option<u64> {
        if !self.finish_due() {
            return None;
        }
        self.finish_sent = true;
        self.reached = self.written + 1;
        Some(self.reached)
    }

    /// Handles an acknowledgement: the peer has all before `received`, and accepts bytes below `limit`. Neither goes
    /// back.
    pub(crate) fn acknowledge(&mut self, received: u64, limit: u64) -> Result<(), BadOffset> {
        if received > self.reached {
            return Err(BadOffset { received, base: self.base, reached: self.reached });
        }
        self.limit = self.limit.max(limit);
        self.drop_before(received);
        Ok(())
    }

    /// Goes on from what the peer has received, on a new path. What it has not received is sent again.
    pub(crate) fn put_back(&mut self, received: u64, limit: u64) -> Result<(), BadOffset> {
        if received < self.base || received > self.reached {
            return Err(BadOffset { received, base: self.base, reached: self.reached });
        }
        self.acknowledge(received, limit)?;
        self.next = self.base;
        self.cursor = (0, 0);
        self.finish_sent = self.finish_received;
        Ok(())
    }

    /// Whether the owner has ended the direction.
    pub(crate) fn is_finished(&self) -> bool {
        self.finished
    }

    /// Whether the peer has received everything and the end.
    pub(crate) fn is_done(&self) -> bool {
        self.finish_received
    }

    /// Drops all bytes, as the session is over.
    pub(crate) fn forget(&mut self) {
        self.kept.clear();
        self.cost.set(0);
        self.cursor = (0, 0);
        self.base = self.written;
        self.next = self.written;
        self.finished = true;
        self.finish_sent = true;
    }

    /// Copies pieces from the cursor on into one, at most `max` bytes.
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
        if self.finished && received > self.written {
            self.finish_received = true;
            self.finish_sent = true;
        }
        let received = received.min(self.written);
        while self.base < received {
            let Some(front) = self.kept.front_mut() else { break };
            let gone = received - self.base;
            if gone >= as_u64(front.len()) {
                self.base += as_u64(front.len());
                self.cost.set(self.cost.held().saturating_sub(front.len() + PIECE));
                self.kept.pop_front();
                self.cursor = if self.cursor.0 == 0 { (0, 0) } else { (self.cursor.0 - 1, self.cursor.1) };
            } else {
                let part = usize::try_from(gone).unwrap_or(front.len());
                self.cost.set(self.cost.held().saturating_sub(part));
                front.advance(part);
                self.base = received;
                if self.cursor.0 == 0 {
                    self.cursor.1 = self.cursor.1.saturating_sub(part);
                }
            }
        }
        self.next = self.next.max(self.base);
    }
}

fn as_u64(len: usize) -> u64 {
    u64::try_from(len).unwrap_or(u64::MAX)
}

/// A write waits once this much is unsent that the peer would take: two large frames, so that the link never runs dry.
const MAX_UNSENT: u64 = 128 * 1024;
/// Sent and unreceived bytes a session keeps at the most, whatever the peer's limit: the largest window.
const MAX_KEPT: u64 = 4 * 1024 * 1024;
/// A session that keeps less than this may always write, even when others have spent the budget. A peer acknowledges at
/// least every 64 KiB, so that a session never waits for an acknowledgement that is not due.
const FAIR_KEPT: u64 = 64 * 1024;
/// Small writes are put together up to this many bytes, so that a flood of them does not cost a hundred times its
/// bytes.
const MERGE_BELOW: usize = 1024;
/// A piece this long is sent as it is; copying it to join it with others would cost more than a frame.
const WORTH_ALONE: usize = 4 * 1024;
/// Longest frame made by joining small pieces.
const JOINED: usize = 16 * 1024;

#[cfg(test)]
mod tests {
    use super::*;
    use crate::protocol::budget::Budget;
    use crate::protocol::link::pace::LARGEST_FRAME;
    use proptest::prelude::*;

    fn half() -> SendHalf {
        SendHalf::new(Budget::new(1 << 30).share())
    }

    #[derive(Debug, Clone)]
    enum Step {
        Write(usize),
        Take(usize),
        Acknowledge(u64),
        PutBack(u64),
        Grant(u64),
    }

    fn step() -> impl Strategy<Value = Step> {
        prop_oneof![
            (1usize..9000).prop_map(Step::Write),
            (1usize..70000).prop_map(Step::Take),
            (0u64..100).prop_map(Step::Acknowledge),
            (0u64..100).prop_map(Step::PutBack),
            (0u64..30000).prop_map(Step::Grant),
        ]
    }

    proptest! {
        /// Whatever is written, sent, acknowledged and put back: the peer gets every byte once, in order.
        #[test]
        fn every_byte_arrives_once_and_in_order(steps in prop::collection::vec(step(), 0..80)) {
            let mut half = half();
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
                        half.acknowledge(acked, limit).unwrap();
                    }
                    Step::PutBack(percent) => {
                        acked = acked.max(arrived.len() as u64 * percent / 100);
                        arrived.truncate(acked as usize);
                        half.put_back(acked, limit).unwrap();
                    }
                    Step::Grant(more) => { limit += more; half.acknowledge(acked, limit).unwrap(); }
                }
                prop_assert_eq!(&written[..arrived.len()], &arrived[..]);
            }
            half.finish();
            half.acknowledge(acked, u64::MAX).unwrap();
            while let Some(bytes) = half.take(5000) { arrived.extend(bytes); }
            prop_assert_eq!(&written, &arrived);
            prop_assert_eq!(half.take_finish(), Some(written.len() as u64 + 1));
            half.acknowledge(written.len() as u64 + 1, 0).unwrap();
            prop_assert!(half.is_done());
            prop_assert_eq!(half.cost.held(), 0);
        }

        #[test]
        fn an_offset_that_was_never_sent_is_refused(sent in 0usize..100, beyond in 1u64..100) {
            let mut half = half();
            half.write(vec![0; 100].into());
            half.acknowledge(0, 100).unwrap();
            if sent > 0 { half.take(sent); }
            prop_assert!(half.acknowledge(sent as u64 + beyond, 0).is_err());
            prop_assert!(half.put_back(sent as u64 + beyond, 0).is_err());
        }
    }

    #[test]
    fn a_finish_that_was_sent_but_not_received_is_sent_again_after_a_put_back() {
        let mut half = half();
        half.finish();
        assert_eq!(half.take_finish(), Some(1));
        assert_eq!(half.take_finish(), None);
        half.put_back(0, 0).unwrap();
        assert_eq!(half.take_finish(), Some(1));
        half.put_back(1, 0).unwrap();
        assert!(half.is_done() && half.take_finish().is_none());
    }

    #[test]
    fn a_write_waits_beyond_what_may_be_unsent_or_kept() {
        let mut half = half();
        half.acknowledge(0, u64::MAX).unwrap();
        half.write(vec![0; 128 * 1024].into());
        assert!(!half.has_room());
        while half.take(LARGEST_FRAME).is_some() {}
        assert!(half.has_room());
        while half.has_room() {
            half.write(vec![0; 64 * 1024].into());
            while half.take(LARGEST_FRAME).is_some() {}
        }
        assert!(half.written() >= 4 << 20 && half.written() < 5 << 20);
    }

    /// What a client never reads must not be read of its target either: the peer's limit is as far as it goes, and one
    /// write beyond it.
    #[test]
    fn a_write_waits_while_the_peer_takes_nothing() {
        let mut half = half();
        half.write(vec![0; 100].into());
        assert!(!half.has_room(), "the peer has not said what it takes");
        half.acknowledge(0, 64 * 1024).unwrap();
        while half.has_room() {
            half.write(vec![0; 40 * 1024].into());
            while half.take(LARGEST_FRAME).is_some() {}
        }
        assert_eq!((half.written(), half.unsent()), (80 * 1024 + 100, 16 * 1024 + 100));
        half.acknowledge(0, 81 * 1024).unwrap();
        assert!(half.has_room(), "the limit was raised");
    }

    #[test]
    fn one_byte_writes_are_put_together() {
        let mut half = half();
        half.acknowledge(0, u64::MAX).unwrap();
        for _ in 0..10_000 {
            half.write(Bytes::from_static(b"x"));
        }
        assert!(half.cost.held() < 12_000, "{}", half.cost.held());
        assert_eq!(half.take(LARGEST_FRAME).unwrap().len(), 10_000);
    }

    /// The peer acknowledges only every 64 KiB: a typist beside sessions that hold the whole budget must still go on.
    #[test]
    fn a_spent_budget_leaves_each_session_what_its_peer_leaves_unacknowledged() {
        let budget = Budget::new(1000);
        let mut half = SendHalf::new(budget.share());
        half.acknowledge(0, u64::MAX).unwrap();
        for _ in 0..64 * 1024 / 64 {
            assert!(half.has_room());
            half.write(vec![0; 64].into());
            half.take(LARGEST_FRAME);
        }
        assert!(budget.is_spent() && !half.has_room());
        half.acknowledge(64 * 1024, u64::MAX).unwrap();
        assert!(half.has_room());
    }
}
