//! What waits to be said on one link, and in which order it is said.
//!
//! Sessions keep what they have to say; the outbox holds only who wants to speak. A frame is made when the link can
//! take it, under the session's lock, so order and fairness are decided at the last moment. Two locks, never both at
//! once: this one says who is next, the session's says what.

mod waiting;

use std::collections::{HashMap, VecDeque};
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::sync::{Arc, Mutex, MutexGuard, Weak};
use std::task::{Context, Poll};
use std::time::Duration;

use tokio::sync::Notify;
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;

use waiting::{Next, Waiting};

use super::frame::{Body, Category, Code, Frame, Refusal, Word};
use super::lock;
use super::schedule::{SMALL, Schedule, Turn};
use super::session::Shared;
use super::session::end::LinkId;
use crate::names::{NodeName, SessionId};

/// The sending side of one link, shared by its sessions, its read loop and its gRPC stream.
#[derive(Debug)]
pub struct Outbox {
    /// Which link.
    pub id: LinkId,
    /// Whose link.
    pub node: NodeName,
    /// Whether the peer can take sessions up again on another link.
    pub resumes: bool,
    /// Told when a reader of a plain link's session has taken something.
    pub(super) read: Notify,
    /// Told at each answer to a ping.
    answered: Notify,
    closed: CancellationToken,
    waiting: Mutex<Waiting>,
    /// The sessions whose path this is; none once the link has ended.
    members: Mutex<Option<HashMap<SessionId, Weak<Shared>>>>,
    round_trip_micros: AtomicU64,
}

/// Someone who wants to speak.
#[derive(Debug)]
pub(super) struct Wish {
    /// Has an answer or credit, which overtake data.
    pub(super) control: bool,
    /// Has data: where its account stands, and how many bytes.
    pub(super) data: Option<(u64, usize)>,
}

impl Outbox {
    /// The sending side of a new link to or from `node`. A link whose peer `resumes` is paced.
    pub fn new(id: LinkId, node: NodeName, resumes: bool) -> Arc<Self> {
        Arc::new(Self {
            id,
            node,
            resumes,
            read: Notify::new(),
            answered: Notify::new(),
            closed: CancellationToken::new(),
            waiting: Mutex::new(Waiting::new(resumes)),
            members: Mutex::new(Some(HashMap::new())),
            round_trip_micros: AtomicU64::new(FIRST_ROUND_TRIP_MICROS),
        })
    }

    /// The next frame to say; none once the link is closed. Cancel safe: a frame is handed out once and only if ready.
    pub fn poll_pull(&self, cx: &mut Context<'_>, now: Instant) -> Poll<Option<Frame>> {
        loop {
            let body = match std::task::ready!(self.poll_next(cx, now)) {
                None => return Poll::Ready(None),
                Some(Next::Frame(body)) => body,
                Some(Next::Reply(frame)) => return Poll::Ready(Some(frame)),
                Some(Next::Control(session)) => match session.speak_control(self.id, now) {
                    Some(word) => Body::Session(session.id, session.category, word),
                    None => continue,
                },
                Some(Next::Turn { turn, longest, small_only }) => {
                    let session = turn.key.clone();
                    match self.take_turn(turn, longest, small_only, now) {
                        Some(word) => Body::Session(session.id, session.category, word),
                        None => continue,
                    }
                }
            };
            return Poll::Ready(Some(Frame { node: self.node.clone(), body }));
        }
    }

    /// Lets a session wait for its turn.
    pub(super) fn enter(&self, session: &Arc<Shared>, wish: &Wish) {
        let mut waiting = self.lock();
        if waiting.closed {
            return;
        }
        if wish.control {
            waiting.control.push_back(session.clone());
        }
        if let Some((account, backlog)) = wish.data {
            let longest = waiting.longest_frame();
            waiting.turns.enter(session.clone(), account, backlog, longest);
        }
        waiting.wake();
    }

    /// Answers a frame about a session that is not ours; more than the bound are dropped, as the peer asks again.
    pub(super) fn reply(&self, id: SessionId, category: Category, word: Word) {
        let mut waiting = self.lock();
        if waiting.replies.len() < MOST_REPLIES {
            waiting
                .replies
                .push_back(Frame { node: self.node.clone(), body: Body::Session(id, category, word) });
            waiting.wake();
        }
    }

    /// Asks the peer for a sign of life.
    pub fn ping(&self) {
        let mut waiting = self.lock();
        waiting.ping = true;
        waiting.wake();
    }

    /// Whether the peer answers a ping within so long. Cancel safe.
    pub async fn answers_within(&self, patience: Duration) -> bool {
        let mut answered = std::pin::pin!(self.answered.notified());
        answered.as_mut().enable();
        self.ping();
        tokio::time::timeout(patience, answered).await.is_ok()
    }

    /// Answers a ping; a newer one takes a waiting one's place.
    pub fn pong(&self, number: Option<u64>) {
        let mut waiting = self.lock();
        waiting.pong = Some(number);
        waiting.wake();
    }

    /// The peer answered ping `number`. Returns the round trip.
    pub fn ponged(&self, number: u64, now: Instant) -> Duration {
        self.answered.notify_waiters();
        let mut waiting = self.lock();
        let Some(pace) = &mut waiting.pace else { return Duration::ZERO };
        pace.pong(number, now);
        let trip = pace.round_trip();
        waiting.wake();
        drop(waiting);
        self.round_trip_micros.store(u64::try_from(trip.as_micros()).unwrap_or(u64::MAX), Relaxed);
        trip
    }

    /// The latest round trip.
    pub fn round_trip(&self) -> Duration {
        Duration::from_micros(self.round_trip_micros.load(Relaxed))
    }

    /// Nothing more is said on this link.
    pub fn close(&self) {
        let mut waiting = self.lock();
        waiting.closed = true;
        (waiting.control, waiting.turns) = (VecDeque::new(), Schedule::new());
        waiting.replies.clear();
        waiting.wake();
        drop(waiting);
        self.closed.cancel();
    }

    /// Waits until the link is closed. Cancel safe.
    pub async fn closed(&self) {
        self.closed.cancelled().await;
    }

    /// Makes the puller look again, for what a dialect has to say by itself.
    pub(super) fn rouse(&self) {
        self.lock().wake();
    }

    /// Whether the peer does not read its answers: then it gets no new sessions, of which each waits to be answered.
    pub(super) fn is_behind(&self) -> bool {
        self.lock().control.len() >= MOST_REPLIES
    }

    /// Whether the link was closed.
    pub fn is_closed(&self) -> bool {
        self.lock().closed
    }

    /// Number of sessions whose path this link is.
    pub fn sessions(&self) -> usize {
        lock(&self.members).as_ref().map_or(0, HashMap::len)
    }

    /// Entries that wait to be said: answers, and sessions with control or data, stale ones among them.
    pub fn waiting(&self) -> usize {
        let waiting = self.lock();
        waiting.replies.len() + waiting.control.len() + waiting.turns.len()
    }

    /// Makes the session known as one that runs here. False if the link has ended.
    pub(super) fn join(&self, session: &Arc<Shared>) -> bool {
        let mut members = lock(&self.members);
        if let Some(members) = members.as_mut() {
            members.insert(session.id, Arc::downgrade(session));
        }
        members.is_some()
    }

    /// The session runs elsewhere, or is over.
    pub(super) fn part(&self, id: SessionId) {
        if let Some(members) = lock(&self.members).as_mut() {
            members.remove(&id);
        }
    }

    /// Closes the link for good and returns all that ran on it.
    pub(super) fn disband(&self) -> Vec<Arc<Shared>> {
        self.close();
        let members = lock(&self.members).take();
        members.into_iter().flatten().filter_map(|(_, session)| session.upgrade()).collect()
    }

    /// Unread bytes of a session that runs here.
    pub(super) fn queued(&self, id: SessionId) -> usize {
        let session = lock(&self.members).as_ref().and_then(|m| m.get(&id)).and_then(Weak::upgrade);
        session.map_or(0, |s| s.queued())
    }

    /// Resets the session with most unread bytes.
    pub(super) fn reset_fullest(&self) {
        let members: Vec<_> = lock(&self.members).iter().flatten().filter_map(|(_, s)| s.upgrade()).collect();
        if let Some(session) = members.into_iter().max_by_key(|s| s.queued()) {
            session
                .reset_unread(Refusal::new(Code::Busy, "its reader is too slow for a link that cannot wait"));
        }
    }

    fn poll_next(&self, cx: &Context<'_>, now: Instant) -> Poll<Option<Next>> {
        self.lock().poll_next(cx, now)
    }

    /// Lets the session speak, and wait again if it has more to say.
    fn take_turn(
        &self,
        turn: Turn<Arc<Shared>>,
        longest: usize,
        small_only: bool,
        now: Instant,
    ) -> Option<Word> {
        let most = if small_only { SMALL } else { usize::MAX };
        let spoken = turn.key.speak_turn(self.id, &turn, longest, most, now);
        let mut waiting = self.lock();
        if spoken.bytes > 0 {
            waiting.turns.said(spoken.account);
            if let Some(pace) = &mut waiting.pace {
                pace.pulled(spoken.bytes);
            }
        }
        if let Some(backlog) = spoken.backlog {
            waiting.turns.enter(turn.key, spoken.account, backlog, longest);
        }
        spoken.word
    }

    fn lock(&self) -> MutexGuard<'_, Waiting> {
        lock(&self.waiting)
    }
}

/// The reply to a session that we do not know.
pub(super) fn unknown(epoch: u64) -> Word {
    Word::Reset { epoch, refusal: Refusal::new(Code::Unknown, "this process does not know the session") }
}

/// Replies that may wait: beyond it the peer is flooding, and gets none.
const MOST_REPLIES: usize = 1000;
/// Assumed before the first answer to a ping.
const FIRST_ROUND_TRIP_MICROS: u64 = 100_000;
