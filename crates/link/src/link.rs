//! A link: what waits to be sent there, and which sessions run there.
//!
//! Sessions keep the data that they have to send; the link only holds which of them need a turn. A frame is made when
//! the link can take it, under the session's lock, so order and fairness are decided at the last moment.
//!
//! A link has one lock, and each session has one; they are never held together. The puller takes the next entry under
//! the link's lock, releases it, and requests a frame from the session under the session's. In between the session may
//! move to another link, or end. So each entry has the number of the session's stay on the link, and an entry of an
//! earlier stay yields no frame. Nothing is dropped, logged or woken under the link's lock.

pub(crate) mod ack_pacing;
pub mod health;
pub mod interactive;
pub mod pacing;
pub mod plain_state;
pub mod queue;
pub mod sessions;
pub mod signals;
pub mod stats;

use std::sync::atomic::AtomicBool;
use std::sync::{Arc, OnceLock};
use std::task::{Context, Poll};
use std::time::Duration;

use tokio::time::Instant;
use tokio_util::sync::CancellationToken;

use crate::frame_log::log_frame;
use crate::link::health::LinkHealth;
use crate::link::interactive::InteractiveLink;
use crate::link::plain_state::PlainLinkState;
use crate::link::queue::{MAX_QUEUED_REPLIES, SendItem, SendQueue};
use crate::link::sessions::LinkSessions;
use crate::link::stats::LinkStats;
use crate::lock::{Mutex, MutexGuard, store_waker};
use crate::schedule::frame_source::{FrameSource, QueueRequest, QueuedSource, Turn};
use tunnel_proto::budget::Budget;
use tunnel_proto::frame::{Frame, FrameKind, Remote, SessionFrame, SessionKey};
use tunnel_proto::names::{Instance, NodeName};
use tunnel_proto::state::LinkId;

/// A link, shared by its sessions, its [reader](crate::link_reader::LinkReader) and its gRPC stream.
#[derive(Debug)]
pub struct Link {
    /// The link's number within this process; the log field `link`.
    pub id: LinkId,
    /// The remote end.
    pub peer: Remote,
    /// The remote process; `None` on a plain link.
    pub instance: Option<Instance>,
    /// What the remote can do.
    pub abilities: LinkAbilities,
    /// What it shares with its sessions if the remote is plain.
    pub(crate) plain: OnceLock<Arc<PlainLinkState>>,
    /// For those who wait. The queue has a flag of its own, under the lock: nothing is queued after the end.
    closed: CancellationToken,
    /// Whether this end has announced that it leaves the link.
    drained: AtomicBool,
    /// Why the link was closed, if another process has the remote's name.
    pub(crate) dismissed: OnceLock<String>,
    state: Mutex<LinkState>,
    /// Budget for the bytes that wait here for relayed sessions.
    relay_budget: OnceLock<Arc<Budget>>,
    health: LinkHealth,
    stats: LinkStats,
}

/// What the remote of a link can do. Its hello decides that once.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct LinkAbilities {
    /// Whether it resumes sessions on another link, which may be a second one of its process. So its sessions outlive a
    /// link, and servers relay them.
    pub resumes: bool,
    /// Whether it takes signals, and answers pings by their numbers.
    pub signals: bool,
    /// How long a target may be dialled for it.
    pub(crate) dial_timeout: Duration,
}

impl LinkAbilities {
    /// Returns the abilities of a process of this program, or of a plain remote if it has no instance.
    fn of(instance: Option<Instance>) -> Self {
        match instance {
            Some(_) => Self { resumes: true, signals: true, dial_timeout: DIAL_TIMEOUT },
            None => Self { resumes: false, signals: false, dial_timeout: PLAIN_DIAL_TIMEOUT },
        }
    }
}

/// Dial timeout at an edge; shorter than the timeout of an opening, which is 12 s by default.
const DIAL_TIMEOUT: Duration = Duration::from_secs(10);
/// The same for a plain server, which waits 5 s.
const PLAIN_DIAL_TIMEOUT: Duration = Duration::from_millis(4500);

/// What changes of a [`Link`], under its lock.
#[derive(Debug)]
pub(crate) struct LinkState {
    pub(crate) queue: SendQueue,
    /// The sessions that have their path over this link.
    pub(crate) sessions: LinkSessions,
    /// The link for interactive sessions next to this one.
    pub(crate) interactive: Option<Box<InteractiveLink>>,
}

impl Link {
    /// Creates a new link to `peer`. An extended link has congestion control.
    pub fn new(id: LinkId, peer: Remote, instance: Option<Instance>) -> Arc<Self> {
        let abilities = LinkAbilities::of(instance);
        Arc::new(Self {
            id,
            peer,
            instance,
            abilities,
            plain: OnceLock::new(),
            closed: CancellationToken::new(),
            drained: AtomicBool::new(false),
            dismissed: OnceLock::new(),
            state: Mutex::new(LinkState {
                queue: SendQueue::new(abilities.signals),
                sessions: LinkSessions::default(),
                interactive: None,
            }),
            relay_budget: OnceLock::new(),
            health: LinkHealth::default(),
            stats: LinkStats::default(),
        })
    }

    /// Polls for the next frame to send. Returns `None` once the link is closed.
    ///
    /// # Cancel safety
    ///
    /// Cancel safe: a frame is handed out once, and only if ready.
    pub fn poll_pull(&self, cx: &mut Context<'_>, now: Instant) -> Poll<Option<Frame>> {
        loop {
            let mut state = self.lock_informed(now);
            let next = state.queue.poll_next(cx, now);
            let replaced = if next.is_pending() { store_waker(&mut state.queue.outbound, cx) } else { None };
            drop(state);
            drop(replaced);
            let frame = match std::task::ready!(next) {
                None => return Poll::Ready(None),
                Some(SendItem::Frame(body)) => {
                    let node = self.peer.frame_node().cloned().unwrap_or_else(NodeName::none);
                    Some(Frame { node, body })
                }
                Some(SendItem::Reply(frame)) => Some(frame),
                Some(SendItem::Turn(turn)) => self.take_frame(turn, now),
            };
            if let Some(frame) = frame {
                log_frame("frame sent", self.id, &frame);
                return Poll::Ready(Some(frame));
            }
        }
    }

    /// Queues a source for its turn if it has anything to send.
    pub(crate) fn enter<S: FrameSource + 'static>(&self, source: &Arc<S>, request: &QueueRequest) {
        if request.is_empty() {
            return;
        }
        let entry = QueuedSource { source: source.clone(), stay: request.stay };
        let _stale = self.with_state(|state| state.queue.handle_request(entry, request));
    }

    /// Closes the link: nothing more is sent on it.
    pub fn close(&self) {
        let _waiting = self.with_state(|state| state.queue.close());
        self.closed.cancel();
        self.request_check();
    }

    /// Waits until the link is closed.
    ///
    /// # Cancel safety
    ///
    /// Cancel safe.
    pub async fn closed(&self) {
        self.closed.cancelled().await;
    }

    /// Returns true if the remote does not take the answers to this client's sessions. Then it gets no new ones.
    pub(crate) fn is_answer_queue_full(&self, client: &str) -> bool {
        let turns = &self.lock().queue.waiting.turns;
        turns.len() >= MAX_QUEUED_REPLIES && turns.answers_of(client) >= MAX_QUEUED_REPLIES
    }

    /// Returns true if the link was closed.
    pub fn is_closed(&self) -> bool {
        self.closed.is_cancelled()
    }

    /// Returns the number of entries that wait to be sent: replies, and sessions with control frames or data, including
    /// stale entries.
    pub fn waiting(&self) -> usize {
        let state = self.lock();
        state.queue.waiting.replies.len() + state.queue.queued_entries()
    }

    /// Returns the number of signals and replies that wait to be sent; sessions take turns with them.
    pub fn waiting_replies(&self) -> usize {
        self.lock().queue.waiting.replies.len()
    }

    /// Takes a frame from the source in its turn, and queues the source again if it has more to send. A relayed source
    /// that has sent its last frame leaves the link.
    fn take_frame(&self, mut turn: Turn, now: Instant) -> Option<Frame> {
        let mut sent = turn.entry().source.clone().next_frame(self.id, &mut turn, now);
        let source = &turn.entry().source;
        if sent.is_over {
            self.detach_relay(&**source);
        }
        let frame = sent.frame.take().map(|frame| self.frame(source.key(), frame));
        if frame.is_some() {
            self.mark_active(now);
        }
        if sent.bytes > 0 || sent.backlog.is_some() || sent.credit {
            let _done = self.with_state(|state| state.queue.handle_sent(turn, &sent, now));
        }
        frame
    }

    /// Creates a frame about a session. On the link of an edge or a user's program only Open and Resume have another
    /// node than the link's.
    fn frame(&self, session: &SessionKey, frame: SessionFrame) -> Frame {
        let asks = matches!(frame, SessionFrame::Open { .. } | SessionFrame::Resume { .. });
        let node = self.peer.frame_node().filter(|_| !asks).unwrap_or(&session.node).clone();
        Frame { node, body: FrameKind::Session(session.id, session.category, frame) }
    }

    pub(crate) fn lock(&self) -> MutexGuard<'_, LinkState> {
        self.state.lock()
    }

    /// Runs `step` under the lock. If it has queued anything, wakes the gRPC stream afterwards. What the step returns
    /// is dropped without the lock.
    pub(crate) fn with_state<T>(&self, step: impl FnOnce(&mut LinkState) -> T) -> T {
        let mut state = self.lock();
        let result = step(&mut state);
        let waker = state.queue.take_waker();
        drop(state);
        if let Some(waker) = waker {
            waker.wake();
        }
        result
    }
}
