//! Decides what is sent next on a link, with a clock that counts bytes.
//!
//! Each session has an account of the bytes that it has sent, with a few added for each frame. It also has a flag for
//! whether its recent backlogs were all small, as those of interactive sessions are. The next turn goes to the session
//! with the frame that ends earliest on its account. Ordering by the end, not the start, lets a keystroke pass sessions
//! that became ready at the same time. What all sessions of a client send a little at a time, answers included, has one
//! account together, because each may be of another session.
//!
//! A session that was idle enters at most `MAX_LAG` behind the clock. So a keystroke waits only for the frame on the
//! wire, and a session that keeps returning with a little data gains nothing over those with a backlog. The scheduler
//! knows nothing of links and sessions, and reads no clock but its own.

pub(crate) mod frame_source;

use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;

use crate::schedule::frame_source::QueuedSource;

/// The turns of everything that waits for one link. Its clock starts at 0.
#[derive(Debug, Default)]
pub(crate) struct Scheduler {
    clock: u64,
    entered: u64,
    /// The flows that pass a full window, and the others, in the order of their turns.
    small: BTreeMap<TurnOrder, QueuedFlow>,
    bulk: BTreeMap<TurnOrder, QueuedFlow>,
    /// What each client has sent, unless the clock has left it behind.
    clients: HashMap<Arc<str>, ClientUsage>,
}

/// What all sessions of a client have sent on the link.
#[derive(Debug, Default)]
struct ClientUsage {
    /// Cost of what they sent a little at a time, with what waits of it.
    small: u64,
    /// Cost of the rest, and of the frames of it that wait.
    bulk: u64,
    waiting: u64,
}

/// The order of turns: where a flow's next frame would end on its account; then first come, first served.
type TurnOrder = (u64, u64);

/// What a flow has sent on its link so far; nothing by default.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) struct FlowUsage {
    /// Cost of everything sent.
    account: u64,
    /// Consecutive turns, up to the latest one, in which it had no more than [`INTERACTIVE_BACKLOG`] to send.
    small: u32,
}

/// A flow that waits for its turn.
#[derive(Debug)]
pub(crate) struct QueuedFlow {
    /// What it has sent, with this turn once it is over.
    pub(crate) usage: FlowUsage,
    /// Whether it has little to send.
    small: bool,
    pub(crate) kind: FlowKind,
    /// The cost of what it had to send when it entered.
    cost: u64,
    /// Its entry.
    pub(crate) entry: QueuedSource,
}

/// What a flow waits to send. Answers and credits are at the cost of its client.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum FlowKind {
    Answer,
    Credit,
    Data,
}

impl Scheduler {
    /// Queues an entry for its turn, with what it has sent, the bytes that it has to send, and the longest frame it may send
    /// at once.
    pub(crate) fn enter(&mut self, entry: QueuedSource, usage: FlowUsage, backlog: usize, longest: usize) {
        let least = self.least();
        let cost = cost(backlog.min(longest));
        let account = usage.account.max(least);
        if backlog <= INTERACTIVE_BACKLOG {
            // Keystrokes are ordered as those of several clients.
            return self.enter_small(entry, FlowUsage { account, ..usage }, FlowKind::Data, cost);
        }
        // Else a client with many sessions, or fresh ones again and again, would take all turns.
        let client = self.client(entry.source.client());
        let account = account.max((client.bulk.max(least) + client.waiting).saturating_sub(MAX_LAG));
        client.waiting += cost;
        let flow = QueuedFlow {
            usage: FlowUsage { account, ..usage },
            small: false,
            kind: FlowKind::Data,
            cost,
            entry,
        };
        self.bulk.insert((account + cost, self.entered), flow);
        self.entered += 1;
    }

    /// Queues an entry for an answer or a credit.
    pub(crate) fn enter_control(&mut self, entry: QueuedSource, kind: FlowKind) {
        self.enter_small(entry, FlowUsage::default(), kind, FRAME_OVERHEAD);
    }

    /// Queues an entry with a little to send. Beyond [`INTERACTIVE_BACKLOG`] of its client it waits as bulk does, else a
    /// client with many sessions would take all turns, and fill the line.
    fn enter_small(&mut self, entry: QueuedSource, usage: FlowUsage, kind: FlowKind, cost: u64) {
        let least = self.least();
        let client = self.client(entry.source.client());
        let before = client.small.max(least);
        client.small = before + cost;
        // Answers and credits may each be of a new session, so that none is ahead of its client.
        let ahead = if kind == FlowKind::Data { INTERACTIVE_BACKLOG as u64 } else { 0 };
        let account = usage.account.max(before.saturating_sub(ahead));
        let queue =
            if before - least <= INTERACTIVE_BACKLOG as u64 { &mut self.small } else { &mut self.bulk };
        let flow = QueuedFlow { usage: FlowUsage { account, ..usage }, small: true, kind, cost, entry };
        queue.insert((account + cost, self.entered), flow);
        self.entered += 1;
    }

    /// Charges a client for a credit that is sent without a turn. Returns false if it has to wait for one: on a full line,
    /// beyond [`INTERACTIVE_BACKLOG`].
    pub(crate) fn pass_credit(&mut self, client: &Arc<str>, is_full: bool) -> bool {
        let least = self.least();
        let client = self.client(client);
        let before = client.small.max(least);
        let passes = !is_full || before - least <= INTERACTIVE_BACKLOG as u64;
        if passes {
            client.small = before + FRAME_OVERHEAD;
            self.clock = self.clock.max(before + FRAME_OVERHEAD);
        }
        passes
    }

    /// Called when the line has room. Unless bulk waits, what was sent so far delays no one later: who used the line
    /// alone would enter behind those who come new.
    pub(crate) fn forgive(&mut self) {
        if self.bulk.is_empty() {
            self.clock += MAX_LAG;
        }
    }

    /// Returns where an idle session enters.
    fn least(&self) -> u64 {
        self.clock.saturating_sub(MAX_LAG)
    }

    fn client(&mut self, client: &Arc<str>) -> &mut ClientUsage {
        if self.clients.len() == self.clients.capacity() && !self.clients.contains_key(client) {
            let least = self.least();
            self.clients.retain(|_, usage| usage.waiting > 0 || usage.small.max(usage.bulk) > least);
            // Without bulk the clock may stand still. Of so many clients, none gains much by a new account.
            if self.clients.len() >= MAX_CLIENTS {
                self.clients.clear();
            }
        }
        self.clients.entry(client.clone()).or_default()
    }

    /// Takes the next flow; only one with a backlog up to [`INTERACTIVE_BACKLOG`] if `small_only`.
    pub(crate) fn next(&mut self, small_only: bool) -> Option<QueuedFlow> {
        let small_first = match (self.small.first_key_value(), self.bulk.first_key_value()) {
            (Some((small, _)), Some((bulk, _))) => small < bulk,
            (small, _) => small.is_some(),
        };
        let queue = if small_first || small_only { &mut self.small } else { &mut self.bulk };
        let (_, flow) = queue.pop_first()?;
        self.leave(&flow);
        Some(flow)
    }

    /// Advances the clock to the end of the frame with `len` bytes that was just sent.
    pub(crate) fn sent(&mut self, flow: &QueuedFlow, len: usize) {
        let least = self.least();
        let client = self.client(flow.entry.source.client());
        if flow.small {
            // More may have come while a little waited.
            client.small = client.small.max(least) + cost(len).saturating_sub(flow.cost);
        } else {
            client.bulk = client.bulk.max(least) + cost(len);
        }
        self.clock = self.clock.max(flow.usage.account);
    }

    /// Records that a flow waits no longer.
    fn leave(&mut self, flow: &QueuedFlow) {
        if !flow.small
            && let Some(client) = self.clients.get_mut(flow.entry.source.client())
        {
            client.waiting = client.waiting.saturating_sub(flow.cost);
        }
    }

    /// Removes the entries for which `is_stale` returns true, and returns them.
    pub(crate) fn remove_if(&mut self, is_stale: impl Fn(&QueuedSource) -> bool) -> Vec<QueuedSource> {
        let queues = [&mut self.small, &mut self.bulk].into_iter();
        let stale = queues.flat_map(|queue| queue.extract_if(.., |_, turn| is_stale(&turn.entry)));
        let stale: Vec<_> = stale.collect();
        stale.iter().for_each(|(_, flow)| self.leave(flow));
        stale.into_iter().map(|(_, flow)| flow.entry).collect()
    }

    /// Returns the number of flows that wait.
    pub(crate) fn len(&self) -> usize {
        self.small.len() + self.bulk.len()
    }

    /// Returns the number of answers of a client that wait.
    pub(crate) fn answers_of(&self, client: &str) -> usize {
        let flows = self.small.values().chain(self.bulk.values());
        flows.filter(|flow| flow.kind == FlowKind::Answer && **flow.entry.source.client() == *client).count()
    }
}

impl FlowUsage {
    /// Returns true if the flow is interactive: its recent backlogs were all small. Bulk has a small remainder now and
    /// then.
    pub(crate) fn is_interactive(self) -> bool {
        self.small >= INTERACTIVE_AFTER
    }
}

impl QueuedFlow {
    /// Returns the longest frame that it may send, of at most `longest` bytes: a little, if it entered with that.
    pub(crate) fn longest(&self, longest: usize) -> usize {
        if self.small { longest.min(INTERACTIVE_BACKLOG) } else { longest }
    }

    /// Charges its account for a frame with `len` bytes of data, sent in this turn.
    pub(crate) fn charge(&mut self, len: usize) {
        // A frame may be shorter than the backlog, and more may have been added while it waited.
        let little = self.small && len <= INTERACTIVE_BACKLOG;
        self.usage.small = if little { self.usage.small.saturating_add(1) } else { 0 };
        self.usage.account += cost(len);
    }
}

fn cost(len: usize) -> u64 {
    u64::try_from(len).unwrap_or(u64::MAX / 4) + FRAME_OVERHEAD
}

/// Backlog in bytes up to which a session counts as small: the congestion window does not hold its frames back.
pub(crate) const INTERACTIVE_BACKLOG: usize = 4 * 1024;
/// Consecutive turns with at most that backlog after which a flow is interactive.
const INTERACTIVE_AFTER: u32 = 4;
/// The largest frame: how far behind the clock an idle session may enter.
pub(crate) const MAX_LAG: u64 = 65_200;
/// Maximum number of clients with an account, of about 100 bytes each.
const MAX_CLIENTS: usize = 4096;
/// Cost of a frame in addition to its bytes: names, ids and headers on the wire.
const FRAME_OVERHEAD: u64 = 128;

#[cfg(test)]
pub(crate) mod tests {
    use crate::schedule::frame_source::FrameSource;
    use crate::schedule::frame_source::QueueMembership;
    use crate::schedule::frame_source::Turn;
    use crate::schedule::frame_source::TurnOutput;
    use std::collections::HashMap;
    use std::sync::Arc;
    use tokio::time::Instant;

    use proptest::prelude::*;

    use tunnel_proto::frame::SessionCategory;
    use tunnel_proto::names::{NodeName, SessionId};

    use super::*;
    use tunnel_proto::frame::SessionFrame;
    use tunnel_proto::frame::SessionKey;
    use tunnel_proto::state::LinkId;

    const LONGEST: usize = 16 * 1024;
    const BULK: u64 = 1;
    const SLY: u64 = 2;
    const SMALL: u64 = 3;

    /// A session that always has credit to send, and never data in its turn.
    #[derive(Debug)]
    pub(crate) struct Speaker(SessionKey, Arc<str>);

    impl Speaker {
        pub(crate) fn new() -> Arc<Self> {
            Self::of("")
        }

        pub(crate) fn of(client: &str) -> Arc<Self> {
            let id = SessionId::from_bits(1);
            let key = SessionKey { id, category: SessionCategory::Ssh, node: NodeName::none() };
            Arc::new(Self(key, client.into()))
        }
    }

    impl FrameSource for Speaker {
        fn key(&self) -> &SessionKey {
            &self.0
        }

        fn client(&self) -> &Arc<str> {
            &self.1
        }

        fn is_stale(&self, _: u64) -> bool {
            false
        }

        fn next_frame(self: Arc<Self>, _: LinkId, turn: &mut Turn, _: Instant) -> TurnOutput {
            let credit = SessionFrame::Credit { received: 1, limit: 2 };
            match turn {
                Turn::Data { .. } => TurnOutput::default(),
                _ => QueueMembership::default().on_control(turn, Some(credit)),
            }
        }
    }

    /// Returns an entry of that stay, by which a test knows it again.
    fn entry(number: u64) -> QueuedSource {
        QueuedSource { source: Speaker::new(), stay: number }
    }

    fn at(account: u64) -> FlowUsage {
        FlowUsage { account, small: 0 }
    }

    fn new() -> FlowUsage {
        FlowUsage::default()
    }

    /// Sends everything in `backlogs`, frame by frame; returns (session, bytes) in order.
    fn send_all(mut backlogs: HashMap<u64, usize>) -> Vec<(u64, usize)> {
        let mut schedule = Scheduler::default();
        let mut order: Vec<u64> = backlogs.keys().copied().collect();
        order.sort_unstable();
        for who in order {
            schedule.enter(entry(who), new(), backlogs[&who], LONGEST);
        }
        let mut sent = Vec::new();
        while let Some(mut turn) = schedule.next(false) {
            let left = backlogs.get_mut(&turn.entry.stay).unwrap();
            let len = (*left).min(LONGEST);
            *left -= len;
            sent.push((turn.entry.stay, len));
            turn.charge(len);
            schedule.sent(&turn, len);
            if *left > 0 {
                schedule.enter(turn.entry, turn.usage, *left, LONGEST);
            }
        }
        sent
    }

    proptest! {
        /// While all have a backlog, no two are further apart than two frames, whatever the lengths of their frames.
        #[test]
        fn the_busy_share_alike(sizes in prop::collection::vec(1usize..400_000, 2..8)) {
            let all: HashMap<u64, usize> = (0u64..).zip(sizes.iter().copied()).collect();
            let mut spoken = HashMap::<u64, usize>::new();
            let mut left = all.clone();
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
    fn a_keystroke_goes_before_any_backlog() {
        let mut schedule = Scheduler::default();
        for who in 0..20 {
            schedule.enter(entry(who), new(), 1 << 20, LONGEST);
        }
        for _ in 0..100 {
            let mut turn = schedule.next(false).unwrap();
            turn.charge(LONGEST);
            schedule.sent(&turn, LONGEST);
            schedule.enter(turn.entry, turn.usage, 1 << 20, LONGEST);
        }
        schedule.enter(entry(99), new(), 40, LONGEST);
        assert_eq!(schedule.next(false).unwrap().entry.stay, 99);
    }

    #[test]
    fn a_keystroke_goes_before_sessions_that_wake_together_with_it() {
        let mut schedule = Scheduler { clock: 1 << 30, ..Scheduler::default() };
        for who in 0..20 {
            schedule.enter(entry(who), new(), 1 << 20, LONGEST);
        }
        schedule.enter(entry(99), new(), 40, LONGEST);
        assert_eq!(schedule.next(false).unwrap().entry.stay, 99);
    }

    #[test]
    fn coming_back_with_a_little_gains_nothing() {
        let mut schedule = Scheduler::default();
        schedule.enter(entry(BULK), new(), usize::MAX, LONGEST);
        schedule.enter(entry(SLY), new(), 4000, LONGEST);
        let mut bulk = 0;
        let mut sly = 0;
        for _ in 0..2000 {
            let mut turn = schedule.next(false).unwrap();
            let len = if turn.entry.stay == SLY { 4000 } else { LONGEST };
            turn.charge(len);
            let after = turn.usage;
            schedule.sent(&turn, len);
            if turn.entry.stay == SLY {
                sly += len;
                schedule.enter(entry(SLY), after, 4000, LONGEST);
            } else {
                bulk += len;
                schedule.enter(entry(BULK), after, usize::MAX, LONGEST);
            }
        }
        assert!(sly <= bulk + 2 * 65_200, "sly {sly}, bulk {bulk}");
    }

    #[test]
    fn who_sends_little_each_time_is_interactive_and_bulk_with_a_small_rest_is_not() {
        let mut schedule = Scheduler::default();
        let mut run = |lens: &[usize]| {
            lens.iter().fold(new(), |usage, &len| {
                schedule.enter(entry(BULK), usage, len, 1 << 20);
                let mut turn = schedule.next(false).unwrap();
                turn.charge(len);
                turn.usage
            })
        };
        assert!(run(&[40, INTERACTIVE_BACKLOG, 1, 0]).is_interactive());
        assert!(!run(&[40; 3]).is_interactive(), "too few turns yet");
        let block = [65_200, 65_200, 65_200, 65_200, 1344];
        assert!(!run(&block.repeat(10)).is_interactive());
        assert!(!run(&[1, 1, 1, 1, 1, INTERACTIVE_BACKLOG + 1]).is_interactive());
        let mut bulk = new();
        for _ in 0..10 {
            schedule.enter(entry(BULK), bulk, 1 << 20, INTERACTIVE_BACKLOG);
            let mut turn = schedule.next(false).unwrap();
            turn.charge(INTERACTIVE_BACKLOG);
            bulk = turn.usage;
        }
        assert!(!bulk.is_interactive(), "a slow line has small frames");
    }

    #[test]
    fn a_little_of_many_sessions_is_one_flow_of_their_client() {
        let mut schedule = Scheduler { clock: 1 << 30, ..Scheduler::default() };
        for number in 0..=1000 {
            let source = Speaker::of(if number < 1000 { "many" } else { "one" });
            schedule.enter(QueuedSource { source, stay: number }, new(), 1, LONGEST);
        }
        let passing: Vec<_> =
            std::iter::from_fn(|| schedule.next(true)).map(|flow| flow.entry.stay).collect();
        assert!(
            (20..40).contains(&passing.len()) && passing.contains(&1000),
            "a full window is passed by {passing:?}"
        );
    }

    #[test]
    fn who_has_many_sessions_gets_as_much_as_who_has_one() {
        // Others have used the link before.
        let mut schedule = Scheduler { clock: 1 << 30, ..Scheduler::default() };
        for number in 0..=100 {
            let source = Speaker::of(if number < 100 { "many" } else { "one" });
            schedule.enter(QueuedSource { source, stay: number }, new(), 1 << 20, LONGEST);
        }
        let mut one = 0;
        for _ in 0..2000 {
            let mut flow = schedule.next(false).unwrap();
            one += usize::from(flow.entry.stay == 100);
            flow.charge(LONGEST);
            schedule.sent(&flow, LONGEST);
            schedule.enter(flow.entry, flow.usage, 1 << 20, LONGEST);
        }
        assert!((900..1100).contains(&one), "{one} of 2000 turns");
    }

    #[test]
    fn what_comes_while_a_little_waits_counts_as_much() {
        let mut schedule = Scheduler { clock: 1 << 30, ..Scheduler::default() };
        let source = |client: &str, stay| QueuedSource { source: Speaker::of(client), stay };
        schedule.enter(source("one", 100), new(), 1 << 20, LONGEST);
        (0..100).for_each(|number| schedule.enter(source("many", number), new(), 1, LONGEST));
        let mut sent = [0, 0];
        for _ in 0..2000 {
            let mut flow = schedule.next(false).unwrap();
            let len = flow.longest(LONGEST);
            sent[usize::from(flow.entry.stay == 100)] += len;
            flow.charge(len);
            schedule.sent(&flow, len);
            let backlog = if flow.entry.stay == 100 { 1 << 20 } else { 1 };
            schedule.enter(flow.entry, flow.usage, backlog, LONGEST);
        }
        let [many, one] = sent;
        assert!(one * 10 > many * 8, "{one} and {many} bytes");
    }

    #[test]
    fn sessions_that_are_fresh_again_and_again_keep_back_no_typist() {
        let mut schedule = Scheduler::default();
        let source = |client: &str, stay| QueuedSource { source: Speaker::of(client), stay };
        (0..500).for_each(|number| schedule.enter(source("fresh", number), new(), 8000, LONGEST));
        let mut typist = new();
        for number in 500..3000 {
            schedule.enter(source("fresh", number), new(), 8000, LONGEST);
            schedule.enter(source("typist", 0), typist, 1, LONGEST);
            for turn in 0.. {
                assert!(turn < 5, "a keystroke waits for {turn} turns, after {number} sessions");
                let mut flow = schedule.next(false).unwrap();
                let len = if flow.small { 1 } else { 8000 };
                flow.charge(len);
                schedule.sent(&flow, len);
                if flow.small {
                    typist = flow.usage;
                    break;
                }
            }
            // On a full line, too.
            schedule.enter(source("typist", 0), typist, 1, LONGEST);
            let flow = schedule.next(number > 520).unwrap();
            assert!(flow.small, "after {number} sessions");
            let bulk = schedule.next(false).unwrap();
            schedule.sent(&bulk, 8000);
        }
    }

    #[test]
    fn endless_clients_take_bounded_memory() {
        let mut schedule = Scheduler::default();
        for number in 0..50_000 {
            let source = Speaker::of(&number.to_string());
            schedule.enter(QueuedSource { source, stay: number }, new(), 1, LONGEST);
            let turn = schedule.next(false).unwrap();
            schedule.sent(&turn, 1);
        }
        assert!(schedule.clients.len() <= 2 * MAX_CLIENTS, "{}", schedule.clients.len());
    }

    #[test]
    fn the_capped_say_only_little() {
        let mut schedule = Scheduler::default();
        schedule.enter(entry(BULK), new(), INTERACTIVE_BACKLOG + 1, LONGEST);
        schedule.enter(entry(SMALL), at(u64::MAX / 8), INTERACTIVE_BACKLOG, LONGEST);
        assert_eq!(schedule.next(true).unwrap().entry.stay, SMALL);
        assert!(schedule.next(true).is_none() && !schedule.bulk.is_empty());
        assert_eq!(schedule.next(false).unwrap().entry.stay, BULK);
    }
}
