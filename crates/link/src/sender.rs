//! What waits to be sent on one link, in which order it is sent, and which sessions run there.
//!
//! Sessions keep the data that they have to send; the link sender only holds which of them need a turn. A frame is made
//! when the link can take it, under the session's lock, so order and fairness are decided at the last moment.
//!
//! Two locks are involved, never both at once: the link sender's lock guards the order of turns, the session's lock its
//! data. The puller takes the next entry under the first lock, releases it, and requests a frame from the session under
//! the second. In between the session may move to another link, or end. So the session compares its path with the
//! puller's link and returns no frame if it has left; the puller then continues with the next entry. Conversely, a
//! session requests a turn after it has released its own lock, and may have moved meanwhile. That leaves a stale entry
//! of the same kind. The link's members have a third lock, which is never held together with either.

pub mod interactive;
pub mod pacing;
pub mod signals;

use std::collections::{HashMap, HashSet, VecDeque};
use std::ptr;
use std::sync::atomic::Ordering::Relaxed;
use std::sync::atomic::{AtomicBool, AtomicU64};
use std::sync::{Arc, OnceLock};
use std::task::{Context, Poll, Waker};

use tokio::sync::Notify;
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;

use crate::congestion::CongestionController;
use crate::frame_log::log_frame;
use crate::lock::{Mutex, MutexGuard};

use crate::relay::queue::RelayQueue;
use crate::schedule::{
    ControlOutcome, ControlQueue, DataRequest, Entry, FlowState, FrameSource, INTERACTIVE_BACKLOG,
    QueuedFlow, Scheduler, SendRequest,
};
use crate::sender::interactive::InteractiveLink;
use crate::sender::pacing::Pacing;
use crate::sender::signals::{LinkStats, RttEstimator, WatchWindow};
use tunnel_base::names::{Instance, NodeName, SessionId};
use tunnel_proto::budget::{Budget, Reservation};
use tunnel_proto::frame::{Frame, FrameKind, Remote, SessionFrame, SessionKey};
use tunnel_proto::state::LinkId;

/// The sending side of one link, shared by its sessions, its read loop and its gRPC stream.
#[derive(Debug)]
pub struct LinkSender {
    /// The link's number within this process; the log field `link`.
    pub id: LinkId,
    /// The remote end.
    pub peer: Remote,
    /// The remote process; `None` on a plain link.
    pub instance: Option<Instance>,
    /// Notified when a reader of a session on a plain link has taken bytes.
    pub(crate) read: Notify,
    /// Notified at each answer to a ping.
    answered: Notify,
    closed: CancellationToken,
    /// Whether a Drain frame was sent on this link.
    drained: AtomicBool,
    /// Why the link was closed, if another process has the remote's name.
    dismissed: OnceLock<String>,
    waiting: Mutex<SendQueue>,
    /// The sessions that have their path over this link; `None` once the link has ended.
    members: Mutex<Option<LinkSessions>>,
    /// The link for interactive sessions next to this one.
    interactive: Mutex<Option<Box<InteractiveLink>>>,
    /// Budget for the bytes that wait here for relayed sessions.
    room: OnceLock<Arc<Budget>>,
    /// Budget for the bytes from a plain remote, without a promised window, that wait here for readers.
    unread: OnceLock<Arc<Budget>>,
    round_trip_micros: AtomicU64,
    /// [`u64::MAX`] before the first answer to a ping.
    least_round_trip_micros: AtomicU64,
    made: Instant,
    /// Time of the last data from the remote, in milliseconds since the link was created.
    last_received_millis: AtomicU64,
    watch: WatchWindow,
    seen: LinkStats,
}

impl LinkSender {
    /// Creates the sending side of a new link to `peer`. An extended link has congestion control.
    pub fn new(id: LinkId, peer: Remote, instance: Option<Instance>) -> Arc<Self> {
        Arc::new(Self {
            id,
            peer,
            instance,
            read: Notify::new(),
            answered: Notify::new(),
            closed: CancellationToken::new(),
            drained: AtomicBool::new(false),
            dismissed: OnceLock::new(),
            waiting: Mutex::new(SendQueue::new(instance.is_some())),
            members: Mutex::new(Some(LinkSessions::default())),
            interactive: Mutex::default(),
            room: OnceLock::new(),
            unread: OnceLock::new(),
            round_trip_micros: AtomicU64::new(INITIAL_RTT_MICROS),
            least_round_trip_micros: AtomicU64::new(u64::MAX),
            made: Instant::now(),
            last_received_millis: AtomicU64::new(0),
            watch: WatchWindow::default(),
            seen: LinkStats::default(),
        })
    }

    /// Returns true if the remote is plain: a program of SuperEdge, which knows no limits, no resuming and no signals.
    /// Sessions end with such a link.
    pub fn is_plain(&self) -> bool {
        self.instance.is_none()
    }

    /// Polls for the next frame to send. Returns `None` once the link is closed.
    ///
    /// # Cancel safety
    ///
    /// Cancel safe: a frame is handed out once, and only if ready.
    pub fn poll_pull(&self, cx: &mut Context<'_>, now: Instant) -> Poll<Option<Frame>> {
        loop {
            let next = self.lock_informed(now).poll_next(cx, now);
            let frame = match std::task::ready!(next) {
                None => return Poll::Ready(None),
                Some(Next::Frame(body)) => {
                    let node = self.peer.frame_node().cloned().unwrap_or_else(NodeName::none);
                    Some(Frame { node, body })
                }
                Some(Next::Reply(frame)) => Some(frame),
                Some(Next::Control(entry, queue)) => self.take_control(entry, queue, now),
                Some(Next::Turn { turn, longest, small_only }) => {
                    self.take_turn(turn, longest, small_only, now)
                }
            };
            if let Some(frame) = frame {
                log_frame("frame sent", self.id, &frame);
                return Poll::Ready(Some(frame));
            }
        }
    }

    /// Queues a source for its turn if it has anything to send.
    pub(crate) fn enter<S: FrameSource + 'static>(&self, source: &Arc<S>, intent: &SendRequest) {
        let SendRequest { answer, credit, needed, data, stay } = *intent;
        if !answer && !credit && !needed && data.is_none() {
            return;
        }
        let mut waiting = self.lock();
        if waiting.closed {
            return;
        }
        waiting.sweep();
        let entry = Entry { source: source.clone(), stay };
        if answer {
            waiting.answers.push_back(entry.clone());
        }
        if credit {
            waiting.credits.push_back(entry.clone());
        }
        if needed {
            waiting.pacing.acks.send_now();
        }
        if let Some(DataRequest { flow_state, backlog }) = data {
            let longest = waiting.longest_frame();
            waiting.turns.enter(entry, flow_state, backlog, longest);
        }
        waiting.wake();
    }

    /// Records that the remote has sent something now.
    pub fn received(&self, now: Instant) {
        let since = now.saturating_duration_since(self.made).as_millis();
        self.last_received_millis.store(u64::try_from(since).unwrap_or(u64::MAX), Relaxed);
    }

    /// Returns since when the remote has taken nothing although something waits for it.
    pub(crate) fn blocked_since(&self) -> Option<Instant> {
        self.lock().unpulled
    }

    /// Closes the link: nothing more is sent on it.
    pub fn close(&self) {
        let mut waiting = self.lock();
        waiting.closed = true;
        (waiting.answers, waiting.credits) = Default::default();
        waiting.turns = Scheduler::new();
        waiting.replies.clear();
        waiting.wake();
        drop(waiting);
        self.closed.cancel();
        self.wake_reader();
    }

    /// Waits until the link is closed.
    ///
    /// # Cancel safety
    ///
    /// Cancel safe.
    pub async fn closed(&self) {
        self.closed.cancelled().await;
    }

    /// Returns true if the remote does not read its replies. Then it gets no new sessions, because each needs a reply.
    pub(crate) fn is_reply_queue_full(&self) -> bool {
        self.lock().answers.len() >= MAX_QUEUED_REPLIES
    }

    /// Returns true if the link was closed.
    pub fn is_closed(&self) -> bool {
        self.lock().closed
    }

    /// Returns the number of entries that wait to be sent: replies, and sessions with control frames or data, including
    /// stale entries.
    pub fn waiting(&self) -> usize {
        let waiting = self.lock();
        waiting.replies.len() + waiting.queued_senders()
    }

    /// Takes a control frame from the source, and queues the source again if it has more of them.
    fn take_control(&self, entry: Entry, queue: ControlQueue, now: Instant) -> Option<Frame> {
        let source = entry.source.clone();
        let ControlOutcome { frame, again } = source.next_control(self.id, entry.stay, queue, now);
        let frame = self.sent(&*entry.source, frame, now);
        if again {
            self.lock().credits.push_back(entry);
        }
        frame
    }

    /// Takes a frame from the source in its turn, and queues the source again if it has more to send.
    fn take_turn(
        &self,
        turn: QueuedFlow<Entry>,
        longest: usize,
        small_only: bool,
        now: Instant,
    ) -> Option<Frame> {
        let most = if small_only { INTERACTIVE_BACKLOG } else { usize::MAX };
        let sent = turn.key.source.clone().next_turn(self.id, &turn, longest, most, now);
        let frame = self.sent(&*turn.key.source, sent.frame, now);
        let mut waiting = self.lock();
        if sent.bytes > 0 {
            waiting.sent(sent.bytes, sent.flow_state, now);
        }
        if let Some(backlog) = sent.backlog {
            waiting.turns.enter(turn.key, sent.flow_state, backlog, longest);
        }
        frame
    }

    /// Turns what a source has sent into a frame of this link. A relayed source that has sent its last frame leaves the
    /// link.
    fn sent(&self, source: &dyn FrameSource, frame: Option<SessionFrame>, now: Instant) -> Option<Frame> {
        if source.is_over() {
            self.detach_relay(source);
        }
        frame.map(|frame| {
            self.mark_active(now);
            self.frame(source.key(), frame)
        })
    }

    /// Creates a frame about a session. On the link of an edge or a user's program only Open and Resume have another node
    /// than the link's.
    fn frame(&self, session: &SessionKey, frame: SessionFrame) -> Frame {
        let asks = matches!(frame, SessionFrame::Open { .. } | SessionFrame::Resume { .. });
        let node = self.peer.frame_node().filter(|_| !asks).unwrap_or(&session.node).clone();
        Frame { node, body: FrameKind::Session(session.id, session.category, frame) }
    }

    pub(crate) fn lock(&self) -> MutexGuard<'_, SendQueue> {
        self.waiting.lock()
    }
}

/// Maximum number of queued replies; more are dropped.
const MAX_QUEUED_REPLIES: usize = 1000;
/// Assumed before the first answer to a ping if the kernel does not report an RTT.
const INITIAL_RTT_MICROS: u64 = 100_000;

// The queue of one link: what waits to be sent, and what is next.

/// Everything that waits for one link, under the link sender's lock.
#[derive(Debug)]
pub(crate) struct SendQueue {
    pub(crate) closed: bool,
    /// The answer to the latest ping.
    pub(crate) pong: Option<FrameKind>,
    /// Since when a ping is due.
    pub(crate) ping: Option<Instant>,
    pub(crate) rtts: RttEstimator,
    /// Signals, last frames, and replies about unknown sessions. Limited by [`MAX_QUEUED_REPLIES`], except for frames
    /// of this process's own sessions.
    pub(crate) replies: VecDeque<Frame>,
    pub(crate) answers: VecDeque<Entry>,
    /// Sessions that have a credit to send.
    pub(crate) credits: VecDeque<Entry>,
    pub(crate) turns: Scheduler<Entry>,
    /// Decides when bulk and acknowledgements may be sent.
    pub(crate) pacing: Pacing,
    /// Number of entries at which stale ones are removed.
    sweep_at: usize,
    /// Since when something waits to be sent that the gRPC stream has not pulled.
    pub(crate) unpulled: Option<Instant>,
    outbound: Option<Waker>,
}

/// The next thing to be sent on a link, chosen from its queues.
pub(crate) enum Next {
    Frame(FrameKind),
    Reply(Frame),
    Control(Entry, ControlQueue),
    Turn { turn: QueuedFlow<Entry>, longest: usize, small_only: bool },
}

impl SendQueue {
    /// Creates an empty queue; `paced` if the remote answers pings.
    pub(crate) fn new(paced: bool) -> Self {
        Self {
            closed: false,
            pong: None,
            ping: None,
            rtts: RttEstimator::default(),
            replies: VecDeque::new(),
            answers: VecDeque::new(),
            credits: VecDeque::new(),
            turns: Scheduler::new(),
            pacing: Pacing::new(paced),
            sweep_at: SWEEP,
            unpulled: None,
            outbound: None,
        }
    }

    /// Polls for what is sent next; the caller is woken when there is something. Returns `None` once the link is
    /// closed.
    pub(crate) fn poll_next(&mut self, cx: &mut Context<'_>, now: Instant) -> Poll<Option<Next>> {
        if self.closed {
            return Poll::Ready(None);
        }
        self.unpulled = None;
        let acks = self.pacing.acks.may_go(now);
        if let Some(pong) = self.pong.take_if(|_| acks) {
            self.pacing.acks.on_sent(now);
            return Poll::Ready(Some(Next::Frame(pong)));
        }
        if self.ping.is_some() || self.pacing.bulk.as_ref().is_some_and(|bulk| bulk.ping_due(now)) {
            self.pacing.acks.send_now();
            return Poll::Ready(Some(self.ping(now)));
        }
        if let Some(frame) = self.replies.pop_front() {
            self.pacing.acks.send_now();
            return Poll::Ready(Some(Next::Reply(frame)));
        }
        if let Some(session) = self.answers.pop_front() {
            self.pacing.acks.send_now();
            return Poll::Ready(Some(Next::Control(session, ControlQueue::Answers)));
        }
        if acks && let Some(session) = self.credits.pop_front() {
            self.pacing.acks.on_sent(now);
            return Poll::Ready(Some(Next::Control(session, ControlQueue::Credits)));
        }
        let small_only =
            self.turns.has_bulk() && self.pacing.bulk.as_mut().is_some_and(|bulk| bulk.is_blocked(now));
        let longest = self.longest_frame();
        if let Some(turn) = self.turns.next(small_only) {
            return Poll::Ready(Some(Next::Turn { turn, longest, small_only }));
        }
        if small_only && self.pacing.bulk.as_ref().is_some_and(CongestionController::needs_ping) {
            return Poll::Ready(Some(self.ping(now)));
        }
        self.pacing.look_later(cx, now, self.acks_wait(), small_only);
        if !self.outbound.as_ref().is_some_and(|w| w.will_wake(cx.waker())) {
            self.outbound = Some(cx.waker().clone());
        }
        Poll::Pending
    }

    /// Records that a session has sent `bytes` in its turn; `flow_state` is its state afterwards.
    pub(crate) fn sent(&mut self, bytes: usize, flow_state: FlowState, now: Instant) {
        self.turns.sent(flow_state);
        self.pacing.acks.send_now();
        if let Some(bulk) = &mut self.pacing.bulk {
            bulk.on_sent(bytes);
            if flow_state.is_interactive() {
                bulk.interactive(now);
            }
        }
    }

    /// Returns true if acknowledgements for the remote wait.
    fn acks_wait(&self) -> bool {
        self.pong.is_some() || !self.credits.is_empty()
    }

    /// Removes stale entries, so that they do not accumulate on a link that takes nothing. Runs only when the queue has
    /// doubled, so that the cost per entry is low.
    pub(crate) fn sweep(&mut self) {
        if self.queued_senders() < self.sweep_at {
            return;
        }
        let stays = |entry: &Entry| !entry.source.is_stale(entry.stay);
        self.answers.retain(stays);
        self.credits.retain(stays);
        self.turns.retain(stays);
        self.sweep_at = SWEEP.max(2 * self.queued_senders());
    }

    /// Returns the number of entries that wait to send.
    pub(crate) fn queued_senders(&self) -> usize {
        self.answers.len() + self.credits.len() + self.turns.len()
    }

    fn ping(&mut self, now: Instant) -> Next {
        self.ping = None;
        Next::Frame(FrameKind::Ping(self.pacing.bulk.as_mut().map(|bulk| bulk.ping(now))))
    }

    pub(crate) fn longest_frame(&self) -> usize {
        self.pacing.bulk.as_ref().map_or(PLAIN_FRAME, CongestionController::longest_frame)
    }

    pub(crate) fn wake(&mut self) {
        self.unpulled.get_or_insert_with(Instant::now);
        if let Some(outbound) = self.outbound.take() {
            outbound.wake();
        }
    }
}

/// Below this number of entries stale ones are not worth a check.
const SWEEP: usize = 1000;
/// Length of the longest data frame to a plain remote, which limits its queues by frames.
const PLAIN_FRAME: usize = 16 * 1024;

// The sessions that run on one link.

/// The sessions that run on a link: those with an end here and relayed ones. Each has a number for the order in which
/// it joined; in that order they are notified of the link's end.
///
/// [`LinkSender::detach_all`] takes the whole list out, and afterwards joining fails. A session that comes too late
/// sees that and handles the link's end itself. So every session handles the end exactly once.
#[derive(Debug, Default)]
pub(crate) struct LinkSessions {
    /// Sessions with an end in this process.
    own: Members<()>,
    relayed: Members<Relayed>,
    /// Number of sessions that have joined so far.
    came: u64,
}

/// A relayed session whose frames are sent on this link.
#[derive(Debug)]
struct Relayed {
    source: Arc<RelayQueue>,
    /// The epoch of its attempt.
    epoch: u64,
}

/// Sessions of one kind on a link, by id and by node: a node that moves concerns only its own sessions, and thousands
/// may move at once.
#[derive(Debug)]
struct Members<T> {
    all: HashMap<SessionId, Member<T>>,
    by_node: HashMap<NodeName, HashSet<SessionId>>,
}

/// A session on a link.
#[derive(Debug)]
struct Member<T> {
    /// Its number in the order in which sessions joined the link.
    came: u64,
    key: SessionKey,
    more: T,
}

impl<T> Default for Members<T> {
    fn default() -> Self {
        Self { all: HashMap::new(), by_node: HashMap::new() }
    }
}

impl<T> Members<T> {
    fn insert(&mut self, member: Member<T>) -> Option<T> {
        let (id, node) = (member.key.id, member.key.node.clone());
        let before = self.remove(id);
        self.by_node.entry(node).or_default().insert(id);
        self.all.insert(id, member);
        before
    }

    fn remove(&mut self, id: SessionId) -> Option<T> {
        let member = self.all.remove(&id)?;
        if let Some(ids) = self.by_node.get_mut(&member.key.node) {
            ids.remove(&id);
            if ids.is_empty() {
                self.by_node.remove(&member.key.node);
            }
        }
        Some(member.more)
    }

    /// Returns all sessions, or those of one node, in the order of joining.
    fn keys(&self, of: Option<&NodeName>) -> Vec<SessionKey> {
        let mut members: Vec<_> = match of {
            None => self.all.values().collect(),
            Some(node) => {
                let ids = self.by_node.get(node).into_iter().flatten();
                ids.filter_map(|id| self.all.get(id)).collect()
            }
        };
        members.sort_unstable_by_key(|member| member.came);
        members.into_iter().map(|member| member.key.clone()).collect()
    }
}

/// What ran on a link that has ended, in the order of joining.
#[derive(Debug, Default)]
pub(crate) struct DetachedSessions {
    /// Sessions with an end in this process.
    pub(crate) own: Vec<SessionKey>,
    /// Relayed sessions.
    pub(crate) relayed: Vec<SessionKey>,
}

impl LinkSender {
    /// Returns the number of sessions that have their path over this link, including relayed ones.
    pub fn sessions(&self) -> usize {
        self.members.lock().as_ref().map_or(0, |members| members.own.all.len() + members.relayed.all.len())
    }

    /// Returns true if a session with that node has its path over this link.
    pub fn has_sessions_of(&self, node: &NodeName) -> bool {
        self.members.lock().as_ref().is_some_and(|members| {
            members.own.by_node.contains_key(node) || members.relayed.by_node.contains_key(node)
        })
    }

    /// Returns true if the link has ever been the path of a session, including sessions that have ended.
    pub fn has_carried(&self) -> bool {
        self.members.lock().as_ref().is_some_and(|members| members.came > 0)
    }

    /// Adds a session with an end here. Returns false if the link has ended: the caller then treats the path as lost.
    pub(crate) fn attach(&self, key: &SessionKey) -> bool {
        let mut members = self.members.lock();
        if let Some(members) = members.as_mut() {
            members.came += 1;
            members.own.insert(Member { came: members.came, key: key.clone(), more: () });
        }
        members.is_some()
    }

    /// Removes a session that runs elsewhere or is over.
    pub(crate) fn detach(&self, id: SessionId) {
        if let Some(members) = self.members.lock().as_mut() {
            members.own.remove(id);
        }
    }

    /// Adds a relay's source for attempt `epoch`. An older source of the same session sends nothing more, except the
    /// PathLost frame of a newer attempt. Returns false if the link has ended.
    ///
    /// Attempts may be added out of order, because the relay table releases its lock before it calls this.
    pub(crate) fn attach_relay(&self, source: &Arc<RelayQueue>, epoch: u64) -> bool {
        let key = source.key().clone();
        let mut members = self.members.lock();
        let Some(known) = members.as_mut() else { return false };
        if known.relayed.all.get(&key.id).is_some_and(|newer| newer.more.epoch > epoch) {
            // This attempt is late: a newer one has already been added.
            drop(members);
            source.close();
            return true;
        }
        known.came += 1;
        let more = Relayed { source: source.clone(), epoch };
        let older = known.relayed.insert(Member { came: known.came, key, more });
        drop(members);
        if let Some(older) = older {
            older.source.retire(epoch);
        }
        // The source may have been closed, or have sent its last frame, before it was added. Then nothing else would
        // remove it.
        if source.is_over() {
            self.detach_relay(&**source);
        }
        true
    }

    /// Returns an empty reservation in the budget of `most` bytes for relayed sessions on this link.
    pub(crate) fn relay_reservation(&self, most: usize) -> Reservation {
        self.room.get_or_init(|| Budget::new(most)).reservation()
    }

    /// Returns an empty reservation in the budget of `most` bytes for readers of a plain remote's sessions. The session
    /// table limits the total of all links.
    pub(crate) fn unread_reservation(&self, most: usize) -> Reservation {
        self.unread.get_or_init(|| Budget::new(most)).reservation()
    }

    /// Returns true if sessions of this plain link have more unread than its share while half of the total is in use.
    pub(crate) fn exceeds_fair_share(&self, all: &Budget) -> bool {
        self.unread.get().is_some_and(|share| share.is_exhausted()) && all.used() >= all.limit() / 2
    }

    /// Removes a relay's source. A newer source of the same session stays; the two are compared by address.
    pub(crate) fn detach_relay<S: FrameSource + ?Sized>(&self, source: &S) {
        let id = source.key().id;
        let is = |known: &Member<Relayed>| ptr::addr_eq(Arc::as_ptr(&known.more.source), source);
        if let Some(members) = self.members.lock().as_mut()
            && members.relayed.all.get(&id).is_some_and(is)
        {
            members.relayed.remove(id);
        }
    }

    /// Returns the sessions that are relayed over this link: all, or those of one node.
    pub(crate) fn relayed(&self, of: Option<&NodeName>) -> Vec<SessionKey> {
        self.members.lock().as_ref().map(|members| members.relayed.keys(of)).unwrap_or_default()
    }

    /// Returns the sessions with an end here: all, or those of one node.
    pub(crate) fn own(&self, of: Option<&NodeName>) -> Vec<SessionKey> {
        self.members.lock().as_ref().map(|members| members.own.keys(of)).unwrap_or_default()
    }

    /// Returns all sessions on this link.
    pub(crate) fn members(&self) -> HashSet<SessionId> {
        let members = self.members.lock();
        let ids = members.iter().flat_map(|members| members.own.all.keys().chain(members.relayed.all.keys()));
        ids.copied().collect()
    }

    /// Closes the link for good and returns all sessions that ran on it.
    pub(crate) fn detach_all(&self) -> DetachedSessions {
        self.close();
        let Some(LinkSessions { own, relayed, .. }) = self.members.lock().take() else {
            return DetachedSessions::default();
        };
        DetachedSessions { own: own.keys(None), relayed: relayed.keys(None) }
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use crate::sender::pacing::tests::Speaker;
    use tunnel_base::names::{NodeName, SessionId};
    use tunnel_net::tcp_info::TcpInfo;
    use tunnel_proto::frame::{Category, SessionKey};

    use super::*;

    #[tokio::test(start_paused = true)]
    async fn keystrokes_alone_show_nothing_of_what_a_line_that_jitters_carries() {
        let (mut waiting, mut now) = (SendQueue::new(true), Instant::now());
        let cap = waiting.pacing.bulk.as_ref().map(CongestionController::congestion_window);
        for round in 0..300u32 {
            now += Duration::from_millis(20);
            let bulk_waits = waiting.turns.len() > 0;
            waiting.pacing.read(
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
            turn(&mut waiting, FlowState::default(), 100, now);
        }
        assert_eq!(waiting.pacing.bulk.as_ref().map(CongestionController::congestion_window), cap);
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
            let (mut waiting, now) = (SendQueue::new(true), Instant::now());
            waiting.pacing.bulk.as_mut().unwrap().read(neighbour, now);
            let mut flow_state = FlowState::default();
            for _ in 0..5 {
                flow_state = turn(&mut waiting, flow_state, len, now).flow_state_after(len);
                waiting.sent(len, flow_state, now);
            }
            // The remote's kernel accepts everything, and the remote reads none of it.
            let pace = waiting.pacing.bulk.as_mut().unwrap();
            while !pace.is_blocked(now) {
                pace.on_sent(1024);
                *bytes += 1024;
                pace.read(TcpInfo { written: *bytes, delivered: (*bytes / 1024) as u32, ..neighbour }, now);
            }
        }
        assert!(bytes[0] > 3 << 20 && bytes[1] < 1 << 20, "{bytes:?}");
    }

    /// Returns the turn of a session in that state with `backlog` bytes to send; everything before it is sent.
    fn turn(
        waiting: &mut SendQueue,
        flow_state: FlowState,
        backlog: usize,
        now: Instant,
    ) -> QueuedFlow<Entry> {
        let key = SessionKey { id: SessionId::from_bits(1), category: Category::Ssh, node: NodeName::none() };
        let entry = Entry { source: Arc::new(Speaker(key)), stay: 0 };
        waiting.turns.enter(entry, flow_state, backlog, 65_200);
        loop {
            let next = waiting.poll_next(&mut Context::from_waker(Waker::noop()), now);
            if let Poll::Ready(Some(Next::Turn { turn, .. })) = next {
                return turn;
            }
        }
    }
}
