//! What waits to be sent on one link, and what is sent next.

use std::collections::VecDeque;
use std::task::{Context, Poll, Waker};
use std::time::Duration;

use tokio::time::Instant;

use crate::congestion::CongestionController;
use crate::link::pacing::Pacing;
use crate::liveness::RttEstimator;
use crate::schedule::frame_source::{QueueRequest, QueuedSource, Turn, TurnOutput};
use crate::schedule::{FlowKind, INTERACTIVE_BACKLOG, QueuedFlow, Scheduler};
use tunnel_proto::frame::{Frame, FrameKind};

/// Everything that waits for one link, under the link's lock.
#[derive(Debug)]
pub(crate) struct SendQueue {
    pub(crate) closed: bool,
    /// The answer to the latest ping.
    pub(crate) pong: Option<FrameKind>,
    /// Since when a ping is due.
    pub(crate) ping: Option<Instant>,
    pub(crate) rtts: RttEstimator,
    pub(crate) waiting: WaitingFrames,
    /// Decides when bulk and acknowledgements may be sent.
    pub(crate) pacing: Pacing,
    /// Bytes that were sent while the window was full.
    beyond: usize,
    /// Number of entries at which stale ones are removed.
    sweep_at: usize,
    /// Since when something waits to be sent that the gRPC stream has not pulled.
    pub(crate) unpulled: Option<Instant>,
    /// The task of the gRPC stream while it waits for something to send.
    pub(crate) outbound: Option<Waker>,
    /// Whether that task must be woken once the lock is released.
    wakes: bool,
}

/// The frames, and the sources of frames, that wait for one link.
#[derive(Debug, Default)]
pub(crate) struct WaitingFrames {
    /// Signals and last frames. Limited by [`MAX_QUEUED_REPLIES`], except for frames of this process's own sessions.
    pub(crate) replies: VecDeque<Frame>,
    /// Sessions that have a credit to send.
    pub(crate) credits: VecDeque<QueuedSource>,
    pub(crate) turns: Scheduler,
}

/// What the answer to a ping has shown.
#[derive(Debug)]
pub(crate) struct PingMeasurement {
    /// The latest RTT.
    pub(crate) rtt: Duration,
    /// The minimum RTT of the last minutes.
    pub(crate) least: Duration,
    /// The congestion window in bytes, before and after.
    pub(crate) before: u64,
    pub(crate) cap: u64,
}

/// The next thing to be sent on a link, chosen from its queues.
pub(crate) enum SendItem {
    Frame(FrameKind),
    Reply(Frame),
    Turn(Turn),
}

impl SendQueue {
    /// Creates an empty queue; `paced` if the remote answers pings.
    pub(crate) fn new(paced: bool) -> Self {
        Self {
            closed: false,
            pong: None,
            ping: None,
            rtts: RttEstimator::default(),
            waiting: WaitingFrames::default(),
            pacing: Pacing::new(paced),
            beyond: 0,
            sweep_at: SWEEP,
            unpulled: None,
            outbound: None,
            wakes: false,
        }
    }

    /// Polls for what is sent next; the caller is woken when there is something. Returns `None` once the link is
    /// closed.
    pub(crate) fn poll_next(&mut self, cx: &mut Context<'_>, now: Instant) -> Poll<Option<SendItem>> {
        if self.closed {
            return Poll::Ready(None);
        }
        self.unpulled = None;
        let acks = self.pacing.acks.may_go(now);
        if let Some(pong) = self.pong.take_if(|_| acks) {
            self.pacing.acks.on_sent(now);
            return Poll::Ready(Some(SendItem::Frame(pong)));
        }
        if self.ping.is_some() || self.pacing.bulk.as_ref().is_some_and(|bulk| bulk.ping_due(now)) {
            self.pacing.acks.send_now();
            return Poll::Ready(Some(self.ping(now)));
        }
        if let Some(frame) = self.waiting.replies.pop_front() {
            self.pacing.acks.send_now();
            return Poll::Ready(Some(SendItem::Reply(frame)));
        }
        let is_full =
            self.queued_entries() > 0 && self.pacing.bulk.as_mut().is_some_and(|bulk| bulk.is_blocked(now));
        if !is_full {
            self.beyond = 0;
            self.waiting.turns.forgive();
        }
        // What passes a full window has a bound for all clients together, else many of them would fill the line.
        let is_closed = is_full && self.beyond >= MAX_BEYOND;
        while acks && let Some(session) = self.waiting.credits.pop_front() {
            if !is_closed && self.waiting.turns.pass_credit(session.source.client(), is_full) {
                self.pacing.acks.on_sent(now);
                return Poll::Ready(Some(SendItem::Turn(Turn::Credit(session))));
            }
            self.waiting.turns.enter_control(session, FlowKind::Credit);
        }
        if !is_closed && let Some(mut flow) = self.waiting.turns.next(is_full) {
            let most = if is_full { INTERACTIVE_BACKLOG } else { usize::MAX };
            let longest = self.longest_frame();
            return Poll::Ready(Some(SendItem::Turn(match flow.kind {
                FlowKind::Answer => Turn::Answer(flow),
                FlowKind::Credit => {
                    flow.charge(0);
                    self.waiting.turns.sent(&flow, 0);
                    Turn::Credit(flow.entry)
                }
                FlowKind::Data => Turn::Data { longest: flow.longest(longest), flow, most },
            })));
        }
        let is_held = is_full && self.waiting.turns.len() > 0;
        if is_held && self.pacing.bulk.as_ref().is_some_and(CongestionController::needs_ping) {
            return Poll::Ready(Some(self.ping(now)));
        }
        self.pacing.look_later(cx, now, self.acks_wait(), is_held);
        Poll::Pending
    }

    /// Returns the waker to be woken without the lock, if anything was queued since the last call.
    pub(crate) fn take_waker(&mut self) -> Option<Waker> {
        if std::mem::take(&mut self.wakes) { self.outbound.take() } else { None }
    }

    /// Queues a source, which the caller keeps alive, for its turns. Returns stale entries, to be dropped without the
    /// lock.
    pub(crate) fn handle_request(
        &mut self,
        entry: QueuedSource,
        request: &QueueRequest,
    ) -> Vec<QueuedSource> {
        if self.closed {
            return Vec::new();
        }
        let stale = self.sweep();
        if request.answer {
            self.waiting.turns.enter_control(entry.clone(), FlowKind::Answer);
        }
        if request.credit {
            self.waiting.credits.push_back(entry.clone());
        }
        if request.needed {
            self.pacing.acks.send_now();
        }
        if let Some(backlog) = request.backlog {
            let longest = self.longest_frame();
            self.waiting.turns.enter(entry, request.usage, backlog, longest);
        }
        self.wake();
        stale
    }

    /// Queues a frame. Returns false if too much waits to be sent.
    pub(crate) fn push_reply(&mut self, frame: Frame) -> bool {
        let has_room = self.waiting.replies.len() < MAX_QUEUED_REPLIES && !self.closed;
        if has_room {
            self.waiting.replies.push_back(frame);
            self.wake();
        }
        has_room
    }

    /// Queues the last frame of a session, which is never refused.
    pub(crate) fn push_last(&mut self, frame: Frame) {
        if !self.closed {
            self.waiting.replies.push_back(frame);
            self.wake();
        }
    }

    /// Requests a ping.
    pub(crate) fn request_ping(&mut self) {
        self.ping.get_or_insert_with(Instant::now);
        self.wake();
    }

    /// Queues the answer to a ping; it replaces an older one that still waits.
    pub(crate) fn push_pong(&mut self, pong: FrameKind) {
        self.pong = Some(pong);
        self.wake();
    }

    /// Handles the answer to ping `number`. Returns `None` if the link does not measure RTTs.
    pub(crate) fn handle_pong(&mut self, number: u64, now: Instant) -> Option<PingMeasurement> {
        let bulk = self.pacing.bulk.as_mut()?;
        let before = bulk.congestion_window();
        bulk.on_ack(number, now);
        let rtt = bulk.latest;
        let cap = bulk.congestion_window();
        let least = self.rtts.sample(rtt, now);
        self.wake();
        Some(PingMeasurement { rtt, least, before, cap })
    }

    /// Returns since when a ping is unanswered, if the remote answers pings.
    pub(crate) fn unanswered(&self) -> Option<Instant> {
        let sent = self.pacing.bulk.as_ref()?.unanswered();
        sent.into_iter().chain(self.ping).min()
    }

    /// Closes the queue. Returns what waits in it, to be dropped without the lock.
    pub(crate) fn close(&mut self) -> WaitingFrames {
        self.closed = true;
        self.wake();
        std::mem::take(&mut self.waiting)
    }

    /// Records what a source has sent in its turn, and queues it again if it has more to send. Returns the turn
    /// otherwise, to be dropped without the lock.
    pub(crate) fn handle_sent(&mut self, turn: Turn, sent: &TurnOutput, now: Instant) -> Option<Turn> {
        match &turn {
            Turn::Answer(flow) | Turn::Data { flow, .. } if sent.bytes > 0 => {
                self.on_data_sent(sent.bytes, flow, now);
            }
            Turn::Credit(_) => self.on_bytes_sent(sent.bytes, now),
            _ => {}
        }
        match (turn, sent.backlog) {
            (Turn::Data { flow, .. }, Some(backlog)) => {
                let longest = self.longest_frame();
                self.waiting.turns.enter(flow.entry, flow.usage, backlog, longest);
            }
            (Turn::Answer(QueuedFlow { entry, .. }) | Turn::Credit(entry), _) if sent.credit => {
                self.waiting.credits.push_back(entry);
            }
            (turn, _) => return Some(turn),
        }
        None
    }

    fn on_data_sent(&mut self, bytes: usize, flow: &QueuedFlow, now: Instant) {
        self.waiting.turns.sent(flow, bytes);
        self.pacing.acks.send_now();
        self.on_bytes_sent(bytes, now);
        if flow.usage.is_interactive() {
            self.pacing.bulk.iter_mut().for_each(|bulk| bulk.interactive(now));
        }
    }

    fn on_bytes_sent(&mut self, bytes: usize, now: Instant) {
        let Some(bulk) = &mut self.pacing.bulk else { return };
        bulk.on_sent(bytes);
        if bulk.is_blocked(now) {
            self.beyond += bytes;
        }
    }

    /// Returns true if acknowledgements for the remote wait.
    pub(crate) fn acks_wait(&self) -> bool {
        self.pong.is_some() || !self.waiting.credits.is_empty()
    }

    /// Removes stale entries, so that they do not accumulate on a link that takes nothing. Runs only when the queue has
    /// doubled, so that the cost per entry is low. Returns what it has removed.
    fn sweep(&mut self) -> Vec<QueuedSource> {
        if self.queued_entries() < self.sweep_at {
            return Vec::new();
        }
        let WaitingFrames { credits, turns, .. } = &mut self.waiting;
        let is_stale = |entry: &QueuedSource| entry.source.is_stale(entry.stay);
        let mut stale = turns.remove_if(is_stale);
        let (removed, kept): (Vec<_>, Vec<_>) = std::mem::take(credits).into_iter().partition(is_stale);
        *credits = kept.into();
        stale.extend(removed);
        self.sweep_at = SWEEP.max(2 * self.queued_entries());
        stale
    }

    /// Returns the number of entries that wait to send.
    pub(crate) fn queued_entries(&self) -> usize {
        self.waiting.credits.len() + self.waiting.turns.len()
    }

    fn ping(&mut self, now: Instant) -> SendItem {
        self.ping = None;
        SendItem::Frame(FrameKind::Ping(self.pacing.bulk.as_mut().map(|bulk| bulk.ping(now))))
    }

    pub(crate) fn longest_frame(&self) -> usize {
        self.pacing.bulk.as_ref().map_or(PLAIN_FRAME, CongestionController::longest_frame)
    }

    /// Makes the gRPC stream poll again, once the lock is released.
    pub(crate) fn wake(&mut self) {
        self.unpulled.get_or_insert_with(Instant::now);
        self.wakes = true;
    }
}

/// Bytes that may be sent beyond a full window until it has room again: a line of 256 kbit/s takes half a second.
const MAX_BEYOND: usize = 4 * INTERACTIVE_BACKLOG;
/// Maximum number of queued replies; more are dropped.
pub(crate) const MAX_QUEUED_REPLIES: usize = 1000;
/// Below this number of entries stale ones are not worth a check.
const SWEEP: usize = 1000;
/// Length of the longest data frame to a plain remote, which limits its queues by frames.
const PLAIN_FRAME: usize = 16 * 1024;

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use crate::link::pacing::tests::reading;
    use crate::schedule::FlowUsage;
    use crate::schedule::tests::Speaker;
    use tunnel_net::tcp_info::TcpInfo;
    use tunnel_proto::state::LinkId;

    use super::*;

    #[tokio::test(start_paused = true)]
    async fn keystrokes_alone_show_nothing_of_what_a_line_that_jitters_carries() {
        let (mut queue, mut now) = (SendQueue::new(true), Instant::now());
        let cap = queue.pacing.bulk.as_ref().map(CongestionController::congestion_window);
        for round in 0..300u32 {
            now += Duration::from_millis(20);
            let bulk_waits = queue.waiting.turns.len() > 0;
            queue.pacing.read(
                Some(TcpInfo {
                    // Calm for a second, then delayed for a while.
                    rtt: Duration::from_millis(if round % 50 < 40 { 40 } else { 85 }),
                    least_round_trip: Duration::from_millis(40),
                    variation: Duration::from_millis(1),
                    pacing: 1_000_000,
                    delivered: round * 4_000,
                    segment: 1,
                    in_flight: 12_000,
                    unsent: 0,
                    written: u64::from(round) * 4_000,
                }),
                bulk_waits,
                now,
            );
            turn(&mut queue, FlowUsage::default(), 100, now);
        }
        assert_eq!(queue.pacing.bulk.as_ref().map(CongestionController::congestion_window), cap);
    }

    #[tokio::test(start_paused = true)]
    async fn less_may_be_unread_on_a_short_way_once_a_session_sends_little_again_and_again() {
        let neighbour = TcpInfo {
            rtt: Duration::from_micros(50),
            least_round_trip: Duration::from_micros(20),
            variation: Duration::ZERO,
            pacing: u64::MAX,
            delivered: 0,
            segment: 1024,
            in_flight: 0,
            unsent: 0,
            written: 0,
        };
        let mut bytes = [0, 0];
        for (len, bytes) in [8192, 100].into_iter().zip(&mut bytes) {
            let (mut queue, now) = (SendQueue::new(true), Instant::now());
            queue.pacing.bulk.as_mut().unwrap().read(neighbour, now);
            let mut usage = FlowUsage::default();
            for _ in 0..5 {
                let mut flow = turn(&mut queue, usage, len, now);
                flow.charge(len);
                usage = flow.usage;
                queue.on_data_sent(len, &flow, now);
            }
            // The remote's kernel accepts everything, and the remote reads none of it.
            let pace = queue.pacing.bulk.as_mut().unwrap();
            while !pace.is_blocked(now) {
                pace.on_sent(1024);
                *bytes += 1024;
                pace.read(TcpInfo { written: *bytes, delivered: (*bytes / 1024) as u32, ..neighbour }, now);
            }
        }
        assert!(bytes[0] > 3 << 20 && bytes[1] < 1 << 20, "{bytes:?}");
    }

    #[tokio::test(start_paused = true)]
    async fn a_flood_of_answers_of_one_client_keeps_back_no_others_and_waits_for_a_full_line() {
        let (mut queue, now) = (SendQueue::new(true), Instant::now());
        let full = TcpInfo { in_flight: 1 << 20, ..reading(Duration::from_millis(40)) };
        queue.pacing.bulk.as_mut().unwrap().read(full, now);
        let answer = QueueRequest { answer: true, ..QueueRequest::default() };
        let key = QueueRequest { backlog: Some(1), ..QueueRequest::default() };
        let flood = std::iter::repeat_n(("flood", &answer), 1000);
        for (client, request) in flood.chain([("typist", &key), ("other", &answer)]) {
            queue.handle_request(QueuedSource { source: Speaker::of(client), stay: 0 }, request);
        }
        let mut sent = Vec::new();
        while let Poll::Ready(Some(SendItem::Turn(mut turn))) =
            queue.poll_next(&mut Context::from_waker(Waker::noop()), now)
        {
            let source = turn.entry().source.clone();
            sent.push(source.client().to_string());
            let output = source.next_frame(LinkId(1), &mut turn, now);
            queue.handle_sent(turn, &output, now);
        }
        assert_eq!(sent[..3], ["flood", "other", "typist"]);
        assert_eq!(sent.len(), 2 + 33, "little goes on a full line, too");
        assert_eq!(queue.waiting.turns.answers_of("flood"), 1000 - 33);
    }

    #[tokio::test(start_paused = true)]
    async fn who_typed_alone_passes_a_full_window_and_many_with_a_little_share_a_bound() {
        let mut queue = SendQueue::new(true);
        let now = Instant::now();
        let mut info = reading(Duration::from_millis(40));
        queue.pacing.bulk.as_mut().unwrap().read(info, now);
        let mut usage = FlowUsage::default();
        for _ in 0..600 {
            let mut flow = turn(&mut queue, usage, 1, now);
            flow.charge(1);
            usage = flow.usage;
            queue.waiting.turns.sent(&flow, 1);
        }
        info.in_flight = 1 << 20;
        queue.pacing.bulk.as_mut().unwrap().read(info, now);
        for client in 0..8 {
            let entry = QueuedSource { source: Speaker::of(&client.to_string()), stay: 0 };
            queue.waiting.turns.enter(entry, FlowUsage::default(), 1 << 20, 65_200);
        }
        queue.waiting.turns.enter(QueuedSource { source: Speaker::new(), stay: 0 }, usage, 1, 65_200);
        assert!(queue.waiting.turns.next(true).is_some(), "the next key waits as bulk does");
        for client in 8..72 {
            let entry = QueuedSource { source: Speaker::of(&client.to_string()), stay: 0 };
            queue.waiting.turns.enter(entry, FlowUsage::default(), 4000, 65_200);
        }
        let mut beyond = 0;
        while let Poll::Ready(Some(item)) = queue.poll_next(&mut Context::from_waker(Waker::noop()), now) {
            if let SendItem::Turn(Turn::Data { mut flow, .. }) = item {
                flow.charge(4000);
                queue.on_data_sent(4000, &flow, now);
                beyond += 4000;
            }
        }
        assert_eq!(beyond, 20_000, "of 256,000 bytes that wait");
    }

    #[tokio::test(start_paused = true)]
    async fn a_flood_of_credits_of_one_client_fills_the_line_and_then_keeps_back_no_others() {
        let (mut queue, now) = (SendQueue::new(true), Instant::now());
        let credit = QueueRequest { credit: true, needed: true, ..QueueRequest::default() };
        let key = QueueRequest { backlog: Some(1), ..QueueRequest::default() };
        let mut send = |requests: &[(&str, &QueueRequest)]| {
            for (client, request) in requests {
                queue.handle_request(QueuedSource { source: Speaker::of(client), stay: 0 }, request);
            }
            let mut sent = Vec::new();
            while let Poll::Ready(Some(item)) = queue.poll_next(&mut Context::from_waker(Waker::noop()), now)
            {
                let SendItem::Turn(mut turn) = item else { continue };
                let source = turn.entry().source.clone();
                sent.push(source.client().to_string());
                let output = source.next_frame(LinkId(1), &mut turn, now);
                queue.handle_sent(turn, &output, now);
            }
            (sent, queue.pacing.bulk.as_mut().unwrap().is_blocked(now))
        };
        // Credits count on the line, which answers no ping.
        let flood = [("flood", &credit); 100];
        let full = (0..1000).find(|_| send(&flood).1);
        assert!(full.is_some(), "the line is never full");
        let passed: usize = (0..20).map(|_| send(&flood).0.len()).sum();
        assert!(passed < 40, "{passed} credits of the flood on a full line");
        for _ in 0..20 {
            send(&flood);
            assert_eq!(send(&[("typist", &key), ("reader", &credit)]).0, ["reader", "typist"]);
        }
    }

    /// Returns the turn of a session that has sent so much, with `backlog` bytes to send; everything before it is sent.
    fn turn(queue: &mut SendQueue, usage: FlowUsage, backlog: usize, now: Instant) -> QueuedFlow {
        let entry = QueuedSource { source: Speaker::new(), stay: 0 };
        queue.waiting.turns.enter(entry, usage, backlog, 65_200);
        loop {
            let next = queue.poll_next(&mut Context::from_waker(Waker::noop()), now);
            if let Poll::Ready(Some(SendItem::Turn(Turn::Data { flow, .. }))) = next {
                return flow;
            }
        }
    }
}
