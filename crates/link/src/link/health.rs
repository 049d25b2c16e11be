//! Pings and their answers, and what they show: a link's RTT, and whether its remote responds. The times are in
//! [`liveness`](crate::liveness).

use std::sync::atomic::AtomicU64;
use std::sync::atomic::Ordering::Relaxed;
use std::time::Duration;

use educe::Educe;
use tokio::sync::Notify;
use tokio::time::{Instant, timeout};

use crate::link::Link;
use crate::link::queue::PingMeasurement;
use crate::liveness::{CONFIRM_AFTER, LivenessSigns, PAUSE, PROBED, Suspicion, WATCHED};
use tunnel_proto::frame::FrameKind;

/// What is known of a link's life without its lock, and who waits for changes.
#[derive(Debug, Educe)]
#[educe(Default)]
pub(crate) struct LinkHealth {
    #[educe(Default = Instant::now())]
    made: Instant,
    /// The other times are in milliseconds since then. This one is that of the last data from the remote.
    received: AtomicU64,
    /// End of the time in which the remote is pinged often.
    watched_until: AtomicU64,
    /// Time of the remote's last answer to a ping; 0 before the first answer.
    answered_at: AtomicU64,
    /// Time when the remote was last asked to link elsewhere; 0 if it was not.
    move_requested_at: AtomicU64,
    #[educe(Default = AtomicU64::new(INITIAL_RTT_MICROS))]
    latest_rtt_micros: AtomicU64,
    /// [`u64::MAX`] before the first answer to a ping.
    #[educe(Default = AtomicU64::new(u64::MAX))]
    min_rtt_micros: AtomicU64,
    /// Notified at each answer to a ping.
    answered: Notify,
    /// Notified when the read loop has to check the link.
    check: Notify,
    /// Notified while the remote does not answer.
    unresponsive: Notify,
    /// Notified when sessions become active after a pause.
    active: Notify,
}

impl LinkHealth {
    fn millis(&self, now: Instant) -> u64 {
        millis(now.saturating_duration_since(self.made))
    }
}

impl Link {
    /// Requests a ping to the remote.
    pub fn ping(&self) {
        self.with_state(|state| state.queue.request_ping());
    }

    /// Pings the remote because the route to it may have changed. Without an answer the link soon counts as
    /// unresponsive, even if no session has been active recently.
    pub fn probe(&self) {
        let until = self.health.millis(Instant::now()) + millis(PROBED);
        self.health.watched_until.fetch_max(until, Relaxed);
        self.ping();
        self.request_check();
    }

    /// Returns true if the remote has answered a ping since then: the link has worked in both directions.
    pub(crate) fn has_answered_since(&self, since: Instant) -> bool {
        let answered = self.health.answered_at.load(Relaxed);
        answered > 0 && answered >= self.health.millis(since)
    }

    /// Pings the remote, and returns true if it answers in time for that suspicion.
    ///
    /// # Cancel safety
    ///
    /// Cancel safe.
    pub async fn is_alive(&self, suspicion: Suspicion) -> bool {
        let mut answered = std::pin::pin!(self.health.answered.notified());
        answered.as_mut().enable();
        self.ping();
        timeout(suspicion.timeout(), answered).await.is_ok()
    }

    /// Queues the answer to a ping; it replaces an older one that still waits.
    pub fn pong(&self, number: Option<u64>) {
        self.with_state(|state| state.queue.push_pong(FrameKind::Pong(number)));
    }

    /// Handles the answer to ping `number`. Returns the RTT.
    pub fn handle_pong(&self, number: u64, now: Instant) -> Duration {
        let answer = self.with_state(|state| state.queue.handle_pong(number, now));
        let Some(PingMeasurement { rtt, least, before, cap }) = answer else { return Duration::ZERO };
        self.health.answered_at.store(self.health.millis(now).max(1), Relaxed);
        self.health.min_rtt_micros.store(micros(least), Relaxed);
        self.set_rtt(rtt);
        self.health.answered.notify_waiters();
        if cap != before {
            let link = self.id;
            let node = self.peer.node().map(tracing::field::display);
            tracing::trace!(%link, node, cwnd_bytes = cap, previous_cwnd_bytes = before, rtt = ?rtt, "congestion window changed");
        }
        rtt
    }

    pub(crate) fn set_rtt(&self, rtt: Duration) {
        self.health.latest_rtt_micros.store(micros(rtt), Relaxed);
    }

    /// Returns the latest RTT.
    pub fn round_trip(&self) -> Duration {
        Duration::from_micros(self.health.latest_rtt_micros.load(Relaxed))
    }

    /// Returns the latest RTT if one was measured.
    pub fn measured_round_trip(&self) -> Option<Duration> {
        let micros = self.health.latest_rtt_micros.load(Relaxed);
        (micros != INITIAL_RTT_MICROS).then(|| Duration::from_micros(micros))
    }

    /// Returns the minimum RTT of the last minutes, or `None` before the first answer.
    pub fn min_rtt(&self) -> Option<Duration> {
        let micros = self.health.min_rtt_micros.load(Relaxed);
        (micros != u64::MAX).then(|| Duration::from_micros(micros))
    }

    /// Records that the remote has sent something now.
    pub fn handle_received(&self, now: Instant) {
        self.health.received.store(self.health.millis(now), Relaxed);
    }

    /// Returns the time since the remote last sent anything.
    pub fn idle_for(&self) -> Duration {
        self.age().saturating_sub(Duration::from_millis(self.health.received.load(Relaxed)))
    }

    /// Returns when the link was created.
    pub fn created_at(&self) -> Instant {
        self.health.made
    }

    /// Returns the time since the link was created.
    pub fn age(&self) -> Duration {
        self.health.made.elapsed()
    }

    pub(crate) fn note_move_request(&self) {
        self.health.move_requested_at.store(self.health.millis(Instant::now()).max(1), Relaxed);
    }

    /// Returns the time since [`Link::request_move`]; `None` if it was not called.
    pub fn move_requested(&self) -> Option<Duration> {
        let at = self.health.move_requested_at.load(Relaxed);
        (at > 0).then(|| self.age().saturating_sub(Duration::from_millis(at)))
    }

    /// Waits until the remote has not answered a ping in time, by default 1 s and four RTTs.
    ///
    /// Never returns while no session has been active for ten minutes, nor if the remote answers no pings.
    ///
    /// # Cancel safety
    ///
    /// Cancel safe.
    pub async fn wait_unresponsive(&self) {
        loop {
            while !self.is_unresponsive(Instant::now()) {
                self.health.unresponsive.notified().await;
            }
            if timeout(CONFIRM_AFTER, self.wait_responsive()).await.is_err() {
                return;
            }
        }
    }

    /// Waits until the remote of an unresponsive link answers.
    ///
    /// # Cancel safety
    ///
    /// Cancel safe.
    pub(crate) async fn wait_responsive(&self) {
        wait_until(&self.health.answered, || !self.is_unresponsive(Instant::now())).await;
    }

    /// Returns how long the oldest ping has been unanswered.
    pub fn unanswered(&self) -> Option<Duration> {
        self.lock().queue.unanswered().map(|since| since.elapsed())
    }

    /// Records that a frame of a session passes over the link.
    pub(crate) fn mark_active(&self, now: Instant) {
        let until = self.health.millis(now) + millis(WATCHED);
        let before = self.health.watched_until.load(Relaxed);
        if until > before {
            self.health.watched_until.store(until, Relaxed);
        }
        if until >= before + millis(PAUSE) {
            self.request_check();
            self.health.active.notify_waiters();
        }
    }

    /// Waits until frames of sessions are sent or received, or returns at once if any were within the last 2 s.
    ///
    /// # Cancel safety
    ///
    /// Cancel safe.
    pub async fn wait_active(&self) {
        wait_until(&self.health.active, || self.signs(Instant::now()).is_active()).await;
    }

    /// Returns what a check of the link considers.
    pub(crate) fn signs(&self, now: Instant) -> LivenessSigns {
        let watched = self.health.watched_until.load(Relaxed).saturating_sub(self.health.millis(now));
        let state = self.lock();
        LivenessSigns {
            watched_for: Duration::from_millis(watched),
            unanswered: state.queue.unanswered(),
            timeout: state.queue.rtts.ping_timeout(),
            blocked: state.queue.unpulled,
        }
    }

    /// Returns true if the remote has not answered for too long.
    pub fn is_unresponsive(&self, now: Instant) -> bool {
        self.unresponsive_since(now).is_some()
    }

    /// Returns when the oldest unanswered ping was sent, if the link counts as unresponsive.
    pub(crate) fn unresponsive_since(&self, now: Instant) -> Option<Instant> {
        let signs = self.signs(now);
        signs.unanswered.filter(|_| signs.unresponsive_at().is_some_and(|at| at <= now))
    }

    /// Makes the read loop check the link.
    pub(crate) fn request_check(&self) {
        self.health.check.notify_one();
    }

    /// Waits until sessions become active after a pause, or the link is probed or closed. Only one task may wait.
    ///
    /// # Cancel safety
    ///
    /// Cancel safe.
    pub(crate) async fn check_requested(&self) {
        self.health.check.notified().await;
    }

    /// Wakes the task in [`Self::wait_unresponsive`] for a check.
    pub(crate) fn wake_unresponsive(&self) {
        self.health.unresponsive.notify_one();
    }
}

/// Waits until this is true, which is checked at each notification of all waiters. Cancel safe.
async fn wait_until(changed: &Notify, is_over: impl Fn() -> bool) {
    loop {
        let mut notified = std::pin::pin!(changed.notified());
        notified.as_mut().enable();
        if is_over() {
            return;
        }
        notified.await;
    }
}

fn millis(time: Duration) -> u64 {
    u64::try_from(time.as_millis()).unwrap_or(u64::MAX)
}

fn micros(rtt: Duration) -> u64 {
    u64::try_from(rtt.as_micros()).unwrap_or(u64::MAX)
}

/// Assumed before the first answer to a ping if the kernel does not report an RTT.
const INITIAL_RTT_MICROS: u64 = 100_000;
