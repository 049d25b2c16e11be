//! Who sends next on a link: a clock that counts bytes.
//!
//! Each session has an account of what it has sent, in bytes, with a few added for each frame. Next is the one whose
//! next frame ends earliest on its account; ordering by the end, not the start, lets a keystroke pass those that woke
//! together with it. One that was silent enters at most [`HEAD_START`] behind the clock, so a keystroke waits for the
//! frame on the wire and no other, and a session that keeps coming back with a little gains nothing over those with a
//! backlog. Knows nothing of links and sessions; reads no clock but its own.

use std::cmp::Ordering;
use std::collections::BinaryHeap;

/// The turns of everything that waits for one link.
#[derive(Debug)]
pub(crate) struct Schedule<K> {
    clock: u64,
    entered: u64,
    small: BinaryHeap<Turn<K>>,
    bulk: BinaryHeap<Turn<K>>,
}

/// One that waits for its turn.
#[derive(Debug)]
pub(crate) struct Turn<K> {
    /// Where its next frame would end on its account.
    ends: u64,
    /// Breaks ties: first come, first served.
    entered: u64,
    /// Where its account stands now.
    starts: u64,
    /// Whose turn it is.
    pub key: K,
}

impl<K> Schedule<K> {
    /// No one waits, and the clock stands at 0.
    pub(crate) fn new() -> Self {
        Self { clock: 0, entered: 0, small: BinaryHeap::new(), bulk: BinaryHeap::new() }
    }

    /// Lets `key` wait for its turn: its account, what it has to send, and the longest frame it may send at once.
    pub(crate) fn enter(&mut self, key: K, account: u64, backlog: usize, longest: usize) {
        let starts = account.max(self.clock.saturating_sub(HEAD_START));
        let ends = starts + cost(backlog.min(longest));
        let turn = Turn { ends, entered: self.entered, starts, key };
        self.entered += 1;
        if backlog <= SMALL { self.small.push(turn) } else { self.bulk.push(turn) }
    }

    /// Takes who is next; only those with [`SMALL`] backlogs if `small_only`.
    pub(crate) fn next(&mut self, small_only: bool) -> Option<Turn<K>> {
        let small_first = match (self.small.peek(), self.bulk.peek()) {
            (Some(small), Some(bulk)) => small > bulk,
            (small, _) => small.is_some(),
        };
        if small_first || small_only { self.small.pop() } else { self.bulk.pop() }
    }

    /// Moves the clock to where the frame that was just sent ends.
    pub(crate) fn sent(&mut self, account: u64) {
        self.clock = self.clock.max(account);
    }

    /// Lets only those wait on for whom `stays` holds.
    pub(crate) fn retain(&mut self, stays: impl Fn(&K) -> bool) {
        self.small.retain(|turn| stays(&turn.key));
        self.bulk.retain(|turn| stays(&turn.key));
    }

    /// How many wait.
    pub(crate) fn len(&self) -> usize {
        self.small.len() + self.bulk.len()
    }

    /// Whether anyone waits with more than a small backlog.
    pub(crate) fn has_bulk(&self) -> bool {
        !self.bulk.is_empty()
    }
}

impl<K> Turn<K> {
    /// The sender's account before this turn.
    pub(crate) fn starts(&self) -> u64 {
        self.starts
    }

    /// The sender's account once it has sent `len` bytes in this turn.
    pub(crate) fn account_after(&self, len: usize) -> u64 {
        self.starts + cost(len)
    }
}

impl<K> Default for Schedule<K> {
    fn default() -> Self {
        Self::new()
    }
}

impl<K> PartialEq for Turn<K> {
    fn eq(&self, other: &Self) -> bool {
        self.cmp(other) == Ordering::Equal
    }
}

impl<K> Eq for Turn<K> {}

impl<K> PartialOrd for Turn<K> {
    fn partial_cmp(&self, other: &Self) -> Option<Ordering> {
        Some(self.cmp(other))
    }
}

impl<K> Ord for Turn<K> {
    /// The greatest turn is the one that ends earliest, as a heap wants it.
    fn cmp(&self, other: &Self) -> Ordering {
        (other.ends, other.entered).cmp(&(self.ends, self.entered))
    }
}

fn cost(len: usize) -> u64 {
    u64::try_from(len).unwrap_or(u64::MAX / 4) + FRAME_OVERHEAD
}

/// Backlog in bytes up to which a session counts as a typist: its frames are not held by the cap on bytes under way.
pub(crate) const SMALL: usize = 4 * 1024;
/// The largest frame: how far behind the clock a session that was silent may enter.
pub(crate) const HEAD_START: u64 = 65_200;
/// What a frame costs beside its bytes: names, ids and headers on the wire.
const FRAME_OVERHEAD: u64 = 128;

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::collections::HashMap;

    const LONGEST: usize = 16 * 1024;

    /// Sends everything that `backlogs` hold, frame by frame; returns (session, bytes) in order.
    fn send_all(mut backlogs: HashMap<u32, usize>) -> Vec<(u32, usize)> {
        let mut schedule = Schedule::new();
        let mut order: Vec<u32> = backlogs.keys().copied().collect();
        order.sort_unstable();
        for who in order {
            schedule.enter(who, 0, backlogs[&who], LONGEST);
        }
        let mut said = Vec::new();
        while let Some(turn) = schedule.next(false) {
            let left = backlogs.get_mut(&turn.key).unwrap();
            let len = (*left).min(LONGEST);
            *left -= len;
            said.push((turn.key, len));
            let account = turn.account_after(len);
            schedule.sent(account);
            if *left > 0 {
                schedule.enter(turn.key, account, *left, LONGEST);
            }
        }
        said
    }

    proptest! {
        /// While all have a backlog, no two are further apart than two frames, whatever their frames' lengths.
        #[test]
        fn the_busy_share_alike(sizes in prop::collection::vec(1usize..400_000, 2..8)) {
            let all: HashMap<u32, usize> = (0u32..).zip(sizes.iter().copied()).collect();
            let (mut spoken, mut left) = (HashMap::<u32, usize>::new(), all.clone());
            for (who, len) in send_all(all.clone()) {
                *spoken.entry(who).or_default() += len;
                *left.get_mut(&who).unwrap() -= len;
                let busy: Vec<usize> = left.iter().filter(|(_, l)| **l > LONGEST).map(|(w, _)| spoken.get(w).copied().unwrap_or(0)).collect();
                if let (Some(most), Some(least)) = (busy.iter().max(), busy.iter().min()) {
                    prop_assert!(most - least <= 2 * LONGEST + 1024, "{most} {least}");
                }
            }
            prop_assert!(left.values().all(|l| *l == 0));
        }
    }

    #[test]
    fn a_keystroke_is_next_beside_any_backlog() {
        let mut schedule = Schedule::new();
        for who in 0..20 {
            schedule.enter(who, 0, 1 << 20, LONGEST);
        }
        for _ in 0..100 {
            let turn = schedule.next(false).unwrap();
            let account = turn.account_after(LONGEST);
            schedule.sent(account);
            schedule.enter(turn.key, account, 1 << 20, LONGEST);
        }
        schedule.enter(99, 0, 40, LONGEST);
        assert_eq!(schedule.next(false).unwrap().key, 99);
    }

    #[test]
    fn a_keystroke_is_next_even_beside_sessions_that_wake_together_with_it() {
        let mut schedule = Schedule::new();
        schedule.sent(1 << 30);
        for who in 0..20 {
            schedule.enter(who, 0, 1 << 20, LONGEST);
        }
        schedule.enter(99, 0, 40, LONGEST);
        assert_eq!(schedule.next(false).unwrap().key, 99);
    }

    #[test]
    fn coming_back_with_a_little_gains_nothing() {
        let mut schedule = Schedule::new();
        schedule.enter("bulk", 0, usize::MAX, LONGEST);
        schedule.enter("sly", 0, 4000, LONGEST);
        let (mut bulk, mut sly) = (0, 0);
        for _ in 0..2000 {
            let turn = schedule.next(false).unwrap();
            let len = if turn.key == "sly" { 4000 } else { LONGEST };
            let after = turn.account_after(len);
            schedule.sent(after);
            if turn.key == "sly" {
                sly += len;
                schedule.enter("sly", after, 4000, LONGEST);
            } else {
                bulk += len;
                schedule.enter("bulk", after, usize::MAX, LONGEST);
            }
        }
        assert!(sly <= bulk + 2 * 65_200, "sly {sly}, bulk {bulk}");
    }

    #[test]
    fn the_capped_say_only_little() {
        let mut schedule = Schedule::new();
        schedule.enter("bulk", 0, SMALL + 1, LONGEST);
        schedule.enter("small", u64::MAX / 8, SMALL, LONGEST);
        assert_eq!(schedule.next(true).unwrap().key, "small");
        assert!(schedule.next(true).is_none() && schedule.has_bulk());
        assert_eq!(schedule.next(false).unwrap().key, "bulk");
    }
}
