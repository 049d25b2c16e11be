//! Pings and their answers, and what they show: the link's round trip, and whether it has fallen silent.

use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::time::Duration;

use tokio::sync::Notify;
use tokio::time::{Instant, timeout};

use crate::protocol::link::sender::LinkSender;

/// For how long the far end of a link that was dialled here is asked often.
#[derive(Debug, Default)]
pub(super) struct Watch {
    /// In milliseconds since the link was made.
    until_millis: AtomicU64,
    /// Time of the peer's last answer to a ping, on the same clock; 0 before the first answer.
    answered_millis: AtomicU64,
    /// Notified when sessions move again after a pause, and when the link is closed.
    stirred: Notify,
    /// Notified while the far end does not answer.
    silent: Notify,
    /// Notified when sessions move again after a pause.
    moved: Notify,
}

/// What is known of a link at one moment.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(in crate::protocol::link) struct Life {
    /// How often its far end is to be asked; `None`: only when nothing comes from it.
    pub(in crate::protocol::link) ask_every: Option<Duration>,
    /// Since when a ping waits for its answer.
    pub(in crate::protocol::link) unanswered: Option<Instant>,
    /// How long it may; `None` before the first answer, which may take [`FIRST_PATIENCE`].
    pub(in crate::protocol::link) patience: Option<Duration>,
}

impl Life {
    /// When the link counts as silent, if no answer comes.
    pub(in crate::protocol::link) fn silent_at(&self) -> Option<Instant> {
        self.ask_every?;
        Some(self.unanswered? + self.patience.unwrap_or(FIRST_PATIENCE))
    }
}

impl LinkSender {
    /// Asks the peer for a sign of life.
    pub fn ping(&self) {
        let mut waiting = self.lock();
        waiting.ping.get_or_insert_with(Instant::now);
        waiting.wake();
    }

    /// Asks the peer for a sign of life, as the way to it may have changed: without an answer the link soon counts as
    /// silent, even if no session has run there lately.
    pub fn probe(&self) {
        self.watch.until_millis.fetch_max(self.millis(Instant::now()) + millis(PROBED), Relaxed);
        self.ping();
        self.stir();
    }

    /// Returns true if the peer has answered a ping since then: the link has worked in both directions.
    pub(crate) fn has_answered_since(&self, since: Instant) -> bool {
        let answered = self.watch.answered_millis.load(Relaxed);
        answered > 0 && answered >= self.millis(since)
    }

    /// Whether the peer answers a ping within so long. Cancel safe.
    pub async fn answers_within(&self, patience: Duration) -> bool {
        let mut answered = std::pin::pin!(self.answered.notified());
        answered.as_mut().enable();
        self.ping();
        timeout(patience, answered).await.is_ok()
    }

    /// Answers a ping; a newer one takes a waiting one's place.
    pub fn pong(&self, number: Option<u64>) {
        let mut waiting = self.lock();
        waiting.pong = Some(number);
        waiting.wake();
    }

    /// The peer answered ping `number`. Returns the round trip.
    pub fn ponged(&self, number: u64, now: Instant) -> Duration {
        let mut waiting = self.lock();
        let Some(pace) = &mut waiting.pace else { return Duration::ZERO };
        let before = pace.cap();
        pace.pong(number, now);
        let (trip, cap) = (pace.round_trip(), pace.cap());
        waiting.trips.sample(trip);
        waiting.wake();
        drop(waiting);
        self.watch.answered_millis.store(self.millis(now).max(1), Relaxed);
        self.answered.notify_waiters();
        if cap != before {
            let (link, node) = (self.id, self.peer.node().map(tracing::field::display));
            tracing::trace!(%link, node, cap_bytes = cap, before_bytes = before, round_trip = ?trip, "the cap changes");
        }
        self.least_round_trip_micros.fetch_min(micros(trip), Relaxed);
        self.is_as_far(trip);
        trip
    }

    pub(super) fn is_as_far(&self, trip: Duration) {
        self.round_trip_micros.store(micros(trip), Relaxed);
    }

    /// The latest round trip.
    pub fn round_trip(&self) -> Duration {
        Duration::from_micros(self.round_trip_micros.load(Relaxed))
    }

    /// The least round trip so far; none before the first answer.
    pub fn least_round_trip(&self) -> Option<Duration> {
        let micros = self.least_round_trip_micros.load(Relaxed);
        (micros != u64::MAX).then(|| Duration::from_micros(micros))
    }

    /// Waits until the peer of a link that was dialled here has not answered a ping for 1 s and four round trips. Never
    /// returns while no session has run there for ten minutes, nor on a plain link. For one task. Cancel safe.
    pub async fn falls_silent(&self) {
        loop {
            while !self.is_silent(Instant::now()) {
                self.watch.silent.notified().await;
            }
            if timeout(LOOK_AGAIN, self.answers()).await.is_err() {
                return;
            }
        }
    }

    /// Waits until the peer of a link that has fallen silent answers. Cancel safe.
    pub async fn answers(&self) {
        loop {
            let mut answered = std::pin::pin!(self.answered.notified());
            answered.as_mut().enable();
            if !self.is_silent(Instant::now()) {
                return;
            }
            answered.await;
        }
    }

    /// For how long the oldest ping without an answer has waited.
    pub fn unanswered(&self) -> Option<Duration> {
        self.life(Instant::now()).unanswered.map(|since| since.elapsed())
    }

    /// A frame of a session goes over the link.
    pub(in crate::protocol::link) fn moves(&self, now: Instant) {
        let until = self.millis(now) + millis(WATCHED);
        let before = self.watch.until_millis.load(Relaxed);
        if until > before {
            self.watch.until_millis.store(until, Relaxed);
        }
        if until >= before + millis(PAUSE) {
            self.stir();
            self.watch.moved.notify_waiters();
        }
    }

    /// Waits until frames of sessions come or go, or have within the last 2 s. Cancel safe.
    pub async fn moving(&self) {
        loop {
            let mut moved = std::pin::pin!(self.watch.moved.notified());
            moved.as_mut().enable();
            if self.life(Instant::now()).ask_every == Some(ASK_MOVING) {
                return;
            }
            moved.await;
        }
    }

    /// What is known of the link just now.
    pub(in crate::protocol::link) fn life(&self, now: Instant) -> Life {
        let left = self.watch.until_millis.load(Relaxed).saturating_sub(self.millis(now));
        let ask_every = match left {
            0 => None,
            left if left + millis(MOVING) > millis(WATCHED) => Some(ASK_MOVING),
            _ => Some(ASK_WATCHED),
        };
        let waiting = self.lock();
        let sent = waiting.pace.as_ref().and_then(|pace| pace.unanswered());
        let unanswered = sent.into_iter().chain(waiting.ping).min();
        Life { ask_every, unanswered, patience: waiting.trips.patience() }
    }

    /// Wakes who reads the link, for a look.
    pub(super) fn stir(&self) {
        self.watch.stirred.notify_one();
    }

    /// Waits until sessions move after a pause, or the link is probed or closed. For one task. Cancel safe.
    pub(in crate::protocol::link) async fn stirred(&self) {
        self.watch.stirred.notified().await;
    }

    /// Wakes whoever waits for the link to fall silent, for a look.
    pub(in crate::protocol::link) fn fell_silent(&self) {
        self.watch.silent.notify_one();
    }

    fn is_silent(&self, now: Instant) -> bool {
        self.life(now).silent_at().is_some_and(|at| at <= now)
    }

    fn millis(&self, now: Instant) -> u64 {
        millis(now.saturating_duration_since(self.made))
    }
}

fn millis(time: Duration) -> u64 {
    u64::try_from(time.as_millis()).unwrap_or(u64::MAX)
}

fn micros(trip: Duration) -> u64 {
    u64::try_from(trip.as_micros()).unwrap_or(u64::MAX)
}

/// How long the first answer may take, as the round trip is not known yet: that of a line of 1 s.
const FIRST_PATIENCE: Duration = Duration::from_secs(5);
/// Enough for a process that stood still to read the answer that came meanwhile: its clock runs on, and its link seems to
/// have been silent for as long.
const LOOK_AGAIN: Duration = Duration::from_millis(20);
/// For so long behind a frame of a session its link is watched.
const WATCHED: Duration = Duration::from_secs(600);
/// The same behind a probe.
const PROBED: Duration = Duration::from_secs(15);
/// For so long behind such a frame sessions count as moving.
const MOVING: Duration = Duration::from_secs(2);
/// After a pause as long as this a frame wakes who watches the link.
const PAUSE: Duration = Duration::from_secs(1);
/// Between two questions on a link where sessions move.
const ASK_MOVING: Duration = Duration::from_millis(500);
/// Between two questions on a link that is watched.
const ASK_WATCHED: Duration = Duration::from_secs(1);
