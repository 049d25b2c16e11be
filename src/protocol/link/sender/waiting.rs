//! Who waits to send on one link, and who is next.

use std::collections::VecDeque;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, Waker};

use tokio::time::{Instant, Sleep, sleep_until};

use crate::net::tcp_info::{TcpInfo, TcpInfoReader};
use crate::protocol::link::pace::Pace;
use crate::protocol::link::schedule::{Schedule, Standing, Turn};
use crate::protocol::link::sender::reports::Reports;
use crate::protocol::link::source::FrameSource;
use crate::protocol::link::trips::Trips;
use crate::protocol::wire::frame::{Frame, FrameKind};

/// Everything that waits for one link, under the link sender's lock.
#[derive(Debug)]
pub(super) struct Waiting {
    pub(super) closed: bool,
    pub(super) pong: Option<Option<u64>>,
    /// Since when a ping is to be sent.
    pub(super) ping: Option<Instant>,
    pub(super) trips: Trips,
    pub(super) reports: Reports,
    /// Signals, last frames, and answers about sessions that are not ours; bounded by [`MOST_REPLIES`] but for the
    /// frames of own sessions.
    pub(super) replies: VecDeque<Frame>,
    pub(super) answers: VecDeque<Arc<dyn FrameSource>>,
    /// Sessions that have a credit to send and no answer.
    pub(super) credits: VecDeque<Arc<dyn FrameSource>>,
    pub(super) turns: Schedule<Arc<dyn FrameSource>>,
    /// None on a plain link, whose peer must not be pinged often.
    pub(super) pace: Option<Pace>,
    /// Reads the kernel for the pace; none where it cannot.
    pub(super) tcp_info: Option<TcpInfoReader>,
    /// When to look again whether bulk may be sent.
    look: Option<Pin<Box<Sleep>>>,
    /// At this many entries the stale ones are removed.
    sweep_at: usize,
    /// Since when something waits to be sent that the gRPC stream has not pulled.
    pub(super) unpulled: Option<Instant>,
    puller: Option<Waker>,
}

/// Who is next.
pub(super) enum Next {
    Frame(FrameKind),
    Reply(Frame),
    Control(Arc<dyn FrameSource>),
    Turn { turn: Turn<Arc<dyn FrameSource>>, longest: usize, small_only: bool },
}

impl Waiting {
    /// No session waits; `paced` if the peer answers pings.
    pub(super) fn new(paced: bool) -> Self {
        Self {
            closed: false,
            pong: None,
            ping: None,
            trips: Trips::default(),
            reports: Reports::default(),
            replies: VecDeque::new(),
            answers: VecDeque::new(),
            credits: VecDeque::new(),
            turns: Schedule::new(),
            pace: paced.then(Pace::new),
            tcp_info: None,
            look: None,
            sweep_at: SWEEP,
            unpulled: None,
            puller: None,
        }
    }

    /// Who is next; the caller is woken when someone comes. None once the link is closed.
    pub(super) fn poll_next(&mut self, cx: &mut Context<'_>, now: Instant) -> Poll<Option<Next>> {
        if self.closed {
            return Poll::Ready(None);
        }
        self.unpulled = None;
        let reports = self.reports.may_go(now);
        if let Some(number) = self.pong.take_if(|_| reports) {
            self.reports.go(now);
            return Poll::Ready(Some(Next::Frame(FrameKind::Pong(number))));
        }
        if self.ping.is_some() || self.pace.as_ref().is_some_and(|pace| pace.ping_due(now)) {
            self.reports.hurry();
            return Poll::Ready(Some(self.ping(now)));
        }
        if let Some(frame) = self.replies.pop_front() {
            self.reports.hurry();
            return Poll::Ready(Some(Next::Reply(frame)));
        }
        if let Some(session) = self.answers.pop_front() {
            self.reports.hurry();
            return Poll::Ready(Some(Next::Control(session)));
        }
        if reports && let Some(session) = self.credits.pop_front() {
            self.reports.go(now);
            return Poll::Ready(Some(Next::Control(session)));
        }
        let small_only = self.turns.has_bulk() && self.pace.as_mut().is_some_and(|pace| pace.is_capped(now));
        let longest = self.longest_frame();
        if let Some(turn) = self.turns.next(small_only) {
            return Poll::Ready(Some(Next::Turn { turn, longest, small_only }));
        }
        if small_only && self.pace.as_ref().is_some_and(Pace::waits_for_ping) {
            return Poll::Ready(Some(self.ping(now)));
        }
        self.look_later(cx, now, small_only);
        if !self.puller.as_ref().is_some_and(|w| w.will_wake(cx.waker())) {
            self.puller = Some(cx.waker().clone());
        }
        Poll::Pending
    }

    /// A session has sent so many bytes in its turn, after which it stands there.
    pub(super) fn sent(&mut self, bytes: usize, standing: Standing, now: Instant) {
        self.turns.sent(standing);
        self.reports.hurry();
        if let Some(pace) = &mut self.pace {
            pace.pulled(bytes);
            if standing.is_interactive() {
                pace.interactive(now);
            }
        }
    }

    /// What is to be read before it is decided who is next, without this lock: then it goes to [`Self::read`].
    pub(super) fn wants_reading(&self, now: Instant) -> Option<TcpInfoReader> {
        let reports = self.pace.is_some() && self.report_waits() && self.reports.wants_reading(now);
        let wanted = reports || self.paces(now);
        if wanted { self.tcp_info.clone() } else { None }
    }

    /// What the kernel knows just now; if it does not tell, it will not.
    pub(super) fn read(&mut self, reading: Option<TcpInfo>, now: Instant) {
        let paces = self.paces(now);
        match (&mut self.pace, reading) {
            (Some(pace), Some(reading)) => {
                self.reports.read(&reading, now);
                if paces {
                    pace.read(reading, now);
                }
            }
            (Some(pace), None) => {
                pace.blind();
                self.tcp_info = None;
            }
            (None, _) => {}
        }
    }

    /// Whether the pace should know what the kernel knows just now.
    fn paces(&self, now: Instant) -> bool {
        self.turns.len() > 0 && self.pace.as_ref().is_some_and(|pace| pace.wants_reading(now))
    }

    /// Whether the peer is to be told what has come.
    fn report_waits(&self) -> bool {
        self.pong.is_some() || !self.credits.is_empty()
    }

    /// Nothing goes out now. Has the caller woken when time lets something go: reports, or bulk that is `capped`.
    fn look_later(&mut self, cx: &mut Context<'_>, now: Instant, capped: bool) {
        let report = if self.report_waits() { self.reports.next() } else { None };
        self.reports.rest();
        let bulk = if capped { self.pace.as_mut().and_then(Pace::look_after) } else { None };
        let Some(at) = bulk.map(|after| now + after).into_iter().chain(report).min() else { return };
        let look = self.look.get_or_insert_with(|| Box::pin(sleep_until(at)));
        if look.deadline() <= now || look.deadline() > at {
            look.as_mut().reset(at);
        }
        if look.as_mut().poll(cx).is_ready() {
            cx.waker().wake_by_ref();
        }
    }

    /// Forgets those that were closed while they waited, so that a link that takes nothing does not gather them: once
    /// in a while, when so many have come that a look at all of them costs little for each.
    pub(super) fn sweep(&mut self) {
        if self.speakers() < self.sweep_at {
            return;
        }
        self.answers.retain(|source| !source.is_closed());
        self.credits.retain(|source| !source.is_closed());
        self.turns.retain(|source| !source.is_closed());
        self.sweep_at = SWEEP.max(2 * self.speakers());
    }

    /// Entries of those who wait to send.
    pub(super) fn speakers(&self) -> usize {
        self.answers.len() + self.credits.len() + self.turns.len()
    }

    fn ping(&mut self, now: Instant) -> Next {
        self.ping = None;
        Next::Frame(FrameKind::Ping(self.pace.as_mut().map(|pace| pace.ping(now))))
    }

    pub(super) fn longest_frame(&self) -> usize {
        self.pace.as_ref().map_or(PLAIN_FRAME, Pace::longest_frame)
    }

    pub(super) fn wake(&mut self) {
        self.unpulled.get_or_insert_with(Instant::now);
        if let Some(puller) = self.puller.take() {
            puller.wake();
        }
    }
}

/// Entries below which a link's list is not worth a look.
const SWEEP: usize = 1000;
/// Longest data frame to a plain peer, whose queues count frames.
const PLAIN_FRAME: usize = 16 * 1024;

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;
    use crate::names::{NodeName, SessionId};
    use crate::protocol::link::sender::reports::tests::Speaker;
    use crate::protocol::wire::frame::{Category, SessionKey};

    #[tokio::test(start_paused = true)]
    async fn keystrokes_alone_show_nothing_of_what_a_line_that_jitters_carries() {
        let (mut waiting, mut now) = (Waiting::new(true), Instant::now());
        let cap = waiting.pace.as_ref().map(Pace::cap);
        for round in 0..300u64 {
            now += Duration::from_millis(20);
            waiting.read(
                Some(TcpInfo {
                    // Calm for a second, then later for a while.
                    round_trip: Duration::from_millis(if round % 50 < 40 { 40 } else { 85 }),
                    least_round_trip: Duration::from_millis(40),
                    variation: Duration::from_millis(1),
                    pacing: 1_000_000,
                    delivered: round * 4_000,
                    in_flight: 12_000,
                    unsent: 0,
                    written: round * 4_000,
                }),
                now,
            );
            turn(&mut waiting, Standing::default(), 100, now);
        }
        assert_eq!(waiting.pace.as_ref().map(Pace::cap), cap);
    }

    #[tokio::test(start_paused = true)]
    async fn less_may_be_unread_on_a_short_way_once_a_session_sends_little_again_and_again() {
        let neighbour = TcpInfo {
            round_trip: Duration::from_micros(50),
            least_round_trip: Duration::from_micros(20),
            variation: Duration::ZERO,
            pacing: u64::MAX,
            delivered: 0,
            in_flight: 0,
            unsent: 0,
            written: 0,
        };
        let mut bytes = [0, 0];
        for (len, bytes) in [8192, 100].into_iter().zip(&mut bytes) {
            let (mut waiting, now) = (Waiting::new(true), Instant::now());
            waiting.pace.as_mut().unwrap().read(neighbour, now);
            let mut standing = Standing::default();
            for _ in 0..5 {
                standing = turn(&mut waiting, standing, len, now).standing_after(len);
                waiting.sent(len, standing, now);
            }
            // The peer's kernel takes all, and the peer reads nothing of it.
            let pace = waiting.pace.as_mut().unwrap();
            while !pace.is_capped(now) {
                pace.pulled(1024);
                *bytes += 1024;
                pace.read(TcpInfo { written: *bytes, delivered: *bytes, ..neighbour }, now);
            }
        }
        assert!(bytes[0] > 3 << 20 && bytes[1] < 1 << 20, "{bytes:?}");
    }

    /// The turn of a session that stands there and is to send so many bytes, with all that goes out before it.
    fn turn(
        waiting: &mut Waiting,
        standing: Standing,
        backlog: usize,
        now: Instant,
    ) -> Turn<Arc<dyn FrameSource>> {
        let key = SessionKey { id: SessionId::from_bits(1), category: Category::Ssh, node: NodeName::none() };
        waiting.turns.enter(Arc::new(Speaker(key)), standing, backlog, 65_200);
        loop {
            let next = waiting.poll_next(&mut Context::from_waker(Waker::noop()), now);
            if let Poll::Ready(Some(Next::Turn { turn, .. })) = next {
                return turn;
            }
        }
    }
}
