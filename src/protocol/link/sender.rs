//! What waits to be sent on one link, and in which order it is sent.
//!
//! Sessions keep what they have to send; the link sender holds only which of them want a turn. A frame is made when the
//! link can take it, under the session's lock, so order and fairness are decided at the last moment.
//!
//! Two locks are involved, never both at once: the link sender's guards the order of turns, the session's guards what
//! it sends. The puller takes the next entry under the first lock, releases it, and asks the session for a frame under
//! the second. Between the two the session may move to another link, or end. So the session compares its path with the
//! puller's link and gives no frame if it has left; the puller then goes on to the next entry. The other way round, a
//! session asks for a turn after it has released its own lock, and may have moved meanwhile: that leaves a stale entry,
//! of the same kind. The members have a third lock, which is not held with either.

mod interactive;
mod members;
mod pings;
mod reports;
mod seen;
mod signals;
mod tcp_info;
mod waiting;

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::Relaxed};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock};
use std::task::{Context, Poll};

use tokio::sync::Notify;
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;

use crate::protocol::link::sender::interactive::Interactive;
pub(crate) use crate::protocol::link::sender::members::Disbanded;
use crate::protocol::link::sender::members::Members;
pub(super) use crate::protocol::link::sender::pings::Life;
use crate::protocol::link::sender::pings::Watch;
use crate::protocol::link::sender::seen::Seen;
pub use crate::protocol::link::sender::seen::{Ends, Traffic};
pub(crate) use crate::protocol::link::sender::signals::{UNKNOWN, unknown};
use crate::protocol::link::sender::waiting::{Next, Waiting};

use crate::names::{Instance, NodeName};
use crate::protocol::budget::Budget;
use crate::protocol::link::schedule::{SMALL, Schedule, Turn};
use crate::protocol::link::source::{Control, FrameSource, LinkId, SendIntent};
use crate::protocol::lock;
use crate::protocol::wire::frame::{Frame, SessionFrame};
use crate::protocol::wire::hello::Dialect;
use crate::protocol::wire::peer::Peer;

/// The sending side of one link, shared by its sessions, its read loop and its gRPC stream.
#[derive(Debug)]
pub struct LinkSender {
    /// The link's number within this process; logs show it as `link`.
    pub id: LinkId,
    /// The peer at its other end.
    pub peer: Peer,
    /// The process at its other end; `None` on a plain link.
    pub instance: Option<Instance>,
    /// Whether its sessions can be resumed over another link; not on a plain one.
    pub resumes: bool,
    /// The dialect that both ends have agreed on.
    pub dialect: Dialect,
    /// Notified when a reader of a plain link's session has taken something.
    pub(crate) read: Notify,
    /// Notified at each answer to a ping.
    answered: Notify,
    closed: CancellationToken,
    /// Whether a Drain was said here.
    drained: AtomicBool,
    /// Why it was closed, if another process has the peer's name.
    dismissed: OnceLock<String>,
    waiting: Mutex<Waiting>,
    /// The sessions whose path this is; none once the link has ended.
    members: Mutex<Option<Members>>,
    /// The link for interactive sessions beside this one.
    interactive: Mutex<Option<Box<Interactive>>>,
    /// The bytes that may wait here for sessions that are relayed.
    room: OnceLock<Arc<Budget>>,
    /// The bytes that may wait here for readers, of a plain peer, to which no window was promised.
    unread: OnceLock<Arc<Budget>>,
    round_trip_micros: AtomicU64,
    /// [`u64::MAX`] before the first answer to a ping.
    least_round_trip_micros: AtomicU64,
    made: Instant,
    /// When the peer last sent anything, in milliseconds since the link was made.
    last_received_millis: AtomicU64,
    watch: Watch,
    seen: Seen,
}

impl LinkSender {
    /// The sending side of a new link to `peer`. An extended one is paced.
    pub fn new(id: LinkId, peer: Peer, instance: Option<Instance>, dialect: Dialect) -> Arc<Self> {
        let resumes = dialect != Dialect::Plain;
        Arc::new(Self {
            id,
            peer,
            instance,
            resumes,
            dialect,
            read: Notify::new(),
            answered: Notify::new(),
            closed: CancellationToken::new(),
            drained: AtomicBool::new(false),
            dismissed: OnceLock::new(),
            waiting: Mutex::new(Waiting::new(resumes)),
            members: Mutex::new(Some(Members::default())),
            interactive: Mutex::default(),
            room: OnceLock::new(),
            unread: OnceLock::new(),
            round_trip_micros: AtomicU64::new(FIRST_ROUND_TRIP_MICROS),
            least_round_trip_micros: AtomicU64::new(u64::MAX),
            made: Instant::now(),
            last_received_millis: AtomicU64::new(0),
            watch: Watch::default(),
            seen: Seen::default(),
        })
    }

    /// The next frame to send; none once the link is closed. Cancel safe: a frame is handed out once, and only if
    /// ready.
    pub fn poll_pull(&self, cx: &mut Context<'_>, now: Instant) -> Poll<Option<Frame>> {
        loop {
            let next = self.lock_informed(now).poll_next(cx, now);
            let frame = match std::task::ready!(next) {
                None => return Poll::Ready(None),
                Some(Next::Frame(body)) => {
                    let node = self.peer.node().cloned().unwrap_or_else(NodeName::none);
                    Some(Frame { node, body })
                }
                Some(Next::Reply(frame)) => Some(frame),
                Some(Next::Control(source)) => self.take_control(source, now),
                Some(Next::Turn { turn, longest, small_only }) => {
                    self.take_turn(turn, longest, small_only, now)
                }
            };
            if frame.is_some() {
                return Poll::Ready(frame);
            }
        }
    }

    /// Lets a source wait for its turn, if it has anything to send.
    pub(crate) fn enter<S: FrameSource + 'static>(&self, source: &Arc<S>, intent: &SendIntent) {
        if intent.control.is_none() && intent.data.is_none() {
            return;
        }
        let mut waiting = self.lock();
        if waiting.closed {
            return;
        }
        waiting.sweep();
        match intent.control {
            Some(Control::Answer) => waiting.answers.push_back(source.clone()),
            Some(Control::Credit) => waiting.credits.push_back(source.clone()),
            Some(Control::Needed) => {
                waiting.credits.push_back(source.clone());
                waiting.reports.hurry();
            }
            None => {}
        }
        if let Some((standing, backlog)) = intent.data {
            let longest = waiting.longest_frame();
            waiting.turns.enter(source.clone(), standing, backlog, longest);
        }
        waiting.wake();
    }

    /// Notes that the peer has sent something just now.
    pub fn received(&self, now: Instant) {
        let since = now.saturating_duration_since(self.made).as_millis();
        self.last_received_millis.store(u64::try_from(since).unwrap_or(u64::MAX), Relaxed);
    }

    /// Since when the peer has taken nothing, though something waits for it.
    pub(crate) fn unpulled(&self) -> Option<Instant> {
        self.lock().unpulled
    }

    /// Sends nothing more on this link.
    pub fn close(&self) {
        let mut waiting = self.lock();
        waiting.closed = true;
        (waiting.answers, waiting.credits) = Default::default();
        waiting.turns = Schedule::new();
        waiting.replies.clear();
        waiting.wake();
        drop(waiting);
        self.closed.cancel();
        self.stir();
    }

    /// Waits until the link is closed. Cancel safe.
    pub async fn closed(&self) {
        self.closed.cancelled().await;
    }

    /// Whether the peer does not read its answers: then it gets no new sessions, of which each waits to be answered.
    pub(crate) fn is_behind(&self) -> bool {
        self.lock().answers.len() >= MOST_REPLIES
    }

    /// Whether the link was closed.
    pub fn is_closed(&self) -> bool {
        self.lock().closed
    }

    /// Entries that wait to be sent: answers, and sessions with control or data, stale ones among them.
    pub fn waiting(&self) -> usize {
        let waiting = self.lock();
        waiting.replies.len() + waiting.speakers()
    }

    /// Lets the source send what overtakes data, and wait again if it has more of that.
    fn take_control(&self, source: Arc<dyn FrameSource>, now: Instant) -> Option<Frame> {
        let (frame, again) = source.clone().next_control(self.id, now);
        let frame = self.sent(&*source, frame, now);
        if again {
            self.lock().credits.push_back(source);
        }
        frame
    }

    /// Lets the source send in its turn, and wait again if it has more to send.
    fn take_turn(
        &self,
        turn: Turn<Arc<dyn FrameSource>>,
        longest: usize,
        small_only: bool,
        now: Instant,
    ) -> Option<Frame> {
        let most = if small_only { SMALL } else { usize::MAX };
        let sent = turn.key.clone().next_turn(self.id, &turn, longest, most, now);
        let frame = self.sent(&*turn.key, sent.frame, now);
        let mut waiting = self.lock();
        if sent.bytes > 0 {
            waiting.sent(sent.bytes, sent.standing, now);
        }
        if let Some(backlog) = sent.backlog {
            waiting.turns.enter(turn.key, sent.standing, backlog, longest);
        }
        frame
    }

    /// What a source has sent, as a frame of this link; one that was its last leaves the link.
    fn sent(&self, source: &dyn FrameSource, frame: Option<SessionFrame>, now: Instant) -> Option<Frame> {
        if source.is_over() {
            self.leave_relay(source);
        }
        frame.map(|frame| {
            self.moves(now);
            self.frame(source.key(), frame)
        })
    }

    fn lock(&self) -> MutexGuard<'_, Waiting> {
        lock(&self.waiting)
    }
}

/// Replies that may wait at most; beyond it further ones are dropped.
const MOST_REPLIES: usize = 1000;
/// Assumed before the first answer to a ping where the kernel does not tell.
const FIRST_ROUND_TRIP_MICROS: u64 = 100_000;
