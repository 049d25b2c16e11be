//! Who sends next on a link: a clock that counts bytes.
//!
//! Each session has a standing: an account of what it has sent, in bytes, with a few added for each frame, and whether
//! it has sent only little each time of late, as interactive ones do and bulk does not. Next is the one whose
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

/// What one has sent on its link so far; nothing, by default.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) struct Standing {
    /// On its account.
    account: u64,
    /// Turns in a row, up to the latest one, in which it had no more than [`SMALL`] to send.
    small: u32,
}

/// One that waits for its turn.
#[derive(Debug)]
pub(crate) struct Turn<K> {
    /// Where its next frame would end on its account.
    ends: u64,
    /// Breaks ties: first come, first served.
    entered: u64,
    /// Where it stands now.
    standing: Standing,
    /// Whether it has little to send.
    small: bool,
    /// Whose turn it is.
    pub key: K,
}

impl<K> Schedule<K> {
    /// No one waits, and the clock stands at 0.
    pub(crate) fn new() -> Self {
        Self { clock: 0, entered: 0, small: BinaryHeap::new(), bulk: BinaryHeap::new() }
    }

    /// Lets `key` wait for its turn: where it stands, what it has to send, and the longest frame it may send at once.
    pub(crate) fn enter(&mut self, key: K, standing: Standing, backlog: usize, longest: usize) {
        let account = standing.account.max(self.clock.saturating_sub(HEAD_START));
        let ends = account + cost(backlog.min(longest));
        let (standing, small) = (Standing { account, ..standing }, backlog <= SMALL);
        let turn = Turn { ends, entered: self.entered, standing, small, key };
        self.entered += 1;
        if small { self.small.push(turn) } else { self.bulk.push(turn) }
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
    pub(crate) fn sent(&mut self, standing: Standing) {
        self.clock = self.clock.max(standing.account);
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

impl Standing {
    /// Whether it is interactive: it has had little to send each time of late. Bulk leaves a small rest now and then.
    pub(crate) fn is_interactive(self) -> bool {
        self.small >= INTERACTIVE_AFTER
    }
}

impl<K> Turn<K> {
    /// Where the sender stands before this turn.
    pub(crate) fn standing(&self) -> Standing {
        self.standing
    }

    /// Where the sender stands once it has sent `len` bytes in this turn.
    pub(crate) fn standing_after(&self, len: usize) -> Standing {
        // A frame may be shorter than what there is to send; and more may have come since it began to wait.
        let little = self.small && len <= SMALL;
        let small = if little { self.standing.small.saturating_add(1) } else { 0 };
        Standing { account: self.standing.account + cost(len), small }
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
/// Turns in a row with no more than that, after which it is interactive.
const INTERACTIVE_AFTER: u32 = 4;
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

    fn at(account: u64) -> Standing {
        Standing { account, small: 0 }
    }

    fn new() -> Standing {
        Standing::default()
    }

    /// Sends everything that `backlogs` hold, frame by frame; returns (session, bytes) in order.
    fn send_all(mut backlogs: HashMap<u32, usize>) -> Vec<(u32, usize)> {
        let mut schedule = Schedule::new();
        let mut order: Vec<u32> = backlogs.keys().copied().collect();
        order.sort_unstable();
        for who in order {
            schedule.enter(who, new(), backlogs[&who], LONGEST);
        }
        let mut said = Vec::new();
        while let Some(turn) = schedule.next(false) {
            let left = backlogs.get_mut(&turn.key).unwrap();
            let len = (*left).min(LONGEST);
            *left -= len;
            said.push((turn.key, len));
            let standing = turn.standing_after(len);
            schedule.sent(standing);
            if *left > 0 {
                schedule.enter(turn.key, standing, *left, LONGEST);
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
            schedule.enter(who, new(), 1 << 20, LONGEST);
        }
        for _ in 0..100 {
            let turn = schedule.next(false).unwrap();
            let standing = turn.standing_after(LONGEST);
            schedule.sent(standing);
            schedule.enter(turn.key, standing, 1 << 20, LONGEST);
        }
        schedule.enter(99, new(), 40, LONGEST);
        assert_eq!(schedule.next(false).unwrap().key, 99);
    }

    #[test]
    fn a_keystroke_is_next_even_beside_sessions_that_wake_together_with_it() {
        let mut schedule = Schedule::new();
        schedule.sent(at(1 << 30));
        for who in 0..20 {
            schedule.enter(who, new(), 1 << 20, LONGEST);
        }
        schedule.enter(99, new(), 40, LONGEST);
        assert_eq!(schedule.next(false).unwrap().key, 99);
    }

    #[test]
    fn coming_back_with_a_little_gains_nothing() {
        let mut schedule = Schedule::new();
        schedule.enter("bulk", new(), usize::MAX, LONGEST);
        schedule.enter("sly", new(), 4000, LONGEST);
        let (mut bulk, mut sly) = (0, 0);
        for _ in 0..2000 {
            let turn = schedule.next(false).unwrap();
            let len = if turn.key == "sly" { 4000 } else { LONGEST };
            let after = turn.standing_after(len);
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
    fn who_sends_little_each_time_is_interactive_and_bulk_with_a_small_rest_is_not() {
        let mut schedule = Schedule::new();
        let mut run = |lens: &[usize]| {
            lens.iter().fold(new(), |standing, &len| {
                schedule.enter("one", standing, len, 1 << 20);
                schedule.next(false).unwrap().standing_after(len)
            })
        };
        assert!(run(&[40, SMALL, 1, 0]).is_interactive());
        assert!(!run(&[40; 3]).is_interactive(), "it may yet become bulk");
        let block = [65_200, 65_200, 65_200, 65_200, 1344];
        assert!(!run(&block.repeat(10)).is_interactive());
        assert!(!run(&[1, 1, 1, 1, 1, SMALL + 1]).is_interactive());
        let mut bulk = new();
        for _ in 0..10 {
            schedule.enter("one", bulk, 1 << 20, SMALL);
            bulk = schedule.next(false).unwrap().standing_after(SMALL);
        }
        assert!(!bulk.is_interactive(), "a slow line has small frames");
    }

    #[test]
    fn the_capped_say_only_little() {
        let mut schedule = Schedule::new();
        schedule.enter("bulk", new(), SMALL + 1, LONGEST);
        schedule.enter("small", at(u64::MAX / 8), SMALL, LONGEST);
        assert_eq!(schedule.next(true).unwrap().key, "small");
        assert!(schedule.next(true).is_none() && schedule.has_bulk());
        assert_eq!(schedule.next(false).unwrap().key, "bulk");
    }
}
